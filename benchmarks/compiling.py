"""A training step with and without compiled members, beside a loop by hand of members that are compiled.

One process; medians over epochs, with quartiles. A step is everything: batch by index, forward, loss, backward, Adam,
batch-norm statistics. "By hand" is a Python loop over modules with one optimiser; "by hand, compiled" compiles each of
them by ``torch.compile``, which is what a careful user would write. "Auto" is `fit(compile=False)`, which chooses among
backends, and "auto, compiled" is `fit(compile=True)`. ``first_step_s`` is the time until the first step is done:
measuring, capturing and compiling. ``difference`` is the largest difference of any weight or statistic after 20 steps
in float32 without TF32 (SGD, equal data order) between the two trainings, beside ``again``, that of two trainings
without compiling, whose sums a GPU may order differently each time.

On a GPU, steps are in bf16 with channels last, and the library's are captured. Cases that begin after ``--budget``
seconds are left out, which the result says.

Usage: python benchmarks/compiling.py [--json FILE] [--device cuda] [--only NAME] [--budget 480] [--rounds 5]
"""

import argparse
import gc
import json
import os
import platform
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from provenance import command_line, library
from torch import Tensor, nn

import dissensus as ds

objective = partial(ds.objectives.independent, loss="cross_entropy")


class Case(NamedTuple):
    """Members that train together."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    members: int
    batch: int


def torchvision_resnet(classes: int) -> nn.Module:
    """ResNet-50 for images of 224 pixels."""
    from torchvision.models import resnet50  # pyright: ignore[reportMissingImports]

    return resnet50(num_classes=classes)


GPU = [
    Case("ResNet-20", ds.nets.resnet20, (3, 32, 32), 10, 5, 64),
    Case("ResNet-20", ds.nets.resnet20, (3, 32, 32), 10, 20, 64),
    Case("ResNet-18", ds.nets.resnet18, (3, 32, 32), 10, 5, 128),
    Case("ResNet-20", ds.nets.resnet20, (3, 32, 32), 10, 1, 256),
    Case("head 768-768-1000", partial(ds.nets.mlp, 768, 1000, (768,)), (768,), 1000, 50, 256),
    Case("ResNet-50, 224 pixels", partial(torchvision_resnet, 1000), (3, 224, 224), 1000, 4, 64),
]
CPU = [
    Case("MLP 10-30-30-10", partial(ds.nets.mlp, 10, 10, (30, 30)), (10,), 10, 20, 32),
    Case("CNN 8x8", partial(ds.nets.cnn, 1, 10, 8), (1, 8, 8), 10, 5, 64),
    Case("CNN 28x28", partial(ds.nets.cnn, 1, 10, 28), (1, 28, 28), 10, 5, 64),
    Case("CNN 28x28 with batch norm", partial(ds.nets.cnn, 1, 10, 28, batch_norm=True), (1, 28, 28), 10, 5, 64),
    Case("ResNet-20", ds.nets.resnet20, (3, 32, 32), 10, 3, 32),
]


def data_for(case: Case, steps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and labels of whole batches."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(case.batch * steps, *case.shape, generator=generator, device=device)
    return x, torch.randint(case.classes, (len(x),), generator=generator, device=device)


def synchronised(device: torch.device) -> float:
    """The time when the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Times(NamedTuple):
    """Seconds of steps by epoch, seconds until the first step was done, and what ran."""

    steps: list[float]
    first: float
    ran: str = ""


def by_hand(case: Case, steps: int, epochs: int, device: torch.device, *, compiled: bool) -> Times:
    """A loop over modules, compiled or not."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = max(64, case.members + 8)
    gpu = device.type == "cuda"
    modules = nn.ModuleList(case.build() for _ in range(case.members)).to(device)
    if gpu:
        for weight in modules.parameters():
            if weight.ndim == 4:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    run = [torch.compile(module) if compiled else module for module in modules]
    optimiser = torch.optim.Adam(modules.parameters(), lr=1e-3)
    x, y = data_for(case, steps, device)
    x = x.to(memory_format=torch.channels_last) if gpu and x.ndim == 4 else x
    start = synchronised(device)
    first, ends = 0.0, []
    for _ in range(epochs):
        for chosen in torch.randperm(len(x), device=device).split(case.batch):
            optimiser.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=gpu):
                outputs = torch.stack([module(x[chosen]) for module in run])
            objective(outputs.float(), y[chosen]).total.backward()
            optimiser.step()
            first = first or synchronised(device) - start
        ends.append(synchronised(device))
    return Times([(b - a) / steps for a, b in pairwise(ends)], first)


def by_fit(case: Case, steps: int, epochs: int, device: torch.device, *, compiled: bool) -> Times:
    """This library's `fit`."""
    torch._dynamo.reset()
    ensemble = ds.Ensemble(case.build, case.members).to(device)
    ends: dict[int, float] = {}

    def mark(moment: ds.Progress) -> None:
        if moment.step % steps == 0 or not ends:
            ends[moment.step] = synchronised(device)

    pair, start = data_for(case, steps, device), synchronised(device)
    history = ds.fit(
        ensemble, pair, objective, epochs=epochs, batch_size=case.batch, optimizer="adam", compile=compiled,
        precision="bf16" if device.type == "cuda" else "float32", progress=mark,
    )  # fmt: skip
    whole = [end for step, end in ends.items() if step % steps == 0]
    # Epochs that begin after the first, which measures, compiles and captures.
    return Times([(b - a) / steps for a, b in pairwise(whole)][1:], next(iter(ends.values())) - start, history.backend)


