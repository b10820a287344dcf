"""Reports: numbers against direct computation, answers, pages, and what is refused."""

import json
import math
import re
import sys
from functools import partial

import numpy as np
import pytest
import torch
from sklearn import metrics as oracle
from sklearn.datasets import load_diabetes, load_digits
from sklearn.ensemble import RandomForestClassifier, StackingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from test_pages_escaping import HOSTILE, checked, text_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus import losses, metrics
from dissensus.metrics.intervals import Interval
from dissensus.reporting import LIMITS, Limits, curves, figures, judging
from dissensus.reporting.content import shown_inputs, title
from dissensus.reporting.page import number as page_number
from dissensus.reporting.reading import ReportData, Settings
from dissensus.sklearn import EnsembleClassifier, EnsembleRegressor

N, C, M = 240, 4, 5


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def labels():
    return torch.arange(N) % C


@pytest.fixture(scope="module")
def logits(labels):
    """Members that are right most of the time, with errors in common."""
    return 2.2 * torch.eye(C, dtype=torch.float64)[labels] + noise(M, N, C) + noise(1, N, C, seed=1)


@pytest.fixture(scope="module")
def result(logits, labels):
    shifted = {"far": 0.3 * noise(M, 100, C, seed=2), "labelled": (logits[:, :80] * 0.2, labels[:80])}
    return ds.report(logits, labels, kind="logits", shifted=shifted, names=["ant", "bee", "cat", "dog"])


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_numbers_of_a_classifier_are_those_of_scikit_learn(result, logits, labels):
    probs = logits.softmax(-1).mean(0)
    numbers = result.numbers
    assert numbers["accuracy"] == metrics.wilson(int((probs.argmax(-1) == labels).sum()), N)
    assert numbers["nll"].value == pytest.approx(oracle.log_loss(labels, probs))
    onehot = np.eye(C)[labels]
    assert numbers["brier"].value == pytest.approx(((probs.numpy() - onehot) ** 2).sum(-1).mean())
    assert numbers["ece"].value == pytest.approx(metrics.calibration(probs.log(), labels).error)
    wrong = (probs.argmax(-1) != labels).numpy()
    entropy = ds.scores.ensemble_entropy(logits.softmax(-1)).numpy()
    area = numbers["error_auroc: entropy of the mean"]
    assert area.value == pytest.approx(oracle.roc_auc_score(wrong, entropy))
    gap = probs.amax(-1).mean() - (~torch.from_numpy(wrong)).double().mean()
    assert numbers["overconfidence"].value == pytest.approx(float(gap))
    for value in numbers.values():
        assert value.low <= value.value <= value.high


def test_members_stand_beside_the_ensemble(result, logits, labels):
    accuracy = (logits.argmax(-1) == labels).double().mean()
    assert result.members["accuracy"].value == pytest.approx(float(accuracy))


def test_risks_are_those_of_the_metric(result, logits, labels):
    probs = logits.softmax(-1).mean(0)
    wrong, doubt = probs.argmax(-1) != labels, 1 - probs.amax(-1)
    expected = metrics.risk_coverage(doubt, wrong)
    for share in (0.5, 0.8, 0.9):
        risk = result.numbers[f"risk_at_{share:.0%}"]
        assert risk.value == pytest.approx(expected.risk_at(share))
        kept = doubt.argsort()[: math.ceil(share * N)]
        assert risk.value == pytest.approx(float(wrong[kept].double().mean()))
    curve = result.curves["risk_coverage"]["1 − confidence"]
    assert len(curve["risk"]) == 100
    assert curve["risk"][-1] == pytest.approx(1 - result.numbers["accuracy"].value)
    assert curve["area"] == pytest.approx(expected.area)


def test_rows_of_classes_are_recall_and_precision(result, logits, labels):
    named = logits.softmax(-1).mean(0).argmax(-1)
    recall, precision = (
        function(labels, named, average=None) for function in (oracle.recall_score, oracle.precision_score)
    )
    rows = {row["class"]: row for row in result.curves["classes"]}
    for column, name in enumerate(("ant", "bee", "cat", "dog")):
        assert rows[name]["recall"].value == pytest.approx(recall[column])
        assert rows[name]["precision"].value == pytest.approx(precision[column])
        assert rows[name]["examples"] == N // C
    found = [row["recall"].value for row in result.curves["classes"]]
    assert found == sorted(found)
    table = oracle.confusion_matrix(labels, named)
    np.fill_diagonal(table, 0)
    assert result.curves["confusions"][0]["examples"] == table.max()
    assert sum(row["examples"] for row in result.curves["confusions"]) == table.sum()


def test_hardest_have_the_least_probability_and_disputed_the_most_disagreement(result, logits, labels):
    probs = logits.softmax(-1).mean(0)
    hardest = probs.gather(1, labels[:, None])[:, 0].argsort()[:9].tolist()
    assert [entry["row"] for entry in result.examples["hardest"]] == hardest
    information = ds.scores.mutual_information(logits.softmax(-1))
    disputed = information.argsort(descending=True)[:9].tolist()
    assert [entry["row"] for entry in result.examples["disputed"]] == disputed
    first = result.examples["hardest"][0]
    assert first["target"] == ("ant", "bee", "cat", "dog")[int(labels[hardest[0]])]
    assert first["numbers"]["probability of the right class"] == pytest.approx(
        float(probs[hardest[0]].gather(0, labels[hardest[0]]))
    )
    assert sum(int(count) for count in re.findall(r"(\d+) ×", first["votes"])) == M


