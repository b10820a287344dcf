"""Rows that a model was trained on are recognised later, and accuracies on them come with a warning."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import dissensus as ds
from dissensus import attacks, calls, storage, training_rows
from dissensus.attacks.training_overlap import training_overlap
from dissensus.cli import app
from dissensus.metrics import wilson
from dissensus.storage import MANIFEST, StorageError
from dissensus.studies import datasets
from dissensus.training_rows import TrainingRows

OBJECTIVE = partial(ds.objectives.independent, loss="cross_entropy")


PINNED = ([1.3278275898326373, -0.2371939760159737], [0.08736017706988958, -0.4855912002264977])


def rows(count, *shape, seed=0):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def labels(count):
    return torch.arange(count) % 3


def ensemble(width=6):
    return ds.Ensemble(partial(ds.nets.mlp, width, 3, (8,)), 2)


def fitted(x, **options):
    ens = ensemble(x.shape[1])
    ds.fit(ens, (x, labels(len(x))), OBJECTIVE, epochs=1, batch_size=16, **options)
    return ens


def test_directions_are_fixed_for_ever():
    """Records of saved ensembles are read by later releases."""
    directions = training_rows._directions(1000, 0)
    np.testing.assert_allclose(directions[0], PINNED[0], rtol=1e-12)
    np.testing.assert_allclose(training_rows._directions(2, 1)[1], PINNED[1], rtol=1e-12)
    assert np.array_equal(training_rows._directions(3, 0), directions[:3])
    assert abs(directions.mean()) < 0.1
    assert abs((directions**2).mean() - 1) < 0.1
    assert abs((directions[:, 0] * directions[:, 1]).mean()) < 0.1


def test_products_by_hand():
    x, other = rows(5, 2, 3).double(), torch.arange(5)
    record = TrainingRows.of(calls.call(x, other))
    first, second = training_rows._directions(6, 0), training_rows._directions(1, 1)
    by_hand = [
        [sum(float(v) * d for v, d in zip(x[i].flatten(), first[:, k], strict=True)) + i * second[0, k] for k in (0, 1)]
        for i in range(5)
    ]
    np.testing.assert_allclose(record.products, sorted(by_hand), rtol=1e-6)


def test_rounding_is_forgiven_and_changes_are_not():
    x = rows(2000, 40)
    record = TrainingRows.of(x)
    assert record.contains(x).all()
    assert record.contains(x.flip(0).double()).all()
    scaled = TrainingRows.of((x - x.mean(0)) / x.std(0))
    assert scaled.contains(torch.from_numpy((x.double().numpy() - x.numpy().mean(0)) / x.numpy().std(0, ddof=1))).all()
    assert not record.contains(rows(5000, 40, seed=1)).any()
    assert not record.contains(x + 1e-3 * rows(2000, 40, seed=2)).any()
    assert not record.contains(x * 1.001).any()
    changed = x.clone()
    changed[:, 7] += 0.01
    assert not record.contains(changed).any()
    broken = x.clone()
    broken[3, 4], broken[5, 6] = torch.nan, torch.inf
    assert record.contains(broken).nonzero().flatten().tolist() == [i for i in range(2000) if i not in (3, 5)]


def test_repeated_and_equal_rows():
    x = torch.zeros(100_000, 3)
    record = TrainingRows.of(x)
    assert len(record.products) == 1
    assert record.rows == 100_000
    assert record.share == 1
    assert record.contains(torch.zeros(4, 3)).all()
    assert not record.contains(torch.full((4, 3), 1e-3)).any()
    assert TrainingRows.of(torch.zeros(0, 3)).contains(torch.ones(2, 3)).tolist() == [False, False]


def test_of_large_data_some_rows_are_kept(monkeypatch):
    monkeypatch.setattr(training_rows, "MOST_ROWS", 500)
    x = rows(2000, 5)
    record = TrainingRows.of(x)
    assert (len(record.products), record.rows, record.share) == (500, 2000, 0.25)
    assert record.contains(x).nonzero().flatten().tolist() == list(range(0, 2000, 4))
    both = record.joined(TrainingRows.of(rows(400, 5, seed=1)))
    assert (len(both.products), both.rows) == (500, 2400)
    assert int(both.contains(torch.cat([x, rows(400, 5, seed=1)])).sum()) == 500
    again = record.joined(record)
    assert (len(again.products), again.rows, again.share) == (500, 2000, 0.25)


def test_joined_records():
    x, y = rows(30, 4), rows(20, 4, seed=1)
    none, unknown = TrainingRows.none(), TrainingRows.unknown()
    both = none.joined(TrainingRows.of(x)).joined(TrainingRows.of(torch.cat([x[:10], y])))
    assert (both.rows, both.complete, len(both.products)) == (50, True, 50)
    assert both.contains(torch.cat([x, y])).all()
    assert not unknown.joined(TrainingRows.of(x)).complete
    assert not TrainingRows.of(x).joined(unknown).complete
    assert TrainingRows.of(x).joined(unknown).contains(x).all()
    assert unknown.contains(x).tolist() == [False] * 30


def test_fit_keeps_a_record():
    x = rows(60, 6)
    ens = fitted(x)
    assert ens.training_rows.complete
    assert ens.trained_on(x).all()
    assert ens.trained_on(x.numpy().astype(np.float64)).all()
    assert ens.trained_on((x, labels(60))).all()
    assert ens.trained_on(DataLoader(TensorDataset(x, labels(60)), 7)).all()
    assert not ens.trained_on(rows(60, 6, seed=1)).any()
    assert ens.subset([1]).trained_on(x).all()
    with pytest.raises(ValueError, match="at least one example"):
        ens.trained_on(torch.zeros(0, 6))
    ds.fit(ens, (rows(30, 6, seed=1), labels(30)), OBJECTIVE, epochs=1)
    assert ens.training_rows.rows == 90
    assert ens.trained_on(torch.cat([x, rows(30, 6, seed=1)])).all()


def test_rows_of_a_split_are_told_apart():
    x, ens = rows(60, 6), ensemble()
    objective = partial(ds.objectives.joint, loss="cross_entropy", pool="probability")
    ds.fit(ens, (x, labels(60)), objective, epochs=1, validation=0.5, twin=True)
    assert isinstance(ens.in_bag, torch.Tensor)
    assert torch.equal(ens.trained_on(x), ens.in_bag[0])
    assert ens.twin is not None
    assert torch.equal(ens.twin.trained_on(x), ens.in_bag[0])


def test_what_is_not_known():
    x, y = rows(30, 6), labels(30)
    ens = ensemble()
    assert ens.training_rows.complete
    ds.fit(ens, DataLoader(TensorDataset(x, y), 8), OBJECTIVE, epochs=1)
    assert not ens.training_rows.complete
    ds.fit(ens, TensorDataset(x, y), OBJECTIVE, epochs=1)
    assert ens.trained_on(x).all()
    assert not ens.training_rows.complete
    assert not ds.Ensemble.from_modules([nn.Linear(6, 3)]).training_rows.complete
    ens.training_rows = None
    assert not ens.trained_on(x).any()


def test_broken_training_counts():
    x = rows(30, 6)
    ens = ensemble()

    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ds.fit(ens, (x, labels(30)), OBJECTIVE, epochs=3, progress=stop)
    assert ens.trained_on(x).all()


def test_structured_inputs_have_rows_too():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(10, 3)

        def forward(self, ids, x):
            return self.head(torch.cat([self.embed(ids).mean(1), x], 1))

    ids, x = torch.randint(0, 9, (30, 5), generator=torch.Generator().manual_seed(0)), rows(30, 6)
    ens = ds.Ensemble(Two, 2)
    ds.fit(ens, ({"ids": ids, "x": x}, labels(30)), OBJECTIVE, epochs=1)
    assert ens.trained_on({"ids": ids, "x": x}).all()
    other = ids.clone()
    other[:10, 0] = (other[:10, 0] + 1) % 9
    assert ens.trained_on({"ids": other, "x": x}).tolist() == [False] * 10 + [True] * 20


def test_saved_with_the_ensemble(tmp_path):
    x = rows(60, 6)
    ens = fitted(x)
    ens.save(tmp_path / "saved")
    build = partial(ds.nets.mlp, 6, 3, (8,))
    loaded = ds.Ensemble.load(tmp_path / "saved", build)
    assert loaded.training_rows.complete
    assert loaded.training_rows.rows == 60
    assert torch.equal(loaded.trained_on(torch.cat([x, -x])), torch.arange(120) < 60)
    file = tmp_path / "saved" / MANIFEST
    manifest = json.loads(file.read_text())
    del manifest["training_rows"], manifest["manifest_sha256"]
    storage.write_record(file, manifest)  # as an earlier release wrote it
    old = ds.Ensemble.load(tmp_path / "saved", build)
    assert not old.training_rows.complete
    assert not old.trained_on(x).any()
    for damaged in ({"rows": 3}, {"rows": 1, "complete": True, "products": "?"}, "no"):
        storage.write_record(file, {**manifest, "training_rows": damaged})
        with pytest.raises(StorageError, match="is damaged"):
            ds.Ensemble.load(tmp_path / "saved", build)


class Scaled(nn.Module):
    """Standardisation inside of a model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model((x - 0.5) / 0.25)


