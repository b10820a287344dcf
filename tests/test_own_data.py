"""Data of any form in training and prediction: structured inputs, arrays, frames, loaders, streams, weights."""

import functools
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import dissensus as ds

N, M = 24, 3
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 4, generator=GENERATOR)
EXTRA = torch.randn(N, 2, generator=GENERATOR)
LABELS = torch.randint(0, 3, (N,), generator=GENERATOR)
cross_entropy = functools.partial(ds.objectives.independent, loss="cross_entropy")


class Two(nn.Module):
    """Two named inputs, the second of which may be left out."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 8), nn.Linear(2, 8), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x, extra=None):
        hidden = self.first(x)
        if extra is not None:
            hidden = hidden + self.second(extra)
        return self.last(torch.relu(self.norm(hidden)))


def build():
    return ds.nets.mlp(4, 3, (8,))


def trained(data, network=build, **options):
    ens = ds.Ensemble(network, M, backend=options.pop("backend", "loop"))
    ds.fit(ens, data, options.pop("objective", cross_entropy), **{"epochs": 2, "batch_size": 8, "lr": 0.01, **options})
    return ens


def weights(ens):
    return torch.cat([p.detach().flatten() for p in ens.parameters()])


def assert_same(one, other):
    torch.testing.assert_close(weights(one), weights(other), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("backend", ["loop", "vmap", "auto"])
@pytest.mark.parametrize("inputs", [{"x": X, "extra": EXTRA}, (X, EXTRA), [X, EXTRA]], ids=["dict", "tuple", "list"])
def test_training_on_several_inputs_equals_separate_training(inputs, backend):
    ens = ds.Ensemble(Two, M, backend=backend).double()
    alone = [ens.member(i).train() for i in range(M)]
    as_double = {name: t.double() for name, t in {"x": X, "extra": EXTRA}.items()}
    data = as_double if isinstance(inputs, dict) else type(inputs)(as_double.values())
    ds.fit(ens, (data, LABELS), cross_entropy, epochs=3, batch_size=8, lr=0.01, optimizer="sgd", shuffle=False)
    for i, network in enumerate(alone):
        optimiser = torch.optim.SGD(network.parameters(), lr=0.01)
        for _ in range(3):
            for rows in torch.arange(N).split(8):
                optimiser.zero_grad()
                outputs = network(as_double["x"][rows], extra=as_double["extra"][rows])
                nn.functional.cross_entropy(outputs, LABELS[rows]).backward()
                optimiser.step()
        for name, tensor in network.state_dict().items():
            torch.testing.assert_close(ens.member(i).state_dict()[name], tensor)


def test_a_dictionary_as_the_only_argument_is_a_tuple_of_one():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, batch):
            return self.layer(batch["image"])

    assert_same(trained((({"image": X},), LABELS), Reads), trained((X, LABELS), lambda: Named()))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


def test_structured_data_is_split_validated_and_swept():
    data = ({"x": X, "extra": EXTRA}, LABELS)
    history_of = {}
    ens = ds.Ensemble(Two, M, backend="loop")
    history_of["fit"] = ds.fit(ens, data, cross_entropy, epochs=2, batch_size=8, validation=0.25, seed=1)
    swept = ds.sweep(
        Two, data, cross_entropy, grid={"seed": [0, 1]}, members=M, epochs=2, batch_size=8, validation=0.25,
        backend="loop",
    )  # fmt: skip
    outputs = swept.outputs({"x": X, "extra": EXTRA})
    assert outputs.shape == (2, M, N, 3)
    single = ds.Ensemble(Two, M, seed=1, backend="loop")
    ds.fit(single, data, cross_entropy, epochs=2, batch_size=8, validation=0.25, seed=1)
    torch.testing.assert_close(outputs[1], single.predict({"x": X, "extra": EXTRA}), rtol=1e-4, atol=1e-5)
    assert len(history_of["fit"].column("validation")) == 2


def test_augmentation_of_named_inputs_gets_and_returns_a_dictionary():
    def louder(inputs, generator):
        return {**inputs, "x": inputs["x"] + torch.rand(len(inputs["x"]), 1, generator=generator)}

    data = ({"x": X, "extra": EXTRA}, LABELS)
    one, other = (trained(data, Two, augment=louder) for _ in range(2))
    assert_same(one, other)
    per_member = trained(data, Two, augment=[louder] * M)
    assert not torch.allclose(weights(per_member), weights(one))


def test_adversarial_training_of_several_inputs_is_refused():
    settings = ds.train.AdversarialTraining(epsilon=0.1, box=(-9.0, 9.0))
    with pytest.raises(ValueError, match="networks of one input tensor; got several inputs"):
        trained(({"x": X, "extra": EXTRA}, LABELS), Two, adversarial=settings)


class Rows(Dataset):
    def __init__(self, form):
        self.form = form

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.form(X[index], LABELS[index], index)


FORMS = {
    "dict": (lambda x, y, i: {"x": x, "labels": y}, lambda batch: ({"x": batch["x"]}, batch["labels"])),
    "triple": (lambda x, y, i: (x, y, i), lambda batch: batch[:2]),
    "nested": (lambda x, y, i: ({"x": x}, {"y": y}), lambda batch: (batch[0], batch[1]["y"])),
}


@pytest.mark.parametrize("form", FORMS)
def test_batches_of_any_form_are_unpacked(form):
    make, unpack = FORMS[form]
    network = Two
    expected = trained(DataLoader(TensorDataset(X, LABELS), 8), network)
    assert_same(trained(DataLoader(Rows(make), 8), network, unpack=unpack), expected)
    assert_same(
        trained(Rows(make), network, unpack=unpack, seed=3), trained(Rows(lambda x, y, i: (x, y)), network, seed=3)
    )
    outputs, targets = expected.predict(Rows(make), targets=True, unpack=unpack)
    torch.testing.assert_close(outputs, expected.predict(X))
    assert torch.equal(targets, LABELS)


@pytest.mark.parametrize(
    ("form", "fix"),
    [
        ("dict", r"a dictionary of 'x', 'labels'.*unpack=lambda batch: \(\{'x': batch\['x'\]\}, batch\['labels'\]\)"),
        ("triple", r"got 3 parts.*unpack=lambda batch: \(batch\[0\], batch\[1\]\)"),
    ],
)
def test_other_forms_are_refused_with_the_way_to_unpack_them(form, fix):
    with pytest.raises(TypeError, match=fix):
        trained(DataLoader(Rows(FORMS[form][0]), 8))
    with pytest.raises(TypeError, match=fix):
        trained((X, LABELS), validation=DataLoader(Rows(FORMS[form][0]), 8))


def test_what_unpack_returns_is_checked():
    loader = DataLoader(TensorDataset(X, LABELS), 8)
    for unpack, message in (
        (lambda batch: batch[0], "return .inputs, targets. or .* got Tensor"),
        (lambda batch: (batch[0], "label"), "give targets as one tensor; got str"),
        (lambda batch: (batch[0], batch[1][:3]), "as many targets as inputs; got 8 inputs and 3 targets"),
        (lambda batch: (batch[0], batch[1], torch.ones(2)), "one number per example"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            trained(loader, unpack=unpack)
    with pytest.raises(ValueError, match="`unpack` must come with a Dataset"):
        trained((X, LABELS), unpack=lambda batch: batch)


class Stream(IterableDataset):
    def __init__(self, rows=N):
        self.rows, self.starts = rows, 0

    def __iter__(self):
        self.starts += 1
        for i in range(self.rows):
            yield X[i], LABELS[i]


def batches(order):
    return [(X[rows], LABELS[rows]) for rows in order]


def test_streams_and_iterables_train_as_their_batches_say():
    order = torch.arange(N).split(8)
    expected = trained(DataLoader(TensorDataset(X, LABELS), 8))
    assert_same(trained(batches(order)), expected)
    assert_same(trained(Stream(), steps_per_epoch=3), expected)
    assert_same(trained(DataLoader(Stream(), 8), steps_per_epoch=3), expected)
    assert_same(trained((pair for pair in batches(order) * 2), steps_per_epoch=3), expected)
    # Epochs of two batches read on where the last one ended: four steps, and then the first batch again.
    five = trained(batches(order), steps_per_epoch=2, epochs=2)
    assert_same(five, trained(batches([order[0], order[1], order[2], order[0]]), epochs=1))


def test_a_stream_goes_on_after_a_checkpoint_where_it_stopped(tmp_path):
    expected = trained(Stream(), steps_per_epoch=2, epochs=4)
    stop = RuntimeError("stop")

    def interrupt(progress):
        if progress.epoch == 3:
            raise stop

    ens = ds.Ensemble(build, M, backend="loop")
    options = {"epochs": 4, "lr": 0.01, "batch_size": 8, "steps_per_epoch": 2, "checkpoint": tmp_path}
    with pytest.raises(RuntimeError, match="stop"):
        ds.fit(ens, Stream(), cross_entropy, progress=interrupt, checkpoint_seconds=0, **options)
    again = ds.Ensemble(build, M, backend="loop")
    ds.fit(again, Stream(), cross_entropy, resume=True, **options)
    assert_same(again, expected)


def test_sources_without_an_end_or_a_second_pass_are_refused_with_the_fix():
    pairs = batches(torch.arange(N).split(8))
    with pytest.raises(TypeError, match=r"have a length; got generator. Pass steps_per_epoch"):
        trained(pair for pair in pairs)
    with pytest.raises(ValueError, match="give batches for every step; got an iterator that has ended"):
        trained((pair for pair in pairs), steps_per_epoch=2, epochs=2)
    with pytest.raises(TypeError, match="`validation` must be readable once per epoch"):
        trained((X, LABELS), validation=(pair for pair in pairs))
    with pytest.raises(ValueError, match="`steps_per_epoch` must come with"):
        trained((X, LABELS), steps_per_epoch=3)


def test_a_fraction_of_a_dataset_is_held_out():
    rows = Rows(lambda x, y, i: (x, y))
    ens = ds.Ensemble(build, M, backend="loop")
    history = ds.fit(ens, rows, cross_entropy, epochs=2, batch_size=6, validation=0.25, split_seed=4)
    same = ds.Ensemble(build, M, backend="loop")
    (x, y), held_out = ds.data.split(X, LABELS, 0.25, 4)
    expected = ds.fit(same, TensorDataset(x, y), cross_entropy, epochs=2, batch_size=6, validation=held_out)
    assert len(history.column("validation")) == 2
    assert history.column("validation") == pytest.approx(expected.column("validation"), rel=0.2)
    with pytest.raises(ValueError, match="be data, not a part of it, for a loader or a stream"):
        trained(DataLoader(rows, 8), validation=0.2)


def test_a_sweep_reads_each_batch_of_a_loader_once_for_all_runs():
    class Counting(Dataset):
        reads = 0

        def __len__(self):
            return N

        def __getitem__(self, index):
            type(self).reads += 1
            return X[index], LABELS[index]

    augmented = functools.partial(ds.objectives.augmented, loss="cross_entropy", pool="probability")
    grid = {"beta": [0.0, 0.5], "seed": [0, 7]}
    options = {"members": M, "epochs": 2, "lr": 0.01, "backend": "loop", "validation": (X, LABELS)}
    probes = 8 + 8  # the first batch is read to look at the shape, once to plan memory and once to try the objective
    swept = ds.sweep(build, DataLoader(Counting(), 8), augmented, grid=grid, **options)
    assert Counting.reads == 2 * N + probes
    for point, number in ((point, i) for i, point in enumerate(swept.points)):
        ens = ds.Ensemble(build, M, seed=point["seed"], backend="loop")
        objective = functools.partial(augmented, beta=point["beta"])
        ds.fit(ens, DataLoader(TensorDataset(X, LABELS), 8), objective, epochs=2, lr=0.01, seed=point["seed"],
               validation=(X, LABELS))  # fmt: skip
        torch.testing.assert_close(swept.run(number).predict(X), ens.predict(X), rtol=1e-4, atol=1e-5)


def test_augmented_batches_of_a_loader_are_those_of_each_runs_seed():
    def jitter(x, generator):
        return x + torch.randn(x.shape, generator=generator)

    loader = DataLoader(TensorDataset(X, LABELS), 8)
    swept = ds.sweep(
        build, loader, cross_entropy, grid={"seed": [0, 7]}, members=M, epochs=2, augment=jitter, backend="loop"
    )
    for number, seed in enumerate((0, 7)):
        ens = ds.Ensemble(build, M, seed=seed, backend="loop")
        ds.fit(ens, loader, cross_entropy, epochs=2, seed=seed, augment=jitter)
        torch.testing.assert_close(swept.run(number).predict(X), ens.predict(X), rtol=1e-4, atol=1e-5)


def test_a_dataset_has_no_one_order_for_runs_of_several_seeds():
    with pytest.raises(ValueError, match="one order for runs of several seeds; got a Dataset. Use a DataLoader"):
        ds.sweep(build, Rows(lambda x, y, i: (x, y)), cross_entropy, grid={"seed": [0, 1]}, members=2, epochs=1)


def test_arrays_train_and_predict_as_tensors_do():
    expected = trained((X, LABELS))
    assert_same(trained((X.double().numpy(), LABELS.to(torch.int32).numpy())), expected)
    assert_same(trained((X.numpy(), LABELS.numpy()), validation=(X.numpy(), LABELS.numpy()), keep="last"), expected)
    assert_same(trained([(X[rows].numpy(), LABELS[rows].numpy()) for rows in torch.arange(N).split(8)]),
                trained(DataLoader(TensorDataset(X, LABELS), 8)))  # fmt: skip
    torch.testing.assert_close(expected.predict(X.double().numpy()), expected.predict(X))
    outputs, targets = expected.predict((X.numpy()[::-1], LABELS.numpy()), targets=True)
    torch.testing.assert_close(outputs, expected.predict(X.flip(0)))
    assert targets.dtype == torch.int64
    swept = ds.sweep(build, (X.numpy(), LABELS.numpy()), cross_entropy, grid={"seed": [0]}, members=M, epochs=2,
                     batch_size=8, lr=0.01, backend="loop")  # fmt: skip
    torch.testing.assert_close(swept.outputs(X.numpy())[0], expected.predict(X))


def test_whole_numbers_are_features_or_indices_as_the_network_wants():
    counts = np.arange(N * 4).reshape(N, 4) % 5
    assert trained((counts, LABELS.numpy())).predict(counts).shape == (M, N, 3)

    def words():
        return nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(8, 3))

    assert trained((counts, LABELS.numpy()), words).predict(counts).shape == (M, N, 3)
    swept = ds.sweep(words, (counts, LABELS.numpy()), cross_entropy, grid={"seed": [0]}, members=2, epochs=1)
    assert swept.outputs(counts).shape == (1, 2, N, 3)


def test_labels_by_name_are_refused_with_the_fix():
    names = np.array(["cat", "dog", "cow"])[LABELS.numpy()]
    with pytest.raises(TypeError, match=r"`y` must be numbers; got text \('.*LabelEncoder"):
        trained((X, names))


def test_pandas_frames_and_series_are_taken():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X.double().numpy(), columns=list("abcd"))
    labels = pandas.Series(LABELS.numpy())
    expected = trained((X, LABELS))
    assert_same(trained((frame, labels)), expected)
    assert_same(trained((frame, labels.astype("Int64"))), expected)
    torch.testing.assert_close(expected.predict(frame), expected.predict(X))
    for change, message in (
        ({"b": "no"}, "hold numbers in every column; got other values in b"),
        ({"b": np.nan}, "finite; got NaN or infinity in 24 examples"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            trained((frame.assign(**change), labels))
    with pytest.raises(TypeError, match=r"`y` must be numbers; got categories. Use .cat.codes"):
        trained((frame, labels.map({0: "a", 1: "b", 2: "c"}).astype("category")))
    with pytest.raises(TypeError, match=r"be \(inputs, targets\); got one DataFrame"):
        trained(frame)


@pytest.mark.parametrize("source", ["tensors", "unpacked"])
def test_whole_weights_equal_repeated_examples(source):
    counts = torch.randint(0, 4, (N,), generator=torch.Generator().manual_seed(3))
    rows = torch.arange(N).repeat_interleave(counts)
    settings = {"batch_size": N * 4, "shuffle": False, "optimizer": "sgd", "lr": 0.1}
    expected = trained((X[rows], LABELS[rows]), **settings)
    if source == "tensors":
        assert_same(trained((X, LABELS), weights=counts.double(), **settings), expected)
        assert_same(trained((X, LABELS), weights=counts.numpy(), **settings), expected)
    else:
        loader = DataLoader(TensorDataset(X, LABELS, counts.float()), N)
        assert_same(trained(loader, unpack=lambda batch: batch, **settings), expected)


def test_weights_follow_their_examples_through_shuffling_splits_and_sweeps():
    weight = torch.rand(N, generator=torch.Generator().manual_seed(5))
    zeroed = torch.where(torch.arange(N) < 12, 0.0, weight)
    noisy = torch.where((torch.arange(N) < 12).unsqueeze(1), 100.0, X)  # what has no weight must not matter
    assert_same(
        trained((noisy, LABELS), weights=zeroed, batch_size=N), trained((X, LABELS), weights=zeroed, batch_size=N)
    )
    options = {"epochs": 3, "batch_size": 8, "validation": 0.25, "lr": 0.01, "weights": weight}
    ens = ds.Ensemble(build, M, seed=2, backend="loop")
    ds.fit(ens, (X, LABELS), cross_entropy, seed=2, **options)
    swept = ds.sweep(build, (X, LABELS), cross_entropy, grid={"seed": [1, 2]}, members=M, backend="loop", **options)
    torch.testing.assert_close(swept.run(1).predict(X), ens.predict(X), rtol=1e-4, atol=1e-5)


def test_bad_weights_are_refused():
    for weight, message in (
        (torch.ones(3), r"one number per example \(24\)"),
        (torch.zeros(N), "0 or more, and not all 0"),
        (-torch.ones(N), "0 or more, and not all 0"),
        (torch.full((N,), torch.nan), "`weights` must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            trained((X, LABELS), weights=weight)
    with pytest.raises(ValueError, match="`weights` must come with tensors"):
        trained(DataLoader(TensorDataset(X, LABELS), 8), weights=torch.ones(N))

    def plain(outputs, targets):
        return ds.LossParts(outputs.square().mean(), {})

    with pytest.raises(ValueError, match="take weights of examples; got plain, which does not"):
        trained((X, LABELS), objective=plain, weights=torch.ones(N))


def test_a_batch_of_another_precision_is_named():
    with pytest.raises(TypeError, match=r"networks' dtype, torch.float32; got torch.float64. Use x.float\(\)"):
        trained(DataLoader(TensorDataset(X.double(), LABELS), 8))


@pytest.mark.parametrize("backend", ["auto", "loop", "vmap", "batched"])
def test_inputs_that_do_not_fit_get_one_sentence(backend):
    ens = ds.Ensemble(build, 2, backend=backend)
    message = r"members cannot take inputs \[6, 5\] float32: .*first layer with weights is Linear\(in_features=4"
    with pytest.raises(ValueError, match=message):
        ens.predict(torch.randn(6, 5))
    with pytest.raises(ValueError, match=message):
        ds.fit(ens, (torch.randn(6, 5), LABELS[:6]), cross_entropy, epochs=1)
    with pytest.raises(ValueError, match=r"cannot take inputs \[6, 4\] int64"):
        ens.predict(torch.ones(6, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="unexpected keyword argument 'image'"):
        ens.predict({"image": X})
    with pytest.raises(TypeError, match=r"networks' dtype, torch.float32; got torch.float64. Use x.float\(\)"):
        ens.predict(X.double())


def test_one_wrong_row_is_named_in_prediction_as_in_training():
    wrong = X.clone()
    wrong[17, 2] = torch.nan
    ens = ds.Ensemble(build, 2)
    for inputs in (wrong, wrong.numpy()):
        with pytest.raises(ValueError, match="finite; got NaN or infinity in 1 example, first in 17"):
            ens.predict(inputs)
        with pytest.raises(ValueError, match="finite; got NaN or infinity in 1 example, first in 17"):
            ds.fit(ens, (inputs, LABELS), cross_entropy, epochs=1)


def test_examples_without_a_batch_axis_are_refused():
    with pytest.raises(ValueError, match=r"an output for every example; got \[3\] for 4 examples.*x.unsqueeze\(0\)"):
        ds.Ensemble(build, 2).predict([X[0], X[1]])


def test_errors_of_a_networks_own_code_stay_what_they_are():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            raise RuntimeError("the sensor is off")

    with pytest.raises(RuntimeError, match="^the sensor is off$"):
        ds.Ensemble(Broken, 2).predict(X)


ATTACKED = {
    name: functools.partial(entry.function, **{**({"epsilon": 0.1} if entry.bounded else {}), **entry.quick})
    for name, entry in ds.attacks.ATTACKS.items()
}


@pytest.mark.parametrize("name", ATTACKED)
def test_attacks_take_arrays_as_they_take_tensors(name):
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    x, y = torch.rand(4, 1, 6, 6, generator=torch.Generator().manual_seed(1)), LABELS[:4]
    expected = ATTACKED[name](network, x, y)
    result = ATTACKED[name](network, x.double().numpy(), y.to(torch.int32).numpy())
    torch.testing.assert_close(result.inputs, expected.inputs)
    assert torch.equal(result.success, expected.success)


def test_evaluation_and_transfer_take_arrays():
    ens = ds.Ensemble(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), 2)
    x, y = np.random.default_rng(0).random((4, 1, 6, 6)), LABELS[:4].numpy()
    assert ds.attacks.evaluate(ens, (x, y), "quick", epsilon=0.1).clean is not None
    assert ds.attacks.transfer_matrix(ens, x, y, steps=2).fooled.shape == (3, 3)
    attack = functools.partial(ds.attacks.fgsm, epsilon=0.1)
    assert ds.attacks.over(attack, ens, x, y, batch_size=3).inputs.dtype == torch.float32


def test_arrays_beside_tensors_are_batched_with_them():
    named = {"x": X, "extra": EXTRA}
    expected = trained((named, LABELS), Two)
    assert_same(trained(({"x": X, "extra": EXTRA.numpy()}, LABELS), Two), expected)
    assert_same(trained((UserDict(x=X.numpy(), extra=EXTRA.numpy()), LABELS), Two), expected)
    with pytest.raises(TypeError, match="hold tensors, in tuples, lists and dictionaries; got UserDict"):
        trained(((X, UserDict(extra=EXTRA)), LABELS), Two)


def test_a_part_of_a_dataset_is_collated_as_the_whole_is():
    class Collated(Rows):
        def collate(self, examples):
            return torch.stack([x for x, _ in examples]) * 10, torch.stack([y for _, y in examples])

    class Tenfold(Rows):
        def __getitem__(self, index):
            return 10 * X[index], LABELS[index]

    form = lambda x, y, i: (x, y)  # noqa: E731
    options = {"validation": 0.25, "keep": "last"}
    assert_same(trained(Collated(form), **options), trained(Tenfold(form), **options))


def test_a_tuple_of_inputs_alone_is_refused_in_prediction():
    with pytest.raises(ValueError, match=r"a tuple of tensors. Several inputs\? Pass \(\(x1, x2, x3\), None\)"):
        ds.Ensemble(build, 2).predict((X, X, X))


def test_weights_of_a_batch_are_checked_in_sweeps_too():
    loader = DataLoader(TensorDataset(X, LABELS), 8)
    with pytest.raises(ValueError, match="`weights` must be finite numbers of at least 0"):
        ds.sweep(
            build,
            loader,
            cross_entropy,
            grid={"lr": [0.1, 0.2]},
            members=2,
            epochs=1,
            unpack=lambda batch: (*batch, -torch.ones(8)),
        )


def test_validation_batches_are_taken_and_checked_as_those_of_training():
    pairs = [(X.double().numpy(), LABELS.numpy())]
    assert_same(trained((X, LABELS), validation=pairs, keep="last"), trained((X, LABELS)))
    with pytest.raises(TypeError, match="networks' dtype, torch.float32; got torch.float64"):
        trained((X, LABELS), validation=[(X.double(), LABELS)])


def test_small_labels_are_not_taken_for_ignored_ones():
    labels = (LABELS + 155).to(torch.uint8)  # 156 is -100 in eight bits
    wide = lambda: ds.nets.mlp(4, 160, (8,))  # noqa: E731
    assert_same(trained((X, labels), wide, ignore_index=-100), trained((X, labels.long()), wide))


def test_a_sweep_refuses_what_a_loader_cannot_follow():
    loader = DataLoader(TensorDataset(X, LABELS), 8)
    with pytest.raises(ValueError, match="leave out 'batch_size' where a loader has its own"):
        ds.sweep(build, loader, cross_entropy, grid={"batch_size": [2, 4]}, members=2, epochs=1)
    with pytest.raises(ValueError, match="`validation` must be data, not a part of it, for a source of batches"):
        ds.sweep(build, loader, cross_entropy, grid={"lr": [0.1]}, members=2, epochs=1, validation=0.2)


def test_rows_of_pandas_with_other_names_are_refused():
    pandas = pytest.importorskip("pandas")
    frame, labels = pandas.DataFrame(X.numpy()), pandas.Series(LABELS.numpy())
    with pytest.raises(ValueError, match="same index in inputs and targets"):
        trained((frame, labels.sample(frac=1, random_state=0)))


def test_what_members_were_trained_on_is_recorded_for_audits(tmp_path):
    ens = trained((X, LABELS))
    assert ens.in_bag == "all"
    ds.fit(ens, (X, LABELS), cross_entropy, epochs=1, bootstrap=True, seed=4, validation=0.25, split_seed=2)
    rest, part = ds.data.splits.split_rows(N, 0.25, 2)
    assert not ens.in_bag[:, part].any()
    assert torch.equal(ens.in_bag[:, rest], ds.data.bootstrap_counts(len(rest), 4, range(M)) > 0)
    ens.save(tmp_path / "ens")
    assert ds.Ensemble.load(tmp_path / "ens", build).in_bag is None
    ds.fit(ens, (X, LABELS), cross_entropy, epochs=1)
    assert ens.in_bag == "all"


def test_losses_of_torch_are_refused_as_objectives():
    with pytest.raises(TypeError, match="torch's CrossEntropyLoss, which knows no members"):
        trained((X, LABELS), objective=nn.CrossEntropyLoss())


def test_labels_out_of_range_come_with_what_they_may_mean():
    with pytest.raises(ValueError, match=r"Labels from 1 on\? Use targets - 1"):
        trained((X, LABELS + 1))
    with pytest.raises(ValueError, match="Pass ignore_index=-100"):
        trained((X, torch.where(torch.arange(N) == 3, -100, LABELS)))


@pytest.mark.parametrize(
    "settings",
    [
        {"weights": torch.where(torch.arange(N) < 8, 2.0, 0.0)},
        {"weights": torch.rand(N, generator=torch.Generator().manual_seed(3)), "class_weights": [0.5, 1.0, 3.0]},
        {"ignore_index": 2},
        {"bootstrap": True},
        {"bootstrap": True, "active_members": 2},
    ],
    ids=["weights", "classes", "ignored", "bootstrap", "sampled"],
)
def test_losses_of_the_history_are_weighted_means_over_the_epoch(settings):
    def losses(batch_size):
        ens = ds.Ensemble(build, M, backend="loop")
        options = {"epochs": 1, "lr": 0.0, "shuffle": False, **settings}
        return ds.fit(ens, (X, LABELS), cross_entropy, batch_size=batch_size, **options).epochs[0]

    whole, steps = losses(N), losses(5)
    if "active_members" not in settings:
        # Members' own weights differ from step to step, so the mean over members is close only.
        assert steps["loss"] == pytest.approx(whole["loss"], rel=0.1 if "bootstrap" in settings else 1e-5)
        assert steps["member_loss"] == pytest.approx(whole["member_loss"], rel=1e-5)
    else:
        sampled = [loss for loss in whole["member_loss"] if loss == loss]
        assert len(sampled) == 2


def test_a_saved_sweep_keeps_its_output_and_what_members_were_trained_on(tmp_path):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return {"logits": self.layer(x)}

    options = {"grid": {"seed": [0, 1]}, "members": 2, "epochs": 1, "output": "logits"}
    swept = ds.sweep(Named, (X, LABELS), cross_entropy, validation=0.25, **options)
    assert swept.run(0).in_bag is None, "some rows were held out"
    swept.save(tmp_path / "sweep")
    again = ds.Sweep.load(tmp_path / "sweep", Named)
    torch.testing.assert_close(again.outputs(X), swept.outputs(X))
    assert again.run(0).in_bag is None
    assert ds.sweep(Named, (X, LABELS), cross_entropy, **options).run(0).in_bag == "all"
