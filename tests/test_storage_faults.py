"""Storage under faults: second writers, kills, damage, full disks. Readers see the old contents or the new ones."""

import errno
import itertools
import json
import multiprocessing
import os
import pickle
import random
import resource
import signal
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import dissensus as ds
from dissensus import storage
from dissensus.data.features import FeatureCache, cached_features
from dissensus.train import checkpoint as checkpoints

FORK = multiprocessing.get_context("fork")
ALIGNED = 64
"""Bytes to which the memory of new tensors is aligned."""


def build():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, 5))


def images(count=8):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 1, 8, 8, generator=generator), torch.randint(5, (count,), generator=generator)


cross_entropy = partial(ds.objectives.independent, loss="cross_entropy")
mse = partial(ds.objectives.augmented, loss="mse", pool="score")


def in_child(function, *arguments):
    """Run a function in a process of its own; return what it returns, or the text of its error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        try:
            result = ["returned", function(*arguments)]
        except BaseException as reason:
            result = [type(reason).__name__, str(reason)]
        os.write(write, json.dumps(result).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    return json.loads(text) if text else ["signal", os.WTERMSIG(status)]


def places(ensemble):
    """Where members lie: alignment and strides of every tensor."""
    return {name: (t.data_ptr() % ALIGNED, t.stride()) for name, t in ensemble.body.tensors().items()}


# Memory of what is loaded


def test_loaded_tensors_are_aligned_as_new_ones(tmp_path):
    """Kernels round differently for other alignments."""
    for width in range(1, 9):  # headers of the file have different lengths
        tensors = {"a" * width: torch.randn(width), "b": torch.randn(3, width), "c": torch.arange(width)}
        storage.write_folder(tmp_path / f"{width}", "test", tensors, {})
        loaded, _ = storage.read_folder(tmp_path / f"{width}", "test")
        assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
        assert {tensor.data_ptr() % ALIGNED for tensor in loaded.values()} == {0}
        for tensor in loaded.values():
            tensor.zero_()  # memory of its own, not the file's
        again, _ = storage.read_folder(tmp_path / f"{width}", "test")
        assert torch.equal(again["b"], tensors["b"])


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_trained_ensemble_lies_in_memory_as_before_it_was_saved(tmp_path, channels_last):
    ensemble = ds.Ensemble(build, 3, backend="loop")
    ds.fit(ensemble, images(), cross_entropy, epochs=1, channels_last=channels_last)
    assert any(place for place, _ in places(ensemble).values()), "views of a matrix are not all aligned"
    ensemble.save(tmp_path)
    loaded = ds.Ensemble.load(tmp_path, build)
    assert places(loaded) == places(ensemble)
    assert torch.equal(loaded.predict(images()[0]), ensemble.predict(images()[0]))


def test_a_layout_that_would_waste_memory_is_not_stored(tmp_path):
    column, row = torch.arange(100.0).view(10, 10)[:, 3], torch.arange(3.0).expand(4, 3)
    storage.write_folder(tmp_path, "test", {"column": column, "row": row}, {})
    loaded, manifest = storage.read_folder(tmp_path, "test")
    assert manifest["layout"] == {"sizes": [], "tensors": {}}
    assert torch.equal(loaded["column"], column)
    assert torch.equal(loaded["row"], row)


def test_folders_of_earlier_releases_have_no_layout(tmp_path):
    ensemble = ds.Ensemble(build, 2, backend="loop")
    ensemble.save(tmp_path)
    manifest = storage.read_record(tmp_path / storage.MANIFEST)
    del manifest["layout"]
    storage.write_record(tmp_path / storage.MANIFEST, manifest)
    loaded = ds.Ensemble.load(tmp_path, build)
    assert torch.equal(loaded.predict(images()[0]), ensemble.predict(images()[0]))


# Second writers


def save_often(folder, seed, times):
    tensors = {"x": torch.full((1000,), float(seed))}
    for _ in range(times):
        storage.write_folder(folder, "test", tensors, {"seed": seed})


@pytest.mark.slow(cases=["3"])
@pytest.mark.parametrize("processes", [2, 3])
def test_saves_into_one_folder_wait_for_each_other_and_readers_see_the_old_or_the_new(tmp_path, processes):
    save_often(tmp_path, 0, 1)
    writers = [FORK.Process(target=save_often, args=(tmp_path, seed, 10)) for seed in range(processes)]
    for writer in writers:
        writer.start()
    loads = 0
    while any(writer.is_alive() for writer in writers) or not loads:
        tensors, manifest = storage.read_folder(tmp_path, "test")
        assert set(tensors["x"].tolist()) == {float(manifest["seed"])}
        loads += 1
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * processes
    storage.read_folder(tmp_path, "test")
    assert len(list(tmp_path.iterdir())) == 3, "manifest, weights and lock"


def test_a_reader_meets_every_moment_of_an_overwrite(tmp_path, monkeypatch):
    """The folder is overwritten once between each two steps of a reader."""
    saved = itertools.cycle((1, 2))
    save_often(tmp_path, next(saved), 1)
    steps = {
        "is_file": type(tmp_path).is_file,
        "safe_open": storage.safe_open,
        "file_digest": storage.hashlib.file_digest,
    }
    for name, original in steps.items():
        overwrites = [1]

        def step(*arguments, original=original, overwrites=overwrites, **options):
            if overwrites:
                overwrites.pop()
                save_often(tmp_path, next(saved), 1)
            return original(*arguments, **options)

        where = {"is_file": type(tmp_path), "safe_open": storage, "file_digest": storage.hashlib}[name]
        monkeypatch.setattr(where, name, step)
        tensors, manifest = storage.read_folder(tmp_path, "test")
        monkeypatch.undo()
        assert not overwrites
        assert set(tensors["x"].tolist()) == {float(manifest["seed"])}


def test_a_lock_ends_with_its_process_even_where_children_live_on(tmp_path):
    """A lock belongs to an open file, which forked children (workers of a loader) share unless they close it."""
    ready, go_on = FORK.Event(), FORK.Event()
    read, write = os.pipe()

    def child_of_holder():
        ready.set()
        go_on.wait(60)

    holder = os.fork()
    if holder == 0:
        with storage.locked(tmp_path, wait=False):
            worker = os.fork()
            if worker == 0:
                os.close(write)
                child_of_holder()
                os._exit(0)
            os.write(write, b"x")
            signal.pause()
    assert ready.wait(60)
    assert os.read(read, 1) == b"x"
    with pytest.raises(BlockingIOError, match=f"process {holder} on"), storage.locked(tmp_path, wait=False):
        pass
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    with storage.locked(tmp_path, wait=False):
        pass
    go_on.set()


def test_a_thread_saves_into_a_folder_that_it_has_locked(tmp_path):
    with storage.locked(tmp_path, wait=False):
        save_often(tmp_path, 1, 1)  # does not wait for itself
        with pytest.raises(BlockingIOError), storage.locked(tmp_path, wait=False):
            pass
        others: list[str] = []

        def other():
            try:
                with storage.locked(tmp_path, wait=False):
                    others.append("locked")
            except BlockingIOError as reason:
                others.append(str(reason))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert f"process {os.getpid()}" in others[0]
    assert storage.read_folder(tmp_path, "test")[1]["seed"] == 1


def test_without_locks_saving_works_and_says_so(tmp_path, monkeypatch, caplog):
    import fcntl

    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    fresh, old = (tmp_path / f".{number:016x}.unfinished" for number in (1, 2))
    for leftover in (fresh, old):
        leftover.mkdir()
        (leftover / "weights").write_bytes(b"part")
    os.utime(old, (0, 0))
    save_often(tmp_path, 3, 1)
    assert storage.read_folder(tmp_path, "test")[1]["seed"] == 3
    assert "does not support locks" in caplog.text
    assert fresh.exists(), "another process may be writing it"
    assert not old.exists()


# Kills and left-overs


def killed_save(folder, moment):
    """A process that saves until a moment (a call by name, counted) and then kills itself."""
    name, count = moment
    original, calls = getattr(storage, name), [0]

    def step(*arguments, **options):
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(storage, name, step)
    save_often(folder, 2, 1)


MOMENTS = [("save_file", 1), ("file_digest", 1), ("_to_disk", 1), ("write_record", 1), ("_to_disk", 2)]


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_killed_save_leaves_the_old_contents_and_the_next_one_removes_its_files(tmp_path, moment):
    save_often(tmp_path, 1, 1)
    assert in_child(killed_save, tmp_path, moment) == ["signal", signal.SIGKILL]
    assert storage.read_folder(tmp_path, "test")[1]["seed"] == 1
    assert len(list(tmp_path.iterdir())) > 3, "something is left over"
    save_often(tmp_path, 3, 1)
    assert storage.read_folder(tmp_path, "test")[1]["seed"] == 3
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.slow
def test_saves_killed_at_random_moments_leave_the_old_or_the_new(tmp_path):
    random.seed(5)
    values = torch.randn(400_000)

    def save(number):
        storage.write_folder(tmp_path, "test", {"x": values + number}, {"number": number})

    save(0)
    numbers = [0]
    for number in range(1, 41):
        writer = FORK.Process(target=save, args=(number,))
        writer.start()
        writer.join(random.uniform(0.0, 0.02))
        writer.kill()
        writer.join()
        tensors, manifest = storage.read_folder(tmp_path, "test")
        numbers.append(manifest["number"])
        assert numbers[-1] in (numbers[-2], number)
        assert torch.equal(tensors["x"], values + numbers[-1])
    save(99)
    assert len(list(tmp_path.iterdir())) == 3


def test_left_overs_of_others_stay(tmp_path):
    """Temporary files of a live writer, of other programs, and files that only look alike."""
    file = tmp_path / "report.json"
    kept = [".notes.unfinished", "b.unfinished", ".tmpAbC123", ".tmpnotes", "weights-0000000000000000.safetensors"]
    for name in kept:
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "chapter.unfinished").mkdir()
    (tmp_path / "chapter.unfinished" / "text").write_bytes(b"mine")
    with storage.temporary_beside(file) as live:
        in_child(storage.write_atomically, file, b"other")
        assert file.read_bytes() == b"other"
        assert live.exists()
        in_child(save_often, tmp_path, 1, 1)
        assert live.exists()
    assert not live.exists()
    in_child(save_often, tmp_path, 1, 2)
    assert all((tmp_path / name).read_bytes() == b"mine" for name in [*kept, "chapter.unfinished/text"])


def test_left_overs_of_earlier_releases_are_removed_when_they_are_old(tmp_path):
    part = (8).to_bytes(8, "little") + b'{"x":'
    for name, content in {".tmpOldOne": part, ".tmpOthers": b"something else", ".tmpNewOne": part}.items():
        (tmp_path / name).write_bytes(content)
    for name in (".tmpOldOne", ".tmpOthers"):
        os.utime(tmp_path / name, (0, 0))
    save_often(tmp_path, 1, 1)
    assert sorted(path.name for path in tmp_path.glob(".tmp*")) == [".tmpNewOne", ".tmpOthers"]


def test_a_killed_write_of_one_file_is_cleaned_up_by_the_next(tmp_path):
    def killed():
        with storage.temporary_beside(tmp_path / "plan.json") as temporary:
            temporary.write_bytes(b"part")
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(killed) == ["signal", signal.SIGKILL]
    (leftover,) = tmp_path.iterdir()
    storage.write_atomically(tmp_path / "other.json", b"{}")
    assert leftover.exists(), "of another file"
    storage.write_atomically(tmp_path / "plan.json", b"{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.json", "plan.json"]


# Full disks


def limited(function, *arguments):
    """Call a function where files may have 100,000 bytes at most."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    return function(*arguments)


