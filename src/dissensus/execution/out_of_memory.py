"""Errors about memory: recognised, and replaced by one that says what helps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_TEXTS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
"""Of errors of torch's allocators and of CUDA's libraries, which have no class of their own."""


class OutOfMemory(RuntimeError):
    """Training or prediction ran out of memory; the message says what helps."""


def ran_out(reason: BaseException) -> bool:
    """Whether an error means that memory has run out.

    >>> ran_out(MemoryError()), ran_out(RuntimeError("CUDA error: out of memory")), ran_out(RuntimeError("other"))
    (True, True, False)
    """
    if isinstance(reason, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(reason, RuntimeError) and any(text in str(reason) for text in _TEXTS)


@contextmanager
def advising(advice: Callable[[], OutOfMemory]) -> Iterator[None]:
    """A block whose errors about memory are replaced by advice."""
    try:
        yield
    except OutOfMemory:
        raise
    except (RuntimeError, MemoryError) as reason:
        if not ran_out(reason):
            raise
        raise advice() from None
