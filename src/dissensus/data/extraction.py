"""Features of every example under every augmentation, from a network to files, in bounded memory."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dissensus import checks
from dissensus.data.batches import Augment
from dissensus.data.recognition import Pairs, pair_of
from dissensus.execution.skeleton import first_line
from dissensus.randomness import Use, derived_seed

OnRows = Callable[[int, int], None]
"""``(rows so far, rows in all)``."""


class Job(NamedTuple):
    """What is to be computed."""

    features: Callable[[Tensor], Tensor]
    source: Pairs
    augmentations: Sequence[Augment | None]
    seed: int
    device: torch.device
    dtype: torch.dtype
    progress: OnRows | None

    @property
    def rows(self) -> int:
        """A · N."""
        return len(self.augmentations) * self.source.examples


def extract(job: Job, features: Path, targets: Path) -> None:
    """Write features and targets as they come, through maps of their ``.npy`` files."""
    x: np.memmap[Any, Any] | None = None
    y: np.memmap[Any, Any] | None = None
    start = 0
    for found, told in _batches(job):
        if x is None or y is None:
            x = _opened(features, found, job.rows)
            y = _opened(targets, told, job.rows)
        stop, first = start + len(found), start % job.source.examples
        if found.shape[1:] != x.shape[1:]:
            got = f"{checks.shape_text(found.shape[1:])} after {checks.shape_text(x.shape[1:])}"
            checks.refuse("features", "have one shape for all examples", got)
        x[start:stop], y[start:stop] = found, told
        if start > first and not np.array_equal(y[first : first + len(found)], told):
            fix = "Is its sampler random?"
            checks.refuse("data", "give the same examples in the same order at every pass", "other targets", fix)
        start = stop
        if job.progress is not None:
            job.progress(start, job.rows)
    assert x is not None
    assert y is not None
    x.flush()
    y.flush()


def _opened(part: Path, first: np.ndarray, rows: int) -> "np.memmap[Any, Any]":
    array = np.lib.format.open_memmap(part, "w+", first.dtype, (rows, *first.shape[1:]))
    if hasattr(os, "posix_fallocate"):  # a full disk is an error now, where a map would kill the process later
        with part.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, part.stat().st_size)
    return array


def _batches(job: Job) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Features and targets of all batches, in one pass per augmentation."""
    generator = torch.Generator(job.device)
    for number, augment in enumerate(job.augmentations):
        start = 0
        for step, batch in enumerate(job.source.batches()):
            x, y = pair_of(batch)
            if start + len(x) > job.source.examples:
                break
            x = x.to(job.device, non_blocking=True, copy=True)  # networks and augmentations may write into it
            if augment is not None:
                generator.manual_seed(derived_seed(job.seed, Use.FEATURES, number, step))
                x = augment(x, generator)
                if len(x) != len(y):
                    checks.refuse("augmentations", "keep the number of examples", f"{len(x)} of {len(y)}")
            if y.dtype == torch.bfloat16:
                checks.refuse("targets", "be of a type that .npy knows", "bfloat16", "Use y.float().", TypeError)
            yield _computed(job, x, start).cpu().numpy(), y.detach().cpu().numpy()
            start += len(x)
        if start != job.source.examples:
            checks.refuse("data", f"hold {job.source.examples} examples, as its order says", "another number of them")


def _computed(job: Job, x: Tensor, start: int) -> Tensor:
    """Features of a batch as they are stored."""
    try:
        with torch.inference_mode():
            found = job.features(x)
    except (RuntimeError, TypeError) as reason:
        if x.is_floating_point():
            raise
        fix = "Pixels? Pass lambda x: trunk.features(x.float() / 255)."
        checks.refuse("features", f"take the data's {x.dtype}", f"an error ({first_line(reason)})", fix, TypeError)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        got = str(found.dtype) if isinstance(found, Tensor) else type(found).__name__
        checks.refuse("features", "return one tensor of floats", got, error=TypeError)
    if found.ndim == 0 or len(found) != len(x) or not found.numel():
        got = f"{checks.shape_text(found.shape)} for {len(x)} examples"
        checks.refuse("features", "return a row of numbers for each example", got)
    stored = found.to(job.dtype)
    bad = ~stored.reshape(len(stored), -1).isfinite().all(1)
    if bool(bad.any()):
        first, which = start + int(bad.nonzero()[0]), int(bad.sum())
        if bool(found.isfinite().all()):
            largest = f"{found.abs().max().item():.4g} (example {first})"
            checks.refuse("dtype", "hold the features", f"float16, and {largest}", "Use dtype=torch.float32.")
        got = f"NaN or infinity in {which} of {len(x)} examples, first in {first}"
        checks.refuse("features", "be finite", got, "Are the inputs finite and scaled as the network wants them?")
    return stored
