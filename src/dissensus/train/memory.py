"""How much memory training takes: estimated before it starts, and limited by training members or runs in parts."""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dissensus import checks
from dissensus.execution import Body, settings_kept
from dissensus.execution.out_of_memory import OutOfMemory
from dissensus.pages.parts import counted
from dissensus.randomness import generators_kept
from dissensus.train.member_groups import MemberGroups

log = logging.getLogger("dissensus")

MemberForward = Callable[[Tensor, slice, str], Tensor]
"""``(flat [m, P], rows, backend) -> outputs`` of some members."""
COPIES = 6
"""Matrices of the size of all weights: weights, gradient, two moments, best weights, and a temporary one."""
_SHARE_OF_FREE = {"cuda": 0.8, "cpu": 0.5}


@dataclass(frozen=True)
class Needs:
    """Bytes that training takes."""

    members: int
    held: int
    """Bytes that are always in use: weights, moments and the like."""
    per_member: int
    """Bytes that a member's forward pass keeps until its backward pass."""
    spare: int = 0
    """Bytes of those in use that training can do without, at the cost of time."""

    @property
    def whole(self) -> int:
        """Bytes with all members at once."""
        return self.held + self.members * self.per_member

    def at_once(self, budget: int) -> int:
        """Members that fit into a budget at once, at least one.

        >>> Needs(5, held=100, per_member=30).at_once(170)
        2
        """
        return min(self.members, max(1, (budget - self.held) // max(self.per_member, 1)))


@dataclass(frozen=True)
class MemoryLimit:
    """What planning needs to know besides the members."""

    max_memory: int | None
    separable: bool
    """Whether the objective is a sum of terms that depend on one member's outputs each."""
    deterministic: bool


@dataclass(frozen=True)
class MemoryPlan:
    """How many members of a run train at once."""

    needs: Needs
    at_once: int
    groups: MemberGroups | None
    """None where all members train at once."""
    lowers: bool = True
    """Whether there is memory for copies of weights in bfloat16."""

    def __str__(self) -> str:
        size = self.needs.held + self.at_once * self.needs.per_member
        return f"{self.at_once} of {self.needs.members} members at once, about {mebibytes(size)}"


def pass_bytes(body: Body, flat: Tensor, forward: MemberForward, known: Iterable[Tensor]) -> int:
    """Measure the bytes that one member keeps for its backward pass: the largest number where members differ."""
    known = [*known, flat, *body.state().values()]
    kept = 0
    with _buffers_restored(body), generators_kept(flat.device):
        body.train()
        patches = body.backend in ("batched", "auto") and body.is_batchable()
        for i in [0] if body.alike else range(len(body)):
            rows = slice(i, i + 1)
            leaf = flat.detach()[rows].requires_grad_()
            for backend in ("loop", "batched") if patches else ("loop",):  # the second keeps patches of convolutions
                kept = max(kept, saved_bytes(functools.partial(forward, leaf, rows, backend), known))
    return kept


@contextmanager
def _buffers_restored(body: Body) -> Iterator[None]:
    """Restore modes and buffers after a block."""
    restore = body.snapshot()
    with settings_kept(body):
        try:
            yield
        finally:
            restore()


def plan_members(
    needs: Needs, limit: MemoryLimit, body: Body, device: torch.device, *, sampled: bool, at_once: int | None
) -> MemoryPlan:
    """Put the members of one run into groups where all at once would not fit.

    ``at_once`` is the number of members that an earlier plan has decided on; ``sampled`` says that every step samples
    its members, which cannot be grouped.
    """
    budget = allowed(limit.max_memory, device, deterministic=limit.deterministic)
    lowers = needs.whole <= budget
    if not lowers:
        needs = replace(needs, held=needs.held - needs.spare, spare=0)
    least = needs.held + needs.per_member
    if least > budget and limit.max_memory is not None:
        fix = "Allow more, or use fewer members, smaller batches or precision='bf16'."
        checks.refuse("max_memory", f"hold one member at a time, about {mebibytes(least)}", mebibytes(budget), fix)
    at_once = needs.at_once(budget) if at_once is None else min(at_once, needs.members)
    if at_once >= needs.members:
        plan = MemoryPlan(needs, at_once, None, lowers)
        log.info("%s", plan)
        return plan
    if sampled:
        fix = "Draw fewer members, or use smaller batches or precision='bf16'."
        checks.refuse("active_members", f"fit into memory, {mebibytes(budget)}", mebibytes(needs.whole), fix)
    plan = MemoryPlan(needs, at_once, MemberGroups(body, at_once, limit.separable, device))
    log.warning("%s: all at once would take %s", plan, mebibytes(needs.whole))
    return plan


def saved_bytes(forward: Callable[[], Tensor], known: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd keeps for a backward pass, counted by running the forward pass; ``known`` does not count."""
    sizes: dict[int, int] = {}
    storages: list[torch.UntypedStorage] = []

    def count(tensor: Tensor) -> None:  # returning the tensor would make a cycle that no collector breaks
        storage = tensor.untyped_storage()
        storages.append(storage)  # until the end, so that no address is used twice
        sizes[storage.data_ptr()] = storage.nbytes()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda packed: packed):
        output = forward()
    for tensor in known:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(sizes.values()) + output.numel() * output.element_size()


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device now."""
    if device.type == "cuda":  # memory that torch has reserved is free for torch
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
    except (OSError, StopIteration):  # not Linux: a guess that suits small machines
        return 4 * 2**30


def allowed(max_memory: int | None, device: torch.device, *, deterministic: bool = False) -> int:
    """Bytes that training may take: ``max_memory``, or a share of the free memory.

    The grouping of members changes the last bits of results, so deterministic training goes by the total memory: the
    free memory differs from one moment to the next.
    """
    if max_memory is not None:
        return checks.count("max_memory", max_memory)
    available = _all_bytes(device) if deterministic else free_bytes(device)
    return int(available * _SHARE_OF_FREE.get(device.type, 0.5))


def runs_at_once(bytes_per_run: int, runs: int, budget: int) -> int:
    """How many runs fit into the budget, at least one.

    >>> runs_at_once(100, 50, 1000)
    10
    """
    return min(runs, max(1, budget // max(bytes_per_run, 1)))


@dataclass(frozen=True)
class Footprint:
    """What was training when memory ran out."""

    device: torch.device
    runs: int
    members: int
    batch_size: int | None
    precision: str
    plan: MemoryPlan | None

    def advice(self) -> OutOfMemory:
        """What helps, the cheapest measure first."""
        at_once = self.members if self.plan is None or self.plan.groups is None else self.plan.at_once
        ways: list[str] = []
        if self.precision in ("float32", "tf32") and self.device.type == "cuda":
            ways.append("precision='bf16' (half the activations)")
        if at_once > 1 and self.plan is not None:
            half = self.plan.needs.held + at_once // 2 * self.plan.needs.per_member
            ways.append(f"max_memory={half} (fewer members at once, equal results; now {at_once})")
        if self.runs > 1:
            ways.append(f"a smaller max_memory (fewer runs at once; now {self.runs}), with a new folder of checkpoints")
        if self.batch_size is None or self.batch_size > 1:
            ways.append("a smaller batch" + (f" (now {self.batch_size})" if self.batch_size else ""))
        ways.append("fewer members" if self.members > 1 else "a smaller network")
        runs = f"{self.runs} runs of " if self.runs > 1 else ""
        return OutOfMemory(
            f"training ran out of memory on {self.device} with {runs}{counted(self.members, 'member')}. What helps: "
            + "; ".join(ways)
            + ("." if self.runs > 1 else ". The ensemble keeps the weights from before this step.")
        )


def mebibytes(count: int) -> str:
    """Bytes as text in MiB; fewer than a tenth of one as they are.

    >>> mebibytes(3 * 2**20), mebibytes(5000)
    ('3.0 MiB', '5,000 bytes')
    """
    return f"{count / 2**20:,.1f} MiB" if count >= 0.1 * 2**20 else f"{count:,} bytes"
