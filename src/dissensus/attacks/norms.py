"""L∞ and L2: lengths of perturbations, steepest steps, random starts, and balls that hold exactly in floating point.

A point is in a ball if the subtraction with which a reader would check it says so: max |x' − x| ≤ ε for L∞. Sums over
an example are computed pairwise in a fixed order, so that an example's length does not depend on its batch.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dissensus import checks
from dissensus.attacks.random_numbers import uniform

NormName = Literal["linf", "l2"]
Points = Float[Tensor, "B *S"]
Lengths = Float[Tensor, " B"]
Reach = float | Float[Tensor, "B *_"]
"""ε: one number, or a tensor that broadcasts against a batch of examples."""
SLACK = 1e-6
"""Relative amount by which an L2 length may exceed ε, because sums are rounded."""


class Bounds(NamedTuple):
    """Smallest and largest value that each number of a point may take."""

    least: Points
    largest: Points


def linf_lengths(change: Points) -> Lengths:
    """Largest absolute change of each example.

    >>> linf_lengths(torch.tensor([[3.0, -4.0]]))
    tensor([4.])
    """
    flat = change.flatten(1)
    return torch.maximum(flat.amax(1), -flat.amin(1))


def l2_lengths(change: Points) -> Lengths:
    """Euclidean length of each example's change.

    >>> l2_lengths(torch.tensor([[3.0, -4.0]]))
    tensor([5.])
    """
    return sums(change.flatten(1).square()).sqrt()


def l1_lengths(change: Points) -> Lengths:
    """Sum of each example's absolute changes.

    >>> l1_lengths(torch.tensor([[3.0, -4.0]]))
    tensor([7.])
    """
    return sums(change.flatten(1).abs())


def l0_lengths(change: Points) -> Lengths:
    """Number of values of each example that change.

    >>> l0_lengths(torch.tensor([[3.0, 0.0]]))
    tensor([1.])
    """
    return (change.flatten(1) != 0).sum(1).to(change.dtype)


def sums(values: Float[Tensor, "B D"]) -> Lengths:
    """Sums of rows: one half is added to the other until one number is left. The same in any batch, on any device.

    >>> sums(torch.tensor([[1.0, 2.0, 4.0]]))
    tensor([7.])
    """
    while values.shape[1] > 1:
        half, odd = (values.shape[1] + 1) // 2, values.shape[1] % 2
        other = values[:, half:]
        values = values[:, :half] + (F.pad(other, (0, 1)) if odd else other)
    return values.squeeze(1)


def per_example(values: Tensor, like: Tensor) -> Tensor:
    """Values ``[B]`` with as many axes as ``like``, so that they broadcast against it."""
    return values.view(-1, *[1] * (like.ndim - 1))


def unit(change: Points) -> Points:
    """Each example's change at L2 length one. Zero stays zero, and the smallest gradient still counts.

    >>> unit(torch.tensor([[3e-30, -4e-30], [0.0, 0.0]]))
    tensor([[ 0.6000, -0.8000],
            [ 0.0000,  0.0000]])
    """
    tiny = torch.finfo(change.dtype).tiny
    scaled = change / per_example(linf_lengths(change).clamp_min(tiny), change)
    return scaled / per_example(l2_lengths(scaled).clamp_min(tiny), change)


def toward(x: Points, change: Points) -> Points:
    """x + change, rounded towards x, so that the computed |x' − x| is at most |change|."""
    return _at_most(x, x + change, change.abs())


def _at_most(x: Points, moved: Points, reach: Reach) -> Points:
    """Moved points, or their neighbours towards x where rounding has moved them farther than a reach."""
    too_far = (moved - x).abs_().sub_(reach).sign_().clamp_(min=0)  # the sign of a difference is exact
    # Exact, and on a CPU faster than a choice by a mask of rounding errors, which no processor can foresee.
    return torch.nextafter(moved, x).sub_(moved).mul_(too_far).add_(moved)


def _linf_bounds(x: Points, epsilon: Reach) -> Bounds:
    return Bounds(_at_most(x, x - epsilon, epsilon), _at_most(x, x + epsilon, epsilon))


def _no_bounds(x: Points, _epsilon: Reach) -> Bounds:
    return Bounds(torch.full_like(x, -torch.inf), torch.full_like(x, torch.inf))


def _inside_its_bounds(_x: Points, moved: Points, _epsilon: Reach) -> Points:
    return moved


def _l2_projected(x: Points, moved: Points, epsilon: Reach) -> Points:
    change = moved - x
    length = per_example(l2_lengths(change), x)
    shrunk = toward(x, change * (epsilon / length.clamp_min(torch.finfo(x.dtype).tiny)).clamp_max(1.0))
    return torch.where(length > epsilon, shrunk, moved)


def _linf_random(x: Points, key: Int[Tensor, " B"]) -> Points:
    return 2 * uniform(key, x.shape[1:]).to(x.dtype) - 1


