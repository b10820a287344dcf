"""The numbers of README.md."""

import math
from typing import Any

import audit
import robustness
from layout import benchmark, span

RIVALS = ("boosting", "forest", "MLP")
"""What log losses on tables are compared with."""


def values() -> dict[str, str]:
    """The numbers of the page's sentences."""
    fastest = next(
        row["ways"]
        for row in benchmark("gpu")["rows"]
        if (row["case"], row["members"], row["batch"]) == ("ResNet-20", 20, 64)
    )
    sound = audit.accused_at_first("alone", "sound", "alike")
    accused = audit.accused_at_first("train", "sound", "alike").accused
    joint = {by: audit.accused_at_first(by, "networks jointly") for by in ("alone", "train")}
    known = robustness.values()
    return {
        "gpu-times": f"{math.floor(fastest['by hand']['ms'] / fastest['auto']['ms'])}",
        "audit-sound": f"{sound.judged:,}",
        "audit-accused": f"{sound.accused}",
        "audit-accused-train": f"{accused}",
        "audit-joint": f"{joint['alone'].judged}",
        "audit-found": f"{joint['alone'].accused}",
        "audit-found-train": f"{joint['train'].accused}",
        "pgd-adp": known["pgd-adp"],
        "adaptive-adp": known["adaptive-adp"],
        **_table_values(),
        **_times_beside_others(),
    }


def _table_values() -> dict[str, str]:
    rows = benchmark("tabular")["rows"]
    coverage = [row["results"]["ensemble"]["coverage"]["mean"] for row in rows if row["task"] == "regression"]
    losses = [
        {name: row["results"][name]["nll"]["mean"] for name in ("ensemble", *RIVALS)}
        for row in rows
        if row["task"] == "classification"
    ]
    best = sum(min(loss, key=loss.__getitem__) == "ensemble" for loss in losses)
    return {
        "table-coverage": span(100 * share for share in coverage),
        "table-best": f"{best}",
        "table-count": f"{len(losses)}",
    }


def _times_beside_others() -> dict[str, str]:
    """Times of others and of ours, as ``NAME-theirs`` and ``NAME-ours``."""
    (step,) = [
        row["ways"]
        for row in benchmark("gpu")["rows"]
        if (row["case"], row["members"], row["batch"]) == ("ResNet-20", 20, 64)
    ]
    (vehicle,) = [row["results"] for row in benchmark("tabular")["rows"] if row["table"] == "vehicle"]
    (search,) = [row["results"] for row in benchmark("estimators")["rows"] if row["table"] == "breast cancer"]
    pgd, apgd = (_attack(name) for name in ("PGD, 10 steps", "APGD, 50 steps"))
    times = {
        "loop": (step["by hand"]["ms"], step["auto"]["ms"], "ms"),
        "tabm": (vehicle["TabM"]["seconds"]["mean"], vehicle["ensemble"]["seconds"]["mean"], "s"),
        "search": (search["bagged MLPs"]["seconds"], search["EnsembleSearchCV"]["seconds"], "s"),
        "pgd": (pgd["foolbox"], pgd["ours"], "ms"),
        "apgd": (apgd["pyautoattack"], apgd["ours"], "ms"),
    }
    return {
        f"{name}-{whose}": _time(value, unit)
        for name, (theirs, ours, unit) in times.items()
        for whose, value in (("theirs", theirs), ("ours", ours))
    }


def _attack(name: str) -> dict[str, Any]:
    (row,) = [row for row in benchmark("attacks")["rows"] if row["attack"] == name]
    return row["milliseconds"]


def _time(value: float, unit: str) -> str:
    """A time, as ``54 s`` or ``1.5 s``."""
    return f"{value:.0f} {unit}" if value >= 20 else f"{value:.1f} {unit}"
