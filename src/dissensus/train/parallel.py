"""Members of one ensemble over several processes: outputs travel, gradients of weights do not.

Every process (rank) trains its own members. A step runs them, gathers the outputs of all members, and computes the
objective on all of them; only the outputs of the rank's own members want a gradient.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dissensus import checks
from dissensus.execution import Body, StackedMembers
from dissensus.execution.skeleton import members_inside
from dissensus.train.notification import Callbacks

_FAILURE = "dissensus/failure"
_TIMEOUT = timedelta(minutes=10)
"""The longest wait for another rank. A process that ends closes its connections, which ends the wait at once."""


class RankFailed(RuntimeError):
    """Another process of a parallel training has failed; the message says which one and why, where that is known."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a training, and the members of each: consecutive ones, the first ranks have one more."""

    rank: int
    size: int
    members: int
    """Members of the whole ensemble."""
    group: Any = None
    """The process group of this training."""
    counts: list[int] = field(init=False)
    """Members of every rank."""

    def __post_init__(self) -> None:
        counts = [len(part) for part in torch.arange(self.members).tensor_split(self.size)]
        object.__setattr__(self, "counts", counts)

    @property
    def own(self) -> slice:
        """The members of this rank.

        >>> [Ranks(rank, 2, 5).own for rank in range(2)]
        [slice(0, 3, None), slice(3, 5, None)]
        """
        start = sum(self.counts[: self.rank])
        return slice(start, start + self.counts[self.rank])

    def gathered(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """A tensor of all members from those of every rank's own, along an axis; own entries keep their gradient."""
        mine = tensor.detach().movedim(axis, 0).contiguous()
        most = max(self.counts)
        if len(mine) < most:  # collectives take equal shapes
            mine = torch.cat([mine, mine.new_zeros(most - len(mine), *mine.shape[1:])])
        wire = mine.view(torch.uint8) if mine.dtype == torch.bool else mine
        pieces = [torch.empty_like(wire) for _ in self.counts]
        dist.all_gather(pieces, wire, group=self.group)
        parts = [
            piece.view(mine.dtype)[:count].movedim(0, axis) for piece, count in zip(pieces, self.counts, strict=True)
        ]
        parts[self.rank] = tensor
        return torch.cat(parts, axis)

    def all_agree(self, flag: bool, device: torch.device) -> bool:
        """Whether a flag is set on every rank."""
        number = torch.tensor(int(flag), device=device)
        dist.all_reduce(number, dist.ReduceOp.MIN, group=self.group)
        return bool(number)

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's tensor."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def decided(self, value: Any) -> Any:
        """The value of rank 0, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]


class RankCallbacks(Callbacks):
    """Callbacks that rank 0 calls; the others hear whether training stops."""

    def __init__(self, callbacks: Callbacks | None, ranks: Ranks) -> None:
        super().__init__(() if callbacks is None else callbacks.listeners)
        object.__setattr__(self, "_callbacks", callbacks if ranks.rank == 0 else None)
        object.__setattr__(self, "_ranks", ranks)
        object.__setattr__(self, "_sees", ranks.decided(callbacks is not None and callbacks.see_steps))

    @property
    def see_steps(self) -> bool:
        """Whether any callback of rank 0 wants the numbers of every step."""
        return self._sees  # pyright: ignore[reportAttributeAccessIssue]

    def _told(self, method: str, *arguments: Any) -> Any:
        callbacks, ranks = self._callbacks, self._ranks  # pyright: ignore[reportAttributeAccessIssue]
        return ranks.decided(None if callbacks is None else getattr(callbacks, method)(*arguments))

    def start(self, resumed: bool, histories: Any) -> None:
        """Tell the callbacks of rank 0 that a training begins, or goes on."""
        self._told("start", resumed, histories)

    def epoch(self, run: int, entry: Any) -> str | None:
        """Give the callbacks of rank 0 the entry of an epoch; the name of the first that stops the run."""
        return self._told("epoch", run, entry)

    def step(self, run: int, entry: Any) -> str | None:
        """Give the callbacks of rank 0 the numbers of a step; the name of the first that stops the run."""
        return self._told("step", run, entry)

    def runs(self, entries: Any) -> dict[int, str]:
        """Give the callbacks of rank 0 the epoch of all runs; those that they stop."""
        return self._told("runs", entries) or {}


def check_parallel(parallel: object, refused: dict[str, object], body: Body) -> bool:
    """Whether several processes train the ensemble; what they cannot train is refused.

    ``refused`` has the values of settings that do not go with it; None where a setting was not given.
    """
    if parallel is None:
        return False
    if parallel == "members+data":
        fix = 'Use parallel="members", with at most as many processes as members.'
        checks.refuse("parallel", "be 'members' or None; several processes per member are not built", parallel, fix)
    checks.one_of("parallel", parallel, ("members",))
    if not _started():
        return False
    for name, value in refused.items():
        if value is not None:
            checks.refuse(name, 'be left out with parallel="members"', str(value), "Train it in one process.")
    if not isinstance(body, StackedMembers):
        fix = "Train it in one process."
        checks.refuse("ensemble", 'have members of one architecture with parallel="members"', "several", fix)
    if members_inside(body.network):
        fix = "Its masks share all weights. Train it in one process."
        checks.refuse("ensemble", 'have members of their own weights with parallel="members"', "a Masked network", fix)
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if size > len(body):
        fix = f"Start torchrun with --nproc-per-node {len(body)}, or fewer."
        checks.refuse("parallel", "have a member for every process", f"{size} processes, {len(body)} members", fix)
    return size > 1


def _started() -> bool:
    """Whether there are processes: a process group, or the variables by which torchrun tells of them."""
    if not dist.is_available():
        return False
    return dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)


@contextmanager
def several_ranks(members: int, device: torch.device) -> Iterator[Ranks]:
    """A block of parallel training, with a process group of its own. A rank that fails ends the others."""
    backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=_TIMEOUT)
    group: Any = dist.new_group(timeout=_TIMEOUT, backend=backend)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), members, group)
    store = dist.distributed_c10d._get_default_store()
    key = f"{_FAILURE}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    try:
        yield ranks
    except BaseException as reason:
        lost = isinstance(reason, RuntimeError) and any(word in str(reason) for word in ("gloo", "peer", "NCCL"))
        if not lost:
            # Others wait for this rank: its words first, then the end of their connections.
            if store.add(f"{key}/count", 1) == 1:
                store.set(key, f"rank {ranks.rank}: {type(reason).__name__}: {reason}")
            dist.destroy_process_group(group)
            raise
        told = store.get(key).decode() if store.check([key]) else "a process that was killed, or a machine that is gone"
        raise RankFailed(f"training ended on rank {ranks.rank}, because another rank failed ({told}).") from reason
    else:
        dist.destroy_process_group(group)


def adopt(whole: Body, own: Body, ranks: Ranks) -> None:
    """Give an ensemble on every rank the tensors of all members, from those that every rank has trained."""
    tensors = {name: ranks.gathered(tensor.detach()) for name, tensor in own.tensors().items()}
    whole.adopt(tensors)
    with torch.no_grad():
        for name, tensor in whole.tensors().items():
            tensor.copy_(tensors[name])
        for name, tensor in whole.shared_tensors().items():
            tensor.copy_(own.shared_tensors()[name])
