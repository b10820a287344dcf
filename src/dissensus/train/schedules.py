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
    starts = [checks.number("at", epoch, 0) for epoch in checks.listed("at", at)]
    return lambda epoch, epochs: factor ** sum(((epoch >= e).to(epoch.dtype) for e in starts), torch.zeros_like(epoch))  # noqa: ARG005


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


def factors(schedule: Schedule, epoch: Float[Tensor, " S"], epochs: float) -> Float[Tensor, " S"]:
    """The factors of a schedule at some epochs, which must be finite and not negative.

    >>> factors(lambda epoch, epochs: 1 - epoch, torch.tensor([0.0, 0.5, 2.0]), 3)
    Traceback (most recent call last):
    ValueError: `schedule` must give finite factors of at least 0; got -1 at epoch 2.
    """
    values = schedule(epoch, epochs)
    if not isinstance(values, Tensor) or values.shape != epoch.shape:
        got = checks.shape_text(values.shape) if isinstance(values, Tensor) else type(values).__name__
        fix = "It is called with a tensor of epochs: torch.ones_like(epoch) is constant."
        checks.refuse("schedule", f"give one factor per step, a tensor {checks.shape_text(epoch.shape)}", got, fix)
    wrong = ~(values.isfinite() & (values >= 0))
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        got = f"{float(values[first]):g} at epoch {float(epoch[first]):g}"
        checks.refuse("schedule", "give finite factors of at least 0", got)
    return values


_MOST_CHECKED = 2**17
"""Steps whose factors are checked before training; those of later steps are checked epoch by epoch."""


def check(schedule: Schedule, steps_per_epoch: int, epochs: int) -> None:
    """Refuse a schedule that gives a factor that is negative or not finite, before anything is trained."""
    steps = min(epochs * steps_per_epoch, _MOST_CHECKED)
    factors(schedule, torch.arange(steps, dtype=torch.float64) / steps_per_epoch, float(epochs))


NAMED: dict[str, Callable[[], Schedule]] = {"constant": constant, "cosine": cosine}


def resolved(schedule: str | Schedule) -> Schedule:
    """The schedule of a name; a function is returned unchanged."""
    if callable(schedule):
        return schedule
    checks.one_of("schedule", schedule, NAMED)
    return NAMED[schedule]()
