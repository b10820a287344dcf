"""Tests behind the audit's verdicts: closed forms, brute force, and ensembles whose truth is known."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_breast_cancer, load_digits, make_classification
from sklearn.ensemble import ExtraTreesClassifier, GradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LinearRegression

import dissensus as ds
import dissensus.auditing.testing as testing
from dissensus.auditing import stationarity
from dissensus.auditing.distributions import below_zero, rotation_test, student_tail
from dissensus.auditing.limits import LIMITS, Limits
from dissensus.auditing.measuring import Figure, expanded_confidence
from dissensus.auditing.streaming import OutputReader
from dissensus.auditing.tallying import tally_outputs
from dissensus.metrics import intervals

KEPT = Path(__file__).parents[1] / "benchmarks/results/collusion_cifar10"
CLASSES = {"task": "classification", "kind": "logits"}


def draw(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=draw(seed), dtype=torch.float64)


def values_tally(outputs, targets, **options):
    return tally_outputs(OutputReader(outputs, exact=True), targets, kind="values", loss="mse", pool="score", **options)


def logits_tally(outputs, labels, pool="probability", **options):
    return tally_outputs(OutputReader(outputs), labels, kind="logits", loss="cross_entropy", pool=pool, **options)


# Distributions


@pytest.mark.parametrize("a", [0.001, 0.2, 0.9])
def test_two_weights_have_a_closed_form(a):
    expected = 2 / math.pi * math.atan(math.sqrt(a))
    assert float(below_zero(torch.tensor([-a, 1.0], dtype=torch.float64))) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("below", "above"), [(1, 4), (3, 2), (20, 30), (60, 60)])
def test_equal_weights_are_a_ratio_of_chi_squares(below, above):
    weights = torch.tensor([-0.3] * below + [1.0] * above, dtype=torch.float64)
    expected = stats.f.cdf(0.3 * below / above, above, below)
    assert float(below_zero(weights)) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("degrees", [1, 2, 7, 30, 255, 10_000])
def test_students_tail_is_scipys(degrees):
    for t in (-4.0, -0.3, 0.0, 0.7, 2.0, 5.0, 12.0):
        assert student_tail(t, degrees) == pytest.approx(stats.t.sf(t, degrees), rel=1e-9)
    assert student_tail(math.inf, degrees) == 0
    assert math.isnan(student_tail(math.nan, degrees))


@pytest.mark.parametrize(("members", "dimensions"), [(2, 1), (3, 40), (5, 2), (10, 5), (10, 300)])
def test_p_values_of_independent_members_are_uniform(members, dimensions):
    errors = normal(2000, members, dimensions, seed=members)
    p = rotation_test(errors @ errors.mT)
    assert stats.kstest(p.numpy(), "uniform").pvalue > 0.001


def test_the_rotation_test_does_not_know_order_or_scale():
    errors = normal(4, 30)
    gram = errors @ errors.T
    order = torch.tensor([2, 0, 3, 1])
    p = float(rotation_test(gram))
    assert float(rotation_test(gram[order][:, order])) == pytest.approx(p, abs=1e-10)
    assert float(rotation_test(1e-6 * gram)) == pytest.approx(p, abs=1e-10)


def test_edges_of_the_rotation_test():
    assert float(rotation_test(torch.zeros(3, 3))) == 1.0
    assert float(rotation_test(torch.ones(3, 3))) > 0.9, "equal members have all their errors in common"
    assert float(rotation_test(torch.tensor([[2.0]]))) == 1.0
    errors = normal(5, 200)
    cancelling = errors - errors.mean(0)
    assert float(rotation_test(cancelling @ cancelling.T)) < 1e-9
    assert float(rotation_test(cancelling @ cancelling.T + 50.0)) > 0.5, "a common error hides it"


# Whose loss was minimised


def derivatives(loss, scales):
    """First and second derivatives of every entry of ``loss [n, M]`` or ``[n]`` in each of ``scales [M]``."""
    members = len(scales)
    first, second = [], []
    for i in range(members):
        column = loss[:, i] if loss.ndim == 2 else loss
        for entry in column:
            (slope,) = torch.autograd.grad(entry, scales, create_graph=True)
            first.append(slope[i])
            second.append(torch.autograd.grad(slope[i], scales, retain_graph=True)[0][i])
    return (torch.stack(parts).view(members, -1).T.detach() for parts in (first, second))


def test_slopes_are_derivatives():
    f, y = normal(6, 3, 2), normal(6, 2, seed=1)
    centre = y.mean(0)
    scales = torch.ones(3, dtype=torch.float64, requires_grad=True)
    scaled = centre + scales.view(3, 1) * (f - centre)
    slopes = stationarity.value_slopes(f, y, centre)
    member_loss = (scaled - y.unsqueeze(1)).square().sum(-1) / 2
    pool = (scaled.mean(1) - y).square().sum(-1) / 2
    for loss, prefix in ((member_loss, ""), (pool, "pool_")):
        slope, curvature = derivatives(loss, scales)
        torch.testing.assert_close(getattr(slopes, f"{prefix}slope"), slope)
        torch.testing.assert_close(getattr(slopes, f"{prefix}curvature"), curvature)
    torch.testing.assert_close(slopes.member_loss, member_loss.detach())
    torch.testing.assert_close(slopes.pool_loss, pool.detach())


@pytest.mark.parametrize("pool", ["probability", "score"])
def test_slopes_of_likelihoods_are_derivatives(pool):
    logits, labels = 2 * normal(6, 3, 4) + 1.0, torch.randint(4, (6,), generator=draw(1))
    scales = torch.ones(3, dtype=torch.float64, requires_grad=True)
    scaled = scales.view(3, 1) * logits
    log_probs = scaled.log_softmax(-1)
    member_loss = -log_probs.gather(-1, labels.view(-1, 1, 1).expand(-1, 3, 1)).squeeze(-1)
    mean = log_probs.logsumexp(1) - math.log(3) if pool == "probability" else scaled.mean(1).log_softmax(-1)
    ensemble = -mean.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        slopes = stationarity.class_slopes(logits, logits.softmax(-1), -member_loss, labels, pool)
    for loss, prefix in ((member_loss, ""), (ensemble, "pool_")):
        slope, curvature = derivatives(loss, scales)
        torch.testing.assert_close(getattr(slopes, f"{prefix}slope"), slope)
        torch.testing.assert_close(getattr(slopes, f"{prefix}curvature"), curvature)
    torch.testing.assert_close(slopes.pool_loss, ensemble.detach())


def trained_at(beta, examples=80, members=4, features=6):
    """Linear members with features of their own, at the exact minimum of (1 − β) mean_i L_i + β L_pool."""
    x = normal(members, examples, features, seed=3)
    y = x.mean((0, 2)) + 0.5 * normal(examples, seed=4)
    hessian = torch.zeros(members * features, members * features, dtype=torch.float64)
    target = torch.zeros(members * features, dtype=torch.float64)
    for i in range(members):
        rows = slice(i * features, (i + 1) * features)
        target[rows] = x[i].T @ y / members
        for j in range(members):
            shared = beta * x[i].T @ x[j] / members**2
            individual = (1 - beta) * x[i].T @ x[j] / members if i == j else 0.0
            hessian[rows, j * features : (j + 1) * features] = shared + individual
    weights = torch.linalg.lstsq(hessian, target.unsqueeze(1)).solution.view(members, features, 1)
    return x @ weights, y


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.75, 1.0])
def test_the_weight_of_the_pools_loss_is_revealed_exactly(beta):
    f, y = trained_at(beta)
    # Members have no intercept, so that only scaling about zero is stationary.
    centred = stationarity.value_slopes(f.transpose(0, 1), y.unsqueeze(1), torch.zeros(1, dtype=torch.float64))
    members, pool = centred.slope.mean(), centred.pool_slope.sum(1).mean()
    assert float(members / (members - pool)) == pytest.approx(beta, abs=1e-9)


def test_ownership_uses_the_examples_that_members_were_fitted_to():
    y = normal(400, 1)
    in_bag = torch.rand(5, 400, generator=draw(2)) < 0.6
    outputs = torch.where(in_bag.unsqueeze(-1), y, y + 1.5 * normal(5, 400, 1, seed=3))  # they know what they have seen
    with_bags = testing.ownership(values_tally(outputs, y, in_bag=in_bag.float()), 0.75, 0.1)
    without_bags = testing.ownership(values_tally(outputs, y, in_bag=torch.ones(1, 400)), 0.75, 0.1)
    assert with_bags is not None
    assert without_bags is not None
    assert with_bags.weight.value == pytest.approx(0, abs=1e-9)
    assert without_bags.weight.value > 0.5
    assert with_bags.overstated.value == pytest.approx(0, abs=1e-9)


def test_votes_reveal_nothing():
    votes = torch.eye(3, dtype=torch.float64)[torch.randint(3, (4, 60), generator=draw(0))]
    labels = torch.randint(3, (60,), generator=draw(1))
    settings = {"kind": "probabilities", "loss": "zero_one", "pool": "vote"}
    assert (
        testing.ownership(tally_outputs(OutputReader(votes), labels, in_bag=torch.ones(1, 60), **settings), 0.75, 0.1)
        is None
    )


# Offsets


def test_constant_offsets_of_values_are_their_squares():
    y = normal(500, 2)
    f = y + 0.5 * normal(500, 2, seed=1)
    shift = torch.tensor([[[1.0, 0.0]], [[-1.0, 0.5]], [[0.0, -0.5]]]).double()
    error = (f - y).square().sum(-1).mean()
    extra = shift.square().sum(-1).mean()
    common = (2 * (f - y).mean(0) * shift).sum(-1).mean()
    offsets = testing.constant_offsets(values_tally(f + shift, y), 0.25)
    assert offsets.value == pytest.approx(float(extra / (error + extra + common)), rel=1e-9)
    assert offsets.p < 1e-6


def test_offsets_of_logits_save_what_taking_them_away_saves():
    logits = normal(4, 3000, 3) + 2 * normal(3000, 3, seed=1)
    labels = torch.distributions.Categorical(logits=logits.mean(0)).sample()
    shift = 0.7 * torch.tensor([[1.0, -1.0, 0.0], [-1.0, 0.5, 0.5], [0.5, 0.5, -1.0], [-0.5, 0.0, 0.5]]).double()
    shifted = logits + shift.unsqueeze(1)
    loss = ds.losses.cross_entropy(shifted, labels).mean()
    offset = shifted.mean(1) - shifted.mean((0, 1))
    saved = loss - ds.losses.cross_entropy(shifted - offset.unsqueeze(1), labels).mean()
    offsets = testing.constant_offsets(logits_tally(shifted, labels, pool="score"), 0.25)
    assert offsets.value == pytest.approx(float(saved / loss), rel=0.1)


def test_noise_is_no_offset():
    y = normal(60, 1)
    offsets = testing.constant_offsets(values_tally(y + normal(5, 60, 1, seed=1), y), 0.25)
    assert offsets.value < 0.05
    assert offsets.p > 0.5


# Fitting, best members, references


def test_members_that_have_seen_parts_do_not_lean():
    """Interpolating members alone have half of the pool's gap (1/q of 1/q²), what they have in common all of it."""
    errors = normal(20_000, 1)
    unseen = torch.rand(40, 20_000, 1, generator=draw(1)) < 0.4
    y = torch.zeros(20_000, 1, dtype=torch.float64)
    test, train = values_tally(errors.expand(40, -1, -1), y), values_tally(errors * unseen, y)
    share, gap = testing.pool_gap(test, train, 0.35, 0.05)
    assert gap.value == pytest.approx(1 / 0.4**2, rel=0.1)
    assert share.value < 0.05
    assert share.p > 0.99


