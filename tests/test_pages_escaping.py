"""Text stays text on every page: in elements, attributes and figures. A page runs and loads nothing but its own."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import dissensus as ds
from dissensus.attacks.flags import Flag
from dissensus.attacks.page import page as robustness_page
from dissensus.attacks.robustness import AttackResult, CurvePoint, Robustness
from dissensus.auditing import Audit, Judgement
from dissensus.auditing.page import page as audit_page
from dissensus.cli import app
from dissensus.metrics import Interval
from dissensus.pages import (
    Badge,
    Drawing,
    FactList,
    Folded,
    Link,
    Number,
    Page,
    PageTable,
    Section,
    Text,
    charts,
    figures,
    html,
    markup,
    style,
)
from dissensus.pages.html import FILTER
from dissensus.studies import demo, demo_page, library, run_folders
from dissensus.studies.page import page as studies_page
from dissensus.studies.page import write_figures

RUN = "document.documentElement.dataset.ran=1"
HOSTILE = "\"'>--></svg></script><script>r()</script><img src=x onerror=r()>&lt; $_$"
"""Markup that ends attributes, comments, elements and scripts; an entity; and a formula that cannot be parsed."""
pytestmark = pytest.mark.filterwarnings("ignore:constrained_layout not applied")  # such names leave no room for axes
ALLOWED = {
    *("html", "head", "meta", "title", "style", "link", "body", "main", "h1", "h2", "h3", "p", "span", "code", "div"),
    *("nav", "ul", "li", "section", "label", "input", "output", "b", "circle", "script"),
    *("dl", "dt", "dd", "details", "summary", "a", "small", "table", "thead", "tbody", "tr", "th", "td"),
    *("figure", "figcaption", "svg", "g", "defs", "path", "use", "text", "tspan", "clippath", "rect", "image"),
}
"""Elements that pages are made of."""


class Elements(HTMLParser):
    """The elements of a page with their attributes, its text, and what scripts and style sheets hold."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.elements, self.texts, self.stack = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.stack += [] if tag in ("meta", "link", "img", "input") else [tag]

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag, f"</{tag}> ends no element"

    def handle_data(self, data):
        self.texts.append((self.stack[-1] if self.stack else "", data))

    def values(self, name):
        return [attributes[name] for _, attributes in self.elements if name in attributes]

    def inside(self, tag):
        return [data for place, data in self.texts if place == tag]


def checked(page, *tags):
    """The elements of a page that holds `HOSTILE`: none that pages do not have, and nothing that runs or loads."""
    elements = Elements(page)
    assert not elements.stack
    assert {tag for tag, _ in elements.elements} <= {*ALLOWED, *tags}
    own = [("script", {})] if any(attributes.get("class") == "filter" for _, attributes in elements.elements) else []
    assert [item for item in elements.elements if item[0] == "script"] == own, "a script that is not the page's own"
    assert elements.inside("script") == [FILTER] * len(own), "a script that is not the page's own"
    for _, attributes in elements.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("#", "data:")), attributes
    assert "default-src 'none'" in elements.values("content")[0]
    return elements


def text_of(elements):
    return " ".join(data for _, data in elements.texts) + " ".join(
        value for _, attributes in elements.elements for value in attributes.values()
    )


def line_figure(words):
    lines = [charts.Line(f"{words} {i}", [1.0, 2.0], [0.1, 0.1]) for i in range(2)]
    return charts.line_chart([words, f"{words} 2"], words, [charts.Panel(words, words, lines)])


def hostile_page(words=HOSTILE, label=""):
    """A page with every part, and the words in every text of it; ``label`` is that of its filter."""
    table = [[words, Number(1.0), Badge(words, "good"), Link(words, words)]]
    parts = [
        *(Text(f"{words} `{words}` β = 1 and 3 %", kind) for kind in ("", "lead", "finding", "note")),
        Badge(words, "bad"),
        *(PageTable([words] * 4, table, narrow, {words: words}, [words]) for narrow in ("scroll", "cards", "fit")),
        FactList([(words, words)]),
        Folded(words, [Text(words)]),
        Drawing(line_figure(words), words),
    ]
    return Page(words, [*parts, *[Section(words, parts[:1], words, words)] * 3], label)


