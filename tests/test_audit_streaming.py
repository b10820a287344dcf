"""How an audit reads outputs and adds them up: groups, dense outputs, slices, subsets of members."""

import itertools
import json
import math
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import dissensus as ds
from dissensus.auditing import examples, streaming, tallying
from dissensus.auditing import sums as summing
from dissensus.auditing.detection import DETECTORS
from dissensus.auditing.measuring import measure
from dissensus.cli.main import app

LOGITS = {"kind": "logits", "loss": "cross_entropy", "pool": "probability"}
VALUES = {"kind": "values", "loss": "mse", "pool": "score"}


def classifier(members=4, examples=300, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (examples,), generator=generator)
    shared = torch.nn.functional.one_hot(labels, classes) * 2.0 + torch.randn(examples, classes, generator=generator)
    logits = shared + 1.5 * torch.randn(members, examples, classes, generator=generator)
    return logits.double(), labels


def dense(members=3, images=12, classes=4, grid=(5, 6), seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (images, *grid), generator=generator)
    hot = torch.nn.functional.one_hot(labels, classes).movedim(-1, 1)
    ease = 4 * torch.rand(images, *[1] * (1 + len(grid)), generator=generator)  # pixels of an image are alike
    logits = ease * hot + torch.randn(members, images, classes, *grid, generator=generator)
    return logits.double(), labels


def flat(logits):
    """``[M, N, C, *S]`` as ``[M, N · S, C]``."""
    return logits.movedim(2, -1).reshape(len(logits), -1, logits.shape[2])


def tally_of(outputs, targets, groups=None, **settings):
    reader = streaming.OutputReader(outputs)
    return tallying.tally_outputs(reader, targets, groups=groups, **{**LOGITS, **settings})


def named_sums(tally):
    """All tensors of a tally but its scores, by name."""
    return dict(summing.tensors(tally))


