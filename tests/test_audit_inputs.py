"""What an audit takes and gives: votes, names of classes, frames, estimators; pages and pictures."""

import json
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import dissensus as ds
from dissensus.auditing.judging import VERDICTS
from dissensus.auditing.page import KINDS, drawings
from dissensus.cli import app
from dissensus.cli.audit import COLOURS

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
    assert f'class="badge {KINDS[audit.verdict]}">{audit.verdict}<' in text
    assert text.count("<figure>") == len(drawings(audit)) == 4
    again = audit.page(str(path), title="five <networks>").read_text()
    assert "Audit: five &lt;networks&gt;" in again


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
    assert labels == {axes.get_ylabel() for own, _ in drawings(audit) for axes in own.axes}
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
    assert set(VERDICTS) | {"unskilled"} == set(KINDS)
    assert set(KINDS.values()) == set(COLOURS)
    assert KINDS["unskilled"] == "bad"


NAMES = np.array(["ant", "bee", "cat"])
PROBS = {"task": "classification", "kind": "probabilities"}
VOTES = {"task": "classification", "kind": "labels"}


def votes_and_labels(**sizes):
    logits, labels = logits_and_labels(**sizes)
    return logits.argmax(-1).numpy(), labels.numpy()


def same(left, right):
    assert left.test == right.test
    assert left.by_member == right.by_member
    assert left.detection == right.detection
    assert (left.train, left.reference) == (right.train, right.reference)


def test_votes_are_one_hot_probabilities_that_vote():
    votes, labels = votes_and_labels()
    found = ds.audit(votes, labels, **VOTES)
    same(found, ds.audit(np.eye(3)[votes], labels, pool="vote", loss="zero_one", **PROBS))
    assert (found.facts["kind"], found.facts["pool"], found.facts["loss"]) == ("labels", "vote", "zero_one")
    pooled = np.array([np.bincount(column, minlength=3).argmax() for column in votes.T])
    assert found.test["accuracy"].value == pytest.approx((pooled == labels).mean())
    shares = ds.audit(votes, labels, pool="probability", loss="brier", **VOTES)
    same(shares, ds.audit(np.eye(3)[votes], labels, pool="probability", loss="brier", **PROBS))


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
    wanted = ds.audit(votes, labels, train=(votes[:, :90], labels[:90]), reference=votes[:2], ood=votes, **VOTES)
    train = votes_as(votes[:, :90]), labels_as(labels[:90])
    more = {"train": train, "reference": votes_as(votes[:2]), "ood": votes_as(votes)}
    same(ds.audit(votes_as(votes), labels_as(labels), **more, **VOTES), wanted)


def test_a_class_that_nobody_names_is_there_when_it_is_said():
    votes, labels = votes_and_labels()
    found = ds.audit(NAMES[votes], NAMES[labels], classes=[*NAMES, "dog"], **VOTES)
    assert found.facts["outputs"] == 4
    assert ds.audit(votes == 1, labels == 1, **VOTES).facts["outputs"] == 2


def test_mapped_votes_are_read_in_slices(tmp_path, monkeypatch):
    from dissensus.auditing import inputs, streaming

    votes, labels = votes_and_labels()
    np.save(tmp_path / "votes.npy", NAMES[votes])
    wanted = ds.audit(votes, labels, **VOTES)
    monkeypatch.setattr(streaming, "NUMBERS_AT_ONCE", 4 * 45 * 16)
    monkeypatch.setattr(inputs, "_LABELS_AT_ONCE", 64)
    mapped = np.load(tmp_path / "votes.npy", mmap_mode="r")
    found = ds.audit(mapped, NAMES[labels], **VOTES)
    assert found.test["accuracy"] == wanted.test["accuracy"]
    read = inputs.prepared(mapped, NAMES[labels], None, None, None, task="classification", kind="labels", classes=None)
    assert read.outputs.votes is mapped


