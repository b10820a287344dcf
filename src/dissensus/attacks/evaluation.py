"""Honest robustness: a suite of attacks, the pointwise worst case with intervals, curves, and checks of the attacks."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from dissensus import checks, storage
from dissensus.attacks.case import Adversarial, opened
from dissensus.attacks.chunks import over
from dissensus.attacks.flags import DIFFERENT, Standing, checked
from dissensus.attacks.norms import Ball, NormName, check_reach
from dissensus.attacks.probing import looked, probed
from dissensus.attacks.robustness import Attacked, Point, Robustness
from dissensus.attacks.suites import SUITES, Suite, Terms, transfers
from dissensus.attacks.victim import Model, PoolName
from dissensus.metrics import Interval, wilson

SuiteName = Literal["standard", "adaptive", "paper", "quick"]
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of ε, for the curve over ε."""
LOOKED = 256
"""Examples whose outputs and gradients are looked at, if a batch holds as many."""
_OTHERS = 6
"""Attacks that are run for checks beside those of the curves."""
_SECONDS = "seconds.json"


def evaluate(
    model: Model,
    data: tuple[Float[Tensor, "N *S"], Integer[Tensor, " N"]],
    suite: SuiteName = "standard",
    *,
    epsilon: float,
    norm: NormName = "linf",
    pool: PoolName = "probability",
    examples: int | None = None,
    batch_size: int = 256,
    surrogate: Model | None = None,
    epsilons: Sequence[float] | None = None,
    folder: str | Path | None = None,
    progress: Callable[[str, float], None] | None = None,
    seed: int = 0,
) -> Robustness:
    """How many examples are left when every attack of a suite has tried, and whether the attacks can be believed.

    Args:
        model: An ensemble ``x -> [M, B, C]``, a plain classifier ``x -> [B, C]``, or a list of those; see `fgsm`.
            Standardisation belongs inside it.
        data: Inputs in [0, 1], float32 or float64, and labels.
        suite: ``"standard"``, ``"adaptive"``, ``"paper"`` or ``"quick"``; see `dissensus.attacks.suites`.
        epsilon: ε: of a value in L∞, of the whole in L2.
        norm: ``"linf"`` or ``"l2"``.
        pool: How members become one prediction, which is what is attacked; see `fgsm`.
        examples: Only the first so many.
        batch_size: Examples at once.
        surrogate: Another model for the same inputs, on which examples are crafted for transfer.
        epsilons: Of the curve over ε; by default a quarter of ε to four times ε.
        folder: Where finished batches are kept. The same call goes on where one was broken off.
        progress: Called with what is being done and the share of attacks that are done.
        seed: Of every random start.

    Accuracies come with Wilson's intervals of 95 %. Curves and checks are of the first 128 examples, or 64 if quick.
    """
    x, y = _checked(data, examples)
    checks.one_of("suite", suite, SUITES)
    checks.number("epsilon", epsilon, 0.0, open_low=True)
    check_reach(norm, epsilon, (0.0, 1.0))
    checks.count("seed", seed, 0)
    own = [checks.number("epsilons", e, 0.0, open_low=True) for e in epsilons] if epsilons is not None else None
    clean = _wrong(model, x, y, pool, batch_size)
    looks = min(LOOKED, batch_size)
    look = looked(model, x[:looks], y[:looks], pool)
    terms = Terms(
        float(epsilon),
        norm,
        pool,
        seed,
        look.members,
        look.classes,
        tuple(x.shape[1:]),
        look.between_passes > DIFFERENT,
        surrogate,
    )
    chosen = SUITES[suite](terms)
    curve = own or [m * terms.epsilon for m in MULTIPLES if norm != "linf" or m * terms.epsilon <= 1]
    ball = Ball.checked(norm, terms.epsilon, (0.0, 1.0), x)
    losses = 2 if look.members == 1 else 3
    checking = len(chosen.probing.steps) + losses * len({*curve, terms.epsilon}) + len(transfers(terms, 1)) + _OTHERS
    runner = _Runner(model, x, y, ball, batch_size, None if folder is None else Path(folder), progress)
    runner.expected = len(chosen.settings) + checking
    rows, broken = _attacked(runner, chosen, clean)
    few = min(chosen.probing.examples, len(x))
    probes = probed(lambda name, attack: runner.probe(name, attack, few), terms, chosen.probing, curve, clean[:few])
    alone = [Standing(row.name, row.kind, row.broken, row.examples) for row in rows] if chosen.on_survivors else []
    facts = {
        "suite": suite,
        "epsilon": terms.epsilon,
        "norm": norm,
        "pool": pool,
        "examples": len(x),
        "probed": few,
        "members": look.members,
        "classes": look.classes,
        "surrogate": surrogate is not None,
        "seed": seed,
        "on_survivors": chosen.on_survivors,
        "seconds": runner.seconds,
        "beyond": int((runner.probed & ~broken).sum()),
    }
    return Robustness(
        clean=_accuracy(clean),
        worst=_accuracy(broken),
        attacks=rows,
        over_epsilon=_curve({0.0: probes.clean, **probes.over_epsilon}, few),
        over_steps=_curve({0: probes.clean, **probes.over_steps}, few),
        checks=checked(look, probes, alone),
        standing=(~broken).nonzero().squeeze(1).tolist(),
        facts=facts,
    )


