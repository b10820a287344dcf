"""Work on a Ray cluster: nodes that are checked first, tasks that survive the loss of a worker, one report of progress.

A task is a function of this package with what it works on. It leaves checkpoints in a folder that all nodes see: a task
whose worker is lost is given to another one, which goes on from there. What a task returns comes home at once.
"""

import logging
import os
import pickle
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

import dissensus
from dissensus import checks
from dissensus.execution.out_of_memory import OutOfMemory
from dissensus.fingerprint import source_digest
from dissensus.storage import StorageError, locked, make_folder
from dissensus.train.memory import mebibytes

log = logging.getLogger("dissensus")

PROCESS_BYTES = 512 * 2**20
"""Memory of a worker process before it holds anything: Python, torch and this package."""
_SECONDS_BETWEEN_REPORTS = 0.5
_SECONDS_TO_CONNECT = 5.0
_SECONDS_TO_ANSWER = 300.0
"""How long a node may take to import torch, maybe from a slow disk."""
_SECONDS_TO_STOP = 5.0
_SECONDS_TO_LEAVE = 120.0
_SECONDS_WITHOUT_NODE = 15.0
_ENVIRONMENT = ("DISSENSUS_",)
"""Beginnings of variables of the environment that workers get."""
_START = "`ray start --head --port=6379` starts one, and its output has the address"


class ClusterError(RuntimeError):
    """A cluster cannot do the work; the message says why and what helps."""


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster, and what a task takes of it.

    Args:
        address: ``"HOST:PORT"`` of the head node; the script runs on a machine of the cluster. None: the cluster that
            this process is connected to already, that of the variable ``RAY_ADDRESS``, or one that runs on this
            machine. If there is none, a cluster of this machine alone is started, and stopped at the end.
        cpus: Cores of a task. None: one, or more where there are fewer tasks than cores.
        gpus: Share of a GPU of a task that trains on ``"cuda"``. With 0.5, two tasks share a GPU.
        attempts: How often a task is begun without coming further than before, until its loss is an error.
    """

    address: str | None = None
    cpus: int | None = None
    gpus: float = 1.0
    attempts: int = 3

    def __post_init__(self) -> None:
        if self.address is not None:
            _check_address(self.address)
        if self.cpus is not None:
            checks.count("cpus", self.cpus)
        checks.number("gpus", self.gpus, 0, 1, open_low=True)
        checks.count("attempts", self.attempts)

    @classmethod
    def of(cls, cluster: object) -> "RayCluster | None":
        """A cluster as a user gives it: ``"ray"``, a `RayCluster`, or None for none."""
        if cluster is None or isinstance(cluster, RayCluster):
            return cluster
        if isinstance(cluster, str):
            checks.one_of("cluster", cluster, ("ray",))
            return cls()
        checks.refuse("cluster", "be 'ray', a RayCluster or None", repr(cluster), error=TypeError)


def _check_address(address: object, name: str = "address") -> None:
    if isinstance(address, str) and "://" in address:
        fix = "Start the script on a machine of the cluster, such as by `ray job submit`."
        checks.refuse(name, "be HOST:PORT of the head node, not of a Ray client", repr(address), fix)
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if address not in ("auto", "local") and not (host and port.isdigit() and int(port) < 2**16):
        checks.refuse(name, "be HOST:PORT of the head node, such as '10.0.0.1:6379'", repr(address))


class Node(NamedTuple):
    """A machine of a cluster, and what it has in all."""

    id: str
    name: str
    cpus: float
    gpus: float
    memory: int

    def slots(self, need: "Need") -> int:
        """How many tasks run there at once."""
        rooms = [int(self.cpus / need.cpus)]
        rooms += [int(self.gpus / need.gpus + 1e-9)] if need.gpus else []
        rooms += [int(self.memory / need.memory)] if need.memory else []
        return max(0, min(rooms))

    def __str__(self) -> str:
        gpus = f", {self.gpus:g} GPUs" if self.gpus else ""
        return f"{self.name} ({self.cpus:g} CPUs{gpus}, {mebibytes(self.memory)})"


@dataclass(frozen=True)
class Need:
    """What a task takes."""

    cpus: int = 1
    gpus: float = 0.0
    memory: int = 0
    """Bytes of the node's memory; 0: unknown."""

    def __str__(self) -> str:
        gpus = f", {self.gpus:g} GPUs" if self.gpus else ""
        memory = f", {mebibytes(self.memory)} of memory" if self.memory else ""
        return f"{self.cpus} CPUs{gpus}{memory}"


