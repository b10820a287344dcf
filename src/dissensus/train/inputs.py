"""The inputs of a training step: the batch, possibly attacked, and other batches of the same step."""

from typing import NamedTuple

from dissensus.batch import Batch
from dissensus.calls import NetworkInputs
from dissensus.data.unlabelled import Batches, WithUnlabelled


class StepInput(NamedTuple):
    """A batch, and whether each run or each member has its own."""

    x: NetworkInputs
    per_run: bool
    per_member: bool


def step_inputs(feed: Batches, batch: Batch) -> list[StepInput]:
    """The inputs of a step as a feed returns them, the labelled ones first."""
    if not isinstance(feed, WithUnlabelled):
        return [StepInput(batch.inputs, feed.per_run, feed.per_member)]
    assert batch.unlabelled is not None
    return [
        StepInput(inputs, source.per_run, source.per_member)
        for inputs, source in ((batch.inputs, feed.labelled), (batch.unlabelled, feed.unlabelled))
    ]
