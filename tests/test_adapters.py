"""Adapters against hand-written forms, and against peft on the same weights."""

import copy
import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

import dissensus as ds
from dissensus import adapters


def network():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def convolutions(groups=1):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, padding="same", groups=groups),
        nn.Flatten(),
    ).double()


def drawn(module):
    """A network whose parameters are all away from their neutral values."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def test_lora_adds_a_product_of_rank_r():
    base = network()
    adapted = drawn(adapters.lora(base, rank=2, alpha=3.0))
    x = torch.randn(4, 5, dtype=torch.float64)
    h = x
    for layer in adapted:
        if isinstance(layer, adapters.LoraLinear):
            weight = layer.base.weight + 3.0 / 2 * layer.up @ layer.down
            h = F.linear(h, weight, layer.base.bias)
        else:
            h = layer(h)
    torch.testing.assert_close(adapted(x), h)


def test_lora_starts_with_the_outputs_of_the_network_and_freezes_it():
    base = network()
    adapted = adapters.lora(base, rank=4)
    x = torch.randn(4, 5, dtype=torch.float64)
    torch.testing.assert_close(adapted(x), base(x), rtol=0, atol=0)
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained == {f"{i}.{part}" for i in (0, 2, 4) for part in ("down", "up")}
    assert all(p.requires_grad for p in base.parameters()), "the network itself is not touched"
    bound = 1 / math.sqrt(7)
    assert 0.5 * bound < adapted[2].down.abs().max() <= bound


@pytest.mark.parametrize("make", [adapters.lora, adapters.batch_ensemble, adapters.tabm])
def test_a_merged_network_is_ordinary_and_has_the_same_outputs(make):
    adapted = drawn(make(network()))
    merged = adapters.merge(adapted)
    x = torch.randn(4, 5, dtype=torch.float64)
    torch.testing.assert_close(merged(x), adapted(x))
    assert [type(layer) for layer in merged] == [type(layer) for layer in network()]
    assert all(p.requires_grad for p in merged.parameters())
    assert sum(p.numel() for p in merged.parameters()) == sum(p.numel() for p in network().parameters())


@pytest.mark.parametrize(
    ("make", "groups"), [(adapters.lora, 1), (adapters.batch_ensemble, 1), (adapters.batch_ensemble, 2)]
)
def test_convolutions(make, groups):
    adapted = drawn(make(convolutions(groups)))
    x = torch.randn(3, 2, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(adapters.merge(adapted)(x), adapted(x))
    assert not any(isinstance(layer, nn.Conv2d) for layer in adapted)


def test_batch_ensemble_scales_inputs_and_outputs():
    adapted = drawn(adapters.batch_ensemble(network()))
    layer = adapted[2]
    x = torch.randn(4, 7, dtype=torch.float64)
    weight = layer.base.weight * torch.outer(layer.scale_out, layer.scale_in)
    torch.testing.assert_close(layer(x), F.linear(x, weight, layer.bias))


@pytest.mark.parametrize("shape", [(2, 7), (4, 9, 7)], ids=["few", "many"])
def test_gradients_of_scales_and_of_what_they_scale(shape):
    """In training, many rows are multiplied by scaled weights, and few rows are scaled themselves."""
    torch.manual_seed(0)
    layer = drawn(adapters.batch_ensemble(nn.Linear(7, 6).double()))
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    tensors = [x, *layer.parameters()]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        outputs = layer(x)
    weight = layer.base.weight * torch.outer(layer.scale_out, layer.scale_in)
    expected = F.linear(x, weight, layer.bias)
    torch.testing.assert_close(outputs, expected)
    cotangent = torch.randn_like(outputs)
    gradients = torch.autograd.grad(outputs, tensors, cotangent)
    for actual, gradient in zip(gradients, torch.autograd.grad(expected, tensors, cotangent), strict=True):
        torch.testing.assert_close(actual, gradient)
    of_rows = [size for size in kept if math.prod(size) in (math.prod(shape), math.prod(shape) // 7 * 6)]
    assert len(of_rows) == (3 if len(shape) == 2 else 1), "only the input is kept of many rows"
    called = []
    layer.base.register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(layer(x), expected)
    assert called, "the layer inside is called where somebody listens"


def test_first_values_of_scales():
    base = network()
    signs = adapters.batch_ensemble(base)
    for layer in signs:
        if isinstance(layer, adapters.ScaledLinear):
            assert set(layer.scale_in.tolist()) <= {-1.0, 1.0}
    wide = adapters.batch_ensemble(nn.Linear(4000, 2), start="normal")
    assert wide.scale_in.mean().item() == pytest.approx(1.0, abs=0.05)
    assert wide.scale_in.std().item() == pytest.approx(0.5, abs=0.05)
    member = adapters.tabm(base)
    assert set(member[0].scale_in.tolist()) <= {-1.0, 1.0}
    assert all(bool((s == 1).all()) for s in (member[0].scale_out, member[2].scale_in, member[2].scale_out))
    assert isinstance(member[4], nn.Linear)
    assert not torch.equal(member[4].weight, base[4].weight), "the last layer is drawn anew"
    torch.testing.assert_close(member[0].base.weight, base[0].weight)


def test_targets_are_names_or_last_parts_of_names():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.value, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.out(self.query(x) * self.value(x))

    model = nn.Sequential(Attention(), Attention())
    adapted = adapters.lora(model, 2, targets=["query", "1.value"])
    kinds = {name: type(m).__name__ for name, m in adapted.named_modules() if name.count(".") == 1}
    assert kinds["0.query"] == kinds["1.query"] == kinds["1.value"] == "LoraLinear"
    assert kinds["0.value"] == kinds["0.out"] == "Linear"
    with pytest.raises(ValueError, match="`targets` must name linear layers.*'querry'. Did you mean 'query'"):
        adapters.lora(model, 2, targets=["querry"])


def test_layers_that_hang_in_two_places_stay_one_layer():
    layer = nn.Linear(4, 4)
    adapted = adapters.lora(nn.Sequential(layer, nn.ReLU(), layer), 2)
    assert adapted[0] is adapted[2]


def test_what_cannot_be_adapted_is_refused():
    with pytest.raises(ValueError, match="`network` must have a linear layer"):
        adapters.lora(nn.ReLU())
    with pytest.raises(ValueError, match="MultiheadAttention"):
        adapters.lora(nn.MultiheadAttention(4, 2))
    with pytest.raises(ValueError, match="`trained` must match names of parameters; got 'hed"):
        adapters.lora(network(), trained=["hed.*"])
    with pytest.raises(ValueError, match="without groups; got '2' with 2 groups"):
        adapters.lora(convolutions(2), targets=["2"])
    with pytest.raises(ValueError, match="two linear layers or more"):
        adapters.tabm(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="`network` must have adapters"):
        adapters.merge(network())


@pytest.mark.parametrize(
    "use", [adapters.lora, adapters.batch_ensemble, adapters.tabm, adapters.merge], ids=lambda use: use.__name__
)
def test_ensembles_and_functions_are_no_networks(use):
    base = network()
    ens = ds.Ensemble(lambda: adapters.lora(base, 2), 3, shared="frozen")
    with pytest.raises(TypeError, match=r"`network` must be one network; got an Ensemble\. A member\? Use ens\.member"):
        use(ens)
    with pytest.raises(TypeError, match=r"`network` must be an nn\.Module; got function"):
        use(network)


def test_messages_list_what_there_is():
    with pytest.raises(ValueError, match=r"got 'attention'\. Last parts of names: 0, 2, 4\."):
        adapters.lora(network(), targets="attention")
    with pytest.raises(ValueError, match=r"`head` must name a linear layer; got 'out'\. There are: 0, 2, 4\."):
        adapters.tabm(network(), head="out")


def test_lora_is_that_of_peft():
    peft = pytest.importorskip("peft")
    base = nn.Sequential()
    base.first, base.act, base.last = nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["first", "last"])
    theirs = peft.get_peft_model(copy.deepcopy(base), config)
    ours = adapters.lora(base, 3, ["first", "last"], alpha=6)
    for name in ("first", "last"):
        layer, other = getattr(ours, name), getattr(theirs.base_model.model, name)
        with torch.no_grad():
            other.lora_A["default"].weight.copy_(layer.down)
            layer.up.normal_()
            other.lora_B["default"].weight.copy_(layer.up)
    x = torch.randn(4, 5)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(adapters.merge(ours)(x), theirs.merge_and_unload()(x))


def test_members_draw_their_own_adapters():
    base = network()
    ens = ds.Ensemble(lambda: adapters.lora(base, 2), members=3)
    first, second = ens.member(0), ens.member(1)
    assert not torch.equal(first[0].down, second[0].down)
    torch.testing.assert_close(first[0].base.weight, second[0].base.weight, rtol=0, atol=0)


@pytest.mark.parametrize("make", [adapters.lora, adapters.batch_ensemble])
def test_foreign_code_may_ask_layers_for_what_they_are(make):
    adapted = drawn(make(network()))
    layer, merged = adapted[2], adapters.merge(adapted)[2]
    assert (layer.in_features, layer.out_features, layer.weight.dtype) == (7, 6, torch.float64)
    torch.testing.assert_close(layer.weight, merged.weight)
    torch.testing.assert_close(layer.bias, merged.bias)
    with pytest.raises(AttributeError, match="nonsense"):
        layer.nonsense  # noqa: B018


def weight_normed():
    torch.manual_seed(3)
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))


def test_adapters_on_parametrized_layers_are_copied_and_merged():
    adapted = adapters.lora(weight_normed(), rank=2)
    nn.init.normal_(adapted[0].up)
    x = torch.randn(5, 4)
    expected = adapted(x)
    copied = copy.deepcopy(adapted)
    assert isinstance(copied[0], adapters.LoraLinear), "not the layer inside alone"
    merged = adapters.merge(adapted)
    assert type(merged[0]) is nn.Linear
    torch.testing.assert_close(merged(x), expected)
    torch.testing.assert_close(adapted(x), expected, rtol=0, atol=0, msg="the adapted network keeps its norm")


@pytest.mark.parametrize("make", [adapters.batch_ensemble, adapters.tabm])
def test_members_do_not_share_parametrized_weights(make):
    with pytest.raises(ValueError, match="plain weights, which members share; got parametrized ones in '0'"):
        make(weight_normed())


@pytest.mark.parametrize("make", [adapters.lora, adapters.batch_ensemble, adapters.tabm])
def test_adapters_on_adapters_are_refused(make):
    with pytest.raises(ValueError, match=r"no adapters yet.*adapters\.merge"):
        make(adapters.lora(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), rank=2))


def test_trained_may_be_one_pattern():
    network = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    assert adapters.lora(network, 2, trained="1.*")[1].weight.requires_grad


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Conv2d(4, 3, 1)], ids=["linear", "convolution"])
def test_adapters_of_weights_with_16_bits_are_float32(layer, half):
    adapted = adapters.lora(copy.deepcopy(layer).to(half), rank=2)
    nn.init.normal_(adapted.up)
    assert adapted.down.dtype == adapted.up.dtype == torch.float32
    assert adapted.base.weight.dtype == adapted.weight.dtype == adapters.merge(adapted).weight.dtype == half
    x = torch.randn(5, 4, 1, 1).flatten(1 if isinstance(layer, nn.Linear) else 3).to(half)
    y = adapted(x)
    assert y.dtype == half
    exact = copy.deepcopy(adapted).float()
    torch.testing.assert_close(y.float(), exact(x.float()), rtol=2e-2, atol=2e-2)


def test_peft_keeps_adapters_of_16_bits_in_float32_too():
    peft = pytest.importorskip("peft")
    network = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).bfloat16()
    theirs = peft.get_peft_model(copy.deepcopy(network), peft.LoraConfig(r=2, lora_alpha=2, target_modules=["0"]))
    ours = adapters.lora(network, 2, targets="0")
    layer = theirs.base_model.model[0]
    with torch.no_grad():
        nn.init.normal_(layer.lora_B["default"].weight)
        ours[0].down.copy_(layer.lora_A["default"].weight)
        ours[0].up.copy_(layer.lora_B["default"].weight)
    assert ours[0].down.dtype == layer.lora_A["default"].weight.dtype
    x = torch.randn(5, 4).bfloat16()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-2, atol=1e-2)


class Counted(TorchDispatchMode):
    """Counts calls by name and shape."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shape = tuple(args[0].shape) if args and isinstance(args[0], torch.Tensor) else ()
        self.calls[func.overloadpacket.__name__, shape] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("alpha", [None, 6.0])
def test_adapters_neither_cast_nor_scale_large_tensors_under_autocast(alpha):
    layer = drawn(adapters.lora(nn.Linear(16, 16), rank=2, alpha=alpha))
    x = torch.randn(5, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16), Counted() as counted:
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert counted.calls["_to_copy", (5, 16)] == counted.calls["mul", (5, 16)] == 0
    assert counted.calls["mul", (5, 2)] == (alpha is not None)
    torch.testing.assert_close(y.float(), layer(x.float()), rtol=0.05, atol=0.05)
