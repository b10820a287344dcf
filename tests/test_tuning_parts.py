"""Parts of a search: brackets, spaces, splits, ties, intervals, metrics, proposals, sentences."""

import math
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, nll_loss

import dissensus as ds
from dissensus.train import Candidate, Range
from dissensus.train.notification import Rung
from dissensus.train.settings import TargetSettings
from dissensus.train.trained_loss import trained_loss
from dissensus.train.tuning.brackets import bracket_of, halving, hyperband, most_halvings
from dissensus.train.tuning.choosing import Gain, gain_of, is_tie, resampled_interval
from dissensus.train.tuning.contest import OVERALL, Contest, RunKey
from dissensus.train.tuning.proposing import Seen, Store, comparable, proposed_parameters, random_parameters
from dissensus.train.tuning.scoring import Scorer, scorer_of
from dissensus.train.tuning.sentence import gain_words, sentence_of
from dissensus.train.tuning.space import Axis, all_parameters, point_of, size_of, space_of
from dissensus.train.tuning.splitting import repeated_splits


class Uniform:
    """A distribution of somebody else."""

    def ppf(self, q):
        return np.float64(10 * q)


@pytest.mark.parametrize(("epochs", "factor"), [(81, 3), (27, 3), (100, 3), (64, 4), (16, 2), (1, 3), (2, 3)])
def test_hyperband_has_the_brackets_of_the_paper(epochs, factor):
    """Li et al. (2018), Algorithm 1, with R = epochs and η = factor, in their own words."""
    s_max = 0
    while factor ** (s_max + 1) <= epochs:
        s_max += 1
    budget = (s_max + 1) * epochs
    brackets = hyperband(epochs, factor)
    assert len(brackets) == s_max + 1
    for bracket, s in zip(brackets, range(s_max, -1, -1), strict=True):
        n = math.ceil(budget / epochs * factor**s / (s + 1))
        r = epochs / factor**s
        for i in range(s + 1):
            assert bracket.sizes[i] == max(1, n // factor**i)
            assert bracket.rungs[i] == (epochs if i == s else round(r * factor**i))


def test_a_bracket_costs_the_epochs_between_its_rungs():
    assert bracket_of(9, 9, 3, 2).cost == 9 * 1 + 3 * 2 + 1 * 6
    assert halving(1, 5).cost == 5


def test_halvings_are_limited_by_epochs_and_by_candidates():
    assert halving(100, 4).rungs == (1, 4)
    assert halving(100, 81, 3, first=9).rungs == (9, 27, 81)
    assert halving(3, 81).rungs == (27, 81)
    assert halving(1, 81).sizes == (1,)
    assert most_halvings(9, 3, 9) == 0


def test_rungs_rise_and_end_with_whole_trainings():
    for epochs in (1, 2, 3, 5, 10, 31):
        for factor in (1.5, 2, 3, 4.7):
            for candidates in (1, 2, 7, 50):
                bracket = halving(candidates, epochs, factor)
                assert bracket.rungs[-1] == epochs
                assert list(bracket.rungs) == sorted(set(bracket.rungs))
                assert list(bracket.sizes) == sorted(bracket.sizes, reverse=True)
                assert bracket.sizes[0] == candidates
                assert bracket.sizes[-1] >= 1


def test_spaces_take_lists_ranges_arrays_and_distributions():
    space = space_of(
        {"a": [0, 0.5], "b": range(2, 5), "c": np.array([1.0, 2.0]), "d": Range(1, 9), "e": Uniform()}, "abcde", []
    )
    assert [axis.choices for axis in space[:3]] == [(0, 0.5), (2, 3, 4), (1.0, 2.0)]
    assert point_of(space, {"a": 1, "b": 0, "c": 1, "d": 0.5, "e": 0.3}) == {"a": 0.5, "b": 2, "c": 2.0, "d": 5, "e": 3}
    assert size_of(space) is None
    assert size_of(space[:3]) == len(all_parameters(space[:3])) == 12


def test_distributions_of_scipy_have_whole_numbers_where_they_count_and_no_infinite_ends():
    stats = pytest.importorskip("scipy.stats")
    space = space_of(
        {"members": stats.randint(2, 4), "lr": stats.lognorm(1), "beta": stats.uniform}, ["members", "lr", "beta"], []
    )
    values = [point_of(space, {"members": u, "lr": u, "beta": u}) for u in (0.0, 0.5, 1.0)]
    assert [value["members"] for value in values] == [2, 2, 3]
    assert all(type(value["members"]) is int for value in values)
    assert all(0 < value["lr"] < math.inf for value in values)
    assert values[1]["beta"] == 0.5
    assert space[0].extremes() == [2, 3]


def test_optuna_distributions_are_spaces():
    optuna = pytest.importorskip("optuna")
    d = optuna.distributions
    space = space_of(
        {
            "lr": d.FloatDistribution(1e-4, 1e-2, log=True),
            "members": d.IntDistribution(2, 6),
            "pool": d.CategoricalDistribution(["score", "probability"]),
        },
        ["lr", "members", "pool"],
        [],
    )
    assert space[0].distribution == Range(1e-4, 1e-2, log=True)
    assert space[1].distribution == Range(2, 6, integer=True)
    assert space[2].choices == ("score", "probability")
    with pytest.raises(ValueError, match="without steps"):
        space_of({"lr": d.FloatDistribution(0, 1, step=0.5)}, ["lr"], [])


def test_whole_numbers_of_a_range_are_equally_likely():
    values = [Range(2, 5, integer=True).at((i + 0.5) / 400) for i in range(400)]
    assert {value: values.count(value) for value in set(values)} == {2: 100, 3: 100, 4: 100, 5: 100}
    assert Range(2, 5, integer=True).at(0.0) == 2
    assert Range(2, 5, integer=True).at(1.0) == 5
    assert Range(1, 100, log=True).at(0.5) == pytest.approx(10)
    assert {Range(1, 64, log=True, integer=True).at(i / 99) for i in range(100)} >= {1, 2, 4, 64}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "map names of settings"),
        ([("beta", [0])], "map names of settings"),
        ({"beta": []}, "one value or more"),
        ({"beta": 0.5}, r"Use \[0.5\]"),
        ({"beta": "0.5"}, "map 'beta' to a list"),
        ({"beta": [0.1, 0.1]}, "values that differ"),
        ({"beta": [0, math.nan]}, "finite numbers"),
        ({"bta": [0]}, "beta"),
        ({"seed": [0, 1]}, "leave seeds and splits"),
        ({"fold": [0, 1]}, "leave seeds and splits"),
    ],
)
def test_a_space_that_cannot_be_is_refused(space, message):
    with pytest.raises((ValueError, TypeError), match=message):
        space_of(space, ["beta", "lr"], ["seed", "fold"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 1), "low < high"),
        ((2, 1), "low < high"),
        ((0, 1, True), "above zero"),
        ((math.nan, 1), "low"),
        ((0, math.inf), "high"),
        ((0.5, 2, False, True), "whole numbers"),
    ],
)
def test_a_range_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Range(*arguments)