def test_detection_is_that_of_the_metric(result, logits):
    outside = 0.3 * noise(M, 100, C, seed=2)
    for name in ("ensemble_entropy", "mutual_information"):
        title = {"ensemble_entropy": "entropy of the mean", "mutual_information": "mutual information"}[name]
        score = getattr(ds.scores, name)
        expected = metrics.auroc(score(logits.softmax(-1)), score(outside.softmax(-1)))
        assert result.shifted["far"][f"auroc: {title}"].value == pytest.approx(expected.value)
    assert "accuracy" not in result.shifted["far"]
    labelled = result.shifted["labelled"]["accuracy"]
    assert labelled.value == pytest.approx(
        float((logits[:, :80] * 0.2).softmax(-1).mean(0).argmax(-1).eq(torch.arange(80) % C).double().mean())
    )


def test_pools_are_those_of_pooling(logits, labels):
    for pool, pooled in (("score", ds.pooling.mean_score), ("vote", ds.pooling.vote_share)):
        numbers = ds.report(logits, labels, kind="logits", pool=pool).numbers
        expected = (pooled(logits).argmax(-1) == labels).double().mean()
        assert numbers["accuracy"].value == pytest.approx(float(expected))


def test_probabilities_and_logits_agree(logits, labels):
    of_logits = ds.report(logits, labels, kind="logits")
    of_probs = ds.report(logits.softmax(-1).numpy(), labels.numpy(), kind="probabilities")
    for name, value in of_logits.numbers.items():
        assert of_probs.numbers[name].value == pytest.approx(value.value, abs=1e-9)
    assert "auroc: mean energy" not in of_probs.shifted.get("far", {})


@pytest.fixture(scope="module")
def gaussian():
    """Members that know the noise of their targets, ``(outputs, targets)``."""
    x = torch.linspace(-2, 2, 300, dtype=torch.float64)
    deviation = 0.2 + 0.5 * x.abs()
    targets = x + deviation * noise(300, seed=3)
    means = x + 0.1 * noise(M, 300, seed=4)
    return torch.stack([means, 2 * deviation.log().expand(M, -1)], -1), targets


def test_numbers_of_gaussian_members_are_those_of_the_metrics(gaussian):
    outputs, targets = gaussian
    result = ds.report(outputs, targets, loss="gaussian_nll")
    means, variances = losses.gaussian_moments(outputs)
    pooled = means.mean(0)
    numbers = result.numbers
    assert numbers["rmse"].value == pytest.approx(oracle.root_mean_squared_error(targets, pooled[:, 0]))
    assert numbers["mae"].value == pytest.approx(oracle.mean_absolute_error(targets, pooled[:, 0]))
    assert numbers["r2"].value == pytest.approx(oracle.r2_score(targets, pooled[:, 0]))
    column = targets[:, None]
    assert numbers["crps"].value == pytest.approx(float(metrics.crps_mixture(means, variances, column).mean()))
    assert numbers["nll"].value == pytest.approx(float(metrics.nll_mixture(means, variances, column).mean()))
    places = metrics.pit(means, variances, column)
    assert numbers["coverage"].value == pytest.approx(float(((2 * places - 1).abs() <= 0.9).double().mean()))
    low, high = ds.predictive(outputs, task="regression", loss="gaussian_nll").interval(0.9)
    assert numbers["width"].value == pytest.approx(float((high - low).mean()))
    expected = metrics.distribution_calibration(places)
    assert numbers["interval_calibration"].value == pytest.approx(expected.error.value)
    shares = [entry["share"].value for entry in result.curves["levels"]]
    assert shares == pytest.approx(expected.observed.tolist())
    from scipy.stats import spearmanr

    squared = (pooled[:, 0] - targets).square()
    variance = variances.mean(0) + means.var(0, correction=0)
    correlation = spearmanr(variance[:, 0].sqrt(), squared).statistic
    assert numbers["error_correlation: predicted deviation"].value == pytest.approx(correlation)
    answers = {item.question: item.answer for item in result.findings}
    assert answers["Are its intervals honest?"] == "yes"
    assert answers["Does it know where it errs?"] == "yes"


def test_gaussian_members_with_a_third_of_the_noise_have_dishonest_intervals(gaussian):
    outputs, targets = gaussian
    narrow = outputs - torch.tensor([0.0, 2 * math.log(3)])
    result = ds.report(narrow, targets, loss="gaussian_nll")
    answer = next(item for item in result.findings if "intervals" in item.question)
    assert (answer.answer, answer.news, result.verdict) == ("too narrow", "bad", "problems")
    wide = ds.report(outputs + torch.tensor([0.0, 2 * math.log(3)]), targets, loss="gaussian_nll")
    answer = next(item for item in wide.findings if "intervals" in item.question)
    assert (answer.answer, answer.news) == ("too wide", "fair")


