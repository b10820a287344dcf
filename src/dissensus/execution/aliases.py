"""Which operations of a traced graph write into memory, and which values may lie in the same memory."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from dissensus.dropout import KeyedDropout

IN_PLACE: Mapping[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
"""Operators that write into their first argument, and those that compute the same without doing so."""
_COPYING = {"add", "mul", "mean", "relu", "size"}
"""Methods whose results lie in memory of their own."""
_RESHAPES = {"view", "reshape", "flatten", "contiguous"}
"""Methods that return a view of some tensors, and a copy of others."""
Modules = Mapping[str, nn.Module]
"""The layers of a graph, by name."""


def writes(node: fx.Node, modules: Modules) -> bool:
    """Whether an operation writes into its first input, which it returns then."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    in_place = bool(node.kwargs.get("inplace")) or any(argument is True for argument in node.args)
    return in_place or node.target in IN_PLACE


def chain(node: fx.Node, modules: Modules) -> list[fx.Node]:
    """A value, what it may be a view of, what that may be a view of, and so on; the last has memory of its own."""
    found = [node]
    while _may_alias(found[-1], modules):
        found.append(found[-1].all_input_nodes[0])
    return found


def is_read_elsewhere(node: fx.Node, modules: Modules) -> bool:
    """Whether anything else reads a value, or what it may be a view of."""
    return any(len(value.users) > 1 for value in chain(node, modules))


def depends_on_layout(node: fx.Node, modules: Modules) -> bool:
    """Whether others see what an operation writes only if strides make a view of a reshaped tensor, not a copy."""
    root = chain(node.all_input_nodes[0], modules)[-1]
    family = [root]
    for value in family:  # which grows
        family += [user for user in value.users if _may_alias(user, modules) and user.all_input_nodes[0] is value]
    return any(len(value.users) > 1 for value in family) and any(_reshapes(value, modules) for value in family)


def _may_alias(node: fx.Node, modules: Modules) -> bool:
    """Whether a value may lie in the memory of its first input."""
    if not node.all_input_nodes or node.op not in ("call_module", "call_function", "call_method"):
        return False
    if writes(node, modules) or _reshapes(node, modules):
        return True
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], nn.Identity | KeyedDropout)
    if node.op == "call_method":
        return node.target not in _COPYING
    return node.target in (operator.getitem, getattr)


def _reshapes(node: fx.Node, modules: Modules) -> bool:
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], nn.Flatten | nn.Unflatten)
    return node.target is torch.flatten if node.op == "call_function" else node.target in _RESHAPES
