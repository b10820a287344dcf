"""Which backend is fastest here: measured on the first batch, remembered, reported."""

import logging
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from dissensus.execution.batched import run_batched
from dissensus.execution.loop import run_loop
from dissensus.execution.skeleton import Skeleton, Tensors, first_line
from dissensus.execution.vmapped import run_vmapped

log = logging.getLogger("dissensus")

Run = Callable[[Skeleton, Tensors, Tensors, Tensor, bool], Tensor]

BACKENDS: dict[str, Run] = {"loop": run_loop, "vmap": run_vmapped, "batched": run_batched}


class Choice(NamedTuple):
    """What was chosen, and why."""

    backend: str
    milliseconds: dict[str, float]
    refused: dict[str, str]

    def __str__(self) -> str:
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in self.milliseconds.items())
        why = "".join(f"; {name} refused: {reason}" for name, reason in self.refused.items())
        return f"backend {self.backend} ({times}{why})"


def fastest(
    skeleton: Skeleton, params: Tensors, buffers: Tensors, x: Tensor, per_member: bool, rounds: int = 5
) -> Choice:
    """Measure every backend that gives the loop's outputs; take the quickest, or the loop where it is as good.

    One pass is measured as it will be used: forward and backward where gradients are on, forward alone otherwise.
    Buffers are copied first, so measuring leaves no trace in batch-norm statistics or dropout counters. Rounds are
    interleaved, so that a disturbance of the machine hits every candidate. A backend must beat the loop by 5 %.
    """
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        reference = _output(run_loop, skeleton, params, buffers, x, per_member)
        again = _output(run_loop, skeleton, params, buffers, x, per_member)
        repeatable = torch.equal(reference, again)
        candidates, refused = ["loop"], {}
        for name in ("batched", "vmap"):
            try:
                output = _output(BACKENDS[name], skeleton, params, buffers, x, per_member)
            except Exception as reason:  # the loop has run, so the network itself is sound
                refused[name] = first_line(reason)
                continue
            if repeatable and not _close(output, reference):
                refused[name] = "its outputs differ from the loop's"
            else:
                candidates.append(name)
        times: dict[str, list[float]] = {name: [] for name in candidates}
        started = time.perf_counter()
        for turn in range(rounds + 1 if len(candidates) > 1 else 0):
            for name in candidates:
                elapsed = _timed(BACKENDS[name], skeleton, params, buffers, x, per_member)
                if turn:  # the first turn warms up
                    times[name].append(elapsed)
            if turn >= 2 and time.perf_counter() - started > 2.0:
                break
    milliseconds = {name: 1e3 * median(each) for name, each in times.items() if each}
    best = min(milliseconds, key=milliseconds.__getitem__, default="loop")
    if milliseconds and milliseconds[best] > 0.95 * milliseconds["loop"]:
        best = "loop"
    choice = Choice(best, milliseconds, refused)
    log.info("%s", choice)
    return choice


def _copies(buffers: Tensors) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in buffers.items()}


def _output(run: Run, skeleton: Skeleton, params: Tensors, buffers: Tensors, x: Tensor, per_member: bool) -> Tensor:
    with torch.no_grad():
        return run(skeleton, params, _copies(buffers), x, per_member)


def _close(output: Tensor, reference: Tensor) -> bool:
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-3}.get(reference.dtype, 5e-2)
    scale = reference.detach().abs().amax().clamp_min(1e-6).item()
    return output.shape == reference.shape and torch.allclose(
        output.to(reference.dtype), reference, rtol=tolerance, atol=tolerance * scale, equal_nan=True
    )


def _timed(run: Run, skeleton: Skeleton, params: Tensors, buffers: Tensors, x: Tensor, per_member: bool) -> float:
    copies = _copies(buffers)
    leaves = [tensor for tensor in params.values() if tensor.requires_grad]
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    start = time.perf_counter()
    output = run(skeleton, params, copies, x, per_member)
    if output.requires_grad and leaves:
        torch.autograd.grad(output.sum(), leaves, allow_unused=True)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - start