def test_splits_share_no_row_between_their_parts_and_differ():
    y = torch.randn(50, 1)
    splits = repeated_splits(y, ds.data.Split(0.25), 0.2, 3, 0)
    for rows in splits:
        assert (len(rows.test), len(rows.validation), len(rows.train)) == (10, 10, 30)
        assert sorted(torch.cat(rows).tolist()) == list(range(50))
    assert len({tuple(rows.test.tolist()) for rows in splits}) == 3
    again = repeated_splits(y, ds.data.Split(0.25), 0.2, 3, 0)
    assert all(torch.equal(a.test, b.test) for a, b in zip(splits, again, strict=True))
    other = repeated_splits(y, ds.data.Split(0.25), 0.2, 3, 1)
    assert not torch.equal(other[0].test, splits[0].test)


def test_no_group_is_in_two_parts_and_all_splits_have_as_many_rows():
    groups = torch.arange(60).div(5, rounding_mode="floor")
    groups[:3] = 50  # groups of several sizes
    splits = repeated_splits(torch.randn(60, 1), ds.data.Split(0.25, groups=groups), 0.25, 4, 0)
    assert len({tuple(map(len, rows)) for rows in splits}) == 1
    for rows in splits:
        parts = [set(groups[part].tolist()) for part in rows]
        assert not parts[0] & parts[1]
        assert not parts[0] & parts[2]
        assert not parts[1] & parts[2]


