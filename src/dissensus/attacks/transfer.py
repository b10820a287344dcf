"""Transfer: what breaks one member, does it break the others, and the ensemble?"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.case import Adversarial, Box
from dissensus.attacks.gradient import perturbed
from dissensus.attacks.norms import NormName
from dissensus.attacks.victim import Model, PoolName, Victim, device_of, evaluating

ATTACKS = ("fgsm", "bim", "pgd", "mim")


class Transfer(NamedTuple):
    """Rows: what examples were crafted on; columns: what they were tried on. Members first, the ensemble last.

    ``fooled``: of the examples that the tried one had right, the share that it now has wrong; with targets, of those
    that it did not take for the target, the share that it now does. NaN where there were none. ``accuracy``: the
    share of all examples that the tried one still has right, as in figure 3 of the ADP paper for untargeted attacks.
    """

    fooled: Float[Tensor, "K K"]
    accuracy: Float[Tensor, "K K"]


def transfer_matrix(
    model: Model,
    x: Float[Tensor, "B *S"],
    y: Integer[Tensor, " B"],
    *,
    attack: Literal["fgsm", "bim", "pgd", "mim"] | Callable[..., Adversarial] = "pgd",
    epsilon: float = 0.05,
    steps: int = 10,
    step_size: float | None = None,
    norm: NormName = "linf",
    target: Integer[Tensor, " B"] | None = None,
    batch_size: int = 256,
    seed: int = 0,
    box: Box = (0.0, 1.0),
) -> Transfer:
    """Craft on each member and on the ensemble, try on each member and the ensemble: ``[M + 1, M + 1]``.

    What transfers is the point where all steps lead (see `perturbed`), whether or not it breaks what it was crafted
    on: one that stops at the first success lies just across a border that other members draw elsewhere. Figure 3 of the
    ADP paper is ``epsilon=0.05, steps=10``, by ``"pgd"`` and ``"mim"``; its steps are ``step_size=epsilon / 10``.

    Args:
        model: An ensemble, or a list of classifiers.
        x: Clean inputs, inside the box.
        y: Labels.
        attack: A name, or any ``(model, x, y, pool=..., target=...) -> Adversarial``, such as a ``functools.partial``
            of one with its settings; its failures are tried as the clean inputs that they are.
        epsilon: ε, and ``steps``, ``step_size``, ``norm``, ``seed``: of a named attack; see `pgd`.
        target: Classes to be reached; without, any wrong class will do.
        batch_size: Examples at once.
        box: The least and the largest value of valid inputs.
    """
    checks.count("batch_size", batch_size)
    if isinstance(attack, str):
        checks.one_of("attack", attack, ATTACKS)

    def crafted(place: slice, pool: PoolName) -> Tensor:
        aim = None if target is None else target[place]
        if not isinstance(attack, str):
            return attack(model, x[place], y[place], pool=pool, target=aim).inputs
        one = attack == "fgsm"
        return perturbed(
            model,
            x[place],
            y[place],
            epsilon=epsilon,
            steps=1 if one else steps,
            step_size=None if one else step_size,
            norm=norm,
            random_start=attack == "pgd",
            decay=1.0 if attack == "mim" else None,
            pool=pool,
            target=aim,
            seed=seed,
            box=box,
        )

    places = [slice(start, start + batch_size) for start in range(0, len(x), batch_size)]
    before = torch.cat([_predicted(model, x[place]) for place in places], 1)
    pools: list[PoolName] = [*range(len(before) - 1), "probability"]
    after = torch.stack([torch.cat([_predicted(model, crafted(p, pool)) for p in places], 1) for pool in pools])
    labels = y.to(after.device)
    right, still = before == labels, after == labels
    if target is None:
        turned, candidates = right & ~still, right
    else:
        aims = target.to(after.device)
        turned, candidates = (after == aims) & (before != aims), before != aims
    return Transfer(turned.sum(-1).double() / candidates.sum(-1), still.double().mean(-1))


@torch.no_grad()
def _predicted(model: Model, x: Tensor) -> Integer[Tensor, "K B"]:
    """Predictions of members, and of the ensemble, on the host."""
    victim = Victim(model, "probability")
    with evaluating(model):
        outputs = victim.outputs(x.to(device_of(model, x.device)))
    return torch.cat([outputs.argmax(-1), victim.verdict(outputs).argmax(-1).unsqueeze(0)]).cpu()
