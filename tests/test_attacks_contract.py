"""The contract of attacks: one table over all of them, drawn from `attacks.ATTACKS`; and attacks from outside."""

import dataclasses
import functools
import importlib
import inspect
import math
from typing import NamedTuple

import pytest
import torch
from attack_models import C, Normed, Steady, images, linear, network, right_only
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dissensus as ds
from dissensus import attacks
from dissensus.attacks import blocks, gradient, problem, suites
from dissensus.metrics import wilson

EPSILON = {"linf": 0.1, "l2": 0.8}
"""Large enough to succeed on some of the images."""
VARIANTS = {
    "bim, all steps": ("bim", {"stop": False}),
    "apgd, dlr": ("apgd", {"loss": "dlr"}),
    "apgd, targeted dlr": ("apgd", {"loss": "targeted_dlr"}),
    "pgd, restarts": ("pgd", {"restarts": 2}),
    "jsma, adp": ("jsma", {"preset": "adp", "step_size": 0.4}),
}
"""Settings of attacks that take another way through the code."""
STRONGER = {"jsma": {"distortion": 0.5}, "square": {"queries": 60}, "random_noise": {"draws": 30}}
"""Settings with which these succeed on images of 6×6."""
BLACK_BOX_EPSILON = {"random_noise": 3.0, "square": 2.0}
"""Multiples of ε with which attacks without gradients succeed."""
ROUNDED = ("l2", "carlini_wagner", "elastic_net")
"""Roots, powers and tanh, which a processor may round differently by position."""
WITHOUT_ENTRY = {
    "over": "it runs other attacks",
    "tried": "it tests points of other attacks",
    "autoattack": "it belongs to another package; its results depend on the batch and are tested by `tried`",
}


class Case(NamedTuple):
    """A row of the table: an attack with settings for small images."""

    name: str
    entry: attacks.AttackEntry
    attack: functools.partial
    norm: str | None
    """Norm of the ball; None for attacks that are not bounded by ε."""

    @property
    def epsilon(self):
        return self.attack.keywords["epsilon"]

    @property
    def exact(self):
        return not any(text in f"{self.name} {self.norm}" for text in ROUNDED)


def case(label, name, settings, norm=None):
    entry = attacks.ATTACKS[name]
    settings = {**entry.quick, **STRONGER.get(name, {}), **settings}
    if norm is not None:
        settings |= {"epsilon": BLACK_BOX_EPSILON.get(name, 1.0) * EPSILON[norm], "norm": norm}
    return Case(label, entry, functools.partial(entry.function, **settings), norm)


def all_cases():
    cases = []
    for name, entry in attacks.ATTACKS.items():
        cases += [case(f"{name}, {norm}", name, {}, norm) for norm in entry.norms] if entry.bounded else []
        cases += [] if entry.bounded else [case(name, name, {})]
    for label, (name, settings) in VARIANTS.items():
        cases.append(case(label, name, settings, "linf" if attacks.ATTACKS[name].bounded else None))
    return cases


CASES = all_cases()
every_attack = pytest.mark.parametrize("row", CASES, ids=lambda row: row.name)
bounded = pytest.mark.parametrize("row", [c for c in CASES if c.entry.bounded], ids=lambda row: row.name)
random_attacks = pytest.mark.parametrize("row", [c for c in CASES if c.entry.random], ids=lambda row: row.name)
targeted = pytest.mark.parametrize("row", [c for c in CASES if c.entry.targeted], ids=lambda row: row.name)


@pytest.fixture(scope="module")
def ensemble():
    ens = ds.Ensemble(network, members=3, seed=0, backend="loop")
    objective = functools.partial(ds.objectives.independent, loss="cross_entropy")
    ds.fit(ens, images(400, seed=1), objective, epochs=8, batch_size=50, lr=0.01)
    return ens.eval()


def predictions(ensemble, x):
    return ensemble(x).softmax(-1).mean(0).argmax(-1)


