"""Temperatures, refusals, accuracies under shift, what theorem 2 speaks of, greedy soups: against plain loops."""

import importlib
import itertools
import math

import numpy as np
import pytest
import torch
from networks import NETWORKS
from torch import nn

import dissensus as ds
from dissensus.metrics import (
    disagreement_indicator,
    high_loss,
    oracle,
    pair_disagreement,
    prediction_accuracy,
    premise,
    risk_coverage,
    temper,
    temperature,
    wilson,
    worst_group,
)
from dissensus.metrics import generalisation as shared
from dissensus.metrics.temperature import _curve

M, B, C = 4, 40, 3


def random_logits(members=M, batch=B, classes=C, seed=0, scale=3.0, signal=2.0):
    """Logits that know something about the labels, and are too sure of it."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (batch,), generator=generator)
    noise = torch.randn(members, batch, classes, generator=generator, dtype=torch.float64)
    return scale * noise + signal * nn.functional.one_hot(labels, classes), labels


def softmax_by_hand(row):
    shifted = [math.exp(float(v) - float(max(row))) for v in row]
    return [v / sum(shifted) for v in shifted]


def pooled_by_hand(outputs, pool):
    """Probabilities ``[B][C]``, one number at a time."""
    members, batch, classes = outputs.shape
    rows = []
    for b in range(batch):
        if pool == "score":
            mean = [sum(float(outputs[m, b, c]) for m in range(members)) / members for c in range(classes)]
            rows.append(softmax_by_hand(mean))
        else:
            probs = [softmax_by_hand(outputs[m, b]) for m in range(members)]
            rows.append([sum(p[c] for p in probs) / members for c in range(classes)])
    return rows


def losses_at(outputs, labels, temperatures, *, when, pool):
    """Mean cross-entropy of the pooled prediction at every temperature, by numpy, from the definition."""
    f, y = outputs.numpy(), labels.numpy()

    def log_softmax(z):
        z = z - z.max(-1, keepdims=True)
        return z - np.log(np.exp(z).sum(-1, keepdims=True))

    def log_pool(z):
        return np.logaddexp.reduce(log_softmax(z)) - np.log(len(z)) if pool == "probability" else log_softmax(z.mean(0))

    losses = []
    for t in temperatures:
        log_probs = log_pool(f / t) if when == "before" else log_softmax(log_pool(f) / t)
        losses.append(-log_probs[np.arange(len(y)), y].mean())
    return np.array(losses)


def is_level(loss, value):
    """Whether a function of the temperature is at a minimum: no slope to speak of, bent upwards."""
    step = 1e-4
    left, centre, right = (loss([value * math.exp(s)])[0] for s in (-step, 0.0, step))
    slope, bend = (right - left) / (2 * step), (right - 2 * centre + left) / step**2
    return bend > 0 and abs(slope) < 1e-7 * max(1.0, bend)


GRID = np.exp(np.linspace(math.log(1e-2), math.log(1e2), 4001))
every_pool = pytest.mark.parametrize(
    ("when", "pool"), list(itertools.product(["before", "after"], ["probability", "score"]))
)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [0.3, 3.0, 20.0])
def test_a_temperature_is_the_least_loss_of_a_grid_and_level(seed, scale):
    f, y = random_logits(1, seed=seed, scale=scale, signal=0.7 * scale)

    def loss(t):
        return losses_at(f, y, t, when="after", pool="score")

    fitted = temperature(f[0], y)
    values = loss(GRID)
    assert abs(math.log(fitted) - math.log(GRID[values.argmin()])) < 3e-3
    assert loss([fitted])[0] <= values.min() + 1e-12
    assert is_level(loss, fitted)


@pytest.mark.parametrize(("correct", "total"), [(3, 4), (9, 10), (51, 100), (999, 1000)])
@pytest.mark.parametrize("margin", [0.05, 1.0, 30.0])
def test_two_classes_have_a_closed_form(correct, total, margin):
    logits = torch.tensor([margin, 0.0], dtype=torch.float64).repeat(total, 1)
    labels = (torch.arange(total) >= correct).long()
    share = correct / total
    expected = margin / math.log(share / (1 - share))
    assert temperature(logits, labels) == pytest.approx(min(max(expected, 1e-2), 1e2), rel=1e-10)


def test_temperature_scales_with_the_logits_and_ignores_shifts_and_order():
    f, y = random_logits(1)
    fitted = temperature(f[0], y)
    assert 0.1 < fitted < 10
    assert temperature(2.5 * f[0], y) == pytest.approx(2.5 * fitted, rel=1e-10)
    assert temperature(f[0] + torch.randn(B, 1), y) == pytest.approx(fitted, rel=1e-10)
    order = torch.randperm(B)
    assert temperature(f[0][order], y[order]) == pytest.approx(fitted, rel=1e-10)
    assert temperature(f[0].log_softmax(-1), y) == pytest.approx(fitted, rel=1e-10)
    assert temperature(f[0].float(), y) == pytest.approx(fitted, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperatures_at_the_edges(scale, dtype):
    y = torch.arange(C).repeat(4)
    confident = scale * nn.functional.one_hot(y, C).to(dtype)
    flat = torch.full((len(y), C), scale, dtype=dtype)
    if scale < 1e6:
        assert temperature(confident, y) == 1e-2
        assert temper(confident.expand(M, -1, -1), y, when="before").temperature == 1e-2
    else:  # no number is so small that it could tell
        assert temperature(confident, y) == 1.0
    assert temperature(-confident, y) == 1e2
    assert temper(-confident.expand(M, -1, -1), y, when="before").temperature == 1e2
    assert temperature(flat, y) == 1.0
    assert temper(flat.expand(M, -1, -1), y, when="before").temperature == 1.0


def test_labels_of_one_class_only_and_single_examples_have_a_temperature():
    f, _ = random_logits(1)
    fitted = temperature(f[0], torch.zeros(B, dtype=torch.int64))
    assert 1e-2 <= fitted <= 1e2
    assert temperature(torch.tensor([[1.0, 0.0]]), torch.tensor([0])) == 1e-2
    assert temperature(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) == 1e2
    huge = torch.tensor([[3e38, -3e38], [3e38, -3e38]])
    assert math.isfinite(temperature(huge, torch.tensor([0, 1])))


@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("log_inverse", [-2.0, -0.5, 1.0])
def test_slopes_of_the_loss_are_those_of_finite_differences(members, log_inverse):
    f, y = random_logits(members)
    inverse, step = math.exp(log_inverse), 1e-4
    left, centre, right = (
        losses_at(f, y, [1 / (inverse + s)], when="before", pool="probability")[0] for s in (-step, 0.0, step)
    )
    curve = _curve(f, y, log_inverse)
    assert curve.loss == pytest.approx(centre)
    assert curve.slope == pytest.approx((right - left) / (2 * step), rel=1e-5)
    assert curve.bend == pytest.approx((right - 2 * centre + left) / step**2, rel=1e-4)


def test_newtons_steps_are_few(monkeypatch):
    calls = []
    module = importlib.import_module("dissensus.metrics.temperature")
    monkeypatch.setattr(module, "_curve", lambda *args: calls.append(1) or _curve(*args))
    for seed in range(20):
        f, y = random_logits(1, seed=seed)
        before = len(calls)
        temperature(f[0], y)
        assert len(calls) - before < 16


@every_pool
@pytest.mark.parametrize("seed", range(4))
def test_a_tempered_pool_has_the_least_loss_of_a_grid(when, pool, seed):
    f, y = random_logits(seed=seed, scale=5.0)

    def loss(t):
        return losses_at(f, y, t, when=when, pool=pool)

    fitted = temper(f, y, when=when, pool=pool)
    values = loss(GRID)
    assert abs(math.log(fitted.temperature) - math.log(GRID[values.argmin()])) < 3e-3
    assert is_level(loss, fitted.temperature)
    test_logits, test_labels = random_logits(seed=seed + 100, scale=5.0)
    expected = losses_at(test_logits, test_labels, [fitted.temperature], when=when, pool=pool)[0]
    log_probs = fitted.log_probs(test_logits)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(B, dtype=torch.float64))
    assert float(ds.losses.cross_entropy(log_probs, test_labels).mean()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kinds", "coldest_is_best"),
    [
        ({(100, 100): 20, (-5, 0): 50, (0.3, 0.3): 30, (-0.02, -0.02): 5}, False),
        ({(100, 100): 10, (-20, 0): 30, (0.5, 0.5): 60, (-0.05, -0.05): 8}, True),
    ],
)
def test_the_lowest_of_several_minima_is_taken(kinds, coldest_is_best):
    """Starkly right, starkly wrong by one member, mildly right, faintly wrong: two temperatures suit."""
    margins = torch.tensor([margins for margins, count in kinds.items() for _ in range(count)], dtype=torch.float64).T
    f, y = torch.stack([margins, torch.zeros_like(margins)], -1), torch.zeros(margins.shape[1], dtype=torch.int64)
    values = losses_at(f, y, GRID, when="before", pool="probability")
    valleys = [i for i in range(1, len(GRID) - 1) if values[i - 1] > values[i] < values[i + 1]]
    assert len(valleys) == 2
    assert (values.argmin() == valleys[0]) == coldest_is_best
    assert temper(f, y, when="before").temperature == pytest.approx(GRID[values.argmin()], rel=3e-3)


def test_members_can_be_permuted_and_for_scores_or_one_member_it_does_not_matter_when():
    f, y = random_logits(scale=5.0)
    order = torch.tensor([2, 0, 3, 1])
    for when in ("before", "after"):
        fitted = temper(f, y, when=when).temperature
        assert temper(f[order], y, when=when).temperature == pytest.approx(fitted, rel=1e-9)
        single = temper(f[:1], y, when=when).temperature
        assert single == pytest.approx(temperature(f[0], y), rel=1e-9)
        identical = temper(f[:1].expand(M, -1, -1), y, when=when).temperature
        assert identical == pytest.approx(single, rel=1e-9)
    before, after = (temper(f, y, when=when, pool="score") for when in ("before", "after"))
    assert before.temperature == pytest.approx(after.temperature, rel=1e-9)
    torch.testing.assert_close(before.log_probs(f), after.log_probs(f))
    temperatures = [temperature(member, y) for member in f]
    assert temper(f, y, when="before").temperature < min(temperatures), "pooling members makes them less sure as it is"


def test_slices_change_nothing(monkeypatch):
    f, y = random_logits()
    every_pool = [
        (temper, {"when": "before"}),
        (temper, {}),
        (premise, {"ood": f[:, :7]}),
        (prediction_accuracy, {"pool": "score"}),
    ]
    results = [function(f, y, **options) for function, options in every_pool]
    monkeypatch.setattr(shared, "_NUMBERS_AT_ONCE", 3 * M * C)
    assert len(list(shared.slices(f))) == -(-B // 3)
    for (function, options), expected in zip(every_pool, results, strict=True):
        result = function(f, y, **options)
        if function is temper:
            assert result.temperature == pytest.approx(expected.temperature, rel=1e-9)
        else:
            assert result == expected


def curve_by_orders(scores, losses):
    """The mean risk at every k over all orders that keep lower scores first."""
    orders = [
        order
        for order in itertools.permutations(range(len(scores)))
        if all(scores[a] <= scores[b] for a, b in itertools.pairwise(order))
    ]
    risks = [[sum(losses[i] for i in order[:k]) / k for k in range(1, len(order) + 1)] for order in orders]
    return [sum(risk[k] for risk in risks) / len(risks) for k in range(len(scores))]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["wrong", "loss"])
def test_risks_are_the_mean_over_all_orders_of_ties(seed, kind):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(3, (7,), generator=generator).double() / 4
    losses = torch.rand(7, generator=generator, dtype=torch.float64)
    losses = losses < 0.4 if kind == "wrong" else losses
    curve = risk_coverage(scores, losses)
    expected = curve_by_orders(scores.tolist(), [float(w) for w in losses])
    assert curve.risk.tolist() == pytest.approx(expected)
    assert curve.area == pytest.approx(sum(expected) / 7)
    assert curve.coverage.tolist() == pytest.approx([k / 7 for k in range(1, 8)])
    areas = [
        sum(sum(float(losses[i]) for i in order[:k]) / k for k in range(1, 8)) / 7
        for order in itertools.permutations(range(7))
    ]
    assert curve.excess == pytest.approx(curve.area - min(areas))
    assert curve.area <= max(areas) + 1e-12


def test_risk_at_a_coverage_keeps_at_least_that_share():
    curve = risk_coverage(torch.arange(10.0), torch.arange(10) % 2 == 1)
    for coverage, count in ((0.01, 1), (0.1, 1), (0.11, 2), (0.3, 3), (0.7, 7), (0.99, 10), (1.0, 10)):
        assert curve.risk_at(coverage) == pytest.approx((count // 2) / count)


def test_scores_that_are_best_worst_and_silent():
    losses = torch.tensor([True] * 3 + [False] * 7)
    best, worst = risk_coverage(losses.double(), losses), risk_coverage(-losses.double(), losses)
    assert best.excess == pytest.approx(0.0, abs=1e-15)
    assert worst.excess > 0.3
    uninformative = risk_coverage(torch.zeros(10), losses)
    assert uninformative.risk.tolist() == pytest.approx([0.3] * 10)
    assert best.area < uninformative.area < worst.area
    assert risk_coverage(torch.tensor([2.0]), torch.tensor([True]))[2:] == (1.0, 0.0)
    for zeros in (torch.zeros(4, dtype=torch.bool), torch.zeros(4)):
        assert risk_coverage(torch.rand(4), zeros)[2:] == (0.0, 0.0)


def test_only_the_order_of_scores_counts():
    scores, losses = torch.rand(50, dtype=torch.float64), torch.rand(50, dtype=torch.float64)
    curve = risk_coverage(scores, losses)
    order = torch.randperm(50)
    for other in (risk_coverage(scores.exp() * 3 - 1, losses), risk_coverage(scores[order], losses[order])):
        torch.testing.assert_close(other.risk, curve.risk)
        assert other.excess == pytest.approx(curve.excess)


@pytest.mark.parametrize("seed", range(3))
def test_accuracies_are_those_of_plain_loops(seed):
    f, y = random_logits(seed=seed)
    for pool in ("score", "probability"):
        probs = pooled_by_hand(f, pool)
        hits = sum(max(range(C), key=lambda c: p[c]) == int(label) for p, label in zip(probs, y, strict=True))
        assert prediction_accuracy(f, y, pool) == pytest.approx(hits / B)
        assert prediction_accuracy(f[[1, 3, 0, 2]], y, pool) == pytest.approx(hits / B)
    accuracies = [sum(int(f[m, b].argmax()) == int(y[b]) for b in range(B)) / B for m in range(M)]
    best = oracle(f, y)
    assert best.accuracy == pytest.approx(max(accuracies))
    assert best.member == accuracies.index(max(accuracies))
    assert oracle(f[[1, 3, 0, 2]], y).accuracy == pytest.approx(max(accuracies))


def test_pools_differ_where_one_member_is_loud():
    f = torch.tensor([[[9.0, 0.0]], [[0.0, 2.0]], [[0.0, 2.0]]])
    accuracies = {pool: prediction_accuracy(f, torch.tensor([1]), pool) for pool in ("score", "probability", "vote")}
    assert accuracies == {"score": 0.0, "probability": 1.0, "vote": 1.0}


def test_one_member_and_identical_members_are_as_right_together_as_alone():
    f, y = random_logits()
    for members in (f[:1], f[:1].expand(5, -1, -1)):
        assert oracle(members, y).member == 0
        for pool in ("score", "probability", "vote"):
            assert prediction_accuracy(members, y, pool) == pytest.approx(oracle(members, y).accuracy)


def test_groups_are_those_of_plain_loops():
    f, y = random_logits(1, batch=60)
    groups = torch.tensor([-2, 0, 5, 9])[torch.randint(4, (60,))]
    groups[0] = 11  # a group of one
    result = worst_group(f[0], y, groups)
    named = f[0].argmax(-1)
    by_group = {}
    for g in sorted(set(groups.tolist())):
        rows = [b for b in range(60) if int(groups[b]) == g]
        by_group[g] = (sum(int(named[b]) == int(y[b]) for b in rows) / len(rows), len(rows))
    assert result.group.tolist() == list(by_group)
    assert result.accuracy.tolist() == pytest.approx([accuracy for accuracy, _ in by_group.values()])
    assert result.examples.tolist() == [count for _, count in by_group.values()]
    lowest = min(accuracy for accuracy, _ in by_group.values())
    assert result.worst == next(g for g, (accuracy, _) in by_group.items() if accuracy == lowest)
    assert result.worst_accuracy == wilson(round(lowest * by_group[result.worst][1]), by_group[result.worst][1])
    assert worst_group(named, y, groups)[3:] == result[3:]


def test_one_group_is_the_whole_and_of_equals_the_lowest_is_worst():
    f, y = random_logits(1)
    result = worst_group(f[0], y, torch.full((B,), 3))
    assert result.worst_accuracy.value == pytest.approx(prediction_accuracy(f, y, "score"))
    assert (result.worst, len(result.group)) == (3, 1)
    assert worst_group(y, y, torch.arange(B) % 4).worst == 0


@pytest.mark.parametrize(("hits", "examples"), [(0, 1), (1, 1), (3, 7), (0, 20), (20, 20), (950, 1000)])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_wilsons_ends_are_where_the_share_is_just_plausible(hits, examples, confidence):
    interval = wilson(hits, examples, confidence=confidence)
    z = math.sqrt(2) * float(torch.erfinv(torch.tensor(confidence, dtype=torch.float64)))
    assert 0 <= interval.low <= interval.value == hits / examples <= interval.high <= 1
    for end in (interval.low, interval.high):
        assert abs(end - interval.value) == pytest.approx(z * math.sqrt(end * (1 - end) / examples), abs=1e-7)
    assert interval.high > interval.low


def test_wilson_holds_what_it_promises():
    hits = torch.distributions.Binomial(40, torch.tensor(0.93)).sample((2000,))
    intervals = [wilson(int(h), 40) for h in hits]
    covered = sum(i.low <= 0.93 <= i.high for i in intervals) / 2000
    assert 0.92 < covered < 0.99
    assert str(wilson(0, 0)) == "Interval(value=nan, low=0.0, high=1.0)"


@pytest.mark.parametrize("members", [1, 2, 3, 6])
def test_disagreement_is_that_of_plain_loops(members):
    f, _ = random_logits(members, seed=members)
    for b in range(B):
        predictions = [int(f[m, b].argmax()) for m in range(members)]
        pairs = list(itertools.permutations(predictions, 2))
        share = sum(a != c for a, c in pairs) / len(pairs) if pairs else 0.0
        assert float(pair_disagreement(f)[b]) == pytest.approx(share)
        assert bool(disagreement_indicator(f)[b]) == any(a != c for a, c in pairs)
    if members > 1:
        table = ds.diversity.pairwise_disagreement(f)
        expected = float(table.sum()) / (members * (members - 1))
        assert float(pair_disagreement(f).mean()) == pytest.approx(expected)
        assert bool((pair_disagreement(f) <= disagreement_indicator(f).double()).all()), "lemma 2"
    assert not bool(disagreement_indicator(f[:1].expand(5, -1, -1)).any())
    assert float(pair_disagreement(f[:1].expand(5, -1, -1)).sum()) == 0


def loss_by_hand(f, y):
    return [sum(-math.log(softmax_by_hand(f[m, b])[int(y[b])]) for m in range(f.shape[0])) for b in range(f.shape[1])]


@pytest.mark.parametrize("share", [None, 0.01, 0.25, 1.0])
def test_high_losses_are_those_of_plain_loops(share):
    f, y = random_logits()
    loss = loss_by_hand(f, y)
    count = max(1, math.ceil((share or 0.1) * B))
    highest = set(sorted(range(B), key=lambda b: -loss[b])[:count])
    assert set(high_loss(f, y, share=share).nonzero().flatten().tolist()) == highest
    limit = sorted(loss)[B // 3]
    high = high_loss(f, y, threshold=limit + 1e-9)
    assert high.tolist() == [value >= limit + 1e-9 for value in loss]
    assert not bool(high_loss(f, y, threshold=1e9).any())


def test_ties_at_the_threshold_are_all_in():
    f = torch.zeros(2, 6, 3)
    assert int(high_loss(f, torch.zeros(6, dtype=torch.int64), share=0.5).sum()) == 6


@pytest.mark.parametrize("options", [{}, {"share": 0.3}, {"threshold": 4.0}])
def test_premise_is_that_of_plain_loops(options):
    f, y = random_logits()
    ood, _ = random_logits(batch=23, seed=5, signal=0.0)
    high = high_loss(f, y, **options).tolist()
    disagrees = [len({int(f[m, b].argmax()) for m in range(M)}) > 1 for b in range(B)]
    disagrees_on_ood = [len({int(ood[m, b].argmax()) for m in range(M)}) > 1 for b in range(23)]
    result = premise(f, y, ood, **options)
    pairs = [float(p) for p in pair_disagreement(f)]
    high_indices = [b for b in range(B) if high[b]]
    assert result.examples == len(high_indices)
    assert result.delta == pytest.approx(sum(pairs[b] for b in high_indices) / len(high_indices))
    assert result.on_high == wilson(sum(disagrees[b] for b in high_indices), len(high_indices))
    assert result.on_rest == wilson(
        sum(d for d, h in zip(disagrees, high, strict=True) if not h), B - len(high_indices)
    )
    assert result.on_ood == wilson(sum(disagrees_on_ood), 23)
    assert result.inside_high == pytest.approx(sum(disagrees[b] for b in high_indices) / sum(disagrees))
    assert result.delta <= result.on_high.value, "lemma 2"
    order = torch.tensor([2, 0, 3, 1])
    permuted = premise(f[order], y, ood[order], **options)
    assert (permuted.on_high, permuted.on_rest, permuted.on_ood) == (result.on_high, result.on_rest, result.on_ood)
    assert [value >= result.threshold - 1e-9 for value in loss_by_hand(f, y)] == high


def test_premise_at_the_edges():
    f, y = random_logits()
    single = premise(f[:1], y, f[:1])
    assert (single.delta, single.on_ood.value) == (0.0, 0.0)
    assert math.isnan(single.inside_high)
    all_high = premise(f, y, f, share=1.0)
    assert all_high.inside_high == 1.0
    assert math.isnan(all_high.on_rest.value)
    assert all_high.on_high == all_high.on_ood
    none_high = premise(f, y, f, threshold=1e9)
    assert math.isnan(none_high.delta)
    assert none_high.on_rest == none_high.on_ood
    assert none_high.examples == 0


def soup_by_hand(modules, score):
    """Wortsman et al., recipe 1, on dictionaries of weights."""

    def mean(indices):
        network = NETWORKS["functional"][0]()
        states = [modules[i].state_dict() for i in indices]
        network.load_state_dict({name: sum(s[name] for s in states) / len(states) for name in states[0]})
        return network.double()

    scores = [score(module) for module in modules]
    chosen = []
    for index in sorted(range(len(modules)), key=lambda i: -scores[i]):
        if not chosen or score(mean([*chosen, index])) >= score(mean(chosen)):
            chosen.append(index)
    return chosen, mean(chosen)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spread", [0.1, 0.6])
def test_a_greedy_soup_is_that_of_a_plain_loop(seed, spread):
    torch.manual_seed(seed)
    base = NETWORKS["functional"][0]().double()
    x = torch.randn(64, 6, dtype=torch.float64)
    target = base(x).detach()
    modules = []
    for _ in range(6):
        module = NETWORKS["functional"][0]().double()
        module.load_state_dict({name: w + spread * torch.randn_like(w) for name, w in base.state_dict().items()})
        modules.append(module)

    def score(expected_network):
        return -float((expected_network(x) - target).square().mean().detach())

    expected_members, expected_network = soup_by_hand(modules, score)
    soup = ds.Ensemble.from_modules(modules).greedy_soup(score)
    assert soup.members == expected_members
    torch.testing.assert_close(soup.network.state_dict(), expected_network.state_dict())
    assert soup.score == pytest.approx(score(expected_network))
    assert soup.score >= max(score(module) for module in modules)


def test_greedy_soups_take_some_all_or_one():
    values = [1.0, 4.0, -1.5, 2.0]
    ensemble = ds.Ensemble.from_modules([constant(value) for value in values])
    members_by_goal = {
        1.6: [3, 0],
        1.75: [3, 0],
        3.0: [1, 3],
        4.0: [1],
    }  # at 1.75 the second is as good, at 3 two are level
    for goal, members in members_by_goal.items():
        soup = ensemble.greedy_soup(lambda network, goal=goal: -abs(float(network.weight) - goal))
        assert soup.members == members
        assert soup.network.weight.item() == pytest.approx(sum(values[i] for i in members) / len(members))
    assert ensemble.greedy_soup(lambda network: 0.0).members == [0, 1, 2, 3], "no worse is good enough"
    torch.testing.assert_close(ensemble.greedy_soup(lambda network: 0.0).network.weight, ensemble.soup().weight)
    single = ensemble.subset([1]).greedy_soup(lambda network: 1.0)
    assert (single.members, single.network.weight.item()) == ([0], 4.0)
    identical = ds.Ensemble.from_modules([constant(2.0)] * 3).greedy_soup(lambda network: float(network.weight))
    assert (identical.members, identical.score) == ([0, 1, 2], 2.0)


def constant(value):
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def test_greedy_soups_score_in_evaluation_mode_and_compute_statistics_anew():
    ensemble = ds.Ensemble(NETWORKS["norm_first"][0], M).double()
    x = torch.randn(64, 6, dtype=torch.float64) * 3 + 1
    modes, before = [], {name: tensor.clone() for name, tensor in ensemble.body.tensors().items()}

    def score(network):
        modes.append(any(module.training for module in network.modules()))
        modes[-1] |= any(p.requires_grad for p in network.parameters())
        return 1.0

    soup = ensemble.greedy_soup(score, x, batch_size=64)
    assert len(modes) == 2 * M - 1
    assert not any(modes)
    assert soup.network.training
    assert all(p.requires_grad for p in soup.network.parameters())
    torch.testing.assert_close(soup.network.net[0].running_mean, x.mean(0))
    torch.testing.assert_close(ensemble.body.tensors(), before)
    single = ensemble.greedy_soup(lambda network: -float(network.net[0].num_batches_tracked), x)
    assert len(single.members) == 1, "averaged ones have seen a batch"
    assert not ensemble.eval().greedy_soup(score).network.training


def test_greedy_soups_refuse_what_soups_do_and_scores_that_are_no_numbers():
    mixed = ds.Ensemble.from_modules([nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))])
    with pytest.raises(ValueError, match="different architectures cannot be averaged; `greedy_soup` needs one"):
        mixed.greedy_soup(lambda network: pytest.fail("nothing is to be scored"))
    with pytest.raises(ValueError, match=r"`score` must return a number; got NaN for the mean of members \[0\]"):
        ds.Ensemble(lambda: nn.Linear(2, 2), 3).greedy_soup(lambda network: math.nan)


OUTPUTS, LABELS = torch.zeros(2, 4, 3), torch.tensor([0, 1, 2, 0])
HOLED = torch.full((2, 4, 3), math.nan)
TAKE_BOTH = {
    "prediction_accuracy": lambda f, y: prediction_accuracy(f, y, "score"),
    "oracle": oracle,
    "temper": temper,
    "high_loss": high_loss,
    "premise": lambda f, y: premise(f, y, OUTPUTS),
}


@pytest.mark.parametrize("name", TAKE_BOTH)
@pytest.mark.parametrize(
    ("outputs", "labels", "message"),
    [
        (OUTPUTS[0], LABELS, r"`outputs` must have shape \[M, B, C\]; got \[4, 3\]"),
        (OUTPUTS.long(), LABELS, "`outputs` must be floating point"),
        (OUTPUTS[:, :0], LABELS[:0], "`outputs` must hold at least one member, example and output"),
        (OUTPUTS[:0], LABELS, "`outputs` must hold at least one member"),
        (OUTPUTS[..., :1], LABELS, "`outputs` must have two classes or more"),
        (HOLED, LABELS, "`outputs` must be numbers; got NaN"),
        (OUTPUTS, LABELS[:3], r"`labels` must have shape \[B=4\]; got \[3\]"),
        (OUTPUTS, nn.functional.one_hot(LABELS, 3), r"One-hot\? Use labels.argmax"),
        (OUTPUTS, LABELS.float(), "`labels` must be whole numbers; got torch.float32. Use labels.long"),
        (OUTPUTS, LABELS + 1, "`labels` must be from 0 to 2; got labels from 1 to 3"),
        (OUTPUTS, LABELS - 1, "`labels` must be from 0 to 2; got labels from -1 to 1"),
    ],
)
def test_outputs_and_labels_that_do_not_fit_are_refused(name, outputs, labels, message, unchecked):
    with pytest.raises((ValueError, TypeError), match=message):
        TAKE_BOTH[name](outputs, labels)


@pytest.mark.parametrize("measure", [disagreement_indicator, pair_disagreement])
@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (OUTPUTS[0], r"\[M, B, C\]"),
        (OUTPUTS[:, :0], "at least one"),
        (OUTPUTS[..., :1], "two classes"),
        (HOLED, "be numbers"),
    ],
)
def test_outputs_without_labels_are_looked_at_as_well(measure, outputs, message, unchecked):
    with pytest.raises(ValueError, match=message):
        measure(outputs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: temperature(OUTPUTS, LABELS), r"`logits` must have shape \[B, C\]; .* Use temper"),
        (lambda: temperature(OUTPUTS[0], LABELS[:2]), "`labels` must have shape"),
        (lambda: temperature(OUTPUTS[0, :0], LABELS[:0]), "`logits` must hold at least one"),
        (lambda: temperature(HOLED[0], LABELS), "`logits` must be numbers"),
        (lambda: temperature(OUTPUTS[0] - torch.tensor([0, 0, math.inf]), LABELS), "finite; got -inf"),
        (lambda: temper(OUTPUTS, LABELS, when="between"), "`when` must be one of"),
        (lambda: temper(OUTPUTS, LABELS, pool="vote"), "`pool` must be one of"),
        (lambda: temper(OUTPUTS, LABELS).log_probs(OUTPUTS[0]), r"\[M, B, C\]"),
        (lambda: prediction_accuracy(OUTPUTS, LABELS, "logits"), "`pool` must be one of"),
        (lambda: risk_coverage(torch.zeros(0), torch.zeros(0)), "`scores` must have shape"),
        (lambda: risk_coverage(torch.zeros(2, 3), torch.zeros(3)), "`scores` must have shape"),
        (
            lambda: risk_coverage(torch.zeros(3), torch.zeros(2, 3)),
            r"`wrong` must have shape \[B=3\]; .*pooled prediction",
        ),
        (lambda: risk_coverage(torch.tensor([math.nan]), torch.zeros(1)), "`scores` must be finite"),
        (lambda: risk_coverage(torch.zeros(1), torch.tensor([math.nan])), "`wrong` must be finite"),
        (lambda: risk_coverage(torch.zeros(1), torch.zeros(1)).risk_at(0.0), "`coverage` must be a number above 0"),
        (lambda: worst_group(OUTPUTS, LABELS, LABELS), "Pool the members first"),
        (lambda: worst_group(LABELS.float(), LABELS, LABELS), "`predictions` must be classes"),
        (lambda: worst_group(LABELS[:0], LABELS[:0], LABELS[:0]), "at least one example"),
        (lambda: worst_group(HOLED[0], LABELS, LABELS), "`predictions` must be numbers"),
        (lambda: worst_group(OUTPUTS[0], LABELS + 3, LABELS), "`labels` must be from 0 to 2"),
        (lambda: worst_group(LABELS, LABELS[:2], LABELS), "`labels` must have shape"),
        (lambda: worst_group(LABELS, LABELS, LABELS[:2]), r"`groups` must have shape \[B=4\]"),
        (lambda: worst_group(LABELS, LABELS, LABELS.float()), "`groups` must be whole numbers"),
        (lambda: worst_group(LABELS, LABELS, LABELS, confidence=1.0), "`confidence` must lie between"),
        (lambda: wilson(3, 2), "`hits` must be at most"),
        (lambda: premise(OUTPUTS, LABELS, OUTPUTS[:1]), r"`ood` must be outputs of the same members, \[M=2, U, C=3\]"),
        (lambda: premise(OUTPUTS, LABELS, HOLED), "`ood` must be numbers"),
        (lambda: premise(OUTPUTS, LABELS, OUTPUTS[0]), r"`ood` must have shape \[M, B, C\]"),
        (lambda: high_loss(OUTPUTS, LABELS, share=0.0), "`share` must be a number above 0"),
        (lambda: high_loss(OUTPUTS, LABELS, threshold=math.nan), "`threshold`"),
        (lambda: high_loss(OUTPUTS, LABELS, share=0.5, threshold=1.0), "`threshold` must stand alone"),
    ],
)
def test_invalid_arguments_are_refused(call, message, unchecked):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_classes_ruled_out_by_infinity_are_no_obstacle_to_counting():
    f, y = random_logits()
    f[..., 2], y = -math.inf, y % 2
    assert 0 <= prediction_accuracy(f, y, "probability") <= 1
    assert math.isfinite(premise(f, y, f).threshold)
