"""README and documentation: the code in them runs, and what they point at exists."""

import json
import re
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


def test_the_speed_page_is_rendered_from_the_results():
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "render.py"), "--check"], check=True)


def test_the_readmes_figure_is_the_benchmarks():
    rows = json.loads((ROOT / "benchmarks/results/gpu.json").read_text())["rows"]
    (ways,) = [row["ways"] for row in rows if (row["case"], row["members"], row["batch"]) == ("ResNet-20", 20, 64)]
    told = re.search(r"(\d+) times as fast as a loop over modules for 20 ResNet-20", (ROOT / "README.md").read_text())
    assert told is not None
    assert int(told.group(1)) == int(ways["by hand"]["ms"] / ways["auto"]["ms"])
