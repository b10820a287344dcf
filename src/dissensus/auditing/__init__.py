"""Is an ensemble's diversity real? Bring any ensemble's outputs, get figures and a verdict."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dissensus import checks
from dissensus.auditing.detection import roc_area
from dissensus.auditing.estimators import estimated
from dissensus.auditing.evidence import LIMITS, Evidence, Limits, Subject
from dissensus.auditing.inputs import prepared
from dissensus.auditing.judging import Judgement, judged
from dissensus.auditing.measuring import Figure, by_member, measured
from dissensus.auditing.record import Audit
from dissensus.auditing.streaming import Members, Outputs, as_tensor
from dissensus.auditing.tallying import Kind, Tally, tallied
from dissensus.axes import Pool

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

_LOSSES = {"classification": ("cross_entropy", "brier", "zero_one"), "regression": ("mse",)}


def audit(
    outputs: Outputs,
    targets: Any,
    *,
    task: Literal["classification", "regression"],
    kind: Literal["logits", "probabilities", "labels"] | None = None,
    classes: Any = None,
    loss: str | None = None,
    pool: Pool | None = None,
    train: tuple[Outputs, Any] | None = None,
    in_bag: Any = None,
    reference: Outputs | None = None,
    ood: Outputs | None = None,
    groups: Any = None,
    limits: Limits = LIMITS,
    seed: int = 0,
) -> Audit:
    """Judge an ensemble by its members' outputs, wherever they come from.

    Outputs are read once, in slices: memory does not grow with the number of examples, so they may lie in memory maps.

    Args:
        outputs: Members' outputs ``[M, N, C]`` on test data (``[M, N]`` for one output or for labels), or M arrays,
            frames or lists ``[N, C]``. A single frame has examples in rows and one column per member; it holds labels,
            or values for targets ``[N]``. Rows count by their position, not by a frame's index.
        targets: Labels ``[N]``, or values ``[N]`` or ``[N, C]`` for regression.
        task: ``"classification"`` or ``"regression"``.
        kind: What outputs of a classifier are: ``"logits"``, ``"probabilities"`` or ``"labels"`` (hard votes, whole
            numbers or names). Never guessed.
        classes: The label of every column, in the columns' order, as ``estimator.classes_``. Without it, whole numbers
            are columns (0 to C − 1), and names stand for the columns that frames give them, or else for columns in
            sorted order. With ``kind="labels"`` the default is all labels that occur, sorted.
        loss: ``"cross_entropy"`` (default), ``"brier"`` or ``"zero_one"`` (default for labels); ``"mse"`` for
            regression.
        pool: How the ensemble predicts: ``"probability"`` (default), ``"score"`` or ``"vote"`` (default for labels);
            ``"score"`` for regression. ``"vote"`` goes with ``"zero_one"``.
        train: ``(outputs, targets)`` on training data: were members trained on their own loss?
        in_bag: Which examples of `train` each member was trained on: ``"all"``, or a mask ``[M, N]`` (bagging, shards,
            folds). Members overstate what they say on data that they have not seen, so without this less is tested.
        reference: Outputs of an ensemble of the same build, trained independently, on the same examples.
        ood: Outputs on shifted data: what is disagreement worth for detection?
        groups: What belongs together, ``[N]`` (patients, images, series): resampled whole. Each image of dense outputs
            is a group by itself.
        limits: Where the rules draw their lines.
        seed: Of the bootstrap.

    >>> import torch
    >>> truth = torch.linspace(-1, 1, 200)
    >>> shifts = torch.tensor([-3.0, -1.0, 4.0]).unsqueeze(1)
    >>> audit(truth + shifts, truth + 0.1, task="regression").verdict
    'collusive'
    """
    checks.one_of("task", task, tuple(_LOSSES))
    if task == "classification" and kind not in ("logits", "probabilities", "labels"):
        wanted = "be 'logits' or 'probabilities', or 'labels' for hard votes"
        checks.refuse("kind", wanted, repr(kind), "It is not guessed from values.")
    if task == "regression" and kind is not None:
        checks.refuse("kind", "be left out for regression", repr(kind))
    outputs, targets, train, reference, ood = prepared(
        outputs, targets, train, reference, ood, task=task, kind=kind, classes=classes
    )
    stated = kind or "values"
    if kind == "labels":
        loss, pool = loss or "zero_one", pool or "vote"
        checks.one_of("loss", loss, ("zero_one", "brier"))  # a vote for a wrong class has no finite likelihood
        checks.one_of("pool", pool, ("vote", "probability"))
        kind = "probabilities"
    loss = loss or _LOSSES[task][0]
    checks.one_of("loss", loss, _LOSSES[task])
    pool = pool or ("score" if task == "regression" else "probability")
    checks.one_of("pool", pool, ("score",) if task == "regression" else ("probability", "score", "vote"))
    if pool == "vote" and loss != "zero_one":
        checks.refuse("loss", "be 'zero_one' for pool 'vote'", repr(loss))
    known: Kind = kind if kind is not None else "values"
    told: dict[str, Any] = {"kind": known, "loss": loss, "pool": pool}

    def seen(some: Outputs, wanted: Any, name: str, grouped: Any = None, bag: Any = None) -> Tally:
        members = Members(some, name, exact=task == "regression")
        if kind is not None:
            members.check_classes()
        checked = None if wanted is None else _targets(wanted, members, task, name)
        extra = {"groups": _groups(grouped, members), "in_bag": _in_bag(bag, members) if name == "train" else None}
        return tallied(members, checked, keep_scores=ood is not None, **extra, **told)

    test = seen(outputs, targets, "outputs", groups)
    if train is None and in_bag is not None:
        checks.refuse("in_bag", "come with `train`", "no `train`", "Give train=(outputs, targets).")
    on_train = None if train is None else seen(*train, "train", bag=in_bag)
    if on_train is not None and (on_train.members, on_train.width) != (test.members, test.width):
        wanted = f"have {test.members} members and {test.width} outputs, as `outputs` has"
        checks.refuse("train", wanted, f"{on_train.members} members and {on_train.width} outputs")
    on_reference = None if reference is None else seen(reference, targets, "reference", groups)
    figures = measured(test, seed)
    of_train = None if on_train is None else measured(on_train, seed)
    of_reference = None if on_reference is None else measured(on_reference, seed)
    detection: dict[str, Figure] = {}
    if ood is not None:
        shifted = seen(ood, None, "ood")
        if shifted.width != test.width:
            checks.refuse("ood", f"have {test.width} outputs, as `outputs` has", shifted.width)
        detection = {name: roc_area(values, shifted.scores[name]) for name, values in test.scores.items()}
    seen_all = isinstance(in_bag, str)
    judgement = judged(Subject(test, on_train, on_reference, in_bag is not None, seen_all), limits)
    facts = {"members": test.members, "examples": test.examples, "outputs": test.width, "task": task, **told}
    facts["kind"] = stated
    return Audit(judgement, figures, of_train, of_reference, detection, by_member(test), facts)


def audit_estimator(
    model: Any,
    X: Any,
    y: Any,
    *,
    train: tuple[Any, Any] | None = None,
    reference: Any = None,
    ood: Any = None,
    task: Literal["classification", "regression"] | None = None,
    kind: Literal["logits", "probabilities", "labels"] | None = None,
    pool: Pool | None = None,
    classes: Any = None,
    staged: bool = False,
    **settings: Any,
) -> Audit:
    """Judge a fitted model by its members' outputs on data; outputs are computed here.

    The pooled outputs are compared with the model's own prediction: ``audit.facts["matches_own_prediction"]`` is True,
    or a sentence that tells the difference, which `Audit.summary` and `Audit.page` show as well. Members that are given
    as a list, as a callable or as a dissensus Ensemble have no prediction but the pooled one.

    Args:
        model: A fitted scikit-learn ensemble (forests, bagging, voting, stacking, AdaBoost, calibrated classifiers),
            alone, at the end of a pipeline or in a search; a list or dictionary of fitted estimators, torch modules or
            callables, each of them a member; one module or callable that returns ``[M, N, C]``; or an Ensemble.
        X: Inputs of the test data, as the model takes them.
        y: Labels ``[N]``, or values ``[N]`` or ``[N, C]`` for regression.
        train: ``(X, y)`` of the training data.
        reference: A model of independently trained members, or their outputs on ``X``. An Ensemble that was trained
            with a twin has it as its reference.
        ood: Inputs of shifted data.
        task: ``"classification"`` or ``"regression"``, for a model that is no scikit-learn estimator.
        kind: What callables and modules return (Ensembles: logits). Of estimators it chooses what is read:
            ``"probabilities"`` (the default where all members have ``predict_proba``) or ``"labels"``.
        pool: As for `audit`; the default is what fits ``kind``.
        classes: The label of every column, where the model does not know it or ``y`` has more classes than the model.
        staged: Take the predictions after each stage of a boosted model as its members. A boosted model adds up its
            stages and has no other members, so it is refused without this.
        settings: The other settings of `audit`: ``in_bag``, ``loss``, ``groups``, ``limits``, ``seed``. Where the model
            knows which training examples its members were fitted to, `in_bag` need not be given.

    >>> import numpy as np
    >>> X, y = np.arange(40.0), np.arange(40.0)
    >>> audit_estimator([lambda x: x + 3, lambda x: x - 1, lambda x: x - 2], X, y, task="regression").verdict
    'collusive'
    """
    found = estimated(
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
    result = audit(found.outputs, found.targets, **(found.settings | settings))
    return replace(result, facts=result.facts | found.facts)


def _groups(groups: Any, members: Members) -> Tensor | None:
    """Groups as whole numbers, one for each example or image."""
    if groups is None:
        return None
    names = np.asarray(groups.detach().cpu() if isinstance(groups, Tensor) else groups)
    if names.dtype == object:
        names = names.astype(str)
    if names.ndim != 1 or len(names) != members.images:
        checks.refuse("groups", f"hold N={members.images} names, one for each example", checks.shape_text(names.shape))
    return torch.from_numpy(np.unique(names, return_inverse=True)[1])


def _in_bag(in_bag: Any, members: Members) -> Tensor:
    """A mask ``[M, N]`` (``[1, N]`` where all members have seen the same) of the examples that members were trained on.

    Without one, everything is counted as seen; `judged` knows that this was not said.
    """
    if in_bag is None or (isinstance(in_bag, str) and in_bag == "all"):
        return torch.ones(1, members.images)
    mask = as_tensor(in_bag, "in_bag") if not isinstance(in_bag, str) else None
    shape = (members.members, members.images)
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
        checks.refuse("in_bag", "leave every member some example", f"none for member {int(mask.sum(1).argmin())}")
    return mask.float()


def _targets(targets: Any, members: Members, task: str, name: str) -> Tensor:
    found = as_tensor(targets, "targets", "Names of classes? Use numpy.unique(targets, return_inverse=True)[1].")
    if found.is_floating_point() and not bool(found.isfinite().all()):
        where = int((~found.isfinite()).flatten().nonzero()[0])
        checks.refuse("targets", "be finite", f"NaN or infinity at place {where}", "Leave such examples out.")
    if members.grid:
        found = _flat(found, members, task, name)
    if found.ndim == 0 or len(found) != members.examples:
        swapped = found.ndim in (1, 2) and len(found) == members.members
        fix = f"Are examples before members? Use numpy.swapaxes({name}, 0, 1)." if swapped else ""
        got = len(found) if found.ndim else "a single number"
        checks.refuse("targets", f"hold N={members.examples} examples, as `{name}` does", got, fix)
    if task == "regression":
        if found.ndim > 2 or found[0].numel() != members.width:
            wanted = "[N]" if members.width == 1 else f"[N, {members.width}]"
            checks.refuse("targets", f"have shape {wanted}, as `{name}` has", checks.shape_text(found.shape))
        return found.to(members.dtype)
    if found.ndim != 1 or found.is_floating_point():
        fix = "Use targets.astype(int)."
        if found.ndim == 2:
            fix = "A column? Use targets[:, 0]." if found.shape[1] == 1 else "One-hot? Use targets.argmax(-1)."
        got = f"{checks.shape_text(found.shape)} {str(found.dtype).removeprefix('torch.')}"
        checks.refuse("targets", "be labels [N], whole numbers", got, fix)
    found = found.long()
    if int(found.min()) < 0 or int(found.max()) >= members.width:
        got = f"{int(found.min())} to {int(found.max())}"
        fix = "Do labels begin at 1? Use targets - 1." if int(found.min()) == 1 else ""
        checks.refuse("targets", f"lie between 0 and {members.width - 1}", got, fix)
    return found


def _flat(targets: Tensor, members: Members, task: str, name: str) -> Tensor:
    """Targets of dense outputs with one row for each pixel, as `Members` reads them."""
    labels, values = (members.images, *members.grid), (members.images, members.width, *members.grid)
    shape = tuple(targets.shape)
    if task == "regression" and shape == values:
        return targets.movedim(1, -1).reshape(-1, members.width)
    if shape != labels:
        wanted = values if task == "regression" and members.width > 1 else labels
        fix = "One-hot? Use targets.argmax(1)." if shape == values else ""
        checks.refuse(
            "targets",
            f"have shape {checks.shape_text(wanted)}, one for each pixel of `{name}`",
            checks.shape_text(shape),
            fix,
        )
    return targets.reshape(-1)
