"""A training step of M members: a Python loop over modules against each backend.

One run, one process, interleaved rounds, medians. A step is everything: batch, forward, loss, backward, AdamW. The
loop is what one would write by hand: M modules, M optimisers. The others are `dissensus.fit` on the same data. The time
of a step is that of a short epoch, divided by its steps.

Usage: python benchmarks/members.py [--rounds 9] [--json FILE]
"""

import argparse
import json
import logging
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from provenance import command_line, library
from torch import nn
from torch.nn import functional as F

import dissensus as ds

BACKENDS = ("loop", "vmap", "batched", "auto")
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    # network, shape of an input, batch size, steps per measurement
    "MLP 10-30-30-1, batch 32": (partial(ds.nets.mlp, 10, 1, (30, 30)), (10,), 32, 40),
    "CNN 8x8, batch 64": (partial(ds.nets.cnn, 1, 10, 8), (1, 8, 8), 64, 8),
    "CNN 28x28, batch 64": (partial(ds.nets.cnn, 1, 10, 28), (1, 28, 28), 64, 3),
}


def problem(shape: tuple[int, ...], n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, *shape, generator=generator)
    if len(shape) == 1:
        return x, torch.randn(n, 1, generator=generator)
    return x, torch.randint(0, 10, (n,), generator=generator)


def by_hand(
    build: Callable[[], nn.Module], members: int, x: torch.Tensor, y: torch.Tensor, batch: int
) -> Callable[[], None]:
    """M modules and M optimisers in a Python loop."""
    modules = [build() for _ in range(members)]
    optimisers = [torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.0) for module in modules]
    loss = F.mse_loss if y.is_floating_point() else F.cross_entropy

    def epoch() -> None:
        for chosen in torch.randperm(len(x)).split(batch):
            xs, ys = x[chosen], y[chosen]
            for module, optimiser in zip(modules, optimisers, strict=True):
                optimiser.zero_grad()
                loss(module(xs), ys).backward()
                optimiser.step()

    return epoch


def stacked(
    build: Callable[[], nn.Module], members: int, x: torch.Tensor, y: torch.Tensor, batch: int, backend: str
) -> tuple[Callable[[], None], ds.Ensemble]:
    ensemble = ds.Ensemble(build, members, backend=backend)
    objective = partial(ds.objectives.independent, loss="squared_error" if y.is_floating_point() else "cross_entropy")
    return lambda: (ds.fit(ensemble, (x, y), objective, epochs=1, batch_size=batch), None)[1], ensemble


def measured(candidates: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each candidate, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: median(seconds) for name, seconds in times.items()}


def fastest(milliseconds: dict[str, float]) -> str:
    """The backend that a step was shortest with, of those that ran.

    >>> fastest({"by hand": 1.0, "loop": 3.0, "vmap": 2.0, "auto": 1.9})
    'vmap'
    """
    return min((name for name in milliseconds if name not in ("by hand", "auto")), key=milliseconds.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    logging.getLogger("dissensus").setLevel(logging.ERROR)  # that a CNN is no chain of linear layers is no news here
    made = {
        "command": command_line(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **library(),
        "rounds": options.rounds,
    }
    print(", ".join(f"{name} {value}" for name, value in made.items()))
    header = [f"{'milliseconds a step':28s}", f"{'M':>3s}", f"{'by hand':>9s}", *(f"{b:>16s}" for b in BACKENDS)]
    print(*header, " auto took", " the best", " took / best")
    rows = []
    for case, (build, shape, batch, steps) in CASES.items():
        x, y = problem(shape, batch * steps)
        for members in (5, 20):
            ours = {backend: stacked(build, members, x, y, batch, backend) for backend in BACKENDS}
            candidates = {"by hand": by_hand(build, members, x, y, batch), **{b: run for b, (run, _) in ours.items()}}
            times = {name: 1e3 * t / steps for name, t in measured(candidates, options.rounds).items()}
            taken = {b: ensemble.body.ran for b, (_, ensemble) in ours.items()}
            ran = {b: t for b, t in times.items() if b == "by hand" or b == "auto" or taken[b] == b}
            cells = [
                f"{ran[b]:8.2f} ({times['by hand'] / ran[b]:4.1f}x)" if b in ran else f"{'-':>16s}" for b in BACKENDS
            ]
            best = fastest(ran)
            excess = ran[taken["auto"]] / ran[best]
            end = f" {taken['auto']:>9s}  {best:>8s}  {excess:11.2f}"
            print(f"{case:28s} {members:3d} {times['by hand']:9.2f}", *cells, end, flush=True)
            told = {"auto": taken["auto"], "best": best, "auto_over_best": excess}
            rows.append({"case": case, "members": members, "milliseconds": ran, **told})
    if options.json:
        options.json.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
