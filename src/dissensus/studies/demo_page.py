"""The demo's page: figures, a table, and sentences that are computed from the numbers they speak of."""

import math
from collections.abc import Callable
from typing import Any

from dissensus.pages import figures, layout
from dissensus.studies import verdicts
from dissensus.studies.demo import epochs_of

Run = dict[str, Any]
Quantity = Callable[[Run], float]

QUANTITIES: dict[str, Quantity] = {
    "ensemble": lambda run: run["test"]["ensemble"],
    "member": lambda run: run["test"]["individual"],
    "diversity": lambda run: run["test"]["diversity"],
    "relative": lambda run: run["test"]["diversity"] / run["test"]["ensemble"],
    "train": lambda run: run["train"]["ensemble"],
    "gap": lambda run: run["test"]["ensemble"] - run["train"]["ensemble"],
    "bias": lambda run: 100 * run["bias_share"],
    **{f"rise {i}": lambda run, i=i: 100 * run["rise"][i] for i in range(3)},
}


def over_seeds(result: dict[str, Any], problem: str, quantity: Quantity) -> list[list[float]]:
    """For every β the values over seeds, seeds in one order throughout."""
    return [
        [quantity(run) for run in result["runs"] if run["problem"] == problem and run["beta"] == beta]
        for beta in result["settings"]["betas"]
    ]


def summary_rows(result: dict[str, Any], problem: str) -> list[dict[str, float]]:
    """One row per β: means over seeds of every quantity."""
    columns = {name: over_seeds(result, problem, quantity) for name, quantity in QUANTITIES.items()}
    return [
        {"beta": beta, **{name: sum(values[i]) / len(values[i]) for name, values in columns.items()}}
        for i, beta in enumerate(result["settings"]["betas"])
    ]


def finding(result: dict[str, Any], problem: str) -> str:
    """What the numbers say about the largest β against the smallest, in plain words."""
    rows, betas = summary_rows(result, problem), result["settings"]["betas"]
    first, last = rows[0], rows[-1]
    errors = over_seeds(result, problem, QUANTITIES["ensemble"])
    differences = [b - a for a, b in zip(errors[0], errors[-1], strict=True)]
    change = _change(differences, first["ensemble"])
    ratio = last["diversity"] / first["diversity"] if first["diversity"] > 0 else math.inf
    member = last["member"] / first["member"]
    how = "worse" if member > 1 else "better"
    return (
        f"From β = {betas[0]:g} to β = {betas[-1]:g}, diversity {_grew(ratio)} "
        f"({first['diversity']:.3g} to {last['diversity']:.3g}), and members on their own got {how}: their error is "
        f"{_round(member)} times what it was. {change}"
    )


def _change(differences: list[float], base: float) -> str:
    """Whether the ensemble's own error moved: a paired 95 % interval over seeds, by Student's t."""
    try:
        from scipy.stats import t
    except ImportError as reason:
        raise ImportError("Student's t comes from scipy: pip install 'dissensus[report]'") from reason
    n = len(differences)
    mean, error = verdicts.mean_and_error(differences)
    size = f"{abs(mean) / base:.0%}"
    if n < 2 or abs(mean) <= t.ppf(0.975, n - 1) * error:
        tail = "so what was added mostly cancels out when members are averaged."
        return f"The ensemble's error moved by no more than {n} seeds can tell ({mean:+.2g} ± {error:.2g}), {tail}"
    if mean > 0:
        return f"The ensemble's error rose by {size} ({mean:+.2g} ± {error:.2g}): the added diversity did harm."
    return (
        f"The ensemble's error fell by {size} ({mean:+.2g} ± {error:.2g}): here some of the added diversity is useful."
    )


X_LABEL = "β (0: members alone, 1: joint training)"


def problem_panels(result: dict[str, Any], problem: dict[str, Any]) -> list[tuple[figures.Panel, str]]:
    """Every panel of a problem, with its caption."""
    name, loss = problem["name"], problem["loss_name"]

    def line(label: str, quantity: str) -> figures.Line:
        each = [verdicts.mean_and_error(values) for values in over_seeds(result, name, QUANTITIES[quantity])]
        return figures.Line(label, [mean for mean, _ in each], [error for _, error in each])

    parts = [line("members on their own", "member"), line("ensemble", "ensemble"), line("diversity", "diversity")]
    rises = [line(f"drop {drop:.0%}", f"rise {i}") for i, drop in enumerate(result["settings"]["drops"])]
    return [
        (
            figures.Panel("Error and diversity", f"{loss}, test data", parts),
            "The ensemble's error is the members' own error less their diversity, exactly. Where members' error and "
            "diversity rise together, the rise cancels: members disagree more, and the ensemble gains nothing.",
        ),
        (
            figures.Panel("Diversity relative to error", "diversity / ensemble error", [line("", "relative")]),
            "How far members stray from each other, in units of the error that is left. Trained on their own (β = 0), "
            "members settle at a level that the data gives them. A steep rise at the right end is diversity made for "
            "its own sake.",
        ),
        (
            figures.Panel("Train-test gap", f"{loss}", [line("test less training error", "gap")]),
            "The ensemble's error on new data less its error on the data it was trained on. Diversity that only fits "
            "the training data makes this gap wider.",
        ),
        (
            figures.Panel("Diversity that is mere bias", "% of diversity removed", [line("", "bias")]),
            f"Shift each member's {problem['pool_name']} by a constant so that all agree on average. That changes no "
            "prediction of the ensemble. The diversity that vanishes was never more than members leaning to opposite "
            "sides.",
        ),
        (
            figures.Panel("When members are dropped", "% rise of the ensemble's error", rises),
            "Leave some members out at random and see how much worse the ensemble gets. Members whose errors must "
            "cancel cannot do without each other.",
        ),
    ]


