"""A page as one HTML file that needs no network and no script, for screens of any width, light or dark, and print."""

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
body { margin: 0; background: var(--paper); color: var(--ink); font: 17px/1.6 system-ui, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2rem 1.1rem 4rem; }
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
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1.2rem;
  margin: 1rem 0; }
.figures.even { grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; max-width: 40rem; padding: .9rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
figure svg { width: 100%; height: auto; display: block; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption { color: var(--soft); font-size: .92rem; line-height: 1.45; margin-top: .5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; margin: 1rem 0; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid var(--line); text-align: left; }
th:first-child, td:first-child { padding-left: 0; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
td { max-width: 30rem; }
th.number, td.number { text-align: right; white-space: nowrap; }
td.beside-numbers { text-align: right; } td.short { white-space: nowrap; }
td small { color: var(--soft); font-size: .92em; display: inline-block; min-width: 11em; padding-left: .5em;
  text-align: left; }
table.cards { width: 100%; } table.fitted td:first-child:not(.number) { width: 19rem; }
dl { display: grid; grid-template-columns: fit-content(38%) 1fr; gap: .2rem 1.2rem; font-size: .95rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; margin: .5rem 0; }
.badge { display: inline-block; padding: .05rem .6rem; border-radius: 1rem; font-size: .86rem; white-space: nowrap;
  border: 1px solid var(--line); }
.badge.good { background: #1a7f4b; border-color: #1a7f4b; color: #fff; }
.badge.fair { background: #f2c14e; border-color: #f2c14e; color: #2a2200; }
.badge.bad { background: #b3261e; border-color: #b3261e; color: #fff; }
.badge.none { color: var(--soft); white-space: normal; }
td .detail { color: var(--soft); font-size: .86rem; line-height: 1.35; margin: .2rem 0 0; max-width: 13rem; }
@media (max-width: 44rem) {
  th, td { padding: .35rem .5rem; } td.short:first-child { white-space: normal; }
  td small { display: block; min-width: 0; padding: 0; text-align: right; white-space: normal; line-height: 1.25; }
  .scroll { background: linear-gradient(to left, var(--paper) 1rem, transparent) right / 2rem 100% no-repeat local,
    linear-gradient(to left, var(--shade), transparent) right / .8rem 100% no-repeat scroll; }
  table.scrolled th:first-child, table.scrolled td:first-child { position: sticky; left: 0; min-width: 3rem;
    background: var(--paper); }
  table.fitted { width: 100%; } table.fitted th, table.fitted td { padding: .35rem 0 .35rem .5rem;
    font-size: .86rem; } table.fitted th:first-child, table.fitted td:first-child { padding-left: 0; }
  table.fitted td:first-child:not(.number) { width: auto; hyphens: auto; }
  table.cards, table.cards tbody { display: block; } table.cards thead { display: none; }
  table.cards tr { display: flex; flex-wrap: wrap; gap: .05rem 1rem; padding: .7rem 0;
    border-bottom: 1px solid var(--line); }
  table.cards td { border: 0; padding: 0; max-width: none; text-align: left; white-space: normal; }
  table.cards td:empty { display: none; } table.cards td:first-child, table.cards td.long { flex-basis: 100%; }
  table.cards td:first-child { font-weight: 600; }
  table.cards td small { display: inline; } td .detail { max-width: none; }
  table.cards td[data-label]:not(:first-child)::before { content: attr(data-label) " "; color: var(--soft);
    font-size: .86rem; }
}
@media print { body { font-size: 11pt; background: #fff; color: #000; } main { max-width: none; padding: 0; }
  figure, tr { break-inside: avoid; } h2 { break-after: avoid; } }
"""
_TABLE_CLASSES = {"scroll": "scrolled", "cards": "cards", "fit": "fitted"}
_SHORT = 24
"""Characters of a cell that is not broken over lines; a longer one takes a line of a card to itself."""


def html(page: Page) -> str:
    """The page as the text of an HTML file."""
    heading = element("h1", None, page.title)
    main = element("main", None, *on_lines(heading, *_parts(page.parts, 2)))
    return document(page.title, main, style=STYLE)


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
            return [_table(part)]
        case FactList():
            pairs = [(element("dt", None, name), element("dd", None, value)) for name, value in part.pairs]
            return [element("dl", None, *(item for pair in pairs for item in pair))]
        case Folded():
            return [element("details", None, element("summary", None, part.summary), *_parts(part.parts, level))]
        case Section():
            return [element(f"h{level}", {"id": part.anchor}, part.title), *_parts(part.parts, level + 1)]
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
    """Figures side by side where there is room: two columns for two or four of them, else up to three."""
    figures = [_figure(drawing) for drawing in drawings if isinstance(drawing, Drawing)]
    even = " even" if len(drawings) in (2, 4) else ""
    return element("div", {"class": f"figures{even}"}, *on_lines(*figures))


def _figure(drawing: Drawing) -> Element:
    svg = as_svg(drawing.figure, drawing.description or drawing.caption)
    caption = [element("figcaption", None, *_prose(drawing.caption))] if drawing.caption else []
    return element("figure", None, svg, *caption)


def _table(table: PageTable) -> Element:
    numeric = [_is_numeric([row[i] for row in table.rows]) for i in range(len(table.header))]
    names = [
        element("th", {"scope": "col", "class": "number" if right else ""}, name)
        for name, right in zip(table.header, numeric, strict=True)
    ]
    labels = [name if table.narrow == "cards" else "" for name in table.header]
    rows = [
        element("tr", None, *(_cell(*cell) for cell in zip(row, labels, numeric, strict=True))) for row in table.rows
    ]
    head, body = element("thead", None, element("tr", None, *names)), element("tbody", None, *on_lines(*rows))
    content = element("table", {"class": _TABLE_CLASSES[table.narrow]}, *on_lines(head, body))
    return element("div", {"class": "scroll"}, content)


def _is_numeric(cells: Sequence[Cell]) -> bool:
    return any(isinstance(cell, Number) for cell in cells)


def _cell(cell: Cell, label: str, numeric: bool) -> Element:
    if isinstance(cell, Number):
        kind = "number"
    elif isinstance(cell, str) and len(cell) > _SHORT:
        kind = "long"
    elif numeric:
        kind = "beside-numbers"
    else:
        kind = "short" if isinstance(cell, str) and cell else ""
    is_plain_badge = isinstance(cell, Badge) and not cell.detail
    attributes = {"class": kind, "data-label": "" if is_plain_badge else label}
    return element("td", attributes, *_cell_content(cell))


def _cell_content(cell: Cell) -> list[Element | str]:
    match cell:
        case Number():
            return [cell.text, *([" ", element("small", None, cell.interval)] if cell.interval else [])]
        case Badge():
            return [_badge(cell), *([element("p", {"class": "detail"}, cell.detail)] if cell.detail else [])]
        case Link():
            return [element("a", {"href": f"#{cell.anchor}"}, cell.text)]
        case _:
            return [cell]
