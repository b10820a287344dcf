"""A training step of R runs × 20 MLPs (10-30-30-1, batch 32): one sweep against a loop over modules and against fits.

One run, one process, medians. A step is everything: batches, forward, objective, backward, AdamW with a rate per run.
The loop is M modules and M optimisers in Python, for one run; for R runs it is that, R times. "fits" are R calls of
`dissensus.fit`, one after the other, from one that is measured. On a GPU the sweep's step is captured in a CUDA graph.

Usage: python benchmarks/sweeps.py [--runs 1 11 110] [--device cpu] [--rounds 5] [--steps N] [--json FILE]
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from provenance import command_line, library
from torch.nn import functional as F

import dissensus as ds

MEMBERS, BATCH = 20, 32
build = partial(ds.nets.mlp, 10, 1, (30, 30))
objective = partial(ds.objectives.augmented, loss="squared_error", pool="score")
FLOPS = 2 * BATCH * (10 * 30 + 30 * 30 + 30) * 3
"""Operations of one network's step in matrix products: forward, and twice that backward."""


def synchronised(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def loop_step(device: torch.device, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    modules = [build().to(device) for _ in range(MEMBERS)]
    optimisers = [torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.0) for module in modules]

    def epoch() -> None:
        for chosen in torch.randperm(len(x), device=device).split(BATCH):
            xs, ys = x[chosen], y[chosen]
            for module, optimiser in zip(modules, optimisers, strict=True):
                optimiser.zero_grad()
                F.mse_loss(module(xs), ys).backward()
                optimiser.step()

    return epoch


def step_seconds(runs: int, x: torch.Tensor, y: torch.Tensor, epochs: int, device: torch.device) -> list[float]:
    """Seconds of a step, from each epoch of a sweep over β (and seeds); the first epochs are not counted."""
    betas = [i / 10 for i in range(11)] if runs > 1 else [0.5]
    grid = {"beta": betas, "seed": list(range(max(1, runs // len(betas))))}
    marks: dict[int, float] = {}
    steps = len(x) // BATCH

    def mark(moment: ds.Progress) -> None:
        if moment.step % steps == 0:
            marks[moment.step] = synchronised(device)

    swept = ds.sweep(
        build,
        (x, y),
        objective,
        grid=grid,
        members=MEMBERS,
        epochs=epochs,
        batch_size=BATCH,
        backend="batched",
        progress=mark,
        device=device,
    )
    assert len(swept) == runs
    return [(b - a) / steps for a, b in pairwise(list(marks.values())[2:])]


def peak_flops(device: torch.device) -> float:
    """Measured rate of a large float32 matrix product."""
    size = 2048 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device)
    times = []
    for _ in range(7):
        start = synchronised(device)
        torch.mm(a, a)
        times.append(synchronised(device) - start)
    return 2 * size**3 / median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 11, 110])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="steps an epoch; by default 10 on a CPU and 100 on a GPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    generator = torch.Generator().manual_seed(0)
    steps = options.steps or (10 if device.type == "cpu" else 100)
    x, y = torch.randn(BATCH * steps, 10, generator=generator), torch.randn(BATCH * steps, 1, generator=generator)
    x, y = x.to(device), y.to(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    made = {
        "command": command_line(),
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **library(),
        "rounds": options.rounds,
        "steps": steps,
    }
    print(", ".join(f"{key} {value}" for key, value in made.items()))
    peak = peak_flops(device)
    print(f"matrix-product peak, measured: {peak / 1e9:,.0f} GFLOP/s")
    print(
        f"{'runs':>6s} {'networks':>9s} {'loop ms':>9s} {'fits ms':>9s} {'sweep ms':>9s} {'µs/network':>11s}"
        f" {'vs loop':>8s} {'vs fits':>8s} {'of peak':>8s}"
    )
    loop = loop_step(device, x, y)
    loop_times, rows, per_run = [], [], []
    for runs in options.runs:
        sweep_times = []
        for _ in range(options.rounds):
            start = synchronised(device)
            loop()
            loop_times.append((synchronised(device) - start) / steps)
            per_run += step_seconds(1, x, y, 6, device)
            sweep_times += step_seconds(runs, x, y, 7, device)
        by_loop, by_fits, step = median(loop_times) * runs, median(per_run) * runs, median(sweep_times)
        networks = runs * MEMBERS
        share = FLOPS * networks / step / peak
        row = {
            "runs": runs,
            "networks": networks,
            "loop_ms": 1e3 * by_loop,
            "fits_ms": 1e3 * by_fits,
            "sweep_ms": 1e3 * step,
            "us_per_network": 1e6 * step / networks,
            "peak_share": share,
        }
        rows.append(row)
        cells = f"{runs:6d} {networks:9,d} {1e3 * by_loop:9.1f} {1e3 * by_fits:9.1f} {1e3 * step:9.2f}"
        ratios = f"{by_loop / step:7.1f}x {by_fits / step:7.1f}x {share:8.1%}"
        print(f"{cells} {1e6 * step / networks:11.2f} {ratios}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"made": made, "peak_gflops": peak / 1e9, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
