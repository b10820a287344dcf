"""A page as one HTML file that needs no network, for screens of any width, light or dark, and print.

All content shows without a script. A page with a filter has a few lines of its own.
"""

import math
import re
from collections.abc import Sequence
from itertools import groupby
from xml.etree.ElementTree import Element

from dissensus.pages.markup import document, element, on_lines
from dissensus.pages.parts import (
    Badge,
    Cell,
    Drawing,
    FactList,
    Folded,
    Link,
    Number,
    Page,
    PageTable,
    Part,
    Section,
    Text,
)
from dissensus.pages.style import as_svg

STYLE = """
:root { color-scheme: light dark; --ink: #1c2428; --paper: #fdfdfb; --soft: #5d6a70; --line: #dfe4e2; --card: #fff;
  --mark: #0a7f83; --shade: rgb(28 36 40 / .16); }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebea; --paper: #14191b; --soft: #9fadb1; --line: #2d3639;
  --card: #1b2123; --mark: #4cc3c7; --shade: rgb(0 0 0 / .6); } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 17px/1.6 system-ui, sans-serif;
  overflow-wrap: break-word; }
main { max-width: 70rem; margin: 0 auto; padding: 2rem 1.1rem 4rem; }
h1 { font-size: clamp(1.6rem, 5vw, 2.4rem); line-height: 1.15; margin: 0 0 .6rem; text-wrap: balance; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 3rem 0 .4rem; border-top: 1px solid var(--line);
  padding-top: 1.6rem; }
h3 { font-size: 1.12rem; line-height: 1.35; margin: 2.4rem 0 .3rem; scroll-margin-top: 1rem; }
p { max-width: 46rem; margin: .5rem 0 1rem; }
a { color: var(--mark); }
code { font: .92em ui-monospace, monospace; }
.lead { font-size: 1.12rem; }
.finding { border-left: 4px solid var(--mark); padding: .1rem 0 .1rem 1rem; }
.note { color: var(--soft); font-size: .92rem; line-height: 1.45; }
p + .note { margin-top: -.6rem; }
.figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1.2rem; margin: 1rem 0; }
figure { margin: 0; padding: .9rem; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  min-width: 0; }
figure.whole { grid-column: 1 / -1; }
figure.beside { grid-column: 1 / -1; display: grid; grid-template-columns: 1fr 1fr; gap: 1.6rem; align-items: center; }
figure.middle { grid-column: 1 / -1; justify-self: center; width: min(100%, 40rem); }
.plot { overflow-x: auto; }
figure circle.value { fill: transparent; pointer-events: all; }
figure circle.value:hover { fill: var(--mark); fill-opacity: .3; }
figure svg { width: 100%; height: auto; display: block; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption { color: var(--soft); font-size: .92rem; line-height: 1.45; margin-top: .5rem; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; margin: 1rem 0; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid var(--line); text-align: left; }
th:first-child, td:first-child { padding-left: 0; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
td { max-width: 30rem; }
th.number, td.number { text-align: right; white-space: nowrap; }
th.long, th.long .over span { min-width: 10rem; max-width: 16rem; overflow-wrap: anywhere; white-space: normal; }
.over { display: flex; justify-content: flex-end; align-items: end; white-space: normal; }
.over small { flex: none; margin-left: .3em; }
td.beside-numbers { text-align: right; } td.short { white-space: nowrap; }
td.long { min-width: 8rem; overflow-wrap: anywhere; }
td.long:first-child { min-width: 14rem; } td .badge { white-space: normal; }
td:has(> .badge) { min-width: 8rem; }
td small, th small { color: var(--soft); font-size: .92em; font-weight: 400; display: inline-block; min-width: 11em;
  padding-left: .5em; text-align: left; }
td small.error, th small.error { min-width: 4.6em; padding-left: .3em; }
table.fitted td:first-child:not(.number) { width: 19rem; }
.columns { color: var(--soft); font-size: .86rem; line-height: 1.45; margin: -.4rem 0 1.4rem; max-width: none; }
.columns b { color: var(--ink); font-weight: 600; }
.contents { font-size: .95rem; margin: 1.4rem 0 0; } .contents ul { margin: .2rem 0; padding-left: 1.2rem; }
.filter { display: block; margin: 1.4rem 0 0; max-width: 46rem; font-size: .95rem; }
.filter output { color: var(--soft); }
.filter input { display: block; width: 100%; margin: .3rem 0; padding: .45rem .7rem; font: inherit; color: var(--ink);
  background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
[hidden] { display: none !important; }
dl { display: grid; grid-template-columns: fit-content(38%) 1fr; gap: .2rem 1.2rem; font-size: .95rem; }
dt { color: var(--soft); overflow-wrap: anywhere; } dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; margin: .5rem 0; }
.badge { display: inline-block; padding: .05rem .6rem; border-radius: 1rem; font-size: .86rem; white-space: nowrap;
  border: 1px solid var(--line); }
.badge.good { background: #1a7f4b; border-color: #1a7f4b; color: #fff; }
.badge.fair { background: #f2c14e; border-color: #f2c14e; color: #2a2200; }
.badge.bad { background: #b3261e; border-color: #b3261e; color: #fff; }
.badge.none { color: var(--soft); white-space: normal; }
td .detail { color: var(--soft); font-size: .86rem; line-height: 1.35; margin: .2rem 0 0; max-width: 13rem; }
@media (max-width: 44rem) {
  main { padding: 1.4rem .9rem 3rem; } .figures { grid-template-columns: minmax(0, 1fr); }
  figure { margin: 0 -.9rem; padding: .9rem .3rem; border-width: 1px 0; border-radius: 0; }
  figure.beside { display: block; } figure.middle { justify-self: stretch; width: auto; }
  figcaption { padding: 0 .6rem; }
  th, td { padding: .35rem .5rem; } td.short:first-child { white-space: normal; }
  .over { display: block; } .over small { margin: 0; } th.long .over span { min-width: 0; }
  td small, th small { display: block; min-width: 0; padding: 0; text-align: right; white-space: normal;
    line-height: 1.25; }
  .scroll, .plot { --under: var(--paper); background:
    linear-gradient(to left, var(--under) 1rem, transparent) right / 2rem 100% no-repeat local,
    linear-gradient(to left, var(--shade), transparent) right / .8rem 100% no-repeat scroll; }
  .plot { --under: var(--card); }
  table.scrolled th:first-child, table.scrolled td:first-child { position: sticky; left: 0; min-width: 3rem;
    background: var(--paper); }
  table.fitted th, table.fitted td { padding: .35rem 0 .35rem .5rem;
    font-size: .86rem; } table.fitted th:first-child, table.fitted td:first-child { padding-left: 0; }
  table.fitted td:first-child:not(.number) { width: auto; hyphens: auto; } table.fitted td.long { min-width: 5.5rem; }
  table.cards, table.cards tbody { display: block; } table.cards thead { display: none; }
  table.cards tr { display: flex; flex-wrap: wrap; gap: .05rem 1rem; padding: .7rem 0;
    border-bottom: 1px solid var(--line); }
  table.cards td { border: 0; padding: 0; min-width: 0; max-width: none; text-align: left; white-space: normal; }
  table.cards td:empty { display: none; } table.cards td:first-child, table.cards td.long { flex-basis: 100%; }
  table.cards td:first-child { font-weight: 600; }
  table.cards td small { display: inline; } td .detail { max-width: none; }
  table.cards td[data-label]:not(:first-child)::before,
  table.cards td.number:first-child::before { content: attr(data-label) " "; color: var(--soft);
    font-size: .86rem; }
}
@media print { body { font-size: 11pt; background: #fff; color: #000; } main { max-width: none; padding: 0; }
  figure, tr { break-inside: avoid; } h2 { break-after: avoid; } }
"""
FILTER = """
(() => {
  const field = document.querySelector(".filter"), input = field.querySelector("input");
  const entries = [...document.querySelectorAll("[data-filter]")];
  const rows = entries.filter(entry => entry.tagName === "TR");
  const show = () => {
    const words = input.value.toLowerCase().split(/\\s+/).filter(Boolean);
    for (const entry of entries) entry.hidden = !words.every(word => entry.dataset.filter.includes(word));
    const shown = rows.filter(row => !row.hidden).length;
    field.querySelector("output").textContent = words.length ? `${shown} of ${rows.length} shown` : "";
  };
  field.hidden = false;
  input.addEventListener("input", show);
  show();
})();
"""
"""Hides every row and section whose keywords lack a word that is typed. Without scripts its field is hidden."""
_FEWEST_LISTED = 3
"""Sections from which a page has a table of contents."""
_PAIRED = 500
"""Width in pixels up to which a figure can stand beside another one with its text at full size."""
_SMALLEST_TEXT = 11
"""Size of a figure's smallest text on every screen, in pixels."""
_TABLE_CLASSES = {"scroll": "scrolled", "cards": "cards", "fit": "fitted"}
_LONG_WORD = 24
"""Characters of a word up to which a column's name is never broken inside of it."""
_SHORT = 18
"""Characters of a cell that is not broken over lines; a longer one takes a line of a card to itself."""


