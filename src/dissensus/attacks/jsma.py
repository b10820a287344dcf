"""The Jacobian-based saliency map attack (JSMA): few features, each changed by a given amount."""

import functools
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from dissensus import checks, losses
from dissensus.attacks.blocks import Steps
from dissensus.attacks.case import Adversarial, Box, Case, Examples, opened
from dissensus.attacks.losses import marked
from dissensus.attacks.norms import l0_lengths, linf_lengths
from dissensus.attacks.victim import Model, PoolName

Inputs = Float[Tensor, "B *S"]
Labels = Integer[Tensor, " B"]
Flat = Float[Tensor, "B D"]

AT_ONCE = 1 << 22
"""How many pairs of features are looked at in one piece."""


class Preset(NamedTuple):
    """A paper's definition."""

    pairs: bool
    """Two features at a time, or one."""
    decrease: bool
    """Whether features may also go down."""
    step_size: float
    distortion: float


PRESETS: dict[str, Preset] = {
    "papernot": Preset(pairs=True, decrease=False, step_size=1.0, distortion=0.145),
    "adp": Preset(pairs=False, decrease=True, step_size=0.1, distortion=0.1),
}
"""``"papernot"``: Papernot et al., 2016, with their bound of 14.5 %. ``"adp"``: the ADP paper's, which also uses a
distortion of 0.05 on CIFAR-10, and on MNIST steps of 0.2 with 0.3 and 0.6."""


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
    """JSMA: again and again, change the feature, or the pair, that does most for a class and against all others.

    With a = ∂z_t/∂x_i and b = Σ_{j≠t} ∂z_j/∂x_i, summed over a pair's features, the saliency of going up is −a·b where
    a > 0 > b, else zero; of going down, the same where a < 0 < b. z are the scores that are attacked: raw logits of a
    plain classifier. A feature is changed once at most, and not beyond the box. An example is left when it is broken,
    when no feature has any saliency, or when as many are changed as ``distortion`` allows.

    Two backward passes a step, one for the target and one for the sum of the others, whatever the number of classes.

    Args:
        model: And ``x``, ``y``, ``pool``, ``box``: see `fgsm`.
        preset: ``"papernot"``: pairs of features, which go up. ``"adp"``: one feature at a time, up or down.
        step_size: θ (ADP paper: ε), the change of a feature; by default the preset's.
        distortion: Υ (ADP paper: γ), the share of features that may change; by default the preset's.
        target: Classes to be reached. Without, the attack heads for the likeliest wrong class, and takes any.

    ``distance`` is the number of features that are changed.
    """
    checks.one_of("preset", preset, PRESETS)
    plan = PRESETS[preset]
    plan = plan._replace(
        step_size=plan.step_size if step_size is None else checks.number("step_size", step_size, 0.0, open_low=True),
        distortion=plan.distortion if distortion is None else checks.number("distortion", distortion, 0.0, 1.0),
    )
    with opened(model, x, y, target=target, pool=pool, box=box) as case:
        features = x[0].numel()
        allowed = int(plan.distortion * features + 1e-9)
        steps = _steps(case, plan, x.shape[1:], allowed // (2 if plan.pairs else 1))
        run = functools.partial(_run, case=case, steps=steps)
        return case.attempted([run], l0_lengths, allowed)


class Search(NamedTuple):
    """An attack under way: inputs laid flat, and the features that have not been changed."""

    x: Flat
    y: Labels
    target: Labels
    at: Flat
    free: Bool[Tensor, "B D"]
    done: Bool[Tensor, " B"]


def _run(rows: Examples, case: Case, steps: Steps) -> Tensor:
    flat = rows.x.flatten(1)
    target = rows.target
    if not case.targeted:
        target = case.clean[rows.place].scatter(1, rows.y.unsqueeze(1), -torch.inf).argmax(1)
    start = Search(
        flat,
        rows.y,
        target,
        flat,
        torch.ones_like(flat, dtype=torch.bool),
        torch.zeros(len(flat), dtype=torch.bool, device=flat.device),
    )
    return steps.carried_out(start).at.view(rows.x.shape)


def _steps(case: Case, plan: Preset, shape: torch.Size, count: int) -> Steps:
    def step(state: Search, _kind: None, _numbers: Tensor) -> Search:
        helps, harms, broken = _saliencies(case, state, shape)
        best = torch.zeros_like(helps[:, 0])
        chosen = torch.zeros_like(state.free)
        change = torch.zeros_like(state.at)
        for sign in (1.0, -1.0) if plan.decrease else (1.0,):
            room = state.free & ((state.at < case.high) if sign > 0 else (state.at > case.low))
            value, features = _strongest(sign * helps, -sign * harms, room, plan.pairs)
            better = (value > best).unsqueeze(1)
            best = torch.maximum(best, value)
            chosen = torch.where(better, features, chosen)
            change = torch.where(better, sign * plan.step_size, change)
        chosen = chosen & ~broken.unsqueeze(1)
        moved = (state.at + change).clamp(case.low, case.high)
        at = torch.where(chosen, moved, state.at)
        return state._replace(at=at, free=state.free & ~chosen, done=broken | (best <= 0))

    return Steps(step, [None] * count, capture=case.capture)


def _saliencies(case: Case, state: Search, shape: torch.Size) -> tuple[Flat, Flat, Bool[Tensor, " B"]]:
    """Gradients of the target's score and of the sum of all others, and whether the point is adversarial.

    Each example's gradients are scaled to a largest value of one, which changes no choice, and keeps products from
    vanishing.
    """
    with torch.enable_grad():
        at = state.at.view(-1, *shape).detach().requires_grad_()
        outputs = case.victim.outputs(at)
        scores = case.victim.scores(outputs)
        own = losses.at_label(scores, state.target).sum(0)
        helps, harms = case.gradients(at, own, scores.sum((0, 2)) - own)
    verdict = case.victim.verdict(outputs.detach())
    tiny = torch.finfo(at.dtype).tiny
    helps, harms = (g.flatten(1) / linf_lengths(g).clamp_min(tiny).unsqueeze(1) for g in (helps, harms))
    return helps, harms, case.reached(verdict, state)


def _strongest(
    gain: Flat, loss: Flat, room: Bool[Tensor, "B D"], pairs: bool
) -> tuple[Float[Tensor, " B"], Bool[Tensor, "B D"]]:
    """The largest product of two positive sums, over features or pairs of them, and which features those are."""
    if not pairs:
        value, first = torch.where(room & (gain > 0) & (loss > 0), gain * loss, 0.0).max(1)
        return value, marked(first, gain.shape[1])
    batch, width = gain.shape
    best = torch.zeros_like(gain[:, 0])
    first = second = torch.zeros(batch, dtype=torch.int64, device=gain.device)
    place = torch.arange(width, device=gain.device)
    size = max(1, AT_ONCE // gain.numel())
    for start in range(0, width, size):
        part, rest = slice(start, start + size), slice(start, None)  # a pair's second feature comes after its first
        gains = gain[:, part, None] + gain[:, None, rest]
        harms = loss[:, part, None] + loss[:, None, rest]
        fit = room[:, part, None] & room[:, None, rest] & (place[part, None] < place[rest]) & (gains > 0) & (harms > 0)
        value, index = torch.where(fit, gains * harms, 0.0).flatten(1).max(1)
        left = width - start
        better = value > best
        best = torch.where(better, value, best)
        first = torch.where(better, start + index // left, first)
        second = torch.where(better, start + index % left, second)
    return best, marked(first, width) | marked(second, width)
