"""Flags: signs that an attack was too weak for the model, so that accuracy under it is too high.

A raised flag says what is unusual and what to do. Without flags nothing unusual was seen; this does not prove that the
model is robust. Every threshold leaves room for chance, and its comment gives the reason for its value.
"""

from typing import NamedTuple

from dissensus.attacks.diagnostics import AttackDiagnostics, ModelDiagnostics
from dissensus.pages.parts import counted

CHANCE = 0.02
"""Share of examples, at least two, by which attacks may violate their expected order: runs from random starts differ on
a few examples, and two of a hundred is typical of models without masked gradients."""
ZERO_GRADIENTS = 0.01
"""Share of examples without a gradient. A network in float32 has a gradient everywhere unless its logits are huge; one
example in a hundred may lie where all units are dead."""
SATURATED = 0.1
"""Share of examples whose cross-entropy is zero in float32, which takes a lead of 17 in logits."""
HIDDEN = 0.05
"""By how much accuracy under attacks on a saturated cross-entropy may exceed that under any other attack. A saturated
loss alone says little: networks trained far beyond their last error have it on most examples, yet the gradient has
digits up to a lead of about 100, and attacks on it are as strong as others."""
NOISE = 0.5
"""Share of the plain attack's successes that random noise may reach. Where gradients are useful, noise of the same size
reaches about a tenth. Where no attack succeeds on four examples of a hundred, ε is too small for this check; where the
plain attack leaves next to nothing, it is strong enough, whatever noise does to such a weak model."""
FULL_RANGE = 0.05
"""Share of examples that may be left when the attack may return any input, such as an image of another class. It should
be zero; an attack of twenty steps misses a few."""
APART = 0.1
"""Largest difference between accuracies by cross-entropy and by a loss of logits. It is two to five points on
adversarially trained networks, and tens of points on masked ones."""
DIFFERENT = 1e-2
"""Relative difference of outputs that should be equal. Half precision, which a GPU may sum in another order for another
batch, stays below it; dropout and batch norm in training mode are far above."""


class Flag(NamedTuple):
    """One check: whether it is raised, the observation, its meaning, and advice."""

    name: str
    raised: bool
    seen: str
    """The observation, with numbers."""
    meaning: str
    advice: str


class SuiteStep(NamedTuple):
    """One attack of a suite: its kind, and on how many examples it succeeded that all earlier attacks had left."""

    name: str
    kind: str
    broken: int
    examples: int


def all_flags(model: ModelDiagnostics, attacks: AttackDiagnostics, suite: list[SuiteStep]) -> list[Flag]:
    """Every check, raised or not.

    Args:
        model: Outputs and gradients on a few examples.
        attacks: Results of cheap attacks on the same examples.
        suite: The suite's attacks in order, if each ran on the examples that were left; otherwise empty.
    """
    return [
        _gradients(model),
        _saturated(model, attacks),
        _probabilities(model),
        _random(model),
        _batches(model),
        _noise(attacks),
        _full_range(attacks),
        _steps(attacks),
        _restarts(attacks),
        _single_step(attacks),
        _last_point(attacks),
        _black_box(attacks, suite),
        _transfer(attacks, suite),
        _losses(attacks),
    ]


def chance_margin(examples: int) -> float:
    """Number of examples that chance may account for.

    >>> chance_margin(50), chance_margin(1000)
    (2.0, 20.0)
    """
    return max(2.0, CHANCE * examples)


def _gradients(model: ModelDiagnostics) -> Flag:
    return Flag(
        "gradients",
        model.zero > ZERO_GRADIENTS or model.nonfinite > 0,
        f"no gradient for {model.zero:.0%} of {counted(model.right, 'example')}, NaN or infinities for"
        f" {model.nonfinite:.0%}",
        "Attacks that follow gradients cannot move such examples, and count them as robust.",
        "Trust losses of logits, transfer and Square rather than cross-entropy; look for huge logits, rounding or "
        "operations without a gradient in the model.",
    )


