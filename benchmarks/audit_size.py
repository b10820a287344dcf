"""How often the audit's rotation test accuses independent members: its size, by simulation.

Members' errors are drawn independently, in as many dimensions as they effectively have, and the test asks whether they
cancel more than chance. The share of draws with a p-value below α should be α or less. Kinds of errors:

- ``gaussian``: what the test is derived for; the share should be α.
- ``heavy``: Student's t with three degrees of freedom.
- ``sparse``: nine of ten errors are zero.
- ``unequal``: members' sizes are log-normal with σ = 1.
- ``common``: half of the variance is an error that members share.

Usage: python benchmarks/audit_size.py [--draws 100000] [--members 2 3 5 10 20 50] [--dimensions 1 2 5 30 300 1000]
       [--json benchmarks/results/audit_size.json]
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

from dissensus.auditing.distributions import rotation_test

LEVELS = (0.05, 0.001, 0.0002)


def drawn(kind: str, draws: int, members: int, dimensions: int, generator: torch.Generator) -> Tensor:
    """Error vectors ``[draws, M, dimensions]``."""
    shape, settings = (
        (draws, members, dimensions),
        {"generator": generator, "device": generator.device, "dtype": torch.float64},
    )
    errors = torch.randn(shape, **settings)
    if kind == "heavy":
        errors = errors / (torch.randn((3, *shape), **settings).square().mean(0)).sqrt()
    elif kind == "sparse":
        errors = errors * (torch.rand(shape, **settings) < 0.1)
    elif kind == "unequal":
        errors = errors * torch.randn((draws, members, 1), **settings).exp()
    elif kind == "common":
        errors = (errors + torch.randn((draws, 1, dimensions), **settings)) / 2**0.5
    return errors


def size(kind: str, members: int, dimensions: int, draws: int, generator: torch.Generator) -> dict[str, Any]:
    """Shares of draws with a p-value below each level."""
    at_once = max(1, min(draws, 2**24 // (members * max(dimensions, 16 * members))))
    below = torch.zeros(len(LEVELS), device=generator.device)
    for start in range(0, draws, at_once):
        errors = drawn(kind, min(at_once, draws - start), members, dimensions, generator)
        p = rotation_test(errors @ errors.mT)
        below += torch.stack([(p < level).sum() for level in LEVELS])
    shares = {str(level): count / draws for level, count in zip(LEVELS, below.tolist(), strict=True)}
    return {"kind": kind, "members": members, "dimensions": dimensions, "draws": draws, "below": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100_000)
    parser.add_argument("--members", type=int, nargs="*", default=[2, 3, 5, 10, 20, 50])
    parser.add_argument("--dimensions", type=int, nargs="*", default=[1, 2, 5, 30, 300, 1000])
    parser.add_argument("--kinds", nargs="*", default=["gaussian", "heavy", "sparse", "unequal", "common"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    rows, start = [], time.perf_counter()
    for kind in options.kinds:
        for members in options.members:
            for dimensions in options.dimensions:
                rows.append(size(kind, members, dimensions, options.draws, generator))
                print(rows[-1], flush=True)
    made = {
        "command": command_line(),
        "seconds": time.perf_counter() - start,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        **library(),
    }
    if options.json:
        options.json.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
