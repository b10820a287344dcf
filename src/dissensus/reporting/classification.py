"""Measures of a classifier: accuracy, calibration, what its uncertainty is worth, and its hardest examples."""

from collections import Counter
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dissensus import metrics
from dissensus.metrics.intervals import Interval
from dissensus.predictive import predictive
from dissensus.reporting.curves import best_risks, calibration_bins, error_curve, error_rates, risk_at
from dissensus.reporting.measures import ROUNDING, Example, Measured, ShiftedResult, audited, detected, score_table
from dissensus.reporting.reading import OnProgress, OutputSet, ReportData, Settings
from dissensus.scores import SCORES, Score

ENTROPY, DISAGREEMENT, CONFIDENCE = "entropy of the mean", "mutual information", "1 − confidence"
DETECTORS: dict[str, Score] = {
    ENTROPY: SCORES["ensemble_entropy"],
    DISAGREEMENT: SCORES["mutual_information"],
    "distinct predictions": SCORES["distinct_predictions"],
    "least confidence of the mean": SCORES["model_average"],
    "pairwise divergence": SCORES["pairwise_kl"],
    "mean energy": SCORES["mean_energy"],
}
"""Scores of uncertainty, by the names that a report shows. The first was chosen before any data was seen."""
COVERAGES = (0.5, 0.8, 0.9)


def pooled_log_probs(outputs: Float[Tensor, "M N C"], settings: Settings) -> Float[Tensor, "N C"]:
    """Log-probabilities of the ensemble in double precision; those of shares of votes for pool ``"vote"``."""
    arguments: Any = {"loss": settings.loss, "pool": settings.pool, "kind": settings.kind}
    probs = predictive(outputs, task="classification", **arguments).probs
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def measured(data: ReportData, count: int, progress: OnProgress) -> Measured:
    """Everything that a report says about a classifier; `count` is the number of examples of each kind to show."""
    settings = data.settings
    log_probs = pooled_log_probs(data.outputs, settings)
    predicted, labels = log_probs.argmax(-1), data.targets
    wrong = predicted != labels
    progress("the audit", 0.0)
    training = None
    if data.training is not None and data.training.targets is not None:
        training = data.training.outputs, data.training.targets
    result = audited(data, data.outputs, data.reference, training)
    progress("scores", 0.4)
    values = score_table(data.outputs, DETECTORS, settings)
    doubt = 1 - log_probs.amax(-1).exp()
    single = len(data.outputs) == 1
    kept = {CONFIDENCE: doubt, ENTROPY: values[ENTROPY]} | ({} if single else {DISAGREEMENT: values[DISAGREEMENT]})
    numbers, members = _numbers(log_probs, wrong, labels, kept, result)
    progress("curves", 0.6)
    risk = {name: error_curve(scores, wrong) for name, scores in kept.items()}
    numbers |= {f"risk_at_{share:.0%}": risk_at(risk[CONFIDENCE], share) for share in COVERAGES}
    progress("shifted data", 0.8)
    hardest, disputed = _chosen(log_probs, labels, values, count, single)
    return Measured(
        numbers,
        members,
        result,
        risk,
        best_risks(wrong.double()),
        {name: error_rates(scores, wrong) for name, scores in kept.items() if name != CONFIDENCE},
        values,
        hardest,
        disputed,
        {row: _example(row, data, log_probs, values) for row in {*hardest, *disputed}},
        {name: _shifted(part, values, settings) for name, part in data.shifted.items()},
        calibration_bins(log_probs, labels),
        {"classes": _by_class(predicted, labels, data.classes), "confusions": _confusions(predicted, labels, data)},
    )


