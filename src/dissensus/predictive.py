"""Predictions with their uncertainty, from outputs of members of any ensemble.

`predictive` reads outputs ``[M, N, C]`` as the loss that members were trained on lays them out, and returns a
`Predictive`: probabilities and labels, or means, standard deviations and intervals, with the share of the uncertainty
that is noise of the data (aleatoric) and the share that members disagree about (epistemic).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dissensus import arguments, checks, losses, output_kinds, pooling, scores
from dissensus.axes import PerExampleLoss, Pool
from dissensus.conformal import Conformal
from dissensus.output_kinds import OutputKind, Task
from dissensus.pages import uncertainty

LEVEL = 0.9
"""Level of intervals and sets by default."""


@dataclass(frozen=True)
class Predictive:
    """A pooled prediction of N examples with its uncertainty, in double precision.

    What a task does not have, or what its members do not state, is an ``AttributeError`` that says why.

    | | classification | multilabel | regression |
    |---|---|---|---|
    | `probs` | ``[N, C]`` | ``[N, L]`` | – |
    | `labels` | ``[N]`` | ``[N, L]``, 0 or 1 | – |
    | `entropy` | ``[N]``, in nats | ``[N, L]`` | – |
    | `mean`, `std` | – | – | ``[N, D]`` |
    | `aleatoric`, `epistemic` | ``[N]``, in nats | ``[N, L]`` | ``[N, D]``, variances |
    | `sets` | bool ``[N, C]`` | – | – |
    | `interval`, `quantile` | – | – | ``[N, D]`` |
    """

    kind: OutputKind
    """The task, what outputs are, and how members are pooled."""
    outputs: Float[Tensor, "M N C"] = field(repr=False)
    """Of the members, as they came."""
    conformal: Conformal | None = field(default=None, repr=False)
    """The calibration that `sets` and `interval` come from."""
    _numbers: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """The number of examples, N."""
        return self.outputs.shape[1]

    @property
    def probs(self) -> Float[Tensor, "N C"]:
        """Probabilities of classes, which sum to one, or of labels; shares of votes for the pool ``"vote"``."""
        return self._number("probs")

    @property
    def labels(self) -> Int[Tensor, "N *L"]:
        """The likeliest class, with ties to the lowest; for several labels 1 where a label's probability is above ½."""
        return self._number("labels")

    @property
    def entropy(self) -> Float[Tensor, "N *L"]:
        """Entropy of `probs` in nats: the total uncertainty. For several labels, that of each label."""
        return self._number("entropy")

    @property
    def mean(self) -> Float[Tensor, "N D"]:
        """Mean of the members' predictions; for members that predict quantiles, of their medians."""
        return self._number("mean")

    @property
    def aleatoric(self) -> Float[Tensor, "N *D"]:
        """Noise that members see in the data: mean entropy of the members, or mean of their variances.

        Members that were trained on the squared error state none. For quantiles it is the variance of a Gaussian whose
        outermost quantiles lie as far apart.
        """
        return self._number("aleatoric")

    @property
    def epistemic(self) -> Float[Tensor, "N *D"]:
        """What members disagree about: mutual information of class and member, or variance of the members' means.

        It is 0 for one member and for identical members. For quantiles it is the variance of the members' quantiles,
        averaged over levels. Entropy is the sum of both parts under the pool ``"probability"``.
        """
        return self._number("epistemic")

    @property
    def std(self) -> Float[Tensor, "N D"]:
        """Standard deviation: the root of aleatoric plus epistemic variance.

        For members that were trained on the squared error it is their spread alone, without the noise of targets.
        """
        return self._number("std")

    def sets(self, level: float = LEVEL) -> Bool[Tensor, "N C"]:
        """Which classes are in each example's prediction set.

        With a calibration, these are its sets, with its guarantee. Without one, they are the likeliest classes whose
        probabilities sum to at least ``level``: they hold the truth as often as that only if `probs` are calibrated.
        """
        if self.kind.task != "classification":
            checks.refuse("task", "be 'classification' for sets of classes", repr(self.kind.task))
        if self.conformal is not None:
            return self.conformal.sets(self.outputs, level=level)
        checks.number("level", level, 0, 1, open_low=True, open_high=True)
        sizes, order = self.probs.sort(dim=-1, descending=True, stable=True)
        before = sizes.cumsum(-1) - sizes
        return (before < level - 1e-12).gather(-1, order.argsort(-1))

    def interval(self, level: float = LEVEL) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
        """Lower and upper ends of the central prediction interval of every target.

        With a calibration, these are its intervals, with its guarantee. Without one, they are quantiles of the mixture
        of members' Gaussians, or the quantiles that members predict. Members that were trained on the squared error
        have no interval without a calibration: their spread does not contain the noise of targets.
        """
        if self.kind.task == "regression" and self.conformal is not None:
            return self.conformal.intervals(self.outputs, level=level)
        checks.number("level", level, 0, 1, open_low=True, open_high=True)
        tail = (1 - level) / 2
        return self.quantile(tail), self.quantile(1 - tail)

    def quantile(self, level: float) -> Float[Tensor, "N D"]:
        """The quantile of the pooled predictive distribution: of the mixture of Gaussians, or one that was predicted.

        A calibration does not change it.
        """
        checks.number("level", level, 0, 1, open_low=True, open_high=True)
        if self.kind.task != "regression":
            checks.refuse("task", "be 'regression' for intervals and quantiles", repr(self.kind.task), "Use probs.")
        if self.kind.takes == "values":
            wanted = "state the noise of targets to have a prediction interval, or be calibrated"
            got = "values, of members trained on the squared error, whose spread leaves the noise out"
            checks.refuse("outputs", wanted, got, _CALIBRATE)
        if self.kind.takes == "gaussian":
            return pooling.mixture_quantile(*output_kinds.gaussians(self.outputs, self.kind), level)
        near = [place for place, known in enumerate(self.kind.levels) if abs(known - level) < 1e-9]
        if not near:
            wanted = f"be a predicted one, of {list(self.kind.levels)}"
            fix = "Train on other levels, or calibrate with dissensus.conformal.calibrate, which gives every interval."
            checks.refuse("level", wanted, f"the quantile {level:g}", fix)
        return output_kinds.quantiles(self.outputs, self.kind).mean(0)[..., near[0]]

    def frame(self, level: float = LEVEL, *, names: Sequence[str] | None = None) -> Any:
        """A pandas frame with one row per example.

        Args:
            level: Of intervals, and of sets if there is a calibration. Intervals are left out where there are none.
            names: Names of the classes, labels or targets, in the order of the outputs; numbers from 0 by default.
        """
        try:
            import pandas
        except ImportError as reason:
            raise ImportError("a frame needs pandas: pip install 'dissensus[data]'") from reason
        return pandas.DataFrame(_columns(self, level, _names(self, names)))

    def plot(
        self,
        targets: Any = None,
        *,
        x: Any = None,
        level: float = LEVEL,
        names: Sequence[str] | None = None,
        x_label: str = "x",
    ) -> Any:
        """A matplotlib figure: ``prediction.plot(targets).savefig("prediction.png")``.

        For regression, means and intervals of every target (±2 standard deviations of the members where there is no
        interval). For classes and labels, the largest probability, both parts of the uncertainty and, with a
        calibration, the number of classes in the sets.

        Args:
            targets: The true labels or values, which are drawn too.
            x: For regression, a number per example ``[N]``, such as its only feature, to draw predictions over.
            level: Of intervals and sets.
            names: Names of the targets of a regression.
            x_label: Name of ``x``.
        """
        return _figure(self, targets, x, level, names, x_label)

    def _number(self, name: str) -> Tensor:
        if name not in self._numbers:
            what = f"outputs of {self.kind.takes} (task {self.kind.task!r})"
            why = _WHY.get((self.kind.takes, name), "")
            text = f"`{name}` is not known from {what}; known are {', '.join(self._numbers)}."
            raise AttributeError(f"{text} {why}".strip())
        return self._numbers[name]


