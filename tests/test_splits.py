"""Splits of examples: properties of every kind, errors, and trainings with each."""

import logging
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dissensus as ds
from dissensus.data import Split
from dissensus.data.splits import split_rows

FRACTIONS = st.floats(0.02, 0.98)
SEEDS = st.integers(0, 2**32)


def checked_rows(split, targets, seed):
    """The rows of a split, which are disjoint and complete, with both parts, and the same at every call."""
    train, validation = split.rows(targets, seed=seed)
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(len(targets)))
    assert len(train)
    assert len(validation)
    again = split.rows(targets, seed=seed)
    assert torch.equal(train, again[0])
    assert torch.equal(validation, again[1])
    return train, validation


@given(st.integers(2, 60), FRACTIONS, SEEDS)
def test_a_random_split_is_that_of_a_fraction(examples, fraction, seed):
    rows = checked_rows(Split(fraction), torch.zeros(examples), seed)
    expected = split_rows(examples, fraction, seed)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(rows, expected, strict=True))
    labels = torch.arange(examples) % 3
    assert torch.equal(checked_rows(Split(fraction, stratify=False), labels, seed)[1], expected[1])


@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=80).filter(lambda groups: len(set(groups)) > 1), FRACTIONS, SEEDS
)
def test_no_group_is_in_both_parts(groups, fraction, seed):
    column = np.array(groups)
    train, validation = checked_rows(Split(fraction, groups=column), torch.zeros(len(groups)), seed)
    assert not set(column[train.numpy()]) & set(column[validation.numpy()])
    sizes = np.bincount(column)
    distance = abs(len(validation) - fraction * len(groups))
    if len(set(column[validation.numpy()])) > 1 and len(set(column[train.numpy()])) > 1:
        assert distance <= sizes.max() / 2, "off by half a group at most"
    named = checked_rows(Split(fraction, groups=[f"user {group}" for group in groups]), torch.zeros(len(groups)), seed)
    assert torch.equal(named[1], validation), "the names of groups do not matter"


@given(st.integers(2, 40), st.integers(1, 5), SEEDS)
def test_groups_of_equal_sizes_give_the_fraction(count, size, seed):
    groups = torch.arange(count).repeat(size)
    _, validation = checked_rows(Split(0.5, groups=groups), torch.zeros(count * size), seed)
    assert abs(len(validation) - count * size / 2) <= size / 2


