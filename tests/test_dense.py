"""Weights of examples and classes, label smoothing and dense outputs, against torch's cross-entropy."""

import math

import pytest
import torch
from torch.nn import functional as F

import dissensus as ds
from dissensus import dense, losses

M, B, C, S = 3, 4, 5, (2, 3)
GENERATOR = torch.Generator().manual_seed(0)
OUTPUTS = 2 * torch.randn(M, B, C, *S, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.randint(0, C, (B, *S), generator=GENERATOR)
IGNORED = LABELS.masked_fill(torch.rand(B, *S, generator=GENERATOR) < 0.3, -100)
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.2, 3.0], dtype=torch.float64)
VALUES = torch.randn(B, C, *S, generator=GENERATOR, dtype=torch.float64)


# Against torch


@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("class_weights", [None, CLASS_WEIGHTS], ids=["equal", "weighted"])
@pytest.mark.parametrize("targets", [LABELS, IGNORED], ids=["all", "some ignored"])
def test_independent_training_is_torchs_cross_entropy(smoothing, class_weights, targets):
    """Values and gradients of every member, with class weights, label smoothing and ignored labels together."""
    outputs = OUTPUTS.clone().requires_grad_()
    flat = dense.positions(outputs, targets, ignore_index=-100)
    labels, weights = losses.weighted_targets(
        flat.targets,
        C,
        loss="cross_entropy",
        class_weights=class_weights,
        label_smoothing=smoothing,
        example_weights=flat.example_weights,
        dtype=torch.float64,
    )
    result = ds.objectives.independent(flat.outputs, labels, loss="cross_entropy", example_weights=weights)
    expected = torch.stack(
        [F.cross_entropy(member, targets, weight=class_weights, label_smoothing=smoothing) for member in outputs]
    )
    torch.testing.assert_close(result.parts["member_loss"], expected)
    torch.testing.assert_close(result.total, expected.sum())
    ours, torchs = (torch.autograd.grad(total, outputs)[0] for total in (result.total, expected.sum()))
    torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_soft_labels_with_class_weights_are_torchs(smoothing):
    soft = torch.rand(7, C, generator=GENERATOR, dtype=torch.float64).softmax(-1)
    logits = OUTPUTS[0, :, :, 0].movedim(1, -1).flatten(0, 1)[:7]
    labels, weights = losses.weighted_targets(
        soft, C, loss="cross_entropy", class_weights=CLASS_WEIGHTS, label_smoothing=smoothing
    )
    assert weights is None
    expected = F.cross_entropy(logits, soft, weight=CLASS_WEIGHTS, label_smoothing=smoothing)
    torch.testing.assert_close(losses.batch_mean(losses.cross_entropy(logits, labels)), expected)


def test_other_losses_count_an_example_by_the_weight_of_its_class():
    labels = torch.tensor([0, 4, 1])
    targets, weights = losses.weighted_targets(
        labels, C, loss="brier", class_weights=CLASS_WEIGHTS, label_smoothing=0.2, dtype=torch.float64
    )
    torch.testing.assert_close(targets, 0.8 * F.one_hot(labels, C) + 0.2 / C, check_dtype=False)
    torch.testing.assert_close(weights, torch.tensor([0.5, 3.0, 2.0], dtype=torch.float64))
    _, weights = losses.weighted_targets(targets, C, loss="brier", class_weights=CLASS_WEIGHTS)
    torch.testing.assert_close(weights, targets @ CLASS_WEIGHTS)


def test_class_weights_multiply_weights_of_examples_and_members():
    labels = torch.tensor([0, 4, 1])
    for given in (torch.tensor([1.0, 2.0, 0.0]), torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]])):
        targets, weights = losses.weighted_targets(
            labels, C, loss="cross_entropy", class_weights=CLASS_WEIGHTS.float(), example_weights=given
        )
        assert targets is labels, "hard labels stay hard"
        torch.testing.assert_close(weights, given * torch.tensor([0.5, 3.0, 2.0]))
    assert losses.weighted_targets(labels, C, loss="cross_entropy") == (labels, None)


def test_settings_of_classes_run_under_vmap():
    """Runs of a sweep differ in their labels, weights and smoothing."""
    labels = torch.tensor([[0, 4, 1], [2, 2, 3]])
    weights = torch.stack([CLASS_WEIGHTS, CLASS_WEIGHTS.flip(0)])
    smoothing = torch.tensor([0.1, 0.4], dtype=torch.float64)

    def settings(labels, class_weights, label_smoothing):
        return losses.weighted_targets(
            labels,
            C,
            loss="cross_entropy",
            class_weights=class_weights,
            label_smoothing=label_smoothing,
            dtype=torch.float64,
        )

    mapped = torch.func.vmap(settings)(labels, weights, smoothing)
    for run in range(2):
        expected = settings(labels[run], weights[run], float(smoothing[run]))
        torch.testing.assert_close((mapped[0][run], mapped[1][run]), expected)


