"""Draw the pictures of these pages: from stored results, and from small trainings.

Usage: python docs/pictures.py [NAME ...]

Pictures are SVG on a transparent ground. Their ink is dark, or light where the reader has asked for dark pages.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

import torch

import dissensus as ds
from dissensus.auditing.page import drawings
from dissensus.pages import charts, figures, style
from dissensus.pages import tuning as tuning_figures
from dissensus.studies import demo_page, library
from dissensus.studies.demo import DemoResult
from dissensus.studies.figures import figures as study_figures
from dissensus.studies.results import Point, Summary
from dissensus.studies.run_folders import SHIPPED

ASSETS = Path(__file__).parent / "assets"
BENCHMARKS = Path(__file__).parents[1] / "benchmarks" / "results"
INKS = {"light": "#1f2933", "dark": "#d6dde4"}
_GAP = 14
"""Points between figures that stand side by side."""
_PAGE = 830
"""Points that fit into the width of a page of 816 pixels with text of 11 points at about 11 pixels."""
_MOST_LOSS = 1.4
"""In multiples of independent training; beyond it, the others would look flat."""


def line(name: str, points: Sequence[Point], measure: str) -> charts.Line:
    """A measure over points."""
    estimates = [point.measures[measure] for point in points]
    means = [estimate.mean or 0.0 for estimate in estimates]
    return charts.Line(name, means, [estimate.error or 0.0 for estimate in estimates])


def shipped(name: str) -> Summary:
    """A shipped result, by study and scale."""
    return Summary.from_json(json.loads((SHIPPED / f"{name}.json").read_text()))


def benchmark(name: str) -> Any:
    """The result of a benchmark."""
    return json.loads((BENCHMARKS / f"{name}.json").read_text())


@style.figure_style()
def benefit() -> list[Any]:
    """What a training step costs over members, and log losses on tables as multiples of the ensemble's."""
    rows = [row for row in benchmark("gpu")["rows"] if (row["case"], row["batch"]) == ("ResNet-20", 64)]
    price = style.blank_figure(4.6, 2.5)
    axes = price.subplots()
    ways = (("by hand", "a loop over modules", "#8b8f98", "s"), ("auto", "dissensus", style.COLOURS[0], "o"))
    for way, name, colour, marker in ways:
        times = [row["ways"][way]["ms"] for row in rows]
        axes.plot([row["members"] for row in rows], times, marker=marker, color=colour, label=name)
        axes.annotate(
            f"{times[-1]:.0f} ms", (rows[-1]["members"], times[-1]), (0, 6), textcoords="offset points", ha="right"
        )
    axes.set(xlabel="members", ylabel="milliseconds of a step", title="The price of members")
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])  # room for the number above the last point
    axes.legend(frameon=False)

    tables = [row for row in benchmark("tabular")["rows"] if row["task"] == "classification"]
    quality = style.blank_figure(5.6, 2.5)
    axes = quality.subplots()
    others = (("boosting", "^", 1), ("forest", "s", 3), ("MLP", "D", 2))
    ratio = lambda row, name: row["results"][name]["nll"]["mean"] / row["results"]["ensemble"]["nll"]["mean"]  # noqa: E731
    places = range(len(tables))
    axes.axvline(1, color=style.COLOURS[0], label="dissensus")
    for name, marker, colour in others:
        values = [ratio(row, name) for row in tables]
        label = "one network" if name == "MLP" else name
        axes.plot(values, places, linestyle="", marker=marker, color=style.COLOURS[colour], label=label)
    axes.set_xscale("log")
    axes.set_xticks([1, 1.5, 2, 3, 4], ["1", "1.5", "2", "3", "4"])
    axes.minorticks_off()
    axes.set_yticks(places, [row["table"] for row in tables])
    axes.set_ylim(-0.6, len(tables) - 0.4)  # whole markers
    axes.set(xlabel="log loss / the ensemble's (right of the line: worse)", title="Better probabilities on tables")
    quality.legend(loc="outside lower center", ncols=4)
    return [price, quality]


def demo() -> list[Any]:
    """The demo's overview."""
    result = DemoResult.from_dict(benchmark("demo"))
    panels = [panel for panel, _ in demo_page.problem_panels(result, result.problems[0])]
    return [charts.line_chart(result.settings.betas, "β", [panels[i]]) for i in (0, 3)]


