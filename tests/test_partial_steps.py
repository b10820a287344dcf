"""Steps that see more than labels, or fewer than all members: unlabelled data, drawn members, members in turn."""

from functools import partial
from itertools import combinations

import pytest
import torch
from networks import NETWORKS
from recording import Captures, recorded
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus.data.batches import batches
from dissensus.data.unlabelled import with_unlabelled
from dissensus.execution.graphs import captured
from dissensus.train import capture
from dissensus.train.sampling import MemberSampling

M = 4
ldr = partial(ds.objectives.ldr, strength=2.0)
a2d = partial(ds.objectives.a2d, strength=1.5)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
independent = partial(ds.objectives.independent, loss="cross_entropy")


def classes(shape=(6,), n=22, u=13):
    generator = torch.Generator().manual_seed(3)
    x, unlabelled = (torch.randn(size, *shape, generator=generator, dtype=torch.float64) for size in (n, u))
    return (x, torch.randint(3, (n,), generator=generator)), unlabelled


def ensemble_of(name="mlp", members=M, backend="auto", seed=1):
    return ds.Ensemble(NETWORKS[name][0], members, seed=seed, backend=backend).double()


def weights(ensemble):
    return {name: tensor.detach().clone() for name, tensor in ensemble.body.tensors().items()}


def assert_same(actual, expected, tolerance=1e-8):
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=tolerance, atol=tolerance / 100, msg=lambda m, n=name: f"{n}: {m}"
        )


# Drawn members


@pytest.mark.slow
def test_all_subsets_are_equally_likely_and_runs_draw_independently():
    sampling = MemberSampling.of(2, 4, [0, 1], torch.device("cpu"))
    chosen = torch.stack([sampling.sample(torch.tensor(step)) for step in range(6000)])
    assert chosen.shape == (6000, 2, 2)
    assert bool((chosen[..., 0] < chosen[..., 1]).all()), "in order, and nobody twice"
    for run in range(2):
        codes = chosen[:, run, 0] * 4 + chosen[:, run, 1]
        counts = torch.tensor([int((codes == a * 4 + b).sum()) for a, b in combinations(range(4), 2)])
        chi_squared = float(((counts - 1000) ** 2 / 1000).sum())
        assert chi_squared < 20.5, f"five degrees of freedom, p = 0.001: {counts.tolist()}"
    assert bool((chosen[:, 0] != chosen[:, 1]).any(-1).float().mean() > 0.5)


@pytest.mark.parametrize("size", [2, 3])
def test_mean_over_all_subsets_equals_the_full_loss_for_fixed_alpha(size):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (5,), generator=generator)
    alpha = ds.objectives.hardness(logits, labels)
    total = ldr(logits, labels, alpha=alpha).total
    sets = list(combinations(range(4), size))
    subset_totals = [4 / size * ldr(logits[list(subset)], labels, alpha=alpha).total for subset in sets]
    torch.testing.assert_close(torch.stack(subset_totals).mean(), total)
    biased_totals = [4 / size * ldr(logits[list(subset)], labels).total for subset in sets]
    assert abs(float(torch.stack(biased_totals).mean() - total)) > 1e-3, "alpha of the drawn members alone is biased"


