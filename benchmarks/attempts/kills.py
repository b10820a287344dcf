"""Processes that are killed: trainings, sweeps, studies and saves."""

import contextlib
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import dissensus as ds
from attempts import children, study_runs, trainings
from attempts.cases import Case, Outcome, Settings
from attempts.children import Child
from attempts.trainings import Training, difference

EQUAL = "the resumed training ends equal to the uninterrupted one, to the bit"


def kills(settings: Settings) -> Iterator[Case]:
    """Trainings killed at random moments."""
    if settings.device == "cuda":
        subjects = [
            Training(network, backend, "cuda", epochs=200, checkpoint_seconds=seconds)
            for network, backend in (("mlp", "batched"), ("cnn", "streams"), ("cnn", "vmap"), ("normalised", "auto"))
            for seconds in (0.0, 0.05)
        ]
    else:
        subjects = [
            Training("mlp", "vmap"),
            Training("mlp", "batched"),
            Training("mlp", "loop"),
            Training("cnn", "loop"),
            Training("cnn", "vmap"),
            Training("normalised", "loop"),
            Training("normalised", "auto"),
        ]
    for subject in subjects:
        every = f", checkpoint every {subject.checkpoint_seconds} s" if subject.checkpoint_seconds else ""
        yield _series(f"{subject.network}, {subject.backend}{every}", Training.fit, subject)


def kills_sweep(settings: Settings) -> Iterator[Case]:
    """Sweeps killed at random moments."""
    for backend in ("vmap", "loop"):
        yield _series(f"normalised, {backend}", Training.sweep, Training("normalised", backend, settings.device))


def _series(name: str, train: Callable[..., Any], subject: Training) -> Case:
    @functools.cache
    def alone(subject: Training) -> tuple[dict[str, Any], float]:
        child = Child(train, subject)
        child.wait_ready()
        start = time.monotonic()
        ending = child.wait()
        if ending.value is None:
            raise RuntimeError(f"the uninterrupted training failed: {ending.problem} {ending.text[-300:]}")
        return ending.value, time.monotonic() - start

    def attempt(rng: random.Random, folder: Path) -> Outcome:
        chosen = _with_some_members(subject, rng)
        expected, seconds = alone(chosen)
        killed = 0
        for _ in range(rng.randint(1, 4)):
            child = Child(train, chosen, folder / "checkpoint")
            if rng.random() < 0.9:
                child.wait_ready()
            time.sleep(rng.uniform(0.0, max(0.05, seconds)))
            child.kill()
            ending = child.wait()
            if ending.crash:
                return Outcome(f"resuming after {killed} kills: {ending.crash}", counts={"kills": killed})
            if not ending.stopped:
                break
            killed += 1
        ending = children.call(train, chosen, folder / "checkpoint")
        if ending.value is None:
            return Outcome(f"resuming after {killed} kills: {ending.problem or ending.crash}", counts={"kills": killed})
        differs = difference(ending.value, expected)
        return Outcome(f"{differs}, after {killed} kills" if differs else "", counts={"kills": killed})

    return Case(name, EQUAL, attempt)


def _with_some_members(subject: Training, rng: random.Random) -> Training:
    """The training with another number of members: it decides where tensors lie in a stored file."""
    return subject if subject.device == "cuda" else replace(subject, members=rng.randint(2, 8))


def loads(settings: Settings) -> Iterator[Case]:
    """Loaded and resumed in one process: equal to the bit without any kill."""
    subjects = [(network, backend) for network in ("mlp", "cnn") for backend in ("loop", "vmap")]
    for network, backend in subjects:
        yield Case(
            f"load and predict, {network}, {backend}",
            "a loaded ensemble predicts what the saved one did, to the bit",
            functools.partial(_load, network, backend, settings.device),
        )
    for network, backend in subjects:
        subject = Training(network, backend, settings.device, epochs=2)
        yield Case(f"interrupt and resume, {network}, {backend}", EQUAL, functools.partial(_interrupt, subject))
    yield Case(
        "columns of a resumed history",
        "the history of a resumed training has the columns of an uninterrupted one, in their order",
        functools.partial(_columns, Training("mlp", "vmap", settings.device, epochs=3)),
    )


def _load(network: str, backend: str, device: str, rng: random.Random, folder: Path) -> Outcome:
    ending = children.call(_saved_and_loaded, network, backend, device, rng.randrange(10**6), folder)
    return Outcome(str(ending.problem or ending.crash or ending.value or ""))


