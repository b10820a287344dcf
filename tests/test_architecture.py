"""Saved ensembles and masked networks load without `build`, and nothing runs that nobody asked for."""

import importlib
import json
import sys
import types
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus import storage
from dissensus.architecture import KNOWN
from dissensus.storage import MANIFEST, StorageError

MLP = ds.Architecture("dissensus.nets:mlp", inputs=6, outputs=3, hidden=(8,), dropout=0.5)
MASKED = ds.Architecture(
    "dissensus.masks:convert",
    network=ds.Architecture("dissensus.nets:mlp", inputs=6, outputs=3, hidden=[16, 8]),
    count=4,
    scale=2.0,
    seed=5,
)
X = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def module(monkeypatch, tmp_path):
    """A module of the user, in a package; importing it leaves a trace."""
    source = """
import builtins
from os import system
from torch import nn
builtins.architecture_imports = getattr(builtins, "architecture_imports", 0) + 1
def build(width=4):
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
def number():
    return 3
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(6, width)
    def forward(self, x):
        return self.layer(x)
value = 7
"""
    folder = tmp_path / "site" / "their_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "models.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    yield "their_package.models"
    for name in ("their_package", "their_package.models"):
        sys.modules.pop(name, None)


def changed(folder, **entries):
    """A folder whose manifest has other entries and the right checksum."""
    file = folder / MANIFEST
    manifest = {**json.loads(file.read_text()), **entries}
    manifest.pop("manifest_sha256")
    storage.write_record(file, manifest)


def equal(first, second):
    left, right = (network.eval()(X) for network in (first, second))
    return torch.equal(left, right)


def test_arguments_are_plain_data_and_come_back_as_they_were():
    assert MLP.arguments["hidden"] == [8]
    for architecture in (MLP, MASKED):
        again = ds.Architecture.from_json(json.loads(json.dumps(architecture.to_json())))
        assert again == architecture
        assert repr(again) == repr(architecture)
    assert MASKED.names() == ["dissensus.masks:convert", "dissensus.nets:mlp"]
    assert all(name in KNOWN for name in MASKED.names())


