"""Files that a user names for results: pages, figures, JSON.

A regular file is replaced atomically. A link is followed, and the file that it leads to is replaced. A device, a pipe
or a socket is written to as it is and never replaced.
"""

import os
import stat
from pathlib import Path

from dissensus.storage import write_atomically

_OPEN_FILES = (Path("/dev/fd"), Path("/proc"))
"""Folders with links to files that a process has opened, such as ``/dev/stdout``."""


def write_output(path: str | Path, content: bytes) -> None:
    """Write a file that a user has named; readers of a regular file see the old or the new content, never a part.

    Raises:
        OSError: The file cannot be written: it is a folder, its folder does not exist, the disk is full.
    """
    file = Path(path)
    if is_replaceable(file):
        write_atomically(Path(os.path.realpath(file)), content)
        return
    with file.open("ab", buffering=0) as stream:
        left = memoryview(content)
        while left:
            left = left[stream.write(left) :]


def is_replaceable(file: Path) -> bool:
    """Whether a name stands for a regular file, or for none yet, so that a new file may take its place.

    >>> is_replaceable(Path("/dev/stdout")), is_replaceable(Path("absent.json"))
    (False, True)
    """
    if any(link.is_relative_to(folder) for link in _links(file) for folder in _OPEN_FILES):
        return False
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True


def same_place(first: Path, second: Path) -> bool:
    """Whether two names stand for one file or folder, also where links lead there or nothing is there yet.

    >>> same_place(Path("a/../b.json"), Path("b.json")), same_place(Path("a.json"), Path("b.json"))
    (True, False)
    """
    try:
        return os.path.samefile(first, second)
    except (OSError, ValueError):  # one of them does not exist, or cannot
        pass
    try:
        return os.path.realpath(first) == os.path.realpath(second)
    except (OSError, ValueError):
        return False


def _links(file: Path) -> list[Path]:
    """A name and the links that it leads through."""
    names = [file.absolute()]
    while names[-1].is_symlink() and len(names) < _MOST_LINKS:
        names.append(Path(os.path.normpath(names[-1].parent / names[-1].readlink())))
    return names


_MOST_LINKS = 40
"""Links that a system follows before it takes them for a circle."""