def assert_same_sums(expected, tally, **tolerance):
    names = named_sums(expected)
    assert named_sums(tally).keys() == names.keys()
    for name, values in named_sums(tally).items():
        torch.testing.assert_close(values, names[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)
    assert tally.scores.keys() == expected.scores.keys()
    for name, values in tally.scores.items():
        torch.testing.assert_close(values, expected.scores[name], atol=1e-5, rtol=1e-4)


def test_rows_of_a_group_are_resampled_together():
    """Every row three times, in any order: three times the rows, but no more evidence."""
    logits, labels = classifier()
    original = tally_of(logits, labels)
    order = torch.randperm(900, generator=torch.Generator().manual_seed(1))
    rows = torch.arange(300).repeat(3)[order]
    tripled = tally_of(logits[:, rows], labels[rows], groups=rows * 7 - 50)
    assert (original.units, tripled.units, tripled.examples) == (300, 300, 900)
    without_groups = tally_of(logits[:, rows], labels[rows])
    assert without_groups.units == 900
    expected, grouped, ungrouped = (measure(tally) for tally in (original, tripled, without_groups))
    for name, figure in expected.items():
        if not name.startswith("codependence"):
            assert grouped[name] == pytest.approx(figure, rel=1e-9, nan_ok=True), name
    narrow = ungrouped["accuracy"].high - ungrouped["accuracy"].low
    assert narrow < 0.8 * (expected["accuracy"].high - expected["accuracy"].low)


def test_groups_of_unequal_size_are_never_split():
    logits, labels = classifier(examples=1000, classes=2)
    groups = (torch.rand(1000, generator=torch.Generator().manual_seed(2)) ** 3 * 40).long()
    tally = tally_of(logits, labels, groups=groups)
    sizes = groups.unique(return_counts=True)[1]
    assert tally.units == len(sizes) < 256
    assert tally.count.sort().values.tolist() == sizes.sort().values.tolist()
    torch.testing.assert_close(tally.offsets.count, tally.count)


@pytest.mark.parametrize("groups", [torch.zeros(40, dtype=torch.long), torch.tensor([3, -1]).repeat(20)])
def test_one_or_two_groups_make_two_blocks(groups):
    logits, labels = classifier(examples=40)
    tally = tally_of(logits, labels, groups=groups)
    assert tally.units == len(groups.unique())
    assert len(tally.count) == 2
    assert tally.count.sum() == 40


def test_coarse_blocks_know_how_many_examples_they_hold(monkeypatch):
    """Seven blocks make three coarse ones of unequal size: a constant offset is found whatever a replicate draws."""
    monkeypatch.setattr(tallying, "_MOST_HELD", 3 * 2)
    f = torch.zeros(2, 7, 1, dtype=torch.float64)
    f[1] = 1.0
    tally = tally_of(f, torch.zeros(7, dtype=torch.float64), **VALUES)
    assert sorted(tally.offsets.count.tolist()) == [2, 2, 3]
    assert measure(tally)["bias_share"] == pytest.approx((1.0, 1.0, 1.0))


@pytest.mark.parametrize("grid", [(5, 6), (7,), (2, 3, 2)])
def test_dense_outputs_are_pixels_in_groups_of_an_image(grid):
    logits, labels = dense(grid=grid)
    tally = tally_of(logits, labels.flatten())
    assert (tally.units, tally.examples, tally.width) == (12, 12 * math.prod(grid), 4)
    images = torch.arange(12).repeat_interleave(math.prod(grid))
    expected = tally_of(flat(logits), labels.flatten(), groups=images)
    assert_same_sums(expected, tally)
    patients = torch.arange(12) // 3
    by_patient = tally_of(logits, labels.flatten(), groups=patients)
    expected = tally_of(flat(logits), labels.flatten(), groups=patients[images])
    assert by_patient.units == 4
    torch.testing.assert_close(by_patient.errors.products, expected.errors.products)


def test_dense_outputs_are_audited(tmp_path):
    logits, labels = dense()
    expected = ds.audit(logits, labels, task="classification", kind="logits")
    pixels = ds.audit(flat(logits), labels.flatten(), task="classification", kind="logits")
    assert expected.test["nll"].value == pytest.approx(pixels.test["nll"].value)
    assert expected.test["nll"].high - expected.test["nll"].low > 1.5 * (
        pixels.test["nll"].high - pixels.test["nll"].low
    )
    np.save(tmp_path / "dense.npy", logits.numpy())
    for outputs in (list(logits), logits.numpy(), np.load(tmp_path / "dense.npy", mmap_mode="r")):
        assert ds.audit(outputs, labels.numpy(), task="classification", kind="logits").test == expected.test


CLASSES = {"task": "classification", "kind": "logits"}


def test_classes_at_another_axis(tmp_path, unchecked):
    """All outputs of an audit, from anywhere, are read with the classes where `class_axis` says."""
    logits, labels = dense(grid=(7,))
    others = {"reference": logits.flip(0) + 0.1, "ood": logits[:, :6] / 2, "train": (logits, labels)}
    expected = ds.audit(logits, labels, in_bag="all", **others, **CLASSES)
    words = logits.movedim(2, -1)
    others = {"reference": words.flip(0) + 0.1, "ood": words[:, :6] / 2, "train": (words, labels)}
    stored = tmp_path / "words.npy"
    np.save(stored, words.numpy())
    for outputs in (words, words.numpy(), list(words), [*words.numpy()], np.load(stored, mmap_mode="r")):
        for axis in (-1, 3):
            result = ds.audit(outputs, labels, in_bag="all", class_axis=axis, **others, **CLASSES)
            assert (result.test, result.train, result.detection) == (
                expected.test,
                expected.train,
                expected.detection,
            )
    assert ds.audit(logits, labels, class_axis=2, **CLASSES).test == ds.audit(logits, labels, **CLASSES).test
    for axis in (0, 1, 4, -3, True):
        with pytest.raises(ValueError, match="`class_axis` must be"):
            ds.audit(words, labels, class_axis=axis, **CLASSES)
    with pytest.raises(ValueError, match="which has no axis of classes"):
        ds.audit([[0, 1], [0, 0]], [0, 1], class_axis=-1, task="classification", kind="labels")


def test_ignored_positions_do_not_count():
    """Also where all of an image is ignored: it is no unit of the bootstrap then."""
    logits, labels = dense()
    ignored = torch.rand(labels.shape, generator=torch.Generator().manual_seed(5)) < 0.3
    ignored[4] = True
    marked = labels.masked_fill(ignored, -100)
    rows, images = ~ignored.flatten(), torch.arange(12).repeat_interleave(30)
    noise = logits.masked_fill(ignored.unsqueeze(1), 9.0)  # whatever members say there
    result = ds.audit(noise, marked, ignore_index=-100, **CLASSES)
    expected = ds.audit(flat(logits)[:, rows], labels.flatten()[rows], groups=images[rows], **CLASSES)
    for name, figure in expected.test.items():
        assert result.test[name] == pytest.approx(figure, abs=1e-9), name
    assert result.facts["examples"] == int(rows.sum())
    assert result.judgement.confidence == expected.judgement.confidence


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_dense_outputs_of_a_file(tmp_path, kind):
    logits, labels = dense(grid=(7,))
    labels[:, 5:] = -100
    words = logits.movedim(2, -1).contiguous()
    file, report = tmp_path / f"words.{kind}", tmp_path / "audit.json"
    if kind == "npz":
        np.savez(file, outputs=words.numpy(), targets=labels.numpy())
    else:
        save_file({"outputs": words, "targets": labels}, file)
    command = ["audit", str(file), "--task", "classification", "--kind", "logits", "--json", str(report)]
    result = CliRunner().invoke(app, [*command, "--class-axis", "-1", "--ignore-index", "-100"])
    assert result.exit_code == 0, result.output
    expected = ds.audit(logits, labels, ignore_index=-100, **CLASSES)
    assert json.loads(report.read_text()) == json.loads(expected.to_json())
    refused = CliRunner().invoke(app, [*command, "--class-axis", "4", "--ignore-index", "-100"])
    assert refused.exit_code == 1
    assert "--class-axis must be an axis of `outputs`" in " ".join(refused.output.split())


def test_ignored_examples_of_outputs_that_are_not_dense():
    logits, labels = classifier()
    labels[::3] = 255
    expected = ds.audit(
        logits[:, labels != 255], labels[labels != 255], train=(logits[:, :90], labels[:90] % 3), **CLASSES
    )
    train = logits[:, :90], torch.where(labels[:90] == 255, 0, labels[:90])
    for targets in (labels, labels.numpy(), labels.tolist()):
        result = ds.audit(logits, targets, ignore_index=255, train=train, **CLASSES)
        assert result.test == expected.test
    in_train = ds.audit(logits, labels, ignore_index=255, train=(logits, labels), **CLASSES)
    assert in_train.train["nll"] == pytest.approx(in_train.test["nll"])
    with pytest.raises(ValueError, match="`targets` must hold a label that is not ignored; got 255 everywhere"):
        ds.audit(logits, torch.full((300,), 255), ignore_index=255, **CLASSES)
    with pytest.raises(ValueError, match="`ignore_index` must be left out for regression"):
        ds.audit(logits[..., 0], logits[0, :, 0], ignore_index=255, task="regression")
    with pytest.raises(ValueError, match=r"lie between 0 and 2; got 0 to 255"):
        ds.audit(logits, labels, **CLASSES)


def test_ignored_labels_beside_names_of_classes():
    logits, labels = classifier()
    numbered, labels = labels * 10, labels.clone()
    expected = ds.audit(logits[:, 30:], labels[30:], **CLASSES)
    numbered[:30] = -1
    result = ds.audit(logits, numbered, classes=[0, 10, 20], ignore_index=-1, **CLASSES)
    assert result.test == expected.test


def test_shifted_images_are_told_apart_as_images():
    """An area with an interval needs independent examples, and pixels of an image are not."""
    logits, labels = dense(images=30)
    shifted = dense(images=20, seed=1)[0] / 2
    result = ds.audit(logits, labels, ood=shifted, **CLASSES).detection
    for name, score in DETECTORS.items():
        inside, outside = (
            score(flat(part), "logits").view(part.shape[1], -1).mean(1).float() for part in (logits, shifted)
        )
        assert result[name] == pytest.approx(ds.metrics.auroc(inside, outside), abs=1e-6), name


@pytest.mark.parametrize("width", [1, 2])
def test_dense_regression(width):
    generator = torch.Generator().manual_seed(3)
    y = torch.randn(9, width, 4, 5, generator=generator, dtype=torch.float64)
    f = y + torch.randn(3, 9, width, 4, 5, generator=generator, dtype=torch.float64)
    audit = ds.audit(f, y, task="regression")
    error = (f.mean(0) - y).square().mean()
    assert audit.test["mse"].value == pytest.approx(float(error))
    assert audit.facts["examples"] == 9 * 20
    if width == 1:
        assert ds.audit(f, y[:, 0], task="regression").test == audit.test


@pytest.mark.parametrize("numbers", [45 * 3 * 7, 45 * 3 * 31, 45 * 3 * 100])
def test_large_images_are_read_in_parts(monkeypatch, numbers):
    logits, labels = dense()
    expected = tally_of(logits, labels.flatten())
    monkeypatch.setattr(streaming, "NUMBERS_AT_ONCE", numbers)
    sizes = [rows.stop - rows.start for rows, _ in streaming.OutputReader(logits).slices()]
    assert sum(sizes) == 12 * 30
    assert max(sizes) <= numbers // (45 * 3)
    in_parts = tally_of(logits, labels.flatten())
    assert_same_sums(expected, in_parts)


def test_targets_of_dense_outputs_have_their_shape(unchecked):
    logits, labels = dense()
    for targets in (labels[:, :-1], labels[:-1], labels.flatten(), labels[:, 0]):
        with pytest.raises(ValueError, match=r"`targets` must have shape \[12, 5, 6\], one for each pixel"):
            ds.audit(logits, targets, task="classification", kind="logits")
    one_hot = torch.nn.functional.one_hot(labels, 4).movedim(-1, 1)
    with pytest.raises(ValueError, match=r"Use targets.argmax\(1\)"):
        ds.audit(logits, one_hot, task="classification", kind="logits")
    logits[1, 4, 2, 3, 3] = math.nan
    with pytest.raises(ValueError, match="member 1, image 4"):
        ds.audit(logits, labels, task="classification", kind="logits")
    with pytest.raises(ValueError, match="numpy.concatenate.*, -3\\)"):
        ds.audit(logits[:, :, :1], labels, task="classification", kind="logits")


@pytest.mark.parametrize("pool", ["probability", "score"])
@pytest.mark.parametrize("members", [1, 2, 5, 8])
def test_codependence_of_few_members_is_exact(members, pool):
    logits, labels = classifier(members=members, examples=150)
    tally = tally_of(logits, labels, pool=pool)
    pooled = {"probability": ds.pooling.mean_probability, "score": ds.pooling.mean_score}[pool]
    pooled_loss = ds.losses.cross_entropy(pooled(logits), labels).mean()
    for i, drop in enumerate(examples.DROPS):
        subset_size = members - int(members * drop)
        subset_losses = [
            ds.losses.cross_entropy(pooled(logits[list(subset)]), labels).mean()
            for subset in itertools.combinations(range(members), subset_size)
        ]
        rise = tally.errors.rises[:, i].sum() / 150
        assert float(rise) == pytest.approx(float(sum(subset_losses) / len(subset_losses) - pooled_loss), abs=1e-12)


@pytest.mark.parametrize("pool", ["probability", "score"])
def test_codependence_of_many_members_is_drawn_by_example(monkeypatch, pool):
    logits, labels = classifier(members=12, examples=800)
    tally = tally_of(logits, labels, pool=pool)
    rises = tally.errors.rises.sum(0) / 800
    monkeypatch.setattr(examples, "_SUBSETS", 1000)  # C(12, 5) = 792: all of them
    exact = tally_of(logits, labels, pool=pool).errors.rises.sum(0) / 800
    torch.testing.assert_close(rises, exact, rtol=0.05, atol=0)
    assert (rises != exact).tolist() == [False, True, True]  # C(12, 10) = 66 are visited, the others drawn
    monkeypatch.undo()
    monkeypatch.setattr(streaming, "NUMBERS_AT_ONCE", 45 * 12 * 33)
    in_slices = tally_of(logits, labels, pool=pool).errors.rises.sum(0) / 800
    torch.testing.assert_close(in_slices, rises)  # draws do not depend on how outputs are read


def test_codependence_survives_members_that_rule_the_label_out():
    logits, labels = classifier(members=3, examples=20)
    logits[:2] += 5000.0 * (1 - torch.nn.functional.one_hot(labels, 3))
    tally = tally_of(logits, labels)
    expected = (
        sum(
            ds.losses.cross_entropy(ds.pooling.mean_probability(logits[list(pair)]), labels).mean()
            for pair in itertools.combinations(range(3), 2)
        )
        / 3
        - ds.losses.cross_entropy(ds.pooling.mean_probability(logits), labels).mean()
    )
    assert float(tally.errors.rises[:, 1].sum() / 20) == pytest.approx(float(expected))


def deviation(averaged):
    return (averaged - averaged.mean(0)).sum(1)


def test_offsets_are_those_of_probabilities():
    logits, labels = classifier()
    by_score = tally_of(logits, labels, pool="score").offsets
    torch.testing.assert_close(by_score.offset.sum(0), deviation(logits.softmax(-1)))
    torch.testing.assert_close(
        by_score.deviation.sum(0), deviation(logits - logits.mean(-1, keepdim=True)), atol=1e-9, rtol=1e-9
    )
    by_probability = tally_of(logits, labels).offsets
    assert by_probability.offset is by_probability.deviation
    torch.testing.assert_close(by_probability.offset, by_score.offset)
    votes = torch.nn.functional.one_hot(logits.argmax(-1), 3).double()
    by_vote = tally_of(logits, labels, pool="vote", loss="zero_one").offsets
    assert by_vote.offset is by_vote.deviation
    torch.testing.assert_close(by_vote.offset.sum(0), deviation(votes))
    values = tally_of(logits, logits.mean(0), **VALUES).offsets
    assert values.offset is values.deviation


def test_votes_are_known_as_hard():
    logits, labels = classifier()
    votes = torch.nn.functional.one_hot(logits.argmax(-1), 3).double()
    probabilities = {"kind": "probabilities"}
    assert tally_of(votes, labels, **probabilities).hard
    assert tally_of(votes.half(), labels, **probabilities).hard
    assert not tally_of(votes.lerp(torch.full_like(votes, 1 / 3), 1e-4), labels, **probabilities).hard
    assert not tally_of(logits, labels).hard
    assert tally_of(1e6 * votes, labels).hard
    late = votes.clone()
    late[-1, -1] = torch.tensor([0.5, 0.5, 0.0])
    assert not tally_of(late, labels, **probabilities).hard
    assert not tally_of(votes, votes.mean(0), **VALUES).hard


SETTINGS = [
    {"kind": "logits", "loss": "cross_entropy", "pool": "probability"},
    {"kind": "logits", "loss": "brier", "pool": "score"},
    {"kind": "logits", "loss": "zero_one", "pool": "vote"},
    {"kind": "probabilities", "loss": "cross_entropy", "pool": "score"},
    {"kind": "values", "loss": "mse", "pool": "score"},
]


def outputs_and_targets(kind, members=4, examples=300):
    logits, labels = classifier(members, examples)
    outputs = logits.softmax(-1) if kind == "probabilities" else logits
    return outputs, outputs.mean(0) * 1.1 if kind == "values" else labels


def scores_of(settings):
    """What an audit keeps of every example with these settings."""
    return {} if settings["kind"] == "values" else DETECTORS


@pytest.mark.slow(cases=["1-logits-*"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s['kind']}-{s['pool']}")
@pytest.mark.parametrize("numbers", [1, 45 * 4 * 7, 45 * 4 * 299])
def test_slices_of_any_size_give_equal_sums(monkeypatch, settings, numbers):
    outputs, targets = outputs_and_targets(settings["kind"])
    expected = tally_of(outputs, targets, scores=scores_of(settings), **settings)
    monkeypatch.setattr(streaming, "NUMBERS_AT_ONCE", numbers)
    assert_same_sums(expected, tally_of(outputs, targets, scores=scores_of(settings), **settings))


@pytest.fixture
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s['kind']}-{s['pool']}")
def test_threads_change_nothing(monkeypatch, two_threads, settings):
    outputs, targets = outputs_and_targets(settings["kind"], examples=200)
    monkeypatch.setattr(streaming, "NUMBERS_AT_ONCE", 45 * 4 * 23)
    expected = tally_of(outputs, targets, **settings)
    monkeypatch.setattr(tallying, "_ALONE_UP_TO", 0)
    threaded = tally_of(outputs, targets, **settings)
    for name, values in named_sums(expected).items():
        assert torch.equal(named_sums(threaded)[name], values), f"{name} depends on which thread is first"
    assert torch.get_num_threads() == 2, "torch has its threads back"


def test_an_error_in_a_thread_is_raised(monkeypatch, two_threads):
    monkeypatch.setattr(streaming, "NUMBERS_AT_ONCE", 45 * 4 * 23)
    monkeypatch.setattr(tallying, "_ALONE_UP_TO", 0)
    logits, labels = classifier()
    for row in (290, 117):
        logits[2, row, 1] = math.inf
    with pytest.raises(ValueError, match="member 2, example 117"):
        tally_of(logits, labels)
    assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="`outputs` must be logits"):
        tally_of(classifier()[0].softmax(-1), labels)


