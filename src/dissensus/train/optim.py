"""Optimisers on the matrix of all weights, ``[M, P]``: one update for all members, each with its own hyperparameters.

Equal to ``torch.optim``'s to rounding. Hyperparameters are columns ``[M, 1]`` on the device, in float32 at least: an
update of weights in bfloat16 is rounded where ``torch.optim`` rounds it. A member whose ``active`` entry is 0 is left
exactly as it is: weights, moments and step count.
"""

import itertools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import dissensus.train.fused_optim as fused
from dissensus import checks
from dissensus.execution.weights import Section
from dissensus.train.lowered_weights import Gradient, LoweredGradient, whole

Column = Float[Tensor, "M 1"]
Matrix = Float[Tensor, "M P"]
PerMember = float | Sequence[float] | Tensor


@dataclass(frozen=True)
class OptimizerColumns:
    """Hyperparameters of an optimiser, one row per member."""

    lr: Column
    weight_decay: Column
    momentum: Column
    betas: tuple[float, float]
    eps: float
    nesterov: bool
    decays: bool
    """Whether any weight decay is not zero, known on the host."""
    everyone: bool = False
    """Whether no row rests, known on the host: moments then need no mask."""
    decayed: Float[Tensor, "#M P"] | None = None
    """1 for weights that decay and 0 for others, one row for all members or one each; None: all weights decay."""
    matrices: "MatrixColumns | None" = None
    """Where the matrices are that Muon orthogonalises; None for other optimisers."""
    sections: tuple[Section, ...] = ()
    """The columns of every dtype, where weights have several; each is updated in its own dtype."""

    def select(self, rows: Tensor) -> "OptimizerColumns":
        """The settings of some rows."""
        shared = self.decayed is not None and len(self.decayed) == 1 < len(self.lr)
        columns = {
            name: value[rows]
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and not (shared and name == "decayed")
        }
        return replace(self, **columns)

    def of_section(self, section: Section) -> "OptimizerColumns":
        """The settings of the weights of one dtype."""
        decayed = None if self.decayed is None else self.decayed[:, section.start : section.stop]
        return replace(self, decayed=decayed, sections=())

    @property
    def decay(self) -> Float[Tensor, "M _"]:
        """The weight decay of every member, or of every weight where some do not decay."""
        return self.weight_decay if self.decayed is None else self.weight_decay * self.decayed


@dataclass(frozen=True)
class MatrixColumns:
    """The columns of all 2-D parameters, sorted by shape, and the other columns."""

    columns: Int[Tensor, " Q"]
    rest: Int[Tensor, " S"]
    shapes: tuple[tuple[int, int, int], ...]
    """``(count, height, width)`` of the matrices of each shape, in the order of `columns`."""


Moments = dict[str, Tensor]
"""The state of an optimizer, one row per member."""
Update = Callable[[Matrix, Gradient, Moments, OptimizerColumns, Column, Column | None], None]


@dataclass(frozen=True)
class Defaults:
    """The settings of a named optimiser where the user gives none."""

    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


DEFAULTS = {"lion": Defaults(lr=1e-4, betas=(0.9, 0.99)), "muon": Defaults(momentum=0.95, nesterov=True)}
"""Where they differ from `Defaults`."""


def checked_number(name: str, value: float) -> float:
    """A setting of one member that is within its range: finite, at least 0, and a momentum below 1."""
    if name == "momentum":
        return checks.number(name, value, 0, 1, open_high=True)
    return checks.number(name, value, 0)


