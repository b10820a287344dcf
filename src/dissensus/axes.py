"""Names of axes, and types that the whole package shares.

Axes always come in this order, and every shape in this package is written with these letters:

| letter | meaning |
|---|---|
| `R` | runs of a sweep |
| `M` | members of an ensemble |
| `B` | examples of a batch |
| `C` | outputs per example: classes, or regression targets |
| `S` | positions of dense outputs, `[M, B, C, *S]`: height and width of an image, or the length of a text |

``logits``, ``log_probs`` and ``probs`` are three different words and are never converted by guessing.
``member_*`` keeps the axis M, ``ensemble_*`` has pooled it.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from jaxtyping import Float
from torch import Tensor

Pool: TypeAlias = Literal["probability", "score", "vote"]
"""How members become one prediction: mean of probabilities, mean of raw outputs, or majority vote."""

PerExampleLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``(outputs [B, C], targets [B, ...]) -> [B]``."""


class LossParts(NamedTuple):
    """The result of an objective: the number to minimise, and numbers to report.

    ``total`` sums over members and averages over the batch. ``parts`` maps names to scalars, or to one number per
    member (``[M]``). Parts do not affect training.
    """

    total: Float[Tensor, ""]
    parts: Mapping[str, Tensor]


class Decomposition(NamedTuple):
    """Ensemble loss = individual loss − diversity, per example; per position ``[B, *S]`` for dense outputs."""

    ensemble: Float[Tensor, "B *S"]
    individual: Float[Tensor, "B *S"]
    diversity: Float[Tensor, "B *S"]


Objective: TypeAlias = Callable[[Tensor, Tensor], LossParts]
"""``(outputs [M, B, C], targets) -> LossParts``; hyperparameters are bound beforehand (``functools.partial``)."""
