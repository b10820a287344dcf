"""All members at once by ``torch.func.vmap``: convolutions become grouped ones, linear layers batched products."""

import torch
from torch import Tensor

from dissensus.calls import NetworkInputs, split_tensors
from dissensus.execution.skeleton import Skeleton, Tensors
from dissensus.execution.weights import Weights


def run_vmapped(skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool) -> Tensor:
    """Run members under ``vmap``."""
    inputs, rebuilt = split_tensors(x)

    def member_outputs(params: dict[str, Tensor], state: dict[str, Tensor], own_inputs: list[Tensor]) -> Tensor:
        with skeleton.lending(params, state):
            return skeleton.passed(rebuilt(own_inputs))

    in_dims = (0, 0, 0 if per_member else None)
    return torch.func.vmap(member_outputs, in_dims, randomness="different")(weights.stacked(), dict(buffers), inputs)
