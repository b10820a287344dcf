"""Figures that papers draw by hand, computed: learners that collude, the volume they span, where they disagree."""

import itertools
import math

import numpy as np
import pytest
import torch

from dissensus.diversity import decompose, nonmaximal_volume
from dissensus.diversity.volume import nonmaximal_units
from dissensus.objectives.disagreement import hardness
from dissensus.pages import illustrations, markup, style
from dissensus.studies import datasets, library, toy_datasets, verdicts
from dissensus.studies import run as runner
from dissensus.studies.figures import figures
from dissensus.studies.procedures import collusion, disagreement, volume
from dissensus.studies.run_folders import find, read_report
from dissensus.studies.spec import SpecError, resolved
from dissensus.studies.summary import summarise
from dissensus.studies.verdicts import AGREES

STUDIES = ("collusion/figure-1", "collusion/figure-7", "ldr/figure-1", "adp/figure-1")


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Data


def test_the_curve_is_exact_for_tests_and_noisy_for_training():
    x, y = toy_datasets.curve("test", 5)
    assert x.flatten().tolist() == [-1, -0.5, 0, 0.5, 1]
    torch.testing.assert_close(y, torch.tensor([math.sin(3 * v) for v in (-1, -0.5, 0, 0.5, 1)]).unsqueeze(1))
    x, y = toy_datasets.curve("train", 2000)
    noise = y - (3 * x).sin()
    assert float(noise.std()) == pytest.approx(toy_datasets.CURVE_NOISE, rel=0.1)
    assert float(x.abs().max()) <= 1
    assert torch.equal(x, toy_datasets.curve("train", 2000)[0])


@pytest.mark.parametrize(("part", "share"), [("train", toy_datasets.OUTSIDE_SHARE), ("test", 0.5), ("unlabelled", 1)])
def test_the_inputs_of_the_plane_contradict_each_other_out_of_distribution_only(part, share):
    x, labels, outside = toy_datasets.plane(part, 4000)
    assert float(outside.double().mean()) == pytest.approx(share, abs=0.03)
    signs = x.sign()
    for chosen, expected in ((~outside, 1), (outside, -1)):
        if chosen.any():
            agreement = signs[chosen].prod(1).mean()
            assert float(agreement) == pytest.approx(expected, abs=0.05)
    if (~outside).any():  # either input tells the classes apart
        assert float((signs[~outside, 0] == 2 * labels[~outside] - 1).double().mean()) > 0.98
    assert float(labels[outside].double().mean()) == pytest.approx(0.5, abs=0.1)
    assert float((signs[outside, 0] * (2 * labels[outside] - 1)).mean()) == pytest.approx(0, abs=0.15)


def test_parts_of_toy_data_are_separate_draws_and_studies_take_their_first_examples():
    parts = [toy_datasets.plane(part, 50)[0] for part in ("train", "test", "unlabelled")]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(parts, 2))
    settings = resolved(library.load("ldr/figure-1"), "smoke", {"optimisation.examples": 30}, "x")
    loaded = datasets.load("made-plane", 0, settings)
    assert torch.equal(loaded.train[0], toy_datasets.plane("train")[0][:30])
    assert torch.equal(loaded.test[1], toy_datasets.plane("test")[1])
    assert (loaded.outputs, datasets.load("made-curve", 3, settings).outputs) == (2, 1)


# Collusion: learners that shift their outputs


@pytest.mark.parametrize("members", [2, 5])
@pytest.mark.parametrize("shift", [0.7, -1.3])
def test_a_shift_adds_the_same_to_members_error_and_diversity_and_nothing_to_the_ensembles(members, shift):
    outputs, targets = draws(members, 40, 1), draws(40, 1, seed=1)
    before, after = (
        decompose(o, targets, loss="mse", pool="score") for o in (outputs, collusion.collude(outputs, shift))
    )
    f = outputs.numpy()
    expected = 2 * shift * (shift + f[0] - f[1])[:, 0] / members
    np.testing.assert_allclose(after.ensemble, before.ensemble, atol=1e-12)
    np.testing.assert_allclose(after.diversity - before.diversity, expected, atol=1e-12)
    np.testing.assert_allclose(after.individual - before.individual, expected, atol=1e-12)
    assert torch.equal(outputs, draws(members, 40, 1)), "outputs are not changed"


