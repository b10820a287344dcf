"""Members of one architecture: every parameter and buffer stored once, stacked ``[M, ...]``."""

import copy
import hashlib
import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._compile import _disable_dynamo

from dissensus.dropout import keyed, set_keys
from dissensus.execution.batched import batched_plan
from dissensus.execution.choice import BACKENDS, Choice, Choices, Mode, chosen
from dissensus.execution.recomputation import recomputation_refused, refuse_recomputation
from dissensus.execution.signature import signature
from dissensus.execution.skeleton import Skeleton, Tensors, Unsupported, first_line, members_inside
from dissensus.execution.weights import Hanging, Layout, Packed, Weights, check_one_dtype
from dissensus.randomness import generators_kept

log = logging.getLogger("dissensus")


class StackedMembers(nn.Module):
    """M networks of one architecture as one network whose tensors have a leading member axis."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.skeleton = Skeleton(network)
        self.settings = signature(network)
        """What the network was like before its first pass, which may leave things behind in it."""
        self.backend = "auto"
        self.ran = ""
        """The backend of the latest pass."""
        self.replayed = False
        """Whether passes are replayed from a CUDA graph, which changes what is fastest."""
        self.channels_last = False
        """How packed weights of convolutions lie."""
        self.by_rule = False
        """Whether ``"auto"`` goes by a rule rather than by measuring, so that equal trainings are equal to the bit."""
        self.choices = Choices()
        self._layouts: dict[tuple[object, ...], Layout] = {}

    @classmethod
    def of(cls, networks: Iterable[nn.Module]) -> "StackedMembers":
        """Stack networks; `ValueError` names the first member and tensor that does not fit."""
        first: nn.Module | None = None
        settings: list[tuple[str, str, str]] = []
        held: dict[str, list[Tensor]] = {}
        for index, network in enumerate(networks):
            network = keyed(network)
            tensors = Skeleton(network).tensors()
            if first is None:
                first, settings = network, signature(network)
                held = {name: [tensor.detach()] for name, tensor in tensors.items()}
                continue
            _check_same(index, held, tensors)
            differing = sorted(set(signature(network)) ^ set(settings))
            if differing:
                name, what, _ = differing[0]
                where = f"layer {name!r}" if name else "the network"
                raise ValueError(f"{what} of {where} differs in member {index} (a tensor? make it a buffer)")
            for name, tensor in tensors.items():
                held[name].append(tensor.detach())
        if first is None:
            raise ValueError("an ensemble needs at least one member")
        body = cls(_hung(first, {name: torch.stack(tensors) for name, tensors in held.items()}))
        return body.train(first.training)

    def __len__(self) -> int:
        return next(iter(self.tensors().values())).shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """Every stacked tensor by name, dropout's counters included."""
        return self.skeleton.tensors()

    def state(self) -> dict[str, Tensor]:
        """Stacked tensors that training moves without a gradient, and frozen parameters."""
        return {name: t for name, t in self.tensors().items() if not (isinstance(t, nn.Parameter) and t.requires_grad)}

    def trainable(self) -> dict[str, nn.Parameter]:
        """Stacked parameters that want a gradient."""
        return {name: p for name, p in self.tensors().items() if isinstance(p, nn.Parameter) and p.requires_grad}

    def layout(self) -> Layout:
        """How parameters lie in the matrix of all of them."""
        params = self.trainable()
        key = (self.channels_last, *params)
        if key not in self._layouts:
            self._layouts[key] = Layout.of(self.skeleton, params, self.channels_last)
        return self._layouts[key]

    def packed(self) -> Tensor:
        """All trainable parameters as one matrix ``[M, P]``; afterwards the parameters are views of it."""
        params = self.trainable()
        check_one_dtype(params)
        flat = self.layout().packed(params)
        for name, view in self.layout().views(flat).items():
            params[name].data = view
        return flat

    def run(self, flat: Tensor | None, x: Tensor, per_member: bool, rows: slice | Tensor = slice(None)) -> Tensor:
        """Outputs ``[M, B, ...]`` for parameters packed in a matrix (None: its own), which may hold some rows only.

        Buffers are its own, and are written to. Under autocast packed weights are cast once, all at a time.
        """
        buffers = _cut(self.state(), rows)
        if flat is None:
            assert isinstance(rows, slice)
            weights: Weights = Hanging(_cut(self.trainable(), rows), len(range(len(self))[rows]))
        else:
            weights = Packed(self.layout(), flat, _autocast_dtype(flat))
        if per_member and x.shape[0] != len(weights):
            wanted = f"[M={len(weights)}, B, ...]"
            raise ValueError(f"`x` must have shape {wanted} with per_member=True; got {list(x.shape)}.")
        self.ran = self._backend_for(weights, buffers, x, per_member)
        # A compiler would trace into the guard; `_choose` has tried one member by then, outside of any graph.
        guarded = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        with recomputation_refused() if guarded else nullcontext():
            outputs = BACKENDS[self.ran](self.skeleton, weights, buffers, x, per_member)
        if isinstance(rows, Tensor):
            self._put_back(rows, buffers)
        return outputs.flatten(0, 1) if members_inside(self.network) else outputs

    def _put_back(self, rows: Tensor, buffers: Tensors) -> None:
        """Rows that were copied out, with what a pass has written to them."""
        with torch.no_grad():
            for name, tensor in self.state().items():
                if not isinstance(tensor, nn.Parameter):
                    tensor.index_copy_(0, rows, buffers[name])

    def _backend_for(self, weights: Weights, buffers: Tensors, x: Tensor, per_member: bool) -> str:
        """The backend to use in this mode; the first call in a mode tries, and remembers."""
        replayed = self.replayed and x.is_cuda
        both_ways = torch.is_grad_enabled() or bool(self.training and weights.leaves())
        by_rule = self.by_rule and self.backend == "auto"
        mode = (self.backend, self.training, both_ways, per_member, x.device.type, replayed, by_rule)
        if mode not in self.choices:
            self._choose(mode, weights, buffers, x, per_member, both_ways)
        return self.choices[mode].backend if mode in self.choices else "loop"

    @_disable_dynamo  # as torch.compiler.disable does, which would load the whole compiler on import
    def _choose(
        self, mode: Mode, weights: Weights, buffers: Tensors, x: Tensor, per_member: bool, both_ways: bool
    ) -> None:
        if both_ways:
            one = {name: tensor[:1] for name, tensor in buffers.items()}
            refuse_recomputation(self.skeleton, weights.first(1), one, x[:1] if per_member else x, per_member)
        if self.backend == "auto":
            with torch.set_grad_enabled(both_ways):
                choice = chosen(
                    self.skeleton,
                    weights,
                    buffers,
                    x,
                    per_member,
                    replayed=self.replayed and x.is_cuda,
                    by_rule=self.by_rule,
                )
            refusal = choice.refused.get("vmap") if choice.backend == "loop" and not self.by_rule else None
        else:
            refusal = self._refusal(self.backend, weights, buffers, x, per_member)
            if refusal and self._refusal("loop", weights, buffers, x, per_member):
                return  # the input is at fault, or the network: the pass itself will say so
            choice = Choice("loop" if refusal else self.backend, {}, {self.backend: refusal} if refusal else {})
        self.choices.add(mode, choice)
        if refusal:
            log.warning("members run in a loop: %s", refusal)

    def _refusal(self, name: str, weights: Weights, buffers: Tensors, x: Tensor, per_member: bool) -> str | None:
        """Try a named backend on copies of the buffers, so that a failure half-way leaves no trace."""
        if name == self.backend and name in ("loop", "streams"):
            return None
        with torch.no_grad(), generators_kept(x.device):
            copies = {name: tensor.clone() for name, tensor in buffers.items()}
            try:
                BACKENDS[name](self.skeleton, weights, copies, x, per_member)
            except Exception as reason:
                return first_line(reason)
        return None

    def is_batchable(self) -> bool:
        """Whether the backend ``"batched"`` knows every layer."""
        try:
            self.skeleton.once(batched_plan)
        except Unsupported:
            return False
        return True

    def member(self, index: int) -> nn.Module:
        """A copy of one member as an ordinary module."""
        return self._reduced(lambda tensor: tensor[index].clone())

    def mean(self) -> nn.Module:
        """An ordinary module whose floating-point tensors are the members' means; whole numbers are the first's."""
        return self._reduced(lambda t: t.mean(0) if t.is_floating_point() else t[0].clone())

    def subset(self, indices: Sequence[int]) -> "StackedMembers":
        """The members at these indices, copied."""
        body = StackedMembers(self._reduced(lambda tensor: tensor[list(indices)].clone()))
        body.backend, body.channels_last, body.by_rule = self.backend, self.channels_last, self.by_rule
        return body.train(self.training)

    def _reduced(self, reduce: Any) -> nn.Module:
        left_behind = [v for m in self.network.modules() for v in vars(m).values() if isinstance(v, Tensor)]
        memo: dict[int, Any] = {
            id(t): None for t in left_behind if t.grad_fn is not None or is_functorch_wrapped_tensor(t)
        }
        with torch.no_grad():
            for tensor in self.tensors().values():
                new = reduce(tensor.detach())
                memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        return copy.deepcopy(self.network, memo)

    def fingerprint_parts(self) -> list[object]:
        """What decides the outputs: not how members are run, nor how long that took."""
        return [self.training, self.network]

    def identity(self) -> str:
        """A checksum of the architecture, by which a checkpoint knows it."""
        shapes = [(name, tuple(tensor.shape[1:])) for name, tensor in self.tensors().items()]
        columns = [*self.layout().shapes, self.channels_last]
        return hashlib.sha256(repr((self.settings, shapes, columns)).encode()).hexdigest()

    def set_keys(self, owners: Sequence[tuple[int, int]]) -> None:
        """Key dropout: whose (run seed, member) each row is."""
        set_keys(self.network, owners)

    def hang(self, flat: Tensor, state: Tensors) -> None:
        """Take over other rows: parameters as views of a matrix ``[G, P]``, and buffers."""
        views = self.layout().views(flat.detach())
        for name, parameter in self.trainable().items():
            parameter.data = views[name]
        for name, tensor in self.state().items():
            tensor.data = state[name]

    def merge(self, into: Tensors, source: Tensors, members: Tensor) -> None:
        """Write some members' (bool ``[M]``) rows of ``source`` into ``into``, both as `state` gives them."""
        with torch.no_grad():
            for name, tensor in into.items():
                chosen = members.view(-1, *[1] * (tensor.ndim - 1))
                tensor.copy_(torch.where(chosen, source[name], tensor))  # no look at the mask: fit for a graph


