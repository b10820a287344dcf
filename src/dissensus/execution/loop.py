"""Members as separate passes, in turn or on CUDA streams; works for every network."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from dissensus.calls import NetworkInputs, first_tensor, mapped, rows
from dissensus.execution.common import common_part
from dissensus.execution.counting import tallied
from dissensus.execution.skeleton import Skeleton, Tensors
from dissensus.execution.weights import Weights

MOST_STREAMS = 32


def run_loop(skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool) -> Tensor:
    """Run members in turn on views of the stacked weights."""
    with _jobs(skeleton, weights, buffers, x, per_member) as jobs:
        return torch.stack([job() for job in jobs])


def run_streams(skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool) -> Tensor:
    """Run members concurrently, each on its CUDA stream; in turn on a CPU.

    The backward pass of a member runs on its stream too. The host still launches every kernel, so this pays inside a
    captured graph, which needs no host.
    """
    # Gradients of inputs are then summed on the current stream, not on a member's.
    x = mapped(lambda tensor: tensor.view_as(tensor) if tensor.requires_grad else tensor, x)
    with _jobs(skeleton, weights, buffers, x, per_member) as jobs:
        return torch.stack(side_by_side(jobs, first_tensor(x).device))


@contextmanager
def _jobs(
    skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool
) -> Iterator[list[Callable[[], Tensor]]]:
    """One pass per member. What members have in common is computed by the first."""
    late = skeleton.late(len(weights))

    def member_outputs(index: int) -> Tensor:
        shared = nullcontext() if common is None else common.member()
        with skeleton.lending(parameters(index), state[index], late=late[index]), shared:
            return skeleton.passed(rows(x, index) if per_member else x)

    with _writes_counted(skeleton, x) as x, tallied(skeleton, buffers, len(weights)) as state:
        parameters = weights.members()
        with common_part(skeleton, x, len(weights), per_member) as common:
            yield [functools.partial(member_outputs, index) for index in range(len(weights))]


@contextmanager
def _writes_counted(skeleton: Skeleton, x: NetworkInputs) -> Iterator[NetworkInputs]:
    """A block outside of inference mode, whose tensors do not count writes to them, and inputs for it.

    What members have in common must not have been written to when another member takes it.
    """
    if not skeleton.shared or not torch.is_inference_mode_enabled() or torch.compiler.is_compiling():
        yield x
        return
    with torch.inference_mode(False), torch.no_grad():
        yield mapped(lambda tensor: tensor.clone() if tensor.is_inference() else tensor, x)


def side_by_side(jobs: Sequence[Callable[[], Tensor]], device: torch.device) -> list[Tensor]:
    """Results of all jobs; on a GPU, jobs run on streams, and the current stream waits for all of them."""
    if device.type != "cuda":
        return [job() for job in jobs]
    current = torch.cuda.current_stream(device)
    streams = _streams(device)[: len(jobs)]
    for stream in streams:
        stream.wait_stream(current)
    outputs: list[Tensor] = []
    for i, job in enumerate(jobs):
        with torch.cuda.stream(streams[i % len(streams)]):
            outputs.append(job())
    for stream in streams:
        current.wait_stream(stream)
    return outputs


@functools.cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(MOST_STREAMS)]
