"""`convert`: folders of earlier releases, written anew in the present format."""

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import dissensus.ensemble as ensembles
import dissensus.train.checkpoint as checkpoints
import dissensus.train.sweep_result as sweeps
from dissensus import checks, storage
from dissensus.ensemble import Ensemble
from dissensus.execution import StackedMembers
from dissensus.randomness import seeded
from dissensus.storage import StorageError

_ANY = storage.Formats(checkpoints.FORMATS.newest, oldest=1)
"""Checkpoints whose weights can be read, though training cannot go on from all of them."""


class Converted(NamedTuple):
    """What `convert` has written."""

    kind: str
    """``"ensemble"`` or ``"sweep"``."""
    path: Path
    source: Path
    """The folder that was read: of several checkpoints, the newest whole one."""


def convert(
    old: str | Path,
    new: str | Path,
    build: Callable[[], nn.Module] | None = None,
    output: str | int | None = None,
) -> Converted:
    """Write a saved ensemble or sweep, or the weights of a checkpoint, in the present format.

    Args:
        old: Folder of a saved ensemble or sweep, or of checkpoints that `dissensus.fit` wrote.
        new: Folder to write. It must be another one.
        build: Function that returns a member. Checkpoints need it: they have all parameters of a member in one row.
        output: Which part of what a member returns is its output, for checkpoints; see `dissensus.Ensemble`.

    From checkpoints, the weights and buffers of the newest whole one are saved as an ensemble. They are those of that
    moment of training, which need not be the best so far. The state of the optimizer is not converted.

    Raises:
        StorageError: The folder cannot be converted; the message says why.
    """
    old, new = checks.path("old", old), checks.path("new", new)
    if old.resolve() == new.resolve():
        checks.refuse("new", "be another folder than the one that is read", new)
    kind = storage.stored_kind(old)
    if kind == ensembles.KIND:
        return _rewritten("ensemble", old, new, kind, ensembles.FORMATS)
    if kind == sweeps.KIND:
        return _rewritten("sweep", old, new, kind, sweeps.FORMATS)
    if (old / "plan.json").exists() or checkpoints.checkpoints_in(old / "part-0000"):
        _refuse_sweep(old)
    paths = [old] if kind == checkpoints.KIND else checkpoints.checkpoints_in(old)
    if not paths:
        raise StorageError(f"{old} holds no saved ensemble, sweep or checkpoint; there is nothing to convert.")
    source, tensors, fingerprint = _newest(paths)
    if "runs" in fingerprint:
        _refuse_sweep(old)
    if build is None:
        fix = "On the command line: --build MODULE:FUNCTION."
        checks.refuse("build", "return a member of the ensemble whose checkpoint is converted", "none", fix)
    ensemble = _ensemble(source, tensors, fingerprint, build)
    ensemble.body.output = output
    ensemble.save(new)
    return Converted("ensemble", new, source)


def _rewritten(name: str, old: Path, new: Path, kind: str, formats: storage.Formats) -> Converted:
    tensors, manifest = storage.read_folder(old, kind, formats)
    details = {key: value for key, value in manifest.items() if key not in storage.OF_FOLDERS}
    storage.write_folder(new, kind, tensors, details, formats)
    return Converted(name, new, old)


def _refuse_sweep(old: Path) -> None:
    raise StorageError(f"{old} holds checkpoints of a sweep, which cannot be converted. Train again in another folder.")


def _newest(paths: list[Path]) -> tuple[Path, dict[str, Tensor], Mapping[str, Any]]:
    """The newest whole checkpoint, its tensors, and its fingerprint."""
    reasons: list[str] = []
    for path in reversed(paths):
        try:
            tensors, manifest = storage.read_folder(path, checkpoints.KIND, _ANY)
        except storage.OtherFormat:
            raise
        except StorageError as reason:
            reasons.append(str(reason))
            continue
        return path, tensors, manifest["fingerprint"]
    raise StorageError(f"{paths[-1].parent} holds no checkpoint that is whole: {' '.join(reasons)}")


def _ensemble(
    source: Path, tensors: Mapping[str, Tensor], fingerprint: Mapping[str, Any], build: Callable[[], nn.Module]
) -> Ensemble:
    """The ensemble of a checkpoint of a fit."""
    flat = tensors["flat"]
    with seeded(0):
        body = StackedMembers.of([build()]).subset([0] * len(flat))
    body.channels_last = "channels last" in str(fingerprint.get("numerics", fingerprint.get("precision")))
    frozen = [name for name, tensor in body.state().items() if isinstance(tensor, nn.Parameter)]
    if any(name.startswith("shared/") for name in tensors) or any(f"buffers/{name}" not in tensors for name in frozen):
        raise StorageError(
            f"{source} does not hold all parameters of each member: members that share some cannot be converted. Go on "
            "with fit(..., resume=True), and save the ensemble."
        )
    width = body.packed().shape[1]
    if flat.ndim != 2 or flat.shape[1] != width:
        raise StorageError(
            f"{source} does not fit the network: {flat.shape[-1]} trainable parameters a member there, and {width} in "
            "the network. Is `build` the one that was trained, with the same parameters frozen?"
        )
    buffers = {name.removeprefix("buffers/"): t for name, t in tensors.items() if name.startswith("buffers/")}
    body.adopt(buffers)
    storage.check_match(source, buffers, {name: t.shape for name, t in body.state().items()})
    body.attach(flat, buffers)
    body.channels_last = False
    members = _plain(fingerprint.get("members"), list(range(len(flat))))
    seed = _plain(fingerprint.get("seed of the ensemble", fingerprint.get("initial")), 0)
    with torch.no_grad():
        return Ensemble.around(body, seed, members, "auto")


def _plain(value: object, otherwise: Any) -> Any:
    """A value of a fingerprint, which newer releases write as text; ``otherwise`` where it is no such value."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return otherwise
    same_length = not isinstance(otherwise, list) or (isinstance(value, list) and len(value) == len(otherwise))
    return value if type(value) is type(otherwise) and same_length else otherwise
