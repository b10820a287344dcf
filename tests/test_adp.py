"""ADP: the objective, its optimum, and the volume it asks for."""

import math
import sys
from functools import partial
from importlib import import_module

import numpy as np
import objective_oracles as oracles
import pytest
import torch

import dissensus as ds
from dissensus.diversity.volume import JITTER, log_determinant


def random_case(members=3, batch=4, classes=7, seed=0, scale=2.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(members, batch, classes, generator=generator, dtype=dtype)
    return logits, torch.randint(classes, (batch,), generator=generator)


@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.0), (2.0, 0.0), (0.7, 0.5), (2.0, 1.3)])
@pytest.mark.parametrize("members", [1, 2, 5])
def test_adp_equals_the_papers_objective(members, alpha, beta):
    logits, labels = random_case(members)
    assert float(ds.objectives.adp(logits, labels, alpha=alpha, beta=beta).total) == pytest.approx(
        *oracles.adp(logits.numpy(), labels.numpy(), alpha=alpha, beta=beta), rel=1e-9
    )


def test_volume_is_a_squared_volume():
    logits, labels = random_case(3, 5, 6)
    volume = ds.diversity.nonmaximal_volume(logits.log_softmax(-1), labels)
    for n in range(5):
        nonmaximal = np.delete(logits[:, n].softmax(-1).numpy(), int(labels[n]), axis=1)
        units = nonmaximal / np.linalg.norm(nonmaximal, axis=1, keepdims=True)
        assert float(volume[n]) == pytest.approx(np.linalg.det(units @ units.T + JITTER * np.eye(3)), rel=1e-9)
    assert bool(((volume >= 0) & (volume <= (1 + JITTER) ** 3)).all())
    of_predictions = ds.diversity.nonmaximal_volume(logits.log_softmax(-1))
    predicted = ds.pooling.mean_probability(logits).argmax(-1)
    torch.testing.assert_close(of_predictions, ds.diversity.nonmaximal_volume(logits.log_softmax(-1), predicted))
    torch.testing.assert_close(ds.diversity.nonmaximal_volume(logits, labels), volume)
    torch.testing.assert_close(ds.diversity.nonmaximal_volume(logits, labels, log=True), volume.log())


def test_elimination_is_the_determinant():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(6, 9, 12, generator=generator, dtype=torch.float64)
    matrix = root @ root.transpose(1, 2)
    torch.testing.assert_close(log_determinant(matrix), torch.linalg.slogdet(matrix).logabsdet)


