"""The cache of features: what it holds is what the network gives, and it never passes for something else."""

import copy
import functools
import json
import logging
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, random_split

import dissensus as ds
from dissensus import storage
from dissensus.data.augment import flips
from dissensus.data.features import FeatureCache, cached_features
from dissensus.trunk import SharedTrunk

N = 11


class Images(Dataset):
    """Pairs of an image and a plain number, as torchvision gives them."""

    def __init__(self, count=N, noise=0.0):
        self.x = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(3))
        self.noise = noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + self.noise * torch.rand(()), index % 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Images())


def pairs(count=N):
    data = Images(count)
    return data.x, torch.arange(count) % 3


def network():
    with torch.random.fork_rng():
        torch.manual_seed(7)
        layers = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5)]
        return nn.Sequential(*layers)


def trunk(members=2):
    return SharedTrunk(network(), ds.Ensemble(lambda: nn.Linear(12, 3), members, seed=1), cut="3")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("batch_size", [1, 4, N, 100])
def test_rows_equal_the_networks_features(tmp_path, dtype, batch_size):
    shared_trunk = trunk()
    x, y = pairs()
    expected = shared_trunk.features(x)
    cache = cached_features(shared_trunk.features, (x, y), tmp_path / "a" / "b", batch_size=batch_size, dtype=dtype)
    assert (len(cache), cache.examples, cache.augmentations) == (N, N, 1)
    assert cache.nbytes == N * 12 * dtype.itemsize + N * 8
    features, targets = cache.tensors()
    assert (features.dtype, targets.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(
        features, expected.to(dtype).float(), rtol=1e-6 if dtype == torch.float32 else 2e-3, atol=1e-6
    )
    assert torch.equal(targets, y)
    manifest = json.loads((tmp_path / "a" / "b" / "manifest.json").read_text())
    assert manifest["files"]["features.npy"]["shape"] == [N, 12]
    assert manifest["files"]["features.npy"]["dtype"] == str(dtype).removeprefix("torch.")
    assert manifest["versions"]["torch"] == torch.__version__
    assert np.load(tmp_path / "a" / "b" / "features.npy").dtype == np.dtype(str(dtype).removeprefix("torch."))
    assert "11 rows of [12]" in repr(cache)


def test_features_keep_their_shape_and_targets_theirs(tmp_path):
    model, (x, _) = network().eval(), pairs()
    y = torch.randn(N, 2, dtype=torch.float64)
    cache = cached_features(model[0], (x, y), tmp_path, dtype=torch.float32)
    assert cache[0][0].shape == (3, 2, 2)
    features, targets = cache.tensors("cpu")
    torch.testing.assert_close(features, model[0](x))
    assert torch.equal(targets, y)
    scalar_cache = cached_features(
        lambda x: x.flatten(1).sum(1), (x, y[:, 0]), tmp_path / "numbers", dtype=torch.float32
    )
    torch.testing.assert_close(scalar_cache.tensors()[0], x.flatten(1).sum(1))
    assert scalar_cache[3][0].shape == scalar_cache[3][1].shape == ()


@pytest.mark.parametrize("kind", ["dataset", "loader", "uneven", "batch_sampler"])
def test_datasets_and_loaders_give_the_same(tmp_path, kind):
    shared_trunk, data = trunk(), Images()
    sampler = [[0, 1, 2, 3, 4, 5, 6], [7, 8], [9, 10]]
    source = {
        "dataset": data,
        "loader": DataLoader(data, 4),
        "uneven": DataLoader(data, 4, drop_last=True),
        "batch_sampler": DataLoader(data, batch_sampler=sampler),
    }[kind]
    count = 8 if kind == "uneven" else N
    cache = cached_features(shared_trunk.features, source, tmp_path, batch_size=3, dtype=torch.float32)
    x, y = cache.tensors()
    torch.testing.assert_close(x, shared_trunk.features(data.x[:count]))
    assert torch.equal(y, torch.arange(count) % 3)


def test_rows_of_each_augmentation_follow_each_other(tmp_path):
    shared_trunk, (x, y) = trunk(), pairs()
    halved = functools.partial(scaled, factor=0.5)
    augmentations = [None, halved, flips]
    options = {"batch_size": 4, "dtype": torch.float32, "augmentations": augmentations}
    cache = cached_features(shared_trunk.features, (x, y), tmp_path / "a", seed=1, **options)
    features, targets = cache.tensors()
    assert (len(cache), cache.examples, cache.augmentations) == (3 * N, N, 3)
    torch.testing.assert_close(features[:N], shared_trunk.features(x))
    torch.testing.assert_close(features[N : 2 * N], shared_trunk.features(x / 2))
    mirrored = (features[2 * N :] - shared_trunk.features(x.flip(-1))).abs().amax(1) < 1e-5
    unchanged = (features[2 * N :] - features[:N]).abs().amax(1) < 1e-5
    assert (mirrored | unchanged).all()
    assert mirrored.any()
    assert unchanged.any()
    assert torch.equal(targets, y.repeat(3))
    same_seed = cached_features(shared_trunk.features, (x, y), tmp_path / "b", seed=1, **options)
    other_seed = cached_features(shared_trunk.features, (x, y), tmp_path / "c", seed=2, **options)
    assert torch.equal(same_seed.tensors()[0], features)
    assert not torch.equal(other_seed.tensors()[0], features)


def scaled(x, generator, *, factor):
    return x * factor


def test_whole_numbers_reach_the_function_as_they_are(tmp_path, unchecked):
    shared_trunk, y = trunk(), torch.arange(N)
    pixels = torch.randint(0, 256, (N, 1, 4, 4), dtype=torch.uint8)
    cache = cached_features(
        lambda x: shared_trunk.features(x.float() / 255), (pixels, y), tmp_path, dtype=torch.float32
    )
    torch.testing.assert_close(cache.tensors()[0], shared_trunk.features(pixels.float() / 255))
    with pytest.raises(TypeError, match=r"take the data's torch.uint8; got an error .*features\(x.float\(\) / 255\)"):
        cached_features(shared_trunk.features, (pixels, y), tmp_path / "other")
    assert not list((tmp_path / "other").glob("*.npy"))


def test_batches_are_read_in_any_order(tmp_path):
    cache = cached_features(nn.Flatten(), pairs(), tmp_path, dtype=torch.float32)
    x, y = cache.tensors()
    for rows in ([3], [5, 0, 5, 10, 2], [-1, -N], list(range(N))):
        batch = cache.__getitems__(rows)
        assert len(batch) == len(rows)
        features, targets = cache.collate(batch)
        assert torch.equal(features, x[rows])
        assert torch.equal(targets, y[rows])
        assert all(torch.equal(item, x[row]) for (item, _), row in zip(batch, rows, strict=True))
    assert torch.equal(cache[4][0], x[4])
    assert len(list(cache)) == N
    for index in (N, -N - 1):
        with pytest.raises(IndexError, match="rows go from 0 to 10"):
            cache[index]


def test_data_loaders_read_a_cache(tmp_path):
    cache = cached_features(nn.Flatten(), pairs(), tmp_path, dtype=torch.float32)
    x, y = cache.tensors()
    loaders = [
        DataLoader(cache, 4, collate_fn=cache.collate),
        DataLoader(cache, 4),
        DataLoader(Subset(cache, range(N)), 4),
        DataLoader(ConcatDataset([Subset(cache, range(5)), Subset(cache, range(5, N))]), 4, collate_fn=cache.collate),
        DataLoader(cache, 4, collate_fn=cache.collate, num_workers=1),
    ]
    for loader in loaders:
        batches = list(loader)
        assert [len(batch[1]) for batch in batches] == [4, 4, 3]
        assert torch.equal(torch.cat([batch[0] for batch in batches]), x)
        assert torch.equal(torch.cat([batch[1] for batch in batches]), y)
    part, remainder = random_split(cache, [4, 7], generator=torch.Generator().manual_seed(0))
    assert next(iter(DataLoader(part, 4)))[0].shape == (4, 16)
    assert len(remainder) == 7
    heads = ds.Ensemble(lambda: nn.Linear(16, 3), 2, backend="loop")
    torch.testing.assert_close(heads.predict(cache, 4), heads.predict(x))


def test_copies_and_workers_open_the_files_themselves(tmp_path):
    cache = cached_features(nn.Flatten(), pairs(500), tmp_path)
    packed = pickle.dumps(cache)
    assert len(packed) < 1000
    for copied in (pickle.loads(packed), copy.deepcopy(cache)):
        assert torch.equal(copied.tensors()[0], cache.tensors()[0])


@pytest.mark.parametrize("members", [1, 3])
def test_heads_train_on_the_cache_as_on_features_in_memory(tmp_path, members):
    shared_trunk, (x, y) = trunk(members), pairs(40)
    cache = cached_features(shared_trunk.features, (x, y), tmp_path, dtype=torch.float32)
    objective = functools.partial(ds.objectives.independent, loss="cross_entropy")
    features = shared_trunk.features(x)
    options = {"epochs": 3, "batch_size": 8, "lr": 0.05, "seed": 2}
    trained = []
    for source in ((features, y), cache.tensors(), Subset(TensorDataset(features, y), range(40)), cache):
        heads = ds.Ensemble(lambda: nn.Linear(12, 3), members, seed=1, backend="loop")
        ds.fit(heads, source, objective, **options)
        trained.append(heads.state_dict())
    for cached, in_memory in ((1, 0), (3, 2)):  # a loader has an order of its own
        for name, tensor in trained[in_memory].items():
            torch.testing.assert_close(trained[cached][name], tensor, rtol=1e-5, atol=1e-6)
    shared_trunk.heads.load_state_dict(trained[1])
    assert shared_trunk(x).shape == (members, 40, 3)


def test_networks_run_in_evaluation_mode_and_keep_their_modes(tmp_path):
    model, (x, y) = network().train(), pairs()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    cache = cached_features(model, (x, y), tmp_path, dtype=torch.float32, batch_size=2)
    assert [layer.training for layer in model] == [True, False, True, True, True]
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in before)
    torch.testing.assert_close(cache.tensors()[0], model.eval()(x))


