"""A batch of examples, and how batches of any form are unpacked into inputs, targets and weights."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus import calls, checks
from dissensus.arrays import Conversion
from dissensus.calls import NetworkInputs, network_inputs

Unpack = Callable[[Any], tuple[Any, ...]]
"""``batch -> (inputs, targets)`` or ``(inputs, targets, weights)``, for batches of any other form."""


class Batch(NamedTuple):
    """What a step is trained on."""

    inputs: NetworkInputs
    targets: Tensor
    weights: Tensor | None = None
    """The weight of each example in the loss, with the axes of a batch of targets; None: all are equal. With an axis M
    before B, where each member weighs examples in its own way."""
    unlabelled: NetworkInputs | None = None


def unpacked(
    batch: Any, unpack: Unpack | None = None, *, labels: bool = True, conversion: Conversion | None = None
) -> Batch:
    """Inputs, targets and weights of a batch as a loader gives it; other forms than a pair need ``unpack``.

    Arrays become tensors by ``conversion``.

    >>> unpacked({"x": torch.ones(1), "y": torch.zeros(1)}, lambda batch: (batch["x"], batch["y"])).targets
    tensor([0.])
    """
    conversion = conversion or Conversion(torch.get_default_dtype())
    if unpack is not None:
        batch = unpack(batch)
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
            got = f"{len(batch)} parts" if isinstance(batch, tuple | list) else type(batch).__name__
            checks.refuse("unpack", "return (inputs, targets) or (inputs, targets, weights)", got, error=TypeError)
    elif labels and (not isinstance(batch, tuple | list) or len(batch) != 2):
        _refuse_form(batch)
    if not labels:
        inputs = network_inputs(conversion.inputs(batch[0] if isinstance(batch, tuple | list) else batch))
        return Batch(inputs, calls.first_tensor(inputs).new_zeros(calls.examples(inputs, "data")))
    inputs, targets, *weights = batch
    inputs, targets = network_inputs(conversion.inputs(inputs)), conversion.targets(targets)
    weights = [conversion.targets(part, "weights") for part in weights]
    name = "data" if unpack is None else "unpack"
    for what, part in (("targets", targets), *(("weights", part) for part in weights)):
        if not isinstance(part, Tensor):
            fix = "Arrays? Use torch.from_numpy(...). Several targets? Stack them into one tensor."
            checks.refuse(name, f"give {what} as one tensor", type(part).__name__, fix, TypeError)
    check_lengths(inputs, targets, *weights)
    for part in weights:
        if part.device.type == "cpu" and not bool((part.isfinite() & (part >= 0)).all()):
            checks.refuse("weights", "be finite numbers of at least 0", "negative numbers, infinities or NaN")
    return Batch(inputs, targets, *weights)


def read_batches(source: Iterable[Any], name: str = "data") -> Iterator[Any]:
    """The batches of a source; examples that a loader cannot stack are refused with the fix."""
    batches = iter(source)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as reason:
            if "equal size" not in str(reason):  # what torch's collation says of examples of several shapes
                raise
            fix = f"{calls.PAD} In a DataLoader's `collate_fn`, or in a method `collate` of the Dataset."
            checks.refuse(name, "give examples of one shape, which batches stack", f"an error ({reason})", fix)
        yield batch


_TARGET_NAMES = ("labels", "label", "targets", "target", "y")


def _refuse_form(batch: Any) -> None:
    """Refuse a batch that is no pair, with the way to unpack it."""
    if isinstance(batch, Mapping):
        names = [str(name) for name in batch]
        target = next((name for name in _TARGET_NAMES if name in names), names[-1] if names else "labels")
        inputs = ", ".join(f"{name!r}: batch[{name!r}]" for name in names if name != target)
        got, fix = f"a dictionary of {', '.join(map(repr, names))}", f"({{{inputs}}}, batch[{target!r}])"
    elif isinstance(batch, tuple | list):
        got, fix = f"{len(batch)} parts", "(batch[0], batch[1])"
        if len(batch) == 3:
            fix += ", or with weights (batch[0], batch[1], batch[2])"
    else:
        got, fix = type(batch).__name__, "(inputs, targets)"
    checks.refuse("data", "give pairs (x, y)", got, f"Say what is what: unpack=lambda batch: {fix}.", TypeError)


def check_lengths(inputs: NetworkInputs, targets: Tensor, weights: Tensor | None = None) -> int:
    """The number of examples; refuse inputs, targets and weights that differ in it, and data without examples."""
    length = calls.examples(inputs, "data")
    if not targets.ndim or length != len(targets):
        count = len(targets) if targets.ndim else "no"
        checks.refuse("data", "hold as many targets as inputs", f"{length} inputs and {count} targets")
    if length == 0:
        checks.refuse("data", "hold at least one example", "none")
    if weights is not None and (not weights.ndim or len(weights) != length):
        checks.refuse("weights", f"have one number per example ({length})", checks.shape_text(weights.shape))
    return length


def check_dtype(inputs: NetworkInputs, dtype: torch.dtype) -> None:
    """Refuse inputs of real numbers in another precision than the networks'."""
    for tensor in calls.tensors(inputs):
        if tensor.is_floating_point() and tensor.dtype != dtype:
            fix = f"Use x.{ {torch.float64: 'double', torch.bfloat16: 'bfloat16'}.get(dtype, 'float') }()."
            checks.refuse("x", f"have the networks' dtype, {dtype}", str(tensor.dtype), fix, TypeError)


_CHUNK = 2**26
"""Numbers that are checked at once, which bounds the memory of a check."""


def check_finite(name: str, x: Tensor) -> None:
    """Refuse NaN and infinity, for any memory layout."""
    if not x.is_floating_point():
        return
    rows = max(1, _CHUNK * len(x) // max(1, x.numel()))
    bad = torch.cat([~part.isfinite().reshape(len(part), -1).all(1) for part in x.split(rows)]) if len(x) else x.bool()
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        count = int(bad.sum())
        got = f"NaN or infinity in {count} {'example' if count == 1 else 'examples'}, first in {first}"
        checks.refuse(name, "be finite", got, "Drop or fill them.")
