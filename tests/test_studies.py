"""Studies: folders that are determined, resumed and locked; measures from kept outputs; the page and the commands."""

import dataclasses
import importlib
import json
import math
import multiprocessing
import os
import re
import shlex
import signal
import statistics
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import smoke_golden
import torch
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from dissensus import metrics
from dissensus.cli import app
from dissensus.data import augment, sources
from dissensus.data.folders import ImageFiles
from dissensus.data.splits import Split
from dissensus.pages import html
from dissensus.studies import datasets, library, measures, spec, workers
from dissensus.studies import page as study_page
from dissensus.studies import run as runner
from dissensus.studies.figures import figures
from dissensus.studies.procedures import methods, search, train
from dissensus.studies.procedures.training import curve_value
from dissensus.studies.results import Provenance
from dissensus.studies.run_folders import SHIPPED, folder_of, read_report
from dissensus.studies.summary import summarise
from dissensus.studies.validation import check, missing

STUDY = "collusion/figure-2"
SHARING = "sharing/figure-1"
METHODS = "objective.options.methods"
QUICK = {
    "search.trials": 2,
    "search.epochs": 2,
    "search.space": {"lr": [0.01, 0.003], "members": [2], "width": [4], "depth": [1]},
    "data": ["made-table"],
    "optimisation.examples": 60,
}


@pytest.fixture
def quick(tmp_path):
    def run(name=STUDY, **options):
        return runner.run(name, "smoke", changes=QUICK, root=tmp_path, **options)

    return run


def test_a_run_leaves_everything_that_a_reader_needs(quick, tmp_path):
    reported = []
    folder = quick(on_study=lambda text, share: reported.append((text, share)))
    resolved = spec.resolved(library.load(STUDY), "smoke", QUICK, "x")
    assert folder == folder_of(resolved, "smoke", tmp_path)
    assert {path.name for path in folder.iterdir()} >= {"spec.toml", "report.json", "DONE", "made-table-seed-0"}
    report = json.loads((folder / "report.json").read_text())
    assert report["spec"]["search"]["trials"] == 2
    stored_spec = tomllib.loads((folder / "spec.toml").read_text())
    assert stored_spec == json.loads(json.dumps(resolved.to_dict()))
    assert {(row["beta"], row["seed"]) for row in report["rows"]} == {(0.0, 0), (1.0, 0), (0.0, 1), (1.0, 1)}
    assert report["made"]["networks"] == 8
    assert {"version", "python", "packages", "hardware", "seeds", "seconds", "peak_mib", "data"} <= set(report["made"])
    assert [share for _, share in reported] == sorted(share for _, share in reported)
    unit = folder / "made-table-seed-1"
    outputs, targets = np.load(unit / "outputs-001.npy"), np.load(unit / "targets.npy")
    row = next(row for row in report["rows"] if (row["seed"], row["run"]) == (1, 1))
    result = measures.error(torch.from_numpy(outputs), torch.from_numpy(targets), "mse", "score")
    assert row["measures"]["error"] == pytest.approx(result)


def test_a_second_run_does_nothing_and_the_same_seeds_give_the_same_numbers(quick, tmp_path):
    folder = quick()
    report = json.loads((folder / "report.json").read_text())
    first = report["rows"]
    assert report["made"]["changes"] == QUICK
    assert quick(on_study=lambda *_: pytest.fail("it was done already")) == folder
    other_folder = runner.run(STUDY, "smoke", changes=QUICK, root=tmp_path / "other")
    assert json.loads((other_folder / "report.json").read_text())["rows"] == first


def test_an_interrupted_run_continues_where_it_was(quick, tmp_path):
    expected = json.loads((quick() / "report.json").read_text())["rows"]
    root, units = tmp_path / "broken", []

    def interrupt(text, share):
        units.append(text.partition(":")[0])
        if units[-1] == "made-table-seed-1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(STUDY, "smoke", changes=QUICK, root=root, on_study=interrupt)
    assert "made-table-seed-0" in units
    resumed_units = []
    folder = runner.run(
        STUDY,
        "smoke",
        changes=QUICK,
        root=root,
        on_study=lambda text, share: resumed_units.append(text.partition(":")[0]),
    )
    assert set(resumed_units) == {"made-table-seed-1"}, "the first unit and the searches are not done again"
    assert json.loads((folder / "report.json").read_text())["rows"] == expected


SPACE = {"lr": [0.01, 0.003], "members": [2, 3], "width": [4]}
SEARCHED = {**QUICK, "search.trials": 8, "search.drawn": 6, "search.space": SPACE}


def trials_of(folder, seed):
    return search.read_trials(folder / f"made-table-seed-{seed}" / "trials.json")


@pytest.mark.slow
def test_trials_of_all_seeds_are_one_sweep_and_each_seed_finds_what_it_finds_alone(tmp_path, monkeypatch):
    sweeps = []

    def counting(build, data, objective, *, grid, sweep=search.sweep, **options):
        sweeps.append(grid)
        return sweep(build, data, objective, grid=grid, **options)

    monkeypatch.setattr(search, "sweep", counting)
    all_seeds = runner.run(STUDY, "smoke", changes=SEARCHED, root=tmp_path / "both")
    assert [len(grid) for grid in sweeps] == [12, 4], "six trials of each seed are drawn, then two are left"
    assert {(point["fold"], point["seed"]) for point in sweeps[0]} == {(0, 0), (1, 1)}
    for seed in (0, 1):
        single_seed = runner.run(STUDY, "smoke", changes={**SEARCHED, "grid.seed": [seed]}, root=tmp_path / f"{seed}")
        result, expected = trials_of(all_seeds, seed), trials_of(single_seed, seed)
        assert [trial["params"] for trial in result] == [trial["params"] for trial in expected]
        assert [trial["value"] for trial in result] == pytest.approx([trial["value"] for trial in expected], rel=1e-4)
        assert [trial["epochs"] for trial in result] == [trial["epochs"] for trial in expected]


