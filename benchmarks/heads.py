"""Seconds per epoch of heads on features of ImageNet's size, with LDR on all pairs or on members drawn per step.

Usage: python benchmarks/heads.py [--json FILE] [--members 2 5 10 20 50 100] [--drawn 2:5 5:5 2:50] [--examples 1281167]

Features are synthetic, 768 numbers each, of 1,000 classes; heads are 768-768-1000, batches 256. ``--drawn K:M`` draws K
of M members per step. Each row is one training of three epochs, of which the median of the last two is told: the first
chooses a backend and captures a graph. With ``--timed N`` epochs have N examples and times are scaled to the whole.
``--apart`` trains the members of the first row once more, with pairs in several passes over logits instead of one
kernel. ``--casts`` trains them with weights that autocast casts in every step, instead of copies in bfloat16. Both tell
the difference of the losses. ``--profile`` tells instead which kernels a step of each row spends its time in, by
PyTorch's profiler.
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
from dissensus.objectives import pair_pass
from dissensus.train import lowered_weights

INPUTS, CLASSES, BATCH = 768, 1000, 256
PROFILED = 100
"""Steps of a profile."""
PAPER = {(5, 2): 53, (5, 3): 388, (5, 4): 423, (5, 5): 585, (50, 2): 2189, (50, 5): 4213, (50, 10): 7244}
"""Seconds per epoch by (members, drawn): the LDR paper's Table 10, on an RTX 2080 Ti."""


def features(examples: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Features around a centre per class, noisy enough that no head gets all right."""
    generator = torch.Generator(device).manual_seed(0)
    labels = torch.randint(CLASSES, (examples,), generator=generator, device=device)
    centres = torch.randn(CLASSES, INPUTS, generator=generator, device=device)
    x = torch.randn(examples, INPUTS, generator=generator, device=device)
    return x.add_(centres[labels], alpha=0.15), labels


def timed(
    x: torch.Tensor, y: torch.Tensor, members: int, drawn: int, whole: int, *, fused: bool = True, copies: bool = True
) -> dict[str, Any]:
    """One training, and what it took."""
    gpu = x.is_cuda
    lowered_weights.DEVICES = {"cuda"} if copies else set()
    ensemble = ds.Ensemble(partial(ds.nets.mlp, INPUTS, CLASSES, (INPUTS,)), members).to(x.device)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    pair_pass.FUSED = fused
    history = ds.fit(
        ensemble,
        (x, y),
        partial(ds.objectives.ldr, strength=1.0),
        epochs=3,
        batch_size=BATCH,
        lr=1e-3,
        active_members=drawn if drawn < members else None,
    )
    at = history.column("seconds")
    seconds = statistics.median(b - a for a, b in itertools.pairwise(at))
    row = {
        "members": members,
        "drawn": drawn,
        "pairs": drawn * (drawn - 1) // 2,
        "examples": len(x),
        "seconds_per_epoch": seconds * whole / len(x),
        "milliseconds_per_step": 1e3 * seconds * BATCH / len(x),
        "backend": history.backend,
        "precision": history.precision,
        "planned": history.memory,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if gpu else None,
        "paper_seconds": PAPER.get((members, drawn)),
        "loss": history.column("loss"),
        "fused": fused and gpu and not pair_pass._refused,
        "copies": copies and gpu and drawn == members and "bf16" in history.precision,
    }
    print(row, flush=True)
    return row


def profiled(x: torch.Tensor, y: torch.Tensor, members: int, steps: int = PROFILED) -> dict[str, Any]:
    """Microseconds of a step by kernel, the longest first: an epoch after those that choose, capture and warm up."""
    profiles: list[Any] = []
    watch = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)

    def at(moment: ds.train.Progress) -> None:
        if moment.step == 2 * steps and not profiles:
            torch.cuda.synchronize()
            watch.start()
            profiles.append(watch)

    examples = steps * BATCH
    ensemble = ds.Ensemble(partial(ds.nets.mlp, INPUTS, CLASSES, (INPUTS,)), members).to(x.device)
    objective = partial(ds.objectives.ldr, strength=1.0)
    ds.fit(ensemble, (x[:examples], y[:examples]), objective, epochs=3, batch_size=BATCH, lr=1e-3, progress=at)
    torch.cuda.synchronize()
    if not profiles:
        raise RuntimeError("the training told nothing at the end of its second epoch")
    watch.stop()
    kernels = sorted(watch.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    rows = [
        {"kernel": kernel.key, "per_step": kernel.count / steps, "microseconds": kernel.self_device_time_total / steps}
        for kernel in kernels
    ]
    totals = {"members": members, "steps": steps, "microseconds": sum(row["microseconds"] for row in rows)}
    print(totals, flush=True)
    for row in rows[:25]:
        print(f"{row['microseconds']:9.1f} µs {row['per_step']:6.2f} × {row['kernel'][:110]}", flush=True)
    return {**totals, "kernels": [row for row in rows if row["microseconds"] >= 1]}


def main() -> None:
    """Time every row that is asked for, and write as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--members", type=int, nargs="*", default=[2, 5, 10, 20, 50, 100])
    parser.add_argument("--drawn", nargs="*", default=["2:5", "3:5", "4:5", "2:50", "5:50", "10:50"])
    parser.add_argument("--examples", type=int, default=1_281_167)
    parser.add_argument("--timed", type=int, help="examples of an epoch that are timed; by default all")
    parser.add_argument("--apart", action="store_true", help="with pairs in several passes over logits too")
    parser.add_argument("--casts", action="store_true", help="with weights cast in every step too")
    parser.add_argument("--profile", action="store_true", help="tell kernels of a step, not seconds of an epoch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.profile and device.type != "cuda":
        parser.error("--profile tells kernels of a GPU: --device cuda")
    if args.profile and (args.timed or args.examples) < PROFILED * BATCH:
        parser.error(f"--profile needs {PROFILED * BATCH:,} examples")
    x, y = features(args.timed or args.examples, device)
    wanted = [(members, members) for members in args.members]
    wanted += [(int(of), int(drawn)) for drawn, of in (word.split(":") for word in args.drawn)]
    machine = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    )
    made = {"command": command_line(), "machine": machine, "torch": torch.__version__, **library()}
    rows: list[dict[str, Any]] = []
    for place, (members, drawn) in enumerate(wanted):
        if args.profile and drawn < members:
            continue
        rows.append(profiled(x, y, members) if args.profile else timed(x, y, members, drawn, args.examples))
        usual = rows[-1]
        others = [{"fused": False}] * args.apart + [{"copies": False}] * args.casts
        for other in others if place == 0 and not args.profile else []:
            rows.append(timed(x, y, members, drawn, args.examples, **other))
            told: dict[str, Any] = {"without": "one kernel for pairs" if "fused" in other else "copies in bfloat16"}
            told["loss_difference"] = max(abs(a - b) for a, b in zip(rows[-1]["loss"], usual["loss"], strict=True))
            rows[-1] |= told
            print(told, flush=True)
        if args.json:
            args.json.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