def per_member(name: str, value: PerMember, members: int) -> list[float]:
    """A number for all members, or one per member, as a list with one number per member."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, str | bytes) or not isinstance(value, numbers.Real | Sequence):
        checks.refuse(name, "be one number, or one per member", repr(value), error=TypeError)
    values = value if isinstance(value, Sequence) else [value] * members
    if len(values) != members:
        checks.refuse(name, f"be one number, or one per member (M={members})", f"{len(values)} numbers")
    return [checked_number(name, number) for number in values]


def column(name: str, value: PerMember, members: int, like: Tensor) -> Column:
    """A number, or one per member, as a column ``[M, 1]``."""
    values = per_member(name, value, members)
    dtype = wide(like)
    largest = torch.finfo(dtype).max
    if max(values) > largest:
        checks.refuse(name, f"be at most {largest:.3g}, the largest number of the weights' type", max(values))
    return torch.tensor(values, dtype=dtype, device=like.device).unsqueeze(1)


def wide(like: Tensor) -> torch.dtype:
    """The dtype of hyperparameters and step counts: that of the weights, but float32 at least."""
    return torch.promote_types(like.dtype, torch.float32)


def checked_betas(betas: tuple[float, float]) -> tuple[float, float]:
    """Adam's two averaging factors, at least 0 and below 1."""
    if not isinstance(betas, Sequence) or isinstance(betas, str | bytes) or len(betas) != 2:
        checks.refuse("betas", "be two numbers", repr(betas), error=TypeError)
    first, second = (checks.number("betas", beta, 0, 1, open_high=True) for beta in betas)
    return first, second


def settings(
    hyper: Mapping[str, Any],
    members: int,
    like: Tensor,
    *,
    nesterov: bool,
    decayed: Tensor | None = None,
    matrices: MatrixColumns | None = None,
    sections: tuple[Section, ...] = (),
) -> OptimizerColumns:
    """Columns from lr, weight_decay, momentum (a number, or one per row), betas and eps."""
    momentum = column("momentum", hyper["momentum"], members, like)
    if nesterov and matrices is None and not bool((momentum > 0).all()):
        checks.refuse("nesterov", "come with a momentum", "momentum 0", "Pass momentum=0.9.")
    decay = column("weight_decay", hyper["weight_decay"], members, like)
    return OptimizerColumns(
        lr=column("lr", hyper["lr"], members, like),
        weight_decay=decay,
        momentum=momentum,
        betas=checked_betas(hyper["betas"]),
        eps=checks.number("eps", hyper["eps"], 0),
        nesterov=nesterov,
        decays=bool((decay != 0).any()),
        decayed=decayed,
        matrices=matrices,
        sections=sections,
    )


def sgd(
    flat: Matrix,
    grad: Gradient,
    moments: Moments,
    settings: OptimizerColumns,
    active: Column,
    scale: Column | None = None,
) -> None:
    """Stochastic gradient descent with momentum (v ← μv + g) and, on request, Nesterov's look-ahead."""
    if runs_as_one_kernel("sgd", flat, moments, settings):
        columns = [active, _or_ones(scale, active), settings.weight_decay, settings.momentum, settings.lr]
        if fused.launch("sgd_rows", flat, grad, moments["velocity"], *columns, NESTEROV=settings.nesterov):
            return
    grad = _tamed(grad, settings, active, scale)
    if settings.decays:
        grad = _penalised(grad, settings, flat)
    if "velocity" in moments:
        velocity, momentum = moments["velocity"], settings.momentum
        moved = (velocity * momentum).to(flat.dtype) + grad
        velocity.copy_(torch.where(active > 0, moved, velocity))
        grad = (grad + _factor(momentum, flat) * moved).to(flat.dtype) if settings.nesterov else moved
    flat.sub_(grad * (_factor(settings.lr, flat) * active))


def has_kernel(name: str, moments: Moments, settings: OptimizerColumns) -> bool:
    """Whether an update has a kernel, which reads gradients in two precisions and writes copies of weights."""
    kernel = name in ("adam", "adamw") or (name == "sgd" and "velocity" in moments)
    return kernel and settings.decayed is None and not settings.sections


def runs_as_one_kernel(name: str, flat: Matrix, moments: Moments, settings: OptimizerColumns) -> bool:
    """Whether an update is one pass over the memory of a GPU."""
    return has_kernel(name, moments, settings) and fused.takes(flat)


def adam(
    flat: Matrix,
    grad: Gradient,
    moments: Moments,
    settings: OptimizerColumns,
    active: Column,
    scale: Column | None = None,
) -> None:
    """Adam, with weight decay as an L2 penalty in the gradient."""
    _adam_step(flat, grad, moments, settings, active, scale, decoupled=False)


