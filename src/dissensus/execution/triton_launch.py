"""Launches of Triton's kernels for layers of all members: where kernels run, and how they are cut into programs."""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

from dissensus.execution.graphs import on

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of tensors that kernels take."""
MOST_NUMBERS = 2**31 - 1
"""The largest size of one member's tensor, whose numbers kernels count in 32 bits."""
MOST_MEMBERS = 65535
"""The largest second and third dimension of a grid of CUDA blocks."""


@functools.cache
def kernels() -> Any:
    """The kernels, or None without Triton."""
    try:
        return importlib.import_module("dissensus.execution.triton_layers")
    except ImportError:
        return None


def runs_kernels(x: Tensor) -> bool:
    """Whether kernels take a tensor ``[M, ...]``."""
    fits = x.dtype in DTYPES and len(x) <= MOST_MEMBERS and x.numel() <= MOST_NUMBERS * len(x)
    return x.is_cuda and fits and kernels() is not None


def launch(name: str, grid: tuple[int, ...], x: Tensor, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the device of its first tensor."""
    with on(x.device):
        getattr(kernels(), name)[grid](x, *arguments, **constants)


def is_transformed(*tensors: Tensor) -> bool:
    """Whether a compiler, a transform of ``torch.func`` or forward-mode differentiation is at work.

    They look into torch's operations, and not into functions of ours.
    """
    if torch.compiler.is_compiling() or _are_functorch_transforms_active():
        return True
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def power(number: int) -> int:
    """The next power of two of at least 16, which sides of a product on matrix units are.

    >>> [power(number) for number in (3, 16, 17, 64)]
    [16, 16, 32, 64]
    """
    return max(1 << (number - 1).bit_length(), 16)


def parts_of(rows: int, programs: int, step: int, wanted: int) -> tuple[int, int]:
    """The number of parts of rows, and rows of each, for a number of programs that there are anyway.

    >>> parts_of(65536, 60, 64, 1024), parts_of(100, 60, 64, 1024), parts_of(65536, 4096, 64, 1024)
    ((18, 3648), (1, 128), (1, 65536))
    """
    parts = max(1, min(-(-wanted // programs), rows // (4 * step)))
    each = -(-rows // (parts * step)) * step
    return -(-rows // each), each
