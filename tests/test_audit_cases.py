"""The ensembles of known making that `audit/table-1` shows to the audit."""

import json
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import dissensus as ds
from dissensus.studies import audit_cases, case_makers, library, spec
from dissensus.studies import run as runner
from dissensus.studies.audit_cases import CASES, AuditedEnsemble, AuditUnit
from dissensus.studies.datasets import StudyData, load
from dissensus.studies.procedures import audit
from dissensus.studies.run_folders import SHIPPED, read_report
from dissensus.studies.summary import summarise

STUDY = "audit/table-1"
UNKNOWN = {*audit_cases.BETWEEN, *audit_cases.LDR, *audit_cases.ADP}
VERDICTS = {"unskilled", "collusive", "dominated", "redundant", "undecided", "healthy"}
(ADP,) = audit_cases.ADP


def at_scale(scale, **changes):
    return spec.resolved(library.load(STUDY), scale, changes, STUDY)


def quick(**changes):
    return at_scale("smoke", **{"optimisation.epochs": 1, "optimisation.examples": 400, **changes})


def made_cases(data, cases=tuple(CASES), seed=0):
    return {
        stored_case.name: stored_case
        for stored_case in audit_cases.made(quick(), AuditUnit(data, data, seed, 5, first=True), cases)
    }


@pytest.fixture(scope="module")
def regression():
    return made_cases("friedman-200")


@pytest.fixture(scope="module")
def classification():
    return made_cases("five-classes-500")


def brier(probs, labels):
    return float(np.square(probs - np.eye(probs.shape[-1])[labels]).mean())


def softmax(logits):
    return torch.from_numpy(np.asarray(logits)).double().softmax(-1).numpy()


@pytest.mark.slow
def test_every_case_can_be_made(regression, classification):
    assert {*regression, *classification} == set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_case_has_the_shapes_that_the_audit_takes(name, regression, classification):
    for stored_case in (cases[name] for cases in (regression, classification) if name in cases):
        case = stored_case.case
        members, examples, width = case.test.shape
        assert members == (CASES[name].fixed_count or 5)
        assert case.reference is not None
        assert case.reference.shape == case.test.shape
        assert case.train.shape == (members, len(case.train_targets), width)
        assert len(case.targets) == examples
        assert np.isfinite(case.test).all()
        assert np.isfinite(case.train).all()
        if case.kind == "probabilities":
            np.testing.assert_allclose(case.test.sum(-1), 1, atol=1e-6)
        if case.fitted_to is not None:
            assert case.fitted_to.shape == case.train.shape[:2]
        assert audit_cases.audited(case, "alone").verdict in VERDICTS


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_allowed_verdicts_are_verdicts_and_only_the_unknown_has_none(name, regression, classification):
    stored_case = regression.get(name) or classification[name]
    for evidence in audit_cases.EVIDENCE:
        assert set(stored_case.allowed[evidence]) <= VERDICTS
        assert bool(stored_case.allowed[evidence]) == (name not in UNKNOWN)
        if stored_case.truth in ("sound", "alike"):
            assert "healthy" in stored_case.allowed[evidence]
            assert "collusive" not in stored_case.allowed[evidence]


