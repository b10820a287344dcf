"""Random numbers that belong to an example: from a counter-based hash of (seed, the example itself, words, position).

An example draws the same numbers in any batch, in any order, on any device. Equal examples draw equal numbers.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus.randomness import derived_seed, mixed

Keys = Int[Tensor, " B"]
Word = int | Int[Tensor, ""]
"""A whole number of 31 bits, on the host or on the device."""


def keys(x: Float[Tensor, "B *S"], seed: int, *words: int) -> Keys:
    """A key for each example, from its values, a seed and any further words (such as the number of a restart)."""
    flat = (x.float() + 0.0).flatten(1).contiguous()  # -0.0 becomes 0.0, which it equals
    position = torch.arange(flat.shape[1], dtype=torch.int32, device=x.device)
    content = mixed(mixed(position) ^ flat.view(torch.int32)).sum(1).to(torch.int32)
    own = derived_seed(seed, *words)
    return mixed(mixed(content ^ (own & 0x7FFFFFFF)) + ((own >> 32) & 0x7FFFFFFF))


def later(key: Keys, *words: Word) -> Keys:
    """Keys that follow from keys and words, such as a step and what is drawn in it."""
    for word in words:
        key = mixed(mixed(key ^ word) + 0x3C6EF372)
    return key


def uniform(key: Keys, shape: Sequence[int], *words: Word) -> Float[Tensor, "B *S"]:
    """Uniform numbers in (0, 1), ``[B, *shape]``.

    >>> key = keys(torch.rand(4, 100), seed=0)
    >>> torch.equal(uniform(key, (5,))[2:], uniform(key[2:], (5,)))
    True
    """
    first = later(key, *words).unsqueeze(1)
    position = torch.arange(math.prod(shape), dtype=torch.int32, device=key.device)
    bits = mixed(mixed(position + first) ^ mixed(first + 0x3C6EF372))
    steps = (bits >> 8) & 0x7FFFFF  # 23 bits, so that a half more is exact in float32
    return ((steps + 0.5) / 2**23).view(-1, *shape)


def signs(numbers: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """−1 or +1, from uniform numbers."""
    return torch.where(numbers < 0.5, -1.0, 1.0)


def below(numbers: Float[Tensor, "..."], limit: int) -> Int[Tensor, "..."]:
    """Whole numbers from 0 to ``limit`` − 1, from uniform numbers."""
    return (numbers * limit).long()
