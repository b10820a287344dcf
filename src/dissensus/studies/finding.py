"""The library of studies under its former name, until its last users have moved."""

from dissensus.studies.library import SPECS as LIBRARY
from dissensus.studies.library import load, names, read

__all__ = ["LIBRARY", "load", "names", "read"]
