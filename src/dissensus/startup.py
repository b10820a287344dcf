"""What is set up before the slow imports, which take seconds: signals of the program, and the parent of a worker.

| process | what happens during the imports |
|---|---|
| ``dissensus``, ``python -m dissensus`` | SIGINT ends it quietly, instead of in a traceback through other packages |
| a worker of a study | it ends with the process that started it (Linux) |
"""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

INTERRUPTED = 130
"""The exit code of an interrupted program: 128 plus the number of the signal, as in shells."""
PARENT = "_DISSENSUS_WORKER_OF"
"""The variable that tells a new worker the process which starts it."""
_PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when its parent ends."""


def is_program() -> bool:
    """Whether this process was started as ``dissensus`` or ``python -m dissensus``."""
    if not sys.argv:
        return False
    if sys.argv[0] == "-m":  # Python looks for the module that it is to run
        return "dissensus" in sys.orig_argv and sys.orig_argv[sys.orig_argv.index("dissensus") - 1] == "-m"
    return Path(sys.argv[0]).stem == "dissensus"


def end_quietly() -> None:
    """From here on SIGINT ends the process without a word; a handler that someone else has set stays."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_again() -> None:
    """From here on SIGINT raises `KeyboardInterrupt` again."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    os._exit(INTERRUPTED)


def end_with(parent: int) -> None:
    """Let Linux kill this process when its parent ends; end it now if the parent has ended already."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if is_program():
    end_quietly()
if (_parent := os.environ.pop(PARENT, "")).isdecimal():
    end_with(int(_parent))
