"""The demo as a user runs it: the command, its page, and the page in a real browser."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import dissensus
from dissensus import cli
from dissensus.studies import demo, demo_page

TINY = demo.DemoSettings(betas=(0.0, 0.5, 0.75, 0.9, 1.0), seeds=(0, 1), members=3, epoch_share=0.05)


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The command run once at a small size: its result on the screen, and the folder that it writes."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "FAST", TINY)
        return CliRunner().invoke(cli.app, ["demo", "--fast", "--out", str(folder)]), folder


@pytest.fixture(scope="module")
def result(command):
    return json.loads((command[1] / "results.json").read_text())


@pytest.fixture(scope="module")
def report(command):
    return command[1] / "report.html"


@pytest.fixture(scope="module")
def python_result():
    """The same runs, called from Python."""
    return demo.run(TINY)


def test_defaults_keep_the_promise():
    for settings in (demo.DemoSettings(), demo.FAST):
        assert len(settings.betas) >= 5
        assert all(0 <= beta <= 1 for beta in settings.betas)
        assert settings.members == 5
    assert demo.DemoSettings().betas == tuple(i / 10 for i in range(11))
    assert len(demo.DemoSettings().seeds) == 5


def test_result_holds_every_run_and_decomposes(result):
    runs = result["runs"]
    assert len(runs) == 3 * 5 * 2
    for run in runs:
        for part in (run["train"], run["test"]):
            assert part["individual"] - part["diversity"] == pytest.approx(part["ensemble"], rel=1e-5)


@pytest.mark.slow
def test_every_ensemble_of_the_first_seed_is_audited(result, python_result):
    assert python_result.to_dict()["verdicts"] == result["verdicts"]
    assert len(python_result.audits) == len(result["verdicts"]) == 3 * 5
    assert python_result.audits["digits, scores", 1.0].reference is not None
    assert python_result.audits["digits, scores", 0.0].reference is None, "it is the reference"
    assert [str(row[0]) for row in demo_page.verdict_rows(python_result)] == ["0", "0.5", "0.75", "0.9", "1"]


@pytest.mark.slow
def test_runs_are_reproducible_and_no_number_is_lost_in_json(result, python_result):
    for stored, run in zip(result["runs"], python_result.runs, strict=True):
        assert stored["test"]["ensemble"] == pytest.approx(run.test["ensemble"], rel=1e-4)
        assert len(stored["rise"]) == len(run.rise) == 3
    for run, stored in zip(
        python_result.to_dict()["runs"], json.loads(json.dumps(python_result.to_dict()))["runs"], strict=True
    ):
        assert stored == {**run, "rise": list(run["rise"])}


def test_a_stored_result_is_read_again(result):
    stored = demo.DemoResult.from_dict(result)
    assert (stored.settings, stored.problems) == (TINY, demo.PROBLEMS)
    assert json.loads(json.dumps(stored.to_dict())) == {**result, "verdicts": []}
    direct = demo.DemoResult(TINY, [demo.DemoRun(**run) for run in result["runs"]])
    for problem in stored.problems:
        assert demo_page.finding(stored, problem.name) == demo_page.finding(direct, problem.name)


def two_betas(errors_first, errors_last):
    """A result of two β with these errors of the ensemble over seeds."""
    runs = [
        demo.DemoRun(
            problem="p",
            beta=beta,
            seed=seed,
            train={"ensemble": 0.1},
            test={"ensemble": error, "individual": error + spread, "diversity": spread},
            bias_share=0.5,
            rise=(0.1, 0.2, 0.3),
        )
        for beta, errors, spread in ((0.0, errors_first, 0.1), (1.0, errors_last, 0.4))
        for seed, error in enumerate(errors)
    ]
    return demo.DemoResult(demo.DemoSettings(betas=(0.0, 1.0)), runs)


def test_findings_follow_the_numbers():
    rose = demo_page.finding(two_betas([0.20, 0.20, 0.20], [0.30, 0.30, 0.31]), "p")
    assert "rose by 52%" in rose
    assert "4-fold" in rose
    fell = demo_page.finding(two_betas([0.30, 0.30, 0.31], [0.20, 0.20, 0.20]), "p")
    assert "fell by 34%" in fell
    unclear = demo_page.finding(two_betas([0.20, 0.30, 0.40], [0.30, 0.20, 0.45]), "p")
    assert "No change of the ensemble's loss can be shown with 3 seeds" in unclear


def test_page_is_self_contained(report):
    text = report.read_text()
    assert text.count("<figure") == 15
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    assert "<script" not in text
    assert "://" not in text
    assert dissensus.__version__ in text


PROBE = """<script>
const errors = [];
window.addEventListener("error", e => errors.push(String(e.message)));
console.error = (...words) => errors.push(words.join(" "));
window.addEventListener("load", () => {
  const svgs = [...document.querySelectorAll("figure svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    const marks = [...svg.querySelectorAll("path, text, use")].filter(e => e.getBoundingClientRect().width > 0);
    return [box.width, box.height, marks.length];
  });
  const found = document.createElement("pre");
  found.id = "found";
  const wide = document.documentElement.scrollWidth;
  found.textContent = JSON.stringify({svgs, errors, wide, inner: window.innerWidth});
  document.body.append(found);
});
</script>"""


@pytest.mark.parametrize("width", [1280, 500], ids=["desktop", "phone"])
def test_page_in_a_real_browser(report, tmp_path, width):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed; `apt-get install chromium` brings one")
    probed = tmp_path / "probed.html"
    probed.write_text(report.read_text().replace("<head>", "<head>" + PROBE, 1))
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", profile, "--enable-logging=stderr"]
    command = [browser, *options, f"--window-size={width},900", "--dump-dom", probed.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    measured = json.loads(re.search(r'<pre id="found">(.*?)</pre>', done.stdout).group(1))
    assert measured["errors"] == []
    assert "CONSOLE" not in done.stderr, done.stderr
    assert len(measured["svgs"]) == 15
    for box_width, box_height, marks in measured["svgs"]:
        assert box_width > 200
        assert box_height > 100
        assert marks > 20
    assert measured["wide"] <= measured["inner"], "the page scrolls sideways"


def test_the_command(command, result, tmp_path):
    done, folder = command
    assert done.exit_code == 0, done.output
    assert "diversity" in done.output
    assert "report.html" in done.output.replace("\n", "")
    assert (folder / "report.html").stat().st_size > 10_000
    assert len(result["runs"]) == 30
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path / "file")])
    assert refused.exit_code == 2
    assert "is a file" in refused.output.replace("\n", " ")


def test_help_is_enough_to_work_from():
    top = CliRunner().invoke(cli.app, ["--help"]).output
    assert "demo" in top
    assert "dissensus demo" in top
    help_text = CliRunner().invoke(cli.app, ["demo", "--help"]).output
    for text in ("--fast", "--out", "report.html", "runs/demo"):
        assert text in help_text
    assert dissensus.__version__ in CliRunner().invoke(cli.app, ["--version"]).output


EXTRAS = [
    ("typer", "dissensus[cli]"),
    ("rich", "dissensus[cli]"),
    ("matplotlib", "dissensus[report]"),
    ("scipy", "dissensus[report]"),
    ("sklearn", "dissensus[data]"),
]


@pytest.mark.slow(fast=["sklearn-*"])
@pytest.mark.parametrize(("missing", "fix"), EXTRAS)
def test_missing_extras_name_the_install(missing, fix, tmp_path):
    script = f"""
import sys
sys.modules[{missing!r}] = None
sys.argv = ["dissensus", "demo", "--fast", "--out", {str(tmp_path)!r}]
from dissensus.studies import demo
demo.FAST = demo.DemoSettings(betas=(0.0, 1.0), seeds=(0,), members=2, epoch_share=0.01)
from dissensus.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert fix in (done.stdout + done.stderr).replace("\n", "")
    assert "Traceback" not in done.stderr
