"""Optimisers that a user brings: one per member, over that member's own parameters in their own shapes.

Forward and backward passes are stacked; only the updates are a loop over members. So an optimiser that looks at a whole
parameter, such as one with norms per layer, sees what it would see in a separate training.
"""

import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from dissensus import checks
from dissensus.execution import Body
from dissensus.execution.skeleton import first_line
from dissensus.randomness import generators_kept
from dissensus.train.python_state import NotStorable, decoded, encoded


@runtime_checkable
class OwnOptimizer(Protocol):
    """What training asks of an optimizer: ``torch.optim.Optimizer`` has it, and so have wrappers around several."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of parameters, with the settings of each."""
        ...

    def step(self) -> Any:
        """Update all parameters by their ``grad``."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state, for checkpoints."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore what `state_dict` returned."""
        ...


MakeOptimizer = Callable[[Any], OwnOptimizer]
"""``parameters -> optimizer``: a class of ``torch.optim``, a ``functools.partial`` of one, or a function."""
NAMED = ("named_parameters", "named_params")
"""A function whose first parameter has one of these names gets pairs ``(name, parameter)``."""
_REQUIREMENT = "return an optimizer as torch.optim's"
_FIX = "A class, a partial or a function such as lambda params: torch.optim.NAdam(params, lr=1e-3)."


def optimizer_name(make: MakeOptimizer) -> str:
    """The name of an optimiser that a user brings."""
    function: Any = make
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _label(make: MakeOptimizer, optimizer: OwnOptimizer) -> str:
    """The name of an optimiser for people; a function without a name is known by what it makes."""
    name = optimizer_name(make)
    return type(optimizer).__name__ if name == "<lambda>" else name


def _made(make: MakeOptimizer, parameters: Mapping[str, nn.Parameter]) -> OwnOptimizer:
    """An optimizer over some parameters, and over no others."""
    given = list(parameters.items()) if _takes_names(make) else list(parameters.values())
    try:
        optimizer: Any = make(given)
    except Exception as reason:  # a foreign callable may raise anything
        got = f"{optimizer_name(make)}, which failed ({type(reason).__name__}: {first_line(reason)})"
        fix = "Bind its other settings: functools.partial(torch.optim.SGD, lr=0.1)."
        what = "pairs of a name and a parameter" if _takes_names(make) else "parameters"
        missing = isinstance(reason, TypeError) and "argument" in str(reason)
        requirement = f"make an optimizer from a list of {what} alone"
        checks.refuse("optimizer", requirement, got, fix if missing else "", TypeError if missing else ValueError)
    if isinstance(optimizer, type) or not isinstance(optimizer, OwnOptimizer):
        checks.refuse("optimizer", _REQUIREMENT, repr(optimizer), _FIX, TypeError)
    known = {id(parameter) for parameter in parameters.values()}
    if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
        checks.refuse("optimizer", "hold only the parameters that it was given", "others as well")
    return optimizer


def _takes_names(make: MakeOptimizer) -> bool:
    try:
        return next(iter(inspect.signature(make).parameters), "") in NAMED
    except (TypeError, ValueError):  # a callable without a signature
        return False


def _needs_closure(optimizer: OwnOptimizer) -> bool:
    try:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    return closure is not None and closure.default is inspect.Parameter.empty


def check_optimizer(make: MakeOptimizer, body: Body, flat: Tensor, *, stored: bool, scheduled: bool) -> None:
    """Try an optimizer on a copy of each architecture, and refuse it where it cannot train members.

    ``stored``: checkpoints have to store its state. ``scheduled``: a schedule multiplies its learning rates.
    """
    members = body.weights(flat.detach())
    for views in members[:1] if body.alike else members:
        with generators_kept(flat.device), torch.no_grad():
            _try(make, {key: nn.Parameter(view.clone()) for key, view in views.items()}, stored, scheduled)


