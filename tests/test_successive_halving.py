"""Successive halving inside one sweep: who goes on, that survivors are left alone, and what it saves."""

import math
from functools import partial

import pytest
import torch

import dissensus as ds
from dissensus.train.callbacks import Start, SuccessiveHalving

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :1].sin()
build = partial(ds.nets.mlp, 6, 1, (4,))
augmented = partial(ds.objectives.augmented, loss="squared_error", pool="score")
LRS = [1e-5, 1e-2, 1e-4, 3e-2]  # the first and the third learn next to nothing


def sweep(**options):
    settings = {"grid": {"lr": LRS, "beta": [0.5], "seed": [0, 1]}, "members": 2, "backend": "loop", "epochs": 4}
    settings |= {"batch_size": 10, "validation": 0.25, "keep": "last"}
    return ds.sweep(build, (X, Y), augmented, **{**settings, **options})


def entries(values, epoch=1, **more):
    """Entries of an epoch: one candidate per row of values, one seed per column."""
    points = [{"beta": float(row), "seed": seed} for row, seeds in enumerate(values) for seed in range(len(seeds))]
    numbers = [value for seeds in values for value in seeds]
    named = zip(points, numbers, strict=True)
    return [
        {"run": run, "point": point, "epoch": epoch, "validation": value, **more}
        for run, (point, value) in enumerate(named)
    ]


def weights(ensemble):
    return torch.cat([parameter.detach().flatten() for parameter in ensemble.parameters()])


def test_seeds_that_are_trained_apart_do_not_count_with_epochs_that_others_lack():
    halving = SuccessiveHalving([1], factor=2)
    first, second, other, last = entries([[0.5, 0.9], [0.7], [0.8]])
    before, now = [first, other], [second, last]
    for group in (before, now):
        halving.on_start(Start(False, [], [{"run": entry["run"]} for entry in group]))
        epochs = [1, 2, 3] if group is before else [1]
        for epoch in epochs:
            wanted = halving.on_runs(
                [{**entry, "epoch": epoch, "validation": entry["validation"] / epoch**4} for entry in group]
            )
    assert wanted == [0]  # 0.9 against 0.8, although the other seed of the first has reached 0.006 in three epochs


def test_the_best_candidates_go_on():
    swept = sweep(callbacks=[SuccessiveHalving([1, 2], factor=2)])
    lengths = {}
    for run, point in enumerate(swept.points):
        lengths.setdefault(point["lr"], []).append(len(swept.history(run).epochs))
    assert lengths[1e-5] == lengths[1e-4] == [1, 1]
    assert sorted([lengths[1e-2], lengths[3e-2]]) == [[2, 2], [4, 4]]
    plain = sweep()
    means = dict.fromkeys((0.01, 0.03), 0.0)
    for run, point in enumerate(plain.points):
        if point["lr"] in means:
            means[point["lr"]] += min(entry["validation"] for entry in plain.history(run).epochs[:2]) / 2
    assert lengths[min(means, key=means.get)] == [4, 4]


def test_survivors_equal_runs_of_a_plain_sweep():
    halved, plain = sweep(callbacks=[SuccessiveHalving([1, 2], factor=2)]), sweep()
    whole = [run for run in range(len(plain.points)) if len(halved.history(run).epochs) == 4]
    assert len(whole) == 2
    for run in whole:
        torch.testing.assert_close(weights(halved.run(run)), weights(plain.run(run)))
        assert halved.history(run).stopped_by is None
    for run in set(range(len(plain.points))) - set(whole):
        assert halved.history(run).stopped_by == "SuccessiveHalving"
        one = plain.history(run).epochs[0]["validation"]
        assert halved.history(run).epochs[0]["validation"] == pytest.approx(one, rel=1e-5)


def test_runs_that_ended_are_not_trained():
    class Count:
        def __init__(self):
            self.runs = []

        def on_runs(self, entries):
            self.runs.append(len(entries))

    count = Count()
    sweep(callbacks=[SuccessiveHalving([1, 2], factor=2), count])
    assert count.runs == [8, 4, 2, 2]


