"""`tune`: the search as a whole, its reference, its conscience, and that it can be interrupted."""

import json
import math
from functools import partial
from typing import Any

import pytest
import torch

import dissensus as ds
from dissensus.axes import LossParts
from dissensus.objectives import Declaration
from dissensus.storage import read_record, write_record
from dissensus.train import Range
from dissensus.train.tuning.judging import Judging
from dissensus.train.tuning.search import FORMATS
from dissensus.train.tuning.splitting import repeated_splits

X = torch.randn(150, 4, generator=torch.Generator().manual_seed(1))
Y = X[:, :1].sin() + 0.3 * torch.randn(150, 1, generator=torch.Generator().manual_seed(2))
build = partial(ds.nets.mlp, 4, 1, (6,))
augmented = partial(ds.objectives.augmented, loss="squared_error", pool="score")
EASY = torch.randn(300, 4, generator=torch.Generator().manual_seed(3))
LINEAR = {"data": (EASY, EASY.sum(1, keepdim=True)), "network": partial(torch.nn.Linear, 4, 1), "lr": 0.1}
"""A task that linear members learn in a few epochs."""


def tune(objective: Any = augmented, data: Any = (X, Y), network: Any = build, **options):
    settings = {
        "space": {"beta": [0.3, 0.6, 0.9]},
        "epochs": 4,
        "members": 3,
        "splits": 2,
        "seeds": 2,
        "lr": 1e-2,
        "factor": 3,
    }
    settings |= {"batch_size": 30, "backend": "loop"}
    return ds.tune(network, data, objective, **{**settings, **options})


def weights(ensemble):
    return torch.cat([parameter.detach().flatten() for parameter in ensemble.parameters()])


def spread(outputs, targets):
    """A metric that only diversity is good for."""
    return -outputs.var(0, correction=0).mean()


@Declaration(sweepable=("offset",), loss="squared_error", pool="score", neutral={"offset": 0})
def shifted(outputs, targets, *, offset=0.0):
    """Members learn targets that are shifted in ways that cancel: the pooled prediction is right, no member is."""
    shifts = torch.tensor([-1.5, 0.5, 1.0]).to(outputs).view(3, 1, 1)
    losses = (outputs - targets - offset * shifts).square().sum(-1).mean(1)
    return LossParts(losses.sum(), {"member_loss": losses})


def test_candidates_are_runs_of_a_plain_sweep():
    tuned = tune(allow_collusive=True)
    rows = repeated_splits(Y, ds.data.Split(0.2), 0.2, 2, 0)
    plain = ds.sweep(
        build,
        [(X[part.train], Y[part.train]) for part in rows],
        augmented,
        grid={"beta": [0.0, 0.3, 0.6, 0.9], "fold": [0, 1], "seed": [0, 1, 2, 3]},
        members=3,
        epochs=4,
        lr=1e-2,
        batch_size=30,
        backend="loop",
        validation=[(X[part.validation], Y[part.validation]) for part in rows],
    )
    for candidate in tuned.candidates:
        runs = [
            run
            for run, point in enumerate(plain.points)
            if point["beta"] == candidate.point["beta"] and point["seed"] // 2 == point["fold"]
        ]
        best = [min(plain.history(run).column("validation")[: candidate.epochs]) for run in runs]
        assert candidate.value == pytest.approx(sum(best) / 4, rel=1e-4)
        if candidate is tuned.best:
            chosen = runs[best.index(min(best))]
            torch.testing.assert_close(weights(tuned.ensemble), weights(plain.run(chosen)))
            test = rows[plain.points[chosen]["fold"]].test
            assert tuned.audit is not None
            loss = float((plain.run(chosen).predict(X[test]).mean(0) - Y[test]).square().mean())
            assert tuned.audit.test["ensemble"].value == pytest.approx(loss, rel=1e-3)


def test_the_worst_drop_out_and_cost_nothing_any_more():
    tuned = tune(space={"beta": [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]}, epochs=9, splits=1)
    assert tuned.settings["brackets"] == [{"sizes": [8, 2, 1], "rungs": [1, 3, 9]}]
    assert sorted(candidate.epochs for candidate in tuned.candidates) == [1] * 6 + [3] + [9] * 2
    assert tuned.spent.run_epochs == 2 * (6 * 1 + 3 + 9 * 2)
    assert tuned.spent.full_run_epochs == 2 * 9 * 9
    assert tuned.spent.examples == tuned.spent.run_epochs * 96
    statuses = [candidate.status for candidate in tuned.candidates]
    assert statuses.count("dropped") == 7
    assert all(len(candidate.curve) == candidate.epochs for candidate in tuned.candidates)


