"""The audit: its figures against the library's own functions, its verdicts on ensembles whose state is known."""

import json
import math
import pickle

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import cohen_kappa_score, roc_auc_score
from sklearn.tree import ExtraTreeClassifier
from typer.testing import CliRunner

import dissensus as ds
from dissensus.auditing import reading, roc_area, streaming, tallying
from dissensus.auditing.detection import DETECTORS
from dissensus.auditing.page import drawings, page
from dissensus.auditing.sums import tensors
from dissensus.cli import app
from dissensus.pages import html

CLASSES = {"task": "classification", "kind": "logits"}


def classifier(members=4, examples=300, classes=3, seed=0, scale=1.5):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (examples,), generator=generator)
    shared = torch.nn.functional.one_hot(labels, classes) * 2.0 + torch.randn(examples, classes, generator=generator)
    logits = shared + scale * torch.randn(members, examples, classes, generator=generator)
    return logits.double(), labels


def regressor(members=4, examples=300, width=2, seed=0, noise=0.4):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(examples, width, generator=generator, dtype=torch.float64)
    shared = y + 0.5 * torch.randn(examples, width, generator=generator, dtype=torch.float64)
    return shared + noise * torch.randn(members, examples, width, generator=generator, dtype=torch.float64), y


def values(audit):
    return {name: figure.value for name, figure in audit.test.items()}


@pytest.mark.parametrize("pool", ["probability", "score"])
@pytest.mark.parametrize("loss", ["cross_entropy", "brier"])
def test_figures_of_a_classifier_are_those_of_the_library(loss, pool):
    logits, labels = classifier()
    figures = values(ds.audit(logits, labels, loss=loss, pool=pool, **CLASSES))
    parts = ds.diversity.decompose(logits, labels, loss=loss, pool=pool)
    pooled = ds.pooling.mean_probability(logits) if pool == "probability" else ds.pooling.mean_score(logits)
    brier = ds.losses.brier(pooled, labels).mean()
    member_brier = ds.losses.brier(logits, labels).mean(-1)
    variance, covariance = ds.diversity.mean_covariance(ds.diversity.error_covariance(logits, labels, loss="brier"))
    pairs = ds.diversity.pairwise_disagreement(logits)
    expected = {
        "ensemble": parts.ensemble.mean(),
        "individual": parts.individual.mean(),
        "diversity": parts.diversity.mean(),
        "accuracy": (pooled.argmax(-1) == labels).double().mean(),
        "nll": ds.losses.cross_entropy(pooled, labels).mean(),
        "brier": brier,
        "member_brier": member_brier.mean(),
        "member_accuracy": (logits.argmax(-1) == labels).double().mean(),
        "error_covariance": covariance,
        "error_correlation": covariance / variance,
        "relative_diversity": ds.diversity.relative_diversity(logits, labels, loss="brier", pool="probability"),
        "gain": (member_brier.mean() - brier) / member_brier.mean(),
        "dominance": ds.diversity.dominance(logits, labels, loss=loss, pool=pool),
        "disagreement": pairs.sum() / 12,
        "distinct": ds.diversity.distinct_predictions(logits).mean(),
    }
    if pool == "probability":
        expected["bias_share"] = ds.diversity.bias_share(logits, pool="probability")
    else:
        centred = logits - logits.mean(-1, keepdim=True)
        expected["bias_share"] = ds.diversity.bias_share(centred)
    for name, value in expected.items():
        assert figures[name] == pytest.approx(float(value), rel=1e-6), name


def test_figures_of_a_regression():
    f, y = regressor()
    figures = values(ds.audit(f, y, task="regression"))
    parts = ds.diversity.decompose(f, y, loss="mse", pool="score")
    assert figures["mse"] == pytest.approx(float(parts.ensemble.mean()))
    assert figures["relative_diversity"] == pytest.approx(
        float(ds.diversity.relative_diversity(f, y, loss="mse", pool="score"))
    )
    assert figures["bias_share"] == pytest.approx(float(ds.diversity.bias_share(f)))
    spread = (y - y.mean(0)).square().mean()
    assert figures["explained"] == pytest.approx(1 - float(parts.ensemble.mean() / spread))
    for drop in (0.4, 0.6):  # of four members a fifth is nobody
        rise = ds.diversity.codependence(f, y, loss="mse", pool="score", drop=drop).mean() / parts.ensemble.mean()
        assert figures[f"codependence_{drop}"] == pytest.approx(float(rise), abs=1e-12)


def test_codependence_of_likelihoods_is_sampled_closely():
    logits, labels = classifier(members=5, examples=2000)
    for pool in ("probability", "score"):
        figures = values(ds.audit(logits, labels, pool=pool, **CLASSES))
        settings = {"loss": "cross_entropy", "pool": pool, "repeats": 50}
        for drop in (0.2, 0.4, 0.6):
            rise = ds.diversity.codependence(logits, labels, drop=drop, **settings).mean()
            assert figures[f"codependence_{drop}"] == pytest.approx(float(rise) / figures["ensemble"], rel=0.1)


