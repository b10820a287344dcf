"""The library against the paper's formulas as the oracle spells them out, and the theorems as properties."""

import math

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import special, stats

import dissensus as ds

MEMBERS, BATCH, CLASSES = 4, 5, 3
UNEQUAL = np.array([0.15, 0.4, 0.25, 0.2])
WEIGHTS = {"equal": None, "unequal": UNEQUAL}
BETAS = [-0.5, 0.3, 1.0]
EXTREME = 1e4

either_weights = pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)


def draw_outputs(classes=CLASSES, seed=7):
    return np.random.default_rng(seed).normal(scale=1.5, size=(MEMBERS, BATCH, classes))


def draw_targets(classes=CLASSES, seed=11):
    rng = np.random.default_rng(seed)
    return {
        "real": rng.normal(scale=2.0, size=(BATCH, classes)),
        "labels": rng.integers(classes, size=BATCH),
        "soft": rng.dirichlet(np.ones(classes), size=BATCH),
        "signs": rng.choice([-1.0, 1.0], size=(BATCH, classes)),
        "counts": rng.poisson(2.0, size=(BATCH, classes)).astype(np.float64),
    }


OUTPUTS = draw_outputs()
TARGETS = draw_targets()


def pseudo_huber(outputs, targets):
    return (1 + (outputs - targets).square().sum(-1)).sqrt()


def skewed_log_loss(log_probs, targets):
    """Not invariant under a shift of the logits, so it sees whether log-probabilities arrive."""
    return (targets * log_probs.square()).sum(-1)


def skewed_log_loss_oracle(log_probs, targets):
    total = 0.0
    for value, target in zip(log_probs, targets, strict=True):
        total += target * value**2
    return total


def squared_share_error(shares, targets):
    return (shares - targets).square().sum(-1)


CUSTOM = {
    "pseudo_huber": (pseudo_huber, oracle.pseudo_huber),
    "skewed_log_loss": (skewed_log_loss, skewed_log_loss_oracle),
    "squared_share_error": (squared_share_error, oracle.mse),
}

DIFFERENTIABLE_CASES = [
    ("squared_error", "real", "score"),
    ("cross_entropy", "labels", "score"),
    ("cross_entropy", "labels", "probability"),
    ("cross_entropy", "soft", "score"),
    ("cross_entropy", "soft", "probability"),
    ("brier", "labels", "score"),
    ("brier", "labels", "probability"),
    ("brier", "soft", "score"),
    ("brier", "soft", "probability"),
    ("logistic", "signs", "score"),
    ("exponential", "signs", "score"),
    ("poisson", "counts", "score"),
    ("pseudo_huber", "real", "score"),
    ("skewed_log_loss", "soft", "probability"),
]
CASES = [
    *DIFFERENTIABLE_CASES,
    ("zero_one", "labels", "score"),
    ("zero_one", "labels", "probability"),
    ("zero_one", "labels", "vote"),
    ("squared_share_error", "soft", "vote"),
]
REFUSED_CASES = [
    ("squared_error", "real", "probability"),
    ("squared_error", "real", "vote"),
    ("logistic", "signs", "probability"),
    ("exponential", "signs", "probability"),
    ("logistic", "signs", "vote"),
    ("exponential", "signs", "vote"),
    ("poisson", "counts", "vote"),
    ("cross_entropy", "labels", "vote"),
    ("brier", "labels", "vote"),
]
CONVEX_CASES = [
    ("squared_error", "real", "score"),
    ("cross_entropy", "labels", "score"),
    ("cross_entropy", "soft", "score"),
    ("cross_entropy", "labels", "probability"),
    ("cross_entropy", "soft", "probability"),
    ("brier", "labels", "probability"),
    ("brier", "soft", "probability"),
    ("logistic", "signs", "score"),
    ("exponential", "signs", "score"),
    ("poisson", "counts", "score"),
    ("pseudo_huber", "real", "score"),
]
HESSIAN_CASES = [
    ("squared_error", "real"),
    ("cross_entropy", "labels"),
    ("cross_entropy", "soft"),
    ("logistic", "signs"),
    ("exponential", "signs"),
    ("poisson", "counts"),
    ("pseudo_huber", "real"),
]

TRAINABLE_CASES = [case for case in CASES if case[0] != "zero_one"]
SAFE_FROM_ROUNDING_CASES = [case for case in CASES if case[0] != "zero_one" or case[2] == "vote"]

