"""Tables of docs/audit.md."""

from collections import Counter
from collections.abc import Iterable
from statistics import fmean
from typing import Any, NamedTuple

from layout import benchmark, benchmark_note, in_words, rounded, span, study, table

from dissensus.pages.parts import counted

EVIDENCE = {"alone": "test outputs alone", "train": "with training outputs", "reference": "with a reference"}


def confusion() -> str:
    """Verdicts on ensembles whose truth is known, over all data sets, members and seeds, by evidence."""
    summary = study("audit/table-1.paper")
    cases: dict[str, dict[str, Counter[str]]] = {}
    for point in summary.points:
        if point.value("members"):  # a point without a number of members sums up several cases
            case = cases.setdefault(point.value("case"), {by: Counter() for by in EVIDENCE})
            for by, counts in (point.verdict_counts or {}).items():
                case[by].update(counts)
    rows = [
        [
            name,
            str(case["alone"].total()),
            *(", ".join(f"{count} {verdict}" for verdict, count in case[by].most_common()) for by in EVIDENCE),
        ]
        for name, case in cases.items()
    ]
    data = ", ".join(dict.fromkeys(point.data for point in summary.points))
    made = summary.provenance
    seeds = counted(len(made.seeds), "seed")
    note = f"*{data}; {seeds}; dissensus {made.version}, {made.hardware}, {made.seconds / 60:.1f} minutes*"
    return f"{table(('how it was made', 'ensembles', *EVIDENCE.values()), rows)}\n\n{note}\n"


class Accused(NamedTuple):
    """Ensembles, and how many of them were called collusive."""

    judged: int
    accused: int


def accused_at_first(evidence: str, *kinds: str) -> Accused:
    """How often ensembles of these truths or cases were accused by some evidence, before the rules were changed."""
    rows = benchmark("audit_judged_first")["rows"]
    entries = [entry for entry in rows if entry["truth"] in kinds or entry["case"] in kinds]
    return Accused(
        sum(entry["ensembles"] for entry in entries),
        sum(entry["said"][evidence].get("collusive", 0) for entry in entries),
    )


def printed() -> str:
    """What the command prints of the page's example, shortened."""
    result = benchmark("audit_example")
    panel = result["printed"][: next(i for i, line in enumerate(result["printed"]) if line.startswith("╰"))]
    shown = [line for line in panel if not line.startswith("│ Confidence")]
    return "\n".join(["```console", f"$ {' '.join(result['command'])}", *shown[:7], "  ...", "```\n"])


def first_judgement() -> str:
    """How often sound ensembles were accused and others caught, before the rules were changed."""
    result = benchmark("audit_judged_first")
    kinds = {
        "sound": "called collusive",
        "unskilled": "called healthy",
        "networks jointly": "called collusive",
        "constant biases, 1 times": "called collusive",
    }
    rows = []
    for kind, words in kinds.items():
        truths = ("sound", "alike") if kind == "sound" else (kind,)
        entries = [entry for entry in result["rows"] if entry["truth"] in truths or entry["case"] == kind]
        verdict = words.split()[-1]
        counts = [sum(entry["said"][by].get(verdict, 0) for entry in entries) for by in EVIDENCE]
        total = sum(entry["ensembles"] for entry in entries)
        rows.append([f"{total:,} {kind}", words, *map(str, counts)])
    header = ("ensembles", "", *EVIDENCE.values())
    return f"{table(header, rows)}\n\n{benchmark_note(result)}\n"


def sizes() -> str:
    """Verdicts by the number of examples, and by the number of members."""
    result = benchmark("audit_sizes")
    header = (
        "",
        "sound ensembles",
        "called collusive",
        "called redundant or dominated",
        "undecided",
        "collusive",
        *EVIDENCE.values(),
    )
    groups = {f"{n:,} examples": [] for n in sorted({entry["examples"] for entry in result["rows"]})}
    groups |= {f"{m} members": [] for m in sorted({entry["members"] for entry in result["rows"]})}
    for entry in result["rows"]:
        groups[f"{entry['examples']:,} examples"].append(entry)
        groups[f"{entry['members']} members"].append(entry)
    rows = [[name, *_sound_counts(entries), *_caught_counts(entries)] for name, entries in groups.items()]
    return f"{table(header, rows)}\n\n{benchmark_note(result)}\n"


def _sound_counts(entries: list[dict[str, Any]]) -> list[str]:
    """Sound ensembles, and how many of them each wrong verdict has; the evidence with the most counts."""
    sound = [entry["outcomes"] for entry in entries if entry["truth"] == "sound"]
    number = sum(sum(outcomes["alone"].values()) for outcomes in sound)

    def most(*keys: str) -> str:
        return str(max(sum(outcomes[by].get(key, 0) for outcomes in sound for key in keys) for by in EVIDENCE))

    return [f"{number:,}", most("wrong: collusive"), most("wrong: redundant", "wrong: dominated"), most("undecided")]


