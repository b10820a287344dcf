"""The pure core at its edges, and what it says to those who hand it the wrong thing."""

import ast
import inspect
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dissensus as ds
from dissensus import checks
from dissensus.ensemble import fresh_members
from dissensus.randomness import Use, derived_seed, encoded, keep_mask, random_bits, seeded
from dissensus.studies import measures

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
        lambda: decomposed(targets=torch.ones(2, 2), loss="squared_error", pool="score"),
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
    augmented_gradient = torch.autograd.grad(total, values)[0]
    independent_gradient = torch.autograd.grad(
        ds.objectives.independent(values, torch.zeros(1, 1), loss="mse").total, values
    )[0]
    assert augmented_gradient[1] > independent_gradient[1] > 0, (
        "members are pulled together harder than the loss alone pulls them"
    )


def test_a_users_loss_sees_what_the_pool_says():
    batches = []

    def loss(outputs, targets):
        batches.append(outputs.detach())
        return outputs.exp().sum(-1) + 0 * targets

    decomposed(loss=loss, pool="probability")
    assert all(torch.allclose(outputs.exp().sum(-1), torch.ones(len(outputs))) for outputs in batches)
    assert sorted(len(outputs) for outputs in batches) == [2, 4], "one call for all members, one for the ensemble"


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
    keys = [(), (0,), (0, 0), (1,), (1, 0), (2**32,), (0, 1), (11,), (12,), (14,), ("1",), ("", 1)]
    derived = [derived_seed(seed, use, *key) for seed in seeds for use in Use for key in keys]
    assert len(set(derived)) == len(derived) == len(seeds) * len(Use) * len(keys)
    assert all(0 <= seed < 2**63 for seed in derived)
    # A seed with a second word in its upper half is not that pair, and no word vanishes.
    assert derived_seed(1 + (2 << 32), Use.SHUFFLE) != derived_seed(1, Use.SHUFFLE, 2)
    assert len({encoded(*key) for key in keys}) == len(keys)
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
    names = {arg.attr for _, arg in calls if isinstance(arg, ast.Attribute) and ast.unparse(arg.value) == "Use"}
    assert len(calls) >= len(names)
    assert names == {use.name for use in Use}
    assert all(ast.unparse(arg).startswith("Use.") for _, arg in calls)


@pytest.mark.slow
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
    other_masks = [keep_mask((4000,), 0.5, key + 1, step), keep_mask((4000,), 0.5, key, step + 1), mask.roll(1)]
    for other_mask in [*other_masks, keep_mask((4000,), 0.5, torch.tensor(11 + 2**32), step)]:
        agreement = (mask == other_mask).double().mean()
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


# --- one table over every public function of member outputs -----------------------------------------------------------

NOT_OF_OUTPUTS = {
    "pooling": {
        "mean_output",
        "mixture_quantile",
        "pooled_log_probs",
        "ballots",
        "first_choices",
        "weighed_only",
        "absent_detached",
    },
    "losses": {
        "named",
        "check_trainable",
        "check_target_values",
        "check_targets",
        "per_member",
        "custom",
        "at_label",
        "as_values",
        "batch_mean",
        "check_levels",
        "function_of",
        "known",
        "name_of",
        "outputs_per_target",
        "settings_of",
        "tell_of_mean",
        "text_of",
        "class_example_weights",
        "smoothed",
        "weighted_targets",
    },
    "scores": {"of_logits", "select"},
    "diversity": {"beta_approximation", "flipped", "independent_errors", "generalisation_gap", "mean_covariance"},
    "metrics": {
        "auroc",
        "compared",
        "ood",
        "ood_coverage",
        "ood_disagreement_bound",
        "risk_coverage",
        "roc",
        "threshold",
        "wilson",
    },
    "objectives": {
        "adp_confidence",
        "adp_entropy_weight",
        "alpha_from_beta",
        "alpha_from_gamma",
        "beta_from_alpha",
        "declaration",
        "gamma_from_alpha",
    },
}
"""Public functions that take no outputs of members, or do the same to every axis but the first."""

Y = torch.tensor([0, 1, 1, 0, 1])
REALS, SIGNS = torch.linspace(-1, 1, 20).view(5, 4).double(), torch.tensor([1.0, -1.0]).repeat(10).view(5, 4).double()
WEIGHTS = [0.2, 0.3, 0.5]


def random_outputs(dtype=torch.float64):
    return (2 * torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).to(dtype)


def softmax(f):
    """Over classes; an array of an array."""
    if isinstance(f, torch.Tensor):
        return f.softmax(2)
    odds = np.exp(f - f.max(2, keepdims=True))
    return odds / odds.sum(2, keepdims=True)


def pair(f):
    return f[:, :, :2]  # for what takes two classes alone; the rest of the axes stay


def pair_of(targets):
    return targets[:, :2]


def gaussians(f):
    """Outputs as means and variances of two targets, of arrays as well."""
    return pair(f), abs(f[:, :, 2:])


def last(values, axis):
    """The axis of targets last, as joint likelihoods have it."""
    return values.movedim(axis, -1) if isinstance(values, torch.Tensor) else np.moveaxis(values, axis, -1)


def pooled(f):
    return ds.pooling.mean_output(f)


def bound_function(module, name, **options):
    return lambda f: getattr(module, name)(f, **options)


def targeted(module, name, targets, **options):
    return lambda f: getattr(module, name)(f, targets, **options)


