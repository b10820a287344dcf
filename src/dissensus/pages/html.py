"""A page as one HTML file that needs no network and no script, for screens of any width, light or dark, and print."""

import re
from collections.abc import Sequence
from html import escape
from itertools import groupby

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
  table.cards td small { display: inline; }
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
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(page.title)}</title>\n<style>{STYLE}</style>\n"
        '<link rel="icon" href="data:,">\n</head>\n<body>\n<main>\n'
        f"<h1>{escape(page.title)}</h1>\n{_parts(page.parts, 2)}\n</main>\n</body>\n</html>\n"
    )


def _parts(parts: Sequence[Part], level: int) -> str:
    """Parts one after another; ``level`` is that of the next heading."""
    pieces: list[str] = []
    for is_drawing, group in groupby(parts, lambda part: isinstance(part, Drawing)):
        neighbours = list(group)
        pieces += [_drawings(neighbours)] if is_drawing else [_part(part, level) for part in neighbours]
    return "\n".join(pieces)


def _part(part: Part, level: int) -> str:
    match part:
        case Text():
            return _paragraph(part)
        case Badge():
            return f"<p>{_badge(part)}</p>"
        case PageTable():
            return _table(part)
        case FactList():
            pairs = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in part.pairs)
            return f"<dl>{pairs}</dl>"
        case Folded():
            return f"<details><summary>{escape(part.summary)}</summary>{_parts(part.parts, level)}</details>"
        case Section():
            anchor = f' id="{escape(part.anchor)}"' if part.anchor else ""
            return f"<h{level}{anchor}>{escape(part.title)}</h{level}>\n{_parts(part.parts, level + 1)}"
        case Drawing():
            return _drawings([part])


def _paragraph(part: Text) -> str:
    return f"<p{_class_attribute(part.kind)}>{_prose(part.text)}</p>"


def _prose(text: str) -> str:
    """Text in which a number stays on one line with its symbol or its per cent sign, and `names` are code."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"(?<=\d) %", "&nbsp;%", re.sub("([βελ]) = ", r"\1&nbsp;=&nbsp;", text))


def _badge(badge: Badge) -> str:
    return f'<span class="badge {badge.news}">{escape(badge.text)}</span>'


def _drawings(drawings: Sequence[Part]) -> str:
    """Figures side by side where there is room: two columns for two or four of them, else up to three."""
    inner = "\n".join(_figure(drawing) for drawing in drawings if isinstance(drawing, Drawing))
    even = " even" if len(drawings) in (2, 4) else ""
    return f'<div class="figures{even}">\n{inner}\n</div>'


def _figure(drawing: Drawing) -> str:
    svg = as_svg(drawing.figure, drawing.description or drawing.caption)
    caption = f"<figcaption>{_prose(drawing.caption)}</figcaption>" if drawing.caption else ""
    return f"<figure>{svg}{caption}</figure>"


def _table(table: PageTable) -> str:
    numeric = [_is_numeric([row[i] for row in table.rows]) for i in range(len(table.header))]
    head = "".join(
        f'<th scope="col"{_class_attribute("number" if right else "")}>{escape(name)}</th>'
        for name, right in zip(table.header, numeric, strict=True)
    )
    labels = [name if table.narrow == "cards" else "" for name in table.header]
    rows = ["".join(_cell(*cell) for cell in zip(row, labels, numeric, strict=True)) for row in table.rows]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table{_class_attribute(_TABLE_CLASSES[table.narrow])}>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _is_numeric(cells: Sequence[Cell]) -> bool:
    return any(isinstance(cell, Number) for cell in cells)


def _cell(cell: Cell, label: str, numeric: bool) -> str:
    if isinstance(cell, Number):
        kind = "number"
    elif isinstance(cell, str) and len(cell) > _SHORT:
        kind = "long"
    elif numeric:
        kind = "beside-numbers"
    else:
        kind = "short" if isinstance(cell, str) and cell else ""
    labelled = f' data-label="{escape(label)}"' if label and not isinstance(cell, Badge) else ""
    return f"<td{_class_attribute(kind)}{labelled}>{_cell_content(cell)}</td>"


def _cell_content(cell: Cell) -> str:
    match cell:
        case Number():
            return escape(cell.text) + (f" <small>{escape(cell.interval)}</small>" if cell.interval else "")
        case Badge():
            return _badge(cell)
        case Link():
            return f'<a href="{escape(cell.target)}">{escape(cell.text)}</a>'
        case _:
            return escape(cell)


def _class_attribute(name: str) -> str:
    return f' class="{name}"' if name else ""
