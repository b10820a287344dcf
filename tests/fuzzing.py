"""Ordinary mistakes, drawn by a seed: changed specs, `--set` expressions and commands, and how each of them ends."""

import copy
import datetime
import functools
import math
import random
import re
import shutil
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import typer.testing
from safetensors.torch import save_file
from typer.testing import CliRunner

import dissensus as ds
from dissensus.cli import app
from dissensus.data import sources
from dissensus.execution import StackedMembers
from dissensus.objectives import OBJECTIVES
from dissensus.studies import datasets
from dissensus.studies.library import SPECS
from dissensus.studies.measures import MEASURES
from dissensus.studies.procedures.builtin import PROCEDURES
from dissensus.studies.registry import NETWORKS, maker
from dissensus.studies.spec import SCALES, merged, to_toml, toml_value
from dissensus.train.engine import Engine

VALUES = (
    *("", "foo", "β → ∞", "../../evil", "a b", "nan", "[red]x[/red]", "mlp", "x" * 300),
    *(True, False, 0, 1, -1, 3, 7.5, 0.5, -0.5, 10**12, 10**30, -(10**30), 1e308, math.nan, math.inf, -math.inf),
    *([], [[]], ["foo"], [1, "a"], [math.nan], [-1], [0.5, 0.5], [{}], [[1, 2], [3]], [True], [10**30]),
    *({}, {"a": 1}, {"a": {"b": []}}, {"cpu": "x"}, {"seed": 3}),
    datetime.date(1979, 5, 27),
)
"""Values of all types of TOML, at the edges of their ranges."""
KEYS = ("", "β", "foo", "a b", "seed", "name", "options", "methods", "network", "loss", "data", "measures", "x" * 200)


WORDS = (
    *datasets.NAMES[:60:3],
    *("digits", "diabetes", "made-images", "made-table", "made-folder", "made-groups", "friedman", "audit-design"),
    *NETWORKS,
    *("heads", "masksembles", "mc-dropout", "timm:resnet18", "torchvision:resnet18"),
    *OBJECTIVES,
    *PROCEDURES,
    *("cross_entropy", "mse", "brier", "zero_one", "gaussian_nll", "probability", "score", "vote"),
    *MEASURES,
    *("codependence_0.2", "accuracy_pgd_0.1", "auroc_mean_energy_corrupted-1", "gap", "standard_0.1", "soup_accuracy"),
    *("features_similarity", "transfer_pgd_0.1", "worst_group_accuracy", "equivalent_alpha", "seconds_per_epoch"),
    *("adamw", "sgd", "flips", "crops", "corrupted-1", "unseen", "validation", "confidence-below-0.5", "none", "fgsm"),
    *("collusion/figure-2", "adp/table-1", "ldr/table-1", "beta", "method", "seed", "members", "greater", "last"),
)
"""Words that are right somewhere."""