PROBS = {
    name: (lambda f, score=score: score.function(softmax(f)))
    for name, score in ds.scores.SCORES.items()
    if score.takes == "probabilities"
}
EXAMPLE, PAIRS, NUMBER, REFUSED = "example", "pairs", "number", "refused"


def functions(y, reals, signs):
    """``(a function of logits [M=3, B=5, C=4], where a NaN in member 1 at example 2 is told)``."""
    return {
        "pooling.mean_probability": (bound_function(ds.pooling, "mean_probability", weights=WEIGHTS), EXAMPLE),
        "pooling.mean_score": (bound_function(ds.pooling, "mean_score", weights=WEIGHTS), EXAMPLE),
        "pooling.vote_share": (bound_function(ds.pooling, "vote_share", weights=WEIGHTS), EXAMPLE),
        "pooling.probabilities": (bound_function(ds.pooling, "probabilities", weights=WEIGHTS), EXAMPLE),
        "pooling.mean_label_probability": (
            lambda f: ds.pooling.mean_label_probability(f, WEIGHTS).sum(1),  # NaN at its own label alone
            EXAMPLE,
        ),
        "pooling.moment_matched": (
            lambda f: torch.stack(ds.pooling.moment_matched(*gaussians(f), WEIGHTS)).sum((0, 2)),
            EXAMPLE,
        ),
        "losses.mse": (targeted(ds.losses, "mse", reals), EXAMPLE),
        "losses.squared_error": (targeted(ds.losses, "squared_error", reals), EXAMPLE),
        "losses.gaussian_nll": (targeted(ds.losses, "gaussian_nll", pair_of(reals)), EXAMPLE),
        "losses.gaussian_moments": (lambda f: sum(ds.losses.gaussian_moments(f)).sum(-1), EXAMPLE),
        "losses.quantile": (targeted(ds.losses, "quantile", pair_of(reals), levels=(0.2, 0.8)), EXAMPLE),
        "losses.bce": (targeted(ds.losses, "bce", (signs + 1) / 2), EXAMPLE),
        "losses.cross_entropy": (targeted(ds.losses, "cross_entropy", y), EXAMPLE),
        "losses.brier": (targeted(ds.losses, "brier", y), EXAMPLE),
        "losses.zero_one": (targeted(ds.losses, "zero_one", y), EXAMPLE),
        "losses.logistic": (targeted(ds.losses, "logistic", signs), EXAMPLE),
        "losses.exponential": (targeted(ds.losses, "exponential", signs), EXAMPLE),
        "losses.poisson": (targeted(ds.losses, "poisson", abs(reals)), EXAMPLE),
        "losses.divergence": (lambda f: ds.losses.divergence(f, f[:, :, [3, 2, 1, 0]]), EXAMPLE),
        **{f"scores.{name}": (call, EXAMPLE) for name, call in PROBS.items() if name != "distinct_predictions"},
        "scores.mean_energy": (ds.scores.mean_energy, EXAMPLE),
        "scores.max_logit": (ds.scores.max_logit, EXAMPLE),
        "scores.table": (lambda f: torch.stack(list(ds.scores.table(f).values())), EXAMPLE),
        "diversity.ambiguity": (bound_function(ds.diversity, "ambiguity", weights=WEIGHTS), EXAMPLE),
        "diversity.brier_variance": (bound_function(ds.diversity, "brier_variance", weights=WEIGHTS), EXAMPLE),
        "diversity.score_kl": (bound_function(ds.diversity, "score_kl", weights=WEIGHTS), EXAMPLE),
        "diversity.probability_kl_limit": (
            bound_function(ds.diversity, "probability_kl_limit", weights=WEIGHTS),
            EXAMPLE,
        ),
        "diversity.probability_log_ratio": (
            targeted(ds.diversity, "probability_log_ratio", y, weights=WEIGHTS),
            EXAMPLE,
        ),
        "diversity.probability_variance_approximation": (
            targeted(ds.diversity, "probability_variance_approximation", y),
            EXAMPLE,
        ),
        "diversity.exponential_family": (
            bound_function(ds.diversity, "exponential_family", family="categorical"),
            EXAMPLE,
        ),
        "diversity.hessian_form": (targeted(ds.diversity, "hessian_form", y, loss="cross_entropy"), EXAMPLE),
        "diversity.vote_disagreement": (lambda f: ds.diversity.vote_disagreement(pair(f), y, WEIGHTS), EXAMPLE),
        "diversity.decompose": (
            lambda f: torch.stack(ds.diversity.decompose(f, y, loss="cross_entropy", pool="probability")),
            EXAMPLE,
        ),
        "diversity.decompose, vote": (
            lambda f: torch.stack(ds.diversity.decompose(f, y, loss="zero_one", pool="vote")),
            EXAMPLE,
        ),
        "diversity.decompose, a user's loss of votes": (
            lambda f: torch.stack(ds.diversity.decompose(f, y, loss=lambda p, y: p.sum(-1) + y, pool="vote")),
            EXAMPLE,
        ),
        "diversity.codependence": (
            targeted(ds.diversity, "codependence", y, loss="cross_entropy", pool="score", drop=0.4),
            EXAMPLE,
        ),
        "diversity.codependence, nobody dropped": (
            targeted(ds.diversity, "codependence", y, loss="zero_one", pool="vote", drop=0.1),
            EXAMPLE,
        ),
        "diversity.distinct_predictions": (ds.diversity.distinct_predictions, EXAMPLE),
        "diversity.jensen_shannon": (lambda f: ds.diversity.jensen_shannon(softmax(f)), EXAMPLE),
        "diversity.nonmaximal_volume": (bound_function(ds.diversity, "nonmaximal_volume"), EXAMPLE),
        "diversity.nonmaximal_volume, of labels": (targeted(ds.diversity, "nonmaximal_volume", y), EXAMPLE),
        "diversity.errors": (lambda f: ds.diversity.errors(f, y, loss="brier").sum(2), EXAMPLE),
        "diversity.debias": (lambda f: ds.diversity.debias(f).isnan().any(2).flatten(1).any(1), "members"),
        "diversity.pairwise_disagreement": (ds.diversity.pairwise_disagreement, PAIRS),
        "diversity.error_covariance": (targeted(ds.diversity, "error_covariance", y, loss="brier"), PAIRS),
        "diversity.error_correlation": (targeted(ds.diversity, "error_correlation", y, loss="brier"), PAIRS),
        "diversity.plane": (lambda f: _matrix(*ds.diversity.plane(f, y)), PAIRS),
        "diversity.bias_share": (bound_function(ds.diversity, "bias_share", weights=WEIGHTS), NUMBER),
        "diversity.dominance": (targeted(ds.diversity, "dominance", y, loss="cross_entropy", pool="score"), NUMBER),
        "diversity.relative_diversity": (
            targeted(ds.diversity, "relative_diversity", y, loss="zero_one", pool="vote"),
            NUMBER,
        ),
        "metrics.calibration": (lambda f: ds.metrics.calibration(ds.pooling.mean_probability(f), y), REFUSED),
        "metrics.prediction_accuracy": (targeted(ds.metrics, "prediction_accuracy", y, pool="vote"), REFUSED),
        "metrics.oracle": (targeted(ds.metrics, "oracle", y), REFUSED),
        "metrics.worst_group": (lambda f: ds.metrics.worst_group(ds.pooling.mean_score(f), y, y), REFUSED),
        "metrics.temper": (targeted(ds.metrics, "temper", y), REFUSED),
        "metrics.temperature": (lambda f: ds.metrics.temperature(f.mean(0), y), REFUSED),
        "metrics.crps_ensemble": (lambda f: ds.metrics.crps_ensemble(f, reals).sum(1), EXAMPLE),
        "metrics.crps_mixture": (
            lambda f: ds.metrics.crps_mixture(*gaussians(f), pair_of(reals), weights=WEIGHTS).sum(1),
            EXAMPLE,
        ),
        "metrics.nll_mixture": (
            lambda f: ds.metrics.nll_mixture(
                *(last(part, 2) for part in gaussians(f)), last(pair_of(reals), 1), weights=WEIGHTS
            ),
            EXAMPLE,
        ),
        "metrics.pit": (
            lambda f: ds.metrics.pit(*gaussians(f), pair_of(reals), weights=WEIGHTS).sum(1),
            EXAMPLE,
        ),
        "metrics.crps_gaussian": (
            lambda f: ds.metrics.crps_gaussian(*map(pooled, gaussians(f)), pair_of(reals)).sum(1),
            EXAMPLE,
        ),
        "metrics.nll_gaussian": (
            lambda f: ds.metrics.nll_gaussian(
                *(last(pooled(part), 1) for part in gaussians(f)), last(pair_of(reals), 1)
            ),
            EXAMPLE,
        ),
        "metrics.winkler": (
            lambda f: ds.metrics.winkler(pooled(f) - 1, pooled(f) + 1, reals, level=0.8).sum(1),
            EXAMPLE,
        ),
        "metrics.pinball": (
            lambda f: ds.metrics.pinball(last(pooled(f), 1), reals[:, 0], levels=(0.1, 0.3, 0.6, 0.9)).sum(-1),
            EXAMPLE,
        ),
        "metrics.crps_quantiles": (
            lambda f: ds.metrics.crps_quantiles(last(pooled(f), 1), reals[:, 0], levels=(0.1, 0.3, 0.6, 0.9)),
            EXAMPLE,
        ),
        "metrics.regression": (
            lambda f: round(ds.metrics.regression(pooled(f), reals, repeats=0).mae.value, 9),
            REFUSED,
        ),
        "metrics.mean_interval": (lambda f: round(ds.metrics.mean_interval(pooled(f), repeats=0).value, 9), REFUSED),
        "metrics.prediction_intervals": (
            lambda f: round(
                ds.metrics.prediction_intervals(pooled(f) - 1, pooled(f) + 1, reals, level=0.8, repeats=0).score.value,
                9,
            ),
            REFUSED,
        ),
        "metrics.distribution_calibration": (
            lambda f: round(
                ds.metrics.distribution_calibration(pooled(f).sigmoid(), repeats=0).error.value,
                9,
            ),
            REFUSED,
        ),
        "metrics.variance_temperature": (
            lambda f: round(ds.metrics.variance_temperature(*map(pooled, gaussians(f)), pair_of(reals)), 9),
            REFUSED,
        ),
        "metrics.temper_variance": (
            lambda f: round(ds.metrics.temper_variance(*gaussians(f), pair_of(reals)).temperature, 9),
            REFUSED,
        ),
        "metrics.disagreement_indicator": (ds.metrics.disagreement_indicator, REFUSED),
        "metrics.pair_disagreement": (ds.metrics.pair_disagreement, REFUSED),
        "metrics.high_loss": (targeted(ds.metrics, "high_loss", y), REFUSED),
        "metrics.premise": (lambda f: ds.metrics.premise(f, y, f), REFUSED),
        "metrics.Tempered.log_probs": (ds.metrics.Tempered(2.0, "before", "probability").log_probs, EXAMPLE),
        "objectives.independent": (targeted(ds.objectives, "independent", y, loss="cross_entropy"), NUMBER),
        "objectives.augmented": (
            targeted(ds.objectives, "augmented", y, beta=0.5, loss="brier", pool="probability"),
            NUMBER,
        ),
        "objectives.joint": (targeted(ds.objectives, "joint", y, loss="cross_entropy", pool="score"), NUMBER),
        "objectives.gradient_adjusted": (targeted(ds.objectives, "gradient_adjusted", reals, alpha=0.5), NUMBER),
        "objectives.negative_correlation": (
            targeted(ds.objectives, "negative_correlation", reals, strength=0.5),
            NUMBER,
        ),
        "objectives.negative_correlation, of classes": (
            targeted(ds.objectives, "negative_correlation", y, strength=0.5, loss="cross_entropy"),
            NUMBER,
        ),
        "objectives.learner_dropout": (
            targeted(ds.objectives, "learner_dropout", y, drop=0.0, loss="cross_entropy", pool="probability"),
            NUMBER,
        ),
        "objectives.adp": (targeted(ds.objectives, "adp", y), NUMBER),
        "objectives.trades": (lambda f: ds.objectives.trades(f, y, adversarial=f.flip(2)), NUMBER),
        "objectives.a2d": (lambda f: ds.objectives.a2d(f, y, unlabelled=f), NUMBER),
        "objectives.divdis": (lambda f: ds.objectives.divdis(f, y, unlabelled=f), NUMBER),
        "objectives.ldr": (targeted(ds.objectives, "ldr", y, strength=1.0), NUMBER),
        "objectives.ldr, inverse": (targeted(ds.objectives, "ldr", y, strength=1.0, weight="inverse"), NUMBER),
        "objectives.hardness": (lambda f: ds.objectives.hardness(f, y).sum(), NUMBER),
        "objectives.disagreement_pull": (
            targeted(ds.objectives, "disagreement_pull", y, strength=1.0, alpha=torch.ones(5)),
            EXAMPLE,
        ),
        "objectives.pair_agreement": (ds.objectives.pair_agreement, EXAMPLE),
    }


