"""Standardisation of images as a layer, so that a model takes images in [0, 1]."""

from jaxtyping import Float
from torch import Tensor, nn

from dissensus.studies.datasets import StudyData

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Statistics of ImageNet's channels, which pretrained networks expect."""


class Standardised(nn.Module):
    """A model that standardises its inputs: model((x − mean) / std). Attacks then work on images in [0, 1]."""

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
        """Standardised images, on the device that they are on."""
        return (x - self.mean.to(x.device)) / self.std.to(x.device)


def channel_scales(images: StudyData) -> tuple[Float[Tensor, "C 1 1"], Float[Tensor, "C 1 1"]]:
    """Mean and standard deviation of the training images' channels."""
    mean, std = (statistic(images.train[0], (0, 2, 3)).view(-1, 1, 1) for statistic in (Tensor.mean, Tensor.std))
    return mean, std
