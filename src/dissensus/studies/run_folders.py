"""Folders of runs: what state each is in, and which one answers for a study.

A folder's name is determined by the study, the scale and a fingerprint of the settings and of the library's version.
``state.json`` says whether the run was started or has failed, and for which settings and version; ``DONE`` marks a
finished one, whose ``manifest.json`` has the checksums of its files (`dissensus.studies.checked_folders`). This
distinguishes runs that are unfinished, damaged, that have other settings, and that another version made.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import dissensus
from dissensus.storage import StorageError, locked, read_regular, write_atomically
from dissensus.studies import library
from dissensus.studies.checked_folders import FORMATS, MANIFEST, check_run, check_units, inside, is_plain_name
from dissensus.studies.procedures.base import Procedure
from dissensus.studies.procedures.builtin import PROCEDURES
from dissensus.studies.results import Report, Summary
from dissensus.studies.spec import PAPERS, SCALES, Spec, SpecError, resolved, toml_value
from dissensus.studies.summary import judged, summarise

SHIPPED = Path(__file__).parent / "results"
DONE = "DONE"
_STATE = "state.json"


@dataclass(frozen=True)
class RunState:
    """What a run's folder says of itself."""

    stage: Literal["started", "failed", "done", "damaged"]
    settings: str = ""
    """Fingerprint of the settings; empty for runs of earlier releases."""
    version: str = ""
    reason: str = ""
    """Why it failed, or how it is damaged."""
    format: int = FORMATS.newest
    """Of the folder; 0 where it was made before folders had manifests."""


def runs_folder() -> Path:
    """The folder of all runs: ``DISSENSUS_RUNS``, or ``runs`` in the working directory."""
    return Path(os.environ.get("DISSENSUS_RUNS") or "runs") / "studies"


def folder_of(
    spec: Spec, scale: str, root: Path, foreign: str = "", procedures: Mapping[str, Procedure] = PROCEDURES
) -> Path:
    """The folder of a study at a scale; ``foreign`` is the fingerprint of its parts from outside."""
    check_name(spec.name)
    return inside(root / spec.name, f"{scale}-{spec.digest(foreign, procedure_versions(spec, procedures))}")


def procedure_versions(spec: Spec, procedures: Mapping[str, Procedure] = PROCEDURES) -> dict[str, int]:
    """Versions of the procedures that make a study's rows, by name: its own, and those whose work it is based on."""
    names = [spec.procedure]
    if spec.uses:
        names.append(library.load(spec.uses, procedures).procedure)
    names += [included for name in names for included in procedures[name].includes]
    return {name: procedures[name].version for name in dict.fromkeys(names)}


def check_name(name: str) -> None:
    """Refuse a study's name that is not PAPER/NAME: its folder would lie elsewhere."""
    parts = name.split("/")
    if len(parts) != 2 or parts[0] not in PAPERS or not all(map(is_plain_name, parts)):
        fix = f"PAPER is one of {', '.join(PAPERS)}, and NAME has letters, digits, '-' and '.'."
        raise SpecError(f"`study` must have a name PAPER/NAME; got {name!r}. {fix}")


def write_state(folder: Path, state: RunState) -> None:
    """Record a run's state. A finished run is marked last, by ``DONE``."""
    write_atomically(folder / _STATE, (json.dumps(asdict(state), indent=1) + "\n").encode())
    if state.stage == "done":
        write_atomically(folder / DONE, b"")


def read_state(folder: Path) -> RunState:
    """A run's state. The report of a finished run is checked; a folder of an earlier release has no checksums."""
    state = _stored_state(folder)
    if not (folder / DONE).exists():  # a run that broke off before its mark is not done
        return (
            state
            if state is not None and state.stage == "failed"
            else replace(state or RunState("started"), stage="started")
        )
    is_older = not (folder / MANIFEST).exists() and (state is None or state.format == 0)
    try:
        if is_older:
            return RunState(
                "done", "" if state is None else state.settings, _report(folder).provenance.version, format=0
            )
        manifest = check_run(folder)
        return RunState("done", str(manifest["settings"]), str(manifest["version"]))
    except (StorageError, KeyError) as reason:
        return RunState("damaged", reason=str(reason))


