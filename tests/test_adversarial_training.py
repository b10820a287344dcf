"""Training on attacked batches: the steps of a loop by hand, and nothing that crafting leaves behind."""

from functools import partial

import pytest
import torch
from networks import NETWORKS
from recording import Captures, recorded
from torch.nn import functional as F

import dissensus as ds
from dissensus.data.batches import batches
from dissensus.execution.graphs import captured
from dissensus.train import capture

M, EPSILON = 3, 0.05
independent = partial(ds.objectives.independent, loss="cross_entropy")
augmented = partial(ds.objectives.augmented, beta=0.4, loss="cross_entropy", pool="probability")
Attack = ds.train.AdversarialTraining
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def classes(shape=(6,), n=22):
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(n, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def ensemble_of(name="mlp", backend="loop", members=M):
    return ds.Ensemble(NETWORKS[name][0], members, seed=1, backend=backend).double()


def weights(ensemble):
    return {name: tensor.detach().cpu().clone() for name, tensor in ensemble.body.tensors().items()}


def assert_same(points, expected, tolerance=1e-8):
    for name in expected:
        torch.testing.assert_close(
            points[name], expected[name], rtol=tolerance, atol=tolerance / 100, msg=lambda m, n=name: f"{n}: {m}"
        )


def pooled_loss(networks, point, y):
    log_probs = torch.stack([network(point).log_softmax(-1) for network in networks])
    return F.nll_loss(log_probs.logsumexp(0), y, reduction="sum")


def crafted(networks, x, y, steps, against, epsilon=EPSILON):
    """By hand, in evaluation mode: one batch for all, or one per member."""
    for network in networks:
        network.eval()
    points = []
    for group in [networks] if against == "ensemble" else [[network] for network in networks]:
        point = x.clone()
        for _ in range(steps):
            point.requires_grad_()
            (gradient,) = torch.autograd.grad(pooled_loss(group, point, y), point)
            point = point.detach() + epsilon / steps * gradient.sign()
            point = torch.minimum(torch.maximum(point, x - epsilon), x + epsilon).clamp(0, 1)
        points.append(point)
    for network in networks:
        network.train()
    return points


@pytest.mark.parametrize("against", ["ensemble", "members"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", ["mlp", "cnn_batch_norm"])
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_adversarial_training_equals_a_loop_by_hand(name, steps, against, backend):
    pair = classes(NETWORKS[name][1])
    attack = Attack(EPSILON, steps=steps, random_start=False, against=against)
    ensemble, reference = ensemble_of(name, backend), ensemble_of(name)
    ds.fit(ensemble, pair, augmented, epochs=2, batch_size=8, lr=0.05, optimizer="sgd", adversarial=attack)
    networks = [reference.member(m).train() for m in range(M)]
    steppers = [torch.optim.SGD(network.parameters(), lr=0.05) for network in networks]
    feed = batches(pair, batch_size=8, seed=0, device=torch.device("cpu"))
    for epoch in range(2):
        for x, y, *_ in feed.epoch(epoch):
            hard = crafted(networks, x[1::2], y[1::2], steps, against)
            inputs = [x.clone() for _ in range(M)]
            for batch, points in zip(inputs, hard * M if against == "ensemble" else hard, strict=True):
                batch[1::2] = points
            outputs = torch.stack([network(batch) for network, batch in zip(networks, inputs, strict=True)])
            for stepper in steppers:
                stepper.zero_grad()
            augmented(outputs, y).total.backward()
            for stepper in steppers:
                stepper.step()
    assert_same(weights(ensemble), weights(ds.Ensemble.from_modules(networks).double()), 1e-7)


def test_trades_is_its_formula_step_for_step(monkeypatch):
    """From a start beside the clean input, where the divergence has no slope."""
    pair = classes()
    attack = Attack(EPSILON, steps=2, beside=True)
    monkeypatch.setattr("dissensus.attacks.norms.Ball.random", lambda self, x, key: (x + 0.01).clamp(0, 1))
    ensemble, reference = ensemble_of(members=2), ensemble_of(members=2)
    objective = partial(ds.objectives.trades, strength=3.0)
    ds.fit(ensemble, pair, objective, epochs=1, batch_size=8, lr=0.05, optimizer="sgd", adversarial=attack)
    networks = [reference.member(m) for m in range(2)]
    steppers = [torch.optim.SGD(network.parameters(), lr=0.05) for network in networks]
    feed = batches(pair, batch_size=8, seed=0, device=torch.device("cpu"))

    def divergence_from_clean(point, x):
        return sum(
            F.kl_div(network(point).log_softmax(-1), network(x).softmax(-1).detach(), reduction="sum")
            for network in networks
        )

    for x, y, *_ in feed.epoch(0):
        point = (x + 0.01).clamp(0, 1)
        for _ in range(2):
            point.requires_grad_()
            (gradient,) = torch.autograd.grad(divergence_from_clean(point, x), point)
            point = point.detach() + EPSILON / 2 * gradient.sign()
            point = torch.minimum(torch.maximum(point, x - EPSILON), x + EPSILON).clamp(0, 1)
        for network, stepper in zip(networks, steppers, strict=True):
            stepper.zero_grad()
            clean, hard = network(x), network(point)
            divergence = (
                F.kl_div(hard.log_softmax(-1), clean.log_softmax(-1), log_target=True, reduction="none").sum(-1).mean()
            )
            (F.cross_entropy(clean, y) + 3.0 * divergence).backward()
            stepper.step()
    assert_same(weights(ensemble), weights(ds.Ensemble.from_modules(networks).double()), 1e-7)


def test_crafting_leaves_statistics_dropout_and_gradients_alone():
    pair = classes(NETWORKS["cnn_batch_norm"][1])
    ensemble = ensemble_of("cnn_batch_norm")
    ds.fit(ensemble, pair, independent, epochs=1, batch_size=11, adversarial=Attack((0.01, 0.1), steps=4))
    counts = [t for name, t in ensemble.body.state().items() if name.endswith("num_batches_tracked")]
    assert counts
    assert all(bool((count == 2).all()) for count in counts), "two steps, whatever the attack took"
    assert all(parameter.grad is None for parameter in ensemble.parameters())
    dropped = ensemble_of("two_dropouts")
    ds.fit(dropped, classes(), independent, epochs=1, batch_size=11, adversarial=Attack(0.1, steps=4))
    steps = [t for name, t in dropped.body.state().items() if name.endswith(".step")]
    assert steps
    assert all(bool((step == 2).all()) for step in steps)


def test_a_batch_stays_in_its_ball_and_box_and_sizes_are_drawn_anew(monkeypatch):
    from dissensus.train.adversary import Adversary

    calls = []
    crafting = Adversary.attacked

    def spying(self, engine, x, y):
        points = crafting(self, engine, x, y)
        calls.append((x, points))
        return points

    monkeypatch.setattr(Adversary, "attacked", spying)
    ds.fit(
        ensemble_of(),
        classes(),
        independent,
        epochs=2,
        batch_size=22,
        adversarial=Attack((0.02, 0.06), steps=5, share=0.5),
    )
    sizes = [(points - x).abs().amax(1) for x, points in calls]
    for (_, points), size in zip(calls, sizes, strict=True):
        assert bool((size[::2] == 0).all()), "every other example is clean"
        assert bool((size[1::2] > 0).all())
        assert float(size.max()) <= 0.06
        assert float(points.min()) >= 0
        assert float(points.max()) <= 1
        assert len(set(size[1::2].tolist())) > 5, "each example has a size of its own"
    assert not torch.equal(calls[0][1], calls[1][1])


def test_share_zero_is_plain_training_and_epsilon_zero_too():
    pair = classes()
    expected = ensemble_of()
    ds.fit(expected, pair, independent, epochs=2, batch_size=8)
    for attack in (Attack(0.1, share=0.0), Attack(0.0)):
        ensemble = ensemble_of()
        ds.fit(ensemble, pair, independent, epochs=2, batch_size=8, adversarial=attack)
        assert_same(weights(ensemble), weights(expected))


@pytest.mark.slow
def test_adversarial_training_makes_members_harder_to_attack():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(2, (300,), generator=generator)
    x = torch.full((300, 40), 0.5) + 0.03 * (2 * y.unsqueeze(1) - 1)  # many weak hints
    x[:, 0] = torch.where(torch.rand(300, generator=generator) < 0.75, y, 1 - y).float() * 0.8 + 0.1  # one strong
    x = (x + 0.02 * torch.randn(300, 40, generator=generator)).clamp(0, 1)
    robust = []
    for attack in (None, Attack(0.06, steps=5, share=1.0)):
        ensemble = ds.Ensemble(partial(ds.nets.mlp, 40, 2, (16,)), 2)
        ds.fit(ensemble, (x, y), independent, epochs=80, batch_size=50, lr=2e-2, adversarial=attack)
        robust.append(1 - float(ds.attacks.pgd(ensemble, x, y, epsilon=0.06, steps=10).success.float().mean()))
    assert robust[1] > robust[0] + 0.3, robust


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("against", ["ensemble", "members"])
def test_captured_steps_attack_as_eager_ones_do(against, device, monkeypatch):
    pair = tuple(part.to(device) for part in classes(n=40))
    counts = Captures(captured if device == "cuda" else recorded)
    points = []
    for graph in (lambda engine: None, lambda engine: capture.GraphSteps(lambda: counts)):
        monkeypatch.setattr("dissensus.train.recipe.graph_steps", graph)
        ensemble = ensemble_of().to(device)
        attack = Attack((0.01, 0.05), steps=3, against=against)
        ds.fit(ensemble, pair, independent, epochs=4, batch_size=8, adversarial=attack)
        points.append(weights(ensemble))
    assert counts.captures == 1, "all batches have one shape"
    assert_same(points[1], points[0], 1e-6)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"epsilon": -0.1}, "epsilon"),
        ({"epsilon": (0.2, 0.1)}, "epsilon"),
        ({"epsilon": 0.1, "steps": 0}, "steps"),
        ({"epsilon": 0.1, "share": 1.5}, "share"),
        ({"epsilon": 0.1, "step_share": -1.0}, "step_share"),
        ({"epsilon": (0.0, float("inf"))}, "epsilon"),
        ({"epsilon": 0.1, "box": (1.0, 0.0)}, "box"),
    ],
)
def test_wrong_settings_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        Attack(**options)


def test_conflicting_settings_are_refused():
    pair = classes()
    with pytest.raises(ValueError, match="trades"):
        ds.fit(ensemble_of(), pair, independent, epochs=1, adversarial=Attack(0.1, beside=True))
    with pytest.raises(ValueError, match="box"):
        ds.fit(ensemble_of(), (3 * pair[0] - 1, pair[1]), independent, epochs=1, adversarial=Attack(0.1))
    with pytest.raises(ValueError, match="one augmentation for all"):
        ds.fit(ensemble_of(), pair, independent, epochs=1, adversarial=Attack(0.1), augment=[lambda x, g: x] * M)
    with pytest.raises(ValueError, match=r"fit\(adversarial"):
        ds.sweep(NETWORKS["mlp"][0], pair, ds.objectives.trades, grid={"strength": [1.0]}, epochs=1)
    with pytest.raises(ValueError, match="against='ensemble'"):
        ds.fit(ensemble_of(), pair, independent, epochs=1, adversarial=Attack(0.1, against="members"), active_members=2)
