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
"""Numbers of a slice: what bounds the memory of an audit."""
_PER_MEMBER = 45
"""Numbers that are counted of every member and example, where outputs are fewer."""
_EXACT_UP_TO = 2**24
"""Numbers up to which everything is computed in float64."""

Outputs = Any
"""``[M, N, C]`` as a tensor, an array or a memory map, or M of them ``[N, C]``; dense outputs ``[M, N, C, *S]`` too."""


class Members:
    """M members' outputs for N examples, read slice by slice.

    Dense outputs ``[M, N, C, *S]`` (segmentation, series) hold one prediction per pixel: each pixel is an example here,
    and the pixels of an image follow each other. `images` is N, and `grid` is the shape S of an image, ``()`` for
    outputs that are not dense.
    """

    def __init__(self, outputs: Outputs, name: str = "outputs", *, exact: bool = False) -> None:
        each: Sequence[Any] = outputs if isinstance(outputs, list | tuple) else [outputs]
        self.stacked = not isinstance(outputs, list | tuple)
        shapes = [tuple(part.shape) if hasattr(part, "shape") else None for part in each]
        wanted = "be an array [M, N, C], or a list of M arrays [N, C]; dense outputs are [M, N, C, H, W]"
        if not each or any(shape is None for shape in shapes):
            checks.refuse(name, wanted, type(outputs).__name__, error=TypeError)
        if len(set(shapes)) > 1:
            checks.refuse(name, "hold members of one shape", f"{sorted(set(map(str, shapes)))}")
        shape = shapes[0] if self.stacked else (len(each), *(shapes[0] or ()))
        assert shape is not None
        if len(shape) == 2:
            shape = (*shape, 1)  # one output per example
        if len(shape) < 3 or 0 in shape:
            checks.refuse(name, wanted, checks.shape_text(shape), "One output per example? [M, N] will do.")
        self.each, self.name = each, name
        self.members, self.images, self.width = shape[:3]
        self.grid = tuple(shape[3:])
        self.pixels = math.prod(self.grid)
        self.examples = self.images * self.pixels
        few = self.members * self.examples * self.width <= _EXACT_UP_TO
        self.dtype = torch.float64 if few or exact else torch.float32  # values may be large beside their errors

    def check_classes(self) -> None:
        """Refuse a single column, which is no output of a classifier, and say how two columns are made of it."""
        if self.width > 1:
            return
        flat = len(self.each[0].shape) == (2 if self.stacked else 1)
        join = "stack" if flat else "concatenate"
        axis = -1 - len(self.grid)
        fixes = [
            "Probabilities p of the second class, as predict_proba(x)[:, 1] has them? Use "
            f"numpy.{join}([1 - p, p], {axis}), which are probabilities.",
            f"Its logits f? Use numpy.{join}([numpy.zeros_like(f), f], {axis}).",
        ]
        if flat and self.stacked:
            fixes.append("One network, [N, C]? Use outputs[None].")
        shape = checks.shape_text(self.each[0].shape) + (
            "" if self.stacked else f" from each of {self.members} members"
        )
        wanted = "[M, N, C]" if self.stacked else "[N, C]"
        checks.refuse(self.name, f"have two columns or more, one for each class, {wanted}", shape, " ".join(fixes))

    @property
    def numbers(self) -> int:
        """How many numbers all members put out."""
        return self.members * self.examples * self.width

    def slices(self) -> Iterator[tuple[slice, Float[Tensor, "M n C"]]]:
        """``(which examples, outputs)``, one after the other, finite and in full precision."""
        for rows, part in self.parts():
            outputs = part.to(self.dtype)
            self.check_finite(outputs, rows.start)
            yield rows, outputs.transpose(0, 1)

    def parts(self, at_once: int | None = None) -> Iterator[tuple[slice, Shaped[Tensor, "n M C"]]]:
        """``(which examples, outputs as they are stored)``, about `at_once` numbers each, one after the other."""
        start = 0
        for where in self._places(NUMBERS_AT_ONCE if at_once is None else at_once):
            part = self._at(where)
            rows = slice(start, start + len(part))
            yield rows, part
            start = rows.stop

    def check_finite(self, outputs: Float[Tensor, "n M C"], start: int) -> None:
        """Refuse outputs that are not finite; `start` is the number of the first example."""
        if bool(outputs.sum(-1).isfinite().all()):  # one pass; only a sum that is not finite needs a closer look
            return
        if not bool(outputs.isfinite().all()):
            row, member = (~outputs.isfinite()).nonzero()[0, :2].tolist()
            example = f"image {(start + row) // self.pixels}" if self.grid else f"example {start + row}"
            got = f"NaN or infinity at member {member}, {example}"
            checks.refuse(self.name, "be finite", got, "Leave such members or examples out.")

    def _places(self, at_once: int) -> Iterator[tuple[slice, ...]]:
        """What is read at once: several images, or some lines of one that is too large."""
        size = max(1, at_once // (self.members * max(self.width, self.members, _PER_MEMBER)))
        if self.pixels <= size or not self.grid:
            step = size // self.pixels
            yield from ((slice(at, min(at + step, self.images)),) for at in range(0, self.images, step))
            return
        lines = max(1, size * self.grid[0] // self.pixels)
        for image in range(self.images):
            for at in range(0, self.grid[0], lines):
                yield slice(image, image + 1), slice(None), slice(at, min(at + lines, self.grid[0]))

    def _at(self, where: tuple[slice, ...]) -> Shaped[Tensor, "n M C"]:
        if self.stacked:
            part = as_tensor(self.each[0][(slice(None), *where)], self.name).transpose(0, 1)
        else:
            part = torch.stack([as_tensor(one[where], self.name) for one in self.each], 1)
        if self.grid:
            part = part.flatten(3).permute(0, 3, 1, 2)
        return part.reshape(-1, self.members, self.width)


def as_tensor(part: Any, name: str, fix: str = "") -> Tensor:
    """Numbers from anywhere as a tensor on the host."""
    if isinstance(part, Tensor):
        return part.detach().cpu()
    array = np.array(part)  # a copy: a slice of a file may not be written to
    if array.dtype.kind not in "fiub":
        checks.refuse(name, "be numbers", str(array.dtype), fix, TypeError)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
