"""Does the flag "saturated loss" tell networks whose cross-entropy hides the truth from ordinary over-trained ones?

Usage: python benchmarks/flags.py [--json FILE] [--seeds 3]

Ordinary: perceptrons, convolutional networks and ensembles of three, on scikit-learn's digits, trained for 200 epochs
with Adam at 0.01, far beyond the last error on training data. Hidden: the same networks with logits times 10, 30, 100
and 1,000, which changes no prediction and so not the truth: what the adaptive suite leaves of the ordinary network. All
at ε = 0.1 in L∞, on 128 test examples.
"""

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
from provenance import command_line, library
from sklearn.datasets import load_digits
from torch import Tensor, nn

from dissensus import attacks
from dissensus.attacks.diagnostics import model_diagnostics

EPSILON, EXAMPLES, EPOCHS = 0.1, 128, 200
FACTORS = (10, 30, 100, 1000)
FLAG = "saturated loss"


def digits() -> tuple[Tensor, Tensor]:
    """Images in [0, 1] and labels, in a fixed random order."""
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = images.float().view(-1, 1, 8, 8) / 16, labels
    return x[order], y[order]


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def trained(build: Any, seed: int, data: tuple[Tensor, Tensor]) -> nn.Module:
    """A network, far beyond its last error on these data."""
    torch.manual_seed(seed)
    network = build()
    optimiser = torch.optim.Adam(network.parameters(), 0.01)
    x, y = data
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(100):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
            optimiser.step()
    return network.eval().requires_grad_(False)


class Times(nn.Module):
    """Networks whose logits are multiplied: ``x -> [M, B, C]``."""

    def __init__(self, networks: list[nn.Module], factor: float) -> None:
        super().__init__()
        self.networks, self.factor = nn.ModuleList(networks), factor

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.factor * network(x) for network in self.networks])


def row(case: str, networks: list[nn.Module], factor: float, data: tuple[Tensor, Tensor], truth: float | None) -> Any:
    """What attacks and the flag say of a case, beside the truth."""
    model = Times(networks, factor)
    suite = attacks.evaluate(model, data, "quick" if truth is not None else "standard", epsilon=EPSILON)
    worst = attacks.evaluate(model, data, "adaptive", epsilon=EPSILON).worst.value if truth is None else truth
    by_ce = attacks.apgd(model, *data, epsilon=EPSILON)
    quick = suite if truth is not None else attacks.evaluate(model, data, "quick", epsilon=EPSILON)
    return {
        "case": case,
        "factor": factor,
        "saturated": model_diagnostics(model, *data).saturated,
        "suite": suite.worst.value,
        "cross_entropy": float((~by_ce.success).double().mean()),
        "truth": worst,
        "raised": any(flag.name == FLAG for flag in suite.flags),
        "raised_quick": any(flag.name == FLAG for flag in quick.flags),
        "flags": [flag.name for flag in suite.flags],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    x, y = digits()
    train, test = (x[:600], y[:600]), (x[1000 : 1000 + EXAMPLES], y[1000 : 1000 + EXAMPLES])
    cases: dict[str, list[nn.Module]] = {}
    for build in (perceptron, convolutional):
        networks = [trained(build, seed, train) for seed in range(args.seeds)]
        cases |= {f"{build.__name__} {seed}": [network] for seed, network in enumerate(networks)}
        cases[f"{build.__name__}s, ensemble"] = networks
    rows: list[dict[str, Any]] = []
    for case, networks in cases.items():
        ordinary = row(case, networks, 1, test, None)
        more = [row(case, networks, factor, test, ordinary["truth"]) for factor in FACTORS]
        rows += [ordinary, *more]
        for result in (ordinary, *more):
            print(
                {key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()},
                flush=True,
            )
    made = {"command": command_line(), **library(), "hardware": f"{platform.machine()}, {os.cpu_count()} cores"}
    if args.json:
        args.json.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