def collusion() -> list[Any]:
    """UCI weather and CIFAR-10 over β."""
    weather = [point for point in shipped("collusion/figure-2.paper").points if point.data == "weather"]
    cnns = shipped("collusion/figure-15.paper").points
    few, many = ([point for point in cnns if point.value("members") == count] for count in (5, 10))
    first = charts.Panel(
        "weather: diversity explodes",
        "test squared error",
        [line("diversity", weather, "diversity"), line("ensemble", weather, "error")],
    )
    second = charts.Panel(
        "CIFAR-10: the best β lies inside",
        "test loss of the ensemble",
        [line("5 CNNs", few, "error"), line("10 CNNs", many, "error")],
    )
    drawn = [
        charts.line_chart([point.value("beta") for point in points], "β", [panel])
        for points, panel in ((weather, first), (few, second))
    ]
    return drawn


def biases() -> list[Any]:
    """Two learners f + c and f − c (collusion paper, appendix F): what they predict, and what c costs whom."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 6, 61)
    f = x.sin() + 0.4 * torch.randn(61, generator=generator)
    shifts = [i / 10 for i in range(16)]
    y = x.sin().unsqueeze(1)
    parts = [
        ds.diversity.decompose((f + torch.tensor([[c], [-c]])).unsqueeze(-1), y, loss="squared_error", pool="score")
        for c in shifts
    ]

    def plain(name: str, values: torch.Tensor) -> charts.Line:
        return charts.Line(name, values.tolist(), [0.0] * len(values))

    predictions = [plain("learner f + 1", f + 1), plain("learner f − 1", f - 1), plain("their mean", f)]
    costs = [
        plain(word, torch.tensor([float(getattr(part, name).mean()) for part in parts]))
        for word, name in (
            ("learners' error", "individual"),
            ("diversity", "diversity"),
            ("ensemble's error", "ensemble"),
        )
    ]
    first = charts.line_chart(x.tolist(), "x", [charts.Panel("opposite biases cancel", "prediction", predictions)])
    second = charts.line_chart(shifts, "c", [charts.Panel("and cost the ensemble nothing", "squared error", costs)])
    return [first, second]


def audit() -> list[Any]:
    """Five digits classifiers trained jointly, as docs/audit.md has them."""
    from sklearn.datasets import load_digits

    x, y = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    x = x.float() / 16
    objective = partial(ds.objectives.augmented, loss="cross_entropy", pool="score")
    swept = ds.sweep(
        partial(ds.nets.mlp, 64, 10, (30, 30)),
        (x[:1400], y[:1400]),
        objective,
        grid={"beta": [0.0, 1.0]},
        members=5,
        epochs=40,
        batch_size=32,
        lr=2e-3,
    )
    alone, jointly = (swept.run(i).predict(x[1400:]) for i in range(2))
    result = ds.audit(jointly, y[1400:], task="classification", kind="logits", pool="score", reference=alone)
    print(result.sentence)
    print(result.test["accuracy"], result.test["member_accuracy"])
    return [drawing.figure for drawing in drawings(result)[:4]]


def masks() -> list[Any]:
    """What a budget buys."""
    budgets = [1.0, 2.0]
    plans = [ds.masks.plan(ds.nets.resnet18(), 4, budget) for budget in budgets]
    return [figures.mask_budgets(budgets, plans, "parameters")]


def plane() -> list[Any]:
    """Methods by accuracy, diversity and calibration, on CIFAR-10."""
    drawn = []
    for number in (2, 3):
        name = f"masksembles/figure-{number}"
        summary = shipped(f"{name}.laptop")
        summary = replace(summary, points=[point for point in summary.points if point.data == "cifar10"])
        drawn += [figure for figure, _ in study_figures(library.load(name), summary)]
    return drawn


def ldr() -> list[Any]:
    """LDR over its strength: what ensemble and members can do, and how often the audit says collusive."""
    drawn = []
    for data in ("cifar10", "cifar10-six"):
        points = [
            point
            for point in shipped("audit/figure-1.paper").points
            if point.data == data and point.value("sampled") == 5
        ]
        measures = {
            "ensemble's accuracy": "accuracy",
            "members' accuracy": "member_accuracy",
            "detection of corruptions (PDS)": "auroc_predictive_diversity_corrupted-5",
            "share called collusive": "audit_collusive",
        }
        lines = [line(label, points, measure) for label, measure in measures.items()]
        panel = charts.Panel(f"{data}: five heads, all pairs", "share", lines)
        drawn.append(charts.line_chart([f"{point.value('strength'):g}" for point in points], "λ", [panel]))
    return drawn


def gallery() -> list[Any]:
    """CIFAR-10 pictures of most and least disagreement."""
    drawn = study_figures(library.load("ldr/figure-3"), shipped("ldr/figure-3.gpu"))
    return [next(figure for figure, title in drawn if title.startswith("cifar10,"))]


def adp() -> list[Any]:
    """What members' features look like without and with ADP, on CIFAR-10."""
    drawn = study_figures(library.load("adp/figure-2"), shipped("adp/figure-2.gpu"))
    return [figure for figure, title in drawn if not title.endswith("adp-2-0")]


