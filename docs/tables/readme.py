"""The numbers of README.md."""

import math

import audit
import comparison
import robustness
from layout import benchmark

RIVALS = ("boosting", "forest", "MLP")
"""What log losses on tables are compared with."""
TIMED = ("uncertainty", "voting", "tabm", "search", "pgd", "apgd", "openood")
"""Times of other packages that the page shows, by their names in `comparison.times`."""


def values() -> dict[str, str]:
    """The numbers of the page's sentences."""
    steps = {
        row["backend"]: row["ms"]
        for row in benchmark("stacked_kernels")["steps"]
        if (row["case"], row["members"]) == ("ResNet-20", 20)
    }
    sound = audit.accused_at_first("alone", "sound", "alike")
    joint = audit.accused_at_first("alone", "networks jointly")
    known = robustness.values()
    return {
        "gpu-times": f"{math.floor(steps['by hand'] / steps['auto, long'])}",
        "audit-sound": f"{sound.judged:,}",
        "audit-accused": f"{sound.accused}",
        "audit-joint": f"{joint.judged}",
        "audit-found": f"{joint.accused}",
        "pgd-adp": known["pgd-adp"],
        "adaptive-adp": known["adaptive-adp"],
        **_table_values(),
        **{f"{name}-times": both for name, both in comparison.pairs().items() if name in TIMED},
    }


def _table_values() -> dict[str, str]:
    rows = benchmark("tabular")["rows"]
    losses = [
        {name: row["results"][name]["nll"]["mean"] for name in ("ensemble", *RIVALS)}
        for row in rows
        if row["task"] == "classification"
    ]
    best = sum(min(loss, key=loss.__getitem__) == "ensemble" for loss in losses)
    return {
        "table-best": f"{best}",
        "table-count": f"{len(losses)}",
    }
