"""Diagnostics behind the flags: outputs and gradients on a few examples, and the effect of cheap attacks on them."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.apgd import apgd
from dissensus.attacks.fgsm import fgsm
from dissensus.attacks.losses import cross_entropy
from dissensus.attacks.norms import linf_lengths
from dissensus.attacks.pgd import pgd
from dissensus.attacks.problem import Attack, AttackProblem, attack_problem
from dissensus.attacks.random_noise import random_noise
from dissensus.attacks.square import square
from dissensus.attacks.suites import DiagnosticBudget, Terms, logit_loss, members_logits, transfers
from dissensus.attacks.target_model import Model, PoolName

PLAIN_STEPS = 10
"""Steps of the plain attack that others are compared with: PGD on cross-entropy, as in most evaluations."""
SINGLE_EXAMPLES = 8
"""Number of examples that are also evaluated one by one."""

Run = Callable[[str, Attack], Bool[Tensor, " n"]]
"""``(name, attack) -> `` which of the examples the model misclassifies after the attack."""


class ModelDiagnostics(NamedTuple):
    """Results of a few passes. Shares are of the examples that the model classifies correctly."""

    examples: int
    members: int
    classes: int
    right: int
    zero: float
    """Share of examples whose gradient is zero in every feature."""
    nonfinite: float
    """Share of examples whose gradient has NaN or infinities."""
    saturated: float
    """Share of examples whose cross-entropy is zero."""
    sums_to_one: bool
    """Whether outputs are nonnegative and sum to one."""
    between_passes: float
    """Largest difference of outputs between two passes over the same batch, relative to the largest output."""
    between_batches: float
    """The same between an example alone and in its batch."""


def model_diagnostics(
    model: Model, x: Float[Tensor, "n *S"], y: Integer[Tensor, " n"], pool: PoolName = "probability"
) -> ModelDiagnostics:
    """Outputs and gradients on clean inputs, with the model in the mode in which it is attacked."""
    with attack_problem(model, x, y, target=None, pool=pool, box=(0.0, 1.0)) as problem:
        inputs, model_outputs = problem.examples.x, problem.model.outputs
        outputs, repeated = model_outputs(inputs), model_outputs(inputs)
        # Each single example is passed twice: batch norm in training mode refuses a batch of one.
        alone = range(min(SINGLE_EXAMPLES, len(inputs)))
        single = torch.cat([model_outputs(inputs[[i, i]])[:, :1] for i in alone], 1)
        size = float(outputs.abs().max().clamp_min(torch.finfo(outputs.dtype).tiny))
        value, gradient = _loss_and_gradient(problem)
        right = (problem.clean_scores.argmax(-1) == problem.examples.y).nonzero().squeeze(1)
        finite = gradient.flatten(1).isfinite().all(1)
        zero = finite & (linf_lengths(gradient.nan_to_num()) == 0)
        return ModelDiagnostics(
            examples=len(x),
            members=outputs.shape[0],
            classes=problem.classes,
            right=len(right),
            zero=_share(zero[right]),
            nonfinite=_share(~finite[right]),
            saturated=_share(value[right] == 0),
            sums_to_one=checks.are_probabilities(outputs),
            between_passes=float((outputs - repeated).abs().max()) / size,
            between_batches=float((outputs[:, : single.shape[1]] - single).abs().max()) / size,
        )


def _loss_and_gradient(problem: AttackProblem) -> tuple[Float[Tensor, " B"], Float[Tensor, "B *S"]]:
    """Cross-entropy and its gradient without corrections: NaN, which attacks would set to zero, stays NaN."""
    with torch.enable_grad():
        point = problem.examples.x.detach().requires_grad_()
        scores = problem.model.attacked_scores(problem.model.outputs(point))
        value = cross_entropy(scores, problem.examples.y).sum(0)
        (gradient,) = torch.autograd.grad(value.sum(), point) if value.requires_grad else (torch.zeros_like(point),)
    return value.detach(), gradient.detach()


def _share(mask: Bool[Tensor, " n"]) -> float:
    return float(mask.double().mean()) if len(mask) else 0.0


class AttackDiagnostics(NamedTuple):
    """Number of examples still classified correctly after cheap attacks."""

    examples: int
    clean: int
    noise: int
    single_step: int
    over_steps: dict[int, int]
    one_start: int
    more_starts: int
    last_point: int
    """After the plain attack if its last point counts, though earlier points succeeded."""
    forgotten: int
    """Examples on which the plain attack succeeded on the way but not at its last point."""
    ce: int
    logits: int
    """After APGD on DLR or the margin (see `suites.logit_loss`); for an ensemble, also on the members' logits."""
    full_range: int
    """After the plain attack without a bound other than the box."""
    square: int | None
    transfer: dict[str, int]
    over_epsilon: dict[float, int]
    """By ε, after APGD on cross-entropy and on logits: an example counts as wrong if either succeeds."""

    @property
    def plain(self) -> int:
        """After ten steps of PGD."""
        return self.over_steps[PLAIN_STEPS]

    @property
    def iterated(self) -> int:
        """After the strongest PGD with ten steps or more."""
        return min(left for steps, left in self.over_steps.items() if steps >= PLAIN_STEPS)