def _numbers(
    log_probs: Float[Tensor, "N C"],
    wrong: Bool[Tensor, " N"],
    labels: Int[Tensor, " N"],
    scores: dict[str, Tensor],
    audit: Any,
) -> tuple[dict[str, Interval], dict[str, Interval]]:
    right = ~wrong
    majority = int(labels.bincount().argmax())
    numbers = {
        "accuracy": metrics.wilson(int(right.sum()), len(right)),
        **{name: Interval(*audit.test[name]) for name in ("nll", "brier", "ece")},
        "confidence": metrics.mean_interval(log_probs.amax(-1).exp()),
        "overconfidence": metrics.mean_interval(log_probs.amax(-1).exp() - right.double()),
        "above_majority": metrics.mean_interval(right.double() - (labels == majority).double()),
    }
    if bool(wrong.any()) and bool(right.any()):
        numbers |= {f"error_auroc: {name}": metrics.auroc(s[right], s[wrong]) for name, s in scores.items()}
    names = {"accuracy": "member_accuracy", "nll": "member_nll", "brier": "member_brier", "ece": "member_ece"}
    return numbers, {name: Interval(*audit.test[of_members]) for name, of_members in names.items()}


def _chosen(
    log_probs: Float[Tensor, "N C"], labels: Int[Tensor, " N"], scores: dict[str, Tensor], count: int, single: bool
) -> tuple[list[int], list[int]]:
    """Rows with the least probability of the right class, and rows with the most disagreement."""
    at_label = log_probs.gather(1, labels.unsqueeze(1))[:, 0]
    hardest = at_label.argsort(stable=True)[:count].tolist()
    if single:
        return hardest, []
    order = scores[DISAGREEMENT].argsort(descending=True, stable=True)[:count]
    return hardest, [row for row in order.tolist() if float(scores[DISAGREEMENT][row]) > ROUNDING]


def _example(row: int, data: ReportData, log_probs: Float[Tensor, "N C"], scores: dict[str, Tensor]) -> Example:
    probs, label = log_probs[row].exp(), int(data.targets[row])
    named = int(probs.argmax())
    ballots = Counter(data.outputs[:, row].argmax(-1).tolist())
    votes = ", ".join(f"{count} × {data.classes[column]}" for column, count in ballots.most_common())
    numbers = {
        "confidence": float(probs[named]),
        "probability of the right class": float(probs[label]),
        "disagreement": float(scores[DISAGREEMENT][row]),
    }
    return Example(row, data.classes[label], data.classes[named], numbers, votes)


def _shifted(part: OutputSet, inside: dict[str, Tensor], settings: Settings) -> ShiftedResult:
    values = score_table(part.outputs, DETECTORS, settings)
    areas, passing = detected(inside, values)
    log_probs = pooled_log_probs(part.outputs, settings)
    numbers = {"confidence": metrics.mean_interval(log_probs.amax(-1).exp())}
    if part.targets is not None:
        right = log_probs.argmax(-1) == part.targets
        numbers["accuracy"] = metrics.wilson(int(right.sum()), len(right))
        numbers["overconfidence"] = metrics.mean_interval(log_probs.amax(-1).exp() - right.double())
    return ShiftedResult(part.outputs.shape[1], numbers, areas, passing, values)


def _by_class(
    predicted: Int[Tensor, " N"], labels: Int[Tensor, " N"], classes: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Recall and precision of every class that occurs, worst recall first."""
    rows = []
    for column, name in enumerate(classes):
        of_class, named = labels == column, predicted == column
        if not bool(of_class.any()) and not bool(named.any()):
            continue
        hits = int((of_class & named).sum())
        rows.append(
            {
                "class": name,
                "examples": int(of_class.sum()),
                "recall": metrics.wilson(hits, int(of_class.sum())),
                "precision": metrics.wilson(hits, int(named.sum())),
            }
        )
    return sorted(rows, key=lambda row: (row["examples"] == 0, row["recall"].value))


def _confusions(predicted: Int[Tensor, " N"], labels: Int[Tensor, " N"], data: ReportData) -> list[dict[str, Any]]:
    """Pairs of classes that are confused, the most frequent first."""
    wrong = predicted != labels
    pairs = Counter(zip(labels[wrong].tolist(), predicted[wrong].tolist(), strict=True))
    sizes = labels.bincount(minlength=len(data.classes)).tolist()
    return [
        {
            "class": data.classes[label],
            "taken for": data.classes[named],
            "examples": count,
            "share": metrics.wilson(count, sizes[label]),
        }
        for (label, named), count in pairs.most_common()
    ]