every_case = pytest.mark.parametrize(("loss", "kind", "pool"), CASES)
every_trainable_case = pytest.mark.parametrize(("loss", "kind", "pool"), TRAINABLE_CASES)
every_differentiable_case = pytest.mark.parametrize(("loss", "kind", "pool"), DIFFERENTIABLE_CASES)
every_hessian_case = pytest.mark.parametrize(("loss", "kind"), HESSIAN_CASES)


def tensor(array):
    return None if array is None else torch.tensor(array)


def filled(weights, members=MEMBERS):
    return oracle.equal_weights(members) if weights is None else weights


def library_loss(loss):
    return CUSTOM[loss][0] if loss in CUSTOM else loss


def oracle_loss(loss):
    return CUSTOM[loss][1] if loss in CUSTOM else loss


def assert_agree(actual, expected, rtol=1e-10, atol=1e-12):
    assert actual.dtype == torch.float64
    assert tuple(actual.shape) == np.shape(expected)
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=rtol, atol=atol)


def oracle_decomposition(outputs, targets, weights, *, loss, pool):
    def decompose(member_outputs, target):
        return oracle.decompose(member_outputs, target, loss=loss, pool=pool, weights=weights)

    return oracle.per_example(decompose, outputs, targets).T


def library_decomposition(outputs, targets, weights, *, loss, pool):
    return ds.diversity.decompose(tensor(outputs), tensor(targets), loss=loss, pool=pool, weights=tensor(weights))


def library_diversity(outputs, targets, weights, *, loss, pool):
    return library_decomposition(outputs, targets, weights, loss=loss, pool=pool)[2]


def library_total(outputs, targets, weights, *, beta, loss, pool):
    return ds.objectives.augmented(
        tensor(outputs),
        tensor(targets),
        beta=beta,
        loss=loss,
        pool=pool,
        weights=tensor(weights),
        allow_pathological=beta > 1,
    ).total


@either_weights
@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("mean_probability", oracle.log_mean_probability),
        ("mean_score", oracle.log_mean_score),
        ("mean_output", oracle.weighted_mean),
        ("vote_share", oracle.vote_share),
    ],
)
def test_pooling(name, formula, weights):
    expected = oracle.per_example(lambda outputs: formula(outputs, filled(weights)), OUTPUTS)
    assert_agree(getattr(ds.pooling, name)(tensor(OUTPUTS), weights=tensor(weights)), expected)


@pytest.mark.parametrize("name", ["mean_probability", "mean_score"])
def test_pooled_log_probabilities_are_normalised(name):
    pooled = getattr(ds.pooling, name)(tensor(OUTPUTS), weights=tensor(UNEQUAL))
    assert_agree(pooled.exp().sum(-1), np.ones(BATCH))


def test_votes_and_argmax_ties_go_to_the_lowest_class():
    tied = torch.tensor([[[2.0, 2.0, 1.0]], [[0.0, 3.0, 3.0]]], dtype=torch.float64)
    assert_agree(ds.pooling.vote_share(tied), np.array([[0.5, 0.5, 0.0]]))
    ensemble, individual, diversity = ds.diversity.decompose(tied, torch.tensor([0]), loss="zero_one", pool="vote")
    assert (ensemble.item(), individual.item(), diversity.item()) == (0.0, 0.5, 0.5)


@pytest.mark.parametrize("leading", [(), (MEMBERS,), (2, MEMBERS)], ids=["example", "members", "nested"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("squared_error", "real"),
        ("cross_entropy", "labels"),
        ("cross_entropy", "soft"),
        ("brier", "labels"),
        ("brier", "soft"),
        ("zero_one", "labels"),
        ("logistic", "signs"),
        ("exponential", "signs"),
        ("poisson", "counts"),
    ],
)
def test_losses(name, kind, leading):
    outputs = np.random.default_rng(3).normal(scale=2.0, size=(*leading, BATCH, CLASSES))
    expected = np.zeros((*leading, BATCH))
    for index in np.ndindex(expected.shape):
        expected[index] = oracle.LOSSES[name](outputs[index], TARGETS[kind][index[-1]])
    assert_agree(getattr(ds.losses, name)(tensor(outputs), tensor(TARGETS[kind])), expected)


def test_mse_takes_flat_targets_for_one_output():
    outputs, flat = OUTPUTS[:, :, :1], TARGETS["real"][:, 0]
    assert_agree(ds.losses.squared_error(tensor(outputs), tensor(flat)), (outputs[..., 0] - flat) ** 2)
    actual = library_decomposition(outputs, flat, UNEQUAL, loss="squared_error", pool="score")
    for part, expected in zip(
        actual, oracle_decomposition(outputs, flat[:, None], UNEQUAL, loss="squared_error", pool="score"), strict=True
    ):
        assert_agree(part, expected)


