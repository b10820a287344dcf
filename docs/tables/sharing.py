"""The tables of docs/sharing.md: memory, work and time of members that share weights."""

from collections.abc import Mapping
from typing import Any

from layout import BENCHMARKS, benchmark, benchmark_note, no_result, table
from models import load_sentence

COLUMNS = {
    "weights": "held",
    "activations": "kept",
    "operations": "operations",
    "kernels": "kernels",
    "peak": "peak_mebibytes",
    "step": "milliseconds",
    "rate": "rate",
}
"""Columns and the keys of a row; those that no row has are left out."""
MEANINGS = {
    "weights": "weights with gradients and Adam's moments",
    "activations": "what autograd keeps for the backward pass",
    "operations": "operations of the matrix products of both passes",
    "kernels": "kernels that both passes launch",
    "peak": "the peak memory of training",
    "step": "the time of a training step",
    "rate": "operations a second, which is their column divided by that of the step",
}


def sharing() -> str:
    """Memory and time of a step, in multiples of one network's; on a CPU, and on a GPU where there is a result."""
    if not (BENCHMARKS / "sharing.json").exists():
        return no_result("python benchmarks/sharing.py")
    tables = [of_machine(benchmark("sharing"))]
    if (BENCHMARKS / "sharing_gpu.json").exists():
        tables.append(of_machine(benchmark("sharing_gpu")))
    return "\n\n".join(tables) + "\n"


def of_machine(result: Mapping[str, Any]) -> str:
    """The table of one machine. Rows stand in the order of networks, ways and numbers of members."""
    rows = [{**row, "rate": rate(row)} for row in result["rows"]]
    columns = {title: key for title, key in COLUMNS.items() if any(row.get(key) for row in rows)}
    meanings = "; ".join(MEANINGS[title] for title in columns)
    device = result["made"].get("device", "cpu")
    place = "a CPU" if device == "cpu" else f"an {device}"
    introduction = f"On {place}, in multiples of one network: {meanings}.\n{load_sentence(result)}\n"
    names = list(dict.fromkeys(row["network"] for row in result["rows"]))
    ways = list(dict.fromkeys(row["way"] for row in result["rows"]))
    ordered = sorted(rows, key=lambda r: (names.index(r["network"]), ways.index(r["way"]), r["members"]))
    cells = [
        [row["network"], row["way"], str(row["members"]), *(cell(row, key) for key in columns.values()), row["backend"]]
        for row in ordered
    ]
    header = ("network", "members are", "M", *columns, "backend")
    return f"{introduction}\n{table(header, cells)}\n{left_out(result)}\n{benchmark_note(result)}"


def rate(row: Mapping[str, Any]) -> float | None:
    """Operations a second in multiples of those of one network."""
    return row["operations"] * row["one_milliseconds"] / row["milliseconds"] if row.get("operations") else None


def left_out(result: Mapping[str, Any]) -> str:
    """What was not measured, by the reason: numbers of members and networks that have no row, then single ways."""
    rows, missing = result["rows"], result.get("left_out", [])
    sizes, names = {row["members"] for row in rows}, {row["network"] for row in rows}
    causes: dict[str, dict[str, None]] = {}
    for row in missing:
        if row["members"] not in sizes:
            what = f"M = {row['members']}"
        elif row["network"] not in names:
            what = row["network"]
        else:
            what = f"{row['way']} of {row['network']}, M = {row['members']}"
        cause = "memory ran out" if "out of memory" in row["reason"] else row["reason"].split(". ")[0].rstrip(".")
        causes.setdefault(cause, {})[what] = None
    parts = [f"{'; '.join(whats)} ({cause})" for cause, whats in causes.items()]
    return f"\nNot measured: {'; '.join(parts)}.\n" if parts else ""


def cell(row: Mapping[str, Any], key: str) -> str:
    """A number of a row in multiples of that of one network."""
    value = row.get(key)
    if value is None:
        return "–"
    one = 1 if key == "operations" else row.get(f"one_{key}", 1)
    if one is None:
        return "–"
    ratio = value / one
    if key in ("held", "operations", "rate"):
        return f"{ratio:.2f}"
    return f"{ratio:.3f}" if key == "milliseconds" and ratio < 0.1 else f"{ratio:.1f}"


def values() -> dict[str, str]:
    """The numbers of the page's sentences: twenty LoRA members of a ViT beside one network, on both machines."""
    numbers: dict[str, str] = {}
    for machine, name, network in (
        ("cpu", "sharing", "ViT, width 384"),
        ("card", "sharing_gpu_before", "vit_small"),
    ):
        result = benchmark(name)
        (row,) = [
            row for row in result["rows"] if network in row["network"] and (row["way"], row["members"]) == ("LoRA", 20)
        ]
        numbers[f"lora-operations-{machine}"] = cell(row, "operations")
        numbers[f"lora-step-{machine}"] = cell(row, "milliseconds")
        if machine == "cpu":
            product = float(result["made"]["operations a second of a large product"])
            at_best = 1e3 * row["operations"] * row["one_operations"] / product
            numbers["lora-floor"] = f"{at_best / row['one_milliseconds']:.1f}"
    return numbers


TABLES = {"sharing": sharing}
