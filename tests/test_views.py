"""Trunks of ensembles: the part that members compute alike, found by tracing, and heads that are the members' own."""

import copy
import functools
import logging
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dissensus as ds
from dissensus import SharedTrunk, adapters

M = 3
independent = functools.partial(ds.objectives.independent, loss="cross_entropy")
augmented = functools.partial(ds.objectives.augmented, loss="cross_entropy", pool="probability", beta=0.5)


def base(rate=0.0):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(rate), nn.Linear(8, 6), nn.Tanh()]
    network = nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(6, 3)).double()
    network(data()[0])  # statistics of batch norm
    return network


def data(n=24):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 4, generator=generator, dtype=torch.float64), torch.arange(n) % 3


def with_head():
    network = copy.deepcopy(BASE).requires_grad_(False)
    network[7] = nn.Linear(6, 3).double()
    return network


def with_lora():
    return adapters.lora(BASE, 2, targets=["4"], trained=["7.*"])


class Masked(nn.Module):
    """Hidden states and a mask, both common, pass to a member's own layers; sizes and shared weights do too."""

    def __init__(self):
        super().__init__()
        self.words, self.mix = nn.Embedding(10, 6), nn.Linear(6, 6)
        self.register_buffer("positions", torch.linspace(0, 1, 7), persistent=False)
        self.requires_grad_(False)
        self.own = nn.Linear(6, 6)
        self.double()

    def forward(self, tokens, mask=None):
        batch, length = tokens.shape
        h = torch.tanh(self.mix(self.words(tokens))) + self.positions[:length].unsqueeze(-1)
        h = self.own(h).reshape(batch * length, -1).view(batch, length, -1)
        pooled = (h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return {"logits": F.linear(pooled, self.words.weight), "states": h}


def tokens(n=24):
    generator = torch.Generator().manual_seed(2)
    mask = torch.arange(5) < torch.randint(1, 6, (n, 1), generator=generator)
    return {"tokens": torch.randint(10, (n, 5), generator=generator), "mask": mask}


class Functional(nn.Module):
    """Dropout as a function in the common part, with rate 0 or more, and residual connections around own layers."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.first = nn.Linear(4, 6).requires_grad_(False)
        self.own, self.norm, self.rate = nn.Linear(6, 6), nn.LayerNorm(6).requires_grad_(False), rate
        self.drop = nn.Dropout(0.2)
        self.double()

    def forward(self, x):
        h = self.first(x)
        h = F.dropout(h, self.rate, self.training) if self.rate else h
        return self.norm(h + self.drop(self.own(h)))[:, :3] + x.sum(1, keepdim=True)


BASE = base()
CASES = {
    "heads": (with_head, {}, data()[0]),
    "lora": (with_lora, {}, data()[0]),
    "mask": (Masked, {"output": "logits"}, tokens()),
    "residual": (Functional, {}, data()[0]),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def made(case, **options):
    build, others, x = case
    ens = ds.Ensemble(build, M, shared="frozen", **others, **options)
    return ens, x, SharedTrunk.of(ens, ds.calls.as_given(ds.calls.rows(ds.calls.network_inputs(x), slice(8))))


def features_of(trunk, x):
    return trunk.features(**x) if isinstance(x, dict) else trunk.features(x)


@every_case
@pytest.mark.parametrize("backend", ["loop", "vmap", "batched", "streams", "auto"])
def test_heads_on_features_train_the_ensemble(case, backend):
    ens, x, trunk = made(case, backend=backend)
    whole = copy.deepcopy(ens)
    options = {"epochs": 7, "batch_size": 8, "lr": 0.02}
    y = data()[1]
    before = ens.predict(x)
    ds.fit(trunk.heads, (features_of(trunk, x), y), augmented, **options)
    ds.fit(whole, (x, y), augmented, **options)
    torch.testing.assert_close(ens.predict(x), whole.predict(x), rtol=1e-9, atol=1e-10)
    assert not torch.allclose(ens.predict(x), before)
    assert trunk.ensemble() is ens
    for mine, other in zip(ens, whole, strict=True):
        assert type(mine) is type(other)
        torch.testing.assert_close(mine.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-10)


def test_features_are_computed_without_members():
    """What passes: the values before dropout; hidden states and a mask; a projection's input and its common result."""
    shapes = {}
    for name, case in CASES.items():
        _, x, trunk = made(case)
        features = features_of(trunk, x)
        shapes[name] = [tuple(t.shape[1:]) for t in (features if isinstance(features, tuple) else (features,))]
        own = {id(p) for p in trunk.heads.parameters() if p.requires_grad}
        assert own
        assert own.isdisjoint(map(id, trunk.backbone.parameters()))
    assert shapes == {
        "heads": [(6,)],
        "lora": [(8,), (6,)],
        "mask": [(5,), (5, 6), (5, 1), (1,)],
        "residual": [(6,), (1,)],
    }


@every_case
def test_modes_copies_and_files(case, tmp_path):
    ens, x, trunk = made(case)
    for mode in (True, False):
        trunk.train(mode)
        assert not trunk.backbone.training
        assert trunk.heads.training is mode
    torch.testing.assert_close(trunk(**x) if isinstance(x, dict) else trunk(x), ens.predict(x))
    for copied in (copy.deepcopy(trunk), pickle.loads(pickle.dumps(trunk))):
        again = copied.ensemble()
        assert again is not ens
        ds.fit(copied.heads, (features_of(copied, x), data()[1]), independent, epochs=1, batch_size=8, lr=0.1)
        assert not torch.allclose(again.predict(x), ens.predict(x))
    ens = copied.ensemble()
    ens.save(tmp_path / "whole")
    options = {key: value for key, value in case[1].items() if key != "output"}
    torch.testing.assert_close(ds.Ensemble.load(tmp_path / "whole", case[0], **options).predict(x), ens.predict(x))
    copied.heads.save(tmp_path / "heads")
    trunk.heads = ds.Ensemble.load(tmp_path / "heads", lambda: trunk.heads.member(0))
    torch.testing.assert_close(trunk.ensemble().predict(x), ens.predict(x))
    trunk.heads = trunk.heads.subset([2, 0])
    torch.testing.assert_close(trunk.ensemble().predict(x), ens.predict(x)[[2, 0]])
    assert trunk.ensemble().shared == ens.shared


def test_a_sweep_on_features_equals_that_of_whole_members():
    ens, x, trunk = made(CASES["heads"])
    y = data()[1]
    options = {"grid": {"lr": [0.01, 0.05], "seed": [0, 1]}, "members": M, "epochs": 3, "batch_size": 8}
    swept = ds.sweep(lambda: trunk.head(with_head()), (trunk.features(x), y), independent, **options)
    whole = ds.sweep(with_head, (x, y), independent, shared="frozen", **options)
    for run in range(4):
        trunk.heads = swept.run(run)
        outputs = trunk.ensemble().predict(x)
        torch.testing.assert_close(outputs, whole.run(run).predict(x), rtol=1e-9, atol=1e-10)
        assert not torch.allclose(outputs, ens.predict(x))
    with pytest.raises(ValueError, match="be that of an ensemble"):
        SharedTrunk(nn.Linear(4, 2), ds.Ensemble(lambda: nn.Linear(2, 2), 2)).head(nn.Linear(4, 2))


def test_features_on_disk_are_those_of_the_ensemble(tmp_path):
    ens, x, trunk = made(CASES["heads"])
    y = data()[1]
    cache = ds.data.features.cached_features(trunk.features, (x, y), tmp_path / "features", dtype=torch.float32)
    torch.testing.assert_close(cache.tensors()[0], trunk.features(x).float())
    ds.fit(trunk.heads, (cache.tensors()[0].double(), y), independent, epochs=1, batch_size=8, lr=0.1)
    ds.data.features.cached_features(
        trunk.features, (x, y), tmp_path / "features", dtype=torch.float32
    )  # trained heads
    with torch.no_grad():
        next(ens.body.network[0].parameters()).add_(1.0)
    with pytest.raises(ds.storage.StorageError, match="'features' differ"):
        ds.data.features.cached_features(trunk.features, (x, y), tmp_path / "features", dtype=torch.float32)


def test_the_ensemble_is_told_of_a_training_of_its_heads():
    ens, x, trunk = made(CASES["heads"])
    y = data()[1]
    ds.fit(ens, (x, y), augmented, epochs=1, lr=0.01, batch_size=8, twin=True)
    assert ens.training_rows.complete
    assert ens.twin is not None
    ds.fit(trunk.heads, (trunk.features(x), y), independent, epochs=1, batch_size=8, bootstrap=True)
    assert not ens.training_rows.complete
    assert ens.twin is None
    assert torch.equal(ens.in_bag, trunk.heads.in_bag)
    assert not ens.in_bag.all()
    copied, alone = copy.deepcopy(trunk), copy.deepcopy(trunk.heads)
    ds.fit(alone, (trunk.features(x), y), independent, epochs=1, batch_size=8)
    assert not isinstance(trunk.ensemble().in_bag, str), "a copy of heads has other weights than the ensemble"
    ds.fit(copied.heads, (trunk.features(x), y), independent, epochs=1, batch_size=8)
    assert copied.ensemble().in_bag == "all"
    assert len(pickle.dumps(trunk.heads)) < len(pickle.dumps(ens)), "heads go without the trunk"


@pytest.mark.parametrize("cut", ["4", 2])
def test_the_trunk_of_a_split_network_is_found_again(cut):
    """`last_layers` gives members, and these a trunk, whose features are further on where no own layer lies between."""
    x, y = data()
    split = ds.trunk.last_layers(BASE, cut, members=M, start="fresh")
    trunk = SharedTrunk.of(split.ensemble(), x)
    torch.testing.assert_close(trunk(x), split(x))
    options = {"epochs": 5, "batch_size": 8, "lr": 0.02}
    ds.fit(split.heads, (split.features(x), y), independent, **options)
    ds.fit(trunk.heads, (trunk.features(x), y), independent, **options)
    torch.testing.assert_close(trunk.ensemble().predict(x), split.eval()(x).detach(), rtol=1e-9, atol=1e-10)


def test_gradients_of_inputs_pass_through_both_parts():
    ens, x, trunk = made(CASES["residual"])
    x = x.clone().requires_grad_()
    expected, grad = (torch.autograd.grad(model.eval()(x).square().sum(), x)[0] for model in (ens, trunk))
    torch.testing.assert_close(grad, expected)


@every_case
def test_a_trunk_is_exported(case):
    pytest.importorskip("onnx")
    _, x, trunk = made(case)
    program = ds.export.program(trunk.eval(), x)
    outputs = program.module()(**x) if isinstance(x, dict) else program.module()(x)
    assert outputs["probs"].shape[0] == 24


class Writes(nn.Module):
    """A member writes into what all of them read later."""

    def __init__(self):
        super().__init__()
        self.common, self.own = nn.Linear(4, 4).requires_grad_(False), nn.Parameter(torch.randn(4))

    def forward(self, x):
        h = self.common(x)
        h.mul_(self.own)
        return h + self.common(x)


class Centred(nn.Module):
    """What members have in common depends on the other examples of a batch, so it cannot be computed once."""

    def __init__(self):
        super().__init__()
        self.common, self.own = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3)

    def forward(self, x):
        return self.own(self.common(x - x.mean(0)))


