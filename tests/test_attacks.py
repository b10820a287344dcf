"""Attacks one by one: closed forms, exact bounds, settings, folders. `test_attacks_contract` has what all share."""

import contextlib
import functools
import importlib
import logging
import math
import random
import sys
import types

import numpy as np
import pytest
import torch
from attack_models import SIDE, C, Normed, Steady, images, linear, network, right_only
from torch import nn

import dissensus as ds
from dissensus import attacks, storage
from dissensus.attacks import crafting, losses, norms, random_numbers
from dissensus.attacks.apgd import checkpoints
from dissensus.attacks.diagnostics import model_diagnostics
from dissensus.attacks.rows import where_rows
from dissensus.attacks.target_model import TargetModel
from dissensus.execution import tf32
from dissensus.fingerprint import digest

square_module = importlib.import_module("dissensus.attacks.square")  # the package's attribute is the function
jsma_module = importlib.import_module("dissensus.attacks.jsma")


@pytest.fixture(scope="module")
def ensemble():
    ens = ds.Ensemble(network, members=3, seed=0, backend="loop")
    objective = functools.partial(ds.objectives.independent, loss="cross_entropy")
    ds.fit(ens, images(400, seed=1), objective, epochs=8, batch_size=50, lr=0.01)
    return ens.eval()


