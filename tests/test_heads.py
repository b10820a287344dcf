"""Heads of studies: where they start, what makes them differ, and hyperparameters that held-out rows choose."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.randomness import Use, derived_seed
from dissensus.studies import backbones, library, spec
from dissensus.studies import run as runner
from dissensus.studies.backbones import Preparation, split_network
from dissensus.studies.procedures import choices, shift_training
from dissensus.studies.procedures.base import StudyContext
from dissensus.studies.procedures.shift_training import PointTraining, point_builder, point_settings
from dissensus.studies.registry import MethodError
from dissensus.studies.shifted_datasets import load_shifted

CPU = torch.device("cpu")
QUICK = {"optimisation.examples": 60, "evaluation.examples": 40, "optimisation.epochs": 1}


@pytest.fixture(autouse=True)
def short_pretraining(monkeypatch):
    monkeypatch.setattr(backbones, "BACKBONE", replace(backbones.BACKBONE, epochs=3))


@torch.no_grad()
def logits(network, x):
    return network(x)


def preparation(study, tmp_path, **changes):
    settings = spec.resolved(library.load(study), "smoke", {**QUICK, **changes}, "")
    return Preparation(load_shifted("made-images", settings, [], ["jigsaw"]), settings, CPU, tmp_path)


def training(prepare, method, *, seed=0, **settings):
    """The training of a method of the study that the data is prepared for, with other settings."""
    point = {"method": method, "seed": seed} if method else {"seed": seed}
    settings = {**point_settings(prepare.spec, point), **settings}
    data = prepare.of(settings["backbone"], settings["layers"], settings.get("initial", "pretrained"))
    context = StudyContext(prepare.spec, prepare.cache, prepare.cache, CPU)
    return PointTraining(context, settings, point, 0, data, lambda _: None)


class Block(nn.Module):
    """A block of a vision transformer, with the names of timm."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.Linear(width, width)
        self.ls2 = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attn(self.norm1(x)).mean(1, keepdim=True)  # tokens are mixed here alone
        return x + self.ls2(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    def __init__(self, width=6, classes=4):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        self.global_pool = "token"

    def forward(self, x):
        x = self.blocks(self.patch_embed(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x)[:, 0])


NETWORKS = {
    "cnn": partial(ds.nets.cnn, 3, 4, 16),
    "vanilla-cnn": partial(ds.nets.vanilla_cnn, 4, 3, 16),
    "mobilenet": partial(ds.nets.mobilenet_v2, 4),
    "transformer": Transformer,
}


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_trunk_and_head_are_the_network(name, layers):
    torch.manual_seed(1)
    network, x = NETWORKS[name](), torch.randn(5, 3, 16, 16)
    network(torch.randn(8, 3, 16, 16))  # statistics of norms leave their first values
    trunk, head = split_network(network, layers)
    network.eval()
    outputs, expected = head(trunk(x)), network(x)
    if name == "transformer":
        torch.testing.assert_close(outputs, expected)  # products of one token and of all tokens round differently
    else:
        assert torch.equal(outputs, expected)
    assert not trunk.training
    assert not head.training
    weights = [layer for layer in head.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    in_a_block = name == "transformer" and layers == 2  # two layers and their scale are one perceptron
    assert len(weights) == (4 if in_a_block else layers)
    assert {id(p) for p in head.parameters()}.isdisjoint({id(p) for p in network.parameters()})


def test_the_class_token_alone_goes_to_the_head():
    trunk, head = split_network(Transformer(), 2)
    assert trunk(torch.randn(5, 3, 16, 16)).shape == (5, 6)
    assert sum(isinstance(layer, nn.LayerNorm) for layer in head.modules()) == 2
    other = Transformer()
    other.global_pool = "avg"
    with pytest.raises(spec.SpecError, match="class token"):
        split_network(other, 2)


def test_a_split_through_a_residual_connection_is_refused():
    network = ds.nets.resnet20(4)
    assert len(list(split_network(network, 1).head.parameters())) == 2
    with pytest.raises(spec.SpecError, match=r"before its last 2 layers: it can be split before its last 1 or 3\."):
        split_network(network, 2)
    with pytest.raises(spec.SpecError, match="a linear classifier"):
        backbones._last_linear(nn.Conv2d(3, 4, 1))


@pytest.mark.parametrize(
    ("study", "method", "layers"), [("ldr/table-2", "ldr", 2), ("ldr/table-5", "deep-ensemble", 1)]
)
def test_members_start_as_the_pretrained_network(study, method, layers, tmp_path):
    prepare = preparation(study, tmp_path)
    point = training(prepare, method)
    assert point.settings["layers"] == layers
    pretrained = prepare._networks["cnn"]
    expected = logits(pretrained.network.eval(), pretrained.scaling(prepare.raw.test[0]))
    build = point_builder(prepare.spec, point.settings, point.prepared)
    members = ds.Ensemble(build, point.members, seed=3, backend="loop").predict(point.prepared.data.test[0])
    assert members.shape[0] == 3
    assert all(torch.equal(member, expected) for member in members)
    correct = (expected.argmax(-1) == prepare.raw.test[1]).float().mean()
    assert correct > 0.3, "the network is trained"


def test_fresh_heads_are_perceptrons_on_the_inputs_of_the_last_layer(tmp_path):
    point = training(preparation("ldr/table-3", tmp_path), "fresh-heads")
    assert point.prepared.head is None
    width = point.prepared.data.study_data().shape[0]
    members = ds.Ensemble(point_builder(point.context.spec, point.settings, point.prepared), 3, seed=5)
    expected = ds.Ensemble(partial(ds.nets.mlp, width, 10, (width,)), 3, seed=5)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(members.state_dict()[name], tensor)


def test_a_classifier_of_other_classes_is_replaced_by_a_fitted_one(tmp_path, monkeypatch):
    torch.manual_seed(0)
    network = ds.nets.cnn(3, 7, 16)
    monkeypatch.setattr(backbones, "timm_network", lambda name: network)
    monkeypatch.setattr(backbones, "SIDE", 16)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    prepare = preparation("ldr/table-2", tmp_path, **{"optimisation.examples": 200})
    first = prepare.of("timm:small", 2, "pretrained").head
    linear = backbones._last_linear(first)[1]
    assert linear.out_features == 10
    after = network.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if not name.startswith("7.")), "others stay"
    x, y = prepare.of("timm:small", 2, "pretrained").data.test
    accuracy = (logits(first, x).argmax(-1) == y).float().mean()
    assert accuracy > 0.5, "the classifier was fitted, on features of random convolutions"
    again = preparation("ldr/table-2", tmp_path, **{"optimisation.examples": 200, "grid.seed": [4]})
    network.load_state_dict({**after})
    network.set_submodule("7", nn.Linear(linear.in_features, 7))
    assert torch.equal(backbones._last_linear(again.of("timm:small", 2, "pretrained").head)[1].weight, linear.weight)


def test_members_without_interaction_are_trained_apart(tmp_path):
    prepare = preparation("ldr/table-5", tmp_path)
    point = training(prepare, "deep-ensemble", seed=2)
    ensemble = point.trained().ensemble
    outputs = ensemble.predict(prepare.of("cnn", 1, "pretrained").data.test[0])
    assert not torch.equal(outputs[0], outputs[1])
    alone = ds.Ensemble(partial(backbones.pretrained_head, point.prepared.head), 1, seed=0)
    seed = derived_seed(2, Use.MEMBER, 1)
    objective = partial(ds.objectives.independent, loss="cross_entropy")
    ds.fit(alone, point.prepared.split[0], objective, seed=seed, **point.arguments())
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(ensemble.state_dict()[name][1:2], tensor)


def test_a_strength_of_zero_is_no_interaction(tmp_path):
    prepare = preparation("ldr/table-5", tmp_path)
    alone = training(prepare, "deep-ensemble").trained().ensemble
    without = training(prepare, "ldr", choose={}, strength=0.0, sampled=3).trained().ensemble
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(without.state_dict()[name], tensor)


def test_noise_separates_members_that_would_stay_equal(tmp_path, monkeypatch):
    prepare = preparation("ldr/table-2", tmp_path)
    settings = {"objective": "a2d", "strength": 1.0, "unlabelled": "jigsaw", "choose": {}}

    def spread(method="a2d", **others):
        outputs = (
            training(prepare, method, **{**settings, **others})
            .trained()
            .ensemble.predict(prepare.of("cnn", 2, "pretrained").data.test[0])
        )
        return float((outputs - outputs[:1]).abs().max())

    assert spread() > 1e-2
    with monkeypatch.context() as patch:
        patch.setattr(shift_training, "NOISE", 0.0)
        assert spread() < 1e-5, "the same batches and a symmetric objective"
        pairs = {"objective": "ldr", "unlabelled": "", "sampled": 2}
        assert spread("ldr", **pairs) > 1e-2, "the draws make members differ"
    point = training(prepare, "a2d")
    start = ds.Ensemble(point_builder(prepare.spec, point.settings, point.prepared), 3)
    x, _ = point.prepared.data.test
    far = start.predict(x) - logits(point.prepared.head, x)
    assert 0 < float(far.abs().mean()) < 0.05 * float(logits(point.prepared.head, x).abs().mean())


def test_hyperparameters_drawn_for_members_are_used_in_trainings_apart(tmp_path):
    prepare = preparation("ldr/table-2", tmp_path)
    ranges = dict(shift_training.RANGES, lr=(1e-12, 1e-12))
    point = training(prepare, "deep-ensemble", diverse=["lr"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shift_training, "RANGES", ranges)
        still = point.trained().ensemble
    for name, weight in point.prepared.head.named_parameters():
        torch.testing.assert_close(still.member(1).get_parameter(name), weight, msg=f"{name} moved at a rate near zero")
    moved = training(prepare, "deep-ensemble", diverse=["lr"]).trained().ensemble.member(1)
    assert not torch.allclose(
        backbones._last_linear(moved)[1].weight, backbones._last_linear(still.member(1))[1].weight
    )
    with pytest.raises(MethodError, match="'initial_scale' is for members with random weights"):
        training(prepare, "deep-ensemble", diverse=["initial_scale"]).trained()


@pytest.mark.parametrize(
    ("ensemble", "members", "examples", "expected"),
    [
        ([0.1, 0.1, 0.1], [0.1, 0.1, 0.1], 100, 2),  # nothing is lost: the largest
        ([0.1, 0.12, 0.14], [0.1, 0.12, 0.14], 100, 1),  # a standard error is 0.03
        ([0.1, 0.12, 0.14], [0.1, 0.12, 0.14], 10_000, 0),  # here it is 0.003
        ([0.1, 0.1, 0.05], [0.1, 0.1, 0.9], 100, 0),  # the best ensemble, of members that are wrong
        ([0.2, 0.1, 0.1], [0.1, 0.2, 0.2], 100, 0),  # no value meets both: the best members
        ([0.1, 0.1, float("nan")], [0.1, 0.1, 0.0], 100, 1),  # the last one has failed
        ([float("nan")] * 3, [float("nan")] * 3, 100, 0),
        ([0.0, 0.0, 0.01], [0.0, 0.0, 0.0], 100, 1),  # no error, no standard error
    ],
)
def test_the_largest_value_without_loss_is_chosen(ensemble, members, examples, expected):
    assert choices.largest_without_loss([0.0, 1.0, 2.0], ensemble, members, examples) == expected
    order = [2, 0, 1]
    shuffled = choices.largest_without_loss(
        [[0.0, 1.0, 2.0][i] for i in order], [ensemble[i] for i in order], [members[i] for i in order], examples
    )
    assert order[shuffled] == expected or all(e != e for e in ensemble), "the order of values does not matter"


@pytest.mark.parametrize("pool", ["probability", "score"])
def test_a_candidate_whose_outputs_are_not_numbers_has_no_error(pool):
    outputs = torch.zeros(2, 3, 4)
    outputs[..., 0] = 1.0
    assert choices.errors(outputs, torch.tensor([0, 0, 1]), pool) == pytest.approx((1 / 3, 1 / 3))
    outputs[1, 2, 3] = math.nan
    assert all(map(math.isnan, choices.errors(outputs, torch.tensor([0, 0, 1]), pool)))


def rows_of(folder):
    return json.loads((folder / "report.json").read_text())["rows"]


def test_a_study_reports_the_strength_that_held_out_rows_choose(tmp_path):
    measures = ["accuracy", "member_accuracy", "auroc_predictive_diversity_corrupted-5"]
    changes = {
        "grid.method": ["ldr"],
        "grid.seed": [0, 1],
        "evaluation.measures": measures,
        "optimisation.epochs": 3,
        "objective.options.methods.ldr.choose.strength": [1e-9, 1e5],
    }
    rows = rows_of(runner.run("ldr/table-2", "smoke", changes=changes, root=tmp_path / "chosen"))
    assert [row["hyperparameters"] for row in rows] == [{"strength": 1e-9}] * 2, "1e5 ruins every member"
    harmless = {**changes, "objective.options.methods.ldr.choose.strength": [1e-9, 1e-8]}
    rows_of_larger = rows_of(runner.run("ldr/table-2", "smoke", changes=harmless, root=tmp_path / "larger"))
    assert [row["hyperparameters"] for row in rows_of_larger] == [{"strength": 1e-8}] * 2
    fixed = {**changes, "objective.options.methods.ldr.strength": 1e-9}
    fixed["objective.options.methods.ldr.choose"] = {}
    del fixed["objective.options.methods.ldr.choose.strength"]
    expected = rows_of(runner.run("ldr/table-2", "smoke", changes=fixed, root=tmp_path / "fixed"))
    for row, alone in zip(rows, expected, strict=True):
        assert "hyperparameters" not in alone
        for name in measures:
            assert row["measures"][name] == pytest.approx(alone["measures"][name], abs=0.02)


def test_held_out_rows_train_nothing(tmp_path, monkeypatch):
    trained, held_out = [], []

    def recorded(original, place):
        def recording(first, data, objective, **arguments):
            trained.append((place, data[0]))
            if arguments.get("validation") is not None:
                held_out.append(arguments["validation"][0])
            return original(first, data, objective, **arguments)

        return recording

    monkeypatch.setattr(backbones, "fit", recorded(backbones.fit, "backbone"))
    for name in ("fit", "sweep"):
        monkeypatch.setattr(shift_training, name, recorded(getattr(shift_training, name), "method"))
    prepare = preparation("ldr/table-2", tmp_path)
    for method in ("ldr", "deep-ensemble", "single"):
        training(prepare, method).trained()
    assert [place for place, _ in trained] == ["backbone", "method", "method", "method"]
    assert [len(x) for _, x in trained] == [54] * 4, "a tenth of sixty rows is held out"
    assert all(torch.equal(x, held_out[0]) for x in held_out)
    x, _ = prepare.of("cnn", 2, "pretrained").split[0]
    assert all(torch.equal(inputs, x) for place, inputs in trained if place == "method")
    rows, left = backbones.held_out_rows(torch.zeros(60), 0.1)
    standardised = prepare._networks["cnn"].scaling(prepare.raw.train[0])
    assert torch.equal(trained[0][1], standardised[rows])
    assert sorted([*rows.tolist(), *left.tolist()]) == list(range(60))


def test_two_stages_ask_the_pretrained_network(tmp_path, monkeypatch):
    monkeypatch.setattr(shift_training, "fit", None)
    point = training(preparation("ldr/table-7", tmp_path), "two-stage", unlabelled="least-confident-0.2")
    (x, y), hard = point._split_by_labels()
    assert (len(x), len(y), len(hard)) == (43, 43, 11)
    confidence = [logits(point.prepared.head, part).softmax(-1).amax(-1) for part in (hard, x)]
    assert float(confidence[0].max()) <= float(confidence[1].min())
    bound = round(float(torch.cat(confidence).median()), 3)
    below = replace(point, settings={**point.settings, "unlabelled": f"confidence-below-{bound}"})
    (x, _), hard = below._split_by_labels()
    assert float(logits(point.prepared.head, hard).softmax(-1).amax(-1).max()) < bound
    assert float(logits(point.prepared.head, x).softmax(-1).amax(-1).min()) >= bound
    none = replace(point, settings={**point.settings, "unlabelled": "least-confident-0.001"})
    with pytest.raises(MethodError, match="'least-confident-0.001' holds for 0 of 54 training examples"):
        none._split_by_labels()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimisation.validation": 0.0}, "choose' needs held-out rows; set 'optimisation.validation'"),
        ({"objective.options.methods.ldr.choose": {"alpha": [1.0]}}, "choose' is 'alpha'"),
        ({"objective.options.methods.divdis.choose.balance": [1.0]}, "must name one hyperparameter"),
        ({"objective.options.methods.ldr.choose.strength": []}, "strength' must be a list of values"),
        ({"objective.options.methods.ldr.choose.strength": [-1.0]}, "must be at least 0"),
        ({"objective.options.methods.ldr.sequential": True}, "cannot be combined with 'sequential'"),
        ({"members.options.initial": "old"}, "must be one of 'pretrained', 'fresh'"),
    ],
)
def test_choices_that_cannot_be_made_are_refused(changes, message, tmp_path):
    with pytest.raises(spec.SpecError, match=message):
        runner.run("ldr/table-2", "smoke", changes=changes, root=tmp_path)


