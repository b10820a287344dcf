"""What all tables share: Markdown, numbers, and results of benchmarks and studies."""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dissensus.studies.labels import ATTACKS
from dissensus.studies.results import WORST_CASE, Estimate, Measure, Point, Summary
from dissensus.studies.run_folders import staleness

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks" / "results"
SPECS, SHIPPED = (ROOT / "src/dissensus/studies" / name for name in ("specs", "results"))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def benchmark(name: str) -> dict[str, Any]:
    """The result of a benchmark."""
    return json.loads((BENCHMARKS / f"{name}.json").read_text())


def benchmark_note(result: Mapping[str, Any]) -> str:
    """Machine, versions and command of a benchmark."""
    made = result["made"]
    settings = ", ".join(f"{key}: {_plain(value)}" for key, value in made.items() if key != "command")
    return f"*{settings}*  \n`{made['command']}`"


def _plain(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def has_study(name: str) -> bool:
    """Whether a study's result, named with its scale, is shipped."""
    return (SHIPPED / f"{name}.json").exists()


@cache
def study(name: str) -> Summary:
    """A shipped result of a study, named with its scale."""
    return Summary.from_json(json.loads((SHIPPED / f"{name}.json").read_text()))


def study_note(*summaries: Summary) -> str:
    """Seeds, machines and time of studies, in a line, and why results are out of date."""
    made = [summary.provenance for summary in summaries]
    minutes = sum(entry.seconds for entry in made) / 60
    counts = sorted({len(entry.seeds) for entry in made})
    machines = ", ".join(dict.fromkeys(entry.hardware for entry in made))
    span = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    seeds = "1 seed" if counts == [1] else f"{span} seeds"
    note = f"*{seeds}; {machines}, {minutes:.0f} minutes*"
    stale = _stale_in_words(summaries)
    return f"{note}  \n*Stale. {stale}.*" if stale else note


def _stale_in_words(summaries: Sequence[Summary]) -> str:
    """Which studies are out of date, by the reason; empty where none is."""
    names: dict[str, dict[str, None]] = {}
    for summary in summaries:
        if why := staleness(summary):
            names.setdefault(why, {})[summary.study] = None
    return "; ".join(
        f"{', '.join(studies)}: {why.replace('it was', 'they were', 1) if len(studies) > 1 else why}"
        for why, studies in names.items()
    )


def no_result(command: str) -> str:
    """The sentence in place of a result that is missing."""
    return f"*No result yet: `{command}` makes it.*\n"


def expectations(name: str) -> list[dict[str, Any]]:
    """The paper's statements in a study's file."""
    return tomllib.loads((SPECS / f"{name}.toml").read_text())["expect"]


def points_by_data(summary: Summary) -> dict[str, list[Point]]:
    """Points of every data set."""
    points: dict[str, list[Point]] = {}
    for point in summary.points:
        points.setdefault(point.data, []).append(point)
    return points


def point_at(summary: Summary, **values: Any) -> Point:
    """The only point with these values on its axes."""
    (point,) = [p for p in summary.points if all(p.value(axis) == value for axis, value in values.items())]
    return point


def mean(point: Point, measure: str) -> float:
    """A mean over seeds that is known to be there."""
    value = point.mean(measure)
    assert value is not None, measure
    return value


def percent(estimate: Estimate | None) -> str:
    """A mean and its standard error, in per cent without the sign."""
    if estimate is None or estimate.mean is None:
        return ""
    return f"{100 * estimate.mean:.1f}" + (f" ± {100 * estimate.error:.1f}" if estimate.error else "")


def rounded(share: float, digits: int = 0) -> str:
    """A share in per cent, without the sign."""
    return f"{100 * share:.{digits}f}"


def span(values: Iterable[float], form: str = ".0f") -> str:
    """The smallest and the largest of some numbers, or the one number where both look alike.

    >>> span([36.8, 39.4, 38.2]), span([5.1, 5.2])
    ('37 to 39', '5')
    """
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (ordered[0], ordered[-1])))


_WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def in_words(count: int) -> str:
    """A count as it stands in a sentence: a word up to twelve."""
    return _WORDS[count] if count < len(_WORDS) else f"{count:,}"


def audit_counts(point: Point) -> str:
    """The audit's verdicts with their numbers of seeds."""
    return ", ".join(f"{verdict} {count}" for verdict, count in (point.audit_verdicts or {}).items())


_PARAMETERS = {"jsma": "γ", "carlini_wagner": "c", "elastic_net": "c"}


def attack_label(name: str) -> str:
    """A measure under attack with its parameter; ``"none"`` for accuracy without an attack."""
    measure = Measure.parse(name)
    if measure.kind == WORST_CASE:
        return f"**worst case**, {measure.attack}, ε = {measure.parameter}"
    if not measure.attack:
        return "none"
    return f"{ATTACKS[measure.attack]}, {_PARAMETERS.get(measure.attack, 'ε')} = {measure.parameter}"


def is_worst_case(name: str) -> bool:
    """Whether a measure is the worst case of a suite of attacks."""
    return Measure.parse(name).kind == WORST_CASE
