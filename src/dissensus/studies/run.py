"""Run a study: its steps, its units and its report.

The folder of a run is determined by the study, the scale and a fingerprint of the settings and the library's version.
A second run of the same settings does nothing; one that was interrupted or has failed continues; a lock keeps two
processes from running the same study at once.
"""

import itertools
import json
import logging
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

import dissensus
from dissensus import checks
from dissensus.data.sources import DATASETS, DatasetInfo
from dissensus.fingerprint import fingerprint, source_digest
from dissensus.storage import StorageError, locked, make_folder, read_regular, write_atomically
from dissensus.studies import datasets, library
from dissensus.studies.checked_folders import MANIFEST, Misplaced, check_unit, inside, is_finished, write_run_manifest
from dissensus.studies.measures import MEASURES, OutputMeasure
from dissensus.studies.procedures.base import OnProgress, Procedure, Step, StudyContext, no_progress
from dissensus.studies.procedures.builtin import PROCEDURES
from dissensus.studies.procedures.search import read_trials
from dissensus.studies.procedures.training import finish_unit, read_rows
from dissensus.studies.protocol import differences, named_axes
from dissensus.studies.results import Provenance, Report, Row
from dissensus.studies.run_folders import (
    DONE,
    RunState,
    check_name,
    damage,
    folder_of,
    procedure_versions,
    read_state,
    runs_folder,
    write_state,
)
from dissensus.studies.spec import Spec, SpecError, changed_file, on_data, resolved, to_toml
from dissensus.studies.validation import check, missing
from dissensus.studies.workers import submit, worker_pool
from dissensus.train import RayCluster
from dissensus.train.cluster import Need, Task, Workers, check_seen, connected, left_by_others

log = logging.getLogger("dissensus")

_MEASURING = re.compile(r"(by_data\.[^.]+\.)?(evaluation|figure|uses)\b")
"""Changed settings that a study does not pass on to the study whose trainings it uses."""


class Busy(RuntimeError):
    """Another process is running this study."""


def run(
    study: str | Spec,
    scale: str,
    *,
    changes: dict[str, Any] | None = None,
    device: torch.device | None = None,
    jobs: int = 1,
    cluster: Literal["ray"] | RayCluster | None = None,
    root: Path | None = None,
    on_study: OnProgress | None = None,
    procedures: Mapping[str, Procedure] = PROCEDURES,
    measures: Mapping[str, OutputMeasure] = MEASURES,
    catalogue: Mapping[str, DatasetInfo] = DATASETS,
) -> Path:
    """Run a study at a scale, or continue it; return its folder.

    Args:
        study: A name of the library, the path of a TOML file, or a spec.
        scale: One of the study's scales.
        changes: Settings that replace those of the study, by dotted keys.
        device: Where networks are trained; the CPU by default.
        jobs: Number of worker processes.
        cluster: ``"ray"``, or a `RayCluster` with an address: units are tasks of a Ray cluster, whose machines all see
            ``root``, and the folder of data. Trials of a search are tasks too.
        root: The folder of all runs; `runs_folder()` by default.
        on_study: Called with a text and the share of the study that is done.
        procedures: Procedures by name: the built-in ones, and those from outside.
        measures: Measures of member outputs by name: the built-in ones, and those from outside.
        catalogue: Data sets by name: the built-in ones, and those from outside (tables and images to train on).
    """
    whole = study if isinstance(study, Spec) else library.load(study, procedures, catalogue)
    check_name(whole.name)
    file = changed_file(f"{whole.name}.toml", changes or {})
    spec = resolved(whole, scale, changes or {}, f"{whole.name}.toml")
    for data in spec.data:
        check(on_data(spec, data, file), file, procedures, catalogue)
    lacks = missing(spec, procedures, measures)
    if lacks:
        reasons = "; ".join(lacks)
        end = "" if reasons.endswith("?") else "."
        raise SpecError(f"{changed_file(spec.name, changes or {})} cannot be run: {reasons}{end}")
    if spec.uses:
        library.check_used(spec.uses, file)
    root = runs_folder() if root is None else root
    cluster = RayCluster.of(cluster)
    if cluster is not None:
        if jobs > 1:
            checks.refuse("jobs", "be left out with `cluster`", jobs, "A cluster has as many workers as cores or GPUs.")
        root = root.absolute()
    foreign = foreign_fingerprint(spec, procedures, measures, catalogue)
    folder = folder_of(spec, scale, root, foreign, procedures)
    if _is_done(folder):
        return folder
    base = folder
    if spec.uses:
        passed_on = {key: value for key, value in (changes or {}).items() if not _MEASURING.match(key)}
        base = run(
            spec.uses,
            scale,
            changes=passed_on,
            device=device,
            jobs=jobs,
            cluster=cluster,
            root=root,
            on_study=on_study,
            procedures=procedures,
            measures=measures,
            catalogue=catalogue,
        )
    make_folder("root", folder)
    context = StudyContext(
        spec, folder, base, device or torch.device("cpu"), measures, on_study or no_progress, catalogue
    )
    with alone(folder, spec.name), ExitStack() as stack:
        if not _is_done(folder):
            workers = None if cluster is None else stack.enter_context(connected(cluster))
            _run(
                context,
                procedures[spec.procedure],
                _Run(
                    scale,
                    jobs if workers is None else workers,
                    foreign,
                    changes or {},
                    _differences(whole, spec),
                    procedure_versions(spec, procedures),
                ),
            )
    return folder


