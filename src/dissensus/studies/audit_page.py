"""An audit as a page: the verdict, its figures, and every number behind them."""

from typing import Any

import torch

from dissensus.auditing import Audit
from dissensus.auditing.judging import COLLUSIVE, DOMINATED, HEALTHY, REDUNDANT, UNDECIDED
from dissensus.auditing.tallying import DROPS
from dissensus.diversity.plane import plane_of
from dissensus.studies import figures, page

KINDS = {HEALTHY: "good", REDUNDANT: "fair", UNDECIDED: "none", DOMINATED: "fair", COLLUSIVE: "bad"}
_MOST_DRAWN = 60
"""Members beyond which a matrix of pairs is too fine to be looked at."""


def html(audit: Audit, title: str) -> str:
    """The whole page."""
    facts = audit.facts
    told = f"{facts['members']} members, {facts['examples']:,} examples, {facts['outputs']} outputs"
    drawn = [(figures.as_svg(figure, words), words) for figure, words in drawings(audit)]
    body = [
        page.heading(f"Audit: {title}", 1),
        f"<p>{page.badge(audit.verdict, KINDS[audit.verdict])}</p>",
        page.paragraph(f"{_capital('; '.join(audit.judgement.reasons))}.", "lead"),
        *(page.paragraph(advice, "finding") for advice in audit.judgement.advice),
        page.figures(drawn),
        page.heading("Every figure"),
        page.paragraph("Intervals are bootstrap intervals of 95 % over examples."),
        *_tables(audit),
        *_detection(audit),
        page.heading("What was audited"),
        page.facts([("ensemble", told), ("task", facts["task"]), ("outputs are", facts["kind"]),
                    ("loss", facts["loss"]), ("pooled by", facts["pool"])]),
    ]  # fmt: skip
    return page.page(f"Audit: {title}", body)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _tables(audit: Audit) -> list[str]:
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
                rows.append([page.Wrapped(finding["title"]), _value(finding), _span(finding), *others])
        parts += [page.heading(_capital(group), 3), page.table(("figure", "test", "interval", *extra), rows)]
    return parts


def _value(numbers: dict[str, Any]) -> str:
    return "" if numbers["value"] is None else f"{numbers['value']:.4g}"


def _span(numbers: dict[str, Any]) -> str:
    low, high = numbers["low"], numbers["high"]
    return "" if low is None or high is None else f"{low:.3g} to {high:.3g}"


def _detection(audit: Audit) -> list[str]:
    if not audit.detection:
        return []
    rows = [
        [page.Wrapped(name), f"{f.value:.3f}", f"{f.low:.3f} to {f.high:.3f}"] for name, f in audit.detection.items()
    ]
    return [
        page.heading("Telling shifted data apart"),
        page.paragraph(
            "Area under the ROC curve: the chance that a shifted example scores higher than one that is not."
        ),
        page.table(("score", "area", "interval"), rows),
    ]


def drawings(audit: Audit) -> list[tuple[Any, str]]:
    """Figures with their captions."""
    found = [(_losses(audit), "Each member's own loss, and what pooling makes of them.")]
    if any(name.startswith("codependence_") for name in audit.test):
        found.append((_codependence(audit), "How much the ensemble's loss rises when members are left out at random."))
    if audit.facts["members"] <= _MOST_DRAWN:
        found.append((_matrix(audit), "How members' errors go together: 1 together, 0 apart, below 0 they cancel."))
    if audit.facts["members"] > 1 and min(audit.by_member.get("accuracy", [1.0])) < 1:
        words = (
            "Pairs of members on the plane of accuracy and disagreement. Upper line: the best member beside one whose "
            "errors are independent of its own. Lower line: beside itself with some predictions flipped at random."
        )
        found.append((_plane(audit), words))
    return found


def _axes(x_label: str, y_label: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.3), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x_label, ylabel=y_label)
    return figure, axes


def _styled(draw: Any) -> Any:
    with figures.styled():
        return draw()


def _losses(audit: Audit) -> Any:
    def draw() -> Any:
        figure, axes = _axes("member", "loss")
        losses = audit.by_member["loss"]
        axes.scatter(range(len(losses)), losses, color=figures.COLOURS[0], s=30, label="member", zorder=3)
        for name, colour, dash in (("individual", figures.COLOURS[0], "--"), ("ensemble", figures.COLOURS[1], "-")):
            figure_of = audit.test[name]
            words = {"individual": "members' mean", "ensemble": "ensemble"}[name]
            axes.axhline(figure_of.value, color=colour, linestyle=dash, label=words)
            axes.axhspan(figure_of.low, figure_of.high, color=colour, alpha=0.15, linewidth=0)
        axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        figure.legend(loc="outside lower center", ncols=3)
        return figure

    return _styled(draw)


def _codependence(audit: Audit) -> Any:
    def draw() -> Any:
        figure, axes = _axes("share of members left out", "rise of the loss")
        for of, name, colour in ((audit.test, "this ensemble", 1), (audit.reference, "reference", 0)):
            if of is None:
                continue
            drops = [drop for drop in DROPS if f"codependence_{drop}" in of]
            each, x = [of[f"codependence_{drop}"] for drop in drops], [0.0, *drops]
            axes.plot(x, [0.0, *(f.value for f in each)], color=figures.COLOURS[colour], marker="o", label=name)
            low, high = [0.0, *(f.low for f in each)], [0.0, *(f.high for f in each)]
            axes.fill_between(x, low, high, color=figures.COLOURS[colour], alpha=0.18, linewidth=0)
        from matplotlib.ticker import PercentFormatter

        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(bottom=0)
        if audit.reference is not None:
            figure.legend(loc="outside lower center", ncols=2)
        return figure

    return _styled(draw)


def _matrix(audit: Audit) -> Any:
    def draw() -> Any:
        figure, axes = _axes("member", "member")
        shown = axes.imshow(audit.by_member["error_correlation"], cmap="RdBu_r", vmin=-1, vmax=1)
        axes.grid(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
        figure.colorbar(shown, ax=axes, label="correlation of errors")
        return figure

    return _styled(draw)


def _plane(audit: Audit) -> Any:
    accuracy, disagreement = (torch.tensor(audit.by_member[name]) for name in ("accuracy", "disagreement"))
    pairs = plane_of(accuracy, disagreement)
    points = torch.stack(pairs, 1)[pairs.accuracy < 1].tolist()
    labels = "accuracy of a pair", "disagreement / error rate"
    return figures.plane([("pair", points)], float(accuracy.max()), audit.facts["outputs"], *labels)
