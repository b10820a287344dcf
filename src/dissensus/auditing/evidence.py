"""The questions that an audit asks: each is a test with its line, its level and the words for a yes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import dissensus.auditing.testing as testing
from dissensus.auditing.limits import LIMITS, Limits
from dissensus.auditing.tallying import AuditTally
from dissensus.auditing.testing import Test
from dissensus.pages.parts import significant

UNSKILLED, COLLUSIVE, DOMINATED = "unskilled", "collusive", "dominated"
REDUNDANT, UNDECIDED, HEALTHY = "redundant", "undecided", "healthy"
FEWEST = 20
"""Smallest number of examples (or groups of them) that is judged."""
SKILL = "skill"
"""What a test points to that shows an ensemble to be better than a constant."""
OFFSETS, ROTATION = "constant offsets", "rotation test"
"""Words in the measures of two tests, by which rules find them."""


class Evidence(NamedTuple):
    """A question of the audit and its answer."""

    question: str
    measure: str
    """The number that was tested."""
    points_to: str
    """The verdict that a yes supports, or `SKILL`."""
    answer: str
    """``"yes"``, ``"not shown"``, or ``"open"`` where it cannot be tested."""
    value: float
    line: float
    above: bool
    """Whether a yes lies above the line."""
    error: float
    """Standard error of the value; NaN where it has none."""
    p: float
    """Probability of a value this far beyond the line if the truth lies on it."""
    level: float
    """How small `p` must be for a yes."""
    reason: str
    """Meaning of a yes, in words with numbers."""

    @property
    def beyond(self) -> bool:
        """Whether the value lies on the side of the line where a yes lies, at any p."""
        return self.value > self.line if self.above else self.value < self.line

    def numbers(self) -> str:
        """The value, its standard error, the line and the p-value."""
        spread = "" if math.isnan(self.error) else f" ± {significant(self.error, 2)}"
        line = f"yes if {'above' if self.above else 'below'} {significant(self.line)}"
        if math.isnan(self.p):
            return f"{significant(self.value)}{spread}, not tested ({line})"
        return f"{significant(self.value)}{spread}, p = {self.p:.2g} ({line} and p < {self.level:.2g})"


@dataclass(frozen=True)
class TallyTests:
    """Tests of one tally. Each is computed when it is first used, and kept for the rules that use it again."""

    tally: AuditTally
    limits: Limits = LIMITS

    @cached_property
    def skill(self) -> dict[str, Test]:
        """See `testing.skill`."""
        return testing.skill(self.tally)

    @cached_property
    def offsets(self) -> Test:
        """See `testing.constant_offsets`."""
        return testing.constant_offsets(self.tally, self.limits.offset)

    @cached_property
    def constant_share(self) -> float:
        """See `testing.constant_share`."""
        return testing.constant_share(self.tally)

    @cached_property
    def best_member(self) -> testing.BestMember:
        """See `testing.best_member`."""
        return testing.best_member(self.tally, self.limits.better, self.limits.better, self.limits.weak)

    @cached_property
    def best_kappa(self) -> float:
        """See `testing.best_kappa`; 1 for regression."""
        test = testing.best_kappa(self.tally, self.limits.known)
        return 1.0 if test is None else test.value

    @cached_property
    def gain(self) -> Test:
        """See `testing.pooling_gain`."""
        return testing.pooling_gain(self.tally, self.limits.gain)

    @cached_property
    def error_correlation(self) -> float:
        """See `testing.error_correlation`."""
        return testing.error_correlation(self.tally)

    @cached_property
    def ownership(self) -> testing.Ownership | None:
        """See `testing.ownership`; None for outputs that are too few or not of training data."""
        if self.tally.units < FEWEST:
            return None
        return testing.ownership(self.tally, self.limits.weight, self.limits.overstated)


@dataclass(frozen=True)
class Audited:
    """What is judged: outputs on test data, and what is known beside them."""

    test: TallyTests
    train: TallyTests | None = None
    reference: TallyTests | None = None
    in_bag_known: bool = False
    """Whether the user stated which training examples each member was trained on."""
    trained_on_all: bool = False
    """Whether the user stated that all members were trained on all of them."""


def gather_evidence(audited: Audited) -> list[Evidence]:
    """Every question that can be asked of these outputs."""
    test = audited.test
    dominance = _dominance(test)
    dominated = any(item.answer == "yes" for item in dominance)
    return [*_skill(test), *_collusion(audited, dominated), *dominance, _redundancy(test)]


def _answer(question: str, measure: str, points_to: str, test: Test, level: float, reason: str) -> Evidence:
    answer = "open" if math.isnan(test.p) else "yes" if test.p < level else "not shown"
    return Evidence(
        question, measure, points_to, answer, test.value, test.line, test.above, test.error, test.p, level, reason
    )


def _ruled_out(test: Test) -> Test:
    """A test whose other conditions do not hold."""
    return test._replace(p=1.0)


def _both(first: Test, second: Test) -> float:
    """The p-value of two statements that must both hold."""
    return math.nan if math.isnan(first.p) or math.isnan(second.p) else max(first.p, second.p)


def _skill(test: TallyTests) -> list[Evidence]:
    words = {
        "loss": ("Does the ensemble lose less than the best constant prediction?", "share of its loss saved"),
        "brier": ("Is its Brier score better than the best constant's?", "share of its Brier score saved"),
        "kappa": ("Is it right more often than guesses with the same frequencies?", "kappa"),
    }
    level = test.limits.level / len(test.skill)
    return [
        _answer(*words[name], SKILL, result, level, f"{words[name][1]}: {result.value:.2f}")
        for name, result in test.skill.items()
    ]


def _collusion(audited: Audited, dominated: bool) -> list[Evidence]:
    """Tests for members that lean on each other. All together accuse a sound ensemble at `limits.collusive_level`."""
    test, train, reference = audited.test, audited.train, audited.reference
    questions: list[Callable[[float], Evidence]] = [lambda level: _rotation(test.tally, "test", level)]
    if not test.tally.hard:
        questions.append(lambda level: _offsets(test, level, dominated))
    if train is not None and train.tally.units >= FEWEST:
        questions += [
            lambda level: _rotation(train.tally, "training", level),
            lambda level: _gap(test, train.tally, level, audited.trained_on_all),
        ]
        ownership = train.ownership
        if audited.in_bag_known and ownership is not None and test.tally.kind != "probabilities":
            questions.append(lambda level: _ownership(ownership, test.limits, level))
    if reference is not None:
        questions.append(lambda level: _comparison(test, reference.tally, level))
    return [ask(test.limits.collusive_level / len(questions)) for ask in questions]


def _rotation(tally: AuditTally, data: str, level: float) -> Evidence:
    result = testing.cancellation(tally)
    times, independent = (tally.members - 1) / max(result.value, 1e-12), tally.members - 1
    return _answer(
        f"Do errors on {data} data cancel more than independent errors do by chance?",
        f"(M − 1) × error / diversity on {data} data, {ROTATION}",
        COLLUSIVE,
        result,
        level,
        f"members' errors on {data} data cancel: diversity is {significant(times)} times the ensemble's error, where "
        f"independent errors would give M − 1 = {independent}",
    )


def _offsets(test: TallyTests, level: float, dominated: bool) -> Evidence:
    result, tally = test.offsets, test.tally
    where = "logits" if tally.pool == "score" and tally.kind != "values" else "predictions"
    return _answer(
        "Do constant offsets that cancel in the ensemble make up much of members' loss?",
        f"share of members' loss that is {OFFSETS} of their {where}",
        COLLUSIVE,
        _ruled_out(result) if dominated else result,  # one member is as good as the pool: only the others are off
        level,
        f"{result.value:.0%} of the members' own loss comes from {OFFSETS} of their {where}, which cancel in the "
        "ensemble",
    )


def _ownership(ownership: testing.Ownership, limits: Limits, level: float) -> Evidence:
    tested = ownership.members >= limits.together and ownership.pool <= limits.settled
    weight = ownership.weight._replace(p=_both(ownership.weight, ownership.overstated))
    return _answer(
        "Were members trained on the ensemble's loss rather than their own?",
        "weight of the ensemble's loss, as the scale of training outputs reveals it",
        COLLUSIVE,
        weight if tested else _ruled_out(weight),
        level,
        "on training data the ensemble's loss is at its minimum and the members' losses are not, as after joint "
        f"training: the ensemble's loss had an estimated weight of {min(weight.value, 1.0):.2f} (0 for members trained "
        f"alone), and scaling each member's outputs down would save {ownership.overstated.value:.0%} of its loss",
    )


def _gap(test: TallyTests, train: AuditTally, level: float, trained_on_all: bool) -> Evidence:
    share, gap = testing.pool_gap(test.tally, train, test.limits.leaning[0 if trained_on_all else 1], test.limits.gap)
    usual = "close to 0%" if trained_on_all else "at most 50%"
    return _answer(
        "Does the ensemble fit training data that no member fits?",
        "share of the ensemble's generalisation gap that no member has",
        COLLUSIVE,
        share._replace(p=_both(share, gap)),
        level,
        f"the ensemble fits its training data (its error is {significant(gap.value)} times as large on test data) but "
        f"no member does: {min(share.value, 1.0):.0%} of that gap appears only when members are pooled, where members "
        f"that were trained alone show {usual}",
    )


def _comparison(test: TallyTests, reference: AuditTally, level: float) -> Evidence:
    limits = test.limits
    result = testing.compare_with_reference(test.tally, reference, limits.worse)
    worth_it = result.pool.p < 0.05 and result.pool.value < limits.paid
    tested = result.cancels > limits.cancels and not worth_it
    return _answer(
        "Are members worse than a reference's, although their ensemble is no better?",
        "members' error over the reference's",
        COLLUSIVE,
        result.members if tested else _ruled_out(result.members),
        level,
        f"members err {result.members.value:,.2f} times as much as the reference's members, "
        f"{min(result.cancels, 1.0):.0%} of the additional error cancels when they are pooled, and the ensemble is no "
        f"better than the reference (its error is {result.pool.value:,.2f} times the reference's)",
    )


def _dominance(test: TallyTests) -> list[Evidence]:
    best, limits = test.best_member, test.limits
    less_often_right = best.accuracy is not None and best.accuracy.p > 0.99
    questions = [
        _answer(
            "Does the best member lose less than the ensemble?",
            "its loss over the ensemble's (it is chosen on other examples)",
            DOMINATED,
            _ruled_out(best.loss) if less_often_right else best.loss,
            limits.level,
            f"the best member alone has {best.loss.value:,.2f} times the loss of the whole ensemble",
        )
    ]
    if best.accuracy is not None:
        questions.append(
            _answer(
                "Is the best member right more often than the ensemble?",
                "its accuracy less the ensemble's (it is chosen on other examples)",
                DOMINATED,
                _ruled_out(best.accuracy) if best.loss.value > 1 / limits.better else best.accuracy,
                limits.level,
                "the best member alone is right more often than the ensemble, by "
                f"{100 * best.accuracy.value:.1f} points",
            )
        )
    questions.append(
        _answer(
            "Does the ensemble add nothing to its best member, while the others are far worse?",
            "the others' error over the best member's, where the ensemble is no better than the best",
            DOMINATED,
            best.others._replace(p=_both(best.no_better, best.others)),
            limits.level,
            f"the ensemble is no better than its best member (its error is {best.no_better.value:,.2f} times the "
            f"best's), and the others have {best.others.value:,.1f} times the best's error",
        )
    )
    return questions


def _redundancy(test: TallyTests) -> Evidence:
    return _answer(
        "Does pooling gain next to nothing?",
        "share of members' error that pooling takes off",
        REDUNDANT,
        test.gain,
        test.limits.redundant_level,
        f"pooling takes only {test.gain.value:.1%} off the members' error, since members make nearly the same errors "
        f"(their correlation is {test.error_correlation:.2f})",
    )


def as_json(item: Evidence) -> dict[str, Any]:
    """A question and its answer, with null for numbers that are not finite."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in item._asdict().items()
    }