def test_arrays_of_numbers_pass_through_untouched(tmp_path):
    from dissensus.auditing.inputs import prepared

    logits, labels = logits_and_labels()
    np.save(tmp_path / "logits.npy", logits.numpy())
    mapped = np.load(tmp_path / "logits.npy", mmap_mode="r")
    for outputs in (mapped, logits):
        read = prepared(outputs, labels, (outputs, labels), outputs, outputs, task="classification", kind="logits",
                        classes=None)  # fmt: skip
        assert all(part is outputs for part in (read.outputs, read.train[0], read.reference, read.ood))
        assert read.targets is labels
    read = prepared(
        [mapped[0], mapped[1]], labels, None, None, None, task="classification", kind="logits", classes=None
    )
    assert all(np.shares_memory(part, mapped) for part in read.outputs)


def test_names_of_classes_are_columns():
    logits, labels = logits_and_labels()
    wanted = ds.audit(logits, labels, train=(logits, labels), **CLASSES)
    named = NAMES[labels]
    for targets in (named, named.tolist(), pd.Series(named, index=(labels + 5).numpy()), pd.DataFrame({"y": named})):
        same(ds.audit(logits, targets, train=(logits, targets), **CLASSES), wanted)
    order = ["cat", "ant", "bee"]
    turned = logits[:, :, [2, 0, 1]]
    same(ds.audit(turned, named, train=(turned, named), classes=order, **CLASSES),
         ds.audit(turned, (labels + 1) % 3, train=(turned, (labels + 1) % 3), **CLASSES))  # fmt: skip
    same(ds.audit(logits, labels, train=(logits, labels), classes=NAMES, **CLASSES), wanted)
    tens = 10 * labels + 10
    same(ds.audit(logits, tens, train=(logits, tens), classes=[10, 20, 30], **CLASSES), wanted)
    same(ds.audit(logits, tens.double(), train=(logits, tens), classes=[10.0, 20.0, 30.0], **CLASSES), wanted)
    wide = torch.cat([logits, logits[:, :, :1] - 9], -1)
    found = ds.audit(wide, named, classes=[*NAMES, "dog"], **CLASSES)
    same(found, ds.audit(wide, labels, **CLASSES))


def test_frames_are_matched_by_the_names_of_their_columns():
    logits, labels = logits_and_labels()
    named = pd.Series(NAMES[labels])
    wanted = ds.audit(logits, labels, reference=logits, **CLASSES)
    frames = [pd.DataFrame(part.numpy(), columns=NAMES) for part in logits]
    turned = [frame[["cat", "ant", "bee"]] if i % 2 else frame for i, frame in enumerate(frames)]
    for outputs in (frames, turned, tuple(turned), dict(enumerate(turned))):
        same(ds.audit(outputs, named, reference=turned, classes=NAMES, **CLASSES), wanted)
        same(ds.audit(outputs, named, reference=turned, **CLASSES), wanted)
    backwards = [frame[["cat", "bee", "ant"]] for frame in frames]
    read = ds.audit(backwards, named, reference=backwards, **CLASSES)
    assert read.test["accuracy"] == wanted.test["accuracy"], "columns have names, which sorted labels must not overrule"
    plain = [pd.DataFrame(part.numpy()) for part in logits]
    same(ds.audit(plain, labels, reference=plain, **CLASSES), wanted)
    same(ds.audit(plain, named, reference=plain, **CLASSES), wanted)
    prefixed = [frame.add_prefix("p_") for frame in frames]
    same(ds.audit(prefixed, labels, reference=[f[f.columns[::-1]] for f in prefixed], **CLASSES), wanted)
    numbered = [frame.set_axis([3, 1, 2], axis=1) for frame in frames]
    same(ds.audit(numbered, np.array([3, 1, 2])[labels], reference=numbered, **CLASSES), wanted)
    same(ds.audit(logits.tolist(), labels.tolist(), reference=logits.tolist(), **CLASSES), wanted)


