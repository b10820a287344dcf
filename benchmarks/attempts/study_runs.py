"""Commands of dissensus inside a child process, and a study that takes seconds."""

import json
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attempts import children
from attempts.trainings import Training

TINY = """\
title = "Tiny"
reference = "Figure 0"
claim = "A study of seconds."
data = ["diabetes"]
procedure = "train"

[members]
network = "mlp"
count = 2
options = {width = 8}

[objective]
name = "augmented"
loss = "squared_error"
pool = "score"

[grid]
beta = [0.0, 1.0]
seed = [0, 1]

[optimisation]
epochs = 3
batch_size = 64
lr = 0.01

[evaluation]
measures = ["error", "diversity"]

[figure]
x = "beta"
lines = ["error"]

[scales.smoke]
grid = {beta = [0.0, 1.0], seed = [SEEDS]}
"""


def write_tiny(folder: Path, seeds: int = 2, text: str = TINY) -> Path:
    """Write the file of a small study."""
    file = folder / "specs" / "collusion" / "tiny.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text.replace("SEEDS", ", ".join(map(str, range(seeds)))))
    return file


def environment(folder: Path) -> dict[str, str]:
    """Variables under which studies are written below a folder."""
    return {**os.environ, "DISSENSUS_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@dataclass(frozen=True)
class Called:
    """How a command ended."""

    code: int
    output: str
    raw: str
    """The error that the command let through as a traceback; empty where it did not."""


def invoke(words: list[str], folder: Path) -> Called:
    """Run a command in this process, which is a child of its own."""
    from typer.testing import CliRunner

    from dissensus.cli import app

    torch.set_num_threads(1)
    os.chdir(folder)
    result = CliRunner().invoke(app, words, env=environment(folder))
    reason = result.exception
    raw = "" if reason is None or isinstance(reason, SystemExit) else str(children.described(reason))
    return Called(result.exit_code, result.output, raw)


def reports(folder: Path) -> list[Path]:
    """Reports of finished runs below a folder."""
    return sorted((folder / "runs").rglob("report.json"))


def rows(folder: Path, study: str = "tiny") -> str:
    """The rows of a study's only report, as text without times."""
    (report,) = [path for path in reports(folder) if path.parent.parent.name == study]
    return json.dumps(_without_times(json.loads(report.read_text())["rows"]), sort_keys=True)


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if "seconds" not in key}
    return [_without_times(item) for item in value] if isinstance(value, list) else value


def same_rows(text: str, other: str) -> bool:
    """Whether rows are equal to rounding: the backend of a study is measured, and another one rounds differently."""
    return _close(json.loads(text), json.loads(other))


def _close(value: Any, other: Any) -> bool:
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_close(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_close, value, other))
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-4, abs_tol=1e-6) or value == other
    return value == other


def preload() -> None:
    """Import here what trainings and commands import in children."""
    children.preload(Training("mlp", "vmap").fit)
    children.preload(_small_run)


def _small_run() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = str(write_tiny(folder))
        invoke(["study", "run", file, "--scale", "smoke"], folder)
        invoke(["study", "report", file, "--out", "page.html"], folder)
        invoke(["study", "list"], folder)