def assert_same(result, expected, exact=True):
    assert torch.equal(result.success, expected.success)
    if exact:
        assert torch.equal(result.inputs, expected.inputs)
    else:
        torch.testing.assert_close(result.inputs, expected.inputs, rtol=0, atol=1e-9)
    torch.testing.assert_close(result.distance, expected.distance)


def assert_within(row, result, x, epsilon):
    change = (result.inputs - x).flatten(1)
    if row.norm == "l2":
        assert (change.double().norm(dim=1) <= epsilon * (1 + 1e-6)).all()
    else:
        assert float(change.abs().max()) <= epsilon
        assert torch.equal(result.distance, change.abs().amax(1))


# --- the table --------------------------------------------------------------------------------------------------------


def test_every_attack_is_in_the_table():
    """A public function that returns `Adversarial` has an entry, and every entry is public in a file of its name."""
    public = {name: getattr(attacks, name) for name in attacks.__all__}
    functions = {name: value for name, value in public.items() if inspect.isfunction(value)}
    returning = {name for name, f in functions.items() if inspect.signature(f).return_annotation is attacks.Adversarial}
    assert returning - set(WITHOUT_ENTRY) == set(attacks.ATTACKS)
    for name, entry in attacks.ATTACKS.items():
        assert entry.function is public[name]
        assert entry.function is getattr(importlib.import_module(f"dissensus.attacks.{name}"), name)
        assert f"`{name}`" in attacks.__doc__
    assert {row.entry.function for row in CASES} == {entry.function for entry in attacks.ATTACKS.values()}


@pytest.mark.parametrize("name", attacks.ATTACKS)
def test_entries_say_what_the_functions_take(name):
    entry = attacks.ATTACKS[name]
    parameters = inspect.signature(entry.function).parameters
    assert list(parameters)[:3] == ["model", "x", "y"]
    assert {"pool", "box"} <= set(parameters)
    assert entry.bounded == ("epsilon" in parameters) == ("norm" in parameters)
    assert entry.targeted == ("target" in parameters)
    assert entry.random == ("seed" in parameters)
    assert set(entry.quick) <= set(parameters)
    assert entry.norms
    assert entry.kind in ("white-box", "black-box")


def test_tables_cannot_be_changed():
    entry = attacks.ATTACKS["pgd"]
    with pytest.raises(TypeError):
        attacks.ATTACKS["mine"] = entry
    with pytest.raises(TypeError):
        suites.SUITES["mine"] = suites.quick
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.label = "mine"


def test_black_box_attacks_need_no_gradients_and_white_box_attacks_say_that_they_do():
    detached = lambda x: Steady()(x).detach()  # noqa: E731
    x, y = right_only(Steady(), images(8)[0])
    for row in CASES:
        if row.entry.kind == "black-box":
            assert row.attack(detached, x, y).success.any(), row.name
        else:
            with pytest.raises(ValueError, match="differentiable with respect to its inputs.*`square`"):
                row.attack(detached, x, y)


# --- results ----------------------------------------------------------------------------------------------------------


@every_attack
def test_results_lie_in_box_and_ball_and_successes_fool_the_model(row, ensemble):
    x, y = images()
    result = row.attack(ensemble, x, y)
    assert result.inputs.shape == x.shape
    assert result.inputs.dtype == result.distance.dtype == x.dtype
    assert result.success.dtype == torch.bool
    assert ((result.inputs >= 0) & (result.inputs <= 1)).all()
    assert torch.equal(result.success, predictions(ensemble, result.inputs) != y), "failures come back clean"
    wrong_before = predictions(ensemble, x) != y
    assert wrong_before.any(), "otherwise the test proves less"
    unchanged = ~result.success | wrong_before
    assert torch.equal(result.inputs[unchanged], x[unchanged])
    assert (result.distance[unchanged] == 0).all()
    gained = result.success & ~wrong_before
    assert gained.any(), "otherwise the test proves nothing"
    assert (result.distance[gained] > 0).all()
    if row.norm is not None:
        assert_within(row, result, x, row.epsilon)


