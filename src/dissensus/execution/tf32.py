"""TF32: float32 products on a GPU's matrix units with 10 mantissa bits of their operands instead of 23."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _switches() -> list[tuple[Any, str, Any, Any]]:
    """The switches of TF32 for convolutions and products, as (object, attribute, value for off, value for on).

    PyTorch's newer switches are used if they exist: after that, PyTorch refuses to read the older ones.
    """
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    if hasattr(cudnn, "conv"):
        return [(cudnn.conv, "fp32_precision", "ieee", "tf32"), (matmul, "fp32_precision", "ieee", "tf32")]
    return [(cudnn, "allow_tf32", False, True), (matmul, "allow_tf32", False, True)]


def convolutions_use_tf32() -> bool:
    """Whether float32 convolutions on a GPU may use TF32."""
    place, name, _, on = _switches()[0]
    return getattr(place, name) == on


@contextmanager
def tf32(on: bool | None) -> Iterator[None]:
    """Enable or disable TF32 for a block; None leaves it as it is."""
    before = [getattr(place, name) for place, name, _, _ in _switches()]
    try:
        if on is not None:
            for place, name, no, yes in _switches():
                setattr(place, name, yes if on else no)
        yield
    finally:
        for (place, name, _, _), value in zip(_switches(), before, strict=True):
            setattr(place, name, value)
