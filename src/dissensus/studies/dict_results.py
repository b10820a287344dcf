"""Summaries as plain dictionaries, for pages that do not take `Summary` yet."""

from pathlib import Path
from typing import Any

from dissensus.studies.results import Report
from dissensus.studies.run_folders import SHIPPED, find, ship
from dissensus.studies.summary import summarise

__all__ = ["SHIPPED", "found", "ship", "summary"]


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """The summary of a report."""
    return summarise(Report.from_json(report)).to_json()


def found(name: str, root: Path) -> dict[str, Any] | None:
    """The result of a study."""
    result = find(name, root)
    return None if result is None else {**result.to_json(), "origin": result.origin}
