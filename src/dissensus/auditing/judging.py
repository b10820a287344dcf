"""The verdict: the first of a few rules that applies, with its reasons and with advice.

`dissensus study run audit/table-1` measures how often it is right.
"""

from collections.abc import Callable
from typing import NamedTuple

import dissensus.auditing.testing as testing
from dissensus.auditing.evidence import (
    COLLUSIVE,
    DOMINATED,
    FEWEST,
    HEALTHY,
    OFFSETS,
    REDUNDANT,
    ROTATION,
    SKILL,
    UNDECIDED,
    UNSKILLED,
    Audited,
    Evidence,
    TallyTests,
    gather_evidence,
)
from dissensus.auditing.tallying import AuditTally
from dissensus.pages.parts import counted

VERDICTS = (UNSKILLED, COLLUSIVE, DOMINATED, REDUNDANT, UNDECIDED, HEALTHY)
"""In the order in which rules are asked: the first that applies is the verdict."""
FEW_EXAMPLES, FEW_MEMBERS = 200, 5
"""Numbers of examples and members below which confidence is called low."""


class Judgement(NamedTuple):
    """A verdict with its reasons and with advice."""

    verdict: str
    reasons: list[str]
    advice: list[str]
    evidence: tuple[Evidence, ...] = ()
    """Every question that was asked."""
    confidence: str = ""
    """What the amount of data allows to conclude."""


def judge(audited: Audited) -> Judgement:
    """Judge an ensemble. Rules are asked in the order of `VERDICTS`; the first that applies is the verdict."""
    tally = audited.test.tally
    if tally.members < 2:
        return Judgement(UNDECIDED, ["one member has no diversity to judge"], ["Give at least two members."])
    if tally.units < FEWEST:
        return Judgement(
            UNDECIDED,
            [f"{_amount(tally)} {'is' if tally.units == 1 else 'are'} too few to tell"],
            [f"Give at least {FEWEST}."],
        )
    if float(testing.member_error(tally).sum()) == 0:
        return Judgement(
            REDUNDANT, ["no member ever errs, so one is enough"], ["Keep one member, or find harder data."]
        )
    evidence = gather_evidence(audited)
    verdict, reasons, advice = _verdict(audited, evidence)
    return Judgement(verdict, reasons, advice, tuple(evidence), _confidence(tally, evidence))


def _verdict(audited: Audited, evidence: list[Evidence]) -> tuple[str, list[str], list[str]]:
    test = audited.test
    shown = [item for item in evidence if item.answer == "yes"]
    if not any(item.points_to == SKILL for item in shown):
        if testing.is_unskilled(test.skill, len(test.tally.count), *test.limits.no_skill):
            advice = "Check that outputs and targets belong together (order of examples, `kind`, scale)."
            return UNSKILLED, [f"a constant prediction does as well or better: {_skill_in_words(test)}"], [advice]
        why = f"{_amount(test.tally)} cannot show that the ensemble is better than a constant: {_skill_in_words(test)}"
        return UNDECIDED, [why], ["Bring more examples."]
    for verdict, advice in (
        (COLLUSIVE, _what_to_do(shown)),
        (DOMINATED, "Use that member alone, or weigh members by their quality on held-out data."),
        (REDUNDANT, "Keep one member, or train them from other seeds, data or settings."),
    ):
        reasons = [item.reason for item in shown if item.points_to == verdict]
        if reasons:
            return verdict, reasons, [advice]
    doubts = _doubts(audited, evidence)
    if doubts:
        return UNDECIDED, doubts, [_what_to_bring(audited)]
    gain, correlation = test.gain.value, test.error_correlation
    why = (
        f"the ensemble predicts better than a constant, pooling takes {gain:.0%} off the members' error, and no test "
        f"shows that members lean on each other (the correlation of their errors is {correlation:.2f})"
    )
    return HEALTHY, [why], _not_excluded(audited)


def _skill_in_words(test: TallyTests) -> str:
    if test.tally.kind == "values":
        return f"the ensemble explains {max(test.skill['loss'].value, -99.0):.0%} of the variance"
    loss, kappa = 1 - test.skill["loss"].value, test.skill["kappa"].value
    return (
        f"the ensemble's loss is {loss:,.2f} times that of class frequencies alone, and its kappa is {kappa:.2f} (0 is "
        "guessing)"
    )


def _what_to_do(shown: list[Evidence]) -> str:
    accusing = [item for item in shown if item.points_to == COLLUSIVE]
    if accusing and all(OFFSETS in item.measure for item in accusing):
        return (
            "Two causes look like this. Members trained on a joint loss: train each on its own loss, or at a "
            "smaller β. Members trained alone on other populations (sites, label skew): keep them, and correct each "
            "member's offset on data of the population that you predict for. Then audit again."
        )
    return "Train each member on its own loss, or at a smaller β, and audit again: a member must be usable alone."


