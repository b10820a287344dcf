"""One table over all objectives: what every objective promises, and that its declaration is true."""

import functools
import inspect
import itertools
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import objective_oracles as oracles
import pytest
import torch

import dissensus as ds
from dissensus.objectives import OBJECTIVES, Declaration, declaration, independent
from dissensus.objectives.declaration import (
    ADVERSARIAL,
    DRAW,
    EXAMPLE_WEIGHTS,
    UNLABELLED,
    hyperparameters,
    is_separable,
    takes,
)
from dissensus.train.trained_loss import trained_loss

M, B, C, U = 3, 5, 4, 6


def random_outputs(members=M, batch=B, seed=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(members, batch, C, generator=generator, dtype=torch.float64)).to(dtype)


LABELS = torch.tensor([0, 1, 3, 0, 1])  # no label 2: DivDis counts it with its least frequency
VALUES = torch.linspace(-1, 1, B * C, dtype=torch.float64).view(B, C)


@dataclass(frozen=True)
class Case:
    """An objective with hyperparameters that are not neutral."""

    numbers: Mapping[str, float]
    """All that a sweep can vary."""
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: torch.Tensor = field(default_factory=lambda: LABELS)
    permutable: bool = True
    """Whether members can be permuted."""
    untempered: Mapping[str, float] = field(default_factory=dict)
    """Numbers with which the parts are those of the plain loss."""
    fixed: Callable[..., Mapping[str, torch.Tensor]] = lambda *_: {}
    """Arguments that stop the gradient, computed from outputs and targets."""


OF_CLASSES = {"loss": "cross_entropy"}
CASES = {
    "a2d": Case({"strength": 0.8}),
    "a2d, earlier": Case({"strength": 0.8}, {"classes": "earlier"}, permutable=False),
    "adp": Case({"alpha": 0.7, "beta": 0.3, "temperature": 1.5, "entropy_drop": 0.4}, untempered={"temperature": 1.0}),
    "augmented": Case({"beta": 0.6}, {**OF_CLASSES, "pool": "probability"}),
    "augmented, brier": Case({"beta": 0.6}, {"loss": "brier", "pool": "score"}),
    "augmented, values": Case({"beta": -0.5}, {"loss": "squared_error", "pool": "score"}, VALUES),
    "augmented, weights": Case(
        {"beta": 0.6}, {**OF_CLASSES, "pool": "probability", "weights": [0.2, 0.3, 0.5]}, permutable=False
    ),
    "divdis": Case({"strength": 0.6, "balance": 3.0}),
    "gradient_adjusted": Case({"alpha": 0.7}, targets=VALUES),
    "gradient_adjusted, others": Case({"alpha": 0.7}, {"others_only": True}, VALUES),
    "independent": Case({"smoothing": 0.2}, OF_CLASSES),
    "independent, values": Case({}, {"loss": "squared_error"}, VALUES),
    "independent, weights": Case({}, {"loss": "brier", "weights": [0.2, 0.3, 0.5]}, permutable=False),
    "joint": Case({}, {**OF_CLASSES, "pool": "probability"}),
    "joint, scores": Case({}, {**OF_CLASSES, "pool": "score"}),
    "ldr": Case({"strength": 1.7}, fixed=lambda f, y: {"alpha": ds.objectives.hardness(f, y)}),
    "ldr, inverse": Case(
        {"strength": 1.7},
        {"weight": "inverse"},
        fixed=lambda f, y: {"alpha": ds.objectives.hardness(f, y, "inverse")},
    ),
    "learner_dropout": Case({"drop": 0.4}, {**OF_CLASSES, "pool": "probability"}, permutable=False),
    "learner_dropout, scores": Case(
        {"drop": 0.5}, {"loss": "squared_error", "pool": "score"}, VALUES, permutable=False
    ),
    "negative_correlation": Case({"strength": 0.6}, targets=VALUES),
    "negative_correlation, of classes": Case({"strength": 0.6}, OF_CLASSES),
    "trades": Case({"strength": 2.5}),
}
"""Objectives by name; after a comma, a variant."""
every_case = pytest.mark.parametrize("name", CASES)
every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def objective_of(name):
    return OBJECTIVES[name.split(",")[0]]


def bound(name, **changes):
    case = CASES[name]
    return partial(objective_of(name), **{**case.options, **case.numbers, **changes})


def inputs_of(name, members=M, dtype=torch.float64):
    """Outputs on other inputs that the objective declares."""
    declared = declaration(objective_of(name))
    inputs = {UNLABELLED: (U, 5)} if declared.unlabelled else {}
    inputs |= {ADVERSARIAL: (B, 7)} if declared.adversarial else {}
    return {key: random_outputs(members, size, seed, dtype) for key, (size, seed) in inputs.items()}