@dataclass(frozen=True)
class Task:
    """A call ``function(shared, *arguments, report)`` on some worker, which goes on from what an earlier call left."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    name: str
    need: Need
    came_to: Callable[[], object] = lambda: None
    """How far the task has come, as its checkpoints say, for any comparison."""
    on_lost: Callable[[str], Exception] | None = None
    """The error where memory has run out; it is told what is known."""


class Sent(NamedTuple):
    """What all tasks need, where workers can read it."""

    reference: Any
    bytes: int


@contextmanager
def connected(cluster: RayCluster) -> Iterator["Workers"]:
    """A block that works on a cluster. A connection that is made here, or a cluster, ends with the block."""
    try:
        import ray
    except ImportError:
        raise ImportError("a cluster needs Ray: pip install 'dissensus[ray]'") from None
    mine, variables, on_termination = not ray.is_initialized(), set(os.environ), signal.getsignal(signal.SIGTERM)
    address = _reachable(cluster.address) if mine else _check_connection(ray, cluster.address)
    try:
        if mine:
            _connect(ray, address)
        yield Workers(ray, cluster)
    finally:
        if mine:
            ray.shutdown()
            for name in set(os.environ) - variables:  # which Ray sets for its own processes
                del os.environ[name]
            if threading.current_thread() is threading.main_thread() and on_termination is not None:
                signal.signal(signal.SIGTERM, on_termination)  # Ray has put its own in its place


def _check_connection(ray: Any, address: str | None) -> str | None:
    """An address, if a connection that this process has already is one to the cluster there; others are refused."""
    if ray.util.client.ray.is_connected():
        fix = "Call ray.shutdown() first, and start the script on a machine of the cluster."
        checks.refuse("cluster", "be one that this process belongs to", "the connection of a Ray client", fix)
    if address in (None, "auto", "local"):
        return address
    connected_to = ray.get_runtime_context().gcs_address
    if not _is_at(connected_to, address):
        fix = "Call ray.shutdown() first, or leave it out."
        checks.refuse("address", f"be the cluster that this process is connected to, {connected_to}", address, fix)
    return address


def _is_at(connected: str, address: str) -> bool:
    """Whether an address is that of a cluster, by name or by number."""
    host, _, port = address.rpartition(":")
    with suppress(OSError):
        host = socket.gethostbyname(host)
    return connected in (address, f"{host}:{port}")


def _reachable(address: str | None) -> str | None:
    """The address of a head that answers; None where there is none, neither here nor in the environment."""
    if address is None and os.environ.get("RAY_ADDRESS"):
        address = os.environ["RAY_ADDRESS"]
        _check_address(address, "RAY_ADDRESS")
    if address is not None and address not in ("auto", "local"):
        host, _, port = address.rpartition(":")
        try:  # Ray itself would try for a minute, and log meanwhile
            socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()
        except (OSError, ValueError) as reason:
            raise ClusterError(f"there is no Ray cluster at {address} ({reason}). {_START}.") from reason
    return address


def _connect(ray: Any, address: str | None) -> None:
    quietly: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Ray announces for its next versions
        try:
            if address == "local":
                ray.init(address="local", include_dashboard=False, **quietly)
                return
            try:
                ray.init(address=address or "auto", **quietly)
            except ConnectionError:
                if address is not None:
                    raise
                ray.init(address="local", include_dashboard=False, **quietly)
                log.info("there is no Ray cluster: one of this machine alone was started. %s.", _START)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as reason:
            where = "on this machine" if address in (None, "auto") else f"at {address}"
            fix = "The script runs on a machine of the cluster, which joins it by `ray start --address=HOST:PORT`"
            raise ClusterError(f"the Ray cluster {where} cannot be used: {reason} {fix}; {_START}.") from reason


class Workers:
    """The workers of a cluster that this process is connected to."""

    def __init__(self, ray: Any, cluster: RayCluster) -> None:
        self.ray, self.cluster = ray, cluster
        self.told = set[str]()
        """What workers have said."""

    def nodes(self) -> list[Node]:
        """The machines that are there now."""
        return [
            Node(
                node["NodeID"],
                node["NodeManagerHostname"],
                node["Resources"].get("CPU", 0.0),
                node["Resources"].get("GPU", 0.0),
                int(node["Resources"].get("memory", 0)),
            )
            for node in self.ray.nodes()
            if node["Alive"]
        ]

    def fitting(self, need: Need) -> list[Node]:
        """The machines that can do a task; `ClusterError` where none can."""
        nodes = self.nodes()
        fitting = [node for node in nodes if node.slots(need)]
        if not fitting:
            there = ", ".join(map(str, nodes)) or "none"
            fix = "Add a larger one, or let tasks take less: RayCluster(cpus=, gpus=), `max_memory`, smaller batches."
            raise ClusterError(f"a task takes {need}, and no node has that. Nodes: {there}. {fix}")
        return fitting

    def slots(self, need: Need) -> int:
        """How many tasks run at once."""
        return sum(node.slots(need) for node in self.fitting(need))

    def cores(self, need: Need, tasks: int) -> int:
        """Cores of each of some tasks: more than one where fewer tasks than cores run at once, as with GPUs."""
        if self.cluster.cpus is not None:
            return self.cluster.cpus
        nodes = self.fitting(need)
        at_once = min(-(-tasks // len(nodes)), min(node.slots(need) for node in nodes))
        return max(1, int(min(node.cpus for node in nodes)) // at_once)

    def __str__(self) -> str:
        nodes = self.nodes()
        cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
        return f"Ray cluster of {len(nodes)} nodes, {cpus:g} CPUs" + (f", {gpus:g} GPUs" if gpus else "")

    def examine(self, nodes: Sequence[Node], folder: Path, argument: str) -> None:
        """Refuse nodes with other versions of the packages, and nodes that do not see a folder, an argument."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        token = folder / f".cluster-{secrets.token_hex(8)}"
        token.write_text(token.name)
        try:
            answer = self.ray.remote(_answer())
            asked = [
                answer.options(
                    num_cpus=0,
                    max_retries=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                ).remote(str(token))
                for node in nodes
            ]
            _, late = self.ray.wait(asked, num_returns=len(asked), timeout=_SECONDS_TO_ANSWER)
            for node, reference in zip(nodes, asked, strict=True):
                if reference in late:
                    raise ClusterError(f"node {node.name} has not answered within {_SECONDS_TO_ANSWER:g} s.")
                try:
                    told = self.ray.get(reference)
                except self.ray.exceptions.RayError as reason:
                    log.warning("node %s was lost before it could be examined: %s", node.name, _first_line(reason))
                    continue
                _check_versions(node.name, told)
                if told["token"] != token.name:
                    _refuse_unseen(argument, folder, node.name)
        finally:
            token.unlink(missing_ok=True)

    def share(self, value: Any, parts: Mapping[str, Any]) -> "Sent":
        """Put what all tasks need where all workers can read it; a part that cannot be sent is refused by its name.

        It is sent as bytes: arrays that Ray sends as such cannot be written to, and a data set may do that.
        """
        try:
            payload = self.ray.cloudpickle.dumps(value)
        except Exception as reason:  # whatever a user's objects raise
            for name, part in parts.items():
                _check_sendable(self.ray.cloudpickle, name, part)
            raise ClusterError(f"what is trained could not be sent to the workers: {_first_line(reason)}") from reason
        try:
            return Sent(self.ray.put(np.frombuffer(payload, np.uint8)), len(payload))
        except (self.ray.exceptions.RayError, OSError) as reason:
            fix = (
                "Start Ray with a larger `--object-store-memory`, or with more room for the files that it spills. Or "
                "give data that workers read from files, as a Dataset does."
            )
            size = mebibytes(len(payload))
            raise ClusterError(f"{size} could not be sent to the workers: {_first_line(reason)} {fix}") from reason

    def run(
        self,
        tasks: Sequence[Task],
        shared: "Sent",
        done: Callable[[int, Any], None],
        reported: Callable[[Mapping[int, Any]], None] | None = None,
    ) -> None:
        """Do tasks, in any order.

        Args:
            tasks: The tasks. One whose worker is lost begins again elsewhere.
            shared: What `share` returned.
            done: Called with the number of a task and its result, as results come home.
            reported: Called with what tasks have reported last, by their numbers.

        The first error of a task stops all others and is raised here. So does Ctrl-C.
        """
        for need in dict.fromkeys(task.need for task in tasks):
            self.fitting(need)
        board = None if reported is None else self.ray.remote(_board()).options(num_cpus=0, max_restarts=-1).remote()
        attempts = [_Attempts(task) for task in tasks]
        pending = {self._begin(task, shared, board, number): number for number, task in enumerate(tasks)}
        quiet_since = time.monotonic()
        try:
            while pending:
                finished, _ = self.ray.wait(list(pending), timeout=_SECONDS_BETWEEN_REPORTS)
                for reference in finished:
                    number = pending.pop(reference)
                    quiet_since = time.monotonic()
                    try:
                        done(number, self._result(tasks[number], reference))
                    except _Lost as lost:
                        attempts[number].count(lost, self.cluster.attempts)
                        pending[self._begin(tasks[number], shared, board, number)] = number
                if board is not None and reported is not None:
                    self._read(board, reported)
                if time.monotonic() - quiet_since > _SECONDS_WITHOUT_NODE:
                    quiet_since = time.monotonic()
                    self._tell_of_absent_nodes([tasks[number].need for number in pending.values()])
        finally:
            self._stop(list(pending))
            if board is not None:
                self.ray.kill(board)

    def _begin(self, task: Task, shared: "Sent", board: Any, number: int) -> Any:
        setup = {
            "dtype": torch.get_default_dtype(),
            "threads": task.need.cpus,
            "folder": os.getcwd(),
            "path": [entry for entry in sys.path if entry and "-packages" not in entry],
            "environment": {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)},
            "version": _versions(),
        }
        # Lost workers are our own affair: Ray would begin a task that takes too much memory again and again.
        options = self.ray.remote(_perform).options(
            num_cpus=task.need.cpus,
            num_gpus=task.need.gpus or None,
            memory=task.need.memory or None,
            max_retries=0,
            name=task.name,
            scheduling_strategy="SPREAD",
        )
        return options.remote(setup, task.function, [shared.reference], task.arguments, board, number)

    def _result(self, task: Task, reference: Any) -> Any:
        """The result of a task that has ended; `_Lost` where its worker was lost."""
        exceptions = self.ray.exceptions
        try:
            outcome: _Outcome = self.ray.get(reference)
        except exceptions.TaskCancelledError as reason:
            raise ClusterError(f"{task.name} was cancelled by somebody else.") from reason
        except exceptions.RayTaskError as reason:  # before the first line of `_perform`
            raise ClusterError(f"{task.name} could not begin: {_first_line(reason.cause or reason)}") from reason
        except exceptions.RayError as reason:
            raise _Lost(reason, memory=isinstance(reason, exceptions.OutOfMemoryError)) from reason
        for level, text in outcome.logged:
            if text not in self.told:  # what one task says, others of its shape say too
                log.log(level, "%s (%s, on %s)", text, task.name, outcome.node)
            self.told.add(text)
        error = outcome.error
        if error is not None and isinstance(error, exceptions.RayError):  # what is shared did not arrive
            raise _Lost(error, memory=False) from error
        if error is not None:
            error.add_note(f"in {task.name}, on {outcome.node}:\n{outcome.trace}")
            raise error
        return outcome.value

    def _read(self, board: Any, reported: Callable[[Mapping[int, Any]], None]) -> None:
        with suppress(self.ray.exceptions.RayError):  # its node is lost: it begins anew elsewhere
            latest = self.ray.get(board.latest.remote(), timeout=_SECONDS_TO_CONNECT)
            if latest:
                reported({number: pickle.loads(report) for number, report in latest.items()})

    def _tell_of_absent_nodes(self, needs: Sequence[Need]) -> None:
        nodes = self.nodes()
        for need in dict.fromkeys(needs):
            if not any(node.slots(need) for node in nodes):
                log.warning("no node has %s at present: waiting for one to join the cluster", need)

    def _stop(self, pending: list[Any]) -> None:
        """Cancel tasks: as Ctrl-C does, and by force where that takes too long."""
        for force in (False, True):
            if pending:
                with suppress(self.ray.exceptions.RayError):
                    for reference in pending:
                        self.ray.cancel(reference, force=force)
                    _, pending = self.ray.wait(pending, num_returns=len(pending), timeout=_SECONDS_TO_STOP)