@every_case
@either_weights
def test_decompose(loss, kind, pool, weights):
    actual = library_decomposition(OUTPUTS, TARGETS[kind], weights, loss=library_loss(loss), pool=pool)
    expected = oracle_decomposition(OUTPUTS, TARGETS[kind], filled(weights), loss=oracle_loss(loss), pool=pool)
    for part, value in zip(actual, expected, strict=True):
        assert_agree(part, value)


@every_case
def test_explicit_equal_weights_are_the_default(loss, kind, pool):
    arguments = {"loss": library_loss(loss), "pool": pool}
    default = library_decomposition(OUTPUTS, TARGETS[kind], None, **arguments)
    explicit = library_decomposition(OUTPUTS, TARGETS[kind], oracle.equal_weights(MEMBERS), **arguments)
    for part, value in zip(default, explicit, strict=True):
        assert_agree(part, value.numpy())


@every_case
def test_a_member_without_weight_is_absent(loss, kind, pool):
    weights = np.array([0.5, 0.0, 0.3, 0.2])
    present = weights > 0
    actual = library_decomposition(OUTPUTS, TARGETS[kind], weights, loss=library_loss(loss), pool=pool)
    expected = oracle_decomposition(
        OUTPUTS[present], TARGETS[kind], weights[present], loss=oracle_loss(loss), pool=pool
    )
    for part, value in zip(actual, expected, strict=True):
        assert_agree(part, value)


@pytest.mark.parametrize(("loss", "kind", "pool"), REFUSED_CASES)
def test_pools_that_a_loss_does_not_permit_are_refused(loss, kind, pool):
    with pytest.raises(ValueError, match=pool):
        library_decomposition(OUTPUTS, TARGETS[kind], None, loss=loss, pool=pool)


@either_weights
def test_ambiguity(weights):
    expected = oracle.per_example(lambda outputs: oracle.ambiguity(outputs, filled(weights)), OUTPUTS)
    actual = ds.diversity.ambiguity(tensor(OUTPUTS), weights=tensor(weights))
    assert_agree(actual, expected)
    assert_agree(
        actual, library_diversity(OUTPUTS, TARGETS["real"], weights, loss="squared_error", pool="score").numpy()
    )


@either_weights
@pytest.mark.parametrize("kind", ["labels", "soft"])
def test_score_kl(kind, weights):
    expected = oracle.per_example(lambda logits: oracle.score_kl(logits, filled(weights)), OUTPUTS)
    actual = ds.diversity.score_kl(tensor(OUTPUTS), weights=tensor(weights))
    assert_agree(actual, expected)
    decomposed = library_diversity(OUTPUTS, TARGETS[kind], weights, loss="cross_entropy", pool="score")
    assert_agree(actual, decomposed.numpy())


@either_weights
@pytest.mark.parametrize("kind", ["labels", "soft"])
def test_probability_log_ratio(kind, weights):
    def formula(logits, target):
        return oracle.probability_log_ratio(logits, target, filled(weights))

    actual = ds.diversity.probability_log_ratio(tensor(OUTPUTS), tensor(TARGETS[kind]), weights=tensor(weights))
    assert_agree(actual, oracle.per_example(formula, OUTPUTS, TARGETS[kind]))
    decomposed = library_diversity(OUTPUTS, TARGETS[kind], weights, loss="cross_entropy", pool="probability")
    assert_agree(actual, decomposed.numpy())


@either_weights
def test_probability_kl_limit_is_the_log_ratio_at_the_ensembles_own_distribution(weights):
    expected = oracle.per_example(lambda logits: oracle.probability_kl_limit(logits, filled(weights)), OUTPUTS)
    actual = ds.diversity.probability_kl_limit(tensor(OUTPUTS), weights=tensor(weights))
    assert_agree(actual, expected)
    pooled = ds.pooling.mean_probability(tensor(OUTPUTS), weights=tensor(weights)).exp()
    log_ratio = ds.diversity.probability_log_ratio(tensor(OUTPUTS), pooled, weights=tensor(weights))
    assert_agree(actual, log_ratio.numpy())


@either_weights
def test_probability_variance_approximation(weights):
    def formula(logits, label):
        return oracle.probability_variance_approximation(logits, label, filled(weights))

    actual = ds.diversity.probability_variance_approximation(
        tensor(OUTPUTS), tensor(TARGETS["labels"]), weights=tensor(weights)
    )
    assert_agree(actual, oracle.per_example(formula, OUTPUTS, TARGETS["labels"]))


