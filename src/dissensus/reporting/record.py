"""A report: numbers with intervals, curves, examples and answers, as plain data, as text and as a page."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dissensus import checks
from dissensus.auditing import Audit
from dissensus.metrics.intervals import Interval
from dissensus.output_files import write_output
from dissensus.pages import html
from dissensus.reporting.content import Content, size, title
from dissensus.reporting.judging import Finding, verdict
from dissensus.reporting.page import page


@dataclass(frozen=True)
class Report:
    """The result of `dissensus.report`."""

    facts: dict[str, Any]
    """Task, kind, loss, pool, names, and the sizes of all sets."""
    findings: list[Finding]
    """Questions at a glance, each with an answer, the kind of news that it is, and a sentence with the numbers."""
    numbers: dict[str, Interval]
    """Every number of the ensemble with its 95 % interval, by name."""
    members: dict[str, Interval]
    """The same of the members, averaged over them."""
    shifted: dict[str, dict[str, Interval]]
    """Numbers on every shifted set; ``auroc: SCORE`` says how well a score tells it from `data`."""
    curves: dict[str, Any]
    """What the figures show: calibration, risk over coverage, error over uncertainty."""
    examples: dict[str, list[dict[str, Any]]]
    """The ``hardest`` and most ``disputed`` examples, by row."""
    audit: Audit
    """Is the ensemble's diversity real?"""
    content: Content = field(repr=False, compare=False)
    """What the page shows besides: pictures and rows of inputs, scores of all examples."""

    @property
    def verdict(self) -> str:
        """``sound``, ``reservations``, ``problems`` or ``undecided``."""
        return verdict(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, without pictures."""
        return {
            "verdict": self.verdict,
            "findings": [answer._asdict() for answer in self.findings],
            "facts": self.facts,
            "numbers": {
                name: {"title": title(name, self.facts["task"]), **_plain(value)}
                for name, value in self.numbers.items()
            },
            "members": {name: _plain(value) for name, value in self.members.items()},
            "shifted": {name: {k: _plain(v) for k, v in part.items()} for name, part in self.shifted.items()},
            "curves": _finite(self.curves),
            "examples": _finite(self.examples),
            "audit": json.loads(self.audit.to_json()),
        }

    def to_json(self) -> str:
        """Everything as JSON, without pictures."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)

    def summary(self) -> str:
        """Answers and numbers as plain text."""
        lines = [f"{self.verdict}: {size(self.facts)}", ""]
        lines += [f"{answer.question}  {answer.answer}\n  {answer.sentence}" for answer in self.findings]
        lines += ["", f"{'':44s} {'ensemble':>10s}   95 % interval"]
        task = self.facts["task"]
        lines += [_line(title(name, task), value, self.members.get(name)) for name, value in self.numbers.items()]
        for name, part in self.shifted.items():
            lines += ["", f"shifted data: {name}", *(_line(title(k, task), v) for k, v in part.items())]
        return "\n".join(lines)

    def page(self, path: str | Path, title: str = "") -> Path:
        """Write a self-contained HTML page, as ``dissensus report`` does, and return its path.

        Args:
            path: The file, in which ``~`` is the home folder; missing folders above it are made.
            title: The heading; that of the report by default.
        """
        file = checks.path("path", path).expanduser()
        if file.is_dir():
            checks.refuse("path", "name a file", f"the folder {file}", "Add a name, such as report.html.", OSError)
        text = html(page(self, title or self.facts["title"]))
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_output(file, text.encode())
        except OSError as reason:
            got = f"{file} ({reason.strerror or reason})"
            checks.refuse("path", "be a file that can be written", got, "Choose another folder.", OSError)
        return file


def _line(title: str, value: Interval, members: Interval | None = None) -> str:
    beside = f"   members {members.value:.4g}" if members is not None else ""
    return f"  {title:42s} {value.value:10.4g}   {value.low:.4g} to {value.high:.4g}{beside}"


def _plain(value: Interval) -> dict[str, float | None]:
    return {name: _finite(number) for name, number in value._asdict().items()}


def _finite(value: Any) -> Any:
    """Plain data in which numbers that are not finite are None."""
    if isinstance(value, Interval):
        return _plain(value)
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
