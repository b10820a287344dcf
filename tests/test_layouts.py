"""How tensors lie in memory changes no result, and no function writes into what it is handed."""

import dataclasses
import inspect
import math
import re
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus import checks, dropout, fingerprint, randomness, storage
from dissensus.data import tables, unlabelled
from dissensus.data.batches import check_finite, end_to_end
from dissensus.training_rows import TrainingRows

# --- layouts ----------------------------------------------------------------------------------------------------------


def strided(x):
    """Every second row of a tensor with twice as many."""
    return torch.stack([x, torch.full_like(x, 1)], 1).flatten(0, 1)[::2]


def every_third(x):
    """Every third number of the last axis."""
    return torch.stack([x, torch.zeros_like(x), torch.zeros_like(x)], -1).flatten(-2)[..., ::3]


def transposed(x):
    """First and last axes the other way round in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def offset(x):
    """A slice that begins inside its storage, and ends before the storage does."""
    return torch.cat([torch.zeros_like(x[:1]), x, torch.zeros_like(x[:1])])[1:-1]


def channels_last(x):
    """Images with their channels as the fastest axis; anything else as it is."""
    return x.to(memory_format=torch.channels_last) if x.ndim == 4 else x.clone()


def read_only(x, folder):
    """A memory map of a file that nobody may write to: a write would end the process."""
    file = folder / f"{len(list(folder.iterdir()))}.npy"
    np.save(file, x.numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of arrays that cannot be written
        return torch.from_numpy(np.load(file, mmap_mode="r"))


def expanded(x, last):
    """The same numbers at every place of an axis, stored once: equal members, examples, or channels of images."""
    axis = min(last, x.ndim - 1)
    return x.narrow(axis, 0, 1).expand_as(x)


LAYOUTS = {
    "strided": strided,
    "every third": every_third,
    "transposed": transposed,
    "offset": offset,
    "channels last": channels_last,
}

FEW = {layout: LAYOUTS[layout] for layout in ("transposed", "channels last")}

# --- what the functions are called with -------------------------------------------------------------------------------

M, B, C = 3, 12, 4


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def uniform(*shape, seed=0, dtype=torch.float64):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


LOGITS, OTHERS = 2 * random(M, B, C, seed=3), 2 * random(M, B, C, seed=4)
PROBS = LOGITS.softmax(-1)
LOG_PROBS = PROBS.mean(0).log()
LABELS = torch.arange(B) * 7 % C
SOFT = random(B, C, seed=5).softmax(-1)
REALS, SIGNS = random(B, C, seed=6), random(B, C, seed=7).sign()
WEIGHTS = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
DENSE, DENSE_LABELS = 2 * random(M, B, C, 2, 3, seed=12), torch.arange(B * 6).view(B, 2, 3) * 7 % C
SCORES, OUTSIDE = random(20, seed=8), random(20, seed=9) + 1
ROWS = random(B, 6, seed=10)
IMAGES = uniform(B, 3, 8, 8, seed=11)
NOISE = uniform(B, 3, 8, 8, seed=12).clamp(0.01, 0.99)
KEYS = torch.arange(B, dtype=torch.int64) * 2**33 + 5


def with_gradient(function, **options):
    """What a function of outputs gives, and the gradient with respect to the outputs."""

    def call(outputs, *arguments):
        outputs = outputs.detach().requires_grad_()
        result = function(outputs, *arguments, **options)
        total = result.total if isinstance(result, ds.LossParts) else result
        (gradient,) = torch.autograd.grad(total.sum(), outputs)
        return result, gradient

    return call


def mlp(dropout=0.0):
    return ds.nets.mlp(6, C, (8,), dropout=dropout).double()


def cnn():
    return ds.nets.cnn(3, C, 8, (4, 5), batch_norm=True).double()


class Smooth(nn.Module):
    """A small network for images, with a gradient everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3, stride=2), nn.Linear(36, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.convolution(x)).flatten(1))


def ensemble(build=mlp, backend="auto", training=False):
    return ds.Ensemble(build, members=M, seed=1, backend=backend).train(training)


def victim():
    return ensemble(lambda: Smooth().double(), backend="loop")


CROSS_ENTROPY = partial(ds.objectives.independent, loss="cross_entropy")
TRAINING = {"epochs": 2, "batch_size": 5, "lr": 0.05, "deterministic": True}


def fitted(x, y, *, build=mlp, objective=CROSS_ENTROPY, loader=False, backend="loop", **options):
    ens = ensemble(build, backend=backend)
    data = DataLoader(TensorDataset(x, y), 5) if loader else (x, y)
    history = ds.fit(ens, data, objective, **{**TRAINING, **options})
    return ens, [entry["loss"] for entry in history.epochs], history.best_epoch


def swept(x, y, **options):
    result = ds.sweep(
        mlp,
        (x, y),
        CROSS_ENTROPY,
        grid={"lr": [0.05, 0.01], "seed": [0, 1]},
        members=2,
        backend="vmap",
        **{**TRAINING, **options},
    )
    return [result.run(run) for run in range(4)]


def augmented(name, **options):
    return lambda x: getattr(ds.data.augment, name)(x, torch.Generator().manual_seed(5), **options)


def corrupted(x):
    names = [name for name in ds.data.corruptions.CORRUPTIONS if name != "saturate" or x.shape[1] == 3]
    return [ds.data.corruptions.corrupt(x, name, 3, seed=2) for name in names]


def attack(name, **options):
    return lambda x, y: getattr(ds.attacks, name)(victim(), x, y, **options)


def evaluated(x, y):
    result = ds.attacks.evaluate(network(partial(nn.Linear, 6, C)), (x, y), "quick", epsilon=0.1, epsilons=[0.1])
    return result.clean, result.worst, result.standing, [(row.name, row.accuracy) for row in result.attacks]


def gathered(x, y, **options):
    result = ds.data.batches((x, y), batch_size=5, seed=3, device=torch.device("cpu"), **options)
    return [part for batch in result.epoch(0) for part in batch]


def with_pool(x, y, pool):
    labelled = ds.data.batches((x, y), batch_size=5, seed=3, device=torch.device("cpu"))
    feed = unlabelled.with_unlabelled(labelled, pool, batch_size=4, seeds=[3], device=torch.device("cpu"))
    return [feed.batch(*raw) for raw in feed.raw(0)]


def cached(folder, x, y):
    network = Smooth().double()
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            parameter.copy_(0.1 * random(*parameter.shape, seed=number))
    cache = ds.data.features.cached_features(
        network,
        (x, y),
        folder / f"cache{len(list(folder.iterdir()))}",
        batch_size=5,
        dtype=torch.float32,
        augmentations=[None, ds.data.augment.flips],
    )
    return cache.tensors()


def stored(folder, x, y):
    path = folder / f"stored{len(list(folder.iterdir()))}"
    storage.write_folder(path, "layouts", {"x": x, "y": y}, {})
    return storage.read_folder(path, "layouts")[0]


def audited(outputs, targets, **options):
    result = ds.audit(outputs, targets, **options)
    return result.test, result.train, result.reference, result.detection, result.by_member, result.verdict


def predicted(outputs, **options):
    result = ds.predictive(outputs, **options)
    ends = result.interval(0.8) if result.kind.takes == "gaussian" else ()
    return result._numbers, ends


def reported(outputs, targets, **options):
    result = ds.report(outputs, targets, **options)
    return result.numbers, result.members, result.shifted


def masked(build=cnn):
    torch.manual_seed(0)
    return ds.masks.convert(build(), 4, 2.0, seed=0).eval()


def monte_carlo():
    torch.manual_seed(0)
    return ds.masks.monte_carlo(cnn(), 3, 0.3, seed=0).eval()


def trunk(build=cnn, layer="0"):
    torch.manual_seed(0)
    return ds.SharedTrunk(
        build(), ensemble(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4 * 64, C)).double()), cut=layer
    )


