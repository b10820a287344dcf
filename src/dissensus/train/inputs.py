"""The inputs of a training step: the batch, possibly attacked, and other batches of the same step."""

from typing import NamedTuple

from torch import Tensor

from dissensus.data.unlabelled import Batches, WithUnlabelled

BatchInputs = Tensor | tuple[Tensor, Tensor]
"""A batch ``x``, or a labelled and an unlabelled batch."""


class StepInput(NamedTuple):
    """A batch, and whether each run or each member has its own."""

    x: Tensor
    per_run: bool
    per_member: bool


def step_inputs(feed: Batches, x: BatchInputs) -> list[StepInput]:
    """The batches of a step as a feed returns them, the labelled one first."""
    if not isinstance(feed, WithUnlabelled):
        assert isinstance(x, Tensor)
        return [StepInput(x, feed.per_run, feed.per_member)]
    return [
        StepInput(batch, source.per_run, source.per_member)
        for batch, source in zip(x, (feed.labelled, feed.unlabelled), strict=True)
    ]