@pytest.mark.slow(cases=["square*"])
@every_attack
def test_another_box(row):
    model = Steady()
    x, y = right_only(model, images(12)[0])
    options = {} if row.norm is None else {"epsilon": 2 * row.epsilon}
    if "jsma" in row.name:
        options["step_size"] = 2.0 if row.name == "jsma" else 0.8
    result = row.attack(lambda z: model((z + 1) / 2), 2 * x - 1, y, box=(-1.0, 1.0), **options)
    assert ((result.inputs >= -1) & (result.inputs <= 1)).all()
    assert result.success.any()
    assert abs(int(result.success.sum()) - int(row.attack(model, x, y).success.sum())) <= 2


@bounded
def test_epsilon_of_zero_returns_the_input(row, ensemble):
    x, y = images()
    result = row.attack(ensemble, x, y, epsilon=0.0)
    assert torch.equal(result.inputs, x)
    assert torch.equal(result.success, predictions(ensemble, x) != y)
    assert (result.distance == 0).all()


@every_attack
def test_float64_models_work(row):
    model = Steady(dtype=torch.float64)
    x, y = right_only(model, images(10, dtype=torch.float64)[0])
    result = row.attack(model, x, y)
    assert result.inputs.dtype == result.distance.dtype == torch.float64
    assert result.success.any()
    assert torch.equal(model(result.inputs).argmax(-1) != y, result.success)
    if row.norm is not None:
        assert_within(row, result, x, row.epsilon)


@every_attack
def test_misclassified_examples_are_successes_at_distance_zero(row, ensemble):
    x, y = right_only(ensemble, images()[0])
    result = row.attack(ensemble, x, (y + 1) % C)
    assert result.success.all()
    assert torch.equal(result.inputs, x)
    assert (result.distance == 0).all()


@every_attack
def test_failed_examples_are_returned_unchanged(row):
    """Other libraries return black images here, which may even count as successes."""
    model = nn.Sequential(nn.Flatten(), linear(torch.eye(2, 9), torch.tensor([100.0, 0.0])))
    x, y = torch.rand(3, 1, 3, 3), torch.zeros(3, dtype=torch.long)
    result = row.attack(model, x, y)
    assert not result.success.any()
    assert torch.equal(result.inputs, x)
    assert (result.distance == 0).all()


@every_attack
def test_nan_on_the_way_is_no_success(row):
    """A model that returns NaN above 0.6 is not fooled by it."""
    base = linear(torch.tensor([[-1.0], [1.0]]) * torch.ones(2, 9), torch.tensor([50.0, -50.0]))
    model = lambda z: torch.where((z.flatten(1) > 0.6).any(1, keepdim=True), math.nan, base(z.flatten(1)))  # noqa: E731
    x, y = torch.full((4, 1, 3, 3), 0.55), torch.zeros(4, dtype=torch.long)
    result = row.attack(model, x, y)
    assert not result.success.any()
    assert torch.equal(result.inputs, x)


class Lying(nn.Module):
    """Misclassifies everything, except in the first pass and while it is honest."""

    def __init__(self):
        super().__init__()
        self.model, self.honest, self.calls = Steady(), False, 0

    def forward(self, x):
        self.calls += 1
        return self.model(x) if self.honest or self.calls == 1 else -self.model(x)


@every_attack
def test_successes_are_tested_in_a_new_pass(row, monkeypatch):
    """The model tells the attack that every point is adversarial; only the test at the end sees the truth."""
    lying, verify = Lying(), problem.AttackProblem.verify

    def honest_verify(*arguments):
        lying.honest = True
        result = verify(*arguments)
        lying.honest = False
        return result

    monkeypatch.setattr(problem.AttackProblem, "verify", honest_verify)
    x, y = right_only(Steady(), images(12)[0])
    result = row.attack(lying, x, y)
    assert torch.equal(result.success, Steady()(result.inputs).argmax(-1) != y)
    unasked = row.entry.function in (attacks.random_noise, attacks.fgsm)
    assert not result.success.all() or unasked, "noise asks no model on its way, and FGSM only at the clean input"


# --- one example at a time --------------------------------------------------------------------------------------------


