"""Seeded draws: dropout layers, stochastic depth and functions that drop units, of torch and of known libraries."""

import copy
import logging
import re
from functools import partial

import pytest
import torch
from test_members import trained_alone, trained_stacked
from torch import nn
from torch.nn import functional as F

import dissensus as ds
from dissensus.dropout import KeyedDropPath, keyed
from dissensus.execution.functional_dropout import KeyedFunctions

M, B = 3, 5
BACKENDS = ("loop", "streams", "vmap", "auto")
mse = partial(ds.objectives.independent, loss="mse")
no_noise = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:enable_nested_tensor")


class DropPath(nn.Module):
    """As timm has it (timm.layers.drop)."""

    def __init__(self, drop_prob=0.0, scale_by_keep=True):
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, scale_by_keep

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        random_tensor = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep_prob)
        if keep_prob > 0.0 and self.scale_by_keep:
            random_tensor.div_(keep_prob)
        return x * random_tensor


class SwinDropPath(nn.Module):
    """As transformers has it, of one of its models; without a rate it drops nothing."""

    def __init__(self, drop_prob=None):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, hidden_states):
        if self.drop_prob is None or not self.training:
            return hidden_states
        keep_prob = 1 - self.drop_prob
        shape = (hidden_states.shape[0],) + (1,) * (hidden_states.ndim - 1)
        random_tensor = keep_prob + torch.rand(shape, dtype=hidden_states.dtype, device=hidden_states.device)
        return hidden_states.div(keep_prob) * random_tensor.floor_()


class StochasticDepth(nn.Module):
    """As torchvision has it (torchvision.ops)."""

    def __init__(self, p, mode):
        super().__init__()
        self.p, self.mode = p, mode

    def forward(self, input):
        if not self.training or self.p == 0.0:
            return input
        size = [input.shape[0]] + [1] * (input.ndim - 1) if self.mode == "row" else [1] * input.ndim
        noise = torch.empty(size, dtype=input.dtype, device=input.device).bernoulli_(1.0 - self.p)
        return input * (noise.div_(1.0 - self.p) if self.p < 1 else noise)


PATHS = {
    "timm": lambda: DropPath(0.4),
    "unscaled": lambda: DropPath(0.4, scale_by_keep=False),
    "transformers": lambda: SwinDropPath(0.4),
    "row": lambda: StochasticDepth(0.4, "row"),
    "batch": lambda: StochasticDepth(0.4, "batch"),
}


