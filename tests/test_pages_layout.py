"""Layout of pages: contents, filter, explained columns, values on hover, rows of figures and narrow screens."""

import re
import shutil
import subprocess

import pytest

from dissensus.pages import Drawing, Number, Page, PageTable, Section, Text, charts, html
from dissensus.pages.parts import counted
from dissensus.pages.style import as_svg

LINE = charts.Line("a line", [0.25, 0.5, 0.75], [0.0, 0.0, 0.0])


def chart(panels=1):
    return charts.line_chart([1.0, 2.0, 3.0], "x", [charts.Panel("", "y", [LINE])] * panels)


def test_three_sections_are_listed_and_two_are_not():
    sections = [Section(f"Part {i}: a & b", [Text("words")]) for i in range(3)]
    text = html(Page("title", sections))
    links = re.findall(r'<li><a href="#([^"]+)">', text)
    assert links == ["part-0-a-b", "part-1-a-b", "part-2-a-b"]
    assert all(f'<h2 id="{link}">' in text for link in links)
    assert "<nav" not in html(Page("title", sections[:2]))


def test_columns_are_explained_below_the_table_and_on_hover():
    text = html(Page("title", [PageTable(("β", "gap"), [["0", Number(1.0)]], columns={"gap": "test less training"})]))
    assert '<th scope="col" class="number" title="test less training">gap</th>' in text
    assert "<b>gap</b>: test less training. " in text


def test_marked_points_and_bars_say_their_values():
    circles = list(as_svg(chart(), "").iter("circle"))
    assert [circle[0].text for circle in circles] == [
        f"a line\nx: {x}\ny: {y}" for x, y in ((1, 0.25), (2, 0.5), (3, 0.75))
    ]
    across, down = ([float(circle.get(name)) for circle in circles] for name in ("cx", "cy"))
    assert across == sorted(across)
    assert down == sorted(down, reverse=True)


@pytest.mark.parametrize(
    ("widths", "expected"),
    [([1, 1], ["", ""]), ([1, 1, 1], ["", "", "beside"]), ([1, 2, 1], ["beside", "whole", "beside"])],
)
def test_no_figure_stands_beside_a_gap(widths, expected):
    text = html(Page("title", [Drawing(chart(width), "caption") for width in widths]))
    assert [name or "" for name in re.findall(r'<figure(?: class="(\w+)")?>', text)] == expected


def test_nouns_follow_their_number():
    assert [counted(i, "epoch") for i in (0, 1, 2)] == ["0 epochs", "1 epoch", "2 epochs"]


PROBE = """
<pre id="wide"></pre><iframe width="390" height="900" src="page.html"></iframe>
<script>
onload = () => {
  const page = document.querySelector("iframe").contentDocument;
  const field = page.querySelector("input");
  field.value = "second SEED";
  field.dispatchEvent(new Event("input"));
  const sizes = [...page.querySelectorAll("svg")].map(
    svg => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width);
  const shown = [...page.querySelectorAll("[data-filter]")].filter(entry => !entry.hidden).map(entry => entry.tagName);
  document.querySelector("#wide").textContent =
    [page.documentElement.scrollWidth <= 390, Math.min(...sizes) >= 1, page.querySelector("output").textContent,
      ...shown].join("|");
};
</script>"""


def test_a_phone_shows_whole_pages_and_the_filter_works(tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed; `apt-get install chromium` brings one")
    wide = PageTable([f"column {i}" for i in range(20)], [[Number(1.0)] * 20])
    rows = PageTable(("study",), [["a"], ["b"]], keywords=["first seed", "Second seed"])
    parts = [rows, wide, Drawing(chart()), Drawing(chart(3)), Section("b", [Text("words")], keywords="second seed")]
    (tmp_path / "page.html").write_text(html(Page("title", parts, filter="Find:")))
    (tmp_path / "probe.html").write_text(PROBE)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [browser, *options, "--allow-file-access-from-files", "--dump-dom", (tmp_path / "probe.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert re.search(r'<pre id="wide">(.*?)</pre>', done.stdout)[1] == "true|true|1 of 2 shown|TR|SECTION"
