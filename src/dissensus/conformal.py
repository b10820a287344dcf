"""Split conformal prediction: sets of classes and intervals of values that hold the truth at a stated rate.

`calibrate` compares outputs of members with targets that were used neither in training nor for choosing a model. It
returns a `Conformal`, which is plain data. Its `Conformal.sets` and `Conformal.intervals` are for new outputs.

For calibration and test examples that are exchangeable (drawn independently from one distribution, for instance), a
set or interval of level 1 − α holds the target with a probability of at least 1 − α. Where no two scores are equal it
is at most 1 − α + 1/(n + 1), for n calibration examples. This is an average over calibration data and test examples
together. It does not hold for each class, group or input by itself, nor after the distribution has shifted.

| method | task | score of a target y | set or interval |
|---|---|---|---|
| `lac` | classification | 1 − p(y) | smallest on average; may be empty |
| `aps` | classification | probability of y and of all likelier classes | larger where classes are close |
| `raps` | classification | that of `aps`, and a penalty for unlikely classes | smaller than `aps` for many classes |
| `absolute` | regression | ∣y − mean∣ | of one width everywhere |
| `normalised` | regression | ∣y − mean∣ / (std + floor) | wide where members disagree or predict noise |
| `cqr` | regression by quantiles | max(q_lo − y, y − q_hi) | quantiles, moved by one number |
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dissensus import arguments, checks, losses, output_kinds
from dissensus.axes import PerExampleLoss, Pool
from dissensus.output_kinds import OutputKind, Task
from dissensus.randomness import Use, derived_seed

Method = Literal["lac", "aps", "raps", "absolute", "normalised", "cqr"]

METHODS: dict[str, tuple[str, ...]] = {
    "logits": ("lac", "aps", "raps"),
    "probabilities": ("lac", "aps", "raps"),
    "values": ("normalised", "absolute"),
    "gaussian": ("normalised", "absolute"),
    "quantiles": ("cqr", "absolute", "normalised"),
}
"""Methods for each kind of outputs; the first is the default."""
FORMAT = 1
_RANKED = ("aps", "raps")


@dataclass(frozen=True)
class Conformal:
    """Scores of calibration examples, and how outputs become scores: plain data that `record` turns into JSON.

    One calibration serves every level.
    """

    method: Method
    kind: OutputKind
    width: int
    """Outputs per example, C."""
    examples: int
    """Calibration examples, n."""
    scores: tuple[tuple[float, ...], ...]
    """Finite scores in rising order: one row for classes, or one for each real target. The others are infinite."""
    floor: float = 0.0
    """Added to standard deviations by ``normalised``, in the unit of the targets."""
    penalty: float = 0.0
    """λ of ``raps``."""
    unpenalised: int = 0
    """k_reg of ``raps``."""
    randomised: bool = False
    seed: int = 0

    def thresholds(self, level: float = 0.9) -> tuple[float, ...]:
        """The ⌈(n + 1) level⌉-th smallest score, of classes or of every target; infinite if n is smaller than that.

        >>> Conformal("absolute", output_kinds.output_kind("regression"), 1, 4, ((1.0, 2.0, 3.0, 4.0),)).thresholds(0.8)
        (4.0,)
        """
        checks.number("level", level, 0, 1, open_low=True, open_high=True)
        rank = max(1, math.ceil(round((self.examples + 1) * level, 9)))  # 10 · 0.9 is 9, whatever its rounding
        return tuple(row[rank - 1] if rank <= len(row) else math.inf for row in self.scores)

    def sets(self, outputs: Any, *, level: float = 0.9) -> Bool[Tensor, "N C"]:
        """Which classes are in each example's prediction set.

        Args:
            outputs: Outputs ``[M, N, C]`` of the members that were calibrated.
            level: Share of sets that hold the true class.
        """
        if self.kind.task != "classification":
            checks.refuse("sets", "be of a classification", f"a {self.kind.task}", "Use intervals.", TypeError)
        outputs = self._read(outputs)
        (threshold,) = self.thresholds(level)
        probs = output_kinds.class_probs(outputs, self.kind)
        if threshold == math.inf:
            return torch.ones_like(probs, dtype=torch.bool)
        inside = _class_scores(probs, self, "sets") <= threshold
        if self.method in _RANKED and not self.randomised:  # else the surest predictions would have empty sets
            inside.scatter_(-1, probs.argmax(-1, keepdim=True), True)
        return inside

    def intervals(self, outputs: Any, *, level: float = 0.9) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
        """Lower and upper ends of each target's prediction interval, in double precision.

        Args:
            outputs: Outputs ``[M, N, C]`` of the members that were calibrated.
            level: Share of intervals that hold the target, for each of D targets by itself.
        """
        if self.kind.task != "regression":
            checks.refuse("intervals", "be of a regression", f"a {self.kind.task}", "Use sets.", TypeError)
        outputs = self._read(outputs)
        reach = torch.tensor(self.thresholds(level), dtype=torch.float64, device=outputs.device)
        low, high, unit = _base(outputs, self.method, self.kind, self.floor)
        reach = torch.where(reach.isinf(), reach, reach * unit)  # not 0 · ∞
        middle = low + (high - low) / 2
        # Quantiles that are too far apart are moved inwards, and meet in the middle.
        return torch.minimum(low - reach, middle), torch.maximum(high + reach, middle)

    def record(self) -> dict[str, Any]:
        """This calibration as texts, numbers and lists, for JSON."""
        kind = {**self.kind._asdict(), "levels": list(self.kind.levels)}
        return {"format": FORMAT, **_fields(self), "kind": kind, "scores": [list(row) for row in self.scores]}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Conformal":
        """The calibration that `record` has described; what it cannot have described is refused."""
        return _of_record(record)

    def _read(self, outputs: Any) -> Tensor:
        outputs = output_kinds.read_outputs(outputs, self.kind)
        if outputs.shape[-1] != self.width:
            wanted = f"have C={self.width} outputs, as in calibration"
            checks.refuse("outputs", wanted, checks.shape_text(outputs.shape, "MNC"))
        return outputs


def calibrate(
    outputs: Any,
    targets: Any,
    *,
    task: Task,
    loss: str | PerExampleLoss | None = None,
    pool: Pool | None = None,
    kind: Literal["logits", "probabilities"] = "logits",
    method: Method | None = None,
    floor: float = 0.0,
    penalty: float = 0.01,
    unpenalised: int = 5,
    randomised: bool = False,
    seed: int = 0,
) -> Conformal:
    """Calibrate the pooled prediction of members on held-out examples (Vovk et al., 2005; Papadopoulos et al., 2002).

    Args:
        outputs: Members' outputs ``[M, n, C]`` on n examples that neither training nor model selection has used.
        targets: Class labels ``[n]``, or values ``[n]`` or ``[n, D]``.
        task: ``"classification"`` or ``"regression"``.
        loss: The loss that members were trained on, as in `dissensus.predictive`.
        pool: How the ensemble predicts, as in `dissensus.predictive`.
        kind: ``"probabilities"`` if a classifier's outputs are probabilities rather than logits.
        method: ``"lac"`` (Sadinle et al., 2019; the default for classes), ``"aps"`` (Romano et al., 2020) or ``"raps"``
            (Angelopoulos et al., 2021); ``"normalised"`` (the default for values and Gaussians; Lei et al., 2018),
            ``"absolute"`` or ``"cqr"`` (the default for quantiles; Romano et al., 2019).
        floor: Added to standard deviations by ``"normalised"``, so that members that agree by chance do not give an
            interval without width. In the unit of the targets; choose it without looking at the calibration data.
        penalty: λ of ``"raps"``, added to the score for each class beyond the likeliest few.
        unpenalised: k_reg of ``"raps"``: the number of likeliest classes without a penalty.
        randomised: Count a random share of each class's own probability in the score of ``"aps"`` and ``"raps"``, as
            in the papers. Sets are smaller, but may be empty. Without it all of it counts, and the likeliest class is
            always in the set, so that no set is empty; this can only add to the coverage.
        seed: Of these draws.

    >>> outputs = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]]).repeat(2, 1, 1)
    >>> fitted = calibrate(outputs, torch.tensor([1.5, 2.0, 2.0, 4.25]), task="regression", method="absolute")
    >>> fitted.thresholds(0.6)
    (0.5,)
    >>> fitted.intervals(torch.tensor([[[7.0]]]), level=0.6)
    (tensor([[6.5000]], dtype=torch.float64), tensor([[7.5000]], dtype=torch.float64))
    """
    described = output_kinds.output_kind(task, loss, pool, kind)
    if task == "multilabel":
        fix = "Calibrate one label at a time, as a classification with two classes."
        checks.refuse("task", "be 'classification' or 'regression'", "'multilabel'", fix)
    known = METHODS[described.takes]
    chosen: Any = known[0] if method is None else method
    checks.one_of("method", chosen, known)
    checks.number("floor", floor, 0)
    checks.number("penalty", penalty, 0)
    checks.count("unpenalised", unpenalised, 0)
    checks.flag("randomised", randomised)
    if randomised and chosen not in _RANKED:
        checks.refuse("randomised", "be False for other methods than 'aps' and 'raps'", f"True for {chosen!r}")
    read = output_kinds.read_outputs(outputs, described)
    _, examples, width = read.shape
    fitted = Conformal(
        chosen,
        described,
        width,
        examples,
        (),
        floor=float(floor) if chosen == "normalised" else 0.0,
        penalty=float(penalty) if chosen == "raps" else 0.0,
        unpenalised=unpenalised if chosen == "raps" else 0,
        randomised=randomised,
        seed=checks.count("seed", seed, 0) if randomised else 0,
    )
    truth = arguments.as_tensor(targets, "targets")
    if not isinstance(truth, Tensor):
        checks.refuse("targets", "be a tensor or an array", type(truth).__name__, error=TypeError)
    truth = truth.detach().to(read.device)
    found = _label_scores(read, truth, fitted) if task == "classification" else _value_scores(read, truth, fitted)
    rows = tuple(tuple(row[row.isfinite()].sort().values.tolist()) for row in found.cpu())
    return replace(fitted, scores=rows)


def _fields(conformal: Conformal) -> dict[str, Any]:
    return {name: getattr(conformal, name) for name in Conformal.__dataclass_fields__}


def _label_scores(outputs: Tensor, labels: Tensor, fitted: Conformal) -> Float[Tensor, "1 N"]:
    """The score of every calibration example's label."""
    checks.class_targets(labels, outputs.shape[1], outputs.shape[2], soft=False)
    losses.check_targets("cross_entropy", labels, outputs.shape[2])
    scores = _class_scores(output_kinds.class_probs(outputs, fitted.kind), fitted, "calibrate")
    return losses.at_label(scores, labels).unsqueeze(0)


