"""The verdict: a few rules, each with its reason; `dissensus study run audit/table-1` asks how often they are right."""

from typing import NamedTuple

from dissensus.auditing.measuring import Figure

HEALTHY, REDUNDANT, COLLUSIVE, DOMINATED, UNDECIDED = "healthy", "redundant", "collusive", "dominated", "undecided"
FEWEST = 20
"""Examples below which intervals say little."""
VERDICTS = (HEALTHY, REDUNDANT, COLLUSIVE, DOMINATED, UNDECIDED)


class Limits(NamedTuple):
    """Where the rules draw their lines."""

    gain: float = 0.01
    """Pooling takes less than this share off the members' error: they are copies."""
    biased: float = 0.2
    """So much of the diversity is constant bias, where members trained alone have a few per cent."""
    biased_logits: float = 0.25
    """The same for averaged logits, whose size is free: members trained alone have up to so much, but err together."""
    lost: float = 0.15
    """Biases of logits matter once members lose this share of what knowing class frequencies alone would lose."""
    together: float = 0.6
    """A correlation of errors above which biases do not matter: nothing cancels."""
    uncorrelated: float = 0.1
    """A correlation of errors below this is not what models of the same data have, trees of a forest included."""
    above_chance: float = 0.4
    """Even the best member has less than this share of the ensemble's kappa: of what it is right more often than by
    guessing with answers as frequent as its own."""
    guessing: float = 0.1
    """Members have on average less than this share of the ensemble's kappa: they might as well guess. (So by the
    estimate; few examples leave its interval wide, which has to stay below `above_chance`.)"""
    right: float = 0.8
    """A kappa that makes an ensemble that is right. Members that guess do not add up to one, unless what they say was
    made to."""
    worse: float = 1.5
    """Members' loss against that of a reference's members."""
    carries: float = 1.25
    """The best member alone has at most this times the ensemble's error."""
    weak: float = 1.25
    """The other members' error is at least this times the best's."""
    needed: float = 1.1
    """Without the best member the error grows by this factor more than it would if members were alike. (With many
    members no one is needed: the best of fifty trees is not a forest's secret.)"""


LIMITS = Limits()


class Judgement(NamedTuple):
    """A verdict, why, and what would tell more."""

    verdict: str
    reasons: list[str]
    advice: list[str]


def judged(
    test: dict[str, Figure], train: dict[str, Figure] | None = None, reference: dict[str, Figure] | None = None,
    *, members: int, examples: int, logits: bool = False, limits: Limits = LIMITS,
) -> Judgement:  # fmt: skip
    """Judge an ensemble by its figures on test data, and on training data or against a reference where there are."""
    if members < 2:
        return Judgement(UNDECIDED, ["one member has no diversity to judge"], ["Give at least two members."])
    if examples < FEWEST:
        return Judgement(UNDECIDED, [f"{examples} examples are too few to tell"], [f"Give at least {FEWEST}."])
    if test["member_error"].value == 0:
        return Judgement(REDUNDANT, ["no member ever errs: one would do"], ["Keep one member, or find harder data."])
    cancel = _collusive(test, train, reference, members, logits, limits)
    if cancel:
        return Judgement(COLLUSIVE, cancel, ["Train members independently, or at a smaller β, and audit again."])
    if test["gain"].high < limits.gain:
        why = f"pooling takes {test['gain'].value:.2%} off the members' error: they say the same"
        return Judgement(REDUNDANT, [why], ["Keep one member, or train them from other seeds, data or settings."])
    best, others, needed = test["best_to_ensemble"], test["others_to_best"], test["best_needed"]
    if best.high <= limits.carries and others.low >= limits.weak and needed.low >= limits.needed:
        why = (
            f"the best member alone has {best.value:.2f} times the ensemble's error, the others {others.value:.1f} "
            f"times the best's, and without it the error is {test['without_best'].value:.1f} times as large"
        )
        return Judgement(DOMINATED, [why], ["Try that member alone, or weigh members by their quality."])
    doubts = _doubts(test, train, reference, members, logits, limits)
    if doubts:
        wanted = {"`train`: outputs on training data": train,
                  "`reference`: outputs of an independently trained ensemble": reference}  # fmt: skip
        asked = [words for words, given in wanted.items() if given is None]
        return Judgement(UNDECIDED, doubts, [f"Add {', or '.join(asked)}."] if asked else [])
    if "kappa" in test and test["kappa"].low <= 0:
        why = f"the ensemble is right {test['accuracy'].value:.1%} of the time, which is no better than guessing"
        return Judgement(UNDECIDED, [why], ["Check that outputs and labels belong together, and that `kind` is right."])
    correlation = test["error_correlation"]
    why = [f"errors go together as those of independent members do (correlation {correlation.value:.2f}), and pooling "
           f"takes {test['gain'].value:.0%} off them"]  # fmt: skip
    return Judgement(HEALTHY, why, [])


