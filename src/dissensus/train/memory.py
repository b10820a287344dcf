"""How much memory a training takes: told before it starts, kept to by taking members or runs in parts."""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dissensus import checks
from dissensus.execution import Body, settings_kept
from dissensus.randomness import generators_kept
from dissensus.train.engine import Engine
from dissensus.train.inputs import Inputs, fed
from dissensus.train.member_groups import Grouped

log = logging.getLogger("dissensus")

COPIES = 6
"""Matrices of the size of all weights: weights, gradient, two moments, best weights, and one in passing."""
_SHARE_OF_FREE = {"cuda": 0.8, "cpu": 0.5}


@dataclass(frozen=True)
class Needs:
    """What a training of some members takes."""

    members: int
    held: int
    """Bytes that are held all the time: weights, moments and their like."""
    each: int
    """Bytes that one member's pass takes until its backward pass is done."""

    @property
    def whole(self) -> int:
        """Bytes with all members at once."""
        return self.held + self.members * self.each

    def at_once(self, budget: int) -> int:
        """Members that fit into a budget at once, one at least.

        >>> Needs(5, held=100, each=30).at_once(170)
        2
        """
        return min(self.members, max(1, (budget - self.held) // max(self.each, 1)))


def needs(engine: Engine, given: Inputs) -> Needs:
    """Measure what the members of one run take for a batch, by a pass of one (the largest, where they differ)."""
    body = engine.body
    x = given[0] if isinstance(given, tuple) else given
    kept = 0
    with _left_as_it_was(body), generators_kept(x.device):
        body.train()
        patches = body.backend in ("batched", "auto") and body.is_batchable()
        for i in [0] if body.alike else range(len(body)):
            rows = slice(i, i + 1)
            leaf = engine.flat.detach()[rows].requires_grad_()
            parts = fed(engine.feed, given)
            parts += parts if engine.adversary is not None and engine.adversary.told.beside else []
            for backend in ("loop", "batched") if patches else ("loop",):  # the second keeps patches of convolutions
                forward = functools.partial(engine.training_outputs, parts, leaf, rows=rows, backend=backend)
                kept = max(kept, saved_bytes(forward, [x, engine.flat, *body.state().values()]))
    one = fed(engine.feed, given)[0]
    inputs = x.numel() * x.element_size() // (engine.members if one.per_member else 1)
    at_a_time = len(body) if engine.drawn is None else engine.drawn.count
    return Needs(at_a_time, COPIES * engine.flat.numel() * engine.flat.element_size(), kept + inputs)


@contextmanager
def _left_as_it_was(body: Body) -> Iterator[None]:
    """Restore modes and buffers after a block."""
    buffers = {name: tensor.clone() for name, tensor in body.state().items()}
    with settings_kept(body):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in body.state().items():
                    tensor.copy_(buffers[name])


def plan_members(engine: Engine, x: Inputs, *, max_memory: int | None, separable: bool) -> str:
    """Take the members of one run in groups where all at once would not fit; what was planned, in words."""
    found = needs(engine, x)
    budget = allowed(max_memory, engine.flat.device, deterministic=engine.numerics.deterministic)
    least = found.held + found.each
    if least > budget and max_memory is not None:
        fix = "Allow more, or use fewer members, smaller batches or precision='bf16'."
        checks.refuse("max_memory", f"hold one member at a time, about {mebibytes(least)}", mebibytes(budget), fix)
    at_once = found.at_once(budget) if engine.members_at_once is None else min(engine.members_at_once, found.members)
    engine.needs = found
    told = f"{at_once} of {found.members} members at once, about {mebibytes(found.held + at_once * found.each)}"
    if at_once < found.members and engine.drawn is not None:
        fix = "Draw fewer members, or use smaller batches or precision='bf16'."
        checks.refuse("active_members", f"fit into memory, {mebibytes(budget)}", mebibytes(found.whole), fix)
    if at_once < found.members:
        engine.grouped = Grouped(engine.body, at_once, separable, engine.flat.device)
        log.warning("%s: all at once would take %s", told, mebibytes(found.whole))
    else:
        log.info("%s", told)
    return told


def saved_bytes(forward: Callable[[], Tensor], known: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd keeps for the backward pass of a computation, counted by running it; less what is known."""
    seen: dict[int, int] = {}

    held: list[torch.UntypedStorage] = []

    def count(tensor: Tensor) -> None:  # returning the tensor would tie a knot that no collector undoes
        storage = tensor.untyped_storage()
        held.append(storage)  # until the end, so that no address comes twice
        seen[storage.data_ptr()] = storage.nbytes()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda nothing: nothing):
        output = forward()
    for tensor in known:
        seen.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(seen.values()) + output.numel() * output.element_size()


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device now."""
    if device.type == "cuda":  # what torch holds in reserve is free for its own use
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    return _host_bytes("MemAvailable")


def _all_bytes(device: torch.device) -> int:
    """Memory of a device, free or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return _host_bytes("MemTotal")


def _host_bytes(entry: str) -> int:
    try:
        with open("/proc/meminfo") as file:
            line = next(line for line in file if line.startswith(entry))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):  # not Linux: a guess that small machines survive
        return 4 * 2**30


def allowed(max_memory: int | None, device: torch.device, *, deterministic: bool = False) -> int:
    """Bytes that training may take: what the caller allows, or a share of what is free.

    How members are grouped shows in last bits, so a deterministic training goes by all memory that there is: what is
    free differs from one moment to the next.
    """
    if max_memory is not None:
        return checks.count("max_memory", max_memory)
    available = _all_bytes(device) if deterministic else free_bytes(device)
    return int(available * _SHARE_OF_FREE.get(device.type, 0.5))


def runs_at_once(bytes_per_run: int, runs: int, budget: int) -> int:
    """How many runs fit into the budget, one at least.

    >>> runs_at_once(100, 50, 1000)
    10
    """
    return min(runs, max(1, budget // max(bytes_per_run, 1)))


class OutOfMemory(RuntimeError):
    """Training did not fit into memory; the message says what would help."""


def ran_out(reason: BaseException) -> bool:
    """Whether an error says that memory has run out."""
    return isinstance(reason, torch.OutOfMemoryError) or (
        isinstance(reason, RuntimeError) and "can't allocate memory" in str(reason)
    )


def advice(engine: Engine) -> OutOfMemory:
    """What to do about it, in the order of what costs least."""
    device = engine.flat.device
    at_once = engine.grouped.at_once if engine.grouped is not None else engine.members
    batch = getattr(engine.feed, "batch_size", None)
    ways: list[str] = []
    if engine.numerics.precision in ("float32", "tf32") and device.type == "cuda":
        ways.append("precision='bf16' (half the activations)")
    if at_once > 1 and isinstance(engine.needs, Needs):
        half = engine.needs.held + at_once // 2 * engine.needs.each
        ways.append(f"max_memory={half} (fewer members at once, equal results; now {at_once})")
    if batch is None or batch > 1:
        ways.append("a smaller batch" + (f" (now {batch})" if batch else ""))
    ways.append("fewer members" if engine.members > 1 else "a smaller network")
    runs = f"{engine.runs} runs of " if engine.runs > 1 else ""
    return OutOfMemory(
        f"training ran out of memory on {device} with {runs}{engine.members} members. What helps: "
        + "; ".join(ways)
        + ("." if engine.runs > 1 else ". The ensemble keeps the weights from before this step.")
    )


def mebibytes(count: int) -> str:
    """Bytes in words.

    >>> mebibytes(3 * 2**20)
    '3.0 MiB'
    """
    return f"{count / 2**20:,.1f} MiB"
