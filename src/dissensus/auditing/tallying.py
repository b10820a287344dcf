"""One pass over member outputs: every figure of an audit is a function of sums, kept for each of some blocks.

Units (examples, or groups of them that belong together) are dealt to blocks at random. Sums over all blocks give a
figure, and drawing blocks with replacement gives its bootstrap interval, so that nothing has to be read twice and
memory does not grow with the number of examples. With fewer units than blocks this is the ordinary bootstrap.
"""

import itertools
import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dissensus import checks, losses, scores
import dissensus.auditing.stationarity as stationarity
from dissensus.auditing.streaming import Members
from dissensus.axes import Pool
from dissensus.diversity import distinct_predictions
from dissensus.metrics.calibration import BINS, bin_of
from dissensus.randomness import random_bits

Kind = Literal["logits", "probabilities", "values"]
BLOCKS = 256
DROPS = (0.2, 0.4, 0.6)
"""Shares of members that are left out to see how much the others depend on them."""
SCORES = {
    "distinct predictions": distinct_predictions,
    "mutual information": scores.mutual_information,
    "predictive diversity": scores.predictive_diversity,
    "least confidence of the mean": scores.model_average,
    "entropy of the mean": scores.ensemble_entropy,
}
"""What disagreement is worth for detection, by what it is called in an audit."""
_LEAST = 2e-38
"""What a probability of zero is read as, in single and in double precision alike."""
_MOST_HELD = 2**24
"""Numbers of the largest sum, over all blocks."""
_DRAWS = 20_000
"""Draws of members left out that codependence takes in all, at least one per example."""
COARSE = ("deviation", "offset", "pool_error", "coarse_count")
"""Sums over every output, which are kept for fewer blocks where there are many outputs."""
OF_TRAINING = ("slope", "curvature", "fitted_loss", "mean_slope", "pool_slope", "bag_count")
"""Sums that training outputs have in addition (see `dissensus.auditing.stationarity`)."""
_SUBSETS = 100
"""Codependence visits all subsets of members where there are no more than these, and draws some of them otherwise."""


@dataclass
class Tally:
    """Sums per block, ``[K, ...]``, of everything that was seen."""

    members: int
    examples: int
    width: int
    kind: Kind
    loss: str
    pool: Pool
    sums: dict[str, Tensor]
    """``count`` is the number of examples of each block; ``deviation`` and ``offset`` have blocks of their own, with
    ``coarse_count`` examples. ``deviation`` is what members differ from their mean by, in what the pool averages;
    ``offset`` the same in probabilities, votes or values. They are one tensor but for pool "score" of a classifier."""
    units: int = 0
    """What the bootstrap draws: groups of examples, images of dense outputs, or examples."""
    hard: bool = False
    """Whether every probability was 0 or 1, as votes are."""
    scores: dict[str, Tensor] = field(default_factory=dict)
    """Per example: how much members disagree, by several scores; higher is more."""
    frequencies: Tensor | None = None
    """Of classes among the targets, ``[C]``."""
    centre: Tensor | None = None
    """Mean of real targets, ``[C]``."""


