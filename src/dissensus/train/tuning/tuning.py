"""`tune`: how much diversity, found by halving inside stacked trainings, with the audit as a conscience."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from dissensus import checks
from dissensus.arrays import Conversion
from dissensus.axes import LossParts
from dissensus.data.splits import Split
from dissensus.train.history import OnProgress
from dissensus.train.settings import Metric, TargetSettings
from dissensus.train.sweeping import sweep
from dissensus.train.trained_loss import trained_loss
from dissensus.train.tuning.problem import Problem, Sizes, axes_of
from dissensus.train.tuning.result import Tuned
from dissensus.train.tuning.scoring import scorer_of
from dissensus.train.tuning.search import Search

OWN = (
    "grid",
    "validation",
    "metric",
    "mode",
    "checkpoint",
    "resume",
    "seed",
    "weights",
    "unlabelled",
    "keep",
    "watch",
    "cluster",
)
"""Settings of `sweep` that `tune` decides, or does not hand on."""
_INSTEAD = {
    "grid": "Use space=.",
    "weights": "Examples count the same here.",
    "cluster": "Candidates wait for each other at every rung, on one machine. `sweep` trains a grid on a cluster.",
}


def tune(
    build: Callable[..., nn.Module],
    data: Any,
    objective: Callable[..., LossParts],
    *,
    space: Mapping[str, Any],
    epochs: int,
    members: int = 5,
    budget: float | None = None,
    factor: float = 4.0,
    first_rung: int = 1,
    validation: float | Split = 0.2,
    test: float = 0.2,
    splits: int = 5,
    seeds: int = 2,
    metric: str | Metric = "loss",
    mode: Literal["min", "max"] | None = None,
    allow_collusive: bool = False,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    storage: Any = None,
    progress: bool | OnProgress | None = None,
    seed: int = 0,
    **settings: Any,
) -> Tuned:
    """Find how much diversity is best, and say what that gains over independent training.

    All candidates start as runs of one stacked training. At each rung the worst drop out and cost nothing any more; the
    others go on without a restart, whatever their shapes. Independent candidates compete among themselves, and the best
    of them is always trained to the end with all its seeds. It is the reference of the audit and of the gain. Where the
    space has settings besides the objective's, such as ``lr``, independent versions of the best candidates are trained
    at the end, so that the gain is that of the objective.

    Every split of the data has training, validation and test rows. Candidates are compared on validation rows: within
    every split, and by their means over all splits. ``best`` is the best by these means. ``gain`` is measured on test
    rows: each split's own choice, which its test rows had no part in, against independent training. Candidates whose
    ensembles the audit calls collusive are set aside. Where nothing is better than independent training by more than a
    standard error, or where the gain is not positive, independent training is the choice.

    Args:
        build: Function that returns a new member. Names of the space that are its parameters are passed to it.
        data: A pair ``(inputs, targets)`` in memory: tensors, arrays or frames. Each split holds a copy of its rows.
        objective: Function ``(outputs, targets, **hyperparameters) -> LossParts``. Independent training is its neutral
            value (`dissensus.objectives.Declaration`); without one, members are trained on their own loss beside it.
        space: Names to lists of values, to a `dissensus.train.Range`, or to distributions: those of Optuna, or objects
            with a method ``ppf`` as in ``scipy.stats``. Names are hyperparameters of the objective, parameters of
            ``build`` such as widths, ``lr``, ``weight_decay``, ``momentum``, ``clip_norm``, ``shared_lr``,
            ``shared_clip_norm``, ``members`` and ``batch_size``. Independent training is added where the lists lack it.
        epochs: Epochs of a whole training.
        members: Number of members. The space takes precedence.
        budget: What may be spent, in whole trainings of one candidate: 10 is as much as ten candidates that are trained
            to the end. None trains every point of a space of lists, or all brackets of Hyperband once. A bracket that
            would exceed the budget is made smaller. Independent candidates count, so that 2 is the least. What only a
            single split keeps, or has trained at the end as its reference, comes on top.
        factor: Of n candidates, about n / factor go on at each rung.
        first_rung: Epochs before the first rung, at least.
        validation: The share of the rest that is held out for validation, or a `dissensus.data.Split` with groups,
            classes or times.
        test: The share of all examples that is held out for the test.
        splits: Number of splits. The interval of the gain needs two or more.
        seeds: Number of runs per candidate and split.
        metric: ``"loss"`` of the pooled prediction, ``"accuracy"``, ``"error"``, ``"rmse"``, ``"mae"``, or a function
            ``(outputs [M, N, C], targets) -> number``. ``class_weights`` count in the loss, on test rows too, and
            ``ignore_index`` and ``class_axis`` in all of these; a function gets all outputs and targets.
        mode: Whether lower (``"min"``) or higher (``"max"``) is better, for a function.
        allow_collusive: Whether candidates that the audit calls collusive may be chosen.
        checkpoint: Folder that keeps everything, so that an interrupted search can be resumed.
        resume: Whether to go on with the search in ``checkpoint``.
        storage: An Optuna storage (an address such as ``"sqlite:///tune.db"``, or an object). Candidates are written
            there, and those of other searches of the same space, metric, objective, network and data inform the
            proposals. It holds no weights: an interrupted search is resumed from ``checkpoint``.
        progress: See `dissensus.sweep`; one bar per bracket.
        seed: Seed of splits, runs and proposals.
        **settings: Other settings of `dissensus.sweep`, such as ``batch_size``, ``lr``, ``patience`` or ``device``.

    >>> import functools
    >>> import torch
    >>> import dissensus as ds
    >>> x = torch.randn(120, 3, generator=torch.Generator().manual_seed(0))
    >>> objective = functools.partial(ds.objectives.augmented, loss="squared_error", pool="score")
    >>> build = functools.partial(ds.nets.mlp, 3, 1, (8,))
    >>> tuned = tune(build, (x, x[:, :1].sin()), objective, space={"beta": [0.4, 0.8]}, epochs=2, splits=2, seeds=1)
    >>> len(tuned.candidates), tuned.independent.point, tuned.spent.runs
    (3, {'beta': 0}, 6)
    """
    started = time.perf_counter()
    axes = axes_of(build, objective, space)
    problem = Problem.of(
        build,
        data,
        objective,
        axes,
        sizes=Sizes(
            checks.count("epochs", epochs),
            checks.count("members", members),
            checks.count("splits", splits),
            checks.count("seeds", seeds),
            checks.number("factor", factor, 1, open_low=True),
            _first_rung(first_rung, epochs),
            None if budget is None else checks.number("budget", budget, 1),
            checks.count("seed", seed, 0),
        ),
        validation=validation,
        test=checks.number("test", test, 0, 1, open_low=True, open_high=True),
        scorer=scorer_of(metric, mode, trained_loss(objective), _target_settings(settings)),
        settings=_checked_settings(settings),
        judged=not checks.flag("allow_collusive", allow_collusive),
    )
    if resume and checkpoint is None:
        checks.refuse("resume", "come with `checkpoint`", "no folder", "Give checkpoint=folder.")
    folder = None if checkpoint is None else checks.path("checkpoint", checkpoint)
    search = Search(problem, folder, resume, storage, progress, started)
    search.run()
    return search.result()


def _target_settings(settings: Mapping[str, Any]) -> TargetSettings:
    """How targets count in the loss."""
    return TargetSettings.of(
        Conversion(torch.get_default_dtype()),
        settings.get("class_weights"),
        settings.get("label_smoothing", 0.0),
        settings.get("ignore_index"),
        settings.get("class_axis", 2),
    )


def _first_rung(first_rung: int, epochs: int) -> int:
    first = checks.count("first_rung", first_rung)
    if first > epochs:
        checks.refuse("first_rung", f"be at most `epochs` ({epochs})", first)
    return first


def _checked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    import inspect

    known = [name for name in inspect.signature(sweep).parameters if name not in ("build", "data", "objective")]
    for name in settings:
        if name in OWN:
            fix = _INSTEAD.get(name, "")
            checks.refuse(name, "be left out of `tune`, which decides it or cannot split it", "it", fix)
        checks.one_of("setting", name, [name for name in known if name not in OWN])
    return dict(settings)
