"""Random numbers that belong to an example: a counter-based hash of (seed, the example's values, words, position).

An example draws the same numbers in any batch, in any order and on any device. Equal examples draw equal numbers.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import randomness
from dissensus.randomness import Use, derived_seed, example_keys, mixed

Keys = Int[Tensor, " B"]
Word = int | Int[Tensor, ""]
"""A 31-bit integer, on the host or on the device."""


def keys(x: Float[Tensor, "B *S"], seed: int, *words: int) -> Keys:
    """One key per example, from its values, a seed and further words (such as the number of a restart)."""
    return example_keys(x, derived_seed(seed, Use.ATTACK, *words))


def derived_keys(key: Keys, *words: Word) -> Keys:
    """Keys derived from keys and words, such as the number of a step."""
    for word in words:
        key = mixed(mixed(key ^ word) + 0x3C6EF372)
    return key


def uniform(key: Keys, shape: Sequence[int], *words: Word) -> Float[Tensor, "B *S"]:
    """Uniform numbers in (0, 1), ``[B, *shape]``.

    >>> key = keys(torch.rand(4, 100), seed=0)
    >>> torch.equal(uniform(key, (5,))[2:], uniform(key[2:], (5,)))
    True
    """
    return randomness.uniform(derived_keys(key, *words), shape)


def random_signs(numbers: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """−1 or +1, from uniform numbers."""
    return torch.where(numbers < 0.5, -1.0, 1.0)


def random_integers(numbers: Float[Tensor, "..."], limit: int) -> Int[Tensor, "..."]:
    """Integers from 0 to ``limit`` − 1, from uniform numbers."""
    return (numbers * limit).long()