FUNCTIONS = functions(Y, REALS, SIGNS)
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def _matrix(accuracy, diversity):
    """Numbers of pairs ``[2, P]`` as matrices ``[2, M, M]``, with zeros on the diagonal."""
    matrices = torch.zeros(2, 3, 3, dtype=accuracy.dtype)
    first, second = torch.triu_indices(3, 3, 1)
    matrices[:, first, second] = matrices[:, second, first] = torch.stack([accuracy, diversity])
    spoilt = matrices.isnan().sum(-1) == 2  # with both of the others
    return matrices + torch.diag_embed(torch.zeros(2, 3).masked_fill(spoilt, math.nan).to(matrices.dtype))


def numbers(result):
    return result.total if isinstance(result, ds.axes.LossParts) else result


def test_the_table_leaves_no_public_function_out():
    for module in (ds.pooling, ds.losses, ds.scores, ds.diversity, ds.metrics, ds.objectives):
        room = module.__name__.removeprefix("dissensus.")
        names = getattr(module, "__all__", None) or [
            name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        ]
        public = {name for name in names if inspect.isfunction(getattr(module, name)) and not name.startswith("_")}
        listed = {name.split(".", 1)[1].split(",")[0] for name in FUNCTIONS if name.startswith(f"{room}.")}
        assert public - NOT_OF_OUTPUTS[room] <= listed, room


