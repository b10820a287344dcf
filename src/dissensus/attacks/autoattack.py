"""AutoAttack as published, run by the package pyautoattack: for those who must report the original."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.crafting import PooledModel, tried
from dissensus.attacks.norms import Ball, NormName
from dissensus.attacks.problem import Adversarial
from dissensus.attacks.target_model import Model, PoolName, device_of
from dissensus.randomness import seeded

NORM_NAMES = {"linf": "Linf", "l2": "L2"}
"""Norms by the names that pyautoattack uses."""
TARGETS = 9
"""Number of classes that its targeted attacks try; all other classes if there are fewer."""


def autoattack(
    model: Model,
    x: Float[Tensor, "B *S"],
    y: Integer[Tensor, " B"],
    *,
    epsilon: float,
    norm: NormName = "linf",
    version: Literal["standard", "plus", "rand"] = "standard",
    pool: PoolName = "probability",
    batch_size: int = 256,
    seed: int = 0,
) -> Adversarial:
    """AutoAttack of the package pyautoattack on pooled log-probabilities; every result is tested again here.

    Args:
        model: And ``x``, ``y``, ``norm``, ``pool``: see `fgsm`. Inputs are in [0, 1], with four classes or more.
        epsilon: ε.
        version: ``"standard"``, ``"plus"`` (more restarts and attacks), or ``"rand"`` for stochastic models.
        batch_size: Number of examples per batch.
        seed: Seed of its starts. Unlike those of the attacks here, its results depend on the batch.
    """
    checks.one_of("norm", norm, NORM_NAMES)
    checks.one_of("version", version, ("standard", "plus", "rand"))
    try:
        from pyautoattack import AutoAttack  # pyright: ignore[reportMissingImports]  # an optional package
    except ImportError as reason:
        raise ImportError("AutoAttack comes from pyautoattack: pip install pyautoattack") from reason

    def craft(_model: Model, rows: Tensor, labels: Tensor) -> Tensor:
        pooled = PooledModel(model, pool)
        with torch.no_grad():
            classes = pooled(rows[:1]).shape[-1]
        if classes < 4:
            checks.refuse("model", "have four classes or more for this attack", classes, "Use `apgd` and `square`.")
        settings: dict[str, Any] = {
            "eps": epsilon,
            "norm": NORM_NAMES[norm],
            "version": version,
            "device": device_of(model, rows.device),
            "seed": seed,
        }
        with seeded(seed), _host_generators_restored(), torch.enable_grad():  # it seeds global generators
            adversary: Any = AutoAttack(pooled, **settings)
            for attack in (adversary.apgd_targeted, adversary.fab):
                attack.n_target_classes = min(TARGETS, classes - 1)
            result = adversary.run_standard_evaluation(rows, labels, batch_size=batch_size)
        inputs = result[0] if isinstance(result, tuple) else result  # some versions return predictions as well
        ball = Ball.checked(norm, epsilon, (0.0, 1.0), rows)
        return ball.projected(rows, inputs.detach())  # its points exceed ε by a rounding error

    return tried(model, x, y, craft=craft, epsilon=epsilon, norm=norm, pool=pool)


@contextmanager
def _host_generators_restored() -> Iterator[None]:
    """Restore the global generators of Python and NumPy on exit."""
    before = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