def test_noise_of_members_own_around_a_pool_that_memorises_is_no_leaning():
    y, t = 2 * normal(2, 1000, 1)
    test, train = y + normal(1000, 1, seed=1), t + 0.05 * normal(1000, 1, seed=2)
    tallies = [values_tally(f + normal(50, 1000, 1, seed=3 + i), x) for i, (f, x) in enumerate(((test, y), (train, t)))]
    share, _ = testing.pool_gap(*tallies, 0.35, 0.05)
    assert share.value < 0.1


def test_a_pool_that_fits_alone_has_all_of_the_gap():
    y, noise = normal(800, 1), normal(5, 800, 1, seed=1)
    offsets = 2 * (noise - noise.mean(0))
    test, train = y + 0.5 * normal(800, 1, seed=2), y + 0.05 * normal(800, 1, seed=3)
    share, gap = testing.pool_gap(values_tally(test + offsets, y), values_tally(train + offsets, y), 0.65, 0.05)
    assert share.value > 0.9
    assert max(share.p, gap.p) < 1e-6


def test_the_luckiest_of_many_equal_members_is_not_better():
    labels = torch.randint(3, (300,), generator=draw(0))
    shared = 2.0 * torch.nn.functional.one_hot(labels, 3) + normal(300, 3)
    logits = shared + 0.02 * normal(50, 300, 3, seed=1)
    best = testing.best_member(logits_tally(logits, labels), 0.98, 0.98, 1.25)
    assert best.loss.p > 0.01
    assert best.accuracy is not None
    assert best.accuracy.p > 0.01


