"""Benchmarks record how their results were made."""

import importlib
import json
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def audit_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("audit_cases")


def audited(seed, verdict):
    evidence = ("alone", "train", "reference")
    return {
        "group": "sizes",
        "data": "friedman-100",
        "case": "forest of 5",
        "members": 5,
        "seed": seed,
        "verdicts": dict.fromkeys(evidence, verdict),
        "truth": "sound",
        "allowed": {name: ["healthy"] for name in evidence},
        "count": 5,
        "examples": 100,
        "measures": {},
    }


def test_rows_of_an_audit_record_how_they_were_made_and_the_summary_collects_it(audit_benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks/audit_cases.py", "run", "--seeds", "1", "2", "--json", "private.json"])
    made = audit_benchmark.how_made()
    assert made["command"] == "python benchmarks/audit_cases.py run --seeds 1 2"
    assert made["torch"] == torch.__version__
    assert {"machine", "python", "dissensus", "source"} <= set(made)
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    audit_benchmark.gathered(iter([[audited(1, "healthy")], [audited(2, "collusive")]]), made, files[0])
    audit_benchmark.gathered(iter([[audited(3, "healthy")]]), {**made, "machine": "other"}, files[1])
    assert [row["made"] for row in json.loads(files[0].read_text())] == [made, made]
    summary = audit_benchmark.summarise(files)
    assert summary["made"] == {
        **made,
        "seeds": [1, 2, 3],
        "data": ["friedman-100"],
        "machine": f"{made['machine']} (2 ensembles); other (1 ensembles)",
    }
    (row,) = summary["rows"]
    assert row["outcomes"]["alone"] == {"right": 2, "wrong: collusive": 1}


def test_rows_that_do_not_record_how_they_were_made_are_refused(audit_benchmark, tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps([audited(1, "healthy")]))
    with pytest.raises(SystemExit, match="must record how they were made"):
        audit_benchmark.summarise([tmp_path / "rows.json"])
