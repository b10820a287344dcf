"""Benchmarks record how their results were made."""

import doctest
import importlib
import importlib.util
import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dissensus import attacks

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
    assert models.refusals([row]) == (
        "Why a backend has no number:\n\n"
        "- `batched`: the forward pass reads a tensor outside of the layers that it knows (weight norm)"
    )
    assert models.refusals([{**row, "refused": {}}]) == ""
    assert [cell == "–" for cell in cells[3:6]] == [False, False, True]
    assert "differs" in models.cells({**row, "differences": {**row["differences"], "vmap": 0.5}})[4]
    on_gpu = {**row, "fit": {"milliseconds": row["milliseconds"]["by hand"] / 2, "backend": "streams"}}
    assert models.cells(on_gpu, models.GPU_WAYS, fitted=True)[-1].endswith(" (2.0×), streams")
    absent = third_party.row(
        third_party.Case("absent", torch.nn.Identity, dict, None, ("no_such_package",)), 2, 1, on_cpu
    )
    assert models.not_measured([absent]) == (
        "Not measured yet: absent (no_such_package: No module named 'no_such_package')."
    )
    big = third_party.Case("big", torch.nn.Identity, dict, on_gpu_only=True)
    assert third_party.row(big, 2, 1, on_cpu) == {"case": "big", "missing": "needs a GPU"}


def test_reasons_of_the_engine_are_written_for_readers(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS.parent / "docs" / "tables")
    models = importlib.import_module("models")
    spoken = {
        "Batching rule not implemented for aten::gru.input. We could not generate a fallback.": (
            "PyTorch's `vmap` has no rule for recurrent layers"
        ),
        "layer layer (LSTM) has no batched form": "it does not know recurrent layers",
        "layer bn1 (BatchNorm2d) has no batched form": "it does not know `nn.BatchNorm2d`",
        "it uses call_method permute": "it does not know the operation `permute`",
        "something new; with details. And more": "something new",
    }
    assert {text: models.reason(text) for text in spoken} == spoken
    for name in ("third_party", "third_party_gpu"):
        refused = [text for row in models.benchmark(name)["rows"] for text in row.get("refused", {}).values()]
        assert not [text for text in refused if not any(re.match(pattern, text) for pattern in models.REASONS)]


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
    assert "\nNot measured: M = 2 (no time was left).\n" in text
    one, memory = stored["left_out"][0], "OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 MiB. GPU 0 has"
    others = [{**one, "members": 4, "reason": memory}, {**one, "network": "GPT-2", "members": 4}]
    assert table.left_out({**stored, "left_out": [one, *others]}) == (
        "\nNot measured: M = 2; GPT-2 (no time was left); LoRA of BERT (plain torch), M = 4 (memory ran out).\n"
    )
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


@pytest.fixture
def attack_loops(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("attack_loops")


GOLDEN = BENCHMARKS.parent / "tests" / "golden"


def golden_attack(key):
    """Inputs, labels, network and result of another library's attack."""
    tensors = load_file(GOLDEN / "attacks.safetensors")
    net = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5)).eval()
    for layer, index in (("conv", 0), ("linear", 3)):
        net[index].load_state_dict({part: tensors[f"net.{layer}.{part}"] for part in ("weight", "bias")})
    return net, tensors["x"], tensors["labels"], tensors[key]


@pytest.mark.parametrize(
    ("key", "loop", "settings"),
    [
        ("foolbox.fgsm", "fgsm", {"epsilon": 0.03}),
        ("foolbox.bim", "bim", {"epsilon": 0.03, "steps": 10, "step_size": 0.003}),
        ("torchattacks.mifgsm", "mim", {"epsilon": 0.03, "steps": 10, "step_size": 0.003}),
        ("foolbox.ead.search-1.EN", "elastic_net", {"constant": 1.3, "steps": 50, "step_size": 0.01}),
        ("pyautoattack.apgd-ce", "apgd", {"epsilon": 0.03, "steps": 20}),
        ("pyautoattack.square", "square", {"epsilon": 0.05, "queries": 200}),
    ],
)
def test_loops_of_other_libraries_lead_where_the_libraries_lead(attack_loops, key, loop, settings):
    """torchattacks' FGSM and BIM lead where foolbox's do. AutoAttack's loops draw what it draws."""
    net, x, y, expected = golden_attack(key)
    result = getattr(attack_loops, loop)(net, x, y, **settings)
    if loop == "elastic_net":
        result = torch.where((result == 0).flatten(1).all(1).view(-1, 1, 1, 1), expected, result)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-4)


