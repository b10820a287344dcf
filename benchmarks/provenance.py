"""How a result was made."""

import sys


def command_line() -> str:
    """The command that is running, without the place of its results, which is nobody's business."""
    words = list(sys.argv)
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return " ".join(["python", *words])
