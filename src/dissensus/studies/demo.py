"""The demo: what rewarding diversity does to an ensemble, on two small real data sets."""

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

import dissensus
from dissensus import nets
from dissensus.axes import Decomposition, Pool
from dissensus.data import samples
from dissensus.diversity import decompose
from dissensus.ensemble import Ensemble
from dissensus.objectives import augmented
from dissensus.train import Progress, fit


@dataclass(frozen=True)
class Problem:
    """One data set of the demo and how it is trained."""

    name: str
    title: str
    loss: str
    loss_name: str
    pool: Pool
    hidden: tuple[int, ...]
    epochs: int
    batch_size: int
    lr: float


PROBLEMS = (
    Problem("diabetes", "Diabetes: predict a disease score (regression)", "mse", "squared error",
            "score", (30, 30), 60, 32, 2e-3),
    Problem("digits", "Digits: recognise handwritten digits (classification)", "cross_entropy", "cross-entropy",
            "probability", (64, 64), 40, 64, 2e-3),
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What the demo runs."""

    betas: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
    seeds: tuple[int, ...] = (0, 1, 2)
    members: int = 5
    epoch_share: float = 1.0
    """Share of each problem's epochs that is trained."""


FAST = Settings(betas=(0.0, 0.5, 0.75, 0.9, 1.0), seeds=(0, 1), epoch_share=0.25)

OnStep = Callable[[str, float, Progress], None]
"""Called with what is being trained, the share of the whole demo that is done, and the training's progress."""


def run(settings: Settings, on_step: OnStep | None = None) -> dict[str, Any]:
    """Train every ensemble of the demo; the result holds numbers only and goes into a JSON file as it is."""
    started = time.perf_counter()
    total = len(PROBLEMS) * len(settings.betas) * len(settings.seeds)
    runs: list[dict[str, Any]] = []
    for problem in PROBLEMS:
        for seed in settings.seeds:
            for beta in settings.betas:
                label = f"{problem.name}  β={beta:g}  seed {seed}"
                done = len(runs)

                def report(p: Progress, label: str = label, done: int = done) -> None:
                    if on_step is not None:
                        on_step(label, (done + p.step / p.steps) / total, p)

                runs.append(_one(problem, beta, seed, settings, report))
    return {
        "settings": asdict(settings),
        "problems": [asdict(problem) for problem in PROBLEMS],
        "runs": runs,
        "made": {
            "version": dissensus.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "command": " ".join(["dissensus", *sys.argv[1:]]),
            "seconds": time.perf_counter() - started,
            "networks": total * settings.members,
        },
    }


def _one(
    problem: Problem, beta: float, seed: int, settings: Settings, report: Callable[[Progress], None]
) -> dict[str, Any]:
    sample = samples.load(problem.name, seed=seed)
    inputs = sample.train[0].shape[1]
    ensemble = Ensemble(partial(nets.mlp, inputs, sample.outputs, problem.hidden), settings.members, seed=seed)
    objective = partial(augmented, beta=beta, loss=problem.loss, pool=problem.pool)
    epochs = max(1, round(problem.epochs * settings.epoch_share))
    fit(ensemble, sample.train, objective, epochs=epochs, batch_size=problem.batch_size, lr=problem.lr, seed=seed,
        progress=report)  # fmt: skip
    result: dict[str, Any] = {"problem": problem.name, "beta": beta, "seed": seed}
    for part, (x, y) in (("train", sample.train), ("test", sample.test)):
        outputs = ensemble.predict(x)
        result[part] = _means(decompose(outputs, y, loss=problem.loss, pool=problem.pool))
        if sample.task == "classification":
            result[part]["wrong"] = _means(decompose(outputs, y, loss="zero_one", pool="probability"))
    return result


def _means(split: Decomposition) -> dict[str, Any]:
    return {name: float(value.mean()) for name, value in split._asdict().items()}
