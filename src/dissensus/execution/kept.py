"""Settings that a call may change while it runs, and puts back in any case."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from torch import nn

from dissensus.execution.mixed import MixedMembers
from dissensus.execution.stacked import StackedMembers

SETTINGS = ("backend", "replayed", "channels_last", "by_rule")


Function = TypeVar("Function", bound=Callable[..., Any])


def leaves_settings(function: Function) -> Function:
    """Make a function whose first argument is a network keep that network's settings (see `settings_kept`)."""

    first = next(iter(inspect.signature(function).parameters))

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        network = args[0] if args else kwargs.get(first)
        with settings_kept(network) if isinstance(network, nn.Module) else nullcontext():
            return function(*args, **kwargs)

    return wrapped  # pyright: ignore[reportReturnType]  # the same signature, which functools.wraps tells


@contextmanager
def settings_kept(network: nn.Module) -> Iterator[None]:
    """A block after which every layer is in its mode of before (train or eval), and members run as they did before."""
    modes = [(module, module.training) for module in network.modules()]
    bodies = [module for module in network.modules() if isinstance(module, StackedMembers | MixedMembers)]
    settings = [(body, {name: getattr(body, name) for name in SETTINGS}) for body in bodies]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for body, values in settings:
            for name, value in values.items():
                setattr(body, name, value)
