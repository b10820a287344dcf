"""Appendices D, E, F and G.7 of the collusion paper: moved targets, gradients, the example, members left out."""

import itertools
import logging
import math
from functools import partial

import numpy as np
import objective_oracles as oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recording import recorded

import dissensus as ds
from dissensus import objectives
from dissensus.objectives.correlation import curvature


def values(members=4, batch=6, width=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(members, batch, width, generator=generator, dtype=torch.float64, requires_grad=True)
    return outputs, torch.randn(batch, width, generator=generator, dtype=torch.float64)


def classes(members=4, batch=6, width=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outputs = 2 * torch.randn(members, batch, width, generator=generator, dtype=torch.float64)
    return outputs.requires_grad_(), torch.randint(width, (batch,), generator=generator)


def gradient(total, outputs):
    return torch.autograd.grad(total, outputs)[0]


@pytest.mark.parametrize("others_only", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, 4.5])
def test_moved_targets_are_the_papers_equations(alpha, others_only):
    f, y = values()
    result = objectives.gradient_adjusted(f, y, alpha=alpha, others_only=others_only)
    (expected,) = oracles.gradient_adjusted(f.detach().numpy(), y.numpy(), alpha=alpha, others_only=others_only)
    assert float(result.total.detach()) == pytest.approx(expected, rel=1e-12)
    expected_parts = objectives.augmented(f, y, beta=0.4, loss="squared_error", pool="score").parts
    torch.testing.assert_close(dict(result.parts), dict(expected_parts))


@pytest.mark.parametrize("others_only", [False, True])
@pytest.mark.parametrize("members", [2, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, 4.5])
def test_theorems_d1_and_d3_hold_for_values_and_gradients(alpha, members, others_only):
    f, y = values(members)
    beta = objectives.gamma_from_alpha(members, alpha) if others_only else objectives.beta_from_alpha(alpha)
    moved = objectives.gradient_adjusted(f, y, alpha=alpha, others_only=others_only).total
    expected = objectives.augmented(f, y, beta=beta, loss="squared_error", pool="score", allow_pathological=True).total
    factor = (1 + alpha) ** 2
    torch.testing.assert_close(moved, factor * expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(moved, f), factor * gradient(expected, f), rtol=1e-10, atol=1e-12)


def test_the_papers_numbers():
    assert objectives.beta_from_alpha(1.0) == 0.75
    assert objectives.beta_from_alpha(0.0) == objectives.gamma_from_alpha(7, 0.0) == 0.0
    for members in (2, 3, 10):
        assert objectives.gamma_from_alpha(members, members - 1) == pytest.approx(1.0)
        assert objectives.gamma_from_alpha(members, members + 1.0) < 1
    assert objectives.gamma_from_alpha(3, 0.5) > objectives.gamma_from_alpha(20, 0.5)


@given(st.floats(0, 0.999), st.integers(2, 50))
def test_inverses_invert_on_their_domains(share, members):
    assert objectives.beta_from_alpha(objectives.alpha_from_beta(share)) == pytest.approx(share, abs=1e-12)
    alpha = objectives.alpha_from_gamma(members, share)
    assert 0 <= alpha <= members - 1 + 1e-9
    assert objectives.gamma_from_alpha(members, alpha) == pytest.approx(share, abs=1e-9)


def test_parameters_outside_their_range_are_refused(unchecked):
    with pytest.raises(ValueError, match="`beta` must be below 1"):
        objectives.alpha_from_beta(1.0)
    with pytest.raises(ValueError, match="`members` must be at least 2"):
        objectives.alpha_from_gamma(1, 0.5)
    with pytest.raises(ValueError, match="others"):
        objectives.gradient_adjusted(torch.zeros(1, 2, 1), torch.zeros(2), alpha=1.0, others_only=True)
    with pytest.raises(ValueError, match="`alpha`"):
        objectives.gradient_adjusted(torch.zeros(2, 2, 1), torch.zeros(2), alpha=-1.0)


def test_lemma_d2():
    f, y = values(5, 3, 1)
    left_side = ((f.mean(0) - f) * (y - f)).sum(0).squeeze(-1)
    parts = ds.diversity.decompose(f.detach(), y, loss="squared_error", pool="score")
    torch.testing.assert_close(left_side.detach(), 5 * parts.diversity)


@pytest.mark.parametrize("case", ["independent", "probability", "score"])
def test_gradients_of_appendix_e(case):
    f, y = classes(members=3, batch=1)
    phi = f.detach().softmax(-1)[:, 0].numpy()
    (k_star,), members = y.tolist(), 3
    mean_phi = torch.softmax(f.detach().mean(0), -1)[0].numpy()
    expected = np.empty_like(phi)
    for i, k in itertools.product(range(members), range(phi.shape[1])):
        hit = k == k_star
        if case == "independent":
            expected[i, k] = -(1 - phi[i, k_star]) / members if hit else phi[i, k] / members
        elif case == "probability":
            product = phi[i, k_star] * (1 - phi[i, k_star]) if hit else phi[i, k] * phi[i, k_star]
            expected[i, k] = (-product if hit else product) / phi[:, k_star].sum()
        else:
            expected[i, k] = -(1 - mean_phi[k_star]) / members if hit else mean_phi[k] / members
    if case == "independent":
        total = objectives.independent(f, y, loss="cross_entropy").total
    else:
        total = objectives.joint(f, y, loss="cross_entropy", pool=case).total
    np.testing.assert_allclose(gradient(total, f)[:, 0].numpy(), members * expected, rtol=1e-10)
    if case == "score":
        assert np.ptp(expected, axis=0).max() < 1e-15, "every member gets the same gradient"


def test_appendix_f_joint_training_cannot_tell_opposite_constants():
    """f_j = f + c_j: any c with the right mean minimises the joint loss, c = 0 alone the members' own."""
    f, y = torch.tensor([[0.3], [1.1]], dtype=torch.float64), torch.tensor([[0.3], [1.1]], dtype=torch.float64)
    for size in (0.0, 1.0, 1000.0):
        c = size * torch.tensor([-1.0, 0.25, 0.75], dtype=torch.float64).view(3, 1, 1)
        parts = ds.diversity.decompose(f + c, y, loss="squared_error", pool="score")
        assert float(parts.ensemble.max()) == pytest.approx(0, abs=1e-6)
        assert float(parts.diversity.mean()) == pytest.approx(float(c.square().mean()))
        outputs = (f + c).requires_grad_()
        joint = gradient(objectives.joint(outputs, y, loss="squared_error", pool="score").total, outputs)
        independent = gradient(objectives.independent(outputs, y, loss="squared_error").total, outputs)
        assert float(joint.abs().max()) < 1e-9
        assert float(independent.abs().max()) == pytest.approx(2 * size / 2)
        if size:
            assert float(ds.diversity.bias_share(f + c)) == pytest.approx(1)
    shifted = ds.diversity.decompose(f + c, y + 0.5, loss="squared_error", pool="score")
    assert float(shifted.individual.mean() / shifted.diversity.mean()) == pytest.approx(1, abs=1e-5), (
        "ERR̄ ≈ DIV as |c| → ∞"
    )


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
def test_classic_negative_correlation_is_the_augmented_objective(strength):
    f, y = values()
    actual = objectives.negative_correlation(f, y, strength=strength)
    expected = objectives.augmented(f, y, beta=strength, loss="squared_error", pool="score")
    torch.testing.assert_close(actual.total, expected.total)
    torch.testing.assert_close(gradient(actual.total, f), gradient(expected.total, f))
    d = f - f.mean(0)
    by_hand = 2 * ((f - y) - strength * d) / f.shape[1]
    torch.testing.assert_close(gradient(objectives.negative_correlation(f, y, strength=strength).total, f), by_hand)
    pairs = torch.stack([(d[j] * sum(d[i] for i in range(4) if i != j)).sum(-1) for j in range(4)])
    torch.testing.assert_close(-pairs.mean().detach(), actual.parts["penalty"].detach(), msg="Liu and Yao's penalty")


def test_generalised_negative_correlation_takes_the_losses_hessian():
    f, y = classes()
    mean = f.detach().mean(0)
    p = mean.softmax(-1)
    hessian = torch.diag_embed(p) - p.unsqueeze(1) * p.unsqueeze(2)  # of cross-entropy, whatever the label
    d = f.detach() - mean
    expected = torch.einsum("mbi,bij,mbj->mb", d, hessian, d)
    torch.testing.assert_close(curvature(mean, f.detach() - mean, y, "cross_entropy"), expected)
    result = objectives.negative_correlation(f, y, strength=0.6, loss="cross_entropy")
    individual = ds.losses.cross_entropy(f, y).mean()
    torch.testing.assert_close(result.total, 4 * (individual - 0.3 * expected.mean()))
    close = (mean + 1e-3 * (f.detach() - mean)).requires_grad_()
    total = objectives.negative_correlation(close, y, strength=0.6, loss="cross_entropy").total
    approximated = objectives.augmented(close, y, beta=0.6, loss="cross_entropy", pool="score").total
    torch.testing.assert_close(total, approximated, rtol=1e-9, atol=0)


@pytest.mark.parametrize("pool", ["probability", "score"])
def test_nobody_left_out_is_joint_training(pool):
    f, y = classes()
    actual = objectives.learner_dropout(f, y, drop=0.0, loss="cross_entropy", pool=pool)
    expected = objectives.joint(f, y, loss="cross_entropy", pool=pool)
    torch.testing.assert_close(actual.total, expected.total)
    torch.testing.assert_close(gradient(actual.total, f), gradient(expected.total, f))


@pytest.mark.parametrize("pool", ["probability", "score"])
@pytest.mark.parametrize(("drop", "left_out"), [(0.2, 1), (0.4, 2), (0.6, 3), (0.39, 1), (1.0, 4)])
def test_members_left_out_get_no_gradient_and_the_rest_train_jointly(drop, left_out, pool):
    f, y = classes(members=5)
    choices = set()
    for draw in range(60):
        actual = objectives.learner_dropout(f, y, drop=drop, loss="cross_entropy", pool=pool, draw=draw)
        grad = gradient(actual.total, f)
        active = grad.abs().amax((1, 2)) > 0
        assert int((~active).sum()) == left_out
        active_outputs = f.detach()[active].requires_grad_()
        expected = objectives.joint(active_outputs, y, loss="cross_entropy", pool=pool)
        torch.testing.assert_close(actual.total.detach(), expected.total.detach())
        torch.testing.assert_close(grad[active], gradient(expected.total, active_outputs))
        all_members = ds.diversity.decompose(f.detach(), y, loss="cross_entropy", pool=pool)
        torch.testing.assert_close(actual.parts["ensemble"].detach(), all_members.ensemble.mean())
        choices.add(tuple(active.tolist()))
    assert len(choices) == math.comb(5, left_out), "every choice comes up"


def test_every_example_may_leave_out_others():
    f, y = classes(members=5, batch=200)
    total = objectives.learner_dropout(f, y, drop=0.4, loss="cross_entropy", pool="probability", per="example").total
    active = gradient(total, f).abs().amax(-1) > 0
    assert (active.sum(0) == 3).all()
    assert len({tuple(column) for column in active.T.tolist()}) == 10
    assert active.double().mean(1).min() > 0.45
    single, labels = classes(members=1)
    assert objectives.learner_dropout(single, labels, drop=0.9, loss="brier", pool="probability").total > 0


def test_votes_are_not_trained(unchecked):
    with pytest.raises(ValueError, match="`pool` must be 'probability' or 'score'; got 'vote'"):
        objectives.learner_dropout(torch.zeros(3, 1, 2), torch.tensor([0]), drop=0.4, loss=ds.losses.brier, pool="vote")


def small_data(n=40):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 3, generator=generator), torch.randint(4, (n,), generator=generator)


