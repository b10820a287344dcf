"""Networks of linear layers, plain convolutions, pooling and pointwise functions as batched products over all members.

A convolution becomes one product per layer over all members' patches. Grouped convolutions, which `torch.vmap` makes of
it, are slow for the few channels of small networks. Large networks have other backends.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from dissensus.calls import NetworkInputs
from dissensus.dropout import UNITS, KeyedDropout, dropped, mask_shape
from dissensus.execution.aliases import IN_PLACE, is_read_elsewhere, writes
from dissensus.execution.perceptrons import SHAPE, perceptron
from dissensus.execution.skeleton import Skeleton, Tensors, Unsupported
from dissensus.execution.weights import Weights
from dissensus.randomness import keep_mask

POINTWISE_LAYERS: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Hardtanh,
    nn.ReLU6,
    nn.Hardswish,
    nn.Identity,
)

POOLING_LAYERS: tuple[type[nn.Module], ...] = (
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
)

POINTWISE_FUNCTIONS: set[Callable[..., Any]] = {
    F.relu,
    F.leaky_relu,
    F.elu,
    F.gelu,
    F.silu,
    F.softplus,
    F.tanh,
    F.sigmoid,
    torch.relu,
    torch.tanh,
    torch.sigmoid,
    torch.sin,
    torch.cos,
    torch.exp,
    torch.add,
    torch.mul,
    torch.sub,
    operator.add,
    operator.mul,
    operator.sub,
    operator.neg,
}


def run_batched(skeleton: Skeleton, weights: Weights, buffers: Tensors, x: NetworkInputs, per_member: bool) -> Tensor:
    """Run all members by one ``baddbmm`` per layer; raises `Unsupported` where the network has other layers."""
    if not isinstance(x, Tensor):
        raise Unsupported("its forward pass takes several inputs")
    plan = skeleton.once(batched_plan)
    x = x if per_member else x.expand(len(weights), *x.shape)
    network = skeleton.once(perceptron)
    if network is not None and network.takes(weights, x):
        return network.run(weights, x, buffers.get(SHAPE))
    values: list[Any] = [x]
    with skeleton.lending(weights.stacked(), buffers):
        for step in plan:
            values.append(step(values))
    return values[-1]


Step = Callable[[list[Any]], Any]


def batched_plan(skeleton: Skeleton) -> list[Step]:
    """The network as a list of steps. Each step reads earlier values and adds one; the first value is the input."""
    if skeleton.output is not None:
        raise Unsupported("its output is chosen from several")
    graph = skeleton.graph()
    reason = unsupported(skeleton.network, graph)
    if reason:
        raise Unsupported(reason)
    place: dict[fx.Node, int] = {}
    steps: list[Step] = []
    for node in graph.nodes:
        if node.op == "output":
            return [*steps, _value(place[_only_input(node)])]
        if node.op == "call_module":
            layer = skeleton.network.get_submodule(str(node.target))
            steps.append(_layer_step(layer, place[_only_input(node)]))
        elif node.op == "call_function":
            steps.append(_function_step(node, place))
        place[node] = len(steps)
    raise AssertionError("a traced graph ends with an output")


def _only_input(node: fx.Node) -> fx.Node:
    (before,) = node.args
    assert isinstance(before, fx.Node)
    return before


def _value(place: int) -> Step:
    """The value of an earlier step. A compiler cannot look into `operator.itemgetter`."""
    return lambda values: values[place]


def _layer_step(layer: nn.Module, at: int) -> Step:
    return lambda values: _layer(layer, values[at])


def _function_step(node: fx.Node, place: dict[fx.Node, int]) -> Step:
    arguments: list[tuple[Any, bool]] = [(place[a], True) if isinstance(a, fx.Node) else (a, False) for a in node.args]
    options = {name: value for name, value in node.kwargs.items() if name != "inplace"}
    function: Any = IN_PLACE.get(node.target, node.target)
    return lambda values: function(*(values[a] if is_value else a for a, is_value in arguments), **options)


def unsupported(network: nn.Module, graph: fx.Graph) -> str:
    """The reason why the network cannot run in this backend; empty if it can."""
    layers = dict(network.named_modules(remove_duplicate=False))
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        return f"its forward pass takes {len(inputs)} inputs"
    for node in graph.nodes:
        if node.op == "call_module":
            layer = layers[str(node.target)]
            if writes(node, layers) and is_read_elsewhere(node.all_input_nodes[0], layers):
                return f"layer {node.target} writes into what another operation reads"
            if not _is_supported(layer) or len(node.args) != 1 or node.kwargs:
                return f"layer {node.target} ({type(layer).__name__}) has no batched form"
        elif node.op == "call_function":
            if writes(node, layers) and is_read_elsewhere(node.all_input_nodes[0], layers):
                return "a function writes into what another operation reads"
            named_tensors = any(isinstance(argument, fx.Node) for argument in node.kwargs.values())
            if (
                IN_PLACE.get(node.target, node.target) not in POINTWISE_FUNCTIONS
                or named_tensors
                or any(a is True for a in node.args)
            ):
                return f"function {getattr(node.target, '__name__', node.target)} is not known to be pointwise"
        elif node.op not in ("placeholder", "output"):
            return f"it uses {node.op} {node.target}"
    if not isinstance(list(graph.nodes)[-1].args[0], fx.Node):
        return "it returns more than one tensor"
    return ""


def _is_supported(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Flatten):
        return layer.start_dim == 1
    if type(layer) is nn.Conv2d:
        plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        return plain and not isinstance(layer.padding, str)
    return type(layer) in (nn.Linear, KeyedDropout, *POOLING_LAYERS, *POINTWISE_LAYERS)


def _layer(layer: nn.Module, x: Tensor) -> Tensor:
    """One layer for all members at once; its weights are stacked ``[M, ...]``."""
    if isinstance(layer, nn.Linear):
        return stacked_linear(x, layer.weight, layer.bias)
    if isinstance(layer, nn.Conv2d):
        return stacked_convolution(x, layer.weight, layer.bias, layer.stride, layer.padding)
    if isinstance(layer, POOLING_LAYERS):
        return layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    if isinstance(layer, KeyedDropout):
        return stacked_dropout(layer, x)
    if isinstance(layer, nn.Flatten):
        return x.flatten(2, layer.end_dim + 1 if layer.end_dim >= 0 else layer.end_dim)
    # In-place activations would write into the shared input, or into what a later operation of the graph still needs.
    if getattr(layer, "inplace", False):
        x = x.clone()
    return layer(x)


def stacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [M, ..., in]`` through M linear maps ``[M, out, in]`` as one batched product."""
    flat = x if x.ndim == 3 else x.reshape(x.shape[0], -1, x.shape[-1])
    plain = weight.is_complex() or weight.is_meta or torch.compiler.is_compiling()  # which takes no custom jvp
    if plain or weight.numel() < LARGE:
        y = _products(flat, weight, bias)
    else:
        y = _Products.apply(*(None if tensor is None else _autocast(tensor) for tensor in (flat, weight, bias)))
    return y if x.ndim == 3 else y.view(*x.shape[:-1], -1)


