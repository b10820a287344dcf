"""The procedure "volume": trainings, and members' non-maximal predictions on a typical test example."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import diversity
from dissensus.diversity.volume import nonmaximal_units
from dissensus.studies.checked_folders import inside
from dissensus.studies.procedures import train
from dissensus.studies.procedures.base import StudyContext
from dissensus.studies.procedures.training import TARGETS, TrainingUnit, stored_outputs
from dissensus.studies.results import Row


def run(unit: TrainingUnit, context: StudyContext) -> list[Row]:
    """The rows of a training. Those of the first seed have the members' unit vectors on one test example, as curves.

    The example is the same for all of these rows, so that ensembles can be compared.
    """
    rows = train.run(unit, context)
    folder = inside(context.base, unit.name)
    shown = [i for i, row in enumerate(rows) if row.seed == unit.seeds[0]]
    outputs = [stored_outputs(folder, rows[i].run or 0) for i in shown]
    labels = torch.from_numpy(np.load(folder / TARGETS))[: outputs[0].shape[1]]
    example = typical(outputs, labels)
    for i, logits in zip(shown, outputs, strict=True):
        (units,) = nonmaximal_units(logits[:, [example]], labels[[example]]).tolist()
        curves = {f"member_{k + 1}": unit_vector for k, unit_vector in enumerate(units)}
        rows[i] = replace(rows[i], curves={**curves, "label": [float(labels[example])]})
    return rows


def typical(outputs: Sequence[Float[Tensor, "M N C"]], labels: Int[Tensor, " N"]) -> int:
    """The example whose log ED is nearest to its median over examples, summed over several ensembles."""
    volumes = torch.stack([diversity.nonmaximal_volume(logits, labels, log=True) for logits in outputs])
    return int((volumes - volumes.median(1, keepdim=True).values).abs().sum(0).argmin())


PROCEDURE = replace(train.PROCEDURE, run=run)
