"""Draw the pictures of these pages: from stored results, and from a small training for the audit.

Usage: python docs/pictures.py
"""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib.image
import numpy as np
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


def demo() -> bytes:
    """The demo's overview."""
    stored = Path(__file__).parents[1] / "benchmarks" / "results" / "demo.json"
    return demo_page.overview(DemoResult.from_dict(json.loads(stored.read_text())))


def collusion() -> bytes:
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
    return side_by_side([style.as_png(figure) for figure in drawn])


def biases() -> bytes:
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
    return side_by_side([style.as_png(figure) for figure in (first, second)])


def audit() -> bytes:
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
    return side_by_side([style.as_png(drawing.figure) for drawing in drawings(result)[:3]])


def masks() -> bytes:
    """What a budget buys."""
    budgets = [1.0, 2.0]
    plans = [ds.masks.plan(ds.nets.resnet18(), 4, budget) for budget in budgets]
    return style.as_png(figures.mask_budgets(budgets, plans, "parameters"))


def plane() -> bytes:
    """Methods by accuracy, diversity and calibration, on CIFAR-10."""
    drawn = []
    for number in (2, 3):
        name = f"masksembles/figure-{number}"
        summary = shipped(f"{name}.laptop")
        summary = replace(summary, points=[point for point in summary.points if point.data == "cifar10"])
        drawn += [figure for figure, _ in study_figures(library.load(name), summary)]
    return side_by_side([style.as_png(figure) for figure in drawn])


def ldr() -> bytes:
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
    return side_by_side([style.as_png(figure) for figure in drawn])


def gallery() -> bytes:
    """CIFAR-10 pictures of most and least disagreement."""
    drawn = study_figures(library.load("ldr/figure-3"), shipped("ldr/figure-3.gpu"))
    return style.as_png(next(figure for figure, title in drawn if title.startswith("cifar10,")))


def adp() -> bytes:
    """What members' features look like without and with ADP, on CIFAR-10."""
    drawn = study_figures(library.load("adp/figure-2"), shipped("adp/figure-2.gpu"))
    return side_by_side([style.as_png(figure) for figure, title in drawn if not title.endswith("adp-2-0")])


def noisy_waves(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A sine whose noise grows with x, as docs/uncertainty.md has it."""
    generator = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(count, 1, generator=generator) - 3
    return x, torch.sin(2 * x) + (0.05 + 0.1 * (x + 3)) * torch.randn(count, 1, generator=generator)


def intervals() -> bytes:
    """Calibrated intervals of members by squared error, of one width, and of Gaussian members, as wide as the noise."""
    drawn = []
    cases: list[tuple[str, int, ds.conformal.Method]]
    cases = [("squared_error", 1, "absolute"), ("gaussian_nll", 2, "normalised")]
    for loss, outputs, method in cases:
        ens = ds.Ensemble(partial(ds.nets.mlp, 1, outputs, (64, 64)), members=5)
        objective = partial(ds.objectives.independent, loss=loss)
        ds.fit(ens, noisy_waves(1000, 0), objective, epochs=100, batch_size=64, lr=5e-3)
        (held, values), (x, y) = noisy_waves(500, 1), noisy_waves(1000, 2)
        fitted = ds.conformal.calibrate(ens.predict(held), values, task="regression", loss=loss, method=method)
        prediction = ds.predictive(ens.predict(x), task="regression", loss=loss, conformal=fitted)
        low, high = prediction.interval(0.9)
        print(loss, method, ds.metrics.prediction_intervals(low, high, y, level=0.9))
        drawn.append(prediction.plot(y, x=x, names=[f"{loss}, {method}"]))
    return side_by_side([style.as_png(figure) for figure in drawn])


def classes() -> bytes:
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
    return style.as_png(prediction.plot(y[900:], level=0.98))


def tuning() -> bytes:
    """The loss over β on three data sets, from the benchmark of `ds.tune`."""
    stored = Path(__file__).parents[1] / "benchmarks" / "results" / "tuning.json"
    rows = {(row["set"], row["seed"]): row for row in json.loads(stored.read_text())["rows"] if row["space"] == "β"}
    drawn: list[bytes] = []
    for name in ("bioconcentration", "weather", "fashion-mnist"):
        grid = rows[name, 0]["grid"]
        candidates = sorted(grid["candidates"], key=lambda candidate: candidate["point"]["beta"])
        base = candidates[0]["value"]
        points: list[tuning_figures.SettingPoint] = []
        for candidate in candidates:
            value, error = candidate["value"] / base, candidate["standard_error"] / base
            status = candidate["status"] if candidate["status"] in ("reference", "collusive") else "finalist"
            kind = "chosen" if candidate["point"] == grid["best"] else status
            if value < _MOST_LOSS:
                points.append(tuning_figures.SettingPoint(candidate["point"]["beta"], value, error, kind))
        figure = tuning_figures.over_setting(points, "β", "loss / that of β = 0")
        figure.axes[0].set_title(name)
        drawn.append(style.as_png(figure))
    return side_by_side(drawn)


def side_by_side(pictures: list[bytes]) -> bytes:
    """Several PNGs as one, on white."""
    images = [matplotlib.image.imread(io.BytesIO(picture))[..., :3] for picture in pictures]
    height = max(len(image) for image in images)
    padded = [np.pad(p, ((0, height - len(p)), (0, 24), (0, 0)), constant_values=1.0) for p in images]
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, np.concatenate(padded, 1), format="png")
    return buffer.getvalue()


if __name__ == "__main__":
    for name, draw in {
        "demo.png": demo,
        "biases.png": biases,
        "gallery.png": gallery,
        "adp.png": adp,
        "ldr.png": ldr,
        "collusion.png": collusion,
        "audit.png": audit,
        "masks.png": masks,
        "plane.png": plane,
        "intervals.png": intervals,
        "sets.png": classes,
        "tuning.png": tuning,
    }.items():
        (ASSETS / name).write_bytes(draw())
