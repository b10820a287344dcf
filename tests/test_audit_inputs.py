"""What an audit takes and gives: votes, names of classes, frames, estimators; pages and pictures."""

import json
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import ensemble, linear_model, neighbors, pipeline, preprocessing, svm, tree
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_classification, make_regression
from sklearn.model_selection import GridSearchCV
from typer.testing import CliRunner

import dissensus as ds
from dissensus.auditing.judging import VERDICTS
from dissensus.auditing.page import MEANINGS, drawings, explained
from dissensus.cli import app
from dissensus.cli.screen import COLOURS
from dissensus.pages import Drawing, Number, PageTable, Section, Text

CLASSES = {"task": "classification", "kind": "logits"}


def logits_and_labels(members=4, examples=200, classes=3):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (examples,), generator=generator)
    shared = torch.nn.functional.one_hot(labels, classes) * 2.0 + torch.randn(examples, classes, generator=generator)
    return (shared + torch.randn(members, examples, classes, generator=generator)).double(), labels


def test_a_page_is_written_from_python(tmp_path):
    audit = ds.audit(*logits_and_labels(), **CLASSES)
    path = audit.page(tmp_path / "new" / "mine.html")
    assert path == tmp_path / "new" / "mine.html"
    text = path.read_text()
    assert "Audit: mine" in text
    assert f'class="badge {MEANINGS[audit.verdict].news}">{audit.verdict}<' in text
    assert text.count("<figure") == len(drawings(audit)) == 4
    second_text = audit.page(str(path), title="five <networks>").read_text()
    assert "Audit: five &lt;networks&gt;" in second_text


def test_a_page_goes_to_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    audit = ds.audit(*logits_and_labels(), **CLASSES)
    assert audit.page("~/pages/mine.html") == tmp_path / "pages" / "mine.html"
    assert (tmp_path / "pages" / "mine.html").exists()


def test_terms_are_explained_where_they_first_occur():
    terms = {"pool": "Pooling is a mean.", "logits": "Logits are scores.", "mean": "A mean is a sum over its number."}
    parts = [
        Text("no term"),
        Section("first", [Drawing(None, "the pool of logits")]),
        PageTable(("", ""), [["logits again", Number(1.0)]]),
    ]
    first, section, table = explained(parts, terms)
    assert first == Text("no term")
    caption = "the pool of logits Pooling is a mean. Logits are scores. A mean is a sum over its number."
    assert section.parts[0].caption == caption
    assert table == parts[2], "what is explained once is not explained again"
    with_note = explained([Text("logits"), Text("logits")], terms)
    assert with_note == [Text("logits"), Text("Logits are scores.", "note"), Text("logits")]


def test_the_page_explains_the_words_of_its_verdict(tmp_path):
    logits, labels = logits_and_labels()
    shifted = logits + torch.tensor([8.0, -8.0, 8.0, -8.0]).view(-1, 1, 1) * torch.tensor([1.0, 0.0, -1.0])
    text = ds.audit(shifted, labels, pool="score", **CLASSES).page(tmp_path / "a.html").read_text()
    for term, explanation in {
        "offsets": "An offset is a constant",
        "logits": "Logits are the scores",
        "β": "β sets how members are trained",
        "pool": "Pooling makes one prediction out of the members&#x27; outputs: here the mean of their logits.",
    }.items():
        assert text.count(explanation) == 1, term
        position = text.index(term)
        assert text.count("</p>", position, text.index(explanation)) <= 1, term


def test_the_page_says_what_the_reference_is(tmp_path):
    logits, labels = logits_and_labels()
    text = ds.audit(logits, labels, reference=logits, **CLASSES).page(tmp_path / "a.html").read_text()
    assert text.count("The reference is an ensemble of the same build whose members were trained alone.") == 1


def test_a_page_that_cannot_be_written_is_refused(tmp_path, unchecked):
    audit = ds.audit(*logits_and_labels(), **CLASSES)
    with pytest.raises(OSError, match="`path` must name a file; got the folder"):
        audit.page(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="`path` must be a file that can be written; got .*file/x.html"):
        audit.page(tmp_path / "file" / "x.html")


def test_one_figure_has_every_panel_of_the_page():
    from matplotlib.figure import Figure

    audit = ds.audit(*logits_and_labels(), **CLASSES)
    figure = audit.plot()
    assert isinstance(figure, Figure)
    labels = {axes.get_ylabel() for axes in figure.axes}
    assert labels == {axes.get_ylabel() for drawing in drawings(audit) for axes in drawing.figure.axes}
    assert audit.verdict in figure.get_suptitle()
    single = ds.audit(logits_and_labels()[0][:1], logits_and_labels()[1], **CLASSES).plot()
    assert single.axes


def test_figures_without_matplotlib_name_the_extra(monkeypatch, tmp_path):
    audit = ds.audit(*logits_and_labels(), **CLASSES)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (audit.plot, lambda: audit.page(tmp_path / "x.html")):
        with pytest.raises(ImportError, match=r"dissensus\[report\]"):
            draw()
    assert not list(tmp_path.iterdir())


def test_every_verdict_has_a_colour():
    assert set(VERDICTS) == set(MEANINGS)
    assert {meaning.news for meaning in MEANINGS.values()} == set(COLOURS)
    assert MEANINGS["unskilled"].news == "bad"


NAMES = np.array(["ant", "bee", "cat"])
PROBS = {"task": "classification", "kind": "probabilities"}
VOTES = {"task": "classification", "kind": "labels"}


def votes_and_labels(**sizes):
    logits, labels = logits_and_labels(**sizes)
    return logits.argmax(-1).numpy(), labels.numpy()


def assert_same_figures(actual, expected):
    """Equal to rounding: means of targets depend on the order in which they are added."""
    assert (actual is None) == (expected is None)
    if actual is not None:
        assert actual.keys() == expected.keys()
        for name, figure in actual.items():
            assert figure == pytest.approx(expected[name], rel=1e-9, abs=1e-12, nan_ok=True), name


