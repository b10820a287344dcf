"""The verdict: the first of a few rules that applies, with its reasons and what to do about it.

`dissensus study run audit/table-1` asks how often it is right.
"""

from collections.abc import Callable
from typing import NamedTuple

import dissensus.auditing.testing as testing
from dissensus.auditing.evidence import (
    COLLUSIVE,
    DOMINATED,
    FEWEST,
    HEALTHY,
    LIMITS,
    REDUNDANT,
    SKILL,
    UNDECIDED,
    UNSKILLED,
    Evidence,
    Limits,
    Subject,
    gathered,
)
from dissensus.auditing.tallying import Tally

VERDICTS = (UNSKILLED, COLLUSIVE, DOMINATED, REDUNDANT, UNDECIDED, HEALTHY)
"""In the order in which rules are asked: the first that applies is the verdict."""
FEW_EXAMPLES, FEW_MEMBERS = 200, 5
"""Counts below which confidence is called low."""


class Judgement(NamedTuple):
    """A verdict, why, and what would tell more."""

    verdict: str
    reasons: list[str]
    advice: list[str]
    evidence: tuple[Evidence, ...] = ()
    """Every question that was asked."""
    confidence: str = ""
    """How much the amount of data allows to be said."""


def judged(subject: Subject, limits: Limits = LIMITS) -> Judgement:
    """Judge an ensemble. Rules are asked in the order of `VERDICTS`; the first that applies is the verdict."""
    test = subject.test
    if test.members < 2:
        return Judgement(UNDECIDED, ["one member has no diversity to judge"], ["Give at least two members."])
    if test.units < FEWEST:
        return Judgement(UNDECIDED, [f"{_amount(test)} are too few to tell"], [f"Give at least {FEWEST}."])
    if float(testing.own_error(test).sum()) == 0:
        return Judgement(REDUNDANT, ["no member ever errs: one would do"], ["Keep one member, or find harder data."])
    evidence = gathered(subject, limits)
    verdict, reasons, advice = _verdict(subject, evidence, limits)
    return Judgement(verdict, reasons, advice, tuple(evidence), _confidence(test, evidence))


def _verdict(subject: Subject, evidence: list[Evidence], limits: Limits) -> tuple[str, list[str], list[str]]:
    test = subject.test
    shown = [item for item in evidence if item.answer == "yes"]
    if not any(item.points_to == SKILL for item in shown):
        if testing.small_skill(test, *limits.no_skill):
            advice = "Check that outputs and targets belong together (order of examples, `kind`, scale)."
            return UNSKILLED, [f"a constant prediction does as well or better: {_skill_in_words(test)}"], [advice]
        why = f"{_amount(test)} cannot show that the ensemble is better than a constant: {_skill_in_words(test)}"
        return UNDECIDED, [why], ["Bring more examples."]
    for verdict, advice in (
        (COLLUSIVE, _what_to_do(shown)),
        (DOMINATED, "Use that member alone, or weigh members by their quality on held-out data."),
        (REDUNDANT, "Keep one member, or train them from other seeds, data or settings."),
    ):
        reasons = [item.reason for item in shown if item.points_to == verdict]
        if reasons:
            return verdict, reasons, [advice]
    doubts = _doubts(subject, evidence, limits)
    if doubts:
        return UNDECIDED, doubts, [_what_to_bring(subject)]
    gain, correlation = testing.gains(test, limits.gain).value, testing.error_correlation(test)
    why = (
        f"the ensemble predicts better than a constant, pooling takes {gain:.0%} off the members' error, and no test "
        f"speaks against members that were trained independently (their errors have a correlation of {correlation:.2f})"
    )
    return HEALTHY, [why], _not_excluded(subject)


def _skill_in_words(test: Tally) -> str:
    skill = testing.skill(test)
    if test.kind == "values":
        return f"the ensemble explains {max(skill['loss'].value, -99.0):.0%} of the variance"
    loss, kappa = 1 - skill["loss"].value, skill["kappa"].value
    return (
        f"the ensemble's loss is {loss:.2f} times that of class frequencies alone, and its kappa is {kappa:.2f} (0 is "
        "guessing)"
    )


def _what_to_do(shown: list[Evidence]) -> str:
    accusing = [item for item in shown if item.points_to == COLLUSIVE]
    if accusing and all("constant offsets" in item.measure for item in accusing):
        return (
            "Two causes look like this. Members trained on a joint loss: train each on its own loss, or at a "
            "smaller β. Members trained alone on other populations (sites, label skew): keep them, and correct each "
            "member's offset on data of the population that you predict for. Then audit again."
        )
    return "Train each member on its own loss, or at a smaller β, and audit again: a member must be usable alone."