def test_different_seeds_draw_different_groups():
    split, targets = Split(0.3, groups=torch.arange(40) // 2), torch.zeros(40)
    drawn = {tuple(split.rows(targets, seed=seed)[1].tolist()) for seed in range(20)}
    assert len(drawn) == 20
    fixed = Split(0.3, groups=torch.arange(40) // 2, seed=3)
    assert {tuple(fixed.rows(targets, seed=seed)[1].tolist()) for seed in range(20)} == {
        tuple(split.rows(targets, seed=3)[1].tolist())
    }


@given(st.lists(st.integers(0, 12), min_size=2, max_size=60).filter(lambda times: len(set(times)) > 1), FRACTIONS)
def test_the_latest_examples_are_held_out(times, fraction):
    column = np.array(times)
    train, validation = checked_rows(Split(fraction, time=column), torch.zeros(len(times)), 0)
    assert column[train.numpy()].max() < column[validation.numpy()].min(), "ties stay on one side"
    wanted = fraction * len(times)
    possible = [int((column >= time).sum()) for time in sorted(set(times))[1:]]
    assert abs(len(validation) - wanted) == min(abs(size - wanted) for size in possible)
    dates = np.datetime64("2020-01-01") + column.astype("timedelta64[D]")
    assert torch.equal(Split(fraction, time=dates).rows(torch.zeros(len(times)), seed=9)[1], validation)


@given(st.lists(st.integers(0, 6), min_size=2, max_size=90), FRACTIONS, SEEDS)
def test_classes_keep_their_shares_to_within_one_example(labels, fraction, seed):
    targets = torch.tensor(labels)
    sizes = targets.bincount()
    if int(sizes.max()) < 2:
        with pytest.raises(ValueError, match="`stratify` must have a class with two examples or more"):
            Split(fraction).rows(targets)
        return
    train, validation = checked_rows(Split(fraction), targets, seed)
    held_out = targets[validation].bincount(minlength=len(sizes))
    kept = targets[train].bincount(minlength=len(sizes))
    assert ((held_out - fraction * sizes).abs() <= 1).all()
    assert (kept[sizes > 0] >= 1).all(), "every class is in training"
    named = [("ant", "bee", "cat", "dog", "elk", "fox", "gnu")[label] for label in labels]
    other = Split(fraction, stratify=named).rows(torch.zeros(len(labels)), seed=seed)
    assert torch.equal(other[1], validation)


@settings(max_examples=30)
@given(st.integers(2, 6), st.integers(10, 40), SEEDS)
def test_classes_of_equal_sizes_give_the_fraction_exactly(classes, size, seed):
    targets = torch.arange(classes).repeat(size)
    _, validation = checked_rows(Split(0.1), targets, seed)
    assert len(validation) == round(0.1 * classes * size)


def test_classes_of_one_example_stay_in_training_and_the_log_says_so(caplog):
    targets = torch.tensor([0] * 10 + [1] * 10 + [2, 3])
    with caplog.at_level(logging.INFO, "dissensus"):
        Split(0.5).check(targets)
    assert caplog.messages == ["2 classes have one example each, which stays in training"]
    assert not any(record.levelno >= logging.WARNING for record in caplog.records)
    assert all({20, 21} <= set(Split(0.5).rows(targets, seed=seed)[0].tolist()) for seed in range(5))


def test_few_groups_give_each_part_one():
    large = torch.tensor([0] * 50 + [1] * 40)
    train, validation = Split(0.05, groups=large).rows(torch.zeros(90))
    assert (len(train), len(validation)) == (50, 40)
    train, validation = Split(0.95, groups=large).rows(torch.zeros(90))
    assert (len(train), len(validation)) == (40, 50)


N = torch.zeros(6)
MISTAKES = {
    "fraction": (lambda: Split(1.0), ValueError, "`fraction` must be a number above 0 and below 1; got 1.0"),
    "seed": (lambda: Split(seed=-1), ValueError, "`seed` must be a whole number"),
    "length": (lambda: Split(groups=[1, 2]).rows(N), ValueError, r"`groups` must have one value per example \(N=6\)"),
    "time length": (lambda: Split(time=[1, 2]).rows(N), ValueError, "`time` must have one value per .* got 2 values"),
    "labels length": (lambda: Split(stratify=[1]).rows(N), ValueError, "`stratify` must have one value per example"),
    "NaN": (
        lambda: Split(time=[1.0, float("nan")]),
        ValueError,
        "`time` must have no missing values; got 1 missing, th",
    ),
    "NaN in an array": (lambda: Split(time=np.array([np.nan, 1])), ValueError, "missing, the first in row 0"),
    "NaN in a tensor": (lambda: Split(time=torch.tensor([0.0, torch.nan])), ValueError, "the first in row 1"),
    "NaT": (lambda: Split(time=np.array(["NaT"], dtype="datetime64[s]")), ValueError, "must have no missing values"),
    "infinity": (lambda: Split(time=[1.0, float("inf")]), ValueError, "`time` must be finite"),
    "None": (lambda: Split(groups=["a", None]), ValueError, "`groups` must have no missing values"),
    "NaN among texts": (lambda: Split(groups=["a", float("nan")]), ValueError, "`groups` must have no missing values"),
    "kinds": (lambda: Split(groups=["a", 1]), TypeError, "`groups` must hold values of one kind"),
    "text": (lambda: Split(groups="abc"), TypeError, r"`groups` must have one value per example \[N\]; got 'abc'"),
    "matrix": (lambda: Split(groups=torch.zeros(3, 2)), ValueError, r"`groups` must have .* \[N\]; got \[3, 2\]"),
    "text times": (lambda: Split(time=["2020", "2021"]), TypeError, "numbers or datetime64.* Texts\\? Use numpy"),
    "one group": (lambda: Split(groups=[1] * 6).rows(N), ValueError, "`groups` must name two groups or more; got one"),
    "one time": (lambda: Split(time=[1] * 6).rows(N), ValueError, "`time` must have two different times or more"),
    "one example": (lambda: Split().rows(N[:1]), ValueError, "two examples or more"),
    "classes": (lambda: Split(stratify=True).rows(N), ValueError, "`stratify` must come with targets that are class l"),
    "stratify": (lambda: Split(stratify="yes"), ValueError, "`stratify` must be one of 'auto'"),
    "nothing": (lambda: Split(stratify=None), TypeError, "`stratify` must have one value per example"),
    "groups and time": (
        lambda: Split(groups=[1], time=[1]),
        ValueError,
        "by groups, by time or stratified; got groups",
    ),
    "groups and classes": (lambda: Split(groups=[1], stratify=True), ValueError, "got groups and stratify. Leave out"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused(name):
    call, error, words = MISTAKES[name]
    with pytest.raises(error, match=words):
        call()


def test_columns_of_pandas():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"user": ["a", "b", "b", "c"], "day": pandas.date_range("2024", periods=4)})
    _, validation = Split(0.5, groups=frame["user"]).rows(torch.zeros(4))
    assert set(validation.tolist()) in ({1, 2}, {0, 3})
    assert Split(0.25, time=frame["day"]).rows(torch.zeros(4))[1].tolist() == [3]
    for missing in (None, pandas.NA, float("nan")):
        with pytest.raises(ValueError, match="`groups` must have no missing values; got 1 missing, the first in row 1"):
            Split(groups=pandas.Series(["a", missing], dtype=object))


# Trainings

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
Y = (torch.arange(48) % 3 > 0).long()
LOSS = partial(ds.objectives.independent, loss="cross_entropy")
PARTS = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 5]).repeat_interleave(4)
KINDS = {
    "random": Split(0.25, stratify=False),
    "classes": Split(0.25),
    "groups": Split(0.25, groups=PARTS),
    "time": Split(0.25, time=torch.arange(48) // 5),
    "groups of one seed": Split(0.25, groups=PARTS, seed=1),
}


def build():
    return nn.Linear(3, 2)


def weights(ensemble):
    return torch.cat([parameter.detach().flatten() for parameter in ensemble.parameters()])


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_holds_out_what_the_split_says(kind):
    split = KINDS[kind]
    fitted, by_hand = ds.Ensemble(build, 2), ds.Ensemble(build, 2)
    history = ds.fit(fitted, (X, Y), LOSS, epochs=3, batch_size=8, lr=0.1, validation=split, split_seed=None, seed=4)
    train, held_out = split.rows(Y, seed=4)
    options = {"epochs": 3, "batch_size": 8, "lr": 0.1, "seed": 4}
    expected = ds.fit(by_hand, (X[train], Y[train]), LOSS, validation=(X[held_out], Y[held_out]), **options)
    assert torch.equal(weights(fitted), weights(by_hand))
    assert [e["validation"] for e in history.epochs] == [e["validation"] for e in expected.epochs]


@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_a_sweep_equal_fits_with_the_same_split(kind):
    seeds, options = [0, 1, 2, 3], {"epochs": 2, "batch_size": 8, "lr": 0.1, "validation": KINDS[kind], "patience": 2}
    sweep = ds.sweep(build, (X, Y), LOSS, grid={"seed": seeds}, members=2, **options)
    for run, seed in enumerate(seeds):
        ensemble = ds.Ensemble(build, 2, seed=seed)
        history = ds.fit(ensemble, (X, Y), LOSS, seed=seed, **options)
        torch.testing.assert_close(weights(sweep.run(run)), weights(ensemble))
        assert sweep.history(run).epochs[-1]["validation"] == pytest.approx(history.epochs[-1]["validation"])
    sizes = {len(KINDS[kind].rows(Y, seed=seed)[1]) for seed in seeds}
    assert len(sweep.groups) == len(sizes), "runs with as many examples are trained together"
    assert (len(sizes) > 1) == (kind == "groups")


def test_folds_are_stratified_each_by_its_own_classes():
    other = (X[:24], torch.zeros(24, dtype=torch.int64).index_fill(0, torch.arange(12), 1))
    data = [(X[24:], Y[24:]), other]
    options = {"epochs": 2, "batch_size": 8, "lr": 0.1, "validation": Split(0.25)}
    sweep = ds.sweep(build, data, LOSS, grid={"fold": [0, 1], "seed": [2]}, members=2, **options)
    for run, pair in enumerate(data):
        ensemble = ds.Ensemble(build, 2, seed=2)
        ds.fit(ensemble, pair, LOSS, seed=2, **options)
        torch.testing.assert_close(weights(sweep.run(run)), weights(ensemble))
    with pytest.raises(ValueError, match="`validation` must split one data set where it has groups.* got 2 data sets"):
        ds.sweep(build, data, LOSS, grid={"fold": [0, 1]}, epochs=1, validation=Split(groups=PARTS))


def test_one_seed_is_given_once():
    split = Split(seed=1)
    with pytest.raises(ValueError, match="`split_seed` must be None where the split has a seed; got 2"):
        ds.fit(ds.Ensemble(build, 2), (X, Y), LOSS, epochs=1, validation=split, split_seed=2)
    with pytest.raises(ValueError, match="`grid` must leave out 'split_seed' where the split has a seed"):
        ds.sweep(build, (X, Y), LOSS, grid={"split_seed": [0, 1]}, epochs=1, validation=split)


def test_wrong_splits_are_refused_before_training():
    with pytest.raises(ValueError, match=r"`groups` must have one value per example \(N=48\); got 3 values"):
        ds.fit(ds.Ensemble(build, 2), (X, Y), LOSS, epochs=1, validation=Split(groups=[1, 2, 3]))
    with pytest.raises(ValueError, match=r"`groups` must have one value per example \(N=48\); got 3 values"):
        ds.sweep(build, (X, Y), LOSS, grid={"seed": [0]}, epochs=1, validation=Split(groups=[1, 2, 3]))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 8)
    with pytest.raises(ValueError, match=r"`validation` must be data, not a part of it, for a loader"):
        ds.fit(ds.Ensemble(build, 2), loader, LOSS, epochs=1, validation=Split())


