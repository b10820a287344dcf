"""What ADP adds to a training step: ResNet-20 with ADP(2, 0.5) beside the same ensemble without regulariser.

Usage: python benchmarks/adp.py [--json FILE] [--members 3 5 20] [--batch 64] [--steps 100] [--rounds 3]

Images are random, of CIFAR-10's size; both trainings take turns, as many rounds as asked. A training is three epochs,
of which the median of the last two is told: the first captures a graph. The paper tells seconds per epoch at batches of
32: 204 and 227 for five members, 692 and 744 for twenty.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from provenance import command_line, library

import dissensus as ds

PAPER = {5: 227 / 204 - 1, 20: 744 / 692 - 1}
"""What ADP adds, by members."""
WAYS = {
    "plain": partial(ds.objectives.independent, loss="cross_entropy"),
    "ADP(2, 0)": partial(ds.objectives.adp, alpha=2.0, beta=0.0),
    "ADP(2, 0.5)": partial(ds.objectives.adp, alpha=2.0, beta=0.5),
}


def milliseconds(x: torch.Tensor, y: torch.Tensor, members: int, batch: int, objective: Any) -> float:
    """Of one step."""
    ensemble = ds.Ensemble(partial(ds.nets.resnet20, 10), members, backend="streams").to(x.device)
    history = ds.fit(
        ensemble,
        (x, y),
        objective,
        epochs=3,
        batch_size=batch,
        optimizer="adam",
        lr=1e-3,
        drop_last=True,
    )
    at = history.column("seconds")
    return 1e3 * statistics.median(b - a for a, b in itertools.pairwise(at)) / (len(x) // batch)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--members", type=int, nargs="+", default=[3, 5, 20])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    examples = args.batch * args.steps
    x = torch.randn(examples, 3, 32, 32, generator=generator).to(device)
    y = torch.randint(10, (examples,), generator=generator).to(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    made = {
        "command": command_line(),
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **library(),
    }
    rows: list[dict[str, Any]] = []
    for members in args.members:
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way, objective in WAYS.items():
                taken[way].append(milliseconds(x, y, members, args.batch, objective))
        medians = {way: statistics.median(times) for way, times in taken.items()}
        added = {way: medians[way] / medians["plain"] - 1 for way in WAYS if way != "plain"}
        rows.append(
            {
                "members": members,
                "batch": args.batch,
                "milliseconds": medians,
                "rounds": taken,
                "added": added,
                "paper_added": PAPER.get(members),
            }
        )
        print(rows[-1], flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
