"""An audit as a page and as one figure: the verdict, its pictures, and every number behind them."""

from collections.abc import Callable
from typing import Any

import torch

from dissensus.auditing.examples import DROPS
from dissensus.diversity.plane import plane_of
from dissensus.pages import figures, layout

KINDS = {
    "healthy": "good",
    "redundant": "fair",
    "dominated": "fair",
    "undecided": "none",
    "collusive": "bad",
    "unskilled": "bad",
}
"""What kind of news each verdict is: the page and the command choose their colours by it."""
_MOST_DRAWN = 60
"""Members beyond which a matrix of pairs is too fine to be looked at."""


def html(audit: Any, title: str, meaning: str) -> str:
    """The whole page, with what the verdict means in plain words."""
    facts = audit.facts
    told = f"{facts['members']} members, {facts['examples']:,} examples, {facts['outputs']} outputs"
    drawn = [(figures.as_svg(figure, words), words) for figure, words in drawings(audit)]
    body = [
        layout.heading(f"Audit: {title}", 1),
        f"<p>{layout.badge(audit.verdict, KINDS[audit.verdict])}</p>",
        layout.paragraph(meaning, "lead"),
        *(layout.paragraph(f"{_capital(reason)}.") for reason in audit.judgement.reasons),
        *(layout.paragraph(advice, "finding") for advice in audit.judgement.advice),
        *([layout.paragraph(_capital(words))] if (words := difference(facts)) else []),
        layout.figures(drawn),
        *_evidence(audit.judgement),
        layout.heading("Every figure"),
        layout.paragraph("Intervals are bootstrap intervals of 95 % over examples."),
        *_tables(audit),
        *_detection(audit),
        layout.heading("What was audited"),
        layout.facts(
            [
                ("ensemble", told),
                ("task", facts["task"]),
                ("outputs are", facts["kind"]),
                ("loss", facts["loss"]),
                ("pooled by", facts["pool"]),
                *_own_prediction(facts),
            ]
        ),
    ]
    return layout.page(f"Audit: {title}", body)


def difference(facts: dict[str, Any]) -> str:
    """How the pooled outputs differ from the model's own prediction; empty where they do not, or it is not known."""
    match = facts.get("matches_own_prediction")
    return match if isinstance(match, str) else ""


def _own_prediction(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if "matches_own_prediction" not in facts:
        return []
    return [("the model's own prediction", difference(facts) or "equals the pooled outputs")]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _evidence(judgement: Any) -> list[str]:
    """Every question that was asked, with its answer and its numbers."""
    if not judgement.evidence:
        return []
    rows = [
        [layout.Wrapped(item.question), item.answer, layout.Wrapped(item.measure), layout.Wrapped(item.numbers())]
        for item in judgement.evidence
    ]
    words = (
        "The verdict is the first of unskilled, collusive, dominated, redundant, undecided and healthy that applies. "
        "Each question is a test: p is the chance of a number so far beyond its line if the truth lies on the line."
    )
    return [
        layout.heading("What the verdict rests on"),
        layout.paragraph(words),
        layout.table(("question", "answer", "what was measured", "numbers"), rows),
        layout.paragraph(f"Confidence: {judgement.confidence}."),
    ]


def _tables(audit: Any) -> list[str]:
    """One table per group of figures."""
    extra = [name for name in ("train", "reference") if getattr(audit, name) is not None]
    parts: list[str] = []
    for group in dict.fromkeys(finding["group"] for finding in audit.findings):
        rows = []
        for finding in audit.findings:
            if finding["group"] == group:
                others = [
                    f"{_value(finding[name])} ({_span(finding[name])})" if name in finding else "" for name in extra
                ]
                rows.append([layout.Wrapped(finding["title"]), _value(finding), _span(finding), *others])
        parts += [layout.heading(_capital(group), 3), layout.table(("figure", "test", "interval", *extra), rows)]
    return parts


def _value(numbers: dict[str, Any]) -> str:
    return "" if numbers["value"] is None else f"{numbers['value']:.4g}"


def _span(numbers: dict[str, Any]) -> str:
    low, high = numbers["low"], numbers["high"]
    return "" if low is None or high is None else f"{low:.3g} to {high:.3g}"


def _detection(audit: Any) -> list[str]:
    if not audit.detection:
        return []
    rows = [
        [layout.Wrapped(name), f"{f.value:.3f}", f"{f.low:.3f} to {f.high:.3f}"] for name, f in audit.detection.items()
    ]
    return [
        layout.heading("Telling shifted data apart"),
        layout.paragraph(
            "Area under the ROC curve: the chance that a shifted example scores higher than one that is not."
        ),
        layout.table(("score", "area", "interval"), rows),
    ]


def panels(audit: Any) -> list[tuple[Callable[[Any, Any], None], str]]:
    """What is drawn: functions ``(audit, axes)`` with their captions."""
    found: list[tuple[Callable[[Any, Any], None], str]] = [
        (_losses, "Each member's own loss, and the loss of the pooled ensemble.")
    ]
    if any(name.startswith("codependence_") for name in audit.test):
        found.append((_codependence, "How much the ensemble's loss rises when members are left out at random."))
    if audit.facts["members"] <= _MOST_DRAWN:
        found.append((_matrix, "How members' errors go together: 1 together, 0 apart, below 0 they cancel."))
    if audit.facts["members"] > 1 and min(audit.by_member.get("accuracy", [1.0])) < 1:
        words = (
            "Pairs of members on the plane of accuracy and disagreement. Upper line: the best member beside one whose "
            "errors are independent of its own. Lower line: beside itself with some predictions flipped at random."
        )
        found.append((_plane, words))
    return found


def drawings(audit: Any) -> list[tuple[Any, str]]:
    """Every panel as a matplotlib figure of its own, with its caption."""
    found: list[tuple[Any, str]] = []
    for draw, caption in panels(audit):
        with figures.styled():
            from matplotlib.figure import Figure

            figure = Figure(figsize=(5.2, 3.4), layout="constrained")
            axes = figure.subplots()
            draw(audit, axes)
            if len(axes.get_legend_handles_labels()[0]) > 1:
                figure.legend(loc="outside lower center", ncols=3)
        found.append((figure, caption))
    return found


def one_figure(audit: Any) -> Any:
    """Every panel side by side, in one matplotlib figure under the verdict."""
    chosen = panels(audit)
    columns = min(2, len(chosen))
    rows = -(-len(chosen) // columns)
    with figures.styled():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.2 * columns, 0.4 + 3.3 * rows), layout="constrained")
        figure.suptitle(f"audit: {audit.verdict}", x=0.01, ha="left")
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in grid[len(chosen) :]:
            axes.set_axis_off()
        for axes, (draw, _) in zip(grid, chosen, strict=False):
            draw(audit, axes)
            if len(axes.get_legend_handles_labels()[0]) > 1:
                axes.legend(fontsize=9)
    return figure


