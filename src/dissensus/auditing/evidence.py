"""The questions that an audit asks: each is one test, with its line, its size and what a yes says in words."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import dissensus.auditing.testing as testing
from dissensus.auditing.tallying import Tally
from dissensus.auditing.testing import Test

UNSKILLED, COLLUSIVE, DOMINATED = "unskilled", "collusive", "dominated"
REDUNDANT, UNDECIDED, HEALTHY = "redundant", "undecided", "healthy"
FEWEST = 20
"""Examples (or groups of them) below which nothing is judged."""
SKILL = "skill"
"""What a test points to that shows an ensemble to be better than a constant."""


class Limits(NamedTuple):
    """Where the rules draw their lines, and how sure they must be."""

    collusive_level: float = 0.001
    """The chance of calling a sound ensemble collusive, over all tests together."""
    level: float = 0.001
    """The size of each test for dominated, and of all tests of skill together."""
    redundant_level: float = 0.01
    """The size of the test for redundant."""
    no_skill: tuple[float, float] = (0.05, 0.1)
    """The share of a constant's loss that is saved, and the kappa, below which an ensemble has no skill."""
    gain: float = 0.03
    """Pooling takes less than this share off the members' error: they say the same."""
    offset: float = 0.25
    """Constant offsets that cancel in the pool make up this share of members' own loss."""
    some_offset: float = 0.1
    """This share leaves the verdict open, where diversity is mostly such offsets."""
    mostly: float = 0.5
    """The share of diversity that "mostly" means."""
    weight: float = 0.75
    """The weight of the pool's loss in what members were trained on, as training outputs reveal it."""
    together: float = 0.8
    """The share of members that overstate what they say on training data, at least."""
    settled: float = 0.03
    """The share of the pool's own training loss that scaling each member would take off, at most: it is at its
    minimum."""
    overstated: float = 0.35
    """The share of members' own training loss that scaling their outputs down would take off."""
    leaning: tuple[float, float] = (0.35, 0.65)
    """The share of the pool's generalisation gap that no member has: where all members have seen all training data, and
    where they may have seen parts of it."""
    gap: float = 0.05
    """The logarithm of the least generalisation gap that says anything."""
    worse: float = 1.2
    """Members' error over that of a reference's members."""
    cancels: float = 0.4
    """Of what members err more than the reference's, the least share that cancels in the pool."""
    paid: float = 0.9
    """The pool's error over the reference's, at most, for worse members to have been worth it."""
    better: float = 0.98
    """The best member's loss over the pool's, at most, for it to be better."""
    weak: float = 1.25
    """The other members' error over the best member's, at least, where the pool is no better than the best."""
    unequal: float = 0.2
    """How much networks' errors differ (standard deviation over mean) before it is odd, where pooling gains much."""
    much: float = 0.35
    """The gain of pooling that "much" means there."""
    known: float = 0.55
    """The best member's share of the ensemble's kappa below which members know little by themselves."""


LIMITS = Limits()


class Evidence(NamedTuple):
    """One question that the audit asked, and its answer."""

    question: str
    measure: str
    """The number that was tested."""
    points_to: str
    """The verdict that a yes speaks for, or `SKILL`."""
    answer: str
    """``"yes"``, ``"not shown"``, or ``"open"`` where it cannot be tested."""
    value: float
    line: float
    above: bool
    """Whether a yes lies above the line."""
    error: float
    """The value's standard error; NaN where it has none."""
    p: float
    """The chance of a value so far beyond the line if the truth lies on it."""
    level: float
    """How small `p` must be for a yes."""
    reason: str
    """What a yes says, in words with numbers."""

    @property
    def beyond(self) -> bool:
        """Whether the value lies on the side of the line that a yes asks for, however sure that is."""
        return self.value > self.line if self.above else self.value < self.line

    def numbers(self) -> str:
        """The value, its error, the line and how sure the answer is."""
        spread = "" if math.isnan(self.error) else f" ± {self.error:.2g}"
        line = f"a yes is {'above' if self.above else 'below'} {self.line:.3g}"
        if math.isnan(self.p):
            return f"{self.value:.3g}{spread}; {line}; not tested"
        return f"{self.value:.3g}{spread}; {line}, with p below {self.level:.2g}; p = {self.p:.2g}"