def assert_same_audit(actual, expected):
    for part in ("test", "train", "reference"):
        assert_same_figures(getattr(actual, part), getattr(expected, part))
    assert actual.by_member == expected.by_member
    assert actual.detection == expected.detection


def test_votes_are_one_hot_probabilities_that_vote():
    votes, labels = votes_and_labels()
    audit = ds.audit(votes, labels, **VOTES)
    assert_same_audit(audit, ds.audit(np.eye(3)[votes], labels, pool="vote", loss="zero_one", **PROBS))
    assert (audit.facts["kind"], audit.facts["pool"], audit.facts["loss"]) == ("labels", "vote", "zero_one")
    pooled = np.array([np.bincount(column, minlength=3).argmax() for column in votes.T])
    assert audit.test["accuracy"].value == pytest.approx((pooled == labels).mean())
    shares = ds.audit(votes, labels, pool="probability", loss="brier", **VOTES)
    assert_same_audit(shares, ds.audit(np.eye(3)[votes], labels, pool="probability", loss="brier", **PROBS))


@pytest.mark.parametrize(
    ("votes_as", "labels_as"),
    [
        (torch.from_numpy, torch.from_numpy),
        (lambda v: v.tolist(), lambda y: y.tolist()),
        (lambda v: [pd.Series(row, index=range(7, 7 + len(row))) for row in v], pd.Series),
        (lambda v: pd.DataFrame(v.T).add_prefix("member "), lambda y: pd.DataFrame({"y": y})),
        (lambda v: dict(enumerate(v)), np.asarray),
        (lambda v: v.astype(float), lambda y: y.astype(float)),
        (lambda v: v.astype(object), lambda y: y.astype(object)),
        (lambda v: NAMES[v], lambda y: NAMES[y]),
        (lambda v: NAMES[v].astype(object), lambda y: pd.Series(NAMES[y])),
        (lambda v: NAMES[v].tolist(), lambda y: NAMES[y].tolist()),
        (lambda v: pd.DataFrame(NAMES[v.T]), lambda y: pd.Series(NAMES[y]).astype("category")),
        (lambda v: [pd.Series(NAMES[row]) for row in v], lambda y: pd.DataFrame({"y": NAMES[y]})),
        (lambda v: 10 * v - 3, lambda y: 10 * y - 3),
    ],
)
def test_votes_in_every_form(votes_as, labels_as):
    votes, labels = votes_and_labels()
    expected = ds.audit(votes, labels, train=(votes[:, :90], labels[:90]), reference=votes[:2], ood=votes, **VOTES)
    train = votes_as(votes[:, :90]), labels_as(labels[:90])
    extra = {"train": train, "reference": votes_as(votes[:2]), "ood": votes_as(votes)}
    assert_same_audit(ds.audit(votes_as(votes), labels_as(labels), **extra, **VOTES), expected)


def test_a_class_without_examples_is_known_by_classes():
    votes, labels = votes_and_labels()
    audit = ds.audit(NAMES[votes], NAMES[labels], classes=[*NAMES, "dog"], **VOTES)
    assert audit.facts["outputs"] == 4
    assert ds.audit(votes == 1, labels == 1, **VOTES).facts["outputs"] == 2


def test_mapped_votes_are_read_in_slices(tmp_path, monkeypatch):
    from dissensus.auditing import inputs, streaming

    votes, labels = votes_and_labels()
    np.save(tmp_path / "votes.npy", NAMES[votes])
    expected = ds.audit(votes, labels, **VOTES)
    monkeypatch.setattr(streaming, "NUMBERS_AT_ONCE", 4 * 45 * 16)
    monkeypatch.setattr(inputs, "_LABELS_AT_ONCE", 64)
    mapped = np.load(tmp_path / "votes.npy", mmap_mode="r")
    audit = ds.audit(mapped, NAMES[labels], **VOTES)
    assert audit.test["accuracy"] == expected.test["accuracy"]
    prepared = inputs.prepare(
        mapped, NAMES[labels], None, None, None, task="classification", kind="labels", classes=None
    )
    assert prepared.outputs.votes is mapped


def test_arrays_of_numbers_pass_through_untouched(tmp_path):
    from dissensus.auditing.inputs import prepare

    logits, labels = logits_and_labels()
    np.save(tmp_path / "logits.npy", logits.numpy())
    mapped = np.load(tmp_path / "logits.npy", mmap_mode="r")
    for outputs in (mapped, logits):
        prepared = prepare(
            outputs, labels, (outputs, labels), outputs, outputs, task="classification", kind="logits", classes=None
        )
        assert all(part is outputs for part in (prepared.outputs, prepared.train[0], prepared.reference, prepared.ood))
        assert prepared.targets is labels
    prepared = prepare(
        [mapped[0], mapped[1]], labels, None, None, None, task="classification", kind="logits", classes=None
    )
    assert all(np.shares_memory(part, mapped) for part in prepared.outputs)


def test_names_of_classes_are_columns():
    logits, labels = logits_and_labels()
    expected = ds.audit(logits, labels, train=(logits, labels), **CLASSES)
    named = NAMES[labels]
    for targets in (named, named.tolist(), pd.Series(named, index=(labels + 5).numpy()), pd.DataFrame({"y": named})):
        assert_same_audit(ds.audit(logits, targets, train=(logits, targets), **CLASSES), expected)
    order = ["cat", "ant", "bee"]
    reordered = logits[:, :, [2, 0, 1]]
    assert_same_audit(
        ds.audit(reordered, named, train=(reordered, named), classes=order, **CLASSES),
        ds.audit(reordered, (labels + 1) % 3, train=(reordered, (labels + 1) % 3), **CLASSES),
    )
    assert_same_audit(ds.audit(logits, labels, train=(logits, labels), classes=NAMES, **CLASSES), expected)
    tens = 10 * labels + 10
    assert_same_audit(ds.audit(logits, tens, train=(logits, tens), classes=[10, 20, 30], **CLASSES), expected)
    assert_same_audit(
        ds.audit(logits, tens.double(), train=(logits, tens), classes=[10.0, 20.0, 30.0], **CLASSES), expected
    )
    wide = torch.cat([logits, logits[:, :, :1] - 9], -1)
    audit = ds.audit(wide, named, classes=[*NAMES, "dog"], **CLASSES)
    assert_same_audit(audit, ds.audit(wide, labels, **CLASSES))