@pytest.mark.parametrize("settings", SETTINGS[:4], ids=lambda s: f"{s['kind']}-{s['pool']}")
@pytest.mark.parametrize("groups", [None, torch.arange(2000) % 3])
def test_single_precision_agrees(monkeypatch, settings, groups):
    outputs, targets = outputs_and_targets(settings["kind"], examples=2000)
    outputs = outputs.float()
    exact = tally_of(outputs.double(), targets, groups=groups, **settings)
    monkeypatch.setattr(streaming, "_EXACT_UP_TO", 10)
    monkeypatch.setattr(streaming, "NUMBERS_AT_ONCE", 45 * 4 * 301)
    monkeypatch.setattr(summing, "_SINGLE_PRECISION_ROWS", 3)  # many sums are carried over
    assert_same_sums(exact, tally_of(outputs, targets, groups=groups, **settings), atol=1e-4, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s['kind']}-{s['pool']}")
def test_a_gpu_gives_the_same_sums(monkeypatch, settings, single):
    outputs, targets = outputs_and_targets(settings["kind"], members=12, examples=2000)
    monkeypatch.setattr(tallying, "_GPU_AT_ONCE", 45 * 12 * 301)
    if single:
        monkeypatch.setattr(streaming, "_EXACT_UP_TO", 10)
    host, card = (
        tally_of(outputs, targets, scores=scores_of(settings), device=name, **settings) for name in ("cpu", "cuda")
    )
    assert all(values.device.type == "cpu" for values in named_sums(card).values())
    tolerance = {"atol": 1e-4, "rtol": 1e-5} if single else {"atol": 1e-9, "rtol": 1e-9}
    assert_same_sums(host, card, **tolerance)


