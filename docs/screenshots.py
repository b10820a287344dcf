"""Photograph the page of docs/report.md's example, light and dark, with Chromium.

Usage: python docs/screenshots.py
"""

import contextlib
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from outputs import blocks

DOCS = Path(__file__).parent
SIZE = (1100, 1250)
THEMES = {"report.png": 1, "report-dark.png": 0}
"""Files, and Blink's number of the colour scheme that the reader prefers."""


def photograph(page: Path, picture: Path, scheme: int, browser: str, profile: Path) -> None:
    """Write the top of a page as a PNG."""
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
    options += [f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={SIZE[0]},{SIZE[1]}"]
    command = [browser, *options, f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, capture_output=True, timeout=120, check=True)


if __name__ == "__main__":
    found = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    browsers = [name for name in found if name]
    if not browsers:
        sys.exit("no Chromium is installed; `apt-get install chromium` brings one")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        example = next(blocks((DOCS / "report.md").read_text()))
        with contextlib.redirect_stdout(io.StringIO()):
            exec(example.code, {"__name__": "__main__"})
        for name, scheme in THEMES.items():
            target = DOCS / "assets" / name
            photograph(Path(folder) / "report.html", target, scheme, browsers[0], Path(folder) / "profile")