def test_independent_training_is_added_and_always_trained_to_the_end():
    tuned = tune(metric=spread, mode="min", splits=2, epochs=9)
    assert tuned.independent is not None
    assert tuned.independent.point == {"beta": 0}
    assert tuned.independent.epochs == 9
    assert tuned.independent.runs == 4
    worst = max(tuned.candidates, key=lambda candidate: candidate.curve[0][1])
    assert worst.number == tuned.independent.number  # without protection it would have gone first


def test_the_best_of_several_independent_candidates_is_the_reference():
    tuned = tune(space={"beta": [0, 0.5], "lr": [1e-6, 1e-2, 1e-7]}, lr=None, epochs=9)
    assert tuned.independent is not None
    assert tuned.independent.point == {"beta": 0, "lr": 1e-2}
    independent = [candidate for candidate in tuned.candidates if candidate.independent]
    assert len(independent) == 3
    assert sorted(candidate.epochs for candidate in independent) == [3, 3, 9]


def test_shapes_compete_with_each_other():
    def own(width=4):
        return ds.nets.mlp(4, 1, (width,))

    space = {"beta": [0.5], "width": [2, 9], "members": [2, 4]}
    tuned = ds.tune(own, (X, Y), augmented, space=space, epochs=3, splits=2, seeds=1, factor=3, lr=1e-2)
    assert {(c.point["width"], c.point["members"]) for c in tuned.candidates} == {(2, 2), (2, 4), (9, 2), (9, 4)}
    interacting = [candidate for candidate in tuned.candidates if not candidate.independent]
    assert sorted(candidate.epochs for candidate in interacting) == [1, 1, 1, 3]
    assert len(tuned.ensemble) == tuned.best.point["members"]


def test_test_rows_have_no_part_in_the_choice():
    (rows,) = repeated_splits(Y, ds.data.Split(0.2), 0.2, 1, 0)
    other = Y.clone()
    other[rows.test] = 5.0
    first, second = tune(splits=1), tune(splits=1, data=(X, other))
    assert [c.value for c in first.candidates] == [c.value for c in second.candidates]
    assert first.choices == second.choices
    assert first.best.test != second.best.test
    assert first.gain is not None
    assert math.isnan(first.gain.low)  # one split has no interval


def test_ties_go_to_independent_training():
    tuned = tune(space={"beta": [1e-7]})
    assert tuned.best.independent
    assert tuned.choices == [{"beta": 0}, {"beta": 0}]
    assert tuned.gain is not None
    assert tuned.gain[:3] == (0, 0, 0)
    assert tuned.sentence.startswith("nothing beats independent training here")


def test_what_is_better_by_more_than_a_standard_error_is_chosen():
    tuned = tune(metric=spread, mode="min", allow_collusive=True, epochs=6)
    assert not tuned.best.independent
    assert tuned.best.status == "chosen"
    assert tuned.gain is not None
    assert tuned.gain.value > 0
    assert "lower spread than independent training" in tuned.sentence


def test_what_looks_better_on_validation_rows_only_is_not_recommended():
    (rows,) = repeated_splits(Y, ds.data.Split(0.2), 0.2, 1, 0)
    other = Y.clone()
    tested = set(rows.test.tolist())

    def fickle(outputs, targets):
        """Diversity is good on validation rows, and bad on test rows, whose targets are large."""
        return spread(outputs, targets) * (-1 if bool((targets > 50).all()) else 1)

    other[list(tested)] += 100.0
    tuned = tune(data=(X, other), metric=fickle, mode="min", splits=1, allow_collusive=True, epochs=6)
    assert not all(point == {"beta": 0} for point in tuned.choices)
    assert tuned.gain is not None
    assert tuned.gain.value < 0
    assert tuned.best.independent
    assert "looked better on validation rows, but not on test rows" in tuned.sentence