@dataclass(frozen=True)
class _Run:
    """What is recorded of a run beside its settings."""

    scale: str
    jobs: int | Workers
    """A number of processes, or a cluster."""
    foreign: str
    changes: Mapping[str, Any]
    differences: Mapping[str, Sequence[str]]
    versions: Mapping[str, int]
    """Of procedures."""


def _differences(whole: Spec, spec: Spec) -> dict[str, list[str]]:
    """By data set, how a run differs from its study at scale paper; empty where it has no such scale."""
    if "paper" not in whole.scales:
        return {}
    paper = resolved(whole, "paper", {}, f"{whole.name}.toml").to_dict()
    by_data = {data: differences(spec.settings(), paper, data, named_axes(whole.expect)) for data in spec.data}
    return {data: words for data, words in by_data.items() if words}


def _is_done(folder: Path) -> bool:
    """Whether a run is finished, and all its files are as they were written."""
    return read_state(folder).stage == "done" and not damage(folder)


def foreign_fingerprint(
    spec: Spec,
    procedures: Mapping[str, Procedure],
    measures: Mapping[str, OutputMeasure],
    catalogue: Mapping[str, DatasetInfo] = DATASETS,
) -> str:
    """A checksum of the procedure, measures and data of a study that are not built in; empty where all are."""
    parts: dict[str, object] = {}
    if procedures[spec.procedure] is not PROCEDURES.get(spec.procedure):
        parts[spec.procedure] = procedures[spec.procedure]
    for name in spec.evaluation.measures:
        if name in measures and measures[name] is not MEASURES.get(name):
            parts[name] = measures[name]
    for name in spec.data:
        if name in catalogue and catalogue[name] is not DATASETS.get(name):
            parts[f"data {name}"] = catalogue[name]
    return fingerprint(parts) if parts else ""


def _run(context: StudyContext, procedure: Procedure, details: _Run) -> None:
    """Run all steps and units, and write the report; the folder's state says how far it came."""
    spec, folder = context.spec, context.folder
    if (folder / DONE).exists():
        log.warning("%s What is damaged is computed again.", damage(folder))
        (folder / DONE).unlink()
    units = _unit_names(procedure, spec)
    _discard_damaged(folder, units)
    state = RunState("started", spec.settings_fingerprint(details.foreign), dissensus.__version__)
    write_state(folder, state)
    write_atomically(folder / "spec.toml", (to_toml(spec.to_dict()) + "\n").encode())
    try:
        with _clock(folder) as seconds:
            rows = _rows(context, procedure, details.jobs)
        provenance = replace(
            _provenance(context, rows, seconds(), details.jobs),
            changes=details.changes,
            fingerprint=state.settings,
            procedures=details.versions,
            foreign=details.foreign,
        )
        outputs = "." if context.base == folder else os.path.relpath(context.base, folder)
        report = Report(spec.name, details.scale, spec, provenance, rows, outputs, details.differences)
        write_atomically(folder / "report.json", (json.dumps(report.to_json(), indent=1) + "\n").encode())
        finished = [unit for unit in units if is_finished(folder, unit)]
        about = {"study": spec.name, "scale": details.scale, "settings": state.settings, "version": state.version}
        write_run_manifest(folder, finished, about)
    except Exception as reason:
        with suppress(OSError):  # a full disk: the reason is what counts
            write_state(folder, replace(state, stage="failed", reason=f"{type(reason).__name__}: {reason}"))
        raise
    write_state(folder, replace(state, stage="done"))


def _unit_names(procedure: Procedure, spec: Spec) -> list[str]:
    """Names of all units, and of units that others lie in: trainings that are attacked."""
    names: dict[str, None] = {}
    for unit in procedure.units(spec):
        parts = unit.name.split("/")
        names.update(dict.fromkeys("/".join(parts[: i + 1]) for i in range(len(parts))))
    return list(names)


def _discard_damaged(folder: Path, units: Sequence[str]) -> None:
    """Let units be computed again whose files are not those that were written."""
    for unit in units:
        if is_finished(folder, unit):
            try:
                check_unit(folder, unit)
            except Misplaced as reason:
                aside = _set_aside(folder, unit)
                log.warning("%s It is in %s now, and the unit %s is computed again.", reason, aside, unit)
            except StorageError as reason:
                log.warning("%s The unit %s is computed again.", reason, unit)
                (inside(folder, unit) / MANIFEST).unlink()


