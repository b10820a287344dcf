"""Run a study: its folder, what is done in it, and what is left in it.

The folder is determined by the study, the scale and a digest of what is computed. A second run of the same does
nothing; one that was interrupted goes on; two at once are told apart by a lock.
"""

import json
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import dissensus
from dissensus.storage import locked, write_atomically
from dissensus.studies import audit_cases, finding, formulas, mask_overlap, problems, training, under_attack
from dissensus.studies.registry import ATTACKED, TRAINED, check, waits_for
from dissensus.studies.results import Report
from dissensus.studies.spec import Spec, SpecError, on_data, resolved, to_toml

OnStudy = Callable[[str, float], None]
"""``(what is being done, share of the study)``."""


_OF_MEASURING = re.compile(r"(by_data\.[^.]+\.)?(evaluation|figure)\b")
"""Settings that a study does not hand on to the one whose trainings it uses."""
SEARCH_SHARE = 0.7
"""Of a study's progress, where hyperparameters are searched first."""


class Busy(RuntimeError):
    """Another process is running this study."""


def runs_folder() -> Path:
    """Where runs are kept: ``DISSENSUS_RUNS``, or ``runs`` here."""
    return Path(os.environ.get("DISSENSUS_RUNS") or "runs") / "studies"


def folder_of(spec: Spec, scale: str, root: Path) -> Path:
    """The folder of a study, resolved at a scale."""
    return root / spec.name / f"{scale}-{spec.digest()}"


def run(
    name: str,
    scale: str,
    *,
    changes: dict[str, Any] | None = None,
    device: torch.device | None = None,
    jobs: int = 1,
    root: Path | None = None,
    on_study: OnStudy | None = None,
) -> Path:
    """Run a study of the library at a scale, or go on with it; return its folder."""
    told = finding.load(name)
    spec = resolved(told, scale, changes or {}, f"{name}.toml")
    for data in spec.data:
        check(on_data(spec, data), f"{name}.toml")
    waiting = waits_for(spec)
    if waiting:
        raise SpecError(f"{name} cannot be run yet: it waits for {', '.join(waiting)}.")
    root = runs_folder() if root is None else root
    say = on_study or (lambda text, share: None)  # noqa: ARG005
    folder = folder_of(spec, scale, root)
    if (folder / "DONE").exists():
        return folder
    base = folder
    if spec.uses:
        own = {key: value for key, value in (changes or {}).items() if not _OF_MEASURING.match(key)}
        base = run(spec.uses, scale, changes=own, device=device, jobs=jobs, root=root, on_study=say)
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder, name):
        if not (folder / "DONE").exists():
            how = {"changes": changes} if changes else {}
            _run(spec, scale, folder, base, device or torch.device("cpu"), jobs, say, how)
    return folder


def _run(
    spec: Spec, scale: str, folder: Path, base: Path, device: torch.device, jobs: int, say: OnStudy, how: dict[str, Any]
) -> None:
    write_atomically(folder / "spec.toml", (to_toml(spec.to_dict()) + "\n").encode())
    units = training.units(spec) if spec.procedure in TRAINED else []
    left = [unit for unit in units if not training.done(base, unit)]
    if spec.uses and left:
        raise SpecError(f"{spec.name} uses {spec.uses}, which has not trained {left[0].name}.")
    left.sort(key=lambda unit: unit.seeds[0])  # all data sets get their first seed before any gets its second
    with _clock(folder) as seconds:
        _train(spec, units, left, folder, device, jobs, say)
        if spec.procedure in ATTACKED:
            rows = _attacked(spec, units, folder, base, device, jobs, say)
        elif spec.procedure in TRAINED:
            rows = [row for unit in units for row in _rows(spec, unit, folder, base)]
        elif spec.procedure == "audit":
            rows = _audited(spec, folder, jobs, say)
        else:
            rows = _WITHOUT_TRAINING[spec.procedure](spec)
    report = {
        "study": spec.name,
        "scale": scale,
        "spec": spec.to_dict(),
        "made": {**made(spec, seconds(), device, rows, _searched(base)), **how},
        "outputs": "." if base == folder else os.path.relpath(base, folder),
        "rows": rows,
    }
    report = Report.from_json(report).to_json()
    write_atomically(folder / "report.json", (json.dumps(report, indent=1) + "\n").encode())
    write_atomically(folder / "DONE", b"")


