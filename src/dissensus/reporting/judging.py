"""Answers at a glance: what a team asks of a model before its release, with what the numbers say.

An answer is ``good`` or ``bad`` only where the whole 95 % interval of its number lies on that side of a line of
`Limits`. Where the interval is too wide to tell, there is no answer.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import dissensus.reporting.classification as classification
import dissensus.reporting.regression as regression
from dissensus.auditing.evidence import FEWEST
from dissensus.auditing.page import MEANINGS
from dissensus.metrics.intervals import Interval
from dissensus.pages.parts import News, counted, significant
from dissensus.reporting.measures import Measured, ShiftedResult
from dissensus.reporting.reading import ReportData


@dataclass(frozen=True)
class Limits:
    """Lines that answers are judged by."""

    calibration_visible: float = 0.02
    """Calibration error that counts as seen, where the whole interval lies above it."""
    calibration_large: float = 0.1
    knows_errors: float = 0.7
    """Area under the ROC curve of finding the ensemble's own errors, from which uncertainty is useful."""
    no_use: float = 0.6
    """Area below which a score is of no use."""
    correlation: float = 0.2
    """Rank correlation of predicted and real errors, from which a spread is useful."""
    coverage_off: float = 0.1
    """Distance of coverage from the level of intervals that is large."""
    detects: float = 0.8
    """Area from which shifted data is noticed."""
    drop: float = 0.05
    """Loss of accuracy on shifted data that matters."""
    examples: int = FEWEST
    """Examples from which there is an answer: intervals of fewer are too narrow."""
    training_rows: float = 0.01
    """Share of examples that the model was trained on, from which numbers do not speak of new data."""


LIMITS = Limits()
VERDICTS: dict[str, News] = {
    "sound": "good",
    "reservations": "fair",
    "problems": "bad",
    "undecided": "none",
}
"""Verdicts over all answers, and the kind of news that each is."""


class Finding(NamedTuple):
    """A question, its answer in a word or two, the kind of news, and a sentence with the numbers."""

    question: str
    answer: str
    news: News
    sentence: str


def findings(data: ReportData, measured: Measured, limits: Limits = LIMITS) -> list[Finding]:
    """Every question that applies."""
    if data.settings.task == "classification":
        questions = [_accurate(data, measured), _calibrated(measured, limits), _knows_errors(measured, limits)]
    else:
        questions = [_explains(data, measured), _covers(data, measured, limits), _knows_size(measured, limits)]
    audit = measured.audit
    reason = "; ".join(audit.judgement.reasons)
    diversity = Finding(
        "Is its diversity real?", audit.verdict, MEANINGS[audit.verdict].news, f"{reason[:1].upper()}{reason[1:]}."
    )
    shifts = [
        _of_enough(_notices(name, result, data, measured, limits), min(result.examples, len(data.targets)), limits)
        for name, result in measured.shifted.items()
    ]
    questions = [_of_enough(answer, len(data.targets), limits) for answer in questions]
    return [*_new_to_it(data, limits), *questions, diversity, *shifts]


def _of_enough(answer: Finding, examples: int, limits: Limits) -> Finding:
    """An answer, unless it rests on too few examples."""
    if examples >= limits.examples or answer.news == "none":
        return answer
    text = f"{answer.sentence} Fewer than {limits.examples} examples are too few to tell."
    return answer._replace(answer="cannot tell", news="none", sentence=text)


def _new_to_it(data: ReportData, limits: Limits) -> list[Finding]:
    """Asked only where examples are known from training."""
    rows, examples = data.facts.get("training_rows", 0), len(data.targets)
    if not rows:
        return []
    known = "is a row" if rows == 1 else "are rows"
    text = f"{rows:,} of {counted(examples, 'example')} {known} that the model was trained on."
    question = "Is the data new to it?"
    if rows < limits.training_rows * examples:
        return [Finding(question, "all but a few", "none", text)]
    return [Finding(question, "no", "bad", f"{text} Numbers on them say nothing about new data: use test data.")]


