"""Members one after the other: takes every network."""

import torch
from torch import Tensor

from dissensus.execution.skeleton import Skeleton, Tensors, checked_output, member_count


def run_loop(skeleton: Skeleton, params: Tensors, buffers: Tensors, x: Tensor, per_member: bool) -> Tensor:
    """Run members in turn on views of the stacked weights.

    Parameters are unbound once per pass: indexing them member by member would make the backward pass quadratic in M.
    """
    members = member_count(params, buffers)
    unbound = {name: tensor.unbind(0) for name, tensor in params.items()}
    outputs: list[Tensor] = []
    for i in range(members):
        own = {name: tensors[i] for name, tensors in unbound.items()}
        state = {name: tensor[i] for name, tensor in buffers.items()}
        with skeleton.lending(own, state) as network:
            outputs.append(checked_output(network(x[i] if per_member else x)))
    return torch.stack(outputs)