def gradients(total, *tensors):
    return torch.autograd.grad(total, tensors, materialize_grads=True)


def numpys(tensors):
    return {key: value.detach().double().numpy() for key, value in tensors.items()}


def oracle_values(name, outputs, inputs):
    case = CASES[name]
    function = getattr(oracles, name.split(",")[0])
    arguments = {**case.options, **case.numbers, **numpys(inputs)}
    return function(outputs.detach().numpy(), case.targets.numpy(), **arguments)


def assert_one_of(total, candidates):
    distances = np.abs(np.array(candidates) - float(total.detach()))
    assert distances.min() <= 1e-9 * max(1.0, abs(float(total.detach()))), (float(total.detach()), candidates)


# The table


def test_every_objective_is_in_both_tables():
    exported = {name: getattr(ds.objectives, name) for name in ds.objectives.__all__}
    functions = {name: value for name, value in exported.items() if inspect.isfunction(value)}
    objectives = {
        name: function
        for name, function in functions.items()
        if inspect.signature(function).return_annotation is ds.LossParts
    }
    assert objectives == dict(OBJECTIVES), "add the objective to OBJECTIVES"
    assert {name.split(",")[0] for name in CASES} == set(OBJECTIVES), "add the objective to the table of this file"
    for name in OBJECTIVES:
        assert CASES[name].numbers.keys() == set(declaration(OBJECTIVES[name]).sweepable), name


# Values


@every_case
def test_the_total_is_that_of_the_papers_equation(name):
    outputs, inputs = random_outputs(), inputs_of(name)
    total = bound(name)(outputs, CASES[name].targets, **inputs).total
    assert_one_of(total, oracle_values(name, outputs, inputs))


@every_objective
def test_neutral_values_give_independent_training_and_others_do_not(name):
    declared, targets = declaration(OBJECTIVES[name]), CASES[name].targets
    trained = trained_loss(bound(name))
    outputs, inputs = random_outputs().requires_grad_(), inputs_of(name)
    expected = independent(outputs, targets, loss=trained.loss).total
    total = bound(name)(outputs, targets, **inputs).total
    assert abs(float(total.detach() - expected.detach())) > 1e-3
    if declared.neutral:
        neutral = bound(name, **declared.neutral)(outputs, targets, **inputs).total
        torch.testing.assert_close(neutral, expected)
        torch.testing.assert_close(gradients(neutral, outputs), gradients(expected, outputs))


@every_case
def test_members_can_be_permuted(name):
    outputs, inputs, targets = random_outputs(), inputs_of(name), CASES[name].targets
    total = bound(name)(outputs, targets, **inputs).total
    permuted = [
        bound(name)(outputs[list(order)], targets, **{key: value[list(order)] for key, value in inputs.items()}).total
        for order in itertools.permutations(range(M))
    ]
    equal = [torch.allclose(total, permuted_total, rtol=1e-12) for permuted_total in permuted]
    assert all(equal) if CASES[name].permutable else not all(equal)


@every_case
def test_one_member(name, unchecked):
    outputs, inputs, targets = random_outputs(1), inputs_of(name, 1), CASES[name].targets
    needs_others = declaration(objective_of(name)).pairs or "others_only" in CASES[name].options
    if needs_others:
        with pytest.raises(ValueError, match=r"at least two members|be False for one member"):
            bound(name)(outputs, targets, **inputs)
        return
    if "weights" in CASES[name].options:
        with pytest.raises(ValueError, match=r"`weights` must have shape \[M=1\]"):
            bound(name)(outputs, targets, **inputs)
        return
    assert_one_of(bound(name)(outputs, targets, **inputs).total, oracle_values(name, outputs, inputs))


@every_case
def test_parts_are_numbers_or_one_per_member(name):
    outputs, inputs = random_outputs(), inputs_of(name)
    total, parts = bound(name)(outputs, CASES[name].targets, **inputs)
    assert total.shape == ()
    assert {"member_loss", "individual"} <= set(parts)
    assert parts["member_loss"].shape == (M,)
    assert all(part.shape in ((), (M,)) for part in parts.values())


# Gradients and precision


@every_case
def test_gradients_are_those_of_the_function(name):
    case, inputs = CASES[name], inputs_of(name)
    outputs = random_outputs()
    objective = bound(name, **case.fixed(outputs, case.targets))

    def total(outputs, *extra_outputs):
        return objective(outputs, case.targets, **dict(zip(inputs, extra_outputs, strict=True))).total

    leaves = [tensor.requires_grad_() for tensor in (outputs, *inputs.values())]
    assert torch.autograd.gradcheck(total, leaves)


