"""The verdict: a few rules on tests with stated sizes; `dissensus study run audit/table-1` asks how often they are right."""

import math
from collections.abc import Callable
from typing import NamedTuple

import dissensus.auditing.testing as testing
from dissensus.auditing.tallying import Tally
from dissensus.auditing.testing import Test

UNSKILLED, COLLUSIVE, DOMINATED = "unskilled", "collusive", "dominated"
REDUNDANT, UNDECIDED, HEALTHY = "redundant", "undecided", "healthy"
VERDICTS = (UNSKILLED, COLLUSIVE, DOMINATED, REDUNDANT, UNDECIDED, HEALTHY)
"""In the order in which rules are asked: the first that applies is the verdict."""
FEWEST = 20
"""Examples (or groups of them) below which nothing is judged."""
FEW_EXAMPLES, FEW_MEMBERS = 200, 5
"""Counts below which confidence is called low."""


class Limits(NamedTuple):
    """Where the rules draw their lines, and how sure they must be."""

    collusive_level: float = 0.001
    """The chance of calling a sound ensemble collusive, over all tests together."""
    level: float = 0.001
    """The size of each test for dominated, and for skill."""
    redundant_level: float = 0.01
    """The size of the test for redundant."""
    no_skill: tuple[float, float] = (0.05, 0.1)
    """The share of a constant's loss that is saved, and the kappa, below which an ensemble has no skill."""
    gain: float = 0.03
    """Pooling takes less than this share off the members' error: they say the same."""
    offset: float = 0.25
    """Constant offsets that cancel in the pool make up this share of members' own loss."""
    some_offset: float = 0.1
    """… and this share is told, and leaves the verdict open, where diversity is mostly such offsets."""
    mostly: float = 0.5
    """The share of diversity that "mostly" means."""
    weight: float = 0.75
    """The weight of the pool's loss in what members were trained on, as training outputs reveal it."""
    overstated: float = 0.1
    """The share of members' own training loss that scaling their outputs down would take off."""
    leaning: float = 0.65
    """The share of the pool's generalisation gap that no member has."""
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
    """How much members' errors differ (standard deviation over mean) before it is odd, where pooling gains much."""
    much: float = 0.35
    """The gain of pooling that "much" means there."""
    known: float = 0.4
    """The best member's share of the ensemble's kappa below which members know little by themselves."""


LIMITS = Limits()


class Evidence(NamedTuple):
    """One question that the audit asked, and its answer."""

    question: str
    test: str
    """How it was asked."""
    points_to: str
    """The verdict that a yes gives."""
    answer: str
    """``"yes"``, ``"no"``, or ``"open"``."""
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

    def sentence(self) -> str:
        """The test with its numbers: what was asked, the value, the line, how sure."""
        side = "above" if self.above else "below"
        sure = (
            f"p = {self.p:.2g}, below {self.level:.2g} for a yes" if not math.isnan(self.p) else "cannot be tested here"
        )
        spread = f" ± {self.error:.2g}" if not math.isnan(self.error) else ""
        return f"{self.question} {self.answer}. {self.test}: {self.value:.3g}{spread}; the line is {side} {self.line:.3g} ({sure})."


class Judgement(NamedTuple):
    """A verdict, why, and what would tell more."""

    verdict: str
    reasons: list[str]
    advice: list[str]
    evidence: list[Evidence] = []
    """Every question that was asked."""
    confidence: str = ""
    """How much the amount of data allows to be said."""


class Subject(NamedTuple):
    """What is judged: outputs on test data, and what is known beside them."""

    test: Tally
    train: Tally | None = None
    reference: Tally | None = None
    in_bag_known: bool = False
    """Whether it was said which training examples each member was trained on."""