def test_quantiles_and_values(gaussian):
    outputs, targets = gaussian
    means, variances = losses.gaussian_moments(outputs)
    levels = (0.05, 0.5, 0.95)
    z = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(levels, dtype=torch.float64))
    quantiles = means + variances.sqrt() * z
    result = ds.report(quantiles, targets, loss=partial(losses.quantile, levels=levels))
    pooled = quantiles.mean(0)
    inside = (pooled[:, 0] <= targets) & (targets <= pooled[:, 2])
    assert result.numbers["coverage"].value == pytest.approx(float(inside.double().mean()))
    pinball = np.mean([oracle.mean_pinball_loss(targets, pooled[:, i], alpha=a) for i, a in enumerate(levels)])
    assert result.numbers["pinball"].value == pytest.approx(pinball)
    below = [entry["share"].value for entry in result.curves["levels"]]
    assert below == pytest.approx([float((targets <= pooled[:, i]).double().mean()) for i in range(3)])
    values = ds.report(means, targets)
    assert values.facts["kind"] == "values"
    assert values.numbers["rmse"].value == pytest.approx(float((means.mean(0)[:, 0] - targets).square().mean().sqrt()))
    crps = metrics.crps_ensemble(means, targets[:, None]).mean()
    assert values.numbers["crps"].value == pytest.approx(float(crps))
    assert next(item for item in values.findings if "intervals" in item.question).answer == "no intervals"
    assert values.to_json() == ds.report(means, targets, loss="squared_error").to_json()


def test_several_targets_are_told_apart(tmp_path):
    targets = noise(90, 2)
    outputs = targets + 0.3 * noise(3, 90, 2, seed=1) * torch.tensor([1.0, 3.0])
    result = ds.report(outputs, targets, names=["height", "weight"], page=tmp_path / "r.html")
    rows = result.curves["targets"]
    assert [row["target"] for row in rows] == ["height", "weight"]
    for place, row in enumerate(rows):
        expected = oracle.root_mean_squared_error(targets[:, place], outputs.mean(0)[:, place])
        assert row["rmse"].value == pytest.approx(expected)
    assert "weight" in (tmp_path / "r.html").read_text()


# --- curves -----------------------------------------------------------------------------------------------------------


def test_groups_hold_every_example_once_and_rise():
    scores = noise(97).abs()
    groups = curves.uncertainty_groups(scores)
    assert sorted(torch.cat(groups).tolist()) == list(range(97))
    assert len(groups) == 10
    assert {len(group) for group in groups} <= {9, 10, 11}
    means = [float(scores[rows].mean()) for rows in groups]
    assert means == sorted(means)
    assert [len(rows) for rows in curves.uncertainty_groups(torch.zeros(30))] == [30]


def test_bands_of_root_errors_hold_the_truth():
    """Of 60 data sets, the band at half coverage holds the true risk in nearly all."""
    held = 0
    for seed in range(60):
        scale = torch.linspace(0.5, 2, 200, dtype=torch.float64)
        squared = (scale * noise(200, seed=seed)).square()
        curve = curves.root_error_curve(scale, squared, repeats=100)
        truth = float(scale[:100].square().mean().sqrt())
        point = curves.risk_at(curve, 0.5)
        held += point.low <= truth <= point.high
    assert held >= 52


def test_rank_correlation_is_spearmans():
    from scipy.stats import spearmanr

    a, b = noise(80), noise(80, seed=1).round()
    value = curves.rank_correlation(a, b)
    assert value.value == pytest.approx(spearmanr(a, b).statistic)
    assert value.low < value.value < value.high
    assert math.isnan(curves.rank_correlation(a, torch.zeros(80)).value)


def test_best_risks_are_below_every_score(logits, labels):
    wrong = (logits.mean(0).argmax(-1) != labels).double()
    best = curves.best_risks(wrong)
    for seed in range(3):
        risks = curves.error_curve(noise(N, seed=seed), wrong.bool()).risk
        assert all(a <= b.value + 1e-12 for a, b in zip(best, risks, strict=True))


# --- answers ----------------------------------------------------------------------------------------------------------


def answers_of(result):
    return {item.question: item for item in result.findings}


def test_overconfident_members_are_called_so(labels):
    scale = 2.2 * torch.eye(C, dtype=torch.float64)[labels] + 2.5 * noise(1, N, C, seed=1) + 0.1 * noise(M, N, C)
    answer = answers_of(ds.report(4 * scale, labels, kind="logits"))["Is its confidence honest?"]
    assert (answer.answer, answer.news) == ("overconfident", "bad")
    assert "temper" in answer.sentence
    flat = answers_of(ds.report(0.1 * scale, labels, kind="logits"))["Is its confidence honest?"]
    assert flat.answer == "underconfident"


def test_guesses_are_no_better_than_a_constant(labels):
    answer = answers_of(ds.report(noise(M, N, C), labels, kind="logits"))["Is it accurate?"]
    assert (answer.answer, answer.news) == ("cannot tell", "none")
    mostly = torch.zeros(N, dtype=torch.long)
    mostly[:20] = 1
    answer = answers_of(ds.report(noise(M, N, C), mostly, kind="logits"))["Is it accurate?"]
    assert (answer.answer, answer.news) == ("worse than a guess", "bad")