def _caught_counts(entries: list[dict[str, Any]]) -> list[str]:
    """Collusive ensembles, and the share whose verdict is right by each evidence."""
    collusive = [entry["outcomes"] for entry in entries if entry["truth"] == "collusive"]
    number = sum(sum(outcomes["alone"].values()) for outcomes in collusive)
    right = [sum(outcomes[by].get("right", 0) for outcomes in collusive) for by in EVIDENCE]
    return [str(number), *(f"{count / number:.0%}" if number else "" for count in right)]


def rotation_size() -> str:
    """How often the rotation test's p-value lies below a level for independent members, by kind and dimensions."""
    result = benchmark("audit_size")
    rows = []
    for kind in dict.fromkeys(entry["kind"] for entry in result["rows"]):
        entries = [entry for entry in result["rows"] if entry["kind"] == kind]
        members, dimensions = ({entry[name] for entry in entries} for name in ("members", "dimensions"))
        spans = [
            f"{min(entry['below'][level] for entry in entries):.5f} to "
            f"{max(entry['below'][level] for entry in entries):.5f}"
            for level in ("0.05", "0.001", "0.0002")
        ]
        sizes = [f"{min(members)} to {max(members)}", f"{min(dimensions)} to {max(dimensions):,}"]
        rows.append([kind, *sizes, *spans])
    header = ("errors", "members", "dimensions", "below 0.05", "below 0.001", "below 0.0002")
    return f"{table(header, rows)}\n\n{benchmark_note(result)}\n"


def coverage() -> str:
    """How often intervals shares the truth: the mean over figures, and the lowest figure."""
    result = benchmark("audit_coverage")
    rows = []
    for entry in result["rows"]:
        shares = entry["held"]
        worst = min(shares, key=shares.__getitem__)
        numbers = [str(entry["members"]), f"{entry['examples']:,}", f"{fmean(shares.values()):.3f}"]
        rows.append([entry["task"], *numbers, f"{shares[worst]:.2f} ({worst})"])
    header = ("task", "members", "examples", "held, mean over figures", "lowest")
    return f"{table(header, rows)}\n\n{benchmark_note(result)}\n"


TABLES = {
    "printed": printed,
    "audit": confusion,
    "first": first_judgement,
    "sizes": sizes,
    "size": rotation_size,
    "coverage": coverage,
}


def values() -> dict[str, str]:
    """The numbers of the page's sentences."""
    example, sizes_of = benchmark("audit_example")["joint"], benchmark("audit_sizes")["rows"]
    joint = [unit["audit"] for unit in benchmark("collusion_cifar10")["units"] if unit["made"]["beta"] == 1]
    return {
        "example-accuracy": rounded(example["accuracy"]),
        "example-members": rounded(example["member_accuracy"]),
        "sizes-examples": span((row["examples"] for row in sizes_of), ",.0f"),
        "sizes-members": span(row["members"] for row in sizes_of),
        **_accused_values(),
        "joint-seeds": in_words(len(joint)),
        "joint-alone": _verdicts(audits["alone"] for audits in joint),
        "joint-train": _verdicts(audits["with training outputs"] for audits in joint),
        "joint-reference": _verdicts(audits["with a reference"] for audits in joint),
    }


def _accused_values() -> dict[str, str]:
    """Sound ensembles that the first judgement called collusive: by every evidence, and by some evidence only."""
    rows = [row for row in benchmark("audit_judged_first")["rows"] if row["truth"] in ("sound", "alike")]
    always, only = Counter[str](), {by: Counter[str]() for by in EVIDENCE}
    for row in rows:
        counts = {by: row["said"][by].get("collusive", 0) for by in EVIDENCE}
        always[row["case"]] += min(counts.values())
        for by, count in counts.items():
            only[by][row["case"]] += count - min(counts.values())
    return {
        "accused-always": _listed(always),
        **{f"accused-{by}": _listed(cases) for by, cases in only.items()},
    }


def _listed(cases: Counter[str]) -> str:
    """Counts by how ensembles were made: ``6 of "families of models"``."""
    return ", ".join(f'{count} of "{case}"' for case, count in cases.most_common() if count) or "none"


def _verdicts(audits: Iterable[dict[str, Any]]) -> str:
    return " or ".join(dict.fromkeys(f"`{audit['verdict']}`" for audit in audits))
