"""A training step of M members: a Python loop over modules against each backend.

One process, interleaved rounds, medians. A step is everything: batch, forward, loss, backward, AdamW. The loop is what
one would write by hand: M modules, M optimisers. The others are `dissensus.fit` on the same data. The time of a step is
that of a short epoch, divided by its steps. Every repetition begins with new ensembles, for which `auto` chooses anew;
what it loses against the best backend is the median over repetitions. The first step is that of a new ensemble whose
training is one such epoch: all that comes before it counts, measuring backends included.

Usage: python benchmarks/members.py [--rounds 9] [--repetitions 10] [--json FILE]
"""

import argparse
import json
import logging
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from provenance import command_line, library
from torch import nn
from torch.nn import functional as F

import dissensus as ds

BACKENDS = ("loop", "vmap", "batched", "layerwise", "auto")
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


def first_step(
    build: Callable[[], nn.Module], members: int, x: torch.Tensor, y: torch.Tensor, batch: int
) -> dict[str, float]:
    """Milliseconds from nothing to the end of the first step, by hand and with a backend that is chosen."""
    ends: list[float] = []
    started = time.perf_counter()
    by_hand(build, members, x[:batch], y[:batch], batch)()
    hand = time.perf_counter() - started
    started = time.perf_counter()
    ensemble = ds.Ensemble(build, members)
    objective = partial(ds.objectives.independent, loss="squared_error" if y.is_floating_point() else "cross_entropy")

    def mark(moment: ds.Progress) -> None:
        ends.append(time.perf_counter())
        assert moment.step == 1 or len(ends) > 1, "the first report is of the first step"

    ds.fit(ensemble, (x, y), objective, epochs=1, batch_size=batch, progress=mark)
    return {"by hand": 1e3 * hand, "auto": 1e3 * (ends[0] - started)}


def import_seconds(module: str) -> float:
    """Seconds that a new process takes to import a module: the median of five."""
    code = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    command = [sys.executable, "-c", code]
    return median(float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(5))


def row_of(case: str, members: int, repetitions: int, rounds: int) -> dict[str, Any]:
    """Medians over repetitions, each with new ensembles and a new choice."""
    build, shape, batch, steps = CASES[case]
    x, y = problem(shape, batch * steps)
    milliseconds: dict[str, list[float]] = {}
    excess: list[float] = []
    taken: Counter[str] = Counter()
    first: dict[str, list[float]] = {"by hand": [], "auto": []}
    first_step(build, members, x, y, batch)  # libraries set themselves up
    for _ in range(repetitions):
        for name, ms in first_step(build, members, x, y, batch).items():
            first[name].append(ms)
        ours = {backend: stacked(build, members, x, y, batch, backend) for backend in BACKENDS}
        candidates = {"by hand": by_hand(build, members, x, y, batch), **{b: run for b, (run, _) in ours.items()}}
        times = {name: 1e3 * t / steps for name, t in measured(candidates, rounds).items()}
        ran = {b: ensemble.body.ran for b, (_, ensemble) in ours.items()}
        times = {b: t for b, t in times.items() if b in ("by hand", "auto") or ran[b] == b}
        for name, t in times.items():
            milliseconds.setdefault(name, []).append(t)
        taken[ran["auto"]] += 1
        excess.append(times[ran["auto"]] / times[fastest(times)])
    medians = {name: median(values) for name, values in milliseconds.items()}
    return {
        "case": case,
        "members": members,
        "milliseconds": medians,
        "first_step_ms": {name: median(values) for name, values in first.items()},
        "auto": taken.most_common(1)[0][0],
        "taken": dict(taken),
        "best": fastest(medians),
        "auto_over_best": median(excess),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repetitions", type=int, default=1)
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
        "repetitions": options.repetitions,
    }
    print(", ".join(f"{name} {value}" for name, value in made.items()))
    imports = {module: import_seconds(module) for module in ("torch", "dissensus")}
    print("; ".join(f"import {module}: {seconds:.2f} s" for module, seconds in imports.items()))
    header = [f"{'milliseconds a step':28s}", f"{'M':>3s}", f"{'by hand':>9s}", *(f"{b:>16s}" for b in BACKENDS)]
    print(*header, " auto took", " the best", " took / best", "first step by hand, auto")
    rows = []
    for case in CASES:
        for members in (5, 20):
            row = row_of(case, members, options.repetitions, options.rounds)
            ran, first = row["milliseconds"], row["first_step_ms"]
            cells = [
                f"{ran[b]:8.2f} ({ran['by hand'] / ran[b]:4.1f}x)" if b in ran else f"{'-':>16s}" for b in BACKENDS
            ]
            end = f" {row['auto']:>9s}  {row['best']:>8s}  {row['auto_over_best']:11.2f}"
            firsts = f"{first['by hand']:9.1f} {first['auto']:9.1f}"
            print(f"{case:28s} {members:3d} {ran['by hand']:9.2f}", *cells, end, firsts, flush=True)
            rows.append(row)
    if options.json:
        options.json.write_text(json.dumps({"made": made, "import_seconds": imports, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
