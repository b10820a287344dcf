"""Members that start from equal weights are told of, once per fit, unless something sets them apart."""

import copy
import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dissensus as ds
from dissensus.train.equal_start import starts_equal

M = 3
independent = partial(ds.objectives.independent, loss="cross_entropy")
PRETRAINED = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def pretrained():
    return copy.deepcopy(PRETRAINED)


def with_fresh_head():
    network = pretrained()
    network[2] = nn.Linear(5, 2)
    return network


def with_dropout(p=0.3):
    return nn.Sequential(pretrained(), nn.Dropout(p))


class WithFunction(nn.Module):
    """Drops units by a function, at a rate in its code or in an attribute."""

    def __init__(self, rate=None):
        super().__init__()
        self.network = pretrained()
        if rate is not None:
            self.dropout = rate

    def forward(self, x):
        return self.network(F.dropout(x, getattr(self, "dropout", 0.3), self.training))


class WithAttention(nn.Module):
    def __init__(self, rate=0.0):
        super().__init__()
        self.network, self.attention = pretrained(), nn.MultiheadAttention(1, 1, dropout=rate, batch_first=True)
        with torch.no_grad():
            for parameter in self.attention.parameters():
                parameter.fill_(0.1)

    def forward(self, x):
        x = x.unsqueeze(2)
        return self.network(self.attention(x, x, x)[0].squeeze(2))


def told(caplog, build, level=logging.WARNING, **settings):
    ens = build if isinstance(build, ds.Ensemble) else ds.Ensemble(build, M)
    data = torch.randn(12, 4), torch.randint(0, 2, (12,))
    with caplog.at_level(level, "dissensus"):
        ds.fit(ens, data, independent, **{"epochs": 2, "batch_size": 4, **settings})
    return ens, [r.getMessage() for r in caplog.records if "start from equal weights" in r.getMessage()]


def test_members_of_one_checkpoint_are_told_of_once_with_the_ways_out(caplog):
    ens, messages = told(caplog, pretrained)
    (message,) = messages
    for way in ("fresh head", "bagging, bootstrap=True", "augment=["):
        assert way in message
    first, *others = ens.predict(torch.randn(5, 4))
    assert all(torch.allclose(first, other, atol=1e-5) for other in others), "they stay equal, as the message says"


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (with_fresh_head, {}),
        (partial(ds.nets.mlp, 4, 2, (5,)), {}),
        (pretrained, {"lr": [1e-3, 1e-2, 1e-1]}),
        (pretrained, {"augment": [lambda x, generator, s=s: s * x for s in (0.5, 1.0, 2.0)]}),
        (pretrained, {"active_members": 2}),
        (pretrained, {"bootstrap": True}),
        (pretrained, {"frozen": [0]}),
        (pretrained, {"sequential": True}),
        (with_dropout, {}),
        (WithFunction, {}),
        (partial(WithFunction, 0.2), {}),
        (partial(WithAttention, 0.2), {}),
    ],
)
def test_members_that_differ_or_are_trained_differently_are_not(build, settings, caplog):
    assert not told(caplog, build, **settings)[1]


@pytest.mark.parametrize("shared", ["0.*", "2.*"])
def test_members_that_share_trained_weights_and_are_equal_in_the_others_are_told_of(shared, caplog):
    ens, messages = told(caplog, ds.Ensemble(pretrained, M, shared=shared))
    assert len(messages) == 1
    first, *others = ens.predict(torch.randn(5, 4))
    assert all(torch.allclose(first, other, atol=1e-5) for other in others)


def test_dropout_that_sets_members_apart_is_mentioned_in_the_log(caplog):
    for build in (with_dropout, WithFunction):
        (message,) = told(caplog, build, logging.INFO)[1]
        assert "only dropout sets them apart" in message
        caplog.clear()


@pytest.mark.parametrize("build", [partial(with_dropout, 0.0), partial(WithFunction, 0.0), WithAttention])
def test_dropout_with_a_rate_of_zero_sets_nobody_apart(build, caplog):
    (message,) = told(caplog, build)[1]
    assert "stay equal" in message


def test_one_member_different_architectures_and_frozen_members_do_not_start_equal():
    assert starts_equal(ds.Ensemble(pretrained, M).body)
    assert not starts_equal(ds.Ensemble(pretrained, 1).body)
    assert not starts_equal(ds.Ensemble.from_modules([pretrained(), nn.Sequential(pretrained(), nn.ReLU())]).body)
    assert not starts_equal(ds.Ensemble(lambda: pretrained().requires_grad_(False), M).body)
    assert not starts_equal(ds.Ensemble(with_fresh_head, M).body)


def test_only_what_is_trained_counts():
    def build():
        network = with_fresh_head()
        network[2].requires_grad_(False)  # the random head stays as it is; what is trained is equal
        return network

    assert starts_equal(ds.Ensemble(build, M).body)
