"""Exported programs and ONNX files give what the ensemble gives, for batches of any size."""

import inspect
import logging
import sys
from functools import partial

import numpy as np
import pytest
import torch
from networks import NETWORKS
from torch import Tensor, nn

import dissensus as ds
from dissensus import pooling, scores

onnxruntime = pytest.importorskip("onnxruntime")
POOLS = {
    "probability": lambda logits: pooling.mean_probability(logits).exp(),
    "score": lambda logits: pooling.mean_score(logits).exp(),
    "vote": pooling.vote_share,
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


class WritesIntoInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mul_(2).add_(1))


class Named(nn.Module):
    """Several inputs, one of them nested, and an output among several."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(6, 3)

    def forward(self, ids: Tensor, extra: dict[str, Tensor], mask: Tensor | None = None, double: bool = False) -> dict:
        words = self.embed(ids).mean(1)
        words = words if mask is None else words * mask
        logits = self.head(torch.cat([words, extra["size"]], 1))
        return {"logits": logits * 2 if double else logits, "words": words}


def masked_network():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def trunk(cut):
    backbone = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 6), nn.Dropout(0.5))
    backbone(torch.randn(9, 2, 8, 8))
    return ds.SharedTrunk(backbone.eval(), ds.Ensemble(partial(ds.nets.mlp, 6, 3, (5,)), 4), cut=cut)


def mixed():
    return ds.Ensemble.from_modules([ds.nets.mlp(6, 3, (4,)), nn.Linear(6, 3), WritesIntoInput()])


def masked():
    return ds.masks.convert(masked_network(), 4, 2.0)


def disturbed(model):
    """The model with statistics of batch norm away from their start."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.uniform_(0.5, 1.5)
    return model


MODELS = {
    **{name: (partial(ds.Ensemble, build, 3), shape) for name, (build, shape) in NETWORKS.items()},
    "recurrent": (partial(ds.Ensemble, Recurrent, 2), (4, 6)),
    "attention": (partial(ds.Ensemble, Attention, 2), (4, 6)),
    "writes": (partial(ds.Ensemble, WritesIntoInput, 3), (6,)),
    "one member": (partial(ds.Ensemble, partial(ds.nets.mlp, 6, 3, (8,)), 1), (6,)),
    "mixed": (mixed, (6,)),
    "masked": (masked, (6,)),
    "masked all": (lambda: ds.masks.convert(ds.nets.cnn(2, 3, 8, (8, 8)), 3, 1.5, assign="all"), (2, 8, 8)),
    "masked in ensemble": (lambda: ds.Ensemble(masked, 1), (6,)),
    "two masked": (lambda: ds.Ensemble(masked, 2), (6,)),
    "trunk": (lambda: trunk(None), (2, 8, 8)),
    "trunk with cut": (lambda: trunk("3"), (2, 8, 8)),
    "member": (lambda: ds.Ensemble(NETWORKS["cnn_batch_norm"][0], 3).member(1), (2, 8, 8)),
    "soup": (lambda: ds.Ensemble(NETWORKS["two_dropouts"][0], 3).soup(), (6,)),
    "sliced mask": (lambda: masked().member(2), (6,)),
}


def member_outputs(model, x):
    """What the model itself returns in evaluation mode, ``[M, B, C]``."""
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        outputs = model.eval()(x.clone())
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    return outputs if outputs.ndim == 3 else outputs.unsqueeze(0)


def expected(logits, pool="probability"):
    probs = logits.softmax(-1)
    results = {
        "probs": POOLS[pool](logits),
        "entropy": scores.ensemble_entropy(probs),
        "mutual_information": scores.mutual_information(probs),
        "aleatoric": scores.mean_entropy(probs),
    }
    torch.testing.assert_close(results["entropy"], results["mutual_information"] + results["aleatoric"])
    return results