def test_trials_that_are_drawn_make_one_batch_and_the_sampler_learns_from_later_ones():
    settings = spec.Search(trials=17, drawn=8, space={"lr": [0.1, 0.2, 0.3, 0.4], "width": [1, 2]})
    drawn, proposed = [], []
    for seed in range(10):
        trials, batches = [], []
        while len(trials) < settings.trials:
            points = search._next_points(settings, seed, trials)
            batches.append(len(points))
            trials += [{"params": point, "value": point["lr"] + point["width"]} for point in points]
        assert batches == [8, 5, 4]
        drawn += [trial["value"] for trial in trials[:8]]
        proposed += [trial["value"] for trial in trials[8:]]
    assert statistics.mean(drawn) == pytest.approx(1.75, abs=0.15), "of values at random"
    assert statistics.mean(proposed) < statistics.mean(drawn) - 0.2


@pytest.mark.slow
def test_an_interrupted_search_goes_on_after_its_last_whole_batch(tmp_path, monkeypatch):
    expected = runner.run(STUDY, "smoke", changes=SEARCHED, root=tmp_path / "whole")
    calls = []

    def breaks(*arguments, sweep=search.sweep, **options):
        calls.append(len(options["grid"]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return sweep(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(search, "sweep", breaks)
        with pytest.raises(KeyboardInterrupt):
            runner.run(STUDY, "smoke", changes=SEARCHED, root=tmp_path / "broken")
        resumed = runner.run(STUDY, "smoke", changes=SEARCHED, root=tmp_path / "broken")
    assert calls == [12, 4, 4]
    assert [trials_of(resumed, seed) for seed in (0, 1)] == [trials_of(expected, seed) for seed in (0, 1)]


EVERY_SETTING = {
    "epochs": 4,
    "batch_size": 7,
    "optimizer": "sgd",
    "lr": 0.0123,
    "momentum": 0.5,
    "weight_decay": 0.004,
    "cut_at": [0.5],
    "cut": 0.2,
    "patience": 2,
    "validation": 0.25,
    "keep": "last",
    "augment": ["flips"],
    "examples": 24,
}
"""All of a study's optimisation, away from its defaults."""
RECEIVED = {
    "epochs": 4,
    "batch_size": 7,
    "optimizer": "sgd",
    "lr": 0.0123,
    "momentum": 0.5,
    "weight_decay": 0.004,
    "rates": [1.0, 1.0, 0.2, 0.2],
    "patience": 2,
    "validation": 0.25,
    "keep": "last",
    "augment": (augment.flips,),
    "examples": 24,
}
"""What `fit` and `sweep` receive of it."""
OF_A_SEARCH = {"epochs": 8, "patience": 3, "validation": 0.2, "rates": [1.0, 1.0, 1.0, 1.0, 0.2, 0.2, 0.2, 0.2]}
TWO_STAGES = {"grid.method": ["two-stage"], "members": {"network": "cnn", "count": 2}}
TRAINERS = [
    ("procedures.train", "collusion/figure-15", {}, 1, {}),
    ("procedures.search", STUDY, {"data": ["made-table"], "search.epochs": 8, "search.patience": 3}, 1, OF_A_SEARCH),
    ("procedures.methods", "masksembles/figure-2", {}, 1, {}),
    ("procedures.adversarial", "adp/table-4", {}, 1, {}),
    ("procedures.shift_training", "ldr/table-8", {}, 1, {}),
    ("procedures.shift_training", "ldr/table-8", {"grid.method": ["ldr"]}, 1, {}),
    ("procedures.shift_training", "ldr/table-5", {"grid.method": ["deep-ensemble"]}, 1, {}),
    ("procedures.shift_training", "ldr/table-7", TWO_STAGES, 1, {}),
    ("procedures.streamed", "collusion/table-1", {}, 1, {}),
    ("procedures.streamed", "masksembles/figure-3-imagenet", {}, 1, {}),
    ("procedures.collusion", "collusion/figure-1", {}, 1, {}),
    ("procedures.disagreement", "ldr/figure-1", {}, 1, {}),
    ("procedures.sharing", "sharing/figure-1", {}, 1, {}),
    ("audit_cases", "audit/table-1", {"data": ["digits"]}, 1, {}),
    ("audit_cases", "audit/table-1", {"data": ["digits"], "grid.case": ["masksembles"], "grid.members": [2]}, 1, {}),
]
"""Module, study, changes, the call that is looked at, and what differs in it."""
OWN_RECIPES = {"backbones", "demo"}
"""Modules that train what no study describes: a network whose features are used, and the demo."""


class Enough(Exception):
    pass


def settings_received(data, arguments):
    """The arguments of `fit` or `sweep` in the words of a spec."""
    sizes = [
        len(part.dataset if isinstance(part, DataLoader) else part[1])
        for part in (data if isinstance(data, list) else [data])
    ]
    validation, batch_size = arguments["validation"], arguments.get("batch_size")
    if isinstance(validation, list | tuple | DataLoader):
        pair = validation[0] if isinstance(validation, list) else validation
        held_out = len(pair.dataset) if isinstance(pair, DataLoader) else len(pair[1])
        sizes = [size + held_out for size in sizes]
        validation = round(held_out / sizes[0], 1 if isinstance(arguments["validation"], list) else 2)
    if isinstance(data, DataLoader):
        batch_size = data.batch_size
    epochs = torch.arange(float(arguments["epochs"]))
    unchanged = {
        name: arguments[name] for name in ("epochs", "optimizer", "lr", "momentum", "weight_decay", "patience", "keep")
    }
    rates = [round(rate, 6) for rate in arguments["schedule"](epochs, arguments["epochs"]).tolist()]
    return {
        **unchanged,
        "batch_size": batch_size,
        "rates": rates,
        "validation": validation,
        "augment": arguments["augment"].args[0],
        "examples": sizes[0],
    }


def test_the_settings_above_are_all_there_are_and_none_is_a_default():
    defaults = {field.name: getattr(spec.Optimisation(), field.name) for field in dataclasses.fields(spec.Optimisation)}
    assert EVERY_SETTING.keys() == defaults.keys()
    assert [name for name, value in EVERY_SETTING.items() if value == defaults[name]] == []


def test_every_module_that_trains_is_among_those_below():
    folder = Path(library.__file__).parent
    trainers = {
        ".".join(file.relative_to(folder).with_suffix("").parts)
        for file in folder.rglob("*.py")
        if re.search(r"(?<![\w.])(fit|sweep)\(", file.read_text())
    }
    assert trainers == {module for module, *_ in TRAINERS} | OWN_RECIPES


@pytest.mark.parametrize(("module", "study", "changes", "call", "otherwise"), TRAINERS)
def test_no_setting_of_the_optimisation_is_lost(module, study, changes, call, otherwise, tmp_path, monkeypatch):
    calls = []

    def recorded(original):
        def recording(first, data, objective, **arguments):
            calls.append((data, arguments))
            if len(calls) == call:
                raise Enough
            return original(first, data, objective, **arguments)

        return recording

    trainer = importlib.import_module(f"dissensus.studies.{module}")
    for name in {"fit", "sweep"} & vars(trainer).keys():
        monkeypatch.setattr(trainer, name, recorded(getattr(trainer, name)))
    settings = {f"optimisation.{name}": value for name, value in EVERY_SETTING.items()}
    with pytest.raises(Enough):
        runner.run(study, "smoke", changes={**settings, "evaluation.curves": False, **changes}, root=tmp_path)
    assert settings_received(*calls[-1]) == {**RECEIVED, **otherwise}


@pytest.mark.parametrize(
    ("module", "study", "changes"),
    [
        ("methods", "masksembles/figure-2", {"data": ["made-images"]}),
        ("shift_training", "ldr/table-8", {}),
        ("streamed", "masksembles/figure-3-imagenet", {}),
    ],
)
def test_a_study_holds_rows_out_by_a_split(module, study, changes, tmp_path, monkeypatch):
    labels = []

    def recording(first, data, objective, **arguments):
        held_out = arguments["validation"]
        if isinstance(held_out, Split):
            assert (held_out.fraction, held_out.seed) == (0.25, 3)
            labels.extend(data[1][rows] for rows in held_out.rows(data[1], seed=9))
        else:
            parts = (data, held_out)
            labels.extend(p.dataset.pictures.labels if isinstance(p, DataLoader) else p[1] for p in parts)
        raise Enough

    trainer = importlib.import_module(f"dissensus.studies.procedures.{module}")
    for name in {"fit", "sweep"} & vars(trainer).keys():
        monkeypatch.setattr(trainer, name, recording)
    split = {"optimisation.validation": {"fraction": 0.25, "by": "class", "seed": 3}}
    with pytest.raises(Enough):
        runner.run(study, "smoke", changes={**changes, **split}, root=tmp_path)
    rest, part = (classes.bincount() for classes in labels)
    assert ((rest + part) * 0.25 - part).abs().max() <= 1


def test_a_split_that_does_not_fit_is_refused():
    def changed(study, held_out):
        changed = spec.resolved(library.load(study), "smoke", {"optimisation.validation": held_out}, "a.toml")
        check(changed, "a.toml")
        return changed.optimisation.validation

    assert changed("collusion/figure-2", {"fraction": 0.2, "by": "chance"}) == spec.HeldOut(0.2, "chance")
    with pytest.raises(spec.SpecError, match=r"key 'optimisation.validation.by' is 'class', but the loss 'squared_er"):
        changed("collusion/figure-2", {"fraction": 0.2})
    with pytest.raises(spec.SpecError, match=r"key 'optimisation.validation.fraction' must be above 0 and below 1"):
        changed("masksembles/figure-2", {"fraction": 1.0})
    with pytest.raises(spec.SpecError, match=r"key optimisation.validation.fraction is missing"):
        changed("masksembles/figure-2", {"by": "class"})
    with pytest.raises(spec.SpecError, match=r"key 'optimisation.validation.by' must be one of 'class', 'chance'"):
        changed("masksembles/figure-2", {"fraction": 0.2, "by": "time"})
    with pytest.raises(spec.SpecError, match=r"key 'optimisation.validation' must be a number or a table; got text"):
        changed("masksembles/figure-2", "0.2")


def test_a_search_uses_the_settings_of_the_training_after_it(tmp_path, monkeypatch):
    received = {}
    for module in (search, train):

        def recording_sweep(build, data, objective, *, sweep=module.sweep, module=module, **arguments):
            received[module.__name__] = arguments
            return sweep(build, data, objective, **arguments)

        monkeypatch.setattr(module, "sweep", recording_sweep)
    changes = {
        **QUICK,
        "search.epochs": 6,
        "search.patience": 1,
        "search.space": {"lr": [0.01, 0.003]},
        "members.count": 2,
        "optimisation.cut_at": [0.5],
        "optimisation.momentum": 0.5,
        "optimisation.optimizer": "sgd",
        "optimisation.weight_decay": 0.01,
    }
    runner.run(STUDY, "smoke", changes=changes, root=tmp_path)
    searched, trained = received.values()
    epochs = torch.arange(6.0)
    assert searched["members"] == trained["members"] == 2
    assert searched["schedule"](epochs, 6).tolist() == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1])
    assert trained["schedule"](epochs, trained["epochs"]).tolist() == searched["schedule"](epochs, 6).tolist()
    for name in ("optimizer", "momentum", "weight_decay", "augment", "batch_size"):
        assert searched[name] == trained[name], name


@pytest.mark.parametrize(
    ("study", "changes", "missing"),
    [
        ("masksembles/figure-2", {"grid.lr": [0.1, 0.01]}, "the axis 'lr'"),
        ("adp/table-4", {"grid.momentum": [0.0, 0.9]}, "the axis 'momentum'"),
        ("collusion/table-1", {"grid.members": [2, 3]}, "the axis 'members'"),
        ("masksembles/figure-3-imagenet", {"grid.lr": [0.1, 0.01]}, "the axis 'lr'"),
        ("masksembles/figure-3-imagenet", {"grid.adversarial": ["none", "pgd"]}, "the axis 'adversarial'"),
        ("masksembles/figure-3-imagenet", {"grid.method": ["single", "packed"]}, "'packed'"),
        ("collusion/figure-6", {"grid.loss": ["brier", "cross_entropy"]}, "the axis 'loss'"),
        ("collusion/figure-5", {"grid.pool": ["score", "probability"]}, "the axis 'pool'"),
        ("collusion/figure-2", {"grid.pool": ["score", "probability"]}, "key 'grid.pool.1.': `pool` must be 'score'"),
        ("collusion/figure-6", {"evaluation.measures": ["gap@0.5"]}, "'gap@0.5' needs 'evaluation.curves = true'"),
        ("collusion/figure-5", {"evaluation.measures": ["gap@1.5"]}, "is called 'gap@1.5'"),
        ("collusion/figure-5", {"evaluation.measures": ["ece@0.5"]}, "is called 'ece@0.5'"),
        (STUDY, {"data": ["mnist"], "search.trials": 1}, "a search on 'mnist'"),
        (SHARING, {"grid.lr": [0.1, 0.01]}, "the axis 'lr'"),
        (SHARING, {"evaluation.measures": ["soup_accuracy"]}, "is called 'soup_accuracy'"),
        (SHARING, {f"{METHODS}.lora": {"network": "lora"}}, "the method 'lora' needs the setting 'rank'"),
        (SHARING, {f"{METHODS}.heads.rank": 2}, "the setting 'rank' does nothing for the method 'heads'"),
        (SHARING, {f"{METHODS}.mc-dropout.objective": "ldr"}, "the method 'mc-dropout' needs the objective 'indep"),
        (SHARING, {f"{METHODS}.lora.rank": 0}, "lora.rank' must be at least 1"),
        (SHARING, {f"{METHODS}.heads.training_cost": 0.5}, "must exceed that of the first network, 1; got 0.5"),
        ("masksembles/figure-2", {f"{METHODS}.single": {"network": "lora"}}, "'lora' needs the procedure 'share'"),
    ],
)
def test_settings_that_a_procedure_ignores_are_refused(study, changes, missing, tmp_path):
    with pytest.raises(spec.SpecError, match=missing):
        runner.run(study, "smoke", changes=changes, root=tmp_path)


def test_pictures_in_folders_are_trained_as_a_point_says(tmp_path):
    grid = {"network": ["cnn"], "lr": [1e-7, 0.05], "batch_size": [6], "seed": [0]}
    changes = {"grid": grid, "data": ["made-folder"], "objective.options": {"beta": 0.0}}
    folder = runner.run("collusion/table-1", "smoke", changes=changes, root=tmp_path)
    slow, fast = (row["curves"]["train_error"] for row in json.loads((folder / "report.json").read_text())["rows"])
    assert abs(slow[1] - slow[0]) < 0.1 < abs(fast[1] - fast[0])


def test_pictures_in_folders_are_streamed_with_accuracy_over_the_epochs(tmp_path):
    folder = runner.run("collusion/table-1", "smoke", root=tmp_path)
    rows = json.loads((folder / "report.json").read_text())["rows"]
    assert [(row["network"], row["beta"], row["members"]) for row in rows] == [
        ("resnet20", 0.0, 2),
        ("resnet20", 1.0, 2),
        ("cnn", 0.0, 3),
        ("cnn", 1.0, 3),
    ]
    for row in rows:
        assert len(row["curves"]["accuracy"]) == len(row["curves"]["test_error"]) == row["epochs"] == 2
        unit = folder / "made-folder-seed-0"
        outputs = torch.from_numpy(np.load(unit / f"outputs-{row['run']:03d}.npy"))
        assert outputs.shape == (row["members"], 36, 3)
        result = measures.accuracy(outputs, torch.from_numpy(np.load(unit / "targets.npy")), "", "probability")
        assert row["measures"]["accuracy"] == pytest.approx(result)
    subset = datasets.load_streamed(
        "made-folder",
        spec.resolved(
            library.load("collusion/table-1"), "smoke", {"optimisation.examples": 6, "evaluation.examples": 3}, "x"
        ),
    )
    assert subset.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert subset.test.labels.tolist() == [0, 1, 2]
    assert subset.shape == (3, 16, 16)
    assert subset.train.tensors()[0].float().mean((2, 3)).argmax(1).tolist() == [2, 2, 1, 1, 0, 0]


FEW_METHODS = {"grid.method": ["single", "mc-dropout", "masksembles-2", "ensemble"], "grid.seed": [0]}


def test_methods_are_trained_on_streamed_pictures(tmp_path):
    name = "masksembles/figure-3-imagenet"
    folder = runner.run(name, "smoke", changes=FEW_METHODS, root=tmp_path)
    unit, report = folder / "made-folder-seed-0", read_report(folder)
    targets = torch.from_numpy(np.load(unit / "targets.npy"))
    by_method = {}
    for row in report.rows:
        outputs = torch.from_numpy(np.load(unit / f"outputs-{row.run:03d}.npy"))
        by_method[row.point["method"]] = outputs
        assert outputs.shape[1:] == (36, 3)
        assert row.measures["ece"] == pytest.approx(measures.ece(outputs, targets, "", "probability"))
        share, confidence, accuracy = (row.curves[key] for key in ("share", "confidence", "accuracy"))
        gaps = [s * abs(c - a) for s, c, a in zip(share, confidence, accuracy, strict=True) if s]
        assert row.measures["ece"] == pytest.approx(sum(gaps), abs=1e-6)
        assert len(row.pairs) == math.comb(len(outputs), 2)
        assert (unit / f"ensemble-{row.run:03d}").is_dir()
    counts = {method: len(outputs) for method, outputs in by_method.items()}
    assert counts == {"single": 1, "mc-dropout": 4, "masksembles-2": 4, "ensemble": 4}
    assert torch.equal(by_method["single"][0], by_method["ensemble"][0])  # member 0 does not depend on their number
    assert all(len(torch.unique(by_method[name], dim=0)) == 4 for name in ("mc-dropout", "masksembles-2", "ensemble"))
    summary = summarise(report)
    judged = {verdict.says: verdict for verdict in summary.verdicts}
    compared = judged["an ensemble is better calibrated than Masksembles with S = 2"]
    assert (compared.verdict, compared.setting, compared.data) == ("undecided", "reduced", "made-folder")
    ece = {row.point["method"]: row.measures["ece"] for row in report.rows}
    assert compared.difference == pytest.approx(ece["ensemble"] - ece["masksembles-2"], rel=1e-4)
    (drawing,) = figures(library.load(name), summary)
    assert {"perfect", "single", "ensemble"} <= {
        word for label in drawing[0].axes[0].get_legend_handles_labels()[1] for word in label.split()
    }


@pytest.mark.slow
def test_every_method_on_imagenet_is_a_network_for_large_pictures():
    settings = library.load("masksembles/figure-3-imagenet")
    paper = spec.resolved(settings, "paper", {}, "x")
    classes = [f"n{i:02d}" for i in range(7)]
    files = ImageFiles([Path(f"{i}.png") for i in range(7)], torch.arange(7), classes, 64)
    pictures = datasets.StreamedImages("imagenet-folder", files, files)
    for name in paper.grid["method"]:
        network = methods.method_builder(paper, methods.method_of(paper, name), pictures)().eval()
        (stem, *_) = (layer for layer in network.modules() if isinstance(layer, torch.nn.Conv2d))
        assert (stem.kernel_size, stem.stride) == ((7, 7), (2, 2)), name
        with torch.no_grad():
            outputs = network(torch.zeros(2, 3, 64, 64))
        assert outputs.shape[-2:] == (2, 7)
        assert outputs.ndim == (3 if methods.method_of(paper, name).is_wrapped else 2)


def test_streamed_methods_with_numbers_are_audited(tmp_path):
    described = {"apart": {"alpha": 0.0, "beta": 0.0}, "adp": {"alpha": 2.0, "beta": 0.5}}
    changes = {
        "grid": {"method": ["apart", "adp"], "seed": [0]},
        "members": {"network": "cnn", "count": 3},
        "objective": {"name": "adp", "loss": "cross_entropy", "pool": "probability", "options": {"methods": described}},
    }
    folder = runner.run("masksembles/figure-3-imagenet", "smoke", changes=changes, root=tmp_path)
    apart, adp = read_report(folder).rows
    assert apart.audit is not None
    assert adp.audit is not None
    assert apart.measures["nll"] != adp.measures["nll"]


@pytest.mark.slow
def test_methods_are_compared_with_pairs_and_calibration_to_draw(tmp_path):
    folder = runner.run("masksembles/figure-2", "smoke", root=tmp_path)
    rows = json.loads((folder / "report.json").read_text())["rows"]
    members = {
        row["method"]: np.load(folder / "made-images" / f"outputs-{row['run']:03d}.npy").shape[0] for row in rows
    }
    assert members == {"single": 1, "mc-dropout": 4, "masksembles-2": 4, "masksembles-3": 4, "ensemble": 4}
    targets = torch.from_numpy(np.load(folder / "made-images" / "targets.npy"))
    for row in rows:
        outputs = torch.from_numpy(np.load(folder / "made-images" / f"outputs-{row['run']:03d}.npy"))
        assert len(row["pairs"]) == math.comb(members[row["method"]], 2)
        result = float(np.mean([pair[1] for pair in row["pairs"]])) if row["pairs"] else 0.0
        assert row["measures"]["normalised_disagreement"] == pytest.approx(result, rel=1e-4)
        assert row["measures"]["ece"] == pytest.approx(measures.ece(outputs, targets, "", "probability"))
        share, confidence, accuracy = (row["curves"][key] for key in ("share", "confidence", "accuracy"))
        gaps = [s * abs(c - a) for s, c, a in zip(share, confidence, accuracy, strict=True) if s]
        assert row["measures"]["ece"] == pytest.approx(sum(gaps), abs=1e-6)
    other_folder = runner.run("masksembles/figure-3", "smoke", root=tmp_path)
    other_rows = json.loads((other_folder / "report.json").read_text())["rows"]
    assert [row["measures"]["ece"] for row in other_rows] == pytest.approx([row["measures"]["ece"] for row in rows])
    for name, run_folder in (("masksembles/figure-2", folder), ("masksembles/figure-3", other_folder)):
        (drawing,) = figures(library.load(name), summarise(read_report(run_folder)))
        axes = drawing[0].axes[0]
        labels = axes.get_legend_handles_labels()[1]
        expected_labels = {"independent errors", "flipped predictions"} if name.endswith("2") else {"perfect"}
        assert expected_labels <= set(labels)
        assert len(labels) >= 5


@pytest.mark.parametrize("pool", ["probability", "score", "vote"])
def test_accuracies_are_those_of_the_library(pool):
    outputs, targets = 3 * torch.randn(5, 400, 7), torch.randint(7, (400,))
    measured = {
        name: measures.MEASURES[name](outputs, targets, "zero_one", pool)
        for name in ("accuracy", "member_accuracy", "worst_member_accuracy", "accuracy_top5")
    }
    member_accuracies = (outputs.argmax(-1) == targets).double().mean(1)
    assert measured["accuracy"] == pytest.approx(metrics.prediction_accuracy(outputs, targets, pool))
    assert measured["member_accuracy"] == pytest.approx(float(member_accuracies.mean()))
    assert measured["worst_member_accuracy"] == pytest.approx(float(member_accuracies.min()))
    if pool == "score":
        best = outputs.mean(0).topk(5).indices
        assert measured["accuracy_top5"] == pytest.approx(float((best == targets.unsqueeze(1)).any(1).double().mean()))


def test_masks_overlap_as_the_formula_says(tmp_path):
    folder = runner.run("masksembles/figure-1", "smoke", root=tmp_path)
    summary = summarise(read_report(folder))
    assert {verdict.verdict for verdict in summary.verdicts} == {"agrees"}
    assert summary.points[0].measures["iou"].seeds == 50


def hold(folder, locked, release):
    with runner.alone(folder, "x"):
        locked.set()
        release.wait(60)


@pytest.mark.slow
def test_a_second_process_on_a_run_is_refused(quick, tmp_path):
    folder = runner.folder_of(spec.resolved(library.load(STUDY), "smoke", QUICK, "x"), "smoke", tmp_path)
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("spawn")
    locked, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(folder, locked, release))
    process.start()
    try:
        assert locked.wait(60)
        with pytest.raises(runner.Busy, match=rf"being run already, by process {process.pid} on .* Wait for it"):
            quick()
    finally:
        release.set()
        process.join()
    assert (quick() / "DONE").exists(), "the lock goes with its process"