@pytest.mark.slow(cases=["square*", "apgd, targeted dlr", "carlini_wagner"])
@every_attack
def test_batch_order_and_active_set_do_not_matter(row, monkeypatch):
    dtype = torch.float32 if row.exact else torch.float64
    model = Steady(dtype=dtype)
    x, y = right_only(model, images(9, dtype=dtype)[0])
    y[3] = (y[3] + 1) % C  # one that is misclassified before the attack
    expected = row.attack(model, x, y)
    assert expected.success[3]
    assert expected.success.sum() > 2, "otherwise the test proves little"
    order = torch.randperm(9)
    shuffled = row.attack(model, x[order], y[order])
    assert_same(shuffled, attacks.Adversarial(*(part[order] for part in expected)), row.exact)
    parts = [row.attack(model, x[i : i + 5], y[i : i + 5]) for i in range(0, 9, 5)]
    assert_same(attacks.Adversarial(*map(torch.cat, zip(*parts, strict=True))), expected, row.exact)
    for size in (lambda going, now: now, lambda going, now: going):
        monkeypatch.setattr(blocks.Steps, "_size", lambda _self, going, now, _left, size=size: size(going, now))
        assert_same(row.attack(model, x, y), expected, row.exact)


@pytest.mark.slow(cases=["square*"])
@every_attack
def test_results_are_reproducible(row, ensemble):
    x, y = images(8)
    assert_same(row.attack(ensemble, x, y), row.attack(ensemble, x, y))


@pytest.mark.slow(cases=["square*"])
@random_attacks
def test_seeds_give_other_results(row, ensemble):
    x, y = images(12)
    first, same_seed, other_seed = (row.attack(ensemble, x, y, seed=seed) for seed in (5, 5, 6))
    assert_same(first, same_seed)
    assert not torch.equal(first.inputs, other_seed.inputs)


WEAK = {"pgd": {"steps": 1, "step_size": 0.02}, "apgd": {"steps": 1}, "square": {"queries": 3}}
"""Budgets with which a single start leaves some examples to the others."""
REPEATED = {
    name: word
    for name, entry in attacks.ATTACKS.items()
    for word in ("restarts", "draws")
    if word in inspect.signature(entry.function).parameters
}


@pytest.mark.parametrize("name", REPEATED)
def test_more_restarts_are_never_weaker(name, ensemble):
    x, y = images(48)
    attack = functools.partial(attacks.ATTACKS[name].function, epsilon=0.2, **WEAK.get(name, {}))
    single, three = (attack(ensemble, x, y, **{REPEATED[name]: count}) for count in (1, 3))
    assert (three.success >= single.success).all()
    assert torch.equal(three.inputs[single.success], single.inputs[single.success])
    assert three.success.sum() > single.success.sum() or name == "apgd"


# --- goals ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow(cases=["square*"])
@targeted
def test_targets_are_reached(row, ensemble):
    x, y = images()
    target = (y + 1) % C
    options = {} if row.norm is None else {"epsilon": 3 * EPSILON[row.norm]}
    result = row.attack(ensemble, x, y, target=target, **options)
    assert torch.equal(result.success, predictions(ensemble, result.inputs) == target)
    assert result.success.any()
    assert torch.equal(result.inputs[~result.success], x[~result.success])


@targeted
def test_an_example_that_is_at_its_target_is_left_alone(row, ensemble):
    x, y = right_only(ensemble, images()[0])
    result = row.attack(ensemble, x, y, target=y)
    assert result.success.all()
    assert torch.equal(result.inputs, x)
    assert (result.distance == 0).all()


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.slow(cases=["square*"])
@every_attack
def test_an_ensemble_of_one_equals_the_plain_module(row):
    model = network()
    x, y = right_only(model, images(10)[0])
    expected = row.attack(model, x, y)
    single = ds.Ensemble.from_modules([model], backend="loop")
    for pool in ("score", "members"):
        result = row.attack(single, x, y, pool=pool)
        assert torch.equal(result.success, expected.success)
        torch.testing.assert_close(result.inputs, expected.inputs, rtol=0, atol=1e-5)


