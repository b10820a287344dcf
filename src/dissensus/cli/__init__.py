"""The command line: the only room that prints."""

import sys

try:
    import rich  # noqa: F401
    import typer  # noqa: F401
except ImportError as missing:
    sys.exit(f"the command line needs {missing.name}: pip install 'dissensus[cli]'")

from dissensus.cli.main import app, main

__all__ = ["app", "main"]
