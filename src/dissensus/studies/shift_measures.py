"""What is measured around a data set: ``MEASURE``, ``MEASURE_SET``, and ``auroc_SCORE_SET`` for detection."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

import dissensus.auditing as auditing
from dissensus import diversity, metrics, scores
from dissensus.auditing.judging import VERDICTS
from dissensus.axes import Pool
from dissensus.metrics.generalisation import pooled
from dissensus.studies import measures
from dissensus.studies.shifts import SETS

AUROC = "auroc_"
BEST = "best"
"""Of two scores, that with the larger area: averaged confidence and predictive diversity."""
OURS = "ldr"
TIMES = ("seconds_per_epoch",)
SOUP = "soup_accuracy"
AUDITED = 5000
"""Training examples that an audit looks at."""


@dataclass(frozen=True)
class Seen:
    """Member outputs ``[M, N, C]`` on test data and on every other set, and what is known of it."""

    outputs: Tensor
    targets: Tensor
    others: dict[str, tuple[Tensor, Tensor | None]]
    loss: str
    pool: Pool
    method: str = ""
    groups: Tensor | None = None
    soup: dict[str, Tensor] = field(default_factory=dict)
    """Outputs ``[1, N, C]`` of the averaged weights, by set; test data under ``""``."""
    verdict: str = ""
    seconds_per_epoch: float = float("nan")


def sets_of(names: list[str]) -> list[str]:
    """The sets that some measures speak of."""
    return list(dict.fromkeys(of for _, of in map(taken_apart, names) if of))


def taken_apart(name: str) -> tuple[str, str]:
    """A measure and the set it is taken on, "" for test data.

    >>> taken_apart("auroc_mean_energy_corrupted-5"), taken_apart("accuracy")
    (('auroc_mean_energy', 'corrupted-5'), ('accuracy', ''))
    """
    found = max((of for of in SETS if name.endswith(f"_{of}")), key=len, default="")
    return (name.removesuffix(f"_{found}"), found) if found else (name, "")


def exists(name: str) -> bool:
    """Whether a measure can be taken."""
    what, of = taken_apart(name)
    if what.startswith(AUROC):
        return bool(of) and what.removeprefix(AUROC) in (*scores.SCORES, BEST)
    if what.startswith("audit_"):
        return not of and what.removeprefix("audit_") in VERDICTS
    if of and "worst_group" in what:
        return False  # groups are known of test data alone
    return what in (*_PLAIN, *TIMES, SOUP) or measures.measure_of(what) is not None


def measured(names: list[str], seen: Seen) -> dict[str, float]:
    """Every measure that is asked for."""
    with torch.no_grad():
        return {name: _one(seen, *taken_apart(name)) for name in names}


def _one(seen: Seen, what: str, of: str) -> float:
    if of and of not in seen.others:
        return float("nan")  # a set that this data does not have
    outputs, targets = seen.others[of] if of else (seen.outputs, seen.targets)
    if what.startswith(AUROC):
        return _detection(seen, what.removeprefix(AUROC), outputs)
    if what.startswith("audit_"):
        return float(seen.verdict == what.removeprefix("audit_"))
    if what in TIMES:
        return seen.seconds_per_epoch
    if what == SOUP:
        assert targets is not None
        return measures.member_accuracy(seen.soup[of], targets, seen.loss, seen.pool)
    if what in ("distinct_predictions", "predictive_diversity", "disagreeing", "pair_disagreement"):
        return float(_PLAIN[what](seen, outputs, targets))
    if targets is None:
        return float("nan")  # of other classes, nobody is right
    if what in _PLAIN:
        return float(_PLAIN[what](seen, outputs, targets))
    measure = measures.measure_of(what)
    assert measure is not None, what
    return measure(outputs, targets, seen.loss, seen.pool)


def _detection(seen: Seen, score: str, outside: Tensor) -> float:
    if score != BEST:
        return _area(seen.outputs, outside, score)
    chosen = ["predictive_diversity"] if seen.method == OURS else ["model_average", "predictive_diversity"]
    return max(_area(seen.outputs, outside, name) for name in chosen)


def _area(inside: Tensor, outside: Tensor, score: str) -> float:
    return metrics.auroc(*(scores.of_logits(score, outputs) for outputs in (inside, outside))).value


def _worst_group(seen: Seen, outputs: Tensor) -> float:
    """Of test data, with member outputs ``[M, N, C]`` pooled as the study pools them."""
    if seen.groups is None:
        return float("nan")
    return metrics.worst_group(pooled(outputs, seen.pool), seen.targets, seen.groups).worst_accuracy.value


_PLAIN = {
    "distinct_predictions": lambda seen, out, y: diversity.distinct_predictions(out).double().mean(),  # noqa: ARG005
    "predictive_diversity": lambda seen, out, y: scores.predictive_diversity(out.softmax(-1)).mean(),  # noqa: ARG005
    "disagreeing": lambda seen, out, y: metrics.disagreement_indicator(out).double().mean(),  # noqa: ARG005
    "pair_disagreement": lambda seen, out, y: metrics.pair_disagreement(out).mean(),  # noqa: ARG005
    "high_loss_disagreement": lambda seen, out, y: metrics.pair_disagreement(  # noqa: ARG005
        out[:, metrics.high_loss(out, y, share=0.1)]
    ).mean(),
    "best_member_accuracy": lambda seen, out, y: metrics.oracle(out, y).accuracy,  # noqa: ARG005
    "worst_group_accuracy": lambda seen, out, y: _worst_group(seen, out),  # noqa: ARG005
    "best_member_worst_group_accuracy": lambda seen, out, y: max(_worst_group(seen, own.unsqueeze(0)) for own in out),  # noqa: ARG005
}
"""``(seen, outputs, targets) -> number``."""


def verdict(
    outputs: Tensor, targets: Tensor, pool: Pool, train: tuple[Tensor, Tensor], reference: Tensor | None
) -> auditing.Audit:
    """Is this ensemble's diversity real?"""
    return auditing.audit(
        outputs, targets, task="classification", kind="logits", pool=pool, train=train, reference=reference
    )
