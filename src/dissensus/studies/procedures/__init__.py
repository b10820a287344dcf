"""Procedures: the ways to make a study's rows, one file each; `builtin` has the table of them."""
