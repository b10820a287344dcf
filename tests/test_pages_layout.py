"""Layout of pages: contents, filter, explained columns, values on hover, rows of figures and narrow screens."""

import json
import re
import shutil
import subprocess
import warnings

import pytest
import torch

import dissensus as ds
from dissensus.auditing.page import page as audit_page
from dissensus.pages import Badge, Drawing, Number, Page, PageTable, Section, Text, charts, html, style
from dissensus.pages.parts import counted
from dissensus.pages.style import as_svg
from dissensus.reporting.page import page as report_page

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


def titles(figure):
    return [circle[0].text for circle in as_svg(figure, "").iter("circle")]


def test_lines_without_markers_say_values_at_a_few_points():
    long = charts.Line("long", [i / 100 for i in range(101)], [0.0] * 101)
    said = titles(charts.roc_chart([long], "x", "y", ""))
    assert len(said) == 25, "the diagonal of two points is only compared with"
    assert said[:1] + said[-1:] == ["long\nx: 0\ny: 0", "long\nx: 1\ny: 1"]


def test_steps_say_the_middle_and_the_height_of_each():
    steps = charts.histogram([0.0, 2.0, 4.0], [charts.Line("counts", [5.0, 7.0], [0.0] * 2)], "x", "examples", "")
    assert titles(steps) == ["counts\nx: 1\nexamples: 5", "counts\nx: 3\nexamples: 7"]


@style.figure_style()
def test_matrices_with_a_scale_say_their_numbers_and_pictures_do_not():
    figure = style.blank_figure()
    left, right = figure.subplots(1, 2)
    image = left.imshow([[1.0, 0.25], [float("nan"), 1.0]])
    left.set(xlabel="column", ylabel="row")
    figure.colorbar(image, ax=left, label="share")
    right.imshow([[0.0, 1.0]])
    assert titles(figure) == [
        f"row: {row}\ncolumn: {column}\nshare: {share}" for row, column, share in ((0, 0, 1), (0, 1, 0.25), (1, 1, 1))
    ]


def test_names_of_columns_stand_above_numbers_and_say_what_is_beside_them():
    rows = [["a", Number(0.5, 0.25, 0.75), Number(0.5, error=0.1), Number(0.5)]]
    text = html(Page("title", [PageTable(("", "share", "mean", "alone"), rows)]))
    assert '<div class="over"><span>share</span><small>95 % interval</small></div></th>' in text
    assert '<div class="over"><span>mean</span><small class="error"></small></div></th>' in text
    assert '<th scope="col" class="number">alone</th>' in text