def test_classes_keep_their_shares_in_every_part():
    labels = torch.tensor([0] * 40 + [1] * 20)
    for rows in repeated_splits(labels, ds.data.Split(0.25), 0.2, 2, 0):
        assert labels[rows.test].tolist().count(1) == 4
        assert labels[rows.validation].tolist().count(1) == 4


def test_several_splits_by_time_are_refused():
    split = ds.data.Split(0.2, time=torch.arange(20))
    with pytest.raises(ValueError, match="Use splits=1"):
        repeated_splits(torch.randn(20, 1), split, 0.2, 2, 0)
    (rows,) = repeated_splits(torch.randn(20, 1), split, 0.2, 1, 0)
    assert rows.test.tolist() == [16, 17, 18, 19]
    assert rows.validation.tolist() == [13, 14, 15]


def test_the_interval_is_nadeau_and_bengio_s():
    """By hand: mean ± t₀.₉₇₅,₃ √((1/4 + 20/80) s²), where Student's t with 3 degrees of freedom has 3.182446."""
    differences = [0.3, 0.1, -0.2, 0.6]
    mean = 0.2
    s2 = (0.1**2 + 0.1**2 + 0.4**2 + 0.4**2) / 3
    half = 3.182446 * math.sqrt((1 / 4 + 20 / 80) * s2)
    value, low, high = resampled_interval(differences, train=80, test=20)
    assert value == pytest.approx(mean)
    assert low == pytest.approx(mean - half, rel=1e-5)
    assert high == pytest.approx(mean + half, rel=1e-5)


def test_the_corrected_interval_is_wider_than_that_of_independent_splits():
    wide, narrow = (resampled_interval([1.0, 2.0, 4.0], train=80, test=test) for test in (20, 0))
    assert wide.high - wide.low > 1.2 * (narrow.high - narrow.low)


def test_one_split_has_no_interval():
    value, low, high = resampled_interval([0.5], 80, 20)
    assert value == 0.5
    assert math.isnan(low)
    assert math.isnan(high)


def test_a_tie_is_an_advantage_of_at_most_one_standard_error():
    # mean 0.2 and standard error 0.2 of two, and just above and below
    assert is_tie([0.0, 0.4])
    assert not is_tie([0.01, 0.4])
    assert is_tie([-0.01, 0.4])
    assert is_tie([math.nan, 0.1])
    assert is_tie([0.0])
    assert not is_tie([1e-9])


def test_gains_are_per_cent_of_a_loss_points_of_a_share_or_plain_numbers():
    sizes = {"train": 80, "test": 20}
    loss = gain_of([0.9, 1.8], [1.0, 2.0], sign=1.0, share=False, **sizes)
    assert loss.unit == "%"
    assert loss.value == pytest.approx(100 * 0.15 / 1.5)
    share = gain_of([0.9, 0.8], [0.8, 0.8], sign=-1.0, share=True, **sizes)
    assert share.unit == "points"
    assert share.value == pytest.approx(5)
    density = gain_of([-1.2, 0.3], [-1.0, 0.5], sign=1.0, share=False, **sizes)
    assert density.unit == ""
    assert density.value == pytest.approx(0.2)


def known(loss: Any, pool: Any = "score"):
    return trained_loss(partial(ds.objectives.augmented, loss=loss, pool=pool))


def test_named_metrics_are_those_of_the_pooled_prediction():
    outputs = torch.tensor([[[1.0], [2.0]], [[3.0], [2.0]]])
    targets = torch.tensor([[1.0], [4.0]])
    values = {name: scorer_of(name, None, known("squared_error")).of(outputs, targets) for name in ("rmse", "mae")}
    assert values["rmse"].ensemble == pytest.approx(math.sqrt((1 + 4) / 2))
    assert values["mae"].ensemble == pytest.approx(1.5)
    assert values["mae"].members == pytest.approx(((0 + 2) / 2 + (2 + 2) / 2) / 2)
    logits = torch.tensor([[[2.0, 0.0], [2.0, 0.0]], [[0.0, 1.0], [0.0, 4.0]]])
    accuracy = scorer_of("accuracy", None, known("cross_entropy", "probability"))
    assert (accuracy.mode, accuracy.share) == ("max", True)
    assert accuracy.of(logits, torch.tensor([0, 1])) == (1.0, 0.5)
    assert (
        scorer_of("error", None, known("cross_entropy", "probability")).of(logits, torch.tensor([0, 1])).ensemble == 0
    )