@pytest.mark.slow
def test_processes_share_the_work_and_change_nothing(quick, tmp_path):
    expected = json.loads((quick() / "report.json").read_text())["rows"]
    folder = runner.run(STUDY, "smoke", changes=QUICK, root=tmp_path / "jobs", jobs=2)
    for seed in range(2):
        for apart, together in zip(trials_of(folder, seed), trials_of(quick(), seed), strict=True):
            assert apart["params"] == together["params"]
            assert apart["value"] == pytest.approx(together["value"], rel=1e-4)
    report = json.loads((folder / "report.json").read_text())
    assert report["made"]["hardware"].endswith("cores, 2 processes")
    parallel = report["rows"]
    for shared, single in zip(parallel, expected, strict=True):
        assert shared["measures"] == pytest.approx(single["measures"], rel=1e-4)


@pytest.mark.parametrize(
    ("units", "parts", "expected"),
    [("abcde", 2, ["ace", "bd"]), ("a", 2, ["a"]), ("abc", 1, ["abc"]), ("ab", 5, ["a", "b"])],
)
def test_a_search_is_divided_among_processes_by_seeds(units, parts, expected):
    assert list(train.SEARCH.divided(units, parts)) == expected


def linger(folder):
    (folder / "worker").write_text(str(os.getpid()))
    time.sleep(120)


