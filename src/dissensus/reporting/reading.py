"""What a report is about: members' outputs on every set, targets, and the inputs that examples are shown by."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from dissensus import checks, losses
from dissensus.arrays import is_array
from dissensus.auditing import checked_targets
from dissensus.auditing.estimators import ModelMembers, in_bag_of, members_of, own_prediction
from dissensus.auditing.inputs import ClassLabels, union
from dissensus.auditing.streaming import OutputReader

TASKS = ("classification", "regression")
POOLS = {"classification": ("probability", "score", "vote")}
LOSSES = {
    "classification": ("cross_entropy", "brier", "zero_one"),
    "regression": ("squared_error", "mse", "gaussian_nll", "quantile"),
}
_VALUE_KINDS = {"squared_error": "values", "mse": "values", "gaussian_nll": "gaussian", "quantile": "quantiles"}
_POOL_OF_VALUES = {"values": "score", "gaussian": "probability", "quantiles": "score"}

OnProgress = Callable[[str, float], None]
"""Called with the name of the current step and the share of work that is done."""


class Settings(NamedTuple):
    """How outputs are read and pooled."""

    task: str
    kind: str
    """``logits`` or ``probabilities``; ``values``, ``gaussian`` or ``quantiles`` for regression."""
    loss: str
    pool: str
    levels: tuple[float, ...] = ()
    """Levels of quantiles."""


class OutputSet(NamedTuple):
    """Members' outputs on a set, with its targets where they are known."""

    outputs: Float[Tensor, "M N C"]
    targets: Tensor | None


@dataclass(frozen=True)
class ReportData:
    """Everything that a report measures."""

    settings: Settings
    outputs: Float[Tensor, "M N C"]
    targets: Tensor
    """Classes ``[N]``, or values ``[N, D]``."""
    classes: tuple[str, ...]
    """Names of classes; of targets for regression."""
    inputs: Callable[[int], Any] | None = None
    """The input of an example, where it can be shown."""
    matrix: Float[np.ndarray, "N F"] | None = None
    """Inputs that are rows of numbers, ``[N, F]``."""
    features: tuple[str, ...] = ()
    """Names of the numbers of an input."""
    shifted: Mapping[str, OutputSet] = field(default_factory=dict)
    training: OutputSet | None = None
    in_bag: Any = None
    reference: Float[Tensor, "M N C"] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReportArguments:
    """The arguments of `dissensus.report`, before they are read."""

    ens: Any
    data: Any
    task: str | None = None
    kind: str | None = None
    loss: Any = None
    pool: str | None = None
    shifted: Any = None
    training: Any = None
    names: Sequence[Any] | None = None
    features: Sequence[str] | None = None
    batch_size: int = 1024


def read(arguments: ReportArguments, progress: OnProgress) -> ReportData:
    """Members' outputs on all sets. The arguments are those of `dissensus.report`."""
    checks.count("batch_size", arguments.batch_size)
    shifted = _named_sets(arguments.shifted)
    source = _Stored(arguments.ens) if _is_stored(arguments.ens) else _Model(arguments)
    sets, done = 1 + len(shifted) + (arguments.training is not None), 0

    def moved(name: str) -> OnShare:
        """Moves the progress within a set."""
        nonlocal done
        begun, done = done / sets, done + 1
        return lambda share: progress(f"outputs on {name}", begun + share / sets)

    data = source.opened(arguments.data, "data", moved("data"))
    settings = _settings(arguments, data.targets, source)
    outputs = _checked_outputs(data.outputs(settings), settings, "ens")
    labels = _Labels.of(arguments.names, source.classes, data.targets, settings, outputs.shape[2])

    def output_set(value: Any, name: str, title: str) -> OutputSet:
        opened = source.opened(value, name, moved(title))
        others = _checked_outputs(opened.outputs(settings), settings, name)
        return _output_set(opened, others, outputs, labels, settings, name)

    others = {name: output_set(value, f"shifted[{name!r}]", name) for name, value in shifted.items()}
    training, in_bag = None, None
    if arguments.training is not None:
        training = output_set(arguments.training, "training", "training data")
        if training.targets is None:
            fix = "Give (outputs, targets)." if isinstance(source, _Stored) else "Give (x, y)."
            checks.refuse("training", "hold targets", "no targets", fix, TypeError)
        in_bag = source.in_bag(training.outputs.shape[1])
    reader = OutputReader(outputs, "ens", exact=settings.task == "regression")
    return ReportData(
        settings,
        outputs,
        _checked(labels.columns(data.targets), reader, settings, "ens"),
        labels.names,
        data.inputs,
        data.matrix,
        _feature_names(arguments.features, data),
        others,
        training,
        in_bag,
        source.reference(data, settings),
        source.facts(outputs, data, settings),
    )


