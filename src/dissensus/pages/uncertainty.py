"""Figures of predictions with uncertainty: intervals around means, and what a classifier is unsure of."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dissensus.pages.style import COLOURS, INK, blank_figure, figure_style, percent_axis

MOST_BARS, MOST_POINTS = 300, 3000
"""Examples that are drawn; of more, every k-th is."""
_RIGHT, _WRONG = COLOURS[0], COLOURS[1]
_POINTS: dict[str, Any] = {"marker": "o", "markersize": 3.6, "markeredgewidth": 0, "linestyle": "none"}


class Band(NamedTuple):
    """Predictions of one target, each ``[N]``."""

    name: str
    mean: Tensor
    low: Tensor | None
    """Lower ends of intervals; None if there are none."""
    high: Tensor | None
    spread: Tensor
    """Standard deviation of the members' means."""
    targets: Tensor | None


@figure_style()
def intervals(bands: Sequence[Band], level: float, x: Tensor | None = None, x_label: str = "x") -> Any:
    """Means and intervals, one panel per target.

    Args:
        bands: The predictions.
        level: Level of the intervals.
        x: A number per example to draw the predictions over. Without it, targets are drawn over predictions.
        x_label: Its name.
    """
    figure = blank_figure(6.2 * len(bands) if len(bands) > 1 else 7.2, 4.1)
    handles: dict[str, Any] = {}
    for axes, band in zip(figure.subplots(1, len(bands), squeeze=False)[0], bands, strict=True):
        if x is None:
            _over_prediction(axes, band, level)
        else:
            _over_input(axes, band, level, x, x_label)
        axes.set_title(_title(band))
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    # Below the panels, where it hides nothing.
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    return figure


def _title(band: Band) -> str:
    """The target's name, and the share of targets inside of their intervals."""
    if band.targets is None or band.low is None or band.high is None:
        return band.name
    inside = ((band.low <= band.targets) & (band.targets <= band.high)).double().mean()
    share = f"{100 * float(inside):.1f} % of {len(band.targets):,} targets inside"
    return f"{band.name}: {share}" if band.name else share


def _over_input(axes: Any, band: Band, level: float, x: Tensor, x_label: str) -> None:
    order = x.argsort()
    place = x[order].tolist()
    mean, spread = band.mean[order], band.spread[order]
    axes.plot(place, mean.tolist(), color=COLOURS[0], label="mean", zorder=3)
    if band.low is not None and band.high is not None:
        ends = band.low[order].tolist(), band.high[order].tolist()
        axes.fill_between(place, *ends, color=COLOURS[0], alpha=0.16, linewidth=0, label=f"{100 * level:g} % interval")
    ends = (mean - 2 * spread).tolist(), (mean + 2 * spread).tolist()
    axes.fill_between(place, *ends, color=COLOURS[0], alpha=0.38, linewidth=0, label="±2 std of the members")
    if band.targets is not None:
        chosen = _chosen(len(order), MOST_POINTS)
        points = x[chosen].tolist(), band.targets[chosen].tolist()
        axes.plot(*points, color=INK, alpha=0.45, label="targets", **_POINTS)
    axes.set(xlabel=x_label, ylabel="target")


def _over_prediction(axes: Any, band: Band, level: float) -> None:
    chosen = _chosen(len(band.mean), MOST_BARS)
    mean = band.mean[chosen]
    ends = [float(mean.min()), float(mean.max())]
    axes.plot(ends, ends, color=INK, alpha=0.5, linewidth=1, label="mean")
    if band.low is not None and band.high is not None:
        low, high, colour, label = band.low[chosen], band.high[chosen], COLOURS[0], f"{100 * level:g} % interval"
        groups = [("target, inside", INK), ("target, outside", _WRONG)]
    else:
        low, high = mean - 2 * band.spread[chosen], mean + 2 * band.spread[chosen]
        colour, label, groups = COLOURS[4], "±2 std of the members", [("targets", INK)] * 2  # nothing says how many
    axes.vlines(mean.tolist(), low.tolist(), high.tolist(), color=colour, alpha=0.4, linewidth=1.4, label=label)
    if band.targets is not None:
        truth = band.targets[chosen]
        inside = (low <= truth) & (truth <= high)
        for part, (name, ink) in zip((inside, ~inside), groups, strict=True):
            if bool(part.any()):
                axes.plot(mean[part].tolist(), truth[part].tolist(), color=ink, label=name, **_POINTS)
    shown = f" ({MOST_BARS} of {len(band.mean):,} examples)" if len(band.mean) > MOST_BARS else ""
    axes.set(xlabel=f"predicted mean{shown}", ylabel="target" if band.targets is not None else "prediction")


@figure_style()
def classes(
    confidence: Tensor,
    aleatoric: Tensor,
    epistemic: Tensor,
    right: Tensor | None = None,
    sizes: Tensor | None = None,
    set_title: str = "",
) -> Any:
    """How sure a classifier is, why it is unsure and, if there are sets of classes, how many they hold.

    Args:
        confidence: The largest probability of each example.
        aleatoric: Mean entropy of the members.
        epistemic: Mutual information of class and member.
        right: Whether each prediction is right, where this is known.
        sizes: Number of classes in each example's set.
        set_title: Title of the panel of the sets.
    """
    panels = 2 if sizes is None else 3
    figure = blank_figure(3.75 * panels, 3.7)
    axes = figure.subplots(1, panels)
    for panel in axes:
        panel.set_axisbelow(True)
    groups = [(torch.ones_like(confidence, dtype=torch.bool), COLOURS[0], "")]
    if right is not None:
        groups = [(right, _RIGHT, "right"), (~right, _WRONG, "wrong")]
    low = float(confidence.min())
    edges = [low + (1 - low or 1.0) * step / 25 for step in range(26)]
    samples = [confidence[group].tolist() for group, _, _ in groups]
    axes[0].hist(samples, edges, stacked=True, color=[colour for _, colour, _ in groups], label=[n for *_, n in groups])
    accuracy = "" if right is None else f": {100 * float(right.double().mean()):.1f} % right"
    axes[0].set(xlabel="largest probability", ylabel="examples", title=f"confidence{accuracy}")
    percent_axis(axes[0].xaxis)
    chosen = _chosen(len(confidence), MOST_POINTS)
    for group, colour, _ in groups:
        part = chosen[group[chosen]]
        axes[1].plot(aleatoric[part].tolist(), epistemic[part].tolist(), color=colour, alpha=0.55, **_POINTS)
    axes[1].set(xlabel="aleatoric: mean entropy, nats", ylabel="epistemic: mutual information", title="why unsure")
    axes[1].set_xlim(left=0)
    axes[1].set_ylim(bottom=0)
    if right is not None:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    if sizes is not None:
        counts = torch.bincount(sizes.long()).double() / len(sizes)
        axes[2].bar(range(len(counts)), counts.tolist(), color=COLOURS[2])
        axes[2].set(
            xlabel=f"classes in the set, {float(sizes.double().mean()):.2f} on average",
            ylabel="share of examples",
            title=set_title,
        )
        axes[2].xaxis.get_major_locator().set_params(integer=True)
        percent_axis(axes[2].yaxis)
    return figure


def _chosen(count: int, most: int) -> Tensor:
    """Evenly spaced examples, at most this many."""
    return torch.arange(count) if count <= most else torch.linspace(0, count - 1, most).long()
