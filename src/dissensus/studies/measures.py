"""Measures of member outputs on clean data: one number per ensemble, from outputs ``[M, N, C]`` and targets.

A new measure is a function here and a line in `MEASURES`; one from outside is passed to `run`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import torch
from torch import Tensor

from dissensus import diversity as diversity_of
from dissensus import losses, metrics, pooling
from dissensus.axes import Pool
from dissensus.diversity import bias_share, codependence, decompose
from dissensus.metrics.generalisation import pooled
from dissensus.studies.results import Measure

OutputMeasure = Callable[[Tensor, Tensor, str, Pool], float]
"""``(outputs [M, N, C], targets, loss, pool) -> number``."""


LEVEL = 0.9
"""Level of the prediction intervals whose coverage and width are measured: that of the outer default quantiles."""


def error(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:
    """The ensemble's loss."""
    return float(decompose(outputs, targets, loss=loss, pool=pool).ensemble.double().mean())


def individual(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:
    """The members' mean loss."""
    return float(decompose(outputs, targets, loss=loss, pool=pool).individual.double().mean())


def diversity(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:
    """The members' mean loss less the ensemble's loss."""
    return float(decompose(outputs, targets, loss=loss, pool=pool).diversity.mean())


def relative_diversity(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:
    """Diversity in units of the ensemble's loss."""
    return float(diversity_of.relative_diversity(outputs, targets, loss=loss, pool=pool))


def constant_bias(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:  # noqa: ARG001
    """Share of diversity that vanishes when members' constant biases are taken away.

    Of Gaussians these are biases of the means; of counts and labels pooled by probability, those of rates and
    probabilities.
    """
    takes = losses.named(loss).takes
    if takes == "gaussian":
        return float(bias_share(losses.gaussian_moments(outputs)[0]))
    if pool == "probability" and takes in ("log_rate", "label_logits"):
        return float(bias_share(outputs.exp() if takes == "log_rate" else outputs.sigmoid()))
    return float(bias_share(outputs, pool="probability" if pool == "probability" else "score"))


def accuracy(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:  # noqa: ARG001
    """Share of examples that the ensemble gets right."""
    return float((1 - decompose(outputs, targets, loss="zero_one", pool=pool).ensemble.double()).mean())


def accuracy_top5(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:  # noqa: ARG001
    """Share of examples whose class is among the ensemble's five most probable ones."""
    predicted = pooled(outputs, pool)
    hits = predicted.topk(min(5, predicted.shape[-1]), -1).indices == targets.unsqueeze(-1)
    return float(torch.where(predicted.isnan().any(-1), math.nan, hits.any(-1).double()).mean())


def member_accuracy(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:  # noqa: ARG001
    """Share of examples that a member gets right, on average."""
    return float(_right(outputs, targets).mean())


def worst_member_accuracy(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:  # noqa: ARG001
    """Share of examples that the worst member gets right."""
    return float(_right(outputs, targets).mean(1).min())


def _right(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where a member is right and 0 where it is wrong, ``[M, N]``."""
    return 1 - losses.per_member("zero_one", outputs, targets).double()


def error_rate(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:
    """Share of examples that the ensemble gets wrong."""
    return 1 - accuracy(outputs, targets, loss, pool)


def member_error_rate(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:
    """Share of examples that a member gets wrong, on average."""
    return 1 - member_accuracy(outputs, targets, loss, pool)


def worst_member_error_rate(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:
    """Share of examples that the worst member gets wrong."""
    return 1 - worst_member_accuracy(outputs, targets, loss, pool)


def nonmaximal_volume(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:  # noqa: ARG001
    """ED, the ADP paper's ensemble diversity beside the true class: its mean over examples."""
    return float(diversity_of.nonmaximal_volume(outputs, targets).double().mean())


def log_nonmaximal_volume(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:  # noqa: ARG001
    """The logarithm of ED: its median over examples."""
    return float(diversity_of.nonmaximal_volume(outputs, targets, log=True).double().median())


def nll(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:
    """The ensemble's negative log-likelihood: of the mixture for Gaussians, of the class for classifiers."""
    return error(outputs, targets, "gaussian_nll" if losses.named(loss).takes == "gaussian" else "cross_entropy", pool)


def crps(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:  # noqa: ARG001
    """The continuous ranked probability score of the ensemble, averaged over targets.

    Of the mixture for Gaussians; of the mean quantiles, by their levels; of the members as a sample for values.
    """
    takes = losses.named(loss).takes
    targets = targets.unsqueeze(-1) if targets.ndim == 1 else targets
    if takes == "gaussian":
        return float(metrics.crps_mixture(*losses.gaussian_moments(outputs), targets).mean())
    if takes == "quantiles":
        levels = losses.QUANTILE_LEVELS
        return float(metrics.crps_quantiles(_quantiles(outputs), targets, levels=levels).mean())
    return float(metrics.crps_ensemble(outputs, targets).mean())


def rmse(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:  # noqa: ARG001
    """Root of the mean squared error of the mean prediction, averaged over targets."""
    means = losses.gaussian_moments(outputs)[0] if losses.named(loss).takes == "gaussian" else outputs
    return metrics.regression(pooling.mean_output(means), targets, repeats=0).rmse.value


def interval_coverage(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:  # noqa: ARG001
    """Share of targets within the ensemble's prediction intervals of 90 %."""
    low, high = _intervals(outputs, loss)
    targets = targets.unsqueeze(-1) if targets.ndim == 1 else targets
    return float(((low <= targets) & (targets <= high)).double().mean())


def interval_width(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:  # noqa: ARG001
    """Mean width of the ensemble's prediction intervals of 90 %."""
    low, high = _intervals(outputs, loss)
    return float((high - low).double().mean())


def _intervals(outputs: Tensor, loss: str) -> tuple[Tensor, Tensor]:
    """Ends ``[N, D]`` of central intervals: of the Gaussian with the mixture's moments, or between outer quantiles."""
    if losses.named(loss).takes == "quantiles":
        quantiles = _quantiles(outputs)
        return quantiles[..., 0], quantiles[..., -1]
    mean, aleatoric, epistemic = pooling.moment_matched(*losses.gaussian_moments(outputs))
    reach = NormalDist().inv_cdf((1 + LEVEL) / 2) * (aleatoric + epistemic).sqrt()
    return mean - reach, mean + reach


def _quantiles(outputs: Tensor) -> Tensor:
    """Mean quantiles in order, ``[N, D, Q]``."""
    return pooling.mean_output(outputs).unflatten(-1, (-1, len(losses.QUANTILE_LEVELS))).sort(-1).values


def brier(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:  # noqa: ARG001
    """The Brier score of the mean probabilities."""
    predicted = pooling.mean_probability(outputs)
    return float(losses.per_member("brier", predicted.unsqueeze(0), targets).mean())


def normalised_disagreement(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:  # noqa: ARG001
    """Share of examples on which two members differ over their error rate, on average over pairs; 0 for one member."""
    pairs = diversity_of.plane(outputs, targets).diversity
    return float(pairs.mean()) if len(pairs) else 0.0


def pairwise_disagreement(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:  # noqa: ARG001
    """Share of examples on which two members differ, on average over pairs; 0 for one member."""
    members = len(outputs)
    return float(diversity_of.pairwise_disagreement(outputs).sum()) / max(1, members * (members - 1))


def ece(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:  # noqa: ARG001
    """The expected calibration error of the mean probabilities."""
    return metrics.calibration(pooling.mean_probability(outputs), targets).error


MEASURES: dict[str, OutputMeasure] = {
    "error": error,
    "individual": individual,
    "diversity": diversity,
    "relative_diversity": relative_diversity,
    "bias_share": constant_bias,
    "accuracy": accuracy,
    "accuracy_top5": accuracy_top5,
    "member_accuracy": member_accuracy,
    "worst_member_accuracy": worst_member_accuracy,
    "error_rate": error_rate,
    "member_error_rate": member_error_rate,
    "worst_member_error_rate": worst_member_error_rate,
    "nonmaximal_volume": nonmaximal_volume,
    "log_nonmaximal_volume": log_nonmaximal_volume,
    "nll": nll,
    "brier": brier,
    "normalised_disagreement": normalised_disagreement,
    "pairwise_disagreement": pairwise_disagreement,
    "ece": ece,
    "crps": crps,
    "rmse": rmse,
    "interval_coverage": interval_coverage,
    "interval_width": interval_width,
}
"""Measures by name; beside them, ``"codependence_SHARE"``."""
_CLASSES: tuple[losses.Kind, ...] = ("logits",)
TAKES: Mapping[str, tuple[losses.Kind, ...]] = {
    **dict.fromkeys(("accuracy", "accuracy_top5", "member_accuracy", "worst_member_accuracy"), _CLASSES),
    **dict.fromkeys(("error_rate", "member_error_rate", "worst_member_error_rate"), _CLASSES),
    **dict.fromkeys(("nonmaximal_volume", "log_nonmaximal_volume", "brier", "ece"), _CLASSES),
    **dict.fromkeys(("normalised_disagreement", "pairwise_disagreement"), _CLASSES),
    "nll": ("logits", "gaussian"),
    "crps": ("values", "gaussian", "quantiles"),
    "rmse": ("values", "gaussian"),
    "interval_coverage": ("gaussian", "quantiles"),
    "interval_width": ("gaussian", "quantiles"),
}
"""Kinds of outputs that a measure takes; the others take any."""
TRAIN_MEASURES = ("gap", "train_error")
"""Measures that need the ensemble's error on training data."""


def find_measure(name: str, measures: Mapping[str, OutputMeasure] = MEASURES) -> OutputMeasure | None:
    """A measure of test outputs by its name; None where there is none."""
    parsed = Measure.parse(name)
    if parsed.kind == "codependence" and not parsed.dataset:
        return partial(codependence_at, float(parsed.parameter))
    return measures.get(name)


def is_output_measure(name: str, measures: Mapping[str, OutputMeasure] = MEASURES) -> bool:
    """Whether a measure is taken of outputs on clean data, rather than under attack or on shifted data."""
    return name in TRAIN_MEASURES or find_measure(name, measures) is not None


def codependence_at(drop: float, outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:
    """Relative rise of the ensemble's loss when a share of members is dropped at random."""
    rise = codependence(outputs, targets, loss=loss, pool=pool, drop=drop)
    return float(rise.mean()) / error(outputs, targets, loss, pool)


def unfit(name: str, loss: str, measures: Mapping[str, OutputMeasure] = MEASURES) -> str:
    """Why a measure cannot be taken of outputs that a loss takes; empty where it can. Own measures take any.

    >>> unfit("accuracy", "gaussian_nll")
    "the measure 'accuracy' takes outputs for a loss of logits, not for 'gaussian_nll'"
    >>> unfit("relative_diversity", "gaussian_nll")
    "the measure 'relative_diversity' is a ratio of losses, and 'gaussian_nll' may be negative"
    """
    entry, is_drop = losses.named(loss), Measure.parse(name).kind == "codependence"
    if not is_drop and measures.get(name) is not MEASURES.get(name):
        return ""
    if name in TAKES and entry.takes not in TAKES[name]:
        return f"the measure {name!r} takes outputs for a loss of {' or '.join(TAKES[name])}, not for {loss!r}"
    if entry.density and (is_drop or name == "relative_diversity"):
        return f"the measure {name!r} is a ratio of losses, and {loss!r} may be negative"
    return ""


@dataclass(frozen=True)
class LabelledOutputs:
    """Member outputs ``[M, N, C]`` on test data, and how they are judged."""

    outputs: Tensor
    targets: Tensor
    loss: str
    pool: Pool
    train_error: float | None = None
    """The ensemble's error on training data; None where it was not taken."""


def values(
    names: Sequence[str], test: LabelledOutputs, measures: Mapping[str, OutputMeasure] = MEASURES
) -> dict[str, float]:
    """Values of measures by name."""
    results: dict[str, float] = {}
    train_error = math.nan if test.train_error is None else test.train_error
    with torch.no_grad():
        for name in names:
            if name == "train_error":
                results[name] = train_error
            elif name == "gap":
                results[name] = error(test.outputs, test.targets, test.loss, test.pool) - train_error
            else:
                measure = find_measure(name, measures)
                assert measure is not None, name
                results[name] = measure(test.outputs, test.targets, test.loss, test.pool)
    return results
