"""Writes ``tests/golden/release-0.1``: what version 0.1.0 stored, with the outputs that it computed.

It runs with the last commit of version 0.1.0 (571dc33), not with the present code::

    git worktree add --detach /tmp/release-0.1 571dc33
    PYTHONPATH=/tmp/release-0.1/src python tests/write_release_0_1.py tests/golden/release-0.1
"""

import functools
import sys
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import dissensus as ds

SEEDS = [0, 3]
WIDTHS = [4, 6]


def build(width: int = 4) -> nn.Module:
    """A network with batch norm and dropout."""
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 2))


def other() -> nn.Module:
    """A network of another architecture with the same inputs and outputs."""
    return nn.Sequential(nn.Linear(3, 2))


def data() -> tuple[Tensor, Tensor]:
    """Inputs ``[24, 3]`` and labels ``[24]``."""
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(5))
    return x, (x[:, 0] > 0).long()


def interrupt(after: int, progress: "ds.train.Progress") -> None:
    """End a training as Ctrl-C would."""
    if progress.step >= after:
        raise KeyboardInterrupt


def main(folder: Path) -> None:
    """Write everything."""
    assert ds.__version__ == "0.1.0", ds.__version__
    x, y = data()
    objective = functools.partial(ds.objectives.independent, loss="cross_entropy")
    expected = {"x": x}

    ensemble = ds.Ensemble(build, members=3, seed=7)
    ds.fit(ensemble, (x, y), objective, epochs=2, batch_size=8, lr=0.05)
    ensemble = ensemble.subset([0, 2])
    ensemble.save(folder / "ensemble")
    expected["ensemble"] = ensemble.predict(x)

    mixed = ds.Ensemble.from_modules([ensemble.member(1), other()])
    mixed.save(folder / "mixed")
    expected["mixed"] = mixed.predict(x)

    sweep = ds.sweep(
        build, (x, y), objective, grid={"width": WIDTHS, "seed": SEEDS}, members=2, epochs=2, lr=0.05, validation=0.25
    )
    sweep.save(folder / "sweep")
    expected |= {f"sweep/{run}": sweep.run(run).predict(x) for run in range(len(sweep))}

    torch.manual_seed(0)
    trained = ds.Ensemble(build, members=2, seed=1)
    with suppress(KeyboardInterrupt):
        ds.fit(
            trained, (x, y), objective, epochs=5, batch_size=8, lr=0.05, validation=0.25, patience=5,
            checkpoint=folder / "checkpoint", checkpoint_seconds=0.0, progress=functools.partial(interrupt, 5),
        )  # fmt: skip
    with suppress(KeyboardInterrupt):
        ds.sweep(
            build, (x, y), objective, grid={"seed": SEEDS}, members=2, epochs=5, lr=0.05,
            checkpoint=folder / "sweep-checkpoint", checkpoint_seconds=0.0, progress=functools.partial(interrupt, 2),
        )  # fmt: skip
    expected["checkpoint"] = trained.predict(x)
    for lock in folder.rglob(".lock"):
        lock.unlink()
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, folder / "expected.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