def html(page: Page) -> str:
    """The page as the text of an HTML file."""
    sections = [part for part in page.parts if isinstance(part, Section)]
    first = next((i for i, part in enumerate(page.parts) if isinstance(part, Section | Drawing)), len(page.parts))
    opening = [*_parts(page.parts[:first], 2), *_contents(sections), *([_filter(page.filter)] if page.filter else [])]
    body = on_lines(element("h1", None, page.title), *opening, *_parts(page.parts[first:], 2))
    return document(page.title, element("main", None, *body), style=STYLE, script=FILTER if page.filter else "")


def _contents(sections: Sequence[Section]) -> list[Element]:
    """Links to the sections of a page."""
    if len(sections) < _FEWEST_LISTED:
        return []
    links = [element("li", None, element("a", {"href": f"#{_anchor(part)}"}, part.title)) for part in sections]
    attributes = {"class": "contents", "aria-label": "Contents"}
    return [element("nav", attributes, "On this page", element("ul", None, *on_lines(*links)))]


def _filter(label: str) -> Element:
    return element(
        "label", {"class": "filter", "hidden": "hidden"}, label, element("input", {"type": "search"}), element("output")
    )


def _anchor(section: Section) -> str:
    """The name that links to a section use: its anchor, or its title in letters and digits."""
    return section.anchor or re.sub(r"\W+", "-", section.title.lower()).strip("-")