def _try(make: MakeOptimizer, parameters: Mapping[str, nn.Parameter], stored: bool, scheduled: bool) -> None:
    """Make and step an optimizer over copies of a member's parameters."""
    with torch.enable_grad():
        optimizer = _made(make, parameters)
    name = _label(make, optimizer)
    if _needs_closure(optimizer):
        fix = "It evaluates the loss several times a step. Use another one, such as torch.optim.NAdam."
        checks.refuse("optimizer", "take steps without a closure", f"{name}, which needs one", fix)
    if scheduled and any(_rate(group) is None for group in optimizer.param_groups):
        fix = "Leave `schedule` out."
        checks.refuse("optimizer", "have a learning rate `lr` in every group for a `schedule`", name, fix)
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 1e-3)
    before = _attributes(optimizer)
    _set_mode(optimizer, training=True)
    try:
        with torch.enable_grad():
            optimizer.step()
    except Exception as reason:  # a foreign optimizer may raise anything
        got = f"{name}, whose first step failed ({first_line(reason)})"
        checks.refuse("optimizer", "take steps without a closure", got)
    if stored:
        _check_storable(name, optimizer, before)


def _check_storable(name: str, optimizer: OwnOptimizer, before: Mapping[str, object]) -> None:
    fix = "Leave `checkpoint` out."
    try:
        encoded(optimizer.state_dict())
    except NotStorable as reason:
        got = f"{name}, whose state holds {reason or 'something else'}"
        checks.refuse("optimizer", "have a state of numbers, texts and tensors for `checkpoint`", got, fix)
    changed = [key for key, value in _attributes(optimizer).items() if before.get(key, value) != value]
    if changed:
        got = f"{name}, which changes `{changed[0]}` beside it"
        checks.refuse("optimizer", "keep its state in `state_dict` for `checkpoint`", got, fix)


def _attributes(optimizer: OwnOptimizer) -> dict[str, object]:
    """Numbers and texts that an optimizer keeps as attributes; names with an underscore are torch's own."""
    values = getattr(optimizer, "__dict__", {}).items()
    return {name: v for name, v in values if isinstance(v, int | float | str) and not name.startswith("_")}


def _has_modes(optimizer: Any) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def _set_mode(optimizer: Any, *, training: bool) -> None:
    """Switch an optimizer with modes, such as a schedule-free one, which has other weights for evaluation."""
    if _has_modes(optimizer):
        (optimizer.train if training else optimizer.eval)()


def _rate(group: Mapping[str, Any]) -> float | None:
    rate = group.get("lr")
    return float(rate) if isinstance(rate, int | float | Tensor) and not isinstance(rate, bool) else None


