"""Lemmas, theorem 4 and appendix A.14 of the LDR paper on random instances, and where they fail as printed."""

import math

import numpy as np
import pytest
import torch
from oracle import softmax

from dissensus.metrics import (
    DISAGREEMENT_LOSS,
    OodCoverage,
    disagreement_indicator,
    high_loss,
    ood_coverage,
    ood_disagreement_bound,
    pair_disagreement,
    premise,
)
from dissensus.objectives import disagreement_pull, hardness, ldr

RADIUS = 1.0


def random_logits(members, batch, classes, seed, scale=2.0, signal=0.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(members, batch, classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (batch,), generator=generator)
    return logits + signal * torch.nn.functional.one_hot(labels, classes), labels


def summed_loss(logits, labels):
    return -logits.log_softmax(-1)[:, torch.arange(len(labels)), labels].sum(0)


# --- lemma 1 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("members", "classes"), [(2, 2), (2, 5), (3, 3), (6, 10)])
def test_lemma_1_disagreement_needs_a_loss_of_log_2(members, classes):
    for scale in (0.01, 1.0, 5.0):
        f, y = random_logits(members, 500, classes, members, scale)
        differ, loss = disagreement_indicator(f), summed_loss(f, y)
        assert differ.any()
        assert loss[differ].min() >= DISAGREEMENT_LOSS
        wrong = (f.argmax(-1) != y).sum(0)
        assert (loss >= wrong * math.log(2) - 1e-12).all(), "log 2 for each member that names another class"
        assert not (differ & ~high_loss(f, y, threshold=DISAGREEMENT_LOSS)).any()


def undecided_and_certain(members, tie=0.0):
    """One member at (½ + tie, ½ − tie), and the others certain of class 1, which is the label."""
    f = torch.tensor([-400.0, 400.0], dtype=torch.float64).repeat(members, 1, 1)
    f[0, 0] = torch.tensor([tie, -tie])
    return f, torch.tensor([1])


@pytest.mark.parametrize("members", [2, 5])
def test_lemma_1_no_larger_constant_will_do(members):
    f, y = undecided_and_certain(members)
    assert bool(disagreement_indicator(f))
    assert float(summed_loss(f, y)) == pytest.approx(DISAGREEMENT_LOSS, abs=1e-12)
    nearly, _ = undecided_and_certain(members, tie=1e-3)
    assert premise(nearly, y, nearly, threshold=DISAGREEMENT_LOSS + 0.01).inside_high == 0.0
    assert premise(nearly, y, nearly, threshold=DISAGREEMENT_LOSS).inside_high == 1.0


# --- lemmas 3 to 5 and theorem 4 --------------------------------------------------------------------------------------


def coverage_by_loops(high, ood, on_high, on_ood, from_ood):
    """The definitions of appendix A.4, one point at a time; Q puts the same mass on every point of `ood`."""
    balls = [{j for j, there in enumerate(ood) if np.linalg.norm(here - there) < RADIUS} for here in high]
    differ = [i for i in range(len(high)) if on_high[i]]
    union = set().union(*(balls[i] for i in differ))
    eta = [0.0] * len(high)
    for i in differ:
        eta[i] = sum(not on_ood[j] for j in balls[i]) / len(balls[i]) if balls[i] else 0.0
    mass = [len(ball) / len(ood) for ball in balls]
    from_q = [i for i in differ if from_ood[i]]
    return OodCoverage(
        covered=len(union) / len(ood),
        expected=sum(mass[i] for i in differ) / len(high),
        disagreeing=sum(on_ood[j] for j in union) / len(ood),
        guaranteed=max((mass[i] * (1 - eta[i]) for i in differ), default=0.0),
        eta=sum(eta) / len(high),
        alpha=min((mass[i] for i in from_q), default=math.nan),
        rho=len(from_q) / len(differ) if differ else math.nan,
    )


def measured(high, ood, on_high, on_ood, from_ood):
    distances = torch.cdist(torch.as_tensor(high).double(), torch.as_tensor(ood).double())
    flags = [torch.as_tensor(np.asarray(values, dtype=bool)) for values in (on_high, on_ood, from_ood)]
    return ood_coverage(distances, flags[0], flags[1], radius=RADIUS, from_ood=flags[2])


def random_world(seed):
    """Points of H and of Q in the plane. Some of H are points of Q; J is a function of the point.

    Disagreement fills a half-plane but for some noise, so that η runs from 0 to nearly 1.
    """
    generator = np.random.default_rng(seed)
    ood = generator.normal(size=(generator.integers(1, 40), 2)) * generator.uniform(0.1, 2)
    on_ood = (ood[:, 0] > generator.normal()) ^ (generator.random(len(ood)) < 0.1 * generator.integers(3))
    drawn = generator.integers(len(ood), size=generator.integers(1, 10))
    others = generator.normal(size=(generator.integers(0, 10), 2))
    high = np.concatenate([ood[drawn], others])
    on_high = np.concatenate([on_ood[drawn], generator.random(len(others)) < 0.7])
    from_ood = np.arange(len(high)) < len(drawn)
    return high, ood, on_high, on_ood, from_ood


def test_lemmas_3_and_4_and_theorem_4_on_random_worlds():
    informative = 0
    for seed in range(400):
        world = random_world(seed)
        _, _, on_high, on_ood, _ = world
        result, rate = measured(*world), on_high.mean()
        np.testing.assert_allclose(result, coverage_by_loops(*world), atol=1e-12)
        assert result.covered >= result.expected - 1e-12, "lemma 3"
        assert result.guaranteed <= result.disagreeing <= on_ood.mean() + 1e-12
        if result.rho > 0:
            assert result.expected >= result.alpha * result.rho * rate - 1e-12, "lemma 4"
            constants = {"alpha": result.alpha, "rho": result.rho, "eta": result.eta}
            bound = ood_disagreement_bound(rate, **constants)  # of E_μ[J], which is at least δ_H
            assert bound <= result.guaranteed + 1e-12, "theorem 4"
            assert ood_disagreement_bound(rate, gap=0.1, **constants) <= bound
            informative += bound > 0
    assert informative > 20


def test_lemmas_3_and_4_and_theorem_4_are_attained():
    """One ball of mass α₀ around all of H; half of H disagrees and is from Q; members differ in that ball alone."""
    high, ood = np.zeros((4, 1)), np.array([[0.0]] * 3 + [[5.0]] * 7)
    on_high, on_ood = [True, True, False, False], [True] * 3 + [False] * 7
    result = measured(high, ood, [True] * 4, on_ood, [True] * 4)
    assert result.covered == result.expected == result.guaranteed == result.alpha == pytest.approx(0.3)
    assert ood_disagreement_bound(1.0, alpha=result.alpha, rho=result.rho, eta=result.eta) == np.mean(on_ood)
    half = measured(high, ood, on_high, on_ood, on_high)
    assert half.expected == pytest.approx(half.alpha * half.rho * 0.5), "lemma 4"
    far = np.array([[0.0], [9.0]])  # a disagreement that is not from Q and has nothing of Q around it
    mixed = measured(far, ood, [True, True], on_ood, [True, False])
    assert (mixed.rho, mixed.expected) == (0.5, pytest.approx(mixed.alpha * mixed.rho))


def test_lemma_4_fails_where_high_loss_leaves_disagreement_out():
    """Assumption 4 on all training data says nothing about H if γ is above log 2: corollary 1 needs lemma 1."""
    f = torch.tensor([[[0.2, 0.0], [9.0, 0.0]], [[0.0, 9.0], [0.0, 9.0]]], dtype=torch.float64)
    y = torch.tensor([1, 1])
    from_q, ood = np.array([True, False]), np.zeros((1, 1))
    points = np.array([[0.0], [5.0]])
    differ = disagreement_indicator(f).numpy()
    assert differ.all()
    rho = from_q[differ].mean()  # ½ of the disagreements on the training data
    for gamma, holds in ((DISAGREEMENT_LOSS, True), (2.0, False)):
        high = high_loss(f, y, threshold=gamma).numpy()
        result = measured(points[high], ood, differ[high], [True], from_q[high])
        alpha = 1.0  # Q is the point 0
        assert (result.expected >= alpha * rho * differ[high].mean()) == holds
        assert math.isnan(result.alpha) != holds


def test_lemma_5_is_an_equality_for_balls_that_do_not_overlap():
    high = np.array([[0.0], [10.0], [20.0]])
    ood = np.array([[0.0], [0.1], [0.2], [0.3], [10.0], [20.0], [20.1], [99.0]])
    on_ood = np.array([True, False, False, False, True, True, False, True])
    result = measured(high, ood, [True] * 3, on_ood, [True] * 3)
    mass, eta = np.array([4, 1, 2]) / 8, np.array([3 / 4, 0, 1 / 2])
    over_witnesses = (mass * eta).sum() / mass.sum()
    assert result.disagreeing == pytest.approx((1 - over_witnesses) * result.covered)
    assert result.eta == pytest.approx(eta.mean())
    assert result.disagreeing < (1 - result.eta) * result.covered, "with the mean over μ it fails even here"


def star(spokes, hub, tip):
    """Centres c_k near a hub and near the tip of one spoke each; members differ at the hub alone.

    Returns c_k, the points of Q (`hub` of them at the hub, one per tip), and J there.
    """
    axes = np.eye(spokes)
    ood = np.concatenate([np.zeros((hub, spokes)), tip * axes])
    return 0.9 * axes, ood, np.arange(len(ood)) < hub


def test_lemma_5_is_false_where_balls_overlap():
    """Every ball holds the hub and one tip, so that η = ½ for every centre, and for any choice of witnesses."""
    centres, ood, on_ood = star(4, 1, 1.8)
    result = measured(centres, ood, [True] * 4, on_ood, [False] * 4)
    assert result.covered == 1.0
    assert result.eta == 0.5
    assert result.disagreeing == pytest.approx(0.2)
    assert result.disagreeing < (1 - result.eta) * result.covered
    assert result.disagreeing < result.covered - result.eta


def test_theorem_4_is_false_with_the_mean_over_witnesses():
    """Eighty examples of H lie at the hub, whose ball holds all of Q; every tip has a centre as its witness."""
    centres, ood, on_ood = star(20, 3, 0.7)
    high = np.concatenate([np.zeros((80, 20)), centres])
    from_ood = np.arange(100) < 80
    result = measured(high, ood, [True] * 100, on_ood, from_ood)
    rate = on_ood.mean()
    assert (result.alpha, result.rho) == (1.0, 0.8)
    assert (np.linalg.norm(ood[:, None] - ood, axis=-1) < RADIUS).all(), "assumption 3, for every point of Q"
    constants = {"alpha": result.alpha, "rho": result.rho}
    assert 0 < ood_disagreement_bound(1.0, eta=result.eta, **constants) <= rate
    of_a_centre = 1 / 4  # three at the hub and one tip
    assert ood_disagreement_bound(1.0, eta=of_a_centre, **constants) > 4 * rate


def test_one_disagreement_covers_as_much_as_many():
    """The bound grows with δ_H, what it bounds does not: the same ball is covered by one point of H."""
    ood, on_ood = np.zeros((10, 1)), [True] * 10
    shares = [0.1, 0.5, 1.0]
    results = [measured(np.zeros((10, 1)), ood, np.arange(10) < 10 * s, on_ood, [True] * 10) for s in shares]
    assert [r.guaranteed for r in results] == [1.0, 1.0, 1.0]
    bounds = [
        ood_disagreement_bound(s, alpha=r.alpha, rho=r.rho, eta=r.eta) for s, r in zip(shares, results, strict=True)
    ]
    assert bounds == pytest.approx(shares)


def test_mu_is_uniform_over_the_examples_so_that_the_gap_is_zero():
    """Inequality 11: the empirical disagreement on H is the mean over μ = Unif(H) itself."""
    f, y = random_logits(4, 60, 3, 1)
    high = high_loss(f, y, share=0.3)
    assert premise(f, y, f, share=0.3).delta == pytest.approx(float(pair_disagreement(f[:, high]).mean()))


def test_coverage_at_the_edges():
    nobody = measured([[0.0]], [[0.0], [3.0]], [False], [True, True], [True])
    assert nobody[:5] == (0.0, 0.0, 0.0, 0.0, 0.0)
    assert math.isnan(nobody.alpha)
    assert math.isnan(nobody.rho)
    alone = measured([[9.0]], [[0.0]], [True], [False], [False])
    assert alone[:5] == (0.0, 0.0, 0.0, 0.0, 0.0)
    assert (alone.rho, math.isnan(alone.alpha)) == (0.0, True)
    yes = torch.tensor([True])
    on_the_rim = ood_coverage(torch.tensor([[2.0]]), yes, yes, radius=2.0)
    assert on_the_rim.covered == 0.0, "balls are open"
    assert math.isnan(on_the_rim.rho)


YES = torch.ones(2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ood_coverage(torch.zeros(2), YES, YES, radius=1.0), r"`distances` must have shape \[H, U\]"),
        (lambda: ood_coverage(torch.zeros(0, 2), YES[:0], YES, radius=1.0), "examples on both sides"),
        (lambda: ood_coverage(-torch.ones(2, 2), YES, YES, radius=1.0), "at least 0; got negative numbers or NaN"),
        (lambda: ood_coverage(torch.full((2, 2), math.nan), YES, YES, radius=1.0), "NaN"),
        (lambda: ood_coverage(torch.zeros(2, 2), YES, YES, radius=0.0), "`radius` must be a number above 0"),
        (lambda: ood_coverage(torch.zeros(2, 3), YES, YES, radius=1.0), r"`on_ood` must have shape \[3\]"),
        (lambda: ood_coverage(torch.zeros(3, 2), YES, YES, radius=1.0), r"`on_high` must have shape \[3\]"),
        (lambda: ood_coverage(torch.zeros(2, 2), YES.int(), YES, radius=1.0), r"Use on_high.bool\(\)"),
        (
            lambda: ood_coverage(torch.zeros(2, 2), YES, YES, radius=1.0, from_ood=YES[:1]),
            r"`from_ood` must have shape \[2\]",
        ),
        (lambda: ood_disagreement_bound(1.1, alpha=0.5, rho=0.5, eta=0.5), "`delta` must"),
        (lambda: ood_disagreement_bound(0.5, alpha=math.nan, rho=0.5, eta=0.5), "`alpha` must"),
        (lambda: ood_disagreement_bound(0.5, alpha=0.5, rho=0.0, eta=0.5), "`rho` must be a number above 0"),
        (lambda: ood_disagreement_bound(0.5, alpha=0.5, rho=0.5, eta=-0.1), "`eta` must"),
        (lambda: ood_disagreement_bound(0.5, alpha=0.5, rho=0.5, eta=0.5, gap=-1.0), "`gap` must"),
    ],
)
def test_invalid_arguments_are_refused(call, message, unchecked):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


