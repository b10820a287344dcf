"""`fit`: train all members of an ensemble as one computation."""

import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from dissensus import checks
from dissensus.axes import LossParts, Objective
from dissensus.data.batches import Batches, Source, TensorBatches, batches, split
from dissensus.ensemble import Ensemble
from dissensus.randomness import derived_seed
from dissensus.train import optim, schedules
from dissensus.train.history import History, OnProgress, Progress, TrainingDiverged
from dissensus.train.stopping import Watch

log = logging.getLogger("dissensus")

Augment = Callable[[Tensor, torch.Generator], Tensor]
Metric = Callable[[Tensor, Tensor], Tensor | float]

_AUGMENT = 0xA06
_SECONDS_BETWEEN_REPORTS = 0.1


def fit(
    ensemble: Ensemble,
    data: Source,
    objective: Objective,
    *,
    epochs: int,
    batch_size: int = 128,
    lr: optim.PerMember = 1e-3,
    optimizer: str = "adamw",
    momentum: optim.PerMember = 0.0,
    nesterov: bool = False,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: optim.PerMember = 0.0,
    schedule: str | schedules.Schedule = "constant",
    clip_norm: optim.PerMember | None = None,
    frozen: Iterable[int] = (),
    validation: tuple[Tensor, Tensor] | float | None = None,
    metric: Metric | None = None,
    watch: Literal["ensemble", "member"] = "ensemble",
    patience: int | None = None,
    min_delta: float = 0.0,
    augment: Augment | None = None,
    precision: Literal["float32", "bf16"] | None = None,
    shuffle: bool = True,
    drop_last: bool = False,
    progress: OnProgress | None = None,
    seed: int = 0,
) -> History:
    """Train an ensemble in place and return the record of it.

    All members see the same batches and take one stacked step. With an objective that has no interaction, that is what
    M separate trainings would do, step for step.

    Args:
        ensemble: Trained where it is (``ensemble.to("cuda")`` first for a GPU). Left in its mode (train or eval).
        data: ``(x, y)`` tensors, moved to the device whole; a ``Dataset``; or a ``DataLoader``, whose own order stands.
        objective: ``(outputs [M, B, C], targets) -> LossParts``; bind hyperparameters with ``functools.partial``.
        epochs: Passes over the data.
        batch_size: Examples per step; the last batch of an epoch may be smaller.
        lr: Learning rate, or one per member; so are ``momentum``, ``weight_decay`` and ``clip_norm``.
        optimizer: ``"sgd"``, ``"adam"`` or ``"adamw"``, each equal to ``torch.optim``'s.
        momentum: SGD's.
        nesterov: SGD's.
        betas: Adam's.
        eps: Adam's.
        weight_decay: L2 penalty, or decoupled decay in AdamW.
        schedule: ``"constant"``, ``"cosine"`` or one of `dissensus.train.schedules`.
        clip_norm: Largest norm of a member's gradient.
        frozen: Members that take no step: weights, moments and batch-norm statistics stay as they are.
        validation: ``(x, y)``, or the fraction of tensor data to split off (by the seed). The best epoch's weights are
            kept at the end.
        metric: ``(outputs [M, N, C], targets) -> `` a number, or one per member; lower is better. By default the
            objective's ``ensemble`` part (or its total), and its ``member_loss`` with ``watch="member"``.
        watch: Whose metric decides: the ensemble's, or each member's own (each then stops and is kept on its own).
        patience: Stop after so many epochs without an improvement by more than ``min_delta``.
        min_delta: See ``patience``.
        augment: ``(x, generator) -> x`` on each training batch, on the device, seeded by (seed, step).
        precision: ``"bf16"`` runs networks under autocast; the objective always sees float32.
        shuffle: A new order every epoch, from (seed, epoch).
        drop_last: Leave out a smaller last batch.
        progress: Called with a `Progress` about ten times a second and at epoch ends.
        seed: Determines data order, the validation split, dropout and augmentation.

    Raises:
        TrainingDiverged: NaN or infinity in the loss or a gradient. It names step, part and members; the ensemble keeps
            the weights from before that step.
    """
    for name, value in (("epochs", epochs), ("batch_size", batch_size)):
        checks.count(name, value)
    checks.count("seed", seed, 0)
    checks.one_of("optimizer", optimizer, optim.OPTIMIZERS)
    checks.one_of("watch", watch, ("ensemble", "member"))
    device = ensemble.device
    data, validation = _separated(data, validation, seed)
    if patience is not None:
        checks.count("patience", patience)
        if validation is None:
            checks.refuse("patience", "come with `validation` data to judge by", patience, "Pass validation=0.2.")
    loader = batches(data, batch_size=batch_size, seed=seed, device=device, shuffle=shuffle, drop_last=drop_last)
    body, members = ensemble.body, ensemble.members
    body.set_keys(seed, ensemble.member_ids)
    flat = body.packed()

    def column(name: str, value: optim.PerMember, low: float = 0.0) -> Tensor:
        return optim.column(name, value, members, flat, low)

    decay = column("weight_decay", weight_decay)
    settings = optim.Settings(
        lr=column("lr", lr), weight_decay=decay, momentum=column("momentum", momentum), beta1=column("betas", betas[0]),
        beta2=column("betas", betas[1]), eps=checks.number("eps", eps, 0), nesterov=nesterov,
        decays=bool((decay != 0).any()),
    )  # fmt: skip
    training = _Training(
        ensemble=ensemble,
        flat=flat.requires_grad_(),
        objective=objective,
        update=optim.OPTIMIZERS[optimizer],
        settings=settings,
        state=optim.fresh_state(optimizer, flat.detach(), settings.momentum),
        limit=None if clip_norm is None else column("clip_norm", clip_norm),
        active=_active(frozen, members, device),
        augment=augment,
        autocast=_autocast(precision, device),
        seed=seed,
        total_steps=epochs * len(loader),
        epochs=epochs,
        progress=progress,
    )
    best = None
    if validation is not None:
        validation = (validation[0].to(device), validation[1].to(device))
        best = Watch(body, flat, per_member=watch == "member", patience=patience, min_delta=min_delta)
    was_training = ensemble.training
    try:
        _run(training, loader, schedules.resolved(schedule), validation, metric, best)
    finally:
        flat.requires_grad_(False)
        ensemble.train(was_training)
        if best is not None:
            best.restore(flat)
            training.history.best_epoch = best.summary
    return training.history