def test_arguments_that_a_function_does_not_take_are_refused():
    message = (
        r"those of dissensus.nets:cnn\(channels, outputs, image_size, .*\); got Architecture.*classes=10.*'channels'"
    )
    with pytest.raises(TypeError, match=message):
        ds.Architecture("dissensus.nets:cnn", classes=10)()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("mlp", {}, r"`name` must be 'package.module:function'.*got 'mlp'"),
        ("a.b:c.d", {}, "must be 'package.module:function'"),
        ("a b:c", {}, "must be 'package.module:function'"),
        (nn.Linear, {}, "must be 'package.module:function'"),
        ("a:b", {"activation": nn.ReLU}, r"`arguments\['activation'\]` must be JSON.*name that"),
        ("a:b", {"rate": float("nan")}, "must be JSON"),
        ("a:b", {"sizes": [1, {2: 3}]}, r"`arguments\['sizes'\]\[1\]` must be JSON"),
        ("a:b", {"weights": torch.ones(1)}, "must be JSON"),
    ],
)
def test_what_is_no_name_and_no_json_is_refused(name, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ds.Architecture(name, **arguments)


def test_an_ensemble_of_an_architecture_loads_without_build(tmp_path):
    ens = ds.Ensemble(MLP, 3, seed=4, backend="loop")
    ens.save(tmp_path)
    loaded = ds.Ensemble.load(tmp_path)
    assert equal(ens, loaded)
    assert loaded.architecture == MLP
    assert (loaded.seed, loaded.member_ids, loaded.backend) == (4, [0, 1, 2], "loop")
    loaded.subset([2, 0]).save(tmp_path / "again")  # it keeps the architecture
    assert equal(ens.subset([2, 0]), ds.Ensemble.load(tmp_path / "again"))
    assert equal(ens, ds.Ensemble.load(tmp_path, MLP))


def test_an_architecture_is_named_when_saving(tmp_path):
    ens = ds.Ensemble(partial(ds.nets.cnn, 1, 3, 8, (4,), batch_norm=True), 2).double()
    ens(torch.randn(4, 1, 8, 8).double())  # batch norm has counted
    architecture = ds.Architecture(
        "dissensus.nets:cnn", channels=1, outputs=3, image_size=8, widths=[4], batch_norm=True
    )
    ens.save(tmp_path, architecture=architecture)
    loaded, x = ds.Ensemble.load(tmp_path).eval(), torch.randn(4, 1, 8, 8).double()
    assert loaded.dtype == torch.float64
    assert torch.equal(loaded(x), ens.eval()(x))


def test_members_of_different_architectures_have_one_each(tmp_path):
    two = [ds.Architecture("dissensus.nets:mlp", inputs=6, outputs=3, hidden=[width]) for width in (4, 5)]
    ens = ds.Ensemble.from_modules([part() for part in two])
    with pytest.raises(ValueError, match=r"`architecture` must be one Architecture per member \(2\); got 1"):
        ens.save(tmp_path, architecture=two[0])
    with pytest.raises(
        ValueError, match=r"`architecture` must build the network that is saved.*'0.weight' is \[5, 6\]"
    ):
        ens.save(tmp_path, architecture=two[::-1])
    assert not (tmp_path / MANIFEST).exists()
    ens.save(tmp_path, architecture=two)
    assert equal(ens, ds.Ensemble.load(tmp_path))
    with pytest.raises(ValueError, match="must be one Architecture; got 2"):
        ds.Ensemble(two[0], 2).save(tmp_path, architecture=two)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hidden": [9]}, r"'0.weight' is \[9, 6\], not \[8, 6\]"),
        ({"hidden": [8, 8]}, "tensor"),
        ({"dropout": 0.25}, "of layer '2' differs"),
        ({"dropout": 0.0}, "differs|tensor"),
    ],
)
def test_an_architecture_that_builds_another_network_is_refused(other, message, tmp_path):
    ens = ds.Ensemble(MLP, 2)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=f"`architecture` must build the network that is saved.*{message}"):
        ens.save(tmp_path, architecture=ds.Architecture(MLP.name, **{**MLP.arguments, **other}))
    assert torch.equal(torch.get_rng_state(), before)
    assert not (tmp_path / MANIFEST).exists()
    with pytest.raises(TypeError, match="`architecture` must be a dissensus.Architecture; got function"):
        ens.save(tmp_path, architecture=lambda: nn.Linear(6, 3))


def test_without_an_architecture_build_is_needed(tmp_path):
    ds.Ensemble(lambda: nn.Linear(6, 3), 2).save(tmp_path)
    with pytest.raises(ValueError, match=r"`build` must be given, since .* was saved without an architecture"):
        ds.Ensemble.load(tmp_path)


def test_code_of_others_runs_on_request_only(module, tmp_path):
    import builtins

    builtins.architecture_imports = 0
    architecture = ds.Architecture(f"{module}:build", width=5)
    ens = ds.Ensemble(architecture, 2)  # its own code, which the caller names
    ens.save(tmp_path / "saved")
    sys.modules.pop(module)
    builtins.architecture_imports = 0
    with pytest.raises(StorageError) as refused:
        ds.Ensemble.load(tmp_path / "saved")
    assert str(refused.value) == (
        "the architecture 'their_package.models:build' is not one of dissensus.nets: to load it, its module would be "
        "imported and its function called. Do you trust it? Pass trust='their_package', or `build`."
    )
    for trust in (["their"], ["their_package.model"], ["their_package.models:buil"], "other"):
        with pytest.raises(StorageError, match="Do you trust it"):
            ds.Ensemble.load(tmp_path / "saved", trust=trust)
    assert builtins.architecture_imports == 0
    assert module not in sys.modules
    for trust in ("their_package", ["their_package.models"], ["x", "their_package.models:build"]):
        assert equal(ens, ds.Ensemble.load(tmp_path / "saved", trust=trust))
    assert builtins.architecture_imports == 1
    del builtins.architecture_imports


