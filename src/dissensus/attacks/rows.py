"""The state of an attack: a tuple of tensors ``[B, ...]`` with one row for each example, one of which is ``done``."""

from typing import Any, TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor

from dissensus.attacks.norms import per_example

Rows = TypeVar("Rows", bound=Any)
"""A ``NamedTuple`` of tensors ``[B, ...]`` with a field ``done``."""


def where_rows(chosen: Bool[Tensor, " B"], rows: Tensor, others: Tensor) -> Tensor:
    """Some rows of one tensor, and all others of another, in new memory.

    >>> where_rows(torch.tensor([True, False]), torch.ones(2, 3), torch.zeros(2, 3))
    tensor([[1., 1., 1.],
            [0., 0., 0.]])
    """
    if rows.ndim == 1 or rows.device.type != "cpu":
        return torch.where(per_example(chosen, rows), rows, others)
    # Copies of whole rows take a CPU half the time of a choice by a mask.
    places = torch.arange(len(rows)) + len(rows) * chosen
    return torch.cat([others, rows]).index_select(0, places)


def unless_done(before: Rows, after: Rows) -> Rows:
    """The state after a step, in which rows that were done before it are unchanged."""
    done = before.done
    pairs = zip(before, after, strict=True)
    return _rebuild(before, [old if new is old else where_rows(done, old, new) for old, new in pairs])


def select(rows: Rows, indices: Tensor) -> Rows:
    """The rows at these indices."""
    return _rebuild(rows, [tensor[indices] for tensor in rows])


def head(rows: Rows, count: int) -> Rows:
    """The first rows."""
    return rows if count == len(rows.done) else _rebuild(rows, [tensor[:count] for tensor in rows])


def scatter(target: Rows, indices: Tensor, rows: Rows) -> Rows:
    """A copy of ``target`` with other rows at these indices."""
    return _rebuild(target, [old.index_copy(0, indices, new) for old, new in zip(target, rows, strict=True)])


def pad(rows: Rows, size: int) -> Rows:
    """Rows, and behind them copies of the last row that are done, up to a size."""
    count = len(rows.done)
    if count == size:
        return rows
    place = torch.arange(size, device=rows.done.device)
    padded = select(rows, place.clamp_max(count - 1))
    return padded._replace(done=padded.done | (place >= count))


def clone(rows: Rows) -> Rows:
    """A copy in new memory, in which no two fields share any."""
    return _rebuild(rows, [tensor.clone() for tensor in rows])


def overwrite(state: Rows, rows: Rows) -> None:
    """Copy rows into the memory of a state."""
    for old, new in zip(state, rows, strict=True):
        if new is not old:
            old.copy_(new)


def _rebuild(like: Rows, tensors: list[Tensor]) -> Rows:
    return type(like)(*tensors)
