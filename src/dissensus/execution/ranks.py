"""Members of one ensemble over several processes: outputs travel, gradients of weights do not.

Every process (rank) trains its own members. A step runs them, gathers the outputs of all members, and computes the
objective on all of them; only the outputs of the rank's own members want a gradient. Processes form a mesh
``members × data``: those of one row of it train the same members, each on its part of the batch.
"""

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dissensus import calls, checks
from dissensus.calls import NetworkInputs
from dissensus.execution.body import Body
from dissensus.execution.graphs import between, in_pieces
from dissensus.execution.meeting import TIMEOUT, RankFailed, is_started, meet, place, watch_end
from dissensus.randomness import part_of_batch

_LOST = re.compile(r"[Gg]loo|NCCL|[Cc]onnection (closed|reset|refused)|by peer")
"""Words of errors that say that another process is gone."""
_open: list[str] = []
"""The call whose block of parallel work is under way."""
MEMBERS, DATA = "members", "data"
"""The dimensions of the mesh of processes."""


def parts(count: int, size: int) -> list[int]:
    """The lengths of ``size`` parts of ``count`` things, the first ones longer by one where they differ.

    >>> parts(5, 2), parts(2, 3)
    ([3, 2], [1, 1, 0])
    """
    return [count // size + (part < count % size) for part in range(size)]


def mesh_shape(size: int, members: int, parallel: str) -> tuple[int, int]:
    """The shape of a mesh of ``size`` processes: as many groups of members as possible, and processes of each.

    >>> mesh_shape(4, 5, "members"), mesh_shape(4, 5, "members+data"), mesh_shape(6, 4, "members+data")
    ((4, 1), (4, 1), (3, 2))
    """
    if parallel == MEMBERS:
        return size, 1
    groups = max(groups for groups in range(1, min(size, members) + 1) if size % groups == 0)
    return groups, size // groups


class Connections:
    """The process groups of a training. They are closed when nothing refers to them any more, so nothing else may."""

    def __init__(self, here: "Ranks", device: str) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        self.whole: Any = dist.new_group(timeout=TIMEOUT)
        """All processes."""
        self.control: Any = dist.new_group(timeout=TIMEOUT, backend="gloo")
        """All processes, on the host, for what is decided."""
        self._others: list[Any] = []
        if here.data_size == 1:
            self.mesh: Any = DeviceMesh.from_group(self.whole, device, mesh_dim_names=(MEMBERS,))
            return
        places = torch.arange(here.size * here.data_size).view(here.size, here.data_size)
        for lists in (places.T.tolist(), places.tolist()):
            self._others.append(dist.new_subgroups_by_enumeration(lists, timeout=TIMEOUT)[0])
        self.mesh = DeviceMesh.from_group(self._others, device, mesh=places, mesh_dim_names=(MEMBERS, DATA))

    def close(self, *, failed: bool) -> None:
        """Close all groups; others that wait for this process then hear that it has left."""
        groups = [self.whole, self.control, *self._others]
        self.whole = self.control = self.mesh = None
        self._others = []
        while groups:
            with suppress(RuntimeError, ValueError, AttributeError):
                if failed:
                    groups[-1].abort()
                dist.destroy_process_group(groups[-1])
            groups.pop()


@dataclass(frozen=True)
class Ranks:
    """The processes of a training, and the members of each: consecutive ones, the first ranks have one more."""

    members: int
    """Members of the whole ensemble."""
    rank: int = 0
    """The place of this process along the members."""
    size: int = 1
    """Groups of members."""
    data_rank: int = 0
    """The place of this process among those that train the same members."""
    data_size: int = 1
    """Processes that train the same members, each on a part of the batch."""
    connections: "Connections | None" = None
    """None before processes are connected, and afterwards."""
    captures: bool = False
    """Whether a graph can hold collectives."""
    counts: list[int] = field(init=False)
    """Members of every group."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", parts(self.members, self.size))

    @property
    def own(self) -> slice:
        """The members of this rank.

        >>> [Ranks(5, rank, 2).own for rank in range(2)]
        [slice(0, 3, None), slice(3, 5, None)]
        """
        start = sum(self.counts[: self.rank])
        return slice(start, start + self.counts[self.rank])

    @property
    def first(self) -> bool:
        """Whether this is the process that decides and reports."""
        return self.rank == self.data_rank == 0

    def splits(self, examples: int) -> bool:
        """Whether processes of the same members share a batch; one that is too small all of them run whole."""
        return examples >= self.data_size > 1

    def part(self, examples: int) -> slice:
        """The part of a batch that this process runs."""
        if not self.splits(examples):
            return slice(0, examples)
        lengths = parts(examples, self.data_size)
        start = sum(lengths[: self.data_rank])
        return slice(start, start + lengths[self.data_rank])

    def run(
        self,
        run: Callable[[NetworkInputs], Tensor],
        x: NetworkInputs,
        counts: Sequence[int] | None,
        *,
        per_member: bool,
    ) -> Tensor:
        """Outputs ``[M, B, ...]`` of the members of all processes, of which those of this one keep their gradient.

        A gradient for ``x`` is that of all members. ``counts``: the members of each process in this pass, where not all
        run; ``per_member``: x has an axis of this process's members before the examples, and a gradient for these only.
        """
        axis = int(per_member)
        examples = calls.first_tensor(x).shape[axis]
        part, groups = self.part(examples), [DATA] if per_member else [MEMBERS, DATA]
        length = part.stop - part.start
        x = calls.mapped(lambda tensor: self._spread(tensor, groups).narrow(axis, part.start, length), x)
        counts = self.counts if counts is None else counts
        if counts[self.rank]:
            with part_of_batch(part.start, length) if self.splits(examples) else nullcontext():
                outputs = run(x)
        else:
            outputs = None
        if not all(counts):  # those that run nothing learn the shape from one that does
            source = next(rank for rank, count in enumerate(counts) if count) * self.data_size
            shape = self.decided(None if outputs is None else (outputs.shape[2:], outputs.dtype), source)
            if outputs is None:
                outputs = torch.empty((0, length, *shape[0]), dtype=shape[1], device=_device(x))
        assert outputs is not None
        if outputs.dtype in (torch.bfloat16, torch.float16):
            outputs = outputs.float()
        if self.splits(examples):
            outputs = self._gathered(outputs, 1, DATA, parts(examples, self.data_size), self.data_rank)
        elif self.data_size > 1 and self.data_rank:  # the gradient of a batch that all have run counts once
            outputs = outputs.detach() + 0.0 * outputs
        return self._gathered(outputs, 0, MEMBERS, counts, self.rank)

    def counts_of(self, sampled: Tensor | None) -> list[int]:
        """How many members of every group are among those that a step has sampled, ``[1, K]``."""
        if sampled is None:
            return self.counts
        starts = [sum(self.counts[:rank]) for rank in range(self.size + 1)]
        numbers = sampled.flatten().tolist()
        return [sum(start <= n < stop for n in numbers) for start, stop in pairwise(starts)]

    def gathered(self, tensor: Tensor, axis: int = 0, counts: Sequence[int] | None = None) -> Tensor:
        """A tensor of all members from those of every rank's own, along an axis; own entries keep their gradient."""
        return self._gathered(tensor, axis, MEMBERS, self.counts if counts is None else counts, self.rank)

    def _gathered(self, tensor: Tensor, axis: int, dimension: str, counts: Sequence[int], place: int) -> Tensor:
        """A tensor of all processes of a dimension of the mesh; this one's entries keep their gradient."""
        mine = tensor.detach().movedim(axis, 0)
        most = max(counts)
        if len(mine) < most:  # collectives take equal shapes
            mine = torch.cat([mine, mine.new_zeros(most - len(mine), *mine.shape[1:])])
        mine = mine.contiguous()
        wire = mine.view(torch.uint8) if mine.dtype == torch.bool else mine
        gather, group = torch.ops._c10d_functional.all_gather_into_tensor, self._group(dimension)
        shape = (len(counts) * most, *wire.shape[1:])
        gathered = self._carried(lambda sent: gather(sent, len(counts), group), wire, shape)
        pieces = gathered.view(mine.dtype).split(most)
        entries = [piece[:count].movedim(0, axis) for piece, count in zip(pieces, counts, strict=True)]
        entries[place] = tensor
        return torch.cat(entries, axis)

    @property
    def _connected(self) -> Connections:
        assert self.connections is not None
        return self.connections

    def _group(self, dimension: str) -> str:
        """The name of the group of this process along a dimension of the mesh."""
        return self._connected.mesh.get_group(dimension).group_name

    def _carried(self, collective: Callable[[Tensor], Tensor], sent: Tensor, shape: Sequence[int]) -> Tensor:
        """What a collective returns. A graph that cannot hold it is captured in pieces, with the collective between."""

        def received() -> Tensor:
            wire = sent if self.captures else sent.cpu()  # gloo takes memory of a card in some collectives only
            return torch.ops._c10d_functional.wait_tensor(collective(wire)).to(sent.device)

        if self.captures or not in_pieces():
            return received()
        result = sent.new_empty(shape)
        between(lambda: result.copy_(received()))
        return result

    def _reduced(self, tensor: Tensor, operation: str, group: str) -> Tensor:
        tensor, reduce = tensor.detach().contiguous(), torch.ops._c10d_functional.all_reduce
        return self._carried(lambda sent: reduce(sent, operation, group), tensor, tensor.shape)

    def agreed(self, flags: Tensor) -> Tensor:
        """Flags that are set on every rank."""
        return self._reduced(flags.to(torch.int32), "min", self._connected.whole.group_name).bool()

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's tensor."""
        return self._reduced(tensor, "sum", self._connected.whole.group_name)

    def summed_over_data(self, tensor: Tensor) -> Tensor:
        """The sum over the processes of the same members."""
        return tensor if self.data_size == 1 else self._reduced(tensor, "sum", self._group(DATA))

    def averaged_over_data(self, body: Body) -> None:
        """Give the processes of the same members the mean of their statistics, which saw different examples."""
        if self.data_size == 1:
            return
        with torch.no_grad():
            for tensor in body.state().values():
                if tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter):
                    tensor.copy_(self.summed_over_data(tensor) / self.data_size)

    def _spread(self, x: Tensor, dimensions: Sequence[str]) -> Tensor:
        """An input that several processes use: its gradient is the sum of theirs."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        sizes = {MEMBERS: self.size, DATA: self.data_size}
        groups = [self._group(name) for name in dimensions if sizes[name] > 1]
        return _Spread.apply(x, self, groups) if groups else x

    def decided(self, value: Any, source: int = 0) -> Any:
        """The value of rank 0, or of another one, on every rank."""
        if self.size * self.data_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self._connected.control, device=torch.device("cpu"))
        return box[0]

    def everyone(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        values = [value] * (self.size * self.data_size)
        if len(values) > 1:
            dist.all_gather_object(values, value, group=self._connected.control)
        return values

    def numbers(self, *values: int) -> list[list[int]]:
        """A few whole numbers of every rank, on every rank; it is faster than `everyone`."""
        mine = torch.tensor(values, dtype=torch.int64)
        each = [torch.empty_like(mine) for _ in range(self.size * self.data_size)]
        dist.all_gather(each, mine, group=self._connected.control)
        return [numbers.tolist() for numbers in each]


class _Spread(torch.autograd.Function):
    """The identity, whose backward pass sums gradients over groups of processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, groups: Sequence[Any]) -> Tensor:
        """The input itself."""
        ctx.ranks, ctx.groups = ranks, groups
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The sum of all processes' gradients."""
        for group in ctx.groups:
            grad = ctx.ranks._reduced(grad, "sum", group)
        return grad, None, None


