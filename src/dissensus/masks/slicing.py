"""Layers of other sizes: channels of a layer removed or added."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, fx, nn

from dissensus.masks.layer import Masksembles, Tile
from dissensus.masks.tracing import Span, span_of


def member(graph: fx.GraphModule, index: int) -> fx.GraphModule:
    """The network under one mask as a small dense network, without the channels that the mask leaves out.

    A mask in a place that cannot be cut, such as a residual stream, stays as a constant.
    """
    small = copy.deepcopy(graph)
    kept: dict[Span, Tensor] = {}
    for node in list(small.graph.nodes):
        layer = small.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(layer, Tile):
            _skip(small, node)
        elif isinstance(layer, Masksembles):
            mask, span = layer.masks[index], span_of(small, node)
            if span is None:
                small.set_submodule(node.target, Masksembles.of(mask.unsqueeze(0), channel_axis=layer.channel_axis))
                continue
            _skip(small, node)
            kept[span] = kept[span] & mask if span in kept else mask  # channels that all masks of a span keep
    for span, mask in kept.items():
        _cut(small, span, mask.nonzero().flatten())
    small.delete_all_unused_submodules()
    small.graph.lint()
    small.recompile()
    return small


def _skip(graph: fx.GraphModule, node: fx.Node) -> None:
    node.replace_all_uses_with(node.args[0])  # pyright: ignore[reportArgumentType]  # a layer of ours has one input
    graph.graph.erase_node(node)


@torch.no_grad()
def _cut(graph: fx.GraphModule, span: Span, kept: Tensor) -> None:
    producer: Any = graph.get_submodule(span.producer)
    width = int(producer.weight.shape[0])
    by_last = isinstance(producer, nn.Linear)
    for name in (span.producer, *span.norms):
        layer = graph.get_submodule(name)
        for key, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
            if tensor.ndim:
                _put(layer, key, tensor[kept])
        _resize(layer, outputs=len(kept))
    for name in span.consumers:
        layer = graph.get_submodule(name)
        weight: Any = layer.weight
        inputs = int(weight.shape[1])
        columns = torch.arange(inputs, device=weight.device)
        blocks = columns.view(-1, width)[:, kept] if by_last else columns.view(width, -1)[kept]
        _put(layer, "weight", weight[:, blocks.flatten()])
        _resize(layer, inputs=blocks.numel())


def _put(layer: nn.Module, key: str, tensor: Tensor) -> None:
    before = getattr(layer, key)
    is_parameter = isinstance(before, nn.Parameter)
    setattr(layer, key, nn.Parameter(tensor.clone(), before.requires_grad) if is_parameter else tensor)


def _resize(layer: nn.Module, inputs: int | None = None, outputs: int | None = None) -> None:
    """Set the size attributes of a layer."""
    names = {nn.Linear: ("in_features", "out_features")}.get(type(layer), ("in_channels", "out_channels"))  # pyright: ignore[reportArgumentType, reportCallIssue]
    if hasattr(layer, "num_features"):
        layer.num_features = outputs  # pyright: ignore[reportArgumentType]
        return
    if inputs is not None:
        setattr(layer, names[0], inputs)
    if outputs is not None:
        setattr(layer, names[1], outputs)


@torch.no_grad()
def widen(graph: fx.GraphModule, spans: list[tuple[Span, int, int]]) -> None:
    """Change the width of the producers, norms and consumers of spans; their weights are drawn again.

    Args:
        graph: The network, changed in place.
        spans: ``(span, channels now, channels wanted)``.
    """
    sizes: dict[str, dict[str, int]] = {}
    for span, now, wanted in spans:
        for name in (span.producer, *span.norms):
            sizes.setdefault(name, {})["outputs"] = wanted
        for name in span.consumers:
            weight: Any = graph.get_submodule(name).weight
            sizes.setdefault(name, {})["inputs"] = int(weight.shape[1]) // now * wanted
    for name, size in sizes.items():
        before = graph.get_submodule(name)
        layer = copy.deepcopy(before)
        graph.set_submodule(name, layer)
        _resize(layer, **size)
        for key, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
            if not tensor.ndim:
                continue
            shape = list(tensor.shape)
            shape[0] = size.get("outputs", shape[0])
            if key == "weight" and tensor.ndim > 1:
                shape[1] = size.get("inputs", shape[1])
            _put(layer, key, tensor.new_empty(shape))
        layer.reset_parameters()  # pyright: ignore[reportCallIssue]
        if hasattr(layer, "running_mean"):
            continue
        for key, tensor in layer.named_parameters(recurse=False):  # a mask keeps as many inputs as before
            old = getattr(before, key)
            tensor.normal_(float(old.mean()), float(old.std()) if old.numel() > 1 else 0.0)


def parameters(network: nn.Module) -> int:
    """Number of a network's parameters."""
    return sum(math.prod(p.shape) for p in network.parameters())
