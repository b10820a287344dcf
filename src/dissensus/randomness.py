"""Explicit randomness: seeds derived from a seed, a named use and numbers, and masks derived from counters.

A mask that depends only on (key, step, position) is the same whether members run in a loop, under ``vmap`` or as one
batched product, in any order, on any device.
"""

import hashlib
import math
import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Use(StrEnum):
    """Uses of derived seeds. Streams of different uses are separate, whatever their numbers."""

    INITIAL_WEIGHTS = "initial weights"
    DROPOUT = "dropout"
    SHUFFLE = "shuffle"
    SPLIT = "validation split"
    TEST_SPLIT = "test split of a study"
    SEARCH_SPLIT = "validation split of a search"
    AUGMENT = "augmentation"
    BOOTSTRAP = "examples that bagging draws for a member"
    UNLABELLED = "unlabelled data"
    OBJECTIVE = "draws of an objective"
    ACTIVE_MEMBERS = "active members"
    ATTACK_SIZE = "attack sizes in training"
    ATTACK_START = "attack starts in training"
    HYPERPARAMETERS = "hyperparameters per member"
    MEMBER = "member that is trained apart"
    ATTACK = "attack"
    ATTACK_TARGET = "attack targets"
    CORRUPTION = "corruption"
    CORRUPTION_ORDER = "order of corruptions"
    JIGSAW = "jigsaw"
    FEATURES = "augmentation of features"
    MASKS = "masks"
    MASKED_LAYER = "masks of a layer"
    MONTE_CARLO = "Monte Carlo dropout"
    SEARCH = "search"
    TWO_ATTRIBUTES = "images of two attributes"
    CONFORMAL = "draws of randomised conformal sets"
    TOY_DATA = "toy data of a study"


