"""The benchmark that tries to break dissensus: every command of it works and writes what it saw."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ONLY = {
    "kills": "mlp, vmap",
    "kills-sweep": "normalised, vmap",
    "kills-study": "SIGKILL, late",
    "loads": "load and predict, mlp",
    "leftovers": "predict",
    "writers": "two saves",
    "tamper": "saved ensemble",
    "disk": "Ensemble.save",
    "identity": "same: nothing",
    "specs": "values, show",
    "sets": "one expression",
    "commands": "masks",
    "paths": "as outputs.npy",
}
"""A cheap case of every command that needs no GPU."""


def chaos(*words):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), *map(str, words)]
    return subprocess.run(command, env=env, text=True, capture_output=True, check=False)


@pytest.mark.slow(fast=["masks-*"])
@pytest.mark.parametrize(("command", "case"), ONLY.items(), ids=[f"{case}-{name}" for name, case in ONLY.items()])
def test_a_command_counts_its_attempts(command, case, tmp_path):
    file = tmp_path / "chaos.json"
    done = chaos(command, "--count", 1, "--only", case, "--json", file)
    assert "Traceback" not in done.stderr
    run = json.loads(file.read_text())["runs"][command]
    assert run["rows"]
    for row in run["rows"]:
        assert row["attempts"] >= 1
        assert not any("the attempt itself failed" in failure for failure in row["failures"])
    failed = any(row["held"] < row["attempts"] for row in run["rows"])
    assert done.returncode == int(failed)
    assert str(tmp_path) not in json.dumps(run)
    assert {"command", "hardware", "python", "torch", "dissensus", "source", "seed"} <= run["made"].keys()


@pytest.mark.slow
def test_results_of_commands_stand_beside_each_other_and_are_summed_up(tmp_path):
    file = tmp_path / "chaos.json"
    for command in ("commands", "identity"):
        chaos(command, "--count", 1, "--only", ONLY[command], "--json", file)
    assert list(json.loads(file.read_text())["runs"]) == ["commands", "identity"]
    assert "same: nothing" in chaos("summary", "--json", file).stdout
