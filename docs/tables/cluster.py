"""Tables of docs/cluster.md: what sweeps on a cluster cost, measured here and simulated."""

from collections.abc import Mapping
from typing import Any

from layout import benchmark, table
from parallel import assumed, places_of
from speed import measured

Result = Mapping[str, Any]
ASSUMED = (
    "a worker until it can begin, seconds",
    "a task before it computes, seconds",
    "a task in the script's process, seconds",
    "storage of all machines together, bytes a second",
    "results on their way home, bytes a second",
    "a lost machine until it is replaced, seconds",
)
"""What the simulation takes for granted."""


def checked(result: Result) -> str:
    """Predictions against whole sweeps."""
    rows = [
        [
            str(row["workers"]),
            str(row["groups"]),
            f"{row['predicted_s']:.1f}",
            f"{row['measured_s']:.1f}",
            f"{100 * row['error']:+.0f} %",
        ]
        for row in result["sweeps"]["rows"]
    ]
    return table(("workers", "tasks", "predicted seconds", "measured", "error"), rows)


def modelled(result: Result) -> str:
    """Simulated sweeps on cards."""
    rows = [
        [
            row["what"],
            str(row["cards"]),
            str(row["tasks"]),
            f"{row['hours']:,.2f}",
            places_of(row),
            f"{row['bytes_home'] / 1e9:.1f}",
        ]
        for row in result["model"]
        if "tasks" in row
    ]
    header = ("work", "cards", "tasks", "hours", "where the time of the cards goes", "GB that come home")
    return f"{table(header, rows)}\n\n{assumed(result, ASSUMED)}"


def both(result: Result) -> str:
    return f"{checked(result)}\n\n**Beyond that it is a model:**\n\n{modelled(result)}"


def values() -> dict[str, str]:
    """Numbers in sentences."""
    sweeps = benchmark("scale")["sweeps"]
    return {f"scale-{name}": f"{sweeps[f'{name}_s']:.1f}" for name in ("start", "task", "computing")}


TABLES = {"sizing": lambda: measured("scale", both)}