def problem_figures(result: dict[str, Any], problem: dict[str, Any]) -> list[tuple[Any, str, str]]:
    """Figure, spoken description and caption of every figure of a problem."""
    return [
        (
            figures.draw(result["settings"]["betas"], X_LABEL, [panel]),
            f"{problem['title']}. {panel.title} against beta.",
            caption,
        )
        for panel, caption in problem_panels(result, problem)
    ]


def overview(result: dict[str, Any], problem: int = 0) -> bytes:
    """The first panels of a problem in a row, as a PNG."""
    panels = [panel for panel, _ in problem_panels(result, result["problems"][problem])]
    return figures.as_png(figures.draw(result["settings"]["betas"], X_LABEL, [panels[0], panels[3], panels[4]]))


def html(result: dict[str, Any]) -> str:
    """The whole page."""
    settings, made = result["settings"], result["made"]
    members, seeds = settings["members"], len(settings["seeds"])
    body = [
        layout.heading("What joint training does to an ensemble's diversity", 1),
        layout.paragraph(
            f"An ensemble of {members} networks predicts by its average. One can train each network on its own, or "
            "train the average itself. The second sounds better. But then networks are free to err in opposite "
            "directions, since their errors cancel on the training data. That is called collusion: it looks like "
            "diversity and helps little.",
            "lead",
        ),
        layout.paragraph(
            "The knob β goes from one to the other. At β = 0 every member is trained alone; at β = 1 only the "
            f"average counts; in between, diversity is rewarded by β. Every point below is the mean of {seeds} "
            "trainings with other splits of the data and other initial weights; bands are one standard error to either "
            "side."
        ),
    ]
    for problem in result["problems"]:
        body += [
            layout.heading(problem["title"]),
            layout.paragraph(finding(result, problem["name"]), "finding"),
            layout.figures(
                [(figures.as_svg(fig, spoken), text) for fig, spoken, text in problem_figures(result, problem)]
            ),
            layout.table(TABLE_HEADER, table_rows(result, problem["name"])),
        ]
    body += [
        layout.heading("What the audit says"),
        layout.paragraph(
            "The audit judges an ensemble by what its members say, here with their outputs on training data and with "
            "the ensemble of β = 0 as reference. Healthy members are models in their own right. Collusive ones lean on "
            "each other: each is worse than a model trained alone, and only the mean of all is right. audit.html, "
            "beside this page, is the whole audit of one that is trained jointly."
        ),
        layout.table(
            ("β", *(layout.Wrapped(problem["title"]) for problem in result["problems"])), verdict_rows(result)
        ),
        layout.heading("How this page was made"),
        layout.facts(_provenance(result, made)),
    ]
    return layout.page("dissensus: what joint training does to diversity", body)


def verdict_rows(result: dict[str, Any]) -> list[list[str]]:
    """What the audit says of the first seed's ensembles: a row for each β, a column for each problem."""
    said = {(found["problem"], found["beta"]): found["verdict"] for found in result["verdicts"]}
    problems = [problem["name"] for problem in result["problems"]]
    return [[f"{beta:g}", *(said[name, beta] for name in problems)] for beta in result["settings"]["betas"]]


TABLE_HEADER = ("β", "ensemble", "members", "diversity", "div/err", "gap", "bias %", "drop 20%")


def _grew(ratio: float) -> str:
    return f"grew {_round(ratio)}-fold" if ratio >= 1 else f"shrank to {ratio:.0%}"


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def table_rows(result: dict[str, Any], problem: str) -> list[list[str]]:
    """The numbers behind the figures, as text."""
    names = ("ensemble", "member", "diversity", "relative", "gap", "bias", "rise 0")
    return [[f"{row['beta']:g}", *(f"{row[n]:.3g}" for n in names)] for row in summary_rows(result, problem)]


def _provenance(result: dict[str, Any], made: dict[str, Any]) -> list[tuple[str, str]]:
    settings = result["settings"]
    return [
        ("command", made["command"]),
        ("version", f"dissensus {made['version']}, torch {made['torch']}, Python {made['python']}"),
        ("machine", made["machine"]),
        ("duration", f"{made['seconds']:.0f} seconds for {made['networks']} networks"),
        ("seeds", ", ".join(map(str, settings["seeds"]))),
        ("data", "diabetes and digits as scikit-learn ships them; 30 % held out for testing, split by the seed"),
        ("networks", "; ".join(f"{p['name']}: hidden layers of {_list(p['hidden'])}" for p in result["problems"])),
        (
            "training",
            "; ".join(
                f"{p['name']}: AdamW {p['lr']:g}, {epochs_of(p, settings)} epochs, batches of {p['batch_size']}"
                for p in result["problems"]
            ),
        ),
        ("numbers", "results.json beside this page"),
    ]


def _list(values: Any) -> str:
    return " and ".join(map(str, values))
