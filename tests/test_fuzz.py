"""Ordinary mistakes end in one clear message: no traceback, whatever a user writes into a study or a command.

Mistakes are drawn by `fuzzing` and a seed. Everything up to the first step of a training is run. A mistake that is
found elsewhere belongs into `FOUND`, or into the tables of `fuzzing`.
"""

import functools
from collections import Counter
from functools import partial

import fuzzing
import pytest
import torch
from fuzzing import Mistake, outcome

import dissensus as ds
from dissensus.attacks.robustness import Robustness
from dissensus.metrics import Interval
from dissensus.objectives import augmented, independent
from dissensus.studies import spec
from dissensus.studies.spec import SpecError, checked_value


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with right and wrong files, in which every command here runs; nothing is trained or fetched."""
    folder = tmp_path_factory.mktemp("mistakes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("DISSENSUS_RUNS", str(folder / "runs"))
        patch.setenv("DISSENSUS_DATA", str(folder / "data"))
        fuzzing.stop_before_training(patch)
        fuzzing.make_files(folder)
        yield folder


def failures(kind, seeds, folder):
    """Mistakes that end in a traceback or in a message that names nothing, and how all of them ended."""
    ends, counts = [], Counter()
    for seed in seeds:
        mistake = fuzzing.KINDS[kind](seed)
        end = outcome(mistake, folder)
        counts[end.kind] += 1
        if end.kind in ("traceback", "unclear"):
            ends.append(f"{kind} {seed}: {' '.join(mistake.arguments)}\n  {end.error!r} {end.message[:300]}")
    return ends, counts


@pytest.mark.parametrize(("kind", "count"), [("spec", 90), ("set", 60), ("command", 50)])
def test_mistakes_end_in_one_clear_message(kind, count, workplace, unchecked):
    ends, counts = failures(kind, range(count), workplace)
    assert not ends, "\n".join(ends)
    assert counts["refused"] > count / 2, counts


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("spec", 1100), ("set", 700), ("command", 200)])
def test_thousands_of_mistakes_end_in_one_clear_message(kind, count, workplace, unchecked):
    ends, _ = failures(kind, range(1000, 1000 + count), workplace)
    assert not ends, "\n".join(ends)


STUDY = "study run collusion/figure-15 --scale smoke --set"
ROBUST = (
    "robust --ensemble kept --network mlp --option width=4 --data made-images --epsilon 0.1 --suite quick --examples 2"
)
FOUND = [
    (f"{STUDY} grid.seed=3", "collusion/figure-15.toml with --set grid.seed=3: key 'grid.seed' must be a list"),
    (f"{STUDY} data=['foo']", "with --set data=[\"foo\"]: key 'data' is 'foo', which nothing is called"),
    (f"{STUDY} members.network=foo", "with --set members.network=\"foo\": key 'members.network' is 'foo'"),
    (f"{STUDY} by_data=2", "key 'by_data' must be a table; got a whole number 2."),
    (f"{STUDY} objective.options.methods=3", "key 'objective.options.methods' must be a table"),
    (f"{STUDY} grid.beta=[0.5,0.5]", "key 'grid.beta' must not hold a value twice"),
    (f"{STUDY} grid.seed=[-1]", "key 'grid.seed[0]' must be at least 0; got -1."),
    (f"{STUDY} grid.lr=[nan]", "key 'grid.lr[0]' must be a finite number; got nan."),
    (f"{STUDY} grid.lr=[inf]", "key 'grid.lr[0]' must be a finite number; got inf."),
    (f"{STUDY} data=[]", "key 'data' must be a list of values; got an empty list."),
    (f"{STUDY} members.options.widths=[0]", "key 'members.options.widths[0]' must be between 1 and"),
    (f"{STUDY} members.count=1000000000000", "key 'members.count' must be between 1 and 100000"),
    (f"{STUDY} name=evil", "key 'name' cannot be changed by --set"),
    (f"{STUDY} scales.smoke.data=[1]", "key 'scales.smoke.data' cannot be changed by --set"),
    (f"{STUDY} grid..seed=[1]", "--set grid..seed: a part of the key is empty"),
    (f"{STUDY} uses=../../x", "key 'uses' must name a study of the library; got '../../x'."),
    (f"{STUDY} data=['diabetes']", "key 'objective.loss' is 'cross_entropy', but diabetes has values; use a loss"),
    (f"{STUDY} data=['wine']", "key 'members.network' needs images; wine is a table."),
    (
        "study run adp/figure-4 --scale smoke --set by_data.mnist.evaluation=3",
        "key 'by_data.mnist.evaluation' must be a",
    ),
    ("study run collusion/figure-15 --scale huge", "has no scale 'huge'; it has smoke, laptop, gpu, paper."),
    ("study run collusion/figure-3 --scale smoke --set search.space.lr={}", "key 'search.space.lr' must be a list"),
    ("study run collusion/figure-3 --scale smoke --set search.space.foo=[1]", "key 'search.space' is 'foo'"),
    ("study run masksembles/figure-1 --scale smoke --set grid={}", "'grid' needs the axis 'scale'"),
    ("study run audit/table-1 --scale smoke --set grid.case=['foo']", "no case of 'grid.case' is called 'foo'"),
    ("study run adp/table-4 --scale smoke --set grid.method=['foo']", "key 'grid.method[0]' is 'foo'"),
    (f"{ROBUST} --option width=1e9", "--option: key 'width' must be a whole number; got a number 1000000000.0."),
    (f"{ROBUST} --option depth=-1", "--option: key 'depth' must be between 0 and 1000; got -1."),
    (f"{ROBUST} --data foo", "--data must be one of 'mnist', "),
    (f"{ROBUST} --network foo", "--network must be one of 'mlp', "),
    ("data get foo", "NAME must be one of 'abalone', "),
    ("data check foo", "NAME must be one of 'abalone', "),
    ("ood in.npy --outside near=", "--outside near=: write it as NAME=FILE, such as near=a.npz, or as FILE"),
    (
        "audit in.npy --targets labels.npy --task classification --kind logits --page new/a.html",
        "no folder new; make it",
    ),
]
"""Mistakes that once ended in a traceback or a message that did not help, and a part of what is said now."""


@pytest.mark.parametrize(("words", "message"), FOUND)
def test_a_mistake_is_explained(words, message, workplace, unchecked):
    end = outcome(Mistake(tuple(words.split())), workplace)
    assert end.error is None, end.error
    assert message in end.message
    assert end.code in (1, 2)


def test_scales_are_listed_once(workplace):
    end = outcome(Mistake(("study", "run", "collusion/figure-15", "--scale", "huge")), workplace)
    assert end.message.count("laptop") == 1


@pytest.mark.parametrize("name", ["junk.npy", "objects.npy", "junk.npz", "objects.npz", "zero-bytes.npy"])
def test_nobody_is_told_to_open_pickles(name, workplace):
    words = f"audit {name} --targets labels.npy --task classification --kind logits"
    end = outcome(Mistake(tuple(words.split())), workplace)
    assert name in end.message
    assert "allow_pickle" not in end.message


def test_a_file_with_an_equals_sign_is_a_file(workplace, unchecked):
    (workplace / "lr=0.1").mkdir(exist_ok=True)
    for name in ("lr=0.1/far.npy", "a=b.npy"):
        (workplace / name).write_bytes((workplace / "near.npy").read_bytes())
        assert outcome(Mistake(("ood", "in.npy", "--repeats", "5", "--outside", name)), workplace).kind == "ok"


def test_damaged_files_of_studies_are_named(workplace):
    for content in (b"\xff\xfe", b"x = " + b"[" * 5000, b"title"):
        end = outcome(Mistake(("study", "show", "adp/broken.toml"), files={"adp/broken.toml": content}), workplace)
        assert (end.code, "broken.toml: this is no TOML" in end.message) == (1, True), end


def test_the_name_of_a_study_is_that_of_its_file(workplace):
    text = (fuzzing.SPECS / "ldr" / "figure-2.toml").read_bytes()
    for name in ("../../evil", "/tmp/evil"):
        files = {"ldr/mine.toml": f'name = "{name}"\n'.encode() + text}
        end = outcome(Mistake(("study", "run", "ldr/mine.toml", "--scale", "smoke"), files=files), workplace)
        assert "key 'name' must not be set: the name of a study is that of its file, ldr/mine." in end.message


@pytest.mark.parametrize(
    ("value", "hint", "result"),
    [
        (3, float, 3.0),
        ([1, 2.5], list[float], [1.0, 2.5]),
        ("mse", str | torch.Tensor, "mse"),
        ([0.5], torch.Tensor | None, [0.5]),
        ({"a": [1]}, dict[str, list[int]], {"a": [1]}),
        (True, spec.Scalar, True),
    ],
)
def test_values_are_read_as_annotations_say(value, hint, result):
    read = checked_value(value, hint, "key", "a.toml")
    assert read == result
    assert type(read) is type(result)


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        (True, float, "must be a number; got true or false True."),
        (2.0, int, "must be a whole number; got a number 2.0."),
        ([1], spec.Scalar, "must be a single value; got a list [1]."),
        (10**30, int, "must be at most 9.22337e+18; got 1000000000000000000000000000000."),
        (float("inf"), float, "must be a finite number; got inf."),
        ({"a": ["x"]}, dict[str, list[int]], "a.toml: key 'key.a[0]' must be a whole number; got text 'x'."),
        ("x" * 500, int, "x…."),
        ("x", list[int] | None, "must be a list; got text 'x'."),
    ],
)
def test_values_of_another_type_are_refused(value, hint, message):
    with pytest.raises(SpecError) as caught:
        checked_value(value, hint, "key", "a.toml")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("objective", "missing"), [(independent, "`loss`"), (partial(augmented, loss="mse"), "`beta` and `pool`")]
)
def test_an_objective_without_its_parameters_is_refused_before_training(objective, missing):
    ensemble = ds.Ensemble(functools.partial(torch.nn.Linear, 2, 1), members=2)
    with pytest.raises(ValueError, match=f"`objective` must have a value for each of its parameters; got .*{missing}"):
        ds.fit(ensemble, (torch.zeros(4, 2), torch.zeros(4, 1)), objective, epochs=1)


def test_a_model_that_is_never_right_is_not_called_unbroken():
    nothing, facts = Interval(0.0, 0.0, 0.1), {"on_survivors": False, "beyond": 0, "suite": "standard"}
    notes = " ".join(Robustness(nothing, nothing, [], [], [], [], [], facts).notes())
    assert "No example is classified correctly without an attack" in notes
    assert "No attack broke anything" not in notes
