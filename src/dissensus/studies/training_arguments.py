"""Arguments of `fit` and `sweep` from a study's optimisation.

A procedure that trains differently, such as a search with a different number of epochs, replaces arguments afterwards,
so that no setting is lost.
"""

from collections.abc import Mapping
from typing import Any

from dissensus.data import augment
from dissensus.data.batches import Augment
from dissensus.data.splits import Split
from dissensus.studies.spec import HeldOut, Optimisation
from dissensus.train import schedules

AUGMENTATIONS: dict[str, Augment] = {
    "flips": augment.flips,
    "crops": augment.crops,
    "rotations": augment.rotations,
    "shifts": augment.shifts,
}
VARIED = ("batch_size", "lr", "weight_decay", "momentum", "clip_norm")
"""Arguments that a grid may vary."""


def training_arguments(optimisation: Optimisation, point: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of `fit` and `sweep`; those that the point of a grid sets take precedence.

    ``examples`` is not among them: it decides what data is loaded (`datasets`). ``patience`` needs validation rows.

    >>> arguments = training_arguments(Optimisation(epochs=3, momentum=0.9), {"lr": 0.5, "beta": 1.0})
    >>> arguments["epochs"], arguments["momentum"], arguments["lr"], "beta" in arguments
    (3, 0.9, 0.5, False)
    """
    arguments: dict[str, Any] = {
        "epochs": optimisation.epochs,
        "batch_size": optimisation.batch_size,
        "lr": optimisation.lr,
        "optimizer": optimisation.optimizer,
        "momentum": optimisation.momentum,
        "weight_decay": optimisation.weight_decay,
        "schedule": schedule(optimisation),
        "validation": validation_of(optimisation),
        "patience": optimisation.patience if optimisation.validation else None,
        "keep": optimisation.keep,
        "augment": augment_of(optimisation.augment),
    }
    return arguments | {name: value for name, value in (point or {}).items() if name in VARIED}


def validation_of(optimisation: Optimisation) -> float | Split | None:
    """The share of rows that is held out, or the `Split` that holds them out; None without held-out rows.

    >>> validation_of(Optimisation(validation=HeldOut(0.2, "class", seed=3)))
    Split(fraction=0.2, seed=3)
    """
    held_out = optimisation.validation
    if isinstance(held_out, HeldOut):
        return Split(held_out.fraction, stratify=held_out.by == "class", seed=held_out.seed)
    return held_out or None


def schedule(optimisation: Optimisation) -> schedules.Schedule:
    """The learning rate over the epochs, multiplied by ``cut`` after each share of ``cut_at``."""
    at = [share * optimisation.epochs for share in optimisation.cut_at]
    return schedules.step(at, optimisation.cut) if at else schedules.constant()


def augment_of(names: list[str]) -> Augment | None:
    """The augmentations of a study, in their order."""
    return augment.chain(*(AUGMENTATIONS[name] for name in names)) if names else None
