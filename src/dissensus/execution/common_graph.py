"""Which values of a traced network are common to all members, and which belong to each of them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from dissensus.dropout import is_idle
from dissensus.execution.skeleton import LeafTracer, Skeleton


def keys_of(skeleton: Skeleton, tensors: Iterable[Tensor]) -> dict[str, frozenset[str]]:
    """Keys, in the layers of a network, of those tensors that are among others; by the name of the layer."""
    chosen = {id(tensor) for tensor in tensors}
    return {
        name: frozenset(
            key for key, tensor in [*layer._parameters.items(), *layer._buffers.items()] if id(tensor) in chosen
        )
        for name, layer in skeleton.network.named_modules(remove_duplicate=False)
    }


def is_common(node: fx.Node) -> bool:
    """Whether the value of a node is the same for all members."""
    return node.meta["common"]


def name_of(node: fx.Node) -> str:
    """The name of what a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


class CommonTracer(LeafTracer):
    """Notes which values are common, and which come from the input.

    A layer that belongs to no member, and whose inputs are common, is not looked into, whatever it does.
    """

    proxy_buffer_attributes = True

    def __init__(self, keys: Mapping[str, frozenset[str]], per_member: bool, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.own_keys, self.per_member = keys, per_member
        self.whole = {part for layer in layers for part in layer.modules()}

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a call of a layer, or look into it."""
        proxies = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, fx.Proxy)]
        if m in self.whole and proxies and all(is_common(proxy.node) for proxy in proxies) and not _has_proxies(m):
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> fx.Node:
        """A node that knows whether its value is common."""
        node = super().create_node(kind, target, args, kwargs, *rest, **named)
        before = node.all_input_nodes
        common = all(other.meta["common"] for other in before)
        if kind == "placeholder":
            common = not self.per_member
        elif kind == "get_attr":
            path, _, key = str(target).rpartition(".")
            common = key not in self.own_keys[path]
        elif kind == "call_module":
            common = common and not any(self.own_keys[name] for name in self._inside(str(target)))
        elif target is getattr and node.args[1] in ("dtype", "device"):
            common = True
        node.meta["common"] = common
        node.meta["batch"] = kind == "placeholder" or any(other.meta["batch"] for other in before)
        return node

    def _inside(self, path: str) -> list[str]:
        """Names of the layers in a layer, apart from dropout that drops nothing, whose keys nobody reads."""
        inside = [name for name in self.own_keys if name == path or name.startswith(f"{path}.")]
        return [name for name in inside if not is_idle(self.root.get_submodule(name))]


def _has_proxies(layer: nn.Module) -> bool:
    """Whether code has hung values of a member into a layer, which it reads besides its arguments."""
    attributes = [value for part in layer.modules() for name, value in vars(part).items() if name != "_modules"]
    return any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves(attributes))
