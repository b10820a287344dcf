"""Scores of how far an example is out of distribution, from the outputs of members: ``[M, B, C] -> [B]``.

Higher means farther out, in every score. Entropies are in nats and not divided by the number of classes, so that mutual
information is ensemble entropy less mean entropy. Outputs in half precision are computed in float32. NaN in an output
gives NaN for that example, in every score.

Every position of dense outputs is an example: ``[M, B, C, *S] -> [B, *S]``. `table` and `of_logits` take
``class_axis=-1`` for classes in the last axis; for a single score, use ``probs.movedim(-1, 2)``. NumPy arrays are taken
as tensors.

`SCORES` lists what is built in for classes, and `REGRESSION_SCORES` for real targets. A new score is one function in
this file (or in `dissensus.regression_scores`) and one line in that table. A score of yours is passed where scores are
taken: ``table(outputs, scores={"mine": function})``, ``dissensus.audit(..., scores=...)``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import arguments, checks, dense
from dissensus.diversity.disagreement import distinct_predictions, jensen_shannon
from dissensus.regression_scores import (
    aleatoric_variance,
    epistemic_variance,
    gaussian_entropy,
    gaussian_information_lower,
    gaussian_information_upper,
    gaussian_pairwise_kl,
    interval_width,
    mean_gaussian_entropy,
    quantile_variance,
    total_variance,
    value_variance,
)

_LEAST = {torch.float32: -103.28, torch.float64: -744.44}
"""Logarithm that a probability of zero is given: that of the smallest positive number of its type."""
_LEAST_LOG = -1e5
"""Number that replaces a log-probability of −∞."""


@arguments.positions("examples")
def predictive_diversity(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """PDS (LDR paper, equation 10): mean over classes of the largest probability that any member gives the class.

    (1/C) Σ_c max_m p_m,c, from 1/C for one member or equal members to min(M, C)/C. For members that are certain it is
    the number of distinct classes that they name, over C. The mean of the members' probabilities is the same for
    members that are all uncertain and for members that are certain of different classes; PDS is not (Figure 2):

    >>> unsure = torch.full((3, 1, 3), 1 / 3)
    >>> sure = torch.eye(3).unsqueeze(1)  # each names another class
    >>> model_average(unsure), model_average(sure)
    (tensor([0.6667]), tensor([0.6667]))
    >>> predictive_diversity(unsure), predictive_diversity(sure)
    (tensor([0.3333]), tensor([1.]))
    """
    return _probs(probs).amax(0).mean(-1)


@arguments.positions("examples")
def model_average(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """BMA (LDR paper, §3.4): one less the largest of the members' mean probabilities, from 0 to 1 − 1/C."""
    return 1 - _probs(probs).mean(0).amax(-1)


