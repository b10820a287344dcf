"""An attack over many examples, chunk by chunk: what is finished is kept, and a run that broke off goes on."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from dissensus import checks, storage
from dissensus.attacks.case import Adversarial
from dissensus.attacks.victim import Model
from dissensus.execution.signature import signature

KIND = "dissensus.attacks.chunk"


def over(
    attack: Callable[..., Adversarial], model: Model, x: Float[Tensor, "B *S"], y: Integer[Tensor, " B"], *,
    target: Integer[Tensor, " B"] | None = None, batch_size: int = 256, folder: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Adversarial:  # fmt: skip
    """An attack on any number of examples, in batches; results are those of one large batch.

    Args:
        attack: ``(model, x, y) -> Adversarial``, such as ``functools.partial(attacks.pgd, epsilon=8 / 255)``.
        model: What is attacked.
        x: Clean inputs, which may stay on the host: each batch goes to the model's device and comes back.
        y: Labels.
        target: Classes to be reached, handed on to the attack in batches.
        batch_size: Examples at once.
        folder: Where every finished batch is kept. A later call with the same attack, model, examples and batch size
            takes from there what is finished; results of anything else are refused. An attack is known by its name and
            the settings of a ``functools.partial``, a module by weights and settings, any other callable by its name.
        progress: Called after every batch with the examples so far, and in all.
    """
    checks.count("batch_size", batch_size)
    if len(x) == 0 or len(y) != len(x) or (target is not None and len(target) != len(x)):
        checks.refuse("x", "hold examples, each with its label and target", f"{len(x)} of them and {len(y)} labels")
    home = None if folder is None else Path(folder)
    if home is not None:
        home.mkdir(parents=True, exist_ok=True)
    common = "" if home is None else _fingerprint(attack, model)
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
    attack: Callable[..., Adversarial], model: Model, batch: list[Tensor], folder: Path | None, common: str
) -> Adversarial:
    """One chunk, from its folder or computed."""
    identity = "" if folder is None else _fingerprint(common, *batch)
    stored = None if folder is None else _stored(folder, identity)
    if stored is not None:
        return Adversarial(*(stored[name].to(batch[0].device) for name in Adversarial._fields))
    x, y, *target = batch
    fresh = attack(model, x, y, target=target[0]) if target else attack(model, x, y)
    if folder is not None:
        storage.write_folder(folder, KIND, fresh._asdict(), {"identity": identity})
    return fresh


def _stored(folder: Path, identity: str) -> dict[str, Tensor] | None:
    """What a folder holds, or None where there is nothing, or nothing whole."""
    try:
        tensors, manifest = storage.read_folder(folder, KIND)
    except storage.StorageError:
        return None
    if manifest["identity"] != identity:
        checks.refuse(
            "folder", "hold results of the same attack, model and examples", f"others in {folder}", "Give another one."
        )
    return tensors


def _fingerprint(*parts: object) -> str:
    digest = hashlib.sha256()
    for piece in parts:
        _add(digest, piece)
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", part: object) -> None:
    """Add to a digest what tells a part from others, and nothing that changes from process to process."""
    if isinstance(part, Tensor):
        bare = part.detach().cpu().contiguous()
        digest.update(f"{bare.dtype}{tuple(bare.shape)}".encode())
        digest.update(bare.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(part, nn.Module):
        _add(digest, [repr(signature(part)), *part.state_dict().items()])  # what its layers are set to counts as well
    elif isinstance(part, functools.partial):
        _add(digest, [part.func, *part.args, *sorted(part.keywords.items())])
    elif isinstance(part, Sequence) and not isinstance(part, str):
        digest.update(f"{len(part)}:".encode())
        for each in part:
            _add(digest, each)
    elif part is None or isinstance(part, str | int | float):
        digest.update(f"{type(part).__name__}{part!r};".encode())
    else:
        name = getattr(part, "__qualname__", type(part).__qualname__)
        digest.update(f"{getattr(part, '__module__', '')}.{name};".encode())
        _add(digest, getattr(part, "__self__", None))
