"""Networks with masks as ensembles, and the conversion of existing networks."""

import copy
import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import torch
from jaxtyping import Float
from torch import Tensor, fx, nn

import dissensus.masks.slicing as slicing
import dissensus.masks.tracing as tracing
from dissensus import checks, storage
from dissensus.architecture import Architecture
from dissensus.batch import Unpack
from dissensus.dropout import keyed
from dissensus.execution import inference
from dissensus.execution.inference import Inputs
from dissensus.execution.signature import signature
from dissensus.execution.skeleton import Skeleton
from dissensus.execution.stored_architectures import Beside, checked_architecture, stored_architecture, trusted_builds
from dissensus.masks.generation import for_width, generate
from dissensus.masks.layer import Masksembles, Tile
from dissensus.randomness import Use, derived_seed, seeded
from dissensus.training_rows import TrainingRows

log = logging.getLogger("dissensus")

KIND = "dissensus.masked"
FORMATS = storage.Formats(newest=1)
"""Of saved networks with masks."""

Assign = Literal["split", "all"]
Where = str | Collection[str] | Callable[[str], bool]


class Sizes(NamedTuple):
    """Numbers of parameters of the original network, of the masked network, and of one member."""

    single: int
    masked: int
    member: int


class Masked(nn.Module):
    """A network with `Masksembles` layers as an ensemble: ``x [B, ...] -> [N, B, ...]``.

    In evaluation every example goes through all N masks, in one pass. In training, ``assign="split"`` gives each
    example one mask, by blocks of the batch (which `dissensus.fit` shuffles), and the output is ``[1, B, ...]``. This
    is as cheap as the network alone, and suits `objectives.independent`. With ``assign="all"`` the output in training
    is ``[N, B, ...]``, which all other objectives need.

    ``Ensemble(lambda: Masked(...), members=1)`` is trained by `dissensus.fit`, and predicts ``[N, B, ...]``.

    Args:
        network: Any module with `Masksembles` layers, all of the same N. `convert` makes one from a plain network.
        assign: ``"split"`` or ``"all"``.

    >>> network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), Masksembles(8, 4, 2.0), nn.Linear(8, 2))
    >>> Masked(network).eval()(torch.zeros(5, 3)).shape
    torch.Size([4, 5, 2])
    """

    members_inside = True
    """Its outputs have a member axis already."""

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
        self.training = network.training  # layers of the network keep their modes
        self.tile.train(network.training)
        self.single: int | None = None
        """Number of parameters of the original network."""
        self._beside = Beside()

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
        """Predictions under every mask; in training with "split", under one mask per example."""
        outputs = self.network(self.tile(x))
        return outputs.unflatten(0, (1 if self.training and self.assign == "split" else self.count, -1))

    @overload
    def predict(
        self,
        data: Inputs,
        batch_size: int = 1024,
        *,
        targets: Literal[False] = False,
        unpack: Unpack | None = None,
        file: str | Path | None = None,
    ) -> Tensor: ...

    @overload
    def predict(
        self,
        data: Inputs,
        batch_size: int = 1024,
        *,
        targets: Literal[True],
        unpack: Unpack | None = None,
        file: str | Path | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def predict(
        self,
        data: Inputs,
        batch_size: int = 1024,
        *,
        targets: bool = False,
        unpack: Unpack | None = None,
        file: str | Path | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Outputs ``[N, examples, ...]`` under every mask on the host, in evaluation mode; the mode is put back.

        Arguments are those of `dissensus.Ensemble.predict`.

        >>> network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), Masksembles(8, 4, 2.0), nn.Linear(8, 2))
        >>> Masked(network).predict(torch.zeros(5, 3)).shape
        torch.Size([4, 5, 2])
        """
        return inference.predicted(self, self.count, data, batch_size, targets=targets, unpack=unpack, file=file)

    @property
    def training_rows(self) -> TrainingRows:
        """A record of the rows that the network was trained on, as that of an `Ensemble`."""
        return self._beside.training_rows

    @training_rows.setter
    def training_rows(self, rows: TrainingRows | None) -> None:
        self._beside.training_rows = TrainingRows.unknown() if rows is None else rows

    def trained_on(self, data: Inputs, *, unpack: Unpack | None = None) -> Tensor:
        """Which examples are rows that the network was trained on; see `dissensus.Ensemble.trained_on`."""
        return inference.recognised(self.training_rows, self, data, unpack=unpack)

    def save(self, path: str | Path, *, architecture: Architecture | None = None) -> None:
        """Save into a folder, masks included, as `dissensus.Ensemble.save` does.

        Args:
            path: The folder.
            architecture: How to build the network, so that `load` needs no ``build``, such as
                ``Architecture("dissensus.masks:convert", network=Architecture("dissensus.nets:mlp", ...), count=4,
                scale=2.0, seed=0)``. By default that of `load`, if there was one.
        """
        architecture = self._beside.architecture if architecture is None else architecture  # pyright: ignore[reportAssignmentType]  # there is one
        tensors = Skeleton(self).tensors()
        details: dict[str, Any] = {
            "count": self.count,
            "assign": self.assign,
            "single": self.single,
            "training": self.training,
            "training_rows": self.training_rows.to_json(),
        }
        if architecture is not None:
            network = keyed(copy.deepcopy(self))  # as `difference` compares networks
            shapes = {name: tensor.shape for name, tensor in Skeleton(network).tensors().items()}
            details["architecture"] = checked_architecture(architecture, signature(network), shapes, self._assigned)
        storage.write_folder(path, KIND, tensors, details, FORMATS)

    def _assigned(self, other: nn.Module) -> None:
        """Set the assignment of masks in another network, which may be none with masks."""
        if isinstance(other, Masked):
            other.assign = self.assign

    @classmethod
    def load(
        cls,
        path: str | Path,
        build: Callable[[], "Masked"] | None = None,
        *,
        trust: str | Iterable[str] = (),
    ) -> "Masked":
        """Load what `save` wrote. The masks are those that were saved, whatever ``build`` draws.

        Args:
            path: The folder.
            build: Returns a network with masks of the same shapes. None: what was saved with an architecture says it.
            trust: What a stored architecture may import and call; see `dissensus.Ensemble.load`.
        """
        tensors, manifest = storage.read_folder(path, KIND, FORMATS)
        architecture = stored_architecture(path, manifest)
        try:
            assign, single, training = manifest["assign"], manifest["single"], bool(manifest["training"])
            training_rows = TrainingRows.from_json(manifest.get("training_rows"))
        except (KeyError, TypeError, ValueError) as reason:
            raise storage.StorageError(f"the manifest in {path} is damaged: {reason!r}.") from reason
        with seeded(0):
            masked = (trusted_builds(path, architecture, trust) if build is None else build)()
        if not isinstance(masked, Masked):
            fix = "Return Masked(network), or masks.convert(network, ...)."
            checks.refuse("build", "return a Masked network", type(masked).__name__, fix, TypeError)
        own = Skeleton(masked).tensors()
        storage.check_match(path, tensors, {name: tensor.shape for name, tensor in own.items()})
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.data = tensors[name].to(tensor.device)
        masked.assign, masked.single, masked.training_rows = assign, single, training_rows
        masked._beside.architecture = architecture
        return masked.train(training)

    def member(self, index: int) -> nn.Module:
        """The network under one mask as a small dense one, without the channels that the mask leaves out.

        Its outputs are those of this network under the mask, to rounding. Batch norm keeps its statistics. Training the
        member does not change this network.
        """
        if not -self.count <= index < self.count:
            raise IndexError(f"there is no mask {index}: there are masks 0 to {self.count - 1}.")
        graph = self.network if isinstance(self.network, fx.GraphModule) else tracing.trace(self.network)
        return slicing.member(graph, index % self.count)

    def sizes(self) -> Sizes:
        """Numbers of parameters of the original network, of this network, and of one member."""
        masked = slicing.parameters(self)
        return Sizes(masked if self.single is None else self.single, masked, slicing.parameters(self.member(0)))

    def extra_repr(self) -> str:
        """Number of masks and their assignment in training."""
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
    """Insert masks into a copy of an existing network.

    Args:
        network: A network that ``torch.fx`` can trace.
        count: N, the number of masks.
        scale: S. Members have less in common for larger S.
        where: ``"activations"``: after each activation whose channels come from one layer and go to other layers, so
            inside residual branches and never on the residual stream. ``"dropout"``: in place of dropout layers.
            Flattening, squeezing and averaging over space may lie in between. A log message names activations or
            dropout layers without a mask and the reason: a warning, unless they are on a residual stream or at the end.
            Or names of layers (as in ``named_modules``) after which masks go, or a function of a name that returns a
            bool: a place that cannot have a mask is refused.
        widen: Widen masked layers so that each member has as many channels as the original network. Layers whose shape
            changes get new weights; all others keep theirs.
        assign: See `Masked`.
        seed: Determines the masks; None draws one from torch's generator, so that members of an `Ensemble` differ.

    >>> masked = convert(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), 4, 2.0, widen=True)
    >>> masked.sizes()
    Sizes(single=50, masked=92, member=50)
    """
    checks.count("count", count)
    seed = int(torch.randint(2**62, ())) if seed is None else checks.count("seed", seed, 0)
    graph, mask_places = places(network, where)
    modes = {layer: layer.training for layer in graph.modules()}
    wider: list[tuple[tracing.Span, int, int]] = []
    for number, (node, span) in enumerate(mask_places):
        producer: Any = graph.get_submodule(span.producer)
        channels = int(producer.weight.shape[0])
        layer_seed = derived_seed(seed, Use.MASKED_LAYER, number)
        seeded = {"scale": scale, "seed": layer_seed}
        masks = generate(count, channels, **seeded) if widen else for_width(channels, count, **seeded)
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
    """A network's graph, and the nodes after which (or in place of which) a mask can be."""
    if isinstance(where, str):
        checks.one_of("where", where, ("activations", "dropout"))
    if any(isinstance(layer, Masksembles) for layer in network.modules()):
        checks.refuse("network", "have no masks yet", "one with Masksembles layers", "Wrap it in `Masked`.")
    graph = tracing.trace(copy.deepcopy(network))
    chosen = {
        "activations": lambda node: tracing.is_activation(graph, node),
        "dropout": lambda node: tracing.is_dropout(graph, node),
    }.get(where if isinstance(where, str) else "", lambda node: _is_named(node, where))
    nodes = [node for node in graph.graph.nodes if chosen(node)]
    fit: list[tuple[fx.Node, tracing.Span]] = []
    unfit: list[tuple[fx.Node, tracing.Unplaced]] = []
    for node in nodes:
        try:
            fit.append((node, tracing.find_span(graph, node)))
        except tracing.Unplaced as reason:
            unfit.append((node, reason))
    if isinstance(where, str):
        fit = _first_of_each_span(fit)
        _log_unfit(unfit, where)
    else:
        unknown = [] if callable(where) else sorted(set(where) - {str(node.target) for node in nodes})
        if unknown:
            checks.refuse("where", "name layers of this network", ", ".join(unknown))
        if len(_first_of_each_span(fit)) < len(fit):
            checks.refuse("where", "name one place between two layers, not several", f"{where!r}")
        if unfit:
            lost = ", ".join(f"{node.target} ({reason})" for node, reason in unfit)
            fix = "Masks on a residual stream, or before layers that mix channels, cannot be removed again."
            checks.refuse("where", "name places between two layers", lost, fix)
    if not fit:
        names = [name for name, layer in network.named_modules() if name and not list(layer.children())]
        checks.refuse("where", "name places for masks in this network", repr(where), f"Layers: {', '.join(names)}.")
    return graph, fit


