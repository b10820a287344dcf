"""Tables of docs/parallel.md: steps of several processes, measured and modelled."""

from collections.abc import Collection, Mapping
from typing import Any

from layout import BENCHMARKS, benchmark, table
from speed import measured, section

Result = Mapping[str, Any]
ASSUMED = (
    "inside a machine, bytes a second",
    "inside a machine, seconds a message",
    "between machines, bytes a second",
    "between machines, seconds a message",
    "ResNet-50 at 224, images a second",
)
"""What the model of one ensemble takes for granted."""
ON_A_CARD = """\
## On one card

Two processes share a card (gloo), or one process is a group of its own (NCCL): the largest difference of any weight or
statistic from a training in one process, in float64.
"""


def checked(result: Result) -> str:
    """Predictions against measurements."""
    rows = [
        [
            row["case"],
            str(row["members"]),
            str(row["processes"]),
            f"{row['predicted_ms']:.2f}",
            f"{row['measured_ms']:.2f}",
            f"{100 * row['error']:+.0f} %",
            f"{row['travels_ms']:.2f}" if "travels_ms" in row else "",
        ]
        for row in result["checked"]
    ]
    header = ("network", "members", "processes", "predicted ms a step", "measured", "error", "of it outputs and flags")
    return table(header, rows)


def places_of(row: Mapping[str, Any]) -> str:
    """Where the time of a modelled row goes, most first."""
    shares = sorted(row["shares"].items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares if share >= 0.005)


def assumed(result: Result, names: Collection[str]) -> str:
    """What a model takes for granted."""
    values = "; ".join(f"{name}: {result['assumed'][name]:g}" for name in names)
    return f"Assumed, not measured: {values}."


def modelled(result: Result) -> str:
    """Costs beyond what was measured."""
    rows = []
    for row in result["model"]:
        if "tasks" in row:  # of sweeps, which are on another page
            continue
        sent = " / ".join(f"{row[name] / 1e6:,.2f}" for name in ("bytes_of_outputs", "bytes_of_gradients"))
        rows.append([row["what"], str(row["cards"]), f"{row['hours']:,.2f}", places_of(row), sent])
    header = ("work", "cards", "hours", "where they go", "MB a step: outputs / gradients instead")
    return f"{table(header, rows)}\n\n{assumed(result, ASSUMED)}"


def both(result: Result) -> str:
    return f"{checked(result)}\n\n**Beyond that it is a model:**\n\n{modelled(result)}"


def on_a_card(result: Result) -> str:
    rows = [
        [row["case"], row["group"], str(row["processes"]), f"{row['difference']:.1e}", str(row["replays"])]
        for row in result["equal"]
    ]
    equal = table(("case", "group", "processes", "largest difference", "replayed steps"), rows)
    steps = [[str(r["members"]), r["group"], str(r["processes"]), f"{r['ms']:.2f}"] for r in result["steps"]]
    times = table(("ResNet-20 members, batch 64", "group", "processes on the card", "ms a step"), steps)
    return f"{equal}\n\n{times}"


def card_section() -> str:
    """The card's table, where the script was run there."""
    if not (BENCHMARKS / "parallel_gpu.json").exists() or not benchmark("parallel_gpu")["equal"]:
        return ""
    return section("parallel_gpu", ON_A_CARD, on_a_card)


TABLES = {"scale": lambda: measured("scale", both), "card": card_section}
