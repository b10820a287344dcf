"""An evaluation of robustness as a page: the worst case, what every attack leaves, curves, and flags in words."""

from collections.abc import Callable, Sequence
from typing import Any

from dissensus.attacks import Flag, Robustness
from dissensus.attacks.robustness import HEADER, CurvePoint
from dissensus.pages import figures, layout

NORMS = {"linf": "L∞", "l2": "L2"}


def html(result: Robustness, title: str) -> str:
    """The whole page."""
    facts = result.facts
    drawn = [(figures.as_svg(figure, words), words) for figure, words in drawings(result)]
    ball = f"{facts['epsilon']:.4g} in {NORMS[facts['norm']]}"
    body = [
        layout.heading(f"Robustness: {title}", 1),
        f"<p>{layout.badge(_flags(result), 'bad' if result.flags else 'none')}</p>",
        layout.paragraph(f"{result.sentence}, at ε = {ball}.", "lead"),
        *(layout.paragraph(_told(flag), "finding") for flag in result.flags),
        layout.figures(drawn),
        layout.heading("Every attack"),
        *(layout.paragraph(note) for note in result.notes()),
        layout.table(HEADER, result.table()),
        layout.heading("Every check"),
        layout.paragraph(
            "Attacks that are too weak make a model look robust. These are the signs of it that were looked for; that"
            " none is raised means that none was seen, and no more."
        ),
        layout.table(("check", "flag", "seen", "what it would mean"), [_row(f) for f in result.checks], cards=True),
        layout.heading("What was evaluated"),
        layout.facts(
            [
                ("suite", facts["suite"]),
                ("ε", ball),
                ("examples", f"{facts['examples']:,}"),
                ("of these for curves and checks", f"the first {facts['probed']:,}"),
                ("members", str(facts["members"])),
                ("classes", str(facts["classes"])),
                ("pooled by", str(facts["pool"])),
                ("surrogate", "yes" if facts["surrogate"] else "none"),
                ("seed", str(facts["seed"])),
                ("time", f"{facts['seconds']:,.0f} s"),
            ]
        ),
    ]
    return layout.page(f"Robustness: {title}", body)


def _flags(result: Robustness) -> str:
    count = len(result.flags)
    return f"flags raised: {count} of {len(result.checks)}" if count else result.flags_raised


def _told(flag: Flag) -> str:
    return f"{flag.name[:1].upper()}{flag.name[1:]}: {flag.seen}. {flag.meaning} {flag.advice}"


def _row(flag: Flag) -> list[str]:
    mark = layout.badge("raised", "bad") if flag.raised else "not raised"
    return [flag.name, mark, layout.Wrapped(flag.seen), layout.Wrapped(flag.meaning)]


def drawings(result: Robustness) -> list[tuple[Any, str]]:
    """Figures with their captions."""
    few = f"the first {result.facts['probed']:,} examples"
    together = "under it and all before it" if result.facts["on_survivors"] else "under it alone"
    return [
        (
            _styled(lambda: _by_attack(result)),
            f"Accuracy without an attack, by attack ({together}), and in the worst case, with intervals of 95 %.",
        ),
        (
            _styled(lambda: _curve(result.over_epsilon, "ε", result.facts["epsilon"])),
            f"Accuracy by ε, on {few}: the worst over losses. It should come down to zero.",
        ),
        (
            _styled(lambda: _curve(result.over_steps, "steps", None)),
            f"Accuracy by steps of PGD on cross-entropy, on {few}. It should fall, and come to rest.",
        ),
    ]


def _styled(draw: Callable[[], Any]) -> Any:
    with figures.styled():
        return draw()


def _by_attack(result: Robustness) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    rows = [("no attack", result.clean), *((one.name, one.accuracy) for one in result.attacks)]
    rows.append(("worst case", result.worst))
    colours = [figures.COLOURS[4], *[figures.COLOURS[0]] * len(result.attacks), figures.COLOURS[1]]
    figure = Figure(figsize=(5.2, max(3.3, 0.9 + 0.3 * len(rows))), layout="constrained")
    axes = figure.subplots()
    for place, ((_, share), colour) in enumerate(zip(rows, colours, strict=True)):
        below, above = max(share.value - share.low, 0.0), max(share.high - share.value, 0.0)
        axes.barh(place, share.value, color=colour, alpha=0.85, height=0.62)
        axes.errorbar(share.value, place, xerr=[[below], [above]], color=figures.INK, linewidth=1.2, capsize=2.5)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="accuracy")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(False, axis="y")
    return figure


def _curve(points: Sequence[CurvePoint], label: str, marked: float | None) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(5.2, 3.3), layout="constrained")
    axes = figure.subplots()
    by_steps = marked is None
    x = list(range(len(points))) if by_steps else [point.at for point in points]
    axes.plot(x, [point.accuracy.value for point in points], color=figures.COLOURS[0], marker="o", markersize=4)
    low, high = [point.accuracy.low for point in points], [point.accuracy.high for point in points]
    axes.fill_between(x, low, high, color=figures.COLOURS[0], alpha=0.18, linewidth=0)
    if by_steps:
        axes.set_xticks(x, [f"{point.at:g}" for point in points])
    else:
        axes.axvline(marked, color=figures.COLOURS[1], linestyle="--", linewidth=1.3, label="ε of the suite")
        axes.legend()
    axes.set(xlabel=label, ylabel="accuracy", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure
