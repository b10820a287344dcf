"""The backend "stacked" on a GPU: its kernels beside cuDNN, layer by layer, and whole steps beside other backends.

Steps are those of `fit` and of a sweep in CUDA graphs, in bf16: 5 and 20 ResNet-20 at batch 64, five ResNet-18 at batch
128, and a sweep of 90 small CNNs on 28×28 pixels, medians over epochs in milliseconds. "By hand" is a loop over modules
with one optimiser. "Auto, long" is what `fit` chooses for a training of 25,000 steps, of which the first 175 run; its
``first_step_s`` are the seconds until the first step is done, with all measuring and compiling.

Layers are those of these networks. Each operation is timed in a CUDA graph (medians of 20 replays, microseconds) for
several tiles of the kernels, for cuDNN with a stream per member, and for grouped convolutions. Batch norm + residual +
ReLU stands beside torch's, a stream per member. Results are compared with float32 first; a layer whose errors are too
large is told, and not timed.

Usage: python benchmarks/stacked_kernels.py [--json FILE] [--only steps|layers] [--budget 380]
"""

import argparse
import contextlib
import functools
import gc
import json
import platform
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from gpu import Case, by_fit, by_hand, data_for, objective, synchronised
from provenance import command_line, library
from torch import Tensor
from torch.nn import functional as F

import dissensus as ds
from dissensus.execution import stacked_convolution, triton_launch
from dissensus.execution.loop import side_by_side
from dissensus.execution.stacked_convolution import GROUPED, KERNEL, STREAMS, Geometry, Tile, Way
from dissensus.execution.stacked_norm import NormSettings, kernel_norm, kernel_norm_gradient
from dissensus.execution.tf32 import tf32

DEVICE = torch.device("cuda")
BACKENDS = ("by hand", "streams", "vmap", "stacked", "auto, long")
MOST_ERROR = 2e-2
"""Relative error of sums of bf16 numbers that is taken for rounding."""
SETTINGS = NormSettings(tracks=True, uses_batch=True, momentum=0.1, eps=1e-5, relu=True)


