"""A training step of K networks on a GPU: what each way of running them costs, and how far it is from the floor.

One run, one process; medians over epochs, with the spread. A step is everything: batch by index from the card's memory,
forward, objective (β = 0.5, so that members interact), backward, Adam, batch-norm statistics; bf16 autocast, images
channels last. "by hand" is what one would write without this library, and what a deep ensemble of torch-uncertainty
does: a ``ModuleList``, a Python loop, one optimiser. "eager" and "graph" are this library's `fit` without and with its
CUDA graph. The floor is the larger of two times: operations (counted by torch) at the card's measured bf16 rate, and
bytes (weights, gradients and moments once; what autograd keeps, written and read once) at its measured bandwidth.

Usage: python benchmarks/gpu.py [--json FILE] [--quick] [--only NAME]
"""

import argparse
import gc
import json
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
from torch.utils.flop_counter import FlopCounterMode

import dissensus as ds
from dissensus.train import recipe
from dissensus.train.memory import COPIES, saved_bytes

DEVICE = torch.device("cuda")
objective = partial(ds.objectives.augmented, beta=0.5, loss="cross_entropy", pool="probability")
GRAPH_STEPS = recipe.graph_steps
WAYS = {
    "loop, eager": ("loop", False),
    "loop, graph": ("loop", True),
    "vmap, eager": ("vmap", False),
    "vmap, graph": ("vmap", True),
    "batched, graph": ("batched", True),
    "streams, graph": ("streams", True),
    "stacked, graph": ("stacked", True),
    "auto": ("auto", True),
}


class Case(NamedTuple):
    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    members: int
    batch: int


def resnets(name: str, build: Callable[[], nn.Module], members: list[int], batch: int) -> list[Case]:
    return [Case(name, build, (3, 32, 32), 10, k, batch) for k in members]


CASES = [
    *resnets("ResNet-20", ds.nets.resnet20, [1, 3, 5, 20], 64),
    *resnets("ResNet-20", ds.nets.resnet20, [1, 3, 5, 20], 256),
    *resnets("ResNet-18", ds.nets.resnet18, [5], 128),
    Case("head 768-768-1000", partial(ds.nets.mlp, 768, 1000, (768,)), (768,), 1000, 50, 256),
]


