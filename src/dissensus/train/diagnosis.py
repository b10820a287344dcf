"""What is wrong with a step: which numbers are not finite, and which names are taken."""

from collections.abc import Sequence

from torch import Tensor

from dissensus import checks
from dissensus.axes import LossParts


def culprit(
    outputs: Tensor, parts: LossParts, grad: Tensor, run: int, shared: Tensor | None = None
) -> tuple[str, list[int]]:
    """What was not finite in a run, and in which members. ``shared`` is the gradient of what members share."""
    run_parts = {name: part[run] for name, part in parts.parts.items()}
    spoilt = {"the outputs": ~outputs.isfinite().flatten(1).all(1)}
    spoilt |= {f"`{name}`": ~part.isfinite() for name, part in run_parts.items() if part.ndim == 1}
    scalars = [f"`{name}`" for name, part in run_parts.items() if part.ndim == 0 and not bool(part.isfinite())]
    if bool(parts.total[run].isfinite()):
        spoilt |= {"the gradient": ~grad.isfinite().all(1)}
    for name, members in spoilt.items():
        if bool(members.any()):
            return name, members.nonzero().flatten().tolist()
    if not scalars and bool(parts.total[run].isfinite()) and shared is not None and not bool(shared.isfinite().all()):
        return "the gradient of what members share", []
    return (scalars or ["the total"])[0], []


def source(inputs: Sequence[Tensor], targets: Tensor | None) -> str:
    """Which part of a batch was not finite before the step, ``"targets"`` or ``"inputs"``; empty if neither was.

    Infinite inputs may be meant, as in masks of attention, so that only NaN counts there.

    >>> infinite = Tensor([float("inf")])
    >>> source([infinite], infinite), source([infinite], None), source([infinite - infinite], None)
    ('targets', '', 'inputs')
    """
    if targets is not None and targets.is_floating_point() and not bool(targets.isfinite().all()):
        return "targets"
    return "inputs" if any(x.is_floating_point() and bool(x.isnan().any()) for x in inputs) else ""


def check_names(parts: LossParts, *, judged: bool = False) -> None:
    """Refuse parts with names of the history's columns, or without members' losses where these are judged."""
    taken = sorted({"loss", "epoch", "lr", "seconds", "validation"} & set(parts.parts))
    if taken:
        checks.refuse("parts", f"not be named {taken[0]!r}, which the history uses itself", sorted(parts.parts))
    if judged and ("member_loss" not in parts.parts or parts.parts["member_loss"].ndim < 2):
        fix = "Objectives of dissensus do; add it to the parts of your own."
        checks.refuse("objective", "tell `member_loss` [M], by which `freeze` judges", sorted(parts.parts), fix)