class Subject(NamedTuple):
    """What is judged: outputs on test data, and what is known beside them."""

    test: Tally
    train: Tally | None = None
    reference: Tally | None = None
    in_bag_known: bool = False
    """Whether it was said which training examples each member was trained on."""
    seen_all: bool = False
    """Whether it was said that all members were trained on all of them."""


def gathered(subject: Subject, limits: Limits) -> list[Evidence]:
    """Every question that can be asked of what was given."""
    test = subject.test
    dominance = _dominance(test, limits)
    carried = any(item.answer == "yes" for item in dominance)
    return [*_skill(test, limits), *_collusion(subject, limits, carried), *dominance, _redundancy(test, limits)]


def _asked(question: str, measure: str, points_to: str, found: Test, level: float, reason: str) -> Evidence:
    answer = "open" if math.isnan(found.p) else "yes" if found.p < level else "not shown"
    return Evidence(
        question, measure, points_to, answer, found.value, found.line, found.above, found.error, found.p, level, reason
    )


def _ruled_out(found: Test) -> Test:
    """A test whose other conditions do not hold."""
    return found._replace(p=1.0)


def _both(one: Test, other: Test) -> float:
    """The p-value of two things that must both hold."""
    return math.nan if math.isnan(one.p) or math.isnan(other.p) else max(one.p, other.p)


def _skill(test: Tally, limits: Limits) -> list[Evidence]:
    words = {
        "loss": ("Does the ensemble lose less than the best constant prediction?", "share of its loss saved"),
        "brier": ("Is its Brier score better than the best constant's?", "share of its Brier score saved"),
        "kappa": ("Is it right more often than guesses as frequent?", "kappa"),
    }
    tests = testing.skill(test)
    return [
        _asked(*words[name], SKILL, found, limits.level / len(tests), f"{words[name][1]}: {found.value:.2f}")
        for name, found in tests.items()
    ]


def _collusion(subject: Subject, limits: Limits, carried: bool) -> list[Evidence]:
    """Tests of members that lean on each other; together they accuse a sound ensemble at `limits.collusive_level`."""
    test, train, reference = subject.test, subject.train, subject.reference
    questions: list[Callable[[float], Evidence]] = [lambda level: _rotation(test, "test", level)]
    if not test.hard:
        questions.append(lambda level: _offsets(test, limits, level, carried))
    if train is not None and train.units >= FEWEST:
        questions += [
            lambda level: _rotation(train, "training", level),
            lambda level: _leaning(test, train, limits, level, subject.seen_all),
        ]
        owned = testing.ownership(train, limits.weight, limits.overstated)
        if subject.in_bag_known and owned is not None and test.kind != "probabilities":
            questions.append(lambda level: _ownership(owned, limits, level))
    if reference is not None:
        questions.append(lambda level: _against(test, reference, limits, level))
    return [ask(limits.collusive_level / len(questions)) for ask in questions]


def _rotation(tally: Tally, data: str, level: float) -> Evidence:
    found = testing.cancelling(tally)
    times, independent = (tally.members - 1) / max(found.value, 1e-12), tally.members - 1
    return _asked(
        f"Do errors on {data} data cancel more than independent errors do by chance?",
        f"(M − 1) × error / diversity on {data} data, rotation test",
        COLLUSIVE,
        found,
        level,
        f"members' errors on {data} data cancel: diversity is {times:.3g} times the ensemble's error, where "
        f"independent errors would give M − 1 = {independent}",
    )


def _offsets(test: Tally, limits: Limits, level: float, carried: bool) -> Evidence:
    found = testing.offsets(test, limits.offset)
    where = "logits" if test.pool == "score" and test.kind != "values" else "predictions"
    return _asked(
        "Do constant offsets that cancel in the ensemble make up much of members' loss?",
        f"share of members' loss that is constant offsets of their {where}",
        COLLUSIVE,
        _ruled_out(found) if carried else found,  # one member is as good as the pool: it is the others that are off
        level,
        f"{found.value:.0%} of members' own loss is constant offsets of their {where}, which cancel in the ensemble",
    )


