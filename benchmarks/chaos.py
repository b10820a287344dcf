"""Attempts to break dissensus: kills, second writers, damage, full disks, strangers, mistakes.

Usage: python benchmarks/chaos.py COMMAND [--count 10] [--seconds 600] [--seed 0] [--device cpu] [--only WORD]
       python benchmarks/chaos.py all --count 10
       python benchmarks/chaos.py summary
       python benchmarks/chaos.py merge --json FILE        (adds the runs of another machine's file to the results)

Each command makes ``--count`` attempts of each of its cases and starts none after ``--seconds``. It writes after every
attempt how often the promise of the case held, and how failures looked. Attempts are drawn from ``--seed``. They use
public functions, the command line and files on disk only.
"""

import argparse
import sys
from pathlib import Path

from attempts import children, study_runs
from attempts.cases import Settings, machine, read, run, write_runs
from attempts.table import COMMANDS, GPU_COMMANDS

FEW = 2
"""Attempts up to which it does not pay to import everything beforehand."""
RESULTS = Path(__file__).parent / "results" / "chaos.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["all", "summary", "merge", *COMMANDS])
    parser.add_argument("--count", type=int, default=10, help="attempts of each case")
    parser.add_argument("--seconds", type=float, default=600.0, help="time after which a command starts no attempt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", action="append", default=[], help="only cases with this word in their names")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where results are written")
    options = parser.parse_args()
    if options.command == "summary":
        summary(options.json)
        return
    if options.command == "merge":
        write_runs(RESULTS, {**read(RESULTS), **read(options.json)})
        return
    names = [name for name in COMMANDS if name not in GPU_COMMANDS] if options.command == "all" else [options.command]
    if options.count > FEW or options.device == "cuda" or len(names) > 1:
        study_runs.preload()
    failed = 0
    for name in names:
        device = "cuda" if name in GPU_COMMANDS else options.device
        settings = Settings(
            name, options.count, options.seconds, options.seed, device, options.json, tuple(options.only)
        )
        rows = run(COMMANDS[name](settings), settings, children.call(machine, device).value)
        for row in rows:
            print(f"{name}: {row.case}: {row.held} of {row.attempts} held", flush=True)
        failed += sum(row.attempts - row.held for row in rows)
    sys.exit(1 if failed else 0)


def summary(file: Path) -> None:
    """Print all results as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("command", "case", "held", "of", "first failure")
    for name, result in read(file).items():
        for row in result["rows"]:
            colour = "green" if row["held"] == row["attempts"] else "red"
            failure = row["failures"][0] if row["failures"] else ""
            held = f"[{colour}]{row['held']}[/{colour}]"
            table.add_row(name, row["case"], held, str(row["attempts"]), failure.replace("[", "\\["))
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()
