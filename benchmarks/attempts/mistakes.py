"""Ordinary mistakes in specs, settings and commands: a sentence, never a traceback."""

import functools
import json
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dissensus as ds
from attempts import children, study_runs
from attempts.cases import Case, Outcome, Settings

SENTENCE = "the command works, or fails with a sentence and no traceback"
SECONDS = 20.0
"""A command that works for longer has accepted what it was given."""
MEMORY = 12 * 2**30
VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 3, 10**6, 0.5, -0.5, 1e9, 1e-12, float("nan"), float("inf")),
    *(True, False, "", "x", "foo", "mse", "mlp", "seed", "../x", "ä\u0000", [], [0], [[1]], ["foo"], [1, "a"], [None]),
    *({}, {"a": 1}, {"beta": []}, [{"a": 1}], [0.0, 0.0], "0", "none", [float("nan")], {"": 1}),
)
SECTIONS = (
    "members",
    "objective",
    "grid",
    "optimisation",
    "search",
    "evaluation",
    "figure",
    "scales",
    "by_data",
    "cost",
)
KEYS = (
    *(
        "members.network",
        "members.count",
        "members.options",
        "members.options.width",
        "objective.name",
        "objective.loss",
    ),
    *("objective.pool", "objective.options", "grid.beta", "grid.seed", "grid.lr", "grid.foo", "grid.members", "grid"),
    *("optimisation.epochs", "optimisation.lr", "optimisation.batch_size", "optimisation.optimizer", "data", "name"),
    *("optimisation.validation", "optimisation.patience", "optimisation.keep", "optimisation.augment", "procedure"),
    *(
        "optimisation.examples",
        "optimisation.cut_at",
        "evaluation.measures",
        "evaluation.test_fraction",
        "search.trials",
    ),
    *(
        "evaluation.attacked",
        "evaluation.examples",
        "evaluation.curves",
        "figure.x",
        "expect",
        "uses",
        "by_data",
        "cost",
    ),
    *("foo", "foo.bar", "members", "grid.seed.0", "scales", "title", "optimisation.momentum", "search.space.lr"),
)


def specs(settings: Settings) -> Iterator[Case]:
    """Mutated files of studies."""
    del settings
    yield Case("values, run", SENTENCE, functools.partial(_spec, "run", _changed_value))
    yield Case("keys, run", SENTENCE, functools.partial(_spec, "run", _changed_key))
    yield Case("text, run", SENTENCE, functools.partial(_spec, "run", None))
    yield Case("values, show", SENTENCE, functools.partial(_spec, "show", _changed_value))
    yield Case("values in the library, run", SENTENCE, functools.partial(_library_spec, _changed_value))
    yield Case("keys in the library, run", SENTENCE, functools.partial(_library_spec, _changed_key))


def sets(settings: Settings) -> Iterator[Case]:
    """Expressions of `--set`."""
    del settings
    yield Case("one expression", SENTENCE, functools.partial(_set, 1))
    yield Case("two expressions", SENTENCE, functools.partial(_set, 2))
    yield Case("one expression, studies of the library", SENTENCE, _library_set)


def commands(settings: Settings) -> Iterator[Case]:
    """Mutated commands."""
    del settings
    for name in COMMANDS:
        yield Case(name, SENTENCE, functools.partial(_command, name))


def _judged(words: list[str], folder: Path, what: str, limit: float = SECONDS) -> Outcome:
    ending = children.call(study_runs.invoke, words, folder, limit=limit, memory=MEMORY)
    if ending.stopped:
        return Outcome(counts={"still working": 1})
    if ending.crash or ending.value is None:
        return Outcome(f"{what}: {ending.crash or ending.problem or 'no result'}")
    called = ending.value
    if called.raw:
        return Outcome(f"{what}: {called.raw}")
    if called.code and not called.output.strip():
        return Outcome(f"{what}: fails without a word")
    return Outcome(counts={"refused" if called.code else "accepted": 1})


