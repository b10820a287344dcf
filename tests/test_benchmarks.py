"""Benchmarks record how their results were made."""

import doctest
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
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


def loaded(monkeypatch, name, file):
    """A script as a module; two of them have one name."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_sharing_is_measured_beside_one_network_and_written_row_by_row(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.syspath_prepend(BENCHMARKS.parent / "docs" / "tables")
    sharing = loaded(monkeypatch, "measured_sharing", BENCHMARKS / "sharing.py")
    table = loaded(monkeypatch, "table_of_sharing", BENCHMARKS.parent / "docs" / "tables" / "sharing.py")
    case = sharing.Case(
        "BERT (plain torch)",
        partial(sharing.plain_bert, 8, 1, 2),
        lambda: {"x": sharing.tokens(4, 6)["input_ids"]},
        "head",
        ("query", "value"),
    )
    record = sharing.Record({"threads": "9", "command": "python benchmarks/sharing.py"}, tmp_path / "rows.json")
    sharing.measure([case], [4, 1], 1, 1, None, torch.device("cpu"), record)
    rows = {(row["way"], row["members"]): row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert len(rows) == 10
    assert (rows["full copies", 1]["operations"], rows["full copies", 4]["operations"]) == (1.0, 4.0)
    # Operations of a frozen trunk are those of one forward pass, whatever the number of heads.
    assert 0 < rows["heads", 4]["operations"] - rows["heads", 1]["operations"] < 0.2 * rows["heads", 1]["operations"]
    trunks = [rows["heads", m]["operations"] - rows["heads on features", m]["operations"] for m in (1, 4)]
    assert trunks[0] == pytest.approx(trunks[1]) == pytest.approx(1 / 3, rel=0.05), "a forward pass of the trunk"
    assert rows["heads", 4]["products"] == rows["heads", 1]["products"] < rows["full copies", 1]["products"]
    sharing.measure([case], [2], 1, 1, -1.0, torch.device("cpu"), record)
    stored = json.loads((tmp_path / "rows.json").read_text())
    assert [entry["reason"] for entry in stored["left_out"]] == ["no time was left"] * len(sharing.WAYS)
    text = table.of_machine(stored)
    assert "| BERT (plain torch) | heads | 4 |" in text
    assert "- BERT (plain torch), M = 2: LoRA, heads, heads on features, BatchEnsemble, full copies (no time" in text
    assert "kernels" not in text  # a CPU has none
    measured = rows["LoRA", 4]
    expected = measured["operations"] / (measured["milliseconds"] / measured["one_milliseconds"])
    assert f"| {measured['backend']} |" in text
    assert table.rate(measured) == pytest.approx(expected)
    again = sharing.Record(record.made, tmp_path / "rows.json", resume=True)
    monkeypatch.setattr(sharing, "measured", None)  # all rows of M = 1 are there
    sharing.measure([case], [1], 1, 1, None, torch.device("cpu"), again)
    assert len(again.rows) == 10
    assert not again.left_out
    with pytest.raises(SystemExit, match="of another threads"):
        sharing.Record({"threads": "8"}, tmp_path / "rows.json", resume=True)
    assert table.cell({"kernels": 12, "one_kernels": 4}, "kernels") == "3.0"


@pytest.fixture
def simulator(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("simulator")


def test_the_examples_of_the_simulator_hold(simulator):
    assert doctest.testmod(simulator) == (0, 3)


def test_simulated_tasks_take_turns(simulator):
    works = [simulator.Work(seconds) for seconds in (10.0, 4.0, 4.0, 4.0)]
    result = simulator.simulated(works, 2, simulator.Costs(start=1.0, task=0.5))
    assert result.seconds == 1 + 3 * 4.5, "the second worker does the three short ones"
    assert result.spent["computing"] == 22
    assert result.spent["waiting"] == pytest.approx(14.5 - 11.5)


def test_simulated_checkpoints_share_a_storage(simulator):
    costs = simulator.Costs(storage=1e9, every=10.0)
    alone, beside = (simulator.simulated([simulator.Work(20.0, 0.1e9)] * count, count, costs) for count in (1, 4))
    assert alone.seconds == pytest.approx(20 + 3 * 0.1)
    assert beside.seconds == pytest.approx(20 + 3 * 0.1 + 3 * 0.1), "the last one has waited once for the others"
    assert beside.spent["storage"] == pytest.approx((0.1 + 0.2 + 0.3 + 0.4) + 2 * 4 * 0.1), "apart from then on"


def test_simulated_results_come_home_one_after_the_other(simulator):
    result = simulator.simulated([simulator.Work(5.0, result=2e9)] * 3, 3, simulator.Costs(home=1e9))
    assert (result.seconds, result.home) == (11.0, 6.0)


@pytest.mark.parametrize("moment", [3.0, 12.0, 29.0])
def test_a_simulated_loss_costs_the_time_since_the_last_checkpoint(simulator, moment):
    costs = simulator.Costs(every=10.0, again=2.0)
    result = simulator.simulated([simulator.Work(30.0)], 1, costs, [(moment, 0)])
    assert result.spent["lost"] == moment % 10
    assert result.seconds == 30 + moment % 10 + 2
    taken_over = simulator.simulated([simulator.Work(30.0)], 2, costs, [(moment, 0)])
    assert taken_over.seconds == 30 + moment % 10, "the other worker has nothing to do, and goes on at once"


def test_shares_of_a_simulation_are_all_of_its_time(simulator):
    works = [simulator.Work(50.0 + number, 1e8, 1e8) for number in range(10)]
    costs = simulator.Costs(3.0, 2.0, 0.1, 1e9, 1e8, again=20.0)
    result = simulator.simulated(works, 4, costs, [(40.0, 0), (70.0, 1), (1e9, 2)])
    assert sum(simulator.shares(result, 4).values()) == pytest.approx(1)
    assert result.spent["computing"] == pytest.approx(sum(work.seconds for work in works))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with PyTorch for CUDA")
def test_stacked_kernels_compute_convolutions_and_batch_norm():
    """By Triton's interpreter, which needs no GPU."""
    command = [sys.executable, str(BENCHMARKS / "stacked_kernels.py"), "--check"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
