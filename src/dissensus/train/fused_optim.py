"""One kernel for a whole update on a GPU with Triton: the cost of an update is its passes over memory."""

import functools
import importlib
import logging
import math
from typing import Any

import torch
from torch import Tensor

from dissensus.execution.skeleton import first_line
from dissensus.train.lowered_weights import Gradient, LoweredGradient

log = logging.getLogger("dissensus")

MOST_ROWS = 65535
"""The largest second dimension of a grid of CUDA blocks."""
MOST_COLUMNS = 2**31 - 2**12
"""Kernels count columns, and the blocks of them, in 32 bits."""
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
    fits = fits and flat.shape[1] < MOST_COLUMNS
    return fits and not _refused and kernels() is not None


def launch(name: str, flat: Tensor, grad: Gradient, *arguments: Any, **constants: Any) -> bool:
    """Run a kernel over all rows and columns; False, with a notice, where Triton cannot compile it."""
    module = kernels()
    grid = (-(-flat.shape[1] // module.BLOCK), flat.shape[0])
    split = isinstance(grad, LoweredGradient)
    tensors = (grad.products, grad.rest, grad.copies) if split else (grad.contiguous(), flat, flat)
    columns, width = flat.shape[1], tensors[0].shape[1]
    align = math.gcd(columns, width, 4)  # as many numbers as a thread reads at once
    try:
        kernel = getattr(module, name)[grid]
        constants |= {"SPLIT": split, "ALIGN": align, "SIZE": module.BLOCK}
        kernel(flat, *tensors, columns // align, width // align, *arguments, **constants)
    except Exception as reason:  # a missing compiler may raise anything
        _refused.append(first_line(reason))
        log.warning("updates take several passes: %s", _refused[0])
        return False
    return True