def _saved_and_loaded(network: str, backend: str, device: str, seed: int, folder: Path) -> str:
    trainings.start(device)
    torch.manual_seed(seed)
    layers = trainings.BUILDS[network]
    ensemble = ds.Ensemble(layers, 1 + seed % 7, seed=seed, backend=backend).to(device)
    ensemble.save(folder / "saved")
    x = trainings.data(network, seed, 1 + seed % 97)[0].to(device)
    loaded = ds.Ensemble.load(folder / "saved", layers).to(device)
    return "" if torch.equal(ensemble.predict(x), loaded.predict(x)) else "predictions differ"


def _interrupt(subject: Training, rng: random.Random, folder: Path) -> Outcome:
    subject, steps = _with_some_members(subject, rng), rng.randint(1, 9)
    first = children.call(Training.fit, subject, folder / "checkpoint", steps)
    last = children.call(Training.fit, subject, folder / "checkpoint")
    expected = children.call(Training.fit, subject)
    if last.value is None:
        return Outcome(f"{first.crash}; {last.problem or last.crash}")
    differs = difference(last.value, expected.value)
    return Outcome(f"{differs}, interrupted at step {steps}" if differs else "")


def _columns(subject: Training, rng: random.Random, folder: Path) -> Outcome:
    children.call(Training.fit, subject, folder / "checkpoint", rng.randint(6, 14))
    last, expected = children.call(Training.fit, subject, folder / "checkpoint"), children.call(Training.fit, subject)
    if last.value is None:
        return Outcome(str(last.problem or last.crash))
    same = last.value["columns"] == expected.value["columns"]
    return Outcome("" if same else f"columns {last.value['columns'][0]}, not {expected.value['columns'][0]}")


def kills_study(settings: Settings) -> Iterator[Case]:
    """`study run --jobs 2` ended by signals."""
    del settings
    must = "no worker lives on, and the same command then ends with the rows of an uninterrupted run, to rounding"
    for when, number in (
        ("early", signal.SIGKILL),
        ("late", signal.SIGKILL),
        ("early", signal.SIGTERM),
        ("late", signal.SIGHUP),
    ):
        yield Case(f"{number.name}, {when}", must, functools.partial(_killed_study, when, number))
    yield Case(
        "SIGINT while the command starts",
        "the command exits without a traceback",
        _interrupted_import,
    )


GRACE = 8.0
"""Seconds after the end of a command within which its workers must end."""


@functools.cache
def _uninterrupted_rows() -> str:
    folder = Path(tempfile.mkdtemp(prefix="chaos-study-"))
    try:
        file = study_runs.write_tiny(folder, seeds=4)
        ending = children.call(study_runs.invoke, ["study", "run", str(file), "--scale", "smoke"], folder)
        if ending.value is None or ending.value.code:
            raise RuntimeError(f"the uninterrupted study failed: {ending}")
        return study_runs.rows(folder)
    finally:
        shutil.rmtree(folder)


