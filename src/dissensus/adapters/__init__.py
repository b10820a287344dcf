"""Adapters: a few numbers per member on top of weights that all members share.

Each function takes a network and returns a copy with adapters. ``build`` of an `Ensemble` calls it, so that every
member draws adapters of its own, and ``shared`` names what members have in common:

| adapter | ``Ensemble(..., shared=...)`` | what is trained |
|---|---|---|
| `lora` | ``"frozen"`` | low-rank matrices per member, and what ``trained`` names |
| `batch_ensemble` | ``adapters.SHARED`` | all weights; scales and biases per member |
| `tabm` | ``adapters.SHARED`` | all weights; scales, biases and the last layer per member |

`merge` turns a member (``ens.member(i)``) into an ordinary network without adapters.
"""

from dissensus.adapters.lora import LoraConv2d, LoraLinear, lora
from dissensus.adapters.merging import merge
from dissensus.adapters.scaling import SHARED, ScaledConv2d, ScaledLinear, batch_ensemble, tabm

__all__ = [
    "SHARED",
    "LoraConv2d",
    "LoraLinear",
    "ScaledConv2d",
    "ScaledLinear",
    "batch_ensemble",
    "lora",
    "merge",
    "tabm",
]