class Residual(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.first, self.branch, self.drop, self.head = nn.Linear(6, 4), nn.Linear(4, 4), drop, nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(x)
        return self.head(x + self.drop(torch.tanh(self.branch(x))))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", PATHS)
def test_stochastic_depth_has_the_same_draws_in_every_backend(kind, backend, caplog):
    ensemble = ds.Ensemble(lambda: Residual(PATHS[kind]()), M, seed=3, backend=backend).double()
    modules = [ensemble.member(i) for i in range(M)]
    assert all(isinstance(module.drop, KeyedDropPath) for module in modules)
    x, y = torch.randn(20, B, 6).double(), torch.randn(20, B, 3).double()
    state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, "dissensus"):
        trained_stacked(ensemble, x, y, per_member=False)
    trained_alone(modules, x, y, per_member=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert not caplog.records
    for i, module in enumerate(modules):
        for actual, expected in zip(ensemble.member(i).parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", PATHS)
def test_keyed_stochastic_depth_drops_what_the_library_drops(kind):
    """In distribution: the same share of examples, scaled in the same way, and nothing in evaluation mode."""
    original = PATHS[kind]()
    layer = keyed(nn.Sequential(PATHS[kind](), nn.Linear(1, 1)))[0]
    x = torch.ones(20_000 if kind != "batch" else 1, 2, 3)
    passes = 1 if kind != "batch" else 2_000
    outputs = [torch.cat([drop(x)[:, 0, 0] for _ in range(passes)]) for drop in (layer, original)]
    (values, counts), (expected, expected_counts) = (output.unique(return_counts=True) for output in outputs)
    torch.testing.assert_close(values, expected)
    assert abs(counts[0].item() - expected_counts[0].item()) < 0.05 * len(outputs[0])
    assert torch.equal(layer.eval()(x), x)


def test_a_layer_that_is_only_named_drop_path_stays():
    class DropPath(nn.Module):
        drop_prob = 0.4

        def forward(self, x):
            return F.dropout(x, self.drop_prob, self.training)  # units, not examples

    assert isinstance(keyed(Residual(DropPath())).drop, DropPath)
    assert isinstance(keyed(Residual(SwinDropPath())).drop, KeyedDropPath)  # without a rate it drops nothing


class Foreign(nn.Module):
    """Drops units by a function."""

    def __init__(self, function=F.dropout):
        super().__init__()
        self.first, self.second, self.function = nn.Linear(6, 8), nn.Linear(8, 3), function

    def forward(self, x):
        hidden = torch.relu(self.function(self.first(x), 0.4, self.training))
        return self.second(F.dropout(hidden, p=0.2, training=self.training))


CHANNELS = {
    "1d": (nn.Dropout1d, F.dropout1d, (7, 6, 5)),
    "1d of one example": (nn.Dropout1d, F.dropout1d, (6, 5)),
    "2d": (nn.Dropout2d, F.dropout2d, (7, 6, 5, 4)),
    "2d of sequences": (nn.Dropout2d, F.dropout2d, (7, 6, 5)),
    "2d of vectors": (nn.Dropout2d, F.dropout2d, (7, 6)),
    "2d of volumes": (nn.Dropout2d, F.dropout2d, (7, 6, 5, 4, 3)),
    "3d": (nn.Dropout3d, F.dropout3d, (7, 6, 5, 4, 3)),
    "3d of one example": (nn.Dropout3d, F.dropout3d, (6, 5, 4, 3)),
    "3d of sequences": (nn.Dropout3d, F.dropout3d, (7, 6, 5)),
}


@pytest.mark.filterwarnings("ignore:dropout[23]d. Received")  # torch's own advice
@pytest.mark.parametrize("kind", CHANNELS)
def test_axes_that_are_dropped_together_are_torchs(kind):
    layer, function, shape = CHANNELS[kind]
    own = keyed(nn.Sequential(layer(0.5), nn.Linear(1, 1)))[0]
    network = keyed(Foreign())
    x = torch.ones(shape)

    def together(drop):
        """The axes along which masks of several passes are constant."""
        masks = torch.stack([drop(x) != 0 for _ in range(6)])
        return [axis for axis in range(len(shape)) if bool((masks == masks.narrow(axis + 1, 0, 1)).all())]

    expected = together(layer(0.5))
    assert together(own) == expected
    with KeyedFunctions(network):
        assert together(lambda x: function(x, 0.5)) == expected


def test_inputs_that_torch_refuses_are_refused():
    with pytest.raises(ValueError, match=r"`input` must have the shape \[N, C, L\] or \[C, L\].*got \[2, 3, 4, 5\]"):
        keyed(nn.Sequential(nn.Dropout1d(0.5), nn.Linear(1, 1)))[0](torch.ones(2, 3, 4, 5))


@pytest.mark.parametrize("backend", ["streams", "vmap", "batched", "auto"])
@pytest.mark.parametrize("layer", [nn.Dropout1d, nn.Dropout2d])
def test_channels_of_sequences_have_the_same_draws_in_every_backend(layer, backend):
    def build():
        return nn.Sequential(nn.Linear(6, 8), layer(0.5), nn.Tanh(), nn.Linear(8, 3))

    x = torch.randn(B, 4, 6)  # [N, C, L]
    ensemble, reference = (ds.Ensemble(build, M, seed=3, backend=b) for b in (backend, "loop"))
    outputs = ensemble(x)
    torch.testing.assert_close(outputs, reference(x))
    if backend != "auto":
        assert ensemble.body.ran == backend
    different = [len({tuple(row.tolist()) for row in rows}) for rows in outputs.flatten(0, 1)]
    assert {2, 3} & set(different), "some channels of an example are dropped, and others are not"


class ByMethod(Foreign):
    """Drops units in a method that its forward pass calls."""

    def forward(self, x):
        return self.second(self._hidden(x))

    def _hidden(self, x):
        return torch.relu(F.dropout(self.first(x), 0.4, self.training))


class Inheriting(Foreign):
    """Drops units in the forward pass that it inherits."""

    def forward(self, x):
        return 2 * super().forward(x)


class ByLambda(Foreign):
    """Drops units in a function inside of its forward pass."""

    def forward(self, x):
        hidden = (lambda x: F.dropout(x, 0.4, self.training))(self.first(x))
        return self.second(hidden)


class Attending(nn.Module):
    def __init__(self, need_weights=False):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True), nn.Linear(4, 3)
        self.need_weights = need_weights

    def forward(self, x):
        x = x.unflatten(1, (-1, 1)).expand(-1, -1, 4)
        return self.head(self.attention(x, x, x, need_weights=self.need_weights)[0].mean(1))


class Scaled(nn.Module):
    """As transformers calls attention: the rate is that of a dropout layer that is never called."""

    def __init__(self, is_causal=False):
        super().__init__()
        self.dropout, self.is_causal = nn.Dropout(0.3), is_causal
        self.query, self.head = nn.Linear(1, 4), nn.Linear(4, 3)

    def forward(self, x):
        query = self.query(x.unflatten(1, (-1, 1))).unsqueeze(1)
        rate = self.dropout.p if self.training else 0.0
        out = F.scaled_dot_product_attention(query, query, query, dropout_p=rate, is_causal=self.is_causal)
        return self.head(out.squeeze(1).mean(1))


FUNCTIONAL = {
    "function": Foreign,
    "torch.dropout": lambda: Foreign(lambda x, p, training: torch.dropout(x, p, training)),
    "in place": lambda: Foreign(lambda x, p, training: F.dropout(x, p, training, inplace=True)),
    "method": ByMethod,
    "inherited": Inheriting,
    "lambda": ByLambda,
    "attention": Attending,
    "attention with weights": lambda: Attending(need_weights=True),
    "encoder": lambda: nn.Sequential(
        nn.Linear(6, 8),
        nn.Unflatten(1, (2, 4)),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True),
        nn.Flatten(),
        nn.Linear(8, 3),
    ),
    "scaled": Scaled,
    "causal": lambda: Scaled(is_causal=True),
}