@pytest.mark.slow
def test_a_reference_whose_members_vary_as_much_accuses_nobody():
    """Few members of a noisy kind: one ensemble's are twice as bad by chance."""
    accused = 0
    for seed in range(200):
        size = (0.6 * normal(2, 5, 1, 1, seed=seed)).exp()
        y = normal(300, 1, seed=1000 + seed)
        first, second = y + 0.3 * normal(300, 1, seed=2000 + seed) + size * normal(2, 5, 300, 1, seed=3000 + seed)
        accused += (
            testing.compare_with_reference(values_tally(first, y), values_tally(second, y), 1.2).members.p < 0.001
        )
    assert accused <= 2


# Verdicts on ensembles whose truth is known


@pytest.mark.parametrize("kind", ["noise", "minus", "shifted"])
def test_regressors_without_skill(kind):
    y = normal(400, 1)
    centre = {"noise": 0 * y, "minus": -y, "shifted": y + 3}[kind]
    audit = ds.audit(centre + 0.5 * normal(5, 400, 1, seed=1), y, task="regression")
    assert audit.verdict == "unskilled"
    assert "constant prediction" in audit.sentence


def test_members_that_each_answer_one_class_are_unskilled():
    labels = torch.randint(5, (500,), generator=draw(0))
    outputs = 0.98 * torch.eye(5).unsqueeze(1).expand(5, 500, 5) + 0.004
    assert ds.audit(outputs, labels, task="classification", kind="probabilities").verdict == "unskilled"