FIGURES = {
    "lines": line_figure,
    "plane": lambda words: figures.plane([(words, [[0.8, 0.5], [0.7, 0.6]])], 0.9, 10, words, words, words),
    "roc": lambda words: charts.roc_chart([charts.Line(words, [0.0, 1.0], [0.0, 0.0])], words, words, words),
    "histogram": lambda words: charts.histogram(
        [0.0, 1.0, 2.0], [charts.Line(words, [1.0, 2.0], [0.0, 0.0])], words, words, words
    ),
    "gallery": lambda words: charts.gallery([(words, [(torch.zeros(1, 4, 4, dtype=torch.uint8), words)])]),
    "matrices": lambda words: charts.matrices([(words, [[0.5, None], [0.1, 0.2]])], words, words, words),
    "maps": lambda words: charts.maps([[[0.1, 0.2, 0], [0.3, 0.4, 1]]], [words, words], words),
    "masks": lambda words: figures.mask_budgets(
        [1.0], [[SimpleNamespace(scale=scale, member=1.0, iou=0.5) for scale in (1.0, 2.0)]], words
    ),
    "detection": lambda words: figures.detection(
        {words: torch.arange(9.0)}, {words: {words: torch.arange(9.0) + 2}, f"{words} 2": {words: torch.arange(9.0)}}
    ),
}


def test_elements_and_attributes_are_escaped_where_they_are_written():
    tree = markup.element("p", {"title": HOSTILE, "class": ""}, HOSTILE, markup.element("b", None, HOSTILE), HOSTILE)
    text = markup.written(tree)
    assert re.findall(r"</?\w+", text) == ["<p", "<b", "</b", "</p"]
    elements = Elements(text)
    assert elements.elements == [("p", {"title": HOSTILE}), ("b", {})]
    assert "".join(data for _, data in elements.texts) == HOSTILE * 3


@pytest.mark.parametrize("label", ["", HOSTILE])
def test_text_of_every_part_of_a_page_stays_text(label):
    elements = checked(html(hostile_page(label=label)))
    spoken = text_of(elements)
    assert spoken.count(HOSTILE) > 30
    assert elements.values("id").count(HOSTILE) == 3
    assert elements.values("data-filter") == [HOSTILE.lower()] * 6
    assert f"#{HOSTILE}" in elements.values("href")
    assert sorted(elements.values("aria-label")) == sorted([HOSTILE, "Contents"])
    assert elements.inside("title")[0] == HOSTILE
    assert elements.inside("h1") == [HOSTILE]


@pytest.mark.parametrize("label", ["", "Find:"])
@pytest.mark.parametrize(
    "foreign",
    ["<script>r()</script>", "<script src='data:,r()'></script>", "<script></script>", f"<script>{FILTER}</script>"],
    ids=["inline", "loaded", "empty", "copied"],
)
def test_no_script_but_that_of_the_filter_passes_for_the_page_s_own(label, foreign):
    text = html(Page("title", [Text("words")], label))
    assert checked(text)
    with pytest.raises(AssertionError, match="not the page's own"):
        checked(text.replace("</main>", foreign + "</main>"))


@pytest.mark.slow(fast=["lines"])
@pytest.mark.parametrize("name", FIGURES)
def test_text_of_every_figure_stays_text(name):
    elements = checked(html(Page("figures", [Drawing(FIGURES[name](HOSTILE), "", HOSTILE)])))
    assert elements.values("aria-label") == [HOSTILE]
    assert any(HOSTILE in data.replace("\n", "") for place, data in elements.texts if place == "text")


