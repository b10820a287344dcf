"""Attacks take NumPy arrays and pandas objects as they take tensors."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from dissensus.arrays import Conversion, HasLayers, is_array

P = ParamSpec("P")
R = TypeVar("R")


def conversion_for(model: Any) -> Conversion:
    """How arrays become inputs of a model: in its precision where it is known, else in torch's default."""
    network = next((part for part in model if isinstance(part, HasLayers)), None) if isinstance(model, list) else model
    return Conversion.of(network) if isinstance(network, HasLayers) else Conversion(torch.get_default_dtype())


def arrays_taken(attack: Callable[P, R]) -> Callable[P, R]:
    """Let an attack ``(model, x, y, ...)`` take arrays for inputs, labels and target classes; also as ``data``."""
    signature = inspect.signature(attack)

    @functools.wraps(attack)
    def taking(*args: P.args, **keywords: P.kwargs) -> R:
        if not any(_holds_array(value) for value in (*args, *keywords.values())):
            return attack(*args, **keywords)
        bound = signature.bind(*args, **keywords)
        conversion = conversion_for(bound.arguments.get("model"))
        for name, value in bound.arguments.items():
            if name == "x":
                bound.arguments[name] = conversion.inputs(value)
            elif name in ("y", "target"):
                bound.arguments[name] = conversion.targets(value, name)
            elif name == "data":
                bound.arguments[name] = conversion.pair(value)
        return attack(*bound.args, **bound.kwargs)

    return taking


def _holds_array(value: object) -> bool:
    return any(map(is_array, value)) if type(value) is tuple else is_array(value)
