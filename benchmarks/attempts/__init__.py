"""Attempts to break dissensus: one file per family; `benchmarks/chaos.py` runs them."""
