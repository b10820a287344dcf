"""The table of docs/models.md: networks of other libraries, by backend."""

import re
from collections.abc import Mapping
from typing import Any

from layout import BENCHMARKS, benchmark, benchmark_note, no_result, table

WAYS = ("loop", "vmap", "batched")
LARGEST_DIFFERENCE = 1e-3
"""What a backend may differ from separate modules in float32, relatively, to count as one that works."""


def third_party() -> str:
    """Milliseconds of a training step by every backend, and the reasons of those that do not run a network."""
    if not (BENCHMARKS / "third_party.json").exists():
        return no_result("python benchmarks/third_party.py")
    result = benchmark("third_party")
    introduction = (
        "Milliseconds of a training step of all members (forward pass, backward pass, AdamW), and how many times\n"
        "faster than separate modules by hand. Outputs and gradients of every backend with a number agree with those\n"
        f"of the separate modules. {load_sentence(result)}\n"
    )
    rows = [cells(row) for row in result["rows"]]
    header = ("network", "members", "by hand", *WAYS, "auto", "why not")
    return f"{introduction}\n{table(header, rows)}\n\n{benchmark_note(result)}\n"


def cells(row: Mapping[str, Any]) -> list[str]:
    if "missing" in row:
        return [row["case"], "–", "–", *["–"] * len(WAYS), "–", reason(row["missing"])]
    times, differences = row["milliseconds"], row["differences"]
    hand = times["by hand"]

    def cell(way: str) -> str:
        if way not in times:
            return "–"
        if differences[way] > LARGEST_DIFFERENCE:
            return f"differs by {differences[way]:.0e}"
        return f"{times[way]:.1f} ({hand / times[way]:.1f}×)"

    why = "; ".join(f"{way}: {reason(text)}" for way, text in row["refused"].items())
    auto = f"{cell('auto')}, {row['auto']}"
    return [row["case"], str(row["members"]), f"{hand:.1f}", *(cell(way) for way in WAYS), auto, why]


def reason(text: str) -> str:
    """The first clause of a reason, as it stands in a cell."""
    first = re.split(r"\. |; ", text)[0].rstrip(".").replace("|", "/")
    return re.sub(r" \([^)]*\)$", "", first)


def load_sentence(result: Mapping[str, Any]) -> str:
    """How busy the machine was, where it was busier than the benchmark makes it."""
    loads = [row["load"] for row in result["rows"] if "load" in row]
    threads = int(result["made"]["threads"])
    if not loads or max(loads) <= threads + 0.5:
        return ""
    return (
        f"The machine did other work at the same time (load {min(loads):.1f} to {max(loads):.1f}; the benchmark has\n"
        f"{threads} {'thread' if threads == 1 else 'threads'}), so times and ratios are rough."
    )


TABLES = {"third-party": third_party}