def trunk_of(x):
    def head():
        return nn.Sequential(network(cnn)[:1].requires_grad_(False), nn.Flatten(), nn.Linear(4 * 64, C)).double()

    return ds.SharedTrunk.of(ds.Ensemble(head, 2, shared="frozen"), x)(IMAGES)


def network(build):
    torch.manual_seed(0)
    return build().double().eval()


EXACT, ROUNDED = "exact", "rounded"
"""Equal to the bit (nothing is summed), or to rounding."""


def trained_on(model, x):
    """Which rows a model recognises that was trained on every second one."""
    model.training_rows = TrainingRows.of(x[::2])
    return model.trained_on(x).double()


def table():
    """``name -> (function, its tensors, EXACT or ROUNDED)``; a name may say more behind a comma."""
    ce, brier = {"loss": "cross_entropy"}, {"loss": "brier"}
    rows = {
        # pooling
        "pooling.mean_probability": (ds.pooling.mean_probability, (LOGITS, WEIGHTS)),
        "pooling.mean_score": (ds.pooling.mean_score, (LOGITS, WEIGHTS)),
        "pooling.vote_share": (ds.pooling.vote_share, (LOGITS, WEIGHTS)),
        "pooling.mean_output": (ds.pooling.mean_output, (LOGITS, WEIGHTS)),
        "pooling.mean_output, images": (ds.pooling.mean_output, (IMAGES[:3], WEIGHTS)),
        "pooling.pooled_log_probs": (ds.pooling.pooled_log_probs, (LOGITS.log_softmax(-1), WEIGHTS)),
        "pooling.ballots": (ds.pooling.ballots, (LOGITS,), EXACT),
        "pooling.first_choices": (ds.pooling.first_choices, (LOGITS,), EXACT),
        "pooling.weighed_only": (ds.pooling.weighed_only, (LOGITS, WEIGHTS), EXACT),
        "pooling.absent_detached": (ds.pooling.absent_detached, (LOGITS, WEIGHTS), EXACT),
        "pooling.mixture_quantile": (
            lambda f, v, w: ds.pooling.mixture_quantile(f, v, 0.3, w),
            (LOGITS, PROBS, WEIGHTS),
        ),
        "pooling.probabilities": (ds.pooling.probabilities, (LOGITS, WEIGHTS)),
        "pooling.mean_label_probability": (ds.pooling.mean_label_probability, (LOGITS, WEIGHTS)),
        "pooling.moment_matched": (ds.pooling.moment_matched, (LOGITS, OTHERS.abs(), WEIGHTS)),
        # losses
        "losses.squared_error": (with_gradient(ds.losses.squared_error), (LOGITS, REALS)),
        "losses.gaussian_nll": (with_gradient(ds.losses.gaussian_nll), (LOGITS, REALS[:, :2])),
        "losses.gaussian_moments": (ds.losses.gaussian_moments, (LOGITS,)),
        "losses.gaussian_moments, dense": (partial(ds.losses.gaussian_moments, class_axis=2), (DENSE,)),
        "losses.quantile": (with_gradient(ds.losses.quantile, levels=(0.2, 0.8)), (LOGITS, REALS[:, :2])),
        "losses.bce": (with_gradient(ds.losses.bce), (LOGITS, SOFT)),
        "losses.mse": (with_gradient(ds.losses.mse), (LOGITS, REALS)),
        "losses.cross_entropy": (with_gradient(ds.losses.cross_entropy), (LOGITS, LABELS)),
        "losses.cross_entropy, soft": (with_gradient(ds.losses.cross_entropy), (LOGITS, SOFT)),
        "losses.brier": (with_gradient(ds.losses.brier), (LOGITS, LABELS)),
        "losses.brier, soft": (with_gradient(ds.losses.brier), (LOGITS, SOFT)),
        "losses.zero_one": (ds.losses.zero_one, (LOGITS, LABELS), EXACT),
        "losses.logistic": (with_gradient(ds.losses.logistic), (LOGITS, SIGNS)),
        "losses.exponential": (with_gradient(ds.losses.exponential), (LOGITS, SIGNS)),
        "losses.poisson": (with_gradient(ds.losses.poisson), (LOGITS, REALS.abs())),
        "losses.divergence": (with_gradient(ds.losses.divergence), (LOGITS, OTHERS)),
        "losses.per_member": (partial(ds.losses.per_member, "mse"), (LOGITS, REALS)),
        "losses.per_member, a user's loss": (
            partial(ds.losses.per_member, lambda f, y: (f - y).square().sum(-1)),
            (LOGITS, REALS),
        ),
        "losses.custom": (partial(ds.losses.custom, lambda f, y: (f - y).abs().sum(-1)), (LOGITS[0], REALS)),
        "losses.at_label": (ds.losses.at_label, (LOGITS, LABELS), EXACT),
        "losses.as_values": (ds.losses.as_values, (LOGITS, REALS), EXACT),
        "losses.check_target_values": (lambda y: ds.losses.check_target_values("cross_entropy", y, C), (SOFT,)),
        "losses.check_targets": (lambda y: ds.losses.check_targets("poisson", y, C), (REALS.abs(),)),
        # scores
        **{
            f"scores.{name}": (score.function, (PROBS,))
            for name, score in ds.scores.SCORES.items()
            if score.takes == "probabilities" and name != "distinct_predictions"
        },
        "scores.pairwise_kl, of logarithms": (lambda f: ds.scores.pairwise_kl(log_probs=f), (PROBS.log(),)),
        "scores.mean_energy": (ds.scores.mean_energy, (LOGITS,)),
        "scores.max_logit": (ds.scores.max_logit, (LOGITS,)),
        "scores.of_logits": (partial(ds.scores.of_logits, "mutual_information"), (LOGITS,)),
        "scores.table": (ds.scores.table, (LOGITS,)),
        "scores.table, in pieces": (partial(ds.scores.table, kind="probabilities", at_once=20), (PROBS,)),
        # diversity
        "diversity.ambiguity": (ds.diversity.ambiguity, (LOGITS, WEIGHTS)),
        "diversity.brier_variance": (ds.diversity.brier_variance, (LOGITS, WEIGHTS)),
        "diversity.score_kl": (ds.diversity.score_kl, (LOGITS, WEIGHTS)),
        "diversity.probability_kl_limit": (ds.diversity.probability_kl_limit, (LOGITS, WEIGHTS)),
        "diversity.probability_log_ratio": (ds.diversity.probability_log_ratio, (LOGITS, LABELS, WEIGHTS)),
        "diversity.probability_variance_approximation": (
            ds.diversity.probability_variance_approximation,
            (LOGITS, LABELS, WEIGHTS),
        ),
        "diversity.exponential_family": (
            lambda f, w: ds.diversity.exponential_family(f, family="categorical", weights=w),
            (LOGITS, WEIGHTS),
        ),
        "diversity.hessian_form": (partial(ds.diversity.hessian_form, **ce), (LOGITS, LABELS)),
        "diversity.vote_disagreement": (ds.diversity.vote_disagreement, (LOGITS[..., :2], LABELS % 2, WEIGHTS)),
        "diversity.decompose": (partial(ds.diversity.decompose, pool="probability", **ce), (LOGITS, LABELS)),
        "diversity.decompose, values": (
            lambda f, y, w: ds.diversity.decompose(f, y, loss="mse", pool="score", weights=w),
            (LOGITS, REALS, WEIGHTS),
        ),
        "diversity.decompose, vote": (partial(ds.diversity.decompose, loss="zero_one", pool="vote"), (LOGITS, LABELS)),
        "diversity.codependence": (
            partial(ds.diversity.codependence, pool="score", drop=0.4, repeats=5, **ce),
            (LOGITS, LABELS),
        ),
        "diversity.distinct_predictions": (ds.diversity.distinct_predictions, (PROBS,), EXACT),
        "diversity.jensen_shannon": (ds.diversity.jensen_shannon, (PROBS,)),
        "diversity.nonmaximal_volume": (ds.diversity.nonmaximal_volume, (PROBS.log(),)),
        "diversity.nonmaximal_volume, of labels": (ds.diversity.nonmaximal_volume, (PROBS.log(), LABELS)),
        "diversity.errors": (partial(ds.diversity.errors, **brier), (LOGITS, LABELS)),
        "diversity.error_covariance": (partial(ds.diversity.error_covariance, **brier), (LOGITS, LABELS)),
        "diversity.error_correlation": (partial(ds.diversity.error_correlation, **brier), (LOGITS, LABELS)),
        "diversity.debias": (ds.diversity.debias, (LOGITS, WEIGHTS)),
        "diversity.debias, of probabilities": (partial(ds.diversity.debias, pool="probability"), (LOGITS, WEIGHTS)),
        "diversity.bias_share": (ds.diversity.bias_share, (LOGITS, WEIGHTS)),
        "diversity.pairwise_disagreement": (ds.diversity.pairwise_disagreement, (PROBS,)),
        "diversity.plane": (ds.diversity.plane, (PROBS, LABELS)),
        "diversity.dominance": (partial(ds.diversity.dominance, pool="score", **ce), (LOGITS, LABELS)),
        "diversity.relative_diversity": (
            partial(ds.diversity.relative_diversity, pool="probability", **ce),
            (LOGITS, LABELS),
        ),
        "diversity.beta_approximation": (ds.diversity.beta_approximation, (SOFT, REALS.abs() + 1)),
        "diversity.independent_errors": (
            lambda accuracies: ds.diversity.independent_errors(0.8, accuracies, 4),
            (SOFT[:, 1],),
        ),
        "diversity.flipped": (lambda flips: ds.diversity.flipped(0.8, flips, 4), (SOFT[:, 1],)),
        "diversity.generalisation_gap": (
            lambda a, b, c, d: ds.diversity.generalisation_gap(ds.Decomposition(a, b, c), ds.Decomposition(d, c, a)),
            (SCORES, OUTSIDE, SCORES + 2, OUTSIDE + 1),
        ),
        "diversity.mean_covariance": (ds.diversity.mean_covariance, (random(M, M, seed=1),)),
        # metrics
        "metrics.auroc": (ds.metrics.auroc, (SCORES, OUTSIDE)),
        "metrics.ood": (partial(ds.metrics.ood, repeats=20), (SCORES, OUTSIDE)),
        "metrics.roc": (ds.metrics.roc, (SCORES, OUTSIDE)),
        "metrics.threshold": (ds.metrics.threshold, (SCORES,)),
        "metrics.compared": (
            lambda a, b, c, d: ds.metrics.compared((a, b), (c, d)),
            (SCORES, OUTSIDE, SCORES * 2, OUTSIDE - 1),
        ),
        "metrics.risk_coverage": (lambda s, w: ds.metrics.risk_coverage(s, w), (SCORES, OUTSIDE > 1)),
        "metrics.calibration": (ds.metrics.calibration, (LOG_PROBS, LABELS)),
        "metrics.prediction_accuracy": (partial(ds.metrics.prediction_accuracy, pool="vote"), (LOGITS, LABELS)),
        "metrics.oracle": (ds.metrics.oracle, (LOGITS, LABELS)),
        "metrics.worst_group": (ds.metrics.worst_group, (LOG_PROBS, LABELS, LABELS % 2)),
        "metrics.temper": (ds.metrics.temper, (LOGITS, LABELS)),
        "metrics.temper, before": (partial(ds.metrics.temper, when="before"), (LOGITS, LABELS)),
        "metrics.temperature": (ds.metrics.temperature, (LOG_PROBS, LABELS)),
        "metrics.Tempered.log_probs": (ds.metrics.Tempered(2.0, "before", "probability").log_probs, (LOGITS,)),
        "metrics.disagreement_indicator": (ds.metrics.disagreement_indicator, (LOGITS,), EXACT),
        "metrics.pair_disagreement": (ds.metrics.pair_disagreement, (LOGITS,)),
        "metrics.high_loss": (partial(ds.metrics.high_loss, share=0.3), (LOGITS, LABELS)),
        "metrics.premise": (partial(ds.metrics.premise, share=0.3), (LOGITS, LABELS, OTHERS)),
        **{
            f"metrics.{name}": (getattr(ds.metrics, name), (LOGITS, OTHERS.abs(), REALS))
            for name in ("crps_mixture", "nll_mixture", "pit", "temper_variance")
        },
        **{
            f"metrics.{name}": (getattr(ds.metrics, name), (LOGITS[0], OTHERS[0].abs(), REALS))
            for name in ("crps_gaussian", "nll_gaussian", "variance_temperature")
        },
        "metrics.crps_ensemble": (ds.metrics.crps_ensemble, (LOGITS, REALS)),
        "metrics.TemperedVariance.members": (ds.metrics.TemperedVariance(2.0).members, (LOGITS, OTHERS.abs())),
        "metrics.pinball": (partial(ds.metrics.pinball, levels=(0.1, 0.3, 0.6, 0.9)), (LOGITS[0], REALS[:, 0])),
        "metrics.crps_quantiles": (
            partial(ds.metrics.crps_quantiles, levels=(0.1, 0.3, 0.6, 0.9)),
            (LOGITS[0], REALS[:, 0]),
        ),
        "metrics.winkler": (
            partial(ds.metrics.winkler, level=0.8),
            (LOGITS[0], LOGITS[0] + OTHERS[0].abs(), REALS),
        ),
        "metrics.prediction_intervals": (
            partial(ds.metrics.prediction_intervals, level=0.8, repeats=20),
            (LOGITS[0], LOGITS[0] + OTHERS[0].abs(), REALS),
        ),
        "metrics.distribution_calibration": (partial(ds.metrics.distribution_calibration, repeats=20), (SOFT,)),
        "metrics.mean_interval": (partial(ds.metrics.mean_interval, repeats=20), (REALS,)),
        "metrics.regression": (partial(ds.metrics.regression, repeats=20), (LOGITS[0], REALS)),
        "metrics.ood_coverage": (
            lambda d, a, b, c: ds.metrics.ood_coverage(d, a, b, radius=1.0, from_ood=c),
            (LOGITS[0].abs(), LABELS > 0, LABELS[:C] > 1, LABELS > 1),
        ),
        # objectives
        "objectives.independent": (with_gradient(ds.objectives.independent, **ce), (LOGITS, LABELS)),
        "objectives.independent, soft and weighted": (
            with_gradient(lambda f, y, w: ds.objectives.independent(f, y, weights=w, **ce)),
            (LOGITS, SOFT, WEIGHTS),
        ),
        "objectives.augmented": (
            with_gradient(ds.objectives.augmented, beta=0.5, pool="probability", **brier),
            (LOGITS, LABELS),
        ),
        "objectives.joint": (with_gradient(ds.objectives.joint, pool="score", **ce), (LOGITS, LABELS)),
        "objectives.gradient_adjusted": (with_gradient(ds.objectives.gradient_adjusted, alpha=0.5), (LOGITS, REALS)),
        "objectives.negative_correlation": (
            with_gradient(ds.objectives.negative_correlation, strength=0.5),
            (LOGITS, REALS),
        ),
        "objectives.learner_dropout": (
            with_gradient(ds.objectives.learner_dropout, drop=0.3, pool="probability", per="example", **ce),
            (LOGITS, LABELS),
        ),
        "objectives.adp": (with_gradient(ds.objectives.adp, entropy_drop=0.2), (LOGITS, LABELS)),
        "objectives.trades": (
            with_gradient(lambda f, y, a: ds.objectives.trades(f, y, adversarial=a)),
            (LOGITS, LABELS, OTHERS),
        ),
        "objectives.a2d": (
            with_gradient(lambda f, y, u: ds.objectives.a2d(f, y, unlabelled=u)),
            (LOGITS, LABELS, OTHERS),
        ),
        "objectives.divdis": (
            with_gradient(lambda f, y, u: ds.objectives.divdis(f, y, unlabelled=u)),
            (LOGITS, LABELS, OTHERS),
        ),
        "objectives.ldr": (with_gradient(ds.objectives.ldr, strength=1.0), (LOGITS, LABELS)),
        "objectives.ldr, inverse": (with_gradient(ds.objectives.ldr, strength=1.0, weight="inverse"), (LOGITS, LABELS)),
        "objectives.hardness": (ds.objectives.hardness, (LOGITS, LABELS)),
        "objectives.disagreement_pull": (partial(ds.objectives.disagreement_pull, strength=1.0), (LOGITS, LABELS)),
        "objectives.pair_agreement": (with_gradient(ds.objectives.pair_agreement), (LOGITS,)),
        # predictions
        "predictive": (lambda f: predicted(f, task="classification"), (LOGITS,)),
        "predictive, labels": (lambda f: predicted(f, task="multilabel"), (LOGITS,)),
        "predictive, values": (lambda f: predicted(f, task="regression"), (LOGITS,)),
        "predictive, gaussian": (lambda f: predicted(f, task="regression", loss="gaussian_nll"), (LOGITS,)),
        "conformal.calibrate": (
            lambda f, y: ds.conformal.calibrate(f, y, task="classification", method="aps").scores,
            (LOGITS, LABELS),
        ),
        "conformal.calibrate, values": (
            lambda f, y: ds.conformal.calibrate(f, y, task="regression").scores,
            (LOGITS, REALS),
        ),
        "conformal.Conformal.sets": (
            ds.conformal.calibrate(LOGITS, LABELS, task="classification", method="raps").sets,
            (OTHERS,),
        ),
        "conformal.Conformal.intervals": (
            ds.conformal.calibrate(LOGITS, REALS, task="regression").intervals,
            (OTHERS,),
        ),
        # masks
        "masks.iou": (ds.masks.iou, (ds.masks.for_width(8, 4, 2.0),)),
        "masks.Masksembles.of": (
            lambda m, x: ds.masks.Masksembles.of(m)(x),
            (ds.masks.for_width(8, 4, 2.0), random(B, 8)),
            EXACT,
        ),
        "masks.Masksembles.forward": (ds.masks.Masksembles(3, 3, 1.5), (IMAGES,), EXACT),
        "masks.Masksembles.forward, uneven blocks": (ds.masks.Masksembles(3, 3, 1.5), (IMAGES[:7],), EXACT),
        "masks.Masksembles.forward, tokens": (ds.masks.Masksembles(6, 4, 2.0, channel_axis=-1), (ROWS,), EXACT),
        "masks.Masked.forward": (lambda x: masked()(x), (IMAGES,)),
        "masks.Masked.forward, training": (lambda x: masked().train()(x), (IMAGES,)),
        "masks.Masked.predict": (lambda x, y: masked().predict((x, y), 5, targets=True), (IMAGES, LABELS)),
        "masks.Masked.trained_on": (lambda x: trained_on(masked(), x), (IMAGES,)),
        "masks.Masked.member": (lambda x: masked(mlp).member(1)(x), (ROWS,)),
        "masks.MonteCarlo.forward": (lambda x: monte_carlo()(x), (IMAGES,)),
        "masks.plan": (lambda x: ds.masks.plan(cnn(), 4, 1.5, cost="multiply_adds", x=x), (IMAGES,)),
        # members
        **{
            f"Ensemble.forward, {backend}": (lambda x, b=backend: ensemble(backend=b)(x), (ROWS,))
            for backend in ("loop", "vmap", "batched")
        },
        **{
            f"Ensemble.forward, images, {backend}": (lambda x, b=backend: ensemble(cnn, b, training=True)(x), (IMAGES,))
            for backend in ("loop", "vmap")
        },
        "Ensemble.forward, images, batched": (
            lambda x: ensemble(lambda: ds.nets.cnn(3, C, 8, (4, 5)).double(), "batched")(x),
            (IMAGES,),
        ),
        **{
            f"Ensemble.forward, dropout, {backend}": (
                lambda x, b=backend: ensemble(partial(mlp, 0.4), b, training=True)(x),
                (ROWS,),
            )
            for backend in ("loop", "vmap", "batched")
        },
        **{
            f"Ensemble.forward, own inputs, {backend}": (
                lambda x, b=backend: ensemble(lambda: nn.Linear(C, 2).double(), b)(x, per_member=True),
                (LOGITS,),
            )
            for backend in ("loop", "vmap", "batched")
        },
        "Ensemble.forward, mixed": (
            lambda x: ds.Ensemble.from_modules([network(mlp), network(partial(nn.Linear, 6, C))])(x),
            (ROWS,),
        ),
        "Ensemble.predict": (lambda x, y: ensemble(cnn).predict((x, y), 5, targets=True), (IMAGES, LABELS)),
        "Ensemble.trained_on": (lambda x: trained_on(ensemble(cnn), x), (IMAGES,)),
        "Ensemble.soup": (lambda x: ensemble(cnn).soup(x, batch_size=5), (IMAGES,)),
        "Ensemble.greedy_soup": (
            lambda x: ensemble(cnn).greedy_soup(lambda n: float(n(x).square().mean()), x, batch_size=5).network,
            (IMAGES,),
        ),
        "SharedTrunk.forward": (lambda x: trunk()(x), (IMAGES,)),
        "SharedTrunk.features": (lambda x: trunk().features(x), (IMAGES,)),
        "SharedTrunk.of": (lambda x: trunk_of(x), (IMAGES,)),
        "trunk.output_at": (lambda x: ds.trunk.output_at(network(cnn), "0", x), (IMAGES,)),
        "trunk.last_layers": (lambda x: ds.trunk.last_layers(network(cnn), 2, members=2).eval()(x), (IMAGES,)),
        **{f"nets.{name}": (lambda x, b=build: network(b)(x), (IMAGES[:2],)) for name, build in NETS.items()},
        "nets.mlp": (lambda x: network(mlp)(x), (ROWS,)),
        # training
        "fit": (fitted, (ROWS, LABELS)),
        "fit, vmap": (partial(fitted, backend="vmap"), (ROWS, LABELS)),
        "fit, batched": (partial(fitted, backend="batched"), (ROWS, LABELS)),
        "fit, soft labels": (fitted, (ROWS, SOFT)),
        "fit, images": (partial(fitted, build=cnn, augment=ds.data.augment.flips), (IMAGES, LABELS)),
        "fit, a loader": (partial(fitted, build=cnn, loader=True), (IMAGES, LABELS)),
        "fit, values": (partial(fitted, objective=partial(ds.objectives.independent, loss="mse")), (ROWS, REALS)),
        "fit, validation": (
            lambda x, y, v, w: fitted(x, y, build=cnn, validation=(v, w)),
            (IMAGES, LABELS, NOISE, LABELS),
        ),
        "fit, unlabelled": (
            lambda x, y, u: fitted(x, y, objective=ds.objectives.a2d, unlabelled=u),
            (ROWS, LABELS, ROWS + 1),
        ),
        "fit, adversarial": (
            partial(fitted, build=cnn, adversarial=ds.train.AdversarialTraining(0.1, steps=2)),
            (IMAGES, LABELS),
        ),
        "fit, settings per member": (lambda x, y, lr: fitted(x, y, lr=lr), (ROWS, LABELS, WEIGHTS / 10)),
        "sweep": (swept, (ROWS, LABELS)),
        "sweep, validation": (lambda x, y, v, w: swept(x, y, validation=(v, w)), (ROWS, LABELS, ROWS + 1, LABELS)),
        "Sweep.outputs": (
            lambda x: ds.sweep(
                mlp, (ROWS, LABELS), CROSS_ENTROPY, grid={"seed": [0, 1]}, members=2, backend="vmap", **TRAINING
            ).outputs(x, 5),
            (ROWS,),
        ),
        "Progress.of": (
            lambda loss, members: ds.Progress.of(
                {"loss": loss, "member_loss": members}, epoch=1, epochs=2, step=3, steps=4, seconds=0.0
            ),
            (SCORES, REALS),
        ),
        "train.low_confidence": (partial(ds.train.low_confidence, below=0.4), (LOG_PROBS,), EXACT),
        # attacks
        "attacks.fgsm": (attack("fgsm", epsilon=0.1), (IMAGES, LABELS)),
        "attacks.bim": (attack("bim", epsilon=0.1, steps=3), (IMAGES, LABELS)),
        "attacks.pgd": (attack("pgd", epsilon=0.1, steps=3, restarts=2), (IMAGES, LABELS)),
        "attacks.pgd, l2": (attack("pgd", epsilon=0.5, steps=3, norm="l2"), (IMAGES, LABELS)),
        "attacks.pgd, targets": (
            lambda x, y, t: ds.attacks.pgd(victim(), x, y, target=t, epsilon=0.1, steps=3),
            (IMAGES, LABELS, (LABELS + 1) % C),
        ),
        "attacks.mim": (attack("mim", epsilon=0.1, steps=3), (IMAGES, LABELS)),
        "attacks.apgd": (attack("apgd", epsilon=0.1, steps=5), (IMAGES, LABELS)),
        "attacks.apgd, l2": (attack("apgd", epsilon=0.5, steps=5, norm="l2", loss="dlr"), (IMAGES, LABELS)),
        "attacks.square": (attack("square", epsilon=0.1, queries=10), (IMAGES, LABELS)),
        "attacks.square, l2": (attack("square", epsilon=0.5, queries=10, norm="l2"), (IMAGES, LABELS)),
        "attacks.square, rows": (
            lambda x, y: ds.attacks.square(ensemble(backend="loop"), x, y, epsilon=0.1, queries=10),
            (ROWS.sigmoid(), LABELS),
        ),
        "attacks.counted_square": (attack("counted_square", epsilon=0.1, queries=10), (IMAGES, LABELS)),
        "attacks.carlini_wagner": (
            attack("carlini_wagner", steps=8, search_steps=2, step_size=0.1, constant=1.0),
            (IMAGES, LABELS),
        ),
        "attacks.elastic_net": (
            attack("elastic_net", steps=8, search_steps=2, step_size=0.1, constant=1.0),
            (IMAGES, LABELS),
        ),
        "attacks.jsma": (
            lambda x, y, t: ds.attacks.jsma(victim(), x, y, target=t, distortion=0.05),
            (IMAGES, LABELS, (LABELS + 1) % C),
        ),
        "attacks.random_noise": (attack("random_noise", epsilon=0.3, draws=3), (IMAGES, LABELS)),
        "attacks.tried": (
            attack("tried", epsilon=0.2, craft=lambda _, x, y: (x + 0.2 * (y % 2).view(-1, 1, 1, 1)).clamp(0, 1)),
            (IMAGES, LABELS),
        ),
        "attacks.over": (
            lambda x, y: ds.attacks.over(partial(ds.attacks.fgsm, epsilon=0.1), victim(), x, y, batch_size=5),
            (IMAGES, LABELS),
        ),
        "attacks.perturbed": (attack("perturbed", epsilon=0.1, steps=3), (IMAGES, LABELS)),
        "attacks.climbed": (
            lambda x, s: ds.attacks.climbed(
                torch.cos, x, s, ball=ds.attacks.Ball("l2", 0.5, 0.0, 1.0), steps=3, step_size=0.2, decay=1.0
            ),
            (IMAGES, NOISE),
        ),
        **{
            f"attacks.Ball.{name}, {norm}": (
                lambda *points, n=name, b=norm: getattr(ds.attacks.Ball(b, 0.3, 0.0, 1.0), n)(*points),
                points,
            )
            for norm in ("linf", "l2")
            for name, points in {
                "lengths": (IMAGES,),
                "steepest": (IMAGES - 0.5,),
                "projected": (IMAGES, NOISE),
                "random": (IMAGES, KEYS.int()),
            }.items()
        },
        "attacks.Ball.checked": (lambda x: ds.attacks.Ball.checked("linf", 0.1, (0.0, 1.0), x).epsilon, (IMAGES,)),
        "attacks.transfer_matrix": (attack("transfer_matrix", steps=2, batch_size=5), (IMAGES, LABELS)),
        "attacks.evaluate": (evaluated, (ROWS[:4].sigmoid(), LABELS[:4])),
        # the audit
        "audit": (partial(audited, task="classification", kind="logits"), (LOGITS, LABELS)),
        "audit, everything": (
            lambda f, y, g, z, r, o: audited(
                f, y, task="classification", kind="logits", train=(g, z), reference=r, ood=o
            ),
            (LOGITS, LABELS, OTHERS, LABELS, LOGITS + 1, OTHERS),
        ),
        "audit, regression": (partial(audited, task="regression"), (LOGITS, REALS)),
        "audit, one output": (partial(audited, task="regression"), (LOGITS[..., 0], REALS[:, 0])),
        "audit, arrays": (
            lambda f, y: audited(f.numpy(), y.numpy(), task="classification", kind="logits"),
            (LOGITS, LABELS),
        ),
        "audit, a list": (lambda f, y: audited(list(f), y, task="classification", kind="logits"), (LOGITS, LABELS)),
        "report": (
            lambda f, y, o: reported(f, y, kind="logits", shifted=o, training=(f, y)),
            (LOGITS, LABELS, LOGITS),
        ),
        "report, regression": (reported, (LOGITS, REALS)),
        "auditing.roc_area": (ds.auditing.roc_area, (SCORES, OUTSIDE)),
        # data
        "data.Split.rows": (lambda y: ds.data.Split(0.3).rows(y), (LABELS,), EXACT),
        "data.Split.rows, groups": (lambda y: ds.data.Split(0.3, groups=y).rows(y), (LABELS,), EXACT),
        "data.split": (lambda x, y: ds.data.split(x, y, 0.3, 0), (IMAGES, LABELS), EXACT),
        "data.batches": (gathered, (IMAGES, LABELS), EXACT),
        "data.batches, augmented": (partial(gathered, augment=ds.data.augment.crops), (IMAGES, LABELS), EXACT),
        "data.TensorBatches.batch": (
            lambda x, y, chosen: ds.data.TensorBatches(
                x, y, batch_size=5, seeds=[0, 1], device=torch.device("cpu")
            ).batch(chosen),
            (IMAGES, LABELS, torch.tensor([[0, 3, 1], [5, 2, 2]])),
            EXACT,
        ),
        "data.TensorBatches.size": (
            lambda chosen: ds.data.TensorBatches.size(None, chosen),
            (torch.tensor([[0, 3], [5, 2]]),),
            EXACT,
        ),
        "data, unlabelled": (with_pool, (ROWS, LABELS, ROWS + 1), EXACT),
        "data.augment.flips": (augmented("flips"), (IMAGES,), EXACT),
        "data.augment.crops": (augmented("crops", padding=2), (IMAGES,), EXACT),
        "data.augment.shifts": (augmented("shifts", fraction=0.3), (IMAGES,), EXACT),
        "data.augment.shifts, zeros": (augmented("shifts", fraction=0.3, fill="zero"), (IMAGES,), EXACT),
        "data.augment.rotations": (augmented("rotations", degrees=40.0), (IMAGES,), EXACT),
        "data.augment.rotations, bilinear": (
            augmented("rotations", degrees=40.0, interpolation="bilinear"),
            (IMAGES,),
            EXACT,
        ),
        "data.augment.crops, bytes": (augmented("crops", padding=2), ((IMAGES * 255).byte(),), EXACT),
        "data.augment.rotations, bytes": (augmented("rotations"), ((IMAGES * 255).byte(),), EXACT),
        "data.augment.chain": (
            lambda x: ds.data.augment.chain(ds.data.augment.flips, ds.data.augment.crops)(
                x, torch.Generator().manual_seed(0)
            ),
            (IMAGES,),
            EXACT,
        ),
        "data.corruptions.corrupt": (corrupted, (IMAGES,)),
        "data.corruptions.corrupt, one channel": (corrupted, (IMAGES[:, :1],)),
        "data.corruptions.brightness": (lambda x: ds.data.corruptions.brightness(x, 0.2), (IMAGES,), EXACT),
        "data.corruptions.contrast": (lambda x: ds.data.corruptions.contrast(x, 0.2), (IMAGES,)),
        "data.corruptions.saturate": (lambda x: ds.data.corruptions.saturate(x, 2.0), (IMAGES,)),
        "data.corruptions.defocus_blur": (lambda x: ds.data.corruptions.defocus_blur(x, 2.0), (IMAGES,)),
        "data.corruptions.gaussian_blur": (lambda x: ds.data.corruptions.gaussian_blur(x, 1.0), (IMAGES,)),
        "data.corruptions.jpeg_like": (lambda x: ds.data.corruptions.jpeg_like(x, 25.0), (IMAGES,)),
        "data.corruptions.pixelate": (lambda x: ds.data.corruptions.pixelate(x, 0.5), (IMAGES,)),
        "data.corruptions.gaussian_noise": (
            lambda x, n: ds.data.corruptions.gaussian_noise(x, 0.1, n),
            (IMAGES, NOISE),
            EXACT,
        ),
        "data.corruptions.impulse_noise": (
            lambda x, n: ds.data.corruptions.impulse_noise(x, 0.1, n),
            (IMAGES, NOISE),
            EXACT,
        ),
        "data.corruptions.shot_noise": (
            lambda x, n: ds.data.corruptions.shot_noise(x, 20.0, n),
            (IMAGES, NOISE),
            EXACT,
        ),
        "data.features.cached_features": (cached, (IMAGES, LABELS)),
        "data.features.FeatureCache.collate": (
            lambda x, y: ds.data.features.FeatureCache.collate(list(zip(x, y, strict=True))),
            (ROWS, LABELS),
            EXACT,
        ),
        "data.tables.TableScaler.fit": (tables.TableScaler.fit, (ROWS, REALS)),
        "data.tables.TableScaler.transform": (tables.TableScaler.fit(ROWS, REALS).transform, (ROWS, REALS)),
        "data.tables.TableScaler.inverse_transform": (
            tables.TableScaler.fit(ROWS, REALS).inverse_transform,
            (LOGITS,),
        ),
        "data.tables.scaled": (tables.scaled, (ROWS, REALS, torch.arange(8), torch.arange(8, B))),
        "batches.check_finite": (partial(check_finite, "x"), (IMAGES,)),
        "batches.end_to_end": (lambda x, y: end_to_end("data", [(x, y), (x, y)]), (IMAGES, LABELS), EXACT),
        # the ground
        "randomness.example_keys": (lambda x: randomness.example_keys(x, 3), (IMAGES.float(),), EXACT),
        "randomness.uniform": (lambda key: randomness.uniform(key, (2, 3)), (KEYS.int(),), EXACT),
        "randomness.keep_mask": (
            lambda key, step: randomness.keep_mask((2, 3), 0.4, key, step),
            (KEYS, torch.arange(B)),
            EXACT,
        ),
        "randomness.random_bits": (
            lambda key, step: randomness.random_bits((2, 3), key, step),
            (KEYS, torch.arange(B)),
            EXACT,
        ),
        "randomness.mixed": (randomness.mixed, (KEYS.int(),), EXACT),
        "dropout.dropped": (lambda x, keep: dropout.dropped(x, keep, 0.5), (IMAGES, NOISE > 0.5), EXACT),
        "dropout.KeyedDropout.forward": (lambda x: dropout.KeyedDropout(0.5)(x), (IMAGES,), EXACT),
        "dropout.KeyedDropPath.forward": (lambda x: dropout.KeyedDropPath(0.5)(x), (IMAGES,), EXACT),
        "fingerprint.digest": (fingerprint.digest, (IMAGES, LABELS), EXACT),
        "fingerprint.fingerprint": (lambda x, y: fingerprint.fingerprint({"x": x, "y": y}), (IMAGES, LABELS), EXACT),
        "storage.write_folder": (stored, (IMAGES, LABELS), EXACT),
        "checks.class_targets": (lambda y: checks.class_targets(y, B, C), (SOFT,), EXACT),
        "checks.full_precision": (checks.full_precision, (LOGITS.half(),), EXACT),
        "checks.is_concrete": (checks.is_concrete, (LOGITS,), EXACT),
        "checks.listed": (lambda w: checks.listed("weights", w), (WEIGHTS,), EXACT),
        "checks.member_axes": (checks.member_axes, (LOGITS,), EXACT),
        "checks.member_logits": (checks.member_logits, (LOGITS,), EXACT),
        "checks.member_outputs": (checks.member_outputs, (LOGITS,), EXACT),
        "checks.member_probs": (checks.member_probs, (PROBS,), EXACT),
        "checks.are_probabilities": (checks.are_probabilities, (PROBS,), EXACT),
        "checks.member_weights": (lambda w, f: checks.member_weights(w, M, f), (WEIGHTS, LOGITS), EXACT),
        "checks.example_weights": (lambda w: checks.example_weights(w, M, B), (REALS[:, 0].abs(),), EXACT),
        "checks.unmasked": (lambda x: checks.unmasked(x, "x"), (IMAGES,), EXACT),
        "losses.batch_mean": (ds.losses.batch_mean, (LOGITS[..., 0], REALS[:, 0].abs())),
        "losses.batch_mean, per member": (ds.losses.batch_mean, (LOGITS[..., 0], OTHERS[..., 0].abs())),
        "losses.smoothed": (lambda y: ds.losses.smoothed(y, C, 0.2), (LABELS,)),
        "losses.smoothed, of soft labels": (lambda y: ds.losses.smoothed(y, C, 0.2), (SOFT,)),
        "losses.class_example_weights": (ds.losses.class_example_weights, (LABELS, SOFT[0])),
        "losses.weighted_targets": (
            lambda y, w, v: ds.losses.weighted_targets(
                y, C, loss="cross_entropy", class_weights=w, label_smoothing=0.2, example_weights=v
            ),
            (LABELS, SOFT[0], REALS[:, 0].abs()),
        ),
        "losses.per_member, dense": (partial(ds.losses.per_member, "cross_entropy"), (DENSE, DENSE_LABELS)),
        "objectives.independent, weights": (
            lambda f, y, w: ds.objectives.independent(f, y, loss="cross_entropy", example_weights=w),
            (LOGITS, LABELS, OTHERS[..., 0].abs()),
        ),
        "objectives.adp, dense": (ds.objectives.adp, (DENSE, DENSE_LABELS)),
        "pooling.mean_probability, dense": (ds.pooling.mean_probability, (DENSE,)),
        "diversity.decompose, dense": (
            lambda f, y: ds.diversity.decompose(f, y, loss="brier", pool="probability"),
            (DENSE, DENSE_LABELS),
        ),
        "audit, dense": (partial(audited, task="classification", kind="logits"), (DENSE, DENSE_LABELS)),
        "audit, classes last": (
            lambda f, y: audited(f, y, task="classification", kind="logits", class_axis=-1, ignore_index=0),
            (DENSE.movedim(2, -1), DENSE_LABELS),
        ),
        "dense.positions": (partial(ds.dense.positions, ignore_index=1), (DENSE, DENSE_LABELS), EXACT),
        "dense.counted": (partial(ds.dense.counted, ignore_index=1), (DENSE, DENSE_LABELS), EXACT),
        "dense.flat": (ds.dense.flat, (DENSE,), EXACT),
        "dense.unflat": (ds.dense.unflat, (DENSE[0, :, 0].flatten(), DENSE), EXACT),
        "dense.axis_of": (lambda f: ds.dense.axis_of(f, -1), (DENSE,), EXACT),
        "checks.value_targets": (lambda y: checks.value_targets(y, B, C), (REALS,), EXACT),
    }
    return {name: (*row, ROUNDED)[:3] for name, row in rows.items()}


