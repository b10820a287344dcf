"""Steps of an attack as CUDA graphs: one for each number of rows and each kind of step, replayed without the host.

Graphs read and write states that stay where they are, one for each number of rows, and the numbers of the step. What a
run does not share with the runs before it is all in there, so that restarts, targets and constants share their graphs.
"""

import functools
import logging
import random
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dissensus.attacks.rows import Rows, copied, held, write
from dissensus.execution.graphs import Capture, captured, on
from dissensus.execution.skeleton import first_line

log = logging.getLogger("dissensus")

Step = Callable[[Any, Any, Tensor], Any]
"""``(state, kind, numbers) -> state``."""

WORTH = 5
"""Steps of a kind that must be left for a graph to be worth its making."""
LEAST = 8
"""Rows that are not halved any more: so few cost no less than half of them."""


class Replays:
    """Takes steps: eagerly at first, and from a graph once a kind has been seen and comes often enough.

    What cannot be captured runs eagerly, with a notice of one line; ``capture`` is None from then on.
    """

    def __init__(self, step: Step, numbers: Tensor, capture: Capture | None) -> None:
        self.step, self.capture = step, capture
        self.numbers = numbers.new_empty(numbers.shape[1:])
        """What graphs read as the numbers of a step."""
        self.sizes: list[int] = []
        self.states: dict[int, Any] = {}
        self.graphs: dict[tuple[int, Hashable], Callable[[], None]] = {}
        self.seen: set[tuple[int, Hashable]] = set()

    def room_for(self, count: int) -> int:
        """The least number of rows, by halves of the first and largest run's, that holds so many."""
        if not self.sizes or count > self.sizes[0]:
            self.sizes = halves(count)
        return min(size for size in self.sizes if size >= count)

    def taken(self, rows: Rows, kind: Hashable, numbers: Tensor, left: int) -> Rows:
        """The state after a step; of steps of this kind so many are left, this one included."""
        key = (len(rows.done), kind)
        if self.capture is not None and left >= WORTH and key in self.seen and key not in self.graphs:
            self._record(rows, key, self.capture)
        self.seen.add(key)  # it has run eagerly: libraries have set themselves up
        if key not in self.graphs:
            return held(rows, self.step(rows, kind, numbers))
        state = self.states[key[0]]
        write(state, rows)
        self.numbers.copy_(numbers)
        self.graphs[key]()
        return state

    def _record(self, rows: Any, key: tuple[int, Hashable], capture: Capture) -> None:
        """Capture a step, or say in one line why not."""
        size, kind = key
        state = self.states[size] = self.states.get(size) or copied(rows)

        def whole_step() -> None:
            write(state, held(state, self.step(state, kind, self.numbers)))

        before = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
        try:
            self.graphs[key] = capture(whole_step, ())
            if not torch.equal(before[0], torch.get_rng_state()):
                raise RuntimeError("the model draws random numbers on the host, which a graph would repeat")
        except RuntimeError as reason:
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            np.random.set_state(before[2])  # noqa: NPY002
            self.capture = None
            self.graphs.clear()
            log.warning("steps of the attack are not captured in a graph: %s", first_line(reason))


def halves(size: int) -> list[int]:
    """A number, its half, half of that and so on, rounded up.

    >>> halves(100)
    [100, 50, 25, 13]
    """
    found = [size]
    while (half := (found[-1] + 1) // 2) >= LEAST:
        found.append(half)
    return found


def capture_on(device: torch.device) -> Capture | None:
    """How steps are captured there, if they are. Graphs share one pool of memory, since no two run at once."""
    if device.type != "cuda":
        return None
    with on(device):  # threads of the caller, such as a loader's, may call CUDA meanwhile
        return functools.partial(captured, pool=torch.cuda.graph_pool_handle(), watch="thread_local")
