"""The table and the numbers of docs/tuning.md: searches beside the full grid."""

from collections.abc import Mapping

from layout import BENCHMARKS, benchmark, benchmark_note, no_result, table


def words(point: Mapping[str, float]) -> str:
    """A point as a cell has it."""
    return ", ".join(f"{'β' if name == 'beta' else name} = {value:g}" for name, value in point.items())


def searches() -> str:
    """What searches choose and cost, beside training every candidate to the end."""
    if not (BENCHMARKS / "tuning.json").exists():
        return no_result("python benchmarks/tuning.py")
    result = benchmark("tuning")
    rows: list[list[str]] = []
    for row in result["rows"]:
        for factor, search in row["searches"].items():
            first = factor == next(iter(row["searches"]))
            same = [f"{row['set']}, {row['space']}, seed {row['seed']}", words(row["grid"]["best"])]
            rows.append(
                [
                    *(same if first else ["", ""]),
                    factor,
                    words(search["best"]),
                    f"{search['behind_on_validation']:+.2f}",
                    f"{search['behind_on_test_per_cent']:+.1f} %",
                    f"{search['share_of_epochs']:.2f}",
                ]
            )
    lines = []
    for factor in result["rows"][0]["searches"]:
        own = [row["searches"][factor] for row in result["rows"]]
        behind = [search["behind_on_validation"] for search in own]
        costs = {
            space: [row["searches"][factor]["share_of_epochs"] for row in result["rows"] if row["space"] == space]
            for space in dict.fromkeys(row["space"] for row in result["rows"])
        }
        spent = ", ".join(f"{sum(each) / len(each):.2f} for {space}" for space, each in costs.items())
        lines.append(
            f"- `factor={factor}`: {sum(value <= 0.5 for value in behind)} of {len(own)} choices are at most half a "
            f"standard error behind the grid's on validation rows (the worst {max(behind):.2f}), at this share of its "
            f"epochs: {spent}."
        )
    header = ("set", "the grid chooses", "factor", "the search chooses", "behind, errors", "on test", "cost")
    note = (
        "The choice of each search among the grid's results: how far behind the grid's choice it is on validation "
        "rows, in standard\nerrors over splits, and on test rows; and its epochs of runs as a share of the grid's. "
        "Negative numbers are better than the grid's\nchoice, which can be where a tie went the other way."
    )
    return "\n\n".join(["\n".join(lines), note, table(header, rows), benchmark_note(result)]) + "\n"


TABLES = {"tuning": searches}