@pytest.mark.slow
def test_stages_of_a_boosting_are_dominated():
    x, y = make_classification(1500, 20, n_informative=8, n_classes=3, random_state=0)
    model = GradientBoostingClassifier(n_estimators=150, random_state=0).fit(x[:700], y[:700])
    stages = [p for i, p in enumerate(model.staged_predict_proba(x[700:])) if i in (0, 4, 19, 149)]
    assert ds.audit(stages, y[700:], task="classification", kind="probabilities").verdict == "dominated"


@pytest.mark.parametrize("depth", [1, 2])
def test_shallow_trees_that_vote_are_not_accused(depth):
    x, y = load_breast_cancer(return_X_y=True)
    digits = load_digits(return_X_y=True)
    for (inputs, labels), build in (
        ((x, y), partial(RandomForestClassifier, max_depth=depth)),
        (digits, partial(ExtraTreesClassifier, max_depth=depth, max_features=1)),
    ):
        forest = build(30, random_state=0).fit(inputs[::2], labels[::2])
        votes = [tree.predict(inputs[1::2]).astype(int) for tree in forest.estimators_]
        audit = ds.audit(votes, labels[1::2], task="classification", kind="labels", classes=np.unique(labels))
        assert audit.verdict not in ("collusive", "unskilled"), audit.sentence


@pytest.mark.slow(cases=["True"])
@pytest.mark.parametrize("train", [False, True])
def test_least_squares_on_shards_is_sound(train):
    for seed in range(10):
        x, weights = normal(800, 30, seed=seed), normal(30, seed=100 + seed)
        y = (x @ weights + 3 * normal(800, seed=200 + seed)).numpy()
        shards = [slice(60 * i, 60 * (i + 1)) for i in range(5)]
        models = [LinearRegression().fit(x[rows], y[rows]) for rows in shards]
        outputs = np.stack([model.predict(x) for model in models])
        in_bag = np.zeros((5, 300), dtype=bool)
        for i, rows in enumerate(shards):
            in_bag[i, rows] = True
        options = {"train": (outputs[:, :300], y[:300]), "in_bag": in_bag} if train else {}
        assert ds.audit(outputs[:, 300:], y[300:], task="regression", **options).verdict == "healthy"


