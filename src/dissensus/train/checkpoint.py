"""Checkpoints: a training that is killed at any moment resumes as if it had not been.

A folder holds the last two checkpoints, each a folder that is written completely or not at all and verified by
checksum. Several processes write one together: each the rows of its members. Randomness is keyed by (seed, epoch,
step), so counters determine it; the states of other generators and the variables that the user's objects change are
stored too.
"""

import logging
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dissensus import storage
from dissensus.data.batches import LoadedBatches
from dissensus.data.unlabelled import WithUnlabelled
from dissensus.execution.out_of_memory import advising
from dissensus.execution.ranks import Ranks
from dissensus.fingerprint import differing
from dissensus.randomness import generator_state
from dissensus.train.engine import Engine
from dissensus.train.settings import CheckpointSettings

log = logging.getLogger("dissensus")

KIND = "dissensus.checkpoint"
FORMATS = storage.Formats(
    newest=6,
    oldest=5,
    whole=5,
    advice="training cannot go on from it, since the same seed gives other random numbers now. Train again in another "
    "folder. Of a fit, `dissensus convert {place} NEW --build MODULE:FUNCTION` saves the weights as an ensemble.",
)
"""Of checkpoints and plans of sweeps. 0.1 wrote format 1, and plans without a number; 6 has several weights files."""
_NAME = re.compile(r"step-[0-9]{9,}-[0-9]{6,}")
_PASS = "pass/"
"""Begins the names of what was noted at the beginning of a pass over a source that epochs read on."""
_SHARE_OF_TIME = 0.02
_SECONDS = 10.0
_AGREED_EVERY = 0.1
"""Seconds between the moments at which several processes agree whether a checkpoint is due."""


