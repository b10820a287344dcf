"""Processes that train one ensemble on one card: are they equal to one process, and what does a step cost?

- "gloo, two processes": both on this card, since NCCL refuses that. Steps are captured in pieces, with the collective
  between them. float64, 20 steps or more; the largest difference of any weight or statistic from one process.
- "NCCL, one process": a group of one, whose collectives are inside the captured step, against no group at all.
- Times of a step, in ms: of ResNet-20 at batch 64 with 20, 10 and 5 members in one process, with NCCL at world size 1,
  and of two processes that share the card; and of the collectives alone, by message.

Results are written as they come. It ends within three minutes; what did not come by then is missing.

Usage: python benchmarks/parallel_gpu.py [--json FILE] [--seconds 170]
"""

import argparse
import functools
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from provenance import command_line, library
from torch import Tensor, nn

import dissensus as ds
from dissensus.train import capture, recipe

TOLERANCE = 1e-8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
augmented = partial(ds.objectives.augmented, beta=0.7, loss="squared_error", pool="score")
counted = {"captures": 0, "replays": 0}


def small_resnet() -> nn.Module:
    return ds.nets.resnet20(classes=5)


def mlp() -> nn.Module:
    return ds.nets.mlp(6, 3, (16, 16), dropout=0.3)


@functools.cache
def base() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def shared_mlp() -> nn.Module:
    return ds.adapters.batch_ensemble(base())


def problem(shape: tuple[int, ...], outputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(100, outputs, generator=generator, dtype=torch.float64)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int, dict[str, Any]]] = {
    "MLP with dropout": (mlp, (6,), 3, 3, {}),
    "MLP with dropout, eager": (mlp, (6,), 3, 3, {"eager": True}),
    "ResNet-20": (small_resnet, (3, 8, 8), 5, 3, {"optimizer": "sgd", "momentum": 0.9, "backend": "streams"}),
    "ResNet-20, vmap": (small_resnet, (3, 8, 8), 5, 3, {"optimizer": "sgd", "momentum": 0.9, "backend": "vmap"}),
    "shared weights": (shared_mlp, (6,), 3, 3, {"shared": True, "ema": 0.9, "validation": 0.2}),
    "sampled members": (mlp, (6,), 3, 5, {"active_members": 2}),
    "attacked": (mlp, (6,), 3, 3, {"adversarial": True}),
    "members × data": (mlp, (6,), 3, 1, {"parallel": "members+data"}),
}


def count_captures() -> None:
    """Count captures and replays of steps."""
    capture_on = capture.capture_on

    def counting(*args: Any, **kwargs: Any) -> Any:
        make = capture_on(*args, **kwargs)

        def captured(function: Any, generators: Any) -> Any:
            replay = make(function, generators)  # pyright: ignore[reportOptionalCall]
            counted["captures"] += 1

            def run() -> None:
                counted["replays"] += 1
                replay()

            return run

        return None if make is None else captured

    capture.capture_on = counting


def not_captured(engine: Any) -> None:
    """Steps run eagerly."""


def trained(name: str, in_ranks: bool) -> dict[str, Any]:
    """The tensors that a case trains to, and how often its steps were captured and replayed."""
    build, shape, outputs, members, options = CASES[name]
    options = dict(options)
    shared = ds.adapters.SHARED if options.pop("shared", False) else None
    backend = options.pop("backend", "loop" if shared else "batched")
    given = options.pop("parallel", "members")
    parallel = given if in_ranks else None
    recipe.graph_steps = not_captured if options.pop("eager", False) else capture.graph_steps
    objective: Any = augmented
    x, y = problem(shape, outputs)
    if options.pop("adversarial", False):
        attack = ds.train.AdversarialTraining(0.1, steps=2, box=(-9.0, 9.0), norm="l2")
        objective = partial(ds.objectives.joint, loss="cross_entropy", pool="probability")
        options, y = {**options, "adversarial": attack}, y.argmax(1)
    if "active_members" in options:
        objective = partial(ds.objectives.independent, loss="squared_error")
    counted.update(captures=0, replays=0)
    ensemble = ds.Ensemble(build, members, backend=backend, shared=shared).double().to(DEVICE)
    settings = {"epochs": 5, "batch_size": 16, "lr": 0.01, "clip_norm": 5.0, "schedule": "cosine", **options}
    history = ds.fit(ensemble, (x, y), objective, parallel=parallel, **settings)
    tensors = {**ensemble.body.tensors(), **ensemble.body.shared_tensors()}
    return {
        "tensors": {key: tensor.detach().cpu() for key, tensor in tensors.items()},
        "loss": [entry["loss"] for entry in history.epochs],
        **counted,
    }