@dataclass
class _Training:
    """Everything a step touches."""

    ensemble: Ensemble
    flat: Tensor
    objective: Objective
    update: optim.Update
    settings: optim.Settings
    state: optim.State
    limit: Tensor | None
    active: Tensor
    augment: Augment | None
    autocast: Any
    seed: int
    total_steps: int
    epochs: int
    progress: OnProgress | None
    history: History = field(default_factory=History)
    started: float = field(default_factory=time.perf_counter)
    reported: float = 0.0


def _run(
    training: _Training, loader: Batches, schedule: schedules.Schedule, validation: tuple[Tensor, Tensor] | None,
    metric: Metric | None, best: Watch | None,
) -> None:  # fmt: skip
    ensemble, history = training.ensemble, training.history
    generator = torch.Generator(training.flat.device)
    for epoch in range(training.epochs):
        ensemble.train()
        backup = {name: tensor.clone() for name, tensor in ensemble.body.state().items()}
        when = epoch + torch.arange(len(loader), dtype=training.flat.dtype) / len(loader)
        factors = schedule(when, float(training.epochs)).to(training.flat.device)
        means = _Means()
        for (x, y), factor in zip(loader.epoch(epoch), factors, strict=False):
            if training.augment is not None:
                generator.manual_seed(derived_seed(training.seed, _AUGMENT, history.steps))
                x = training.augment(x, generator)
            parts = _step(training, x, y, factor, backup, loader)
            means.add(parts, len(x))
            history.steps += 1
            _report(training, epoch, means, last=False)
        entry = {"epoch": epoch, "lr": float(factors[-1]), **means.values()}
        if validation is not None and best is not None:
            values = _validation(training, validation, metric, best.per_member)
            entry["validation"] = values.tolist() if best.per_member else float(values[0])
            if not bool(values.isfinite().all()):
                log.warning("the validation metric of epoch %d is not finite", epoch)
            training.active = best.see(epoch, values, training.flat, training.active)
        history.seconds = entry["seconds"] = time.perf_counter() - training.started
        history.epochs.append(entry)
        _report(training, epoch, means, last=True)
        if not bool(training.active.any()):
            history.stopped_early = epoch + 1 < training.epochs
            break


def _step(
    training: _Training, x: Tensor, y: Tensor, factor: Tensor, backup: dict[str, Tensor], loader: Batches
) -> LossParts:
    """One step of all members: forward, objective, backward, clip, update."""
    body, flat, active = training.ensemble.body, training.flat, training.active
    resting = not bool(active.all())
    before = {name: tensor.clone() for name, tensor in body.state().items()} if resting else {}
    with training.autocast:
        outputs = body.run(body.views(flat), x, False)  # type: ignore[arg-type]  # each body takes its own views
    if outputs.dtype in (torch.bfloat16, torch.float16):
        outputs = outputs.float()
    if training.history.steps == 0:
        _check_labels(outputs, loader.y if isinstance(loader, TensorBatches) else y)
        training.history.backend = body.ran
    parts = training.objective(outputs, y)
    (grad,) = torch.autograd.grad(parts.total, flat)
    with torch.no_grad():
        if resting:
            body.merge(body.state(), before, ~active)
            grad = torch.where(active.unsqueeze(1), grad, 0.0)
        # A sum is finite only if every entry is, and it is one number to read back.
        if not math.isfinite(float(parts.total + grad.sum())):
            _diverged(training, outputs, parts, grad, backup)
        if training.limit is not None:
            grad = optim.clipped(grad, training.limit)
        now = _with_rate(training.settings, factor)
        training.update(flat, grad, training.state, now, active.unsqueeze(1).to(flat.dtype))
    return parts


def _with_rate(settings: optim.Settings, factor: Tensor) -> optim.Settings:
    return optim.Settings(**{**vars(settings), "lr": settings.lr * factor})


