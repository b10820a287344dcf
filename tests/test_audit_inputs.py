"""What an audit takes and gives: votes, names of classes, frames, estimators; pages and pictures."""

import sys

import pytest
import torch

import dissensus as ds
from dissensus.auditing.judging import VERDICTS
from dissensus.auditing.page import KINDS, drawings
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
