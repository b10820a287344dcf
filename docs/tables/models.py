"""The table of docs/models.md: networks of other libraries, by backend."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from layout import BENCHMARKS, benchmark, benchmark_note, in_words, no_result, table

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
    """A table of a result; networks that could not run here are named below it unless they are among ``without``."""
    if not (BENCHMARKS / f"{name}.json").exists():
        return no_result("python benchmarks/third_party.py")
    result = benchmark(name)
    measured = [row for row in result["rows"] if "missing" not in row]
    fitted = any("fit" in row for row in measured)
    introduction = (
        "Milliseconds of a training step of all members (forward pass, backward pass, AdamW), and how many times\n"
        "faster than separate modules by hand. Outputs and gradients of every backend with a number agree with those\n"
        f"of the separate modules. {FIT_SENTENCE if fitted else ''}{load_sentence(result)}\n"
    )
    header = ("network", "members", "by hand", *ways, "auto", *(["`fit`"] if fitted else []))
    rows = [cells(row, ways, fitted) for row in measured]
    missing = [row for row in result["rows"] if "missing" in row and row["case"] not in without]
    below = "\n\n".join(filter(None, (refusals(measured), not_measured(missing), several_runs(result))))
    return f"{introduction}\n{table(header, rows)}\n\n{below}\n\n{benchmark_note(result)}\n"


def refusals(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why some backends have no number, one line for each reason; empty where all have one."""
    networks: dict[str, dict[str, None]] = {}
    for row in rows:
        for way, text in row["refused"].items():
            networks.setdefault(f"`{way}`: {reason(text)}", {})[row["case"].split(", ")[0]] = None
    lines = [f"- {why} ({', '.join(names)})" for why, names in sorted(networks.items())]
    return "Why a backend has no number:\n\n" + "\n".join(lines) if lines else ""


def not_measured(rows: Sequence[Mapping[str, Any]]) -> str:
    """Networks without a row, by what they lacked."""
    networks: dict[str, list[str]] = {}
    for row in rows:
        networks.setdefault(row["missing"].rstrip("."), []).append(row["case"])
    return " ".join(f"Not measured yet: {', '.join(names)} ({why})." for why, names in networks.items())


def several_runs(result: Mapping[str, Any]) -> str:
    """A sentence where rows come from several runs, each of a source of its own."""
    sources = {row["source"] for row in result["rows"] if "source" in row}
    if len(sources) < 2:
        return ""
    runs = in_words(len(sources))
    return f"Rows come from {runs} runs; the stored result names their sources. The line below is of the latest."


FIT_SENTENCE = (
    "All compute in bf16 autocast. The other\ncolumns are eager passes and an optimizer of PyTorch; `fit` captures the "
    "whole step in a CUDA graph. "
)


def cells(row: Mapping[str, Any], ways: Sequence[str] = WAYS, fitted: bool = False) -> list[str]:
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

    auto = f"{cell('auto')}, {row['auto']}"
    fit = [f"{faster(row['fit']['milliseconds'])}, {row['fit']['backend']}"] if "fit" in row else ["–"] * fitted
    return [row["case"], str(row["members"]), f"{hand:.1f}", *(cell(way) for way in ways), auto, *fit]


REASONS = {
    r"Batching rule not implemented for aten::(lstm|gru)\b": "PyTorch's `vmap` has no rule for recurrent layers",
    r"Batching rule not implemented for aten::div\.out": "PyTorch's `vmap` has no rule for a division in place",
    "LSE is not correctly aligned": "PyTorch's fused attention does not run under `vmap`",
    r"layer \S+ \((LSTM|GRU)\)": "it does not know recurrent layers",
    r"layer \S+ \((\w+)\) has no batched form": r"it does not know `nn.\1`",
    "it uses get_attr ": "the forward pass reads a tensor outside of the layers that it knows",
    r"it uses call_\w+ (\w+)": r"it does not know the operation `\1`",
    "its forward pass takes several inputs": "it runs networks of one input",
    "its forward pass cannot be traced": "torch.fx cannot trace the forward pass",
}
"""What the engine says, as a pattern, and what a reader needs of it."""


def reason(text: str) -> str:
    """Why a backend does not run a network, in a reader's words; the engine's own where none are known."""
    for pattern, words in REASONS.items():
        if found := re.match(pattern, text):
            return found.expand(words)
    return re.split(r"\. |; ", text)[0].rstrip(".")


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
