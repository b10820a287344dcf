"""Damaged and changed files: refused in a sentence or computed again, never taken as they are."""

import atexit
import functools
import json
import operator
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dissensus as ds
from attempts import children, study_runs, trainings
from attempts.cases import Case, Outcome, Settings
from attempts.children import Child
from attempts.trainings import Training

WHOLE = "damage is refused in a sentence, or the result is that of undamaged files"


def tamper(settings: Settings) -> Iterator[Case]:
    """Files of every kind, changed in every way."""
    fit, sweep = Training("mlp", "vmap", settings.device, epochs=3), Training("normalised", "vmap", epochs=3)
    subjects = [
        Subject("saved ensemble", _save_ensemble, _read_ensemble),
        Subject("saved sweep", _save_sweep, _read_sweep),
        Subject(
            "checkpoint of fit",
            functools.partial(_interrupted, Training.fit, fit),
            functools.partial(_resumed, Training.fit, fit),
        ),
        Subject(
            "checkpoint of a sweep",
            functools.partial(_interrupted, Training.sweep, sweep),
            functools.partial(_resumed, Training.sweep, sweep),
        ),
        Subject("unfinished study", _unfinished_study, _finish_study, study_runs.same_rows),
        Subject("finished study, shown", functools.partial(_finished_study, "tiny"), _show_study, study_runs.same_rows),
        Subject("outputs that another study uses", functools.partial(_finished_study, "figure-2"), _use_study),
        Subject("stored .npz of an audit", functools.partial(_audited, False), _audit),
        Subject("compressed .npz of an audit", functools.partial(_audited, True), _audit),
    ]
    for subject in subjects:
        for mutation in MUTATIONS:
            yield Case(f"{subject.name}: {mutation}", WHOLE, functools.partial(_damaged, subject, mutation))
    plan = subjects[3]
    yield Case("checkpoint of a sweep: order of its parts", WHOLE, functools.partial(_reordered_plan, plan))
    yield Case("checkpoint of a sweep: two parts swapped", WHOLE, functools.partial(_swapped_parts, plan))
    yield Case(
        "one damaged study beside others",
        "`study list`, `show` and `report` of other studies work",
        functools.partial(_one_of_many, subjects[5]),
    )


@dataclass(frozen=True)
class Subject:
    """A folder that is written once and read after damage."""

    name: str
    make: Callable[[Path], Any]
    """Writes the folder."""
    read: Callable[[Path], Any]
    """Reads it, in a child; the value is the same for the same content."""
    same: Callable[[str, str], bool] = operator.eq


@functools.cache
def _template(subject: Subject) -> tuple[Path, Any]:
    """A folder to copy, and what is read from it undamaged."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-template-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    subject.make(folder / "work")
    copy = folder / "copy"
    shutil.copytree(folder / "work", copy, symlinks=True)
    ending = children.call(subject.read, copy)
    if ending.problem is not None or ending.crash:
        raise RuntimeError(f"the undamaged {subject.name} cannot be read: {ending.problem or ending.crash}")
    shutil.rmtree(copy)
    return folder / "work", ending.value


def _damaged(subject: Subject, mutation: str, rng: random.Random, folder: Path) -> Outcome:
    template, expected = _template(subject)
    copy = folder / "copy"
    shutil.copytree(template, copy, symlinks=True)
    what = MUTATIONS[mutation](copy, rng)
    return _judged(subject, copy, expected, what) if what else Outcome(attempts=0)


def _judged(subject: Subject, copy: Path, expected: Any, what: str) -> Outcome:
    ending = children.call(subject.read, copy, limit=90, memory=MEMORY)
    if ending.stopped:
        return Outcome(f"{what}: it hangs")
    if ending.crash:
        return Outcome(f"{what}: {ending.crash}")
    if ending.problem is not None or ending.value == REFUSED or subject.same(ending.value, expected):
        return Outcome()
    return Outcome(f"{what}: accepted")


MEMORY = 16 * 2**30
REFUSED = "refused"


def _files(folder: Path) -> list[Path]:
    """Files that may be damaged."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.stat().st_size and path.name != ".lock" and "specs" not in path.parts
    )


def _chosen(files: list[Path], rng: random.Random) -> Path:
    """A file; kinds of files are equally likely, and so are the files of a kind."""
    kinds: dict[str, list[Path]] = {}
    for file in files:
        kinds.setdefault(re.sub(r"[0-9a-f]{6,}|\d+", "", file.name), []).append(file)
    return rng.choice(kinds[rng.choice(sorted(kinds))])


