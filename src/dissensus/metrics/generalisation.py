"""Accuracy on data unlike the training data: of all members together, of the best member, in the worst group."""

import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import arguments, checks, dense, pooling
from dissensus.axes import Pool
from dissensus.metrics.intervals import Interval

_NUMBERS_AT_ONCE = 2**18
"""Numbers per slice of outputs: few enough for a cache."""
_POOLS = {"probability": pooling.mean_probability, "score": pooling.mean_score, "vote": pooling.vote_share}
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Oracle(NamedTuple):
    """The member that is right most often."""

    member: int
    accuracy: float


class Groups(NamedTuple):
    """Accuracy in each group that has examples, by ascending group, and in the worst of them."""

    group: Int[Tensor, " G"]
    accuracy: Float[Tensor, " G"]
    examples: Int[Tensor, " G"]
    worst: int
    """The group with the lowest accuracy; of equals, the lowest."""
    worst_accuracy: Interval
    """Wilson's interval for that group as if it had been named beforehand; the choice is not allowed for."""


@arguments.arrays
def prediction_accuracy(
    outputs: Float[Tensor, "M B C *S"],
    labels: Int[Tensor, "B *S"],
    pool: Pool,
    *,
    ignore_index: int | None = None,
) -> float:
    """Share of examples on which the members together name the right class; ties go to the lowest class.

    Args:
        outputs: Logits of the members.
        labels: The right classes.
        pool: ``"score"`` averages logits (prediction ensemble, LDR paper, table 3), ``"probability"`` probabilities,
            ``"vote"`` counts first choices. For one member, or identical members, all three are equal.
        ignore_index: Label of positions of dense outputs, or examples, that do not count.

    >>> outputs = torch.tensor([[[0.0, 9.0]], [[1.0, 0.0]], [[1.0, 0.0]]])
    >>> tuple(prediction_accuracy(outputs, torch.tensor([1]), pool) for pool in ("score", "vote"))
    (1.0, 0.0)
    """
    checks.one_of("pool", pool, _POOLS)
    outputs, labels = dense.counted(outputs, labels, ignore_index=ignore_index)
    check_classified(outputs, labels)
    return float((pooled(outputs, pool).argmax(-1) == labels).double().mean())


@arguments.arrays
def oracle(
    outputs: Float[Tensor, "M B C *S"], labels: Int[Tensor, "B *S"], *, ignore_index: int | None = None
) -> Oracle:
    """The best member, chosen on these very examples (oracle selection, LDR paper, table 3); of equals, the first.

    It is an upper bound on choosing a member, not a method: it needs the labels by which it is judged. It grows with
    the number of members even where all are equally good.

    >>> oracle(torch.tensor([[[2.0, 0.0], [2.0, 0.0]], [[2.0, 0.0], [0.0, 2.0]]]), torch.tensor([0, 1]))
    Oracle(member=1, accuracy=1.0)
    """
    outputs, labels = dense.counted(outputs, labels, ignore_index=ignore_index)
    check_classified(outputs, labels)
    accuracy = (outputs.argmax(-1) == labels).double().mean(-1)
    best = int(accuracy.argmax())
    return Oracle(best, float(accuracy[best]))


@arguments.arrays
def worst_group(
    predictions: Float[Tensor, "B C"] | Int[Tensor, " B"],
    labels: Int[Tensor, " B"],
    groups: Int[Tensor, " B"],
    *,
    confidence: float = 0.95,
) -> Groups:
    """Accuracy in every group, and in the worst one, where a shift that changes the groups' shares hurts most.

    Args:
        predictions: Log-probabilities (or anything that is largest at the class named), or the classes themselves.
        labels: The right classes.
        groups: Group of each example, as any whole numbers. Groups without examples do not count.
        confidence: Confidence of the interval.

    >>> result = worst_group(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 7, 7]))
    >>> result.worst, result.accuracy.tolist(), tuple(round(end, 3) for end in result.worst_accuracy)
    (7, [1.0, 0.5], (0.5, 0.095, 0.905))
    """
    named = _named(predictions)
    check_labels(labels, len(named), predictions.shape[1] if predictions.ndim == 2 else None)
    if groups.dtype not in _WHOLE:
        checks.refuse("groups", "be whole numbers", str(groups.dtype), "Use groups.long().", TypeError)
    if groups.shape != labels.shape:
        checks.refuse("groups", f"have shape [B={len(labels)}]", checks.shape_text(groups.shape))
    group, place, examples = groups.unique(return_inverse=True, return_counts=True)
    hits = torch.zeros_like(examples).index_add_(0, place, (named == labels).to(examples.dtype))
    accuracy = hits.double() / examples
    worst = int(accuracy.argmin())
    interval = wilson(int(hits[worst]), int(examples[worst]), confidence=confidence)
    return Groups(group, accuracy, examples, int(group[worst]), interval)


