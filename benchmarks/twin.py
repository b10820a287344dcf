"""What a twin costs: time with `fit(twin=True)`, and of the same two trainings as runs of one sweep over β.

Usage: python benchmarks/twin.py [--json FILE] [--rounds 3]

Processor times are relative to a fit without a twin, taken in turns in one process on one thread; medians over rounds.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from provenance import how_made
from torch import nn

import dissensus as ds


class Case(NamedTuple):
    """An ensemble and its training."""

    build: Callable[[], nn.Module]
    members: int
    shape: tuple[int, ...]
    """Of an input."""
    epochs: int


CASES = {
    "5 MLPs": Case(partial(ds.nets.mlp, 10, 3, (30, 30)), 5, (10,), 20),
    "20 MLPs": Case(partial(ds.nets.mlp, 10, 3, (30, 30)), 20, (10,), 20),
    "5 CNNs": Case(partial(ds.nets.cnn, 1, 3, 28), 5, (1, 28, 28), 2),
}
EXAMPLES, BETA = 512, 0.9


def ways(case: Case) -> Mapping[str, Callable[[], object]]:
    """Trainings to be timed, by name."""
    generator = torch.Generator().manual_seed(0)
    data = (
        torch.randn(EXAMPLES, *case.shape, generator=generator),
        torch.randint(3, (EXAMPLES,), generator=generator),
    )
    objective = partial(ds.objectives.augmented, loss="cross_entropy", pool="probability")
    settings = {"epochs": case.epochs, "batch_size": 32, "lr": 1e-3}

    def fit(*, twin: bool) -> None:
        ens = ds.Ensemble(case.build, members=case.members)
        ds.fit(ens, data, partial(objective, beta=BETA), twin=twin, **settings)

    def sweep() -> None:
        ds.sweep(case.build, data, objective, grid={"beta": [0.0, BETA]}, members=case.members, **settings)

    return {"alone": partial(fit, twin=False), "twin": partial(fit, twin=True), "sweep": sweep}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, case in CASES.items():
        trainings = ways(case)
        seconds: dict[str, list[float]] = {way: [] for way in trainings}
        for round_ in range(options.rounds + 1):
            for way, train in trainings.items():
                started = time.process_time()
                train()
                if round_:  # the first one warms up
                    seconds[way].append(time.process_time() - started)
        medians = {way: median(values) for way, values in seconds.items()}
        times = {way: value / medians["alone"] for way, value in medians.items()}
        rows.append({"case": name, "members": case.members, "seconds": medians, "times_alone": times})
        print(name, {way: round(value, 2) for way, value in times.items()}, flush=True)
    made = {**how_made(), "threads": 1, "rounds": options.rounds, "seed": 0}
    if options.json:
        options.json.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