def test_the_study_of_collusion_shifts_the_independent_learners(tmp_path):
    folder = runner.run("collusion/figure-1", "smoke", root=tmp_path)
    rows = {(row.value("case"), row.seed): row for row in read_report(folder).rows}
    assert list(rows) == [(case, seed) for case in ("independent", "shifted", "joint") for seed in (0, 1)]
    f = [np.array(rows["independent", 0].curves[f"member_{i}"]) for i in range(1, 6)]
    shifted = [np.array(rows["shifted", 0].curves[f"member_{i}"]) for i in range(1, 6)]
    np.testing.assert_allclose(shifted[0] - f[0], collusion.SHIFT, atol=1e-6)
    np.testing.assert_allclose(shifted[1] - f[1], -collusion.SHIFT, atol=1e-6)
    np.testing.assert_allclose(shifted[2:], f[2:])
    rise = 2 * (1 + np.mean(f[0] - f[1])) / 5
    before, after = (rows[case, 0].measures["diversity"] for case in ("independent", "shifted"))
    assert after - before == pytest.approx(rise, rel=1e-5)
    target = np.sin(3 * np.array(rows["joint", 0].curves["x"]))
    joint = np.array([rows["joint", 0].curves[f"member_{i}"] for i in range(1, 6)])
    assert rows["joint", 0].measures["error"] == pytest.approx(((joint.mean(0) - target) ** 2).mean(), rel=1e-4)
    assert rows["joint", 1].curves is None
    assert [rows[case, 0].run is None for case in ("independent", "shifted", "joint")] == [False, True, False]


# The volume that members span


def slow_units(logits, label):
    rows = []
    for member in logits:
        probs = np.exp(member - member.max())
        probs = probs / probs.sum()
        others = np.where(np.arange(len(probs)) == label, 0.0, probs)
        rows.append(others / math.sqrt(sum(others**2)))
    return np.array(rows)


def test_units_are_normalised_probabilities_without_the_label():
    logits, labels = draws(3, 6, 5), torch.tensor([0, 4, 2, 1, 3, 0])
    units = nonmaximal_units(logits, labels)
    for b, label in enumerate(labels.tolist()):
        np.testing.assert_allclose(units[b], slow_units(logits[:, b].numpy(), label), atol=1e-12)


@pytest.mark.parametrize("members", [2, 3, 4])
def test_vectors_in_space_keep_their_angles_and_span_the_volume(members):
    logits = 2 * draws(members, 1, 10)
    units = slow_units(logits[:, 0].numpy(), 3)
    space = illustrations.in_space(units)
    assert space.shape == (members, members)
    np.testing.assert_allclose(space @ space.T, units @ units.T, atol=1e-12)
    expected = float(nonmaximal_volume(logits, torch.tensor([3])))
    assert np.linalg.det(space) ** 2 == pytest.approx(expected, abs=1e-5)


def test_vectors_that_are_alike_span_nothing():
    alike = illustrations.in_space(np.tile([[0.6, 0.0, 0.8]], (3, 1)))
    assert np.linalg.det(alike) == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(np.linalg.norm(alike, axis=1), 1)


def test_the_typical_example_is_the_one_nearest_to_the_medians():
    logits = torch.full((2, 3, 3), -50.0)
    logits[:, :, 0] = 0.0
    logits[:, :, 1] = -1.0
    logits[1, 1, 2] = -1.0  # the second example: between alike and apart
    logits[1, 2, 1], logits[1, 2, 2] = -50.0, -1.0
    labels = torch.zeros(3, dtype=torch.long)
    volumes = nonmaximal_volume(logits, labels)
    assert volumes.tolist() == pytest.approx([0, 0.5, 1], abs=1e-4)
    assert volume.typical([logits], labels) == 1
    assert volume.typical([logits, logits], labels) == 1