def adamw(
    flat: Matrix,
    grad: Gradient,
    moments: Moments,
    settings: OptimizerColumns,
    active: Column,
    scale: Column | None = None,
) -> None:
    """Adam with decoupled weight decay."""
    _adam_step(flat, grad, moments, settings, active, scale, decoupled=True)


def _adam_step(
    flat: Matrix,
    grad: Gradient,
    moments: Moments,
    settings: OptimizerColumns,
    active: Column,
    scale: Column | None,
    decoupled: bool,
) -> None:
    mean, square, steps = moments["mean"], moments["square"], moments["steps"]
    first, second = 1 - settings.betas[0], 1 - settings.betas[1]
    if _fused_adam_step(flat, grad, moments, settings, scale, decoupled):
        return
    steps.add_(1 if settings.everyone else active)
    bias1, bias2 = 1 - settings.betas[0] ** steps, 1 - settings.betas[1] ** steps
    # A member that rests, or whose rate is zero, divides by infinity: its update is exactly zero, without a branch.
    slowness = torch.where(active > 0, bias1 / settings.lr, torch.inf)
    root = bias2.clamp_min(torch.finfo(bias2.dtype).tiny).rsqrt()
    shrink = 1 - settings.lr * settings.decay * active if decoupled else torch.ones_like(active)
    if runs_as_one_kernel("adam", flat, moments, settings):
        penalty = torch.zeros_like(active) if decoupled else settings.weight_decay
        columns = [active, _or_ones(scale, active), penalty, shrink, slowness, root]
        if fused.launch("adam_rows", flat, grad, mean, square, *columns, first, second, settings.eps):
            return
    grad = _tamed(grad, settings, active, scale)
    if settings.decays and decoupled:
        flat.mul_(shrink)
    elif settings.decays:
        grad = _penalised(grad, settings, flat)
    if settings.everyone:
        mean.lerp_(grad, first)
        square.mul_(1 - second).addcmul_(grad, grad, value=second)
    else:
        _lerp(mean, grad, first * active)
        square.mul_(1 - second * active).addcmul_(grad * (second * active), grad)
    spread = square.sqrt().mul_(root).add_(settings.eps)
    flat.addcdiv_(mean, spread.to(slowness.dtype).mul_(slowness), value=-1)


FUSED_ROWS = 2**14
"""Weights per call from which torch's fused Adam on a CPU pays."""


def _fused_adam_step(
    flat: Matrix, grad: Gradient, moments: Moments, settings: OptimizerColumns, scale: Column | None, decoupled: bool
) -> bool:
    """Adam by torch's fused kernel of the CPU, one call for neighbouring rows of equal settings; whether it was done.

    One pass over the memory instead of ten, and no temporary matrix.
    """
    kernel = getattr(torch, "_fused_adamw_" if decoupled else "_fused_adam_", None)
    plain = settings.everyone and settings.decayed is None and flat.dtype in (torch.float32, torch.float64)
    if kernel is None or not plain or isinstance(grad, LoweredGradient):
        return False
    if flat.device.type != "cpu" or grad.dtype != flat.dtype or not len(flat):
        return False
    mean, square, steps = moments["mean"], moments["square"], moments["steps"]
    columns = torch.cat([settings.lr, settings.weight_decay, steps], 1)
    starts = [0, *((columns[1:] != columns[:-1]).any(1).nonzero().flatten() + 1).tolist()]
    if len(starts) > 1 and len(starts) * FUSED_ROWS > flat.numel():
        return False
    if not (flat.is_contiguous() and mean.is_contiguous() and square.is_contiguous()):
        return False
    steps.add_(1)
    grad = (grad if scale is None else (grad * scale).to(grad.dtype)).contiguous()
    for start, stop in itertools.pairwise([*starts, len(flat)]):
        lr, decay, step = columns[start].tolist()
        rows = [[tensor[start:stop]] for tensor in (flat, grad, mean, square)]
        kernel(
            *rows,
            [],
            [torch.tensor(step + 1)],
            lr=lr,
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            weight_decay=decay,
            eps=settings.eps,
            amsgrad=False,
            maximize=False,
        )
    return True


def _penalised(grad: Matrix, settings: OptimizerColumns, flat: Matrix) -> Matrix:
    """A gradient with that of weight decay as an L2 penalty."""
    return (grad + _factor(settings.decay, flat) * flat).to(flat.dtype)


