"""What a training step feeds to members: the batch, maybe attacked, and what else stands beside it."""

from typing import NamedTuple

from torch import Tensor

from dissensus.data.unlabelled import Batches, WithUnlabelled

Inputs = Tensor | tuple[Tensor, Tensor]
"""A batch ``x``, or one beside a batch of other data that has no labels."""


class Fed(NamedTuple):
    """A batch, and whether runs or members have one each."""

    x: Tensor
    per_run: bool
    per_member: bool


def fed(feed: Batches, x: Inputs) -> list[Fed]:
    """The parts of a batch as a feed gives it: what has labels comes first."""
    if not isinstance(feed, WithUnlabelled):
        assert isinstance(x, Tensor)
        return [Fed(x, feed.per_run, feed.per_member)]
    return [
        Fed(part, own.per_run, own.per_member) for part, own in zip(x, (feed.labelled, feed.unlabelled), strict=True)
    ]
