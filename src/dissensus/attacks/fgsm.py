"""FGSM, the fast gradient sign method: one step to the edge of the ball (Goodfellow et al., 2015)."""

from jaxtyping import Float, Integer
from torch import Tensor

from dissensus.attacks.array_inputs import arrays_taken
from dissensus.attacks.gradient import GradientSteps, gradient_attack
from dissensus.attacks.norms import NormName
from dissensus.attacks.problem import Adversarial, Box
from dissensus.attacks.target_model import Model, PoolName


@arrays_taken
def fgsm(
    model: Model,
    x: Float[Tensor, "B *S"],
    y: Integer[Tensor, " B"],
    *,
    epsilon: float,
    norm: NormName = "linf",
    pool: PoolName = "probability",
    target: Integer[Tensor, " B"] | None = None,
    box: Box = (0.0, 1.0),
) -> Adversarial:
    """One step to the edge of the ball: x + ε sign ∇ loss; in L2, x + ε ∇ loss / ‖∇ loss‖.

    Args:
        model: An ensemble ``x -> [M, B, C]``, a plain classifier ``x -> [B, C]``, or a list of those. A module is put
            in evaluation mode during the attack and is left as it was: parameters keep their ``grad``. Any other
            callable is called as it is. On a GPU, passes are recorded and replayed, so side effects of a model in
            Python, such as counting its calls, do not happen at every step.
        x: Clean inputs, float32 or float64, inside the box. They are moved to the model's device; results come back
            on the device of ``x``.
        y: Labels.
        epsilon: ε, the largest change allowed: of each value in L∞, of the whole input in L2.
        norm: ``"linf"`` or ``"l2"``.
        pool: What of an ensemble is attacked: ``"probability"``, the log of the mean probability; ``"score"``, the mean
            logits; ``"members"``, the sum of all members' losses (success is still judged by the mean probability); or
            the number of a member.
        target: Target classes. Without them, any class but the label is a success.
        box: Smallest and largest value of valid inputs.

    >>> import torch
    >>> model = torch.nn.Linear(2, 2).requires_grad_(False)
    >>> _ = model.weight.copy_(torch.eye(2)), model.bias.zero_()
    >>> result = fgsm(model, torch.tensor([[0.5, 0.25]]), torch.tensor([0]), epsilon=0.25)
    >>> result.inputs, result.success, result.distance
    (tensor([[0.2500, 0.5000]]), tensor([True]), tensor([0.2500]))
    """
    settings = GradientSteps(norm, epsilon, steps=1, step_size=epsilon)
    return gradient_attack(model, x, y, settings, pool=pool, target=target, box=box)