@every_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["hundreds", "signs", "identical members"])
def test_extreme_outputs_give_finite_values_and_gradients(name, dtype, kind):
    scaled = (lambda tensor: 1e2 * tensor) if kind == "hundreds" else (lambda tensor: 1e4 * tensor.sign())
    outputs = scaled(random_outputs())
    inputs = {key: scaled(value) for key, value in inputs_of(name).items()}
    if kind == "identical members":
        outputs[2] = outputs[1]
        inputs = {key: torch.cat([value[:2], value[1:2]]) for key, value in inputs.items()}
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (outputs, *inputs.values())]
    total, parts = bound(name)(leaves[0], CASES[name].targets, **dict(zip(inputs, leaves[1:], strict=True)))
    assert total.isfinite()
    assert all(part.isfinite().all() for part in parts.values())
    if name == "ldr, inverse" and dtype == torch.float16:
        return  # its weight is 1/p_y, so that the gradient is beyond what float16 holds
    for gradient in gradients(total, *leaves):
        assert gradient.dtype == dtype
        assert gradient.isfinite().all()


@every_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_float32(name, dtype):
    outputs, inputs, targets = random_outputs(dtype=dtype), inputs_of(name, dtype=dtype), CASES[name].targets
    halves = bound(name)(outputs, targets, **inputs)
    floats = bound(name)(outputs.float(), targets, **{key: value.float() for key, value in inputs.items()})
    assert halves.total.dtype == torch.float32
    assert torch.equal(halves.total, floats.total)
    for part, value in halves.parts.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, floats.parts[part])


# Hyperparameters of a sweep


@every_case
def test_sweepable_numbers_may_be_tensors(name):
    outputs, inputs, targets = random_outputs().requires_grad_(), inputs_of(name), CASES[name].targets
    numbers = {key: torch.tensor(value, dtype=torch.float64) for key, value in CASES[name].numbers.items()}
    floats, tensors = (bound(name, **options)(outputs, targets, **inputs) for options in ({}, numbers))
    torch.testing.assert_close(tensors.total, floats.total)
    torch.testing.assert_close(gradients(tensors.total, outputs), gradients(floats.total, outputs))
    torch.testing.assert_close(dict(tensors.parts), dict(floats.parts))


@every_case
def test_runs_with_numbers_and_draws_of_their_own_go_through_vmap(name):
    objective, case = objective_of(name), CASES[name]
    runs = 3
    outputs = torch.stack([random_outputs(seed=run) for run in range(runs)]).requires_grad_()
    inputs = {key: torch.stack([value, value.flip(1), -value]) for key, value in inputs_of(name).items()}
    scales = torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64)
    numbers = {key: 1e-3 + value * scales for key, value in case.numbers.items()}  # a temperature of 0 is refused
    draws = {DRAW: torch.arange(runs)} if declaration(objective).draw else {}

    def total(outputs, keywords):
        return objective(outputs, case.targets, **case.options, **keywords).total

    mapped = torch.func.vmap(total)(outputs, {**inputs, **numbers, **draws})
    for run in range(runs):
        keywords = {key: float(value[run]) for key, value in numbers.items()}
        keywords |= {key: int(value[run]) for key, value in draws.items()}
        keywords |= {key: value[run] for key, value in inputs.items()}
        torch.testing.assert_close(mapped[run], total(outputs[run], keywords))
    one_by_one = [
        total(outputs[run], {k: v[run] for k, v in {**inputs, **numbers, **draws}.items()}) for run in range(runs)
    ]
    torch.testing.assert_close(gradients(mapped.sum(), outputs), gradients(torch.stack(one_by_one).sum(), outputs))


# Declarations


@every_case
def test_declared_separable_is_what_gradients_say(name):
    """The gradient of a member depends on the outputs of another if and only if members interact."""
    case, objective, declared = CASES[name], bound(name), declaration(objective_of(name))
    outputs, inputs = random_outputs(), inputs_of(name)
    tensors = [outputs, *inputs.values()]
    changed_tensors = [torch.cat([tensor[:1], tensor[1:2].flip(-1), tensor[2:]]) for tensor in tensors]

    def gradient_of_first(tensors, keywords):
        leaves = [tensor.requires_grad_() for tensor in tensors]
        total = objective(leaves[0], case.targets, **dict(zip(inputs, leaves[1:], strict=True)), **keywords).total
        return torch.cat([gradient[0].flatten() for gradient in gradients(total, *leaves)])

    draws = [{DRAW: draw} for draw in range(10)] if declared.draw else [{}]
    moved = [
        (gradient_of_first(tensors, draw) - gradient_of_first(changed_tensors, draw)).abs().max() for draw in draws
    ]
    assert (max(moved) == 0) == declared.separable
    if is_separable(objective):
        member_totals = sum(
            objective(outputs[m : m + 1], case.targets, **{k: v[m : m + 1] for k, v in inputs.items()}).total
            for m in range(M)
        )
        torch.testing.assert_close(objective(outputs, case.targets, **inputs).total, member_totals)


