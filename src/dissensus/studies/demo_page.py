"""The demo's page: figures, tables, and sentences that are computed from the numbers they speak of."""

import math
from collections.abc import Callable, Sequence

from dissensus.auditing.examples import DROPS
from dissensus.pages import Cell, Drawing, FactList, Number, Page, PageTable, Part, Section, Text, charts, style
from dissensus.pages.parts import counted, significant
from dissensus.studies import verdicts
from dissensus.studies.demo import TEST_FRACTION, DemoProblem, DemoResult, DemoRun

Quantity = Callable[[DemoRun], float]

QUANTITIES: dict[str, Quantity] = {
    "ensemble": lambda run: run.test["ensemble"],
    "member": lambda run: run.test["individual"],
    "diversity": lambda run: run.test["diversity"],
    "relative": lambda run: run.test["diversity"] / run.test["ensemble"],
    "gap": lambda run: run.test["ensemble"] - run.train["ensemble"],
    "bias": lambda run: 100 * run.bias_share,
    **{f"rise {i}": lambda run, i=i: 100 * run.rise[i] for i in range(len(DROPS))},
}
COLUMNS = {
    "ensemble": "ensemble",
    "members": "member",
    "diversity": "diversity",
    "div/loss": "relative",
    "gap": "gap",
    "bias %": "bias",
    "drop 20%": "rise 0",
}
"""Columns of the tables, and the quantities that they hold."""
TABLE_HEADER = ("β", *COLUMNS)
COLUMN_NOTES = {
    "ensemble": "loss of the ensemble on test data",
    "members": "mean loss of its members",
    "diversity": "the members' loss minus the ensemble's",
    "div/loss": "diversity divided by the ensemble's loss",
    "gap": "the ensemble's loss on test data minus that on training data",
    "bias %": "share of diversity that constant shifts of members make up",
    "drop 20%": "rise of the ensemble's loss, in per cent, without a random 20 % of its members",
}
"""What the columns hold."""
_X_LABEL = "β (0: each member alone, 1: joint training)"


def values_over_seeds(result: DemoResult, problem: str, quantity: str) -> list[list[float]]:
    """For every β the values over seeds; seeds are in the same order throughout."""
    return [
        [QUANTITIES[quantity](run) for run in result.runs if run.problem == problem and run.beta == beta]
        for beta in result.settings.betas
    ]


def means_over_seeds(result: DemoResult, problem: str, quantity: str) -> list[float]:
    """For every β the mean over seeds."""
    return [math.fsum(values) / len(values) for values in values_over_seeds(result, problem, quantity)]


def finding(result: DemoResult, problem: str) -> str:
    """The largest β compared with the smallest, in plain words."""
    betas = result.settings.betas
    diversity, member, ensemble = (
        means_over_seeds(result, problem, quantity) for quantity in ("diversity", "member", "ensemble")
    )
    losses = values_over_seeds(result, problem, "ensemble")
    differences = [last - first for first, last in zip(losses[0], losses[-1], strict=True)]
    growth = diversity[-1] / diversity[0] if diversity[0] > 0 else math.inf
    ratio = member[-1] / member[0]
    return (
        f"From β = {betas[0]:g} to β = {betas[-1]:g}, diversity {_growth_in_words(growth)} "
        f"({significant(diversity[0])} to {significant(diversity[-1])}). Members got "
        f"{'worse' if ratio > 1 else 'better'}: "
        f"their mean loss is {_rounded(ratio)} times what it was. {_change_in_words(differences, ensemble[0])}"
    )


def _change_in_words(differences: Sequence[float], base: float) -> str:
    """Whether the ensemble's loss changed: a paired 95 % interval over seeds, by Student's t."""
    try:
        from scipy.stats import t
    except ImportError as reason:
        raise ImportError("Student's t comes from scipy: pip install 'dissensus[report]'") from reason
    seeds = len(differences)
    mean, error = verdicts.mean_and_error(differences)
    if seeds < 2:
        return f"One seed does not tell whether the ensemble's loss changed ({mean:+.2g})."
    reach = float(t.ppf(0.975, seeds - 1)) * error
    change = f"{mean:+.2g}, 95 % interval {mean - reach:+.2g} to {mean + reach:+.2g}"
    if abs(mean) <= reach:
        return (
            f"No change of the ensemble's loss can be shown with {seeds} seeds ({change}), so most of the added "
            "diversity cancels out when members are averaged."
        )
    if mean > 0:
        return f"The ensemble's loss rose by {mean / base:.0%} ({change}): the added diversity did harm."
    return f"The ensemble's loss fell by {-mean / base:.0%} ({change}): some of the added diversity is useful here."