def _what_to_bring(audited: Audited) -> str:
    missing = []
    if audited.reference is None:
        missing.append("`reference`: outputs of an ensemble of the same build, trained independently")
    if audited.train is None:
        missing.append("`train` with `in_bag`: outputs on training data, and which of it each member was trained on")
    elif not audited.in_bag_known:
        missing.append("`in_bag`: which training examples each member was trained on ('all', or a mask)")
    return f"Bring {', or '.join(missing)}." if missing else "Bring more examples."


def _not_excluded(audited: Audited) -> list[str]:
    """What the data of a healthy ensemble does not rule out."""
    if audited.reference is not None or (audited.train is not None and audited.in_bag_known):
        return []
    return [
        "Joint training is not excluded, since outputs on test data do not always show it. " + _what_to_bring(audited)
    ]


def _confidence(tally: AuditTally, evidence: list[Evidence]) -> str:
    """The amount of data, and the smallest effect that it can show."""
    few = tally.units < FEW_EXAMPLES or tally.members < FEW_MEMBERS
    words = f"{'low' if few else 'good'} ({counted(tally.members, 'member')}, {_amount(tally)})"
    for item in evidence:
        if OFFSETS in item.measure and item.error == item.error:
            least = item.line + 3.5 * item.error
            words += f"; with this data, constant offsets are called collusive from {least:.0%} of members' loss on"
    return words


def _amount(tally: AuditTally) -> str:
    return counted(tally.units, "group" if tally.units < tally.examples else "example")


def _doubts(audited: Audited, evidence: list[Evidence]) -> list[str]:
    """Findings that are unusual, and that this data cannot tell from luck or from a sound cause."""
    test, train, limits = audited.test, audited.train, audited.test.limits
    doubts = [
        f"{item.reason} (p = {item.p:.2g}; to be certain, it must be below {item.level:.1g})"
        for item in evidence
        if _near(item)
    ]

    def unlike_reference(measure: Callable[[TallyTests], float]) -> bool:
        """Whether a reference differs in this measure; True without a reference."""
        if audited.reference is None:
            return True
        return not 0.67 < measure(test) / max(measure(audited.reference), 1e-12) < 1.5

    if _is_mostly_offsets(test) and unlike_reference(lambda tests: tests.offsets.value):
        doubts.append(
            f"{test.constant_share:.0%} of the diversity and {test.offsets.value:.0%} of the members' own loss come "
            "from constant offsets: members were trained on different populations, or so that their offsets cancel"
        )
    if test.best_kappa < limits.known and unlike_reference(lambda tests: tests.best_kappa):
        doubts.append(
            f"even the best member has only {max(0.0, test.best_kappa):.0%} of the ensemble's skill above guessing: "
            "that is normal for weak learners such as small trees, and a sign of collusion for others"
        )
    pool_error = test.best_member.no_better.value
    if pool_error * test.tally.members < 0.5 and unlike_reference(lambda tests: tests.best_member.no_better.value):
        doubts.append(
            f"the ensemble has 1/{1 / max(pool_error, 1e-12):,.0f} of its best member's error, less than "
            f"{test.tally.members} members with independent errors would reach: each member knows what the others do "
            "not, or their errors cancel"
        )
    spread, gain = testing.quality_spread(test.tally), test.gain.value
    informed = audited.reference is not None or (train is not None and audited.in_bag_known)
    if test.tally.kind == "logits" and spread > limits.unequal and gain > limits.much and not informed:
        doubts.append(
            f"members differ widely in quality (their errors by {spread:.0%}), and pooling takes {gain:.0%} off: that "
            "is usual for networks of several architectures, but not for equal ones that were trained alone"
        )
    ownership = None if train is None else train.ownership
    if ownership is not None and ownership.members >= limits.together and _is_overstated(ownership):
        if not audited.in_bag_known:
            doubts.append(
                "members' outputs on training data are too large: members were trained on parts of it (bagging, "
                "shards, folds), or on the ensemble's loss"
            )
        elif test.tally.kind != "probabilities":
            doubts.append(
                "members' outputs on training data are too large: members were trained on the ensemble's loss, or "
                "their training did not converge or minimised another loss"
            )
    return doubts


def _is_mostly_offsets(test: TallyTests) -> bool:
    large = not test.tally.hard and test.offsets.value > test.limits.some_offset
    return large and test.constant_share > test.limits.mostly


def _is_overstated(ownership: testing.Ownership) -> bool:
    return max(ownership.weight.p, ownership.overstated.p) < 0.01


def _near(item: Evidence) -> bool:
    """Whether a test lies beyond its line, and the data does not suffice to be certain."""
    largest_p = {COLLUSIVE: 0.25, DOMINATED: 0.05}.get(item.points_to, 0.0)
    if ROTATION in item.measure:  # half of all independent members lie beyond that line
        largest_p = 0.01
    return item.answer == "not shown" and item.beyond and item.p < largest_p
