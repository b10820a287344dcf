"""Passes of several runs whose members share weights that are the run's own: one after another, or under ``vmap``."""

import time
from collections.abc import Callable
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from dissensus.calls import NetworkInputs, first_tensor, mapped, split_tensors
from dissensus.execution.choice import alike, close, tolerance
from dissensus.execution.skeleton import Skeleton, Tensors
from dissensus.execution.vmapped import attention_with_derivative
from dissensus.execution.weights import Hanging

JOINABLE = ("vmap", "batched")
"""Backends whose passes ``vmap`` can join."""
_ROUNDS = 3


class Run(Protocol):
    """A backend; see `dissensus.execution.backends.Run`."""

    def __call__(  # noqa: D102
        self, skeleton: Skeleton, weights: Hanging, buffers: Tensors, x: NetworkInputs, per_member: bool, /
    ) -> Tensor: ...


def joined(
    run: Run,
    skeleton: Skeleton,
    weights: Tensors,
    buffers: Tensors,
    x: NetworkInputs,
    per_member: bool,
    rows: Tensor,
    views: Callable[[Tensor], dict[str, Tensor]],
) -> Tensor:
    """Outputs ``[R·M, B, ...]`` of all runs in one pass: ``vmap`` over runs of what a backend does for one.

    Weights and buffers are ``[R·M, ...]``. ``rows`` ``[R, P]`` are what members of each run share, and ``views`` makes
    parameters of a row.
    """
    runs = len(rows)
    members = len(next(iter({**weights, **buffers}.values()))) // runs
    inputs, rebuilt = split_tensors(mapped(lambda t: t.unflatten(0, (runs, -1)), x) if per_member else x)

    def of_run(own: dict[str, Tensor], state: dict[str, Tensor], row: Tensor, tensors: list[Tensor]) -> Tensor:
        with skeleton.lending(views(row.unsqueeze(0))):
            return run(skeleton, Hanging(own, members), state, rebuilt(tensors), per_member)

    def by_run(tensors: Tensors) -> dict[str, Tensor]:
        return {name: tensor.unflatten(0, (runs, -1)) for name, tensor in tensors.items()}

    in_dims = (0, 0, 0, 0 if per_member else None)
    with attention_with_derivative(first_tensor(x)):
        over_runs = torch.func.vmap(of_run, in_dims, randomness="different")
        return over_runs(by_run(weights), by_run(buffers), rows, inputs).flatten(0, 1)


def joining_pays(
    each: Callable[[], Tensor],
    at_once: Callable[[], Tensor],
    leaves: list[Tensor],
    restore: Callable[[], None],
    *,
    by_rule: bool,
) -> bool:
    """Whether one pass gives the outputs and gradients of one after another, and takes less time.

    Both are run forward and, where gradients are enabled, backward. ``restore`` undoes what a pass writes to buffers.
    ``by_rule`` measures no time.
    """

    def whole(outputs_of: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
        restore()
        outputs = outputs_of()
        if not outputs.requires_grad or not leaves:
            return outputs.detach(), []
        grads = torch.autograd.grad((outputs * outputs.detach()).sum(), leaves, allow_unused=True)
        return outputs.detach(), [grad for grad in grads if grad is not None]

    try:
        (expected, gradients), (outputs, grads) = whole(each), whole(at_once)
        kinds = {tolerance(t.dtype) for t in (expected, *gradients)}
        lowered = expected.is_cuda or torch.is_autocast_enabled(expected.device.type)  # TF32, or sums in bf16
        most = max(kinds | ({tolerance(torch.bfloat16)} if lowered else set()))
        if not close(outputs, expected, tolerance(expected.dtype)) or not alike(grads, gradients, most):
            return False
        times = [[_seconds(whole, each), _seconds(whole, at_once)] for _ in range(0 if by_rule else _ROUNDS)]
    except RuntimeError:  # no such form, or not enough memory
        return False
    return by_rule or median(pair[1] for pair in times) < 0.95 * median(pair[0] for pair in times)


def _seconds(whole: Callable[[Callable[[], Tensor]], tuple[Tensor, object]], outputs_of: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    if whole(outputs_of)[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
