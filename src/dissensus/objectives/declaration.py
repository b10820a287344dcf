"""Declarations: what an objective needs from training, as plain data beside the function.

An objective of this package and one of a user declare in the same way::

    @Declaration(separable=True, sweepable=("strength",), loss="squared_error", pool="score")
    def shrunk(outputs, targets, *, strength=0.1): ...

An objective without a declaration gets the safe default: members may interact, every number in a grid may become a
tensor, and its inputs are those that its parameters ``unlabelled``, ``adversarial``, ``draw`` and ``example_weights``
name. Without a parameter ``example_weights`` it trains on examples of equal weight only.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from dissensus import checks
from dissensus.axes import Pool

UNLABELLED = "unlabelled"
"""The parameter of an objective that takes member outputs on data without labels."""
ADVERSARIAL = "adversarial"
"""The parameter of an objective that takes member outputs on attacked inputs, beside those on clean inputs."""
DRAW = "draw"
"""The parameter of an objective that takes a whole number, new at every step of every run, to draw from."""
EXAMPLE_WEIGHTS = "example_weights"
"""The parameter of an objective that takes weights of examples."""
_ATTRIBUTE = "declaration"
_MISSING = inspect.Parameter.empty

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What an objective needs, and what training may rely on.

    An instance is a decorator: it attaches itself to the function as the attribute ``declaration``. A class of callable
    objects sets that attribute itself. `functools.partial` keeps a declaration. A wrapper made with `functools.wraps`
    does not inherit it, since it may do something else.
    """

    example_weights: Literal["shared", "per_member"] | None = None
    """Weights that the parameter ``example_weights`` takes: one per example ``[B]``, or also one per member and example
    ``[M, B]``. None: examples cannot be weighted."""
    pairs: bool = False
    """Whether the objective is defined for two members or more only."""
    unlabelled: Literal["required", "optional"] | None = None
    """Whether the parameter ``unlabelled`` takes member outputs on data without labels, and must have them."""
    adversarial: bool = False
    """Whether the parameter ``adversarial`` takes member outputs on attacked inputs."""
    draw: bool = False
    """Whether the parameter ``draw`` takes a number that is new at every step."""
    separable: bool = False
    """Whether ``total`` is a sum of terms that depend on one member's outputs each, so that members do not interact."""
    per_member: tuple[str, ...] = ()
    """Parameters that may hold one value per member. With such values, members cannot be passed in groups."""
    sweepable: tuple[str, ...] | None = None
    """Parameters that may be tensors of one number, so that a sweep trains runs that differ in them together. Runs that
    differ in another parameter are trained apart. None: every number may be a tensor."""
    class_labels: bool = False
    """Whether targets must be class labels ``[B]``, not soft labels or values."""
    loss: str | None = None
    """The loss per example, a name from `dissensus.losses`. None: the argument ``loss`` of the objective."""
    pool: Pool | None = None
    """How members are pooled. None: the argument ``pool`` of the objective."""
    neutral: Mapping[str, float] = field(default_factory=dict)
    """Values of hyperparameters with which the objective is that of independent training. Empty: there are none."""

    @property
    def soft_targets(self) -> bool:
        """Whether targets may be soft labels ``[B, C]`` (label smoothing, mixup), where the loss takes class labels."""
        return not self.class_labels

    def __call__(self, objective: Function) -> Function:
        """Attach this declaration to an objective whose parameters agree with it."""
        parameters = _parameters(objective)
        inferred = _inferred(parameters)
        for name in (UNLABELLED, ADVERSARIAL, DRAW):
            if getattr(self, name) != getattr(inferred, name):
                requirement = f"be {getattr(inferred, name)!r}, as the parameters of the objective say"
                checks.refuse(name, requirement, repr(getattr(self, name)), "Change the declaration or the parameters.")
        if self.example_weights is not None:
            checks.one_of("example_weights", self.example_weights, ("shared", "per_member"))
            if inferred.example_weights is None:
                fix = "Add the parameter, or leave this out of the declaration."
                requirement = "be None, since the objective has no parameter `example_weights`"
                checks.refuse(EXAMPLE_WEIGHTS, requirement, repr(self.example_weights), fix)
            if self.example_weights == "per_member" and not self.separable:
                checks.refuse(EXAMPLE_WEIGHTS, "be 'shared' unless the objective is separable", "'per_member'")
        for name in (*self.per_member, *(self.sweepable or ()), *self.neutral):
            checks.one_of("declared parameter", name, _keywords(parameters))
        setattr(objective, _ATTRIBUTE, replace(self))  # a copy, which tells whose declaration it is
        return objective


