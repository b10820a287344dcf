"""Members that share tensors: stored once, computed once where that is possible, trained as separate networks are."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dissensus as ds
from dissensus import adapters
from dissensus.execution.backends import LOOP
from dissensus.execution.choice import TrialPass
from dissensus.execution.weights import Hanging
from dissensus.train.conversion import convert

independent = partial(ds.objectives.independent, loss="cross_entropy")
M = 3


def pretrained():
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)
    ).double()


BASE = pretrained()


def with_lora():
    return adapters.lora(BASE, rank=2, targets=["0", "3"], trained=["5.*"])


def with_head():
    network = copy.deepcopy(BASE).requires_grad_(False)
    network[5] = nn.Linear(6, 3).double()
    return network


BUILDS = {"lora": with_lora, "head": with_head}
every_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
every_backend = pytest.mark.parametrize("backend", ["loop", "vmap", "batched", "streams", "stacked", "auto"])


def data(n=24):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def in_evaluation(network):
    """A separate network in training, whose frozen batch norm does not move, as a shared one does not."""
    network.train()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm1d) and not layer.weight.requires_grad:
            layer.eval()
    return network


def separate(network, steps=20, lr=0.05, batch=8):
    x, y = data()
    in_evaluation(network)
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr, weight_decay=0.0)
    batches = list(zip(x.split(batch), y.split(batch), strict=True))
    for step in range(steps):
        part, target = batches[step % len(batches)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(part), target).backward()
        optimizer.step()
    return network


@every_build
@every_backend
def test_training_is_that_of_separate_networks(build, backend):
    ens = ds.Ensemble(build, M, backend=backend, shared="frozen")
    expected = [separate(ens.member(i), steps=21) for i in range(M)]
    ds.fit(ens, data(), independent, epochs=7, batch_size=8, lr=0.05, shuffle=False)
    for i, network in enumerate(expected):
        actual = dict(ens.member(i).state_dict())
        for name, tensor in network.state_dict().items():
            torch.testing.assert_close(actual[name], tensor, rtol=1e-8, atol=1e-10, msg=name)


@every_build
def test_shared_tensors_are_stored_once(build):
    ens = ds.Ensemble(build, M, shared="frozen")
    frozen = [name for name, p in build().named_parameters() if not p.requires_grad]
    assert set(frozen) <= set(ens.shared)
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} <= set(ens.shared)
    sizes = {name.removeprefix("body.network."): tuple(p.shape) for name, p in ens.named_parameters()}
    member = build()
    for name, p in member.named_parameters():
        assert sizes[name] == (tuple(p.shape) if name in frozen else (M, *p.shape)), name


@every_backend
def test_outputs_are_those_of_members(backend):
    ens = ds.Ensemble(with_lora, M, backend=backend, shared="frozen").eval()
    with torch.no_grad():
        for parameter in ens.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    x, _ = data()
    expected = torch.stack([ens.member(i)(x) for i in range(M)])
    torch.testing.assert_close(ens(x), expected)
    own = torch.randn(M, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(ens(own, per_member=True), torch.stack([ens.member(i)(own[i]) for i in range(M)]))


def test_what_members_have_in_common_is_computed_once():
    sizes = []

    class Counting(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            sizes.append(torch._C._functorch.is_batchedtensor(y))
            return y

    def build():
        return nn.Sequential(Counting(4, 5).requires_grad_(False), nn.Tanh(), Counting(5, 2))

    ens = ds.Ensemble(build, M, backend="vmap", shared="frozen")
    ens(torch.randn(6, 4))
    assert sizes[-2:] == [False, True], "one product for the shared layer, M for the others"


def test_layers_with_shared_buffers_stay_in_evaluation_mode():
    ens = ds.Ensemble(with_head, M, shared="frozen").train()
    before = ens.state_dict()["body.network.1.running_mean"].clone()
    ens(data()[0])
    assert ens.training
    torch.testing.assert_close(ens.state_dict()["body.network.1.running_mean"], before, rtol=0, atol=0)
    assert ens.eval().train().body.network[3].training


def test_batch_norm_behind_members_keeps_its_own_statistics():
    def build():
        network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
        network[1].weight.requires_grad_(False)
        network[1].bias.requires_grad_(False)
        return network

    ens = ds.Ensemble(build, M, shared=["1.weight", "1.bias"])
    assert ens.shared == ["1.weight", "1.bias"]
    ens.train()(data()[0])
    means = ens.state_dict()["body.network.1.running_mean"]
    assert means.shape == (M, 5)
    assert not torch.equal(means[0], means[1])


@every_build
def test_save_and_load_hold_shared_tensors_once(build, tmp_path):
    ens = ds.Ensemble(build, M, shared="frozen")
    ds.fit(ens, data(), independent, epochs=1, batch_size=8)
    ens.save(tmp_path / "e")
    again = ds.Ensemble.load(tmp_path / "e", build)
    assert again.shared == ens.shared
    torch.testing.assert_close(again.predict(data()[0]), ens.predict(data()[0]))
    from safetensors import safe_open

    (file,) = (tmp_path / "e").glob("*.safetensors")
    with safe_open(file, "pt") as stored:
        assert tuple(stored.get_slice(ens.shared[0]).get_shape()) == tuple(
            dict(build().named_parameters())[ens.shared[0]].shape
        )


def test_subset_soup_copy_and_pickle():
    import pickle

    ens = ds.Ensemble(with_lora, M, shared="frozen").eval()
    with torch.no_grad():
        for parameter in ens.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    x, _ = data()
    torch.testing.assert_close(ens.subset([2, 0])(x), ens(x)[[2, 0]])
    soup = ens.soup()
    torch.testing.assert_close(soup[0].base.weight, BASE[0].weight)
    torch.testing.assert_close(soup[0].up, torch.stack([ens.member(i)[0].up for i in range(M)]).mean(0))
    for other in (copy.deepcopy(ens), pickle.loads(pickle.dumps(ens))):
        assert other.shared == ens.shared
        torch.testing.assert_close(other(x), ens(x))
    changed = ens.subset([0])
    with torch.no_grad():
        dict(changed.body.shared_tensors())["0.base.weight"].zero_()
    assert ens.body.shared_tensors()["0.base.weight"].abs().sum() > 0, "a copy"


def test_a_sweep_stores_shared_tensors_once_for_all_runs(tmp_path):
    build = with_lora
    result = ds.sweep(
        build,
        data(),
        independent,
        grid={"lr": [0.01, 0.05], "seed": [0, 1]},
        members=2,
        epochs=3,
        batch_size=8,
        shuffle=False,
        shared="frozen",
    )
    (group,) = result.groups
    assert group.body.shared_tensors()["0.base.weight"].shape == (8, 4)
    alone = ds.Ensemble(build, 2, seed=1, shared="frozen")
    ds.fit(alone, data(), independent, epochs=3, batch_size=8, lr=0.05, shuffle=False, seed=1)
    torch.testing.assert_close(result.run(3).predict(data()[0]), alone.predict(data()[0]))
    result.save(tmp_path / "s")
    again = ds.Sweep.load(tmp_path / "s", build)
    torch.testing.assert_close(again.outputs(data()[0]), result.outputs(data()[0]))

    def differing():
        return nn.Sequential(nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 3)).double()

    with pytest.raises(ValueError, match="'0.weight', which members share, differs in member"):
        ds.sweep(differing, data(), independent, grid={"seed": [0, 1]}, members=2, epochs=1, shared="frozen")


def test_checkpoints_know_the_shared_weights(tmp_path):
    options = {"epochs": 4, "batch_size": 8, "lr": 0.05, "deterministic": True}
    whole = ds.Ensemble(with_lora, M, shared="frozen")
    ds.fit(whole, data(), independent, **options)

    class Interrupt(Exception):
        pass

    def stop(progress):
        if progress.epoch == 3:
            raise Interrupt

    ens = ds.Ensemble(with_lora, M, shared="frozen")
    with pytest.raises(Interrupt):
        ds.fit(ens, data(), independent, checkpoint=tmp_path, progress=stop, **options)
    other = ds.Ensemble(with_lora, M, shared="frozen")
    with torch.no_grad():
        other.body.shared_tensors()["0.base.weight"].add_(1.0)
    with pytest.raises((ValueError, ds.StorageError), match="frozen parameters|initial weights"):
        ds.fit(other, data(), independent, checkpoint=tmp_path, resume=True, **options)
    resumed = ds.Ensemble(with_lora, M, shared="frozen")
    ds.fit(resumed, data(), independent, checkpoint=tmp_path, resume=True, **options)
    torch.testing.assert_close(resumed.predict(data()[0]), whole.predict(data()[0]))


def test_frozen_tensors_that_modules_have_in_common_are_found():
    modules = [with_head() for _ in range(3)]
    ens = ds.Ensemble.from_modules(modules, shared="frozen")
    assert "0.weight" in ens.shared
    assert "5.weight" not in ens.shared
    x, _ = data()
    torch.testing.assert_close(ens.eval()(x), torch.stack([m.eval()(x) for m in modules]))
    with torch.no_grad():
        modules[1][0].weight.add_(1.0)
    partly = ds.Ensemble.from_modules(modules, shared="frozen")
    assert "0.weight" not in partly.shared
    assert "0.bias" in partly.shared
    torch.testing.assert_close(partly.eval()(x), torch.stack([m.eval()(x) for m in modules]))
    with pytest.raises(ValueError, match="'0.weight', which members share, differs in member 1"):
        ds.Ensemble.from_modules(modules, shared=["0.*"])


@pytest.mark.parametrize(
    ("build", "shared", "message"),
    [
        (lambda: nn.Linear(4, 3), "frozen", "'frozen' for networks with frozen parameters; got a network without"),
        (lambda: nn.Linear(4, 3), "*", "leave parameters that each member has for itself; got all of them"),
        (with_head, "encoder.*", "match names of parameters; got 'encoder"),
        (with_head, "0", r"match names of parameters; got '0'\. The layer\? Use '0\.\*'\."),
        (with_head, "frozn", r"match names of parameters; got 'frozn'\. Did you mean 'frozen'"),
        (with_head, lambda name: False, "choose parameters; got a function that chooses none"),
    ],
)
def test_wrong_choices_are_refused(build, shared, message):
    with pytest.raises(ValueError, match=f"`shared` must.*{message}"):
        ds.Ensemble(build, M, shared=shared)


def test_attacks_audits_and_twins_take_members_that_share():
    ens = ds.Ensemble(with_lora, M, shared="frozen")
    x, y = data()
    history = ds.fit(
        ens, (x, y), partial(ds.objectives.augmented, loss="cross_entropy", pool="score", beta=0.5), epochs=2, twin=True
    )
    assert history.twin.shared == ens.shared
    attacked = ds.attacks.fgsm(ens.eval(), x, y, epsilon=0.1, box=(-5.0, 5.0))
    assert attacked.inputs.shape == x.shape
    assert ds.audit_estimator(ens, x, y, task="classification").verdict


def test_building_does_not_keep_what_members_share():
    import gc
    import weakref

    trunks = []

    def build():
        network = with_head()
        trunks.append(weakref.ref(network[0].weight))
        return network

    ens = ds.Ensemble(build, 6, shared="frozen")
    gc.collect()
    assert sum(trunk() is not None for trunk in trunks) == 1
    assert len(ens) == 6


def test_while_members_are_built_there_are_two_of_what_they_share():
    import gc
    import weakref

    trunks, most = [], []

    def build():
        gc.collect()
        most.append(1 + sum(trunk() is not None for trunk in trunks))
        network = with_head()
        trunks.append(weakref.ref(network[0].weight))
        return network

    ds.Ensemble(build, 6, shared="frozen")
    assert max(most) == 2, "that of member 0, and that of the member that is being built"
    trunks.clear(), most.clear()
    grid = {"seed": [0, 1], "lr": [0.1, 0.2]}
    ds.sweep(build, data(), independent, grid=grid, members=3, shared="frozen", epochs=1)
    assert max(most) == 2


# --- parameters that are shared and trained ---------------------------------------------------------------------------


def plain():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).double()


PLAIN = plain()
SCALED = {
    "batch_ensemble": lambda: adapters.batch_ensemble(PLAIN, start="normal"),
    "tabm": lambda: adapters.tabm(PLAIN),
}
every_scaled = pytest.mark.parametrize("build", SCALED.values(), ids=SCALED)


def by_hand(ens, *, steps, lr=0.05, shared_lr=None, gradient="mean", batch=8, optimizer=torch.optim.AdamW, **options):
    """Separate networks that hold the same shared parameters; their gradients are averaged or summed."""
    members = [ens.member(i).train() for i in range(len(ens))]
    names = ens.shared
    for network in members[1:]:  # the very same tensors
        for name in names:
            path, _, key = name.rpartition(".")
            setattr(network.get_submodule(path), key, members[0].get_parameter(name))
    shared = [members[0].get_parameter(name) for name in names]
    held = {id(p) for p in shared}
    own = [[p for p in network.parameters() if id(p) not in held] for network in members]
    optimizers = [optimizer(parameters, lr, **options) for parameters in own]
    common = optimizer(shared, lr if shared_lr is None else shared_lr, **options)
    x, y = data()
    batches = list(zip(x.split(batch), y.split(batch), strict=True))
    for step in range(steps):
        part, target = batches[step % len(batches)]
        for each in (*optimizers, common):
            each.zero_grad()
        for network in members:
            nn.functional.cross_entropy(network(part), target).backward()
        if gradient == "mean":
            for parameter in shared:
                parameter.grad /= len(members)
        for each in (*optimizers, common):
            each.step()
    return members


def assert_equal_members(ens, members):
    for i, network in enumerate(members):
        actual = dict(ens.member(i).named_parameters())
        for name, parameter in network.named_parameters():
            torch.testing.assert_close(actual[name], parameter, rtol=1e-8, atol=1e-10, msg=f"{i}: {name}")


OPTIONS = {"epochs": 7, "batch_size": 8, "lr": 0.05, "shuffle": False}


@every_scaled
@pytest.mark.parametrize("backend", ["loop", "vmap", "auto"])
def test_shared_parameters_are_trained_by_the_mean_of_their_gradients(build, backend):
    ens = ds.Ensemble(build, M, backend=backend, shared=adapters.SHARED)
    expected = by_hand(ens, steps=21, weight_decay=0.0)
    ds.fit(ens, data(), independent, **OPTIONS)
    assert_equal_members(ens, expected)
    assert all(p.requires_grad and p.grad_fn is None for p in ens.parameters())


def test_their_gradient_may_be_the_sum_with_a_learning_rate_of_their_own():
    ens = ds.Ensemble(SCALED["tabm"], M, shared=adapters.SHARED)
    expected = by_hand(ens, steps=21, shared_lr=0.01, gradient="sum", optimizer=torch.optim.SGD, momentum=0.9)
    ds.fit(ens, data(), independent, **OPTIONS, optimizer="sgd", momentum=0.9, shared_lr=0.01, shared_gradient="sum")
    assert_equal_members(ens, expected)


class MuonAndAdamW:
    """Muon for matrices, AdamW for other parameters; either may be missing."""

    def __init__(self, parameters, lr, weight_decay):
        matrices = [p for p in parameters if p.ndim == 2]
        others = [p for p in parameters if p.ndim != 2]
        options = {"lr": lr, "weight_decay": weight_decay}
        self.each = [torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)] if matrices else []
        self.each += [torch.optim.AdamW(others, **options)] if others else []

    def zero_grad(self):
        for optimizer in self.each:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.each:
            optimizer.step()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has it from 2.9 on")
@every_scaled
def test_muon_takes_matrices_of_members_and_of_what_they_share(build, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())  # iterations in full precision
    ens = ds.Ensemble(build, M, shared=adapters.SHARED)
    options = {"weight_decay": 0.1, "shared_lr": 0.02}
    expected = by_hand(ens, steps=21, optimizer=MuonAndAdamW, **options)
    ds.fit(ens, data(), independent, epochs=7, batch_size=8, lr=0.05, shuffle=False, optimizer="muon", **options)
    assert_equal_members(ens, expected)


class NoMatrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(3).double()), nn.Parameter(torch.ones(3).double())

    def forward(self, x):
        return x[:, :3] * self.scale + self.shift


def test_muon_is_refused_where_nothing_is_a_matrix():
    with pytest.raises(ValueError, match="an optimizer other than 'muon' for networks without 2-D parameters"):
        ds.fit(ds.Ensemble(NoMatrix, M, shared="shift"), data(), independent, epochs=1, optimizer="muon")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activations_that_are_recomputed_give_the_same_training(dropout):
    def build():
        torch.manual_seed(3)
        layers = nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 3)
        return adapters.tabm(nn.Sequential(*layers).double())

    options = {"epochs": 7, "batch_size": 8, "lr": 0.05, "shared_lr": 0.02}
    stored, recomputed = (ds.Ensemble(build, M, shared=adapters.SHARED, backend="loop") for _ in range(2))
    ds.fit(stored, data(), independent, **options)
    history = ds.fit(recomputed, data(), independent, recompute=True, **options)
    assert "recomputed" in history.backend
    assert_equal_members(recomputed, [stored.member(i) for i in range(M)])
    for i in range(M):
        torch.testing.assert_close(recomputed.member(i).state_dict(), stored.member(i).state_dict())
    swept = ds.sweep(
        build,
        data(),
        independent,
        members=M,
        grid={"shared_lr": [0.02, 0.2]},
        shared=adapters.SHARED,
        recompute=True,
        **{name: value for name, value in options.items() if name != "shared_lr"},
    )
    assert_equal_members(swept.run(0), [stored.member(i) for i in range(M)])


def test_weight_decay_and_no_decay_reach_shared_parameters():
    ens = ds.Ensemble(SCALED["batch_ensemble"], M, shared=adapters.SHARED)
    plainly = by_hand(ens, steps=21, weight_decay=0.3)
    other = copy.deepcopy(ens)
    ds.fit(ens, data(), independent, **OPTIONS, weight_decay=0.3)
    assert_equal_members(ens, plainly)
    ds.fit(other, data(), independent, **OPTIONS, weight_decay=0.3, no_decay=["*base.weight"])
    assert other.member(0)[0].base.weight.norm() > ens.member(0)[0].base.weight.norm()


def test_clipping_is_apart_for_members_and_for_what_they_share():
    ens = ds.Ensemble(SCALED["tabm"], M, shared=adapters.SHARED)
    before = ens.body.shared_tensors()["0.base.weight"].detach().clone()
    ds.fit(ens, data(), independent, epochs=1, batch_size=24, lr=1.0, optimizer="sgd", shared_clip_norm=1e-3)
    moved = torch.cat([(ens.body.shared_tensors()[n] - p).flatten() for n, p in {"0.base.weight": before}.items()])
    assert 0 < moved.detach().norm() <= 1.001e-3


@every_scaled
def test_accumulated_batches_are_a_large_batch(build):
    large, small = (ds.Ensemble(build, M, shared=adapters.SHARED) for _ in range(2))
    ds.fit(large, data(), independent, epochs=3, batch_size=12, lr=0.05, shuffle=False)
    ds.fit(small, data(), independent, epochs=3, batch_size=4, accumulate=3, lr=0.05, shuffle=False)
    assert_equal_members(small, [large.member(i) for i in range(M)])


def test_averages_and_best_epochs_hold_shared_parameters():
    build = SCALED["tabm"]
    validation = (torch.randn(16, 4, dtype=torch.float64), torch.randint(3, (16,)))
    kept = {}
    for ema in (None, 0.6):
        ens = ds.Ensemble(build, M, shared=adapters.SHARED)
        history = ds.fit(
            ens, data(), independent, epochs=12, batch_size=8, lr=0.2, shuffle=False, validation=validation, ema=ema
        )
        best = ds.objectives.joint(ens.predict(validation[0]), validation[1], loss="cross_entropy", pool="probability")
        assert float(best.parts["ensemble"]) == pytest.approx(min(history.column("validation")), rel=1e-9)
        assert history.best_epoch < 12, "the last epoch is not the best, or this shows nothing"
        kept[ema] = history.column("validation")
    assert kept[None] != kept[0.6]


def test_training_resumes_with_shared_parameters(tmp_path):
    build = SCALED["batch_ensemble"]
    options = {
        "epochs": 4,
        "batch_size": 8,
        "lr": 0.05,
        "accumulate": 2,
        "ema": 0.9,
        "validation": 0.25,
        "deterministic": True,
    }
    whole = ds.Ensemble(build, M, shared=adapters.SHARED)
    ds.fit(whole, data(), independent, **options)

    class Interrupt(Exception):
        pass

    def stop(progress):
        if progress.epoch == 3:
            raise Interrupt

    with pytest.raises(Interrupt):
        ds.fit(
            ds.Ensemble(build, M, shared=adapters.SHARED),
            data(),
            independent,
            checkpoint=tmp_path,
            progress=stop,
            **options,
        )
    other = ds.Ensemble(build, M, shared=adapters.SHARED)
    with pytest.raises((ValueError, ds.StorageError), match="shared_lr"):
        ds.fit(other, data(), independent, checkpoint=tmp_path, resume=True, shared_lr=0.01, **options)
    resumed = ds.Ensemble(build, M, shared=adapters.SHARED)
    ds.fit(resumed, data(), independent, checkpoint=tmp_path, resume=True, **options)
    torch.testing.assert_close(resumed.predict(data()[0]), whole.predict(data()[0]))


def test_a_sweep_over_members_that_train_what_they_share_equals_its_fits():
    build = SCALED["tabm"]
    objective = partial(ds.objectives.augmented, loss="cross_entropy", pool="probability")
    grid = {"beta": [0.0, 0.6], "seed": [0, 1]}
    result = ds.sweep(build, data(), objective, grid=grid, members=2, shared=adapters.SHARED, **OPTIONS)
    for run, point in enumerate(result.points):
        alone = ds.Ensemble(build, 2, seed=point["seed"], shared=adapters.SHARED)
        ds.fit(alone, data(), partial(objective, beta=point["beta"]), **OPTIONS, seed=point["seed"])
        assert_equal_members(result.run(run), [alone.member(i) for i in range(2)])


def test_a_training_that_diverges_keeps_the_shared_parameters_from_before():
    ens = ds.Ensemble(SCALED["tabm"], M, shared=adapters.SHARED)
    x, y = data()
    with pytest.raises(ds.TrainingDiverged):
        ds.fit(
            ens,
            (x * 1e160, y),
            partial(ds.objectives.independent, loss=lambda f, y: (f**2).sum(-1) ** 4),
            epochs=3,
            lr=1e30,
            optimizer="sgd",
        )
    assert all(bool(p.isfinite().all()) for p in ens.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"watch": "member", "validation": 0.25}, "`watch` must be left out where members share"),
        ({"frozen": [0]}, "`frozen` must be left out where members share"),
        ({"active_members": 2}, "`active_members` must be left out"),
        ({"sequential": True}, "`sequential` must be left out"),
        ({"lr": [0.1, 0.1, 0.1]}, "`lr` must be one number where members share"),
        ({"optimizer": torch.optim.NAdam}, "`optimizer` must be a name, such as 'adamw', where members share"),
        ({"shared_gradient": "max"}, "`shared_gradient` must be"),
        ({"shared_lr": -1.0}, "`shared_lr` must be"),
    ],
)
def test_settings_without_a_meaning_are_refused(options, message, unchecked):
    ens = ds.Ensemble(SCALED["tabm"], M, shared=adapters.SHARED)
    before = {name: p.detach().clone() for name, p in ens.named_parameters()}
    with pytest.raises((ValueError, TypeError), match=message):
        ds.fit(ens, data(), independent, **{"epochs": 1, **options})
    for name, p in ens.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=0)


def test_tabm_is_that_of_its_package():
    package = pytest.importorskip("tabm")
    theirs = package.TabM.make(n_num_features=4, d_out=3, k=M, n_blocks=2, d_block=8, dropout=0.0).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    base = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    ens = ds.Ensemble(lambda: adapters.tabm(base), M, shared=adapters.SHARED)
    parts = {"weight": "base.weight", "r": "scale_in", "s": "scale_out", "bias": "bias"}
    tensors = {**ens.body.tensors(), **ens.body.shared_tensors()}
    with torch.no_grad():
        for block, layer in enumerate((0, 2)):
            for part, name in parts.items():
                tensors[f"{layer}.{name}"].copy_(getattr(theirs.backbone.blocks[block][0], part))
        tensors["4.weight"].copy_(theirs.output.weight.mT)
        tensors["4.bias"].copy_(theirs.output.bias)
    x, y = data()
    torch.testing.assert_close(ens(x), theirs(x).transpose(0, 1))
    # Its loss is the mean over members: gradients of what is shared are those of fit, the others are M times as small.
    nn.functional.cross_entropy(theirs(x).flatten(0, 1), y.repeat_interleave(M)).backward()
    before = tensors["0.base.weight"].detach().clone()
    ds.fit(ens, (x, y), independent, epochs=1, batch_size=24, lr=0.1, optimizer="sgd")
    moved = before - ens.body.shared_tensors()["0.base.weight"]
    torch.testing.assert_close(moved.detach(), 0.1 * theirs.backbone.blocks[0][0].weight.grad)


def with_dropout():
    torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 6)).double()
    return nn.Sequential(network, nn.Linear(6, 3).double())


@pytest.mark.parametrize(
    "shared", ["0.*", ["0.*"], lambda name: name.startswith("0.")], ids=["pattern", "list", "rule"]
)
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_dropout_in_shared_layers_drops_units_of_its_own_in_every_member(shared, backend):
    ens = ds.Ensemble(lambda: with_dropout().requires_grad_(False), M, backend=backend, shared=shared)
    assert ens.shared == ["0.0.weight", "0.0.bias", "0.3.weight", "0.3.bias"], "and no keys of dropout"
    ens.train()
    x, _ = data()
    expected = torch.stack([ens.member(i)(x) for i in range(M)])
    outputs = ens(x)
    torch.testing.assert_close(outputs, expected)
    assert not torch.allclose(outputs[0], outputs[1])


class DropsInCode(nn.Module):
    """A frozen parameter and a buffer beside functional dropout, as in a vision transformer."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64), requires_grad=False)
        self.register_buffer("mean", torch.full((4,), 0.1, dtype=torch.float64))
        self.head = nn.Linear(4, 3).double()

    def forward(self, x):
        return self.head(nn.functional.dropout((x - self.mean) * self.token, 0.4, self.training))


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_modules_with_layers_inside_and_shared_buffers_follow_the_mode(backend):
    options = {"epochs": 2, "batch_size": 8, "lr": 0.05}
    plain = ds.Ensemble(DropsInCode, M)
    sharing = ds.Ensemble(DropsInCode, M, backend=backend, shared="frozen")
    assert sharing.shared == ["token", "mean"]
    assert sharing.train().body.network.training
    for ens in (plain, sharing):
        ds.fit(ens, data(), independent, **options)
    for i in range(M):
        torch.testing.assert_close(sharing.member(i).state_dict(), plain.member(i).state_dict())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False).double(), nn.Linear(4, 4, bias=False).double()
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 3).double()

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("shared", ["first.*", "second.*", lambda name: name.startswith("second")])
def test_a_tied_weight_is_shared_if_one_of_its_places_is_chosen(shared):
    ens = ds.Ensemble(Tied, M, shared=shared)
    assert ens.shared == ["first.weight"]
    assert ens.body.network.second.weight is ens.body.network.first.weight
    assert ens.body.network.first.weight.shape == (4, 4)