@pytest.mark.slow(cases=["False"])
@pytest.mark.parametrize("captured", [False, True])
def test_a_run_of_a_sweep_draws_what_the_same_fit_draws(captured, monkeypatch):
    from dissensus.train import capture

    if captured:
        steps = partial(capture.GraphSteps, lambda: recorded)
        monkeypatch.setattr("dissensus.train.recipe.graph_steps", lambda engine: steps())
    objective = partial(objectives.learner_dropout, loss="cross_entropy", pool="probability")
    build = partial(ds.nets.mlp, 3, 4, (6,))
    grid = {"drop": [0.0, 0.4], "seed": [0, 1]}
    options = {"epochs": 6, "batch_size": 8, "lr": 0.02}
    swept = ds.sweep(build, small_data(), objective, grid=grid, members=5, **options)
    for i, point in enumerate(swept.points):
        ensemble = ds.Ensemble(build, 5, seed=point["seed"])
        history = ds.fit(ensemble, small_data(), partial(objective, drop=point["drop"]), seed=point["seed"], **options)
        for name, tensor in swept.run(i).body.tensors().items():
            torch.testing.assert_close(tensor, ensemble.body.tensors()[name], rtol=1e-5, atol=1e-6)
        assert "kept_ensemble" in history.epochs[-1]
    assert not torch.equal(swept.run(2).predict(small_data()[0]), swept.run(3).predict(small_data()[0]))


