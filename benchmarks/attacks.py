"""Time of each attack beside foolbox, torchattacks and pyautoattack, on one network; and of five members beside one.

Usage: python benchmarks/attacks.py [--json FILE] [--examples 64] [--repeats 5]

Runs in the environment of `make oracles`, which has those libraries: PYTHONPATH=src .venv-oracles/bin/python
benchmarks/attacks.py. All attack the same 64 inputs, all steps are taken (no early end), and times are medians of
repeats that go round: first each library once, then each again. Where a library has an attack twice, its plain one.
Passes are forward passes of the network, counted in examples and divided by their number: libraries differ in whether
they try results again, predict clean inputs first, or end before all steps are taken.
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
from provenance import command_line, library
from torch import nn

import dissensus as ds
from dissensus import attacks

EPSILON, STEPS, LONG = 8 / 255, 10, 50


def trained(examples: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor, ds.Ensemble]:
    """A small network, inputs that it gets right, and five such members.

    Ours leave out what is misclassified from the start, so other inputs would flatter them.
    """
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 3, 32, 32, generator=generator)
    y = torch.randint(10, (512,), generator=generator)
    x = (0.5 * patterns[y] + 0.5 * torch.rand(512, 3, 32, 32, generator=generator)).clamp(0, 1)
    ensemble = ds.Ensemble(partial(ds.nets.cnn, 3, 10, 32, (16, 32)), members=5)
    objective = partial(ds.objectives.independent, loss="cross_entropy")
    ds.fit(ensemble, (x, y), objective, epochs=12, batch_size=64, lr=3e-3)
    network = ensemble.member(0).eval()
    with torch.no_grad():
        right = (network(x).argmax(-1) == y).nonzero().flatten()[:examples]
    if len(right) < examples:
        raise RuntimeError(f"the network gets {len(right)} inputs right, fewer than {examples}")
    return network, x[right].contiguous(), y[right], ensemble.eval()


def contestants(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, dict[str, Callable[[], Any]]]:
    """Ours and theirs, by attack."""
    import foolbox  # pyright: ignore[reportMissingImports]
    import torchattacks  # pyright: ignore[reportMissingImports]
    from pyautoattack.autopgd_base import APGDAttack  # pyright: ignore[reportMissingImports]
    from pyautoattack.square import SquareAttack  # pyright: ignore[reportMissingImports]

    wrapped = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    criterion = foolbox.criteria.Misclassification(y)

    def theirs(attack: Any, epsilon: float | None) -> Callable[[], Any]:
        return lambda: attack(wrapped, x, criterion, epsilons=epsilon)

    step = EPSILON / STEPS
    apgd = APGDAttack(network, n_iter=LONG, norm="Linf", n_restarts=1, eps=EPSILON, seed=0, loss="ce", device="cpu")
    square = SquareAttack(network, norm="Linf", n_queries=200, eps=EPSILON, seed=0, n_restarts=1, device="cpu")
    fb = foolbox.attacks
    search = {"steps": LONG, "search_steps": 1, "constant": 1.0, "abort_early": False}
    return {
        "FGSM": {
            "ours": lambda: attacks.fgsm(network, x, y, epsilon=EPSILON),
            "foolbox": theirs(fb.LinfFastGradientAttack(), EPSILON),
            "torchattacks": lambda: torchattacks.FGSM(network, EPSILON)(x, y),
        },
        "BIM, 10 steps": {
            "ours": lambda: attacks.bim(network, x, y, epsilon=EPSILON, steps=STEPS, stop=False),
            "foolbox": theirs(fb.LinfBasicIterativeAttack(abs_stepsize=step, steps=STEPS), EPSILON),
            "torchattacks": lambda: torchattacks.BIM(network, EPSILON, step, STEPS)(x, y),
        },
        "PGD, 10 steps": {
            "ours": lambda: attacks.pgd(network, x, y, epsilon=EPSILON, steps=STEPS, stop=False),
            "foolbox": theirs(fb.LinfPGD(abs_stepsize=step, steps=STEPS), EPSILON),
            "torchattacks": lambda: torchattacks.PGD(network, EPSILON, step, STEPS)(x, y),
        },
        "MIM, 10 steps": {
            "ours": lambda: attacks.mim(network, x, y, epsilon=EPSILON, steps=STEPS, stop=False),
            "torchattacks": lambda: torchattacks.MIFGSM(network, EPSILON, step, STEPS)(x, y),
        },
        "C&W, 50 steps": {
            "ours": lambda: attacks.carlini_wagner(network, x, y, **search),
            "foolbox": theirs(
                fb.L2CarliniWagnerAttack(1, LONG, stepsize=0.01, initial_const=1.0, abort_early=False), None
            ),
            "torchattacks": lambda: torchattacks.CW(network, c=1.0, steps=LONG)(x, y),
        },
        "EAD, 50 steps": {
            "ours": lambda: attacks.elastic_net(network, x, y, **search),
            "foolbox": theirs(fb.EADAttack(1, LONG, initial_const=1.0, abort_early=False), None),
        },
        "APGD, 50 steps": {
            "ours": lambda: attacks.apgd(network, x, y, epsilon=EPSILON, steps=LONG),
            "pyautoattack": lambda: apgd.perturb(x, y),
        },
        "Square, 200 queries": {
            "ours": lambda: attacks.square(network, x, y, epsilon=EPSILON, queries=200),
            "pyautoattack": lambda: square.perturb(x, y),
        },
    }


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

    def count(_module: nn.Module, inputs: tuple[torch.Tensor, ...], _output: Any) -> None:
        nonlocal counted
        counted += len(inputs[0])

    handle = network.register_forward_hook(count)
    try:
        way()
    finally:
        handle.remove()
    return counted / examples


def main() -> None:
    """Time all, and write as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", help="attacks with this in their name")
    args = parser.parse_args()
    network, x, y, ensemble = trained(args.examples)
    made = {
        "command": command_line(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        **library(),
    }
    rows: list[dict[str, Any]] = []
    for name, ways in contestants(network, x, y).items():
        if args.only and args.only not in name:
            continue
        counts = {library: passes(way, network, len(x)) for library, way in ways.items()}
        milliseconds = medians(ways, args.repeats)
        rows.append({"attack": name, "examples": len(x), "milliseconds": milliseconds, "passes": counts})
        print(rows[-1], flush=True)
        _write(args.json, made, rows, [])
    grown: list[dict[str, Any]] = []
    for members in (1, 2, 5):
        subset = ensemble.subset(range(members)).eval()
        both = medians(
            {
                "together": partial(attacks.pgd, subset, x, y, epsilon=EPSILON, steps=STEPS, stop=False),
                "one": partial(attacks.pgd, network, x, y, epsilon=EPSILON, steps=STEPS, stop=False),
            },
            args.repeats,
        )
        grown.append(
            {"members": members, "milliseconds": both["together"], "times_one": both["together"] / both["one"]}
        )
        print(grown[-1], flush=True)
    _write(args.json, made, rows, grown)


def _write(file: Path | None, made: dict[str, Any], rows: list[dict[str, Any]], grown: list[dict[str, Any]]) -> None:
    if file:
        file.write_text(json.dumps({"made": made, "rows": rows, "members": grown}, indent=1) + "\n")


if __name__ == "__main__":
    main()
