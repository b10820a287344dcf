"""Flags: signs that an attack was too weak for the model, so that accuracy under it says too much.

A flag that is raised says that something is odd, and what to do; none raised says that nothing odd was seen, not that
the model is robust. Every threshold here leaves room for luck, and says why it is what it is.
"""

from typing import NamedTuple

from dissensus.attacks.probing import Look, Probes

LUCK = 0.02
"""Share of examples, two at least, by which attacks that should be ordered may be out of order: runs from random starts
end differently on a few examples, and two of a hundred is what one sees on models without masked gradients."""
ZERO_GRADIENTS = 0.01
"""Share of examples without a gradient. A network in float32 has one everywhere unless its logits are huge; one of a
hundred is left to inputs where all units are dead."""
SATURATED = 0.1
"""Share of examples whose cross-entropy is zero in float32, which takes a lead of 17 in logits."""
HIDDEN = 0.05
"""By how much accuracy under an attack that climbs a saturated cross-entropy may be above that under any other attack.
A saturated loss alone says little: for networks that were trained far beyond their last error it is zero on most
examples, yet its gradient has digits up to a lead of about 100, and attacks on it are as good as others."""
NOISE = 0.5
"""Share of what the plain attack breaks that random noise may break: where gradients lead anywhere, noise of the same
size breaks about a tenth of it. Where no attack breaks four examples of a hundred, ε is too small to tell; where the
plain attack leaves next to nothing, it is strong enough, whatever noise does to so weak a model."""
FULL_RANGE = 0.05
"""Share of examples that may be left where the attack could give any input at all, another class's image for one. It
should be none; a few are left to an attack of twenty steps."""
APART = 0.1
"""How far accuracies by cross-entropy and by a loss of logits may be apart. On adversarially trained networks they
differ by two to five points, on masked ones by tens."""
DIFFERENT = 1e-2
"""Difference of outputs that should be the same, relative to the largest: half precision, which a GPU may add up in
another order for another batch, stays below it; dropout and batch norm in training mode are far above."""


class Flag(NamedTuple):
    """One check: whether it is raised, what was seen, what that means, and what to do."""

    name: str
    raised: bool
    seen: str
    meaning: str
    advice: str


class Standing(NamedTuple):
    """One attack of a suite: its kind, and how many it broke that all before it had left."""

    name: str
    kind: str
    broken: int
    examples: int


def checked(look: Look, probes: Probes, run: list[Standing]) -> list[Flag]:
    """Every check, raised or not.

    Args:
        look: What passes over a few examples say.
        probes: What cheap attacks leave of the same examples.
        run: The suite's attacks in their order, where each was run on what was left; else empty.
    """
    return [
        _gradients(look),
        _saturated(look, probes),
        _probabilities(look),
        _random(look),
        _batches(look),
        _noise(probes),
        _full_range(probes),
        _steps(probes),
        _restarts(probes),
        _single_step(probes),
        _last_point(probes),
        _black_box(probes, run),
        _transfer(probes, run),
        _losses(probes),
    ]


def margin(examples: int) -> float:
    """How many examples luck may move.

    >>> margin(50), margin(1000)
    (2.0, 20.0)
    """
    return max(2.0, LUCK * examples)


def _gradients(look: Look) -> Flag:
    seen = f"no gradient for {look.zero:.0%} of {look.right} examples, NaN or infinities for {look.lost:.0%}"
    return Flag(
        "gradients",
        look.zero > ZERO_GRADIENTS or look.lost > 0,
        seen,
        "Attacks that follow gradients cannot move such examples, and count them as robust.",
        "Believe losses of logits, transfer and Square rather than cross-entropy; look for huge logits, rounding or "
        "operations without a gradient in the model.",
    )


def _saturated(look: Look, probes: Probes) -> Flag:
    best = _by_others(probes)
    hides = probes.ce - best > max(margin(probes.examples), HIDDEN * probes.examples)
    return Flag(
        "saturated loss",
        look.saturated > SATURATED and hides,
        f"cross-entropy is zero for {look.saturated:.0%} of examples; attacks that climb it leave"
        f" {_of(probes.ce, probes)}, others {_of(best, probes)}",
        "Logits lie so far apart that cross-entropy has no digits left, and attacks that climb it are lost.",
        "Believe losses of logits, and run the adaptive suite, which rescales scores; or attack the model in float64.",
    )


def _probabilities(look: Look) -> Flag:
    seen = "outputs are at least zero and sum to one" if look.sums_to_one else "outputs are not probabilities"
    return Flag(
        "probabilities as logits",
        look.sums_to_one,
        seen,
        "A softmax of probabilities is nearly flat: attacks on it are weaker, some by far.",
        "Give the model without its softmax, or take the log of its outputs.",
    )


def _random(look: Look) -> Flag:
    return Flag(
        "random outputs",
        look.between_passes > DIFFERENT,
        f"two passes differ by {look.between_passes:.1g} of the largest output",
        "What breaks one pass need not break the next, and single gradients are noisy.",
        "Run the adaptive suite, which averages gradients over passes; or fix the draws.",
    )


def _batches(look: Look) -> Flag:
    raised = look.between_batches > DIFFERENT and look.between_passes <= DIFFERENT
    return Flag(
        "depends on the batch",
        raised,
        f"alone and in a batch, outputs differ by {look.between_batches:.1g} of the largest",
        "An example's result depends on what it is shown beside, so accuracy is no property of the model.",
        "Put the model in evaluation mode: batch norm in training mode does this.",
    )


