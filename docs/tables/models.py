"""The table of docs/models.md: networks of other libraries, by backend."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from layout import BENCHMARKS, benchmark, benchmark_note, no_result, table

WAYS = ("loop", "vmap", "batched")
LARGEST_DIFFERENCE = 1e-3
"""What a backend may differ from separate modules in float32, relatively, to count as one that works."""


GPU_WAYS = ("loop", "vmap", "batched", "streams")


def third_party() -> str:
    """Milliseconds of a training step by every backend on a CPU, and the reasons of those that do not run a network."""
    return times_of("third_party", WAYS, without=_names("third_party_gpu"))


def third_party_on_a_gpu() -> str:
    """The same on a GPU, with a captured step of `fit` and without the small networks."""
    return times_of("third_party_gpu", GPU_WAYS)


def _names(name: str) -> set[str]:
    return {row["case"] for row in benchmark(name)["rows"]} if (BENCHMARKS / f"{name}.json").exists() else set()


def times_of(name: str, ways: Sequence[str], without: Collection[str] = ()) -> str:
    """A table of a result; networks that could not run here are left out if they are among ``without``."""
    if not (BENCHMARKS / f"{name}.json").exists():
        return no_result("python benchmarks/third_party.py")
    result = benchmark(name)
    fitted = any("fit" in row for row in result["rows"])
    introduction = (
        "Milliseconds of a training step of all members (forward pass, backward pass, AdamW), and how many times\n"
        "faster than separate modules by hand. Outputs and gradients of every backend with a number agree with those\n"
        f"of the separate modules. {FIT_SENTENCE if fitted else ''}{load_sentence(result)}\n"
    )
    rows = [cells(row, ways, fitted) for row in result["rows"] if not ("missing" in row and row["case"] in without)]
    header = ("network", "members", "by hand", *ways, "auto", *(["`fit`"] if fitted else []), "why not")
    return f"{introduction}\n{table(header, rows)}\n\n{several_runs(result)}{benchmark_note(result)}\n"


def several_runs(result: Mapping[str, Any]) -> str:
    """Which sources rows are of, where they come from several runs."""
    cases: dict[str, list[str]] = {}
    for row in result["rows"]:
        if "source" in row:
            cases.setdefault(row["source"], []).append(row["case"])
    if len(cases) < 2:
        return ""
    each = "; ".join(f"{source}: {', '.join(names)}" for source, names in cases.items())
    return f"Rows come from several runs, of these sources: {each}. What follows is of the latest.\n\n"


FIT_SENTENCE = (
    "All compute in bf16 autocast. The other\ncolumns are eager passes and an optimizer of PyTorch; `fit` captures the "
    "whole step in a CUDA graph. "
)


def cells(row: Mapping[str, Any], ways: Sequence[str] = WAYS, fitted: bool = False) -> list[str]:
    if "missing" in row:
        return [row["case"], *["–"] * (len(ways) + 3 + fitted), reason(row["missing"])]
    times, differences = row["milliseconds"], row["differences"]
    hand = times["by hand"]

    def faster(milliseconds: float) -> str:
        return f"{milliseconds:.1f} ({hand / milliseconds:.1f}×)"

    def cell(way: str) -> str:
        if way not in times:
            return "–"
        if differences[way] > LARGEST_DIFFERENCE:
            return f"differs by {differences[way]:.0e}"
        return faster(times[way])

    why = "; ".join(f"{way}: {reason(text)}" for way, text in row["refused"].items())
    auto = f"{cell('auto')}, {row['auto']}"
    fit = [f"{faster(row['fit']['milliseconds'])}, {row['fit']['backend']}"] if "fit" in row else ["–"] * fitted
    return [row["case"], str(row["members"]), f"{hand:.1f}", *(cell(way) for way in ways), auto, *fit, why]


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


TABLES = {"third-party": third_party, "third-party-gpu": third_party_on_a_gpu}