def noisy_waves(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A sine whose noise grows with x, as docs/uncertainty.md has it."""
    generator = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(count, 1, generator=generator) - 3
    return x, torch.sin(2 * x) + (0.05 + 0.1 * (x + 3)) * torch.randn(count, 1, generator=generator)


def intervals() -> list[Any]:
    """Calibrated intervals of members by squared error, of one width, and of Gaussian members, as wide as the noise."""
    drawn, measured = [], []
    cases: list[tuple[str, int, ds.conformal.Method]]
    cases = [("squared_error", 1, "absolute"), ("gaussian_nll", 2, "normalised")]
    for loss, outputs, method in cases:
        ens = ds.Ensemble(partial(ds.nets.mlp, 1, outputs, (64, 64)), members=5)
        objective = partial(ds.objectives.independent, loss=loss)
        ds.fit(ens, noisy_waves(1000, 0), objective, epochs=100, batch_size=64, lr=5e-3)
        (held, values), (x, y) = noisy_waves(500, 1), noisy_waves(1000, 2)
        shown = slice(300)  # the picture has fewer points than the numbers
        fitted = ds.conformal.calibrate(ens.predict(held), values, task="regression", loss=loss, method=method)
        prediction = ds.predictive(ens.predict(x), task="regression", loss=loss, conformal=fitted)
        low, high = prediction.interval(0.9)
        quality = ds.metrics.prediction_intervals(low, high, y, level=0.9)
        measured.append({"loss": loss, "coverage": quality.coverage.value, "width": quality.width.value})
        prediction = ds.predictive(ens.predict(x[shown]), task="regression", loss=loss, conformal=fitted)
        drawn.append(prediction.plot(y[shown], x=x[shown], names=[f"{loss}, {method}"]))
    made = {"command": "python docs/pictures.py intervals", "torch": torch.__version__, "dissensus": ds.__version__}
    (BENCHMARKS / "intervals.json").write_text(json.dumps({"made": made, "rows": measured}, indent=1) + "\n")
    return drawn


def classes() -> list[Any]:
    """Digits: how sure an ensemble is, why it is unsure, and how many classes its sets hold."""
    from sklearn.datasets import load_digits

    x, y = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))  # digits of one writer lie together
    x, y = x[order].float() / 16, y[order]
    ens = ds.Ensemble(partial(ds.nets.mlp, 64, 10, (64,)), members=5)
    objective = partial(ds.objectives.independent, loss="cross_entropy")
    ds.fit(ens, (x[:400], y[:400]), objective, epochs=60, batch_size=32, lr=2e-3)
    fitted = ds.conformal.calibrate(ens.predict(x[400:900]), y[400:900], task="classification", method="lac")
    prediction = ds.predictive(ens.predict(x[900:]), task="classification", conformal=fitted)
    return [prediction.plot(y[900:], level=0.98)]


def tuning() -> list[Any]:
    """The loss over β on three data sets, from the benchmark of `ds.tune`."""
    stored = BENCHMARKS / "tuning.json"
    rows = {(row["name"], row["seed"]): row for row in json.loads(stored.read_text())["rows"] if row["space"] == "β"}
    drawn: list[Any] = []
    for name in ("weather", "airfoil", "fashion-mnist"):
        row = rows[name, 0]
        candidates = sorted(row["grid"]["candidates"], key=lambda candidate: candidate["point"]["beta"])
        base = candidates[0]["value"]
        points: list[tuning_figures.SettingPoint] = []
        for candidate in candidates:
            value, error = candidate["value"] / base, candidate["ahead_error"] / base
            status = candidate["status"] if candidate["status"] in ("reference", "collusive") else "finalist"
            kind = "chosen" if candidate["point"] == row["choice"] else status
            if value < _MOST_LOSS:
                points.append(tuning_figures.SettingPoint(candidate["point"]["beta"], value, error, kind))
        figure = tuning_figures.over_setting(points, "β", "loss / that of β = 0")
        figure.axes[0].set_title(name)
        drawn.append(figure)
    return drawn


def as_file(figures: Sequence[Any], description: str) -> bytes:
    """Figures in rows of two as one SVG file, whose ink follows the reader's choice of light or dark pages."""
    for figure in figures:
        for axes in figure.axes:
            if len(axes.get_legend_handles_labels()[0]) > 1 and not figure.legends and axes.get_legend() is None:
                axes.legend()
            if legend := axes.get_legend():
                legend.set_frame_on(False)
    drawn = [style.as_svg(figure, description) for figure in figures]
    rows = _rows(drawn)
    sizes = [[[float(size) for size in svg.attrib["viewBox"].split()[2:]] for svg in row] for row in rows]
    width = max(sum(w for w, _ in row) + _GAP * (len(row) - 1) for row in sizes)
    height = sum(max(h for _, h in row) + _GAP for row in sizes) - _GAP
    whole = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width:.1f} {height:.1f}"})
    whole.attrib |= {"width": f"{width:.0f}pt", "height": f"{height:.0f}pt", "role": "img", "aria-label": description}
    SubElement(whole, "style").text = (
        f"svg{{color:{INKS['light']}}}@media(prefers-color-scheme:dark){{svg{{color:{INKS['dark']}}}}}"
        "*{stroke-linejoin:round;stroke-linecap:butt}"
    )
    top = 0.0
    for row, row_sizes in zip(rows, sizes, strict=True):
        left = 0.0
        for svg, (w, h) in zip(row, row_sizes, strict=True):
            _place(svg, whole, left, top, (w, h))
            left += w + _GAP
        top += max(h for _, h in row_sizes) + _GAP
    return tostring(whole)


