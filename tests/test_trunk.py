"""Heads on a shared trunk: they give what whole networks would give, and nothing but the heads ever moves."""

import copy
import functools
import threading

import pytest
import torch
from torch import Tensor, nn

import dissensus as ds
from dissensus.trunk import Features, SharedTrunk, last_layers

M, B = 3, 5


class Backbone(nn.Module):
    """Convolutions with batch norm, and a last layer that features must not need."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4, 7)
        self.unused = nn.Linear(4, 7)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        features = self.pool(self.body(x)).flatten(1)
        self.calls += 1
        return self.head(features)


class Residual(nn.Module):
    """x + conv(x), by functions where it can."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv2(torch.relu(self.conv1(x)))
        inner += x
        return torch.relu(inner)


def residual_network():
    layers = [nn.Conv2d(2, 4, 3), Residual(), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(*layers)


class Scales(nn.Module):
    """Names one parameter before and behind the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.scale
        return self.second(h.tanh() * self.scale)


def heads(width=4, members=M, backend="auto"):
    return ds.Ensemble(lambda: ds.nets.mlp(width, 3, (6,)), members, seed=1, backend=backend)


def moved(network, x):
    """A network whose batch norm has seen something, so that its statistics are not the first ones."""
    network.train()
    network(x)
    return network.eval()


def same_state(before, after):
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def images(count=B, seed=0):
    return torch.randn(count, 2, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("members", [1, M])
def test_outputs_are_those_of_each_head_on_the_backbone(members):
    x = images()
    backbone = moved(Backbone(), x)
    expected = backbone(x)
    trunk = SharedTrunk(backbone, heads(7, members)).eval()
    torch.testing.assert_close(trunk.features(x), expected, rtol=0, atol=0)
    outputs = trunk(x)
    assert outputs.shape == (members, B, 3)
    assert trunk.members == members
    for index in range(members):
        torch.testing.assert_close(outputs[index], trunk.heads.member(index)(expected))


def test_features_are_the_output_of_the_named_layer():
    x = images()
    backbone = moved(Backbone(), x)
    for cut, by_hand in (
        ("body", lambda: backbone.body(x)),
        ("body.0", lambda: backbone.body[0](x)),
        ("body.1", lambda: backbone.body[1](backbone.body[0](x))),  # an in-place layer follows
        ("pool", lambda: backbone.pool(backbone.body(x))),
    ):
        trunk = SharedTrunk(backbone, heads(), cut=cut)
        torch.testing.assert_close(trunk.features(x), by_hand(), rtol=0, atol=0)
        assert not any(layer._forward_hooks for layer in backbone.modules()), "a hook stays behind"
    assert "cut='pool'" in repr(trunk)


def test_the_rest_of_the_backbone_is_not_computed():
    backbone = Backbone().eval()
    trunk = SharedTrunk(backbone, heads(), cut="pool")

    def fail(*_):
        raise AssertionError("a layer behind the cut was called")

    backbone.head.register_forward_pre_hook(fail)
    assert trunk.features(images()).shape == (B, 4, 1, 1)
    assert backbone.calls == 0
    with pytest.raises(AssertionError, match="behind the cut"):
        backbone(images())


def test_a_forward_pass_that_catches_errors_does_not_hold_up_the_cut():
    class Careful(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 4)

        def forward(self, x):
            try:
                return self.second(self.first(x))
            except Exception:
                return torch.zeros(len(x), 4)

    backbone, x = Careful(), torch.randn(B, 6)
    trunk = SharedTrunk(backbone, heads(), cut="first")
    torch.testing.assert_close(trunk.features(x), backbone.first(x), rtol=0, atol=0)


def test_threads_do_not_take_each_others_features():
    backbone = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4))
    trunk = SharedTrunk(backbone, heads(), cut="1")
    failures: list[int] = []

    def run(number):
        x = torch.full((B, 6), float(number))
        expected = torch.tanh(backbone[0](x))
        failures.extend(number for _ in range(50) if not torch.equal(trunk.features(x), expected))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_nothing_but_heads_moves_in_training():
    x = images(32)
    backbone = moved(Backbone(), x)
    trunk = SharedTrunk(backbone, heads(), cut="body.2").train()
    assert trunk.training
    assert trunk.heads.training
    assert not any(layer.training for layer in backbone.modules())
    assert not any(parameter.requires_grad for parameter in backbone.parameters())
    before = copy.deepcopy(backbone.state_dict())
    flat = SharedTrunk(nn.Sequential(backbone.body, backbone.pool, nn.Flatten()), heads())
    first = copy.deepcopy(flat.heads.state_dict())
    y = torch.arange(32) % 3
    objective = functools.partial(ds.objectives.independent, loss="cross_entropy")
    ds.fit(flat.heads, (flat.features(x), y), objective, epochs=2, batch_size=8, lr=0.1)
    assert not torch.equal(first["body.network.0.weight"], flat.heads.state_dict()["body.network.0.weight"])
    flat(x).sum().backward()  # by hand, too
    assert all(parameter.grad is None for parameter in backbone.parameters())
    assert all(parameter.grad is not None for parameter in flat.heads.parameters())
    same_state(before, backbone.state_dict())
    assert not any(layer.training for layer in backbone.modules())


def test_features_may_be_computed_at_every_step():
    x, y = images(32), torch.arange(32) % 3
    backbone = moved(nn.Sequential(*Backbone().body, nn.Flatten()), x)
    objective = functools.partial(ds.objectives.independent, loss="cross_entropy")
    stored, recomputed = (SharedTrunk(backbone, heads(144, backend="loop")) for _ in range(2))
    ds.fit(stored.heads, (stored.features(x), y), objective, epochs=2, batch_size=8)
    ds.fit(recomputed.heads, (x, y), objective, epochs=2, batch_size=8, augment=lambda x, _: recomputed.features(x))
    for first, second in zip(stored.heads.parameters(), recomputed.heads.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def test_a_backbone_that_someone_else_puts_into_training_is_still_evaluated():
    x = images()
    backbone = moved(Backbone(), x)
    trunk = SharedTrunk(backbone, heads(), cut="pool")
    expected, before = trunk.features(x), copy.deepcopy(backbone.state_dict())
    backbone.train()
    torch.testing.assert_close(trunk.features(x), expected, rtol=0, atol=0)
    same_state(before, backbone.state_dict())
    parent = nn.ModuleList([trunk]).train()
    assert parent.training
    assert not backbone.training


def test_gradients_of_inputs_pass_through():
    x = images().requires_grad_()
    trunk = SharedTrunk(Backbone(), heads(7)).eval()
    trunk(x).sum().backward()
    assert x.grad is not None
    assert bool(x.grad.any())


def test_both_parts_move_together():
    trunk = SharedTrunk(Backbone(), heads(7)).to(torch.float64)
    assert {parameter.dtype for parameter in trunk.parameters()} == {torch.float64}
    assert trunk(images().double()).dtype == torch.float64
    assert {p.device.type for p in copy.deepcopy(trunk).to("meta").parameters()} == {"meta"}


def test_a_trunk_is_built_again_from_backbone_and_heads(tmp_path):
    x = images()
    trunk = SharedTrunk(Backbone(), heads(4, backend="loop"), cut="pool")
    trunk.heads = ds.Ensemble(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), M, backend="loop")
    trunk.heads.save(tmp_path)
    loaded = ds.Ensemble.load(tmp_path, lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    torch.testing.assert_close(SharedTrunk(trunk.backbone, loaded, cut="pool")(x), trunk(x), rtol=0, atol=0)


def test_wrong_trunks_are_refused(unchecked):
    backbone = Backbone()
    with pytest.raises(ValueError, match=r"`cut` must name a layer .* got 'pol'. Did you mean 'pool'\?"):
        SharedTrunk(backbone, heads(), cut="pol")
    with pytest.raises(ValueError, match="Layers: body, pool, head, unused"):
        SharedTrunk(backbone, heads(), cut="zzz")
    with pytest.raises(ValueError, match="no layers inside"):
        SharedTrunk(nn.Linear(2, 2), heads(), cut="zzz")
    with pytest.raises(ValueError, match="`cut` must name a layer"):
        SharedTrunk(backbone, heads(), cut="")
    with pytest.raises(ValueError, match="calls; got 'unused'"):
        SharedTrunk(backbone, heads(), cut="unused")(images())
    with pytest.raises(TypeError, match="returns one tensor; got a tuple"):
        SharedTrunk(nn.Sequential(nn.LSTM(6, 4), nn.Flatten()), heads(), cut="0")(torch.randn(B, 2, 6))
    with pytest.raises(TypeError, match="`backbone` must return one tensor; got a tuple"):
        SharedTrunk(nn.LSTM(6, 4), heads())(torch.randn(B, 2, 6))
    with pytest.raises(TypeError, match="`heads` must be an Ensemble; got Linear"):
        SharedTrunk(backbone, nn.Linear(4, 3))
    with pytest.raises(TypeError, match="`backbone` must be an nn.Module"):
        SharedTrunk(torch.relu, heads())


SPLITS = [
    ("mlp", lambda: ds.nets.mlp(6, 3, (8, 7), dropout=0.3), (6,), "1", "batched"),
    ("mlp", lambda: ds.nets.mlp(6, 3, (8, 7)), (6,), "0", "batched"),
    ("mlp", lambda: ds.nets.mlp(6, 3, (8, 7)), (6,), 2, "batched"),
    ("cnn", lambda: ds.nets.cnn(2, 3, 8, (4, 5), batch_norm=True), (2, 8, 8), "2", None),
    ("cnn", lambda: ds.nets.cnn(2, 3, 8, (4, 5), batch_norm=True), (2, 8, 8), 1, "batched"),
    ("vanilla", lambda: ds.nets.vanilla_cnn(3, 1, 16), (1, 16, 16), "1", "batched"),  # an in-place layer follows
    ("residual", residual_network, (2, 8, 8), "1", None),
    ("residual", residual_network, (2, 8, 8), 3, None),
    ("scales", Scales, (6,), "first", None),
    ("mobilenet", lambda: ds.nets.mobilenet_v2(3), (3, 32, 32), "features", "batched"),
    ("mobilenet", lambda: ds.nets.mobilenet_v2(3), (3, 32, 32), "features.17", None),
    ("resnet", lambda: ds.nets.resnet20(3), (3, 16, 16), "layer3.1", None),
    ("resnet", lambda: ds.nets.resnet20(3), (3, 16, 16), "layer2", None),
    ("resnet", lambda: ds.nets.resnet20(3), (3, 16, 16), 1, "batched"),
]


@pytest.mark.parametrize(("build", "shape", "cut", "batched"), [split[1:] for split in SPLITS])
def test_the_pieces_compute_what_the_network_computes(build, shape, cut, batched):
    x = torch.randn(B, *shape, dtype=torch.float64)
    network = moved(build().double(), x)
    before = copy.deepcopy(network.state_dict())
    trunk = last_layers(network, cut, members=2)
    trunk.heads.body.backend = "loop"
    with torch.no_grad():
        expected, copied = network(x), x.clone()
        outputs = trunk(x)
        features = trunk.features(x)
        features_before = features.clone()
        trunk.heads(features)
    torch.testing.assert_close(
        features, features_before, rtol=0, atol=0, msg="heads write into the features they share"
    )
    torch.testing.assert_close(x, copied, rtol=0, atol=0)
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    if batched:
        assert trunk.heads.body.is_batchable()
        trunk.heads.body.backend = "batched"
        torch.testing.assert_close(trunk(x), outputs, rtol=1e-9, atol=1e-9)
    parameter_count = sum(p.numel() for p in [*trunk.backbone.parameters(), *trunk.heads.member(0).parameters()])
    assert parameter_count >= sum(p.numel() for p in network.parameters())
    assert not any(parameter.requires_grad for parameter in trunk.backbone.parameters())
    assert all(parameter.requires_grad for parameter in network.parameters()), "the network itself was frozen"
    same_state(before, network.state_dict())
    assert not network.training


def test_k_counts_layers_with_parameters_from_the_end():
    network = ds.nets.cnn(2, 3, 8, (4, 5), batch_norm=True)  # conv bn relu pool conv bn relu pool flatten linear
    names = [
        sorted(name for name, _ in last_layers(network, k, members=1).heads.member(0).named_parameters())
        for k in (1, 2, 3)
    ]
    assert names == [
        ["9.bias", "9.weight"],
        ["5.bias", "5.weight", "9.bias", "9.weight"],
        ["4.weight", "5.bias", "5.weight", "9.bias", "9.weight"],
    ]
    assert last_layers(network, 1, members=1).features(images()).shape == (B, 20), "the trunk goes up to the layer"


def test_heads_train_from_copies_or_afresh():
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    network = ds.nets.mlp(6, 3, (8, 7), dropout=0.3)
    copied = last_layers(network, "2", members=M, seed=5)
    fresh, larger = (last_layers(network, "2", members=m, seed=5, start="fresh") for m in (M, M + 2))
    other_seed = last_layers(network, "2", members=M, seed=6, start="fresh")
    weight = "body.network.3.weight"
    assert (copied.training, fresh.heads.training, fresh.heads.seed) == (True, True, 5)
    assert all(torch.equal(head, network[3].weight) for head in copied.heads.state_dict()[weight])
    fresh_weights = fresh.heads.state_dict()[weight]
    assert not any(torch.equal(head, network[3].weight) for head in fresh_weights)
    assert not torch.equal(fresh_weights[0], fresh_weights[1])
    assert torch.equal(fresh_weights, larger.heads.state_dict()[weight][:M]), "a member depends on M"
    assert not torch.equal(fresh_weights, other_seed.heads.state_dict()[weight])
    objective = functools.partial(ds.objectives.independent, loss="cross_entropy")
    before = copy.deepcopy(copied.backbone.state_dict())
    ds.fit(copied.heads, (copied.features(x), y), objective, epochs=1, batch_size=8, lr=0.1)
    trained = copied.heads.state_dict()[weight]
    assert not any(torch.equal(head, network[3].weight) for head in trained)
    assert not torch.equal(trained[0], trained[1]), "dropout is each member's own"
    same_state(before, copied.backbone.state_dict())


def test_batch_norm_starts_afresh_with_its_statistics():
    network = moved(ds.nets.cnn(2, 3, 8, (4, 5), batch_norm=True), images())
    trunk = last_layers(network, "3", members=2, start="fresh")
    assert not trunk.heads.state_dict()["body.network.5.running_mean"].any()
    assert network[5].running_mean.any()


def test_split_heads_are_saved_and_loaded(tmp_path):
    network = residual_network().eval()
    trunk = last_layers(network, "1", members=M, start="fresh")
    trunk.heads.save(tmp_path)
    loaded = last_layers(network, "1", members=M)
    loaded.heads = ds.Ensemble.load(tmp_path, lambda: loaded.heads.member(0))
    torch.testing.assert_close(loaded(images()), trunk(images()))


def test_a_layer_used_twice_goes_by_either_name():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
            self.two = self.one

        def forward(self, x):
            return self.head(self.two(torch.relu(self.one(x))))

    network, x = Twice().eval(), torch.randn(B, 6)
    for cut in ("one", "two", 1):
        trunk = last_layers(network, cut, members=2)
        torch.testing.assert_close(trunk.features(x), network.one(torch.relu(network.one(x))))
        torch.testing.assert_close(trunk(x)[1], network(x))


def test_functional_dropout_may_stand_before_the_cut_only(unchecked):
    class Foreign(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.third(self.second(nn.functional.dropout(self.first(x), 0.5, self.training)))

    network, x = Foreign().eval(), torch.randn(B, 6)
    torch.testing.assert_close(last_layers(network.train(), "second", members=2)(x)[0], network.eval()(x))
    with pytest.raises(ValueError, match="same steps after the cut in training and evaluation"):
        last_layers(network, "first", members=2)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) if x.sum() > 0 else x)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.second(self.first(x))


class TwoOutputs(TwoInputs):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.second(self.first(x))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize(
    ("network", "cut", "match"),
    [
        (residual_network, "2.conv1", r"one value .* got '2.conv1', where 2 pass \(.*\). Cut after the whole of '2'"),
        (residual_network, 2, r"got 2, where 2 pass \(.*\). Possible: 1 or 3"),
        (residual_network, 6, "leave a layer for the trunk, of 6 with parameters; got 6"),
        (residual_network, 0, "`cut` must be a whole number of at least 1; got 0"),
        (residual_network, True, "`cut` must be a whole number"),
        (residual_network, "5", "leave layers to train after it; got '5'. Cut earlier"),
        (residual_network, "2.conv3", "name a layer of the network; got '2.conv3'. Did you mean '2.conv"),
        (Backbone, "unused", "name a layer that the network calls; got 'unused'"),
        (Branching, "first", "`network` must be traceable by torch.fx; got Branching"),
        (TwoInputs, "first", "`network` must take one input; got x, mask"),
        (TwoOutputs, "first", "`network` must return one tensor; got a tuple"),
    ],
)
def test_wrong_cuts_are_refused(unchecked, network, cut, match):
    with pytest.raises(ValueError, match=match):
        last_layers(network(), cut, members=2)


def test_other_wrong_arguments_are_refused(unchecked):
    network = ds.nets.mlp(6, 3, (8,))
    with pytest.raises(ValueError, match="They are frozen: set requires_grad"):
        last_layers(copy.deepcopy(network).requires_grad_(False), "0", members=2)
    with pytest.raises(ValueError, match="`members` must be a whole number"):
        last_layers(network, "0", members=0)
    with pytest.raises(ValueError, match="`start` must be one of 'copy', 'fresh'; got 'fersh'. Did you mean 'fresh'"):
        last_layers(network, "0", members=2, start="fersh")
    with pytest.raises(ValueError, match=r"no `reset_parameters`; got 2 \(Scaled\)"):
        last_layers(nn.Sequential(nn.Linear(6, 3), nn.ReLU(), Scaled()), "1", members=2, start="fresh")
    with pytest.raises(TypeError, match="`network` must be an nn.Module; got function"):
        last_layers(residual_network, "0", members=2)


def test_layers_of_torch_are_taken_whole():
    network = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(24, 3)
    ).eval()
    x = torch.randn(B, 3, 8)
    trunk = last_layers(network, "0", members=2, start="copy")
    torch.testing.assert_close(trunk(x)[0], network(x))


def test_a_trunk_is_not_trained_but_its_heads_are():
    heads = ds.Ensemble(lambda: nn.Linear(4, 3), members=2)
    trunk = ds.SharedTrunk(nn.Linear(6, 4), heads)
    with pytest.raises(TypeError, match=r"trunk\.heads"):
        ds.fit(
            trunk,
            (torch.randn(8, 6), torch.randint(3, (8,))),
            functools.partial(ds.objectives.ldr, strength=1.0),
            epochs=1,
        )


@pytest.mark.parametrize("backend", ["loop", "vmap", "auto"])
@pytest.mark.parametrize("cut", ["1", None])
def test_a_trunk_is_an_ensemble_that_shares_its_backbone(backend, cut, tmp_path):
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.BatchNorm1d(6)).double()
    trunk = SharedTrunk(backbone, ds.Ensemble(lambda: ds.nets.mlp(6, 3, (5,), dropout=0.3).double(), M), cut=cut)
    trunk.heads.backend = backend
    ens = trunk.ensemble()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 4, generator=generator, dtype=torch.float64), torch.arange(24) % 3
    torch.testing.assert_close(ens.eval()(x), trunk.eval()(x))
    assert all(name.startswith("0.backbone.") for name in ens.shared)
    assert set(dict(backbone.named_parameters())) <= {name.removeprefix("0.backbone.") for name in ens.shared}
    before = backbone.state_dict()
    options = {"epochs": 5, "batch_size": 6, "lr": 0.05}
    independent = functools.partial(ds.objectives.independent, loss="cross_entropy")
    ds.fit(ens, (x, y), independent, **options)
    ds.fit(trunk.heads, (trunk.features(x), y), independent, **options)
    torch.testing.assert_close(ens.eval()(x), trunk.eval()(x), rtol=1e-8, atol=1e-10)
    same_state(before, ens.member(0)[0].backbone.state_dict())
    ens.save(tmp_path)
    loaded = ds.Ensemble.load(tmp_path, lambda: nn.Sequential(Features(backbone, cut), trunk.heads.member(0)))
    torch.testing.assert_close(loaded.eval()(x), trunk(x))


@pytest.mark.parametrize("backend", ["loop", "vmap", "batched"])
def test_heads_on_features_and_whole_members_train_alike(backend):
    """Dropout of the backbone drops nothing, and does not change the masks of heads."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4)).double()
    x, y = torch.randn(24, 6, dtype=torch.float64), torch.arange(24) % 3
    backbone(x)

    def head():
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)).double()

    trunk = SharedTrunk(backbone, ds.Ensemble(head, M))
    whole = trunk.ensemble()
    whole.backend = backend
    options = {"epochs": 7, "batch_size": 8, "lr": 0.01}
    objective = functools.partial(ds.objectives.augmented, loss="cross_entropy", pool="probability", beta=0.5)
    ds.fit(trunk.heads, (trunk.features(x), y), objective, **options)
    ds.fit(whole, (x, y), objective, **options)
    torch.testing.assert_close(whole.predict(x), trunk.eval()(x).detach(), rtol=1e-7, atol=1e-8)
    assert isinstance(backbone[3], nn.Dropout), "the backbone itself is left as it is"