def start_a_worker(folder):
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=workers.begin, initargs=(1,)
    ) as pool:
        pool.submit(linger, folder).result()


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them(tmp_path):
    parent = multiprocessing.get_context("spawn").Process(target=start_a_worker, args=(tmp_path,))
    parent.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "worker").exists() or not (tmp_path / "worker").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    worker = int((tmp_path / "worker").read_text())
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    while True:
        try:
            state = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            break
        if state == "Z":
            break
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.1)


def test_a_study_that_uses_another_measures_its_outputs(quick, tmp_path):
    folder = quick("collusion/figure-3")
    report = json.loads((folder / "report.json").read_text())
    base = (folder / report["outputs"]).resolve()
    assert (base / "DONE").exists()
    assert base.parent.name == "figure-2"
    (first, *_) = report["rows"]
    outputs = torch.from_numpy(np.load(base / f"made-table-seed-{first['seed']}" / f"outputs-{first['run']:03d}.npy"))
    result = measures.constant_bias(outputs, torch.zeros(1), "mse", "score")
    assert first["measures"]["bias_share"] == pytest.approx(result)


SMALL_CNNS = {
    "data": ["made-images"],
    "members.network": "cnn",
    "members.count": 2,
    "members.options": {"widths": [4]},
    "optimisation.examples": 80,
    "optimisation.epochs": 3,
    "evaluation.examples": 50,
}


