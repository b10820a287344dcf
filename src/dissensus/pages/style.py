"""The style of all figures, and figures as files: SVG takes its ink from the page, so it reads in light and in dark."""

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, fromstring

from dissensus.output_files import write_output
from dissensus.pages.markup import element, printable
from dissensus.pages.parts import significant

INK = "#010203"
"""Stands for the page's text colour: replaced by ``currentColor`` in the SVG."""
COLOURS = ("#149398", "#dc5568", "#8d70d4", "#c98a1b", "#5a7fb8", "#6f9a3c", "#b04f9b", "#7a6a5a")
CLASS_COLOURS = (*COLOURS, "#e58a5c", "#8b8f98")
SHADES = ("#eef6f5", "#7cc4c5", "#0b5f68")
"""Colours of shares from 0 to 1."""
DARK_INK = "#1c2428"
"""Ink on a light shade, on pages of either kind."""
DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
TITLE_SIZE = 11.5
_BETWEEN = 0.06
"""Space between panels, as a share of a panel, so that the label of one does not touch the next."""
_DOTS = 220
"""Resolution of parts of a figure that are pictures."""
_MOST_VALUES = 600
"""Values of points that a figure holds."""
_VALUES_OF_A_LINE = 25
"""Values that are shown of a line without markers."""
_MANY_TIMES = 1e4
_LETTER, _LABEL = 0.55, 0.8
"""Width of a letter as a share of its size, and the share of a panel's height that a label may take in one line."""
_LONGEST_NAME = 48
"""Characters of a name in a legend."""
_LEGEND_WIDTH = 62
"""Characters that fit side by side below a panel."""

STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dissensus",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": TITLE_SIZE,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 2,
}


@contextmanager
def figure_style() -> Iterator[None]:
    """Draw in the style of this project, inside a ``with`` block or, as a decorator, in a whole function."""
    try:
        from matplotlib import rc_context
    except ImportError as reason:
        raise ImportError("figures need matplotlib: pip install 'dissensus[report]'") from reason
    with rc_context(STYLE):  # pyright: ignore[reportArgumentType]  # matplotlib lists its keys one by one
        yield


def blank_figure(width: float = 5.2, height: float = 3.3, **options: Any) -> Any:
    """An empty matplotlib figure of this many inches."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(wspace=_BETWEEN, hspace=_BETWEEN)
    return Figure(figsize=(width, height), layout=layout, **options)


def draw_line(
    axes: Any, x: Sequence[Any], y: Sequence[float], band: tuple[Sequence[float], Sequence[float]], **options: Any
) -> None:
    """Draw a line and the band between ``band[0]`` and ``band[1]`` in the same colour."""
    (line,) = axes.plot(x, y, **options)
    axes.fill_between(x, *band, color=line.get_color(), alpha=0.18, linewidth=0)


def percent_axis(axis: Any) -> None:
    """Label an axis of shares in per cent."""
    from matplotlib.ticker import PercentFormatter

    class Percent(PercentFormatter):
        """Per cent, with an exponent where there would be many digits."""

        def format_pct(self, x: float, display_range: float) -> str:
            return f"{100 * x:.3g}%" if abs(x) >= _MANY_TIMES else super().format_pct(x, display_range)

    axis.set_major_formatter(Percent(1.0))


def legend_columns(names: Sequence[str]) -> int:
    """Entries of a legend that fit beside each other."""
    longest = max(map(len, map(shortened, names)), default=0)
    return max(1, min(3, len(names), _LEGEND_WIDTH // (longest + 6)))


def legend_height(names: Sequence[str]) -> float:
    """Inches that a legend takes beyond two rows."""
    return 0.25 * max(0, -(-len(names) // legend_columns(names)) - 2)


def add_legend(figure: Any, names: Sequence[str]) -> None:
    """Put a legend below a figure."""
    for text in figure.legend(loc="outside lower center", ncols=legend_columns(names)).get_texts():
        text.set_text(shortened(text.get_text()))


def shortened(name: str, most: int = _LONGEST_NAME) -> str:
    """A name that fits into a figure.

    >>> shortened("noise"), len(shortened("n" * 300)), shortened("predictions", 5)
    ('noise', 48, 'pred…')
    """
    return name if len(name) <= most else f"{name[: most - 1]}…"


def in_two_lines(label: str, height: float, size: float) -> str:
    """A label of a vertical axis, broken at the space nearest to its middle where it could be cut off.

    Args:
        label: The label.
        height: Height of the panel, in points.
        size: Size of the letters, in points.

    >>> in_two_lines("increase of the test error", 240, 11), in_two_lines("increase of the test error", 120, 11)
    ('increase of the test error', 'increase of\\nthe test error')
    """
    spaces = [i for i, letter in enumerate(label) if letter == " "]
    if not spaces or "\n" in label or len(label) * _LETTER * size <= _LABEL * height:
        return label
    middle = min(spaces, key=lambda i: abs(i - len(label) // 2))
    return f"{label[:middle]}\n{label[middle + 1 :]}"


def save(figure: Any, file: Path) -> None:
    """Write a figure on white as PDF, PNG or SVG, by the file's ending."""
    buffer = io.BytesIO()
    kind = file.suffix.removeprefix(".").lower()
    with _plain_text(figure):
        figure.savefig(buffer, format=kind, facecolor="white", bbox_inches="tight", dpi=200)
    write_output(file, buffer.getvalue())


