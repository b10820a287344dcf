"""Activation checkpointing: members repeat their forward pass in the backward pass, instead of keeping activations.

By then the weights that were lent to the network for the forward pass have been taken back. `run_recomputed` lends them
again, with buffers as they were before the pass: dropout drops the same units, and batch-norm statistics are updated
once. Everywhere else, checkpointing inside a member (`torch.utils.checkpoint`) is detected and refused, since it would
use other weights.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from dissensus.calls import NetworkInputs, first_tensor, rows, split_tensors
from dissensus.execution.counting import CallCounter, tallied
from dissensus.execution.loop import run_loop
from dissensus.execution.skeleton import Skeleton, Tensors
from dissensus.execution.weights import Weights
from dissensus.randomness import generators_kept

MESSAGE = (
    "a member recomputes activations in the backward pass (torch.utils.checkpoint), which would use other weights than "
    "its forward pass. Switch it off, as in model.set_grad_checkpointing(False), or use fit(recompute=True). To save "
    "memory, fit(max_memory=...) takes members in groups. Without gradients (torch.no_grad, predict) it "
    "does no harm."
)
REENTRANT = (
    "a member recomputes activations by reentrant checkpointing, which takes no gradients of stacked weights. Pass "
    "use_reentrant=False to torch.utils.checkpoint.checkpoint, or to transformers "
    "gradient_checkpointing_kwargs={'use_reentrant': False}."
)
ENTRIES = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
"""What both kinds of `torch.utils.checkpoint.checkpoint` call; users may have imported `checkpoint` itself."""


def refuse_recomputation(
    skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool
) -> None:
    """Run members with gradients, on copies of their buffers, and refuse them if they recompute activations."""
    copies = {name: tensor.clone() for name, tensor in buffers.items()}
    with torch.enable_grad(), generators_kept(first_tensor(x).device), recomputation_refused():
        run_loop(skeleton, weights, copies, x, per_member)


Lend = Callable[[], AbstractContextManager[object]]
"""Returns a block in which the network has weights and buffers that it had before."""


def run_recomputed(
    skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool
) -> Tensor:
    """Run members in turn; each is run again in the backward pass, where the activations of one member exist at a time.

    A network may checkpoint parts of itself as well.
    """
    parameters = weights.members()
    with tallied(skeleton, buffers, len(weights)) as state:
        return torch.stack(
            [
                recomputed_member(skeleton, parameters(index), state[index], rows(x, index) if per_member else x)
                for index in range(len(weights))
            ]
        )


def recomputed_member(skeleton: Skeleton, parameters: Tensors, state: Mapping[str, Any], x: NetworkInputs) -> Tensor:
    """One member's outputs, of which the backward pass keeps the inputs alone; buffers in ``state`` are written to."""
    inputs, rebuilt = split_tensors(x)
    before, passes = _copied(state), itertools.count()
    shared = skeleton.shared_tensors()  # those of this pass, which the backward pass needs again

    def forward(*tensors: Tensor) -> Tensor:
        held = state if next(passes) == 0 else _copied(before)

        def lend_again() -> Lend:
            now = _copied(held)
            return lambda: skeleton.lending(shared, parameters, _copied(now))

        with skeleton.lending(shared, parameters, held), _recomputation_supported(lend_again):
            return skeleton.passed(rebuilt(tensors))

    return torch.utils.checkpoint.checkpoint(forward, *inputs, use_reentrant=False)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Buffers as they are now; a counter of calls that the host keeps starts anew, since nothing reads it."""
    return {name: CallCounter() if isinstance(t, CallCounter) else t.detach().clone() for name, t in state.items()}


class _Local(threading.local):
    """What this thread does with a member that checkpoints activations."""

    refusing = 0
    """Open blocks of `recomputation_refused`."""
    lend_again: Callable[[], Lend] | None = None
    """Inside `_recomputation_supported`: notes what the network has been lent, and returns how to lend it again."""


_local, _lock, _originals = _Local(), threading.Lock(), {}
_inside = [0]
"""Blocks that are open in all threads: torch's entries are guarded while there is one."""


@contextmanager
def recomputation_refused() -> Iterator[None]:
    """A block in which this thread cannot checkpoint activations; other threads can."""
    with _guarded():
        _local.refusing += 1
        try:
            yield
        finally:
            _local.refusing -= 1


@contextmanager
def _recomputation_supported(lend_again: Callable[[], Lend]) -> Iterator[None]:
    """A block in which activations that this thread checkpoints are recomputed with the weights of the block."""
    before = _local.lend_again
    with _guarded():
        _local.lend_again = lend_again
        try:
            yield
        finally:
            _local.lend_again = before


@contextmanager
def _guarded() -> Iterator[None]:
    module: Any = torch.utils.checkpoint
    with _lock:
        if not _inside[0]:
            _originals.update({name: getattr(module, name) for name in ENTRIES})
            for name, original in _originals.items():
                setattr(module, name, _Guard(original))
        _inside[0] += 1
    try:
        yield
    finally:
        with _lock:
            _inside[0] -= 1
            if not _inside[0]:
                for name, original in _originals.items():
                    setattr(module, name, original)


class _Guard:
    """Stands in for torch's function or autograd function, which checkpoints activations."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, function: Any, preserve: bool, context_fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Checkpoint without reentrant passes, in the way that this thread allows."""
        if _local.refusing:
            raise RuntimeError(MESSAGE)
        if _local.lend_again is not None:
            context_fn = _with_weights(context_fn, _local.lend_again())
        return self.original(function, preserve, context_fn, *args, **kwargs)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Call an autograd function, which does a reentrant pass."""
        if _local.refusing or _local.lend_again is not None:
            raise RuntimeError(MESSAGE if _local.refusing else REENTRANT)
        return self.original.apply(*args, **kwargs)


def _with_weights(context_fn: Any, lend: Lend) -> Callable[[], tuple[Any, Any]]:
    """Contexts of a checkpointed function and of its recomputation, which is lent weights as well."""

    def contexts() -> tuple[Any, Any]:
        forward, recompute = context_fn()
        return forward, _Together(lend, recompute)

    return contexts


class _Together:
    """A context that is entered after weights have been lent; it may be entered again."""

    def __init__(self, lend: Lend, context: AbstractContextManager[object]) -> None:
        self.lend, self.context = lend, context

    def __enter__(self) -> None:
        self.stack = ExitStack()
        self.stack.enter_context(self.lend())
        self.stack.enter_context(self.context)

    def __exit__(self, *error: Any) -> bool | None:
        return self.stack.__exit__(*error)
