"""Does a GPU train to the same weights, captured in a graph or not, in every backend, as the CPU does?

float64, 20 steps or more, batch norm and dropout included. Prints the largest difference of any weight or statistic for
each case and writes them as JSON. "in groups" takes two of three members at a time; "augmented" and "foreign loader"
compare captured with eager steps on the GPU, whose generator draws other numbers than the CPU's; "one kernel" compares
float32 updates in Triton with the passes they replace; "predict" is captured inference. Exits with 1 where a difference
exceeds rounding, where a training that was stopped and resumed is not equal to the bit (deterministic algorithms on),
or where a training took more memory than it was allowed.

Usage: python benchmarks/gpu_equality.py [--json FILE]
"""

import argparse
import contextlib
import json
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from provenance import command_line, library
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus.execution.graphs import Capture
from dissensus.train import fused_optim, memory, recipe
from dissensus.train.capture import GraphSteps
from dissensus.train.checkpoint import Checkpointer
from dissensus.train.engine import Engine

NETWORKS = {
    "MLP with dropout": (partial(ds.nets.mlp, 6, 3, (16, 16), dropout=0.3), (6,)),
    "CNN with batch norm": (partial(ds.nets.cnn, 2, 3, 8, (4, 8), batch_norm=True), (2, 8, 8)),
    "ResNet-20": (ds.nets.resnet20, (3, 8, 8)),
    "batch norm first": (
        lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        (6,),
    ),
}
TOLERANCE = 1e-8
objective = partial(ds.objectives.augmented, loss="squared_error", pool="score")