def test_calibration_error_by_hand():
    logits, labels = classifier(members=3, examples=400)
    figures = values(ds.audit(logits, labels, **CLASSES))

    def ece(probs):
        confidence, predicted = probs.max(-1)
        correct = (predicted == labels).double()
        bins = (confidence * 15).long().clamp_max(14)
        return sum(float((confidence[bins == b] - correct[bins == b]).sum().abs()) / len(labels) for b in bins.unique())

    probs = logits.softmax(-1)
    assert figures["ece"] == pytest.approx(ece(probs.mean(0)))
    assert figures["member_ece"] == pytest.approx(np.mean([ece(p) for p in probs]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_calibration_errors_on_the_edges_of_bins_are_those_of_the_library(dtype):
    confidence = torch.randint(16, 30, (400,)).to(dtype) / 30  # edges of fifteen bins, and their middles
    labels = torch.randint(2, (400,))
    probs = torch.stack([confidence, 1 - confidence], -1).expand(2, -1, -1)
    error = ds.audit(probs, labels, task="classification", kind="probabilities").test["ece"].value
    assert error == pytest.approx(ds.metrics.calibration(probs.mean(0).log(), labels).error, abs=1e-6)
    exact = ds.metrics.calibration(probs.double().mean(0).log(), labels).error
    assert error == pytest.approx(exact, abs=1e-6)


def test_scores_of_detection_are_those_of_the_library():
    logits, labels = classifier()
    outside, _ = classifier(seed=1)
    detection = ds.audit(logits, labels, ood=outside, **CLASSES).detection
    inside, beyond = (ds.scores.table(part) for part in (logits, outside))
    score_names = {
        "distinct predictions": "distinct_predictions",
        "mutual information": "mutual_information",
        "predictive diversity": "predictive_diversity",
        "least confidence of the mean": "model_average",
        "entropy of the mean": "ensemble_entropy",
    }
    assert detection.keys() == score_names.keys()
    for label, name in score_names.items():
        assert detection[label].value == pytest.approx(ds.metrics.auroc(inside[name], beyond[name]).value, abs=1e-4), (
            label
        )


def test_probabilities_say_the_same_as_their_logits():
    logits, labels = classifier()
    a = values(ds.audit(logits, labels, **CLASSES))
    b = values(ds.audit(logits.softmax(-1).numpy(), labels.numpy(), task="classification", kind="probabilities"))
    assert a == pytest.approx(b, rel=1e-6)


def test_votes():
    logits, labels = classifier(classes=2)
    figures = values(ds.audit(logits, labels, loss="zero_one", pool="vote", **CLASSES))
    parts = ds.diversity.decompose(logits, labels, loss="zero_one", pool="vote")
    assert figures["ensemble"] == pytest.approx(float(parts.ensemble.mean()))
    assert figures["accuracy"] == pytest.approx(1 - float(parts.ensemble.mean()))


def test_slices_change_nothing(monkeypatch):
    logits, labels = classifier(examples=500)
    expected = ds.audit(logits, labels, loss="brier", **CLASSES)
    monkeypatch.setattr(streaming, "NUMBERS_AT_ONCE", 45 * 4 * 7)
    sliced = ds.audit(logits, labels, loss="brier", **CLASSES)
    assert values(sliced) == pytest.approx(values(expected), rel=1e-9)
    assert sliced.test["accuracy"].low == pytest.approx(expected.test["accuracy"].low)


def test_outputs_may_be_maps_lists_or_tensors(tmp_path):
    logits, labels = classifier()
    expected = values(ds.audit(logits, labels, **CLASSES))
    np.save(tmp_path / "o.npy", logits.numpy())
    forms = {
        "memory map": np.load(tmp_path / "o.npy", mmap_mode="r"),
        "list": list(logits),
        "arrays": list(logits.numpy()),
        "with gradient": logits.clone().requires_grad_(),
    }
    for outputs in forms.values():
        assert values(ds.audit(outputs, labels, **CLASSES)) == pytest.approx(expected)
    half_precision = values(ds.audit(logits.numpy().astype(np.float16), labels.numpy(), **CLASSES))
    assert half_precision["nll"] == pytest.approx(expected["nll"], rel=1e-2)
    f, y = regressor(width=1)
    assert values(ds.audit(f[..., 0], y[:, 0], task="regression")) == pytest.approx(
        values(ds.audit(f, y, task="regression"))
    )


def test_large_outputs_are_counted_in_single_precision_and_agree(monkeypatch):
    logits, labels = classifier()
    exact = values(ds.audit(logits, labels, loss="brier", **CLASSES))
    monkeypatch.setattr(streaming, "_EXACT_UP_TO", 10)
    assert streaming.OutputReader(logits).dtype == torch.float32
    assert values(ds.audit(logits, labels, loss="brier", **CLASSES)) == pytest.approx(exact, rel=1e-4)


def test_intervals_are_those_of_the_ordinary_bootstrap():
    """Blocks of many examples give the width that theory gives: the accuracy's standard error is known."""
    logits, labels = classifier(examples=20_000)
    accuracy = ds.audit(logits.float(), labels, **CLASSES).test["accuracy"]
    p = accuracy.value
    assert accuracy.low < p < accuracy.high
    assert (accuracy.high - accuracy.low) == pytest.approx(2 * 1.96 * math.sqrt(p * (1 - p) / 20_000), rel=0.15)


@pytest.mark.slow(cases=["4-300-score", "4-300-probability", "4-300-vote"])
@pytest.mark.parametrize("pool", ["probability", "score", "vote"])
@pytest.mark.parametrize(("members", "examples"), [(1, 40), (3, 20), (4, 300), (12, 25)])
def test_estimates_lie_within_their_intervals(members, examples, pool):
    loss = "zero_one" if pool == "vote" else "cross_entropy"
    for seed in range(6):
        logits, labels = classifier(members, examples, seed=seed, scale=(0.0, 0.3, 3.0)[seed % 3])
        f, y = regressor(members, examples, seed=seed)
        audits = [ds.audit(logits, labels, pool=pool, loss=loss, **CLASSES), ds.audit(f, y, task="regression")]
        for name, (value, low, high) in ((n, f) for audit in audits for n, f in audit.test.items()):
            if not any(math.isnan(number) for number in (value, low, high)):
                assert low <= value <= high, name


def calibrated(seed, examples=400, members=5, classes=4):
    """Members that are equally good, of which the first is as sure as it should be; none has a constant bias."""
    generator = torch.Generator().manual_seed(seed)
    truth = 1.5 * torch.randn(examples, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(truth.softmax(-1), 1, generator=generator).squeeze(1)
    return (
        truth + 0.8 * torch.randn(members, examples, classes, generator=generator, dtype=torch.float64),
        truth,
        labels,
    )


@pytest.mark.slow
def test_intervals_of_biased_figures_hold_the_truth():
    """What is zero in truth, and what several members share. Percentiles hold none of the first three, ever."""
    covered = dict.fromkeys(("ece", "bias_share", "dominance", "best_accuracy", "above_chance"), 0)
    everyone, _, labels = calibrated(10_000, examples=40_000)
    accuracy = float((everyone.argmax(-1) == labels).double().mean())
    population = ds.audit(everyone.float(), labels, **CLASSES).test
    for seed in range(60):
        logits, truth, labels = calibrated(seed)
        figures = ds.audit(logits, labels, **CLASSES).test
        single = ds.audit(truth.unsqueeze(0), labels, **CLASSES).test
        covered["ece"] += single["ece"].low == 0
        covered["bias_share"] += figures["bias_share"].low == 0
        covered["dominance"] += figures["dominance"].low == 0
        covered["best_accuracy"] += figures["best_accuracy"].low <= accuracy <= figures["best_accuracy"].high
        share = population["member_kappa"].value / population["kappa"].value
        covered["above_chance"] += figures["above_chance"].low <= share <= figures["above_chance"].high
    assert min(covered.values()) >= 53, covered


@pytest.mark.parametrize("members", [2, 3, 5, 7])
def test_equal_members_have_no_bias_not_even_by_rounding(members):
    logits, labels = classifier(members=1, classes=7)
    figures = ds.audit(logits.expand(members, -1, -1), labels, **CLASSES).test
    assert figures["bias_share"] == (0.0, 0.0, 0.0)
    assert figures["spread"].value == 0


def test_blocks_do_not_follow_the_order_of_the_data():
    """Sorted by class, every tenth example would make blocks that are too much alike."""
    logits, labels = classifier(examples=5000)
    order = labels.argsort()
    a, b = (
        ds.audit(o, y, **CLASSES).test["accuracy"] for o, y in ((logits, labels), (logits[:, order], labels[order]))
    )
    assert (b.high - b.low) == pytest.approx(a.high - a.low, rel=0.2)


def near_chance(members=5, examples=600, classes=50, seed=0):
    """Members whose logits cancel: each is lost, their mean is right."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (examples,), generator=generator)
    truth = 6.0 * torch.nn.functional.one_hot(labels, classes)
    noise = 40 * torch.randn(members, examples, classes, generator=generator)
    return truth + noise - noise.mean(0), labels


def test_members_near_chance_under_an_ensemble_that_is_right_are_never_healthy():
    """Test outputs cannot tell them from weak learners; a reference can."""
    logits, labels = near_chance()
    audit = ds.audit(logits, labels, pool="score", **CLASSES)
    assert audit.test["accuracy"].value == 1.0
    assert audit.test["best_accuracy"].value < 0.15
    assert audit.verdict == "undecided"
    assert any("even the best member" in reason for reason in audit.judgement.reasons)
    noise = 2.0 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    independent = logits.mean(0) + noise - noise.mean(0)
    assert ds.audit(logits, labels, pool="score", reference=independent, **CLASSES).verdict == "collusive"


def turns(members=5, examples=400, seed=0):
    """Two classes; each member shouts what is right on examples of its own, and mutters what is wrong on the others."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (examples,), generator=generator)
    turn = torch.arange(examples) % members == torch.arange(members).unsqueeze(1)
    lead = torch.where(turn, 3.0 * members, -2.0) + 0.1 * torch.randn(members, examples, generator=generator)
    sign = (2.0 * labels - 1).expand(members, -1)
    return torch.stack([-lead * sign / 2, lead * sign / 2], -1), labels


@pytest.mark.parametrize("members", [5, 8, 10, 20])
def test_members_that_each_know_some_examples_are_not_called_healthy(members):
    logits, labels = turns(members)
    audit = ds.audit(logits, labels, pool="score", **CLASSES)
    assert audit.test["accuracy"].value == 1.0
    assert audit.test["member_accuracy"].value < 0.3
    assert audit.verdict == "undecided"
    assert "`reference`" in audit.judgement.advice[0]


def test_kappa_is_cohens():
    generator = torch.Generator().manual_seed(3)
    labels = (torch.rand(500, generator=generator) < 0.15).long()
    signs = torch.stack([1.0 - 2 * labels, 2.0 * labels - 1], -1)
    logits = signs + 1.5 * torch.randn(4, 500, 2, generator=generator) + torch.tensor([0.0, 0.6])
    audit = ds.audit(logits, labels, pool="score", **CLASSES)
    kappas = [cohen_kappa_score(labels, predicted) for predicted in logits.argmax(-1)]
    pooled_kappa = cohen_kappa_score(labels, logits.mean(0).argmax(-1))
    assert audit.test["kappa"].value == pytest.approx(pooled_kappa)
    assert audit.test["member_kappa"].value == pytest.approx(sum(kappas) / 4)
    assert audit.test["above_chance"].value == pytest.approx(max(kappas) / pooled_kappa)


def test_kappa_of_one_class_alone_is_nothing_and_accuses_nobody():
    logits = torch.randn(3, 60, 2, generator=torch.Generator().manual_seed(0)) + torch.tensor([2.0, 0.0])
    audit = ds.audit(logits, torch.zeros(60, dtype=torch.long), pool="score", **CLASSES)
    assert math.isnan(audit.test["kappa"].value) or audit.test["kappa"].value == 0
    assert audit.verdict != "collusive"


@pytest.mark.parametrize("digit", [0, 6])
def test_weak_trees_for_a_rare_class_are_sound(digit):
    """Each is right less often than who always says "no", since it was trained on as many of either."""
    pictures, digits = load_digits(return_X_y=True)
    labels = (digits == digit).astype(int)
    train, test = slice(0, 1100), slice(1100, None)
    draw = np.random.default_rng(0)
    outputs = []
    for seed in range(20):
        chosen = np.concatenate([draw.choice(np.flatnonzero(labels[train] == kind), 80) for kind in (0, 1)])
        tree = ExtraTreeClassifier(max_features=1, random_state=seed).fit(pictures[chosen], labels[chosen])
        outputs.append(tree.predict_proba(pictures[test]))
    audit = ds.audit(np.stack(outputs), labels[test], task="classification", kind="probabilities")
    assert audit.test["member_accuracy"].value < (labels[test] == 0).mean()
    assert audit.test["member_kappa"].value > 0.2
    assert audit.verdict == "healthy"


def test_one_strong_member_among_many_that_guess_is_no_collusion():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (600,), generator=generator)
    strong = 6.0 * torch.nn.functional.one_hot(labels, 2) + torch.randn(600, 2, generator=generator)
    logits = torch.cat([strong.unsqueeze(0), 0.05 * torch.randn(29, 600, 2, generator=generator)])
    assert ds.audit(logits, labels, pool="score", **CLASSES).verdict != "collusive"


def test_verdicts_on_ensembles_whose_state_is_known():
    logits, labels = classifier(members=5, examples=800, scale=0.7)
    f, y = regressor(members=5, examples=800)
    assert ds.audit(logits, labels, **CLASSES).verdict == "healthy"
    assert ds.audit(f, y, task="regression").verdict == "healthy"
    assert ds.audit(f[:1].expand(5, -1, -1), y, task="regression").verdict == "redundant"
    assert ds.audit(logits[:1].expand(5, -1, -1), labels, **CLASSES).verdict == "redundant"
    shifts = torch.tensor([-3.0, -1.0, 0.5, 1.5, 2.0]).double().view(5, 1, 1)
    constant = ds.audit(f + shifts, y, task="regression")
    assert constant.verdict == "collusive"
    assert "constant offsets" in constant.sentence
    assert "other populations" in constant.judgement.advice[0], "both causes are named"
    per_example = 3 * torch.randn(5, 800, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    cancelling = ds.audit(f + per_example - per_example.mean(0), y, task="regression")
    assert cancelling.verdict == "collusive", cancelling.sentence
    assert "M − 1 = 4" in cancelling.sentence
    strong = torch.cat([f[:1], torch.zeros(4, 800, 2)])
    assert ds.audit(strong, y, task="regression").verdict == "dominated"
    single = ds.audit(f[:1], y, task="regression")
    assert single.verdict == "undecided"
    assert "one member" in single.sentence


def test_a_reference_or_training_outputs_show_what_test_outputs_hide():
    f, y = regressor(members=20, examples=800, noise=0.3)
    hidden = 0.9 * torch.randn(20, 800, 2, dtype=torch.float64)
    outputs = f + hidden - hidden.mean(0)
    assert ds.audit(outputs, y, task="regression").verdict == "healthy", "the errors' correlation is unsuspicious"
    audit = ds.audit(outputs, y, task="regression", reference=f)
    assert audit.verdict == "collusive"
    assert "reference" in audit.sentence
    fitted = y + 0.05 * torch.randn(20, 800, 2, dtype=torch.float64)
    on_train = ds.audit(outputs, y, task="regression", train=(fitted + hidden - hidden.mean(0), y))
    assert on_train.verdict == "collusive"
    assert "training data" in on_train.sentence
    assert ds.audit(f, y, task="regression", reference=f, train=(fitted, y)).verdict == "healthy"


def test_members_that_err_independently_are_sound():
    """Uncorrelated errors are the best that members can have; with few of them correlations below zero are luck."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        y = torch.randn(500, 1, generator=generator, dtype=torch.float64)
        uncorrelated = y + torch.randn(5, 500, 1, generator=generator, dtype=torch.float64)
        assert ds.audit(uncorrelated, y, task="regression").verdict == "healthy"


def test_a_forest_is_healthy():
    from sklearn.datasets import load_diabetes
    from sklearn.ensemble import RandomForestRegressor

    x, y = load_diabetes(return_X_y=True)
    y = (y - y.mean()) / y.std()
    forest = RandomForestRegressor(30, random_state=0).fit(x[:300], y[:300])
    outputs = np.stack([tree.predict(x) for tree in forest.estimators_])
    audit = ds.audit(outputs[:, 300:], y[300:], task="regression", train=(outputs[:, :300], y[:300]))
    assert audit.verdict == "healthy"


def test_roc_area_is_scikit_learns_and_its_interval_covers():
    generator = torch.Generator().manual_seed(0)
    for ties in (False, True):
        inside, outside = torch.randn(300, generator=generator), torch.randn(200, generator=generator) + 0.7
        if ties:
            inside, outside = inside.round(), outside.round()
        area = roc_area(inside, outside)
        truth = [0] * 300 + [1] * 200
        assert area.value == pytest.approx(roc_auc_score(truth, torch.cat([inside, outside]).numpy()))
    covered = 0
    expected = 0.5 * (1 + math.erf(0.7 / 2))
    for _ in range(200):
        area = roc_area(torch.randn(80, generator=generator), torch.randn(80, generator=generator) + 0.7)
        covered += area.low <= expected <= area.high
    assert 180 <= covered <= 199


def test_disagreement_is_measured_for_detection():
    logits, labels = classifier(scale=0.3)
    shifted = 3 * torch.randn(4, 200, 3, dtype=torch.float64)
    audit = ds.audit(logits, labels, ood=shifted, **CLASSES)
    assert audit.detection["mutual information"].value > 0.8
    assert all(f.low <= f.value <= f.high for f in audit.detection.values())
    f, y = regressor()
    assert set(ds.audit(f, y, task="regression", ood=4 * f).detection) == {"variance"}


def test_trees_below_the_largest_class_under_a_forest_above_it_do_not_collude():
    from sklearn.datasets import make_classification
    from sklearn.ensemble import RandomForestClassifier

    x, y = make_classification(3000, 12, n_informative=4, weights=[0.8], flip_y=0.15, random_state=0)
    forest = RandomForestClassifier(10, random_state=0).fit(x[:1500], y[:1500])
    trees = np.stack([tree.predict_proba(x[1500:]) for tree in forest.estimators_])
    assert ds.audit(trees, y[1500:], task="classification", kind="probabilities").verdict == "healthy"


def test_a_weaker_ensemble_is_not_a_collusive_one():
    weak, y = regressor(members=5, examples=800, noise=0.3)
    weak = weak + 0.5 * torch.randn(800, 2, dtype=torch.float64)
    strong, _ = regressor(members=5, examples=800, noise=0.3)
    assert ds.audit(weak, y, task="regression", reference=strong).verdict == "healthy"


def test_nothing_to_err_about():
    y = torch.randn(50, 1, dtype=torch.float64)
    assert ds.audit(y.expand(3, -1, -1), y, task="regression").verdict == "redundant"
    noise = torch.randint(1, 5, (50, 1)).double()
    integers = torch.randint(9, (50, 1)).double()
    exact = ds.audit(torch.stack([integers + noise, integers - noise]), integers, task="regression")
    assert exact.verdict == "collusive"
    assert exact.test["relative_diversity"].value == math.inf
    few_examples = ds.audit(torch.randn(3, 10, 1), torch.randn(10, 1), task="regression")
    assert few_examples.verdict == "undecided"
    assert "too few" in few_examples.sentence


def test_experts_for_halves_of_the_data_are_not_accused():
    """Their mean score is far better than either: that may be honest, and is not called collusive."""
    labels = torch.randint(4, (400,), generator=torch.Generator().manual_seed(0))
    correct_logits = 20.0 * torch.nn.functional.one_hot(labels, 4).double()
    first_half = (torch.arange(400) < 200).double().view(1, -1, 1)
    noise = 1.5 * torch.randn(2, 400, 4, dtype=torch.float64)
    outputs = torch.cat([first_half, 1 - first_half]) * correct_logits + torch.cat([1 - first_half, first_half]) * noise
    audit = ds.audit(outputs, labels, pool="score", **CLASSES)
    assert audit.verdict == "undecided"
    assert "of its best member's error" in audit.sentence


def test_copies_that_vote_are_redundant():
    logits, labels = classifier(scale=0.1)
    for members in (2, 3, 5):
        copies = 0.1 * logits[:1].expand(members, -1, -1)
        assert ds.audit(copies, labels, loss="zero_one", pool="vote", **CLASSES).verdict == "redundant"


def test_precision_does_not_decide(monkeypatch):
    probs = torch.eye(3, dtype=torch.float64)[torch.randint(3, (4, 300))]
    labels = torch.randint(3, (300,))
    settings = {"task": "classification", "kind": "probabilities"}
    exact = values(ds.audit(probs, labels, **settings))
    monkeypatch.setattr(streaming, "_EXACT_UP_TO", 10)
    assert values(ds.audit(probs, labels, **settings))["member_nll"] == pytest.approx(exact["member_nll"], rel=1e-5)
    large_targets = 1e6 + torch.randn(300, 1, dtype=torch.float64)
    outputs = large_targets + 0.05 * torch.randn(4, 300, 1, dtype=torch.float64)
    assert values(ds.audit(outputs, large_targets, task="regression"))["mse"] == pytest.approx(
        float((outputs.mean(0) - large_targets).square().mean())
    )


def test_pages_of_odd_ensembles():
    logits, labels = classifier()
    perfect = 50.0 * torch.nn.functional.one_hot(labels, 3).double()
    for outputs in (logits[:1], perfect.expand(3, -1, -1)):
        assert "<svg" in html(page(ds.audit(outputs, labels, **CLASSES), "odd"))
    f, y = regressor()
    assert html(page(ds.audit(f, y, task="regression"), "values")).count("<figure") == 3


def test_the_page_draws_the_plane_of_the_library():
    logits, labels = classifier(members=5, scale=2.5)
    audit = ds.audit(logits, labels, **CLASSES)
    figure = next(drawing.figure for drawing in drawings(audit) if "plane" in drawing.caption)
    (axes,) = figure.axes
    best = max(audit.by_member["accuracy"])
    lines = {line.get_label(): torch.tensor(line.get_xydata()) for line in axes.lines}
    x, y = lines["independent errors"].T
    torch.testing.assert_close(y, ds.diversity.independent_errors(best, x, 3))
    x, y = lines["flipped predictions"].T
    flips = (best - x) / (best - (1 - best) / 2)
    torch.testing.assert_close(torch.stack([x, y]), torch.stack(ds.diversity.flipped(best, flips, 3)))
    pairs = torch.stack(ds.diversity.plane(logits, labels), 1)
    offsets = torch.tensor(axes.collections[0].get_offsets().tolist())
    torch.testing.assert_close(offsets, pairs.to(offsets.dtype))


def test_many_outputs_keep_their_own_coarser_blocks(monkeypatch):
    logits, labels = classifier(examples=600)
    expected = ds.audit(logits, labels, **CLASSES).test
    monkeypatch.setattr(tallying, "_MOST_HELD", 40 * 12)
    coarse = ds.audit(logits, labels, **CLASSES).test
    assert coarse["bias_share"].value == pytest.approx(expected["bias_share"].value)
    assert coarse["accuracy"] == pytest.approx(expected["accuracy"])


def test_words_and_json():
    f, y = regressor()
    audit = ds.audit(f, y, task="regression", reference=f)
    content = json.loads(audit.to_json())
    assert content["verdict"] == audit.verdict
    assert {finding["name"] for finding in content["findings"]} == {finding["name"] for finding in audit.findings}
    assert all("reference" in finding for finding in content["findings"])
    assert "mean correlation of errors" in audit.summary()
    assert len(audit.summary().splitlines()) < 80
    perfect = ds.audit(y.expand(3, -1, -1), y, task="regression")
    assert "NaN" not in perfect.to_json()
    assert perfect.summary()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": None}, "`kind` must be 'logits' or 'probabilities'"),
        ({"kind": "probabilities"}, "Logits\\? Use kind='logits'"),
        ({"targets": torch.zeros(300)}, "be labels"),
        ({"targets": torch.full((300,), 3)}, "lie between 0 and 2"),
        ({"targets": torch.zeros(299, dtype=torch.long)}, "hold N=300"),
        ({"loss": "mse"}, "`loss` must be one of"),
        ({"pool": "vote"}, "'zero_one' for pool 'vote'"),
        ({"task": "clasification"}, "Did you mean 'classification'"),
        ({"ood": torch.zeros(4, 5, 7)}, "have 3 outputs"),
        ({"outputs": torch.zeros(4)}, "be an array \\[M, N, C\\]"),
        ({"outputs": []}, "be an array"),
        ({"outputs": [torch.zeros(3, 2), torch.zeros(4, 2)]}, "members of one shape"),
    ],
)
def test_odd_calls_are_refused(change, message, unchecked):
    logits, labels = classifier()
    settings = {"outputs": logits, "targets": labels, **CLASSES, **change}
    with pytest.raises((ValueError, TypeError), match=message):
        ds.audit(settings.pop("outputs"), settings.pop("targets"), **settings)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_probabilities_are_not_read_as_logits(dtype, unchecked):
    logits, labels = classifier(classes=50)
    probs = logits.softmax(-1).to(dtype)
    for outputs in (probs, probs.numpy(), list(probs)):
        with pytest.raises(ValueError, match="`outputs` must be logits; got numbers .* probabilities"):
            ds.audit(outputs, labels, **CLASSES)
    with pytest.raises(ValueError, match="`outputs` must be logits"):
        ds.scores.table(probs)
    assert ds.audit(probs, labels, task="classification", kind="probabilities").facts["kind"] == "probabilities"
    assert ds.audit(probs.log(), labels, **CLASSES).facts["kind"] == "logits"


def test_the_line_that_makes_two_columns_of_one_works():
    logits, labels = classifier(classes=2)
    p = logits.softmax(-1)[..., 1].numpy()
    expected = ds.audit(logits, labels, **CLASSES)
    for column, make in ((p, np.stack), (p[..., None], np.concatenate)):
        with pytest.raises(ValueError, match=rf"numpy.{make.__name__}\(\[1 - p, p\], -1\)"):
            ds.audit(column, labels, task="classification", kind="probabilities")
        two = ds.audit(make([1 - column, column], -1), labels, task="classification", kind="probabilities")
        assert two.test["accuracy"].value == expected.test["accuracy"].value
    f = (logits[..., 1] - logits[..., 0]).numpy()
    two = ds.audit(np.stack([np.zeros_like(f), f], -1), labels, **CLASSES)
    assert two.test["nll"].value == pytest.approx(expected.test["nll"].value)


def test_arrays_of_another_byte_order_are_read():
    logits, labels = classifier()
    swapped = ds.audit(logits.numpy().astype(">f8"), labels.numpy().astype(">i8"), **CLASSES)
    assert values(swapped) == values(ds.audit(logits, labels, **CLASSES))


def test_nan_is_named_with_its_place():
    logits, labels = classifier()
    logits[2, 17, 1] = math.nan
    with pytest.raises(ValueError, match="member 2, example 17"):
        ds.audit(logits, labels, **CLASSES)


def test_files(tmp_path):
    logits, labels = (part.numpy() for part in classifier())
    np.savez(tmp_path / "a.npz", outputs=logits, targets=labels)
    np.save(tmp_path / "a.npy", logits)
    np.save(tmp_path / "y.npy", labels)
    from safetensors.torch import save_file

    save_file({"outputs": torch.tensor(logits), "targets": torch.tensor(labels)}, tmp_path / "a.safetensors")
    for i, member in enumerate(logits):
        np.savetxt(tmp_path / f"m{i}.csv", member, delimiter=",", header="a,b,c" if i else "", comments="")
    np.savetxt(tmp_path / "y.csv", labels, fmt="%d", header="label", comments="")
    for arrays in (reading.read_files([tmp_path / "a.npz"]), reading.read_files([tmp_path / "a.safetensors"])):
        assert not isinstance(arrays["outputs"], torch.Tensor), "nothing is loaded before it is sliced"
        assert np.array_equal(np.asarray(arrays["outputs"][:, 3:9]), logits[:, 3:9])
        assert np.array_equal(np.asarray(arrays["targets"]), labels)
        audit = ds.audit(arrays["outputs"], arrays["targets"], **CLASSES)
        assert audit.test == ds.audit(logits, labels, **CLASSES).test
    assert isinstance(reading.read_files([tmp_path / "a.npy"])["outputs"], np.memmap)
    by_member = reading.read_files([tmp_path / f"m{i}.csv" for i in range(4)])["outputs"]
    assert np.allclose(np.stack(by_member), logits)
    assert np.array_equal(reading.read_array(tmp_path / "y.csv"), labels)
    np.savetxt(tmp_path / "n.csv", logits[0], delimiter=",", header="0,1,2", comments="")
    assert np.allclose(reading.read_array(tmp_path / "n.csv"), logits[0])


def test_archives_are_mapped_where_they_can_be(tmp_path):
    logits, labels = (part.numpy() for part in classifier())
    np.savez(tmp_path / "plain.npz", labels, outputs=np.asfortranarray(logits), note=np.array(3), none=np.zeros((0, 2)))
    np.savez_compressed(tmp_path / "small.npz", outputs=logits)
    arrays = reading.read_files([tmp_path / "plain.npz"])
    assert isinstance(arrays["outputs"], np.memmap)
    assert np.array_equal(arrays["outputs"], logits)
    assert np.array_equal(arrays["arr_0"], labels)
    assert arrays["note"] == 3
    assert arrays["none"].shape == (0, 2)
    assert np.array_equal(reading.read_files([tmp_path / "small.npz"])["outputs"], logits)


def test_parquet_where_pyarrow_is_there(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    logits, labels = (part.numpy() for part in classifier())
    for i, member in enumerate(logits):
        table = pyarrow.table({f"c{k}": member[:, k] for k in range(3)})
        parquet.write_table(table, tmp_path / f"m{i}.parquet")
    parquet.write_table(pyarrow.table({"label": labels}), tmp_path / "y.parquet")
    members = reading.read_files([tmp_path / f"m{i}.parquet" for i in range(4)])["outputs"]
    assert np.array_equal(np.stack(members), logits)
    assert np.array_equal(reading.read_array(tmp_path / "y.parquet"), labels)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "p.npy").write_bytes(pickle.dumps([1, 2]))
    np.save(tmp_path / "o.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "o.npz", outputs=np.array([None]))
    np.savez(tmp_path / "n.npz", predictions=np.zeros(3))
    (tmp_path / "t.npz").write_bytes(b"PK nothing")
    (tmp_path / "t.safetensors").write_bytes(b"nothing")
    (tmp_path / "r.csv").write_text("1,2\n3\n")
    (tmp_path / "e.csv").write_text("a,b\n")
    (tmp_path / "x.pt").write_bytes(b"")
    for name, message in {
        "p.npy": "pickles",
        "o.npy": "pickles",
        "o.npz": "pickles",
        "n.npz": "it has predictions",
        "t.npz": "cannot be",
        "t.safetensors": "cannot be read",
        "r.csv": "line 2: it must hold",
        "e.csv": "no lines",
        "x.pt": "none of .npz",
        "absent.npy": "there is no file",
    }.items():
        with pytest.raises(reading.ReadingError, match=message):
            reading.read_files([tmp_path / name])
    np.savetxt(tmp_path / "one.csv", np.zeros((3, 2)), delimiter=",")
    with pytest.raises(reading.ReadingError, match="one file per member"):
        reading.read_files([tmp_path / "one.csv"])


def test_the_command(tmp_path):
    run = CliRunner().invoke
    logits, labels = classifier(members=5, examples=600)
    logits = logits + torch.tensor([-8.0, -4.0, 0.0, 4.0, 8.0]).view(5, 1, 1) * torch.tensor([1.0, 0.0, -1.0])
    file = tmp_path / "ens.npz"
    np.savez(file, outputs=logits.numpy(), targets=labels.numpy())
    arguments = ["audit", str(file), "--task", "classification", "--kind", "logits", "--pool", "score"]
    page, out = tmp_path / "page.html", tmp_path / "out.json"
    done = run(app, [*arguments, "--json", str(out), "--page", str(page)])
    assert done.exit_code == 0, done.output
    assert "collusive" in done.output
    assert json.loads(out.read_text())["verdict"] == "collusive"
    assert page.read_text().count("<figure") == 4
    assert "://" not in page.read_text()
    assert run(app, [*arguments, "--fail-on", "collusive"]).exit_code == 3
    assert run(app, [*arguments, "--fail-on", "redundant"]).exit_code == 0
    for wrong_arguments, message in (
        (["--fail-on", "bad"], "--fail-on must be one of"),
        (["--kind", "probabilities"], "Use --kind logits"),
        (["--reference", str(tmp_path / "no.npz")], "there is no file"),
    ):
        failed = run(app, [*arguments, *wrong_arguments])
        assert failed.exit_code == 1
        assert message in " ".join(failed.output.split())
    np.savez(file, outputs=logits.numpy(), targets=labels.numpy(), train_outputs=logits.numpy())
    assert "must both be there" in run(app, arguments).output
    np.savez(file, outputs=logits.numpy())
    assert "there are no targets" in run(app, arguments).output
    assert run(app, ["audit", str(file)]).exit_code == 2, "a call that is wrong is no verdict"
    np.save(tmp_path / "y.npy", labels.numpy())
    assert run(app, [*arguments, "--targets", str(tmp_path / "y.npy")]).exit_code == 0


def test_memory_does_not_grow_with_the_examples(tmp_path):
    """Only sums per block and one number per score and example are kept."""
    reader = streaming.OutputReader(np.zeros((3, 5000, 4), dtype=np.float32))
    settings = {"kind": "logits", "loss": "brier", "pool": "score", "scores": DETECTORS}
    tally = tallying.tally_outputs(reader, torch.zeros(5000, dtype=torch.long), **settings)
    numbers = sum(values.numel() for _, values in tensors(tally)) / tallying.BLOCKS
    assert numbers < 400
    assert tally.scores.keys() == DETECTORS.keys()
    assert all(len(values) == 5000 for values in tally.scores.values())
    assert max(len(outputs[0]) for _, outputs in reader.slices()) <= streaming.NUMBERS_AT_ONCE // (3 * 45)


def test_outputs_that_are_no_better_than_guessing_are_unskilled():
    draw = torch.Generator().manual_seed(4)
    outputs, labels = torch.randn(5, 1000, 10, generator=draw), torch.randint(10, (1000,), generator=draw)
    audit = ds.audit(outputs, labels, task="classification", kind="logits")
    assert audit.verdict == "unskilled"
    assert "a constant prediction does as well" in audit.judgement.reasons[0]
    learnt = outputs + 2.0 * torch.nn.functional.one_hot(labels, 10)
    assert ds.audit(learnt, labels, task="classification", kind="logits").verdict == "healthy"


def test_shares_that_leave_out_no_member_are_not_reported():
    outputs, labels = torch.randn(3, 200, 4), torch.randint(4, (200,))
    audit = ds.audit(outputs, labels, task="classification", kind="logits")
    assert {name for name in audit.test if name.startswith("codependence")} == {"codependence_0.4", "codependence_0.6"}
