"""Sources that draw random numbers, in a resumed training, in the runs of a sweep, and beside a twin."""

import functools

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import dissensus as ds

N, M = 40, 2
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 3, (N,), generator=torch.Generator().manual_seed(1))
PAIRS = TensorDataset(X, LABELS)
BATCHES = list(zip(X.split(8), LABELS.split(8), strict=True))
cross_entropy = functools.partial(ds.objectives.independent, loss="cross_entropy")


def build(width=8):
    return ds.nets.mlp(4, 3, (width,))


def weights(ens):
    return torch.cat([p.detach().flatten() for p in ens.parameters()])


class Noisy(Dataset):
    """Examples with noise of the global generator."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return X[index] + torch.randn(4), LABELS[index]


class Drawn:
    """Batches that are drawn from a generator of its own."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self):
        for _ in range(5):
            rows = torch.randint(N, (8,), generator=self.generator)
            yield X[rows], LABELS[rows]


class Buffered(IterableDataset):
    """A stream that is shuffled by a buffer, which draws from the global generator."""

    def __iter__(self):
        buffer = list(range(10))
        for row in range(10, N):
            place = int(torch.randint(10, ()))
            yield X[buffer[place]], LABELS[buffer[place]]
            buffer[place] = row


class Turning:
    """An order that turns with every pass; the pass is counted, not drawn."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return iter(BATCHES[self.passes % 5 :] + BATCHES[: self.passes % 5])


def shuffled():
    return DataLoader(PAIRS, 8, shuffle=True, generator=torch.Generator().manual_seed(3))


SOURCES = {
    "own generator": shuffled,
    "global generator": lambda: DataLoader(PAIRS, 8, shuffle=True),
    "noise": lambda: DataLoader(Noisy(), 8, shuffle=True),
    "data set with noise": Noisy,
    "iterable with a generator": Drawn,
    "buffer": lambda: DataLoader(Buffered(), 6),
    "counted passes": Turning,
    "iterator": lambda: iter(BATCHES * 4),
}


@pytest.mark.parametrize("steps", [3, 5, 7])
@pytest.mark.parametrize("name", SOURCES)
def test_a_resumed_training_reads_the_batches_that_an_uninterrupted_one_reads(name, steps, tmp_path):
    if name == "iterator" and steps > 5:
        pytest.skip("it has ended by then")
    options = {"epochs": 4, "lr": 0.05, "batch_size": 8, "steps_per_epoch": steps}

    def ensemble():
        torch.manual_seed(7)
        return ds.Ensemble(build, M, backend="loop")

    def interrupt(progress):
        if progress.epoch == 3:
            raise KeyboardInterrupt

    expected = ensemble()
    ds.fit(expected, SOURCES[name](), cross_entropy, **options)
    options["checkpoint"] = tmp_path
    with pytest.raises(KeyboardInterrupt):
        ds.fit(ensemble(), SOURCES[name](), cross_entropy, progress=interrupt, checkpoint_seconds=0, **options)
    resumed = ensemble()
    torch.manual_seed(99)  # another process has other states
    ds.fit(resumed, SOURCES[name](), cross_entropy, resume=True, **options)
    assert torch.equal(weights(resumed), weights(expected))


def test_draws_that_cannot_be_repeated_are_told(tmp_path, caplog):
    def drawing(outputs, targets):
        torch.rand(())  # between the batches, from the generator that the buffer draws from
        return cross_entropy(outputs, targets)

    def interrupt(progress):
        if progress.epoch == 3:
            raise KeyboardInterrupt

    for source, told in ((SOURCES["buffer"], True), (SOURCES["global generator"], False)):
        options = {"epochs": 4, "steps_per_epoch": 7, "checkpoint": tmp_path / str(told)}
        with pytest.raises(KeyboardInterrupt):
            ds.fit(ds.Ensemble(build, M), source(), drawing, progress=interrupt, checkpoint_seconds=0, **options)
        caplog.clear()
        ds.fit(ds.Ensemble(build, M), source(), drawing, resume=True, **options)
        assert ("draws random numbers batch by batch" in caplog.text) == told


@pytest.mark.parametrize("reader", ["sweep", "twin", "sequential"])
def test_an_iterator_is_refused_where_data_is_read_several_times(reader):
    options = {"epochs": 1, "steps_per_epoch": 3}
    source, ens = iter(BATCHES), ds.Ensemble(build, M)
    before = weights(ens).clone()
    augmented = functools.partial(ds.objectives.augmented, beta=0.5, loss="cross_entropy", pool="score")
    sweep = functools.partial(ds.sweep, build, source, cross_entropy, grid={"lr": [0.1, 0.2]}, members=M)
    call = sweep if reader == "sweep" else functools.partial(ds.fit, ens, source, augmented, **{reader: True})
    with pytest.raises(TypeError, match=r"`data` must be readable from its beginning for .* got an iterator"):
        call(**options)
    assert next(source) is BATCHES[0]
    assert torch.equal(weights(ens), before)


SWEEP = {"members": M, "epochs": 3, "batch_size": 8, "backend": "loop"}


def assert_runs_equal_fits(swept, source, **options):
    for number, point in enumerate(swept.points):
        torch.manual_seed(7)
        ens = ds.Ensemble(functools.partial(build, point["width"]), M, backend="loop")
        ds.fit(ens, source(), cross_entropy, epochs=3, batch_size=8, lr=point["lr"], **options)
        # Runs are padded, and float32 is rounded otherwise.
        torch.testing.assert_close(swept.run(number).predict(X), ens.predict(X), rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "iterator"])
def test_every_run_of_a_sweep_equals_a_fit_with_a_new_source(name):
    """Two widths are two groups: the second begins after the first has drawn."""
    torch.manual_seed(7)
    swept = ds.sweep(
        build, SOURCES[name](), cross_entropy, grid={"lr": [0.05, 0.1], "width": [8, 6]}, steps_per_epoch=3, **SWEEP
    )
    assert_runs_equal_fits(swept, SOURCES[name], steps_per_epoch=3)


def test_a_sweep_by_whole_passes_equals_fits():
    torch.manual_seed(7)
    swept = ds.sweep(build, shuffled(), cross_entropy, grid={"lr": [0.05, 0.1], "width": [8, 6]}, **SWEEP)
    assert_runs_equal_fits(swept, shuffled)


@pytest.mark.parametrize("part", [0, 1])
def test_a_resumed_sweep_begins_later_parts_as_the_first_process_did(part, tmp_path):
    source = SOURCES["global generator"]

    def interrupt(progress):
        if progress.step > 5 + 9 * part:
            raise KeyboardInterrupt

    options = {"grid": {"lr": [0.05], "width": [8, 6]}, "checkpoint": tmp_path, "steps_per_epoch": 3, **SWEEP}
    torch.manual_seed(7)
    with pytest.raises(KeyboardInterrupt):
        ds.sweep(build, source(), cross_entropy, progress=interrupt, checkpoint_seconds=0, **options)
    torch.manual_seed(99)  # another process has other states
    swept = ds.sweep(build, source(), cross_entropy, resume=True, **options)
    assert_runs_equal_fits(swept, source, steps_per_epoch=3)


@pytest.mark.parametrize("validation", [DataLoader(PAIRS, 8), DataLoader(Noisy(), 8, shuffle=True)])
def test_reading_validation_data_does_not_change_the_order_of_training(validation):
    ensembles = []
    for options in ({}, {"validation": validation, "keep": "last"}):
        torch.manual_seed(7)
        ens = ds.Ensemble(build, M, backend="loop")
        ds.fit(ens, DataLoader(PAIRS, 8, shuffle=True), cross_entropy, epochs=3, lr=0.05, **options)
        ensembles.append(ens)
    assert torch.equal(*map(weights, ensembles))


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "iterator"])
def test_a_twin_reads_the_batches_of_its_sibling(name):
    objective = functools.partial(ds.objectives.augmented, loss="cross_entropy", pool="score")
    ensembles = []
    for beta, twin in ((0.5, True), (0.0, False)):
        torch.manual_seed(7)
        ens = ds.Ensemble(build, M, backend="loop")
        options = {"epochs": 3, "batch_size": 8, "lr": 0.05, "steps_per_epoch": 3, "twin": twin}
        ds.fit(ens, SOURCES[name](), functools.partial(objective, beta=beta), **options)
        ensembles.append(ens.twin if twin else ens)
    assert torch.equal(*map(weights, ensembles))