# --- dense outputs: every position is an example ----------------------------------------------------------------------

S = (2, 3)
DENSE_Y = torch.randint(0, 2, (5, *S), generator=torch.Generator().manual_seed(1))
DENSE_REALS = torch.linspace(-1, 1, 120).view(5, 4, *S).double()
DENSE_SIGNS = torch.tensor([1.0, -1.0]).repeat(60).view(5, 4, *S).double()
NOT_DENSE = {
    **{name: r"have shape \[B" for name in FUNCTIONS if name.startswith("losses.")},
    "metrics.premise": "Intervals need independent examples",
    "metrics.worst_group": "Positions of an image are not independent",
}
"""Losses take ``[..., B, C]``, and `losses.per_member` dense outputs; others have intervals."""


def dense_outputs():
    return 2 * torch.randn(3, 5, 4, *S, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def by_position(tensor, axis):
    return tensor.movedim(axis, -1).flatten(axis - 1, -2)


def flattened(values):
    """Numbers of positions with positions in one axis, as functions of ``[M, N, C]`` return them."""
    if values.shape[-3:] == (5, *S):
        return values.flatten(-3)
    for axis in (1, 2):
        if tuple(values.shape[axis - 1 :]) == (5, 4, *S):
            return by_position(values, axis)
    return values


@every_function
def test_dense_outputs_are_positions_as_examples(name):
    call, _ = functions(DENSE_Y, DENSE_REALS, DENSE_SIGNS)[name]
    if name in NOT_DENSE:
        with pytest.raises(ValueError, match=NOT_DENSE[name]):
            call(dense_outputs())
        return
    flat = functions(DENSE_Y.flatten(), by_position(DENSE_REALS, 1), by_position(DENSE_SIGNS, 1))
    if name == "objectives.disagreement_pull":  # with α of each of the 30 positions
        flat = {name: (targeted(ds.objectives, "disagreement_pull", DENSE_Y.flatten(), strength=1.0), EXAMPLE)}
        call = targeted(ds.objectives, "disagreement_pull", DENSE_Y, strength=1.0)
    dense, expected = numbers(call(dense_outputs())), numbers(flat[name][0](by_position(dense_outputs(), 2)))
    if isinstance(dense, torch.Tensor):
        torch.testing.assert_close(flattened(dense), expected)
        assert dense.shape == expected.shape or dense.shape[-2:] == S
    else:
        assert str(dense) == str(expected)


@every_function
def test_dense_outputs_do_not_take_targets_of_examples(name):
    """Outputs as tall as a batch is long, so that a wrong axis would fit. Functions without targets have a result."""
    dense = torch.randn(3, 5, 4, 5, 4, generator=torch.Generator().manual_seed(0))
    try:
        result = numbers(FUNCTIONS[name][0](dense))
    except ValueError as refused:
        assert "must have shape [" in str(refused) or name in NOT_DENSE  # noqa: PT017
        return
    others = functions(1 - Y, -REALS, -SIGNS)
    torch.testing.assert_close(result, numbers(others[name][0](dense)))


def test_pooled_dense_outputs_keep_the_class_axis():
    """The class axis is the third, or where `class_axis` says."""
    dense = torch.randn(3, 5, 4, 2, 2)
    words = dense.movedim(2, -1)
    for pool in (ds.pooling.mean_probability, ds.pooling.mean_score, ds.pooling.vote_share):
        pooled = pool(dense, WEIGHTS)
        assert pooled.shape == (5, 4, 2, 2)
        torch.testing.assert_close(pool(words, WEIGHTS, class_axis=-1), pooled.movedim(1, -1))
        torch.testing.assert_close(pool(words, WEIGHTS, class_axis=4), pooled.movedim(1, -1))
    torch.testing.assert_close(ds.pooling.mean_probability(dense), dense.softmax(2).mean(0).log())
    torch.testing.assert_close(ds.pooling.mean_output(dense, WEIGHTS), torch.tensordot(torch.tensor(WEIGHTS), dense, 1))
    with pytest.raises(ValueError, match="`class_axis` must be an axis of outputs"):
        ds.pooling.mean_probability(dense, class_axis=1)


def test_language_models_have_classes_last():
    words, labels = torch.randn(3, 5, 7, 4, dtype=torch.float64), torch.randint(4, (5, 7))
    pixels = words.movedim(-1, 2)
    settings = {"loss": "cross_entropy", "pool": "probability"}
    for ours, expected in zip(
        ds.diversity.decompose(words, labels, class_axis=-1, **settings),
        ds.diversity.decompose(pixels, labels, **settings),
        strict=True,
    ):
        assert ours.shape == (5, 7)
        torch.testing.assert_close(ours, expected)
    table, expected = ds.scores.table(words, class_axis=-1), ds.scores.table(pixels)
    torch.testing.assert_close(table, expected)
    assert all(values.shape == (5, 7) for values in table.values())
    for name, values in expected.items():
        torch.testing.assert_close(ds.scores.of_logits(name, words, class_axis=3), values)
    loss = ds.losses.per_member("brier", words, labels, class_axis=-1)
    torch.testing.assert_close(loss, ds.losses.per_member("brier", pixels, labels))
    assert loss.shape == (3, 5, 7)
    with pytest.raises(ValueError, match="Classes last, as in language models"):
        ds.diversity.decompose(words, labels, **settings)


def test_losses_of_dense_outputs_are_torchs():
    f = dense_outputs()
    ours = ds.losses.per_member("cross_entropy", f, DENSE_Y)
    torch.testing.assert_close(
        ours, torch.stack([torch.nn.functional.cross_entropy(m, DENSE_Y, reduction="none") for m in f])
    )


def test_ignored_positions_are_nan_in_a_decomposition_and_left_out_of_metrics():
    f, ignored = dense_outputs(), torch.rand(5, *S, generator=torch.Generator().manual_seed(2)) < 0.4
    labels = DENSE_Y.masked_fill(ignored, -100)
    settings = {"loss": "cross_entropy", "pool": "probability"}
    parts = ds.diversity.decompose(f, labels, ignore_index=-100, **settings)
    expected = ds.diversity.decompose(f, DENSE_Y, **settings)
    for part, whole in zip(parts, expected, strict=True):
        assert torch.equal(part.isnan(), ignored)
        torch.testing.assert_close(part[~ignored], whole[~ignored])
    flat, counted = by_position(f, 2)[:, ~ignored.flatten()], DENSE_Y[~ignored]
    m, pooled = ds.metrics, ds.pooling.mean_probability(f)
    assert m.prediction_accuracy(f, labels, "score", ignore_index=-100) == m.prediction_accuracy(flat, counted, "score")
    assert m.oracle(f, labels, ignore_index=-100) == m.oracle(flat, counted)
    assert m.temper(f, labels, ignore_index=-100) == m.temper(flat, counted)
    assert m.temperature(f[0], labels, ignore_index=-100) == m.temperature(flat[0], counted)
    ours = m.calibration(pooled, labels, ignore_index=-100)
    torch.testing.assert_close(ours, m.calibration(ds.pooling.mean_probability(flat), counted), equal_nan=True)
    for call in (lambda: m.oracle(f, labels), lambda: m.calibration(pooled, labels)):
        with pytest.raises(ValueError, match=r"got labels from -100 to 1. Ignored labels\? Use"):
            call()
    doubt, wrong = ds.scores.of_logits("mean_entropy", f), pooled.argmax(1) != DENSE_Y
    curve = m.risk_coverage(doubt, wrong)
    assert curve.area == m.risk_coverage(doubt.flatten(), wrong.flatten()).area
    with pytest.raises(ValueError, match=r"Scores of positions\? These are not independent"):
        m.auroc(doubt, doubt)


# --- arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if not name.startswith("objectives.")])
@pytest.mark.parametrize("outputs", [random_outputs, dense_outputs], ids=["examples", "dense"])
def test_numpy_arrays_are_taken_as_tensors(name, outputs):
    targets = (Y, REALS, SIGNS) if outputs is random_outputs else (DENSE_Y, DENSE_REALS, DENSE_SIGNS)
    if outputs is dense_outputs and name in NOT_DENSE:
        return
    expected = numbers(functions(*targets)[name][0](outputs()))
    y, reals, signs = (part.numpy() for part in targets)
    array = outputs().numpy()
    read_only = array.copy()
    read_only.flags.writeable = False
    backwards = np.ascontiguousarray(array[::-1])[::-1]
    for layout in (array, np.asfortranarray(array), read_only, backwards, array.astype(">f8")):
        actual = numbers(functions(y.astype(np.int32), reals, signs)[name][0](layout))
        if isinstance(expected, torch.Tensor):
            assert isinstance(actual, torch.Tensor)
            torch.testing.assert_close(actual, expected)
        else:
            assert str(actual) == str(expected)
    assert (array == outputs().numpy()).all(), "the user's numbers stay"


def test_numbers_of_scores_may_be_arrays_and_series():
    pandas = pytest.importorskip("pandas")
    inside, outside = np.arange(10.0), np.arange(5.0, 15.0)
    expected = ds.metrics.auroc(torch.from_numpy(inside), torch.from_numpy(outside))
    for read in (np.asarray, pandas.Series):
        first = read(inside), read(outside)
        assert ds.metrics.auroc(*first) == expected
        assert ds.metrics.compared(first, first).p_value == 1
        assert ds.metrics.threshold(read(inside)) == 9.0
        assert ds.metrics.risk_coverage(read(inside), read(inside > 4)).area > 0
        assert ds.metrics.roc(*first).true_positives[-1] == 1
    labels = pandas.Series([0, 2], dtype="int32", index=[7, 3])
    torch.testing.assert_close(ds.losses.cross_entropy(LOGITS, labels), ds.losses.cross_entropy(LOGITS, LABELS))
    boxed = pandas.Series([0, 2], dtype=object)
    torch.testing.assert_close(ds.losses.cross_entropy(LOGITS, boxed), ds.losses.cross_entropy(LOGITS, LABELS))
    frame = pandas.DataFrame(LOGITS[0].numpy())
    torch.testing.assert_close(ds.losses.brier(frame, labels), ds.losses.brier(LOGITS[0], LABELS))
    for names in (pandas.Series(["cat", "dog"]), np.array(["cat", "dog"]), np.array(["cat", 3], dtype=object)):
        with pytest.raises(TypeError, match=r"`targets` must be numbers.*LabelEncoder"):
            ds.losses.cross_entropy(LOGITS, names)
    with pytest.raises(ValueError, match="`targets` must have no masked entries; got 1 of them"):
        ds.losses.cross_entropy(LOGITS, np.ma.masked_array([0, 2], [False, True]))


def test_arrays_share_their_memory():
    array = np.zeros((2, 3))
    ds.arguments.as_tensor(array)[0, 0] = 5
    assert array[0, 0] == 5


@every_function
@pytest.mark.parametrize("column", [0, 1], ids=["class 0", "class 1"])
def test_nan_in_nan_out(name, column):
    call, effect = FUNCTIONS[name]
    clean = random_outputs()
    spoilt = clean.clone()
    spoilt[1, 2, column] = math.nan
    if effect == REFUSED:
        call(clean)
        with pytest.raises(ValueError, match="NaN"):
            call(spoilt)
        return
    before, after = numbers(call(clean)), numbers(call(spoilt))
    assert not before.isnan().any()
    if effect == NUMBER:
        assert after.isnan()
    elif effect == "members":  # the ensemble's mean is NaN at that example, and each bias is a mean over examples
        assert (before.any(), after.all()) == (False, True)
    elif effect == PAIRS:
        affected = torch.zeros(3, 3, dtype=torch.bool)
        affected[1] = affected[:, 1] = True
        assert after[..., affected].isnan().all()
        torch.testing.assert_close(after[..., ~affected], before[..., ~affected])
    elif effect == EXAMPLE:
        axis = before.shape.index(5) if before.ndim else 0
        before, after = before.movedim(axis, 0), after.movedim(axis, 0)
        elsewhere = [0, 1, 3, 4]
        torch.testing.assert_close(after[elsewhere], before[elsewhere])
        by_member = name.startswith(("losses.", "diversity.errors"))
        assert (after[2][1] if by_member else after[2]).isnan().all()


@pytest.mark.parametrize("name", ["scores", "inside", "outside"])
def test_numbers_of_a_whole_data_set_refuse_nan(name):
    finite, with_nan = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, math.nan, 2.0])
    inside, outside = (with_nan, finite) if name == "inside" else (finite, with_nan)
    calls = [
        lambda: ds.metrics.auroc(inside, outside),
        lambda: ds.metrics.ood(inside, outside),
        lambda: ds.metrics.compared((inside, outside), (inside, outside)),
        lambda: ds.metrics.threshold(with_nan),
        lambda: ds.metrics.risk_coverage(with_nan, finite),
        lambda: ds.metrics.risk_coverage(finite, with_nan),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="NaN"):
            call()


