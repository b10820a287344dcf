"""The small trainings that attempts are made on; all run in child processes."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dissensus as ds
from attempts import children


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 1))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 7, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(7, 11, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(11 * 16, 5),
    )


BUILDS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "normalised": normalised, "cnn": cnn}
MEMBERS = 3


def data(network: str, seed: int = 0, rows: int = 96) -> tuple[Tensor, Tensor]:
    """Inputs and targets for a network."""
    generator = torch.Generator().manual_seed(seed)
    if network == "cnn":
        x = torch.rand(rows, 1, 8, 8, generator=generator)
        return x, torch.randint(5, (rows,), generator=generator)
    x = torch.randn(rows, 6, generator=generator)
    return x, x[:, :1] * x[:, 1:2] + 0.3 * torch.randn(rows, 1, generator=generator)


def objective(network: str) -> Any:
    if network == "cnn":
        return partial(ds.objectives.augmented, beta=0.3, loss="cross_entropy", pool="probability")
    return partial(ds.objectives.augmented, beta=0.3, loss="squared_error", pool="score")


@dataclass(frozen=True)
class Training:
    """A small training."""

    network: str
    backend: str
    device: str = "cpu"
    epochs: int = 10
    checkpoint_seconds: float = 0.0
    rows: int = 96
    members: int = MEMBERS

    @property
    def batch_size(self) -> int:
        """A size that leaves an odd last batch, for which kernels depend on where weights lie in memory."""
        return 19 if self.network == "cnn" else 10

    def fit(self, folder: Path | None = None, stop_at: int | None = None) -> dict[str, Any]:
        """Train to the end and return the identity of the result; ``stop_at`` is a step to interrupt it at."""
        start(self.device)
        x, y = data(self.network, rows=self.rows)
        x, y = x.to(self.device), y.to(self.device)
        ensemble = ds.Ensemble(BUILDS[self.network], self.members, backend=self.backend).to(self.device)
        saving: dict[str, Any] = {}
        if folder is not None:
            saving = {"checkpoint": folder, "resume": True, "checkpoint_seconds": self.checkpoint_seconds}
        history = ds.fit(
            ensemble,
            (x, y),
            objective(self.network),
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=0.01,
            schedule="cosine",
            validation=0.2,
            precision="float32",
            deterministic=True,
            progress=Signals(stop_at),
            **saving,
        )
        return {**identity([ensemble], [history]), "backend": history.backend}

    def sweep(self, folder: Path | None = None, stop_at: int | None = None) -> dict[str, Any]:
        """Train a sweep of two parts to the end and return the identity of the result."""
        start(self.device)
        x, y = data(self.network, rows=self.rows)
        saving: dict[str, Any] = {}
        if folder is not None:
            saving = {"checkpoint": folder, "resume": True, "checkpoint_seconds": self.checkpoint_seconds}
        swept = ds.sweep(
            BUILDS[self.network],
            (x, y),
            partial(ds.objectives.augmented, loss="squared_error", pool="score"),
            grid={"beta": [0.0, 0.5, 0.9], "seed": [0, 1]},
            members=self.members,
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=0.01,
            validation=0.2,
            backend=self.backend,
            device=self.device,
            precision="float32",
            deterministic=True,
            max_memory=150_000 if self.device == "cpu" else None,
            progress=Signals(stop_at),
            **saving,
        )
        result = identity(
            [swept.run(i) for i in range(len(swept))], [swept.history(i) for i in range(len(swept))], swept.points
        )
        return {**result, "parts": len(swept.groups)}


def start(device: str) -> None:
    """Set up a child for training."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.zeros(1, device=device)


class Signals:
    """Progress that tells the parent of the first step, and interrupts training at another one."""

    def __init__(self, stop_at: int | None) -> None:
        self.stop_at, self.started = stop_at, False

    def __call__(self, moment: Any) -> None:
        if not self.started:
            self.started = True
            children.ready()
        if self.stop_at is not None and moment.step >= self.stop_at:
            raise KeyboardInterrupt


def identity(ensembles: list[ds.Ensemble], histories: list[Any], extra: Any = None) -> dict[str, Any]:
    """Checksums of all weights and of the record without its times."""
    weights = hashlib.sha256(repr(extra).encode())
    for ensemble in ensembles:
        for member in range(len(ensemble)):
            for name, tensor in ensemble.member(member).state_dict().items():
                weights.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    records = [
        [{key: value for key, value in epoch.items() if key != "seconds"} for epoch in h.epochs] for h in histories
    ]
    return {
        "weights": weights.hexdigest(),
        "record": hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest(),
        "columns": [list(record[0]) for record in records if record],
    }


def difference(result: dict[str, Any], expected: dict[str, Any]) -> str:
    """How a result differs from the expected one; empty where they are equal to the bit."""
    if result["weights"] != expected["weights"]:
        return "weights differ from those of the uninterrupted training"
    return (
        "the record differs from that of the uninterrupted training" if result["record"] != expected["record"] else ""
    )


def ensemble_of(network: str, seed: int, backend: str = "loop") -> ds.Ensemble:
    """A new ensemble."""
    torch.set_num_threads(1)
    return ds.Ensemble(BUILDS[network], MEMBERS, seed=seed, backend=backend)


def wide(width: int = 1600) -> nn.Module:
    """A network of some megabytes, for saves that take time."""
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