NETS = {
    "cnn": cnn,
    "resnet20": lambda: ds.nets.resnet20(C, 3),
    "mobilenet_v2": lambda: ds.nets.mobilenet_v2(C, 3),
}
TABLE = table()
every_function = pytest.mark.parametrize("name", TABLE)
SLOW = {
    "attacks.evaluate",
    "attacks.transfer_matrix",
    "attacks.elastic_net",
    "attacks.carlini_wagner",
    "attacks.counted_square",
    "fit, adversarial",
    "audit, everything",
}
"""Tried in two layouts and in a memory map."""
NEEDS_FOLDER = {"data.features.cached_features", "storage.write_folder"}

# --- comparing --------------------------------------------------------------------------------------------------------


def leaves(result):
    """All numbers of a result, one after the other; words too."""
    if isinstance(result, nn.Module):
        result = result.state_dict()
    if dataclasses.is_dataclass(result):
        result = vars(result)
    if isinstance(result, dict):
        return [leaf for name in sorted(result, key=str) for leaf in leaves(result[name])]
    if isinstance(result, list | tuple):
        return [leaf for part in result for leaf in leaves(part)]
    return [result]


def assert_same(result, expected, kind, context):
    result, expected = leaves(result), leaves(expected)
    assert len(result) == len(expected), context
    for actual_leaf, expected_leaf in zip(result, expected, strict=True):
        if isinstance(expected_leaf, Tensor) and expected_leaf.is_floating_point() and kind == ROUNDED:
            tolerance = 1e-9 if expected_leaf.dtype == torch.float64 else 1e-5
            torch.testing.assert_close(
                actual_leaf,
                expected_leaf,
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
                msg=f"{context}: off by {(actual_leaf - expected_leaf).abs().max()}",
            )
        elif isinstance(expected_leaf, Tensor):
            assert actual_leaf.dtype == expected_leaf.dtype, context
            assert torch.equal(actual_leaf.nan_to_num(), expected_leaf.nan_to_num()), context
        elif isinstance(expected_leaf, float):
            close = math.isclose(actual_leaf, expected_leaf, rel_tol=1e-9, abs_tol=1e-9) or (
                math.isnan(actual_leaf) and math.isnan(expected_leaf)
            )
            assert close, f"{context}: {actual_leaf} and {expected_leaf}"
        else:
            assert actual_leaf == expected_leaf, context


