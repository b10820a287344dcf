"""The parts of a page: one self-contained HTML file, no network, no script."""

from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #1c2428; --paper: #fdfdfb; --soft: #5d6a70; --line: #dfe4e2; --card: #fff;
  --mark: #0a7f83; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebea; --paper: #14191b; --soft: #9fadb1; --line: #2d3639;
  --card: #1b2123; --mark: #4cc3c7; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 17px/1.6 system-ui, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2rem 1.1rem 4rem; }
h1 { font-size: clamp(1.6rem, 5vw, 2.4rem); line-height: 1.15; margin: 0 0 .6rem; text-wrap: balance; }
h2 { font-size: 1.35rem; margin: 3rem 0 .4rem; border-top: 1px solid var(--line); padding-top: 1.6rem; }
p { max-width: 46rem; margin: .5rem 0 1rem; }
.lead { font-size: 1.12rem; }
.finding { border-left: 4px solid var(--mark); padding: .1rem 0 .1rem 1rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1.2rem; }
figure { margin: 0; max-width: 40rem; padding: .9rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: .92rem; line-height: 1.45; margin-top: .5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; margin: 1rem 0; }
th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; font-size: .95rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
td.text { white-space: normal; min-width: 12rem; max-width: 30rem; text-align: left; }
table.cards { width: 100%; } table.cards th, table.cards td { text-align: left; padding: .35rem .5rem; }
@media (max-width: 44rem) { table.cards thead { display: none; } table.cards tr { display: block; padding: .7rem 0;
  border-bottom: 1px solid var(--line); }
  table.cards td { display: block; border: 0; padding: .1rem 0; max-width: none; }
  table.cards td:empty { display: none; } table.cards td[data-label]::before { content: attr(data-label) " ";
  color: var(--soft); font-size: .86rem; } table.cards td { white-space: normal; } }
h3 { font-size: 1.12rem; margin: 2.4rem 0 .3rem; scroll-margin-top: 1rem; }
a { color: var(--mark); }
.badge { display: inline-block; padding: .05rem .6rem; border-radius: 1rem; font-size: .86rem; white-space: nowrap;
  border: 1px solid var(--line); }
.badge.good { background: #1a7f4b; border-color: #1a7f4b; color: #fff; }
.badge.fair { background: #f2c14e; border-color: #f2c14e; color: #2a2200; }
.badge.bad { background: #b3261e; border-color: #b3261e; color: #fff; }
.badge.none { color: var(--soft); white-space: normal; }
code { font: .92em ui-monospace, monospace; }
@media print { body { font-size: 11pt; background: #fff; color: #000; } main { max-width: none; padding: 0; }
  figure, tr { break-inside: avoid; } h2 { break-after: avoid; } }
"""


def page(title: str, body: Sequence[str]) -> str:
    """A whole page around parts that are HTML already."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        '<link rel="icon" href="data:,">\n</head>\n<body>\n<main>\n' + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )


class Html(str):
    """Text that is HTML already, for a table's cell."""

    __slots__ = ()


class Wrapped(str):
    """Plain text that a table may break over lines."""

    __slots__ = ()


def link(target: str, text: str) -> Html:
    """A link."""
    return Html(f'<a href="{escape(target)}">{escape(text)}</a>')


def badge(text: str, kind: str) -> Html:
    """A word in the colour of its kind: ``good``, ``fair``, ``bad`` or ``none``."""
    return Html(f'<span class="badge {kind}">{escape(text)}</span>')


def heading(text: str, level: int = 2, anchor: str = "") -> str:
    """A heading, to which links may lead."""
    target = f' id="{escape(anchor)}"' if anchor else ""
    return f"<h{level}{target}>{escape(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text; ``kind`` is ``lead`` or ``finding``."""
    text = escape(text).replace("β = ", "β&nbsp;=&nbsp;")
    return f'<p class="{kind}">{text}</p>' if kind else f"<p>{text}</p>"


def figures(entries: Sequence[tuple[str, str]]) -> str:
    """Figures side by side where there is room: pairs of SVG and caption."""
    inner = "\n".join(f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>" for svg, caption in entries)
    return f'<div class="figures">\n{inner}\n</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, cards: bool = False) -> str:
    """A table that scrolls sideways on a narrow screen, or with ``cards`` stacks its cells there."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    labels = [name if cards else "" for name in header]
    lines = ["".join(_cell(cell, label) for cell, label in zip(row, labels, strict=True)) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    kind = ' class="cards"' if cards else ""
    return (
        f'<div class="scroll"><table{kind}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'
    )


def _cell(cell: str, label: str) -> str:
    told = f' data-label="{escape(label)}"' if label and not isinstance(cell, Html | Wrapped) else ""
    kind = ' class="text"' if isinstance(cell, Wrapped) else ""
    return f"<td{kind}{told}>{cell if isinstance(cell, Html) else escape(cell)}</td>"


def folded(summary: str, inner: str) -> str:
    """Something that opens on a click."""
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>"


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """A list of names and values."""
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs) + "</dl>"
