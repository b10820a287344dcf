"""How often an audit's 95 % intervals hold the truth, by simulation.

A population of ensembles with known truths: the truth of every figure is its value on 400,000 examples. Audits of small
samples from it are asked how often their intervals hold that truth.

Usage: python benchmarks/audit_coverage.py [--audits 400] [--json benchmarks/results/audit_coverage.json]
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from provenance import command_line, library
from torch import Tensor

from dissensus.auditing.measuring import measure
from dissensus.auditing.streaming import OutputReader
from dissensus.auditing.tallying import tally_outputs

TRUTH = 400_000
SETTINGS = [
    (task, members, examples)
    for task in ("regression", "classification")
    for members in (3, 10)
    for examples in (50, 200, 1000)
]


def drawn(task: str, members: int, examples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Members' outputs and targets: errors that members share, errors of their own, offsets, unequal sizes."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    offset = torch.linspace(-0.3, 0.3, members, dtype=torch.float64).view(-1, 1, 1)
    size = torch.linspace(0.6, 1.2, members, dtype=torch.float64).view(-1, 1, 1)
    if task == "regression":
        y = normal(examples, 1)
        noise = 0.5 + (y.abs() > 1).double()  # not the same everywhere
        return y + 0.5 * noise * normal(examples, 1) + offset + size * 0.5 * noise * normal(members, examples, 1), y
    labels = torch.randint(4, (examples,), generator=generator)
    signal = 2.0 * torch.nn.functional.one_hot(labels, 4).double()
    first = torch.nn.functional.one_hot(torch.tensor(0), 4).double()
    return signal + normal(examples, 4) + offset * first + size * normal(members, examples, 4), labels


def figures(task: str, outputs: Tensor, targets: Tensor, seed: int) -> dict[str, Any]:
    """An audit's figures."""
    kind = "values" if task == "regression" else "logits"
    settings = {
        "kind": kind,
        "loss": "squared_error" if task == "regression" else "cross_entropy",
        "pool": "score" if task == "regression" else "probability",
    }
    return measure(tally_outputs(OutputReader(outputs, exact=True), targets, **settings), seed)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--audits", type=int, default=400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, start = [], time.perf_counter()
    for task, members, examples in SETTINGS:
        generator = torch.Generator().manual_seed(0)
        truth = {
            name: figure.value for name, figure in figures(task, *drawn(task, members, TRUTH, generator), 0).items()
        }
        held = dict.fromkeys(truth, 0)
        for audit in range(options.audits):
            estimated = figures(task, *drawn(task, members, examples, generator), audit)
            for name, figure in estimated.items():
                held[name] += figure.low <= truth[name] <= figure.high
        rows.append(
            {
                "task": task,
                "members": members,
                "examples": examples,
                "audits": options.audits,
                "held": {name: count / options.audits for name, count in held.items()},
            }
        )
        print(task, members, examples, {name: round(share, 3) for name, share in rows[-1]["held"].items()}, flush=True)
    made = {
        "command": command_line(),
        "seconds": time.perf_counter() - start,
        "torch": torch.__version__,
        "machine": platform.machine(),
        **library(),
    }
    if options.json:
        options.json.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
