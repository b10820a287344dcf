"""What members' outputs mean under a task and a loss, and the pooled prediction that they give.

`output_kind` checks a task, a loss and a pool once. `class_probs`, `label_probs`, `moments` and `quantiles` then read
outputs ``[M, N, C]`` in double precision. `dissensus.predictive` and `dissensus.conformal` are made from these.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from dissensus import arguments, checks, losses, pooling
from dissensus.axes import PerExampleLoss, Pool

Task: TypeAlias = Literal["classification", "multilabel", "regression"]
Takes: TypeAlias = (
    Literal["logits", "probabilities", "label_logits", "label_probabilities"]
    | Literal["values", "gaussian", "quantiles"]
)

TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "classification": ("cross_entropy", ("logits",)),
    "multilabel": ("bce", ("label_logits",)),
    "regression": ("squared_error", ("values", "gaussian", "quantiles")),
}
"""The default loss of each task, and the kinds of outputs that its losses take (see `dissensus.losses`)."""
_AT_ONCE = 2**23
"""Numbers that are computed at once in double precision."""


class OutputKind(NamedTuple):
    """How outputs are read: the task, what the numbers are, and how members are pooled."""

    task: Task
    takes: Takes
    pool: Pool
    levels: tuple[float, ...] = ()
    """Levels of quantiles; empty for other outputs."""
    floor: float = 0.0
    """Added to the variance of Gaussians; 0 for other outputs."""

    def targets(self, width: int) -> int:
        """The number of classes, labels or real targets that C outputs stand for."""
        return width // {"gaussian": 2, "quantiles": max(1, len(self.levels))}.get(self.takes, 1)


def output_kind(
    task: str, loss: str | PerExampleLoss | None = None, pool: str | None = None, kind: str = "logits"
) -> OutputKind:
    """How outputs of members are read that were trained for a task on a loss.

    Args:
        task: ``"classification"``, ``"multilabel"`` or ``"regression"``.
        loss: The loss that members were trained on, a name or its function, also with settings:
            ``partial(losses.quantile, levels=(0.1, 0.9))``. None is the task's default in `TASKS`.
        pool: One of the loss's pools (`dissensus.losses.LOSSES`); None is the first.
        kind: ``"probabilities"`` if outputs of a classifier are probabilities rather than logits.

    >>> output_kind("regression", "gaussian_nll")
    OutputKind(task='regression', takes='gaussian', pool='probability', levels=(), floor=1e-06)
    """
    checks.one_of("task", task, TASKS)
    default, takes = TASKS[task]
    loss = default if loss is None else loss
    entry = losses.known(loss)
    if entry is None or entry.takes not in takes:
        names = [repr(name) for name, known in losses.LOSSES.items() if known.takes in takes]
        checks.refuse("loss", f"be one of {', '.join(names)} for task={task!r}", losses.text_of(loss))
    pool = entry.pools[0] if pool is None else pool
    checks.one_of("pool", pool, entry.pools)
    checks.one_of("kind", kind, ("logits", "probabilities"))
    if kind == "probabilities" and task == "regression":
        checks.refuse("kind", "be left out for task='regression'", "'probabilities'")
    read = entry.takes.replace("logits", kind)
    settings = losses.settings_of(loss)
    levels = losses.check_levels(settings.get("levels", losses.QUANTILE_LEVELS)) if read == "quantiles" else ()
    floor = float(settings.get("floor", losses.VARIANCE_FLOOR)) if read == "gaussian" else 0.0
    return OutputKind(task, read, pool, levels, floor)  # pyright: ignore[reportArgumentType]  # checked above


def read_outputs(outputs: Any, kind: OutputKind) -> Float[Tensor, "M N C"]:
    """Outputs as a tensor without gradients, in the layout of their kind. NaN and misfits are refused.

    ``[M, N]`` is taken as ``[M, N, 1]`` for values of one target.
    """
    outputs = arguments.as_tensor(outputs, "outputs")
    if not isinstance(outputs, Tensor):
        fix = "A list of members' outputs? Use torch.stack, or numpy.stack."
        checks.refuse("outputs", "be a tensor or an array [M, N, C]", type(outputs).__name__, fix, TypeError)
    outputs = outputs.detach()
    if kind.takes == "values" and outputs.ndim == 2:
        outputs = outputs.unsqueeze(-1)
    if outputs.ndim > 3:
        fix = "Every position as an example? Use dissensus.dense.flat(outputs)."
        checks.refuse("outputs", "have shape [M, N, C]", checks.shape_text(outputs.shape), fix)
    _, _, width = checks.member_outputs(outputs)
    unknown = outputs.isnan() | (outputs == math.inf if kind.task != "regression" else outputs.isinf())
    if bool(unknown.any()):
        rows = int(unknown.any(-1).any(0).sum())
        got = f"NaN or infinity in {rows} example{'s' * (rows > 1)}"
        checks.refuse("outputs", "be numbers", got, "Leave such examples out.")
    _check_layout(outputs, kind, width)
    return outputs


def _check_layout(outputs: Tensor, kind: OutputKind, width: int) -> None:
    if kind.takes == "logits":
        checks.member_logits(outputs, "outputs")
    elif kind.takes == "probabilities" and not checks.are_probabilities(outputs):
        checks.refuse(
            "outputs", "be probabilities, which sum to one over classes", "other numbers", "Logits? kind='logits'."
        )
    elif kind.takes == "label_probabilities" and not bool(((outputs >= 0) & (outputs <= 1)).all()):
        checks.refuse("outputs", "be probabilities from 0 to 1", "other numbers", "Logits? Use kind='logits'.")
    elif kind.takes == "gaussian" and width % 2:
        fix = "D means come first, then D logarithms of variances."
        checks.refuse("outputs", "have two outputs per target", checks.shape_text(outputs.shape, "MNC"), fix)
    elif kind.takes == "quantiles" and width % len(kind.levels):
        wanted = f"have {len(kind.levels)} outputs per target, for the levels {kind.levels}"
        fix = "Other levels? Use loss=functools.partial(dissensus.losses.quantile, levels=...)."
        checks.refuse("outputs", wanted, checks.shape_text(outputs.shape, "MNC"), fix)


def in_slices(function: Callable[[Tensor], Tensor], outputs: Float[Tensor, "M N C"]) -> Tensor:
    """``function(outputs)``, with N first in its result, computed on slices of examples in double precision."""
    members, examples, width = outputs.shape
    step = max(1, _AT_ONCE // (members * width))
    parts = [function(outputs[:, start : start + step].double()) for start in range(0, examples, step)]
    return torch.cat(parts)


def member_probs(outputs: Float[Tensor, "M N C"], kind: OutputKind) -> Float[Tensor, "M N C"]:
    """Each member's probabilities, of classes or of labels."""
    if kind.takes.endswith("probabilities"):
        return outputs / outputs.sum(-1, keepdim=True) if kind.task == "classification" else outputs
    return outputs.softmax(-1) if kind.task == "classification" else outputs.sigmoid()


