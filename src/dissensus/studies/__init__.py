"""Studies: what is trained, what is measured, and the pages that show it."""
