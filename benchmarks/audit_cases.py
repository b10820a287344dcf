"""Ensembles whose truth is known: made, kept in files, and shown to the audit.

Usage:
    python benchmarks/audit_cases.py make --sets design --seeds 0 1 --members 5 10 --out FOLDER [--jobs 2] [--cases C]
    python benchmarks/audit_cases.py judge FOLDER/*.npz [--jobs 2] [--json FILE]
    python benchmarks/audit_cases.py run --sets judged --seeds 50 51 --members 5 10 --jobs 16 --json FILE
    python benchmarks/audit_cases.py summary FILE [FILE ...] --json FILE

`make` writes one file per data set, case, seed and number of members. `judge` audits files in three ways: outputs on
test data alone, with those on training data, with those of a reference. `run` does both without files. A set is a data
set of the studies, or `design`, `judged` or `sizes`: those that rules are set on, those that they are judged on, and
drawn data of 20 to 10⁵ test rows with 2 to 100 members. Every row of `judge` and `run` records the command, the machine
and the versions that made it. `summary` counts the verdicts of such runs by the numbers of test rows and members, and
collects these records.

A file holds `outputs` [M, N, C], `targets`, `train_outputs`, `train_targets`, `reference` [M, N, C], `fitted_to` [M, K]
(which training rows each member was fitted to; without it: all), and `meta`, a JSON text with the allowed verdicts.
"""

import argparse
import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from provenance import how_made

from dissensus.storage import write_atomically
from dissensus.studies import audit_cases, library
from dissensus.studies.audit_cases import EVIDENCE, AuditedEnsemble, AuditUnit
from dissensus.studies.datasets import GROUPS
from dissensus.studies.procedures.audit import pool
from dissensus.studies.spec import Spec, resolved


def spec_of(args: argparse.Namespace) -> Spec:
    """The study of the library with these data sets, seeds and members."""
    data = [f"audit-{name}" if f"audit-{name}" in GROUPS else name for name in args.sets]
    changes = {
        "data": data,
        "grid.members": args.members,
        "grid.seed": args.seeds,
        "grid.case": args.cases or [audit_cases.EVERY],
    }
    changes |= {
        "optimisation.examples": args.train,
        "optimisation.epochs": args.epochs,
        "evaluation.examples": args.test,
    }
    return resolved(library.load("audit/table-1"), "paper", changes, "audit/table-1.toml")


def make_unit(spec: Spec, unit: AuditUnit, folder: Path) -> int:
    """Write the files of a unit; the number of them."""
    count = 0
    for case in audit_cases.made(spec, unit, audit_cases.cases_of(spec)):
        arrays, meta = audit_cases.as_arrays(unit, case)
        words = (unit.data, case.name, f"s{unit.seed}", f"m{unit.members}")
        name = "_".join(re.sub(r"[^\w=.+±-]+", "-", word) for word in words)
        hidden = folder / f".{name}.npz"
        content: Any = {**arrays, "meta": np.array(json.dumps(meta))}
        np.savez(hidden, **content)
        os.replace(hidden, folder / f"{name}.npz")
        count += 1
    return count


def audit_rows(spec: Spec, unit: AuditUnit) -> list[dict[str, Any]]:
    """A unit's ensembles, audited."""
    return [asdict(ensemble) for ensemble in audit_cases.audit_unit(spec, unit)]


