"""Table of docs/masks.md."""

from layout import benchmark, mean, study, study_note, table


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


def values() -> dict[str, str]:
    """The numbers of the page's sentences."""
    rows = benchmark("masks")["generation"]
    widest = max(row["width"] for row in rows)
    return {
        "widest": f"{widest:,}",
        "widest-ms": f"{max(row['ours_ms'] for row in rows if row['width'] == widest):.1f}",
    }
