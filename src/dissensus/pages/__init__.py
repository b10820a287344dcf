"""Pages: one way to lay out a number, a table and a picture, in self-contained HTML files."""