def poisoned(value, keep=()):
    """A value of JSON with `HOSTILE` after every text in it, but for those under the keys ``keep``."""
    if isinstance(value, str):
        return value + HOSTILE
    if isinstance(value, list):
        return [poisoned(item, keep) for item in value]
    if isinstance(value, dict):
        return {key: item if key in keep else poisoned(item, keep) for key, item in value.items()}
    return value


STUDIES = ("adp/figure-2", "adp/figure-3", "adp/figure-4", "adp/figure-5", "adp/table-2", "ldr/figure-5")
"""Studies with maps, matrices, ROC curves, counts, tables of attacks, and lines."""


@pytest.fixture
def hostile_results(tmp_path, monkeypatch):
    """Shipped results and studies in which every text holds markup."""
    folder = tmp_path / "shipped"
    for name in STUDIES:
        content = json.loads((run_folders.SHIPPED / f"{name}.gpu.json").read_text())
        content = poisoned(content, keep=("study", "scale", "axes", "verdict", "picture", "seed", "seeds", "device"))
        content["points"] = content["points"][:2]
        for point in content["points"]:
            point["measures"][HOSTILE] = [0.5, 0.1, 2]
            point["flags"] = {HOSTILE: [HOSTILE]}
            point["audited"] = {HOSTILE: 1}
            point["audit_reasons"] = [HOSTILE]
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.gpu.json").write_text(json.dumps(content))
    monkeypatch.setattr(run_folders, "SHIPPED", folder)
    load = library.load

    def hostile_spec(name, *rest):
        spec = load(name, *rest)
        labels = dict.fromkeys(("x_label", "y_label"), HOSTILE)
        figure = None if spec.figure is None else replace(spec.figure, **labels)
        return replace(spec, title=HOSTILE, reference=HOSTILE, claim=HOSTILE, note=HOSTILE, figure=figure)

    monkeypatch.setattr(library, "load", hostile_spec)
    folder = tmp_path / "runs" / STUDIES[0] / "smoke-1"
    folder.mkdir(parents=True)
    run_folders.write_state(folder, run_folders.RunState("failed", reason=HOSTILE))


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_results_of_studies_stay_text(hostile_results, tmp_path, name):
    elements = checked(html(studies_page([name], tmp_path / "runs")))
    spoken = text_of(elements)
    for words in (f"failed: {HOSTILE}", f"flags raised: {HOSTILE}"):
        assert words in spoken or (name != STUDIES[0] and words.startswith("failed"))
    assert spoken.count(HOSTILE) > 20


@pytest.mark.slow
def test_figures_of_studies_are_written_into_their_folder(hostile_results, tmp_path):
    files = write_figures([STUDIES[0]], tmp_path / "runs", tmp_path / "figures", "png")
    assert files
    assert {file.parent for file in files} == {tmp_path / "figures"}
    assert sorted(files) == sorted((tmp_path / "figures").iterdir())


@pytest.mark.slow
def test_an_audit_stays_text(tmp_path):
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 40, 3), torch.randint(3, (40,))
    scores = {HOSTILE: ds.scores.SCORES["predictive_diversity"]}
    audit = ds.audit(logits, labels, task="classification", kind="logits", ood=logits * 2, scores=scores)
    judgement = audit.judgement
    evidence = tuple(item._replace(question=HOSTILE, measure=HOSTILE, answer=HOSTILE) for item in judgement.evidence)
    lists = {"reasons": [HOSTILE], "advice": [HOSTILE], "evidence": evidence, "confidence": HOSTILE}
    facts = {**audit.facts, "kind": HOSTILE, "loss": HOSTILE, "matches_own_prediction": HOSTILE}
    hostile = replace(audit, judgement=judgement._replace(**lists), facts=facts)
    file = hostile.page(tmp_path / "audit.html", HOSTILE)
    elements = checked(file.read_text())
    assert elements.inside("title")[0] == f"Audit: {HOSTILE}"
    spoken = text_of(elements)
    assert spoken.count(HOSTILE) >= 10 + 3 * len(evidence)
    assert checked(html(audit_page(audit, HOSTILE)))


