"""Table of docs/masks.md."""

from layout import mean, study, study_note, table


def methods() -> str:
    """Masksembles beside the methods that they are compared with."""
    summary = study("masksembles/figure-2.laptop")
    rows = [
        [
            point.data,
            point.value("method"),
            *(f"{100 * mean(point, name):.1f} %" for name in ("accuracy", "member_accuracy")),
            f"{mean(point, 'normalised_disagreement'):.2f}",
            f"{100 * mean(point, 'ece'):.1f} %",
            f"{-mean(point, 'nll'):.3f}",
        ]
        for point in summary.points
    ]
    header = (
        "data",
        "method",
        "accuracy",
        "members' accuracy",
        "diversity (eq. 7)",
        "calibration error",
        "likelihood",
    )
    return f"{table(header, rows)}\n\n{study_note(summary)}\n"


TABLES = {"methods": methods}