def _parts(parts: Sequence[Part], level: int) -> list[Element]:
    """Parts one after another; ``level`` is that of the next heading."""
    elements: list[Element] = []
    for is_drawing, group in groupby(parts, lambda part: isinstance(part, Drawing)):
        neighbours = list(group)
        elements += (
            [_drawings(neighbours)] if is_drawing else [node for part in neighbours for node in _part(part, level)]
        )
    return elements


def _part(part: Part, level: int) -> list[Element]:
    match part:
        case Text():
            return [element("p", {"class": part.kind}, *_prose(part.text))]
        case Badge():
            return [element("p", None, _badge(part))]
        case PageTable():
            return [_table(part), *_column_notes(part)]
        case FactList():
            pairs = [(element("dt", None, name), element("dd", None, value)) for name, value in part.pairs]
            return [element("dl", None, *(item for pair in pairs for item in pair))]
        case Folded():
            return [element("details", None, element("summary", None, part.summary), *_parts(part.parts, level))]
        case Section():
            heading = element(f"h{level}", {"id": _anchor(part)}, part.title)
            content = [heading, *_parts(part.parts, level + 1)]
            return [element("section", {"data-filter": part.keywords.lower()}, *content)] if part.keywords else content
        case Drawing():
            return [_drawings([part])]


def _prose(text: str) -> list[Element | str]:
    """Text in which a number stays on one line with its symbol or its per cent sign, and `names` are code."""
    text = re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", text)
    text = re.sub("([βελ]) = ", "\\1\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}", text)
    pieces = re.split(r"`([^`]+)`", text)
    return [element("code", None, piece) if i % 2 else piece for i, piece in enumerate(pieces)]


def _badge(badge: Badge) -> Element:
    return element("span", {"class": f"badge {badge.news}"}, badge.text)


def _drawings(drawings: Sequence[Part]) -> Element:
    """Figures in rows of two. A wide one has a row to itself, and so has one that is left over."""
    figures = [_figure(drawing) for drawing in drawings if isinstance(drawing, Drawing)]
    alone: Element | None = None
    for figure in figures:
        if figure.get("class") == "whole":
            _take_a_row(alone)
            alone = None
        else:
            alone = figure if alone is None else None
    _take_a_row(alone)
    return element("div", {"class": "figures"}, *on_lines(*figures))


def _take_a_row(figure: Element | None) -> None:
    """Lay out a figure that has no neighbour: with its caption beside it, or in the middle where it has none."""
    if figure is not None:
        figure.set("class", "middle" if figure.find("figcaption") is None else "beside")


