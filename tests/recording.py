"""A stand-in for CUDA graphs on a CPU: what a function does to tensors is recorded once, and then done again.

Unlike a call of the function, a replay runs none of its Python code. It repeats the recorded operations on the tensors
that were recorded. So a number that the host decided stays as it was, and a tensor that has been replaced since is not
read: a test that compares replays with eager runs fails where a graph would use a stale pointer.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dissensus.execution import graphs

HOST_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}
"""Operations whose results the host needs. A capture on a GPU fails there."""


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def memory_of(tensor):
    return tensor.untyped_storage().data_ptr()


class _Operations(TorchDispatchMode):
    def __init__(self, host_reads):
        super().__init__()
        self.host_reads = host_reads
        self.calls = []
        self.inner = set()
        """Memory that was allocated while recording."""
        self.outer = {}
        """Memory from outside that operations use: a tensor that lives there, and its contents before."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        masked = function is torch.ops.aten.index.Tensor and any(i.dtype == torch.bool for i in tensors_in(args[1]))
        if (masked or function in HOST_READS) and not self.host_reads:
            raise RuntimeError("operation not permitted when stream is capturing")
        for tensor in tensors_in((args, kwargs)):
            memory = memory_of(tensor)
            if memory not in self.inner and memory not in self.outer:
                self.outer[memory] = (tensor.untyped_storage(), tensor.untyped_storage().clone())
        result = function(*args, **kwargs)
        self.inner |= {memory_of(tensor) for tensor in tensors_in(result)} - self.outer.keys()
        self.calls.append((function, args, kwargs, result))
        return result

    def undo(self):
        """Put memory from outside back to what it held before."""
        for storage, contents in self.outer.values():
            storage.copy_(contents)

    @torch.no_grad()
    def replay(self):
        """Do the recorded operations again."""
        for call, args, kwargs, result in self.calls:
            repeated = call(*args, **kwargs)
            if call.namespace == "_c10d_functional":  # a collective goes on in the background
                repeated = torch.ops._c10d_functional.wait_tensor(repeated)
            for old, new in zip(tensors_in(result), tensors_in(repeated), strict=True):
                if old.numel() and old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new)


def recorded(function, generators=(), *, host_reads=False):
    """A replay of a function. As after a capture, the recording itself has no effect on tensors and generators.

    With ``host_reads`` numbers may be read back, which a CPU cannot tell from numbers that are on the host anyway.
    """
    states = [generator.get_state() for generator in generators]
    with _Operations(host_reads) as operations:
        function()
    operations.undo()
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    return operations.replay


class Pieces:
    """A capture in pieces on a CPU: operations are recorded, and what is left to the host runs at every replay."""

    def __init__(self):
        self.steps, self.operations = [], []

    def begin(self):
        self.operations.append(_Operations(host_reads=False))
        self.operations[-1].__enter__()

    def end(self):
        self.operations[-1].__exit__(None, None, None)
        self.steps.append(self.operations[-1].replay)

    @classmethod
    def capture(cls, function, generators=()):
        """A replay of a function, as by `recorded`."""
        states = [generator.get_state() for generator in generators]
        pieces = cls()
        graphs._pieces.append(pieces)
        try:
            pieces.begin()
            function()
            pieces.end()
        finally:
            graphs._pieces.pop()
        assert len(pieces.operations) > 1, "nothing was left to the host"
        for operations in reversed(pieces.operations):
            operations.undo()
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

        def replay():
            for step in pieces.steps:
                step()

        return replay


class Captures:
    """A way to capture that counts captures and replays."""

    def __init__(self, capture=recorded):
        self.capture = capture
        self.captures = self.replays = 0

    def __call__(self, function, generators=()):
        self.captures += 1
        replay = self.capture(function, generators)

        def count_and_replay():
            self.replays += 1
            replay()

        return count_and_replay
