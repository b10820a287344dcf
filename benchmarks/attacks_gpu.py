"""Time of each attack on a GPU, its steps launched one by one against replayed from CUDA graphs.

Usage: python benchmarks/attacks_gpu.py [--out benchmarks/results/attacks_gpu.json] [--quick]

256 random images of CIFAR's size, ensembles of 1, 3 and 5 ResNet-20 with random weights, labels as the ensemble gives
them. Each time is the median of three whole calls, checks and capture included (``n``: fewer where three would take too
long); the two ways take turns. Before that, both ways run once on few steps, so that every ensemble has chosen its
backend. Examples fall out as they are broken; ``success`` is the share that each way breaks.
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
from provenance import library
from torch import Tensor

import dissensus as ds
from dissensus import attacks
from dissensus.execution.graphs import capture_on as library_capture_on

DEVICE = torch.device("cuda")
EPSILON, EXAMPLES, REPEATS = 1 / 255, 256, 3
LONGEST = 5.0
"""Seconds after which a row is not repeated any more."""
SEARCH: dict[str, Any] = {"steps": 100, "search_steps": 1, "constant": 1.0}
ATTACKS: dict[str, Callable[..., attacks.Adversarial]] = {
    "FGSM": partial(attacks.fgsm, epsilon=EPSILON),
    "BIM, 10 steps": partial(attacks.bim, epsilon=EPSILON),
    "PGD, 10 steps": partial(attacks.pgd, epsilon=EPSILON),
    "MIM, 10 steps": partial(attacks.mim, epsilon=EPSILON),
    "APGD, 100 steps": partial(attacks.apgd, epsilon=EPSILON),
    "C&W, 100 steps": partial(attacks.carlini_wagner, **SEARCH),
    "EAD, 100 steps": partial(attacks.elastic_net, **SEARCH),
    "Square, 500 queries": partial(attacks.square, epsilon=EPSILON, queries=500),
}


def eager(_device: torch.device) -> None:
    """Steps are not captured."""


class Counts:
    """How often steps are captured and replayed."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def capture_on(self, device: torch.device) -> Any:
        """As the library captures, and counted."""
        capture = library_capture_on(device)
        assert capture is not None

        def counted(function: Callable[[], None], generators: Any) -> Callable[[], None]:
            replay = capture(function, generators)
            self.captures += 1

            def once() -> None:
                self.replays += 1
                replay()

            return once

        return counted


def taken(attack: Callable[[], attacks.Adversarial], capture_on: Callable[[torch.device], Any]) -> tuple[float, float]:
    """Milliseconds of a whole call, and the share of examples that it breaks."""
    with mock.patch("dissensus.attacks.problem.capture_on", capture_on):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = attack()
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start), result.success.float().mean().item()


def row(name: str, ensemble: ds.Ensemble, x: Tensor, y: Tensor, repeats: int) -> dict[str, Any]:
    """One attack on one ensemble, both ways."""
    attack, counts = partial(ATTACKS[name], ensemble, x, y), Counts()
    ways: dict[str, Callable[[torch.device], Any]] = {"eager": eager, "captured": counts.capture_on}
    times: dict[str, list[float]] = {way: [] for way in ways}
    success: dict[str, float] = {}
    start = time.perf_counter()
    while not success or (len(times["eager"]) < repeats and time.perf_counter() - start < LONGEST):
        counts.captures = counts.replays = 0
        for way, capture_on in ways.items():
            milliseconds, success[way] = taken(attack, capture_on)
            times[way].append(milliseconds)
    medians = {way: statistics.median(values) for way, values in times.items()}
    return {
        "attack": name,
        "members": len(ensemble),
        "examples": len(x),
        "milliseconds": medians,
        "speed_up": medians["eager"] / medians["captured"],
        "captures": counts.captures,
        "replays": counts.replays,
        "success": success,
        "n": len(times["eager"]),
    }


def main() -> None:
    """Time all, and write as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "attacks_gpu.json")
    parser.add_argument("--quick", action="store_true", help="64 examples, one member, one repeat")
    args = parser.parse_args()
    examples, repeats, sizes = (64, 1, (1,)) if args.quick else (EXAMPLES, REPEATS, (1, 3, 5))
    made = {
        "command": f"python benchmarks/attacks_gpu.py{' --quick' * args.quick}",
        "machine": torch.cuda.get_device_name(DEVICE),
        "torch": torch.__version__,
        **library(),
    }
    x = torch.rand(examples, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    rows: list[dict[str, Any]] = []
    for members in sizes:
        ensemble = ds.Ensemble(ds.nets.resnet20, members).to(DEVICE).eval()
        with torch.no_grad():
            y = ds.pooling.mean_probability(ensemble(x)).argmax(-1)
        for capture_on in (eager, library_capture_on):
            taken(partial(attacks.elastic_net, ensemble, x, y, steps=10, search_steps=1), capture_on)
        for name in ATTACKS:
            rows.append(row(name, ensemble, x, y, repeats))
            print(rows[-1], flush=True)
            args.out.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
