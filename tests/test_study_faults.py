"""Studies under faults: damaged and swapped files, killed processes, names that lead elsewhere, full disks."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import dissensus
from dissensus.cli import app
from dissensus.pages import html
from dissensus.storage import StorageError, write_record
from dissensus.studies import checked_folders, datasets, library, run_folders, spec
from dissensus.studies import run as runner
from dissensus.studies.page import page
from dissensus.studies.procedures import methods
from dissensus.studies.procedures.builtin import PROCEDURES
from dissensus.studies.procedures.formula import WholeGrid
from dissensus.studies.procedures.training import finish_point, finish_unit, finished_point, point_file
from dissensus.studies.registry import MethodError, maker
from dissensus.studies.results import Row
from dissensus.studies.run_folders import damaged, find, read_report, read_state, unfinished

FORMULA = "ldr/figure-2"
"""Nothing is trained."""
TRAINED = "collusion/figure-2"
DEPENDENT = "collusion/figure-3"
QUICK = {
    "search.trials": 2,
    "search.epochs": 2,
    "search.space": {"lr": [0.01, 0.003], "members": [2], "width": [4], "depth": [1]},
    "data": ["made-table"],
    "optimisation.examples": 60,
}
PROGRAM = [sys.executable, "-m", "dissensus"]


@pytest.fixture(autouse=True)
def _quiet_house(monkeypatch, tmp_path):
    monkeypatch.setattr(run_folders, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("DISSENSUS_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("dissensus.cli.screen.console.width", 250)


def rows_of(folder):
    return json.loads((folder / "report.json").read_text())["rows"]


def command(*words):
    result = CliRunner().invoke(app, ["study", *words])
    return result.exit_code, re.sub(r"\s+", " ", result.output + result.stderr)


# One damaged report


def truncate(file):
    file.write_bytes(file.read_bytes()[:200])


def change_number(file):
    text = file.read_text()
    key = '"seed": 0' if '"seed": 0' in text else '"format": 1'
    assert key in text
    file.write_text(text.replace(key, f"{key}7", 1))


def flip_bit(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def make_folder(file):
    file.unlink()
    file.mkdir()


def make_pipe(file):
    file.unlink()
    os.mkfifo(file)


REPORT_DAMAGE = {
    "truncated": truncate,
    "changed": change_number,
    "empty": lambda file: file.write_bytes(b""),
    "binary": lambda file: file.write_bytes(b"\xff\xfe\x00" * 99),
    "nested": lambda file: file.write_text("[" * 100_000),
    "another kind": lambda file: file.write_text('{"study": 3, "rows": [1]}'),
    "deleted": lambda file: file.unlink(),
    "a folder": make_folder,
    "a pipe": make_pipe,
}


@pytest.mark.slow(fast=["truncated-*", "changed-report.json", "a pipe-report.json"])
@pytest.mark.parametrize("name", ["report.json", "manifest.json"])
@pytest.mark.parametrize("kind", REPORT_DAMAGE)
def test_a_damaged_run_is_one_sentence_and_is_made_again(kind, name, tmp_path, caplog):
    folder = runner.run(FORMULA, "smoke", root=tmp_path)
    rows = rows_of(folder)
    REPORT_DAMAGE[kind](folder / name)
    assert find(FORMULA, tmp_path) is None
    (sentence,) = damaged(FORMULA, tmp_path)
    assert sentence.startswith("A run at scale smoke is damaged: ")
    assert name in sentence
    assert sentence.count("\n") == 0
    assert f"Run it again with `dissensus study run {FORMULA} --scale smoke`" in sentence
    assert unfinished(FORMULA, tmp_path) == [sentence]
    with pytest.raises(StorageError):
        read_report(folder)
    if (folder / name).is_dir():
        (folder / name).rmdir()
    with caplog.at_level(logging.WARNING, "dissensus"):
        assert runner.run(FORMULA, "smoke", root=tmp_path) == folder
    assert "What is damaged is computed again." in caplog.text
    assert rows_of(folder) == rows
    assert damaged(FORMULA, tmp_path) == []
    assert find(FORMULA, tmp_path).origin == ""


def test_one_damaged_run_breaks_nothing_else():
    root = run_folders.runs_folder()
    whole, broken = (runner.run(name, "smoke", root=root) for name in ("collusion/figure-9", FORMULA))
    truncate(broken / "report.json")
    code, text = command("list")
    assert code == 0, text
    assert f"{FORMULA}: A run at scale smoke is damaged: {broken}/report.json is truncated" in text
    assert "damaged: 1" in text
    code, text = command("show", FORMULA)
    assert (code, "A run at scale smoke is damaged" in text) == (0, True)
    code, text = command("show", "collusion/figure-9")
    assert (code, "damaged" in text) == (0, False)
    assert "is damaged" in html(page([FORMULA], root))
    code, text = command("run", "collusion/figure-9", "--scale", "smoke")
    assert (code, str(whole) in text) == (0, True)
    code, text = command("run", FORMULA, "--scale", "smoke")
    assert (code, damaged(FORMULA, root)) == (0, [])


def test_a_state_that_cannot_be_read_is_that_of_an_interrupted_run(tmp_path):
    folder = runner.run(FORMULA, "smoke", root=tmp_path)
    for content in ("", "{", "[]", '{"stage": 3}', '{"stage": "done", "reason": 5}', '{"stage": "started", "x": 1}'):
        (folder / "state.json").write_text(content)
        (folder / "seconds.json").write_text(content)
        assert read_state(folder).stage == "done", "the manifest says it"
        (folder / "DONE").unlink()
        assert read_state(folder).stage == "started"
        assert unfinished(FORMULA, tmp_path) != []
        assert runner.run(FORMULA, "smoke", root=tmp_path) == folder
    for name in ("state.json", "seconds.json"):
        make_pipe(folder / name)
    assert read_state(folder).stage == "done"
    (folder / "DONE").unlink()
    assert read_state(folder).stage == "started"
    assert runner.run(FORMULA, "smoke", root=tmp_path) == folder
    (folder.parent / "smoke-notes").write_text("a file, no folder")
    assert unfinished(FORMULA, tmp_path) == []


def test_a_run_that_was_renamed_is_not_taken_for_another(tmp_path):
    folder = runner.run(FORMULA, "smoke", root=tmp_path)
    other = runner.run(FORMULA, "smoke", changes={"grid.classes": [4]}, root=tmp_path)
    keep = rows_of(folder)
    shutil.rmtree(folder)
    other.rename(folder)
    assert find(FORMULA, tmp_path) is None
    assert "it was renamed or swapped" in damaged(FORMULA, tmp_path)[0]
    assert rows_of(runner.run(FORMULA, "smoke", root=tmp_path)) == keep


def test_a_report_that_this_version_cannot_judge_is_damaged_alone(tmp_path):
    folder = runner.run(FORMULA, "smoke", root=tmp_path)
    report = json.loads((folder / "report.json").read_text())
    report["rows"][0]["measures"] = {"predictive_diversity": "high"}
    (folder / "report.json").write_text(json.dumps(report))
    manifest = checked_folders.stored_record(folder / "manifest.json")
    units = [name.removesuffix("/manifest.json") for name in manifest["files"] if "/" in name]
    checked_folders.write_run_manifest(folder, units, {key: manifest[key] for key in ("settings", "version")})
    assert find(FORMULA, tmp_path) is None
    assert "cannot be summarised" in damaged(FORMULA, tmp_path)[0]


@pytest.mark.parametrize("state", [None, {"stage": "done", "settings": "", "version": "0.1.0", "reason": ""}])
def test_runs_without_checksums_are_read_and_told_apart(state, tmp_path, caplog):
    folder = runner.run(FORMULA, "smoke", root=tmp_path)
    for name in ("manifest.json", "grid/manifest.json", "state.json"):
        (folder / name).unlink()
    if state is not None:
        (folder / "state.json").write_text(json.dumps(state))
    result = find(FORMULA, tmp_path)
    assert result.points
    assert result.origin == "a run without checksums: changes of its files cannot be seen"
    with caplog.at_level(logging.WARNING, "dissensus"):
        runner.run(FORMULA, "smoke", root=tmp_path)
    assert "was made before runs had checksums" in caplog.text
    assert find(FORMULA, tmp_path).origin == ""


def test_a_run_of_today_without_its_manifest_is_not_taken_for_an_older_one(tmp_path):
    folder = runner.run(FORMULA, "smoke", root=tmp_path)
    (folder / "manifest.json").unlink()
    assert find(FORMULA, tmp_path) is None
    assert "manifest.json is missing" in damaged(FORMULA, tmp_path)[0]


def test_a_damaged_shipped_result_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folders, "SHIPPED", tmp_path)
    (tmp_path / "ldr").mkdir()
    (tmp_path / f"{FORMULA}.paper.json").write_text('{"study":')
    assert find(FORMULA, tmp_path / "runs") is None
    assert damaged(FORMULA, tmp_path / "runs")[0].startswith("The shipped result at scale paper is damaged: ")


IN_THE_WAY = {
    ".lock": ".lock must be a file, as it marks a folder that is in use; remove what is there.",
    "spec.toml": "spec.toml could not be written: Is a directory. Remove what is in the way",
    "report.json": "report.json could not be written: Is a directory. Remove what is in the way",
    "all/manifest.json": "manifest.json could not be written: Is a directory. Remove what is in the way",
}


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_a_folder_in_the_place_of_a_file_is_one_sentence(name, tmp_path):
    folder = runner.run(FORMULA, "smoke", root=run_folders.runs_folder())
    (unit,) = (path.parent.name for path in folder.glob("*/manifest.json"))
    (folder / "DONE").unlink()
    make_folder(folder / name.replace("all", unit))
    code, text = command("run", FORMULA, "--scale", "smoke")
    assert (code, "Errno" in text) == (1, False)
    assert IN_THE_WAY[name] in text


def test_a_file_in_the_place_of_the_folder_of_a_paper_is_one_sentence(tmp_path):
    (tmp_path / "runs" / "studies").mkdir(parents=True)
    (tmp_path / "runs" / "studies" / "ldr").write_text("mine")
    code, text = command("run", FORMULA, "--scale", "smoke")
    assert (code, "Errno" in text) == (1, False)
    assert "error: the folder of runs (DISSENSUS_RUNS) must be a folder" in text
    assert "which cannot be made: Not a directory" in text


# Files of units


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A folder of runs: a trained study, and one that measures its outputs."""
    root = tmp_path_factory.mktemp("clean")
    runner.run(DEPENDENT, "smoke", changes=QUICK, root=root)
    return root