def verdict(answers: list[Finding]) -> str:
    """``problems`` where any answer is bad, ``reservations`` where any is fair, ``sound`` where some are good.

    >>> verdict([Finding("", "", "good", ""), Finding("", "", "none", "")])
    'sound'
    """
    kinds = {answer.news for answer in answers}
    if "bad" in kinds:
        return "problems"
    if "fair" in kinds:
        return "reservations"
    return "sound" if "good" in kinds else "undecided"


def _accurate(data: ReportData, measured: Measured) -> Finding:
    question, accuracy = "Is it accurate?", measured.numbers["accuracy"]
    labels = data.targets.bincount(minlength=len(data.classes))
    most = int(labels.argmax())
    share, better = float(labels[most]) / len(data.targets), measured.numbers["above_majority"]
    words = f"Right on {percent(accuracy)} of {counted(len(data.targets), 'example')}."
    if share == 1:
        text = f"{words} All examples are of the class {data.classes[most]!r}, so this says little."
        return Finding(question, "one class only", "none", text)
    constant = f"Always answering {data.classes[most]!r} would be right on {share:.1%}."
    if better.low > 0:
        return Finding(question, "better than a guess", "good", f"{words} {constant}")
    if better.high < 0:
        return Finding(question, "worse than a guess", "bad", f"{words} {constant}")
    return Finding(question, "cannot tell", "none", f"{words} {constant} The data does not tell the two apart.")


def _calibrated(measured: Measured, limits: Limits) -> Finding:
    question, error = "Is its confidence honest?", measured.numbers["ece"]
    gap = measured.numbers["overconfidence"]
    direction = "off"
    if gap.low > 0:
        direction = "overconfident"
    elif gap.high < 0:
        direction = "underconfident"
    words = f"Confidence differs from accuracy by {percent(error)} on average (expected calibration error)."
    if error.low > limits.calibration_visible:
        large = error.low > limits.calibration_large
        text = f"{words} Mean confidence minus accuracy is {points(gap)}. See dissensus.metrics.temper."
        return Finding(question, direction, "bad" if large else "fair", text)
    if error.high <= limits.calibration_large:
        return Finding(question, "yes", "good", words)
    return Finding(question, "cannot tell", "none", f"{words} More examples would tell.")


def _knows_errors(measured: Measured, limits: Limits) -> Finding:
    question = "Does it know when it errs?"
    area = measured.numbers.get(f"error_auroc: {classification.ENTROPY}")
    if area is None:
        text = "All predictions are right, or all are wrong, so there is nothing to tell apart."
        return Finding(question, "cannot tell", "none", text)
    risk, all_kept = measured.numbers["risk_at_80%"], 1 - measured.numbers["accuracy"].value
    words = (
        f"An error has a higher {classification.ENTROPY} than a right answer in {percent(area)} of pairs. Without the "
        f"20 % of examples that it is least confident about, {risk.value:.1%} of answers are wrong instead of "
        f"{all_kept:.1%}."
    )
    return Finding(question, *_graded(area, limits.knows_errors, limits.no_use, 0.5), words)


def _graded(area: Interval, good: float, bad: float, chance: float) -> tuple[str, News]:
    if area.low >= good:
        return "yes", "good"
    if area.high < bad:
        return "no", "bad"
    return ("cannot tell", "none") if area.low <= chance else ("partly", "fair")


def _explains(data: ReportData, measured: Measured) -> Finding:
    question, explained, root = "Is it accurate?", measured.numbers["r2"], measured.numbers["rmse"]
    words = f"The root mean squared error is {number(root)} on {counted(len(data.targets), 'example')}."
    if explained.value != explained.value:
        return Finding(question, "cannot tell", "none", f"{words} A target is constant, so this says little.")
    words += f" It explains {percent(explained)} of the variance."
    if explained.low > 0:
        return Finding(question, "better than the mean", "good", words)
    if explained.high < 0:
        return Finding(question, "worse than the mean", "bad", words)
    return Finding(question, "cannot tell", "none", words)


