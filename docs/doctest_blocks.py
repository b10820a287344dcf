"""An extension of griffe, by which the reference shows the examples of docstrings as code.

Examples stand in docstrings as they are tested, as lines that begin with ``>>>``. Markdown takes such lines for nested
quotations, so a fence is put around each example before the page is made.
"""

from typing import Any

from griffe import Extension, Object


def fenced(text: str) -> str:
    """A docstring with a fence around every example; an example ends at an empty line, as for doctest."""
    lines: list[str] = []
    inside: str | None = None  # the indentation of the example
    in_fence = False
    for line in text.splitlines():
        stripped = line.lstrip()
        if inside is None and stripped.startswith("```"):
            in_fence = not in_fence
        if inside is None and not in_fence and stripped.startswith(">>> "):
            inside = line[: len(line) - len(stripped)]
            if lines and lines[-1].strip():
                lines.append("")
            lines.append(f"{inside}```pycon")
        elif inside is not None and not stripped:
            lines.append(f"{inside}```")
            inside = None
        lines.append(line)
    if inside is not None:
        lines.append(f"{inside}```")
    return "\n".join(lines)


class DoctestBlocks(Extension):
    """Puts fences around the examples of every docstring."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for every module, class, function and attribute that griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
