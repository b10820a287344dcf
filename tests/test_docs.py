"""README and documentation: the code in them runs, and what they point at exists."""

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dissensus

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]
SMOKE = {
    "README.md": {
        "epochs=40": "epochs=3",
        "< 0.5  #": "< 3  #",  # members are not sure after three epochs
        "RandomForestClassifier(50": "RandomForestClassifier(10",
    },
    "index.md": {"epochs=40": "epochs=3", "< 0.5  #": "< 3  #"},
    "tutorials/audit.md": {"epochs=40": "epochs=5", "RandomForestClassifier(50": "RandomForestClassifier(10"},
    "tutorials/adapters.md": {"epochs=30": "epochs=2", "members=10": "members=2"},
    "tutorials/detection.md": {"epochs=40": "epochs=2", "members=10": "members=2"},
    "tutorials/diversity.md": {"epochs=60": "epochs=2"},
    "tutorials/images.md": {"epochs=20": "epochs=1", "members=10": "members=2", "[1000:]": "[1000:1100]"},
    "tutorials/robustness.md": {"epochs=15": "epochs=2", "[1200:1328]": "[1200:1232]"},
    "tutorials/sweep.md": {"list(range(10))": "[0, 1]", "epochs=12": "epochs=2"},
    "tutorials/uncertainty.md": {"epochs=60": "epochs=4", "members=10": "members=3"},
}
"""What makes the code of a page small enough for a test."""
SLOW = [
    "audit",
    "masks",
    "gpu",
    "robustness",
    "training",
    *(f"tutorials/{name}" for name in ("audit", "detection", "robustness")),
]


def page_name(page):
    """A page of the documentation, or README.md."""
    return str(page.relative_to(ROOT)).removeprefix("docs/")


@pytest.fixture
def outputs(monkeypatch):
    """The script that writes outputs below the code of pages."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("outputs")


@pytest.mark.slow(cases=[f"{name}.md" for name in SLOW])
@pytest.mark.parametrize("page", WITH_CODE, ids=page_name)
def test_code_blocks_run(page, outputs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    smaller = SMOKE.get(page_name(page), {})
    text = page.read_text()
    assert all(part in text for part in smaller), "a replacement has no place any more"
    for part, small in smaller.items():
        text = text.replace(part, small)
    for block in outputs.blocks(text):
        if block.kind == "python":
            exec(compile("\n" * block.line + block.code, str(page), "exec"), names)


def test_outputs_are_those_of_the_code(outputs):
    for name in outputs.PAGES:
        text = (ROOT / name).read_text()
        assert not outputs.is_stale(text), f"the code of {name} has changed: run python docs/outputs.py {name}"
        assert all(block.match["output"].strip() for block in outputs.blocks(text) if block.shows), f"{name}: no output"
    assert len(outputs.PAGES) > 9


def test_outputs_are_written_below_the_code(outputs, tmp_path, monkeypatch):
    monkeypatch.setattr(outputs, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    mark = "\n<!-- output -->\n<!-- /output -->\n"
    page.write_text(
        f"A sum.\n\n```python\nx = 1 + 1\nprint(x)\n```\n{mark}\n```python\nassert x == 2\n```\n\nThe end.\n"
    )
    assert outputs.is_stale(page.read_text())
    written = outputs.rendered(page)
    assert "```\n\n<!-- output " in written
    assert "-->\n\n```text\n2\n```\n\n<!-- /output -->" in written
    assert written.endswith("\n\nThe end.\n")
    page.write_text(written)
    assert not outputs.is_stale(written)
    assert outputs.rendered(page) == written
    page.write_text(written.replace("1 + 1", "1 + 2"))
    assert outputs.is_stale(page.read_text())
    page.write_text("```python\nprint(1)\n```\n")
    with pytest.raises(SystemExit, match="line 1: the block prints, and no mark"):
        outputs.rendered(page)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
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


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert [project["version"]] == citation == [dissensus.__version__]


def test_extras_that_messages_name_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [page.read_text() for page in (*PAGES, *(ROOT / "src").rglob("*.py"))]
    groups = [group for text in texts for group in re.findall(r"(?:dissensus|\.)\[([a-z,]+)\]'", text)]
    named = {name for group in groups for name in group.split(",")}
    assert {"cli", "hpo", "all", "dev"} <= named <= set(extras)
    (whole,) = extras["all"]
    assert "dev" not in re.split(r"[\[\],]", whole)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it: strictly, so that a link that leads nowhere fails."""
    folder = tmp_path_factory.mktemp("site")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_shows_examples_as_code(site):
    reference = (site / "reference.html").read_text()
    assert "<blockquote>" not in reference
    assert reference.count('class="gp"') > 300  # prompts that are highlighted
    assert not list(site.rglob("*.py")), "scripts are not published"