def test_overlap_is_seen_through_wrappers():
    images = torch.rand(40, 6, generator=torch.Generator().manual_seed(0))
    ens = fitted((images[:20] - 0.5) / 0.25)
    assert training_overlap(Scaled(ens), images, 7) == (20, True)
    assert training_overlap(ens, images, 7) == (0, True)
    assert training_overlap([Scaled(ens), nn.Linear(6, 3)], images, 7) == (20, False)
    assert training_overlap(lambda x: x, images, 7) == (0, False)
    masked = ds.masks.convert(ds.nets.mlp(6, 3, (8,)), 2, 2.0)
    ds.fit(masked, (images[20:25], labels(5)), OBJECTIVE, epochs=1)
    masked.train()
    assert training_overlap(masked, images, 40) == (5, False)  # its weights existed before
    assert masked.training
    assert not any(layer._forward_pre_hooks for layer in ens.modules())


def test_evaluation_warns_of_training_rows():
    images = torch.rand(20, 6, generator=torch.Generator().manual_seed(0))
    ens = ds.Ensemble(partial(ds.nets.mlp, 6, 4, (64,)), 2)
    ds.fit(ens, (images[:8], labels(8)), OBJECTIVE, epochs=100, lr=0.05)
    result = attacks.evaluate(ens, (images[:8], labels(8)), "quick", epsilon=0.01, epsilons=[0.01])
    assert result.clean.value == 1
    assert result.notes()[0] == (
        "Warning: 8 of the 8 examples are rows that the model was trained on. Accuracies on them say nothing about "
        "new data: use test data."
    )
    assert attacks.Robustness.from_json(result.to_json()).notes() == result.notes()
    assert "Warning: 8 of the 8" in " ".join(result.summary().split())