def test_progress_counts_rows(tmp_path):
    calls = []
    cached_features(
        nn.Flatten(),
        pairs(),
        tmp_path,
        batch_size=4,
        augmentations=(None, flips),
        progress=lambda *counts: calls.append(counts),
    )
    assert calls == [(4, 22), (8, 22), (11, 22), (15, 22), (19, 22), (22, 22)]


def test_a_complete_cache_is_reused(tmp_path, caplog):
    shared_trunk, data = trunk(), pairs()
    row_counts = []

    def cached(batch_size, **options):
        return cached_features(
            shared_trunk.features,
            data,
            tmp_path,
            batch_size=batch_size,
            progress=lambda rows, _: row_counts.append(rows),
            **options,
        )

    first = cached(4)
    assert row_counts == [4, 8, 11]
    shared_trunk.heads.load_state_dict(
        {name: 2 * t for name, t in shared_trunk.heads.state_dict().items()}
    )  # heads do not count
    with caplog.at_level(logging.INFO, "dissensus"):
        second = cached(5)
    assert row_counts == [4, 8, 11], "features were computed again"
    assert "reading features from" in caplog.text
    assert torch.equal(first.tensors()[0], second.tensors()[0])
    cached(6, overwrite=True)
    assert row_counts[3:] == [6, 11]


