"""Folders of runs: what was started, failed, finished, made with other settings or by another version."""

import json
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from dissensus.cli import app
from dissensus.fingerprint import source_digest
from dissensus.pages import html
from dissensus.studies import datasets, library, run_folders, spec
from dissensus.studies import run as runner
from dissensus.studies.page import page
from dissensus.studies.procedures.builtin import PROCEDURES
from dissensus.studies.run_folders import RunState, find, folder_of, read_state, unfinished

STUDY = "ldr/figure-2"
"""Formulas: nothing is trained."""
TRAINED = "collusion/figure-15"


def settings_of(name, **changes):
    return spec.resolved(library.load(name), "smoke", changes, name)


@pytest.fixture(autouse=True)
def without_shipped_results(monkeypatch, tmp_path):
    monkeypatch.setattr(run_folders, "SHIPPED", tmp_path / "shipped")


@pytest.fixture
def show(tmp_path, monkeypatch):
    monkeypatch.setenv("DISSENSUS_RUNS", str(tmp_path))
    monkeypatch.setattr("dissensus.cli.screen.console.width", 250)

    def run(name):
        result = CliRunner().invoke(app, ["study", "show", name])
        assert result.exit_code == 0, result.output
        return re.sub(r"\s+", " ", result.output)

    return run


def test_a_finished_run_says_its_settings_and_version(tmp_path):
    folder = runner.run(STUDY, "smoke", root=tmp_path)
    resolved = settings_of(STUDY)
    assert folder == folder_of(resolved, "smoke", tmp_path)
    assert read_state(folder) == RunState("done", resolved.settings_fingerprint(), runner.dissensus.__version__)
    report = json.loads((folder / "report.json").read_text())
    assert report["made"]["fingerprint"] == resolved.settings_fingerprint()
    assert find(STUDY, tmp_path).origin == ""
    assert unfinished(STUDY, tmp_path) == []


def test_a_run_that_failed_says_why_and_is_continued(tmp_path, monkeypatch, show):
    root = run_folders.runs_folder()
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.run(TRAINED, "smoke", root=root)
    folder = folder_of(settings_of(TRAINED), "smoke", root)
    state = read_state(folder)
    assert (state.stage, state.reason) == ("failed", "ZeroDivisionError: division by zero")
    assert find(TRAINED, root) is None
    assert "A run at scale smoke failed: ZeroDivisionError: division by zero" in show(TRAINED)
    assert "A run at scale smoke failed: ZeroDivisionError" in html(page([TRAINED], root))
    assert runner.run(TRAINED, "smoke", root=root) == folder
    assert read_state(folder).stage == "done"
    assert unfinished(TRAINED, root) == []


