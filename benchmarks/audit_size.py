"""How often the audit's rotation test accuses independent members: its size, by simulation.

Members' errors are drawn independently, in as many dimensions as they effectively have, and the test asks whether they
cancel more than chance. The share of draws with a p-value below α should be α or less. Kinds of errors:

- ``gaussian``: what the test is derived for; the share should be α.
- ``heavy``: Student's t with three degrees of freedom.
- ``sparse``: nine of ten errors are zero.
- ``unequal``: members' sizes are log-normal with σ = 1.
- ``common``: half of the variance is an error that members share.

Kinds that a file holds already are kept.

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
    """Gram matrices ``[draws, M, M]`` of error vectors."""
    settings = {"generator": generator, "device": generator.device, "dtype": torch.float64}
    if kind in ("heavy", "sparse"):
        shape = draws, members, dimensions
        errors = torch.randn(shape, **settings)
        if kind == "heavy":
            errors = errors / torch.randn((3, *shape), **settings).square().mean(0).sqrt()
        else:
            errors = errors * (torch.rand(shape, **settings) < 0.1)
        return errors @ errors.mT
    gram = gaussian(draws, members + (kind == "common"), dimensions, **settings)
    if kind == "unequal":
        size = torch.randn((draws, members, 1), **settings).exp()
        gram = size * gram * size.mT
    elif kind == "common":  # the last vector is shared
        separate, shared, square = gram[:, :-1, :-1], gram[:, :-1, -1:], gram[:, -1:, -1:]
        gram = (separate + shared + shared.mT + square) / 2
    return gram


def gaussian(draws: int, vectors: int, dimensions: int, **settings: Any) -> Tensor:
    """Gram matrices of Gaussian vectors: Wishart matrices, by Bartlett's decomposition where dimensions allow it."""
    if dimensions < vectors:
        errors = torch.randn((draws, vectors, dimensions), **settings)
        return errors @ errors.mT
    lower = torch.randn((draws, vectors, vectors), **settings).tril(-1)
    freedom = (dimensions - torch.arange(vectors)).to(lower)
    gamma = torch._standard_gamma  # pyright: ignore[reportPrivateImportUsage] (the only one with a generator)
    chi_squares = 2 * gamma((freedom / 2).expand(draws, -1), generator=settings["generator"])
    lower = lower + chi_squares.sqrt().diag_embed()
    return lower @ lower.mT


def _looks_small(gram: Tensor) -> Tensor:
    """Draws whose p-value may be below 0.05: the pool's direction lies well below the mean direction.

    The others are not computed, which saves four fifths of the time.
    """
    members = gram.shape[-1]
    trace, square = gram.diagonal(dim1=-2, dim2=-1).sum(-1), gram.square().sum((-2, -1))
    spread = (2 * (square - trace.square() / members) / (members * (members + 2))).clamp_min(0.0).sqrt()
    return gram.sum((-2, -1)) / members < trace / members - 0.6 * spread


def size(kind: str, members: int, dimensions: int, draws: int, generator: torch.Generator) -> dict[str, Any]:
    """Shares of draws with a p-value below each level."""
    at_once = max(1, min(draws, 2**12, 2**24 // (members * max(dimensions, 16 * members))))
    below = torch.zeros(len(LEVELS), device=generator.device)
    for start in range(0, draws, at_once):
        gram = drawn(kind, min(at_once, draws - start), members, dimensions, generator)
        p = rotation_test(gram[_looks_small(gram)])
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
    start = time.perf_counter()
    held = json.loads(options.json.read_text()) if options.json and options.json.exists() else {"rows": [], "made": {}}
    rows = [row for row in held["rows"] if row["kind"] not in options.kinds]
    for kind in options.kinds:
        for members in options.members:
            for dimensions in options.dimensions:
                rows.append(size(kind, members, dimensions, options.draws, generator))
                print(rows[-1], flush=True)
    made = {
        "command": command_line(),
        "seconds": time.perf_counter() - start + held["made"].get("seconds", 0.0),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        **library(),
    }
    if options.json:
        options.json.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