class Remembering(nn.Module):
    def __init__(self, assigns):
        super().__init__()
        self.assigns = assigns
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)
        self.register_buffer("last", torch.zeros(24, 3, dtype=torch.float64))
        self.head = nn.Linear(4, 3).double()

    def forward(self, x):
        outputs = self.head(x * self.scale)
        if self.assigns:
            self.last = outputs.detach()
        else:
            self.last.copy_(outputs.detach())
        return outputs


@pytest.mark.parametrize("assigns", [False, True], ids=["copies", "assigns"])
@every_backend
def test_shared_buffers_that_a_pass_writes_to_are_refused(assigns, backend):
    ens = ds.Ensemble(lambda: Remembering(assigns), M, backend=backend, shared="frozen")
    before = ens.body.network.last
    with pytest.raises(ValueError, match="`shared` must leave out buffers that a forward pass writes to; got 'last'"):
        ens(data()[0])
    assert ens.body.network.last is before, "not a tensor of some pass"
    own = ds.Ensemble(lambda: Remembering(assigns), M, backend=backend, shared="scale")
    outputs = own(data()[0])
    torch.testing.assert_close(own.body.network.last, outputs.detach())


def test_a_soup_keeps_the_statistics_that_members_share():
    ens = ds.Ensemble(with_lora, M, shared="frozen").eval()
    soup = ens.soup(data()[0] + 3)
    torch.testing.assert_close(soup[1].running_mean, BASE[1].running_mean, rtol=0, atol=0)
    moved = ds.Ensemble(with_lora, M).soup(data()[0] + 3)
    assert not torch.equal(moved[1].running_mean, BASE[1].running_mean)