def wilson(hits: int, examples: int, *, confidence: float = 0.95) -> Interval:
    """A share with Wilson's score interval, which stays within 0 and 1 and has a width even where all are right.

    Without examples the share is NaN, and its interval is from 0 to 1.

    >>> tuple(round(number, 4) for number in wilson(9, 10))
    (0.9, 0.5958, 0.9821)
    """
    checks.count("examples", examples, 0)
    if checks.count("hits", hits, 0) > examples:
        checks.refuse("hits", f"be at most the number of examples, {examples}", hits)
    if not 0 < confidence < 1:
        checks.refuse("confidence", "lie between 0 and 1", confidence)
    return score_interval(hits / examples, examples, confidence) if examples else Interval(math.nan, 0.0, 1.0)


def score_interval(share: float, examples: int, confidence: float) -> Interval:
    """Wilson's interval of a mean of numbers from 0 to 1, one per example.

    Other numbers than zeros and ones have a smaller variance, so that it is wider than it must be for them.
    """
    width = NormalDist().inv_cdf((1 + checks.number("confidence", confidence, 0, 1, open_low=True, open_high=True)) / 2)
    shrink = 1 + width**2 / examples
    centre = (share + width**2 / (2 * examples)) / shrink
    half = width / shrink * math.sqrt(share * (1 - share) / examples + width**2 / (4 * examples**2))
    # At a share of 0 or 1 one end is the share itself, but for rounding.
    return Interval(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))


def pooled(outputs: Float[Tensor, "M B C"], pool: Pool) -> Float[Tensor, "B C"]:
    """Pooled prediction of the members, in double precision, slice by slice."""
    return torch.cat([_POOLS[pool](outputs[:, part].double()) for part in slices(outputs)])


def slices(outputs: Float[Tensor, "M B C"]) -> Iterator[slice]:
    """Slices of the examples, small enough to be held in double precision."""
    members, batch, classes = outputs.shape
    step = max(1, _NUMBERS_AT_ONCE // (members * classes))
    return (slice(start, start + step) for start in range(0, batch, step))


def check_classified(outputs: Tensor, labels: Tensor, name: str = "outputs") -> None:
    """Refuse outputs that are not logits ``[M, B, C]`` of two classes or more, and labels that do not fit them."""
    check_outputs(outputs, name)
    check_labels(labels, *outputs.shape[1:])


def check_outputs(outputs: Tensor, name: str = "outputs") -> None:
    """Refuse outputs that are not logits ``[M, B, C]`` of two classes or more; −inf may rule out some classes."""
    _, _, classes = checks.member_outputs(outputs, name)
    if classes < 2:
        fix = f"Two classes by one margin f? Use torch.cat([-{name} / 2, {name} / 2], -1)."
        checks.refuse(name, "have two classes or more", "one output", fix)
    if not bool(outputs.amax(-1).isfinite().all()):  # the largest is NaN where any is
        checks.refuse(name, "be numbers", "NaN or infinity", "Leave such examples out.")


def check_labels(labels: Tensor, batch: int, classes: int | None) -> None:
    """Refuse labels that are not one class per example."""
    if labels.dtype not in _WHOLE:
        fix = "Soft labels? Use labels.argmax(-1)." if labels.ndim == 2 else "Use labels.long()."
        checks.refuse("labels", "be whole numbers", str(labels.dtype), fix, TypeError)
    if tuple(labels.shape) != (batch,):
        fix = "One-hot? Use labels.argmax(-1)." if labels.ndim == 2 else ""
        checks.refuse("labels", f"have shape [B={batch}]", checks.shape_text(labels.shape), fix)
    low, high = int(labels.min()), int(labels.max())
    if classes is not None and not 0 <= low <= high < classes:
        fix = f"Ignored labels? Use dissensus.dense.counted(outputs, labels, ignore_index={low})." if low < 0 else ""
        checks.refuse("labels", f"be from 0 to {classes - 1}", f"labels from {low} to {high}", fix)


def _named(predictions: Tensor) -> Int[Tensor, " B"]:
    """The class that each prediction names."""
    classes = predictions.ndim == 1 and predictions.dtype in _WHOLE
    if not classes and not (predictions.ndim == 2 and predictions.is_floating_point()):
        got = f"{checks.shape_text(predictions.shape)} {predictions.dtype}"
        fix = "Pool the members first: see dissensus.pooling." if predictions.ndim == 3 else ""
        if predictions.ndim > 3:
            fix = "Positions of an image are not independent, so that an interval would be too narrow."
        checks.refuse("predictions", "be classes, [B], or log-probabilities, [B, C]", got, fix)
    if not predictions.numel():
        checks.refuse("predictions", "hold at least one example", checks.shape_text(predictions.shape))
    if classes:
        return predictions
    if bool(predictions.amax(-1).isnan().any()):
        checks.refuse("predictions", "be numbers", "NaN", "Leave such examples out.")
    return predictions.argmax(-1)
