"""Reading what a training gives: frames, figures, the best of a sweep; and reading an ensemble like a list."""

import copy
import io
import math
import pickle
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.train.history import History, flattened
from dissensus.train.selection import best_group, groups_of, lines_over
from dissensus.train.sweep_result import Outcome

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :1].sin()
build = partial(ds.nets.mlp, 6, 1, (4,))
augmented = partial(ds.objectives.augmented, loss="squared_error", pool="score")
OPTIONS = {"epochs": 4, "batch_size": 10, "lr": 1e-2}


def fit(**options):
    return ds.fit(ds.Ensemble(build, 3, backend="loop"), (X, Y), partial(augmented, beta=0.5), **{**OPTIONS, **options})


def sweep(**options):
    settings = {"grid": {"beta": [0.0, 0.5], "seed": [0, 1, 2]}, "members": 2, "backend": "loop", "validation": 0.2}
    return ds.sweep(build, (X, Y), augmented, **{**OPTIONS, **settings, **options})


def result(values, points, **columns):
    """A sweep without networks: what `best` and `plot` read of it."""
    outcomes = []
    for place, value in enumerate(values):
        entry = {"epoch": 1, "loss": 1.0, "validation": value, **{name: each[place] for name, each in columns.items()}}
        failed = value is None
        history = History([] if failed else [entry])
        outcomes.append(Outcome("failed" if failed else "done", "NaN at step 3" if failed else "", history))
    return ds.Sweep(points, outcomes, [])


@pytest.fixture
def without_networks(monkeypatch):
    monkeypatch.setattr(ds.Sweep, "run", lambda self, index: index)


POINTS = [{"beta": beta, "seed": seed} for beta in (0, 1) for seed in (0, 1)]


# Frames


def test_a_frame_has_a_row_per_epoch_and_a_column_per_member():
    history = fit(validation=0.2)
    frame = history.frame()
    assert list(frame["epoch"]) == [1, 2, 3, 4]
    assert list(frame["validation"]) == history.column("validation")
    assert frame[[f"member_loss.{m}" for m in range(3)]].to_numpy().tolist() == history.column("member_loss")
    assert all(dtype.kind in "if" for dtype in frame.dtypes)


def test_a_frame_tells_a_twin_and_members_in_turn_apart():
    frame = fit(twin=True).frame()
    assert list(frame["twin"]) == [False] * 4 + [True] * 4
    in_turn = History([{"epoch": 1, "loss": 1.0, "member": 0}, {"epoch": 1, "loss": 0.5, "member": 1}])
    assert list(in_turn.frame()["member"]) == [0, 1]


def test_a_frame_of_no_epochs_is_empty():
    assert len(History().frame()) == 0


def test_a_frame_needs_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'dissensus\[data\]'"):
        History().frame()


def test_flattened_entries_hold_numbers_texts_and_none():
    entry = {"point": {"act": nn.ReLU, "rates": [0.1, (2, None)]}, "text": "a", "flag": True}
    expected = {"point.act": "ReLU", "point.rates.0": 0.1, "point.rates.1.0": 2, "point.rates.1.1": None}
    assert flattened(entry) == {**expected, "text": "a", "flag": True}


# Figures of histories


