"""All members at once by ``torch.func.vmap``: convolutions become grouped ones, linear layers batched products."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._C._functorch import (
    _set_vmap_fallback_warning_enabled,  # pyright: ignore[reportAttributeAccessIssue]  # missing in torch's stubs
)

from dissensus import calls
from dissensus.calls import NetworkInputs, split_tensors
from dissensus.execution.skeleton import Skeleton, Tensors, Unsupported
from dissensus.execution.weights import Weights


def run_vmapped(skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool) -> Tensor:
    """Run members under ``vmap``; raises `Unsupported` where the network has hooks of its backward pass.

    Under ``vmap`` no activation seems to want a gradient, and torch leaves these hooks out.
    """
    if skeleton.once(_has_backward_hooks):
        raise Unsupported("it has hooks of the backward pass")
    inputs, rebuilt = split_tensors(x)

    def member_outputs(params: dict[str, Tensor], state: dict[str, Tensor], own_inputs: list[Tensor]) -> Tensor:
        with skeleton.lending(params, state):
            return skeleton.passed(rebuilt(own_inputs))

    in_dims = (0, 0, 0 if per_member else None)
    with _differentiable_attention(skeleton), attention_with_derivative(calls.first_tensor(x)), _speed_not_warned_of():
        return torch.func.vmap(member_outputs, in_dims, randomness="different")(
            weights.stacked(), dict(buffers), inputs
        )


def _has_backward_hooks(skeleton: Skeleton) -> bool:
    return any(m._backward_hooks or m._backward_pre_hooks for m in skeleton.network.modules())


@contextmanager
def _speed_not_warned_of() -> Iterator[None]:
    """A block in which torch does not warn that an operation is slow under ``vmap``: ``"auto"`` has measured it."""
    if torch.compiler.is_compiling():  # which cannot trace the switch
        yield
        return
    _set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        _set_vmap_fallback_warning_enabled(True)


@contextmanager
def attention_with_derivative(x: Tensor) -> Iterator[None]:
    """A block in which attention on a GPU takes neither PyTorch's memory-efficient kernel nor cuDNN's.

    Under ``vmap`` no activation seems to want a gradient, so their forward passes do not keep what their derivatives
    read. The memory-efficient one refuses then; cuDNN's computes with whatever lies in memory.
    """
    kernels = torch.backends.cuda
    switches = [
        (kernels.mem_efficient_sdp_enabled, kernels.enable_mem_efficient_sdp),
        (kernels.cudnn_sdp_enabled, kernels.enable_cudnn_sdp),
    ]
    off = x.is_cuda and not torch.compiler.is_compiling()
    before = [(enable, is_enabled()) for is_enabled, enable in switches] if off else []
    for enable, _ in before:
        enable(False)
    try:
        yield
    finally:
        for enable, enabled in before:
            enable(enabled)


def _has_attention(skeleton: Skeleton) -> bool:
    return any(isinstance(m, nn.MultiheadAttention | nn.TransformerEncoderLayer) for m in skeleton.network.modules())


@contextmanager
def _differentiable_attention(skeleton: Skeleton) -> Iterator[None]:
    """A block in which torch's attention layers use no fast path in evaluation mode.

    The fast path has no derivative. The layers take it where none of their weights requires a gradient, and under
    ``vmap`` no weight seems to.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    if not before or skeleton.network.training or not skeleton.once(_has_attention):
        yield
        return
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
