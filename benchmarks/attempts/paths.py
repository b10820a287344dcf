"""Names and places that lead outside, and files that are no regular files."""

import functools
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attempts import children, study_runs
from attempts.cases import Case, Outcome, Settings

SECONDS = 30.0
INSIDE = "nothing is written or read outside, or the name is refused in a sentence"
KEPT = "a device, FIFO or link is written to as it is or refused, and stays what it is"
AUDIT = "audit outputs.npz --task classification --kind logits"


def paths(settings: Settings) -> Iterator[Case]:
    """Names with ``..``, absolute names, links, devices, FIFOs."""
    del settings
    for name in (
        "../../evil",
        "collusion/../../../evil",
        "/tmp/chaos-evil/x",
        "collusion/a\nb",
        "collusion//x",
        "~/evil",
    ):
        yield Case(f"a study with name = {name!r}", INSIDE, functools.partial(_named, name), limit=1)
    for name in ("../../../secret", "SECRET"):
        yield Case(f"a study with uses = {name!r}", INSIDE, functools.partial(_uses, name), limit=1)
    for option, ending in (("--json", "json"), ("--page", "html")):
        for kind in KINDS:
            yield Case(
                f"{option} to {kind}", KEPT, functools.partial(_written, f"{option} target.{ending}", kind), limit=1
            )
    for kind in ("a link", "a device"):
        yield Case(f"--figure to {kind}", KEPT, functools.partial(_figure, kind), limit=1)
    for kind in ("a FIFO", "an endless device"):
        for file in ("outputs.npy", "outputs.npz", "outputs.csv", "outputs.safetensors", "targets.npy"):
            yield Case(
                f"reading {kind} as {file}",
                "it is refused in a sentence, at once",
                functools.partial(_read, kind, file),
                limit=1,
            )
    yield Case("a picture outside of its folder", INSIDE, _pictures, limit=1)


def _files(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


def _named(name: str, rng: random.Random, folder: Path) -> Outcome:
    del rng
    inner = folder / "a" / "b" / "c"
    inner.mkdir(parents=True)
    file = study_runs.write_tiny(inner, seeds=1, text=f"name = {_quoted(name)}\n{study_runs.TINY}")
    ending = children.call(study_runs.invoke, ["study", "run", str(file), "--scale", "smoke"], inner, limit=60)
    outside = [path for path in _files(folder) if f"{inner}/" not in f"{path}/" and not str(inner).startswith(path)]
    outside += [str(path) for path in (Path("/tmp/chaos-evil"), Path.home() / "evil") if path.exists()]
    studies = inner / "runs" / "studies"
    outside += [path for path in _files(inner) if path.endswith("report.json") and str(studies) not in path]
    if outside:
        return Outcome(f"written outside: {sorted(outside)[0].replace(str(folder), '')}")
    return Outcome(_problem(ending))


def _quoted(text: str) -> str:
    return '"' + text.replace("\n", "\\n") + '"'


def _problem(ending: children.Ending) -> str:
    if ending.stopped:
        return "it hangs"
    if ending.crash or ending.value is None:
        return ending.crash or str(ending.problem)
    return ending.value.raw


def _uses(name: str, rng: random.Random, folder: Path) -> Outcome:
    del rng
    secret = folder / "secret.toml"
    secret.write_text(study_runs.TINY.replace("SEEDS", "0").replace("epochs = 3", "epochs = 77"))
    library = Path(children.PACKAGE) / "studies" / "specs"
    name = str(folder / "secret") if name == "SECRET" else os.path.relpath(folder / "secret", library)
    text = f"uses = {_quoted(name)}\n" + study_runs.TINY
    for section in ("members", "optimisation"):
        start = text.index(f"[{section}]")
        text = text[:start] + text[text.index("\n[", start) + 1 :]
    file = study_runs.write_tiny(folder, seeds=1, text=text)
    ending = children.call(study_runs.invoke, ["study", "show", str(file)], folder, limit=60)
    problem = _problem(ending)
    if ending.value is not None and "77" in ending.value.output:
        problem = "settings of a file outside of the library were read"
    return Outcome(problem)


@dataclass(frozen=True)
class Kind:
    """Something to write to that is no new regular file."""

    make: Callable[[Path], None]
    mode: Callable[[int], bool]


def _link(path: Path) -> None:
    (path.parent / "aim").write_text("old")
    path.symlink_to("aim")


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def _full_device(path: Path) -> None:
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 7))