def written(figure):
    """The bytes of a picture, for which everything is drawn."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def lines_of(axes):
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines}


def test_a_history_draws_losses_spread_and_validation():
    history = fit(validation=0.2)
    figure = history.plot()
    written(figure)
    training, validation = figure.axes
    assert lines_of(training)["objective"] == history.column("loss")
    assert lines_of(training)["mean of members"] == pytest.approx(np.mean(history.column("member_loss"), 1).tolist())
    band = training.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx(
        (np.min(history.column("member_loss")), np.max(history.column("member_loss")))
    )
    assert lines_of(validation)["watched"] == history.column("validation")
    (mark,) = validation.collections[0].get_offsets().tolist()
    assert mark == [history.best_epoch, history.epochs[history.best_epoch - 1]["validation"]]


def test_a_history_without_validation_is_one_panel():
    figure = fit().plot()
    written(figure)
    assert len(figure.axes) == 1


def test_members_that_are_watched_have_a_line_and_a_mark_each():
    history = fit(validation=0.2, watch="member")
    axes = history.plot().axes[1]
    assert lines_of(axes)["member 2"] == [values[2] for values in history.column("validation")]
    marks = axes.collections[0].get_offsets().tolist()
    best = [[epoch, history.column("validation")[epoch - 1][m]] for m, epoch in enumerate(history.best_epoch)]
    assert marks == best


def test_a_twin_is_drawn_beside_its_ensemble():
    history = fit(twin=True)
    assert lines_of(history.plot().axes[0])["twin: objective"] == history.twin_history.column("loss")


def test_members_in_turn_are_drawn_one_after_the_other():
    entries = [{"epoch": e, "loss": 1.0 / e, "validation": 2.0 / e, "member": m} for m in (0, 1) for e in (1, 2, 3)]
    figure = History(entries, best_epoch=[3, 2]).plot()
    written(figure)
    line = next(line for line in figure.axes[1].lines if line.get_label() == "watched")
    assert line.get_xdata().tolist() == [1, 2, 3, 3.5, 4, 5, 6]
    assert np.isnan(line.get_ydata()[3]), "the line breaks off between members"
    assert figure.axes[1].collections[0].get_offsets().tolist() == [[3, 2 / 3], [5, 1.0]]


@pytest.mark.parametrize(
    ("losses", "scale"),
    [([10.0, 1.0, 0.1], "log"), ([1.0, 0.9, 0.8], "linear"), ([1.0, 0.01, -0.1], "linear"), ([1.0, 0.0], "linear")],
)
def test_an_axis_is_logarithmic_where_that_shows_more(losses, scale):
    history = History([{"epoch": e + 1, "loss": loss} for e, loss in enumerate(losses)])
    assert history.plot().axes[0].get_yscale() == scale
    assert history.plot(log=True).axes[0].get_yscale() == "log"
    assert history.plot(log=False).axes[0].get_yscale() == "linear"


@pytest.mark.parametrize("values", [[math.nan, 1.0], [math.inf, 1.0], [math.nan, math.nan]])
def test_numbers_that_are_not_finite_are_left_out_of_a_figure(values):
    entries = [{"epoch": e + 1, "loss": v, "member_loss": [v, v], "validation": v} for e, v in enumerate(values)]
    assert written(History(entries).plot())


def test_a_history_without_epochs_is_not_drawn():
    with pytest.raises(ValueError, match="`history` must hold an epoch to draw; got none"):
        History().plot()


def test_figures_need_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'dissensus\[report\]'"):
        History([{"epoch": 1, "loss": 1.0}]).plot()


# The best of a sweep


def test_the_best_run_is_that_of_the_table():
    swept = sweep()
    best = swept.best()
    values = [row["validation"] for row in swept.table(frame=False)]
    assert (best.run, best.value) == (int(np.argmin(values)), min(values))
    assert best.point == swept.points[best.run]
    assert best.runs == [best.run]
    assert math.isnan(best.standard_error)
    torch.testing.assert_close(best.ensemble(X), swept.run(best.run)(X))


def test_the_best_point_over_seeds():
    swept = sweep()
    best = swept.best(over="seed")
    frame = swept.table()
    grouped = frame.groupby("beta")["validation"]
    assert best.point == {"beta": grouped.mean().idxmin()}
    assert best.value == pytest.approx(grouped.mean().min())
    assert best.standard_error == pytest.approx(grouped.sem()[best.point["beta"]])
    assert [swept.points[run]["beta"] for run in best.runs] == [best.point["beta"]] * 3
    assert best.run == frame.loc[best.runs, "validation"].idxmin()


def test_the_mode_is_that_of_the_sweep_and_is_stored(tmp_path):
    explained = lambda outputs, targets: 1 - (outputs.mean(0) - targets).square().mean() / targets.var()  # noqa: E731
    swept = sweep(metric=explained, mode="max")
    values = [row["validation"] for row in swept.table(frame=False)]
    assert swept.best().run == int(np.argmax(values))
    assert swept.best(mode="min").run == int(np.argmin(values))
    swept.save(tmp_path)
    assert ds.Sweep.load(tmp_path, build).best().run == int(np.argmax(values))


def test_failed_runs_are_left_out(without_networks):
    swept = result([0.1, 0.9, None, 0.2], POINTS)
    assert swept.best().run == 0
    assert result([None, 0.9, 0.3, 0.2], POINTS).best().run == 3
    assert swept.best(over="seed").point == {"beta": 0}, "a point with a failed seed is left out as a whole"
    assert result([math.nan, 0.9, 0.3, 0.4], POINTS).best().run == 2
    with pytest.raises(ValueError, match="there is no best run: every point has a run that failed"):
        result([None, 0.9, None, 0.4], POINTS).best(over="seed")


def test_of_equals_the_first_is_best(without_networks):
    assert result([0.5, 0.5, 0.5, 0.5], POINTS).best().run == 0


def test_other_columns_need_a_mode(without_networks):
    swept = result([0.1, 0.2, 0.3, 0.4], POINTS, validation_accuracy=[0.5, 0.9, 0.7, 0.6])
    assert swept.best("validation_accuracy", mode="max").run == 1
    assert swept.best("loss").run == 0
    with pytest.raises(ValueError, match="`mode` must be 'min' or 'max' for 'validation_accuracy'; got None"):
        swept.best("validation_accuracy")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "validation_acuracy", "mode": "max"}, "Did you mean 'validation_accuracy'"),
        ({"metric": "beta"}, "`metric` must be one of"),
        ({"metric": "status"}, "`metric` must be one of"),
        ({"over": "seeds"}, "`over` must be one of 'beta', 'seed'; got 'seeds'. Did you mean 'seed'"),
        ({"mode": "lowest"}, "`mode` must be one of 'min', 'max'"),
    ],
)
def test_what_a_sweep_does_not_have_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        result([0.1, 0.2, 0.3, 0.4], POINTS, validation_accuracy=[0.5] * 4).best(**options)


def test_without_validation_another_metric_is_asked_for():
    with pytest.raises(ValueError, match=r"Pass validation=... to the sweep, or name another: .*loss"):
        sweep(validation=None).best()


def test_points_that_cannot_be_hashed_are_grouped():
    points = [{"widths": [4, 4], "seed": 0}, {"widths": [8], "seed": 0}, {"widths": [4, 4], "seed": 1}]
    assert groups_of(points, ["seed"]) == [({"widths": [4, 4]}, [0, 2]), ({"widths": [8]}, [1])]
    assert best_group(points, [3.0, 2.0, 2.0], "max", ["seed"])[:3] == ({"widths": [4, 4]}, [0, 2], 2.5)


# Figures of sweeps


def test_a_sweep_is_drawn_as_means_over_seeds():
    swept = sweep(grid={"lr": [1e-2, 1e-4, 1e-3], "beta": [0.0, 0.5], "seed": [0, 1]})
    figure = swept.plot("lr")
    written(figure)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    frame = swept.table()
    for container in axes.containers:
        beta = float(container.get_label().removeprefix("beta = "))
        expected = frame[frame["beta"] == beta].groupby("lr")["validation"]
        assert container[0].get_xdata().tolist() == [1e-4, 1e-3, 1e-2]
        assert container[0].get_ydata() == pytest.approx(expected.mean().to_numpy())
        bars = [segment[:, 1] for segment in container[2][0].get_segments()]
        assert [(high - low) / 2 for low, high in bars] == pytest.approx(expected.sem().to_numpy())
    assert len(axes.containers) == 2


@pytest.mark.parametrize("options", [{}, {"x": "seed", "over": ()}, {"metric": "diversity", "log": True}], ids=str)
def test_a_sweep_chooses_what_to_draw(options):
    figure = sweep().plot(**options)
    written(figure)
    assert figure.axes[0].get_xlabel() == options.get("x", "beta")
    assert len(figure.axes[0].containers) == (2 if "x" in options else 1)


def test_failed_runs_are_counted_in_the_figure():
    figure = result([0.1, 0.9, None, 0.2], POINTS).plot()
    written(figure)
    assert figure.axes[0].get_title(loc="left") == "1 failed run is left out"
    with pytest.raises(ValueError, match="nothing to draw"):
        result([math.nan] * 4, POINTS).plot()


def test_settings_that_are_no_numbers_are_named():
    x, lines = lines_over([{"act": nn.ReLU}, {"act": nn.Tanh}, {"act": nn.ReLU}], [1.0, 2.0, 3.0], "act", [])
    assert x == ["ReLU", "Tanh"]
    assert lines == [("", [[1.0, 3.0], [2.0]])]
    points = [{"loss": "brier"}, {"loss": "cross_entropy"}]
    figure = result([0.1, 0.9], points).plot()
    written(figure)
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["brier", "cross_entropy"]


def test_a_sweep_is_not_drawn_over_what_it_averages():
    with pytest.raises(ValueError, match="`x` must be none of the names in `over`"):
        result([0.1] * 4, POINTS).plot("seed", over="seed")
    with pytest.raises(ValueError, match="Did you mean 'beta'"):
        result([0.1] * 4, POINTS).plot("bete")


# An ensemble as a list of its members


def test_members_are_read_like_a_list():
    ens = ds.Ensemble(build, 4)
    assert len(ens) == len(list(ens)) == 4
    for place, network in enumerate(ens):
        torch.testing.assert_close(network(X), ens(X)[place])
        torch.testing.assert_close(ens[place](X), ens[place - 4](X))
    assert isinstance(ens[1:3], ds.Ensemble)
    torch.testing.assert_close(ens[1:3](X), ens(X)[1:3])
    torch.testing.assert_close(ens[::-1](X), ens(X).flip(0))
    assert ens[1:3].member_ids == [1, 2]
    assert isinstance(ens[np.int64(1)], nn.Module)
    rebuilt = ds.Ensemble.from_modules(ens)
    torch.testing.assert_close(rebuilt(X), ens(X))


def test_members_that_are_read_are_copies_in_the_ensembles_mode():
    ens = ds.Ensemble(build, 2).eval()
    before = ens(X)
    for network in ens:
        assert not network.training
        with torch.no_grad():
            next(network.parameters()).zero_()
    assert torch.allclose(ens(X), before)


@pytest.mark.parametrize("index", [4, -5])
def test_a_member_that_does_not_exist(index):
    with pytest.raises(IndexError, match="the ensemble has members 0 to 3"):
        ds.Ensemble(build, 4)[index]


@pytest.mark.parametrize("index", ["0", [0, 1], True, None, 1.0], ids=repr)
def test_other_indices_are_refused(index):
    with pytest.raises(TypeError, match=r"`index` must be a whole number or a slice; got .*Use ens.subset"):
        ds.Ensemble(build, 4)[index]


def test_an_empty_slice_is_refused():
    with pytest.raises(ValueError, match="`index` must select at least one member"):
        ds.Ensemble(build, 4)[4:]


def test_an_ensemble_is_still_a_module_and_no_data():
    ens = ds.Ensemble(build, 3)
    for other in (copy.deepcopy(ens), pickle.loads(pickle.dumps(ens))):
        torch.testing.assert_close(other(X), ens(X))
    assert bool(ens)
    assert "members=3" in repr(ens)
    wrapped = nn.Sequential(ens, nn.Identity())
    torch.testing.assert_close(wrapped(X), ens(X))
    assert len(list(wrapped.parameters())) == len(list(ens.parameters()))
    for data in (ens, nn.Sequential(nn.ReLU())):
        with pytest.raises(TypeError, match="`data` must be"):
            ds.fit(ens, data, partial(augmented, beta=0.5), epochs=1)
        with pytest.raises(TypeError, match="`data` must be"):
            ens.predict(data)


def test_the_backend_can_be_set():
    ens = ds.Ensemble(build, 3)
    before = ens(X)
    assert ens.choices
    ens.backend = "vmap"
    assert (ens.backend, ens.choices) == ("vmap", [])
    torch.testing.assert_close(ens(X), before)
    assert [choice.backend for choice in ens.choices] == ["vmap"]
    with pytest.raises(ValueError, match="Did you mean 'vmap'"):
        ens.backend = "vmpa"
    assert ens.backend == "vmap"


def test_setting_a_backend_leaves_other_ensembles_of_a_sweep_alone():
    swept = sweep(grid={"beta": [0.5], "seed": [0, 1]}, backend="auto", epochs=1)
    one, other = swept.run(0), swept.run(1)
    one(X)
    one.backend = "loop"
    assert other.choices
    assert other.backend == "auto"


def test_members_of_different_architectures_run_in_a_loop():
    ens = ds.Ensemble.from_modules([nn.Linear(6, 1), nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 1))])
    ens.backend = "loop"
    with pytest.raises(ValueError, match="`backend` must be 'auto' or 'loop' for members of different architectures"):
        ens.backend = "vmap"


# Seeds from torch's generator


def test_a_seed_of_none_comes_from_torchs_generator(tmp_path):
    torch.manual_seed(0)
    one, two = ds.Ensemble(build, 2, seed=None), ds.Ensemble(build, 2, seed=None)
    assert one.seed != two.seed
    assert not torch.equal(one(X), two(X))
    torch.manual_seed(0)
    again = ds.Ensemble(build, 2, seed=None)
    assert again.seed == one.seed
    assert torch.allclose(again(X), one(X))
    assert torch.allclose(ds.Ensemble(build, 2, seed=one.seed)(X), one(X))
    one.save(tmp_path)
    assert ds.Ensemble.load(tmp_path, build).seed == one.seed
    network = nn.Linear(6, 1)
    torch.manual_seed(0)
    assert ds.Ensemble.from_modules([network], seed=None).seed == one.seed
    state = torch.get_rng_state()
    assert ds.Ensemble(build, 2).seed == 0
    assert torch.equal(torch.get_rng_state(), state), "a seed that is given draws nothing"


def test_fits_and_sweeps_record_their_seed(tmp_path):
    torch.manual_seed(0)
    first, second = fit(seed=None), fit(seed=None)
    assert first.seed != second.seed
    assert fit(seed=first.seed).column("loss") == first.column("loss") != second.column("loss")
    torch.manual_seed(0)
    swept = sweep(seed=None, grid={"beta": [0.0, 0.5]})
    assert [swept.history(run).seed for run in range(2)] == [first.seed] * 2
    assert [sweep().history(run).seed for run in range(3)] == [0, 1, 2]
    torch.manual_seed(0)
    saving = {"checkpoint": tmp_path, "resume": True}
    fit(seed=None, **saving)
    torch.manual_seed(0)
    assert fit(seed=None, **saving).seed == first.seed
    with pytest.raises(ds.StorageError, match="'seed' was"):
        fit(seed=None, **saving)


@pytest.mark.parametrize("make", [partial(ds.Ensemble, build), fit, sweep], ids=["Ensemble", "fit", "sweep"])
@pytest.mark.parametrize("seed", [-1, "0", True, 1.5])
def test_other_seeds_are_refused(make, seed):
    with pytest.raises(ValueError, match="`seed` must be a whole number of at least 0"):
        make(seed=seed)