def _is_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) or is_array(value)


def _is_stored(ens: Any) -> bool:
    """Whether an ensemble is given by its outputs."""
    return _is_numbers(ens) or (isinstance(ens, list | tuple) and bool(ens) and all(map(_is_numbers, ens)))


def _named_sets(shifted: Any) -> dict[str, Any]:
    if shifted is None:
        return {}
    if not isinstance(shifted, Mapping):
        return {"shifted": shifted}
    wrong = next((name for name in shifted if not isinstance(name, str) or not name), None)
    if wrong is not None:
        checks.refuse("shifted", "name its sets with text", repr(wrong), error=TypeError)
    return dict(shifted)


OnShare = Callable[[float], None]
"""Called with the share of a set that is done."""


class _OpenedSet(NamedTuple):
    """A set as it was given."""

    outputs: Callable[[Settings], Any]
    """Members' outputs on it."""
    targets: Any
    raw: Any = None
    """Inputs, where they are in memory."""
    inputs: Callable[[int], Any] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of a frame."""
        return tuple(map(str, getattr(self.raw, "columns", ())))

    @property
    def matrix(self) -> Float[np.ndarray, "N F"] | None:
        """Inputs as rows of numbers, where they are."""
        if not _is_numbers(self.raw):
            return None
        values = self.raw.detach().cpu().numpy() if isinstance(self.raw, Tensor) else np.asarray(self.raw)
        return values.astype(np.float64) if values.ndim == 2 and values.dtype.kind in "fiub" else None


class _Stored:
    """Outputs that exist already. Other sets are outputs, alone or in a pair with targets."""

    def __init__(self, ens: Any) -> None:
        self.ens, self.classes, self.known_task = ens, None, None

    def opened(self, data: Any, name: str, progress: OnShare) -> _OpenedSet:
        progress(0.0)
        if name == "data":
            inputs, targets = data if isinstance(data, tuple) and len(data) == 2 else (None, data)
            if targets is None or callable(targets):
                checks.refuse(
                    "data", "be targets, or a pair (inputs, targets)", type(targets).__name__, error=TypeError
                )
            return _OpenedSet(lambda _: self.ens, targets, inputs, _rows_of(inputs))
        outputs, targets = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
        if not _is_stored(outputs):
            wanted = "be outputs [M, N, C], or a pair (outputs, targets), since `ens` is given by its outputs"
            checks.refuse(name, wanted, type(outputs).__name__, error=TypeError)
        return _OpenedSet(lambda _: outputs, targets)

    def kind(self, task: str) -> str | None:
        del task

    def in_bag(self, examples: int) -> None:
        del examples

    def reference(self, data: _OpenedSet, settings: Settings) -> None:
        del data, settings

    def facts(self, outputs: Any, data: _OpenedSet, settings: Settings) -> dict[str, Any]:
        del outputs, data, settings
        return {}


class _Model:
    """A model whose members' outputs are computed here. Sets are inputs, pairs, data sets or loaders."""

    def __init__(self, arguments: ReportArguments) -> None:
        self.model, self.batch_size = arguments.ens, arguments.batch_size
        if arguments.task is not None:
            checks.one_of("task", arguments.task, TASKS)
        self.asked_kind = None if arguments.task == "regression" else arguments.kind
        self.members = members_of(self.model, "ens", task=arguments.task, kind=self.asked_kind)
        self.classes, self.known_task = self.members.classes, self.members.task

    def opened(self, data: Any, name: str, progress: OnShare) -> _OpenedSet:
        if isinstance(data, Dataset | DataLoader):
            return self._opened_source(data, name, progress)
        if isinstance(data, tuple | list) and len(data) == 2:
            inputs, targets = data
        elif name != "data" and (_is_numbers(data) or isinstance(data, Mapping)):
            inputs, targets = data, None
        else:
            got = f"{len(data)} parts" if isinstance(data, tuple | list) else type(data).__name__
            checks.refuse(name, "be a pair (x, y), a Dataset or a DataLoader", got, error=TypeError)
        if name == "data" and targets is None:
            checks.refuse("data", "hold targets", "inputs alone", "Give (x, y).", TypeError)
        if _is_numbers(inputs) and len(inputs) == 0:
            checks.refuse(name, "hold at least one example", "none")
        if targets is not None and _is_numbers(inputs) and len(inputs) != len(targets):
            checks.refuse(name, "hold as many targets as inputs", f"{len(inputs)} inputs and {len(targets)} targets")
        return _OpenedSet(lambda settings: self._run(inputs, settings, progress), targets, inputs, _rows_of(inputs))

    def _opened_source(self, source: Any, name: str, progress: OnShare) -> _OpenedSet:
        """A source of batches, which is read once: its order may be another one next time."""
        if not isinstance(source, DataLoader):
            source = DataLoader(source, self.batch_size, collate_fn=getattr(source, "collate", None))
        dataset: Any = source.dataset
        streamed = isinstance(dataset, IterableDataset)
        total = 0 if streamed else len(source)
        outputs, targets = [], []
        for i, batch in enumerate(source):
            alone = isinstance(batch, Tensor) and name not in ("data", "training")
            if not alone and (not isinstance(batch, list | tuple) or len(batch) < 2):
                checks.refuse(name, "give batches (x, y)", type(batch).__name__, error=TypeError)
            inputs = batch if alone else batch[0]
            outputs.append(_with_members(self.members, inputs))
            targets += [] if alone else [torch.as_tensor(batch[1])]
            progress((i + 1) / total if total else 0.0)
        if not outputs:
            checks.refuse(name, "hold at least one example", "none")
        in_order = bool(targets) and not streamed and type(source.sampler) is SequentialSampler
        whole = torch.cat(outputs, 1)
        labels = torch.cat(targets) if targets else None
        return _OpenedSet(lambda _: whole, labels, None, (lambda row: dataset[row][0]) if in_order else None)

    def kind(self, task: str) -> str | None:
        """The kind of a classifier's outputs, where it is known."""
        return members_of(self.model, "ens", task=task, kind=self.asked_kind).kind

    def _run(self, inputs: Any, settings: Settings, progress: OnShare) -> Any:
        return _run(self._members(self.model, "ens", settings), inputs, self.batch_size, progress, self.model)

    @staticmethod
    def _members(model: Any, name: str, settings: Settings) -> ModelMembers:
        kind = None if settings.task == "regression" else settings.kind
        return members_of(model, name, task=settings.task, kind=kind)

    def in_bag(self, examples: int) -> Any:
        """The training examples that each member was fitted to."""
        return in_bag_of(self.model, examples)

    def reference(self, data: _OpenedSet, settings: Settings) -> Float[Tensor, "M N C"] | None:
        """Outputs of the ensemble's twin, where there is one."""
        twin = getattr(self.model, "twin", None)
        if twin is None or data.raw is None:
            return None
        raw = _run(self._members(twin, "reference", settings), data.raw, self.batch_size, lambda _: None, twin)
        return _checked_outputs(raw, settings, "reference")

    def facts(self, outputs: Float[Tensor, "M N C"], data: _OpenedSet, settings: Settings) -> dict[str, Any]:
        """Whether the pooled outputs are the model's prediction, for models that have one; else known training rows."""
        if self.members.predictor is None:
            return self._recognised(data)
        parts = [part[:, 0] if part.shape[1] == 1 else part for part in outputs.numpy()]
        return {"matches_own_prediction": own_prediction(self.members, parts, data.raw, settings.kind, settings.pool)}

    def _recognised(self, data: _OpenedSet) -> dict[str, Any]:
        """How many examples are rows that the model was trained on, by the record that `dissensus.fit` keeps."""
        if data.raw is None or not hasattr(self.model, "trained_on"):
            return {}
        return {"training_rows": int(self.model.trained_on(data.raw).sum())}