@either_weights
def test_variance_approximation_meets_the_log_ratio_as_spread_vanishes(weights):
    labels = tensor(TARGETS["labels"])
    errors = []
    for spread in [0.1, 0.025, 0.00625]:
        logits = tensor(OUTPUTS[:1] + spread * draw_outputs(seed=23))
        approximation = ds.diversity.probability_variance_approximation(logits, labels, weights=tensor(weights))
        exact = ds.diversity.probability_log_ratio(logits, labels, weights=tensor(weights))
        errors.append((approximation / exact - 1).abs().max().item())
    assert errors[0] > 3 * errors[1] > 9 * errors[2]
    assert errors[2] < 0.02


def test_beta_approximation():
    mean, precision = np.array([0.15, 0.4, 0.7, 0.93]), np.array([2.5, 7.0, 30.0, 0.8])
    actual = ds.diversity.beta_approximation(tensor(mean), tensor(precision))
    assert_agree(actual, np.array([oracle.beta_approximation(m, p) for m, p in zip(mean, precision, strict=True)]))
    variance = stats.beta(precision * mean, precision * (1 - mean)).var()
    assert_agree(actual, variance / (2 * mean**2))
    assert_agree(actual, mean * (1 - mean) / ((1 + precision) * 2 * mean**2))


@pytest.mark.parametrize(("mean", "precision"), [(0.15, 12.0), (0.6, 5.0), (0.8, 40.0)])
def test_beta_approximation_is_the_expected_second_order_expansion(mean, precision):
    a, b = precision * mean, precision * (1 - mean)
    nodes, masses = special.roots_jacobi(8, b - 1, a - 1)
    probability = (nodes + 1) / 2
    expansion = (mean - probability) / mean + (probability - mean) ** 2 / (2 * mean**2)
    expected = np.array([(masses * expansion).sum() / masses.sum()])
    actual = ds.diversity.beta_approximation(tensor(np.array([mean])), tensor(np.array([precision])))
    assert_agree(actual, expected)


def test_beta_approximation_meets_the_exact_expectation_as_precision_grows():
    mean, precision = np.full(3, 0.3), np.array([1e2, 1e3, 1e4])
    exact = np.log(mean) - special.digamma(precision * mean) + special.digamma(precision)
    actual = ds.diversity.beta_approximation(tensor(mean), tensor(precision))
    errors = np.abs(actual.numpy() / exact - 1)
    assert errors[0] > 5 * errors[1] > 25 * errors[2]
    assert errors[2] < 1e-3


@either_weights
@pytest.mark.parametrize("kind", ["labels", "soft"])
def test_brier_variance(kind, weights):
    expected = oracle.per_example(lambda logits: oracle.brier_variance(logits, filled(weights)), OUTPUTS)
    actual = ds.diversity.brier_variance(tensor(OUTPUTS), weights=tensor(weights))
    assert_agree(actual, expected)
    decomposed = library_diversity(OUTPUTS, TARGETS[kind], weights, loss="brier", pool="probability")
    assert_agree(actual, decomposed.numpy())


@either_weights
def test_vote_disagreement(weights):
    logits = draw_outputs(classes=2, seed=5)
    labels = np.arange(BATCH) % 2

    def formula(member_logits, label):
        return oracle.vote_disagreement(member_logits, label, filled(weights))

    actual = ds.diversity.vote_disagreement(tensor(logits), tensor(labels), weights=tensor(weights))
    assert_agree(actual, oracle.per_example(formula, logits, labels))
    decomposed = library_diversity(logits, labels, weights, loss="zero_one", pool="vote")
    assert_agree(actual, decomposed.numpy())
    assert (actual > 0).any()
    assert (actual < 0).any()


@every_hessian_case
@either_weights
def test_hessian_form(loss, kind, weights):
    def formula(outputs, target):
        return oracle.hessian_form(outputs, target, filled(weights), oracle.HESSIANS[loss])

    actual = ds.diversity.hessian_form(
        tensor(OUTPUTS), tensor(TARGETS[kind]), loss=library_loss(loss), weights=tensor(weights)
    )
    assert_agree(actual, oracle.per_example(formula, OUTPUTS, TARGETS[kind]), rtol=1e-7)
    decomposed = library_diversity(OUTPUTS, TARGETS[kind], weights, loss=library_loss(loss), pool="score")
    assert_agree(actual, decomposed.numpy(), rtol=1e-8)


