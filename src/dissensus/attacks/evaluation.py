"""Evaluation of robustness: a suite of attacks, the pointwise worst case with intervals, curves, and flags."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from dissensus import checks, storage
from dissensus.attacks.array_inputs import arrays_taken
from dissensus.attacks.chunks import attack_out_of_memory, over
from dissensus.attacks.diagnostics import attack_diagnostics, model_diagnostics
from dissensus.attacks.flags import DIFFERENT, SuiteStep, all_flags
from dissensus.attacks.norms import NORMS, Ball, NormName, check_reach
from dissensus.attacks.problem import Adversarial, Attack, attack_problem
from dissensus.attacks.robustness import AttackResult, CurvePoint, Robustness
from dissensus.attacks.suites import SUITES, Setting, Suite, SuiteMaker, Terms, as_setting, suite_of, transfers
from dissensus.attacks.target_model import Model, PoolName
from dissensus.attacks.training_overlap import training_overlap
from dissensus.execution.out_of_memory import advising
from dissensus.metrics import Interval, wilson

SuiteName = Literal["standard", "adaptive", "paper", "quick"]
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of ε in the curve over ε."""
DIAGNOSED = 256
"""Number of examples for the diagnostics of outputs and gradients, if a batch holds as many."""
_OTHER_CHECKS = 6
"""Number of attacks that run for checks in addition to those of the curves."""
_SECONDS = "seconds.json"


@arrays_taken
def evaluate(
    model: Model,
    data: tuple[Float[Tensor, "N *S"], Integer[Tensor, " N"]],
    suite: SuiteName | Suite | SuiteMaker = "standard",
    *,
    epsilon: float,
    norm: NormName = "linf",
    pool: PoolName = "probability",
    attacks: Sequence[str | Setting | Attack] = (),
    examples: int | None = None,
    batch_size: int = 256,
    surrogate: Model | None = None,
    epsilons: Sequence[float] | None = None,
    folder: str | Path | None = None,
    progress: Callable[[str, float], None] | None = None,
    seed: int = 0,
) -> Robustness:
    """Accuracy that is left after every attack of a suite, and whether the attacks can be trusted.

    Args:
        model: An ensemble ``x -> [M, B, C]``, a plain classifier ``x -> [B, C]``, or a list of those; see `fgsm`.
            Standardisation belongs inside it.
        data: Inputs in [0, 1], float32 or float64, and labels.
        suite: ``"standard"``, ``"adaptive"``, ``"paper"`` or ``"quick"``; see `dissensus.attacks.suites`. Or a
            `Suite`, or a function that makes one from `Terms`.
        epsilon: ε: of each value in L∞, of the whole input in L2.
        norm: ``"linf"`` or ``"l2"``.
        pool: How member outputs are pooled into the prediction that is attacked; see `fgsm`.
        attacks: Further attacks, which run after the suite's and count for the worst case: names of `ATTACKS`,
            functions ``(model, x, y) -> Adversarial``, or a `Setting`. Results of functions, settings and suites from
            outside the package are clipped to ball and box and tested on the model.
        examples: Use only this many examples, the first ones.
        batch_size: Number of examples per batch.
        surrogate: Another model for the same inputs, on which examples are crafted for transfer.
        epsilons: Values of ε for the curve; by default a quarter of ε to four times ε.
        folder: Where finished batches are stored. The same call resumes from there.
        progress: Called with the name of the current attack and the share of attacks that are done.
        seed: Seed of all random starts.

    Accuracies on rows that the model was trained on say nothing about new data. They are recognised by the record that
    `dissensus.fit` keeps with an ensemble, and `Robustness.notes` warns of them.

    Accuracies come with Wilson's 95 % intervals. Curves and checks use the first 128 examples, or 64 with ``"quick"``.
    """
    x, y = _checked_data(data, examples)
    if isinstance(suite, str):
        checks.one_of("suite", suite, SUITES)
    checks.number("epsilon", epsilon, 0.0, open_low=True)
    checks.one_of("norm", norm, NORMS)
    check_reach(norm, epsilon, (0.0, 1.0))
    checks.count("seed", seed, 0)
    batch_size = checks.count("batch_size", batch_size)
    if progress is not None:
        checks.function("progress", progress, "(name, share)")
    _check_choices(suite, attacks, surrogate)
    kept = None if folder is None else checks.path("folder", folder)
    requested = None
    if epsilons is not None:
        requested = [checks.number("epsilons", e, 0.0, open_low=True) for e in checks.listed("epsilons", epsilons)]
    diagnosed = min(DIAGNOSED, batch_size)
    with advising(partial(attack_out_of_memory, batch_size)):
        clean = _misclassified(model, x, y, pool, batch_size)
        diagnostics = model_diagnostics(model, x[:diagnosed], y[:diagnosed], pool)
        overlap = training_overlap(model, x, batch_size)
    terms = Terms(
        float(epsilon),
        norm,
        pool,
        seed,
        diagnostics.members,
        diagnostics.classes,
        tuple(x.shape[1:]),
        diagnostics.between_passes > DIFFERENT,
        surrogate,
    )
    plan = suite_of(suite, terms)
    plan = plan._replace(settings=[*plan.settings, *(as_setting(a, terms, plan.name == "quick") for a in attacks)])
    curve = requested or [m * terms.epsilon for m in MULTIPLES if norm != "linf" or m * terms.epsilon <= 1]
    losses = 2 if diagnostics.members == 1 else 3
    check_runs = len(plan.budget.steps) + losses * len({*curve, terms.epsilon}) + len(transfers(terms, 1))
    if kept is not None:
        storage.make_folder("folder", kept)
    runner = _Runner(
        model,
        x,
        y,
        Ball.checked(norm, terms.epsilon, (0.0, 1.0), x),
        batch_size,
        kept,
        progress,
        expected=len(plan.settings) + check_runs + _OTHER_CHECKS,
        broken_by_checks=torch.zeros(len(x), dtype=torch.bool),
    )
    results, broken = _run_suite(runner, plan, clean)
    few = min(plan.budget.examples, len(x))
    probes = attack_diagnostics(
        lambda name, attack: runner.check(name, attack, few), terms, plan.budget, curve, clean[:few]
    )
    steps = [SuiteStep(row.name, row.kind, row.broken, row.examples) for row in results] if plan.on_survivors else []
    facts = {
        "suite": plan.name,
        "epsilon": terms.epsilon,
        "norm": norm,
        "pool": pool,
        "examples": len(x),
        "probed": few,
        "members": diagnostics.members,
        "classes": diagnostics.classes,
        "surrogate": surrogate is not None,
        "seed": seed,
        "on_survivors": plan.on_survivors,
        "seconds": runner.seconds,
        "beyond": int((runner.broken_by_checks & ~broken).sum()),
        "training_rows": overlap.rows,
        "training_known": overlap.known,
    }
    return Robustness(
        clean=_accuracy(clean),
        worst=_accuracy(broken),
        attacks=results,
        over_epsilon=_curve({0.0: probes.clean, **probes.over_epsilon}, few),
        over_steps=_curve({0: probes.clean, **probes.over_steps}, few),
        checks=all_flags(diagnostics, probes, steps),
        standing=(~broken).nonzero().squeeze(1).tolist(),
        facts=facts,
    )


