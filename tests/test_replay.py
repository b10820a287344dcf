"""Replays from graphs: warm-up, limits, failures, and the recorder that stands in for graphs on a CPU."""

import logging
from functools import partial

import numpy as np
import pytest
import torch
from recording import Captures, recorded
from torch import nn
from torch.nn import functional as F

from dissensus.execution.graphs import capture_on
from dissensus.execution.replay import Graph, GraphCache, Recording
from dissensus.randomness import GlobalGenerators


def doubling(x):
    """A recording that doubles its input."""
    memory = x.clone()
    return Recording(lambda: 2 * memory, (memory,))


def run(cache, x, **options):
    """Twice the input, and whether it came from a graph."""
    graph = cache.graph(x.shape, partial(doubling, x), **options)
    return (2 * x, False) if graph is None else (graph(x), True)


def cache_with(capture=recorded, **options):
    return GraphCache("runs", lambda: capture, **{"warm_up": 2, **options})


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm_up", [0, 1, 3])
def test_a_graph_is_captured_after_the_warm_up_of_its_key(warm_up):
    counts = Captures()
    cache = cache_with(counts, warm_up=warm_up)
    replayed = []
    for number in range(6):
        outputs, from_graph = run(cache, torch.full((3,), float(number)))
        assert outputs.tolist() == [2.0 * number] * 3, "every replay reads its own inputs"
        replayed.append(from_graph)
        run(cache, torch.zeros(number + 10))  # other keys do not count
    assert replayed == [False] * warm_up + [True] * (6 - warm_up)
    assert counts.replays >= 6 - warm_up


def test_only_the_first_keys_get_a_graph():
    cache = cache_with(warm_up=0, most=2)
    assert [run(cache, torch.ones(size))[1] for size in (1, 2, 3, 1, 2)] == [True, True, False, True, True]


def test_runs_are_captured_only_when_it_pays():
    cache = cache_with(warm_up=1)
    x = torch.ones(2)
    pays = [False, False, False, True, False]
    assert [run(cache, x, worthwhile=worthwhile)[1] for worthwhile in pays] == [False, False, False, True, True]


def test_forgotten_graphs_are_captured_again_in_a_new_pool():
    pools = []

    def new_capture():
        pools.append(Captures())
        return pools[-1]

    cache = GraphCache("runs", new_capture, warm_up=1)
    x = torch.ones(2)
    assert [run(cache, x)[1] for _ in range(3)] == [False, True, True]
    cache.forget()
    assert [run(cache, x)[1] for _ in range(3)] == [False, True, True], "after another warm-up"
    assert [pool.captures for pool in pools] == [1, 1]


def test_without_a_way_to_capture_nothing_is_captured():
    assert capture_on(torch.device("cpu")) is None
    cache = cache_with(None, warm_up=0)
    assert not cache.enabled
    assert not any(run(cache, torch.ones(2))[1] for _ in range(3))


# --- failures ---------------------------------------------------------------------------------------------------------