PROBE = """
<pre id="result"></pre>
<script>
onload = () => {
  const results = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument;
    const beyond = page.documentElement.scrollWidth > frame.clientWidth ? "is wider than" : "";
    const cut = [...page.querySelectorAll("pre > code")].filter(code => code.scrollWidth > code.clientWidth + 1);
    const missing = [...page.images].some(image => image.naturalWidth === 0) ? "lacks a picture at" : "";
    const hidden = frame.clientWidth === 1280 && cut.length ? "cuts code off at" : "";
    return [beyond, missing, hidden].filter(Boolean).map(what =>
      `${frame.getAttribute("src")} ${what} ${frame.clientWidth}`);
  });
  document.querySelector("#result").textContent = `${results.length} looked at: ${results.flat().join("; ")}.`;
};
</script>"""


@pytest.fixture
def browser(tmp_path):
    """A function that opens a page in Chromium and returns what it has become; all visits share a profile."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium is installed; `apt-get install chromium` brings one")

    def visit(page, *options):
        options += ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}")
        command = [program, *options, "--virtual-time-budget=5000", "--dump-dom", page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout

    return visit


@pytest.mark.slow
def test_pages_fit_a_screen_and_a_phone_and_cut_no_code_off(site, browser, tmp_path):
    (tmp_path / "site").symlink_to(site)
    pages = sorted(str(file.relative_to(site)) for file in site.rglob("*.html") if file.name != "404.html")
    frames = [
        f'<iframe src="site/{page}" style="border: 0; width: {width}px; height: 900px"></iframe>'
        for page in pages
        for width in (1280, 390)
    ]
    (tmp_path / "probe.html").write_text("\n".join(frames) + PROBE)
    content = browser(tmp_path / "probe.html", "--allow-file-access-from-files")
    assert re.search(r'<pre id="result">(.*?)</pre>', content)[1] == f"{len(frames)} looked at: ."


@pytest.mark.slow
def test_pages_follow_the_readers_system_at_every_visit_as_pictures_do(site, browser):
    """What an earlier visit has stored must not decide: pictures would have the ink of the other kind of page."""
    for scheme, expected in ((0, "slate"), (1, "default")):  # Blink's numbers of dark and light
        content = browser(site / "glossary.html", f"--blink-settings=preferredColorScheme={scheme}")
        assert re.search(r'<body[^>]* data-md-color-scheme="(\w+)"', content)[1] == expected


@pytest.mark.slow
def test_every_page_is_in_the_navigation_and_scripts_are_not_published(site):
    shown = {str(file.relative_to(site)) for file in site.rglob("*.html")} - {"404.html"}
    assert shown == {page_name(page).replace(".md", ".html") for page in PAGES} - {"README.html"}
    home = (site / "index.html").read_text()
    assert not [name for name in shown if f'href="{name}"' not in home and name != "index.html"], (
        "not in the navigation"
    )
    assert "Rules" in (site / "contributing.html").read_text(), "the repository's own page is included"


def test_code_that_the_theory_and_the_papers_name_exists():
    pages = [ROOT / "docs" / "theory.md", *(ROOT / "docs" / "papers").glob("*.md")]
    checked = 0
    for page in pages:
        for name in re.findall(
            r"`(?:ds\.)?((?:diversity|metrics|objectives|masks|scores|attacks)\.[\w.]+)", page.read_text()
        ):
            found = dissensus
            for part in name.split("."):
                found = getattr(found, part)
            checked += 1
        for name in re.findall(r"`(tests/\w+\.py)`", page.read_text()):
            assert (ROOT / name).exists()
    assert checked > 40


def test_pictures_have_no_ink_of_their_own():
    """They take the reader's: ink that was fixed would vanish on dark pages."""
    for picture in (ROOT / "docs" / "assets").rglob("*.svg"):
        text = picture.read_text()
        assert picture.name == "mark.svg" or "prefers-color-scheme:dark" in text.replace(" ", ""), picture.name
        assert "#010203" not in text, f"{picture.name} has the ink's stand-in"