def judged(subject: Subject, limits: Limits = LIMITS) -> Judgement:
    """Judge an ensemble. Rules are asked in the order of `VERDICTS`; the first that applies is the verdict."""
    test = subject.test
    if test.members < 2:
        return Judgement(UNDECIDED, ["one member has no diversity to judge"], ["Give at least two members."])
    if test.units < FEWEST:
        what = "groups" if test.units < test.examples else "examples"
        return Judgement(UNDECIDED, [f"{test.units} {what} are too few to tell"], [f"Give at least {FEWEST}."])
    if float(testing.own_error(test).sum()) == 0:
        return Judgement(REDUNDANT, ["no member ever errs: one would do"], ["Keep one member, or find harder data."])
    evidence = [*_skill(test, limits), *_collusion(subject, limits), *_dominance(test, limits), _copies(test, limits)]
    doubts = _doubts(subject, evidence, limits)
    verdict, reasons, advice = _verdict(subject, evidence, doubts, limits)
    return Judgement(verdict, reasons, advice, evidence, _confidence(test, evidence, limits))


def _verdict(
    subject: Subject, evidence: list[Evidence], doubts: list[str], limits: Limits
) -> tuple[str, list[str], list[str]]:
    test = subject.test
    skilled = any(item.answer == "yes" for item in evidence if item.points_to == "skill")
    if not skilled and testing.small_skill(test, *limits.no_skill):
        return UNSKILLED, [_no_skill(test)], [
            "Check that outputs and targets belong together (order of examples, `kind`, scale), then train better members."
        ]  # fmt: skip
    if not skilled:
        why = f"{_no_skill(test, shown=False)}, and {test.units:,} examples cannot show that this is more than luck"
        return UNDECIDED, [why], ["Bring more examples."]
    shown = {
        verdict: [e.reason for e in evidence if e.points_to == verdict and e.answer == "yes"] for verdict in VERDICTS
    }
    if shown[COLLUSIVE]:
        return COLLUSIVE, shown[COLLUSIVE], [_what_to_do(evidence)]
    if shown[DOMINATED]:
        return (
            DOMINATED,
            shown[DOMINATED],
            ["Use that member alone, or weigh members by their quality on held-out data."],
        )
    if shown[REDUNDANT]:
        return REDUNDANT, shown[REDUNDANT], ["Keep one member, or train them from other seeds, data or settings."]
    if doubts:
        return UNDECIDED, doubts, [_what_to_bring(subject)]
    return HEALTHY, _sound(test), _not_excluded(subject)


def _skill(test: Tally, limits: Limits) -> list[Evidence]:
    words = {
        "loss": (
            "Does the ensemble lose less than the best constant prediction?",
            "share of the constant's loss that it saves",
        ),
        "brier": (
            "Is its Brier score better than the best constant's?",
            "share of the constant's Brier score that it saves",
        ),
        "kappa": ("Is it right more often than guesses as frequent?", "kappa"),
    }
    return [
        _asked(*words[name], "skill", found, limits.level / 3, f"{words[name][1]} is {found.value:.2f}")
        for name, found in testing.skill(test).items()
    ]


def _collusion(subject: Subject, limits: Limits) -> list[Evidence]:
    """Tests of members that lean on each other; together they call a sound ensemble so at `limits.collusive_level`."""
    test, train, reference = subject.test, subject.train, subject.reference
    asked: list[Callable[[float], Evidence]] = [lambda level: _rotation(test, "test", level)]
    if not test.hard:
        asked.append(lambda level: _offsets(test, limits, level))
    if train is not None:
        asked.append(lambda level: _rotation(train, "training", level))
        if subject.in_bag_known and testing.ownership(train, limits.weight, limits.overstated) is not None:
            asked.append(lambda level: _ownership(train, limits, level))
        asked.append(lambda level: _leaning(test, train, limits, level))
    if reference is not None:
        asked.append(lambda level: _against(test, reference, limits, level))
    return [ask(limits.collusive_level / len(asked)) for ask in asked]