# --- appendix A.14 ----------------------------------------------------------------------------------------------------


def pull_by_loops(logits, labels, strength, alpha):
    """The terms of equations 7 and 21, one pair at a time, in every case of which members predict the label."""
    members, batch, _ = logits.shape
    pull = np.zeros((members, batch))
    for n, m, k in np.ndindex(batch, members, members):
        if m == k:
            continue
        p, q = softmax(logits[m, n]), softmax(logits[k, n])
        y = int(labels[n])
        f, g = p[y], q[y]
        c = f + g - 2 * f * g
        for predicted in (int(np.argmax(p)), int(np.argmax(q))):  # the two terms of equation 17
            if predicted == y:
                pull[m, n] += strength / (2 * (members - 1)) * alpha[n] * f * (2 * g - 1) / c
    return pull


@pytest.mark.parametrize(("members", "classes"), [(2, 2), (2, 4), (5, 3)])
def test_pull_is_equation_7_in_every_case(members, classes):
    f, y = random_logits(members, 150, classes, classes, signal=1.0)
    alpha = hardness(f, y)
    expected = pull_by_loops(f.numpy(), y.numpy(), 1.7, alpha.numpy())
    actual = disagreement_pull(f, y, strength=1.7)
    torch.testing.assert_close(actual, torch.as_tensor(expected))
    right = (f.argmax(-1) == y).sum(0)
    assert {0, 1, members} <= set(right.tolist()), "all cases are among the examples"
    assert (actual[:, right == 0] == 0).all(), "equation 18"
    torch.testing.assert_close(disagreement_pull(f, y, strength=1.7, alpha=2 * alpha), 2 * actual)
    inverse = hardness(f, y, "inverse")
    torch.testing.assert_close(
        disagreement_pull(f, y, strength=1.0, weight="inverse"), disagreement_pull(f, y, strength=1.0, alpha=inverse)
    )


