"""Networks that the tests of members run through: one of each kind that stacking could get wrong."""

import torch
from torch import Tensor, nn

import dissensus as ds


class TiedAutoencoder(nn.Module):
    """Encoder and decoder share one weight; so do two uses of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6)
        self.decode = nn.Linear(6, 6)
        self.decode.weight = self.encode.weight
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.encode(x))
        h = torch.tanh(self.middle(torch.tanh(self.middle(h))))
        return self.head(self.decode(h) + x)


class PlainAverageNorm(nn.Module):
    """Batch norm with ``momentum=None``, which reads a counter on the host: vmap cannot take it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=None)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class FunctionalMLP(nn.Module):
    """No Sequential: the chain has to be found by tracing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.gelu(self.first(x)))


class NormFirst(nn.Module):
    """Batch norm sees the shared batch before any member's weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


NETWORKS = {
    "mlp": (lambda: ds.nets.mlp(6, 3, (8, 7)), (6,)),
    "functional": (FunctionalMLP, (6,)),
    "cnn_batch_norm": (lambda: ds.nets.cnn(2, 3, 8, (4, 5), batch_norm=True), (2, 8, 8)),
    "two_dropouts": (lambda: ds.nets.mlp(6, 3, (8, 7), dropout=0.4), (6,)),
    "channel_dropout": (
        lambda: nn.Sequential(nn.Conv2d(2, 6, 3), nn.Dropout2d(0.5), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3)),
        (2, 8, 8),
    ),
    "pooled": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 6, (3, 2), stride=(2, 1), padding=(2, 1)),
            nn.MaxPool2d(2),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 4, 2, bias=False),
            nn.AvgPool2d((1, 2)),
            nn.Tanh(),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(4, 3),
        ),
        (2, 8, 8),
    ),
    "tied": (TiedAutoencoder, (6,)),
    "plain_average_norm": (PlainAverageNorm, (6,)),
    "norm_first": (NormFirst, (6,)),
}
BATCHED = {"mlp", "functional", "two_dropouts", "channel_dropout", "pooled", "tied"}
"""Those whose every layer has a batched product, or works on any shape."""