@pytest.mark.parametrize("members", [1, 2, 5, 20])
def test_the_gradient_of_the_log_determinant_is_the_inverse(members):
    square = torch.randn(4, members, members, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    matrix = (square @ square.transpose(1, 2) + 0.1 * torch.eye(members, dtype=torch.float64)).requires_grad_()
    weights = torch.tensor([1.0, -2.0, 0.0, 0.5], dtype=torch.float64)
    actual, expected = (
        torch.autograd.grad((weights * function(matrix)).sum(), matrix)[0]
        for function in (log_determinant, torch.logdet)
    )
    torch.testing.assert_close(actual, expected)
    assert torch.autograd.gradgradcheck(log_determinant, (matrix[:2, :3, :3].detach().requires_grad_(),))


def free_optimum(members, classes, alpha, beta, steps=6000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(members, 1, classes, generator=generator, dtype=torch.float64).requires_grad_()
    stepper = torch.optim.Adam([logits], lr=0.05)
    for step in range(steps):
        for group in stepper.param_groups:
            group["lr"] = 0.05 * (1 - step / steps)
        stepper.zero_grad()
        ds.objectives.adp(logits, torch.tensor([0]), alpha=alpha, beta=beta).total.backward()
        stepper.step()
    return logits.detach().softmax(-1)[:, 0]


@pytest.mark.slow
def test_theorem_1_without_entropy_members_are_sure():
    probs = free_optimum(3, 4, 0.0, 0.5, steps=3000)
    assert bool((probs[:, 0] > 0.99).all())


@pytest.mark.slow
@pytest.mark.parametrize(("members", "classes", "alpha"), [(3, 10, 2.0), (5, 10, 2.0), (2, 4, 1.0)])
def test_theorem_2_free_predictions_land_on_equation_7(members, classes, alpha):
    probs = free_optimum(members, classes, alpha, 0.0, steps=2500)
    expected = ds.objectives.adp_confidence(members, classes, alpha)
    torch.testing.assert_close(probs[:, 0], torch.full((members,), expected, dtype=torch.float64), atol=2e-4, rtol=0)
    other_classes = probs.mean(0)[1:]
    torch.testing.assert_close(
        other_classes, torch.full_like(other_classes, (1 - expected) / (classes - 1)), atol=2e-4, rtol=0
    )


@pytest.mark.slow
def test_corollary_1_members_share_the_other_classes_out():
    members, classes = 3, 7
    probs = free_optimum(members, classes, 2.0, 0.5, steps=4000)
    expected = ds.objectives.adp_confidence(members, classes, 2.0)
    torch.testing.assert_close(probs[:, 0], torch.full((3,), expected, dtype=torch.float64), atol=5e-3, rtol=0)
    owners = probs[:, 1:].argmax(0)
    assert sorted(owners.bincount(minlength=3).tolist()) == [2, 2, 2], "each has two of the six"
    share = members * (1 - expected) / (classes - 1)
    largest = probs[:, 1:].max(0).values
    torch.testing.assert_close(largest, torch.full_like(largest, share), atol=5e-3, rtol=0)


def test_entropy_weights_of_the_notes():
    assert ds.objectives.adp_confidence(3, 10, 2.0) == pytest.approx(0.588, abs=5e-4)
    assert ds.objectives.adp_confidence(3, 100, 2.0) == pytest.approx(0.369, abs=5e-4)
    assert ds.objectives.adp_confidence(5, 10, 2.0) == pytest.approx(0.754, abs=5e-4)
    assert ds.objectives.adp_entropy_weight(5, 1000, 0.9) == pytest.approx(0.61, abs=5e-3)
    for members, classes, alpha in ((2, 3, 0.5), (20, 100, 7.0), (3, 10, 2.0)):
        recovered = ds.objectives.adp_entropy_weight(
            members, classes, ds.objectives.adp_confidence(members, classes, alpha)
        )
        assert recovered == pytest.approx(alpha, rel=1e-9)
    assert ds.objectives.adp_confidence(3, 10, 0.0) == 1.0
    for confidence in (0.05, 1.0, 0.1):
        with pytest.raises(ValueError, match="confidence"):
            ds.objectives.adp_entropy_weight(3, 10, confidence)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "case", ["identical", "more members than classes", "gap of 200", "fifty members", "thousand classes", "one sure"]
)
def test_degenerate_cases_are_finite_with_gradients_that_pull_apart(case, dtype):
    logits, labels = random_case(4, 3, 6, dtype=dtype)
    if case == "identical":
        logits = logits[:1].repeat(4, 1, 1)
    elif case == "more members than classes":
        logits, labels = random_case(9, 3, 5, dtype=dtype)
    elif case == "gap of 200":
        logits = torch.zeros_like(logits).scatter(2, labels.view(1, -1, 1).expand(4, -1, -1), 200.0)
        logits = logits + 1e-2 * random_case(4, 3, 6, seed=5, dtype=dtype)[0]
    elif case == "fifty members":
        logits, labels = random_case(50, 3, 80, dtype=dtype)
    elif case == "thousand classes":
        logits, labels = random_case(5, 2, 1000, dtype=dtype)
    else:
        logits = logits.scatter(2, labels.view(1, -1, 1).expand(4, -1, -1), 1e4)
    logits = logits.requires_grad_()
    parts = ds.objectives.adp(logits, labels, alpha=2.0, beta=0.5)
    (grad,) = torch.autograd.grad(parts.total, logits)
    assert bool(parts.total.isfinite())
    assert bool(grad.isfinite().all())
    assert float(grad.abs().max()) > 0
    if case != "one sure":
        if case == "identical":  # on the ridge itself nothing says which way to part
            logits = (logits.detach() + 1e-4 * random_case(4, 3, 6, seed=7, dtype=dtype)[0]).requires_grad_()
            parts = ds.objectives.adp(logits, labels, alpha=2.0, beta=0.5)
        (of_volume,) = torch.autograd.grad(
            ds.objectives.adp(logits, labels, alpha=0.0, beta=1.0).parts["log_volume"], logits
        )
        with torch.no_grad():
            moved = logits + 1e-3 * of_volume / of_volume.norm()
        after = ds.objectives.adp(moved, labels, alpha=0.0, beta=1.0).parts["log_volume"]
        assert float(after) > float(parts.parts["log_volume"].detach())


def test_no_determinant_without_beta(monkeypatch):
    monkeypatch.setattr(import_module("dissensus.objectives.adp"), "log_determinant", lambda matrix: 1 / 0)
    logits, labels = random_case()
    assert "log_volume" not in ds.objectives.adp(logits, labels, alpha=2.0, beta=0.0).parts
    with pytest.raises(ZeroDivisionError):
        ds.objectives.adp(logits, labels, alpha=2.0, beta=0.5)


def test_temperature_divides_logits():
    logits, labels = random_case()
    hot = ds.objectives.adp(logits, labels, alpha=1.0, beta=0.2, temperature=4.0)
    torch.testing.assert_close(hot.total, ds.objectives.adp(logits / 4, labels, alpha=1.0, beta=0.2).total)


def test_entropy_dropout_leaves_classes_out_and_keeps_the_label():
    logits, labels = random_case(2, 200, 10)
    without_dropout = ds.objectives.adp(logits, labels, alpha=1.0, beta=0.0)
    dropped = [ds.objectives.adp(logits, labels, alpha=1.0, beta=0.0, entropy_drop=0.5, draw=d) for d in (0, 3, 4)]
    assert all(float(part.parts["entropy"]) < float(without_dropout.parts["entropy"]) for part in dropped)
    assert len({float(part.parts["entropy"]) for part in dropped}) == 3
    sure = logits.scatter(2, labels.view(1, -1, 1).expand(2, -1, -1), 50.0)
    assert float(ds.objectives.adp(sure, labels, alpha=1.0, beta=0.0, entropy_drop=0.9).parts["entropy"]) < 1e-6
    zero_dropout = ds.objectives.adp(logits, labels, alpha=1.0, beta=0.0, entropy_drop=0.0, draw=5)
    torch.testing.assert_close(zero_dropout.total, without_dropout.total)


def test_a_sweep_over_beta_equals_single_fits():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 5, generator=generator, dtype=torch.float64), torch.randint(4, (40,), generator=generator)
    build = partial(ds.nets.mlp, 5, 4, (8,))
    swept = ds.sweep(build, (x, y), ds.objectives.adp, grid={"beta": [0.0, 0.5], "alpha": [2.0]}, members=3, epochs=2)
    for i, beta in enumerate((0.0, 0.5)):
        single = ds.Ensemble(build, 3).double()
        ds.fit(single, (x, y), partial(ds.objectives.adp, alpha=2.0, beta=beta), epochs=2)
        torch.testing.assert_close(swept.run(i).predict(x), single.predict(x))