_CALIBRATE = (
    "Calibrate on held-out data: conformal=dissensus.conformal.calibrate(outputs, targets, task='regression'). "
    "Or train with loss='gaussian_nll' or 'quantile'."
)
_WHY = {
    ("values", "aleatoric"): "Members trained on the squared error state no noise; use loss='gaussian_nll'.",
    ("quantiles", "mean"): "Quantiles have a centre where 0.5 is one of their levels.",
    ("quantiles", "aleatoric"): "Quantiles have a spread where they have two levels or more.",
    ("quantiles", "std"): "Quantiles have a spread where they have two levels or more.",
    (
        "gaussian",
        "entropy",
    ): "The entropy of a mixture has no closed form; dissensus.scores.gaussian_entropy bounds it.",
}


def predictive(
    outputs: Any,
    *,
    task: Task,
    loss: str | PerExampleLoss | None = None,
    pool: Pool | None = None,
    kind: Literal["logits", "probabilities"] = "logits",
    conformal: Conformal | None = None,
) -> Predictive:
    """The pooled prediction of members with its uncertainty.

    Args:
        outputs: Members' outputs ``[M, N, C]``, a tensor or a NumPy array, such as those of ``Ensemble.predict``;
            ``[M, N]`` for values of one target. Examples with NaN are refused.
        task: ``"classification"`` (one class of C), ``"multilabel"`` (L labels that do not exclude each other) or
            ``"regression"``.
        loss: The loss that members were trained on, a name or its function, which says what outputs are
            (`dissensus.losses`). Default: ``"cross_entropy"``, ``"bce"`` and ``"squared_error"``. For regression also
            ``"gaussian_nll"`` (D means, then D log-variances) and ``"quantile"``, for other levels
            ``partial(dissensus.losses.quantile, levels=(0.1, 0.5, 0.9))``.
        pool: How members become one prediction; the default is the loss's first (`dissensus.losses.LOSSES`). The pool
            ``"vote"`` goes with ``"zero_one"``.
        kind: ``"probabilities"`` if outputs for classes or labels are probabilities rather than logits.
        conformal: A calibration by `dissensus.conformal.calibrate`, from which sets and intervals come then.

    >>> outputs = torch.tensor([[[2.0, 0.0], [3.0, 0.0]], [[2.0, 0.0], [0.0, 3.0]]])
    >>> prediction = predictive(outputs, task="classification")
    >>> prediction.labels, prediction.epistemic.round(decimals=2)
    (tensor([0, 0]), tensor([0.0000, 0.5000], dtype=torch.float64))
    >>> prediction = predictive(torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]]), task="regression", loss="gaussian_nll")
    >>> prediction.mean, prediction.std.round(decimals=4)
    (tensor([[2.]], dtype=torch.float64), tensor([[1.4142]], dtype=torch.float64))
    >>> [end.round(decimals=2).item() for end in prediction.interval(0.9)]
    [-0.28, 4.28]
    """
    described = output_kinds.output_kind(task, loss, pool, kind)
    read = output_kinds.read_outputs(outputs, described)
    if conformal is not None:
        _check_conformal(conformal, described)
    numbers = _of_values(read, described) if task == "regression" else _of_classes(read, described)
    return Predictive(described, read, conformal, numbers)