@contextmanager
def threads_restored() -> Iterator[None]:
    """Restore the number of threads after a block."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


@contextmanager
def reserved(settings: CheckpointSettings | None) -> Iterator[None]:
    """A block in which no other training can use a folder of checkpoints; one that is in use is refused."""
    if settings is None:
        yield
        return
    folder = settings.folder
    is_new = storage.make_folder("checkpoint", folder)
    with ExitStack() as stack:
        try:
            stack.enter_context(storage.locked(folder, wait=False))
        except BlockingIOError as reason:
            raise storage.StorageError(
                f"{folder} is in use by another training, of {reason}. Wait for its end, or give another folder."
            ) from None
        try:
            yield
        except BaseException:
            with suppress(OSError):  # nothing was written: leave no folder behind
                if [path.name for path in folder.iterdir()] == [storage.LOCK]:
                    (folder / storage.LOCK).unlink()
                    if is_new:
                        folder.rmdir()
            raise


def checkpoints_in(folder: Path) -> list[Path]:
    """Folders of checkpoints, oldest first; one whose manifest cannot be read counts, one of another kind does not."""
    return [
        path
        for path in _named(folder)
        if (path / storage.MANIFEST).exists() and storage.stored_kind(path) in (KIND, None)
    ]


def _named(folder: Path) -> list[Path]:
    """Folders that are named like checkpoints, in the order of their steps."""
    paths = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=lambda path: [int(number) for number in path.name.split("-")[1:]])


class Checkpointer:
    """Writes the state of an engine between steps, and restores it.

    Args:
        settings: Where checkpoints are, how often they are written, and whether training resumes from one.
        fingerprint: The fingerprint of every setting. A checkpoint with another fingerprint is refused, and so is one
            of other runs of a sweep.
        ranks: Processes that train one run; None: this one alone.
    """

    def __init__(
        self, settings: CheckpointSettings, fingerprint: Mapping[str, Any], ranks: Ranks | None = None
    ) -> None:
        self.settings, self.fingerprint = (
            settings,
            {**fingerprint, "part": None if settings.part is None else list(settings.part)},
        )
        self.folder = settings.folder
        self.choices = self.folder / "choices.json" if settings.choices is None else settings.choices
        """The file that keeps which backends run, so that a resumed training uses the same ones."""
        self.ranks = ranks
        self.written = self.asked = time.perf_counter()
        self.cost = 0.0
        self.until_asked = self.between_asked = 1
        """Steps until processes ask the first one whether a checkpoint is due, and from one time to the next."""

    def __call__(self, engine: Engine) -> None:
        """Write a checkpoint if one is due."""
        if engine.state.in_epoch and not engine.feed.resumable:
            return
        if self.ranks is None:
            due = self._is_due()
        else:
            self.until_asked -= 1
            if self.until_asked:
                return
            due, self.until_asked = self.ranks.decided((self._is_due(), self._steps_between()))
        if due:
            self.write(engine)

    def _is_due(self) -> bool:
        waited, seconds = time.perf_counter() - self.written, self.settings.seconds
        return waited >= (max(_SECONDS, self.cost / _SHARE_OF_TIME) if seconds is None else seconds)

    def _steps_between(self) -> int:
        """Steps until processes agree the next time: as many as take a tenth of a second, or of the time to wait."""
        now, seconds = time.perf_counter(), self.settings.seconds
        wanted = _AGREED_EVERY if seconds is None else min(_AGREED_EVERY, seconds / 10)
        step = max((now - self.asked) / self.between_asked, 1e-6)
        self.asked, self.between_asked = now, max(1, min(1000, int(wanted / step)))
        return self.between_asked

    def write(self, engine: Engine) -> None:
        """Write a checkpoint now, and keep the one before it."""
        start, state, ranks = time.perf_counter(), engine.state, self.ranks
        engine.body.choices.keep_ways()
        if engine.captured is not None and state.in_epoch:
            engine.captured.tell(engine)
        source = _read_on(engine)
        place = None if source is None else source.place
        details = {
            "fingerprint": self.fingerprint,
            "facts": state.facts() if ranks is None else of_all_rows(state.facts(), ranks),
            "threads": torch.get_num_threads(),
            "source": None if place is None else {"passes": place.passes, "read": place.read},
        }
        path = self.folder / f"step-{state.steps:09d}-{state.epoch:06d}"
        noted = {} if place is None else {f"{_PASS}{name}": tensor for name, tensor in place.noted.items()}
        if ranks is None:
            storage.write_folder(path, KIND, state.tensors() | noted, details, FORMATS)
        else:
            ranks.averaged_over_data(state.body)
            tensors = state.tensors() | noted
            if not ranks.first:
                tensors = {name: tensor for name, tensor in tensors.items() if state.has_rows(name)}
            written = tensors if ranks.data_rank == 0 else None
            storage.write_folder_together(path, KIND, written, details, FORMATS, ranks)
            if not ranks.first:
                return
        kept = self.checkpoints()[-2:]
        for old in _named(self.folder):  # older ones, and those of a process that was killed while writing
            if old not in kept:
                storage.remove_folder(old, KIND)
        self.written = time.perf_counter()
        self.cost = self.written - start

    def checkpoints(self) -> list[Path]:
        """Folders of checkpoints, oldest first."""
        return checkpoints_in(self.folder)

    def restore(self, engine: Engine) -> bool:
        """Restore the newest complete checkpoint where training resumes; return whether there was one."""
        ranks = self.ranks
        paths = self.checkpoints() if ranks is None else ranks.decided(self.checkpoints())
        if paths and not self.settings.resume:
            raise ValueError(
                f"{self.folder} holds a checkpoint already; pass resume=True to go on from it, or give another folder."
            )
        for path in reversed(paths):
            read = self._read(path, engine)
            if read is None:
                continue
            tensors, manifest = read
            self.check(manifest["fingerprint"], path)
            self._restore(engine, tensors, manifest)
            return True
        if paths:
            raise storage.StorageError(f"no checkpoint in {self.folder} is whole; give another folder to start anew.")
        return False

    def _read(self, path: Path, engine: Engine) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """A checkpoint, or its rows of the members of this process; None where it is damaged."""
        ranks, problem, read = self.ranks, "", None
        try:
            read = storage.read_folder(path, KIND, FORMATS, None if ranks is None else engine.state.rows)
        except storage.OtherFormat:
            raise
        except storage.StorageError as reason:
            problem = str(reason)
        problem = next(filter(None, [problem] if ranks is None else ranks.everyone(problem)), "")
        if problem:
            log.warning("checkpoint skipped, trying the one before it: %s", problem)
            return None
        return read

    def check(self, stored: object, path: Path) -> None:
        """Refuse a folder with another fingerprint."""
        refuse_other(path, "training", stored, self.fingerprint)

    def _restore(self, engine: Engine, tensors: dict[str, Tensor], manifest: Mapping[str, Any]) -> None:
        if manifest["threads"] != torch.get_num_threads():
            log.warning("using %d threads, as before the interruption", manifest["threads"])
            torch.set_num_threads(manifest["threads"])
        noted = {name.removeprefix(_PASS): t for name, t in tensors.items() if name.startswith(_PASS)}
        place, facts, drawn = manifest.get("source"), manifest["facts"], dict[str, bytes]()
        if place is None and facts["steps"] and _read_on(engine) is not None:
            raise storage.StorageError(
                f"{self.folder} does not tell how far `data` was read, as an earlier version wrote it. "
                "Train again in another folder."
            )
        if place is not None and facts["epoch"] < engine.epochs and facts["run_ids"]:
            drawn = _read_again(engine, place["passes"], place["read"], noted)
        engine.restore({name: t for name, t in tensors.items() if not name.startswith(_PASS)}, facts)
        if self.ranks is not None:
            engine.state.resting = not bool(self.ranks.gathered(engine.state.active).all())
        now = _generator_states(engine)
        if any(now[name] != after for name, after in drawn.items()):
            log.warning(
                "`data` draws random numbers batch by batch from a generator that other code draws from too: "
                "a resumed training may differ where it keeps them, as a buffer for shuffling does"
            )
        log.info("resumed after %d whole epochs and %d steps", engine.state.epoch, engine.state.steps)


def of_all_rows(facts: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Facts of the first process, with what each process knows of its members put together."""
    each = [dict(epochs) for epochs in ranks.everyone(facts["best_epochs"])][:: ranks.data_size]
    best = {
        run: [epoch for epochs in each for epoch in epochs[run]] if isinstance(epochs, list) else epochs
        for run, epochs in each[0].items()
    }
    return {**facts, "best_epochs": list(best.items())}