@pytest.mark.parametrize("kind", ["program", "onnx"])
def test_exported_files_hold_shared_tensors_once(kind, tmp_path):
    if kind == "onnx":
        pytest.importorskip("onnxscript")
    base = nn.Sequential(nn.Linear(4, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 3))
    x = torch.randn(5, 4)
    ens = ds.Ensemble(lambda: adapters.lora(base, rank=1, trained=["4.*"]), 6, shared="frozen").eval()
    path = tmp_path / "model.onnx"
    if kind == "program":
        program = ds.export.program(ens, x, task="classification")
        torch.testing.assert_close(program.module()(x)["probs"], ens(x).softmax(-1).mean(0))
        torch.export.save(program, path.with_suffix(".pt2"))
    else:
        ds.export.onnx(ens, path, x, task="classification")
    size = sum(p.numel() * p.element_size() for p in ens.parameters())
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 3 * size, "six copies would be five times as large"


@pytest.mark.parametrize("name", ["shared_lr", "shared_clip_norm", "shared_gradient"])
@pytest.mark.parametrize("shared", [None, "frozen"])
def test_settings_of_shared_parameters_want_some_that_are_trained(name, shared):
    options = {name: "sum" if name == "shared_gradient" else 0.1, "epochs": 1}
    message = f"`{name}` must be left out where members share no parameters that are trained"
    with pytest.raises(ValueError, match=message):
        ds.fit(ds.Ensemble(with_lora, M, shared=shared), data(), independent, **options)
    with pytest.raises(ValueError, match=message):
        ds.sweep(with_lora, data(), independent, members=2, grid={"seed": [0]}, shared=shared, **options)