@pytest.mark.parametrize("members", [2, 4])
def test_pull_is_the_gradient_of_the_objective(members):
    """∂/∂p_y = (−1 + pull) / p_y, with all other probabilities held constant."""
    f, y = random_logits(members, 12, 3, 3, signal=1.5)
    alpha = hardness(f, y)
    probs = f.softmax(-1).requires_grad_()
    at_label = probs[:, torch.arange(12), y]
    total = -at_label.log().sum()
    predicted = f.argmax(-1)
    for m in range(members):
        for k in range(m):
            for named in (predicted[m], predicted[k]):
                p, q = (probs[i, torch.arange(12), named] for i in (m, k))
                total = total - 1.3 / (members - 1) * (alpha * (p * (1 - q) + q * (1 - p)).log()).sum() / 2
    torch.testing.assert_close(ldr(f, y, strength=1.3).total, total.detach() / 12)
    (grad,) = torch.autograd.grad(total, probs)
    pull = disagreement_pull(f, y, strength=1.3)
    torch.testing.assert_close(grad[:, torch.arange(12), y], (pull - 1) / at_label.detach())


def two_members(f, g):
    """Logits of two members that give label 0 the probabilities f and g, of two classes."""
    probs = torch.as_tensor(np.array([f, g]), dtype=torch.float64)
    return torch.stack([probs, 1 - probs], -1).log(), torch.zeros(probs.shape[1], dtype=torch.int64)


