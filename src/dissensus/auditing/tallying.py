"""One pass over member outputs: every figure of an audit is a function of sums, kept for each of some blocks.

Units (examples, or groups of them that belong together) are dealt to blocks at random. Sums over all blocks give a
figure, and drawing blocks with replacement gives its bootstrap interval, so that nothing has to be read twice and
memory does not grow with the number of examples. With fewer units than blocks this is the ordinary bootstrap.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

import dissensus.auditing.stationarity as stationarity
from dissensus import checks, losses, scores
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
_SUBSETS = 100
"""Codependence visits all subsets of members where there are no more than these, and draws some of them otherwise."""
COARSE = ("deviation", "offset", "pool_error", "coarse_count")
"""Sums over every output, which are kept for fewer blocks where there are many outputs."""
OF_TRAINING = (
    "slope",
    "curvature",
    "fitted_loss",
    "mean_slope",
    "pool_slope",
    "pool_curvature",
    "pool_loss",
    "bag_count",
)
"""Sums that training outputs have in addition (see `dissensus.auditing.stationarity`)."""
_ADDED_UP = 64
"""Examples of a block that are added up in single precision before their sum is added in double precision."""
_ALONE_UP_TO = 2**22
"""Numbers up to which no other threads are started."""
_GPU_FROM = 2**28
"""Numbers from which a GPU is worth its start."""
_GPU_AT_ONCE = 2**25
"""Numbers of a slice on a GPU."""
_MOST_WORKERS = 8
"""Slices that are computed at the same time, at most: each holds memory."""


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
    ``offset`` the same in probabilities, votes or values. They are one tensor but for pool "score" of a classifier,
    which also has ``pool_error``: mean probabilities of members less the label."""
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
    device: torch.device | str | None = None,
) -> Tally:
    """Read all outputs once. Without targets only what needs none is counted.

    Slices are read and added up one after the other, and computed on as many threads as torch has, or on a GPU.

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
            losses change with the scale of outputs is counted then.
        device: Where slices are computed; by default on a GPU where there is one and outputs are many.
    """
    device = _device(members) if device is None else torch.device(device)
    units, dealt = _dealt(members.images, groups)
    blocks = max(2, min(units, BLOCKS))
    coarse = max(2, min(blocks, _MOST_HELD // (members.members * members.width)))  # for sums over every output
    tally = Tally(members.members, members.examples, members.width, kind, loss, pool, {}, units, kind != "values")
    if kind != "values" and targets is not None:
        tally.frequencies = torch.bincount(targets, minlength=members.width).double() / len(targets)
    elif targets is not None:
        tally.centre = targets.double().reshape(len(targets), -1).mean(0)

    def counted(rows: slice, part: Tensor) -> _Result:
        outputs = part.to(device).to(members.dtype).contiguous()
        members.check_finite(outputs, rows.start)
        wanted = None if targets is None else targets[rows].to(device)
        images = torch.arange(rows.start, rows.stop) // members.pixels
        mask = None if in_bag is None else in_bag[:, images].T.to(device)
        some = _Slice(tally, members.name, outputs, wanted, rows.start, keep_scores, mask)
        return rows, some.regression() if kind == "values" else some.classification()

    sums = _Sums(blocks, coarse, device)
    scores: dict[str, list[Tensor]] = {}
    parts = members.parts(_GPU_AT_ONCE if device.type == "cuda" else None)
    for rows, counts in _in_order(counted, parts, 1 if device.type == "cuda" else _workers(members)):
        sums.add(counts, dealt[torch.arange(rows.start, rows.stop) // members.pixels].to(device))
        tally.hard = tally.hard and counts.hard
        for name, values in counts.scores.items():
            scores.setdefault(name, []).append(values.float().cpu())
    tally.sums = sums.total()
    tally.scores = {name: torch.cat(each) for name, each in scores.items()}
    return tally


def _dealt(examples: int, groups: Tensor | None) -> tuple[int, Int[Tensor, " N"]]:
    """The number of units, and the block of every example: units in random order, to blocks of as many units each."""
    unit = torch.arange(examples) if groups is None else groups.unique(return_inverse=True)[1]
    units = int(unit.max()) + 1
    order = random_bits((units,), torch.tensor(units), torch.tensor(0)).argsort()
    block = torch.empty_like(order)
    block[order] = torch.arange(units) % max(2, min(units, BLOCKS))
    return units, block[unit]


def _device(members: Members) -> torch.device:
    return torch.device("cuda" if members.numbers >= _GPU_FROM and torch.cuda.is_available() else "cpu")


def _workers(members: Members) -> int:
    """Threads that compute slices: none beside this one where outputs are few."""
    return min(torch.get_num_threads(), _MOST_WORKERS) if members.numbers > _ALONE_UP_TO else 0


class _OneThread:
    """Torch's number of threads is one as long as anybody is inside, and what it was afterwards."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = Lock(), 0, 1

    def enter(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.before = torch.get_num_threads()
            self.inside += 1
            torch.set_num_threads(1)

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            torch.set_num_threads(self.before if self.inside == 0 else 1)


_ONE_THREAD = _OneThread()


def _in_order(
    function: Callable[[slice, Tensor], "_Result"], calls: Iterable[tuple[slice, Tensor]], workers: int
) -> Iterator["_Result"]:
    """Results of calls in their order, computed by threads of one core each while this one reads on.

    Threads of whole slices do not wait for each other after every operation, as torch's own do: torch uses one thread
    for an operation until the last result is taken.
    """
    if workers == 0:
        yield from itertools.starmap(function, calls)
        return
    _ONE_THREAD.enter()
    pool = ThreadPoolExecutor(workers, "dissensus-audit", initializer=partial(torch.set_num_threads, 1))
    waiting: deque[Future[_Result]] = deque()
    try:
        for call in calls:
            waiting.append(pool.submit(function, *call))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        _ONE_THREAD.leave()


@dataclass
class _Counts:
    """What is counted of some examples, which come first in every tensor."""

    each: dict[str, Shaped[Tensor, "n *S"]]
    """Numbers that are added up by block."""
    outputs: dict[str, Float[Tensor, "n M C"]]
    """Numbers as many as outputs, which are added up by coarse block."""
    bins: dict[str, tuple[Float[Tensor, "n *S"], Shaped[Tensor, "n *S"]]] = field(default_factory=dict)
    """Confidences and whether they are right, which are added up by block and bin."""
    labels: Int[Tensor, " n"] | None = None
    scores: dict[str, Float[Tensor, " n"]] = field(default_factory=dict)
    hard: bool = False


_Result = tuple[slice, _Counts]


class _Sums:
    """Running sums by block, in double precision."""

    def __init__(self, blocks: int, coarse: int, device: torch.device) -> None:
        self.blocks, self.coarse, self.device = blocks, coarse, device
        self.held: dict[str, Tensor] = {}
        self.shapes: dict[str, torch.Size] = {}
        self.single: dict[str, Tensor] = {}
        self.pending = 0

    def add(self, counts: _Counts, block: Int[Tensor, " n"]) -> None:
        place = block % self.coarse
        self._add("coarse_count", place, torch.ones_like(place, dtype=torch.float64), self.coarse)
        self.shapes = {name: values.shape[1:] for name, values in counts.each.items()} | {"count": torch.Size()}
        columns = [values.flatten(1) if values.ndim > 1 else values.unsqueeze(1) for values in counts.each.values()]
        ones = torch.ones(len(block), 1, dtype=torch.float64, device=self.device)
        self._add("each", block, torch.cat([*(column.double() for column in columns), ones], 1), self.blocks)
        for name, (confidence, right) in counts.bins.items():
            self._add_bins(name, block, confidence.double(), right.double())
        if counts.labels is not None:
            width = counts.outputs["deviation"].shape[-1]
            held = self._sum("classes", self.blocks, (width,))
            held.view(-1).index_add_(0, block * width + counts.labels, ones.squeeze(1))
        for name, values in counts.outputs.items():
            self._add_outputs(name, place, values)
        self.pending += len(block)
        if self.pending >= _ADDED_UP * self.coarse:
            self._flush()

    def total(self) -> dict[str, Tensor]:
        """All sums by name, on the host."""
        self._flush()
        held = {name: values.cpu() for name, values in self.held.items()}
        parts = held.pop("each").split([math.prod(shape) for shape in self.shapes.values()], 1)
        for (name, shape), part in zip(self.shapes.items(), parts, strict=True):
            held[name] = part.reshape(self.blocks, *shape)
        if "offset" in held:  # probabilities less the label, where there are labels
            held["pool_error"] = held["offset"].mean(1)
        for name in held.keys() & {"deviation", "offset"}:
            held[name] = _deviation(held[name])
        held.setdefault("offset", held["deviation"])
        return held

    def _sum(self, name: str, blocks: int, shape: tuple[int, ...]) -> Tensor:
        if name not in self.held:
            self.held[name] = torch.zeros(blocks, *shape, dtype=torch.float64, device=self.device)
        return self.held[name]

    def _add(self, name: str, place: Tensor, values: Tensor, blocks: int) -> None:
        self._sum(name, blocks, values.shape[1:]).index_add_(0, place, values)

    def _add_bins(self, name: str, block: Tensor, confidence: Tensor, right: Tensor) -> None:
        """Count, confidence and accuracy, each in its bin."""
        shape = confidence.shape[1:]
        held = self._sum(name, self.blocks, (*shape, BINS, 3)).view(-1)
        inner = torch.arange(math.prod(shape), device=self.device).view(shape)
        row = block.view(-1, *[1] * len(shape)) * inner.numel() + inner
        place = 3 * (row * BINS + bin_of(confidence, BINS)).flatten()
        for i, values in enumerate((torch.ones_like(confidence), confidence, right)):
            held.index_add_(0, place + i, values.flatten())

    def _add_outputs(self, name: str, place: Tensor, values: Tensor) -> None:
        if values.dtype == torch.float64 or len(place) > _ADDED_UP * self.coarse:
            self._add(name, place, values.double(), self.coarse)
            return
        if name not in self.single:
            self.single[name] = values.new_zeros(self.coarse, *values.shape[1:])
        self.single[name].index_add_(0, place, values)

    def _flush(self) -> None:
        for name, values in self.single.items():
            self._sum(name, self.coarse, values.shape[1:]).add_(values)
            values.zero_()
        self.pending = 0


class _Slice:
    """What is counted of some examples: pure functions of outputs ``[n, M, C]`` and targets."""

    def __init__(
        self,
        tally: Tally,
        name: str,
        outputs: Float[Tensor, "n M C"],
        targets: Tensor | None,
        start: int,
        keep_scores: bool,
        in_bag: Tensor | None = None,
    ) -> None:
        self.tally, self.name, self.outputs, self.targets, self.start = tally, name, outputs, targets, start
        self.keep_scores, self.in_bag = keep_scores, in_bag

    def regression(self) -> _Counts:
        """Squared error and its parts."""
        f = self.outputs
        relative = f - f[:, :1]
        spread = _spread(f)
        counts = _Counts({"spread": spread}, {"deviation": relative})
        if self.keep_scores:
            counts.scores = {"variance": spread}
        if self.targets is None:
            return counts
        y = losses.as_values(f.transpose(0, 1), self.targets)
        errors = f - y.unsqueeze(1)
        pooled = errors.mean(1).square().sum(-1)
        assert self.tally.centre is not None
        centred = y - self.tally.centre.to(y)  # squares of targets far from zero would lose their differences
        counts.each |= {
            "y": centred,
            "y_squared": centred.square().sum(-1),
            "quadratic": pooled,
            "ensemble_loss": pooled,
            "member_loss": errors.square().sum(-1),
            "products": _products(errors),
        }
        if self.in_bag is not None:
            counts.each |= self._in_bag(stationarity.of_values(f, y, self.tally.centre.to(f)))
        return counts

    def classification(self) -> _Counts:
        """Accuracy, likelihood, Brier score, calibration, agreement, and the decomposition of the loss asked for."""
        tally, pool, classes = self.tally, self.tally.pool, self.tally.width
        self._check()
        probs = self.outputs.softmax(-1) if tally.kind == "logits" else self.outputs.clamp_min(0)
        named = _first_choice(self.outputs)
        confidence = _at(probs, named)
        choices = probs if pool != "vote" else torch.nn.functional.one_hot(named, classes).to(probs.dtype)
        mean = choices.sum(1) / tally.members  # exact for votes, so that ties are ties
        scores = self._scores() if pool == "score" else None
        averaged = choices if scores is None else scores - scores.mean(-1, keepdim=True)
        counts = _Counts({"spread": _spread(averaged), "distinct": _distinct(named)}, {"deviation": averaged})
        counts.each["agreements"] = named.unsqueeze(1) == named.unsqueeze(2)
        counts.hard = tally.hard and _is_hard(probs)
        if self.keep_scores:
            counts.scores = {words: score(probs.transpose(0, 1)) for words, score in SCORES.items()}
        if pool == "score":
            counts.outputs["offset"] = probs
        if self.targets is None:
            return counts
        labels = counts.labels = self.targets
        member_log = self._log_at_labels(named, confidence)
        if scores is not None:
            pooled_log = (scores.sum(1) / tally.members).log_softmax(-1)
            pooled, nll = pooled_log.exp(), -_at(pooled_log, labels)
        elif pool == "vote":
            pooled, nll = mean, -_at(mean, labels).clamp_min(_LEAST).log()
        else:
            pooled, nll = mean, math.log(tally.members) - member_log.logsumexp(-1)
        if self.in_bag is not None and pool != "vote":
            scale = self._scores() if scores is None else scores
            counts.each |= self._in_bag(stationarity.of_classes(scale, probs, member_log, labels, pool))
        sure, choice = pooled.max(-1)
        right, member_right = choice == labels, named == labels.unsqueeze(1)
        errors = _less_one(choices, labels)  # in place: a constant shift of all members changes no deviation
        products = _products(errors)
        quadratic = _less_one(mean.clone(), labels).square().sum(-1)
        brier = quadratic if scores is None else _less_one(pooled.clone(), labels).square().sum(-1)
        own = products.diagonal(dim1=1, dim2=2)
        member_brier = own if pool != "vote" else _less_one(probs, labels).square().sum(-1)
        ensemble_loss, member_loss = {
            "cross_entropy": (nll, -member_log),
            "brier": (brier, member_brier),
            "zero_one": (~right, ~member_right),
        }[tally.loss]
        assert tally.frequencies is not None
        frequencies = tally.frequencies.to(probs.device)
        counts.each |= {
            "guessed": frequencies[choice],
            "member_guessed": frequencies[named],
            "right": right,
            "member_right": member_right,
            "nll": nll,
            "member_nll": -member_log,
            "brier": brier,
            "member_brier": member_brier,
            "quadratic": quadratic,
            "ensemble_loss": ensemble_loss,
            "member_loss": member_loss,
            "products": products,
        }
        counts.bins = {"bins": (sure, right), "member_bins": (confidence, member_right)}
        if tally.loss == "cross_entropy" and pool != "vote":
            counts.each["rises"] = self._rises(member_log, scores, nll)
        return counts

    def _in_bag(self, slopes: dict[str, Tensor]) -> dict[str, Tensor]:
        """Slopes of members on the examples that each was trained on, and of all members on all examples."""
        assert self.in_bag is not None
        mask = self.in_bag.to(slopes["slope"].dtype)
        masked = {name: slopes[name] * mask for name in ("slope", "curvature", "fitted_loss")}
        everywhere = {name: slopes[name] for name in ("pool_slope", "pool_curvature", "pool_loss")}
        everywhere["mean_slope"] = slopes["slope"].mean(-1)
        return masked | everywhere | {"bag_count": mask.expand_as(slopes["slope"])}

    def _check(self) -> None:
        """Refuse probabilities that are called logits, and the other way round."""
        low = float(self.outputs.min())
        if self.tally.kind == "logits":
            if low >= 0:  # negative numbers are no probabilities: there is nothing to look at
                fix = "Say kind='probabilities' (--kind probabilities)."
                checks.member_logits(self.outputs.transpose(0, 1), self.name, fix)
            return
        sums = self.outputs.sum(-1)
        if low < -1e-6 or float((sums - 1).abs().max()) > 1e-2:
            off = float(sums.flatten()[(sums - 1).abs().argmax()])
            got = f"{low:.3g} as the least, and a sum of {off:.4g}"
            fix = "Logits? Say kind='logits' (--kind logits)."
            checks.refuse(self.name, "be probabilities that sum to one", got, fix)

    def _scores(self) -> Float[Tensor, "n M C"]:
        """What pool "score" averages: logits as they are, or the logarithms of probabilities."""
        return self.outputs if self.tally.kind == "logits" else self.outputs.clamp_min(_LEAST).log()

    def _log_at_labels(self, named: Int[Tensor, "n M"], confidence: Float[Tensor, "n M"]) -> Float[Tensor, "n M"]:
        """Log-probabilities of labels: from logits without the logarithm of a probability that has underflowed."""
        assert self.targets is not None
        at_label = _at(self.outputs, self.targets)
        if self.tally.kind == "probabilities":
            return at_label.clamp_min(_LEAST).log()
        return at_label - _at(self.outputs, named) + confidence.log()

    def _rises(
        self, log_at_labels: Float[Tensor, "n M"], scores: Float[Tensor, "n M C"] | None, whole: Float[Tensor, " n"]
    ) -> Float[Tensor, "n D"]:
        """How the ensemble's loss rises when members are left out at random, for every share of `DROPS`: exact where
        few subsets of members are possible, otherwise the mean over subsets that are drawn anew for each example."""
        n, members = log_at_labels.shape
        most = _SUBSETS if scores is None or self.tally.examples <= _DRAWS else 2 * members
        orders = None
        rises = []
        for drop in DROPS:
            kept = members - int(members * drop)
            if kept == members:
                rises.append(torch.zeros_like(whole))
                continue
            if math.comb(members, kept) <= most:
                chosen = torch.tensor(list(itertools.combinations(range(members), kept)), device=whole.device)
            else:
                orders = self._orders(n, members) if orders is None else orders
                chosen = orders[..., :kept]
            share = log_at_labels.new_zeros(*chosen.shape[:-1], members).scatter_(-1, chosen, 1 / kept)
            rises.append(self._loss_of(share, log_at_labels, scores) - whole)
        return torch.stack(rises, -1)

    def _loss_of(
        self,
        share: Float[Tensor, "*E S M"],
        log_at_labels: Float[Tensor, "n M"],
        scores: Float[Tensor, "n M C"] | None,
    ) -> Float[Tensor, " n"]:
        """The mean loss of S ensembles in which every member has its share, the same for all examples or not."""
        if scores is None:
            return -_log_means(log_at_labels, share).mean(-1)
        assert self.targets is not None
        total = torch.zeros_like(log_at_labels[:, 0])
        for some in share.split(share.shape[-1], -2):  # no more numbers at once than outputs
            mean = some @ scores
            total += (mean.logsumexp(-1) - _at(mean, self.targets)).sum(-1)
        return total / share.shape[-2]

    def _orders(self, n: int, members: int) -> Int[Tensor, "n R M"]:
        """Members in random orders, which depend on the example alone."""
        repeats = min(_SUBSETS, max(1, -(-_DRAWS // self.tally.examples)))
        examples = torch.arange(self.start, self.start + n, device=self.outputs.device).unsqueeze(1).expand(-1, repeats)
        repeat = torch.arange(repeats, device=self.outputs.device).expand(n, -1)
        return random_bits((members,), examples, repeat).argsort(-1)


def _log_means(logs: Float[Tensor, "n M"], share: Float[Tensor, "*E S M"]) -> Float[Tensor, "n S"]:
    """Logarithms of weighted means of numbers that are given by their logarithms."""
    top = logs.amax(-1, keepdim=True)
    relative, share = (logs - top).double(), share.double()
    numbers = relative.exp()
    means = numbers @ share.T if share.ndim == 2 else (share * numbers.unsqueeze(1)).sum(-1)
    logs_of_means = means.log()
    lost = (means < 1e-290).any(-1)  # too small for a double beside the largest
    if bool(lost.any()):
        each = share.expand(len(logs), -1, -1)[lost]
        logs_of_means[lost] = (relative[lost].unsqueeze(1) + each.log()).logsumexp(-1)
    return (logs_of_means + top).to(logs.dtype)


def _at(values: Float[Tensor, "n *M C"], index: Tensor) -> Float[Tensor, "n *M"]:
    """The entry of every row at a class: one class for each row, or one for each example."""
    index = index.view(*index.shape, *[1] * (values.ndim - 1 - index.ndim)).expand(values.shape[:-1])
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _less_one(probs: Float[Tensor, "n *M C"], labels: Int[Tensor, " n"]) -> Float[Tensor, "n *M C"]:
    """Errors of probabilities: one is taken off at the label, in place."""
    index = labels.view(-1, *[1] * (probs.ndim - 1)).expand(*probs.shape[:-1], 1)
    return probs.scatter_(-1, index, probs.gather(-1, index) - 1)


def _first_choice(outputs: Float[Tensor, "n M C"]) -> Int[Tensor, "n M"]:
    """The class that each member names, the first of several that are equal."""
    if outputs.device.type == "cpu":
        return torch.from_numpy(outputs.numpy().argmax(-1))  # ten times as fast as torch's
    return outputs.argmax(-1)


def _distinct(named: Int[Tensor, "n M"]) -> Int[Tensor, " n"]:
    """How many classes members name."""
    ordered = named.sort(-1).values
    return 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(-1)


def _deviation(averaged: Float[Tensor, "n M C"]) -> Float[Tensor, "n M C"]:
    relative = averaged - averaged[:, :1]  # exactly zero for members that are equal, which their mean need not be
    return relative.sub_(relative.mean(1, keepdim=True))


def _spread(averaged: Float[Tensor, "n M C"]) -> Float[Tensor, " n"]:
    """The mean squared distance of members from their mean."""
    deviation = _deviation(averaged).flatten(1)
    return torch.linalg.vector_norm(deviation, dim=1).square() / averaged.shape[1]


def _is_hard(probs: Tensor) -> bool:
    return bool(((probs == 0) | (probs == 1)).all())


def _products(errors: Float[Tensor, "n M C"]) -> Float[Tensor, "n M M"]:
    """⟨e_i, e_j⟩ of every example."""
    exact = errors.double() if errors.is_cuda else errors  # a GPU may be told to multiply in less than single precision
    return exact @ exact.transpose(1, 2)
