"""Saving and loading: nothing is lost, nothing wrong is taken, nothing is unpickled."""

import json
import os
from pathlib import Path

import pytest
import torch
from networks import NETWORKS
from torch import nn

import dissensus as ds
from dissensus import storage

NAMES = ("two_dropouts", "cnn_batch_norm", "tied")


def saved(tmp_path, name="mlp", members=3):
    ensemble = ds.Ensemble(NETWORKS[name][0], members, seed=4)
    ensemble(torch.randn(5, *NETWORKS[name][1]))
    ensemble.save(tmp_path / "ens")
    return ensemble, tmp_path / "ens"


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_exact(tmp_path, name):
    ensemble, path = saved(tmp_path, name)
    loaded = ds.Ensemble.load(path, NETWORKS[name][0])
    assert (loaded.seed, loaded.member_ids, loaded.training) == (4, [0, 1, 2], True)
    expected, actual = ensemble.body.tensors(), loaded.body.tensors()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[key], actual[key]) for key in expected)
    x = torch.randn(5, *NETWORKS[name][1])
    ensemble.body.backend = loaded.body.backend = "loop"
    torch.testing.assert_close(ensemble(x), loaded(x), rtol=0, atol=0)


def test_mixed_and_subset_round_trips(tmp_path):
    builds = [lambda: nn.Linear(4, 2), lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))]
    mixed = ds.Ensemble.from_modules([build() for build in builds])
    mixed.save(tmp_path / "mixed")
    x = torch.randn(5, 4)
    torch.testing.assert_close(ds.Ensemble.load(tmp_path / "mixed", builds)(x), mixed(x))
    with pytest.raises(ValueError, match="one per member"):
        ds.Ensemble.load(tmp_path / "mixed", builds[:1])
    part = ds.Ensemble(NETWORKS["two_dropouts"][0], 4, backend="loop").subset([3, 1])
    part.save(tmp_path / "part")
    loaded = ds.Ensemble.load(tmp_path / "part", NETWORKS["two_dropouts"][0])
    x = torch.randn(5, 6)
    torch.testing.assert_close(loaded(x), part(x))


def test_the_manifest_lists_what_is_stored(tmp_path):
    _, path = saved(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["members"] == 3
    assert manifest["format"] == storage.FORMATS.newest
    assert manifest["tensors"]["0.weight"] == {"shape": [3, 8, 6], "dtype": "float32"}


def weights_of(path: Path) -> Path:
    (file,) = path.glob("*.safetensors")
    return file


def forged(text, key, value):
    """A manifest with another entry and a checksum to match."""
    manifest = {**json.loads(text), key: value}
    manifest["manifest_sha256"] = storage._manifest_digest(manifest)
    return json.dumps(manifest)


def test_damage_is_refused_by_name(tmp_path):
    build = NETWORKS["mlp"][0]
    _, path = saved(tmp_path)
    file, manifest = weights_of(path), path / "manifest.json"
    contents, text = file.read_bytes(), manifest.read_text()

    def refused(match):
        with pytest.raises(ds.StorageError, match=match):
            ds.Ensemble.load(path, build)
        file.write_bytes(contents)
        manifest.write_text(text)

    file.write_bytes(contents[:-7])
    refused("truncated")
    file.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
    refused("changed after it was saved")
    manifest.write_text(text[: len(text) // 2])
    refused("manifest.json is damaged")
    manifest.write_text("[]")
    refused("damaged")
    manifest.write_text(text.replace('"format": 1', '"format": 99'))
    refused(r"was written by a newer dissensus \(format 99\); this one reads up to 2: upgrade\.")
    manifest.write_text(text.replace("dissensus.ensemble", "other"))
    refused("holds 'other'")
    manifest.write_text(forged(text, "weights", "../" + json.loads(text)["weights"]))
    refused("outside its folder")
    manifest.write_text(forged(text, "tensors", {}))
    refused("does not hold the tensors")
    manifest.write_text(text.replace('"seed": 4', '"seed": 5'))
    refused("manifest.json was changed after it was saved")
    file.unlink()
    refused("is missing")
    assert ds.Ensemble.load(path, build).members == 3
    with pytest.raises(ds.StorageError, match="holds no manifest"):
        ds.Ensemble.load(tmp_path, build)


def test_another_network_is_refused_by_the_first_tensor_that_differs(tmp_path):
    _, path = saved(tmp_path)
    with pytest.raises(ds.StorageError, match=r"'0.weight' is \[3, 8, 6\] there and \[3, 9, 6\]"):
        ds.Ensemble.load(path, lambda: ds.nets.mlp(6, 3, (9, 7)))
    with pytest.raises(ds.StorageError, match="lacks '6.weight'"):
        ds.Ensemble.load(path, lambda: ds.nets.mlp(6, 3, (8, 7, 7)))


@pytest.mark.parametrize("moment", ["weights", "manifest"])
def test_a_save_that_breaks_off_leaves_the_old_one(tmp_path, monkeypatch, moment):
    old, path = saved(tmp_path)
    replace = os.replace

    def broken(source, target):
        if moment in str(target):
            raise OSError("disk full")
        replace(source, target)

    monkeypatch.setattr(storage.os, "replace", broken)
    new = ds.Ensemble(NETWORKS["mlp"][0], 3, seed=9)
    with pytest.raises(OSError, match="disk full"):
        new.save(path)
    monkeypatch.undo()
    loaded = ds.Ensemble.load(path, NETWORKS["mlp"][0])
    assert torch.equal(loaded.body.tensors()["0.weight"], old.body.tensors()["0.weight"])
    new.save(path)
    assert len(list(path.iterdir())) == 3, "stale files stay behind"  # manifest, weights, lock


def test_saving_leaves_what_is_not_its_own(tmp_path):
    _, path = saved(tmp_path)
    (path / "weights-final.safetensors").write_text("mine")
    (path / ".0123456789abcdef.unfinished").write_text("of a save that was killed")
    ds.Ensemble(NETWORKS["mlp"][0], 3, seed=9).save(path)
    assert (path / "weights-final.safetensors").read_text() == "mine"
    assert len(list(path.iterdir())) == 4  # with manifest, weights and lock
    with pytest.raises(ds.StorageError, match="holds 'dissensus.ensemble'; give another folder"):
        storage.write_folder(path, "dissensus.sweep", {"a": torch.ones(1)}, {})


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "ens").write_text("hello")
    with pytest.raises(ds.StorageError, match="is a file"):
        ds.Ensemble(NETWORKS["mlp"][0], 1).save(tmp_path / "ens")
    assert (tmp_path / "ens").read_text() == "hello"
