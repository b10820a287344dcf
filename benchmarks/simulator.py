"""A simulator of a sweep on a cluster: workers, one storage, and the process of the script. `scale.py` checks it.

Every worker does one task after the other. It takes the next one, reads the data that was sent, and computes; from time
to time it writes a checkpoint, and waits until that is written. All workers write to one storage, which serves them one
after the other. What a task has trained goes home, where it is taken one after the other too. A worker that is lost
takes with it what its task has computed since the last checkpoint; the task begins again from there on the next worker
that is free.
"""

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Work:
    """A task: runs of one shape."""

    seconds: float
    """Of computing, by one worker."""
    checkpoint: float = 0.0
    """Bytes of a checkpoint."""
    result: float = 0.0
    """Bytes that come home at the end."""


@dataclass(frozen=True)
class Costs:
    """What a sweep costs beside computing."""

    start: float = 0.0
    """Seconds until workers can begin: their processes start, and import torch."""
    task: float = 0.0
    """Seconds of each task on its worker: its size is measured, networks are built, data is read."""
    dispatch: float = 0.0
    """Seconds of each task in the process of the script, one after the other."""
    storage: float = math.inf
    """Bytes a second of the storage, for all workers together."""
    home: float = math.inf
    """Bytes a second on the way home, for all results together."""
    every: float = 10.0
    """Seconds between checkpoints, or more where writing one would take more than a fiftieth of the time."""
    again: float = 0.0
    """Seconds until a lost worker is replaced, and can begin."""


@dataclass
class Simulated:
    """How long it takes, and what the workers did meanwhile: seconds of all of them."""

    seconds: float = 0.0
    spent: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("starting", "tasks", "computing", "storage", "lost", "waiting"), 0.0)
    )
    home: float = 0.0
    """Seconds at the end in which results still come home."""


def simulated(works: Sequence[Work], workers: int, costs: Costs, losses: Sequence[tuple[float, int]] = ()) -> Simulated:
    """Do tasks, in their order; ``losses`` are moments at which a worker is lost, with its number.

    >>> simulated([Work(10.0), Work(10.0), Work(10.0)], 2, Costs(start=1.0)).seconds
    21.0
    >>> result = simulated([Work(30.0)], 1, Costs(every=10.0, again=5.0), losses=[(25.0, 0)])
    >>> result.seconds, result.spent["lost"]
    (40.0, 5.0)
    """
    result = Simulated()
    queue = deque((work, 0.0) for work in works)
    under_way: dict[int, _Attempt] = {}
    storage_free = dispatched = home_free = end = 0.0
    lost = {number: sorted(moment for moment, which in losses if which == number) for number in range(workers)}
    # What a worker does next, and when; of events at one time, that of the worker with the lowest number comes first.
    events = [(costs.start, number) for number in range(workers)]
    result.spent["starting"] = costs.start * workers
    free_since = dict.fromkeys(range(workers), costs.start)

    def stored(now: float, size: float) -> float:
        """When a checkpoint is written."""
        nonlocal storage_free
        storage_free = max(storage_free, now) + size / costs.storage
        result.spent["storage"] += storage_free - now
        return storage_free

    while queue or under_way:
        now, number = heapq.heappop(events)
        while lost[number] and number not in under_way and lost[number][0] <= now:
            lost[number].pop(0)  # between tasks, nothing is lost
        attempt = under_way.pop(number, None)
        if attempt is None:
            if not queue:
                continue
            work, before = queue.popleft()
            dispatched = max(dispatched, free_since[number]) + costs.dispatch
            begun = max(now, dispatched) + costs.task
            result.spent["waiting"] += max(now, dispatched) - free_since[number]
            result.spent["tasks"] += costs.task
            under_way[number] = _Attempt(work, before, begun)
            heapq.heappush(events, (begun, number))
            continue
        if attempt.lost:
            result.spent["lost"] += max(0.0, now - attempt.since)
            result.spent["starting"] += costs.again
            queue.appendleft((attempt.work, attempt.came_to))
            free_since[number] = now + costs.again
            heapq.heappush(events, (free_since[number], number))
            coming = {which for _, which in events}
            for other in set(range(workers)) - coming - set(under_way):  # those that had found nothing to do
                heapq.heappush(events, (now, other))
            continue
        attempt.came_to += attempt.step
        result.spent["computing"] += attempt.step
        attempt.since = stored(now, attempt.work.checkpoint)
        if attempt.came_to >= attempt.work.seconds:
            home_free = max(home_free, attempt.since) + attempt.work.result / costs.home
            free_since[number] = attempt.since
            end = max(end, attempt.since)
            heapq.heappush(events, (attempt.since, number))
            continue
        # Not more than a fiftieth of the time goes into writing.
        attempt.step = max(costs.every, 50 * attempt.work.checkpoint / costs.storage)
        attempt.step = min(attempt.step, attempt.work.seconds - attempt.came_to)
        until = attempt.since + attempt.step
        if lost[number] and lost[number][0] < until:
            until, attempt.lost = max(lost[number].pop(0), attempt.since), True
        under_way[number] = attempt
        heapq.heappush(events, (until, number))
    result.seconds = max(end, home_free)
    result.home = result.seconds - end
    result.spent["waiting"] += sum(end - since for since in free_since.values() if since < end)
    return result


@dataclass
class _Attempt:
    """A task on its worker."""

    work: Work
    came_to: float
    """Seconds of computing that its last checkpoint holds."""
    since: float
    """When that was written, or the task has begun."""
    step: float = 0.0
    """Seconds of computing until its next checkpoint."""
    lost: bool = False
    """Whether its worker is lost before that."""


def shares(result: Simulated, workers: int) -> Mapping[str, float]:
    """Which share of all time of all workers each part took; results at the end count with all workers waiting."""
    spent = {**result.spent, "results coming home": result.home * workers}
    return {name: seconds / (workers * result.seconds) for name, seconds in spent.items()}