GRID = np.linspace(0.01, 0.99, 99)


def test_the_terms_of_equation_21_clash_only_if_the_other_member_predicts_the_label():
    f, g = (values.flatten() for values in np.meshgrid(GRID, GRID))
    c = f + g - 2 * f * g
    assert c.min() > 0
    assert c.max() < 1
    pull = disagreement_pull(*two_members(f, g), strength=2.0, alpha=torch.ones(len(f)).double()).numpy()[0]
    both, first, second = (f >= 0.5) & (g >= 0.5), (f >= 0.5) & (g < 0.5), (f < 0.5) & (g >= 0.5)
    single = f * (2 * g - 1) / c
    np.testing.assert_allclose(pull[both], 2 * single[both], atol=1e-12)
    np.testing.assert_allclose(pull[first | second], single[first | second], atol=1e-12)
    assert (pull[first] < 0).all(), "y predicted by f alone: both terms raise its probability"
    assert (pull[second & (g > 0.5)] > 0).all(), "y predicted by g alone: they clash"
    assert (pull[(f < 0.5) & (g < 0.5)] == 0).all()


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.5, 4.0])
def test_equations_22_and_23_have_a_balance_for_some_probabilities_only(alpha):
    """Equation 23 has f_y on both sides. Solved: f = g / (α|2g − 1| + 2g − 1), which need not lie in (0, 1)."""
    for g in GRID:
        slope = 2 * g - 1
        first, second = 1 / GRID, alpha * abs(slope) / (GRID + g - 2 * GRID * g)
        dominated = second > first
        assert (np.diff(dominated.astype(int)) >= 0).all(), "first below the balance, second above it"
        denominator = alpha * abs(slope) + slope
        balance = g / denominator if denominator > 1e-12 else math.inf
        clear = np.abs(GRID - balance) > 1e-9
        np.testing.assert_array_equal(dominated[clear], (balance < GRID)[clear])
        if balance < 1:
            c = balance + g - 2 * balance * g
            assert 1 / balance == pytest.approx(alpha * abs(slope) / c), "equation 22"
            assert balance == pytest.approx(c / (alpha * abs(slope))), "equation 23"
        exists = g > (alpha + 1) / (2 * alpha + 1) or (alpha > 1 and g < (alpha - 1) / (2 * alpha - 1))
        assert (balance < 1 - 1e-9) == exists, "the paper has a balance for every constant α"