def test_a_sweep_without_the_volume_computes_no_determinant(monkeypatch):
    x, y = torch.randn(24, 5), torch.randint(4, (24,))
    build = partial(ds.nets.mlp, 5, 4, (6,))

    def never(*_):
        raise AssertionError("a determinant")

    monkeypatch.setattr(sys.modules[ds.objectives.adp.__module__], "log_determinant", never)
    ds.sweep(build, (x, y), ds.objectives.adp, grid={"beta": [0.0], "alpha": [0.0, 2.0]}, members=3, epochs=1)
    with pytest.raises(AssertionError, match="a determinant"):
        ds.sweep(build, (x, y), ds.objectives.adp, grid={"beta": [0.0, 0.5]}, members=3, epochs=1)


@pytest.mark.parametrize("name", ["temperature", "entropy_drop"])
def test_other_numbers_can_be_swept_as_well(name):
    torch.manual_seed(1)
    x, y = torch.randn(24, 5, dtype=torch.float64), torch.randint(7, (24,))
    build = partial(ds.nets.mlp, 5, 7, (6,))
    values = {"temperature": [1.0, 3.0], "entropy_drop": [0.0, 0.3]}[name]
    swept = ds.sweep(
        lambda: build().double(), (x, y), ds.objectives.adp, grid={name: values}, members=3, epochs=2, batch_size=8
    )
    predictions = []
    for i, value in enumerate(values):
        single = ds.Ensemble(lambda: build().double(), 3)
        ds.fit(single, (x, y), partial(ds.objectives.adp, **{name: value}), epochs=2, batch_size=8)
        torch.testing.assert_close(swept.run(i).predict(x), single.predict(x))
        predictions.append(single.predict(x))
    assert (predictions[0] - predictions[1]).abs().max() > 1e-6


