"""Folders of version 0.1 load, or are refused with the command that converts them (see `write_release_0_1.py`)."""

import importlib.util
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner
from write_release_0_1 import SEEDS, WIDTHS, build, data, other

import dissensus as ds
from dissensus import cli, storage
from dissensus.execution import choice
from dissensus.studies import checked_folders
from dissensus.studies.procedures import attack, search
from dissensus.train.conversion import convert

GOLDEN = Path(__file__).parent / "golden" / "release-0.1"
EXPECTED = load_file(GOLDEN / "expected.safetensors")
X = EXPECTED["x"]
OBJECTIVE = partial(ds.objectives.independent, loss="cross_entropy")


@pytest.fixture
def stored(tmp_path):
    """A copy of the folders of 0.1, which may be written to."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "old"))


def test_ensembles_of_0_1_load_with_equal_outputs():
    ensemble = ds.Ensemble.load(GOLDEN / "ensemble", build)
    assert (ensemble.seed, ensemble.member_ids, ensemble.training) == (7, [0, 2], True)
    torch.testing.assert_close(ensemble.predict(X), EXPECTED["ensemble"])
    mixed = ds.Ensemble.load(GOLDEN / "mixed", [build, other])
    torch.testing.assert_close(mixed.predict(X), EXPECTED["mixed"])


def test_sweeps_of_0_1_load_with_equal_outputs():
    sweep = ds.train.Sweep.load(GOLDEN / "sweep", build)
    assert sweep.points == [{"width": width, "seed": seed} for width in WIDTHS for seed in SEEDS]
    for run in range(len(sweep)):
        torch.testing.assert_close(sweep.run(run).predict(X), EXPECTED[f"sweep/{run}"])
        assert [entry["epoch"] for entry in sweep.history(run).epochs] == [1, 2]


def test_checkpoints_of_0_1_are_refused_with_the_command_that_saves_their_weights(stored):
    newest = stored / "checkpoint" / "step-000000006-000001"
    with pytest.raises(ds.StorageError) as refused:
        ds.fit(
            ds.Ensemble(build, 2, seed=1),
            data(),
            OBJECTIVE,
            epochs=5,
            checkpoint=stored / "checkpoint",
            resume=True,
        )
    assert str(refused.value) == (
        f"{newest} was written by an older dissensus (format 1); this one reads from 5 on: training cannot go on from "
        "it, since the same seed gives other random numbers now. Train again in another folder. Of a fit, `dissensus "
        f"convert {newest} NEW --build MODULE:FUNCTION` saves the weights as an ensemble."
    )
    plan = stored / "sweep-checkpoint"
    with pytest.raises(ds.StorageError, match=r"plan\.json was written by an older dissensus \(format 0\)"):
        ds.sweep(build, data(), OBJECTIVE, grid={"seed": SEEDS}, members=2, epochs=5, checkpoint=plan, resume=True)


def same(left, right, build=build):
    first, second = ds.Ensemble.load(left, build), ds.Ensemble.load(right, build)
    return all(
        torch.equal(a, b) for a, b in zip(first.body.tensors().values(), second.body.tensors().values(), strict=True)
    )


def test_weights_of_a_checkpoint_of_0_1_become_an_ensemble(stored, tmp_path):
    result = convert(stored / "checkpoint", tmp_path / "new", build)
    assert result == ("ensemble", tmp_path / "new", stored / "checkpoint" / "step-000000006-000001")
    ensemble = ds.Ensemble.load(tmp_path / "new", build)
    assert (ensemble.members, ensemble.seed, ensemble.member_ids) == (2, 1, [0, 1])
    torch.testing.assert_close(ensemble.predict(X), EXPECTED["checkpoint"])
    convert(stored / "checkpoint" / "step-000000005-000001", tmp_path / "before", build)
    assert not same(tmp_path / "new", tmp_path / "before")
    weights = next((stored / "checkpoint" / "step-000000006-000001").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    convert(stored / "checkpoint", tmp_path / "older", build)  # the newest one that is whole
    assert same(tmp_path / "older", tmp_path / "before")


def frozen_convolution():
    network = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    network[0].bias.requires_grad_(False)
    return network


@pytest.mark.parametrize("channels_last", [False, True])
def test_checkpoints_of_today_become_ensembles_too(tmp_path, channels_last):
    x, y = torch.randn(8, 2, 3, 3), torch.arange(8) % 2
    ensemble = ds.Ensemble(frozen_convolution, 3, seed=5)
    ensemble = ensemble.subset([0, 2])
    ds.fit(ensemble, (x, y), OBJECTIVE, epochs=2, checkpoint=tmp_path / "old", channels_last=channels_last)
    convert(tmp_path / "old", tmp_path / "new", frozen_convolution)
    loaded = ds.Ensemble.load(tmp_path / "new", frozen_convolution)
    assert (loaded.seed, loaded.member_ids) == (5, [0, 2])
    torch.testing.assert_close(loaded.predict(x), ensemble.predict(x))


@pytest.mark.parametrize("name", ["ensemble", "sweep"])
def test_saved_folders_are_written_anew(stored, tmp_path, name):
    assert convert(stored / name, tmp_path / "new").kind == name
    load = ds.Ensemble.load if name == "ensemble" else ds.train.Sweep.load
    before, after = load(stored / name, build), load(tmp_path / "new", build)
    if name == "ensemble":
        torch.testing.assert_close(before.predict(X), after.predict(X))
        assert (before.seed, before.member_ids) == (after.seed, after.member_ids)
    else:
        assert before.points == after.points
        assert before.outcomes == after.outcomes
        torch.testing.assert_close(before.run(3).predict(X), after.run(3).predict(X))


def test_what_cannot_be_converted_is_refused(stored, tmp_path):
    for place in ("sweep-checkpoint", "sweep-checkpoint/part-0000"):
        with pytest.raises(ds.StorageError, match="checkpoints of a sweep, which cannot be converted. Train again"):
            convert(stored / place, tmp_path / "new", build)
    with pytest.raises(ds.StorageError, match="holds no saved ensemble, sweep or checkpoint"):
        convert(stored, tmp_path / "new")
    with pytest.raises(ValueError, match="`build` must return a member .*; got none. On the command line: --build"):
        convert(stored / "checkpoint", tmp_path / "new")
    with pytest.raises(ds.StorageError, match="34 trainable parameters a member there, and 50 in the network"):
        convert(stored / "checkpoint", tmp_path / "new", partial(build, 6))
    with pytest.raises(ValueError, match="`new` must be another folder"):
        convert(stored / "ensemble", stored / "ensemble")
    assert not (tmp_path / "new").exists()


def test_the_command_converts(stored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).parent / "write_release_0_1.py", tmp_path / "networks_of_mine.py")

    def run(*words):
        result = CliRunner().invoke(cli.app, ["convert", *words])
        return result.exit_code, " ".join((result.output + result.stderr).split())

    code, text = run("old/checkpoint", "new", "--build", "networks_of_mine:build")
    assert code == 0, text
    assert f"The ensemble is in {tmp_path / 'new'}" in text
    torch.testing.assert_close(ds.Ensemble.load(tmp_path / "new", build).predict(X), EXPECTED["checkpoint"])
    assert run("old/sweep", "sweep")[0] == 0
    for words, answer in {
        ("old/checkpoint", "x"): "--build must return a member",
        ("old/checkpoint", "x", "--build", "absent:build"): "No module named 'absent'",
        ("old/checkpoint", "x", "--build", "networks_of_mine:absent"): "has no absent",
        ("old/checkpoint", "x", "--build", "networks_of_mine"): "--build must be MODULE:FUNCTION",
        ("absent", "x"): "holds no saved ensemble",
    }.items():
        code, text = run(*words)
        assert code != 0
        assert answer in text, text
    assert not (tmp_path / "x").exists()


# Every file has a whole number as its format, and a newer one is refused


def test_a_format_must_be_a_whole_number(stored):
    manifest = stored / "ensemble" / "manifest.json"
    text = manifest.read_text()
    for value in ('"2"', "true", "null", "1.5"):
        manifest.write_text(text.replace('"format": 1', f'"format": {value}'))
        with pytest.raises(ds.StorageError, match="its format must be a whole number"):
            ds.Ensemble.load(stored / "ensemble", build)


NEWER = r"was written by a newer dissensus \(format 99\); this one reads up to [0-9]+: upgrade\."


def make_newer(file):
    """Give a JSON file another format; its checksum stays, as that of a newer release might be another."""
    record = json.loads(file.read_text())
    assert type(record["format"]) is int, file
    file.write_text(json.dumps({**record, "format": 99}))


def test_a_newer_checkpoint_is_not_skipped_for_an_older_one(tmp_path):
    options = {"epochs": 2, "checkpoint": tmp_path, "resume": True, "checkpoint_seconds": 0.0}
    ds.fit(ds.Ensemble(build, 2), data(), OBJECTIVE, **options)
    newest = sorted(tmp_path.glob("step-*"))[-1]
    make_newer(newest / "manifest.json")
    with pytest.raises(storage.OtherFormat, match=NEWER):
        ds.fit(ds.Ensemble(build, 2), data(), OBJECTIVE, **options)
    with pytest.raises(storage.OtherFormat, match=NEWER):
        convert(tmp_path, tmp_path / "new", build)


def test_newer_sweeps_plans_and_twins_are_refused(stored, tmp_path):
    make_newer(stored / "sweep" / "manifest.json")
    with pytest.raises(storage.OtherFormat, match=NEWER):
        ds.train.Sweep.load(stored / "sweep", build)
    options = {"grid": {"seed": [0]}, "members": 2, "epochs": 1, "checkpoint": tmp_path / "sweep", "resume": True}
    ds.sweep(build, data(), OBJECTIVE, **options)
    make_newer(tmp_path / "sweep" / "plan.json")
    with pytest.raises(storage.OtherFormat, match=NEWER):
        ds.sweep(build, data(), OBJECTIVE, **options)
    joint = partial(ds.objectives.joint, loss="cross_entropy", pool="score")
    options = {"epochs": 1, "checkpoint": tmp_path / "fit", "resume": True, "twin": True}
    ds.fit(ds.Ensemble(build, 2), data(), joint, **options)
    make_newer(tmp_path / "fit" / "twin" / "beginning" / "manifest.json")
    with pytest.raises(storage.OtherFormat, match=NEWER):
        ds.fit(ds.Ensemble(build, 2), data(), joint, **options)


def test_newer_attacks_are_refused_and_not_overwritten(tmp_path):
    x, y = torch.rand(6, 3), torch.zeros(6, dtype=torch.int64)
    model = build().eval()
    fgsm = partial(ds.attacks.fgsm, epsilon=0.1)
    ds.attacks.over(fgsm, model, x, y, folder=tmp_path)
    manifest = next(tmp_path.glob("*/manifest.json"))
    make_newer(manifest)
    before = manifest.read_text()
    with pytest.raises(storage.OtherFormat, match=NEWER):
        ds.attacks.over(fgsm, model, x, y, folder=tmp_path)
    assert manifest.read_text() == before


@pytest.mark.parametrize("formats", [choice.FORMATS, search.FORMATS, attack.FORMATS, checked_folders.FORMATS])
def test_records_carry_a_format(tmp_path, formats):
    file = tmp_path / "record.json"
    storage.write_record(file, {"format": formats.newest, "value": 1})
    assert storage.read_record(file, formats)["value"] == 1
    make_newer(file)
    with pytest.raises(storage.OtherFormat, match=NEWER):
        storage.read_record(file, formats)
    with pytest.raises(AssertionError, match="a record has a format"):
        storage.write_record(file, {"value": 1})


def test_the_writer_of_these_folders_is_of_0_1():
    """The script refuses to run with any other version, so that nobody renews these folders with today's code."""
    spec = importlib.util.find_spec("write_release_0_1")
    assert spec is not None
    assert 'assert ds.__version__ == "0.1.0"' in Path(spec.origin or "").read_text()