class Layer(NamedTuple):
    """A convolution without bias, of all members."""

    name: str
    members: int
    batch: int
    size: int
    inputs: int
    outputs: int
    side: int = 3
    stride: int = 1

    @property
    def geometry(self) -> Geometry:
        return Geometry((self.stride, self.stride), (self.side // 2, self.side // 2))


def resnet_layers(name: str, members: int, batch: int, widths: list[int]) -> list[Layer]:
    """The kinds of layers of a ResNet for images of 32 pixels."""
    layers, size = [Layer(f"{name}: first", members, batch, 32, 3, widths[0])], 32
    for place, width in enumerate(widths):
        if place:
            before = widths[place - 1]
            layers.append(Layer(f"{name}: 3x3, stride 2", members, batch, size, before, width, 3, 2))
            layers.append(Layer(f"{name}: 1x1, stride 2", members, batch, size, before, width, 1, 2))
            size //= 2
        layers.append(Layer(f"{name}: 3x3", members, batch, size, width, width))
    return layers


LAYERS = [
    *resnet_layers("20 ResNet-20", 20, 64, [16, 32, 64]),
    Layer("90 CNNs: first", 90, 64, 28, 1, 16),
    Layer("90 CNNs: second", 90, 64, 14, 16, 32),
    *resnet_layers("5 ResNet-18", 5, 128, [64, 128, 256, 512]),
]
IMAGE_TILES = [stacked_convolution.IMAGE_TILE, Tile(256, stages=4)]
TILES = {
    "forward": IMAGE_TILES,
    "input gradient": IMAGE_TILES,
    "weight gradient": [*stacked_convolution.SUM_TILES.values()],
}


KERNELS = stacked_convolution.WAYS[KERNEL]


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device=DEVICE).bfloat16()


def images(layer: Layer, size: int, channels: int) -> Tensor:
    """Images of all members, channels last in memory."""
    return drawn(layer.members, layer.batch, size, size, channels).movedim(-1, 2)


def numbers_of(layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, weights and gradients of outputs."""
    x = images(layer, layer.size, layer.inputs)
    weight = drawn(layer.members, layer.outputs, layer.side, layer.side, layer.inputs).movedim(-1, 2)
    weight = weight / (layer.side * layer.inputs**0.5)
    return x, weight, images(layer, (layer.size - 1) // layer.stride + 1, layer.outputs)


def operations(way: Way, layer: Layer, tensors: tuple[Tensor, Tensor, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """A convolution's three operations in one way."""
    (x, weight, dy), geometry = tensors, layer.geometry
    return {
        "forward": functools.partial(way.forward, x, weight, None, geometry),
        "input gradient": functools.partial(way.input_gradient, dy, weight, x.shape, geometry),
        "weight gradient": functools.partial(way.weight_gradient, x, dy, weight, geometry),
    }


def error(ours: Tensor, theirs: Tensor) -> float:
    """‖ours − theirs‖ / ‖theirs‖."""
    return float(torch.linalg.vector_norm(ours.float() - theirs) / torch.linalg.vector_norm(theirs))


def errors_of(layer: Layer, tensors: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    """Relative errors of kernels, beside float32 convolutions of the same numbers by cuDNN without TF32."""
    exact = tensors[0].float(), tensors[1].float(), tensors[2].float()
    with tf32(on=False):
        theirs = {name: run() for name, run in operations(stacked_convolution.WAYS[STREAMS], layer, exact).items()}
    kernels = operations(KERNELS, layer, tensors)
    return {name: error(run(), theirs[name]) for name, run in kernels.items()}


def microseconds(function: Callable[[], object]) -> float | str:
    try:
        return 1e3 * stacked_convolution.replay_milliseconds(function, rounds=20)
    except Exception as reason:  # a kernel may not compile for a size
        return (str(reason).splitlines() or [type(reason).__name__])[0][:120]


def timed(layer: Layer, tensors: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """Microseconds of each operation in each way."""
    times: dict[str, dict[str, Any]] = {name: {} for name in TILES}
    for way in (STREAMS, GROUPED):
        for name, run in operations(stacked_convolution.WAYS[way], layer, tensors).items():
            times[name][way] = microseconds(run)
    for name, tiles in TILES.items():
        for tile in tiles:
            run = operations(stacked_convolution.kernels_with(tile, tile), layer, tensors)[name]
            times[name][f"kernel {'/'.join(map(str, tile))}"] = microseconds(run)
    return times | timed_norm(layer, tensors[2])


def timed_norm(layer: Layer, x: Tensor) -> dict[str, Any]:
    """Microseconds of batch norm + residual + ReLU, forward and backward, and of torch's on streams."""
    residual, dy = (drawn(*x.movedim(2, -1).shape).movedim(-1, 2) + 0.1 * place for place in range(2))
    weight, bias, mean = (torch.rand(layer.members, layer.outputs, device=DEVICE) for _ in range(3))
    statistics = mean, torch.ones_like(mean)

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        return kernel_norm(x, weight, bias, residual, statistics, SETTINGS)

    y, centre, rstd = forward()

    def backward() -> object:
        return kernel_norm_gradient(x, y, dy, centre, rstd, weight, True, SETTINGS)

    a, r = (tensor.detach().requires_grad_() for tensor in (x, residual))
    g, b = (tensor.clone().requires_grad_() for tensor in (weight, bias))

    def theirs(place: int) -> Tensor:
        own = F.batch_norm(a[place], statistics[0][place], statistics[1][place], g[place], b[place], training=True)
        return (own + r[place]).relu()

    def both(place: int) -> Tensor:
        return torch.autograd.grad(theirs(place), (a, r, g, b), dy[place])[0]

    count = range(layer.members)
    with torch.no_grad():
        library_forward = microseconds(lambda: side_by_side([functools.partial(theirs, p) for p in count], DEVICE))
    together = microseconds(lambda: side_by_side([functools.partial(both, p) for p in count], DEVICE))
    return {
        "norm, forward": {STREAMS: library_forward, KERNEL: microseconds(forward)},
        "norm, both": {STREAMS: together, KERNEL: microseconds(lambda: (forward(), backward()))},
    }


# Whole steps.


def cnn() -> torch.nn.Module:
    return ds.nets.cnn(1, 10, 28)


STEPS = [
    Case("ResNet-20", ds.nets.resnet20, (3, 32, 32), 10, 20, 64),
    Case("ResNet-20", ds.nets.resnet20, (3, 32, 32), 10, 5, 64),
    Case("ResNet-18", ds.nets.resnet18, (3, 32, 32), 10, 5, 128),
    Case("small CNN, a sweep of 30 runs x 3", cnn, (1, 28, 28), 10, 3, 64),
]


def by_sweep(case: Case, backend: str, steps: int, epochs: int) -> tuple[list[float], str]:
    """Seconds of a step of 30 runs, from each epoch, and the backend that ran."""
    ends: dict[int, float] = {}

    def mark(moment: ds.Progress) -> None:
        if moment.step % steps == 0:
            ends[moment.step] = synchronised()

    result = ds.sweep(
        case.build, data_for(case, steps), objective, grid={"seed": list(range(30))}, members=case.members,
        epochs=epochs, batch_size=case.batch, optimizer="adam", precision="bf16", backend=backend, progress=mark,
        device=DEVICE,
    )  # fmt: skip
    marks = list(ends.values())[2:]
    return [(b - a) / steps for a, b in pairwise(marks)], result.run(0).backend


class Enough(Exception):
    """A training has run for long enough."""


def by_long_fit(case: Case, steps: int = 25, epochs: int = 7, of: int = 1000) -> dict[str, Any]:
    """Seconds of a step and until the first step, and what was chosen, of the first epochs of a long training."""
    ensemble = ds.Ensemble(case.build, case.members).to(DEVICE)
    pair, started = data_for(case, steps), synchronised()
    ends: dict[int, float] = {}

    def mark(moment: ds.Progress) -> None:
        if moment.step == 1 or moment.step % steps == 0:
            ends[moment.step] = synchronised()
        if moment.step >= epochs * steps:
            raise Enough

    settings: dict[str, Any] = {"batch_size": case.batch, "optimizer": "adam", "precision": "bf16", "progress": mark}
    with contextlib.suppress(Enough):
        ds.fit(ensemble, pair, objective, epochs=of, **settings)
    whole = [end for step, end in ends.items() if step % steps == 0][2:]
    taken = [(b - a) / steps for a, b in pairwise(whole)]
    chosen = [f"{choice}; {choice.seconds:.1f} s" for choice in ensemble.choices]
    first = {"first_step_s": min(ends.values()) - started, "choices": chosen}
    return {"ms": 1e3 * median(taken), "n": len(taken), "ran": ensemble.body.ran, **first}


def step_times(case: Case, backend: str) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    started = time.perf_counter()
    try:
        if backend == "auto, long":
            return by_long_fit(case)
        if backend == "by hand":
            seconds, ran = by_hand(case, steps=6, epochs=5), backend
        else:
            run = by_sweep if "sweep" in case.name else functools.partial(by_fit, captured=True)
            seconds, ran = run(case, backend, steps=25, epochs=7)
    except Exception as reason:  # a kernel may not compile
        return {"refused": (str(reason).splitlines() or [type(reason).__name__])[0]}
    whole = time.perf_counter() - started
    return {"ms": 1e3 * median(seconds), "n": len(seconds), "ran": ran, "seconds_in_all": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=["steps", "layers"])
    parser.add_argument("--budget", type=float, default=380.0, help="seconds after which nothing new is begun")
    options = parser.parse_args()
    started = time.perf_counter()
    made = {
        "command": command_line(),
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_launch.kernels() and __import__("triton").__version__,
        **library(),
    }
    print(", ".join(f"{key} {value}" for key, value in made.items()), flush=True)
    written: dict[str, Any] = {"made": made, "steps": [], "layers": []}

    def note(kind: str, row: dict[str, Any]) -> None:
        written[kind].append(row)
        print(json.dumps(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(written, indent=1) + "\n")

    def is_late() -> bool:
        return time.perf_counter() - started > options.budget

    for case in STEPS if options.only != "layers" else []:
        for backend in BACKENDS:
            if not is_late() and not ("sweep" in case.name and backend in ("by hand", "auto, long")):
                row = {"case": case.name, "members": case.members, "batch": case.batch, "backend": backend}
                note("steps", row | step_times(case, backend))
    for layer in LAYERS if options.only != "steps" else []:
        if is_late():
            break
        tensors = numbers_of(layer)
        row: dict[str, Any] = dict(layer._asdict())
        try:
            row["errors"] = errors_of(layer, tensors)
            if max(row["errors"].values()) <= MOST_ERROR:
                row["microseconds"] = timed(layer, tensors)
        except Exception as reason:  # a kernel may not compile for a size
            row["refused"] = (str(reason).splitlines() or [type(reason).__name__])[0]
        note("layers", row)


if __name__ == "__main__":
    main()