WAYS: dict[str, Callable[..., Times]] = {
    "by hand": partial(by_hand, compiled=False),
    "by hand, compiled": partial(by_hand, compiled=True),
    "auto": partial(by_fit, compiled=False),
    "auto, compiled": partial(by_fit, compiled=True),
}


def difference(case: Case, device: torch.device) -> dict[str, Any]:
    """How far a compiled training is from the training, and the training from itself."""
    pair = data_for(case, 20, device)

    def trained(compiled: bool, backend: str = "auto") -> tuple[dict[str, Tensor], str]:
        ensemble = ds.Ensemble(case.build, case.members, seed=0, backend=backend).to(device)
        history = ds.fit(
            ensemble, pair, objective, epochs=1, batch_size=case.batch, optimizer="sgd", lr=0.01,
            precision="float32", compile=compiled,
        )  # fmt: skip
        return {name: tensor.detach().clone() for name, tensor in ensemble.body.tensors().items()}, history.backend

    first, name = trained(False)
    (again, _), (compiled, ran) = trained(False, name), trained(True, name)

    def largest(other: dict[str, Tensor]) -> float:
        return max(float((tensor.double() - other[key].double()).abs().max()) for key, tensor in first.items())

    return {"difference": largest(compiled), "again": largest(again), "difference_backend": ran}


def measured(case: Case, device: torch.device, rounds: int) -> dict[str, Any]:
    """Milliseconds of every way."""
    results: dict[str, Any] = {}
    steps = 20 if device.type == "cuda" else 6
    for name, way in WAYS.items():
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            times = way(case, steps, rounds + 2, device)
        except Exception as reason:  # a compiler may raise anything
            results[name] = {"refused": (str(reason).splitlines() or [type(reason).__name__])[0]}
            continue
        ordered = sorted(1e3 * seconds for seconds in times.steps)
        quarter = len(ordered) // 4
        results[name] = {
            "ms": median(ordered),
            "low": ordered[quarter],
            "high": ordered[-1 - quarter],
            "n": len(ordered),
            "first_step_s": times.first,
            "backend": times.ran,
        }
        print(f"    {name:18s} {results[name]}", flush=True)
    return results


def main() -> None:
    """Measure all cases, and write as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="cases whose name, members and batch contain this")
    parser.add_argument("--budget", type=float, default=480.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")  # compilers warn about themselves
    device, started = torch.device(options.device), time.perf_counter()
    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    made = {
        "command": command_line(),
        "device": machine,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **library(),
    }
    print(", ".join(f"{key} {value}" for key, value in made.items()), flush=True)
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for case in GPU if device.type == "cuda" else CPU:
        name = f"{case.name}, {case.members} members, batch {case.batch}"
        if options.only not in name:
            continue
        if time.perf_counter() - started > options.budget:
            left_out.append(name)
            continue
        print(name, flush=True)
        row = {"case": case.name, "members": case.members, "batch": case.batch}
        row["ways"] = measured(case, device, options.rounds)
        if len(case.shape) < 3 or case.shape[-1] < 100:
            row |= difference(case, device)
            print(f"    difference {row['difference']:.1e} ({row['difference_backend']}), again {row['again']:.1e}")
        rows.append(row)
        if options.json:
            written = {"made": made, "rows": rows, "left_out": left_out}
            options.json.write_text(json.dumps(written, indent=1) + "\n")
    if left_out:
        print("left out:", "; ".join(left_out))


if __name__ == "__main__":
    main()
