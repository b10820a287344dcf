"""Steps over a batch of which examples fall out: those that are done cost nothing from the next block on.

The state of an attack is a tuple of tensors ``[B, ...]``, one of which is called ``done``. A step reads nothing on the
host, so a block of steps could be captured in a CUDA graph; between blocks, rows that are done are set aside.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from dissensus.attacks.norms import per_example

Rows = TypeVar("Rows", bound=Any)
"""A ``NamedTuple`` of tensors ``[B, ...]`` with a field ``done``."""

BLOCK = 10
"""Steps between two looks at which examples are done."""
SHARE = 1 / 8
"""The share of rows that must be done to be set aside: copying has a price too."""


def carried_out(step: Callable[[Rows, int], Rows], rows: Rows, steps: int) -> Rows:
    """The state after all steps. A row that is done stays as it is, whether or not it has been set aside."""
    whole, places = rows, torch.arange(len(rows.done), device=rows.done.device)
    for index in range(steps):
        rows = held(rows, step(rows, index))
        if (index + 1) % BLOCK == 0 and index + 1 < steps:
            going = (~rows.done).nonzero().squeeze(1)
            if len(going) <= (1 - SHARE) * len(rows.done):
                whole = put(whole, places, rows)
                rows, places = taken(rows, going), places[going]
            if len(going) == 0:
                break
    return put(whole, places, rows)


def held(before: Rows, after: Rows) -> Rows:
    """The state after a step, and where a row was done already, the one before."""
    done = before.done
    pairs = zip(before, after, strict=True)
    return _made(before, [old if new is old else torch.where(per_example(done, new), old, new) for old, new in pairs])


def taken(rows: Rows, places: Tensor) -> Rows:
    """Some rows."""
    return _made(rows, [tensor[places] for tensor in rows])


def put(whole: Rows, places: Tensor, rows: Rows) -> Rows:
    """All rows, with new ones at some places."""
    return _made(whole, [old.index_copy(0, places, new) for old, new in zip(whole, rows, strict=True)])


def _made(like: Rows, tensors: list[Tensor]) -> Rows:
    return type(like)(*tensors)