def test_fit_draws_other_classes_at_every_step():
    draws = []

    def spying(logits, labels, *, draw=0):
        draws.append(int(draw))
        return ds.objectives.adp(logits, labels, alpha=1.0, beta=0.0, entropy_drop=0.4, draw=draw)

    ensemble = ds.Ensemble(partial(ds.nets.mlp, 5, 7, (6,)), 2)
    ds.fit(ensemble, (torch.randn(24, 5), torch.randint(7, (24,))), spying, epochs=2, batch_size=8)
    assert len(set(draws)) >= 6


def test_fifty_members_of_a_thousand_classes():
    """In float32 as in float64, and useful where logits come in bf16 or autocast is on."""
    torch.manual_seed(2)
    logits, labels = torch.randn(50, 4, 1000, dtype=torch.float64) * 3, torch.randint(1000, (4,))

    def gradient(leaf):
        leaf = leaf.detach().requires_grad_()
        result = ds.objectives.adp(leaf, labels, alpha=2.0, beta=0.5)
        result.total.backward()
        assert torch.isfinite(result.total)
        return result.total.detach().double(), leaf.grad.double()

    exact, exactly = gradient(logits)
    total, actual = gradient(logits.float())
    torch.testing.assert_close(total, exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(actual, exactly, rtol=1e-3, atol=1e-5 * float(exactly.abs().max()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = gradient(logits.float())
    torch.testing.assert_close(under[0], total, rtol=1e-5, atol=0)
    low, high = gradient(logits.bfloat16()), gradient(logits.bfloat16().double())
    torch.testing.assert_close(low[0], high[0], rtol=1e-5, atol=0)
    assert float((low[1] - high[1]).norm() / high[1].norm()) < 0.01


def test_a_class_that_no_member_holds_possible_does_no_harm():
    logits, labels = random_case()
    logits[..., 2] = -math.inf
    labels[labels == 2] = 0
    logits.requires_grad_()
    result = ds.objectives.adp(logits, labels, alpha=1.5, beta=0.3)
    result.total.backward()
    assert torch.isfinite(result.total)
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[..., 2] == 0).all()
    other_classes = [c for c in range(logits.shape[-1]) if c != 2]
    expected = ds.objectives.adp(logits.detach()[..., other_classes], labels - (labels > 2).long(), alpha=1.5, beta=0.0)
    torch.testing.assert_close(result.parts["entropy"].detach(), expected.parts["entropy"])


def test_jensen_shannon_is_mutual_information():
    probs = random_case()[0].softmax(-1)
    torch.testing.assert_close(ds.diversity.jensen_shannon(probs), ds.scores.mutual_information(probs))
    assert float(ds.diversity.jensen_shannon(torch.eye(4).unsqueeze(1))) == pytest.approx(math.log(4))
    assert float(ds.diversity.jensen_shannon(torch.full((3, 1, 5), 0.2))) == pytest.approx(0, abs=1e-6)


def rewarded_divergence(probs, weight):
    """Equation 10, of label 0 and probabilities [K, L]."""
    return -probs[:, 0].log().sum() - weight * ds.diversity.jensen_shannon(probs.unsqueeze(1)).sum()


def random_predictions(members, classes, seed, sharpness=1.0):
    generator = np.random.default_rng(seed)
    probs = generator.dirichlet(np.full(classes, sharpness), size=members)
    return torch.as_tensor(probs).clamp_min(1e-12)


def other_classes_in_balance(members, classes, seed):
    """Predictions with F_j^k / F_j the same for all j ≠ y, as the second condition of the proof has it."""
    generator = np.random.default_rng(seed)
    of_label = generator.uniform(0.05, 0.95, size=members)
    shape = generator.dirichlet(np.ones(classes - 1))
    return torch.as_tensor(np.concatenate([of_label[:, None], (1 - of_label[:, None]) * shape], 1))


@pytest.mark.parametrize(("members", "classes", "weight"), [(1, 3, 2.0), (2, 3, 0.5), (3, 10, 8.0), (6, 4, 100.0)])
def test_appendix_theorem_1_jensen_shannon_has_no_inner_optimum(members, classes, weight):
    for seed in range(100):
        probs = other_classes_in_balance(members, classes, seed).requires_grad_()
        (grad,) = torch.autograd.grad(rewarded_divergence(probs, weight), probs)
        multiplier = grad[:, 1:].mean(1)  # ω_k
        torch.testing.assert_close(grad[:, 1:], multiplier.unsqueeze(1).expand(-1, classes - 1))
        own = probs.detach().numpy()[:, 0]
        mean = own.mean()
        left = weight / members * np.log(mean * (1 - own) / (own * (1 - mean)))
        np.testing.assert_allclose((grad[:, 0] - multiplier).numpy(), left - 1 / own, rtol=1e-7, atol=1e-7)
        largest = own.argmax()
        assert left[largest] <= 1e-12, "equation 11 has 1/F here, which is above 0"
        assert grad[largest, 0] - multiplier[largest] <= -1 / own[largest] + 1e-9
    for seed in range(100):  # anywhere else the gradient does not vanish either
        probs = random_predictions(members, classes, seed).requires_grad_()
        (grad,) = torch.autograd.grad(rewarded_divergence(probs, weight), probs)
        assert float((grad - grad.mean(1, keepdim=True)).abs().max()) > 1e-3


def with_classes_of_their_own(members, confidence):
    """Members that give the label this probability, and the rest to a class that no other member uses."""
    label = torch.full((members, 1), confidence, dtype=torch.float64)
    return torch.cat([label, (1 - confidence) * torch.eye(members, dtype=torch.float64)], 1)


@pytest.mark.parametrize("members", [2, 3, 4, 8])
def test_a_small_reward_of_jensen_shannon_changes_nothing_and_a_large_one_beats_the_label(members):
    """JSD ≤ log K / K · Σ CE, so that the labels are optimal up to λ = K / log K, and a face of the simplex beyond."""
    turning = members / math.log(members)
    for seed in range(300):
        probs = random_predictions(members, members + 1 + seed % 3, seed, sharpness=10.0 ** (seed % 4 - 2))
        label = torch.eye(probs.shape[1], dtype=torch.float64)[0]
        if seed % 2:  # near the labels, where the inequality is tight
            probs = 0.99 * label + 0.01 * probs
        if seed % 3 == 0:
            probs[0] = label
        assert float(rewarded_divergence(probs, turning)) >= -1e-9
    for gap in (1e-2, 1e-4, 1e-6):
        probs = with_classes_of_their_own(members, 1 - gap)
        ratio = float(ds.diversity.jensen_shannon(probs.unsqueeze(1))) / -float(probs[:, 0].log().sum())
        assert 1 - gap <= ratio * turning <= 1
    for factor in (1.2, 2.0, 5.0):
        probs = with_classes_of_their_own(members, 1 / factor)  # K / (λ log K)
        value = members * (math.log(factor) - factor + 1)
        assert float(rewarded_divergence(probs, factor * turning)) == pytest.approx(value)
        assert value < 0, "the labels themselves have 0"


@pytest.mark.parametrize("factor", [1.25, 2.0, 5.0])
@pytest.mark.parametrize("members", [2, 3, 4, 8])
def test_beyond_it_classes_of_their_own_are_a_local_minimum_for_three_members(members, factor):
    weight = factor * members / math.log(members)
    optimum = with_classes_of_their_own(members, 1 / factor)
    least = float(rewarded_divergence(optimum, weight))
    generator = np.random.default_rng(members)
    for size in (1e-2, 1e-3):
        for _ in range(50 if members > 2 else 0):
            other = torch.as_tensor(generator.dirichlet(np.full(members + 1, 0.3), size=members))
            assert float(rewarded_divergence((1 - size) * optimum + size * other, weight)) > least - 1e-12
        shift = torch.zeros(members, 1, dtype=torch.float64)  # one more at the label, and another less
        shift[:2, 0] = torch.tensor([size, -size], dtype=torch.float64) / factor
        moved = torch.cat([optimum[:, :1] + shift, optimum[:, 1:] - shift * torch.eye(members)], 1)
        assert (float(rewarded_divergence(moved, weight)) > least) == (members > 2)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"entropy_drop": 1.5}, "entropy_drop"),
        ({"alpha": -1.0}, "alpha"),
        ({"alpha": math.nan}, "alpha"),
        ({"beta": -2.0}, "beta"),
        ({"beta": math.inf}, "beta"),
    ],
)
def test_wrong_settings_are_refused(change, match):
    logits, labels = random_case()
    with pytest.raises(ValueError, match=match):
        ds.objectives.adp(logits, labels, **change)
    with pytest.raises(ValueError, match="three classes"):
        ds.objectives.adp(logits[..., :2], labels.clamp_max(1))
