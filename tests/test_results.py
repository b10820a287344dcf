"""Typed results: names of measures, and files of JSON that are read and written without loss."""

import json

import pytest

from dissensus.studies import library
from dissensus.studies.results import AuditNote, Measure, Point, Report, Row, Summary
from dissensus.studies.run_folders import SHIPPED
from dissensus.studies.spec import resolved

SHIPPED_FILES = sorted(SHIPPED.rglob("*.json"))


@pytest.mark.parametrize("file", SHIPPED_FILES, ids=lambda file: file.stem)
def test_a_shipped_result_is_read_and_written_without_loss(file):
    stored = json.loads(file.read_text())
    restored = Summary.from_json(stored).to_json()
    assert restored["made"].pop("device") == stored["made"].pop("device", "cpu")
    assert restored == stored


def test_a_row_is_read_and_written_without_loss():
    row = Row(
        "digits",
        {"beta": 0.5, "members": 3},
        1,
        {"error": 0.2},
        run=4,
        status="done",
        epochs=2,
        members=3,
        audit=AuditNote("healthy", ["because"]),
        pairs=[[0.5, 0.1]],
        pictures=[{"true": 1}],
        extras={"temperature": 2.0},
    )
    stored = json.loads(json.dumps(row.to_json()))
    assert stored["beta"] == 0.5
    assert stored["shown"] == [{"true": 1}]
    assert "curves" not in stored
    assert Row.from_json(stored, ["beta", "members", "seed"]) == row


def test_a_row_has_values_on_axes_and_beside_them():
    row = Row("digits", {"beta": 0.5}, 0, {}, members=3, summary="all")
    assert [row.value(axis) for axis in ("beta", "members", "summary", "nothing")] == [0.5, 3, "all", None]


def test_a_point_has_means_and_values_on_axes():
    point = Point.from_json(
        {"data": "a", "beta": 1.0, "measures": {"m": [0.5, 0.1, 3], "n": [None, None, 0]}}, ["data", "beta"]
    )
    assert (point.mean("m"), point.mean("n"), point.mean("o")) == (0.5, None, None)
    assert (point.value("data"), point.value("beta"), point.value("alpha")) == ("a", 1.0, None)
    assert point.measures["m"].seeds == 3


def test_a_report_is_read_and_written_without_loss():
    spec = resolved(library.load("collusion/figure-2"), "smoke", {}, "x")
    stored = {
        "study": spec.name,
        "scale": "smoke",
        "spec": json.loads(json.dumps(spec.to_dict())),
        "made": json.loads(SHIPPED_FILES[0].read_text())["made"] | {"device": "cuda", "changes": {"grid.seed": [0]}},
        "outputs": "../other",
        "rows": [{"data": "diabetes", "beta": 1.0, "seed": 0, "measures": {"error": 1.0}}],
    }
    assert Report.from_json(stored).to_json() == stored


@pytest.mark.parametrize(
    ("name", "measure"),
    [
        ("accuracy", Measure("accuracy")),
        ("accuracy_top5", Measure("accuracy_top5")),
        ("codependence_0.2", Measure("codependence", parameter="0.2")),
        ("accuracy_corrupted-5", Measure("accuracy", dataset="corrupted-5")),
        ("error_fashion-mnist", Measure("error", dataset="fashion-mnist")),
        ("auroc_mean_energy_mnist", Measure("auroc", score="mean_energy", dataset="mnist")),
        ("accuracy_pgd_0.01", Measure("accuracy", "pgd", "0.01")),
        ("accuracy_elastic_net_1.0", Measure("accuracy", "elastic_net", "1.0")),
        ("auroc_nonmaximal_volume_carlini_wagner", Measure("auroc", "carlini_wagner", score="nonmaximal_volume")),
        ("fooled_pgd", Measure("fooled", "pgd")),
        ("transfer_targeted_mim_0.05", Measure("transfer", "mim", "0.05", targeted=True)),
        ("targeted_mim_0.05", Measure("", "mim", "0.05", targeted=True)),
        ("true_positive_rate_fgsm", Measure("true_positive_rate", "fgsm")),
        ("standard_0.02", Measure("worst_case", "standard", "0.02")),
        ("train_diversity@0.1", Measure("train_diversity", share="0.1")),
        ("nothing_like_it_0.1", Measure("nothing_like_it_0.1")),
    ],
)
def test_names_of_measures_are_parsed_and_written_in_one_place(name, measure):
    assert Measure.parse(name) == measure
    assert str(measure) == name


def test_every_measure_of_the_library_and_of_shipped_results_keeps_its_name():
    named = {name for study in library.names() for name in library.load(study).evaluation.measures}
    for file in SHIPPED_FILES:
        named |= {name for point in json.loads(file.read_text())["points"] for name in point["measures"]}
    assert len(named) > 100
    assert all(str(Measure.parse(name)) == name for name in named)