def test_a_full_disk_is_one_sentence_and_leaves_the_old_contents(tmp_path):
    save_often(tmp_path, 1, 1)
    error, text = in_child(limited, storage.write_folder, tmp_path, "test", {"x": torch.zeros(100_000)}, {})
    assert error == "OSError"
    assert text.startswith(f"{tmp_path} could not be written: File too large. What was there before is unchanged.")
    error, text = in_child(limited, storage.write_atomically, tmp_path / "a.json", bytes(200_000))
    assert error == "OSError"
    assert text.startswith(f"{tmp_path / 'a.json'} could not be written: File too large")
    assert storage.read_folder(tmp_path, "test")[1]["seed"] == 1
    assert len(list(tmp_path.iterdir())) == 3


def test_a_full_disk_is_an_os_error_with_its_number(tmp_path, monkeypatch):
    def full(*_, **__):
        raise storage.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(storage, "save_file", full)
    with pytest.raises(OSError, match="could not be written: No space left on device") as caught:
        save_often(tmp_path, 1, 1)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space left on device") as caught, storage.write_errors_told(tmp_path):
        Path("/dev/full").write_bytes(b"x")
    assert caught.value.errno == errno.ENOSPC


# Damage


def mutations(content, seed, count):
    """Damaged copies of a file: flipped, deleted and doubled ranges of bytes at every place, and cut-off ends."""
    draw = random.Random(seed)
    step = max(1, len(content) // count)
    for start in range(0, len(content), step):
        stop = min(len(content), start + draw.randint(1, step))
        flipped = bytes(byte ^ draw.randint(1, 255) for byte in content[start:stop])
        yield draw.choice(
            [
                content[:start] + flipped + content[stop:],
                content[:start] + content[stop:],
                content[:stop] + content[start:],
                content[:start],
            ]
        )


@pytest.mark.slow(cases=["many"])
@pytest.mark.parametrize("count", [pytest.param(40, id="few"), pytest.param(400, id="many")])
def test_no_damage_is_taken_for_the_real_thing(tmp_path, count):
    ensemble = ds.Ensemble(build, 2)
    ensemble.save(tmp_path)
    files = [path for path in tmp_path.iterdir() if path.name != storage.LOCK]
    assert len(files) == 2
    for file in files:
        whole = file.read_bytes()
        for damaged in mutations(whole, 1, count):
            file.write_bytes(damaged)
            try:
                ds.Ensemble.load(tmp_path, build)
            except ds.StorageError:
                continue
            assert damaged == whole or json.loads(damaged) == json.loads(whole), "other than by spaces"
        file.write_bytes(whole)
    assert ds.Ensemble.load(tmp_path, build).members == 2


def test_a_forged_layout_is_refused(tmp_path):
    save_often(tmp_path, 1, 1)
    record = storage.read_record(tmp_path / storage.MANIFEST)
    for entry, sizes in [([0, 0, [1]], [10**15]), ([0, 500, [1]], [1000]), ([3, 0, [1]], []), ("x", [1000])]:
        layout = {"sizes": sizes, "tensors": {"x": entry}}
        storage.write_record(tmp_path / storage.MANIFEST, {**record, "layout": layout})
        with pytest.raises(ds.StorageError, match="is damaged"):
            storage.read_folder(tmp_path, "test")


# Checkpoints


def values():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=generator)
    return x, x[:, :1] * x[:, 1:2]


