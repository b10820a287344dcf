"""Ten MLPs on scikit-learn's digits: `dissensus.fit` beside `VotingClassifier` of Ensemble-PyTorch (torchensemble).

1,797 images of 64 numbers, 1,200 of them to train on; networks 64-64-64-10, cross-entropy, AdamW at 1e-3 without weight
decay, batches of 64, 20 epochs without validation data. Theirs takes a `DataLoader` that shuffles, with one job and
with two jobs of one thread each. Ours takes the same loader, and tensors. PyTorch has two threads. Every way is timed
`rounds` times in turn, after one training that is not counted; the table has medians in seconds.

Needs `pip install torchensemble`.

Usage: python benchmarks/ensemble_pytorch.py [--rounds 5] [--epochs 20] [--json FILE]
"""

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from provenance import how_made
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds

MEMBERS, BATCH, RATE, THREADS = 10, 64, 1e-3, 2
Data = tuple[Tensor, Tensor]


class Network(torch.nn.Module):
    """A member; Ensemble-PyTorch makes one by calling its class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = ds.nets.mlp(64, 10, (64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def digits() -> tuple[Data, Data]:
    """Rows to train on, and rows to judge by."""
    x, y = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order].float() / 16, y[order]
    return (x[:1200], y[:1200]), (x[1200:], y[1200:])


def loader(train: Data) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*train), batch_size=BATCH, shuffle=True)


def ours(data: Any, new: Tensor, epochs: int, **options: int) -> Tensor:
    """Mean probabilities on new rows."""
    ens = ds.Ensemble(Network, MEMBERS)
    alone = partial(ds.objectives.independent, loss="cross_entropy")
    ds.fit(ens, data, alone, epochs=epochs, lr=RATE, **options)
    return ens.predict(new).softmax(-1).mean(0)


def theirs(train: Data, new: Tensor, epochs: int, jobs: int) -> Tensor:
    """Mean probabilities on new rows."""
    from torchensemble import VotingClassifier  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    ensemble = VotingClassifier(estimator=Network, n_estimators=MEMBERS, cuda=False, n_jobs=jobs)
    ensemble.set_optimizer("AdamW", lr=RATE, weight_decay=0.0)
    with contextlib.redirect_stdout(io.StringIO()):
        ensemble.fit(loader(train), epochs=epochs, log_interval=10**6, save_model=False)
        return ensemble.predict(new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    train, (new, labels) = digits()
    ways: dict[str, Callable[[int], Tensor]] = {
        "ours, tensors": lambda epochs: ours(train, new, epochs, batch_size=BATCH),
        "ours, the same loader": lambda epochs: ours(loader(train), new, epochs),
        "theirs, one job": lambda epochs: theirs(train, new, epochs, 1),
        "theirs, two jobs": lambda epochs: theirs(train, new, epochs, 2),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    accuracy: dict[str, float] = {}
    loads = []
    for counted in range(-1, options.rounds):
        for name, way in ways.items():
            loads.append(os.getloadavg()[0])
            start = time.perf_counter()
            probabilities = way(1 if counted < 0 else options.epochs)
            if counted >= 0:
                seconds[name].append(time.perf_counter() - start)
                accuracy[name] = float((probabilities.argmax(-1) == labels).float().mean())
    made = {
        **how_made(),
        "torchensemble": importlib.metadata.version("torchensemble"),
        "threads": THREADS,
        "epochs": options.epochs,
        "rounds": options.rounds,
    }
    rows = [
        {"way": name, "seconds": median(times), "all": times, "accuracy": accuracy[name]}
        for name, times in seconds.items()
    ]
    for row in rows:
        print(f"{row['way']:24s} {row['seconds']:6.2f} s   {row['accuracy']:.1%} right on new rows")
    if options.json:
        content = {"made": made, "members": MEMBERS, "load": max(loads), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