@either_weights
@pytest.mark.parametrize("kind", ["labels", "soft"])
def test_hessian_form_holds_for_a_loss_that_is_not_convex(kind, weights):
    expected = oracle_decomposition(OUTPUTS, TARGETS[kind], filled(weights), loss="brier", pool="score")[2]
    actual = ds.diversity.hessian_form(
        tensor(OUTPUTS), tensor(TARGETS[kind]), loss="brier", weights=tensor(weights), nodes=64
    )
    assert_agree(actual, expected, rtol=1e-8, atol=1e-10)


@every_hessian_case
def test_diversity_lies_within_theorem_4_5_over_all_c(loss, kind):
    def extremes(outputs, target):
        return oracle.hessian_form_range(outputs, target, UNEQUAL, oracle.HESSIANS[loss])

    low, high = oracle.per_example(extremes, OUTPUTS, TARGETS[kind]).T
    diversity = library_diversity(OUTPUTS, TARGETS[kind], UNEQUAL, loss=library_loss(loss), pool="score").numpy()
    assert (low <= diversity + 1e-10).all()
    assert (diversity <= high + 1e-10).all()


def test_hessian_form_is_exact_with_two_nodes_for_mse():
    two_nodes = ds.diversity.hessian_form(tensor(OUTPUTS), tensor(TARGETS["real"]), loss="squared_error", nodes=2)
    assert_agree(two_nodes, ds.diversity.ambiguity(tensor(OUTPUTS)).numpy())


@either_weights
@pytest.mark.parametrize("family", ["categorical", "bernoulli", "poisson", "gaussian"])
def test_exponential_family(family, weights):
    def formula(scores):
        return oracle.exponential_family(scores, filled(weights), family)

    actual = ds.diversity.exponential_family(tensor(OUTPUTS), family=family, weights=tensor(weights))
    assert_agree(actual, oracle.per_example(formula, OUTPUTS))


@either_weights
@pytest.mark.parametrize(
    ("family", "loss", "kind", "scale"),
    [
        ("categorical", "cross_entropy", "soft", 1.0),
        ("bernoulli", "logistic", "signs", 1.0),
        ("poisson", "poisson", "counts", 1.0),
        ("gaussian", "squared_error", "real", 0.5),
    ],
)
def test_exponential_family_is_the_diversity_of_its_likelihood(family, loss, kind, scale, weights):
    actual = ds.diversity.exponential_family(tensor(OUTPUTS), family=family, weights=tensor(weights))
    decomposed = library_diversity(OUTPUTS, TARGETS[kind], weights, loss=loss, pool="score")
    assert_agree(actual, scale * decomposed.numpy())


def assert_parts(parts, outputs, targets, weights, *, loss, pool):
    ensemble, individual, diversity = oracle_decomposition(outputs, targets, weights, loss=loss, pool=pool).mean(1)
    assert_agree(parts["ensemble"], ensemble)
    assert_agree(parts["individual"], individual)
    assert_agree(parts["diversity"], diversity)
    assert_agree(parts["member_loss"], oracle.member_losses(outputs, targets, loss=loss, pool=pool))


@every_trainable_case
@either_weights
@pytest.mark.parametrize("beta", BETAS)
def test_augmented(loss, kind, pool, weights, beta):
    actual = ds.objectives.augmented(
        tensor(OUTPUTS), tensor(TARGETS[kind]), beta=beta, loss=library_loss(loss), pool=pool, weights=tensor(weights)
    )
    arguments = {"loss": oracle_loss(loss), "pool": pool, "weights": filled(weights)}
    assert_agree(actual.total, oracle.augmented_total(OUTPUTS, TARGETS[kind], beta=beta, **arguments))
    assert_parts(actual.parts, OUTPUTS, TARGETS[kind], filled(weights), loss=oracle_loss(loss), pool=pool)


@every_trainable_case
@either_weights
def test_joint(loss, kind, pool, weights):
    actual = ds.objectives.joint(
        tensor(OUTPUTS), tensor(TARGETS[kind]), loss=library_loss(loss), pool=pool, weights=tensor(weights)
    )
    arguments = {"loss": oracle_loss(loss), "pool": pool, "weights": filled(weights)}
    assert_agree(actual.total, oracle.augmented_total(OUTPUTS, TARGETS[kind], beta=1.0, **arguments))
    assert_parts(actual.parts, OUTPUTS, TARGETS[kind], filled(weights), loss=oracle_loss(loss), pool=pool)


