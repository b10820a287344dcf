"""Checks of user input. Every message has the form: name, requirement, actual value, likely fix.

Checks of shapes and dtypes read no values, so that they run under ``vmap`` and inside captured graphs. Checks of values
read concrete numbers only: Python numbers, and tensors on the CPU outside of any transform.
"""

import difflib
import math
import numbers
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

_LONGEST = 1000
"""Characters of what came that an error shows."""


def refuse(name: str, requirement: str, got: object, fix: str = "", error: type[Exception] = ValueError) -> NoReturn:
    """Raise an error in the format of all messages.

    >>> refuse("labels", "have shape [B=128]", "[128, 10]", "One-hot? Use labels.argmax(-1).")
    Traceback (most recent call last):
    ValueError: `labels` must have shape [B=128]; got [128, 10]. One-hot? Use labels.argmax(-1).
    """
    text = " ".join(str(got).split()) if isinstance(got, Tensor | np.ndarray) else str(got)
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    raise error(f"`{name}` must {requirement}; got {text}." + (f" {fix}" if fix else ""))


def shape_text(shape: Sequence[int], letters: str = "") -> str:
    """``[M=5, B=32]`` for a shape and its letters.

    >>> shape_text((5, 32), "MB"), shape_text((5, 32))
    ('[M=5, B=32]', '[5, 32]')
    """
    names = letters.ljust(len(shape))
    return "[" + ", ".join(f"{n}={s}" if n.strip() else str(s) for n, s in zip(names, shape, strict=False)) + "]"


def one_of(name: str, value: object, options: Iterable[str]) -> None:
    """Refuse a value that is not in ``options``, and suggest the nearest option."""
    options = list(options)
    if isinstance(value, str) and value in options:
        return
    refuse(name, "be one of " + ", ".join(map(repr, options)), repr(value), nearest(str(value), options))


def nearest(word: str, known: Iterable[object], otherwise: str = "") -> str:
    """A question that suggests the nearest known word, or ``otherwise`` if none is near.

    >>> nearest("strems", ["loop", "streams"]), nearest("x", ["loop"], "Only loop is known.")
    ("Did you mean 'streams'?", 'Only loop is known.')
    >>> nearest("AdamW", ["adam", "adamw"])
    "Did you mean 'adamw'?"
    """
    options = [str(k) for k in known]
    same = [option for option in options if option.lower() == word.lower()]  # 'adamW' is 'adamw', not 'adam'
    matches = same or difflib.get_close_matches(word, options, n=1)
    return f"Did you mean {matches[0]!r}?" if matches else otherwise


def member_outputs(outputs: Tensor, name: str = "outputs") -> tuple[int, int, int]:
    """Check ``[M, B, C]``, floating point and not empty; return the three sizes."""
    member_axes(outputs, name)
    members, batch, width = outputs.shape
    if 0 in (members, batch, width):
        refuse(name, "hold at least one member, example and output", shape_text(outputs.shape, "MBC"))
    return members, batch, width


def member_axes(outputs: Tensor, name: str = "outputs", *, dense: bool = False) -> None:
    """Check ``[M, B, C]`` and floating point; with ``dense`` also ``[M, B, C, *S]``. Batches may be empty."""
    if outputs.ndim != 3 and not (dense and outputs.ndim > 3):
        fix = ""
        if outputs.ndim == 2:
            fix = f"One output per example? Use {name}.unsqueeze(-1). One network? Use {name}.unsqueeze(0)."
        elif outputs.ndim > 3:
            fix = "One class per pixel or token? Use dissensus.dense.positions."
        refuse(name, "have shape [M, B, C]", shape_text(outputs.shape), fix)
    if not outputs.is_floating_point():
        refuse(name, "be floating point", str(outputs.dtype), f"Use {name}.float().", TypeError)