def test_an_epoch_is_timed_without_the_other_values_of_a_choice(tmp_path, monkeypatch):
    histories = []
    monkeypatch.setattr(
        shift_training, "fit", lambda *a, fit=ds.fit, **o: histories.append(fit(*a, **o)) or histories[0]
    )
    prepare = preparation("ldr/table-10", tmp_path)
    run = training(prepare, "2-of-5", choose={"strength": [0.4, 0.5]}).trained()
    assert run.history is histories[0], "a sweep's seconds are those of all its runs"
    assert run.hyperparameters in ({"strength": 0.4}, {"strength": 0.5})
    training(preparation("ldr/table-4", tmp_path), None).trained()
    assert len(histories) == 1, "no second training where nothing is timed"


def test_soups_of_pretrained_layers_are_as_good_as_members(tmp_path, monkeypatch):
    monkeypatch.setattr(backbones, "BACKBONE", replace(backbones.BACKBONE, epochs=10))
    changes = {
        "grid.method": ["deep-ensemble", "ldr", "fresh-heads"],
        "grid.seed": [0],
        "members.count": 5,
        "evaluation.measures": ["soup_accuracy", "member_accuracy"],
        "optimisation.epochs": 4,
    }
    rows = rows_of(runner.run("ldr/table-3", "smoke", changes=changes, root=tmp_path))
    values = {row["method"]: row["measures"] for row in rows}
    for method in ("deep-ensemble", "ldr"):
        assert values[method]["soup_accuracy"] > values[method]["member_accuracy"] - 0.02
        assert values[method]["member_accuracy"] > 0.9
    fresh = values["fresh-heads"]
    assert fresh["soup_accuracy"] < fresh["member_accuracy"] - 0.05, "weights that started at random do not average"
