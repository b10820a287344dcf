"""An attack over many examples, chunk by chunk: what is finished is kept, and a run that broke off goes on."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from dissensus import checks, storage
from dissensus.attacks.problem import Adversarial
from dissensus.attacks.target_model import Model, evaluation_mode
from dissensus.fingerprint import digest, fingerprint

KIND = "dissensus.attacks.chunk"
FORMAT = 2
"""Of what a chunk is known by."""


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
        model: What is attacked.
        x: Clean inputs, which may stay on the host: each batch goes to the model's device and comes back.
        y: Labels.
        target: Classes to be reached, handed on to the attack in batches.
        batch_size: Examples at once.
        folder: Where every finished batch is kept. A later call with the same attack, model, examples and batch size
            takes from there what is finished; results of anything else are refused. Attack and model are known by
            everything that decides what they do: code, settings, what functions close over or name, weights, buffers
            and mode (see `dissensus.fingerprint`); examples, labels and targets by their numbers. What changes from
            call to call, such as a list that a function appends to, must be left out of both.
        progress: Called after every batch with the examples so far, and in all.
    """
    checks.count("batch_size", batch_size)
    if len(x) == 0 or len(y) != len(x) or (target is not None and len(target) != len(x)):
        checks.refuse("x", "hold examples, each with its label and target", f"{len(x)} of them and {len(y)} labels")
    home = None if folder is None else Path(folder)
    if home is not None:
        home.mkdir(parents=True, exist_ok=True)
    common = {} if home is None else _identity(attack, model)
    found: list[Adversarial] = []
    with nullcontext() if home is None else storage.locked(home, wait=True):
        for start in range(0, len(x), batch_size):
            batch = [part[start : start + batch_size] for part in (x, y, target) if part is not None]
            own = None if home is None else home / f"{start:09d}-{start + len(batch[0]):09d}"
            found.append(_finished(attack, model, batch, own, common))
            if progress is not None:
                progress(start + len(batch[0]), len(x))
    return Adversarial(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _finished(
    attack: Callable[..., Adversarial],
    model: Model,
    batch: list[Tensor],
    folder: Path | None,
    common: Mapping[str, Any],
) -> Adversarial:
    """One chunk, from its folder or computed."""
    identity = {} if folder is None else {**common, **dict(zip(("x", "y", "target"), map(digest, batch), strict=False))}
    stored = None if folder is None else _stored(folder, identity)
    if stored is not None:
        return Adversarial(*(stored[name].to(batch[0].device) for name in Adversarial._fields))
    x, y, *target = batch
    fresh = attack(model, x, y, target=target[0]) if target else attack(model, x, y)
    if folder is not None:
        storage.write_folder(folder, KIND, fresh._asdict(), {"identity": identity})
    return fresh


def _identity(attack: Callable[..., Adversarial], model: Model) -> dict[str, Any]:
    """What decides every chunk: the attack, and the model in the mode in which attacks see it."""
    with evaluation_mode(model):
        return {"format": FORMAT, "attack": fingerprint(attack), "model": fingerprint(model)}


def _stored(folder: Path, identity: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """What a folder holds, or None where there is nothing, or nothing whole."""
    try:
        tensors, manifest = storage.read_folder(folder, KIND)
    except storage.StorageError:
        return None
    stored = manifest["identity"] if isinstance(manifest["identity"], dict) else {}
    differing = [key for key in {**stored, **identity} if stored.get(key) != identity.get(key)]
    if differing:
        got = f"others in {folder}: {', '.join(map(repr, differing))} differ"
        checks.refuse("folder", "hold results of the same attack, model and examples", got, "Give another one.")
    return tensors
