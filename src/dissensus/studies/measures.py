"""Measures of member outputs on clean data: one number per ensemble, from outputs ``[M, N, C]`` and targets.

A new measure is a function here and a line in `MEASURES`; one from outside is passed to `run`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

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
    """Share of diversity that vanishes when members' constant biases are taken away."""
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


def nll(outputs: Tensor, targets: Tensor, loss: str, pool: Pool) -> float:  # noqa: ARG001
    """The ensemble's negative log-likelihood."""
    return error(outputs, targets, "cross_entropy", pool)


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
}
"""Measures by name; beside them, ``"codependence_SHARE"``."""
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
