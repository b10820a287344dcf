"""Tables and numbers of docs/comparison.md: other packages beside this one."""

from collections.abc import Mapping
from typing import Any

from layout import BENCHMARKS, benchmark, benchmark_note, no_result, table

Result = Mapping[str, Any]


def training(name: str) -> str:
    """Times of training steps and errors of ensembles, by way; empty for a GPU that has no result."""
    if not (BENCHMARKS / f"{name}.json").exists():
        return "" if name.endswith("_gpu") else no_result("python benchmarks/peers.py")
    result = benchmark(name)
    rows = [cells(row, way, told) for row in result["rows"] for way, told in row["ways"].items()]
    header = ("members", "package", "what ran", "epochs", "seconds", "ms a step", "error")
    return f"{table(header, rows)}\n\n{benchmark_note(result)}\n"


def cells(row: Result, way: str, told: Result) -> list[str]:
    """A row of the table; a way that was refused has its reason instead of numbers."""
    error = "–" if told.get("rmse") is None else f"{told['rmse']:.3f}"
    members = f"{row['members']} × {row['case']}"
    if "refused" in told:
        return [members, way, told["how"], told["refused"], "", "", ""]
    times = [f"{told['seconds']:.2f}", f"{told['ms_per_step']:.2f}"]
    return [members, way, told["how"], f"{row['epochs']}", *times, error]


def detection() -> str:
    """Seconds of scores and of their metrics, and what each way found."""
    if not (BENCHMARKS / "peers.json").exists():
        return no_result("python benchmarks/peers.py")
    row = benchmark("peers")["detection"]
    rows = []
    for way, told in row["ways"].items():
        numbers = [told["refused"], ""] if "refused" in told else [f"{told['seconds']:.2f}", f"{told['auroc']:.3f}"]
        rows.append([way, told["how"], *numbers])
    return table(("package", "what ran", "seconds", "AUROC"), rows) + "\n"


def values() -> dict[str, str]:
    """Times of others and of ours, as ``NAME-theirs`` and ``NAME-ours``."""
    return {
        f"{name}-{whose}": f"{_number(value)} {unit}"
        for name, (theirs, ours, unit) in times().items()
        for whose, value in (("theirs", theirs), ("ours", ours))
    }


def pairs() -> dict[str, str]:
    """Both times together, such as ``54 → 1.5 s``."""
    return {name: f"{_number(theirs)} → {_number(ours)} {unit}" for name, (theirs, ours, unit) in times().items()}


def times() -> dict[str, tuple[float, float, str]]:
    """Times of others, of ours, and their unit."""
    (step,) = [
        row["ways"]
        for row in benchmark("gpu")["rows"]
        if (row["case"], row["members"], row["batch"]) == ("ResNet-20", 20, 64)
    ]
    (vehicle,) = [row["results"] for row in benchmark("tabular")["rows"] if row["table"] == "vehicle"]
    (search,) = [row["results"] for row in benchmark("estimators")["rows"] if row["table"] == "breast cancer"]
    pgd, apgd = (_attack(name) for name in ("PGD, 10 steps", "APGD, 50 steps"))
    return {
        "loop": (step["by hand"]["ms"], step["auto"]["ms"], "ms"),
        "tabm": (vehicle["TabM"]["seconds"]["mean"], vehicle["ensemble"]["seconds"]["mean"], "s"),
        "search": (search["bagged MLPs"]["seconds"], search["EnsembleSearchCV"]["seconds"], "s"),
        "pgd": (pgd["foolbox"], pgd["ours"], "ms"),
        "apgd": (apgd["pyautoattack"], apgd["ours"], "ms"),
        **_trainings_and_detection(),
    }


def _trainings_and_detection() -> dict[str, tuple[float, float, str]]:
    """Whole trainings of five MLPs on abalone, and detection by five ResNet-20."""
    peers = benchmark("peers")
    (ways,) = [row["ways"] for row in peers["rows"] if row["case"].startswith("abalone")]
    detected = peers["detection"]["ways"]
    ours = ways["dissensus"]["seconds"]
    others = {"uncertainty": "torch-uncertainty, deep ensembles", "voting": "Ensemble-PyTorch", "k-heads": "TabM"}
    return {
        **{name: (ways[way]["seconds"], ours, "s") for name, way in others.items()},
        "openood": (detected["OpenOOD"]["seconds"], detected["dissensus, the same score"]["seconds"], "s"),
    }


def _attack(name: str) -> dict[str, Any]:
    (row,) = [row for row in benchmark("attacks")["rows"] if row["attack"] == name]
    return row["milliseconds"]


def _number(value: float) -> str:
    """A time, as ``54`` or ``1.5``."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


TABLES = {
    "training": lambda: training("peers"),
    "training-gpu": lambda: training("peers_gpu"),
    "detection": detection,
}
