"""Time of each attack on one network and on 3, 5 and 20 members, on a GPU, beside other libraries.

Usage: python benchmarks/attacks_gpu.py [--json FILE] [--members 1 20 3 5] [--examples 256] [--repeats 3]
           [--budget SECONDS] [--network resnet20] [--device cuda] [--only NAME] [--written-out]

Random images of CIFAR's size, networks with random weights, labels as the ensemble gives them, so that every image is
attacked. Ours attack the ensemble: steps are replayed from CUDA graphs, and for comparison launched one by one
("step by step"; on a CPU there is only this). Other libraries attack a module that averages its members' probabilities
in a loop, as one writes it by hand; with one member it is the network. Libraries that are not installed run as written
out in attack_loops.py, marked so. All take all steps and tell in the end which images are broken.

Each time is the median of whole calls, checks and capture included; the ways take turns. Before that, each way of FGSM
runs once, and ours a few steps of EAD, so that every ensemble has chosen its backend. After the budget nothing new
begins, and what is left is listed.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from attack_peers import Settings, ours, peers
from provenance import how_made
from torch import Tensor, nn

import dissensus as ds
from dissensus import attacks

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet20": ds.nets.resnet20,
    "cnn": partial(ds.nets.cnn, 3, 10, 32, (16, 32)),
}


class ByHand(nn.Module):
    """The log of members' mean probability, members one after the other."""

    def __init__(self, members: list[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        """Pooled scores."""
        return torch.stack([member(x).softmax(-1) for member in self.members]).mean(0).log()


def plain(ensemble: ds.Ensemble) -> nn.Module:
    """The ensemble as a module for other libraries."""
    members = [ensemble.member(index).eval() for index in range(len(ensemble))]
    return members[0] if len(members) == 1 else ByHand(members)


def eagerly(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The same call, its steps launched one by one."""

    def launched() -> Tensor:
        with mock.patch("dissensus.attacks.problem.capture_on", return_value=None):
            return run()

    return launched


def ways_of(
    name: str, ensemble: ds.Ensemble, x: Tensor, y: Tensor, settings: Settings, written_out: bool
) -> dict[str, tuple[Callable[[], Tensor], str]]:
    """All ways to run an attack on an ensemble, each with how it is done."""
    own = ours(name, ensemble, x, y, settings)
    ways = {"ours": (own, "ours")}
    if x.device.type == "cuda":
        ways["step by step"] = (eagerly(own), "ours")
    others = peers(name, plain(ensemble), x, y, settings, written_out)
    return ways | {library: (way.run, way.how) for library, way in others.items()}


def milliseconds(run: Callable[[], Tensor]) -> tuple[float, float]:
    """Milliseconds of a whole call, and the share of examples that it breaks."""
    synchronise = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronise()
    start = time.perf_counter()
    broken = run()
    synchronise()
    return 1e3 * (time.perf_counter() - start), broken.float().mean().item()


class Record:
    """Rows, written to a file as they come, and the time that is left."""

    def __init__(self, file: Path | None, budget: float | None, made: dict[str, str]) -> None:
        self.file, self.end = file, None if budget is None else time.perf_counter() + budget
        self.result: dict[str, Any] = {"made": made, "rows": [], "left_out": []}

    @property
    def over(self) -> bool:
        """Whether the budget is spent."""
        return self.end is not None and time.perf_counter() >= self.end

    def keep(self, part: str, row: dict[str, Any]) -> None:
        """Add a row."""
        self.result[part].append(row)
        print(row, flush=True)
        if self.file is not None:
            self.file.write_text(json.dumps(self.result, indent=1) + "\n")


def row(
    name: str, ensemble: ds.Ensemble, x: Tensor, y: Tensor, settings: Settings, record: Record, args: argparse.Namespace
) -> dict[str, Any]:
    """One attack on one ensemble, all ways."""
    ways = ways_of(name, ensemble, x, y, settings, args.written_out)
    times: dict[str, list[float]] = {way: [] for way in ways}
    broken: dict[str, float] = {}
    for repeat in range(args.repeats):
        if repeat and record.over:
            break
        for way, (run, _how) in ways.items():
            taken, broken[way] = milliseconds(run)
            times[way].append(taken)
    return {
        "attack": settings.titles()[name],
        "members": len(ensemble),
        "examples": len(x),
        "milliseconds": {way: statistics.median(values) for way, values in times.items()},
        "broken": broken,
        "how": {way: how for way, (_run, how) in ways.items()},
        "n": len(times["ours"]),
    }


def measure(settings: Settings, args: argparse.Namespace, record: Record) -> None:
    """All attacks on all numbers of members."""
    device = torch.device(args.device)
    x = torch.rand(args.examples, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(device)
    names = [name for name, title in settings.titles().items() if not args.only or args.only in title]
    for members in args.members:
        left = list(names)
        if not record.over:
            ensemble = ds.Ensemble(NETWORKS[args.network], members).to(device).eval()
            with torch.no_grad():
                y = ds.pooling.mean_probability(ensemble(x)).argmax(-1)
            warm_up = partial(attacks.elastic_net, ensemble, x, y, steps=10, search_steps=1)
            for run in (warm_up, eagerly(lambda warm_up=warm_up: warm_up().success)):
                run()
            for run, _how in ways_of("fgsm", ensemble, x, y, settings, args.written_out).values():
                run()
            while left and not record.over:
                record.keep("rows", row(left.pop(0), ensemble, x, y, settings, record, args))
        for name in left:
            record.keep("left_out", {"attack": settings.titles()[name], "members": members})


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 20, 3, 5])
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, help="seconds after which nothing new begins")
    parser.add_argument("--network", choices=NETWORKS, default="resnet20")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", help="attacks with this in their name")
    parser.add_argument("--written-out", action="store_true", help="loops of other libraries, also if installed")
    return parser.parse_args(words)


def main() -> None:
    """Time all, and write as it goes."""
    args = parsed()
    made = how_made()
    if args.device.startswith("cuda"):
        made["machine"] = torch.cuda.get_device_name(torch.device(args.device))
    settings = Settings(long=100, queries=500)
    measure(settings, args, Record(args.json, args.budget, {**made, "network": args.network}))


if __name__ == "__main__":
    main()
