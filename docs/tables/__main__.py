"""Write the tables and the numbers of these pages from results that benchmarks and studies have left.

Usage: python docs/tables [--check] [PAGE ...]

A table stands in a page between a comment with its name, such as ``<!-- members -->``, and ``<!-- end -->``. There may
be nothing between the two: a section whose benchmark has no result yet is left out. A number in a sentence stands
between ``<!--=name-->`` and ``<!--=-->``. Every module here has the tables (``TABLES``) and the numbers (``values``) of
one page; ``papers`` has those of several. With ``--check`` nothing is written, and stale pages are named.
"""

import re
import sys
from typing import Any

import audit
import cluster
import comparison
import detection
import diversity
import estimators
import masks
import models
import papers
import parallel
import production
import readme
import reliability
import robustness
import sharing
import speed
import training
import tuning
import uncertainty
from layout import ROOT

PAGES: dict[str, Any] = {
    "README.md": readme,
    "docs/audit.md": audit,
    "docs/cluster.md": cluster,
    "docs/comparison.md": comparison,
    "docs/detection.md": detection,
    "docs/diversity.md": diversity,
    "docs/estimators.md": estimators,
    "docs/masks.md": masks,
    "docs/models.md": models,
    "docs/parallel.md": parallel,
    "docs/production.md": production,
    "docs/reliability.md": reliability,
    "docs/robustness.md": robustness,
    "docs/sharing.md": sharing,
    "docs/speed.md": speed,
    "docs/training.md": training,
    "docs/tuning.md": tuning,
    "docs/uncertainty.md": uncertainty,
    **papers.PAGES,
}
END = "<!-- end -->"
VALUE = re.compile(r"<!--=([\w-]+)-->(.*?)<!--=-->", flags=re.DOTALL)


def rendered(name: str) -> str:
    """The text of a page with its tables and numbers as they are now."""
    text = (ROOT / name).read_text()
    for mark, table in getattr(PAGES[name], "TABLES", {}).items():
        before, after = text.split(f"<!-- {mark} -->\n")
        content = table()
        block = f"\n{content}\n" if content else ""
        text = f"{before}<!-- {mark} -->\n{block}{END}{after.split(END, 1)[1]}"
    return with_values(text, getattr(PAGES[name], "values", dict)(), name)


def with_values(text: str, values: dict[str, str], name: str) -> str:
    """A page with its numbers replaced; marks without a number, and numbers without a mark, are refused."""
    marks = {match[1] for match in VALUE.finditer(text)}
    for problem, names in (("no value for", marks - set(values)), ("no mark for", set(values) - marks)):
        if names:
            sys.exit(f"{name}: {problem} {', '.join(sorted(names))}")
    if re.search(r"^[ >]*(?:[-*] )?<!--=", text, flags=re.MULTILINE):
        sys.exit(f"{name}: a line begins with a number's mark, which Markdown takes for a block of HTML")
    return VALUE.sub(lambda match: f"<!--={match[1]}-->{values[match[1]]}<!--=-->", text)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    check = "--check" in arguments
    names = [name for name in arguments if name != "--check"]
    if set(names) - set(PAGES):
        sys.exit(
            "usage: python docs/tables [--check] [PAGE ...]: write tables and numbers, or name pages that are stale"
        )
    pages = {name: rendered(name) for name in names or PAGES}
    if check:
        stale = [name for name, text in pages.items() if (ROOT / name).read_text() != text]
        sys.exit(f"stale: {', '.join(stale)}; run python docs/tables" if stale else 0)
    for name, text in pages.items():
        (ROOT / name).write_text(text)