def run_onnx(file, **inputs):
    session = onnxruntime.InferenceSession(file)
    names = [entry.name for entry in session.get_outputs()]
    outputs = session.run(None, {name: np.asarray(value) for name, value in inputs.items()})
    return {name: torch.from_numpy(values) for name, values in zip(names, outputs, strict=True)}


def check(results, wanted, tolerance=1e-5):
    assert list(results) == list(wanted)
    for name in wanted:
        torch.testing.assert_close(results[name], wanted[name], rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.slow(fast=["mlp", "cnn_batch_norm", "masked", "trunk with cut", "sliced mask", "writes", "recurrent"])
@pytest.mark.parametrize("name", MODELS)
def test_programs_give_the_pooled_outputs_for_any_batch(name):
    build, shape = MODELS[name]
    model = disturbed(build())
    model.train()
    training = [module.training for module in model.modules()]
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.randn(4, *shape)
    kept = x.clone()
    exported = ds.export.program(model, x)
    assert torch.equal(x, kept)
    assert [module.training for module in model.modules()] == training
    for rows in (1, 3, 9):
        batch = torch.randn(rows, *shape)
        given = batch.clone()
        check(exported.module()(batch), expected(member_outputs(model, given)))
        assert torch.equal(batch, given)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


@pytest.mark.slow(fast=["cnn_batch_norm", "masked", "mlp"])
@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "cnn_batch_norm",
        "masked",
        "trunk with cut",
        "mixed",
        "attention",
        "sliced mask",
        "recurrent",
        "member",
        "soup",
    ],
)
def test_onnx_files_run_in_onnxruntime(name, tmp_path):
    build, shape = MODELS[name]
    model = disturbed(build()).train()
    file = ds.export.onnx(model, tmp_path / "model.onnx", torch.randn(2, *shape))
    assert file == tmp_path / "model.onnx"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(file)
    assert [(entry.name, entry.shape) for entry in session.get_inputs()] == [("input", ["batch", *shape])]
    assert session.get_outputs()[0].shape == ["batch", 3]
    for rows in (1, 7):
        batch = torch.randn(rows, *shape)
        check(run_onnx(file, input=batch), expected(member_outputs(model, batch)))


@pytest.mark.parametrize("pool", POOLS)
def test_pools(pool, tmp_path):
    ens = ds.Ensemble(partial(ds.nets.mlp, 6, 3, (8,)), 5)
    batch = 3 * torch.randn(40, 6)
    exported = ds.export.program(ens, torch.zeros(1, 6), pool=pool, member_outputs=True)
    logits = member_outputs(ens, batch)
    wanted = {**expected(logits, pool), "member_logits": logits}
    check(exported.module()(batch), wanted)
    file = ds.export.onnx(ens, tmp_path / "model.onnx", torch.zeros(1, 6), pool=pool, member_outputs=True)
    check(run_onnx(file, input=batch), wanted)


@pytest.mark.parametrize("members", [1, 4])
def test_regression(members, tmp_path):
    ens = ds.Ensemble(partial(ds.nets.mlp, 6, 2, (8,)), members)
    batch = torch.randn(9, 6)
    values = member_outputs(ens, batch)
    variance = (values - values.mean(0)).square().mean(0)
    wanted = {"mean": values.mean(0), "variance": variance, "std": variance.sqrt(), "member_outputs": values}
    check(ds.export.program(ens, batch, task="regression", member_outputs=True).module()(batch), wanted)
    file = ds.export.onnx(ens, tmp_path / "model.onnx", batch[:2], task="regression", member_outputs=True)
    check(run_onnx(file, input=batch), wanted)


def entropy(probs):
    return -sum(p * np.log(p) if p else 0.0 for p in probs)