def _device(x: NetworkInputs) -> torch.device:
    return calls.first_tensor(x).device


def members_of_rank(members: int, parallel: str) -> Ranks:
    """The place of this process, with no connection to the others yet."""
    rank, size = place()
    if size > members and parallel == MEMBERS:
        fix = f"Start torchrun with --nproc-per-node {members}, or fewer; or use parallel='members+data'."
        checks.refuse("parallel", "have a member for every process", f"{size} processes, {members} members", fix)
    groups, data_size = mesh_shape(size, members, parallel)
    return Ranks(members, rank // data_size, groups, rank % data_size, data_size)


@contextmanager
def several_ranks(members: int, device: torch.device, parallel: str = MEMBERS, call: str = "fit") -> Iterator[Ranks]:
    """A block of parallel work, with process groups of its own. A rank that fails ends the others.

    ``call`` is what a user has called, in words; all processes must be in the same call.
    """
    if _open:
        fix = "Callbacks are called in the first process only. Call it after training."
        requirement = f"be called outside of {_open[0]}, in which other processes take no part in it"
        checks.refuse(call, requirement, "a call inside", fix, RuntimeError)
    here = members_of_rank(members, parallel)
    meeting, rank = meet(device, f"`{call}` of {members} members with parallel={parallel!r}"), dist.get_rank()
    on_card = device.type == "cuda" and "nccl" in str(dist.get_backend_config())
    ranks, failed = here, False
    _open.append(f"`{call}`")
    try:
        ranks = replace(here, connections=Connections(here, "cuda" if on_card else "cpu"), captures=on_card)
        yield ranks
    except BaseException as reason:
        failed = True
        if not (isinstance(reason, RuntimeError) and _LOST.search(str(reason))):
            # Others wait for this rank: its words first, then the end of their connections.
            meeting.tell(f"rank {rank}: {type(reason).__name__}: {reason}")
            raise
        traceback.clear_frames(reason.__traceback__)  # they refer to connections, which others wait for
        told = meeting.told()
        words = told or "a process that was killed, or a machine that is gone"
        failure = RankFailed(f"`{call}` ended on rank {rank}, because another rank failed ({words}).")
        raise failure from (None if told else reason)
    finally:
        _open.pop()
        if ranks.connections is not None:
            ranks.connections.close(failed=failed)


def checked_parallel(parallel: object) -> str | None:
    """A value of ``parallel``; None where there is nothing to share among processes."""
    if parallel is None:
        return None
    checks.one_of("parallel", parallel, ("members", "members+data"))
    if not is_started():
        return None
    watch_end()
    return str(parallel)


def adopt(whole: Body, own: Body, ranks: Ranks) -> None:
    """Give an ensemble on every rank the tensors of all members, from those that every rank has trained."""
    tensors = {name: ranks.gathered(tensor.detach()) for name, tensor in own.tensors().items()}
    whole.adopt(tensors)
    with torch.no_grad():
        for name, tensor in whole.tensors().items():
            tensor.copy_(tensors[name])
        for name, tensor in whole.shared_tensors().items():
            tensor.copy_(own.shared_tensors()[name])