@arguments.positions("examples")
def mean_least_confidence(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """One less the mean of the members' largest probabilities (LDR paper, equation 16), from 0 to 1 − 1/C."""
    return 1 - _probs(probs).amax(-1).mean(0)


@arguments.positions("examples")
def mean_energy(logits: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """Mean of the members' energies, −log Σ_c exp f_c (LDR paper, equation 13).

    >>> mean_energy(torch.zeros(2, 1, 4))
    tensor([-1.3863])
    """
    return -_logits(logits).logsumexp(-1).mean(0)


@arguments.positions("examples")
def max_logit(logits: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """Minus the largest of the members' mean logits."""
    return -_logits(logits).mean(0).amax(-1)


@arguments.positions("examples")
def mean_entropy(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """Mean of the members' entropies (LDR paper, equation 14, times C), from 0 to log C."""
    return torch.special.entr(_probs(probs)).sum(-1).mean(0)


@arguments.positions("examples")
def ensemble_entropy(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """Entropy of the members' mean probabilities (LDR paper, equation 15, times C), from 0 to log C."""
    return torch.special.entr(_probs(probs).mean(0)).sum(-1)


@arguments.positions("examples")
def mutual_information(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """Mutual information of class and member: ensemble entropy less mean entropy, from 0 to log min(M, C).

    This is `dissensus.diversity.jensen_shannon`, under the name that it has as a score; 0 for one member.

    >>> mutual_information(torch.eye(2).unsqueeze(1))
    tensor([0.6931])
    """
    return jensen_shannon(probs)


@arguments.arrays
def pairwise_kl(
    probs: Float[Tensor, "M B C *S"] | None = None, *, log_probs: Float[Tensor, "M B C *S"] | None = None
) -> Float[Tensor, "B *S"]:
    """Mean of KL(p_i ‖ p_j) over all ordered pairs of members; 0 for one member.

    The sum over pairs is M Σ_i Σ_c p_i (log p_i − mean_j log p_j), which needs no loop over pairs.

    Args:
        probs: Probabilities. A probability that has underflowed to zero counts as the smallest positive number of its
            type, whose logarithm is −103 in float32 and −744 in float64.
        log_probs: Logarithms of probabilities instead, which do not underflow; −∞ counts as −10⁵.

    >>> pairwise_kl(torch.tensor([[[0.5, 0.5]], [[0.25, 0.75]]]))
    tensor([0.1373])
    >>> pairwise_kl(log_probs=torch.tensor([[[0.0, 200.0]], [[200.0, 0.0]]]).log_softmax(-1))
    tensor([200.])
    """
    if (probs is None) == (log_probs is None):
        got = "neither" if probs is None else "both"
        checks.refuse("probs", "be given, or `log_probs` instead", got)
    outputs = probs if log_probs is None else log_probs
    assert outputs is not None
    if outputs.ndim > 3:
        flat = dense.flat(outputs)
        return dense.unflat(pairwise_kl(flat) if log_probs is None else pairwise_kl(log_probs=flat), outputs)
    if log_probs is not None:
        logs = _log_probs(log_probs).clamp_min(_LEAST_LOG)
        probs = logs.exp()
    else:
        assert probs is not None
        probs = _probs(probs)
        underflowed = probs == 0
        logs = torch.where(underflowed, _LEAST[probs.dtype], torch.where(underflowed, 1.0, probs).log())
    members = len(logs)
    relative = logs - logs[:1]  # exactly zero for identical members
    total = (probs * (relative - relative.mean(0))).sum((0, -1))
    return (total / max(1, members - 1)).clamp_min(0)


@arguments.positions("examples")
def pairwise_jsd(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """Mean of the Jensen-Shannon divergence over all pairs of members, from 0 to log 2; 0 for one member.

    >>> pairwise_jsd(torch.eye(2).unsqueeze(1))
    tensor([0.6931])
    """
    probs = _probs(probs)
    members = len(probs)
    entropy = torch.special.entr(probs).sum(-1)
    total = 0 * entropy.sum(0)  # NaN where an output is, for one member too
    for shift in range(1, members):  # every ordered pair once, M at a time
        between = torch.special.entr((probs + probs.roll(shift, 0)) / 2).sum(-1)
        total = total + (between - (entropy + entropy.roll(shift, 0)) / 2).sum(0)
    return (total / max(1, members * (members - 1))).clamp_min(0)  # below zero by rounding only


@arguments.positions("examples")
def probability_variance(probs: Float[Tensor, "M B C"]) -> Float[Tensor, " B"]:
    """Variance of the members' probabilities (with divisor M), averaged over classes; 0 for one member."""
    return _probs(probs).var(0, correction=0).mean(-1)


Takes = Literal["probabilities", "logits", "values", "gaussian", "quantiles"]


@dataclass(frozen=True)
class Score:
    """A score: a function ``[M, B, C] -> [B]`` that is higher for examples farther out, and what to know about it.

    Args:
        function: Computes the score.
        takes: Outputs that the function takes: ``"probabilities"``, ``"logits"`` or, for regression, ``"values"``,
            ``"gaussian"`` or ``"quantiles"`` (see `dissensus.losses`).
        title: The score in words; the key of its table where this is left out.
        disagreement: Whether the score measures disagreement alone. It needs two members then: for one member, and for
            equal members, it is the lower end of its range.
        bounds: The range of the score for M members and C classes or outputs.
        from_logits: The same score from logits, where this keeps what a softmax would lose.
    """

    function: Callable[[Tensor], Tensor]
    takes: Takes = "probabilities"
    title: str = ""
    disagreement: bool = False
    bounds: Callable[[int, int], tuple[float, float]] = lambda *_: (-math.inf, math.inf)
    from_logits: Callable[[Tensor], Tensor] | None = None

    def __call__(self, outputs: Tensor, kind: Takes, probs: Tensor | None = None) -> Tensor:
        """The score of outputs of some kind; `probs` are their probabilities, where they are known already."""
        if kind == "logits" and self.from_logits is not None:
            values = self.from_logits(outputs)
        elif kind == "logits" and self.takes == "probabilities":
            values = self.function(outputs.softmax(-1) if probs is None else probs)
        else:
            values = self.function(outputs)
        if not isinstance(values, Tensor) or tuple(values.shape) != (outputs.shape[1],):
            got = checks.shape_text(values.shape) if isinstance(values, Tensor) else type(values).__name__
            name = getattr(self.function, "__name__", "score")
            checks.refuse(name, f"return one number per example, [B={outputs.shape[1]}]", got)
        return values


def _between(low: float, high: float) -> Callable[[int, int], tuple[float, float]]:
    return lambda *_: (low, high)


SCORES: Mapping[str, Score] = {
    "predictive_diversity": Score(predictive_diversity, disagreement=True, bounds=lambda m, c: (1 / c, min(m, c) / c)),
    "model_average": Score(
        model_average,
        title="least confidence of the mean",
        bounds=lambda _, c: (0.0, 1 - 1 / c),
    ),
    "mean_least_confidence": Score(mean_least_confidence, bounds=lambda _, c: (0.0, 1 - 1 / c)),
    "mean_entropy": Score(mean_entropy, bounds=lambda _, c: (0.0, math.log(c))),
    "ensemble_entropy": Score(
        ensemble_entropy,
        title="entropy of the mean",
        bounds=lambda _, c: (0.0, math.log(c)),
    ),
    "mutual_information": Score(mutual_information, disagreement=True, bounds=lambda m, c: (0.0, math.log(min(m, c)))),
    "pairwise_kl": Score(
        pairwise_kl,
        disagreement=True,
        bounds=_between(0.0, math.inf),
        from_logits=lambda logits: pairwise_kl(log_probs=_logits(logits).log_softmax(-1)),
    ),
    "pairwise_jsd": Score(pairwise_jsd, disagreement=True, bounds=_between(0.0, math.log(2))),
    "probability_variance": Score(
        probability_variance, disagreement=True, bounds=lambda m, c: (0.0, (1 - 1 / min(m, c)) / c)
    ),
    "distinct_predictions": Score(distinct_predictions, disagreement=True, bounds=lambda m, c: (1.0, float(min(m, c)))),
    "mean_energy": Score(mean_energy, "logits"),
    "max_logit": Score(max_logit, "logits"),
}
"""Every score of classes that is built in, by name."""

_POSITIVE = _between(0.0, math.inf)
REGRESSION_SCORES: Mapping[str, Score] = {
    "value_variance": Score(value_variance, "values", disagreement=True, bounds=_POSITIVE),
    "epistemic_variance": Score(epistemic_variance, "gaussian", disagreement=True, bounds=_POSITIVE),
    "aleatoric_variance": Score(aleatoric_variance, "gaussian", bounds=_POSITIVE),
    "total_variance": Score(total_variance, "gaussian", bounds=_POSITIVE),
    "gaussian_entropy": Score(gaussian_entropy, "gaussian", title="entropy of a Gaussian like the mixture"),
    "mean_gaussian_entropy": Score(mean_gaussian_entropy, "gaussian"),
    "gaussian_information_lower": Score(
        gaussian_information_lower,
        "gaussian",
        title="mutual information, lower bound",
        disagreement=True,
        bounds=lambda m, _: (0.0, math.log(m)),
    ),
    "gaussian_information_upper": Score(
        gaussian_information_upper,
        "gaussian",
        title="mutual information, upper bound",
        disagreement=True,
        bounds=lambda m, _: (0.0, math.log(m)),
    ),
    "gaussian_pairwise_kl": Score(gaussian_pairwise_kl, "gaussian", disagreement=True, bounds=_POSITIVE),
    "interval_width": Score(interval_width, "quantiles", bounds=_POSITIVE),
    "quantile_variance": Score(quantile_variance, "quantiles", disagreement=True, bounds=_POSITIVE),
}
"""Every score of real targets that is built in, by name. Those of quantiles have the levels of `losses.quantile`."""


KINDS: tuple[Takes, ...] = ("logits", "probabilities", "values", "gaussian", "quantiles")
"""Kinds of outputs that scores take."""


def select(scores: Mapping[str, Score | Callable[..., Any]], kind: Takes) -> dict[str, Score]:
    """Those of some scores that can be computed from outputs of a kind.

    Args:
        scores: Scores by name. A plain function is taken as a score of probabilities, or of these outputs for
            regression.
        kind: Kind of the outputs. Scores of logits cannot be computed from probabilities.

    >>> list(select({"energy": SCORES["mean_energy"], "spread": lambda probs: probs.std(0).mean(-1)}, "probabilities"))
    ['spread']
    """
    if not isinstance(scores, Mapping) or not scores:
        checks.refuse("scores", "be a dictionary of scores by name", repr(scores), error=TypeError)
    default: Takes = "probabilities" if kind == "logits" else kind
    selected: dict[str, Score] = {}
    for name, score in scores.items():
        if not isinstance(name, str) or not callable(score):
            got = f"{name!r}: {type(score).__name__}"
            checks.refuse("scores", "hold functions [M, B, C] -> [B] by name", got, error=TypeError)
        entry = score if isinstance(score, Score) else Score(score, default)
        if entry.takes == kind or (entry.takes == "probabilities" and kind == "logits"):
            selected[name] = entry
    if not selected:
        checks.refuse("scores", f"hold a score of {kind}", ", ".join(map(repr, scores)))
    return selected


@arguments.arrays
def of_logits(name: str, logits: Float[Tensor, "M B C *S"], *, class_axis: int = 2) -> Tensor:
    """The score of that name from logits, without the loss of precision of a softmax in between.

    >>> of_logits("pairwise_kl", torch.tensor([[[0.0, 200.0]], [[200.0, 0.0]]]))
    tensor([200.])
    """
    checks.one_of("name", name, SCORES)
    return dense.unflat(SCORES[name](_logits(dense.flat(logits, class_axis)), "logits"), logits, class_axis)


@arguments.arrays
def table(
    outputs: Float[Tensor, "M B C *S"],
    *,
    kind: Takes = "logits",
    at_once: int = 2**22,
    scores: Mapping[str, Score | Callable[..., Any]] | None = None,
    class_axis: int = 2,
) -> dict[str, Tensor]:
    """Every score of every example, in one pass over the outputs, slice by slice.

    Args:
        outputs: Of the members. Scores that need logits are left out for probabilities.
        kind: Kind of the outputs: ``"logits"`` or ``"probabilities"`` of classes; ``"values"``, ``"gaussian"`` or
            ``"quantiles"`` of real targets, as losses take them (`dissensus.losses`).
        at_once: Numbers per slice, which bounds the memory.
        scores: Scores by name: `Score`, or functions ``[M, B, C] -> [B]`` of probabilities, or of the outputs for
            regression. The default is all that are built in, of `SCORES` or `REGRESSION_SCORES`;
            ``{**SCORES, "mine": function}`` adds one.
        class_axis: Axis of the classes: 2, or -1 for language models. Scores of dense outputs are ``[B, *S]``.

    >>> logits = torch.randn(3, 5, 4)
    >>> len(table(logits)), table(logits)["mutual_information"].shape
    (12, torch.Size([5]))
    >>> list(table(logits, scores={"range": lambda probs: (probs.amax(0) - probs.amin(0)).amax(-1)}))
    ['range']
    >>> list(table(torch.randn(3, 5, 1), kind="values"))
    ['value_variance']
    """
    checks.one_of("kind", kind, KINDS)
    if scores is None:
        scores = SCORES if kind in ("logits", "probabilities") else REGRESSION_SCORES
    given, outputs = outputs, dense.flat(outputs, class_axis) if outputs.ndim > 3 else outputs
    members, batch, classes = checks.member_outputs(outputs)
    if kind == "logits":
        checks.member_logits(outputs, "outputs")
    selected = select(scores, kind)
    size = max(1, at_once // (members * classes))
    columns: dict[str, list[Tensor]] = {name: [] for name in selected}
    for start in range(0, batch, size):
        part = checks.full_precision(outputs[:, start : start + size])
        probs = part.softmax(-1) if kind == "logits" else part
        for name, score in selected.items():
            columns[name].append(score(part, kind, probs))
    return {name: dense.unflat(torch.cat(parts), given, class_axis) for name, parts in columns.items()}


def _probs(probs: Tensor) -> Tensor:
    checks.member_probs(probs)
    return checks.full_precision(probs)


def _logits(logits: Tensor) -> Tensor:
    checks.member_outputs(logits, "logits")
    return checks.full_precision(logits)


def _log_probs(log_probs: Tensor) -> Tensor:
    checks.member_outputs(log_probs, "log_probs")
    log_probs = checks.full_precision(log_probs)
    if checks.is_concrete(log_probs) and bool((log_probs[:, 0].logsumexp(-1).abs() > 1e-2).any()):
        checks.refuse("log_probs", "be logarithms of probabilities", "others", "Logits? Use logits.log_softmax(-1).")
    return log_probs