def _set_aside(folder: Path, unit: str) -> Path:
    """Move the folder of a unit out of the way, as its checkpoints are those of another unit; return its new path."""
    place = folder / "misplaced"
    place.mkdir(exist_ok=True)
    names = (f"{unit.replace('/', '-')}-{number}" for number in itertools.count(1))
    return inside(folder, unit).rename(next(path for name in names if not (path := place / name).exists()))


def _rows(context: StudyContext, procedure: Procedure, jobs: int | Workers) -> list[Row]:
    """Run what is left of a study, and return all its rows."""
    steps = [
        *procedure.steps,
        Step(_Units(procedure, unfinished=True), _RunUnit(procedure.run), spreads=procedure.spreads),
    ]
    tasks = [list(step.tasks(context)) for step in steps]
    weights = [step.weight if left else 0.0 for step, left in zip(steps, tasks, strict=True)]
    before = 0.0
    for step, weight in zip(steps, weights, strict=True):
        left = list(step.tasks(context))
        share = weight / (sum(weights) or 1.0)
        _work(step, left, context, jobs, _ProgressPart(context.progress, before, share))
        before += share
    units = _Units(procedure, unfinished=False)(context)
    return list(
        procedure.combine([row for unit in units for row in read_rows(inside(context.folder, unit.name), context.spec)])
    )


class _Units:
    """The units of a procedure: all in the order of rows, or the unfinished ones in the order of their priority."""

    def __init__(self, procedure: Procedure, *, unfinished: bool) -> None:
        self.procedure, self.unfinished = procedure, unfinished

    def __call__(self, context: StudyContext) -> Sequence[Any]:
        units = self.procedure.units(context.spec)
        if not self.unfinished:
            return units
        left = [unit for unit in units if not is_finished(context.folder, unit.name)]
        return sorted(left, key=self.procedure.priority)


class _RunUnit:
    """Runs a unit and writes its rows."""

    def __init__(self, run: Callable[[Any, StudyContext], Sequence[Row]]) -> None:
        self.run = run

    def __call__(self, unit: Any, context: StudyContext) -> None:
        finish_unit(context.folder, unit.name, self.run(unit, context))


class _ProgressPart:
    """Progress of one part of a study."""

    def __init__(self, progress: OnProgress, before: float, share: float) -> None:
        self.progress, self.before, self.share = progress, before, share

    def __call__(self, text: str, share: float) -> None:
        self.progress(text, min(1.0, self.before + self.share * share))


def _work(step: Step, tasks: Sequence[Any], context: StudyContext, jobs: int | Workers, progress: OnProgress) -> None:
    """Do the tasks of a step, one after the other, in several processes or on a cluster."""
    if isinstance(jobs, Workers):
        if tasks:
            _work_on(jobs, step, tasks, context, progress)
    elif jobs > 1 and len(parts := [part for task in tasks for part in step.divided(task, jobs)]) > 1:
        _work_in_processes(step, parts, context, jobs, progress)
    else:
        for i, task in enumerate(tasks):
            step.run(task, replace(context, progress=_ProgressPart(progress, i / len(tasks), 1 / len(tasks))))


def _work_on(workers: Workers, step: Step, tasks: Sequence[Any], context: StudyContext, progress: OnProgress) -> None:
    """Do the tasks of a step on a cluster: some as a whole, and some from here, whose runs are tasks."""
    need = Need(1, workers.cluster.gpus if context.device.type == "cuda" else 0.0)
    few = len(tasks) < workers.slots(need)
    from_here = [task for task in tasks if step.spreads(task, context, few)]
    whole = [task for task in tasks if task not in from_here]
    if whole:
        part = _ProgressPart(progress, 0.0, len(whole) / len(tasks))
        _work_there(step, whole, replace(context, progress=part), workers, need)
    for i, task in enumerate(from_here, len(whole)):
        part = _ProgressPart(progress, i / len(tasks), 1 / len(tasks))
        with ExitStack() as stack:
            if (name := getattr(task, "name", None)) is not None:
                stack.enter_context(left_by_others(inside(context.folder, name)))
            step.run(task, replace(context, progress=part, cluster=workers.cluster))


def _work_there(step: Step, tasks: Sequence[Any], context: StudyContext, workers: Workers, need: Need) -> None:
    """Do the tasks of a step on a cluster, each as a whole."""
    workers.examine(workers.fitting(need), context.folder, "root")
    need = replace(need, cpus=workers.cores(need, len(tasks)))
    silent = replace(context, progress=no_progress)
    named = {"procedure": step.run, "measures": context.measures, "catalogue": context.catalogue}
    shared = workers.share((step.run, tasks, silent), named)
    done = itertools.count(1)

    def finish(number: int, result: object) -> None:  # noqa: ARG001
        finished = next(done)
        context.progress(f"{finished} of {len(tasks)} tasks are done, on a {workers}", finished / len(tasks))

    workers.run([_task(i, task, context, need) for i, task in enumerate(tasks)], shared, finish)