_WITHOUT_TRAINING: dict[str, Callable[[Spec], list[dict[str, Any]]]] = {
    "formula": formulas.rows,
    "masks": mask_overlap.rows,
}
"""Procedures that train nothing."""


def _audited(spec: Spec, folder: Path, jobs: int, say: OnStudy) -> list[dict[str, Any]]:
    """Rows of ensembles whose truth is known, and what the audit says of them. Units that are done are kept."""
    units = audit_cases.units(spec)
    if jobs <= 1:
        found = []
        for done, unit in enumerate(units):
            say(str(unit), done / len(units))
            found.append(_audited_unit(spec, unit, folder))
    else:
        with _workers(jobs) as pool:
            pending = [pool.submit(_audited_unit, spec, unit, folder) for unit in units]
            for done, _ in enumerate(as_completed(pending), 1):
                say(f"{done} of {len(units)} are audited, in {jobs} processes", done / len(units))
            found = [one.result() for one in pending]
    return audit_cases.pooled([row for rows in found for row in rows])


def _audited_unit(spec: Spec, unit: audit_cases.Unit, folder: Path) -> list[dict[str, Any]]:
    file = folder / "units" / f"{unit.group}, {unit}.json"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, json.dumps(audit_cases.rows(spec, unit)).encode())
    return json.loads(file.read_text())


def _rows(spec: Spec, unit: training.Unit, folder: Path, base: Path) -> list[dict[str, Any]]:
    """A unit's rows: as it left them, or measured anew from what another study has kept."""
    if spec.uses:
        return training.measured_again(spec, unit, base)
    return json.loads((folder / unit.name / "rows.json").read_text())


def _attacked(
    spec: Spec, units: list[training.Unit], folder: Path, base: Path, device: torch.device, jobs: int, say: OnStudy
) -> list[dict[str, Any]]:
    """Rows of ensembles that were trained, here or by another study, with measures under attack."""
    rows = {unit.name: training.measured_again(spec, unit, base) for unit in units}
    tasks = [
        (on_data(spec, unit.data), unit.data, row, base / unit.name, folder / unit.name)
        for unit in units
        for row in rows[unit.name]
        if row["status"] == "done"
        if not under_attack.file_of(folder / unit.name, row["run"]).exists()
    ]
    if jobs <= 1 or len(tasks) < 2:
        for done, task in enumerate(tasks):
            under_attack.run(*task, device, lambda text, share, done=done: say(text, (done + share) / len(tasks)))
    else:
        with _workers(jobs) as pool:
            pending = [pool.submit(_attacked_apart, *task, str(device)) for task in tasks]
            for done, finished in enumerate(as_completed(pending), 1):
                finished.result()
                say(f"{done} of {len(tasks)} ensembles are attacked, in {jobs} processes", done / len(tasks))
    for unit in units:
        for row in rows[unit.name]:
            found: dict[str, Any] = {"measures": under_attack.none_of(on_data(spec, unit.data))}
            if row["status"] == "done":
                found = json.loads(under_attack.file_of(folder / unit.name, row["run"]).read_text())
            row |= {**found, "measures": {**row["measures"], **found["measures"]}}
    return [row for unit in units for row in rows[unit.name]]


def _attacked_apart(spec: Spec, data: str, row: dict[str, Any], base: Path, own: Path, device: str) -> None:
    under_attack.run(spec, data, row, base, own, torch.device(device), lambda text, share: None)  # noqa: ARG005


