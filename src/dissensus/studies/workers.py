"""Worker processes: they share the cores, and they end with the process that started them."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from dissensus import startup


@contextmanager
def worker_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that share the cores.

    After an error tasks that have not begun are dropped, and running ones are finished. When this process is
    interrupted, the workers are killed.
    """
    threads = max(1, torch.get_num_threads() // jobs)
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=begin, initargs=(threads,))
    try:
        yield pool
    except BaseException as reason:
        if not isinstance(reason, Exception):
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def submit(
    pool: ProcessPoolExecutor, function: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]
) -> list[Future[Any]]:
    """Submit tasks to a pool, whose workers ignore SIGINT: a terminal sends it to all processes of a command.

    The worker processes are started here. They inherit the signals that are blocked, and are told who starts them.
    """
    os.environ[startup.PARENT] = str(os.getpid())
    try:
        with _interrupts_blocked():
            return [pool.submit(function, *task) for task in tasks]
    finally:
        os.environ.pop(startup.PARENT, None)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this thread, if the system supports it, and in processes that are started meanwhile."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin(threads: int) -> None:
    """Set up a worker: its share of the cores, and its end with the process that started it."""
    end_with_parent()
    torch.set_num_threads(threads)


def end_with_parent() -> None:
    """End this process as soon as the process that started it has ended, for whatever reason.

    Who the parent is was passed on when this process was started, so that it may have ended before this call. Linux
    kills the process even within long computations. A thread that waits for the parent does it on all systems.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    startup.end_with(parent.pid)
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)  # the lock ended with the parent: nothing may be written any more
