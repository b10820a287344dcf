"""What checks look at: a model's outputs and gradients on a few examples, and what cheap attacks do to them."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from dissensus import checks
from dissensus.attacks.apgd import apgd
from dissensus.attacks.case import Adversarial, Case, opened
from dissensus.attacks.gradient import fgsm, pgd
from dissensus.attacks.losses import cross_entropy
from dissensus.attacks.norms import linf_lengths
from dissensus.attacks.square import square
from dissensus.attacks.suites import Probing, Terms, logit_loss, members_logits, transfers
from dissensus.attacks.trials import random_noise
from dissensus.attacks.victim import Model, PoolName

PLAIN = 10
"""Steps of the plain attack that others are set against: PGD on cross-entropy, as most evaluations have it."""
ALONE = 8
"""Examples that are also looked at one by one."""

Attack = Callable[..., Adversarial]
Run = Callable[[str, Attack], Bool[Tensor, " n"]]
"""``(name, attack) -> `` which of the probed examples the model has wrong after it."""


class Look(NamedTuple):
    """What a few passes say. Shares are of the examples that the model has right."""

    examples: int
    members: int
    classes: int
    right: int
    zero: float
    """Share of examples whose gradient is zero, in every feature."""
    lost: float
    """Share of examples whose gradient has NaN or infinities."""
    saturated: float
    """Share of examples whose cross-entropy is zero."""
    sums_to_one: bool
    """Whether outputs are at least zero and sum to one."""
    between_passes: float
    """The largest difference of outputs between two passes over the same batch, relative to the largest output."""
    between_batches: float
    """The same between examples by themselves and in their batch."""


def looked(model: Model, x: Float[Tensor, "n *S"], y: Integer[Tensor, " n"], pool: PoolName = "probability") -> Look:
    """Outputs and gradients on clean inputs, in the state in which attacks see the model."""
    with opened(model, x, y, target=None, pool=pool, box=(0.0, 1.0)) as case:
        own = case.examples.x
        outputs, again = case.victim.outputs(own), case.victim.outputs(own)
        # Alone is beside a copy of itself: batch norm that is training refuses a batch of one.
        single = torch.cat([case.victim.outputs(own[[i, i]])[:, :1] for i in range(min(ALONE, len(own)))], 1)
        size = float(outputs.abs().max().clamp_min(torch.finfo(outputs.dtype).tiny))
        value, gradient = _sloped(case)
        right = (case.clean.argmax(-1) == case.examples.y).nonzero().squeeze(1)
        finite = gradient.flatten(1).isfinite().all(1)
        zero = finite & (linf_lengths(gradient.nan_to_num()) == 0)
        return Look(
            examples=len(x),
            members=outputs.shape[0],
            classes=case.classes,
            right=len(right),
            zero=_share(zero[right]),
            lost=_share(~finite[right]),
            saturated=_share(value[right] == 0),
            sums_to_one=checks.are_probabilities(outputs),
            between_passes=float((outputs - again).abs().max()) / size,
            between_batches=float((outputs[:, : single.shape[1]] - single).abs().max()) / size,
        )


def _sloped(case: Case) -> tuple[Float[Tensor, " B"], Float[Tensor, "B *S"]]:
    """Cross-entropy and its gradient as they are: what attacks would set to zero is still NaN."""
    with torch.enable_grad():
        at = case.examples.x.detach().requires_grad_()
        value = cross_entropy(case.victim.scores(case.victim.outputs(at)), case.examples.y).sum(0)
        (gradient,) = torch.autograd.grad(value.sum(), at) if value.requires_grad else (torch.zeros_like(at),)
    return value.detach(), gradient.detach()


def _share(flags: Bool[Tensor, " n"]) -> float:
    return float(flags.double().mean()) if len(flags) else 0.0


class Probes(NamedTuple):
    """How many of the same few examples the model still has right, after attacks that are set against each other."""

    examples: int
    clean: int
    noise: int
    """After ten random points each."""
    single_step: int
    over_steps: dict[int, int]
    """By steps of PGD on cross-entropy, from the same starts; an example stops where it is broken."""
    one_start: int
    more_starts: int
    last_point: int
    """After the plain attack where the last point counts, though others broke examples on the way."""
    seen: int
    """How many examples the plain attack had broken on the way, which it returned unbroken so."""
    ce: int
    logits: int
    """After APGD on the ratio of logits, or their margin (see `suites.logit_loss`); of an ensemble, on members' too."""
    full_range: int
    """After the plain attack, free to go anywhere in the box."""
    square: int | None
    transfer: dict[str, int]
    over_epsilon: dict[float, int]
    """By ε, after APGD on cross-entropy and on logits, whichever breaks an example."""

    @property
    def plain(self) -> int:
        """After ten steps of PGD."""
        return self.over_steps[PLAIN]

    @property
    def iterated(self) -> int:
        """After PGD of ten steps or more, the best of them: what follows gradients, against what does not."""
        return min(left for steps, left in self.over_steps.items() if steps >= PLAIN)


