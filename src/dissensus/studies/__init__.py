"""Studies: what is trained, what is drawn, and the page that shows it."""