def two_planes(dtype=torch.float64, width=20, seed=0):
    """Two classes, the direction between them, inputs inside the box and their distance from the border."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(width, generator=generator, dtype=dtype)
    x = 0.35 + 0.3 * torch.rand(6, width, generator=generator, dtype=dtype)
    bias = torch.tensor([0.0, -float(normal.sum() / 2 - 0.4)], dtype=dtype)
    model = linear(torch.stack([torch.zeros_like(normal), normal]), bias)
    lead = model(x).detach()[:, 1] - model(x).detach()[:, 0]
    return model, x, (lead > 0).long(), lead.abs() / normal.norm(), normal


IN_BALL = {
    "fgsm": functools.partial(attacks.fgsm, epsilon=0.1),
    "fgsm-l2": functools.partial(attacks.fgsm, epsilon=0.5, norm="l2"),
    "bim": functools.partial(attacks.bim, epsilon=0.1),
    "bim-all-steps": functools.partial(attacks.bim, epsilon=0.1, stop=False),
    "bim-l2": functools.partial(attacks.bim, epsilon=0.5, norm="l2"),
    "pgd": functools.partial(attacks.pgd, epsilon=0.1, restarts=2),
    "pgd-l2": functools.partial(attacks.pgd, epsilon=0.5, norm="l2", steps=15),
    "mim": functools.partial(attacks.mim, epsilon=0.1),
    "mim-l2": functools.partial(attacks.mim, epsilon=0.5, norm="l2"),
    "apgd": functools.partial(attacks.apgd, epsilon=0.1, steps=14),
    "apgd-dlr": functools.partial(attacks.apgd, epsilon=0.1, steps=14, loss="dlr"),
    "apgd-targeted": functools.partial(attacks.apgd, epsilon=0.1, steps=9, loss="targeted_dlr"),
    "apgd-l2": functools.partial(attacks.apgd, epsilon=0.5, steps=14, norm="l2"),
    "square": functools.partial(attacks.square, epsilon=0.1, queries=200),
    "square-l2": functools.partial(attacks.square, epsilon=1.5, queries=25, norm="l2"),
}
NEAREST = {
    "carlini_wagner": functools.partial(attacks.carlini_wagner, steps=14, search_steps=2, constant=3.0, step_size=0.05),
    "elastic_net": functools.partial(attacks.elastic_net, steps=14, search_steps=2, constant=3.0, step_size=0.05),
    "jsma": functools.partial(attacks.jsma, distortion=0.5),
    "jsma-adp": functools.partial(attacks.jsma, preset="adp", step_size=0.4, distortion=0.5),
}
ALL = IN_BALL | NEAREST


# --- closed forms -----------------------------------------------------------------------------------------------------


def test_fgsm_on_a_linear_model_is_its_formula():
    model, x, y, _, normal = two_planes()
    result = attacks.perturbed(model, x, y, epsilon=0.05, steps=1, random_start=False)
    signs = torch.where(y == 1, -1.0, 1.0).unsqueeze(1)
    torch.testing.assert_close(result, x + 0.05 * signs * normal.sign())
    by_length = attacks.perturbed(model, x, y, epsilon=0.05, steps=1, random_start=False, norm="l2")
    torch.testing.assert_close(by_length, x + 0.05 * signs * normal / normal.norm())


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_balls_just_short_of_the_border_fail_and_just_across_succeed(norm):
    model, x, y, border, normal = two_planes()
    scale = {"l2": 1.0, "linf": normal.norm() / normal.abs().sum()}[norm]
    for i in range(2):
        example, label = x[i : i + 1], y[i : i + 1]
        for factor, broken in ((0.99, False), (1.01, True)):
            epsilon = float(factor * scale * border[i])
            for attack in (attacks.fgsm, attacks.bim, attacks.mim):
                assert attack(model, example, label, epsilon=epsilon, norm=norm).success.item() is broken
            assert (
                attacks.pgd(
                    model, example, label, epsilon=epsilon, norm=norm, steps=30, step_size=epsilon
                ).success.item()
                is broken
            )
            assert attacks.apgd(model, example, label, epsilon=epsilon, norm=norm, steps=40).success.item() is broken


@pytest.mark.slow
def test_carlini_and_wagner_reach_the_plane_within_one_percent():
    model, x, y, border, _ = two_planes()
    result = attacks.carlini_wagner(
        model, x, y, steps=120, step_size=0.005, search_steps=4, constant=0.5, abort_early=False
    )
    assert result.success.all()
    assert (result.distance >= border * (1 - 1e-9)).all()
    assert (result.distance <= border * 1.01).all(), result.distance / border


def test_elastic_net_takes_the_steepest_feature_first():
    """On a plane the nearest point in L1 moves one feature alone: by the gap over its weight."""
    weight = torch.tensor([[0.0, 0.0, 0.0], [0.5, 2.0, 1.0]], dtype=torch.float64)
    model, x = linear(weight, torch.tensor([0.0, -1.9])), torch.full((1, 3), 0.5, dtype=torch.float64)
    result = attacks.elastic_net(
        model, x, torch.tensor([0]), steps=200, search_steps=6, constant=0.1, l1_weight=0.01, rule="L1"
    )
    changed = (result.inputs - x).abs()
    assert result.success.all()
    assert changed[0, 0] == 0
    assert result.distance.item() == pytest.approx(changed.sum().item())
    assert 0.15 / 2 <= result.distance.item() < 0.15 / 2 * 1.15


def test_exactly_as_many_updates_as_steps():
    """On a slope that never turns, k updates of length a lead k·a away, in every attack."""
    model, x, y, _, normal = two_planes(width=5)
    for steps in (1, 3, 7):
        calls = functools.partial(attacks.perturbed, model, x, y, epsilon=1.0, steps=steps, step_size=0.01)
        flat_model = calls(random_start=False)
        signs = torch.where(y == 1, -1.0, 1.0).unsqueeze(1) * normal.sign()
        torch.testing.assert_close(flat_model, x + steps * 0.01 * signs)
        torch.testing.assert_close(calls(random_start=False, decay=1.0), flat_model)
        passes = Counted(model)
        attacks.carlini_wagner(passes, x, y, steps=steps, search_steps=1, constant=1e-9, abort_early=False)
        assert passes.backward == steps
    counted_model = Counted(model)
    attacks.apgd(counted_model, x, y, epsilon=1e-3, steps=9)
    assert counted_model.backward == 1 + 9, "the start, and every update"


class Counted:
    """Counts passes, and those that gradients are taken of."""

    def __init__(self, model):
        self.model, self.forward, self.backward, self.rows = model, 0, 0, 0

    def __call__(self, x):
        self.forward += 1
        self.rows += len(x)
        self.backward += x.requires_grad
        return self.model(x)


def test_the_clean_pass_is_the_first_step_of_attacks_that_start_there():
    """FGSM is one pass with a gradient and one check. In general, k steps are k passes with a gradient, and a check."""
    x, y = right_only(Steady(), images(12)[0])
    passes = Counted(Steady())
    attacks.fgsm(passes, x, y, epsilon=0.02)
    assert (passes.forward, passes.backward) == (2, 1)
    for steps in (1, 4):
        for attack in (attacks.bim, attacks.mim):
            passes = Counted(Steady())
            attack(passes, x, y, epsilon=0.02, steps=steps, stop=False)
            assert (passes.forward, passes.backward) == (steps + 1, steps)
        passes = Counted(Steady())
        attacks.pgd(passes, x, y, epsilon=0.02, steps=steps, stop=False)
        assert (passes.forward, passes.backward) == (steps + 2, steps), "it starts elsewhere"


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_examples_that_are_misclassified_already_do_not_enter_the_first_step(norm, caplog):
    """Of the pass with which an attack begins, only the rows of the others count; also where they are a few."""

    class NaNSlope(nn.Module):
        """The gradient of the first example is NaN; its output is not."""

        def forward(self, z):
            bad = torch.where(z[:, :1] > 0.99, (1 - z[:, 1:2]).sqrt(), torch.zeros(()))
            return torch.cat([z[:, 2:3], z[:, 3:4] + 0 * bad], 1)

    x = torch.tensor([[1.0, 1.0, 0.2, 0.8], *[[0.5, 0.5, 0.8 - 0.01 * i, 0.2] for i in range(7)]])
    for wrong in (1, 6):
        y = torch.tensor([0] + [1 if i < wrong else 0 for i in range(1, 8)])
        alone = attacks.fgsm(NaNSlope(), x[wrong:], y[wrong:], epsilon=0.4, norm=norm)
        caplog.clear()
        together = attacks.fgsm(NaNSlope(), x, y, epsilon=0.4, norm=norm)
        assert not caplog.records, "no gradient of an example that is attacked has NaN"
        assert torch.equal(together.inputs[wrong:], alone.inputs)
        assert torch.equal(together.success[wrong:], alone.success)
        assert torch.equal(together.inputs[:wrong], x[:wrong])


def test_momentum_is_the_formula_of_the_paper():
    x, y = images(5)
    model = Steady()
    point, momentum = x.clone(), torch.zeros_like(x)
    for _ in range(4):
        point.requires_grad_()
        (slope,) = torch.autograd.grad(nn.functional.cross_entropy(model(point), y, reduction="sum"), point)
        momentum = 0.5 * momentum + slope / slope.abs().sum((1, 2, 3), keepdim=True)
        point = (point.detach() + 0.02 * momentum.sign()).clamp(x - 0.07, x + 0.07).clamp(0, 1)
    result = attacks.perturbed(model, x, y, epsilon=0.07, steps=4, step_size=0.02, decay=0.5, random_start=False)
    torch.testing.assert_close(result, point)


def test_checkpoints_are_those_of_the_paper():
    assert checkpoints(100) == (22, 41, 57, 70, 80, 87, 93, 99)
    assert checkpoints(1) == (1,)
    assert all(0 < point <= 7 for point in checkpoints(7))


@pytest.mark.parametrize("pairs", [False, True])
def test_saliency_search_in_pieces_equals_a_search_by_hand(pairs, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    gain, loss = torch.randn(2, 5, 9, generator=generator)
    room = torch.rand(5, 9, generator=generator) > 0.2
    monkeypatch.setattr(jsma_module, "PAIRS_AT_ONCE", 5 * 9 * 2)
    value, chosen = jsma_module.largest_saliency(gain, loss, room, pairs)
    for b in range(5):
        sets = [(i, j) for i in range(9) for j in range(i + 1, 9)] if pairs else [(i,) for i in range(9)]
        best, best_features = 0.0, ()
        for members in sets:
            members = list(members)
            target_gain, label_loss = gain[b, members].sum(), loss[b, members].sum()
            if room[b, members].all() and target_gain > 0 and label_loss > 0 and float(target_gain * label_loss) > best:
                best, best_features = float(target_gain * label_loss), members
        assert float(value[b]) == pytest.approx(best)
        assert chosen[b].nonzero().squeeze(1).tolist() == list(best_features)


def test_jsma_on_a_linear_model_takes_features_in_the_order_of_their_saliency():
    weight = torch.tensor([[-1.0, -3.0, -2.0, 1.0], [1.0, 3.0, 2.0, -1.0]])
    x = torch.tensor([[0.0, 0.1, 0.2, 0.9]])
    y = torch.tensor([0])
    model = linear(weight, torch.tensor([2.2, -2.2]))
    single = attacks.jsma(model, x, y, preset="adp", step_size=0.5, distortion=1.0)
    assert single.success.all()
    torch.testing.assert_close(single.inputs, torch.tensor([[0.0, 0.6, 0.7, 0.9]]))
    assert single.distance.tolist() == [2.0]
    three_features = attacks.jsma(
        linear(weight, torch.tensor([2.6, -2.6])), x, y, preset="adp", step_size=0.5, distortion=1.0
    )  # the third one: features 0 and 3 do the same, and the first of equals goes up
    torch.testing.assert_close(three_features.inputs, torch.tensor([[0.5, 0.6, 0.7, 0.9]]))
    pair = attacks.jsma(model, x, y, distortion=0.5)
    torch.testing.assert_close(pair.inputs, torch.tensor([[0.0, 1.0, 1.0, 0.9]]))
    too_few = attacks.jsma(model, x, y, distortion=0.49)
    assert not too_few.success.any(), "a pair is more than 49 % of four features"


def test_presets_are_those_of_the_papers():
    papernot, adp = jsma_module.PRESETS["papernot"], jsma_module.PRESETS["adp"]
    assert (papernot.pairs, papernot.decrease, papernot.step_size) == (True, False, 1.0)
    assert (adp.pairs, adp.decrease, adp.step_size, adp.distortion) == (False, True, 0.1, 0.1)


def test_a_feature_that_helps_by_going_down_does_so_in_one_preset_only():
    model = linear(torch.tensor([[3.0, 0.0], [-3.0, 0.0]]), torch.tensor([-1.0, 1.0]))
    x, y = torch.tensor([[0.5, 0.5]]), torch.tensor([0])
    assert attacks.jsma(model, x, y, preset="adp", step_size=0.3, distortion=1.0).inputs[0, 0] == pytest.approx(0.2)
    assert not attacks.jsma(model, x, y, distortion=1.0).success.any()


def test_losses_are_their_formulas():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    y, t = torch.tensor([0, 1, 2, 3, 4, 0]), torch.tensor([1, 2, 3, 4, 0, 3])
    for k in range(2):
        for b in range(6):
            row, label, aim = z[k, b], int(y[b]), int(t[b])
            order = row.sort(descending=True).values
            largest_other = max(float(row[j]) for j in range(5) if j != label)
            largest_non_target = max(float(row[j]) for j in range(5) if j != aim)
            expected = {
                losses.margin: (largest_other - row[label], row[aim] - largest_non_target),
                losses.dlr: (
                    -(row[label] - largest_other) / (order[0] - order[2]),
                    -(row[label] - row[aim]) / (order[0] - (order[2] + order[3]) / 2),
                ),
                losses.cross_entropy: (-row.log_softmax(0)[label], row.log_softmax(0)[aim]),
            }
            for loss, (untargeted, targeted) in expected.items():
                assert float(loss(z, y)[k, b]) == pytest.approx(float(untargeted))
                assert float(loss(z, y, t)[k, b]) == pytest.approx(float(targeted))


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("epsilon", [1e-4, 0.03, 8 / 255, 0.1, 0.3, 1.0])
def test_projections_hold_exactly_in_floating_point(epsilon, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(200, 101, generator=generator, dtype=dtype)
    x[:, :5], x[:, 5:10] = 0.0, 1.0
    moved = x + torch.randn(x.shape, generator=generator, dtype=dtype)
    for norm in ("linf", "l2"):
        ball = norms.Ball.checked(norm, epsilon, (0.0, 1.0), x)
        for point in (moved, x + epsilon * moved.sign(), x, ball.random(x, random_numbers.keys(x, 0))):
            result = ball.projected(x, point)
            assert ((result >= 0) & (result <= 1)).all()
            if norm == "linf":
                assert float((result - x).abs().max()) <= epsilon
                assert bool(((result - x).abs() <= epsilon).all())
            else:
                assert float((result - x).double().norm(dim=1).max()) <= epsilon * (1 + 1e-6)
                assert (ball.lengths(result - x) <= ball.limit).all()


def test_projection_takes_no_more_than_it_must():
    x = torch.full((1, 4), 0.5)
    ball = norms.Ball.checked("linf", 0.1, (0.0, 0.55), x)
    result = ball.projected(x, torch.tensor([[0.0, 0.45, 0.52, 1.0]]))
    torch.testing.assert_close(result, torch.tensor([[0.4, 0.45, 0.52, 0.55]]))
    inside = x + torch.tensor([[0.03, 0.04, 0.0, 0.0]])
    assert torch.equal(norms.Ball.checked("l2", 0.051, (0.0, 1.0), x).projected(x, inside), inside)
    assert torch.equal(norms.Ball.checked("linf", 0.0, (0.0, 1.0), x).projected(x, inside), x)
    assert torch.equal(norms.Ball.checked("l2", 0.0, (0.0, 1.0), x).projected(x, inside), x)


def test_distances_are_those_of_the_attacks(ensemble):
    x, y = images()
    change = lambda result: (result.inputs - x).flatten(1)  # noqa: E731
    result = NEAREST["carlini_wagner"](ensemble, x, y)
    torch.testing.assert_close(result.distance, change(result).norm(dim=1))
    result = NEAREST["jsma"](ensemble, x, y)
    assert torch.equal(result.distance, (change(result) != 0).sum(1).float())
    for rule in ("EN", "L1"):
        result = NEAREST["elastic_net"](ensemble, x, y, rule=rule, l1_weight=0.02)
        by_l1 = change(result).abs().sum(1)
        expected = by_l1 if rule == "L1" else change(result).square().sum(1) + 0.02 * by_l1
        torch.testing.assert_close(result.distance, expected)


# --- per example ------------------------------------------------------------------------------------------------------


def test_broken_examples_stop_costing():
    scaled_call = []

    def model(x):
        scaled_call.append(len(x))
        return linear(torch.tensor([[0.0], [1.0]]), torch.tensor([0.0, -0.5]))(x)

    x = torch.linspace(0, 0.49, 40).unsqueeze(1)
    attacks.bim(model, x, torch.zeros(40, dtype=torch.long), epsilon=0.6, steps=60)
    assert scaled_call[0] == 40
    assert scaled_call[-2] < 10
    assert sum(scaled_call) < 0.7 * 40 * len(scaled_call)


def test_random_numbers_belong_to_the_example():
    x, _ = images(6)
    key = random_numbers.keys(x, 3)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    assert torch.equal(random_numbers.keys(x[order], 3), key[order])
    numbers = random_numbers.uniform(key, (1000,), 5)
    assert torch.equal(random_numbers.uniform(key[2:3], (1000,), 5), numbers[2:3])
    assert ((numbers > 0) & (numbers < 1)).all()
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.02)
    assert numbers.var().item() == pytest.approx(1 / 12, abs=0.005)
    other_streams = [
        random_numbers.uniform(key, (1000,), 6),
        random_numbers.uniform(random_numbers.keys(x, 4), (1000,), 5),
    ]
    correlations = torch.corrcoef(torch.cat([numbers, *other_streams]))
    assert (correlations - torch.eye(18)).abs().max() < 0.15
    assert random_numbers.random_signs(numbers).unique().tolist() == [-1.0, 1.0]
    assert random_numbers.random_integers(numbers, 5).unique().tolist() == [0, 1, 2, 3, 4]


def test_starts_fill_the_ball():
    x = torch.full((400, 3), 0.5, dtype=torch.float64) + 1e-6 * torch.rand(400, 3, dtype=torch.float64)
    cube = norms.Ball("linf", 0.2, 0.0, 1.0).random(x, random_numbers.keys(x, 0)) - x
    assert cube.abs().max() > 0.195
    assert cube.mean(0).abs().max() < 0.02
    ball = norms.Ball("l2", 0.2, 0.0, 1.0).random(x, random_numbers.keys(x, 0)) - x
    radius = ball.norm(dim=1) / 0.2
    assert radius.max() <= 1 + 1e-9
    assert (radius**3).mean().item() == pytest.approx(0.5, abs=0.06), "uniform in volume"
    assert not torch.equal(random_numbers.keys(x, 0, 0), random_numbers.keys(x, 0, 1))


def test_stopping_is_never_weaker_than_the_last_point(ensemble):
    x, y = images(48)
    first, last = (attacks.bim(ensemble, x, y, epsilon=0.1, stop=stop) for stop in (True, False))
    assert (first.success >= last.success).all()
    moved = last.success & (last.distance > 0)
    assert (first.distance[moved] <= last.distance[moved] + 1e-7).all()


# --- goals ------------------------------------------------------------------------------------------------------------


def test_inputs_of_exactly_0_and_1_move():
    weight = torch.ones(1, 8) * torch.tensor([[-0.5], [0.5]])
    x = torch.tensor([[0.0] * 4 + [1.0] * 4])
    for bias, label in ((-4.4, 0), (-3.6, 1)):  # only zeros can go up, and only ones can go down
        model, y = linear(weight, torch.tensor([0.0, bias])), torch.tensor([label])
        moving = slice(0, 4) if label == 0 else slice(4, 8)
        for name, attack in ALL.items():
            if name in ("square-l2", "jsma") and label == 1:
                continue  # papernot's goes up only
            if name == "square-l2":
                continue
            options = {"epsilon": 0.5} if name in IN_BALL else {"distortion": 1.0} if "jsma" in name else {}
            result = attack(model, x, y, **options)
            assert result.success.all(), (name, label)
            assert ((result.inputs - x)[0, moving] != 0).any(), name
    nearest = attacks.carlini_wagner(
        linear(weight, torch.tensor([0.0, -4.4])), x, torch.tensor([0]), steps=100, search_steps=5, constant=0.2
    )
    assert nearest.distance.item() == pytest.approx(0.4 / math.sqrt(4), rel=0.02), "the four zeros share the way"


@pytest.mark.slow
def test_scores_below_zero_are_as_good_as_others(ensemble):
    x, y = images(8, dtype=torch.float64)
    model = Steady(dtype=torch.float64)
    x, y = right_only(model, x, y)
    for name in ("pgd", "apgd-dlr", "apgd-targeted", *NEAREST):
        attack = ALL[name]
        flat_model = attack(model, x, y)
        shifted = attack(lambda z: model(z) - 1000, x, y)
        assert torch.equal(flat_model.success, shifted.success), name
        torch.testing.assert_close(flat_model.inputs, shifted.inputs, rtol=0, atol=1e-6)


def test_confidence_is_kept():
    model, x, y, *_ = two_planes()
    options = {"steps": 40, "search_steps": 2, "constant": 3.0, "step_size": 0.03}
    for attack in (attacks.carlini_wagner, attacks.elastic_net):
        result = attack(model, x, y, confidence=0.3, **options)
        lead = (model(result.inputs).diff(dim=1).squeeze(1) * torch.where(y == 1, -1, 1)).detach()
        assert (lead >= 0.3 - 1e-9).all()
        assert result.success.all()
        aimed = attack(model, x, y, target=1 - y, confidence=0.3, **options)
        torch.testing.assert_close(aimed.inputs, result.inputs)


def test_a_fixed_constant_is_one_run():
    model, x, y, *_ = two_planes()
    runs = Counted(model)
    weak = attacks.carlini_wagner(runs, x, y, steps=5, search_steps=0, constant=1e-6, abort_early=False)
    assert runs.backward == 5
    assert not weak.success.any()
    strong = attacks.carlini_wagner(model, x, y, steps=60, search_steps=0, constant=10.0)
    assert strong.success.all()


@pytest.mark.slow
def test_aborting_early_is_up_to_each_example():
    model, x, y, *_ = two_planes()
    options = {"steps": 40, "search_steps": 2, "constant": 1.0, "step_size": 0.03}
    for attack in (attacks.carlini_wagner, attacks.elastic_net):
        all_steps, early = Counted(model), Counted(model)
        patient = attack(all_steps, x, y, abort_early=False, **options)
        hasty = attack(early, x, y, **options)
        assert hasty.success.all()
        assert early.rows < all_steps.rows
        assert (hasty.distance >= patient.distance * (1 - 1e-9)).all()
        one_by_one = torch.cat([attack(model, x[i : i + 1], y[i : i + 1], **options).inputs for i in range(len(x))])
        torch.testing.assert_close(hasty.inputs, one_by_one)


# --- what is attacked -------------------------------------------------------------------------------------------------


def test_pools_are_their_formulas(ensemble):
    x, _ = images()
    z = ensemble(x).detach()
    for pool, expected in {
        "probability": z.softmax(-1).mean(0).log(),
        "members": z.softmax(-1).mean(0).log(),
        "score": z.mean(0),
        1: z[1],
    }.items():
        torch.testing.assert_close(TargetModel(ensemble, pool).pooled_scores(z), expected)
    assert torch.equal(TargetModel(ensemble, "members").attacked_scores(z), z)
    assert torch.equal(TargetModel(ensemble, "score").attacked_scores(z)[0], z.mean(0))


@pytest.mark.parametrize("pool", ["probability", "score", "members", 2])
def test_gradients_are_those_of_the_pool(pool, ensemble):
    x, y = images()
    point = x.clone().requires_grad_()
    z = ensemble(point)
    loss = {
        "probability": lambda: -z.softmax(-1).mean(0)[torch.arange(len(y)), y].log(),
        "score": lambda: nn.functional.cross_entropy(z.mean(0), y, reduction="none"),
        "members": lambda: sum(nn.functional.cross_entropy(member, y, reduction="none") for member in z),
        2: lambda: nn.functional.cross_entropy(z[2], y, reduction="none"),
    }[pool]()
    (slope,) = torch.autograd.grad(loss.sum(), point)
    result = attacks.perturbed(ensemble, x, y, epsilon=0.05, steps=1, random_start=False, pool=pool, norm="l2")
    expected = x + 0.05 * slope / slope.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    torch.testing.assert_close(result, expected.clamp(0, 1))


def test_ensembles_of_any_kind(ensemble):
    x, y = images(12)
    expected = attacks.bim(ensemble, x, y, epsilon=0.1)
    members = [ensemble.member(i) for i in range(3)]
    stacked = lambda z: torch.stack([member(z) for member in members])  # noqa: E731
    wrapped = [members, tuple(members), nn.ModuleList(members), stacked, ensemble.forward]
    for model in wrapped:
        result = attacks.bim(model, x, y, epsilon=0.1)
        assert torch.equal(result.success, expected.success)
        torch.testing.assert_close(result.inputs, expected.inputs)
    single = attacks.bim(members[1], x, y, epsilon=0.1)
    torch.testing.assert_close(attacks.bim(ensemble, x, y, epsilon=0.1, pool=1).inputs, single.inputs)
    masked = ds.masks.convert(network(), 4, 2.0)
    assert masked.training
    assert attacks.fgsm(masked, x, y, epsilon=0.1).inputs.shape == x.shape
    assert masked.training
    trunk = ds.SharedTrunk(nn.Flatten(), ds.Ensemble(lambda: nn.Linear(SIDE * SIDE, C), members=2))
    assert attacks.mim(trunk, x, y, epsilon=0.1).success.any()


# --- the model is left alone ------------------------------------------------------------------------------------------


def test_the_mode_is_restored_after_an_error():
    model = Normed().train()
    with pytest.raises(ValueError, match="classes from 0 to 3"):
        attacks.fgsm(model, images()[0], torch.full((24,), 9), epsilon=0.1)
    assert model.training


class Failed(Exception):
    pass


class Failing(Normed):
    """Raises at some pass."""

    def __init__(self, passes):
        super().__init__()
        self.passes = passes

    def forward(self, x):
        self.passes -= 1
        if self.passes < 0:
            raise Failed
        return super().forward(x)


def settings(*models):
    """Everything that a call might leave changed behind it."""
    result = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_rng_state().tolist()]
    result += [random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads(), torch.get_default_dtype()]  # noqa: NPY002
    result += [getattr(module, name) for module, name, _, _ in tf32._switches()]
    result += [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()]
    for model in models:
        for layer in model.modules():
            hooks = [len(hooks) for name, hooks in vars(layer).items() if name.endswith("_hooks")]
            result += [layer.training, hooks, getattr(layer, "replayed", None), getattr(layer, "backend", None)]
        result += [(p.requires_grad, p.grad is None) for p in model.parameters()]
        result += [digest(buffer) for buffer in model.buffers()]
    return result


class Original:
    """Stands for pyautoattack's attack."""

    def __init__(self, model, **_settings):
        self.model = model
        self.apgd_targeted, self.fab = types.SimpleNamespace(), types.SimpleNamespace()

    def run_standard_evaluation(self, x, y, **_settings):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        self.model(x)
        return x