def _paths(settings: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    paths = []
    for key, value in settings.items():
        paths.append((*prefix, key))
        if isinstance(value, dict):
            paths += _paths(value, (*prefix, key))
    return paths


def _changed_value(settings: dict[str, Any], rng: random.Random) -> str:
    *path, last = rng.choice(_paths(settings))
    place = functools.reduce(lambda inner, key: inner[key], path, settings)
    place[last] = _near(place[last], rng) if rng.random() < NEAR else _any_value(rng)
    return f"{'.'.join([*path, last])} = {str(place[last])[:40]}"


NEAR = 0.7
"""Share of values that are replaced by others of the same type, which no check of types refuses."""


def _any_value(rng: random.Random) -> Any:
    return rng.choice([value for value in VALUES if value is not None])


def _near(value: Any, rng: random.Random) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([0, 1, 2, -1, 10**6, 2**70])
    if isinstance(value, float):
        return rng.choice([0.0, -1.0, 1.0, 1e-300, 1e300, float("nan"), float("inf")])
    if isinstance(value, str):
        return rng.choice([value.upper(), value[:-1], value + "x", "", "a/b", "..", "error", "abalone", *NAMES])
    if isinstance(value, list):
        longer = [*value, _any_value(rng)]
        return rng.choice(
            [[], value * 2, longer, value[:1], [value], [_near(item, rng) for item in value], [_any_value(rng)]]
        )
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        others = {name: item for name, item in value.items() if name != key}
        other_name = rng.choice([*NAMES, "", key + "x"])
        return rng.choice([{}, others, {**value, other_name: _any_value(rng)}, {**value, key: _near(value[key], rng)}])
    return {rng.choice(NAMES): _any_value(rng)}


NAMES = (
    *(
        "mlp",
        "cnn",
        "resnet20",
        "masksembles",
        "mc-dropout",
        "heads",
        "methods",
        "mse",
        "cross_entropy",
        "zero_one",
        "vote",
    ),
    *(
        "joint",
        "adp",
        "a2d",
        "divdis",
        "ldr",
        "independent",
        "digits",
        "made-images",
        "diabetes",
        "beta",
        "seed",
        "width",
    ),
    *(
        "strength",
        "members",
        "method",
        "network",
        "codependence_0.2",
        "accuracy",
        "auroc",
        "gap",
        "train",
        "ood",
        "attack",
    ),
)
"""Words that mean something elsewhere."""


def _changed_key(settings: dict[str, Any], rng: random.Random) -> str:
    *path, last = rng.choice(_paths(settings))
    place = functools.reduce(lambda inner, key: inner[key], path, settings)
    value, kind = place.pop(last), rng.randrange(3)
    if kind == 0:
        return f"{last} is gone"
    name = rng.choice([last + "s", last.upper(), *SECTIONS]) if kind == 1 else last
    if kind == 1:
        place[name] = value
    else:
        place[rng.choice(SECTIONS)], place[name] = value, value
    return f"{'.'.join([*path, last])} changed to {name}, {kind}"


def _changed_text(text: str, rng: random.Random) -> bytes:
    content = bytearray(text.encode())
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(content))
        kind = rng.randrange(4)
        if kind == 0:
            del content[place : place + rng.randint(1, 30)]
        elif kind == 1:
            content[place:place] = rng.choice([b"\xff", b"\x00", b"[", b'"', b"=", b"\n", b"1", b"-", b"{}"])
        elif kind == 2:
            content[place] = rng.randrange(256)
        else:
            lines = bytes(content).split(b"\n")
            rng.shuffle(lines)
            content = bytearray(b"\n".join(lines))
    return bytes(content)


def _spec(command: str, change: Any, rng: random.Random, folder: Path) -> Outcome:
    file = study_runs.write_tiny(folder, seeds=1)
    if change is None:
        file.write_bytes(_changed_text(file.read_text(), rng))
        what = "changed text"
    else:
        settings = tomllib.loads(file.read_text())
        what = change(settings, rng)
        file.write_text(_toml(settings))
    words = ["study", command, str(file), *(["--scale", "smoke"] if command == "run" else [])]
    return _judged(words, folder, what)


LIBRARY = children.PACKAGE / "studies" / "specs"
LIBRARY_SECONDS = 8.0


def _library_spec(change: Any, rng: random.Random, folder: Path) -> Outcome:
    """A study of the library with one or two changes, some of them in its smallest scale."""
    base = rng.choice(sorted(LIBRARY.glob("*/*.toml")))
    settings = tomllib.loads(base.read_text())
    smallest = settings.get("scales", {}).get("smoke", {})
    whats = [change(smallest if smallest and rng.random() < 0.5 else settings, rng) for _ in range(rng.randint(1, 2))]
    file = folder / base.parent.name / base.name
    file.parent.mkdir()
    file.write_text(_toml(settings))
    what = f"{base.parent.name}/{base.stem}: {' and '.join(whats)}"
    return _judged(["study", "run", str(file), "--scale", "smoke"], folder, what, LIBRARY_SECONDS)


def _library_set(rng: random.Random, folder: Path) -> Outcome:
    base = rng.choice(sorted(LIBRARY.glob("*/*.toml")))
    name, expression = f"{base.parent.name}/{base.stem}", f"{rng.choice(KEYS)}={_value_text(rng)}"
    words = ["study", "run", name, "--scale", "smoke", "--set", expression]
    return _judged(words, folder, f"{name}: {expression}", LIBRARY_SECONDS)


def _toml(settings: dict[str, Any]) -> str:
    return "\n".join(f"{_key(key)} = {_inline(value)}" for key, value in settings.items()) + "\n"


def _key(key: str) -> str:
    return json.dumps(key)


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_inline(item) for item in value if item is not None) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else str(value)


