"""The table of docs/sharing.md: memory and time of members that share weights."""

from layout import BENCHMARKS, benchmark, benchmark_note, no_result, table
from models import load_sentence


def sharing() -> str:
    """Memory and time of a step, in multiples of one network's."""
    if not (BENCHMARKS / "sharing.json").exists():
        return no_result("python benchmarks/sharing.py")
    result = benchmark("sharing")
    introduction = (
        "In multiples of one network: weights with gradients and Adam's moments; what autograd keeps for the backward\n"
        f"pass; and the time of a training step. {load_sentence(result)}\n"
    )
    rows = [
        [
            row["network"],
            row["way"],
            str(row["members"]),
            f"{row['held']:.2f}",
            f"{row['kept']:.1f}",
            f"{row['milliseconds'] / row['one_milliseconds']:.1f}",
            row["backend"],
        ]
        for row in result["rows"]
    ]
    header = ("network", "members are", "M", "weights", "activations", "step", "backend")
    return f"{introduction}\n{table(header, rows)}\n\n{benchmark_note(result)}\n"


TABLES = {"sharing": sharing}