class _Lost(Exception):
    """The worker of a task is gone, or its result."""

    def __init__(self, reason: BaseException, *, memory: bool) -> None:
        super().__init__(_first_line(reason).partition(". ")[0].rstrip(".") + ".")
        self.memory = memory


class _Attempts:
    """Counts how often a task was lost since it came further."""

    def __init__(self, task: Task) -> None:
        self.task, self.number, self.came_to = task, 0, task.came_to()

    def count(self, lost: _Lost, most: int) -> None:
        """Count a loss; an error where the task does not come further."""
        came_to = self.task.came_to()
        self.number = self.number + 1 if came_to == self.came_to else 1
        self.came_to = came_to
        if self.number < most:
            log.warning(
                "%s has lost its worker and begins again elsewhere, from its checkpoint: %s", self.task.name, lost
            )
            return
        times = "once" if self.number == 1 else f"{self.number} times"
        told = f"{self.task.name} has lost its worker {times} without coming further: {lost}"
        if lost.memory and self.task.on_lost is not None:
            raise self.task.on_lost(told) from lost
        raise ClusterError(f"{told} Was it killed for want of memory? What is finished is kept.") from lost


@dataclass(frozen=True)
class _Outcome:
    """How a task ended on its worker."""

    value: Any
    error: Exception | None
    trace: str
    logged: list[tuple[int, str]]
    node: str