def _rotation(tally: Tally, data: str, level: float) -> Evidence:
    found = testing.cancelling(tally)
    return _asked(
        f"Do errors on {data} data cancel more than independent errors do by chance?",
        f"rotation test; (M − 1) × error / diversity on {data} data", COLLUSIVE, found, level,
        f"members' errors on {data} data cancel: diversity is {(tally.members - 1) / max(found.value, 1e-12):.3g} times "
        f"the pool's error, where independent errors would give M − 1 = {tally.members - 1} (rotation test, p = {found.p:.1g})",
    )  # fmt: skip


def _offsets(test: Tally, limits: Limits, level: float) -> Evidence:
    found = testing.offsets(test, limits.offset)
    if any(item.answer == "yes" for item in _dominance(test, limits)):
        found = found._replace(p=math.nan)  # a member is as good as the pool: it is the others that are off
    where = "logits" if test.pool == "score" and test.kind != "values" else "predictions"
    return _asked(
        "Do constant offsets that cancel in the pool make up much of members' loss?",
        f"share of members' loss that is constant offsets of their {where}", COLLUSIVE, found, level,
        f"{found.value:.0%} of members' own loss is constant offsets of their {where}, which cancel in the pool",
    )  # fmt: skip


def _ownership(train: Tally, limits: Limits, level: float) -> Evidence:
    found = testing.ownership(train, limits.weight, limits.overstated)
    assert found is not None
    weight, overstated = found
    # Both must hold; the larger p-value is the p-value of both.
    p = max(weight.p, overstated.p)
    return _asked(
        "Were members trained on the pool's loss rather than their own?",
        "weight of the pool's loss, as the scale of training outputs reveals it", COLLUSIVE, weight._replace(p=p), level,
        f"on training data it is the pool's loss that is at its minimum, not members': its weight in what they were "
        f"trained on is {min(weight.value, 1.0):.2f} (0 for members trained alone), and scaling each member's outputs "
        f"down would take {overstated.value:.0%} off its own training loss",
    )  # fmt: skip


def _leaning(test: Tally, train: Tally, limits: Limits, level: float) -> Evidence:
    share, gap = testing.leaning(test, train, limits.leaning, limits.gap)
    p = max(share.p, gap.p) if not (math.isnan(share.p) or math.isnan(gap.p)) else math.nan
    return _asked(
        "Does the pool fit training data that no member fits?",
        "share of the pool's generalisation gap that no member has", COLLUSIVE, share._replace(p=p), level,
        f"the pool fits its training data (its error is {gap.value:.1f} times as large on test data) and no member does: "
        f"{min(share.value, 1.0):.0%} of that gap is the pool's alone, where members trained alone leave at most half",
    )  # fmt: skip


def _against(test: Tally, reference: Tally, limits: Limits, level: float) -> Evidence:
    found = testing.against(test, reference, limits.worse)
    paid = found.pool.p < 0.05 and found.pool.value < limits.paid  # the ensemble is better for it
    cancels = found.cancels > limits.cancels
    p = found.members.p if cancels and not paid else math.nan
    return _asked(
        "Are members worse than a reference's, for errors that cancel and a pool that is no better?",
        "members' error over the reference's", COLLUSIVE, found.members._replace(p=p), level,
        f"members have {found.members.value:.2f} times the error of the reference's, {min(found.cancels, 1.0):.0%} of what "
        f"they err more cancels in the pool, and the pool is no better for it ({found.pool.value:.2f} times the "
        "reference's error)",
    )  # fmt: skip


