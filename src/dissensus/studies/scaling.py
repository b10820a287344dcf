"""Standardisation inside a model: what is attacked, and what a user has, are images in [0, 1]."""

from jaxtyping import Float
from torch import Tensor, nn

from dissensus.studies.problems import Problem


class Standardised(nn.Module):
    """A model behind its standardisation, so that what is attacked are images in [0, 1]: model((x − mean) / std)."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, mean: Float[Tensor, "#C 1 1"], std: Float[Tensor, "#C 1 1"]) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x: Float[Tensor, "B C H W"]) -> Tensor:
        """The model's outputs."""
        return self.model((x - self.mean) / self.std)

    def scaled(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Images as the model sees them, where they lie."""
        return (x - self.mean.to(x.device)) / self.std.to(x.device)


def scales(problem: Problem) -> tuple[Float[Tensor, "C 1 1"], Float[Tensor, "C 1 1"]]:
    """Mean and standard deviation of the training images' channels."""
    mean, std = (of(problem.train[0], (0, 2, 3)).view(-1, 1, 1) for of in (Tensor.mean, Tensor.std))
    return mean, std