def test_frames_are_matched_by_the_names_of_their_columns():
    logits, labels = logits_and_labels()
    named = pd.Series(NAMES[labels])
    expected = ds.audit(logits, labels, reference=logits, **CLASSES)
    frames = [pd.DataFrame(part.numpy(), columns=NAMES) for part in logits]
    reordered = [frame[["cat", "ant", "bee"]] if i % 2 else frame for i, frame in enumerate(frames)]
    for outputs in (frames, reordered, tuple(reordered), dict(enumerate(reordered))):
        assert_same_audit(ds.audit(outputs, named, reference=reordered, classes=NAMES, **CLASSES), expected)
        assert_same_audit(ds.audit(outputs, named, reference=reordered, **CLASSES), expected)
    backwards = [frame[["cat", "bee", "ant"]] for frame in frames]
    reversed_audit = ds.audit(backwards, named, reference=backwards, **CLASSES)
    assert reversed_audit.test["accuracy"] == expected.test["accuracy"], (
        "columns have names, which sorted labels must not overrule"
    )
    unnamed = [pd.DataFrame(part.numpy()) for part in logits]
    assert_same_audit(ds.audit(unnamed, labels, reference=unnamed, **CLASSES), expected)
    assert_same_audit(ds.audit(unnamed, named, reference=unnamed, **CLASSES), expected)
    prefixed = [frame.add_prefix("p_") for frame in frames]
    assert_same_audit(ds.audit(prefixed, labels, reference=[f[f.columns[::-1]] for f in prefixed], **CLASSES), expected)
    numbered = [frame.set_axis([3, 1, 2], axis=1) for frame in frames]
    assert_same_audit(ds.audit(numbered, np.array([3, 1, 2])[labels], reference=numbered, **CLASSES), expected)
    assert_same_audit(ds.audit(logits.tolist(), labels.tolist(), reference=logits.tolist(), **CLASSES), expected)


def test_frames_of_a_regression():
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(80, 2, generator=generator, dtype=torch.float64)
    f = y + torch.randn(3, 80, 2, generator=generator, dtype=torch.float64)
    settings = {"task": "regression"}
    expected = ds.audit(f, y, train=(f, y), ood=f, **settings)
    frames = [pd.DataFrame(part.numpy(), columns=["u", "v"]) for part in f]
    reordered = [frame[["v", "u"]] for frame in frames]
    targets = pd.DataFrame(y.numpy(), columns=["u", "v"])
    assert_same_audit(ds.audit(frames, targets, train=(reordered, targets), ood=reordered, **settings), expected)
    single = ds.audit(f[..., 0], y[:, 0], reference=f[..., 1], **settings)
    table = pd.DataFrame(f[..., 0].T.numpy())
    reference = pd.DataFrame(f[..., 1].T.numpy()).convert_dtypes()
    for values in (targets["u"], targets[["u"]], y[:, 0].tolist()):
        assert_same_audit(ds.audit(table, values, reference=reference, **settings), single)
    with pytest.raises(TypeError, match="`outputs` must be a list of frames"):
        ds.audit(table, targets, **settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "cross_entropy"}, "`loss` must be one of 'zero_one', 'brier'"),
        ({"pool": "score"}, "`pool` must be one of 'vote', 'probability'"),
        ({"outputs": np.eye(3)[[[0, 1]]]}, r"be votes \[M, N\].*got \[1, 2, 3\].*Use kind='probabilities'"),
        ({"outputs": np.zeros(5, int)}, r"be votes \[M, N\].*got \[5\].*Give \[votes\]"),
        ({"outputs": []}, r"be votes \[M, N\]"),
        ({"outputs": None}, "`outputs` must be an array, a frame or a list; got None"),
        ({"outputs": "votes.npz"}, "`outputs` must be an array, a frame or a list; got 'votes.npz'"),
        ({"outputs": iter([])}, r"be votes \[M, N\].*; got list_iterator"),
        ({"targets": None}, "`targets` must be an array, a frame or a list; got None"),
        ({"outputs": ["ant", "bee"]}, r"be votes \[M, N\]"),
        ({"outputs": [[0, 1], [0]]}, r"a vote of every member for every example; got members of shapes \[1\], \[2\]"),
        ({"outputs": np.full((4, 200), 0.5)}, "be labels: whole numbers or names; got numbers with fractions"),
        ({"outputs": np.full((4, 200), np.nan)}, "be labels: whole numbers or names; got NaN"),
        ({"outputs": NAMES[np.zeros((4, 200), int)]}, "`outputs` must hold labels of one type; got int, str"),
        ({"outputs": [["ant", 1], ["bee", 2]]}, "labels of one type"),
        ({"outputs": [["ant", None], ["bee", "ant"]]}, "Are some missing"),
        ({"outputs": np.zeros((4, 200), int), "targets": np.zeros(200, int)}, "hold two classes or more; got 0"),
        ({"classes": [0, 1]}, "`targets` must be among the classes 0, 1; got 2"),
        ({"classes": [0, 1, 1]}, "`classes` must differ from each other"),
        ({"classes": []}, "`classes` must be a list of labels"),
        ({"targets": np.zeros(199, int)}, "hold N=200"),
        ({"train": np.zeros((4, 200))}, r"`train` must be a pair \(outputs, targets\)"),
    ],
)
def test_odd_votes_are_refused(change, message, unchecked):
    votes, labels = votes_and_labels()
    settings = {"outputs": votes, "targets": labels, **VOTES, **change}
    with pytest.raises((ValueError, TypeError), match=message):
        ds.audit(settings.pop("outputs"), settings.pop("targets"), **settings)