def _train(
    spec: Spec,
    units: list[training.Unit],
    left: list[training.Unit],
    folder: Path,
    device: torch.device,
    jobs: int,
    say: OnStudy,
) -> None:
    searches = _searches(spec, left)
    start = SEARCH_SHARE if searches else 0.0

    def searching(text: str, share: float) -> None:
        say(text, start * share)

    def training_(text: str, share: float) -> None:
        say(text, start + (1 - start) * share)

    if jobs <= 1 or len(left) < 2:
        for done, units_of_one in enumerate(searches):
            _within(searching, done, len(searches), training.search, spec, units_of_one, folder, device)
        for done, unit in enumerate(left, len(units) - len(left)):
            _within(training_, done, len(units), training.run, spec, unit, folder, device)
        return
    with _workers(jobs) as pool:
        for work, tasks, before, on in (
            (training.search, searches, 0, searching),
            (training.run, left, len(units) - len(left), training_),
        ):
            pending = [pool.submit(_apart, work, spec, task, folder, str(device)) for task in tasks]
            for done, finished in enumerate(as_completed(pending), before + 1):
                finished.result()
                on(f"{done} of {before + len(tasks)} units are done, in {jobs} processes", done / (before + len(tasks)))


def _workers(jobs: int) -> ProcessPoolExecutor:
    """Processes that share the cores."""
    threads = max(1, torch.get_num_threads() // jobs)
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin, initargs=(threads,))


def _searches(spec: Spec, left: list[training.Unit]) -> list[list[training.Unit]]:
    """Units whose hyperparameters are searched together: those of one data set."""
    by_data: dict[str, list[training.Unit]] = {}
    for unit in left if spec.search is not None else []:
        by_data.setdefault(unit.data, []).append(unit)
    return list(by_data.values())


def _within(say: OnStudy, done: int, of: int, work: Callable[..., None], *told: Any) -> None:
    work(*told, lambda text, share: say(text, (done + share) / of))


def _begin(threads: int) -> None:
    """Set a worker up: its share of the cores, and an end of its own when the process that started it is gone."""
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)  # the lock went with the parent: nothing may be written any more


def _apart(work: Callable[..., None], spec: Spec, task: Any, folder: Path, device: str) -> None:
    work(spec, task, folder, torch.device(device), lambda text, share: None)  # noqa: ARG005


@contextmanager
def _clock(folder: Path) -> Iterator[Callable[[], float]]:
    """Seconds that this study has taken, interrupted runs included: one that is killed loses five of them at most."""
    file = folder / "seconds.json"
    before = float(json.loads(file.read_text())) if file.exists() else 0.0
    started, over = time.perf_counter(), threading.Event()

    def seconds() -> float:
        return before + time.perf_counter() - started

    def tick() -> None:
        while not over.wait(5.0):
            write_atomically(file, json.dumps(seconds()).encode())

    ticking = threading.Thread(target=tick, daemon=True)
    ticking.start()
    try:
        yield seconds
    finally:
        over.set()
        ticking.join()
        write_atomically(file, json.dumps(seconds()).encode())


@contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """Hold a study's folder, or say who does."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(folder, wait=False))
        except BlockingIOError as reason:
            raise Busy(f"{name} is being run already, by {reason}, in {folder}. Wait for it, or stop it.") from reason
        yield


PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "optuna", "safetensors")


def _searched(folder: Path) -> int:
    """Networks that were trained in searches."""
    trials = [trial for file in folder.glob("*/trials.json") for trial in json.loads(file.read_text())]
    return sum(int(trial["params"].get("members", 1)) for trial in trials)


def made(spec: Spec, seconds: float, device: torch.device, rows: list[dict[str, Any]], searched: int) -> dict[str, Any]:
    """How a result was made."""
    gpu = device.type == "cuda"
    return {
        "version": dissensus.__version__,
        "python": platform.python_version(),
        "device": device.type,
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "hardware": torch.cuda.get_device_name(device) if gpu else f"{platform.machine()}, {os.cpu_count()} cores",
        "seeds": spec.grid.get("seed", [0]),
        "networks": sum(row["members"] for row in rows if "run" in row),
        "searched_networks": searched,
        "seconds": seconds,
        "peak_mib": torch.cuda.max_memory_allocated(device) / 2**20 if gpu else _peak_mib(),
        "data": [problems.described(name) for name in spec.data],
    }


def _peak_mib() -> float | None:
    """The most memory that this process or one of its workers has held; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    unit = 2**20 if sys.platform == "darwin" else 2**10  # what ru_maxrss counts in
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / unit


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
