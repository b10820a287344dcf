"""Layers with state or weights of their own kind: recurrent networks, spectral norm, attention, several dtypes."""

import copy
import gc
import pickle
import weakref
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_members import STEPS, M, data_for, trained_alone, trained_stacked
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import dissensus as ds
from dissensus.execution import vmapped

BACKENDS = ("loop", "streams", "vmap", "batched", "stacked", "auto")


class Recurrent(nn.Module):
    """A recurrent layer and a head on its last state."""

    def __init__(self, kind, **settings):
        super().__init__()
        self.layer = kind(4, 5, batch_first=True, **settings)
        self.head = nn.Linear(5 * (1 + self.layer.bidirectional), 3)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


def two_layers(wrap):
    return nn.Sequential(wrap(nn.Linear(6, 8)), nn.ReLU(), wrap(nn.Linear(8, 3)))


def attention():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(28, 3))


NETWORKS = {
    "lstm": (lambda: Recurrent(nn.LSTM), (7, 4)),
    "deep_gru": (lambda: Recurrent(nn.GRU, num_layers=2), (7, 4)),
    "bidirectional_rnn": (lambda: Recurrent(nn.RNN, bidirectional=True), (7, 4)),
    "spectral_norm_by_hooks": (lambda: two_layers(nn.utils.spectral_norm), (6,)),
    "spectral_norm": (lambda: two_layers(parametrizations.spectral_norm), (6,)),
    "weight_norm": (lambda: two_layers(parametrizations.weight_norm), (6,)),
    "orthogonal": (lambda: two_layers(parametrizations.orthogonal), (6,)),
    "attention": (attention, (7, 4)),
}
VMAPPED = {"weight_norm", "orthogonal", "attention"}
"""The others have operations that ``vmap`` does not know, and run in a loop."""

quietly = pytest.mark.filterwarnings(
    "ignore:There is a performance drop",
    "ignore:`torch.nn.utils.(weight|spectral)_norm`",
    "ignore:enable_nested_tensor",
)


