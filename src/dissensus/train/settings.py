"""Settings of a training that belong together, as small frozen dataclasses."""

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

import dissensus.train.optim as optim
import dissensus.train.schedules as schedules
from dissensus import checks
from dissensus.arrays import Conversion
from dissensus.batch import Unpack
from dissensus.data.batches import Augments, changes_targets
from dissensus.train.member_optimizers import MakeOptimizer
from dissensus.train.parameter_columns import checked_no_decay

Metric = Callable[[Tensor, Tensor], Tensor | float]
"""``(outputs [M, N, C], targets) ->`` a number, or one per member."""


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer, and those of its settings that all runs and members share."""

    name: str | MakeOptimizer = "adamw"
    """A name, or a callable that makes the optimizer of one member."""
    nesterov: bool | None = None
    """None, here and below: the default of the optimizer."""
    betas: tuple[float, float] | None = None
    eps: float | None = None
    schedule: str | schedules.Schedule = "constant"
    no_decay: tuple[str, ...] | bool = False
    """Parameters without weight decay: 'bias', 'norm' and patterns of names; True: both words."""

    def __post_init__(self) -> None:
        schedules.resolved(self.schedule)
        object.__setattr__(self, "no_decay", checked_no_decay(self.no_decay))
        given = [name for name in ("nesterov", "betas", "eps") if getattr(self, name) is not None]
        if callable(self.name):
            refuse_beside_callable([*given, *(["no_decay"] if self.no_decay else [])])
            return
        if not isinstance(self.name, str):
            names = ", ".join(map(repr, optim.OPTIMIZERS))
            made = hasattr(self.name, "param_groups")
            got = f"a {type(self.name).__name__} that was made already" if made else repr(self.name)
            fix = "Each member needs one of its own: pass lambda params: torch.optim.NAdam(params, lr=1e-3)."
            checks.refuse("optimizer", f"be a name ({names}) or a callable", got, fix if made else "", TypeError)
        checks.one_of("optimizer", self.name, optim.OPTIMIZERS)
        for name in {"nesterov", "betas", "eps"}.difference(given):
            object.__setattr__(self, name, getattr(self.defaults, name))
        assert self.betas is not None
        assert self.eps is not None
        optim.checked_betas(self.betas)
        checks.number("eps", self.eps, 0)
        checks.flag("nesterov", self.nesterov)

    @property
    def defaults(self) -> optim.Defaults:
        """The settings of a named optimizer where the user gives none."""
        return optim.DEFAULTS.get(str(self.name), optim.Defaults())

    @property
    def make(self) -> MakeOptimizer | None:
        """The callable that makes the optimizer of one member; None for a name."""
        return self.name if callable(self.name) else None

    def per_run(self, **numbers: optim.PerMember | None) -> dict[str, Any]:
        """Settings that may differ between runs and members, with defaults for those that are None."""
        if callable(self.name):
            refuse_beside_callable([name for name, number in numbers.items() if number is not None])
            return {}
        return {n: getattr(self.defaults, n) if number is None else number for n, number in numbers.items()}


def refuse_beside_callable(names: Sequence[str]) -> None:
    """Refuse settings that belong to the optimizer which a callable makes."""
    if names:
        fix = "Set it in the callable: functools.partial(torch.optim.NAdam, lr=...), or a lambda with parameter groups."
        checks.refuse(names[0], "be left out if `optimizer` is a callable", "both", fix)


@dataclass(frozen=True)
class UpdateSettings:
    """What happens around the updates of an optimizer."""

    accumulate: int = 1
    """Batches whose gradients are averaged for one update."""
    ema: float | None = None
    """The decay of the moving average of the weights; None: no average."""
    recompute: bool = False
    """Whether every member's forward pass is repeated in the backward pass, instead of keeping its activations."""
    compile: bool | str = "auto"
    """Whether passes are compiled; ``"auto"``: where the training is long and they are faster."""

    def __post_init__(self) -> None:
        checks.count("accumulate", self.accumulate)
        if not isinstance(self.compile, str) or self.compile != "auto":
            if not isinstance(self.compile, bool):
                checks.refuse("compile", "be True, False or 'auto'", repr(self.compile))
            if self.compile and self.recompute:
                fix = "Leave one of them out: a compiled pass decides by itself what it keeps."
                checks.refuse("compile", "come without `recompute`", "both", fix)
        if self.ema is not None:
            checks.number("ema", self.ema, 0, 1, open_low=True, open_high=True)
        checks.flag("recompute", self.recompute)