def _perform(
    setup: Mapping[str, Any],
    function: Callable[..., Any],
    boxed: Sequence[Any],
    arguments: Sequence[Any],
    board: Any,
    number: int,
) -> _Outcome:
    """Do a task, on its worker."""
    import ray

    records = _Records()
    log.addHandler(records)
    node, value, error, trace = socket.gethostname(), None, None, ""
    try:
        _check_versions(node, {**_versions(), "token": ""}, setup["version"])
        with _as_at_home(setup), records.of_warnings():
            shared = _received(ray, boxed[0], node)
            value = function(shared, *arguments, report=_Reporter(board, number))
    except Exception as reason:
        error, trace = _sendable(reason), traceback.format_exc()
    finally:
        log.removeHandler(records)
    return _Outcome(value, error, trace, records.told, node)


def check_seen(argument: str, file: Path) -> None:
    """Refuse the folder of a file that is not seen on this node, which has joined the cluster late."""
    if not file.is_file():
        _refuse_unseen(argument, file.parent, socket.gethostname())


def _refuse_unseen(argument: str, folder: Path, node: str) -> NoReturn:
    fix = "Take a folder of a network file system."
    checks.refuse(argument, "be a folder that all nodes see", f"{folder}, which node {node} does not see", fix)


@contextmanager
def left_by_others(folder: Path) -> Iterator[None]:
    """A block that begins when no other worker is in a folder: one that counts as lost may live on a while."""
    make_folder("folder", folder)
    until = time.monotonic() + _SECONDS_TO_LEAVE
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(folder, wait=False))
                break
            except BlockingIOError as reason:
                if time.monotonic() > until:
                    raise StorageError(f"{folder} is still in use by another worker, of {reason}.") from None
            time.sleep(0.2)
        yield


