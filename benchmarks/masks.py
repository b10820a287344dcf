"""What an ensemble from one network costs: Masksembles with four masks, beside one network, four of them, and others.

Usage: python benchmarks/masks.py [--json FILE] [--repeats 15]

The public package `masksembles` is measured too where it is installed: the same network with the same masks.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from provenance import command_line, library
from torch import Tensor, nn

import dissensus as ds
from dissensus.masks import Masksembles, convert, for_width
from dissensus.masks.layer import Tile

PUBLIC = find_spec("masksembles") is not None
theirs: Any = import_module("masksembles.common") if PUBLIC else None
Masksembles2D: Any = import_module("masksembles.torch").Masksembles2D if PUBLIC else None

COUNT, SCALE = 4, 2.0
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "CNN 32-64, 28×28": (lambda: ds.nets.cnn(1, 10, 28, (32, 64), batch_norm=True), (1, 28, 28), 128),
    "ResNet-20, 32×32": (ds.nets.resnet20, (3, 32, 32), 32),
}
WIDTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def public(masked: ds.masks.Masked) -> nn.Module:
    """The same network with the public package's layers, and our masks in them."""
    network = copy.deepcopy(masked.network)
    for name, layer in list(network.named_modules()):
        if isinstance(layer, Masksembles):
            other = Masksembles2D(64, layer.count, SCALE)
            other.masks = nn.Parameter(layer.masks.float(), requires_grad=False)
            network.set_submodule(name, other)
        elif isinstance(layer, Tile):
            network.set_submodule(name, nn.Identity())
    return network


def step(network: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One training step: forward, cross-entropy (a sum over members), backward, AdamW."""
    optimizer = torch.optim.AdamW(network.parameters())
    network.train()

    def call() -> None:
        optimizer.zero_grad(set_to_none=True)
        outputs = network(x)
        outputs = outputs if outputs.ndim == 3 else outputs.unsqueeze(0)
        loss = nn.functional.cross_entropy(outputs.flatten(0, 1), y.repeat(len(outputs)), reduction="sum") / len(y)
        loss.backward()
        optimizer.step()

    return call


def asked(network: nn.Module, x: Tensor) -> Callable[[], None]:
    """One pass of inference."""
    network = copy.deepcopy(network).eval()

    def call() -> None:
        with torch.no_grad():
            network(x)

    return call


def timed(ways: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each way, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 2):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if turn >= 2:
                times[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in times.items()}


def networks(case: str, repeats: int) -> dict[str, Any]:
    build, shape, batch = CASES[case]
    torch.manual_seed(0)
    x, y = torch.randn(batch, *shape), torch.randint(10, (batch,))
    single = build()
    split = convert(single, COUNT, SCALE, seed=0)
    every = convert(single, COUNT, SCALE, seed=0, assign="all")
    four = ds.Ensemble(build, COUNT)
    training = {
        "one network": step(copy.deepcopy(single), x, y),
        "Masksembles, split": step(copy.deepcopy(split), x, y),
        "Masksembles, all": step(copy.deepcopy(every), x, y),
        "four networks": step(four, x, y),
    }
    predicting = {
        "one network": asked(single, x),
        "Masksembles, N predictions": asked(split, x),
        "one member, sliced": asked(split.eval().member(0), x),
        "four networks": asked(ds.Ensemble(build, COUNT), x),
    }
    if PUBLIC:
        same = public(split)
        training["masksembles package, split"] = step(copy.deepcopy(same), x, y)
        tiled = x.repeat(COUNT, 1, 1, 1)
        predicting["masksembles package, N predictions"] = asked(same, tiled)
    sizes = split.sizes()._asdict()
    return {
        "case": case,
        "batch": batch,
        "sizes": sizes,
        "training_ms": timed(training, repeats),
        "inference_ms": timed(predicting, repeats),
    }


def generation(width: int, scale: float) -> dict[str, Any]:
    started = time.perf_counter()
    for seed in range(5):
        for_width(width, COUNT, scale, seed)
    row: dict[str, Any] = {"width": width, "scale": scale, "ours_ms": 200 * (time.perf_counter() - started)}
    if PUBLIC:
        started = time.perf_counter()
        try:
            theirs.generation_wrapper(width, COUNT, scale)
            row["package_ms"] = 1e3 * (time.perf_counter() - started)
        except Exception as reason:  # what it does is the finding
            row["package_fails"] = f"{type(reason).__name__}: {str(reason).splitlines()[0]}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    rows = [networks(case, options.repeats) for case in CASES]
    for row in rows:
        print(json.dumps(row, indent=1, ensure_ascii=False), flush=True)
    made_of = [generation(width, scale) for scale in (2.0, 3.0, 5.0) for width in WIDTHS]
    for row in made_of:
        print(row, flush=True)
    made = {
        "command": command_line(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **library(),
    }
    if options.json:
        options.json.write_text(json.dumps({"made": made, "rows": rows, "generation": made_of}, indent=1) + "\n")


if __name__ == "__main__":
    main()