def test_collusive_candidates_are_set_aside_unless_they_are_asked_for():
    options = {**LINEAR, "objective": shifted, "space": {"offset": [4.0]}, "epochs": 12}
    options |= {"metric": spread, "mode": "min"}
    tuned = tune(**options)
    (collusive,) = [candidate for candidate in tuned.candidates if not candidate.independent]
    assert collusive.verdicts == {"collusive": 4}
    assert collusive.status == "collusive"
    assert tuned.best.independent
    assert "offset = 4 is collusive and was set aside" in tuned.sentence
    asked = tune(**options, allow_collusive=True)
    assert asked.best.point == {"offset": 4.0}
    assert asked.audit is not None
    assert asked.audit.verdict == "collusive"
    assert asked.sentence.endswith("audit collusive")


def test_collusive_candidates_do_not_push_others_out_at_a_rung():
    options = {**LINEAR, "objective": shifted, "space": {"offset": [0.05, 3.0, 4.0]}, "epochs": 24, "first_rung": 8}
    options |= {"metric": spread, "mode": "min", "splits": 1}
    tuned = tune(**options)
    assert {c.point["offset"]: c.epochs for c in tuned.candidates} == {0: 24, 0.05: 24, 3.0: 8, 4.0: 8}
    asked = tune(**options, allow_collusive=True)
    assert {c.point["offset"]: c.epochs for c in asked.candidates} == {0: 24, 0.05: 8, 3.0: 8, 4.0: 24}


