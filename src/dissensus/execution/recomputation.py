"""Activation checkpointing inside members is detected and refused.

It repeats part of the forward pass in the backward pass. By then the weights that were lent to the network for the
forward pass have been taken back, so it would use other weights.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint

from dissensus.calls import NetworkInputs, first_tensor
from dissensus.execution.loop import run_loop
from dissensus.execution.skeleton import Skeleton, Tensors
from dissensus.execution.weights import Weights
from dissensus.randomness import generators_kept

MESSAGE = (
    "a member recomputes activations in the backward pass (torch.utils.checkpoint), which would use other weights than "
    "its forward pass. Switch it off, as in model.set_grad_checkpointing(False); to save memory, use "
    "fit(max_memory=...), which takes members in groups. Without gradients (torch.no_grad, predict) it does no harm."
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


class _Refusing(threading.local):
    """Whether this thread is inside `recomputation_refused`."""

    depth = 0


_refusing, _lock, _originals = _Refusing(), threading.Lock(), {}
_inside = [0]
"""Blocks that are open in all threads: torch's entries are guarded while there is one."""


@contextmanager
def recomputation_refused() -> Iterator[None]:
    """A block in which this thread cannot checkpoint activations; other threads can."""
    module: Any = torch.utils.checkpoint
    with _lock:
        if not _inside[0]:
            _originals.update({name: getattr(module, name) for name in ENTRIES})
            for name, original in _originals.items():
                setattr(module, name, _Guard(original))
        _inside[0] += 1
    _refusing.depth += 1
    try:
        yield
    finally:
        _refusing.depth -= 1
        with _lock:
            _inside[0] -= 1
            if not _inside[0]:
                for name, original in _originals.items():
                    setattr(module, name, original)


class _Guard:
    """Stands in for a function or an autograd function; a thread that refuses recomputation cannot call it."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def _unless_refused(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if _refusing.depth:
            raise RuntimeError(MESSAGE)
        return function(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._unless_refused(self.original, *args, **kwargs)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Call an autograd function."""
        return self._unless_refused(self.original.apply, *args, **kwargs)
