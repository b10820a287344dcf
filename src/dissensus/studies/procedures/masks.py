"""The procedure "masks": the overlap of masks over many draws. Nothing is trained, and no data is read."""

from collections.abc import Mapping

from dissensus import masks
from dissensus.studies.measures import OutputMeasure
from dissensus.studies.procedures import requirements
from dissensus.studies.procedures.base import Procedure, StudyContext
from dissensus.studies.procedures.formula import WholeGrid, whole_grid
from dissensus.studies.results import Row
from dissensus.studies.spec import Spec


def missing(spec: Spec, measures: Mapping[str, OutputMeasure]) -> list[str]:
    """Numbers that the options of members lack."""
    del measures
    options = spec.members.options if spec.members is not None else {}
    names = [name for name in ("width", "draws") if not _is_count(options.get(name))]
    lacks = [f"members.options.{name} must be a whole number of at least 1" for name in names]
    lacks = lacks or requirements.missing_axes(spec, ("seed", "scale"))
    return lacks or ([] if "scale" in spec.grid else ["'grid' needs the axis 'scale'"])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def run(unit: WholeGrid, context: StudyContext) -> list[Row]:
    """One row per scale and draw."""
    del unit
    spec = context.spec
    assert spec.members is not None
    width, draws = (int(spec.members.options[name]) for name in ("width", "draws"))
    rows: list[Row] = []
    for scale in map(float, spec.grid["scale"]):
        expected = masks.expected_iou(scale)
        for draw in range(draws):
            iou = masks.iou(masks.for_width(width, spec.members.count, scale, draw))
            measures = {"iou": iou, "expected_iou": expected, "iou_difference": iou - expected}
            rows.append(Row(spec.data[0], {"scale": scale}, draw, measures))
    return rows


PROCEDURE = Procedure(whole_grid, run, missing, trains=False)
