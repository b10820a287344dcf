"""Transfer of adversarial examples between members, and from members to the ensemble."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.array_inputs import arrays_taken
from dissensus.attacks.gradient import perturbed
from dissensus.attacks.norms import NormName
from dissensus.attacks.problem import Attack, Box
from dissensus.attacks.target_model import Model, PoolName, TargetModel, device_of, evaluation_mode

NAMED_ATTACKS = ("fgsm", "bim", "pgd", "mim")
"""Attacks whose last point is used, whether or not it is adversarial (see `perturbed`)."""


class Transfer(NamedTuple):
    """Rows: the model that examples were crafted on; columns: the model they were tested on. The ensemble is last.

    ``fooled``: of the examples that the tested model classified correctly, the share that it now misclassifies; with
    targets, of those that it did not assign to the target, the share that it now does. NaN where there were none.
    ``accuracy``: the share of all examples that the tested model still classifies correctly, as in figure 3 of the ADP
    paper for untargeted attacks.
    """

    fooled: Float[Tensor, "K K"]
    accuracy: Float[Tensor, "K K"]


@arrays_taken
def transfer_matrix(
    model: Model,
    x: Float[Tensor, "B *S"],
    y: Integer[Tensor, " B"],
    *,
    attack: Literal["fgsm", "bim", "pgd", "mim"] | Attack = "pgd",
    epsilon: float = 0.05,
    steps: int = 10,
    step_size: float | None = None,
    norm: NormName = "linf",
    target: Integer[Tensor, " B"] | None = None,
    batch_size: int = 256,
    seed: int = 0,
    box: Box = (0.0, 1.0),
) -> Transfer:
    """Craft on each member and on the ensemble, test on each member and on the ensemble: ``[M + 1, M + 1]``.

    A named attack transfers its point after all steps (see `perturbed`), whether or not it is adversarial for the model
    it was crafted on: an attack that stops at its first success ends just across a decision boundary that lies
    elsewhere for other members. Figure 3 of the ADP paper is ``epsilon=0.05, steps=10``, by ``"pgd"`` and ``"mim"``;
    its steps are ``step_size=epsilon / 10``.

    Args:
        model: An ensemble, or a list of classifiers.
        x: Clean inputs, inside the box.
        y: Labels.
        attack: A name, or any ``(model, x, y, pool=..., target=...) -> Adversarial``, such as a ``functools.partial``
            of an attack with its settings. Where it fails, its clean input is tested.
        epsilon: ε, and ``steps``, ``step_size``, ``norm``, ``seed``: of a named attack; see `pgd`.
        target: Target classes. Without them, any wrong class is a success.
        batch_size: Number of examples per batch.
        box: Smallest and largest value of valid inputs.
    """
    checks.count("batch_size", batch_size)
    if isinstance(attack, str):
        checks.one_of("attack", attack, NAMED_ATTACKS)

    def crafted(rows: slice, pool: PoolName) -> Tensor:
        targets = None if target is None else target[rows]
        if not isinstance(attack, str):
            return attack(model, x[rows], y[rows], pool=pool, target=targets).inputs
        single_step = attack == "fgsm"
        return perturbed(
            model,
            x[rows],
            y[rows],
            epsilon=epsilon,
            steps=1 if single_step else steps,
            step_size=None if single_step else step_size,
            norm=norm,
            random_start=attack == "pgd",
            decay=1.0 if attack == "mim" else None,
            pool=pool,
            target=targets,
            seed=seed,
            box=box,
        )

    batches = [slice(start, start + batch_size) for start in range(0, len(x), batch_size)]
    before = torch.cat([_predictions(model, x[rows]) for rows in batches], 1)
    pools: list[PoolName] = [*range(len(before) - 1), "probability"]
    after = torch.stack([torch.cat([_predictions(model, crafted(rows, p)) for rows in batches], 1) for p in pools])
    labels = y.to(after.device)
    right_before, right_after = before == labels, after == labels
    if target is None:
        fooled, candidates = right_before & ~right_after, right_before
    else:
        targets = target.to(after.device)
        fooled, candidates = (after == targets) & (before != targets), before != targets
    return Transfer(fooled.sum(-1).double() / candidates.sum(-1), right_after.double().mean(-1))


@torch.no_grad()
def _predictions(model: Model, x: Tensor) -> Integer[Tensor, "K B"]:
    """Predictions of members and, last, of the ensemble, on the host."""
    target_model = TargetModel(model, "probability")
    with evaluation_mode(model):
        outputs = target_model.outputs(x.to(device_of(model, x.device)))
    return torch.cat([outputs.argmax(-1), target_model.pooled_scores(outputs).argmax(-1).unsqueeze(0)]).cpu()