def named_by_hand(kind, values, pool):
    """Slow oracle, one number at a time: float64 ``[M, B, C]`` to the outputs of a program."""
    rows, width = values.shape[1:]
    grid = [(row, column) for row in range(rows) for column in range(width)]
    columns = {place: values[:, *place] for place in grid}
    if kind == "bce":
        sigmoid = {place: 1 / (1 + np.exp(-column)) for place, column in columns.items()}
        mean = {place: chances.mean() for place, chances in sigmoid.items()}
        pooled = {place: 1 / (1 + np.exp(-columns[place].mean())) for place in grid} if pool == "score" else mean
        total = {place: entropy([chance, 1 - chance]) for place, chance in mean.items()}
        part = {place: np.mean([entropy([c, 1 - c]) for c in sigmoid[place]]) for place in grid}
        results = [pooled, total, {place: total[place] - part[place] for place in grid}, part]
        names, shape = ["probs", "entropy", "mutual_information", "aleatoric"], (rows, width)
    elif kind == "quantile":
        targets = width // 3
        grid = [(row, target) for row in range(rows) for target in range(targets)]
        rising = {p: sorted(np.mean(values[:, p[0], 3 * p[1] + q]) for q in range(3)) for p in grid}
        spread = {p: [np.var(values[:, p[0], 3 * p[1] + q]) for q in range(3)] for p in grid}
        results = [rising, {p: rising[p][-1] - rising[p][0] for p in grid}, spread]
        names, shape = ["quantiles", "width", "variance"], (rows, targets)
    else:
        if kind == "gaussian_nll":
            targets = width // 2
            grid = [(row, target) for row in range(rows) for target in range(targets)]
            means = {p: values[:, p[0], p[1]] for p in grid}
            noise = {p: np.mean(np.exp(values[:, p[0], targets + p[1]]) + 1e-6) for p in grid}
        else:
            means = {p: np.exp(columns[p]) for p in grid}
            noise, targets = {p: means[p].mean() for p in grid}, width
        epistemic = {p: np.mean((means[p] - means[p].mean()) ** 2) for p in grid}
        variance = {p: noise[p] + epistemic[p] for p in grid}
        mean = {p: np.exp(columns[p].mean()) if pool == "score" else means[p].mean() for p in grid}
        results = [mean, variance, {p: np.sqrt(variance[p]) for p in grid}, noise, epistemic]
        names, shape = ["mean", "variance", "std", "aleatoric", "epistemic"], (rows, targets)
    return {
        name: torch.tensor(np.array([result[place] for place in grid])).reshape(*shape, -1).squeeze(-1)
        if name not in ("quantiles", "variance") or kind != "quantile"
        else torch.tensor(np.array([result[place] for place in grid])).reshape(*shape, 3)
        for name, result in zip(names, results, strict=True)
    }


@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize(
    ("loss", "pool", "width"),
    [
        ("bce", "probability", 3),
        ("bce", "score", 1),
        ("gaussian_nll", "probability", 4),
        ("poisson", "score", 2),
        ("poisson", "probability", 2),
        ("quantile", "score", 6),
    ],
)
def test_other_losses_have_outputs_of_their_own(loss, pool, width, members, tmp_path):
    ens = ds.Ensemble(partial(ds.nets.mlp, 6, width, (8,)), members).double()
    batch = 3 * torch.randn(7, 6).double()
    wanted = named_by_hand(loss, ens.predict(batch).numpy(), pool)
    exported = ds.export.program(ens, batch[:3], loss=loss, pool=pool)
    check(exported.module()(batch), wanted, 1e-9)
    check(exported.module()(batch[:1]), {name: values[:1] for name, values in wanted.items()}, 1e-9)
    if members > 1:
        file = ds.export.onnx(ens, tmp_path / "model.onnx", batch[:3], loss=loss, pool=pool)
        check(run_onnx(file, input=batch), wanted)
        batch[2] = torch.nan
        unknown = {name: values.isnan().reshape(7, -1) for name, values in run_onnx(file, input=batch).items()}
        assert all(rows[2].all() and int(rows.sum()) == rows.shape[1] for rows in unknown.values())