def test_a_training_that_draws_goes_on_as_it_would_have(tmp_path):
    objective = partial(objectives.learner_dropout, loss="cross_entropy", pool="probability", drop=0.4)
    options = {"epochs": 4, "batch_size": 8, "lr": 0.02, "checkpoint": tmp_path, "checkpoint_seconds": 0.0}
    build = partial(ds.nets.mlp, 3, 4, (6,))
    uninterrupted, stopped = (ds.Ensemble(build, 5) for _ in range(2))
    ds.fit(uninterrupted, small_data(), objective, **{**options, "checkpoint": None})

    class Stop(Exception):
        pass

    def stop(moment):
        if moment.step >= 13:
            raise Stop

    with pytest.raises(Stop):
        ds.fit(stopped, small_data(), objective, **options, progress=stop)
    resumed = ds.Ensemble(build, 5)
    ds.fit(resumed, small_data(), objective, **options, resume=True)
    for name, tensor in uninterrupted.body.tensors().items():
        assert torch.equal(tensor, resumed.body.tensors()[name]), name


def test_an_objective_that_draws_needs_a_default(unchecked):
    def draws(outputs, targets, *, draw):
        return objectives.independent(outputs, targets, loss="cross_entropy")

    with pytest.raises(ValueError, match="give `draw` a default"):
        ds.fit(ds.Ensemble(partial(ds.nets.mlp, 3, 4, (6,)), 2), small_data(), draws, epochs=1)