def test_odd_names_are_refused(unchecked):
    logits, labels = logits_and_labels()
    named = NAMES[labels]
    frames = [pd.DataFrame(part.numpy(), columns=NAMES) for part in logits]
    cases = [
        (logits[..., :2], named, {}, "`targets` must hold 2 different labels, .*; got 3: 'ant', 'bee'"),
        (logits, named, {"classes": ["ant", "bee"]}, "`outputs` must have 2 columns"),
        (logits, named, {"classes": ["ant", "bee", "dog"]}, "`targets` must be among the classes 'ant', 'bee', 'dog'"),
        (logits, named, {"classes": [0, 1, 2]}, "`targets` must be among the classes 0, 1, 2; got 'ant', 'bee', 'cat'"),
        (logits, labels, {"classes": [1, 2, 3]}, "`targets` must be among the classes 1, 2, 3; got 0"),
        (logits, labels + 1, {"classes": NAMES}, "lie between 0 and 2"),
        (frames, named, {"classes": ["ant", "bee", "dog"]}, "`outputs` must have the columns 'ant', 'bee', 'dog'"),
        (frames[0], named, {}, r"a list of frames \[N, C\], one per member; got one frame"),
        ([[[0.1, 0.9], [1.0]]], [0, 1], {}, "rows of one length"),
        ([named, named], named, {}, "`outputs` must be numbers; got names. Hard votes"),
        (logits, np.where(labels == 0, None, named), {}, "labels of one type"),
    ]
    for outputs, targets, settings, message in cases:
        with pytest.raises((ValueError, TypeError), match=message):
            ds.audit(outputs, targets, **CLASSES, **settings)
    with pytest.raises(ValueError, match="`classes` must be left out for regression"):
        ds.audit(logits, logits[0], task="regression", classes=[1])


def test_many_classes_are_not_all_listed(unchecked):
    logits, labels = logits_and_labels(classes=12)
    with pytest.raises(ValueError, match="among the classes 100, 101, 102, 103, 104 and 7 more"):
        ds.audit(logits, labels, classes=range(100, 112), **CLASSES)


def test_the_command_takes_votes(tmp_path):
    votes, labels = votes_and_labels()
    np.savez(tmp_path / "votes.npz", outputs=NAMES[votes], targets=NAMES[labels])
    arguments = ["--task", "classification", "--kind", "labels", "--json", str(tmp_path / "a.json")]
    done = CliRunner().invoke(
        app, ["audit", str(tmp_path / "votes.npz"), *arguments, "--page", str(tmp_path / "a.html")]
    )
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["figures"]["accuracy"]["value"] == ds.audit(votes, labels, **VOTES).test["accuracy"].value
    assert "Audit: votes" in (tmp_path / "a.html").read_text()


def test_the_command_takes_names_of_columns(tmp_path):
    logits, labels = (part.numpy() for part in logits_and_labels())
    expected = ds.audit(logits, (labels + 1) % 3, **CLASSES).test["accuracy"].value
    for targets, names in ((NAMES[labels], "cat, ant,bee"), (10 - labels, "8,10,9")):
        np.savez(tmp_path / "in.npz", outputs=logits, targets=targets)
        arguments = [
            "--task",
            "classification",
            "--kind",
            "logits",
            "--json",
            str(tmp_path / "a.json"),
            "--classes",
            names,
        ]
        done = CliRunner().invoke(app, ["audit", str(tmp_path / "in.npz"), *arguments])
        assert done.exit_code == 0, done.output
        assert json.loads((tmp_path / "a.json").read_text())["figures"]["accuracy"]["value"] == expected


MATCH = "matches_own_prediction"


def classes_data(names=False, classes=3):
    x, y = make_classification(240, 6, n_informative=4, n_classes=classes, flip_y=0.1, random_state=0)
    return x[:160], x[160:], *((NAMES[y] if names else 3 * y + 5)[part] for part in (slice(160), slice(160, None)))


def values_data(width=1):
    x, y = make_regression(240, 6, n_targets=width, noise=30.0, random_state=0)
    return x[:160], x[160:], y[:160], y[160:]


def stump(depth=2):
    return tree.DecisionTreeClassifier(max_depth=depth, random_state=0)


PLAIN = {
    "forest": ensemble.RandomForestClassifier(8, max_depth=3, random_state=0),
    "extra trees": ensemble.ExtraTreesClassifier(8, max_depth=3, random_state=0),
    "bagging": ensemble.BaggingClassifier(stump(), 8, max_features=0.5, random_state=0),
    "bagged votes": ensemble.BaggingClassifier(svm.LinearSVC(), 5, max_samples=0.2, random_state=0),
    "bagged few": ensemble.BaggingClassifier(neighbors.KNeighborsClassifier(1), 9, max_samples=3, random_state=0),
    "soft": ensemble.VotingClassifier([("a", stump(1)), ("b", stump(4)), ("c", stump(6))], voting="soft"),
    "hard": ensemble.VotingClassifier([("a", stump(1)), ("b", stump(4)), ("c", stump(6))]),
    "calibrated": CalibratedClassifierCV(svm.LinearSVC(), cv=3),
    "pipeline": pipeline.make_pipeline(
        preprocessing.StandardScaler(), preprocessing.PolynomialFeatures(), ensemble.RandomForestClassifier(5)
    ),
    "search": GridSearchCV(
        pipeline.make_pipeline(preprocessing.StandardScaler(), ensemble.RandomForestClassifier(4, random_state=0)),
        {"randomforestclassifier__max_depth": [1, 3]},
        cv=2,
    ),
}


