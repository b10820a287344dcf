"""An audit as a page: the verdict, its figures, and every number behind them."""

from typing import Any

from dissensus.auditing import Audit
from dissensus.auditing.judging import COLLUSIVE, DOMINATED, HEALTHY, REDUNDANT, UNDECIDED
from dissensus.auditing.tallying import DROPS
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
        words = "Pairs of members on the plane of accuracy and disagreement; the lines are what flipped predictions of "
        found.append((_plane(audit), words + "one network (low) and independent errors (high) would give."))
    return found


def _axes(x_label: str, y_label: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.3), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x_label, ylabel=y_label)
    return figure, axes


def _styled(draw: Any) -> Any:
    from matplotlib import rc_context

    with rc_context(figures.STYLE):  # pyright: ignore[reportArgumentType]  # matplotlib lists its keys one by one
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
    def draw() -> Any:
        figure, axes = _axes("accuracy of a pair", "disagreement / error rate")
        accuracy, disagreement = audit.by_member["accuracy"], audit.by_member["disagreement"]
        points = []
        for i in range(len(accuracy)):
            for j in range(i):
                mean = (accuracy[i] + accuracy[j]) / 2
                if mean < 1:
                    points.append((mean, disagreement[i][j] / (1 - mean)))
        classes = audit.facts["outputs"]
        best = max(accuracy)
        low = min([x for x, _ in points] + [best])
        xs = [low - 0.02 + k * (min(best, 0.999) - low + 0.02) / 60 for k in range(61)]
        independent = [(1 - a * a - (1 - a) ** 2 / max(1, classes - 1)) / (1 - a) for a in xs if a < 1]
        flipped = [_flips(a, best, classes) / (1 - a) for a in xs if a < 1]
        xs = [a for a in xs if a < 1]
        axes.plot(xs, independent, color=figures.COLOURS[2], linestyle="--", label="independent errors")
        axes.plot(xs, flipped, color=figures.COLOURS[3], linestyle=":", label="flips of the best")
        axes.scatter(
            [x for x, _ in points], [y for _, y in points], color=figures.COLOURS[0], s=18, label="pair", zorder=3
        )
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside lower center", ncols=3)
        return figure

    return _styled(draw)


def _flips(accuracy: float, best: float, classes: int) -> float:
    """Share of the best network's predictions that were flipped at random to get down to an accuracy."""
    slope = best - (1 - best) / max(1, classes - 1)
    return max(0.0, (best - accuracy) / slope) if slope > 0 else 0.0
