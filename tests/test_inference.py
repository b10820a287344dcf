"""Member outputs of many examples: from any source, to memory or a file, captured or not; input gradients."""

import logging

import numpy as np
import pytest
import torch
from networks import NETWORKS
from recording import Captures
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import dissensus as ds
from dissensus.execution import inference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
X = torch.randn(23, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def ensemble_of(name="two_dropouts", backend="auto"):
    return ds.Ensemble(NETWORKS[name][0], 3, backend=backend).double()


@pytest.mark.parametrize("device", DEVICES)
def test_every_source_gives_the_same_outputs(device):
    ensemble = ensemble_of().to(device)
    with torch.no_grad():
        expected = ensemble.eval()(X.to(device)).cpu()
    ensemble.train()
    pair = (X, torch.zeros(23))
    sources = [X, pair, TensorDataset(*pair), DataLoader(TensorDataset(*pair), 7), DataLoader(TensorDataset(X), 5)]
    for source in sources:
        outputs = ensemble.predict(source, batch_size=4)
        assert outputs.device.type == "cpu"
        assert ensemble.training
        torch.testing.assert_close(outputs, expected)
    dropped, labels = ensemble.predict(DataLoader(TensorDataset(*pair), 5, drop_last=True), targets=True)
    torch.testing.assert_close(dropped, expected[:, :20])
    assert len(labels) == 20
    whole = ensemble.predict(DataLoader(TensorDataset(X[:20]), 5, drop_last=True))
    torch.testing.assert_close(whole, expected[:, :20])


class Stream(IterableDataset):
    def __iter__(self):
        yield from X


def test_a_stream_of_unknown_length_works_in_memory_and_is_refused_for_a_file(tmp_path):
    ensemble = ensemble_of()
    torch.testing.assert_close(ensemble.predict(DataLoader(Stream(), 4)), ensemble.predict(X))
    with pytest.raises(ValueError, match="known length"):
        ensemble.predict(DataLoader(Stream(), 4), file=tmp_path / "o.npy")


def test_outputs_go_to_a_file_whole_or_not_at_all(tmp_path):
    ensemble = ensemble_of()
    file = tmp_path / "deep" / "outputs.npy"
    mapped = ensemble.predict(X, batch_size=4, file=file)
    expected = ensemble.predict(X)
    torch.testing.assert_close(mapped, expected)
    assert isinstance(np.load(file, mmap_mode="r"), np.memmap)
    torch.testing.assert_close(torch.from_numpy(np.load(file)), expected)
    assert [path.name for path in file.parent.iterdir()] == ["outputs.npy"]
    with pytest.raises(ValueError, match="end in .npy; got 'outputs.bin'"):
        ensemble.predict(X, file=tmp_path / "outputs.bin")

    class Breaks(TensorDataset):
        def __getitem__(self, index):
            if index == 17:
                raise OSError("disk gone")
            return super().__getitem__(index)

    with pytest.raises(OSError, match="disk gone"):
        ensemble.predict(Breaks(X), batch_size=4, file=tmp_path / "broken.npy")
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_a_loader_with_a_wrong_length_is_refused():
    class Lies(torch.utils.data.SequentialSampler):
        def __len__(self):
            return self.said

    data = TensorDataset(X)
    for length, message in ((30, "hold 30 examples, as its length says; got 23"), (10, "hold 10 examples")):
        sampler = Lies(data)
        sampler.said = length
        with pytest.raises(ValueError, match=message):
            ensemble_of().predict(DataLoader(data, 5, sampler=sampler))


class Backwards(SequentialSampler):
    def __iter__(self):
        return iter(range(len(self.data_source) - 1, -1, -1))


class Sorted(BatchSampler):
    def __iter__(self):
        yield from ([3, 1], [2, 0])

    def __len__(self):
        return 2


LABELLED = TensorDataset(X, torch.arange(23))
OUT_OF_ORDER = {
    "a RandomSampler": lambda: DataLoader(LABELLED, 5, shuffle=True),
    "a SubsetRandomSampler": lambda: DataLoader(LABELLED, 5, sampler=SubsetRandomSampler(range(9))),
    "a WeightedRandomSampler": lambda: DataLoader(LABELLED, 5, sampler=WeightedRandomSampler([1.0] * 23, 9)),
    "a Backwards": lambda: DataLoader(LABELLED, 5, sampler=Backwards(LABELLED)),
    "a list": lambda: DataLoader(LABELLED, 5, sampler=[4, 2, 0]),
    "a Sorted": lambda: DataLoader(LABELLED, batch_sampler=Sorted(SequentialSampler(LABELLED), 2, False)),
    "a RandomSampler in batches": lambda: DataLoader(
        LABELLED, batch_sampler=BatchSampler(RandomSampler(LABELLED), 4, False)
    ),
    "a RandomSampler without batches": lambda: DataLoader(
        TensorDataset(X.unsqueeze(1), torch.arange(23).unsqueeze(1)), batch_size=None, shuffle=True
    ),
}


@pytest.mark.parametrize("kind", OUT_OF_ORDER)
def test_rows_out_of_order_are_refused_without_their_targets(kind):
    ensemble = ensemble_of()
    named = kind.partition(" in ")[0].partition(" without ")[0]
    with pytest.raises(ValueError, match=f"`data` must keep the order of its data set; got {named}. Use shuffle=False"):
        ensemble.predict(OUT_OF_ORDER[kind]())
    outputs, rows = ensemble.predict(OUT_OF_ORDER[kind](), targets=True)
    torch.testing.assert_close(outputs, ensemble.predict(X)[:, rows])


def test_loaders_in_order_are_taken_as_they_are():
    ensemble, expected = ensemble_of(), ensemble_of().predict(X)
    batched = DataLoader(LABELLED, batch_sampler=BatchSampler(SequentialSampler(LABELLED), 4, False))
    torch.testing.assert_close(ensemble.predict(batched), expected)
    subset = DataLoader(Subset(LABELLED, [5, 1]), 4)
    torch.testing.assert_close(ensemble.predict(subset), expected[:, [5, 1]])
    if "in_order" in vars(batched):
        loose = DataLoader(LABELLED, 4, num_workers=1, in_order=False)
        with pytest.raises(ValueError, match="keep the order of its data set; got a loader with in_order=False"):
            ensemble.predict(loose)
    with pytest.raises(ValueError, match="got a stream that 2 workers mix"):
        ensemble.predict(DataLoader(Stream(), 4, num_workers=2))


class Dicts(Dataset):
    """Examples that its own ``collate`` makes a batch of."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return {"x": X[index], "y": index}

    @staticmethod
    def collate(examples):
        return torch.stack([e["x"] for e in examples]), torch.tensor([e["y"] for e in examples])


def test_targets_of_every_source_are_returned_with_the_outputs(tmp_path, unchecked):
    ensemble = ensemble_of()
    expected = ensemble.predict(X)
    for source in ((X, torch.arange(23)), LABELLED, DataLoader(LABELLED, 5), Dicts()):
        outputs, targets = ensemble.predict(source, 4, targets=True, file=tmp_path / "o.npy")
        torch.testing.assert_close(outputs, expected)
        assert targets.tolist() == list(range(23))
    with pytest.raises(TypeError, match="hold targets where they are asked for; got inputs alone. Pass \\(x, y\\)"):
        ensemble.predict(X, targets=True)
    with pytest.raises(ValueError, match="as many targets as inputs; got 23 inputs and 3 targets"):
        ensemble.predict((X, torch.arange(3)), targets=True)
    for loader in (DataLoader(TensorDataset(X), 5), DataLoader(Stream(), 5)):
        with pytest.raises(TypeError, match="give pairs \\(x, y\\)"):
            ensemble.predict(loader, targets=True)


LAYOUTS = {
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second": lambda x: x.repeat_interleave(2, 0)[::2],
    "expanded": lambda x: x[:1].expand(len(x), -1, -1, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_may_have_any_memory_layout(layout):
    ensemble = ensemble_of("cnn_batch_norm")
    x = LAYOUTS[layout](torch.randn(12, *NETWORKS["cnn_batch_norm"][1], dtype=torch.float64))
    expected = ensemble.predict(x.contiguous(), 5)
    for source in (x, (x, torch.zeros(12)), TensorDataset(x), DataLoader(TensorDataset(x), 5)):
        torch.testing.assert_close(ensemble.predict(source, 5), expected)


def test_bad_sources_are_refused(unchecked):
    ensemble = ensemble_of()
    with pytest.raises(TypeError, match="be a tensor, .* got float"):
        ensemble.predict([[1.0]])
    with pytest.raises(ValueError, match="at least one example"):
        ensemble.predict(X[:0])
    with pytest.raises(ValueError, match="give all examples.*drop_last=True, which leaves out 3. Use drop_last=False"):
        ensemble.predict(DataLoader(TensorDataset(X[:3]), 5, drop_last=True))
    with pytest.raises(ValueError, match="at least one example; got none"):
        ensemble.predict([])
    with pytest.raises(ValueError, match="batch_size"):
        ensemble.predict(X, batch_size=0)


@pytest.mark.parametrize("backend", ["loop", "vmap", "batched", "stacked"])
@pytest.mark.parametrize("name", ["two_dropouts", "norm_first"])
def test_passes_of_a_repeated_shape_are_replayed(name, backend):
    counts, ensemble = Captures(), ensemble_of(name, backend).eval()
    with torch.no_grad():
        passes = inference.Passes(ensemble, torch.device("cpu"), counts)
        outputs = inference.collected(passes, inference.input_batches(X, 4), None)
        torch.testing.assert_close(outputs, ensemble(X))
    assert counts.captures == 1
    assert counts.replays == 5 - inference.WARM_UP, "five whole batches; the last one is smaller"


def test_outputs_of_a_stream_are_copied_from_the_memory_of_graphs():
    counts, ensemble = Captures(), ensemble_of().eval()
    with torch.no_grad():
        passes = inference.Passes(ensemble, torch.device("cpu"), counts)
        outputs = inference.collected(passes, inference.input_batches(DataLoader(Stream(), 4), 4), None)
        torch.testing.assert_close(outputs, ensemble(X))
    assert counts.replays == 5 - inference.WARM_UP


def test_a_pass_that_cannot_be_captured_runs_eagerly(caplog):
    def refuses(function, generators):
        raise RuntimeError("not permitted when stream is capturing")

    counts, ensemble = Captures(refuses), ensemble_of().eval()
    with torch.no_grad(), caplog.at_level(logging.INFO, "dissensus"):
        passes = inference.Passes(ensemble, torch.device("cpu"), counts)
        outputs = inference.collected(passes, inference.input_batches(X, 4), None)
        torch.testing.assert_close(outputs, ensemble(X))
    assert counts.captures == 1, "it is not tried again"
    messages = [record.getMessage() for record in caplog.records if "not captured" in record.getMessage()]
    assert messages == ["passes are not captured in a graph: not permitted when stream is capturing"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_member", [False, True])
@pytest.mark.parametrize("backend", ["loop", "streams", "vmap", "batched", "stacked", "auto"])
@pytest.mark.parametrize("name", ["mlp", "cnn_batch_norm", "norm_first"])
def test_gradients_reach_the_inputs(name, backend, per_member, device):
    build, shape = NETWORKS[name]
    ensemble = ds.Ensemble(build, 3, backend=backend).double().to(device).eval()
    lead = (3, 5) if per_member else (5,)
    x = torch.randn(*lead, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
    (actual,) = torch.autograd.grad(ensemble(x.requires_grad_(), per_member=per_member).square().sum(), x)
    leaf = x.detach().clone().requires_grad_()
    outputs = [ensemble.member(i)(leaf[i] if per_member else leaf) for i in range(3)]
    (expected,) = torch.autograd.grad(torch.stack(outputs).square().sum(), leaf)
    torch.testing.assert_close(actual, expected)


def test_gradients_reach_the_inputs_of_members_of_different_architectures():
    ensemble = ds.Ensemble.from_modules([ds.nets.mlp(6, 3, (4 + i,)).double() for i in range(3)])
    x = X.clone().requires_grad_()
    (actual,) = torch.autograd.grad(ensemble(x).sum(), x)
    (expected,) = torch.autograd.grad(sum(ensemble.member(i)(x).sum() for i in range(3)), x)
    torch.testing.assert_close(actual, expected)