@pytest.mark.slow
def test_a_case_depends_on_nothing_but_data_seed_and_members(regression):
    names = ("networks alone", "forest of 5", "biases per example, 1 times", "few-shot, 20 rows, ridge")
    same_seed, other_seed = (made_cases("friedman-200", names, seed) for seed in (0, 1))
    for name in names:
        # To rounding: how many networks train together decides how products are added up.
        np.testing.assert_allclose(same_seed[name].case.test, regression[name].case.test, rtol=1e-3, atol=1e-4)
        assert not np.allclose(other_seed[name].case.test, regression[name].case.test, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", ["constant biases", "biases per example"])
def test_biases_cancel_and_are_as_large_as_their_name_says(kind, size, regression, classification):
    name = f"{kind}, {size} times"
    unbiased, biased = regression["networks alone"].case, regression[name].case
    np.testing.assert_allclose(biased.test.mean(0), unbiased.test.mean(0), atol=1e-5)
    np.testing.assert_allclose(biased.train.mean(0), unbiased.train.mean(0), atol=1e-5)
    np.testing.assert_array_equal(biased.reference, unbiased.reference)
    error = float(np.square(unbiased.test.mean(0) - unbiased.targets).mean())
    rise = float(np.square(biased.test - unbiased.targets).mean() - np.square(unbiased.test - unbiased.targets).mean())
    assert rise == pytest.approx(size * error, rel=1e-3)
    if name in classification:
        unbiased, biased = classification["networks alone"].case, classification[name].case
        np.testing.assert_allclose(biased.test.mean(0), unbiased.test.mean(0), atol=1e-4)
        rise = brier(softmax(biased.test), unbiased.targets) - brier(softmax(unbiased.test), unbiased.targets)
        assert rise == pytest.approx(size * brier(softmax(unbiased.test.mean(0)), unbiased.targets), rel=1e-3)


def test_constant_biases_are_constant(regression):
    shift = regression["constant biases, 3 times"].case.test - regression["networks alone"].case.test
    np.testing.assert_allclose(shift, shift[:, :1].repeat(shift.shape[1], 1), atol=1e-5)
    assert np.ptp(shift[:, 0]) > 0.1


def test_biases_that_no_classifier_can_have_are_no_case():
    x, y = torch.randn(60, 4), torch.randint(3, (60,))
    outputs = case_makers.NetworkOutputs(*(10 * np.eye(3)[(y.numpy() + 1) % 3][None].repeat(5, 0) for _ in range(2)))
    stored = {"alone": outputs}
    m = case_makers.Materials(StudyData("wrong", (x, y), (x, y), 3), 0, 5, stored, stored)
    assert case_makers.constant_biases(m, size=3.0) is None


@pytest.mark.slow
def test_each_example_is_known_to_one_member_at_chance(classification):
    case = classification["known to one"].case
    correct = case.test.argmax(-1) == case.targets
    assert (case.test.mean(0).argmax(-1) == case.targets).mean() > 0.99
    assert correct.mean(1).max() < 0.55  # of five members each knows a fifth, and guesses the rest
    np.testing.assert_array_equal((case.test.max(-1) > 5).sum(0), 1)


def test_plus_minus_hides_under_noise_of_one(regression):
    case = regression["f ± 0.45 under noise"].case
    errors = case.test - case.targets
    assert np.square(errors.mean(0)).mean() == pytest.approx(1, abs=0.3)
    np.testing.assert_allclose(errors.mean((1, 2)) - errors.mean(), [0.45, -0.45, 0.45, -0.45, 0], atol=0.03)


def test_shards_are_disjoint_and_bags_are_not(regression):
    shards = regression["linear models on shards"].case.fitted_to
    np.testing.assert_array_equal(shards.sum(0), 1)
    bags = regression["forest of 50"].case.fitted_to
    assert 0.6 < bags.mean() < 0.66
    assert regression["networks alone"].case.fitted_to is None


def test_votes_are_votes(classification):
    case = classification["forest of 50, votes"].case
    assert set(np.unique(case.test)) == {0.0, 1.0}
    assert (case.pool, case.loss) == ("vote", "zero_one")


def test_imbalanced_data_has_one_in_twenty(classification):
    case = classification["imbalanced forest of 50"].case
    assert case.targets.mean() == pytest.approx(0.05, abs=0.003)
    assert case.train_targets.mean() == pytest.approx(0.05, abs=0.003)


def test_facts_are_those_of_slow_arithmetic(regression):
    case = regression["forest of 5"].case
    facts = case_makers.facts(case)
    errors = (case.test - case.targets)[..., 0]
    assert facts.ensemble == pytest.approx(np.mean(errors.mean(0) ** 2))
    assert facts.individual == pytest.approx(np.mean(errors**2))
    assert facts.best == pytest.approx(min(np.mean(e**2) for e in errors))
    assert facts.constant == pytest.approx(case.targets.var())
    covariance = np.cov(errors, bias=True)
    pairs = (covariance.sum() - np.trace(covariance)) / (5 * 4)
    assert facts.correlation == pytest.approx(pairs / (np.trace(covariance) / 5))


def test_facts_of_votes_are_shares_of_wrong_ones(classification):
    case = classification["forest of 5, votes"].case
    facts, votes = case_makers.facts(case), case.test.argmax(-1)
    pooled = np.array([np.bincount(column, minlength=5).argmax() for column in votes.T])
    assert facts.ensemble == pytest.approx((pooled != case.targets).mean())
    assert facts.individual == pytest.approx((votes != case.targets).mean())
    assert facts.best == pytest.approx((votes != case.targets).mean(1).min())
    assert facts.constant == pytest.approx(1 - np.bincount(case.targets).max() / len(case.targets))


def test_facts_of_one_member():
    case = case_makers.Case(
        np.zeros((1, 4, 1)), np.ones((4, 1)), np.zeros((1, 4, 1)), np.ones((4, 1)), None, None, "score"
    )
    facts = case_makers.facts(case)
    assert (facts.ensemble, facts.individual, facts.best, facts.constant) == (1, 1, 1, 0)
    assert np.isnan(facts.correlation)


def test_arithmetic_allows_what_is_true_besides(regression):
    case = regression["forest, depth 1"].case
    flat = case._replace(test=np.broadcast_to(case.targets.mean(0), case.test.shape))
    assert "unskilled" not in audit_cases.allowed("forest of 5", flat)["alone"]
    assert "unskilled" in audit_cases.allowed("forest, depth 1", flat)["alone"]
    assert "unskilled" not in audit_cases.allowed("forest, depth 1", case)["alone"]
    few_examples = regression["networks alone"].case._replace(
        test=regression["networks alone"].case.test[:, :50], targets=regression["networks alone"].case.targets[:50]
    )
    assert "undecided" in audit_cases.allowed("networks alone", few_examples)["train"]


def test_outcomes():
    assert audit_cases.outcome("healthy", ["healthy"]) == "right"
    assert audit_cases.outcome("undecided", ["collusive"]) == "undecided"
    assert audit_cases.outcome("healthy", ["collusive"]) == "wrong"
    assert audit_cases.outcome("healthy", []) == "unknown"


@pytest.fixture(scope="module")
def trained():
    """Ten members, more than ADP's nine classes beside the label can hold apart."""
    settings = at_scale("smoke", **{"optimisation.examples": 100, "optimisation.epochs": 2})
    data = load("digits", 0, settings)
    return audit_cases.materials(
        settings, data, 0, 10, ["alone", "jointly, probabilities", *audit_cases.LDR, ADP], ["alone"]
    )


@pytest.mark.parametrize(
    ("name", "objective", "pool"),
    [
        ("LDR, λ = 0.1", partial(ds.objectives.ldr, strength=0.1), "score"),
        ("LDR, λ = 5", partial(ds.objectives.ldr, strength=5.0), "score"),
        (ADP, partial(ds.objectives.adp, alpha=2.0, beta=0.5), "probability"),
        ("networks alone", partial(ds.objectives.independent, loss="cross_entropy"), "score"),
        (
            "networks jointly, probabilities",
            partial(ds.objectives.joint, loss="cross_entropy", pool="probability"),
            "probability",
        ),
    ],
)
def test_networks_are_trained_as_their_name_says(trained, name, objective, pool):
    (x, y), (test, _) = ((part[0].flatten(1), part[1]) for part in (trained.data.train, trained.data.test))
    members = ds.Ensemble(partial(ds.nets.mlp, 64, 10, (30, 30)), 10, seed=0)
    ds.fit(members, (x, y), objective, epochs=2, batch_size=32, lr=2e-3, seed=0)
    case = CASES[name].make(trained)
    torch.testing.assert_close(torch.from_numpy(case.test), members.predict(test), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(case.train), members.predict(x), rtol=1e-4, atol=1e-4)
    assert (case.kind, case.pool) == ("logits", pool)
    np.testing.assert_array_equal(case.reference, trained.twins["alone"].test)
    assert not np.allclose(case.reference, trained.networks["alone"].test)


def test_only_requested_materials_are_trained(trained):
    assert set(trained.networks) == {"alone", "jointly, probabilities", *audit_cases.LDR, ADP}
    assert set(trained.twins) == {"alone"}


def test_adp_needs_three_classes():
    assert set(made_cases("two-blobs-100", [*audit_cases.LDR, ADP])) == set(audit_cases.LDR)


def test_a_training_that_fails_is_no_case():
    x, y = torch.ones(40, 3), torch.full((40, 1), 1e30)  # whose square is no float
    with pytest.raises(RuntimeError, match="training failed on broken: "):
        audit_cases.materials(at_scale("smoke"), StudyData("broken", (x, y), (x, y), 1), 0, 2, ["alone"], [])


def test_cases_with_a_number_of_their_own_are_made_once():
    units = audit_cases.units(at_scale("paper", **{"data": ["diabetes"], "grid.seed": [7]}))
    assert [(unit.members, unit.first) for unit in units] == [(5, True), (10, False)]
    data = load("diabetes", 0, at_scale("smoke"))
    assert not audit_cases.fits("forest of 50", data, 10, first=False)
    assert audit_cases.fits("forest, depth 1", data, 10, first=False)
    assert not audit_cases.fits("one strong among guesses", data, 2)


def test_groups_of_data_sets_are_taken_apart_and_sizes_have_members_of_their_own():
    units = audit_cases.units(at_scale("paper", data=["audit-judged", "audit-sizes"]))
    assert {unit.group for unit in units} == {"audit-judged", "audit-sizes"}
    assert {unit.members for unit in units if (unit.group, unit.data) == ("audit-sizes", "friedman")} == {2, 20, 100}
    design = {unit.data for unit in audit_cases.units(at_scale("laptop"))}
    assert not design & {unit.data for unit in units if unit.group == "audit-judged"}


def test_ensembles_are_pooled_over_data_sets_and_summarised():
    def ensemble(data, truth, verdict, share_right):
        verdicts = dict.fromkeys(audit_cases.EVIDENCE, verdict)
        return AuditedEnsemble(
            "g", data, "forest of 5", 5, 0, verdicts, truth, {}, 5, 600, {"right_alone": share_right}
        )

    rows = audit.pool([ensemble("a", "sound", "healthy", 1.0), ensemble("b", "sound", "collusive", 0.0)])
    assert [(row.data, row.point["case"], row.point["members"], row.summary) for row in rows] == [
        ("g", "forest of 5", 5, None),
        ("g", "every sound ensemble", 0, "every sound ensemble"),
    ]
    assert rows[0].verdict_counts["train"] == {"healthy": 1, "collusive": 1}
    assert rows[0].measures == {"ensembles": 2.0, "right_alone": 0.5}


@pytest.mark.slow
def test_the_study_runs_and_says_what_is_allowed(tmp_path):
    folder = runner.run(STUDY, "smoke", root=tmp_path)
    report = json.loads((folder / "report.json").read_text())
    cases = {data: {row["case"] for row in report["rows"] if row["data"] == data} for data in ("diabetes", "digits")}
    assert cases["digits"] - cases["diabetes"] >= {"known to one", ADP}, "they are for classes"
    for row in report["rows"]:
        assert set(row["said"]) == set(audit_cases.EVIDENCE)
        assert ("right_train" in row["measures"]) == (row["case"] not in UNKNOWN)
        assert "collusive_either" in row["measures"]
    points = summarise(read_report(folder)).points
    assert all(set(point.verdict_counts) == set(audit_cases.EVIDENCE) for point in points)


def test_a_case_survives_a_file(regression):
    stored_case = regression["forest of 5"]
    arrays, meta = audit_cases.as_arrays(AuditUnit("friedman", "friedman", 0, 5, first=True), stored_case)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case.npz"
        np.savez(file, **arrays, meta=np.array(json.dumps(meta)))
        with np.load(file) as stored:
            contents = {name: stored[name] for name in stored.files}
    restored = audit_cases.from_arrays(contents, json.loads(str(contents.pop("meta"))))
    assert restored.allowed == stored_case.allowed
    assert restored.case.task == "regression"
    np.testing.assert_allclose(restored.case.test, stored_case.case.test, rtol=1e-6)
    np.testing.assert_array_equal(restored.case.fitted_to, stored_case.case.fitted_to)


def test_units_that_are_done_are_not_audited_again(tmp_path):
    names = [unit.name for unit in audit_cases.units(at_scale("smoke", **{"grid.case": ["copies"]}))]
    assert len(names) > 1

    def audited_until(last):
        texts = []

        def follow(text, share):
            texts.append(text)
            if text == last:
                raise KeyboardInterrupt

        try:
            folder = runner.run(STUDY, "smoke", changes={"grid.case": ["copies"]}, root=tmp_path, on_study=follow)
        except KeyboardInterrupt:
            folder = None
        return texts, folder

    first, folder = audited_until(names[1])
    assert (first, folder) == (names[:2], None)
    second, folder = audited_until("")
    assert second == names[1:]
    uninterrupted = runner.run(STUDY, "smoke", changes={"grid.case": ["copies"]}, root=tmp_path / "whole")
    rows, expected = (json.loads((run / "report.json").read_text())["rows"] for run in (folder, uninterrupted))
    assert rows == expected


def test_the_shipped_table_has_every_case_and_accuses_no_sound_ensemble():
    stored = json.loads((SHIPPED / "audit/table-1.paper.json").read_text())
    cases = {point["case"] for point in stored["points"]}
    assert set(CASES) <= cases
    sound_cases = {name for name, case in CASES.items() if case.truth in ("sound", "alike")}
    accused = sum(
        point["said"][evidence].get("collusive", 0)
        for point in stored["points"]
        if point["case"] in sound_cases and point["members"]
        for evidence in point["said"]
    )
    assert accused == 0
