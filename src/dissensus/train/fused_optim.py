"""One kernel for a whole update on a GPU with Triton: the cost of an update is its passes over memory."""

import functools
import importlib
import logging
from typing import Any

import torch
from torch import Tensor

from dissensus.execution.skeleton import first_line

log = logging.getLogger("dissensus")

MOST_ROWS = 65535
"""The largest second dimension of a grid of CUDA blocks."""
_refused: list[str] = []


@functools.cache
def kernels() -> Any:
    """The kernels, or None without Triton."""
    try:
        return importlib.import_module("dissensus.train.triton_kernels")
    except ImportError:
        return None


def takes(flat: Tensor) -> bool:
    """Whether updates of these weights run as one kernel: float32 on a GPU, with Triton installed.

    Rows must follow each other, which those of a section of a wider matrix do not.
    """
    fits = flat.is_cuda and flat.dtype == torch.float32 and len(flat) <= MOST_ROWS and flat.is_contiguous()
    return fits and not _refused and kernels() is not None


def launch(name: str, rows: Tensor, *arguments: Any, **constants: Any) -> bool:
    """Run a kernel over all rows and columns; False, with a notice, where Triton cannot compile it."""
    module = kernels()
    grid = (-(-rows.shape[1] // module.BLOCK), rows.shape[0])
    try:
        getattr(module, name)[grid](rows, *arguments, **constants, SIZE=module.BLOCK)
    except Exception as reason:  # a missing compiler may raise anything
        _refused.append(first_line(reason))
        log.warning("updates take several passes: %s", _refused[0])
        return False
    return True