@every_objective
def test_declared_inputs_matter(name):
    objective, declared = bound(name), declaration(OBJECTIVES[name])
    outputs, targets, inputs = random_outputs(), CASES[name].targets, inputs_of(name)
    total = objective(outputs, targets, **inputs).total
    for key, value in inputs.items():
        assert objective(outputs, targets, **{**inputs, key: value / 2}).total != total
    draws = (
        {float(objective(outputs, targets, **inputs, draw=draw).total) for draw in range(20)} if declared.draw else ()
    )
    assert len(draws) > 1 or not declared.draw
    if declared.draw:
        assert objective(outputs, targets, draw=7).total == objective(outputs, targets, draw=torch.tensor(7)).total
    if declared.unlabelled == "required":
        with pytest.raises(TypeError, match="unlabelled"):
            objective(outputs, targets)
    else:
        objective(outputs, targets)


@every_objective
def test_declared_targets(name, unchecked):
    declared, targets = declaration(OBJECTIVES[name]), CASES[name].targets
    inputs = inputs_of(name)
    soft = torch.full((B, C), 1 / C, dtype=torch.float64)
    changes = {"smoothing": None} if "smoothing" in CASES[name].numbers else {}
    if declared.class_labels:
        with pytest.raises(TypeError, match="`targets` must be class labels"):
            bound(name)(random_outputs(), soft, **inputs)
        ensemble, data = ds.Ensemble(lambda: torch.nn.Linear(2, C), M), (torch.randn(B, 2), soft.float())
        unlabelled = torch.randn(U, 2) if declared.unlabelled else None
        with pytest.raises(TypeError, match=r"`targets` must be class labels; got floats \[5, 4\]. Soft labels\?"):
            ds.fit(ensemble, data, bound(name), epochs=1, unlabelled=unlabelled)
    else:
        assert bound(name, **changes)(random_outputs(), soft, **inputs).total.isfinite()
    assert targets.is_floating_point() <= (not declared.class_labels)


@every_case
def test_declared_loss_and_pool_are_those_of_the_parts(name):
    changes = dict(CASES[name].untempered)
    changes |= {"smoothing": None} if "smoothing" in CASES[name].numbers else {}
    outputs, inputs, targets = random_outputs(), inputs_of(name), CASES[name].targets
    trained = trained_loss(bound(name, **changes))
    assert trained is not None
    assert trained.declared
    expected = trained(outputs, targets)
    parts = bound(name, **changes)(outputs, targets, **inputs).parts
    torch.testing.assert_close(parts["member_loss"], expected.parts["member_loss"])
    if "ensemble" in parts:
        torch.testing.assert_close(parts["ensemble"], expected.total)


PER_MEMBER = [(name, key) for name in OBJECTIVES for key in declaration(OBJECTIVES[name]).per_member]


@pytest.mark.parametrize(("name", "key"), PER_MEMBER)
def test_declared_values_per_member(name, key, unchecked):
    outputs, targets = random_outputs(), CASES[name].targets
    common = {"weights": None, "smoothing": 0.2}[key]
    per_member = {"weights": [1 / M] * M, "smoothing": [0.2] * M}[key]
    total = bound(name, **{key: common})(outputs, targets).total
    torch.testing.assert_close(bound(name, **{key: per_member})(outputs, targets).total, total)
    with pytest.raises(ValueError, match=f"`{key}` must"):
        bound(name, **{key: per_member[1:]})(outputs, targets)
    assert not is_separable(bound(name, **{key: per_member}))
    ensemble = ds.Ensemble(lambda: torch.nn.Linear(2, C), M)
    with pytest.raises(ValueError, match=f"`active_members` must come without `{key}` per member"):
        ds.fit(ensemble, (torch.randn(B, 2), targets), bound(name, **{key: per_member}), epochs=1, active_members=2)


@every_objective
def test_hyperparameters_are_all_but_data(name):
    objective = OBJECTIVES[name]
    names = set(inspect.signature(objective).parameters)
    data = {"outputs", "targets", "logits", "labels", UNLABELLED, ADVERSARIAL, DRAW, EXAMPLE_WEIGHTS}
    assert set(hyperparameters(objective)) == names - data
    assert set(hyperparameters(bound(name))) == names - data - set(bound(name).keywords)


@every_objective
def test_declarations_survive_partial_and_pickle(name):
    declared = declaration(OBJECTIVES[name])
    assert OBJECTIVES[name].declaration is declared
    nested = partial(partial(OBJECTIVES[name], **CASES[name].options), **CASES[name].numbers)
    assert declaration(nested) is declared
    assert declaration(pickle.loads(pickle.dumps(nested))) == declared
    assert pickle.loads(pickle.dumps(declared)) == declared
    for key in (UNLABELLED, ADVERSARIAL, DRAW, EXAMPLE_WEIGHTS):
        assert takes(nested, key) == bool(getattr(declared, key))
        assert not takes(partial(nested, **{key: None}), key)


