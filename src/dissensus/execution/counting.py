"""The batch counters of batch norm, counted on the host while members run in turn.

A layer increments its counter on the device at every training pass: M × layers kernels with almost no work. The value
is used only if ``momentum`` is None. Otherwise calls are counted on the host and added for all members at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.execution.skeleton import Skeleton, Tensors

_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class CallCounter:
    """Replaces a counter in a network and counts calls."""

    def __init__(self) -> None:
        self.calls = 0

    def add_(self, number: int) -> None:
        """Count a call."""
        self.calls += number


def counters(skeleton: Skeleton) -> list[str]:
    """Names of counters whose values no pass reads."""
    return [
        f"{path}.num_batches_tracked" if path else "num_batches_tracked"
        for path, layer in skeleton.network.named_modules()
        if type(layer) in _LAYERS and layer.momentum is not None and layer.num_batches_tracked is not None
    ]


@contextmanager
def tallied(skeleton: Skeleton, buffers: Tensors, members: int) -> Iterator[list[dict[str, Any]]]:
    """The buffers of each member, with call counters in place of counters, which are incremented afterwards."""
    names = [name for name in skeleton.once(counters) if name in buffers] if skeleton.network.training else []
    tallies = [{name: CallCounter() for name in names} for _ in range(members)]
    held = {name: tensor for name, tensor in buffers.items() if name not in names}
    yield [{**{name: tensor[i] for name, tensor in held.items()}, **tallies[i]} for i in range(members)]
    if not names:
        return
    calls = {name: [tally[name].calls for tally in tallies] for name in names}
    if all(len(set(counts)) == 1 for counts in calls.values()):
        for number in {counts[0] for counts in calls.values()} - {0}:
            tensors = [buffers[name] for name in names if calls[name][0] == number]
            torch._foreach_add_(tensors, number)  # pyright: ignore[reportPrivateImportUsage]  # one kernel for all layers
    else:  # members that run different layers
        for name, counts in calls.items():
            counter: Tensor = buffers[name]
            counter.add_(torch.tensor(counts, device=counter.device))