def full_precision(values: Tensor) -> Tensor:
    """Half precision converted to float32, and any other type unchanged.

    >>> full_precision(torch.ones(1, dtype=torch.bfloat16)).dtype, full_precision(torch.ones(1).double()).dtype
    (torch.float32, torch.float64)
    """
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def member_probs(
    probs: Tensor, name: str = "probs", fix: str = "Logits? Use logits.softmax(-1)."
) -> tuple[int, int, int]:
    """The sizes (M, B, C) of members' probabilities. Concrete ones must sum to one on the first example."""
    sizes = member_outputs(probs, name)
    if is_concrete(probs) and sizes[1]:
        first = probs[:, 0].double()
        if bool(((first.sum(-1) - 1).abs() > 1e-2).any() | (first < -1e-6).any()):
            got = f"a sum of {float(first.sum(-1)[0]):.3g} and a minimum of {float(first.min()):.3g}"
            refuse(name, "be probabilities, which sum to one over classes", got, fix)
    return sizes


def are_probabilities(outputs: Tensor) -> bool:
    """Whether all rows over the last axis are probabilities: at least two non-negative numbers with a sum of one.

    >>> are_probabilities(torch.tensor([[0.2, 0.8]])), are_probabilities(torch.tensor([[0.2, 0.8], [0.0, 3.0]]))
    (True, False)
    """
    if outputs.shape[-1] < 2 or not bool((outputs >= 0).all()):
        return False
    return bool(((outputs.sum(-1, dtype=torch.float64) - 1).abs() < 1e-2).all())


def member_logits(
    logits: Tensor, name: str = "logits", fix: str = "Use kind='probabilities', or their logarithm."
) -> tuple[int, int, int]:
    """The sizes (M, B, C) of members' logits, C ≥ 2. If they are concrete, they must not all be probabilities."""
    sizes = member_outputs(logits, name)
    if sizes[2] < 2:
        fix = f"One logit f of the second class? Use torch.cat([torch.zeros_like({name}), {name}], -1)."
        refuse(name, "hold two classes or more", shape_text(logits.shape, "MBC"), fix)
    if is_concrete(logits) and are_probabilities(logits):
        refuse(name, "be logits", "numbers of at least zero that sum to one over classes: probabilities", fix)
    return sizes


def class_targets(targets: Tensor, batch: int, classes: int, *, soft: bool = True) -> bool:
    """Check class labels ``[B]`` (whole numbers) or soft labels ``[B, C]`` (floats); return whether they are soft."""
    if targets.is_floating_point():
        if not soft:
            refuse(
                "targets",
                "be class labels",
                f"floats {shape_text(targets.shape)}",
                "Use targets.argmax(-1).",
                TypeError,
            )
        if tuple(targets.shape) != (batch, classes):
            fix = "Class labels must be whole numbers: use targets.long()." if targets.ndim == 1 else ""
            refuse(
                "targets", f"have shape [B={batch}, C={classes}] when they are floats", shape_text(targets.shape), fix
            )
        return True
    if targets.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        refuse("targets", "be whole numbers (labels) or floats (soft labels)", str(targets.dtype), "", TypeError)
    if tuple(targets.shape) != (batch,):
        onehot = targets.ndim == 2 and targets.shape[1] == classes
        fix = "One-hot? Use targets.argmax(-1)." if onehot else "A column? Use targets.squeeze(-1)."
        refuse("targets", f"have shape [B={batch}]", shape_text(targets.shape), fix if targets.ndim == 2 else "")
    return False


def value_targets(targets: Tensor, batch: int, width: int) -> Tensor:
    """Check regression targets ``[B, C]``; ``[B]`` is taken as ``[B, 1]`` when there is one output."""
    if width == 1 and tuple(targets.shape) == (batch,):
        return targets.unsqueeze(-1)
    if tuple(targets.shape) != (batch, width):
        refuse(
            "targets",
            f"have shape [B={batch}, C={width}]",
            shape_text(targets.shape),
            "Outputs and targets must agree.",
        )
    return targets