def only_run(root, name):
    (folder,) = (root / name).glob("smoke-*")
    return folder


def swap(first, second):
    between = first.with_name("between")
    first.rename(between)
    second.rename(first)
    between.rename(second)


def add_to_array(file):
    np.save(file, np.load(file) + 1)


def better_trial(file):
    file.write_text(re.sub(r'"value": [^,}\n]+', '"value": -1.0', file.read_text(), count=1))


UNIT_DAMAGE = {
    "a row": lambda run, unit: change_number(unit / "rows.json"),
    "outputs": lambda run, unit: add_to_array(unit / "outputs-000.npy"),
    "targets": lambda run, unit: add_to_array(unit / "targets.npy"),
    "a bit of the outputs": lambda run, unit: flip_bit(unit / "outputs-001.npy"),
    "swapped outputs": lambda run, unit: swap(unit / "outputs-000.npy", unit / "outputs-001.npy"),
    "swapped units": lambda run, unit: swap(unit, run / "made-table-seed-1"),
    "a trial": lambda run, unit: better_trial(unit / "trials.json"),
    "swapped trials": lambda run, unit: swap(unit / "trials.json", run / "made-table-seed-1" / "trials.json"),
    "deleted targets": lambda run, unit: (unit / "targets.npy").unlink(),
    "deleted rows": lambda run, unit: (unit / "rows.json").unlink(),
    "truncated outputs": lambda run, unit: truncate(unit / "outputs-000.npy"),
    "the unit's manifest": lambda run, unit: truncate(unit / "manifest.json"),
    "the unit": lambda run, unit: shutil.rmtree(unit),
}


