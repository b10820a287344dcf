"""A disk that is full: a sentence, old data as it was, and no signal."""

import contextlib
import errno
import functools
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dissensus as ds
from attempts import children, study_runs, trainings
from attempts.cases import Case, Outcome, Settings

MUST = "the work ends well or in a sentence, old data is as it was, and with more space it works again"


@dataclass(frozen=True)
class Work:
    """Something that writes."""

    name: str
    do: Callable[[Path, int], Any]
    """Writes below a folder; the number tells old from new."""
    check: Callable[[Path], str]
    """What is wrong with that which lies there; empty where all is well."""
    need: int
    """Bytes that it writes, about."""


def disk(settings: Settings) -> Iterator[Case]:
    """Full disks."""
    del settings
    for work in WORKS:
        yield Case(work.name, MUST, functools.partial(_full, work))


@functools.cache
def can_mount() -> bool:
    """Whether this process may mount a small file system."""
    return os.geteuid() == 0 and shutil.which("mount") is not None and _mounts()


def _mounts() -> bool:
    folder = Path(tempfile.mkdtemp(prefix="chaos-mount-"))
    worked = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if worked.returncode == 0:
        subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()
    return worked.returncode == 0


@contextlib.contextmanager
def _small_disk(folder: Path, size: int) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _full(work: Work, rng: random.Random, folder: Path) -> Outcome:
    share = rng.uniform(0.0, 1.3)
    place = folder / "disk"
    if not can_mount():
        place.mkdir()
        children.call(work.do, place, 0)
        return _tried(work, place, functools.partial(_limited, int(share * work.need)), lambda: None, share)
    with _small_disk(place, 64 * 2**20):
        old = children.call(work.do, place, 0)
        if old.problem or old.crash:
            raise RuntimeError(f"without a full disk: {old.problem or old.crash}")
        ballast = place / "ballast"
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, free - int(share * work.need)))
        return _tried(work, place, lambda: None, lambda: ballast.unlink(), share)


def _tried(work: Work, place: Path, before: Callable[[], None], free: Callable[[], None], share: float) -> Outcome:
    ending = children.call(_after, before, work.do, place, 1)
    problem, room = ending.problem, f"room for {share:.0%}"
    if ending.signal:
        return Outcome(f"{room}: ended by {signal.Signals(ending.signal).name}")
    told = problem is None or problem.deliberate or problem.errno in (errno.ENOSPC, errno.EFBIG)
    if not told:
        return Outcome(f"{room}: {problem}")
    checked = children.call(work.check, place)
    if checked.value != "":
        return Outcome(f"{room}: then {checked.value or checked.problem or checked.crash}")
    free()
    again = children.call(work.do, place, 1)
    if again.problem or again.crash:
        return Outcome(f"{room}: with more space: {again.problem or again.crash}")
    return Outcome()


def _after(before: Callable[[], None], do: Callable[[Path, int], Any], place: Path, number: int) -> None:
    before()
    do(place, number)


def _limited(size: int) -> None:
    """No file may be larger than this."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _build() -> torch.nn.Module:
    return trainings.wide(400)


def _save(folder: Path, number: int) -> None:
    torch.set_num_threads(1)
    ds.Ensemble(_build, 3, seed=number, backend="loop").save(folder / "saved")


def _saved(folder: Path) -> str:
    torch.set_num_threads(1)
    loaded = ds.Ensemble.load(folder / "saved", _build)
    expected = [ds.Ensemble(_build, 3, seed=seed, backend="loop") for seed in (0, 1)]
    first = next(loaded.member(0).parameters())
    return "" if any(torch.equal(first, next(e.member(0).parameters())) for e in expected) else "other weights"


def _predict(folder: Path, number: int) -> None:
    ensemble, x = trainings.ensemble_of("mlp", number), trainings.data("mlp", rows=100_000)[0]
    ensemble.predict(x, file=folder / "outputs.npy")


def _predicted(folder: Path) -> str:
    stored, x = torch.from_numpy(np.load(folder / "outputs.npy")), trainings.data("mlp", rows=100_000)[0]
    same = any(torch.equal(stored, trainings.ensemble_of("mlp", seed).predict(x)) for seed in (0, 1))
    return "" if same else "the old outputs are gone"


def _fit(folder: Path, number: int) -> None:
    """The first steps of a training, then the rest of it."""
    torch.set_num_threads(1)
    x, y = torch.zeros(48, 64), torch.zeros(48, dtype=torch.int64)
    with contextlib.suppress(KeyboardInterrupt):
        ds.fit(
            ds.Ensemble(_build, 3, backend="loop"),
            (x, y),
            functools.partial(ds.objectives.independent, loss="cross_entropy"),
            epochs=2,
            batch_size=16,
            checkpoint=folder / "checkpoint",
            resume=True,
            checkpoint_seconds=0.0,
            progress=None if number else trainings.Signals(3),
        )


def _whole(folder: Path) -> str:
    del folder
    return ""


class CommandFailed(Exception):
    """A command let an error through, or failed without a word."""


def _command(words: Sequence[str], folder: Path) -> None:
    called = study_runs.invoke(list(words), folder)
    if called.raw or (called.code and "error" not in called.output.lower()):
        raise CommandFailed(called.raw or called.output[-200:])


def _study(folder: Path, number: int) -> None:
    if number:
        file = folder / "specs" / "collusion" / "tiny.toml"
        _command(["study", "run", str(file), "--scale", "smoke"], folder)
    else:
        study_runs.write_tiny(folder)


def _robust(folder: Path, number: int) -> None:
    """`robust` with the folder, the page and the JSON file on the full disk."""
    torch.set_num_threads(1)
    if not number:
        ds.Ensemble(functools.partial(ds.nets.resnet20, 10, 1), 2, backend="loop").save(folder / "saved")
        return
    words = "robust --ensemble saved --network resnet20 --data digits --suite quick --epsilon 0.1 --examples 24"
    _command([*words.split(), "--batch-size", "8", "--folder", "parts", "--json", "result.json"], folder)


def _audit(folder: Path, number: int) -> None:
    if not number:
        generator = np.random.default_rng(0)
        np.savez(folder / "o.npz", outputs=generator.normal(size=(3, 80, 3)), targets=generator.integers(3, size=80))
        (folder / "result.json").write_text("old")
        (folder / "page.html").write_text("old")
        return
    words = "audit o.npz --task classification --kind logits --json result.json --page page.html"
    _command(words.split(), folder)


def _written(folder: Path) -> str:
    empty = [name for name in ("result.json", "page.html") if not (folder / name).read_text()]
    return f"{empty[0]} is empty" if empty else ""


WORKS = (
    Work("Ensemble.save", _save, _saved, 2_300_000),
    Work("predict(file=)", _predict, _predicted, 1_200_000),
    Work("fit(checkpoint=)", _fit, _whole, 20_000_000),
    Work("study run", _study, _whole, 120_000),
    Work("robust --folder", _robust, _whole, 60_000),
    Work("audit --json --page", _audit, _written, 150_000),
)