def _check_conformal(conformal: Conformal, described: OutputKind) -> None:
    if not isinstance(conformal, Conformal):
        fix = "Use dissensus.conformal.calibrate, or Conformal.of_record."
        checks.refuse("conformal", "be a Conformal", type(conformal).__name__, fix, TypeError)
    if conformal.kind != described:
        differ = [name for name in described._fields if getattr(described, name) != getattr(conformal.kind, name)]
        wanted, got = (", ".join(f"{n}={getattr(k, n)!r}" for n in differ) for k in (described, conformal.kind))
        fix = "Give `predictive` and `calibrate` the same task, loss, pool and kind."
        checks.refuse("conformal", f"be calibrated for outputs of {wanted}", got, fix)


def _of_classes(outputs: Tensor, kind: OutputKind) -> dict[str, Tensor]:
    probs = output_kinds.class_probs(outputs, kind)
    aleatoric = output_kinds.in_slices(lambda part: scores.mean_entropy(_two_classes(part, kind)), outputs)
    epistemic = output_kinds.in_slices(lambda part: scores.mutual_information(_two_classes(part, kind)), outputs)
    entropy = torch.special.entr(probs)
    if kind.task == "classification":
        labels, entropy = probs.argmax(-1), entropy.sum(-1)
    else:
        labels, entropy = (probs > 0.5).long(), entropy + torch.special.entr(1 - probs)
    return {"probs": probs, "labels": labels, "entropy": entropy, "aleatoric": aleatoric, "epistemic": epistemic}


def _two_classes(outputs: Tensor, kind: OutputKind) -> Tensor:
    """Members' probabilities of classes ``[M, N, C]``; for labels those of false and true, ``[M, N, 2, L]``."""
    probs = output_kinds.member_probs(outputs, kind)
    return probs if kind.task == "classification" else torch.stack([1 - probs, probs], 2)


def _of_values(outputs: Tensor, kind: OutputKind) -> dict[str, Tensor]:
    mean, aleatoric, epistemic = output_kinds.moments(outputs, kind)
    std = (epistemic if kind.takes == "values" else aleatoric + epistemic).sqrt()
    numbers = {"mean": mean, "std": std, "aleatoric": aleatoric, "epistemic": epistemic}
    return {name: values for name, values in numbers.items() if not bool(values.isnan().any())}


def _names(prediction: Predictive, names: Sequence[str] | None) -> list[str]:
    """Names of classes, labels or targets."""
    count = prediction.kind.targets(prediction.outputs.shape[-1])
    listed = [str(number) for number in range(count)] if names is None else list(map(str, names))
    if len(listed) != count:
        checks.refuse("names", f"be {count} names", f"{len(listed)} of them")
    return listed