@dataclass(frozen=True)
class SharedSettings:
    """How parameters that members share are trained."""

    lr: float | None = None
    """The learning rate; None: that of the members."""
    clip_norm: float | None = None
    """The largest norm of the gradient; None: that of the members."""
    gradient: str = "mean"
    """``"mean"`` or ``"sum"`` over members."""

    def __post_init__(self) -> None:
        checks.one_of("shared_gradient", self.gradient, ("mean", "sum"))
        if self.lr is not None:
            optim.checked_number("shared_lr", self.lr)
        if self.clip_norm is not None:
            checks.number("shared_clip_norm", self.clip_norm, 0, open_low=True)

    def of_run(self, given: Mapping[str, float]) -> "SharedSettings":
        """The settings of a run, of which a grid gives some."""
        return replace(self, **{name.removeprefix("shared_"): value for name, value in given.items()})

    def check_unused(self) -> None:
        """Refuse settings where members share no parameters that are trained."""
        gradient = None if self.gradient == "mean" else repr(self.gradient)
        given = {"shared_lr": self.lr, "shared_clip_norm": self.clip_norm, "shared_gradient": gradient}
        for name, value in given.items():
            if value is not None:
                requirement = "be left out where members share no parameters that are trained"
                checks.refuse(name, requirement, str(value), "Use Ensemble(..., shared=...), or leave it out.")


@dataclass(frozen=True)
class BatchSettings:
    """How data becomes batches; the batch size is a setting of each run."""

    shuffle: bool = True
    drop_last: bool = False
    augment: Augments = None
    unpack: Unpack | None = None
    steps_per_epoch: int | None = None
    bootstrap: bool = False
    """Whether every member counts examples as often as they were drawn for it, with replacement."""

    def __post_init__(self) -> None:
        checks.flag("bootstrap", self.bootstrap)
        if self.unpack is not None:
            checks.function("unpack", self.unpack, "batch -> (inputs, targets) or (inputs, targets, weights)")
        if self.steps_per_epoch is not None:
            checks.count("steps_per_epoch", self.steps_per_epoch)
        checks.flag("shuffle", self.shuffle)
        checks.flag("drop_last", self.drop_last)
        several = self.augment if isinstance(self.augment, Sequence) else (self.augment,)
        for augment in (self.augment,) if isinstance(self.augment, str | bytes) else several:
            if augment is not None:
                words = "(x, generator) -> x, a list with one per member, or (x, y, generator) -> (x, y)"
                checks.function("augment", augment, words)
        if isinstance(self.augment, Sequence) and any(map(changes_targets, self.augment)):
            fix = "All members learn the same targets: pass one function (x, y, generator) -> (x, y) for all of them."
            checks.refuse("augment", "be one function where it changes targets", "a list", fix)

    @property
    def changes_targets(self) -> bool:
        """Whether the augmentation returns targets as well."""
        return changes_targets(self.augment)


