"""The contract of every score, in one table: `ORACLES` must name all scores of `dissensus.scores.SCORES`.

Each score is checked against a slow numpy version of its equation, and for what all scores have in common: shape, order
of members and examples, range, equal members, one member, half precision, large logits and NaN.
"""

import inspect
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import dissensus as ds
from dissensus.auditing.detection import DETECTORS
from dissensus.scores import SCORES, Score

M, B, C = 4, 40, 5
CLASSES = {"task": "classification", "kind": "logits"}


def draw(*shape, seed=0, scale=2.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


# --- slow versions, from the equations; f and p are [M, C], the outputs of one example


def entropy(p):
    return -sum(q * math.log(q) for q in p if q > 0)


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def jsd(p, q):
    middle = (p + q) / 2
    return (kl(p, middle) + kl(q, middle)) / 2


def over_pairs(divergence, p):
    pairs = list(itertools.permutations(range(len(p)), 2))
    return sum(divergence(p[i], p[j]) for i, j in pairs) / len(pairs) if pairs else 0.0


ORACLES = {
    # LDR paper, equation 10: (1/C) Σ_c max_m p_c^m
    "predictive_diversity": lambda f, p: sum(max(p[:, c]) for c in range(p.shape[1])) / p.shape[1],
    # LDR paper, equation 9: max_c (1/M) Σ_m p_c^m, turned so that higher is farther out
    "model_average": lambda f, p: 1 - max(sum(p[:, c]) / len(p) for c in range(p.shape[1])),
    # LDR paper, equation 16: (1/M) Σ_m max_c p_c^m, turned likewise
    "mean_least_confidence": lambda f, p: 1 - sum(max(member) for member in p) / len(p),
    # LDR paper, equation 14, times C
    "mean_entropy": lambda f, p: sum(entropy(member) for member in p) / len(p),
    # LDR paper, equation 15, times C
    "ensemble_entropy": lambda f, p: entropy(sum(p) / len(p)),
    "mutual_information": lambda f, p: sum(kl(member, sum(p) / len(p)) for member in p) / len(p),
    "pairwise_kl": lambda f, p: over_pairs(kl, p),
    "pairwise_jsd": lambda f, p: over_pairs(jsd, p),
    "probability_variance": lambda f, p: sum(((member - sum(p) / len(p)) ** 2).mean() for member in p) / len(p),
    # LDR paper, §4.2: #unique
    "distinct_predictions": lambda f, p: float(len({max(range(len(m)), key=lambda c: m[c]) for m in p.tolist()})),
    # LDR paper, equation 13: −(1/M) Σ_m log Σ_c exp f_c^m
    "mean_energy": lambda f, p: -sum(math.log(sum(math.exp(x) for x in member)) for member in f.tolist()) / len(f),
    "max_logit": lambda f, p: -max(sum(f[:, c]) / len(f) for c in range(f.shape[1])),
}
every_score = pytest.mark.parametrize("name", SCORES)


def oracle(name, logits):
    f = logits.numpy()
    p = np.exp(f - f.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return torch.tensor([ORACLES[name](f[:, n], p[:, n]) for n in range(f.shape[1])], dtype=torch.float64)


def computed(name, logits):
    """A score by its own function, which takes logits or probabilities."""
    score = SCORES[name]
    return score.function(logits if score.takes == "logits" else logits.softmax(-1))


# --- the table


def test_the_table_holds_every_score_and_the_oracles_every_entry():
    functions = {
        name: value
        for name, value in vars(ds.scores).items()
        if inspect.isfunction(value) and value.__module__ == "dissensus.scores" and not name.startswith("_")
    }
    functions = {name: value for name, value in functions.items() if name not in ("select", "of_logits", "table")}
    functions["distinct_predictions"] = ds.diversity.distinct_predictions  # a measure of diversity, and a score
    assert set(SCORES) == set(functions), "a public score is missing in SCORES, or has another name there"
    assert all(SCORES[name].function is function for name, function in functions.items())
    assert set(ORACLES) == set(SCORES), "a score has no oracle in this file"


def test_the_documentation_lists_every_score():
    page = (Path(__file__).parents[1] / "docs/detection.md").read_text()
    rows = {line.split("|")[1].strip().strip("`"): line for line in page.splitlines() if line.startswith("| `")}
    assert set(SCORES) <= set(rows)
    for name, score in SCORES.items():
        assert f"| {score.takes} |" in rows[name], name


# --- values


@every_score
@pytest.mark.parametrize(("members", "classes"), [(M, C), (2, 2), (7, 3)])
def test_every_score_equals_its_equation(name, members, classes):
    logits = draw(members, B, classes, seed=members)
    scores = computed(name, logits)
    assert scores.dtype == torch.float64
    assert scores.shape == (B,)
    torch.testing.assert_close(scores, oracle(name, logits), rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(ds.scores.of_logits(name, logits), scores, rtol=1e-10, atol=1e-13)


@every_score
def test_the_order_of_members_and_examples_does_not_matter(name):
    logits = draw(M, B, C)
    members, examples = torch.tensor([2, 0, 3, 1]), torch.randperm(B, generator=torch.Generator().manual_seed(1))
    expected = computed(name, logits)
    torch.testing.assert_close(computed(name, logits[members]), expected)
    torch.testing.assert_close(computed(name, logits[:, examples]), expected[examples])


@every_score
@pytest.mark.parametrize("members", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_members_and_one_member(name, members, dtype):
    """Scores of disagreement are at the lower end of their range; others are those of the member itself."""
    member_logits = 1.5 * draw(1, 400, 10, seed=members, dtype=dtype)
    scores = computed(name, member_logits.expand(members, -1, -1))
    low, _ = SCORES[name].bounds(members, 10)
    expected = torch.full_like(scores, low) if SCORES[name].disagreement else computed(name, member_logits)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5 if dtype is torch.float32 else 1e-13)
    assert (scores >= low).all() or name == "predictive_diversity", "not below its range, not even by rounding"


@every_score
@pytest.mark.parametrize(("members", "classes"), [(1, 3), (2, 5), (5, 2), (6, 6)])
def test_every_score_lies_within_its_bounds(name, members, classes):
    low, high = SCORES[name].bounds(members, classes)
    for scale in (0.0, 1.0, 30.0, 1e4):
        scores = computed(name, draw(members, 100, classes, scale=scale))
        assert (scores >= low - 1e-12).all()
        assert (scores <= high + 1e-12).all()
    assert low < high or (SCORES[name].disagreement and members == 1)


@pytest.mark.parametrize("name", [name for name in SCORES if math.isfinite(SCORES[name].bounds(2, 2)[1])])
def test_the_bounds_are_reached(name):
    """Members that are certain of different classes, or not certain at all, reach the upper end."""
    low, high = SCORES[name].bounds(4, 4)
    different = torch.eye(4, dtype=torch.float64).unsqueeze(1)
    certain, uncertain = different[:1].expand(4, -1, -1), torch.full((4, 1, 4), 0.25, dtype=torch.float64)
    values = [float(SCORES[name].function(probs)) for probs in (different, certain, uncertain)]
    assert max(values) == pytest.approx(math.log(2) if name == "pairwise_jsd" else high)
    assert min(values) == pytest.approx(low)


@every_score
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_logits_are_finite(name, dtype):
    logits = (1e4 * draw(M, B, C).sign()).to(dtype)
    logits[2] = logits[1]
    assert computed(name, logits).isfinite().all()
    assert ds.scores.of_logits(name, logits).isfinite().all()
    assert ds.scores.table(logits)[name].isfinite().all()


@every_score
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single_precision(name, dtype):
    logits = draw(M, B, C).to(dtype)
    outputs = logits if SCORES[name].takes == "logits" else logits.softmax(-1)
    scores = SCORES[name].function(outputs)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, SCORES[name].function(outputs.float()))
    in_table = ds.scores.table(logits)[name]
    torch.testing.assert_close(in_table, ds.scores.table(logits.float())[name])
    torch.testing.assert_close(in_table.double(), ds.scores.table(logits.double())[name], rtol=1e-4, atol=1e-6)


@every_score
def test_nan_affects_its_example_only(name):
    logits = draw(M, B, C)
    expected = computed(name, logits)
    outputs = logits if SCORES[name].takes == "logits" else logits.softmax(-1)
    outputs = outputs.clone()
    outputs[1, 7, 2] = math.nan
    scores = SCORES[name].function(outputs)
    assert scores.isnan().nonzero().tolist() == [[7]]
    unaffected = torch.arange(B) != 7
    torch.testing.assert_close(scores[unaffected], expected[unaffected])


@every_score
def test_a_score_is_higher_out_of_distribution(name):
    labels = torch.arange(200) % 4
    in_distribution = 6 * torch.nn.functional.one_hot(labels, 4) + draw(5, 200, 4, scale=0.3)
    assert computed(name, draw(5, 200, 4, seed=1)).mean() > computed(name, in_distribution).mean()


@pytest.mark.parametrize(
    "name",
    [name for name, score in SCORES.items() if score.takes == "probabilities" and name != "distinct_predictions"],
)
def test_scores_of_probabilities_refuse_logits(name):
    logits = draw(3, 5, 4, scale=3.0)
    with pytest.raises(ValueError, match=r"Logits\? Use logits.softmax"):
        SCORES[name].function(logits)


# --- what single scores are known for


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distance", [50.0, 100.0, 200.0, 5000.0])
def test_divergence_of_pairs_has_no_cap(distance, dtype):
    logits = torch.tensor([[[0.0, distance]], [[distance, 0.0]]], dtype=dtype)
    expected = torch.tensor([distance], dtype=dtype)  # (1 − ε)·distance
    torch.testing.assert_close(ds.scores.table(logits)["pairwise_kl"], expected)
    torch.testing.assert_close(ds.scores.of_logits("pairwise_kl", logits), expected)
    torch.testing.assert_close(ds.scores.pairwise_kl(log_probs=logits.log_softmax(-1)), expected)
    if distance < (100 if dtype is torch.float32 else 700):
        torch.testing.assert_close(ds.scores.pairwise_kl(logits.softmax(-1)), expected)


def test_divergence_of_pairs_takes_probabilities_or_their_logarithms():
    probs = draw(M, B, C).softmax(-1)
    torch.testing.assert_close(ds.scores.pairwise_kl(probs), ds.scores.pairwise_kl(log_probs=probs.log()))
    for options in ({}, {"probs": probs, "log_probs": probs.log()}):
        with pytest.raises(ValueError, match="`probs` must be given, or `log_probs` instead"):
            ds.scores.pairwise_kl(**options)
    with pytest.raises(ValueError, match=r"Logits\? Use logits.log_softmax"):
        ds.scores.pairwise_kl(log_probs=draw(M, B, C))
    impossible_classes = torch.tensor([[[0.0, -math.inf]], [[-math.inf, 0.0]]])
    assert ds.scores.pairwise_kl(log_probs=impossible_classes).isfinite().all()


def test_bfloat16_logits_keep_their_ranking():
    rounded = draw(5, 2000, 10, scale=1.0).bfloat16()
    assert len(ds.scores.table(rounded)["mutual_information"].unique()) > 1900


# --- all scores at once, and scores of a user


def test_a_table_computed_in_slices_is_the_same():
    logits = draw(M, 50, C)
    table, sliced = ds.scores.table(logits), ds.scores.table(logits, at_once=M * C * 7)
    assert list(table) == list(SCORES)
    for name, values in table.items():
        torch.testing.assert_close(sliced[name], values)
        torch.testing.assert_close(values, computed(name, logits))
    of_probs = ds.scores.table(logits.softmax(-1), kind="probabilities")
    assert list(of_probs) == [name for name, score in SCORES.items() if score.takes == "probabilities"]


def test_an_empty_ensemble_is_refused(unchecked):
    with pytest.raises(ValueError, match="hold at least one member"):
        ds.scores.predictive_diversity(torch.zeros(0, 3, 2))


def largest_range(probs):
    """A score from outside the package."""
    return (probs.amax(0) - probs.amin(0)).amax(-1)


MARGIN = Score(lambda logits: -logits.mean(0).topk(2).values.diff().abs().squeeze(-1), "logits", "margin")


def test_the_table_takes_custom_scores():
    logits = draw(M, B, C)
    table = ds.scores.table(logits, scores={**SCORES, "largest_range": largest_range, "margin": MARGIN}, at_once=M * C)
    assert list(table) == [*SCORES, "largest_range", "margin"]
    torch.testing.assert_close(table["largest_range"], largest_range(logits.softmax(-1)))
    torch.testing.assert_close(table["margin"], MARGIN.function(logits))
    from_probs = ds.scores.table(
        logits.softmax(-1), kind="probabilities", scores={"range": largest_range, "margin": MARGIN}
    )
    assert list(from_probs) == ["range"], "a score of logits cannot be computed from probabilities"
    assert "largest_range" not in SCORES, "the table of built-in scores is left as it is"


def test_the_audit_takes_custom_scores():
    labels = torch.arange(200) % C
    inside = 4 * torch.nn.functional.one_hot(labels, C) + draw(M, 200, C, scale=1.0)
    outside = draw(M, 100, C, seed=1, scale=1.0)
    scores = {"range": largest_range, "margin": MARGIN, "kl": SCORES["pairwise_kl"]}
    detection = ds.audit(inside, labels, ood=outside, scores=scores, **CLASSES).detection
    assert list(detection) == list(scores)
    for name, values in ds.scores.table(inside, scores=scores).items():
        expected = ds.metrics.auroc(values.float(), ds.scores.table(outside, scores=scores)[name].float())
        assert detection[name] == pytest.approx(expected), name
    assert list(ds.audit(inside, labels, ood=outside, **CLASSES).detection) == list(DETECTORS)
    f, y = inside[..., :2], inside[..., :2].mean(0) + 0.1
    by_range = ds.audit(f, y, task="regression", ood=outside[..., :2], scores={"range": largest_range}).detection
    assert list(by_range) == ["range"]


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([largest_range], "`scores` must be a dictionary"),
        ({}, "`scores` must be a dictionary"),
        ({"range": 3.0}, "`scores` must hold functions"),
        ({1: largest_range}, "`scores` must hold functions"),
        ({"mean": lambda probs: probs.mean()}, r"must return one number per example, \[B=40\]; got \[\]"),
        ({"list": lambda probs: [0.0] * probs.shape[1]}, "must return one number per example"),
        ({"values": Score(largest_range, "values")}, "`scores` must hold a score of logits; got 'values'"),
    ],
)
def test_invalid_scores_are_refused(scores, message, unchecked):
    logits = draw(M, B, C)
    with pytest.raises((TypeError, ValueError), match=message):
        ds.scores.table(logits, scores=scores)
    with pytest.raises((TypeError, ValueError), match=message):
        ds.audit(logits, torch.arange(B) % C, ood=logits, scores=scores, **CLASSES)


def test_scores_without_ood_data_are_refused():
    with pytest.raises(ValueError, match="`scores` must come with `ood`"):
        ds.audit(draw(M, B, C), torch.arange(B) % C, scores={"range": largest_range}, **CLASSES)