def is_concrete(tensor: Tensor) -> bool:
    """Whether values of a tensor can be read: it is on the CPU, no transform has wrapped it, and nothing is traced."""
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not is_functorch_wrapped_tensor(tensor)


def member_weights(weights: Tensor | Sequence[float] | None, members: int, like: Tensor) -> Tensor:
    """Weights ``[M]``, non-negative, with sum one, in the dtype of ``like``. None gives equal weights."""
    if weights is None:
        return like.new_full((members,), 1.0 / members)
    weights = torch.as_tensor(weights, dtype=like.dtype, device=like.device)
    if tuple(weights.shape) != (members,):
        refuse("weights", f"have shape [M={members}]", shape_text(weights.shape))
    if is_concrete(weights):
        if not bool((weights >= 0).all()):
            refuse("weights", "be non-negative numbers", weights.tolist())
        total = float(weights.sum())
        if not math.isclose(total, 1.0, abs_tol=1e-4):
            refuse("weights", "sum to 1", f"a sum of {total:g}", "Divide them by their sum.")
    return weights


def example_weights(weights: Tensor, members: int, batch: int, *, interacting: str | None = None) -> Tensor:
    """Weights of examples ``[B]`` or ``[M, B]``, floating point. Concrete ones must be finite and non-negative.

    ``interacting`` names an objective whose members interact: there an example has one weight for all members.
    """
    if not isinstance(weights, Tensor):
        refuse("example_weights", "be a tensor", type(weights).__name__, "Use torch.as_tensor.", TypeError)
    if interacting is not None and tuple(weights.shape) == (members, batch) != (batch,):
        requirement = (
            f"have shape [B={batch}] for `{interacting}`, in which members interact: an example has one weight"
        )
        fix = "Weights per member (bagging)? Use an objective of separate members, such as `independent`."
        refuse("example_weights", requirement, shape_text(weights.shape, "MB"), fix)
    if tuple(weights.shape) not in ((batch,), (members, batch)):
        wanted = f"have shape [B={batch}]" + (f" or [M={members}, B={batch}]" if interacting is None else "")
        refuse("example_weights", wanted, shape_text(weights.shape))
    if weights.is_complex():
        refuse("example_weights", "be real numbers", str(weights.dtype), "", TypeError)
    if is_concrete(weights) and not bool(((weights >= 0) & weights.isfinite()).all()):
        refuse("example_weights", "be finite numbers of at least 0", "negative numbers, infinities or NaN")
    return weights if weights.is_floating_point() else weights.float()


def unmasked(numbers: Any, name: str) -> None:
    """Refuse masked entries of a numpy array, which would count as numbers without their mask."""
    if np.ma.is_masked(numbers):
        entries = int(np.ma.getmaskarray(numbers).sum())
        fix = "Leave such examples out, in outputs and targets alike."
        refuse(name, "have no masked entries", f"{entries} of them", fix)


_LARGEST_COUNT = 2**63 - 1
_LARGEST_FLOAT = sys.float_info.max