def _factor(column: Tensor, flat: Matrix) -> Tensor:
    """A factor as ``Tensor.add(..., alpha=factor)`` has it: on a CPU, torch rounds it to the dtype of the tensors."""
    return column if column.dtype == flat.dtype or flat.is_cuda else column.to(flat.dtype).to(column.dtype)


def _lerp(mean: Matrix, grad: Matrix, weight: Column) -> None:
    """Move a mean towards a gradient; columns keep their precision where weights have a lower one."""
    if mean.dtype == weight.dtype:
        mean.lerp_(grad, weight)
    else:
        mean.copy_(torch.lerp(mean.to(weight.dtype), grad.to(weight.dtype), weight))


def _tamed(grad: Gradient, settings: OptimizerColumns, active: Column, scale: Column | None) -> Matrix:
    """A gradient scaled row by row, as one matrix; of rows that rest, which may hold NaN, zero."""
    grad = whole(grad)
    if scale is not None:
        grad = (grad * scale).to(grad.dtype)
    return grad if settings.everyone else torch.where(active > 0, grad, 0.0)


def _or_ones(scale: Column | None, like: Column) -> Column:
    return torch.ones_like(like) if scale is None else scale


def lion(
    flat: Matrix,
    grad: Gradient,
    moments: Moments,
    settings: OptimizerColumns,
    active: Column,
    scale: Column | None = None,
) -> None:
    """Lion (Chen et al. 2023, Algorithm 2): θ ← θ − η (sign(β₁ m + (1 − β₁) g) + λ θ), then m ← β₂ m + (1 − β₂) g."""
    mean, (first, second) = moments["mean"], settings.betas
    grad = _tamed(grad, settings, active, scale)
    direction = mean.lerp(grad, 1 - first).sign_()
    if settings.decays:
        flat.mul_(1 - settings.lr * settings.decay * active)
    flat.sub_(direction * (settings.lr * active))
    _lerp(mean, grad, (1 - second) * active)


def muon(
    flat: Matrix,
    grad: Gradient,
    moments: Moments,
    settings: OptimizerColumns,
    active: Column,
    scale: Column | None = None,
) -> None:
    """Muon for matrices, as ``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")``; AdamW for all other parameters.

    With this adjustment (Liu et al. 2025) one learning rate and one weight decay serve both.
    """
    assert settings.matrices is not None
    places = settings.matrices
    if not places.shapes:
        adamw(flat, grad, moments, settings, active, scale)
        return
    grad = _tamed(grad, settings, active, scale)
    dtype, going = flat.dtype, active > 0
    own, own_grad, velocity = flat[:, places.columns], grad[:, places.columns], moments["velocity"]
    momentum = settings.momentum.to(dtype)
    moved = velocity.lerp(own_grad, 1 - momentum)
    velocity.copy_(torch.where(going, moved, velocity))
    update = own_grad.lerp(moved, momentum) if settings.nesterov else moved
    moves: list[Tensor] = []
    start = 0
    for count, height, width in places.shapes:
        end = start + count * height * width
        stacked = update[:, start:end].reshape(-1, height, width)
        moves.append(orthogonalised(stacked).to(dtype).reshape(len(flat), -1) * (0.2 * math.sqrt(max(height, width))))
        start = end
    decay = settings.weight_decay
    if settings.decayed is not None:
        decay = decay * settings.decayed[:, places.columns]
    new = own * (1 - settings.lr * decay).to(dtype) - settings.lr.to(dtype) * torch.cat(moves, 1)
    flat.index_copy_(1, places.columns, torch.where(going, new, own))
    if places.rest.numel():
        decayed = None if settings.decayed is None else settings.decayed[:, places.rest]
        rest = flat[:, places.rest]
        adamw(rest, grad[:, places.rest], moments, replace(settings, decayed=decayed), active)
        flat.index_copy_(1, places.rest, rest)


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's iteration, of which torch does five, too."""


