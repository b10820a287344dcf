"""The interface of all members of an ensemble: stacked, of different architectures, or elsewhere."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from dissensus.calls import NetworkInputs, OutputChoice
from dissensus.execution.backends import Backend
from dissensus.execution.choice import Choices
from dissensus.execution.signature import Visit
from dissensus.execution.skeleton import Tensors
from dissensus.execution.weights import Section

ALL_ROWS = slice(None)


@runtime_checkable
class Body(Protocol):
    """M members with one set of tensors, whose trainable parameters can be packed into one matrix ``[M, P]``.

    Training and inference use members through this interface only. In a sweep the members of all runs are rows of one
    body.
    """

    training: bool
    backend: str
    """The name of the requested backend."""
    ran: str
    """The backend of the latest pass."""
    channels_last: bool
    """Whether packed weights of convolutions are stored channels last."""
    by_rule: bool
    """Whether ``"auto"`` chooses by a fixed rule instead of measuring, so that equal trainings are equal to the bit."""
    passes: int | None
    """The number of training passes that follow, by which ``"auto"`` decides how long to measure; None: unknown."""
    recompute: bool
    """Whether passes with gradients run in a loop and repeat every member's forward pass in the backward pass."""
    compiling: bool | str
    """Whether passes of training run compiled, or ``"auto"``: where they are many and that is faster."""
    choices: Choices
    """Backends chosen so far, by mode of use."""

    @property
    def output(self) -> OutputChoice | None:
        """Which part of what a network returns is its output; None: it returns one tensor."""
        ...

    @output.setter
    def output(self, output: OutputChoice | None) -> None: ...

    @property
    def requested_backend(self) -> str | Backend:
        """``"auto"``, the name of a backend, or a backend from outside of the package."""
        ...

    @property
    def alike(self) -> bool:
        """Whether all members have one architecture; every tensor then has a leading member axis."""
        ...

    def __len__(self) -> int:
        """The number of members M."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, counters of dropout included."""
        ...

    def shared_tensors(self) -> dict[str, Tensor]:
        """Tensors that all members share, by name; they have no member axis."""
        ...

    def shared_trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that all members share and that want a gradient."""
        ...

    def shared_packed(self) -> Tensor:
        """Shared trainable parameters, one row per run ``[R, P]``; afterwards the parameters are views of it."""
        ...

    def attach_shared(self, rows: Tensor) -> None:
        """Replace the shared trainable parameters of all runs ``[R, P]``, after `attach`."""
        ...

    def shared_views(self, row: Tensor) -> dict[str, Tensor]:
        """Shared trainable parameters by name, as views of a row ``[1, P]``."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Tensors that training changes without a gradient, such as batch-norm statistics."""
        ...

    def packed(self) -> Tensor:
        """All trainable parameters as one matrix ``[M, P]``; afterwards the parameters are views of it."""
        ...

    def views(self, flat: Tensor) -> list[dict[str, Tensor]]:
        """Each row's columns of trainable parameters by name, as views, in the order of the network's parameters.

        ``flat`` is a gradient or a mask ``[M, P]``, or has other rows where all members have one architecture.
        """
        ...

    def weights(self, flat: Tensor) -> list[dict[str, Tensor]]:
        """Each row's trainable parameters by name, as views of the matrix that holds them, in their own dtypes."""
        ...

    @property
    def sections(self) -> tuple[Section, ...]:
        """The columns of every dtype, where trainable parameters have several; else empty."""
        ...

    def run(
        self,
        flat: Tensor | None,
        x: NetworkInputs,
        *,
        per_member: bool = False,
        rows: slice | Tensor = ALL_ROWS,
        replayed: bool = False,
        backend: str | None = None,
        shared: Tensor | None = None,
    ) -> Tensor:
        """Outputs ``[M, B, ...]``.

        Args:
            flat: Packed parameters of the rows that run; None for the body's own parameters.
            x: A batch for all members, whose tensors are ``[B, ...]``, or ``[M, B, ...]`` with ``per_member``.
            per_member: Whether every member has a batch of its own.
            rows: Members that run: a slice, or their numbers.
            replayed: Whether this pass is going to be replayed from a CUDA graph, which changes what is fastest.
            backend: The backend of this pass alone; by default the body's, whose choice is remembered.
            shared: Packed parameters that the members of each run share, ``[R, P]``; None for the body's own.
        """
        ...

    def is_batchable(self) -> bool:
        """Whether the backend ``"batched"`` supports every layer."""
        ...

    def member(self, index: int) -> nn.Module:
        """A copy of one member as an ordinary module."""
        ...

    def mean(self) -> nn.Module:
        """An ordinary module with the members' mean weights."""
        ...

    def subset(self, indices: Sequence[int]) -> "Body":
        """Copies of the members at these indices."""
        ...

    def copy_member(self, index: int, other: "Body") -> None:
        """Overwrite one member with the member at the same index of another body."""
        ...

    def identity(self, opaque: list[str] | None = None, visit: Visit | None = None) -> str:
        """A checksum of the architecture, by which checkpoints recognise it.

        ``opaque`` gets the types of everything that cannot be inspected; ``visit`` is called with what the networks
        consist of, apart from their tensors.
        """
        ...

    def set_keys(self, owners: Sequence[tuple[int, int]]) -> None:
        """Key dropout by the (run seed, member) of each row."""
        ...

    def attach(self, flat: Tensor, state: Tensors) -> None:
        """Replace all rows: parameters become views of a matrix ``[G, P]``, and ``state`` replaces `state`."""
        ...

    def late_names(self) -> tuple[list[str], list[str]]:
        """Names of buffers that the first pass has made, and of those that are None, which a pass may make."""
        ...

    def adopt(self, tensors: Tensors) -> None:
        """Take buffers that the members do not have yet, because their first pass makes them; others are left."""
        ...

    def snapshot(self) -> Callable[[], None]:
        """Copy all buffers; what is returned restores them, and takes those away that have appeared since."""
        ...

    def average(self, into: Tensors, source: Tensors, weight: Tensor) -> None:
        """Move tensors towards those of ``source`` by a weight ``[M]``, 0 for none and 1 for all of the way."""
        ...

    def merge(self, into: Tensors, source: Tensors, members: Tensor) -> None:
        """Copy the members of a mask (bool ``[M]``) from ``source`` to ``into``, both as `state` returns them."""
        ...

    def train(self, mode: bool = True) -> Any:
        """Set training mode."""
        ...

    def eval(self) -> Any:
        """Set evaluation mode."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """Every layer."""
        ...

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast all tensors."""
        ...


_replayed: ContextVar[bool] = ContextVar("replayed", default=False)


@contextmanager
def passes_replayed() -> Iterator[None]:
    """A block in which passes of ensembles, wherever a model calls them, are going to be replayed from CUDA graphs."""
    token = _replayed.set(True)
    try:
        yield
    finally:
        _replayed.reset(token)


def are_passes_replayed() -> bool:
    """Whether this code runs inside of `passes_replayed`."""
    return not torch.compiler.is_compiling() and _replayed.get()
