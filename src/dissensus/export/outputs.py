"""The named outputs of an exported program: functions ``[M, B, C] -> {name: tensor}``."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor

from dissensus import checks, dense, pooling, scores

Task = Literal["classification", "regression"]
Pool = Literal["probability", "score", "vote"]
Outputs = Callable[[Tensor], Mapping[str, Tensor]]
"""Member outputs ``[M, B, ...]`` to what a program returns, by name."""


def chosen(
    task: Task, pool: Pool | None, outputs: Outputs | None, *, class_axis: int = 2, member_outputs: bool = False
) -> Outputs:
    """The function that makes a program's outputs."""
    if outputs is not None:
        if not callable(outputs):
            fix = "It gets the members' outputs [M, B, ...] and returns {name: tensor}."
            checks.refuse("outputs", "be a function", type(outputs).__name__, fix, TypeError)
        if pool is not None or member_outputs:
            got = "`pool`" if pool is not None else "`member_outputs`"
            checks.refuse("outputs", "come without `pool` and `member_outputs`, which it replaces", got)
        return outputs
    checks.one_of("task", task, ("classification", "regression"))
    pools = ("score",) if task == "regression" else ("probability", "score", "vote")
    pool = pool or ("score" if task == "regression" else "probability")
    checks.one_of("pool", pool, pools)

    def named(member_values: Tensor) -> dict[str, Tensor]:
        if task == "regression":
            results, name = regression(member_values), "member_outputs"
        else:
            results, name = classification(member_values, pool, class_axis), "member_logits"
        return {**results, name: member_values} if member_outputs else results

    return named


def classification(logits: Tensor, pool: Pool, class_axis: int = 2) -> dict[str, Tensor]:
    """Probabilities and uncertainty; every position of dense outputs has its own.

    >>> import torch
    >>> results = classification(torch.tensor([[[0.0, 99.0]], [[99.0, 0.0]]]), "probability")
    >>> {name: [round(number, 4) for number in values.flatten().tolist()] for name, values in results.items()}
    {'probs': [0.5, 0.5], 'entropy': [0.6931], 'mutual_information': [0.6931], 'aleatoric': [0.0]}
    """
    logits = checks.full_precision(logits)
    axis = dense.axis_of(logits, class_axis)
    if pool == "probability":
        probs = pooling.mean_probability(logits, class_axis=class_axis).exp()
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


def regression(outputs: Tensor) -> dict[str, Tensor]:
    """Mean, variance and standard deviation over members.

    >>> import torch
    >>> {name: values.item() for name, values in regression(torch.tensor([[[1.0]], [[3.0]]])).items()}
    {'mean': 2.0, 'variance': 1.0, 'std': 1.0}
    """
    outputs = checks.full_precision(outputs)
    variance = outputs.var(0, correction=0)
    return {"mean": pooling.mean_output(outputs), "variance": variance, "std": variance.sqrt()}


def checked(results: Any) -> dict[str, Tensor]:
    """What a function of outputs has returned; anything but named tensors is refused."""
    requirement = "return tensors by name, as in {'mean': values.mean(0)}"
    if not isinstance(results, Mapping) or not results:
        checks.refuse("outputs", requirement, type(results).__name__, error=TypeError)
    for name, value in results.items():
        if not isinstance(name, str) or not name or not isinstance(value, Tensor):
            checks.refuse("outputs", requirement, f"{name!r}: {type(value).__name__}", error=TypeError)
    return dict(results)