def probed(run: Run, terms: Terms, probing: Probing, epsilons: list[float], clean: Bool[Tensor, " n"]) -> Probes:
    """Run the attacks that checks and curves are about.

    Args:
        run: Runs an attack on the probed examples.
        terms: Ball, model and data.
        probing: How much is spent.
        epsilons: Of the curve over ε.
        clean: Which examples the model has wrong without any attack.
    """
    ball, seed = terms.ball, {"seed": terms.seed}

    def left(name: str, attack: Attack) -> int:
        return int((~run(name, attack)).sum())

    climbed = {
        n: run(f"PGD, {n} steps", partial(pgd, **ball, **seed, steps=n)) for n in sorted({*probing.steps, PLAIN})
    }
    last = run("PGD, last point", partial(pgd, **ball, **seed, steps=PLAIN, stop=False))
    restarted = partial(pgd, **ball, **seed, steps=PLAIN, restarts=probing.restarts)
    anywhere = {**ball, "epsilon": reach(terms)}
    climbing = {**seed, "steps": probing.adaptive_steps}
    losses: dict[float, tuple[Tensor, Tensor]] = {}
    for epsilon in sorted({*epsilons, terms.epsilon}):
        near = {**ball, "epsilon": epsilon, **climbing}
        by_ce = run(f"APGD-CE, ε = {epsilon:.6g}", partial(apgd, **near))
        by_logits = run(f"APGD on logits, ε = {epsilon:.6g}", partial(apgd, **near, loss=logit_loss(terms)))
        if terms.members > 1:
            setting = members_logits(terms._replace(epsilon=epsilon), probing.adaptive_steps)
            by_logits = by_logits | run(f"{setting.name}, ε = {epsilon:.6g}", setting.attack)
        losses[epsilon] = (by_ce, by_logits)
    ce, logits = losses[terms.epsilon]
    searched = partial(square, **ball, **seed, queries=probing.queries)
    return Probes(
        examples=len(clean),
        clean=int((~clean).sum()),
        noise=left("noise", partial(random_noise, **ball, **seed)),
        single_step=left("FGSM", partial(fgsm, **ball)),
        over_steps={n: int((~broken).sum()) for n, broken in climbed.items()},
        one_start=int((~climbed[PLAIN]).sum()),
        more_starts=left("PGD, restarts", restarted),
        last_point=int((~last).sum()),
        seen=int((climbed[PLAIN] & ~last).sum()),
        ce=int((~ce).sum()),
        logits=int((~logits).sum()),
        full_range=left("PGD, full range", partial(pgd, **anywhere, **seed, steps=2 * PLAIN)),
        square=left("Square", searched) if terms.squares else None,
        transfer={s.name: left(s.name, s.attack) for s in transfers(terms, PLAIN)},
        over_epsilon={epsilon: int((~(first | second)).sum()) for epsilon, (first, second) in losses.items()},
    )


def reach(terms: Terms) -> float:
    """An ε from which every point of the box can be reached from any other: 1 in L∞, √D in L2."""
    size = 1.0
    for side in terms.shape:
        size *= side
    return 1.0 if terms.norm == "linf" else size**0.5
