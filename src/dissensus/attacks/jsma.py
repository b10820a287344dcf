"""JSMA, the Jacobian-based saliency map attack (Papernot et al., 2016): few features change, by a fixed amount."""

import functools
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from dissensus import checks, losses
from dissensus.attacks.array_inputs import arrays_taken
from dissensus.attacks.blocks import Steps
from dissensus.attacks.losses import one_hot_mask
from dissensus.attacks.norms import LARGEST, l0_lengths, linf_lengths
from dissensus.attacks.problem import Adversarial, AttackProblem, Box, Examples, attack_problem
from dissensus.attacks.target_model import Model, PoolName

Inputs = Float[Tensor, "B *S"]
Labels = Integer[Tensor, " B"]
Flat = Float[Tensor, "B D"]

PAIRS_AT_ONCE = 1 << 22
"""Number of feature pairs that are compared in one operation."""


class Preset(NamedTuple):
    """A paper's definition of the attack."""

    pairs: bool
    """Whether two features change at a time, or one."""
    decrease: bool
    """Whether features may also decrease."""
    step_size: float
    distortion: float


PRESETS: dict[str, Preset] = {
    "papernot": Preset(pairs=True, decrease=False, step_size=1.0, distortion=0.145),
    "adp": Preset(pairs=False, decrease=True, step_size=0.1, distortion=0.1),
}
"""``"papernot"``: Papernot et al., 2016, with their bound of 14.5 %. ``"adp"``: the ADP paper's, which also uses a
distortion of 0.05 on CIFAR-10, and on MNIST steps of 0.2 with 0.3 and 0.6."""