def _class_scores(probs: Float[Tensor, "N C"], fitted: Conformal, stream: str) -> Float[Tensor, "N C"]:
    """The score of each class as if it were the label. Of equal probabilities, the lower class comes first.

    Calibration and test draw from different streams, as the guarantee needs.
    """
    if fitted.method == "lac":
        return 1 - probs
    sizes, order = probs.sort(dim=-1, descending=True, stable=True)
    total = sizes.cumsum(-1)
    ranks = torch.arange(1, probs.shape[-1] + 1, dtype=probs.dtype, device=probs.device)
    penalties = fitted.penalty * (ranks - fitted.unpenalised).clamp_min(0)
    if fitted.randomised:
        generator = torch.Generator().manual_seed(derived_seed(fitted.seed, Use.CONFORMAL, stream))
        share = torch.rand(len(probs), 1, generator=generator, dtype=torch.float64).to(probs.device)
        total = total - (1 - share) * sizes
    return (total + penalties).gather(-1, order.argsort(-1))


def _value_scores(outputs: Tensor, targets: Tensor, fitted: Conformal) -> Float[Tensor, "D N"]:
    """The score of every calibration example's targets."""
    low, high, unit = _base(outputs, fitted.method, fitted.kind, fitted.floor)
    truth = checks.value_targets(targets, *low.shape).double()
    if not bool(truth.isfinite().all()):
        checks.refuse("targets", "be finite", "NaN or infinity", "Leave such examples out.")
    if bool((unit == 0).all()):
        fix = "Use method='absolute', or a floor above 0."
        checks.refuse("outputs", "differ between members for method='normalised'", "members that all agree", fix)
    outside = torch.maximum(low - truth, truth - high)
    # An exact prediction without spread has the least score, any other without spread the largest.
    return torch.where((unit == 0) & (outside == 0), 0.0, outside / unit).T