def test_nan_targets_give_nan():
    soft = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64).repeat(5, 1)
    soft[2, 3] = math.nan
    for values in (
        ds.losses.cross_entropy(random_outputs(), soft),
        ds.losses.brier(random_outputs(), soft),
        ds.diversity.probability_log_ratio(random_outputs(), soft),
    ):
        assert values[..., 2].isnan().all()
        assert values[..., [0, 1, 3, 4]].isfinite().all()
    assert ds.diversity.flipped(0.9, torch.tensor([0.1, math.nan]), 10)[1].isnan().tolist() == [False, True]


# --- half precision ---------------------------------------------------------------------------------------------------

OF_PROBABILITIES = {*(f"scores.{name}" for name in PROBS), "diversity.jensen_shannon"}
TRAINED = {name for name in FUNCTIONS if name.split(",")[0].removeprefix("objectives.") in ds.objectives.OBJECTIVES}
"""Objectives, which have a table of their own in test_objectives_contract."""
half_precisions = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


@half_precisions
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in OF_PROBABILITIES and name not in TRAINED])
def test_half_precision_is_computed_as_float32(name, dtype):
    """The numbers of half-precision outputs are those of the same outputs in float32, to the bit."""
    call, _ = FUNCTIONS[name]
    outputs = random_outputs(dtype)
    actual, expected = numbers(call(outputs)), numbers(call(outputs.float()))
    if isinstance(actual, torch.Tensor) and actual.is_floating_point():
        assert actual.dtype != dtype
        assert torch.equal(actual, expected)
    else:
        assert str(actual) == str(expected)


