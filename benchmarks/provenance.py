"""How a result was made.

Usage: python benchmarks/provenance.py    (the digest of the library as it lies here, to compare with a result's)
"""

import hashlib
import os
import platform
import sys
from pathlib import Path

import torch

import dissensus


def command_line() -> str:
    """The command that is running, without the place of its results, which is nobody's business."""
    words = list(sys.argv)
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return " ".join(["python", *words])


def library() -> dict[str, str]:
    """Version and digest of the library's source, so that a result tells which code it is of."""
    root = Path(dissensus.__file__).parent
    together = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        together.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return {"dissensus": dissensus.__version__, "source": together.hexdigest()[:12]}


def how_made() -> dict[str, str]:
    """Command, machine and versions of the process that is running."""
    return {
        "command": command_line(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **library(),
    }


if __name__ == "__main__":
    print(library())