@pytest.mark.parametrize("gamma", [1.0, 1.5, 5.0])
def test_equations_8_24_and_25_are_sufficient_and_not_necessary(gamma):
    f, g = (values.flatten() for values in np.meshgrid(GRID, GRID))
    c = f + g - 2 * f * g
    slope = np.abs(2 * g - 1)
    dominates = gamma * slope / (f * c) >= 1 / f - 1e-12  # equation 24
    simple = slope >= 1 / gamma  # equations 8 and 25
    assert dominates[simple].all()
    assert (dominates & ~simple).any()
    sharp = gamma * slope >= np.maximum(g, 1 - g)
    assert (sharp | ~simple).all(), "the sharp condition contains that of the paper"
    for value in GRID:
        at = g == value
        if sharp[at].all():
            assert dominates[at].all()
    grid, other = (
        np.array([1e-9, 1 - 1e-9]),
        GRID[~np.isclose(gamma * np.abs(2 * GRID - 1), np.maximum(GRID, 1 - GRID))],
    )
    for value in other:  # at the ends of f the sharp condition is necessary
        ends = gamma * abs(2 * value - 1) >= grid + value - 2 * grid * value
        assert ends.all() == (gamma * abs(2 * value - 1) >= max(value, 1 - value))
    one_sided = (f >= 0.5) ^ (g >= 0.5)
    pull = disagreement_pull(*two_members(f, g), strength=2.0, alpha=torch.as_tensor(gamma / f)).abs().numpy()[0]
    np.testing.assert_array_equal(pull[one_sided] >= 1 - 1e-12, dominates[one_sided])