def test_a_silent_failure_is_bad_news(logits, labels):
    swapped = logits.roll(1, -1)  # as sure as ever, and always wrong
    result = ds.report(logits, labels, kind="logits", shifted={"swapped": (swapped, labels)})
    answer = answers_of(result)["Does it notice the shift “swapped”?"]
    assert (answer.answer, answer.news) == ("no: it fails silently", "bad")
    same = ds.report(logits, labels, kind="logits", shifted={"same": (logits, labels)})
    assert answers_of(same)["Does it notice the shift “same”?"].news == "none"
    unlabelled = ds.report(logits, labels, kind="logits", shifted={"same": logits})
    assert answers_of(unlabelled)["Does it notice the shift “same”?"].news == "fair"


def test_verdicts_take_the_worst_news():
    def finding(news):
        return judging.Finding("?", "", news, "")

    assert judging.verdict([finding("good"), finding("bad"), finding("fair")]) == "problems"
    assert judging.verdict([finding("good"), finding("fair")]) == "reservations"
    assert judging.verdict([finding("none")]) == "undecided"


def test_limits_move_the_lines(logits, labels):
    question = "Does it know when it errs?"
    usual = answers_of(ds.report(logits, labels, kind="logits"))[question]
    lenient = answers_of(ds.report(logits, labels, kind="logits", limits=Limits(knows_errors=0.52)))[question]
    assert (usual.answer, lenient.answer) == ("partly", "yes")
    assert LIMITS.knows_errors == 0.7


# --- what is taken ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    x = torch.from_numpy(x).float().view(-1, 1, 8, 8) / 16
    y = torch.from_numpy(y)
    ens = ds.Ensemble(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), members=3, seed=0)
    objective = partial(ds.objectives.independent, loss="cross_entropy")
    ds.fit(ens, (x[:600], y[:600]), objective, epochs=6, batch_size=32, lr=5e-3)
    return ens, (x[:600], y[:600]), (x[1500:], y[1500:])


def test_every_form_of_an_ensemble_and_of_data_gives_the_same_report(digits):
    ens, _, (x, y) = digits
    outputs = ens.predict(x)
    expected = ds.report(ens, (x, y)).to_json()
    others = {
        "stored": ds.report(outputs, (x, y), kind="logits"),
        "numpy": ds.report(outputs.numpy(), (x.numpy(), y.numpy()), kind="logits"),
        "list": ds.report(list(outputs), (x, y), kind="logits"),
        "callable": ds.report(lambda batch: ens.predict(batch), (x, y), kind="logits"),
        "modules": ds.report([ens.member(i) for i in range(3)], (x, y), kind="logits"),
        "dataset": ds.report(ens, TensorDataset(x, y), batch_size=100),
        "loader": ds.report(ens, DataLoader(TensorDataset(x, y), 64)),
        "small batches": ds.report(ens, (x, y), batch_size=64),
    }
    plain = json.loads(expected)
    for name, other in others.items():
        got = json.loads(other.to_json())
        for number, value in plain["numbers"].items():
            assert got["numbers"][number]["value"] == pytest.approx(value["value"], abs=1e-5), name
        assert [e["row"] for e in got["examples"]["hardest"]] == [e["row"] for e in plain["examples"]["hardest"]], name
        assert got["verdict"] == plain["verdict"], name


def test_a_loader_that_shuffles_keeps_targets_with_their_examples(digits):
    ens, _, (x, y) = digits
    loader = DataLoader(TensorDataset(x, y), 64, shuffle=True, generator=torch.Generator().manual_seed(0))
    shuffled = ds.report(ens, loader)
    assert shuffled.numbers["accuracy"] == ds.report(ens, (x, y)).numbers["accuracy"]
    assert not shuffled.content.shown  # rows of another order would show other examples


def test_training_data_and_twins_reach_the_audit(digits):
    ens, train, test = digits
    result = ds.report(ens, test, training=train)
    assert result.facts["training"] == 600
    assert result.audit.train is not None
    direct = ds.audit_estimator(ens, *test, train=train, task="classification")
    assert result.audit.verdict == direct.verdict
    assert result.audit.judgement.reasons == direct.judgement.reasons


def test_a_plain_network_is_one_member(digits, tmp_path):
    ens, _, (x, y) = digits
    single = ds.report(ens.member(0), (x, y), kind="logits", page=tmp_path / "one.html")
    assert single.facts["members"] == 1
    expected = (ens.member(0)(x).argmax(-1) == y).double().mean()
    assert single.numbers["accuracy"].value == pytest.approx(float(expected))
    assert single.examples["disputed"] == []
    assert answers_of(single)["Is its diversity real?"].answer == "undecided"
    assert "Most disputed" not in (tmp_path / "one.html").read_text()