def with_dropout():
    network = base(rate=0.4)
    network[:6].requires_grad_(False)
    return network


def test_dropout_ends_the_common_part(caplog, unchecked):
    ens = ds.Ensemble(with_dropout, M, shared="frozen")
    x = data()[0]
    with caplog.at_level(logging.WARNING, "dissensus"):
        trunk = SharedTrunk.of(ens, x)
    assert "what lies before 3, which drops units" in caplog.text
    assert trunk.features(x).shape == (24, 8)
    caplog.clear()
    made(CASES["heads"])
    assert not caplog.text, "dropout of heads alone leaves nothing out"


def frozen_nothing():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3).requires_grad_(False)).double()


def first_dropped():
    network = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    network[1].requires_grad_(False)
    return network


@pytest.mark.parametrize(
    ("build", "shared", "match"),
    [
        (frozen_nothing, None, r"`ensemble` must share weights; got members that share none. Ensemble\(.*shared="),
        (frozen_nothing, "frozen", "part that members compute alike; got members share nothing before it. Or write"),
        (first_dropped, "frozen", "got 0 drops units of each member. Set the rate to 0 in `build`"),
        (lambda: adapters.batch_ensemble(BASE), adapters.SHARED, "part that members compute alike"),
        (lambda: Functional(0.3), "frozen", "F.dropout is not"),
        (
            lambda: Writes().double(),
            "frozen",
            "give equal outputs when it is split; got other outputs. Do members write",
        ),
        (lambda: Centred().double(), "frozen", "part that members compute alike; got members share nothing"),
    ],
)
def test_ensembles_without_a_common_part_are_refused(build, shared, match, unchecked):
    ens = ds.Ensemble(build, M, shared=shared)
    before = [layer.training for layer in ens.modules()]
    with pytest.raises(ValueError, match=match):
        SharedTrunk.of(ens, data()[0])
    assert [layer.training for layer in ens.modules()] == before