def test_offsets_under_label_noise_are_reported():
    f = normal(600)
    y = f + normal(600, seed=1)
    audit = ds.audit(torch.stack([f + 0.45, f - 0.45]), y, task="regression")
    assert audit.verdict == "undecided"
    assert "constant offsets" in audit.sentence


def test_members_of_other_populations_get_advice_for_both_causes():
    x, y = normal(900), normal(900)
    y = x + 0.3 * y
    outputs = torch.stack([x + shift for shift in (-2.0, -1.0, 0.0, 1.0, 2.0)]) + 0.2 * normal(5, 900, seed=1)
    audit = ds.audit(outputs, y, task="regression")
    assert audit.verdict == "collusive"
    assert "joint loss" in audit.judgement.advice[0]
    assert "populations" in audit.judgement.advice[0]


def test_an_imbalanced_forest_has_skill():
    x, y = make_classification(4000, 10, n_informative=4, weights=[0.95], flip_y=0.02, random_state=1)
    forest = RandomForestClassifier(50, min_samples_leaf=5, random_state=0).fit(x[:2000], y[:2000])
    audit = ds.audit_estimator(forest, x[2000:], y[2000:])
    assert audit.verdict == "healthy", audit.sentence


def test_one_strong_member_among_twenty_dominates():
    y = normal(500, 1)
    strong = y + 0.2 * normal(500, 1, seed=1)
    outputs = torch.cat([strong.unsqueeze(0), 0.3 * y + 0.9 * normal(19, 500, 1, seed=2)])
    assert ds.audit(outputs, y, task="regression").verdict == "dominated"


def test_models_that_are_almost_the_same_are_redundant():
    y = normal(1500, 1)
    shared = y + 0.5 * normal(1500, 1, seed=1)
    outputs = shared + 0.08 * normal(3, 1500, 1, seed=2)
    audit = ds.audit(outputs, y, task="regression")
    assert audit.test["error_correlation"].value > 0.97
    assert audit.verdict == "redundant"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_networks_trained_jointly_on_cifar_are_caught_with_training_outputs_or_a_reference(seed):
    jointly, independent = (np.load(KEPT / f"beta-{beta}-seed-{seed}.npz") for beta in (1, 0))
    train = (jointly["train_outputs"], jointly["train_targets"])
    outputs, labels = jointly["outputs"], jointly["targets"]
    assert ds.audit(outputs, labels, **CLASSES).verdict == "undecided"
    assert ds.audit(outputs, labels, train=train, in_bag="all", **CLASSES).verdict == "collusive"
    assert ds.audit(outputs, labels, reference=independent["outputs"], **CLASSES).verdict == "collusive"
    train = (independent["train_outputs"], independent["train_targets"])
    assert ds.audit(independent["outputs"], labels, train=train, in_bag="all", **CLASSES).verdict == "healthy"


@pytest.mark.slow
def test_sound_members_are_never_accused():
    """Errors in common, errors of one's own, heavy tails, few members: 300 ensembles."""
    for seed in range(300):
        members, examples = (2, 3, 5, 12)[seed % 4], (40, 150, 600)[seed % 3]
        y = normal(examples, 1, seed=seed)
        noise = normal(members, examples, 1, seed=1000 + seed)
        if seed % 2:
            noise = noise / normal(members, examples, 1, seed=2000 + seed).abs().clamp_min(0.3)
        outputs = y + 0.3 * normal(examples, 1, seed=3000 + seed) + 0.5 * noise
        assert ds.audit(outputs, y, task="regression").verdict != "collusive"


# What a verdict tells


def test_every_verdict_reports_its_evidence():
    y = normal(300, 1)
    audit = ds.audit(y + 0.5 * normal(300, 1, seed=2) + 0.4 * normal(5, 300, 1, seed=1), y, task="regression")
    assert audit.verdict == "healthy"
    verdicts = {item.points_to for item in audit.judgement.evidence}
    assert verdicts == {"skill", "collusive", "dominated", "redundant"}
    accusing = [item for item in audit.judgement.evidence if item.points_to == "collusive"]
    assert sum(item.level for item in accusing) == pytest.approx(LIMITS.collusive_level)
    assert "Joint training is not excluded" in audit.judgement.advice[0]
    assert "5 members, 300 examples" in audit.judgement.confidence
    for item in audit.judgement.evidence:
        assert f"{item.value:.3g}" in item.numbers()
        assert item.question in audit.summary()
        assert item.question in audit.to_json()