def call_without_writes(call, tensors, context):
    """What a call gives, after a look at whether it has written into its tensors."""
    before, versions = [tensor.clone() for tensor in tensors], [tensor._version for tensor in tensors]
    torch.manual_seed(0)
    result = call(*tensors)
    for number, (tensor, old, version) in enumerate(zip(tensors, before, versions, strict=True)):
        assert torch.equal(tensor, old), f"{context}: tensor {number} has changed"
        assert tensor._version == version, f"{context}: tensor {number} was written to"
    return result


@pytest.mark.slow(
    cases=[
        "attacks.*",
        "nets.mobilenet_v2",
        "trunk.last_layers",
        "fit, adversarial",
        "fit, validation",
        "sweep, validation",
    ]
)
@every_function
def test_layouts_change_nothing(name, tmp_path):
    call, tensors, kind = TABLE[name]
    if name in NEEDS_FOLDER:
        call = partial(call, tmp_path)
    evaluated_network = [tensor.contiguous() for tensor in tensors]
    expected = call_without_writes(call, evaluated_network, "contiguous")
    for layout, with_layout in (FEW if name in SLOW else LAYOUTS).items():
        if layout != "channels last" or any(tensor.ndim == 4 for tensor in tensors):
            assert_same(
                call_without_writes(call, [with_layout(tensor) for tensor in evaluated_network], layout),
                expected,
                kind,
                layout,
            )
    maps = tmp_path / "maps"
    maps.mkdir()
    assert_same(
        call_without_writes(call, [read_only(x, maps) for x in evaluated_network], "read only"),
        expected,
        kind,
        "read only",
    )


