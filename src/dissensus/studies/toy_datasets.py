"""Data of one and two inputs that a picture can show as a whole: the same in every run."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dissensus.randomness import Use, derived_seed

NAMES = ("made-curve", "made-plane")
CURVE_NOISE = 0.1
"""Standard deviation of the noise on the training targets of `curve`."""
SPREAD = 0.35
"""Standard deviation of each cluster of `plane`, in each input."""
OUTSIDE_SHARE = 0.1
"""Share of the training examples of `plane` that are out of distribution."""


def _generator(name: str, part: str) -> torch.Generator:
    return torch.Generator().manual_seed(derived_seed(0, Use.TOY_DATA, name, part))


def curve(part: Literal["train", "test"], examples: int = 60) -> tuple[Float[Tensor, "N 1"], Float[Tensor, "N 1"]]:
    """Inputs in [−1, 1] and targets sin(3x): noisy ones at random places, or exact ones at equal distances for tests.

    >>> x, y = curve("test", 3)
    >>> x.flatten().tolist(), y.flatten().round(decimals=3).tolist()
    ([-1.0, 0.0, 1.0], [-0.14100000262260437, 0.0, 0.14100000262260437])
    """
    if part == "test":
        x = torch.linspace(-1, 1, examples).unsqueeze(1)
        return x, (3 * x).sin()
    generator = _generator("curve", part)
    x = 2 * torch.rand(examples, 1, generator=generator) - 1
    return x, (3 * x).sin() + CURVE_NOISE * torch.randn(examples, 1, generator=generator)


def plane(
    part: Literal["train", "test", "unlabelled"], examples: int = 400
) -> tuple[Float[Tensor, "N 2"], Int[Tensor, " N"], Bool[Tensor, " N"]]:
    """Two classes in the plane, and examples outside of their distribution: inputs, labels and which are outside.

    In distribution, class 0 lies around (−1, −1) and class 1 around (1, 1), so that either input tells the classes
    apart. Out of distribution, examples lie around (−1, 1) and (1, −1), where the two inputs contradict each other,
    and labels are drawn by chance. `OUTSIDE_SHARE` of the training examples are outside, half of the test examples,
    and all of the unlabelled ones.
    """
    shares = {"train": OUTSIDE_SHARE, "test": 0.5, "unlabelled": 1.0}
    generator = _generator("plane", part)
    labels = torch.randint(2, (examples,), generator=generator)
    outside = torch.rand(examples, generator=generator) < shares[part]
    side = 2.0 * torch.randint(2, (examples,), generator=generator) - 1
    inside = 2.0 * labels - 1
    centres = torch.stack([torch.where(outside, side, inside), torch.where(outside, -side, inside)], 1)
    return centres + SPREAD * torch.randn(examples, 2, generator=generator), labels, outside
