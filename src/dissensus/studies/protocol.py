"""How a run differs from the paper's setting: its data, networks, training and subsets.

A statement of a paper is about what the paper did. Runs on other data, with other networks, with less training or on a
subset are reduced settings. The number of seeds does not count: it decides how sure a verdict is, not what it is about.
Neither do fewer points of the grid, on axes that statements name.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dissensus.studies.spec import Expectation, merged, toml_value

_ALL = "all"
_COMPARED: Mapping[str, Sequence[str]] = {
    "members": ("network", "count", "options"),
    "objective": ("name", "loss", "pool", "options"),
    "optimisation": (
        "examples",
        "epochs",
        "batch_size",
        "optimizer",
        "lr",
        "momentum",
        "weight_decay",
        "cut_at",
        "cut",
        "patience",
        "validation",
        "keep",
        "augment",
    ),
    "search": ("trials", "space", "validation", "epochs", "patience"),
    "evaluation": ("examples", "test_fraction", "attacked", "strong"),
}
"""Sections and keys that decide what a statement is about."""
_NAMES = {
    ("optimisation", "examples"): "training examples",
    ("evaluation", "examples"): "test examples",
    ("members", "count"): "members",
    ("search", "trials"): "trials of the search",
}


def named_axes(statements: Sequence[Expectation]) -> set[str]:
    """Axes of the grid on which every statement names its points."""
    axes = [set(statement.at) for statement in statements if statement.measure]
    return set.intersection(*axes) if axes else set()


def differences(run: Mapping[str, Any], paper: Mapping[str, Any], data: str, named: Collection[str] = ()) -> list[str]:
    """Differences between a run and the paper's setting on one of the run's data sets, each in a few words.

    Args:
        run: Plain settings of the run.
        paper: Plain settings of the study at scale paper.
        data: The data set.
        named: Axes of the grid on which every statement names its points, so that other points do not count.

    >>> run = {"data": ["digits"], "optimisation": {"epochs": 8}}
    >>> differences(run, {"data": ["cifar10"], "optimisation": {"epochs": 80}}, "digits")
    ['digits instead of cifar10', '8 of 80 epochs']
    """
    found: list[str] = []
    shown = [name for name in paper.get("data", []) if name not in paper.get("beside", [])]
    if data not in shown:
        found.append(f"{data} instead of {', '.join(shown) or 'what the paper shows'}")
    ours, theirs = (_on_data(settings, data) for settings in (run, paper))
    changed = [key for key in ("procedure", "uses") if ours.get(key) != theirs.get(key)]
    found += [_word(key, ours.get(key), theirs.get(key)) for key in changed]
    found += _grid_differences(ours.get("grid", {}), theirs.get("grid", {}), named)
    for section, keys in _COMPARED.items():
        a, b = ours.get(section) or {}, theirs.get(section) or {}
        for key in keys:
            left, right = a.get(key), b.get(key)
            if key == "options":
                left, right = (_options(value, run) for value in (left, right))
            if left != right:
                found += _in_words(section, key, left, right)
    return found


def _grid_differences(run: Mapping[str, Any], paper: Mapping[str, Any], named: Collection[str]) -> list[str]:
    """Axes that only one of the grids has, and other values on axes that statements leave open."""
    found: list[str] = []
    for axis in {**paper, **run}:
        ours, theirs = run.get(axis), paper.get(axis)
        if axis in ("seed", "split_seed") or ours == theirs:
            continue
        if ours is None or theirs is None or axis not in named:
            found.append(_word(axis, ours, theirs))
    return found


def _on_data(settings: Mapping[str, Any], data: str) -> Mapping[str, Any]:
    return merged(dict(settings), settings.get("by_data", {}).get(data, {}))


def _options(options: Any, run: Mapping[str, Any]) -> dict[str, Any]:
    """Options of members or of an objective; of methods those that the run has."""
    plain = dict(options or {})
    names = run.get("grid", {}).get("method")
    if names is not None and isinstance(plain.get("methods"), Mapping):
        plain["methods"] = {name: method for name, method in plain["methods"].items() if name in names}
    return plain


def _in_words(section: str, key: str, ours: Any, theirs: Any) -> list[str]:
    if key == "options":
        changed = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        return [_word(name, ours.get(name), theirs.get(name)) for name in changed]
    name = _NAMES.get((section, key), key.replace("_", " "))
    counts = isinstance(ours, int) and isinstance(theirs, int) and not isinstance(ours, bool)
    if key in ("examples", "epochs", "trials") and (counts or theirs is None) and ours is not None:
        return [f"{ours:,} of {f'{theirs:,}' if theirs is not None else _ALL} {name}"]
    return [_word(name, ours, theirs)]


def _word(name: str, ours: Any, theirs: Any) -> str:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        changed = [key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)]
        return f"other {name} ({', '.join(map(str, changed))})"
    return f"{name.replace('_', ' ')} {_value(ours)} instead of {_value(theirs)}"


def _value(value: Any) -> str:
    if value is None or value in ([], {}):
        return "none"
    return value if isinstance(value, str) else toml_value(value)
