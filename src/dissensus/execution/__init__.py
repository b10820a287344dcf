"""How stacked members run: one network's code, M sets of weights, several ways to get ``[M, B, ...]``.

Every way has the same signature, ``(skeleton, params, buffers, x, per_member) -> outputs``, writes batch-norm
statistics and dropout counters back into the stacked ``buffers``, and gives what M separate modules would give.
"""

from dissensus.execution.backends import BACKENDS, Backend
from dissensus.execution.body import Body, are_passes_replayed, passes_replayed
from dissensus.execution.choice import Choice, Choices
from dissensus.execution.compiled import original
from dissensus.execution.kept import settings_kept
from dissensus.execution.mixed import MixedMembers
from dissensus.execution.skeleton import Unsupported
from dissensus.execution.stacked import DifferentMembers, StackedMembers

__all__ = [
    "BACKENDS",
    "Backend",
    "Body",
    "Choice",
    "Choices",
    "DifferentMembers",
    "MixedMembers",
    "StackedMembers",
    "Unsupported",
    "are_passes_replayed",
    "original",
    "passes_replayed",
    "settings_kept",
]
