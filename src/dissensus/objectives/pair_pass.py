"""What LDR reads from logits, in one pass over them forward and one backward, instead of about twenty.

Of member m on an example, with p = softmax(z) and ŷ the class that m predicts: log p(y), log(1 − p(ŷ)), and log p at
the class that each other member predicts. The gradient of logits is

    ∂/∂z(k) = a p(k) + g p(k) [k ≠ ŷ] / (1 − p(ŷ)) + c [k = y] + Σ_l G(l) [k = ŷ(l)]

with the gradients c of log p(y), g of log(1 − p(ŷ)), G(l) of log p(ŷ(l)), and a = −(c + g + Σ_l G(l)).
"""

import functools
import importlib
import logging
import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

log = logging.getLogger("dissensus")

FUSED = True
"""Whether logits on a GPU are read by one kernel; benchmarks and tests switch it off."""
MOST_CLASSES = 2**14
"""The largest number of classes of one row, which a kernel holds at once."""
_refused: list[str] = []


class PairStatistics(NamedTuple):
    """What the objective reads from logits."""

    at_label: Float[Tensor, "M B"]
    """log p(y)."""
    at_predicted: Float[Tensor, "l B m"]
    """log p of member l at the class that member m predicts."""
    log_rest: Float[Tensor, "m B"]
    """log(1 − p) at the member's own prediction."""
    predicted: Int[Tensor, "m B"]


@functools.cache
def kernels() -> Any:
    """The kernels, or None without Triton."""
    try:
        return importlib.import_module("dissensus.objectives.triton_pairs")
    except ImportError:
        return None


def takes(logits: Tensor) -> bool:
    """Whether logits are read in one pass: float32 on a GPU, with Triton installed and where a pass may be fused.

    Sums at classes that several members predict have no fixed order, which deterministic trainings want.
    """
    fits = logits.is_cuda and logits.dtype == torch.float32 and logits.shape[-1] <= MOST_CLASSES
    plain = not (torch.compiler.is_compiling() or is_functorch_wrapped_tensor(logits))
    ordered = torch.are_deterministic_algorithms_enabled()
    return FUSED and fits and plain and not ordered and not _refused and kernels() is not None


def pair_statistics(logits: Float[Tensor, "M B C"], labels: Int[Tensor, " B"]) -> PairStatistics:
    """log p at labels and at predicted classes, log(1 − p), and predicted classes.

    >>> at_label, at_predicted, log_rest, predicted = pair_statistics(torch.zeros(2, 1, 4), torch.tensor([3]))
    >>> at_label.exp().flatten(), log_rest.exp().flatten(), predicted.flatten()
    (tensor([0.2500, 0.2500]), tensor([0.7500, 0.7500]), tensor([0, 0]))
    """
    return PairStatistics(*_Pass.apply(logits.contiguous(), labels))


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        log_sum, at_label, log_rest, predicted = _forward(logits, labels)
        others = predicted.T.expand(len(predicted), -1, -1)  # [l, B, m]
        at_predicted = logits.gather(2, others) - log_sum.unsqueeze(2)
        ctx.save_for_backward(logits, labels, log_sum, log_rest, predicted)
        ctx.mark_non_differentiable(predicted)
        return at_label, at_predicted, log_rest, predicted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, labels, log_sum, log_rest, predicted = ctx.saved_tensors
        of_label, of_predicted, of_rest, _ = grads
        if torch.is_grad_enabled():  # this gradient may be differentiated: torch knows how
            results = _differentiable(logits, labels, predicted)
            return torch.autograd.grad(results, logits, grads[:3], create_graph=True)[0], None
        of_all = -(of_label + of_rest + of_predicted.sum(2))
        grad = _backward(logits, labels, log_sum, log_rest, predicted, of_label, of_rest, of_all)
        return grad.scatter_add_(2, predicted.T.expand(len(predicted), -1, -1), of_predicted), None


def _forward(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    members, batch, classes = logits.shape
    if runs_kernels(logits):
        log_sum, at_label, log_rest = (logits.new_empty(members, batch) for _ in range(3))
        predicted = torch.empty(members, batch, dtype=torch.int64, device=logits.device)
        arguments = [logits, labels.contiguous(), log_sum, at_label, log_rest, predicted, batch, classes]
        if _launch("forward_rows", members * batch, classes, arguments):
            return log_sum, at_label, log_rest, predicted
    log_sum, predicted = logits.logsumexp(-1), logits.argmax(-1)
    return log_sum, _at_label(logits, labels) - log_sum, _log_rest(logits, predicted) - log_sum, predicted


def _at_label(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(2, labels.expand(len(logits), -1).unsqueeze(2)).squeeze(2)


def _log_rest(logits: Tensor, predicted: Tensor) -> Tensor:
    """log Σ exp z over all classes but the predicted one."""
    return logits.scatter(2, predicted.unsqueeze(2), -math.inf).logsumexp(-1)


def _differentiable(logits: Tensor, labels: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log p at labels, log p at predicted classes and log(1 − p), by operations that torch differentiates twice."""
    log_sum = logits.logsumexp(-1)
    at_predicted = logits.gather(2, predicted.T.expand(len(predicted), -1, -1)) - log_sum.unsqueeze(2)
    return _at_label(logits, labels) - log_sum, at_predicted, _log_rest(logits, predicted) - log_sum


def _backward(
    logits: Tensor,
    labels: Tensor,
    log_sum: Tensor,
    log_rest: Tensor,
    predicted: Tensor,
    of_label: Tensor,
    of_rest: Tensor,
    of_all: Tensor,
) -> Tensor:
    members, batch, classes = logits.shape
    of_label, of_rest, of_all = (tensor.contiguous() for tensor in (of_label, of_rest, of_all))
    if runs_kernels(logits):
        grad = torch.empty_like(logits)
        numbers = [log_sum, log_rest, predicted, of_label, of_rest, of_all]
        arguments = [logits, labels.contiguous(), *numbers, grad, batch, classes]
        if _launch("backward_rows", members * batch, classes, arguments):
            return grad
    log_p = logits - log_sum.unsqueeze(2)
    share = (log_p - log_rest.unsqueeze(2)).scatter_(2, predicted.unsqueeze(2), -math.inf).exp_()
    grad = log_p.exp_().mul_(of_all.unsqueeze(2)).add_(share.mul_(of_rest.unsqueeze(2)))
    return grad.scatter_add_(2, labels.expand(members, -1).unsqueeze(2), of_label.unsqueeze(2))


def runs_kernels(logits: Tensor) -> bool:
    """Whether rows of these logits are read by kernels."""
    fits = logits.is_cuda and logits.dtype == torch.float32 and logits.shape[-1] <= MOST_CLASSES
    return fits and not _refused and kernels() is not None


def _launch(name: str, rows: int, classes: int, arguments: list[Any]) -> bool:
    """Run a kernel over all rows; False, with a notice, where Triton cannot compile it."""
    size = max(1 << (classes - 1).bit_length(), 16)
    warps, device = 4 if size <= 2048 else 8, arguments[0].device
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            getattr(kernels(), name)[(rows,)](*arguments, SIZE=size, num_warps=warps)
    except Exception as reason:  # a missing compiler may raise anything
        _refused.append((str(reason).splitlines() or [type(reason).__name__])[0])
        log.warning("pairs of members are compared in several passes: %s", _refused[0])
        return False
    return True
