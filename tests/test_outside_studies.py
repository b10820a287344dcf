"""A study, measure, procedure and data set from outside the package are passed as arguments; no table is changed."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dissensus.cli import app
from dissensus.data.sources import DATASETS, DatasetInfo
from dissensus.studies import library, measures, verdicts
from dissensus.studies import run as runner
from dissensus.studies.procedures.base import Procedure
from dissensus.studies.procedures.builtin import PROCEDURES
from dissensus.studies.procedures.training import stored_outputs
from dissensus.studies.results import Row
from dissensus.studies.run_folders import read_report
from dissensus.studies.spec import SpecError
from dissensus.studies.summary import summarise

STUDY = """
title = "Members that vote"
reference = "Figure 99"
claim = "A study from outside runs like any other."
data = ["made-table"]

[members]
network = "mlp"
count = 3
options = {width = 4}

[objective]
name = "augmented"
loss = "mse"
pool = "score"

[grid]
beta = [0.0, 1.0]
seed = [0, 1]

[optimisation]
epochs = 2

[evaluation]
measures = ["error", "spread"]

[[expect]]
says = "members are apart"
measure = "spread"
at = {beta = 0.0}
low = 0.0

[scales.smoke]
"""
DICE = """
title = "Dice"
reference = "Table 99"
claim = "A procedure from outside makes rows like any other."
data = ["made-table"]
procedure = "dice"

[grid]
sides = [2, 6]
seed = [0, 1, 2]

[evaluation]
measures = ["mean"]

[[expect]]
says = "larger dice roll higher"
measure = "mean"
at = {sides = 6}
than = {sides = 2}
direction = "greater"

