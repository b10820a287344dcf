"""Learning-rate schedules: ``(epoch, epochs) -> factor``, on whole tensors of fractional epochs at once.

A step's epoch is its number divided by the steps per epoch, so the first step of epoch 3 has epoch 3.0.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import checks

Schedule = Callable[[Float[Tensor, "*S"], float], Float[Tensor, "*S"]]


def constant() -> Schedule:
    """Always 1."""
    return lambda epoch, epochs: torch.ones_like(epoch)  # noqa: ARG005


def step(at: Sequence[float], factor: float = 0.1) -> Schedule:
    """Multiply by ``factor`` from each epoch in ``at`` on.

    >>> step([2, 4], 0.5)(torch.tensor([0.0, 2.0, 3.9, 4.0]), 5)
    tensor([1.0000, 0.5000, 0.5000, 0.2500])
    """
    checks.number("factor", factor, 0)
    starts = [checks.number("at", epoch, 0) for epoch in checks.listed("at", at)]
    return lambda epoch, epochs: factor ** sum(((epoch >= e).to(epoch.dtype) for e in starts), torch.zeros_like(epoch))  # noqa: ARG005


def cosine(floor: float = 0.0) -> Schedule:
    """Half a cosine from 1 to ``floor`` over all epochs.

    >>> cosine()(torch.tensor([0.0, 5.0, 10.0]), 10)
    tensor([1.0000, 0.5000, 0.0000])
    """
    checks.number("floor", floor, 0, 1)
    return lambda epoch, epochs: floor + (1 - floor) * (1 + torch.cos(torch.pi * (epoch / epochs).clamp(max=1))) / 2


def warmup(epochs: float, then: Schedule | None = None) -> Schedule:
    """Rise linearly from 0 over the first epochs, times another schedule.

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
    """A schedule from a name or as it is."""
    if callable(schedule):
        return schedule
    checks.one_of("schedule", schedule, NAMED)
    return NAMED[schedule]()
