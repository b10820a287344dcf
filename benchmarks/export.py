"""Sizes and latencies of one member, of all members, and of their exports, with predictions and uncertainty.

Usage: python benchmarks/export.py [--json FILE] [--repeats 30] [--threads 1]

Latency is the fastest of many passes on the CPU, the ways taking turns; of one example, and of a batch. "By hand" is a
loop over separate modules with the mean of their probabilities, without uncertainty. The other ways return all outputs
of the export. Every way is compared with the ensemble before it is measured. The time of the record of training rows is
measured too.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime
import torch
from provenance import how_made
from torch import Tensor, nn

import dissensus as ds
from dissensus.export.outputs import classification
from dissensus.training_rows import TrainingRows

BATCH = 64


class Case(NamedTuple):
    """A model to be measured."""

    name: str
    members: int
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    masked: bool = False


CASES = [
    Case("MLP 20-64-64-10", 5, lambda: ds.nets.mlp(20, 10), (20,)),
    Case("MLP 20-64-64-10", 50, lambda: ds.nets.mlp(20, 10), (20,)),
    Case("CNN 32-64, 28×28", 5, lambda: ds.nets.cnn(1, 10, 28, (32, 64), batch_norm=True), (1, 28, 28)),
    Case("the same with masks", 5, lambda: ds.nets.cnn(1, 10, 28, (32, 64), batch_norm=True), (1, 28, 28), True),
    Case("ResNet-20, 32×32", 5, ds.nets.resnet20, (3, 32, 32)),
]
Way = Callable[[Tensor], Any]


def measured(ways: dict[str, Way], x: Tensor, repeats: int) -> dict[str, float]:
    """Least milliseconds of each way: what other work on the machine adds is left out. The ways take turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for round_ in range(repeats + 3):
            for name, way in ways.items():
                started = time.perf_counter()
                way(x)
                if round_ >= 3:
                    times[name].append(1e3 * (time.perf_counter() - started))
    return {name: min(values) for name, values in times.items()}


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir())


def by_hand(networks: list[nn.Module]) -> Way:
    """A loop over separate modules, pooled."""
    return lambda x: torch.stack([network(x).softmax(-1) for network in networks]).mean(0)


def onnx_way(file: Path, threads: int) -> Callable[[Tensor], dict[str, Any]]:
    """A file in onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(file, options)
    names = [entry.name for entry in session.get_outputs()]
    return lambda x: dict(zip(names, session.run(None, {"input": x.numpy()}), strict=True))


def measure(case: Case, repeats: int, threads: int, folder: Path) -> dict[str, Any]:
    """Sizes and latencies of one case."""
    if case.masked:
        model: Any = ds.masks.convert(case.build(), case.members, 2.0, seed=0).eval()
        networks = [model.member(index).eval() for index in range(case.members)]
    else:
        model = ds.Ensemble(case.build, case.members).eval()
        networks = [model.member(index).eval() for index in range(case.members)]
    example = torch.randn(3, *case.shape)
    model.save(folder / "saved")
    one = ds.Ensemble.from_modules([networks[0]])
    one.save(folder / "one")
    started = time.perf_counter()
    program = ds.export.program(model, example)
    seconds = time.perf_counter() - started
    torch.export.save(program, folder / "model.pt2")
    file = ds.export.onnx(model, folder / "model.onnx", example)
    single = ds.export.onnx(networks[0], folder / "one.onnx", example)
    module, in_onnx, one_in_onnx = program.module(), onnx_way(file, threads), onnx_way(single, threads)
    ways: dict[str, Way] = {
        "one member": lambda x: networks[0](x).softmax(-1),
        "by hand": by_hand(networks),
        "ensemble": lambda x: classification(model(x), "probability"),
        "program": module,
        "onnx": in_onnx,
        "one member, onnx": one_in_onnx,
    }
    x = torch.randn(BATCH, *case.shape)
    with torch.no_grad():
        wanted = ways["ensemble"](x)
        results = {"program": module(x), "onnx": {name: torch.from_numpy(v) for name, v in in_onnx(x).items()}}
        differences = {
            way: max(float((values - wanted[name]).abs().max()) for name, values in found.items())
            for way, found in results.items()
        }
        differences["by hand"] = float((ways["by hand"](x) - wanted["probs"]).abs().max())
    assert max(differences.values()) < 1e-5, differences
    return {
        "case": case.name,
        "members": case.members,
        "masked": case.masked,
        "bytes": {
            "one member": folder_bytes(folder / "one"),
            "saved": folder_bytes(folder / "saved"),
            "program": (folder / "model.pt2").stat().st_size,
            "onnx": file.stat().st_size,
        },
        "export_seconds": seconds,
        "milliseconds": {str(rows): measured(ways, x[:rows].clone(), repeats) for rows in (1, BATCH)},
        "difference": max(differences.values()),
    }


def training_rows_ms(repeats: int) -> float:
    """Milliseconds of the record of 60,000 training rows of 784 values."""
    images = torch.rand(60_000, 784)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        TrainingRows.of(images)
        times.append(1e3 * (time.perf_counter() - started))
    return min(times)


def main() -> None:
    """Measure all cases, and write or print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(case, arguments.repeats, arguments.threads, Path(folder)))
        print(json.dumps(rows[-1], ensure_ascii=False))
    made = {**how_made(), "onnxruntime": onnxruntime.__version__}
    result = {
        "made": made,
        "threads": arguments.threads,
        "repeats": arguments.repeats,
        "batch": BATCH,
        "training_rows_ms": training_rows_ms(5),
        "rows": rows,
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