@every_attack
def test_mode_statistics_gradients_and_flags_are_untouched(row):
    x, y = images(8)
    model = Normed().train()
    model.frozen.eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    flags = [parameter.requires_grad for parameter in model.parameters()]
    inputs_before, labels_before = x.clone(), y.clone()
    with torch.no_grad():
        result = row.attack(model, x, y)
    assert torch.equal(x, inputs_before)
    assert torch.equal(y, labels_before)
    assert model.training
    assert model.drop.training
    assert model.norm.training
    assert not model.frozen.training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert (model.head.weight.grad == 1).all()
    assert model.norm.weight.grad is None
    assert not result.inputs.requires_grad
    with torch.inference_mode():
        inside = row.attack(model, x.clone(), y.clone())
    assert torch.equal(inside.inputs, result.inputs)


class NoHostReads(TorchDispatchMode):
    """Refuses operations that wait for the device, or make shapes depend on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        assert name not in {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}, name
        masked = name in {"aten::index", "aten::index_put_", "aten::index_put"}
        assert not (masked and any(t is not None and t.dtype == torch.bool for t in args[1])), name
        return func(*args, **(kwargs or {}))


@every_attack
def test_steps_read_nothing_on_the_host(row, monkeypatch):
    def watched_steps(step, *arguments, **options):
        def watched_step(rows, kind, numbers):
            kinds.append(kind)
            with NoHostReads():
                return step(rows, kind, numbers)

        return blocks.Steps(watched_step, *arguments, **options)

    kinds = []
    for name in ("gradient", "minimisation", *attacks.ATTACKS):
        module = importlib.import_module(f"dissensus.attacks.{name}")
        if hasattr(module, "Steps"):
            monkeypatch.setattr(module, "Steps", watched_steps)
    model = Steady()
    row.attack(model, *right_only(model, images(6)[0]))
    assert kinds or row.entry.function in (attacks.random_noise, attacks.fgsm), "these take no steps of a loop"
    with pytest.raises(AssertionError), NoHostReads():
        torch.ones(3).sum().item()


# --- refusals ---------------------------------------------------------------------------------------------------------


REFUSED = {
    "NaN": ({"x": lambda x: x * math.nan}, ValueError, "values from nan"),
    "infinity": ({"x": lambda x: x / 0.0}, ValueError, r"`x` must lie in \[0, 1\]"),
    "outside the box": ({"x": lambda x: x * 255}, ValueError, r"`x` must lie in \[0, 1\].*standardised"),
    "integer images": ({"x": lambda x: (x * 255).to(torch.uint8)}, TypeError, r"float32 or float64.*x.float\(\) / 255"),
    "half precision": ({"x": lambda x: x.half()}, TypeError, "float32 or float64; got torch.float16"),
    "empty batch": ({"x": lambda x: x[:0], "y": lambda y: y[:0]}, ValueError, "one example or more"),
    "no batch axis": ({"x": lambda x: x[0, 0, 0]}, ValueError, "be a batch"),
    "float labels": ({"y": lambda y: y.float()}, TypeError, "`y` must be whole numbers"),
    "one-hot labels": ({"y": lambda y: nn.functional.one_hot(y, C)}, ValueError, "One-hot"),
    "too few labels": ({"y": lambda y: y[:3]}, ValueError, r"`y` must have shape \[B=6\]"),
    "unknown classes": ({"y": lambda y: y + C}, ValueError, "`y` must be classes from 0 to 3"),
    "negative classes": ({"y": lambda y: y - C}, ValueError, "`y` must be classes from 0 to 3"),
    "NaN from the model": ({"model": lambda m: lambda x: m(x) * math.nan}, ValueError, "NaN for 6 of 6"),
    "no logits": ({"model": lambda m: lambda x: x}, ValueError, "`model` must return logits"),
    "reversed box": ({"box": lambda _: (1.0, 0.0)}, ValueError, "`box` must be a pair low < high"),
    "unknown pool": ({"pool": lambda _: "probabilty"}, ValueError, "Did you mean 'probability'"),
}


@pytest.mark.parametrize("reason", REFUSED)
@every_attack
def test_wrong_arguments_are_refused(row, reason, unchecked):
    changes, error, message = REFUSED[reason]
    x, y = images(6)
    arguments = {"model": Steady(), "x": x, "y": y}
    for name, change in changes.items():
        arguments[name] = change(arguments.get(name))
    with pytest.raises(error, match=message):
        row.attack(**arguments)


@bounded
def test_an_epsilon_that_makes_no_sense_is_refused(row, unchecked):
    for epsilon in (-0.1, math.nan):
        with pytest.raises(ValueError, match="`epsilon`"):
            row.attack(Steady(), *images(4), epsilon=epsilon)
    with pytest.raises(ValueError, match="`norm` must be one of 'linf', 'l2'"):
        row.attack(Steady(), *images(4), norm="l3")


# --- attacks from outside the package ---------------------------------------------------------------------------------


def toward_black(model, x, y, *, epsilon, pool="probability", target=None):
    """An attack of a user: every value moves down by ε, even below zero, and every example is called a success."""
    return attacks.Adversarial(x - epsilon, torch.ones_like(y, dtype=torch.bool), torch.full((len(x),), epsilon))


def expected_success(ensemble, x, y, epsilon):
    return predictions(ensemble, (x - epsilon).clamp_min(0)) != y


EVALUATION = {"epsilon": 0.4, "epsilons": [0.4]}


def test_an_attack_from_outside_counts_for_the_worst_case_and_is_not_trusted(ensemble):
    x, y = images(40)
    attack = functools.partial(toward_black, epsilon=0.9)  # beyond ε: its points are clipped
    suite = suites.Suite([attacks.Setting("black", attack, examples=30)], on_survivors=False)
    result = attacks.evaluate(ensemble, (x, y), suite, **EVALUATION)
    misclassified = predictions(ensemble, x) != y
    success = expected_success(ensemble, x, y, 0.4) | misclassified
    success[30:] = misclassified[30:]
    assert result.worst == wilson(int((~success).sum()), 40)
    assert misclassified.sum() < success.sum() < 40, "otherwise the test proves nothing"
    assert result.standing == (~success).nonzero().squeeze(1).tolist()
    (row,) = result.attacks
    assert (row.name, row.examples, row.broken) == ("black", 30, int((success & ~misclassified).sum()))
    assert result.facts["suite"] == "custom"
    assert attacks.Robustness.from_json(result.to_json()) == result


@pytest.mark.slow
def test_further_attacks_run_after_the_suite(ensemble):
    x, y = images(40)
    attack = functools.partial(toward_black, epsilon=0.05)
    further_attacks = [attack, attacks.Setting("black", attack, kind="black-box"), "mim", "carlini_wagner"]

    def weak(terms):
        return suites.quick(terms)._replace(settings=[suites.published("fgsm", 0.01, terms)])

    options = {"epsilon": 0.05, "epsilons": [0.05]}
    result = attacks.evaluate(ensemble, (x, y), weak, attacks=further_attacks, **options)
    assert [row.name for row in result.attacks] == ["FGSM", "toward_black", "black", "MIM", "C&W"]
    assert [row.kind for row in result.attacks[1:3]] == ["white-box", "black-box"]
    unbroken = attacks.fgsm(ensemble, x, y, epsilon=0.01).success
    unbroken = ~(unbroken | expected_success(ensemble, x, y, 0.05) | attacks.mim(ensemble, x, y, epsilon=0.05).success)
    assert result.worst.value <= float(unbroken.double().mean())
    assert not result.attacks[-1].bounded
    quick = attacks.evaluate(ensemble, (x, y), "quick", attacks=[attack], **options)
    assert quick.attacks[-1].name == "toward_black"
    assert quick.facts["suite"] == "quick"


@pytest.mark.slow
def test_points_of_an_unbounded_attack_count_within_epsilon(ensemble):
    x, y = images(40)
    attack = functools.partial(toward_black, epsilon=0.9)
    setting = attacks.Setting("far", lambda m, x, y: attack(m, x, y).inputs.clamp_min(0), bounded=False)
    result = attacks.evaluate(ensemble, (x, y), suites.Suite([setting], False), **EVALUATION)
    assert result.attacks[0].broken > 0
    assert result.worst == result.clean
    dark = attacks.evaluate(ensemble, (x * 0.3, y), suites.Suite([setting], False), **EVALUATION)
    assert dark.worst.value < dark.clean.value, "black is within ε of dark images"


def test_results_of_custom_attacks_are_checked(ensemble):
    x, y = images(12)
    for attack, message in (
        (lambda m, x, y: x[:2], r"`craft` must return inputs \[\d+, 1, 6, 6\]"),
        (lambda m, x, y: None, "got NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            attacks.evaluate(ensemble, (x, y), suites.Suite([attacks.Setting("bad", attack)], False), **EVALUATION)
    nan = attacks.Setting("nan", lambda m, x, y: x * math.nan)
    assert attacks.evaluate(ensemble, (x, y), suites.Suite([nan], False), **EVALUATION).attacks[0].broken == 0
    with pytest.raises(ValueError, match="Did you mean 'mim'"):
        attacks.evaluate(ensemble, (x, y), "quick", attacks=["mimm"], **EVALUATION)


def test_a_wrong_kind_of_attack_is_refused(ensemble, unchecked):
    with pytest.raises(TypeError, match="`attacks` must hold names, settings or functions; got int"):
        attacks.evaluate(ensemble, images(12), "quick", attacks=[3], **EVALUATION)


def test_an_attack_from_outside_runs_over_batches_and_transfers(ensemble, tmp_path):
    x, y = images(20)
    attack = functools.partial(toward_black, epsilon=0.2)
    expected_result = attack(ensemble, x, y)
    for folder in (None, tmp_path, tmp_path):
        result = attacks.over(attack, ensemble, x, y, batch_size=6, folder=folder)
        assert torch.equal(result.inputs, expected_result.inputs)
    matrix = attacks.transfer_matrix(ensemble, x, y, attack=attack)
    assert matrix.accuracy.shape == (4, 4)
    dark = [*ensemble(x - 0.2).argmax(-1), predictions(ensemble, x - 0.2)]
    expected = torch.stack([(labels == y).double().mean() for labels in dark])
    assert torch.equal(matrix.accuracy, expected.expand(4, 4))


@pytest.mark.parametrize("moment", ["the outputs", "an attack"])
def test_an_attack_without_memory_says_what_helps(moment):
    forward_passes = 0

    class Full(torch.nn.Linear):
        def forward(self, x):
            nonlocal forward_passes
            forward_passes += 1
            if moment == "the outputs" or forward_passes > 30:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().forward(x)

    data = (torch.rand(16, 4), torch.randint(3, (16,)))
    with pytest.raises(ds.OutOfMemory, match=r"batches of 8 examples\. What helps: batch_size=4"):
        ds.attacks.evaluate(Full(4, 3), data, "quick", epsilon=0.1, batch_size=8)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("epsilon", [8 / 255, 0.3])
def test_one_step_is_the_first_of_a_loop(norm, dtype, epsilon, monkeypatch):
    """FGSM keeps no state of a loop, and ends where the loop ends, to the bit."""
    model = Steady(dtype=dtype)
    x, y = right_only(model, images(40, dtype=dtype)[0])
    x = torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.1, x.round(), x)  # at edges
    y = model(x).argmax(-1)
    ours = attacks.fgsm(model, x, y, epsilon=epsilon, norm=norm)
    in_loop = functools.partial(
        gradient.gradient_attack, pool="probability", target=None, box=(0.0, 1.0), model=model, x=x, y=y
    )
    settings = gradient.GradientSteps(norm, epsilon, steps=1, step_size=epsilon)
    monkeypatch.setattr(gradient, "_one_step", None)
    loop = in_loop(settings=settings._replace(decay=0.0))  # no momentum: the gradient at a length of its own
    assert loop.success.any()
    assert torch.equal(ours.success, loop.success)
    tolerance = 0 if norm == "linf" else 1e-5
    torch.testing.assert_close(ours.inputs, loop.inputs, rtol=tolerance, atol=tolerance)
