"""Captured steps of attacks give the results of eager steps. On a CPU, operations are recorded and replayed."""

import functools
import logging
from typing import NamedTuple

import pytest
import torch
from recording import Captures, recorded
from torch import nn

import dissensus as ds
from dissensus import attacks
from dissensus.attacks import blocks, norms
from dissensus.attacks.rows import pad, unless_done
from dissensus.execution.graphs import capture_on

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
C, SIDE = 5, 6

SHORT = {"steps": 30, "search_steps": 2, "constant": 3.0, "step_size": 0.03}
ATTACKS = {
    "fgsm": functools.partial(attacks.fgsm, epsilon=0.1),
    "bim": functools.partial(attacks.bim, epsilon=0.15, steps=60),
    "bim-all-steps": functools.partial(attacks.bim, epsilon=0.1, stop=False),
    "pgd": functools.partial(attacks.pgd, epsilon=0.12, steps=40, restarts=3),
    "pgd-l2": functools.partial(attacks.pgd, epsilon=0.6, steps=40, norm="l2"),
    "mim": functools.partial(attacks.mim, epsilon=0.12, steps=40),
    "apgd": functools.partial(attacks.apgd, epsilon=0.04, steps=50),
    "apgd-dlr": functools.partial(attacks.apgd, epsilon=0.05, steps=50, loss="dlr", pool="members"),
    "apgd-targeted": functools.partial(attacks.apgd, epsilon=0.05, steps=35, loss="targeted_dlr"),
    "carlini_wagner": functools.partial(attacks.carlini_wagner, **SHORT),
    "carlini_wagner-all-steps": functools.partial(attacks.carlini_wagner, **SHORT, abort_early=False),
    "elastic_net": functools.partial(attacks.elastic_net, **SHORT),
    "elastic_net-all-steps": functools.partial(attacks.elastic_net, **SHORT, abort_early=False),
    "square": functools.partial(attacks.square, epsilon=0.15, queries=60, restarts=2),
    "square-l2": functools.partial(attacks.square, epsilon=1.0, queries=60, norm="l2"),
    "jsma": functools.partial(attacks.jsma, preset="adp", step_size=0.4, distortion=0.8),
}
UNEVEN = {"pgd-l2", "square-l2", "carlini_wagner", "elastic_net"}
"""Roots and tanh are rounded by place, and places differ where rows are set aside."""


class Steady(nn.Module):
    """Two layers whose sums are written out: an example's outputs and gradients are the same bits in any batch."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        first, second = ((SIDE * SIDE, 8), (8, C))
        self.first = nn.Parameter(torch.randn(first, generator=generator, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(second, generator=generator, dtype=torch.float64))

    def forward(self, x):
        hidden = self.layer(x.flatten(1) - 0.5, self.first)
        return self.layer(hidden / (1 + hidden.abs()), self.second)

    @staticmethod
    def layer(x, weight):
        products = x.unsqueeze(1) * weight.T
        return norms.sums(products.flatten(0, 1)).view(len(x), -1)


def ensemble(device, members=2):
    """Members in a loop, so that none of their sums is taken over a batch."""
    return ds.Ensemble.from_modules([Steady(seed) for seed in range(members)], backend="loop").to(device).eval()


def examples(model, count, device, wrong=True):
    """Inputs with the labels that the model gives them; the first one is wrong from the start."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(count, 1, SIDE, SIDE, generator=generator, dtype=torch.float64).to(device)
    with torch.no_grad():
        outputs = model(x)
    y = (outputs if outputs.ndim == 2 else outputs.softmax(-1).mean(0)).argmax(-1)
    if wrong and count > 1:
        y[0] = (y[0] + 1) % C
    return x, y


@pytest.fixture
def eager(monkeypatch):
    """Switch capture off."""
    return lambda: monkeypatch.setattr("dissensus.attacks.problem.capture_on", lambda device: None)


@pytest.fixture
def captured(monkeypatch):
    """Switch capture on, and count captures and replays."""

    def switch():
        counts = Captures()

        def counting(device):
            counts.capture = capture_on(device) or recorded
            return counts

        monkeypatch.setattr("dissensus.attacks.problem.capture_on", counting)
        return counts

    return switch