def as_png(figure: Any) -> bytes:
    """A figure on white, for places that take no SVG."""
    buffer = io.BytesIO()
    for axes in figure.axes:
        if len(axes.lines) > 1 and not figure.legends:
            axes.legend(frameon=False)
    with _plain_text(figure):
        figure.savefig(buffer, format="png", dpi=110, facecolor="white", bbox_inches="tight")
    return buffer.getvalue()


@figure_style()
def as_svg(figure: Any, description: str) -> Element:
    """A figure as an SVG element, with a description for screen readers and the page's ink."""
    buffer = io.StringIO()
    with _plain_text(figure):
        figure.savefig(buffer, format="svg", dpi=_DOTS, transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    values = point_values(figure)
    svg = fromstring(text[text.index("<svg") :])
    for node in svg.iter():
        for child in list(node):
            if child.tag.endswith(("}metadata", "}style")):  # the page has the style, which is the same for all figures
                node.remove(child)
        node.tag = _local_name(node.tag)
        node.attrib = {_local_name(name): value.replace(INK, "currentColor") for name, value in node.attrib.items()}
    for value in values:
        place = {"class": "value", "cx": f"{value.x:.1f}", "cy": f"{value.y:.1f}", "r": "7"}
        svg.append(element("circle", place, element("title", None, value.text)))
    svg.attrib |= {"role": "img", "aria-label": printable(description)}
    return svg


class PointValue(NamedTuple):
    """What a figure says of a point when the pointer rests on it."""

    x: float
    """In points from the left."""
    y: float
    """In points from the top."""
    text: str


def point_values(figure: Any) -> list[PointValue]:
    """The values of points, lines, bars and matrices of a figure that has been drawn; none where there are very many.

    Of a line without markers a few points have a value, at about equal distances.
    """
    import numpy as np

    values: list[PointValue] = []
    for axes in figure.axes:
        for name, points in _points(axes):
            finite = points[np.isfinite(points).all(1)]
            places = axes.transData.transform(finite) * 72 / figure.dpi
            low, high = axes.get_window_extent().get_points() * 72 / figure.dpi
            for (x, y), place in zip(finite.tolist(), places, strict=True):
                if (low - 1 <= place).all() and (place <= high + 1).all():
                    words = [name, _said(axes.xaxis, x), _said(axes.yaxis, y)]
                    top = figure.get_figheight() * 72 - float(place[1])
                    values.append(PointValue(float(place[0]), top, "\n".join(filter(None, words))))
        for matrix in axes.images:
            numbers = np.ma.filled(np.ma.asarray(matrix.get_array(), dtype=float), np.nan)
            if numbers.ndim == 2 and numbers.size <= _MOST_VALUES and matrix.colorbar is not None:
                values += _cell_values(axes, numbers, matrix.colorbar.ax.yaxis)
    return values if len(values) <= _MOST_VALUES else []


def _cell_values(axes: Any, numbers: Any, scale: Any) -> list[PointValue]:
    """The numbers of a matrix, with the rows and columns that they stand in."""
    import numpy as np

    height = axes.figure.get_figheight() * 72
    values = []
    for (row, column), number in np.ndenumerate(numbers):
        if not np.isfinite(number):
            continue
        x, y = axes.transData.transform((column, row)) * 72 / axes.figure.dpi
        words = [_said(axes.yaxis, row), _said(axes.xaxis, column), _said(scale, number)]
        values.append(PointValue(float(x), height - float(y), "\n".join(words)))
    return values


def _points(axes: Any) -> Iterator[tuple[str, Any]]:
    """Names and data ``[N, 2]`` of lines, of scattered points and of the ends of bars and steps."""
    import numpy as np
    from matplotlib.container import BarContainer
    from matplotlib.patches import StepPatch

    for line in axes.lines:
        if line.get_transform() == axes.transData:
            points = np.asarray(line.get_xydata(), dtype=float)
            if line.get_marker() not in ("", "None", None):
                yield _label(line), points
            elif len(points) > 2:  # two points are a line to compare with, such as the diagonal
                chosen = np.linspace(0, len(points) - 1, min(len(points), _VALUES_OF_A_LINE)).round().astype(int)
                yield _label(line), points[chosen]
    for steps in axes.patches:
        if isinstance(steps, StepPatch) and _label(steps):
            heights, edges, _ = steps.get_data()
            yield _label(steps), np.stack([(edges[1:] + edges[:-1]) / 2, heights], 1).astype(float)
    for dots in axes.collections:
        if hasattr(dots, "get_sizes") and not dots.get_rasterized() and dots.get_offset_transform() == axes.transData:
            yield _label(dots), np.asarray(dots.get_offsets(), dtype=float)
    for bars in axes.containers:
        if isinstance(bars, BarContainer):
            upright = bars.orientation == "vertical"
            for bar in bars.patches:
                x, y, width, height = bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()
                yield _label(bars), np.array([[x + width / 2, y + height] if upright else [x + width, y + height / 2]])


def _label(artist: Any) -> str:
    label = str(artist.get_label())
    return "" if label.startswith("_") else label


def _said(axis: Any, value: float) -> str:
    """A value with its axis' label; the name of its tick where ticks have names."""
    from matplotlib.ticker import PercentFormatter

    label, ticks = axis.get_label_text().replace("\n", " "), axis.get_major_formatter()
    text = significant(value)
    if isinstance(ticks, PercentFormatter):
        text = f"{100 * value / ticks.xmax:.3g} %"
    elif type(ticks).__name__ in ("FixedFormatter", "FuncFormatter"):
        near = [tick for tick in axis.get_major_ticks() if abs(tick.get_loc() - value) < 0.5]
        text = near[0].label1.get_text() if near else text
    return f"{label}: {text}" if label else text


def _local_name(name: str) -> str:
    """A name without its namespace, as HTML has it: ``xlink:href`` is ``href``."""
    return name.rpartition("}")[2]


@contextmanager
def _plain_text(figure: Any) -> Iterator[None]:
    """Draw texts as they are: ``$`` starts no formula, and characters that cannot be drawn are replaced.

    What matplotlib warns of is no news to users: a browser has glyphs that its font lacks, names may leave axes no
    room, and a busy machine may take a second to place a legend.
    """
    from matplotlib import rc_context
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter

    for text in figure.findobj(Text):
        text.set_text(printable(text.get_text()))
        text.set_parse_math(False)
    for axes in figure.axes:
        label, place = axes.yaxis.label, axes.get_subplotspec()
        rows = place.get_gridspec().nrows / len(place.rowspan) if place else 1
        label.set_text(in_two_lines(label.get_text(), 72 * figure.get_figheight() / rows, label.get_fontsize()))
    for axis in [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]:
        names = axis.get_major_formatter()
        if isinstance(names, FuncFormatter):  # of ticks with names, which are written when they are drawn
            axis.set_major_formatter(lambda value, place, names=names: printable(names(value, place)))
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph|constrained_layout not applied|Creating legend with loc")
        yield