def test_wrappers_and_lambdas_get_the_safe_default():
    @functools.wraps(independent)
    def coupled(*args, **keywords):
        parts = independent(*args, **keywords)
        return ds.LossParts(parts.total + ds.diversity.ambiguity(args[0]).mean(), parts.parts)

    for objective in (coupled, lambda outputs, targets: independent(outputs, targets, loss="squared_error")):
        assert replace(declaration(objective), example_weights=None) == Declaration()
        assert not is_separable(objective)
    assert takes(coupled, EXAMPLE_WEIGHTS), "as its parameters say"
    assert is_separable(Declaration(separable=True)(coupled))


def test_inputs_of_an_objective_without_a_declaration_are_its_parameters():
    def optional(outputs, targets, *, unlabelled=None, draw=0): ...
    def required(outputs, targets, *, unlabelled, adversarial=None): ...
    def weighted(outputs, targets, *, example_weights=None): ...

    assert declaration(optional) == Declaration(unlabelled="optional", draw=True)
    assert declaration(required) == Declaration(unlabelled="required", adversarial=True)
    assert declaration(weighted) == Declaration(example_weights="shared")


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (Declaration(), "`draw` must be True, as the parameters of the objective say; got False"),
        (Declaration(draw=True, adversarial=True), "`adversarial` must be False"),
        (Declaration(draw=True, unlabelled="optional"), "`unlabelled` must be None"),
        (Declaration(draw=True, sweepable=("strenght",)), "Did you mean 'strength'"),
        (Declaration(draw=True, neutral={"beta": 0}), "must be one of 'strength', 'draw'; got 'beta'"),
        (Declaration(draw=True, per_member=("outputs",)), "got 'outputs'"),
        (Declaration(draw=True, example_weights="shared"), "must be None, since the objective has no parameter"),
    ],
)
def test_a_declaration_that_contradicts_the_parameters_is_refused(declared, message):
    with pytest.raises(ValueError, match=message):
        declared(lambda outputs, targets, *, strength=1.0, draw=0: ...)


def test_weights_per_member_need_a_separable_objective():
    def mine(outputs, targets, *, example_weights=None): ...

    with pytest.raises(ValueError, match="`example_weights` must be 'shared' unless the objective is separable"):
        Declaration(example_weights="per_member")(mine)
    assert declaration(Declaration(example_weights="per_member", separable=True)(mine)).example_weights == "per_member"
    assert not takes(Declaration()(mine), EXAMPLE_WEIGHTS), "what is not declared is not passed"


# Weights of examples


COUNTS = torch.tensor([2, 0, 1, 3, 1])
"""How often each example counts."""
MEMBER_COUNTS = torch.tensor([[2, 0, 1, 3, 1], [1, 1, 0, 2, 1], [0, 0, 4, 0, 1]])
CASES_PER_MEMBER = [name for name in CASES if declaration(objective_of(name)).example_weights == "per_member"]


def repeated(name, inputs, counts):
    """The inputs of an objective, with those that belong to labelled examples repeated."""
    return {key: v if key == UNLABELLED else v.repeat_interleave(counts, 1) for key, v in inputs.items()}


@every_objective
def test_every_objective_takes_weights_of_examples(name):
    declared = declaration(OBJECTIVES[name])
    assert declared.example_weights == ("per_member" if declared.separable else "shared")
    assert inspect.signature(OBJECTIVES[name]).parameters[EXAMPLE_WEIGHTS].default is None
    assert declared.soft_targets == (not declared.class_labels)


@every_case
def test_whole_weights_equal_repeated_examples(name):
    """Also of their gradients: an example that counts twice pulls twice."""
    outputs, inputs, targets = random_outputs().requires_grad_(), inputs_of(name), CASES[name].targets
    for inputs_tensor in inputs.values():
        inputs_tensor.requires_grad_()
    weighted = bound(name)(outputs, targets, **inputs, example_weights=COUNTS.double())
    expected = bound(name)(
        outputs.repeat_interleave(COUNTS, 1), targets.repeat_interleave(COUNTS, 0), **repeated(name, inputs, COUNTS)
    )
    torch.testing.assert_close(weighted.total, expected.total)
    torch.testing.assert_close(dict(weighted.parts), dict(expected.parts))
    leaves = (outputs, *inputs.values())
    torch.testing.assert_close(gradients(weighted.total, *leaves), gradients(expected.total, *leaves))
    scaled = bound(name)(outputs, targets, **inputs, example_weights=0.1 * COUNTS)
    torch.testing.assert_close(scaled.total, weighted.total)  # only ratios matter