def test_frames_of_a_regression():
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(80, 2, generator=generator, dtype=torch.float64)
    f = y + torch.randn(3, 80, 2, generator=generator, dtype=torch.float64)
    told = {"task": "regression"}
    wanted = ds.audit(f, y, train=(f, y), ood=f, **told)
    frames = [pd.DataFrame(part.numpy(), columns=["u", "v"]) for part in f]
    turned = [frame[["v", "u"]] for frame in frames]
    targets = pd.DataFrame(y.numpy(), columns=["u", "v"])
    same(ds.audit(frames, targets, train=(turned, targets), ood=turned, **told), wanted)
    one = ds.audit(f[..., 0], y[:, 0], reference=f[..., 1], **told)
    table = pd.DataFrame(f[..., 0].T.numpy())
    other = pd.DataFrame(f[..., 1].T.numpy()).convert_dtypes()
    for values in (targets["u"], targets[["u"]], y[:, 0].tolist()):
        same(ds.audit(table, values, reference=other, **told), one)
    with pytest.raises(TypeError, match="`outputs` must be a list of frames"):
        ds.audit(table, targets, **told)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "cross_entropy"}, "`loss` must be one of 'zero_one', 'brier'"),
        ({"pool": "score"}, "`pool` must be one of 'vote', 'probability'"),
        ({"outputs": np.eye(3)[[[0, 1]]]}, r"be votes \[M, N\].*got \[1, 2, 3\].*Say kind='probabilities'"),
        ({"outputs": np.zeros(5, int)}, r"be votes \[M, N\].*got \[5\].*Give \[votes\]"),
        ({"outputs": []}, r"be votes \[M, N\]"),
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
    told = {"outputs": votes, "targets": labels, **VOTES, **change}
    with pytest.raises((ValueError, TypeError), match=message):
        ds.audit(told.pop("outputs"), told.pop("targets"), **told)


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
        (logits, np.where(labels == 0, None, named), {}, "labels of one type"),
    ]  # fmt: skip
    for outputs, targets, told, message in cases:
        with pytest.raises((ValueError, TypeError), match=message):
            ds.audit(outputs, targets, **CLASSES, **told)
    with pytest.raises(ValueError, match="`classes` must be left out for regression"):
        ds.audit(logits, logits[0], task="regression", classes=[1])


def test_many_classes_are_not_all_listed(unchecked):
    logits, labels = logits_and_labels(classes=12)
    with pytest.raises(ValueError, match="among the classes 100, 101, 102, 103, 104 and 7 more"):
        ds.audit(logits, labels, classes=range(100, 112), **CLASSES)


def test_the_command_takes_votes(tmp_path):
    votes, labels = votes_and_labels()
    np.savez(tmp_path / "votes.npz", outputs=NAMES[votes], targets=NAMES[labels])
    told = ["--task", "classification", "--kind", "labels", "--json", str(tmp_path / "a.json")]
    done = CliRunner().invoke(app, ["audit", str(tmp_path / "votes.npz"), *told, "--page", str(tmp_path / "a.html")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["figures"]["accuracy"]["value"] == ds.audit(votes, labels, **VOTES).test["accuracy"].value
    assert "Audit: votes" in (tmp_path / "a.html").read_text()


def test_the_command_takes_names_of_columns(tmp_path):
    logits, labels = (part.numpy() for part in logits_and_labels())
    wanted = ds.audit(logits, (labels + 1) % 3, **CLASSES).test["accuracy"].value
    for targets, names in ((NAMES[labels], "cat, ant,bee"), (10 - labels, "8,10,9")):
        np.savez(tmp_path / "in.npz", outputs=logits, targets=targets)
        told = ["--task", "classification", "--kind", "logits", "--json", str(tmp_path / "a.json"), "--classes", names]
        done = CliRunner().invoke(app, ["audit", str(tmp_path / "in.npz"), *told])
        assert done.exit_code == 0, done.output
        assert json.loads((tmp_path / "a.json").read_text())["figures"]["accuracy"]["value"] == wanted
