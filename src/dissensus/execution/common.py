"""What lies before the first tensor of a member, computed once for all members that run in turn.

A pass of a member calls functions of torch and layers. Where all tensors that a call reads are common (inputs, shared
weights, and what was computed from them), its result is the same in every member. The first member computes it, and the
others take it, with its place in autograd's graph: the backward pass goes through it once too.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from dissensus.calls import NetworkInputs, first_tensor, tensors
from dissensus.dropout import is_idle, key_tensors, may_drop_units
from dissensus.execution.skeleton import Skeleton, has_hooks
from dissensus.randomness import GlobalGenerators, is_generator

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout)
_UNTRACKED: set[Any] = {
    torch.Tensor.data.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.data.__set__,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.__array__,
    torch.Tensor.numpy,
    torch.Tensor.storage,
    torch.Tensor.untyped_storage,
}
"""They exchange the memory of a tensor, or return it. Writes to it do not raise the tensor's version."""
_HOOKS: set[Any] = {
    torch.Tensor.backward,
    torch.Tensor.register_hook,
    torch.Tensor.requires_grad.__set__,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.requires_grad_,
    torch.Tensor.retain_grad,
}
"""They change what autograd does with a tensor, which each member then has for itself."""
RANDOM = re.compile(
    r"rand|normal(?!ize)|uniform|bernoulli|exponential|cauchy|geometric|multinomial|poisson|binomial|gumbel|rrelu"
)
"""Names of functions that draw random numbers. A network may begin to draw after its first pass."""


class _Result(NamedTuple):
    leaves: list[Any]
    form: pytree.TreeSpec
    versions: list[int]
    ready: Any
    """When a GPU has computed it: the next member may run on another stream."""

    def wait(self) -> None:
        """Let the present stream wait for the result; its memory is not freed before that stream has read it."""
        if self.ready is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.ready)
            for leaf in self.leaves:
                if isinstance(leaf, Tensor):
                    leaf.record_stream(stream)


class _NotCommon(Exception):
    pass


class _Known(NamedTuple):
    """What is known of a tensor whose numbers are common, unless it was written to since."""

    version: int
    name: int


