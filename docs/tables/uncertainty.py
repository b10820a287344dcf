"""The numbers of docs/uncertainty.md: those of the picture of intervals."""

from layout import benchmark, rounded, span


def values() -> dict[str, str]:
    """The numbers of the page's sentences."""
    equal, fitted = benchmark("intervals")["rows"]
    return {
        "interval-coverage": span(100 * row["coverage"] for row in (equal, fitted)),
        "interval-narrower": rounded(1 - fitted["width"] / equal["width"]),
    }
