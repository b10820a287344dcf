"""Tables of docs/robustness.md: the ADP paper's numbers beside ours."""

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from layout import (
    attack_label,
    audit_counts,
    benchmark,
    expectations,
    has_study,
    in_words,
    is_worst_case,
    mean,
    no_result,
    percent,
    point_at,
    points_by_data,
    rounded,
    span,
    study,
    study_note,
    table,
)

from dissensus.studies.labels import ATTACKS
from dissensus.studies.results import Point

METHODS = {"baseline": "plain", "adp-2-0": "ADP(2, 0)", "adp-2-0.5": "ADP(2, 0.5)"}
TRAINED_AGAINST = {"none": "nothing", "fgsm": "FGSM", "pgd": "PGD"}
SCORES = {
    "nonmaximal_volume": "ED",
    "predictive_diversity": "PDS",
    "probability_variance": "variance",
    "model_average": "BMA",
    "mean_energy": "energy",
    "mean_entropy": "members' entropy",
}


def paper_numbers(name: str) -> dict[tuple[str, str, str], float]:
    """The paper's numbers in a study by data, method and measure."""
    return {
        (data, entry["at"]["method"], entry["measure"]): entry["paper"]
        for entry in expectations(name)
        if "paper" in entry
        for data in entry["data"]
    }


def errors() -> str:
    """Table 1 of the ADP paper beside ours, with the diversity of members' predictions and features."""
    summary, paper = study("adp/table-1.gpu"), paper_numbers("adp/table-1")
    volumes, features = (study(f"adp/figure-{number}.gpu") for number in (5, 2))
    rows = []
    for point in summary.points:
        data, method = point.data, point.value("method")
        cells = [data, METHODS[method]]
        for measure in ("error_rate", "worst_member_error_rate"):
            cells += [_error(paper.get((data, method, measure))), _error(mean(point, measure))]
        cells.append(_error(mean(point, "member_error_rate")))
        for other, measure, form in (
            (volumes, "log_nonmaximal_volume", "#.2g"),
            (features, "features_similarity", ".2f"),
        ):
            is_known = data in points_by_data(other)
            cells.append(f"{mean(point_at(other, data=data, method=method), measure):{form}}" if is_known else "")
        rows.append([*cells, audit_counts(point)])
    header = (
        "data",
        "training",
        "ensemble's error, paper",
        "ours",
        "worst member's, paper",
        "ours",
        "members', ours",
        "median log ED",
        "features alike (CKA)",
        "the audit says",
    )
    return f"{table(header, rows)}\n\n{study_note(summary, volumes, features)}\n"


