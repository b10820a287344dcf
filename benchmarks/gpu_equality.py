"""Does a GPU train to the same weights, captured in a graph or not, in every backend, as the CPU does?

float64, 20 steps or more, batch norm and dropout included. Prints the largest difference of any weight or statistic for
each case and writes them as JSON. Exits with 1 where a difference exceeds rounding, or where a training that was
stopped and resumed is not equal to the bit (deterministic algorithms on).

Usage: python benchmarks/gpu_equality.py [--json FILE]
"""

import argparse
import contextlib
import json
import logging
import platform
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from provenance import command_line
from torch import nn

import dissensus as ds
from dissensus.train import fitting, sweeping
from dissensus.train.checkpoint import Checkpointer
from dissensus.train.engine import Engine

NETWORKS = {
    "MLP with dropout": (partial(ds.nets.mlp, 6, 3, (16, 16), dropout=0.3), (6,)),
    "CNN with batch norm": (partial(ds.nets.cnn, 2, 3, 8, (4, 8), batch_norm=True), (2, 8, 8)),
    "batch norm first": (
        lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        (6,),
    ),
}
TOLERANCE = 1e-8
objective = partial(ds.objectives.augmented, loss="mse", pool="score")


def problem(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(100, 3, generator=generator, dtype=torch.float64)


def fitted(name: str, backend: str, device: str, captured: bool) -> dict[str, torch.Tensor]:
    build, shape = NETWORKS[name]
    ensemble = ds.Ensemble(build, 3, backend=backend).double().to(device)
    with_capture(captured)
    ds.fit(ensemble, problem(shape), partial(objective, beta=0.7), epochs=10, batch_size=16, lr=0.01, clip_norm=5.0,
           schedule="cosine")  # fmt: skip
    return {key: tensor.detach().cpu() for key, tensor in ensemble.body.tensors().items()}


def swept(name: str, device: str, captured: bool) -> dict[str, torch.Tensor]:
    build, shape = NETWORKS[name]
    with_capture(captured)
    grid = {"lr": [0.1, 0.01, 0.001], "seed": [0, 1], "beta": [0.3]}
    result = ds.sweep(build, problem(shape), objective, grid=grid, members=3, epochs=15, batch_size=16, validation=0.2,
                      patience=3, device=device, backend="vmap")  # fmt: skip
    bodies = {i: group.body for i, group in enumerate(result.groups)}
    return {f"{i}.{key}": t.detach().cpu() for i, body in bodies.items() for key, t in body.tensors().items()}


class Interrupted(Exception):
    pass


def interrupted_and_resumed(name: str) -> float:
    """Difference between a captured training that was stopped three times and one that was not: none, to the bit."""
    build, shape = NETWORKS[name]
    with_capture(True)
    results = []
    for stops in ([], [13, 14, 31]):
        ensemble = None
        with tempfile.TemporaryDirectory() as folder:
            for stop in [*stops, None]:
                ensemble = ds.Ensemble(build, 3, backend="vmap").double().to("cuda")
                saving = {"checkpoint": folder, "resume": True, "checkpoint_seconds": 0.0} if stops else {}
                with stopped_after(stop), contextlib.suppress(Interrupted):
                    ds.fit(ensemble, problem(shape), partial(objective, beta=0.7), epochs=6, batch_size=16, **saving)
        assert ensemble is not None
        results.append({key: tensor.detach().cpu() for key, tensor in ensemble.body.tensors().items()})
    return difference(*results)


@contextlib.contextmanager
def stopped_after(step: int | None) -> Iterator[None]:
    """Raise after the checkpoint of a step."""
    write = Checkpointer.write

    def writes(self: Checkpointer, engine: Engine) -> None:
        write(self, engine)
        if step is not None and engine.steps >= step:
            raise Interrupted

    Checkpointer.write = writes
    try:
        yield
    finally:
        Checkpointer.write = write


GRAPH_STEPS = fitting.graph_steps


def with_capture(wanted: bool) -> None:
    for room in (fitting, sweeping):
        setattr(room, "graph_steps", GRAPH_STEPS if wanted else lambda engine: None)  # noqa: ARG005, B010


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[key].double() - b[key].double()).abs().max()) for key in a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.getLogger("dissensus").setLevel(logging.ERROR)  # that some networks are no chains is no news here
    if not torch.cuda.is_available():
        sys.exit("this check needs a CUDA device")
    torch.use_deterministic_algorithms(True)
    made = {"command": command_line(),
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
            "dissensus": ds.__version__, "tolerance": TOLERANCE}  # fmt: skip
    rows = []
    for name in NETWORKS:
        reference = fitted(name, "loop", "cpu", captured=False)
        for backend in ("loop", "vmap", "batched"):
            for captured in (False, True):
                off = difference(fitted(name, backend, "cuda", captured), reference)
                rows.append({"case": f"fit, {name}", "backend": backend, "captured": captured, "difference": off})
        reference = swept(name, "cpu", captured=False)
        for captured in (False, True):
            off = difference(swept(name, "cuda", captured), reference)
            rows.append({"case": f"sweep, {name}", "backend": "vmap", "captured": captured, "difference": off})
        off = interrupted_and_resumed(name)
        rows.append({"case": f"resumed, {name}", "backend": "vmap", "captured": True, "difference": off})
    for row in rows:
        print(f"{row['case']:28s} {row['backend']:8s} captured={row['captured']!s:5s} {row['difference']:.2e}")
    if options.json:
        options.json.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")
    limits = [(row["difference"], 0.0 if "resumed" in row["case"] else TOLERANCE) for row in rows]
    sys.exit(any(off > limit for off, limit in limits))


if __name__ == "__main__":
    main()