def test_the_study_of_volumes_shows_one_example_of_every_method(tmp_path):
    folder = runner.run("adp/figure-1", "smoke", root=tmp_path)
    rows = read_report(folder).rows
    assert [(row.value("method"), row.seed) for row in rows] == [
        (method, seed) for method in ("baseline", "adp-2-0.5") for seed in (0, 1)
    ]
    shown = [row.curves for row in rows if row.seed == 0]
    assert shown[0]["label"] == shown[1]["label"]
    label = int(shown[0]["label"][0])
    for curves in shown:
        members = np.array([curves[f"member_{i}"] for i in (1, 2, 3)])
        assert members.shape == (3, 10)
        np.testing.assert_allclose(np.linalg.norm(members, axis=1), 1)
        np.testing.assert_array_equal(members[:, label], 0)
    assert all(row.curves is None for row in rows if row.seed != 0)
    baseline, adp = (row.measures["nonmaximal_volume"] for row in rows if row.seed == 0)
    assert adp > 2 * baseline


# Where members disagree


def sure(labels):
    """Logits of members that are sure of these classes ``[M, N]``."""
    return 20.0 * torch.nn.functional.one_hot(torch.tensor(labels), 2)


def test_measures_of_disagreement_look_at_their_own_examples():
    labels = torch.tensor([0] * 9 + [1])
    train = sure([[0] * 10, [0] * 9 + [0]]) + torch.tensor([0.0, 0.0])
    train[1, 9] = torch.tensor([0.0, 1.0])  # a wrong member and one that leans to the label: the highest loss
    outputs = disagreement.PlaneOutputs(
        train,
        labels,
        torch.arange(10) == 9,
        sure([[0, 1, 0, 1], [0, 1, 1, 0]]),
        torch.tensor([0, 0, 1, 0]),
        torch.tensor([False, False, True, True]),
    )
    assert outputs.high_loss.tolist() == [False] * 9 + [True]
    assert hardness(train, labels).argmax() == 9
    expected = {
        "accuracy": 0.5,
        "member_accuracy": 0.5,
        "disagreement_inside": 0.0,
        "disagreement_outside": 1.0,
        "disagreement_high_loss": 1.0,
        "disagreement_low_loss": 0.0,
        "outside_share": 1.0,
    }
    assert {name: measure(outputs) for name, measure in disagreement.MEASURES.items()} == expected


