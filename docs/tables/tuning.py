"""The tables and numbers of docs/tuning.md: what is found on three data sets, and searches beside the full grid."""

from collections.abc import Mapping, Sequence
from typing import Any

from layout import BENCHMARKS, benchmark, benchmark_note, no_result, table

SHOWN = ("weather", "airfoil", "fashion-mnist")
"""Of the figure, with all values of β."""
_HALF = 0.5


def words(point: Mapping[str, float]) -> str:
    """A point as a cell has it."""
    return ", ".join(f"{'β' if name == 'beta' else name} = {value:g}" for name, value in point.items())


def _made() -> bool:
    return (BENCHMARKS / "tuning.json").exists()


def found() -> str:
    """What the full grids over β say on the data sets of the figure."""
    if not _made():
        return no_result("python benchmarks/tuning.py")
    rows = {row["name"]: row for row in benchmark("tuning")["rows"] if row["space"] == "β" and row["seed"] == 0}
    lines = [f"- **{name}**, {rows[name]['examples']:,} examples: {rows[name]['grid']['sentence']}." for name in SHOWN]
    return "\n".join(lines) + "\n"


def _spread(rows: Sequence[Mapping[str, Any]], factor: str, share: str) -> str:
    """A share of the grid's cost for every space: the mean, and the largest."""
    spaces = dict.fromkeys(row["space"] for row in rows)
    each = {space: [row["searches"][factor][share] for row in rows if row["space"] == space] for space in spaces}
    return ", ".join(
        f"{sum(values) / len(values):.2f} for {space} (at most {max(values):.2f})" for space, values in each.items()
    )


def _within(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many distances are at most half an error, and the largest."""
    behind = [row["behind_errors"] for row in rows]
    return f"{sum(value <= _HALF for value in behind)} of {len(behind)}, the largest is {max(behind):.2f}"


def _line(rows: Sequence[Mapping[str, Any]], factor: str) -> str:
    own = [row["searches"][factor] for row in rows]
    paired = sum(search["behind_paired_errors"] <= _HALF for search in own)
    same = sum(search["same_choice"] for search in own)
    return (
        f"- `factor={factor}` is within half a standard error of the grid's choice in {_within(own)}; within half a "
        f"standard error of the difference in {paired}; it chooses the same in {same}. Epochs of runs, as a share of "
        f"the grid's: {_spread(rows, factor, 'share_of_epochs')}. Processor time: "
        f"{_spread(rows, factor, 'share_of_seconds')}."
    )


def searches() -> str:
    """What searches choose and cost, beside training every candidate to the end."""
    if not _made():
        return no_result("python benchmarks/tuning.py")
    result = benchmark("tuning")
    every = result["rows"]
    rows: list[list[str]] = []
    for row in every:
        for factor, search in row["searches"].items():
            first = factor == next(iter(row["searches"]))
            same = [f"{row['name']}, {row['space']}, seed {row['seed']}", words(row["choice"])]
            rows.append(
                [
                    *(same if first else ["", ""]),
                    factor,
                    words(search["choice"]),
                    f"{search['behind_errors']:+.2f}",
                    f"{search['behind_paired_errors']:+.1f}",
                    f"{search['behind_on_test_per_cent']:+.1f} %",
                    f"{search['share_of_epochs']:.2f}",
                ]
            )
    lines = [_line(every, factor) for factor in every[0]["searches"]]
    alone = [row["always independent"] for row in every if row["space"] == "β"]
    worst = [row["worst"] for row in every if row["space"] == "β"]
    lines.append(
        f"- Over β alone, always choosing β = 0 is within half a standard error in {_within(alone)}; the worst β"
    )
    lines[-1] += f" in {_within(worst)}."
    header = ("set", "the grid chooses", "factor", "the search chooses", "behind, errors", "paired", "on test", "cost")
    return "\n\n".join(["\n".join(lines), table(header, rows), benchmark_note(result)]) + "\n"


TABLES = {"tuning-found": found, "tuning": searches}