@pytest.mark.slow(fast=["*-first axis"])
@pytest.mark.parametrize("axis", [0, 1], ids=["first axis", "second axis"])
@pytest.mark.parametrize("name", [name for name in TABLE if name not in SLOW])
def test_expanded_tensors_are_like_written_out_ones(name, axis, tmp_path):
    call, tensors, kind = TABLE[name]
    if name in NEEDS_FOLDER:
        call = partial(call, tmp_path)
    views = [x if x is WEIGHTS else expanded(x, axis) for x in tensors]
    try:
        expected = call_without_writes(call, [view.contiguous() for view in views], "written out")
    except ValueError as refusal:  # equal numbers may be too little: weights that sum to more than one, no spread
        with pytest.raises(ValueError, match=re.escape(str(refusal))):
            call_without_writes(call, views, "expanded")
        return
    assert_same(call_without_writes(call, views, "expanded"), expected, kind, "expanded")


def test_the_audit_takes_arrays_of_any_memory_layout():
    arrays = [LOGITS.numpy(), LABELS.numpy()]
    expected = audited(*arrays, task="classification", kind="logits")
    for with_layout in (
        lambda a: np.flip(np.flip(a).copy()),
        np.asfortranarray,
        lambda a: a.astype(a.dtype.newbyteorder(">")),
    ):
        assert_same(
            audited(*map(with_layout, arrays), task="classification", kind="logits"), expected, ROUNDED, "array"
        )


