"""How members are trained: the one translation from a study's optimisation to the arguments of `fit` and `sweep`.

A procedure that departs from the study, such as a search with epochs of its own, replaces arguments after the
translation, so that no setting is lost by leaving it out.
"""

from collections.abc import Mapping
from typing import Any

from dissensus.data import augment
from dissensus.data.batches import Augment
from dissensus.studies.spec import Optimisation
from dissensus.train import schedules

AUGMENTATIONS: dict[str, Augment] = {
    "flips": augment.flips,
    "crops": augment.crops,
    "rotations": augment.rotations,
    "shifts": augment.shifts,
}
VARIED = ("batch_size", "lr", "weight_decay", "momentum", "clip_norm")
"""Arguments that a point of a grid may set."""


def training_arguments(told: Optimisation, point: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of `fit` and `sweep`, with those that a point of the grid sets instead.

    ``examples`` is no argument: it decides what data is read (`problems`). Without a share of validation rows there is
    nothing to be patient about.

    >>> found = training_arguments(Optimisation(epochs=3, momentum=0.9), {"lr": 0.5, "beta": 1.0})
    >>> found["epochs"], found["momentum"], found["lr"], "beta" in found
    (3, 0.9, 0.5, False)
    """
    found: dict[str, Any] = {
        "epochs": told.epochs,
        "batch_size": told.batch_size,
        "lr": told.lr,
        "optimizer": told.optimizer,
        "momentum": told.momentum,
        "weight_decay": told.weight_decay,
        "schedule": schedule(told),
        "validation": told.validation or None,
        "patience": told.patience if told.validation else None,
        "keep": told.keep,
        "augment": augment_of(told.augment),
    }
    return found | {name: value for name, value in (point or {}).items() if name in VARIED}


def schedule(told: Optimisation) -> schedules.Schedule:
    """Rates over the epochs: cut after each of some shares of the training."""
    at = [share * told.epochs for share in told.cut_at]
    return schedules.step(at, told.cut) if at else schedules.constant()


def augment_of(names: list[str]) -> Augment | None:
    """The augmentations of a study, in their order."""
    return augment.chain(*(AUGMENTATIONS[name] for name in names)) if names else None