@dataclass(frozen=True)
class Mistake:
    """A command, the files that it needs, and the words of which its message must have one."""

    arguments: tuple[str, ...]
    words: frozenset[str] = frozenset()
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a command ended: ``"ok"``, ``"training"``, ``"refused"``, ``"unclear"`` or ``"traceback"``."""

    kind: str
    code: int | None
    message: str
    error: BaseException | None = None


class TrainingReached(Exception):
    """Raised in place of a training: everything before it has passed."""


# How a command ends


def outcome(mistake: Mistake, folder: Path) -> Outcome:
    """Run a command in this process, and judge its end."""
    for name, content in mistake.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    result = CliRunner().invoke(app, list(mistake.arguments))
    message = " ".join(result.stderr.split())
    if isinstance(result.exception, TrainingReached):
        return Outcome("training", None, message)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return Outcome("traceback", None, message, result.exception)
    if result.exit_code in (0, 3) or "not whole" in result.stdout:  # as `data check` says of files
        return Outcome("ok", result.exit_code, message)
    return Outcome("refused" if _is_clear(result, mistake) else "unclear", result.exit_code, message)


_KEY = re.compile(r"key'?[a-z_]+|of'[a-z_.]+'|'members\\.options|section'objective'")


def _is_clear(result, mistake: Mistake) -> bool:
    """Whether an error is one message that names the key, the flag or the file."""
    plain = "".join(c for c in result.stderr if c not in "│╭╰─╮╯ \n")
    if "Traceback" in result.stderr or result.exit_code not in (1, 2):
        return False
    is_usage = result.exit_code == 2 and ("Usage" in result.stderr or "─ Error ─" in result.stderr)
    if not is_usage and len(re.findall("^error:", result.stderr, re.MULTILINE)) != 1:
        return False
    names_a_key = (
        mistake.files and any(name.split("/")[-1][:-5] in plain for name in mistake.files) and _KEY.search(plain)
    )
    return is_usage or bool(names_a_key) or any(word.replace(" ", "") in plain for word in mistake.words)


def stop_before_training(monkeypatch) -> None:
    """Let trainings end before their first step, and downloads before their first byte."""

    def stop(*args, **kwargs):
        raise TrainingReached

    monkeypatch.setattr(typer.testing, "_get_command", functools.cache(typer.testing._get_command))  # for speed
    monkeypatch.setattr(Engine, "train", stop)
    monkeypatch.setattr(StackedMembers, "_chosen_backend", lambda *args: "loop")  # nothing is measured
    monkeypatch.setattr(sources, "_fetch_from_mirrors", lambda *args: False)


# Specs

NOT_HERE = ("is not in",)
"""Words about data that is not on this machine."""
NEEDS = ("members", "optimisation", "search", "method")
"""Sections that a study inherits from the one that it uses."""


def spec_mistake(seed: int) -> Mistake:
    """A shipped study with one or two changes, as a file to show or to run."""
    draw = random.Random(f"spec {seed}")
    path = draw.choice(sorted(SPECS.rglob("*.toml")))
    paper = path.parent.name
    settings = _shipped(path)
    name = f"{paper}/changed-{seed}.toml"
    words = {f"changed-{seed}"}
    if draw.random() < 0.1:
        content = _changed_text(draw, path.read_bytes())
    else:
        changed = _at_smoke(settings) if draw.random() < 0.7 else copy.deepcopy(settings)
        touched: list[str] = []
        for _ in range(draw.choice((1, 1, 1, 2))):
            touched += _change(draw, changed)
        if touched:
            words = {word for word in touched if word} or words
        content = (to_toml(changed) + "\n").encode()
    scales = list(settings["scales"])
    scale = "smoke" if "smoke" in scales and draw.random() < 0.9 else draw.choice(SCALES)
    words |= {f"scale {scale!r}", "--scale", *NOT_HERE, *(NEEDS if "uses" in words else ())}
    command = ("study", "show", name) if draw.random() < 0.1 else ("study", "run", name, "--scale", scale)
    return Mistake(command, frozenset(words), {name: content})


@functools.cache
def _shipped(path: Path) -> dict:
    return tomllib.loads(path.read_text())


def _at_smoke(settings: dict) -> dict:
    """Settings at the smallest scale, written as if there were no scales: every change of them has an effect."""
    changed = merged(copy.deepcopy(settings), copy.deepcopy(settings["scales"].get("smoke", {})))
    return {**changed, "scales": {"smoke": {}}}


def _paths(settings: object, before: tuple = ()) -> list[tuple]:
    """Paths of all values within tables and lists, tables and lists included."""
    items = settings.items() if isinstance(settings, dict) else enumerate(settings)
    found: list[tuple] = []
    for key, value in items:
        found.append((*before, key))
        if isinstance(value, dict | list):
            found += _paths(value, (*before, key))
    return found


_WORDS_ONLY = ("expect", "scales", "title", "note", "claim", "reference", "figure", "cost")
"""Sections that change nothing that is computed."""


def _change(draw: random.Random, settings: dict) -> list[str]:
    """Make one change; the words are those of its path."""
    paths = _paths(settings)
    sections = [path for path in paths if path[0] not in _WORDS_ONLY]
    path = draw.choice(sections if draw.random() < 0.7 and sections else paths)
    place: dict | list = settings
    for part in path[:-1]:
        place = place[part]
    key, value = path[-1], place[path[-1]]
    words = [str(part) for part in path if isinstance(part, str)]
    kind = draw.choice(
        (*["value"] * 3, *["word"] * 3, "remove", "misspell", "wrap", "table", "unwrap", "add", "negate")
    )
    if kind == "word" and isinstance(value, str):
        place[key] = draw.choice(WORDS)
        words.append(place[key])
    elif kind in ("value", "word"):
        place[key] = copy.deepcopy(draw.choice(VALUES))
    elif kind == "remove":
        del place[key]
        words += [str(part) for part in _words_of(value)]
    elif kind == "misspell" and isinstance(key, str) and isinstance(place, dict):
        place.pop(key)
        other = _misspelt(draw, key)
        place[other] = value
        words.append(other)
    elif kind == "misspell":
        place[key] = _misspelt(draw, str(value))
        words.append(str(place[key]))
    elif kind == "wrap":
        place[key] = [value]
    elif kind == "table":
        place[key] = {str(draw.choice(KEYS)): value}
    elif kind == "unwrap" and isinstance(value, list) and value:
        place[key] = value[0]
    elif kind == "negate" and isinstance(value, int | float) and not isinstance(value, bool):
        place[key] = -value * draw.choice((1, 10**6, 10**20))
    elif isinstance(place, dict):
        other = draw.choice(KEYS)
        place[other] = copy.deepcopy(draw.choice(VALUES))
        words.append(other)
    else:
        place.append(copy.deepcopy(draw.choice(VALUES)))
    return words


def _words_of(value: object) -> list:
    if isinstance(value, dict):
        return [*value, *(word for inner in value.values() for word in _words_of(inner))]
    return [word for inner in value for word in _words_of(inner)] if isinstance(value, list) else []


def _misspelt(draw: random.Random, word: str) -> str:
    if not word:
        return "x"
    at = draw.randrange(len(word))
    changes = (word[:at] + word[at + 1 :], word[:at] + word[at] + word[at:], word.upper(), word + "é", word[::-1])
    return draw.choice(changes)


def _changed_text(draw: random.Random, content: bytes) -> bytes:
    """A file that an editor or a disk has damaged: doubled or broken lines, other bytes, the end cut off."""
    lines, at = content.splitlines(keepends=True), draw.randrange(len(content))
    line = draw.randrange(len(lines))
    return draw.choice(
        (
            b"".join([*lines[:line], lines[line], *lines[line:]]),
            content[:at],
            content[:at] + bytes(draw.randrange(256) for _ in range(4)) + content[at:],
            b"",
            b"\xef\xbb\xbf" + content,
            content.replace(b"=", b":", 1),
            b"x = " + b"[" * 3000,
            b"\x00" * 64,
        )
    )


# --set


def set_mistake(seed: int) -> Mistake:
    """A shipped study with settings changed by `--set`."""
    draw = random.Random(f"set {seed}")
    path = draw.choice(sorted(SPECS.rglob("*.toml")))
    settings = _shipped(path)
    at_smoke = _at_smoke(settings)
    words, expressions = set(), []
    for _ in range(draw.choice((1, 1, 1, 2))):
        key = _dotted_key(draw, at_smoke)
        value = _near_value(draw, at_smoke, key) if draw.random() < 0.4 else _set_value(draw)
        expressions += ["--set", f"{key}{draw.choice('=======+') if draw.random() < 0.1 else '='}{value}"]
        words |= {key, *key.split(".")}
    name = f"{path.parent.name}/{path.stem}"
    words = {word for word in words if word} | {"write it as name=value", *NOT_HERE}
    return Mistake(("study", "run", name, "--scale", "smoke", *expressions), frozenset(words))


EXPRESSIONS = (
    *("grid.seed=3", 'data=["foo"]', "members.network=foo", "grid.method=adp", "scales=3", "scales.smoke=4", "name=a"),
    *('name="../../evil"', "uses=../../x", "grid=1", "grid={}", "data=[]", "data=diabetes", "expect=[3]", "by_data=2"),
    *("members=3", "members.options=3", "objective.options.methods=3", 'grid.method=["foo"]', "search.space=3"),
    *("search.space.lr=3", "search.space={}", "evaluation.attacked.fgsm=x", "evaluation.strong.pgd=x", "figure=3"),
    *("optimisation.augment=flips", 'optimisation.augment=["foo"]', "optimisation.cut_at=[5]", "procedure=foo"),
    *('grid.network=["foo"]', "grid.members=[0]", "grid.lr=[nan]", "grid.seed=[-1]", "grid.seed=[1e3]", "cost=3"),
    *("grid.seed=[true]", "by_data.x.y=3", "by_data={}", "members.count=1000000000000", "members.options.width=-1"),
)


def _dotted_key(draw: random.Random, settings: dict) -> str:
    paths = [path for path in _paths(settings) if all(isinstance(part, str) for part in path)]
    effective = [path for path in paths if path[0] not in _WORDS_ONLY]
    key = ".".join(draw.choice(effective if draw.random() < 0.9 else paths))
    other = (key, key, key, key, key, f"{key}.{draw.choice(KEYS)}", _misspelt(draw, key), f"{key}.", f".{key}", "", ".")
    return draw.choice(other) if draw.random() < 0.6 else draw.choice(EXPRESSIONS).partition("=")[0]


def _near_value(draw: random.Random, settings: dict, key: str) -> str:
    """A value of the type that a key has, which may be out of its range or of no use there."""
    value: object = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return toml_value(_near(draw, value))


def _near(draw: random.Random, value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return draw.choice((value, -value, 0, 1, value * 2, value / 2, value * 10**6, [value]))
    if isinstance(value, list) and value:
        return draw.choice((value[:1], value * 2, [*value, _near(draw, value[0])], [_near(draw, value[0])], value[0]))
    return draw.choice(WORDS)


def _set_value(draw: random.Random) -> str:
    if draw.random() < 0.3:
        return draw.choice(EXPRESSIONS).partition("=")[2]
    if draw.random() < 0.3:
        word = draw.choice(WORDS)
        return draw.choice((word, toml_value([word])))
    value = draw.choice(VALUES)
    return value if isinstance(value, str) else toml_value(value)


# Commands


def make_files(folder: Path) -> None:
    """Files that commands read, right and wrong, in the working folder."""
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(3, 40, 4, generator=draw), torch.arange(40) % 4
    arrays = {
        **{"in": logits, "near": logits[:, :30] + 1, "probs": logits.softmax(-1), "labels": labels, "flat": logits[0]},
        **{"five": logits.view(3, 10, 4, 2, 2), "few": logits[:2], "none": logits[:, :0], "half": logits.half()},
        **{
            "yes": logits > 0,
            "nan": logits / (logits < 1),
            "values": labels.double(),
            "pictures": torch.rand(40, 8, 8),
        },
        **{"zero": torch.zeros(()), "complex": torch.complex(logits, logits), "bytes": labels.to(torch.uint8)},
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array.numpy())
    np.save(folder / "names.npy", np.array(["a", "b"] * 20))
    np.save(folder / "objects.npy", np.array([{"a": 1}, None], dtype=object), allow_pickle=True)
    np.savez(folder / "all.npz", outputs=logits.numpy(), targets=labels.numpy())
    np.savez_compressed(folder / "packed.npz", outputs=logits.numpy(), targets=labels.numpy())
    np.savez(folder / "pairs.npz", x=logits[0].numpy(), y=labels.numpy())
    np.savez(folder / "other.npz", predictions=logits.numpy())
    np.savez(folder / "empty.npz")
    np.savez(folder / "objects.npz", outputs=np.array([{}], dtype=object))
    np.savetxt(folder / "member.csv", logits[0].numpy(), delimiter=",")
    save_file({"outputs": logits, "targets": labels}, folder / "all.safetensors")
    junk = np.random.default_rng(0).bytes(200)
    whole = (folder / "in.npy").read_bytes()
    texts = {
        **{"junk.npy": junk, "junk.npz": junk, "junk.safetensors": junk, "junk.csv": junk, "junk.parquet": junk},
        **{"zero-bytes.npy": b"", "zero-bytes.npz": b"", "zero-bytes.csv": b"", "cut.npy": whole[:150]},
        **{"words.csv": b"a,b\nc,d\n", "ragged.csv": b"1,2\n3\n", "x.txt": b"", "note.toml": b"title = 3\n"},
        **{"cut.npz": (folder / "all.npz").read_bytes()[:300], "header.npy": whole[:8] + b"\xff\xff" + whole[10:]},
    }
    for name, content in texts.items():
        (folder / name).write_bytes(content)
    (folder / "folder.npy").mkdir()
    (folder / "empty-folder").mkdir()
    images = datasets.load_unscaled("made-images")
    ds.Ensemble(maker("mlp", images, {"width": 4, "depth": 1}), members=2, seed=0).save(folder / "kept")
    shutil.copytree(folder / "kept", folder / "damaged")
    (folder / "damaged" / "manifest.json").write_text("[]")


FILES = (
    *("in.npy", "near.npy", "probs.npy", "labels.npy", "flat.npy", "five.npy", "few.npy", "none.npy", "half.npy"),
    *("yes.npy", "nan.npy", "values.npy", "pictures.npy", "zero.npy", "complex.npy", "bytes.npy", "names.npy"),
    *("objects.npy", "all.npz", "packed.npz", "other.npz", "empty.npz", "objects.npz", "member.csv", "all.safetensors"),
    *("junk.npy", "junk.npz", "junk.safetensors", "junk.csv", "junk.parquet", "zero-bytes.npy", "zero-bytes.npz"),
    *("zero-bytes.csv", "cut.npy", "words.csv", "ragged.csv", "x.txt", "note.toml", "cut.npz", "header.npy"),
    *("folder.npy", "empty-folder", "kept", "damaged", "absent.npy", "absent/x.npy", "x.txt/y.npy", ".", ""),
    *("β.npy", "x" * 300 + ".npy", "-", "[red].npy"),
)
NUMBERS = ("0", "1", "2", "-1", "0.5", "1e400", "nan", "inf", "-inf", "", "foo", "1e3", "10", "8/0", "8/255", "0x10")
NAMES = ("foo", "", "β", "classification", "regression", "logits", "probabilities", "labels", "mse", "vote", "score")
PLACES = ("o.json", "new/o.json", "x.txt/o.json", ".", "", "o.html", "o.png", "a\x00b", "β.svg")
COMMANDS = {
    ("audit", "in.npy"): {
        "--task": ("classification", "regression", *NAMES),
        "--kind": ("logits", "probabilities", "labels", *NAMES),
        "--targets": ("labels.npy", "values.npy", *FILES),
        "--classes": ("a,b,c,d", "0,1,2,3", "", ",", "a,a,a,a", "β", "1,2"),
        "--train": ("all.npz", *FILES),
        "--in-bag": ("all", *FILES),
        "--groups": ("labels.npy", *FILES),
        "--reference": ("in.npy", *FILES),
        "--ood": ("near.npy", *FILES),
        "--loss": ("cross_entropy", "brier", "zero_one", "mse", *NAMES),
        "--pool": ("probability", "score", "vote", *NAMES),
        "--json": PLACES,
        "--fail-on": ("healthy", *NAMES),
    },
    ("ood", "in.npy"): {
        "--outside": ("near=near.npy", "near.npy", "=x", "a=", *(f"b={file}" for file in FILES), *FILES),
        "--kind": ("logits", "probabilities", *NAMES),
        "--false-alarms": ("0.05", *NUMBERS),
        "--repeats": ("5", *NUMBERS),
        "--json": PLACES,
        "--pictures": ("within=pictures.npy", *(f"within={file}" for file in FILES), "far=in.npy"),
        "--gallery": ("g.png", *PLACES),
    },
    ("report", "in.npy"): {
        "--data": ("pairs.npz", *FILES),
        "--kind": ("logits", "probabilities", *NAMES),
        "--model": ("absent:f", "json:loads", "json", ":", "os.path:absent", "", "β:γ"),
        "--target": NAMES,
        "--drop": NAMES,
        "--shifted": ("near.npy", "a=near.npy", "=x", *(f"b={file}" for file in FILES)),
        "--training": ("all.npz", *FILES),
        "--task": ("classification", "regression", *NAMES),
        "--loss": ("cross_entropy", "brier", "gaussian_nll", "quantile", "mse", *NAMES),
        "--levels": ("0.1,0.5,0.9", "", "x", "0.9,0.1", "nan"),
        "--pool": ("probability", "score", "vote", *NAMES),
        "--names": ("a,b,c,d", "", ",", "a,a,a,a", "1,2"),
        "--examples": ("2", *NUMBERS),
        "--image-size": ("8", *NUMBERS),
        "--batch-size": ("8", *NUMBERS),
        "--device": ("cpu", "cuda", "meta", *NAMES),
        "--page": ("o.html", *PLACES),
        "--json": PLACES,
        "--fail-on": ("problems", *NAMES),
    },
    ("robust",): {
        "--ensemble": ("kept", *FILES),
        "--network": ("mlp", "cnn", "resnet20", "heads", "masksembles", "timm:x", "torchvision:x", *NAMES),
        "--data": ("made-images", "digits", "diabetes", "audit-sizes", "friedman", "made-folder", "mnist", *NAMES),
        "--epsilon": ("0.1", "8/255", *NUMBERS),
        "--suite": ("quick", *NAMES),
        "--attack": ("mim", "jsma", *NAMES),
        "--norm": ("linf", "l2", *NAMES),
        "--pool": ("probability", "score", "vote", *NAMES),
        "--examples": ("2", *NUMBERS),
        "--batch-size": ("2", *NUMBERS),
        "--option": ("width=4", "depth=1", "width=foo", "widths=3", "x", "=", "width=[1]", "depth=-1", "width=1e9"),
        "--surrogate": ("kept", *FILES),
        "--trained-on": ("10", *NUMBERS),
        "--split-seed": NUMBERS,
        "--seed": NUMBERS,
        "--device": ("cpu", "cuda", "meta", "cuda:99", *NAMES),
        "--folder": ("kept-parts", *FILES),
        "--json": PLACES,
    },
    ("tune",): {
        "": ("pairs.npz", *FILES),
        "--space": ("beta=0.5", "beta=0..1", "beta", "beta=", "=", "bta=1", "seed=0,1", "beta=1..0", "lr=0..1:log"),
        "--epochs": ("1", *NUMBERS),
        "--splits": ("1", *NUMBERS),
        "--seeds": ("1", *NUMBERS),
        "--examples": ("40", *NUMBERS),
        "--objective": ("augmented", "adp", "absent:f", *NAMES),
        "--task": ("classification", "regression", *NAMES),
        "--metric": ("loss", "accuracy", "rmse", *NAMES),
        "--loss": ("cross_entropy", "mse", *NAMES),
        "--pool": ("probability", "score", "vote", *NAMES),
        "--lr": ("0.01", *NUMBERS),
        "--validation": ("0.2", *NUMBERS),
        "--test": ("0.2", *NUMBERS),
        "--factor": ("3", *NUMBERS),
        "--budget": ("2", *NUMBERS),
        "--device": ("cpu", "cuda", "meta", *NAMES),
        "--page": ("o.html", *PLACES),
        "--json": PLACES,
    },
    ("masks",): {
        "--network": ("mlp", "cnn", "vgg", "resnet18", "vanilla-cnn", "mobilenet-v2", *NAMES),
        "--count": ("4", *NUMBERS),
        "--budget": ("1.5", *NUMBERS),
        "--cost": ("parameters", "multiply_adds", *NAMES),
        "--size": ("8", "32", *NUMBERS),
        "--figure": PLACES,
    },
    ("data", "get"): {"": ("digits", "mnist", "made-images", *NAMES)},
    ("data", "check"): {"": ("digits", "mnist", "made-images", *NAMES)},
    ("study", "list"): {"": ("adp", "ldr", *NAMES)},
    ("study", "show"): {"": ("adp/table-1", "table-1", "ldr/table-99", "note.toml", "adp", *FILES)},
    ("study", "run"): {
        "": ("collusion/figure-15", "adp/table-1", "note.toml", "ldr/figure-2", *FILES),
        "--scale": ("smoke", "huge", "laptop", *NAMES),
        "--set": EXPRESSIONS,
        "--jobs": NUMBERS,
        "--device": ("cpu", "cuda", "foo"),
        "--cluster": ("", "slurm", *NAMES),
        "--address": ("", "head:6379", *NAMES),
    },
    ("study", "report"): {
        "": ("ldr/figure-2", "foo", *FILES),
        "--out": PLACES,
        "--figures": ("figures", "x.txt", ""),
        "--format": ("svg", *NAMES),
    },
}
"""Commands with their options, and values of each; the first ones are right."""
NEEDED = ("--task", "--outside", "--ensemble", "--network", "--data", "--epsilon", "--suite", "--examples", "--targets")
NEEDED = (
    *NEEDED,
    "--repeats",
    "--option",
    "--space",
    "--epochs",
    "--splits",
    "--seeds",
    "--scale",
    "--kind",
    "",
    "--cost",
    "--size",
)


def command_mistake(seed: int) -> Mistake:
    """A command with a few options right and a few wrong."""
    draw = random.Random(f"command {seed}")
    start = draw.choice([*COMMANDS, *[key for key in COMMANDS if len(key) == 1 or key[1] == "in.npy"]])
    options = COMMANDS[start]
    arguments = list(start)
    if arguments[-1] == "in.npy" and draw.random() < 0.4:
        arguments[-1] = draw.choice(FILES)
    for option, values in options.items():
        if draw.random() < (0.97 if option in NEEDED else 0.12) or start == ("study", "report"):  # of all takes long
            value = values[0] if draw.random() < 0.7 else draw.choice(values)
            arguments += [option, value] if option else [value]
    if draw.random() < 0.05:
        arguments.append(draw.choice(("--foo", "--json", "-x", "--", "")))
    words = {word for word in arguments[1:] if word}
    words |= {part for word in words for part in re.split("[=:]", word) if part} | {repr(word)[1:-1] for word in words}
    words |= {
        "--targets",
        "--kind",
        "`outputs`",
        "NAME",
        "there is no study",
        *NOT_HERE,
        *(["."] if "" in arguments else []),
    }
    return Mistake(tuple(arguments), frozenset(words))


KINDS = {"spec": spec_mistake, "set": set_mistake, "command": command_mistake}
