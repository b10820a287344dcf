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


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_third_party_networks_are_timed_compared_and_told_why_not(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.syspath_prepend(BENCHMARKS.parent / "docs" / "tables")
    third_party, models = importlib.import_module("third_party"), importlib.import_module("models")
    cases = {case.name: case for case in third_party.CASES}
    on_cpu = torch.device("cpu")
    row = third_party.row(cases["weight norm, MLP 16-64-10"], 2, 1, on_cpu)
    assert row["milliseconds"].keys() == {"by hand", "loop", "vmap", "auto"}
    assert row["refused"].keys() == {"batched"}
    assert max(row["differences"].values()) < 1e-5
    cells = models.cells(row)
    assert cells[-1].startswith("batched: ")
    assert [cell == "–" for cell in cells[3:6]] == [False, False, True]
    assert "differs" in models.cells({**row, "differences": {**row["differences"], "vmap": 0.5}})[4]
    on_gpu = {**row, "fit": {"milliseconds": row["milliseconds"]["by hand"] / 2, "backend": "streams"}}
    assert models.cells(on_gpu, models.GPU_WAYS, fitted=True)[-2].endswith(" (2.0×), streams")
    absent = third_party.row(
        third_party.Case("absent", torch.nn.Identity, dict, None, ("no_such_package",)), 2, 1, on_cpu
    )
    assert models.cells(absent)[-1] == "no_such_package: No module named 'no_such_package'"
    big = third_party.Case("big", torch.nn.Identity, dict, on_gpu_only=True)
    assert third_party.row(big, 2, 1, on_cpu) == {"case": "big", "missing": "needs a GPU"}