def declaration(objective: Callable[..., Any]) -> Declaration:
    """The declaration of an objective, also inside of partials, or the safe default.

    >>> @Declaration(separable=True)
    ... def mine(outputs, targets): ...
    >>> declaration(functools.partial(mine)).separable, declaration(lambda outputs, targets: ...).separable
    (True, False)
    """
    function, _ = unwrapped(objective)
    declared = _attached(function)
    return _inferred(_parameters(function)) if declared is None else declared


def is_declared(objective: Callable[..., Any]) -> bool:
    """Whether an objective, or the function inside of partials, has a declaration."""
    return _attached(unwrapped(objective)[0]) is not None


def unwrapped(objective: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function inside of partials, and the keywords that they bind. Outer partials win."""
    keywords: dict[str, Any] = {}
    while isinstance(objective, functools.partial):
        keywords = {**objective.keywords, **keywords}
        objective = objective.func
    return objective, keywords


def argument(objective: Callable[..., Any], name: str) -> Any:
    """The value of a keyword that a partial binds, or its default; None where there is neither."""
    function, keywords = unwrapped(objective)
    if name in keywords:
        return keywords[name]
    parameter = _parameters(function).get(name)
    return None if parameter is None or parameter.default is _MISSING else parameter.default


def takes(objective: Callable[..., Any], name: str) -> bool:
    """Whether an objective takes an input that no partial has bound.

    ``name`` is `UNLABELLED`, `ADVERSARIAL`, `DRAW` or `EXAMPLE_WEIGHTS`.
    """
    return bool(getattr(declaration(objective), name)) and name not in unwrapped(objective)[1]


def hyperparameters(objective: Callable[..., Any]) -> list[str]:
    """Keywords that a call may still set: all but outputs, targets, other inputs, and what partials have bound.

    >>> hyperparameters(functools.partial(lambda outputs, targets, *, beta, loss, draw=0: ..., loss="squared_error"))
    ['beta']
    """
    function, keywords = unwrapped(objective)
    bound = {*keywords, UNLABELLED, ADVERSARIAL, DRAW, EXAMPLE_WEIGHTS}
    return [name for name in _keywords(_parameters(function)) if name not in bound]


def unset_parameters(objective: Callable[..., Any]) -> list[str]:
    """Hyperparameters without a default that no partial has bound.

    >>> unset_parameters(functools.partial(lambda outputs, targets, *, beta, loss, draw=0: ..., loss="squared_error"))
    ['beta']
    """
    parameters = _parameters(unwrapped(objective)[0])
    return [name for name in hyperparameters(objective) if parameters[name].default is _MISSING]


def per_member_arguments(objective: Callable[..., Any]) -> list[str]:
    """Names of arguments that hold one value per member.

    >>> @Declaration(per_member=("weights",))
    ... def mine(outputs, targets, *, weights=None): ...
    >>> per_member_arguments(functools.partial(mine, weights=[0.5, 0.5])), per_member_arguments(mine)
    (['weights'], [])
    """
    values = {name: argument(objective, name) for name in declaration(objective).per_member}
    return [name for name, value in values.items() if isinstance(value, Sequence) or getattr(value, "ndim", 0)]


def is_separable(objective: Callable[..., Any]) -> bool:
    """Whether ``total`` is a sum over members, each term of one member's outputs, and members can come in groups."""
    return declaration(objective).separable and not per_member_arguments(objective)


def _attached(function: Callable[..., Any]) -> Declaration | None:
    declared = getattr(function, _ATTRIBUTE, None)
    copied = declared is getattr(getattr(function, "__wrapped__", None), _ATTRIBUTE, None)  # by `functools.wraps`
    return declared if isinstance(declared, Declaration) and not copied else None


def _inferred(parameters: Mapping[str, inspect.Parameter]) -> Declaration:
    """The safe default for a function with these parameters."""
    unlabelled = parameters.get(UNLABELLED)
    return Declaration(
        unlabelled=None if unlabelled is None else "required" if unlabelled.default is _MISSING else "optional",
        adversarial=ADVERSARIAL in parameters,
        draw=DRAW in parameters,
        example_weights="shared" if EXAMPLE_WEIGHTS in parameters else None,
    )


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function of C, or a signature that is no signature
        return {}


def _keywords(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Names that a call may pass by keyword, without the first two positional ones, outputs and targets."""
    positional = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p.name for p in parameters.values() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [name for name in named if name not in positional[:2]]