def _growth_in_words(ratio: float) -> str:
    return f"grew {_rounded(ratio)}-fold" if ratio >= 1 else f"shrank to {ratio:.0%}"


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def problem_panels(result: DemoResult, problem: DemoProblem) -> list[tuple[charts.Panel, str]]:
    """Every panel of a problem, with its caption."""

    def line(label: str, quantity: str) -> charts.Line:
        means = [verdicts.mean_and_error(values) for values in values_over_seeds(result, problem.name, quantity)]
        return charts.Line(label, [mean for mean, _ in means], [error for _, error in means])

    parts = [line("mean of members", "member"), line("ensemble", "ensemble"), line("diversity", "diversity")]
    rises = [line(f"drop {drop:.0%}", f"rise {i}") for i, drop in enumerate(DROPS)]
    return [
        (
            charts.Panel("Loss and diversity", f"{problem.loss_name}, test data", parts),
            "The ensemble's loss is exactly the mean loss of its members minus their diversity. Where members' loss "
            "and diversity rise together, the rise cancels: members disagree more, and the ensemble gains nothing.",
        ),
        (
            charts.Panel("Diversity relative to loss", "diversity / ensemble's loss", [line("", "relative")]),
            "How far members are from each other, in units of the ensemble's loss. Trained alone (β = 0), members "
            "settle at a level that depends on the data. A steep rise at the right end is diversity that the ensemble "
            "does not profit from.",
        ),
        (
            charts.Panel("Train-test gap", problem.loss_name, [line("", "gap")]),
            "The ensemble's loss on test data minus its loss on training data. Diversity that only fits the training "
            "data makes this gap wider.",
        ),
        (
            charts.Panel("Diversity that is mere bias", "% of diversity removed", [line("", "bias")]),
            f"Shift each member's {problem.pool_name} by a constant so that all members agree on average. This changes "
            "no prediction of the ensemble. The diversity that vanishes was only members leaning to opposite sides.",
        ),
        (
            charts.Panel("When members are dropped", "% rise of the ensemble's loss", rises),
            "How much worse the ensemble gets when some members are left out at random. Members whose errors must "
            "cancel depend on each other.",
        ),
    ]


def _drawings(result: DemoResult, problem: DemoProblem) -> list[Drawing]:
    return [
        Drawing(
            charts.line_chart(result.settings.betas, _X_LABEL, [panel]),
            caption,
            f"{problem.title}. {panel.title} against beta.",
        )
        for panel, caption in problem_panels(result, problem)
    ]


def overview(result: DemoResult) -> bytes:
    """Three panels of the first problem in a row, as a PNG."""
    panels = [panel for panel, _ in problem_panels(result, result.problems[0])]
    return style.as_png(charts.line_chart(result.settings.betas, _X_LABEL, [panels[0], panels[3], panels[4]]))


def page(result: DemoResult) -> Page:
    """The page of the demo."""
    members, seeds = result.settings.members, len(result.settings.seeds)
    introduction: list[Part] = [
        Text(
            f"An ensemble of {members} networks predicts by its average. One can train each network alone, or train "
            "the average itself. The second sounds better. But then networks are free to err in opposite directions, "
            "since their errors cancel on the training data. That is called collusion: it looks like diversity and "
            "helps little.",
            "lead",
        ),
        Text(
            "β goes from one to the other. At β = 0 every member is trained alone; at β = 1 only the average counts; "
            f"in between, diversity is rewarded by β. Every point below is the mean of {seeds} trainings, each with "
            "its own split of the data and its own initial weights; bands are one standard error to either side."
        ),
    ]
    verdict_titles = ("β", *(problem.title for problem in result.problems))
    return Page(
        "What joint training does to an ensemble's diversity",
        [
            *introduction,
            *(_problem_section(result, problem) for problem in result.problems),
            Section(
                "What the audit says",
                [
                    Text(
                        "The audit judges an ensemble by its members' outputs, here on test data and on training "
                        "data, with the ensemble of β = 0 as reference. Healthy members are models in their own right. "
                        "Collusive members lean on each other: each is worse than a model trained alone, and only the "
                        "mean of all is right. The file audit.html beside this page is the whole audit of an ensemble "
                        "that was trained jointly."
                    ),
                    PageTable(verdict_titles, verdict_rows(result), narrow="fit"),
                ],
            ),
            Section("How this page was made", [FactList(_provenance(result))]),
        ],
    )


def _problem_section(result: DemoResult, problem: DemoProblem) -> Section:
    table = PageTable(TABLE_HEADER, table_rows(result, problem.name), "cards", COLUMN_NOTES)
    return Section(problem.title, [Text(finding(result, problem.name), "finding"), *_drawings(result, problem), table])


def table_rows(result: DemoResult, problem: str) -> list[list[Cell]]:
    """The numbers behind the figures: a row for each β."""
    columns = [means_over_seeds(result, problem, quantity) for quantity in COLUMNS.values()]
    return [
        [Number(beta, form="g"), *map(Number, means)]
        for beta, *means in zip(result.settings.betas, *columns, strict=True)
    ]


def verdict_rows(result: DemoResult) -> list[list[Cell]]:
    """The verdicts on the first seed's ensembles: a row for each β, a column for each problem."""
    return [
        [Number(beta, form="g"), *(result.audits[problem.name, beta].verdict for problem in result.problems)]
        for beta in result.settings.betas
    ]


def _provenance(result: DemoResult) -> list[tuple[str, str]]:
    settings, made, problems = result.settings, result.made, result.problems
    return [
        ("command", made["command"]),
        ("version", f"dissensus {made['version']}, torch {made['torch']}, Python {made['python']}"),
        ("machine", made["machine"]),
        ("duration", f"{counted(round(made['seconds']), 'second')} for {counted(made['networks'], 'network')}"),
        ("seeds", ", ".join(map(str, settings.seeds))),
        (
            "data",
            f"diabetes and digits as scikit-learn ships them; {100 * TEST_FRACTION:.0f} % held out for testing, split "
            "by the seed",
        ),
        (
            "networks",
            "; ".join(
                f"{problem.name}: hidden layers of {' and '.join(map(str, problem.hidden))}" for problem in problems
            ),
        ),
        (
            "training",
            "; ".join(
                f"{problem.name}: AdamW {problem.lr:g}, {counted(settings.epochs(problem), 'epoch')}, "
                f"batches of {problem.batch_size}"
                for problem in problems
            ),
        ),
        ("numbers", "results.json beside this page"),
    ]