@every_case
def test_equal_weights_are_none(name):
    outputs, inputs, targets = random_outputs(), inputs_of(name), CASES[name].targets
    weighted = bound(name)(outputs, targets, **inputs, example_weights=torch.full((B,), 0.3))
    plain = bound(name)(outputs, targets, **inputs)
    torch.testing.assert_close(weighted.total, plain.total)
    torch.testing.assert_close(dict(weighted.parts), dict(plain.parts))


@every_case
def test_weighted_gradients_are_those_of_the_function(name):
    case, inputs, outputs = CASES[name], inputs_of(name), random_outputs()
    weights = torch.tensor([0.5, 0.0, 2.0, 1.3, 0.2], dtype=torch.float64)
    fixed = {key: 0 * value + value.detach() for key, value in case.fixed(outputs, case.targets).items()}
    objective = bound(name, **fixed, example_weights=weights)

    def total(outputs, *extra_outputs):
        return objective(outputs, case.targets, **dict(zip(inputs, extra_outputs, strict=True))).total

    leaves = [tensor.requires_grad_() for tensor in (outputs, *inputs.values())]
    assert torch.autograd.gradcheck(total, leaves)


@every_case
def test_an_example_of_weight_zero_is_absent(name):
    """Even if its outputs are infinite or NaN. A batch without any weight adds nothing."""
    case = CASES[name]
    outputs, inputs = random_outputs(), inputs_of(name)
    expected = bound(name)(outputs, case.targets, **inputs, example_weights=COUNTS.double())
    outputs[:, 1] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    if ADVERSARIAL in inputs:
        inputs[ADVERSARIAL][:, 1] = float("nan")
    targets = case.targets.clone()
    if targets.is_floating_point():
        targets[1] = float("nan")
    leaves = [tensor.requires_grad_() for tensor in (outputs, *inputs.values())]
    result = bound(name)(
        leaves[0], targets, **dict(zip(inputs, leaves[1:], strict=True)), example_weights=COUNTS.double()
    )
    torch.testing.assert_close(result.total, expected.total)
    slopes = gradients(result.total, *leaves)
    assert all(slope.isfinite().all() for slope in slopes)
    assert (slopes[0][:, 1] == 0).all()
    empty = bound(name)(leaves[0], targets, **inputs, example_weights=torch.zeros(B))
    assert empty.total.isfinite()
    assert (empty.parts["member_loss"] == 0).all()
    assert (gradients(empty.total, leaves[0])[0] == 0).all()
    if UNLABELLED not in inputs:
        assert float(empty.total.detach()) == 0


@every_case
def test_weighted_runs_go_through_vmap(name):
    runs = 3
    outputs = torch.stack([random_outputs(seed=run) for run in range(runs)])
    weights = torch.rand(runs, B, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights[1] = 0
    inputs, targets = inputs_of(name), CASES[name].targets
    total = lambda f, w: bound(name)(f, targets, **inputs, example_weights=w).total  # noqa: E731
    mapped = torch.func.vmap(total)(outputs, weights)
    torch.testing.assert_close(mapped, torch.stack([total(outputs[run], weights[run]) for run in range(runs)]))


@every_case
def test_weights_per_member(name, unchecked):
    outputs, inputs, targets = random_outputs(), inputs_of(name), CASES[name].targets
    call = partial(bound(name), outputs, targets, **inputs, example_weights=MEMBER_COUNTS.double())
    if name not in CASES_PER_MEMBER:
        objective = name.split(",")[0]
        message = rf"have shape \[B=5\] for `{objective}`, in which members interact.*got \[M=3, B=5\].*independent"
        with pytest.raises(ValueError, match=message):
            call()
        return
    member_loss = []
    for m, counts in enumerate(MEMBER_COUNTS):
        arguments = repeated(name, {key: value[m : m + 1] for key, value in inputs.items()}, counts)
        changes = {"weights": None} if "weights" in CASES[name].options else {}
        one = bound(name, **changes)(
            outputs[m : m + 1].repeat_interleave(counts, 1), targets.repeat_interleave(counts, 0), **arguments
        )
        member_loss.append(one.total)
    shares = torch.tensor(CASES[name].options.get("weights", [1 / M] * M), dtype=torch.float64)
    torch.testing.assert_close(call().total, M * (shares * torch.stack(member_loss)).sum())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(B + 1), r"`example_weights` must have shape \[B=5\]; got \[6\]"),
        (torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0]), "be finite numbers of at least 0"),
        (torch.tensor([1.0, float("nan"), 0.0, 0.0, 0.0]), "be finite numbers of at least 0"),
        ([1.0] * B, "`example_weights` must be a tensor; got list"),
    ],
)
def test_weights_that_are_none_are_refused(weights, message, unchecked):
    with pytest.raises((ValueError, TypeError), match=message):
        bound("joint")(random_outputs(), LABELS, example_weights=weights)


# Dense outputs