def test_named_metrics_of_members_that_have_diverged_are_nan():
    accuracy = scorer_of("accuracy", None, known("cross_entropy", "probability"))
    logits = torch.tensor([[[2.0, 0.0], [2.0, 0.0]], [[0.0, math.nan], [0.0, 4.0]]])
    whole, members = accuracy.of(logits, torch.tensor([0, 1]))
    assert math.isnan(whole)
    assert math.isnan(members)
    assert accuracy.of(torch.tensor([[[2.0, -math.inf]]]), torch.tensor([0])) == (1.0, 1.0)
    gaussian = scorer_of("rmse", None, known("gaussian_nll", "probability"))
    assert gaussian.of(torch.tensor([[[3.0, 1e4]]]), torch.tensor([[1.0]])).ensemble == 2.0


def test_the_loss_is_that_of_the_objective():
    outputs, targets = torch.randn(3, 7, 2), torch.randn(7, 2)
    scores = scorer_of("loss", None, known("squared_error")).of(outputs, targets)
    assert scores.ensemble == pytest.approx(float((outputs.mean(0) - targets).square().sum(1).mean()), rel=1e-5)
    assert scores.members == pytest.approx(float((outputs - targets).square().sum(2).mean()), rel=1e-5)


def test_scores_count_targets_as_training_does():
    """A square of classes, so that the wrong axis is no error."""
    outputs, targets = torch.randn(3, 8, 5, 5, dtype=torch.float64), torch.randint(0, 5, (8, 5))
    targets[::2, 0] = -100
    weights = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0], dtype=torch.float64)
    settings = TargetSettings(weights, label_smoothing=0.3, ignore_index=-100, class_axis=-1)
    of = known("cross_entropy", "probability")
    mean = outputs.softmax(-1).mean(0)
    expected = nll_loss(mean.log().transpose(1, 2), targets, weights, ignore_index=-100)
    each = [cross_entropy(o.transpose(1, 2), targets, weights, ignore_index=-100) for o in outputs]
    scorer = scorer_of("loss", None, of, settings)
    scores = scorer.of(outputs, targets, scorer.class_weights(targets))
    assert scores.ensemble == pytest.approx(float(expected))
    assert scores.members == pytest.approx(float(torch.stack(each).mean()))
    right = (mean.argmax(-1) == targets)[targets >= 0].double().mean()
    assert scorer_of("accuracy", None, of, settings).of(outputs, targets).ensemble == pytest.approx(float(right))
    balanced = scorer_of("loss", None, of, TargetSettings("balanced", ignore_index=-100))
    labels = torch.tensor([0, 0, 0, 2, -100])
    assert balanced.class_weights(labels).tolist() == pytest.approx([4 / 6, 1.0, 2.0])
    pixels = torch.randn(3, 4, 1, 4, 4)
    values = torch.randn(4, 4, 4)
    rmse = scorer_of("rmse", None, known("squared_error")).of(pixels, values).ensemble
    assert rmse == pytest.approx(float((pixels.mean(0).squeeze(1) - values).square().mean().sqrt()))


def test_metrics_that_cannot_be_are_refused():
    loss = known("squared_error")
    refused: list[tuple[Any, Any, Any, str]] = [
        ("accurcy", None, loss, "accuracy"),
        ("accuracy", None, loss, "go with outputs that are logits"),
        ("loss", "max", loss, "be 'min' for the loss"),
        ("rmse", "max", loss, "be 'min' for 'rmse'"),
        (lambda outputs, targets: 0.0, None, loss, "be 'min' or 'max'"),
        ("loss", None, None, "be a function where the loss"),
    ]
    for metric, mode, of, message in refused:
        with pytest.raises(ValueError, match=message):
            scorer_of(metric, mode, of)
    own = scorer_of(lambda outputs, targets: outputs.mean(), "max", None)
    assert own.of(torch.ones(2, 3, 1), torch.zeros(3)) == (1.0, 1.0)


