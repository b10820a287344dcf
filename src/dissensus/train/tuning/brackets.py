"""Successive halving and Hyperband: how many candidates are trained for how long.

Jamieson and Talwalkar (2016), Algorithm 1; Li et al. (2018), "Hyperband", Algorithm 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bracket:
    """Candidates that compete: how many are left after each rung, and how long the last ones are trained."""

    sizes: tuple[int, ...]
    """Candidates at the beginning, and after each rung but the last."""
    rungs: tuple[int, ...]
    """Epochs up to which each of these is trained; the last is that of whole trainings."""

    @property
    def cost(self) -> int:
        """Epochs of all candidates together, without a restart."""
        return self._cost(self.sizes)

    def cost_of_share(self, candidates: int) -> int:
        """Epochs of candidates beside these, of which an equal share goes on at each rung, and one at least.

        >>> halving(9, 9).cost_of_share(1), halving(9, 9).cost_of_share(3), halving(9, 9).cost_of_share(0)
        (9, 11, 0)
        """
        return self._cost([left_of(candidates, size, self.sizes[0]) for size in self.sizes])

    def _cost(self, sizes: Sequence[int]) -> int:
        before = (0, *self.rungs)
        return sum(size * (rung - start) for size, start, rung in zip(sizes, before, self.rungs, strict=False))


def left_of(candidates: int, size: int, first: int) -> int:
    """How many of some candidates are left where ``size`` of ``first`` are: their share, and one at least.

    >>> left_of(4, 3, 9), left_of(4, 9, 9), left_of(0, 3, 9)
    (1, 4, 0)
    """
    return min(candidates, max(1, math.floor(candidates * size / first + 1e-9)))


def most_halvings(epochs: int, factor: float, first: int = 1) -> int:
    """s_max = ⌊log_η(R / r)⌋: how often candidates can be dropped if all train for ``first`` epochs at least.

    >>> most_halvings(81, 3), most_halvings(80, 3), most_halvings(81, 3, 9), most_halvings(1, 3)
    (4, 3, 2, 0)
    """
    return max(0, math.floor(math.log(epochs / first) / math.log(factor) + 1e-9))


def hyperband(epochs: int, factor: float = 3.0, first: int = 1) -> list[Bracket]:
    """The brackets s = s_max, ..., 0 of Hyperband, from the boldest to plain training.

    Bracket s begins with n = ⌈(s_max + 1) η^s / (s + 1)⌉ candidates, of which ⌊n η^−i⌋ are trained up to R η^(i−s)
    epochs, i = 0, ..., s. Survivors go on, so that a rung costs the epochs since the rung before.

    >>> [bracket.sizes for bracket in hyperband(81)]
    [(81, 27, 9, 3, 1), (34, 11, 3, 1), (15, 5, 1), (8, 2), (5,)]
    >>> hyperband(81)[0].rungs
    (1, 3, 9, 27, 81)
    """
    most = most_halvings(epochs, factor, first)
    return [
        bracket_of(math.ceil((most + 1) * factor**s / (s + 1) - 1e-9), epochs, factor, s) for s in range(most, -1, -1)
    ]


def halving(candidates: int, epochs: int, factor: float = 3.0, first: int = 1) -> Bracket:
    """One bracket for a number of candidates: about log_η n halvings, or as many as the epochs allow.

    >>> halving(11, 27), halving(5, 27).sizes
    (Bracket(sizes=(11, 3, 1), rungs=(3, 9, 27)), (5, 1))
    >>> halving(2, 27), halving(1, 27).rungs
    (Bracket(sizes=(2, 1), rungs=(9, 27)), (27,))
    """
    by_number = round(math.log(max(candidates, 1)) / math.log(factor))
    return bracket_of(candidates, epochs, factor, min(most_halvings(epochs, factor, first), by_number))


def bracket_of(candidates: int, epochs: int, factor: float, halvings: int) -> Bracket:
    """A bracket with a number of halvings; rungs that would fall on the same epoch are one."""
    rungs, sizes = list[int](), list[int]()
    for i in range(halvings + 1):
        rung = max(1, round(epochs * factor ** (i - halvings)))
        size = max(1, math.floor(candidates / factor**i + 1e-9))
        if rungs and rung == rungs[-1]:
            continue
        rungs.append(rung)
        sizes.append(size)
    rungs[-1] = epochs
    return Bracket(tuple(sizes), tuple(rungs))
