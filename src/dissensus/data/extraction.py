"""Features of every example under every augmentation, written to files in bounded memory."""

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
from dissensus.storage import new_array

OnRows = Callable[[int, int], None]
"""``(rows so far, rows in all)``."""


class ExtractionJob(NamedTuple):
    """Features to be computed: the function, the data, and the form of the result."""

    features: Callable[[Tensor], Tensor]
    pairs: Pairs
    augmentations: Sequence[Augment | None]
    seed: int
    device: torch.device
    dtype: torch.dtype
    progress: OnRows | None

    @property
    def rows(self) -> int:
        """Number of rows: augmentations times examples."""
        return len(self.augmentations) * self.pairs.examples


def extract(job: ExtractionJob, features: Path, targets: Path) -> None:
    """Write features and targets batch by batch, into memory-mapped ``.npy`` files."""
    x: np.memmap[Any, Any] | None = None
    y: np.memmap[Any, Any] | None = None
    start = 0
    for batch_x, batch_y in _batches(job):
        if x is None or y is None:
            x = new_array(features, batch_x.dtype, (job.rows, *batch_x.shape[1:]))
            y = new_array(targets, batch_y.dtype, (job.rows, *batch_y.shape[1:]))
        stop, first = start + len(batch_x), start % job.pairs.examples
        if batch_x.shape[1:] != x.shape[1:]:
            got = f"{checks.shape_text(batch_x.shape[1:])} after {checks.shape_text(x.shape[1:])}"
            checks.refuse("features", "have one shape for all examples", got)
        x[start:stop], y[start:stop] = batch_x, batch_y
        if start > first and not np.array_equal(y[first : first + len(batch_y)], batch_y):
            fix = "Is its sampler random?"
            checks.refuse("data", "give the same examples in the same order at every pass", "different targets", fix)
        start = stop
        if job.progress is not None:
            job.progress(start, job.rows)
    assert x is not None
    assert y is not None
    x.flush()
    y.flush()


def _batches(job: ExtractionJob) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Features and targets of all batches, in one pass over the data per augmentation."""
    generator = torch.Generator(job.device)
    for number, augment in enumerate(job.augmentations):
        start = 0
        for step, batch in enumerate(job.pairs.batches()):
            x, y = pair_of(batch)
            if start + len(x) > job.pairs.examples:
                break
            x = x.to(job.device, non_blocking=True, copy=True)  # networks and augmentations may write into it
            if augment is not None:
                generator.manual_seed(derived_seed(job.seed, Use.FEATURES, number, step))
                x = augment(x, generator)
                if len(x) != len(y):
                    checks.refuse("augmentations", "keep the number of examples", f"{len(x)} of {len(y)}")
            if y.dtype == torch.bfloat16:
                checks.refuse("targets", "be of a type that .npy knows", "bfloat16", "Use y.float().", TypeError)
            yield _features(job, x, start).cpu().numpy(), y.detach().cpu().numpy()
            start += len(x)
        if start != job.pairs.examples:
            checks.refuse("data", f"hold {job.pairs.examples} examples, as its order says", "another number of them")


def _features(job: ExtractionJob, x: Tensor, start: int) -> Tensor:
    """Features of a batch in the stored dtype."""
    try:
        with torch.inference_mode():
            features = job.features(x)
    except (RuntimeError, TypeError) as reason:
        if x.is_floating_point():
            raise
        fix = "Pixels? Pass lambda x: trunk.features(x.float() / 255)."
        checks.refuse("features", f"take the data's {x.dtype}", f"an error ({first_line(reason)})", fix, TypeError)
    if not isinstance(features, Tensor) or not features.is_floating_point():
        got = str(features.dtype) if isinstance(features, Tensor) else type(features).__name__
        checks.refuse("features", "return one tensor of floats", got, error=TypeError)
    if features.ndim == 0 or len(features) != len(x) or not features.numel():
        got = f"{checks.shape_text(features.shape)} for {len(x)} examples"
        checks.refuse("features", "return a row of numbers for each example", got)
    stored = features.to(job.dtype)
    bad = ~stored.reshape(len(stored), -1).isfinite().all(1)
    if bool(bad.any()):
        first, count = start + int(bad.nonzero()[0]), int(bad.sum())
        if bool(features.isfinite().all()):
            largest = f"{features.abs().max().item():.4g} (example {first})"
            checks.refuse("dtype", "hold the features", f"float16, and {largest}", "Use dtype=torch.float32.")
        got = f"NaN or infinity in {count} of {len(x)} examples, first in {first}"
        checks.refuse("features", "be finite", got, "Are the inputs finite, and scaled as the network expects?")
    return stored