def assert_same(actual, expected, exact):
    assert torch.equal(actual.success, expected.success)
    if exact:
        assert torch.equal(actual.inputs, expected.inputs)
        assert torch.equal(actual.distance, expected.distance)
    torch.testing.assert_close(actual.inputs, expected.inputs, rtol=0, atol=1e-6)
    torch.testing.assert_close(actual.distance, expected.distance, rtol=1e-6, atol=1e-6)


@pytest.mark.slow(
    fast=[
        "pgd-37-cpu",
        "apgd-37-cpu",
        "square-37-cpu",
        "jsma-37-cpu",
        "pgd-1-cpu",
        "carlini_wagner-1-cpu",
        "mim-37-cpu",
        "bim-all-steps-37-cpu",
    ]
)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "count"),
    [*((name, 37) for name in ATTACKS), ("pgd", 1), ("apgd", 1), ("carlini_wagner", 1), ("square", 1)],
)
def test_captured_attacks_equal_eager_ones(name, count, device, eager, captured, caplog):
    model = ensemble(device)
    x, y = examples(model, count, device)
    eager()
    expected = ATTACKS[name](model, x, y)
    counts = captured()
    actual = ATTACKS[name](model, x, y)
    assert_same(actual, expected, exact=device == "cpu" and name not in UNEVEN)
    assert counts.replays > 0 or name == "fgsm" or count == 1, "it was replayed"
    assert counts.replays >= counts.captures
    assert not any("not captured" in record.getMessage() for record in caplog.records)
    if count > 1:
        assert actual.success.sum() > 1, "or the test tests little"


@pytest.mark.slow(fast=["pgd-l2"])
@pytest.mark.parametrize("name", sorted(UNEVEN))
def test_captured_attacks_equal_eager_ones_to_the_bit_when_rows_keep_their_places(name, eager, captured, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 10**9)
    monkeypatch.setattr(blocks, "HOST_BLOCK", 10**9)
    model = ensemble("cpu")
    x, y = examples(model, 21, "cpu")
    eager()
    expected = ATTACKS[name](model, x, y)
    counts = captured()
    assert_same(ATTACKS[name](model, x, y), expected, exact=True)
    assert counts.replays > 10


