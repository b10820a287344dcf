"""Numbers of docs/training.md."""

from layout import benchmark, span


def values() -> dict[str, str]:
    """The numbers of the page's sentences: what a twin costs."""
    times = {row["case"]: row["times_alone"] for row in benchmark("twin")["rows"]}
    sweeps = [f"{times[case]['sweep']:.1f}" for case in ("5 MLPs", "20 MLPs", "5 CNNs")]
    return {
        "twin-mlps": span((times[case]["twin"] for case in ("5 MLPs", "20 MLPs")), ".1f"),
        "twin-cnns": f"{times['5 CNNs']['twin']:.1f}",
        "twin-sweeps": f"{', '.join(sweeps[:-1])} and {sweeps[-1]}",
    }