def test_candidates_that_diverge_are_not_chosen():
    def explosive(outputs, targets, *, beta):
        parts = augmented(outputs, targets, beta=beta)
        return LossParts(parts.total * torch.where(torch.as_tensor(beta) > 0.5, math.nan, 1.0), parts.parts)

    objective = Declaration(sweepable=("beta",), loss="squared_error", pool="score", neutral={"beta": 0})(explosive)
    tuned = tune(objective, space={"beta": [0.2, 0.9]})
    failed = next(candidate for candidate in tuned.candidates if candidate.point["beta"] == 0.9)
    assert failed.status == "failed"
    assert math.isnan(failed.value)
    assert tuned.best.number != failed.number
    json.loads(tuned.to_json(), parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


def test_candidates_that_diverge_do_not_end_a_search_by_accuracy():
    objective = partial(ds.objectives.augmented, loss="cross_entropy", pool="probability")
    options = {"data": (X, (X[:, 0] > 0).long()), "network": partial(ds.nets.mlp, 4, 2, (6,)), "optimizer": "sgd"}
    tuned = tune(objective, space={"beta": [0.5], "lr": [0.1, 1e30]}, lr=None, metric="accuracy", **options)
    assert {c.status for c in tuned.candidates if c.point["lr"] > 1} == {"failed"}
    assert tuned.best.point["lr"] == 0.1


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_labels_that_are_ignored_count_nowhere(metric):
    objective = partial(ds.objectives.augmented, loss="cross_entropy", pool="probability")
    labels = (X[:, 0] > 0).long()
    labels[::5] = -100
    options = {"space": {"beta": [0.5]}, "epochs": 2, "metric": metric, "ignore_index": -100, "seeds": 1}
    tuned = tune(objective, data=(X, labels), network=partial(ds.nets.mlp, 4, 2, (6,)), **options)
    assert tuned.audit is not None
    assert all(math.isfinite(c.test) for c in tuned.candidates)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_search_in_which_all_diverge_says_so():
    with pytest.raises((RuntimeError, ds.TrainingDiverged), match="not finite|diverged"):
        tune(space={"beta": [0.5], "lr": [1e30, 1e35]}, lr=None, optimizer="sgd")


def test_candidates_are_ahead_of_the_reference_split_by_split_after_as_many_epochs():
    tuned = tune(epochs=9, splits=3, seeds=1)
    assert tuned.independent is not None
    own = dict(tuned.independent.curve)
    for candidate in tuned.candidates:
        assert len(candidate.by_split) == 3
        assert candidate.value == pytest.approx(sum(candidate.by_split) / 3)
        assert candidate.ahead == pytest.approx(own[candidate.epochs] - candidate.value, abs=1e-9)
    whole = [candidate for candidate in tuned.candidates if candidate.epochs == 9 and not candidate.independent]
    for candidate in whole:
        pairs = zip(candidate.by_split, tuned.independent.by_split, strict=True)
        differences = torch.tensor([b - a for a, b in pairs], dtype=torch.float64)
        assert candidate.ahead_error == pytest.approx(float(differences.std()) / math.sqrt(3))
        assert candidate.ahead_error < candidate.standard_error  # what is hard in a split is hard for all
    assert whole
    upwards = tune(metric=lambda outputs, targets: -float((outputs.mean(0) - targets).square().mean()), mode="max")
    assert upwards.best.ahead >= 0
    assert any(candidate.ahead > 0 for candidate in upwards.candidates) == (not upwards.best.independent)


def test_the_page_tells_the_gain_whatever_was_chosen():
    pytest.importorskip("matplotlib")
    tuned = tune(space={"beta": [1e-7]})
    assert "All of them chose independent training" in tuned.page()
    chosen = tune(metric=spread, mode="min", allow_collusive=True, epochs=6)
    text = chosen.page().replace("&nbsp;", " ")
    assert "That gives " in text
    assert chosen.sentence.split(": ")[1].split(")")[0] in text
    assert "members&#x27; spread beyond the ensemble" in text or "members' spread beyond the ensemble" in text


def test_the_frontier_holds_what_nothing_beats_in_error_and_diversity():
    tuned = tune(factor=100.0)  # nothing is dropped
    whole = [candidate for candidate in tuned.candidates if candidate.epochs == 4]
    for candidate in whole:
        beaten = [c for c in whole if c.test < candidate.test and c.diversity > candidate.diversity]
        assert (candidate in tuned.frontier) == (not beaten)
    assert [candidate.test for candidate in tuned.frontier] == sorted(candidate.test for candidate in tuned.frontier)


def test_an_objective_without_a_neutral_value_has_its_reference_trained_beside_it():
    joint = partial(ds.objectives.joint, loss="squared_error", pool="score")
    tuned = tune(joint, space={"lr": [1e-3, 1e-2]}, lr=None)
    assert tuned.independent is not None
    assert sum(candidate.independent for candidate in tuned.candidates) == 2
    assert tuned.independent.epochs == 4
    assert tuned.gain is not None


def test_a_neutral_value_that_is_bound_to_another_is_no_reference():
    bound = partial(ds.objectives.augmented, loss="squared_error", pool="score", beta=0.7)
    tuned = tune(bound, space={"lr": [1e-3, 1e-2]}, lr=None)
    assert [candidate.independent for candidate in tuned.candidates].count(True) == 2


def test_independent_training_alone_can_be_tuned():
    tuned = tune(partial(ds.objectives.independent, loss="squared_error"), space={"lr": [1e-7, 1e-2]}, lr=None)
    assert tuned.best.point == {"lr": 1e-2}
    assert tuned.gain is None
    assert tuned.sentence.startswith("lr = 0.01: loss ")
    assert "in independent training" in tuned.sentence


def test_all_neutral_values_make_independent_training():
    labels = (Y[:, 0] > 0).long() + (Y[:, 0] > 0.7).long()
    tuned = ds.tune(
        partial(ds.nets.mlp, 4, 3, (6,)),
        (X, labels),
        ds.objectives.adp,
        space={"beta": [0.5]},
        epochs=2,
        members=3,
        splits=1,
        seeds=1,
        metric="accuracy",
        batch_size=30,
    )
    assert tuned.independent is not None
    assert tuned.independent.point == {"alpha": 0, "beta": 0}
    assert tuned.settings["mode"] == "max"
    assert 0 <= tuned.best.value <= 1


def test_ranges_are_searched_by_brackets_of_hyperband():
    pytest.importorskip("optuna")
    tuned = tune(space={"beta": Range(0, 1)}, epochs=3, seeds=1)
    assert tuned.settings["brackets"] == [{"sizes": [3, 1], "rungs": [1, 3]}, {"sizes": [2], "rungs": [3]}]
    assert [candidate.bracket for candidate in tuned.candidates] == [0, 0, 0, 0, 1, 1]
    assert sum(candidate.independent for candidate in tuned.candidates) == 1
    assert all(0 <= candidate.point["beta"] <= 1 for candidate in tuned.candidates)
    again = tune(space={"beta": Range(0, 1)}, epochs=3, seeds=1)
    assert [c.point for c in again.candidates] == [c.point for c in tuned.candidates]


def test_a_budget_limits_what_is_spent():
    pytest.importorskip("optuna")
    small, large = (tune(space={"beta": Range(0, 1)}, epochs=3, seeds=1, splits=1, budget=b) for b in (3, 9))
    assert small.spent.run_epochs <= 3 * 3
    assert small.spent.run_epochs < large.spent.run_epochs <= 9 * 3
    listed = tune(space={"beta": [0.1, 0.2, 0.3, 0.4, 0.5]}, epochs=3, seeds=1, splits=1, budget=2)
    assert len(listed.candidates) < 6
    assert listed.spent.run_epochs <= 2 * 3


def test_a_budget_holds_with_all_that_is_trained_beside_the_candidates():
    pytest.importorskip("optuna")
    space = {"beta": Range(0, 1), "lr": Range(1e-3, 1e-1, log=True)}
    for budget in (2, 5, 9):
        tuned = tune(space=space, epochs=9, seeds=1, splits=1, lr=None, budget=budget)
        assert tuned.spent.run_epochs <= budget * 9
        assert tuned.independent is not None


def test_values_that_later_brackets_could_propose_are_refused_before_training():
    pytest.importorskip("optuna")
    trained: list[Any] = []
    for space in ({"beta": Range(0, 1.01)}, {"beta": [0.5], "members": Range(0, 3, integer=True)}):
        with pytest.raises(ValueError, match=r"at most 1: above it|`members` must be a whole number of at least 1"):
            tune(space=space, callbacks=[trained.append], epochs=9)
    assert not trained


def test_a_range_of_few_values_ends_when_all_are_trained():
    pytest.importorskip("optuna")
    tuned = tune(space={"members": Range(2, 4, integer=True), "beta": [0.5]}, budget=99, splits=1, seeds=1)
    points = [candidate.point for candidate in tuned.candidates if not candidate.independent]
    assert sorted(point["members"] for point in points) == [2, 3, 4]
    listed = tune(space={"lr": [1e-3, 1e-2], "beta": [0, 0.5, 0.9]}, lr=None, epochs=3, budget=3.5, splits=1, seeds=1)
    each = [tuple(sorted(candidate.point.items())) for candidate in listed.candidates if candidate.bracket < 2]
    assert len(each) == len(set(each))


def test_the_reference_is_trained_with_the_learning_rate_of_the_best():
    """Otherwise the gain is that of a learning rate which only candidates have: 51 % here, of which 2 % are β's."""
    pytest.importorskip("optuna")
    tuned = tune(space={"beta": [0.5], "lr": Range(1e-4, 1e-1, log=True)}, lr=None, budget=4, seeds=1, seed=3)
    best = min((c for c in tuned.candidates if not c.independent), key=lambda c: (-c.epochs, c.value))
    assert {"beta": 0, "lr": best.point["lr"]} in [c.point for c in tuned.candidates if c.independent and c.epochs == 4]
    assert tuned.gain is not None
    assert abs(tuned.gain.value) < 10


def test_the_reference_is_that_of_the_best_which_is_not_set_aside(monkeypatch):
    pytest.importorskip("optuna")
    judge, aside = Judging.judge_finalists, []

    def judged(judging):
        """The audit, which sets the best candidate aside."""
        judge(judging)
        if not aside:
            aside.append(judging.best_interacting(-1))
            aside[0].verdicts = dict.fromkeys(aside[0].verdicts, "collusive")

    monkeypatch.setattr(Judging, "judge_finalists", judged)
    space = {"beta": [0.5, 0.6], "lr": Range(1e-4, 1e-1, log=True)}
    tuned = tune(space=space, lr=None, budget=9, splits=1, seeds=1, seed=1)
    others = [c for c in tuned.candidates if not c.independent and c.status in ("chosen", "finalist")]
    best = min(others, key=lambda candidate: candidate.value)
    whole = [c.point for c in tuned.candidates if c.independent and c.epochs == 4]
    assert {"beta": 0, "lr": best.point["lr"]} in whole
    assert {"beta": 0, "lr": aside[0].point["lr"]} in whole


def test_where_the_last_candidate_is_set_aside_the_next_in_line_is_trained(monkeypatch):
    """A candidate may turn collusive after the last rung; independent training must not win by that."""
    judge, aside = Judging.judge_finalists, []

    def judged(judging):
        """The audit, which sets all aside that were left at first."""
        judge(judging)
        if not aside:
            aside.extend(entry for entry in judging.entries if not entry.independent and entry.finished(-1))
            for entry in aside:
                entry.verdicts = dict.fromkeys(entry.verdicts, "collusive")

    monkeypatch.setattr(Judging, "judge_finalists", judged)
    tuned = tune(space={"beta": [0.3, 0.6, 0.9]}, metric=spread, mode="min", epochs=9, splits=1)
    assert [entry.point["beta"] for entry in aside] == [0.9]
    ends = {c.point["beta"]: c.status for c in tuned.candidates if c.epochs == 9 and not c.independent}
    assert ends == {0.9: "collusive", 0.6: "chosen"}
    assert tuned.choices == [{"beta": 0.6}]
    assert len(tuned.settings["brackets"]) == 1


class Break:
    """Interrupts a training at an epoch of one of the shapes."""

    def __init__(self, epoch, members):
        self.epoch, self.members = epoch, members

    def on_epoch(self, entry):
        if entry["epoch"] == self.epoch and entry["point"].get("members", 3) == self.members:
            raise KeyboardInterrupt


@pytest.mark.slow(cases=["1-3", "3-3"])
@pytest.mark.parametrize(("epoch", "members"), [(1, 3), (1, 2), (3, 3)])
def test_an_interrupted_search_goes_on_as_if_it_had_not_been(tmp_path, epoch, members):
    options = {"space": {"beta": [0.5, 0.9], "members": [2, 3]}, "epochs": 3, "splits": 1, "seeds": 1}
    whole = tune(**options)
    with pytest.raises(KeyboardInterrupt):
        tune(**options, checkpoint=tmp_path / "tune", checkpoint_seconds=0.0, callbacks=[Break(epoch, members)])
    resumed = tune(**options, checkpoint=tmp_path / "tune", resume=True, checkpoint_seconds=0.0)
    assert resumed.sentence == whole.sentence
    for one, other in zip(whole.candidates, resumed.candidates, strict=True):
        assert (one.point, one.epochs, one.status) == (other.point, other.epochs, other.status)
        assert one.value == pytest.approx(other.value, nan_ok=True)
    torch.testing.assert_close(weights(resumed.ensemble), weights(whole.ensemble))
    again = tune(**options, checkpoint=tmp_path / "tune", resume=True)  # nothing is left to train
    assert again.sentence == whole.sentence
    assert again.spent.run_epochs == whole.spent.run_epochs


def test_an_interrupted_search_goes_on_with_its_proposals(tmp_path):
    pytest.importorskip("optuna")

    class BreakSecond:
        def __init__(self):
            self.starts = 0

        def on_start(self, start):
            self.starts += 1

        def on_epoch(self, entry):
            if self.starts == 2:
                raise KeyboardInterrupt

    options = {"space": {"beta": Range(0, 1)}, "epochs": 3, "seeds": 1, "splits": 1}
    whole = tune(**options)
    with pytest.raises(KeyboardInterrupt):
        tune(**options, checkpoint=tmp_path / "tune", callbacks=[BreakSecond()])
    resumed = tune(**options, checkpoint=tmp_path / "tune", resume=True)
    assert [c.point for c in resumed.candidates] == [c.point for c in whole.candidates]
    assert resumed.sentence == whole.sentence


def test_the_time_before_an_interruption_counts(tmp_path):
    options = {"epochs": 3, "seeds": 1, "splits": 1, "checkpoint": tmp_path / "tune"}
    with pytest.raises(KeyboardInterrupt):
        tune(**options, callbacks=[Break(2, 3)])
    file = tmp_path / "tune" / "tune.json"
    record = {name: value for name, value in read_record(file, FORMATS).items() if name != "checksum"}
    assert record["seconds"] > 0
    write_record(file, {**record, "seconds": 5000.0})
    assert tune(**options, resume=True).spent.seconds > 5000
    assert tune(**options, resume=True).spent.seconds > 5000


def test_a_search_is_in_a_storage_once_and_apart_from_searches_of_other_data(tmp_path):
    optuna = pytest.importorskip("optuna")
    address = f"sqlite:///{tmp_path / 'tune.db'}"
    options = {"space": {"beta": Range(0, 1)}, "epochs": 1, "seeds": 1, "splits": 1, "storage": address}
    first = tune(**options)
    tune(**options)
    tune(**options, data=(X, 100 * Y))
    tune(**options, seed=1)
    sizes = {study.study_name: study.n_trials for study in optuna.get_all_study_summaries(address)}
    proposed = sum(not candidate.independent for candidate in first.candidates)
    assert sorted(sizes.values()) == [proposed, 2 * proposed]
    with pytest.raises(Exception, match="nowhere"):
        tune(**{**options, "storage": "nowhere:///"}, callbacks=[lambda entry: pytest.fail("trained")])


def test_inputs_that_are_missing_are_named():
    missing = X.clone()
    missing[::7, 0] = math.nan
    with pytest.raises(ValueError, match="NaN or infinity in 22 examples.*Drop or fill"):
        tune(data=(missing, Y))


def test_a_folder_of_another_search_is_refused(tmp_path):
    options = {"epochs": 1, "seeds": 1, "splits": 1, "checkpoint": tmp_path / "tune"}
    tune(**options)
    with pytest.raises(ValueError, match="pass resume=True"):
        tune(**options)
    with pytest.raises(ds.StorageError, match="'space' differ"):
        tune(**options, resume=True, space={"beta": [0.1]})
    with pytest.raises(ds.StorageError, match="'sizes' differ"):
        tune(**{**options, "epochs": 2}, resume=True)
    with pytest.raises(ds.StorageError, match="'settings' differ"):
        tune(**options, lr=2e-2, resume=True)
    with pytest.raises(ds.StorageError, match="'data' differ"):
        tune(**options, data=(2 * X, Y), resume=True)
    with pytest.raises(ds.StorageError, match="'build' differ"):
        tune(**options, network=partial(ds.nets.mlp, 4, 1, (7,)), resume=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"space": {"bta": [0]}}, "beta"),
        ({"space": {"seed": [0, 1]}}, "leave seeds and splits"),
        ({"grid": {"beta": [0]}}, "Use space="),
        ({"weights": torch.ones(150)}, "be left out of `tune`"),
        ({"cluster": "ray"}, "be left out of `tune`.* Candidates wait for each other at every rung, on one machine"),
        ({"bach_size": 3}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"splits": 0}, "splits"),
        ({"seeds": 0}, "seeds"),
        ({"factor": 1}, "factor"),
        ({"first_rung": 9}, "at most `epochs`"),
        ({"budget": 0}, "budget"),
        ({"budget": 1}, "at least 2, where members"),
        ({"objective": ds.objectives.augmented}, r"partial\(augmented, loss="),
        ({"objective": partial(ds.objectives.augmented, loss="squared_error"), "space": {"lr": [0.1]}}, "beta"),
        ({"metric": lambda outputs, targets: "good", "mode": "max"}, "return a number"),
        ({"test": 1.0}, "test"),
        ({"validation": 0.0}, "validation"),
        ({"metric": "acuracy"}, "accuracy"),
        ({"resume": True}, "come with `checkpoint`"),
        ({"data": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y))}, "in memory"),
        ({"objective": lambda outputs, targets, *, beta: LossParts(outputs.sum(), {})}, "loss"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        tune(**options)


def test_an_objective_of_a_user_needs_a_reference():
    def own(outputs, targets, *, beta):
        return LossParts((outputs - targets).square().sum() * beta, {})

    with pytest.raises(ValueError, match="say what independent training is"):
        tune(own, metric=spread, mode="min")


def test_the_record_reads_as_a_table_as_json_and_as_a_page(tmp_path):
    pytest.importorskip("matplotlib")
    tuned = tune()
    rows = tuned.table(frame=False)
    assert len(rows) == 4
    assert set(rows[0]) >= {"beta", "status", "epochs", "validation", "test", "diversity", "audit"}
    stored = json.loads(tuned.to_json())
    assert stored["sentence"] == tuned.sentence == str(tuned)
    assert stored["spent"]["share"] == pytest.approx(tuned.spent.share)
    assert len(stored["candidates"]) == 4
    text = tuned.page(tmp_path / "tune.html", "My β")
    assert (tmp_path / "tune.html").read_text() == text
    for words in ("My β", "Error against diversity", "Rungs", "Candidates", "What was spent", "Audit of the choice"):
        assert words in text
    assert tuned.plot() is not None