def test_curves_and_gap(tmp_path):
    changes = {**SMALL_CNNS, "evaluation.measures": ["gap", "error", "train_error@0.3", "test_error@0.4", "gap@1"]}
    folder = runner.run("collusion/figure-5", "smoke", changes=changes, root=tmp_path)
    report = json.loads((folder / "report.json").read_text())
    row = report["rows"][0]
    assert {len(curve) for curve in row["curves"].values()} == {3}
    assert row["curves"]["test_error"][-1] == pytest.approx(
        row["measures"]["error"] if "error" in row["measures"] else row["measures"]["gap"] + row["train_error"],
        rel=1e-4,
    )
    gaps = [b - a for a, b in zip(row["curves"]["train_error"], row["curves"]["test_error"], strict=True)]
    assert row["curves"]["gap"] == pytest.approx(gaps)
    assert len(summarise(read_report(folder)).points[0].curves["test_error"].mean) == 3
    taken = [row["measures"][name] for name in ("train_error@0.3", "test_error@0.4", "gap@1")]
    assert taken == [row["curves"]["train_error"][0], row["curves"]["test_error"][1], gaps[2]]


def test_a_share_of_the_epochs_is_exact():
    """As floats, 0.07 · 100 is above 7, and would be the eighth epoch."""
    curves = {"gap": list(range(1, 101))}
    values = [curve_value(name, curves) for name in ("gap@0.07", "gap@0.071", "gap@0.001", "gap@1.0")]
    assert values == [7, 8, 1, 100]