@half_precisions
def test_agreement_and_hardness_are_finite_at_extreme_logits(dtype):
    logits = (1e4 * random_outputs().sign()).to(dtype)
    logits[2] = logits[1]  # members that agree entirely
    logits.requires_grad_()
    assert ds.objectives.hardness(logits, Y).isfinite().all()
    agreement = ds.objectives.pair_agreement(logits)
    assert agreement.isfinite().all()
    (gradient,) = torch.autograd.grad(agreement.sum(), logits)
    assert gradient.isfinite().all()


# --- caps, and numbers that theory has at zero or above --------------------------------------------------------------


@pytest.mark.parametrize("members", [2, 3, 5, 7])
def test_equal_members_have_no_diversity_not_even_by_rounding(members):
    generator = torch.Generator().manual_seed(members)
    alike = (3 * torch.randn(1, 400, 10, generator=generator)).expand(members, -1, -1)
    weights = torch.rand(members, generator=generator)
    weights = weights / weights.sum()
    d = ds.diversity
    for values in (
        d.jensen_shannon(alike.softmax(-1)),
        d.score_kl(alike, weights),
        d.ambiguity(alike, weights),
        d.probability_kl_limit(alike, weights),
        d.exponential_family(alike, family="poisson"),
        d.probability_log_ratio(alike, torch.zeros(400, dtype=torch.int64), weights),
    ):
        assert (values >= 0).all()
    assert (d.ambiguity(alike, weights) == 0).all()
    assert d.ambiguity(alike).sum() == 0
    for pool in ("score", "probability"):
        assert d.bias_share(alike, weights, pool=pool) == 0
        assert d.bias_share(alike, pool=pool) == 0
    assert torch.equal(d.debias(alike, weights), alike)