def _dominance(test: Tally, limits: Limits) -> list[Evidence]:
    found = testing.best_member(test, limits.better, limits.better, limits.weak)
    worse_by_accuracy = found.accuracy is not None and found.accuracy.p > 0.99
    by_loss = found.loss._replace(p=math.nan) if worse_by_accuracy else found.loss
    asked = [_asked(
        "Does the best member lose less than the pool?", "its loss over the pool's (it is chosen on other examples)",
        DOMINATED, by_loss, limits.level,
        f"the best member alone has {found.loss.value:.2f} times the loss of the whole ensemble",
    )]  # fmt: skip
    if found.accuracy is not None:
        by_accuracy = found.accuracy._replace(p=math.nan) if found.loss.value > 1 / limits.better else found.accuracy
        asked.append(_asked(
            "Is the best member right more often than the pool?", "its accuracy less the pool's", DOMINATED, by_accuracy,
            limits.level, f"the best member alone is right {found.accuracy.value:.1%} more often than the whole ensemble",
        ))  # fmt: skip
    p = max(found.no_better.p, found.others.p)
    asked.append(_asked(
        "Does the pool add nothing to its best member, while the others are far worse?",
        "others' error over the best member's, where the pool is no better than the best", DOMINATED,
        found.others._replace(p=p), limits.level,
        f"the pool is no better than its best member (error {found.no_better.value:.2f} times the best's), and the others "
        f"have {found.others.value:.1f} times its error",
    ))  # fmt: skip
    return asked


def _copies(test: Tally, limits: Limits) -> Evidence:
    found = testing.gains(test, limits.gain)
    return _asked(
        "Does pooling gain next to nothing?", "share of members' error that pooling takes off", REDUNDANT, found,
        limits.redundant_level,
        f"pooling takes {found.value:.1%} off the members' error (a correlation of errors of "
        f"{testing.error_correlation(test):.2f}): they say the same",
    )  # fmt: skip


def _asked(question: str, test: str, points_to: str, found: Test, level: float, reason: str) -> Evidence:
    answer = "open" if math.isnan(found.p) else "yes" if found.shown(level) else "no"
    return Evidence(
        question, test, points_to, answer, found.value, found.line, found.above, found.error, found.p, level, reason
    )


def _doubts(subject: Subject, evidence: list[Evidence], limits: Limits) -> list[str]:
    """What looks odd, and cannot be told apart from luck or from a sound cause by what was given."""
    test, train, reference = subject.test, subject.train, subject.reference
    found = [
        f"{item.reason} (p = {item.p:.2g}, where {item.level:.1g} is asked for)" for item in evidence if _near(item)
    ]

    def unlike_reference(value: float, of: Callable[[Tally], float]) -> bool:
        """Whether a reference, if there is one, does not look the same."""
        return reference is None or not 0.67 < value / max(of(reference), 1e-12) < 1.5

    offset, share = _offset_share(test, limits), testing.constant_share(test)
    mostly = not test.hard and offset > limits.some_offset and share > limits.mostly
    if mostly and unlike_reference(offset, lambda tally: _offset_share(tally, limits)):
        found.append(
            f"{share:.0%} of the diversity is constant offsets, {offset:.0%} of members' own loss: members that differ by "
            "constants were trained on other populations, or to cancel"
        )
    known = _known_share(test, limits)
    if known < limits.known and unlike_reference(known, lambda tally: _known_share(tally, limits)):
        found.append(
            f"even the best member has {max(0.0, known):.0%} of what the ensemble has above guessing: weak learners by "
            "design look so, and members that lean on each other too"
        )
    best = _pool_to_best(test, limits)
    if best * test.members < 0.5 and unlike_reference(best, lambda tally: _pool_to_best(tally, limits)):
        found.append(
            f"the pool has 1/{1 / max(best, 1e-12):.0f} of its best member's error, which {test.members} members that err "
            "independently cannot reach: each knows what the others do not, or errors cancel"
        )
    apart, gain = testing.unequal(test), testing.gains(test, limits.gain).value
    cleared = reference is not None or (train is not None and subject.in_bag_known)
    if test.kind == "logits" and apart > limits.unequal and gain > limits.much and not cleared:
        found.append(
            f"members differ widely in quality (their errors by {apart:.0%}), and pooling takes {gain:.0%} off: networks of "
            "one build that were trained alone are alike, those of several builds or that lean on each other are not"
        )
    if train is not None and not subject.in_bag_known:
        owned = testing.ownership(train, limits.weight, limits.overstated)
        if owned is not None and max(owned.weight.p, owned.overstated.p) < 0.01:
            found.append(
                "members overstate what they say on training data: those that were trained on parts of it do (bagging, "
                "shards, folds), and those that were trained on the pool's loss"
            )
    return found


