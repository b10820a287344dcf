"""One kernel for a whole update, where there is a GPU and Triton: the passes over memory are what an update costs."""

import functools
import importlib
import logging
from typing import Any

import torch
from torch import Tensor

from dissensus.execution.skeleton import first_line

log = logging.getLogger("dissensus")

MOST_ROWS = 65535
"""What a grid of CUDA blocks can take in its second direction."""
_refused: list[str] = []


@functools.cache
def kernels() -> Any:
    """The kernels, or None without Triton."""
    try:
        return importlib.import_module("dissensus.train.kernels")
    except ImportError:
        return None


def takes(flat: Tensor) -> bool:
    """Whether updates of these weights run as one kernel: float32 on a GPU, with Triton at hand."""
    fits = flat.is_cuda and flat.dtype == torch.float32 and len(flat) <= MOST_ROWS
    return fits and not _refused and kernels() is not None


def launch(name: str, rows: Tensor, *arguments: Any, **constants: Any) -> bool:
    """Run a kernel over all rows and columns; False, with a notice, where Triton cannot compile it."""
    room = kernels()
    grid = (-(-rows.shape[1] // room.BLOCK), rows.shape[0])
    try:
        getattr(room, name)[grid](rows, *arguments, **constants, SIZE=room.BLOCK)
    except Exception as reason:  # a compiler may be missing: anything may come out of that
        _refused.append(first_line(reason))
        log.warning("updates take several passes: %s", _refused[0])
        return False
    return True
