"""HTML as a tree of elements. Text and attributes are plain strings, and are escaped where the tree is written."""

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from html import escape
from xml.etree.ElementTree import Element

_NOT_PRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Characters that a document cannot hold: control characters, and halves of pairs (from names of files)."""

_VOID = ("meta", "link", "input")
"""Elements without content and end."""
_VERBATIM = ("style", "script")
"""Elements whose content browsers read as it is."""


def printable(text: str) -> str:
    """Text in which characters that no document can hold are replaced by ``�``.

    >>> printable("a\\x00b")
    'a�b'
    """
    return _NOT_PRINTABLE.sub("\ufffd", text)


def element(tag: str, attributes: Mapping[str, str] | None = None, *content: Element | str) -> Element:
    """An element with its attributes and its content; attributes without a value are left out.

    >>> written(element("a", {"href": '"#1', "class": ""}, "<b> & ", element("b", None, "c")))
    '<a href="&quot;#1">&lt;b&gt; &amp; <b>c</b></a>'
    """
    result = Element(tag, {name: printable(value) for name, value in (attributes or {}).items() if value})
    for item in content:
        if isinstance(item, Element):
            result.append(item)
        elif len(result):
            result[-1].tail = (result[-1].tail or "") + printable(item)
        else:
            result.text = (result.text or "") + printable(item)
    return result


def written(tree: Element) -> str:
    """An element as HTML. This function alone writes markup: whatever is text in the tree is text on the page."""
    return "".join(_pieces(tree))


def _pieces(node: Element) -> Iterator[str]:
    yield f"<{node.tag}"
    for name, value in node.attrib.items():
        yield f' {name}="{_escaped(value)}"'
    yield ">"
    if node.tag in _VOID:
        return
    yield (node.text or "") if node.tag in _VERBATIM else _escaped(node.text or "")
    for child in node:
        yield from _pieces(child)
        yield _escaped(child.tail or "")
    yield f"</{node.tag}>"


def _escaped(text: str) -> str:
    return escape(text).replace("\N{NO-BREAK SPACE}", "&nbsp;")


def document(title: str, *body: Element | str, style: str, script: str = "") -> str:
    """A whole document, which loads nothing, and runs no script and uses no style sheet but its own.

    Args:
        title: The title in the browser's tab.
        body: The content.
        style: The style sheet.
        script: The script, at the end of the body.
    """
    head = element(
        "head",
        None,
        element("meta", {"charset": "utf-8"}),
        element("meta", {"http-equiv": "Content-Security-Policy", "content": security_policy(style, script)}),
        element("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        element("title", None, title),
        _verbatim("style", style),
        element("link", {"rel": "icon", "href": "data:,"}),
    )
    scripts = [_verbatim("script", script)] if script else []
    tree = element("html", {"lang": "en"}, *on_lines(head, element("body", None, *on_lines(*body, *scripts))))
    return f"<!doctype html>\n{written(tree)}\n"


def on_lines(*content: Element | str) -> list[Element | str]:
    """Content with line breaks around every item."""
    return [part for item in content for part in ("\n", item)] + ["\n"]


def security_policy(style: str, script: str = "") -> str:
    """The Content-Security-Policy of a document: its own style sheet and script, by their SHA-256, and nothing else.

    Pictures may be part of the document (``data:``). Attributes ``style`` are allowed, since figures have them.
    """
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_source(script)}" if script else "script-src 'none'",
            "style-src 'unsafe-inline'",  # for browsers that do not know the next two
            f"style-src-elem {_source(style)}",
            "style-src-attr 'unsafe-inline'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _verbatim(tag: str, text: str) -> Element:
    """A style sheet or a script. Browsers read it up to the first ``</``, and nothing in it can be escaped."""
    if "</" in text or "<!--" in text:
        raise ValueError(f"a <{tag}> cannot hold '</' or '<!--'; in a string of JavaScript, write '\\u003c' for '<'")
    result = Element(tag)
    result.text = text
    return result
