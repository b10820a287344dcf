"""Stored ensembles as attacks take them, together with their test images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from dissensus import checks
from dissensus.ensemble import Ensemble
from dissensus.studies.datasets import StudyData, is_split_by_seed
from dissensus.studies.registry import EXTERNAL, NETWORKS, maker
from dissensus.studies.standardisation import Standardised, channel_scales


class StoredEnsemble(NamedTuple):
    """A model that takes images in [0, 1], and the test images with their labels."""

    model: nn.Module
    data: tuple[Tensor, Tensor]


def load(
    folder: str | Path,
    network: str | None,
    images: StudyData,
    options: dict[str, Any] | None = None,
    *,
    standardise: bool,
    trust: Sequence[str] = (),
) -> StoredEnsemble:
    """A stored ensemble that takes images in [0, 1], and the test images.

    Args:
        folder: What `Ensemble.save` wrote.
        network: A name of `NETWORKS`, or ``"timm:NAME"``, ``"torchvision:NAME"``. None for an ensemble that was saved
            with an architecture.
        images: Images in [0, 1], of `datasets.load_unscaled`.
        options: Of the network.
        standardise: Whether members were trained on images standardised by channel, as studies do: the model then
            standardises its inputs. Data without a fixed test set (``"digits"``) is not standardised by studies.
        trust: What a stored architecture may import and call; see `Ensemble.load`.
    """
    if network is None:
        if options:
            checks.refuse("options", "come with a network", ", ".join(options), "The stored architecture has its own.")
        ensemble = Ensemble.load(folder, trust=trust).eval()
    else:
        if not network.startswith(tuple(EXTERNAL)):
            checks.one_of("network", network, NETWORKS)
        ensemble = Ensemble.load(folder, maker(network, images, options or {})).eval()
    if not standardise or is_split_by_seed(images.name):
        return StoredEnsemble(ensemble, images.test)
    return StoredEnsemble(Standardised(ensemble, *channel_scales(images)).eval(), images.test)
