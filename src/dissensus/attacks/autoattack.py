"""AutoAttack itself, by the package that its attacks are known from: for those who must report the original."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.case import Adversarial
from dissensus.attacks.norms import Ball, NormName
from dissensus.attacks.trials import Pooled, tried
from dissensus.attacks.victim import Model, PoolName, device_of
from dissensus.randomness import seeded

NAMES = {"linf": "Linf", "l2": "L2"}
"""What the package calls norms."""
TARGETS = 9
"""Classes that its targeted attacks go for; fewer where there are fewer."""


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
    """AutoAttack of the package pyautoattack, on pooled log-probabilities, with every result tried again here.

    Args:
        model: And ``x``, ``y``, ``norm``, ``pool``: see `fgsm`. Inputs are in [0, 1], of four classes or more.
        epsilon: ε.
        version: ``"standard"``, ``"plus"`` (more restarts and attacks), or ``"rand"`` for models that draw at random.
        batch_size: Examples at once.
        seed: Of its starts. Unlike the attacks here, its results depend on the batch.
    """
    checks.one_of("norm", norm, NAMES)
    checks.one_of("version", version, ("standard", "plus", "rand"))
    try:
        from pyautoattack import AutoAttack  # pyright: ignore[reportMissingImports]  # for those who ask for it
    except ImportError as reason:
        raise ImportError("AutoAttack comes from pyautoattack: pip install pyautoattack") from reason

    def craft(_model: Model, rows: Tensor, labels: Tensor) -> Tensor:
        pooled = Pooled(model, pool)
        with torch.no_grad():
            classes = pooled(rows[:1]).shape[-1]
        if classes < 4:
            checks.refuse("model", "tell four classes or more for this attack", classes, "Use `apgd` and `square`.")
        device = device_of(model, rows.device)
        told: dict[str, Any] = {"eps": epsilon, "norm": NAMES[norm], "version": version, "device": device, "seed": seed}
        with seeded(seed), _host_generators_put_back(), torch.enable_grad():  # it seeds global generators
            adversary: Any = AutoAttack(pooled, **told)
            for attack in (adversary.apgd_targeted, adversary.fab):
                attack.n_target_classes = min(TARGETS, classes - 1)
            found = adversary.run_standard_evaluation(rows, labels, batch_size=batch_size)
        inputs = found[0] if isinstance(found, tuple) else found  # some versions give predictions as well
        ball = Ball.checked(norm, epsilon, (0.0, 1.0), rows)
        return ball.projected(rows, inputs.detach())  # its points lie beyond ε by a rounding

    return tried(model, x, y, craft=craft, epsilon=epsilon, norm=norm, pool=pool)


@contextmanager
def _host_generators_put_back() -> Iterator[None]:
    """Leave the global generators of Python and NumPy as they were."""
    before = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
