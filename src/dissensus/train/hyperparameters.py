"""Hyperparameters that differ between members, which are still trained as one stacked computation."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dissensus import checks
from dissensus.ensemble import Ensemble
from dissensus.execution import StackedMembers
from dissensus.randomness import Use, derived_seed
from dissensus.train.optim import column


def drawn_hyperparameters(members: int, seed: int = 0, **ranges: tuple[float, float]) -> dict[str, list[float]]:
    """Draw one value per member for every named hyperparameter, between two bounds.

    Values are log-uniform where the lower bound is above zero, as for learning rates; otherwise uniform. A member's
    values depend only on the seed, the member and the name. Pass ``lr``, ``weight_decay``, ``momentum`` to
    `dissensus.fit`, label smoothing to `dissensus.objectives.independent` and an initial scale to `scale_weights`; make
    one augmentation per member from strengths.

    >>> values = drawn_hyperparameters(3, lr=(1e-4, 1e-2), smoothing=(0.0, 0.2))
    >>> all(1e-4 <= value <= 1e-2 for value in values["lr"]), len(values["smoothing"])
    (True, 3)
    """
    checks.count("members", members)
    values: dict[str, list[float]] = {}
    for name, (low, high) in ranges.items():
        if not 0 <= low <= high or not math.isfinite(high):
            checks.refuse(name, "be a range (low, high) of numbers from 0 on", (low, high))
        draws = [
            np.random.default_rng(derived_seed(seed, Use.HYPERPARAMETERS, name, i)).random() for i in range(members)
        ]
        if low > 0:
            values[name] = [float(low * (high / low) ** draw) for draw in draws]
        else:
            values[name] = [float(low + (high - low) * draw) for draw in draws]
    return values


def scale_weights(ensemble: Ensemble, scales: float | Sequence[float]) -> None:
    """Multiply each member's weights of two axes or more (not its biases or norms) by a scale, before training.

    >>> import dissensus as ds
    >>> ens = ds.Ensemble(lambda: torch.nn.Linear(2, 1), members=2)
    >>> before = ens(torch.ones(1, 2)) - ens(torch.zeros(1, 2))
    >>> scale_weights(ens, [1.0, 3.0])
    >>> grown = (ens(torch.ones(1, 2)) - ens(torch.zeros(1, 2))) / before
    >>> tuple(round(number, 3) for number in grown.flatten().tolist())
    (1.0, 3.0)
    """
    if not isinstance(ensemble.body, StackedMembers):
        checks.refuse("ensemble", "have members of one architecture", "several")
    factors = column("scales", scales, ensemble.members, next(ensemble.parameters()))
    with torch.no_grad():
        for weight in ensemble.body.trainable().values():
            if weight.ndim > 2:
                weight.mul_(factors.view(-1, *[1] * (weight.ndim - 1)).to(weight.dtype))


def low_confidence(log_probs: Float[Tensor, "N C"], below: float = 0.2) -> Bool[Tensor, " N"]:
    """Training examples of which a first network is not certain, for disagreement in two stages.

    (LDR paper, appendix A.9.) The confidence is that of the class that the network names. Fit the others, and disagree
    on these::

        hard = low_confidence(first_network(x).log_softmax(-1))
        fit(ensemble, (x[~hard], y[~hard]), partial(objectives.a2d, strength=5.0), unlabelled=x[hard], ...)

    >>> low_confidence(torch.tensor([[0.9, 0.1], [0.55, 0.45]]).log(), below=0.6)
    tensor([False,  True])
    """
    if log_probs.ndim != 2:
        checks.refuse("log_probs", "have shape [N, C]", list(log_probs.shape))
    checks.number("below", below, 0, 1)
    return log_probs.max(-1).values < math.log(max(below, 1e-300))