class _Runner:
    """Attacks over examples, with what they take, where they are kept and how far they are."""

    def __init__(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        ball: Ball,
        batch_size: int,
        folder: Path | None,
        progress: Callable[[str, float], None] | None,
    ) -> None:
        self.model, self.x, self.y, self.ball, self.batch_size = model, x, y, ball, batch_size
        self.folder, self.progress = folder, progress
        self.expected, self.done, self.seconds = 1, 0, 0.0
        self.probed = torch.zeros(len(x), dtype=torch.bool)

    def run(self, name: str, attack: Callable[..., Adversarial], rows: Tensor, place: str) -> tuple[Adversarial, float]:
        """An attack on some examples, and the seconds that it took, in earlier calls too."""
        home = None if self.folder is None else self.folder / f"{place}-{_filed(name)}"
        started, before = time.perf_counter(), _stored_seconds(home)

        def tell(so_far: int, all_of: int) -> None:
            if self.progress is not None:
                self.progress(name, min((self.done + so_far / all_of) / self.expected, 1.0))

        try:
            found = over(
                attack, self.model, self.x[rows], self.y[rows], batch_size=self.batch_size, folder=home, progress=tell
            )
        finally:
            seconds = before + time.perf_counter() - started
            _store_seconds(home, seconds)
        self.done += 1
        self.seconds += seconds
        return found, seconds

    def probe(self, name: str, attack: Callable[..., Adversarial], few: int) -> Bool[Tensor, " n"]:
        """Which of the first few examples are wrong after an attack; those broken within ε are remembered."""
        found, _ = self.run(name, attack, torch.arange(few), "check")
        within = self.ball.lengths(found.inputs - self.x[:few]) <= self.ball.limit
        self.probed[:few] |= (found.success & within).cpu()
        return found.success.cpu()


def _attacked(runner: _Runner, chosen: Suite, clean: Bool[Tensor, " N"]) -> tuple[list[Attacked], Bool[Tensor, " N"]]:
    """Every attack of a suite, and which examples are wrong after all that lies within ε."""
    broken, rows = clean.clone(), []
    for number, setting in enumerate(chosen.settings):
        limit = min(setting.examples or len(broken), len(broken))
        before = (broken if chosen.on_survivors else clean)[:limit].clone()
        left = (~before).nonzero().squeeze(1)
        after, seconds = before.clone(), 0.0
        if not len(left):
            runner.done += 1
        else:
            found, seconds = runner.run(setting.name, setting.attack, left, f"{number:02d}")
            success = found.success.cpu()
            after[left] = success
            within = (runner.ball.lengths(found.inputs - runner.x[left]) <= runner.ball.limit).cpu()
            broken[left] |= success & within
        new = int(after.sum() - before.sum())
        rows.append(
            Attacked(setting.name, setting.kind, _accuracy(after), limit, len(left), new, seconds, setting.bounded)
        )
    return rows, broken


def _checked(data: tuple[Tensor, Tensor], examples: int | None) -> tuple[Tensor, Tensor]:
    if not isinstance(data, tuple | list) or len(data) != 2 or not all(isinstance(part, Tensor) for part in data):
        checks.refuse(
            "data", "be a pair of tensors (x, y)", type(data).__name__, "Give (x, y), x in [0, 1].", TypeError
        )
    x, y = data
    if len(x) != len(y) or len(x) == 0:
        checks.refuse("data", "hold examples with a label each", f"{len(x)} examples and {len(y)} labels")
    most = len(x) if examples is None else checks.count("examples", examples)
    return x[:most], y[:most]


def _wrong(model: Model, x: Tensor, y: Tensor, pool: PoolName, batch_size: int) -> Bool[Tensor, " N"]:
    """Which examples the model has wrong without any attack, on the host."""
    checks.count("batch_size", batch_size)
    found = []
    for start in range(0, len(x), batch_size):
        rows = slice(start, start + batch_size)
        with opened(model, x[rows], y[rows], target=None, pool=pool, box=(0.0, 1.0)) as case:
            found.append((case.clean.argmax(-1) != case.examples.y).cpu())
    return torch.cat(found)


def _accuracy(wrong: Bool[Tensor, " n"]) -> Interval:
    return wilson(int((~wrong).sum()), len(wrong))


def _curve(left: Mapping[float, int] | Mapping[int, int], examples: int) -> list[Point]:
    return [Point(float(at), wilson(count, examples)) for at, count in left.items()]


def _filed(name: str) -> str:
    """A name as part of a folder's: ``'APGD-CE, ε = 0.1'`` becomes ``'apgd-ce-0.1'``."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _stored_seconds(home: Path | None) -> float:
    """What an attack has taken so far; nothing where that cannot be read."""
    try:
        return float(json.loads((home / _SECONDS).read_text())) if home is not None else 0.0
    except (OSError, ValueError, TypeError):
        return 0.0


def _store_seconds(home: Path | None, seconds: float) -> None:
    if home is not None and home.is_dir():
        storage.write_atomically(home / _SECONDS, f"{seconds}\n".encode())
