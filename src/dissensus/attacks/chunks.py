"""An attack on many examples, chunk by chunk: finished chunks are kept, and an interrupted run goes on from there."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from dissensus import checks, storage
from dissensus.attacks.array_inputs import arrays_taken
from dissensus.attacks.problem import Adversarial
from dissensus.attacks.target_model import Model, evaluation_mode
from dissensus.execution.out_of_memory import OutOfMemory, advising
from dissensus.fingerprint import differing, digest, fingerprint

KIND = "dissensus.attacks.chunk"
FORMAT = 3
"""Of the identity of a chunk."""


@arrays_taken
def over(
    attack: Callable[..., Adversarial],
    model: Model,
    x: Float[Tensor, "B *S"],
    y: Integer[Tensor, " B"],
    *,
    target: Integer[Tensor, " B"] | None = None,
    batch_size: int = 256,
    folder: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Adversarial:
    """An attack on any number of examples, in batches; results are those of one large batch.

    Args:
        attack: ``(model, x, y) -> Adversarial``, such as ``functools.partial(attacks.pgd, epsilon=8 / 255)``.
        model: The model that is attacked.
        x: Clean inputs, which may stay on the host: each batch goes to the model's device and comes back.
        y: Labels.
        target: Target classes, passed to the attack in batches.
        batch_size: Examples at once.
        folder: Where every finished batch is stored. A later call with the same attack, model, examples and batch size
            reads finished batches from there; results of anything else are refused. Attack and model are identified by
            everything that decides what they do: code, settings, variables that functions close over or refer to,
            weights, buffers and mode (see `dissensus.fingerprint`); examples, labels and targets by their numbers.
            Neither may hold state that changes from call to call, such as a list that a function appends to.
        progress: Called after every batch with the number of finished examples and of all examples.
    """
    batch_size = checks.count("batch_size", batch_size)
    if progress is not None:
        checks.function("progress", progress, "(finished, all)")
    if target is not None and not isinstance(target, Tensor):
        checks.refuse("target", "be a tensor of classes [B]", repr(target), error=TypeError)
    if target is not None and tuple(target.shape) != (len(x),):
        checks.refuse("target", f"be classes [B={len(x)}]", checks.shape_text(target.shape))
    if len(x) == 0 or len(y) != len(x):
        checks.refuse("x", "hold examples, each with its label", f"{len(x)} of them and {len(y)} labels")
    parent = None if folder is None else checks.path("folder", folder)
    if parent is not None:
        storage.make_folder("folder", parent)
    common = {} if parent is None else _identity(attack, model)
    results: list[Adversarial] = []
    with nullcontext() if parent is None else storage.locked(parent, wait=True):
        for start in range(0, len(x), batch_size):
            batch = [part[start : start + batch_size] for part in (x, y, target) if part is not None]
            chunk = None if parent is None else parent / f"{start:09d}-{start + len(batch[0]):09d}"
            with advising(partial(attack_out_of_memory, batch_size)):
                results.append(_chunk_result(attack, model, batch, chunk, common))
            if progress is not None:
                progress(start + len(batch[0]), len(x))
    return Adversarial(*(torch.cat(parts) for parts in zip(*results, strict=True)))


def attack_out_of_memory(batch_size: int) -> OutOfMemory:
    """What helps where an attack runs out of memory, the cheapest measure first.

    >>> str(attack_out_of_memory(64)).partition("What helps: ")[2]
    'batch_size=32 (results stay the same); an attack on fewer members, by ensemble.subset.'
    """
    smaller = f"batch_size={batch_size // 2} (results stay the same); " if batch_size > 1 else ""
    return OutOfMemory(
        f"the attack ran out of memory with batches of {batch_size} examples. "
        f"What helps: {smaller}an attack on fewer members, by ensemble.subset."
    )


def _chunk_result(
    attack: Callable[..., Adversarial],
    model: Model,
    batch: list[Tensor],
    folder: Path | None,
    common: Mapping[str, Any],
) -> Adversarial:
    """The result of one chunk, read from its folder or computed."""
    identity = {} if folder is None else {**common, **dict(zip(("x", "y", "target"), map(digest, batch), strict=False))}
    stored = None if folder is None else _stored(folder, identity)
    if stored is not None:
        return Adversarial(*(stored[name].to(batch[0].device) for name in Adversarial._fields))
    x, y, *target = batch
    result = attack(model, x, y, target=target[0]) if target else attack(model, x, y)
    if folder is not None:
        storage.write_folder(folder, KIND, result._asdict(), {"identity": identity})
    return result


def _identity(attack: Callable[..., Adversarial], model: Model) -> dict[str, Any]:
    """What all chunks share: the attack, and the model in evaluation mode, in which attacks use it."""
    with evaluation_mode(model):
        return {"format": FORMAT, "attack": fingerprint(attack), "model": fingerprint(model)}


def _stored(folder: Path, identity: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """The tensors of a finished chunk, or None if the folder holds no complete one."""
    try:
        tensors, manifest = storage.read_folder(folder, KIND)
    except storage.OtherFormat:
        raise
    except storage.StorageError:
        return None
    names = differing(manifest["identity"], identity)
    if names:
        got = f"others in {folder}: {', '.join(map(repr, names))} differ"
        checks.refuse("folder", "hold results of the same attack, model and examples", got, "Give another one.")
    return tensors
