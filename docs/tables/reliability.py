"""Table of docs/reliability.md: attempts to break dissensus."""

from collections.abc import Mapping
from typing import Any

from layout import BENCHMARKS, benchmark, no_result, table

WORDS = {
    "kills": "trainings killed and resumed",
    "kills-sweep": "sweeps killed and resumed",
    "kills-study": "studies ended by signals",
    "loads": "loaded and resumed in memory",
    "leftovers": "bytes left by killed saves",
    "writers": "two processes at once",
    "tamper": "damaged and changed files",
    "disk": "full disk",
    "identity": "other trainings resumed",
    "specs": "mistakes in a study's file",
    "sets": "mistakes in `--set`",
    "commands": "mistakes in commands",
    "paths": "names, links, devices",
    "gpu-memory": "no memory left on a GPU",
    "gpu-error": "an error of a GPU",
    "gpu-two": "two trainings on one GPU",
}
"""Commands of the benchmark in words."""
Runs = Mapping[str, Mapping[str, Any]]


def counts() -> str:
    """Attempts and how often the promise held: before this was tested, and now."""
    before, now = _runs("chaos_before"), _runs("chaos")
    if not before and not now:
        return no_result("python benchmarks/chaos.py all")
    rows = [
        [_words(name), _held(before.get(name)), _held(now.get(name)), _failing(now.get(name) or before[name])]
        for name in [*now, *(name for name in before if name not in now)]
    ]
    header = ("attempts", "held before", "held now", "cases with failures in the last run")
    notes = "  \n".join(note for note in (_note("before", before), _note("now", now)) if note)
    return f"{table(header, rows)}\n\n{notes}\n"


def _runs(name: str) -> Runs:
    return benchmark(name)["runs"] if (BENCHMARKS / f"{name}.json").exists() else {}


def _words(name: str) -> str:
    command, _, device = name.partition(" ")
    return WORDS[command] + (", on a GPU" if device else "") + f" (`{command}`)"


def _held(run: Mapping[str, Any] | None) -> str:
    if run is None:
        return "–"
    held, attempts = (sum(row[key] for row in run["rows"]) for key in ("held", "attempts"))
    kills = sum(row["counts"].get("kills", 0) for row in run["rows"])
    return f"{held:,} of {attempts:,}" + (f", {kills:,} kills" if kills else "")


def _failing(run: Mapping[str, Any]) -> str:
    failing = [
        f"{row['case']} ({row['attempts'] - row['held']})" for row in run["rows"] if row["held"] < row["attempts"]
    ]
    return "; ".join(case.replace("|", "\\|") for case in failing[:SHOWN]) + ("; …" if len(failing) > SHOWN else "")


SHOWN = 4


def _note(when: str, runs: Runs) -> str:
    """Machines, versions and sources of a column."""
    made = [run["made"] for run in runs.values()]
    parts = [
        ", ".join(dict.fromkeys(f"{entry['hardware']}, torch {entry['torch']}" for entry in made)),
        "source " + ", ".join(dict.fromkeys(entry["source"] for entry in made)),
    ]
    return f"*{when}: {'; '.join(parts)}*" if made else ""


TABLES = {"counts": counts}