def _task(number: int, task: Any, context: StudyContext, need: Need) -> Task:
    name = getattr(task, "name", None)
    if name is None:
        return Task(_do_there, (number, None), f"task {number} of {context.spec.name}", need)
    folder = inside(context.folder, name)
    return Task(
        _do_there,
        (number, folder),
        f"unit {name}",
        need,
        came_to=lambda: sorted(path.as_posix() for path in folder.rglob("step-*")),
    )


def _do_there(shared: Any, number: int, folder: Path | None, *, report: Any) -> None:  # noqa: ARG001
    """Do one task of a step, by a worker."""
    run, tasks, context = shared
    check_seen("root", context.folder / "spec.toml")
    with ExitStack() as stack:
        if folder is not None:
            stack.enter_context(left_by_others(folder))
        run(tasks[number], context)


def _work_in_processes(
    step: Step, tasks: Sequence[Any], context: StudyContext, jobs: int, progress: OnProgress
) -> None:
    """Do the tasks of a step in several processes of this machine."""
    silent = replace(context, progress=no_progress)
    with worker_pool(jobs) as pool:
        pending = submit(pool, step.run, [(task, silent) for task in tasks])
        for done, future in enumerate(as_completed(pending), 1):
            try:
                future.result()
            except BrokenProcessPool as reason:
                fix = "Was it killed, for want of memory? Fewer workers need less; what is finished is kept."
                raise ChildProcessError(f"A worker process ended before its work was done. {fix}") from reason
            progress(f"{done} of {len(tasks)} tasks are done, in {jobs} processes", done / len(tasks))


@contextmanager
def _clock(folder: Path) -> Iterator[Callable[[], float]]:
    """Seconds that this study has taken, interrupted runs included; a killed process loses at most five of them."""
    file = folder / "seconds.json"
    try:
        before = float(json.loads(read_regular(file)))
    except (OSError, ValueError, TypeError, RecursionError):
        before = 0.0
    started, over = time.perf_counter(), threading.Event()

    def seconds() -> float:
        return before + time.perf_counter() - started

    def store() -> None:
        with suppress(OSError):  # a full disk: what is measured again is not worth an error
            write_atomically(file, json.dumps(seconds()).encode())

    def tick() -> None:
        while not over.wait(5.0):
            store()

    ticking = threading.Thread(target=tick, daemon=True)
    ticking.start()
    try:
        yield seconds
    finally:
        over.set()
        ticking.join()
        store()


@contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """Hold a study's folder; `Busy` names the process that holds it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder, wait=False))
        except BlockingIOError as reason:
            raise Busy(f"{name} is being run already, by {reason}, in {folder}. Wait for it, or stop it.") from reason
        yield


PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "optuna", "safetensors")


def _searched_networks(folder: Path) -> int:
    """Number of networks that were trained in searches."""
    trials = [trial for file in folder.glob("*/trials.json") for trial in read_trials(file)]
    return sum(int(trial["params"].get("members", 1)) for trial in trials)


def _provenance(context: StudyContext, rows: Sequence[Row], seconds: float, jobs: int | Workers) -> Provenance:
    device, spec = context.device, context.spec
    on_gpu = device.type == "cuda"
    if isinstance(jobs, Workers):
        hardware, peak_mib = str(jobs), None
    elif on_gpu:
        hardware, peak_mib = torch.cuda.get_device_name(device), torch.cuda.max_memory_allocated(device) / 2**20
    else:
        processes = f", {jobs} processes" if jobs > 1 else ""
        hardware, peak_mib = f"{platform.machine()}, {os.cpu_count()} cores{processes}", _peak_mib()
    return Provenance(
        version=dissensus.__version__,
        python=platform.python_version(),
        packages={name: installed for name in PACKAGES if (installed := _version(name))},
        hardware=hardware,
        seeds=[int(seed) for seed in spec.grid.get("seed", [0])],
        networks=sum(row.members or 0 for row in rows if row.run is not None),
        searched_networks=_searched_networks(context.base),
        seconds=seconds,
        peak_mib=peak_mib,
        data=[datasets.describe(name, context.catalogue) for name in spec.data],
        device=device.type,
        source=source_digest(),
    )


def _peak_mib() -> float | None:
    """The peak memory of this process and its workers; None where the system does not report it."""
    try:
        import resource
    except ImportError:
        return None
    unit = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss counts bytes or KiB
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / unit


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
