"""The procedure "masks": how much masks have in common, drawn many times. Nothing is trained, and no data is read."""

from typing import Any

from dissensus import masks
from dissensus.studies.spec import Spec


def rows(spec: Spec) -> list[dict[str, Any]]:
    """One row per scale and draw."""
    assert spec.members is not None
    width, draws = (int(spec.members.options[name]) for name in ("width", "draws"))
    found: list[dict[str, Any]] = []
    for scale in spec.grid["scale"]:
        expected = masks.expected_iou(scale)
        for draw in range(draws):
            iou = masks.iou(masks.for_width(width, spec.members.count, scale, draw))
            told = {"iou": iou, "expected_iou": expected, "iou_difference": iou - expected}
            found.append({"data": spec.data[0], "scale": scale, "seed": draw, "measures": told})
    return found
