"""Tables of docs/estimators.md: estimators beside those of scikit-learn."""

from collections.abc import Mapping, Sequence
from typing import Any

from layout import BENCHMARKS, benchmark, benchmark_note, no_result, table

CLASSES = {"accuracy": (100, ".1f", max), "nll": (1, ".3f", min), "calibration error": (100, ".1f", min)}
VALUES = {"rmse": (1, ".3f", min), "nll": (1, ".3f", min), "coverage": (100, ".1f", None), "width": (1, ".2f", None)}
"""Figures, the factor and the form in which they are shown, and which of them is best."""


def _of_task(task: str, figures: Mapping[str, tuple[int, str, Any]]) -> str:
    if not (BENCHMARKS / "tabular.json").exists():
        return no_result("python benchmarks/tabular.py")
    result = benchmark("tabular")
    shown = [row for row in result["rows"] if row["task"] == task]
    rows = [cells for row in shown for cells in _rows(row, figures)]
    header = ("table", "estimator", *figures, "seconds")
    later = f"\n\nRealMLP and TabM: {benchmark_note({'made': result['made_later']})}" if "made_later" in result else ""
    return f"{table(header, rows)}\n\n{benchmark_note(result)}{later}\n"


def _rows(row: Mapping[str, Any], figures: Mapping[str, tuple[int, str, Any]]) -> list[Sequence[str]]:
    """One line per estimator; the best of a figure is bold."""
    results = row["results"]
    best = {
        name: choose(entry[name]["mean"] for entry in results.values())
        for name, (_, _, choose) in figures.items()
        if choose is not None
    }
    lines = []
    for place, (estimator, entry) in enumerate(results.items()):
        cells = []
        for name, (factor, form, _) in figures.items():
            mean, error = entry[name]["mean"], entry[name]["error"]
            text = f"{factor * mean:{form}}"
            text = f"**{text}**" if best.get(name) == mean else text
            cells.append(text if error is None else f"{text} ± {factor * error:{form}}")
        label = f"{row['table']} ({row['rows']:,} × {row['features']})" if place == 0 else ""
        lines.append([label, estimator, *cells, f"{entry['seconds']['mean']:.1f}"])
    return lines


def searches() -> str:
    """Seconds of grid searches."""
    if not (BENCHMARKS / "estimators.json").exists():
        return no_result("python benchmarks/estimators.py")
    result = benchmark("estimators")
    rows = []
    for row in result["rows"]:
        entries = row["results"]
        # Seconds of the cores where they are known of all: other work on the machine disturbs them less.
        unit = "seconds" if any(entry["cpu"] is None for entry in entries.values()) else "cpu"
        ours = entries["EnsembleSearchCV"][unit]
        for way, entry in entries.items():
            times = [f"{entry['seconds']:.1f}", "–" if entry["cpu"] is None else f"{entry['cpu']:.1f}"]
            rows.append([row["table"], way, *times, f"{entry[unit] / ours:.1f}×", f"{entry['best score']:.4f}"])
    header = ("table", "search", "seconds", "seconds of the cores", "times ours", "best score")
    loads = max(row["load"] for row in result["rows"])
    return f"{table(header, rows)}\n\n{benchmark_note(result)}; load average up to {loads:.1f}\n"


TABLES = {
    "table-classes": lambda: _of_task("classification", CLASSES),
    "table-values": lambda: _of_task("regression", VALUES),
    "table-searches": searches,
}
