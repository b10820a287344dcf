"""How a run differs from the paper's setting."""

import pytest

from dissensus.studies import library
from dissensus.studies.protocol import differences, named_axes
from dissensus.studies.spec import Expectation, resolved


def settings(name, scale, **changes):
    return resolved(library.load(name), scale, changes, name).to_dict()


def test_the_paper_does_not_differ_from_itself_and_seeds_do_not_count():
    paper = settings("collusion/figure-18", "paper")
    assert differences(paper, paper, "cifar10") == []
    fewer = settings("collusion/figure-18", "paper", **{"grid.seed": [0], "grid.drop": [0.0, 0.6]})
    assert differences(fewer, paper, "cifar10", named={"drop"}) == []
    assert differences(fewer, paper, "cifar10") == ["drop [0.0, 0.6] instead of [0.0, 0.2, 0.4, 0.6]"]


def test_axes_of_the_grid_count_unless_every_statement_names_its_points():
    paper = settings("collusion/figure-18", "paper")
    run = settings("collusion/figure-18", "paper", **{"grid.lr": [1e-7]})
    assert differences(run, paper, "cifar10", named={"drop"}) == ["lr [1e-07] instead of none"]
    at = [Expectation("s", "m", at={"drop": 0.6, "lr": 0.1}), Expectation("s", "m", at={"drop": 0.0})]
    assert named_axes([*at, Expectation("s", every="claim")]) == {"drop"}
    assert named_axes([]) == set()
    assert differences({**paper, "uses": "adp/table-1"}, paper, "cifar10") == ["uses adp/table-1 instead of none"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimisation.epochs": 8}, "8 of 80 epochs"),
        ({"optimisation.examples": 3000}, "3,000 of all training examples"),
        ({"evaluation.examples": 1000}, "1,000 of all test examples"),
        ({"members.network": "cnn"}, "network cnn instead of resnet18"),
        ({"members.count": 3}, "members 3 instead of 5"),
        ({"optimisation.lr": 0.01}, "lr 0.01 instead of 0.1"),
        ({"optimisation.augment": []}, 'augment none instead of ["crops", "flips", "rotations"]'),
        ({"objective.pool": "score"}, "pool score instead of probability"),
    ],
)
def test_every_setting_that_a_statement_depends_on_counts(change, words):
    run = settings("collusion/figure-18", "paper", **change)
    assert differences(run, settings("collusion/figure-18", "paper"), "cifar10") == [words]


def test_other_data_and_data_beside_the_papers_count():
    paper = settings("collusion/figure-18", "paper")
    run = settings("collusion/figure-18", "paper", data=["cifar10", "fashion-mnist"])
    assert differences(run, paper, "fashion-mnist") == ["fashion-mnist instead of cifar10"]
    beside = {**paper, "data": ["mnist", "cifar10"], "beside": ["mnist"]}
    assert differences(beside, beside, "mnist") == ["mnist instead of cifar10"]
    assert differences(beside, beside, "cifar10") == []


def test_settings_of_single_data_sets_are_compared():
    paper = settings("adp/table-1", "paper")
    assert differences(paper, paper, "mnist") == []
    run = settings("adp/table-1", "paper", **{"by_data.mnist.optimisation.epochs": 4})
    epochs = paper["by_data"]["mnist"]["optimisation"]["epochs"]
    assert differences(run, paper, "mnist") == [f"4 of {epochs} epochs"]
    assert differences(run, paper, "cifar10") == []


def test_only_methods_that_were_run_are_compared():
    paper = settings("ldr/table-2", "paper")
    other = {
        **paper,
        "objective": {**paper["objective"], "options": {"methods": dict(paper["objective"]["options"]["methods"])}},
    }
    other["objective"]["options"]["methods"]["divdis"] = {"objective": "divdis", "unlabelled": "jigsaw"}
    assert differences(other, paper, "imagenet-folder") == ["other methods (divdis)"]
    fewer = {**other, "grid": {**other["grid"], "method": ["single", "a2d"]}}
    assert differences(fewer, paper, "imagenet-folder", named={"method"}) == []


@pytest.mark.parametrize("name", library.names())
def test_smoke_is_a_reduced_setting_of_every_study_that_reads_data(name):
    spec = library.load(name)
    if spec.procedure in ("formula", "masks"):
        return
    run, paper = settings(name, "smoke"), settings(name, "paper")
    assert all(differences(run, paper, data) for data in run["data"])
