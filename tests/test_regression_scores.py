"""The contract of every score of regression: `ORACLES` must name all scores of `dissensus.scores.REGRESSION_SCORES`."""

import inspect
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import special, stats
from typer.testing import CliRunner

import dissensus as ds
from dissensus import regression_scores
from dissensus.cli.main import app
from dissensus.scores import REGRESSION_SCORES

M, B = 4, 30
FLOOR = ds.losses.VARIANCE_FLOOR


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# --- slow versions; f is [M, C], the outputs of one example, and of two targets


def gaussians(f):
    return f[:, :2], np.exp(f[:, 2:]) + FLOOR


def kl(mu, v, i, j):
    return sum(
        0.5 * (math.log(v[j, d] / v[i, d]) + (v[i, d] + (mu[i, d] - mu[j, d]) ** 2) / v[j, d] - 1) for d in range(2)
    )


def bhattacharyya(mu, v, i, j):
    """−log ∫ √(p q), by integration."""
    total = 0.0
    for d in range(2):
        p, q = (stats.norm(mu[k, d], v[k, d] ** 0.5) for k in (i, j))
        x = np.linspace(-20, 20, 4001)  # the trapezoid rule is exact to rounding for such smooth curves
        total -= math.log(np.trapezoid(np.sqrt(p.pdf(x) * q.pdf(x)), x))
    return total


def entropies(f):
    _, v = gaussians(f)
    return [sum(stats.norm.entropy(0, math.sqrt(v[i, d])) for d in range(2)) for i in range(len(f))]


def information(distance, f):
    mu, v = gaussians(f)
    members = range(len(f))
    return -sum(math.log(sum(math.exp(-distance(mu, v, i, j)) for j in members) / len(f)) for i in members) / len(f)


def over_pairs(f):
    mu, v = gaussians(f)
    pairs = list(itertools.permutations(range(len(f)), 2))
    return sum(kl(mu, v, i, j) for i, j in pairs) / len(pairs)


def total(f):
    mu, v = gaussians(f)
    second = (v + mu**2).mean(0)  # E[x²] − E[x]²
    return (second - mu.mean(0) ** 2).mean()


ORACLES = {
    "value_variance": lambda f: np.mean([np.var(f[:, c]) for c in range(f.shape[1])]),
    "epistemic_variance": lambda f: np.mean([np.var(f[:, c]) for c in range(2)]),
    "aleatoric_variance": lambda f: gaussians(f)[1].mean(),
    "total_variance": total,
    "gaussian_entropy": lambda f: sum(
        stats.norm.entropy(0, math.sqrt((gaussians(f)[1][:, d]).mean() + np.var(f[:, d]))) for d in range(2)
    ),
    "mean_gaussian_entropy": lambda f: np.mean(entropies(f)),
    "gaussian_information_lower": lambda f: information(bhattacharyya, f),
    "gaussian_information_upper": lambda f: information(kl, f),
    "gaussian_pairwise_kl": over_pairs,
    "interval_width": lambda f: np.mean([max(t) - min(t) for member in f for t in (member[:3], member[3:])]),
    "quantile_variance": lambda f: np.mean(
        [np.var([sorted(m[3 * d : 3 * d + 3])[q] for m in f]) for d in range(2) for q in range(3)]
    ),
}
every_score = pytest.mark.parametrize("name", REGRESSION_SCORES)


def outputs_for(name, members=M, batch=B, seed=0, dtype=torch.float64):
    """Outputs of two targets: values [2], means and log-variances [4], or quantiles [6]."""
    return draw(
        members, batch, {"values": 2, "gaussian": 4, "quantiles": 6}[REGRESSION_SCORES[name].takes], seed=seed
    ).to(dtype)


