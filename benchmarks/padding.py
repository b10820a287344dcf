"""Runs of many shapes: each shape by itself, padded where that is said to be faster, and padded all together.

A round of a search like that of the collusion paper: 50 runs of ten splits, drawn from 3 learning rates, 3 batch
sizes, 3 weight decays, 4 numbers of members, 3 widths and 3 depths. One process; the ways take turns. Seconds of an
epoch are those of a longer training less those of a shorter one, so that building networks and choosing backends does
not count.

Usage: python benchmarks/padding.py [--examples 1000] [--epochs 6] [--rounds 3] [--wall] [--json FILE]
"""

import argparse
import json
import platform
import random
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from provenance import command_line, library

import dissensus as ds

INPUTS, SPLITS, RUNS = 9, 10, 50
SPACE = {
    "lr": [0.01, 0.005, 0.001],
    "batch_size": [16, 32, 64],
    "weight_decay": [0.0, 0.01, 0.001],
    "members": [5, 10, 15, 20],
    "width": [10, 20, 30],
    "depth": [1, 2, 3],
}
WAYS: dict[str, Any] = {"apart": False, "auto": "auto", "together": True}
objective = partial(ds.objectives.augmented, beta=0.0, loss="squared_error", pool="score")


def build(width: int, depth: int) -> torch.nn.Module:
    return ds.nets.mlp(INPUTS, 1, (width,) * depth)


def points() -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [
        {**{name: draw.choice(values) for name, values in SPACE.items()}, "fold": run % SPLITS, "seed": run % SPLITS}
        for run in range(RUNS)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wall", action="store_true", help="wall time instead of the processor's")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    clock = time.perf_counter if options.wall else time.process_time
    generator = torch.Generator().manual_seed(0)

    def data(examples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (torch.randn(examples, INPUTS, generator=generator), torch.randn(examples, 1, generator=generator))
            for _ in range(SPLITS)
        ]

    folds, held_out, grid = data(options.examples), data(options.examples // 4), points()

    def seconds(padding: Any, epochs: int) -> float:
        start = clock()
        ds.sweep(build, folds, objective, grid=grid, epochs=epochs, validation=held_out, padding=padding)
        return clock() - start

    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, padding in WAYS.items():
            short = seconds(padding, 1)
            times[way].append((short, (seconds(padding, 1 + options.epochs) - short) / options.epochs))
    made = {
        "command": command_line(),
        "device": platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **library(),
        "clock": "wall" if options.wall else "processor",
    }
    print(", ".join(f"{key} {value}" for key, value in made.items()))
    rows: list[dict[str, Any]] = []
    for way, both in times.items():
        first, epoch = (median(values) for values in zip(*both, strict=True))
        rows.append({"way": way, "first_epoch_seconds": first, "epoch_seconds": epoch})
        print(f"{way:>9s}: an epoch {epoch:6.2f} s; the first one, with everything before it, {first:6.2f} s")
    if options.json:
        options.json.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