def messages(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def test_a_first_failure_ends_all_captures_and_is_logged_in_one_line(caplog):
    def refuses(function, generators):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    counts = Captures(refuses)
    cache = cache_with(counts, warm_up=0)
    for size in (1, 2, 3, 1):
        assert run(cache, torch.ones(size)) == (pytest.approx(2 * torch.ones(size)), False)
    cache.forget()
    run(cache, torch.ones(1))
    assert counts.captures == 1
    assert not cache.enabled
    assert messages(caplog) == ["runs are not captured in a graph: operation not permitted when stream is capturing"]


def test_a_later_failure_leaves_the_other_graphs_and_is_not_tried_again(caplog):
    def second_and_third_fail(function, generators):
        if counts.captures in (2, 3):
            raise RuntimeError("out of memory")
        return recorded(function)

    counts = Captures(second_and_third_fail)
    cache = cache_with(counts, warm_up=0)
    sizes = (1, 2, 3, 2, 1, 4)
    assert [run(cache, torch.ones(size))[1] for size in sizes] == [True, False, False, False, True, True]
    assert counts.captures == 4
    assert cache.refused == {torch.Size([2]): "out of memory", torch.Size([3]): "out of memory"}
    assert messages(caplog) == ["runs are not captured in a graph: out of memory"]


def test_a_recording_may_say_why_it_cannot_be_captured(caplog):
    def record():
        raise RuntimeError("members draw")

    cache = cache_with(warm_up=0, level=logging.INFO)
    with caplog.at_level(logging.INFO, "dissensus"):
        assert cache.graph("key", record) is None
    assert messages(caplog) == [], "a notice, no warning"
    assert messages(caplog, logging.INFO) == ["runs are not captured in a graph: members draw"]


def test_other_errors_are_not_hidden():
    def record():
        raise ValueError("shapes differ")

    with pytest.raises(ValueError, match="shapes differ"):
        cache_with(warm_up=0).graph("key", record)


DRAWS = {
    "torch": lambda: torch.rand(()),
    "numpy": lambda: np.random.rand(),  # noqa: NPY002
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_drawn_on_the_host_are_refused_and_given_back(name, caplog):
    def record():
        memory = torch.ones(2)
        return Recording(lambda: memory * float(DRAWS[name]()), (memory,))

    cache = cache_with(partial(recorded, host_reads=True), warm_up=0)
    before = GlobalGenerators.now()
    assert cache.graph("key", record) is None
    assert not before.drawn_from()
    (message,) = messages(caplog)
    assert (
        message
        == "runs are not captured in a graph: random numbers are drawn on the host, and a graph would repeat them"
    )


# --- the recorder -----------------------------------------------------------------------------------------------------


def test_a_recording_notices_what_the_host_decides():
    state, host = torch.zeros(2), {"step": 1.0}
    replay = recorded(lambda: state.add_(host["step"]))
    assert torch.equal(state, torch.zeros(2)), "recorded, and not done"
    replay()
    host["step"] = 5.0
    replay()
    assert torch.equal(state, torch.full((2,), 2.0))


def test_a_tensor_that_is_replaced_is_not_read():
    tensors = {"x": torch.ones(2), "total": torch.zeros(2)}
    replay = recorded(lambda: tensors["total"].add_(tensors["x"]))
    total = tensors["total"]
    replay()
    tensors["x"] = torch.full((2,), 10.0)
    replay()
    assert torch.equal(total, torch.full((2,), 2.0)), "a function that stands for its graph would give 11"
    tensors["total"] = torch.zeros(2)
    replay()
    assert torch.equal(tensors["total"], torch.zeros(2))
    assert torch.equal(total, torch.full((2,), 3.0))


def test_a_tensor_that_is_written_in_place_is_read():
    x, total = torch.ones(2), torch.zeros(2)
    replay = recorded(lambda: total.add_(x))
    x.fill_(10.0)
    replay()
    assert torch.equal(total, torch.full((2,), 10.0))


def test_recording_has_no_effect_through_views_statistics_and_generators():
    matrix, norm = torch.zeros(2, 3), nn.BatchNorm1d(3)
    generator = torch.Generator().manual_seed(0)

    def function():
        row = matrix.detach().view(-1)[3:]
        row.add_(torch.rand(3, generator=generator))
        norm(matrix + torch.arange(6.0).view(2, 3))

    replay = recorded(function, [generator])
    assert not matrix.any()
    assert norm.num_batches_tracked == 0
    assert torch.equal(norm.running_var, torch.ones(3))
    replay()
    replay()
    expected = torch.Generator().manual_seed(0)
    expected_row = torch.rand(3, generator=expected) + torch.rand(3, generator=expected)
    torch.testing.assert_close(matrix[1], expected_row)
    assert not matrix[0].any()
    assert norm.num_batches_tracked == 2


def test_gradients_are_recorded():
    weight, x, y = torch.randn(4, 3, requires_grad=True), torch.randn(5, 4), torch.randn(5, 3)
    gradient = torch.zeros(4, 3)

    def function():
        gradient.copy_(torch.autograd.grad(F.mse_loss(x @ weight, y), weight)[0])

    replay = recorded(function)
    for _ in range(3):
        x.normal_()
        replay()
        torch.testing.assert_close(gradient, torch.autograd.grad(F.mse_loss(x @ weight, y), weight)[0])
        with torch.no_grad():
            weight.sub_(0.1 * gradient)


def test_numbers_cannot_be_read_back_while_recording():
    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="not permitted"):
        recorded(lambda: x.sum().item())
    with pytest.raises(RuntimeError, match="not permitted"):
        recorded(lambda: x[x > 0])


def test_outputs_are_the_memory_of_the_graph():
    graph = Graph(doubling(torch.ones(2)), recorded)
    first = graph(torch.ones(2))
    assert graph(torch.full((2,), 3.0)) is first
    assert first.tolist() == [6.0, 6.0]