CALLS = {
    **ALL,
    "perturbed": functools.partial(attacks.perturbed, epsilon=0.1),
    "counted_square": functools.partial(attacks.counted_square, epsilon=0.1, queries=25),
    "random_noise": functools.partial(attacks.random_noise, epsilon=0.1),
    "tried": functools.partial(attacks.tried, craft=functools.partial(attacks.perturbed, epsilon=0.1), epsilon=0.1),
    "rescaled": functools.partial(
        attacks.tried,
        epsilon=0.1,
        craft=functools.partial(
            crafting.craft_on_rescaled, craft=functools.partial(attacks.pgd, epsilon=0.1), pool="score"
        ),
    ),
    "averaged": functools.partial(
        attacks.tried,
        epsilon=0.1,
        craft=functools.partial(
            crafting.craft_on_repeated_passes, craft=functools.partial(attacks.pgd, epsilon=0.1), passes=3
        ),
    ),
    "autoattack": functools.partial(attacks.autoattack, epsilon=0.1),
    "transfer_matrix": functools.partial(attacks.transfer_matrix, epsilon=0.1),
    "over": lambda model, x, y: attacks.over(functools.partial(attacks.pgd, epsilon=0.1), model, x, y, batch_size=3),
    "evaluate": lambda model, x, y: attacks.evaluate(model, (x, y), "quick", epsilon=0.1),
    "model_diagnostics": model_diagnostics,
}


