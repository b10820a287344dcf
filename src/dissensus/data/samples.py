"""Small real data sets that scikit-learn ships: no download."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dissensus import checks
from dissensus.data.batches import split


class Sample(NamedTuple):
    """A data set, split and scaled on its training part."""

    name: str
    task: Literal["classification", "regression"]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    outputs: int


def load(name: str, *, seed: int, test_fraction: float = 0.3) -> Sample:
    """``"digits"`` (1,797 images of 8×8, ten classes) or ``"diabetes"`` (442 patients, one number), split by the seed.

    Features are standardised on the training part; so is the regression target.
    """
    checks.one_of("name", name, ("digits", "diabetes"))
    try:
        from sklearn import datasets
    except ImportError as reason:
        raise ImportError("this data ships with scikit-learn: pip install 'dissensus[data]'") from reason
    x, y = (datasets.load_digits if name == "digits" else datasets.load_diabetes)(return_X_y=True)
    regression = name == "diabetes"
    inputs = torch.from_numpy(x).float()
    targets = torch.from_numpy(y).float().unsqueeze(-1) if regression else torch.from_numpy(y).long()
    train, test = split(inputs, targets, test_fraction, seed)
    (train_x, test_x) = _standardised(train[0], test[0])
    (train_y, test_y) = _standardised(train[1], test[1]) if regression else (train[1], test[1])
    task = "regression" if regression else "classification"
    return Sample(name, task, (train_x, train_y), (test_x, test_y), 1 if regression else 10)


def _standardised(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = train.mean(0), train.std(0)
    std = torch.where(std > 0, std, 1.0)  # a pixel that is always blank stays at zero
    return (train - mean) / std, (test - mean) / std