def _stored_state(folder: Path) -> RunState | None:
    """What ``state.json`` says; None where there is none, or none that can be read."""
    try:
        state = RunState(**{"format": 0, **json.loads(read_regular(folder / _STATE))})
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    words = (state.settings, state.version, state.reason)
    known = state.stage in ("started", "failed", "done") and all(isinstance(word, str) for word in words)
    return state if known else None


def damage(folder: Path) -> str:
    """What is wrong with the files of a finished run, in one sentence; empty where all are as they were written."""
    state = read_state(folder)
    if state.stage == "damaged":
        return state.reason
    if state.format == 0:
        return f"{folder} was made before runs had checksums, so that its files cannot be checked."
    try:
        check_units(folder, check_run(folder))
    except StorageError as reason:
        return str(reason)
    return ""


def read_report(folder: Path) -> Report:
    """The report of a finished run; `StorageError` says what is wrong with it."""
    state = read_state(folder)
    if state.stage == "damaged":
        raise StorageError(state.reason)
    return _report(folder)


def _report(folder: Path) -> Report:
    file = folder / "report.json"
    if not file.is_file():
        raise StorageError(f"{file} is missing.")
    try:
        return Report.from_json(json.loads(read_regular(file)))
    except _UNREADABLE as reason:
        raise StorageError(f"{file} cannot be read: {type(reason).__name__}: {reason}.") from reason


_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Errors of files whose content is not what this version writes."""


def _summary(folder: Path, spec: Spec | None = None) -> Summary:
    """The summary of a finished run; `StorageError` where this version cannot make one."""
    report = read_report(folder)
    try:
        return summarise(report, spec)
    except _UNREADABLE as reason:
        words = f"{folder / 'report.json'} cannot be summarised: {type(reason).__name__}: {reason}."
        raise StorageError(words) from reason


def _folders(name: str, scale: str, root: Path) -> list[Path]:
    return sorted(folder for folder in (root / name).glob(f"{scale}-*") if folder.is_dir())


def find(name: str, root: Path, spec: Spec | None = None) -> Summary | None:
    """The result of a study at the largest scale that has one; see `find_all`."""
    results = find_all(name, root, spec)
    return results[0] if results else None


def find_all(name: str, root: Path, spec: Spec | None = None) -> list[Summary]:
    """The results of a study, one for each scale that has one, the largest scale first.

    A result is that of a finished run under ``root``, or the one that is shipped. Results that are not stale and have
    the study's settings come first, runs before what is shipped, and the latest run before others.
    `Summary.origin` says where the result comes from, unless it is a run of the study as it is today, and
    `Summary.stale` why it is out of date. Damaged runs are left out; `damaged` lists them. ``spec`` is the study where
    the library does not have it.
    """
    results = (_find(name, scale, root, spec) for scale in reversed(SCALES))
    return [summary for summary in results if summary is not None]


def _find(name: str, scale: str, root: Path, spec: Spec | None) -> Summary | None:
    """The result at a scale: one that is not stale and has the study's settings comes first, the latest run next."""
    finished = [folder for folder in _folders(name, scale, root) if read_state(folder).stage == "done"]
    ranked = sorted(finished, key=lambda folder: (*_rank(name, scale, folder), (folder / DONE).stat().st_mtime))
    readable: list[Summary] = []
    for folder in reversed(ranked):
        with suppress(StorageError):
            summary = _summary(folder, spec)
            readable.append(replace(summary, origin=_origin(name, scale, folder, summary)))
    with suppress(StorageError):
        shipped = _shipped(name, scale, spec)
        if shipped is not None:
            made_by = f"shipped with the package and made by version {shipped.provenance.version}"
            readable.append(replace(shipped, origin=made_by))
    readable = [replace(summary, stale=staleness(summary, spec)) for summary in readable]
    readable.sort(key=lambda summary: (bool(summary.stale), bool(summary.provenance.changes)))
    return readable[0] if readable else None