def _killed_study(when: str, number: signal.Signals, rng: random.Random, folder: Path) -> Outcome:
    expected = _uninterrupted_rows()
    file = study_runs.write_tiny(folder, seeds=4)
    words = ["study", "run", str(file), "--scale", "smoke", "--jobs", "2"]
    with (folder / "errors").open("w") as errors:  # a pipe would stay open as long as a worker lives
        process = subprocess.Popen(
            [sys.executable, "-m", "dissensus", *words],
            cwd=folder,
            env=study_runs.environment(folder),
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
    session, deadline = process.pid, time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        workers = [pid for pid in _session(session) if pid != session]
        if len(workers) >= 2 and (when == "early" or list(folder.rglob("rows.json"))):
            break
        time.sleep(0.02)
    time.sleep(rng.uniform(0.0, 2.0 if when == "early" else 0.5))
    process.send_signal(number)
    try:
        process.wait(timeout=60)
        problems = []
    except subprocess.TimeoutExpired:
        process.kill()
        problems = [f"it does not end on {number.name}"]
    deadline = time.monotonic() + GRACE
    while (alive := _session(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    memory = sum(map(_resident, alive))
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    text = (folder / "errors").read_text()
    if alive:
        problems.append(f"{len(alive)} workers alive {GRACE:.0f} s later, {memory / 1e6:.0f} MB")
    if "Traceback" in text:
        problems.append(f"a traceback at the end: {text.strip().splitlines()[-1][:150]}")
    again = children.call(study_runs.invoke, words[:-2], folder)
    if again.value is None or again.value.code:
        problems.append(f"the same command then fails: {again.crash or again.value}")
    elif not study_runs.same_rows(study_runs.rows(folder), expected):
        problems.append("rows differ from those of an uninterrupted run")
    return Outcome("; ".join(problems), counts={"orphans": len(alive)})


def _session(session: int) -> list[int]:
    """Living processes of a session."""
    alive = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            alive.append(int(place.name))
    return alive


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _interrupted_import(rng: random.Random, folder: Path) -> Outcome:
    command = [sys.executable, "-m", "dissensus", "study", "show", "collusion/figure-2"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=study_runs.environment(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(rng.uniform(0.2, 1.5))
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    return Outcome(errors.strip().splitlines()[-1][:150] if "Traceback" in errors else "")


def leftovers(settings: Settings) -> Iterator[Case]:
    """Bytes that killed saves leave behind."""
    del settings
    must = "after the next save there are no bytes but those of that save"
    for name, function in (
        ("Ensemble.save", _save_wide),
        ("predict(file=)", _predict_wide),
        ("fit(checkpoint=)", _fit_wide),
        ("attacks.evaluate(folder=)", _attack),
    ):
        yield Case(name, must, functools.partial(_killed_saves, function))


KILLED_SAVES = 8


def _killed_saves(save: Callable[[Path, bool], Any], rng: random.Random, folder: Path) -> Outcome:
    clean, used = folder / "clean", folder / "used"
    for place in (clean, used):
        place.mkdir()
    first = children.call(save, clean, False)
    if first.crash or first.problem:
        raise RuntimeError(str(first.crash or first.problem))
    killed = 0
    for _ in range(KILLED_SAVES):
        child = Child(save, used, True)
        child.wait_ready()
        time.sleep(rng.uniform(0.0, 0.1))
        child.kill()
        ending = child.wait()
        if ending.crash:
            return Outcome(f"saving after {killed} kills: {ending.crash}")
        killed += ending.stopped
    last = children.call(save, used, False)
    if last.crash or last.problem:
        return Outcome(f"saving after {killed} kills: {last.crash or last.problem}")
    left, expected = _sizes(used), _sizes(clean)
    more = sum(left.values()) - sum(expected.values())
    counts = {"kills": killed, "bytes": max(0, more)}
    if more <= SLACK:
        return Outcome(counts=counts)
    largest = max(left, key=lambda name: left[name] if name not in expected else 0)
    return Outcome(f"{more / 1e6:.1f} MB left behind by {killed} kills, such as {largest}", counts=counts)


SLACK = 20_000
"""Bytes by which manifests and locks may differ."""


def _sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def _save_wide(folder: Path, repeat: bool) -> None:
    torch.set_num_threads(1)
    ensembles = [ds.Ensemble(trainings.wide, MEMBERS, seed=seed, backend="loop") for seed in (1, 0)]
    children.ready()
    for ensemble in ensembles * (20 if repeat else 1):
        ensemble.save(folder / "saved")


MEMBERS = 3


def _predict_wide(folder: Path, repeat: bool) -> None:
    torch.set_num_threads(1)
    ensemble = ds.Ensemble(trainings.wide, MEMBERS, backend="loop")
    x = torch.zeros(20_000, 64)
    children.ready()
    for _ in range(20 if repeat else 1):
        ensemble.predict(x, file=folder / "outputs.npy")


def _fit_wide(folder: Path, repeat: bool) -> None:
    """A training that writes a checkpoint after every step; without ``repeat`` it goes to its end."""
    torch.set_num_threads(1)
    del repeat
    ensemble = ds.Ensemble(trainings.wide, MEMBERS, backend="loop")
    x, y = torch.zeros(48, 64), torch.zeros(48, dtype=torch.int64)
    objective = functools.partial(ds.objectives.independent, loss="cross_entropy")
    saving: Any = {"checkpoint": folder / "checkpoint", "resume": True, "checkpoint_seconds": 0.0}
    ds.fit(ensemble, (x, y), objective, epochs=4, batch_size=16, progress=trainings.Signals(None), **saving)


def _attack(folder: Path, repeat: bool) -> None:
    torch.set_num_threads(1)
    del repeat
    ensemble = trainings.ensemble_of("cnn", 0)
    x, y = trainings.data("cnn")
    children.ready()
    ds.attacks.evaluate(ensemble, (x, y), "quick", epsilon=0.1, examples=32, batch_size=16, folder=folder / "parts")
