"""Member outputs from anywhere, in slices of bounded size."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus import checks

NUMBERS_AT_ONCE = 2**22
"""Numbers of a slice: what bounds the memory of an audit."""
_PER_MEMBER = 45
"""Numbers that are counted of every member and example, where outputs are fewer."""
_EXACT_UP_TO = 2**24
"""Numbers up to which everything is computed in float64."""

Outputs = Any
"""``[M, N, C]`` as a tensor, an array or a memory map; or M of them ``[N, C]``."""


class Members:
    """M members' outputs for N examples, read slice by slice."""

    def __init__(self, outputs: Outputs, name: str = "outputs", *, exact: bool = False) -> None:
        each: Sequence[Any] = outputs if isinstance(outputs, list | tuple) else [outputs]
        self.stacked = not isinstance(outputs, list | tuple)
        shapes = [tuple(part.shape) if hasattr(part, "shape") else None for part in each]
        wanted = "be an array [M, N, C], or a list of M arrays [N, C]"
        if not each or any(shape is None for shape in shapes):
            checks.refuse(name, wanted, type(outputs).__name__, error=TypeError)
        if len(set(shapes)) > 1:
            checks.refuse(name, "hold members of one shape", f"{sorted(set(map(str, shapes)))}")
        shape = shapes[0] if self.stacked else (len(each), *(shapes[0] or ()))
        assert shape is not None
        if len(shape) == 2:
            shape = (*shape, 1)  # one output per example
        if len(shape) != 3 or 0 in shape:
            checks.refuse(name, wanted, checks.shape_text(shape), "One output per example? [M, N] will do.")
        self.each, self.name = each, name
        self.members, self.examples, self.width = shape
        few = self.members * self.examples * self.width <= _EXACT_UP_TO
        self.dtype = torch.float64 if few or exact else torch.float32  # values may be large beside their errors

    def check_classes(self) -> None:
        """Refuse a single column, which is no output of a classifier, and say how two columns are made of it."""
        if self.width > 1:
            return
        flat = len(self.each[0].shape) == (2 if self.stacked else 1)
        join = "stack" if flat else "concatenate"
        fixes = [
            "Probabilities p of the second class, as predict_proba(x)[:, 1] has them? Use "
            f"numpy.{join}([1 - p, p], -1), which are probabilities.",
            f"Its logits f? Use numpy.{join}([numpy.zeros_like(f), f], -1).",
        ]
        if flat and self.stacked:
            fixes.append("One network, [N, C]? Use outputs[None].")
        shape = checks.shape_text(self.each[0].shape) + (
            "" if self.stacked else f" from each of {self.members} members"
        )
        wanted = "[M, N, C]" if self.stacked else "[N, C]"
        checks.refuse(self.name, f"have two columns or more, one for each class, {wanted}", shape, " ".join(fixes))

    def slices(self) -> Iterator[tuple[slice, Tensor]]:
        """``(which examples, outputs [M, n, C])``, one after the other."""
        widest = max(self.width, self.members, _PER_MEMBER)
        size = max(1, NUMBERS_AT_ONCE // (self.members * widest))
        for start in range(0, self.examples, size):
            rows = slice(start, min(start + size, self.examples))
            found = self._at(rows)
            if not bool(found.isfinite().all()):
                where = (~found.isfinite()).nonzero()[0].tolist()
                at = f"member {where[0]}, example {start + where[1]}"
                checks.refuse(self.name, "be finite", f"NaN or infinity at {at}", "Leave such members or examples out.")
            yield rows, found

    def _at(self, rows: slice) -> Tensor:
        if self.stacked:
            found = as_tensor(self.each[0][:, rows], self.name)
        else:
            found = torch.stack([as_tensor(part[rows], self.name) for part in self.each])
        return found.to(self.dtype).view(self.members, -1, self.width)


def as_tensor(part: Any, name: str, fix: str = "") -> Tensor:
    """Numbers from anywhere as a tensor on the host."""
    if isinstance(part, Tensor):
        return part.detach().cpu()
    array = np.array(part)  # a copy: a slice of a file may not be written to
    if array.dtype.kind not in "fiub":
        checks.refuse(name, "be numbers", str(array.dtype), fix, TypeError)
    if array.dtype == np.float16:
        return torch.from_numpy(array.astype(np.float32))
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
