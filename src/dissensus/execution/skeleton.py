"""A network that runs with weights which are lent to it for the duration of a call."""

import copy
import operator
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from dissensus import checks
from dissensus.calls import NetworkInputs, OutputChoice, chosen_output, mapped, outputs_of, tensors
from dissensus.dropout import FUNCTIONAL_KEY
from dissensus.execution.functional_dropout import KeyedFunctions
from dissensus.execution.recurrent import recurrent_layers
from dissensus.execution.ways import Ways

Tensors = Mapping[str, Tensor]
Made = TypeVar("Made")


class Unsupported(Exception):
    """A backend cannot run this network; the message says why in one line."""


class Skeleton:
    """The structure of a network, apart from its weights.

    The tensors of ``network`` are stacked (``[M, ...]``) and never used in a forward pass: `lending` replaces them by
    those of a member (or, under ``vmap``, of all members). Those named in ``shared`` belong to all members, and are
    used as they hang in the network. Under ``vmap``, what is computed from them alone is computed once. Differs from
    ``torch.func.functional_call`` in speed only: the places where tensors hang are looked up once, not at every call.
    A tensor that hangs in several places has one name, that of its first place.
    """

    def __init__(
        self,
        network: nn.Module,
        output: OutputChoice | None = None,
        functions_keyed: bool | None = None,
        adopted: Mapping[str, bool] | None = None,
        shared: frozenset[str] = frozenset(),
    ) -> None:
        self.network, self.output, self.shared = network, output, shared
        self.functions_keyed = functions_keyed
        """Whether functions that drop units have keyed masks in training; None until a training pass has shown it."""
        self._recurrent = recurrent_layers(network)
        self._lock = threading.RLock()
        """Held while tensors are lent: another thread would take them for the network's own, and restore them."""
        self._made: dict[tuple[Any, bool], Any] = {}
        self.ways = Ways()
        """Ways of operations that have several; a body gives its own, which may be kept in a file."""
        self.compiled: dict[Hashable, Any] = {}
        """Compiled passes; see `dissensus.execution.compilation`."""
        self._writes: dict[bool, bool] = {}
        """Whether the forward pass writes into its input, by mode (train or eval), as the first pass has shown."""
        self.draws: dict[bool, bool] = {}
        """Whether the forward pass draws from global generators, by mode, as the first pass has shown."""
        self.apart: dict[bool, set[nn.Module]] = {}
        """Layers of shared weights that read what is a member's own, by mode, as the first pass has shown."""
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        self._empty: dict[str, tuple[dict[str, Any], str]] = {}
        """Buffers that are None."""
        self._growing = {
            path: (module._buffers, len(module._buffers))
            for path, module in network.named_modules()
            if not _is_layer(module)
        }
        """Buffers of modules whose code is not torch's, and how many there are: a pass may register more."""
        self.adopted = dict(adopted or {})
        """Buffers that a pass has made, and whether they were registered before, as None."""
        self.appearing: set[str] = set()
        """Buffers that a pass has made, and that members do not have yet."""
        self._hooks: list[Mapping[int, Any]] = [hooks for module in network.modules() for hooks in _hooks(module)]
        self._hook_counts = self._counted_hooks()
        self._constants: dict[bool, list[tuple[Mapping[str, Any], str, Any]]] = {}
        """By mode: what a trace holds as constants, where it hangs, and what it was."""
        self._collecting = _Collecting()
        self._common: list[tuple[str, dict[str, Any], str]] = []
        """Buffers that members share, and where they hang. A pass must not write to them."""
        first_name: dict[int, str] = {}
        for path, module in network.named_modules():
            for store in (module._parameters, module._buffers):
                for key, tensor in store.items():
                    name = f"{path}.{key}" if path else key
                    if tensor is not None:
                        name = first_name.setdefault(id(tensor), name)
                        self._places.setdefault(name, []).append((store, key))
                        if store is module._buffers and name in shared:
                            self._common.append((name, store, key))
                    elif store is module._buffers:
                        self._empty[name] = (store, key)

    def __getstate__(self) -> tuple[Any, ...]:
        # The places refer to this network, so a copy looks them up again.
        return self.network, self.output, self.functions_keyed, self.adopted, self.shared

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers that each member has for itself, by name; one that hangs in two places occurs once."""
        hanging = self._hanging()
        return {name: tensor for name, tensor in hanging.items() if name not in self.shared} if self.shared else hanging

    def shared_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers that members share. They hang in the network as they are, and are never lent."""
        return {name: tensor for name, tensor in self._hanging().items() if name in self.shared} if self.shared else {}

    def fixed_layers(self) -> list[nn.Module]:
        """Layers whose buffers members share, which stay in evaluation mode."""
        found: list[nn.Module] = []
        for name in self.shared:
            path, _, key = name.rpartition(".")
            layer = self.network.get_submodule(path)
            is_layer = isinstance(layer, nn.modules.batchnorm._NormBase) or not list(layer.children())
            if key in layer._buffers and is_layer:
                found.append(layer)
        return found

    def _hanging(self) -> dict[str, Tensor]:
        with self.alone():
            hanging = {name: places[0][0][places[0][1]] for name, places in self._places.items()}
        return {name: tensor for name, tensor in hanging.items() if tensor is not None}

    def alone(self) -> AbstractContextManager[object]:
        """A block that one thread at a time is in; blocks of the same thread may lie in each other."""
        return nullcontext() if torch.compiler.is_compiling() else self._lock  # a compiler traces in one thread

    def share_lock(self, other: "Skeleton") -> None:
        """Take turns with another skeleton that has some of the same layers."""
        self._lock = other._lock

    @contextmanager
    def lending(self, *tensors: Tensors, late: dict[str, Tensor] | None = None) -> Iterator[nn.Module]:
        """Lend tensors to the network, by name; the tensors from before are restored afterwards.

        Another thread that lends tensors or asks for them waits until then.

        Args:
            tensors: What is lent.
            late: Buffers of a member that a pass has made, which are lent too; afterwards those that exist then. None:
                a pass that makes buffers is refused.
        """
        lent = {name: tensor for group in tensors for name, tensor in group.items()}
        with self.alone(), self._common_unchanged():
            before = {name: self._places[name][0][0][self._places[name][0][1]] for name in lent}
            self.hang(lent)
            for name, tensor in (late or {}).items():
                store, key = self._late_place(name)
                store[key] = tensor
            try:
                yield self.network
                made = self._taken_away()
                if made and late is None:
                    raise ValueError(_APPEARS.format(next(iter(made))))
                if made and late is not None:
                    late.update(made)
                self._keep_reassigned(lent)
            except BaseException:
                self._taken_away()
                raise
            finally:
                self.hang(before)
                for layer in self._recurrent:  # whose list of weights would keep those of this pass
                    layer._init_flat_weights()

    @contextmanager
    def _common_unchanged(self) -> Iterator[None]:
        """A block in which buffers that members share must not change: every member would write for all of them."""
        if torch.compiler.is_compiling():
            yield
            return
        before = [(name, store, key, store[key], _version(store[key])) for name, store, key in self._common]
        try:
            yield
        finally:
            changed = None
            for name, store, key, tensor, version in before:
                if store[key] is not tensor or _version(tensor) != version:
                    changed, store[key] = name, tensor
        if changed is not None:
            fix = f"Leave it out: shared=lambda name: ... and name != {changed!r}."
            checks.refuse("shared", "leave out buffers that a forward pass writes to", repr(changed), fix)

    def passed(self, x: NetworkInputs) -> Tensor:
        """One forward pass with the weights that hang in the network; ``x`` is never written to.

        Members share the user's input. A network that writes into it (an initial ``nn.ReLU(inplace=True)``,
        ``x.sub_(mean)``) gets a copy. The first pass of each mode runs on a copy and shows whether the network does.
        """
        mode = self.network.training
        if not self._writes.get(mode, True):
            return self._output(x)
        copy = mapped(Tensor.clone, x)
        if mode in self._writes or torch.compiler.is_compiling():
            return self._output(copy)
        memories = [_innermost(tensor) for tensor in tensors(copy)]
        if any(memory.is_inference() for memory in memories):  # which have no version
            return self._output(copy)
        versions = [memory._version for memory in memories]
        output = self._output(copy)
        self._writes[mode] = versions != [memory._version for memory in memories]
        return output

    def _output(self, x: NetworkInputs) -> Tensor:
        if self.functions_keyed and self.network.training:
            with KeyedFunctions(self.network):
                return chosen_output(outputs_of(self.network, x), self.output)
        return chosen_output(outputs_of(self.network, x), self.output)

    def key_functions(self) -> bool:
        """Key functions that drop units from now on, and return whether the network has a key for them."""
        self.functions_keyed = FUNCTIONAL_KEY in self.network._buffers
        return self.functions_keyed

    def hang(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Assign tensors to every place of their names."""
        for name, tensor in tensors.items():
            for store, key in self._places[name]:
                store[key] = tensor

    def _taken_away(self) -> dict[str, Tensor]:
        """Buffers that a pass has made, which are one member's; the network no longer has them."""
        made: dict[str, Tensor] = {}
        for name, (store, key) in self._empty.items():
            if store[key] is not None:
                made[name] = store[key].detach()
                store[key] = None
        for path, (store, count) in self._growing.items():
            for key in list(store)[count:] if len(store) > count else ():  # dictionaries keep their order
                tensor = store.pop(key)
                if tensor is not None:
                    made[f"{path}.{key}" if path else key] = tensor.detach()
        if made:
            self.appearing.update(made)
        return made

    def _late_place(self, name: str) -> tuple[dict[str, Any], str]:
        path, _, key = name.rpartition(".")
        return self._empty[name] if name in self._empty else (self._growing[path][0], key)

    @property
    def empty(self) -> list[str]:
        """Names of buffers that are registered as None."""
        return list(self._empty)

    def takes(self, name: str) -> bool:
        """Whether a pass may make a buffer of this name, which the network does not have yet."""
        return name in self._empty or (name not in self._places and name.rpartition(".")[0] in self._growing)

    def adopt(self, tensors: Tensors) -> None:
        """Let the network have buffers that passes have made, from now on."""
        if not tensors:
            return
        with self.alone():
            for name, tensor in tensors.items():
                if name in self._places:  # another thread was first
                    continue
                store, key = self._late_place(name)
                self.adopted[name] = name in self._empty
                self._empty.pop(name, None)
                store[key] = tensor
                self._places[name] = [(store, key)]
                self.appearing.discard(name)
            self._count()

    def discard(self, names: Iterable[str]) -> None:
        """Take buffers away that the network has adopted."""
        with self.alone():
            names = list(names)
            if not names:
                return
            for name in names:
                ((store, key),) = self._places.pop(name)
                if self.adopted.pop(name):
                    store[key], self._empty[name] = None, (store, key)
                else:
                    del store[key]
                self.appearing.add(name)
            self._count()

    def _count(self) -> None:
        self._growing = {path: (store, len(store)) for path, (store, _) in self._growing.items()}
        self._forget()

    def _counted_hooks(self) -> list[int]:
        return list(map(len, self._hooks))

    def notice_hooks(self) -> bool:
        """Whether layers have got hooks, or lost them, since this was last asked; plans made before are forgotten then.

        A plan may leave out the call of a layer, and with it the hooks that the call would run.
        """
        counts = self._counted_hooks()
        changed = counts != self._hook_counts
        if changed:
            self._forget()
            self.draws.clear()
            self.apart.clear()
            self._hook_counts = counts
        return changed

    def notice_settings(self) -> bool:
        """Whether settings of modules, or modules themselves, are others than in a trace; it is forgotten then.

        A trace holds them as constants: ``x * self.scale`` has the number that the attribute had.
        """
        watched = self._constants.get(self.network.training, ())
        if not any(_is_other(store.get(name), value) for store, name, value in watched):
            return False
        self._forget()
        return True

    def _forget(self) -> None:
        """Forget what earlier passes and traces have shown of the network."""
        self._made.clear()
        self._constants.clear()
        self._writes.clear()
        self.compiled.clear()

    @contextmanager
    def collecting(self, late: list[dict[str, Tensor]]) -> Iterator[None]:
        """A block in which passes of members in turn keep the buffers that they make: those of each member, in a list.

        Outside of it, and in other threads, they are dropped, as in passes that try a backend.
        """
        before, self._collecting.late = self._collecting.late, late
        try:
            yield
        finally:
            self._collecting.late = before

    def late(self, members: int) -> Sequence[dict[str, Tensor] | None]:
        """The buffers of each member that passes have made; see `collecting`. A traced pass cannot keep any: None."""
        if torch.compiler.is_compiling():
            return [None] * members
        return [{} for _ in range(members)] if self._collecting.late is None else self._collecting.late

    def _keep_reassigned(self, lent: Tensors) -> None:
        """A forward pass may assign a new tensor to a buffer instead of writing into it: write it through."""
        for name, tensor in lent.items():
            store, key = self._places[name][0]
            now = store[key]
            if now is not tensor and now is not None:
                if isinstance(now, Tensor) and now.shape != tensor.shape:
                    raise ValueError(
                        f"buffer {name!r} changes its shape in a pass, from {list(tensor.shape)} to "
                        f"{list(now.shape)}. Make it as large as it gets inside `build`."
                    )
                tensor.copy_(now)

    def once(self, make: Callable[["Skeleton"], Made]) -> Made:
        """The result of ``make`` for this skeleton, computed once for each mode (train or eval)."""
        key = (make, self.network.training)
        if key not in self._made:
            self._made[key] = make(self)
        return self._made[key]

    def graph(self) -> fx.Graph:
        """The network's `trace` into torch's layers, made once for each mode; it is read, and never changed."""
        return self.once(Skeleton.trace)

    def trace(self, tracer: fx.Tracer | None = None) -> fx.Graph:
        """The network's graph of operations in its mode; raises `Unsupported` if its forward pass cannot be traced.

        A tracer runs the network's code. Weights and buffers are replaced by tensors without values, so that a pass can
        neither write to them nor branch on their values.
        """
        with self.alone():
            return self._traced(LeafTracer() if tracer is None else tracer)

    def _traced(self, tracer: fx.Tracer) -> fx.Graph:
        hooked = next((name for name, module in self.network.named_modules() if has_hooks(module)), None)
        if hooked is not None:  # those of a container would run once, while it is traced
            raise Unsupported(f"layer {hooked} has hooks" if hooked else "it has hooks")
        before = [(module, dict(vars(module)), dict(module._buffers)) for module in self.network.modules()]
        held = self._hanging()
        empty = {name: _without_values(tensor) for name, tensor in held.items()}
        try:
            with torch.no_grad():
                self.hang(empty)
                graph = tracer.trace(self.network)
            made = self._taken_away()
            if made:
                raise Unsupported(_APPEARS.format(next(iter(made))))
            written = [name for name, tensor in empty.items() if tensor._version]
            if written or any(now is not empty[name] for name, now in self._hanging().items()):
                raise Unsupported(f"its forward pass writes to {(written or ['a buffer'])[0]}")
            self._constants[self.network.training] = _constants(before)
            return graph
        except Unsupported:
            raise
        except Exception as error:  # a tracer runs foreign code, which may raise anything
            raise Unsupported(f"its forward pass cannot be traced ({first_line(error)})") from error
        finally:
            vars(tracer).clear()  # it is part of a reference cycle that would keep the weights in memory
            for module, attributes, buffers in before:  # a pass may have stored the tracer's placeholders
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)
            self.hang(held)