def test_the_table_holds_every_score_and_the_oracles_every_entry():
    functions = {
        name: value
        for name, value in vars(regression_scores).items()
        if inspect.isfunction(value) and value.__module__ == "dissensus.regression_scores" and not name.startswith("_")
    }
    assert {name: score.function for name, score in REGRESSION_SCORES.items()} == functions
    assert all(getattr(ds.scores, name) is function for name, function in functions.items())
    assert set(ORACLES) == set(functions)
    page = (Path(__file__).parents[1] / "docs/uncertainty.md").read_text()
    rows = {line.split("|")[1].strip().strip("`"): line for line in page.splitlines() if line.startswith("| `")}
    for name, score in REGRESSION_SCORES.items():
        assert f"| {score.takes} |" in rows[name], name


@every_score
@pytest.mark.parametrize("members", [2, 5])
def test_every_score_equals_its_equation(name, members):
    outputs = outputs_for(name, members, batch=4)
    expected = [ORACLES[name](outputs[:, n].numpy()) for n in range(4)]
    np.testing.assert_allclose(REGRESSION_SCORES[name].function(outputs), expected, rtol=1e-7)


@every_score
def test_the_order_of_members_does_not_matter_and_targets_may_be_dense(name):
    outputs, function = outputs_for(name), REGRESSION_SCORES[name].function
    expected = function(outputs)
    torch.testing.assert_close(function(outputs[torch.tensor([2, 0, 3, 1])]), expected)
    dense = outputs.unflatten(1, (6, 5)).movedim(-1, 2)  # [M, 6, C, 5]
    torch.testing.assert_close(function(dense), expected.view(6, 5))
    torch.testing.assert_close(function(outputs.numpy()), expected)


@every_score
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_members_and_one_member(name, members, dtype):
    outputs, score = outputs_for(name, 1, dtype=dtype), REGRESSION_SCORES[name]
    result = score.function(outputs.expand(members, -1, -1))
    expected = torch.zeros_like(result) if score.disagreement else score.function(outputs)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5 if dtype is torch.float32 else 1e-13)
    low, high = score.bounds(members, outputs.shape[-1])
    assert (result >= low).all()
    assert (result <= high).all()


@every_score
def test_nan_affects_its_example_only(name):
    outputs, function = outputs_for(name), REGRESSION_SCORES[name].function
    expected = function(outputs)
    for column in range(outputs.shape[-1]):
        changed = outputs.clone()
        changed[1, 7, column] = math.nan
        result = function(changed)
        assert result.isnan().nonzero().flatten().tolist() == [7]
        torch.testing.assert_close(result[:7], expected[:7])


@every_score
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single_precision(name, dtype):
    outputs = outputs_for(name, dtype=dtype)
    result = REGRESSION_SCORES[name].function(outputs)
    assert result.dtype == torch.float32
    assert torch.equal(result, REGRESSION_SCORES[name].function(outputs.float()))


def test_bounds_hold_the_mutual_information():
    """The mutual information of one target and the member, by integration; and the entropy of the mixture."""
    outputs = draw(3, 8, 2) * torch.tensor([2.0, 0.5])
    lower, upper = ds.scores.gaussian_information_lower(outputs), ds.scores.gaussian_information_upper(outputs)
    total_entropy, mean_entropy = ds.scores.gaussian_entropy(outputs), ds.scores.mean_gaussian_entropy(outputs)
    for n in range(8):
        mu, std = outputs[:, n, 0].numpy(), np.sqrt(np.exp(outputs[:, n, 1].numpy()) + FLOOR)
        x = np.linspace(-20, 20, 8001)
        entropy = np.trapezoid(special.entr(stats.norm.pdf(x[:, None], mu, std).mean(-1)), x)
        information = entropy - float(mean_entropy[n])
        assert float(lower[n]) <= information + 1e-9 <= float(upper[n]) + 2e-9
        assert entropy <= float(total_entropy[n]) + 1e-9


def test_entropies_of_variances_beyond_float32_are_finite():
    outputs = torch.tensor([0.0, 100.0]).expand(M, B, 2)
    for name in ("gaussian_entropy", "mean_gaussian_entropy"):
        expected = torch.full((B,), 50 + math.log(2 * math.pi * math.e) / 2)
        torch.testing.assert_close(getattr(ds.scores, name)(outputs), expected)