def test_a_study_that_uses_another_reads_its_curves(tmp_path):
    own = ("data", "optimisation.epochs")
    changes = {key: value for key, value in SMALL_CNNS.items() if key in own} | {"grid.seed": [0]}
    folder = runner.run("collusion/figure-10", "smoke", changes=changes, root=tmp_path)
    for row in json.loads((folder / "report.json").read_text())["rows"]:
        assert row["measures"]["train_error@0.1"] == row["curves"]["train_error"][0]
        assert row["measures"]["test_error@0.5"] == row["curves"]["test_error"][1]


def test_every_run_is_trained_and_measured_with_its_own_pool(tmp_path):
    changes = {**SMALL_CNNS, "grid": {"pool": ["probability", "score"], "beta": [1.0], "seed": [0]}}
    both = runner.run("collusion/figure-6", "smoke", changes=changes, root=tmp_path)
    rows = {row["pool"]: row["measures"] for row in json.loads((both / "report.json").read_text())["rows"]}
    for pool, values in rows.items():
        alone = {**SMALL_CNNS, "grid": {"beta": [1.0], "seed": [0]}, "objective.pool": pool}
        folder = runner.run("collusion/figure-6", "smoke", changes=alone, root=tmp_path)
        (row,) = json.loads((folder / "report.json").read_text())["rows"]
        assert values == pytest.approx(row["measures"], rel=1e-4), pool
    assert abs(rows["score"]["error"] - rows["probability"]["error"]) > 1e-4


