"""The demo: what rewarding diversity does to an ensemble, on two small real data sets."""

import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
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
from dissensus.pages.parts import counted
from dissensus.studies import measures
from dissensus.studies.spec import Optimisation
from dissensus.studies.training_arguments import training_arguments
from dissensus.train import Progress, sweep


@dataclass(frozen=True)
class DemoProblem:
    """A data set of the demo, and how members are trained on it."""

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
    DemoProblem(
        name="diabetes",
        data="diabetes",
        title="Diabetes: predict a disease score",
        loss="squared_error",
        loss_name="squared error",
        pool="score",
        pool_name="predictions",
        hidden=(30, 30),
        epochs=60,
        batch_size=32,
        lr=2e-3,
    ),
    DemoProblem(
        name="digits",
        title="Digits: recognise handwritten digits, averaging probabilities",
        pool="probability",
        pool_name="probabilities",
        **_DIGITS,
    ),
    DemoProblem(
        name="digits, scores",
        title="Digits: the same, averaging scores before the softmax",
        pool="score",
        pool_name="scores",
        **_DIGITS,
    ),
)


@dataclass(frozen=True)
class DemoSettings:
    """The ensembles that the demo trains: on every data set, one for each β and seed."""

    betas: tuple[float, ...] = tuple(i / 10 for i in range(11))
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    members: int = 5
    epoch_share: float = 1.0
    """Share of each problem's epochs that is trained."""

    def epochs(self, problem: DemoProblem) -> int:
        """Epochs that are trained on a problem."""
        return max(1, round(problem.epochs * self.epoch_share))


TEST_FRACTION = 0.3
FAST = DemoSettings(betas=(0.0, 0.5, 0.8, 0.9, 1.0), seeds=(0, 1), epoch_share=0.15)

OnStep = Callable[[str, float, Progress], None]
"""Called with the name of the sweep, the share of the whole demo that is done, and the training's progress."""


@dataclass(frozen=True)
class DemoRun:
    """The measures of one ensemble."""

    problem: str
    beta: float
    seed: int
    train: dict[str, float]
    """``ensemble``, ``individual`` and ``diversity``, which is the second less the first, on training data."""
    test: dict[str, float]
    bias_share: float
    """Share of diversity that is constant bias."""
    rise: tuple[float, ...]
    """Relative rise of the ensemble's error when the shares `DROPS` of members are left out."""


@dataclass(frozen=True)
class DemoResult:
    """Every run of the demo; ensembles of the first seed are audited."""

    settings: DemoSettings
    runs: list[DemoRun]
    audits: dict[tuple[str, float], Audit] = field(default_factory=dict)
    """By the name of the problem and β."""
    made: dict[str, Any] = field(default_factory=dict)
    """Versions, machine, command and duration."""
    problems: tuple[DemoProblem, ...] = PROBLEMS

    def to_dict(self) -> dict[str, Any]:
        """Numbers and words only, ready for JSON."""
        return {
            "settings": {**asdict(self.settings), "drops": DROPS},
            "problems": [asdict(problem) for problem in self.problems],
            "runs": [asdict(run) for run in self.runs],
            "verdicts": [
                {"problem": name, "beta": beta, "verdict": audit.verdict} for (name, beta), audit in self.audits.items()
            ],
            "made": self.made,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DemoResult":
        """A result from what `to_dict` gave, without its audits."""
        stored = values["settings"]
        settings = DemoSettings(
            tuple(stored["betas"]), tuple(stored["seeds"]), stored["members"], stored["epoch_share"]
        )
        runs = [DemoRun(**{**run, "rise": tuple(run["rise"])}) for run in values["runs"]]
        problems = [DemoProblem(**{**problem, "hidden": tuple(problem["hidden"])}) for problem in values["problems"]]
        return cls(settings, runs, made=dict(values["made"]), problems=tuple(problems))


def run(settings: DemoSettings, on_step: OnStep | None = None) -> DemoResult:
    """Train every ensemble of the demo.

    Each seed has its own split of the data; on it, all values of β are one sweep. Ensembles of the first seed are
    audited, with their outputs on training data and with the ensemble of β = 0 as reference.
    """
    started = time.perf_counter()
    sweeps = [(problem, seed) for problem in PROBLEMS for seed in settings.seeds]
    runs: list[DemoRun] = []
    audits: dict[tuple[str, float], Audit] = {}
    for done, (problem, seed) in enumerate(sweeps):

        def report(p: Progress, label: str = f"{problem.name}, seed {seed}", done: int = done) -> None:
            if on_step is not None:
                on_step(label, (done + p.step / p.steps) / len(sweeps), p)

        sample = sources.train_test_split(problem.data, seed=seed, test_fraction=TEST_FRACTION)
        outputs = _member_outputs(problem, sample, seed, settings, report)
        for i, beta in enumerate(settings.betas):
            runs.append(_measured(problem, sample, beta, seed, {part: values[i] for part, values in outputs.items()}))
            if seed == settings.seeds[0]:
                audits[problem.name, beta] = _audit(problem, sample, outputs, i)
    made = {
        "version": dissensus.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {counted(torch.get_num_threads(), 'thread')}",
        "command": " ".join(["dissensus", *sys.argv[1:]]),
        "seconds": time.perf_counter() - started,
        "networks": len(runs) * settings.members,
    }
    return DemoResult(settings, runs, audits, made)


def _member_outputs(
    problem: DemoProblem, sample: Any, seed: int, settings: DemoSettings, report: Callable[[Progress], None]
) -> dict[str, Tensor]:
    """Outputs ``[R, M, B, C]`` of a sweep over β on training and on test data."""
    optimisation = Optimisation(epochs=settings.epochs(problem), batch_size=problem.batch_size, lr=problem.lr)
    trained = sweep(
        partial(nets.mlp, sample.train[0].shape[1], sample.outputs, problem.hidden),
        sample.train,
        partial(augmented, loss=problem.loss, pool=problem.pool),
        grid={"beta": settings.betas},
        members=settings.members,
        seed=seed,
        progress=report,
        **training_arguments(optimisation),
    )
    return {"train": trained.outputs(sample.train[0]), "test": trained.outputs(sample.test[0])}


def _measured(problem: DemoProblem, sample: Any, beta: float, seed: int, outputs: dict[str, Tensor]) -> DemoRun:
    parts = {
        part: decompose(outputs[part], y, loss=problem.loss, pool=problem.pool)
        for part, y in (("train", sample.train[1]), ("test", sample.test[1]))
    }
    means = {part: {name: float(v.mean()) for name, v in terms._asdict().items()} for part, terms in parts.items()}
    on_test = outputs["test"], sample.test[1], problem.loss, problem.pool
    return DemoRun(
        problem.name,
        beta,
        seed,
        **means,
        bias_share=measures.constant_bias(*on_test),
        rise=tuple(measures.codependence_at(drop, *on_test) for drop in DROPS),
    )


def _audit(problem: DemoProblem, sample: Any, outputs: dict[str, Tensor], i: int) -> Audit:
    """The audit of the i-th ensemble; the first one, of β = 0, is the reference of the others."""
    is_classifier = problem.loss == "cross_entropy"
    return audit(
        outputs["test"][i],
        sample.test[1],
        task="classification" if is_classifier else "regression",
        kind="logits" if is_classifier else None,
        pool=problem.pool,
        train=(outputs["train"][i], sample.train[1]),
        in_bag="all",
        reference=outputs["test"][0] if i else None,
    )
