"""How a result was made.

Usage: python benchmarks/provenance.py    (the digest of the library as it lies here, to compare with a result's)
"""

import os
import platform
import sys

import torch

import dissensus
from dissensus.fingerprint import source_digest


def command_line() -> str:
    """The command that is running, without the place of its results, which is nobody's business."""
    words = list(sys.argv)
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return " ".join(["python", *words])


def library() -> dict[str, str]:
    """Version and digest of the library's source, so that a result tells which code it is of."""
    return {"dissensus": dissensus.__version__, "source": source_digest()}


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