LARGE = 2**20
"""The size of a weight above which an `autograd.Function` pays; in small layers its Python code costs more time."""


def _autocast(tensor: Tensor) -> Tensor:
    """An input of a product in the precision of autocast, if it is enabled; float64 does not change."""
    device = tensor.device.type
    lowered = torch.is_autocast_enabled(device) and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(device)) if lowered else tensor


def _products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    transposed = weight.transpose(1, 2)
    return torch.bmm(x, transposed) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, transposed)


class _Products(torch.autograd.Function):
    """`_products`, whose weight gradient has the weight's memory layout; autograd's is transposed and copied."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _products(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        x, weight, _ = inputs
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def jvp(ctx: Any, *changes: Tensor | None) -> Tensor | None:
        (of_x, of_weight, of_bias), (x, weight) = changes, ctx.saved_tensors
        parts = [
            None if of_x is None else torch.bmm(of_x, weight.transpose(1, 2)),
            None if of_weight is None else torch.bmm(x, of_weight.transpose(1, 2)),
            None if of_bias is None else of_bias.unsqueeze(1),
        ]
        terms = [part for part in parts if part is not None]
        return sum(terms[1:], terms[0]) if terms else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if of_x else None,
            torch.bmm(grad.transpose(1, 2), x) if of_weight else None,
            grad.sum(1) if of_bias else None,
        )


def stacked_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...], padding: str | tuple[int, ...]
) -> Tensor:
    """``x [M, B, C, H, W]`` through M convolutions ``[M, out, C, h, w]``: one product of patches and kernels.

    The result is channels last, so that patches of the next layer are copied in runs of ``w · C`` numbers.
    """
    assert not isinstance(padding, str)
    members, out, _, height, width = weight.shape
    x = x.to(weight.dtype)  # what autocast would do, before patches repeat every number
    if any(padding):
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    views = x.unfold(3, height, stride[0]).unfold(4, width, stride[1])  # [M, B, C, H', W', h, w]
    batch, rows, columns = views.shape[1], views.shape[3], views.shape[4]
    patches = views.permute(0, 1, 3, 4, 5, 6, 2).reshape(members, batch * rows * columns, -1)
    kernels = weight.permute(0, 1, 3, 4, 2).reshape(members, out, -1)
    y = stacked_linear(patches, kernels, bias)
    return y.view(members, batch, rows, columns, out).permute(0, 1, 4, 2, 3)


def stacked_batch_norm(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """``x [M, B, C, ...]`` through M batch norms: channels of all members are channels of one.

    Statistics ``[M, C]`` are written where they lie.
    """
    channels = x.transpose(0, 1).flatten(1, 2)
    mean, variance = (None if tensor is None else tensor.view(-1) for tensor in (mean, variance))
    weight, bias = (None if tensor is None else tensor.reshape(-1) for tensor in (weight, bias))
    y = F.batch_norm(channels, mean, variance, weight, bias, training, momentum, eps)
    return y.unflatten(1, (len(x), -1)).transpose(0, 1)


def stacked_dropout(layer: KeyedDropout, x: Tensor) -> Tensor:
    """Keyed dropout of ``x [M, B, ...]``, with the masks of each member."""
    if not layer.training or layer.p == 0:
        return x
    layer.step.add_(1)
    shape = mask_shape(x.shape[1:], layer.channel_axes)
    return dropped(x, keep_mask(shape, layer.p, layer.key, layer.step, layer._buffers.get(UNITS)), layer.p)
