"""Losses of real values, counts and labels: values, ensembles, objectives and training, against slow versions."""

import math
import warnings
from functools import partial

import numpy as np
import pytest
import regression_loss_oracles as oracles
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import dissensus as ds
from dissensus import losses
from dissensus.data import TensorBatches

M, B = 3, 7
LEVELS = (0.1, 0.35, 0.9)
WEIGHTS = [0.5, 0.2, 0.3]
QUANTILE = partial(ds.losses.quantile, levels=LEVELS)


def draw(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def coins(*shape, seed=0):
    return (draw(*shape, seed=seed) > 0).double()


def counts(*shape, seed=0):
    return draw(*shape, seed=seed, scale=3).abs().round()


class Case:
    """A loss with a pool, and outputs and targets of it that are away from neutral values."""

    def __init__(self, loss, pool, width, targets, settings=None, name=None):
        self.loss, self.pool, self.targets = loss, pool, targets
        self.settings = settings or {}
        self.name = name or loss
        self.outputs = draw(M, B, width, seed=width, scale=1.3)

    @property
    def oracle(self):
        return {"loss": self.name, "pool": self.pool, **self.settings}

    @property
    def both(self):
        return {"loss": self.loss, "pool": self.pool}


CASES = {
    "gaussian": Case("gaussian_nll", "probability", 2, draw(B, 1, seed=20)),
    "gaussian, three targets": Case("gaussian_nll", "probability", 6, draw(B, 3, seed=21)),
    "gaussian, a high floor": Case(
        partial(ds.losses.gaussian_nll, floor=0.3),
        "probability",
        4,
        draw(B, 2, seed=22),
        {"floor": 0.3},
        "gaussian_nll",
    ),
    "labels, probability": Case("bce", "probability", 4, coins(B, 4, seed=23)),
    "labels, score": Case("bce", "score", 4, coins(B, 4, seed=23)),
    "labels, soft": Case("bce", "probability", 3, draw(B, 3, seed=24).sigmoid()),
    "quantiles": Case("quantile", "score", 3, draw(B, 1, seed=25), {"levels": losses.QUANTILE_LEVELS}),
    "quantiles, levels": Case(QUANTILE, "score", 6, draw(B, 2, seed=26), {"levels": LEVELS}, "quantile"),
    "counts, probability": Case("poisson", "probability", 2, counts(B, 2, seed=27)),
    "counts, score": Case("poisson", "score", 2, counts(B, 2, seed=27)),
    "squared error": Case("squared_error", "score", 3, draw(B, 3, seed=28)),
    "mean squared error": Case("mse", "score", 3, draw(B, 3, seed=28)),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def _told_of_the_mean():
    """The warning about `mse` has been given, except where a test asks for it."""
    before = set(losses._told)
    losses._told.add("mse")
    yield
    losses._told.clear()
    losses._told.update(before)


def close(actual, expected, rtol=1e-10, atol=1e-12):
    torch.testing.assert_close(
        torch.as_tensor(actual), torch.as_tensor(expected, dtype=torch.float64), rtol=rtol, atol=atol
    )


# --- values -----------------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("weights", [None, WEIGHTS, [0.7, 0.0, 0.3]], ids=["equal", "weighted", "one absent"])
def test_decompositions_are_those_of_the_definitions(case, weights):
    parts = ds.diversity.decompose(case.outputs, case.targets, weights=weights, **case.both)
    expected = oracles.over_batch(case.outputs.numpy(), case.targets.numpy(), weights=weights, **case.oracle)
    for part, value in zip(parts, expected, strict=True):
        close(part, value)
    assert not torch.equal(parts.ensemble, parts.individual)


@every_case
def test_losses_of_members_are_those_of_the_definitions(case):
    values = ds.losses.per_member(case.loss, case.outputs, case.targets)
    for j in range(M):
        one = oracles.over_batch(case.outputs[j : j + 1].numpy(), case.targets.numpy(), **case.oracle)
        close(values[j], one[1])
        close(losses.function_of(case.loss)(case.outputs[j], case.targets), one[1])


@pytest.mark.parametrize("case", [c for n, c in CASES.items() if n in ("gaussian", "quantiles")])
def test_one_target_may_be_a_vector(case):
    column = ds.diversity.decompose(case.outputs, case.targets, **case.both)
    vector = ds.diversity.decompose(case.outputs, case.targets.squeeze(-1), **case.both)
    assert all(torch.equal(a, b) for a, b in zip(column, vector, strict=True))


def test_the_first_pool_of_a_loss_is_its_default():
    """Training watches the loss of this pool where the objective names none."""
    first = {name: entry.pools[0] for name, entry in losses.LOSSES.items()}
    assert {name for name, pool in first.items() if pool == "probability"} == {
        "gaussian_nll",
        "bce",
        "cross_entropy",
        "brier",
        "zero_one",
    }
    assert first["poisson"] == "score", "as in 0.1"


def test_losses_agree_with_torch_where_they_coincide():
    mean, log_variance = draw(B, 2, seed=1), draw(B, 2, seed=2)
    targets = draw(B, 2, seed=3)
    ours = ds.losses.gaussian_nll(torch.cat([mean, log_variance], -1), targets, floor=1e-12)
    torchs = nn.GaussianNLLLoss(full=True, reduction="none", eps=1e-12)(mean, targets, log_variance.exp())
    close(ours, torchs.sum(-1), rtol=1e-9)
    labels = coins(B, 2, seed=4)
    torchs = F.binary_cross_entropy_with_logits(mean, labels, reduction="none")
    close(ds.losses.bce(mean, labels), torchs.mean(-1))
    numbers = counts(B, 2, seed=5)
    torchs = nn.PoissonNLLLoss(log_input=True, full=False, reduction="none")(mean, numbers)
    close(ds.losses.poisson(mean, numbers), torchs.sum(-1))
    close(ds.losses.mse(mean, targets).mean(), F.mse_loss(mean, targets))
    close(ds.losses.squared_error(mean, targets), F.mse_loss(mean, targets, reduction="none").sum(-1))


def test_predictions_are_those_of_the_mixture():
    outputs = draw(M, B, 6, seed=4)
    for weights in (None, WEIGHTS, [0.0, 0.6, 0.4]):
        moments = ds.pooling.moment_matched(*ds.losses.gaussian_moments(outputs), weights)
        for part, expected in zip(moments, oracles.mixture_moments(outputs.numpy(), weights), strict=True):
            close(part, expected)
        log_odds = ds.pooling.mean_label_probability(outputs, weights)
        close(log_odds.sigmoid(), oracles.mean_label_probability(outputs.numpy(), weights))
        close(ds.pooling.probabilities(outputs, weights), ds.pooling.mean_probability(outputs, weights).exp())
    close(ds.pooling.probabilities(outputs), outputs.softmax(-1).mean(0))


def test_the_moments_of_a_mixture_are_those_of_its_samples():
    outputs = torch.tensor([[[-1.0, 0.5]], [[2.0, -1.0]]], dtype=torch.float64)
    mean, variance = (part.squeeze() for part in ds.losses.gaussian_moments(outputs))
    grid = torch.linspace(-15, 15, 20001, dtype=torch.float64)
    density = torch.distributions.Normal(mean, variance.sqrt()).log_prob(grid.unsqueeze(-1)).exp().mean(-1)
    centre = torch.trapezoid(density * grid, grid)
    spread = torch.trapezoid(density * (grid - centre).square(), grid)
    moments = ds.pooling.moment_matched(*ds.losses.gaussian_moments(outputs))
    close(moments.mean.squeeze(), float(centre), rtol=1e-8)
    close((moments.aleatoric + moments.epistemic).squeeze(), float(spread), rtol=1e-8)


# --- gradients --------------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_gradients(case, beta):
    def total(outputs):
        return ds.objectives.augmented(outputs, case.targets, beta=beta, weights=WEIGHTS, **case.both).total

    assert torch.autograd.gradcheck(total, case.outputs.clone().requires_grad_())


def test_gradients_of_predictions():
    outputs = draw(M, 2, 4, seed=1).requires_grad_()
    moments = ds.losses.gaussian_moments
    assert torch.autograd.gradcheck(lambda f: tuple(ds.pooling.moment_matched(*moments(f), WEIGHTS)), outputs)
    assert torch.autograd.gradcheck(lambda f: ds.pooling.mean_label_probability(f, WEIGHTS), outputs)
    assert torch.autograd.gradcheck(lambda f: ds.pooling.probabilities(f, WEIGHTS), outputs)


def test_the_gradient_of_a_quantile_at_the_target_is_the_mean_of_both_slopes():
    outputs = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    loss = ds.losses.quantile(outputs, torch.zeros(1, dtype=torch.float64), levels=(0.9,))
    (gradient,) = torch.autograd.grad(loss.sum(), outputs)
    close(gradient.squeeze(), (-0.9 + 0.1) / 2)


# --- edges ------------------------------------------------------------------------------------------------------------


@every_case
def test_one_member_and_identical_members_have_no_diversity(case):
    one = ds.diversity.decompose(case.outputs[:1], case.targets, **case.both)
    many = ds.diversity.decompose(case.outputs[:1].expand(4, -1, -1), case.targets, **case.both)
    for parts in (one, many):
        assert parts.diversity.abs().max() < 1e-12
        close(parts.ensemble, losses.per_member(case.loss, case.outputs[:1], case.targets)[0], atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_gaussians_of_extreme_variance_are_finite_and_have_gradients(dtype, extreme):
    outputs = torch.tensor([[[0.0, extreme]], [[1.0, 0.0]]], dtype=dtype, requires_grad=True)
    targets = torch.tensor([[0.5]], dtype=dtype)
    parts = ds.diversity.decompose(outputs, targets, loss="gaussian_nll", pool="probability")
    (gradient,) = torch.autograd.grad(sum(part.sum() for part in parts), outputs)
    assert all(bool(part.isfinite().all()) for part in (*parts, gradient))
    log_variance = extreme if extreme > 0 else math.log(losses.VARIANCE_FLOOR)
    first = 0.5 * (0.25 * math.exp(-log_variance) + log_variance + math.log(2 * math.pi))
    second = 0.5 * (0.25 / (1 + 1e-6) + math.log(1 + 1e-6) + math.log(2 * math.pi))
    close(parts.individual.double(), [(first + second) / 2], rtol=1e-5)
    close(parts.ensemble.double(), [second + math.log(2)], rtol=1e-5)  # the other has no density at the target


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_exact_prediction_has_a_finite_loss(dtype):
    outputs = torch.tensor([[[0.5, 0.25, -1e4, -math.inf]]], dtype=dtype, requires_grad=True)
    parts = ds.diversity.decompose(
        outputs, torch.tensor([[0.5, 0.25]], dtype=dtype), loss="gaussian_nll", pool="probability"
    )
    close(parts.ensemble.double(), [2 * 0.5 * math.log(2 * math.pi * 1e-6)], rtol=1e-6)
    (gradient,) = torch.autograd.grad(parts.ensemble.sum(), outputs)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pool", ["probability", "score"])
def test_labels_of_extreme_logits_are_finite_and_have_gradients(dtype, pool):
    outputs = torch.tensor([[[1e4, -1e4, 1e4]], [[-1e4, -1e4, 1e4]]], dtype=dtype, requires_grad=True)
    targets = torch.tensor([[1.0, 1.0, 1.0]], dtype=dtype)
    parts = ds.diversity.decompose(outputs, targets, loss="bce", pool=pool)
    (gradient,) = torch.autograd.grad(parts.ensemble.sum() + parts.individual.sum(), outputs)
    assert all(bool(part.isfinite().all()) for part in (*parts, gradient))
    close(parts.individual.double(), [(1e4 / 2 + 1e4) / 3], rtol=1e-6)
    close(parts.ensemble.double(), [(math.log(2) + 1e4) / 3], rtol=1e-6)
    pooled = ds.pooling.mean_label_probability(outputs)
    close(pooled.double(), [[0.0, -1e4, 1e4]], rtol=1e-6, atol=1e-6)


def test_a_mixture_of_counts_outlives_a_rate_that_overflows():
    outputs = torch.tensor([[[1e4]], [[1.0]]], dtype=torch.float64)
    targets = torch.tensor([[2.0]], dtype=torch.float64)
    parts = ds.diversity.decompose(outputs, targets, loss="poisson", pool="probability")
    close(parts.ensemble, [math.e - 2 + math.log(2)])
    assert parts.individual == math.inf


def test_a_rate_of_zero_is_certain_that_nothing_is_counted():
    outputs = torch.tensor([[-math.inf], [-math.inf]], dtype=torch.float64, requires_grad=True)
    values = ds.losses.poisson(outputs, torch.tensor([0.0, 1.0]))
    close(values, [0.0, math.inf])
    (gradient,) = torch.autograd.grad(values[0], outputs)
    close(gradient.flatten(), [0.0, 0.0])


@every_case
def test_nan_stays_at_its_own_example(case):
    spoilt = case.outputs.clone()
    spoilt[1, 2, -1] = math.nan
    targets = case.targets.clone()
    targets[4, 0] = math.nan
    clean = ds.diversity.decompose(case.outputs, case.targets, **case.both)
    for part, expected in zip(ds.diversity.decompose(spoilt, targets, **case.both), clean, strict=True):
        assert part.isnan().nonzero().flatten().tolist() == [2, 4]
        rest = [0, 1, 3, 5, 6]
        torch.testing.assert_close(part[rest], expected[rest])


@every_case
def test_a_member_of_weight_zero_is_absent(case):
    weights = [0.0, 0.4, 0.6]
    outputs = case.outputs.clone()
    outputs[0] = math.nan
    outputs.requires_grad_()
    with_it = ds.diversity.decompose(outputs, case.targets, weights=weights, **case.both)
    without = ds.diversity.decompose(outputs[1:], case.targets, weights=weights[1:], **case.both)
    for part, expected in zip(with_it, without, strict=True):
        torch.testing.assert_close(part, expected)
    (gradient,) = torch.autograd.grad(with_it.ensemble.sum() + with_it.individual.sum(), outputs)
    assert (gradient[0] == 0).all()
    assert gradient[1:].isfinite().all()


def test_predictions_without_a_member_of_weight_zero():
    outputs = draw(M, B, 4, seed=5)
    outputs[0] = math.nan
    weights = [0.0, 0.4, 0.6]
    moments = ds.losses.gaussian_moments
    for function in (
        ds.pooling.mean_label_probability,
        ds.pooling.probabilities,
        lambda f, w: torch.stack(ds.pooling.moment_matched(*moments(f), w)),
    ):
        torch.testing.assert_close(function(outputs, weights), function(outputs[1:], weights[1:]))


@every_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(case, dtype):
    half = case.outputs.to(dtype)
    parts = ds.diversity.decompose(half, case.targets, **case.both)
    expected = ds.diversity.decompose(half.float(), case.targets, **case.both)
    for part, value in zip(parts, expected, strict=True):
        assert part.dtype == torch.float32
        assert torch.equal(part, value)
    assert losses.function_of(case.loss)(half[0], case.targets).dtype == torch.float32
    total = ds.objectives.augmented(half, case.targets, beta=0.5, **case.both).total
    assert total.dtype == torch.float32


def test_predictions_of_half_precision_are_float32():
    half = draw(M, B, 4).half()
    for part in (
        *ds.losses.gaussian_moments(half),
        *ds.pooling.moment_matched(half, half.exp()),
        ds.pooling.mean_label_probability(half),
        ds.pooling.probabilities(half),
    ):
        assert part.dtype == torch.float32


@every_case
def test_dense_outputs_are_positions(case):
    width, number = case.outputs.shape[-1], case.targets.shape[-1]
    shape = (2, 3)
    outputs = draw(M, 2, width, *shape, seed=9)
    repeats = math.ceil(2 * math.prod(shape) / B)
    targets = case.targets.repeat(repeats, 1)[: 2 * math.prod(shape)].view(2, *shape, number).movedim(-1, 1)
    flat = outputs.movedim(2, -1).flatten(1, -2), targets.movedim(1, -1).flatten(0, -2)
    expected = ds.diversity.decompose(*flat, **case.both)
    for part, value in zip(ds.diversity.decompose(outputs, targets, **case.both), expected, strict=True):
        torch.testing.assert_close(part, value.view(2, *shape))
    total = ds.objectives.augmented(outputs, targets, beta=0.5, **case.both).total
    torch.testing.assert_close(total, ds.objectives.augmented(*flat, beta=0.5, **case.both).total)
    if number == 1:  # one target per position
        vector = ds.diversity.decompose(outputs, targets.squeeze(1), **case.both)
        torch.testing.assert_close(vector.ensemble, expected.ensemble.view(2, *shape))


def test_dense_predictions():
    outputs = draw(M, 2, 4, 3, 5)
    flat = outputs.movedim(2, -1)
    log_odds = ds.pooling.mean_label_probability(outputs)
    torch.testing.assert_close(log_odds.movedim(1, -1), ds.pooling.mean_label_probability(flat))
    probs = ds.pooling.probabilities(outputs)
    torch.testing.assert_close(probs.sum(1), torch.ones(2, 3, 5, dtype=torch.float64))
    torch.testing.assert_close(probs.movedim(1, -1), ds.pooling.probabilities(flat, class_axis=-1))
    moments = ds.losses.gaussian_moments(outputs, class_axis=2)
    for part, expected in zip(moments, ds.losses.gaussian_moments(flat.flatten(1, -2)), strict=True):
        torch.testing.assert_close(part.movedim(2, -1).flatten(1, -2), expected)
    pooled = ds.pooling.moment_matched(*moments)
    assert pooled.mean.shape == (2, 2, 3, 5)
    with pytest.raises(ValueError, match=r"have shape \[B, 2D\] or \[M, B, 2D\].*Use class_axis=2"):
        ds.losses.gaussian_moments(outputs)


@every_case
def test_numpy_arrays_are_taken_as_tensors(case):
    expected = ds.diversity.decompose(case.outputs, case.targets, **case.both)
    parts = ds.diversity.decompose(case.outputs.numpy(), case.targets.numpy(), **case.both)
    assert all(torch.equal(a, b) for a, b in zip(parts, expected, strict=True))


# --- refusals ---------------------------------------------------------------------------------------------------------


def decomposed(outputs, targets, loss, pool):
    return ds.diversity.decompose(outputs, targets, loss=loss, pool=pool)


Z = torch.zeros
REFUSALS = {
    "no examples": (
        lambda: decomposed(Z(2, 0, 2), Z(0, 1), "gaussian_nll", "probability"),
        r"at least one member, example and output; got \[M=2, B=0, C=2\]",
    ),
    "no members": (lambda: decomposed(Z(0, 3, 2), Z(3, 1), "bce", "score"), "at least one member"),
    "no members to match": (lambda: ds.pooling.moment_matched(Z(0, 3, 1), Z(0, 3, 1)), "`mean` must .*member"),
    "no members to pool": (lambda: ds.pooling.mean_label_probability(Z(0, 3, 1)), "`logits` must .*member"),
    "means of whole numbers": (
        lambda: ds.pooling.moment_matched(Z(2, 3, 1).long(), Z(2, 3, 1).long()),
        "`mean` must be floating point",
    ),
    "odd width": (
        lambda: ds.losses.gaussian_nll(Z(3, 3), Z(3, 1)),
        r"`outputs` must have two outputs per target: D means, then D log-variances; got \[3, 3\]. Change the network",
    ),
    "odd width of moments": (lambda: ds.losses.gaussian_moments(Z(3, 1)), "two outputs per target"),
    "one output per target": (
        lambda: decomposed(Z(2, 3, 2), Z(3, 2), "gaussian_nll", "probability"),
        r"must go with the 2 outputs of the network under the loss 'gaussian_nll'.*The network needs 4 outputs",
    ),
    "targets of gaussians": (
        lambda: ds.losses.gaussian_nll(Z(3, 2), Z(3, 2)),
        r"`targets` must have shape \[B=3, D=1\]; got \[3, 2\]. 2 outputs are a mean and a log-variance of 1 target",
    ),
    "quantiles per target": (
        lambda: ds.losses.quantile(Z(3, 4), Z(3, 1)),
        r"`outputs` must have 3 outputs per target, one for each of the levels \(0.05, 0.5, 0.95\); got \[3, 4\]",
    ),
    "targets of quantiles": (
        lambda: decomposed(Z(2, 3, 3), Z(3, 2), "quantile", "score"),
        "The network needs 6 outputs: 3 quantiles for each of 2 targets",
    ),
    "levels out of order": (lambda: ds.losses.quantile(Z(3, 2), Z(3), levels=(0.9, 0.1)), "in rising order"),
    "levels of one": (lambda: ds.losses.quantile(Z(3, 1), Z(3), levels=(1.0,)), "`levels` must be a number above 0"),
    "no levels": (lambda: ds.losses.quantile(Z(3, 1), Z(3), levels=()), "one number or more"),
    "floor": (lambda: ds.losses.gaussian_nll(Z(3, 2), Z(3), floor=0.0), "`floor` must be a number above 0"),
    "floor of moments": (lambda: ds.losses.gaussian_moments(Z(3, 2), floor=-1.0), "`floor`"),
    "classes as labels": (
        lambda: ds.losses.bce(Z(3, 4), torch.tensor([0, 3, 1])),
        r"shape \[B=3, C=4\], one number per label; got \[3\]. Classes that exclude each other\? Use 'cross_entropy'",
    ),
    "labels out of range": (
        lambda: decomposed(Z(2, 3, 1), torch.tensor([0.0, 1.0, 2.0]), "bce", "score"),
        "be 0, 1 or probabilities in between; got numbers from 0 to 2. Classes that exclude each other",
    ),
    "negative counts": (lambda: decomposed(Z(2, 3, 1), -torch.ones(3), "poisson", "probability"), "at least 0; got -1"),
    "score of gaussians": (
        lambda: decomposed(Z(2, 3, 2), Z(3), "gaussian_nll", "score"),
        "be 'probability' for loss 'gaussian_nll', which takes gaussian; got 'score'. The loss is not convex",
    ),
    "votes of labels": (lambda: decomposed(Z(2, 3, 2), Z(3, 2), "bce", "vote"), "be 'probability' or 'score'"),
    "probability of quantiles": (
        lambda: decomposed(Z(2, 3, 2), Z(3), partial(ds.losses.quantile, levels=(0.1, 0.9)), "probability"),
        "be 'score' for loss 'quantile'",
    ),
    "probability of values": (lambda: decomposed(Z(2, 3, 1), Z(3), "squared_error", "probability"), "be 'score'"),
    "joint training of scores of gaussians": (
        lambda: ds.objectives.joint(Z(2, 3, 2), Z(3), loss="gaussian_nll", pool="score"),
        "not convex",
    ),
    "dropout of scores of gaussians": (
        lambda: ds.objectives.learner_dropout(Z(2, 3, 2), Z(3), drop=0.5, loss="gaussian_nll", pool="score"),
        "not convex",
    ),
    "curvature of gaussians": (
        lambda: ds.diversity.hessian_form(Z(2, 3, 2), Z(3), loss="gaussian_nll"),
        "be 'probability' for loss 'gaussian_nll'",
    ),
    "negative correlation of gaussians": (
        lambda: ds.objectives.negative_correlation(Z(2, 3, 2), Z(3), strength=0.5, loss="gaussian_nll"),
        "be 'probability' for loss 'gaussian_nll'",
    ),
    "curvature of quantiles": (
        lambda: ds.diversity.hessian_form(Z(2, 3, 3), Z(3), loss="quantile"),
        "be twice differentiable; got 'quantile'.*Use decompose",
    ),
    "negative correlation of quantiles": (
        lambda: ds.objectives.negative_correlation(Z(2, 3, 3), Z(3), strength=0.5, loss="quantile"),
        "be twice differentiable",
    ),
    "ratio of densities": (
        lambda: ds.diversity.relative_diversity(Z(2, 3, 2), Z(3), loss="gaussian_nll", pool="probability"),
        "be at least zero for a ratio of losses; got 'gaussian_nll'.*Use decompose",
    ),
    "ratio of densities of counts": (
        lambda: ds.diversity.relative_diversity(Z(2, 3, 1), Z(3), loss="poisson", pool="score"),
        "be at least zero for a ratio of losses; got 'poisson'",
    ),
    "dominance of densities": (
        lambda: ds.diversity.dominance(Z(2, 3, 2), Z(3), loss="gaussian_nll", pool="probability"),
        "be at least zero for a ratio of losses",
    ),
    "dominance of densities of counts": (
        lambda: ds.diversity.dominance(Z(2, 3, 1), Z(3), loss=ds.losses.poisson, pool="score"),
        "be at least zero for a ratio of losses; got 'poisson'",
    ),
    "dominance in a pool that the loss does not have": (
        lambda: ds.diversity.dominance(Z(2, 3, 3), Z(3), loss="quantile", pool="probability"),
        "`pool` must be 'score' for loss 'quantile'",
    ),
    "covariance of gaussians": (
        lambda: ds.diversity.error_covariance(Z(2, 3, 2), Z(3), loss="gaussian_nll"),
        "be one of 'squared_error', 'mse', 'brier'",
    ),
    "smoothing of labels": (
        lambda: ds.objectives.independent(Z(2, 3, 2), Z(3, 2), loss="bce", smoothing=0.1),
        "`smoothing` must come with loss='cross_entropy'; got 'bce'",
    ),
    "variances of another shape": (
        lambda: ds.pooling.moment_matched(Z(2, 3, 1), Z(2, 3, 2)),
        r"`variance` must have the shape of the means, \[2, 3, 1\]; got \[2, 3, 2\]",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_what_came_and_the_fix(case):
    call, message = REFUSALS[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


# --- measures of diversity that take these losses ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["labels, score", "labels, probability", "quantiles, levels", "mean squared error"])
def test_ratios_of_losses_that_are_not_negative(name):
    case = CASES[name]
    ensemble, _, diversity = oracles.over_batch(case.outputs.numpy(), case.targets.numpy(), **case.oracle)
    ratio = ds.diversity.relative_diversity(case.outputs, case.targets, **case.both)
    close(ratio, diversity.mean() / ensemble.mean())
    member = np.array(
        [
            oracles.over_batch(case.outputs[j : j + 1].numpy(), case.targets.numpy(), **case.oracle)[1].mean()
            for j in range(M)
        ]
    )
    spread = ds.diversity.dominance(case.outputs, case.targets, **case.both)
    close(spread, member.std() / member.mean())


@every_case
def test_codependence_is_the_mean_rise_over_all_subsets(case):
    """Two of three members are kept: the mean over draws comes close to that over the three pairs."""
    rise = ds.diversity.codependence(case.outputs, case.targets, drop=0.4, repeats=3000, **case.both)
    whole = oracles.over_batch(case.outputs.numpy(), case.targets.numpy(), **case.oracle)[0]
    pairs = [
        oracles.over_batch(case.outputs[[a, b]].numpy(), case.targets.numpy(), **case.oracle)[0]
        for a, b in [(0, 1), (0, 2), (1, 2)]
    ]
    expected = np.mean(pairs, 0) - whole
    noise = np.std(pairs, 0) / math.sqrt(3000)
    assert (np.abs(rise.numpy() - expected) <= 4.5 * noise + 1e-9).all()


@pytest.mark.parametrize("name", ["labels, score", "counts, score", "squared error", "mean squared error"])
def test_curvature_gives_the_diversity_of_scores(name):
    case = CASES[name]
    _, _, diversity = oracles.over_batch(case.outputs.numpy(), case.targets.numpy(), **case.oracle)
    close(ds.diversity.hessian_form(case.outputs, case.targets, loss=case.loss, nodes=48), diversity, rtol=1e-8)


def test_labels_are_bernoulli_variables():
    case = CASES["labels, score"]
    _, _, diversity = oracles.over_batch(case.outputs.numpy(), case.targets.numpy(), **case.oracle)
    close(ds.diversity.exponential_family(case.outputs, family="bernoulli") / 4, diversity)


# --- properties -------------------------------------------------------------------------------------------------------


@st.composite
def ensembles(draw_from):
    members, batch, targets = (draw_from(st.integers(1, 4)) for _ in range(3))
    seed = draw_from(st.integers(0, 10**6))
    scale, shift = draw_from(st.floats(0.01, 8)), draw_from(st.floats(-5, 5))
    weights = draw(members, seed=seed + 1).exp()
    weights = (weights / weights.sum()).tolist() if draw_from(st.booleans()) else None
    return members, batch, targets, seed, scale, shift, weights


KINDS = {
    "gaussian_nll": (2, "probability", draw),
    "bce": (1, "probability", coins),
    "bce of scores": (1, "score", coins),
    "quantile": (3, "score", draw),
    "poisson": (1, "probability", counts),
    "poisson of scores": (1, "score", counts),
    "squared_error": (1, "score", draw),
    "mse": (1, "score", draw),
}


@pytest.mark.parametrize("name", KINDS)
@given(data=ensembles())
def test_decompositions_sum_and_diversity_is_not_negative(name, data):
    members, batch, targets, seed, scale, shift, weights = data
    parts, pool, truth = KINDS[name]
    loss = name.removesuffix(" of scores")
    outputs = draw(members, batch, parts * targets, seed=seed, scale=scale) + shift
    y = truth(batch, targets, seed=seed + 2)
    ensemble, individual, diversity = ds.diversity.decompose(outputs, y, loss=loss, pool=pool, weights=weights)
    assert torch.equal(individual - ensemble, diversity)
    assert (diversity >= -1e-12 * (1 + individual.abs())).all()
    if pool == "probability" and loss != "bce":  # a mixture is at most M times less dense than its best member
        least = losses.per_member(loss, outputs, y).amin(0)
        assert (ensemble >= least - 1e-9 * (1 + least.abs())).all()


@every_case
def test_the_order_of_members_does_not_count(case):
    order, weights = [2, 0, 1], torch.tensor(WEIGHTS, dtype=torch.float64)
    objectives = {
        "independent": partial(ds.objectives.independent, loss=case.loss),
        "augmented": partial(ds.objectives.augmented, beta=0.6, **case.both),
        "joint": partial(ds.objectives.joint, **case.both),
    }
    for name, objective in objectives.items():
        first = objective(case.outputs, case.targets, weights=weights).total
        other = objective(case.outputs[order], case.targets, weights=weights[order]).total
        torch.testing.assert_close(first, other, msg=name)


# --- objectives -------------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
def test_totals_are_those_of_the_definitions(case, weights):
    y = case.targets.numpy()
    options = {"weights": weights, **case.settings}
    total = ds.objectives.independent(case.outputs, case.targets, loss=case.loss, weights=weights).total
    close(total, oracles.independent(case.outputs.numpy(), y, loss=case.name, **options))
    for beta in (0.0, 0.3, 1.0):
        expected = oracles.augmented(case.outputs.numpy(), y, beta=beta, loss=case.name, pool=case.pool, **options)
        total = ds.objectives.augmented(case.outputs, case.targets, beta=beta, weights=weights, **case.both).total
        close(total, expected)
        if beta == 0:
            close(total, oracles.independent(case.outputs.numpy(), y, loss=case.name, **options))
        if beta == 1:
            joint = ds.objectives.joint(case.outputs, case.targets, weights=weights, **case.both).total
            close(joint, expected)


@every_case
def test_weights_of_examples(case):
    weights = torch.tensor([2.0, 0.0, 1.0, 0.5, 0.0, 3.0, 1.0], dtype=torch.float64)
    spoilt = case.outputs.clone()
    spoilt[:, 1] = math.nan
    spoilt.requires_grad_()
    result = ds.objectives.independent(spoilt, case.targets, loss=case.loss, example_weights=weights)
    expected = oracles.independent(
        case.outputs.numpy(), case.targets.numpy(), loss=case.name, example_weights=weights.numpy(), **case.settings
    )
    close(result.total.detach(), expected)
    (gradient,) = torch.autograd.grad(result.total, spoilt)
    assert (gradient[:, [1, 4]] == 0).all()
    ensemble, individual, _ = oracles.over_batch(case.outputs.numpy(), case.targets.numpy(), **case.oracle)
    mixed = 0.4 * individual + 0.6 * ensemble
    total = ds.objectives.augmented(spoilt, case.targets, beta=0.6, example_weights=weights, **case.both).total
    close(total.detach(), M * oracles.weighted_mean(mixed, weights.numpy()))


@every_case
@pytest.mark.parametrize("per", ["batch", "example"])
def test_dropped_learners(case, per):
    """The trained loss is that of two of the three members, whichever were drawn."""
    result = ds.objectives.learner_dropout(case.outputs, case.targets, drop=0.4, per=per, draw=5, **case.both)
    y = case.targets.numpy()
    pairs = np.array(
        [oracles.over_batch(case.outputs[[a, b]].numpy(), y, **case.oracle)[0] for a, b in [(0, 1), (0, 2), (1, 2)]]
    )
    close(result.total, 2 * float(result.parts["kept_ensemble"]))
    if per == "batch":
        assert np.isclose(pairs.mean(1), float(result.parts["kept_ensemble"]), rtol=1e-10).any()
    else:
        kept = float(result.parts["kept_ensemble"])
        assert pairs.min(0).mean() <= kept <= pairs.max(0).mean()
    whole = ds.objectives.learner_dropout(case.outputs, case.targets, drop=0.0, per=per, **case.both).total
    close(whole, float(ds.objectives.joint(case.outputs, case.targets, **case.both).total))


@pytest.mark.parametrize("name", ["labels, score", "counts, score", "mean squared error"])
def test_negative_correlation_has_the_curvature_at_the_mean(name):
    case = CASES[name]
    mean = case.outputs.mean(0)
    apart = (case.outputs - mean).numpy()
    if name == "labels, score":
        bend = (mean.sigmoid() * (-mean).sigmoid()).numpy() / mean.shape[-1]
    else:
        bend = mean.exp().numpy() if name == "counts, score" else np.full(mean.shape, 2 / mean.shape[-1])
    penalty = (bend * apart**2).sum(-1).mean() / 2
    individual = oracles.independent(case.outputs.numpy(), case.targets.numpy(), loss=case.name)
    result = ds.objectives.negative_correlation(case.outputs, case.targets, strength=0.7, loss=case.loss)
    close(result.parts["penalty"], penalty)
    close(result.total, individual - 0.7 * M * penalty)


def test_gradient_adjusted_trains_on_the_sum_of_squared_errors():
    case = CASES["squared error"]
    result = ds.objectives.gradient_adjusted(case.outputs, case.targets, alpha=0.0)
    close(result.total, oracles.independent(case.outputs.numpy(), case.targets.numpy(), loss="squared_error"))
    beta = ds.objectives.beta_from_alpha(0.5)
    expected = oracles.augmented(
        case.outputs.numpy(), case.targets.numpy(), beta=beta, loss="squared_error", pool="score"
    )
    adjusted = ds.objectives.gradient_adjusted(case.outputs, case.targets, alpha=0.5).total
    close(adjusted / 1.5**2, expected)


# --- the warning about `mse` ------------------------------------------------------------------------------------------


def warned(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(entry.message) for entry in caught if issubclass(entry.category, FutureWarning)]


def trained_on_mse(width):
    x, y = draw(12, 3).float(), draw(12, width, seed=1).float()
    ens = ds.Ensemble(lambda: ds.nets.mlp(3, width, (4,)), members=2, seed=0)
    ds.fit(ens, (x, y), partial(ds.objectives.independent, loss="mse"), epochs=1, batch_size=6, lr=0.01)


def swept_on_mse(width):
    """Runs and members in one pass, in which values of outputs cannot be read."""
    x, y = draw(12, 3).float(), draw(12, width, seed=1).float()
    ds.sweep(
        lambda: ds.nets.mlp(3, width, (4,)),
        (x, y),
        partial(ds.objectives.augmented, loss="mse", pool="score"),
        members=2,
        grid={"beta": [0.0, 0.5]},
        epochs=1,
        batch_size=6,
        lr=0.01,
        backend="vmap",
    )


OUTPUTS = draw(2, 4, 3)
WARNS = {
    "the function": lambda width: ds.losses.mse(OUTPUTS[0, :, :width], OUTPUTS[1, :, :width]),
    "decompose": lambda width: decomposed(OUTPUTS[..., :width], OUTPUTS[0, :, :width], "mse", "score"),
    "an objective": lambda width: ds.objectives.joint(
        OUTPUTS[..., :width], OUTPUTS[0, :, :width], loss="mse", pool="score"
    ),
    "codependence": lambda width: ds.diversity.codependence(
        OUTPUTS[..., :width], OUTPUTS[0, :, :width], loss="mse", pool="score", drop=0.5
    ),
    "a training": trained_on_mse,
    "a sweep": swept_on_mse,
}


@pytest.mark.parametrize("name", WARNS)
def test_the_mean_over_outputs_is_told_once_in_a_process(name):
    call = WARNS[name]
    losses._told.clear()
    assert warned(lambda: call(1)) == []
    (text,) = warned(lambda: call(3))
    assert "'mse' is the mean over outputs now" in text
    assert "'squared_error'" in text
    assert "factor 3" in text
    assert warned(lambda: call(3)) == []
    assert warned(lambda: WARNS["the function"](2)) == []


@pytest.mark.parametrize("name", [name for name in CASES if "mean squared" not in name])
def test_other_losses_say_nothing_of_it(name):
    losses._told.clear()
    case = CASES[name]
    assert warned(lambda: ds.diversity.decompose(case.outputs, case.targets, **case.both)) == []


# --- training ---------------------------------------------------------------------------------------------------------

TRAININGS = {
    "gaussian_nll": ("gaussian_nll", 4, draw(24, 2, seed=2)),
    "bce": ("bce", 3, coins(24, 3, seed=3)),
    "quantile": (QUANTILE, 6, draw(24, 2, seed=4)),
    "poisson": ("poisson", 2, counts(24, 2, seed=5)),
    "mse": ("mse", 2, draw(24, 2, seed=6)),
}
every_training = pytest.mark.parametrize("name", TRAININGS)
X = draw(24, 5, seed=1)


def network(width):
    return ds.nets.mlp(5, width, (6,))


def by_hand(loss, outputs, targets):
    """The mean loss of one network by torch's own functions."""
    if loss == "gaussian_nll":
        mean, log_variance = outputs.chunk(2, -1)
        variance = log_variance.exp() + 1e-6
        return F.gaussian_nll_loss(mean, targets, variance, full=True, eps=1e-12, reduction="none").sum(-1).mean()
    if loss == "bce":
        return F.binary_cross_entropy_with_logits(outputs, targets)
    if loss == "poisson":
        return F.poisson_nll_loss(outputs, targets, reduction="none").sum(-1).mean()
    if loss == "mse":
        return F.mse_loss(outputs, targets)
    apart = targets.unsqueeze(-1) - outputs.unflatten(-1, (2, 3))
    level = torch.tensor(LEVELS, dtype=torch.float64)
    return torch.where(apart >= 0, level * apart, (level - 1) * apart).mean()


@every_training
def test_members_train_as_separate_networks(name):
    """Twenty steps: four epochs of five batches, the last of which is smaller."""
    loss, width, y = TRAININGS[name]
    ens = ds.Ensemble(partial(network, width), members=M, seed=3).double()
    modules = [ens.member(j) for j in range(M)]
    objective = partial(ds.objectives.independent, loss=loss)
    ds.fit(ens, (X, y), objective, epochs=4, batch_size=5, lr=0.01, optimizer="adam", seed=5)
    loader = TensorBatches(X, y, batch_size=5, seeds=[5], device=torch.device("cpu"))
    for j, module in enumerate(modules):
        optimiser = torch.optim.Adam(module.parameters(), lr=0.01)
        for epoch in range(4):
            for xs, ys, *_ in loader.epoch(epoch):
                optimiser.zero_grad()
                by_hand(name, module(xs.squeeze(0)), ys.squeeze(0)).backward()
                optimiser.step()
        trained = dict(ens.member(j).named_parameters())
        for key, parameter in module.named_parameters():
            torch.testing.assert_close(trained[key], parameter, rtol=1e-8, atol=1e-10, msg=f"member {j}: {key}")


@every_training
def test_validation_losses_are_those_of_the_pooled_prediction(name):
    loss, width, y = TRAININGS[name]
    ens = ds.Ensemble(partial(network, width), members=M, seed=3).double()
    objective = partial(ds.objectives.independent, loss=loss)
    history = ds.fit(
        ens, (X[:16], y[:16]), objective, epochs=3, batch_size=8, lr=0.01, validation=(X[16:], y[16:]), keep="last"
    )
    outputs = ens.eval().predict(X[16:])
    pool = losses.named(name).pools[0]
    settings = {"levels": LEVELS} if name == "quantile" else {}
    ensemble, individual, _ = (
        float(part.mean())
        for part in oracles.over_batch(outputs.double().numpy(), y[16:].numpy(), loss=name, pool=pool, **settings)
    )
    last = history.epochs[-1]
    assert last["validation"] == pytest.approx(ensemble, rel=1e-8)
    assert last["validation_individual"] == pytest.approx(individual, rel=1e-8)
    assert ensemble != pytest.approx(individual, rel=1e-3)


@every_training
def test_early_stopping_keeps_the_best_epoch(name):
    loss, width, y = TRAININGS[name]
    ens = ds.Ensemble(partial(network, width), members=M, seed=3).double()
    pool = losses.named(name).pools[0]
    objective = partial(ds.objectives.augmented, beta=0.5, loss=loss, pool=pool)
    history = ds.fit(
        ens,
        (X[:12], y[:12]),
        objective,
        epochs=80,
        batch_size=4,
        lr=0.05,
        validation=(X[12:], y[12:]),
        patience=3,
        keep="best",
    )
    curve = [entry["validation"] for entry in history.epochs]
    assert len(curve) < 80
    settings = {"levels": LEVELS} if name == "quantile" else {}
    ensemble, _, _ = oracles.over_batch(
        ens.eval().predict(X[12:]).double().numpy(), y[12:].numpy(), loss=name, pool=pool, **settings
    )
    assert ensemble.mean() == pytest.approx(min(curve), rel=1e-8)


@pytest.mark.parametrize("name", ["gaussian_nll", "bce", "quantile"])
def test_sweeps_train_as_fits(name):
    loss, width, y = TRAININGS[name]
    pool = losses.named(name).pools[0]
    objective = partial(ds.objectives.augmented, loss=loss, pool=pool)
    options = {"epochs": 3, "batch_size": 8, "lr": 0.01}
    swept = ds.sweep(
        lambda: network(width).double(),
        (X, y),
        objective,
        members=M,
        grid={"beta": [0.0, 0.7], "seed": [0, 1]},
        **options,
    )
    for number, point in enumerate(swept.points):
        ens = ds.Ensemble(lambda: network(width).double(), members=M, seed=point["seed"])
        ds.fit(ens, (X, y), partial(objective, beta=point["beta"]), seed=point["seed"], **options)
        torch.testing.assert_close(swept.run(number).eval().predict(X), ens.eval().predict(X), rtol=1e-8, atol=1e-9)


def test_sweeps_over_losses_name_them_in_files(tmp_path):
    y = TRAININGS["gaussian_nll"][2][:, :1]
    wide = partial(ds.losses.gaussian_nll, floor=0.1)
    pair = partial(ds.losses.quantile, levels=(0.1, 0.9))
    build = partial(network, 2)
    grid = {"loss": ["gaussian_nll", wide, pair]}
    swept = ds.sweep(
        build, (X.float(), y.float()), ds.objectives.independent, members=2, grid=grid, epochs=1, batch_size=8, lr=0.01
    )
    assert [outcome.status for outcome in swept.outcomes] == ["done"] * 3
    swept.save(tmp_path / "sweep")
    loaded = ds.Sweep.load(tmp_path / "sweep", build)
    texts = ["gaussian_nll", "gaussian_nll(floor=0.1)", "quantile(levels=(0.1, 0.9))"]
    assert [point["loss"] for point in loaded.points] == texts


def test_checkpoints_belong_to_one_setting_of_a_loss(tmp_path):
    y = TRAININGS["quantile"][2][:, :1]

    def trained(levels, resume):
        ens = ds.Ensemble(partial(network, 2), members=2, seed=0)
        objective = partial(ds.objectives.independent, loss=partial(ds.losses.quantile, levels=levels))
        options = {"epochs": 2, "batch_size": 8, "lr": 0.01, "checkpoint": tmp_path, "resume": resume}
        return ds.fit(ens, (X.float(), y.float()), objective, **options)

    first = trained((0.1, 0.9), resume=False)
    assert trained((0.1, 0.9), resume=True).epochs == first.epochs
    with pytest.raises(ds.storage.StorageError, match="belongs to another training: 'objective' differ"):
        trained((0.2, 0.9), resume=True)


def test_twins_of_a_gaussian_regression_are_trained_alone():
    loss, width, y = TRAININGS["gaussian_nll"]
    ens = ds.Ensemble(partial(network, width), members=M, seed=3).double()
    alone = ds.Ensemble(partial(network, width), members=M, seed=3).double()
    options = {"epochs": 3, "batch_size": 8, "lr": 0.01, "seed": 2}
    joint = partial(ds.objectives.joint, loss=loss, pool="probability")
    history = ds.fit(ens, (X, y), joint, twin=True, **options)
    ds.fit(alone, (X, y), partial(ds.objectives.independent, loss=loss), **options)
    twin = history.twin
    assert twin is not None
    torch.testing.assert_close(twin.eval().predict(X), alone.eval().predict(X), rtol=1e-8, atol=1e-10)
    assert not torch.allclose(twin.predict(X), ens.eval().predict(X))


@every_training
def test_settings_of_classes_are_refused(name):
    loss, width, y = TRAININGS[name]
    ens = ds.Ensemble(partial(network, width), members=M, seed=3).double()
    objective = partial(ds.objectives.independent, loss=loss)
    for setting, value in {
        "class_weights": torch.ones(width),
        "label_smoothing": 0.1,
        "ignore_index": -100,
    }.items():
        with pytest.raises(
            (ValueError, TypeError), match=rf"`{setting}` must come with a loss of class labels.*{name}"
        ):
            ds.fit(ens, (X, y), objective, epochs=1, batch_size=8, lr=0.01, **{setting: value})


@every_training
def test_training_with_weights_of_examples(name):
    """Weights of zero and one train on the rows of weight one, in one batch."""
    loss, width, y = TRAININGS[name]
    weights = torch.ones(24, dtype=torch.float64)
    weights[::3] = 0
    kept = weights > 0
    ensembles = [ds.Ensemble(partial(network, width), members=M, seed=3).double() for _ in range(2)]
    objective = partial(ds.objectives.independent, loss=loss)
    options = {"epochs": 5, "batch_size": 24, "lr": 0.01}
    ds.fit(ensembles[0], (X, y), objective, weights=weights, **options)
    ds.fit(ensembles[1], (X[kept], y[kept]), objective, **options)
    torch.testing.assert_close(ensembles[0].predict(X), ensembles[1].predict(X), rtol=1e-8, atol=1e-10)


def test_unknown_labels_are_left_out_by_a_loss_of_ones_own():
    y = (draw(24, 2) > 0).long()
    y[:8, 1] = -1

    def known_labels(outputs, targets):
        terms = torch.nn.functional.binary_cross_entropy_with_logits(outputs, targets.double(), reduction="none")
        return torch.where(targets >= 0, terms, 0.0).mean(-1)

    options = {"epochs": 2, "batch_size": 24, "lr": 0.01, "optimizer": "sgd"}
    ens, other = (ds.Ensemble(partial(network, 2), members=M, seed=3).double() for _ in range(2))
    with pytest.raises(ValueError, match=r"`ignore_index` must come .*got 'bce'\. Use a loss of your own"):
        ds.fit(ens, (X, y), partial(ds.objectives.independent, loss="bce"), ignore_index=-1, **options)
    objective = partial(ds.objectives.independent, loss=known_labels)
    ds.fit(ens, (X, y), objective, **options)
    with_others = y.clone()
    with_others[:8, 1] = -2
    ds.fit(other, (X, with_others), objective, **options)
    assert torch.equal(ens.predict(X), other.predict(X))
    assert bool(ens.predict(X).isfinite().all())


@pytest.mark.parametrize("name", ["gaussian_nll", "quantile"])
def test_networks_of_the_wrong_width_are_refused_before_training(name):
    loss, width, y = TRAININGS[name]
    ens = ds.Ensemble(partial(network, width + 6), members=M, seed=3).double()
    with pytest.raises(ValueError, match=rf"The network needs {width} outputs"):
        ds.fit(ens, (X, y), partial(ds.objectives.independent, loss=loss), epochs=1, batch_size=8, lr=0.01)


def test_no_levels_are_refused_as_such():
    ens = ds.Ensemble(partial(network, 1), members=M, seed=3).double()
    objective = partial(ds.objectives.independent, loss=partial(ds.losses.quantile, levels=()))
    with pytest.raises(ValueError, match=r"`levels` must be one number or more in rising order; got \[\]"):
        ds.fit(ens, (X, draw(24, 1)), objective, epochs=1)


def test_targets_outside_of_labels_are_refused_before_training():
    ens = ds.Ensemble(partial(network, 2), members=M, seed=3).double()
    objective = partial(ds.objectives.independent, loss="bce")
    with pytest.raises(ValueError, match="be 0, 1 or probabilities in between; got numbers from"):
        ds.fit(ens, (X, draw(24, 2)), objective, epochs=1, batch_size=8, lr=0.01)


# --- what follows predictions -----------------------------------------------------------------------------------------


def heteroscedastic(rows, seed):
    """y = x + noise, whose deviation is 0.1 for x < 0 and 0.5 above."""
    x = draw(rows, 1, seed=seed)
    deviation = torch.where(x < 0, 0.1, 0.5)
    return x.float(), (x + deviation * draw(rows, 1, seed=seed + 1)).float()


def test_a_gaussian_regression_learns_noise_and_is_calibrated():
    (x, y), (x_test, y_test) = heteroscedastic(400, 10), heteroscedastic(400, 20)
    ens = ds.Ensemble(lambda: ds.nets.mlp(1, 2, (16,)), members=3, seed=0)
    objective = partial(ds.objectives.independent, loss="gaussian_nll")
    ds.fit(ens, (x, y), objective, epochs=60, batch_size=50, lr=0.01)
    outputs = ens.eval().predict(x_test)
    members = ds.losses.gaussian_moments(outputs)
    prediction = ds.pooling.moment_matched(*members)
    quiet, loud = (prediction.aleatoric.sqrt()[part].median() for part in (x_test < -0.3, x_test > 0.3))
    assert 0.05 < quiet < 0.2
    assert 0.35 < loud < 0.65

    table = ds.scores.table(outputs, kind="gaussian")
    assert {"epistemic_variance", "aleatoric_variance", "total_variance"} <= table.keys()
    far = ds.scores.table(ens.predict(torch.linspace(20, 30, 100).unsqueeze(-1)), kind="gaussian")
    assert ds.metrics.auroc(table["epistemic_variance"], far["epistemic_variance"]).value > 0.9

    deviation = (prediction.aleatoric + prediction.epistemic).sqrt()
    low, high = prediction.mean - 1.645 * deviation, prediction.mean + 1.645 * deviation
    intervals = ds.metrics.prediction_intervals(low, high, y_test, level=0.9, repeats=100)
    assert 0.84 < intervals.coverage.value < 0.96
    calibration = ds.metrics.distribution_calibration(ds.metrics.pit(*members, y_test), repeats=100)
    assert calibration.error.value < 0.06

    loss = decomposed(outputs, y_test, "gaussian_nll", "probability").ensemble
    assert ds.metrics.risk_coverage(table["total_variance"], loss).risk_at(0.5) < loss.mean() - 0.3
    squared = (prediction.mean - y_test).square().squeeze(-1)
    curve = ds.metrics.risk_coverage(table["total_variance"], squared)
    assert curve.risk_at(0.5) < squared.mean() / 2
