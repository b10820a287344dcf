"""Studies of members that share weights: costs against counts by hand, budgets, choices, tables, the figure."""

import copy

import pytest
import torch
from torch import nn

from dissensus import adapters, nets
from dissensus.pages.figures import MethodPoint, cost_plane
from dissensus.studies import datasets, library
from dissensus.studies import run as runner
from dissensus.studies.figures import figures
from dissensus.studies.procedures import sharing
from dissensus.studies.procedures.costs import Operations, common_operations, operations
from dissensus.studies.run_folders import read_report
from dissensus.studies.shifted_datasets import load_shifted
from dissensus.studies.summary import summarise

STUDY = "sharing/figure-1"
TINY = {"optimisation.examples": 60, "evaluation.examples": 40, "grid.seed": [0]}
METHODS = "objective.options.methods"
SHAPES = [(4, 6), (6, 5), (5, 3)]
"""Inputs and outputs of the layers of a perceptron."""


def perceptron():
    return nets.mlp(4, 3, (6, 5))


def macs(*layers):
    """Operations of layers on one example: a multiplication and an addition for every weight."""
    return 2.0 * sum(a * b for a, b in layers)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    methods = ["single", "deep-ensemble", "deep-ensemble-beta", "heads", "lora", "batch-ensemble", "mc-dropout-equal"]
    changes = {**TINY, "grid.method": methods, "optimisation.epochs": 3, f"{METHODS}.deep-ensemble.training_cost": 2.0}
    folder = runner.run(STUDY, "smoke", changes=changes, root=tmp_path_factory.mktemp("runs"))
    return read_report(folder)


def row(report, method):
    (found,) = (row for row in report.rows if row.value("method") == method)
    return found


def test_operations_of_training_and_inference_are_those_that_are_counted_by_hand():
    x = torch.randn(3, 4)
    forward = macs(*SHAPES)
    # every layer has a gradient of its weights, and all but the first one of their inputs
    assert operations(perceptron(), x) == Operations(3 * forward, 3 * (2 * forward + macs(*SHAPES[1:])))
    adapted = adapters.lora(perceptron(), 2, trained=["*4.*"])
    low_rank = macs((4, 2), (2, 6), (6, 2), (2, 5))
    counted = operations(adapted, x)
    assert counted.inference == 3 * (forward + low_rank)
    # frozen weights have no gradient; the first layer's inputs have none either
    backward = low_rank + macs((2, 6), (6, 2), (2, 5)) + macs((6, 5)) + 2 * macs((5, 3))
    assert counted.step == 3 * (forward + low_rank + backward)


def test_operations_leave_the_network_as_it_was():
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).eval()
    before = copy.deepcopy(network.state_dict())
    operations(network, torch.randn(5, 4))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not network.training
    assert all(p.grad is None for p in network.parameters())


@pytest.mark.parametrize("members", [1, 4])
def test_what_heads_have_in_common_is_counted_once(members):
    network = perceptron().requires_grad_(False)
    last = [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1].requires_grad_(True)
    x = torch.randn(2, 4)
    common = common_operations(network, x, [last])
    assert common == 2 * macs(*SHAPES[:-1])
    whole = operations(network, x).times(members, common)
    assert whole == Operations(common + members * 2 * macs(SHAPES[-1]), common + members * 4 * macs(SHAPES[-1]))


def test_numbers_that_are_stored_are_those_of_all_members_with_shared_ones_counted_once(report):
    channels, side, _ = datasets.images("made-images", "train")[0].shape[1:]
    network = nets.cnn(channels, 10, side, (4, 8), batch_norm=True)
    plain = sum(p.numel() for p in network.parameters())
    last = 10 * [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1].in_features + 10
    shared = sum(p.numel() for p in network.parameters() if p.ndim > 1)
    scales = sum(sum(p.shape[:2]) for p in network.parameters() if p.ndim > 1)
    expected = {
        "single": 1.0,
        "deep-ensemble": 4.0,
        "heads": 1 + 3 * last / plain,
        "batch-ensemble": (shared + 4 * (plain - shared + scales)) / plain,
        "mc-dropout-equal": 1.0,
    }
    for method, value in expected.items():
        assert row(report, method).measures["parameters"] == pytest.approx(value), method
    assert 1 < row(report, "lora").measures["parameters"] < 4


def test_costs_of_training_are_those_of_the_epochs_that_were_run(report):
    costs = {name: row(report, name).measures["training_cost"] for name in ("single", "deep-ensemble-beta")}
    assert costs == {"single": 1.0, "deep-ensemble-beta": 4.0}
    for start in ("heads", "lora"):
        assert row(report, start).measures["training_cost"] > 1, "the network that it starts from counts"
    assert row(report, "heads").measures["inference_cost"] < row(report, "deep-ensemble").measures["inference_cost"]
    assert row(report, "batch-ensemble").measures["inference_cost"] == 4


def test_a_budget_sets_the_number_of_epochs(report):
    short, long = row(report, "deep-ensemble"), row(report, "mc-dropout-equal")
    assert (short.epochs, long.epochs) == (2, 12)  # 2 networks' cost for four networks; 4 for one
    assert short.measures["training_cost"] == pytest.approx(4 * 2 / 3)
    assert long.measures["training_cost"] == pytest.approx(4)


