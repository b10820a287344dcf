"""How settings of an estimator become arguments of `dissensus.fit` and `dissensus.sweep`."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from dissensus import checks, losses, nets, objectives
from dissensus.axes import LossParts

LEAST_HELD_OUT = 8
"""Rows below which nothing is held out for early stopping: a loss on fewer rows stops at random."""


def network(module: Callable[..., nn.Module] | None, inputs: int, outputs: int, hidden: tuple[int, ...]) -> nn.Module:
    """A new member: what ``module(inputs, outputs)`` returns, or a multilayer perceptron."""
    if module is None:
        return nets.mlp(inputs, outputs, hidden)
    return module(inputs, outputs)


def builder(
    module: Callable[..., nn.Module] | None, inputs: int, outputs: int, hidden: Any = None
) -> Callable[..., nn.Module]:
    """The function that builds members; without ``hidden``, it is a parameter of that function."""
    if module is not None and not callable(module):
        fix = "Pass a function (inputs, outputs) -> nn.Module."
        checks.refuse("module", "be a function of the numbers of inputs and outputs", repr(module), fix, TypeError)
    if isinstance(module, nn.Module):
        fix = "Write `lambda inputs, outputs: ...` around it, so that every member is new."
        checks.refuse("module", "be a function that returns a network", "a network", fix, TypeError)
    build = functools.partial(network, module, inputs, outputs)
    return build if hidden is None else functools.partial(build, hidden=widths(hidden))


def widths(hidden: Any) -> tuple[int, ...]:
    """Widths of hidden layers: a number, or several."""
    several = hidden if isinstance(hidden, tuple | list | np.ndarray) else (hidden,)
    return tuple(checks.count("hidden", int(width) if isinstance(width, np.integer) else width) for width in several)


def bound_objective(
    objective: str | Callable[..., LossParts],
    *,
    loss: Any,
    pool: str,
    settings: Mapping[str, Any] | None = None,
    varied: Sequence[str] = (),
) -> Callable[..., LossParts]:
    """The objective with its loss and pool, where it takes them, and with the settings of a user.

    Parameters without a value are refused, but for those that a sweep varies.
    """
    if isinstance(objective, str):
        checks.one_of("objective", objective, objectives.OBJECTIVES)
        objective = objectives.OBJECTIVES[objective]
    elif not callable(objective):
        checks.refuse("objective", "be a name or a function (outputs, targets) -> LossParts", repr(objective))
    parameters = inspect.signature(objective).parameters
    bound = objective.keywords if isinstance(objective, functools.partial) else {}
    bound_here: dict[str, Any] = {}
    if "loss" in parameters and "loss" not in bound:
        bound_here["loss"] = loss
    if "pool" in parameters and "pool" not in bound:
        bound_here["pool"] = pool
    for name, value in (settings or {}).items():
        if name not in parameters:
            known = ", ".join(n for n in parameters if n not in ("outputs", "logits", "targets", "labels"))
            checks.refuse("objective_params", f"hold parameters of the objective ({known})", repr(name))
        bound_here[name] = value
    for name, parameter in list(parameters.items())[2:]:
        given = name in bound_here or name in bound or name in varied
        if given or parameter.default is not parameter.empty or parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        fix = f"Pass objective_params={{{name!r}: ...}}."
        if name == "unlabelled":
            fix = "It needs data without labels, which a table does not bring. Use dissensus.fit."
        checks.refuse("objective_params", "have a value for each parameter of the objective", f"no {name!r}", fix)
    return functools.partial(objective, **bound_here)


def pool_of(loss: Any, pool: str | None) -> Any:
    """The pool of a loss: one that it has, by default its first."""
    known = losses.known(loss)
    assert known is not None, "estimators know their losses"
    if pool is None:
        return known.pools[0]
    checks.one_of("pool", pool, [name for name in known.pools if name != "vote"])
    return pool


def class_weights(class_weight: Any, classes: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
    """The weight of each class, from scikit-learn's forms: None, "balanced" or a dictionary.

    ``"balanced"`` is n / (K · n_c), by the labels ``[n]`` of training, as numbers from 0 on. Classes that do not occur
    there do not count among the K.
    """
    if class_weight is None:
        return None
    if isinstance(class_weight, str) and class_weight == "balanced":
        counts = np.bincount(labels, minlength=len(classes))
        return len(labels) / ((counts > 0).sum() * np.maximum(counts, 1))
    if not isinstance(class_weight, Mapping):
        fix = "Pass {label: weight, ...}."
        checks.refuse("class_weight", "be None, 'balanced' or a dictionary", repr(class_weight), fix, TypeError)
    unknown = [label for label in class_weight if label not in set(classes.tolist())]
    if unknown:
        checks.refuse("class_weight", f"name classes of y ({classes.tolist()[:10]})", repr(unknown[0]))
    for label, weight in class_weight.items():
        checks.number(f"class_weight[{label!r}]", weight, 0)
    return np.array([float(class_weight.get(label, 1.0)) for label in classes.tolist()])


def holds_out(validation_fraction: float | None, rows: int) -> bool:
    """Whether a part of so many rows is held out for early stopping."""
    if not validation_fraction:
        return False
    fraction = checks.number("validation_fraction", validation_fraction, 0, 1, open_high=True)
    return round(rows * fraction) >= LEAST_HELD_OUT
