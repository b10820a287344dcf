"""Run the code of pages and write what it prints below it.

Usage: python docs/outputs.py [--check] [PAGE ...]

A page shows an output where ``<!-- output -->`` follows a block of code; all text up to ``<!-- /output -->`` is
written anew. The blocks of a page share their names, and run in an empty folder. Blocks of Python are executed, and of
console blocks the lines that begin with ``$ ``. A block with a title, as in ``python title="train.py"``, is also
written to that file. A block that binds the name ``figure`` shows that matplotlib figure, which
``<!-- output: what is drawn -->`` describes. Each mark keeps a digest of all code up to it. With ``--check`` nothing
runs: pages are named whose code has changed since.
"""

import contextlib
import hashlib
import io
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "docs/index.md",
    *(f"docs/tutorials/{path.name}" for path in sorted((ROOT / "docs" / "tutorials").glob("*.md"))),
)
BLOCK = re.compile(
    r'^```(?P<kind>python|console)(?: title="(?P<file>[\w.]+)")?\n(?P<code>.*?)^```\n'
    r"(?:\n<!-- output(?P<digest> \w+)?(?:: (?P<words>[^\n]*?))? -->\n(?P<output>.*?)<!-- /output -->\n)?",
    flags=re.DOTALL | re.MULTILINE,
)
MADE = re.compile(r"<!-- made -->\n.*?<!-- /made -->\n", flags=re.DOTALL)
PROGRAMS = {
    "dissensus": f"{sys.executable} -m dissensus",
    "torchrun": f"{sys.executable} -m torch.distributed.run",
}
WIDTH = 100
LINES = 22
"""Of a command's output; what follows is left out."""


class Block(NamedTuple):
    """A block of code of a page, and the mark of its output."""

    kind: str
    code: str
    file: str
    """The file that the block is; empty for most."""
    line: int
    shows: bool
    """Whether a mark for the output follows."""
    digest: str
    """Of the code of this block and of all blocks before it."""
    stored: str
    """The digest in the mark."""
    words: str
    """What a figure shows."""
    match: re.Match[str]


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a page, in order."""
    code = hashlib.sha256()
    for match in BLOCK.finditer(text):
        code.update(match["code"].encode())
        shows = match["output"] is not None
        stored, words = (match["digest"] or "").strip(), match["words"] or ""
        line = text[: match.start()].count("\n") + 1
        digest = code.hexdigest()[:8]
        yield Block(match["kind"], match["code"], match["file"] or "", line, shows, digest, stored, words, match)


def is_stale(text: str) -> bool:
    """Whether some code has changed since its output was written."""
    return any(block.shows and block.digest != block.stored for block in blocks(text))


def rendered(page: Path) -> str:
    """The text of a page with the outputs of its code. Figures are written as files."""
    text, parts, end = page.read_text(), [], 0
    names: dict[str, Any] = {"__name__": "__main__"}
    start = core_seconds()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for number, block in enumerate(blocks(text), 1):
            if block.kind == "console" and not block.shows:
                continue
            figure_before = names.get("figure")
            printed = executed(block, page, names) if block.kind == "python" else commanded(block)
            if not block.shows:
                if printed.strip():
                    sys.exit(f"{page.name}, line {block.line}: the block prints, and no mark for its output follows")
                continue
            content = f"\n```text\n{folded(printed)}\n```\n" if printed.strip() else ""
            if names.get("figure") is not figure_before:
                content += f"\n{shown(names['figure'], page, number, block.words)}\n"
            words = f": {block.words}" if block.words else ""
            mark = f"\n<!-- output {block.digest}{words} -->\n{content}\n<!-- /output -->\n"
            parts += [text[end : block.match.end("code")], "```\n", mark]
            end = block.match.end()
    text = "".join(parts) + text[end:]
    return MADE.sub(f"<!-- made -->\n\n{provenance(page, core_seconds() - start)}\n\n<!-- /made -->\n", text)


def executed(block: Block, page: Path, names: dict[str, Any]) -> str:
    """What a block of Python prints."""
    printed = io.StringIO()
    if block.file:
        Path(block.file).write_text(block.code)
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile("\n" * block.line + block.code, str(page), "exec"), names)
    return printed.getvalue()


def commanded(block: Block) -> str:
    """What the commands of a console block print."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": str(WIDTH), "TERM": "dumb", "NO_COLOR": "1"}
    printed = ""
    for line in re.sub(r"\\\n\s*", "", block.code).splitlines():
        if line.startswith("$ "):
            command = re.sub(r"^\$ (dissensus|torchrun)\b", lambda match: f"$ {PROGRAMS[match[1]]}", line)
            command = command.removeprefix("$ ")
            done = subprocess.run(command, shell=True, env=env, text=True, capture_output=True, check=False)
            if done.returncode:
                sys.exit(f"`{line}` failed:\n{done.stdout}{done.stderr}")
            lines = [text.rstrip() for text in done.stdout.splitlines()]
            printed += "\n".join([*lines[:LINES], *(["  ..."] if len(lines) > LINES else [])]) + "\n"
    return printed


def folded(printed: str) -> str:
    """A text as a terminal of 100 columns shows it, broken between words."""
    lines = []
    for line in printed.rstrip().splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent) if len(line) > WIDTH else [line]
    return "\n".join(line.rstrip() for line in lines)


def shown(figure: Any, page: Path, number: int, words: str) -> str:
    """Write a figure beside the page's pictures, and the Markdown that shows it."""
    from pictures import as_file

    file = ROOT / "docs" / "assets" / "tutorials" / f"{page.stem}-{number}.svg"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(as_file([figure], words))
    return f"![{words}]({os.path.relpath(file, page.parent)})"


def core_seconds() -> float:
    """Time of cores that this process and its commands have taken, which other work on the machine hardly changes."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def provenance(page: Path, seconds: float) -> str:
    """The machine, versions and time of outputs, in a line."""
    import torch

    import dissensus

    versions = f"torch {torch.__version__}, dissensus {dissensus.__version__}"
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    name = page.relative_to(ROOT)
    machine = f"{platform.machine()}, {threads}, {versions}, {seconds:.0f} seconds of a core"
    return f"*Outputs: `python docs/outputs.py {name}`; {machine}.*"


if __name__ == "__main__":
    check = "--check" in sys.argv[1:]
    pages = [name for name in sys.argv[1:] if name != "--check"] or list(PAGES)
    if check:
        stale = [name for name in pages if is_stale((ROOT / name).read_text())]
        sys.exit(f"code has changed since its output: {', '.join(stale)}; run python docs/outputs.py" if stale else 0)
    for name in pages:
        (ROOT / name).write_text(rendered(ROOT / name))