def _l2_random(x: Points, key: Int[Tensor, " B"]) -> Points:
    """Uniform in the ball: a normal direction times the D-th root of a uniform number."""
    numbers = uniform(key, (x[0].numel() + 1,)).to(x.dtype)
    direction = unit(torch.special.ndtri(numbers[:, 1:]))
    return (direction * numbers[:, :1] ** (1 / x[0].numel())).view(x.shape)


class Norm(NamedTuple):
    """The functions of a norm that attacks use."""

    lengths: Callable[[Points], Lengths]
    steepest: Callable[[Points], Points]
    """Step of length one with the steepest ascent along a gradient."""
    bounds: Callable[[Points, Reach], Bounds]
    """Bounds of points within ε of x. In L∞ they are the ball."""
    projected: Callable[[Points, Points, Reach], Points]
    """Nearest point within ε of x, up to the bounds."""
    random: Callable[[Points, Int[Tensor, " B"]], Points]
    """Uniform draw from the ball of radius one."""


NORMS: dict[str, Norm] = {
    "linf": Norm(linf_lengths, torch.sign, _linf_bounds, _inside_its_bounds, _linf_random),
    "l2": Norm(l2_lengths, unit, _no_bounds, _l2_projected, _l2_random),
}


LARGEST = 1e30
"""The largest step or weight that attacks take: products with it stay finite in float32."""


def check_reach(norm: str, epsilon: float, box: tuple[float, float]) -> None:
    """Refuse an L∞ ε that is wider than the box of valid inputs: it is in other units."""
    low, high = box
    if norm == "linf" and epsilon > high - low:
        fix = f"Of 256 shades? Use {epsilon:g}/255."
        checks.refuse("epsilon", f"be at most {high - low:g}, the width of inputs in [{low:g}, {high:g}]", epsilon, fix)


class Ball(NamedTuple):
    """Points within ε of an example and inside the box of valid inputs. No method reads values on the host."""

    norm: str
    epsilon: Reach
    low: float
    high: float

    @classmethod
    def checked(cls, norm: str, epsilon: float, box: tuple[float, float], like: Tensor) -> "Ball":
        """Ball from user input. ε is rounded down to the precision of ``like``, so that no reader finds it exceeded."""
        checks.one_of("norm", norm, NORMS)
        checks.number("epsilon", epsilon, 0.0)
        check_reach(norm, epsilon, box)
        return cls(norm, largest_at_most(epsilon, like.dtype), *box)

    @property
    def limit(self) -> Reach:
        """Largest length that a perturbation may have."""
        return self.epsilon if self.norm == "linf" else self.epsilon * (1 + SLACK)

    def lengths(self, change: Points) -> Lengths:
        """Lengths in the ball's norm."""
        return NORMS[self.norm].lengths(change)

    def steepest(self, gradient: Points) -> Points:
        """Steps of length one with the steepest ascent along a gradient; zero where the gradient is zero."""
        return NORMS[self.norm].steepest(gradient)

    def bounds(self, x: Points) -> Bounds:
        """Bounds of the points around x, in ball and box: computed once for all points that are projected."""
        least, largest = NORMS[self.norm].bounds(x, self.epsilon)
        return Bounds(least.clamp(self.low, self.high), largest.clamp(self.low, self.high))

    def projected(self, x: Points, moved: Points, bounds: Bounds | None = None) -> Points:
        """Nearest points of the ball around x, then clipped to the box, which takes no point farther from x.

        ``bounds`` are those of x, if they are known.
        """
        least, largest = self.bounds(x) if bounds is None else bounds
        return NORMS[self.norm].projected(x, moved, self.epsilon).clamp(least, largest)

    def edge(self, x: Points, gradient: Points, step_size: float) -> Points:
        """Points after one step from x along a gradient, projected; without bounds, which serve many steps."""
        if self.norm != "linf" or not isinstance(self.epsilon, float) or step_size < self.epsilon:
            return self.projected(x, x + step_size * self.steepest(gradient))
        moved = self.steepest(gradient).mul_(self.epsilon).add_(x)
        return _at_most(x, moved, self.epsilon).clamp_(self.low, self.high)

    def random(self, x: Points, key: Int[Tensor, " B"], bounds: Bounds | None = None) -> Points:
        """Points drawn uniformly from the ball around x, then clipped to the box."""
        return self.projected(x, x + self.epsilon * NORMS[self.norm].random(x, key), bounds)


def largest_at_most(value: float, dtype: torch.dtype) -> float:
    """Largest number of a precision that is not above ``value``.

    >>> largest_at_most(0.1, torch.float32) < 0.1 < float(torch.tensor(0.1))
    True
    """
    nearest = torch.tensor(value, dtype=dtype)
    if nearest.item() > value:
        nearest = torch.nextafter(nearest, torch.tensor(float("-inf"), dtype=dtype))
    return nearest.item()