def _columns(prediction: Predictive, level: float, names: Sequence[str]) -> dict[str, Any]:
    numbers = {name: values.cpu() for name, values in prediction._numbers.items()}
    if prediction.kind.task == "classification":
        columns: dict[str, Any] = {
            "label": [names[label] for label in numbers["labels"].tolist()],
            "confidence": numbers["probs"].amax(-1).numpy(),
            **{name: numbers[name].numpy() for name in ("entropy", "aleatoric", "epistemic")},
        }
        if prediction.conformal is not None:
            sets = prediction.sets(level).tolist()
            columns["set"] = [[name for name, inside in zip(names, row, strict=True) if inside] for row in sets]
        return columns | {f"p_{name}": numbers["probs"][:, place].numpy() for place, name in enumerate(names)}
    if prediction.kind.task == "regression" and _has_interval(prediction, level):
        numbers["low"], numbers["high"] = (end.cpu() for end in prediction.interval(level))
    single = {"probs": "p", "labels": "label"}
    columns = {}
    for place, name in enumerate(names):
        suffix = "" if len(names) == 1 and prediction.kind.task == "regression" else f"_{name}"
        for number, values in numbers.items():
            columns[f"{single.get(number, number)}{suffix}"] = values[:, place].numpy()
    return columns


def _has_interval(prediction: Predictive, level: float) -> bool:
    if prediction.conformal is not None or prediction.kind.takes == "gaussian":
        return True
    tails = ((1 - level) / 2, (1 + level) / 2)
    return all(any(abs(known - tail) < 1e-9 for known in prediction.kind.levels) for tail in tails)


def _figure(
    prediction: Predictive, targets: Any, x: Any, level: float, names: Sequence[str] | None, x_label: str
) -> Any:
    kind, numbers = prediction.kind, {name: values.cpu() for name, values in prediction._numbers.items()}
    truth = None if targets is None else _read_targets(prediction, targets)
    if kind.task != "regression":
        if x is not None:
            checks.refuse("x", "be left out for classes and labels", "an input")
        return _class_figure(prediction, numbers, truth, level)
    over = None if x is None else _read_input(x, len(prediction))
    ends = [end.cpu() for end in prediction.interval(level)] if _has_interval(prediction, level) else None
    width = kind.targets(prediction.outputs.shape[-1])
    titles = _names(prediction, names) if names is not None or width > 1 else [""]
    bands = [
        uncertainty.Band(
            title,
            prediction.mean[:, place].cpu(),
            None if ends is None else ends[0][:, place],
            None if ends is None else ends[1][:, place],
            numbers["epistemic"][:, place].sqrt(),
            None if truth is None else truth[:, place],
        )
        for place, title in enumerate(titles)
    ]
    return uncertainty.intervals(bands, level, over, x_label)


def _class_figure(prediction: Predictive, numbers: dict[str, Tensor], truth: Tensor | None, level: float) -> Any:
    probs = numbers["probs"]
    confidence = probs.amax(-1) if prediction.kind.task == "classification" else torch.maximum(probs, 1 - probs)
    right = None if truth is None else (numbers["labels"] == truth).flatten()
    parts = (confidence.flatten(), numbers["aleatoric"].flatten(), numbers["epistemic"].flatten(), right)
    if prediction.conformal is None:
        return uncertainty.classes(*parts)
    sets = prediction.sets(level).cpu()
    title = f"{100 * level:g} % sets"
    if truth is not None:
        held = sets.gather(-1, truth.unsqueeze(-1)).double().mean()
        title += f": {100 * float(held):.1f} % hold the truth"
    return uncertainty.classes(*parts, sizes=sets.sum(-1), set_title=title)


def _read_targets(prediction: Predictive, targets: Any) -> Tensor:
    """Labels or values of the examples, on the CPU."""
    truth = arguments.as_tensor(targets, "targets")
    if not isinstance(truth, Tensor):
        checks.refuse("targets", "be a tensor or an array", type(truth).__name__, error=TypeError)
    truth = truth.detach().cpu()
    width = prediction.kind.targets(prediction.outputs.shape[-1])
    if prediction.kind.task == "classification":
        checks.class_targets(truth, len(prediction), width, soft=False)
        losses.check_targets("cross_entropy", truth, width)
        return truth.long()
    return checks.value_targets(truth, len(prediction), width).double()


def _read_input(x: Any, count: int) -> Tensor:
    numbers = arguments.as_tensor(x, "x")
    if not isinstance(numbers, Tensor) or tuple(numbers.shape) not in ((count,), (count, 1)):
        got = checks.shape_text(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
        checks.refuse("x", f"be one number per example, [N={count}]", got, "Several features? Choose one: x[:, 0].")
    return numbers.detach().cpu().double().flatten()