S = (2, 3)
DENSE_LABELS = torch.randint(0, C, (B, *S), generator=torch.Generator().manual_seed(6))
DENSE_VALUES = torch.randn(B, C, *S, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def dense_outputs(members=M, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(members, B, C, *S, generator=generator, dtype=torch.float64)


def dense_inputs(name):
    return {key: dense_outputs(seed=seed) for seed, key in enumerate(inputs_of(name), 11)}


def dense_targets(name):
    return DENSE_VALUES if CASES[name].targets.is_floating_point() else DENSE_LABELS


def last(tensor, axis):
    """Positions as examples, with plain torch."""
    return tensor.movedim(axis, -1).flatten(axis - 1, -2)


@every_case
@pytest.mark.parametrize("weighted", [False, True])
def test_every_position_of_dense_outputs_is_an_example(name, weighted):
    outputs, inputs, targets = dense_outputs().requires_grad_(), dense_inputs(name), dense_targets(name)
    flat_targets = last(targets, 1) if targets.is_floating_point() else targets.flatten()
    weights = {EXAMPLE_WEIGHTS: COUNTS.double()} if weighted else {}
    flat_weights = {EXAMPLE_WEIGHTS: COUNTS.double().repeat_interleave(6)} if weighted else {}
    dense = bound(name)(outputs, targets, **inputs, **weights)
    flat = bound(name)(
        last(outputs, 2), flat_targets, **{key: last(value, 2) for key, value in inputs.items()}, **flat_weights
    )
    torch.testing.assert_close(dense.total, flat.total)
    torch.testing.assert_close(dict(dense.parts), dict(flat.parts))
    torch.testing.assert_close(gradients(dense.total, outputs), gradients(flat.total, outputs))


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].targets.is_floating_point()])
def test_ignored_positions_are_those_that_are_left_out(name):
    outputs, inputs = dense_outputs().requires_grad_(), dense_inputs(name)
    ignored = torch.rand(B, *S, generator=torch.Generator().manual_seed(1)) < 0.4
    targets = DENSE_LABELS.masked_fill(ignored, -100)
    flat = ds.dense.positions(outputs, targets, ignore_index=-100)
    inputs = {key: last(value, 2) for key, value in inputs.items()}
    result = bound(name)(flat.outputs, flat.targets, **inputs, example_weights=flat.example_weights)
    counted = ~ignored.flatten()
    inputs = {key: value if key == UNLABELLED else value[:, counted] for key, value in inputs.items()}
    expected = bound(name)(last(outputs, 2)[:, counted], DENSE_LABELS.flatten()[counted], **inputs)
    torch.testing.assert_close(result.total, expected.total)
    torch.testing.assert_close(gradients(result.total, outputs), gradients(expected.total, outputs))


# Objectives from outside of the package, passed as arguments


