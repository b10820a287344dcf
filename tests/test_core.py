"""The pure core at its edges, and what it says to those who hand it the wrong thing."""

import ast
import math
from functools import partial
from pathlib import Path

import pytest
import torch

import dissensus as ds
from dissensus import checks
from dissensus.randomness import Use, derived_seed, encoded, keep_mask, random_bits

LOGITS = torch.tensor([[[1.0, 0.0, -1.0], [0.5, 0.2, 0.1]], [[0.0, 2.0, 1.0], [0.3, 0.3, 0.3]]])
LABELS = torch.tensor([0, 2])

pytestmark = pytest.mark.usefixtures("unchecked")


def decomposed(outputs=LOGITS, targets=LABELS, loss="cross_entropy", pool="probability", **options):
    return ds.diversity.decompose(outputs, targets, loss=loss, pool=pool, **options)


REFUSALS = {
    "two axes": (lambda: decomposed(LOGITS[0]), r"`outputs` must have shape \[M, B, C\]; got \[2, 3\]. One output"),
    "whole numbers": (lambda: decomposed(LOGITS.long()), r"be floating point; got torch.int64. Use outputs.float\(\)"),
    "empty": (lambda: decomposed(LOGITS[:, :0], LABELS[:0]), r"at least one member, example.*got \[M=2, B=0, C=3\]"),
    "one-hot": (
        lambda: decomposed(targets=torch.eye(3)[LABELS].long()),
        r"`targets` must have shape \[B=2\]; got \[2, 3\]. One-hot\? Use targets.argmax\(-1\)",
    ),
    "column": (lambda: decomposed(targets=LABELS.unsqueeze(1)), r"A column\? Use targets.squeeze\(-1\)"),
    "float labels": (lambda: decomposed(targets=LABELS.float()), r"must be whole numbers: use targets.long\(\)"),
    "bool labels": (lambda: decomposed(targets=LABELS > 0), "be whole numbers"),
    "soft 0-1": (lambda: decomposed(targets=torch.eye(3)[LABELS], loss="zero_one"), r"Use targets.argmax\(-1\)"),
    "label range": (lambda: decomposed(targets=LABELS + 1), "labels from 0 to 2; got labels from 1 to 3"),
    "soft sums": (lambda: decomposed(targets=torch.ones(2, 3)), "with sum one; got sums off by up to 2"),
    "loss name": (lambda: decomposed(loss="cross_entropi"), "Did you mean 'cross_entropy'"),
    "pool name": (lambda: decomposed(pool="prob"), "be one of 'probability', 'score', 'vote'; got 'prob'"),
    "pool of values": (lambda: decomposed(loss="mse"), "be 'score' for loss 'mse', which takes values"),
    "vote": (lambda: decomposed(pool="vote"), "votes are no probabilities"),
    "weights shape": (lambda: decomposed(weights=[1.0]), r"`weights` must have shape \[M=2\]; got \[1\]"),
    "weights sum": (lambda: decomposed(weights=[1.0, 1.0]), "sum of 2. Divide them by their sum"),
    "weights sign": (lambda: decomposed(weights=[2.0, -1.0]), "be non-negative"),
    "weights nan": (lambda: decomposed(weights=[math.nan, 1.0]), "be non-negative"),
    "values shape": (
        lambda: decomposed(targets=torch.ones(2, 2), loss="mse", pool="score"),
        r"shape \[B=2, C=3\]; got \[2, 2\]",
    ),
    "margins": (
        lambda: decomposed(LOGITS[..., :1], torch.tensor([0.0, 1.0]), "logistic", "score"),
        r"be -1 or \+1.*Use 2 \* targets - 1",
    ),
    "counts": (lambda: decomposed(LOGITS, -torch.ones(2, 3), "poisson", "score"), "counts of at least 0; got -1"),
    "reduced loss": (
        lambda: decomposed(loss=torch.nn.functional.cross_entropy),
        r"one number per example, \[B=4\]|one number per example, \[B=2\]",
    ),
    "three classes": (lambda: ds.diversity.vote_disagreement(LOGITS, LABELS), "C=2 classes; got C=3"),
    "family": (lambda: ds.diversity.exponential_family(LOGITS, family="poison"), "Did you mean 'poisson'"),
    "train on 0-1": (lambda: ds.objectives.independent(LOGITS, LABELS, loss="zero_one"), "be differentiable"),
    "curvature of 0-1": (lambda: ds.diversity.hessian_form(LOGITS, LABELS, loss="zero_one"), "be differentiable"),
    "beta": (
        lambda: ds.objectives.augmented(LOGITS, LABELS, beta=1.01, loss="brier", pool="probability"),
        r"no lower bound.*theorem 5.1\); got 1.01. To study that, pass allow_pathological=True",
    ),
    "beta nan": (
        lambda: ds.objectives.augmented(LOGITS, LABELS, beta=math.nan, loss="brier", pool="probability"),
        "be a finite number",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_what_came_and_the_fix(case):
    call, message = REFUSALS[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_nan_stays_at_its_own_example():
    spoilt = LOGITS.clone()
    spoilt[0, 1, 0] = math.nan
    for part in decomposed(spoilt):
        assert part[0].isfinite()
        assert part[1].isnan()


def test_a_negative_beta_rewards_agreement():
    values = torch.tensor([[[-1.0]], [[1.0]]], requires_grad=True)
    total = ds.objectives.augmented(values, torch.zeros(1, 1), beta=-1.0, loss="mse", pool="score").total
    apart = torch.autograd.grad(total, values)[0]
    alone = torch.autograd.grad(ds.objectives.independent(values, torch.zeros(1, 1), loss="mse").total, values)[0]
    assert apart[1] > alone[1] > 0, "members are pulled together harder than the loss alone pulls them"


def test_objectives_run_under_vmap_with_a_beta_per_run():
    outputs, targets = torch.randn(4, 3, 5, 2), torch.randint(0, 2, (4, 5))
    betas = torch.tensor([0.0, 0.3, 1.0, 2.0])

    def one(outputs, targets, beta):
        return ds.objectives.augmented(outputs, targets, beta=beta, loss="cross_entropy", pool="probability").total

    stacked = torch.func.vmap(one)(outputs, targets, betas)
    for i, beta in enumerate(betas):
        torch.testing.assert_close(stacked[i], one(outputs[i], targets[i], beta))


def test_a_users_loss_sees_what_the_pool_says():
    seen = []

    def loss(outputs, targets):
        seen.append(outputs.detach())
        return outputs.exp().sum(-1) + 0 * targets

    decomposed(loss=loss, pool="probability")
    assert all(torch.allclose(outputs.exp().sum(-1), torch.ones(len(outputs))) for outputs in seen)
    assert sorted(len(outputs) for outputs in seen) == [2, 4], "one call for all members, one for the ensemble"


def test_pools_agree_for_one_member_and_for_identical_ones():
    for logits in (LOGITS[:1], LOGITS[:1].expand(4, -1, -1)):
        expected = LOGITS[0].log_softmax(-1)
        torch.testing.assert_close(ds.pooling.mean_probability(logits), expected)
        torch.testing.assert_close(ds.pooling.mean_score(logits), expected)


def test_pooling_stays_in_log_space():
    logits = torch.tensor([[[1e4, -1e4]], [[1e4, -1e4]]], requires_grad=True)
    pooled = ds.pooling.mean_probability(logits)
    torch.testing.assert_close(pooled, torch.tensor([[0.0, -2e4]]))
    (grad,) = torch.autograd.grad(pooled[0, 1], logits)
    assert grad.isfinite().all()


def test_ties_go_to_the_lowest_class():
    tied = torch.zeros(3, 1, 4)
    assert ds.pooling.vote_share(tied).argmax(-1).item() == 0
    split = torch.tensor([[[0.0, 1.0, 0.0]], [[0.0, 0.0, 1.0]]])
    assert ds.pooling.vote_share(split).argmax(-1).item() == 1


def test_number_and_count_messages():
    with pytest.raises(ValueError, match="`p` must be a number above 0 and at most 1; got 0.0"):
        checks.number("p", 0.0, 0, 1, open_low=True)
    with pytest.raises(TypeError, match="got 'a'"):
        checks.number("p", "a")
    with pytest.raises(ValueError, match="at least 2; got True"):
        checks.count("n", True, 2)


def test_random_streams_of_different_uses_never_meet():
    seeds = [*range(20), 2**32, 2**63 - 1, 2**64, -1]
    numbers = [(), (0,), (0, 0), (1,), (1, 0), (2**32,), (0, 1), (11,), (12,), (14,), ("1",), ("", 1)]
    derived = [derived_seed(seed, use, *words) for seed in seeds for use in Use for words in numbers]
    assert len(set(derived)) == len(derived) == len(seeds) * len(Use) * len(numbers)
    assert all(0 <= seed < 2**63 for seed in derived)
    # A seed with a second word in its upper half is not that pair, and no word vanishes.
    assert derived_seed(1 + (2 << 32), Use.SHUFFLE) != derived_seed(1, Use.SHUFFLE, 2)
    assert len({encoded(*words) for words in numbers}) == len(numbers)
    # Member 11's weights once came from the seed that also keyed what objectives draw.
    members = {derived_seed(0, Use.INITIAL_WEIGHTS, member) for member in range(100)}
    assert not members & {derived_seed(0, use) for use in Use}


def test_every_derived_seed_names_its_use():
    """`randomness.Use` holds all names, and every call in the package takes one of them."""
    calls = [
        (file.name, call.args[1])
        for file in Path(ds.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "derived_seed"
    ]
    used = {arg.attr for _, arg in calls if isinstance(arg, ast.Attribute) and ast.unparse(arg.value) == "Use"}
    assert len(calls) >= len(used)
    assert used == {use.name for use in Use}
    assert all(ast.unparse(arg).startswith("Use.") for _, arg in calls)


def test_random_bits_of_many_keys_and_steps_differ():
    """Among 2²⁰ streams of (key, step), a state of 32 bits would have brought equal ones."""
    keys = torch.tensor([derived_seed(0, Use.DROPOUT, member) for member in range(1024)])
    steps = torch.arange(1024)
    bits = torch.func.vmap(lambda key: torch.func.vmap(lambda step: random_bits((3,), key, step))(steps))(
        keys
    )  # [1024, 1024, 3]
    assert len(bits.view(-1, 3).unique(dim=0)) == 2**20


def test_seeds_and_masks_depend_on_every_word():
    key, step = torch.tensor(11), torch.tensor(3)
    mask = keep_mask((4000,), 0.5, key, step)
    assert torch.equal(mask, keep_mask((4000,), 0.5, key, step))
    others = [keep_mask((4000,), 0.5, key + 1, step), keep_mask((4000,), 0.5, key, step + 1), mask.roll(1)]
    for other in [*others, keep_mask((4000,), 0.5, torch.tensor(11 + 2**32), step)]:
        agreement = (mask == other).double().mean()
        assert abs(agreement - 0.5) < 0.05
    assert keep_mask((9,), 0.0, key, step).all()
    assert not keep_mask((9,), 1.0, key, step).any()


def test_dropout_of_everything_and_of_nothing():
    layer = ds.Ensemble(lambda: torch.nn.Sequential(torch.nn.Dropout(1.0), torch.nn.Linear(2, 1)), 1).member(0)[0]
    assert torch.equal(layer(torch.ones(3, 2)), torch.zeros(3, 2))
    assert torch.equal(layer.eval()(torch.ones(3, 2)), torch.ones(3, 2))


def test_nets_refuse_impossible_sizes():
    with pytest.raises(ValueError, match="`image_size` must be at least 8"):
        ds.nets.cnn(1, 10, 4, (4, 4, 4))
    with pytest.raises(ValueError, match="`hidden` must be a whole number of at least 1; got 0"):
        ds.nets.mlp(3, 1, (0,))


def test_partial_objectives_are_plain_callables():
    objective = partial(ds.objectives.joint, loss="cross_entropy", pool="score")
    parts = objective(LOGITS, LABELS)
    assert set(parts.parts) == {"member_loss", "individual", "ensemble", "diversity"}
    torch.testing.assert_close(parts.total, 2 * parts.parts["ensemble"])
