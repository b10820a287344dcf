"""The library of studies: every table and figure of the papers has one, and each says what it must."""

import functools
import itertools
import re
import tomllib
from pathlib import Path

import pytest

import dissensus
from dissensus.studies import library, spec
from dissensus.studies.procedures import builtin
from dissensus.studies.procedures.audit import SUMMARIES
from dissensus.studies.validation import check

SPECS = Path(dissensus.__file__).parent / "studies" / "specs"
REQUIRED = [
    "collusion/table-1",
    "collusion/figure-1",
    "collusion/figure-2",
    "collusion/figure-3",
    "collusion/figure-4",
    "collusion/figure-5",
    "collusion/figure-6",
    "collusion/figure-7",
    "collusion/figure-8",
    "collusion/figure-9",
    "collusion/figure-10",
    "collusion/figure-11",
    "collusion/figure-12",
    "collusion/figure-13",
    "collusion/figure-14",
    "collusion/figure-15",
    "collusion/figure-16",
    "collusion/figure-17",
    "collusion/figure-18",
    "ldr/table-1",
    "ldr/table-2",
    "ldr/table-3",
    "ldr/table-4",
    "ldr/table-5",
    "ldr/table-6",
    "ldr/table-7",
    "ldr/table-8",
    "ldr/table-9",
    "ldr/table-10",
    "ldr/figure-1",
    "ldr/figure-2",
    "ldr/figure-3",
    "ldr/figure-4",
    "ldr/figure-5",
    "adp/table-1",
    "adp/table-2",
    "adp/table-3",
    "adp/table-4",
    "adp/table-5",
    "adp/figure-1",
    "adp/figure-2",
    "adp/figure-3",
    "adp/figure-4",
    "adp/figure-5",
    "masksembles/figure-1",
    "masksembles/figure-2",
    "masksembles/figure-3",
    "masksembles/figure-3-imagenet",
    "audit/table-1",
    "audit/figure-1",
    "sharing/figure-1",
    "sharing/table-1",
]
WITHOUT_NUMBERS = {"ldr/figure-3": "pictures"}
"""Studies that are looked at: nothing is expected of a number, and their note says why."""
ILLUSTRATIONS = {"collusion/figure-1", "collusion/figure-7", "ldr/figure-1", "adp/figure-1"}
"""Drawings and summaries in the papers, without data: all data of these studies is ours."""
WITHOUT_DOWNLOAD = {
    "made-folder",
    "diabetes",
    "digits",
    "made-images",
    "made-images-six",
    "made-groups",
    "made-table",
    "made-curve",
    "made-plane",
}
PROCEDURES = {
    "train",
    "formula",
    "audit",
    "masks",
    "share",
    "attack",
    "transfer",
    "detect",
    "generalise",
    "timing",
    "features",
    "collusion",
    "volume",
    "disagreement",
}
WITHOUT_DATA = {"formula", "masks"}
OBJECTIVES = {
    "independent",
    "joint",
    "augmented",
    "gradient_adjusted",
    "negative_correlation",
    "adp",
    "a2d",
    "divdis",
    "ldr",
    "learner_dropout",
}
BESIDE_THE_GRID = {"epoch", "members", "data"}

every_study = pytest.mark.parametrize("name", REQUIRED)


@functools.cache
def study(name):
    path = SPECS / f"{name}.toml"
    return spec.parse(tomllib.loads(path.read_text()), name, str(path))


@functools.cache
def at_scale(name, scale):
    return spec.resolved(study(name), scale, {}, name)


every_scale = pytest.mark.parametrize(
    ("name", "scale"),
    [(name, scale) for name in REQUIRED for scale in tomllib.loads((SPECS / f"{name}.toml").read_text())["scales"]],
)


def points(expectation):
    """Points of a grid that an expectation names; pooled rows of the audit lie beside its grid."""
    than = expectation.than
    axes = {axis: value if isinstance(value, list) else [value] for axis, value in than.items()}
    others = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [point for point in (expectation.at, *others) if point and point.get("case") not in SUMMARIES]