def staleness(summary: Summary, spec: Spec | None = None) -> str:
    """Why today's study, ``spec`` or the library's, would not give a result, in words; empty where it would.

    Settings that were changed by hand are not stale: they are told by `Summary.origin` and the result's command. A
    study that neither is given nor in the library is not compared.
    """
    if spec is None and summary.study not in library.names():
        return ""
    made, spec = summary.provenance, spec or library.load(summary.study)
    if spec.procedure not in PROCEDURES:  # from outside: nothing is known about it
        return ""
    today = procedure_versions(spec)
    changed = [name for name in today if made.procedures.get(name) != today[name]]
    if changed:
        name = changed[0]
        before = f"version {made.procedures[name]}" if name in made.procedures else "an earlier version"
        return f"it was made by {before} of the procedure {name!r}, which is at version {today[name]} now"
    try:
        settings = resolved(spec, summary.scale, dict(made.changes), f"{spec.name}.toml")
    except SpecError:
        return "the study has no such settings any more"
    same = made.fingerprint == settings.settings_fingerprint(made.foreign)
    return "" if same else "the study's settings have changed since"


def _shipped(name: str, scale: str, spec: Spec | None = None) -> Summary | None:
    """The shipped result, judged by ``spec`` or the library's study; None where there is none."""
    file = SHIPPED / f"{name}.{scale}.json"
    if not file.exists():
        return None
    try:
        return judged(Summary.from_json(json.loads(read_regular(file))), spec)
    except _UNREADABLE as reason:
        raise StorageError(f"{file} cannot be read: {type(reason).__name__}: {reason}.") from reason


def damaged(name: str, root: Path) -> list[str]:
    """One sentence on every finished run of a study whose result cannot be read."""
    sentences: list[str] = []
    for scale in SCALES:
        try:
            _shipped(name, scale)
        except StorageError as reason:
            sentences.append(f"The shipped result at scale {scale} is damaged: {reason} Install dissensus again.")
        for folder in _folders(name, scale, root):
            if not (folder / DONE).exists():
                continue
            try:
                _summary(folder)
            except StorageError as reason:
                fix = f"Run it again with `dissensus study run {name} --scale {scale}`, or remove its folder."
                sentences.append(f"A run at scale {scale} is damaged: {reason} {fix}")
    return sentences


def unfinished(name: str, root: Path) -> list[str]:
    """One sentence on every run of a study without a result: it failed, is damaged, is going on, was interrupted."""
    sentences = damaged(name, root)
    for scale in SCALES:
        for folder in _folders(name, scale, root):
            state = read_state(folder)
            if state.stage in ("done", "damaged"):
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
    except (OSError, StorageError):  # of a folder that may not be written to: nobody runs a study in it
        return ""


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


def _origin(name: str, scale: str, folder: Path, summary: Summary) -> str:
    state = read_state(folder)
    difference = _difference(name, scale, state)
    unchecked = "without checksums: changes of its files cannot be seen" if state.format == 0 else ""
    if not difference and not unchecked:
        return ""
    words = ", ".join(f"{key}={toml_value(value)}" for key, value in summary.provenance.changes.items())
    parts = ["a run", difference, f"({words})" if difference and words else "", unchecked]
    return " ".join(filter(None, parts))


def ship(folder: Path, into: Path = SHIPPED) -> Path:
    """Write the summary of a finished run to the folder of shipped results."""
    summary = summarise(read_report(folder))
    check_name(summary.study)
    file = into / f"{summary.study}.{summary.scale}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, (json.dumps(summary.to_json(), separators=(",", ":")) + "\n").encode())
    return file