def derived_seed(seed: int, use: Use, *numbers: int | str) -> int:
    """A seed of 63 bits that depends only on ``seed``, its use and all numbers (or names).

    The words are hashed in an injective encoding, each with its type and length.

    >>> derived_seed(0, Use.SHUFFLE, 1) == derived_seed(0, Use.SHUFFLE, 1)
    True
    >>> derived_seed(0, Use.SHUFFLE, 1) in (derived_seed(1, Use.SHUFFLE, 0), derived_seed(0, Use.SHUFFLE, 1, 0))
    False
    """
    digest = hashlib.blake2b(encoded(seed, use, *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def drawn_seed() -> int:
    """A seed of 32 bits from torch's global generator, which moves on: the next one is another.

    >>> _ = torch.manual_seed(0)
    >>> first = drawn_seed()
    >>> first == drawn_seed(), first == (torch.manual_seed(0), drawn_seed())[1]
    (False, True)
    """
    return int(torch.randint(2**32, (), generator=torch.default_generator, device="cpu"))


def encoded(*words: int | str) -> bytes:
    """Words as bytes. Different lists of words have different bytes.

    >>> encoded(1, 0) == encoded(1), encoded(1, 2) == encoded(1 + (2 << 32)), encoded(1) == encoded("1")
    (False, False, False)
    """
    parts = [f"{'s' if isinstance(word, str) else 'i'}{word}".encode() for word in words]
    return b"".join(f"{len(part)}:".encode() + part for part in parts)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block under a seed, and restore the global generators of torch afterwards.

    Generators of GPUs that are not in use are left alone: torch would note the seed for them, and nothing restores it.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    elsewhere = bool(devices) or torch.backends.mps.is_available()
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed) if elsewhere else torch.default_generator.manual_seed(seed)
        yield


_Device = torch.device  # the field `torch` of the class hides the module


class GlobalGenerators(NamedTuple):
    """States of the global generators: PyTorch's, Python's, NumPy's and, on request, that of a GPU."""

    torch: Tensor
    python: Any
    numpy: Any
    device: _Device | None = None
    on_device: Tensor | None = None
    """None for a CPU, and while a graph is being captured."""

    @classmethod
    def now(cls, device: _Device | None = None) -> "GlobalGenerators":
        """Their present states."""
        readable = device is not None and device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002
        on_device = torch.cuda.get_rng_state(device) if device is not None and readable else None
        return cls(torch.get_rng_state(), random.getstate(), numpy_state, device, on_device)

    def restore(self) -> None:
        """Put the generators back to these states."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        if self.device is not None and self.on_device is not None:
            torch.cuda.set_rng_state(self.on_device, self.device)

    def drawn_from(self) -> bool:
        """Whether numbers were drawn since, from PyTorch's or NumPy's. (Type checkers draw from Python's.)"""
        now = GlobalGenerators.now(self.device)
        if pickle.dumps(self.numpy) != pickle.dumps(now.numpy) or not torch.equal(self.torch, now.torch):
            return True
        if self.on_device is None or now.on_device is None:
            return False
        return not torch.equal(self.on_device, now.on_device)


def is_generator(value: object) -> bool:
    """Whether a value is a generator of torch, NumPy or Python."""
    return isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random)


def generator_state(generator: Any) -> Any:
    """The state of a generator of torch, NumPy or Python, or of the module ``random`` or ``numpy.random``."""
    if generator is np.random or isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.getstate()


def set_generator_state(generator: Any, state: Any) -> None:
    """Put a generator back to a state."""
    if generator is np.random or isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Run a block, and restore the global generators of torch, Python and NumPy afterwards."""
    before = GlobalGenerators.now()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        before.restore()


def keep_mask(
    shape: tuple[int, ...],
    drop: float,
    key: Int[Tensor, "*K"],
    step: Int[Tensor, "*K"],
    units: Int[Tensor, "*K"] | None = None,
) -> Bool[Tensor, "..."]:
    """Masks ``[*K, *shape]`` that keep each position with probability 1 − ``drop``, from a counter-based hash.

    ``units``: how many of the last axis are not padding. Their masks are those of an axis of that length.
    ``key`` and ``step`` may be batched by ``vmap``. Nothing is read on the host. A compiler sees one opaque operator,
    since it must neither fuse the hash, whose integers wrap around, nor recompute it in the backward pass, when the
    counter ``step`` has advanced.

    >>> mask = keep_mask((100_000,), 0.3, torch.tensor(7), torch.tensor(1))
    >>> round(mask.float().mean().item(), 2)
    0.7
    """
    if torch.compiler.is_compiling() and units is None:
        return _compiled_mask(key, step, list(shape), drop)
    return _mask(key, step, shape, drop, units)


def _mask(key: Tensor, step: Tensor, shape: Sequence[int], drop: float, units: Tensor | None = None) -> Tensor:
    bits = random_bits(tuple(shape), key, step, _before(shape), units)
    return bits > int(drop * 2**31) - 1  # so that drop = 1 stays within 32 bits


_part: list[tuple[int, int]] = []
"""The example that a part of a batch begins with, and its length, in blocks of `part_of_batch`."""


@contextmanager
def part_of_batch(start: int, length: int) -> Iterator[None]:
    """A block of passes on a part of a batch, whose masks are those of the whole one at these examples.

    >>> key, step = torch.tensor(7), torch.tensor(1)
    >>> with part_of_batch(2, 3):
    ...     part = keep_mask((3, 4), 0.5, key, step)
    >>> torch.equal(part, keep_mask((9, 4), 0.5, key, step)[2:5])
    True
    """
    _part.append((start, length))
    try:
        yield
    finally:
        _part.pop()


def _before(shape: Sequence[int]) -> int:
    """Positions of a mask of the whole batch that lie before those of a part; masks begin with an axis of examples."""
    if not _part or not shape or not _part[-1][1] or shape[0] % _part[-1][1]:
        return 0
    start, length = _part[-1]
    return start * (math.prod(shape) // length)


@torch.library.custom_op("dissensus::keep_mask", mutates_args=())
def _compiled_mask(key: Tensor, step: Tensor, shape: Sequence[int], drop: float) -> Tensor:
    return _mask(key, step, shape, drop)


@_compiled_mask.register_fake
def _(key: Tensor, step: Tensor, shape: Sequence[int], drop: float) -> Tensor:  # noqa: ARG001
    return key.new_empty((*key.shape, *shape), dtype=torch.bool)


@_compiled_mask.register_vmap
def _(info: Any, in_dims: Any, key: Tensor, step: Tensor, shape: Sequence[int], drop: float) -> tuple[Tensor, int]:
    first, second = (
        tensor.movedim(dim, 0) if dim is not None else tensor.expand(info.batch_size, *tensor.shape)
        for tensor, dim in ((key, in_dims[0]), (step, in_dims[1]))
    )
    return _compiled_mask(first, second, shape, drop), 0


def random_bits(
    shape: tuple[int, ...],
    key: Int[Tensor, "*K"],
    step: Int[Tensor, "*K"],
    first: int = 0,
    units: Int[Tensor, "*K"] | None = None,
) -> Int[Tensor, "..."]:
    """Whole numbers from 0 to 2³¹ − 1, ``[*K, *shape]``, that depend only on (position, key, step).

    Positions count from ``first``.

    (key, step) are hashed into two words of 32 bits, in ``int32`` arithmetic that wraps around, so that two streams
    coincide by chance once in 2⁶⁴ pairs.
    """
    low, high, count = key.to(torch.int32), (key >> 32).to(torch.int32), step.to(torch.int32)
    one = mixed(mixed(low ^ count) + high)
    other = mixed(mixed(high ^ count) + (low ^ 0x3C6EF372))
    broadcast = (*one.shape, *[1] * len(shape))
    if units is None:
        return _positions(shape, one.view(broadcast), other.view(broadcast), first) & 0x7FFFFFFF
    rows = torch.arange(math.prod(shape[:-1]), dtype=torch.int32, device=key.device).view(*shape[:-1], 1)
    position = (rows + first // shape[-1]) * units.to(torch.int32).view(broadcast)
    position = position + torch.arange(shape[-1], dtype=torch.int32, device=key.device)
    return mixed(mixed(position + one.view(broadcast)) ^ other.view(broadcast)) & 0x7FFFFFFF


def example_keys(x: Float[Tensor, "B *S"], seed: int) -> Int[Tensor, " B"]:
    """A key of 32 bits for each example, from its values and a derived seed. Equal examples have equal keys."""
    flat = (x.float() + 0.0).flatten(1).contiguous()  # -0.0 becomes 0.0, which it equals
    position = torch.arange(flat.shape[1], dtype=torch.int32, device=x.device)
    content = mixed(mixed(position) ^ flat.view(torch.int32)).sum(1, dtype=torch.int32)
    return mixed(mixed(content ^ (seed & 0x7FFFFFFF)) + ((seed >> 32) & 0x7FFFFFFF))


def uniform(key: Int[Tensor, " B"], shape: Sequence[int]) -> Float[Tensor, "B *S"]:
    """Uniform numbers in (0, 1), ``[B, *shape]``, in float32.

    >>> key = example_keys(torch.rand(4, 100), 0)
    >>> torch.equal(uniform(key, (5,))[2:], uniform(key[2:], (5,)))
    True
    """
    first = key.unsqueeze(1)
    bits = _positions((math.prod(shape),), first, mixed(first + 0x3C6EF372))
    steps = (bits >> 8).bitwise_and_(0x7FFFFF)  # 23 bits, so that a half more is exact in float32
    return steps.float().add_(0.5).mul_(2**-23).view(-1, *shape)


def _positions(
    shape: tuple[int, ...], first: Int[Tensor, "*K"], second: Int[Tensor, "*K"], start: int = 0
) -> Int[Tensor, "..."]:
    """32 random bits for every position from ``start`` on, from the two words of a stream."""
    stop = start + math.prod(shape)
    position = torch.arange(start, stop, dtype=torch.int32, device=first.device).view(shape)
    return mixed(mixed(position + first) ^ second)


def mixed(word: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """One round of a 32-bit mixer, in arithmetic that wraps around."""
    word = (word >> 16).bitwise_and_(0xFFFF).bitwise_xor_(word).mul_(0x21F0AAAD)
    word = (word >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(word).mul_(0x735A2D97)
    return (word >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(word)
