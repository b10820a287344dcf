"""Randomness is explicit: seeds are derived from words, and masks from counters.

A mask that depends on (key, step, position) alone is the same whether members run in a loop, under ``vmap`` or as one
batched product, in any order, on any device.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor


def derived_seed(seed: int, *words: int) -> int:
    """A seed of 63 bits that depends on ``seed`` and every word, and on nothing else.

    >>> derived_seed(0, 1) == derived_seed(0, 1), derived_seed(0, 1) == derived_seed(1, 0)
    (True, False)
    """
    state = np.random.SeedSequence([int(seed) & (2**64 - 1), *words]).generate_state(1, np.uint64)
    return int(state[0]) >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block under a seed and put the global generators back as they were."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        yield


def keep_mask(shape: tuple[int, ...], drop: float, key: Int[Tensor, ""], step: Int[Tensor, ""]) -> Bool[Tensor, "..."]:
    """A mask that keeps each position with probability 1 − ``drop``, from a counter-based hash.

    Two rounds of a 32-bit mixer over (position, key, step), in ``int32`` arithmetic that wraps around. ``key`` and
    ``step`` may be batched by ``vmap``; nothing is read on the host.

    >>> mask = keep_mask((100_000,), 0.3, torch.tensor(7), torch.tensor(1))
    >>> round(mask.float().mean().item(), 2)
    0.7
    """
    return random_bits(shape, key, step) > int(drop * 2**31) - 1  # drop = 1 stays within 32 bits this way


def random_bits(shape: tuple[int, ...], key: Int[Tensor, ""], step: Int[Tensor, ""]) -> Int[Tensor, "..."]:
    """Whole numbers from 0 to 2³¹ − 1 that depend on (position, key, step) alone."""
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
    position = torch.arange(math.prod(shape), dtype=torch.int32, device=key.device).view(shape)
    first = mixed(mixed(low ^ step.to(torch.int32)) + high)
    second = mixed(first + 0x3C6EF372)
    return mixed(mixed(position + first) ^ second) & 0x7FFFFFFF


def mixed(word: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """One round of a mixer of 32 bits; wraps around."""
    word = (word ^ ((word >> 16) & 0xFFFF)) * 0x21F0AAAD
    word = (word ^ ((word >> 15) & 0x1FFFF)) * 0x735A2D97
    return word ^ ((word >> 15) & 0x1FFFF)