def _check_choices(suite: object, attacks: object, surrogate: object) -> None:
    """Refuse what is no suite, no list of attacks or no model."""
    if not isinstance(suite, str | Suite) and not callable(suite):
        checks.refuse("suite", "be a name, a Suite, or a function that makes one", repr(suite), error=TypeError)
    if not isinstance(attacks, Sequence) or isinstance(attacks, str | bytes):
        fix = "One attack? Put it into a list." if isinstance(attacks, str) or callable(attacks) else ""
        checks.refuse("attacks", "be a list of names, functions or settings", repr(attacks), fix, TypeError)
    models = surrogate if isinstance(surrogate, list | tuple) else [surrogate]
    if surrogate is not None and not (models and all(map(callable, models))):
        checks.refuse("surrogate", "be a model, or a list of models", repr(surrogate), error=TypeError)


@dataclass
class _Runner:
    """Runs attacks over examples, stores finished batches, measures time and reports progress."""

    model: Model
    x: Tensor
    y: Tensor
    ball: Ball
    batch_size: int
    folder: Path | None
    progress: Callable[[str, float], None] | None
    expected: int
    """Number of attacks in all."""
    broken_by_checks: Tensor
    """Examples on which the attacks of the checks succeeded within ε."""
    done: int = 0
    seconds: float = 0.0

    def run(self, name: str, attack: Attack, rows: Tensor, prefix: str) -> tuple[Adversarial, float]:
        """Result of an attack on some examples, and the seconds it took, those of earlier calls included."""
        folder = None if self.folder is None else self.folder / f"{prefix}-{_file_name(name)}"
        started, before = time.perf_counter(), _stored_seconds(folder)

        def report(finished: int, total: int) -> None:
            if self.progress is not None:
                self.progress(name, min((self.done + finished / total) / self.expected, 1.0))

        x, y = self.x[rows], self.y[rows]
        try:
            result = over(attack, self.model, x, y, batch_size=self.batch_size, folder=folder, progress=report)
        finally:
            seconds = before + time.perf_counter() - started
            _store_seconds(folder, seconds)
        self.done += 1
        self.seconds += seconds
        return result, seconds

    def within_epsilon(self, result: Adversarial, rows: Tensor) -> Bool[Tensor, " n"]:
        """Successes that lie within ε, on the host."""
        within = self.ball.lengths(result.inputs - self.x[rows]) <= self.ball.limit
        return (result.success & within).cpu()

    def check(self, name: str, attack: Attack, few: int) -> Bool[Tensor, " n"]:
        """Which of the first few examples are wrong after an attack; successes within ε are recorded."""
        rows = torch.arange(few)
        result, _ = self.run(name, attack, rows, "check")
        self.broken_by_checks[:few] |= self.within_epsilon(result, rows)
        return result.success.cpu()


