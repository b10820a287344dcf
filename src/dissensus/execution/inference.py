"""Member outputs of many examples, batch by batch from any source to the host or a file, in bounded memory."""

import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from dissensus import calls, checks, storage
from dissensus.arrays import Conversion, is_array
from dissensus.batch import Unpack, check_dtype, check_finite, read_batches, unpacked
from dissensus.calls import Call, NetworkInputs, network_inputs
from dissensus.execution.body import passes_replayed
from dissensus.execution.graphs import Capture, capture_on, on
from dissensus.execution.kept import settings_kept
from dissensus.execution.out_of_memory import OutOfMemory, advising
from dissensus.execution.replay import GraphCache, Recording
from dissensus.fingerprint import glance
from dissensus.output_files import is_replaceable
from dissensus.training_rows import TrainingRows

Inputs = Any
"""Inputs (a tensor, an array, a dictionary of named inputs), a pair ``(inputs, targets)``, or a source of batches."""
WARM_UP = 2
"""Eager passes of a shape before one is captured."""
MOST_SHAPES = 4
"""Shapes that get a graph. Each graph holds the memory of a pass."""


class InputBatches(NamedTuple):
    """Batches of inputs."""

    batches: Iterable[NetworkInputs]
    examples: int | None
    """The number of examples in all batches; None if it is not known in advance."""
    targets: list[Tensor]
    """Targets of the batches that have been read, if they were asked for; on the host."""


