"""Parts of a pass side by side on the cores of a CPU, each on one core.

PyTorch shares every operation among the cores, which then wait for each other after each. Where operations are short,
threads that each do their own part take less time.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
"""By process, because threads do not follow into a process that is forked, and by number of threads."""
_lock = threading.Lock()
_is_worker = threading.local()


def cores() -> int:
    """How many parts run side by side: the threads that PyTorch may use, and one within such a part."""
    return 1 if getattr(_is_worker, "yes", False) else torch.get_num_threads()


def side_by_side(jobs: Sequence[Callable[[], Result]]) -> list[Result]:
    """Results of all jobs. Each runs on one core, without gradients unless it enables them.

    All jobs have ended when this returns, and if one has failed, its error is raised.
    """
    count = min(cores(), len(jobs))
    if count < 2:
        return [job() for job in jobs]
    pool = _pool(count)
    futures: list[Future[Result]] = [pool.submit(job) for job in jobs]
    for future in futures:
        future.exception()
    return [future.result() for future in futures]


def _pool(count: int) -> ThreadPoolExecutor:
    key = os.getpid(), count
    with _lock:
        if key not in _pools:
            threads, begun = torch.get_num_threads(), threading.Barrier(count + 1)
            _pools[key] = ThreadPoolExecutor(count, "dissensus", _begin, (begun,))
            for _ in range(count):
                _pools[key].submit(int)
            begun.wait()
            torch.set_num_threads(threads)  # those of threads that begin later, which a worker has set to one
        return _pools[key]


def _begin(begun: threading.Barrier) -> None:
    """Set up a worker."""
    _is_worker.yes = True
    torch.get_num_threads()  # PyTorch sets a thread up at its first use, and would undo the next line then
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    begun.wait()
