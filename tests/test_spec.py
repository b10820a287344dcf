"""A study's file is checked key by key, and its digest tells what is computed."""

import tomllib
from pathlib import Path

import pytest

import dissensus
from dissensus.studies import spec
from dissensus.studies.spec import SpecError, parse, resolved, to_toml

SPECS = Path(dissensus.__file__).parent / "studies" / "specs"
FILES = sorted(SPECS.rglob("*.toml"))
NAMES = [f"{path.parent.name}/{path.stem}" for path in FILES]
every_file = pytest.mark.parametrize("path", FILES, ids=NAMES)


def settings(**changes):
    """A small study as a file would say it."""
    return {
        "title": "A study",
        "reference": "Figure 2",
        "claim": "It is small.",
        "data": ["diabetes"],
        "members": {"network": "mlp", "count": 3},
        "objective": {"name": "augmented", "loss": "mse", "pool": "score"},
        "grid": {"beta": [0.0, 1.0], "seed": [0, 1]},
        "optimisation": {"epochs": 5, "lr": 0.01},
        "evaluation": {"measures": ["error", "diversity"]},
        "figure": {"x": "beta", "lines": ["error"]},
        "cost": {"smoke": {"cpu": 0.1}, "paper": {"gpu": 3}},
        "expect": [
            {"says": "more", "measure": "diversity", "at": {"beta": 1.0}, "than": {"beta": 0.0}, "direction": "greater"}
        ],
        "scales": {"smoke": {"grid": {"beta": [1.0]}, "optimisation": {"epochs": 2}}, "paper": {}},
        **changes,
    }


def parsed(**changes):
    return parse(settings(**changes), "collusion/figure-2", "a.toml")


def message(**changes):
    with pytest.raises(SpecError) as caught:
        parsed(**changes)
    return str(caught.value)


def library(path):
    name = f"{path.parent.name}/{path.stem}"
    return parse(tomllib.loads(path.read_text()), name, str(path))


def test_results_of_another_release_are_not_taken_for_this_ones(monkeypatch):
    before = parsed().digest()
    monkeypatch.setattr("dissensus.__version__", "9.9")
    assert parsed().digest() != before


@pytest.mark.parametrize(
    ("expect", "words"),
    [
        ([{"says": "x"}], "'expect[0].measure' is missing"),
        (
            [{"says": "x", "measure": "y", "low": 0.0, "group": "g"}, {"says": "z", "measure": "y", "every": "g"}],
            "'expect[1].measure'",
        ),
        ([{"says": "x", "every": "g"}], "'expect[0].every' must be the group of other statements; got 'g'."),
        ([{"says": "x", "every": "rows"}, {"says": "z", "measure": "y", "low": 0.0, "group": "row"}], "'row'"),
        ([{"says": "x", "every": "g", "group": "g"}], "'expect[0].every'"),
        ([{"says": "x", "measure": "y", "given": [{"low": 0.5}]}], "expect[0].given[0].measure is missing"),
    ],
)
def test_a_statement_has_a_measure_or_a_group(expect, words):
    assert words in message(expect=expect)


def test_a_good_file_becomes_a_study():
    study = parsed()
    assert study.name == "collusion/figure-2"
    assert study.paper == "collusion"
    assert study.members == spec.Members("mlp", 3)
    assert study.objective.pool == "score"
    assert study.expect[0].at == {"beta": 1.0}
    assert study.optimisation.batch_size == 128, "what is not said has its default"


def test_parsing_does_not_change_its_input():
    before, original = settings(), settings()
    resolved(parse(original, "collusion/figure-2", "a.toml"), "smoke", {"optimisation.lr": 0.5}, "a.toml")
    assert original == before