@pytest.mark.parametrize("backend", ["loop", "batched", "vmap"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", ["mlp", "cnn_batch_norm"])
def test_drawn_members_take_the_steps_of_a_loop_by_hand(name, optimizer, backend):
    pair, _ = classes(NETWORKS[name][1])
    count, epochs, size = 2, 3, 8
    ensemble, reference = (ensemble_of(name, backend=kind) for kind in (backend, "loop"))
    momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
    ds.fit(
        ensemble,
        pair,
        ldr,
        epochs=epochs,
        batch_size=size,
        lr=0.03,
        weight_decay=0.02,
        optimizer=optimizer,
        active_members=count,
        seed=5,
        clip_norm=1.5,
        **momentum,
    )
    make = {"sgd": partial(torch.optim.SGD, momentum=0.9), "adamw": torch.optim.AdamW}[optimizer]
    networks = [reference.member(m).train() for m in range(M)]
    steppers = [make(network.parameters(), lr=0.03, weight_decay=0.02) for network in networks]
    sampling = MemberSampling.of(count, M, [5], torch.device("cpu"))
    feed = batches(pair, batch_size=size, seed=5, device=torch.device("cpu"))
    step = 0
    for epoch in range(epochs):
        for x, y, *_ in feed.epoch(epoch):
            chosen = sampling.sample(torch.tensor(step))[0].tolist()
            outputs = torch.stack([networks[m](x) for m in chosen])
            for m in chosen:
                steppers[m].zero_grad()
            (M / count * ldr(outputs, y).total).backward()
            for m in chosen:
                torch.nn.utils.clip_grad_norm_(networks[m].parameters(), 1.5)
                steppers[m].step()
            step += 1
    expected = ds.Ensemble.from_modules(networks).double()
    assert_same(weights(ensemble), weights(expected))


def test_backends_agree_on_drawn_members_with_dropout():
    pair, _ = classes(NETWORKS["two_dropouts"][1])
    trained = []
    for backend in ("loop", "vmap", "batched"):
        ensemble = ensemble_of("two_dropouts", backend=backend)
        ds.fit(ensemble, pair, independent, epochs=3, batch_size=8, lr=0.01, active_members=2)
        trained.append(weights(ensemble))
    assert_same(trained[1], trained[0])
    assert_same(trained[2], trained[0])


def test_members_that_are_not_drawn_stay_as_they_are():
    pair, _ = classes()
    ensemble = ensemble_of()
    before = weights(ensemble)
    history = ds.fit(ensemble, pair, ldr, epochs=1, batch_size=22, lr=0.1, weight_decay=0.5, active_members=2)
    chosen = set(MemberSampling.of(2, M, [0], torch.device("cpu")).sample(torch.tensor(0))[0].tolist())
    for name, tensor in weights(ensemble).items():
        for m in range(M):
            assert torch.equal(tensor[m], before[name][m]) == (m not in chosen), (name, m)
    member_losses = history.epochs[0]["member_loss"]
    assert [m for m in range(M) if member_losses[m] == member_losses[m]] == sorted(chosen), (
        "NaN for members that never were drawn"
    )


def test_drawing_all_members_equals_training_without_drawing():
    pair, _ = classes()
    ensembles = [ensemble_of(), ensemble_of()]
    histories = [
        ds.fit(e, pair, ldr, epochs=3, batch_size=8, active_members=k)
        for e, k in zip(ensembles, (None, M), strict=True)
    ]
    assert_same(weights(ensembles[0]), weights(ensembles[1]))
    assert histories[0].column("loss") == pytest.approx(histories[1].column("loss"))
    assert histories[0].epochs[-1]["member_loss"] == pytest.approx(histories[1].epochs[-1]["member_loss"])


def test_a_run_in_a_sweep_draws_what_it_draws_alone():
    pair, unlabelled = classes()
    grid = {"strength": [0.5, 3.0], "seed": [1, 2]}
    objective = ds.objectives.a2d
    options = {"epochs": 3, "batch_size": 8, "lr": 0.02, "active_members": 2, "unlabelled": unlabelled}
    swept = ds.sweep(NETWORKS["mlp"][0], pair, objective, grid=grid, members=M, **options)
    for i, point in enumerate(swept.points):
        single = ensemble_of(seed=point["seed"])
        ds.fit(single, pair, partial(objective, strength=point["strength"]), seed=point["seed"], **options)
        assert_same(weights(swept.run(i)), weights(single))


def test_drawn_training_resumes_to_the_bit(tmp_path):
    pair, unlabelled = classes()
    options = {"batch_size": 8, "lr": 0.02, "active_members": 2, "unlabelled": unlabelled, "checkpoint_seconds": 0.0}
    uninterrupted, interrupted = ensemble_of(backend="loop"), ensemble_of(backend="loop")
    ds.fit(uninterrupted, pair, a2d, epochs=4, **{**options, "checkpoint_seconds": None})

    def stop(moment):
        if moment.epoch == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ds.fit(interrupted, pair, a2d, epochs=4, checkpoint=tmp_path, progress=stop, **options)
    resumed = ensemble_of(backend="loop")
    ds.fit(resumed, pair, a2d, epochs=4, checkpoint=tmp_path, resume=True, **options)
    for name, tensor in weights(uninterrupted).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


@pytest.mark.parametrize("count", [0, M + 1, 1.5])
def test_impossible_numbers_of_members_are_refused(count, unchecked):
    with pytest.raises((ValueError, TypeError), match="active_members"):
        ds.fit(ensemble_of(), classes()[0], independent, epochs=1, active_members=count)


def test_an_objective_of_pairs_needs_two_members_and_smoothing_per_member_all():
    pair, _ = classes()
    with pytest.raises(ValueError, match="active_members"):
        ds.fit(ensemble_of(), pair, ldr, epochs=1, active_members=1)
    smooth = partial(independent, smoothing=[0.0, 0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match="smoothing"):
        ds.fit(ensemble_of(), pair, smooth, epochs=1, active_members=2)
    at_once, in_groups = ensemble_of(), ensemble_of()
    ds.fit(at_once, pair, smooth, epochs=2, batch_size=8)
    flat = in_groups.body.packed()
    state_bytes = 6 * flat.numel() * flat.element_size()
    history = ds.fit(in_groups, pair, smooth, epochs=2, batch_size=8, max_memory=state_bytes + 5000)
    assert not history.memory.startswith(f"{M} of"), history.memory
    assert_same(weights(in_groups), weights(at_once))


def test_members_of_different_kinds_are_not_drawn():
    mixed = ds.Ensemble.from_modules([torch.nn.Linear(6, 3), torch.nn.Sequential(torch.nn.Linear(6, 3))]).double()
    with pytest.raises(ValueError, match="active_members"):
        ds.fit(mixed, classes()[0], independent, epochs=1, active_members=1)


def test_nan_names_the_member_that_was_drawn():
    pair, _ = classes()
    chosen = MemberSampling.of(2, M, [0], torch.device("cpu")).sample(torch.tensor(0))[0].tolist()
    ensemble = ensemble_of()
    with torch.no_grad():
        next(iter(ensemble.body.trainable().values()))[chosen[1]] = torch.inf
    with pytest.raises(ds.TrainingDiverged, match=str(chosen[1])):
        ds.fit(ensemble, pair, independent, epochs=1, batch_size=8, active_members=2)


# Data without labels


def test_unlabelled_batches_go_round_in_new_orders_and_whole():
    (x, y), unlabelled = classes()
    device = torch.device("cpu")
    labelled = batches((x, y), batch_size=8, seed=0, device=device)
    feed = with_unlabelled(labelled, unlabelled, batch_size=8, seeds=[0], device=device)
    rows = []
    for epoch in range(4):
        for _, _, _, u in feed.epoch(epoch):
            assert len(u) == 8, "13 examples give one whole batch a round"
            rows.append([int((unlabelled == row).all(1).nonzero()) for row in u])
    assert all(len(set(batch)) == 8 for batch in rows)
    assert len({tuple(batch) for batch in rows}) == len(rows)
    epochs = [[u for _, _, _, u in feed.epoch(epoch)] for epoch in range(2)]
    second_epoch = [u for _, _, _, u in feed.epoch(1, 2)]
    assert torch.equal(second_epoch[0], epochs[1][2]), "an epoch can start in its middle"


@pytest.mark.parametrize("objective", [a2d, partial(ds.objectives.divdis, strength=0.7, balance=3.0)])
def test_fitting_with_unlabelled_data_equals_a_loop_by_hand(objective):
    pair, unlabelled = classes()
    ensemble, reference = ensemble_of(), ensemble_of()
    ds.fit(ensemble, pair, objective, epochs=3, batch_size=8, lr=0.02, optimizer="sgd", unlabelled=unlabelled, seed=7)
    networks = [reference.member(m).train() for m in range(M)]
    steppers = [torch.optim.SGD(network.parameters(), lr=0.02) for network in networks]
    device = torch.device("cpu")
    labelled = batches(pair, batch_size=8, seed=7, device=device)
    feed = with_unlabelled(labelled, unlabelled, batch_size=8, seeds=[7], device=device)
    for epoch in range(3):
        for x, y, _, u in feed.epoch(epoch):
            outputs, unlabelled_outputs = (torch.stack([network(part) for network in networks]) for part in (x, u))
            for stepper in steppers:
                stepper.zero_grad()
            objective(outputs, y, unlabelled=unlabelled_outputs).total.backward()
            for stepper in steppers:
                stepper.step()
    assert_same(weights(ensemble), weights(ds.Ensemble.from_modules(networks).double()))


def test_batch_norm_counts_labelled_and_unlabelled_passes():
    pair, unlabelled = classes((2, 8, 8))
    ensemble = ensemble_of("cnn_batch_norm", 2)
    ds.fit(ensemble, pair, a2d, epochs=1, batch_size=22, unlabelled=unlabelled, lr=0.0)
    counts = [t for name, t in ensemble.body.state().items() if name.endswith("num_batches_tracked")]
    assert counts
    assert all(bool((count == 2).all()) for count in counts)


def test_unlabelled_data_may_have_any_form():
    pair, unlabelled = classes()
    dummies = torch.zeros(len(unlabelled))
    trained = []
    for source in (unlabelled, (unlabelled, dummies), TensorDataset(unlabelled, dummies)):
        ensemble = ensemble_of()
        ds.fit(ensemble, pair, a2d, epochs=2, batch_size=8, unlabelled=source)
        trained.append(weights(ensemble))
    assert_same(trained[1], trained[0])
    assert_same(trained[2], trained[0])
    for loader in (
        DataLoader(unlabelled, 5),
        DataLoader(TensorDataset(unlabelled, dummies), 5, shuffle=True),
        TensorDataset(unlabelled),
    ):
        history = ds.fit(ensemble_of(), pair, a2d, epochs=2, batch_size=8, unlabelled=loader)
        assert history.epochs[-1]["agreement"] > 0


def test_members_in_groups_see_unlabelled_data_too():
    pair, unlabelled = classes()
    at_once, in_groups = ensemble_of(), ensemble_of()
    ds.fit(at_once, pair, a2d, epochs=2, batch_size=8, unlabelled=unlabelled)
    from dissensus.train.memory import COPIES

    flat = in_groups.body.packed()
    state_bytes = COPIES * flat.numel() * flat.element_size()
    history = ds.fit(in_groups, pair, a2d, epochs=2, batch_size=8, unlabelled=unlabelled, max_memory=state_bytes + 6000)
    assert not history.memory.startswith(f"{M} of"), history.memory
    assert_same(weights(in_groups), weights(at_once))


def shuffled(unlabelled, seed=3):
    return DataLoader(TensorDataset(unlabelled), 5, shuffle=True, generator=torch.Generator().manual_seed(seed))


def test_a_shuffled_loader_of_unlabelled_data_resumes_and_looking_changes_nothing(tmp_path):
    pair, unlabelled = classes()
    options = {"batch_size": 8, "lr": 0.02, "epochs": 4}
    uninterrupted, validated = ensemble_of(backend="loop"), ensemble_of(backend="loop")
    ds.fit(uninterrupted, pair, a2d, unlabelled=shuffled(unlabelled), **options)
    ds.fit(validated, pair, a2d, unlabelled=shuffled(unlabelled), validation=pair, keep="last", **options)
    assert_same(weights(validated), weights(uninterrupted))

    def stop(moment):
        if moment.epoch == 3:
            raise KeyboardInterrupt

    checkpointing = {**options, "checkpoint": tmp_path, "checkpoint_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        ds.fit(ensemble_of(backend="loop"), pair, a2d, unlabelled=shuffled(unlabelled), progress=stop, **checkpointing)
    resumed = ensemble_of(backend="loop")
    with pytest.raises(ds.StorageError, match="'unlabelled' differ"):
        ds.fit(resumed, pair, a2d, unlabelled=shuffled(unlabelled, seed=9), resume=True, **checkpointing)
    ds.fit(resumed, pair, a2d, unlabelled=shuffled(unlabelled), resume=True, **checkpointing)
    assert_same(weights(resumed), weights(uninterrupted))


def test_validation_sees_the_same_unlabelled_batch_at_every_epoch():
    pair, unlabelled = classes()
    history = ds.fit(ensemble_of(), pair, a2d, epochs=3, batch_size=8, unlabelled=unlabelled, validation=0.3, lr=0.0)
    values = history.column("validation_agreement")
    assert values[0] == values[1] == values[2] > 0


@pytest.mark.parametrize(
    ("unlabelled", "match"),
    [(None, "unlabelled=x"), (torch.zeros(0, 6, dtype=torch.float64), "at least one"), (3, "tensor")],
)
def test_missing_unlabelled_data_is_refused(unlabelled, match, unchecked):
    with pytest.raises((ValueError, TypeError), match=match):
        ds.fit(ensemble_of(), classes()[0], a2d, epochs=1, unlabelled=unlabelled)


@pytest.mark.parametrize("unlabelled", [torch.zeros(5, 7, dtype=torch.float64), torch.zeros(5, 6)])
def test_unlabelled_data_must_match_the_inputs(unlabelled):
    with pytest.raises(ValueError, match="unlabelled"):
        ds.fit(ensemble_of(), classes()[0], a2d, epochs=1, unlabelled=unlabelled)


def test_unlabelled_data_for_another_objective_is_refused():
    pair, unlabelled = classes()
    with pytest.raises(ValueError, match=r"objectives\.a2d"):
        ds.fit(ensemble_of(), pair, independent, epochs=1, unlabelled=unlabelled)


@pytest.mark.slow(cases=["two_dropouts-*"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["mlp", "cnn_batch_norm", "two_dropouts"])
def test_captured_steps_draw_and_disagree_as_eager_ones_do(name, device, monkeypatch):
    pair, unlabelled = classes(NETWORKS[name][1], n=40)
    pair, unlabelled = tuple(part.to(device) for part in pair), unlabelled.to(device)
    counts = Captures(captured if device == "cuda" else recorded)
    results = []
    for graph in (lambda engine: None, lambda engine: capture.GraphSteps(lambda: counts)):
        monkeypatch.setattr("dissensus.train.recipe.graph_steps", graph)
        ensemble = ensemble_of(name).to(device)
        history = ds.fit(ensemble, pair, a2d, epochs=4, batch_size=8, unlabelled=unlabelled, active_members=2)
        results.append((weights(ensemble), history.column("loss")))
    assert counts.captures == 1, "all batches have one shape"
    assert_same(results[1][0], results[0][0], 1e-6)
    assert results[0][1] == pytest.approx(results[1][1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_what_a_cpu_draws():
    pair, unlabelled = classes()
    trained = []
    for device in ("cpu", "cuda"):
        ensemble = ensemble_of().to(device)
        ds.fit(ensemble, pair, a2d, epochs=6, batch_size=8, unlabelled=unlabelled, active_members=2)
        trained.append({name: tensor.cpu() for name, tensor in weights(ensemble).items()})
    assert_same(trained[1], trained[0], 1e-7)


# One after the other


def test_sequential_training_is_a_fit_per_member_with_the_earlier_ones_frozen():
    pair, unlabelled = classes()
    options = {"epochs": 2, "batch_size": 8, "lr": 0.03, "seed": 4}
    objective = partial(ds.objectives.a2d, strength=2.0, classes="earlier")
    ensemble = ensemble_of(members=3)
    history = ds.fit(ensemble, pair, objective, unlabelled=unlabelled, sequential=True, **options)
    first = ensemble_of(members=3).subset([0])
    ds.fit(first, pair, independent, **options)
    for name, tensor in weights(first).items():
        torch.testing.assert_close(weights(ensemble)[name][:1], tensor)
    fresh = ensemble_of(members=3)
    second = ds.Ensemble.from_modules([ensemble.member(0), fresh.member(1)]).double()
    ds.fit(second, pair, objective, unlabelled=unlabelled, frozen=[0], **options)
    for name, tensor in weights(second).items():
        torch.testing.assert_close(weights(ensemble)[name][:2], tensor)
    assert [entry["member"] for entry in history.epochs] == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="two members or more"):
        ds.fit(ensemble_of(members=1), pair, objective, unlabelled=unlabelled, sequential=True, epochs=1)
    with pytest.raises(ValueError, match="sequential"):
        ds.fit(ensemble, pair, objective, unlabelled=unlabelled, sequential=True, frozen=[0], epochs=1)


LOSSES = {
    "brier": (3, lambda x: x[:, :3].argmax(1)),
    "squared_error": (1, lambda x: x[:, :1]),
    "gaussian_nll": (2, lambda x: x[:, :1]),
    "quantile": (3, lambda x: x[:, :1]),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("objective", ["independent", "augmented"])
def test_the_first_of_sequential_members_is_trained_on_the_loss_of_the_objective(loss, objective):
    width, target = LOSSES[loss]
    (x, _), _ = classes()
    objectives = {
        "independent": partial(ds.objectives.independent, loss=loss),
        "augmented": partial(ds.objectives.augmented, loss=loss, pool=ds.losses.named(loss).pools[0], beta=0.5),
    }
    options = {"epochs": 2, "batch_size": 8, "lr": 0.03, "seed": 4}
    build = partial(ds.nets.mlp, 6, width, (5,))
    ensemble, alone = (ds.Ensemble(build, members, backend="loop").double() for members in (2, 1))
    ds.fit(ensemble, (x, target(x)), objectives[objective], sequential=True, validation=0.2, **options)
    ds.fit(alone, (x, target(x)), objectives["independent"], validation=0.2, **options)
    assert_same(weights(ensemble.subset([0])), weights(alone))


def test_sequential_members_need_an_objective_whose_loss_is_known():
    pair, _ = classes()

    def mine(outputs, targets):
        return ds.objectives.independent(outputs, targets, loss="brier")

    ensemble = ensemble_of()
    before = weights(ensemble)
    with pytest.raises(ValueError, match=r"`sequential` must come with an objective whose loss is known.*got mine"):
        ds.fit(ensemble, pair, mine, sequential=True, epochs=1)
    assert_same(weights(ensemble), before, 0)


def test_pair_agreement_earlier_uses_the_earlier_members_class():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
    probs = logits.softmax(-1)
    expected = torch.zeros(6, dtype=torch.float64)
    for later in range(3):
        for earlier in range(later):
            for n in range(6):
                c = int(probs[earlier, n].argmax())
                p, q = probs[earlier, n, c], probs[later, n, c]
                expected[n] -= torch.log(p * (1 - q) + q * (1 - p))
    torch.testing.assert_close(ds.objectives.pair_agreement(logits, "earlier"), expected)
    symmetric = ds.objectives.pair_agreement(logits)
    reversed_order = ds.objectives.pair_agreement(logits.flip(0), "earlier")
    torch.testing.assert_close((expected + reversed_order) / 2, symmetric)


# Hyperparameters of members' own


def test_every_member_may_see_a_batch_of_its_own():
    (x, y), unlabelled = classes()
    factors = [0.5, 1.0, 2.0, 3.0]
    augment = [partial(lambda f, batch, generator: f * batch, f) for f in factors]
    ensemble = ensemble_of()
    ds.fit(ensemble, (x, y), independent, epochs=2, batch_size=8, lr=0.02, augment=augment)
    for m, factor in enumerate(factors):
        single = ensemble_of().subset([m])
        ds.fit(single, (factor * x, y), independent, epochs=2, batch_size=8, lr=0.02)
        for name, tensor in weights(single).items():
            torch.testing.assert_close(weights(ensemble)[name][m : m + 1], tensor)
    sampled = ensemble_of()
    ds.fit(sampled, (x, y), a2d, epochs=2, batch_size=8, augment=augment, unlabelled=unlabelled, active_members=2)
    swept = ds.sweep(
        NETWORKS["mlp"][0],
        (x, y),
        ds.objectives.a2d,
        grid={"strength": [1.5], "seed": [0, 1]},
        members=M,
        epochs=2,
        batch_size=8,
        augment=augment,
        unlabelled=unlabelled,
        active_members=2,
    )
    single = ensemble_of(seed=1)
    ds.fit(
        single, (x, y), a2d, epochs=2, batch_size=8, augment=augment, unlabelled=unlabelled, active_members=2, seed=1
    )
    assert_same(weights(swept.run(1)), weights(single))
    with pytest.raises(ValueError, match="augment"):
        ds.fit(ensemble_of(), (x, y), independent, epochs=1, augment=augment[:2])


def test_smoothing_per_member_equals_torchs():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (7,), generator=generator)
    shares = [0.0, 0.1, 0.4]
    result = ds.objectives.independent(logits, labels, loss="cross_entropy", smoothing=shares)
    expected = [
        F.cross_entropy(member_logits, labels, label_smoothing=s)
        for member_logits, s in zip(logits, shares, strict=True)
    ]
    torch.testing.assert_close(result.parts["member_loss"], torch.stack(expected))
    torch.testing.assert_close(result.total, torch.stack(expected).sum())
    for smoothing in ([0.1, 0.2], 1.5, [0.1, 0.2, -0.1]):
        with pytest.raises(ValueError, match="smoothing"):
            ds.objectives.independent(logits, labels, loss="cross_entropy", smoothing=smoothing)
    with pytest.raises(ValueError, match="cross_entropy"):
        ds.objectives.independent(logits, labels, loss="brier", smoothing=0.1)


def test_hyperparameters_with_similar_names_are_drawn_independently():
    drawn = ds.train.drawn_hyperparameters(2, augment_strength=(0.0, 1.0), augment_probability=(0.0, 1.0))
    assert drawn["augment_strength"] != drawn["augment_probability"]


def test_hyperparameters_are_drawn_within_their_ranges_and_per_member():
    drawn = ds.train.drawn_hyperparameters(200, 3, lr=(1e-4, 1e-2), smoothing=(0.0, 0.3))
    assert min(drawn["lr"]) >= 1e-4
    assert max(drawn["lr"]) <= 1e-2
    middle = sorted(drawn["lr"])[100]
    assert 4e-4 < middle < 2.5e-3, "half of a logarithmic range lies below its geometric mean"
    assert drawn["smoothing"][:5] == ds.train.drawn_hyperparameters(5, 3, smoothing=(0.0, 0.3))["smoothing"]
    assert drawn["lr"] != ds.train.drawn_hyperparameters(200, 4, lr=(1e-4, 1e-2))["lr"]
    with pytest.raises(ValueError, match="range"):
        ds.train.drawn_hyperparameters(2, lr=(1e-2, 1e-4))


def test_scales_reach_weights_and_not_biases():
    ensemble, unscaled = ensemble_of(members=2), ensemble_of(members=2)
    ds.train.scale_weights(ensemble, [1.0, 0.25])
    for name, tensor in weights(unscaled).items():
        factor = 0.25 if tensor.ndim > 2 else 1.0
        torch.testing.assert_close(weights(ensemble)[name][1], factor * tensor[1])
        assert torch.equal(weights(ensemble)[name][0], tensor[0])


def test_low_confidence_uses_the_predicted_class():
    log_probs = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.35, 0.25], [0.1, 0.1, 0.8]]).log()
    assert ds.train.low_confidence(log_probs, 0.45).tolist() == [False, True, False]
    assert not bool(ds.train.low_confidence(log_probs, 0.0).any())
