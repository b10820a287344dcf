"""The named outputs of an exported program: functions ``[M, B, C] -> {name: tensor}``, one for each kind of outputs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from dissensus import checks, dense, losses, pooling, scores
from dissensus.axes import PerExampleLoss

Task = Literal["classification", "regression"]
Pool = Literal["probability", "score", "vote"]
Outputs = Callable[[Tensor], Mapping[str, Tensor]]
"""Member outputs ``[M, B, ...]`` to what a program returns, by name."""
_TASK_LOSSES = {"classification": "cross_entropy", "regression": "squared_error"}
_CLASSIFICATION = ("logits", "label_logits")
"""Kinds of outputs (see `dissensus.losses`) that stand for classes or labels."""


def chosen(
    task: Task | None,
    pool: Pool | None,
    outputs: Outputs | None,
    *,
    loss: str | PerExampleLoss | None = None,
    class_axis: int = 2,
    member_outputs: bool = False,
) -> Outputs:
    """The function that makes a program's outputs."""
    if outputs is not None:
        if not callable(outputs):
            fix = "It gets the members' outputs [M, B, ...] and returns {name: tensor}."
            checks.refuse("outputs", "be a function", type(outputs).__name__, fix, TypeError)
        others = {"task": task, "loss": loss, "pool": pool, "member_outputs": member_outputs or None}
        for name, value in others.items():
            if value is not None:
                requirement = "come without `task`, `loss`, `pool` and `member_outputs`, which it replaces"
                checks.refuse("outputs", requirement, f"`{name}`")
        return outputs
    loss = loss_of(task, loss)
    entry = losses.known(loss)
    if entry is None:
        fix = "Pass `task`, or `outputs`, a function of the members' outputs."
        checks.refuse("loss", "be one of dissensus.losses", losses.text_of(loss), fix)
    pools = (*entry.pools, "vote") if entry.takes == "logits" and "vote" not in entry.pools else entry.pools
    pool = entry.pools[0] if pool is None else pool
    checks.one_of("pool", pool, pools)
    settings = losses.settings_of(loss)
    makers: dict[str, Outputs] = {
        "logits": partial(classification, pool=pool, class_axis=class_axis),
        "label_logits": partial(labels, pool=pool),
        "values": regression,
        "margin": regression,
        "log_rate": partial(counts, pool=pool),
        "gaussian": partial(gaussian, class_axis=class_axis, **settings),
        "quantiles": partial(quantiles, class_axis=class_axis, **settings),
    }
    function = makers[entry.takes]
    name = "member_logits" if entry.takes in _CLASSIFICATION else "member_outputs"

    def named(member_values: Tensor) -> dict[str, Tensor]:
        results = dict(function(member_values))
        return {**results, name: member_values} if member_outputs else results

    return named


def loss_of(task: Task | None, loss: str | PerExampleLoss | None) -> str | PerExampleLoss:
    """The loss that says what members return; that of a task where none is named.

    >>> loss_of("regression", None), loss_of(None, "bce")
    ('squared_error', 'bce')
    """
    if task is not None:
        checks.one_of("task", task, _TASK_LOSSES)
    if loss is None:
        return _TASK_LOSSES[task or "classification"]
    entry = losses.known(loss)
    if entry is not None and task is not None:
        meant = "classification" if entry.takes in _CLASSIFICATION else "regression"
        if task != meant:
            checks.refuse("task", f"be {meant!r} with the loss {losses.text_of(loss)}", repr(task), "Leave it out.")
    return loss


def classification(logits: Tensor, pool: Pool, class_axis: int = 2) -> dict[str, Tensor]:
    """Probabilities and uncertainty; every position of dense outputs has its own.

    >>> results = classification(torch.tensor([[[0.0, 99.0]], [[99.0, 0.0]]]), "probability")
    >>> {name: [round(number, 4) for number in values.flatten().tolist()] for name, values in results.items()}
    {'probs': [0.5, 0.5], 'entropy': [0.6931], 'mutual_information': [0.6931], 'aleatoric': [0.0]}
    """
    logits = checks.full_precision(logits)
    axis = dense.axis_of(logits, class_axis)
    if pool == "probability":
        probs = logits.softmax(axis).mean(0)  # not by logarithms: ONNX would round log M to float32
    elif pool == "score":
        probs = pooling.mean_score(logits, class_axis=class_axis).exp()
    else:
        probs = pooling.vote_share(logits, class_axis=class_axis)
    member_probs = logits.softmax(axis).movedim(axis, 2)  # scores take the class axis there
    return {
        "probs": probs,
        "entropy": scores.ensemble_entropy(member_probs),
        "mutual_information": scores.mutual_information(member_probs),
        "aleatoric": scores.mean_entropy(member_probs),
    }