def test_the_loops_of_pgd_and_carlini_wagner_find_what_ours_find(attack_loops):
    net, x, y, _ = golden_attack("foolbox.pgd")
    points = attack_loops.pgd(net, x, y, 0.03, 20, 0.005)
    assert torch.equal(net(points).argmax(-1) != y, load_file(GOLDEN / "attacks.safetensors")["foolbox.pgd.success"])
    assert (points - x).abs().max() <= 0.03 + 1e-6
    # torchattacks takes the best other class for zero where its score is below zero, and loses its last update.
    net, inside = net.double(), x.double().clamp(0.05, 0.95)
    with torch.no_grad():
        net[3].bias += 100
    result = attack_loops.carlini_wagner(net, inside, y, 10.0, 100, 0.005)
    expected = attacks.carlini_wagner(
        net, inside, y, steps=99, step_size=0.005, constant=10.0, search_steps=0, abort_early=False, widening=0.0
    )
    right = net(inside).argmax(-1) == y
    assert (expected.success & right).any()
    torch.testing.assert_close(result[right], expected.inputs[right], rtol=0, atol=1e-6)


def test_attacks_are_timed_beside_others_within_a_budget(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.syspath_prepend(BENCHMARKS.parent / "docs" / "tables")
    gpu, speed = loaded(monkeypatch, "attacks_gpu", BENCHMARKS / "attacks_gpu.py"), importlib.import_module("speed")
    words = ["--device", "cpu", "--network", "cnn", "--examples", "4", "--members", "2", "1", "--written-out"]
    args = gpu.parsed([*words, "--repeats", "1"])
    settings = gpu.Settings(epsilon=0.05, short=2, long=3, queries=4)
    record = gpu.Record(tmp_path / "rows.json", None, {"command": "python benchmarks/attacks_gpu.py"})
    gpu.measure(settings, args, record)
    stored = json.loads((tmp_path / "rows.json").read_text())
    assert {(row["attack"], row["members"]) for row in stored["rows"]} == {
        (title, members) for title in settings.titles().values() for members in (1, 2)
    }
    assert len(stored["rows"]) == 16
    for row in stored["rows"]:
        assert row["milliseconds"].keys() == row["broken"].keys() == row["how"].keys()
        assert set(row["how"].values()) == {"ours", "written out"}
        assert 0 <= min(row["broken"].values()) <= max(row["broken"].values()) <= 1
    bim = next(row for row in stored["rows"] if row["attack"] == "BIM, 2 steps" and row["members"] == 2)
    assert bim["broken"]["ours"] == bim["broken"]["torchattacks"] > 0, "ours and the members by hand are one model"
    assert speed.captured_attacks(stored).count("\n") == 17
    record = gpu.Record(tmp_path / "none.json", -1.0, {})
    gpu.measure(settings, args, record)
    assert not record.result["rows"]
    assert len(json.loads((tmp_path / "none.json").read_text())["left_out"]) == 16


def test_ways_to_attack_tell_how_many_passes_they_take(monkeypatch):
    """What is compared is equal work: all steps, and a pass that tells what is broken."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    peers = importlib.import_module("attack_peers")
    attacks_benchmark = loaded(monkeypatch, "attacks_benchmark", BENCHMARKS / "attacks.py")
    monkeypatch.syspath_prepend(BENCHMARKS.parent / "docs" / "tables")
    network, x, y, ensemble = attacks_benchmark.trained(8, members=2, epochs=2)
    settings = peers.Settings(epsilon=1e-5, short=3, long=4, queries=5)
    expected = {"fgsm": (2, 2), "bim": (4, 4), "pgd": (5, 4), "mim": (4, 4), "carlini_wagner": (7, 5)}
    expected |= {"elastic_net": (10, 9), "apgd": (7, 6), "square": (7, 8)}
    rows = []
    for name, (ours, others) in expected.items():
        rows.append(attacks_benchmark.beside_others(name, network, x, y, settings, 1))
        assert rows[-1]["passes"].pop("ours") == ours, name
        assert set(rows[-1]["passes"].values()) == {others}, name
        rows[-1]["passes"]["ours"] = ours
    grown = [attacks_benchmark.grown("fgsm", 2, network, ensemble, x, y, settings, 1)]
    text = importlib.import_module("speed").attacks({"rows": rows, "members": grown})
    assert "| FGSM | " in text
    assert "| attack | 2 members |" in text


def test_times_of_attacks_are_added_to_those_of_the_same_library(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = loaded(monkeypatch, "attacks_benchmark", BENCHMARKS / "attacks.py")
    file, made = tmp_path / "attacks.json", {"command": "python benchmarks/attacks.py", "source": "1"}
    assert benchmark.earlier(file, made)["rows"] == []
    stored = {"made": made, "rows": [{"attack": "FGSM"}], "members": []}
    file.write_text(json.dumps(stored))
    assert benchmark.earlier(file, {**made, "command": "python benchmarks/attacks.py --only PGD"}) == stored
    assert benchmark.earlier(file, {**made, "source": "2"})["rows"] == []