@pytest.mark.slow(fast=["bim-*", "apgd-dlr-*"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["bim", "apgd-dlr", "carlini_wagner", "elastic_net", "square"])
def test_captured_targeted_attacks_equal_eager_ones(name, device, eager, captured):
    model = ensemble(device)
    x, y = examples(model, 19, device)
    target = (y + 2) % C
    eager()
    expected = ATTACKS[name](model, x, y, target=target)
    counts = captured()
    assert_same(ATTACKS[name](model, x, y, target=target), expected, device == "cpu" and name not in UNEVEN)
    assert counts.replays > 0


# --- sizes, graphs and their numbers ----------------------------------------------------------------------------------


def test_block_sizes_are_halves():
    assert blocks.halves(256) == [256, 128, 64, 32, 16, 8]
    assert blocks.halves(37) == [37, 19, 10]
    assert blocks.halves(1) == [1]


class CountingRows(NamedTuple):
    """Rows that count their steps, up to a limit of their own."""

    limit: torch.Tensor
    steps: torch.Tensor
    total: torch.Tensor
    done: torch.Tensor


def counting_step(sizes):
    """Adds its kind and its number to every row that is going."""

    def step(rows, kind, numbers):
        sizes.append(len(rows.done))
        (number,) = numbers.unbind()
        steps = rows.steps + 1
        return rows._replace(steps=steps, total=rows.total + number + kind, done=steps >= rows.limit)

    return step


def counting_rows(*limits):
    limit = torch.tensor(limits)
    zeros = torch.zeros_like(limit)
    return CountingRows(limit, zeros, zeros, torch.zeros_like(limit, dtype=torch.bool))


def totals(limits, kinds):
    return [sum(kinds[i] + i for i in range(min(limit, len(kinds)))) for limit in limits]


@pytest.mark.parametrize("capture", [None, recorded])
def test_rows_that_are_set_aside_are_restored(capture):
    """Every row's sum is that of its own steps, whatever was set aside, filled up or replayed around it."""
    kinds = [1000 if index in (0, 17, 50) else 0 for index in range(90)]
    sizes = []
    steps = blocks.Steps(counting_step(sizes), kinds, torch.arange(90).unsqueeze(1), capture=capture)
    for limits in ([3, 90, 12, 55, 90] + 30 * [4], [25] * 11 + [90], [100] * 35, [1]):
        end = steps.carried_out(counting_rows(*limits))
        assert end.total.tolist() == totals(limits, kinds)
        assert end.steps.tolist() == [min(limit, 90) for limit in limits]
        assert end.limit.tolist() == limits
    if capture is None:
        assert set(sizes) == {35, 34, 4, 3, 2, 12, 1}, "as many as are going, and two if there are"
    else:
        assert set(sizes) == {35, 18, 9}, "halves of the first run, in all runs"


def test_frequent_kinds_of_steps_are_captured_and_shared_by_runs():
    captures = []

    def capture(function, generators):
        assert list(generators) == []
        captures.append(function)
        return function

    kinds = ["first", *["plain"] * 20, "rare", *["plain"] * 20, "rare", *["late"] * blocks.WORTH]
    steps = blocks.Steps(lambda rows, kind, numbers: rows, kinds, capture=capture)
    steps.carried_out(counting_rows(*[10**6] * 30))
    assert list(steps.cache.graphs) == [(30, "plain")], "one that is left too seldom after its first step has none"
    steps.carried_out(counting_rows(*[10**6] * 30))
    assert list(steps.cache.graphs) == [(30, "plain"), (30, "late")], "it has been seen, and comes often enough"
    steps.carried_out(counting_rows(*[10**6] * 29))
    assert len(captures) == 2, "29 rows fill up to 30"
    steps.carried_out(counting_rows(*[10**6] * 15))
    assert list(steps.cache.graphs)[2:] == [(15, "plain")]


def test_few_remaining_steps_keep_the_block_size():
    sizes = []
    limits = [100, *[1] * 39]
    steps = blocks.Steps(counting_step(sizes), [0] * 25, torch.zeros(25, 1, dtype=torch.int64), capture=recorded)
    assert steps.carried_out(counting_rows(*limits)).steps.tolist() == [25, *[1] * 39]
    assert set(sizes) == {40}


def test_padding_rows_are_done():
    padded = pad(counting_rows(7, 8), 4)
    assert padded.limit.tolist() == [7, 8, 8, 8]
    assert padded.done.tolist() == [False, False, True, True]
    stepped = padded._replace(steps=padded.steps + 1)
    assert unless_done(padded, stepped).steps.tolist() == [1, 1, 0, 0]


def test_results_do_not_share_memory_with_graphs():
    steps = blocks.Steps(counting_step([]), [0] * 20, torch.ones(20, 1, dtype=torch.int64), capture=recorded)
    result = steps.carried_out(counting_rows(100, 100))
    expected = result.total.clone()
    steps.carried_out(counting_rows(5, 5))
    assert torch.equal(result.total, expected)


# --- what cannot be captured ------------------------------------------------------------------------------------------


class ReadsOnHost(nn.Module):
    """A model that looks at a number on the host."""

    def __init__(self):
        super().__init__()
        self.inner = Steady(0)

    def forward(self, x):
        return self.inner(x) if x.detach().sum().item() > -1e9 else self.inner(-x)


class DrawsNoise(nn.Module):
    """A model that adds a little noise, drawn on the host or on its device."""

    def __init__(self, host):
        super().__init__()
        self.inner, self.host = Steady(0), host

    def forward(self, x):
        noise = torch.rand(()).item() if self.host else torch.rand_like(x)
        return self.inner(x + 0.05 * noise)


def notices(caplog):
    return [record.getMessage() for record in caplog.records if "not captured" in record.getMessage()]


def random_numbers(device):
    return torch.rand(3).tolist(), torch.rand(3, device=device).tolist()


@pytest.mark.slow(fast=["pgd"])
@pytest.mark.parametrize("name", ["pgd", "apgd-targeted", "carlini_wagner"])
def test_attacks_that_cannot_be_captured_run_eagerly_with_one_notice(name, eager, monkeypatch, caplog):
    def refuses(function, generators):
        torch.rand(5)  # what a model draws before it fails
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model = ensemble("cpu")
    x, y = examples(model, 37, "cpu")
    eager()
    expected = ATTACKS[name](model, x, y)
    torch.manual_seed(3)
    expected_numbers = random_numbers("cpu")
    torch.manual_seed(3)
    monkeypatch.setattr("dissensus.attacks.problem.capture_on", lambda device: refuses)
    with caplog.at_level(logging.WARNING, "dissensus"):
        actual = ATTACKS[name](model, x, y)
    assert_same(actual, expected, exact=name not in UNEVEN)
    assert random_numbers("cpu") == expected_numbers
    (line,) = notices(caplog)
    assert line.endswith("operation not permitted when stream is capturing")


def test_a_refusal_in_the_middle_of_a_run(caplog):
    """The first size is captured and the second is not: eager steps go on from where the graph was."""
    captures = []

    def second_refuses(function, generators):
        captures.append(function)
        if len(captures) == 2:
            raise RuntimeError("out of memory")
        return function

    limits = [100, *[1] * 39]
    numbers = torch.arange(60).unsqueeze(1)
    steps = blocks.Steps(counting_step([]), [0] * 60, numbers, capture=second_refuses)
    assert steps.carried_out(counting_rows(*limits)).total.tolist() == totals(limits, [0] * 60)
    assert steps.carried_out(counting_rows(*limits)).total.tolist() == totals(limits, [0] * 60)
    assert len(captures) == 2
    assert len(notices(caplog)) == 1


def test_a_model_that_draws_on_the_host_is_not_captured(eager, monkeypatch, caplog):
    def running_capture(function, generators):
        torch.rand(())  # a capture runs the host's part of the function
        return function

    results = []
    for capture in (None, running_capture):
        monkeypatch.setattr("dissensus.attacks.problem.capture_on", lambda device, capture=capture: capture)
        model = DrawsNoise(host=True)
        x, y = examples(Steady(0), 12, "cpu")
        torch.manual_seed(5)
        results.append((attacks.perturbed(model, x, y, epsilon=0.1, steps=20), random_numbers("cpu")))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert notices(caplog) == [
        "steps of the attack are not captured in a graph: "
        "random numbers are drawn on the host, and a graph would repeat them"
    ]


@GPU
@pytest.mark.parametrize("build", [ReadsOnHost, functools.partial(DrawsNoise, host=True)])
def test_on_a_gpu_a_model_that_needs_the_host_runs_eagerly(build, eager, captured, caplog):
    results = []
    for switch in (eager, captured):
        counts = switch()
        model = build().cuda()
        x, y = examples(Steady(0).cuda(), 21, "cuda")
        torch.manual_seed(5)
        result = attacks.pgd(model, x, y, epsilon=0.1, steps=30)
        results.append((result, random_numbers("cuda")))
    assert_same(results[1][0], results[0][0], exact=False)
    assert results[0][1] == results[1][1], "torch's generators go on as if nothing had been tried"
    assert counts.replays == 0
    (line,) = notices(caplog)
    assert len(line.splitlines()) == 1
    counts = captured()
    attacks.pgd(Steady(0).cuda(), x, y, epsilon=0.1, steps=30)
    assert counts.replays > 0, "and the next attack is captured as ever"


@GPU
def test_on_a_gpu_a_model_that_draws_there_draws_anew_at_every_replay(eager, captured, caplog):
    results = []
    for switch in (eager, captured):
        counts = switch()
        model = DrawsNoise(host=False).cuda()
        x, y = examples(Steady(0).cuda(), 21, "cuda", wrong=False)
        torch.manual_seed(5)
        inputs = attacks.perturbed(model, x, y, epsilon=0.1, steps=30)
        results.append((inputs, torch.rand(3, device="cuda")))
    assert counts.replays == 29
    assert notices(caplog) == []
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=1e-6)
    assert torch.equal(results[1][1], results[0][1]), "replays draw as many numbers as steps do"


@GPU
@pytest.mark.parametrize("backend", ["auto", "streams", "vmap"])
def test_on_a_gpu_networks_of_every_backend_are_captured(backend, eager, captured, caplog):
    build = functools.partial(ds.nets.cnn, 1, C, SIDE, (8,))
    model = ds.Ensemble(build, members=3, backend=backend).double().cuda().eval()
    x, y = examples(model, 33, "cuda")
    for attack in (ATTACKS["bim-all-steps"], ATTACKS["apgd-targeted"], ATTACKS["square"]):
        eager()
        expected = attack(model, x, y)
        counts = captured()
        actual = attack(model, x, y)
        assert (actual.success == expected.success).float().mean() > 0.9
        assert counts.replays > 5
    assert notices(caplog) == []


@GPU
def test_on_a_gpu_memory_is_given_back():
    model = ensemble("cuda")
    x, y = examples(model, 33, "cuda")
    used = []
    for _ in range(3):
        ATTACKS["apgd"](model, x, y)
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[2] <= used[1]