X = torch.randn(20, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(20, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
OTHER_X = torch.randn(12, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
TRAINING = {"epochs": 2, "batch_size": 8, "lr": 0.05}
build = partial(ds.nets.mlp, 3, 2, (5,))


@Declaration(
    pairs=True,
    unlabelled="optional",
    draw=True,
    sweepable=("strength",),
    loss="squared_error",
    pool="score",
    neutral={"strength": 0},
)
def repelled(outputs, targets, *, strength=0.3, power=1, unlabelled=None, draw=0):
    """Squared error, and a reward for the distance between a random pair of members, on other data if there is any."""
    assert isinstance(power, int)  # so it is no tensor, and runs that differ in it are trained apart
    parts = independent(outputs, targets, loss="squared_error")
    pairs = torch.tensor([(0, 1), (0, 2), (1, 2)])
    compared = outputs if unlabelled is None else unlabelled
    first, second = compared[pairs[torch.as_tensor(draw) % 3]]
    distance = (first - second).abs().pow(power).mean()
    return ds.LossParts(parts.total - strength * distance.tanh(), {**parts.parts, "distance": distance})


@Declaration(separable=True, sweepable=("strength",))
def shrunk(outputs, targets, *, strength=0.1, loss="squared_error"):
    """Every member by itself: the loss, and a penalty on large outputs."""
    parts = independent(outputs, targets, loss=loss)
    size = outputs.square().sum(-1).mean(-1)
    return ds.LossParts(parts.total + strength * size.sum(), dict(parts.parts))


@pytest.fixture
def tables_unchanged():
    """Nothing that is passed as an argument enters a table."""
    before = dict(OBJECTIVES), dict(ds.losses.LOSSES), [vars(f).get("declaration") for f in OBJECTIVES.values()]
    yield
    after = dict(OBJECTIVES), dict(ds.losses.LOSSES), [vars(f).get("declaration") for f in OBJECTIVES.values()]
    assert after == before


def ensemble_of(members=M):
    return ds.Ensemble(build, members, backend="loop").double()


def weights(ensemble):
    return {name: tensor.detach().clone() for name, tensor in ensemble.body.tensors().items()}


@pytest.mark.usefixtures("tables_unchanged")
def test_an_objective_from_outside_gets_what_it_declares():
    calls = []

    @Declaration(unlabelled="optional", draw=True, loss="squared_error", pool="score")
    def recorded(outputs, targets, *, unlabelled=None, draw=0):
        calls.append((int(draw), None if unlabelled is None else tuple(unlabelled.shape)))
        return repelled(outputs, targets, unlabelled=unlabelled, draw=draw)

    ds.fit(ensemble_of(), (X, Y), recorded, unlabelled=OTHER_X, **TRAINING)
    assert len({draw for draw, _ in calls}) == len(calls) == 6, "another draw at every step"
    assert {shape for _, shape in calls} == {(M, 8, 2)}
    calls.clear()
    ds.fit(ensemble_of(), (X, Y), recorded, **TRAINING)
    assert {shape for _, shape in calls} == {None}
    with pytest.raises(ValueError, match="`active_members` must be at least 2 for an objective of pairs"):
        ds.fit(ensemble_of(), (X, Y), repelled, active_members=1, **TRAINING)
    with pytest.raises(ValueError, match=r"`targets` must have shape|be -1 or \+1"):
        ds.fit(ensemble_of(), (X, Y), partial(shrunk, loss="logistic"), **TRAINING)


@pytest.mark.usefixtures("tables_unchanged")
def test_an_objective_from_outside_is_swept():
    """Runs that differ in a sweepable number share a training, and every run equals the same run fitted alone."""
    grid = {"strength": [0.0, 0.6], "power": [1, 2], "seed": [0, 1]}
    swept = ds.sweep(lambda: build().double(), (X, Y), repelled, grid=grid, members=M, unlabelled=OTHER_X, **TRAINING)
    assert len(swept.groups) == 2, "one for each power"
    for number, point in enumerate(swept.points):
        single = ds.Ensemble(build, M, seed=point["seed"], backend="loop").double()
        objective = partial(repelled, strength=point["strength"], power=point["power"])
        ds.fit(single, (X, Y), objective, seed=point["seed"], unlabelled=OTHER_X, **TRAINING)
        torch.testing.assert_close(swept.run(number).predict(X), single.predict(X), rtol=1e-8, atol=1e-10)
    with pytest.raises(ValueError, match="Did you mean 'strength'"):
        ds.sweep(build, (X.float(), Y.float()), repelled, grid={"strenth": [0.1]}, members=M, epochs=1)


@pytest.mark.usefixtures("tables_unchanged")
def test_an_objective_from_outside_has_a_twin():
    ensemble, reference = ensemble_of(), ensemble_of()
    history = ds.fit(ensemble, (X, Y), repelled, twin=True, validation=(X, Y), keep="last", **TRAINING)
    ds.fit(reference, (X, Y), partial(independent, loss="squared_error"), **TRAINING)
    torch.testing.assert_close(weights(ensemble.twin), weights(reference))
    assert not torch.allclose(ensemble.predict(X), ensemble.twin.predict(X))
    pooled = ds.diversity.decompose(ensemble.predict(X), Y, loss="squared_error", pool="score").ensemble.mean()
    assert history.column("validation")[-1] == pytest.approx(float(pooled)), "the declared loss and pool are watched"
    for objective, description in (
        (shrunk, "shrunk, which"),
        (partial(repelled, strength=0.0), "repelled with strength=0"),
    ):
        with pytest.raises(ValueError, match=f"`twin` must come with .* members interact; got {description}"):
            ds.fit(ensemble_of(), (X, Y), objective, twin=True, **TRAINING)


@pytest.mark.usefixtures("tables_unchanged")
@pytest.mark.parametrize("declared", [True, False])
def test_members_are_processed_in_groups_if_declared_separable(declared):
    """A separable objective is called for a part of the members; one that declares nothing for all at once."""
    calls = []

    def recorded(outputs, targets, *, strength=0.2):
        calls.append(len(outputs))
        return shrunk(outputs, targets, strength=strength)

    objective = Declaration(separable=True)(recorded) if declared else recorded
    at_once, in_groups = ensemble_of(), ensemble_of()
    ds.fit(at_once, (X, Y), partial(objective, strength=0.4), **TRAINING)
    assert set(calls) == {M}
    calls.clear()
    state_bytes = 6 * at_once.body.packed().numel() * 8
    history = ds.fit(in_groups, (X, Y), partial(objective, strength=0.4), max_memory=state_bytes + 2000, **TRAINING)
    assert not history.memory.startswith(f"{M} of"), history.memory
    assert (min(calls) < M) == declared
    torch.testing.assert_close(weights(in_groups), weights(at_once))