def test_a_run_that_was_interrupted_is_not_taken_for_a_result(tmp_path, show):
    root = run_folders.runs_folder()

    def interrupt(text, share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(TRAINED, "smoke", root=root, on_study=interrupt)
    assert find(TRAINED, root) is None
    output = show(TRAINED)
    assert f"was interrupted. Continue it with `dissensus study run {TRAINED} --scale smoke`" in output


def test_a_run_in_progress_names_its_process(tmp_path):
    folder = folder_of(settings_of(STUDY), "smoke", tmp_path)
    folder.mkdir(parents=True)
    run_folders.write_state(folder, RunState("started"))
    with runner.alone(folder, STUDY):
        (sentence,) = unfinished(STUDY, tmp_path)
    assert re.fullmatch(r"A run at scale smoke is going on, by process \d+ on .*\.", sentence)


def test_a_report_without_its_mark_is_half_written(tmp_path):
    folder = runner.run(STUDY, "smoke", root=tmp_path)
    (folder / "DONE").unlink()
    assert read_state(folder).stage == "started"
    assert find(STUDY, tmp_path) is None
    assert runner.run(STUDY, "smoke", root=tmp_path) == folder
    assert find(STUDY, tmp_path) is not None


def test_a_run_with_other_settings_is_another_folder_and_says_so(tmp_path, show):
    root, changes = run_folders.runs_folder(), {"grid.classes": [4]}
    other_folder = runner.run(STUDY, "smoke", changes=changes, root=root)
    assert find(STUDY, root).origin == "a run with other settings (grid.classes=[4])"
    assert "The result is a run with other settings (grid.classes=[4])." in show(STUDY)
    assert "a run with other settings" in html(page([STUDY], root))
    assert runner.run(STUDY, "smoke", root=root) != other_folder
    assert find(STUDY, root).origin == "", "the study's own settings come first"
    runner.run(STUDY, "smoke", changes={"grid.classes": [3]}, root=root)
    assert find(STUDY, root).origin == ""


def test_a_result_of_another_version_is_another_folder_and_says_so(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("dissensus.__version__", "0.0.9")
        older = runner.run(STUDY, "smoke", root=tmp_path)
    assert find(STUDY, tmp_path).origin == "a run of dissensus 0.0.9"
    assert runner.run(STUDY, "smoke", root=tmp_path) != older
    assert find(STUDY, tmp_path).origin == ""


def test_a_run_of_an_earlier_release_without_a_state_is_still_read(tmp_path):
    folder = runner.run(STUDY, "smoke", root=tmp_path)
    (folder / "state.json").unlink()
    (folder / "manifest.json").unlink()
    report = json.loads((folder / "report.json").read_text())
    report["made"].pop("fingerprint")
    report["made"]["version"] = "0.1.0"
    (folder / "report.json").write_text(json.dumps(report))
    folder.rename(folder.with_name("smoke-0123456789ab"))
    result = find(STUDY, tmp_path)
    assert result.origin == "a run of dissensus 0.1.0 without checksums: changes of its files cannot be seen"
    assert result.points


def test_a_run_of_a_newer_format_is_refused(tmp_path):
    folder = runner.run(STUDY, "smoke", root=tmp_path)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    words = "was written by a newer dissensus (format 2); this one reads up to 1: upgrade."
    assert read_state(folder) == RunState("damaged", reason=f"{manifest} {words}")


def test_texts_do_not_change_the_fingerprint_and_settings_do():
    original = settings_of(STUDY)
    assert settings_of(STUDY, title="Another title").digest() == original.digest()
    changed = settings_of(STUDY, **{"grid.classes": [4]})
    assert changed.settings_fingerprint() != original.settings_fingerprint()
    assert original.settings_fingerprint("other code") != original.settings_fingerprint()


def test_shipped_results_say_where_they_come_from(tmp_path, monkeypatch):
    monkeypatch.undo()
    result = find("adp/table-2", tmp_path)
    assert result.origin == f"shipped with the package and made by version {result.provenance.version}"


def test_a_result_of_another_procedure_version_or_of_other_settings_is_stale(tmp_path, monkeypatch, show):
    root = run_folders.runs_folder()
    runner.run(STUDY, "smoke", root=root)
    assert find(STUDY, root).stale == ""
    settings = library.load(STUDY)
    other = replace(settings, grid={**settings.grid, "members": [2, 3, 4]}, scales={"smoke": {}, "paper": {}})
    with monkeypatch.context() as patch:
        patch.setattr(run_folders.library, "load", lambda _: other)
        assert find(STUDY, root).stale == "the study's settings have changed since"
    procedure = PROCEDURES[library.load(STUDY).procedure]
    with monkeypatch.context() as patch:
        patch.setitem(PROCEDURES, "formula", replace(procedure, version=procedure.version + 1))
        sentence = f"made by version {procedure.version} of the procedure 'formula', which is at version"
        assert sentence in find(STUDY, root).stale
        assert f"The result is stale: it was {sentence}" in show(STUDY)
        assert "This result is stale" in html(page([STUDY], root))
        listed = CliRunner().invoke(app, ["study", "list"])
        assert "stale" in listed.output
        again = CliRunner().invoke(app, ["study", "run", STUDY, "--scale", "smoke"])
        assert "The result so far is stale" in re.sub(r"\s+", " ", again.output)
        assert find(STUDY, root).stale == ""


def test_settings_that_were_changed_by_hand_are_not_stale(tmp_path):
    runner.run(STUDY, "smoke", changes={"grid.members": [2]}, root=tmp_path)
    result = find(STUDY, tmp_path)
    assert "with other settings" in result.origin
    assert result.stale == ""


def test_a_result_carries_what_it_is_of(tmp_path):
    made = runner.run(STUDY, "smoke", root=tmp_path)
    summary = json.loads(run_folders.ship(made, tmp_path / "shipped").read_text())
    settings = settings_of(STUDY)
    assert summary["settings"] == settings.settings()
    assert summary["made"]["fingerprint"] == settings.settings_fingerprint()
    assert summary["made"]["procedures"] == {"formula": PROCEDURES["formula"].version}
    assert summary["made"]["source"] == source_digest()
    assert "verdicts" not in summary