def _near(item: Evidence) -> bool:
    """Whether a test lies beyond its line, and the data does not suffice to be sure."""
    beyond = item.value > item.line if item.above else item.value < item.line
    odd = 0.01 if item.test.startswith("rotation") else {COLLUSIVE: 0.25, DOMINATED: 0.05}.get(item.points_to, 0.0)
    return item.answer == "no" and beyond and item.p < odd


def _offset_share(tally: Tally, limits: Limits) -> float:
    return testing.offsets(tally, limits.offset).value


def _known_share(tally: Tally, limits: Limits) -> float:
    known = testing.known(tally, limits.known)
    return 1.0 if known is None else known.value


def _pool_to_best(tally: Tally, limits: Limits) -> float:
    return testing.best_member(tally, limits.better, limits.better, limits.weak).no_better.value


def _no_skill(test: Tally, shown: bool = True) -> str:
    skill = testing.skill(test)
    if test.kind == "values":
        words = f"it explains {skill['loss'].value:.0%} of the variance: the mean of the targets predicts as well"
        return words if shown else f"it explains {skill['loss'].value:.0%} of the variance"
    words = (
        f"its loss is {1 - skill['loss'].value:.2f} times that of knowing class frequencies alone, and its kappa is "
        f"{skill['kappa'].value:.2f} (0 is guessing)"
    )
    return f"{words}: a constant prediction does as well" if shown else words


def _what_to_do(evidence: list[Evidence]) -> str:
    shown = [item for item in evidence if item.points_to == COLLUSIVE and item.answer == "yes"]
    offsets_alone = all("constant offsets" in item.question for item in shown)
    if offsets_alone:
        return (
            "Two causes look like this. Members trained on a joint loss: train them on their own loss, or at a smaller β. "
            "Members trained alone on other populations (sites, label skew): keep them, correct each member's offset on "
            "data of the population that you predict for, and audit again."
        )
    return "Train members on their own loss, or at a smaller β, and audit again; a single member must be usable alone."


def _what_to_bring(subject: Subject) -> str:
    wanted = []
    if subject.reference is None:
        wanted.append("`reference`: outputs of an ensemble of the same build, trained independently")
    if subject.train is None:
        wanted.append("`train` with `in_bag`: outputs on training data, and which of it each member was trained on")
    elif not subject.in_bag_known:
        wanted.append("`in_bag`: which training examples each member was trained on ('all', or a mask)")
    return f"Bring {', or '.join(wanted)}." if wanted else "Bring more examples."


def _sound(test: Tally) -> list[str]:
    gain = testing.gains(test, 1.0).value
    return [
        f"the ensemble predicts better than a constant, pooling takes {gain:.0%} off the members' error, and errors go "
        f"together as those of independent models do (correlation {testing.error_correlation(test):.2f})"
    ]


def _not_excluded(subject: Subject) -> list[str]:
    if subject.reference is not None or (subject.train is not None and subject.in_bag_known):
        return []
    if subject.train is not None:
        return [f"Not excluded: members that were trained on the pool's loss. {_what_to_bring(subject)}"]
    return [
        "Not excluded: members that were trained jointly. Outputs on test data show that only where offsets cancel. "
        + _what_to_bring(subject)
    ]


def _confidence(test: Tally, evidence: list[Evidence], limits: Limits) -> str:
    """How small an effect would have been seen, and whether that is small."""
    amount = f"{test.members} members, {test.units:,} {'groups' if test.units < test.examples else 'examples'}"
    seen = [item for item in evidence if "constant offsets" in item.question and item.error == item.error]
    words = ""
    if seen:
        least = seen[0].line + 3.7 * seen[0].error
        words = f": cancelling offsets of {least:.0%} of members' loss or more would have been called collusive"
    few = test.units < FEW_EXAMPLES or test.members < FEW_MEMBERS
    return f"{'low' if few else 'good'} ({amount}){words}"
