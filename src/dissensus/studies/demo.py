"""The demo: what rewarding diversity does to an ensemble, on two small real data sets."""

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import dissensus
from dissensus import nets
from dissensus.auditing import Audit, audit
from dissensus.auditing.examples import DROPS
from dissensus.axes import Pool
from dissensus.data import sources
from dissensus.diversity import decompose
from dissensus.objectives import augmented
from dissensus.studies import measures
from dissensus.studies.spec import Optimisation
from dissensus.studies.training_arguments import training_arguments
from dissensus.train import Progress, sweep


@dataclass(frozen=True)
class Problem:
    """One data set of the demo and how it is trained."""

    name: str
    data: str
    title: str
    loss: str
    loss_name: str
    pool: Pool
    pool_name: str
    hidden: tuple[int, ...]
    epochs: int
    batch_size: int
    lr: float


_DIGITS = {
    "data": "digits",
    "loss": "cross_entropy",
    "loss_name": "cross-entropy",
    "hidden": (64, 64),
    "epochs": 25,
    "batch_size": 64,
    "lr": 2e-3,
}
PROBLEMS = (
    Problem(
        name="diabetes",
        data="diabetes",
        title="Diabetes: predict a disease score",
        loss="mse",
        loss_name="squared error",
        pool="score",
        pool_name="predictions",
        hidden=(30, 30),
        epochs=60,
        batch_size=32,
        lr=2e-3,
    ),
    Problem(
        name="digits",
        title="Digits: recognise handwritten digits, averaging probabilities",
        pool="probability",
        pool_name="probabilities",
        **_DIGITS,
    ),
    Problem(
        name="digits, scores",
        title="Digits: the same, averaging scores before the softmax",
        pool="score",
        pool_name="scores",
        **_DIGITS,
    ),
)


@dataclass(frozen=True)
class Settings:
    """What the demo runs."""

    betas: tuple[float, ...] = tuple(i / 10 for i in range(11))
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    members: int = 5
    epoch_share: float = 1.0
    """Share of each problem's epochs that is trained."""


FAST = Settings(betas=(0.0, 0.5, 0.8, 0.9, 1.0), seeds=(0, 1), epoch_share=0.15)

OnStep = Callable[[str, float, Progress], None]
"""Called with what is being trained, the share of the whole demo that is done, and the training's progress."""


Audits = dict[tuple[str, float], Audit]
"""Audits of the first seed's ensembles, by problem and β."""


def run(settings: Settings, on_step: OnStep | None = None, audits: Audits | None = None) -> dict[str, Any]:
    """Train every ensemble of the demo; the result holds numbers only and goes into a JSON file as it is.

    Each seed has a split of the data of its own; on it, all values of β are one sweep. Ensembles of the first seed are
    audited, with their outputs on training data and with the ensemble of β = 0 as reference; audits are put into
    `audits`, if given.
    """
    audits = {} if audits is None else audits
    started = time.perf_counter()
    sweeps = [(problem, seed) for problem in PROBLEMS for seed in settings.seeds]
    runs: list[dict[str, Any]] = []
    for done, (problem, seed) in enumerate(sweeps):

        def report(p: Progress, label: str = f"{problem.name}, seed {seed}", done: int = done) -> None:
            if on_step is not None:
                on_step(label, (done + p.step / p.steps) / len(sweeps), p)

        runs += _swept(problem, seed, settings, report, audits)
    return {
        "settings": {**asdict(settings), "drops": DROPS},
        "problems": [asdict(problem) for problem in PROBLEMS],
        "runs": runs,
        "verdicts": [
            {"problem": name, "beta": beta, "verdict": audit.verdict} for (name, beta), audit in audits.items()
        ],
        "made": {
            "version": dissensus.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "command": " ".join(["dissensus", *sys.argv[1:]]),
            "seconds": time.perf_counter() - started,
            "networks": len(runs) * settings.members,
        },
    }


def epochs_of(problem: dict[str, Any], settings: dict[str, Any]) -> int:
    """Epochs that were trained."""
    return max(1, round(problem["epochs"] * settings["epoch_share"]))


def _swept(
    problem: Problem, seed: int, settings: Settings, report: Callable[[Progress], None], audits: Audits
) -> list[dict[str, Any]]:
    sample = sources.train_test_split(problem.data, seed=seed)
    build = partial(nets.mlp, sample.train[0].shape[1], sample.outputs, problem.hidden)
    objective = partial(augmented, loss=problem.loss, pool=problem.pool)
    told = Optimisation(
        epochs=epochs_of(asdict(problem), asdict(settings)), batch_size=problem.batch_size, lr=problem.lr
    )
    swept = sweep(
        build,
        sample.train,
        objective,
        grid={"beta": settings.betas},
        members=settings.members,
        seed=seed,
        progress=report,
        **training_arguments(told),
    )
    outputs = {part: swept.outputs(x) for part, (x, _) in (("train", sample.train), ("test", sample.test))}
    results: list[dict[str, Any]] = []
    for i, beta in enumerate(settings.betas):
        result: dict[str, Any] = {"problem": problem.name, "beta": beta, "seed": seed}
        for part, (_, y) in (("train", sample.train), ("test", sample.test)):
            parts = decompose(outputs[part][i], y, loss=problem.loss, pool=problem.pool)
            result[part] = {name: float(value.mean()) for name, value in parts._asdict().items()}
        results.append({**result, **_collusion(outputs["test"][i], sample.test[1], problem)})
    if seed == settings.seeds[0]:
        audits |= {(problem.name, beta): _audited(problem, sample, outputs, i) for i, beta in enumerate(settings.betas)}
    return results


def _audited(problem: Problem, sample: Any, outputs: dict[str, Tensor], i: int) -> Audit:
    """What the audit says of the i-th ensemble; the first one, of β = 0, is the others' reference."""
    classes = problem.loss == "cross_entropy"
    return audit(
        outputs["test"][i],
        sample.test[1],
        task="classification" if classes else "regression",
        kind="logits" if classes else None,
        pool=problem.pool,
        train=(outputs["train"][i], sample.train[1]),
        in_bag="all",
        reference=outputs["test"][0] if i else None,
    )


def _collusion(outputs: Tensor, y: Tensor, problem: Problem) -> dict[str, Any]:
    """The share of diversity that is constant bias, and the rise of error when members are dropped."""
    told = outputs, y, problem.loss, problem.pool
    rises = [measures.codependence_at(drop, *told) for drop in DROPS]
    return {"bias_share": measures.constant_bias(*told), "rise": rises}