def _ownership(owned: testing.Ownership, limits: Limits, level: float) -> Evidence:
    tested = owned.members >= limits.together and owned.pool <= limits.settled
    weight = owned.weight._replace(p=_both(owned.weight, owned.overstated))
    return _asked(
        "Were members trained on the ensemble's loss rather than their own?",
        "weight of the ensemble's loss, as the scale of training outputs reveals it",
        COLLUSIVE,
        weight if tested else _ruled_out(weight),
        level,
        "on training data the ensemble's loss is at its minimum, and members' own is not, as after joint training: the "
        f"weight that this reveals is {min(weight.value, 1.0):.2f} (0 for members trained alone), and scaling each "
        f"member's outputs down would take {owned.overstated.value:.0%} off its own training loss",
    )


def _leaning(test: Tally, train: Tally, limits: Limits, level: float, seen_all: bool) -> Evidence:
    share, gap = testing.leaning(test, train, limits.leaning[0 if seen_all else 1], limits.gap)
    usual = "next to none" if seen_all else "at most half"
    return _asked(
        "Does the ensemble fit training data that no member fits?",
        "share of the ensemble's generalisation gap that no member has",
        COLLUSIVE,
        share._replace(p=_both(share, gap)),
        level,
        f"the ensemble fits its training data (its error is {gap.value:.3g} times as large on test data) and no member "
        f"does: {min(share.value, 1.0):.0%} of that gap is the ensemble's alone, where members trained alone leave "
        f"{usual}",
    )


def _against(test: Tally, reference: Tally, limits: Limits, level: float) -> Evidence:
    found = testing.against(test, reference, limits.worse)
    paid = found.pool.p < 0.05 and found.pool.value < limits.paid
    tested = found.cancels > limits.cancels and not paid
    return _asked(
        "Are members worse than a reference's, for errors that cancel and an ensemble that is no better?",
        "members' error over the reference's",
        COLLUSIVE,
        found.members if tested else _ruled_out(found.members),
        level,
        f"members have {found.members.value:.2f} times the error of the reference's, {min(found.cancels, 1.0):.0%} of "
        f"what they err more cancels in the ensemble, and the ensemble is not better for it ({found.pool.value:.2f} "
        "times the reference's error)",
    )


def _dominance(test: Tally, limits: Limits) -> list[Evidence]:
    best = testing.best_member(test, limits.better, limits.better, limits.weak)
    less_often_right = best.accuracy is not None and best.accuracy.p > 0.99
    found = [
        _asked(
            "Does the best member lose less than the ensemble?",
            "its loss over the ensemble's (it is chosen on other examples)",
            DOMINATED,
            _ruled_out(best.loss) if less_often_right else best.loss,
            limits.level,
            f"the best member alone has {best.loss.value:.2f} times the loss of the whole ensemble",
        )
    ]
    if best.accuracy is not None:
        found.append(
            _asked(
                "Is the best member right more often than the ensemble?",
                "its accuracy less the ensemble's (it is chosen on other examples)",
                DOMINATED,
                _ruled_out(best.accuracy) if best.loss.value > 1 / limits.better else best.accuracy,
                limits.level,
                "the best member alone is right more often than the ensemble, by "
                f"{100 * best.accuracy.value:.1f} points",
            )
        )
    found.append(
        _asked(
            "Does the ensemble add nothing to its best member, while the others are far worse?",
            "the others' error over the best member's, where the ensemble is no better than the best",
            DOMINATED,
            best.others._replace(p=_both(best.no_better, best.others)),
            limits.level,
            f"the ensemble is no better than its best member (its error is {best.no_better.value:.2f} times the "
            f"best's), and the others have {best.others.value:.1f} times the best's error",
        )
    )
    return found


def _redundancy(test: Tally, limits: Limits) -> Evidence:
    found = testing.gains(test, limits.gain)
    return _asked(
        "Does pooling gain next to nothing?",
        "share of members' error that pooling takes off",
        REDUNDANT,
        found,
        limits.redundant_level,
        f"pooling takes {found.value:.1%} off the members' error (their errors have a correlation of "
        f"{testing.error_correlation(test):.2f}): they say the same",
    )


def as_json(item: Evidence) -> dict[str, Any]:
    """A question and its answer, with null for numbers that are none."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in item._asdict().items()
    }
