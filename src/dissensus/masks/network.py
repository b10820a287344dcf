"""A network with masks as an ensemble, and how an existing network becomes one."""

import copy
import logging
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, fx, nn

import dissensus.masks.slicing as slicing
import dissensus.masks.tracing as tracing
from dissensus import checks
from dissensus.masks.generation import for_width, generate
from dissensus.masks.layer import Masksembles, Tile
from dissensus.randomness import Use, derived_seed

log = logging.getLogger("dissensus")

Assign = Literal["split", "all"]
Where = str | Collection[str] | Callable[[str], bool]


class Sizes(NamedTuple):
    """Learnt numbers of the network that was given, of the masked one, and of one member by itself."""

    single: int
    masked: int
    member: int


class Masked(nn.Module):
    """A network with `Masksembles` layers as an ensemble: ``x [B, ...] -> [N, B, ...]``.

    In evaluation every example goes through all N masks, in one pass. In training, ``assign="split"`` gives each
    example one mask, by blocks of the batch (which `dissensus.fit` shuffles), and the output is ``[1, B, ...]``: as
    cheap as the network alone, and right for `objectives.independent`. With ``assign="all"`` training sees
    ``[N, B, ...]``, as every other objective needs it.

    Take it where an ensemble goes: ``Ensemble(lambda: Masked(...), members=1)`` is trained by `dissensus.fit`, and
    predicts ``[N, B, ...]``.

    Args:
        network: Any module with `Masksembles` layers, all of the same N. `convert` makes one from a plain network.
        assign: See above.

    >>> network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), Masksembles(8, 4, 2.0), nn.Linear(8, 2))
    >>> Masked(network).eval()(torch.zeros(5, 3)).shape
    torch.Size([4, 5, 2])
    """

    members_inside = True
    """Its outputs have a member axis of their own."""

    def __init__(self, network: nn.Module, *, assign: Assign = "split") -> None:
        super().__init__()
        checks.one_of("assign", assign, ("split", "all"))
        layers = [layer for layer in network.modules() if isinstance(layer, Masksembles)]
        counts = {layer.count for layer in layers}
        if len(counts) != 1:
            got = "none" if not counts else f"layers of {sorted(counts)} masks"
            checks.refuse("network", "hold Masksembles layers, all with the same number of masks", got)
        self.count = counts.pop()
        tiled = any(isinstance(layer, Tile) for layer in network.modules())
        self.tile: nn.Module = nn.Identity() if tiled else Tile(self.count, assign)
        self.network = network
        self.assign = assign
        self.training = network.training  # layers of the network keep modes of their own
        self.tile.train(network.training)
        self.single: int | None = None
        """Learnt numbers of the network that it was made from."""

    @property
    def assign(self) -> Assign:
        """Whether in training each example gets one mask, ``"split"``, or ``"all"`` of them."""
        return self._assign

    @assign.setter
    def assign(self, assign: Assign) -> None:
        checks.one_of("assign", assign, ("split", "all"))
        self._assign: Assign = assign
        for layer in self.modules():
            if isinstance(layer, Tile):
                layer.assign = assign

    def forward(self, x: Float[Tensor, "B *S"]) -> Float[Tensor, "N B *R"]:
        """Predictions under every mask, or in training under one each."""
        outputs = self.network(self.tile(x))
        return outputs.unflatten(0, (1 if self.training and self.assign == "split" else self.count, -1))

    def member(self, index: int) -> nn.Module:
        """The network under one mask as a small dense one, without the channels that the mask leaves out.

        Its outputs are those of this network under the mask, to rounding. In evaluation mode batch norm sees what it
        saw; a member that is trained on goes its own way.
        """
        if not -self.count <= index < self.count:
            raise IndexError(f"there is no mask {index}: there are masks 0 to {self.count - 1}.")
        graph = self.network if isinstance(self.network, fx.GraphModule) else tracing.traced(self.network)
        return slicing.member(graph, index % self.count)

    def sizes(self) -> Sizes:
        """How many numbers are learnt, in the network it came from, in this one, and in one member."""
        own = slicing.parameters(self)
        return Sizes(own if self.single is None else self.single, own, slicing.parameters(self.member(0)))

    def extra_repr(self) -> str:
        """What it is."""
        return f"count={self.count}, assign={self.assign!r}"


