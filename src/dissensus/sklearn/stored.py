"""Estimators as files: weights as safetensors, everything else as JSON."""

import dataclasses
import json
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dissensus import checks, storage
from dissensus.conformal import Conformal
from dissensus.ensemble import Ensemble
from dissensus.sklearn.columns import Columns
from dissensus.sklearn.training import builder
from dissensus.train import History

RECORD, WEIGHTS = "estimator.json", "ensemble"
FORMATS = storage.Formats(newest=1)
ARRAYS = ("classes_", "y_mean_", "y_scale_", "feature_names_in_")
"""Fitted attributes that are arrays."""
PLAIN = ("multilabel_", "flat_y_", "n_outputs_", "n_features_in_", "n_iter_", "seed_", "temperature_", "architecture_")
"""Fitted attributes that JSON holds as they are."""


def write(path: str | Path, estimator: Any) -> None:
    """Save a fitted estimator into a folder."""
    folder = checks.path("path", path)
    estimator.ensemble_.save(folder / WEIGHTS)
    fitted = vars(estimator)
    history = {name: value for name, value in vars(estimator.history_).items() if name not in ("twin", "twin_history")}
    content = {
        "format": FORMATS.newest,
        "class": type(estimator).__name__,
        "params": {name: _encoded(name, value) for name, value in estimator.get_params(deep=False).items()},
        "fitted": {name: fitted[name] for name in PLAIN if name in fitted},
        "outputs": {name: _encoded(name, value) for name, value in fitted.get("outputs_", {}).items()},
        "arrays": {name: _array_record(name, fitted[name]) for name in ARRAYS if name in fitted},
        "columns": estimator.columns_.record(),
        "conformal": None if estimator.conformal_ is None else estimator.conformal_.record(),
        "history": json.loads(json.dumps(history)),
        "weights": storage.file_digest(folder / WEIGHTS / storage.MANIFEST),
    }
    storage.write_record(folder / RECORD, content)


def read(path: str | Path, cls: Any, functions: Mapping[str, Any], device: str | None) -> Any:
    """Load a fitted estimator of a class from a folder."""
    folder = checks.path("path", path)
    if not (folder / RECORD).is_file():
        raise storage.StorageError(f"{folder} holds no {RECORD}; is it a folder that an estimator was saved to?")
    record = storage.read_record(folder / RECORD, FORMATS)
    if record["class"] != cls.__name__:
        raise storage.StorageError(
            f"{folder} holds an {record['class']}: use dissensus.sklearn.{record['class']}.load."
        )
    if storage.file_digest(folder / WEIGHTS / storage.MANIFEST) != record["weights"]:
        raise storage.StorageError(
            f"the weights in {folder} are not those that {RECORD} was saved with. Save it again."
        )
    params = {name: _decoded(value) for name, value in record["params"].items()}
    for name, value in record["params"].items():
        params[name] = _with_function(name, value, params[name], functions.get(name))
    estimator = cls(**params)
    if device is not None:
        estimator.device = device
    arrays = {name: _array(entry) for name, entry in record["arrays"].items()}
    columns = Columns.of_record(record["columns"])
    vars(estimator).update({**record["fitted"], **arrays, "columns_": columns})
    if record.get("outputs"):  # earlier files have none
        estimator.outputs_ = {name: _decoded(value) for name, value in record["outputs"].items()}
    estimator.conformal_ = None if record["conformal"] is None else Conformal.of_record(record["conformal"])
    known = {field.name for field in dataclasses.fields(History)}
    estimator.history_ = History(**{name: value for name, value in record["history"].items() if name in known})
    build = builder(estimator.module, columns.width, estimator._outputs(), estimator.hidden)
    ensemble = Ensemble.load(folder / WEIGHTS, build)
    estimator.ensemble_ = ensemble.to(checks.device("device", estimator.device))
    return estimator


def _with_function(name: str, entry: Any, value: Any, function: Any) -> Any:
    """A setting, or the function that was given again for it."""
    if not (isinstance(entry, dict) and "function" in entry):
        if function is not None:
            checks.refuse(name, f"be left out: it was saved ({value!r})", repr(function))
        return value
    if function is None:
        fix = f"Pass load(path, {name}=...)."
        checks.refuse(name, "be given again, since functions are not saved", f"nothing for {entry['function']!r}", fix)
    return function


def _encoded(name: str, value: Any) -> Any:
    """A setting as JSON holds it."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        return {"pairs": [[_encoded(name, key), _encoded(name, entry)] for key, entry in value.items()]}
    if isinstance(value, tuple | list | np.ndarray):
        return {"tuple": [_encoded(name, entry) for entry in value]}
    if name == "random_state":
        return None
    if callable(value):
        return {"function": getattr(value, "__qualname__", type(value).__name__)}
    checks.refuse(name, "be numbers, texts, lists or a function to be saved", repr(value), error=TypeError)


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "pairs" in value:
        return {_decoded(key): _decoded(entry) for key, entry in value["pairs"]}
    return tuple(map(_decoded, value.get("tuple", ())))


def _array_record(name: str, array: np.ndarray) -> dict[str, Any]:
    values = array.tolist()
    if array.dtype.kind not in "biufUO" or any(not isinstance(value, bool | int | float | str) for value in values):
        checks.refuse(name, "hold numbers, truth values or texts to be saved", str(array.dtype), error=TypeError)
    return {"dtype": array.dtype.str, "values": values}


def _array(entry: Mapping[str, Any]) -> np.ndarray:
    return np.array(entry["values"], dtype=np.dtype(entry["dtype"]))
