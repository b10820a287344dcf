"""The table of docs/production.md: sizes and latencies of exports."""

from collections.abc import Mapping
from typing import Any

from layout import BENCHMARKS, benchmark, benchmark_note, no_result, table


def export() -> str:
    """Sizes and latencies of one member, of all, and of their exports."""
    if not (BENCHMARKS / "export.json").exists():
        return no_result("python benchmarks/export.py")
    result = benchmark("export")
    batch = result["batch"]
    introduction = (
        f"Kilobytes on disk, and milliseconds of a pass for one example and for {batch}, on {result['threads']} core"
        f"{'s' * (result['threads'] > 1)}. The loop is one over separate\nmodules by hand, with the mean of their "
        "probabilities alone; the ensemble, the program and the file in onnxruntime\ncompute the uncertainty too. "
        f"Largest difference of outputs: {max(row['difference'] for row in result['rows']):.0e}.\n"
    )
    sizes = table(
        ("model", "members", "kB of one member", "all members, saved", "program", "ONNX file", "s to export"),
        [
            [row["case"], str(row["members"]), *map(kilobytes, row["bytes"].values()), f"{row['export_seconds']:.1f}"]
            for row in result["rows"]
        ],
    )
    ways = ("one member", "by hand", "ensemble", "program", "onnx", "one member, onnx")
    times = table(
        ("ms per pass", "members", "one member", "loop", "ensemble", "program", "ONNX", "one member, ONNX"),
        [[row["case"], str(row["members"]), *(pair(row, way, str(batch)) for way in ways)] for row in result["rows"]],
    )
    return f"{introduction}\n{sizes}\n\n{times}\n\n{benchmark_note(result)}\n"


def kilobytes(size: int) -> str:
    return f"{size / 1000:,.0f}"


def pair(row: Mapping[str, Any], way: str, batch: str) -> str:
    """Times of one example and of a batch."""
    return " / ".join(f"{row['milliseconds'][rows][way]:.3g}" for rows in ("1", batch))


TABLES = {"export": export}


def values() -> dict[str, str]:
    """The numbers of the page's sentences."""
    return {"mnist-ms": f"{benchmark('export')['training_rows_ms']:.0f}"}