@pytest.fixture(scope="module")
def shared_runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.mark.slow(
    fast=[
        "adp/figure-2",
        "adp/figure-3",
        "adp/figure-4",
        "audit/table-1",
        "collusion/figure-2",
        "collusion/figure-8",
        "ldr/table-3",
        "ldr/table-7",
        "ldr/table-10",
        "masksembles/figure-1",
    ]
)
@pytest.mark.parametrize("name", library.names())
def test_every_study_that_can_be_run_runs_at_its_smoke_scale(name, shared_runs):
    lacking = missing(spec.resolved(library.load(name), "smoke", {}, name))
    if lacking:
        pytest.skip(f"{name} needs {lacking}")
    folder = runner.run(name, "smoke", root=shared_runs)
    report = json.loads((folder / "report.json").read_text())
    assert all(math.isfinite(value) for row in report["rows"] for value in row["measures"].values())
    summary = summarise(read_report(folder))
    assert summary.verdicts or not library.load(name).expect
    assert figures(library.load(name), summary) or "table" in name
    check_against_golden(name, smoke_golden.numbers(folder))


def check_against_golden(name, ours):
    """A change of numbers asks for a new version of the procedure: results that were made before are stale then."""
    stored = smoke_golden.golden().get(name)
    again = f"make the golden numbers again: python tests/smoke_golden.py {name}"
    assert stored is not None, again
    same = {key: stored[key] == ours[key] for key in ("procedure", "version", "settings")}
    assert all(same.values()), f"{name} has another {[key for key in same if not same[key]]}: {again}"
    raise_it = f"numbers of {name} have changed: raise the version of the procedure {ours['procedure']!r}, and {again}"
    assert ours["measures"] == pytest.approx(stored["measures"], rel=0.02, abs=0.02), raise_it


def test_a_change_of_numbers_asks_for_a_new_version():
    name, stored = next(iter(smoke_golden.golden().items()))
    check_against_golden(name, stored)
    changed = {**stored, "measures": {key: value + 0.1 * (abs(value) + 1) for key, value in stored["measures"].items()}}
    with pytest.raises(AssertionError, match="raise the version"):
        check_against_golden(name, changed)
    with pytest.raises(AssertionError, match="another .'version'.*python tests/smoke_golden.py"):
        check_against_golden(name, {**changed, "version": stored["version"] + 1})


def test_studies_that_cannot_be_run_name_what_is_missing():
    changes = {"evaluation.measures": ["accuracy_foo_0.1"]}
    with pytest.raises(
        spec.SpecError,
        match="adp/table-2 with --set .* cannot be run: no measure of 'evaluation.measures' is called 'accuracy_foo",
    ):
        runner.run("adp/table-2", "smoke", changes=changes)


def test_wrong_words_are_refused_with_the_nearest(tmp_path):
    with pytest.raises(spec.SpecError, match="no study 'collusion/figur-2'. Did you mean 'collusion/figure-2'"):
        library.load("collusion/figur-2")
    with pytest.raises(spec.SpecError, match="Did you mean 'collusion/figure-15'"):
        library.load("figure-15")
    with pytest.raises(spec.SpecError, match="has no scale 'laptp'.* Did you mean 'laptop'"):
        runner.run(STUDY, "laptp", root=tmp_path)
    with pytest.raises(spec.SpecError, match="key 'optimisation.epoch' is not known. Did you mean 'epochs'"):
        runner.run(STUDY, "smoke", changes={"optimisation.epoch": 3}, root=tmp_path)
    folder = tmp_path / "collusion"
    folder.mkdir()
    text = (library.SPECS / f"{STUDY}.toml").read_text()
    for old, new, message in (
        ('network = "mlp"', 'network = "mpl"', "key 'members.network' is 'mpl', .* Did you mean 'mlp'"),
        ('name = "augmented"', 'name = "augmentd"', "Did you mean 'augmented'"),
        ('data = ["abalone"', 'data = ["abalon"', "key 'data' is 'abalon', .* Did you mean 'abalone'"),
        ("title = ", "title ", "mine.toml: this is no TOML"),
    ):
        (folder / "mine.toml").write_text(text.replace(old, new, 1))
        with pytest.raises(spec.SpecError, match=message):
            library.load(str(folder / "mine.toml"))