def judge_file(path: Path) -> dict[str, Any]:
    """A file's row."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    meta = json.loads(str(arrays.pop("meta")))
    unit = AuditUnit("files", meta["data"], meta["seed"], meta["members"], first=True)
    return {
        **asdict(audit_cases.audit_case(unit, audit_cases.from_arrays(arrays, meta))),
        "facts": meta["facts"],
        "file": path.name,
    }


def in_parallel(jobs: int, work: Any, tasks: list[tuple[Any, ...]]) -> Iterator[Any]:
    """Results as they come; one thread for each process."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=audit_cases.one_thread) as pool:
        pending = {pool.submit(work, *task): task for task in tasks}
        for done, finished in enumerate(as_completed(pending), 1):
            try:
                yield finished.result()
            except Exception as reason:  # one that fails must not lose the others
                print(f"FAILED {pending[finished][-2:]}: {type(reason).__name__}: {reason}", flush=True)
            if done % 50 == 0 or done == len(tasks):
                print(f"{done} of {len(tasks)}", flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Verdicts by case and evidence; those that are not allowed are marked."""
    by_case: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_case[row["case"]].append(row)
    lines: list[str] = []
    totals: Counter[str] = Counter()
    for name in [name for name in audit_cases.CASES if name in by_case]:
        group = by_case[name]
        lines.append(f"{name} ({group[0]['truth']}, {len(group)} ensembles)")
        for by in EVIDENCE:
            said: Counter[tuple[str, str]] = Counter()
            for row in group:
                if by in row["verdicts"]:
                    verdict = row["verdicts"][by]
                    said[verdict, audit_cases.outcome(verdict, row["allowed"][by])] += 1
            marks = {"right": "", "undecided": "?", "wrong": "!", "unknown": "~"}
            text = ", ".join(f"{count} {verdict}{marks[how]}" for (verdict, how), count in said.most_common())
            lines.append(f"    {by:10} {text}")
            for (verdict, how), count in said.items():
                totals[f"{group[0]['truth']} {by} {verdict} {how}"] += count
    lines.append("")
    lines += [f"{key}: {count}" for key, count in sorted(totals.items())]
    names = [field.name for field in fields(AuditedEnsemble)]
    for pooled in pool([AuditedEnsemble(**{name: row[name] for name in names}) for row in rows]):
        if pooled.summary is not None:
            shares = ", ".join(f"{name} {value:.4g}" for name, value in pooled.measures.items())
            lines.append(f"{pooled.data}, seed {pooled.seed}, {pooled.summary}: {shares}")
    return "\n".join(lines)


def gathered(results: Iterator[Any], made: Mapping[str, str], file: Path | None) -> None:
    """Print the table of rows as they come to an end, and keep them meanwhile: a run may be broken off.

    Every row records how it was made.
    """
    rows: list[dict[str, Any]] = []
    for number, result in enumerate(results):
        rows += [{**row, "made": made} for row in (result if isinstance(result, list) else [result])]
        if file is not None and number % 20 == 0:
            write_atomically(file, json.dumps(rows).encode())
    rows.sort(key=lambda row: (row["group"], row["data"], row["case"], row["members"], row["seed"]))
    print(table(rows))
    if file is not None:
        write_atomically(file, (json.dumps(rows, indent=1) + "\n").encode())


def collected(records: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The values of every entry; several values come with the number of ensembles that have them."""
    values = {name: Counter(record[name] for record in records) for name in records[0]}
    return {
        name: next(iter(counts))
        if len(counts) == 1
        else "; ".join(f"{value} ({count:,} ensembles)" for value, count in counts.items())
        for name, counts in values.items()
    }


def summarise(files: list[Path]) -> dict[str, Any]:
    """How often verdicts are right, undecided and wrong, by numbers of examples and members and by truth."""
    rows = [row for file in files for row in json.loads(file.read_text())]
    if not rows or not all("made" in row for row in rows):
        raise SystemExit("rows must record how they were made; make them again with `run` or `judge`")
    cells: dict[tuple[int, int, str], dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for row in rows:
        cell = cells[row["examples"], row["members"], row["truth"]]
        for evidence, verdict in row["verdicts"].items():
            outcome = audit_cases.outcome(verdict, row["allowed"][evidence])
            cell[evidence][f"wrong: {verdict}" if outcome == "wrong" else outcome] += 1
    made = {
        "seeds": sorted({row["seed"] for row in rows}),
        "data": sorted({row["data"] for row in rows}),
        **collected([row["made"] for row in rows]),
    }
    counts = [
        {"examples": examples, "members": members, "truth": truth, "outcomes": {by: dict(cell[by]) for by in EVIDENCE}}
        for (examples, members, truth), cell in sorted(cells.items())
    ]
    return {"made": made, "rows": counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    make, judge, run = (verbs.add_parser(verb) for verb in ("make", "judge", "run"))
    for command in (make, run):
        command.add_argument("--sets", nargs="+", default=["design"])
        command.add_argument("--seeds", nargs="+", type=int, default=[0])
        command.add_argument("--members", nargs="+", type=int, default=[5])
        command.add_argument("--cases", nargs="+")
        command.add_argument("--epochs", type=int, default=60)
        command.add_argument("--train", type=int, default=1000)
        command.add_argument("--test", type=int, default=2000)
    make.add_argument("--out", type=Path, required=True)
    judge.add_argument("files", type=Path, nargs="+")
    for command in (judge, run):
        command.add_argument("--json", type=Path)
    for command in (make, judge, run):
        command.add_argument("--jobs", type=int, default=2)
    summary = verbs.add_parser("summary")
    summary.add_argument("files", type=Path, nargs="+")
    summary.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    if args.verb == "summary":
        write_atomically(args.json, (json.dumps(summarise(args.files), indent=1) + "\n").encode())
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started
    started = time.perf_counter()
    if args.verb == "judge":
        made = {**how_made(), "command": "python benchmarks/audit_cases.py judge FILES"}  # their names are no setting
        gathered(in_parallel(args.jobs, judge_file, [(file,) for file in args.files]), made, args.json)
    else:
        spec = spec_of(args)
        units = audit_cases.units(spec)
        if args.verb == "make":
            args.out.mkdir(parents=True, exist_ok=True)
            count = sum(in_parallel(args.jobs, make_unit, [(spec, unit, args.out) for unit in units]))
            print(f"{count} files in {args.out}")
        else:
            gathered(in_parallel(args.jobs, audit_rows, [(spec, unit) for unit in units]), how_made(), args.json)
    print(f"{time.perf_counter() - started:.0f} seconds")


if __name__ == "__main__":
    main()