def _saturated(model: ModelDiagnostics, attacks: AttackDiagnostics) -> Flag:
    best = _by_others(attacks)
    hides = attacks.ce - best > max(chance_margin(attacks.examples), HIDDEN * attacks.examples)
    return Flag(
        "saturated loss",
        model.saturated > SATURATED and hides,
        f"cross-entropy is zero for {model.saturated:.0%} of examples; attacks on it leave"
        f" {_percent(attacks.ce, attacks)}, others {_percent(best, attacks)}",
        "Logits lie so far apart that cross-entropy has no digits left, and attacks on it fail.",
        "Trust losses of logits, and run the adaptive suite, which rescales scores; or attack the model in float64.",
    )


def _probabilities(model: ModelDiagnostics) -> Flag:
    return Flag(
        "probabilities as logits",
        model.sums_to_one,
        "outputs are at least zero and sum to one" if model.sums_to_one else "outputs are not probabilities",
        "A softmax of probabilities is nearly flat: attacks on it are weaker, some by far.",
        "Give the model without its softmax, or take the log of its outputs.",
    )


def _random(model: ModelDiagnostics) -> Flag:
    return Flag(
        "random outputs",
        model.between_passes > DIFFERENT,
        f"two passes differ by {model.between_passes:.1g} of the largest output",
        "A point that is adversarial in one pass need not be so in the next, and single gradients are noisy.",
        "Run the adaptive suite, which averages gradients over passes; or fix the model's random draws.",
    )


def _batches(model: ModelDiagnostics) -> Flag:
    return Flag(
        "depends on the batch",
        model.between_batches > DIFFERENT and model.between_passes <= DIFFERENT,
        f"alone and in a batch, outputs differ by {model.between_batches:.1g} of the largest",
        "An example's result depends on the other examples of its batch, so accuracy is no property of the model.",
        "Put the model in evaluation mode: batch norm in training mode does this.",
    )


def _noise(attacks: AttackDiagnostics) -> Flag:
    by_noise, by_attack = attacks.clean - attacks.noise, attacks.clean - attacks.plain
    chance = chance_margin(attacks.examples)
    meaningful = attacks.clean - min(attacks.noise, _by_others(attacks)) >= 2 * chance and attacks.plain > chance
    return Flag(
        "noise as strong",
        meaningful and by_noise >= NOISE * by_attack,
        f"noise leaves {_percent(attacks.noise, attacks)}, PGD {_percent(attacks.plain, attacks)}",
        "Gradients carry no information: the attack is no better than chance.",
        "Do not trust gradient attacks on this model; run the adaptive suite.",
    )


def _full_range(attacks: AttackDiagnostics) -> Flag:
    return Flag(
        "robust at full range",
        attacks.full_range > FULL_RANGE * attacks.examples,
        f"{_percent(attacks.full_range, attacks)} left where any input is allowed",
        "No model can be right about an input that may be anything, so the attack has failed.",
        "Do not trust gradient attacks on this model; run the adaptive suite.",
    )


def _steps(attacks: AttackDiagnostics) -> Flag:
    left, worst, pair = attacks.over_steps, 0, (1, 1)
    for few, after_few in left.items():
        for many, after_many in left.items():
            if many > few and after_many - after_few > worst:
                worst, pair = after_many - after_few, (few, many)
    return Flag(
        "more steps weaker",
        worst > chance_margin(attacks.examples),
        f"{pair[1]} steps leave {counted(worst, 'example')} more than {pair[0]}"
        if worst
        else "more steps leave no more",
        "An attack with more steps should be stronger: its steps do not follow the loss.",
        "Use APGD, which chooses its steps, with restarts; look at the loss along one attack.",
    )