@quietly
@pytest.mark.slow(fast=["*-loop", "*-vmap"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_members_train_as_separate_modules_do(name, backend):
    build, shape = NETWORKS[name]
    ensemble = ds.Ensemble(build, M, seed=3, backend=backend).double()
    modules = [ensemble.member(i) for i in range(M)]
    x, y = data_for(shape, per_member=False)
    trained_alone(modules, x, y, per_member=False)
    trained_stacked(ensemble, x, y, per_member=False)
    for i, module in enumerate(modules):
        stacked = ensemble.member(i).state_dict()
        assert stacked.keys() == module.state_dict().keys() == build().state_dict().keys()
        for key, tensor in module.state_dict().items():
            torch.testing.assert_close(stacked[key], tensor, rtol=1e-9, atol=1e-11, msg=lambda m, k=key: f"{k}: {m}")
    outputs = ensemble.eval()(x[0])
    torch.testing.assert_close(outputs, torch.stack([m.eval()(x[0]) for m in modules]), rtol=1e-9, atol=1e-11)
    assert len(x) == STEPS
    if backend == "vmap":
        assert (ensemble.choices[0].backend == "vmap") == (name in VMAPPED)


@quietly
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_in_evaluation_mode_pass_through_attention(backend):
    """In evaluation mode torch's layer has a fast path without derivatives."""
    ensemble = ds.Ensemble(attention, M, backend=backend).eval()
    x = torch.randn(5, 7, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(ensemble(x).square().sum(), x)
    alone = torch.autograd.grad(sum(ensemble.member(i)(x).square().sum() for i in range(M)), x)
    torch.testing.assert_close(grad, alone[0])
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_backend_whose_backward_pass_fails_is_not_chosen(monkeypatch):
    from dissensus import execution

    class Underivable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

    loop = execution.BACKENDS["loop"].run
    backend = execution.Backend("vmap", lambda *a: Underivable.apply(loop(*a)))
    monkeypatch.setitem(execution.BACKENDS, "vmap", backend)
    for name in execution.BACKENDS.keys() - {"loop", "vmap"}:
        monkeypatch.delitem(execution.BACKENDS, name)
    ensemble = ds.Ensemble(lambda: nn.Linear(6, 3), M)
    ensemble(torch.randn(5, 6)).sum().backward()
    assert ensemble.choices[0].backend == "loop"
    assert "backward" in ensemble.choices[0].refused["vmap"]


def flattened(layer):
    raise AssertionError("weights of stacked members were moved")


def test_recurrent_layers_leave_stacked_weights_in_place(monkeypatch):
    """On a GPU ``flatten_parameters`` moves weights; those of an ensemble have other shapes, or are lent."""
    ensemble = ds.Ensemble(NETWORKS["lstm"][0], M)
    ensemble(torch.randn(5, 7, 4)).sum().backward()
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flattened)
    ensemble = pickle.loads(pickle.dumps(copy.deepcopy(ensemble).double().float())).subset([0, 2])
    ensemble(torch.randn(5, 7, 4)).sum().backward()
    mixed = ds.Ensemble.from_modules([nn.Sequential(ensemble.body.member(0)), ensemble.body.member(1)])
    mixed.body.run(mixed.body.packed().requires_grad_(), torch.randn(5, 7, 4))
    monkeypatch.undo()
    for network in (ensemble.member(0), mixed.member(1), ensemble.soup()):
        assert not any("flatten_parameters" in vars(module) for module in network.modules())
        network(torch.randn(5, 7, 4))


def test_recurrent_layers_keep_no_weights_of_a_pass():
    ensemble = ds.Ensemble(NETWORKS["lstm"][0], M, backend="loop")
    flat = ensemble.body.packed().requires_grad_()
    ensemble.body.run(flat, torch.randn(5, 7, 4))
    ensemble.body.attach(flat.detach().clone(), ensemble.body.state())
    kept = weakref.ref(flat)
    del flat
    gc.collect()
    assert kept() is None
    assert all(w is p for w, p in zip(ensemble.body.network.layer._flat_weights, ensemble.parameters(), strict=False))


@pytest.mark.parametrize("output", [0, lambda out: out[1][0][-1]], ids=["position", "function"])
def test_a_recurrent_layer_alone_is_a_member(output):
    ensemble = ds.Ensemble(lambda: nn.LSTM(4, 5, batch_first=True), M, output=output)
    x = torch.randn(6, 7, 4)
    expected = [ensemble.member(i)(x) for i in range(M)]
    choose = output if callable(output) else lambda out: out[output]
    torch.testing.assert_close(ensemble(x), torch.stack([choose(out) for out in expected]))


def test_packed_sequences_are_refused_with_the_fix():
    ensemble = ds.Ensemble(lambda: nn.LSTM(4, 5, batch_first=True), M, output=0)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 7, 4), torch.tensor([7, 5, 2]), batch_first=True)
    with pytest.raises(TypeError, match="not be a packed sequence.*Pack it inside of the network"):
        ensemble(packed)


class Padded(nn.Module):
    """Packs its input, whose lengths come beside it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.layer(packed)[1][0][-1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_networks_that_pack_their_sequences_run(backend):
    ensemble = ds.Ensemble(Padded, M, backend=backend)
    x, lengths = torch.randn(3, 7, 4), torch.tensor([5, 7, 2])
    torch.testing.assert_close(ensemble(x, lengths), torch.stack([ensemble.member(i)(x, lengths) for i in range(M)]))


class TwoDtypes(nn.Module):
    """The first layer is in bf16, as in a model that was partly cast; the second one is not.

    Sizes are multiples of 32, since torch rounds bf16 numbers that do not fill a vector register in another way.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 32).bfloat16(), nn.Linear(32, 3)

    def forward(self, x):
        return self.second(torch.relu(self.first(x.to(torch.bfloat16))).float())


@pytest.mark.parametrize("backend", ["loop", "streams"])
def test_members_of_two_dtypes_train_as_separate_modules_do(backend):
    """To the bit: ``torch.optim`` updates each parameter in its own dtype, whether it is stacked or not."""
    ensemble = ds.Ensemble(TwoDtypes, M, backend=backend)
    modules = [ensemble.member(i) for i in range(M)]
    x, y = (tensor.float() for tensor in data_for((8,), per_member=False))
    trained_alone(modules, x, y, per_member=False)
    optimiser = torch.optim.SGD(ensemble.parameters(), lr=0.01, momentum=0.9)
    for xs, ys in zip(x, y, strict=True):
        optimiser.zero_grad()
        torch.stack([(outputs - ys).square().sum(-1).mean() for outputs in ensemble(xs)]).sum().backward()
        optimiser.step()
    for i, module in enumerate(modules):
        assert module.first.weight.dtype == torch.bfloat16
        for parameter, expected in zip(ensemble.member(i).parameters(), module.parameters(), strict=True):
            assert torch.equal(parameter, expected)
    assert torch.equal(ensemble.predict(x[0]), torch.stack([module(x[0]) for module in modules]))