def test_every_table_and_figure_has_its_study_and_nothing_else_lies_there():
    studies = {f"{path.parent.name}/{path.stem}" for path in SPECS.rglob("*.toml")}
    assert studies == set(REQUIRED)
    assert studies == set(library.names())


@every_study
def test_a_study_has_three_scales(name):
    assert {"smoke", "laptop", "paper"} <= set(study(name).scales) <= set(spec.SCALES)


@every_scale
def test_a_study_resolves_at_every_scale(name, scale):
    resolved = at_scale(name, scale)
    assert resolved.name == name
    assert not resolved.scales


@every_study
def test_a_study_names_only_known_things(name):
    settings = library.load(name)
    for scale in study(name).scales:
        check(spec.resolved(settings, scale, {}, name), name)


@every_study
def test_a_study_has_reference_title_and_figure(name):
    settings = study(name)
    kind, number, *_ = name.split("/")[1].split("-")
    assert f"{kind.capitalize()} {number}" in settings.reference
    assert settings.title
    assert settings.figure is not None
    assert settings.procedure in PROCEDURES
    assert settings.objective is None or settings.objective.name in OBJECTIVES
    assert settings.evaluation.measures
    assert len(settings.evaluation.measures) == len(set(settings.evaluation.measures))


@every_study
def test_data_beside_the_papers_is_data_of_the_study_and_leaves_some_but_in_illustrations(name):
    paper = at_scale(name, "paper")
    if name in ILLUSTRATIONS:
        assert paper.beside == paper.data
    else:
        assert set(paper.beside) < set(paper.data)


@every_study
def test_the_claim_of_a_study_is_one_sentence(name):
    claim = study(name).claim
    assert claim.endswith(".")
    assert not re.search(r"[.!?;]\s", claim), claim
    assert claim[0].isupper()


@every_study
def test_a_study_names_its_members_and_objective_or_the_study_it_uses(name):
    settings = study(name)
    if settings.uses:
        assert settings.members is None
        assert settings.search is None
        assert settings.objective is not None, "measures need a loss and a pool"
    elif settings.procedure not in WITHOUT_DATA:
        assert settings.members is not None
        assert settings.objective is not None


@every_study
def test_the_study_that_is_used_has_the_same_points(name):
    settings = study(name)
    if not settings.uses:
        return
    assert settings.uses in REQUIRED
    assert not study(settings.uses).uses
    for scale in study(name).scales:
        settings_at_scale, used = at_scale(name, scale), at_scale(settings.uses, scale)
        assert set(settings_at_scale.data) <= set(used.data), scale
        assert settings_at_scale.grid == used.grid, scale
        objective, used_objective = settings_at_scale.objective, used.objective
        assert (objective.name, objective.loss, objective.pool) == (
            used_objective.name,
            used_objective.loss,
            used_objective.pool,
        )


@every_scale
def test_every_scale_is_there_with_a_cost_and_a_grid_of_lists(name, scale):
    resolved = at_scale(name, scale)
    minutes = study(name).cost[scale]
    assert minutes
    assert all(value > 0 for value in minutes.values())
    for axis, values in resolved.grid.items():
        assert isinstance(values, list), axis
        assert values, axis
        assert len(values) == len(set(values)), axis


@every_study
def test_smoke_takes_seconds_and_downloads_nothing(name):
    settings = at_scale(name, "smoke")
    assert set(settings.data) <= WITHOUT_DOWNLOAD
    assert sum(study(name).cost["smoke"].values()) <= 0.3
    if settings.procedure in WITHOUT_DATA or settings.uses:
        return
    assert len(settings.grid["seed"]) <= 2
    epochs = settings.optimisation.epochs if settings.search is None else settings.search.epochs
    assert epochs <= 4
    assert settings.search is not None or settings.optimisation.examples <= 400


@every_study
def test_costs_do_not_fall_as_scales_grow(name):
    def on_two_cores(scale):
        minutes = study(name).cost[scale]
        return minutes.get("cpu", 0) + 50 * minutes.get("gpu", 0)

    costs = [on_two_cores(scale) for scale in study(name).scales]
    assert costs == sorted(costs)


@every_study
def test_a_study_has_expectations_or_a_reason_for_none(name):
    settings = study(name)
    if name in WITHOUT_NUMBERS:
        assert not settings.expect
        assert "nothing is" in settings.note
    else:
        assert settings.expect