def small():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def fit(folder, epochs=2, **options):
    ensemble = ds.Ensemble(small, 2, backend="loop")
    settings = {"epochs": epochs, "batch_size": 16, "checkpoint": folder, "resume": True, "checkpoint_seconds": 0.0}
    ds.fit(ensemble, values(), partial(mse, beta=0.5), **{**settings, **options})
    return ensemble


def sweep(folder, **options):
    """Two runs, in a part each."""
    return ds.sweep(
        small,
        values(),
        mse,
        grid={"beta": [0.0, 0.9]},
        members=2,
        epochs=1,
        batch_size=16,
        backend="loop",
        max_memory=5_000,
        checkpoint=folder,
        resume=True,
        checkpoint_seconds=0.0,
        **options,
    )


def weights_of(result):
    bodies = [group.body for group in result.groups] if isinstance(result, ds.Sweep) else [result.body]
    return [tensor.detach().clone() for body in bodies for tensor in body.tensors().values()]


def equal(result, other):
    return all(torch.equal(a, b) for a, b in zip(weights_of(result), weights_of(other), strict=True))


@pytest.mark.slow(cases=["sweep"])
@pytest.mark.parametrize("train", [fit, sweep], ids=["fit", "sweep"])
def test_a_second_training_in_one_folder_is_refused_and_harms_nothing(tmp_path, train):
    attempts = []

    def second(_):
        if not attempts:
            attempts.append(in_child(train, tmp_path))

    trained = train(tmp_path, progress=second)
    ((error, text),) = attempts
    assert error == "StorageError"
    assert text.startswith(f"{tmp_path} is in use by another training, of process {os.getpid()} on ")
    assert equal(trained, train(tmp_path / "alone"))
    assert equal(train(tmp_path), trained), "the folder is whole, and free again"