def data_for(case: Case, steps: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(case.batch * steps, *case.shape, generator=generator, device=DEVICE)
    return x, torch.randint(case.classes, (len(x),), generator=generator, device=DEVICE)


def by_hand(case: Case, steps: int, epochs: int) -> list[float]:
    """Seconds of a step, from each epoch, of a loop over a ``ModuleList``."""
    images = len(case.shape) == 3
    modules = nn.ModuleList(case.build() for _ in range(case.members)).to(DEVICE)
    for weight in modules.parameters():
        if weight.ndim == 4:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    optimiser = torch.optim.Adam(modules.parameters(), lr=1e-3)
    x, y = data_for(case, steps)
    x = x.to(memory_format=torch.channels_last) if images else x
    ends = [synchronised()]
    for _ in range(epochs):
        for chosen in torch.randperm(len(x), device=DEVICE).split(case.batch):
            optimiser.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                outputs = torch.stack([module(x[chosen]) for module in modules])
            objective(outputs.float(), y[chosen]).total.backward()
            optimiser.step()
        ends.append(synchronised())
    return [(b - a) / steps for a, b in pairwise(ends[2:])]


def by_fit(case: Case, backend: str, captured: bool, steps: int, epochs: int) -> tuple[list[float], str]:
    """Seconds of a step, from each epoch of `fit`, and the backend that ran."""
    setattr(recipe, "graph_steps", GRAPH_STEPS if captured else lambda engine: None)  # noqa: ARG005, B010
    ensemble = ds.Ensemble(case.build, case.members, backend=backend).to(DEVICE)
    ends: dict[int, float] = {}

    def mark(moment: ds.Progress) -> None:
        if moment.step % steps == 0:
            ends[moment.step] = synchronised()

    history = ds.fit(
        ensemble,
        data_for(case, steps),
        objective,
        epochs=epochs,
        batch_size=case.batch,
        optimizer="adam",
        precision="bf16",
        progress=mark,
    )
    marks = list(ends.values())[2:]  # the first epochs measure and capture
    return [(b - a) / steps for a, b in pairwise(marks)], history.backend


def synchronised() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def ceilings() -> tuple[float, float]:
    """Bytes and operations a second: a large copy (read and written bytes counted), and a large bf16 product."""
    wide = torch.empty(2**30, dtype=torch.uint8, device=DEVICE).random_()
    other = torch.empty_like(wide)
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    copying, multiplying = [], []
    for _ in range(12):
        start = synchronised()
        other.copy_(wide)
        copying.append(synchronised() - start)
        start = synchronised()
        torch.mm(a, a)
        multiplying.append(synchronised() - start)
    return 2 * 2**30 / median(copying[2:]), 2 * 8192**3 / median(multiplying[2:])


def floor(case: Case, bandwidth: float, rate: float) -> dict[str, float]:
    """The least time a step can take, by bytes and by operations."""
    module = case.build().to(DEVICE)
    x, y = data_for(case, 1)

    def forward() -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return module(x)

    kept = saved_bytes(forward)
    with FlopCounterMode(display=False) as counter:
        nn.functional.cross_entropy(forward().float(), y).backward()
    weights = sum(p.numel() for p in module.parameters())
    moved = case.members * (4 * (COPIES + 2) * weights + 2 * kept)
    operations = case.members * counter.get_total_flops()
    return {"bytes": moved, "operations": operations, "floor_ms": 1e3 * max(moved / bandwidth, operations / rate)}


def measured(case: Case, quick: bool) -> dict[str, Any]:
    """Milliseconds of every way, with quartiles."""
    results: dict[str, Any] = {}
    slow = case.members * (4 if "18" in case.name else 1)
    steps, epochs = (6, 6) if slow >= 20 else (15, 6)
    ways: dict[str, Callable[[], tuple[list[float], str]]] = {"by hand": lambda: (by_hand(case, steps, epochs), "")}
    for name, (backend, captured) in WAYS.items():
        if backend == ("batched" if len(case.shape) == 3 else "stacked"):
            continue
        if quick and name in ("loop, eager", "vmap, eager", "loop, graph"):
            continue
        size = (25, 7) if captured else (steps, epochs)
        ways[name] = partial(by_fit, case, backend, captured, *size)
    for name, way in ways.items():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            seconds, backend = way()
        except RuntimeError as reason:
            results[name] = {"refused": str(reason).splitlines()[0]}
            continue
        ordered = sorted(1e3 * s for s in seconds)
        quarter = len(ordered) // 4
        results[name] = {
            "ms": median(ordered),
            "low": ordered[quarter],
            "high": ordered[-1 - quarter],
            "n": len(ordered),
            "peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20,
            "backend": backend,
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="leave out the slow ways that only explain")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    warnings.filterwarnings(
        "ignore", message="There is a performance drop"
    )  # that vmap may be slow is told by its time
    bandwidth, rate = ceilings()
    made = {
        "command": command_line(),
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **library(),
    }
    print(", ".join(f"{key} {value}" for key, value in made.items()))
    print(f"measured: {bandwidth / 1e12:.2f} TB/s copied, {rate / 1e12:.0f} TFLOP/s in bf16")
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if options.only not in f"{case.name} {case.members} {case.batch}":
            continue
        row = {"case": case.name, "members": case.members, "batch": case.batch, **floor(case, bandwidth, rate)}
        row["ways"] = measured(case, options.quick)
        rows.append(row)
        hand = row["ways"]["by hand"]["ms"]
        print(f"{case.name}, {case.members} members, batch {case.batch}: floor {row['floor_ms']:.2f} ms", flush=True)
        for name, way in row["ways"].items():
            if "ms" in way:
                print(
                    f"    {name:16s} {way['ms']:8.2f} ms ({way['low']:.2f}–{way['high']:.2f})"
                    f"  {hand / way['ms']:5.1f}x  {way['ms'] / row['floor_ms']:6.1f} floors"
                    f"  {way['peak_mib']:8,.0f} MiB  {way['backend']}",
                    flush=True,
                )
            else:
                print(f"    {name:16s} {way['refused']}", flush=True)
        if options.json:
            written = {"made": made, "bandwidth": bandwidth, "bf16_rate": rate, "rows": rows}
            options.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
