"""How ``backend="auto"`` decides: on scripted times, so that nothing here depends on the machine."""

import copy
import functools
import itertools
import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.execution import choice
from dissensus.execution.choice import interleaved, seconds_allowed, settled, typical
from dissensus.execution.weights import Hanging, Packed

pytestmark = pytest.mark.measures_backends

UNDECIDED = [0.011, 0.009, 0.010] * 50
"""Times whose middle is above their least: two backends that both take these are not told apart."""


def clock(**times):
    """A stand-in for timing: each candidate's times in order, the last one for ever; and the calls made of it."""
    scripts = {name: itertools.chain(seconds, itertools.repeat(seconds[-1])) for name, seconds in times.items()}
    calls = []

    def timed(name, turn):
        calls.append((name, turn))
        return next(scripts[name])

    return timed, calls


def winner(timed, names, passes=None):
    return min(times := interleaved(timed, names, passes), key=lambda name: typical(times[name]))


def test_warming_up_counts_for_nothing():
    timed, _ = clock(loop=[0.01, 0.010], vmap=[5.0, 0.008])
    assert winner(timed, ["loop", "vmap"], 10**6) == "vmap"


def test_clear_differences_are_settled_in_a_few_rounds():
    timed, calls = clock(loop=[0.010], vmap=[0.012])
    assert winner(timed, ["loop", "vmap"]) == "loop"
    assert len(calls) == 2 * (1 + choice.ENOUGH_ROUNDS)


def test_disturbed_passes_do_not_decide():
    """Noise only adds: a backend that is disturbed in half of its passes is still the faster one."""
    slow_now_and_then = [0.1, *[0.03, 0.010] * 40]
    timed, calls = clock(loop=[0.012], vmap=slow_now_and_then)
    times = interleaved(timed, ["loop", "vmap"], None)
    assert typical(times["vmap"]) < typical(times["loop"])
    assert sum(times["vmap"]) > sum(times["loop"]), "the mean would decide otherwise"
    assert len(calls) > 2 * (1 + choice.ENOUGH_ROUNDS), "not settled at once"


def test_measuring_goes_on_while_intervals_overlap_and_ends_at_a_number_of_rounds():
    timed, calls = clock(loop=UNDECIDED, vmap=UNDECIDED)
    interleaved(timed, ["loop", "vmap"], None)
    assert len(calls) == 2 * (1 + choice.MOST_ROUNDS)


def test_hopeless_backends_are_not_timed_again():
    timed, calls = clock(loop=UNDECIDED, vmap=UNDECIDED, batched=[0.1])
    times = interleaved(timed, ["loop", "batched", "vmap"], 10**6)
    assert len(times["batched"]) == 1
    assert len(times["loop"]) == len(times["vmap"]) > 3
    assert [name for name, _ in calls].count("batched") == 2


def test_candidates_take_turns_in_rotating_order():
    timed, calls = clock(loop=UNDECIDED, vmap=UNDECIDED)
    interleaved(timed, ["loop", "vmap"], None)
    assert [name for name, turn in calls if turn == 0] == ["loop", "vmap"]
    assert [name for name, turn in calls if turn == 1] == ["vmap", "loop"]
    assert [turn for _, turn in calls] == sorted(turn for _, turn in calls)


@pytest.mark.parametrize("passes", [1, 100, 10_000, 10**7, None])
def test_measuring_takes_no_more_than_its_share(passes):
    timed, calls = clock(loop=[30 * t for t in UNDECIDED], vmap=[30 * t for t in UNDECIDED])
    times = interleaved(timed, ["loop", "vmap"], passes)
    rounds = len(calls) // 2 - 1
    allowed = seconds_allowed(times, passes)
    assert allowed <= choice.MOST_SECONDS
    assert rounds >= choice.FEWEST_ROUNDS
    if rounds > choice.FEWEST_ROUNDS:
        assert 0.54 * rounds <= allowed, "it had not taken its time after the round before"
    if passes == 10**7:
        assert 0.67 * (rounds + 1) > choice.MOST_SECONDS
    if passes == 1:
        assert rounds == choice.FEWEST_ROUNDS


def test_a_short_job_does_not_wait_for_rounds_of_long_passes():
    timed, calls = clock(loop=[2.0], vmap=[3.0])
    assert winner(timed, ["loop", "vmap"], 10) == "loop"
    assert len(calls) == 2, "of ten passes of two seconds, measuring took two"
    timed, calls = clock(loop=[2.0], vmap=[1.9])
    assert winner(timed, ["loop", "vmap"], 10**6) == "vmap"
    assert len(calls) == 2 * 3, "a long training has the time to tell them apart"


def test_a_first_pass_that_is_long_once_does_not_count():
    timed, _ = clock(loop=[1.0, 0.010], vmap=[1.2, 0.009])
    times = interleaved(timed, ["loop", "vmap"], 10**6)
    assert max(map(max, times.values())) == 0.010


def test_a_candidate_that_fails_in_the_first_turn_drops_out():
    timed, _ = clock(loop=[0.01])
    times = interleaved(lambda name, turn: None if name == "vmap" else timed(name, turn), ["vmap", "loop"], None)
    assert times.keys() == {"loop"}
    assert times["loop"], "the one that is left is timed, to be told"


def test_a_possible_loss_below_two_percent_is_settled():
    assert settled({"loop": [1.0, 1.0, 1.0], "vmap": [0.99, 1.0, 1.0]})
    assert not settled({"loop": [1.0, 1.0, 1.0], "vmap": [0.97, 1.2, 1.2]})
    assert settled({"loop": [1.0]})