@pytest.mark.slow
def test_trainings_that_start_at_once_in_one_folder(tmp_path):
    """One of them trains; the others end with one sentence, or find it done."""
    results = FORK.Queue()
    start = FORK.Barrier(3)

    def attempt():
        torch.set_num_threads(1)
        start.wait(60)
        try:
            fit(tmp_path, epochs=4)
            results.put("trained")
        except ds.StorageError as reason:
            results.put("refused" if "is in use by another training" in str(reason) else str(reason))
        except BaseException as reason:
            results.put(repr(reason))

    processes = [FORK.Process(target=attempt) for _ in range(3)]
    for process in processes:
        process.start()
    ends = sorted(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert set(ends) <= {"trained", "refused"}
    assert "trained" in ends
    assert equal(fit(tmp_path, epochs=4), fit(None, epochs=4, resume=False))


@pytest.mark.slow(cases=["sweep"])
@pytest.mark.parametrize("train", [fit, sweep], ids=["fit", "sweep"])
def test_a_relative_folder_does_not_follow_the_working_directory(tmp_path, monkeypatch, train):
    (tmp_path / "start").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    train("kept", progress=lambda _: os.chdir(tmp_path / "other"))
    assert list((tmp_path / "other").iterdir()) == []
    folder = tmp_path / "start" / "kept"
    assert list(folder.glob("step-*" if train is fit else "part-*/step-*"))
    stopped = {"progress": lambda _: pytest.fail("it is trained already")}
    monkeypatch.chdir(tmp_path / "start")
    train("kept", **stopped)


def test_a_resumed_training_has_its_tensors_where_an_uninterrupted_one_has_them(tmp_path):
    class Stop(Exception):
        pass

    def stop(progress):
        if progress.step >= 4:
            raise Stop

    options = {"epochs": 3, "batch_size": 3, "checkpoint_seconds": 0.0}
    whole, resumed = (ds.Ensemble(build, 2, backend="loop") for _ in range(2))
    ds.fit(whole, images(), cross_entropy, **options, checkpoint=tmp_path / "whole")
    with pytest.raises(Stop):
        ds.fit(resumed, images(), cross_entropy, **options, checkpoint=tmp_path / "kept", progress=stop)
    again = ds.Ensemble(build, 2, backend="loop")
    ds.fit(again, images(), cross_entropy, **options, checkpoint=tmp_path / "kept", resume=True)
    assert places(again) == places(whole)
    assert equal(again, whole)


def test_swapped_parts_and_a_changed_plan_are_refused(tmp_path):
    sweep(tmp_path)
    parts = sorted(tmp_path.glob("part-*"))
    first, second = parts
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    with pytest.raises(ds.StorageError, match="belongs to another training: 'part' differ"):
        sweep(tmp_path)
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    plan = tmp_path / "plan.json"
    whole = plan.read_bytes()
    record = storage.read_record(plan, checkpoints.FORMATS)
    parts = record["parts"]
    plan.write_text(json.dumps({**record, "parts": parts[::-1]}))
    with pytest.raises(ds.StorageError, match=r"plan.json was changed after it was saved.* Give another folder\."):
        sweep(tmp_path)
    storage.write_record(plan, {**record, "parts": parts[::-1]})  # with a checksum to match
    with pytest.raises(ds.StorageError, match="belongs to another training: 'part' differ"):
        sweep(tmp_path)
    storage.write_record(plan, {**record, "parts": [parts[0], parts[0]]})
    with pytest.raises(ds.StorageError, match="does not list every run of the sweep once"):
        sweep(tmp_path)
    plan.write_bytes(whole)
    sweep(tmp_path)


@pytest.mark.slow(cases=["many"])
@pytest.mark.parametrize("count", [pytest.param(6, id="few"), pytest.param(80, id="many")])
def test_damage_to_a_stored_sweep_is_refused_or_does_not_count(tmp_path, count):
    expected = sweep(tmp_path)
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file() and path.name != storage.LOCK]
    whole = {path: path.read_bytes() for path in files}
    damages = [(file, damaged) for n, file in enumerate(files) for damaged in mutations(whole[file], n, 20)]
    plans = [(file, damaged) for file, damaged in damages if file.name == "plan.json"]
    refused = 0
    draw = random.Random(1)
    for file, damaged in draw.sample(damages, count // 2) + draw.sample(plans, min(len(plans), count // 2)):
        file.write_bytes(damaged)
        try:
            assert equal(sweep(tmp_path), expected), f"another result with a damaged {file.name}"
        except ds.StorageError:
            refused += 1
        for path in {path for path in tmp_path.rglob("*") if path.is_file()} - whole.keys():
            path.unlink()
        for path, content in whole.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
    assert refused >= count // 8
    assert equal(sweep(tmp_path), expected)


@pytest.mark.slow
def test_a_damaged_choice_of_backends_is_made_anew(tmp_path, caplog):
    ds.fit(ds.Ensemble(small, 2), values(), partial(mse, beta=0.5), epochs=1, checkpoint=tmp_path / "auto")
    file = tmp_path / "auto" / "choices.json"
    content = json.loads(file.read_bytes())
    content["choices"][0][1][0] = "loop" if content["choices"][0][1][0] != "loop" else "vmap"
    file.write_text(json.dumps(content))
    options = {"epochs": 1, "checkpoint": tmp_path / "auto", "resume": True}
    ds.fit(ds.Ensemble(small, 2), values(), partial(mse, beta=0.5), **options)
    assert "backends are chosen anew" in caplog.text


def test_the_beginning_of_another_twin_is_refused(tmp_path):
    options = {"epochs": 1, "twin": True, "resume": True}
    for name, lr in (("one", 0.1), ("two", 0.2)):
        ensemble = ds.Ensemble(small, 2, backend="loop")
        ds.fit(ensemble, values(), partial(mse, beta=0.5), checkpoint=tmp_path / name, lr=lr, **options)
    (tmp_path / "two" / "twin" / "beginning").rename(tmp_path / "aside")
    (tmp_path / "one" / "twin" / "beginning").rename(tmp_path / "two" / "twin" / "beginning")
    ensemble = ds.Ensemble(small, 2, backend="loop")
    with pytest.raises(ds.StorageError, match="beginning belongs to another training: 'lr' differ"):
        ds.fit(ensemble, values(), partial(mse, beta=0.5), checkpoint=tmp_path / "two", lr=0.2, **options)


# Predictions


def test_a_prediction_on_a_full_disk_is_one_sentence_and_leaves_the_old_file(tmp_path):
    ensemble, file = ds.Ensemble(small, 2, backend="loop"), tmp_path / "outputs.npy"
    before = ensemble.predict(torch.zeros(10, 6), file=file).clone()
    error, text = in_child(limited, lambda: ensemble.predict(torch.zeros(50_000, 6), file=file).shape)
    assert error == "OSError"
    assert text.startswith(f"{file} could not be written: File too large. What was there before is unchanged.")
    assert list(tmp_path.iterdir()) == [file]
    assert torch.equal(ensemble.predict(torch.zeros(10, 6)), before)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_space_is_reserved_before_outputs_are_written(tmp_path, monkeypatch, code):
    """Without a reservation, the file has holes, and writing to one on a full disk ends the process by SIGBUS."""

    def full(*_):
        raise OSError(code, os.strerror(code))

    ensemble = ds.Ensemble(small, 2, backend="loop")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=f"could not be written: {os.strerror(code)}") as caught:
        ensemble.predict(torch.zeros(10, 6), file=tmp_path / "outputs.npy")
    assert caught.value.errno == code
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "posix_fallocate", partial(full_with, errno.EOPNOTSUPP))
    array = storage.new_array(tmp_path / "array.npy", torch.zeros(0).numpy().dtype, (3, 400_000))
    assert float(array.sum()) == 0.0
    status = (tmp_path / "array.npy").stat()
    assert status.st_blocks * 512 >= status.st_size, "no holes where the system cannot reserve"


