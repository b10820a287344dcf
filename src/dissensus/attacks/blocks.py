"""Steps over a batch of which examples fall out: those that are done cost nothing from the next block on.

A step reads nothing on the host. Between blocks of steps, rows that are done are set aside. On a GPU steps are replayed
from CUDA graphs, and rows are set aside by halves, so that graphs of few sizes are enough; rows that are done fill up.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor

from dissensus.attacks.replays import Replays, Step
from dissensus.attacks.rows import Rows, first, padded, put, taken
from dissensus.execution.graphs import Capture

BLOCK = 10
"""Steps between two looks at which examples are done."""
SHARE = 1 / 8
"""The share of rows that must be done to be set aside: copying has a price too."""
ANOTHER = 20
"""Steps that must be left to go on with half the rows, where that asks for new graphs."""


class Steps:
    """The steps of an attack, to be taken from any number of starts.

    Args:
        step: ``(state, kind, numbers) -> state``. It may depend on nothing else that changes, and reads nothing back.
        kinds: What the host decides at each step. Steps of one kind run the same code, and share a graph.
        numbers: What else differs from step to step, read on the device, ``[steps, K]``; by default nothing.
        capture: How steps are captured in graphs; None: they are not.
    """

    def __init__(
        self,
        step: Step,
        kinds: Sequence[Hashable],
        numbers: Shaped[Tensor, "steps K"] | None = None,
        *,
        capture: Capture | None = None,
    ) -> None:
        self.kinds, self.left = kinds, to_come(kinds)
        self.numbers = torch.empty(len(kinds), 0) if numbers is None else numbers
        self.replays = Replays(step, self.numbers, capture)

    def carried_out(self, rows: Rows) -> Rows:
        """The state after all steps. A row that is done stays as it is, whether or not it has been set aside."""
        count, steps = len(rows.done), len(self.kinds)
        if self.replays.capture is not None:
            rows = padded(rows, self.replays.room_for(count))
        whole, places = rows, torch.arange(len(rows.done), device=rows.done.device)
        for index in range(steps):
            rows = self.replays.taken(rows, self.kinds[index], self.numbers[index], self.left[index])
            if (index + 1) % BLOCK == 0 and index + 1 < steps:
                going = (~rows.done).nonzero().squeeze(1)
                if len(going) == 0:
                    break
                size = self._size(len(going), len(rows.done), steps - index - 1)
                if size < len(rows.done):
                    kept = torch.cat([going, rows.done.nonzero().squeeze(1)])[:size]
                    whole = put(whole, places, rows)
                    rows, places = taken(rows, kept), places[kept]
        return first(put(whole, places, rows), count)

    def _size(self, going: int, now: int, left: int) -> int:
        """How many rows to go on with, as many as now or fewer, when so many are going and so many steps are left."""
        if self.replays.capture is None:
            return going if going <= (1 - SHARE) * now else now
        size = self.replays.room_for(going)
        return size if size in self.replays.states or left >= ANOTHER else now


def to_come(kinds: Sequence[Hashable]) -> list[int]:
    """For each step, how many of its kind there are from there on.

    >>> to_come(["first", "plain", "plain", "last"])
    [1, 2, 1, 1]
    """
    seen: Counter[Hashable] = Counter()
    found: list[int] = []
    for kind in reversed(kinds):
        seen[kind] += 1
        found.append(seen[kind])
    return found[::-1]