def with_changed_backbone(shared_trunk):
    result = copy.deepcopy(shared_trunk)
    with torch.no_grad():
        next(result.backbone.parameters())[0] += 1
    return result


def test_a_cache_of_other_features_is_refused(tmp_path):
    shared_trunk, (x, y) = trunk(), pairs()
    cached_features(shared_trunk.features, (x, y), tmp_path)
    other_cut = SharedTrunk(shared_trunk.backbone, shared_trunk.heads, cut="2")
    contents = (tmp_path / "features.npy").read_bytes()
    cases = [
        ("'data'", shared_trunk.features, (x + 1, y), {}),
        ("'data'", shared_trunk.features, (x, y + 1), {}),
        ("'features'", with_changed_backbone(shared_trunk).features, (x, y), {}),
        ("'features'", other_cut.features, (x, y), {}),
        ("'features'", lambda x: shared_trunk.features(x), (x, y), {}),
        ("'dtype'", shared_trunk.features, (x, y), {"dtype": torch.float32}),
        ("'augmentations', 'seed', 'batches'", shared_trunk.features, (x, y), {"augmentations": [flips]}),
    ]
    for differing, features, data, options in cases:
        with pytest.raises(ds.StorageError, match=f"{differing} differ. Give another folder, or overwrite=True"):
            cached_features(features, data, tmp_path, **options)
    assert (tmp_path / "features.npy").read_bytes() == contents
    overwritten = cached_features(shared_trunk.features, (x + 1, y), tmp_path, overwrite=True)
    torch.testing.assert_close(overwritten.tensors()[0], shared_trunk.features(x + 1), rtol=2e-3, atol=2e-3)
    shared_trunk.heads.save(tmp_path / "heads")
    for overwrite in (False, True):
        with pytest.raises(ds.StorageError, match="holds 'dissensus.ensemble'"):
            cached_features(shared_trunk.features, (x, y), tmp_path / "heads", overwrite=overwrite)