@pytest.mark.parametrize(("loss", "kind", "pool"), [case for case in TRAINABLE_CASES if case[2] == "score"])
@either_weights
def test_independent(loss, kind, pool, weights):
    actual = ds.objectives.independent(
        tensor(OUTPUTS), tensor(TARGETS[kind]), loss=library_loss(loss), weights=tensor(weights)
    )
    member_losses = oracle.member_losses(OUTPUTS, TARGETS[kind], loss=oracle_loss(loss))
    individual = oracle_decomposition(OUTPUTS, TARGETS[kind], filled(weights), loss=oracle_loss(loss), pool=pool)[1]
    assert_agree(actual.total, MEMBERS * individual.mean())
    assert_agree(actual.parts["individual"], individual.mean())
    assert_agree(actual.parts["member_loss"], member_losses)


@pytest.mark.parametrize(("loss", "kind", "pool"), [case for case in TRAINABLE_CASES if case[0] not in CUSTOM])
def test_augmented_at_beta_zero_is_independent(loss, kind, pool):
    zero = library_total(OUTPUTS, TARGETS[kind], UNEQUAL, beta=0.0, loss=loss, pool=pool)
    independent = ds.objectives.independent(tensor(OUTPUTS), tensor(TARGETS[kind]), loss=loss, weights=tensor(UNEQUAL))
    assert_agree(zero, independent.total.item())


def test_beta_above_one_is_refused():
    with pytest.raises(ValueError, match="beta"):
        ds.objectives.augmented(tensor(OUTPUTS), tensor(TARGETS["real"]), beta=1.3, loss="squared_error", pool="score")


def colluding_outputs(t, weights, target):
    """Case 1 of theorem 5.1: learner 2 cancels learner 1, the others predict zero, so the ensemble does too."""
    outputs = np.zeros((len(weights), 1, len(target)))
    outputs[0, 0] = t * np.ones(len(target))
    outputs[1, 0] = -weights[0] / weights[1] * outputs[0, 0]
    return outputs


def total_of_colluders(t, beta, target):
    outputs = colluding_outputs(t, UNEQUAL, target)
    return library_total(outputs, target[None], UNEQUAL, beta=beta, loss="squared_error", pool="score").item()


@pytest.mark.parametrize("bound", [-1e2, -1e6, -1e12])
def test_theorem_5_1_on_the_reals_falls_below_any_bound(bound):
    target = np.array([0.7, -1.2, 2.0])
    assert total_of_colluders(10 * math.sqrt(-bound), 1.3, target) < bound


@pytest.mark.parametrize("t", [1.0, 1e2, 1e4, 1e6])
def test_theorem_5_1_on_the_reals_stays_put_at_beta_one(t):
    target = np.array([0.7, -1.2, 2.0])
    assert total_of_colluders(t, 1.0, target) == pytest.approx(MEMBERS * (target**2).sum(), rel=1e-9)


SINGULAR = np.array([0.35, 0.65, 0.0])
SIMPLEX_TARGET = np.array([0.5, 0.2, 0.3])


def logits_towards_boundary(log_t):
    """Case 2 of theorem 5.1: f_1 = y / t + (1 - 1/t) y_∞ as log-probabilities, all others equal to y."""
    log_target = np.log(SIMPLEX_TARGET)
    logits = np.tile(log_target, (MEMBERS, 1, 1))
    logits[0, 0] = log_target - log_t
    inside = SINGULAR > 0
    log_share = math.log1p(-math.exp(-log_t))
    logits[0, 0, inside] = np.logaddexp(logits[0, 0, inside], log_share + np.log(SINGULAR[inside]))
    return logits


def total_towards_boundary(log_t, beta):
    target = SIMPLEX_TARGET[None]
    logits = logits_towards_boundary(log_t)
    return library_total(logits, target, UNEQUAL, beta=beta, loss="cross_entropy", pool="probability").item()


def test_boundary_construction_is_the_papers_convex_combination():
    t = 40.0
    expected = SIMPLEX_TARGET / t + (1 - 1 / t) * SINGULAR
    np.testing.assert_allclose(np.exp(logits_towards_boundary(math.log(t))[0, 0]), expected, rtol=1e-12)


@pytest.mark.parametrize("bound", [-1e1, -1e3, -1e6])
def test_theorem_5_1_on_the_simplex_falls_below_any_bound(bound):
    slope = 0.3 * MEMBERS * UNEQUAL[0] * SIMPLEX_TARGET[2]
    assert total_towards_boundary((20 - bound) / slope, 1.3) < bound


def test_theorem_5_1_on_the_simplex_falls_linearly_in_log_t():
    slope = 0.3 * MEMBERS * UNEQUAL[0] * SIMPLEX_TARGET[2]
    fall = total_towards_boundary(1e3, 1.3) - total_towards_boundary(3e3, 1.3)
    assert fall == pytest.approx(2e3 * slope, rel=1e-9)