class MemberOptimizers:
    """One optimizer per row of the matrix of all weights; parameters are views of the row."""

    def __init__(self, make: MakeOptimizer, body: Body, flat: Tensor, *, scheduled: bool) -> None:
        self.body, self.scheduled = body, scheduled
        self.parameters = [
            {key: nn.Parameter(view) for key, view in views.items()} for views in body.weights(flat.detach())
        ]
        self.optimizers = [_made(make, parameters) for parameters in self.parameters]
        self.name = _label(make, self.optimizers[0])
        for group in (group for each in self.optimizers for group in each.param_groups):
            if isinstance(group.get("lr"), Tensor):  # which a schedule changes, and members may share
                group["lr"] = group["lr"].clone()
        self.initial_rates = [[_rate(group) for group in each.param_groups] for each in self.optimizers]
        self.training = [False] * len(self.optimizers)
        """Rows whose optimizers are in training mode."""

    @property
    def has_modes(self) -> bool:
        """Whether optimizers have a training and an evaluation mode, with different weights."""
        return any(map(_has_modes, self.optimizers))

    def rates(self) -> list[float]:
        """The learning rate of each row's first group before any schedule; NaN where it has none."""
        first = [rates[0] for rates in self.initial_rates]
        return [math.nan if rate is None else rate for rate in first]

    def step(
        self,
        grad: Float[Tensor, "K P"],
        factor: Tensor,
        active: Bool[Tensor, " G"],
        rows: Tensor | None = None,
    ) -> None:
        """Update the active rows, or those of ``rows`` (by number), whose gradient ``grad`` is; read by the host."""
        going = active.tolist()
        numbers: Sequence[int] = range(len(self.optimizers)) if rows is None else rows.tolist()
        times = float(factor) if self.scheduled else 1.0
        for row, views in zip(numbers, self.body.views(grad), strict=True):
            if not going[row]:
                continue
            parameters, optimizer = self.parameters[row], self.optimizers[row]
            for name, view in views.items():
                parameters[name].grad = view.to(parameters[name].dtype)
            if self.scheduled:
                _set_rates(optimizer, self.initial_rates[row], times)
            with torch.enable_grad():  # as in a loop by hand; the step itself decides
                optimizer.step()
            for parameter in parameters.values():
                parameter.grad = None

    def train(self, active: Bool[Tensor, " G"]) -> None:
        """Switch optimizers of active rows to training mode."""
        if self.has_modes:
            self._switch(active.tolist(), training=True)

    def eval(self, rows: Iterable[bool] | None = None) -> None:
        """Switch optimizers, all or those of some rows, to evaluation mode: weights become those to evaluate."""
        if self.has_modes:
            self._switch([True] * len(self.optimizers) if rows is None else rows, training=False)

    def _switch(self, rows: Iterable[bool], *, training: bool) -> None:
        for row, wanted in enumerate(rows):
            if wanted and self.training[row] != training:
                _set_mode(self.optimizers[row], training=training)
                self.training[row] = training

    def follow(self, flat: Tensor) -> None:
        """Go on with a new matrix that holds the weights of the same rows."""
        for parameters, views in zip(self.parameters, self.body.weights(flat.detach()), strict=True):
            for name, parameter in parameters.items():
                parameter.data = views[name]

    def select(self, rows: Bool[Tensor, " G"]) -> None:
        """Go on with some rows."""
        kept = rows.nonzero().flatten().tolist()
        self.parameters = [self.parameters[row] for row in kept]
        self.optimizers = [self.optimizers[row] for row in kept]
        self.initial_rates = [self.initial_rates[row] for row in kept]
        self.training = [self.training[row] for row in kept]

    def tensors(self, first: int = 0) -> dict[str, Tensor]:
        """The states of all optimizers: tensors, and everything else as JSON in one of them; rows count from ``first``.

        JSON of several processes comes one after the other.
        """
        facts: list[Any] = []
        tensors: dict[str, Tensor] = {}
        for row, optimizer in enumerate(self.optimizers):
            try:
                state, held = encoded(optimizer.state_dict())
            except NotStorable as reason:
                got = f"{self.name}, whose state now holds {reason or 'something else'}"
                checks.refuse("optimizer", "have a state of numbers, texts and tensors for `checkpoint`", got)
            facts.append([state, self.training[row]])
            tensors |= {f"{first + row}/{name}": tensor for name, tensor in held.items()}
        return {"facts": torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8), **tensors}

    def load(self, stored: Mapping[str, Tensor], own: slice | None = None) -> None:
        """Restore what `tensors` returned, in all processes; ``own`` are the rows of this one."""
        text, facts = bytes(stored["facts"].cpu().numpy()).decode(), list[Any]()
        while text:
            part, end = json.JSONDecoder().raw_decode(text)
            facts, text = facts + part, text[end:]
        facts, first = (facts, 0) if own is None else (facts[own], own.start)
        for row, (optimizer, (state, training)) in enumerate(zip(self.optimizers, facts, strict=True)):
            held = {key.partition("/")[2]: t for key, t in stored.items() if key.startswith(f"{first + row}/")}
            state = decoded(state, held)
            optimizer.load_state_dict(state)
            _restore_exactly(optimizer, state)
            self.training[row] = training


def _set_rates(optimizer: OwnOptimizer, rates: Sequence[float | None], factor: float) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        assert rate is not None, "checked before training"
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * factor)
        else:
            group["lr"] = rate * factor


def _restore_exactly(optimizer: OwnOptimizer, state: Mapping[str, Any]) -> None:
    """Put tensors back as they were stored: ``load_state_dict`` casts them to the dtype of their parameter."""
    if not isinstance(state.get("state"), Mapping):
        return
    held = getattr(optimizer, "state", {})
    places = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in state["state"].items():
        if isinstance(index, int) and index < len(places) and places[index] in held:
            held[places[index]].update({key: v for key, v in values.items() if isinstance(v, Tensor)})