def _base(outputs: Tensor, method: str, kind: OutputKind, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Lower and upper ends ``[N, D]`` that a calibration widens, and the unit in which it does."""
    if method == "cqr":
        if len(kind.levels) < 2:
            checks.refuse("loss", "have two levels or more for method='cqr'", f"the levels {kind.levels}")
        pooled = output_kinds.quantiles(outputs, kind).mean(0)
        return pooled[..., 0], pooled[..., -1], torch.ones_like(pooled[..., 0])
    mean, aleatoric, epistemic = output_kinds.moments(outputs, kind)
    if bool(mean.isnan().any()):
        fix = "Use method='cqr'."
        checks.refuse("loss", f"have the level 0.5 for method={method!r}", f"the levels {kind.levels}", fix)
    if method == "absolute":
        return mean, mean, torch.ones_like(mean)
    variance = epistemic if kind.takes == "values" else aleatoric + epistemic
    if bool(variance.isnan().any()):
        checks.refuse("loss", f"have two levels or more for method={method!r}", f"the levels {kind.levels}")
    return mean, mean, variance.sqrt() + floor


def _of_record(record: Mapping[str, Any]) -> Conformal:
    if not isinstance(record, Mapping) or record.get("format") != FORMAT:
        got = repr(record.get("format")) if isinstance(record, Mapping) else type(record).__name__
        fix = "Written by a newer dissensus? Upgrade."
        checks.refuse("record", f"be a conformal calibration of format {FORMAT}", got, fix)
    names = {"format", *Conformal.__dataclass_fields__}
    if (
        set(record) != names
        or not isinstance(record["kind"], Mapping)
        or set(record["kind"]) != set(OutputKind._fields)
    ):
        checks.refuse("record", "have the entries of Conformal.record()", ", ".join(sorted(map(str, record))))
    described = record["kind"]
    checks.one_of("task", described["task"], ("classification", "regression"))
    kinds = (
        ("logits", "probabilities") if described["task"] == "classification" else ("values", "gaussian", "quantiles")
    )
    checks.one_of("takes", described["takes"], kinds)
    checks.one_of("pool", described["pool"], ("probability", "score", "vote"))
    levels = checks.listed("levels", described["levels"])
    kind = OutputKind(
        described["task"],
        described["takes"],
        described["pool"],
        losses.check_levels(levels) if described["takes"] == "quantiles" else (),
        checks.number("floor", described["floor"], 0),
    )
    checks.one_of("method", record["method"], METHODS[kind.takes])
    width, examples = checks.count("width", record["width"]), checks.count("examples", record["examples"])
    rows = [[checks.number("scores", value) for value in checks.listed("scores", row)] for row in record["scores"]]
    expected = 1 if kind.task == "classification" else kind.targets(width)
    if len(rows) != expected or any(row != sorted(row) or len(row) > examples for row in rows):
        wanted = f"be {expected} rows of up to {examples} numbers in rising order"
        checks.refuse("scores", wanted, f"{len(rows)} rows of {[len(row) for row in rows]}, in order or not")
    return Conformal(
        record["method"],
        kind,
        width,
        examples,
        tuple(map(tuple, rows)),
        floor=checks.number("floor", record["floor"], 0),
        penalty=checks.number("penalty", record["penalty"], 0),
        unpenalised=checks.count("unpenalised", record["unpenalised"], 0),
        randomised=checks.flag("randomised", record["randomised"]),
        seed=checks.count("seed", record["seed"], 0),
    )
