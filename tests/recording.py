"""A stand-in for a CUDA graph on a CPU: what a function does to tensors is written down once, and then done again.

Unlike a call of the function, a replay runs none of its Python code: a number that the host decided stays as it was.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Written(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.made, self.before = [], set(), {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function._schema.is_mutable:
            for tensor in tree_leaves(args)[:1]:
                if id(tensor) not in self.made and id(tensor) not in self.before:
                    self.before[id(tensor)] = (tensor, tensor.clone())
        found = function(*args, **kwargs)
        self.made |= {id(leaf) for leaf in tree_leaves(found)}
        self.calls.append((function, args, kwargs, found))
        return found


def recorded(function, generators):
    """A replay of a function, which has left no trace, as after a capture."""
    with _Written() as written:
        function()
    with torch.no_grad():
        for tensor, value in written.before.values():
            tensor.copy_(value)

    @torch.no_grad()
    def replay():
        for call, args, kwargs, found in written.calls:
            again = call(*args, **kwargs)
            if call._schema.is_mutable:
                continue
            for old, new in zip(tree_leaves(found), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new)

    return replay