class Postprocessed(nn.Module):
    def __init__(self, do, key):
        super().__init__()
        self.net, self.do = network(), do
        self.register_buffer("key", torch.tensor(float(key)), persistent=False)

    def forward(self, x):
        return self.do(self.net(x)) + self.key


def test_functions_and_non_persistent_buffers_identify_a_network(tmp_path):
    data = pairs()
    first = Postprocessed(lambda z: 2 * z, key=0)
    cached_features(first, data, tmp_path)
    cached_features(copy.deepcopy(first).train(), data, tmp_path)  # it is used in evaluation mode
    for changed_network in (Postprocessed(lambda z: 3 * z, key=0), Postprocessed(first.do, key=1)):
        changed_network.net.load_state_dict(first.net.state_dict())
        with pytest.raises(ds.StorageError, match="'features' differ"):
            cached_features(changed_network, data, tmp_path)


NET = network()


def by_name(x):
    return NET(x)


def test_networks_that_a_function_uses_identify_it(tmp_path):
    model, (x, y) = network(), pairs()

    def closed(factor, net):
        return lambda x: factor * net(x)

    class Holder:
        def __init__(self, net):
            self.net = net

        def features(self, x):
            return self.net(x)

    for number, (first, second) in enumerate(
        [
            (closed(1.0, model), closed(2.0, model)),
            (closed(1.0, model), closed(1.0, other_network())),
            (
                functools.partial(scaled, generator=None, factor=1.0),
                functools.partial(scaled, generator=None, factor=2.0),
            ),
            (Holder(model).features, Holder(other_network()).features),
            (lambda x: model(x).relu(), lambda x: model(x).tanh()),
        ]
    ):
        folder = tmp_path / str(number)
        cached_features(first, (x, y), folder)
        cached_features(first, (x, y), folder)
        with pytest.raises(ds.StorageError, match="'features' differ"):
            cached_features(second, (x, y), folder)
    cached_features(by_name, (x, y), tmp_path / "named")
    with torch.no_grad():
        NET[0].weight += 1
    with pytest.raises(ds.StorageError, match="'features' differ"):
        cached_features(by_name, (x, y), tmp_path / "named")


def other_network():
    result = network()
    with torch.no_grad():
        result[0].weight += 1
    return result


def test_order_and_examples_identify_a_dataset(tmp_path):
    shared_trunk, data = trunk(), Images()
    cached_features(shared_trunk.features, data, tmp_path, batch_size=4)
    cached_features(shared_trunk.features, DataLoader(data, 7), tmp_path)
    changed_images = Images()
    changed_images.x[0] += 1
    for source in (changed_images, Subset(data, range(5)), Subset(data, [1, 0, *range(2, N)])):
        with pytest.raises(ds.StorageError, match="'data' differ"):
            cached_features(shared_trunk.features, source, tmp_path)


def test_half_written_caches_are_computed_anew(tmp_path):
    shared_trunk, data = trunk(), pairs()
    expected = cached_features(shared_trunk.features, data, tmp_path).tensors()[0]
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ds.StorageError, match="manifest.json is missing"):
        FeatureCache.open(tmp_path)
    (tmp_path / "features.npy").write_bytes(b"half")
    (tmp_path / ".features.npy.unfinished").write_bytes(b"of a process that was killed")
    cache = cached_features(shared_trunk.features, data, tmp_path)
    assert torch.equal(cache.tensors()[0], expected)
    assert {path.name for path in tmp_path.iterdir()} == {"features.npy", "targets.npy", "manifest.json", ".lock"}