def test_text_in_pictures_is_large_enough_to_read():
    """In pixels on a page, whose text is 816 pixels wide on a screen of 1280; pictures are not enlarged."""
    sizes = {}
    for picture in (ROOT / "docs" / "assets").rglob("*.svg"):
        text = picture.read_text()
        width = float(re.search(r'viewBox="[\d.]+ [\d.]+ ([\d.]+)', text)[1])
        fonts = [float(size) for size in re.findall(r"font(?:-size)?: [^;\"]*?([\d.]+)px", text)]
        sizes[picture.name] = min(fonts, default=11.0) * min(816 / width, 4 / 3)
    assert len(sizes) > 12
    assert not {name: size for name, size in sizes.items() if size < 10.5}


def test_the_logo_needs_no_font():
    """Letters of a wider font than the one at hand would be cut off."""
    assert "<text" not in (ROOT / "docs" / "assets" / "logo.svg").read_text()


def test_examples_of_docstrings_get_fences(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    fenced = importlib.import_module("doctest_blocks").fenced
    text = "A sum.\n>>> 1 + 1\n2\n\nMore.\n\n    >>> x = [\n    ...     1]\n    >>> x\n    [1]"
    expected = (
        "A sum.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore.\n\n"
        "    ```pycon\n    >>> x = [\n    ...     1]\n    >>> x\n    [1]\n    ```"
    )
    assert fenced(text) == expected
    assert fenced(expected) == expected
    assert fenced("No example.") == "No example."


def render_tables(folder, *arguments):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "docs/tables", *arguments]
    return subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True, check=False)


def test_tables_are_rendered_from_the_results(renderer):
    done = render_tables(ROOT, "--check", *(name for name in renderer.PAGES if "papers" not in name))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_tables_of_the_papers_are_rendered_from_the_results(renderer):
    done = render_tables(ROOT, "--check", *(name for name in renderer.PAGES if "papers" in name))
    assert done.returncode == 0, done.stderr


def copied(folder):
    """Pages and results without pictures and arrays, to be changed."""
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("assets"))
    shutil.copy(ROOT / "README.md", folder)
    for part in ("benchmarks/results", "src/dissensus/studies/specs", "src/dissensus/studies/results"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("*.npz"))
    return folder


@pytest.mark.slow
def test_stale_tables_are_named_and_written(tmp_path):
    page = copied(tmp_path) / "docs" / "speed.md"
    page.write_text(page.read_text().replace("| by hand |", "| by foot |"))
    pages = ("docs/speed.md", "docs/masks.md")
    assert render_tables(tmp_path, "--check", *pages).stderr == "stale: docs/speed.md; run python docs/tables\n"
    assert render_tables(tmp_path, *pages).returncode == 0
    assert page.read_text() == (ROOT / "docs" / "speed.md").read_text()
    assert render_tables(tmp_path, "--chek").stderr.startswith("usage: python docs/tables [--check] [PAGE")


def changed(file, change):
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def with_twice_the_diversity(demo):
    for run in demo["runs"]:
        if run["problem"] == "diabetes" and run["beta"] == 1:
            run["test"]["diversity"] *= 2


def with_pgd_at_12_3(study):
    (point,) = [p for p in study["points"] if (p["data"], p["method"]) == ("cifar10", "adp-2-0.5")]
    point["measures"]["accuracy_pgd_0.01"][0] = 0.123


