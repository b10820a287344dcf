"""Checkpoints: a training that was killed at any moment goes on as if it had not been.

A folder holds the last two, each a folder of its own, written whole or not at all and verified by checksum. Randomness
is keyed by (seed, epoch, step) throughout, so counters are all that must be remembered of it; the global generator's
state is kept too, for networks that draw from it themselves.
"""

import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dissensus.train.memory as memory
from dissensus import storage
from dissensus.data.batches import LoadedBatches
from dissensus.data.unlabelled import WithUnlabelled
from dissensus.fingerprint import differing, fingerprints
from dissensus.train.engine import Engine
from dissensus.train.moments import facts_of, go_back, tensors_of

log = logging.getLogger("dissensus")

KIND = "dissensus.checkpoint"
_SHARE_OF_TIME = 0.02
_SECONDS = 10.0


@contextmanager
def threads_put_back() -> Iterator[None]:
    """Whatever a resumed training does to the number of threads ends with it."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


class Checkpointer:
    """Writes an engine's state between steps, and brings it back.

    Args:
        folder: Where checkpoints go.
        fingerprint: What the training is: a checkpoint of another training is refused.
        seconds: Time between checkpoints. By default ten seconds, and more where writing takes more than 2 % of that.
        choices: The file that keeps which backends run, so that a resumed training uses the same ones.
    """

    def __init__(
        self,
        folder: str | Path,
        fingerprint: Mapping[str, Any],
        seconds: float | None = None,
        choices: Path | None = None,
    ) -> None:
        self.folder, self.seconds = Path(folder), seconds
        self.choices = self.folder / "choices.json" if choices is None else choices
        self.fingerprint = fingerprints(fingerprint, skip_progress=True, allow_opaque=True)
        self.written = time.perf_counter()
        self.cost = 0.0

    def __call__(self, engine: Engine) -> None:
        """Write a checkpoint if one is due."""
        if engine.in_epoch and not engine.feed.resumable:
            return
        waited = time.perf_counter() - self.written
        if waited >= (max(_SECONDS, self.cost / _SHARE_OF_TIME) if self.seconds is None else self.seconds):
            self.write(engine)

    def write(self, engine: Engine) -> None:
        """Write a checkpoint now, and leave the one before it in place."""
        start = time.perf_counter()
        if engine.captured is not None and engine.in_epoch:
            engine.captured.tell(engine)
        tensors = {**tensors_of(engine), **_generators(engine)}
        details = {
            "fingerprint": self.fingerprint,
            "facts": facts_of(engine),
            "threads": torch.get_num_threads(),
        }
        storage.write_folder(self.folder / f"step-{engine.steps:09d}-{engine.epoch:06d}", KIND, tensors, details)
        kept = self.found()[-2:]
        for old in self.folder.glob("step-*"):  # older ones, and those of a process that was killed while it wrote
            if old not in kept:
                shutil.rmtree(old, ignore_errors=True)
        self.written = time.perf_counter()
        self.cost = self.written - start

    def found(self) -> list[Path]:
        """Folders of checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob("step-*") if (path / storage.MANIFEST).exists())

    def begin(self, engine: Engine, resume: bool) -> bool:
        """Bring the newest whole checkpoint back if asked to; return whether there was one."""
        found = self.found()
        if found and not resume:
            raise ValueError(
                f"{self.folder} holds a checkpoint already; pass resume=True to go on from it, or give another folder."
            )
        for path in reversed(found):
            try:
                tensors, manifest = storage.read_folder(path, KIND)
            except storage.StorageError as reason:
                log.warning("checkpoint passed over, going back to the one before it: %s", reason)
                continue
            self._check(manifest["fingerprint"], path)
            self._restore(engine, tensors, manifest)
            return True
        if found:
            raise storage.StorageError(f"no checkpoint in {self.folder} is whole; give another folder to start anew.")
        return False

    def _check(self, stored: Mapping[str, Any], path: Path) -> None:
        keys = differing(stored, self.fingerprint)
        if keys:
            raise storage.StorageError(
                f"{path} belongs to another training: {', '.join(map(repr, keys))} differ. Give another folder."
            )

    def _restore(self, engine: Engine, tensors: dict[str, Tensor], manifest: Mapping[str, Any]) -> None:
        _set_generators(engine, tensors)
        if manifest["threads"] != torch.get_num_threads():
            log.warning("using %d threads, as before the interruption", manifest["threads"])
            torch.set_num_threads(manifest["threads"])
        facts = manifest["facts"]
        go_back(engine, tensors, facts)
        log.info("resumed after %d whole epochs and %d steps", engine.epoch, engine.steps)


def _generators(engine: Engine) -> dict[str, Tensor]:
    """States of the generators that are not ours: torch's, the device's, and that of a foreign loader."""
    states = {"generator": torch.get_rng_state()}
    if engine.flat.is_cuda:
        states["device generator"] = torch.cuda.get_rng_state(engine.flat.device)
    return states | {name: own.get_state() for name, own in _loader_generators(engine).items()}


def _loader_generators(engine: Engine) -> dict[str, torch.Generator]:
    """Of foreign loaders: of the data, and of other data beside it."""
    feed = engine.feed
    each = (feed.labelled, feed.unlabelled) if isinstance(feed, WithUnlabelled) else (feed,)
    found = {
        name: own.generator_of_loader()
        for name, own in zip(("loader generator", "unlabelled generator"), each, strict=False)
        if isinstance(own, LoadedBatches)
    }
    return {name: generator for name, generator in found.items() if generator is not None}


def _set_generators(engine: Engine, tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors.pop("generator"))
    on_device = tensors.pop("device generator", None)
    if on_device is not None and engine.flat.is_cuda:
        torch.cuda.set_rng_state(on_device, engine.flat.device)
    for name in ("loader generator", "unlabelled generator"):
        state, own = tensors.pop(name, None), _loader_generators(engine).get(name)
        if state is not None and own is not None:
            own.set_state(state)


def train(engine: Engine, checkpointer: Checkpointer | None, resume: bool) -> None:
    """Train to the end, from where a checkpoint left off if there is one; out of memory comes with advice."""
    try:
        _train(engine, checkpointer, resume)
    except RuntimeError as reason:
        if not memory.ran_out(reason):
            raise
        raise memory.advice(engine) from None


def _train(engine: Engine, checkpointer: Checkpointer | None, resume: bool) -> None:
    if checkpointer is None:
        engine.train()
        return
    with threads_put_back():
        if not checkpointer.begin(engine, resume):
            checkpointer.write(engine)  # whatever happens next, there is a beginning to go back to
        engine.body.choices.keep_in(checkpointer.choices, engine.body.identity())
        engine.train()
        checkpointer.write(engine)