def test_other_wrong_arguments_are_refused(unchecked):
    ens, x, trunk = made(CASES["heads"])
    with pytest.raises(TypeError, match="`ensemble` must be an Ensemble; got Linear"):
        SharedTrunk.of(nn.Linear(4, 2), x)
    with pytest.raises(ValueError, match="`example` must hold two examples or more; got one"):
        SharedTrunk.of(ens, x[:1])
    trunk.heads = ds.Ensemble(lambda: nn.Linear(6, 3).double(), 2)
    with pytest.raises(ValueError, match="`heads` must have the tensors of the trunk's heads"):
        trunk.ensemble()


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_pretrained_transformer_is_a_trunk(rate, unchecked):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    rates = {"hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate, "classifier_dropout": 0.2}
    torch.manual_seed(0)
    bert = transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=50, num_labels=3, **sizes, **rates)
    ).double()

    def build():
        network = copy.deepcopy(bert).requires_grad_(False)
        network.classifier = nn.Linear(16, 3).double()
        return network

    x = {"input_ids": torch.randint(50, (24, 5)), "attention_mask": torch.ones(24, 5, dtype=torch.long)}
    ens = ds.Ensemble(build, M, shared="frozen", output="logits")
    if rate:
        with pytest.raises(ValueError, match="bert.*dropout drops units of each member with rate 0.1. Set the rate"):
            SharedTrunk.of(ens, x)
        return
    whole, trunk = copy.deepcopy(ens), SharedTrunk.of(ens, x)
    options = {"epochs": 4, "batch_size": 8, "lr": 0.05}
    ds.fit(trunk.heads, (trunk.features(**x), data()[1]), independent, **options)
    ds.fit(whole, (x, data()[1]), independent, **options)
    torch.testing.assert_close(ens.predict(x), whole.predict(x), rtol=1e-9, atol=1e-10)