def test_small_data_lowers_confidence():
    y = normal(60, 1)
    outputs = y + 0.5 * normal(60, 1, seed=2) + 0.4 * normal(3, 60, 1, seed=1)
    assert ds.audit(outputs, y, task="regression").judgement.confidence.startswith("low")


def test_undecided_says_what_to_bring():
    logits = normal(5, 500, 2)
    labels = torch.arange(500) % 2
    turn = (torch.arange(500) % 5 == torch.arange(5).unsqueeze(1)).unsqueeze(-1)
    logits = torch.where(turn, 15.0 * torch.nn.functional.one_hot(labels, 2), 0.1 * logits)
    audit = ds.audit(logits, labels, pool="score", **CLASSES)
    assert audit.verdict == "undecided"
    assert "`reference`" in audit.judgement.advice[0]
    assert "`in_bag`" in audit.judgement.advice[0]


def test_limits_are_a_users_to_set():
    f = normal(600)
    y = f + normal(600, seed=1)
    outputs = torch.stack([f + 0.45, f - 0.45])
    assert ds.audit(outputs, y, task="regression", limits=Limits(offset=0.05)).verdict == "collusive"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"limits": None}, "`limits` must be of type dissensus.auditing.Limits; got NoneType"),
        ({"limits": {"gain": 0.1}}, r"got dict. Use Limits\(gain=0.05\)"),
        ({"limits": Limits(gain="0.1")}, "`limits.gain` must be a finite number; got '0.1'"),
        ({"limits": Limits(offset=math.nan)}, "`limits.offset` must be a finite number; got nan"),
        ({"limits": Limits(worse=True)}, "`limits.worse` must be a finite number; got True"),
        ({"limits": Limits(level=0.0)}, "`limits.level` must lie between 0 and 1; got 0.0"),
        ({"limits": Limits(collusive_level=5)}, "`limits.collusive_level` must lie between 0 and 1; got 5"),
        ({"limits": Limits(leaning=0.5)}, "`limits.leaning` must hold 2 numbers; got 0.5"),
        ({"limits": Limits(no_skill=(0.1, None))}, "`limits.no_skill` must be a finite number; got None"),
        ({"seed": None}, "`seed` must be a whole number of at least 0; got None"),
        ({"seed": 1.5}, "`seed` must be a whole number of at least 0; got 1.5"),
        ({"seed": "1"}, "`seed` must be a whole number of at least 0; got '1'"),
        ({"seed": -1}, "`seed` must be a whole number of at least 0; got -1"),
        (
            {"seed": 2**70},
            "`seed` must be a whole number of at least 0 and at most 9223372036854775807; got a larger one",
        ),
    ],
)
def test_odd_limits_and_seeds_are_refused(setting, message, unchecked):
    y = normal(50, 1)
    with pytest.raises((TypeError, ValueError), match=message):
        ds.audit(y + normal(3, 50, 1, seed=1), y, task="regression", **setting)


def test_numpy_seeds_are_whole_numbers(unchecked):
    y = normal(50, 1)
    outputs = y + normal(3, 50, 1, seed=1)
    first, second = (ds.audit(outputs, y, task="regression", seed=seed).test for seed in (3, np.int64(3)))
    assert first == second


@pytest.mark.parametrize("reference", [False, True])
def test_tests_that_several_rules_use_are_computed_once(monkeypatch, reference):
    """Evidence, doubts and reasons of one verdict share their tests; each set of outputs has its own."""
    names = ("skill", "constant_offsets", "best_member", "best_kappa", "pooling_gain", "ownership", "constant_share")
    calls = []
    for name in (*names, "error_correlation"):
        original = getattr(testing, name)
        monkeypatch.setattr(
            testing,
            name,
            lambda tally, *arguments, name=name, f=original: calls.append((name, id(tally))) or f(tally, *arguments),
        )
    labels = torch.randint(3, (400,), generator=draw(0))
    logits = 2.0 * torch.nn.functional.one_hot(labels, 3) + normal(400, 3) + normal(5, 400, 3, seed=1)
    options = {"reference": logits.flip(0) + 0.1} if reference else {}
    audit = ds.audit(logits, labels, train=(logits, labels), in_bag="all", **options, **CLASSES)
    assert audit.verdict == "healthy"
    assert len(calls) == len(set(calls)), "a test was computed twice for the same outputs"
    assert {name for name, _ in calls} >= {"skill", "constant_offsets", "best_member", "pooling_gain", "ownership"}


