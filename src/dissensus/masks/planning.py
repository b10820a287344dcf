"""Cost of masked networks: M, S and the overlap of members for a budget and N."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn

from dissensus import checks
from dissensus.masks.generation import expected_iou, expected_width
from dissensus.masks.layouts import WEIGHTED
from dissensus.masks.network import Where, places

Cost = Literal["parameters", "multiply_adds"]
SCALES = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)


class Plan(NamedTuple):
    """A masked network for a budget. All shares are relative to the single network."""

    scale: float
    """S."""
    iou: float
    """Intersection over union of two members' channels: 1 / (2S − 1)."""
    ones: float
    """Channels of a member in masked layers (M)."""
    width: float
    """Channels of the whole network in masked layers."""
    member: float
    """Cost of a single member."""
    total: float
    """Cost of the whole network, which is the budget."""


def plan(
    network: nn.Module,
    count: int,
    budget: float,
    *,
    scales: Sequence[float] = SCALES,
    cost: Cost = "parameters",
    x: Tensor | None = None,
    where: Where = "activations",
) -> list[Plan]:
    """Width of a masked network and of its members at a budget, for each scale.

    The cost of a network whose masked layers are r times as wide is a + b·r + d·r², for layers that are widened on no
    side, on one side and on both. The budget determines r; S determines how members share it.

    Args:
        network: The single network, which is not changed.
        count: N.
        budget: Multiple of the single network's cost.
        scales: Values of S, one per row.
        cost: ``"parameters"``, or ``"multiply_adds"`` of one example under one mask, for which ``x`` is needed.
        x: An input, ``[1, ...]``.
        where: As in `convert`.

    >>> rows = plan(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)), 4, 1.0, scales=[2.0])
    >>> tuple(round(value, 3) for value in rows[0])
    (2.0, 0.333, 0.533, 1.0, 0.536, 1.0)
    """
    checks.count("count", count)
    checks.number("budget", budget, 0)
    fixed, once, twice = coefficients(network, cost=cost, x=x, where=where)
    single = fixed + once + twice
    if budget * single <= fixed:
        least = f"{fixed / single:.3g}, the cost of its layers without masks"
        checks.refuse("budget", f"be more than {least}", budget)
    rest = fixed - budget * single
    # the positive root, in a form that allows d = 0
    width = 2 * -rest / (once + math.sqrt(once**2 - 4 * twice * rest))
    rows: list[Plan] = []
    for scale in scales:
        ones = width / expected_width(count, 1, scale)
        member = (fixed + once * ones + twice * ones**2) / single
        rows.append(Plan(float(scale), expected_iou(scale), ones, width, member, budget))
    return rows


def coefficients(
    network: nn.Module, *, cost: Cost = "parameters", x: Tensor | None = None, where: Where = "activations"
) -> tuple[float, float, float]:
    """(a, b, d): cost of the layers that masks widen on no side, on one side and on both.

    >>> coefficients(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)))
    (4.0, 832.0, 0.0)
    """
    checks.one_of("cost", cost, ("parameters", "multiply_adds"))
    graph, mask_places = places(network, where)
    makes = {name for _, span in mask_places for name in (span.producer, *span.norms)}
    takes = {name for _, span in mask_places for name in span.consumers}
    positions = _positions(graph, x) if cost == "multiply_adds" else {}
    totals = [0.0, 0.0, 0.0]
    for name, layer in graph.named_modules():
        for key, tensor in layer.named_parameters(recurse=False):
            if cost == "multiply_adds" and (key != "weight" or not isinstance(layer, WEIGHTED)):
                continue
            both = key == "weight" and isinstance(layer, WEIGHTED)
            sides = (name in makes) + (both and name in takes)
            totals[sides] += tensor.numel() * positions.get(name, 1)
    return totals[0], totals[1], totals[2]


@torch.no_grad()
def _positions(graph: fx.GraphModule, x: Tensor | None) -> dict[str, int]:
    """Number of positions of one example at which each layer's weights are used."""
    if x is None:
        checks.refuse("x", "be an input, to count multiply-adds", "None", "Use torch.zeros(1, 3, 32, 32).")
    positions: dict[str, int] = {}

    def note(name: str) -> Any:
        def hook(layer: nn.Module, _: Any, output: Tensor) -> None:
            channels = output.shape[-1] if isinstance(layer, nn.Linear) else output.shape[1]
            positions[name] = positions.get(name, 0) + output[0].numel() // channels

        return hook

    hooks = [
        layer.register_forward_hook(note(name)) for name, layer in graph.named_modules() if isinstance(layer, WEIGHTED)
    ]
    try:
        graph.eval()(x[:1])
    finally:
        for hook in hooks:
            hook.remove()
    return positions