@pytest.mark.parametrize("passes", [0, 1, 2, 4, 9])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_no_setting_changed_whatever_it_raises(name, passes, monkeypatch, unchecked):
    monkeypatch.setitem(sys.modules, "pyautoattack", types.SimpleNamespace(AutoAttack=Original))
    torch.manual_seed(5)
    model = Failing(passes).train()
    model.frozen.eval()
    ens = ds.Ensemble.from_modules([Failing(passes)], backend="loop").train()
    x, y = images(8)
    for target, owner in ((model, model), ([model, Normed()], model), (ens, ens)):
        model.passes, before = passes, settings(owner)
        with contextlib.suppress(Failed):  # an attack of one step may be over by then
            CALLS[name](target, x, y)
        assert settings(owner) == before
        with torch.no_grad():
            quiet = settings(owner)
            with contextlib.suppress(Failed):
                CALLS[name](target, x, y)
            assert settings(owner) == quiet


def test_a_model_that_cannot_be_put_into_evaluation_mode_is_left_as_it_was(unchecked):
    class Stubborn(Normed):
        def train(self, mode=True):
            super().train(mode)
            if not mode:
                raise Failed
            return self

    model = Stubborn()
    before = settings(model)
    with pytest.raises(Failed):
        attacks.fgsm(model, *images(8), epsilon=0.1)
    assert settings(model) == before