def attack_diagnostics(
    run: Run, terms: Terms, budget: DiagnosticBudget, epsilons: list[float], clean: Bool[Tensor, " n"]
) -> AttackDiagnostics:
    """Run the attacks that checks and curves need.

    Args:
        run: Runs an attack on the first few examples.
        terms: Ball, model and data.
        budget: Effort.
        epsilons: Values of ε of the curve.
        clean: Which examples the model misclassifies without any attack.
    """
    ball, seed = terms.ball, {"seed": terms.seed}

    def left(name: str, attack: Attack) -> int:
        return int((~run(name, attack)).sum())

    wrong_after = {
        steps: run(f"PGD, {steps} steps", partial(pgd, **ball, **seed, steps=steps))
        for steps in sorted({*budget.steps, PLAIN_STEPS})
    }
    wrong_at_last = run("PGD, last point", partial(pgd, **ball, **seed, steps=PLAIN_STEPS, stop=False))
    restarted = partial(pgd, **ball, **seed, steps=PLAIN_STEPS, restarts=budget.restarts)
    anywhere = {**ball, "epsilon": terms.full_range}
    losses: dict[float, tuple[Tensor, Tensor]] = {}
    for epsilon in sorted({*epsilons, terms.epsilon}):
        settings = {**ball, "epsilon": epsilon, **seed, "steps": budget.apgd_steps}
        by_ce = run(f"APGD-CE, ε = {epsilon:.6g}", partial(apgd, **settings))
        by_logits = run(f"APGD on logits, ε = {epsilon:.6g}", partial(apgd, **settings, loss=logit_loss(terms)))
        if terms.members > 1:
            setting = members_logits(terms._replace(epsilon=epsilon), budget.apgd_steps)
            by_logits = by_logits | run(f"{setting.name}, ε = {epsilon:.6g}", setting.attack)
        losses[epsilon] = (by_ce, by_logits)
    ce, logits = losses[terms.epsilon]
    search = partial(square, **ball, **seed, queries=budget.queries)
    return AttackDiagnostics(
        examples=len(clean),
        clean=int((~clean).sum()),
        noise=left("noise", partial(random_noise, **ball, **seed)),
        single_step=left("FGSM", partial(fgsm, **ball)),
        over_steps={steps: int((~wrong).sum()) for steps, wrong in wrong_after.items()},
        one_start=int((~wrong_after[PLAIN_STEPS]).sum()),
        more_starts=left("PGD, restarts", restarted),
        last_point=int((~wrong_at_last).sum()),
        forgotten=int((wrong_after[PLAIN_STEPS] & ~wrong_at_last).sum()),
        ce=int((~ce).sum()),
        logits=int((~logits).sum()),
        full_range=left("PGD, full range", partial(pgd, **anywhere, **seed, steps=2 * PLAIN_STEPS)),
        square=left("Square", search) if terms.squares else None,
        transfer={s.name: left(s.name, s.attack) for s in transfers(terms, PLAIN_STEPS)},
        over_epsilon={epsilon: int((~(first | second)).sum()) for epsilon, (first, second) in losses.items()},
    )