def test_checkpoints_recognise_a_split(tmp_path):
    def fit(folder, split):
        options = {"epochs": 2, "batch_size": 8, "checkpoint": tmp_path / folder, "resume": True}
        ensemble = ds.Ensemble(build, 2)
        ds.fit(ensemble, (X, Y), LOSS, validation=split, **options)
        return weights(ensemble)

    first = fit("fit", Split(0.25, groups=PARTS))
    assert torch.equal(fit("fit", Split(0.25, groups=[f"g{part}" for part in PARTS.tolist()])), first)
    for other in (Split(0.25, groups=PARTS.flip(0)), Split(0.3, groups=PARTS), Split(0.25, time=PARTS), Split(0.25)):
        with pytest.raises(ds.StorageError, match="belongs to another training: 'validation' differ"):
            fit("fit", other)

    def sweep(split):
        options = {"epochs": 2, "batch_size": 8, "checkpoint": tmp_path / "sweep", "resume": True}
        return ds.sweep(build, (X, Y), LOSS, grid={"seed": [0, 1, 2, 3]}, members=2, validation=split, **options)

    table = sweep(Split(0.25, groups=PARTS)).table(frame=False)
    assert sweep(Split(0.25, groups=PARTS)).table(frame=False) == table
    with pytest.raises(ds.StorageError, match="belongs to another sweep: 'validation' differ"):
        sweep(Split(0.25, groups=PARTS.flip(0)))