def member_outputs(model: Any, inputs: Any, batch_size: int = 1024, progress: OnShare = lambda _: None) -> Any:
    """Members' outputs ``[M, N, ...]`` of a model on inputs, batch by batch where it is a network."""
    return _run(members_of(model, "model"), inputs, batch_size, progress, model)


def _run(members: ModelMembers, raw: Any, batch_size: int, progress: OnShare, model: Any) -> Any:
    """Members' outputs on inputs. Those of networks are computed batch by batch."""
    progress(0.0)
    if not isinstance(raw, Tensor | np.ndarray):
        return members.outputs(raw)
    size = batch_size if isinstance(model, nn.Module) else len(raw)
    parts = []
    for start in range(0, len(raw), size):
        batch = raw[start : start + size]
        parts.append(_with_members(members, batch))
        progress(min(1.0, (start + size) / len(raw)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _with_members(members: ModelMembers, inputs: Any) -> Any:
    """Outputs as one tensor ``[M, B, ...]``. Those of a plain network, ``[B, C]`` or ``[B]``, are one member's."""
    outputs, examples = members.outputs(inputs), len(inputs)
    if isinstance(outputs, list | tuple):
        return torch.stack([torch.as_tensor(np.asarray(part)) for part in outputs])
    values = outputs if isinstance(outputs, Tensor) else torch.as_tensor(np.asarray(outputs))
    if values.ndim != 2:
        return values.unsqueeze(0) if values.ndim == 1 else values
    plain = len(values) == examples
    if plain and values.shape[1] == examples > 1:  # as many classes as examples, or M = B: one example tells
        plain = len(np.asarray(members.outputs(inputs[:1]))) == 1
    return values.unsqueeze(0) if plain else values


def _settings(arguments: ReportArguments, targets: Any, source: "_Stored | _Model") -> Settings:
    """Task, kind, loss and pool with their defaults."""
    task = arguments.task or source.known_task
    loss_name = None if arguments.loss is None else losses.name_of(arguments.loss)
    if arguments.loss is not None:
        if loss_name is None:
            got = losses.text_of(arguments.loss) if not isinstance(arguments.loss, str) else repr(arguments.loss)
            checks.refuse("loss", f"be one of {', '.join(map(repr, _all_losses()))}", got)
        checks.one_of("loss", loss_name, _all_losses())
    if task is None:
        task = next((t for t, known in LOSSES.items() if loss_name in known), None) or _task_of(targets)
    checks.one_of("task", task, TASKS)
    if loss_name is not None and loss_name not in LOSSES[task]:
        checks.refuse("loss", f"be one of {', '.join(map(repr, LOSSES[task]))} for {task}", repr(loss_name))
    if task == "regression":
        if arguments.kind is not None:
            fix = "Use loss='gaussian_nll' or loss='quantile' for members that predict distributions."
            if arguments.task is None and loss_name is None:
                fix = (
                    "Classes? Targets must be whole numbers [N], or names: y.long() of floats, y.argmax(-1) of one-hot."
                )
            checks.refuse("kind", "be left out for regression", repr(arguments.kind), fix)
        loss = loss_name or "squared_error"
        kind = _VALUE_KINDS[loss]
        pool = arguments.pool or _POOL_OF_VALUES[kind]
        checks.one_of("pool", pool, (_POOL_OF_VALUES[kind],))
        levels: Sequence[float] = ()
        if kind == "quantiles":
            levels = losses.settings_of(arguments.loss or loss).get("levels", losses.QUANTILE_LEVELS)
        return Settings(task, kind, loss, pool, losses.check_levels(levels) if levels else ())
    kind = arguments.kind or source.kind(task)
    if kind not in ("logits", "probabilities"):
        fix = "Hard votes have no probabilities to report on."
        if kind is None:
            fix = "It is not guessed from values. Whole numbers that are values? Use task='regression'."
        checks.refuse("kind", "be 'logits' or 'probabilities'", repr(kind), fix)
    pool = arguments.pool or "probability"
    checks.one_of("pool", pool, POOLS["classification"])
    loss = loss_name or ("zero_one" if pool == "vote" else "cross_entropy")
    if pool == "vote" and loss != "zero_one":
        checks.refuse("loss", "be 'zero_one' for pool 'vote'", repr(loss))
    return Settings(task, kind, loss, pool)


def _all_losses() -> tuple[str, ...]:
    return (*LOSSES["classification"], *LOSSES["regression"])


def _task_of(targets: Any) -> str:
    """Classification for names and whole numbers ``[N]``, regression for all else."""
    values = targets if isinstance(targets, Tensor) else np.asarray(targets)
    whole = not values.is_floating_point() if isinstance(values, Tensor) else values.dtype.kind in "iubUSO"
    return "classification" if whole and values.ndim == 1 else "regression"


def _checked_outputs(raw: Any, settings: Settings, name: str) -> Float[Tensor, "M N C"]:
    """Finite outputs ``[M, N, C]`` on the host."""
    if isinstance(raw, Tensor) and raw.ndim == 1:
        checks.refuse(name, "be outputs [M, N, C]", checks.shape_text(raw.shape), "One network? Use outputs[None].")
    reader = OutputReader(raw, name, exact=settings.task == "regression")
    if reader.grid:
        fix = "Pixels and tokens: see dissensus.dense and dissensus.audit."
        checks.refuse(name, "be one prediction per example, [M, N, C]", f"dense outputs with {reader.grid}", fix)
    if settings.task == "classification":
        reader.check_classes()
    outputs = torch.cat([part for _, part in reader.slices()], 1)
    if settings.kind == "probabilities":
        checks.member_probs(outputs, name, "Logits? Use kind='logits'.")
    elif settings.kind == "logits":
        checks.member_logits(outputs, name, "Use kind='probabilities'.")
    elif settings.kind == "gaussian" and outputs.shape[2] % 2:
        wanted = "have D means, then D logarithms of variances, for loss 'gaussian_nll'"
        checks.refuse(name, wanted, f"{outputs.shape[2]} outputs")
    elif settings.kind == "quantiles" and outputs.shape[2] % len(settings.levels):
        wanted = f"have {len(settings.levels)} quantiles per target, one for each of {list(settings.levels)}"
        checks.refuse(name, wanted, f"{outputs.shape[2]} outputs", "Other levels? Use partial(quantile, levels=...).")
    return outputs


def target_width(settings: Settings, width: int) -> int:
    """Number of targets that outputs of this width predict."""
    return width // {"values": 1, "gaussian": 2, "quantiles": len(settings.levels)}[settings.kind]


def _output_set(
    opened: _OpenedSet, outputs: Tensor, like: Tensor, labels: "_Labels", settings: Settings, name: str
) -> OutputSet:
    if (outputs.shape[0], outputs.shape[2]) != (like.shape[0], like.shape[2]):
        wanted = f"have {like.shape[0]} members and {like.shape[2]} outputs, as `ens` has on `data`"
        checks.refuse(name, wanted, f"{outputs.shape[0]} members and {outputs.shape[2]} outputs")
    if opened.targets is None:
        return OutputSet(outputs, None)
    reader = OutputReader(outputs, name, exact=settings.task == "regression")
    return OutputSet(outputs, _checked(labels.columns(opened.targets), reader, settings, name))


def _checked(targets: Any, reader: OutputReader, settings: Settings, name: str) -> Tensor:
    """Classes ``[N]``, or values ``[N, D]`` in double precision."""
    if settings.task == "classification":
        return checked_targets(targets, reader, settings.task, name)
    reader.width = target_width(settings, reader.width)
    values = checked_targets(targets, reader, settings.task, name)
    return values.double().reshape(len(values), -1)


class _Labels(NamedTuple):
    """Names of classes, and the labels that stand for columns in targets."""

    names: tuple[str, ...]
    labels: ClassLabels | None

    @classmethod
    def of(cls, names: Any, known: Any, targets: Any, settings: Settings, width: int) -> "_Labels":
        """Names that are shown, and labels: those of the model, or names, or all that occur where they are text."""
        count = width if settings.task == "classification" else target_width(settings, width)
        if names is not None:
            names = [str(name) for name in checks.listed("names", names)]
            if len(names) != count:
                what = "classes" if settings.task == "classification" else "targets"
                checks.refuse("names", f"name each of the {count} {what}", f"{len(names)} names")
            if len(set(names)) < len(names):
                checks.refuse("names", "differ from each other", ", ".join(names))
        if settings.task == "regression":
            shown = names or (["target"] if count == 1 else [f"target {i + 1}" for i in range(count)])
            return cls(tuple(shown), None)
        labels = known
        if labels is None and not isinstance(targets, Tensor) and np.asarray(targets).dtype.kind in "USO":
            labels = names if names is not None else union([targets], "data")
            if len(labels) != count:
                fix = "Name every class with `names`, in the order of the columns."
                checks.refuse("data", f"have labels of {count} classes", f"{len(labels)} labels", fix)
        shown = names or ([str(label) for label in labels] if labels is not None else [str(i) for i in range(count)])
        return cls(tuple(shown), None if labels is None else ClassLabels(labels))

    def columns(self, targets: Any) -> Any:
        """Targets with a column's number for every label."""
        if self.labels is None:
            return targets
        return self.labels.columns_of(targets.detach().cpu().numpy() if isinstance(targets, Tensor) else targets)


def _rows_of(inputs: Any) -> Callable[[int], Any] | None:
    """Access to single inputs; None where there is no such thing."""
    if hasattr(inputs, "iloc"):
        return lambda row: inputs.iloc[row].to_numpy()
    if _is_numbers(inputs):
        return lambda row: inputs[row]
    if isinstance(inputs, list | tuple) and inputs and all(isinstance(part, str) for part in inputs):
        return lambda row: inputs[row]
    return None


def _feature_names(features: Any, data: _OpenedSet) -> tuple[str, ...]:
    if features is None:
        return data.columns
    names = tuple(str(name) for name in checks.listed("features", features))
    if data.matrix is not None and data.matrix.shape[1] != len(names):
        checks.refuse("features", f"name each of the {data.matrix.shape[1]} numbers of an input", f"{len(names)} names")
    return names