@pytest.mark.parametrize("name", ["made-table", "made-images", "diabetes", "digits"])
def test_problems_are_split_by_the_seed_and_scaled_on_training_rows(name):
    settings = spec.resolved(library.load(STUDY), "smoke", {}, "x")
    first, same_seed, other_seed = (datasets.load(name, seed, settings) for seed in (0, 0, 1))
    assert torch.equal(first.test[0], same_seed.test[0])
    if datasets.is_split_by_seed(name):
        assert not torch.equal(first.test[0], other_seed.test[0])
    if name in ("made-table", "diabetes"):
        torch.testing.assert_close(first.train[0].mean(0), torch.zeros(first.shape), atol=1e-5, rtol=0)
        assert first.test[0].mean(0).abs().max() > 1e-3
        searching = datasets.load(name, 0, settings, searching=True)
        assert searching.held_out is not None
        rows = len(searching.train[0]) + len(searching.held_out[0])
        assert rows == len(first.train[0])
        torch.testing.assert_close(searching.train[0].mean(0), torch.zeros(first.shape), atol=1e-5, rtol=0)


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.setenv("DISSENSUS_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("DISSENSUS_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("dissensus.cli.screen.console.width", 250)
    monkeypatch.chdir(tmp_path)

    def run(*arguments, code=0):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == code, result.output
        return re.sub(r"\s+", " ", result.output)

    return run


@pytest.mark.slow
def test_the_report_of_all_studies_has_a_page_and_figures(command, tmp_path):
    command("study", "report", "--out", tmp_path / "page.html", "--figures", tmp_path / "figures", "--format", "png")
    assert (tmp_path / "page.html").read_text().count('class="badge') > 10
    assert (tmp_path / "figures" / "collusion-figure-2-bioconcentration.png").stat().st_size > 5000


def test_commands_list_show_run_and_report(command):
    list_output = command("study", "list", "collusion")
    assert "collusion/figure-2" in list_output
    assert "adp/table-1" not in list_output
    assert "adp/table-1" in command("study", "list", "adp")
    space = "{lr = [0.01, 0.003], members = [2], width = [4], depth = [1]}"
    changes = {**QUICK, "search.space": space, "data": '["made-table"]'}
    settings = [f"--set={key}={value}" for key, value in changes.items()]
    run_output = command("study", "run", STUDY, "--scale", "smoke", *settings)
    assert "at scale smoke, 2 seeds" in run_output
    assert "Results are in" in run_output
    show_output = command("study", "show", STUDY)
    assert "Diversity explosion" in show_output
    assert "at scale" in show_output
    assert "must be pdf, png or svg" in command("study", "report", "--format", "gif", code=1)
    assert "no paper 'colusion'" in command("study", "list", "colusion", code=1)
    assert "write it as name=value" in command("study", "run", STUDY, "--set", "epochs", code=1)
    assert "use --device cpu" in command("study", "run", STUDY, "--device", "cuda", code=1) or torch.cuda.is_available()


def test_commands_for_data(command):
    assert "fashion-mnist" in command("data", "list")
    assert "absent" in command("data", "list")
    checked = command("data", "check", "digits")
    assert "whole" in checked
    assert "Did you mean 'mnist'" in command("data", "get", "mnst", code=1)


def test_the_page_is_self_contained_and_links_lead_to_sections(quick, tmp_path):
    quick()
    page = html(study_page.page([STUDY, "collusion/figure-3", "adp/table-2"], tmp_path))
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page)
    for anchor in re.findall(r'href="#([^"]+)"', page):
        assert f'id="{anchor}"' in page
    assert "<svg" in page
    assert "not run" in page


def test_the_page_says_which_study_it_reads_and_draws(tmp_path):
    said = []
    names = ["collusion/figure-8", "adp/table-3", "ldr/figure-2"]
    study_page.page(names, tmp_path, lambda text, share: said.append((text, share)))
    assert [text for text, _ in said] == [
        *(f"reading {name}" for name in names),
        *(f"drawing {name}" for name in ("collusion/figure-8", "ldr/figure-2", "adp/table-3")),  # by paper
    ]
    shares = [share for _, share in said]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] < 1


def test_the_command_of_a_result_is_the_one_that_made_it():
    changes = {"data": ["mnist"], "optimisation.epochs": 3, "members.network": "cnn"}
    provenance = Provenance("0", "3", {}, "any", [0], 1, 0, 1.0, None, [], device="cuda", changes=changes)
    arguments = shlex.split(study_page.command("adp/table-2", "gpu", provenance))
    assert arguments[:5] == ["dissensus", "study", "run", "adp/table-2", "--scale"]
    assert arguments[5:] == [
        "gpu",
        "--set",
        'data=["mnist"]',
        "--set",
        "optimisation.epochs=3",
        "--set",
        'members.network="cnn"',
        "--device",
        "cuda",
    ]
    default = replace(provenance, device="cpu", changes={})
    assert study_page.command("adp/table-2", "gpu", default) == "dissensus study run adp/table-2 --scale gpu"


def test_shipped_results_are_of_studies_that_exist_and_are_small():
    for file in sorted(SHIPPED.rglob("*.json")):
        name, scale, _ = file.relative_to(SHIPPED).as_posix().rsplit(".", 2)
        stored = json.loads(file.read_text())
        assert (stored["study"], stored["scale"]) == (name, scale)
        assert scale in library.load(name).scales
        assert file.stat().st_size < 200_000
        assert stored["made"]["seconds"] > 0


def test_sources_and_problems_know_the_same_names():
    source_names = {datasets.source_of(name) for name in datasets.NAMES if name not in datasets.GENERATED}
    assert source_names == {name for name, info in sources.DATASETS.items() if info.kind != "weights"}


@pytest.mark.parametrize("columns", [80, 160])
def test_show_lists_points_in_rows_of_tables_that_fit_the_screen(columns, command, monkeypatch):
    monkeypatch.setattr("dissensus.cli.screen.console.width", columns)
    output = command("study", "show", "adp/table-4")
    tables = output[output.index("means over seeds") :]
    assert tables.count("pgd, baseline") == (3 if columns == 80 else 1)
    for text in ("FGSM 0.04", "APGD 0.02", "collusive 1"):
        assert text in tables