def test_backends_of_networks_in_low_precision_are_compared_at_that_precision():
    ensemble = ds.Ensemble(TwoDtypes, 8)
    ensemble(torch.randn(64, 8))
    assert "vmap" not in ensemble.choices[0].refused


def test_frozen_parameters_may_have_another_dtype_in_fit():
    def build():
        network = TwoDtypes()
        network.first.requires_grad_(False)
        return network

    ensemble = ds.Ensemble(build, M, backend="loop")
    modules = [ensemble.member(i) for i in range(M)]
    x, y = torch.randn(16, 8), torch.randn(16, 3)
    ds.fit(
        ensemble,
        (x, y),
        partial(ds.objectives.independent, loss="squared_error"),
        epochs=STEPS,
        batch_size=16,
        shuffle=False,
        optimizer="sgd",
        lr=0.01,
    )
    for i, module in enumerate(modules):
        optimiser = torch.optim.SGD(module.second.parameters(), lr=0.01)
        for _ in range(STEPS):
            optimiser.zero_grad()
            (module(x) - y).square().sum(-1).mean().backward()
            optimiser.step()
        torch.testing.assert_close(ensemble.member(i).second.weight, module.second.weight)
        assert torch.equal(ensemble.member(i).first.weight, module.first.weight)


def attention_kernels():
    return torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()


def test_attention_under_vmap_on_a_gpu_takes_kernels_that_have_a_derivative_there():
    on_gpu, on_cpu = SimpleNamespace(is_cuda=True), torch.zeros(1)
    before = attention_kernels()
    assert before == (True, True)
    with suppress(KeyboardInterrupt), vmapped.attention_with_derivative(on_gpu):
        assert attention_kernels() == (False, False)
        raise KeyboardInterrupt
    assert attention_kernels() == before
    with vmapped.attention_with_derivative(on_cpu):
        assert attention_kernels() == before


class Attention(nn.Module):
    """Attention as in a ViT: 64 numbers in each head, and a number of tokens that fits no tile."""

    def __init__(self):
        super().__init__()
        self.into, self.head = nn.Linear(64, 384), nn.Linear(128, 3)

    def forward(self, x):
        query, key, value = self.into(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        return self.head(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2).mean(1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_in_half_precision_on_a_gpu_has_the_loops_gradients_under_vmap(dtype):
    torch.manual_seed(0)
    x = torch.randn(4, 197, 64, device="cuda")
    gradients = []
    for backend in ("loop", "vmap"):
        ensemble = ds.Ensemble(Attention, 3, backend=backend, seed=0).cuda()
        with torch.autocast("cuda", dtype):
            outputs = ensemble(x)
        outputs.float().square().sum().backward()
        assert ensemble.body.ran == backend
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in ensemble.parameters()]))
    assert gradients[1].isfinite().all()
    assert (gradients[1] - gradients[0]).norm() < 0.05 * gradients[0].norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("masked", [False, True])
def test_attention_on_a_gpu_trains_under_vmap(masked):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.head = nn.Linear(8, 24), nn.Linear(8, 3)

        def forward(self, x):
            query, key, value = self.into(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            mask = x[:, None, None, :, 0] > -1.0 if masked else None
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            return self.head(attended.transpose(1, 2).flatten(2).mean(1))

    x = torch.randn(4, 5, 8, device="cuda")
    gradients = {}
    for backend in ("loop", "vmap"):
        ensemble = ds.Ensemble(Attends, 3, backend=backend).cuda()
        ensemble(x).square().sum().backward()
        assert ensemble.body.ran == backend
        gradients[backend] = [parameter.grad for parameter in ensemble.parameters()]
    for one, other in zip(gradients["loop"], gradients["vmap"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