_OBJECTS = {"data", "validation", "unlabelled", "objective", "augment", "metric", "track", "schedule", "twin", "build"}
"""Settings that may hold objects which count or keep something."""


_FOLLOWS_FROM = {
    "rates": {"epochs", "schedule"},
    "numerics": {"precision", "channels_last", "deterministic", "network"},
    "split_seed": {"seed"},
    "initial weights": {"seed of the ensemble", "members", "network", "build", "frozen parameters", "runs"},
}
"""Settings that differ wherever one of these does, so that only the reason is named."""
_CHECKSUM = "0" * 64


def differing_settings(stored: object, current: Mapping[str, Any]) -> list[str]:
    """Names of settings that differ between two fingerprints, without those that follow from others."""
    differ = differing(stored, current)
    return [key for key in differ if _FOLLOWS_FROM.get(key, set()).isdisjoint(differ)]


def refuse_other(path: Path, kind: str, stored: object, current: Mapping[str, Any]) -> None:
    """Refuse a checkpoint or the plan of a sweep with another fingerprint; the error names what differs."""
    keys = differing_settings(stored, current)
    if not keys:
        return
    known = stored if isinstance(stored, Mapping) else {}
    values = [f"{key!r} was {known[key]} and is {current[key]}" for key in keys if are_plain(known, current, key)]
    told = f" ({'; '.join(values)})" if values else ""
    names = ", ".join(map(repr, ["schedule" if key == "rates" else key for key in keys]))
    raise storage.StorageError(
        f"{path} belongs to another {kind}: {names} differ{told}. Give another folder.{_advice(keys)}"
    )


def are_plain(stored: Mapping[str, Any], current: Mapping[str, Any], key: str) -> bool:
    """Whether both values are readable, not checksums."""
    return all(len(str(side.get(key, _CHECKSUM))) < len(_CHECKSUM) for side in (stored, current))


