"""Which rows a model was trained on: a small record, by which data that is no test data is recognised later.

Of every training row two numbers are kept: the products of all its values with two fixed directions of random signs
and sizes. A row counts as recognised if both agree with those of a training row, to `TOLERANCE` of the row's length.
Rows are therefore recognised after another rounding (float64 data, another way to standardise), and rows that differ by
more are not: among 131,072 training rows, one in a million rows that were not trained on is taken for one by chance.
The numbers do not determine a row with three values or more. They do for one or two values: set
``ens.training_rows = None`` before `save` if such data is secret.
"""

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus import calls, checks
from dissensus.calls import NetworkInputs

MOST_ROWS = 2**17
"""Rows that are kept. Of larger data, evenly spaced rows are."""
TOLERANCE = 2e-6
"""Differences that rounding may leave, as a share of a row's length."""
_PART = 2**17
"""Values that are multiplied at once: in double precision they stay in a processor's cache."""
_COLUMNS = 2


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """A record of training rows.

    >>> x = torch.randn(5, 3)
    >>> TrainingRows.of(x[:3]).contains(x)
    tensor([ True,  True,  True, False, False])
    """

    products: np.ndarray[Any, Any]
    """Float32 ``[K, 2]``, sorted by the first."""
    rows: int
    """Number of training rows, K of which are kept."""
    complete: bool
    """False if the model was trained on other data too, or may have been: by batches of a loader, or elsewhere."""

    @classmethod
    def none(cls) -> "TrainingRows":
        """Of a model that was trained on nothing."""
        return cls(np.zeros((0, _COLUMNS), np.float32), 0, True)

    @classmethod
    def unknown(cls) -> "TrainingRows":
        """Of a model of which nothing is known."""
        return cls(np.zeros((0, _COLUMNS), np.float32), 0, False)

    @classmethod
    def of(cls, inputs: NetworkInputs) -> "TrainingRows":
        """Of a model that was trained on these inputs."""
        rows = calls.examples(inputs)
        if rows > MOST_ROWS:
            places = torch.arange(MOST_ROWS, device=calls.first_tensor(inputs).device) * rows // MOST_ROWS
            inputs = calls.rows(inputs, places)
        with np.errstate(over="ignore"):  # infinity is as good as any other number to recognise a row by
            products = _products(inputs).astype(np.float32)
        return cls(_sorted(products), rows, True)

    @property
    def share(self) -> float:
        """The share of training rows that are kept: 1 for data of up to `MOST_ROWS` different rows."""
        return min(1.0, len(self.products) / self.rows) if self.rows > MOST_ROWS else 1.0

    def joined(self, other: "TrainingRows") -> "TrainingRows":
        """The record of a model that was trained on the rows of both, one after the other."""
        complete = self.complete and other.complete
        if not len(other.products) or not len(self.products):
            filled = self if len(self.products) else other
            return TrainingRows(filled.products, filled.rows, complete)
        both = _sorted(np.concatenate([self.products, other.products]))
        new = (len(both) - len(self.products)) / len(other.products)  # not there before
        if len(both) > MOST_ROWS:
            both = both[np.arange(MOST_ROWS) * len(both) // MOST_ROWS]
        return TrainingRows(both, self.rows + round(new * other.rows), complete)

    def contains(self, inputs: NetworkInputs) -> Tensor:
        """Which rows are recognised as training rows, bool ``[N]``, on the host; rows with NaN are not."""
        products, slack = _products(inputs), TOLERANCE * _lengths(inputs)
        first = self.products[:, 0].astype(np.float64)
        with np.errstate(invalid="ignore"):  # of infinities
            place = np.searchsorted(first, products[:, 0] - slack, "left")  # the end, for NaN
            end = np.searchsorted(first, products[:, 0] + slack, "right")
        result = np.zeros(len(products), dtype=bool)
        open_rows = np.flatnonzero(place < end)
        while len(open_rows):
            apart = np.abs(self.products[place[open_rows], 1] - products[open_rows, 1])
            result[open_rows] |= apart <= slack[open_rows]
            place[open_rows] += 1
            open_rows = open_rows[~result[open_rows] & (place[open_rows] < end[open_rows])]
        return torch.from_numpy(result)

    def to_json(self) -> dict[str, Any]:
        """The record as JSON holds it."""
        numbers = base64.b64encode(self.products.astype("<f4").tobytes()).decode()
        return {"rows": self.rows, "complete": self.complete, "products": numbers}

    @classmethod
    def from_json(cls, stored: Any) -> "TrainingRows":
        """The record of `to_json`; None, where an earlier release has stored none, is unknown."""
        if stored is None:
            return cls.unknown()
        numbers = np.frombuffer(base64.b64decode(stored["products"], validate=True), "<f4").astype(np.float32)
        return cls(numbers.reshape(-1, _COLUMNS), checks.count("rows", stored["rows"], 0), bool(stored["complete"]))


def _sorted(products: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Different rows of two columns, by the first."""
    products = products[np.lexsort((products[:, 1], products[:, 0]))]
    new = np.ones(len(products), dtype=bool)
    new[1:] = (products[1:] != products[:-1]).any(1)
    return products[new & np.isfinite(products).all(1)]


def _products(inputs: NetworkInputs) -> np.ndarray[Any, Any]:
    """Products of every row with both directions ``[N, 2]``, in double precision."""
    products: Any = 0.0
    for number, tensor in enumerate(calls.tensors(inputs)):
        flat = _flat(tensor)
        directions = torch.from_numpy(_directions(flat.shape[1], number)).to(flat.device)
        products = products + _by_parts(flat, lambda rows, directions=directions: rows @ directions)
    return np.asarray(products)


def _lengths(inputs: NetworkInputs) -> np.ndarray[Any, Any]:
    """The length of every row ``[N]``."""
    return np.sqrt(sum(_by_parts(_flat(tensor), lambda rows: rows.square().sum(1)) for tensor in calls.tensors(inputs)))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten(1) if tensor.ndim > 1 else tensor.detach().unsqueeze(1)


def _by_parts(flat: Tensor, function: Callable[[Tensor], Tensor]) -> np.ndarray[Any, Any]:
    """A function of rows in double precision, on the host."""
    part = max(1, _PART // max(1, flat.shape[1]))
    part = part if flat.device.type == "cpu" else 64 * part
    return torch.cat([function(rows.double()) for rows in flat.split(part)]).cpu().numpy()


def _directions(width: int, number: int) -> np.ndarray[Any, Any]:
    """Numbers from −√3 to √3 for every value of the tensor of that number: the same ones everywhere and for ever.

    They are SplitMix64 of the position. Zeros at the end of a row, as padding has them, change nothing.
    """
    with np.errstate(over="ignore"):
        mixed = (np.arange(width * _COLUMNS, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed += np.uint64(0xD1B54A32D192ED03 * number % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    unit = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return ((2 * unit - 1) * np.sqrt(3.0)).reshape(width, _COLUMNS)