def test_quantiles_of_other_levels_and_dense_values():
    ens = ds.Ensemble(lambda: nn.Conv2d(2, 4, 1), 3)
    batch = torch.randn(5, 2, 4, 4)
    values = ens.predict(batch)
    loss = partial(ds.losses.quantile, levels=(0.1, 0.9))
    results = ds.export.program(ens, batch[:2], loss=loss).module()(batch)
    wanted = values.mean(0).unflatten(1, (2, 2)).movedim(2, -1).sort(-1).values  # [B, D, H, W, Q]
    torch.testing.assert_close(results["quantiles"], wanted)
    torch.testing.assert_close(results["width"], wanted[..., 1] - wanted[..., 0])
    results = ds.export.program(ens, batch[:2], loss="gaussian_nll").module()(batch)
    torch.testing.assert_close(results["mean"], values.mean(0)[:, :2])
    torch.testing.assert_close(results["aleatoric"], values[:, :, 2:].exp().mean(0) + 1e-6)
    results = ds.export.program(ens, batch[:2], loss="bce").module()(batch)
    torch.testing.assert_close(results["probs"], values.sigmoid().mean(0))


def test_nan_stays_nan_in_its_example_alone(tmp_path):
    ens = ds.Ensemble(partial(ds.nets.mlp, 6, 3, (8,), activation=nn.Tanh), 3)
    batch = torch.randn(4, 6)
    batch[2] = torch.nan
    file = ds.export.onnx(ens, tmp_path / "model.onnx", torch.zeros(2, 6))
    for results in (ds.export.program(ens, torch.zeros(2, 6)).module()(batch), run_onnx(file, input=batch)):
        for values in results.values():
            assert values.isnan().reshape(4, -1).all(1).tolist() == [False, False, True, False]
            assert not values[[0, 1, 3]].isnan().any()


def test_certain_and_extreme_members(tmp_path):
    """Probabilities of zero, and logits whose exponentials overflow."""
    ens = ds.Ensemble(lambda: nn.Linear(2, 2, bias=False), 2)
    with torch.no_grad():
        next(ens.parameters()).copy_(torch.tensor([[[1e4, 0.0], [0.0, 0.0]], [[0.0, 0.0], [1e4, 0.0]]]))
    batch = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    file = ds.export.onnx(ens, tmp_path / "model.onnx", batch)
    log2 = float(np.log(2))
    for results in (ds.export.program(ens, batch).module()(batch), run_onnx(file, input=batch)):
        wanted = {"probs": [[0.5, 0.5]] * 2, "entropy": [log2] * 2, "mutual_information": [log2, 0.0]}
        check(results, {key: torch.tensor(value) for key, value in {**wanted, "aleatoric": [0.0, log2]}.items()})


@pytest.mark.parametrize("backend", ["auto", "loop", "vmap", "batched", "streams", "stacked"])
def test_any_backend_is_exported_and_stays(backend, caplog):
    ens = ds.Ensemble(NETWORKS["cnn_batch_norm"][0], 3, backend=backend)
    batch = torch.randn(5, 2, 8, 8)
    with caplog.at_level(logging.INFO, "dissensus"):
        exported = ds.export.program(ens, batch)
    assert not [record for record in caplog.records if " ms" in record.getMessage()], "nothing is measured"
    assert ens.backend == backend
    assert ens.choices == []
    check(exported.module()(batch[:3]), expected(member_outputs(ens, batch[:3])))
    direct = torch.export.export(ens.eval(), (batch,), dynamic_shapes=(({0: torch.export.Dim("batch")},),))
    for rows in (1, 3):
        torch.testing.assert_close(direct.module()(batch[:rows]), ens(batch[:rows]), rtol=1e-5, atol=1e-5)


def test_a_program_of_linear_layers_multiplies_all_members_at_once():
    exported = ds.export.program(ds.Ensemble(partial(ds.nets.mlp, 6, 3, (8,)), 50), torch.zeros(2, 6))
    names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert sum("baddbmm" in name for name in names) == 2
    assert not [name for name in names if not name.startswith("aten.")]