@settings(max_examples=100)
@given(st.integers(0, 10_000), st.sampled_from([1e-8, 1e-3, 1.0]), st.sampled_from(["score", "probability"]))
def test_the_share_of_bias_is_a_share(seed, spread, pool):
    generator = torch.Generator().manual_seed(seed)
    members = 2 + seed % 4
    common = torch.randn(1, 6, 3, generator=generator)
    outputs = common + spread * torch.randn(members, 1 if seed % 3 else 6, 3, generator=generator)
    weights = torch.rand(members, generator=generator) + 1e-3
    share = float(ds.diversity.bias_share(outputs, weights / weights.sum(), pool=pool))
    assert 0 <= share <= 1
    exact = outputs.double()
    weights = weights.double() / weights.double().sum()
    before = ds.diversity.ambiguity(exact.softmax(-1) if pool == "probability" else exact, weights).mean()
    after = ds.diversity.ambiguity(ds.diversity.debias(exact, weights, pool=pool), weights).mean()
    if before > 1e-12:
        assert float(ds.diversity.bias_share(exact, weights, pool=pool)) == pytest.approx(
            float(1 - after / before), abs=1e-6
        )


def test_the_plane_keeps_its_precision():
    points = ds.diversity.plane(random_outputs(), Y)
    assert points.accuracy.dtype == points.diversity.dtype == torch.float64
    accuracies = (random_outputs().argmax(-1) == Y).double().mean(-1)
    assert points.accuracy.tolist() == [(accuracies[i] + accuracies[j]).item() / 2 for i, j in ((0, 1), (0, 2), (1, 2))]
    assert ds.diversity.plane(random_outputs(torch.bfloat16), Y).diversity.dtype == torch.float32


