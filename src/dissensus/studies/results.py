"""Results in short: means and standard errors over seeds, verdicts, and how they were made. Small enough to ship."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dissensus.storage import write_atomically
from dissensus.studies import finding
from dissensus.studies.spec import SCALES, Spec, parse, resolved
from dissensus.studies.verdicts import judged, mean_and_error

SHIPPED = Path(__file__).parent / "results"
_DIGITS = 6
MOST_MAPPED = 500
"""Points of a member's map that are kept."""


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """A run's report without its rows: every point's measures as ``[mean, standard error, seeds]``."""
    grid = [axis for axis in report["spec"].get("grid", {}) if axis != "seed"]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in report["rows"]:
        groups.setdefault(tuple(row.get(axis) for axis in ("data", *grid)), []).append(row)
    points = []
    for key, rows in groups.items():
        names = rows[0]["measures"]
        values = {name: _short([row["measures"][name] for row in rows]) for name in names}
        point = dict(zip(("data", *grid), key, strict=True))
        points.append({**point, "measures": values, **_beside(rows), **_curves(rows)})
    told = {key: report[key] for key in ("study", "scale", "made")}
    told["verdicts"] = [verdict.to_dict() for verdict in judged(_as_told_now(report), report["rows"])]
    return {**told, "axes": ["data", *grid], "points": points}


def _beside(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept of a point's rows beside their measures: counts and sets over seeds, pictures of the first one."""
    first = rows[0]
    kept: dict[str, Any] = {}
    if "said" in first:
        kept["said"] = {by: dict(sum((Counter(row["said"][by]) for row in rows), Counter())) for by in first["said"]}
    if "audit" in first:
        kept["audited"] = dict(Counter(row["audit"]["verdict"] for row in rows if "audit" in row))
        if len(rows) == 1:
            kept["audit_reasons"] = first["audit"]["reasons"]
    if first.get("shown"):
        kept["shown"] = first["shown"]
    if first.get("map"):
        kept["map"] = [member[:MOST_MAPPED] for member in first["map"]]
    if "pairs" in first:
        kept["pairs"] = [[_rounded(v) for v in pair] for row in rows for pair in row["pairs"]]
    matrices = [row["matrices"] for row in rows if row.get("matrices")]
    if matrices:
        kept["matrices"] = {name: _mean_matrix([own[name] for own in matrices]) for name in matrices[0]}
    if "examples" in rows[0]:
        kept["examples"] = rows[0]["examples"]
    flags = [(name, raised) for row in rows for name, raised in row.get("flags", {}).items()]
    if flags:
        kept["flags"] = {
            name: sorted({flag for own, raised in flags if own == name for flag in raised}) for name, _ in flags
        }
    return kept


def _mean_matrix(matrices: Sequence[Sequence[Sequence[float]]]) -> list[list[float | None]]:
    """Entry by entry, over those that are numbers."""
    return [[_mean(entries) for entries in zip(*lines, strict=True)] for lines in zip(*matrices, strict=True)]


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return _rounded(mean_and_error(known)[0]) if known else None


def _as_told_now(report: dict[str, Any]) -> Spec:
    """A run's spec with the expectations that the library has today: those decide nothing that was computed."""
    file = "report.json"
    spec = parse({key: value for key, value in report["spec"].items() if key != "name"}, report["study"], file)
    if report["study"] not in finding.names():
        return spec
    return replace(spec, expect=resolved(finding.load(report["study"]), report["scale"], {}, file).expect)


def _short(values: Sequence[float]) -> list[float | int | None]:
    """Mean and standard error over the seeds that have a number, and how many have."""
    known = [value for value in values if math.isfinite(value)]
    mean, error = mean_and_error(known) if known else (math.nan, math.nan)
    return [_rounded(mean), _rounded(error), len(known)]


def _rounded(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _curves(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds that have a curve, each up to the end of its shortest."""
    every = [row["curves"] for row in rows if row.get("curves")]
    curves = {}
    for name in dict.fromkeys(name for own in every for name in own):
        columns = zip(*(own[name] for own in every if name in own), strict=False)
        known = [[value for value in column if math.isfinite(value)] for column in columns]
        each = [mean_and_error(values) if values else (math.nan, math.nan) for values in known]
        curves[name] = {"mean": [_rounded(m) for m, _ in each], "error": [_rounded(e) for _, e in each]}
    return {"curves": curves} if curves else {}


def found(name: str, root: Path) -> dict[str, Any] | None:
    """The result of a study at the largest scale there is: of a run of one's own, or as shipped."""
    for scale in reversed(SCALES):
        own = sorted((root / name).glob(f"{scale}-*/DONE"), key=lambda path: path.stat().st_mtime)
        if own:
            return summary(json.loads((own[-1].parent / "report.json").read_text()))
        file = SHIPPED / f"{name}.{scale}.json"
        if file.exists():
            return json.loads(file.read_text())
    return None


def ship(folder: Path, into: Path = SHIPPED) -> Path:
    """Write the summary of a run where shipped results lie."""
    report = json.loads((folder / "report.json").read_text())
    file = into / f"{report['study']}.{report['scale']}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, (json.dumps(summary(report), separators=(",", ":")) + "\n").encode())
    return file