@pytest.mark.parametrize(
    ("rows", "known", "right", "warning"),
    [
        (0, True, 20, None),
        (0, False, 19, None),
        (0, False, 20, "Warning: every example is right without an attack, and it is not known what the model was"),
        (3, False, 19, "Warning: at least 3 of the 20 examples are rows that the model was trained on"),
        (20, True, 20, "Warning: 20 of the 20 examples are rows"),
    ],
)
def test_when_results_warn(rows, known, right, warning):
    facts = {"examples": 20, "on_survivors": True, "beyond": 0, "suite": "standard"}
    clean = wilson(right, 20)
    result = attacks.Robustness(
        clean, wilson(3, 20), [], [], [], [], [], {**facts, "training_rows": rows, "training_known": known}
    )
    warnings = [note for note in result.notes() if note.startswith("Warning")]
    assert len(warnings) == (warning is not None)
    assert warning is None or warnings[0].startswith(warning)
    earlier = attacks.Robustness(clean, wilson(3, 20), [], [], [], [], [], facts)
    assert not [note for note in earlier.notes() if note.startswith("Warning")]


def test_the_command_warns_and_needs_no_network(tmp_path):
    """Trained on the test images of digits, which is the mistake to be told of."""
    images = datasets.load_unscaled("digits", seed=0)
    x, y = images.test
    architecture = ds.Architecture("dissensus.nets:cnn", channels=1, outputs=10, image_size=8, widths=[8])
    ens = ds.Ensemble(architecture, 2)
    ds.fit(ens, (x, y), OBJECTIVE, epochs=3, lr=0.01)
    ens.save(tmp_path / "saved")
    call = ["robust", "--ensemble", str(tmp_path / "saved"), "--data", "digits", "--epsilon", "0.02"]
    call += ["--suite", "quick", "--examples", "10", "--json", str(tmp_path / "result.json")]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.replace("│", " ").split())
    assert "Warning: 10 of the 10 examples are rows that the model was trained on" in words
    assert json.loads((tmp_path / "result.json").read_text())["facts"]["training_rows"] == 10
    refused = CliRunner().invoke(app, [*call, "--option", "widths=[4]"])
    assert refused.exit_code != 0
    assert "--option" in refused.output
    ds.Ensemble(architecture, 2).save(tmp_path / "new")
    fresh = CliRunner().invoke(app, [*call[:2], str(tmp_path / "new"), *call[3:]])
    assert fresh.exit_code == 0, fresh.output
    assert "Warning" not in fresh.output


def test_the_command_runs_code_of_others_on_request(tmp_path, monkeypatch):
    (tmp_path / "own_networks.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    ds.Ensemble(ds.Architecture("own_networks:build"), 2).save("saved")
    call = ["robust", "--ensemble", "saved", "--data", "digits", "--epsilon", "0.02", "--suite", "quick"]
    call += ["--examples", "10"]
    refused = CliRunner().invoke(app, call)
    assert refused.exit_code != 0
    words = " ".join(refused.output.split())
    assert "own_networks:build" in words
    assert "--trust own_networks" in words
    assert CliRunner().invoke(app, [*call, "--trust", "own_networks"]).exit_code == 0
    ds.Ensemble(partial(ds.nets.mlp, 6, 3), 2).save("other")
    refused = CliRunner().invoke(app, [*call[:2], "other", *call[3:]])
    assert refused.exit_code != 0
    assert "--network" in refused.output