@pytest.mark.parametrize("name", ["mixed", "masked", "trunk with cut", "two_dropouts", "writes"])
def test_torch_export_takes_the_model_itself(name):
    build, shape = MODELS[name]
    model, x = build(), torch.randn(4, *shape)
    dim = {0: torch.export.Dim("batch")}
    varied = any(parameter.kind == parameter.VAR_POSITIONAL for parameter in _parameters(model))
    exported = torch.export.export(model.eval(), (x,), dynamic_shapes=((dim,),) if varied else (dim,))
    for rows in (1, 6):
        batch = torch.randn(rows, *shape)
        torch.testing.assert_close(exported.module()(batch.clone()), model(batch.clone()))


def _parameters(model):
    return inspect.signature(model.forward).parameters.values()


@pytest.mark.parametrize("name", ["mlp", "mixed"])
def test_torch_export_in_training_mode_is_refused(name):
    build, shape = MODELS[name]
    with pytest.raises(ValueError, match="evaluation mode for torch.export.*dissensus.export.program"):
        torch.export.export(build().train(), (torch.randn(4, *shape),))


@pytest.mark.parametrize("form", ["positional", "named"])
def test_structured_inputs(form, tmp_path):
    ens = ds.Ensemble(Named, 3, output="logits")
    example = {"ids": torch.zeros(4, 5, dtype=torch.long), "extra": {"size": torch.zeros(4, 2)}, "double": True}
    batch = {"ids": torch.randint(0, 9, (7, 5)), "extra": {"size": torch.randn(7, 2)}}
    if form == "positional":
        example, names = ({**example, "mask": torch.ones(4, 1)}), ["ids", "extra_size", "mask"]
        batch["mask"] = torch.rand(7, 1)
        example = (example["ids"], example["extra"], example["mask"])
        exported = ds.export.program(ens, example)
        with torch.no_grad():
            wanted = expected(ens.eval()(**batch))
        check(exported.module()(batch["ids"], batch["extra"], batch["mask"]), wanted)
        ens.train()
    else:
        names = ["ids", "extra_size"]
        exported = ds.export.program(ens, example)
        with torch.no_grad():
            wanted = expected(ens.eval()(**batch, double=True))
        check(exported.module()(**batch, double=True), wanted)
    file = ds.export.onnx(ens, tmp_path / "model.onnx", example)
    inputs = {"ids": batch["ids"], "extra_size": batch["extra"]["size"], "mask": batch.get("mask")}
    check(run_onnx(file, **{name: inputs[name] for name in names}), wanted)


def test_dense_outputs():
    ens = ds.Ensemble(lambda: nn.Conv2d(2, 3, 1), 4)
    batch = torch.randn(5, 2, 4, 4)
    results = ds.export.program(ens, batch[:2]).module()(batch)
    probs = member_outputs_of(ens, batch).softmax(2)
    check(results, {"probs": probs.mean(0), "entropy": scores.ensemble_entropy(probs)} | _rest(probs))
    last = ds.Ensemble(lambda: nn.Linear(6, 3), 4)
    tokens = torch.randn(5, 7, 6)
    results = ds.export.program(last, tokens[:2], class_axis=-1).module()(tokens)
    probs = member_outputs_of(last, tokens).softmax(-1)
    check(
        {"probs": results["probs"], "entropy": results["entropy"]},
        {"probs": probs.mean(0), "entropy": torch.special.entr(probs.mean(0)).sum(-1)},
    )


def member_outputs_of(ens, batch):
    with torch.no_grad():
        return ens.eval()(batch)


def _rest(probs):
    return {"mutual_information": scores.mutual_information(probs), "aleatoric": scores.mean_entropy(probs)}