@pytest.mark.slow(fast=["outputs", "swapped units"])
@pytest.mark.parametrize("kind", UNIT_DAMAGE)
def test_damaged_units_are_computed_again(kind, clean, tmp_path, caplog):
    root = tmp_path / "copy"
    shutil.copytree(clean, root)
    base = only_run(root, TRAINED)
    UNIT_DAMAGE[kind](base, base / "made-table-seed-0")
    shutil.rmtree(root / DEPENDENT)  # it would not look at its base again
    with caplog.at_level(logging.WARNING, "dissensus"):
        dependent = runner.run(DEPENDENT, "smoke", changes=QUICK, root=root)
    assert "What is damaged is computed again." in caplog.text
    for name, folder in ((TRAINED, base), (DEPENDENT, dependent)):
        assert rows_of(folder) == rows_of(only_run(clean, name))
        assert run_folders.damage(folder) == ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a row", "swapped outputs", "a trial", "the unit's manifest"])
def test_damaged_units_of_an_unfinished_run_are_computed_again(kind, clean, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(clean, root)
    base = only_run(root, TRAINED)
    for name in ("DONE", "manifest.json", "report.json"):
        (base / name).unlink()
    UNIT_DAMAGE[kind](base, base / "made-table-seed-0")
    runner.run(TRAINED, "smoke", changes=QUICK, root=root)
    assert rows_of(base) == rows_of(only_run(clean, TRAINED))


def test_everything_in_a_run_has_a_checksum(clean):
    run = only_run(clean, TRAINED)
    listed = {run / name for name in checked_folders.check_run(run)["files"]}
    for file in list(listed):
        if file.name == "manifest.json":
            unit = file.parent.relative_to(run).as_posix()
            listed |= {file.parent / name for name in checked_folders.listed_files(run, unit)}
    files = {file for file in run.rglob("*") if file.is_file() and "checkpoints" not in file.parts}
    assert {file.relative_to(run).as_posix() for file in files - listed} <= {
        "manifest.json",
        "state.json",
        "seconds.json",
        "DONE",
        ".lock",
    }
    assert listed <= files


# Points of an unfinished unit


def resum(file, **changes):
    """Write a record anew, as if another release, run or unit had left it."""
    record = json.loads(file.read_text())
    write_record(file, {key: value for key, value in {**record, **changes}.items() if key != "manifest_sha256"})


POINT_DAMAGE = {
    "a truncated row": lambda unit, row: truncate(row),
    "an empty row": lambda unit, row: row.write_bytes(b""),
    "a row that is no JSON": lambda unit, row: row.write_bytes(b"\xff\xfe"),
    "an edited row": lambda unit, row: row.write_text(row.read_text().replace("0.25", "0.75")),
    "a folder": lambda unit, row: make_folder(row),
    "a pipe": lambda unit, row: make_pipe(row),
    "the row of another run": lambda unit, row: resum(row, of="ldr/table-8/smoke-0123456789ab/digits/1"),
    "the row of another point": lambda unit, row: resum(row, of=json.loads(row.read_text())["of"][:-1] + "2"),
    "a newer format": lambda unit, row: resum(row, format=2),
    "changed outputs": lambda unit, row: add_to_array(unit / "outputs-001.npy"),
    "a bit of the outputs": lambda unit, row: flip_bit(unit / "outputs-001.npy"),
    "truncated outputs": lambda unit, row: truncate(unit / "outputs-001.npy"),
    "deleted outputs": lambda unit, row: (unit / "outputs-001.npy").unlink(),
    "swapped outputs": lambda unit, row: swap(unit / "outputs-000.npy", unit / "outputs-001.npy"),
    "outputs on another set": lambda unit, row: flip_bit(unit / "outputs-001-corrupted-5.npy"),
    "outputs of the reference": lambda unit, row: flip_bit(unit / "outputs-000.npy"),
    "a renamed run": lambda unit, row: unit.parent.rename(unit.parent.with_name("smoke-other")),
}


@pytest.mark.parametrize("kind", POINT_DAMAGE)
def test_only_whole_points_of_the_same_run_are_taken(kind, tmp_path, caplog):
    run, study = tmp_path / "ldr/table-8/smoke-abc", library.load("ldr/table-8")
    unit = run / "digits"
    unit.mkdir(parents=True)
    for number, name in enumerate(("outputs-000.npy", "outputs-001.npy", "outputs-001-corrupted-5.npy")):
        np.save(unit / name, np.full((2, 50, 3), number))
    row = Row("digits", {"method": "ldr"}, 3, {"accuracy": 0.25}, run=1, hyperparameters={"strength": 0.0})
    finish_point(run, "digits", row, reference=0)
    np.save(unit / "outputs-001-later.npy", np.ones(3))
    assert finished_point(run, "digits", 1, study) == row
    assert finished_point(run, "digits", 0, study) is None
    assert caplog.text == ""
    POINT_DAMAGE[kind](unit, point_file(unit, 1))
    run = next(unit.parent.parent.iterdir())
    with caplog.at_level(logging.WARNING, "dissensus"):
        assert finished_point(run, "digits", 1, study) is None
    assert caplog.text.count("The point is trained again.") == 1


def test_points_are_no_part_of_a_finished_unit(tmp_path):
    run = tmp_path / "ldr/table-8/smoke-abc"
    unit = run / "digits"
    unit.mkdir(parents=True)
    np.save(unit / "outputs-000.npy", np.ones(3))
    row = Row("digits", {"method": "erm"}, 0, {"accuracy": 0.25}, run=0)
    finish_point(run, "digits", row)
    assert point_file(unit, 0).is_file()
    finish_unit(run, "digits", [row])
    assert sorted(file.name for file in unit.iterdir()) == ["manifest.json", "outputs-000.npy", "rows.json"]
    checked_folders.check_unit(run, "digits")


# Names that lead elsewhere


NAMES = ["../../evil", "ldr/../../../evil", "/tmp/evil", "ldr/..", "ldr/a/b", "ldr/", "ldr/.hidden", "ldr/a\\..\\b"]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_of_a_study_leads_out_of_the_runs_folder(name, tmp_path):
    file = tmp_path / "ldr" / "mine.toml"
    file.parent.mkdir()
    file.write_text(f"name = '{name}'\n" + (library.SPECS / f"{FORMULA}.toml").read_text())
    before = set(tmp_path.rglob("*"))
    code, text = command("run", str(file), "--scale", "smoke")
    assert (code, "Traceback" in text) == (1, False)
    assert "the name of a study is that of its file" in text
    assert set(tmp_path.rglob("*")) == before
    with pytest.raises(spec.SpecError, match="PAPER/NAME"):
        runner.run(replace(library.load(FORMULA), name=name), "smoke", root=tmp_path / "runs" / "studies")
    assert set(tmp_path.rglob("*")) == before


def test_no_scale_unit_or_method_leads_out_of_the_runs_folder(tmp_path):
    root = tmp_path / "a" / "b"
    study = library.load(FORMULA)
    outside = replace(study, scales={"../../evil": {}})
    with pytest.raises(StorageError, match="cannot be the name of a folder"):
        runner.run(outside, "../../evil", root=root)
    for name in ("../../../../evil", str(tmp_path / "evil"), "grid/../../x"):
        wandering = replace(PROCEDURES["formula"], units=lambda _, name=name: [WholeGrid(name)])
        with pytest.raises(StorageError, match="cannot be the name of a folder"):
            runner.run(study, "smoke", root=root, procedures={**PROCEDURES, "formula": wandering})
    assert not list(tmp_path.glob("*evil*"))
    report = read_report(runner.run(FORMULA, "smoke", root=root))
    table = spec.resolved(library.load("adp/table-1"), "smoke", {}, "x")
    with pytest.raises(MethodError, match="letters, digits"):
        methods.method_of(table, "../../../evil")
    assert report.study == FORMULA


@pytest.mark.parametrize("uses", ["../../evil", "collusion/../../evil", "/etc/evil", "evil.toml", 3, ["a"]])
def test_a_study_uses_studies_of_the_library_only(uses, tmp_path, monkeypatch):
    (tmp_path / "evil.toml").write_text('title = "SECRET"\nsecret = 1\n')
    monkeypatch.setattr(library, "SPECS", tmp_path / "library" / "specs")
    shutil.copytree(run_folders.__file__.removesuffix("run_folders.py") + "specs", library.SPECS)
    file = tmp_path / "ldr" / "mine.toml"
    file.parent.mkdir()
    file.write_text(f"uses = {json.dumps(uses)}\n" + (library.SPECS / f"{FORMULA}.toml").read_text())
    for words in (["show", str(file)], ["run", str(file)]):
        code, text = command(*words)
        assert (code, "Traceback" in text, "secret" in text.lower()) == (1, False, False)
        assert "key 'uses' must name a study of the library" in text
    if isinstance(uses, str):
        code, text = command("run", FORMULA, "--scale", "smoke", "--set", f"uses={uses}")
        assert (code, "must name a study of the library" in text) == (1, True)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"x = " + b"[" * 5000, b'uses = "collusion/figure-2"', b'uses = "adp/table-1"\nscales = 3']
)
def test_files_that_are_no_studies_are_one_sentence(content, tmp_path):
    file = tmp_path / "collusion" / "mine.toml"
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(spec.SpecError, match="mine.toml"):
        library.load(str(file))


