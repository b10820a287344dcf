"""Records of a search: candidates with their numbers, and what was spent."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SYMBOLS = {"beta": "β", "alpha": "α", "gamma": "γ", "lambda": "λ"}


@dataclass(frozen=True)
class Candidate:
    """A point of the space, with its numbers over all splits and seeds."""

    number: int
    point: dict[str, Any]
    independent: bool
    """Whether its members do not interact."""
    bracket: int
    epochs: int
    """Up to which its runs were trained at most."""
    runs: int
    status: Literal["chosen", "reference", "finalist", "dropped", "collusive", "failed"]
    """``"reference"`` is the best independent candidate; ``"collusive"`` was set aside by the audit."""
    value: float
    """The metric on validation rows, the mean over runs of the best epoch of each; NaN if there is none."""
    standard_error: float
    """Of that mean, over splits, or over seeds where there is one split."""
    test: float
    """The metric on test rows, of the epochs that were kept."""
    members: float
    """That of single members."""
    diversity: float
    """By how much the ensemble is better than its members on test rows."""
    ahead: float = math.nan
    """By how much it is better than the reference on validation rows after as many epochs, split by split; above zero
    is better. NaN without a reference."""
    ahead_error: float = math.nan
    """The standard error of that difference, which is what decides about ties; splits that are hard for all candidates
    count in `standard_error`, and not here."""
    by_split: list[float] = field(default_factory=list, repr=False)
    """`value` of every split."""
    verdicts: dict[str, int] = field(default_factory=dict)
    """How often the audit said what, on validation rows; empty where it was not asked."""
    curve: list[tuple[int, float]] = field(default_factory=list, repr=False)
    """Epochs, and the mean over runs of the best value up to each, as long as all runs are trained."""

    @property
    def name(self) -> str:
        """Its settings in words."""
        return words_of(self.point)


@dataclass(frozen=True)
class Spent:
    """What a search cost."""

    candidates: int
    runs: int
    run_epochs: int
    """Epochs of all runs together."""
    full_run_epochs: int
    """Those that training every candidate to the end would have taken."""
    examples: int
    """Examples that runs were trained on, each as often as it was seen."""
    seconds: float

    @property
    def share(self) -> float:
        """Of what training every candidate to the end would have cost."""
        return self.run_epochs / max(1, self.full_run_epochs)


def words_of(point: Mapping[str, Any]) -> str:
    """Settings in words.

    >>> words_of({"beta": 0.7, "lr": 0.001, "hidden": (64, 64)}), words_of({})
    ('β = 0.7, lr = 0.001, hidden = (64, 64)', 'as given')
    """
    return ", ".join(f"{SYMBOLS.get(name, name)} = {_text(value)}" for name, value in point.items()) or "as given"


def opening(sentence: str) -> str:
    """A sentence as it stands alone: with a capital letter, unless it begins with a symbol, and a full stop.

    >>> opening("nothing beats it"), opening("β = 0.7: better")
    ('Nothing beats it.', 'β = 0.7: better.')
    """
    first = sentence[:1]
    return f"{first.upper() if first.isascii() else first}{sentence[1:]}."


def audit_words(verdicts: Mapping[str, int]) -> str:
    """Verdicts with how often each was given.

    >>> audit_words({"healthy": 9, "undecided": 1}), audit_words({"healthy": 2}), audit_words({})
    ('healthy 9 of 10, undecided 1', 'healthy', '')
    """
    counts = Counter(verdicts).most_common()
    if len(counts) < 2:
        return counts[0][0] if counts else ""
    (first, most), *others = counts
    return ", ".join([f"{first} {most} of {sum(verdicts.values())}", *(f"{name} {count}" for name, count in others)])


def in_order(candidates: Sequence[Candidate], mode: str) -> list[Candidate]:
    """Candidates that were trained longest first, and of these the best."""
    sign = 1.0 if mode == "min" else -1.0
    return sorted(
        candidates, key=lambda c: (-c.epochs, math.isnan(c.value), sign * c.value if c.value == c.value else 0)
    )


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return getattr(value, "__qualname__", None) or str(value)