def test_disagreement_pulls_hardest_on_the_examples_that_are_learnt_best():
    """A.14 wants a small gradient on easy examples; relative to the cross-entropy it is the largest there."""
    right = torch.tensor([0.6, 0.9, 0.99, 0.9999, 1 - 1e-8], dtype=torch.float64)
    f = torch.stack([right, 1 - right], -1).log().expand(3, -1, -1)
    y = torch.zeros(5, dtype=torch.int64)
    mean_loss = -right.log().mean()
    pull = disagreement_pull(f, y, strength=0.4)
    assert (pull.diff(dim=1) > 0).all()
    limit = 0.4 / (2 * float(mean_loss) ** 2)
    assert (pull <= limit).all()
    assert float(pull[0, -1]) == pytest.approx(limit, rel=1e-6)
    torch.testing.assert_close(pull[0], 0.4 * hardness(f, y) * (2 * right - 1) / (2 * (1 - right)))


@pytest.mark.parametrize("members", [2, 5])
def test_too_much_strength_unlearns_labels(members):
    """Members that are alike and right: the sign of the gradient at the label turns where pull is one."""
    right = 0.97
    probs = torch.tensor([right, 0.02, 0.01], dtype=torch.float64)
    y = torch.zeros(4, dtype=torch.int64)
    turning = 2 * -math.log(right) * (1 - right) / (2 * right - 1)
    for strength, sign in ((0.99 * turning, -1), (1.01 * turning, 1)):
        f = probs.log().repeat(members, 4, 1).requires_grad_()
        (grad,) = torch.autograd.grad(ldr(f, y, strength=strength).total, f)
        assert (grad[..., 0].sign() == sign).all()
        assert (disagreement_pull(f.detach(), y, strength=strength) > 1).all() == (sign == 1)


def test_pull_at_the_edges():
    y = torch.tensor([0])
    one = torch.ones(1)
    ruled_out = torch.tensor([-math.inf, 0.0])
    undecided = torch.tensor([0.0, 0.0])
    pull = disagreement_pull(torch.stack([undecided, ruled_out]).unsqueeze(1), y, strength=2.0, alpha=one)
    torch.testing.assert_close(pull, torch.tensor([[-1.0], [0.0]]))  # −p/p, and 0 · (2 · ½ − 1) / ½
    both = disagreement_pull(ruled_out.expand(2, 1, 2), y, strength=2.0, alpha=one)
    assert (both == 0).all()
    far = torch.tensor([1e4, 0.0]).expand(3, 1, 2)
    assert (disagreement_pull(far, y, strength=1.0) == 0).all(), "α_n is 0"
    assert (disagreement_pull(far, y, strength=1.0, alpha=one) == math.inf).all()
    wrong = disagreement_pull(torch.tensor([[1e4, 0.0], [0.0, 1e4]]).unsqueeze(1), y, strength=2.0, alpha=one)
    torch.testing.assert_close(wrong, torch.tensor([[-1.0], [0.0]]))
    half = disagreement_pull(torch.randn(2, 1, 3).bfloat16(), y, strength=1.0)
    assert half.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(1, 2, 3)}, "two members"),
        ({"logits": torch.zeros(2, 2, 1)}, "two classes"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"\[B=2\]"),
        ({"weight": "los"}, "`weight`"),
        ({"alpha": torch.ones(3)}, r"`alpha` must have shape \[B=2\]"),
    ],
)
def test_pull_refuses_what_does_not_fit(change, message, unchecked):
    arguments = {"logits": torch.zeros(2, 2, 3), "labels": torch.zeros(2, dtype=torch.int64), "strength": 1.0} | change
    with pytest.raises(ValueError, match=message):
        disagreement_pull(**arguments)
