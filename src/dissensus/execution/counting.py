"""Batch norm's count of batches, kept on the host while members run one by one.

A layer adds one to its counter at every training pass, on the device: M × layers kernels that do next to nothing. The
value is used only where ``momentum`` is None; elsewhere calls are tallied and added to all members at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dissensus.execution.skeleton import Skeleton, Tensors

_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Tally:
    """Stands where a counter hangs."""

    def __init__(self) -> None:
        self.calls = 0

    def add_(self, number: int) -> None:
        """Count a call."""
        self.calls += number


def counters(skeleton: Skeleton) -> list[str]:
    """Names of the counters whose value no pass reads."""
    return [
        f"{path}.num_batches_tracked" if path else "num_batches_tracked"
        for path, layer in skeleton.network.named_modules()
        if type(layer) in _LAYERS and layer.momentum is not None and layer.num_batches_tracked is not None
    ]


@contextmanager
def tallied(skeleton: Skeleton, buffers: Tensors, members: int) -> Iterator[list[dict[str, Any]]]:
    """For each member its buffers, with tallies in place of counters; afterwards the counters have gone on."""
    names = [name for name in skeleton.once(counters) if name in buffers] if skeleton.network.training else []
    tallies = [{name: Tally() for name in names} for _ in range(members)]
    held = {name: tensor for name, tensor in buffers.items() if name not in names}
    yield [{**{name: tensor[i] for name, tensor in held.items()}, **tallies[i]} for i in range(members)]
    if not names:
        return
    calls = {name: [tally[name].calls for tally in tallies] for name in names}
    if all(len(set(each)) == 1 for each in calls.values()):
        for often in {each[0] for each in calls.values()} - {0}:
            alike = [buffers[name] for name in names if calls[name][0] == often]
            torch._foreach_add_(alike, often)  # pyright: ignore[reportPrivateImportUsage]  # one kernel for all layers
    else:  # members that take different ways through their network
        for name, each in calls.items():
            counter: Tensor = buffers[name]
            counter.add_(torch.tensor(each, device=counter.device))