def labels(logits: Tensor, pool: Pool) -> dict[str, Tensor]:
    """Probability and uncertainty of every label, for labels that do not exclude each other; all ``[B, C]``.

    >>> results = labels(torch.tensor([[[-99.0, 0.0]], [[99.0, 0.0]]]), "probability")
    >>> {name: [round(number, 4) for number in values.flatten().tolist()] for name, values in results.items()}
    {'probs': [0.5, 0.5], 'entropy': [0.6931, 0.6931], 'mutual_information': [0.6931, 0.0], 'aleatoric': [0.0, 0.6931]}
    """
    logits = checks.full_precision(logits)
    mean = pooling.mean_label_probability(logits)
    probs = mean if pool == "probability" else pooling.mean_output(logits)
    entropy, aleatoric = _label_entropy(mean), _label_entropy(logits).mean(0)
    return {
        "probs": probs.sigmoid(),
        "entropy": entropy,
        "mutual_information": (entropy - aleatoric).clamp_min(0),  # below zero by rounding only
        "aleatoric": aleatoric,
    }


def _label_entropy(log_odds: Tensor) -> Tensor:
    """Entropy of a yes or no with these log-odds, in nats."""
    odds = torch.stack([log_odds.sigmoid(), (-log_odds).sigmoid()])
    return torch.special.entr(odds).sum(0)


def regression(outputs: Tensor) -> dict[str, Tensor]:
    """Mean, variance and standard deviation over members.

    >>> {name: values.item() for name, values in regression(torch.tensor([[[1.0]], [[3.0]]])).items()}
    {'mean': 2.0, 'variance': 1.0, 'std': 1.0}
    """
    outputs = checks.full_precision(outputs)
    variance = outputs.var(0, correction=0)
    return {"mean": pooling.mean_output(outputs), "variance": variance, "std": variance.sqrt()}


def counts(log_rate: Tensor, pool: Pool) -> dict[str, Tensor]:
    """Expected counts, and the variance of counts: that of Poisson variables, and of the members' rates.

    >>> results = counts(torch.tensor([[[1.0]], [[3.0]]]).log(), "probability")
    >>> {name: round(values.item(), 4) for name, values in results.items()}
    {'mean': 2.0, 'variance': 3.0, 'std': 1.7321, 'aleatoric': 2.0, 'epistemic': 1.0}
    """
    log_rate = checks.full_precision(log_rate)
    rate = log_rate.exp()  # a Poisson variable has its rate for a variance
    moments = pooling.moment_matched(rate, rate)
    return _with_variances(moments if pool == "probability" else moments._replace(mean=log_rate.mean(0).exp()))


def gaussian(outputs: Tensor, class_axis: int = 2, floor: float = losses.VARIANCE_FLOOR) -> dict[str, Tensor]:
    """Mean and variance of the mixture of members' Gaussians, and both parts of the variance; all ``[B, D]``.

    >>> results = gaussian(torch.tensor([[[-1.0, 0.0]], [[1.0, 0.0]]]))
    >>> {name: round(values.item(), 4) for name, values in results.items()}
    {'mean': 0.0, 'variance': 2.0, 'std': 1.4142, 'aleatoric': 1.0, 'epistemic': 1.0}
    """
    means, variances = losses.gaussian_moments(outputs, floor, class_axis=class_axis)
    return _with_variances(pooling.moment_matched(means, variances))


def _with_variances(moments: pooling.Moments) -> dict[str, Tensor]:
    variance = moments.aleatoric + moments.epistemic
    return {
        "mean": moments.mean,
        "variance": variance,
        "std": variance.sqrt(),
        "aleatoric": moments.aleatoric,
        "epistemic": moments.epistemic,
    }


def quantiles(
    outputs: Tensor, class_axis: int = 2, levels: Sequence[float] = losses.QUANTILE_LEVELS
) -> dict[str, Tensor]:
    """Pooled quantiles ``[B, D, Q]`` in rising order, their range ``[B, D]``, and their variance over members.

    >>> results = quantiles(torch.tensor([[[-1.0, 0.0, 2.0]], [[-3.0, 0.0, 2.0]]]))
    >>> {name: values.tolist() for name, values in results.items()}
    {'quantiles': [[[-2.0, 0.0, 2.0]]], 'width': [[4.0]], 'variance': [[[1.0, 0.0, 0.0]]]}
    """
    axis, count = dense.axis_of(outputs, class_axis), len(losses.check_levels(levels))
    values = checks.full_precision(outputs).movedim(axis, -1)
    if values.shape[-1] % count:
        got = checks.shape_text(outputs.shape)
        checks.refuse("outputs", f"have {count} quantiles per target, one for each of the levels {levels}", got)
    values = values.unflatten(-1, (-1, count))
    pooled = values.mean(0).sort(-1).values
    results = {"quantiles": pooled, "variance": values.var(0, correction=0)}
    named = {name: result.movedim(-2, axis - 1) for name, result in results.items()}
    width = (pooled[..., -1] - pooled[..., 0]).movedim(-1, axis - 1)
    return {"quantiles": named["quantiles"], "width": width, "variance": named["variance"]}


def checked(results: Any) -> dict[str, Tensor]:
    """What a function of outputs has returned; anything but named tensors is refused."""
    requirement = "return tensors by name, as in {'mean': values.mean(0)}"
    if not isinstance(results, Mapping) or not results:
        checks.refuse("outputs", requirement, type(results).__name__, error=TypeError)
    for name, value in results.items():
        if not isinstance(name, str) or not name or not isinstance(value, Tensor):
            checks.refuse("outputs", requirement, f"{name!r}: {type(value).__name__}", error=TypeError)
    return dict(results)
