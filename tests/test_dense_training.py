"""Training of dense outputs: one class per pixel, or per token."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds

M, N, C, SIZE, WORDS, LENGTH = 3, 12, 3, 5, 7, 4
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(N, 2, SIZE, SIZE, generator=GENERATOR).double()
MASKS = torch.randint(0, C, (N, SIZE, SIZE), generator=GENERATOR)
MASKS = torch.where(torch.rand(MASKS.shape, generator=GENERATOR) < 0.2, -100, MASKS)
TOKENS = torch.randint(0, WORDS, (N, LENGTH + 1), generator=GENERATOR)
SENTENCES, NEXT = TOKENS[:, :-1], torch.where(torch.rand(N, LENGTH, generator=GENERATOR) < 0.2, -100, TOKENS[:, 1:])
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.2], dtype=torch.float64)
cross_entropy = functools.partial(ds.objectives.independent, loss="cross_entropy")
STEPS = {"epochs": 7, "batch_size": 4, "lr": 0.05, "optimizer": "sgd", "momentum": 0.9, "shuffle": False}  # 21 steps


def segmentation():
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, C, 3, padding=1))


class Language(nn.Module):
    """A causal language model: a recurrent network of tokens ``[B, T]`` with logits ``[B, T, V]``."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, 6), nn.Linear(6, WORDS)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        past = hidden.cumsum(1) / torch.arange(1, tokens.shape[1] + 1, device=tokens.device).unsqueeze(1)
        return self.head(torch.tanh(self.mix(past)))


CASES = {
    "segmentation": (segmentation, IMAGES, MASKS, 2, 1),
    "language": (Language, SENTENCES, NEXT, -1, 2),
}
"""The network, inputs, labels, the axis of classes in member outputs, and in a module's own outputs."""


def fitted(name, objective=cross_entropy, backend="loop", data=None, seed=0, **options):
    build, x, y, axis, _ = CASES[name]
    ens = ds.Ensemble(build, M, seed=seed, backend=backend).double()
    settings = {**STEPS, "ignore_index": -100, "class_axis": axis, "seed": seed, **options}
    return ens, ds.fit(ens, (x, y) if data is None else data, objective, **settings)


def flat(ens):
    return torch.cat([p.detach().flatten() for p in ens.parameters()])


@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("name", CASES)
def test_training_equals_torch_on_separate_modules(name, backend):
    build, x, y, _, axis = CASES[name]
    options = {"label_smoothing": 0.1}
    weights = CLASS_WEIGHTS if name == "segmentation" else torch.linspace(0.5, 2, WORDS, dtype=torch.float64)
    ens, _ = fitted(name, backend=backend, class_weights=weights, **options)
    beginning = ds.Ensemble(build, M, backend="loop").double()
    for i in range(M):
        network = beginning.member(i).train()
        optimiser = torch.optim.SGD(network.parameters(), lr=STEPS["lr"], momentum=STEPS["momentum"])
        for _ in range(STEPS["epochs"]):
            for rows in torch.arange(N).split(STEPS["batch_size"]):
                optimiser.zero_grad()
                outputs = network(x[rows]).movedim(axis, 1)
                F.cross_entropy(outputs, y[rows], weight=weights, **options).backward()
                optimiser.step()
        for key, tensor in network.state_dict().items():
            torch.testing.assert_close(ens.member(i).state_dict()[key], tensor)


def test_dense_outputs_need_no_settings_where_classes_follow_the_batch():
    y = MASKS.clamp_min(0)
    ens, _ = fitted("segmentation", data=(IMAGES, y), ignore_index=None)
    same, _ = fitted("segmentation", data=(IMAGES, y))
    torch.testing.assert_close(flat(ens), flat(same))


@pytest.mark.parametrize("name", CASES)
def test_validation_and_early_stopping_watch_the_mean_over_positions_that_count(name):
    _, x, y, _, axis = CASES[name]
    ens, history = fitted(name, validation=(x, y), keep="last", label_smoothing=0.3)
    pooled = ens.predict(x).softmax(axis + 1).mean(0).log().movedim(axis, 1)
    assert history.column("validation")[-1] == pytest.approx(F.nll_loss(pooled, y).item())
    loader = DataLoader(TensorDataset(x, y), 5)
    _, loaded = fitted(name, validation=loader, keep="last", label_smoothing=0.3)
    assert loaded.column("validation") == pytest.approx(history.column("validation"))
    ens, history = fitted(name, validation=(x, y), watch="member", patience=2, epochs=30, lr=2.0)
    outputs = ens.predict(x).movedim(axis + 1, 2)
    own = [F.cross_entropy(member, y).item() for member in outputs]
    best = torch.tensor(history.column("validation")).min(0).values
    torch.testing.assert_close(torch.tensor(own), best)


@pytest.mark.parametrize("name", CASES)
def test_a_sweep_of_dense_outputs_equals_separate_fits(name):
    build, x, y, axis, _ = CASES[name]
    augmented = functools.partial(ds.objectives.augmented, loss="cross_entropy", pool="probability")
    options = {**STEPS, "ignore_index": -100, "class_axis": axis, "class_weights": "balanced", "validation": 0.25}
    options |= {"epochs": 2, "label_smoothing": 0.1}
    single = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        swept = ds.sweep(build, (x, y), augmented, grid={"beta": [0.0, 0.6], "seed": [0, 3]}, members=M,
                         backend="loop", **options)  # fmt: skip
        for number, point in enumerate(swept.points):
            ens = ds.Ensemble(build, M, seed=point["seed"], backend="loop")
            objective = functools.partial(augmented, beta=point["beta"])
            history = ds.fit(ens, (x, y), objective, seed=point["seed"], **options)
            torch.testing.assert_close(swept.run(number).predict(x), ens.predict(x))
            assert swept.history(number).column("validation") == pytest.approx(history.column("validation"))
    finally:
        torch.set_default_dtype(single)