@pytest.mark.parametrize(
    ("changes", "key", "suggestion"),
    [
        ({"titel": "x"}, "'titel'", "'title'"),
        ({"optimisation": {"epoch": 3}}, "'optimisation.epoch'", "'epochs'"),
        ({"members": {"network": "mlp", "counts": 3}}, "'members.counts'", "'count'"),
        ({"expect": [{"says": "x", "measure": "y", "then": {}}]}, "'expect[0].then'", "'than'"),
        ({"scales": {"smokey": {}}}, "'scales.smokey'", "'smoke'"),
        ({"scales": {"smoke": {"optimisation": {"epoch": 3}}}}, "'scales.smoke.optimisation.epoch'", "'epochs'"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(changes, key, suggestion):
    text = message(**changes)
    assert text.startswith("a.toml: ")
    assert f"key {key} is not known" in text
    assert f"Did you mean {suggestion}?" in text


def test_a_key_like_no_other_is_refused_with_all_known_keys():
    text = message(search={"zzz": 1})
    assert "'search.zzz'" in text
    assert "It may be one of trials, drawn, space" in text


@pytest.mark.parametrize(
    ("changes", "key", "expected_type", "received"),
    [
        ({"title": 3}, "'title'", "text", "a whole number 3"),
        ({"data": "diabetes"}, "'data'", "a list", "text 'diabetes'"),
        ({"data": ["diabetes", 4]}, "'data[1]'", "text", "a whole number 4"),
        ({"optimisation": {"epochs": 2.5}}, "'optimisation.epochs'", "a whole number", "a number 2.5"),
        ({"optimisation": {"epochs": "ten"}}, "'optimisation.epochs'", "a whole number", "text 'ten'"),
        ({"optimisation": {"lr": "fast"}}, "'optimisation.lr'", "a number", "text 'fast'"),
        ({"optimisation": {"cut_at": [0.5, "late"]}}, "'optimisation.cut_at[1]'", "a number", "text 'late'"),
        ({"evaluation": {"curves": 1}}, "'evaluation.curves'", "true or false", "a whole number 1"),
        ({"grid": [1, 2]}, "'grid'", "a table", "a list [1, 2]"),
        ({"scales": {"smoke": {"title": 3}}}, "'scales.smoke.title'", "text", "a whole number 3"),
    ],
)
def test_a_wrong_type_is_refused_with_file_key_and_value(changes, key, expected_type, received):
    text = message(**changes)
    assert text == f"a.toml: key {key} must be {expected_type}; got {received}."


@pytest.mark.parametrize("section", ["members", "objective", "optimisation", "evaluation", "figure", "search"])
def test_a_section_must_be_a_section(section):
    assert f"key '{section}' must be a section; got a whole number" in message(**{section: 3})


@pytest.mark.parametrize("yes", [True, False])
def test_booleans_are_not_numbers(yes):
    assert "must be a whole number; got true or false" in message(optimisation={"epochs": yes})
    assert "must be a number; got true or false" in message(optimisation={"lr": yes})
    assert "must be text; got true or false" in message(title=yes)


def test_whole_numbers_are_numbers():
    study = parsed(optimisation={"lr": 1})
    assert study.optimisation.lr == 1.0
    assert isinstance(study.optimisation.lr, float)


@pytest.mark.parametrize(
    ("changes", "key", "limits"),
    [
        ({"optimisation": {"epochs": 0}}, "'optimisation.epochs'", "at least 1"),
        ({"optimisation": {"lr": -0.1}}, "'optimisation.lr'", "at least 0"),
        ({"optimisation": {"momentum": 1.5}}, "'optimisation.momentum'", "between 0 and 1"),
        ({"optimisation": {"patience": 0}}, "'optimisation.patience'", "at least 1"),
        ({"optimisation": {"lr": float("nan")}}, "'optimisation.lr'", "at least 0"),
        ({"members": {"network": "mlp", "count": 0}}, "'members.count'", "between 1 and 100000"),
        ({"evaluation": {"test_fraction": 2}}, "'evaluation.test_fraction'", "between 0 and 1"),
        ({"search": {"trials": 0}}, "'search.trials'", "at least 1"),
        ({"expect": [{"says": "x", "measure": "y", "tolerance": -1}]}, "'expect[0].tolerance'", "at least 0"),
        ({"scales": {"smoke": {"optimisation": {"epochs": 0}}}}, "'scales.smoke.optimisation.epochs'", "at least 1"),
    ],
)
def test_an_impossible_value_is_refused_with_its_limits(changes, key, limits):
    text = message(**changes)
    assert text.startswith(f"a.toml: key {key} must be {limits}; got ")


def test_a_word_of_a_closed_list_is_refused_with_the_nearest():
    text = message(objective={"name": "augmented", "pool": "probabilty"})
    assert "key 'objective.pool' must be one of 'probability', 'score', 'vote'; got 'probabilty'" in text
    assert "Did you mean 'probability'?" in text
    assert "key 'optimisation.optimizer' must be one of" in message(optimisation={"optimizer": "lion"})
    assert "key 'expect[0].direction'" in message(expect=[{"says": "x", "measure": "y", "direction": "more"}])


@pytest.mark.parametrize("key", ["title", "reference", "claim", "data"])
def test_missing_keys_are_refused(key):
    original = settings()
    del original[key]
    with pytest.raises(SpecError, match=rf"a\.toml: key {key} is missing"):
        parse(original, "collusion/figure-2", "a.toml")
    assert "key members.network is missing" in message(members={"count": 3})


@pytest.mark.parametrize(
    "cost", [{"smoke": 3}, {"smoke": {"tpu": 1}}, {"smoke": {"cpu": "long"}}, {"huge": {"cpu": 1}}]
)
def test_a_cost_is_minutes_of_a_processor_per_scale(cost):
    (scale,) = cost
    assert f"key 'cost.{scale}" in message(cost=cost)


def test_a_study_belongs_to_a_paper():
    with pytest.raises(SpecError, match=r"a\.toml: studies lie in a folder of one of collusion, .*; got 'other'"):
        parse(settings(), "other/figure-1", "a.toml")


def test_a_scale_overrides_settings():
    smoke, paper = (resolved(parsed(), scale, {}, "a.toml") for scale in ("smoke", "paper"))
    assert smoke.optimisation == spec.Optimisation(epochs=2, lr=0.01), "a section is changed key by key"
    assert smoke.grid == {"beta": [1.0]}, "a grid is replaced whole"
    assert paper.grid == {"beta": [0.0, 1.0], "seed": [0, 1]}
    assert not smoke.scales


def test_a_scale_may_bring_a_section_of_its_own():
    study = parsed(scales={"smoke": {"search": {"trials": 3}}, "paper": {}})
    assert resolved(study, "smoke", {}, "a.toml").search == spec.Search(trials=3)
    assert resolved(study, "paper", {}, "a.toml").search is None


def test_an_unknown_scale_is_refused_with_those_there_are():
    with pytest.raises(SpecError) as caught:
        resolved(parsed(), "papers", {}, "a.toml")
    assert "collusion/figure-2 has no scale 'papers'; it has smoke, paper." in str(caught.value)
    assert "Did you mean 'paper'?" in str(caught.value)
    with pytest.raises(SpecError, match="has no scale 'laptop'"):
        resolved(parsed(), "laptop", {}, "a.toml")


def test_changes_are_made_by_dotted_keys():
    changes = {"optimisation.epochs": 7, "grid.seed": [5], "members.options.width": 8, "title": "Mine", "uses": "x"}
    study = resolved(parsed(), "paper", changes, "a.toml")
    assert study.optimisation.epochs == 7
    assert study.optimisation.lr == 0.01
    assert study.grid == {"beta": [0.0, 1.0], "seed": [5]}
    assert study.members.options == {"width": 8}
    assert (study.title, study.uses) == ("Mine", "x")


def test_a_change_has_the_last_word_and_is_checked():
    study = parsed()
    assert resolved(study, "smoke", {"optimisation.epochs": 9}, "a.toml").optimisation.epochs == 9
    with pytest.raises(SpecError, match=r"'optimisation.epoch' is not known. Did you mean 'epochs'\?"):
        resolved(study, "smoke", {"optimisation.epoch": 9}, "a.toml")
    with pytest.raises(SpecError, match="'optimisation.epochs' must be at least 1; got 0"):
        resolved(study, "smoke", {"optimisation.epochs": 0}, "a.toml")
    with pytest.raises(SpecError, match="--set title.sub: 'title' is no section"):
        resolved(study, "smoke", {"title.sub": 1}, "a.toml")


def test_changes_leave_the_study_as_it_was():
    study = parsed()
    resolved(study, "paper", {"grid.seed": [5], "members.options.width": 8}, "a.toml")
    assert study == parsed()


@pytest.mark.parametrize(
    "texts",
    [
        {"title": "Another"},
        {"reference": "Table 9"},
        {"claim": "It is still small."},
        {"note": "A word."},
        {"cost": {"smoke": {"cpu": 99}}},
        {"expect": []},
        {"figure": {"x": "seed"}},
        {"scales": {"smoke": {}, "paper": {}, "laptop": {}}},
    ],
    ids=lambda texts: next(iter(texts)),
)
def test_words_do_not_change_the_digest(texts):
    assert parsed(**texts).digest() == parsed().digest()


@pytest.mark.parametrize(
    "change",
    [
        {"data": ["made-table"]},
        {"data": ["diabetes", "made-table"]},
        {"procedure": "attack"},
        {"uses": "collusion/figure-3"},
        {"members.network": "cnn"},
        {"members.count": 4},
        {"members.options": {"width": 8}},
        {"objective.name": "joint"},
        {"objective.loss": "brier"},
        {"objective.pool": "vote"},
        {"objective.options": {"a": 1}},
        {"grid.beta": [0.0, 0.5]},
        {"grid.alpha": [1.0]},
        {"optimisation.epochs": 6},
        {"optimisation.lr": 0.02},
        {"optimisation.batch_size": 64},
        {"optimisation.optimizer": "sgd"},
        {"optimisation.momentum": 0.9},
        {"optimisation.weight_decay": 0.1},
        {"optimisation.cut_at": [0.5]},
        {"optimisation.cut": 0.2},
        {"optimisation.patience": 5},
        {"optimisation.validation": 0.2},
        {"optimisation.keep": "last"},
        {"optimisation.augment": ["flips"]},
        {"optimisation.examples": 10},
        {"search.trials": 5},
        {"evaluation.measures": ["error"]},
        {"evaluation.curves": True},
        {"evaluation.test_fraction": 0.3},
        {"evaluation.examples": 10},
    ],
    ids=lambda change: next(iter(change)),
)
def test_settings_of_the_computation_change_the_digest(change):
    study = parsed()
    before = resolved(study, "paper", {}, "a.toml").digest()
    assert resolved(study, "paper", change, "a.toml").digest() != before


def test_the_digest_does_not_depend_on_notation():
    original = settings()
    turned = {key: original[key] for key in reversed(original)}
    turned["optimisation"] = {"lr": 0.01, "epochs": 5, "batch_size": 128}
    assert parse(turned, "collusion/figure-2", "b.toml").digest() == parsed().digest()
    assert (
        parsed(optimisation={"epochs": 5, "lr": 1}).digest() == parsed(optimisation={"epochs": 5, "lr": 1.0}).digest()
    )


def test_a_study_of_another_name_has_another_digest():
    assert parse(settings(), "collusion/figure-3", "a.toml").digest() != parsed().digest()


@every_file
def test_a_file_of_the_library_survives_being_written_and_read(path):
    raw = tomllib.loads(path.read_text())
    assert tomllib.loads(to_toml(raw)) == raw
    study = library(path)
    restored = parse({k: v for k, v in tomllib.loads(to_toml(study.to_dict())).items() if k != "name"}, study.name, "b")
    assert restored == study
    assert restored.digest() == study.digest()


@pytest.mark.slow(cases=["adp/*", "ldr/*"])
@every_file
def test_a_resolved_study_survives_being_written_and_read(path):
    study = library(path)
    for scale in study.scales:
        resolved_study = resolved(study, scale, {}, str(path))
        restored = tomllib.loads(to_toml(resolved_study.to_dict()))
        assert restored.pop("name") == study.name
        assert parse(restored, study.name, "spec.toml") == resolved_study


@pytest.mark.parametrize(
    "value",
    [
        "plain",
        'a "quoted" \\ word',
        "β → 1\nnext line\ttab",
        "",
        True,
        False,
        0,
        -3,
        1.0,
        1e-9,
        1e30,
        [],
        [1, 2],
        ["a", "b"],
        [[0.5], [1.5, 2.5]],
        {},
        {"a": {"b": {"c": [1.0]}}},
        {"timm:x.y": 5, "with space": {"k": 1}},
        [{"a": 1, "b": {"c": 2}}, {"a": 2}],
    ],
)
def test_plain_values_survive_as_toml(value):
    assert tomllib.loads(to_toml({"key": value})) == {"key": value}


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_infinities_survive_as_toml(value):
    assert tomllib.loads(to_toml({"key": value})) == {"key": value}
