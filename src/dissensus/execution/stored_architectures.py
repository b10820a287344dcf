"""Architectures in manifests of saved folders: checked before they are written, and before anything is imported."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dissensus import checks
from dissensus.architecture import Architecture
from dissensus.execution.signature import Entry, difference
from dissensus.randomness import seeded
from dissensus.storage import StorageError
from dissensus.training_rows import TrainingRows


class Beside:
    """Holds what is saved with a network, but belongs neither to its weights nor to its fingerprint."""

    def __init__(self) -> None:
        self.training_rows = TrainingRows.unknown()
        self.architecture: Architecture | tuple[Architecture, ...] | None = None

    def fingerprint_parts(self) -> list[object]:
        """Nothing: it decides no output."""
        return []


def checked_architecture(
    architecture: Architecture,
    settings: Sequence[Entry],
    shapes: Mapping[str, Sequence[int]],
    prepare: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """An architecture as JSON; one that builds another network than the saved one is refused.

    Args:
        architecture: The architecture, which is built once.
        settings: Signature of the saved network.
        shapes: Shapes of its tensors by name.
        prepare: Called with the network that was built, before both are compared.
    """
    if not isinstance(architecture, Architecture):
        fix = 'As in Architecture("my_package.models:build", width=64).'
        checks.refuse("architecture", "be a dissensus.Architecture", type(architecture).__name__, fix, TypeError)
    with seeded(0):
        network = architecture()
    if not isinstance(network, nn.Module):
        checks.refuse("architecture", "build an nn.Module", type(network).__name__, error=TypeError)
    if prepare is not None:
        prepare(network)
    other = difference(settings, shapes, network)
    if other is not None:
        checks.refuse("architecture", "build the network that is saved", f"{architecture!r}, where {other}")
    return architecture.to_json()


def stored_architecture(
    path: str | Path, manifest: Mapping[str, Any]
) -> Architecture | tuple[Architecture, ...] | None:
    """The architecture that a manifest holds, one or one per member; None without one. Nothing is imported."""
    stored = manifest.get("architecture")
    try:
        if isinstance(stored, list):
            return tuple(map(Architecture.from_json, stored))
        return None if stored is None else Architecture.from_json(stored)
    except (ValueError, TypeError, RecursionError) as reason:
        raise StorageError(f"the architecture in {path} is damaged: {reason}") from reason


def trusted_builds(
    path: str | Path, architecture: Architecture | tuple[Architecture, ...] | None, trust: str | Iterable[str]
) -> Any:
    """A function that builds the saved network, or one per member; names that are not trusted are refused."""
    if architecture is None:
        fix = "Or save it again with save(path, architecture=...), which needs none."
        checks.refuse("build", f"be given, since {path} was saved without an architecture", "none", fix)
    if isinstance(architecture, Architecture):
        return architecture.trusted(trust)
    builds: list[Callable[[], nn.Module]] = [part.trusted(trust) for part in architecture]
    return builds