def test_a_class_counts_as_a_function(module, tmp_path):
    ens = ds.Ensemble(ds.Architecture(f"{module}:Net", width=3), 2)
    ens.save(tmp_path)
    assert equal(ens, ds.Ensemble.load(tmp_path, trust=["their_package"]))


def test_what_a_trusted_module_has_imported_is_not_trusted(module, tmp_path):
    """A file could otherwise name any function that a module imports, such as one that runs commands."""
    ds.Ensemble(ds.Architecture(f"{module}:build"), 2).save(tmp_path)
    marker = tmp_path / "ran"
    changed(tmp_path, architecture={"name": f"{module}:system", "arguments": {"command": f"touch {marker}"}})
    with pytest.raises(StorageError, match=r"which its module has imported from elsewhere.*trust='their_package"):
        ds.Ensemble.load(tmp_path, trust=["their_package"])
    assert not marker.exists()


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"name": "os:system", "arguments": {"command": "true"}}, "not one of dissensus.nets"),
        ({"name": "dissensus.nets:mlp.__globals__", "arguments": {}}, "is damaged.*package.module:function"),
        ({"name": "dissensus.storage:remove_folder", "arguments": {}}, "not one of dissensus.nets"),
        ({"name": "dissensus.nets.mlp:mlp", "arguments": {}}, "not one of dissensus.nets"),
        ({"name": "dissensus.nets:mlp"}, "is damaged: an architecture has a name and arguments"),
        ({"name": "dissensus.nets:mlp", "arguments": [6, 3]}, "is damaged"),
        ("dissensus.nets:mlp", "is damaged"),
        (
            {
                "name": "dissensus.masks:convert",
                "arguments": {"network": {"dissensus.architecture": {"name": "os:system", "arguments": {}}}},
            },
            "'os:system' is not one of dissensus.nets",
        ),
    ],
)
def test_stored_names_are_checked_before_anything_runs(stored, message, tmp_path, monkeypatch):
    ds.Ensemble(MLP, 2).save(tmp_path)
    changed(tmp_path, architecture=stored)

    def fail(*_):
        pytest.fail("something was imported")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(StorageError, match=message):
        ds.Ensemble.load(tmp_path)


def test_what_cannot_be_built_is_told(module):
    with pytest.raises(ImportError, match=r"'absent_package:build' cannot be built: No module named"):
        ds.Architecture("absent_package:build")()
    with pytest.raises(ValueError, match=r"must name a function of its module; got .*where there is nothing"):
        ds.Architecture(f"{module}:absent")()
    with pytest.raises(ValueError, match="where there is int"):
        ds.Architecture(f"{module}:value")()
    with pytest.raises(TypeError, match="`build` must return an nn.Module; got int"):
        ds.Ensemble(ds.Architecture(f"{module}:number"), 2)
    with pytest.raises(ValueError, match="`trust` must name packages"):
        ds.Architecture("a:b").trusted(["a/b"])