@pytest.mark.parametrize("log_t", [1.0, 30.0, 1e3, 1e6])
def test_theorem_5_1_on_the_simplex_is_bounded_at_beta_one(log_t):
    entropy = -(SIMPLEX_TARGET * np.log(SIMPLEX_TARGET)).sum()
    limit = (1 - UNEQUAL[0]) * SIMPLEX_TARGET + UNEQUAL[0] * SINGULAR
    total = total_towards_boundary(log_t, 1.0)
    assert total >= MEMBERS * entropy - 1e-12
    if log_t >= 30:
        assert total == pytest.approx(-MEMBERS * (SIMPLEX_TARGET * np.log(limit)).sum(), rel=1e-9)


def draw_weights(draw, members):
    raw = np.array(draw(st.lists(st.floats(0.05, 1.0), min_size=members, max_size=members)))
    return draw(st.sampled_from([None, raw / raw.sum()]))


@st.composite
def ensembles(draw, min_members=1, magnitude=20.0):
    """Outputs, weights and one target of every kind."""
    members, batch, classes = draw(st.integers(min_members, 5)), draw(st.integers(1, 3)), draw(st.integers(2, 4))
    value = st.floats(-magnitude, magnitude)
    outputs = draw(hnp.arrays(np.float64, (members, batch, classes), elements=value))
    raw = draw(hnp.arrays(np.float64, (batch, classes), elements=st.floats(0.01, 1.0)))
    targets = {
        "real": draw(hnp.arrays(np.float64, (batch, classes), elements=value)),
        "labels": draw(hnp.arrays(np.int64, batch, elements=st.integers(0, classes - 1))),
        "soft": raw / raw.sum(-1, keepdims=True),
        "signs": draw(hnp.arrays(np.float64, (batch, classes), elements=st.sampled_from([-1.0, 1.0]))),
        "counts": draw(hnp.arrays(np.int64, (batch, classes), elements=st.integers(0, 9))).astype(np.float64),
    }
    return outputs, draw_weights(draw, members), targets


def scale_of(parts):
    return 1 + max(part.abs().max().item() for part in parts)


def decompositions(cases, outputs, weights, targets):
    """The library's decomposition in every case, with the case and a rounding allowance to name and judge it by."""
    for case in cases:
        loss, kind, pool = case
        parts = library_decomposition(outputs, targets[kind], weights, loss=library_loss(loss), pool=pool)
        yield case, parts, 1e-13 * scale_of(parts)


def assert_same_decompositions(cases, before, after):
    for (case, old, allowance), (_, new, _) in zip(
        decompositions(cases, *before), decompositions(cases, *after), strict=True
    ):
        for part, value in zip(old, new, strict=True):
            assert (part - value).abs().max().item() <= allowance, case


@given(ensemble=ensembles())
def test_decomposition_sums(ensemble):
    for case, (pooled, individual, diversity), allowance in decompositions(CASES, *ensemble):
        assert (individual - diversity - pooled).abs().max().item() <= allowance, case


@given(ensemble=ensembles())
def test_diversity_of_a_convex_loss_is_not_negative(ensemble):
    for case, (_, _, diversity), allowance in decompositions(CONVEX_CASES, *ensemble):
        assert diversity.min().item() >= -allowance, case


@given(ensemble=ensembles(min_members=2), random=st.randoms(use_true_random=False))
def test_permuting_members_with_their_weights_changes_nothing(ensemble, random):
    outputs, weights, targets = ensemble
    order = random.sample(range(len(outputs)), len(outputs))
    permuted = None if weights is None else weights[order]
    assert_same_decompositions(DIFFERENTIABLE_CASES, ensemble, (outputs[order], permuted, targets))


@given(seed=st.integers(0, 2**32 - 1))
def test_permuting_members_changes_no_vote(seed):
    """Outputs without ties, where the order of summation could decide."""
    rng = np.random.default_rng(seed)
    outputs, weights, order = draw_outputs(seed=seed), rng.dirichlet(np.ones(MEMBERS)), rng.permutation(MEMBERS)
    cases = [case for case in CASES if case not in DIFFERENTIABLE_CASES]
    assert_same_decompositions(cases, (outputs, None, TARGETS), (outputs[order], None, TARGETS))
    assert_same_decompositions(cases, (outputs, weights, TARGETS), (outputs[order], weights[order], TARGETS))


def assert_no_diversity(cases, outputs, weights, targets):
    for case, (_, _, diversity), allowance in decompositions(cases, outputs, weights, targets):
        assert diversity.abs().max().item() <= allowance, case