@pytest.mark.parametrize(("shared", "error"), [(3, TypeError), ([3], TypeError), ([], ValueError)])
def test_other_choices_are_refused(shared, error):
    with pytest.raises(error, match="`shared` must (be 'frozen', patterns|choose parameters; got an empty list)"):
        ds.Ensemble(with_lora, M, shared=shared)


def test_files_of_other_networks_say_what_is_missing(tmp_path):
    ds.Ensemble(with_lora, M, shared="frozen").save(tmp_path / "e")
    with pytest.raises(ds.StorageError, match=r"does not fit the network"):
        ds.Ensemble.load(tmp_path / "e", lambda: nn.Linear(4, 3).double())


@pytest.mark.parametrize("build", [with_lora, lambda: adapters.tabm(BASE)], ids=["frozen", "trained"])
def test_checkpoints_of_members_that_share_are_not_converted(build, tmp_path):
    shared = "frozen" if build is with_lora else adapters.SHARED
    ens = ds.Ensemble(build, M, shared=shared)
    ds.fit(ens, data(), independent, epochs=1, checkpoint=tmp_path / "c")
    with pytest.raises(ds.StorageError, match="members that share some cannot be converted"):
        convert(tmp_path / "c", tmp_path / "n", build)


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_a_trunk_in_bfloat16_with_adapters_in_float32(backend):
    trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16()
    x, y = data()
    x = x.bfloat16()

    def build():
        return adapters.lora(trunk, rank=2)

    ens = ds.Ensemble(build, M, backend=backend, shared="frozen")
    nets = [ens.member(i) for i in range(M)]
    ds.fit(ens, (x, y), independent, epochs=3, batch_size=24, lr=1e-4, shuffle=False)
    for i, network in enumerate(nets):
        optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], 1e-4, weight_decay=0.0)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x).float(), y).backward()
            optimizer.step()
        actual = ens.member(i)
        assert actual[0].base.weight.dtype == torch.bfloat16
        assert actual[0].up.dtype == torch.float32
        assert torch.equal(actual[0].base.weight, trunk[0].weight)
        torch.testing.assert_close(actual[0].up, network[0].up, rtol=0, atol=2e-5)
        assert bool((actual[0].up != 0).any())
    result = ds.sweep(build, (x, y), independent, members=2, grid={"lr": [1e-4, 1e-3]}, epochs=1, shared="frozen")
    assert {p.dtype for p in result.run(1).parameters()} == {torch.bfloat16, torch.float32}