def _figure(drawing: Drawing) -> Element:
    svg = as_svg(drawing.figure, drawing.description or drawing.caption)
    width = _readable_width(svg)
    svg.set("style", f"min-width: {width}px")
    caption = [element("figcaption", None, *_prose(drawing.caption))] if drawing.caption else []
    attributes = {"class": "whole" if width > _PAIRED else ""}
    return element("figure", attributes, element("div", {"class": "plot"}, svg), *caption)


def _readable_width(svg: Element) -> int:
    """Pixels at which the smallest text of a figure has `_SMALLEST_TEXT`; on narrower screens the figure scrolls."""
    sizes = [float(size) for node in svg.iter("text") for size in re.findall(r"([\d.]+)px", node.get("style", ""))]
    width = float(svg.get("viewBox", "0 0 0 0").split()[2])
    return math.ceil(width * max(1.0, _SMALLEST_TEXT / min(sizes, default=_SMALLEST_TEXT)))


def _table(table: PageTable) -> Element:
    columns = [[row[i] for row in table.rows] for i in range(len(table.header))]
    numeric = [_is_numeric(cells) for cells in columns]
    names = [
        element(
            "th",
            {"scope": "col", "class": _name_class(name, right), "title": table.columns.get(name, "")},
            *_column_name(name, cells),
        )
        for name, right, cells in zip(table.header, numeric, columns, strict=True)
    ]
    labels = [name if table.narrow == "cards" else "" for name in table.header]
    several_badges = sum(any(isinstance(cell, Badge) for cell in cells) for cells in columns) > 1
    keywords = table.keywords or [""] * len(table.rows)
    rows = [
        element(
            "tr",
            {"data-filter": words.lower()},
            *(_cell(*cell, several_badges) for cell in zip(row, labels, numeric, strict=True)),
        )
        for row, words in zip(table.rows, keywords, strict=True)
    ]
    head, body = element("thead", None, element("tr", None, *names)), element("tbody", None, *on_lines(*rows))
    content = element("table", {"class": _TABLE_CLASSES[table.narrow]}, *on_lines(head, body))
    return element("div", {"class": "scroll"}, content)


def _column_notes(table: PageTable) -> list[Element]:
    """What columns hold, below a table."""
    known = [(name, note) for name, note in table.columns.items() if name in table.header]
    notes = [item for name, note in known for item in (element("b", None, name), f": {note}. ")]
    return [element("p", {"class": "columns"}, *notes)] if notes else []


def _name_class(name: str, right: bool) -> str:
    has_long_word = any(len(word) > _LONG_WORD for word in name.split())
    return " ".join([*(["number"] if right else []), *(["long"] if has_long_word else [])])


def _column_name(name: str, cells: Sequence[Cell]) -> list[Element | str]:
    """A column's name above its numbers, and what stands above their intervals or errors."""
    if not any(isinstance(cell, Number) and cell.interval for cell in cells):
        return [name]
    is_range = any(isinstance(cell, Number) and cell.is_range for cell in cells)
    above = element("small", None, "95 % interval") if is_range else element("small", {"class": "error"})
    return [element("div", {"class": "over"}, element("span", None, name), above)]


def _is_numeric(cells: Sequence[Cell]) -> bool:
    return any(isinstance(cell, Number) for cell in cells)


def _cell(cell: Cell, label: str, numeric: bool, several_badges: bool) -> Element:
    """A cell with the name of its column for narrow screens, which the only badge of a row can do without."""
    if isinstance(cell, Number):
        kind = "number"
    elif isinstance(cell, str) and len(cell) > _SHORT:
        kind = "long"
    elif numeric:
        kind = "beside-numbers"
    else:
        kind = "short" if isinstance(cell, str) and cell else ""
    speaks_for_itself = isinstance(cell, Badge) and not cell.detail and not several_badges
    return element("td", {"class": kind, "data-label": "" if speaks_for_itself else label}, *_cell_content(cell))


def _cell_content(cell: Cell) -> list[Element | str]:
    match cell:
        case Number():
            kind = "" if cell.is_range else "error"
            return [cell.text, *([" ", element("small", {"class": kind}, cell.interval)] if cell.interval else [])]
        case Badge():
            return [_badge(cell), *([element("p", {"class": "detail"}, cell.detail)] if cell.detail else [])]
        case Link():
            return [element("a", {"href": f"#{cell.anchor}"}, cell.text)]
        case _:
            return [cell]
