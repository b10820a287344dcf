"""Training on images that are read from disk on the way: one run after the other, each a `fit`.

A grid varies settings of one ensemble, or it names methods, which `methods` translates as it does for data in memory.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dissensus.axes import LossParts
from dissensus.data.folders import ImageFiles
from dissensus.data.splits import Split, held_out_rows
from dissensus.ensemble import Ensemble
from dissensus.studies import datasets
from dissensus.studies.datasets import FOLDERS, StreamedImages
from dissensus.studies.procedures import requirements
from dissensus.studies.procedures.base import StudyContext
from dissensus.studies.procedures.methods import (
    MeasuredData,
    Method,
    References,
    has_methods,
    method_builder,
    method_objective,
    method_of,
    method_row,
)
from dissensus.studies.procedures.shift_measures import AUDITED_EXAMPLES
from dissensus.studies.procedures.training import (
    TrainedRun,
    Trainer,
    TrainingUnit,
    measured_row,
    tracked,
    write_targets,
)
from dissensus.studies.registry import build_of, check_task, objective_of
from dissensus.studies.results import Row
from dissensus.studies.spec import Spec
from dissensus.studies.standardisation import IMAGENET_MEAN, IMAGENET_STD
from dissensus.studies.training_arguments import VARIED, training_arguments
from dissensus.train import Progress, TrainingDiverged, fit
from dissensus.train.grid import points

MAX_WORKERS = 16
COUNTS = "counts"
"""Option of ``members``: their number by network, where it differs."""


class _StandardisedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images standardised by ImageNet's channels."""

    def __init__(self, pictures: ImageFiles) -> None:
        self.pictures = pictures
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels, label = self.pictures[index]
        return (pixels.float() / 255 - self.mean) / self.std, label


class _Training(NamedTuple):
    """What is trained at a point of the grid."""

    build: Callable[[], nn.Module]
    networks: int
    objective: Callable[..., LossParts]
    method: Method | None = None
    """Where the grid names methods."""


def _train_streamed(unit: TrainingUnit, context: StudyContext, folder: Path) -> list[Row]:
    """Train every point of the grid; an interrupted training continues at its last complete epoch."""
    spec, data = context.spec, datasets.load_streamed(unit.data, context.spec)
    check_task(spec, data)
    grid = points({**spec.grid, "seed": list(unit.seeds)})
    rows: list[Row] = []
    references: References = {}
    for number, point in enumerate(grid):

        def on_progress(moment: Progress, number: int = number) -> None:
            share = (number + moment.step / moment.steps) / len(grid)
            context.progress(f"run {number + 1} of {len(grid)}: {moment}", share)

        training = _training_at(spec, data, point)
        trained = _fit(context, data, training, number, point, folder, on_progress)
        measured = _measured_data(data, spec.optimisation.batch_size)
        if training.method is None:
            row = measured_row(context, data.name, trained, folder, test=measured.test, train=measured.train)
        else:
            row = method_row(context, trained, training.method, measured, folder, references)
        rows.append(row)
    write_targets(folder, data.test.labels)
    return rows


def _training_at(spec: Spec, data: StreamedImages, point: Mapping[str, Any]) -> _Training:
    """The training of a point: that of its method, or of the study's members with the point's settings."""
    assert spec.members is not None
    assert spec.objective is not None
    if has_methods(spec, data.name):
        method = method_of(spec, str(point["method"]))
        objective = partial(method_objective(spec, method), **method.numbers)
        return _Training(method_builder(spec, method, data), method.networks, objective, method)
    build = build_of(spec, data)
    if "network" in point:
        build = partial(build, network=point["network"])
    members = spec.members.options.get(COUNTS, {}).get(point.get("network"), spec.members.count)
    hyperparameters = {key: value for key, value in point.items() if key not in ("network", "seed", *VARIED)}
    return _Training(build, int(members), partial(objective_of(spec.objective), **hyperparameters))


def _measured_data(data: StreamedImages, batch_size: int) -> MeasuredData:
    """Pictures of all parts, to be read in batches; those of the audit are spread over all classes."""
    parts = (data.test, data.train, data.train.subset(AUDITED_EXAMPLES))
    return MeasuredData(data.name, *((_loader(part, batch_size), part.labels) for part in parts))


def _fit(
    context: StudyContext,
    data: StreamedImages,
    training: _Training,
    number: int,
    point: Mapping[str, Any],
    folder: Path,
    on_progress: Callable[[Progress], None],
) -> TrainedRun:
    spec = context.spec
    ensemble = Ensemble(training.build, training.networks, seed=point["seed"]).to(context.device)
    arguments = training_arguments(spec.optimisation, point)
    batch_size, held_out = arguments.pop("batch_size"), arguments.pop("validation")
    train, validation = _split(data, held_out)
    if not held_out:  # test images may be watched, but must not choose anything
        arguments["keep"] = "last"
    status = "done"
    try:
        history = fit(
            ensemble,
            _loader(train, batch_size, point["seed"]),
            training.objective,
            validation=_loader(validation, batch_size),
            track=tracked(spec),
            seed=point["seed"],
            progress=on_progress,
            checkpoint=folder / f"checkpoints-{number:03d}",
            resume=True,
            **arguments,
        )
    except TrainingDiverged as reason:
        history, status = reason.history, "failed"
    return TrainedRun(number, point, ensemble, history, "stopped early" if history.stopped_early else status)


def _split(data: StreamedImages, held_out: float | Split | None) -> tuple[ImageFiles, ImageFiles]:
    """Images to train on, and images to watch: a share of the training images, or else the test images."""
    if not held_out:
        return data.train, data.test
    train, validation = held_out_rows(held_out, data.train.labels, 0)
    return data.train.select(train.sort().values), data.train.select(validation.sort().values)


def _loader(pictures: ImageFiles, batch_size: int, seed: int | None = None) -> DataLoader[Any]:
    """Batches in order, or shuffled by a seed; large sets are read by as many processes as there are cores."""
    large = len(pictures) > 64 * batch_size
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(
        _StandardisedImages(pictures),
        batch_size,
        shuffle=seed is not None,
        generator=generator,
        num_workers=min(MAX_WORKERS, os.cpu_count() or 1) if large else 0,
        persistent_workers=large,
        pin_memory=torch.cuda.is_available(),
    )


def _is_streamed(spec: Spec, data: str) -> bool:
    del spec
    return data in FOLDERS


def _axes(spec: Spec) -> set[str]:
    """Methods hold all settings of a training but the seed."""
    if has_methods(spec, ""):
        return {"method", "seed"}
    return {"seed", "network", *VARIED} | requirements.objective_parameters(spec)


TRAINER = Trainer(_is_streamed, _train_streamed, _axes)