def test_information_of_members_far_apart_is_their_number():
    outputs = torch.stack([torch.tensor([[1e4 * i, 0.0]]) for i in range(5)])
    for name in ("gaussian_information_lower", "gaussian_information_upper"):
        assert float(getattr(ds.scores, name)(outputs)) == pytest.approx(math.log(5))


@pytest.mark.parametrize("kind", ["values", "gaussian", "quantiles"])
def test_a_table_of_regression(kind):
    outputs = draw(M, 50, 6)
    table = ds.scores.table(outputs, kind=kind)
    assert list(table) == [name for name, score in REGRESSION_SCORES.items() if score.takes == kind]
    sliced = ds.scores.table(outputs, kind=kind, at_once=M * 6 * 7)
    for name, values in table.items():
        torch.testing.assert_close(sliced[name], values)
        torch.testing.assert_close(values, REGRESSION_SCORES[name].function(outputs))
    mine = ds.scores.table(outputs, kind=kind, scores={"range": lambda f: (f.amax(0) - f.amin(0)).amax(-1)})
    torch.testing.assert_close(mine["range"], (outputs.amax(0) - outputs.amin(0)).amax(-1))
    with pytest.raises(ValueError, match=f"`scores` must hold a score of {kind}"):
        ds.scores.table(outputs, kind=kind, scores=ds.scores.SCORES)


def test_outputs_of_another_kind_are_refused(unchecked):
    for name in ("epistemic_variance", "gaussian_pairwise_kl"):
        with pytest.raises(ValueError, match="two outputs per target"):
            getattr(ds.scores, name)(draw(2, 3, 3))
    with pytest.raises(ValueError, match="`outputs` must have 3 quantiles per target"):
        ds.scores.interval_width(draw(2, 3, 4))
    with pytest.raises(ValueError, match="`kind` must be one of 'logits', 'probabilities', 'values', 'gaussian'"):
        ds.scores.table(draw(2, 3, 4), kind="gauss")
    with pytest.raises(ValueError, match="at least one member"):
        ds.scores.value_variance(torch.zeros(0, 3, 1))


@pytest.mark.parametrize(("kind", "width"), [("values", 1), ("gaussian", 4), ("quantiles", 3)])
def test_the_command_takes_regression_outputs(kind, width, tmp_path):
    inside, outside = draw(3, 60, width).numpy(), 3 * draw(3, 50, width, seed=1).numpy()
    np.save(tmp_path / "inside.npy", inside)
    np.save(tmp_path / "far.npy", outside)
    options = ["--outside", str(tmp_path / "far.npy"), "--kind", kind, "--repeats", "20"]
    done = CliRunner().invoke(
        app, ["ood", str(tmp_path / "inside.npy"), *options, "--json", str(tmp_path / "out.json")]
    )
    assert done.exit_code == 0, done.output
    assert f"3 members, {width} outputs" in done.output
    scores = json.loads((tmp_path / "out.json").read_text())["sets"]["far"]["scores"]
    expected = {name: ds.scores.table(torch.from_numpy(inside), kind=kind)[name] for name in scores}
    for name, values in expected.items():
        area = ds.metrics.auroc(values, ds.scores.table(torch.from_numpy(outside), kind=kind)[name])
        assert scores[name]["auroc"][0] == pytest.approx(area.value)
    assert set(scores) == {name for name, score in REGRESSION_SCORES.items() if score.takes == kind}


def test_the_command_refuses_outputs_of_another_kind(tmp_path):
    np.save(tmp_path / "a.npy", draw(3, 10, 3).numpy())
    arguments = ["ood", str(tmp_path / "a.npy"), "--outside", f"b={tmp_path / 'a.npy'}", "--kind"]
    odd = CliRunner().invoke(app, [*arguments, "gaussian"])
    assert odd.exit_code != 0
    assert "two outputs per target" in " ".join(odd.output.split())
    unknown = CliRunner().invoke(app, [*arguments, "normal"])
    assert "--kind must be logits, probabilities, values, gaussian or quantiles; got normal" in " ".join(
        unknown.output.split()
    )