# --- networks and augmentations that write into what they are handed --------------------------------------------------


class Standardises(nn.Module):
    """Writes into its input: done twice to the same tensor, it gives something else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, C)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x.sub_(0.5).div_(0.3)))


class Careful(Standardises):
    """The same without writing."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm((x - 0.5) / 0.3))


def in_front():
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, C)).double()


def shifted_by(amount, in_place):
    return lambda x, _: x.add_(amount) if in_place else x + amount


def evaluated_network(build):
    torch.manual_seed(0)
    return build().eval()


def raw_batches(x, y):
    return DataLoader([(x[:6], y[:6]), (x[6:], y[6:])], batch_size=None)  # batches are the data set's own memory


def loaded(build, x, y):
    ens = ensemble(build, "loop")
    ds.fit(ens, raw_batches(x, y), CROSS_ENTROPY, **TRAINING)
    return ens


WRITING = {
    **{
        f"Ensemble, {backend}, {mode}": (
            lambda build, x, y, b=backend, t=mode == "training": [ensemble(build, b, t)(x) for _ in range(2)]
        )
        for backend in ("auto", "loop", "vmap", "batched")
        for mode in ("training", "evaluation")
    },
    **{
        f"Ensemble, own inputs, {backend}": (
            lambda build, x, y, b=backend: ensemble(build, b)(x.expand(M, *x.shape).contiguous(), per_member=True)
        )
        for backend in ("auto", "loop", "vmap")
    },
    "Ensemble, inference mode": lambda build, x, y: torch.inference_mode()(ensemble(build, "loop"))(x).clone(),
    "Ensemble, mixed": lambda build, x, y: ds.Ensemble.from_modules(
        [evaluated_network(build), evaluated_network(mlp)]
    ).eval()(x),
    "Ensemble.predict": lambda build, x, y: ensemble(build).predict(x),
    "Ensemble.soup": lambda build, x, y: ensemble(build).soup(x),
    **{
        f"fit, {backend}": (lambda build, x, y, b=backend: fitted(x, y, build=build, backend=b, validation=(x, y)))
        for backend in ("loop", "vmap")
    },
    "fit, a loader": lambda build, x, y: loaded(build, x, y),
    "SharedTrunk": lambda build, x, y: ds.SharedTrunk(
        evaluated_network(build), ensemble(lambda: nn.Linear(C, 2).double())
    )(x),
    "attacks.fgsm": lambda build, x, y: ds.attacks.fgsm(evaluated_network(build), x, y, epsilon=0.1),
    "attacks.fgsm, ensemble": lambda build, x, y: ds.attacks.fgsm(ensemble(build), x, y, epsilon=0.1),
    "attacks.fgsm, list": lambda build, x, y: ds.attacks.fgsm(
        [evaluated_network(build), evaluated_network(mlp)], x, y, epsilon=0.1
    ),
    "attacks.square": lambda build, x, y: ds.attacks.square(evaluated_network(build), x, y, epsilon=0.1, queries=5),
}