def problem(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(100, 10 if shape == (3, 8, 8) else 3, generator=generator, dtype=torch.float64)


def fitted(name: str, backend: str, device: str, captured: bool, **options: Any) -> dict[str, torch.Tensor]:
    build, shape = NETWORKS[name]
    ensemble = ds.Ensemble(build, 3, backend=backend).double().to(device)
    with_capture(captured)
    data: Any = problem(shape)
    if options.pop("loader", False):
        data = DataLoader(TensorDataset(*data), 16, shuffle=True, generator=torch.Generator().manual_seed(1))
    # SGD on the ResNet: Adam would turn a gradient that is rounding noise into a step.
    options = {"optimizer": "sgd" if name == "ResNet-20" else "adamw", "momentum": 0.9, **options}
    ds.fit(
        ensemble,
        data,
        partial(objective, beta=0.7),
        epochs=5,
        batch_size=16,
        lr=0.01,
        clip_norm=5.0,
        schedule="cosine",
        **options,
    )
    return {key: tensor.detach().cpu() for key, tensor in ensemble.body.tensors().items()}


@contextlib.contextmanager
def in_groups(members: int) -> Iterator[None]:
    at_once = memory.Needs.at_once
    memory.Needs.at_once = lambda self, budget: members  # noqa: ARG005
    try:
        yield
    finally:
        memory.Needs.at_once = at_once


def jitter(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return ds.data.augment.shifts(ds.data.augment.flips(x, generator), generator)


def predicted(name: str) -> float:
    """Difference between captured inference on the GPU, through a file, and the CPU's."""
    build, shape = NETWORKS[name]
    ensemble = ds.Ensemble(build, 3, backend="streams").double()
    x = problem(shape)[0]
    expected = ensemble.predict(x, batch_size=8)
    with tempfile.TemporaryDirectory() as folder:
        outputs = ensemble.to("cuda").predict(x, batch_size=8, file=Path(folder) / "outputs.npy").clone()
    return float((outputs - expected).abs().max())


def one_kernel(optimizer: str) -> float:
    """Difference of float32 weights after 25 steps, updated by one kernel or by several passes."""
    states = []
    build, shape = NETWORKS["MLP with dropout"]
    takes = fused_optim.takes
    for use in (False, True):
        fused_optim.takes = takes if use else lambda flat: False  # noqa: ARG005
        ensemble = ds.Ensemble(build, 3, backend="batched").to("cuda")
        x, y = problem(shape)
        with_capture(True)
        ds.fit(
            ensemble,
            (x.float(), y.float()),
            partial(objective, beta=0.7),
            epochs=4,
            batch_size=16,
            lr=0.01,
            momentum=0.9,
            weight_decay=0.01,
            optimizer=optimizer,
            clip_norm=1.0,
        )
        states.append({key: tensor.detach().cpu() for key, tensor in ensemble.body.tensors().items()})
    fused_optim.takes = takes
    return difference(*states)


def memory_kept() -> dict[str, Any]:
    """Five ResNet-18, batch 128, in half the memory that they want: what was planned, and what was taken."""
    torch.cuda.empty_cache()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(640, 3, 32, 32, generator=generator), torch.randint(10, (640,), generator=generator)
    cross_entropy = partial(ds.objectives.augmented, beta=0.5, loss="cross_entropy", pool="probability")
    rows = {}
    for name, allowed in (("all at once", None), ("half", 2 * 2**30)):
        ensemble = ds.Ensemble(ds.nets.resnet18, 5, backend="streams").to("cuda")
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        history = ds.fit(ensemble, (x, y), cross_entropy, epochs=2, batch_size=128, max_memory=allowed)
        taken = torch.cuda.max_memory_allocated() - before
        rows[name] = {
            "planned": history.memory,
            "allowed_mib": None if allowed is None else allowed / 2**20,
            "taken_mib": taken / 2**20,
            "loss": history.epochs[-1]["loss"],
        }
        del ensemble
    return rows


def swept(name: str, device: str, captured: bool) -> dict[str, torch.Tensor]:
    build, shape = NETWORKS[name]
    with_capture(captured)
    grid = {"lr": [0.1, 0.01, 0.001], "seed": [0, 1], "beta": [0.3]}
    result = ds.sweep(
        build,
        problem(shape),
        objective,
        grid=grid,
        members=3,
        epochs=15,
        batch_size=16,
        validation=0.2,
        patience=3,
        device=device,
        backend="vmap",
    )
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
        if step is not None and engine.state.steps >= step:
            raise Interrupted

    Checkpointer.write = writes
    try:
        yield
    finally:
        Checkpointer.write = write


GRAPH_STEPS = recipe.graph_steps
replayed = {"steps": 0}
"""Steps that were replayed from a graph since the last look."""


def with_capture(wanted: bool) -> None:
    setattr(recipe, "graph_steps", counted if wanted else lambda engine: None)  # noqa: ARG005, B010


def counted(engine: Engine) -> GraphSteps | None:
    """Captured steps that count their replays."""
    steps = GRAPH_STEPS(engine)
    if steps is None:
        return None
    library_capture = steps.cache.new_capture

    def new_capture() -> Capture | None:
        capture = library_capture()
        if capture is None:
            return None

        def counting(function: Callable[[], None], generators: Sequence[torch.Generator]) -> Callable[[], None]:
            replay = capture(function, generators)

            def replay_and_count() -> None:
                replayed["steps"] += 1
                replay()

            return replay_and_count

        return counting

    return GraphSteps(new_capture)


def replays() -> int:
    """How many steps were replayed since the last call."""
    steps, replayed["steps"] = replayed["steps"], 0
    return steps


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
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    made = {
        "command": command_line(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **library(),
        "tolerance": TOLERANCE,
    }
    rows = []
    for name in NETWORKS:
        reference = fitted(name, "loop", "cpu", captured=False)
        for backend in ("loop", "streams", "vmap", *(["batched"] if "MLP" in name else [])):
            for captured in (False, True):
                off = difference(fitted(name, backend, "cuda", captured), reference)
                rows.append(
                    {
                        "case": f"fit, {name}",
                        "backend": backend,
                        "captured": captured,
                        "difference": off,
                        "replays": replays(),
                    }
                )
        with in_groups(2):
            off = difference(fitted(name, "streams", "cuda", True), reference)
        rows.append({"case": f"fit in groups, {name}", "backend": "streams", "captured": True, "difference": off})
        extra = {"foreign loader": {"loader": True}}
        extra |= {"augmented": {"augment": jitter}} if len(NETWORKS[name][1]) == 3 else {}
        for case, asked in extra.items():
            off = difference(*(fitted(name, "streams", "cuda", captured, **asked) for captured in (False, True)))
            rows.append({"case": f"{case}, {name}", "backend": "streams", "captured": True, "difference": off})
        rows.append({"case": f"predict, {name}", "backend": "streams", "captured": True, "difference": predicted(name)})
        if name == "ResNet-20":
            continue
        reference = swept(name, "cpu", captured=False)
        for captured in (False, True):
            off = difference(swept(name, "cuda", captured), reference)
            rows.append({"case": f"sweep, {name}", "backend": "vmap", "captured": captured, "difference": off})
        off = interrupted_and_resumed(name)
        rows.append({"case": f"resumed, {name}", "backend": "vmap", "captured": True, "difference": off})
    for optimizer in ("sgd", "adam", "adamw"):
        off = one_kernel(optimizer)
        rows.append({"case": f"one kernel, {optimizer}", "backend": "batched", "captured": True, "difference": off})
    torch.use_deterministic_algorithms(False)
    kept = memory_kept()
    for row in rows:
        print(f"{row['case']:28s} {row['backend']:8s} captured={row['captured']!s:5s} {row['difference']:.2e}")
    if options.json:
        options.json.write_text(json.dumps({"made": made, "rows": rows, "memory": kept}, indent=1) + "\n")
    for name, row in kept.items():
        print(name, row)
    limits = [(row["difference"], limit(row["case"])) for row in rows]
    kept_to = kept["half"]["taken_mib"] <= kept["half"]["allowed_mib"]
    real = all((row["replays"] > 0) == row["captured"] for row in rows if "replays" in row)
    sys.exit(any(off > most for off, most in limits) or not kept_to or not real)


def limit(case: str) -> float:
    return 0.0 if "resumed" in case else 1e-5 if "one kernel" in case else TOLERANCE


if __name__ == "__main__":
    main()
