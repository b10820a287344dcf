"""The parts of a page, as plain data: text, numbers, tables, figures, facts, sections."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

News = Literal["good", "fair", "bad", "none"]
"""What kind of news a verdict is; pages and commands choose its colour by it."""


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits; from a thousand on with commas, and without an exponent up to 10⁹.

    >>> significant(1813.6), significant(-12_345_678.0), significant(0.00012346), significant(999.6), significant(2e9)
    ('1,810', '-12,300,000', '0.000123', '1,000', '2e+09')
    """
    text = f"{value:.{digits}g}"
    rounded = float(text)
    return f"{rounded:,.0f}" if 1e3 <= abs(rounded) < 1e9 else text


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun, in the singular for one and in the plural for all others.

    >>> counted(1, "epoch"), counted(2000, "example"), counted(0, "class", "classes")
    ('1 epoch', '2,000 examples', '0 classes')
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: Literal["", "lead", "finding", "note"] = ""
    """``lead`` opens a page, ``finding`` is a conclusion, ``note`` is small print."""


@dataclass(frozen=True)
class Number:
    """A number, with the ends of its interval or its standard error where it has them.

    >>> str(Number(0.91442, 0.8813, 0.9404)), str(Number(0.0671, 0.026, 0.159, form=".1%"))
    ('0.914 (0.881 to 0.94)', '6.7% (2.6% to 15.9%)')
    >>> str(Number(-0.0001, -0.0294, -0.0002, form=".1%"))
    '0.0% (-2.9% to 0.0%)'
    >>> str(Number(1.2345, error=0.067)), str(Number(None)), str(Number(float("nan"), 0, 1))
    ('1.23 ± 0.07', '', '')
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    error: float | None = None
    form: str = ".3g"
    """The format of the value, and of its interval; numbers of significant digits are three in an interval."""

    @property
    def text(self) -> str:
        """The value alone; empty where it is missing or not finite."""
        return "" if self.value is None or not math.isfinite(self.value) else _formatted(self.value, self.form)

    @property
    def is_range(self) -> bool:
        """Whether it has the ends of an interval."""
        return self.low is not None and self.high is not None and math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def interval(self) -> str:
        """``low to high``, or ``± error``; empty where neither is known."""
        form = ".3g" if self.form.endswith("g") else self.form
        if self.low is not None and self.high is not None and self.is_range:
            return f"{_formatted(self.low, form)} to {_formatted(self.high, form)}"
        return f"± {significant(self.error, 1)}" if self.error and math.isfinite(self.error) else ""

    def __str__(self) -> str:
        if not self.text or not self.interval:
            return self.text
        return f"{self.text} {self.interval}" if self.interval.startswith("±") else f"{self.text} ({self.interval})"


def _formatted(value: float, form: str) -> str:
    digits = re.fullmatch(r"\.(\d+)g", form)
    text = significant(value, int(digits[1])) if digits else f"{value:{form}}"
    return text.removeprefix("-") if not re.search("[1-9]", text) else text  # no negative zero


@dataclass(frozen=True)
class Badge:
    """A word in the colour of the news that it is."""

    text: str
    news: News
    detail: str = ""
    """Shown below it, in a table. On narrow screens, badges with details and several of a row name their columns."""


@dataclass(frozen=True)
class Link:
    """A link to a section of the page."""

    anchor: str
    """The anchor of the section."""
    text: str


Cell = str | Number | Badge | Link
"""What a table's cell may hold. Columns of numbers are aligned to the right, all others to the left."""


@dataclass(frozen=True)
class PageTable:
    """A table with a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    narrow: Literal["scroll", "cards", "fit"] = "scroll"
    """On a narrow screen: ``scroll`` sideways beside the first column, which stays in place; a card per row, with the
    first cell as its title; or ``fit``, with cells wrapped, for tables of few columns."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """What columns hold, by their names in the header; shown below the table, and on hover. Other names are unused."""
    keywords: Sequence[str] = ()
    """For each row the words that the page's filter finds it by; a row without any is always shown."""


@dataclass(frozen=True)
class Drawing:
    """A matplotlib figure with its caption. Drawings that follow each other stand side by side where there is room."""

    figure: Any
    caption: str = ""
    description: str = ""
    """What a screen reader says; the caption by default."""


@dataclass(frozen=True)
class FactList:
    """A list of names and values."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Folded:
    """Parts that open on a click."""

    summary: str
    parts: Sequence["Part"]


@dataclass(frozen=True)
class Section:
    """Parts under a heading; sections inside it have smaller headings."""

    title: str
    parts: Sequence["Part"]
    anchor: str = ""
    """The name that links use; made of the title by default."""
    keywords: str = ""
    """The words that the page's filter finds it by; a section without any is always shown."""


Part = Text | Badge | PageTable | Drawing | FactList | Folded | Section


@dataclass(frozen=True)
class Page:
    """A whole page: its title, which is also its first heading, and its parts. Three sections or more are listed."""

    title: str
    parts: Sequence[Part]
    filter: str = ""
    """The label of a field that filters rows and sections by their keywords; without a label there is none."""