@pytest.mark.parametrize("form", [lambda *pair: pair, TensorDataset], ids=["pair", "dataset"])
def test_a_plain_network_with_as_many_examples_as_classes(form, digits):
    ens, _, (x, y) = digits
    whole = ds.report(ens.member(0), (x[:30], y[:30]), kind="logits")
    batches = ds.report(ens.member(0), form(x[:30], y[:30]), kind="logits", batch_size=10)  # 10 classes
    assert batches.facts["members"] == 1
    assert batches.numbers["nll"].value == pytest.approx(whole.numbers["nll"].value)
    scalars = nn.Linear(64, 1)
    members = ds.report(lambda x: torch.stack([scalars(x.flatten(1))[:, 0]] * 8), (x[:8], y[:8].float()))
    assert members.facts["members"] == 8


def test_forests_report_their_classes_and_whether_they_predict_the_mean():
    x, y = load_digits(return_X_y=True)
    names = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])[y]
    forest = RandomForestClassifier(10, random_state=0).fit(x[:800], names[:800])
    result = ds.report(forest, (x[1400:], names[1400:]))
    assert result.facts["names"] == sorted(set(names))
    assert result.numbers["accuracy"].value == pytest.approx(forest.score(x[1400:], names[1400:]))
    assert result.facts["matches_own_prediction"] is True
    base = [("a", LogisticRegression(max_iter=20, tol=1.0)), ("b", RandomForestClassifier(5, random_state=0))]
    stack = StackingClassifier(base, LogisticRegression(C=1e-3), cv=2).fit(x[:300] / 16, y[:300])
    other = ds.report(stack, (x[1400:] / 16, y[1400:]))
    assert "final estimator" in other.facts["matches_own_prediction"]


