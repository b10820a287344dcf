"""Rungs of a sweep: runs of all shapes wait for each other, are compared, and go on without a restart."""

from functools import partial

import pytest
import torch

import dissensus as ds
from dissensus.train.callbacks import Rung

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :1].sin()
augmented = partial(ds.objectives.augmented, loss="squared_error", pool="score")
POINTS = [{"beta": beta, "width": width, "members": m} for width, m in ((4, 2), (5, 2), (4, 3)) for beta in (0.0, 0.8)]


def build(width=4):
    return ds.nets.mlp(6, 1, (width,))


def sweep(callbacks=(), **options):
    settings = {"grid": POINTS, "backend": "loop", "epochs": 4, "batch_size": 10, "validation": 0.25, "keep": "last"}
    return ds.sweep(build, (X, Y), augmented, **{**settings, **options}, callbacks=list(callbacks))


def weights(ensemble):
    return torch.cat([parameter.detach().flatten() for parameter in ensemble.parameters()])


class Keep:
    """Keeps the best runs at every rung, of whatever shape."""

    def __init__(self, rungs, kept):
        self.rungs, self.kept, self.seen = rungs, kept, []

    def on_rung(self, rung):
        self.seen.append((rung.epoch, [entry["run"] for entry in rung.entries]))
        order = sorted(range(len(rung.entries)), key=lambda place: rung.entries[place]["validation"])
        return order[self.kept :]


def best_at(swept, epoch, runs, kept):
    values = {run: swept.history(run).epochs[epoch - 1]["validation"] for run in runs}
    return sorted(sorted(runs, key=values.__getitem__)[:kept])


def test_runs_of_all_shapes_are_compared_and_survivors_equal_plain_runs():
    keep, plain = Keep([1, 3], 3), sweep()
    swept = sweep([keep])
    first = best_at(plain, 1, range(6), 3)
    assert keep.seen == [(1, list(range(6))), (3, first)]
    assert len({(POINTS[run]["width"], POINTS[run]["members"]) for run in first}) > 1  # shapes do meet
    for run in range(6):
        assert len(swept.history(run).epochs) == (4 if run in first else 1)
        if run in first:
            torch.testing.assert_close(weights(swept.run(run)), weights(plain.run(run)))
        else:
            assert swept.history(run).stopped_by == "Keep"


def test_the_run_that_is_stopped_is_the_one_that_is_named():
    class StopFourth:
        rungs = (2,)

        def on_rung(self, rung):
            return [place for place, entry in enumerate(rung.entries) if entry["run"] == 3]

    swept = sweep([StopFourth()])
    assert [len(swept.history(run).epochs) for run in range(6)] == [4, 4, 4, 2, 4, 4]
    assert str(swept.history(3).stopped_by).endswith("StopFourth")


@pytest.mark.parametrize("padding", [False, True])
def test_outputs_at_a_rung_are_those_of_its_weights_on_validation_data(padding):
    class Look:
        rungs = (2,)

        def on_rung(self, rung):
            self.outputs, self.entries = rung.outputs(), rung.entries

    look = Look()
    sweep([look], padding=padding, backend="auto")
    whole = sweep(epochs=2, padding=False)
    held_out = ds.data.Split(0.25).rows(Y, seed=0)[1]
    assert [entry["run"] for entry in look.entries] == list(range(6))
    for run, (outputs, targets) in enumerate(look.outputs):
        torch.testing.assert_close(targets, Y[held_out])
        torch.testing.assert_close(outputs, whole.run(run).predict(X[held_out]))


def test_a_sweep_that_was_interrupted_between_rungs_goes_on(tmp_path):
    class Break(Keep):
        def on_runs(self, entries):
            if entries[0]["epoch"] == 3 and entries[0]["point"]["width"] == 5:
                raise KeyboardInterrupt

    whole = sweep([Keep([1, 3], 5)])
    options = {"checkpoint": tmp_path / "sweep", "checkpoint_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        sweep([Break([1, 3], 5)], **options)
    resumed = sweep([Keep([1, 3], 5)], resume=True, **options)
    for run in range(6):
        assert len(resumed.history(run).epochs) == len(whole.history(run).epochs)
        torch.testing.assert_close(weights(resumed.run(run)), weights(whole.run(run)))


def test_all_runs_of_a_shape_may_stop():
    class OneShape:
        rungs = (1, 2, 3)

        def on_rung(self, rung):
            return [place for place, entry in enumerate(rung.entries) if entry["point"]["width"] == 5]

    swept = sweep([OneShape()])
    assert [len(swept.history(run).epochs) for run in range(6)] == [4, 4, 1, 1, 4, 4]


def test_progress_counts_the_steps_of_all_parts():
    moments = []
    sweep([Keep([1, 2], 6)], progress=moments.append)
    steps = [moment.step for moment in moments]
    assert steps == sorted(steps)
    assert steps[-1] == moments[-1].steps == 3 * 4 * 3


def test_rungs_without_epochs_and_wrong_answers_are_refused():
    class NoRungs:
        def on_rung(self, rung):
            return None

    class WrongPlace(Keep):
        def on_rung(self, rung):
            return [17]

    with pytest.raises(TypeError, match=r"have `rungs`, a list of epochs"):
        sweep([NoRungs()])
    with pytest.raises(ValueError, match="6 entries from on_rung"):
        sweep([WrongPlace([1], 1)])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 10)
    with pytest.raises(ValueError, match="be in memory"):
        ds.sweep(build, loader, augmented, grid=POINTS[::2], epochs=2, padding=False, callbacks=[Keep([1], 1)])


def test_a_rung_names_the_runs_that_have_failed():
    class Look:
        rungs = (1,)

        def on_rung(self, rung):
            self.rung = rung

    look = Look()
    grid = [{"lr": lr, "beta": 0.0, "width": width} for width in (4, 5) for lr in (1e30, 1e-2)]
    sweep([look], grid=grid, optimizer="sgd", members=2)
    assert look.rung.failed == [0, 2]
    assert [entry["run"] for entry in look.rung.entries] == [1, 3]


def test_a_rung_has_an_entry_a_run():
    rung = Rung(3, [{"run": 0}], lambda: [None])
    assert (rung.epoch, rung.entries, rung.outputs()) == (3, [{"run": 0}], [None])
