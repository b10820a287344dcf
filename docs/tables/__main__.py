"""Write the tables of these pages from results that benchmarks and studies have left.

Usage: python docs/tables [--check]

A table stands in a page between a comment with its name, such as ``<!-- members -->``, and ``<!-- end -->``. There may
be nothing between the two: a section whose benchmark has no result yet is left out. Every module here has the tables of
one page. With ``--check`` nothing is written, and stale pages are named.
"""

import sys

import audit
import detection
import diversity
import masks
import reliability
import robustness
import speed
from layout import DOCS

PAGES = {
    "audit.md": audit.TABLES,
    "detection.md": detection.TABLES,
    "diversity.md": diversity.TABLES,
    "masks.md": masks.TABLES,
    "reliability.md": reliability.TABLES,
    "robustness.md": robustness.TABLES,
    "speed.md": speed.TABLES,
}
END = "<!-- end -->"


def rendered(name: str) -> str:
    """The text of a page with its tables as they are now."""
    text = (DOCS / name).read_text()
    for mark, table in PAGES[name].items():
        before, after = text.split(f"<!-- {mark} -->\n")
        content = table()
        block = f"\n{content}\n" if content else ""
        text = f"{before}<!-- {mark} -->\n{block}{END}{after.split(END, 1)[1]}"
    return text


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit("usage: python docs/tables [--check]: write the tables of the pages, or name the pages that are stale")
    pages = {name: rendered(name) for name in PAGES}
    if sys.argv[1:]:
        stale = [name for name, text in pages.items() if (DOCS / name).read_text() != text]
        sys.exit(f"stale: {', '.join(stale)}; run python docs/tables" if stale else 0)
    for name, text in pages.items():
        (DOCS / name).write_text(text)