def orthogonalised(matrices: Float[Tensor, "N H W"]) -> Float[Tensor, "N H W"]:
    """Matrices whose singular values five Newton–Schulz iterations have moved near 1, in bfloat16 as in torch's Muon.

    >>> singular_values = torch.linalg.svdvals(orthogonalised(torch.tensor([[[9.0, 0.0], [4.0, 1.0]]])).float())
    >>> bool((0.6 < singular_values).all() and (singular_values < 1.25).all())
    True
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    if tall:
        x = x.transpose(1, 2)
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x


OPTIMIZERS: dict[str, Update] = {"sgd": sgd, "adam": adam, "adamw": adamw, "lion": lion, "muon": muon}


def initial_moments(name: str, flat: Matrix, momentum: Column, matrices: MatrixColumns | None = None) -> Moments:
    """The state of an optimiser before its first step."""
    if name == "sgd":
        return {"velocity": torch.zeros_like(flat)} if bool((momentum != 0).any()) else {}
    if name == "lion":
        return {"mean": torch.zeros_like(flat)}
    moments: Moments = {}
    if matrices is not None:
        moments["velocity"] = torch.zeros_like(flat[:, matrices.columns])
        flat = flat[:, matrices.rest]
    return {
        **moments,
        "mean": torch.zeros_like(flat),
        "square": torch.zeros_like(flat),
        "steps": flat.new_zeros((len(flat), 1), dtype=wide(flat)),
    }


class UpdateRows(NamedTuple):
    """All that an update reads and writes besides the gradient, one row per member."""

    flat: Matrix
    moments: Moments
    settings: OptimizerColumns
    active: Bool[Tensor, " M"]
    clip_norm: Column | None

    def select(self, rows: Tensor) -> "UpdateRows":
        """Copies of some rows, by number."""
        return UpdateRows(
            self.flat[rows],
            {name: tensor[rows] for name, tensor in self.moments.items()},
            self.settings.select(rows),
            self.active[rows],
            None if self.clip_norm is None else self.clip_norm[rows],
        )


def apply(name: str, rows: UpdateRows, grad: Gradient, sampled: Tensor | None = None) -> None:
    """Clip and update all rows, or the sampled ones (by number), whose gradient ``grad`` is; others do not change.

    Copies that belong to the gradient become those of the new weights.
    """
    updated = rows if sampled is None else rows.select(sampled)
    flat, moments, settings, active, clip_norm = updated
    copies = grad.copies if isinstance(grad, LoweredGradient) else None
    if copies is not None and not runs_as_one_kernel(name, flat, moments, settings):
        grad = whole(grad)
    scale = None if clip_norm is None else clip_scale(grad, clip_norm)
    column = active.unsqueeze(1).to(settings.lr.dtype)
    if settings.sections:
        _apply_by_dtype(name, updated, whole(grad), column, scale)
    else:
        OPTIMIZERS[name](flat, grad, moments, settings, column, scale)
    if copies is not None and not runs_as_one_kernel(name, flat, moments, settings):
        copies.copy_(flat[:, : copies.shape[1]])
    if sampled is not None:
        rows.flat.index_copy_(0, sampled, flat)
        for key, tensor in moments.items():
            rows.moments[key].index_copy_(0, sampled, tensor)


def _apply_by_dtype(name: str, rows: UpdateRows, grad: Matrix, active: Column, scale: Column | None) -> None:
    """Update weights of several dtypes, each in its own."""
    steps = rows.moments.get("steps")
    before = None if steps is None else steps.clone()
    for section in rows.settings.sections:
        moments = {key: section.numbers(t) for key, t in rows.moments.items() if key != "steps"}
        if steps is not None and before is not None:
            moments["steps"] = steps.copy_(before)  # a step of all sections is one step
        own = grad[:, section.start : section.stop].to(section.dtype)
        OPTIMIZERS[name](section.numbers(rows.flat), own, moments, rows.settings.of_section(section), active, scale)


def clip_scale(grad: Gradient, limit: Column) -> Column:
    """What each member's gradient is to be multiplied by, for a norm of at most ``limit``."""
    if isinstance(grad, LoweredGradient):
        norms = [torch.linalg.vector_norm(p, dim=1, keepdim=True, dtype=grad.rest.dtype) for p in grad.parts]
        grad = torch.cat(norms, 1)
    norm = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
    return (limit / (norm + 1e-6)).clamp(max=1.0)
