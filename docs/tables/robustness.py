"""Tables of docs/robustness.md: the ADP paper's numbers beside ours."""

from collections.abc import Mapping, Sequence
from functools import partial

from layout import (
    attack_label,
    audit_counts,
    expectations,
    has_study,
    is_worst_case,
    mean,
    no_result,
    percent,
    point_at,
    points_by_data,
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
