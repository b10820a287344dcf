"""TF32, the matrix units' way with float32 on a GPU: ten bits of a product's operands, where float32 has 23."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _switches() -> list[tuple[Any, str, Any, Any]]:
    """Where TF32 is switched, for convolutions and products: torch's newer switches where it has them.

    Once the newer ones have been used, torch refuses to read the older.
    """
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    if hasattr(cudnn, "conv"):
        return [(cudnn.conv, "fp32_precision", "ieee", "tf32"), (matmul, "fp32_precision", "ieee", "tf32")]
    return [(cudnn, "allow_tf32", False, True), (matmul, "allow_tf32", False, True)]


@contextmanager
def tf32(on: bool | None) -> Iterator[None]:
    """Switch it on or off, or leave it (None), and put it back in any case."""
    before = [getattr(place, name) for place, name, _, _ in _switches()]
    try:
        if on is not None:
            for place, name, no, yes in _switches():
                setattr(place, name, yes if on else no)
        yield
    finally:
        for (place, name, _, _), value in zip(_switches(), before, strict=True):
            setattr(place, name, value)
