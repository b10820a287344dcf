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
        told_of: dict[str, Any] = (
            {"said": dict(Counter(row["verdict"] for row in rows))} if "verdict" in rows[0] else {}
        )
        if "audit" in rows[0]:
            told_of["audited"] = dict(Counter(row["audit"]["verdict"] for row in rows if "audit" in row))
        if rows[0].get("shown"):
            told_of["shown"] = rows[0]["shown"]
        if "pairs" in rows[0]:
            told_of["pairs"] = [[_rounded(v) for v in pair] for row in rows for pair in row["pairs"]]
        points.append({**dict(zip(("data", *grid), key, strict=True)), "measures": values, **told_of, **_curves(rows)})
    told = {key: report[key] for key in ("study", "scale", "made")}
    told["verdicts"] = [verdict.to_dict() for verdict in judged(_as_told_now(report), report["rows"])]
    return {**told, "axes": ["data", *grid], "points": points}


def _as_told_now(report: dict[str, Any]) -> Spec:
    """A run's spec with the expectations that the library has today: those decide nothing that was computed."""
    file = "report.json"
    spec = parse({key: value for key, value in report["spec"].items() if key != "name"}, report["study"], file)
    if report["study"] not in finding.names():
        return spec
    return replace(spec, expect=resolved(finding.load(report["study"]), report["scale"], {}, file).expect)


def _short(values: Sequence[float]) -> list[float | int | None]:
    mean, error = mean_and_error(values)
    return [_rounded(mean), _rounded(error), len(values)]


def _rounded(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _curves(rows: list[dict[str, Any]]) -> dict[str, Any]:
    if "curves" not in rows[0]:
        return {}
    length = min(len(next(iter(row["curves"].values()))) for row in rows)
    curves = {}
    for name in rows[0]["curves"]:
        known = [[v for row in rows if math.isfinite(v := row["curves"][name][i])] for i in range(length)]
        each = [mean_and_error(values) if values else (math.nan, math.nan) for values in known]
        curves[name] = {"mean": [_rounded(m) for m, _ in each], "error": [_rounded(e) for _, e in each]}
    return {"curves": curves}


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
