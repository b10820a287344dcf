"""How settings of an estimator become arguments of `dissensus.fit` and `dissensus.sweep`."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from dissensus import checks, nets, objectives
from dissensus.axes import LossParts

LEAST_HELD_OUT = 8
"""Rows below which nothing is held out for early stopping: a loss on fewer rows stops at random."""
POOLS = {"cross_entropy": "probability", "brier": "probability", "bce": "probability", "gaussian_nll": "probability"}
"""The pool of a loss unless one is chosen; all others average outputs."""


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
    pool: str | None,
    settings: Mapping[str, Any] | None = None,
) -> Callable[..., LossParts]:
    """The objective with its loss and pool, where it takes them, and with the settings of a user."""
    if isinstance(objective, str):
        checks.one_of("objective", objective, objectives.OBJECTIVES)
        objective = objectives.OBJECTIVES[objective]
    elif not callable(objective):
        checks.refuse("objective", "be a name or a function (outputs, targets) -> LossParts", repr(objective))
    parameters = inspect.signature(objective).parameters
    bound = objective.keywords if isinstance(objective, functools.partial) else {}
    given: dict[str, Any] = {}
    if "loss" in parameters and "loss" not in bound:
        given["loss"] = loss
    if "pool" in parameters and "pool" not in bound:
        given["pool"] = pool or POOLS.get(loss if isinstance(loss, str) else "", "score")
    for name, value in (settings or {}).items():
        if name not in parameters:
            known = ", ".join(n for n in parameters if n not in ("outputs", "logits", "targets", "labels"))
            checks.refuse("objective_params", f"hold parameters of the objective ({known})", repr(name))
        given[name] = value
    return functools.partial(objective, **given)


def class_weights(class_weight: Any, classes: np.ndarray) -> Any:
    """Class weights in the order of the classes, from scikit-learn's forms: None, "balanced" or a dictionary."""
    if class_weight is None or (isinstance(class_weight, str) and class_weight == "balanced"):
        return class_weight
    if not isinstance(class_weight, Mapping):
        fix = "Pass {label: weight, ...}."
        checks.refuse("class_weight", "be None, 'balanced' or a dictionary", repr(class_weight), fix, TypeError)
    unknown = [label for label in class_weight if label not in set(classes.tolist())]
    if unknown:
        checks.refuse("class_weight", f"name classes of y ({classes.tolist()[:10]})", repr(unknown[0]))
    return torch.tensor([float(class_weight.get(label, 1.0)) for label in classes.tolist()])


def holds_out(validation_fraction: float | None, rows: int) -> bool:
    """Whether a part of so many rows is held out for early stopping."""
    if not validation_fraction:
        return False
    fraction = checks.number("validation_fraction", validation_fraction, 0, 1, open_high=True)
    return round(rows * fraction) >= LEAST_HELD_OUT