def step_time(members: int, parallel: Any, examples: int = 64 * 60) -> dict[str, Any]:
    """The time of a step of ResNet-20 at batch 64 on images of 32 × 32, by the last two of four epochs."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(examples, 3, 32, 32, generator=generator), torch.randint(10, (examples,), generator=generator)
    recipe.graph_steps = capture.graph_steps
    counted.update(captures=0, replays=0)
    ensemble = ds.Ensemble(ds.nets.resnet20, members, backend="streams").to(DEVICE)
    objective = partial(ds.objectives.augmented, beta=0.5, loss="cross_entropy", pool="probability")
    settings = {"epochs": 4, "batch_size": 64, "lr": 0.01, "optimizer": "sgd", "momentum": 0.9}
    history = ds.fit(ensemble, (x.to(DEVICE), y.to(DEVICE)), objective, parallel=parallel, **settings)
    ends = [entry["seconds"] for entry in history.epochs]
    steps = examples // 64
    return {"ms": min(ends[i + 1] - ends[i] for i in (1, 2)) / steps * 1e3, **counted}


def message_times(group_name: str) -> list[dict[str, Any]]:
    """The time of an all-gather of the outputs of 20 members on 64 examples, and of larger messages."""
    rows = []
    for numbers in (20 * 64 * 10, 20 * 256 * 1000, 2**24):
        mine = torch.zeros(numbers // dist.get_world_size(), device=DEVICE)
        gathered = torch.empty(mine.numel() * dist.get_world_size(), device=DEVICE)
        times = []
        for _ in range(13):
            synchronise()
            start = time.perf_counter()
            if group_name == "gloo":  # through the host, as a training does
                pieces = [torch.empty(mine.shape) for _ in range(dist.get_world_size())]
                dist.all_gather(pieces, mine.cpu())
                gathered.copy_(torch.cat(pieces))
            else:
                dist.all_gather_into_tensor(gathered, mine)
            synchronise()
            times.append(time.perf_counter() - start)
        ms = sorted(times[3:])[5] * 1e3
        rows.append({"backend": group_name, "processes": dist.get_world_size(), "bytes": numbers * 4, "ms": ms})
    return rows


def synchronise() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def rank_main(backend: str, folder: Path) -> None:
    """One process: cases and times into files, one after the other."""
    count_captures()
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo")
    rank = dist.get_rank()
    names = list(CASES) if backend == "gloo" else [n for n in CASES if n not in ("members × data",)]

    def store(name: str, result: Callable[[], Any]) -> None:
        try:
            value: Any = result()
        except Exception as reason:
            value = {"error": f"{type(reason).__name__}: {reason}"[:2000]}
        part = folder / f"unfinished-{rank}"
        torch.save((name, value), part)
        part.rename(folder / f"{rank}-{len(list(folder.glob(f'{rank}-*'))):02d}.pt")

    for name in names[:3]:
        store(f"case/{name}", partial(trained, name, True))
    store("messages", partial(message_times, backend))
    if DEVICE == "cuda":
        store("step", partial(step_time, 20, "members"))
    for name in names[3:]:
        store(f"case/{name}", partial(trained, name, True))
    dist.destroy_process_group()


class Processes:
    """The processes of one group, and what they have written so far."""

    def __init__(self, backend: str, size: int, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, __file__, "--rank-of", backend, "--folder", str(folder)]
        self.running = [
            subprocess.Popen(
                command,
                env={**os.environ, **{name: str(value) for name, value in {**shared, "RANK": rank}.items()}},
                stdout=subprocess.DEVNULL,
                stderr=(folder / f"log-{rank}").open("w"),
            )
            for rank in range(size)
        ]

    def results(self) -> dict[str, list[Any]]:
        """What every process has written, by name."""
        found: dict[str, list[Any]] = {}
        for file in sorted(self.folder.glob("*.pt")):
            name, value = torch.load(file, weights_only=False)
            found.setdefault(name, []).append(value)
        return found

    def end(self, deadline: float) -> str:
        """Wait until a deadline; the end of the log of a process that failed."""
        for process in self.running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        failed = [rank for rank, process in enumerate(self.running) if process.returncode]
        return (self.folder / f"log-{failed[0]}").read_text()[-2000:] if failed else ""


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def main(file: str | None, seconds: float) -> int:
    """Run everything within a number of seconds; 1 where something differs or is missing."""
    deadline = time.monotonic() + seconds
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else platform.machine()
    result: dict[str, Any] = {
        "made": {
            "command": command_line(),
            "device": where,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **library(),
            "tolerance": TOLERANCE,
        },
        "equal": [],
        "steps": [],
        "messages": [],
        "errors": [],
    }

    def write() -> None:
        if file is not None:
            Path(file).write_text(json.dumps(result, indent=1) + "\n")

    count_captures()
    expected: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            expected[name] = trained(name, False)
        for backend, size in (("gloo", 2), *([("nccl", 1)] if DEVICE == "cuda" else [])):
            if backend == "nccl":  # while nothing else runs on the card
                for members in (20, 10, 5):
                    row = {"members": members, "group": "none", "processes": 1, **step_time(members, None)}
                    result["steps"].append(row)
                    print(row)
                    write()
            processes = Processes(backend, size, Path(folder, backend))
            log = processes.end(min(deadline, time.monotonic() + 0.55 * seconds))
            for name, values in processes.results().items():
                errors = [value["error"] for value in values if isinstance(value, dict) and "error" in value]
                group = {"group": backend, "processes": size}
                if errors:
                    result["errors"].append({"what": name, **group, "errors": errors})
                elif name == "messages":
                    result["messages"] += values[0]
                elif name == "step":
                    result["steps"].append({"members": 20, **group, **values[0]})
                else:
                    case = name.partition("/")[2]
                    worst = max(difference(value["tensors"], expected[case]["tensors"]) for value in values)
                    counts = {key: values[0][key] for key in counted}
                    result["equal"].append({"case": case, **group, "difference": worst, **counts})
                print(name, group, errors or "came")
                write()
            if log:
                result["errors"].append({"what": "processes", "group": backend, "errors": [log]})
                print(log)
                write()
    write()
    differ = [row for row in result["equal"] if not row["difference"] < TOLERANCE]
    print(f"{len(result['equal'])} comparisons, {len(differ)} differ; {len(result['errors'])} errors")
    return int(bool(differ or result["errors"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--seconds", type=float, default=170.0)
    parser.add_argument("--rank-of", choices=("gloo", "nccl"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is None:
        sys.exit(main(arguments.json, arguments.seconds))
    rank_main(arguments.rank_of, arguments.folder)