class Rooted(nn.Module):
    """The derivative of the shared parameter is infinite at 0, and that of the head is finite."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.head = nn.Linear(4, 3).double()

    def forward(self, x):
        return self.head(x + self.shift.abs().sqrt())


def test_a_gradient_of_shared_parameters_that_is_not_finite_is_named():
    ens = ds.Ensemble(Rooted, M, shared="shift")
    with pytest.raises(ds.TrainingDiverged, match="at step 0, in the gradient of what members share"):
        ds.fit(ens, data(), independent, epochs=1)
    assert not ens.body.network.shift.any(), "the weights from before"


class Counted(nn.Linear):
    """A linear layer that counts its forward passes, and the backward passes to its weight."""

    forwards = backwards = 0

    def forward(self, x):
        type(self).forwards += 1
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(self._count)
        return y

    def _count(self, _):
        type(self).backwards += 1


@pytest.mark.parametrize("backend", ["loop", "streams"])
@pytest.mark.parametrize(("trained", "members"), [(False, M), (True, M), (True, 1)])
def test_members_in_turn_compute_what_they_have_in_common_once(backend, trained, members):
    class Mine(Counted):
        pass

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.trunk = nn.Sequential(Mine(4, 5), nn.Tanh(), Mine(5, 5)).requires_grad_(trained)
            self.head = nn.Linear(5, 3)

        def forward(self, x):
            return self.head((self.trunk(2 * x) + x.mean()).relu())

    ens = ds.Ensemble(lambda: Network().double(), members, backend=backend, shared="trunk.*")
    x, _ = data()
    Mine.forwards = 0
    ens(x)  # two looks at one member; then the first shows what is common, and the second computes it for the others
    assert Mine.forwards == 2 * (2 + min(members, 2))
    Mine.forwards = Mine.backwards = 0
    outputs = ens(x)
    outputs.square().sum().backward()
    assert (Mine.forwards, Mine.backwards) == (2, 2 * trained)
    networks = [ens.member(i) for i in range(members)]
    expected = torch.stack([network(x) for network in networks])
    torch.testing.assert_close(outputs, expected)
    expected.square().sum().backward()
    if trained:
        total = sum(network.trunk[0].weight.grad for network in networks)
        torch.testing.assert_close(ens.body.network.trunk[0].weight.grad, total)


def test_members_in_turn_do_not_share_what_is_written_to_or_drawn():
    class Network(nn.Module):
        def __init__(self, draws):
            super().__init__()
            self.trunk, self.head, self.draws = nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 3), draws

        def forward(self, x):
            h = self.trunk(x)
            h[:, 0] = h[:, 0] * self.head.bias[0]
            return self.head(h + torch.randn_like(h) if self.draws else h.relu_())

    x, _ = data()
    ens = ds.Ensemble(lambda: Network(False).double(), M, backend="loop", shared="frozen")
    for _ in range(2):
        torch.testing.assert_close(ens(x), torch.stack([ens.member(i)(x) for i in range(M)]))
    drawing = ds.Ensemble(lambda: Network(True).double(), M, backend="loop", shared="frozen").eval()
    drawing(x)
    torch.manual_seed(0)
    outputs = drawing(x)
    torch.manual_seed(0)
    torch.testing.assert_close(outputs, torch.stack([drawing.member(i)(x) for i in range(M)]))


def test_constants_beside_frozen_layers_are_shared():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(4, 5)).requires_grad_(False)
            self.trunk.register_buffer("positions", torch.arange(5), persistent=False)
            self.trunk.register_buffer("count", torch.zeros(()))
            self.trunk.add_module("rotary", nn.Module())
            self.trunk.rotary.register_buffer("frequencies", torch.ones(5), persistent=False)
            self.aside = nn.Module()
            self.aside.register_buffer("constant", torch.ones(5), persistent=False)
            self.head = nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.trunk[0](x) + self.trunk.positions)

    shared = ds.Ensemble(Network, M, shared="frozen").shared
    assert set(shared) == {"trunk.0.weight", "trunk.0.bias", "trunk.positions", "trunk.rotary.frequencies"}


class Trunk(nn.Module):
    """A frozen layer and a head; what lies between them is a test's."""

    def __init__(self, between):
        super().__init__()
        torch.manual_seed(3)
        self.trunk, self.head, self.between = nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 3), between

    def forward(self, x):
        return self.head(self.between(self.trunk(x) * 1.0, self.head.bias))