@given(ensemble=ensembles())
def test_identical_members_have_no_diversity(ensemble):
    outputs, weights, targets = ensemble
    identical = np.repeat(outputs[:1], len(outputs), axis=0)
    assert_no_diversity(SAFE_FROM_ROUNDING_CASES, identical, weights, targets)


@given(ensemble=ensembles())
def test_one_member_has_no_diversity(ensemble):
    outputs, _, targets = ensemble
    assert_no_diversity(SAFE_FROM_ROUNDING_CASES, outputs[:1], None, targets)


@given(seed=st.integers(0, 2**32 - 1))
def test_identical_members_and_one_member_have_no_zero_one_diversity(seed):
    outputs = draw_outputs(seed=seed)
    cases = [case for case in CASES if case[0] == "zero_one"]
    assert_no_diversity(cases, np.repeat(outputs[:1], MEMBERS, axis=0), UNEQUAL, TARGETS)
    assert_no_diversity(cases, outputs[:1], None, TARGETS)


def extreme_logits():
    """Every member is sure, of different classes; the last example has members that agree on a wrong class."""
    logits = np.random.default_rng(2).choice([-EXTREME, EXTREME], size=(MEMBERS, BATCH, CLASSES))
    logits[:, -1] = [EXTREME, -EXTREME, -EXTREME]
    return logits


EXTREME_LABELS = np.array([0, 1, 2, 1, 2])
EXTREME_TARGETS = TARGETS | {"labels": EXTREME_LABELS}
EXTREME_CASES = [case for case in CASES if case[0] not in ("exponential", "poisson")]


@pytest.mark.parametrize(("loss", "kind", "pool"), EXTREME_CASES)
@either_weights
def test_decompose_at_extreme_logits(loss, kind, pool, weights):
    logits, target = extreme_logits(), EXTREME_TARGETS[kind]
    actual = library_decomposition(logits, target, weights, loss=library_loss(loss), pool=pool)
    expected = oracle_decomposition(logits, target, filled(weights), loss=oracle_loss(loss), pool=pool)
    for part, value in zip(actual, expected, strict=True):
        assert_agree(part, value, atol=1e-12 * scale_of(actual))


@pytest.mark.parametrize(("loss", "kind", "pool"), [case for case in DIFFERENTIABLE_CASES if case in EXTREME_CASES])
def test_gradients_are_finite_at_extreme_logits(loss, kind, pool):
    logits = tensor(extreme_logits()).requires_grad_()
    total = ds.objectives.augmented(
        logits,
        tensor(EXTREME_TARGETS[kind]),
        beta=0.3,
        loss=library_loss(loss),
        pool=pool,
        weights=tensor(UNEQUAL),
    ).total
    total.backward()
    assert logits.grad.isfinite().all()
    assert total.isfinite()


@pytest.mark.parametrize("name", ["ambiguity", "score_kl", "probability_kl_limit", "brier_variance"])
def test_closed_forms_without_targets_at_extreme_logits(name):
    formula = getattr(oracle, name)
    expected = oracle.per_example(lambda logits: formula(logits, UNEQUAL), extreme_logits())
    assert_agree(getattr(ds.diversity, name)(tensor(extreme_logits()), weights=tensor(UNEQUAL)), expected)


@pytest.mark.parametrize("name", ["probability_log_ratio", "probability_variance_approximation"])
def test_closed_forms_with_labels_at_extreme_logits(name):
    formula = getattr(oracle, name)
    expected = oracle.per_example(lambda *example: formula(*example, UNEQUAL), extreme_logits(), EXTREME_LABELS)
    actual = getattr(ds.diversity, name)(tensor(extreme_logits()), tensor(EXTREME_LABELS), weights=tensor(UNEQUAL))
    assert_agree(actual, expected)


@pytest.mark.parametrize("family", ["categorical", "bernoulli", "gaussian"])
def test_exponential_family_at_extreme_scores(family):
    expected = oracle.per_example(lambda scores: oracle.exponential_family(scores, UNEQUAL, family), extreme_logits())
    actual = ds.diversity.exponential_family(tensor(extreme_logits()), family=family, weights=tensor(UNEQUAL))
    assert_agree(actual, expected)


@every_differentiable_case
def test_gradients_of_the_augmented_total(loss, kind, pool):
    outputs = tensor(OUTPUTS[:, :2]).requires_grad_()

    def total(values):
        return ds.objectives.augmented(
            values,
            tensor(TARGETS[kind][:2]),
            beta=0.3,
            loss=library_loss(loss),
            pool=pool,
            weights=tensor(UNEQUAL),
        ).total

    assert torch.autograd.gradcheck(total, (outputs,))