def test_draw_is_no_key_of_a_grid(unchecked):
    objective = partial(objectives.learner_dropout, loss="cross_entropy", pool="probability")
    with pytest.raises(ValueError, match="grid key"):
        ds.sweep(partial(ds.nets.mlp, 3, 4, (6,)), small_data(), objective, grid={"draw": [1], "drop": [0.2]}, epochs=1)


def test_error_covariance_explains_error_and_diversity_exactly():
    for loss, (f, y) in {"squared_error": values(5, 9, 2), "brier": classes(5, 9, 3)}.items():
        f = f.detach()
        pool = "score" if loss == "squared_error" else "probability"
        parts = ds.diversity.decompose(f, y, loss=loss, pool=pool)
        covariance = ds.diversity.error_covariance(f, y, loss=loss)
        diagonal, off_diagonal = ds.diversity.mean_covariance(covariance)
        torch.testing.assert_close(parts.individual.mean(), diagonal)
        torch.testing.assert_close(parts.ensemble.mean(), diagonal / 5 + 4 * off_diagonal / 5)
        relative = ds.diversity.relative_diversity(f, y, loss=loss, pool=pool)
        torch.testing.assert_close(relative, 4 * (diagonal - off_diagonal) / (diagonal + 4 * off_diagonal))
        errors = ds.diversity.errors(f, y, loss=loss)
        by_hand = torch.stack(
            [torch.stack([(errors[i] * errors[j]).sum(-1).mean() for j in range(5)]) for i in range(5)]
        )
        torch.testing.assert_close(covariance, by_hand)
        correlation = ds.diversity.error_correlation(f, y, loss=loss)
        assert (correlation.diagonal() == 1).all()
        assert (correlation.abs() <= 1 + 1e-12).all()


