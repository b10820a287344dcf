"""Folders of runs: what state each is in, and which one answers for a study.

A folder's name is determined by the study, the scale and a fingerprint of the settings and of the library's version.
``state.json`` says whether the run was started or has failed, and for which settings and version; ``DONE`` marks a
finished one. This distinguishes runs that are unfinished, that have other settings, and that another version made.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import dissensus
from dissensus.storage import locked, write_atomically
from dissensus.studies import library
from dissensus.studies.results import Report, Summary
from dissensus.studies.spec import SCALES, Spec, resolved, toml_value
from dissensus.studies.summary import summarise

SHIPPED = Path(__file__).parent / "results"
DONE = "DONE"
_STATE = "state.json"


@dataclass(frozen=True)
class RunState:
    """What a run's folder says of itself."""

    stage: Literal["started", "failed", "done"]
    settings: str = ""
    """Fingerprint of the settings; empty for runs of earlier releases."""
    version: str = ""
    reason: str = ""
    """Why it failed."""


def runs_folder() -> Path:
    """The folder of all runs: ``DISSENSUS_RUNS``, or ``runs`` in the working directory."""
    return Path(os.environ.get("DISSENSUS_RUNS") or "runs") / "studies"


def folder_of(spec: Spec, scale: str, root: Path, foreign: str = "") -> Path:
    """The folder of a study at a scale; ``foreign`` is the fingerprint of its parts from outside."""
    return root / spec.name / f"{scale}-{spec.digest(foreign)}"


def write_state(folder: Path, state: RunState) -> None:
    """Record a run's state. A finished run is marked last, by ``DONE``."""
    write_atomically(folder / _STATE, (json.dumps(asdict(state), indent=1) + "\n").encode())
    if state.stage == "done":
        write_atomically(folder / DONE, b"")


def read_state(folder: Path) -> RunState:
    """A run's state; a folder of an earlier release has ``DONE`` alone, and says its version in its report."""
    done = (folder / DONE).exists()
    if (folder / _STATE).exists():
        state = RunState(**json.loads((folder / _STATE).read_text()))
        if done or state.stage != "done":  # a run that broke off before its mark is not done
            return replace(state, stage="done") if done else state
        return replace(state, stage="started")
    if not done:
        return RunState("started")
    return RunState("done", version=json.loads((folder / "report.json").read_text())["made"]["version"])


def read_report(folder: Path) -> Report:
    """The report of a finished run."""
    return Report.from_json(json.loads((folder / "report.json").read_text()))


def find(name: str, root: Path) -> Summary | None:
    """The result of a study at the largest scale that has one: of a finished run under ``root``, or as shipped.

    Among runs at one scale, those with the study's settings come first, then those of this version, then the latest.
    `Summary.origin` says where the result comes from, unless it is a run of the study as it is today.
    """
    for scale in reversed(SCALES):
        finished = [folder for folder in (root / name).glob(f"{scale}-*") if (folder / DONE).exists()]
        if finished:
            best = max(finished, key=lambda folder: (*_rank(name, scale, folder), (folder / DONE).stat().st_mtime))
            return replace(summarise(read_report(best)), origin=_origin(name, scale, best))
        file = SHIPPED / f"{name}.{scale}.json"
        if file.exists():
            shipped = Summary.from_json(json.loads(file.read_text()))
            return replace(shipped, origin=f"shipped with the package and made by version {shipped.provenance.version}")
    return None


def unfinished(name: str, root: Path) -> list[str]:
    """One sentence on every run of a study that has no result: it failed, is running, or was interrupted."""
    sentences: list[str] = []
    for scale in SCALES:
        for folder in sorted((root / name).glob(f"{scale}-*")):
            state = read_state(folder)
            if state.stage == "done":
                continue
            run = f"A run at scale {scale}"
            other = _difference(name, scale, state)
            run += f", {other}," if other else ""
            if state.stage == "failed":
                sentences.append(f"{run} failed: {state.reason}")
            elif holder := _holder(folder):
                sentences.append(f"{run} is going on, by {holder}.")
            elif other:
                sentences.append(f"{run} was interrupted. It is not continued: its folder is {folder}")
            else:
                command = f"dissensus study run {name} --scale {scale}"
                sentences.append(f"{run} was interrupted. Continue it with `{command}`.")
    return sentences


def _holder(folder: Path) -> str:
    """The process that runs a study in a folder; empty where none does."""
    try:
        with locked(folder, wait=False):
            return ""
    except BlockingIOError as reason:
        return str(reason)


def _current_settings(name: str, scale: str) -> str | None:
    """Fingerprint of the library's study at a scale; None where the library does not have it."""
    if name not in library.names():
        return None
    spec = library.load(name)
    return resolved(spec, scale, {}, f"{name}.toml").settings_fingerprint() if scale in spec.scales else None


def _rank(name: str, scale: str, folder: Path) -> tuple[bool, bool]:
    state = read_state(folder)
    return state.settings == _current_settings(name, scale), state.version == dissensus.__version__


def _difference(name: str, scale: str, state: RunState) -> str:
    """How a run differs from a run of today's study with this version; empty where it does not."""
    current = _current_settings(name, scale)
    parts: list[str] = []
    if state.settings and current is not None and state.settings != current:
        parts.append("with other settings")
    if state.version and state.version != dissensus.__version__:
        parts.append(f"of dissensus {state.version}")
    return " ".join(parts)


def _origin(name: str, scale: str, folder: Path) -> str:
    difference = _difference(name, scale, read_state(folder))
    if not difference:
        return ""
    changes: dict[str, Any] = json.loads((folder / "report.json").read_text())["made"].get("changes", {})
    words = ", ".join(f"{key}={toml_value(value)}" for key, value in changes.items())
    return f"a run {difference}{f' ({words})' if words else ''}"


def ship(folder: Path, into: Path = SHIPPED) -> Path:
    """Write the summary of a finished run to the folder of shipped results."""
    summary = summarise(read_report(folder))
    file = into / f"{summary.study}.{summary.scale}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, (json.dumps(summary.to_json(), separators=(",", ":")) + "\n").encode())
    return file
