"""What public functions take beside tensors ``[M, B, C]``: NumPy arrays, pandas objects, and dense outputs.

Results are tensors. Numbers of an array share its memory where torch can; whole numbers become int64.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

from torch import Tensor

from dissensus import dense
from dissensus.arrays import is_array, tensor_of

P = ParamSpec("P")
R = TypeVar("R")
TARGETS = ("targets", "labels")
"""Names of the second parameter of functions of outputs and targets."""


def arrays(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function of tensors take NumPy arrays, and Series and frames of pandas.

    >>> import numpy as np
    >>> @arrays
    ... def total(values):
    ...     return values.sum()
    >>> total(np.array([1, 2]))
    tensor(3)
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def taking(*args: P.args, **keywords: P.kwargs) -> R:
        if not _any_array(args, keywords):
            return function(*args, **keywords)
        bound = _converted(signature, args, keywords)
        return function(*bound.args, **bound.kwargs)

    return taking


def positions(result: Literal["examples", "outputs", "all"]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function of outputs ``[M, B, C]`` take dense ones, ``[M, B, C, *S]``, and arrays.

    Every position is an example (see `dissensus.dense`). The function gets ``[M, N, C]``; its second argument, if it is
    called ``targets`` or ``labels``, is flattened likewise.

    Args:
        result: ``"examples"``: one number per example ``[N]``, which is returned as ``[B, *S]``; ``"outputs"``: numbers
            ``[M, N, C]``, returned in the shape of the outputs; ``"all"``: numbers of all examples together.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        first, second = [*signature.parameters, ""][:2]

        @functools.wraps(function)
        def taking(*args: P.args, **keywords: P.kwargs) -> R:
            if args and type(args[0]) is Tensor and args[0].ndim <= 3 and not _any_array(args, keywords):
                return function(*args, **keywords)
            bound = _converted(signature, args, keywords)
            outputs = bound.arguments.get(first)
            if not isinstance(outputs, Tensor) or outputs.ndim <= 3:
                return function(*bound.args, **bound.kwargs)
            targets = bound.arguments.get(second)
            if second in TARGETS and targets is not None:
                bound.arguments[first], bound.arguments[second], _ = dense.positions(outputs, targets)
            else:
                bound.arguments[first] = dense.flat(outputs)
            return _shaped(function(*bound.args, **bound.kwargs), outputs, result)

        return taking

    return decorate


def _shaped(values: Any, outputs: Tensor, result: str) -> Any:
    """Numbers of positions in the shape of the outputs."""
    if result == "examples":
        return dense.unflat(values, outputs)
    return dense.unflat(values.movedim(-1, 1), outputs).movedim(1, 2) if result == "outputs" else values


def as_tensor(value: Any, name: str = "argument") -> Any:
    """An array, Series or frame as a tensor; anything else as it is.

    >>> import numpy as np
    >>> as_tensor(np.array([0, 1], dtype=np.int16)), as_tensor("mse")
    (tensor([0, 1]), 'mse')
    """
    return value if isinstance(value, tuple) or not is_array(value) else tensor_of(name, value)


_PLAIN = frozenset({Tensor, str, int, float, bool, type(None), list})
"""Types of most arguments, which are told at once: these functions run at every step of a training."""


def _any_array(args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    for value in args:
        if type(value) not in _PLAIN and _is_array(value):
            return True
    for value in keywords.values():  # noqa: SIM110  # a generator takes longer
        if type(value) not in _PLAIN and _is_array(value):
            return True
    return False


def _is_array(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_is_array(part) for part in value)
    return is_array(value)


def _converted(signature: inspect.Signature, args: tuple[Any, ...], keywords: dict[str, Any]) -> inspect.BoundArguments:
    bound = signature.bind(*args, **keywords)
    for name, value in bound.arguments.items():
        if isinstance(value, tuple):
            bound.arguments[name] = tuple(as_tensor(part, name) for part in value)
        else:
            bound.arguments[name] = as_tensor(value, name)
    return bound
