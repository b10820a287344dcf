"""Trainings on pictures that are read from disk while it goes on: one run after the other, each a `fit`."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dissensus.data.batches import split_rows
from dissensus.data.folders import ImageFiles
from dissensus.ensemble import Ensemble
from dissensus.studies import rows as rows_of
from dissensus.studies.optimising import VARIED, training_arguments
from dissensus.studies.problems import Streamed
from dissensus.studies.registry import build_of, objective_of
from dissensus.studies.spec import Spec
from dissensus.train import Progress, TrainingDiverged, fit
from dissensus.train.grid import points

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, by channel."""
MOST_WORKERS = 16
COUNTS = "counts"
"""Among the options of ``members``: how many each network has, where they differ."""


class _Scaled(Dataset[tuple[Tensor, Tensor]]):
    """Pictures as networks take them."""

    def __init__(self, pictures: ImageFiles) -> None:
        self.pictures = pictures
        self.mean, self.deviation = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, DEVIATION))

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels, label = self.pictures[index]
        return (pixels.float() / 255 - self.mean) / self.deviation, label


def rows(
    spec: Spec,
    seeds: tuple[int, ...],
    data: Streamed,
    own: Path,
    device: torch.device,
    on_study: Callable[[str, float], None],
) -> list[dict[str, Any]]:
    """Train and measure every point of the grid; one that was interrupted goes on at its last whole epoch."""
    grid = points({**spec.grid, "seed": list(seeds)})
    found: list[dict[str, Any]] = []
    for number, point in enumerate(grid):
        say = partial(_say, on_study, number, len(grid))
        done = _trained(spec, data, number, point, own, device, say)
        test, train = ((_loader(part, spec.optimisation.batch_size), part.labels) for part in (data.test, data.train))
        found.append(rows_of.row(spec, data.name, done, test, train, own))
    return found


def _say(on_study: Callable[[str, float], None], number: int, runs: int, moment: Progress) -> None:
    on_study(f"run {number + 1} of {runs}: {moment}", (number + moment.step / moment.steps) / runs)


def _trained(
    spec: Spec,
    data: Streamed,
    number: int,
    point: dict[str, Any],
    own: Path,
    device: torch.device,
    on_progress: Callable[[Progress], None],
) -> rows_of.Done:
    assert spec.members is not None
    assert spec.objective is not None
    build = build_of(spec, data)
    if "network" in point:
        build = partial(build, network=point["network"])
    members = spec.members.options.get(COUNTS, {}).get(point.get("network"), spec.members.count)
    hyper = {key: value for key, value in point.items() if key not in ("network", "seed", *VARIED)}
    ensemble = Ensemble(build, int(members), seed=point["seed"]).to(device)
    settings = training_arguments(spec.optimisation, point)
    batch_size, share = settings.pop("batch_size"), settings.pop("validation")
    trained, watched = _separated(data, share)  # what is told of test pictures must not have chosen anything
    if not share:
        settings["keep"] = "last"
    status = "done"
    try:
        history = fit(
            ensemble,
            _loader(trained, batch_size, point["seed"]),
            partial(objective_of(spec.objective), **hyper),
            validation=_loader(watched, batch_size),
            track=rows_of.tracked(spec),
            seed=point["seed"],
            progress=on_progress,
            checkpoint=own / f"checkpoints-{number:03d}",
            resume=True,
            **settings,
        )
    except TrainingDiverged as reason:
        history, status = reason.history, "failed"
    return rows_of.Done(number, point, ensemble, history, "stopped early" if history.stopped_early else status)


def _separated(data: Streamed, share: float | None) -> tuple[ImageFiles, ImageFiles]:
    """Pictures to train on, and those to look at on the way: a share of the training pictures, or the test pictures."""
    if not share:
        return data.train, data.test
    rest, part = split_rows(len(data.train), share, 0)
    return data.train.select(rest.sort().values), data.train.select(part.sort().values)


def _loader(pictures: ImageFiles, batch_size: int, seed: int | None = None) -> DataLoader[Any]:
    """Batches in order, or shuffled by a seed; read by as many processes as there are cores, where it is worth it."""
    many = len(pictures) > 64 * batch_size
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(
        _Scaled(pictures),
        batch_size,
        shuffle=seed is not None,
        generator=generator,
        num_workers=min(MOST_WORKERS, os.cpu_count() or 1) if many else 0,
        persistent_workers=many,
        pin_memory=torch.cuda.is_available(),
    )