def number(
    name: str,
    value: float,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> float:
    """A finite Python number within its range."""
    words = f"be a number {'above' if open_low else 'of at least'} {low:g}" if low > -math.inf else "be a finite number"
    words += f" and {'below' if open_high else 'at most'} {high:g}" if high < math.inf else ""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(name, words, repr(value), error=TypeError)
    if isinstance(value, numbers.Integral) and abs(value) > _LARGEST_COUNT:
        got = "a whole number of more than 64 bits"
        refuse(name, words, got, "" if abs(value) > _LARGEST_FLOAT else f"Use {float(value):g}.")
    try:
        result = float(value)
    except OverflowError:
        refuse(name, words, "a number with more digits than a float holds")
    outside = not low <= result <= high or (open_low and result == low) or (open_high and result == high)
    if not math.isfinite(result) or outside:
        refuse(name, words, repr(value))
    return result


def count(name: str, value: int, low: int = 1) -> int:
    """A whole number of at least ``low`` that fits into 64 bits, from Python or NumPy, as an ``int``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
        refuse(name, f"be a whole number of at least {low}", repr(value))
    if value > _LARGEST_COUNT:
        refuse(name, f"be a whole number of at least {low} and at most {_LARGEST_COUNT}", "a larger one")
    return int(value)


def flag(name: str, value: object) -> bool:
    """True or False, from Python or NumPy; a text such as ``"no"``, which counts as true in Python, is refused.

    >>> flag("shuffle", "no")
    Traceback (most recent call last):
    TypeError: `shuffle` must be True or False; got 'no'.
    """
    if not isinstance(value, bool | np.bool_):
        refuse(name, "be True or False", repr(value), error=TypeError)
    return bool(value)


def function(name: str, value: object, signature: str) -> None:
    """Refuse what cannot be called.

    >>> function("progress", 3, "(moment)")
    Traceback (most recent call last):
    TypeError: `progress` must be a function (moment); got 3.
    """
    if not callable(value):
        refuse(name, f"be a function {signature}", repr(value), error=TypeError)


def device(name: str, value: Any, *, usable: bool = True) -> torch.device:
    """A device, and if ``usable`` one of this machine.

    >>> device("device", "cup")
    Traceback (most recent call last):
    ValueError: `device` must be a device that torch can use here, such as 'cpu'; got 'cup'.
    """
    try:
        result = torch.device(value)
        if usable:
            torch.empty(0, device=result)
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError):
        refuse(name, "be a device that torch can use here, such as 'cpu'", repr(value))
    return result


def computes(name: str, device: torch.device) -> torch.device:
    """A device that this package computes on: a CPU, or a GPU through CUDA.

    Others are refused in one sentence: what is measured, drawn and summed in double precision is tested on these only.

    >>> computes("ensemble", torch.device("mps"))
    Traceback (most recent call last):
    ValueError: `ensemble` must be on a CPU or a CUDA GPU; got the device mps. Use .to('cpu').
    """
    if device.type not in ("cpu", "cuda"):
        refuse(name, "be on a CPU or a CUDA GPU", f"the device {device}", "Use .to('cpu').")
    return device


def listed(name: str, values: Any) -> list[Any]:
    """The values of any iterable but a text, as a list; those of an array or tensor as Python numbers.

    >>> listed("at", (1, 2)), listed("at", torch.tensor([3, 4]))
    ([1, 2], [3, 4])
    """
    if isinstance(values, Tensor | np.ndarray):
        values = values.tolist()
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        refuse(name, "be a list of numbers", repr(values), "One number? Put it into a list.", TypeError)
    return list(values)


def path(name: str, value: object) -> Path:
    """An absolute path, from a text or a ``Path``: it stays the same wherever the process goes.

    >>> path("file", "/data/a.npy")
    PosixPath('/data/a.npy')
    >>> path("file", "")
    Traceback (most recent call last):
    ValueError: `file` must be a path; got an empty text. The working folder? Use '.'.
    """
    try:
        text = os.fspath(value)  # pyright: ignore[reportCallIssue, reportArgumentType]  # refused below
    except TypeError:
        text = b""
    if not isinstance(text, str):
        refuse(name, "be a path", repr(value), "Pass a text or a pathlib.Path.", TypeError)
    if not text:
        refuse(name, "be a path", "an empty text", "The working folder? Use '.'.")
    try:
        os.fsencode(text)
    except UnicodeError:
        refuse(name, "be a path that this system can name", ascii(text))
    if "\0" in text:
        refuse(name, "be a path that this system can name", repr(text))
    return Path(text).absolute()


def is_number_text(text: str) -> bool:
    """Whether a text spells a number.

    >>> is_number_text(" 1e-3"), is_number_text("nan"), is_number_text("a"), is_number_text("")
    (True, True, False, False)
    """
    try:
        float(text)
    except ValueError:
        return False
    return True
