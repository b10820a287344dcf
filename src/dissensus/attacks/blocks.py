"""Steps of an attack on a batch from which examples drop out: those that are done cost nothing from the next block on.

A step reads nothing on the host. Between blocks of steps, rows that are done are set aside. Steps on a GPU are replayed
from CUDA graphs. Rows are then set aside by halves, so that graphs of few sizes suffice; rows that are done fill up the
rest. Graphs read and write states that stay where they are, one for each number of rows, and the numbers of the step.
A run shares nothing else with earlier runs, so restarts, targets and constants share their graphs.
"""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from dissensus.attacks.rows import Rows, clone, head, overwrite, pad, scatter, select, unless_done
from dissensus.execution.graphs import Capture
from dissensus.execution.replay import GraphCache, Recording

Step = Callable[[Any, Any, Tensor], Any]
"""``(state, kind, numbers) -> state``."""

BLOCK, HOST_BLOCK = 10, 1
"""Steps between two checks of which examples are done, on a GPU and on a CPU, which need not be waited for."""
FEWEST = 2
"""Examples that go on together, if there are so many: batch norm in training refuses one."""
ANOTHER = 20
"""Steps that must remain to go on with half the rows, if that requires new graphs."""
WORTH = 5
"""Steps of a kind that must remain for a graph to be worth its capture."""
LEAST = 8
"""The smallest number of rows: half of them would take as much time."""


class Steps:
    """The steps of an attack, which can be taken from any number of starting states.

    Args:
        step: ``(state, kind, numbers) -> state``. It may depend on nothing else that changes, and reads nothing back.
        kinds: What the host decides at each step. Steps of one kind run the same code and share a graph.
        numbers: What else differs from step to step, read on the device, ``[steps, K]``; by default nothing.
        capture: The way to capture steps in graphs; None: every step runs eagerly.
    """

    def __init__(
        self,
        step: Step,
        kinds: Sequence[Hashable],
        numbers: Shaped[Tensor, "steps K"] | None = None,
        *,
        capture: Capture | None = None,
    ) -> None:
        self.step, self.kinds, self.remaining = step, kinds, remaining(kinds)
        self.numbers = torch.empty(len(kinds), 0) if numbers is None else numbers
        self.cache = GraphCache("steps of the attack", lambda: capture, warm_up=1)
        self.sizes: list[int] = []
        self.states: dict[int, Any] = {}
        """The state that graphs read and write, by number of rows."""
        self.step_numbers = self.numbers.new_empty(self.numbers.shape[1:])
        """The numbers that graphs read."""

    def carried_out(self, rows: Rows) -> Rows:
        """The state after all steps. A row that is done does not change, whether or not it has been set aside."""
        count, steps = len(rows.done), len(self.kinds)
        if self.cache.enabled:
            rows = pad(rows, self._padded_size(count))
        all_rows = len(rows.done)
        block = HOST_BLOCK if rows.done.device.type == "cpu" and not self.cache.enabled else BLOCK
        result, places = rows, torch.arange(len(rows.done), device=rows.done.device)
        for index in range(steps):
            rows = self._next(rows, index)
            if (index + 1) % block == 0 and index + 1 < steps:
                going = (~rows.done).nonzero().squeeze(1)
                if len(going) == 0:
                    break
                size = self._size(len(going), len(rows.done), steps - index - 1)
                if size < len(rows.done):
                    kept = torch.cat([going, rows.done.nonzero().squeeze(1)])[:size]
                    result = scatter(result, places, rows)
                    rows, places = select(rows, kept), places[kept]
        if len(places) == all_rows and not self.cache.enabled:  # the memory of no graph, in the order of the result
            return rows
        return head(scatter(result, places, rows), count)

    def _next(self, rows: Rows, index: int) -> Rows:
        """The state after a step, which may be the memory of a graph."""
        kind, numbers = self.kinds[index], self.numbers[index]
        record = functools.partial(self._recording, rows, kind)
        worthwhile = self.remaining[index] >= WORTH
        graph = self.cache.graph((len(rows.done), kind), record, worthwhile=worthwhile)
        if graph is not None:
            return graph(*rows, numbers)
        after = self.step(rows, kind, numbers)
        if rows.done.device.type == "cpu" and not rows.done.any():  # a GPU would have to be waited for
            return after
        return unless_done(rows, after)

    def _recording(self, rows: Any, kind: Hashable) -> Recording:
        size = len(rows.done)
        if size not in self.states:
            self.states[size] = clone(rows)
        state = self.states[size]

        def whole_step() -> Any:
            overwrite(state, unless_done(state, self.step(state, kind, self.step_numbers)))
            return state

        return Recording(whole_step, (*state, self.step_numbers))

    def _size(self, going: int, now: int, left: int) -> int:
        """The number of rows to go on with, at most as many as now, from the rows that are going and the steps left."""
        if not self.cache.enabled:
            going = min(max(going, FEWEST), now)
            return going if (now - going) * left >= now else now  # copying takes less time than a step
        size = self._padded_size(going)
        return size if size in self.states or left >= ANOTHER else now

    def _padded_size(self, count: int) -> int:
        """The smallest of the first run's size and its halves that is at least ``count``."""
        if not self.sizes or count > self.sizes[0]:
            self.sizes = halves(count)
        return min(size for size in self.sizes if size >= count)


def remaining(kinds: Sequence[Hashable]) -> list[int]:
    """For each step, the number of steps of its kind from there on.

    >>> remaining(["first", "plain", "plain", "last"])
    [1, 2, 1, 1]
    """
    counter: Counter[Hashable] = Counter()
    counts: list[int] = []
    for kind in reversed(kinds):
        counter[kind] += 1
        counts.append(counter[kind])
    return counts[::-1]


def halves(size: int) -> list[int]:
    """A number, its half, half of that and so on, rounded up.

    >>> halves(100)
    [100, 50, 25, 13]
    """
    sizes = [size]
    while (half := (sizes[-1] + 1) // 2) >= LEAST:
        sizes.append(half)
    return sizes