def test_uncorrelated_errors_give_m_minus_one_and_cancelling_ones_more():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(6, 200_000, 1, generator=generator, dtype=torch.float64)
    y = torch.zeros(200_000, 1, dtype=torch.float64)
    assert float(ds.diversity.relative_diversity(noise, y, loss="squared_error", pool="score")) == pytest.approx(
        5, rel=0.02
    )
    cancelling = noise - 0.8 * noise.mean(0)
    assert float(ds.diversity.relative_diversity(cancelling, y, loss="squared_error", pool="score")) > 100
    _, off_diagonal = ds.diversity.mean_covariance(ds.diversity.error_covariance(cancelling, y))
    assert off_diagonal < 0
    identical = noise[:1].expand(6, -1, -1)
    assert float(ds.diversity.relative_diversity(identical, y, loss="squared_error", pool="score")) == pytest.approx(0)


def test_edges_of_errors():
    single, y = torch.ones(1, 3, 1), torch.ones(3, 1)
    assert ds.diversity.mean_covariance(ds.diversity.error_covariance(single, y))[1] == 0
    assert ds.diversity.error_correlation(single, y).tolist() == [[1.0]]
    assert ds.diversity.dominance(single, y, loss="squared_error", pool="score") == 0
    uneven = torch.tensor([[[0.0]], [[2.0]]])
    assert float(
        ds.diversity.dominance(uneven, torch.zeros(1, 1), loss="squared_error", pool="score")
    ) == pytest.approx(1.0)


def test_the_gap_decomposes_as_losses_do():
    (f, y), (g, z) = classes(seed=1), classes(seed=2)
    parts = [ds.diversity.decompose(o.detach(), t, loss="cross_entropy", pool="score") for o, t in ((f, y), (g, z))]
    gap = ds.diversity.generalisation_gap(*parts)
    torch.testing.assert_close(gap.ensemble, gap.individual - gap.diversity)
    torch.testing.assert_close(gap.ensemble, parts[1].ensemble.mean() - parts[0].ensemble.mean())


def test_disagreement_and_distinct_predictions_by_hand(monkeypatch):
    f, _ = classes(members=4, batch=50, width=3)
    named = f.detach().argmax(-1)
    expected = [[float((named[i] != named[j]).double().mean()) for j in range(4)] for i in range(4)]
    actual = ds.diversity.pairwise_disagreement(f.detach())
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))
    distinct = ds.diversity.distinct_predictions(f.detach())
    assert distinct.tolist() == [len(set(column)) for column in named.T.tolist()]
    assert ds.diversity.distinct_predictions(f.detach()[:1]).tolist() == [1.0] * 50


def test_codependence_per_batch_by_enumeration():
    f, y = classes(members=5, batch=4)
    f = f.detach()
    ensemble_loss = ds.diversity.decompose(f, y, loss="cross_entropy", pool="probability").ensemble
    subsets = list(itertools.combinations(range(5), 3))
    subset_losses = [
        ds.diversity.decompose(f[list(s)], y, loss="cross_entropy", pool="probability").ensemble for s in subsets
    ]
    expected = torch.stack(subset_losses).mean(0) - ensemble_loss
    options = {"loss": "cross_entropy", "pool": "probability", "drop": 0.4, "repeats": 20_000}
    for per in ("batch", "example"):
        actual = ds.diversity.codependence(f, y, per=per, **options)
        torch.testing.assert_close(actual, expected, atol=0.03, rtol=0.03)
    single_draw = ds.diversity.codependence(f, y, per="batch", **{**options, "repeats": 1}) + ensemble_loss
    assert any(torch.allclose(single_draw, e) for e in subset_losses), "one choice for the whole batch"


def test_debiased_probabilities_tell_when_they_leave_the_simplex(caplog):
    f, _ = classes(members=3, batch=5)
    f = f.detach()
    f[0, :, 0] += 6
    with caplog.at_level(logging.INFO, "dissensus"):
        debiased = ds.diversity.debias(f, pool="probability")
    assert any("beyond [0, 1]" in record.getMessage() for record in caplog.records)
    torch.testing.assert_close(debiased, ds.diversity.debias(f.softmax(-1)))
    torch.testing.assert_close(debiased.mean(0), f.softmax(-1).mean(0))
    torch.testing.assert_close(debiased.sum(-1), torch.ones(3, 5, dtype=torch.float64))
    share = ds.diversity.bias_share(f, pool="probability")
    before, after = (ds.diversity.ambiguity(v).mean() for v in (f.softmax(-1), debiased))
    torch.testing.assert_close(share, 1 - after / before)