def test_a_row_has_the_value_that_held_out_rows_choose_and_an_audit_of_all_members(report):
    beta = row(report, "deep-ensemble-beta")
    assert beta.hyperparameters["beta"] in (0.0, 0.5, 1.0)
    assert beta.objective == "augmented"
    for method in ("heads", "lora", "mc-dropout-equal"):
        audited = row(report, method)
        assert audited.members == 4
        verdicts = {name: value for name, value in audited.measures.items() if name.startswith("audit_")}
        assert verdicts == {name: float(name == f"audit_{audited.audit.verdict}") for name in verdicts}
        assert sum(verdicts.values()) == 1
    assert row(report, "single").audit is None


def test_adapters_and_heads_start_from_the_same_network_and_only_its_rest_is_trained(tmp_path, monkeypatch):
    ensembles, trained = {}, sharing.SharedTraining.trained

    def recording(training, number, point, first):
        result = trained(training, number, point, first)
        ensembles[point.get("method", "first")] = result[0].ensemble, first
        return result

    monkeypatch.setattr(sharing.SharedTraining, "trained", recording)
    changes = {**TINY, "grid.method": ["heads", "lora"]}
    runner.run(STUDY, "smoke", changes=changes, root=tmp_path)
    base = ensembles["first"][0].member(0).state_dict()
    heads, start = ensembles["heads"]
    assert start is ensembles["lora"][1]
    weights = [name for name in base if name.endswith("weight")]
    for i in range(4):
        member = heads.member(i).state_dict()
        assert [name for name in weights if not torch.equal(member[name], base[name])] == weights[-1:]
    adapted = ensembles["lora"][0].member(1).state_dict()
    frozen = [name for name in adapted if name.endswith("base.weight")]
    assert frozen
    assert all(torch.equal(adapted[name], base[name.replace(".base", "")]) for name in frozen)
    assert any(adapted[name].any() for name in adapted if name.endswith("up"))


def test_tables_are_trained_as_images_are(tmp_path):
    changes = {**TINY, "data": ["wine"], "grid.method": ["tabm", "batch-ensemble"]}
    rows = read_report(runner.run("sharing/table-1", "smoke", changes=changes, root=tmp_path)).rows
    assert [row.value("method") for row in rows] == ["tabm", "batch-ensemble"]
    inputs, width, classes = 13, 8, 3
    plain = (inputs + 1) * width + (width + 1) * width + (width + 1) * classes
    shared = (inputs + width) * width
    own = inputs + 4 * width + width + (width + 1) * classes  # scales and biases of two layers, and the last layer
    assert rows[0].measures["parameters"] == pytest.approx((shared + 3 * own) / plain)
    assert all(0 <= row.measures["accuracy"] <= 1 for row in rows)


def test_the_figure_shows_every_method_by_accuracy_diversity_and_cost(report):
    ((figure, title),) = figures(library.load(STUDY), summarise(report))
    assert title == "made-images"
    drawn = [marks for marks in figure.axes[0].collections if len(marks.get_offsets())]
    expected = sorted(
        (row.measures["accuracy"], row.measures["diversity"], row.measures["training_cost"]) for row in report.rows
    )
    found = sorted((*marks.get_offsets()[0].tolist(), float(marks.get_sizes()[0]) / 30) for marks in drawn)
    assert found == [pytest.approx(point, rel=1e-4, abs=1e-9) for point in expected]
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"LoRA", "BatchEnsemble", "β", "equal training cost", "costs one network"} <= set(words)


def test_one_method_is_a_figure_too():
    figure = cost_plane([MethodPoint("single", "", 0.9, 0.0, 0.2)], "accuracy", "diversity")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["single", "costs one network"]


def test_digits_are_split_by_the_seed_and_corrupted_after_it():
    spec = library.load("sharing/figure-1")
    first, again, other = (load_shifted("digits", spec, ["corrupted-5"], [], seed) for seed in (0, 0, 1))
    x, y = first.test
    shifted, labels = first.sets["corrupted-5"]
    assert (len(first.train[0]), len(x)) == (1438, 359)
    assert torch.equal(labels, y)
    assert shifted.shape == x.shape == (359, 1, 8, 8)
    assert (shifted != x).flatten(1).any(1).double().mean() > 0.9
    assert torch.equal(x, again.test[0])
    assert not torch.equal(y, other.test[1])


def test_a_study_that_was_broken_off_goes_on_with_its_trainings(tmp_path, monkeypatch):
    changes = {**TINY, "grid.method": ["deep-ensemble", "heads", "lora"], "optimisation.epochs": 2}

    class BrokenOff(Exception):
        pass

    def breaks_off(*_):
        raise BrokenOff

    with monkeypatch.context() as patch:
        patch.setattr(sharing, "write_targets", breaks_off)  # after the last training
        with pytest.raises(BrokenOff):
            runner.run(STUDY, "smoke", changes=changes, root=tmp_path, on_study=lambda text, share: None)
    trained = []
    monkeypatch.setattr(
        "dissensus.train.engine.Engine._train_epoch", lambda engine: trained.append(engine) or pytest.fail("again")
    )
    seen = []
    again = runner.run(STUDY, "smoke", changes=changes, root=tmp_path, on_study=lambda text, share: seen.append(text))
    assert len(read_report(again).rows) == 3
    assert not trained, "finished trainings come from their checkpoints"