# --- members of weight zero -------------------------------------------------------------------------------------------

ABSENT = [0.5, 0.0, 0.5]
WEIGHTED = {
    "mean_probability": lambda f, w: ds.pooling.mean_probability(f, w),
    "mean_score": lambda f, w: ds.pooling.mean_score(f, w),
    "mean_output": lambda f, w: ds.pooling.mean_output(f, w),
    "vote_share": lambda f, w: ds.pooling.vote_share(f, w),
    **{
        f"decompose {loss} {pool}": (
            lambda f, w, t=t, options={"loss": loss, "pool": pool}: torch.stack(
                ds.diversity.decompose(f, t, weights=w, **options)
            )
        )
        for loss, pool, t in [
            ("cross_entropy", "probability", Y),
            ("cross_entropy", "score", Y),
            ("mse", "score", REALS),
            ("brier", "probability", Y),
            ("zero_one", "vote", Y),
            ("exponential", "score", SIGNS),
            ("poisson", "score", REALS.abs()),
            ("logistic", "score", SIGNS),
        ]
    },
    "ambiguity": lambda f, w: ds.diversity.ambiguity(f, w),
    "brier_variance": lambda f, w: ds.diversity.brier_variance(f, w),
    "score_kl": lambda f, w: ds.diversity.score_kl(f, w),
    "probability_kl_limit": lambda f, w: ds.diversity.probability_kl_limit(f, w),
    "probability_log_ratio": lambda f, w: ds.diversity.probability_log_ratio(f, Y, w),
    "probability_variance_approximation": lambda f, w: ds.diversity.probability_variance_approximation(f, Y, w),
    "vote_disagreement": lambda f, w: ds.diversity.vote_disagreement(f[..., :2], Y, w),
    "hessian_form": lambda f, w: ds.diversity.hessian_form(f, Y, loss="cross_entropy", weights=w),
    "exponential_family": lambda f, w: ds.diversity.exponential_family(f, family="poisson", weights=w),
    "bias_share": lambda f, w: ds.diversity.bias_share(f, w),
    "independent": lambda f, w: ds.objectives.independent(f, Y, loss="cross_entropy", weights=w).total,
    "independent, mse": lambda f, w: ds.objectives.independent(f, REALS, loss="mse", weights=w).total,
    "augmented": lambda f, w: (
        ds.objectives.augmented(f, Y, beta=0.3, loss="cross_entropy", pool="probability", weights=w).total
    ),
    "augmented, mse": lambda f, w: (
        ds.objectives.augmented(f, REALS, beta=0.3, loss="mse", pool="score", weights=w).total
    ),
}


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan, 1e300], ids=["inf", "-inf", "nan", "overflow"])
def test_outputs_of_a_member_of_weight_zero_do_not_count(name, odd):
    call = WEIGHTED[name]
    present = random_outputs()[[0, 2]].requires_grad_()
    outputs = random_outputs()
    outputs[1, 1:3] = odd
    outputs.requires_grad_()
    actual, expected = call(outputs, ABSENT), call(present, [0.5, 0.5])
    scale = 3 / 2 if name.startswith(("independent", "augmented")) else 1.0  # totals are M times the mean
    torch.testing.assert_close(actual, scale * expected)
    if not actual.requires_grad:
        return
    (gradient,) = torch.autograd.grad(actual.sum(), outputs)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), present)
    torch.testing.assert_close(gradient[[0, 2]], scale * expected_gradient)
    assert (gradient[1] == 0).all()


def test_the_loss_of_a_member_of_weight_zero_is_still_reported():
    outputs = random_outputs()
    outputs[1] = math.inf
    parts = ds.objectives.independent(outputs, REALS, loss="mse", weights=ABSENT).parts
    assert parts["member_loss"].isinf().tolist() == [False, True, False]
    assert parts["individual"].isfinite()


def test_accuracies_of_studies_do_not_count_nan_as_an_answer():
    spoilt = random_outputs()
    spoilt[1, 2, 0] = math.nan
    for name in ("accuracy", "accuracy_top5", "member_accuracy", "worst_member_accuracy", "error_rate"):
        measure = getattr(measures, name)
        assert math.isfinite(measure(random_outputs(), Y, "cross_entropy", "probability")), name
        assert math.isnan(measure(spoilt, Y, "cross_entropy", "probability")), name


def test_seeded_blocks_tell_nothing_to_generators_of_gpus_that_are_not_in_use(monkeypatch):
    told = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", told.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    before = torch.get_rng_state()
    with seeded(5):
        drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert torch.equal(torch.get_rng_state(), before)
    assert not told


def test_a_network_that_brings_the_first_gpu_into_use_is_built_again_under_its_seed(monkeypatch):
    """Its generator could not be seeded before."""
    in_use = iter([False, False, True, False])  # before the first build, for its seed, after it, for the second seed
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: next(in_use, True))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    built = []

    def build():
        built.append(nn.Linear(2, 1))
        return built[-1]

    (network,) = fresh_members(build, 0, 1)
    assert len(built) == 2
    assert network is built[1]
    assert torch.equal(built[0].weight, built[1].weight)