def _log_unfit(unfit: list[tuple[fx.Node, tracing.Unplaced]], where: str) -> None:
    """Log the places without a mask and the reasons: as a warning where that is unexpected."""
    for expected in (True, False):
        words = [f"{_title(node)} ({reason})" for node, reason in unfit if reason.expected is expected]
        if words:
            level = logging.INFO if expected else logging.WARNING
            place = "in place of dropout" if where == "dropout" else "behind activations"
            log.log(level, "no mask %s %s", place, ", ".join(words))


def _title(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name


def _first_of_each_span(places: list[tuple[fx.Node, tracing.Span]]) -> list[tuple[fx.Node, tracing.Span]]:
    """Only the first place of every span between two layers."""
    return list({span.producer: (node, span) for node, span in reversed(places)}.values())[::-1]


def _is_named(node: fx.Node, where: Where) -> bool:
    if node.op != "call_module":
        return False
    name = str(node.target)
    return bool(where(name)) if callable(where) else name in where


def insert(graph: fx.GraphModule, node: fx.Node, name: str, *, instead: bool) -> None:
    """Insert a layer of the graph after a node, or in its place."""
    with graph.graph.inserting_after(node):
        mask = graph.graph.call_module(name, (node,))
    node.replace_all_uses_with(mask, delete_user_cb=lambda user: user is not mask)
    if instead:
        mask.replace_input_with(node, node.args[0])  # pyright: ignore[reportArgumentType]  # dropout has one input
        graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()