OBJECTIVES = {
    "augmented": functools.partial(ds.objectives.augmented, loss="cross_entropy", pool="probability", beta=0.5),
    "joint": functools.partial(ds.objectives.joint, loss="brier", pool="score"),
    "negative_correlation": functools.partial(ds.objectives.negative_correlation, loss="cross_entropy", strength=0.5),
    "adp": ds.objectives.adp,
    "ldr": functools.partial(ds.objectives.ldr, strength=0.1),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", CASES)
def test_objectives_of_interacting_members_see_positions_as_examples(name, objective):
    """A network whose outputs are flattened by hand trains the same."""
    axis = CASES[name][3]

    def by_hand(outputs, targets):
        flat_outputs = outputs.movedim(axis, -1).flatten(1, -2)
        counted = (targets.flatten() != -100).nonzero().flatten()
        return OBJECTIVES[objective](flat_outputs[:, counted], targets.flatten()[counted])

    options = {"epochs": 2, "lr": 0.01}
    ens, _ = fitted(name, OBJECTIVES[objective], **options)
    expected, _ = fitted(name, by_hand, ignore_index=None, class_axis=2, **options)
    torch.testing.assert_close(flat(ens), flat(expected))


def test_unlabelled_images_and_attacked_images_are_positions_too():
    options = {"epochs": 2, "ignore_index": None, "data": (IMAGES, MASKS.clamp_min(0))}
    one, _ = fitted("segmentation", ds.objectives.a2d, unlabelled=IMAGES[:6], **options)
    other, _ = fitted("segmentation", ds.objectives.a2d, unlabelled=IMAGES[:6], **options, class_weights=[1, 1, 1])
    torch.testing.assert_close(flat(one), flat(other))
    language = {"epochs": 2, "ignore_index": None, "data": (SENTENCES, NEXT.clamp_min(0))}
    ens, _ = fitted("language", ds.objectives.a2d, unlabelled=SENTENCES[:6], **language)
    assert bool(flat(ens).isfinite().all())


def test_bagging_and_weights_of_images_and_of_pixels():
    counts = ds.data.bootstrap_counts(N, 0, range(M)).double()
    whole = {"batch_size": N, "epochs": 1, "momentum": 0.0}
    ens, _ = fitted("segmentation", bootstrap=True, **whole)
    pixels = torch.rand(MASKS.shape, generator=torch.Generator().manual_seed(1)).double()
    loader = DataLoader(TensorDataset(IMAGES, MASKS, pixels), N)
    weighted, _ = fitted("segmentation", data=loader, unpack=lambda batch: batch, **whole)
    beginning = ds.Ensemble(segmentation, M, backend="loop").double()
    for i in range(M):
        for trained, weights in ((ens, counts[i].view(-1, 1, 1)), (weighted, pixels)):
            network = beginning.member(i).train()
            weights = weights * (MASKS != -100)
            losses = F.cross_entropy(network(IMAGES), MASKS, reduction="none")
            loss = (weights * losses).sum() / weights.sum()
            expected = [p - STEPS["lr"] * g for p, g in zip(
                network.parameters(), torch.autograd.grad(loss, list(network.parameters())), strict=True
            )]  # fmt: skip
            for value, parameter in zip(expected, trained.member(i).parameters(), strict=True):
                torch.testing.assert_close(parameter.detach(), value.detach())


def test_an_augmentation_turns_images_and_masks_together():
    def flipped(x, y, generator):
        turn = torch.rand(len(x), generator=generator) < 0.5
        return torch.where(turn.view(-1, 1, 1, 1), x.flip(-1), x), torch.where(turn.view(-1, 1, 1), y.flip(-1), y)

    seen = []

    def recorded(x, y, generator):
        seen.append(flipped(x, y, generator))
        return seen[-1]

    ens, _ = fitted("segmentation", augment=recorded)
    expected, _ = fitted("segmentation", data=[*seen], batch_size=4, epochs=1)
    torch.testing.assert_close(flat(ens), flat(expected))


def test_classes_at_another_axis_and_labels_out_of_range_are_refused_with_the_fix():
    with pytest.raises(ValueError, match=r"`targets` must have shape .* Classes last.*class_axis=-1"):
        fitted("language", class_axis=2)
    wrong = MASKS.clone()
    wrong[2, 1, 1] = C
    with pytest.raises(ValueError, match="be labels from 0 to 2; got labels from 0 to 3"):
        fitted("segmentation", data=(IMAGES, wrong))
    with pytest.raises(ValueError, match="be labels from 0 to 2; got labels from 0 to 3"):
        fitted("segmentation", data=DataLoader(TensorDataset(IMAGES, wrong), 4))
    with pytest.raises(ValueError, match="be labels from 0 on; got labels from -100 to 2"):
        fitted("segmentation", ignore_index=None)
    with pytest.raises(ValueError, match=r"`class_weights` must have shape \[C=3\]; got \[4\]"):
        fitted("segmentation", class_weights=[1, 1, 1, 1])


def test_dense_predictions_come_with_their_targets():
    ens, _ = fitted("segmentation", epochs=1)
    outputs, targets = ens.predict(DataLoader(TensorDataset(IMAGES, MASKS), 5), targets=True)
    assert outputs.shape == (M, N, C, SIZE, SIZE)
    assert torch.equal(targets, MASKS)
