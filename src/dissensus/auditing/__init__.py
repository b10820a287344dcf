"""Is an ensemble's diversity real? Bring any ensemble's outputs, get figures and a verdict."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dissensus import checks, losses
from dissensus.auditing.detection import DETECTORS, roc_area
from dissensus.auditing.estimators import read_model
from dissensus.auditing.evidence import Audited, Evidence, TallyTests
from dissensus.auditing.examples import Kind
from dissensus.auditing.inputs import AuditData, prepare, with_classes_third, without_ignored
from dissensus.auditing.judging import Judgement, judge
from dissensus.auditing.limits import LIMITS, Limits, check_limits
from dissensus.auditing.measuring import Figure, by_member, measure
from dissensus.auditing.probabilistic import ProbabilisticLoss, as_label_columns, as_label_targets
from dissensus.auditing.record import Audit
from dissensus.auditing.streaming import OutputReader, Outputs, as_tensor
from dissensus.auditing.tallying import AuditTally, tally_outputs
from dissensus.axes import PerExampleLoss, Pool
from dissensus.scores import REGRESSION_SCORES, Score, select

__all__ = [
    "LIMITS",
    "Audit",
    "Evidence",
    "Figure",
    "Judgement",
    "Limits",
    "audit",
    "audit_estimator",
    "roc_area",
]

_LOSSES = {
    "classification": ("cross_entropy", "brier", "zero_one"),
    "multilabel": ("bce", "brier", "zero_one"),
    "regression": ("mse", "squared_error", "gaussian_nll", "quantile", "poisson"),
}
_OF_GAUSSIANS = ("epistemic_variance", "aleatoric_variance", "total_variance")
_OF_QUANTILES = ("quantile_variance", "interval_width")


def audit(
    outputs: Outputs,
    targets: Any,
    *,
    task: Literal["classification", "multilabel", "regression"],
    kind: Literal["logits", "probabilities", "labels"] | None = None,
    classes: Any = None,
    loss: str | PerExampleLoss | None = None,
    pool: Pool | None = None,
    train: tuple[Outputs, Any] | None = None,
    in_bag: Any = None,
    reference: Outputs | None = None,
    ood: Outputs | None = None,
    groups: Any = None,
    class_axis: int | None = None,
    ignore_index: int | None = None,
    scores: Mapping[str, Score | Callable[..., Any]] | None = None,
    limits: Limits = LIMITS,
    seed: int = 0,
) -> Audit:
    """Judge an ensemble by its members' outputs, whatever framework they come from.

    Outputs are read once, in slices. Memory does not grow with the number of examples, so they may be memory maps.

    Args:
        outputs: Members' outputs ``[M, N, C]`` on test data (``[M, N]`` for one output or for labels), or M arrays,
            frames or lists ``[N, C]``. A single frame has examples in rows and one column per member; it holds labels,
            or values for targets ``[N]``. Rows count by their position, not by a frame's index. Dense outputs are
            ``[M, N, C, *S]``, with targets ``[N, *S]``.
        targets: Labels ``[N]``; 0 and 1 for every label, ``[N, L]``, for ``"multilabel"``; or values ``[N]`` or
            ``[N, C]`` for regression.
        task: ``"classification"``, ``"regression"``, or ``"multilabel"`` for labels that do not exclude each other.
            Outputs are ``[M, N, L]`` then, log-odds or probabilities of labels, and every label of an example counts as
            a question with two answers.
        kind: Kind of a classifier's outputs: ``"logits"``, ``"probabilities"`` or ``"labels"`` (hard votes, whole
            numbers or names). It is never guessed.
        classes: The label of every column, in the columns' order, as ``estimator.classes_``. Without it, whole numbers
            are columns (0 to C − 1), and names stand for the columns that frames give them, or else for columns in
            sorted order. With ``kind="labels"`` the default is all labels that occur, sorted.
        loss: ``"cross_entropy"`` (default), ``"brier"`` or ``"zero_one"`` (default for labels); ``"bce"`` (default),
            ``"brier"`` or ``"zero_one"`` for several labels. For regression ``"mse"`` (default), ``"squared_error"``
            (the sum over outputs), or the loss of outputs that predict a distribution: ``"gaussian_nll"``,
            ``"quantile"`` or ``"poisson"``, as a name or as a partial with its settings
            (``partial(losses.quantile, levels=...)``). Such a loss is decomposed, and the tests compare members by the
            squared error of what they predict as value: means, medians, rates.
        pool: How the ensemble predicts: ``"probability"`` (default), ``"score"`` or ``"vote"`` (default for labels);
            for regression the first pool of the loss in `dissensus.losses.LOSSES`: ``"score"``, but ``"probability"``
            for ``"gaussian_nll"``, the mixture of members' densities. ``"vote"`` goes with ``"zero_one"``.
        train: ``(outputs, targets)`` on training data, which tell whether members were trained on their own loss.
        in_bag: Which examples of `train` each member was trained on: ``"all"``, or a mask ``[M, N]`` (bagging, shards,
            folds). Outputs on data that a member was not trained on are too large, so without this less is tested.
        reference: Outputs of an ensemble of the same build, trained independently, on the same examples.
        ood: Outputs on shifted data, for how well scores detect it.
        groups: Names of groups, ``[N]`` (patients, images, series), which are resampled whole. Each image of dense
            outputs is a group by itself.
        class_axis: Axis of the classes of dense outputs, 2 by default; -1 for language models, ``[M, N, T, V]``. All
            outputs have the same axes.
        ignore_index: Label of positions, or of examples, that do not count, such as -100.
        scores: Scores for `ood` by name: functions ``[M, B, C] -> [B]`` of probabilities, or of values for regression,
            or entries of `dissensus.scores.SCORES`. The default is five scores of disagreement and uncertainty for
            classification, and the variance for regression.
        limits: Lines and levels of the rules.
        seed: Seed of the bootstrap.

    >>> import torch
    >>> truth = torch.linspace(-1, 1, 200)
    >>> shifts = torch.tensor([-3.0, -1.0, 4.0]).unsqueeze(1)
    >>> audit(truth + shifts, truth + 0.1, task="regression").verdict
    'collusive'
    """
    checks.one_of("task", task, tuple(_LOSSES))
    kinds = {"classification": ("logits", "probabilities", "labels"), "multilabel": ("logits", "probabilities")}
    if task != "regression" and kind not in kinds[task]:
        wanted = "be 'logits' or 'probabilities'" + (", or 'labels' for hard votes" if task == "classification" else "")
        checks.refuse("kind", wanted, repr(kind), "It is not guessed from values.")
    if task == "regression" and kind is not None:
        checks.refuse("kind", "be left out for regression", repr(kind))
    check_limits(limits)
    seed = _as_seed(seed)
    if scores is not None and ood is None:
        checks.refuse("scores", "come with `ood`", "no `ood`", "Give outputs on shifted data, ood=outputs.")
    setting, probabilistic = _setting(task, kind, loss, pool)
    if class_axis is not None:
        outputs, train, reference, ood = _with_classes_third(class_axis, kind, outputs, train, reference, ood)
    counted = counted_in_train = None
    if ignore_index is not None:
        if task == "regression":
            checks.refuse("ignore_index", "be left out for regression", ignore_index)
        if task == "multilabel":
            targets = as_label_targets(targets, ignore_index)
        targets, counted = without_ignored(targets, ignore_index)
        if train is not None and isinstance(train, tuple | list) and len(train) == 2:
            train_targets, counted_in_train = without_ignored(train[1], ignore_index, "train")
            train = train[0], train_targets
    data = prepare(outputs, targets, train, reference, ood, task=task, kind=kind, classes=classes)
    labels = None
    if task == "multilabel":
        assert kind is not None
        data = _two_classes_each(data, kind)
        labels = data.targets.shape[1]
    detectors = None if ood is None else _detectors(scores, setting["kind"], probabilistic)

    def tally(
        members: Outputs, labels: Any, name: str, grouped: Any = None, bag: Any = None, mask_of: Any = None
    ) -> AuditTally:
        reader = OutputReader(members, name, exact=task == "regression")
        if task == "classification":
            reader.check_classes()
        width = reader.width if probabilistic is None else probabilistic.targets(reader.width, name)
        checked = None if labels is None else checked_targets(labels, reader, task, name, width)
        if checked is not None and probabilistic is not None:
            losses.check_targets(probabilistic.loss, checked)
        mask = _in_bag(bag, reader) if name == "train" else None
        unit_names = _groups(grouped, reader)
        rows = None if mask_of is None else torch.from_numpy(mask_of)
        tallied = tally_outputs(
            reader,
            checked,
            scores=detectors,
            groups=unit_names,
            in_bag=mask,
            counted=rows,
            probabilistic=probabilistic,
            **setting,
        )
        return replace(tallied, scores=_by_image(tallied.scores, reader, rows)) if reader.grid else tallied

    test = tally(data.outputs, data.targets, "outputs", groups, mask_of=counted)
    if data.train is None and in_bag is not None:
        checks.refuse("in_bag", "come with `train`", "no `train`", "Give train=(outputs, targets).")
    on_train = None if data.train is None else tally(*data.train, "train", bag=in_bag, mask_of=counted_in_train)
    if on_train is not None and (on_train.members, on_train.width) != (test.members, test.width):
        wanted = f"have {test.members} members and {test.width} outputs, as `outputs` has"
        checks.refuse("train", wanted, f"{on_train.members} members and {on_train.width} outputs")
    on_reference = None
    if data.reference is not None:
        on_reference = tally(data.reference, data.targets, "reference", groups, mask_of=counted)
    detection: dict[str, Figure] = {}
    if data.ood is not None:
        shifted = tally(data.ood, None, "ood")
        if shifted.width != test.width:
            checks.refuse("ood", f"have {test.width} outputs, as `outputs` has", shifted.width)
        detection = {name: roc_area(values, shifted.scores[name]) for name, values in test.scores.items()}
    audited = Audited(
        TallyTests(test, limits),
        None if on_train is None else TallyTests(on_train, limits),
        None if on_reference is None else TallyTests(on_reference, limits),
        in_bag_known=in_bag is not None,
        trained_on_all=isinstance(in_bag, str),
    )
    facts = {"members": test.members, "examples": test.examples, "outputs": test.width, "task": task, **setting}
    facts["kind"] = kind or "values"
    if labels is not None:
        bce = {"loss": "bce"} if setting["loss"] == "cross_entropy" else {}
        facts |= {"labels": labels, **bce}
    if probabilistic is not None:
        facts |= {"kind": probabilistic.takes, "basis": probabilistic.basis}
        if probabilistic.nominal_coverage is not None:
            facts["nominal_coverage"] = probabilistic.nominal_coverage
    return Audit(
        judge(audited),
        measure(test, seed),
        None if on_train is None else measure(on_train, seed),
        None if on_reference is None else measure(on_reference, seed),
        detection,
        by_member(test),
        facts,
    )


def _with_classes_third(
    class_axis: int, kind: str | None, outputs: Outputs, train: Any, reference: Outputs | None, ood: Outputs | None
) -> tuple[Outputs, Any, Outputs | None, Outputs | None]:
    """All outputs with the classes at the third axis."""
    if isinstance(class_axis, bool) or not isinstance(class_axis, int) or kind == "labels":
        got = "kind='labels', which has no axis of classes" if kind == "labels" else repr(class_axis)
        checks.refuse("class_axis", "be the number of an axis of dense outputs", got)
    moved = [
        None if part is None else with_classes_third(part, class_axis, name)
        for name, part in (("outputs", outputs), ("reference", reference), ("ood", ood))
    ]
    if isinstance(train, tuple | list) and len(train) == 2:
        train = with_classes_third(train[0], class_axis, "train"), train[1]
    return moved[0], train, moved[1], moved[2]


def _by_image(scores: dict[str, Tensor], reader: OutputReader, counted: Tensor | None) -> dict[str, Tensor]:
    """The mean score of every image that has pixels which count: pixels of an image are not independent."""
    image = torch.arange(reader.examples) // reader.pixels
    image = image if counted is None else image[counted]
    size = torch.bincount(image, minlength=reader.images)
    return {
        name: (torch.bincount(image, values.double(), minlength=reader.images)[size > 0] / size[size > 0]).float()
        for name, values in scores.items()
    }


def _two_classes_each(data: AuditData, kind: str) -> AuditData:
    """Outputs of labels as two classes for every label, which are read as dense outputs."""
    return AuditData(
        as_label_columns(data.outputs, kind, "outputs"),
        as_label_targets(data.targets, None),
        None
        if data.train is None
        else (as_label_columns(data.train[0], kind, "train"), as_label_targets(data.train[1], None)),
        None if data.reference is None else as_label_columns(data.reference, kind, "reference"),
        None if data.ood is None else as_label_columns(data.ood, kind, "ood"),
    )


def _loss_name(task: str, loss: str | PerExampleLoss | None) -> str:
    """The name of the loss; the default of the task where none is given, and an error for others."""
    if loss is None:
        return _LOSSES[task][0]
    name = losses.name_of(loss)
    checks.one_of("loss", loss if name is None and isinstance(loss, str) else name or "a function", _LOSSES[task])
    return str(name)


def _setting(
    task: str, kind: str | None, loss: str | PerExampleLoss | None, pool: Pool | None
) -> tuple[dict[str, Any], ProbabilisticLoss | None]:
    """Kind, loss and pool of the tallies, with their defaults, and the loss of distributions. Votes are probabilities
    of 0 and 1."""
    if task == "regression":
        name = _loss_name(task, loss)
        probabilistic = ProbabilisticLoss.of(loss or name, pool)
        if probabilistic is not None:
            return {"kind": "values", "loss": name, "pool": probabilistic.pool}, probabilistic
        checks.one_of("pool", pool or "score", ("score",))
        return {"kind": "values", "loss": name, "pool": "score"}, None
    return _class_setting(task, kind, loss, pool), None


def _class_setting(task: str, kind: str | None, loss: str | PerExampleLoss | None, pool: Pool | None) -> dict[str, Any]:
    if kind == "labels":
        loss, pool = loss or "zero_one", pool or "vote"
        checks.one_of("loss", loss, ("zero_one", "brier"))  # a vote for a wrong class has no finite likelihood
        checks.one_of("pool", pool, ("vote", "probability"))
    name = _loss_name(task, loss)
    pool = pool or "probability"
    checks.one_of("pool", pool, ("probability", "score", "vote"))
    if pool == "vote" and name != "zero_one":
        checks.refuse("loss", "be 'zero_one' for pool 'vote'", repr(name))
    tallied: Kind = "logits" if kind == "logits" else "probabilities"
    return {"kind": tallied, "loss": "cross_entropy" if name == "bce" else name, "pool": pool}


def _detectors(
    scores: Mapping[str, Score | Callable[..., Any]] | None, kind: Kind, probabilistic: ProbabilisticLoss | None
) -> dict[str, Score]:
    """Scores for detection by the names that an audit shows; empty for the variance of values."""
    takes = kind if probabilistic is None else probabilistic.takes
    if scores is not None:
        return select(scores, takes)
    defaults = {"gaussian": _OF_GAUSSIANS, "quantiles": _OF_QUANTILES}.get(takes)
    if defaults is not None and probabilistic is not None:
        settings = losses.settings_of(probabilistic.loss)  # the levels of quantiles, or the floor of variances
        known = {name: REGRESSION_SCORES[name] for name in defaults}
        return {name: replace(score, function=partial(score.function, **settings)) for name, score in known.items()}
    return {} if kind == "values" else dict(DETECTORS)


def _as_seed(seed: Any) -> int:
    """A whole number that torch takes as a seed."""
    if checks.count("seed", seed, 0) >= 2**63:
        checks.refuse("seed", "be below 2**63", repr(seed))
    return int(seed)


def audit_estimator(
    model: Any,
    X: Any,
    y: Any,
    *,
    train: tuple[Any, Any] | None = None,
    reference: Any = None,
    ood: Any = None,
    task: Literal["classification", "multilabel", "regression"] | None = None,
    kind: Literal["logits", "probabilities", "labels"] | None = None,
    pool: Pool | None = None,
    classes: Any = None,
    staged: bool = False,
    **settings: Any,
) -> Audit:
    """Judge a fitted model by its members' outputs on data, which are computed here.

    The pooled outputs are compared with the model's own prediction: ``audit.facts["matches_own_prediction"]`` is True,
    or a sentence about the difference, which `Audit.summary` and `Audit.page` show as well. A list of members, a
    callable and a dissensus Ensemble have no other prediction than the pooled one.

    Args:
        model: A fitted scikit-learn ensemble (forests, bagging, voting, stacking, AdaBoost, calibrated classifiers),
            alone, at the end of a pipeline or in a search; a list or dictionary of members, which are fitted
            estimators, torch modules or callables; one module or callable that returns ``[M, N, C]``; or an Ensemble.
        X: Inputs of the test data, as the model takes them.
        y: Labels ``[N]``, or values ``[N]`` or ``[N, C]`` for regression.
        train: ``(X, y)`` of the training data.
        reference: A model of independently trained members, or their outputs on ``X``. The default for an Ensemble that
            was trained with a twin is the twin.
        ood: Inputs of shifted data.
        task: As for `audit`, for a model that is not a scikit-learn estimator.
        kind: Kind of the outputs of callables and modules (of Ensembles: logits). For estimators it chooses the method:
            ``"probabilities"`` (the default where all members have ``predict_proba``) or ``"labels"``.
        pool: As for `audit`; the default fits ``kind``.
        classes: The label of every column, where the model does not know it or ``y`` has more classes than the model.
        staged: Take the predictions after each stage of a boosted model as its members. A boosted model adds up its
            stages and has no other members, so it is refused without this.
        settings: The other settings of `audit`: ``in_bag``, ``loss``, ``groups``, ``scores``, ``limits``, ``seed``. The
            default of `in_bag` is what the model knows about the training examples of its members.

    >>> import numpy as np
    >>> X, y = np.arange(40.0), np.arange(40.0)
    >>> audit_estimator([lambda x: x + 3, lambda x: x - 1, lambda x: x - 2], X, y, task="regression").verdict
    'collusive'
    """
    arguments = read_model(
        model,
        X,
        y,
        train=train,
        reference=reference,
        ood=ood,
        task=task,
        kind=kind,
        pool=pool,
        classes=classes,
        staged=staged,
    )
    result = audit(arguments.outputs, arguments.targets, **(arguments.settings | settings))
    return replace(result, facts=result.facts | arguments.facts)


def _groups(groups: Any, reader: OutputReader) -> Tensor | None:
    """Groups as whole numbers, one for each example or image."""
    if groups is None:
        return None
    checks.unmasked(groups, "groups")
    names = np.asarray(groups.detach().cpu() if isinstance(groups, Tensor) else groups)
    if names.dtype == object:
        names = names.astype(str)
    if names.ndim != 1 or len(names) != reader.images:
        checks.refuse("groups", f"hold N={reader.images} names, one for each example", checks.shape_text(names.shape))
    return torch.from_numpy(np.unique(names, return_inverse=True)[1])


def _in_bag(in_bag: Any, reader: OutputReader) -> Tensor:
    """A mask ``[M, N]`` of the examples that members were trained on; ``[1, N]`` where it is the same for all members.

    Without a mask, all examples count as trained on; `Audited.in_bag_known` says that this is an assumption.
    """
    if in_bag is None or (isinstance(in_bag, str) and in_bag == "all"):
        return torch.ones(1, reader.images)
    mask = as_tensor(in_bag, "in_bag") if not isinstance(in_bag, str) else None
    shape = (reader.members, reader.images)
    if mask is None or tuple(mask.shape) != shape:
        got = repr(in_bag) if mask is None else checks.shape_text(mask.shape)
        checks.refuse("in_bag", f"be 'all' or a mask {checks.shape_text(shape)}", got)
    if not bool(((mask == 0) | (mask == 1)).all()):
        checks.refuse(
            "in_bag",
            "hold 0 and 1, or False and True",
            f"{float(mask.min()):g} to {float(mask.max()):g}",
            "Counts of a bootstrap? Use counts > 0.",
        )
    if bool((mask.sum(1) == 0).any()):
        checks.refuse(
            "in_bag", "keep at least one example for every member", f"none for member {int(mask.sum(1).argmin())}"
        )
    return mask.float()


def checked_targets(targets: Any, reader: OutputReader, task: str, name: str, each: int | None = None) -> Tensor:
    """Targets as class indices ``[N]`` or values ``[N, D]``, one row for each example.

    ``each`` is the number D of real targets of an example; by default that of the outputs.
    """
    width: int = reader.width if each is None else each
    values = as_tensor(targets, "targets", "Names of classes? Use numpy.unique(targets, return_inverse=True)[1].")
    if values.is_floating_point() and not bool(values.isfinite().all()):
        where = int((~values.isfinite()).flatten().nonzero()[0])
        checks.refuse("targets", "be finite", f"NaN or infinity at position {where}", "Leave such examples out.")
    if reader.grid:
        values = _flat(values, reader, task, name, width)
    if values.ndim == 0 or len(values) != reader.examples:
        swapped = values.ndim in (1, 2) and len(values) == reader.members
        fix = f"Are examples before members? Use numpy.swapaxes({name}, 0, 1)." if swapped else ""
        got = len(values) if values.ndim else "a single number"
        checks.refuse("targets", f"hold N={reader.examples} examples, as `{name}` does", got, fix)
    if task == "regression":
        if values.ndim > 2 or values[0].numel() != width:
            wanted = "[N]" if width == 1 else f"[N, {width}]"
            columns = "" if width == reader.width else f"; its {reader.width} columns are for {width} of them"
            checks.refuse("targets", f"have shape {wanted}, as `{name}` has{columns}", checks.shape_text(values.shape))
        return values.to(reader.dtype)
    if values.ndim != 1 or values.is_floating_point():
        fix = "Use targets.astype(int)."
        if values.ndim == 2:
            fix = "A column? Use targets[:, 0]." if values.shape[1] == 1 else "One-hot? Use targets.argmax(-1)."
        got = f"{checks.shape_text(values.shape)} {str(values.dtype).removeprefix('torch.')}"
        checks.refuse("targets", "be labels [N], whole numbers", got, fix)
    values = values.long()
    if int(values.min()) < 0 or int(values.max()) >= reader.width:
        got = f"{int(values.min())} to {int(values.max())}"
        fix = "Do labels begin at 1? Use targets - 1." if int(values.min()) == 1 else ""
        checks.refuse("targets", f"lie between 0 and {reader.width - 1}", got, fix)
    return values


def _flat(targets: Tensor, reader: OutputReader, task: str, name: str, width: int) -> Tensor:
    """Targets of dense outputs with one row for each pixel, as `OutputReader` reads them."""
    labels, values = (reader.images, *reader.grid), (reader.images, width, *reader.grid)
    shape = tuple(targets.shape)
    if task == "regression" and shape == values:
        return targets.movedim(1, -1).reshape(-1, width)
    if shape != labels:
        wanted = values if task == "regression" and width > 1 else labels
        fix = "One-hot? Use targets.argmax(1)." if shape == values else ""
        checks.refuse(
            "targets",
            f"have shape {checks.shape_text(wanted)}, one for each pixel of `{name}`",
            checks.shape_text(shape),
            fix,
        )
    return targets.reshape(-1)
