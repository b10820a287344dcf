"""`dissensus tune`: data from files, spaces as words, the page and the JSON."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import dissensus as ds
from dissensus.cli import app
from dissensus.cli.tune import _space
from dissensus.train import Range

SMALL = ["--epochs", "2", "--splits", "2", "--seeds", "1", "--members", "2", "--width", "4", "--depth", "1"]


def run(*arguments):
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table of sizes with a target of numbers and one of names, in the working folder."""
    monkeypatch.chdir(tmp_path)
    x = torch.randn(80, 2, generator=torch.Generator().manual_seed(0)).tolist()
    lines = [f"{a},{b},{a - b},{'yes' if a > b else 'no'}" for a, b in x]
    file = tmp_path / "sizes.csv"
    file.write_text("\n".join(["a,b,difference,larger", *lines]) + "\n")
    return file


def test_a_table_becomes_a_page_a_record_and_an_ensemble(table, tmp_path):
    pytest.importorskip("matplotlib")
    result = run(
        *(table, "--target", "difference", "--drop", "larger", "--space", "beta=0.3,0.9", *SMALL),
        *("--page", "p.html", "--json", "p.json", "--save", "kept"),
    )
    assert result.exit_code == 0, result.output
    assert "of training every" in result.output
    record = json.loads((tmp_path / "p.json").read_text())
    assert [candidate["point"]["beta"] for candidate in record["candidates"]] == [0, 0.3, 0.9]
    assert record["settings"]["metric"] == "loss"
    page = (tmp_path / "p.html").read_text().replace("&nbsp;", " ")
    assert "How much diversity? sizes" in page
    assert record["sentence"][1:] in page
    kept = ds.Ensemble.load(tmp_path / "kept", lambda: ds.nets.mlp(2, 1, (4,)))
    assert len(kept) == 2


def test_names_are_classes_and_settings_of_networks_are_searched(table, tmp_path):
    pytest.importorskip("matplotlib")
    result = run(
        *(table, "--target", "larger", "--drop", "difference", "--metric", "accuracy", *SMALL),
        *("--space", "beta=0.5", "--space", "width=2,4", "--json", "p.json"),
    )
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "p.json").read_text())
    assert record["settings"]["mode"] == "max"
    assert {candidate["point"]["width"] for candidate in record["candidates"]} == {2, 4}
    assert (tmp_path / "tune.html").exists()


def test_a_search_goes_on_in_its_folder(table, tmp_path):
    pytest.importorskip("matplotlib")
    words = [table, "--target", "difference", "--drop", "larger", "--space", "beta=0.9", *SMALL, "--checkpoint", "run"]
    first = run(*words, "--json", "first.json")
    assert first.exit_code == 0, first.output
    assert run(*words, "--json", "second.json").exit_code == 0
    one, other = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("first", "second"))
    assert one["candidates"] == other["candidates"]


def test_images_are_taken_as_pixels(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (60, 1, 8, 8), dtype=torch.uint8, generator=generator).numpy()
    np.savez(tmp_path / "images.npz", x=x, y=np.arange(60) % 3)
    result = run("images.npz", "--space", "beta=0.5", *SMALL, "--examples", 50, "--json", "p.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "p.json").read_text())["settings"]["rows"] == {
        "train": 32,
        "validation": 8,
        "test": 10,
    }


def test_spaces_are_lists_or_ranges():
    space = _space(["beta=0, 0.5,1", "lr=1e-4..1e-2:log", "members=2..8:int", "pool=score,probability"])
    assert space == {
        "beta": [0, 0.5, 1],
        "lr": Range(1e-4, 1e-2, log=True),
        "members": Range(2, 8, integer=True),
        "pool": ["score", "probability"],
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--space", "beta"], "write it as NAME=VALUES"),
        (["--space", "beta="], "write it as NAME=VALUES"),
        (["--space", "beta=0.1,,0.2"], "a value is missing"),
        (["--space", "beta=a..b"], "from a number to a number"),
        (["--space", "beta=1..0"], "low < high"),
        (["--space", "beta=0..1:lin"], "may end in :log or :int"),
        (["--space", "beta=0.1", "--space", "beta=0.2"], "given twice"),
        (["--space", "bta=0.1"], "beta"),
        (["--space", "beta=1.5"], "at most 1"),
        (["--objective", "augmentd"], "augmented"),
        (["--objective", "absent:function"], "absent"),
        (["--metric", "acuracy"], "--metric"),
        (["--loss", "brier"], "--loss"),
        (["--target", "wrong"], "wrong"),
        (["--task", "ranking"], "task"),
        (["--epochs", "2", "--first-rung", "3"], "--first-rung"),
        (["--test", "1.5"], "--test"),
        (["--device", "abacus"], "abacus"),
        (["--page", "sizes.csv"], "sizes.csv"),
    ],
)
def test_what_cannot_be_is_refused_in_words(table, words, message):
    pytest.importorskip("matplotlib")
    defaults = ["--target", "difference"] if "--target" not in words else []
    result = run(table, *defaults, "--drop", "larger", *[word for word in SMALL if "--epochs" not in words], *words)
    assert result.exit_code in (1, 2), result.output
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_data_that_is_not_there_is_refused_with_what_is():
    pytest.importorskip("matplotlib")
    result = run("digts")
    assert result.exit_code == 1
    assert "digits" in result.output