def test_estimators_of_tables_report_their_members():
    x, y = load_digits(return_X_y=True)
    names = np.array(["even", "odd"])[y % 2]
    model = make_pipeline(StandardScaler(), EnsembleClassifier(members=2, hidden=8, epochs=5, random_state=0))
    model.fit(x[:400], names[:400])
    result = ds.report(model, (x[1400:], names[1400:]), training=(x[:400], names[:400]))
    assert result.facts["names"] == ["even", "odd"]
    assert result.facts["matches_own_prediction"] is True
    assert result.numbers["accuracy"].value == pytest.approx(model.score(x[1400:], names[1400:]))
    assert ds.audit_estimator(model, x[1400:], names[1400:]).verdict == result.audit.verdict
    values = EnsembleRegressor(members=2, hidden=8, epochs=5, random_state=0).fit(x[:400], y[:400])
    result = ds.report(values, (x[1400:], y[1400:]))
    assert result.facts["matches_own_prediction"] is True
    assert result.numbers["r2"].value == pytest.approx(values.score(x[1400:], y[1400:]))
    with pytest.raises(ValueError, match="`kind` must be 'probabilities' for EnsembleClassifier; got 'logits'"):
        ds.report(model, (x[1400:], names[1400:]), kind="logits")
    several = np.stack([y % 2, y // 5], 1)
    model = EnsembleClassifier(members=2, hidden=8, epochs=1, random_state=0).fit(x[:400], several[:400])
    outputs = model.predict_members(x[1400:])
    direct = ds.audit(outputs, several[1400:], task="multilabel", kind="probabilities", pool="probability")
    assert ds.audit_estimator(model, x[1400:], several[1400:]).test == direct.test


def test_tasks_are_read_off_losses_and_targets(labels, logits):
    assert ds.report(logits, labels, kind="logits").facts["task"] == "classification"
    assert ds.report(noise(3, 50, 1), noise(50)).facts["task"] == "regression"
    assert ds.report(noise(3, 50, 2), torch.arange(50), loss="gaussian_nll").facts["task"] == "regression"
    assert ds.report(noise(3, 50, 1), torch.arange(50), task="regression").facts["loss"] == "squared_error"


# --- small and odd data -----------------------------------------------------------------------------------------------


@pytest.mark.slow(cases=["2", "5"])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_few_rows_have_wide_intervals_and_no_verdict(rows, logits, labels, tmp_path):
    result = ds.report(logits[:, :rows], labels[:rows], kind="logits", page=tmp_path / "few.html", examples=2)
    accuracy = result.numbers["accuracy"]
    assert accuracy.high - accuracy.low > 0.3
    assert result.verdict == "undecided"
    assert answers_of(result)["Is its diversity real?"].answer == "undecided"
    outputs, targets = noise(3, rows, 1), noise(rows, seed=1)
    values = ds.report(outputs, targets, page=tmp_path / "values.html", shifted={"x": noise(3, 2, 1)})
    assert values.verdict == "undecided"


def test_a_few_shifted_rows_give_no_answer(logits, labels):
    shifted = {"few": 100 * logits[:, :19] * 0, "enough": 100 * logits[:, :20] * 0}
    found = answers_of(ds.report(logits, labels, kind="logits", shifted=shifted))
    assert found["Does it notice the shift “enough”?"].answer == "yes"
    assert found["Does it notice the shift “few”?"].news == "none"
    assert "Fewer than 20 examples are too few to tell." in found["Does it notice the shift “few”?"].sentence


def test_rows_of_the_training_data_are_told(digits):
    ens, (x, y), (x_test, y_test) = digits
    first, *_ = ds.report(ens, (x, y)).findings
    assert (first.question, first.answer, first.news) == ("Is the data new to it?", "no", "bad")
    assert first.sentence.startswith("600 of 600 examples are rows that the model was trained on.")
    assert "Is the data new to it?" not in answers_of(ds.report(ens, (x_test, y_test)))
    few = ds.report(ens, (torch.cat([x_test, x[:1]]), torch.cat([y_test, y[:1]])))
    assert (few.findings[0].answer, few.findings[0].news) == ("all but a few", "none")
    assert few.facts["training_rows"] == 1


def test_one_class_only(logits, tmp_path):
    result = ds.report(logits, torch.zeros(N, dtype=torch.long), kind="logits", page=tmp_path / "p.html", examples=2)
    answer = answers_of(result)["Is it accurate?"]
    assert (answer.answer, answer.news) == ("one class only", "none")
    assert "'0'" in answer.sentence


def test_predictions_that_are_all_right(labels, tmp_path):
    right = 9 * torch.eye(C, dtype=torch.float64)[labels] + 0.1 * noise(3, N, C)
    result = ds.report(right, labels, kind="logits", page=tmp_path / "p.html", examples=2)
    assert answers_of(result)["Does it know when it errs?"].answer == "cannot tell"
    assert result.numbers["accuracy"].low < 1
    assert result.curves["confusions"] == []


def test_identical_members_dispute_nothing(logits, labels, tmp_path):
    result = ds.report(logits[:1].expand(3, -1, -1), labels, kind="logits", page=tmp_path / "p.html", examples=2)
    assert result.examples["disputed"] == []
    same = noise(1, 60, 1).expand(3, -1, -1)
    values = ds.report(same, noise(60, seed=1), page=tmp_path / "v.html", examples=2)
    assert math.isnan(values.numbers["error_correlation: members' spread"].value)
    assert json.loads(values.to_json())["numbers"]["error_correlation: members' spread"]["value"] is None


def test_a_single_regressor_has_no_spread(tmp_path):
    result = ds.report(noise(1, 60, 1), noise(60, seed=1), page=tmp_path / "p.html", examples=2)
    assert answers_of(result)["Does it know where it errs?"].answer == "cannot tell"
    assert "risk_at_80%" not in result.numbers


NAN = torch.full((), math.nan, dtype=torch.float64)
REFUSED = [
    ((noise(3, 8, 4), torch.arange(8) % 4), {}, "`kind` must be 'logits' or 'probabilities'; got None. It is not gu"),
    ((noise(3, 8, 4), torch.arange(8)), {"kind": "logits"}, "`targets` must lie between 0 and 3; got 0 to 7"),
    ((noise(3, 8, 4), torch.arange(7) % 4), {"kind": "logits"}, "`targets` must hold N=8 examples"),
    ((noise(3, 8, 4) + NAN, torch.arange(8) % 4), {"kind": "logits"}, "`ens` must be finite; got NaN"),
    ((noise(3, 8, 1), noise(8) + NAN), {}, "`targets` must be finite"),
    (
        (noise(3, 0, 4), torch.zeros(0, dtype=torch.long)),
        {"kind": "logits"},
        "`ens` must hold at least one member, one example",
    ),
    ((noise(3, 8, 4), torch.arange(8) % 4), {"kind": "probabilities"}, "must be probabilities, which sum to one"),
    ((noise(3, 8, 4).softmax(-1), torch.arange(8) % 4), {"kind": "logits"}, "Use kind='probabilities'"),
    ((noise(3, 8, 4), torch.arange(8) % 4), {"kind": "labels"}, "Hard votes have no probabilities"),
    ((noise(3, 8, 1), torch.arange(8) % 2), {"kind": "logits"}, "have two columns or more"),
    ((noise(3, 8, 4), torch.arange(8) % 4), {"kind": "logits", "names": ["a"]}, "name each of the 4 classes; got 1"),
    ((noise(3, 8, 2), torch.arange(8) % 2), {"kind": "logits", "names": ["a", "a"]}, "differ from each other"),
    (
        (noise(3, 8, 4), torch.arange(8) % 4),
        {"kind": "logits", "loss": "mse"},
        "`kind` must be left out for regression",
    ),
    ((noise(3, 8, 4), (torch.arange(8) % 4).double()), {"kind": "logits"}, "y.long() of floats, y.argmax(-1) of one-"),
    ((noise(3, 8, 1), torch.arange(8)), {}, "Whole numbers that are values? Use task='regression'."),
    ((noise(3, 8, 4), torch.arange(8) % 4), {"kind": "logits", "loss": "poisson"}, "`loss` must be one of"),
    ((noise(3, 8, 4), torch.arange(8) % 4), {"kind": "logits", "loss": torch.dot}, "`loss` must be one of"),
    ((noise(3, 8, 4), torch.arange(8) % 4), {"kind": "logits", "pool": "vote", "loss": "brier"}, "be 'zero_one' for"),
    ((noise(3, 8, 4), torch.arange(8) % 4), {"kind": "logits", "pool": "mean"}, "`pool` must be"),
    ((noise(3, 8, 4), torch.arange(8) % 4), {"kind": "logits", "shifted": {"a": noise(2, 5, 4)}}, "have 3 members"),
    ((noise(3, 8, 4), torch.arange(8) % 4), {"kind": "logits", "shifted": {"a": "x"}}, "be outputs [M, N, C], or a"),
    ((noise(3, 8, 4), torch.arange(8) % 4), {"kind": "logits", "training": noise(3, 5, 4)}, "`training` must hold tar"),
    ((noise(3, 8, 4), torch.arange(8) % 4), {"kind": "logits", "shifted": {3: noise(3, 5, 4)}}, "name its sets"),
    ((noise(3, 8, 3), noise(8)), {"loss": "gaussian_nll"}, "have D means, then D logarithms of variances"),
    ((noise(3, 8, 2), noise(8)), {"loss": "quantile"}, "have 3 quantiles per target"),
    ((noise(3, 8, 2), noise(8)), {"loss": partial(losses.quantile, levels=(0.1, 0.9))}, "have 0.5 among the levels"),
    ((noise(3, 8, 2), noise(8)), {}, "`targets` must have shape [N, 2]"),
    ((noise(3, 8, 4, 2), torch.arange(8) % 4), {"kind": "logits"}, "one prediction per example"),
    ((nn.Linear(3, 4), noise(8, 3)), {}, "`data` must be a pair (x, y), a Dataset or a DataLoader"),
    ((nn.Linear(3, 4), (noise(8, 3), None)), {}, "`data` must hold targets"),
    ((nn.Linear(3, 4), (noise(8, 3), torch.arange(7))), {}, "hold as many targets as inputs; got 8 inputs and 7"),
    ((nn.Linear(3, 4), (noise(0, 3), torch.arange(0))), {}, "hold at least one example"),
    ((nn.Linear, (noise(8, 3), torch.arange(8))), {}, "`ens` must be a fitted scikit-learn ensemble"),
    ((noise(3, 8, 4), torch.arange(8) % 4), {"kind": "logits", "examples": -1}, "`examples` must be"),
    ((noise(3, 8, 4), torch.arange(8) % 4), {"kind": "logits", "limits": 3}, "`limits` must be"),
    ((noise(3, 8, 4), torch.arange(8) % 4), {"task": "ranking"}, "`task` must be"),
    ((noise(3, 8, 4), np.array(["a", "b"] * 4)), {"kind": "logits"}, "have labels of 4 classes; got 2 labels"),
    ((noise(3, 8, 1), (noise(8, 2), noise(8))), {"features": ["a"]}, "name each of the 2 numbers of an input"),
]


@pytest.mark.parametrize(("arguments", "options", "message"), REFUSED, ids=[entry[2][:45] for entry in REFUSED])
def test_what_is_refused(arguments, options, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        ds.report(*arguments, **options)


def test_inputs_with_nan_are_refused(digits):
    ens, _, (x, y) = digits
    with pytest.raises(ValueError, match="NaN"):
        ds.report(ens, (x / (x < 2) * math.nan, y))


# --- what is written --------------------------------------------------------------------------------------------------


def test_json_is_plain_and_complete(result):
    content = json.loads(result.to_json())
    assert content["verdict"] == result.verdict
    assert content["numbers"]["accuracy"] == {"title": "accuracy", **result.numbers["accuracy"]._asdict()}
    assert len(content["curves"]["risk_coverage"]["entropy of the mean"]["low"]) == 100
    assert content["audit"]["verdict"] == result.audit.verdict
    assert content["shifted"]["far"]["fpr_at_95"]["value"] is not None
    assert content["examples"]["hardest"][0]["row"] == result.examples["hardest"][0]["row"]


def test_the_summary_has_every_answer_and_number(result):
    text = result.summary()
    for item in result.findings:
        assert item.sentence in text
    assert f"{result.numbers['nll'].value:.4g}" in text
    assert "shifted data: far" in text


def test_the_page_shows_answers_numbers_and_sets(result, tmp_path):
    page = result.page(tmp_path / "folder" / "r.html", "My model").read_text()
    elements = checked(page, "h4")
    text = text_of(elements)
    for item in result.findings:
        assert item.question in text
        assert item.answer in text
    assert f"{result.numbers['accuracy'].value:.1%}" in text
    for words in ("My model", "Calibration and refusal", "By class", "ant", "row ", "far", "labelled", "Audit"):
        assert words in text
    assert page.count("<figure") >= 8
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    with pytest.raises(OSError, match="must name a file"):
        result.page(tmp_path)


def test_pictures_rows_and_text_of_examples(digits, tmp_path):
    ens, _, (x, y) = digits
    ds.report(ens, (x, y), page=tmp_path / "p.html", examples=2)
    assert (tmp_path / "p.html").read_text().count("<image") >= 4
    rows = np.column_stack([noise(60).numpy(), np.arange(60.0)])
    table = ds.report(
        noise(3, 60, 1), (rows, noise(60, seed=1)), features=["a", "years"], page=tmp_path / "t.html", examples=2
    )
    row = table.examples["hardest"][0]["row"]
    assert table.content.shown[row].cells == {"a": f"{rows[row, 0]:.4g}", "years": f"{row:.4g}"}
    assert "years" in (tmp_path / "t.html").read_text()
    texts = [f"text {i}" for i in range(60)]
    words = ds.report(
        noise(3, 60, 2), (texts, torch.arange(60) % 2), kind="logits", page=tmp_path / "w.html", examples=2
    )
    assert f"text {words.examples['hardest'][0]['row']}" in (tmp_path / "w.html").read_text()


def test_long_rows_show_what_is_unusual_and_pictures_are_bytes():
    matrix = np.zeros((20, 30))
    matrix[:, 1] = np.arange(20)
    matrix[7, 5] = 9.0
    data = ReportData(
        Settings("regression", "values", "mse", "score"),
        noise(2, 20, 1),
        noise(20, 1),
        ("y",),
        lambda row: matrix[row],
        matrix,
        tuple(f"f{i}" for i in range(30)),
    )
    assert shown_inputs(data, [7])[7].cells["most unusual features"].startswith("f5 = 9 (+4.6 sd)")
    grey = ReportData(data.settings, data.outputs, data.targets, ("y",), lambda row: torch.full((1, 8, 8), 0.5))
    picture = shown_inputs(grey, [0])[0].picture
    assert picture is not None
    assert picture.dtype == np.uint8
    assert set(picture.ravel()) == {128}


@pytest.mark.filterwarnings("ignore:constrained_layout not applied")
def test_foreign_text_stays_text(tmp_path):
    names = [f"{HOSTILE} {i}" for i in range(3)]
    labels = torch.arange(40) % 3
    x = noise(40, 2)
    result = ds.report(
        noise(3, 40, 3),
        (x, labels),
        kind="logits",
        names=names,
        features=[f"{HOSTILE} a", f"{HOSTILE} b"],
        shifted={HOSTILE: (noise(3, 30, 3, seed=1), torch.arange(30) % 3)},
        title=HOSTILE,
        page=tmp_path / "p.html",
        examples=2,
    )
    elements = checked((tmp_path / "p.html").read_text(), "h4")
    assert HOSTILE in text_of(elements)
    pictures = ds.report(noise(3, 40, 3), (torch.rand(40, 1, 8, 8), labels), kind="logits", names=names, examples=2)
    checked(pictures.page(tmp_path / "q.html").read_text(), "h4")
    values = ds.report(noise(3, 40, 2), noise(40, 2), names=names[:2], title=HOSTILE, examples=2)
    checked(values.page(tmp_path / "v.html").read_text(), "h4")
    assert json.loads(result.to_json())["facts"]["title"] == HOSTILE


def test_progress_moves_ahead(digits):
    ens, _, (x, y) = digits
    steps = []
    ds.report(ens, (x, y), batch_size=50, shifted={"a": x}, progress=lambda name, share: steps.append((name, share)))
    shares = [share for _, share in steps]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert {"outputs on data", "outputs on a", "the audit"} <= {name for name, _ in steps}


def test_numbers_need_no_matplotlib_and_pages_name_it(monkeypatch, logits, labels, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = ds.report(logits, labels, kind="logits")
    with pytest.raises(ImportError, match=re.escape("pip install 'dissensus[report]'")):
        result.page(tmp_path / "p.html")


def test_diabetes_with_gaussian_members():
    x, y = load_diabetes(return_X_y=True)
    x, y = torch.from_numpy(x).float() * 20, torch.from_numpy((y - y.mean()) / y.std()).float()
    ens = ds.Ensemble(partial(ds.nets.mlp, 10, 2, (16,)), members=3, seed=0)
    objective = partial(ds.objectives.independent, loss="gaussian_nll")
    ds.fit(ens, (x[:300], y[:300]), objective, epochs=15, batch_size=32, lr=5e-3)
    result = ds.report(ens, (x[300:], y[300:]), loss="gaussian_nll", shifted={"far": 5 * x[300:]})
    assert result.numbers["r2"].low > 0
    assert 0.75 < result.numbers["coverage"].value <= 1
    assert result.shifted["far"]["auroc: variance of the members' means"].low > 0.8
    assert isinstance(result.numbers["crps"], Interval)


def test_errors_without_a_correlation_are_said_in_words():
    values = torch.arange(30.0).unsqueeze(1)
    result = ds.report(values.expand(3, -1, -1), values, task="regression")
    answer = answers_of(result)["Does it know where it errs?"]
    assert (answer.answer, answer.news) == ("cannot tell", "none")
    assert "have no correlation" in answer.sentence
    assert not re.search(r"\bnan\b", " ".join(item.sentence for item in result.findings))


def test_many_targets_share_a_colour_and_need_no_legend():
    names = [f"target {i}" for i in range(12)]
    points = [{"prediction": [float(i)] * 12, "target": [float(i)] * 12} for i in range(30)]
    few, many = (
        figures.predicted_and_true([{k: v[:n] for k, v in p.items()} for p in points], names[:n]) for n in (3, 12)
    )
    assert len(few.legends) == 1
    assert many.legends == []


@pytest.mark.parametrize(
    ("task", "words"), [("classification", "error rate"), ("regression", "root mean squared error")]
)
def test_errors_of_what_is_kept_are_named_by_task(task, words):
    assert title("risk_at_80%", task) == f"{words} without the 20% most uncertain"
    shown = page_number("risk_at_80%", Interval(0.25, 0.125, 0.5), task).text
    assert shown == ("25.0%" if task == "classification" else "0.25")
