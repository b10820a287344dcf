"""LDR's statistics in one pass over logits are those of the operations that they replace, and so are gradients."""

import functools
import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import dissensus as ds
from dissensus.objectives import disagreement, pair_pass


def case(members=4, batch=6, classes=5, scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(members, batch, classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (batch,), generator=generator)
    return logits.to(dtype).requires_grad_(), labels


def composed(logits, labels):
    log_probs = logits.log_softmax(-1)
    predicted = log_probs.argmax(-1)
    log_p, log_rest = disagreement._AtPredictedClasses.apply(log_probs, predicted)
    return log_probs.gather(2, labels.expand(len(logits), -1).unsqueeze(2)).squeeze(2), log_p, log_rest, predicted


def with_gradient(function, logits, labels):
    """The results of a function, and the gradient of a sum of them with random weights."""
    results = function(logits, labels)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in results[:3]]
    total = sum((weight * result).sum() for weight, result in zip(weights, results, strict=False))
    return [*results, *torch.autograd.grad(total, logits)]


@pytest.mark.parametrize(("members", "batch", "classes"), [(2, 1, 2), (4, 6, 5), (3, 2, 17)])
def test_one_pass_gives_what_several_give(members, batch, classes):
    logits, labels = case(members, batch, classes)
    ours = with_gradient(pair_pass.pair_statistics, logits, labels)
    for mine, theirs in zip(ours, with_gradient(composed, logits, labels), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("weight", ["loss", "inverse"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_objective_is_the_same_either_way(scale, weight, weighted, monkeypatch):
    logits, labels = case(scale=scale)
    weights = torch.arange(6, dtype=torch.float64) if weighted else None
    results = []
    for fused in (False, True):
        monkeypatch.setattr(pair_pass, "takes", lambda logits, fused=fused: fused)
        parts = ds.objectives.ldr(logits, labels, strength=0.7, weight=weight, example_weights=weights)
        results.append([parts.total, *parts.parts.values(), *torch.autograd.grad(parts.total, logits)])
        assert all(bool(torch.isfinite(tensor).all()) for tensor in results[-1])
    for separate, fused in zip(*results, strict=True):
        largest = float(separate.detach().abs().max())
        torch.testing.assert_close(fused, separate, rtol=1e-9, atol=1e-9 * (1 + largest))


def test_what_is_checked_is_checked_either_way(monkeypatch):
    monkeypatch.setattr(pair_pass, "takes", lambda logits: True)
    logits, labels = case()
    with pytest.raises(ValueError, match="labels|targets"):
        ds.objectives.ldr(logits, labels[:3], strength=1.0)
    with pytest.raises(ValueError, match="two members"):
        ds.objectives.ldr(logits[:1], labels, strength=1.0)


def test_logits_on_a_cpu_are_not_fused():
    assert not pair_pass.takes(case(dtype=torch.float32)[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_member_of_nan_does_not_end_the_process_on_a_gpu():
    logits, labels = (tensor.detach().cuda() for tensor in case(dtype=torch.float32))
    logits[1] = float("nan")
    statistics = pair_pass.pair_statistics(logits, labels)
    assert statistics.at_label[[0, 2, 3]].isfinite().all()
    assert statistics.predicted.max().item() < 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_the_objective_on_a_gpu_is_that_in_float64(scale, monkeypatch):
    logits, labels = case(5, 64, 1000, scale)
    exact = ds.objectives.ldr(logits, labels, strength=0.7).total
    on_gpu, labels = logits.detach().float().cuda().requires_grad_(), labels.cuda()
    gradient = torch.autograd.grad(exact, logits)[0].float()
    for fused in (True, False):
        monkeypatch.setattr(pair_pass, "FUSED", fused)
        assert pair_pass.takes(on_gpu) is fused
        total = ds.objectives.ldr(on_gpu, labels, strength=0.7).total
        torch.testing.assert_close(total.cpu().double(), exact, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.autograd.grad(total, on_gpu)[0].cpu(), gradient, rtol=1e-3, atol=1e-5)
    assert not pair_pass._refused


KERNELS = """
    import functools, sys
    sys.path.insert(0, sys.argv[1])
    import torch
    from test_pair_pass import case, composed, with_gradient
    from dissensus.objectives import pair_pass

    launched = []
    original = pair_pass._launch
    def launch(name, *rest):
        launched.append(name)
        return original(name, *rest)
    pair_pass._launch, pair_pass.runs_kernels = launch, lambda logits: True
    for members, batch, classes, scale in [(2, 3, 2, 1.0), (4, 5, 7, 1.0), (3, 2, 40, 30.0), (2, 2, 16, 1e3)]:
        logits, labels = case(members, batch, classes, scale, torch.float32)
        ours = with_gradient(pair_pass.pair_statistics, logits, labels)
        for mine, theirs in zip(ours, with_gradient(composed, logits.detach().double().requires_grad_(), labels)):
            theirs = theirs.to(mine.dtype)
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    logits, labels = case(2, 3, 5, 1.0, torch.float32)
    at_label = pair_pass.pair_statistics(logits, labels + 5)[0]
    assert at_label.isnan().all()  # where PyTorch would end the process
    launched.pop()
    logits.data[1] = float("nan")  # of one member: the other's numbers stay, and every predicted class exists
    at_label, _, _, predicted = pair_pass.pair_statistics(logits, labels)
    assert at_label[0].isfinite().all() and predicted.max() < 5
    launched.pop()
    assert launched == ["forward_rows", "backward_rows"] * 4, launched
    assert not pair_pass._refused
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with PyTorch for CUDA")
def test_kernels_compute_what_they_replace():
    """By Triton's interpreter, which needs no GPU."""
    folder = os.path.dirname(__file__)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", textwrap.dedent(KERNELS), folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_gradients_are_those_of_differences():
    logits, labels = case(3, 2, 4)
    function = functools.partial(pair_pass.pair_statistics, labels=labels)
    torch.autograd.gradcheck(lambda z: tuple(function(z))[:3], (logits,))
    torch.autograd.gradgradcheck(lambda z: tuple(function(z))[:3], (logits,))