@pytest.mark.slow
def test_numbers_in_sentences_follow_the_results(tmp_path):
    copied(tmp_path)
    changed(tmp_path / "benchmarks/results/demo.json", with_twice_the_diversity)
    changed(tmp_path / "src/dissensus/studies/results/adp/table-2.gpu.json", with_pgd_at_12_3)
    changed(tmp_path / "benchmarks/results/audit_example.json", lambda values: values["joint"].update(accuracy=0.5))
    pages = ("README.md", "docs/audit.md", "docs/diversity.md", "docs/robustness.md")
    stale = f"stale: {', '.join(pages)}; run python docs/tables\n"
    assert render_tables(tmp_path, "--check", *pages, "docs/masks.md").stderr == stale
    assert render_tables(tmp_path, *pages).returncode == 0
    readme, robustness = (plain_text(tmp_path / name) for name in ("README.md", "docs/robustness.md"))
    assert "an ensemble trained with ADP is right on 12 % of the images" in readme
    assert "PGD at ε = 0.01 leaves 12 % with ADP" in robustness
    assert "The ensemble is right 50 % of the time" in plain_text(tmp_path / "docs" / "audit.md")


def plain_text(page):
    """A page as its readers see it, in one line."""
    return " ".join(re.sub(r"<!--.*?-->", "", page.read_text()).split())


@pytest.fixture
def renderer(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "tables")
    spec = importlib.util.spec_from_file_location("renderer", ROOT / "docs" / "tables" / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_changed_result_changes_its_sentence(renderer, tmp_path, monkeypatch):
    layout = importlib.import_module("layout")
    shutil.copytree(layout.BENCHMARKS, tmp_path, ignore=shutil.ignore_patterns("*.npz"), dirs_exist_ok=True)
    monkeypatch.setattr(layout, "BENCHMARKS", tmp_path)
    page = (ROOT / "docs" / "audit.md").read_text()
    assert renderer.rendered("docs/audit.md") == page
    changed(tmp_path / "audit_example.json", lambda values: values["joint"].update(accuracy=0.5))
    number = re.compile(r"(<!--=example-accuracy-->)(\d+)")
    assert renderer.rendered("docs/audit.md") == number.sub(r"\g<1>50", page) != page


def test_marks_and_numbers_must_go_together(renderer):
    text = "It is <!--=share-->41<!--=--> %.\n"
    assert renderer.with_values(text, {"share": "42"}, "p.md") == "It is <!--=share-->42<!--=--> %.\n"
    with pytest.raises(SystemExit, match=r"p\.md: no value for share"):
        renderer.with_values(text, {}, "p.md")
    with pytest.raises(SystemExit, match=r"p\.md: no mark for other"):
        renderer.with_values(text, {"share": "42", "other": "1"}, "p.md")
    for line in ("<!--=share-->41<!--=--> %", "- <!--=share-->41<!--=--> %", "  <!--=share-->41<!--=-->"):
        with pytest.raises(SystemExit, match="a line begins with a number's mark"):
            renderer.with_values(f"It is\n{line}\n", {"share": "42"}, "p.md")


def test_marks_of_numbers_stand_on_rendered_pages_only(renderer):
    marked = {str(page.relative_to(ROOT)) for page in PAGES if "<!--=" in page.read_text()}
    assert marked == {name for name, module in renderer.PAGES.items() if hasattr(module, "values")}
    fences = [block for page in PAGES for block in re.findall(r"^```.*?^```", page.read_text(), flags=re.S | re.M)]
    assert not [block for block in fences if "<!--" in block], "comments are visible in blocks of code"


def test_a_section_without_a_result_is_left_out(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "tables")
    layout, speed = (importlib.import_module(name) for name in ("layout", "speed"))
    for module in (layout, speed):
        monkeypatch.setattr(module, "BENCHMARKS", tmp_path)
    assert speed.TABLES["attacks-gpu"]() == ""
    how = {"ours": "ours", "step by step": "ours", "torchattacks": "written out"}
    rows = [
        {"attack": "PGD", "members": members, "how": how, "milliseconds": dict(zip(how, times, strict=True))}
        for members, times in ((5, (30.0, 60.0, 40.0)), (1, (10.0, 20.0, 40.0)))
    ]
    content = {"made": {"device": "a GPU", "command": "python benchmarks/attacks_gpu.py"}, "rows": rows}
    (tmp_path / "attacks_gpu.json").write_text(json.dumps(content))
    text = speed.TABLES["attacks-gpu"]()
    assert text.startswith("## Attacks, on a GPU\n\nMilliseconds of a whole call")
    assert "| PGD | 1 | 10 | 20 |  | 40* |  | 0.25 | 1.0 |\n| PGD | 5 | 30 | 60 |  | 40* |  | 0.75 | 3.0 |" in text
