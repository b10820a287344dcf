"""Two processes that use one folder or one file at the same time."""

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dissensus as ds
from attempts import children, study_runs, trainings
from attempts.cases import Case, Outcome, Settings
from attempts.children import Child, Ending
from attempts.trainings import Training, difference

RACED = "each process succeeds or is refused in a sentence, and what lies there is whole"


def writers(settings: Settings) -> Iterator[Case]:
    """Second writers."""
    yield Case("two saves into one folder", RACED, _two_saves)
    yield Case("loading during an overwrite", "a reader sees the old or the new ensemble", _load_during_saves)
    subject = Training("mlp", "vmap", settings.device)
    yield Case(
        "two trainings with one checkpoint folder",
        "each ends equal to the training alone, or is refused in a sentence",
        functools.partial(_two_trainings, Training.fit, subject),
    )
    yield Case(
        "two sweeps with one checkpoint folder",
        "each ends equal to the sweep alone, or is refused in a sentence",
        functools.partial(_two_trainings, Training.sweep, Training("normalised", "vmap", settings.device, epochs=4)),
    )
    yield Case("two predictions into one file", RACED, _two_predictions)
    yield Case("two attacks with one folder", RACED, _two_attacks)
    yield Case("two runs of one study", RACED, _two_studies)


def _both(function: Callable[..., Any], *arguments: tuple[Any, ...]) -> list[Ending]:
    running = [Child(function, *words) for words in arguments]
    return [child.wait() for child in running]


def _problems(endings: list[Ending]) -> str:
    return "; ".join(ending.crash for ending in endings if ending.crash)


def build() -> torch.nn.Module:
    return trainings.wide(96)


def _save(folder: Path, seeds: list[int]) -> None:
    torch.set_num_threads(1)
    ensembles = {seed: ds.Ensemble(build, 2, seed=seed, backend="loop") for seed in seeds}
    children.ready()
    for seed in seeds:
        ensembles[seed].save(folder)


def _loaded(folder: Path, seeds: list[int]) -> str:
    """How a stored ensemble differs from all of those that were saved; empty where it is one of them."""
    torch.set_num_threads(1)
    loaded = ds.Ensemble.load(folder, build)
    for seed in seeds:
        expected = ds.Ensemble(build, 2, seed=seed, backend="loop")
        if all(
            torch.equal(a, b)
            for i in range(2)
            for a, b in zip(loaded.member(i).parameters(), expected.member(i).parameters(), strict=True)
        ):
            return ""
    return "the stored ensemble is none of those that were saved"


def _two_saves(rng: random.Random, folder: Path) -> Outcome:
    del rng
    endings = _both(_save, (folder / "saved", [1, 3, 1]), (folder / "saved", [2, 4, 2]))
    after = children.call(_loaded, folder / "saved", [1, 2])
    problem = _problems(endings)
    if after.problem is not None or after.value:
        problem = f"{problem}; then loading: {after.problem or after.value}".removeprefix("; ")
    return Outcome(problem)


SAVES = 30


def _load_during_saves(rng: random.Random, folder: Path) -> Outcome:
    del rng
    children.call(_save, folder / "saved", [1])
    writer = Child(_save, folder / "saved", [2, 1] * SAVES)
    writer.wait_ready()
    reading = Child(_load_often, folder / "saved", [1, 2], SAVES)
    ended, written = reading.wait(), writer.wait()
    if ended.value is None:
        return Outcome(f"the reader ended: {ended.crash or ended.problem}")
    failures = ended.value
    problem = failures[0] if failures else written.crash
    return Outcome(problem, attempts=SAVES, failed=len(failures) + bool(written.crash))


def _load_often(folder: Path, seeds: list[int], times: int) -> list[str]:
    failures = []
    for _ in range(times):
        try:
            different = _loaded(folder, seeds)
        except Exception as reason:
            different = str(children.described(reason))
        if different:
            failures.append(different)
    return failures


def _two_trainings(train: Callable[..., Any], subject: Training, rng: random.Random, folder: Path) -> Outcome:
    del rng
    expected = _alone(train, subject)
    endings = _both(train, (subject, folder / "checkpoint"), (subject, folder / "checkpoint"))
    problem = _problems(endings)
    values = [ending.value for ending in endings if ending.value is not None]
    if not values and not problem:
        problem = f"neither training ended: {endings[0].problem}"
    for value in values:
        problem = problem or difference(value, expected)
    return Outcome(problem)


@functools.cache
def _alone(train: Callable[..., Any], subject: Training) -> dict[str, Any]:
    return children.call(train, subject).value


def _predict(file: Path, seed: int) -> bool:
    """Predict into a file, and return whether the outputs are this ensemble's."""
    ensemble = trainings.ensemble_of("mlp", seed)
    x = trainings.data("mlp", rows=5000)[0]
    children.ready()
    return torch.equal(ensemble.predict(x, batch_size=50, file=file), ensemble.predict(x, batch_size=50))


def _is_prediction(file: Path, seeds: list[int]) -> bool:
    stored, x = torch.from_numpy(np.load(file)), trainings.data("mlp", rows=5000)[0]
    return any(torch.equal(stored, trainings.ensemble_of("mlp", seed).predict(x, batch_size=50)) for seed in seeds)


def _two_predictions(rng: random.Random, folder: Path) -> Outcome:
    del rng
    file = folder / "outputs.npy"
    endings = _both(_predict, (file, 1), (file, 2))
    problem = _problems(endings)
    if any(ending.value is False for ending in endings):
        problem = problem or "a process was given outputs of the other one"
    after = children.call(_is_prediction, file, [1, 2])
    if after.value is not True:
        problem = problem or f"the file holds neither prediction: {after.problem or 'a mixture'}"
    return Outcome(problem)


def _evaluate(folder: Path) -> str:
    ensemble = trainings.ensemble_of("cnn", 0)
    x, y = trainings.data("cnn", rows=32)
    result = ds.attacks.evaluate(ensemble, (x, y), "quick", epsilon=0.1, batch_size=16, folder=folder)
    return str((result.clean, result.worst))


def _two_attacks(rng: random.Random, folder: Path) -> Outcome:
    del rng
    endings = _both(_evaluate, (folder / "parts",), (folder / "parts",))
    values = {ending.value for ending in endings if ending.value is not None}
    return Outcome(_problems(endings) or ("" if len(values) == 1 else f"results differ: {values}"[:200]))


def _two_studies(rng: random.Random, folder: Path) -> Outcome:
    del rng
    file = study_runs.write_tiny(folder)
    words = ["study", "run", str(file), "--scale", "smoke"]
    endings = _both(study_runs.invoke, (words, folder), (words, folder))
    called = [ending.value for ending in endings]
    if None in called:
        return Outcome(_problems(endings) or "a command was killed")
    raw = "; ".join(value.raw for value in called if value.raw)
    if raw or min(value.code for value in called):
        return Outcome(raw or "neither command ended well")
    return Outcome("" if study_runs.reports(folder) else "there is no report")