def test_a_class_of_weight_zero_is_absent():
    weights = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
    targets, example_weights = losses.weighted_targets(
        torch.tensor([0, 1]), C, loss="cross_entropy", class_weights=weights, label_smoothing=0.1
    )
    assert targets.isfinite().all()
    assert example_weights.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"class_weights": torch.ones(3)}, r"`class_weights` must have shape \[C=5\]; got \[3\]"),
        ({"class_weights": torch.ones(5, 1)}, r"`class_weights` must have shape \[C=5\]; got \[5, 1\]"),
        ({"class_weights": -torch.ones(5)}, "`class_weights` must be finite numbers of at least 0"),
        ({"class_weights": torch.ones(5).long()}, r"Use class_weights.float\(\)"),
        ({"label_smoothing": 1.5}, "`label_smoothing` must be a number of at least 0 and at most 1; got 1.5"),
    ],
)
def test_settings_of_classes_that_make_no_sense_are_refused(arguments, message, unchecked):
    with pytest.raises((ValueError, TypeError), match=message):
        losses.weighted_targets(torch.tensor([0, 1]), C, loss="cross_entropy", **arguments)


def test_the_mean_over_a_batch():
    values = torch.tensor([[1.0, 4.0], [0.0, 8.0]])
    assert losses.batch_mean(values).tolist() == [2.5, 4.0]
    assert losses.batch_mean(values, torch.tensor([3.0, 1.0])).tolist() == [1.75, 2.0]
    assert losses.batch_mean(values, torch.tensor([[3.0, 1.0], [0.0, 0.0]])).tolist() == [1.75, 0.0]
    assert losses.batch_mean(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 1.0])).isnan()
    mapped = torch.func.vmap(losses.batch_mean)(values, torch.eye(2))
    assert mapped.tolist() == [1.0, 8.0]


# Positions


def test_positions_are_examples_in_order():
    flat = dense.positions(OUTPUTS, LABELS)
    assert flat.outputs.shape == (M, B * 6, C)
    assert flat.example_weights is None
    assert torch.equal(flat.outputs[1, 6 + 4], OUTPUTS[1, 1, :, 1, 1])
    assert flat.targets[6 + 4] == LABELS[1, 1, 1]
    values = dense.positions(OUTPUTS, VALUES)
    assert torch.equal(values.targets[6 + 4], VALUES[1, :, 1, 1])
    assert torch.equal(dense.unflat(flat.targets, OUTPUTS), LABELS)
    words = dense.positions(OUTPUTS.movedim(2, -1), LABELS, class_axis=-1)
    assert torch.equal(words.outputs, flat.outputs)
    assert torch.equal(words.targets, flat.targets)


def test_outputs_without_positions_are_returned_as_they_are():
    outputs, labels = OUTPUTS[..., 0, 0], LABELS[:, 0, 0]
    flat = dense.positions(outputs, labels)
    assert flat.outputs is outputs
    assert flat.targets is labels
    ignored = dense.positions(outputs, labels, ignore_index=int(labels[0]))
    assert ignored.example_weights.tolist() == (labels != labels[0]).double().tolist()


@pytest.mark.parametrize("shape", [(B,), (B, *S), (M, B), (M, B, *S)])
def test_weights_are_spread_over_positions(shape):
    weights = torch.rand(shape, generator=GENERATOR, dtype=torch.float64)
    flat = dense.positions(OUTPUTS, IGNORED, ignore_index=-100, example_weights=weights)
    per_member = shape[0] == M
    assert flat.example_weights.shape == ((M, 24) if per_member else (24,))
    whole = weights if weights.ndim > 2 else weights.reshape(*shape, 1, 1)
    expected = whole.expand(*shape[:1] if not per_member else shape[:2], *S) * (IGNORED != -100)
    torch.testing.assert_close(dense.unflat(flat.example_weights, OUTPUTS), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets": LABELS[:, 0]}, r"`targets` must have shape \[4, 2, 3\] for outputs .* axis 2; got \[4, 3\]"),
        ({"outputs": OUTPUTS.movedim(2, -1)}, "Classes last, as in language models"),
        ({"class_axis": 1}, "`class_axis` must be an axis of outputs"),
        ({"class_axis": 5}, "`class_axis` must be an axis of outputs"),
        ({"targets": VALUES, "ignore_index": -100}, "`targets` must be class labels for `ignore_index`"),
        ({"example_weights": torch.ones(7)}, r"`example_weights` must have shape \[B=4\], \[4, 2, 3\] or"),
        (
            {"outputs": torch.zeros(4, 4, 2, 4), "targets": torch.zeros(4, 4), "example_weights": torch.ones(4, 4)},
            "say whether they are of positions or of members",
        ),
    ],
)
def test_positions_that_do_not_fit_are_refused(arguments, message, unchecked):
    with pytest.raises((ValueError, TypeError), match=message):
        dense.positions(**{"outputs": OUTPUTS, "targets": LABELS, **arguments})


def test_positions_run_under_vmap():
    outputs = torch.stack([OUTPUTS, -OUTPUTS])

    def total(outputs, targets):
        flat = dense.positions(outputs, targets, ignore_index=-100)
        return ds.objectives.independent(
            flat.outputs, flat.targets, loss="cross_entropy", example_weights=flat.example_weights
        ).total

    targets = torch.stack([IGNORED, torch.full_like(IGNORED, -100)])
    mapped = torch.func.vmap(total)(outputs, targets)
    torch.testing.assert_close(mapped, torch.stack([total(*pair) for pair in zip(outputs, targets, strict=True)]))
    assert mapped[1] == 0
