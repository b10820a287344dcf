"""Numbers of every example of a slice: pure functions of the outputs of members and of targets."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import checks, losses
from dissensus.auditing.probabilistic import ProbabilisticLoss
from dissensus.auditing.stationarity import Slopes, class_slopes, value_slopes
from dissensus.auditing.sums import ChoiceSums, Chunk, ClassSums, ErrorSums, SlopeSums, Sums, ValueSums, deviations
from dissensus.axes import Pool
from dissensus.diversity.disagreement import distinct_labels
from dissensus.randomness import random_bits
from dissensus.scores import Score

Kind = Literal["logits", "probabilities", "values"]
DROPS = (0.2, 0.4, 0.6)
"""Shares of members that are left out to measure how much the others depend on them."""
_SMALLEST_PROBABILITY = 2e-38
"""Probability that replaces zero in logarithms, in single and in double precision alike."""
_LARGEST = 1e60
"""Largest predicted value: standard errors of squared errors need fourth powers, and sums of these."""
_DRAWS = 20_000
"""Draws of members left out that codependence takes in all, at least one per example."""
_SUBSETS = 100
"""Codependence visits all subsets of members up to this number, and draws subsets at random beyond it."""


@dataclass(frozen=True)
class SliceContext:
    """What all slices of some outputs have in common."""

    name: str
    """Name of the outputs in messages."""
    kind: Kind
    loss: str
    pool: Pool
    examples: int
    """Number of examples of all slices."""
    frequencies: Float[Tensor, " C"] | None = None
    """Frequencies of classes among the targets."""
    centre: Float[Tensor, " C"] | None = None
    """Mean of the regression targets."""
    scores: Mapping[str, Score] | None = None
    """Scores that are kept for every example; None for none. Of values without scores, the variance is kept."""
    probabilistic: ProbabilisticLoss | None = None
    """Loss of outputs that predict a distribution; None where outputs are values or classes."""


@dataclass(frozen=True)
class ExampleSlice:
    """Outputs ``[n, M, C]`` of some examples and their targets; `start` is the number of the first example."""

    context: SliceContext
    outputs: Float[Tensor, "n M C"]
    targets: Tensor | None
    start: int
    in_bag: Float[Tensor, "n M"] | Float[Tensor, "n 1"] | None = None
    """1 where a member was trained on an example, for training data."""

    @property
    def members(self) -> int:
        """Number of members."""
        return self.outputs.shape[1]

    def chunk(self) -> Chunk:
        """All numbers of the examples. Without targets, those that need none."""
        return self._regression() if self.context.kind == "values" else self._classification()

    def _regression(self) -> Chunk:
        """Squared error of predicted values and its parts; also the loss of predicted distributions."""
        distribution = self.context.probabilistic
        f = self.outputs if distribution is None else distribution.values(self.outputs)
        largest = float(f.abs().max())
        if largest > _LARGEST:
            wanted = f"predict values of at most {_LARGEST:g} in size"
            checks.refuse(self.context.name, wanted, f"{largest:g}", "Has the training diverged?")
        spread = _spread(f)
        scores: dict[str, Tensor] = {}
        if self.context.scores is not None:
            scores = self._scored() if self.context.scores else {"variance": spread}
        if self.targets is None:
            return Chunk(Sums(spread), f - f[:, :1], scores=scores)
        y = losses.as_values(f.transpose(0, 1), self.targets)
        errors = f - y.unsqueeze(1)
        pooled = errors.mean(1).square().sum(-1)
        assert self.context.centre is not None
        centred = y - self.context.centre.to(y)  # squares of targets far from zero would lose their differences
        slopes = None
        if self.in_bag is not None and distribution is None:  # other losses are not at the minimum of squared error
            slopes = self._slope_sums(value_slopes(f, y, self.context.centre.to(f)))
        sums = Sums(
            spread,
            errors=ErrorSums(errors.square().sum(-1), pooled, pooled, _products(errors)),
            values=ValueSums(centred, centred.square().sum(-1)),
            losses=None if distribution is None else distribution.sums(self.outputs, y),
            slopes=slopes,
        )
        return Chunk(sums, f - f[:, :1], scores=scores)

    def _classification(self) -> Chunk:
        """Accuracy, likelihood, Brier score, calibration, agreement, and the decomposition of the loss."""
        context, pool, members = self.context, self.context.pool, self.members
        self._check()
        probs = self.outputs.softmax(-1) if context.kind == "logits" else self.outputs.clamp_min(0)
        named = _first_choice(self.outputs)
        confidence = _at(probs, named)
        choices = probs
        if pool == "vote":
            choices = torch.nn.functional.one_hot(named, probs.shape[-1]).to(probs.dtype)
        mean = choices.sum(1) / members  # exact for votes, so that ties are ties
        pooled_scores = self._pooled_scores() if pool == "score" else None
        averaged = choices if pooled_scores is None else pooled_scores - pooled_scores.mean(-1, keepdim=True)
        spread = _spread(averaged)
        named_alike = ChoiceSums(named.unsqueeze(1) == named.unsqueeze(2), distinct_labels(named.T))
        chunk = Chunk(
            Sums(spread, named_alike),
            averaged,
            probs if pool == "score" else None,
            scores={} if context.scores is None else self._scored(probs),
            hard=_is_hard(probs[:1]) and _is_hard(probs),  # the first example rules most outputs out
        )
        if self.targets is None:
            return chunk
        labels = chunk.labels = self.targets
        member_log = self._log_at_labels(named, confidence)
        if pooled_scores is not None:
            pooled_log = (pooled_scores.sum(1) / members).log_softmax(-1)
            pooled, nll = pooled_log.exp(), -_at(pooled_log, labels)
        elif pool == "vote":
            pooled, nll = mean, -_at(mean, labels).clamp_min(_SMALLEST_PROBABILITY).log()
        else:
            pooled, nll = mean, math.log(members) - member_log.logsumexp(-1)
        slopes = None
        if self.in_bag is not None and pool != "vote":
            logits = self._pooled_scores() if pooled_scores is None else pooled_scores
            slopes = self._slope_sums(class_slopes(logits, probs, member_log, labels, pool))
        pool_confidence, choice = pooled.max(-1)
        right, member_right = choice == labels, named == labels.unsqueeze(1)
        errors = _less_one(choices, labels)  # in place: a constant shift of all members changes no deviation
        products = _products(errors)
        quadratic = _less_one(mean.clone(), labels).square().sum(-1)
        brier = quadratic if pooled_scores is None else _less_one(pooled.clone(), labels).square().sum(-1)
        squares = products.diagonal(dim1=1, dim2=2)
        member_brier = squares if pool != "vote" else _less_one(probs, labels).square().sum(-1)
        ensemble_loss, member_loss = {
            "cross_entropy": (nll, -member_log),
            "brier": (brier, member_brier),
            "zero_one": (~right, ~member_right),
        }[context.loss]
        assert context.frequencies is not None
        frequencies = context.frequencies.to(probs.device)
        rises = None
        if context.loss == "cross_entropy" and pool != "vote":
            rises = self._rises(member_log, pooled_scores, nll)
        chunk.confidence = pool_confidence, confidence
        chunk.sums = Sums(
            spread,
            named_alike,
            ErrorSums(member_loss, ensemble_loss, quadratic, products, rises),
            classes=ClassSums(
                right,
                member_right,
                frequencies[choice],
                frequencies[named],
                nll,
                -member_log,
                brier,
                member_brier,
            ),
            slopes=slopes,
        )
        return chunk

    def _scored(self, probs: Float[Tensor, "n M C"] | None = None) -> dict[str, Float[Tensor, " n"]]:
        """Scores of every example."""
        assert self.context.scores is not None
        distribution = self.context.probabilistic
        outputs, kind = self.outputs.transpose(0, 1), self.context.kind if distribution is None else distribution.takes
        if distribution is not None and kind == "values":
            outputs = distribution.values(self.outputs).transpose(0, 1)
        known = None if probs is None else probs.transpose(0, 1)
        if kind == "probabilities":
            assert known is not None
            outputs = known  # none of them below zero
        return {name: score(outputs, kind, known) for name, score in self.context.scores.items()}

    def _slope_sums(self, slopes: Slopes) -> SlopeSums:
        """Slopes of members on the examples that each was trained on, and of the pool on all examples."""
        assert self.in_bag is not None
        mask = self.in_bag.to(slopes.slope.dtype)
        return SlopeSums(
            slope=slopes.slope * mask,
            curvature=slopes.curvature * mask,
            fitted_loss=slopes.member_loss * mask,
            mean_slope=slopes.slope.mean(-1),
            pool_slope=slopes.pool_slope,
            pool_curvature=slopes.pool_curvature,
            pool_loss=slopes.pool_loss,
            bag_count=mask.expand_as(slopes.slope),
        )

    def _check(self) -> None:
        """Refuse probabilities that are called logits, and the other way round."""
        low = float(self.outputs.min())
        if self.context.kind == "logits":
            if low >= 0:  # probabilities are not negative, so other outputs need no closer look
                fix = "Use kind='probabilities' (--kind probabilities)."
                checks.member_logits(self.outputs.transpose(0, 1), self.context.name, fix)
            return
        sums = self.outputs.sum(-1)
        if low < -1e-6 or float((sums - 1).abs().max()) > 1e-2:
            off = float(sums.flatten()[(sums - 1).abs().argmax()])
            got = f"a minimum of {low:.3g} and a sum of {off:.4g}"
            fix = "Logits? Use kind='logits' (--kind logits)."
            checks.refuse(self.context.name, "be probabilities that sum to one", got, fix)

    def _pooled_scores(self) -> Float[Tensor, "n M C"]:
        """Outputs that pool "score" averages: logits as they are, or the logarithms of probabilities."""
        return self.outputs if self.context.kind == "logits" else self.outputs.clamp_min(_SMALLEST_PROBABILITY).log()

    def _log_at_labels(self, named: Int[Tensor, "n M"], confidence: Float[Tensor, "n M"]) -> Float[Tensor, "n M"]:
        """Log-probabilities of labels: from logits without the logarithm of a probability that has underflowed."""
        assert self.targets is not None
        at_label = _at(self.outputs, self.targets)
        if self.context.kind == "probabilities":
            return at_label.clamp_min(_SMALLEST_PROBABILITY).log()
        return at_label - _at(self.outputs, named) + confidence.log()

    def _rises(
        self,
        log_at_labels: Float[Tensor, "n M"],
        pooled_scores: Float[Tensor, "n M C"] | None,
        whole: Float[Tensor, " n"],
    ) -> Float[Tensor, "n D"]:
        """Rise of the ensemble's loss when members are left out at random, for every share of `DROPS`.

        It is exact where the subsets of members are few. Otherwise it is the mean over subsets that are drawn anew for
        each example.
        """
        n, members = log_at_labels.shape
        most = _SUBSETS if pooled_scores is None or self.context.examples <= _DRAWS else 2 * members
        orders = None
        rises = []
        for drop in DROPS:
            kept = members - int(members * drop)
            if kept == members:
                rises.append(torch.zeros_like(whole))
                continue
            if math.comb(members, kept) <= most:
                subsets = torch.tensor(list(itertools.combinations(range(members), kept)), device=whole.device)
            else:
                orders = self._orders(n, members) if orders is None else orders
                subsets = orders[..., :kept]
            share = log_at_labels.new_zeros(*subsets.shape[:-1], members).scatter_(-1, subsets, 1 / kept)
            rises.append(self._loss_of(share, log_at_labels, pooled_scores) - whole)
        return torch.stack(rises, -1)

    def _loss_of(
        self,
        share: Float[Tensor, "*E S M"],
        log_at_labels: Float[Tensor, "n M"],
        pooled_scores: Float[Tensor, "n M C"] | None,
    ) -> Float[Tensor, " n"]:
        """Mean loss of S ensembles with weights of the members, which are equal for all examples or differ."""
        if pooled_scores is None:
            return -_log_means(log_at_labels, share).mean(-1)
        assert self.targets is not None
        total = torch.zeros_like(log_at_labels[:, 0])
        for weights in share.split(share.shape[-1], -2):  # no more numbers at once than outputs
            mean = weights @ pooled_scores
            total += (mean.logsumexp(-1) - _at(mean, self.targets)).sum(-1)
        return total / share.shape[-2]

    def _orders(self, n: int, members: int) -> Int[Tensor, "n R M"]:
        """Members in random orders, which depend on the number of the example alone."""
        repeats = min(_SUBSETS, max(1, -(-_DRAWS // self.context.examples)))
        examples = torch.arange(self.start, self.start + n, device=self.outputs.device).unsqueeze(1).expand(-1, repeats)
        repeat = torch.arange(repeats, device=self.outputs.device).expand(n, -1)
        return random_bits((members,), examples, repeat).argsort(-1)


def _log_means(logs: Float[Tensor, "n M"], share: Float[Tensor, "*E S M"]) -> Float[Tensor, "n S"]:
    """Logarithms of weighted means, from the logarithms of the numbers."""
    top = logs.amax(-1, keepdim=True)
    relative, share = (logs - top).double(), share.double()
    numbers = relative.exp()
    means = numbers @ share.T if share.ndim == 2 else (share * numbers.unsqueeze(1)).sum(-1)
    logs_of_means = means.log()
    underflowed = (means < 1e-290).any(-1)  # too small for a double beside the largest
    if bool(underflowed.any()):
        weights = share.expand(len(logs), -1, -1)[underflowed]
        logs_of_means[underflowed] = (relative[underflowed].unsqueeze(1) + weights.log()).logsumexp(-1)
    return (logs_of_means + top).to(logs.dtype)


def _at(values: Float[Tensor, "n *M C"], index: Tensor) -> Float[Tensor, "n *M"]:
    """The entry of every row at a class: one class for each row, or one for each example."""
    index = index.view(*index.shape, *[1] * (values.ndim - 1 - index.ndim)).expand(values.shape[:-1])
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _less_one(probs: Float[Tensor, "n *M C"], labels: Int[Tensor, " n"]) -> Float[Tensor, "n *M C"]:
    """Errors of probabilities: one is subtracted at the label, in place."""
    index = labels.view(-1, *[1] * (probs.ndim - 1)).expand(*probs.shape[:-1], 1)
    return probs.scatter_(-1, index, probs.gather(-1, index) - 1)


def _first_choice(outputs: Float[Tensor, "n M C"]) -> Int[Tensor, "n M"]:
    """The class that each member names: the first of several that are equal."""
    if outputs.device.type == "cpu":
        return torch.from_numpy(outputs.numpy().argmax(-1))  # ten times as fast as torch's
    return outputs.argmax(-1)


def _spread(averaged: Float[Tensor, "n M C"]) -> Float[Tensor, " n"]:
    """The mean squared distance of members from their mean."""
    return torch.linalg.vector_norm(deviations(averaged).flatten(1), dim=1).square() / averaged.shape[1]


def _is_hard(probs: Tensor) -> bool:
    return bool(((probs == 0) | (probs == 1)).all())


def _products(errors: Float[Tensor, "n M C"]) -> Float[Tensor, "n M M"]:
    """⟨e_i, e_j⟩ of every example."""
    exact = errors.double() if errors.is_cuda else errors  # a GPU may multiply in less than single precision
    return exact @ exact.transpose(1, 2)
