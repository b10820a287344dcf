"""The page of a robustness evaluation: the worst case, accuracy under every attack, curves, and flags in words."""

from collections.abc import Sequence
from typing import Any

from dissensus.attacks.flags import Flag
from dissensus.attacks.robustness import CurvePoint, Robustness
from dissensus.metrics import Interval
from dissensus.pages import Badge, Cell, Drawing, FactList, Number, Page, PageTable, Section, Text, style
from dissensus.pages.parts import counted

NORMS = {"linf": "L∞", "l2": "L2"}
_BALLS = {
    "linf": "of every number of an input, such as a pixel",
    "l2": "of a whole input, as the root of the sum of squared changes",
}
_LONGEST_NAME = 26
"""Characters of an attack's name beside its bar."""
_ATTACK_COLUMNS = {
    "attack": "",
    "kind": "white-box attacks follow gradients, black-box ones only ask for outputs, and transfer crafts on another "
    "network",
    "accuracy left": "share of examples that are still classified correctly",
    "examples": "what the accuracy refers to",
    "attacked": "those that were still classified correctly before it",
    "seconds": "",
}
"""Columns of the table of attacks, with what they hold where the name does not say it."""


def page(result: Robustness, title: str) -> Page:
    """The page of an evaluation; ``title`` names the ensemble and the data."""
    facts = result.facts
    ball = f"{facts['epsilon']:.4g} in {NORMS[facts['norm']]}"
    flags_raised = f"flags raised: {len(result.flags)} of {len(result.checks)}" if result.flags else result.flags_raised
    check_rows = [_check_row(flag) for flag in result.checks]
    return Page(
        f"Robustness: {title}",
        [
            Badge(flags_raised, "bad" if result.flags else "none"),
            Text(f"At ε = {ball}, {result.sentence}.", "lead"),
            Text(f"ε is the largest change that an attack may make: {_BALLS[facts['norm']]}.", "note"),
            *(Text(_flag_in_words(flag), "finding") for flag in result.flags),
            *drawings(result),
            Section("Every attack", [*map(Text, result.notes()), _attack_table(result)]),
            Section(
                "Every check",
                [
                    Text(
                        "Attacks that are too weak make a model look robust. These checks look for signs of it. A "
                        "check that is not raised has seen no such sign, and proves no more than that."
                    ),
                    PageTable(("check", "flag", "what was seen", "what it would mean"), check_rows, narrow="cards"),
                ],
            ),
            Section(
                "What was evaluated",
                [
                    FactList(
                        [
                            ("suite", facts["suite"]),
                            ("ε", ball),
                            ("examples", f"{facts['examples']:,}"),
                            ("for curves and checks", f"the first {facts['probed']:,} of these"),
                            ("members", str(facts["members"])),
                            ("classes", str(facts["classes"])),
                            ("pooled by", str(facts["pool"])),
                            ("surrogate", "yes" if facts["surrogate"] else "none"),
                            ("seed", str(facts["seed"])),
                            ("time", f"{facts['seconds']:,.0f} s"),
                        ]
                    )
                ],
            ),
        ],
    )


def _flag_in_words(flag: Flag) -> str:
    return f"{flag.name[:1].upper()}{flag.name[1:]}: {flag.seen}. {flag.meaning} {flag.advice}"


def _check_row(flag: Flag) -> list[Cell]:
    return [flag.name, Badge("raised", "bad") if flag.raised else "not raised", flag.seen, flag.meaning]


def _attack_table(result: Robustness) -> PageTable:
    examples = Number(result.facts["examples"], form=",")
    rows: list[list[Cell]] = [["no attack", "", _share(result.clean), examples, "", ""]]
    rows += [
        [
            attack.name + ("" if attack.bounded else "*"),
            attack.kind,
            _share(attack.accuracy),
            Number(attack.examples, form=","),
            Number(attack.tried, form=","),
            Number(attack.seconds, form=".1f"),
        ]
        for attack in result.attacks
    ]
    rows.append(["worst case", "", _share(result.worst), examples, "", ""])
    return PageTable(
        tuple(_ATTACK_COLUMNS), rows, "cards", {name: note for name, note in _ATTACK_COLUMNS.items() if note}
    )


def _share(share: Interval) -> Number:
    return Number(share.value, share.low, share.high, form=".1%")


def drawings(result: Robustness) -> list[Drawing]:
    """Figures with their captions."""
    examples = f"the first {counted(result.facts['probed'], 'example')}"
    order = "under it and all attacks before it" if result.facts["on_survivors"] else "under it alone"
    return [
        Drawing(
            _accuracy_by_attack(result),
            f"Accuracy without an attack, by attack ({order}), and in the worst case, with intervals of 95 %.",
        ),
        Drawing(
            _accuracy_over_epsilon(result.over_epsilon, result.facts["epsilon"]),
            f"Accuracy by ε on {examples}: the worst over losses. It should fall to zero.",
        ),
        Drawing(
            _accuracy_over_steps(result.over_steps),
            f"Accuracy by steps of PGD on cross-entropy, on {examples}. It should fall and then level off.",
        ),
    ]


@style.figure_style()
def _accuracy_by_attack(result: Robustness) -> Any:
    rows = [("no attack", result.clean), *((attack.name, attack.accuracy) for attack in result.attacks)]
    rows.append(("worst case", result.worst))
    colours = [style.COLOURS[4], *[style.COLOURS[0]] * len(result.attacks), style.COLOURS[1]]
    figure = style.blank_figure(height=max(3.3, 0.9 + 0.3 * len(rows)))
    axes = figure.subplots()
    for place, ((_, share), colour) in enumerate(zip(rows, colours, strict=True)):
        below, above = max(share.value - share.low, 0.0), max(share.high - share.value, 0.0)
        axes.barh(place, share.value, color=colour, alpha=0.85, height=0.62)
        axes.errorbar(share.value, place, xerr=[[below], [above]], color=style.INK, linewidth=1.2, capsize=2.5)
    axes.set_yticks(range(len(rows)), [style.shortened(name, _LONGEST_NAME) for name, _ in rows])
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="accuracy")
    style.percent_axis(axes.xaxis)
    axes.grid(False, axis="y")
    return figure


@style.figure_style()
def _accuracy_over_epsilon(points: Sequence[CurvePoint], epsilon: float) -> Any:
    figure = style.blank_figure()
    axes = figure.subplots()
    _draw_accuracy(axes, [point.at for point in points], points, "ε")
    axes.axvline(epsilon, color=style.COLOURS[1], linestyle="--", linewidth=1.3, label="ε of the suite")
    axes.legend()
    return figure


@style.figure_style()
def _accuracy_over_steps(points: Sequence[CurvePoint]) -> Any:
    """Steps grow by factors, so they stand at equal distances."""
    figure = style.blank_figure()
    axes = figure.subplots()
    places = list(range(len(points)))
    _draw_accuracy(axes, places, points, "steps")
    axes.set_xticks(places, [f"{point.at:g}" for point in points])
    return figure


def _draw_accuracy(axes: Any, x: Sequence[float], points: Sequence[CurvePoint], x_label: str) -> None:
    shares = [point.accuracy for point in points]
    band = [share.low for share in shares], [share.high for share in shares]
    values = [share.value for share in shares]
    style.draw_line(axes, x, values, band, color=style.COLOURS[0], marker="o", markersize=4)
    axes.set(xlabel=x_label, ylabel="accuracy", ylim=(0, 1.02))
    style.percent_axis(axes.yaxis)
