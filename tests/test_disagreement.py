"""Objectives that make members disagree, and scores that read disagreement, against the LDR paper's formulas."""

import itertools
import math

import pytest
import torch

import dissensus as ds
from dissensus.objectives import a2d, divdis, hardness, ldr, pair_agreement

M, B, C = 4, 6, 5


def logits(members=M, batch=B, classes=C, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    outputs = scale * torch.randn(members, batch, classes, generator=generator, dtype=torch.float64)
    return outputs, torch.randint(classes, (batch,), generator=generator)


def agreement_by_loops(probs):
    """Equation 3 in both directions, over pairs m < l, written out."""
    members, batch, _ = probs.shape
    agreement = torch.zeros(batch, dtype=probs.dtype)
    for n in range(batch):
        for m, k in itertools.combinations(range(members), 2):
            for y in (int(probs[m, n].argmax()), int(probs[k, n].argmax())):
                p, q = probs[m, n, y], probs[k, n, y]
                agreement[n] += -torch.log(p * (1 - q) + q * (1 - p)) / 2
    return agreement


@pytest.mark.parametrize(("members", "classes"), [(2, 2), (3, 5), (6, 3)])
def test_agreement_of_all_pairs_is_equation_3_in_both_directions(members, classes):
    f, _ = logits(members, classes=classes, seed=members)
    torch.testing.assert_close(pair_agreement(f), agreement_by_loops(f.softmax(-1)))


def test_gradients_of_agreement_are_those_of_the_formula():
    f, _ = logits()
    f.requires_grad_()
    (actual,) = torch.autograd.grad(pair_agreement(f).sum(), f)
    (expected,) = torch.autograd.grad(agreement_by_loops(f.softmax(-1)).sum(), f)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("classes", ["both", "earlier"])
def test_agreement_has_derivatives_of_second_order(classes):
    f, _ = logits(3, 2, 4)
    assert torch.autograd.gradgradcheck(lambda leaf: pair_agreement(leaf, classes), [f.requires_grad_()])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in its forward mode
def test_agreement_has_derivatives_in_forward_mode():
    f, _ = logits(3, 2, 4)
    assert torch.autograd.gradcheck(pair_agreement, [f.requires_grad_()], check_forward_ad=True)


def test_agreement_does_not_depend_on_the_order_of_members():
    f, _ = logits()
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(pair_agreement(f[order]), pair_agreement(f))


def test_equal_and_sure_members_are_pushed_apart():
    f = torch.zeros(2, 1, 3, dtype=torch.float64)
    f[:, :, 0] = 20.0
    f.requires_grad_()
    (grad,) = torch.autograd.grad(pair_agreement(f).sum(), f)
    assert (grad[:, 0, 0] > 0).all(), "going down lowers the common class"
    assert (grad[:, 0, 1:] < 0).all()


def test_weights_are_equation_4():
    f, y = logits()
    loss = torch.nn.functional.cross_entropy(f.mean(0), y, reduction="none")
    torch.testing.assert_close(hardness(f, y), loss / loss.mean() ** 2)
    torch.testing.assert_close(hardness(f, y).mean(), 1 / loss.mean())  # equation 5
    label_probs = f.mean(0).softmax(-1)[torch.arange(B), y]
    torch.testing.assert_close(hardness(f, y, "inverse"), 1 / label_probs / loss.mean() ** 2)
    sure = 50 * torch.nn.functional.one_hot(y, C).double().expand(M, -1, -1)
    assert hardness(sure, y).isfinite().all()


def test_parts_of_ldr_are_means_over_pairs_and_examples():
    f, y = logits()
    probs = f.softmax(-1)
    parts = ldr(f, y, strength=1.7).parts
    pairs = M * (M - 1) / 2
    torch.testing.assert_close(parts["individual"], -probs[:, torch.arange(B), y].log().mean())
    torch.testing.assert_close(parts["agreement"], agreement_by_loops(probs).mean() / pairs)
    weighted = (hardness(f, y) * agreement_by_loops(probs)).mean() / pairs
    torch.testing.assert_close(parts["weighted_agreement"], weighted)


def test_two_members_are_equation_17_and_its_gradients():
    """Appendix A.14: partial derivatives by the probabilities, equations 18 to 20."""
    f = torch.tensor([[[0.5, 0.3, 0.2]], [[0.1, 0.6, 0.3]]], dtype=torch.float64)
    y = torch.tensor([2])
    alpha = float(hardness(f.log(), y))
    probs = f.clone().requires_grad_()
    p, q = probs[0, 0], probs[1, 0]
    loss = (
        -p[2].log()
        - q[2].log()
        - alpha * (p[0] * (1 - q[0]) + q[0] * (1 - p[0])).log()
        - alpha * (q[1] * (1 - p[1]) + p[1] * (1 - q[1])).log()
    )
    torch.testing.assert_close(ldr(f.log(), y, strength=2.0).total, loss.detach())
    (grad,) = torch.autograd.grad(loss, probs)
    assert float(grad[0, 0, 2]) == pytest.approx(-1 / 0.2)
    assert float(grad[0, 0, 0]) == pytest.approx(alpha * (2 * 0.1 - 1) / (0.5 + 0.1 - 2 * 0.5 * 0.1))
    assert float(grad[0, 0, 1]) == pytest.approx(alpha * (2 * 0.6 - 1) / (0.3 + 0.6 - 2 * 0.3 * 0.6))
    leaf = f.log().requires_grad_()
    (actual,) = torch.autograd.grad(ldr(leaf, y, strength=2.0).total, leaf)
    centred = f * (grad - (f * grad).sum(-1, keepdim=True))  # by the chain rule of softmax
    torch.testing.assert_close(actual, centred)


def test_no_gradient_goes_through_the_weights():
    f, y = logits(members=2, batch=1)
    f.requires_grad_()
    (actual,) = torch.autograd.grad(ldr(f, y, strength=1.0).total, f)
    alpha = hardness(f, y)
    fixed = (
        torch.nn.functional.cross_entropy(f.flatten(0, 1), y.repeat(2), reduction="sum")
        + (alpha.detach() * pair_agreement(f)).mean()
    )
    (expected,) = torch.autograd.grad(fixed, f)
    torch.testing.assert_close(actual, expected)


def test_any_disagreement_term():
    f, y = logits()

    def closeness(log_probs):
        probs = log_probs.exp()
        return torch.stack([(probs[i] * probs[j]).sum(-1) for i, j in itertools.combinations(range(M), 2)]).sum(0)

    parts = ldr(f, y, strength=0.5, disagreement=closeness)
    independent_total = ds.objectives.independent(f, y, loss="cross_entropy").total
    torch.testing.assert_close(
        parts.total, independent_total + 0.5 / (M - 1) * (hardness(f, y) * closeness(f.log_softmax(-1))).mean()
    )
    with pytest.raises(ValueError, match="one number per example"):
        ldr(f, y, strength=0.5, disagreement=lambda log_probs: log_probs.sum())


def test_parts_of_divdis_are_its_terms():
    f, y = logits()
    unlabelled, _ = logits(batch=9, seed=5)
    parts = divdis(f, y, unlabelled=unlabelled, strength=0.6, balance=3.0)
    terms = 0.6 * parts.parts["information"] + 3.0 * parts.parts["drift"]
    torch.testing.assert_close(parts.total, parts.parts["member_loss"].sum() + M * terms)
    assert float(divdis(f, y, unlabelled=unlabelled, balance=0.0).parts["drift"]) > 0


def test_members_that_say_the_same_share_all_information():
    y = torch.tensor([0, 1])
    sure = 100 * torch.eye(2, dtype=torch.float64).expand(3, 2, 2)
    assert float(divdis(sure, y, unlabelled=sure, balance=0.0).parts["information"]) == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, y: ldr(f[:1], y, strength=1.0), "two members"),
        (lambda f, y: a2d(f, y, unlabelled=f[:1]), "two members"),
        (lambda f, y: divdis(f, y, unlabelled=f[:1]), "two members"),
        (lambda f, y: ldr(f[..., :1], y * 0, strength=1.0), "two classes"),
        (lambda f, y: ldr(f, y, strength=1.0, weight="los"), "weight"),
        (lambda f, y: ldr(f, y, strength=1.0, disagreement="a2e"), "Did you mean 'a2d'"),
    ],
)
def test_invalid_arguments_are_refused(call, message, unchecked):
    with pytest.raises(ValueError, match=message):
        call(*logits())


def test_sweeps_over_the_strength_equal_single_runs():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 4, generator=generator, dtype=torch.float64), torch.randint(3, (40,), generator=generator)
    build = lambda: ds.nets.mlp(4, 3, (8,))  # noqa: E731
    options = {"epochs": 3, "batch_size": 16, "lr": 0.02, "members": 3}
    swept = ds.sweep(build, (x, y), ldr, grid={"strength": [0.0, 2.0]}, **options)
    for i, strength in enumerate((0.0, 2.0)):
        single = ds.sweep(build, (x, y), ldr, grid={"strength": [strength]}, **options)
        torch.testing.assert_close(swept.run(i).predict(x), single.run(0).predict(x), rtol=1e-8, atol=1e-10)