[scales.smoke]
"""


def spread(outputs, targets, loss, pool):
    """Standard deviation over members."""
    return float(outputs.std(0).mean())


def wider_spread(outputs, targets, loss, pool):
    return 2 * float(outputs.std(0).mean())


@dataclass(frozen=True)
class Die:
    sides: int

    @property
    def name(self):
        return f"die-{self.sides}"


def dice(spec):
    return [Die(sides) for sides in spec.grid["sides"]]


def roll(die, context):
    rows = []
    for seed in context.spec.grid["seed"]:
        rolls = torch.randint(1, die.sides + 1, (100,), generator=torch.Generator().manual_seed(seed))
        context.progress(f"{die.name}, seed {seed}", 0.5)
        rows.append(
            Row("made-table", {"sides": die.sides}, seed, {"mean": float(rolls.double().mean())}, extras={"n": 100})
        )
    return rows


def unknown_measures(spec, measures):
    return [f"the measure {name!r}" for name in spec.evaluation.measures if name != "mean"]


DICE_PROCEDURES = {**PROCEDURES, "dice": Procedure(dice, roll, unknown_measures, trains=False)}
MORE_MEASURES = {**measures.MEASURES, "spread": spread}


@pytest.fixture
def study(tmp_path):
    folder = tmp_path / "collusion"
    folder.mkdir()

    def write(name, text):
        (folder / f"{name}.toml").write_text(text)
        return str(folder / f"{name}.toml")

    return write


@pytest.fixture(autouse=True)
def tables_stay_as_they_are():
    before = dict(PROCEDURES), dict(measures.MEASURES), library.names()
    yield
    assert (dict(PROCEDURES), dict(measures.MEASURES), library.names()) == before


def test_a_study_and_a_measure_from_outside(study, tmp_path):
    file = study("mine", STUDY)
    with pytest.raises(SpecError, match="no measure of 'evaluation.measures' is called 'spread'"):
        runner.run(file, "smoke", root=tmp_path / "runs")
    folder = runner.run(file, "smoke", root=tmp_path / "runs", measures=MORE_MEASURES)
    report = read_report(folder)
    assert {(row.point["beta"], row.seed) for row in report.rows} == {(0.0, 0), (0.0, 1), (1.0, 0), (1.0, 1)}
    for row in report.rows:
        outputs = stored_outputs(folder / f"made-table-seed-{row.seed}", row.run)
        assert row.measures["spread"] == pytest.approx(float(outputs.std(0).mean()))
    summary = summarise(report)
    assert [verdict.verdict for verdict in summary.verdicts] == [verdicts.UNDECIDED]  # two seeds
    assert summary.points[0].measures["spread"].seeds == 2


def test_a_spec_is_taken_as_well_as_its_file(study, tmp_path):
    file = study("mine", STUDY)
    by_file = runner.run(file, "smoke", root=tmp_path / "runs", measures=MORE_MEASURES)
    assert runner.run(library.load(file), "smoke", root=tmp_path / "runs", measures=MORE_MEASURES) == by_file


def test_a_spec_without_a_paper_is_refused_before_it_runs(study, tmp_path):
    spec = replace(library.load(study("mine", STUDY)), name="elsewhere/mine")
    with pytest.raises(SpecError, match="`study` must have a name PAPER/NAME; got 'elsewhere/mine'"):
        runner.run(spec, "smoke", root=tmp_path / "runs", measures=MORE_MEASURES)
    assert not (tmp_path / "runs").exists()


def test_a_measure_from_outside_that_changes_is_another_run(study, tmp_path):
    file = study("mine", STUDY)
    first = runner.run(file, "smoke", root=tmp_path / "runs", measures=MORE_MEASURES)
    changed = {**measures.MEASURES, "spread": wider_spread}
    second = runner.run(file, "smoke", root=tmp_path / "runs", measures=changed)
    assert second != first
    narrow, wide = (read_report(folder).rows[0].measures["spread"] for folder in (first, second))
    assert wide == pytest.approx(2 * narrow, rel=1e-3)


def test_a_procedure_from_outside(study, tmp_path):
    file = study("dice", DICE)
    with pytest.raises(SpecError, match="key 'procedure' is 'dice', which nothing is called"):
        runner.run(file, "smoke", root=tmp_path / "runs")
    texts = []
    options = {"root": tmp_path / "runs", "procedures": DICE_PROCEDURES}
    folder = runner.run(file, "smoke", **options, on_study=lambda text, share: texts.append((text, share)))
    assert [share for _, share in texts] == sorted(share for _, share in texts)
    assert json.loads((folder / "report.json").read_text())["rows"][0]["n"] == 100
    summary = summarise(read_report(folder))
    assert [point.axes for point in summary.points] == [{"sides": 2}, {"sides": 6}]
    assert [verdict.verdict for verdict in summary.verdicts] == [verdicts.AGREES]
    with pytest.raises(SpecError, match="cannot be run: the measure 'median'"):
        runner.run(file, "smoke", changes={"evaluation.measures": ["median"]}, **options)


def test_a_unit_of_a_procedure_from_outside_is_done_once(study, tmp_path):
    file = study("dice", DICE)
    options = {"root": tmp_path / "runs", "procedures": DICE_PROCEDURES}

    def interrupt(text, share):
        if text.startswith("die-6"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(file, "smoke", **options, on_study=interrupt)
    texts = []
    runner.run(file, "smoke", **options, on_study=lambda text, share: texts.append(text))
    assert {text.partition(",")[0] for text in texts} == {"die-6"}


def read_waves(files, part):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 2, generator=generator, dtype=torch.float64)
    y = torch.sin(6 * x[:, :1]) + x[:, 1:]
    return {None: (x, y), "train": (x[:40], y[:40]), "test": (x[40:], y[40:])}[part]


def read_steps(files, part):
    x, y = read_waves(files, part)
    return x, y.round()


@pytest.mark.parametrize("parts", [(), ("train", "test")])
def test_a_data_set_from_outside(parts, study, tmp_path):
    file = study("mine", STUDY.replace("made-table", "waves").replace(', "spread"', "").split("[[expect]]")[0] + SMOKE)
    waves = DatasetInfo("waves", "table", "Sine waves", "public domain", parts=parts, read=read_waves)
    with pytest.raises(SpecError, match="key 'data' is 'waves', which nothing is called"):
        runner.run(file, "smoke", root=tmp_path / "runs")
    catalogue = {**DATASETS, "waves": waves}
    folder = runner.run(file, "smoke", root=tmp_path / "runs", catalogue=catalogue)
    report = read_report(folder)
    assert {(row.data, row.seed) for row in report.rows} == {("waves", 0), ("waves", 1)}
    outputs = stored_outputs(folder / "waves-seed-0", report.rows[0].run)
    assert outputs.shape == (3, 20 if parts else 12, 1)
    assert all(row.measures["error"] > 0 for row in report.rows)
    assert report.provenance.data == [{"name": "waves", "source": "Sine waves", "terms": "public domain"}]
    steps = {**DATASETS, "waves": DatasetInfo("waves", "table", "Steps", "none", parts=parts, read=read_steps)}
    assert runner.run(file, "smoke", root=tmp_path / "runs", catalogue=steps) != folder, "other data is another run"
    assert "waves" not in DATASETS


SMOKE = "[scales.smoke]\n"


def documented_study():
    """The whole study of docs/studies.md."""
    text = (Path(__file__).parents[1] / "docs" / "studies.md").read_text()
    return text.partition("```toml\n")[2].partition("```")[0]


@pytest.fixture
def own_study(tmp_path, monkeypatch):
    monkeypatch.setenv("DISSENSUS_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("dissensus.cli.screen.console.width", 200)
    file = tmp_path / "collusion" / "mine.toml"
    file.parent.mkdir()
    file.write_text(documented_study())
    return file


def printed(*words):
    result = CliRunner().invoke(app, ["study", *map(str, words)])
    assert result.exit_code == 0, result.output
    return re.sub(r"\s+", " ", result.output)


def test_the_documented_study_runs_and_its_verdicts_follow_its_file(own_study):
    assert "diversity at β = 1 is greater than at every other β" in printed("run", own_study, "--scale", "smoke")
    assert "greater" in printed("show", own_study)
    text = own_study.read_text()
    own_study.write_text(text.replace('direction = "greater"', 'direction = "less"'))
    for command in (("run", own_study, "--scale", "smoke"), ("show", own_study)):
        output = printed(*command)
        assert "disagrees" in output
        assert "│ less" in output
    printed("run", own_study, "--scale", "smoke", "--set", "grid.seed=[0]")
    assert "4 seeds" in printed("show", own_study), "a run that was changed by --set does not hide the study's own"
    assert "Open" in printed("report", own_study, "--out", own_study.parent / "page.html")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            'measure = "diversity"',
            'measure = "divrsity"',
            "'expect[0].measure' is 'divrsity'.*Did you mean 'diversity'",
        ),
        ('than_measure = "error"', 'than_measure = "eror"', "'expect[1].than_measure' is 'eror'.*'error'"),
        ("than = {beta = [0.0, 0.5]}", "than = {bta = 0.0}", "'expect[0].than' is 'bta'"),
        ("than = {beta = [0.0, 0.5]}", "than = {beta = []}", "'expect[0].than.beta' must hold a value"),
        ('direction = "greater"', "", "must have 'paper', 'low', 'high' or 'direction'"),
        ("than = {beta = [0.0, 0.5]}", "", "'expect[0].direction' and 'expect[0].than'.* belong together"),
        ('direction = "greater"', 'direction = "lowest inside"', "along.* belong together"),
        ('direction = "greater"', "low = -inf", "must be a finite number"),
        ('direction = "greater"', 'direction = "greater"\npaper_seeds = 1', "'expect[0].paper_seeds' is 1"),
    ],
)
def test_statements_that_cannot_be_judged_are_refused(own_study, old, new, words):
    text = own_study.read_text()
    assert old in text
    own_study.write_text(text.replace(old, new, 1))
    result = CliRunner().invoke(app, ["study", "run", str(own_study), "--scale", "smoke"])
    assert result.exit_code != 0
    output = re.sub(r"\s+", " ", result.output)
    assert all(part in output for part in words.split(".*")), output


def test_a_search_on_data_without_rows_to_hold_out_is_one_sentence(tmp_path):
    with pytest.raises(SpecError, match="'search' needs rows to hold out, and friedman has none"):
        runner.run("collusion/figure-2", "smoke", changes={"data": ["friedman"]}, root=tmp_path)