def class_probs(outputs: Float[Tensor, "M N C"], kind: OutputKind) -> Float[Tensor, "N C"]:
    """Probabilities of the pooled prediction: of classes, with sum one, or of separate labels."""
    probs = in_slices(lambda part: _pooled_probs(part, kind), outputs)
    if bool(probs.isnan().any()):
        rows = int(probs.isnan().any(-1).sum())
        fix = "Members that exclude all classes between them have no mean score: use pool='probability'."
        checks.refuse("outputs", "leave a class possible", f"{rows} examples without one", fix)
    return probs


def _pooled_probs(outputs: Tensor, kind: OutputKind) -> Tensor:
    if kind.pool == "vote":
        return pooling.vote_share(outputs)
    if kind.pool == "probability":
        return member_probs(outputs, kind).mean(0)
    if kind.takes == "probabilities":
        return pooling.mean_score(outputs.log()).exp()
    if kind.takes == "label_probabilities":
        return pooling.mean_output(outputs.logit()).sigmoid()
    return (
        pooling.mean_score(outputs).exp() if kind.task == "classification" else pooling.mean_output(outputs).sigmoid()
    )


def gaussians(outputs: Float[Tensor, "M N C"], kind: OutputKind) -> tuple[Tensor, Tensor]:
    """Means and variances ``[M, N, D]`` of the members, in double precision. Variances are finite."""
    mean, variance = losses.gaussian_moments(outputs.double(), kind.floor)
    if bool(variance.isinf().any()):
        fix = "Has the training diverged?"
        checks.refuse("outputs", "have log-variances below 709", f"{float(outputs.max()):g}", fix)
    return mean, variance


def quantiles(outputs: Float[Tensor, "M N C"], kind: OutputKind) -> Float[Tensor, "M N D Q"]:
    """The members' quantiles of every target, in rising order (crossed ones are sorted), in double precision."""
    return outputs.double().unflatten(-1, (-1, len(kind.levels))).sort(-1).values


def moments(outputs: Float[Tensor, "M N C"], kind: OutputKind) -> pooling.Moments:
    """Mean, aleatoric and epistemic variance ``[N, D]`` of the pooled prediction of real targets.

    | outputs | mean | aleatoric | epistemic |
    |---|---|---|---|
    | values | of the members | unknown: NaN | variance of the members |
    | gaussian | of the members' means | mean of the members' variances | variance of the members' means |
    | quantiles | of the members' medians | mean of ((q_hi − q_lo) / (z_hi − z_lo))² | variance, mean over levels |

    Quantiles state no variance. Theirs is that of a Gaussian whose outermost quantiles lie as far apart. It is NaN
    where there is one level, and the mean is NaN where 0.5 is no level.
    """
    if kind.takes == "gaussian":
        return _matched(*gaussians(outputs, kind))
    if kind.takes == "values":
        values = outputs.double()
        return _matched(values, torch.full_like(values, math.nan))
    members = quantiles(outputs, kind)
    middle = kind.levels.index(0.5) if 0.5 in kind.levels else None
    epistemic = (members - members[:1]).var(0, correction=0).mean(-1)
    unknown = torch.full_like(epistemic, math.nan)
    mean = unknown if middle is None else members[..., middle].mean(0)
    if len(kind.levels) == 1:
        return pooling.Moments(mean, unknown, epistemic)
    low, high = torch.special.ndtri(torch.tensor([kind.levels[0], kind.levels[-1]], dtype=torch.float64)).tolist()
    aleatoric = ((members[..., -1] - members[..., 0]) / (high - low)).square().mean(0)
    return pooling.Moments(mean, aleatoric, epistemic)


def _matched(mean: Float[Tensor, "M N D"], variance: Float[Tensor, "M N D"]) -> pooling.Moments:
    """`pooling.moment_matched`, with an epistemic part of exactly zero for identical members."""
    matched = pooling.moment_matched(mean - mean[:1], variance)
    return matched._replace(mean=mean[0] + matched.mean)
