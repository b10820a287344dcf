"""Studies of data around the training data: the sets, what is measured on them, and the pictures that are shown."""

import json
import logging
import shutil

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

import dissensus as ds
from dissensus.studies import backbones, datasets, library, shifted_datasets, spec
from dissensus.studies import run as runner
from dissensus.studies.figures import figures
from dissensus.studies.procedures import shift, shift_training
from dissensus.studies.procedures.shift_measures import ShiftOutputs, is_shift_measure, values
from dissensus.studies.results import Measure
from dissensus.studies.run_folders import damage, read_report
from dissensus.studies.summary import summarise


def pictures(n=40, channels=3, side=16):
    return torch.rand(n, channels, side, side, generator=torch.Generator().manual_seed(0))


def test_corruptions_are_dealt_evenly_and_the_same_every_time():
    x = pictures(40)
    mild, strong = shifted_datasets.corrupted(x, 1), shifted_datasets.corrupted(x, 5)
    assert torch.equal(mild, shifted_datasets.corrupted(x, 1))
    assert float((strong - x).abs().mean()) > float((mild - x).abs().mean()) > 0
    names = sorted(ds.data.corruptions.CORRUPTIONS)
    hits = [int((ds.data.corruptions.corrupt(x, name, 5) == strong).flatten(1).all(1).sum()) for name in names]
    assert all(hit >= 4 for hit in hits), f"forty pictures, ten corruptions: {hits}"
    grey = shifted_datasets.corrupted(pictures(18, 1), 3)
    assert grey.shape == (18, 1, 16, 16)


def test_a_jigsaw_has_the_same_pieces_elsewhere():
    x = pictures(6)
    result = shifted_datasets.jigsaw(x)
    assert result.shape == x.shape
    torch.testing.assert_close(result.flatten(1).sort(1).values, x.flatten(1).sort(1).values)
    assert not bool((result == x).flatten(1).all(1).any())
    pieces = {tuple(p.flatten().tolist()) for p in x[0].unfold(1, 4, 4).unfold(2, 4, 4).flatten(1, 2).transpose(0, 1)}
    result_pieces = {
        tuple(p.flatten().tolist()) for p in result[0].unfold(1, 4, 4).unfold(2, 4, 4).flatten(1, 2).transpose(0, 1)
    }
    assert pieces == result_pieces
    odd = shifted_datasets.jigsaw(pictures(2, 1, 30))
    assert odd.shape == (2, 1, 30, 30)


def test_pictures_of_other_sources_are_brought_to_shape():
    assert shifted_datasets.reshaped(pictures(3, 1, 28), torch.Size([3, 32, 32])).shape == (3, 3, 32, 32)
    grey = shifted_datasets.reshaped(pictures(3, 3, 16), torch.Size([1, 16, 16]))
    torch.testing.assert_close(grey, pictures(3, 3, 16).mean(1, keepdim=True))


def test_six_classes_are_trained_on_and_four_kept_back():
    x, y, _ = datasets.images("made-images-six", "test")
    assert sorted(y.unique().tolist()) == [0, 1, 2, 3, 4, 5]
    unseen, labels, _ = datasets.images("made-images-six", "test", unseen=True)
    assert sorted(labels.unique().tolist()) == [6, 7, 8, 9]
    assert len(x) + len(unseen) == 400