def test_a_resumed_sweep_goes_on_with_the_same_candidates(tmp_path):
    class Break:
        def on_runs(self, entries):
            if entries[0]["epoch"] == 2:
                raise KeyboardInterrupt

    whole = sweep(callbacks=[SuccessiveHalving([1, 3], factor=2)])
    options = {"checkpoint": tmp_path / "sweep", "checkpoint_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        sweep(callbacks=[SuccessiveHalving([1, 3], factor=2), Break()], **options)
    resumed = sweep(callbacks=[SuccessiveHalving([1, 3], factor=2)], resume=True, **options)
    for run in range(len(whole.points)):
        assert len(resumed.history(run).epochs) == len(whole.history(run).epochs)
        torch.testing.assert_close(weights(resumed.run(run)), weights(whole.run(run)))


def test_candidates_are_compared_by_means_over_their_seeds():
    halving = SuccessiveHalving([1], factor=2)
    assert halving.on_runs(entries([[0.1, 0.9], [0.4, 0.4], [0.6, 0.3], [0.3, 0.8]])) == [0, 1, 6, 7]


def test_the_best_epoch_of_a_run_counts():
    halving = SuccessiveHalving([2], factor=2)
    assert halving.on_runs(entries([[0.1], [0.5]])) is None
    assert halving.on_runs(entries([[0.9], [0.4]], epoch=2)) == [1]


def test_higher_may_be_better():
    halving = SuccessiveHalving([1], factor=2, metric="accuracy", mode="max")
    first, second = entries([[0.0], [0.0]])
    assert halving.on_runs([{**first, "accuracy": 0.9}, {**second, "accuracy": 0.8}]) == [1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_go_first(bad):
    assert SuccessiveHalving([1], factor=1.5).on_runs(entries([[bad, 0.1], [5.0, 5.0], [4.0, 4.0]])) == [0, 1]


def test_equal_candidates_leave_in_reverse_order_of_the_grid():
    assert SuccessiveHalving([1], factor=3).on_runs(entries([[1.0]] * 4)) == [2, 3]


def test_one_candidate_stays():
    assert SuccessiveHalving([1], factor=100).on_runs(entries([[1.0, 2.0]])) == []
    ensemble = ds.Ensemble(build, 2, backend="loop")
    options = {"epochs": 2, "batch_size": 10, "validation": 0.25, "callbacks": [SuccessiveHalving([1])]}
    assert len(ds.fit(ensemble, (X, Y), partial(augmented, beta=0.5), **options).epochs) == 2


def test_a_second_sweep_starts_afresh():
    halving = SuccessiveHalving([1], factor=2)
    halving.on_runs(entries([[0.1], [0.5]]))
    halving.on_start(Start(False, [], [{"run": 0}, {"run": 1}]))
    assert halving.on_runs(entries([[0.9], [0.5]])) == [0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rungs": []}, "rungs.*rising order"),
        ({"rungs": [2, 1]}, "rungs.*rising order"),
        ({"rungs": [0]}, "rungs"),
        ({"rungs": [1], "factor": 1}, "factor.*above 1"),
        ({"rungs": [1], "factor": math.nan}, "factor.*above 1"),
        ({"rungs": [1], "mode": "best"}, "mode"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        SuccessiveHalving(**arguments)


def test_a_metric_that_is_not_measured_is_refused_with_the_fix():
    with pytest.raises(ValueError, match=r"`metric`.*'validation'.*validation=0\.2"):
        sweep(validation=None, keep="best", callbacks=[SuccessiveHalving([1])])


@pytest.mark.parametrize(
    ("answer", "error"),
    [(True, TypeError), ("0", TypeError), ([True], TypeError), ([8], ValueError), ([-1], ValueError)],
)
def test_answers_that_name_no_run_are_refused(answer, error):
    class Wrong:
        def on_runs(self, entries):
            return answer

    with pytest.raises(error, match="places in its list of 8 entries"):
        sweep(callbacks=[Wrong()])
