"""Products over all members at once, and a matrix of weights cut in two: gradients as autograd finds them."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from dissensus.execution import batched
from dissensus.execution.batched import stacked_linear
from dissensus.execution.weights import _Cut


@pytest.fixture(autouse=True, params=["small", "large"])
def layers(request, monkeypatch):
    """Every test of both ways, by calling all layers small, or all large."""
    monkeypatch.setattr(batched, "LARGE", 0 if request.param == "large" else 2**30)
    return request.param


def tensors(members, *shape, bias=True):
    generator = torch.Generator().manual_seed(members)
    shapes = [(members, *shape, 5), (members, 3, 5), (members, 3)][: 3 if bias else 2]
    result = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    return result if bias else [*result, None]


def linear_by_einsum(x, weight, bias):
    y = torch.einsum("m...i,moi->m...o", x, weight)
    return y if bias is None else y + bias.view(len(bias), *[1] * (x.ndim - 2), -1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (0,)])
def test_products_and_their_gradients_are_those_of_every_member(shape, bias):
    arguments = tensors(2, *shape, bias=bias)
    inputs = [t for t in arguments if t is not None]
    y, expected = stacked_linear(*arguments), linear_by_einsum(*arguments)
    torch.testing.assert_close(y, expected)
    aim = torch.randn_like(y)
    actual_gradients, expected_gradients = (torch.autograd.grad((out * aim).sum(), inputs) for out in (y, expected))
    for actual_gradient, expected_gradient in zip(actual_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual_gradient, expected_gradient)


def test_products_have_derivatives_of_second_order():
    arguments = tensors(2, 3)
    assert gradcheck(stacked_linear, arguments)
    assert gradgradcheck(stacked_linear, arguments)


def test_the_gradient_of_a_large_weight_lies_as_the_weight_does(layers):
    x, weight, bias = tensors(3, 4)
    (gradient,) = torch.autograd.grad(stacked_linear(x, weight, bias).square().sum(), weight)
    assert gradient.is_contiguous() == (layers == "large")


def test_members_may_share_an_input_and_need_no_gradient_of_it():
    _, weight, bias = tensors(3, 4)
    x = torch.randn(4, 5, dtype=torch.float64).expand(3, 4, 5)
    y = stacked_linear(x, weight, bias)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), bias)[0], torch.full_like(bias, 4.0))


def test_products_follow_autocast():
    x, weight, bias = (t.detach().float().requires_grad_() for t in tensors(2, 4))
    with torch.autocast("cpu", torch.bfloat16):
        y = stacked_linear(x, weight, bias)
    assert y.dtype == torch.bfloat16
    grads = torch.autograd.grad(y.float().square().sum(), (x, weight, bias))
    exact = torch.autograd.grad(linear_by_einsum(x, weight, bias).square().sum(), (x, weight, bias))
    for actual, expected in zip(grads, exact, strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.2)


def test_products_can_be_mapped():
    x, weight, bias = tensors(2, 4)
    inputs = torch.randn(3, *x.shape, dtype=torch.float64)
    gradients = torch.func.vmap(torch.func.grad(lambda x_i: stacked_linear(x_i, weight, bias).square().sum()))(inputs)
    for x_i, actual in zip(inputs, gradients, strict=True):
        x_i = x_i.requires_grad_()
        torch.testing.assert_close(
            actual, torch.autograd.grad(linear_by_einsum(x_i, weight, bias).square().sum(), x_i)[0]
        )


def test_a_matrix_cut_in_two_gets_one_gradient():
    flat = torch.randn(3, 7, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda matrix: _Cut.apply(matrix, 4, torch.float64), [flat])
    assert gradgradcheck(lambda matrix: tuple(t.square() for t in _Cut.apply(matrix, 4, torch.float64)), [flat])
    products, remainder = _Cut.apply(flat.detach().float().requires_grad_(), 4, torch.bfloat16)
    assert (products.dtype, remainder.dtype) == (torch.bfloat16, torch.float32)


def test_unused_parts_of_a_cut_matrix_have_no_gradient():
    flat = torch.randn(3, 7).requires_grad_()
    products, _ = _Cut.apply(flat, 4, torch.bfloat16)
    (gradient,) = torch.autograd.grad(products.float().sum(), flat)
    torch.testing.assert_close(gradient, torch.cat([torch.ones(3, 4), torch.zeros(3, 3)], 1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in its forward mode
def test_products_have_derivatives_in_forward_mode():
    arguments = tensors(2, 3)
    assert gradcheck(stacked_linear, arguments, check_forward_ad=True)
    flat = torch.randn(3, 7, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda matrix: _Cut.apply(matrix, 4, torch.float64), [flat], check_forward_ad=True)


def test_autocast_leaves_doubles_alone():
    x, weight, bias = tensors(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = stacked_linear(x, weight, bias)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, linear_by_einsum(x, weight, bias))


def test_complex_weights_have_the_gradient_that_autograd_finds():
    x, weight, bias = (t.detach().to(torch.complex128) * (1 + 2j) for t in tensors(2, 4))
    actual, expected = (
        torch.autograd.grad(f(x, w, bias).abs().sum(), w)[0]
        for f, w in (
            (stacked_linear, weight.clone().requires_grad_()),
            (linear_by_einsum, weight.clone().requires_grad_()),
        )
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("of_x", "of_weight"), [(True, False), (False, True)])
def test_tensors_that_no_gradient_needs_are_not_saved(of_x, of_weight):
    x, weight, bias = tensors(3, 4)
    x, weight = x.detach().requires_grad_(of_x), weight.detach().requires_grad_(of_weight)
    pointers = []

    def keep(tensor):
        pointers.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stacked_linear(x, weight, bias.detach())
    assert (x.data_ptr() in pointers) == of_weight
    assert (weight.data_ptr() in pointers) == of_x