@pytest.mark.slow(cases=["*-True"])
@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("model", PLAIN.values(), ids=PLAIN)
def test_pooled_outputs_are_what_the_classifier_predicts(model, names):
    x, x_test, y, y_test = classes_data(names)
    model = clone(model).fit(x, y)
    audit = ds.audit_estimator(model, x_test, y_test, train=(x, y), ood=x_test + 1, reference=model)
    assert audit.facts[MATCH] is True
    assert audit.test["accuracy"].value == pytest.approx(model.score(x_test, y_test))
    assert audit.train["accuracy"].value == pytest.approx(model.score(x, y))
    assert audit.reference == audit.test
    if audit.facts["kind"] == "probabilities":
        from sklearn.metrics import log_loss

        probs = model.predict_proba(x_test).clip(2e-38)
        label_probs = probs[np.arange(80), np.searchsorted(model.classes_, y_test)]
        assert audit.test["nll"].value == pytest.approx(-np.log(label_probs).mean())
        if probs.min() > 1e-3:
            assert audit.test["nll"].value == pytest.approx(log_loss(y_test, probs, labels=model.classes_))


def test_every_class_keeps_its_column_where_a_member_has_not_seen_it():
    x, x_test, y, y_test = classes_data(names=True)
    model = clone(PLAIN["bagged few"]).fit(x, y)
    assert any(len(member.classes_) < 3 for member in model.estimators_)
    assert ds.audit_estimator(model, x_test, y_test).facts[MATCH] is True
    members = [stump().fit(x[y != name], y[y != name]) for name in NAMES]
    audit = ds.audit_estimator(members, x_test, y_test)
    expected = np.zeros((3, 80, 3))
    for i, member in enumerate(members):
        expected[i][:, [j for j in range(3) if j != i]] = member.predict_proba(x_test)
    assert_same_audit(audit, ds.audit(expected, y_test, classes=NAMES, **PROBS))
    assert MATCH not in audit.facts


REGRESSORS = {
    "forest": ensemble.RandomForestRegressor(8, random_state=0),
    "extra trees": ensemble.ExtraTreesRegressor(8, bootstrap=True, random_state=0),
    "bagging": ensemble.BaggingRegressor(linear_model.Ridge(), 6, max_features=0.6, random_state=0),
    "voting": ensemble.VotingRegressor([("a", linear_model.Ridge()), ("b", neighbors.KNeighborsRegressor())]),
    "pipeline": pipeline.make_pipeline(ensemble.RandomForestRegressor(5, random_state=0)),
}


@pytest.mark.parametrize(
    ("name", "width"), [(name, width) for name in REGRESSORS for width in (1, 3) if (name, width) != ("voting", 3)]
)
def test_pooled_outputs_are_what_the_regressor_predicts(name, width):
    x, x_test, y, y_test = values_data(width)
    model = clone(REGRESSORS[name]).fit(x, y)
    audit = ds.audit_estimator(model, x_test, y_test, train=(x, y), ood=5 * x_test)
    assert audit.facts[MATCH] is True
    errors = (model.predict(x_test) - y_test).reshape(80, -1)
    assert audit.test["mse"].value == pytest.approx((errors**2).mean())
    assert audit.facts["outputs"] == width
    assert set(audit.detection) == {"variance"}


def shares(text):
    return float(text.split("%")[0].split(":")[-1]) / 100


def test_differences_from_the_models_prediction_are_reported(tmp_path):
    x, x_test, y, y_test = classes_data(names=True)
    members = [("a", stump(1)), ("b", neighbors.KNeighborsClassifier(3)), ("c", stump(6))]
    soft = ensemble.VotingClassifier(members, voting="soft", weights=[8, 1, 1]).fit(x, y)
    audit = ds.audit_estimator(soft, x_test, y_test)
    mean = np.mean([member.predict_proba(x_test) for member in soft.estimators_], 0)
    difference = audit.facts[MATCH]
    assert difference.startswith("the model's own prediction weighs its members; the audit takes their plain mean")
    assert shares(difference) == pytest.approx((NAMES[mean.argmax(-1)] != soft.predict(x_test)).mean(), abs=5e-4)
    assert f"by up to {np.abs(mean - soft.predict_proba(x_test)).max():.2g}." in difference
    assert difference in audit.summary()
    assert json.loads(audit.to_json())["facts"][MATCH] == difference
    text = audit.page(tmp_path / "a.html").read_text()
    assert text.count("weighs its members; the audit takes their plain mean") == 2
    hard = ensemble.VotingClassifier(members, weights=[8, 1, 1]).fit(x, y)
    difference = ds.audit_estimator(hard, x_test, y_test).facts[MATCH]
    votes = np.stack([member.predict(x_test) for member in hard.estimators_])
    pooled = NAMES[[np.bincount(column, minlength=3).argmax() for column in votes.T]]
    assert "plain majority vote" in difference
    assert shares(difference) == pytest.approx((pooled != hard.predict(x_test)).mean(), abs=5e-4)
    alike = ensemble.VotingClassifier(members, weights=[1, 1, 1.01]).fit(x, y)
    assert "mean" in ds.audit_estimator(forest(x, y), x_test, y_test, pool="score").facts[MATCH]
    assert (
        ds.audit_estimator(alike, x_test, y_test, kind="probabilities", loss="brier").facts["kind"] == "probabilities"
    )


def forest(x, y):
    return ensemble.RandomForestClassifier(6, max_depth=3, random_state=0).fit(x, y)


@pytest.mark.parametrize("cv", [2, "prefit"])
def test_a_stack_is_distinguished_from_the_mean_of_its_members(cv):
    x, x_test, y, y_test = classes_data(names=True)
    base = [("a", stump(1)), ("b", stump(5))]
    if cv == "prefit":
        base = [(name, model.fit(x, y)) for name, model in base]
    stack = ensemble.StackingClassifier(base, linear_model.LogisticRegression(), cv=cv).fit(x, y)
    audit = ds.audit_estimator(stack, x_test, y_test)
    assert "comes from a final estimator on top of its members" in audit.facts[MATCH]
    probs = np.stack([member.predict_proba(x_test) for member in stack.estimators_])
    assert_same_audit(audit, ds.audit(probs, y_test, classes=NAMES, **PROBS))
    x, x_test, y, y_test = values_data()
    base = [("a", linear_model.Ridge()), ("b", neighbors.KNeighborsRegressor())]
    stack = ensemble.StackingRegressor(base).fit(x, y)
    assert "final estimator" in ds.audit_estimator(stack, x_test, y_test).facts[MATCH]


