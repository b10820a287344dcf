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
    "loads": "load and predict, mlp, loop",
    "leftovers": "Ensemble.save",
    "writers": "two saves",
    "tamper": "saved ensemble: bit flip",
    "disk": "Ensemble.save",
    "identity": "same: nothing, with a Dataset",
    "specs": "values, show",
    "sets": "one expression",
    "commands": "study show",
    "paths": "reading a FIFO as outputs.npy",
}
"""A cheap case of every command that needs no GPU."""


def chaos(*words):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), *map(str, words)]
    return subprocess.run(command, env=env, text=True, capture_output=True, check=False)


def check(run):
    assert run["rows"]
    for row in run["rows"]:
        assert row["attempts"] >= 1
        assert 0 <= row["held"] <= row["attempts"]
        assert not any("the attempt itself failed" in failure for failure in row["failures"])
    assert {"command", "hardware", "python", "torch", "dissensus", "source", "seed"} <= run["made"].keys()


def test_a_command_counts_its_attempts(tmp_path):
    file = tmp_path / "chaos.json"
    done = chaos("specs", "--count", 1, "--only", ONLY["specs"], "--json", file)
    assert "Traceback" not in done.stderr
    run = json.loads(file.read_text())["runs"]["specs"]
    check(run)
    assert done.returncode == int(any(row["held"] < row["attempts"] for row in run["rows"]))
    assert str(tmp_path) not in json.dumps(run)


@pytest.mark.slow
def test_all_commands_count_their_attempts_and_are_summed_up(tmp_path):
    file = tmp_path / "chaos.json"
    only = [word for case in ONLY.values() for word in ("--only", case)]
    done = chaos("all", "--count", 1, *only, "--json", file)
    assert "Traceback" not in done.stderr
    runs = json.loads(file.read_text())["runs"]
    assert list(runs) == list(ONLY)
    for run in runs.values():
        check(run)
    assert "same: nothing" in chaos("summary", "--json", file).stdout