@every_study
def test_expectations_can_be_measured(name):
    settings = study(name)
    paper = at_scale(name, "paper")
    for e in settings.expect:
        if e.every:
            continue
        scales = [at_scale(name, scale) for scale in settings.scales]
        at_paper = [spec.on_data(paper, data).evaluation.measures for data in paper.data]
        by_data = [spec.on_data(s, data).evaluation.measures for s in scales for data in s.data if data in e.data]
        others = [e.than_measure] if isinstance(e.than_measure, str) else e.than_measure
        for dataset in e.sets or [""]:
            for measure in [e.measure, *filter(None, others), *(condition.measure for condition in e.given)]:
                wanted = f"{measure}_{dataset}" if dataset else measure
                known = by_data if e.data else [s.evaluation.measures for s in scales] if e.sets else at_paper
                assert any(wanted in measures for measures in known), (e.says, wanted)
        for point in points(e):
            assert not e.along or (e.along in paper.grid and e.along not in point), e.says
            for axis, value in point.items():
                assert axis in paper.grid or axis in BESIDE_THE_GRID, (e.says, axis)
                grids = [grid for scale in settings.scales if axis in (grid := at_scale(name, scale).grid)]
                assert not grids or any(value in grid[axis] for grid in grids), (e.says, axis, value)
        data_names = {data for scale in study(name).scales for data in at_scale(name, scale).data}
        assert set(e.data) <= data_names, e.says


@every_scale
def test_expectations_are_single_points_of_the_grid(name, scale):
    """All axes with more than one value are settings, but for the seeds."""
    settings = at_scale(name, scale)
    for e in settings.expect:
        if e.data and not set(e.data) & set(settings.data):
            continue
        for point in points(e):
            if set(point) <= set(settings.grid):
                open_axes = {axis for axis, values in settings.grid.items() if len(values) > 1} - {
                    *point,
                    "seed",
                    e.along,
                }
                assert not open_axes, (e.says, open_axes)


@every_study
def test_an_expectation_is_a_number_a_bound_or_a_comparison(name):
    for e in study(name).expect:
        if e.every:
            continue
        bounded = e.low is not None or e.high is not None
        assert (e.paper is not None) + bounded + bool(e.direction) == 1, e.says
        assert bool(e.than or e.than_measure) + bool(e.along) == bool(e.direction), e.says
        assert bool(e.along) == e.direction.endswith("inside"), e.says
        assert e.at != e.than or e.than_measure, e.says
        assert not e.sets or (e.direction and not e.along), e.says
        assert e.paper is None or e.tolerance > 0, e.says
        assert e.direction != "similar" or e.tolerance > 0, e.says
        assert not bounded or (e.low if e.low is not None else -1e9) <= (e.high if e.high is not None else 1e9), e.says


@every_study
def test_parts_of_a_claim_are_directions_or_bounds(name):
    """Every group is summed up by one statement, on data that its parts are about; a paper's number is no part."""
    settings = study(name)
    for group in {e.group for e in settings.expect} - {""}:
        parts = [e for e in settings.expect if e.group == group]
        (whole,) = (e for e in settings.expect if e.every == group)
        assert len(parts) > 1
        assert all(e.paper is None and not e.along for e in parts), group
        for scale in ("laptop", "paper"):
            resolved = at_scale(name, scale)
            for data in whole.data or resolved.data:
                if data not in resolved.data:
                    continue
                measures = spec.on_data(resolved, data).evaluation.measures
                here = [e for e in parts if not e.data or data in e.data]
                assert here, (group, data)
                assert {e.measure for e in here} <= set(measures), (scale, data)


PARTLY_RUN = {
    ("collusion/figure-6", "gpu"): "ResNet-34",
    ("collusion/figure-17", "gpu"): "ResNet-34",
    ("collusion/figure-15", "laptop"): "about 10 as well",
}
"""Claims of which a scale has a part of the points only, and what it lacks; their notes say so."""