def _null_device(path: Path) -> None:
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))


def _fifo(path: Path) -> None:
    os.mkfifo(path)


KINDS: dict[str, Kind] = {
    "a link": Kind(_link, stat.S_ISLNK),
    "a dangling link": Kind(_dangling, stat.S_ISLNK),
    "a device": Kind(_null_device, stat.S_ISCHR),
    "a full device": Kind(_full_device, stat.S_ISCHR),
    "a FIFO with a reader": Kind(_fifo, stat.S_ISFIFO),
    "a FIFO without a reader": Kind(_fifo, stat.S_ISFIFO),
    "a folder": Kind(lambda path: path.mkdir(), stat.S_ISDIR),
}


def _outputs(folder: Path) -> None:
    generator = np.random.default_rng(0)
    outputs, targets = generator.normal(size=(3, 40, 4)), generator.integers(4, size=40)
    np.savez(folder / "outputs.npz", outputs=outputs, targets=targets)
    np.save(folder / "near.npy", outputs)


def _written(options: str, name: str, rng: random.Random, folder: Path) -> Outcome:
    del rng
    _outputs(folder)
    return _kept(f"{AUDIT} {options}".split(), name, folder / options.split()[-1], folder)


def _figure(name: str, rng: random.Random, folder: Path) -> Outcome:
    del rng
    _outputs(folder)
    words = ["ood", "near.npy", "--outside", "far=near.npy", "--repeats", "10", "--figure", "target.png"]
    return _kept(words, name, folder / "target.png", folder)


def _kept(words: list[str], name: str, target: Path, folder: Path) -> Outcome:
    kind = KINDS[name]
    try:
        kind.make(target)
    except PermissionError:
        return Outcome(attempts=0)  # device nodes need rights
    if name == "a FIFO with a reader":
        threading.Thread(target=target.read_bytes, daemon=True).start()
    ending = children.call(study_runs.invoke, words, folder, limit=SECONDS)
    if name == "a FIFO with a reader" and target.exists() and stat.S_ISFIFO(target.lstat().st_mode):
        os.close(os.open(target, os.O_RDWR | os.O_NONBLOCK))  # lets a reader that nobody wrote to go on
    if not os.path.lexists(target) or not kind.mode(target.lstat().st_mode):
        return Outcome("it was replaced by a regular file")
    return Outcome("" if name.endswith("without a reader") and ending.stopped else _problem(ending))


def _read(kind: str, file: str, rng: random.Random, folder: Path) -> Outcome:
    del rng
    target = folder / file
    if kind == "a FIFO":
        os.mkfifo(target)
    else:
        target.symlink_to("/dev/zero")
    np.save(folder / "sound.npy", np.random.default_rng(0).normal(size=(3, 40, 4)))
    outputs, targets = ("sound.npy", file) if file == "targets.npy" else (file, "sound.npy")
    words = ["audit", outputs, "--task", "classification", "--kind", "logits", "--targets", targets]
    return Outcome(_problem(children.call(study_runs.invoke, words, folder, limit=SECONDS, memory=16 * 2**30)))


def _pictures(rng: random.Random, folder: Path) -> Outcome:
    del rng
    ending = children.call(_open_picture, folder)
    return Outcome(ending.crash or ending.value or "")


def _open_picture(folder: Path) -> str:
    from PIL import Image

    import dissensus as ds

    os.environ["DISSENSUS_DATA"] = str(folder / "data")
    place = folder / "data" / "waterbirds"
    place.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "secret.png")
    (place / "metadata.csv").write_text("img_id,img_filename,y,split,place\n1,../../secret.png,0,0,0\n")
    try:
        ds.data.sources.dataset("waterbirds", "train", size=8)[0]
    except ValueError:
        return ""
    return "a picture outside of the folder was read"
