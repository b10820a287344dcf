"""Which runs of a sweep train together although their networks differ in width, depth or number: where it is faster.

A step costs time that does not depend on its size, and time per network that does. Padding saves the former and adds
to the latter: everywhere the update of units that are not there, and their passes too, except for perceptrons on a CPU,
which are computed in their own sizes. Runs are put together, pair by pair of groups, as long as that saves time by the
numbers of `COSTS`.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Literal

from dissensus import checks
from dissensus.ensemble import fresh_members
from dissensus.execution import StackedMembers
from dissensus.execution.padding import Layers, Unpaddable, frame_of, layers_of
from dissensus.objectives.declaration import argument, per_member_arguments, unwrapped
from dissensus.objectives.independent import independent
from dissensus.objectives.joint import augmented
from dissensus.train.grid import Run, key_of
from dissensus.train.padded_runs import form
from dissensus.train.recipe import NewMembers, Recipe

log = logging.getLogger("dissensus")

Padding = bool | Literal["auto"]
KINDS = "bias", "norm"


@dataclass(frozen=True)
class StepCost:
    """Microseconds of a training step on some kind of device."""

    step: float
    """Of the step itself, however small it is."""
    shape: float
    """Of each shape beyond the first, where networks are computed in their own sizes."""
    network: float
    """Of each network."""
    number: float
    """Of each weight of a network: the update of the optimizer and its memory."""
    product: float
    """Of each weight and example: the passes forward and backward."""

    def microseconds(self, rows: int, padded: int, own: Sequence[tuple[int, int]] | None, batch: int) -> float:
        """Microseconds of a step.

        Args:
            rows: Networks, those of padding included.
            padded: Weights of each with padding.
            own: Networks and weights of every shape, if they are computed in their own sizes.
            batch: The batch size.
        """
        held = self.step + rows * (self.network + self.number * padded)
        if own is None:
            return held + self.product * batch * rows * padded
        return held + self.shape * (len(own) - 1) + self.product * batch * sum(count * size for count, size in own)


COSTS = {
    "cpu": StepCost(step=750, shape=100, network=1.2, number=1.5e-3, product=2e-4),
    "cuda": StepCost(step=250, shape=0, network=0.02, number=3e-5, product=1e-6),
}
"""By the type of the device; for others, that of a CPU. Rounded from ``benchmarks/sweeps.py`` and ``padding.py``."""


def merged(recipe: Recipe, groups: list[list[int]], padding: Padding) -> list[list[int]]:
    """Groups of runs that train together, from groups of runs of equal shape."""
    if padding is False or len(groups) < 2 or not isinstance(recipe.initial, NewMembers):
        return groups
    required = padding is True
    if not required and recipe.initial.backend not in ("auto", "batched"):
        return groups
    reason = _refusal(recipe)
    sizes = recipe.training_sizes()
    by_key: dict[str, list[list[int]]] = {}
    for group in groups:
        run = recipe.runs[group[0]]
        key = (run.batch_size, key_of(run.words), sorted(run.hyper), sorted(run.optimizer), sizes[group[0]])
        by_key.setdefault(repr(key), []).append(group)
    result: list[list[int]] = []
    for alike in by_key.values():
        result += _together(recipe, alike, reason, required=required) if len(alike) > 1 else alike
    # Runs of one shape lie together, so that passes find their rows side by side.
    return sorted((sorted(part, key=lambda n: (form(recipe.runs[n]), n)) for part in result), key=min)


def _together(recipe: Recipe, groups: list[list[int]], reason: str, *, required: bool) -> list[list[int]]:
    runs = [recipe.runs[group[0]] for group in groups]
    of_members = _members_refusal(recipe, runs) if len({run.members for run in runs}) > 1 else ""
    try:
        if reason:
            raise Unpaddable(reason)
        networks = _layers(recipe, runs)
        if required:
            if of_members:
                raise Unpaddable(of_members)
            frame_of(networks)
            _check_names(recipe, networks)
    except Unpaddable as refusal:
        if required:
            fix = "Use padding='auto', or leave it out of this sweep."
            checks.refuse("padding", "be False or 'auto' for these runs", f"True, but {refusal}", fix)
        log.debug("runs of several shapes train apart: %s", refusal)
        return groups
    if required:
        return [sorted(number for group in groups for number in group)]
    batch = runs[0].batch_size
    parts = [_Part(group, [place], run.members) for place, (group, run) in enumerate(zip(groups, runs, strict=True))]
    cost = COSTS.get(recipe.initial.device.type, COSTS["cpu"])

    def microseconds(part: _Part) -> float | None:
        own = [networks[place] for place in part.shapes]
        if of_members and len({runs[place].members for place in part.shapes}) > 1:
            return None
        try:
            frame = frame_of(own)
            _check_names(recipe, own)
        except Unpaddable:
            return None
        shapes: dict[object, tuple[int, int]] = {}
        for place in part.shapes:
            count = len(groups[place]) * runs[place].members
            known = shapes.get(networks[place].sizes, (0, 0))[0]
            shapes[networks[place].sizes] = (known + count, networks[place].numbers)
        in_own_sizes = recipe.initial.device.type == "cpu" and all(network.is_perceptron for network in own)
        rows = len(part.numbers) * part.members
        return cost.microseconds(rows, frame.numbers, list(shapes.values()) if in_own_sizes else None, batch)

    return [part.numbers for part in _merged_greedily(parts, microseconds)]


@dataclass(frozen=True)
class _Part:
    """Runs that train together."""

    numbers: list[int]
    shapes: list[int]
    members: int

    def __add__(self, other: "_Part") -> "_Part":
        numbers = sorted([*self.numbers, *other.numbers])
        return _Part(numbers, [*self.shapes, *other.shapes], max(self.members, other.members))


def _merged_greedily(parts: Sequence[_Part], seconds: Callable[[_Part], float | None]) -> list[_Part]:
    """Join the two parts that save the most, until no two save anything.

    ``seconds`` are those of a part's step; None for parts that cannot be.
    """
    living = dict(enumerate(parts))
    costs = {number: seconds(part) or 0.0 for number, part in living.items()}
    joined: dict[tuple[int, int], tuple[float, float, _Part]] = {}

    def consider(one: int, other: int) -> None:
        both = living[one] + living[other]
        cost = seconds(both)
        if cost is not None:
            joined[one, other] = (costs[one] + costs[other] - cost, cost, both)

    for one, other in combinations(living, 2):
        consider(one, other)
    while joined:
        pair, (saved, cost, both) = max(joined.items(), key=lambda item: item[1][0])
        if saved <= 0:
            break
        for number in pair:
            del living[number]
        joined = {others: value for others, value in joined.items() if not set(pair) & set(others)}
        new = len(costs)
        living[new], costs[new] = both, cost
        for number in list(living)[:-1]:
            consider(number, new)
    return list(living.values())


def _layers(recipe: Recipe, runs: Sequence[Run]) -> list[Layers]:
    """The layers of a network of each run."""
    assert isinstance(recipe.initial, NewMembers)
    known: dict[str, Layers] = {}
    for run in runs:
        key = key_of(run.build)
        if key not in known:
            build = partial(recipe.initial.build, **run.build)
            known[key] = layers_of(StackedMembers.of(fresh_members(build, run.seed, 1)))
    return [known[key_of(run.build)] for run in runs]


def padded_share(recipe: Recipe, group: Sequence[int]) -> float:
    """How many times the memory of the first run every run of a padded group takes, at most."""
    runs = [recipe.runs[number] for number in group]
    networks = _layers(recipe, runs)
    frame, members = frame_of(networks), max(run.members for run in runs)
    own_units = sum(out for out, _ in networks[0].sizes)
    return members / runs[0].members * max(frame.numbers / networks[0].numbers, frame.units / own_units)


def _refusal(recipe: Recipe) -> str:
    """Why no runs of this recipe can be padded; empty if they can."""
    assert isinstance(recipe.initial, NewMembers)
    name = recipe.optimizer.name
    if recipe.optimizer.make is not None:
        return "an optimizer that is passed may depend on shapes"
    if name == "muon":
        return "'muon' scales its steps by the shapes of matrices"
    if name in ("adam", "adamw") and recipe.optimizer.eps == 0:
        return "with eps=0 units that are not there would become NaN"
    if recipe.active_members is not None:
        return "`active_members` samples members of every run"
    if recipe.initial.shared is not None:
        return "members share weights"
    return "" if recipe.initial.output is None else "the output is chosen from several"


def _members_refusal(recipe: Recipe, runs: Sequence[Run]) -> str:
    """Why runs of several numbers of members cannot be padded; empty if they can."""
    objective, _ = unwrapped(recipe.objective)
    if objective not in (independent, augmented):
        return "numbers of members differ, which the objectives `independent` and `augmented` alone take"
    of_runs = {name for run in runs for name in (*run.hyper, *run.words)}
    if "weights" in of_runs or argument(recipe.objective, "weights") is not None:
        return "numbers of members differ, and the objective has weights of members"
    if per_member_arguments(recipe.objective):
        return "numbers of members differ, and the objective has settings of each member"
    if recipe.validation_settings.per_member:
        return "numbers of members differ, and every member is watched (watch='member')"
    if recipe.batches.bootstrap:
        return "numbers of members differ, and examples are drawn for each (bootstrap=True)"
    if recipe.batches.augment is not None and not callable(recipe.batches.augment):
        return "numbers of members differ, and each has an augmentation"
    return ""


def _check_names(recipe: Recipe, networks: Sequence[Layers]) -> None:
    """Refuse patterns of names where depths differ: the last layer then has several names."""
    patterns = recipe.optimizer.no_decay
    named = not isinstance(patterns, bool) and any(pattern not in KINDS for pattern in patterns)
    if named and len({network.names for network in networks}) > 1:
        raise Unpaddable("`no_decay` has patterns of names, and layers of networks of other depth have other names")
