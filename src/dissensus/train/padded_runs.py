"""Runs of several widths, depths and numbers of members in one body, and each run's own members out of it.

Each run remains what it would be alone: initial weights and dropout are those of its own shape. Members that a run does
not have are zero, and the objective gives them no weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from dissensus.ensemble import fresh_members
from dissensus.execution import Body, StackedMembers
from dissensus.execution.padding import Frame, Held, Layers, frame_of, layers_of, padded, unpadded
from dissensus.train.grid import Run, key_of


def differ(runs: Sequence[Run]) -> bool:
    """Whether members of these runs differ in shape or number, so that they need padding to train together."""
    return len({form(run) for run in runs}) > 1


def form(run: Run) -> tuple[str, int]:
    """What determines the shape of a run's members, and their number."""
    return key_of(run.build), run.members


@dataclass(frozen=True)
class OwnShape:
    """Runs of one shape among others."""

    runs: list[int]
    """Places of the runs."""
    members: int
    build: dict[str, Any]
    layers: Layers
    single: StackedMembers
    """A body of one member of this shape."""


@dataclass(frozen=True)
class HeldColumns:
    """Columns of a layer that is the identity in some rows, which training must not change."""

    start: int
    stop: int
    rows: Bool[Tensor, " G"]
    """Those rows."""
    values: Tensor | None
    """What the columns hold in those rows ``[G, n]``; None where no weights decay, so that nothing moves them."""

    blocks: tuple[slice, ...] = field(init=False)
    """Those rows as neighbours, which most are: runs of one shape lie together."""

    def __post_init__(self) -> None:
        edges = torch.nn.functional.pad(self.rows.long(), (1, 1)).diff().cpu()
        starts, stops = ((edges == step).nonzero().flatten().tolist() for step in (1, -1))
        object.__setattr__(self, "blocks", tuple(map(slice, starts, stops)))

    def still(self, grad: Tensor) -> None:
        """Set the gradient of these columns to zero, in place."""
        for block in self.blocks:
            grad[block, self.start : self.stop].zero_()

    def restore(self, flat: Tensor) -> None:
        """Undo weight decay, in place."""
        if self.values is not None:
            for block in self.blocks:
                flat[block, self.start : self.stop].copy_(self.values[block])

    def select(self, rows: Tensor) -> "HeldColumns":
        """Some of the rows."""
        values = None if self.values is None else self.values[rows]
        return HeldColumns(self.start, self.stop, self.rows[rows], values)


@dataclass(frozen=True)
class PaddedRuns:
    """Members of runs of several shapes as rows of one body, M rows per run."""

    body: StackedMembers
    members: int
    """The largest number of members of a run."""
    own_members: list[int]
    """Members of every run."""
    shapes: list[OwnShape]
    frame: Frame
    held: list[Held]

    @classmethod
    def of(cls, build: Callable[..., nn.Module], runs: Sequence[Run]) -> "PaddedRuns":
        """New members for some runs; `Unpaddable` where their networks have no common shape."""
        members = max(run.members for run in runs)
        drawn = {key: _drawn(build, [run for run in runs if form(run)[0] == key]) for key, _ in map(form, runs)}
        shapes: list[OwnShape] = []
        bodies: list[StackedMembers] = []
        rows: list[Tensor] = []
        for key in dict.fromkeys(map(form, runs)):
            body, seeds, most = drawn[key[0]]
            places = [place for place, run in enumerate(runs) if form(run) == key]
            own = range(key[1])
            bodies.append(
                body.subset([seeds.index(runs[place].seed) * most + member for place in places for member in own])
            )
            rows.append(torch.tensor([place * members + member for place in places for member in own]))
            shapes.append(OwnShape(places, key[1], runs[places[0]].build, layers_of(body), body.subset([0])))
        networks = [shape.layers for shape in shapes]
        body, held = padded(bodies, networks, rows, len(runs) * members)
        return cls(body, members, [run.members for run in runs], shapes, frame_of(networks), held)

    def held_columns(self, flat: Tensor, *, decays: bool) -> list[HeldColumns]:
        """The columns of the matrix of all weights that training must not change."""
        result: list[HeldColumns] = []
        stops = torch.tensor([shape.numel() for shape in self.body.layout().shapes.values()]).cumsum(0).tolist()
        for (name, shape), stop in zip(self.body.layout().shapes.items(), stops, strict=True):
            start = stop - shape.numel()
            for held in self.held:
                if name in held.names:
                    own = held.values(flat[:, start:stop].unflatten(1, shape)).flatten(1) if decays else None
                    result.append(HeldColumns(start, stop, held.rows.to(flat.device), own))
        return result

    def weights(self, like: Tensor) -> Tensor | None:
        """The share of every member in its run ``[R, M]``, zero for those that are not there; None if all have M."""
        own = torch.tensor(self.own_members, device=like.device).unsqueeze(1)
        if bool((own == self.members).all()):
            return None
        return (torch.arange(self.members, device=like.device) < own).to(like.dtype) / own

    def unpadded(self, body: Body) -> list[tuple[OwnShape, StackedMembers]]:
        """The trained members of each shape in their own networks, run by run."""
        assert isinstance(body, StackedMembers)
        whole = self.shapes[self.frame.deepest].layers
        device = next(body.parameters()).device
        result: list[tuple[OwnShape, StackedMembers]] = []
        for shape in self.shapes:
            rows = [run * self.members + member for run in shape.runs for member in range(shape.members)]
            single = shape.single.to(device=device, dtype=next(body.parameters()).dtype)
            single.request_backend(body.requested_backend)
            own = unpadded(body, self.frame, whole, torch.tensor(rows, device=device), shape.layers, single)
            result.append((shape, own.train(body.training)))
        return result


def _drawn(build: Callable[..., nn.Module], runs: Sequence[Run]) -> tuple[StackedMembers, list[int], int]:
    """Members of all seeds of runs of one shape, the seeds, and members of each."""
    seeds, members = list(dict.fromkeys(run.seed for run in runs)), max(run.members for run in runs)
    build = partial(build, **runs[0].build)
    return (
        StackedMembers.of(network for seed in seeds for network in fresh_members(build, seed, members)),
        seeds,
        members,
    )