def test_a_computation_that_fails_leaves_the_old_cache(tmp_path):
    shared_trunk, (x, y) = trunk(), pairs()
    old = cached_features(shared_trunk.features, (x, y), tmp_path)
    calls = []

    def failing(x):
        calls.append(len(x))
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return shared_trunk.features(x)

    with pytest.raises(RuntimeError, match="out of memory"):
        cached_features(failing, (x + 1, y), tmp_path, batch_size=4, overwrite=True)
    reopened = FeatureCache.open(tmp_path, verify=True)
    assert torch.equal(reopened.tensors()[0], old.tensors()[0])
    assert not list(tmp_path.glob(".*.unfinished"))


def test_damage_is_refused_by_name(tmp_path):
    shared_trunk, data = trunk(), pairs()
    cached_features(shared_trunk.features, data, tmp_path)
    file, manifest = tmp_path / "features.npy", tmp_path / "manifest.json"
    contents, text = file.read_bytes(), manifest.read_text()

    def refused(match, verify=False):
        with pytest.raises(ds.StorageError, match=match):
            FeatureCache.open(tmp_path, verify=verify)
        file.write_bytes(contents)
        manifest.write_text(text)

    file.write_bytes(contents[:-7])
    refused("features.npy is damaged: .* bytes, where .* were written. Compute it anew")
    file.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
    assert len(FeatureCache.open(tmp_path)) == N
    refused("features.npy was changed after it was written", verify=True)
    file.write_bytes(b"x" + contents[1:])
    refused("features.npy is damaged")
    file.write_bytes(contents.replace(b"(11, 12)", b"(12, 11)"))
    refused("is not the array")
    manifest.write_text(text[: len(text) // 2])
    refused("manifest.json is damaged")
    manifest.write_text("[]")
    refused("manifest.json is damaged")
    manifest.write_text(text.replace('"format": 1', '"format": 9'))
    refused(r"was written by a newer dissensus \(format 9\); this one reads up to 1: upgrade\.")
    manifest.write_text(text.replace('"examples": 11', '"examples": 10'))
    refused("does not hold the 10 rows")
    manifest.write_text(text.replace('"examples"', '"samples"'))
    refused("lacks examples")
    (tmp_path / "targets.npy").unlink()
    refused("targets.npy is missing")
    with pytest.raises(ds.StorageError, match="targets.npy is missing"):
        cached_features(shared_trunk.features, data, tmp_path)
    manifest.write_text("{")
    assert len(cached_features(shared_trunk.features, data, tmp_path, overwrite=True)) == N
    assert len(FeatureCache.open(tmp_path, verify=True)) == N
    with pytest.raises(ds.StorageError, match="holds no complete features"):
        FeatureCache.open(tmp_path / "nowhere")


def test_numbers_that_cannot_be_kept_are_refused(tmp_path, unchecked):
    x, y = pairs()
    x[6, 0, 1, 1] = torch.nan
    with pytest.raises(
        ValueError, match="`features` must be finite; got NaN or infinity in 1 of 3 examples, first in 6"
    ):
        cached_features(nn.Flatten(), (x, y), tmp_path, batch_size=3)
    x[6, 0, 1, 1] = 1e5
    with pytest.raises(ValueError, match=r"float16, and 1e\+05 \(example 6\). Use dtype=torch.float32"):
        cached_features(nn.Flatten(), (x, y), tmp_path)
    assert len(cached_features(nn.Flatten(), (x, y), tmp_path, dtype=torch.float32)) == N


def test_wrong_data_are_refused(tmp_path, unchecked):
    flatten = nn.Flatten()
    x, y = pairs()
    data = Images()
    cases = [
        (ValueError, "hold at least one example; got none", (x[:0], y[:0])),
        (ValueError, "hold at least one example; got none", Subset(data, [])),
        (ValueError, "as many targets as inputs; got 11 inputs and 10 targets", (x, y[:10])),
        (ValueError, "keep its order; got a loader that shuffles", DataLoader(data, 4, shuffle=True)),
        (ValueError, "give the same example every time.*`augmentations`", Images(noise=1.0)),
        (TypeError, "have batches in an order; got a stream", Stream()),
        (TypeError, "have batches in an order; got a stream", DataLoader(Stream(), 4)),
        (TypeError, "got a loader without batches", DataLoader(data, batch_size=None)),
        (TypeError, r"pairs \(x, y\) of tensors", TensorDataset(x, y, y)),
        (TypeError, r"be a pair \(inputs, targets\); got", (x.numpy(), y)),
        (TypeError, "be .x, y., a Dataset or a DataLoader; got str", "images"),
        (TypeError, "examples that make a batch", WithObjects()),
        (TypeError, "type that .npy knows; got bfloat16", (x, y.bfloat16())),
    ]
    state = torch.get_rng_state()
    for error, match, source in cases:
        with pytest.raises(error, match=match):
            cached_features(flatten, source, tmp_path / "folder")
    assert torch.equal(torch.get_rng_state(), state), "looking at data disturbed the global generator"


class WithObjects(Images):
    def __getitem__(self, index):
        return object(), index


def test_other_wrong_arguments_are_refused(tmp_path, unchecked):
    data = pairs()
    shared_trunk = trunk()

    def refused(error, match, features=shared_trunk.features, **options):
        with pytest.raises(error, match=match):
            cached_features(features, data, tmp_path / "folder", **options)

    refused(TypeError, "Pass trunk.features, not trunk.features", features=shared_trunk.features(data[0]))
    refused(TypeError, "one tensor of floats; got tuple", features=lambda x: (x, x))
    refused(TypeError, "one tensor of floats; got torch.int64", features=lambda x: x.long())
    refused(ValueError, r"a row of numbers for each example; got \[\] for 11", features=lambda x: x.sum())
    refused(ValueError, r"a row of numbers for each example; got \[2, 11, 3\] for 11 examples", features=shared_trunk)
    refused(ValueError, "have one shape", features=lambda x: x.flatten(1)[:, : len(x)], batch_size=4)
    refused(TypeError, "`dtype` must be torch.float16 or torch.float32; got torch.bfloat16", dtype=torch.bfloat16)
    refused(ValueError, "`batch_size` must be a whole number", batch_size=0)
    refused(ValueError, "`seed` must be a whole number", seed=-1)
    refused(ValueError, "`augmentations` must hold at least one", augmentations=())
    refused(TypeError, "`augmentations` must be a list of functions", augmentations=flips)
    refused(TypeError, "`augmentations` must be a list of functions", augmentations=["flips"])
    refused(ValueError, "keep the number of examples; got 5 of 11", augmentations=[lambda x, _: x[:5]])
    refused(ValueError, "`device` must be the network's, cpu; got cuda", device="cuda")
    (tmp_path / "file").write_text("hello")
    with pytest.raises(ds.StorageError, match="is a file"):
        cached_features(shared_trunk.features, data, tmp_path / "file")


def test_a_sampler_that_changes_between_passes_is_refused(tmp_path):
    class Reversing:
        """The same order twice, and another one after that."""

        def __init__(self):
            self.passes = 0

        def __iter__(self):
            self.passes += 1
            rows = list(range(N)) if self.passes < 4 else list(reversed(range(N)))
            return iter([rows[:6], rows[6:]])

    loader = DataLoader(Images(), batch_sampler=Reversing())
    with pytest.raises(ValueError, match="the same examples in the same order at every pass"):
        cached_features(nn.Flatten(), loader, tmp_path, augmentations=(None, flips))


NETWORK = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))


def by_pieces(x):
    return torch.cat([NETWORK(piece) for piece in x.split(4)])


class Holder:
    def __init__(self):
        self.networks = {"one": [NETWORK]}

    def __call__(self, x):
        return self.networks["one"][0](x)


@pytest.mark.parametrize("function", [by_pieces, Holder()])
def test_networks_are_found_in_comprehensions_and_containers(function, tmp_path):
    x, y = torch.randn(12, 3), torch.zeros(12)
    NETWORK.train()
    features, _ = cached_features(function, (x, y), tmp_path, dtype=torch.float32).tensors()
    assert NETWORK.training
    torch.testing.assert_close(features, NETWORK.eval()(x).detach())
    with torch.no_grad():
        NETWORK[0].bias.add_(1.0)
    with pytest.raises(storage.StorageError):
        cached_features(function, (x, y), tmp_path, dtype=torch.float32)
