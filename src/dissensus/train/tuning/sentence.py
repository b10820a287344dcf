"""The result of a search in one sentence."""

import math
from collections.abc import Sequence

from dissensus.pages.parts import significant
from dissensus.train.tuning.choosing import Gain
from dissensus.train.tuning.records import Candidate
from dissensus.train.tuning.scoring import Scorer


def sentence_of(
    best: Candidate,
    reference: Candidate | None,
    candidates: Sequence[Candidate],
    gain: Gain | None,
    member_change: float,
    verdict: str | None,
    scorer: Scorer,
    only_in_validation: Candidate | None = None,
) -> str:
    """What was found; ``only_in_validation`` looked better than independent training until it was tested.

    As in "β = 0.7: 1.4 % lower loss than independent training (0.9 to 1.9), audit healthy".
    """
    audited = "" if verdict is None else f", audit {verdict}"
    aside = [candidate for candidate in candidates if candidate.status == "collusive"]
    if all(candidate.independent for candidate in candidates):
        error = f" ± {significant(best.standard_error, 1)}" if math.isfinite(best.standard_error) else ""
        return f"{best.name}: {scorer.name} {significant(best.value)}{error} in independent training{audited}"
    if reference is None:
        return f"{best.name}: {scorer.name} {significant(best.value)}; independent training diverged{audited}"
    if best.independent:
        notes = [*_set_aside(aside)]
        if only_in_validation is not None:
            notes.insert(0, f"{only_in_validation.name} looked better on validation rows, but not on test rows")
        return f"nothing beats independent training here{_in_brackets(notes)}{audited}"
    members = ""
    if math.isfinite(member_change):
        amount, unit = f"{abs(member_change):.2g}", "points" if scorer.share else "%"
        way = "worse" if member_change > 0 else "better"
        members = ", members as good" if float(amount) == 0 else f", members {amount} {unit} {way}"
    return (
        f"{best.name}: {gain_words(gain, scorer.name, scorer.mode)}{members}{audited}{_in_brackets(_set_aside(aside))}"
    )


def gain_words(gain: Gain | None, metric: str, mode: str) -> str:
    """A gain in words.

    >>> gain_words(Gain(1.38, 0.9, 1.9, "%"), "loss", "min")
    '1.4 % lower loss than independent training (0.9 to 1.9)'
    >>> gain_words(Gain(-0.2, -0.9, 0.5, "points"), "accuracy", "max")
    '0.2 points lower accuracy than independent training (−0.5 to 0.9)'
    """
    if gain is None:
        return f"no gain in {metric} could be measured, since it is not finite on test rows"
    better, worse = ("lower", "higher") if mode == "min" else ("higher", "lower")
    flipped = gain.value < 0
    low, high = (-gain.high, -gain.low) if flipped else (gain.low, gain.high)
    unit = f" {gain.unit}" if gain.unit else ""
    interval = f" ({_number(low)} to {_number(high)})" if math.isfinite(low) else " (one split: no interval)"
    way = worse if flipped else better
    return f"{_number(abs(gain.value))}{unit} {way} {metric} than independent training{interval}"


def _number(value: float) -> str:
    text = significant(value, 2)
    return text.replace("-", "−") if not text.startswith("-0") or float(text) else "0"


def _set_aside(candidates: Sequence[Candidate]) -> list[str]:
    if len(candidates) == 1:
        return [f"{candidates[0].name} is collusive and was set aside"]
    return [f"{len(candidates)} candidates are collusive and were set aside"] if candidates else []


def _in_brackets(notes: Sequence[str]) -> str:
    return f" ({'; '.join(notes)})" if notes else ""