def read_before_and_after_a_write(h, _):
    before = h.relu()
    h.add_(1)
    return before + 2 * h.relu()


def one_of_two_equal_tensors_written_to(h, bias):
    first, second, zeros, others = h.clone(), h.clone(), torch.zeros(5), torch.zeros(5)
    first.add_(bias.sum())
    zeros.add_(1)
    return first + 3 * second + zeros + 7 * others


def written_to_behind_autograd(h, bias):
    h.data.mul_(bias.detach().sum())
    return h


def with_a_hook(h, _):
    if h.requires_grad:
        h.register_hook(lambda gradient: 2 * gradient)
    return h


@pytest.mark.parametrize(
    "between",
    [read_before_and_after_a_write, one_of_two_equal_tensors_written_to, written_to_behind_autograd, with_a_hook],
)
def test_members_in_turn_take_no_result_that_would_differ_in_them(between):
    ens = ds.Ensemble(lambda: Trunk(between).double(), M, backend="loop", shared="frozen")
    for _ in range(2):  # the first pass looks for random draws
        x = data()[0].requires_grad_()
        outputs, expected = ens(x), torch.stack([ens.member(i)(x) for i in range(M)])
        torch.testing.assert_close(outputs, expected)
        gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in (outputs, expected)]
        torch.testing.assert_close(*gradients)