def _losses(audit: Any, axes: Any) -> None:
    losses = audit.by_member["loss"]
    axes.scatter(range(len(losses)), losses, color=figures.COLOURS[0], s=30, label="member", zorder=3)
    for name, colour, dash in (("individual", figures.COLOURS[0], "--"), ("ensemble", figures.COLOURS[1], "-")):
        figure_of = audit.test[name]
        words = {"individual": "members' mean", "ensemble": "ensemble"}[name]
        axes.axhline(figure_of.value, color=colour, linestyle=dash, label=words)
        axes.axhspan(figure_of.low, figure_of.high, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="member", ylabel="loss")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _codependence(audit: Any, axes: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    for of, name, colour in ((audit.test, "this ensemble", 1), (audit.reference, "reference", 0)):
        if of is None:
            continue
        drops = [drop for drop in DROPS if f"codependence_{drop}" in of]
        each, x = [of[f"codependence_{drop}"] for drop in drops], [0.0, *drops]
        axes.plot(x, [0.0, *(f.value for f in each)], color=figures.COLOURS[colour], marker="o", label=name)
        low, high = [0.0, *(f.low for f in each)], [0.0, *(f.high for f in each)]
        axes.fill_between(x, low, high, color=figures.COLOURS[colour], alpha=0.18, linewidth=0)
    axes.set(xlabel="share of members left out", ylabel="rise of the loss")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(bottom=0)


def _matrix(audit: Any, axes: Any) -> None:
    shown = axes.imshow(audit.by_member["error_correlation"], cmap="RdBu_r", vmin=-1, vmax=1)
    axes.set(xlabel="member", ylabel="member")
    axes.grid(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    axes.figure.colorbar(shown, ax=axes, label="correlation of errors")


def _plane(audit: Any, axes: Any) -> None:
    accuracy, disagreement = (torch.tensor(audit.by_member[name]) for name in ("accuracy", "disagreement"))
    pairs = plane_of(accuracy, disagreement)
    points = torch.stack(pairs, 1)[pairs.accuracy < 1].tolist()
    curves = figures.plane_curves([("pair", points)], float(accuracy.max()), audit.facts["outputs"])
    figures.draw_scatter(axes, [("pair", points)], curves, "accuracy of a pair", "disagreement / error rate")