def test_random_parameters_are_those_of_the_seed():
    space = [Axis("a", (1, 2, 3)), Axis("lr", distribution=Range(0, 1))]
    drawn = random_parameters(space, 50, 3, 0)
    assert drawn == random_parameters(space, 50, 3, 0)
    assert drawn != random_parameters(space, 50, 4, 0)
    assert drawn != random_parameters(space, 50, 3, 1)
    assert {parameters["a"] for parameters in drawn} == {0, 1, 2}
    assert all(0 <= parameters["lr"] < 1 for parameters in drawn)


def test_values_after_few_and_after_many_epochs_are_not_mixed():
    seen = [Seen(i, {"lr": i / 9}, {1: 9.0 - i, **({9: float(i)} if i < 4 else {})}) for i in range(9)]
    assert comparable(seen, 2) == [({"lr": i / 9}, float(i)) for i in range(4)]
    assert comparable(seen, 3) == [({"lr": i / 9}, 9.0 - i) for i in range(9)]
    assert comparable([], 1) == []


def test_candidates_that_diverged_count_as_bad_ones():
    seen = [Seen(0, {"lr": 0.1}, {1: -2.0}), Seen(1, {"lr": 0.9}, {1: math.inf})]
    assert [value for _, value in comparable(seen, 1)] == [-2.0, 16.0]


def test_tpe_proposes_near_what_was_good():
    pytest.importorskip("optuna")
    space = [Axis("beta", distribution=Range(0, 1))]
    seen = [Seen(i, {"beta": i / 39}, {9: (i / 39 - 0.2) ** 2}) for i in range(40)]
    proposed = proposed_parameters(space, 20, seen, 0, 1)
    assert proposed == proposed_parameters(space, 20, seen, 0, 1)
    near = sum(abs(parameters["beta"] - 0.2) < 0.2 for parameters in proposed)
    assert near > 12


def stored(tmp_path, task="task", search="first", maximise=False):
    return Store(f"sqlite:///{tmp_path / 'tune.db'}", task, search, "loss", maximise)


def test_a_storage_keeps_candidates_once_and_informs_other_searches_of_the_task(tmp_path):
    pytest.importorskip("optuna")
    space = [Axis("beta", distribution=Range(0, 2))]
    seen = [Seen(i, {"beta": i / 39}, {9: (i / 39 - 0.2) ** 2}) for i in range(40)]
    seen.append(Seen(40, {"beta": 0.5}, {1: math.inf}))
    points = [point_of(space, one.parameters) for one in seen]
    for _ in range(2):
        stored(tmp_path).keep(space, seen, points)
    trials = stored(tmp_path).study().trials
    assert len(trials) == 41
    assert trials[3].user_attrs["settings"] == points[3] == trials[3].params  # a dashboard shows values, not places
    assert trials[40].value is None

    def near(store):
        return sum(abs(p["beta"] - 0.2) < 0.2 for p in proposed_parameters(space, 20, [], 0, 0, store))

    assert near(stored(tmp_path, search="second")) > 12
    assert near(stored(tmp_path, "other task")) < 12
    assert stored(tmp_path).others() == []  # those of this search are known without it


def test_a_storage_does_not_mix_values_after_few_and_after_many_epochs(tmp_path):
    pytest.importorskip("optuna")
    space = [Axis("beta", distribution=Range(0, 1))]
    # Bad candidates were dropped after an epoch with values that are lower than those of good ones of a hard split.
    early = [Seen(i, {"beta": 0.9 + i / 100}, {1: 0.1}) for i in range(9)]
    late = [Seen(9 + i, {"beta": 0.1 + i / 100}, {1: 0.05, 9: 0.3}) for i in range(9)]
    late += [Seen(20 + i, {"beta": 0.5 + i / 100}, {1: 0.06, 9: 0.6}) for i in range(9)]
    every = [*early, *late]
    stored(tmp_path).keep(space, every, [point_of(space, one.parameters) for one in every])
    others = stored(tmp_path, search="second").others()
    assert others == every
    assert len(comparable(others, 1)) == 18


def test_a_storage_shows_the_values_of_higher_is_better_and_all_kinds_of_axes(tmp_path):
    optuna = pytest.importorskip("optuna")
    space = [
        Axis("beta", (0.1, 0.5)),
        Axis("hidden", ((8, 8), (16,))),
        Axis("lr", distribution=Range(1e-4, 1e-2, log=True)),
        Axis("members", distribution=Range(2, 5, integer=True)),
        Axis("momentum", distribution=Uniform()),
    ]
    one = Seen(0, {"beta": 1, "hidden": 0, "lr": 0.5, "members": 0.9, "momentum": 0.25}, {3: -0.8})
    stored(tmp_path, maximise=True).keep(space, [one], [point_of(space, one.parameters)])
    study = stored(tmp_path, maximise=True).study()
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE
    assert study.best_value == 0.8
    shown = study.best_params
    assert shown.pop("lr") == pytest.approx(1e-3)
    assert shown == {"beta": 0.5, "hidden": "(8, 8)", "members": 5, "momentum": 0.25}
    assert stored(tmp_path, search="second", maximise=True).others() == [one]


def test_a_search_without_optuna_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"pip install 'dissensus\[hpo\]'"):
        proposed_parameters([Axis("beta", distribution=Range(0, 1))], 2, [], 0, 1)


def candidate(number=0, status: Any = "finalist", independent=False, **point):
    return Candidate(number, point, independent, 0, 9, 4, status, 0.5, 0.01, 0.5, 0.6, 0.1)


LOSS = Scorer("loss", "min", None, None)
SHARE = Scorer("accuracy", "max", None, None, True)


def test_the_sentence_is_that_of_the_choice():
    best, reference = candidate(1, "chosen", beta=0.7), candidate(0, "reference", True, beta=0)
    text = sentence_of(best, reference, [reference, best], Gain(1.38, 0.9, 1.9, "%"), 3.0, "healthy", LOSS)
    expected = "β = 0.7: 1.4 % lower loss than independent training (0.9 to 1.9), members 3 % worse, audit healthy"
    assert text == expected


def test_the_sentence_of_independent_training_names_what_was_set_aside():
    best, bad = candidate(0, "chosen", True, beta=0), candidate(1, "collusive", beta=1.0)
    text = sentence_of(best, best, [best, bad], Gain(0, 0, 0, "%"), 0.0, "redundant", LOSS)
    assert text == ("nothing beats independent training here (β = 1 is collusive and was set aside), audit redundant")
    flattered = candidate(2, "finalist", beta=0.5)
    text = sentence_of(best, best, [best, bad, flattered], Gain(-1, -2, 0, "%"), 0.0, None, LOSS, flattered)
    assert text == (
        "nothing beats independent training here (β = 0.5 looked better on validation rows, but not on test rows; "
        "β = 1 is collusive and was set aside)"
    )


def test_the_sentence_without_interaction_or_without_a_reference():
    only = candidate(0, "chosen", True, lr=0.01)
    assert (
        sentence_of(only, only, [only], None, math.nan, None, LOSS)
        == "lr = 0.01: loss 0.5 ± 0.01 in independent training"
    )
    alone = candidate(0, "chosen", beta=0.5)
    assert "independent training diverged" in sentence_of(alone, None, [alone], None, math.nan, None, LOSS)


def test_losses_of_a_choice_are_called_by_their_name():
    words = gain_words(Gain(-0.2, -0.9, 0.5, "%"), "loss", "min")
    assert words == "0.2 % higher loss than independent training (−0.5 to 0.9)"
    assert gain_words(Gain(1.5, 1.0, 2.0, "points"), "accuracy", "max").startswith("1.5 points higher accuracy")
    assert "no interval" in gain_words(Gain(1.5, math.nan, math.nan, "%"), "loss", "min")


def test_a_candidate_with_a_run_that_failed_makes_room_for_others():
    runs = [RunKey(candidate, 0, seed) for candidate in range(4) for seed in (0, 1)]
    contest = Contest(runs, frozenset({0}), bracket_of(3, 4, 3, 1))
    for run, key in enumerate(runs):
        contest.on_epoch({"run": run, "epoch": 1, "validation": [0.9, 0.1, 0.2, 0.3][key.candidate]})
    going = [{"run": run} for run in range(len(runs)) if run != 3]  # the second run of candidate 1 has failed
    dropped = contest.on_rung(Rung(1, going, lambda: [None] * len(going), [3]))
    assert contest.finalists(OVERALL) == [0, 2]
    assert {runs[going[place]["run"]].candidate for place in dropped} == {1, 3}
