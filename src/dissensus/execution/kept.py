"""Settings of a network that a call may change and restores in any case."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from torch import nn

from dissensus.execution.body import Body
from dissensus.execution.choice import Choices

SETTINGS = ("backend", "channels_last", "by_rule")


Function = TypeVar("Function", bound=Callable[..., Any])


def leaves_settings(function: Function) -> Function:
    """Decorate a function whose first argument is a network: it restores that network's settings (`settings_kept`)."""
    first = next(iter(inspect.signature(function).parameters))

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        network = args[0] if args else kwargs.get(first)
        with settings_kept(network) if isinstance(network, nn.Module) else nullcontext():
            return function(*args, **kwargs)

    return wrapped  # pyright: ignore[reportReturnType]  # the same signature, which functools.wraps tells


@contextmanager
def settings_kept(network: nn.Module | Body) -> Iterator[None]:
    """Restore every layer's mode (train or eval) and every body's settings after a block."""
    modes = [(module, module.training) for module in network.modules()]
    bodies = [module for module in network.modules() if isinstance(vars(module).get("choices"), Choices)]
    settings = [(body, {name: getattr(body, name) for name in SETTINGS}) for body in bodies]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for body, values in settings:
            for name, value in values.items():
                setattr(body, name, value)
