"""Computations that run many times: eagerly at first, then replayed from CUDA graphs, one for each shape.

A graph reads and writes memory that stays where it is. New inputs are therefore copied into the graph's input tensors
before every replay, and its outputs are overwritten by the next replay.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus.execution.graphs import Capture
from dissensus.execution.skeleton import first_line
from dissensus.randomness import GlobalGenerators

log = logging.getLogger("dissensus")


class Recording(NamedTuple):
    """A computation that is ready to be captured."""

    function: Callable[[], Any]
    """Reads ``inputs`` and returns the outputs. It must not read numbers back from the device."""
    inputs: tuple[Tensor, ...]
    """The tensors that the graph reads. They are kept for as long as the graph is."""


class Graph:
    """A captured computation."""

    def __init__(self, recording: Recording, capture: Capture, generators: Sequence[torch.Generator] = ()) -> None:
        self.inputs = recording.inputs
        self.outputs: Any = None

        def run() -> None:
            self.outputs = recording.function()

        self._replay = capture(run, generators)

    def __call__(self, *values: Tensor, non_blocking: bool = False) -> Any:
        """Outputs for these inputs, in memory that the next replay overwrites."""
        for buffer, value in zip(self.inputs, values, strict=True):
            if value is not buffer:
                buffer.copy_(value, non_blocking=non_blocking)
        self._replay()
        return self.outputs


class GraphCache:
    """The graphs of one computation, by a key such as the shape of its inputs.

    A computation is captured after ``warm_up`` eager runs with its key: libraries set themselves up at their first
    calls. If a capture fails, computations with that key run eagerly from then on. If no graph exists by then, nothing
    can be expected of other keys, and ``enabled`` becomes False. The first failure is logged in one line; random
    generators of the host are put back to where they were.

    Args:
        subject: What is computed, in the plural, for the log.
        new_capture: Returns the way to capture, at the start and each time that graphs are forgotten, with a memory
            pool that those graphs share. It returns None where nothing is captured.
        warm_up: Eager runs with a key before a graph is captured for it.
        most: The largest number of graphs. Each holds the memory of one run.
        level: The level at which a failure is logged.
    """

    def __init__(
        self,
        subject: str,
        new_capture: Callable[[], Capture | None],
        *,
        warm_up: int,
        most: int | None = None,
        level: int = logging.WARNING,
    ) -> None:
        self.subject, self.new_capture = subject, new_capture
        self.warm_up, self.most, self.level = warm_up, most, level
        self.refused: dict[Hashable, str] = {}
        """Why a key has no graph."""
        self.enabled = True
        self.forget()

    def forget(self) -> None:
        """Drop all graphs, because tensors that they use have been replaced; capture again after a new warm-up."""
        # PyTorch frees a memory pool with its last graph and may refuse it afterwards, so each generation has its own.
        self.graphs: dict[Hashable, Graph] = {}
        self.runs: Counter[Hashable] = Counter()
        self.capture = self.new_capture() if self.enabled else None
        self.enabled = self.capture is not None

    def graph(
        self,
        key: Hashable,
        record: Callable[[], Recording],
        generators: Sequence[torch.Generator] = (),
        *,
        worthwhile: bool = True,
    ) -> Graph | None:
        """The graph for the next run with this key, or None if it has to run eagerly.

        Args:
            key: Runs with equal keys launch the same operations on tensors of the same shapes.
            record: Makes the recording. It is called once for a key and may raise `RuntimeError` with a reason why the
                computation cannot be captured.
            generators: Generators that the computation draws from, besides the device's own.
            worthwhile: Whether enough runs are left for a capture to pay.
        """
        self.runs[key] += 1
        due = worthwhile and self.runs[key] > self.warm_up and key not in self.graphs and key not in self.refused
        if self.capture is not None and due and (self.most is None or len(self.graphs) < self.most):
            self._add(key, record, generators, self.capture)
        return self.graphs.get(key)

    def _add(
        self,
        key: Hashable,
        record: Callable[[], Recording],
        generators: Sequence[torch.Generator],
        capture: Capture,
    ) -> None:
        before = GlobalGenerators.now()
        try:
            graph = Graph(record(), capture, generators)
            if before.drawn_from():
                raise RuntimeError("random numbers are drawn on the host, and a graph would repeat them")
        except RuntimeError as error:
            before.restore()
            reason = first_line(error)
            level = logging.DEBUG if self.refused else self.level
            log.log(level, "%s are not captured in a graph: %s", self.subject, reason)
            self.refused[key] = reason
            if not self.graphs:
                self.enabled, self.capture = False, None
        else:
            self.graphs[key] = graph
