"""How processes find each other, come to a call together, and hear of one that has ended.

Processes of a training wait for each other. So that none waits in vain, each tells in the store of their process group
which call it is in, what it failed with, and that it has ended.
"""

import atexit
import functools
import itertools
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dissensus import checks

log = logging.getLogger("dissensus")

TIMEOUT = timedelta(minutes=10)
"""The longest wait for another process. One that ends is not waited for."""
_BLOCKS = "dissensus/blocks"
"""Begins the keys of the store by which processes tell each other where they are."""
_blocks, _joins = itertools.count(), itertools.count()
"""Numbers of blocks and of process groups, which are the same in all processes."""
_places: list[tuple[int, Any]] = []
"""The number of this process, and the store in which it tells of itself."""
_made: list[bool] = []
"""Whether this process has made a group, which it then closes."""


class RankFailed(RuntimeError):
    """Another process of a parallel training has failed; the message says which one and why, where that is known."""


@dataclass(frozen=True)
class Meeting:
    """A block of parallel work to which all processes have come."""

    store: Any
    key: str

    def tell(self, words: str) -> None:
        """Say what this process has failed with; the first one's words stay."""
        with suppress(RuntimeError):
            if self.store.add(f"{self.key}/failures", 1) == 1:
                self.store.set(f"{self.key}/failure", words)

    def told(self) -> str:
        """What the first process that failed has said; empty where none has."""
        with suppress(RuntimeError):
            if self.store.check([f"{self.key}/failure"]):
                return self.store.get(f"{self.key}/failure").decode()
        return ""


def is_started() -> bool:
    """Whether there are processes: a process group, or the variables by which torchrun tells of them."""
    if not dist.is_available():
        return False
    return dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)


def place() -> tuple[int, int]:
    """The number of this process, and how many there are."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def is_first() -> bool:
    """Whether this process is the first of all, or the only one."""
    return not is_started() or place()[0] == 0


@functools.cache
def tell_of_copies(what: str) -> None:
    """A line of the log where each process does all of something, which processes could share."""
    size = place()[1] if is_started() else 1
    if size > 1 and is_first():
        log.warning("%s runs whole in each of %d processes: they share the members of one ensemble only", what, size)


def meet(device: torch.device, call: str) -> Meeting:
    """Wait until all processes are in a call. One that has ended, or is in another call, is an error in all."""
    if not dist.is_initialized():
        _join(device, call)
    rank, size = dist.get_rank(), dist.get_world_size()
    if not _made:
        _places[:] = [(rank, dist.distributed_c10d._get_default_store())]
    meeting = Meeting(_places[-1][1], f"{_BLOCKS}/{_attempt()}/{next(_blocks)}")
    _await(meeting, call, rank, size)
    return meeting


def _attempt() -> int:
    """How often torchrun has started the processes anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def _join(device: torch.device, call: str) -> None:
    """Make the process group of everyone."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    # NCCL refuses several processes on one card.
    of_card = device.type == "cuda" and dist.is_nccl_available() and local <= torch.cuda.device_count()
    store, rank, size = _rendezvous(TIMEOUT)
    _places[:] = [(rank, store)]
    number = next(_joins)
    _await(Meeting(store, f"{_BLOCKS}/{_attempt()}/join-{number}"), call, rank, size)
    # Addresses of an attempt whose processes have ended stay in the store, and would be waited for.
    own_store = dist.PrefixStore(f"group-{number}", store)  # pyright: ignore[reportPrivateImportUsage]
    backend = "cpu:gloo,cuda:nccl" if of_card else "gloo"
    dist.init_process_group(backend, store=own_store, rank=rank, world_size=size, timeout=TIMEOUT)
    _made.append(True)


def _rendezvous(timeout: timedelta) -> tuple[Any, int, int]:
    """The store of all processes, the number of this one, and how many there are."""
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))  # pyright: ignore[reportPrivateImportUsage]
    prefix = f"dissensus/attempt-{_attempt()}"
    return dist.PrefixStore(prefix, store), rank, size  # pyright: ignore[reportPrivateImportUsage]


def _await(meeting: Meeting, call: str, rank: int, size: int) -> None:
    """Wait for the others, and compare their calls."""
    keys = [f"{meeting.key}/{other}" for other in range(size)]
    try:
        made = _calls(meeting.store, keys, call, rank)
    except RankFailed:
        raise
    except RuntimeError as reason:  # without torchrun the first process holds the store
        raise RankFailed(f"{call} waits for all processes, and the one that knows of all has ended.") from reason
    other = next((other for other in range(size) if made[other] != made[0]), None)
    if other is not None:
        got = f"{made[0]} on rank 0, and {made[other]} on rank {other}"
        fix = "Call `fit`, `predict`, `save` and `gathered` in every process, in the same order."
        checks.refuse("parallel", "have the same calls in all processes", got, fix, RuntimeError)


def _calls(store: Any, keys: Sequence[str], call: str, rank: int) -> list[str]:
    """The calls that all processes are in, each under its key."""
    ended = _ended()
    store.set(keys[rank], call)
    pause, deadline = 0.0005, time.monotonic() + TIMEOUT.total_seconds()
    while not store.check(keys):
        absent = [other for other, key in enumerate(keys) if not store.check([key])]
        gone = [other for other in absent if store.check([ended]) and store.check([f"{ended}/{other}"])]
        if gone:
            words = store.get(f"{ended}/{gone[0]}").decode()
            fix = "" if words else " Call it in every process, not in one alone."
            raise RankFailed(f"{call} waits for all processes, and rank {gone[0]} has ended{words}.{fix}")
        if absent and time.monotonic() > deadline:
            raise RankFailed(f"{call} waits for all processes, and rank {absent[0]} did not call it in {TIMEOUT}.")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return [store.get(key).decode() for key in keys]


def _ended() -> str:
    return f"{_BLOCKS}/{_attempt()}/ended"


@functools.cache
def watch_end() -> None:
    """Tell the others when this process ends, so that none waits for its next call."""
    atexit.register(_leave, os.getpid())


def _leave(process: int) -> None:
    """Tell that this process has ended, and with what; close the group that it has made."""
    if os.getpid() != process:  # a copy of it
        return
    reason = getattr(sys, "last_value", None)
    words = "" if reason is None else f" with {type(reason).__name__}: {reason}"
    with suppress(RuntimeError, OSError):
        rank, store = _places[-1] if _places else _never_joined()
        if store is not None:
            store.set(f"{_ended()}/{rank}", words)
            store.set(_ended(), "")
    if _made and dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _never_joined() -> tuple[int, Any]:
    """The number of this process and the store, where it has met no other; None where it has no store."""
    if dist.is_initialized():
        return dist.get_rank(), dist.distributed_c10d._get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # the first process may hold the store, and be gone
        return 0, None
    store, rank, _ = _rendezvous(timedelta(seconds=5))
    return rank, store