@no_noise
@pytest.mark.parametrize("backend", ["streams", "vmap", "auto"])
@pytest.mark.parametrize("kind", FUNCTIONAL)
def test_functions_that_drop_units_have_the_same_draws_in_every_backend(kind, backend, caplog):
    ensemble, reference = (ds.Ensemble(FUNCTIONAL[kind], M, seed=3, backend=b).double() for b in (backend, "loop"))
    x, y = torch.randn(20, B, 6).double(), torch.randn(20, B, 3).double()
    with caplog.at_level(logging.WARNING, "dissensus"):
        trained_stacked(reference, x, y, per_member=False)
        torch.manual_seed(99)  # which must not matter
        trained_stacked(ensemble, x, y, per_member=False)
    assert not caplog.records
    for actual, expected in zip(ensemble.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
    first, second = ensemble(x[0]), ensemble(x[0])
    assert not torch.equal(first, second), "nothing was dropped"


@no_noise
@pytest.mark.parametrize("kind", FUNCTIONAL)
def test_masks_of_functions_differ_between_members_and_survive_copies(kind):
    ensemble = ds.Ensemble.from_modules([FUNCTIONAL[kind]()] * 2)  # two members of equal weights
    x = torch.randn(B, 6)
    assert torch.equal(*ensemble.eval()(x))
    assert not torch.allclose(*ensemble.train()(x))
    copied = copy.deepcopy(ensemble)
    torch.manual_seed(7)
    expected = ensemble(x)
    torch.manual_seed(8)
    assert torch.equal(copied(x), expected)
    assert ensemble.member(0).state_dict().keys() == FUNCTIONAL[kind]().state_dict().keys()


@no_noise
def test_fit_with_functional_dropout_depends_on_its_seed_alone():
    x, y = torch.randn(16, 6), torch.randn(16, 3)

    def weights(seed, torch_seed):
        torch.manual_seed(torch_seed)
        ensemble = ds.Ensemble(Foreign, M, backend="loop")
        ds.fit(ensemble, (x, y), mse, epochs=2, batch_size=8, seed=seed)
        return ensemble.body.packed()

    assert torch.equal(weights(0, 1), weights(0, 2))
    assert not torch.equal(weights(0, 1), weights(1, 1))


@no_noise
@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("gqa", [False, True])
def test_attention_that_is_written_out_is_torchs(mask, gqa, monkeypatch):
    """With masks that keep everything, at a rate of 0.3, it is torch's attention divided by 0.7."""
    from dissensus.execution import functional_dropout

    monkeypatch.setattr(functional_dropout, "keep_mask", lambda shape, *_: torch.ones(shape, dtype=torch.bool))
    network = keyed(Foreign())
    query, key = torch.randn(2, 4, 5, 8).double(), torch.randn(2, 2 if gqa else 4, 6, 8).double()
    masks = {None: None, "bool": torch.rand(5, 6) > 0.3, "float": torch.randn(5, 6).double()}
    if mask == "bool":
        masks["bool"][2] = False  # a query that attends to nothing
    options = {"attn_mask": masks[mask], "is_causal": mask is None, "scale": 0.4, "enable_gqa": gqa}
    expected = F.scaled_dot_product_attention(query, key, key, **options)
    with KeyedFunctions(network):
        actual = F.scaled_dot_product_attention(query, key, key, dropout_p=0.3, **options)
        unchanged = F.scaled_dot_product_attention(query, key, key, **options)
    torch.testing.assert_close(actual * 0.7, expected)
    torch.testing.assert_close(unchanged, expected)


@no_noise
def test_ensembles_that_were_saved_without_keys_of_functions_load(tmp_path, monkeypatch):
    from dissensus import dropout

    monkeypatch.setattr(dropout, "_mentions_dropout", lambda layer: False)  # as in earlier releases
    monkeypatch.setattr(dropout, "_drops_examples", lambda *_: False)
    build = lambda: nn.Sequential(Foreign(), nn.Linear(3, 6), Residual(DropPath(0.4)))  # noqa: E731
    ens = ds.Ensemble(build, M, seed=5)
    ens.save(tmp_path / "ens")
    monkeypatch.undo()
    again, fresh = ds.Ensemble.load(tmp_path / "ens", build), ds.Ensemble(build, M, seed=5)
    x = torch.randn(B, 6)
    torch.testing.assert_close(again(x), fresh(x))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 4), Noise())
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.inner(x))


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


class DroppingLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(1, 4, 2, dropout=0.3, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.rnn(x.unsqueeze(-1))[0][:, -1])


UNKEYED = {
    "noise": (Noisy, r"layer 'inner.1' \(Noise\)"),
    "lstm": (DroppingLSTM, r"layer 'rnn' \(LSTM\)"),
    "alpha": (lambda: nn.Sequential(nn.Linear(6, 3), nn.AlphaDropout(0.4)), r"layer '1' \(AlphaDropout\)"),
    "own code": (lambda: Foreign(lambda x, p, training: x + torch.rand(()) if training else x), "the network's own"),
}


@pytest.mark.parametrize("mixed", [False, True], ids=["stacked", "mixed"])
@pytest.mark.parametrize("kind", UNKEYED)
def test_fit_says_once_that_draws_without_a_key_differ_between_runs(kind, mixed, caplog):
    build, layer = UNKEYED[kind]
    ensemble = ds.Ensemble.from_modules([build(), nn.Linear(6, 3)]) if mixed else ds.Ensemble(build, M, backend="loop")
    data = torch.randn(16, 6), torch.randn(16, 3)
    with caplog.at_level(logging.WARNING, "dissensus"):
        for _ in range(2):
            ds.fit(ensemble, data, mse, epochs=2, batch_size=8)
    (message,) = [r.getMessage() for r in caplog.records if "global generator" in r.getMessage()]
    assert re.match(layer, message)
    assert "torch.manual_seed" in message
    assert "nn.Dropout" in message


def test_nothing_is_said_in_evaluation_mode_or_of_networks_without_draws(caplog):
    with caplog.at_level(logging.WARNING, "dissensus"):
        ds.Ensemble(Noisy, M, backend="loop").eval()(torch.randn(B, 6))
        ds.Ensemble(lambda: ds.nets.mlp(6, 3, (8,), dropout=0.4), M)(torch.randn(B, 6))
    assert not caplog.records


def test_looking_for_draws_leaves_no_trace():
    ensemble = ds.Ensemble(lambda: nn.Sequential(nn.BatchNorm1d(6), Noisy()), M, backend="loop")
    torch.manual_seed(3)
    outputs = ensemble(torch.ones(B, 6))
    assert ensemble.body.tensors()["0.num_batches_tracked"].tolist() == [1] * M
    torch.manual_seed(3)
    again = ds.Ensemble(lambda: nn.Sequential(nn.BatchNorm1d(6), Noisy()), M, backend="loop")
    again.body.skeleton.functions_keyed = False  # does not look
    assert torch.equal(outputs, again(torch.ones(B, 6)))
