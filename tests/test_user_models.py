"""Commands on what people have: a function that returns a model, and data in files."""

import json
import sys
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from typer.testing import CliRunner

import dissensus as ds
from dissensus.cli import app
from dissensus.data.formats import DataError
from dissensus.data.user_files import ScaledImages, read_data

MODELS = """
import torch
from torch import nn
import dissensus as ds

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        return self.layer(x.flatten(1)[:, :4])

def ensemble():
    return ds.Ensemble(Tiny, members=3, seed=0)

def folder():
    return ds.Ensemble(lambda: nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(3, 2)), members=3)

def plain():
    torch.manual_seed(0)
    return Tiny()

def function():
    network = ensemble()
    return lambda x: network(x)

def regressor():
    return ds.Ensemble(lambda: nn.Linear(4, 1), members=3)

def nothing():
    return None

def number():
    return 3

def needs(argument):
    return argument

def breaks():
    raise RuntimeError("no weights here")

value = 7
network = Tiny()
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A command's code, what it printed, and what it said of errors, in a folder with models and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"models_of_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODELS)
    (tmp_path / f"{name}_broken.py").write_text("import absent_package_of_mine\n")
    (tmp_path / f"{name}_wrong.py").write_text("1 / 0\n")
    generator = np.random.default_rng(0)
    x, y = generator.random((60, 4), dtype=np.float32), np.arange(60) % 3
    np.savez(tmp_path / "data.npz", x=x, y=y, classes=np.array(["ant", "bee", "cat"]))
    np.savez(tmp_path / "far.npz", x=5 * x)
    np.savez(tmp_path / "values.npz", x=x, y=x.sum(1))
    np.savez(tmp_path / "no-y.npz", x=x)
    np.savez(tmp_path / "empty.npz", x=x[:0], y=y[:0])
    np.savez(tmp_path / "narrow.npz", x=x[:, 1:], y=y)
    np.savez(tmp_path / "gap.npz", x=np.where(x < 0.9, x, np.nan), y=y)
    outputs = generator.normal(size=(3, 60, 3)) + 2 * np.eye(3)[y]
    np.savez(tmp_path / "outputs.npz", outputs=outputs, targets=y)
    np.savez(tmp_path / "far-outputs.npz", outputs=generator.normal(size=(3, 40, 3)))
    rows = ["a,b,c,d,kind,id", *(",".join([*map(str, row), "xyz"[k], f"n{k}"]) for row, k in zip(x, y, strict=True))]
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    columns = {
        **{name: x[:, i] for i, name in enumerate("abcd")},
        "kind": np.array(["x", "y", "z"])[y],
        "size": x.sum(1),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "table.parquet")
    for label in ("cat", "dog"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for i in range(6):
            pixels = generator.integers(0, 255, (12, 10, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / label / f"{i}.png")

    def run(arguments):
        result = CliRunner().invoke(app, arguments.replace("MODELS", name).split(), env={"COLUMNS": "200"})
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, " ".join(result.stderr.split())

    return run


def models_in(folder):
    """The module of models of this test."""
    return next(module for name, module in sys.modules.items() if (folder / f"{name}.py").exists())


REPORT = "report --model MODELS:ensemble --data data.npz"
OOD = "ood --model MODELS:ensemble --data data.npz --outside far=far.npz --repeats 5"
ROBUST = "robust --model MODELS:ensemble --data data.npz --epsilon 0.05 --suite quick --examples 6"


def test_a_report_on_a_function_and_arrays(command, tmp_path):
    arguments = f"{REPORT} --shifted far.npz --training data.npz --json r.json --title Mine"
    code, printed, errors = command(arguments)
    assert code == 0, errors
    assert "Is it accurate?" in printed
    assert "Open report.html" in printed
    stored = json.loads((tmp_path / "r.json").read_text())
    assert stored["facts"]["names"] == ["ant", "bee", "cat"]
    assert stored["facts"]["shifted"] == {"far": 60}
    assert "<h1>Mine</h1>" in (tmp_path / "report.html").read_text()
    with np.load(tmp_path / "data.npz") as data:
        direct = ds.report(models_in(tmp_path).ensemble(), (torch.from_numpy(data["x"]), data["y"]))
    assert stored["numbers"]["nll"]["value"] == pytest.approx(direct.numbers["nll"].value)


@pytest.mark.parametrize("name", ["plain", "function", "network"])
def test_modules_and_callables(name, command, tmp_path):
    code, _, errors = command(f"report --model MODELS:{name} --data data.npz --kind logits --json r.json")
    assert code == 0, errors
    assert json.loads((tmp_path / "r.json").read_text())["facts"]["members"] == (3 if name == "function" else 1)


def test_a_table_with_a_target(command, tmp_path):
    code, _, errors = command("report --model MODELS:ensemble --data table.csv --target kind --drop id --json r.json")
    assert code == 0, errors
    stored = json.loads((tmp_path / "r.json").read_text())
    assert stored["facts"]["names"] == ["x", "y", "z"]
    code, _, errors = command(
        "report --model MODELS:regressor --data table.parquet --target size --drop kind --json r.json"
    )
    assert code == 0, errors
    assert json.loads((tmp_path / "r.json").read_text())["facts"]["task"] == "regression"


def test_a_folder_of_images(command, tmp_path):
    code, _, errors = command("report --model MODELS:folder --data images --image-size 8 --json r.json --batch-size 5")
    assert code == 0, errors
    stored = json.loads((tmp_path / "r.json").read_text())
    assert stored["facts"]["names"] == ["cat", "dog"]
    assert (tmp_path / "report.html").read_text().count("<image") >= 9
    code, _, errors = command(
        "ood --model MODELS:folder --data images/cat --outside images/dog --image-size 8 --repeats 5 --gallery g.png"
    )
    assert code == 0, errors
    assert (tmp_path / "g.png").exists()


def test_a_report_on_stored_outputs(command, tmp_path):
    code, _, errors = command("report outputs.npz --kind logits --shifted far=far-outputs.npz --json r.json")
    assert code == 0, errors
    stored = json.loads((tmp_path / "r.json").read_text())
    with np.load(tmp_path / "outputs.npz") as arrays, np.load(tmp_path / "far-outputs.npz") as far:
        direct = ds.report(arrays["outputs"], arrays["targets"], kind="logits", shifted={"far": far["outputs"]})
    assert stored["numbers"] == json.loads(direct.to_json())["numbers"]
    assert stored["shifted"] == json.loads(direct.to_json())["shifted"]
    code, _, errors = command("report outputs.npz --kind logits --data data.npz --json s.json")
    assert code == 0, errors
    assert json.loads((tmp_path / "s.json").read_text())["numbers"] == stored["numbers"]


def test_a_verdict_can_fail_a_pipeline(command, tmp_path):
    code, _, _ = command("report outputs.npz --kind logits --json r.json")
    verdict = json.loads((tmp_path / "r.json").read_text())["verdict"]
    assert code == 0
    assert command(f"report outputs.npz --kind logits --fail-on {verdict}")[0] == 3


def test_detection_by_a_model_is_that_of_its_outputs(command, tmp_path):
    code, printed, errors = command(f"{OOD} --json o.json")
    assert code == 0, errors
    assert "3 members, 3 classes, examples: 60 within, 60 far" in printed
    module = models_in(tmp_path)
    with np.load(tmp_path / "data.npz") as data, np.load(tmp_path / "far.npz") as far:
        for name, x in (("in", data["x"]), ("out", far["x"])):
            np.save(tmp_path / f"{name}.npy", module.ensemble().predict(x).numpy())
    assert command("ood in.npy --outside far=out.npy --repeats 5 --json p.json")[0] == 0
    by_model, by_outputs = (json.loads((tmp_path / f"{name}.json").read_text())["sets"]["far"] for name in "op")
    for score, row in by_outputs["scores"].items():
        assert by_model["scores"][score]["auroc"] == pytest.approx(row["auroc"], abs=1e-5)


def test_attacks_on_a_function(command, tmp_path, unchecked):
    code, printed, errors = command(f"{ROBUST} --json r.json --page r.html")
    assert code == 0, errors
    assert "part of what is attacked" in " ".join(printed.split())
    assert json.loads((tmp_path / "r.json").read_text())["facts"]["examples"] == 6
    assert (tmp_path / "r.html").exists()


WRONG = [
    ("report", 2, "give ENSEMBLE, or --model MODULE:FUNCTION; got neither"),
    (f"{REPORT} outputs.npz", 2, "got both"),
    ("report --model MODELS:ensemble", 1, "give --data: .npz with x and y"),
    ("report --model MODELS --data data.npz", 1, "--model must be MODULE:FUNCTION"),
    ("report --model absent_of_mine:f --data data.npz", 1, "No module named 'absent_of_mine' in this folder or among"),
    ("report --model MODELS_broken:f --data data.npz", 1, "No module named 'absent_package_of_mine'"),
    ("report --model MODELS_wrong:f --data data.npz", 1, "ZeroDivisionError: division by zero"),
    ("report --model MODELS:ensembl --data data.npz", 1, "has no ensembl. Did you mean 'ensemble'?"),
    ("report --model MODELS:nothing --data data.npz", 1, "must return an Ensemble, a module or a callable"),
    ("report --model MODELS:number --data data.npz", 1, "got int"),
    ("report --model MODELS:value --data data.npz", 1, "value is no function"),
    ("report --model MODELS:needs --data data.npz", 1, "It is called without arguments"),
    ("report --model MODELS:breaks --data data.npz", 1, "calling it failed: RuntimeError: no weights here"),
    ("report --model MODELS:ensemble --data absent.npz", 1, "absent.npz` must be a file; got nothing"),
    ("report --model MODELS:ensemble --data absent", 1, "must be a folder of images by class, or a file"),
    ("report --model MODELS:ensemble --data no-y.npz", 1, "must hold 'x', 'y'; got ['x']"),
    ("report --model MODELS:ensemble --data gap.npz", 1, "NaN or infinity"),
    ("report --model MODELS:ensemble --data table.csv", 1, "Name it with --target"),
    ("report --model MODELS:ensemble --data table.csv --target knd", 1, "Did you mean 'kind'?"),
    ("report --model MODELS:ensemble --data table.csv --target kind", 1, "text or gaps in 'id'"),
    ("report --model MODELS:ensemble --data table.csv --target kind", 1, "leave it out with --drop"),
    ("report --model MODELS:plain --data data.npz", 1, "--kind must be 'logits' or 'probabilities'"),
    (f"{REPORT} --task regression", 1, "`targets` must have shape"),
    (f"{REPORT} --levels 0.1,0.9", 1, "--levels goes with --loss quantile"),
    (f"{REPORT} --loss quantile --levels 0.9,0.1", 1, "rising order"),
    (f"{REPORT} --fail-on bad", 1, "--fail-on must be one of sound, reservations, problems, undecided"),
    (f"{REPORT} --page data.npz", 2, "is a file or folder that is read"),
    (f"{REPORT} --shifted far=far-outputs.npz", 1, "must hold 'x'"),
    ("report images", 1, "images"),
    ("report far-outputs.npz --kind logits", 1, "far-outputs.npz has no targets"),
    ("report outputs.npz --kind logits --data no-y.npz", 1, "must hold 'x', 'y'"),
    ("report outputs.npz", 1, "--kind must be 'logits' or 'probabilities'; got none"),
    ("ood --outside far.npz", 2, "give INSIDE, or --model MODULE:FUNCTION with --data"),
    ("ood --model MODELS:ensemble --outside far.npz", 2, "give INSIDE, or --model MODULE:FUNCTION with --data"),
    ("ood outputs.npz --data data.npz --outside far.npz", 2, "give INSIDE, or --model"),
    ("ood --model MODELS:ensemble --data data.npz --outside far=absent.npz", 1, "must be a file; got nothing"),
    ("robust --data data.npz --epsilon 0.1", 2, "give --ensemble, or --model"),
    ("robust --ensemble x --data digits --epsilon 0.1", 1, "x"),
    (f"{ROBUST} --network cnn", 2, "--network and --option go with --ensemble"),
    (ROBUST.replace("data.npz", "values.npz"), 1, "must hold labels, whole numbers"),
    (ROBUST.replace("data.npz", "images --image-size 8").replace(":ensemble", ":value"), 1, "value is no function"),
    ("robust --model MODELS:ensemble --data far.npz --epsilon 0.1", 1, "must hold 'x', 'y'"),
    (ROBUST.replace("data.npz", "empty.npz"), 1, "must hold at least one example; got none"),
    (ROBUST.replace("data.npz", "narrow.npz"), 1, "members cannot take inputs [6, "),
    ("ood --model MODELS:ensemble --data empty.npz --outside far=far.npz", 1, "at least one example; got none"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG, ids=[f"{i}" for i in range(len(WRONG))])
def test_what_commands_refuse(arguments, code, message, command):
    got, _, errors = command(arguments)
    assert (got, message in errors) == (code, True), errors


def test_nothing_is_imported_unless_it_is_named(command, tmp_path):
    (tmp_path / "sneaky.py").write_text("raise SystemExit('imported')\n")
    assert command("report outputs.npz --kind logits")[0] == 0
    assert "sneaky" not in sys.modules


def test_saved_ensembles_are_loaded_by_their_architecture(command, tmp_path, unchecked):
    build = ds.Architecture("dissensus.nets:mlp", inputs=4, outputs=3, hidden=[5])
    ds.Ensemble(build, members=2, seed=0).save(tmp_path / "kept")
    code, _, errors = command("report kept --data data.npz --json r.json")
    assert code == 0, errors
    with np.load(tmp_path / "data.npz") as data:
        direct = ds.report(ds.Ensemble(build, members=2, seed=0), (torch.from_numpy(data["x"]), data["y"]))
    stored = json.loads((tmp_path / "r.json").read_text())
    assert stored["numbers"]["nll"]["value"] == pytest.approx(direct.numbers["nll"].value)
    code, _, errors = command("robust --ensemble kept --data data.npz --epsilon 0.05 --suite quick --examples 6")
    assert code == 0, errors
    ds.Ensemble(partial(nn.Linear, 4, 3), members=2).save(tmp_path / "bare")
    code, _, errors = command("report bare --data data.npz")
    assert code == 1
    assert "bare" in errors


def test_bytes_are_scaled_and_images_spread_over_classes(command, tmp_path):
    x, y = load_digits(return_X_y=True)
    pixels = (x.reshape(-1, 8, 8) * 15).astype(np.uint8)
    np.savez(tmp_path / "bytes.npz", x=pixels, y=y)
    data = read_data(tmp_path / "bytes.npz")
    assert data.inputs.dtype == torch.float32
    torch.testing.assert_close(data.inputs, torch.from_numpy(pixels).float() / 255)
    images = read_data(tmp_path / "images", image_size=6)
    assert isinstance(images.inputs, ScaledImages)
    inputs, labels = images.tensors(4)
    assert inputs.shape == (4, 3, 6, 6)
    assert labels.tolist() == [0, 0, 1, 1]
    assert 0 <= float(inputs.min()) <= float(inputs.max()) <= 1
    loose = read_data(tmp_path / "images" / "cat", image_size=6, labelled=False)
    assert loose.targets is None
    assert loose.inputs[0].shape == (3, 6, 6)
    with pytest.raises(DataError, match="one folder of images per class"):
        read_data(tmp_path / "images" / "cat")


def test_parquet_without_pyarrow_names_the_extra(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, errors = command("report --model MODELS:ensemble --data table.parquet --target kind")
    assert code == 1
    assert "pip install 'dissensus[data]'" in errors