def test_functions_of_the_main_module_load_on_request(monkeypatch, tmp_path):
    main = types.ModuleType("__main__")
    exec("from torch import nn\ndef build():\n    return nn.Linear(6, 3)", vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    ens = ds.Ensemble(ds.Architecture("__main__:build"), 2)
    ens.save(tmp_path)
    assert equal(ens, ds.Ensemble.load(tmp_path, trust=["__main__"]))


def test_an_earlier_release_reads_what_this_one_saves(tmp_path):
    """Entries that it does not know are ignored there, and its checks of the others hold."""
    ds.Ensemble(MLP, 2).save(tmp_path)
    tensors, manifest = storage.read_folder(tmp_path, "dissensus.ensemble", storage.Formats(newest=1))
    assert manifest["format"] == 1
    assert set(tensors) == set(manifest["tensors"])
    assert {"members", "member_ids", "seed", "mixed", "backend", "training"} <= set(manifest)


def trained_masked():
    masked = MASKED()
    assert isinstance(masked, ds.masks.Masked)
    y = torch.randint(3, (9,), generator=torch.Generator().manual_seed(1))
    ds.fit(masked, (X, y), partial(ds.objectives.independent, loss="cross_entropy"), epochs=2, batch_size=4)
    return masked


def test_masked_networks_predict_as_ensembles_do(tmp_path):
    masked = ds.masks.convert(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)), 4, 2.0)
    masked.train()
    ens = ds.Ensemble.from_modules([masked])
    y = torch.arange(9)
    outputs, targets = masked.predict((X, y), 4, targets=True)
    assert masked.training
    assert all(layer.training for layer in masked.modules())
    assert not outputs.requires_grad
    torch.testing.assert_close(outputs, ens.predict(X), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(outputs, torch.stack([masked.eval().member(i)(X) for i in range(4)]))
    assert torch.equal(targets, y)
    by_numpy = masked.predict(X.numpy(), file=tmp_path / "outputs.npy")
    torch.testing.assert_close(by_numpy, outputs)
    assert (tmp_path / "outputs.npy").exists()
    torch.testing.assert_close(masked.predict(DataLoader(TensorDataset(X, y), 2)), outputs)
    with pytest.raises(ValueError, match=r"cannot take inputs \[2, 5\]"):
        masked.predict(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="at least one example"):
        masked.predict(torch.zeros(0, 6))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", ["build", "architecture"])
def test_masked_networks_are_saved_and_loaded(how, training, tmp_path):
    masked = trained_masked().train(training)
    masked.assign = "all"
    masked.save(tmp_path, architecture=MASKED if how == "architecture" else None)

    def build():  # other masks of the same shapes
        return ds.masks.convert(ds.nets.mlp(6, 3, (16, 8)), 4, 2.0, seed=99)

    loaded = ds.masks.Masked.load(tmp_path, None if how == "architecture" else build)
    assert (loaded.training, loaded.assign, loaded.count) == (training, "all", 4)
    assert loaded.sizes() == masked.sizes()
    assert torch.equal(loaded.predict(X), masked.predict(X))
    assert torch.equal(loaded.member(3).eval()(X), masked.member(3).eval()(X))
    assert loaded.trained_on(X).all()
    if how == "architecture":
        loaded.save(tmp_path / "again")
        assert torch.equal(ds.masks.Masked.load(tmp_path / "again").predict(X), masked.predict(X))


def test_what_is_no_saved_masked_network_is_refused(tmp_path):
    masked = trained_masked()
    masked.save(tmp_path / "masked")
    with pytest.raises(ValueError, match="`build` must be given, since"):
        ds.masks.Masked.load(tmp_path / "masked")
    with pytest.raises(TypeError, match="`build` must return a Masked network; got Linear"):
        ds.masks.Masked.load(tmp_path / "masked", lambda: nn.Linear(6, 3))
    with pytest.raises(StorageError, match="does not fit the network"):
        ds.masks.Masked.load(tmp_path / "masked", lambda: ds.masks.convert(ds.nets.mlp(6, 3, (16,)), 4, 2.0))
    with pytest.raises(StorageError, match="holds 'dissensus.masked', not 'dissensus.ensemble'"):
        ds.Ensemble.load(tmp_path / "masked", masked_builder)
    ds.Ensemble(MASKED, 1).save(tmp_path / "ensemble")
    with pytest.raises(StorageError, match="holds 'dissensus.ensemble', not 'dissensus.masked'"):
        ds.masks.Masked.load(tmp_path / "ensemble", masked_builder)
    other = ds.Architecture(MASKED.name, **{**MASKED.arguments, "count": 3})
    with pytest.raises(ValueError, match="`architecture` must build the network that is saved"):
        masked.save(tmp_path / "masked", architecture=other)


def masked_builder():
    return MASKED()


def test_an_ensemble_of_masked_networks_loads_without_build(tmp_path):
    ens = ds.Ensemble(MASKED, 2)
    ens.save(tmp_path)
    assert equal(ens, ds.Ensemble.load(tmp_path))