def full_with(code, *_):
    raise OSError(code, os.strerror(code))


def test_the_next_prediction_removes_what_a_killed_one_left(tmp_path):
    ensemble, file = ds.Ensemble(small, 2, backend="loop"), tmp_path / "outputs.npy"

    class Killing(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            if index == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.zeros(6)

    assert in_child(lambda: ensemble.predict(Killing(), 2, file=file)) == ["signal", signal.SIGKILL]
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.endswith(".unfinished")
    with storage.temporary_beside(tmp_path / "outputs.npy") as live:
        assert not leftover.exists()
        outputs = ensemble.predict(torch.zeros(8, 6), file=file)
        assert live.exists()
    assert list(tmp_path.iterdir()) == [file]
    assert outputs.data_ptr() % ALIGNED == 0


def test_a_prediction_returns_its_outputs_even_if_another_replaces_the_file(tmp_path, monkeypatch):
    ensemble, file = ds.Ensemble(small, 2, backend="loop"), tmp_path / "outputs.npy"
    x = values()[0]
    expected = ensemble.predict(x)
    replace = Path.replace

    def replaced(self, target):
        result = replace(self, target)
        Path(target).write_bytes(b"another prediction")
        return result

    monkeypatch.setattr(Path, "replace", replaced)
    outputs = ensemble.predict(x, file=file)
    monkeypatch.undo()
    assert outputs.shape == expected.shape


def test_a_relative_file_does_not_follow_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)

    class Moving(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            os.chdir(tmp_path / "other")
            return torch.zeros(6)

    ds.Ensemble(small, 2, backend="loop").predict(Moving(), 2, file="outputs.npy")
    assert (tmp_path / "outputs.npy").exists()
    assert list((tmp_path / "other").iterdir()) == []


# Memory that runs out


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
    MemoryError(),
]


