"""Work in child processes, which may be killed, and how they ended.

Children are forked, so that torch is imported once. The parent therefore never computes a gradient or uses a GPU.
"""

import contextlib
import importlib
import linecache
import os
import pickle
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dissensus

PACKAGE = Path(dissensus.__file__).parent


@dataclass(frozen=True)
class Problem:
    """An exception that ended a child."""

    kind: str
    message: str
    deliberate: bool
    """Whether dissensus raised it on purpose, with a sentence of its own."""
    place: str
    errno: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} in {self.place}: {' '.join(self.message.split())}"[:240]


@dataclass(frozen=True)
class Ending:
    """How a child ended: with a value, an exception or a signal."""

    value: Any
    problem: Problem | None
    signal: int
    stopped: bool
    """Whether its parent killed it, because it was told to or because time was up."""
    text: str
    """What it printed and logged."""

    @property
    def crash(self) -> str:
        """What no process may end with: an error that is not dissensus's own, or a signal; else empty."""
        if self.signal and not self.stopped:
            return f"ended by {signal.Signals(self.signal).name}"
        if self.problem is not None and not self.problem.deliberate:
            return str(self.problem)
        return ""


class Child:
    """A function that runs in a child process.

    The function may call ``ready()`` of this module once; `wait_ready` then returns in the parent.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, memory: int | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-child-"))
        self.reader, writer = os.pipe()
        self.stopped = False
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.reader)
            _live(function, arguments, self.folder, writer, memory)
        os.close(writer)

    def wait_ready(self, limit: float = 120.0) -> bool:
        """Wait until the function has called ``ready()`` or the child has ended; return whether it is ready."""
        if not select.select([self.reader], [], [], limit)[0]:
            return False
        return os.read(self.reader, 1) == b"r"

    def kill(self) -> None:
        """Kill the child with SIGKILL, if it still runs."""
        self.stopped = True
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, limit: float = 300.0) -> Ending:
        """Wait for the child's end; it is killed when the time is up."""
        deadline = time.monotonic() + limit
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline and not self.stopped:
                self.kill()
            time.sleep(0.002)
        os.close(self.reader)
        value, problem = None, None
        if (self.folder / "result").exists():
            value, problem = pickle.loads((self.folder / "result").read_bytes())
        text = (self.folder / "text").read_text(errors="replace") if (self.folder / "text").exists() else ""
        shutil.rmtree(self.folder, ignore_errors=True)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if not number and value is None and problem is None and os.WEXITSTATUS(status):
            problem = Problem("exit", f"code {os.WEXITSTATUS(status)}", False, "the child")
        return Ending(value, problem, number, self.stopped and bool(number), text)


def call(function: Callable[..., Any], *arguments: Any, limit: float = 300.0, memory: int | None = None) -> Ending:
    """Run a function in a child to its end."""
    return Child(function, *arguments, memory=memory).wait(limit)


_ready_pipe = -1


def ready() -> None:
    """Tell the parent, from inside of a child, that the interesting part begins."""
    os.write(_ready_pipe, b"r")


def _live(
    function: Callable[..., Any], arguments: tuple[Any, ...], folder: Path, writer: int, memory: int | None
) -> None:
    """The life of a child."""
    global _ready_pipe
    _ready_pipe = writer
    code = 0
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        text = os.open(folder / "text", os.O_WRONLY | os.O_CREAT)
        os.dup2(text, 1)
        os.dup2(text, 2)
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        result: Any = None
        problem: Problem | None = None
        try:
            result = function(*arguments)
        except BaseException as reason:
            problem = described(reason)
        temporary = folder / "unfinished"
        temporary.write_bytes(pickle.dumps((result, problem)))
        temporary.replace(folder / "result")
    except BaseException:
        traceback.print_exc()
        code = 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def described(reason: BaseException) -> Problem:
    """An exception as plain data."""
    frames = traceback.extract_tb(reason.__traceback__)
    last = frames[-1] if frames else None
    place = "nowhere" if last is None else f"{Path(last.filename).name}:{last.lineno}"
    kind = type(reason)
    return Problem(kind.__name__, str(reason), _is_deliberate(reason), place, getattr(reason, "errno", None))


def _is_deliberate(reason: BaseException) -> bool:
    """Whether the error's class is ours, or a ``raise`` statement of the package raised it."""
    if isinstance(reason, KeyboardInterrupt) or type(reason).__module__.partition(".")[0] == "dissensus":
        return True
    frames = traceback.extract_tb(reason.__traceback__)
    if not frames or PACKAGE not in Path(frames[-1].filename).parents:
        return False
    line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0)
    return line.strip().startswith("raise ") and bool(str(reason))


def preload(function: Callable[..., Any], *arguments: Any) -> None:
    """Import here what a function imports in a child, so that later children start at once."""
    for name in call(_modules_of, function, *arguments).value or ():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _modules_of(function: Callable[..., Any], *arguments: Any) -> list[str]:
    before = set(sys.modules)
    with contextlib.suppress(Exception):
        function(*arguments)
    return [name for name in sys.modules if name not in before]