@arrays_taken
def jsma(
    model: Model,
    x: Inputs,
    y: Labels,
    *,
    preset: Literal["papernot", "adp"] = "papernot",
    step_size: float | None = None,
    distortion: float | None = None,
    pool: PoolName = "probability",
    target: Labels | None = None,
    box: Box = (0.0, 1.0),
) -> Adversarial:
    """Change, one after the other, the features or pairs of features with the largest saliency for a class.

    With a = ∂z_t/∂x_i and b = Σ_{j≠t} ∂z_j/∂x_i, summed over a pair's features, the saliency of an increase is −a·b
    where a > 0 > b, otherwise zero; the saliency of a decrease is the same where a < 0 < b. z are the attacked scores:
    raw logits of a plain classifier. A feature changes at most once, and stays in the box. An example stops when it
    is adversarial, when no feature has any saliency, or when as many features have changed as ``distortion`` allows.

    A step takes two backward passes for any number of classes: one for the target, one for the sum of the others.

    Args:
        model: And ``x``, ``y``, ``pool``, ``box``: see `fgsm`.
        preset: ``"papernot"``: pairs of features, which increase. ``"adp"``: single features, which increase or
            decrease.
        step_size: θ (ADP paper: ε), the change of a feature; by default the preset's.
        distortion: Υ (ADP paper: γ), the share of features that may change; by default the preset's.
        target: Target classes. Without them, the attack aims at the likeliest wrong class and accepts any.

    ``distance`` is the number of changed features.
    """
    checks.one_of("preset", preset, PRESETS)
    settings = PRESETS[preset]
    if step_size is not None:
        settings = settings._replace(step_size=checks.number("step_size", step_size, 0.0, LARGEST, open_low=True))
    if distortion is not None:
        settings = settings._replace(distortion=checks.number("distortion", distortion, 0.0, 1.0))
    with attack_problem(model, x, y, target=target, pool=pool, box=box) as problem:
        allowed = int(settings.distortion * x[0].numel() + 1e-9)
        steps = _steps(problem, settings, x.shape[1:], allowed // (2 if settings.pairs else 1))
        run = functools.partial(_run, problem=problem, steps=steps)
        return problem.solve([run], l0_lengths, allowed)


class JSMAState(NamedTuple):
    """State of a run: flattened inputs, and which features have not changed yet."""

    x: Flat
    y: Labels
    target: Labels
    point: Flat
    unchanged: Bool[Tensor, "B D"]
    done: Bool[Tensor, " B"]


def _run(rows: Examples, problem: AttackProblem, steps: Steps) -> Tensor:
    flat = rows.x.flatten(1)
    target = rows.target
    if not problem.targeted:
        target = problem.clean_scores[rows.position].scatter(1, rows.y.unsqueeze(1), -torch.inf).argmax(1)
    start = JSMAState(
        flat,
        rows.y,
        target,
        flat,
        torch.ones_like(flat, dtype=torch.bool),
        torch.zeros(len(flat), dtype=torch.bool, device=flat.device),
    )
    return steps.carried_out(start).point.view(rows.x.shape)


def _steps(problem: AttackProblem, settings: Preset, shape: torch.Size, count: int) -> Steps:
    def step(state: JSMAState, _kind: None, _numbers: Tensor) -> JSMAState:
        target_gradient, other_gradient, is_adversarial = _gradients(problem, state, shape)
        best = torch.zeros_like(target_gradient[:, 0])
        selected = torch.zeros_like(state.unchanged)
        change = torch.zeros_like(state.point)
        for sign in (1.0, -1.0) if settings.decrease else (1.0,):
            inside = (state.point < problem.high) if sign > 0 else (state.point > problem.low)
            saliency, features = largest_saliency(
                sign * target_gradient, -sign * other_gradient, state.unchanged & inside, settings.pairs
            )
            better = (saliency > best).unsqueeze(1)
            best = torch.maximum(best, saliency)
            selected = torch.where(better, features, selected)
            change = torch.where(better, sign * settings.step_size, change)
        selected = selected & ~is_adversarial.unsqueeze(1)
        moved = (state.point + change).clamp(problem.low, problem.high)
        point = torch.where(selected, moved, state.point)
        return state._replace(point=point, unchanged=state.unchanged & ~selected, done=is_adversarial | (best <= 0))

    return Steps(step, [None] * count, capture=problem.capture)


def _gradients(problem: AttackProblem, state: JSMAState, shape: torch.Size) -> tuple[Flat, Flat, Bool[Tensor, " B"]]:
    """Gradients of the target's score and of the sum of all others, and whether the point is adversarial.

    Each example's gradients are scaled to a largest absolute value of one. This changes no choice and prevents
    underflow of products.
    """
    with torch.enable_grad():
        point = state.point.view(-1, *shape).detach().requires_grad_()
        outputs = problem.model.outputs(point)
        scores = problem.model.attacked_scores(outputs)
        target_score = losses.at_label(scores, state.target).sum(0)
        gradients = problem.gradients(point, target_score, scores.sum((0, 2)) - target_score)
    pooled = problem.model.pooled_scores(outputs.detach())
    tiny = torch.finfo(point.dtype).tiny
    target_gradient, other_gradient = (g.flatten(1) / linf_lengths(g).clamp_min(tiny).unsqueeze(1) for g in gradients)
    return target_gradient, other_gradient, problem.is_adversarial(pooled, state)


def largest_saliency(
    gain: Flat, loss: Flat, free: Bool[Tensor, "B D"], pairs: bool
) -> tuple[Float[Tensor, " B"], Bool[Tensor, "B D"]]:
    """Largest product of two positive sums over free features or pairs of them, and a mask of these features."""
    if not pairs:
        value, first = torch.where(free & (gain > 0) & (loss > 0), gain * loss, 0.0).max(1)
        return value, one_hot_mask(first, gain.shape[1])
    batch, width = gain.shape
    best = torch.zeros_like(gain[:, 0])
    first = second = torch.zeros(batch, dtype=torch.int64, device=gain.device)
    index = torch.arange(width, device=gain.device)
    size = max(1, PAIRS_AT_ONCE // gain.numel())
    for start in range(0, width, size):
        part, rest = slice(start, start + size), slice(start, None)  # a pair's second feature comes after its first
        pair_gains = gain[:, part, None] + gain[:, None, rest]
        pair_losses = loss[:, part, None] + loss[:, None, rest]
        ordered = index[part, None] < index[rest]
        valid = free[:, part, None] & free[:, None, rest] & ordered & (pair_gains > 0) & (pair_losses > 0)
        value, place = torch.where(valid, pair_gains * pair_losses, 0.0).flatten(1).max(1)
        width_left = width - start
        better = value > best
        best = torch.where(better, value, best)
        first = torch.where(better, start + place // width_left, first)
        second = torch.where(better, start + place % width_left, second)
    return best, one_hot_mask(first, width) | one_hot_mask(second, width)