def test_inputs_that_want_gradients_and_odd_layouts():
    x, y = images(8)
    model = Steady()
    expected = attacks.bim(model, x, y, epsilon=0.1)
    assert torch.equal(attacks.bim(model, x.clone().requires_grad_(), y, epsilon=0.1).inputs, expected.inputs)
    strided = x.transpose(2, 3).contiguous().transpose(2, 3)
    for name in ("pgd-l2", "apgd", "square", "square-l2", "carlini_wagner", "jsma"):
        attack = ALL[name]
        assert attack(model, strided, y.to(torch.int32)).inputs.shape == x.shape, name


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_nan_gradients_are_reported(caplog):
    x, y = torch.full((3, 2), 0.5), torch.zeros(3, dtype=torch.long)

    def model(z):
        return torch.stack([z[:, 0], z[:, 1] * 0 - 1 + 0 * (z[:, 1] - z[:, 1].detach()).sqrt()], 1)

    with caplog.at_level(logging.WARNING, "dissensus"):
        result = attacks.bim(model, x, y, epsilon=0.1, steps=2)
    assert "gradients of the model had NaN or infinities" in caplog.text
    assert not result.success.any()


def test_models_without_gradients_are_refused_in_favour_of_square():
    x, y = right_only(Steady(), *images(8))
    model = lambda z: Steady()(z).detach()  # noqa: E731
    with pytest.raises(ValueError, match="differentiable with respect to its inputs.*`square`"):
        attacks.pgd(model, x, y, epsilon=0.1)
    parameter = nn.Parameter(torch.ones(C))
    with pytest.raises(ValueError, match="differentiable"):
        attacks.fgsm(lambda z: Steady()(z).detach() * parameter, x, y, epsilon=0.1)
    assert attacks.square(model, x, y, epsilon=0.3, queries=30).success.any()


def test_few_classes_fall_back_to_the_margin_and_say_so(caplog):
    model, x, y, *_ = two_planes()
    with caplog.at_level(logging.WARNING, "dissensus"):
        result = attacks.apgd(model, x, y, epsilon=0.3, loss="dlr", steps=10)
    assert "DLR needs 3 classes or more; with 2 the attack uses the margin" in caplog.text
    assert result.success.all()
    assert torch.equal(result.inputs, attacks.apgd(model, x, y, epsilon=0.3, loss="margin", steps=10).inputs)
    caplog.clear()
    three = linear(torch.randn(3, 20, dtype=torch.float64))
    with caplog.at_level(logging.WARNING, "dissensus"):
        attacks.apgd(three, *right_only(three, x, y), epsilon=0.3, loss="targeted_dlr", steps=5)
        attacks.apgd(three, *right_only(three, x, y), epsilon=0.3, loss="dlr", steps=5)
    assert caplog.text.count("targeted DLR needs 4") == caplog.text.count("DLR needs") == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": lambda x: x - 0.5}, ValueError, r"`x` must lie in \[0, 1\]"),
        ({"target": torch.full((24,), 7)}, ValueError, "`target` must be classes from 0 to 3"),
        ({"steps": 0}, ValueError, "`steps`"),
        ({"steps": 2.5}, ValueError, "`steps`"),
        ({"step_size": -1.0}, ValueError, "`step_size`"),
        ({"restarts": 0}, ValueError, "`restarts`"),
        ({"pool": 3}, ValueError, "`pool` must be a member from 0 to 2; got 3"),
        ({"seed": -1}, ValueError, "`seed`"),
        ({"model": lambda x: x.flatten(1)[:, :1]}, ValueError, "two classes or more"),
        ({"model": lambda x: (x.flatten(1),)}, ValueError, "got tuple"),
    ],
)
def test_invalid_arguments_are_refused(change, error, message, ensemble, unchecked):
    x, y = images()
    call = {"model": ensemble, "x": x, "y": y, "epsilon": 0.1}
    for name, value in change.items():
        call[name] = value(call[name]) if name in ("x", "y") else value
    with pytest.raises(error, match=message):
        attacks.pgd(**call)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x, y: attacks.apgd(m, x, y, epsilon=0.1, loss="dlrr"), "Did you mean 'dlr'"),
        (lambda m, x, y: attacks.carlini_wagner(m, x, y, box=(-math.inf, math.inf)), "`box` must be a finite number"),
        (lambda m, x, y: attacks.carlini_wagner(m, x, y, confidence=-1.0), "`confidence`"),
        (lambda m, x, y: attacks.carlini_wagner(m, x, y, constant=0.0), "`constant`"),
        (lambda m, x, y: attacks.elastic_net(m, x, y, rule="L2"), "`rule` must be one of 'EN', 'L1'"),
        (lambda m, x, y: attacks.jsma(m, x, y, preset="adq"), "Did you mean 'adp'"),
        (lambda m, x, y: attacks.jsma(m, x, y, distortion=1.5), "`distortion`"),
        (lambda m, x, y: attacks.square(m, x, y, epsilon=0.1, queries=0), "`queries`"),
        (lambda m, x, y: attacks.square(m, x, y, epsilon=0.1, share=0.0), "`share`"),
        (lambda m, x, y: attacks.square(m, x.flatten(1), y, epsilon=0.1, norm="l2"), "be images"),
        (lambda m, x, y: attacks.transfer_matrix(m, x, y, attack="pdg"), "Did you mean 'pgd'"),
        (lambda m, x, y: attacks.mim(m, x, y, epsilon=0.1, decay=-1.0), "`decay`"),
    ],
)
def test_settings_of_single_attacks_are_checked(call, message, unchecked):
    with pytest.raises(ValueError, match=message):
        call(network(), *images(4))


# --- Square -----------------------------------------------------------------------------------------------------------


def test_square_counts_its_queries(ensemble):
    x, y = images()
    result, queries = attacks.counted_square(ensemble, x, y, epsilon=0.1, queries=40)
    misclassified = ensemble(x).softmax(-1).mean(0).argmax(-1) != y
    assert (queries[misclassified] == 0).all()
    assert (queries[~result.success] == 40).all()
    assert (queries[result.success & ~misclassified] >= 1).all()
    assert (queries <= 40).all()
    scaled_call = Counted(lambda z: linear(torch.eye(C, SIDE * SIDE), 50.0 * torch.eye(C)[0])(z.flatten(1)))
    attacks.square(scaled_call, x, torch.zeros_like(y), epsilon=0.1, queries=40)
    assert scaled_call.forward == 40 + 2, "beside the queries, a clean pass and a check"
    assert scaled_call.backward == 0


