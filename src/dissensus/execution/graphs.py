"""A function as a CUDA graph: recorded once, replayed without the host."""

from collections.abc import Callable, Sequence

import torch

Capture = Callable[[Callable[[], None], Sequence[torch.Generator]], Callable[[], None]]
"""Turns a function into one that replays it, without running it; generators that it draws from go on at replays."""


def captured(function: Callable[[], None], generators: Sequence[torch.Generator] = ()) -> Callable[[], None]:
    """A CUDA graph of a function, replayed by calling what is returned.

    The function must have run before (libraries set themselves up at their first call), must read nothing back, and
    must keep what it reads and writes where it is. A generator that is seeded between replays draws what it would draw
    in the function itself.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        function()
    return graph.replay
