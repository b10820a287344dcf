"""Losses per example: ``(outputs [..., B, C], targets) -> [..., B]``, never averaged.

Each entry of `LOSSES` states which kind of output it takes:

| kind | meaning | targets |
|---|---|---|
| `logits` | unnormalised log-probabilities of C classes | labels `[B]`, or soft labels `[B, C]` |
| `values` | predictions of C real targets | reals `[B, C]` |
| `margin` | C real scores whose sign is the decision | −1 or +1, `[B, C]` |
| `log_rate` | logarithms of C expected counts | counts `[B, C]` |
| `gaussian` | D means, then D logarithms of variances: C = 2D | reals `[B, D]` |
| `label_logits` | log-odds of C labels that do not exclude each other | 0, 1 or probabilities, `[B, C]` |
| `quantiles` | Q quantiles of each of D targets, as `[D, Q]`: C = D·Q | reals `[B, D]` |

With one target per example, targets may be ``[B]`` instead of ``[B, 1]``. Log-probabilities are logits, so that
results of `pooling` for classes can be passed directly. NaN in an example's outputs or targets gives NaN for that
example. Outputs in half precision are converted to float32, and the loss is float32. NumPy arrays are taken as tensors.
`per_member` takes dense outputs, ``[M, B, C, *S]``.

Wherever a loss is named, its function says the same, also with settings: ``partial(quantile, levels=(0.1, 0.9))``.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dissensus import arguments, checks, dense, pooling
from dissensus.axes import PerExampleLoss, Pool

Kind = Literal["logits", "values", "margin", "log_rate", "gaussian", "label_logits", "quantiles"]

VARIANCE_FLOOR = 1e-6
"""Added to the variance of `gaussian_nll`, so that the likelihood of an exact prediction stays finite."""
QUANTILE_LEVELS = (0.05, 0.5, 0.95)
"""Levels of the quantiles that `quantile` takes by default: the median, and an interval that holds 90 %."""


@arguments.arrays
def squared_error(values: Float[Tensor, "*S B C"], targets: Tensor) -> Float[Tensor, "*S B"]:
    """Squared error, ‖f − y‖², summed over outputs, as the papers have it. Takes ``values``.

    Differs from `mse`, which is the mean over outputs.

    >>> squared_error(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 0.0]]))
    tensor([5.])
    """
    values = _checked(values, "values")
    return (values - as_values(values, targets)).square().sum(-1)


@arguments.arrays
def mse(values: Float[Tensor, "*S B C"], targets: Tensor) -> Float[Tensor, "*S B"]:
    """Mean squared error, ‖f − y‖² / C, averaged over outputs as by ``torch.nn.functional.mse_loss``. Takes ``values``.

    Until 0.1 it was the sum over outputs, which is `squared_error` now. With one output both are the same.

    >>> mse(torch.tensor([[2.0]]), torch.tensor([0.0]))
    tensor([4.])
    """
    values = _checked(values, "values")
    if values.shape[-1] > 1 and checks.is_concrete(values):
        tell_of_mean("mse", values.shape[-1])
    return (values - as_values(values, targets)).square().mean(-1)


_told: set[str] = set()
"""What has been said once in this process."""


def tell_of_mean(loss: str | PerExampleLoss | None, width: int) -> None:
    """Warn once in a process that `mse` has become the mean over outputs, where there is more than one."""
    if width > 1 and "mse" not in _told and name_of(loss) == "mse":
        _told.add("mse")
        text = (
            "the loss 'mse' is the mean over outputs now, as in torch. Until dissensus 0.1 it was their sum: use "
            f"'squared_error' for that. With {width} outputs the two differ by the factor {width}."
        )
        warnings.warn(text, FutureWarning, stacklevel=2)


@arguments.arrays
def gaussian_moments(
    outputs: Float[Tensor, "*S"], floor: float = VARIANCE_FLOOR, *, class_axis: int | None = None
) -> tuple[Float[Tensor, "*T"], Float[Tensor, "*T"]]:
    """Mean and variance, each ``[..., D]``, of outputs ``[..., 2D]``: D means, then D logarithms of variances s.

    The variance is exp(s) + ``floor``. It is infinite where exp(s) is beyond the largest number, from s = 89 on in
    float32; `gaussian_nll` uses its logarithm, which is finite there. The last axis holds the outputs. For dense ones,
    ``[M, B, 2D, *S]``, pass ``class_axis=2``.

    >>> gaussian_moments(torch.tensor([[1.0, 0.0]]), floor=0.5)
    (tensor([[1.]]), tensor([[1.5000]]))
    """
    _check_floor(floor)
    if class_axis is None and not 2 <= outputs.ndim <= 4:
        fix = "One prediction per pixel? Use class_axis=2." if outputs.ndim > 4 else ""
        checks.refuse("outputs", "have shape [B, 2D] or [M, B, 2D]", checks.shape_text(outputs.shape), fix)
    axis = -1 if class_axis is None else dense.axis_of(outputs, class_axis)
    mean, log_variance = _halves(checks.full_precision(outputs), axis)
    return mean, log_variance.exp() + floor


@arguments.arrays
def gaussian_nll(
    outputs: Float[Tensor, "*S B C"], targets: Tensor, *, floor: float = VARIANCE_FLOOR
) -> Float[Tensor, "*S B"]:
    """Negative log-density of a Gaussian with predicted mean and variance (Nix and Weigend, 1994). Takes ``gaussian``.

    ½ Σ_d ((y_d − μ_d)² / v_d + log v_d + log 2π), with v = exp(s) + ``floor``

    Outputs ``[..., 2D]`` are D means μ, then D logarithms of variances s. log v is computed as log(eˢ + floor) without
    eˢ, so that nothing overflows. The least value, of an exact prediction without variance, is D · ½ log(2π · floor).
    Members are pooled as a mixture of their densities, pool ``"probability"``. Differs from
    ``torch.nn.functional.gaussian_nll_loss``, which takes variances, clamps them (so that those below have no gradient)
    and averages over outputs, without the constant by default.

    >>> gaussian_nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1.0]))
    tensor([0.9189])
    """
    _check_floor(floor)
    mean, log_variance = _halves(_checked(outputs, "outputs"))
    targets = _targets_of_parts(mean, targets, 2, "a mean and a log-variance")
    log_variance = torch.logaddexp(log_variance, torch.full_like(log_variance, math.log(floor)))
    squared = (targets - mean).square() * (-log_variance).exp()
    return (squared + log_variance + math.log(2 * math.pi)).sum(-1) / 2


def _check_floor(floor: float) -> None:
    checks.number("floor", floor, 0, open_low=True)


def _halves(outputs: Tensor, axis: int = -1) -> tuple[Tensor, Tensor]:
    if outputs.shape[axis] % 2 or not outputs.shape[axis]:
        _refuse_width(outputs.shape, "two outputs per target: D means, then D log-variances")
    mean, log_variance = outputs.chunk(2, axis)
    return mean, log_variance


def _refuse_width(shape: Sequence[int], layout: str) -> NoReturn:
    checks.refuse("outputs", f"have {layout}", checks.shape_text(shape), "Change the network's last layer.")


def _targets_of_parts(predicted: Tensor, targets: Tensor, parts: int, meaning: str) -> Tensor:
    """Targets ``[B, D]`` in the dtype of outputs, of which each target has several."""
    batch, width = predicted.shape[-2:]
    if width == 1 and tuple(targets.shape) == (batch,):
        targets = targets.unsqueeze(-1)
    if tuple(targets.shape) != (batch, width):
        fix = f"{parts * width} outputs are {meaning} of {width} target{'s' * (width > 1)}."
        checks.refuse("targets", f"have shape [B={batch}, D={width}]", checks.shape_text(targets.shape), fix)
    return targets.to(predicted.dtype)


@arguments.arrays
def quantile(
    outputs: Float[Tensor, "*S B C"], targets: Tensor, *, levels: Sequence[float] = QUANTILE_LEVELS
) -> Float[Tensor, "*S B"]:
    """Pinball loss of predicted quantiles, the mean over targets and levels (Koenker and Bassett, 1978).

    max(τ e, (τ − 1) e) with e = y − q, averaged over D · Q. Takes ``quantiles``: outputs ``[..., D·Q]`` hold the
    quantiles of the first target, then those of the second. For other levels use
    ``functools.partial(quantile, levels=(0.1, 0.9))``. Quantiles may cross: nothing is done about it here, since the
    loss of each is its own; sort them to show them, ``outputs.unflatten(-1, (D, Q)).sort(-1).values``. At e = 0 the
    gradient is the mean of both slopes.

    >>> quantile(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([2.0]))
    tensor([0.2000])
    """
    levels = check_levels(levels)
    predicted = _checked(outputs, "outputs")
    if predicted.shape[-1] % len(levels) or not predicted.shape[-1]:
        _refuse_width(predicted.shape, f"{len(levels)} outputs per target, one for each of the levels {levels}")
    predicted = predicted.unflatten(-1, (-1, len(levels)))
    targets = _targets_of_parts(predicted[..., 0], targets, len(levels), f"{len(levels)} quantiles")
    apart = targets.unsqueeze(-1) - predicted
    # No copy from the host, so that a CUDA graph can hold it.
    level = torch.stack([apart.new_full((), value) for value in levels])
    return torch.maximum(level * apart, (level - 1) * apart).mean((-2, -1))


def check_levels(levels: Sequence[float]) -> tuple[float, ...]:
    """Levels of quantiles: above 0, below 1, and rising.

    >>> check_levels([0.1, 0.9])
    (0.1, 0.9)
    """
    values = tuple(checks.number("levels", value, 0, 1, open_low=True, open_high=True) for value in levels)
    if not values or any(a >= b for a, b in itertools.pairwise(values)):
        checks.refuse("levels", "be one number or more in rising order", str(list(values)))
    return values


@arguments.arrays
def bce(logits: Float[Tensor, "*S B C"], targets: Tensor) -> Float[Tensor, "*S B"]:
    """Binary cross-entropy of several labels, −mean_l [y_l log p_l + (1 − y_l) log(1 − p_l)] with p = sigmoid(f).

    Takes ``label_logits``: one log-odds for every label, of which any number may be true. Targets are 0 and 1, or
    probabilities. The mean over labels is that of ``torch.nn.functional.binary_cross_entropy_with_logits``.

    >>> bce(torch.tensor([[0.0, 1e4]]), torch.tensor([[1.0, 1.0]]))
    tensor([0.3466])
    """
    logits = _checked(logits, "logits")
    if not targets.is_floating_point() and targets.ndim == 1 < logits.shape[-1]:
        wanted = checks.shape_text((*logits.shape[-2:],), "BC")
        fix = "Classes that exclude each other? Use 'cross_entropy'."
        checks.refuse("targets", f"have shape {wanted}, one number per label", checks.shape_text(targets.shape), fix)
    labels = as_values(logits, targets)
    # 0 · log 0 is 0: a label that is certain may have log-odds of ±∞.
    true = torch.where(labels == 0, 0.0, labels * F.logsigmoid(logits))
    false = torch.where(labels == 1, 0.0, (1 - labels) * F.logsigmoid(-logits))
    return -(true + false).mean(-1)


@arguments.arrays
def cross_entropy(logits: Float[Tensor, "*S B C"], targets: Tensor) -> Float[Tensor, "*S B"]:
    """Negative log-likelihood, −Σ_k y(k) log p(k), on labels or soft labels. Takes ``logits``.

    >>> cross_entropy(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor([0.6931])
    """
    _check_classes(logits)
    log_probs = _checked(logits, "logits").log_softmax(-1)
    if checks.class_targets(targets, *logits.shape[-2:]):
        # 0 · log 0 is 0: a class with a soft label of zero may have a probability of zero.
        return -torch.where(targets == 0, 0.0, targets * log_probs).sum(-1)
    return -at_label(log_probs, targets)


@arguments.arrays
def divergence(logits: Float[Tensor, "*S B C"], others: Float[Tensor, "*S B C"]) -> Float[Tensor, "*S B"]:
    """KL(p ‖ q) of predictions p from others q, both as logits, in nats. A class of probability zero in p adds nothing.

    >>> divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 0.0]]))
    tensor([0.])
    """
    log_p, log_q = _checked(logits, "logits", 1).log_softmax(-1), _checked(others, "others", 1).log_softmax(-1)
    zero = log_p == -torch.inf
    return torch.where(zero, 0.0, log_p.exp() * (log_p.masked_fill(zero, 0.0) - log_q.masked_fill(zero, 0.0))).sum(-1)


@arguments.arrays
def brier(logits: Float[Tensor, "*S B C"], targets: Tensor) -> Float[Tensor, "*S B"]:
    """Brier score, ‖p − y‖², summed over classes, from 0 to 2. Takes ``logits``.

    >>> brier(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    tensor([0.5000])
    """
    _check_classes(logits)
    probs = _checked(logits, "logits").softmax(-1)
    if not checks.class_targets(targets, *logits.shape[-2:]):
        targets = F.one_hot(targets.long(), logits.shape[-1])
    return (probs - targets.to(probs.dtype)).square().sum(-1)


@arguments.arrays
def zero_one(logits: Float[Tensor, "*S B C"], targets: Tensor) -> Float[Tensor, "*S B"]:
    """One if the predicted class is wrong, else zero. Ties go to the lowest class. Takes ``logits`` (or votes).

    >>> zero_one(torch.tensor([[0.2, 0.1], [0.2, 0.1], [0.2, float("nan")]]), torch.tensor([0, 1, 0]))
    tensor([0., 1., nan])
    """
    logits = _checked(logits, "logits")
    checks.class_targets(targets, *logits.shape[-2:], soft=False)
    predicted, unknown = pooling.first_choices(logits)
    return (predicted != targets).to(logits.dtype).masked_fill(unknown, torch.nan)


@arguments.arrays
def logistic(margin: Float[Tensor, "*S B C"], targets: Tensor) -> Float[Tensor, "*S B"]:
    """Logistic loss, log(1 + exp(−y f)), y in {−1, +1}. Takes ``margin``.

    >>> logistic(torch.tensor([[0.0], [1e4]]), torch.tensor([1.0, -1.0]))
    tensor([6.9315e-01, 1.0000e+04])
    """
    margin = _checked(margin, "margin")
    # Not softplus, which is off by 2e-9 above 20, where torch switches to a straight line.
    return -F.logsigmoid(as_values(margin, targets) * margin).sum(-1)


@arguments.arrays
def exponential(margin: Float[Tensor, "*S B C"], targets: Tensor) -> Float[Tensor, "*S B"]:
    """Exponential loss, exp(−y f), y in {−1, +1}. Overflows to infinity, not to NaN. Takes ``margin``.

    >>> exponential(torch.tensor([[2.0]]), torch.tensor([-1.0]))
    tensor([7.3891])
    """
    margin = _checked(margin, "margin")
    return (-as_values(margin, targets) * margin).exp().sum(-1)


@arguments.arrays
def poisson(log_rate: Float[Tensor, "*S B C"], targets: Tensor) -> Float[Tensor, "*S B"]:
    """Poisson negative log-likelihood without its constant log y!: exp(f) − y f. Takes ``log_rate``.

    Summed over outputs. Without the constant it may be negative. The pool ``"probability"`` is the mixture of members'
    distributions of all counts of an example together, ``"score"`` averages logarithms of rates. Rates overflow to
    infinity, not to NaN, from f = 89 on in float32. A rate of zero, f = −∞, is certain of a count of zero.

    >>> poisson(torch.tensor([[0.0]]), torch.tensor([3.0]))
    tensor([1.])
    """
    log_rate = _checked(log_rate, "log_rate")
    counts = as_values(log_rate, targets)
    return (log_rate.exp() - torch.where(counts == 0, 0.0, counts * log_rate)).sum(-1)  # 0 · log 0 is 0


def _checked(outputs: Tensor, name: str, leading: int = 2) -> Tensor:
    """Outputs ``[..., B, C]`` in full precision, with at most ``leading`` axes before the batch (runs and members)."""
    if not 2 <= outputs.ndim <= 2 + leading:
        wanted = "have shape [B, C] or [M, B, C]"
        fix = "One class per pixel or token? Use losses.per_member, or dissensus.dense.positions."
        checks.refuse(name, wanted, checks.shape_text(outputs.shape), fix if outputs.ndim > 2 else "")
    return checks.full_precision(outputs)


def _check_classes(logits: Tensor) -> None:
    if logits.shape[-1] == 1:
        _refuse_one_class()


def _refuse_one_class() -> NoReturn:
    checks.refuse("logits", "have two classes or more", "one output", "Two classes by one margin? Use 'logistic'.")


class Loss(NamedTuple):
    """A per-example loss, the kind of output it takes, and how its members can be pooled."""

    function: Callable[..., Tensor]
    takes: Kind
    pools: tuple[Pool, ...] = ("score",)
    """The first is the default."""
    density: bool = False
    """Whether exp(−loss) is the density of the target, up to a factor that does not depend on outputs. The pool
    ``"probability"`` is then the mixture of members' densities."""


LOSSES: dict[str, Loss] = {
    "squared_error": Loss(squared_error, "values"),
    "mse": Loss(mse, "values"),
    "cross_entropy": Loss(cross_entropy, "logits", ("probability", "score")),
    "brier": Loss(brier, "logits", ("probability", "score")),
    "zero_one": Loss(zero_one, "logits", ("probability", "score", "vote")),
    "logistic": Loss(logistic, "margin"),
    "exponential": Loss(exponential, "margin"),
    "poisson": Loss(poisson, "log_rate", ("score", "probability"), density=True),
    "gaussian_nll": Loss(gaussian_nll, "gaussian", ("probability",), density=True),
    "bce": Loss(bce, "label_logits", ("probability", "score")),
    "quantile": Loss(quantile, "quantiles"),
}


def named(loss: str) -> Loss:
    """The loss of that name, or an error that lists the names."""
    checks.one_of("loss", loss, LOSSES)
    return LOSSES[loss]


def name_of(loss: Any) -> str | None:
    """The name of a loss of this module: of a name, of its function, or of a partial that sets its keywords.

    >>> name_of(functools.partial(quantile, levels=(0.1, 0.9))), name_of("mse"), name_of(torch.dot)
    ('quantile', 'mse', None)
    """
    if isinstance(loss, str):
        return loss if loss in LOSSES else None
    function, _ = _unwrapped(loss)
    return next((name for name, known in LOSSES.items() if function is known.function), None)


def known(loss: str | PerExampleLoss) -> Loss | None:
    """The entry of `LOSSES` of a loss; None for a function of a user. An unknown name is refused."""
    name = name_of(loss)
    if name is None:
        return named(loss) if isinstance(loss, str) else None
    return LOSSES[name]


def function_of(loss: str | PerExampleLoss) -> PerExampleLoss:
    """The function of a loss that may be a name."""
    return named(loss).function if isinstance(loss, str) else loss


def settings_of(loss: str | PerExampleLoss) -> dict[str, Any]:
    """Keywords that a partial sets, such as ``levels``."""
    return {} if isinstance(loss, str) else _unwrapped(loss)[1]


def outputs_per_target(loss: str | PerExampleLoss) -> int:
    """Outputs that a network needs for every target: a mean and a log-variance, a quantile per level, or one.

    >>> outputs_per_target("gaussian_nll"), outputs_per_target(functools.partial(quantile, levels=(0.1, 0.9)))
    (2, 2)
    """
    entry = known(loss)
    if entry is not None and entry.takes == "quantiles":
        return len(check_levels(settings_of(loss).get("levels", QUANTILE_LEVELS)))
    return 2 if entry is not None and entry.takes == "gaussian" else 1


def text_of(loss: str | PerExampleLoss) -> str:
    """A loss as messages name it.

    >>> text_of("bce"), text_of(functools.partial(quantile, levels=(0.1, 0.9)))
    ("'bce'", "'quantile'")
    """
    return repr(name_of(loss) or getattr(loss, "__name__", type(loss).__name__))


def _unwrapped(loss: Any) -> tuple[Any, dict[str, Any]]:
    """The function inside of partials that set keywords only, and these keywords."""
    keywords: dict[str, Any] = {}
    while isinstance(loss, functools.partial) and not loss.args:
        keywords = {**loss.keywords, **keywords}
        loss = loss.func
    return loss, keywords


def check_trainable(loss: str | PerExampleLoss) -> None:
    """Refuse a loss without a gradient."""
    if name_of(loss) == "zero_one":
        checks.refuse("loss", "be differentiable to be trained on", "'zero_one'", "Use 'cross_entropy' or 'brier'.")


def check_target_values(loss: str | PerExampleLoss, targets: Tensor, width: int) -> None:
    """Refuse targets outside the range of a known loss, if their values can be read."""
    if known(loss) is not None and checks.is_concrete(targets):
        check_targets(loss, targets, width)


def _label_fix(low: int, high: int, width: int | None) -> str:
    """What labels out of range may be meant as."""
    if low == 1 and width is not None and high == width:
        return "Labels from 1 on? Use targets - 1."
    marker = low if low < 0 else high
    known = marker in (-100, -1, 255)
    return f"Does {marker} mark examples that do not count? Pass ignore_index={marker}." if known else ""


def check_targets(loss: str | PerExampleLoss, targets: Tensor, width: int | None = None, name: str = "targets") -> None:
    """Refuse targets outside the range of a known loss. Values are read from any device.

    ``width`` is the number of outputs C, or None if it is not known yet. Labels then have no upper bound.
    """
    entry = known(loss)
    if entry is None or not targets.numel():
        return
    takes = entry.takes
    if takes in ("gaussian", "quantiles") and width is not None:
        _check_parts(loss, targets, width, name)
    if takes == "logits" and not targets.is_floating_point():
        low, high = torch.stack(targets.aminmax()).tolist()  # one number pair to read back from a device
        if width == 1:
            _refuse_one_class()
        if low < 0 or (width is not None and high >= width):
            requirement = "be labels from 0 on" if width is None else f"be labels from 0 to {width - 1}"
            checks.refuse(name, requirement, f"labels from {low} to {high}", _label_fix(low, high, width))
    elif takes == "logits" and targets.ndim == 2:
        off = float((targets.sum(-1, dtype=_summed_in(targets)) - 1).abs().max())
        if off > max(1e-3, 2 * torch.finfo(targets.dtype).eps) or float(targets.min()) < 0:
            checks.refuse(name, "be soft labels: non-negative, with sum one", f"sums off by up to {off:.3g}")
    elif takes == "margin":
        values = targets.float() if targets.dtype == torch.bool else targets
        if not bool((values.abs() == 1).all()):
            examples = values.unique().tolist()[:3]
            checks.refuse(name, "be -1 or +1", f"values such as {examples}", "Labels 0 and 1? Use 2 * targets - 1.")
    elif takes == "log_rate" and float(targets.min()) < 0:
        checks.refuse(name, "be counts of at least 0", float(targets.min()))
    elif takes == "label_logits" and targets.dtype != torch.bool:
        low, high = torch.stack(targets.aminmax()).tolist()
        if low < 0 or high > 1:
            fix = "Classes that exclude each other? Use 'cross_entropy'." if targets.ndim == 1 else ""
            checks.refuse(name, "be 0, 1 or probabilities in between", f"numbers from {low:g} to {high:g}", fix)


def _check_parts(loss: str | PerExampleLoss, targets: Tensor, width: int, name: str) -> None:
    """Refuse targets whose number does not go with outputs of several numbers per target."""
    parts = outputs_per_target(loss)
    meaning = "a mean and a log-variance" if name_of(loss) == "gaussian_nll" else f"{parts} quantiles"
    if targets.ndim > 2:
        return  # dense, with its targets at another axis
    number = targets.shape[1] if targets.ndim == 2 else 1
    if width != parts * number:
        fix = f"The network needs {parts * number} outputs: {meaning} for each of {number} target{'s' * (number > 1)}."
        requirement = f"go with the {width} outputs of the network under the loss {text_of(loss)}"
        checks.refuse(name, requirement, checks.shape_text(targets.shape), fix)


def _summed_in(targets: Tensor) -> torch.dtype:
    return torch.promote_types(targets.dtype, torch.float32)


def per_member(
    loss: str | PerExampleLoss, outputs: Float[Tensor, "M B C *S"], targets: Tensor, *, class_axis: int = 2
) -> Float[Tensor, "M B *S"] | Float[Tensor, "M ..."]:
    """Every member's loss on every example. A user's callable is called once, with a batch ``[M·B, C]``.

    Dense outputs ``[M, B, C, *S]`` with targets ``[B, *S]`` give ``[M, B, *S]`` (see `dissensus.dense`).

    >>> per_member("cross_entropy", torch.zeros(5, 2, 3, 8, 8), torch.zeros(2, 8, 8, dtype=torch.int64)).shape
    torch.Size([5, 2, 8, 8])
    """
    if outputs.ndim > 3:
        outputs, targets = arguments.as_tensor(outputs, "outputs"), arguments.as_tensor(targets, "targets")
        flat = dense.positions(outputs, targets, class_axis=class_axis)
        return dense.unflat(per_member(loss, flat.outputs, flat.targets), outputs, class_axis)
    if isinstance(loss, str) or known(loss) is not None:
        return function_of(loss)(outputs, targets)
    members, batch = outputs.shape[:2]
    flat = custom(loss, outputs.flatten(0, 1), targets.repeat(members, *[1] * (targets.ndim - 1)))
    return flat.reshape(members, batch)


def custom(loss: PerExampleLoss, outputs: Float[Tensor, "B C"], targets: Tensor) -> Float[Tensor, " B"]:
    """The values of a user's loss, which must be one number per example."""
    values = loss(outputs, targets)
    if tuple(values.shape) != (outputs.shape[0],):
        fix = "Leave out the mean over the batch (reduction='none')." if values.ndim == 0 else ""
        checks.refuse("loss", f"return one number per example, [B={outputs.shape[0]}]", list(values.shape), fix)
    return values


def batch_mean(
    values: Float[Tensor, "*S B"], example_weights: Float[Tensor, "... B"] | None = None
) -> Float[Tensor, "*S"]:
    """The mean over the batch; with weights Σ_b w_b v_b / Σ_b w_b, as torch normalises class weights.

    Weights are ``[B]``, or ``[M, B]`` for values ``[M, B]``. An example of weight zero is absent, even where its value
    is infinite or NaN. The mean is 0 if all weights are zero: a batch without examples adds nothing to a sum of losses.
    No value is read, so that it runs under ``vmap`` and in a CUDA graph.

    >>> batch_mean(torch.tensor([1.0, 4.0, float("nan")]), torch.tensor([2.0, 1.0, 0.0]))
    tensor(2.)
    """
    if example_weights is None:
        return values.mean(-1)
    weights = example_weights.to(values.dtype)
    total = weights.sum(-1)
    summed = torch.where(weights == 0, 0.0, weights * values).sum(-1)
    return summed / torch.where(total == 0, 1.0, total)


@arguments.arrays
def smoothed(
    targets: Tensor, classes: int, smoothing: float | Tensor, *, dtype: torch.dtype | None = None
) -> Float[Tensor, "*S C"]:
    """Soft labels with a share of each label spread over all classes: (1 − ε) y + ε / C.

    Args:
        targets: Labels ``[...]``, or soft labels ``[..., C]``.
        classes: C.
        smoothing: ε, from 0 to 1.
        dtype: Of the result for labels; torch's default by default. Soft labels keep theirs.

    >>> smoothed(torch.tensor([1]), 4, 0.2)
    tensor([[0.0500, 0.8500, 0.0500, 0.0500]])
    """
    if not isinstance(smoothing, Tensor):
        checks.number("label_smoothing", smoothing, 0, 1)
    if not targets.is_floating_point():
        targets = F.one_hot(targets.long(), classes).to(dtype or torch.get_default_dtype())
    elif targets.shape[-1:] != (classes,):
        checks.refuse(
            "targets", f"have shape [..., C={classes}] when they are floats", checks.shape_text(targets.shape)
        )
    return (1 - smoothing) * targets + smoothing / classes


@arguments.arrays
def class_example_weights(targets: Tensor, class_weights: Float[Tensor, " C"]) -> Float[Tensor, "*S"]:
    """The weight of each example by its class: w_y for a label y, Σ_c y(c) w_c for a soft label.

    >>> class_example_weights(torch.tensor([0, 1, 1]), torch.tensor([1.0, 3.0]))
    tensor([1., 3., 3.])
    """
    _check_class_weights(class_weights)
    if targets.is_floating_point():
        return (targets * class_weights.to(targets.dtype)).sum(-1)
    return class_weights.index_select(0, targets.long().flatten()).view(targets.shape)


@arguments.arrays
def weighted_targets(
    targets: Tensor,
    classes: int,
    *,
    loss: str | PerExampleLoss,
    class_weights: Float[Tensor, " C"] | None = None,
    label_smoothing: float | Tensor = 0.0,
    example_weights: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Class weights and label smoothing as targets and example weights, which every objective takes.

    An example of class y counts w_y times, and its label becomes q = (1 − ε) y + ε / C. The cross-entropy of both is
    torch's: the class weights are inside of the sum over classes,

    Σ_b Σ_c w_c q_b(c) (−log p_b(c)) / Σ_b w_{y_b},

    which is the weighted mean of examples with targets w_c q(c) / w_y and weights w_y. These targets do not sum to one.
    Other losses are not sums over classes: they get q itself, with the weight w_y. For soft labels y the cross-entropy
    is torch's too: targets w_c q(c) and no further weight; other losses weigh an example by Σ_c y(c) w_c.

    Examples of a class of weight zero are absent. (Differs from ``torch.nn.functional.cross_entropy``, where label
    smoothing lets them count in the numerator, but not in the denominator.)

    Args:
        targets: Labels ``[N]`` or soft labels ``[N, C]``. Ignored labels must have been replaced: see
            `dissensus.axes.positions`, which gives them the weight zero.
        classes: C.
        loss: The loss that is trained on, a name from `dissensus.losses` or a callable.
        class_weights: w_c ``[C]``, non-negative.
        label_smoothing: ε, from 0 to 1.
        example_weights: Weights ``[N]`` or ``[M, N]`` that examples have already. They are multiplied.
        dtype: Of soft labels made from labels: that of the outputs.

    Returns:
        Targets and example weights. Both are what they were where there are neither class weights nor smoothing.

    >>> targets, weights = weighted_targets(
    ...     torch.tensor([0, 1]), 2, loss="cross_entropy", class_weights=torch.tensor([1.0, 3.0]), label_smoothing=0.5
    ... )
    >>> targets, weights
    (tensor([[0.7500, 0.7500],
            [0.0833, 0.7500]]), tensor([1., 3.]))
    """
    if class_weights is not None:
        _check_class_weights(class_weights, classes)
    labels = targets
    if isinstance(label_smoothing, Tensor) or checks.number("label_smoothing", label_smoothing, 0, 1) > 0:
        labels = smoothed(targets, classes, label_smoothing, dtype=dtype)
    if class_weights is None:
        return labels, example_weights
    weights = class_example_weights(targets, class_weights)
    if loss in ("cross_entropy", cross_entropy) and labels.is_floating_point():
        labels = labels * class_weights.to(labels.dtype)
        if targets.is_floating_point():
            return labels, example_weights
        labels = labels / torch.where(weights == 0, 1.0, weights).unsqueeze(-1).to(labels.dtype)
    return labels, weights if example_weights is None else example_weights * weights


def _check_class_weights(class_weights: Tensor, classes: int | None = None) -> None:
    if class_weights.ndim != 1 or (classes is not None and len(class_weights) != classes):
        wanted = "[C]" if classes is None else f"[C={classes}]"
        checks.refuse("class_weights", f"have shape {wanted}", checks.shape_text(class_weights.shape))
    if not class_weights.is_floating_point():
        fix = "Use class_weights.float()."
        checks.refuse("class_weights", "be floating point", str(class_weights.dtype), fix, TypeError)
    if checks.is_concrete(class_weights) and not bool(((class_weights >= 0) & class_weights.isfinite()).all()):
        checks.refuse("class_weights", "be finite numbers of at least 0", "negative numbers, infinities or NaN")


def at_label(values: Float[Tensor, "*S B C"], labels: Tensor) -> Float[Tensor, "*S B"]:
    """Each example's entry at its label, for all leading axes."""
    index = labels.long().expand(values.shape[:-1]).unsqueeze(-1)
    return values.gather(-1, index).squeeze(-1)


def as_values(outputs: Tensor, targets: Tensor) -> Tensor:
    """Real targets in the shape and dtype of outputs. With one output, ``[B]`` becomes ``[B, 1]``."""
    return checks.value_targets(targets, *outputs.shape[-2:]).to(outputs.dtype)
