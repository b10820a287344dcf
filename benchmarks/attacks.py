"""Time of each attack beside foolbox, torchattacks and pyautoattack, on one network; and of more members beside one.

Usage: python benchmarks/attacks.py [--json FILE] [--examples 64] [--repeats 5] [--threads 1] [--only NAME]
           [--parts rows members]

Runs in the environment of `make oracles`, which has those libraries: PYTHONPATH=src .venv-oracles/bin/python
benchmarks/attacks.py. Where one is missing, its loop runs as written out in attack_loops.py, if it is there. All attack
the same 64 inputs, take all steps, and tell in the end which inputs are broken. Times are medians of repeats that go
round: first each library once, then each again. Where a library has an attack twice, its plain one. Passes are forward
passes of the network, counted in examples and divided by their number: libraries differ in whether they try results
again, predict clean inputs first, or leave out what is broken. Parts can be measured one after the other: a result of
the same library on the same machine stays in the file.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attack_peers import Settings, Way, ours, peers
from provenance import command_line, library
from torch import Tensor, nn

import dissensus as ds

GROWN = ("fgsm", "pgd", "carlini_wagner", "square")
"""Attacks that are timed on more members."""
MEMBERS = (1, 3, 5, 20)


def trained(
    examples: int, members: int = max(MEMBERS), epochs: int = 12
) -> tuple[nn.Module, Tensor, Tensor, ds.Ensemble]:
    """A small network, inputs that it gets right, and such members, of which it is the first.

    Ours leave out what is misclassified from the start, so other inputs would flatter them.
    """
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 3, 32, 32, generator=generator)
    y = torch.randint(10, (512,), generator=generator)
    x = (0.5 * patterns[y] + 0.5 * torch.rand(512, 3, 32, 32, generator=generator)).clamp(0, 1)
    ensemble = ds.Ensemble(partial(ds.nets.cnn, 3, 10, 32, (16, 32)), members=members)
    objective = partial(ds.objectives.independent, loss="cross_entropy")
    ds.fit(ensemble, (x, y), objective, epochs=epochs, batch_size=64, lr=3e-3)
    network = ensemble.member(0).eval()
    with torch.no_grad():
        right = (network(x).argmax(-1) == y).nonzero().flatten()[:examples]
    if len(right) < examples:
        raise RuntimeError(f"the network gets {len(right)} inputs right, fewer than {examples}")
    return network, x[right].contiguous(), y[right], ensemble.eval()


def medians(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Milliseconds of each, the ways taking turns; once before that counts for nothing."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if turn:
                taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(times) for name, times in taken.items()}


def passes(way: Callable[[], Any], network: nn.Module, examples: int) -> float:
    """Forward passes per example."""
    counted = 0

    def count(_module: nn.Module, inputs: tuple[Tensor, ...], _output: Any) -> None:
        nonlocal counted
        counted += len(inputs[0])

    handle = network.register_forward_hook(count)
    try:
        way()
    finally:
        handle.remove()
    return counted / examples


def beside_others(
    name: str, network: nn.Module, x: Tensor, y: Tensor, settings: Settings, repeats: int
) -> dict[str, Any]:
    """One attack of all libraries on one network."""
    ways = {"ours": Way(ours(name, network, x, y, settings), "ours"), **peers(name, network, x, y, settings)}
    runs = {library: way.run for library, way in ways.items()}
    return {
        "attack": settings.titles()[name],
        "examples": len(x),
        "milliseconds": medians(runs, repeats),
        "passes": {library: passes(run, network, len(x)) for library, run in runs.items()},
        "broken": {library: float(run().float().mean()) for library, run in runs.items()},
        "how": {library: way.how for library, way in ways.items()},
    }


def grown(
    name: str,
    members: int,
    network: nn.Module,
    ensemble: ds.Ensemble,
    x: Tensor,
    y: Tensor,
    settings: Settings,
    repeats: int,
) -> dict[str, Any]:
    """One attack on some members, beside one network and beside one member; and the bare passes of both."""
    subset, one = (ensemble.subset(range(count)).eval() for count in (members, 1))

    def bare(model: Any) -> Callable[[], Any]:
        def run() -> Tensor:
            point = x.clone().requires_grad_()
            return torch.autograd.grad(model(point).logsumexp(-1).sum(), point)[0]

        return run

    runs = {"members": subset, "one network": network, "one member": one}
    times = medians({way: ours(name, model, x, y, settings) for way, model in runs.items()}, repeats)
    bare_times = medians({way: bare(model) for way, model in runs.items()}, repeats)
    return {"attack": settings.titles()[name], "members": members, "milliseconds": times, "pass": bare_times}


def earlier(file: Path | None, made: dict[str, str]) -> dict[str, Any]:
    """The result of an earlier call of the same library on the same machine, to which others are added, or none."""
    result: dict[str, Any] = {"made": made, "rows": [], "members": []}
    if file is None or not file.exists():
        return result
    stored = json.loads(file.read_text())
    same = {key: value for key, value in stored["made"].items() if key != "command"}
    return stored if same == {key: value for key, value in made.items() if key != "command"} else result


def main() -> None:
    """Time all, and write as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", help="attacks with this in their name")
    parser.add_argument("--parts", nargs="+", choices=("rows", "members"), default=["rows", "members"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    network, x, y, ensemble = trained(args.examples)
    settings = Settings()
    made = {
        "command": command_line(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": str(args.threads),
        "torch": torch.__version__,
        **library(),
    }
    chosen = [name for name, title in settings.titles().items() if not args.only or args.only in title]
    result = earlier(args.json, made)

    def keep(part: str, row: dict[str, Any]) -> None:
        case = (row["attack"], row.get("members"))
        result[part] = [old for old in result[part] if (old["attack"], old.get("members")) != case] + [row]
        print(row, flush=True)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    for name in chosen if "rows" in args.parts else []:
        keep("rows", beside_others(name, network, x, y, settings, args.repeats))
    for name in [name for name in chosen if name in GROWN and "members" in args.parts]:
        for members in MEMBERS:
            keep("members", grown(name, members, network, ensemble, x, y, settings, min(args.repeats, 2)))


if __name__ == "__main__":
    main()
