"""What the ADP paper's figures show: features and how alike they are, and figures of maps, matrices, curves, counts."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

from dissensus import Ensemble, nets
from dissensus.pages import charts, html, markup, style
from dissensus.pages.parts import Page
from dissensus.studies import labels, library
from dissensus.studies import page as study_page
from dissensus.studies.figures import figures
from dissensus.studies.procedures import features
from dissensus.studies.results import Report
from dissensus.studies.spec import resolved
from dissensus.studies.summary import MAX_MAPPED, summarise

METHODS = ("baseline", "adp-2-0", "adp-2-0.5")
MADE = {
    "version": "0",
    "python": "3",
    "packages": {},
    "hardware": "any",
    "seeds": [0, 1],
    "networks": 18,
    "searched_networks": 0,
    "seconds": 60.0,
    "peak_mib": None,
    "data": [],
}


def summary(study, rows):
    settings = resolved(library.load(study), "laptop", {}, "x")
    report = {"study": study, "scale": "laptop", "made": MADE, "rows": rows, "spec": settings.to_dict()}
    return summarise(Report.from_json(report))


def row(method, seed, measures, **fields):
    return {"data": "fashion-mnist", "method": method, "seed": seed, "measures": measures, **fields}


def drawn_figures(study, rows):
    """Figures and titles of made-up rows, and the SVG of each, whose words lie within the picture."""
    result = figures(library.load(study), summary(study, rows))
    return [(figure, title, markup.written(style.as_svg(figure, title))) for figure, title in result]


def legend_words(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def assert_nothing_is_cut(figure):
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    for text in [*figure.legends, *(axes.title for axes in figure.axes), *figure.texts]:
        box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= width, text
        assert box.y1 <= height, text


NETWORKS = {
    "mlp": (lambda: nets.mlp(6, 4, (10, 9)), (6,), 9),
    "cnn": (lambda: nets.cnn(1, 4, 8, (3, 5)), (1, 8, 8), 5 * 2 * 2),
    "vanilla_cnn": (lambda: nets.vanilla_cnn(4, 1, 28), (1, 28, 28), 50),
    "resnet20": (lambda: nets.resnet20(4, 1), (1, 8, 8), 64),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_hidden_features_are_what_goes_into_the_last_linear_layer(name):
    build, shape, width = NETWORKS[name]
    ensemble = Ensemble(build, members=3, seed=1).train()
    before = {key: value.clone() for key, value in ensemble.state_dict().items()}
    x = torch.randn(7, *shape, generator=torch.Generator().manual_seed(0))
    result = features.hidden(ensemble, x, batch_size=3)
    assert result.shape == (3, 7, width)
    assert ensemble.training
    assert ensemble.body.training
    assert not result.requires_grad
    assert all(parameter.requires_grad and parameter.grad is None for parameter in ensemble.parameters())
    assert all(torch.equal(value, before[key]) for key, value in ensemble.state_dict().items())
    for index in range(3):
        member = ensemble.member(index).eval()
        last = [layer for layer in member.modules() if isinstance(layer, nn.Linear)][-1]
        with torch.no_grad():
            torch.testing.assert_close(last(result[index]), member(x))


def test_members_without_a_linear_layer_are_refused():
    ensemble = Ensemble(lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), members=2)
    with pytest.raises(ValueError, match="`ensemble` must have members with a linear layer; got Sequential"):
        features.hidden(ensemble, torch.zeros(1, 1, 3, 3))


def textbook_cka(x, y):
    """HSIC(K, L) / √(HSIC(K, K) HSIC(L, L)) with kernels [N, N] that are centred by H = I − 1/N."""
    centre = np.eye(len(x)) - 1 / len(x)
    first, second = (centre @ (features_of_member @ features_of_member.T) @ centre for features_of_member in (x, y))
    return np.trace(first @ second) / math.sqrt(np.trace(first @ first) * np.trace(second @ second))


def test_similarity_is_centred_kernel_alignment():
    draw = torch.Generator().manual_seed(0)
    member_features = torch.randn(3, 40, 6, generator=draw) + 5
    member_features[1] += member_features[0]
    pairs = [
        textbook_cka(member_features[a].double().numpy(), member_features[b].double().numpy())
        for a, b in combinations(range(3), 2)
    ]
    assert features.similarity(member_features) == pytest.approx(np.mean(pairs), rel=1e-9)
    assert 0 < features.similarity(member_features) < 1


def test_similarity_sees_neither_rotation_nor_scale_nor_place():
    draw = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, 30, 5, dtype=torch.float64, generator=draw)
    rotation = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64, generator=draw)).Q
    assert features.similarity(torch.stack([first, first])) == pytest.approx(1, abs=1e-12)
    assert features.similarity(torch.stack([first, 1e-3 * first @ rotation + 7])) == pytest.approx(1, abs=1e-9)
    moved = features.similarity(torch.stack([1e4 * first @ rotation - 2, second]))
    assert moved == pytest.approx(features.similarity(torch.stack([first, second])), rel=1e-9)
    assert math.isnan(features.similarity(first.unsqueeze(0)))
    assert math.isnan(features.similarity(torch.stack([first, torch.ones_like(first)])))


def test_maps_keep_classes_together_and_fill_a_square():
    draw = torch.Generator().manual_seed(2)
    labels = torch.arange(60) % 3
    member_features = 20 * torch.eye(3, 8)[labels] + torch.randn(2, 60, 8, generator=draw)
    maps = features.plane_maps(member_features, labels)
    assert features.plane_maps(member_features, labels) == maps, "the seed decides"
    coordinates = torch.tensor(maps)
    assert coordinates.shape == (2, 60, 3)
    assert coordinates[..., 2].long().equal(labels.expand(2, -1))
    assert coordinates[..., :2].abs().amax((1, 2)).tolist() == pytest.approx([1, 1])
    for points in coordinates[..., :2]:
        centres = torch.stack([points[labels == label].mean(0) for label in range(3)])
        assert torch.cdist(points, centres).argmin(1).equal(labels)


def test_maps_of_few_examples_and_of_dead_features():
    maps = features.plane_maps(
        torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3])
    )
    assert [point[2] for point in maps[0]] == [0, 1, 2, 3]
    assert features.plane_maps(torch.ones(1, 5, 8), torch.zeros(5, dtype=torch.long)) == [[[0.0, 0.0, 0]] * 5]


def test_a_summary_keeps_maps_matrices_flags_and_curves_of_several_kinds():
    nan = math.nan
    rows = [
        row(
            "baseline",
            0,
            {"a": 1.0},
            map=[[[0.5, -1.0, 3]] * 700],
            matrices={"pgd_0.05": [[0.0, 0.2], [0.4, nan]]},
            flags={"standard_0.01": ["transfer stronger"], "adaptive_0.01": []},
            curves={"accuracy": [0.1, 0.2], "count": [4.0, 0.0, 2.0], "true_positive_rate_fgsm": [0.5]},
        ),
        row(
            "baseline",
            1,
            {"a": 3.0},
            map=[[[9.0, 9.0, 9]]],
            matrices={"pgd_0.05": [[1.0, 0.4], [nan, nan]]},
            flags={"standard_0.01": ["gradients", "transfer stronger"], "adaptive_0.01": []},
            curves={"count": [0.0, 2.0, 2.0], "accuracy": [0.3, 0.4, 0.5], "true_positive_rate_pgd": [1.0]},
        ),
    ]
    (point,) = summary("adp/figure-3", rows).to_json()["points"]
    assert point["measures"] == {"a": [2.0, 1.0, 2, [1.0, 3.0]]}
    assert point["seeds"] == [0, 1]
    assert point["map"] == [[[0.5, -1.0, 3]] * MAX_MAPPED]
    assert point["matrices"] == {"pgd_0.05": [[0.5, 0.3], [0.4, None]]}
    assert point["flags"] == {"standard_0.01": ["gradients", "transfer stronger"], "adaptive_0.01": []}
    means = {name: curve["mean"] for name, curve in point["curves"].items()}
    assert means == {
        "accuracy": [0.2, 0.3],
        "count": [2.0, 1.0, 2.0],
        "true_positive_rate_fgsm": [0.5],
        "true_positive_rate_pgd": [1.0],
    }
    assert point["curves"]["count"]["error"] == [2.0, 1.0, 0.0]
    (without_extras,) = summary("adp/figure-3", [row("baseline", 0, {"a": 1.0})]).to_json()["points"]
    assert set(without_extras) == {"data", "method", "seeds", "measures"}


def test_matrices_are_drawn_in_per_cent_with_members_and_all():
    names = ("pgd_0.05", "targeted_mim_0.05", "mim_0.05")
    matrix = [[0.0, 0.314, 1.0], [0.512, 0.046, 0.2], [0.1, math.nan, 0.91]]
    result = drawn_figures(
        "adp/figure-3", [row(m, s, {}, matrices=dict.fromkeys(names, matrix)) for m in METHODS for s in (0, 1)]
    )
    assert [title for _, title, _ in result] == [f"fashion-mnist, {method}" for method in METHODS]
    for figure, title, svg in result:
        first, second, third, unused = figure.axes
        assert first.get_title(loc="left") == "PGD 0.05\naccuracy, %"
        assert second.get_title(loc="left") == "targeted MIM 0.05\ntarget reached, %"
        assert not unused.axison
        assert [text.get_text() for text in first.texts] == ["0", "31", "100", "51", "5", "20", "10", "–", "91"]
        places = {text.get_text(): text.get_position() for text in first.texts}
        assert places["51"] == (0.5, 1.5), "crafted on member 2, tried on member 1"
        assert [label.get_text() for label in first.get_xticklabels()] == ["1", "2", "all"]
        assert [label.get_text() for label in first.get_yticklabels()] == ["1", "2", "all"]
        assert first.yaxis_inverted()
        assert (first.get_ylabel(), second.get_ylabel(), third.get_xlabel()) == ("crafted on", "", "tried on")
        assert {axes.collections[0].get_clim() for axes in (first, second, third)} == {(0, 1)}
        for text_part in ("targeted MIM 0.05", "crafted on", "tried on", ">31<", ">all<", title):
            assert text_part in svg
        assert_nothing_is_cut(figure)
    (large,) = drawn_figures("adp/figure-3", [row("baseline", 0, {}, matrices={"pgd_0.05": [[0.5] * 9] * 9})])
    assert_nothing_is_cut(large[0])


def test_maps_are_drawn_with_a_square_per_member_and_a_colour_per_class():
    points = [[[math.sin(i + k), math.cos(i * k), i % 10] for i in range(100)] for k in range(3)]
    rows = [row(m, s, {"features_similarity": 0.5 + s / 10}, map=points) for m in METHODS for s in (0, 1)]
    result = drawn_figures("adp/figure-2", rows)
    assert [title for _, title, _ in result] == [f"fashion-mnist, {method}" for method in METHODS]
    for figure, title, svg in result:
        assert [axes.get_title(loc="left") for axes in figure.axes] == ["member 1", "member 2", "member 3"]
        for axes, member_points in zip(figure.axes, points, strict=True):
            assert len(axes.collections) == 10
            assert axes.collections[4].get_offsets().tolist() == [point[:2] for point in member_points if point[2] == 4]
            assert len({tuple(collection.get_facecolor()[0]) for collection in axes.collections}) == 10
            assert not axes.get_xticks().size
            assert not axes.get_yticks().size
        assert legend_words(figure) == list(labels.CLASSES["fashion-mnist"])
        assert f"{title}: similarity of members 0.55" in svg
        assert ">sneaker<" in svg
        assert len(svg) < 200_000
        assert_nothing_is_cut(figure)
    many_classes = [[[0.0, 0.0, i] for i in range(100)]] * 4
    ((figure, _, _),) = drawn_figures("adp/figure-2", [row("baseline", 0, {}, map=many_classes)])
    assert not figure.legends
    assert len([axes for axes in figure.axes if axes.axison]) == 4


def test_curves_of_detection_have_areas_and_the_diagonal():
    def rates(power):
        return [(i / 100) ** power for i in range(101)]

    rows = [
        row(
            m,
            s,
            {"auroc_nonmaximal_volume_fgsm": 0.75, "auroc_nonmaximal_volume_pgd": math.nan},
            curves={"true_positive_rate_fgsm": rates(1 / 3), "true_positive_rate_pgd": rates(0.5)},
        )
        for m in METHODS
        for s in (0, 1)
    ]
    result = drawn_figures("adp/figure-4", rows)
    assert [title for _, title, _ in result] == [f"fashion-mnist, {method}" for method in METHODS]
    for figure, _, svg in result:
        (axes,) = figure.axes
        fgsm, _, chance = axes.lines
        assert list(fgsm.get_xdata()) == pytest.approx([i / 100 for i in range(101)])
        assert list(fgsm.get_ydata()) == pytest.approx(rates(1 / 3), rel=1e-5)
        assert (list(chance.get_xdata()), list(chance.get_ydata())) == ([0, 1], [0, 1])
        assert legend_words(figure) == ["FGSM, area 0.750", "PGD"]
        assert "false positive rate" in svg
        assert_nothing_is_cut(figure)
    spoilt = [row("baseline", 0, {"auroc_nonmaximal_volume_fgsm": math.nan})]
    assert drawn_figures("adp/figure-4", spoilt) == []


def test_a_histogram_has_an_outline_per_method_and_medians():
    def counts(position):
        return [10.0 * (i == position) for i in range(60)]

    medians = [-3.26, -7.26, -0.00058]
    rows = [
        row(m, s, {"log_nonmaximal_volume": medians[k]}, curves={"accuracy": [0.5], "count": counts(50 - k - s)})
        for k, m in enumerate(METHODS)
        for s in (0, 1)
    ]
    ((figure, title, svg),) = drawn_figures("adp/figure-5", rows)
    assert title == "fashion-mnist"
    (axes,) = figure.axes
    outlines = axes.patches[1::2]
    for k, outline in enumerate(outlines):
        values, edges, _ = outline.get_data()
        assert list(values) == [5.0 * (i in (50 - k, 49 - k)) for i in range(60)], "the mean over seeds"
        assert list(edges) == pytest.approx([-30 + 0.5 * i for i in range(61)])
    assert legend_words(figure) == ["baseline, median −3.3", "adp-2-0, median −7.3", "adp-2-0.5, median −0.00058"]
    assert "logarithm of ensemble diversity" in svg
    assert "number of test examples" in svg
    assert_nothing_is_cut(figure)
    assert drawn_figures("adp/figure-5", [row("baseline", 0, {"log_nonmaximal_volume": -3.0})]) == []


def test_the_legend_of_the_plane_lies_within_the_picture():
    clouds = [(f"masksembles-{i}", [[0.8, 0.5], [0.9, 0.4]]) for i in range(7)]
    curves = [("independent errors", [0, 1], [1, 1]), ("flipped predictions", [0, 1], [1, 0])]
    assert_nothing_is_cut(charts.scatter_chart(clouds, curves, "accuracy", "diversity", "cifar10"))


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("error_rate", "ensemble's error rate"),
        ("member_error_rate", "members' error rate"),
        ("worst_member_error_rate", "worst member's error rate"),
        ("nonmaximal_volume", "ensemble diversity"),
        ("log_nonmaximal_volume", "log of ensemble diversity"),
        ("features_similarity", "similarity of members' features (CKA)"),
        ("accuracy_fgsm_0.02", "FGSM 0.02"),
        ("accuracy_bim_0.1", "BIM 0.1"),
        ("accuracy_carlini_wagner_0.01", "C&W 0.01"),
        ("accuracy_elastic_net_1.0", "EAD 1.0"),
        ("accuracy_jsma_0.1", "JSMA 0.1"),
        ("accuracy_apgd_0.01", "APGD 0.01"),
        ("accuracy_square_0.01", "Square 0.01"),
        ("standard_0.01", "worst case, standard 0.01"),
        ("adaptive_0.01", "worst case, adaptive 0.01"),
        ("auroc_nonmaximal_volume_fgsm", "ED, FGSM"),
        ("auroc_nonmaximal_volume_carlini_wagner", "ED, C&W"),
        ("auroc_mean_energy_pgd", "mean energy, PGD"),
        ("fooled_elastic_net", "fooled by EAD"),
        ("transfer_pgd_0.05", "transfer, PGD 0.05"),
        ("transfer_targeted_mim_0.05", "transfer, targeted MIM 0.05"),
        ("targeted_mim_0.05", "targeted MIM 0.05"),
        ("true_positive_rate_elastic_net", "EAD"),
        ("accuracy_top5", "accuracy top5"),
        ("auroc_predictive_diversity_mnist", "PDS, mnist"),
    ],
)
def test_measures_have_words(name, label):
    assert labels.measure_label(name) == label


def test_the_page_shows_flags(monkeypatch, tmp_path):
    raised = {
        "baseline": {"standard_0.01": [], "adaptive_0.01": []},
        "adp-2-0": {"standard_0.01": ["Square stronger"], "adaptive_0.01": ["gradients", "losses far apart"]},
    }
    rows = [row(m, s, {"standard_0.01": 0.1}, flags=flags) for m, flags in raised.items() for s in (0, 1)]
    result = summary("adp/figure-3", [*rows, row("adp-2-0.5", 0, {"standard_0.01": 0.2})])
    monkeypatch.setattr(study_page, "find_all", lambda name, root, spec: [result])
    page = html(study_page.page(["adp/figure-3"], tmp_path))
    assert "<dt>baseline</dt><dd>flags raised: none</dd>" in page
    settings = "flags raised: Square stronger (standard 0.01); gradients, losses far apart (adaptive 0.01)"
    assert f"<dt>adp-2-0</dt><dd>{settings}</dd>" in page
    assert page.count("flags raised") == 2
    assert "worst case, standard 0.01" in page


def test_the_page_says_what_is_left_at_the_worst_case():
    measures = {
        "accuracy": 0.9,
        "accuracy_pgd_0.1": 0.5,
        "accuracy_carlini_wagner_0.1": 0.7,
        "accuracy_fgsm_0.2": 0.3,
        "standard_0.1": 0.02,
        "adaptive_0.1": 0.0123,
    }
    rows = [row(method, seed, measures) for method in METHODS for seed in (0, 1)]
    text = html(Page("", study_page.worst_cases(summary("adp/table-2", rows))))
    assert "at ε&nbsp;=&nbsp;0.1: the paper&#x27;s attacks leave 50.0% (baseline), 50.0% (adp-2-0)" in text
    assert "; the worst case leaves 1.2% (baseline), 1.2%" in text
    assert text.index(">50.0%<") < text.index(">2.0%<") < text.index(">1.2%<")
    assert "30.0%" not in text  # another ε
    assert "70.0%" not in text  # a parameter that is no ε
    assert not study_page.worst_cases(summary("adp/table-1", [row("baseline", 0, {"accuracy": 0.9})]))


def test_the_page_lists_many_ensembles_in_rows_and_very_many_by_best_and_worst():
    rows = []
    for number, method in enumerate("abcdefg"):
        rows.append(row(method, 0, {"accuracy": 0.9, "accuracy_pgd_0.1": 0.5, "standard_0.1": 0.1 + number / 100}))
    text = html(Page("", study_page.worst_cases(summary("adp/table-2", rows))))
    assert "at ε&nbsp;=&nbsp;0.1: the worst case leaves 10.0% (a), 11.0% (b), 12.0% (c)," in text
    shares = "".join(f'<td class="number">{share}</td>' for share in ("90.0%", "50.0%", "12.0%"))
    assert f'<tr><td class="short">c</td>{shares}</tr>' in text
    assert ">examples</td>" in text
    assert ">all</td>" in text
    many_rows = [row(f"m{n}", 0, {"standard_0.1": n / 100}) for n in range(13)]
    text = html(Page("", study_page.worst_cases(summary("adp/table-2", many_rows))))
    assert "the worst case leaves 0.0% (m0) to 12.0% (m12)." in text