def test_only_files_are_read_as_studies(tmp_path):
    (tmp_path / "collusion").mkdir()
    os.mkfifo(tmp_path / "collusion" / "pipe.toml")
    (tmp_path / "collusion" / "folder.toml").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(spec.SpecError, match="there is no such file"):
            library.load(str(tmp_path / "collusion" / f"{name}.toml"))
    with pytest.raises(spec.SpecError, match="there is no study"):
        library.load("x" * 5000 + ".toml")


# A full disk


def test_a_full_disk_is_one_sentence_and_nothing_is_lost(monkeypatch):
    calls = []

    def full(file):
        calls.append(file)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dissensus.storage.os.fsync", full)
        code, text = command("run", FORMULA, "--scale", "smoke")
    assert calls
    assert (code, "Traceback" in text) == (1, False)
    assert "cannot be written to: No space left on device. What is finished is kept" in text
    code, text = command("run", FORMULA, "--scale", "smoke")
    assert code == 0, text


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), resource.RLIM_INFINITY))
sys.argv[0] = "dissensus"
from dissensus.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [3000])
def test_a_limit_of_file_sizes_is_one_sentence_and_nothing_is_lost(limit, clean, tmp_path):
    words = ["study", "run", TRAINED, "--scale", "smoke"]
    words += [word for key, value in QUICK.items() for word in ("--set", f"{key}={spec.toml_value(value)}")]
    limited = subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit), *words], capture_output=True, text=True, check=False
    )
    assert (limited.returncode, "Traceback" in limited.stderr) == (1, False), limited.stderr
    assert limited.stderr.count("error:") == 1
    assert "File too large" in limited.stderr
    subprocess.run([*PROGRAM, *words], capture_output=True, check=True)
    for row, expected in zip(
        rows_of(only_run(run_folders.runs_folder(), TRAINED)), rows_of(only_run(clean, TRAINED)), strict=True
    ):
        assert row["measures"] == pytest.approx(expected["measures"], rel=1e-3), (
            "backends may differ in their last bits"
        )


