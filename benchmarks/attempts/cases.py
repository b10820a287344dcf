"""What an attempt is, and the record of attempts."""

import json
import os
import platform
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from provenance import command_line, library

SHOWN = 5
"""Failures of a case that are described."""


@dataclass(frozen=True)
class Outcome:
    """What came of an attempt: empty ``failure`` where everything held that must hold."""

    failure: str = ""
    attempts: int = 1
    failed: int = -1
    """Number of attempts that failed, where an outcome is that of several."""
    counts: dict[str, int] = field(default_factory=dict)
    """Further numbers, such as kills; they are summed up."""

    @property
    def held(self) -> int:
        """Number of attempts that held."""
        return self.attempts - (self.failed if self.failed >= 0 else int(bool(self.failure)))


@dataclass(frozen=True)
class Case:
    """One kind of attempt.

    Args:
        name: Names the case within its command.
        must: What must hold, as a sentence.
        attempt: Makes one attempt with random numbers of its own, in an empty folder of its own.
        limit: Number of different attempts, for cases that are a list.
    """

    name: str
    must: str
    attempt: Callable[[random.Random, Path], Outcome]
    limit: int | None = None


@dataclass
class Row:
    """Attempts of a case so far."""

    case: str
    must: str
    attempts: int = 0
    held: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome, seconds: float) -> None:
        """Count an outcome."""
        self.attempts += outcome.attempts
        self.held += outcome.held
        self.seconds = round(self.seconds + seconds, 2)
        for name, number in outcome.counts.items():
            self.counts[name] = self.counts.get(name, 0) + number
        if outcome.failure and len(self.failures) < SHOWN:
            self.failures.append(outcome.failure)


@dataclass(frozen=True)
class Settings:
    """Options of a run."""

    command: str
    count: int
    seconds: float
    seed: int
    device: str
    file: Path
    only: tuple[str, ...] = ()
    """Words, one of which the name of a case must contain; empty for all cases."""

    @property
    def key(self) -> str:
        """The name of the run in the file of results."""
        return self.command if self.device == "cpu" or self.command.startswith("gpu") else f"{self.command} cuda"


def machine(device: str) -> str:
    """The hardware in words."""
    if device == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {os.cpu_count()} cores"


def provenance(settings: Settings, hardware: str) -> dict[str, Any]:
    """How a result was made."""
    return {
        "command": command_line(),
        "hardware": hardware,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **library(),
        "seed": settings.seed,
    }


def run(cases: Iterable[Case], settings: Settings, hardware: str) -> list[Row]:
    """Make the attempts of all cases in turn, and write the rows after every round."""
    cases = [case for case in cases if not settings.only or any(word in case.name for word in settings.only)]
    rows = [Row(case.name, case.must) for case in cases]
    made, start = provenance(settings, hardware), time.perf_counter()
    for number in range(settings.count):
        for case, row in zip(cases, rows, strict=True):
            if case.limit is not None and number >= case.limit:
                continue
            if number and time.perf_counter() - start > settings.seconds:
                break
            row.add(*_attempt(case, f"{settings.seed}/{settings.command}/{case.name}/{number}"))
            write(settings, made, rows)
        print(
            f"{settings.key}: round {number + 1} of {settings.count}, {time.perf_counter() - start:.0f} s", flush=True
        )
        if time.perf_counter() - start > settings.seconds:
            break
    return rows


def _attempt(case: Case, seed: str) -> tuple[Outcome, float]:
    start = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        outcome = case.attempt(random.Random(seed), folder)
    except Exception as reason:  # a mistake of the attempt itself is no success
        outcome = Outcome(f"the attempt itself failed: {type(reason).__name__}: {reason}"[:300])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outcome = replace(outcome, failure=re.sub(r"/\S*?chaos-[\w-]+", "FOLDER", outcome.failure))
    if outcome.failure:
        print(f"  {case.name}: {outcome.failure}", file=sys.stderr, flush=True)
    return outcome, time.perf_counter() - start


def write(settings: Settings, made: dict[str, Any], rows: list[Row]) -> None:
    """Write the rows of a run beside those of other runs."""
    runs = read(settings.file)
    runs[settings.key] = {"made": made, "rows": [asdict(row) for row in rows if row.attempts]}
    write_runs(settings.file, runs)


def write_runs(file: Path, runs: dict[str, Any]) -> None:
    """Write all runs of a file of results."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".part")
    temporary.write_text(json.dumps({"runs": runs}, indent=1, ensure_ascii=False) + "\n")
    temporary.replace(file)


def read(file: Path) -> dict[str, Any]:
    """Runs of a file of results, by their names."""
    return json.loads(file.read_text())["runs"] if file.exists() else {}