def _flip(folder: Path, rng: random.Random) -> str:
    file = _chosen(_files(folder), rng)
    content = bytearray(file.read_bytes())
    place = rng.randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    file.write_bytes(content)
    return f"bit {place} of {file.relative_to(folder)} flipped"


def _truncate(folder: Path, rng: random.Random) -> str:
    file = _chosen(_files(folder), rng)
    size = rng.choice([0, 1, file.stat().st_size // 2, file.stat().st_size - 1])
    file.write_bytes(file.read_bytes()[:size])
    return f"{file.relative_to(folder)} cut to {size} bytes"


def _swap(folder: Path, rng: random.Random) -> str:
    files = _files(folder)
    pairs = [(a, b) for i, a in enumerate(files) for b in files[i + 1 :] if a.read_bytes() != b.read_bytes()]
    alike = [(a, b) for a, b in pairs if a.suffix == b.suffix]
    if not pairs:
        return ""
    first, second = rng.choice(alike or pairs)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    return f"{first.relative_to(folder)} and {second.relative_to(folder)} swapped"


def _delete(folder: Path, rng: random.Random) -> str:
    file = _chosen(_files(folder), rng)
    file.unlink()
    return f"{file.relative_to(folder)} deleted"


def _edit(folder: Path, rng: random.Random) -> str:
    """Change one value: a number in a JSON file, or an element of an array."""
    files = [path for path in _files(folder) if path.suffix in (".json", ".npy")]
    if not files:
        return ""
    file = _chosen(files, rng)
    if file.suffix == ".npy":
        array = np.load(file)
        array.reshape(-1)[rng.randrange(array.size)] += 1
        np.save(file, array)
        return f"an element of {file.relative_to(folder)} changed"
    content = json.loads(file.read_text())
    places = [(parent, key) for parent, key in _places(content) if key != "seconds"]
    if not places:
        return ""
    parent, key = rng.choice(places)
    value = parent[key]
    parent[key] = value + 1 if isinstance(value, int | float) else rng.choice([None, [], {}, 7, "x", f"{value}x"])
    file.write_text(json.dumps(content))
    return f"{key!r} of {file.relative_to(folder)} changed from {str(value)[:30]} to {str(parent[key])[:30]}"


def _places(value: Any) -> list[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    places: list[tuple[Any, Any]] = []
    for key, item in items:
        places.append((value, key))
        places += _places(item)
    return places


MUTATIONS: dict[str, Callable[[Path, random.Random], str]] = {
    "bit flip": _flip,
    "truncation": _truncate,
    "swap": _swap,
    "deletion": _delete,
    "edit": _edit,
}


def _save_ensemble(folder: Path) -> None:
    children.call(_save, folder)


def _save(folder: Path) -> None:
    trainings.ensemble_of("cnn", 0).save(folder)


def _read_ensemble(folder: Path) -> str:
    torch.set_num_threads(1)
    ensemble = ds.Ensemble.load(folder, trainings.cnn)
    return str((trainings.identity([ensemble], [])["weights"], ensemble.seed, ensemble.members, ensemble.training))


def _save_sweep(folder: Path) -> None:
    children.call(_sweep_and_save, folder)


def _sweep_and_save(folder: Path) -> None:
    torch.set_num_threads(1)
    objective = functools.partial(ds.objectives.augmented, loss="squared_error", pool="score")
    grid = {"beta": [0.0, 0.5], "seed": [0, 1]}
    ds.sweep(trainings.mlp, trainings.data("mlp"), objective, grid=grid, members=2, epochs=2, backend="loop").save(
        folder
    )


def _read_sweep(folder: Path) -> str:
    torch.set_num_threads(1)
    swept = ds.Sweep.load(folder, trainings.mlp)
    everything = [swept.run(i) for i in range(len(swept))], [swept.history(i) for i in range(len(swept))]
    return str((trainings.identity(*everything), swept.points))


def _interrupted(train: Callable[..., Any], subject: Training, folder: Path) -> None:
    children.call(train, subject, folder, 12 if train is Training.fit else 40)


def _resumed(train: Callable[..., Any], subject: Training, folder: Path) -> str:
    result = train(subject, folder)
    return str((result["weights"], result["record"]))


def _unfinished_study(folder: Path) -> None:
    """A study that was killed when half of its units were done."""
    folder.mkdir(parents=True)
    file = study_runs.write_tiny(folder, seeds=6)
    child = Child(study_runs.invoke, ["study", "run", str(file), "--scale", "smoke"], folder)
    deadline = time.monotonic() + 120
    while len(list(folder.rglob("rows.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.002)
    child.kill()
    child.wait()


def _finish_study(folder: Path) -> str:
    called = _invoked(["study", "run", _tiny(folder), "--scale", "smoke"], folder)
    return REFUSED if called.code else study_runs.rows(folder)


def _tiny(folder: Path) -> str:
    return str(folder / "specs" / "collusion" / "tiny.toml")


class RawTraceback(Exception):
    """A command let an error through."""


def _invoked(words: list[str], folder: Path) -> study_runs.Called:
    called = study_runs.invoke(words, folder)
    if called.raw:
        raise RawTraceback(f"dissensus {' '.join(words[:2])}: {called.raw}")
    return called


def _finished_study(name: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    study = str(study_runs.write_tiny(folder)) if name == "tiny" else f"collusion/{name}"
    ending = children.call(study_runs.invoke, ["study", "run", study, "--scale", "smoke"], folder)
    if ending.value is None or ending.value.code:
        raise RuntimeError(f"the study failed: {ending}")


DAMAGE = ("damage", "changed", "checksum", "not whole", "truncated", "missing", "cannot be read", "no result")


def _show_study(folder: Path) -> str:
    """Rows that `study show` and another `study run` rely on; damage must be named."""
    file = _tiny(folder)
    for words in (["study", "show", file], ["study", "run", file, "--scale", "smoke"]):
        called = _invoked(words, folder)
        if called.code or any(word in called.output.lower() for word in DAMAGE):
            return REFUSED
    return study_runs.rows(folder)


def _use_study(folder: Path) -> str:
    called = _invoked(["study", "run", "collusion/figure-3", "--scale", "smoke"], folder)
    return REFUSED if called.code else study_runs.rows(folder, "figure-3")


def _audited(compressed: bool, folder: Path) -> None:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    targets = generator.integers(3, size=300)
    outputs = generator.normal(size=(4, 300, 3)).astype(np.float32)
    outputs[:, np.arange(300), targets] += 1.5
    save = np.savez_compressed if compressed else np.savez
    save(folder / "outputs.npz", outputs=outputs, targets=targets)


def _audit(folder: Path) -> str:
    words = ["audit", "outputs.npz", "--task", "classification", "--kind", "logits", "--json", "result.json"]
    called = _invoked(words, folder)
    if called.code:
        return REFUSED
    result = json.loads((folder / "result.json").read_text())
    result.pop("made", None)
    return json.dumps(result, sort_keys=True)


def _reordered_plan(subject: Subject, rng: random.Random, folder: Path) -> Outcome:
    template, expected = _template(subject)
    copy = folder / "copy"
    shutil.copytree(template, copy)
    file = copy / "plan.json"
    if not file.exists():  # the order may be stored in another way
        return Outcome(attempts=0)
    plan = json.loads(file.read_text())
    numbers = [number for part in plan["parts"] for number in part]
    rng.shuffle(numbers)
    plan["parts"] = [[numbers.pop() for _ in part] for part in plan["parts"]]
    file.write_text(json.dumps(plan))
    return _judged(subject, copy, expected, "parts of plan.json in another order")


def _swapped_parts(subject: Subject, rng: random.Random, folder: Path) -> Outcome:
    template, expected = _template(subject)
    copy = folder / "copy"
    shutil.copytree(template, copy)
    parts = sorted(copy.rglob("part-*"))
    if len(parts) < 2:
        return Outcome(attempts=0)
    first, second = rng.sample(parts, 2)
    first.rename(copy / "between")
    second.rename(first)
    (copy / "between").rename(second)
    return _judged(subject, copy, expected, f"{first.name} and {second.name} swapped")


def _one_of_many(subject: Subject, rng: random.Random, folder: Path) -> Outcome:
    template, _ = _template(subject)
    copy = folder / "copy"
    shutil.copytree(template, copy)
    # The damaged study must be one of the library's, which the list shows.
    place = copy / "runs" / "studies" / "collusion"
    (place / "tiny").rename(place / rng.choice(["figure-2", "figure-3", "figure-6", "table-1"]))
    for file in _files(copy):
        if file.name not in ("report.json", "state.json"):
            file.unlink()
    what = rng.choice([_truncate, _flip, _delete, _edit])(copy, rng)
    ending = children.call(_others, copy, limit=90)
    problem = ending.crash or (str(ending.problem) if ending.problem else "") or ending.value
    return Outcome(f"{what}: {problem}" if problem else "")


def _others(folder: Path) -> str:
    for words in (
        ["study", "list"],
        ["study", "show", "ldr/table-1"],
        ["study", "report", "ldr/table-1", "--out", "p.html"],
    ):
        called = _invoked(words, folder)
        if called.code:
            return f"dissensus {' '.join(words[:2])} fails: {' '.join(called.output.split())[-150:]}"
    return ""