class CommonPart(TorchFunctionMode):
    """Blocks, one per member, in which calls that read common tensors alone return what the first of them returned.

    The n-th call with certain arguments in a member returns what the n-th such call returned before, so two tensors of
    a member are never one. Tensors have names, by which calls are compared: equal names are equal numbers. A call that
    writes to common tensors is done for each member, and so is the one whose result is written to. What they leave has
    the same name in every member, so that later calls are common again. Results that get a hook belong to each member.
    """

    def __init__(self, skeleton: Skeleton, x: NetworkInputs) -> None:
        super().__init__()
        self.results: dict[Any, _Result] = {}
        self.names: dict[Any, int] = {}
        """The name of what comes from a call: the first use of each is counted."""
        self.common = WeakIdKeyDictionary()
        for place, tensor in enumerate([*skeleton.shared_tensors().values(), *tensors(x)]):
            self._know(tensor, ("given", place))
        apart = skeleton.apart[skeleton.network.training]
        self.layers = [layer for layer in common_layers(skeleton) if layer not in apart]
        self.inside, self.drew, self.training = False, False, skeleton.network.training
        self.names_given_up: set[int] = set()
        self.untracked = False
        """Whether memory may have been written to unseen; from then on nothing is common."""
        self.calls: Counter[Any] = Counter()
        """How often the present member has made each call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, or return its earlier result."""
        name = getattr(func, "__name__", "")
        if RANDOM.search(name) or (self.training and "drop" in name):
            self.drew = True
            return func(*args, **(kwargs or {}))
        if self.inside:
            return func(*args, **(kwargs or {}))
        if func in _UNTRACKED or func in _HOOKS:
            self._give_up(args[0], func in _UNTRACKED)
            return func(*args, **(kwargs or {}))
        return self._result(func, func, args, kwargs or {})

    @contextmanager
    def member(self) -> Iterator[None]:
        """The block of one member. Layers that are common are called once as a whole, so that no more is kept."""
        self.calls.clear()
        with _forwards_replaced(self.layers, self._once), self:
            yield

    def _once(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return forward(*args, **kwargs)

            def whole(*args: Any, **kwargs: Any) -> Any:
                self.inside = True
                try:
                    return forward(*args, **kwargs)
                finally:
                    self.inside = False

            return self._result(whole, layer, args, kwargs)

        return called

    def _result(self, call: Callable[..., Any], name: Any, args: Any, kwargs: Any) -> Any:
        read: list[Tensor] = []
        try:
            arguments = (name, torch.is_grad_enabled(), self._key(args, read), self._key(kwargs, read))
            hash(arguments)
        except (_NotCommon, TypeError):
            return call(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self.calls[arguments] += 1
            key, versions = (arguments, self.calls[arguments]), _versions(read)
            known = self.results.get(key)
            if known is not None and known.versions == _versions(known.leaves):
                known.wait()
                return pytree.tree_unflatten(known.leaves, known.form)
        self.drew = False
        result = call(*args, **kwargs)
        if self.drew:
            return result
        with torch._C.DisableTorchFunction():
            leaves, form = pytree.tree_flatten(result)
            made = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            simple = all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves)
            if versions != _versions(read):
                for place, (tensor, version) in enumerate(zip(read, versions, strict=True)):
                    if tensor._version != version:
                        self._know(tensor, (key, "written", place))
            elif made and simple and not any(t.is_inference() for t in made):
                if known is None:
                    ready = torch.cuda.current_stream().record_event() if made[0].is_cuda else None
                    self.results[key] = _Result(leaves, form, _versions(leaves), ready)
                for place, tensor in enumerate(made):
                    self._know(tensor, (key, "made", place))
        return result

    def _know(self, tensor: Tensor, origin: Any) -> None:
        name = self.names.setdefault(origin, len(self.names))
        self.common[tensor] = _Known(tensor._version, name)

    def _give_up(self, tensor: Tensor, memory: bool) -> None:
        """Compute a tensor anew in every member; everything, if its memory may be written to unseen."""
        known: _Known | None = self.common.pop(tensor, None)
        if known is None:
            return
        self.names_given_up.add(known.name)
        self.untracked = self.untracked or memory
        for key, result in list(self.results.items()):
            if memory or any(leaf is tensor for leaf in result.leaves):
                del self.results[key]

    def _key(self, value: Any, read: list[Tensor]) -> Any:
        """An argument as a key: tensors by name, plain values by type and value."""
        if isinstance(value, Tensor):
            known: _Known | None = self.common.get(value)
            if known is None or known.version != value._version or known.name in self.names_given_up or self.untracked:
                raise _NotCommon
            read.append(value)
            return ("tensor", known.name)
        if isinstance(value, _PLAIN):
            return (type(value), value)
        if isinstance(value, tuple | list):
            return (type(value), *(self._key(part, read) for part in value))
        if isinstance(value, dict):
            return (dict, *((name, self._key(part, read)) for name, part in value.items()))
        if isinstance(value, slice):
            return (slice, *(self._key(part, read) for part in (value.start, value.stop, value.step)))
        raise _NotCommon


class FirstPass:
    """The first pass of a mode: that of the first member shows what members have in common, which the others share."""

    def __init__(self, skeleton: Skeleton, x: NetworkInputs) -> None:
        self.skeleton, self.x = skeleton, x
        self.before = GlobalGenerators.now(first_tensor(x).device)
        self.common: CommonPart | None = None

    @contextmanager
    def member(self) -> Iterator[None]:
        """The block of one member."""
        skeleton, mode = self.skeleton, self.skeleton.network.training
        if mode not in skeleton.draws:
            look = FirstLook(skeleton, self.x)
            with _forwards_replaced(look.layers, look.watched), look:
                yield
            skeleton.apart[mode], skeleton.draws[mode] = look.apart, self.before.drawn_from()
            return
        if self.common is None and not skeleton.draws[mode] and not skeleton.appearing:
            self.common = CommonPart(skeleton, self.x)
        with nullcontext() if self.common is None else self.common.member():
            yield


class FirstLook(TorchFunctionMode):
    """A pass of one member, which shows which layers of shared weights read nothing but common tensors.

    A layer may read what belongs to a member behind its arguments: an attribute, a global variable. The functions that
    it calls are shared nevertheless.
    """

    def __init__(self, skeleton: Skeleton, x: NetworkInputs) -> None:
        super().__init__()
        self.common = WeakIdKeyDictionary()
        for tensor in [*skeleton.shared_tensors().values(), *tensors(x)]:
            self.common[tensor] = None
        self.layers = common_layers(skeleton)
        self.inside: nn.Module | None = None
        self.apart: set[nn.Module] = set()
        """Layers that read what is not common."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and note whether its result is common."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            read = _tensors_in((args, kwargs))
            common = all(tensor in self.common for tensor in read)
        if not common and self.inside is not None:
            self.apart.add(self.inside)
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            for tensor in _tensors_in(result):
                if common:
                    self.common[tensor] = None
                else:
                    self.common.pop(tensor, None)
        return result

    def watched(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward pass of a layer that may be common."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if self.inside is not None or not all(tensor in self.common for tensor in _tensors_in((args, kwargs))):
                return forward(*args, **kwargs)
            self.inside = layer
            try:
                return forward(*args, **kwargs)
            finally:
                self.inside = None

        return called


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@contextmanager
def _forwards_replaced(
    layers: Iterable[nn.Module], replacement: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """A block in which layers have another forward pass."""
    before = [(layer, vars(layer).get("forward")) for layer in layers]
    for layer, _ in before:
        vars(layer)["forward"] = replacement(layer, layer.forward)
    try:
        yield
    finally:
        for layer, forward in before:
            del vars(layer)["forward"]
            if forward is not None:
                vars(layer)["forward"] = forward


def _versions(leaves: list[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]


def common_layers(skeleton: Skeleton, may_drop: Callable[[list[nn.Module]], bool] = may_drop_units) -> list[nn.Module]:
    """The outermost layers all of whose tensors are shared, and that neither draw numbers nor have hooks.

    In training, layers of which ``may_drop`` is true are none of them.
    """
    unread = {id(tensor) for tensor in key_tensors(filter(is_idle, skeleton.network.modules()))}
    own = {id(tensor) for tensor in skeleton.tensors().values()} - unread
    found: list[nn.Module] = []

    def visit(layer: nn.Module) -> None:
        if isinstance(layer, torch.jit.ScriptModule):
            return
        inside = list(layer.modules())
        held = [id(tensor) for tensor in [*layer.parameters(), *layer.buffers()]]
        hooked = any(map(has_hooks, inside))
        draws = any(is_generator(value) for m in inside for value in vars(m).values())
        if held and own.isdisjoint(held) and not hooked and not draws and not (layer.training and may_drop(inside)):
            found.append(layer)
        else:
            for child in layer.children():
                visit(child)

    for child in skeleton.network.children():
        visit(child)
    return list({id(layer): layer for layer in found}.values())


@contextmanager
def common_part(
    skeleton: Skeleton, x: NetworkInputs, members: int, per_member: bool
) -> Iterator[CommonPart | FirstPass | None]:
    """What members have in common in one pass; None where nothing is, or where it cannot be told.

    The first pass of a mode shows whether the network draws random numbers from global generators, which belong to each
    member, and which layers are common as a whole.
    """
    given = [*skeleton.shared_tensors().values(), *tensors(x)] if skeleton.shared and not per_member else []
    mode, first = skeleton.network.training, first_tensor(x)
    if (
        not given
        or members == 1
        or torch.compiler.is_compiling()
        or torch.is_inference_mode_enabled()
        or any(tensor.is_inference() or is_functorch_wrapped_tensor(tensor) for tensor in given)
        or skeleton.appearing
    ):
        yield None
    elif mode in skeleton.draws:
        yield None if skeleton.draws[mode] else CommonPart(skeleton, x)
    elif first.is_cuda and torch.cuda.is_current_stream_capturing():
        yield None
    else:
        yield FirstPass(skeleton, x)
