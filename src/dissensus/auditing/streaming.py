"""Member outputs from anywhere, in slices of bounded size."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from dissensus import checks

NUMBERS_AT_ONCE = 2**21
"""Numbers per slice, which bounds the memory of an audit."""
_PER_MEMBER = 45
"""Numbers that are computed for every member and example, where outputs are fewer."""
_EXACT_UP_TO = 2**24
"""Largest number of outputs for which everything is computed in float64."""

Outputs = Any
"""A tensor, an array or a memory map ``[M, N, C]``, or M of them ``[N, C]``; also dense outputs ``[M, N, C, *S]``."""


class OutputReader:
    """Outputs of M members for N examples, read slice by slice.

    Dense outputs ``[M, N, C, *S]`` (segmentation, series) hold one prediction per pixel. Each pixel is an example here,
    and the pixels of an image follow each other. `images` is N, and `grid` is the shape S of an image, which is ``()``
    for outputs that are not dense.
    """

    def __init__(self, outputs: Outputs, name: str = "outputs", *, exact: bool = False) -> None:
        arrays: Sequence[Any] = outputs if isinstance(outputs, list | tuple) else [outputs]
        self.stacked = not isinstance(outputs, list | tuple)
        shapes = [tuple(array.shape) if hasattr(array, "shape") else None for array in arrays]
        wanted = "be an array [M, N, C], or a list of M arrays [N, C]; dense outputs are [M, N, C, H, W]"
        if not arrays or any(shape is None for shape in shapes):
            checks.refuse(name, wanted, type(outputs).__name__, error=TypeError)
        if len(set(shapes)) > 1:
            checks.refuse(name, "hold members of one shape", f"{sorted(set(map(str, shapes)))}")
        shape = shapes[0] if self.stacked else (len(arrays), *(shapes[0] or ()))
        assert shape is not None
        if len(shape) == 2:
            shape = (*shape, 1)  # one output per example
        if len(shape) >= 3 and 0 in shape:
            needs = "hold at least one member, one example and one output, [M, N, C]"
            checks.refuse(name, needs, checks.shape_text(shape))
        if len(shape) < 3:
            checks.refuse(
                name, wanted, checks.shape_text(shape) if shape else "one number", "One output per example? Use [M, N]."
            )
        self.arrays, self.name = arrays, name
        self.members, self.images, self.width = shape[:3]
        self.grid = tuple(shape[3:])
        self.pixels = math.prod(self.grid)
        self.examples = self.images * self.pixels
        few = self.members * self.examples * self.width <= _EXACT_UP_TO
        self.dtype = torch.float64 if few or exact else torch.float32  # values may be large beside their errors

    def check_classes(self) -> None:
        """Refuse a single column, which is no output of a classifier, with a way to make two columns of it."""
        if self.width > 1:
            return
        flat = len(self.arrays[0].shape) == (2 if self.stacked else 1)
        join = "stack" if flat else "concatenate"
        axis = -1 - len(self.grid)
        fixes = [
            "Probabilities p of the second class, as predict_proba(x)[:, 1] has them? Use "
            f"numpy.{join}([1 - p, p], {axis}), which are probabilities.",
            f"Its logits f? Use numpy.{join}([numpy.zeros_like(f), f], {axis}).",
        ]
        if flat and self.stacked:
            fixes.append("One network, [N, C]? Use outputs[None].")
        shape = checks.shape_text(self.arrays[0].shape) + (
            "" if self.stacked else f" from each of {self.members} members"
        )
        wanted = "[M, N, C]" if self.stacked else "[N, C]"
        checks.refuse(self.name, f"have two columns or more, one for each class, {wanted}", shape, " ".join(fixes))

    @property
    def numbers(self) -> int:
        """Number of all outputs."""
        return self.members * self.examples * self.width

    def slices(self) -> Iterator[tuple[slice, Float[Tensor, "M n C"]]]:
        """Pairs (rows, outputs), one slice after the other, finite and in full precision."""
        for rows, part in self.parts():
            outputs = part.to(self.dtype)
            self.check_finite(outputs, rows.start)
            yield rows, outputs.transpose(0, 1)

    def parts(self, at_once: int | None = None) -> Iterator[tuple[slice, Shaped[Tensor, "n M C"]]]:
        """Pairs (rows, outputs as they are stored) of about `at_once` numbers each, one slice after the other."""
        start = 0
        for index in self._indices(NUMBERS_AT_ONCE if at_once is None else at_once):
            part = self._at(index)
            rows = slice(start, start + len(part))
            yield rows, part
            start = rows.stop

    def check_finite(self, outputs: Float[Tensor, "n M C"], start: int) -> None:
        """Refuse outputs that are not finite; `start` is the number of the first example."""
        if bool(outputs.sum(-1).isfinite().all()):  # one pass; only sums that are not finite need a closer look
            return
        if not bool(outputs.isfinite().all()):
            row, member = (~outputs.isfinite()).nonzero()[0, :2].tolist()
            example = f"image {(start + row) // self.pixels}" if self.grid else f"example {start + row}"
            got = f"NaN or infinity at member {member}, {example}"
            checks.refuse(self.name, "be finite", got, "Leave such members or examples out.")

    def _indices(self, at_once: int) -> Iterator[tuple[slice, ...]]:
        """Indices of what is read at once: several images, or some lines of an image that is too large."""
        size = max(1, at_once // (self.members * max(self.width, self.members, _PER_MEMBER)))
        if self.pixels <= size or not self.grid:
            step = size // self.pixels
            yield from ((slice(at, min(at + step, self.images)),) for at in range(0, self.images, step))
            return
        lines = max(1, size * self.grid[0] // self.pixels)
        for image in range(self.images):
            for at in range(0, self.grid[0], lines):
                yield slice(image, image + 1), slice(None), slice(at, min(at + lines, self.grid[0]))

    def _at(self, index: tuple[slice, ...]) -> Shaped[Tensor, "n M C"]:
        if self.stacked:
            part = as_tensor(self.arrays[0][(slice(None), *index)], self.name).transpose(0, 1)
        else:
            part = torch.stack([as_tensor(array[index], self.name) for array in self.arrays], 1)
        if self.grid:
            part = part.flatten(3).permute(0, 3, 1, 2)
        return part.reshape(-1, self.members, self.width)


def as_tensor(numbers: Any, name: str, fix: str = "") -> Tensor:
    """Numbers of any array as a tensor on the host."""
    if isinstance(numbers, Tensor):
        return numbers.detach().cpu()
    checks.unmasked(numbers, name)
    array = np.array(numbers)  # a copy: a slice of a file may not be written to
    if array.dtype.kind not in "fiub":
        checks.refuse(name, "be numbers", str(array.dtype), fix, TypeError)
    extended = array.dtype.kind == "f" and array.dtype.itemsize > 8  # torch has no such numbers
    return torch.from_numpy(array.astype(np.float64 if extended else array.dtype.newbyteorder("="), copy=False))