@contextmanager
def _as_at_home(setup: Mapping[str, Any]) -> Iterator[None]:
    """A block with the settings of the process that gave the task; workers do one task after the other."""
    dtype, threads, folder = torch.get_default_dtype(), torch.get_num_threads(), os.getcwd()
    environment = {name: os.environ.get(name) for name in setup["environment"]}
    try:
        torch.set_default_dtype(setup["dtype"])
        torch.set_num_threads(setup["threads"])
        os.environ.update(setup["environment"])
        sys.path += [entry for entry in setup["path"] if entry not in sys.path]  # files beside the script, if seen here
        with suppress(OSError):  # another machine may not have it
            os.chdir(setup["folder"])
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        for name, value in environment.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        os.chdir(folder)


def _received(ray: Any, reference: Any, node: str) -> Any:
    """What was shared; a module that is missing here is named."""
    try:
        return ray.cloudpickle.loads(ray.get(reference))
    except Exception as reason:
        absent = re.search(r"No module named '[\w.]+'", str(reason))
        if absent is None:
            raise
        raise ClusterError(
            f"node {node} lacks what the training refers to ({absent[0]}). Install it on all nodes. Is it a file "
            "beside the script? Submit the folder with it: `ray job submit --working-dir . -- python train.py`."
        ) from None