def _advice(keys: list[str]) -> str:
    """What else may be the reason that settings differ, and what helps."""
    if keys == ["initial weights"]:
        return (
            " Begin with the ensemble as it was before training, not with a trained one; to train it further, give "
            "another folder."
        )
    if _OBJECTS.isdisjoint(keys):
        return ""
    return " (Is it the same, and was used before in this process? Then it has changed: create it anew.)"


def train(engine: Engine) -> None:
    """Train to the end, from the newest checkpoint if there is one; an error about memory says what helps."""
    with advising(engine.out_of_memory):
        if isinstance(engine.checkpointer, Checkpointer):
            _train_with_checkpoints(engine, engine.checkpointer)
        else:
            engine.start(resumed=False)
            engine.train()


def train_in_step(engines: Sequence[Engine], rungs: Sequence[int], compare: Callable[[int], None]) -> None:
    """Train several engines so that all of them reach a rung before any goes on; ``compare`` may stop runs then.

    Args:
        engines: Engines before their first step; those with checkpoints go on from there.
        rungs: Epochs in rising order.
        compare: Called with a rung once all engines have reached it.
    """
    with threads_restored():
        for engine in engines:
            _begin(engine)
        for rung in rungs:
            for engine in engines:
                with advising(engine.out_of_memory):
                    engine.advance(rung)
                if len(engines) > 1 and engine.captured is not None:
                    engine.captured.forget()  # graphs of engines that wait would hold memory
            compare(rung)
        for engine in engines:
            with advising(engine.out_of_memory):
                engine.train()
            if isinstance(engine.checkpointer, Checkpointer):
                engine.checkpointer.write(engine)


def _read_on(engine: Engine) -> LoadedBatches | None:
    """The source of batches that a new epoch reads on, in the middle of a pass; None where epochs are passes."""
    feed = engine.feed.labelled if isinstance(engine.feed, WithUnlabelled) else engine.feed
    return feed if isinstance(feed, LoadedBatches) and feed.steps_per_epoch is not None else None


def _read_again(engine: Engine, passes: int, read: int, noted: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Read the batches of a pass again that were read before the interruption.

    The pass begins with the generators and variables of its beginning, so that a loader that shuffles draws its order
    again.

    Returns:
        The states of the generators from which batches after the first were drawn. They are those of the checkpoint,
        unless other code has drawn from the same generators between the batches.
    """
    source = _read_on(engine)
    assert source is not None, "the fingerprint holds steps_per_epoch"
    if isinstance(source.loader, Iterator):
        log.warning("resuming reads `data`, an iterator, from its first batch: pass a new one, not one read before")
    engine.state.restore_python(noted)
    source.begin_pass(passes)
    source.skip(1)
    before = _generator_states(engine)
    source.skip(read - 1)
    return {name: state for name, state in _generator_states(engine).items() if state != before[name]}


def _generator_states(engine: Engine) -> dict[str, bytes]:
    """The states of all generators that checkpoints hold, for comparison."""
    generators = {
        f"{part}/{name}": g for part, each in engine.state.python.items() for name, g in each.generators.items()
    }
    states = {name: generator_state(generator) for name, generator in generators.items()}
    return {
        name: bytes(state.numpy()) if isinstance(state, Tensor) else pickle.dumps(state)
        for name, state in states.items()
    }


def _train_with_checkpoints(engine: Engine, checkpointer: Checkpointer) -> None:
    with threads_restored():
        _begin(engine)
        engine.train()
        checkpointer.write(engine)


def _begin(engine: Engine) -> None:
    """Tell callbacks that training begins, or restore the newest checkpoint and tell them that it goes on."""
    checkpointer = engine.checkpointer
    if not isinstance(checkpointer, Checkpointer):
        engine.start(resumed=False)
        return
    source = _read_on(engine)
    if source is not None:
        source.at_pass = engine.state.python_tensors
    resumed = checkpointer.restore(engine)
    engine.start(resumed=resumed)
    if not resumed:
        checkpointer.write(engine)  # so that there is always a beginning to go back to
    if engine.ranks is None or engine.ranks.first:
        engine.body.choices.keep_in(checkpointer.choices, engine.body.identity())