def test_the_gradient_of_a_trial_is_as_large_as_the_outputs(monkeypatch):
    """A sum's gradient is one number that is expanded, and for it backends rank otherwise than for a loss's."""
    seen = []
    original = choice.TrialPass.outputs

    def watched(self, run):
        output, buffers = original(self, run)
        if output.requires_grad:
            output.register_hook(lambda gradient: seen.append((gradient.shape, gradient.is_contiguous())))
        return output, buffers

    monkeypatch.setattr(choice.TrialPass, "outputs", watched)
    ensemble = ds.Ensemble(lambda: ds.nets.mlp(5, 4, (6,)), 3)
    ensemble(torch.randn(7, 5))
    assert {shape for shape, _ in seen} == {(3, 7, 4)}
    assert all(contiguous for _, contiguous in seen)


def test_training_says_how_many_passes_follow_and_the_choice_how_long_it_took(monkeypatch, caplog):
    told = []
    original = choice.interleaved

    def recorded(timed, candidates, passes):
        told.append(passes)
        return original(timed, candidates, passes)

    monkeypatch.setattr(choice, "interleaved", recorded)
    ensemble = ds.Ensemble(lambda: ds.nets.mlp(5, 4, (6,)), 3)
    data, objective = (
        (torch.randn(24, 5), torch.randint(4, (24,))),
        functools.partial(ds.objectives.independent, loss="cross_entropy"),
    )
    with caplog.at_level(logging.INFO, "dissensus"):
        ds.fit(ensemble, data, objective, epochs=3, batch_size=8)
    assert told[-1] == 3 * 3
    assert ensemble.body.passes is None, "nothing is known of passes after the training"
    trained = ensemble.choices[-1]
    assert trained.seconds > 0
    assert "measured in" in str(trained)
    assert any("measured in" in record.getMessage() for record in caplog.records)


def test_times_of_measuring_do_not_enter_files(tmp_path):
    choices = choice.Choices()
    choices.keep_in(tmp_path / "choices.json", "network")
    mode = ("auto", True)
    choices.add(mode, choice.Choice("vmap", {"loop": 2.0, "vmap": 1.0}, {}, 0.7))
    again = choice.Choices()
    again.keep_in(tmp_path / "choices.json", "network")
    assert again[mode] == choice.Choice("vmap", {"loop": 2.0, "vmap": 1.0}, {})


def trial_of(ensemble, x):
    body = ensemble.body
    weights = Packed(body.layout(), body.packed().requires_grad_(), None)
    return choice.TrialPass(body.skeleton, weights, body.state(), x, False)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


@pytest.mark.parametrize("factor", [1.0, -1.0, float("nan")])
def test_backends_with_other_gradients_than_the_loop_are_refused(factor, monkeypatch):
    def run(*arguments):
        return WrongGradient.apply(choice.BACKENDS["batched"].run(*arguments), factor)

    monkeypatch.setitem(choice.BACKENDS, "vmap", replace(choice.BACKENDS["vmap"], run=run))
    ensemble = ds.Ensemble(functools.partial(ds.nets.mlp, 4, 3, (8,)), 3, seed=0)
    trial, refused = trial_of(ensemble, torch.randn(5, 4)), {}
    right = choice._with_right_gradients(trial, ["loop", "batched", "vmap"], refused)
    if factor == 1:
        assert (right, refused) == (["loop", "batched", "vmap"], {})
    else:
        assert (right, refused) == (["loop", "batched"], {"vmap": "its gradients differ from the loop's"})
    with torch.no_grad():
        assert choice._with_right_gradients(trial, ["loop", "vmap"], {}) == ["loop", "vmap"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gradients_are_compared_on_a_gpu(monkeypatch):
    def run(*arguments):
        return WrongGradient.apply(choice.BACKENDS["batched"].run(*arguments), -1.0)

    monkeypatch.setitem(choice.BACKENDS, "vmap", replace(choice.BACKENDS["vmap"], run=run))
    ensemble = ds.Ensemble(functools.partial(ds.nets.mlp, 4, 3, (8,)), 3, seed=0).cuda()
    ensemble(torch.randn(5, 4, device="cuda"))
    assert ensemble.choices[0].refused["vmap"] == "its gradients differ from the loop's"


def test_gradients_that_are_rounding_alone_refuse_no_backend():
    """The bias of a convolution before batch norm has no gradient, and torch computes noise in its place."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 16, 3),
        nn.BatchNorm2d(16),
        nn.Tanh(),
        nn.Conv2d(16, 16, 3),
        nn.BatchNorm2d(16),
        nn.Flatten(),
    ]
    body = ds.Ensemble(lambda: nn.Sequential(*copy.deepcopy(layers), nn.Linear(256, 3)), 3, seed=0).body.train()
    weights = Hanging(body.trainable(), 3)  # one tensor for each parameter, as in a training loop of the user's
    trial = choice.TrialPass(body.skeleton, weights, body.state(), torch.randn(6, 1, 8, 8), False)
    refused = {}
    assert choice._with_right_gradients(trial, ["loop", "vmap"], refused) == ["loop", "vmap"], refused


def test_a_small_gradient_of_nan_is_noticed_beside_large_ones():
    large, small = torch.full((4,), 1e3), torch.full((4,), 1e-3)
    assert choice.alike([large, small], [large, small], 0.05)
    assert not choice.alike([large, small * float("nan")], [large, small], 0.05)
    assert not choice.alike([large * 1.5, small], [large, small], 0.05)
    assert choice.alike([large, small], [large, small * float("inf")], 0.05), "a reference that is not finite"
    assert not choice.alike([large * 1.5, small], [large, small * float("nan")], 0.05)
    assert choice.alike([], [], 0.05)
    assert not choice.alike([large], [], 0.05)