def _width(svg: Element) -> float:
    return float(svg.attrib["viewBox"].split()[2])


def _rows(drawn: Sequence[Element]) -> list[list[Element]]:
    """Rows of two figures, or of one where two would be wider than a page, which would make their text small."""
    rows: list[list[Element]] = []
    for svg in drawn:
        if rows and len(rows[-1]) == 1 and _width(rows[-1][0]) + _GAP + _width(svg) <= _PAGE:
            rows[-1].append(svg)
        else:
            rows.append([svg])
    return rows


def _place(svg: Element, whole: Element, left: float, top: float, size: tuple[float, float]) -> None:
    """Put one figure into the file, without the values that pages show on hover, which an image cannot."""
    for value in svg.findall("circle[@class='value']"):
        svg.remove(value)
    for name in ("role", "aria-label"):
        svg.attrib.pop(name, None)
    svg.attrib |= {"x": f"{left:.1f}", "y": f"{top:.1f}", "width": f"{size[0]:.1f}", "height": f"{size[1]:.1f}"}
    whole.append(svg)


PICTURES: dict[str, tuple[Callable[[], Sequence[Any]], str]] = {
    "benefit": (benefit, "The time of a training step over members, and log losses on seven tables"),
    "demo": (demo, "Error and diversity, and the share of diversity that is bias, over beta"),
    "biases": (biases, "Two learners with opposite biases and their mean; errors and diversity as the bias grows"),
    "gallery": (gallery, "The CIFAR-10 pictures that an LDR ensemble disagrees on most and least"),
    "adp": (adp, "Members' features without and with ADP"),
    "ldr": (ldr, "Accuracy of ensemble and members over lambda, and how often the audit says collusive"),
    "collusion": (collusion, "Diversity and error on weather, and the loss of small CNNs on CIFAR-10, over beta"),
    "audit": (audit, "Members' own losses, what happens without some of them, and how their errors go together"),
    "masks": (masks, "What a budget buys over S: a member's parameters, and how much members overlap"),
    "plane": (plane, "Pairs of members by accuracy and diversity, and calibration, for all methods"),
    "intervals": (intervals, "Intervals of one width, and intervals as wide as the noise"),
    "sets": (classes, "Confidence, both parts of the uncertainty, and sizes of sets, for digits"),
    "tuning": (tuning, "The loss over beta on three data sets, with the choice and what is collusive"),
}
"""Files by name: what draws the figures, and what they show."""


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        draw, description = PICTURES[name]
        (ASSETS / f"{name}.svg").write_bytes(as_file(draw(), description))