def _error(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


def detection() -> str:
    """How well scores tell examples that an attack has changed from the originals."""
    summary = study("adp/figure-4.gpu")
    attacks = [name.removeprefix("fooled_") for name in summary.points[0].measures if name.startswith("fooled_")]
    tables = []
    for data, points in points_by_data(summary).items():
        rows = []
        for point in points:
            turned = [percent(point.measures[f"fooled_{name}"]) for name in attacks]
            rows.append([METHODS[point.value("method")], "turned, %", *turned])
            for score, label in SCORES.items():
                rows.append(["", label, *(percent(point.measures[f"auroc_{score}_{name}"]) for name in attacks)])
        tables.append(table((data, "score", *(ATTACKS[name] for name in attacks)), rows))
    return "\n\n".join(tables) + f"\n\n{study_note(summary)}\n"


def under_attack(name: str) -> str:
    """Accuracy under attack by the paper's protocol, with its numbers in brackets, and in the worst case."""
    if not has_study(f"{name}.gpu"):
        return no_result(f"dissensus study run {name} --scale gpu --device cuda")
    summary, paper = study(f"{name}.gpu"), paper_numbers(name)
    tables = []
    for data, points in points_by_data(summary).items():
        by_method = {point.value("method"): point for point in points}
        methods = [method for method in METHODS if method in by_method]
        first = by_method[methods[0]]
        examples = first.examples or {}
        rows = []
        for measure in sorted(_measures(first), key=is_worst_case):
            numbers = {method: paper.get((data, method, measure)) for method in methods}
            cells = [_beside_paper(by_method[method], measure, number) for method, number in numbers.items()]
            images = f"{examples[measure]:,}" if measure in examples else "all"
            rows.append([attack_label(measure).replace(" ", "\N{NO-BREAK SPACE}"), images, *cells])
        tables.append(table((data, "images", *(METHODS[method] for method in methods)), rows))
    return "\n\n".join(tables) + f"\n\n{study_note(summary)}\n"


def _measures(point: Point) -> Sequence[str]:
    """Accuracy without an attack, and all measures under attack."""
    return [name for name in point.measures if name == "accuracy" or name in (point.examples or {})]


def _beside_paper(point: Point, measure: str, paper: float | None) -> str:
    ours = percent(point.measures[measure])
    return ours if paper is None else f"{ours} ({100 * paper:.1f})"


def hardened() -> str:
    """Table 4 of the ADP paper: ensembles trained against attacks, with the paper's numbers in brackets."""
    if not has_study("adp/table-4.gpu"):
        return no_result("dissensus study run adp/table-4 --scale gpu --device cuda")
    summary = study("adp/table-4.gpu")
    paper: Mapping[tuple[str, str, str], float] = {
        (entry["at"]["adversarial"], entry["at"]["method"], entry["measure"]): entry["paper"]
        for entry in expectations("adp/table-4")
        if "paper" in entry
    }
    measures = sorted(_measures(summary.points[0]), key=lambda name: name != "accuracy" and not is_worst_case(name))
    rows = []
    for point in summary.points:
        against, method = point.value("adversarial"), point.value("method")
        cells = [_beside_paper(point, measure, paper.get((against, method, measure))) for measure in measures]
        audits = ", ".join(point.audit_verdicts or {})
        rows.append([TRAINED_AGAINST[against], METHODS.get(method, "Masksembles"), *cells, audits])
    labels = [attack_label(measure).replace("**worst case**, ", "").split(",")[0] for measure in measures]
    header = ("trained against", "ensemble", *labels, "the audit says")
    return f"{table(header, rows)}\n\n{study_note(summary)}\n"


TABLES = {
    "adp-errors": errors,
    "adp-attacks": partial(under_attack, "adp/table-2"),
    "adp-five": partial(under_attack, "adp/table-5"),
    "adp-hardened": hardened,
    "adp-detection": detection,
}

PLAIN, ENTROPY, ADP, MASKS = "baseline", "adp-2-0", "adp-2-0.5", "masksembles"
DATA = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
SHORT = ("bim", "pgd", "mim")
"""Attacks of ten steps."""
Shares = Mapping[tuple[str, ...], float]


def values() -> dict[str, str]:
    """The numbers of the page's sentences."""
    return {
        **_flag_values(),
        **_error_values(),
        **_transfer_values(),
        **_attack_values(),
        **_five_values(),
        **_hardened_values(),
        **_detection_values(),
    }


def shares(name: str) -> Shares:
    """Means of a study's measures, by data, other axes and measure."""
    return {
        (point.data, *point.axes.values(), measure): estimate.mean
        for point in study(name).points
        for measure, estimate in point.measures.items()
        if estimate.mean is not None
    }


def _points(values: Iterable[float], form: str = ".0f") -> str:
    """The range of some shares in per cent."""
    return span((100 * value for value in values), form)


def _at_least(values: Iterable[float]) -> str:
    """The smallest of some shares in whole per cent, rounded down."""
    return str(math.floor(100 * min(values)))


def _percent(values: Iterable[float], digits: int = 0) -> str:
    """Shares in per cent, one after the other: ``27, 12 and 16``."""
    *first, last = (rounded(value, digits) for value in values)
    return f"{', '.join(first)} and {last}"


def _flag_values() -> dict[str, str]:
    """Of the benchmark on the flag "saturated loss"."""
    rows = benchmark("flags")["rows"]
    ordinary, hidden = ([row for row in rows if (row["factor"] == 1) is wanted] for wanted in (True, False))
    return {
        "networks": in_words(len(ordinary)).capitalize(),
        "zero-loss": _points(row["saturated"] for row in ordinary),
        "suite-gap": rounded(max(abs(row["suite"] - row["truth"]) for row in ordinary), 1),
        "loss-gap": rounded(max(abs(row["cross_entropy"] - row["truth"]) for row in ordinary), 1),
        "raised-ordinary": f"{sum(row['raised'] for row in ordinary)} of {len(ordinary)}",
        "hidden-gap": _points(row["cross_entropy"] - row["truth"] for row in hidden),
        "raised-hidden": f"{sum(row['raised_quick'] for row in hidden)} of {len(hidden)}",
    }


def _error_values() -> dict[str, str]:
    """What the audit's reasons say of correlations, and of what pooling takes off."""
    numbers = {}
    for data, points in points_by_data(study("adp/table-1.gpu")).items():
        reasons = {point.value("method"): " ".join(point.audit_reasons or ()) for point in points}
        correlations = {method: _found(r"correlation (-?[\d.]+)", text) for method, text in reasons.items()}
        pooled = [_found(r"pooling takes (\d+)%", text) for text in reasons.values()]
        numbers |= {
            f"correlation-{data}": correlations[PLAIN],
            f"correlation-{data}-adp": f"{correlations[ENTROPY]} and {correlations[ADP]}",
            f"pooled-{data}": f"{', '.join(pooled[:-1])} and {pooled[-1]}",
        }
    return numbers


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        sys.exit(f"docs/robustness.md: the audit does not say {pattern!r} any more, but {text!r}; write the page anew")
    return match[1]


def _transfer_values() -> dict[str, str]:
    left = shares("adp/figure-3.gpu")
    own: dict[str, list[float]] = {}
    for point in study("adp/figure-3.gpu").points:
        if point.data == "mnist":
            matrix = (point.matrices or {})["pgd_0.15"][:-1]  # the last row is the whole ensemble
            own[point.value("method")] = [value for i, row in enumerate(matrix) if (value := row[i]) is not None]
    return {
        "transfer-cifar10": rounded(left["cifar10", PLAIN, "transfer_pgd_0.05"]),
        "transfer-cifar10-adp": rounded(left["cifar10", ADP, "transfer_pgd_0.05"]),
        "transfer-mnist": rounded(left["mnist", PLAIN, "transfer_pgd_0.15"]),
        "transfer-mnist-adp": rounded(left["mnist", ADP, "transfer_pgd_0.15"]),
        "own-mnist-adp": _points(own[ADP]),
        "own-mnist": rounded(max(own[PLAIN])),
    }


def _agreeing(name: str, data: str) -> str:
    """How many of the paper's numbers lie within the tolerances of the study's file."""
    ours = shares(f"{name}.gpu")
    gaps = [
        abs(ours[data, entry["at"]["method"], entry["measure"]] - entry["paper"]) <= entry["tolerance"]
        for entry in expectations(name)
        if "paper" in entry and data in entry["data"] and (data, entry["at"]["method"], entry["measure"]) in ours
    ]
    return f"{sum(gaps)} of {len(gaps)}"


def _attack_values() -> dict[str, str]:
    """Of three members under attack, beside the paper's numbers."""
    ours, paper = shares("adp/table-2.gpu"), paper_numbers("adp/table-2")
    c10 = {(method, measure): share for (data, method, measure), share in ours.items() if data == "cifar10"}
    mnist = {(method, measure): share for (data, method, measure), share in ours.items() if data == "mnist"}
    suites = [f"{suite}_0.1" for suite in ("standard", "adaptive")]
    short = [f"accuracy_{attack}_0.01" for attack in SHORT]
    flagged = {
        f"{METHODS[point.value('method')]} on {DATA[point.data]}": dict.fromkeys(
            name for names in point.flags.values() for name in names
        )
        for point in study("adp/table-2.gpu").points
        if point.flags and any(point.flags.values())
    }
    gained = [c10[ADP, f"{suite}_0.01"] - c10[PLAIN, f"{suite}_0.01"] for suite in ("standard", "adaptive")]
    jsma_gaps = [
        abs(left[ADP, name] - left[ENTROPY, name])
        for left in (c10, mnist)
        for name in dict.fromkeys(name for _, name in left if "jsma" in name)
    ]
    return {
        "agree-cifar10": _agreeing("adp/table-2", "cifar10"),
        "agree-mnist": _agreeing("adp/table-2", "mnist"),
        "pgd-adp": rounded(c10[ADP, "accuracy_pgd_0.01"]),
        "pgd-plain": rounded(c10[PLAIN, "accuracy_pgd_0.01"]),
        "apgd-adp": rounded(c10[ADP, "accuracy_apgd_0.01"]),
        "standard-adp": rounded(c10[ADP, "standard_0.01"], 1),
        "standard-plain": rounded(c10[PLAIN, "standard_0.01"], 1),
        "adaptive-adp": rounded(c10[ADP, "adaptive_0.01"], 1),
        "adaptive-plain": rounded(c10[PLAIN, "adaptive_0.01"], 1),
        "worst-gained": _points(gained, ".1f"),
        "short-gained": _points(c10[ADP, name] - c10[PLAIN, name] for name in short),
        "pgd-mnist-adp": rounded(mnist[ADP, "accuracy_pgd_0.1"]),
        "worst-mnist-adp": _points(mnist[ADP, suite] for suite in suites),
        "worst-mnist-plain": _points(mnist[PLAIN, suite] for suite in suites),
        "cw-mnist": _percent(mnist[method, "accuracy_carlini_wagner_10.0"] for method in (ADP, ENTROPY)),
        "jsma-volume": rounded(max(jsma_gaps)),
        "flagged": in_words(len(flagged)),
        "flagged-of": in_words(len(study("adp/table-2.gpu").points)),
        "flags": "; ".join(f"{title} ({', '.join(names)})" for title, names in flagged.items()),
        "fgsm-mnist-plain": rounded(mnist[PLAIN, "accuracy_fgsm_0.1"]),
        "fgsm-mnist-paper": rounded(paper["mnist", PLAIN, "accuracy_fgsm_0.1"]),
        "pgd-15-mnist-adp": _points(mnist[method, "accuracy_pgd_0.15"] for method in (ENTROPY, ADP)),
        "pgd-15-mnist-paper": _points(paper["mnist", method, "accuracy_pgd_0.15"] for method in (ENTROPY, ADP)),
        "pgd-mnist-paper": rounded(paper["mnist", ADP, "accuracy_pgd_0.1"]),
        "jsma-mnist-adp": _percent(mnist[method, "accuracy_jsma_0.6"] for method in (ENTROPY, ADP)),
        "jsma-mnist-plain": rounded(mnist[PLAIN, "accuracy_jsma_0.6"]),
        "ead-plain": rounded(c10[PLAIN, "accuracy_elastic_net_1.0"]),
        "ead-paper": rounded(paper["cifar10", PLAIN, "accuracy_elastic_net_1.0"]),
        "pgd-adp-paper": rounded(paper["cifar10", ADP, "accuracy_pgd_0.01"]),
        "pgd-plain-paper": rounded(paper["cifar10", PLAIN, "accuracy_pgd_0.01"]),
    }


def _five_values() -> dict[str, str]:
    """Of five members under attack, beside three."""
    three, five = shares("adp/table-2.gpu"), shares("adp/table-5.gpu")
    paper = paper_numbers("adp/table-5")
    pgd, ead = "accuracy_pgd_0.01", "accuracy_elastic_net_1.0"
    suites = [f"{suite}_0.01" for suite in ("standard", "adaptive")]
    return {
        "agree-five": _agreeing("adp/table-5", "cifar10"),
        "five-ead": rounded(five["cifar10", PLAIN, ead]),
        "five-ead-paper": rounded(paper["cifar10", PLAIN, ead]),
        "five-pgd": _percent(left["cifar10", PLAIN, pgd] for left in (five, three)),
        "five-gained": rounded(five["cifar10", ADP, pgd] - five["cifar10", PLAIN, pgd]),
        "three-gained": rounded(three["cifar10", ADP, pgd] - three["cifar10", PLAIN, pgd]),
        "five-worst-adp": _percent(five["cifar10", ADP, suite] for suite in suites),
        "five-worst-plain": _percent(five["cifar10", PLAIN, suite] for suite in suites),
        "five-audit": _audits("adp/table-5.gpu"),
    }


def _audits(name: str) -> str:
    """All verdicts of the audit on a study's ensembles."""
    return " or ".join(dict.fromkeys(verdict for point in study(name).points for verdict in point.audit_verdicts or {}))


def _hardened_values() -> dict[str, str]:
    """Of ensembles that are trained against attacks, and Masksembles."""
    left = {key[1:]: share for key, share in shares("adp/table-4.gpu").items()}
    against, methods, suites = ("fgsm", "pgd"), (PLAIN, ADP), ("standard_0.02", "adaptive_0.02")
    paper = {
        (entry["at"]["adversarial"], entry["at"]["method"], entry["measure"]): entry["paper"]
        for entry in expectations("adp/table-4")
        if "paper" in entry
    }
    short = [f"accuracy_{attack}_0.02" for attack in SHORT]
    share, images = left["fgsm", PLAIN, suites[0]], (study("adp/table-4.gpu").points[0].examples or {})[suites[0]]
    kept = [left[a, m, "standard_0.02"] / left[a, m, "accuracy"] for a in against for m in (*methods, MASKS)]
    broken = [
        round(images * (left[a, m, suites[0]] - left[a, m, suites[1]])) for a in against for m in (*methods, MASKS)
    ]
    ahead = [paper[a, ADP, name] - paper[a, PLAIN, name] for a, m, name in paper if m == ADP]
    untrained = point_at(study("adp/table-4.gpu"), adversarial="none", method=ADP)
    flags = sum(bool(names) for p in study("adp/table-4.gpu").points for names in (p.flags or {}).values())
    return {
        "hard-worst": _points(left[a, m, s] for a in against for m in methods for s in suites),
        "soft-worst": _points((left["none", m, s] for m in (*methods, MASKS) for s in suites), ".1f"),
        "hard-cost": _points(left["none", m, "accuracy"] - left[a, m, "accuracy"] for a in against for m in methods),
        "hard-more": in_words(max(broken)),
        "hard-flags": in_words(flags),
        "hard-fgsm": " % beside ".join(rounded(left["fgsm", m, suites[0]], 1) for m in (ADP, PLAIN)),
        "hard-pgd": " % beside ".join(rounded(left["pgd", m, suites[0]], 1) for m in (ADP, PLAIN)),
        "hard-images": f"{images}",
        "hard-noise": rounded(1.96 * math.sqrt(2 * share * (1 - share) / images)),
        "hard-paper-ahead": _points(ahead),
        "masks-worst": _percent(left[a, MASKS, suites[0]] for a in against),
        "masks-clean": _points(left[a, MASKS, "accuracy"] for a in against),
        "hard-clean": _points(left[a, m, "accuracy"] for a in against for m in methods),
        "hard-kept": _points(kept),
        "hard-short": _points(left[a, m, name] for a in against for m in methods for name in short),
        "hard-short-paper": _points(paper[a, m, name] for a in against for m in methods for name in short),
        "hard-large": _points(left[a, m, "accuracy_fgsm_0.04"] for a in against for m in methods),
        "hard-large-paper": _points(paper[a, m, "accuracy_fgsm_0.04"] for a in against for m in methods),
        "soft-times": _found(r"([\d.]+) times", " ".join(untrained.audit_reasons or ())),
        "bim-late": rounded(shares("adp/table-2.gpu")["cifar10", ADP, "accuracy_bim_0.02"]),
    }


def _detection_values() -> dict[str, str]:
    """Of scores that tell attacked examples from normal ones."""
    areas = shares("adp/figure-4.gpu")
    attacks = sorted({key[2].removeprefix("fooled_") for key in areas if key[2].startswith("fooled_")})
    four = ("nonmaximal_volume", "predictive_diversity", "probability_variance", "model_average")

    def all_areas(data: str, methods: Sequence[str], scores: Sequence[str]) -> list[float]:
        return [areas[data, m, f"auroc_{score}_{attack}"] for m in methods for score in scores for attack in attacks]

    return {
        "ed-cifar10": _points(all_areas("cifar10", [ADP], ["nonmaximal_volume"])),
        "four-mnist": _at_least(all_areas("mnist", [PLAIN, ENTROPY, ADP], four)),
        "four-mnist-adp": _at_least(all_areas("mnist", [ADP], four)),
        "ead-turned-adp": _points(areas["mnist", method, "fooled_elastic_net"] for method in (ENTROPY, ADP)),
        "ead-turned": rounded(areas["mnist", PLAIN, "fooled_elastic_net"]),
        "pgd-turned": _points(areas["mnist", method, "fooled_pgd"] for method in (PLAIN, ENTROPY, ADP)),
    }