@dataclass(frozen=True)
class TargetSettings:
    """How targets count in the loss."""

    class_weights: Tensor | Literal["balanced"] | None = None
    """The weight of each class ``[C]``, or computed from the training labels."""
    label_smoothing: float = 0.0
    """The share of each label that is spread over all classes."""
    ignore_index: int | None = None
    """The label of examples or positions that do not count."""
    class_axis: int = 2
    """The axis of classes of member outputs ``[M, B, C, *S]``."""

    def __post_init__(self) -> None:
        checks.number("label_smoothing", self.label_smoothing, 0, 1)
        if self.ignore_index is not None:
            _whole("ignore_index", self.ignore_index, "be a label, a whole number")
        _whole(
            "class_axis", self.class_axis, "be an axis of member outputs after members and examples: 2 or more, or -1"
        )
        if self.class_axis in (0, 1):
            requirement = "be an axis of member outputs after members and examples: 2 or more, or -1"
            checks.refuse("class_axis", requirement, self.class_axis)
        if isinstance(self.class_weights, Tensor):
            _check_class_weights(self.class_weights)
        elif self.class_weights is not None and self.class_weights != "balanced":
            fix = "Or pass one number per class."
            checks.refuse("class_weights", "be 'balanced' as a text", repr(self.class_weights), fix)

    @classmethod
    def of(
        cls,
        conversion: Conversion,
        class_weights: Any,
        label_smoothing: float,
        ignore_index: int | None,
        class_axis: int,
    ) -> "TargetSettings":
        """Settings as a user gives them; class weights may be a sequence or an array."""
        numbers_per_class = class_weights is not None and not isinstance(class_weights, str)
        weights: Any = conversion.weights(class_weights, "class_weights") if numbers_per_class else class_weights
        return cls(weights, label_smoothing, ignore_index, class_axis)

    @property
    def balanced(self) -> bool:
        """Whether class weights follow from the training labels."""
        return isinstance(self.class_weights, str)

    @property
    def given(self) -> bool:
        """Whether any setting changes what an objective sees."""
        plain = self.class_weights is None and self.ignore_index is None and not self.label_smoothing
        return not plain or self.class_axis != 2

    @property
    def weighs(self) -> list[str]:
        """Names of the settings that give examples different weights."""
        names = ("class_weights", "ignore_index")
        return [name for name in names if getattr(self, name) is not None]


def _whole(name: str, value: object, requirement: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or abs(int(value)) >= 2**63:
        checks.refuse(name, requirement, repr(value), error=TypeError)


def _check_class_weights(weights: Tensor) -> None:
    if weights.ndim != 1 or len(weights) < 2:
        checks.refuse("class_weights", "hold one number per class, two or more", checks.shape_text(weights.shape))
    if not bool((weights.isfinite() & (weights >= 0)).all()) or not bool((weights > 0).any()):
        got = f"from {float(weights.min()):g} to {float(weights.max()):g}"
        checks.refuse("class_weights", "be finite, 0 or more, and not all 0", got)


@dataclass(frozen=True)
class ValidationSettings:
    """What is measured on validation data, and what follows from it."""

    metric: Metric | None = None
    mode: Literal["min", "max"] | None = None
    """Whether a lower or a higher metric is better; None is ``"min"``, for losses."""
    track: Mapping[str, Metric] | None = None
    watch: Literal["ensemble", "member"] = "ensemble"
    patience: int | None = None
    min_delta: float = 0.0
    keep: Literal["best", "last"] = "best"

    def __post_init__(self) -> None:
        checks.one_of("watch", self.watch, ("ensemble", "member"))
        checks.one_of("keep", self.keep, ("best", "last"))
        if self.track is None:
            return
        if not isinstance(self.track, Mapping):
            requirement = "be a dictionary from names to functions (outputs, targets) -> number"
            checks.refuse("track", requirement, repr(self.track), error=TypeError)
        for name, measure in self.track.items():
            checks.function("track", measure, f"(outputs, targets) -> number at {name!r}")

    @property
    def per_member(self) -> bool:
        """Whether each member is judged by its own metric."""
        return self.watch == "member"


@dataclass(frozen=True)
class CheckpointSettings:
    """Where checkpoints are, and how often they are written."""

    folder: Path
    resume: bool = False
    seconds: float | None = None
    """Time between checkpoints; None: ten seconds, or more where writing takes more than 2 % of the time."""
    choices: Path | None = None
    """The file of the chosen backends; None: in the folder."""
    part: tuple[int, ...] | None = None
    """The runs of a part of a sweep, by number: a checkpoint of other runs is refused."""

    def __post_init__(self) -> None:
        if self.seconds is not None:
            checks.number("checkpoint_seconds", self.seconds, 0)
        object.__setattr__(self, "folder", checks.path("checkpoint", self.folder))