def test_outputs_of_your_own(tmp_path):
    ens = ds.Ensemble(partial(ds.nets.mlp, 6, 1, (8,)), 4)

    def calibrated(values):
        return {"chance": values.sigmoid().mean(0).squeeze(-1), "positive": (values > 0).sum((0, 2))}

    batch = torch.randn(5, 6)
    with torch.no_grad():
        wanted = calibrated(ens(batch))
    check(ds.export.program(ens, batch[:2], outputs=calibrated).module()(batch), wanted)
    check(run_onnx(ds.export.onnx(ens, tmp_path / "m.onnx", batch[:2], outputs=calibrated), input=batch), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype):
    ens = ds.Ensemble(partial(ds.nets.mlp, 6, 3, (8,)), 4).to(dtype)
    batch = torch.randn(5, 6, dtype=dtype)
    results = ds.export.program(ens, batch[:2]).module()(batch)
    wanted = expected(member_outputs(ens, batch).to(torch.promote_types(dtype, torch.float32)))
    assert {values.dtype for values in results.values()} == {wanted["probs"].dtype}
    check(results, wanted, 1e-10 if dtype == torch.float64 else 2e-2)


def test_programs_hold_copies_and_are_saved_without_pickled_code(tmp_path):
    ens = ds.Ensemble(NETWORKS["mlp"][0], 3)
    batch = torch.randn(5, 6)
    wanted = expected(member_outputs(ens, batch))
    exported = ds.export.program(ens, batch.numpy())
    torch.export.save(exported, tmp_path / "model.pt2")
    with torch.no_grad():
        for parameter in ens.parameters():
            parameter.zero_()
    check(exported.module()(batch), wanted)
    loaded = torch.export.load(tmp_path / "model.pt2")
    check(loaded.module()(batch[:2]), {name: values[:2] for name, values in wanted.items()})
    targets = {str(node.target) for node in loaded.graph.nodes if node.op == "call_function"}
    assert all(target.startswith(("aten.", "<built-in", "_operator", "sym")) for target in targets), targets


def test_a_fixed_batch(tmp_path):
    ens = ds.Ensemble(NETWORKS["mlp"][0], 3)
    file = ds.export.onnx(ens, tmp_path / "model.onnx", torch.zeros(1, 6), dynamic_batch=False)
    assert onnxruntime.InferenceSession(file).get_inputs()[0].shape == [1, 6]


class DependsOnValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x) if float(x.sum()) > 0 else self.head(-x)


class FixesTheBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x.view(4, 6))


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(
    ("model", "example", "options", "message"),
    [
        (lambda: ds.Ensemble(DependsOnValues, 2), torch.ones(4, 6), {}, "traceable by torch.export.*values"),
        (lambda: ds.Ensemble(FixesTheBatch, 2), torch.ones(4, 6), {}, "dynamic_batch=False"),
        (lambda: ds.Ensemble(lambda: nn.Linear(6, 1), 2), torch.ones(4, 6), {}, 'two classes.*task="regression"'),
        (lambda: ds.Ensemble(lambda: nn.Linear(6, 3), 2), torch.ones(4, 5), {}, r"cannot take inputs \[4, 5\]"),
        (lambda: ds.Ensemble(lambda: nn.Linear(6, 3), 2), torch.ones(0, 6), {}, "at least one example"),
        (
            lambda: ds.Ensemble(lambda: nn.Linear(6, 3), 2),
            torch.ones(6),
            {},
            r"a batch \[B.*\[6\].*Use example\[None\]",
        ),
        (lambda: ds.Ensemble(lambda: nn.Linear(6, 4), 2), torch.ones(6), {"loss": "mse"}, r"Use example\[None\]"),
        (lambda: ds.Ensemble(lambda: nn.Linear(6, 3), 2), "x", {}, "`inputs` must be a tensor"),
        (lambda: torch.ones(2, 4, 3), torch.ones(4, 6), {}, "an Ensemble or an nn.Module; got Tensor"),
        (lambda: nn.Linear(6, 3), torch.ones(4, 6), {"pool": "mean"}, "`pool` must be one of 'probability'"),
        (lambda: nn.Linear(6, 3), torch.ones(4, 6), {"pool": "vote", "task": "regression"}, "one of 'score'"),
        (lambda: nn.Linear(6, 3), torch.ones(4, 6), {"task": "classes"}, "`task` must be one of"),
        (lambda: nn.Linear(6, 3), torch.ones(4, 6), {"task": "regression", "loss": "bce"}, "'classification' with"),
        (lambda: nn.Linear(6, 3), torch.ones(4, 6), {"loss": "gaussian_nll"}, "two outputs per target"),
        (lambda: nn.Linear(6, 4), torch.ones(4, 6), {"loss": "quantile"}, "3 quantiles per target"),
        (lambda: nn.Linear(6, 3), torch.ones(4, 6), {"loss": torch.dot}, "one of dissensus.losses.*`outputs`"),
        (lambda: nn.Linear(6, 3), torch.ones(4, 6), {"loss": "gaussian"}, "Did you mean 'gaussian_nll'"),
        (lambda: nn.Linear(6, 3), torch.ones(4, 6), {"outputs": "probs"}, "`outputs` must be a function"),
        (lambda: nn.Linear(6, 3), torch.ones(4, 6), {"outputs": lambda v: v}, "return tensors by name"),
        (lambda: nn.Linear(6, 3), torch.ones(4, 6), {"outputs": dict, "pool": "vote"}, "come without .*got `pool`"),
        (
            lambda: ds.masks.monte_carlo(masked_network(), 3, 0.2),
            torch.ones(4, 6),
            {},
            "Monte Carlo dropout.*masks.convert",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused(model, example, options, message):
    built = model()
    with pytest.raises((ValueError, TypeError), match=f"(?s){message}"):
        ds.export.program(built, example, **options)


class NamedAsOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, mean, probs):
        return self.head(mean) * probs


def test_names_of_inputs_and_outputs_differ(tmp_path):
    ens = ds.Ensemble(NamedAsOutputs, 2)
    file = ds.export.onnx(ens, tmp_path / "model.onnx", (torch.zeros(3, 6), torch.zeros(3, 1)))
    x, scale = torch.randn(5, 6), torch.rand(5, 1)
    with torch.no_grad():
        wanted = expected(ens(x, scale))
    check(run_onnx(file, mean=x, probs_input=scale), wanted)


def test_versions_of_operators(tmp_path, caplog):
    ens = ds.Ensemble(NETWORKS["mlp"][0], 2)
    file = ds.export.onnx(ens, tmp_path / "model.onnx", torch.zeros(2, 6), opset=18)
    import onnx

    assert [(entry.domain, entry.version) for entry in onnx.load(file).opset_import] == [("", 18)]
    before = file.read_bytes()
    with pytest.raises(ValueError, match="`opset` must be a version .*; got 99"):
        ds.export.onnx(ens, file, torch.zeros(2, 6), opset=99)
    assert file.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.onnx"]
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


def test_large_weights_lie_in_a_second_file(tmp_path, monkeypatch):
    monkeypatch.setattr("dissensus.export.files.ONE_FILE", 0)
    ens = ds.Ensemble(partial(ds.nets.mlp, 6, 3, (400,)), 3)
    batch = torch.randn(5, 6)
    for _ in range(2):  # the second replaces the first
        file = ds.export.onnx(ens, tmp_path / "model.onnx", batch[:2])
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
        check(run_onnx(file, input=batch), expected(member_outputs(ens, batch)))


def test_where_onnx_files_cannot_be_written(tmp_path, monkeypatch):
    network = nn.Linear(6, 3)
    with pytest.raises(ValueError, match=r"`path` must end in .onnx; got 'model.pt'"):
        ds.export.onnx(network, tmp_path / "model.pt", torch.zeros(2, 6))
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ValueError, match="regular file"):
        ds.export.onnx(network, tmp_path / "folder.onnx", torch.zeros(2, 6))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"pip install 'dissensus\[export\]'"):
        ds.export.onnx(network, tmp_path / "model.onnx", torch.zeros(2, 6))
    assert not (tmp_path / "model.onnx").exists()
