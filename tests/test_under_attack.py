"""Studies under attack: methods as one sweep, ensembles that are left, and what is measured of them."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve

import dissensus as ds
from dissensus import attacks, diversity, scores
from dissensus.studies import datasets, library, spec
from dissensus.studies import run as runner
from dissensus.studies.procedures import adversarial, attack, attack_measures, features, methods, train
from dissensus.studies.procedures.attack_measures import AttackedEnsemble, detection_score, true_positive_rates
from dissensus.studies.results import Row
from dissensus.studies.run_folders import read_report
from dissensus.studies.summary import estimate, summarise
from dissensus.studies.validation import missing

SMALL = {"optimisation.epochs": 1, "optimisation.examples": 64, "evaluation.examples": 24}
METHODS = ["baseline", "adp-2-0", "adp-2-0.5"]


def rows_of(folder):
    return json.loads((folder / "report.json").read_text())["rows"]


def typed(settings, row):
    return Row.from_json(row, list(settings.grid))


def settings_of(name, **changes):
    return spec.resolved(library.load(name), "smoke", {**SMALL, **changes}, name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def trained(runs):
    return runner.run("adp/table-1", "smoke", changes=SMALL, root=runs)


@pytest.fixture(scope="module")
def subject(trained, tmp_path_factory):
    """The ADP ensemble of the first seed, as it takes images."""
    row = next(row for row in rows_of(trained) if row["method"] == "adp-2-0.5" and row["seed"] == 0)
    settings = settings_of("adp/table-1")
    problem = datasets.load_unscaled("made-images", train_examples=64, test_examples=24)
    model = attack.stored_model(settings, problem, typed(settings, row), trained / "made-images")
    return AttackedEnsemble(model, *problem.test, folder=tmp_path_factory.mktemp("attacks"), examples={}, batch_size=16)


class TestSpec:
    def test_settings_may_differ_by_data(self):
        settings = library.load("adp/table-1")
        on_mnist = spec.on_data(spec.resolved(settings, "paper", {}, "x"), "mnist")
        assert (on_mnist.optimisation.epochs, on_mnist.optimisation.cut_at, on_mnist.optimisation.augment) == (
            40,
            [0.375, 0.75],
            [],
        )
        assert on_mnist.optimisation.lr == settings.optimisation.lr
        assert spec.on_data(settings, "cifar10") is settings

    def test_changes_by_hand_hold_for_all_data(self):
        changed = spec.resolved(library.load("adp/table-1"), "paper", {"optimisation.epochs": 2}, "x")
        on_mnist = spec.on_data(changed, "mnist")
        assert on_mnist.optimisation.epochs == 2
        assert on_mnist.optimisation.cut_at == [0.375, 0.75]

    def test_a_wrong_word_is_named_with_its_place(self):
        content = {
            "title": "t",
            "reference": "Table 1",
            "claim": "C.",
            "data": ["mnist"],
            "by_data": {"mnist": {"optimisation": {"epoch": 1}}},
        }
        with pytest.raises(spec.SpecError, match=r"by_data.mnist.optimisation.epoch' is not known.*epochs"):
            spec.parse(content, "adp/table-1", "f.toml")

    def test_settings_of_a_scale_hold_for_all_data(self):
        on_mnist = spec.on_data(spec.resolved(library.load("adp/table-1"), "smoke", {}, "x"), "mnist")
        assert on_mnist.optimisation.epochs == 2
        assert on_mnist.optimisation.augment == []
        measured = spec.on_data(spec.resolved(library.load("adp/table-2"), "laptop", {}, "x"), "mnist")
        assert "accuracy_jsma_0.3" not in measured.evaluation.measures

    def test_data_that_nobody_knows_is_refused(self, tmp_path):
        (tmp_path / "adp").mkdir()
        file = tmp_path / "adp" / "table-1.toml"
        required = 'title = "t"\nreference = "T"\nclaim = "C."\ndata = ["mnist"]\n'
        file.write_text(required + '[by_data.minst]\nnote = "n"\n[members]\nnetwork = "mlp"\n')
        with pytest.raises(spec.SpecError, match="key 'by_data' is 'minst'.*Did you mean 'mnist'"):
            library.load(str(file))

    def test_a_study_takes_over_trainings_and_not_measures_nor_scales(self):
        settings = library.load("adp/table-3")
        assert "gpu" not in settings.scales
        assert "error_rate" not in spec.resolved(settings, "laptop", {}, "x").evaluation.measures
        assert spec.resolved(settings, "laptop", {}, "x").members.network == "cnn"

    def test_a_study_that_uses_trainings_must_not_change_them(self, tmp_path):
        (tmp_path / "adp").mkdir()
        file = tmp_path / "adp" / "mine.toml"
        header = 'title = "t"\nreference = "T"\nclaim = "C."\ndata = ["mnist"]\nuses = "adp/table-1"\n'
        file.write_text(header + '[members]\nnetwork = "cnn"\n[scales.smoke]\n')
        with pytest.raises(spec.SpecError, match="key 'members' is that of adp/table-1, whose trainings this study"):
            library.load(str(file))

    def test_the_digest_depends_on_settings_by_data(self):
        settings = library.load("adp/table-1")
        assert replace(settings, by_data={}).digest() != settings.digest()


class TestTraining:
    @pytest.mark.slow
    def test_methods_that_differ_in_numbers_are_one_sweep_and_equal_those_trained_alone(self, trained, runs):
        assert len(list((trained / "made-images").glob("checkpoints-*"))) == 1
        single_folder = runner.run(
            "adp/table-1", "smoke", changes={**SMALL, "grid.method": ["adp-2-0.5"], "grid.seed": [1]}, root=runs
        )
        (single_row,) = rows_of(single_folder)
        swept_row = next(row for row in rows_of(trained) if row["method"] == "adp-2-0.5" and row["seed"] == 1)
        a, b = (
            np.load(next(folder.glob("made-images*")) / f"outputs-{row['run']:03d}.npy")
            for folder, row in ((single_folder, single_row), (trained, swept_row))
        )
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    def test_rows_stand_under_their_method(self, trained):
        result = [(row["method"], row["seed"]) for row in rows_of(trained)]
        assert result == [(method, seed) for method in METHODS for seed in (0, 1)]

    def test_methods_of_other_networks_are_sweeps_of_their_own(self):
        settings = library.load("masksembles/figure-2")
        described = [methods.method_of(settings, name) for name in settings.grid["method"]]
        assert len({method.sweep_key for method in described}) == len(described)
        assert not any(method.numbers for method in described)

    def test_every_ensemble_is_audited(self, trained):
        assert all(row["audit"]["verdict"] for row in rows_of(trained))

    def test_settings_that_no_sweep_can_vary_are_bound_and_separate_sweeps(self):
        shared = {"objective": "ldr"}
        described = {
            "a": {**shared, "strength": 1.0},
            "b": {**shared, "strength": 2.0},
            "c": {**shared, "strength": 2.0, "weight": "inverse"},
        }
        settings = settings_of("adp/table-1", **{"objective.options.methods": described})
        a, b, c = (methods.method_of(settings, name) for name in "abc")
        assert a.sweep_key == b.sweep_key != c.sweep_key
        assert (c.numbers, c.fixed) == ({"strength": 2.0}, {"weight": "inverse"})
        logits, labels = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(0)), torch.arange(4)
        actual = methods.method_objective(settings, c)(logits, labels, **c.numbers)
        expected = ds.objectives.ldr(logits, labels, strength=2.0, weight="inverse")
        torch.testing.assert_close(actual.total, expected.total)
        assert not torch.isclose(actual.total, ds.objectives.ldr(logits, labels, strength=2.0).total)

    def test_an_unknown_method_is_refused(self):
        with pytest.raises(spec.SpecError, match="grid.method names 'adp-3'"):
            methods.method_of(settings_of("adp/table-1"), "adp-3")

    def test_stored_members_give_the_outputs_of_the_training(self, subject, trained):
        row = next(row for row in rows_of(trained) if row["method"] == "adp-2-0.5" and row["seed"] == 0)
        with torch.no_grad():
            outputs = subject.model(subject.x)
        stored_outputs = np.load(trained / "made-images" / f"outputs-{row['run']:03d}.npy")
        np.testing.assert_allclose(outputs.numpy(), stored_outputs, rtol=1e-4, atol=1e-5)


class TestMeasures:
    def test_names(self):
        names = [
            "accuracy_fgsm_0.1",
            "accuracy_square_0.01",
            "standard_0.02",
            "adaptive_0.1",
            "fooled_pgd",
            "accuracy",
            "auroc_nonmaximal_volume_carlini_wagner",
            "auroc_mean_energy_mim",
            "transfer_targeted_pgd_0.05",
            "features_similarity",
            "error_rate",
        ]
        assert all(attack_measures.is_attack_measure(name) for name in names)
        unknown_names = [
            "accuracy_fgsm",
            "accuracy_foo_0.1",
            "standard_",
            "auroc_foo_pgd",
            "auroc_mean_energy_jsma",
            "transfer_jsma_0.05",
            "worst_0.1",
            "fooled_apgd",
        ]
        assert not any(attack_measures.is_attack_measure(name) for name in unknown_names)
        assert "no measure of 'evaluation.measures' is called 'accuracy_foo_0.1'" in "".join(
            missing(settings_of("adp/table-2", **{"evaluation.measures": ["accuracy_foo_0.1"]}))
        )

    def test_impossible_attacks_are_refused_before_training(self):
        def first(**changes):
            return missing(settings_of("adp/table-2", **changes))[0]

        assert first(**{"grid": {"method": ["baseline"]}}) == "'grid' needs the axis 'seed'"
        assert "'digits' has no fixed test set to attack" in first(data=["digits"])
        assert first(**{"evaluation.attacked": {"fgms": 3}}) == "no attack of 'evaluation.attacked' is called 'fgms'"
        assert first(**{"evaluation.strong": {"square": 0.3}}) == "no attack of 'evaluation.strong' is called 'square'"
        assert "accuracy_foo_1" in first(
            **{"data": ["mnist"], "by_data": {"mnist": {"evaluation": {"measures": ["accuracy_foo_1"]}}}}
        )

    @pytest.mark.parametrize(
        ("name", "by_hand"),
        [
            ("accuracy_fgsm_0.02", partial(attacks.fgsm, epsilon=0.02)),
            ("accuracy_bim_0.01", partial(attacks.bim, epsilon=0.01, steps=10, step_size=0.001, stop=False)),
            ("accuracy_mim_0.01", partial(attacks.mim, epsilon=0.01, steps=10, step_size=0.001, stop=False)),
            ("accuracy_apgd_0.01", partial(attacks.apgd, epsilon=0.01)),
            ("accuracy_jsma_0.05", partial(attacks.jsma, preset="adp", step_size=0.1, distortion=0.05)),
        ],
    )
    def test_accuracy_under_attack_is_that_of_the_attack_by_hand(self, subject, name, by_hand):
        result = by_hand(subject.model, subject.x, subject.y)
        assert attack_measures.value(name, subject) == pytest.approx(float((~result.success).double().mean()))

    def test_an_attack_may_be_run_on_fewer(self, subject, tmp_path):
        fewer_examples = replace(subject, examples={"fgsm": 7}, folder=tmp_path, adversarials={}, drawn={})
        result = attacks.fgsm(subject.model, subject.x[:7], subject.y[:7], epsilon=0.02)
        expected = float((~result.success).double().mean())
        assert attack_measures.value("accuracy_fgsm_0.02", fewer_examples) == pytest.approx(expected)

    def test_how_many_examples_a_measure_looks_at_is_known(self, subject):
        attacked = {"fgsm": 7, "adaptive": 50, "transfer": 9}
        repeated = replace(subject, x=subject.x.repeat(100, 1, 1, 1), y=subject.y.repeat(100), examples=attacked)
        expected_counts = {
            "accuracy_fgsm_0.1": 7,
            "auroc_nonmaximal_volume_fgsm": 7,
            "accuracy_bim_0.1": 2400,
            "fooled_pgd": 2400,
            "accuracy_jsma_0.1": 200,
            "accuracy_carlini_wagner_1.0": 1000,
            "accuracy_apgd_0.1": 1000,
            "standard_0.1": 1000,
            "adaptive_0.1": 50,
            "transfer_pgd_0.05": 9,
            "features_similarity": 2400,
        }
        assert {name: attack_measures.examples_of(name, repeated) for name in expected_counts} == expected_counts

    def test_features_are_compared_on_all_examples_and_mapped_on_some(self, subject, monkeypatch):
        monkeypatch.setattr(attack_measures, "EXAMPLES", 10)
        fresh = replace(subject, drawn={})
        value = attack_measures.value("features_similarity", fresh)
        standardised = subject.model
        hidden = features.hidden(standardised.model, standardised.scaled(subject.x))
        assert value == pytest.approx(features.similarity(hidden))
        assert value != pytest.approx(features.similarity(hidden[:, :10]))
        assert {len(member) for member in fresh.drawn["map"]} == {10}

    def test_the_worst_case_comes_with_its_flags(self, subject, tmp_path):
        fewer_examples = replace(subject, examples={"standard": 4}, folder=tmp_path, adversarials={}, drawn={})
        worst = attack_measures.value("standard_0.02", fewer_examples)
        apgd = attacks.apgd(subject.model, subject.x[:4], subject.y[:4], epsilon=0.02)
        assert worst <= float((~apgd.success).double().mean())
        assert list(fewer_examples.drawn["flags"]) == ["standard_0.02"]

    def test_detection_is_the_area_of_clean_against_what_was_turned(self, subject, tmp_path):
        fresh = replace(subject, folder=tmp_path, adversarials={}, drawn={})
        result = attacks.fgsm(subject.model, subject.x, subject.y, epsilon=0.1)
        with torch.no_grad():
            clean, after = (subject.model(x) for x in (subject.x, result.inputs))
        correct = clean.softmax(-1).mean(0).argmax(-1) == subject.y
        fooled = result.success & correct
        assert attack_measures.value("fooled_fgsm", fresh) == pytest.approx(float(fooled.sum() / correct.sum()))
        truth = np.r_[np.zeros(len(subject.x)), np.ones(int(fooled.sum()))]
        ed = [diversity.nonmaximal_volume(part, log=True) for part in (clean, after[:, fooled])]
        expected = roc_auc_score(truth, -torch.cat(ed).numpy())
        assert attack_measures.value("auroc_nonmaximal_volume_fgsm", fresh) == pytest.approx(expected)
        bma = [scores.model_average(part.softmax(-1)) for part in (clean, after[:, fooled])]
        expected = roc_auc_score(truth, torch.cat(bma).numpy())
        assert attack_measures.value("auroc_model_average_fgsm", fresh) == pytest.approx(expected)
        assert len(fresh.drawn["curves"]["true_positive_rate_fgsm"]) == 101

    def test_nothing_turned_is_no_number(self, subject, tmp_path):
        unattacked = replace(subject, folder=tmp_path, drawn={}, adversarials={})
        clean = attacks.Adversarial(subject.x, torch.zeros(24, dtype=torch.bool), torch.zeros(24))
        unattacked.adversarials["fgsm-0.1"] = clean
        assert np.isnan(attack_measures.value("auroc_nonmaximal_volume_fgsm", unattacked))
        assert attack_measures.value("fooled_fgsm", unattacked) == 0

    def test_detection_may_be_tried_on_stronger_attacks(self, subject, tmp_path):
        strong = replace(subject, strengths={"fgsm": 0.3}, folder=tmp_path, adversarials={}, drawn={})
        result = attacks.fgsm(subject.model, subject.x, subject.y, epsilon=0.3)
        with torch.no_grad():
            correct = subject.model(subject.x).softmax(-1).mean(0).argmax(-1) == subject.y
        share = float((result.success & correct).sum() / correct.sum())
        assert attack_measures.value("fooled_fgsm", strong) == pytest.approx(share)
        assert list(strong.adversarials) == ["fgsm-0.3"]
        assert strong.strength("pgd") == attack_measures.STRENGTHS["pgd"]

    def test_ed_is_scored_so_that_agreement_is_suspicious(self):
        different = torch.tensor([[[0.6, 0.4, 1e-9]], [[0.6, 1e-9, 0.4]]]).log()
        identical = torch.tensor([[[0.6, 0.3, 0.1]], [[0.6, 0.3, 0.1]]]).log()
        assert detection_score(identical, "nonmaximal_volume") > detection_score(different, "nonmaximal_volume")

    def test_rates_are_the_curve_at_its_highest(self):
        draw = torch.Generator().manual_seed(3)
        inside, outside = torch.randint(8, (50,), generator=draw), torch.randint(3, 12, (40,), generator=draw)
        result = true_positive_rates(inside.double(), outside.double())
        false, true, _ = roc_curve(np.r_[np.zeros(50), np.ones(40)], np.r_[inside, outside])
        for i, rate in enumerate(result):
            assert rate == pytest.approx(true[false <= i / 100 + 1e-9].max())

    def test_transfer_is_the_mean_over_pairs_of_different_members(self, subject, tmp_path):
        fresh = replace(subject, folder=tmp_path, adversarials={}, drawn={})
        value = attack_measures.value("transfer_pgd_0.05", fresh)
        matrix = attacks.transfer_matrix(
            subject.model, subject.x, subject.y, attack="pgd", epsilon=0.05, step_size=0.005, batch_size=16
        ).accuracy
        assert torch.tensor(fresh.drawn["matrices"]["pgd_0.05"]).double() == pytest.approx(matrix)
        pairs = [float(matrix[i, j]) for i in range(3) for j in range(3) if i != j]
        assert value == pytest.approx(sum(pairs) / 6)

    def test_targets_are_never_the_label(self, subject, tmp_path, monkeypatch):
        received = {}

        def caught(model, x, y, *, target, **_):
            received["target"] = target
            return attacks.Transfer(torch.zeros(4, 4), torch.zeros(4, 4))

        monkeypatch.setattr(attacks, "transfer_matrix", caught)
        fresh = replace(subject, folder=tmp_path, adversarials={}, drawn={})
        attack_measures.value("transfer_targeted_pgd_0.05", fresh)
        assert (received["target"] != subject.y).all()
        assert received["target"].min() >= 0
        assert received["target"].max() < 10

    def test_the_histogram_counts_every_example(self):
        outputs = torch.randn(3, 40, 10, generator=torch.Generator().manual_seed(1)) * 4
        outputs[:, 0] = outputs[:1, 0]  # members alike: far out on the left
        targets = torch.arange(40) % 10
        result = train.histogram(outputs, targets)
        assert (len(result), sum(result)) == (60, 40)
        logs = diversity.nonmaximal_volume(outputs, targets, log=True)
        assert result[10] == int(((logs >= -25) & (logs < -24.5)).sum())
        assert sum(result[:20]) == int((logs < -20).sum()) >= 1


class TestRunning:
    def test_clean_and_attacked_accuracy_are_of_the_same_examples(self, runs):
        changes = {**SMALL, "evaluation.measures": ["accuracy", "accuracy_fgsm_0"], "grid.seed": [0]}
        folder = runner.run("adp/table-2", "smoke", changes=changes, root=runs)
        assert all(row["measures"]["accuracy"] == row["measures"]["accuracy_fgsm_0"] for row in rows_of(folder))
        assert summarise(read_report(folder)).points[0].examples == {"accuracy_fgsm_0": 24}

    @pytest.mark.slow
    def test_more_examples_than_were_kept_are_refused(self, runs):
        with pytest.raises(spec.SpecError, match="adp/figure-5 looks at 65 test examples; adp/table-1 kept 64"):
            runner.run("adp/figure-5", "smoke", changes={**SMALL, "evaluation.examples": 65}, root=runs)

    def test_a_failed_training_is_reported_and_not_attacked(self, runs):
        changes = {**SMALL, "optimisation.lr": 1e30, "grid.seed": [0], "grid.method": ["baseline"]}
        folder = runner.run("adp/table-2", "smoke", changes=changes, root=runs)
        (row,) = rows_of(folder)
        assert row["status"] == "failed"
        assert np.isnan(row["measures"]["accuracy_fgsm_0.1"])
        assert summarise(read_report(folder)).points[0].measures["accuracy_fgsm_0.1"][:3] == (None, None, 0)

    def test_seeds_without_a_number_are_left_out_of_the_mean(self):
        assert list(estimate([float("nan"), 0.9, 0.7])[:3]) == pytest.approx([0.8, 0.1, 2])

    @pytest.mark.slow
    def test_a_task_that_was_broken_off_goes_on(self, runs, monkeypatch):
        measured = []
        inner = attack_measures.value

        def recording_value(name, subject):
            measured.append(name)
            if len(measured) == 3:
                raise KeyboardInterrupt
            return inner(name, subject)

        changes = {
            **SMALL,
            "evaluation.measures": ["accuracy", "accuracy_fgsm_0.1", "accuracy_pgd_0.1"],
            "grid.method": ["baseline"],
            "grid.seed": [0],
        }
        monkeypatch.setattr(attack_measures, "value", recording_value)
        with pytest.raises(KeyboardInterrupt):
            runner.run("adp/table-2", "smoke", changes={**changes, "grid.seed": [0, 1]}, root=runs)
        folder = runner.run("adp/table-2", "smoke", changes={**changes, "grid.seed": [0, 1]}, root=runs)
        assert measured == [
            "accuracy_fgsm_0.1",
            "accuracy_pgd_0.1",
            "accuracy_fgsm_0.1",
            "accuracy_fgsm_0.1",
            "accuracy_pgd_0.1",
        ]
        assert [sorted(row["measures"]) for row in rows_of(folder)] == [
            ["accuracy", "accuracy_fgsm_0.1", "accuracy_pgd_0.1"]
        ] * 2

    @pytest.mark.slow
    def test_several_at_once_give_what_one_after_the_other_gives(self, runs, tmp_path):
        changes = {**SMALL, "evaluation.measures": ["accuracy_fgsm_0.02"]}
        sequential = runner.run("adp/table-2", "smoke", changes=changes, root=runs)
        parallel = runner.run("adp/table-2", "smoke", changes=changes, root=tmp_path, jobs=2)
        assert [row["measures"] for row in rows_of(sequential)] == [row["measures"] for row in rows_of(parallel)]

    def test_the_histogram_comes_with_its_study(self, runs):
        folder = runner.run("adp/figure-5", "smoke", changes=SMALL, root=runs)
        assert {sum(row["curves"]["count"]) for row in rows_of(folder)} == {24}


class TestHardened:
    def test_members_have_their_standardisation_inside(self, runs):
        changes = {
            **SMALL,
            "grid.adversarial": ["fgsm"],
            "grid.method": ["baseline"],
            "grid.seed": [0],
            "evaluation.measures": ["accuracy", "accuracy_fgsm_0.04"],
        }
        folder = runner.run("adp/table-4", "smoke", changes=changes, root=runs)
        (row,) = rows_of(folder)
        settings = settings_of("adp/table-4")
        problem = datasets.load_unscaled("made-images", train_examples=64, test_examples=24)
        model = attack.stored_model(settings, problem, typed(settings, row), Path(folder) / "made-images-seed-0")
        with torch.no_grad():
            outputs = model(problem.test[0])
        pooled = outputs.softmax(-1).mean(0).argmax(-1)
        assert row["measures"]["accuracy"] == pytest.approx(float((pooled == problem.test[1]).double().mean()))

    def test_attacks_are_those_of_the_paper(self):
        fgsm, pgd = adversarial.adversary("fgsm"), adversarial.adversary("pgd")
        assert adversarial.adversary("none") is None
        assert (fgsm.steps, fgsm.random_start, fgsm.range, fgsm.share) == (1, False, (0.01, 0.05), 0.5)
        assert (pgd.steps, pgd.random_start, pgd.step_share) == (10, True, None)

    def test_an_unknown_attack_is_refused(self):
        with pytest.raises(spec.SpecError, match="grid.adversarial names 'bim'; it may be one of none, fgsm, pgd"):
            adversarial.adversary("bim")

    def test_masks_go_around_the_standardisation_and_train_for_their_own_objective(self, runs):
        changes = {
            **SMALL,
            "grid.adversarial": ["pgd"],
            "grid.method": ["masksembles"],
            "grid.seed": [0],
            "members.options.backbone": "cnn",
            "members.options.widths": [6, 6],
            "evaluation.measures": ["accuracy", "accuracy_fgsm_0.04"],
        }
        folder = runner.run("adp/table-4", "smoke", changes=changes, root=runs)
        (row,) = rows_of(folder)
        assert 0 <= row["measures"]["accuracy_fgsm_0.04"] <= row["measures"]["accuracy"]
        outputs = np.load(folder / "made-images-seed-0" / "outputs-000.npy")
        assert outputs.shape == (3, 24, 10)