def _cut(tensors: Tensors, rows: slice | Tensor) -> dict[str, Tensor]:
    whole = isinstance(rows, slice) and rows == slice(None)
    return {name: tensor if whole else tensor[rows] for name, tensor in tensors.items()}


def _autocast_dtype(flat: Tensor) -> torch.dtype | None:
    """What autocast would bring weights to, where it is on."""
    kind = flat.device.type
    lowered = torch.is_autocast_enabled(kind) and flat.dtype == torch.float32
    return torch.get_autocast_dtype(kind) if lowered else None


def _check_same(index: int, held: dict[str, list[Tensor]], tensors: Tensors) -> None:
    for name in [*held, *tensors]:
        if name not in tensors or name not in held:
            where = "member 0" if name not in held else f"member {index}"
            raise ValueError(f"tensor {name!r} is missing in {where}")
        first, own = held[name][0], tensors[name]
        if first.shape != own.shape or first.dtype != own.dtype:
            raise ValueError(
                f"tensor {name!r} is {list(own.shape)} {own.dtype} in member {index}"
                f" and {list(first.shape)} {first.dtype} in member 0"
            )


def _hung(network: nn.Module, stacked: Tensors) -> nn.Module:
    """Hang stacked tensors where a network's own tensors were."""
    skeleton = Skeleton(network)
    own = skeleton.tensors()
    ready = {
        name: nn.Parameter(tensor, own[name].requires_grad) if isinstance(own[name], nn.Parameter) else tensor
        for name, tensor in stacked.items()
    }
    skeleton.hang(ready)
    return network
