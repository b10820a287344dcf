"""Tables of docs/detection.md."""

import sys

from layout import audit_counts, benchmark, has_study, mean, percent, study, study_note, table

SETS = ("corrupted-1", "corrupted-2", "corrupted-3", "corrupted-4", "corrupted-5", "unseen", "mnist", "fashion-mnist")


def scores_by_method() -> str:
    """Every method with two scores on every set: areas under the ROC curve, in per cent, with standard errors."""
    summaries = [study(name) for name in ("ldr/table-2.gpu", "ldr/table-2.laptop") if has_study(name)]
    rows = []
    for point in (point for summary in summaries for point in summary.points):
        method = point.value("method")
        areas = {
            label: [percent(point.measures.get(f"auroc_{score}_{name}")) for name in SETS]
            for score, label in (("model_average", "BMA"), ("predictive_diversity", "PDS"))
        }
        shares = [percent(point.measures[name]) for name in ("accuracy", "member_accuracy")]
        rows.append([point.data, method, "BMA", *areas["BMA"], *shares, audit_counts(point)])
        if method != "single":  # one member's probabilities sum to one: PDS is the same for every example
            rows.append(["", "", "PDS", *areas["PDS"], "", "", ""])
    header = ("data", "method", "score", *SETS, "accuracy", "members", "the audit says")
    return f"{table(header, rows)}\n\n{study_note(*summaries)}\n"


def strengths_of_ldr() -> str:
    """LDR at every strength: accuracy of members and ensemble, detection, and the audit's verdicts."""
    summaries = [study(name) for name in ("audit/figure-1.paper", "audit/figure-1.laptop") if has_study(name)]
    rows = []
    for point in (point for summary in summaries for point in summary.points):
        shares = [percent(point.measures[name]) for name in ("accuracy", "member_accuracy", "worst_member_accuracy")]
        areas = [
            percent(point.measures.get(f"auroc_predictive_diversity_{name}")) for name in ("corrupted-5", "unseen")
        ]
        settings = [point.data, str(point.value("sampled")), f"{point.value('strength'):g}"]
        distinct = f"{mean(point, 'distinct_predictions'):.2f}"
        rows.append([*settings, *shares, distinct, *areas, audit_counts(point)])
    header = (
        "data",
        "members drawn",
        "λ",
        "accuracy",
        "members",
        "worst member",
        "distinct classes of 5",
        "PDS, corrupted-5",
        "PDS, unseen",
        "the audit says",
    )
    return f"{table(header, rows)}\n\n{study_note(*summaries)}\n"


TABLES = {"ood": scores_by_method, "audited": strengths_of_ldr}


def values() -> dict[str, str]:
    """The numbers of the page's sentences."""
    (heads,) = [
        row for row in benchmark("heads")["rows"] if row["members"] == row["drawn"] == 50 and "without" not in row
    ]
    return {
        "heads": f"{heads['seconds_per_epoch']:.0f}",
        "features-from": _tipping("audit/figure-1.paper"),
        "cnn-from": _tipping("audit/figure-1.laptop"),
    }


def _tipping(name: str) -> str:
    """The largest λ up to which no ensemble is called collusive, and the smallest from which all are."""
    by_strength: dict[float, set[str]] = {}
    for point in study(name).points:
        by_strength.setdefault(point.value("strength"), set()).update(point.audit_verdicts or ())
    strengths = sorted(by_strength)
    all_collusive = [strength for strength in strengths if by_strength[strength] == {"collusive"}]
    some_collusive = [strength for strength in strengths if "collusive" in by_strength[strength]]
    if not all_collusive or some_collusive[0] == strengths[0]:
        sys.exit(f"docs/detection.md: in {name} no λ divides sound ensembles from collusive ones; write the page anew")
    sound = max(strength for strength in strengths if strength < some_collusive[0])
    return f"λ = {sound:g} and λ = {all_collusive[0]:g}"
