"""Tables of docs/diversity.md."""

import re
from statistics import fmean

from demo_output import demo_result, printed
from layout import benchmark, mean, point_at, points_by_data, rounded, span, study, study_note, table

from dissensus.pages.parts import significant
from dissensus.studies import demo_page

UCI_NAMES = {
    "facebook": "facebook, without the columns that sum up to the target",
    "facebook-leaky": "facebook, with them",
}
NETWORKS = (
    ("collusion/figure-6.gpu", "five ResNet-18, CIFAR-10, probabilities averaged", "beta", "β", {}),
    ("collusion/figure-13.gpu", "ten ResNet-18, CIFAR-10, probabilities averaged", "beta", "β", {"members": 10}),
    ("collusion/figure-14.gpu", "five ResNet-18, CIFAR-10, scores averaged", "beta", "β", {"pool": "score"}),
    ("collusion/figure-16.gpu", "five VGG, Fashion-MNIST (for SVHN), probabilities averaged", "beta", "β", {}),
    ("collusion/figure-18.gpu", "five ResNet-18, CIFAR-10, joint, members dropped at random", "drop", "share", {}),
)
"""Study, words, axis and its symbol, and the values of other axes where the study has them."""


def uci() -> str:
    """The collusion paper's tables, from β = 0 to β = 1."""
    summary = study("collusion/figure-2.paper")
    rows = []
    for data in points_by_data(summary):
        low, high = (point_at(summary, data=data, beta=beta) for beta in (0.0, 1.0))
        rows.append(
            [
                UCI_NAMES.get(data, data),
                f"{mean(low, 'diversity'):.2g} → {mean(high, 'diversity'):.2g}",
                f"{mean(low, 'error'):.3g} → {mean(high, 'error'):.3g}",
                *(
                    f"{100 * mean(low, name):.2g} % → {100 * mean(high, name):.2g} %"
                    for name in ("bias_share", "codependence_0.2")
                ),
            ]
        )
    header = ("data", "diversity", "ensemble's error", "diversity that is bias", "rise without 20 % of members")
    return f"{table(header, rows)}\n\n{study_note(summary)}\n"


def networks() -> str:
    """Large networks over β, and over the share of members that joint training leaves out."""
    rows = []
    for name, words, axis, symbol, others in NETWORKS:
        shown = [p for p in study(name).points if all(p.value(key) in (None, value) for key, value in others.items())]
        for point in shown:
            shares = [f"{100 * mean(point, measure):.1f} %" for measure in ("accuracy", "member_accuracy")]
            losses = [f"{mean(point, measure):.3g}" for measure in ("error", "diversity")]
            rows.append([words, f"{symbol} = {point.value(axis):g}", *shares, *losses])
    header = ("ensembles", "at", "accuracy", "members' accuracy", "ensemble's loss", "diversity")
    return f"{table(header, rows)}\n\n{study_note(*(study(name) for name, *_ in NETWORKS))}\n"


def converged() -> str:
    """Figures 6 and 17 of the collusion paper, trained to convergence: means over seeds."""
    units = benchmark("collusion_cifar10")["units"]
    rows = []
    for beta in sorted({unit["made"]["beta"] for unit in units}):
        seeds = [unit for unit in units if unit["made"]["beta"] == beta]
        accuracies = ", ".join(f"{100 * unit['test']['accuracy']:.2f} %" for unit in seeds)
        members = [share for unit in seeds for share in unit["test"]["member_accuracy"]]
        losses = [f"{fmean(unit['test'][name] for unit in seeds):.3f}" for name in ("error", "individual", "diversity")]
        verdicts = {
            evidence: dict.fromkeys(unit["audit"][evidence]["verdict"] for unit in seeds)
            for evidence in seeds[0]["audit"]
            if evidence != "with both"
        }
        audits = "; ".join(f"{evidence}: {', '.join(words)}" for evidence, words in verdicts.items())
        rows.append([f"{beta:g}", accuracies, f"{100 * fmean(members):.1f} %", *losses, audits])
    first, seconds = units[0]["made"], sum(unit["made"]["seconds"] for unit in units)
    note = (
        f"Five members, {first['epochs']} epochs, {len({unit['made']['seed'] for unit in units})} seeds; "
        f"{first['device']}, {seconds / 60:.0f} minutes of training. "
        "`python benchmarks/collusion_cifar10.py` makes it again."
    )
    header = ("β", "accuracy, by seed", "members' accuracy", "ensemble's loss", "members' loss", "diversity", "audit")
    return f"{table(header, rows)}\n\n{note}\n"


def demo() -> str:
    """The demo's data sets from the smallest β to the largest."""
    result = demo_result()
    rows = []
    for problem in result.problems:
        diversity, member, bias = (
            demo_page.means_over_seeds(result, problem.name, name) for name in ("diversity", "member", "bias")
        )
        change = re.search(r"error (rose|fell) by (\d+)%", demo_page.finding(result, problem.name))
        sign = "" if change is None else {"rose": "+", "fell": "−"}[change[1]]
        rows.append(
            [
                f"{problem.data}, {problem.pool_name}",
                *(f"× {values[-1] / values[0]:.3g}" for values in (diversity, member)),
                f"no change that {len(result.settings.seeds)} seeds can tell"
                if change is None
                else f"{sign} {change[2]} %",
                f"{significant(bias[0])} % → {significant(bias[-1])} %",
            ]
        )
    header = ("data, what is averaged", "diversity", "members' own error", "ensemble's error", "diversity that is bias")
    made = result.made
    note = f"*{made['machine']}, torch {made['torch']}, dissensus {made['version']}; `{made['command']}`*"
    return f"{table(header, rows)}\n\n{note}\n"


def values() -> dict[str, str]:
    """The numbers of the page's sentences."""
    cnns = study("collusion/figure-15.paper").points
    best = {
        count: min((p for p in cnns if p.value("members") == count), key=lambda point: mean(point, "error"))
        for count in (5, 10)
    }
    alone, jointly = (
        [100 * mean(p, "member_accuracy") for p in cnns if p.value("beta") == beta] for beta in (0.0, 1.0)
    )
    units = benchmark("collusion_cifar10")["units"]
    accuracy = {
        beta: fmean(unit["test"]["accuracy"] for unit in units if unit["made"]["beta"] == beta) for beta in (0.0, 1.0)
    }
    return {
        "best-five": f"{best[5].value('beta'):g}",
        "best-ten": f"{best[10].value('beta'):g}",
        "joint-members": span(jointly),
        "alone-members": span(alone),
        "converged-points": rounded(accuracy[0.0] - accuracy[1.0], 1),
    }


TABLES = {"printed": printed, "demo": demo, "uci": uci, "networks": networks, "converged": converged}
