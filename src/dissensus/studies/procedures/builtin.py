"""The table of built-in procedures."""

from dissensus.studies.procedures import (
    attack,
    audit,
    collusion,
    disagreement,
    formula,
    masks,
    sharing,
    shift,
    train,
    volume,
)
from dissensus.studies.procedures.base import Procedure

PROCEDURES: dict[str, Procedure] = {
    "train": train.PROCEDURE,
    "detect": shift.PROCEDURE,
    "generalise": shift.PROCEDURE,
    "timing": shift.PROCEDURE,
    "attack": attack.PROCEDURE,
    "transfer": attack.PROCEDURE,
    "features": attack.PROCEDURE,
    "formula": formula.PROCEDURE,
    "audit": audit.PROCEDURE,
    "masks": masks.PROCEDURE,
    "share": sharing.PROCEDURE,
    "collusion": collusion.PROCEDURE,
    "volume": volume.PROCEDURE,
    "disagreement": disagreement.PROCEDURE,
}
"""By the name that a study's file gives. A procedure from outside is passed to `run`."""
