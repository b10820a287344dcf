"""A function as a CUDA graph: recorded once, replayed without the host."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

Capture = Callable[[Callable[[], None], Sequence[torch.Generator]], Callable[[], None]]
"""Turns a function into one that replays it, without running it; generators that it draws from go on at replays."""


def captured(
    function: Callable[[], None],
    generators: Sequence[torch.Generator] = (),
    *,
    pool: Any = None,
    watch: Literal["global", "thread_local"] = "global",
) -> Callable[[], None]:
    """A CUDA graph of a function on the current device, replayed by calling what is returned.

    The function must have run before (libraries set themselves up at their first call), must read nothing back, and
    must keep what it reads and writes where it is. A generator that is seeded between replays draws what it would draw
    in the function itself. Where capture fails, the first reason is raised, and generators can be drawn from again.

    Args:
        function: What is recorded.
        generators: Those that it draws from, besides the device's own.
        pool: Memory that graphs share which never run at once (``torch.cuda.graph_pool_handle()``).
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
    except RuntimeError as reason:
        own = torch.cuda.default_generators[torch.cuda.current_device()]
        for generator in (own, *generators):  # torch leaves them waiting for a capture that has ended
            with contextlib.suppress(RuntimeError):
                generator.graphsafe_set_state(generator.clone_state())
        first = reason.__context__ if isinstance(reason.__context__, RuntimeError) else reason
        raise RuntimeError(str(first)) from reason
    return graph.replay


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one, since graphs, streams and events go to that; nothing elsewhere."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