def _diverged(training: _Training, outputs: Tensor, parts: LossParts, grad: Tensor, backup: dict[str, Tensor]) -> None:
    """Put spoilt statistics back, and raise the error that names step, part and members."""
    body = training.ensemble.body
    own = body.state()
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                tensor.copy_(backup[name])
    spoilt = {"the outputs": ~outputs.isfinite().flatten(1).all(1)}
    spoilt |= {f"`{name}`": ~part.isfinite() for name, part in parts.parts.items() if part.ndim == 1}
    spoilt |= {"the gradient": ~grad.isfinite().all(1)}
    scalars = [f"`{name}`" for name, part in parts.parts.items() if part.ndim == 0 and not bool(part.isfinite())]
    for name, members in spoilt.items():
        if bool(members.any()):
            chosen = members.nonzero().flatten().tolist()
            raise TrainingDiverged(training.history.steps, name, chosen, training.history)
    raise TrainingDiverged(training.history.steps, (scalars or ["the total"])[0], [], training.history)


def _validation(training: _Training, data: tuple[Tensor, Tensor], metric: Metric | None, per_member: bool) -> Tensor:
    """The watched metric on validation data: ``[1]``, or ``[M]``."""
    x, y = data
    with training.autocast:
        outputs = (
            training.ensemble.predict(x).float()
            if training.flat.dtype != torch.float64
            else training.ensemble.predict(x)
        )
    with torch.no_grad():
        if metric is not None:
            values = torch.as_tensor(metric(outputs, y))
        else:
            parts = training.objective(outputs, y)
            values = parts.parts.get("member_loss") if per_member else parts.parts.get("ensemble", parts.total)
    wanted = (training.ensemble.members,) if per_member else ()
    if values is None or tuple(values.shape) != wanted:
        got = "none" if values is None else list(values.shape)
        checks.refuse("metric", f"give {'one number per member' if per_member else 'one number'}", got)
    return values.detach().reshape(-1).cpu()


class _Means:
    """Means of an epoch's losses over examples, gathered on the device."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.examples = 0

    def add(self, parts: LossParts, examples: int) -> None:
        self.examples += examples
        for name, value in (("loss", parts.total), *parts.parts.items()):
            held = self.sums.get(name)
            value = value.detach()
            self.sums[name] = value * examples if held is None else held.add_(value, alpha=examples)

    def values(self) -> dict[str, Any]:
        return {name: (total / self.examples).tolist() for name, total in self.sums.items()}


def _report(training: _Training, epoch: int, means: _Means, *, last: bool) -> None:
    now = time.perf_counter()
    if training.progress is None or (not last and now - training.reported < _SECONDS_BETWEEN_REPORTS):
        return
    training.reported = now
    values = means.values()
    members = values.pop("member_loss", [])
    scalars = {name: value for name, value in values.items() if isinstance(value, float) and name != "loss"}
    training.progress(
        Progress(
            epoch=epoch + 1, epochs=training.epochs, step=training.history.steps, steps=training.total_steps,
            loss=values["loss"], parts=scalars, member_loss=members, seconds=now - training.started,
        )
    )  # fmt: skip


def _separated(
    data: Source, validation: tuple[Tensor, Tensor] | float | None, seed: int
) -> tuple[Source, tuple[Tensor, Tensor] | None]:
    if not isinstance(validation, float):
        if validation is not None and (not isinstance(validation, tuple | list) or len(validation) != 2):
            checks.refuse("validation", "be (x, y), or a fraction between 0 and 1", repr(validation))
        return data, validation
    if not isinstance(data, tuple | list):
        checks.refuse("validation", "be (x, y) when data is no pair of tensors", validation)
    return split(data[0], data[1], validation, seed)


def _active(frozen: Iterable[int], members: int, device: torch.device) -> Tensor:
    active = torch.ones(members, dtype=torch.bool)
    for index in frozen:
        if not -members <= index < members:
            checks.refuse("frozen", f"name members 0 to {members - 1}", index)
        active[index] = False
    if not bool(active.any()):
        checks.refuse("frozen", "leave at least one member to train", "all of them")
    return active.to(device)


def _autocast(precision: str | None, device: torch.device) -> Any:
    if precision in (None, "float32"):
        return nullcontext()
    if precision != "bf16":
        checks.refuse("precision", "be 'float32' or 'bf16'", repr(precision), "fp16 needs loss scaling; bf16 does not.")
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        checks.refuse("precision", "be 'float32' on this GPU, which has no bf16", "'bf16'")
    return torch.autocast(device.type, dtype=torch.bfloat16)


def _check_labels(outputs: Tensor, y: Tensor) -> None:
    """Class labels must lie within the outputs: one look at all of them, at the first step."""
    if y.is_floating_point() or y.ndim != 1 or outputs.ndim != 3:
        return
    classes, low, high = outputs.shape[-1], int(y.min()), int(y.max())
    if low < 0 or high >= classes:
        given = f"labels from {low} to {high}"
        checks.refuse("targets", f"lie between 0 and {classes - 1}, since members have {classes} outputs", given)