def test_squares_shrink_by_the_schedule(monkeypatch):
    shares = []
    original = square_module._linf_proposal

    def recorded_proposal(state, share, *arguments):
        shares.append(share)
        return original(state, share, *arguments)

    monkeypatch.setattr(square_module, "_linf_proposal", recorded_proposal)
    model = lambda z: linear(torch.eye(2, 4), torch.tensor([50.0, 0.0]))(z)  # noqa: E731
    attacks.square(model, torch.rand(1, 4), torch.tensor([0]), epsilon=0.1, queries=10_000 // 50)
    halvings = [round(math.log2(0.8 / share)) for share in shares]
    expected = [sum(50 * i > after for after in (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)) for i in range(199)]
    assert halvings == expected


def test_bumps_of_the_l2_square():
    bumps = square_module._bumps(5, torch.zeros(()))
    assert bumps.shape == (5, 5)
    assert bumps.square().sum().item() == pytest.approx(1.0)
    assert (bumps[:2] > 0).all()
    assert (bumps[2:] < 0).all()
    lower = square_module._bump(3, 5, torch.zeros(()))
    terms = [1, 1 / 4, 1 / 9]
    assert lower[1, 2].item() == pytest.approx(sum(terms))
    assert lower[0, 2].item() == pytest.approx(sum(terms[1:]))
    assert lower[1, 0].item() == pytest.approx(terms[2])


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (1, 7, 4), (3, 12, 12)])
def test_square_takes_any_shape(shape):
    model = Steady(math.prod(shape))
    x, y = right_only(model, torch.rand(6, *shape), None)
    result = attacks.square(model, x, y, epsilon=0.4, queries=40)
    assert result.success.any()
    if len(shape) == 3 and min(shape[1:]) >= 3:
        assert attacks.square(model, x, y, epsilon=2.0, queries=40, norm="l2").success.any()


# --- transfer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targeted", [False, True])
def test_transfer_is_what_a_loop_finds(targeted, ensemble):
    x, y = images(30)
    target = (y + 1) % C if targeted else None
    result = attacks.transfer_matrix(ensemble, x, y, attack="mim", epsilon=0.15, target=target, batch_size=16)
    assert result.fooled.shape == result.accuracy.shape == (4, 4)
    predict = lambda z: [*ensemble(z).argmax(-1), ensemble(z).softmax(-1).mean(0).argmax(-1)]  # noqa: E731
    before = predict(x)
    for i, pool in enumerate([0, 1, 2, "probability"]):
        crafted = attacks.perturbed(
            ensemble, x, y, epsilon=0.15, decay=1.0, random_start=False, pool=pool, target=target
        )
        for j, predictions in enumerate(predict(crafted)):
            candidates = before[j] != target if targeted else before[j] == y
            fooled = (predictions == target) if targeted else (predictions != y)
            assert result.fooled[i, j].item() == pytest.approx(
                (fooled & candidates).sum().item() / candidates.sum().item()
            )
            assert result.accuracy[i, j].item() == pytest.approx((predictions == y).double().mean().item())
    assert result.fooled.diagonal().min() >= result.fooled.mean() - 0.15


def test_transfer_of_any_attack(ensemble):
    x, y = images(20)
    chosen = functools.partial(attacks.bim, epsilon=0.15, stop=False)
    result = attacks.transfer_matrix(ensemble, x, y, attack=chosen)
    assert ((result.fooled >= 0) & (result.fooled <= 1)).all()
    for name in ("fgsm", "bim", "pgd"):
        attacks.transfer_matrix(ensemble, x[:5], y[:5], attack=name, epsilon=0.1)
    single = attacks.transfer_matrix(ensemble.member(0), x, y, attack="bim", epsilon=0.15)
    torch.testing.assert_close(single.fooled[0, 0], result.fooled.new_tensor(single.fooled[1, 1].item()))


# --- many examples ----------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


def test_a_run_that_broke_off_goes_on_where_it_was(tmp_path, monkeypatch):
    model = Steady()
    x, y = right_only(model, *images(23))
    attack = functools.partial(attacks.pgd, epsilon=0.1, restarts=2, seed=3)
    expected_result = attack(model, x, y)
    reports = []

    def stop_after_two(done, total):
        reports.append((done, total))
        if len(reports) == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        attacks.over(attack, model, x, y, batch_size=5, folder=tmp_path, progress=stop_after_two)
    assert reports == [(5, 23), (10, 23)]
    (broken,) = (tmp_path / "000000005-000000010").glob("*.safetensors")
    broken.write_bytes(b"half of it")  # as if the disk had run full
    computed, write = [], storage.write_folder

    def recording_write(folder, *arguments):
        computed.append(folder.name)
        write(folder, *arguments)

    monkeypatch.setattr(storage, "write_folder", recording_write)
    same_attack = functools.partial(attacks.pgd, epsilon=0.1, restarts=2, seed=3)
    result = attacks.over(same_attack, model, x, y, batch_size=5, folder=tmp_path)
    assert computed == ["000000005-000000010", "000000010-000000015", "000000015-000000020", "000000020-000000023"]
    for part, expected in zip(result, expected_result, strict=True):
        assert torch.equal(part, expected)
    for part, expected in zip(attacks.over(attack, model, x, y, batch_size=4), expected_result, strict=True):
        assert torch.equal(part, expected)


def test_results_of_something_else_are_refused(tmp_path):
    model = Steady()
    x, y = right_only(model, *images(6))
    options = {"batch_size": 3, "folder": tmp_path}
    attacks.over(functools.partial(attacks.bim, epsilon=0.1), model, x, y, **options)
    with torch.no_grad():
        changed_model = Steady()
        changed_model.first.mul_(2)
    for attack, other_model, inputs in (
        (functools.partial(attacks.bim, epsilon=0.2), model, x),
        (functools.partial(attacks.mim, epsilon=0.1), model, x),
        (functools.partial(attacks.bim, epsilon=0.1), changed_model, x),
        (functools.partial(attacks.bim, epsilon=0.1), model, 1 - x),
    ):
        with pytest.raises(ValueError, match="`folder` must hold results of the same attack"):
            attacks.over(attack, other_model, inputs, y, **options)


def test_targets_go_with_their_examples(tmp_path):
    model = Steady()
    x, y = right_only(model, *images(10))
    target = (y + 1) % C
    attack = functools.partial(attacks.bim, epsilon=0.3)
    result = attacks.over(attack, model, x, y, target=target, batch_size=3, folder=tmp_path)
    assert torch.equal(result.inputs, attack(model, x, y, target=target).inputs)
    with pytest.raises(ValueError, match="folder"):
        attacks.over(attack, model, x, y, target=(y + 2) % C, batch_size=3, folder=tmp_path)


# --- training ---------------------------------------------------------------------------------------------------------


def test_the_bare_loop_is_the_attack(ensemble):
    """What adversarial training calls inside its step: no checks, no modes, per-example ε, and no host sync."""
    x, y = images(16)

    def slope(point):
        point = point.detach().requires_grad_()
        return torch.autograd.grad(-ds.losses.at_label(ds.pooling.mean_probability(ensemble(point)), y).sum(), point)[0]

    ball = norms.Ball.checked("linf", 0.1, (0.0, 1.0), x)
    start = ball.random(x, random_numbers.keys(x, 0, 0))
    result = attacks.climbed(slope, x, start, ball=ball, steps=5, step_size=0.05)
    torch.testing.assert_close(result, attacks.perturbed(ensemble, x, y, epsilon=0.1, steps=5))
    epsilons = torch.linspace(0.01, 0.1, 16).view(-1, 1, 1, 1)
    for norm in ("linf", "l2"):
        varied = norms.Ball(norm, epsilons, 0.0, 1.0)
        result = attacks.climbed(
            slope, x, varied.random(x, random_numbers.keys(x, 1)), ball=varied, steps=3, step_size=0.05
        )
        assert (varied.lengths(result - x) <= varied.limit.flatten()).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_results_are_on_the_device_of_the_inputs(ensemble):
    x, y = images()
    expected = attacks.bim(ensemble, x, y, epsilon=0.1)
    result = attacks.bim(ds.Ensemble.from_modules([ensemble.member(i) for i in range(3)]).cuda(), x, y, epsilon=0.1)
    assert result.inputs.device == x.device
    assert (result.success == expected.success).float().mean() > 0.95


