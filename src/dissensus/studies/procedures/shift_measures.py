"""Measures around the training data: ``MEASURE``, ``MEASURE_SET``, and ``auroc_SCORE_SET`` for detection."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import dissensus.auditing as auditing
from dissensus import diversity, metrics, scores
from dissensus.auditing.judging import VERDICTS
from dissensus.axes import Pool
from dissensus.metrics.generalisation import pooled
from dissensus.studies import measures
from dissensus.studies.measures import MEASURES, OutputMeasure
from dissensus.studies.results import Measure

BEST = "best"
"""The larger area of two scores: averaged confidence and predictive diversity; for LDR the latter alone."""
LDR = "ldr"
SOUP = "soup_accuracy"
SECONDS = "seconds_per_epoch"
AUDIT = "audit_"
AUDITED_EXAMPLES = 5000
"""Number of training examples that an audit uses."""


@dataclass(frozen=True)
class ShiftOutputs:
    """Member outputs ``[M, N, C]`` on test data and on other sets, and what else measures need."""

    outputs: Tensor
    targets: Tensor
    others: Mapping[str, tuple[Tensor, Tensor | None]]
    loss: str
    pool: Pool
    objective: str = ""
    groups: Tensor | None = None
    """Of test examples."""
    soup: Mapping[str, Tensor] = field(default_factory=dict)
    """Outputs ``[1, N, C]`` of the averaged weights, by set; test data under ``""``."""
    verdict: str = ""
    """The audit's."""
    seconds_per_epoch: float = float("nan")


def sets_of(names: Sequence[str]) -> list[str]:
    """The sets that measures are taken on, beside the test data."""
    return list(dict.fromkeys(dataset for name in names if (dataset := Measure.parse(name).dataset)))


def is_shift_measure(name: str, output_measures: Mapping[str, OutputMeasure] = MEASURES) -> bool:
    """Whether a measure can be taken."""
    measure = Measure.parse(name)
    if measure.attack:
        return False
    if measure.kind == "auroc":
        return bool(measure.dataset) and measure.score in (*scores.SCORES, BEST)
    if measure.kind.startswith(AUDIT):
        return not measure.dataset and measure.kind.removeprefix(AUDIT) in VERDICTS
    if measure.dataset and "worst_group" in measure.kind:
        return False  # groups are known for test data alone
    plain = name.removesuffix(f"_{measure.dataset}") if measure.dataset else name
    known = (*WITHOUT_TARGETS, *WITH_TARGETS, SECONDS, SOUP)
    return plain in known or measures.find_measure(plain, output_measures) is not None


def values(
    names: Sequence[str], outputs: ShiftOutputs, output_measures: Mapping[str, OutputMeasure] = MEASURES
) -> dict[str, float]:
    """Values of measures by name; NaN for a set that the data does not have."""
    with torch.no_grad():
        return {name: _value(name, outputs, output_measures) for name in names}


def _value(name: str, data: ShiftOutputs, output_measures: Mapping[str, OutputMeasure]) -> float:
    measure = Measure.parse(name)
    dataset = measure.dataset
    if dataset and dataset not in data.others:
        return float("nan")
    outputs, targets = data.others[dataset] if dataset else (data.outputs, data.targets)
    if measure.kind == "auroc":
        return _detection(data, measure.score, outputs)
    if measure.kind.startswith(AUDIT):
        return float(data.verdict == measure.kind.removeprefix(AUDIT))
    if measure.kind == SECONDS:
        return data.seconds_per_epoch
    if measure.kind in WITHOUT_TARGETS:
        return float(WITHOUT_TARGETS[measure.kind](outputs))
    if targets is None:
        return float("nan")  # members cannot be right about classes that they do not know
    if measure.kind == SOUP:
        return measures.member_accuracy(data.soup[dataset], targets, data.loss, data.pool)
    if measure.kind in WITH_TARGETS:
        return float(WITH_TARGETS[measure.kind](data, outputs, targets))
    function = measures.find_measure(name.removesuffix(f"_{dataset}") if dataset else name, output_measures)
    assert function is not None, name
    return function(outputs, targets, data.loss, data.pool)


def _detection(data: ShiftOutputs, score: str, outside: Tensor) -> float:
    names = [score]
    if score == BEST:
        names = ["predictive_diversity"] if data.objective == LDR else ["model_average", "predictive_diversity"]
    return max(_area(data.outputs, outside, name) for name in names)


def _area(inside: Tensor, outside: Tensor, score: str) -> float:
    if not bool(inside.isfinite().all() & outside.isfinite().all()):
        return float("nan")  # the training has diverged
    return metrics.auroc(*(scores.of_logits(score, outputs) for outputs in (inside, outside))).value


def _high_loss_disagreement(data: ShiftOutputs, outputs: Tensor, targets: Tensor) -> Tensor:
    """Disagreement of pairs on the tenth of examples with the highest loss."""
    del data
    return metrics.pair_disagreement(outputs[:, metrics.high_loss(outputs, targets, share=0.1)]).mean()


def _best_member_accuracy(data: ShiftOutputs, outputs: Tensor, targets: Tensor) -> float:
    del data
    return metrics.oracle(outputs, targets).accuracy


def _worst_group_accuracy(data: ShiftOutputs, outputs: Tensor, targets: Tensor) -> float:
    """Accuracy of the pooled ensemble in its worst group of test examples; NaN where there are no groups."""
    if data.groups is None:
        return float("nan")
    return metrics.worst_group(pooled(outputs, data.pool), targets, data.groups).worst_accuracy.value


def _best_member_worst_group_accuracy(data: ShiftOutputs, outputs: Tensor, targets: Tensor) -> float:
    return max(_worst_group_accuracy(data, member.unsqueeze(0), targets) for member in outputs)


WITHOUT_TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "distinct_predictions": lambda outputs: diversity.distinct_predictions(outputs).double().mean(),
    "predictive_diversity": lambda outputs: scores.predictive_diversity(outputs.softmax(-1)).mean(),
    "disagreeing": lambda outputs: metrics.disagreement_indicator(outputs).double().mean(),
    "pair_disagreement": lambda outputs: metrics.pair_disagreement(outputs).mean(),
}
"""``outputs -> value``; also on sets with unknown classes."""
WITH_TARGETS: dict[str, Callable[[ShiftOutputs, Tensor, Tensor], Tensor | float]] = {
    "high_loss_disagreement": _high_loss_disagreement,
    "best_member_accuracy": _best_member_accuracy,
    "worst_group_accuracy": _worst_group_accuracy,
    "best_member_worst_group_accuracy": _best_member_worst_group_accuracy,
}
"""``(data, outputs, targets) -> value``."""


def audit_outputs(
    outputs: Tensor, targets: Tensor, pool: Pool, train: tuple[Tensor, Tensor], reference: Tensor | None
) -> auditing.Audit:
    """The audit of a classifier, with its outputs on training data and those of a reference."""
    return auditing.audit(
        outputs, targets, task="classification", kind="logits", pool=pool, train=train, reference=reference
    )