def convert(
    network: nn.Module,
    count: int,
    scale: float,
    *,
    where: Where = "activations",
    widen: bool = False,
    assign: Assign = "split",
    seed: int | None = None,
) -> Masked:
    """Put masks into a network that exists; it is copied.

    Args:
        network: Any that ``torch.fx`` can follow.
        count: N, the number of masks.
        scale: S: the larger, the less members have in common.
        where: ``"activations"``: behind each activation whose channels one layer makes and others take, so inside
            residual branches and never on their stream. ``"dropout"``: in place of dropout layers. Any way to flatten,
            squeeze or average over space may lie between. A log message names activations or dropout layers that get
            no mask, and why: a warning, unless they are on a residual stream or at the end. Or names of layers (as
            ``named_modules`` has them) behind which masks go, or a function that says so of a name: a place that no
            mask can have is refused.
        widen: Widen masked layers so that each member has the channels of the network that was given. Layers whose
            shape changes start afresh; all others keep their weights.
        assign: See `Masked`.
        seed: Determines the masks; None draws one from torch's generator, so that members of an `Ensemble` differ.

    >>> masked = convert(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), 4, 2.0, widen=True)
    >>> masked.sizes()
    Sizes(single=50, masked=92, member=50)
    """
    checks.count("count", count)
    seed = int(torch.randint(2**62, ())) if seed is None else checks.count("seed", seed, 0)
    graph, found = places(network, where)
    modes = {layer: layer.training for layer in graph.modules()}
    wider: list[tuple[tracing.Span, int, int]] = []
    for number, (node, span) in enumerate(found):
        producer: Any = graph.get_submodule(span.producer)
        channels = int(producer.weight.shape[0])
        own = derived_seed(seed, Use.MASKED_LAYER, number)
        masks = generate(count, channels, scale, own) if widen else for_width(channels, count, scale, own)
        wider += [(span, channels, masks.shape[1])] if widen else []
        layer = Masksembles.of(masks, channel_axis=-1 if isinstance(producer, nn.Linear) else 1)
        name = f"mask_{number}"
        graph.add_submodule(name, layer.to(producer.weight.device))
        insert(graph, node, name, instead=where == "dropout")
    single = slicing.parameters(network)
    slicing.widen(graph, wider)
    tracing.add_tiles(graph, lambda: Tile(count, assign))
    graph.delete_all_unused_submodules()
    graph.train(network.training)
    for layer, mode in modes.items():
        layer.training = mode
    masked = Masked(graph, assign=assign)
    masked.single = single
    return masked


def places(network: nn.Module, where: Where) -> tuple[fx.GraphModule, list[tuple[fx.Node, tracing.Span]]]:
    """A network's graph, and the nodes in it behind which (or in whose place) a mask may stand."""
    if isinstance(where, str):
        checks.one_of("where", where, ("activations", "dropout"))
    if any(isinstance(layer, Masksembles) for layer in network.modules()):
        checks.refuse("network", "have no masks yet", "one with Masksembles layers", "Wrap it in `Masked`.")
    graph = tracing.traced(copy.deepcopy(network))
    chosen = {
        "activations": lambda node: tracing.is_activation(graph, node),
        "dropout": lambda node: tracing.is_dropout(graph, node),
    }.get(where if isinstance(where, str) else "", lambda node: _is_named(node, where))
    nodes = [node for node in graph.graph.nodes if chosen(node)]
    fit: list[tuple[fx.Node, tracing.Span]] = []
    unfit: list[tuple[fx.Node, tracing.Unplaced]] = []
    for node in nodes:
        try:
            fit.append((node, tracing.stretch(graph, node)))
        except tracing.Unplaced as reason:
            unfit.append((node, reason))
    if isinstance(where, str):
        fit = _one_each(fit)
        _tell(unfit, where)
    else:
        unknown = [] if callable(where) else sorted(set(where) - {str(node.target) for node in nodes})
        if unknown:
            checks.refuse("where", "name layers of this network", ", ".join(unknown))
        if len(_one_each(fit)) < len(fit):
            checks.refuse("where", "name one place between two layers, not several", f"{where!r}")
        if unfit:
            lost = ", ".join(f"{node.target} ({reason})" for node, reason in unfit)
            fix = "On a residual stream, or before layers that see channels together, masks cannot be cut out again."
            checks.refuse("where", "name places between two layers", lost, fix)
    if not fit:
        names = [name for name, layer in network.named_modules() if name and not list(layer.children())]
        checks.refuse("where", "name places for masks in this network", repr(where), f"Layers: {', '.join(names)}.")
    return graph, fit


def _tell(unfit: list[tuple[fx.Node, tracing.Unplaced]], where: str) -> None:
    """Say where no mask will stand, and why: louder where nobody would expect it."""
    for expected in (True, False):
        words = [f"{_title(node)} ({reason})" for node, reason in unfit if reason.expected is expected]
        if words:
            level = logging.INFO if expected else logging.WARNING
            place = "in place of dropout" if where == "dropout" else "behind activations"
            log.log(level, "no mask %s %s", place, ", ".join(words))


def _title(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name


def _one_each(places: list[tuple[fx.Node, tracing.Span]]) -> list[tuple[fx.Node, tracing.Span]]:
    """Only the first place of every stretch between two layers."""
    return list({span.producer: (node, span) for node, span in reversed(places)}.values())[::-1]


def _is_named(node: fx.Node, where: Where) -> bool:
    if node.op != "call_module":
        return False
    name = str(node.target)
    return bool(where(name)) if callable(where) else name in where


def insert(graph: fx.GraphModule, node: fx.Node, name: str, *, instead: bool) -> None:
    """Put a layer of the graph's behind a node, or in its place."""
    with graph.graph.inserting_after(node):
        mask = graph.graph.call_module(name, (node,))
    node.replace_all_uses_with(mask, delete_user_cb=lambda user: user is not mask)
    if instead:
        mask.replace_input_with(node, node.args[0])  # pyright: ignore[reportArgumentType]  # dropout has one input
        graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()