def test_long_names_leave_room_for_axes_and_are_whole_on_hover():
    lines = [charts.Line(letter * 300, [0.25, 0.5], [0.0, 0.0]) for letter in "ab"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svg = as_svg(charts.line_chart([1.0, 2.0], "x", [charts.Panel("", "y", lines)]), "")
    texts = [node.text for node in svg.iter("text")]
    assert f"{'a' * 47}…" in texts
    assert not any("a" * 48 in text for text in texts if text)
    assert f"{'b' * 300}\nx: 2\ny: 0.5" in [circle[0].text for circle in svg.iter("circle")]


def test_long_labels_of_axes_are_whole():
    label = "relative increase of the test squared error"
    other = charts.Line("another", LINE.mean, LINE.error)  # two lines have a legend, which leaves less room
    figure = charts.line_chart([1.0, 2.0, 3.0], "x", [charts.Panel("", label, [LINE, other])])
    svg = as_svg(figure, "")
    figure.draw_without_rendering()
    drawn = figure.axes[0].yaxis.label.get_window_extent()
    assert 0 <= drawn.y0 < drawn.y1 <= figure.bbox.height
    assert next(svg.iter("circle"))[0].text == f"a line\nx: 1\n{label}: 0.25"


@style.figure_style()
def test_large_shares_have_few_digits():
    figure = style.blank_figure()
    axes = figure.subplots()
    axes.plot([0, 1], [0.0, 1e30])
    style.percent_axis(axes.yaxis)
    texts = [node.text or "" for node in as_svg(figure, "").iter("text")]
    assert "1e+32%" in texts
    assert max(map(len, texts)) < 10


def test_clouds_of_very_many_points_are_a_picture():
    cloud = [[i / 2000, (i * 7 % 2000) / 2000] for i in range(2000)]
    svg = as_svg(charts.scatter_chart([("pairs", cloud)], [], "x", "y", ""), "")
    assert len(list(svg.iter("image"))) == 1
    assert len(list(svg.iter("circle"))) == 0
    assert len(list(svg.iter("use"))) < 100


def test_contents_stand_before_the_first_figure():
    sections = [Section(f"Part {i}", [Text("words")]) for i in range(3)]
    text = html(Page("title", [Text("opening"), Drawing(chart(), "caption"), *sections]))
    assert text.index("opening") < text.index("<nav") < text.index("<figure")


@pytest.mark.parametrize(
    ("widths", "expected"),
    [([1, 1], ["", ""]), ([1, 1, 1], ["", "", "beside"]), ([1, 2, 1], ["beside", "whole", "beside"])],
)
def test_no_figure_stands_beside_a_gap(widths, expected):
    text = html(Page("title", [Drawing(chart(width), "caption") for width in widths]))
    assert [name or "" for name in re.findall(r'<figure(?: class="(\w+)")?>', text)] == expected


def test_badges_of_a_card_name_their_columns_where_there_are_several():
    def labels(*badges):
        header = ("study", *(f"setting {i}" for i in range(len(badges))))
        text = html(Page("title", [PageTable(header, [["a", *badges]], "cards")]))
        return re.findall(r'data-label="(setting \d)"', text)

    plain, detailed = Badge("not run", ""), Badge("agrees", "good", "4 agree")
    assert labels(plain) == []
    assert labels(detailed) == ["setting 0"]
    assert labels(plain, detailed) == labels(plain, plain) == ["setting 0", "setting 1"]


def test_nouns_follow_their_number():
    assert [counted(i, "epoch") for i in (0, 1, 2)] == ["0 epochs", "1 epoch", "2 epochs"]


def pages():
    """Pages as users get them, and one with every part that may be too wide."""
    wide = PageTable([f"column {i}" for i in range(20)], [[Number(1.0, 0.123, 2.345)] * 20])
    rows = PageTable(("study",), [["a"], ["b"]], keywords=["first seed", "Second seed"])
    long = PageTable(("x", "news"), [["word " * 40, Badge("news " * 20, "good")], ["w" * 300, "v" * 300]], "cards")
    section = Section("b", [Text("words", "note"), long], keywords="second seed")
    yield "parts", Page("t" * 200, [rows, wide, Drawing(chart()), Drawing(chart(2)), section], filter="Find:")
    labels = torch.arange(120) % 4
    drawn = torch.randn(3, 120, 4, generator=torch.Generator().manual_seed(0))
    outputs, inputs = drawn + 3 * torch.eye(4)[labels], torch.rand(120, 1, 8, 8)
    audit = ds.audit(outputs, labels, task="classification", kind="logits", reference=outputs, ood=drawn)
    yield "audit", audit_page(audit, "three networks")
    names, shifted = ["class" * 60, "a class with a long name", "😀", "شبكة"], {"noise": drawn, "s" * 200: drawn}
    report = ds.report(outputs, (inputs, labels), kind="logits", shifted=shifted, names=names)
    yield "report", report_page(report, "three networks")


PROBE = """
<pre id="measured"></pre>
<script>
const right = node => { const range = document.createRange(); range.selectNodeContents(node);
  return range.getBoundingClientRect().right; };
const small = page => Math.min(...[...page.querySelectorAll("svg")].flatMap(svg =>
  [...svg.querySelectorAll("text")].map(text => parseFloat(page.defaultView.getComputedStyle(text).fontSize)
    * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)));
const uneven = page => [...page.querySelectorAll("table")].flatMap(table => [...table.querySelectorAll("th.number")]
  .map(name => [name, table.querySelectorAll("tbody tr")[0].children[name.cellIndex]])
  .filter(([name, cell]) => cell.classList.contains("number") && name.offsetWidth)
  .map(([name, cell]) => Math.abs(right(name.querySelector("span") || name) - right(cell.firstChild))))
  .filter(gap => gap > 6).length;
const narrow = page => [...page.querySelectorAll("main > .scroll > table, section > .scroll > table")]
  .filter(table => table.getBoundingClientRect().width < table.parentElement.clientWidth - 1).length;
const clipped = page => [...page.querySelectorAll(".plot")].filter(e => e.scrollWidth > e.clientWidth + 1).length;
onload = () => {
  const measured = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument;
    return {name: frame.name, width: frame.width, small: small(page), uneven: uneven(page), narrow: narrow(page),
      clipped: clipped(page), over: page.documentElement.scrollWidth - frame.width};
  });
  const page = document.querySelector("iframe").contentDocument, field = page.querySelector("input");
  field.value = "second SEED";
  field.dispatchEvent(new Event("input"));
  const shown = [...page.querySelectorAll("[data-filter]")].filter(entry => !entry.hidden).map(entry => entry.tagName);
  document.querySelector("#measured").textContent =
    JSON.stringify({measured, shown, said: page.querySelector("output").textContent});
};
</script>"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What one run of a browser measures of all pages, on a desktop and on a phone."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed; `apt-get install chromium` brings one")
    folder = tmp_path_factory.mktemp("pages")
    frames = []
    for name, page in pages():
        (folder / f"{name}.html").write_text(html(page))
        frames += [f'<iframe name="{name}" width="{w}" height="900" src="{name}.html"></iframe>' for w in (1280, 390)]
    (folder / "probe.html").write_text("\n".join([*frames, PROBE]))
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
    ]
    command = [browser, *options, "--allow-file-access-from-files", "--dump-dom", (folder / "probe.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(re.search(r'<pre id="measured">(.*?)</pre>', done.stdout)[1])


def test_pages_fit_a_phone_with_text_large_enough_and_names_above_numbers(measured):
    assert [(page["name"], page["width"]) for page in measured["measured"]] == [
        (name, width) for name in ("parts", "audit", "report") for width in ("1280", "390")
    ]
    for page in measured["measured"]:
        assert page["over"] <= 0, f"{page['name']} scrolls sideways at {page['width']} pixels"
        assert page["small"] >= 10.99, f"text of figures of {page['name']} is too small at {page['width']} pixels"
        assert page["uneven"] == 0, f"names of columns of {page['name']} stand beside their numbers"
        assert page["narrow"] == 0, f"tables of {page['name']} have several widths"
        assert page["clipped"] == (page["name"] == "parts" and page["width"] == "390"), (
            "two panels in a figure scroll on a phone"
        )


def test_the_filter_hides_rows_and_sections(measured):
    assert measured["said"] == "1 of 2 shown"
    assert measured["shown"] == ["TR", "SECTION"]