def test_adaboost_votes_and_takes_medians():
    x, x_test, y, y_test = classes_data(names=True)
    model = ensemble.AdaBoostClassifier(stump(3), n_estimators=9, random_state=0).fit(x, y)
    audit = ds.audit_estimator(model, x_test, y_test)
    votes = np.stack([member.predict(x_test) for member in model.estimators_])
    assert_same_audit(audit, ds.audit(votes, y_test, classes=NAMES, **VOTES))
    pooled = [max(NAMES, key=list(column).count) for column in votes.T]
    assert shares(audit.facts[MATCH]) == pytest.approx((pooled != model.predict(x_test)).mean(), abs=5e-4)
    x, x_test, y, y_test = values_data()
    model = ensemble.AdaBoostRegressor(n_estimators=6, random_state=0).fit(x, y)
    mean = np.mean([member.predict(x_test) for member in model.estimators_], 0)
    rms = np.sqrt(np.mean((mean - model.predict(x_test)) ** 2))
    difference = ds.audit_estimator(model, x_test, y_test).facts[MATCH]
    assert "weighted median" in difference
    assert f"differ by {rms:.3g} (root mean square)" in difference


@pytest.mark.parametrize("name", ["GradientBoosting", "HistGradientBoosting"])
def test_boosted_models_have_stages_and_no_members(name, unchecked):
    x, x_test, y, y_test = classes_data(names=True)
    count = {"n_estimators": 5} if name == "GradientBoosting" else {"max_iter": 5}
    model = getattr(ensemble, f"{name}Classifier")(**count).fit(x, y)
    with pytest.raises(TypeError, match="no members. A boosted model adds up stages.*use staged=True"):
        ds.audit_estimator(model, x_test, y_test)
    audit = ds.audit_estimator(model, x_test, y_test, staged=True)
    assert_same_audit(audit, ds.audit(list(model.staged_predict_proba(x_test)), y_test, classes=NAMES, **PROBS))
    assert "is that of its last stage" in audit.facts[MATCH]
    x, x_test, y, y_test = values_data()
    regressor = getattr(ensemble, f"{name}Regressor")(**count).fit(x, y)
    audit = ds.audit_estimator(regressor, x_test, y_test, staged=True)
    assert_same_audit(audit, ds.audit(list(regressor.staged_predict(x_test)), y_test, task="regression"))
    with pytest.raises(ValueError, match="`staged` must be left out for a model without stages"):
        ds.audit_estimator(ensemble.RandomForestRegressor(2).fit(x, y), x_test, y_test, staged=True)


def test_frames_and_sparse_inputs():
    from scipy import sparse

    x, x_test, y, y_test = classes_data(names=True)
    frames = [pd.DataFrame(part, columns=list("abcdef")) for part in (x, x_test)]
    for name in ("forest", "bagging", "soft", "hard", "pipeline", "search", "calibrated"):
        model = clone(PLAIN[name]).fit(frames[0], y)
        audit = ds.audit_estimator(model, frames[1], pd.Series(y_test, index=range(80, 160)), ood=frames[0])
        assert audit.facts[MATCH] is True, name
    boosted = ensemble.AdaBoostClassifier(stump(), n_estimators=4).fit(frames[0], y)
    assert ds.audit_estimator(boosted, frames[1], y_test).facts["members"] == 4
    reordered = frames[1][list("bacdef")]
    with pytest.raises(ValueError, match="feature names"):
        ds.audit_estimator(clone(PLAIN["forest"]).fit(frames[0], y), frames[1], y_test, ood=reordered)
    for name in ("forest", "bagging", "soft"):
        for form in (sparse.csr_matrix, sparse.coo_matrix):
            model = clone(PLAIN[name]).fit(form(x), y)
            audit_of_sparse = ds.audit_estimator(model, form(x_test), y_test)
            assert audit_of_sparse.facts[MATCH] is True
    assert ds.audit_estimator(clone(PLAIN["forest"]).fit(x, y), x_test.tolist(), y_test.tolist()).facts[MATCH] is True


def test_lists_of_estimators():
    x, x_test, y, y_test = classes_data(names=True)
    several = [stump(2).fit(x, y), neighbors.KNeighborsClassifier().fit(x, y), clone(PLAIN["pipeline"]).fit(x, y)]
    audit = ds.audit_estimator(several, x_test, y_test, train=(x, y))
    probs = np.stack([estimator.predict_proba(x_test) for estimator in several])
    assert_same_audit(replace(audit, train=None), ds.audit(probs, y_test, classes=NAMES, **PROBS))
    assert_same_audit(ds.audit_estimator(dict(zip("abc", several, strict=True)), x_test, y_test, train=(x, y)), audit)
    mixed = [*several, svm.LinearSVC().fit(x, y)]
    votes = ds.audit_estimator(mixed, x_test, y_test)
    assert_same_audit(
        votes, ds.audit(np.stack([estimator.predict(x_test) for estimator in mixed]), y_test, classes=NAMES, **VOTES)
    )
    assert votes.facts["kind"] == "labels"
    assert_same_audit(
        ds.audit_estimator(several, x_test, y_test, kind="labels"),
        ds.audit(np.stack([estimator.predict(x_test) for estimator in several]), y_test, **VOTES),
    )
    reference = ds.audit_estimator(several, x_test, y_test, reference=forest(x, y))
    trees = np.stack([member.predict_proba(x_test) for member in forest(x, y).estimators_])
    assert_same_audit(reference, ds.audit(probs, y_test, classes=NAMES, reference=trees, **PROBS))
    assert_same_audit(ds.audit_estimator(several, x_test, y_test, reference=trees), reference)
    x, x_test, y, y_test = values_data()
    several = [linear_model.Ridge().fit(x, y), linear_model.LinearRegression().fit(x, y[:, None])]
    values = np.stack([estimator.predict(x_test).ravel() for estimator in several])
    assert_same_audit(ds.audit_estimator(several, x_test, y_test), ds.audit(values, y_test, task="regression"))