def _run_suite(
    runner: _Runner, suite: Suite, clean: Bool[Tensor, " N"]
) -> tuple[list[AttackResult], Bool[Tensor, " N"]]:
    """Results of every attack of a suite, and which examples are wrong after all successes within ε."""
    broken, results = clean.clone(), []
    for number, setting in enumerate(suite.settings):
        limit = min(setting.examples or len(broken), len(broken))
        before = (broken if suite.on_survivors else clean)[:limit].clone()
        remaining = (~before).nonzero().squeeze(1)
        after, seconds = before.clone(), 0.0
        if not len(remaining):
            runner.done += 1
        else:
            result, seconds = runner.run(setting.name, setting.attack, remaining, f"{number:02d}")
            after[remaining] = result.success.cpu()
            broken[remaining] |= runner.within_epsilon(result, remaining)
        gained = int(after.sum() - before.sum())
        results.append(
            AttackResult(
                setting.name,
                setting.kind,
                _accuracy(after),
                limit,
                len(remaining),
                gained,
                seconds,
                setting.bounded,
            )
        )
    return results, broken


def _checked_data(data: tuple[Tensor, Tensor], examples: int | None) -> tuple[Tensor, Tensor]:
    if not isinstance(data, tuple | list) or len(data) != 2 or not all(isinstance(part, Tensor) for part in data):
        fix = "Give (x, y), x in [0, 1]."
        checks.refuse("data", "be a pair of tensors (x, y)", type(data).__name__, fix, TypeError)
    x, y = data
    if len(x) != len(y) or len(x) == 0:
        checks.refuse("data", "hold examples with a label each", f"{len(x)} examples and {len(y)} labels")
    count = len(x) if examples is None else checks.count("examples", examples)
    return x[:count], y[:count]


def _misclassified(model: Model, x: Tensor, y: Tensor, pool: PoolName, batch_size: int) -> Bool[Tensor, " N"]:
    """Which examples the model misclassifies without any attack, on the host."""
    checks.count("batch_size", batch_size)
    wrong = []
    for start in range(0, len(x), batch_size):
        rows = slice(start, start + batch_size)
        with attack_problem(model, x[rows], y[rows], target=None, pool=pool, box=(0.0, 1.0)) as problem:
            wrong.append((problem.clean_scores.argmax(-1) != problem.examples.y).cpu())
    return torch.cat(wrong)


def _accuracy(wrong: Bool[Tensor, " n"]) -> Interval:
    return wilson(int((~wrong).sum()), len(wrong))


def _curve(left: Mapping[float, int] | Mapping[int, int], examples: int) -> list[CurvePoint]:
    return [CurvePoint(float(at), wilson(count, examples)) for at, count in left.items()]


def _file_name(name: str) -> str:
    """A name as part of a folder's name: ``'APGD-CE, ε = 0.1'`` becomes ``'apgd-ce-0.1'``."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _stored_seconds(folder: Path | None) -> float:
    """Seconds that an attack took in earlier calls; zero if they cannot be read."""
    try:
        return float(json.loads(storage.read_regular(folder / _SECONDS))) if folder is not None else 0.0
    except (OSError, ValueError, TypeError, RecursionError):
        return 0.0


def _store_seconds(folder: Path | None, seconds: float) -> None:
    """Store the seconds of an attack, unless the disk is full: they would hide the reason why the attack ended."""
    if folder is None or not folder.is_dir():
        return
    with suppress(OSError):
        storage.write_atomically(folder / _SECONDS, f"{seconds}\n".encode())
