"""README and documentation: the code in them runs, and what they point at exists."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]


@pytest.mark.slow(cases=["audit.md", "masks.md", "gpu.md", "robustness.md", "training.md"])
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.finditer(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        line = page.read_text()[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block.group(1), str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_of_the_readme_exist():
    targets = re.findall(r"make ([\w-]+)", (ROOT / "README.md").read_text())
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"make {target} is not in the Makefile"


def test_lock_pins_every_package_exactly():
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert "torch==2.13.0" in lines


def render_tables(folder, *arguments):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "docs/tables", *arguments]
    return subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True, check=False)


def test_tables_are_rendered_from_the_results():
    done = render_tables(ROOT, "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_stale_tables_are_named_and_written(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("assets"))
    for folder in ("benchmarks/results", "src/dissensus/studies/specs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.npz"))
    page = tmp_path / "docs" / "speed.md"
    page.write_text(page.read_text().replace("| by hand |", "| by foot |"))
    assert render_tables(tmp_path, "--check").stderr == "stale: speed.md; run python docs/tables\n"
    assert render_tables(tmp_path).returncode == 0
    assert page.read_text() == (ROOT / "docs" / "speed.md").read_text()
    assert render_tables(tmp_path, "--chek").stderr.startswith("usage: python docs/tables [--check]")


def test_a_section_without_a_result_is_left_out(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "tables")
    layout, speed = (importlib.import_module(name) for name in ("layout", "speed"))
    for module in (layout, speed):
        monkeypatch.setattr(module, "BENCHMARKS", tmp_path)
    assert speed.TABLES["attacks-gpu"]() == ""
    rows = [{"attack": "PGD", "members": 5, "milliseconds": {"eager": 30.0, "captured": 10.0}}]
    content = {"made": {"device": "a GPU", "command": "python benchmarks/attacks_gpu.py"}, "rows": rows}
    (tmp_path / "attacks_gpu.json").write_text(json.dumps(content))
    text = speed.TABLES["attacks-gpu"]()
    assert text.startswith("## Attacks, on a GPU\n\nMilliseconds of a whole call")
    assert "| PGD | 5 | 30 | 10 | 3.0× |" in text


def test_the_readmes_figure_is_the_benchmarks():
    rows = json.loads((ROOT / "benchmarks/results/gpu.json").read_text())["rows"]
    (ways,) = [row["ways"] for row in rows if (row["case"], row["members"], row["batch"]) == ("ResNet-20", 20, 64)]
    claim = re.search(r"(\d+) times as fast as a loop over modules for 20 ResNet-20", (ROOT / "README.md").read_text())
    assert claim is not None
    assert int(claim.group(1)) == int(ways["by hand"]["ms"] / ways["auto"]["ms"])