_APPEARS = (
    "buffer {!r} appears in the network's first pass, which members take in turn. Run the network once inside `build`, "
    "or the ensemble on a batch: then every member has it from the start"
)


class _Collecting(threading.local):
    """What `Skeleton.collecting` collects in this thread."""

    late: list[dict[str, Tensor]] | None = None


def _without_values(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


class _Value(fx.Proxy):
    """A value of a trace that records ``a += b`` as what it is; torch's would record ``a + b``."""

    def __iadd__(self, other: Any) -> Any:
        return self._written(operator.iadd, other)

    def __isub__(self, other: Any) -> Any:
        return self._written(operator.isub, other)

    def __imul__(self, other: Any) -> Any:
        return self._written(operator.imul, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._written(operator.itruediv, other)

    def _written(self, function: Callable[..., Any], other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})


class LeafTracer(fx.Tracer):
    """Looks into every module but torch's layers."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A value of the trace."""
        return _Value(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        """Whether a module is a layer of torch, or one of keyed dropout."""
        return not list(m.children()) and type(m).forward is not nn.Module.forward and _is_layer(m)


def _is_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith(("torch.nn", "dissensus.dropout"))


def has_hooks(module: nn.Module) -> bool:
    """Whether a module itself has hooks, of its forward or backward pass, which a call of it runs and nothing else."""
    return any(_hooks(module))


def _hooks(module: nn.Module) -> tuple[Mapping[int, Any], ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


_STORES = {"_parameters", "_buffers", "_modules"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def _constants(before: Iterable[tuple[nn.Module, dict[str, Any], Any]]) -> list[tuple[Mapping[str, Any], str, Any]]:
    """Plain settings, functions and submodules of modules, but for those that a pass has changed since ``before``.

    Settings of a class count for its instances, until they have one of their own.
    """
    found: list[tuple[Mapping[str, Any], str, Any]] = []
    classes: dict[type, list[str]] = {}
    for module, attributes, _ in before:
        store = vars(module)
        for kind in type(module).__mro__:
            if kind not in classes:
                of_torch = kind is object or kind.__module__.partition(".")[0] == "torch"
                settings = {} if of_torch else {n: v for n, v in vars(kind).items() if n[:2] != "__" and _is_plain(v)}
                found += [(vars(kind), name, value) for name, value in settings.items()]
                classes[kind] = list(settings)
            found += [(store, name, None) for name in classes[kind] if name not in store]
        for name, value in attributes.items():
            if name not in _STORES and (_is_plain(value) or callable(value)) and store.get(name) is value:
                found.append((store, name, copy.copy(value) if isinstance(value, list | dict) else value))
        found += [(store["_modules"], name, child) for name, child in module._modules.items()]
    return found


def _is_plain(value: object) -> bool:
    parts = value.values() if type(value) is dict else value if type(value) in (list, tuple) else [value]
    return all(isinstance(part, _PLAIN) for part in parts)  # pyright: ignore[reportGeneralTypeIssues]


def _is_other(value: object, before: object) -> bool:
    return value is not before and (type(value) is not type(before) or value != before)


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to; 0 for one of inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _innermost(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers of ``vmap`` and ``grad``; only its version counts in-place writes."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for log lines."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def members_inside(network: nn.Module) -> bool:
    """Whether a network is an ensemble itself, with outputs ``[N, B, ...]``, such as a network with masks."""
    return bool(getattr(network, "members_inside", False))
