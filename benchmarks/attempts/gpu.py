"""On a GPU: no memory left, errors of the device, two processes on one card."""

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dissensus as ds
from attempts import children, trainings
from attempts.cases import Case, Outcome, Settings
from attempts.children import Child
from attempts.trainings import Training, difference

ADVICE = ("batch", "member", "memory", "smaller", "fewer", "precision")
"""Words of advice, two of which a message must have."""


def gpu_memory(settings: Settings) -> Iterator[Case]:
    """Work that does not fit."""
    del settings
    must = "the message says what helps, and the process goes on to the usual result"
    for name, work in (
        ("fit", _large_fit),
        ("predict", _large_predict),
        ("sweep", _large_sweep),
        ("attack", _large_attack),
    ):
        yield Case(name, must, functools.partial(_without_memory, work))


def gpu_error(settings: Settings) -> Iterator[Case]:
    """A device-side assert in the middle of a training."""
    del settings
    must = "the process ends with an error, and its checkpoint is resumed to the bit"
    for subject in (Training("mlp", "batched", "cuda", epochs=60), Training("cnn", "streams", "cuda", epochs=60)):
        yield Case(f"{subject.network}, {subject.backend}", must, functools.partial(_asserted, subject))


def gpu_two(settings: Settings) -> Iterator[Case]:
    """Two trainings on one card."""
    del settings
    must = "both end equal to the training alone, to the bit"
    for subject in (Training("mlp", "batched", "cuda", epochs=200), Training("cnn", "streams", "cuda", epochs=200)):
        yield Case(f"{subject.network}, {subject.backend}", must, functools.partial(_beside, subject))


def _without_memory(work: Callable[[], Any], rng: random.Random, folder: Path) -> Outcome:
    del folder
    ending = children.call(_ran_out_and_went_on, work, rng.uniform(0.5, 2.0))
    return Outcome(ending.crash or (str(ending.problem) if ending.problem else "") or ending.value)


def _ran_out_and_went_on(work: Callable[[], Any], gibibytes: float) -> str:
    trainings.start("cuda")
    expected = Training("mlp", "batched", "cuda", epochs=3).fit()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(gibibytes * 2**30 / total)
    try:
        work()
        return "it fitted into memory"
    except Exception as reason:
        problem = children.described(reason)
        text = str(reason).lower()
        is_advice = problem.deliberate and sum(word in text for word in ADVICE) >= 2
        failure = "" if is_advice else f"no advice: {problem}"
        del reason
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    after = Training("mlp", "batched", "cuda", epochs=3).fit()
    return failure or difference(after, expected)


SIDE = 256


def _heavy() -> nn.Module:
    """A network whose activations are large."""
    layers = [nn.Conv2d(64, 64, 3, padding=1) for _ in range(3)]
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4)
    )


def _pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(128, 1, SIDE, SIDE), torch.randint(4, (128,))


_OBJECTIVE = functools.partial(ds.objectives.augmented, beta=0.5, loss="cross_entropy", pool="probability")


def _large_fit() -> None:
    ensemble = ds.Ensemble(_heavy, 4, backend="vmap").to("cuda")
    ds.fit(ensemble, _pictures(), _OBJECTIVE, epochs=1, batch_size=128, max_memory=10**12)


def _large_predict() -> None:
    ensemble = ds.Ensemble(_heavy, 4, backend="vmap").to("cuda")
    ensemble.predict(_pictures()[0], batch_size=128)


def _large_sweep() -> None:
    objective = functools.partial(ds.objectives.augmented, loss="cross_entropy", pool="probability")
    grid = {"beta": [0.0, 0.5], "seed": [0, 1]}
    ds.sweep(_heavy, _pictures(), objective, grid=grid, members=4, epochs=1, device="cuda", max_memory=10**12)


def _large_attack() -> None:
    ensemble = ds.Ensemble(_heavy, 4, backend="vmap").to("cuda")
    x, y = _pictures()
    ds.attacks.evaluate(ensemble, (x, y), "quick", epsilon=0.03, batch_size=128)


def _asserted(subject: Training, rng: random.Random, folder: Path) -> Outcome:
    expected = children.call(Training.fit, subject)
    broken = children.call(_fit_with_assert, subject, folder / "checkpoint", rng.randint(20, 200))
    if broken.value is not None:
        return Outcome("the training ended as if nothing had happened")
    if broken.stopped:
        return Outcome("it hangs")
    resumed = children.call(Training.fit, subject, folder / "checkpoint")
    if resumed.value is None:
        return Outcome(f"the checkpoint cannot be resumed: {resumed.problem or resumed.crash}")
    return Outcome(difference(resumed.value, expected.value), counts={"ended by a signal": int(bool(broken.signal))})


def _fit_with_assert(subject: Training, folder: Path, step: int) -> dict[str, Any]:
    usual = trainings.Signals.__call__

    def broken(self: trainings.Signals, moment: Any) -> None:
        if moment.step >= step:
            torch.zeros(2, device="cuda")[torch.tensor([7], device="cuda")]  # an index out of range, on the device
        usual(self, moment)

    trainings.Signals.__call__ = broken
    return subject.fit(folder)


def _beside(subject: Training, rng: random.Random, folder: Path) -> Outcome:
    del rng
    expected = children.call(Training.fit, subject)
    running = [Child(Training.fit, subject, folder / str(number)) for number in range(2)]
    for ending in [child.wait() for child in running]:
        if ending.value is None:
            return Outcome(ending.crash or str(ending.problem))
        if differs := difference(ending.value, expected.value):
            return Outcome(differs)
    return Outcome()