@pytest.mark.slow
def test_masked_gradients_do_not_hide_from_square(ensemble):
    """Logits times 1000: cross-entropy has no gradient left, random search does not care."""
    x, y = right_only(ensemble, *images(32))
    sharp = lambda z: 1000 * ensemble(z)  # noqa: E731
    by_gradient = attacks.pgd(sharp, x, y, epsilon=0.2).success.float().mean()
    by_search = attacks.square(sharp, x, y, epsilon=0.2, queries=150).success.float().mean()
    by_margin = attacks.apgd(sharp, x, y, epsilon=0.2, loss="dlr", steps=20, pool="score").success.float().mean()
    assert by_search > by_gradient + 0.2
    assert by_margin > by_gradient + 0.2


class Times(nn.Module):
    def __init__(self, network, factor):
        super().__init__()
        self.network, self.factor = network, factor

    def forward(self, x):
        return self.factor * self.network(x)


def test_a_folder_distinguishes_models_with_equal_weights(tmp_path):
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    x, y = torch.rand(4, 3, 2, 2), torch.tensor([0, 1, 2, 0])
    attack = functools.partial(ds.attacks.fgsm, epsilon=0.1)
    ds.attacks.over(attack, Times(network, 1.0), x, y, folder=tmp_path)
    ds.attacks.over(attack, Times(network, 1.0), x, y, folder=tmp_path)
    with pytest.raises(ValueError, match="folder"):
        ds.attacks.over(attack, Times(network, 100.0), x, y, folder=tmp_path)


def stepping(epsilon):
    """An attack that closes over its ε."""
    return lambda model, x, y: attacks.fgsm(model, x, y, epsilon=epsilon)


STRENGTH = 0.01


def by_global(model, x, y):
    return attacks.fgsm(model, x, y, epsilon=STRENGTH)


def flat_model(factor=1.0, seed=0):
    torch.manual_seed(seed)
    return Times(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), factor)


def scaled_call(network, factor):
    return lambda x: factor * network(x)


def dropping(training):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 3)).train(training)
    return lambda x: network(x)


def through(source):
    craft = functools.partial(attacks.perturbed, epsilon=0.1)
    return functools.partial(
        attacks.tried, craft=functools.partial(crafting.craft_on_source, source=source, craft=craft), epsilon=0.1
    )


SHALLOW = functools.partial(attacks.fgsm, epsilon=0.01)
OTHERS = {
    "a closure's number": ((stepping(0.01), flat_model()), (stepping(0.5), flat_model())),
    "code": (
        (lambda m, x, y: attacks.fgsm(m, x, y, epsilon=0.01), flat_model()),
        (lambda m, x, y: attacks.fgsm(m, x, y, epsilon=0.5), flat_model()),
    ),
    "a nested partial": tuple(
        (
            functools.partial(attacks.tried, craft=functools.partial(attacks.perturbed, epsilon=e), epsilon=0.5),
            flat_model(),
        )
        for e in (0.01, 0.5)
    ),
    "a source": ((through(flat_model(seed=1)), flat_model()), (through(flat_model(seed=2)), flat_model())),
    "norm": tuple((functools.partial(attacks.fgsm, epsilon=0.1, norm=norm), flat_model()) for norm in ("linf", "l2")),
    "box": tuple((functools.partial(attacks.fgsm, epsilon=0.1, box=(0.0, high)), flat_model()) for high in (1.0, 2.0)),
    "seed": tuple((functools.partial(attacks.pgd, epsilon=0.1, seed=seed), flat_model()) for seed in (0, 1)),
    "pool": tuple(
        (functools.partial(attacks.fgsm, epsilon=0.1, pool=pool), [flat_model(), flat_model(seed=1)])
        for pool in (0, "score")
    ),
    "a wrapper's number": ((SHALLOW, scaled_call(flat_model(), 1.0)), (SHALLOW, scaled_call(flat_model(), 50.0))),
    "a wrapped network": ((SHALLOW, scaled_call(flat_model(), 1.0)), (SHALLOW, scaled_call(flat_model(seed=1), 1.0))),
    "a mode that attacks leave alone": ((SHALLOW, dropping(False)), (SHALLOW, dropping(True))),
    "members": ((SHALLOW, [flat_model(), flat_model(seed=1)]), (SHALLOW, [flat_model(seed=1), flat_model()])),
    "Monte Carlo's seed": tuple(
        (SHALLOW, ds.masks.MonteCarlo(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 3)).eval(), 3, seed))
        for seed in (0, 1)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_knows_attack_and_model_by_all_that_decides_them(name, tmp_path):
    x, y = torch.rand(4, 3, 2, 2), torch.tensor([0, 1, 2, 0])
    (attack, model), (other_attack, other_model) = OTHERS[name]
    torch.manual_seed(7)
    first = attacks.over(attack, model, x, y, folder=tmp_path)
    second = attacks.over(attack, model, x, y, folder=tmp_path)
    for part, expected in zip(second, first, strict=True):
        assert torch.equal(part, expected)
    with pytest.raises(ValueError, match=r"`folder` must hold results of the same attack.*'(attack|model)' differ"):
        attacks.over(other_attack, other_model, x, y, folder=tmp_path)


def test_a_folder_knows_an_attack_by_the_globals_it_names(tmp_path, monkeypatch):
    x, y = torch.rand(4, 3, 2, 2), torch.tensor([0, 1, 2, 0])
    attacks.over(by_global, flat_model(), x, y, folder=tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "STRENGTH", 0.5)
    with pytest.raises(ValueError, match="'attack' differ"):
        attacks.over(by_global, flat_model(), x, y, folder=tmp_path)


def test_a_folder_takes_an_ensemble_that_was_measured_meanwhile(tmp_path):
    """Which backend was the fastest, in how many seconds, decides nothing; nor does a mode that attacks set."""
    x, y = torch.rand(4, 3, 2, 2), torch.tensor([0, 1, 2, 0])
    ens = ds.Ensemble(lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), members=2)
    first = attacks.over(SHALLOW, ens, x, y, folder=tmp_path)
    modified = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.safetensors")}
    ens.train()(x)
    second = attacks.over(SHALLOW, ens, x, y, folder=tmp_path)
    assert torch.equal(first.inputs, second.inputs)
    assert modified
    assert modified == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.safetensors")}


class _Watching(nn.Module):
    """Notes at every pass which of its parameters want a gradient."""

    def __init__(self):
        super().__init__()
        self.layer, self.still = nn.Linear(4, 3), nn.Parameter(torch.ones(3), requires_grad=False)
        self.flags = set()

    def forward(self, x):
        self.flags.add(tuple(p.requires_grad for p in self.parameters()))
        return self.layer(x) * self.still


