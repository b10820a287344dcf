"""The state of an attack: a tuple of tensors ``[B, ...]``, a row for each example, one of which is called ``done``."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from dissensus.attacks.norms import per_example

Rows = TypeVar("Rows", bound=Any)
"""A ``NamedTuple`` of tensors ``[B, ...]`` with a field ``done``."""


def held(before: Rows, after: Rows) -> Rows:
    """The state after a step, and where a row was done already, the one before."""
    done = before.done
    pairs = zip(before, after, strict=True)
    return _made(before, [old if new is old else torch.where(per_example(done, new), old, new) for old, new in pairs])


def taken(rows: Rows, places: Tensor) -> Rows:
    """Some rows."""
    return _made(rows, [tensor[places] for tensor in rows])


def first(rows: Rows, count: int) -> Rows:
    """The first rows."""
    return rows if count == len(rows.done) else _made(rows, [tensor[:count] for tensor in rows])


def put(whole: Rows, places: Tensor, rows: Rows) -> Rows:
    """All rows, with new ones at some places."""
    return _made(whole, [old.index_copy(0, places, new) for old, new in zip(whole, rows, strict=True)])


def padded(rows: Rows, size: int) -> Rows:
    """As many rows as asked for: those that are missing repeat the last one, and are done."""
    count = len(rows.done)
    if count == size:
        return rows
    place = torch.arange(size, device=rows.done.device)
    more = taken(rows, place.clamp_max(count - 1))
    return more._replace(done=more.done | (place >= count))


def copied(rows: Rows) -> Rows:
    """Rows in memory of their own, each field apart from the others."""
    return _made(rows, [tensor.clone() for tensor in rows])


def write(state: Rows, rows: Rows) -> None:
    """Overwrite a state in place, except where it is what would be written."""
    for old, new in zip(state, rows, strict=True):
        if new is not old:
            old.copy_(new)


def _made(like: Rows, tensors: list[Tensor]) -> Rows:
    return type(like)(*tensors)
