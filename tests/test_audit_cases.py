"""The ensembles of known making that `audit/table-1` shows to the audit."""

import json
from functools import partial

import pytest
import torch

import dissensus as ds
from dissensus.studies import calibration, finding, results, running, spec
from dissensus.studies.problems import Problem, problem

STUDY = "audit/table-1"
UNSCORED = {*calibration.BETWEEN, *calibration.LDR, *calibration.ADP}
(ADP,) = calibration.ADP


def at_scale(scale, **changes):
    return spec.resolved(finding.load(STUDY), scale, changes, STUDY)


def rows_of(**changes):
    told = at_scale("smoke", **{"optimisation.epochs": 1, **changes})
    return [row for unit in calibration.units(told) for row in calibration.rows(told, unit)]


@pytest.mark.parametrize("scale", ["laptop", "paper"])
def test_every_case_is_shown(scale):
    assert set(at_scale(scale).grid["case"]) == set(calibration.CASES)


def test_cases_of_known_making_are_scored_and_the_others_told(tmp_path):
    folder = running.run(STUDY, "smoke", root=tmp_path)
    rows = json.loads((folder / "report.json").read_text())["rows"]
    cases = {data: {row["case"] for row in rows if row["data"] == data} for data in ("diabetes", "digits")}
    assert cases["digits"] == set(at_scale("smoke").grid["case"])
    assert cases["digits"] - cases["diabetes"] == {*calibration.LDR, *calibration.ADP, "balanced trees"}, (
        "they are for classes"
    )
    assert {row["case"] for row in rows if "right" not in row["measures"]} == cases["digits"] & UNSCORED
    assert all("collusive" in row["measures"] for row in rows)


def test_only_what_nobody_knows_is_not_scored():
    assert {case for case, known in calibration.CASES.items() if not known.right} == UNSCORED


def test_adp_needs_three_classes():
    cases = [calibration.ALONE, *calibration.LDR, ADP]
    rows = rows_of(**{"data": ["breast-cancer"], "grid.case": cases})
    assert [row["case"] for row in rows] == [calibration.ALONE, *calibration.LDR]


@pytest.fixture(scope="module")
def trained():
    """Ten members, more than ADP's nine classes beside the label can hold apart."""
    told = at_scale("smoke", **{"optimisation.examples": 100, "optimisation.epochs": 2})
    return calibration._trained(told, problem("digits", 0, told), 0, 10, [*calibration.LDR, ADP])


@pytest.mark.parametrize(
    ("case", "objective", "pool"),
    [
        ("LDR, λ = 0.1", partial(ds.objectives.ldr, strength=0.1), "score"),
        ("LDR, λ = 5", partial(ds.objectives.ldr, strength=5.0), "score"),
        (ADP, partial(ds.objectives.adp, alpha=2.0, beta=0.5), "probability"),
        (calibration.ALONE, partial(ds.objectives.independent, loss="cross_entropy"), "score"),
    ],
)
def test_a_case_is_what_its_name_says(trained, case, objective, pool):
    (x, y), (test, _) = ((part[0].flatten(1), part[1]) for part in (trained.data.train, trained.data.test))
    members = ds.Ensemble(partial(ds.nets.mlp, 64, 10, (30, 30)), 10, seed=0)
    ds.fit(members, (x, y), objective, epochs=2, batch_size=32, lr=2e-3, seed=0)
    made = calibration.CASES[case].make(trained)
    torch.testing.assert_close(torch.from_numpy(made.test), members.predict(test), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(made.train), members.predict(x), rtol=1e-4, atol=1e-4)
    assert (made.kind, made.pool) == ("logits", pool)


def test_only_what_is_asked_for_is_trained(trained):
    assert set(trained.of) == {calibration.ALONE, *calibration.LDR, ADP}


def test_a_training_that_fails_is_no_case():
    x, y = torch.ones(40, 3), torch.full((40, 1), 1e30)  # whose square is no float
    with pytest.raises(RuntimeError, match="training failed on broken, seed 0: "):
        calibration._trained(at_scale("smoke"), Problem("broken", (x, y), (x, y), 1), 0, 2, [])


def test_the_shipped_table_has_every_case_and_accuses_nobody_who_learnt_alone():
    held = json.loads((results.SHIPPED / f"{STUDY}.paper.json").read_text())
    said = {}
    for point in held["points"]:
        said.setdefault(point["case"], set()).update(point["said"])
    assert set(said) == set(calibration.CASES)
    for case in (calibration.ALONE, "masksembles", *(name for name, known in calibration.CASES.items() if known.trees)):
        assert "collusive" not in said[case]
