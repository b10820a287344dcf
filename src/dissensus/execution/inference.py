"""Member outputs of many examples: batch by batch from any source to the host or a file, in bounded memory."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from dissensus import checks
from dissensus.execution.graphs import Capture, captured
from dissensus.execution.skeleton import first_line

Inputs = Tensor | tuple[Tensor, ...] | Dataset[Any] | DataLoader[Any]
WARM_UP = 2
"""Passes of a shape that run eagerly before one is captured."""
MOST_SHAPES = 4
"""Shapes that get a graph, each of which holds the memory of a pass."""

log = logging.getLogger("dissensus")


class Source(NamedTuple):
    """Batches of inputs, and how many examples they hold together (None: not known before)."""

    batches: Iterable[Tensor]
    examples: int | None
    targets: list[Tensor]
    """Targets of the batches that have been read, where they are wanted; on the host."""


def source_of(data: Inputs, batch_size: int, *, targets: bool = False) -> Source:
    """Inputs from a tensor, a pair ``(x, y)``, a ``Dataset`` or a ``DataLoader``, whose own batches stand.

    Outputs come in the order of the batches. A loader with another order than that of its data set is refused unless
    its targets come along.
    """
    checks.count("batch_size", batch_size)
    if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[0], Tensor):
        data, told = data
    else:
        told = None
    if isinstance(data, Tensor):
        if len(data) == 0:
            checks.refuse("data", "hold at least one example", checks.shape_text(data.shape))
        if not targets:
            return Source(data.split(batch_size), len(data), [])
        if not isinstance(told, Tensor):
            checks.refuse("data", "hold targets where they are asked for", "inputs alone", "Pass (x, y).", TypeError)
        if len(told) != len(data):
            checks.refuse("data", "hold as many targets as inputs", f"{len(data)} inputs and {len(told)} targets")
        return Source(data.split(batch_size), len(data), [told.detach().cpu()])
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        collate = getattr(data, "collate", None)
        # A generator of its own: the global one is not moved.
        data = DataLoader(data, batch_size, generator=torch.Generator(), collate_fn=collate)
    if not isinstance(data, DataLoader):
        checks.refuse("data", "be a tensor, (x, y), a Dataset or a DataLoader", type(data).__name__, error=TypeError)
    if not targets:
        _check_order(data)
    read: list[Tensor] = []
    return Source(_inputs(data, read if targets else None), _examples(data), read)


def _inputs(loader: DataLoader[Any], read: list[Tensor] | None) -> Iterator[Tensor]:
    """The inputs of every batch; targets are put aside where there is a list for them."""
    for batch in loader:
        if read is not None:
            if not isinstance(batch, list | tuple) or len(batch) < 2 or not isinstance(batch[1], Tensor):
                got = type(batch).__name__ if isinstance(batch, Tensor) or not batch else f"{len(batch)} parts"
                checks.refuse("data", "give pairs (x, y) of tensors where targets are asked for", got, error=TypeError)
            read.append(batch[1].detach().cpu())
        yield batch[0] if isinstance(batch, list | tuple) else batch


def _check_order(loader: DataLoader[Any]) -> None:
    """Refuse a loader whose rows nobody could match with anything.

    A stream has no other order than its own, so it is taken as it comes; several workers mix theirs.
    """
    workers, in_order = loader.num_workers, getattr(loader, "in_order", True)
    if isinstance(loader.dataset, IterableDataset):
        wrong = f"a stream that {workers} workers mix" if workers > 1 else ""
    elif workers > 0 and not in_order:
        wrong = "a loader with in_order=False"
    else:
        wrong = _other_order(loader)
    if wrong:
        fix = "Use shuffle=False, or predict(data, targets=True), which returns the targets in the same order."
        checks.refuse("data", "keep the order of its data set", wrong, fix)


def _other_order(loader: DataLoader[Any]) -> str:
    """What makes a loader's order another one than that of its data set, in words; empty where nothing does.

    A sampler of another class may well be sequential, but there is no way to know without drawing from it.
    """
    batched = loader.batch_sampler
    if batched is not None and type(batched) is not BatchSampler:
        return f"a {type(batched).__name__}"
    sampler = loader.sampler if batched is None else batched.sampler
    if getattr(type(sampler), "__iter__", None) is not SequentialSampler.__iter__:
        return f"a {type(sampler).__name__}"
    return ""


def _examples(loader: DataLoader[Any]) -> int | None:
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    drawn = len(loader.sampler)  # pyright: ignore[reportArgumentType]  # the samplers of map-style data have a length
    return drawn // loader.batch_size * loader.batch_size if loader.drop_last else drawn


class Passes:
    """Runs batches on a device; on a GPU, passes of a shape that comes again are replayed from a graph."""

    def __init__(self, run: Callable[[Tensor], Tensor], device: torch.device, capture: Capture | None) -> None:
        self.run, self.device, self.capture = run, device, capture
        self.seen: dict[object, int] = {}
        self.graphs: dict[object, tuple[Tensor, list[Tensor], Callable[[], None]]] = {}

    def __call__(self, batch: Tensor) -> Tensor:
        """Outputs on the device; they are overwritten by the next call of the same shape."""
        key = (batch.shape, batch.dtype)
        self.seen[key] = self.seen.get(key, 0) + 1
        room = key not in self.graphs and len(self.graphs) < MOST_SHAPES
        if self.capture is not None and room and self.seen[key] > WARM_UP:
            self._prepare(batch, key, self.capture)
        if key not in self.graphs:
            return self.run(batch.to(self.device, non_blocking=True))
        held, found, replay = self.graphs[key]
        held.copy_(batch, non_blocking=True)
        replay()
        return found[0]

    def _prepare(self, batch: Tensor, key: object, capture: Capture) -> None:
        held = batch.to(self.device, copy=True)
        found: list[Tensor] = [self.run(held)]

        def one_pass() -> None:
            found[0] = self.run(held)

        try:
            self.graphs[key] = (held, found, capture(one_pass, ()))
        except RuntimeError as reason:  # a pass that reads numbers back, say
            self.capture = None
            log.info("passes are not captured in a graph: %s", first_line(reason))


@dataclass
class _Waiting:
    """Outputs on their way to the host."""

    host: Tensor
    ready: torch.cuda.Event | None
    place: slice


def collected(passes: Passes, source: Source, file: Path | None) -> Tensor:
    """Outputs ``[M, N, ...]`` of all batches on the host, or in a ``.npy`` file that is mapped into memory.

    While the device computes a batch, the one before it is written; no more than two are held.
    """
    shelf = _Shelf(source.examples, file)
    buffers: dict[object, list[Tensor]] = {}
    waiting: _Waiting | None = None
    start = 0
    try:
        for batch in source.batches:
            following = _sent(passes(batch), buffers, slice(start, start + len(batch)))
            if waiting is not None:
                shelf.put(waiting)
            waiting = following
            start += len(batch)
        if waiting is None:
            checks.refuse("data", "hold at least one example", "none")
        shelf.put(waiting)
        return shelf.taken(start)
    finally:
        shelf.clear()


def _sent(outputs: Tensor, buffers: dict[object, list[Tensor]], place: slice) -> _Waiting:
    if not outputs.is_cuda:
        return _Waiting(outputs, None, place)
    pair = buffers.setdefault(outputs.shape, [])
    fresh = len(pair) < 2
    host = torch.empty(outputs.shape, dtype=outputs.dtype, pin_memory=True) if fresh else pair.pop(0)
    pair.append(host)  # the other one may still be waiting to be written
    host.copy_(outputs, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(outputs.device))
    return _Waiting(host, ready, place)


class _Shelf:
    """Where outputs are put: a tensor, a file, or a list where their number is not known before."""

    def __init__(self, examples: int | None, file: Path | None) -> None:
        if file is not None:
            if file.suffix != ".npy":
                checks.refuse("file", "end in .npy", repr(file.name))
            if examples is None:
                checks.refuse("data", "have a known length when outputs go to a file", "a stream")
        self.examples, self.file = examples, file
        self.array: np.memmap[Any, Any] | None = None
        self.part: Path | None = None
        self.whole: Tensor | None = None
        self.pieces: list[Tensor] = []

    def put(self, waiting: _Waiting) -> None:
        """Put a batch's outputs in their place, once they have arrived."""
        if waiting.ready is not None:
            waiting.ready.synchronize()
        if self.examples is None:
            self.pieces.append(waiting.host.clone())
            return
        if self.whole is None:
            self.whole = self._opened(waiting.host, self.examples)
        if waiting.place.stop > self.examples:
            checks.refuse("data", f"hold {self.examples} examples, as its length says", "more of them")
        self.whole[:, waiting.place] = waiting.host

    def _opened(self, first: Tensor, examples: int) -> Tensor:
        shape = (first.shape[0], examples, *first.shape[2:])
        if self.file is None:
            return torch.empty(shape, dtype=first.dtype)
        if first.dtype == torch.bfloat16:
            checks.refuse("outputs", "be of a type that .npy knows", "bfloat16", "Use ensemble.float().")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.part = self.file.with_name(f".{self.file.name}.{os.getpid()}.part")
        self.array = np.lib.format.open_memmap(self.part, "w+", first.numpy().dtype, shape)
        return torch.from_numpy(self.array)

    def taken(self, examples: int) -> Tensor:
        """Everything that was put."""
        if self.examples is None:
            return torch.cat(self.pieces, 1)
        assert self.whole is not None
        if examples != self.examples:
            checks.refuse("data", f"hold {self.examples} examples, as its length says", examples)
        if self.file is None or self.array is None or self.part is None:
            return self.whole
        self.array.flush()
        self.part.replace(self.file)  # whole or not at all
        return torch.from_numpy(np.load(self.file, mmap_mode="c"))

    def clear(self) -> None:
        """Leave nothing half-done behind."""
        if self.part is not None:
            self.part.unlink(missing_ok=True)


def capture_on(device: torch.device) -> Capture | None:
    """How passes are captured there, if they are."""
    return captured if device.type == "cuda" else None