@pytest.mark.parametrize("name", WRITING)
def test_networks_that_write_into_their_input_are_like_those_that_do_not(name):
    x = ROWS.sigmoid()
    expected = call_without_writes(partial(WRITING[name], Careful), [x, LABELS], name)
    assert_same(call_without_writes(partial(WRITING[name], Standardises), [x, LABELS], name), expected, ROUNDED, name)


@pytest.mark.parametrize("backend", ["auto", "loop", "vmap", "batched", "stacked"])
def test_an_activation_in_place_in_front_leaves_the_input_alone(backend):
    ens = ensemble(in_front, backend)
    expected = torch.stack([ens.member(i)(ROWS.clone()) for i in range(M)])
    for _ in range(2):
        assert_same(call_without_writes(ens, [ROWS], backend), expected, ROUNDED, backend)


def test_features_of_networks_and_augmentations_that_write(tmp_path):
    result = [
        call_without_writes(
            lambda x, y, p=name, w=writes: ds.data.features.cached_features(
                evaluated_network(Standardises if w else Careful),
                (x, y),
                tmp_path / p,
                dtype=torch.float32,
                augmentations=[None, shifted_by(0.1, w)],
            ).tensors(),
            [ROWS, LABELS],
            name,
        )
        for name, writes in (("writes", True), ("careful", False))
    ]
    assert_same(*result, ROUNDED, "features")