def _collusive(
    test: dict[str, Figure], train: dict[str, Figure] | None, reference: dict[str, Figure] | None, members: int,
    logits: bool, limits: Limits,
) -> list[str]:  # fmt: skip
    """Reasons to say that errors cancel; any is enough."""
    found: list[str] = []
    if test["relative_diversity"].low > members - 1:
        found.append(
            f"members' errors cancel: diversity is {test['relative_diversity'].value:.3g} times the error, where "
            f"uncorrelated errors would give M − 1 = {members - 1}"
        )
    if "kappa" in test and test["kappa"].low > 0:
        share = test["above_chance"]
        if share.high < limits.above_chance and test["error_correlation"].high < limits.together:
            found.append(
                f"even the best member has {max(0.0, share.value):.0%} of what the ensemble has above guessing (they "
                f"are right {test['best_accuracy'].value:.1%} and {test['accuracy'].value:.1%} of the time)"
            )
    if "kappa" in test and not found and _guessing(test, limits):
        found.append(
            f"members are right {test['member_accuracy'].value:.1%} of the time on average, where guessing with "
            f"answers as frequent gives {test['guessed'].value:.1%}, under an ensemble that is right "
            f"{test['accuracy'].value:.1%} and that none of them carries"
        )
    biased = limits.biased_logits if logits else limits.biased
    correlation = test["error_correlation"]
    matters = not logits or test["lost"].low > limits.lost
    if test["bias_share"].low > biased and correlation.high < limits.together and matters:
        found.append(
            f"{test['bias_share'].value:.0%} of the diversity is constant bias, which cancels in the mean, and errors "
            f"hardly go together (correlation {correlation.value:.2f})"
        )
    low_on_both = train is not None and train["error_correlation"].value < limits.uncorrelated
    if low_on_both and correlation.value < limits.uncorrelated and not found:
        found.append(
            f"errors go apart on test data (correlation {correlation.value:.2f}) as on training data, where models "
            "that learnt alone have much in common"
        )
    if train is not None and train["error_correlation"].high < 0:
        found.append("on training data members' errors cancel (their correlation is below zero)")
    if reference is not None:
        found += _against(reference, test, limits)
    return found


def _guessing(test: dict[str, Figure], limits: Limits) -> bool:
    """Whether members that might as well guess make an ensemble that is right, without one that carries it."""
    ensemble, members = test["kappa"].low, test["member_kappa"]
    near = members.value < limits.guessing * ensemble and members.high < limits.above_chance * ensemble
    carried = test["best_to_ensemble"].low <= limits.carries
    return ensemble > limits.right and near and not carried


def _against(reference: dict[str, Figure], test: dict[str, Figure], limits: Limits) -> list[str]:
    """What a reference brings to light."""
    found: list[str] = []
    worse = test["member_error"].low > limits.worse * reference["member_error"].high
    more = test["relative_diversity"].low > reference["relative_diversity"].high
    if worse and more and test["pooled_error"].high > reference["pooled_error"].low:
        times = test["member_error"].value / reference["member_error"].value
        found.append(
            f"members have {times:.1f} times the error of the reference's, for an ensemble that is no better: their "
            "diversity makes up for what it costs"
        )
    own, other = test["error_correlation"], reference["error_correlation"]
    if own.value < limits.uncorrelated and own.high < other.low:
        found.append(
            f"errors hardly go together (correlation {own.value:.2f}) where the reference's do ({other.value:.2f})"
        )
    return found


def _doubts(
    test: dict[str, Figure], train: dict[str, Figure] | None, reference: dict[str, Figure] | None, members: int,
    logits: bool, limits: Limits,
) -> list[str]:  # fmt: skip
    """What looks odd in test outputs, and cannot be told apart from luck without more."""
    found: list[str] = []
    value = test["error_correlation"].value
    alike = reference is not None and test["error_correlation"].high >= reference["error_correlation"].low
    if value < limits.uncorrelated and not alike:
        found.append(f"members' errors hardly go together (correlation {value:.2f}): good luck, or cancelling")
    best = test["best_to_ensemble"]
    if logits and best.low > members and (reference is None or best.low > reference["best_to_ensemble"].high):
        found.append(
            f"the mean of scores has 1/{best.value:.0f} of the best member's error, which {members} members cannot "
            "explain: each knows what the others do not, or scores cancel"
        )
    biased = limits.biased_logits if logits else limits.biased
    untold = train is None and reference is None
    if untold and test["bias_share"].value > biased and value < limits.together:
        found.append(f"{test['bias_share'].value:.0%} of the diversity is constant bias")
    return found