def _what_to_bring(subject: Subject) -> str:
    wanted = []
    if subject.reference is None:
        wanted.append("`reference`: outputs of an ensemble of the same build, trained independently")
    if subject.train is None:
        wanted.append("`train` with `in_bag`: outputs on training data, and which of it each member was trained on")
    elif not subject.in_bag_known:
        wanted.append("`in_bag`: which training examples each member was trained on ('all', or a mask)")
    return f"Bring {', or '.join(wanted)}." if wanted else "Bring more examples."


def _not_excluded(subject: Subject) -> list[str]:
    """What a healthy ensemble may still be, for all that was given."""
    if subject.reference is not None or (subject.train is not None and subject.in_bag_known):
        return []
    return [
        "Not excluded: members that were trained on a joint loss, which outputs on test data do not always show. "
        + _what_to_bring(subject)
    ]


def _confidence(test: Tally, evidence: list[Evidence]) -> str:
    """How much data there is, and how small an effect would have been seen."""
    few = test.units < FEW_EXAMPLES or test.members < FEW_MEMBERS
    words = f"{'low' if few else 'good'} ({test.members} members, {_amount(test)})"
    for item in evidence:
        if "constant offsets" in item.measure and item.error == item.error:
            least = item.line + 3.5 * item.error
            words += f"; constant offsets are called collusive here from {least:.0%} of members' loss on"
    return words


def _amount(test: Tally) -> str:
    return f"{test.units:,} {'groups' if test.units < test.examples else 'examples'}"


def _doubts(subject: Subject, evidence: list[Evidence], limits: Limits) -> list[str]:
    """What looks odd, and cannot be told apart from luck or from a sound cause by what was given."""
    test, train, reference = subject.test, subject.train, subject.reference
    doubts = [
        f"{item.reason} (p = {item.p:.2g}, where {item.level:.1g} is asked for)" for item in evidence if _near(item)
    ]

    def odd(measure: Callable[[Tally], float]) -> bool:
        """Whether a reference, if there is one, does not look the same."""
        return reference is None or not 0.67 < measure(test) / max(measure(reference), 1e-12) < 1.5

    def offset(tally: Tally) -> float:
        return testing.offsets(tally, limits.offset).value

    def known(tally: Tally) -> float:
        found = testing.known(tally, limits.known)
        return 1.0 if found is None else found.value

    def beside_best(tally: Tally) -> float:
        return testing.best_member(tally, limits.better, limits.better, limits.weak).no_better.value

    share = testing.constant_share(test)
    if not test.hard and offset(test) > limits.some_offset and share > limits.mostly and odd(offset):
        doubts.append(
            f"{share:.0%} of the diversity is constant offsets, {offset(test):.0%} of members' own loss: members that "
            "differ by constants were trained on other populations, or to cancel"
        )
    if known(test) < limits.known and odd(known):
        doubts.append(
            f"even the best member has {max(0.0, known(test)):.0%} of what the ensemble has above guessing: weak "
            "learners by design look so, and members that lean on each other too"
        )
    if beside_best(test) * test.members < 0.5 and odd(beside_best):
        doubts.append(
            f"the ensemble has 1/{1 / max(beside_best(test), 1e-12):.0f} of its best member's error, which "
            f"{test.members} members that err independently do not reach: each knows what the others do not, or "
            "errors cancel"
        )
    apart, gain = testing.unequal(test), testing.gains(test, limits.gain).value
    told = reference is not None or (train is not None and subject.in_bag_known)
    if test.kind == "logits" and apart > limits.unequal and gain > limits.much and not told:
        doubts.append(
            f"members differ widely in quality (their errors by {apart:.0%}), and pooling takes {gain:.0%} off: "
            "networks of one build that were trained alone are alike, those of several builds or that lean on each "
            "other are not"
        )
    owned = (
        None if train is None or train.units < FEWEST else testing.ownership(train, limits.weight, limits.overstated)
    )
    if owned is not None and owned.members >= limits.together and max(owned.weight.p, owned.overstated.p) < 0.01:
        if not subject.in_bag_known:
            doubts.append(
                "members overstate what they say on training data: those that were trained on parts of it do (bagging, "
                "shards, folds), and those that were trained on the ensemble's loss"
            )
        elif test.kind != "probabilities":
            doubts.append(
                "members overstate what they say on training data: those that were trained on the ensemble's loss do, "
                "and those whose training did not settle or minimised another loss"
            )
    return doubts


def _near(item: Evidence) -> bool:
    """Whether a test lies beyond its line, and the data does not suffice to be sure."""
    odd = {COLLUSIVE: 0.25, DOMINATED: 0.05}.get(item.points_to, 0.0)
    if "rotation" in item.measure:  # half of all independent members lie beyond that line
        odd = 0.01
    return item.answer == "not shown" and item.beyond and item.p < odd
