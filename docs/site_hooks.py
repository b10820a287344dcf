"""What the site does to pages before they are rendered."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Contributing shows the repository's own page, whose links into ``docs/`` become links within the site."""
    if page.file.src_uri == "contributing.md":
        return (ROOT / "CONTRIBUTING.md").read_text().replace("](docs/", "](")
    return markdown
