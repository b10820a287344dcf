"""All members at once by ``torch.func.vmap``: convolutions become grouped ones, linear layers batched products."""

import torch
from torch import Tensor

from dissensus.execution.skeleton import Skeleton, Tensors
from dissensus.execution.weights import Weights


def run_vmapped(skeleton: Skeleton, weights: Weights, buffers: Tensors, x: Tensor, per_member: bool) -> Tensor:
    """Run members under ``vmap``."""

    def member_outputs(params: dict[str, Tensor], state: dict[str, Tensor], inputs: Tensor) -> Tensor:
        with skeleton.lending(params, state):
            return skeleton.passed(inputs)

    in_dims = (0, 0, 0 if per_member else None)
    return torch.func.vmap(member_outputs, in_dims, randomness="different")(weights.stacked(), dict(buffers), x)
