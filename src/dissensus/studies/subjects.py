"""What an evaluation of robustness looks at: a stored ensemble, and images in [0, 1] by name."""

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from dissensus import checks
from dissensus.data import sources
from dissensus.data.batches import split_rows
from dissensus.ensemble import Ensemble
from dissensus.studies import problems
from dissensus.studies.problems import IMAGES, Problem
from dissensus.studies.registry import ELSEWHERE, NETWORKS, maker
from dissensus.studies.scaling import Standardised, scales


class Subject(NamedTuple):
    """A model that takes images in [0, 1], and the test images with their labels."""

    model: nn.Module
    data: tuple[Tensor, Tensor]


def images(data: str, *, trained_on: int | None = None, tested_on: int | None = None, seed: int = 0) -> Problem:
    """Images in [0, 1] as studies split them, not yet standardised.

    Args:
        data: A name of `problems.IMAGES`.
        trained_on: How many training images the ensemble saw, the first ones; None: all.
        tested_on: How many test images are taken, the first ones; None: all.
        seed: Of the split, where the data has no test set of its own (``"digits"``).
    """
    checks.one_of("data", data, IMAGES)
    if problems.has_own_splits(data):
        x, y = sources.load(data)
        x = (x / 16).float().view(-1, 1, 8, 8)
        kept, test = split_rows(len(x), 0.2, seed)
        pairs = [(x[rows], y[rows]) for rows in (kept[:trained_on], test[:tested_on])]
    else:
        pairs = []
        for part, most in (("train", trained_on), ("test", tested_on)):
            x, y, _ = problems.images(data, part)
            pairs.append((x[:most], y[:most]))
    return Problem(data, pairs[0], pairs[1], int(pairs[0][1].max()) + 1)


def subject(
    folder: str | Path, network: str, problem: Problem, options: dict[str, Any] | None = None, *, standardise: bool
) -> Subject:
    """A stored ensemble as it is attacked, and the test images.

    Args:
        folder: What `Ensemble.save` wrote.
        network: A name of `NETWORKS`, or ``"timm:NAME"``, ``"torchvision:NAME"``.
        problem: Images in [0, 1].
        options: Of the network.
        standardise: Put the standardisation by the training images' channels, which studies train with, inside. Data
            without a test set of its own (``"digits"``) is not standardised by studies, nor here.
    """
    if not network.startswith(tuple(ELSEWHERE)):
        checks.one_of("network", network, NETWORKS)
    ensemble = Ensemble.load(folder, maker(network, problem, options or {})).eval()
    if not standardise or problems.has_own_splits(problem.name):
        return Subject(ensemble, problem.test)
    return Subject(Standardised(ensemble, *scales(problem)).eval(), problem.test)
