"""What `tune` returns: the choice, what it gains, the frontier of error against diversity, and what was spent."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import dissensus.train.tuning.page as pages
from dissensus.auditing import Audit
from dissensus.ensemble import Ensemble
from dissensus.output_files import write_output
from dissensus.pages import html
from dissensus.train.tuning.choosing import Gain
from dissensus.train.tuning.records import Candidate, Spent, audit_words, in_order


@dataclass(frozen=True)
class Tuned:
    """The result of `dissensus.tune`."""

    best: Candidate
    """The choice: the best candidate on validation rows that the audit does not call collusive, or independent training
    where nothing is better by more than a standard error, or where the gain is not positive."""
    independent: Candidate | None
    """The best independent candidate, the reference; None where none was trained to the end."""
    candidates: list[Candidate]
    """All, in the order of their training."""
    gain: Gain | None
    """What choosing in this way gains on test rows over independent training; None without a reference."""
    member_change: float
    """By how many per cent members of the choice are worse than independent ones on test rows; points for shares."""
    choices: list[dict[str, Any]]
    """What every split chooses by itself."""
    sentence: str
    """The result in one sentence."""
    audit: Audit | None
    """Of `ensemble`, on its test rows; None where the loss cannot be audited."""
    ensemble: Ensemble = field(repr=False, compare=False)
    """The run of the choice with the best validation, in evaluation mode."""
    spent: Spent
    settings: dict[str, Any]
    """What was asked for: metric, mode, epochs, splits, seeds, rungs of every bracket, numbers of rows."""

    @property
    def frontier(self) -> list[Candidate]:
        """Candidates that no other beats in both test error and diversity, trained to the end, best error first."""
        whole = [c for c in self.candidates if c.status not in ("dropped", "failed") and math.isfinite(c.test)]
        sign = 1.0 if self.settings["mode"] == "min" else -1.0
        return [
            one
            for one in sorted(whole, key=lambda candidate: sign * candidate.test)
            if not any(
                sign * other.test <= sign * one.test
                and other.diversity >= one.diversity
                and (other.test, other.diversity) != (one.test, one.diversity)
                for other in whole
            )
        ]

    @property
    def ordered(self) -> list[Candidate]:
        """Candidates that were trained longest first, and of these the best."""
        return in_order(self.candidates, self.settings["mode"])

    def table(self, *, frame: bool | None = None) -> Any:
        """One row per candidate, best first: its settings, how far it came, and its numbers.

        A pandas frame where pandas is installed, else a list of dicts; ``frame`` decides between them.
        """
        rows = [
            {
                **candidate.point,
                "status": candidate.status,
                "epochs": candidate.epochs,
                "validation": candidate.value,
                "standard_error": candidate.standard_error,
                "ahead": candidate.ahead,
                "ahead_error": candidate.ahead_error,
                "test": candidate.test,
                "members": candidate.members,
                "diversity": candidate.diversity,
                "audit": audit_words(candidate.verdicts),
            }
            for candidate in self.ordered
        ]
        if frame is False:
            return rows
        try:
            import pandas
        except ImportError:
            if frame:
                raise ImportError("a frame needs pandas: pip install 'dissensus[data]'") from None
            return rows
        return pandas.DataFrame(rows)

    def page(self, path: str | Path | None = None, title: str = "") -> str:
        """A page with figures, as HTML; written to ``path`` if it is given. Needs matplotlib."""
        content = html(pages.page(self, title or "How much diversity?"))
        if path is not None:
            write_output(Path(path).expanduser(), content.encode())
        return content

    def plot(self) -> Any:
        """Error against diversity of all candidates, as a matplotlib figure."""
        return pages.frontier_figure(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the weights, as JSON takes it."""
        return {
            "sentence": self.sentence,
            "best": _plain(self.best),
            "independent": None if self.independent is None else _plain(self.independent),
            "gain": None if self.gain is None else self.gain._asdict(),
            "member_change": self.member_change,
            "choices": self.choices,
            "candidates": [_plain(candidate) for candidate in self.candidates],
            "frontier": [candidate.number for candidate in self.frontier],
            "spent": {**asdict(self.spent), "share": self.spent.share},
            "settings": self.settings,
            "audit": None if self.audit is None else json.loads(self.audit.to_json()),
        }

    def to_json(self) -> str:
        """The same as text; NaN is written as null."""
        return json.dumps(_finite(self.to_dict()), indent=1, default=_name)

    def __str__(self) -> str:
        return self.sentence


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", None) or str(value)


def _plain(candidate: Candidate) -> dict[str, Any]:
    return asdict(candidate)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