def _covers(data: ReportData, measured: Measured, limits: Limits) -> Finding:
    question, coverage = "Are its intervals honest?", measured.numbers.get("coverage")
    level = regression.interval_level(data.settings) if coverage is not None else None
    if coverage is None or level is None:
        text = (
            "Members predict values without noise, and their spread is no interval. Intervals come with "
            "dissensus.conformal.calibrate, or from members trained with the loss gaussian_nll or quantile."
        )
        return Finding(question, "no intervals", "none", text)
    words = f"{level:.0%} intervals hold {percent(coverage)} of targets."
    if coverage.low <= level <= coverage.high:
        if coverage.high - coverage.low > 2 * limits.coverage_off:
            return Finding(question, "cannot tell", "none", f"{words} More examples would tell.")
        return Finding(question, "yes", "good", words)
    too_few = coverage.high < level
    off = level - coverage.high if too_few else coverage.low - level
    answer = "too narrow" if too_few else "too wide"
    return Finding(question, answer, "bad" if too_few and off > limits.coverage_off else "fair", words)


def _knows_size(measured: Measured, limits: Limits) -> Finding:
    question = "Does it know where it errs?"
    name = next((name for name in measured.uncertainty), None)
    if name is None:
        return Finding(question, "cannot tell", "none", "One member without a predicted deviation has no spread.")
    correlation = measured.numbers[f"error_correlation: {name}"]
    if math.isnan(correlation.value):
        text = f"Errors or the {name} are the same for all examples, so they have no correlation."
        return Finding(question, "cannot tell", "none", text)
    words = f"The rank correlation of {name} and error is {number(correlation)}."
    if correlation.low >= limits.correlation:
        return Finding(question, "yes", "good", words)
    if correlation.low > 0:
        return Finding(question, "weakly", "fair", words)
    if correlation.high < 0:
        return Finding(question, "the wrong way", "bad", words)
    return Finding(question, "cannot tell", "none", f"{words} It may be none.")


def _notices(name: str, result: ShiftedResult, data: ReportData, measured: Measured, limits: Limits) -> Finding:
    question = f"Does it notice the shift “{name}”?"
    score, area = next(iter(result.detection.items()))
    words = f"A shifted example has a higher {score} than a usual one in {percent(area)} of pairs."
    harm, hurt, unharmed = _harm(result, data, measured, limits)
    if area.low >= limits.detects:
        return Finding(question, "yes", "good", f"{words}{harm}")
    if unharmed:
        return Finding(question, "no harm seen", "none", f"{words}{harm}")
    if area.high < limits.no_use and hurt:
        return Finding(question, "no: it fails silently", "bad", f"{words}{harm}")
    return Finding(question, "hardly" if area.high < limits.no_use else "partly", "fair", f"{words}{harm}")


def _harm(result: ShiftedResult, data: ReportData, measured: Measured, limits: Limits) -> tuple[str, bool, bool]:
    """What a shift does to the predictions: a sentence, whether it surely harms, and whether it hardly does."""
    if data.settings.task == "classification" and "accuracy" in result.numbers:
        here, there = measured.numbers["accuracy"], result.numbers["accuracy"]
        text = f" Accuracy is {percent(there)} there, instead of {here.value:.1%}."
        return text, there.high < here.low - limits.drop, there.value > here.value - limits.drop
    if data.settings.task == "regression" and "rmse" in result.numbers:
        here, there = measured.numbers["rmse"], result.numbers["rmse"]
        text = f" The root mean squared error is {number(there)} there, instead of {significant(here.value)}."
        return text, there.low > (1 + limits.drop) * here.high, there.value < (1 + limits.drop) * here.value
    return "", False, False


def percent(value: Interval) -> str:
    """A share in per cent with its interval.

    >>> percent(Interval(0.5, 0.25, 0.755))
    '50.0% (25.0% to 75.5%)'
    """
    return f"{value.value:.1%}" + (f" ({value.low:.1%} to {value.high:.1%})" if value.low == value.low else "")


def points(value: Interval) -> str:
    """A difference of shares in points of per cent, with its sign.

    >>> points(Interval(0.05, -0.01, 0.11))
    '+5.0 points (-1.0 to +11.0)'
    """
    return f"{100 * value.value:+.1f} points ({100 * value.low:+.1f} to {100 * value.high:+.1f})"


def number(value: Interval) -> str:
    """A number with its interval.

    >>> number(Interval(1234.5, 1.0, 2000.0))
    '1,230 (1 to 2,000)'
    """
    text = significant(value.value)
    return f"{text} ({significant(value.low)} to {significant(value.high)})" if value.low == value.low else text