def test_parameters_want_no_gradient_while_attacks_run_and_are_as_before_then():
    model = _Watching()
    x, y = torch.rand(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    before = [p.requires_grad for p in model.parameters()]
    attacks.pgd(model, x, y, epsilon=0.1, steps=2)
    assert model.flags == {(False, False, False)}
    assert [p.requires_grad for p in model.parameters()] == before
    with pytest.raises(ValueError, match="classes from 0 to 2"):
        attacks.pgd(model, x, y + 7, epsilon=0.1, steps=2)
    assert [p.requires_grad for p in model.parameters()] == before


def test_an_epsilon_in_other_units_is_refused(ensemble):
    x, y = images(4, seed=2)
    for attack in (
        lambda: attacks.pgd(ensemble, x, y, epsilon=8),
        lambda: attacks.evaluate(ensemble, (x, y), "quick", epsilon=8),
        lambda: ds.train.AdversarialTraining(epsilon=8),
    ):
        with pytest.raises(ValueError, match=r"Of 256 shades\? Use 8/255"):
            attack()
    ds.train.AdversarialTraining(epsilon=8, norm="l2")


# --- what makes steps cheap -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_rows_are_chosen_exactly(shape):
    """Whatever the rows that are not chosen hold; in new memory."""
    rows, others = torch.rand(5, *shape), torch.full((5, *shape), math.nan)
    others[0] = math.inf
    for chosen in ([True] * 5, [False] * 5, [False, True, False, True, True]):
        mask = torch.tensor(chosen)
        result = where_rows(mask, rows, others)
        expected = torch.stack([rows[i] if chosen[i] else others[i] for i in range(5)])
        assert torch.equal(result.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert result.data_ptr() not in (rows.data_ptr(), others.data_ptr())


@pytest.mark.parametrize(("shape", "share"), [((3, 6, 5), 0.3), ((2, 4, 9), 0.8), ((7,), 0.5), ((4, 4, 4), 0.001)])
def test_a_square_is_at_the_edge_of_the_ball_and_all_else_stays(shape, share):
    x = 0.2 + 0.6 * torch.rand(40, *shape)
    ball = norms.Ball("linf", 0.1, 0.0, 1.0)
    bounds, point = ball.bounds(x), ball.projected(x, x + 0.05)
    false = torch.zeros(40, dtype=torch.bool)
    zeros = torch.zeros(40, dtype=torch.long)
    key = random_numbers.keys(x, 0)
    state = square_module.SquareState(x, zeros, zeros, *bounds, key, point, zeros.float(), zeros, false)
    before = point.clone()
    change = square_module._linf_proposal(state, share, 3, ball)
    channels, height, width = square_module._images(x).shape[1:]
    side = max(round(math.sqrt(share * height * width)), 1)
    tall, wide = min(side, height), min(side, width) if side <= height else min(round(share * width), width)
    starts = set()
    for i in range(40):
        images = [square_module._images(part)[i] for part in (change.point, *bounds, before)]
        new, least, largest, old = images
        moved = (new != old).any(0)
        rows, columns = moved.any(1).nonzero().flatten(), moved.any(0).nonzero().flatten()
        assert (len(rows), len(columns)) == (tall, wide)
        assert rows[-1] - rows[0] == tall - 1
        assert columns[-1] - columns[0] == wide - 1
        starts.add((int(rows[0]), int(columns[0])))
        window = (slice(None), slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1))
        for channel in range(channels):
            edges = [torch.equal(new[window][channel], edge[window][channel]) for edge in (least, largest)]
            assert any(edges)
        assert torch.equal(torch.where(moved, new, old), new)
    assert len(starts) > min(3, (height - tall + 1) * (width - wide + 1) - 1)
    candidate, better = change.point.clone(), torch.arange(40) % 3 == 0
    kept = change.kept(better)
    assert torch.equal(kept[better], candidate[better])
    assert torch.equal(kept[~better], before[~better])
    assert torch.equal(state.point, before)


@pytest.mark.parametrize("widening", [0.0, 0.3])
@pytest.mark.parametrize("box", [(0.0, 1.0), (-2.0, 3.0)])
def test_carlini_and_wagner_take_the_steps_of_adam_in_tanh_space(widening, box):
    """The published objective in tanh space, by PyTorch's Adam, in double precision."""
    model = Steady(dtype=torch.float64)
    low, high = box
    x = low + (high - low) * images(8, dtype=torch.float64)[0].clamp(0.01, 0.99)
    x, y = right_only(model, x)
    middle, half = (low + high) / 2, (high - low) / 2
    edge = 1 / (1 + widening) if widening else 0.999999
    place = ((x - middle) / half * edge).atanh().requires_grad_()
    adam = torch.optim.Adam([place], lr=0.03)
    best, nearest = x.clone(), torch.full((8,), math.inf, dtype=torch.float64)
    for step in range(31):
        point = (middle + half * (1 + widening) * place.tanh()).clamp(low, high)
        scores = model(point)
        other = scores.masked_fill(nn.functional.one_hot(y, C).bool(), -math.inf).amax(1)
        lead = scores.gather(1, y.unsqueeze(1)).squeeze(1) - other
        squared = (point - x).flatten(1).square().sum(1)
        nearer = (scores.argmax(1) != y) & (squared < nearest)
        best[nearer], nearest[nearer] = point.detach()[nearer], squared.detach()[nearer]
        if step < 30:
            adam.zero_grad()
            (squared + 20.0 * lead.clamp_min(0)).sum().backward()
            adam.step()
            if widening:
                with torch.no_grad():
                    place.clamp_(-math.atanh(edge), math.atanh(edge))
    result = attacks.carlini_wagner(
        model,
        x,
        y,
        steps=30,
        step_size=0.03,
        constant=20.0,
        search_steps=1,
        abort_early=False,
        widening=widening,
        box=box,
    )
    assert result.success.any()
    assert torch.equal(result.success, nearest.isfinite())
    torch.testing.assert_close(result.inputs, best, rtol=0, atol=1e-5)


def test_elastic_net_takes_the_steps_of_fista():
    """Gradient step, shrinkage and extrapolation written out in double precision."""
    model, beta = Steady(dtype=torch.float64), 0.02
    x, y = right_only(model, images(8, dtype=torch.float64)[0])
    point = extrapolated = x
    best, nearest = x.clone(), torch.full((8,), math.inf, dtype=torch.float64)
    for step in range(30):
        at = extrapolated.clone().requires_grad_()
        scores = model(at)
        other = scores.masked_fill(nn.functional.one_hot(y, C).bool(), -math.inf).amax(1)
        lead = scores.gather(1, y.unsqueeze(1)).squeeze(1) - other
        objective = 5.0 * lead.clamp_min(0) + (at - x).flatten(1).square().sum(1)
        (gradient,) = torch.autograd.grad(objective.sum(), at)
        moved = extrapolated - 0.05 * math.sqrt(1 - step / 30) * gradient
        shrunk = torch.where(moved > x, moved - beta, moved + beta).clamp(0, 1)
        last, point = point, torch.where((moved - x).abs() > beta, shrunk, x)
        extrapolated = point + step / (step + 3) * (point - last)
        change = (point - x).flatten(1)
        length = change.square().sum(1) + beta * change.abs().sum(1)
        nearer = (model(point).argmax(1) != y) & (length < nearest)
        best[nearer], nearest[nearer] = point[nearer], length[nearer]
    result = attacks.elastic_net(
        model, x, y, steps=30, step_size=0.05, l1_weight=beta, constant=5.0, search_steps=1, abort_early=False
    )
    assert result.success.any()
    assert torch.equal(result.success, nearest.isfinite())
    torch.testing.assert_close(result.inputs, best, rtol=0, atol=1e-9)
    torch.testing.assert_close(result.distance[result.success], nearest[result.success], rtol=0, atol=1e-9)


def test_on_a_cpu_broken_examples_cost_no_further_step_where_setting_them_aside_saves_one():
    sizes = []

    def model(x):
        sizes.append(len(x))
        return linear(torch.tensor([[0.0], [1.0]]), torch.tensor([0.0, -0.5]))(x)

    x = torch.cat([torch.full((20, 1), 0.45), torch.full((20, 1), 0.25)])
    attacks.bim(model, x, torch.zeros(40, dtype=torch.long), epsilon=0.3, steps=60)
    # Steps of 0.005: half of all cross 0.5 in step 11, which the pass of step 12 sees; the others in step 51.
    first, last, check = sizes[:12], sizes[12:-1], sizes[-1]
    assert set(first) == {40}
    assert set(last) == {20}
    assert check == 40