def test_classes_unknown_to_the_model_become_columns_on_request(unchecked):
    x, x_test, y, y_test = classes_data(names=True)
    y_test = np.where(np.arange(80) < 3, "dog", y_test)
    model = clone(PLAIN["forest"]).fit(x, y)
    with pytest.raises(ValueError, match="`targets` must be among the classes 'ant', 'bee', 'cat'; got 'dog'"):
        ds.audit_estimator(model, x_test, y_test)
    audit = ds.audit_estimator(model, x_test, y_test, classes=["dog", "ant", "bee", "cat"])
    assert audit.facts["outputs"] == 4
    assert audit.test["accuracy"].value == pytest.approx(model.score(x_test, y_test))
    assert audit.facts[MATCH] is True
    without_ant = forest(x[y != "ant"], y[y != "ant"])
    assert ds.audit_estimator(model, x_test[3:], y_test[3:], reference=without_ant).reference["accuracy"].value < 1
    with pytest.raises(ValueError, match="`reference` must be among the classes 'bee', 'cat'; got 'ant'"):
        ds.audit_estimator(without_ant, x_test[:0:-1], np.where(y_test == "bee", "bee", "cat")[:0:-1], reference=model)


class WithOwnModes(torch.nn.Module):
    """A network with dropout, and a part that is frozen in evaluation mode."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layer, self.dropout, self.norm = torch.nn.Linear(6, 3), torch.nn.Dropout(), torch.nn.BatchNorm1d(3).eval()
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(3, 6, generator=generator))

    def forward(self, x):
        return self.norm(self.dropout(self.layer(x)))


def test_networks_and_callables():
    _, x_test, _, y_test = classes_data()
    labels = (y_test - 5) // 3
    networks = [WithOwnModes(seed) for seed in range(3)]
    inputs = torch.from_numpy(x_test).float()
    with torch.no_grad():
        logits = torch.stack([network.norm(network.layer(inputs)) for network in networks])
    expected = ds.audit(logits, labels, **CLASSES)
    for model in (
        networks,
        [lambda x, network=network: network(x) for network in logits_of(networks)],
        lambda x: logits,
        lambda x: logits.numpy(),
        lambda x: list(logits),
    ):
        assert_same_audit(ds.audit_estimator(model, x_test, labels, **CLASSES), expected)
    assert all(network.training and network.dropout.training and not network.norm.training for network in networks)
    assert_same_audit(ds.audit_estimator(networks, x_test, y_test, classes=[5, 8, 11], **CLASSES), expected)
    assert_same_audit(ds.audit_estimator(networks, pd.DataFrame(x_test), labels, **CLASSES), expected)

    class Stacked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.networks = torch.nn.ModuleList(networks)

        def forward(self, x):
            return torch.stack([network(x) for network in self.networks])

    repeated = np.tile(x_test, (30, 1))
    assert_same_audit(
        ds.audit_estimator(Stacked(), repeated, np.tile(labels, 30), **CLASSES),
        ds.audit(logits.repeat(1, 30, 1), np.tile(labels, 30), **CLASSES),
    )
    votes = ds.audit_estimator([lambda x, i=i: logits[i].argmax(-1) for i in range(3)], x_test, labels, **VOTES)
    assert votes.test["member_accuracy"] == expected.test["member_accuracy"]
    values = ds.audit_estimator(lambda x: np.stack([x[:, 0], x[:, 1]]), x_test, x_test[:, 0], task="regression")
    assert values.facts["members"] == 2


def logits_of(networks):
    return [
        lambda x, network=network: network.norm(network.layer(torch.from_numpy(x).float())).detach()
        for network in networks
    ]


def test_an_ensemble_and_its_twin():
    _, x_test, _, y_test = classes_data()
    labels = (y_test - 5) // 3
    ens, twin = (ds.Ensemble(lambda: torch.nn.Linear(6, 3), members=3, seed=seed) for seed in range(2))
    inputs = torch.from_numpy(x_test).float()
    expected = ds.audit(ens.predict(inputs), labels, **CLASSES)
    for data in (inputs, x_test, torch.utils.data.TensorDataset(inputs)):
        assert_same_audit(ds.audit_estimator(ens, data, labels, task="classification"), expected)
    with_reference = ds.audit(ens.predict(inputs), labels, reference=twin.predict(inputs), **CLASSES)
    assert_same_audit(ds.audit_estimator(ens, inputs, labels, task="classification", reference=twin), with_reference)
    ens.twin = twin
    audit = ds.audit_estimator(ens, inputs, labels, task="classification")
    assert_same_audit(audit, with_reference)
    assert audit.facts["reference"] == "the ensemble's twin"
    mean = ds.audit_estimator(twin, inputs, inputs[:, :3], task="regression")
    assert mean.facts["kind"] == "values"


def test_models_without_members_are_refused(unchecked):
    x, x_test, y, y_test = classes_data()
    two = np.stack([y, y], 1)
    fitted, unfitted = forest(x, y), ensemble.RandomForestClassifier(3)
    single = stump().fit(x, y)
    several = ensemble.RandomForestClassifier(3).fit(x, two)
    values = linear_model.Ridge().fit(x, y)
    cases = [
        (unfitted, {}, "`model` must be fitted; got a RandomForestClassifier that is not. Call fit"),
        (pipeline.make_pipeline(preprocessing.StandardScaler(), unfitted), {}, "must be fitted; got a Pipeline"),
        ([single, stump()], {}, "`model` must be fitted; got a DecisionTreeClassifier"),
        (single, {}, "DecisionTreeClassifier, which has no members. Give a list of models"),
        (ensemble.IsolationForest(n_estimators=2).fit(x), {}, "IsolationForest, which has no members"),
        (ensemble.RandomForestClassifier, {}, "got the class RandomForestClassifier"),
        ([ensemble.RandomForestClassifier], {}, "got the class RandomForestClassifier"),
        (several, {}, "`model` must have one output; got 2 outputs of classes"),
        ([tree.DecisionTreeClassifier().fit(x, two)], {}, "`model` must have one output; got 2 outputs of classes"),
        (forest(x, 0 * y), {}, "`model` must know two classes or more; got one that was fitted to 0 alone"),
        ([], {}, "`model` must hold at least one model; got an empty list"),
        ([single, values], {}, "classifiers or regressors, not both"),
        ([single, len], {}, "estimators with `predict`, or callables, not both; got builtin"),
        (3, {}, "got int, which has no members"),
        (fitted, {"task": "regression"}, "`task` must be 'classification' for RandomForestClassifier"),
        ([single], {"task": "regression"}, "`task` must be 'classification' for these models"),
        (lambda x: x, {"task": "regresion"}, "Did you mean 'regression'"),
        (lambda x: x, {}, "`task` must be stated for this model"),
        (lambda x: x, {"task": "classification"}, "`kind` must be stated for this model"),
        ([values], {"kind": "labels"}, "`kind` must be left out for regression"),
        ([values], {"classes": [1]}, "`classes` must be left out for regression"),
        ([single], {"kind": "logits"}, "`kind` must be 'probabilities' or 'labels' for estimators"),
        ([svm.LinearSVC().fit(x, y)], {"kind": "probabilities"}, "have members with predict_proba"),
        ([single], {"train": x}, r"`train` must be a pair \(X, y\)"),
        ([single, stump().fit(x, NAMES[(y - 5) // 3])], {}, "labels of one type; got int, str"),
        ([single], {"reference": [values]}, "`task` must be 'regression' for these models"),
    ]
    for model, settings, message in cases:
        with pytest.raises((ValueError, TypeError), match=message):
            ds.audit_estimator(model, x_test, y_test, **settings)
    with pytest.raises(ValueError, match="features"):
        ds.audit_estimator(fitted, x_test[:, :4], y_test)
    with pytest.raises(ValueError, match="hold N=80 examples"):
        ds.audit_estimator(fitted, x_test, y_test[:70])
    from scipy.sparse import csr_matrix

    with pytest.raises(TypeError, match="be dense for a network"):
        ds.audit_estimator([torch.nn.Linear(6, 3)], csr_matrix(x_test), y_test, **CLASSES)


def test_numbers_are_no_labels_of_a_model_that_knows_names():
    from sklearn.ensemble import RandomForestClassifier

    x = np.random.default_rng(0).normal(size=(120, 3))
    names = np.where(x[:, 0] > 0, "benign", "malignant")
    forest = RandomForestClassifier(5, random_state=0).fit(x, names)
    with pytest.raises(ValueError, match="`y` must hold names of classes"):
        ds.audit_estimator(forest, x, (x[:, 0] <= 0).astype(int))
    assert ds.audit_estimator(forest, x, names).test["accuracy"].value > 0.9


def test_votes_of_models_with_labels_that_are_objects():
    from sklearn.ensemble import VotingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.tree import DecisionTreeClassifier

    x = np.random.default_rng(0).normal(size=(200, 3))
    names = np.where(x[:, 0] + 0.3 * x[:, 1] > 0, "benign", "malignant").astype(object)
    members = [
        ("a", LogisticRegression()),
        ("b", DecisionTreeClassifier(max_depth=1)),
        ("c", LogisticRegression(C=0.1)),
    ]
    model = VotingClassifier(members, voting="hard").fit(x[:100], names[:100])
    assert ds.audit_estimator(model, x[100:], names[100:]).facts["matches_own_prediction"] is True


def test_masked_entries_are_refused():
    """A mask would be lost, and masked entries would count as numbers."""
    generator = np.random.default_rng(0)
    values = generator.standard_normal(50)
    outputs, labels = values + generator.standard_normal((3, 50)), generator.integers(2, size=50)

    def masked(array, entries=1):
        mask = np.zeros(array.shape, bool)
        mask.flat[:entries] = True
        return np.ma.masked_array(array, mask)

    logits = np.stack([np.zeros_like(outputs), outputs], -1)
    regression, classes = {"task": "regression"}, {"task": "classification", "kind": "logits"}
    votes = {"task": "classification", "kind": "labels"}
    chosen = (outputs > 0).astype(int)
    for arguments, settings, name in (
        ((masked(outputs), values), regression, "outputs"),
        (([*outputs[:2], masked(outputs[2])], values), regression, "outputs"),
        ((outputs, masked(values)), regression, "targets"),
        ((masked(logits), labels), classes, "outputs"),
        ((logits, masked(labels)), classes, "targets"),
        ((logits, labels), {**classes, "ood": masked(logits)}, "ood"),
        ((logits, labels), {**classes, "reference": masked(logits)}, "reference"),
        ((logits, labels), {**classes, "train": (masked(logits), labels)}, "train"),
        ((logits, labels), {**classes, "groups": masked(np.arange(50))}, "groups"),
        ((logits, labels), {**classes, "train": (logits, labels), "in_bag": masked(chosen)}, "in_bag"),
        ((masked(chosen), labels), votes, "outputs"),
        ((chosen, masked(labels)), votes, "targets"),
    ):
        with pytest.raises(ValueError, match=f"`{name}` must have no masked entries; got 1 of them"):
            ds.audit(*arguments, **settings)
    nothing_masked = ds.audit(masked(logits, 0), masked(labels, 0), **classes)
    assert nothing_masked.to_json() == ds.audit(logits, labels, **classes).to_json()