class _Reporter:
    """Reports of a task, which travel home without waiting; a few a second."""

    def __init__(self, board: Any, number: int) -> None:
        self.board, self.number, self.told = board, number, -float("inf")

    def __call__(self, report: Any) -> None:
        """Report, unless it was done just before."""
        if self.board is None or time.monotonic() - self.told < _SECONDS_BETWEEN_REPORTS:
            return
        self.told = time.monotonic()
        self.board.put.remote(self.number, pickle.dumps(report))


def _board() -> type:
    """A class that holds the last report of every task. Workers get its code, so that it needs no package."""

    class Board:
        def __init__(self) -> None:
            self.reports: dict[int, bytes] = {}

        def put(self, number: int, report: bytes) -> None:
            self.reports[number] = report

        def latest(self) -> dict[int, bytes]:
            return self.reports

    return Board


def _answer() -> Callable[[str], dict[str, Any]]:
    """A function that tells about a node. Workers get its code, so that it can tell that packages are missing."""

    def answer(token: str) -> dict[str, Any]:
        told: dict[str, Any] = {"token": "", "error": ""}
        try:
            with open(token) as file:
                told["token"] = file.read()
        except OSError as reason:
            told["token"] = f"{reason}"
        try:
            import importlib

            told.update(importlib.import_module("dissensus.train.cluster")._versions())
        except (ImportError, AttributeError) as reason:
            told["error"] = f"{type(reason).__name__}: {reason}"
        return told

    return answer


def _versions() -> dict[str, str]:
    """What must be the same on all nodes, for equal results."""
    torch_version = torch.__version__.partition("+")[0]  # builds for a CPU and for a GPU go together
    return {"dissensus": dissensus.__version__, "torch": torch_version, "source of dissensus": source_digest()}


def _check_versions(node: str, theirs: Mapping[str, Any], ours: Mapping[str, str] | None = None) -> None:
    ours = _versions() if ours is None else ours
    if theirs.get("error"):
        fix = f"Install dissensus {ours['dissensus']} with torch {ours['torch']} there."
        raise ClusterError(f"node {node} cannot import dissensus ({theirs['error']}). {fix}")
    for name, version in ours.items():
        if theirs[name] != version:
            fix = "Install the same on all nodes, so that results are equal."
            raise ClusterError(f"node {node} has {name} {theirs[name]}, and this process has {version}. {fix}")


def _check_sendable(cloudpickle: Any, name: str, part: Any) -> None:
    try:
        cloudpickle.dumps(part)
    except Exception as reason:
        fix = (
            "Functions, lambdas and classes of the script can be sent; open files, locks, generators and connections "
            "cannot. Make those inside of the function that uses them."
        )
        checks.refuse(name, "be something that can be sent to workers", _first_line(reason), fix, TypeError)


def _sendable(error: Exception) -> Exception:
    """An error that arrives as it is; one that would not is told in words."""
    with suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    if isinstance(error, OutOfMemory):
        return OutOfMemory(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def _first_line(reason: object) -> str:
    lines = [line for line in str(reason).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(reason).__name__


class _Records(logging.Handler):
    """Collects warnings of a task, logged or not, which are told at home."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's level and text."""
        with suppress(Exception):
            self.told.append((record.levelno, record.getMessage()))

    @contextmanager
    def of_warnings(self) -> Iterator[None]:
        """A block whose Python warnings are collected too."""

        def collect(message: Warning | str, category: type[Warning], *_: object) -> None:
            self.told.append((logging.WARNING, f"{category.__name__}: {message}"))

        with warnings.catch_warnings():
            warnings.showwarning = collect
            yield