def _set(number: int, rng: random.Random, folder: Path) -> Outcome:
    file = study_runs.write_tiny(folder, seeds=1)
    words = ["study", "run", str(file), "--scale", "smoke"]
    expressions = [f"{rng.choice(KEYS)}={_value_text(rng)}" for _ in range(number)]
    for expression in expressions:
        words += ["--set", expression]
    return _judged(words, folder, " and ".join(expressions)[:80])


def _value_text(rng: random.Random) -> str:
    value = _any_value(rng) if rng.random() < 0.5 else rng.choice(NAMES)
    value = [value] if rng.random() < 0.2 else value
    return value if isinstance(value, str) else _inline(value)


COMMANDS: dict[str, str] = {
    "audit": "audit outputs.npz --task classification --kind logits --json out.json",
    "audit with more": "audit outputs.npy --task classification --kind logits --targets targets.npy "
    "--groups groups.npy --reference outputs.npy --ood outputs.npy --loss brier --pool score",
    "masks": "masks --network resnet20 --count 4 --budget 2.0 --cost parameters --size 32",
    "ood": "ood outputs.npy --outside far=far.npy --kind logits --repeats 20 --json out.json --figure out.png",
    "robust": "robust --ensemble saved --network resnet20 --data digits --suite quick --epsilon 0.1 --examples 4 "
    "--batch-size 4",
    "study run": "study run specs/collusion/tiny.toml --scale smoke --jobs 1 --device cpu",
    "study show": "study show collusion/figure-2",
    "study list": "study list collusion",
    "study report": "study report ldr/table-1 --out page.html --figures figures --format png",
    "data check": "data check digits",
}
WORDS = (
    *("", "x", "-1", "0", "1e99", "nan", "inf", "../..", "/", "/dev/null", ".", "empty", "junk", "folder", "absent"),
    *("outputs.npy", "targets.npy", "outputs.npz", "text.csv", "header.npy", "complex.npy", "a=b", "=", "ä", "--help"),
    *(
        "--json",
        "--page",
        "--seed",
        "--foo",
        "-v",
        "true",
        "logits",
        "labels",
        "regression",
        "vote",
        "empty.npz",
        "saved",
    ),
    *(
        "page.html",
        "out.pdf",
        "out.exe",
        "99999999999999999999",
        "1,2,3",
        "[1]",
        "within=outputs.npy",
        "float8.safetensors",
    ),
)


def _command(name: str, rng: random.Random, folder: Path) -> Outcome:
    made = children.call(_workplace, folder)
    if made.problem or made.crash:
        raise RuntimeError(str(made.problem or made.crash))
    words = COMMANDS[name].split()
    for _ in range(rng.randint(1, 2)):
        values = [i for i, word in enumerate(words) if i and not word.startswith("-")]
        place = rng.choice(values) if values and rng.random() < NEAR else rng.randrange(1, len(words))
        kind = 2 if place in values and rng.random() < NEAR else rng.randrange(4)
        if kind == 0:
            del words[place]
        elif kind == 1:
            words.insert(place, rng.choice(WORDS))
        elif kind == 2:
            words[place] = rng.choice(WORDS)
        else:
            other = rng.randrange(1, len(words))
            words[place], words[other] = words[other], words[place]
        if len(words) < 2:
            break
    return _judged(words, folder, f"dissensus {' '.join(words)}"[:160])


def _workplace(folder: Path) -> None:
    """Files that commands read, sound ones and others."""
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    outputs, targets = generator.normal(size=(3, 40, 4)), generator.integers(4, size=40)
    study_runs.write_tiny(folder, seeds=1)
    np.save(folder / "outputs.npy", outputs)
    np.save(folder / "far.npy", outputs * 0.3)
    np.save(folder / "targets.npy", targets)
    np.save(folder / "groups.npy", targets // 2)
    np.save(folder / "complex.npy", outputs.astype(np.complex64))
    np.savez(folder / "outputs.npz", outputs=outputs, targets=targets)
    np.savez(folder / "empty.npz")
    content = bytearray((folder / "outputs.npy").read_bytes())
    content[content.index(b"(3, 40") : content.index(b"(3, 40") + 6] = b"(-3,40"
    (folder / "header.npy").write_bytes(content)
    (folder / "text.csv").write_text("a,b\n1,2\nx,y,z\n")
    (folder / "junk").write_bytes(generator.bytes(300))
    (folder / "float8.safetensors").write_bytes(_float8())
    (folder / "empty").touch()
    (folder / "folder").mkdir()
    ds.Ensemble(functools.partial(ds.nets.resnet20, 10, 1), 1, backend="loop").save(folder / "saved")


def _float8() -> bytes:
    header = json.dumps({"outputs": {"dtype": "F8_E4M3", "shape": [1, 2, 2], "data_offsets": [0, 4]}}).encode()
    return len(header).to_bytes(8, "little") + header + b"\x00" * 4