def _restarts(attacks: AttackDiagnostics) -> Flag:
    more = attacks.more_starts - attacks.one_start
    return Flag(
        "more restarts weaker",
        more > chance_margin(attacks.examples),
        f"one start leaves {_percent(attacks.one_start, attacks)}, more leave {_percent(attacks.more_starts, attacks)}",
        "The first start is among them, so this is impossible unless the model's answers change.",
        "Fix the model's random draws, or average over them.",
    )


def _single_step(attacks: AttackDiagnostics) -> Flag:
    return Flag(
        "one step stronger",
        attacks.plain - attacks.single_step > chance_margin(attacks.examples),
        f"one step leaves {_percent(attacks.single_step, attacks)}, ten {_percent(attacks.plain, attacks)}",
        "Small steps get lost in a rugged or flat loss that one large step crosses: gradients are masked.",
        "Run the adaptive suite: large steps, restarts, and Square.",
    )


def _last_point(attacks: AttackDiagnostics) -> Flag:
    return Flag(
        "last point unbroken",
        attacks.forgotten > chance_margin(attacks.examples),
        f"{_percent(attacks.forgotten, attacks)} adversarial on the way, and not at the last step",
        "An attack that returns its last point loses earlier successes, and accuracy looks higher.",
        "Let attacks stop at the first success (stop=True, the default); the paper's protocol does not.",
    )


def _black_box(attacks: AttackDiagnostics, suite: list[SuiteStep]) -> Flag:
    late = _late_success(suite, "black-box")
    stronger = attacks.square is not None and attacks.iterated - attacks.square > chance_margin(attacks.examples)
    if attacks.square is None:
        observation = "Square was not run"
    else:
        observation = f"Square leaves {_percent(attacks.square, attacks)}, PGD {_percent(attacks.iterated, attacks)}"
    return Flag(
        "Square stronger",
        stronger or late is not None,
        observation + (f"; {late}" if late else ""),
        "A search without gradients is stronger than attacks that follow them: gradients are masked.",
        "Run the adaptive suite, give Square more queries, and report the worst case.",
    )


def _transfer(attacks: AttackDiagnostics, suite: list[SuiteStep]) -> Flag:
    best = min(attacks.transfer, key=lambda name: attacks.transfer[name], default="")
    late = _late_success(suite, "transfer")
    stronger = bool(best) and attacks.iterated - attacks.transfer[best] > chance_margin(attacks.examples)
    if best:
        left = _percent(attacks.transfer[best], attacks)
        observation = f"{best} leaves {left}, PGD {_percent(attacks.iterated, attacks)}"
    else:
        observation = "there is nothing to transfer from: one member, no surrogate"
    return Flag(
        "transfer stronger",
        stronger or late is not None,
        observation + (f"; {late}" if late else ""),
        "Points crafted on another network are stronger than points crafted on this one: gradients are masked.",
        "Run the adaptive suite with a surrogate, and report the worst case.",
    )


def _losses(attacks: AttackDiagnostics) -> Flag:
    return Flag(
        "losses far apart",
        abs(attacks.ce - attacks.logits) > APART * attacks.examples,
        f"cross-entropy leaves {_percent(attacks.ce, attacks)}, logits {_percent(attacks.logits, attacks)}",
        "One of the two losses has no useful gradient here.",
        "Trust the lower one, and run the adaptive suite.",
    )


def _by_others(attacks: AttackDiagnostics) -> int:
    """Examples left by the strongest attack that does not use cross-entropy of the model itself."""
    by_square = [] if attacks.square is None else [attacks.square]
    return min(attacks.logits, *by_square, *attacks.transfer.values(), attacks.clean)


def _late_success(suite: list[SuiteStep], kind: str) -> str | None:
    """Successes of a kind of attack on examples that all earlier attacks had left, if chance cannot explain them."""
    late = [step for step in suite if step.kind == kind and step.broken > chance_margin(step.examples)]
    return f"{late[0].name} broke {late[0].broken} that attacks before it had left" if late else None


def _percent(count: int, attacks: AttackDiagnostics) -> str:
    return f"{count / attacks.examples:.0%}"