@pytest.mark.parametrize(("part", "aligned"), [("train", 0.95), ("validation", 0.5), ("test", 0.5)])
def test_the_shortcut_is_there_in_training_alone(part, aligned):
    x, y, groups = datasets.two_attributes(part)
    ground = groups % 2
    assert torch.equal(groups // 2, y)
    assert float((ground == y).float().mean()) == pytest.approx(aligned, abs=0.03)
    colour = x[:, 2].mean((1, 2)) - x[:, 1].mean((1, 2))
    assert float(((colour > 0).long() == ground).float().mean()) == 1.0, "the ground can be outputs_on_sets"
    assert float(x.min()) >= 0
    assert float(x.max()) <= 1


def test_names_of_measures_are_parsed_by_the_longest_set():
    assert Measure.parse("auroc_model_average_fashion-mnist").dataset == "fashion-mnist"
    assert Measure.parse("accuracy_mnist").dataset == "mnist"
    assert is_shift_measure("auroc_pairwise_kl_unseen")
    assert is_shift_measure("soup_accuracy_corrupted-1")
    assert is_shift_measure("audit_collusive")
    assert is_shift_measure("worst_group_accuracy")
    assert not is_shift_measure("worst_group_accuracy_validation")
    for name in ("auroc_model_average", "auroc_nonsense_mnist", "audit_fine", "nonsense"):
        assert not is_shift_measure(name)


def test_measures_are_what_they_say():
    generator = torch.Generator().manual_seed(0)
    outputs, outside = (3 * torch.randn(4, 50, 5, generator=generator) for _ in range(2))
    targets = torch.randint(5, (50,), generator=generator)
    groups = torch.randint(3, (50,), generator=generator)
    other_sets = {"mnist": (outside, None), "corrupted-2": (outside, targets)}
    outputs_on_sets = ShiftOutputs(
        outputs,
        targets,
        other_sets,
        "cross_entropy",
        "score",
        objective="ldr",
        groups=groups,
        verdict="collusive",
        seconds_per_epoch=1.5,
    )
    result = values(
        [
            "accuracy",
            "accuracy_mnist",
            "accuracy_corrupted-2",
            "best_member_accuracy",
            "worst_group_accuracy",
            "auroc_predictive_diversity_mnist",
            "auroc_mean_energy_mnist",
            "auroc_best_mnist",
            "audit_collusive",
            "audit_healthy",
            "seconds_per_epoch",
            "distinct_predictions",
            "disagreeing_mnist",
            "accuracy_unseen",
        ],
        outputs_on_sets,
    )
    correct = outputs.mean(0).argmax(-1) == targets
    assert result["accuracy"] == pytest.approx(float(correct.float().mean()))
    assert np.isnan(result["accuracy_mnist"]), "nobody is right about classes that are not among theirs"
    assert np.isnan(result["accuracy_unseen"])
    assert result["accuracy_corrupted-2"] == pytest.approx(
        float((outside.mean(0).argmax(-1) == targets).float().mean())
    )
    assert result["best_member_accuracy"] == pytest.approx(float((outputs.argmax(-1) == targets).float().mean(1).max()))
    assert result["worst_group_accuracy"] == pytest.approx(
        min(float(correct[groups == g].float().mean()) for g in range(3))
    )
    labels = [0] * 50 + [1] * 50
    pds = torch.cat([x.softmax(-1).amax(0).mean(-1) for x in (outputs, outside)])
    assert result["auroc_predictive_diversity_mnist"] == pytest.approx(roc_auc_score(labels, pds))
    energy = torch.cat([-x.logsumexp(-1).mean(0) for x in (outputs, outside)])
    assert result["auroc_mean_energy_mnist"] == pytest.approx(roc_auc_score(labels, energy))
    assert result["auroc_best_mnist"] == result["auroc_predictive_diversity_mnist"], "for LDR, PDS alone"
    assert (result["audit_collusive"], result["audit_healthy"], result["seconds_per_epoch"]) == (1.0, 0.0, 1.5)
    predicted = outputs.argmax(-1)
    assert result["distinct_predictions"] == pytest.approx(
        np.mean([len(set(predicted[:, n].tolist())) for n in range(50)])
    )


def test_points_say_what_is_trained():
    settings = spec.resolved(library.load("ldr/table-2"), "gpu", {}, "")
    a2d = shift_training.point_settings(settings, {"method": "a2d", "seed": 0})
    assert (a2d["objective"], a2d["unlabelled"], a2d["members"], a2d["backbone"]) == (
        "a2d",
        "jigsaw",
        5,
        "mobilenet-v2:imagenet",
    )
    assert shift_training.point_settings(settings, {"method": "single", "seed": 0})["members"] == 1
    with pytest.raises(spec.SpecError, match="nothing-like-it"):
        shift_training.point_settings(settings, {"method": "nothing-like-it", "seed": 0})


@pytest.mark.slow
def test_a_point_may_vary_how_members_are_trained(tmp_path):
    changes = {
        "grid": {"lr": [1e-6, 0.05], "method": ["erm"], "seed": [0]},
        "evaluation.measures": ["individual"],
        "optimisation.epochs": 3,
    }
    folder = runner.run("ldr/table-8", "smoke", changes=changes, root=tmp_path)
    losses = [row["measures"]["individual"] for row in json.loads((folder / "report.json").read_text())["rows"]]
    assert abs(losses[1] - losses[0]) > 0.01


def test_a_point_may_vary_the_network():
    settings = spec.resolved(
        library.load("ldr/table-8"), "smoke", {"members.network": "cnn", "members.options": {}}, ""
    )
    examples = torch.zeros(2, 3, 8, 8), torch.zeros(2)
    data = backbones.PreparedData(shifted_datasets.ShiftedData("made", examples, examples, 2))
    sizes = []
    for widths in ([4, 4], [8, 8]):
        point = shift_training.point_settings(settings, {"method": "erm", "seed": 0, "widths": widths})
        sizes.append(sum(p.numel() for p in shift_training.point_builder(settings, point, data)().parameters()))
    assert sizes[1] > 2 * sizes[0]


def test_pictures_in_folders_go_the_same_way(tmp_path):
    changes = {
        "data": ["made-folder"],
        "grid.method": ["erm", "ldr"],
        "grid.seed": [0],
        "evaluation.measures": ["accuracy", "accuracy_corrupted-2"],
    }
    folder = runner.run("ldr/table-8", "smoke", changes=changes, root=tmp_path)
    rows = json.loads((folder / "report.json").read_text())["rows"]
    assert len(rows) == 2
    assert all(0 <= row["measures"]["accuracy_corrupted-2"] <= 1 for row in rows)


@pytest.mark.slow
def test_heads_on_a_pretrained_network_see_each_picture_once(tmp_path, monkeypatch):
    weights = ds.nets.mobilenet_v2().state_dict()
    monkeypatch.setattr(backbones.sources, "weights", lambda name: weights)
    monkeypatch.setattr(backbones, "SIDE", 32)
    passes = []
    looking = backbones.LowPrecision.forward
    monkeypatch.setattr(backbones.LowPrecision, "forward", lambda self, x: passes.append(len(x)) or looking(self, x))
    changes = {
        "data": ["made-images-six"],
        "members.options.backbone": "mobilenet-v2:imagenet",
        "grid.seed": [0],
        "grid.layers": [1],
        "optimisation.examples": 64,
        "evaluation.examples": 32,
        "evaluation.measures": ["accuracy", "auroc_predictive_diversity_unseen"],
    }
    first = runner.run("ldr/table-4", "smoke", changes=changes, root=tmp_path)
    assert sum(passes) == 64 + 32 + 32, "training, test and unseen pictures"
    before = len(passes)
    runner.run("ldr/table-4", "smoke", changes={**changes, "grid.seed": [1]}, root=tmp_path)
    assert len(passes) == before, "features come from disk the second time"
    assert 0 <= json.loads((first / "report.json").read_text())["rows"][0]["measures"]["accuracy"] <= 1


def test_examples_of_most_and_least_disagreement_are_shown(tmp_path):
    folder = runner.run("ldr/figure-3", "smoke", root=tmp_path)
    report = json.loads((folder / "report.json").read_text())
    galleries = [row["shown"] for row in report["rows"] if row.get("shown")]
    assert len(galleries) == 1, "of the first LDR ensemble"
    scores = [example["disagreement"] for example in galleries[0]]
    assert min(scores[: shift.SHOWN]) >= max(scores[shift.SHOWN :])
    drawings = figures(library.load("ldr/figure-3"), summarise(read_report(folder)))
    ((figure, title),) = drawings
    assert "ldr" in title
    assert figure.axes[0].get_title(loc="left") == f"{title}: most disagreement", "a page has no other title for it"


# Interrupted studies

POINTS = {
    "optimisation.epochs": 1,
    "optimisation.examples": 64,
    "evaluation.examples": 64,
    "members.options": {"widths": [4]},
}
"""Independent training of two seeds, and two methods that choose λ and are compared with it: six points."""


class Interrupted(Exception):
    pass


class Followed:
    """A run of the study, until a point begins: which points were trained, and what their audits compared them with."""

    def __init__(self, root, until="", name="ldr/table-8", changes=POINTS):
        self.trained, self.references = [], {}
        train, audit = shift_training.PointTraining.trained, shift.shift_measures.audit_outputs

        def counted(training):
            if training.number not in self.trained:
                self.trained.append(training.number)
            return train(training)

        def recorded(outputs, targets, pool, on_train, reference):
            self.references[self.trained[-1]] = reference
            return audit(outputs, targets, pool, on_train, reference)

        def follow(text, share):
            if until and f": {until}, " in text:
                raise Interrupted

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shift_training.PointTraining, "trained", counted)
            patch.setattr(shift.shift_measures, "audit_outputs", recorded)
            try:
                self.folder = runner.run(name, "smoke", changes=changes, root=root, on_study=follow)
            except Interrupted:
                (self.folder,) = (root / name).glob("smoke-*")

    @property
    def rows(self):
        return json.loads((self.folder / "report.json").read_text())["rows"]

    @property
    def kept(self):
        return sorted(file.name for file in self.folder.rglob("*row-*.json"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was not interrupted."""
    return Followed(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory):
    """The folder of runs of one that was interrupted in its fifth point."""
    root = tmp_path_factory.mktemp("broken")
    first = Followed(root, until="5 of 6")
    assert first.trained == [0, 1, 2, 3, 4]
    assert first.kept == [f".row-{number:03d}.json" for number in range(4)]
    return root


def edit(file):
    file.write_text(file.read_text().replace('"accuracy": 0.', '"accuracy": 0.9', 1))


def swap(file):
    other = file.with_name(".row-003.json")
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


FAULTS = {
    "none": (lambda unit: None, []),
    "outputs of a reference": (lambda unit: np.save(unit / "outputs-000.npy", np.zeros(3)), [0]),
    "deleted outputs": (lambda unit: (unit / "outputs-003.npy").unlink(), [3]),
    "an edited row": (lambda unit: edit(unit / ".row-002.json"), [2]),
    "swapped rows": (lambda unit: swap(unit / ".row-002.json"), [2, 3]),
}


@pytest.mark.slow(fast=["none", "outputs of a reference", "an edited row"])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_interrupted_unit_trains_no_whole_point_again(fault, broken_off, whole, tmp_path, caplog):
    shutil.copytree(broken_off, tmp_path / "runs")
    damaging, again = FAULTS[fault]
    ((unit,),) = [[path for path in folder.iterdir() if path.is_dir()] for folder in tmp_path.glob("runs/*/*/smoke-*")]
    damaging(unit)
    with caplog.at_level(logging.WARNING, "dissensus"):
        second = Followed(tmp_path / "runs")
    assert second.trained == [*again, 4, 5]
    assert caplog.text.count("The point is trained again.") == len(again)
    assert second.rows == whole.rows
    assert second.kept == []
    assert damage(second.folder) == ""
    assert all(row["hyperparameters"] for row in second.rows[2:]), "λ is chosen"
    assert whole.references[4] is not None
    for number, reference in second.references.items():
        expected = whole.references[number]
        assert reference is expected is None or torch.equal(reference, expected)


@pytest.mark.slow
def test_a_point_that_chose_no_interaction_is_a_reference_after_an_interruption(tmp_path):
    methods = {"chosen": {"choose": {"strength": [0.0]}}, "fixed": {"strength": 0.5}}
    changes = {**POINTS, "grid": {"method": list(methods), "seed": [0]}, "objective.options.methods": methods}
    Followed(tmp_path, until="2 of 2", changes=changes)
    second = Followed(tmp_path, changes=changes)
    assert second.trained == [1]
    assert second.rows[0]["hyperparameters"] == {"strength": 0.0}
    (outputs,) = second.folder.glob("*/outputs-000.npy")
    assert second.references[1] is not None
    assert torch.equal(second.references[1], torch.from_numpy(np.load(outputs)))


@pytest.mark.slow
def test_interrupted_heads_continue_with_the_backbone_that_they_began_with(tmp_path):
    changes = {"optimisation.examples": 128}
    study = {"name": "ldr/table-7", "changes": changes}
    expected = Followed(tmp_path / "whole", **study)
    Followed(tmp_path / "broken", until="3 of 4", **study)
    second = Followed(tmp_path / "broken", **study)
    assert second.trained == [2, 3]
    assert second.rows == expected.rows
    assert second.kept == []