def test_members_in_turn_drop_units_of_their_own_in_functions_of_shared_layers():
    class Dropping(nn.Linear):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5, self.training)

    def build():
        torch.manual_seed(3)
        return nn.Sequential(Dropping(4, 64).requires_grad_(False), nn.Linear(64, 3)).double()

    loop, vmap = (ds.Ensemble(build, M, backend=backend, shared="frozen").train() for backend in ("loop", "vmap"))
    for _ in range(2):
        outputs = loop(data()[0])
        torch.testing.assert_close(outputs, vmap(data()[0]))
        assert not torch.equal(outputs[0], outputs[1])


# --- members that have nothing of their own to train ------------------------------------------------------------------


class WithMask(nn.Module):
    """Weights that all members train, behind features or a mask that are a member's own."""

    def __init__(self, masked):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8).double(), nn.Linear(8, 3).double()
        self.masked = masked
        if masked:
            self.register_buffer("mask", (torch.rand(8) > 0.5).double())
        else:
            self.first.requires_grad_(False)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.last(hidden * self.mask if self.masked else hidden)


@pytest.mark.parametrize("backend", ["loop", "vmap", "batched"])
@pytest.mark.parametrize("masked", [False, True], ids=["features", "mask"])
def test_members_may_differ_in_what_is_not_trained_alone(masked, backend):
    shared = ["first.*", "last.*"] if masked else "last.*"
    ens = ds.Ensemble(partial(WithMask, masked), M, backend=backend, shared=shared)
    assert not torch.equal(*(ens.member(i).mask if masked else ens.member(i).first.weight for i in (0, 1)))
    expected = [ens.member(i) for i in range(M)]
    for network in expected[1:]:
        network.last = expected[0].last
        if masked:
            network.first = expected[0].first
    trained = [p for p in expected[0].parameters() if p.requires_grad]
    optimizer, (x, y) = torch.optim.AdamW(trained, 0.02, weight_decay=0.0), data()
    for step in range(21):
        part = slice(8 * (step % 3), 8 * (step % 3) + 8)
        optimizer.zero_grad()
        (sum(nn.functional.cross_entropy(network(x[part]), y[part]) for network in expected) / M).backward()
        nn.utils.clip_grad_norm_(trained, 0.3)
        optimizer.step()
    history = ds.fit(ens, data(), independent, **{**OPTIONS, "lr": 0.05}, shared_lr=0.02, clip_norm=0.3)
    assert history.backend == backend
    assert_equal_members(ens, expected)
    torch.testing.assert_close(ens.eval()(x), torch.stack([network(x) for network in expected]))


