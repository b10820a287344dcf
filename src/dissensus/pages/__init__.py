"""Pages: one way to lay out text, a number, a table and a figure, in one self-contained HTML file.

A subject composes a `Page` from its records; `html` writes it.
"""

from dissensus.pages.html import html
from dissensus.pages.parts import (
    Badge,
    Cell,
    Drawing,
    FactList,
    Folded,
    Link,
    News,
    Number,
    Page,
    PageTable,
    Part,
    Section,
    Text,
)

__all__ = [
    "Badge",
    "Cell",
    "Drawing",
    "FactList",
    "Folded",
    "Link",
    "News",
    "Number",
    "Page",
    "PageTable",
    "Part",
    "Section",
    "Text",
    "html",
]