def _noise(probes: Probes) -> Flag:
    by_noise, by_attack = probes.clean - probes.noise, probes.clean - probes.plain
    luck = margin(probes.examples)
    tells = probes.clean - min(probes.noise, _by_others(probes)) >= 2 * luck and probes.plain > luck
    return Flag(
        "noise as strong",
        tells and by_noise >= NOISE * by_attack,
        f"noise leaves {_of(probes.noise, probes)}, PGD {_of(probes.plain, probes)}",
        "Gradients lead nowhere in particular: the attack is no better than chance.",
        "Do not believe gradient attacks on this model; run the adaptive suite.",
    )


def _full_range(probes: Probes) -> Flag:
    return Flag(
        "robust at full range",
        probes.full_range > FULL_RANGE * probes.examples,
        f"{_of(probes.full_range, probes)} left where any input may be given",
        "No model can be right about an input that may be anything, so the attack has failed.",
        "Do not believe gradient attacks on this model; run the adaptive suite.",
    )


def _steps(probes: Probes) -> Flag:
    left, worst, pair = probes.over_steps, 0, (1, 1)
    for few, after_few in left.items():
        for many, after_many in left.items():
            if many > few and after_many - after_few > worst:
                worst, pair = after_many - after_few, (few, many)
    seen = f"{pair[1]} steps leave {worst} examples more than {pair[0]}" if worst else "more steps leave no more"
    return Flag(
        "more steps weaker",
        worst > margin(probes.examples),
        seen,
        "An attack with more steps should break more: its steps do not follow the loss.",
        "Take APGD, which chooses its steps, with restarts; look at the loss along one attack.",
    )


def _restarts(probes: Probes) -> Flag:
    more = probes.more_starts - probes.one_start
    return Flag(
        "more restarts weaker",
        more > margin(probes.examples),
        f"one start leaves {_of(probes.one_start, probes)}, more leave {_of(probes.more_starts, probes)}",
        "The first start is among them, so this cannot be, unless the model's answers change.",
        "Fix the model's draws, or average over them.",
    )


def _single_step(probes: Probes) -> Flag:
    return Flag(
        "one step stronger",
        probes.plain - probes.single_step > margin(probes.examples),
        f"one step leaves {_of(probes.single_step, probes)}, ten {_of(probes.plain, probes)}",
        "Small steps get lost in a rugged or flat loss that one large step leaps over: gradients are masked.",
        "Run the adaptive suite: large steps, restarts, and Square.",
    )


def _last_point(probes: Probes) -> Flag:
    return Flag(
        "last point unbroken",
        probes.seen > margin(probes.examples),
        f"{_of(probes.seen, probes)} broken on the way, and unbroken at the last step",
        "An attack that returns its last point forgets what it had found, and accuracy looks higher.",
        "Let attacks stop at the first success (stop=True, the default); the paper's protocol does not.",
    )


def _black_box(probes: Probes, run: list[Standing]) -> Flag:
    late = _late(run, "black-box")
    stronger = probes.square is not None and probes.iterated - probes.square > margin(probes.examples)
    seen = (
        "Square was not run"
        if probes.square is None
        else (f"Square leaves {_of(probes.square, probes)}, PGD {_of(probes.iterated, probes)}")
    )
    return Flag(
        "Square stronger",
        stronger or late is not None,
        seen + (f"; {late}" if late else ""),
        "A search that sees no gradients does better than attacks that follow them: gradients are masked.",
        "Run the adaptive suite, give Square more queries, and report the worst case.",
    )


def _transfer(probes: Probes, run: list[Standing]) -> Flag:
    best = min(probes.transfer, key=lambda name: probes.transfer[name], default="")
    late = _late(run, "transfer")
    stronger = bool(best) and probes.iterated - probes.transfer[best] > margin(probes.examples)
    seen = (
        f"{best} leaves {_of(probes.transfer[best], probes)}, PGD {_of(probes.iterated, probes)}"
        if best
        else ("there is nothing to transfer from: one member, no surrogate")
    )
    return Flag(
        "transfer stronger",
        stronger or late is not None,
        seen + (f"; {late}" if late else ""),
        "What was made for another network does better than what was made for this one: gradients are masked.",
        "Run the adaptive suite with a surrogate, and report the worst case.",
    )


def _losses(probes: Probes) -> Flag:
    return Flag(
        "losses far apart",
        abs(probes.ce - probes.logits) > APART * probes.examples,
        f"cross-entropy leaves {_of(probes.ce, probes)}, logits {_of(probes.logits, probes)}",
        "One of the two losses has no useful gradient here.",
        "Believe the lower one, and run the adaptive suite.",
    )


def _by_others(probes: Probes) -> int:
    """What the strongest attack leaves that does not climb cross-entropy of the model itself."""
    return min(
        probes.logits, *([] if probes.square is None else [probes.square]), *probes.transfer.values(), probes.clean
    )


def _late(run: list[Standing], kind: str) -> str | None:
    """What attacks of a kind broke of what all before them had left, where that is more than luck."""
    found = [one for one in run if one.kind == kind and one.broken > margin(one.examples)]
    return f"{found[0].name} broke {found[0].broken} that attacks before it had left" if found else None


def _of(count: int, probes: Probes) -> str:
    return f"{count / probes.examples:.0%}"