def robustness(words=HOSTILE):
    share = Interval(0.5, 0.4, 0.6)
    attacks = [AttackResult(words, words, share, 10, 5, 2, 1.0, bounded) for bounded in (True, False)]
    points = [CurvePoint(at, share) for at in (0.1, 0.2)]
    flags = [Flag(words, raised, words, words, words) for raised in (True, False)]
    facts = {"suite": words, "epsilon": 0.1, "norm": "linf", "examples": 10, "probed": 5, "members": 2, "classes": 3}
    facts |= {"pool": words, "surrogate": words, "seed": words, "seconds": 1.0, "on_survivors": True, "beyond": 1}
    return Robustness(share, share, attacks, points, points, flags, [0], facts)


def test_an_evaluation_of_robustness_stays_text():
    stored = Robustness.from_json(robustness().to_json())
    spoken = text_of(checked(html(robustness_page(stored, HOSTILE))))
    assert spoken.count(HOSTILE) > 15
    assert f"Robustness: {HOSTILE}" in spoken


@pytest.mark.slow
def test_a_demo_stays_text():
    problem = replace(demo.PROBLEMS[0], name=HOSTILE, title=HOSTILE, loss_name=HOSTILE, pool_name=HOSTILE)
    numbers = {"ensemble": 0.3, "individual": 0.4, "diversity": 0.1}
    runs = [
        demo.DemoRun(HOSTILE, beta, seed, numbers, numbers, 0.5, (0.1, 0.2, 0.3))
        for beta in (0.0, 1.0)
        for seed in (0, 1)
    ]
    made = dict.fromkeys(("version", "python", "torch", "machine", "command"), HOSTILE) | {"seconds": 1, "networks": 1}
    audits = {(HOSTILE, beta): Audit(Judgement(HOSTILE, [], []), {}) for beta in (0.0, 1.0)}
    result = demo.DemoResult(demo.DemoSettings((0.0, 1.0), (0, 1)), runs, audits, made, (problem,))
    assert text_of(checked(html(demo_page.page(result)))).count(HOSTILE) > 15


@pytest.mark.slow
def test_text_that_cannot_be_drawn_or_encoded_does_no_harm(tmp_path):
    """Formulas are not parsed; control characters and halves of pairs (names of files) are replaced."""
    words = "a$b$ $\\frac$ nul\x00 \x1b[31m half \udcff \ufffe"
    page = html(hostile_page(words)).encode().decode()
    assert text_of(checked(page)).count("a$b$ $\\frac$ nul� �[31m half � �") > 30
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f]", page)
    style.save(FIGURES["detection"](words), tmp_path / "figure.svg")
    style.save(FIGURES["lines"](words), tmp_path / "figure.pdf")
    assert style.as_png(line_figure(words))


