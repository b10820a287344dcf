"""What `ds.tune` chooses, and at what cost, beside training every candidate to the end.

Usage: python benchmarks/tuning.py [--json FILE] [--sets abalone,digits] [--seeds 0,1]

Both have the same splits, seeds and rules, so that their runs are equal to rounding. The choice of the search is looked
up among the grid's results: how far it is from the grid's choice, on validation and on test rows, in standard errors
over splits of the grid's choice. Cost is counted in epochs of runs, which a busy machine does not change.

Sets: four of UCI's, diabetes as the fifth table, digits, and Fashion-MNIST averaged to 14 × 14 pixels; at most 1,000
examples of each. DISSENSUS_DATA is the folder of the data.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from provenance import how_made
from torch import Tensor
from torch.nn import functional as F

import dissensus as ds
from dissensus.data import sources
from dissensus.data.tables import TableScaler

TABLES = ("abalone", "bioconcentration", "weather", "facebook", "diabetes")
SETS = (*TABLES, "digits", "fashion-mnist")
MOST, EPOCHS, MEMBERS, SPLITS, SEEDS = 1000, 81, 5, 5, 1
BETAS = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
SPACES: dict[str, dict[str, Sequence[float]]] = {
    "β": {"beta": BETAS},
    "β and learning rate": {"beta": [0.0, 0.3, 0.6, 0.8, 0.9, 1.0], "lr": [1e-3, 3e-3, 1e-2, 3e-2]},
}
LR = 1e-2
FACTORS = (3.0, 4.0)
"""Of n candidates, one in this many goes on at a rung."""


def data_of(name: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets, scaled, a random part of large sets."""
    x, y = sources.load(name, "train" if name == "fashion-mnist" else None)
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:MOST]
    x, y = x[chosen], y[chosen]
    if name == "fashion-mnist":
        return F.avg_pool2d(x.float() / 255, 2).flatten(1), y
    if name == "digits":
        x = x.flatten(1).double()
        return ((x - x.mean()) / x.std()).float(), y
    x, y = TableScaler.fit(x, y).transform(x, y)
    return x.float(), y.float()


def searched(name: str, space: dict[str, Sequence[float]], seed: int, factor: float | None) -> ds.Tuned:
    """A search of a space on a set; without a factor every candidate is trained to the end."""
    x, y = data_of(name)
    classes = name not in TABLES
    loss, pool = ("cross_entropy", "probability") if classes else ("squared_error", "score")
    build = partial(ds.nets.mlp, x.shape[1], 10 if classes else y.shape[1], (30,))
    objective = partial(ds.objectives.augmented, loss=loss, pool=pool)
    return ds.tune(
        build,
        (x, y),
        objective,
        space=space,
        epochs=EPOCHS,
        members=MEMBERS,
        splits=SPLITS,
        seeds=SEEDS,
        factor=factor or 3.0,
        first_rung=1 if factor else EPOCHS,
        batch_size=64,
        lr=None if "lr" in space else LR,
        seed=1000 * seed,
    )


def compared(name: str, words: str, seed: int) -> dict[str, Any]:
    """The grid, and the searches beside it."""
    started = time.process_time()
    grid = searched(name, SPACES[words], seed, None)
    searches = {f"{factor:g}": searched(name, SPACES[words], seed, factor) for factor in FACTORS}
    return {
        "set": name,
        "space": words,
        "seed": seed,
        "examples": sum(grid.settings["rows"].values()),
        "candidates": len(grid.candidates),
        "grid": _of(grid),
        "searches": {factor: _of(found) | _beside(grid, found) for factor, found in searches.items()},
        "processor_seconds": time.process_time() - started,
    }


def _beside(grid: ds.Tuned, found: ds.Tuned) -> dict[str, Any]:
    """The choice of a search among the results of the grid, where both were trained to the end."""
    known = {json.dumps(candidate.point, sort_keys=True): candidate for candidate in grid.candidates}
    chosen = known[json.dumps(found.best.point, sort_keys=True)]
    best = grid.best
    return {
        "share_of_epochs": found.spent.run_epochs / grid.spent.run_epochs,
        "same_choice": chosen.number == best.number,
        "behind_on_validation": (chosen.value - best.value) / best.standard_error,
        "behind_on_test_per_cent": 100 * (chosen.test - best.test) / best.test,
    }


def _of(tuned: ds.Tuned) -> dict[str, Any]:
    candidates = [
        {name: value for name, value in asdict(candidate).items() if name not in ("curve", "bracket", "runs")}
        for candidate in tuned.candidates
    ]
    return {
        "sentence": tuned.sentence,
        "best": tuned.best.point,
        "gain": None if tuned.gain is None else tuned.gain._asdict(),
        "choices": tuned.choices,
        "run_epochs": tuned.spent.run_epochs,
        "candidates": candidates,
    }


def _rounded(value: Any) -> Any:
    """Numbers with six digits, and NaN as null."""
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--seeds", default="0,1", help="of the space of β; the larger space has the first only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    seeds = list(map(int, arguments.seeds.split(",")))
    for words, seed in [*((words, seeds[0]) for words in SPACES), *((next(iter(SPACES)), seed) for seed in seeds[1:])]:
        for name in arguments.sets.split(","):
            row = _rounded(compared(name, words, seed))
            rows.append(row)
            print(f"{name}, {words}, seed {seed}: grid {row['grid']['best']}, {row['processor_seconds']:.0f} s")
            print(f"  {row['grid']['sentence']}")
            for factor, search in row["searches"].items():
                print(
                    f"  factor {factor}: cost {search['share_of_epochs']:.2f}, behind "
                    f"{search['behind_on_validation']:+.2f} errors, {search['behind_on_test_per_cent']:+.2f} % on "
                    f"test, {search['best']}: {search['sentence']}",
                    flush=True,
                )
            if arguments.json is not None:  # after every row, so that what is done is kept
                arguments.json.write_text(json.dumps({"made": how_made(), "rows": rows}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