@every_scale
def test_a_scale_has_all_points_of_a_claim_or_the_note_says_what_it_lacks(name, scale):
    settings = at_scale(name, scale)
    first, *others = settings.expect or [None]
    if scale == "smoke" or first is None or not first.every:
        return
    lacking = set()
    for e in others:
        if e.group == first.every and (not e.data or set(e.data) & set(settings.data)):
            for point in points(e):
                axes = {axis for axis in point if axis in settings.grid}
                lacking |= {(axis, str(point[axis])) for axis in axes if point[axis] not in settings.grid[axis]}
    if (name, scale) in PARTLY_RUN:
        assert lacking, "it has all of them by now"
        assert re.search(rf"At the scale {scale} .*{PARTLY_RUN[name, scale]}", study(name).note)
    else:
        assert not lacking


ROWS_OF_ADP = {"adp/table-2": 60, "adp/table-3": 9, "adp/table-4": 16, "adp/table-5": 6}
"""Comparisons of ADP's tables: with the baseline, with the entropy term (table 2), CIFAR-10 (3) or ADP alone (4)."""


@pytest.mark.parametrize(("name", "rows"), ROWS_OF_ADP.items())
def test_every_row_of_adps_tables_is_part_of_the_claim(name, rows):
    first, *others = study(name).expect
    assert first.every == "claim"
    parts = [e for e in others if e.group == "claim"]
    assert len(parts) == rows
    assert all(e.at["method"] == "adp-2-0.5" and e.direction for e in parts)
    measured = {e.measure for e in others if e.paper is not None} - {"accuracy"}
    assert {e.measure for e in parts} == measured


@every_scale
def test_every_study_has_three_seeds_for_a_verdict(name, scale):
    procedure = builtin.PROCEDURES[study(name).procedure]
    one_is_enough = procedure.exact or procedure.trials or study(name).procedure == "masks"  # its draws are seeds
    if scale != "smoke" and not one_is_enough:
        assert len(at_scale(name, scale).grid["seed"]) >= 3


def test_detection_is_judged_only_where_attacks_fool():
    for e in study("adp/figure-4").expect:
        if e.measure.startswith("auroc"):
            ((measure, low),) = ((condition.measure, condition.low) for condition in e.given)
            assert (measure, low) == (f"fooled_{e.measure.removeprefix('auroc_nonmaximal_volume_')}", 0.95)


@every_study
def test_expectations_are_unique_and_state_their_number(name):
    settings = study(name)
    claims = [e.says for e in settings.expect]
    assert len(claims) == len(set(claims))
    for e in settings.expect:
        if e.paper is None:
            continue
        numbers = [float(n) for n in re.findall(r"\d+(?:\.\d+)?", e.says)]
        fits = [n for n in numbers if e.paper in (pytest.approx(n, abs=1e-9), pytest.approx(n / 100, abs=1e-9))]
        assert fits, f"{e.says!r} carries {e.paper}"


@every_study
def test_a_papers_number_is_held_against_its_own_data_and_protocol_only(name):
    """A reduced scale with other networks, or other data, is never judged by the paper's numbers."""
    settings = study(name)
    for e in settings.expect:
        if e.paper is None or settings.procedure in WITHOUT_DATA:
            continue
        assert e.data, f"{e.says}: say of which data"
        assert not set(e.data) & set(at_scale(name, "smoke").data), e.says
        holder = study(settings.uses) if settings.uses else settings
        if holder.scales["laptop"].keys() & {"members", "optimisation"}:
            assert not set(e.data) & set(at_scale(name, "laptop").data), e.says


@every_study
def test_figures_draw_what_the_study_measures(name):
    for scale in study(name).scales:
        settings = at_scale(name, scale)
        assert settings.figure.lines
        assert settings.figure.x not in {"epoch"} or settings.evaluation.curves
        assert not settings.figure.groups or settings.figure.groups in study(name).grid


def test_studies_differ_in_what_they_compute():
    digests = {}
    for name in REQUIRED:
        for scale in study(name).scales:
            settings = at_scale(name, scale)
            if settings.uses or settings.procedure in WITHOUT_DATA:
                continue
            digests.setdefault((settings.digest(), name.split("/")[0]), []).append(name)
    shared = [names for names in digests.values() if len(set(names)) > 1]
    assert not shared