def test_the_policy_allows_what_the_page_holds_and_nothing_else():
    elements = checked(html(hostile_page()))
    policies = [a["content"] for tag, a in elements.elements if a.get("http-equiv") == "Content-Security-Policy"]
    (policy,) = policies
    (sheet,) = elements.inside("style")
    digest = base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules == {
        "default-src": "'none'",
        "script-src": "'none'",
        "style-src": "'unsafe-inline'",
        "style-src-elem": f"'sha256-{digest}'",
        "style-src-attr": "'unsafe-inline'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    names = [tag for tag, _ in elements.elements]
    assert names.index("meta") == 2, "a policy counts from where it stands"
    assert elements.elements[3][1]["http-equiv"] == "Content-Security-Policy"
    for text in ("a</script>", "<!-- <script>"):
        with pytest.raises(ValueError, match="cannot hold '</'"):
            markup.document("t", style="", script=text)


OWN = """
document.querySelector("details").open = true;
const styled = query => getComputedStyle(document.querySelector(query));
const box = document.querySelector("figure svg").getBoundingClientRect();
document.documentElement.dataset.own = JSON.stringify({
  folded: document.querySelector("details p").getBoundingClientRect().height, width: box.width, height: box.height,
  border: styled("figure").borderTopStyle, join: styled("svg path").strokeLinejoin, size: styled("svg text").fontSize,
  images: document.images.length,
});
"""


def in_browser(page, folder, width=1280):
    """A page in Chromium: the document after its scripts have run, and what the console said."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed; `apt-get install chromium` brings one")
    file = folder / "page.html"
    file.write_text(page)
    profile = f"--user-data-dir={folder / 'profile'}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", profile, "--enable-logging=stderr"]
    command = [browser, *options, f"--window-size={width},900", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return Elements(done.stdout), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def with_own_script(foreign=""):
    """A page that holds `HOSTILE` in every text, and a script; ``foreign`` is markup at its end."""
    page = html(hostile_page())
    content, sheet = page[page.index("<main>") : page.index("</body>")], Elements(page).inside("style")[0]
    frame = markup.document("own", markup.element("main", None, "CONTENT"), style=sheet, script=OWN)
    return frame.replace("<main>CONTENT</main>", content + foreign)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 500], ids=["desktop", "phone"])
def test_a_browser_shows_a_page_under_its_policy(tmp_path, width):
    """Style sheet, figures, folded parts and the page's script work; markup in texts does nothing."""
    elements, said = in_browser(with_own_script(), tmp_path, width)
    assert said == []
    own = json.loads(elements.values("data-own")[0])
    assert own["folded"] > 0
    assert own["width"] > 200
    assert own["height"] > 100
    assert (own["border"], own["join"], own["size"]) == ("solid", "round", "11px")
    assert own["images"] == 0
    assert elements.values("data-ran") == []


def test_a_browser_runs_and_loads_nothing_that_is_not_the_page_s_own(tmp_path):
    """Markup that got into the file in spite of everything is blocked by the policy."""
    foreign = (
        f"<script>{RUN}</script><img src=x onerror='{RUN}'><style>figure {{ border: 9px dotted }}</style>"
        f"<script src='data:text/javascript,{RUN}'></script><iframe src='data:text/html,x'></iframe>"
    )
    elements, said = in_browser(with_own_script(foreign), tmp_path)
    assert json.loads(elements.values("data-own")[0])["border"] == "solid"
    assert elements.values("data-ran") == []
    assert len(said) >= 5
    assert all("Content Security Policy" in line for line in said)


@pytest.mark.slow
def test_the_command_for_reports_on_a_hostile_result(hostile_results, tmp_path, monkeypatch):
    monkeypatch.setenv("DISSENSUS_RUNS", str(tmp_path / "runs"))
    out = tmp_path / "studies.html"
    result = CliRunner().invoke(app, ["study", "report", "ldr/figure-5", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert HOSTILE in text_of(checked(out.read_text()))


@pytest.mark.slow
def test_labels_do_not_touch_the_panel_beside_them():
    figure = figures.detection({"a": torch.arange(9.0)}, {"near": {"a": torch.arange(9.0) + 2}})
    figure.draw_without_rendering()
    left, right = figure.axes
    gap = right.yaxis.label.get_window_extent().x0 - left.get_tightbbox().x1
    assert gap > 0.15 * figure.dpi


def test_large_numbers_have_commas_and_no_exponent():
    assert [str(Number(value)) for value in (1813.6, 12.345, -99_999.0, 0.5)] == ["1,810", "12.3", "-100,000", "0.5"]
    assert str(Number(20_345.0, 1234.5, 54_321.0, form=".4g")) == "20,340 (1,230 to 54,300)"
    assert str(Number(4_321.0, error=1_500.0)) == "4,320 ± 2,000"
    outputs = torch.tensor([[-3.0], [3.01]]) + torch.linspace(0, 1, 60)
    audit = ds.audit(outputs, torch.linspace(0, 1, 60), task="regression", train=(outputs, outputs.mean(0) + 1e-4))
    words = audit.summary() + " ".join(audit.judgement.reasons)
    assert "e+0" not in words
    assert re.search(r"\d,\d\d\d", words)
