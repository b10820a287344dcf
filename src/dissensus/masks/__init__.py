"""Masksembles: an ensemble from one network, by fixed masks over its channels."""

from dissensus.masks.generation import expected_iou, expected_width, for_width, generate, iou, ones_for, scale_of
from dissensus.masks.layer import Masksembles
from dissensus.masks.monte_carlo import MonteCarlo, monte_carlo
from dissensus.masks.network import Masked, Sizes, convert
from dissensus.masks.planning import Plan, plan

__all__ = [
    "Masked",
    "Masksembles",
    "MonteCarlo",
    "Plan",
    "Sizes",
    "convert",
    "expected_iou",
    "expected_width",
    "for_width",
    "generate",
    "iou",
    "monte_carlo",
    "ones_for",
    "plan",
    "scale_of",
]
