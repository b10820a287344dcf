"""A function as a CUDA graph, which is captured once and replayed without the host's code."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

Capture = Callable[[Callable[[], None], Sequence[torch.Generator]], Callable[[], None]]
"""``(function, generators) -> replay``. The function is recorded, not run; replays continue the generators' streams."""
Watch = Literal["global", "thread_local"]
"""The threads in which calls that cannot be captured make a capture fail."""


def captured(
    function: Callable[[], None],
    generators: Sequence[torch.Generator] = (),
    *,
    pool: Any = None,
    watch: Watch = "global",
) -> Callable[[], None]:
    """A CUDA graph of a function on the current device, replayed by calling what is returned.

    The function must have run before (libraries set themselves up at their first call), must read nothing back, and
    must keep what it reads and writes where it is. A generator that is seeded between replays draws what it would draw
    in the function itself. If the capture fails, the first error is raised, and generators can be drawn from again.

    Args:
        function: What is recorded.
        generators: Generators that it draws from, besides the device's own.
        pool: Memory that is shared by graphs which never run at the same time (``torch.cuda.graph_pool_handle()``).
        watch: ``"thread_local"`` lets other threads, such as a loader's that pins memory, call CUDA meanwhile.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    stream = _capture_stream(torch.cuda.current_device())
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=watch):
            function()
    except RuntimeError as error:
        default = torch.cuda.default_generators[torch.cuda.current_device()]
        for generator in (default, *generators):  # torch leaves them waiting for a capture that has ended
            with contextlib.suppress(RuntimeError):
                generator.graphsafe_set_state(generator.clone_state())
        first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        raise RuntimeError(str(first)) from error
    return graph.replay


def capture_on(device: torch.device, watch: Watch = "thread_local", *, pieces: bool = False) -> Capture | None:
    """The way to capture graphs on a device, with a new memory pool that they share; None for a CPU.

    ``pieces``: the host does something between graphs, by `between`.
    """
    if device.type != "cuda":
        return None
    with on(device):
        capture = captured_in_pieces if pieces else captured
        return functools.partial(capture, pool=torch.cuda.graph_pool_handle(), watch=watch)


_pieces: list["_Pieces"] = []
"""The capture in pieces that is under way."""


class _Pieces:
    """Graphs of one function, and what the host does between them."""

    def __init__(self, pool: Any, watch: Watch, generators: Sequence[torch.Generator]) -> None:
        self.pool, self.watch, self.generators = pool, watch, generators
        self.steps: list[Callable[[], object]] = []

    def begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            self.graph.register_generator_state(generator)
        self.graph.capture_begin(pool=self.pool, capture_error_mode=self.watch)

    def end(self) -> None:
        self.graph.capture_end()
        self.steps.append(self.graph.replay)

    def replay(self) -> None:
        for step in self.steps:
            step()


def captured_in_pieces(
    function: Callable[[], None],
    generators: Sequence[torch.Generator] = (),
    *,
    pool: Any = None,
    watch: Watch = "thread_local",
) -> Callable[[], None]:
    """Graphs of a function, as `captured` makes one; calls of `between` in it are left to the host.

    Arguments are those of `captured`.
    """
    torch.cuda.synchronize()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    pieces, stream = _Pieces(pool, watch, generators), _capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    _pieces.append(pieces)
    try:
        with torch.cuda.stream(stream):
            pieces.begin()
            try:
                function()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    pieces.graph.capture_end()
                raise
            pieces.end()
    finally:
        _pieces.pop()
    torch.cuda.current_stream().wait_stream(stream)
    return pieces.replay


def in_pieces() -> bool:
    """Whether a function is being captured in pieces."""
    return bool(_pieces)


def between(function: Callable[[], object]) -> None:
    """Leave a function to the host, between two graphs; it is not called now.

    What it reads and writes must stay where it is, as for a graph.
    """
    pieces = _pieces[-1]
    pieces.end()
    pieces.steps.append(function)
    pieces.begin()


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current device, which graphs, streams and events belong to; no effect for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