@pytest.mark.parametrize("loader", [False, True], ids=["tensors", "loader"])
@pytest.mark.parametrize("per_member", [False, True], ids=["one for all", "one per member"])
def test_augmentations_that_write_into_their_batch_are_like_those_that_do_not(loader, per_member):
    def trained(in_place, x, y):
        amounts = [0.3, 0.5, 0.7] if per_member else [0.3]
        augment = [shifted_by(amount, in_place) for amount in amounts]
        ens = ensemble(backend="loop")
        data = raw_batches(x, y) if loader else (x, y)
        ds.fit(ens, data, CROSS_ENTROPY, augment=augment if per_member else augment[0], **TRAINING)
        return ens

    result, expected = (
        call_without_writes(partial(trained, in_place), [ROWS, LABELS], "augment") for in_place in (True, False)
    )
    assert_same(result, expected, ROUNDED, "augment")


# --- nothing is left out ----------------------------------------------------------------------------------------------

ROOMS = {
    "": ds,
    "pooling": ds.pooling,
    "losses": ds.losses,
    "dense": ds.dense,
    "scores": ds.scores,
    "diversity": ds.diversity,
    "metrics": ds.metrics,
    "objectives": ds.objectives,
    "masks": ds.masks,
    "attacks": ds.attacks,
    "auditing": ds.auditing,
    "conformal": ds.conformal,
    "train": ds.train,
    "trunk": ds.trunk,
    "data": ds.data,
    "data.augment": ds.data.augment,
    "data.corruptions": ds.data.corruptions,
    "data.features": ds.data.features,
    "data.tables": tables,
    "randomness": randomness,
    "dropout": dropout,
    "fingerprint": fingerprint,
    "storage": storage,
    "checks": checks,
}
LEFT_OUT = {
    "Architecture.from_json": "takes what JSON can hold",
    "audit_estimator": "takes a model; what its members return goes through audit",
    "attacks.autoattack": "its package is not among the tests' requirements; its results go through attacks.tried",
    "Predictive.plot": "draws the numbers of predictive",
    "checks.device": "takes a device",
    "conformal.Conformal.of_record": "takes what JSON can hold",
    "dropout.counter_names": "looks at names, dtypes and shapes",
    "data.Split.check": "returns nothing; Split.rows is in the table",
    "fingerprint.array_digest": "takes a NumPy array; test_fingerprint has its layouts",
    "fingerprint.glance": "test_parallel has batches of several processes",
    **{
        f"losses.{name}": "takes a loss"
        for name in (
            "check_trainable",
            "function_of",
            "known",
            "name_of",
            "outputs_per_target",
            "settings_of",
            "tell_of_mean",
            "text_of",
        )
    },
    "objectives.declaration": "takes an objective",
    "randomness.generator_state": "takes a generator",
    "randomness.set_generator_state": "takes a generator and its own state",
    "scores.select": "takes scores, not outputs",
    "attacks.Ball.bounds": "the attacks go through it",
    "attacks.Ball.edge": "the attacks go through it",
    "storage.Together.everyone": "takes what JSON can hold",
    "storage.write_folder_together": "processes write their rows; test_parallel has it",
    "trunk.Features.forward": "SharedTrunk.forward is in the table, and computes the same",
    "trunk.features_of": "SharedTrunk.forward goes through it",
    "tune": "its data goes through sweep",
    "storage.check_match": "looks at shapes",
    "storage.new_array": "takes a shape and a dtype",
    "storage.write_record": "takes what JSON can hold",
}
"""Public functions of tensors that are not in the table, and why."""


def takes_tensors(function):
    """Whether a parameter's annotation names a tensor, or anything at all."""
    names = [str(p.annotation) for p in inspect.signature(function).parameters.values()]
    names = [name.replace("collections.abc.Callable[[typing.Any], typing.Any]", "") for name in names]  # no data
    return any("Tensor" in name or "typing.Any" in name for name in names)


def public():
    """The public functions of every room, and the methods of its classes, that take tensors, by their first name."""
    result = {}
    for room, module in ROOMS.items():
        names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        for name in names:
            value, full = getattr(module, name), f"{room}.{name}".strip(".")
            if inspect.isclass(value) and value.__module__.startswith(module.__name__):
                methods = {
                    method_name: getattr(value, method_name)
                    for method_name in vars(value)
                    if not method_name.startswith("_")
                }
                result |= {
                    f"{full}.{method_name}": method
                    for method_name, method in methods.items()
                    if inspect.isroutine(method)
                }
            elif inspect.isfunction(value) and value.__module__.startswith(module.__name__):
                result[full] = value
    first = {}
    for name, function in result.items():
        if takes_tensors(function):
            first.setdefault(getattr(function, "__func__", function), name)  # `train.fit` is `fit`
    return set(first.values())


def test_the_table_leaves_no_public_function_out():
    listed = {name.split(",")[0] for name in TABLE}
    assert public() - listed == set(LEFT_OUT)


def test_the_look_for_public_functions_sees_functions_and_methods():
    names = public()
    assert {"fit", "audit", "Ensemble.forward", "Ensemble.predict", "attacks.fgsm", "masks.Masked.forward"} <= names
    assert not {"train.fit", "nets.mlp", "masks.generate", "Ensemble.load"} & names
