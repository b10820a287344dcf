"""From rows to points: means and standard errors over seeds, with the verdicts on a paper's statements."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dissensus.studies import library
from dissensus.studies.procedures.builtin import PROCEDURES
from dissensus.studies.protocol import differences, named_axes
from dissensus.studies.results import Curve, Estimate, Point, Report, Row, Summary, Verdict
from dissensus.studies.spec import Spec, resolved
from dissensus.studies.verdicts import judge, mean_and_error

_DIGITS = 6
MAX_MAPPED = 500
"""Number of examples that are kept of a member's feature map."""


def summarise(report: Report, spec: Spec | None = None) -> Summary:
    """A report without its rows: the points of its grid and the verdicts.

    Verdicts are on the statements of today: those of ``spec``, the whole study, or of the library's study. Where there
    is neither, they are on the statements that the study had when it was run.
    """
    axes = [axis for axis in report.spec.grid if axis != "seed"]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in report.rows:
        groups.setdefault((row.data, *(row.value(axis) for axis in axes)), []).append(row)
    points = [_point(data, dict(zip(axes, values, strict=True)), rows) for (data, *values), rows in groups.items()]
    settings = report.spec.settings()
    summary = Summary(report.study, report.scale, report.provenance, settings, ["data", *axes], points)
    if spec is not None or report.study in library.names():
        return judged(summary, spec)
    return replace(summary, verdicts=_verdicts(report.spec, points, report.differences))


def judged(summary: Summary, spec: Spec | None = None) -> Summary:
    """A result with verdicts on the statements of today: those of ``spec``, or of the library's study."""
    spec = spec or library.load(summary.study)
    if summary.scale not in spec.scales:
        return summary
    today = resolved(spec, summary.scale, {}, f"{spec.name}.toml")
    names = list(dict.fromkeys(point.data for point in summary.points))
    paper = resolved(spec, "paper", {}, f"{spec.name}.toml").to_dict() if "paper" in spec.scales else summary.settings
    differing = {data: differences(summary.settings, paper, data, named_axes(spec.expect)) for data in names}
    here = replace(today, data=list(dict.fromkeys([*today.data, *names])))
    return replace(summary, verdicts=_verdicts(here, summary.points, differing))


def _verdicts(spec: Spec, points: Sequence[Point], differing: Mapping[str, Sequence[str]]) -> list[Verdict]:
    procedure = PROCEDURES.get(spec.procedure)
    if procedure is None:  # from outside: nothing is known about it
        return judge(spec, points, differing)
    return judge(spec, points, differing, exact=procedure.exact, trials=procedure.trials)


def _point(data: str, axes: Mapping[str, Any], rows: Sequence[Row]) -> Point:
    """Counts and sets are taken over all seeds, pictures and maps from the first."""
    first = rows[0]
    names = dict.fromkeys(name for row in rows for name in row.measures)
    counts: dict[str, Any] = {}
    if first.verdict_counts is not None:
        counts["verdict_counts"] = {
            evidence: dict(sum((Counter((row.verdict_counts or {}).get(evidence)) for row in rows), Counter()))
            for evidence in first.verdict_counts
        }
    if first.audit is not None:
        counts["audit_verdicts"] = dict(Counter(row.audit.verdict for row in rows if row.audit is not None))
        counts["audit_reasons"] = first.audit.reasons if len(rows) == 1 else None
    return Point(
        data,
        axes,
        {name: estimate([row.measures.get(name, math.nan) for row in rows]) for name in names},
        _curves(rows),
        [row.seed for row in rows],
        **counts,
        pictures=first.pictures or None,
        feature_map=[member[:MAX_MAPPED] for member in first.feature_map] if first.feature_map else None,
        pairs=None
        if first.pairs is None
        else [[_rounded(value) for value in pair] for row in rows for pair in row.pairs or []],
        matrices=_mean_matrices(rows),
        examples=first.examples,
        flags=_flags(rows),
    )


def _flags(rows: Sequence[Row]) -> dict[str, list[str]] | None:
    """Flags that any seed has raised, by suite."""
    raised: dict[str, set[str]] = {}
    for row in rows:
        for suite, flags in (row.flags or {}).items():
            raised.setdefault(suite, set()).update(flags)
    return {suite: sorted(flags) for suite, flags in raised.items()} or None


def _mean_matrices(rows: Sequence[Row]) -> dict[str, list[list[float | None]]] | None:
    """Means over seeds, entry by entry."""
    matrices: list[Mapping[str, Any]] = [row.matrices for row in rows if row.matrices]
    if not matrices:
        return None
    return {
        name: [
            [estimate(entries).mean for entries in zip(*lines, strict=True)]
            for lines in zip(*(seed[name] for seed in matrices), strict=True)
        ]
        for name in matrices[0]
    }


def _curves(rows: Sequence[Row]) -> dict[str, Curve]:
    """Means over the seeds that have a curve, up to the end of the shortest."""
    curves = [row.curves for row in rows if row.curves]
    result: dict[str, Curve] = {}
    for name in dict.fromkeys(name for seed in curves for name in seed):
        columns = zip(*(seed[name] for seed in curves if name in seed), strict=False)
        places = [estimate(column) for column in columns]
        result[name] = Curve([place.mean for place in places], [place.error for place in places])
    return result


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard error over the seeds with a finite value.

    >>> estimate([1.0, 3.0, float("nan")])
    Estimate(mean=2.0, error=1.0, seeds=2, values=[1.0, 3.0, None])
    """
    finite = [value for value in values if math.isfinite(value)]
    mean, error = mean_and_error(finite) if finite else (math.nan, math.nan)
    return Estimate(_rounded(mean), _rounded(error), len(finite), [_rounded(value) for value in values])


def _rounded(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