def tallied(
    members: Members,
    targets: Tensor | None,
    *,
    kind: Kind,
    loss: str,
    pool: Pool,
    keep_scores: bool = False,
    groups: Tensor | None = None,
    in_bag: Tensor | None = None,
) -> Tally:
    """Read all outputs once. Without targets only what needs none is counted.

    Args:
        members: Their outputs.
        targets: One for each example, or for each pixel of dense outputs.
        kind: What outputs are.
        loss: The loss that is decomposed.
        pool: How the ensemble predicts.
        keep_scores: Whether to keep scores of every example, which detection needs.
        groups: Whole numbers, one for each example (each image of dense outputs): examples with equal numbers are
            resampled together. Pixels of an image always are.
        in_bag: For training data: which examples (images) each member was trained on, ``[M, N]`` or ``[1, N]``. How
            losses change with the scale of outputs is counted then (see `dissensus.auditing.stationarity`).
    """
    units, dealt = _dealt(members.images, groups)
    blocks = max(2, min(units, BLOCKS))
    coarse = max(2, min(blocks, _MOST_HELD // (members.members * members.width)))  # for sums over every output
    tally = Tally(members.members, members.examples, members.width, kind, loss, pool, {}, units, kind != "values")
    if kind == "values" and targets is not None:
        tally.centre = targets.double().reshape(len(targets), -1).mean(0)
    if kind != "values" and targets is not None:
        tally.frequencies = torch.bincount(targets, minlength=members.width).double() / len(targets)
    kept: dict[str, list[Tensor]] = {}
    for rows, outputs in members.slices():
        wanted = None if targets is None else targets[rows]
        mask = None if in_bag is None else in_bag[:, torch.arange(rows.start, rows.stop) // members.pixels]
        seen = _Slice(tally, members.name, outputs, wanted, rows.start, keep_scores, mask)
        found = seen.regression() if kind == "values" else seen.classification()
        found["count"] = found["coarse_count"] = torch.ones(outputs.shape[1], dtype=torch.float64)
        block = dealt[torch.arange(rows.start, rows.stop) // members.pixels]
        for name, per_example in found.items():
            count = coarse if name in COARSE else blocks
            if name not in tally.sums:
                tally.sums[name] = torch.zeros(count, *per_example.shape[1:], dtype=torch.float64)
            held = tally.sums[name]
            place = block % count
            if per_example.ndim < 3 or per_example.dtype == torch.float64 or len(place) <= count:
                held.index_add_(0, place, per_example.double())
            else:  # more numbers to convert than to hold: a slice is added up as it is
                held += torch.zeros_like(held, dtype=per_example.dtype).index_add_(0, place, per_example)
        for name, values in seen.scores.items():
            kept.setdefault(name, []).append(values.float())
    tally.sums.setdefault("offset", tally.sums["deviation"])
    tally.scores = {name: torch.cat(parts) for name, parts in kept.items()}
    return tally


def _dealt(examples: int, groups: Tensor | None) -> tuple[int, Int[Tensor, " N"]]:
    """The number of units, and the block of every example: units in random order, to blocks of as many units each."""
    unit = torch.arange(examples) if groups is None else groups.unique(return_inverse=True)[1]
    units = int(unit.max()) + 1
    order = random_bits((units,), torch.tensor(units), torch.tensor(0)).argsort()
    block = torch.empty_like(order)
    block[order] = torch.arange(units) % max(2, min(units, BLOCKS))
    return units, block[unit]


class _Slice:
    """What is counted of some examples; every entry has the examples first."""

    def __init__(
        self, tally: Tally, name: str, outputs: Float[Tensor, "M n C"], targets: Tensor | None, start: int,
        keep_scores: bool, in_bag: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.tally, self.name, self.outputs, self.targets, self.start = tally, name, outputs, targets, start
        self.keep_scores, self.in_bag = keep_scores, in_bag
        self.scores: dict[str, Tensor] = {}

    def regression(self) -> dict[str, Tensor]:
        """Squared error and its parts."""
        f = self.outputs
        found = self._spread(f)
        if self.keep_scores:
            self.scores = {"variance": found["spread"]}
        if self.targets is None:
            return found
        y = losses.as_values(f, self.targets)
        errors = f - y
        own = errors.square().sum(-1)
        pooled = errors.mean(0).square().sum(-1)
        if self.in_bag is not None:
            assert self.tally.centre is not None
            found |= self._own(stationarity.of_values(f, y, self.tally.centre.to(f.dtype)))
        return found | {
            "y": y, "y_squared": y.square().sum(-1), "quadratic": pooled,
            "ensemble_loss": pooled, "member_loss": own.T, "products": _products(errors),
        }  # fmt: skip

    def classification(self) -> dict[str, Tensor]:
        """Accuracy, likelihood, Brier score, calibration, agreement, and the decomposition of the loss asked for."""
        tally, (members, _, classes) = self.tally, self.outputs.shape
        log_probs = self._log_probs()
        probs = log_probs.exp()
        named = log_probs.argmax(-1)
        votes = torch.nn.functional.one_hot(named, classes).to(probs.dtype) if tally.pool == "vote" else probs
        if tally.pool == "score":
            pooled_log = log_probs.mean(0).log_softmax(-1)
        elif tally.pool == "vote":
            pooled_log = votes.mean(0).clamp_min(_LEAST).log()
        else:
            pooled_log = log_probs.logsumexp(0) - math.log(members)
        pooled = pooled_log.exp()
        averaged = {"probability": probs, "score": self._scores_of(log_probs), "vote": votes}[tally.pool]
        both = named.T.unsqueeze(1) == named.T.unsqueeze(2)
        found = self._spread(averaged) | {"agreements": both.to(probs.dtype)}
        found["distinct"] = distinct_predictions(log_probs)
        if tally.pool == "score":
            found["offset"] = _deviation(probs).transpose(0, 1)
        tally.hard = tally.hard and _is_hard(probs if tally.kind == "logits" else self.outputs)
        if self.keep_scores:
            self.scores = {words: score(probs) for words, score in SCORES.items()}
        if self.targets is None:
            return found
        labels = self.targets
        wanted = torch.zeros(len(labels), classes, dtype=probs.dtype).scatter_(1, labels.unsqueeze(1), 1.0)
        errors = (votes if tally.pool == "vote" else probs) - wanted
        member_nll = -losses.at_label(log_probs, labels)
        nll = -losses.at_label(pooled_log, labels)
        choice = votes.mean(0).argmax(-1) if tally.pool == "vote" else pooled_log.argmax(-1)
        right, member_right = choice == labels, named == labels
        brier, member_brier = (pooled - wanted).square().sum(-1), (probs - wanted).square().sum(-1)
        quadratic = errors.mean(0).square().sum(-1)
        by_loss = {
            "cross_entropy": (nll, member_nll), "brier": (brier, member_brier),
            "zero_one": (1.0 - right.to(probs.dtype), 1.0 - member_right.to(probs.dtype)),
        }  # fmt: skip
        ensemble_loss, member_loss = by_loss[tally.loss]
        assert tally.frequencies is not None
        found |= {"guessed": tally.frequencies[choice], "member_guessed": tally.frequencies[named].T}
        found |= {
            "right": right, "member_right": member_right.T, "nll": nll, "member_nll": member_nll.T, "brier": brier,
            "member_brier": member_brier.T, "quadratic": quadratic, "pool_error": errors.mean(0),
            "ensemble_loss": ensemble_loss, "member_loss": member_loss.T, "products": _products(errors),
            "bins": _binned(pooled.amax(-1), right), "classes": wanted,
            "member_bins": _binned(probs.amax(-1).T, member_right.T),
        }  # fmt: skip
        if tally.loss == "cross_entropy" and tally.pool in ("probability", "score"):
            found["rises"] = self._rises(log_probs, labels, nll)
        if self.in_bag is not None and tally.pool != "vote":
            found |= self._own(stationarity.of_classes(log_probs, labels, tally.pool))
        return found

    def _own(self, slopes: dict[str, Tensor]) -> dict[str, Tensor]:
        """Slopes of members on the examples that each was trained on, and of all members on all examples."""
        assert self.in_bag is not None
        mask = self.in_bag.T.to(slopes["slope"].dtype)  # [n, M] or [n, 1]
        masked = {name: slopes[name] * mask for name in ("slope", "curvature", "fitted_loss")}
        everywhere = {"mean_slope": slopes["slope"].mean(-1), "pool_slope": slopes["pool_slope"]}
        return masked | everywhere | {"bag_count": mask.expand_as(slopes["slope"])}

    def _log_probs(self) -> Tensor:
        if self.tally.kind == "logits":
            checks.member_logits(self.outputs, self.name, "Say kind='probabilities' (--kind probabilities).")
            return self.outputs.log_softmax(-1)
        low, sums = float(self.outputs.min()), self.outputs.sum(-1)
        if low < -1e-6 or float((sums - 1).abs().max()) > 1e-2:
            off = float(sums.flatten()[(sums - 1).abs().argmax()])
            got = f"{low:.3g} as the least, and a sum of {off:.4g}"
            fix = "Logits? Say kind='logits' (--kind logits)."
            checks.refuse(self.name, "be probabilities that sum to one", got, fix)
        return self.outputs.clamp_min(_LEAST).log()

    def _scores_of(self, log_probs: Tensor) -> Tensor:
        """What is averaged under ``"score"``: logits as they are given, less each example's mean over classes."""
        given = self.outputs if self.tally.kind == "logits" else log_probs
        return given - given.mean(-1, keepdim=True)

    def _spread(self, averaged: Tensor) -> dict[str, Tensor]:
        deviation = _deviation(averaged)
        return {"spread": deviation.square().sum(-1).mean(0), "deviation": deviation.transpose(0, 1)}

    def _rises(self, log_probs: Tensor, labels: Tensor, whole: Tensor) -> Tensor:
        """How the ensemble's loss rises when members are left out at random, for every share of `DROPS`: exact where
        few subsets of members are possible, otherwise the mean over subsets that are drawn anew for each example."""
        members, n, _ = log_probs.shape
        at_label = losses.at_label(log_probs, labels).T  # [n, M]
        most = _SUBSETS if self.tally.pool == "probability" or self.tally.examples <= _DRAWS else 2 * members
        orders: list[Tensor] = []
        rises = []
        for drop in DROPS:
            kept = members - int(members * drop)
            if kept == members:
                rises.append(torch.zeros_like(whole))
                continue
            if math.comb(members, kept) <= most:
                subsets = torch.tensor(list(itertools.combinations(range(members), kept)))
                chosen = [subset.expand(n, -1) for subset in subsets]
            else:
                orders = orders or self._orders(members, n)
                chosen = [order[:, :kept] for order in orders]
            total = torch.zeros_like(whole)
            for some in chosen:
                if self.tally.pool == "probability":
                    total += math.log(kept) - at_label.gather(1, some).logsumexp(-1)
                else:
                    mean = log_probs.gather(0, some.T.unsqueeze(-1).expand(-1, -1, log_probs.shape[-1])).mean(0)
                    total -= losses.at_label(mean.log_softmax(-1), labels)
            rises.append(total / len(chosen) - whole)
        return torch.stack(rises, -1)

    def _orders(self, members: int, n: int) -> list[Tensor]:
        """Members in random orders ``[n, M]``, which depend on the example alone."""
        repeats = min(_SUBSETS, max(1, -(-_DRAWS // self.tally.examples)))
        examples = torch.arange(self.start, self.start + n)
        return [random_bits((members,), examples, torch.full_like(examples, i)).argsort(-1) for i in range(repeats)]


def _deviation(averaged: Float[Tensor, "M n C"]) -> Float[Tensor, "M n C"]:
    relative = averaged - averaged[:1]  # exactly zero for members that are equal, which their mean need not be
    return relative - relative.mean(0)


def _is_hard(probs: Tensor) -> bool:
    return bool(((probs == 0) | (probs == 1)).all())


def _products(errors: Float[Tensor, "M n C"]) -> Float[Tensor, "n M M"]:
    """⟨e_i, e_j⟩ of every example."""
    first = errors.transpose(0, 1)
    return first @ first.transpose(1, 2)


def _binned(confidence: Float[Tensor, "n *S"], right: Tensor) -> Float[Tensor, "n *S bins 3"]:
    """Count, confidence and accuracy, each in its bin."""
    place = bin_of(confidence, BINS)
    hot = torch.nn.functional.one_hot(place, BINS).to(confidence.dtype).unsqueeze(-1)
    three = torch.stack([torch.ones_like(confidence), confidence, right.to(confidence.dtype)], -1)
    return hot * three.unsqueeze(-2)