class Exhausting(nn.Module):
    """A network whose passes run out of memory."""

    error: BaseException = ERRORS[0]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x):
        raise self.error


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_prediction_that_runs_out_of_memory_says_what_helps(error, monkeypatch):
    monkeypatch.setattr(Exhausting, "error", error)
    ensemble = ds.Ensemble(Exhausting, 3, backend="loop")
    advice = (
        r"prediction ran out of memory on cpu with 3 members and batches of 64 examples\. What helps: batch_size=32"
    )
    with pytest.raises(ds.OutOfMemory, match=advice + r".*file=\"outputs.npy\".*fewer members"):
        ensemble.predict(torch.zeros(100, 6), 64)


@pytest.mark.slow(fast=["MemoryError"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_sweep_that_runs_out_of_memory_says_what_helps(error, monkeypatch, tmp_path):
    monkeypatch.setattr(Exhausting, "error", error)
    options = {"grid": {"beta": [0.0, 1.0]}, "members": 2, "epochs": 1, "batch_size": 16, "backend": "loop"}
    with pytest.raises(
        ds.OutOfMemory, match=r"training ran out of memory on cpu .*2 members. What helps: .*batch \(now 16"
    ):
        ds.sweep(Exhausting, values(), mse, checkpoint=tmp_path / "kept", **options)
    assert not (tmp_path / "kept").exists(), "nothing was trained"
    swept = ds.sweep(small, values(), mse, **options)

    def exhausted(*_, **__):
        raise error

    monkeypatch.setattr(swept.groups[0].body, "run", exhausted)
    with pytest.raises(ds.OutOfMemory, match="prediction ran out of memory on cpu with 4 members"):
        swept.outputs(values()[0])


# What is in the way


@contextmanager
def no_waiting(seconds=10):
    """A block that must end soon: nothing waits for a pipe."""

    def late(*_):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def in_the_way(path, kind):
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "dangling link":
        path.symlink_to(path.parent / "nowhere" / "else")
    else:
        path.write_text("mine")


def test_only_regular_files_are_read(tmp_path):
    with no_waiting():
        for kind in ("pipe", "folder", "dangling link"):
            in_the_way(tmp_path / kind, kind)
            with pytest.raises(OSError, match="regular|directory"):
                storage.read_regular(tmp_path / kind)
            with pytest.raises(OSError, match="regular|directory"):
                storage.file_digest(tmp_path / kind)
        with pytest.raises(OSError, match="regular"):
            storage.read_regular(Path("/dev/zero"))
    (tmp_path / "file").write_bytes(b"content")
    assert storage.read_regular(tmp_path / "file") == b"content"


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_manifest_that_is_no_file_stops_nobody(tmp_path, kind):
    ensemble = ds.Ensemble(small, 2, backend="loop")
    in_the_way(tmp_path / "manifest.json", kind)
    os.mkfifo(tmp_path / ".0123456789abcdef.unfinished")
    with no_waiting():
        with pytest.raises(ds.StorageError, match="holds no manifest.json"):
            ds.Ensemble.load(tmp_path, small)
        if kind == "folder":
            with pytest.raises(OSError, match=r"manifest.json could not be written: Is a directory\. Remove what is"):
                ensemble.save(tmp_path)
        else:
            ensemble.save(tmp_path)
            assert ds.Ensemble.load(tmp_path, small).members == 2


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_lock_that_is_no_file_is_one_sentence(tmp_path, kind):
    in_the_way(tmp_path / ".lock", kind)
    with no_waiting():
        for write in (ds.Ensemble(small, 2).save, fit, cached):
            with pytest.raises(ds.StorageError, match=r"\.lock must be a file, .*; remove what is there"):
                write(tmp_path)


def cached(folder):
    return cached_features(torch.nn.Linear(6, 2), (torch.zeros(4, 6), torch.zeros(4)), folder)


def attacked(folder):
    linear = torch.nn.Linear(6, 3).eval()
    attack = partial(ds.attacks.fgsm, epsilon=0.1)
    return ds.attacks.over(attack, linear, torch.rand(4, 6), torch.arange(4) % 3, folder=folder, batch_size=2)


WRITERS = {
    "checkpoint": fit,
    "path": lambda folder: ds.Ensemble(small, 2).save(folder),
    "folder": cached,
    "folder of attacks": attacked,
}
PLACES = {
    "a file": ("file", "which is a file"),
    "below a file": ("file/sub", "which cannot be made: Not a directory"),
    "a dangling link": ("dangling link", "which is a link to a file, or to nothing"),
    "too long": ("x" * 300, "which cannot be made: File name too long"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_place_that_cannot_be_a_folder_is_one_sentence(tmp_path, writer, place):
    for kind in ("file", "dangling link"):
        in_the_way(tmp_path / kind, kind)
    name, problem = PLACES[place]
    argument = writer.split()[0]
    with pytest.raises(ds.StorageError, match=rf"^`{argument}` must be a folder.*{name}, {problem}\.$"):
        WRITERS[writer](tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["dangling link", "file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("place", ["", "a\0b", "a\ud800", 3, b"a", None])
@pytest.mark.parametrize("writer", [*WRITERS, "file"])
def test_what_is_no_path_is_refused_by_name(tmp_path, monkeypatch, writer, place, unchecked):
    monkeypatch.chdir(tmp_path)
    if place is None and writer not in ("path", "folder"):
        pytest.skip("None is no folder there")
    write = WRITERS.get(writer, lambda file: ds.Ensemble(small, 2).predict(torch.zeros(3, 6), file=file))
    with pytest.raises((ValueError, TypeError), match=rf"^`{writer.split()[0]}` must be a path"):
        write(place)
    assert not os.listdir(tmp_path)


def test_relative_folders_of_attacks_and_features_do_not_follow_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def moving(model, x, y):
        os.chdir(tmp_path / "elsewhere")
        return ds.attacks.fgsm(model, x, y, epsilon=0.1)

    linear = torch.nn.Linear(6, 3).eval()
    ds.attacks.over(moving, linear, torch.rand(4, 6), torch.arange(4) % 3, folder="attacked", batch_size=2)
    assert len(list(tmp_path.glob("attacked/0*"))) == 2
    monkeypatch.chdir(tmp_path)

    def network(x):
        os.chdir(tmp_path / "elsewhere")
        return 2 * x

    cache = cached_features(network, (torch.ones(4, 6), torch.zeros(4)), "features", batch_size=2)
    assert len(pickle.loads(pickle.dumps(cache))) == 4
    monkeypatch.chdir(tmp_path)
    cache = FeatureCache.open("features")
    os.chdir(tmp_path / "elsewhere")
    assert len(pickle.loads(pickle.dumps(cache))) == 4
    assert not os.listdir(tmp_path / "elsewhere")


def test_features_do_not_replace_arrays_of_others(tmp_path):
    np.save(tmp_path / "targets.npy", np.arange(3))
    with pytest.raises(ds.StorageError, match="`folder` must be empty .* a file targets.npy of another program"):
        cached(tmp_path)
    assert np.load(tmp_path / "targets.npy").tolist() == [0, 1, 2]
    assert os.listdir(tmp_path) == ["targets.npy"]


def test_a_save_does_not_replace_a_manifest_of_others(tmp_path):
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    with pytest.raises(ds.StorageError, match="a manifest.json of another program; give another folder"):
        ds.Ensemble(small, 2).save(tmp_path)
    assert (tmp_path / "manifest.json").read_text() == '{"name": "a web page"}'


def test_a_prediction_follows_links_and_replaces_regular_files_only(tmp_path):
    ensemble, x = ds.Ensemble(small, 2, backend="loop"), torch.rand(3, 6)
    (tmp_path / "real.npy").write_text("old")
    (tmp_path / "link.npy").symlink_to("real.npy")
    outputs = ensemble.predict(x, file=tmp_path / "link.npy")
    assert (tmp_path / "link.npy").is_symlink()
    assert np.array_equal(np.load(tmp_path / "real.npy"), outputs)
    in_the_way(tmp_path / "pipe.npy", "pipe")
    (tmp_path / "folder.npy").mkdir()
    never = DataLoader([], 1)  # it would be refused for its length, if it were read
    with no_waiting():
        for name in ("pipe.npy", "folder.npy", "/dev/fd/1.npy"):
            with pytest.raises(ValueError, match="^`file` must be a regular file, or a place for a new one; got "):
                ensemble.predict(never, file=tmp_path / name)
        with pytest.raises(ValueError, match="^`file` must lie in a folder; got .*, where .*real.npy is a file"):
            ensemble.predict(never, file=tmp_path / "real.npy" / "a.npy")
        with pytest.raises(ValueError, match="^`file` must be .*File name too long"):
            ensemble.predict(never, file=tmp_path / ("x" * 300 + ".npy"))
    assert (tmp_path / "pipe.npy").is_fifo()
