"""Debiasing and codependence, against enumeration and against the paper's statements about them."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dissensus as ds


def random_outputs(members=5, batch=7, width=3, seed=0):
    return torch.randn(members, batch, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_debias_follows_the_papers_formula():
    outputs = random_outputs()
    f = outputs.numpy()
    expected = np.empty_like(f)
    for j in range(5):
        for c in range(3):
            b = np.mean([f[j, i, c] - np.mean([f[k, i, c] for k in range(5)]) for i in range(7)])
            expected[j, :, c] = f[j, :, c] - b
    np.testing.assert_allclose(ds.diversity.debias(outputs).numpy(), expected)


@given(st.integers(0, 1000), st.lists(st.floats(0.1, 5), min_size=4, max_size=4))
def test_debias_is_the_best_constant_that_keeps_the_prediction(seed, raw):
    weights = torch.tensor(raw, dtype=torch.float64) / sum(raw)
    outputs = random_outputs(4, seed=seed)
    debiased = ds.diversity.debias(outputs, weights)
    torch.testing.assert_close(
        ds.pooling.mean_output(debiased, weights), ds.pooling.mean_output(outputs, weights), rtol=1e-9, atol=1e-12
    )
    best = ds.diversity.ambiguity(debiased, weights).mean()
    shift = torch.randn(4, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1)) * 0.1
    shift = shift - ds.pooling.mean_output(shift, weights)  # a constant that cancels in the mean
    assert ds.diversity.ambiguity(debiased + shift, weights).mean() >= best - 1e-12
    assert 0 <= ds.diversity.bias_share(outputs, weights) <= 1


def test_bias_share_at_its_ends():
    base = random_outputs(1)
    constants = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64).view(3, 1, 1)
    torch.testing.assert_close(ds.diversity.bias_share(base + constants), torch.tensor(1.0, dtype=torch.float64))
    centred = random_outputs() - random_outputs().mean(1, keepdim=True)
    assert ds.diversity.bias_share(centred) < 1e-12
    assert ds.diversity.bias_share(base) == 0
    assert ds.diversity.bias_share(base.expand(4, -1, -1)) == 0


@pytest.mark.parametrize(("loss", "pool"), [("mse", "score"), ("cross_entropy", "probability"), ("brier", "score")])
@pytest.mark.parametrize("drop", [0.2, 0.4, 0.6])
def test_codependence_is_the_mean_over_all_subsets(loss, pool, drop):
    outputs = random_outputs()
    targets = random_outputs(1)[0] if loss == "mse" else torch.arange(7) % 3
    ensemble_loss = ds.diversity.decompose(outputs, targets, loss=loss, pool=pool).ensemble
    subset_size = 5 - int(5 * drop)
    rises = [
        ds.diversity.decompose(outputs[list(subset)], targets, loss=loss, pool=pool).ensemble - ensemble_loss
        for subset in itertools.combinations(range(5), subset_size)
    ]
    exact = torch.stack(rises).mean(0)
    actual = ds.diversity.codependence(outputs, targets, loss=loss, pool=pool, drop=drop, repeats=20_000)
    if loss == "mse":
        torch.testing.assert_close(actual, exact)
    else:
        spread = torch.stack(rises).std(0)
        assert ((actual - exact).abs() < 5 * spread / 20_000**0.5 + 1e-9).all()
        repeated = ds.diversity.codependence(outputs, targets, loss=loss, pool=pool, drop=drop, repeats=20_000)
        assert torch.equal(actual, repeated)


def test_sampling_agrees_with_the_closed_form_for_squared_error():
    outputs, targets = random_outputs(), random_outputs(1)[0]
    closed = ds.diversity.codependence(outputs, targets, loss="mse", pool="score", drop=0.4)
    sampled = ds.diversity.codependence(outputs, targets, loss=ds.losses.mse, pool="score", drop=0.4, repeats=20_000)
    torch.testing.assert_close(sampled, closed, rtol=0.05, atol=0.02)


def test_codependence_at_its_edges(unchecked):
    outputs, targets = random_outputs(), torch.arange(7) % 3
    options = {"loss": "cross_entropy", "pool": "probability"}
    assert not ds.diversity.codependence(outputs, targets, drop=0.1, **options).any()
    assert not ds.diversity.codependence(outputs[:1], targets, drop=0.6, **options).any()
    identical = outputs[:1].expand(5, -1, -1)
    assert ds.diversity.codependence(identical, targets, drop=0.6, **options).abs().max() < 1e-12
    with pytest.raises(ValueError, match="leave at least one of 5 members; got 1.0"):
        ds.diversity.codependence(outputs, targets, drop=1.0, **options)


def test_appendix_f_members_that_are_one_prediction_in_disguise():
    """f_j = f + c_j with Σ c_j = 0: the ensemble is f, and all diversity is bias."""
    f, y = random_outputs(1, width=1), random_outputs(1, width=1, seed=9)[0]
    c = torch.tensor([3.0, -1.0, -2.0], dtype=torch.float64).view(3, 1, 1)
    parts = ds.diversity.decompose(f + c, y, loss="mse", pool="score")
    torch.testing.assert_close(parts.ensemble, (f[0] - y).square().squeeze(-1))
    torch.testing.assert_close(parts.diversity, c.square().mean().expand(7))
    assert ds.diversity.bias_share(f + c) > 1 - 1e-12