def test_groups_are_the_units():
    y, repeats = normal(40, 1), 25
    outputs = y + 0.5 * normal(5, 40, 1, seed=1)
    repeated = outputs.repeat_interleave(repeats, 1), y.repeat_interleave(repeats, 0)
    names = np.repeat([f"patient {i}" for i in range(40)], repeats)
    expected, grouped = ds.audit(outputs, y, task="regression"), ds.audit(*repeated, task="regression", groups=names)
    assert grouped.test["mse"].value == pytest.approx(expected.test["mse"].value)
    assert grouped.test["mse"].high - grouped.test["mse"].low > 0.5 * (
        expected.test["mse"].high - expected.test["mse"].low
    )
    assert "40 groups" in grouped.judgement.confidence
    ungrouped = ds.audit(*repeated, task="regression")
    assert ungrouped.test["mse"].high - ungrouped.test["mse"].low < 0.5 * (
        expected.test["mse"].high - expected.test["mse"].low
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": [1, 2]}, "`groups` must hold N=50"),
        ({"in_bag": "all"}, "`in_bag` must come with `train`"),
        ({"train": True, "in_bag": "some"}, "be 'all' or a mask"),
        ({"train": True, "in_bag": np.ones((2, 50))}, "be 'all' or a mask"),
        ({"train": True, "in_bag": 2 * np.ones((3, 50))}, "Counts of a bootstrap"),
        ({"train": True, "in_bag": np.zeros((3, 50))}, "keep at least one example for every member"),
    ],
)
def test_odd_masks_and_groups_are_refused(options, message):
    y = normal(50, 1)
    outputs = y + normal(3, 50, 1, seed=1)
    options = {**options, "train": (outputs, y)} if "train" in options else options
    with pytest.raises(ValueError, match=message):
        ds.audit(outputs, y, task="regression", **options)


# Intervals


def test_the_interval_of_a_mean_is_a_bootstrap_t():
    covered = 0
    for seed in range(300):
        units = normal(25, seed=seed).exp()  # skewed
        weights = torch.zeros(999, 25, dtype=torch.float64)
        chosen = torch.randint(25, (999, 25), generator=draw(seed))
        weights.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float64))
        left_out = (units.sum() - units) / 24
        interval = intervals.studentised(float(units.mean()), left_out, weights)
        covered += interval.low <= math.exp(0.5) <= interval.high
    assert covered >= 270, "Student's t holds it 85 % of the time"


def test_two_errors_among_many_examples_do_not_widen_an_interval_without_end():
    y = torch.arange(4).repeat(50)
    logits = 8.0 * torch.nn.functional.one_hot(y, 4).double() + 0.1 * normal(5, 200, 4)
    logits[:, :2] = logits[:, :2].roll(1, -1)  # two examples that all members have wrong
    audit = ds.audit(logits, y, task="classification", kind="logits")
    accuracy, kappa = audit.test["accuracy"], audit.test["kappa"]
    assert accuracy.value == pytest.approx(0.99)
    assert 0.93 < accuracy.low < 0.975  # Wilson's interval begins at 0.964
    assert kappa.low > 0.9


def test_few_units_have_wider_intervals():
    assert expanded_confidence(20) > expanded_confidence(100) > 0.95
    z = stats.norm.ppf((1 + expanded_confidence(20)) / 2)
    assert z == pytest.approx(stats.t.ppf(0.975, 19) * math.sqrt(20 / 19), rel=1e-6)


def test_figures_of_an_audit_are_formatted_number_by_number():
    figure = Figure(0.5, 0.25, 0.75)
    assert f"{figure:.0%}" == "50% (25% to 75%)"
    assert f"{figure}" == str(figure) == "0.5 (0.25 to 0.75)"
