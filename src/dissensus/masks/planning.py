"""What masks cost: given a budget and N, which M and S, and how much members have in common."""

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
    """One way to spend a budget; shares are of the single network's."""

    scale: float
    """S."""
    iou: float
    """What two members have in common: 1 / (2S − 1)."""
    ones: float
    """Channels of a member in masked layers (M)."""
    width: float
    """Channels of the whole network in masked layers."""
    member: float
    """What a member costs by itself."""
    total: float
    """What the whole network costs: the budget."""


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
    """For each scale, how wide a masked network may be at a budget, and what its members then are.

    The cost of a network whose masked layers are r times as wide is a + b·r + d·r²: some layers are widened on no
    side, some on one, some on both. The budget decides r; S decides how r is shared out among members.

    Args:
        network: The single network; not changed.
        count: N.
        budget: Times what the single network costs.
        scales: S, each of which gives a row.
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
        least = f"{fixed / single:.3g}, what its layers without masks cost"
        checks.refuse("budget", f"be more than {least}", budget)
    rest = fixed - budget * single
    # the positive root, in a form that stands d = 0
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
    """(a, b, d): what layers cost that masks widen on no side, on one, on both.

    >>> coefficients(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)))
    (4.0, 832.0, 0.0)
    """
    checks.one_of("cost", cost, ("parameters", "multiply_adds"))
    graph, found = places(network, where)
    makes = {name for _, span in found for name in (span.producer, *span.norms)}
    takes = {name for _, span in found for name in span.consumers}
    positions = _positions(graph, x) if cost == "multiply_adds" else {}
    totals = [0.0, 0.0, 0.0]
    for name, layer in graph.named_modules():
        own = dict(layer.named_parameters(recurse=False))
        for key, tensor in own.items():
            if cost == "multiply_adds" and (key != "weight" or not isinstance(layer, WEIGHTED)):
                continue
            both = key == "weight" and isinstance(layer, WEIGHTED)
            sides = (name in makes) + (both and name in takes)
            totals[sides] += tensor.numel() * positions.get(name, 1)
    return totals[0], totals[1], totals[2]


@torch.no_grad()
def _positions(graph: fx.GraphModule, x: Tensor | None) -> dict[str, int]:
    """At how many places of one example each layer's weights are used."""
    if x is None:
        checks.refuse("x", "be given to count multiply-adds", "none", "An input such as torch.zeros(1, 3, 32, 32).")
    seen: dict[str, int] = {}

    def note(name: str) -> Any:
        def hook(layer: nn.Module, _: Any, output: Tensor) -> None:
            channels = output.shape[-1] if isinstance(layer, nn.Linear) else output.shape[1]
            seen[name] = seen.get(name, 0) + output[0].numel() // channels

        return hook

    hooks = [
        layer.register_forward_hook(note(name)) for name, layer in graph.named_modules() if isinstance(layer, WEIGHTED)
    ]
    try:
        graph.eval()(x[:1])
    finally:
        for hook in hooks:
            hook.remove()
    return seen
