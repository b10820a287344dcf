"""How much memory a training takes, told before it starts."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from dissensus import checks

log = logging.getLogger("dissensus")

COPIES = 6
"""Matrices of the size of all weights: weights, gradient, two moments, best weights, and one in passing."""
_SHARE_OF_FREE = 0.5


def saved_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass of a computation, counted by running it."""
    seen: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        output = forward()
    return sum(seen.values()) + output.numel() * output.element_size()


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            available = next(line for line in file if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):  # not Linux: a guess that small machines survive
        return 4 * 2**30


def runs_at_once(bytes_per_run: int, runs: int, max_memory: int | None, device: torch.device) -> int:
    """How many runs fit into the budget: what the caller allows, or half of what is free.

    >>> runs_at_once(100, 50, 1000, torch.device("cpu"))
    10
    """
    if max_memory is not None:
        checks.count("max_memory", max_memory)
    budget = int(free_bytes(device) * _SHARE_OF_FREE) if max_memory is None else max_memory
    if bytes_per_run > budget and max_memory is None:
        log.warning("one run takes about %s, more than half of what is free", megabytes(bytes_per_run))
    elif bytes_per_run > budget:
        fix = "Allow more, or use fewer members or smaller batches."
        checks.refuse("max_memory", f"hold one run, about {megabytes(bytes_per_run)}", megabytes(budget), fix)
    return min(runs, max(1, budget // max(bytes_per_run, 1)))


def megabytes(count: int) -> str:
    """Bytes in words.

    >>> megabytes(3 * 2**20)
    '3.0 MiB'
    """
    return f"{count / 2**20:,.1f} MiB"