def test_a_sweep_over_members_with_masks_of_their_own_equals_its_fits():
    build, shared = partial(WithMask, True), ["first.*", "last.*"]
    options = {"epochs": 3, "batch_size": 8, "lr": 0.05}
    grid = {"shared_lr": [0.01, 0.1], "seed": [0, 1]}
    swept = ds.sweep(build, data(), independent, grid=grid, members=M, shared=shared, **options)
    ens = ds.Ensemble(build, M, seed=1, shared=shared)
    ds.fit(ens, data(), independent, **options, shared_lr=0.1, seed=1)
    assert swept.points[3] == {"shared_lr": 0.1, "seed": 1}
    assert_equal_members(swept.run(3), [ens.member(i) for i in range(M)])


def test_members_that_differ_in_statistics_alone_are_one_network():
    def build():
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.1))

    with pytest.raises(ValueError, match="leave parameters that each member has for itself; got all of them"):
        ds.Ensemble(build, M, shared=["0.*", "1.weight", "1.bias"])


# --- what choosing a backend and autocast make of shared weights ------------------------------------------------------


class CountedProducts(TorchDispatchMode):
    """Counts products and casts."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[
            func.overloadpacket.__name__, tuple(args[0].shape) if args and isinstance(args[0], torch.Tensor) else ()
        ] += 1
        return func(*args, **(kwargs or {}))

    def products(self):
        return sum(n for (name, _), n in self.counts.items() if name in ("mm", "addmm", "bmm", "baddbmm"))


def test_gradients_of_shared_weights_are_part_of_what_choosing_a_backend_measures():
    ens = ds.Ensemble(SCALED["batch_ensemble"], M, backend="loop", shared=adapters.SHARED)
    x, _ = data()
    ens(x)
    with CountedProducts() as real:
        ens(x).square().sum().backward()
    body = ens.body
    trial = TrialPass(body.skeleton, Hanging(body.trainable(), M), body.state(), x, False)
    with CountedProducts() as tried:
        trial.whole(LOOP.run)
    assert tried.products() == real.products()
    assert all(p.grad is not None for p in body.shared_trainable().values()), "from the real pass"


@pytest.mark.parametrize("backend", ["loop", "vmap", "batched", "streams"])
def test_autocast_casts_a_frozen_weight_once_for_all_members(backend):
    def build():
        network = copy.deepcopy(PLAIN).float()
        return adapters.lora(network, rank=2, targets="0", trained="4.*")

    ens = ds.Ensemble(build, M, backend=backend, shared="frozen")
    with torch.no_grad():
        for parameter in ens.parameters():
            parameter.normal_(0, 0.1)
    x = data()[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        ens(x)
        with CountedProducts() as counted:
            outputs = ens(x)
        expected = torch.stack([member(x) for member in ens])
    assert counted.counts["_to_copy", (6, 8)] == 1
    torch.testing.assert_close(outputs, expected, rtol=0.02, atol=0.02, check_dtype=False)
    assert {p.dtype for p in ens.parameters()} == {torch.float32}


def test_weights_that_other_code_reads_are_not_cast():
    class Tied(nn.Module):
        """Reads a weight as a table, and calls a layer of it."""

        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.own, self.out.weight = nn.Linear(4, 4), self.table.weight
            self.table.weight.requires_grad_(False)
            self.seen = []

        def forward(self, x):
            self.seen.append(self.table(x).dtype)
            return self.out(self.own(self.table(x)))

    ens = ds.Ensemble(Tied, M, backend="loop", shared="frozen")
    x = torch.tensor([0, 1, 4])
    with torch.autocast("cpu", torch.bfloat16):
        outputs = ens(x)
        torch.testing.assert_close(outputs, torch.stack([member(x) for member in ens]), rtol=0, atol=0)
    assert set(ens.body.network.seen) == {torch.float32}
