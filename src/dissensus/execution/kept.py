"""Settings of a network that a call may change and restores in any case."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from dissensus.execution.body import Body
from dissensus.execution.choice import Choices

SETTINGS = ("backend", "channels_last", "by_rule", "recompute", "compiling")


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
