"""Learning-rate schedules: functions ``(epoch, epochs) -> factor``.

``epoch`` is a tensor of fractional epochs, one for every step: the number of the step divided by the number of steps
per epoch. Epochs count from 0 here, so the first step of the fourth epoch has epoch 3.0. ``epochs`` is the number of
epochs of the training. The learning rate of a step is the product of ``lr`` and the factor.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import checks

Schedule = Callable[[Float[Tensor, "*S"], float], Float[Tensor, "*S"]]


def constant() -> Schedule:
    """Keep the learning rate constant: the factor is 1."""
    return lambda epoch, epochs: torch.ones_like(epoch)  # noqa: ARG005


def step(at: Sequence[float], factor: float = 0.1) -> Schedule:
    """Multiply the learning rate by a factor at given epochs.

    Args:
        at: Epochs at which the learning rate is multiplied by ``factor``.
        factor: A number of at least 0.

    >>> step([2, 4], 0.5)(torch.tensor([0.0, 2.0, 3.9, 4.0]), 5)
    tensor([1.0000, 0.5000, 0.5000, 0.2500])
    """
    checks.number("factor", factor, 0)
    return lambda epoch, epochs: factor ** sum(((epoch >= e).to(epoch.dtype) for e in at), torch.zeros_like(epoch))  # noqa: ARG005


def cosine(floor: float = 0.0) -> Schedule:
    """Decrease the factor from 1 to ``floor`` along half a cosine wave over the whole training.

    Args:
        floor: The factor at the end of training, between 0 and 1.

    >>> cosine()(torch.tensor([0.0, 5.0, 10.0]), 10)
    tensor([1.0000, 0.5000, 0.0000])
    """
    checks.number("floor", floor, 0, 1)
    return lambda epoch, epochs: floor + (1 - floor) * (1 + torch.cos(torch.pi * (epoch / epochs).clamp(max=1))) / 2


def warmup(epochs: float, then: Schedule | None = None) -> Schedule:
    """Increase the factor linearly from 0 to 1, and multiply it with another schedule.

    Args:
        epochs: Length of the increase, in epochs.
        then: The other schedule, which begins with the training. The default is `constant`.

    >>> warmup(2)(torch.tensor([0.0, 1.0, 2.0, 3.0]), 4)
    tensor([0.0000, 0.5000, 1.0000, 1.0000])
    """
    checks.number("epochs", epochs, 0, open_low=True)
    after = then or constant()
    return lambda epoch, total: (epoch / epochs).clamp(max=1) * after(epoch, total)


NAMED: dict[str, Callable[[], Schedule]] = {"constant": constant, "cosine": cosine}


def resolved(schedule: str | Schedule) -> Schedule:
    """The schedule of a name; a function is returned unchanged."""
    if callable(schedule):
        return schedule
    checks.one_of("schedule", schedule, NAMED)
    return NAMED[schedule]()