def test_disagreement_of_maps_is_a_mean_over_pairs():
    probs = torch.rand(3, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    for row, column in np.ndindex(2, 4):
        p = probs[:, row, column]
        pairs = [p[0] * (1 - p[1]) + p[1] * (1 - p[0]), p[0] + p[2] - 2 * p[0] * p[2], p[1] + p[2] - 2 * p[1] * p[2]]
        assert illustrations.pair_disagreement(probs)[row, column] == pytest.approx(sum(pairs) / 3)


def test_the_study_of_disagreement_keeps_maps_and_what_methods_disagree_on(tmp_path):
    folder = runner.run("ldr/figure-1", "smoke", root=tmp_path)
    rows = read_report(folder).rows
    assert [(row.value("method"), row.seed) for row in rows] == [
        (method, seed) for method in ("independent", "a2d", "ldr") for seed in (0, 1)
    ]
    independent, a2d, ldr = (row.curves for row in rows if row.seed == 0)
    x, labels, _ = toy_datasets.plane("train")
    for curves in (independent, a2d, ldr):
        for name in ("member_1", "member_2"):
            assert len(curves[name]) == disagreement.PLACES**2
            corners = curves[name][0], curves[name][-1]  # from below left to above right: from class 0 to class 1
            assert corners[0] < 0.5 < corners[1]
        np.testing.assert_allclose(curves["x"], x[:, 0], atol=1e-3)
        assert curves["label"] == labels.tolist()
    assert set(a2d) - set(independent) == {"unlabelled_x", "unlabelled_y"}
    assert set(ldr) - set(independent) == {"high_loss"}
    assert sum(ldr["high_loss"]) == round(disagreement.HIGH_LOSS * len(x))


# Studies as a whole


BAD_CHANGES = {
    "a case": (
        "collusion/figure-1",
        {"grid.case": ["independent", "apart"]},
        "no case of 'grid.case' is called 'apart'",
    ),
    "no case": ("collusion/figure-1", {"grid": {"seed": [0]}}, "'grid' needs the axis 'case'"),
    "an axis": ("collusion/figure-1", {"grid.beta": [0.5]}, "the axis 'beta'"),
    "data without a curve": ("collusion/figure-1", {"data": ["made-table"]}, "the data 'made-table' is no curve"),
    "one member": ("collusion/figure-1", {"members.count": 1}, "'members.count' must be at least 2"),
    "an objective without β": ("collusion/figure-1", {"objective.name": "independent"}, "the parameter 'beta'"),
    "a measure of training data": ("collusion/figure-1", {"evaluation.measures": ["gap"]}, "is called 'gap'"),
    "a search": ("collusion/figure-1", {"search.trials": 2}, "the procedure 'collusion' has no search"),
    "data without a plane": ("ldr/figure-1", {"data": ["made-table"]}, "the data 'made-table' is no plane"),
    "another measure": ("ldr/figure-1", {"evaluation.measures": ["error"]}, "is called 'error'"),
    "one member that disagrees": ("ldr/figure-1", {"members.count": 1}, "must have at least two members"),
}


@pytest.mark.parametrize("case", BAD_CHANGES)
def test_what_a_study_lacks_is_named(case, tmp_path):
    study, changes, message = BAD_CHANGES[case]
    with pytest.raises(SpecError, match=f"cannot be run: .*{message}"):
        runner.run(study, "smoke", changes=changes, root=tmp_path)


def words_of(figure):
    titles = [axes.get_title(place) for axes in figure.axes for place in ("left", "center")]
    return "\n".join([*titles, *(text.get_text() for axes in figure.axes for text in axes.texts)])


@pytest.mark.parametrize("name", STUDIES)
def test_the_shipped_result_does_not_contradict_the_paper_and_is_drawn_whole(name, tmp_path):
    summary = find(name, tmp_path)
    assert summary.scale == "paper"
    assert summary.provenance.fingerprint == resolved(library.load(name), "paper", {}, "x").settings_fingerprint()
    assert {verdict.setting for verdict in summary.verdicts} == {verdicts.REDUCED}, "the data is ours, not the paper's"
    assert sum(verdicts.in_short(summary.verdicts, verdicts.REDUCED).claim.values()) == 1
    assert {verdict.verdict for verdict in summary.verdicts} <= {AGREES, verdicts.UNDECIDED}
    ((figure, title),) = figures(library.load(name), summary)
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0) > -0.02, "nothing is cut on the left and below"
    assert box.x1 < width + 0.02
    assert box.y1 < height + 0.02
    assert "<svg" in markup.written(style.as_svg(figure, title))


def test_figures_say_which_method_has_which_numbers(tmp_path):
    for name, expected in (
        ("collusion/figure-1", ("independent", "shifted", "joint", "diversity: ")),
        ("ldr/figure-1", ("independent", "A2D", "LDR", "disagreement, OOD: ")),
        ("adp/figure-1", ("baseline", "ADP(2, 0.5)", "ensemble diversity: ", "squared volume", "true class")),
        ("collusion/figure-7", ("diversity", "share that is bias", "rise of loss, drop 20%", "generalisation gap")),
    ):
        summary = find(name, tmp_path)
        ((figure, _),) = figures(library.load(name), summary)
        assert [words for words in expected if words not in words_of(figure)] == [], name


def test_a_result_without_curves_has_no_picture(tmp_path):
    folder = runner.run(
        "collusion/figure-1", "smoke", changes={"grid": {"case": ["independent"], "seed": [3]}}, root=tmp_path
    )
    summary = summarise(read_report(folder))
    assert len(figures(library.load("collusion/figure-1"), summary)) == 1
    bare = summary.points[0].__class__(summary.points[0].data, summary.points[0].axes, summary.points[0].measures)
    assert figures(library.load("collusion/figure-1"), summary.__class__(**{**vars(summary), "points": [bare]})) == []


def test_other_numbers_of_members_are_drawn_without_a_box():
    panel = illustrations.VolumePanel("two", "", [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], 0)
    figure = illustrations.spanned_volumes([panel], "class", "prediction")
    bars, box = figure.axes
    assert len(bars.patches) == 2 * 3 + 1
    assert not box.patches
    assert "1.00" in box.get_title("center")