def predicted(
    network: nn.Module,
    members: int,
    data: Inputs,
    batch_size: int,
    *,
    targets: bool = False,
    unpack: Unpack | None = None,
    file: str | Path | None = None,
    seen: list[int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Outputs ``[M, N, ...]`` of a network with members in evaluation mode, batch by batch; the mode is put back.

    ``members`` is M, which only messages use; ``seen`` gets a checksum of the inputs of every batch; see
    `dissensus.Ensemble.predict` for the other arguments.
    """
    targets = checks.flag("targets", targets)
    place = None if file is None else replaceable(file)
    source = input_batches(data, batch_size, targets=targets, unpack=unpack, conversion=Conversion.of(network))
    if seen is not None:
        source = source._replace(batches=_noted(source.batches, seen))
    device = next(network.parameters()).device
    many = source.examples is None or source.examples > 4 * batch_size
    capture = capture_on(device) if many else None
    replayed = nullcontext() if capture is None else passes_replayed()
    advice = functools.partial(prediction_out_of_memory, device, members, batch_size, file is not None)
    with torch.no_grad(), advising(advice), settings_kept(network), on(device), replayed:
        network.eval()
        outputs = collected(Passes(functools.partial(_outputs, network), device, capture), source, place)
        return (outputs, torch.cat(source.targets)) if targets else outputs


def _noted(batches: Iterable[NetworkInputs], seen: list[int]) -> Iterator[NetworkInputs]:
    """Batches, with a checksum of each in a list."""
    for batch in batches:
        seen.append(glance(*calls.tensors(batch)))
        yield batch


def recognised(
    rows: TrainingRows, network: nn.Module, data: Inputs, *, unpack: Unpack | None = None, batch_size: int = 4096
) -> Tensor:
    """Which examples are among the rows that a network was trained on, bool ``[N]``."""
    source = input_batches(data, batch_size, unpack=unpack, conversion=Conversion.of(network))
    parts = [rows.contains(batch) for batch in source.batches]
    if not parts:
        checks.refuse("data", "hold at least one example", "none")
    return torch.cat(parts)


def _outputs(network: nn.Module, inputs: NetworkInputs) -> Tensor:
    """One pass; inputs that do not fit the network are told in one sentence."""
    try:
        return calls.outputs_of(network, inputs)
    except (RuntimeError, IndexError, TypeError) as reason:
        told = calls.misfit(reason, inputs, network)
        if told is None:
            raise
        raise told from reason


def input_batches(
    data: Inputs,
    batch_size: int,
    *,
    targets: bool = False,
    unpack: Unpack | None = None,
    conversion: Conversion | None = None,
) -> InputBatches:
    """Inputs from memory, a ``Dataset``, a ``DataLoader`` or an iterable of batches, which keep their batch size.

    Outputs come in the order of the batches. A loader that changes the order of its data set is refused unless its
    targets are returned too.
    """
    batch_size = checks.count("batch_size", batch_size)
    dtype = conversion.dtype if conversion is not None and conversion.exact else None
    conversion = conversion or Conversion(torch.get_default_dtype())
    labels: object = None
    if _is_pair(data):
        data, labels = data
        labels = conversion.targets(labels)
        data = data if isinstance(data, Tensor | Mapping | Call) or is_array(data) else tuple(data)
        data = network_inputs(conversion.inputs(data))
    elif type(data) is tuple and len(data) > 2 and all(isinstance(part, Tensor) or is_array(part) for part in data):
        fix = "Several inputs? Pass ((x1, x2, x3), None). Batches? Pass a list."
        checks.refuse("data", "be inputs, a pair (inputs, targets), or a source of batches", "a tuple of tensors", fix)
    elif isinstance(data, Mapping) or is_array(data):
        data = network_inputs(conversion.inputs(data))
    if isinstance(data, Tensor | Call):
        if dtype is not None:
            check_dtype(data, dtype)
        if unpack is not None:
            checks.refuse("unpack", "come with a Dataset, a DataLoader or an iterable of batches", "tensors")
        return _from_memory(data, labels if targets else None, batch_size, targets)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        collate = getattr(data, "collate", None)
        # With a separate generator, since a loader draws a seed from the global one.
        data = DataLoader(data, batch_size, generator=torch.Generator(), collate_fn=collate)
    if isinstance(data, str | bytes | nn.Module) or not isinstance(data, Iterable):
        requirement = "be a tensor, (x, y), a Dataset, a DataLoader or an iterable of batches"
        checks.refuse("data", requirement, type(data).__name__, error=TypeError)
    if not targets and isinstance(data, DataLoader):
        _check_order(data)
    read: list[Tensor] = []
    batches = _inputs(data, read if targets else None, unpack, conversion)
    return InputBatches(batches, _examples(data) if isinstance(data, DataLoader) else None, read)


def _is_pair(data: object) -> bool:
    """Whether data is ``(inputs, targets)``, or ``(inputs, None)``, in memory."""
    if not isinstance(data, tuple | list) or isinstance(data, Dataset | DataLoader) or len(data) != 2:
        return False
    inputs, targets = data
    return (isinstance(targets, Tensor) or targets is None or is_array(targets)) and not isinstance(inputs, str)


def _from_memory(data: NetworkInputs, labels: object, batch_size: int, targets: bool) -> InputBatches:
    length = calls.examples(data, "data")
    for tensor in calls.tensors(data):
        check_finite("data", tensor)
    if length == 0:
        checks.refuse("data", "hold at least one example", checks.shape_text(calls.first_tensor(data).shape))
    if not targets:
        return InputBatches(calls.split(data, batch_size), length, [])
    if not isinstance(labels, Tensor):
        checks.refuse("data", "hold targets where they are asked for", "inputs alone", "Pass (x, y).", TypeError)
    if len(labels) != length:
        checks.refuse("data", "hold as many targets as inputs", f"{length} inputs and {len(labels)} targets")
    return InputBatches(calls.split(data, batch_size), length, [labels.detach().cpu()])


def _inputs(
    source: Iterable[Any], read: list[Tensor] | None, unpack: Unpack | None, conversion: Conversion
) -> Iterator[NetworkInputs]:
    """The inputs of every batch; targets are appended to ``read`` if it is a list.

    Without ``unpack``, the first part of a batch is its inputs, and the second its targets.
    """
    for batch in read_batches(source):
        if read is not None:
            if unpack is None and isinstance(batch, list | tuple) and len(batch) > 2:
                batch = batch[:2]
            whole = unpacked(batch, unpack, conversion=conversion)
            read.append(whole.targets.detach().cpu())
            yield whole.inputs
        elif unpack is None and isinstance(batch, Mapping):
            yield network_inputs(conversion.inputs(batch))
        else:
            yield unpacked(batch, unpack, labels=False, conversion=conversion).inputs


def _check_order(loader: DataLoader[Any]) -> None:
    """Refuse a loader whose outputs could not be matched with its examples.

    A stream defines its order, unless several workers mix what they read.
    """
    workers, in_order = loader.num_workers, getattr(loader, "in_order", True)
    if isinstance(loader.dataset, IterableDataset):
        problem = f"a stream that {workers} workers mix" if workers > 1 else ""
    elif workers > 0 and not in_order:
        problem = "a loader with in_order=False"
    else:
        problem = _other_order(loader)
    if problem:
        fix = "Use shuffle=False, or predict(data, targets=True), which returns the targets in the same order."
        checks.refuse("data", "keep the order of its data set", problem, fix)
    left = _left_out(loader)
    if left:
        fix = "Use drop_last=False, or predict(data, targets=True), which returns the targets of the same rows."
        checks.refuse("data", "give all examples of its data set", f"drop_last=True, which leaves out {left}", fix)


def _left_out(loader: DataLoader[Any]) -> int:
    """The number of examples that ``drop_last`` leaves out; 0 where that is not known."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None or not loader.drop_last:
        return 0
    drawn = len(loader.sampler)  # pyright: ignore[reportArgumentType]  # the samplers of map-style data have a length
    return drawn % loader.batch_size


def _other_order(loader: DataLoader[Any]) -> str:
    """The part of a loader that changes the order of its data set; empty if there is none.

    A sampler of an unknown class may be sequential, but one cannot know without drawing from it.
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
    """Forward passes on a device; on a GPU, passes of a shape that comes again are replayed from a graph."""

    def __init__(self, run: Callable[[NetworkInputs], Tensor], device: torch.device, capture: Capture | None) -> None:
        self.run, self.device = run, checks.computes("ensemble", device)
        self.cache = GraphCache("passes", lambda: capture, warm_up=WARM_UP, most=MOST_SHAPES, level=logging.INFO)

    def __call__(self, batch: NetworkInputs) -> Tensor:
        """Outputs on the device, which the next call may overwrite."""
        tensors, rebuilt = calls.split_tensors(batch)
        key = (calls.form(batch), *((tensor.shape, tensor.dtype) for tensor in tensors))
        graph = self.cache.graph(key, functools.partial(self._recording, tensors, rebuilt))
        if graph is None:
            return self.run(rebuilt([tensor.to(self.device, non_blocking=True) for tensor in tensors]))
        return graph(*tensors, non_blocking=True)

    def _recording(self, tensors: list[Tensor], rebuilt: Callable[[Sequence[Tensor]], NetworkInputs]) -> Recording:
        held = [tensor.to(self.device, copy=True) for tensor in tensors]
        return Recording(lambda: self.run(rebuilt(held)), tuple(held))


class _Transfer(NamedTuple):
    """Outputs on their way to the host."""

    host: Tensor
    arrived: torch.cuda.Event
    place: slice


def collected(passes: Passes, source: InputBatches, file: Path | None) -> Tensor:
    """Outputs ``[M, N, ...]`` of all batches on the host, or in a ``.npy`` file that is mapped into memory.

    While a GPU computes a batch, the outputs of the batch before it are written; no more than two are held.
    """
    collection = _Collection(source.examples, file)
    buffers: dict[object, list[Tensor]] = {}
    waiting: _Transfer | None = None
    start = 0
    try:
        for batch in source.batches:
            length = calls.examples(batch, "data")
            outputs, place = passes(batch), slice(start, start + length)
            if outputs.ndim < 2 or outputs.shape[1] != length:
                fix = "The first axis of every input is the batch: a single example needs x.unsqueeze(0)."
                got = f"{list(outputs.shape[1:])} for {length} examples"
                checks.refuse("members", "return an output for every example", got, fix)
            following = _transfer(outputs, buffers, place) if outputs.is_cuda else None
            if waiting is not None:
                collection.receive(waiting)
            if following is None:
                collection.write(outputs, place)
            waiting = following
            start += length
        if start == 0:
            checks.refuse("data", "hold at least one example", "none")
        if waiting is not None:
            collection.receive(waiting)
        return collection.whole(start)
    finally:
        collection.close()


def _transfer(outputs: Tensor, buffers: dict[object, list[Tensor]], place: slice) -> _Transfer:
    pair = buffers.setdefault(outputs.shape, [])
    new = len(pair) < 2
    host = torch.empty(outputs.shape, dtype=outputs.dtype, pin_memory=True) if new else pair.pop(0)
    pair.append(host)  # the other buffer may still wait to be written
    host.copy_(outputs, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(outputs.device))
    return _Transfer(host, arrived, place)


def replaceable(file: str | Path) -> Path:
    """The file that outputs replace when all are there, with links followed; anything but a file is refused."""
    path = checks.path("file", file)
    if path.suffix != ".npy":
        checks.refuse("file", "end in .npy", repr(path.name))
    requirement = "be a regular file, or a place for a new one"
    try:
        if not is_replaceable(path):
            checks.refuse("file", requirement, f"{path}, which is something else")
        target = Path(os.path.realpath(path))
        above = next(place for place in target.parents if place.exists())
    except OSError as reason:
        checks.refuse("file", requirement, f"{path}: {reason.strerror or reason}")
    if not above.is_dir():
        checks.refuse("file", "lie in a folder", f"{path}, where {above} is a file")
    return target


class _Collection:
    """Collects outputs in a tensor or a file, or in a list if their number is not known in advance."""

    def __init__(self, examples: int | None, file: Path | None) -> None:
        if file is not None and examples is None:
            checks.refuse("data", "have a known length when outputs go to a file", "a stream")
        self.examples, self.file = examples, file
        self.array: np.memmap[Any, Any] | None = None
        self.part: Path | None = None
        self.unfinished = ExitStack()
        """Deletes the part at the end, unless it was renamed."""
        self.outputs: Tensor | None = None
        self.pieces: list[Tensor] = []

    def receive(self, transfer: _Transfer) -> None:
        """Wait for the outputs of a batch and write them."""
        transfer.arrived.synchronize()
        self.write(transfer.host, transfer.place)

    def write(self, outputs: Tensor, place: slice) -> None:
        """Copy the outputs of a batch to their place."""
        if self.examples is None:
            self.pieces.append(outputs.clone())
            return
        if self.outputs is None:
            self.outputs = self._allocate(outputs, self.examples)
        if place.stop > self.examples:
            checks.refuse("data", f"hold {self.examples} examples, as its length says", "more of them")
        self.outputs[:, place] = outputs

    def _allocate(self, first: Tensor, examples: int) -> Tensor:
        shape = (first.shape[0], examples, *first.shape[2:])
        if self.file is None:
            return torch.empty(shape, dtype=first.dtype)
        if first.dtype == torch.bfloat16:
            checks.refuse("outputs", "have a dtype that .npy can store", "bfloat16", "Use ensemble.float().")
        with storage.write_errors_told(self.file):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.part = self.unfinished.enter_context(storage.temporary_beside(self.file))
            self.array = storage.new_array(self.part, first.cpu().numpy().dtype, shape)
        return torch.from_numpy(self.array)

    def whole(self, examples: int) -> Tensor:
        """All outputs, once every batch has been written."""
        if self.examples is None:
            return torch.cat(self.pieces, 1)
        assert self.outputs is not None
        if examples != self.examples:
            checks.refuse("data", f"hold {self.examples} examples, as its length says", examples)
        if self.file is None or self.array is None or self.part is None:
            return self.outputs
        self.array.flush()
        outputs = torch.from_numpy(np.load(self.part, mmap_mode="c"))  # before another process can replace the file
        self.part.replace(self.file)  # readers see the whole file or none
        return outputs

    def close(self) -> None:
        """Delete an unfinished file."""
        self.unfinished.close()


class OneWrites(Protocol):
    """Processes of which the first writes."""

    @property
    def first(self) -> bool:
        """Whether this is the one that writes."""
        ...

    def everyone(self, value: Any) -> list[Any]:
        """The values of all processes, on every process."""
        ...


def written_by_first(blocks: Iterable[Tensor], examples: int, file: Path, processes: OneWrites) -> Tensor:
    """Blocks of outputs ``[M, n, ...]``, which every process has, in a file that the first of them writes."""
    collection, start, outputs = _Collection(examples, file), 0, None
    try:
        for block in blocks:
            if processes.first:
                collection.write(block, slice(start, start + block.shape[1]))
            start += block.shape[1]
        outputs = collection.whole(examples) if processes.first else None
        processes.everyone(None)  # the file is there
        return torch.from_numpy(np.load(file, mmap_mode="c")) if outputs is None else outputs
    finally:
        collection.close()


def prediction_out_of_memory(device: torch.device, members: int, batch_size: int, file: bool) -> OutOfMemory:
    """What helps where a prediction runs out of memory, the cheapest measure first.

    >>> error = prediction_out_of_memory(torch.device("cpu"), 5, 1024, file=True)
    >>> str(error).partition("What helps: ")[2]
    'batch_size=512, or smaller batches of your DataLoader; fewer members at once, by ensemble.subset.'
    """
    ways: list[str] = []
    if batch_size > 1:
        ways.append(f"batch_size={batch_size // 2}, or smaller batches of your DataLoader")
    if not file:
        ways.append('file="outputs.npy", so that outputs do not stay in memory')
    ways.append("fewer members at once, by ensemble.subset" if members > 1 else "a smaller network")
    return OutOfMemory(
        f"prediction ran out of memory on {device} with {members} members and batches of {batch_size} examples. "
        f"What helps: {'; '.join(ways)}."
    )