def test_a_gpu_is_for_many_numbers(monkeypatch):
    small, large = (streaming.OutputReader(np.broadcast_to(np.float16(0), (50, n, 1000))) for n in (100, 100_000))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [tallying._device(reader).type for reader in (small, large)] == ["cpu", "cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tallying._device(large).type == "cpu"


@pytest.mark.slow(cases=["False"])
@pytest.mark.parametrize("stacked", [True, False])
def test_memory_maps_of_half_precision_are_read_in_slices(tmp_path, monkeypatch, stacked):
    logits, labels = classifier(members=3, examples=20_000, classes=10)
    half_precision = logits.half().numpy()
    np.save(tmp_path / "o.npy", half_precision)
    mapped = np.load(tmp_path / "o.npy", mmap_mode="r")
    outputs = mapped if stacked else list(mapped)
    monkeypatch.setattr(streaming, "NUMBERS_AT_ONCE", 45 * 3 * 500)
    sizes = {(part.dtype, len(part)) for _, part in streaming.OutputReader(outputs).parts()}
    assert sizes == {(torch.float16, 500)}, "stored numbers are not converted before they are needed"
    tracemalloc.start()
    tally = tally_of(outputs, labels)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < half_precision.nbytes / 2
    expected = tally_of(half_precision.astype(np.float64), labels)
    torch.testing.assert_close(tally.sums.classes.member_nll, expected.sums.classes.member_nll)


def test_outputs_are_left_as_they_are():
    for settings in SETTINGS:
        outputs, targets = outputs_and_targets(settings["kind"])
        before = outputs.clone()
        tally_of(outputs, targets, scores=scores_of(settings), **settings)
        assert torch.equal(outputs, before)


def test_ties_of_votes_go_to_the_first_class():
    """Two of six members for each of three classes: sums of votes are equal, whatever member comes first."""
    votes = torch.nn.functional.one_hot(torch.tensor([2, 1, 0, 2, 1, 0]), 3).double().unsqueeze(1).expand(-1, 20, -1)
    tally = tally_of(votes, torch.zeros(20, dtype=torch.long), kind="probabilities")
    assert tally.sums.classes.right.sum() == 20