@pytest.mark.slow
@pytest.mark.parametrize("limit", [2000])
def test_a_limit_of_file_sizes_is_one_sentence_in_robust(limit, tmp_path):
    build = maker("mlp", datasets.load_unscaled("made-images"), {"width": 4})
    dissensus.Ensemble(build, members=2, seed=0).save(tmp_path / "ensemble")
    words = ["robust", "--ensemble", tmp_path / "ensemble", "--network", "mlp", "--data", "made-images"]
    words += ["--option", "width=4", "--epsilon", "0.1", "--suite", "quick", "--examples", "64"]
    words += ["--folder", tmp_path / "kept", "--batch-size", "32"]
    start = [sys.executable, "-c", LIMITED, limit, *words]
    limited = subprocess.run([str(word) for word in start], capture_output=True, text=True, check=False)
    assert (limited.returncode, "Traceback" in limited.stderr) == (1, False), limited.stderr
    assert limited.stderr.count("error:") == 1
    assert "File too large" in limited.stderr


# Processes that are killed or interrupted


def test_sigint_during_the_imports_ends_the_program_quietly(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport never_reached\n")
    script = tmp_path / "dissensus"
    script.write_text("from dissensus.cli import main\nmain()\n")
    source = str(Path(dissensus.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), source])}
    for start in ([*PROGRAM, "--help"], [sys.executable, str(script), "--help"]):
        ended = subprocess.run(
            start, cwd=tmp_path, env=environment, capture_output=True, check=False, preexec_fn=default_signals
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")
    library_user = subprocess.run(
        [sys.executable, "-c", "import dissensus"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=default_signals,
    )
    assert "KeyboardInterrupt" in library_user.stderr, "other programs see the interrupt"


def default_signals():
    """A shell lets programs in the background ignore the first, and `nohup` the second."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_worker_whose_parent_has_ended_ends_before_its_imports(tmp_path):
    (tmp_path / "torch.py").write_text("import pathlib\npathlib.Path('imported').touch()\n")
    source = str(Path(dissensus.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), source]), "_DISSENSUS_WORKER_OF": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", "import dissensus"], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    if sys.platform == "linux":
        assert (ended.returncode, ended.stderr) == (1, b"")
        assert not (tmp_path / "imported").exists()


def children_of(process):
    """Worker processes of a command, by their numbers."""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(process)], capture_output=True, text=True, check=False
    ).stdout
    return {int(line.split()[0]) for line in listed.splitlines() if "spawn_main" in line}


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGKILL, "early"), (signal.SIGTERM, "late"), (signal.SIGINT, "early"), (signal.SIGHUP, "early")],
)
def test_workers_end_with_their_command_on_every_signal(number, moment, tmp_path):
    words = [*PROGRAM, "study", "run", "collusion/figure-15", "--scale", "smoke", "--jobs", "2"]
    changes = {"data": ["digits"], "grid": {"beta": [0.0], "seed": [0, 1, 2]}, "members.network": "mlp"}
    changes |= {"optimisation.epochs": 10**6, "optimisation.patience": 10**6, "optimisation.augment": []}  # no end
    words += [word for key, value in changes.items() for word in ("--set", f"{key}={spec.toml_value(value)}")]
    with (tmp_path / "log").open("w") as log:
        started = subprocess.Popen(words, stdout=log, stderr=log, preexec_fn=default_signals)
    workers, deadline = set(), time.monotonic() + 120
    root = run_folders.runs_folder()
    try:
        while len(workers) < 2 or (moment == "late" and not list(root.rglob("checkpoints*"))):
            assert started.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            workers |= children_of(started.pid)
            time.sleep(0.02)
        started.send_signal(number)
        code = started.wait(60)
        assert code == (130 if number is signal.SIGINT else -number)
        while any(map(is_alive, workers)):
            assert time.monotonic() < deadline, "a worker lives on"
            time.sleep(0.02)
    finally:  # a training without an end must not go on beside other tests
        started.kill()
        started.wait()
        for worker in filter(is_alive, workers):
            os.kill(worker, signal.SIGKILL)
    assert "Traceback" not in (tmp_path / "log").read_text()
