"""The attacked model: member outputs, the scores that losses are computed from, and those behind predictions."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn

from dissensus import checks, pooling

Model = Callable[[Any], Any] | Sequence[Callable[[Any], Any]]
"""An ensemble ``x -> [M, B, C]``, a plain classifier ``x -> [B, C]``, or a list of such classifiers."""
PoolName = Literal["probability", "score", "members"] | int
"""What is attacked: the mean probability, the mean score, every member (the sum of their losses), or one member."""
POOLS = ("probability", "score", "members")


class TargetModel:
    """One interface for every kind of model.

    ``outputs`` are member outputs ``[M, B, C]``, ``attacked_scores`` are what losses are computed from, and
    ``pooled_scores`` are what the prediction is read from.
    """

    def __init__(self, model: Model, pool: PoolName) -> None:
        if isinstance(pool, bool) or not isinstance(pool, int):
            checks.one_of("pool", pool, POOLS)
        self.model, self.pool = model, pool

    def outputs(self, x: Float[Tensor, "B *S"]) -> Float[Tensor, "M B C"]:
        """Raw outputs. A plain classifier counts as one member. Half-precision outputs are converted to float32."""
        outputs = _raw_outputs(self.model, x)
        if not isinstance(outputs, Tensor) or outputs.ndim not in (2, 3) or outputs.shape[-2] != len(x):
            got = checks.shape_text(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            checks.refuse("model", f"return logits [B={len(x)}, C], or [M, B={len(x)}, C] of an ensemble", got)
        if not outputs.is_floating_point() or outputs.shape[-1] < 2:
            got = f"{outputs.dtype} of {outputs.shape[-1]} classes"
            checks.refuse("model", "return floating-point logits of two classes or more", got)
        if outputs.dtype in (torch.float16, torch.bfloat16):
            outputs = outputs.float()
        return outputs if outputs.ndim == 3 else outputs.unsqueeze(0)

    def attacked_scores(self, outputs: Float[Tensor, "M B C"]) -> Float[Tensor, "K B C"]:
        """Scores that losses are computed from and summed over the first axis: K = M if all members are attacked."""
        return outputs if self.pool == "members" else self.pooled_scores(outputs).unsqueeze(0)

    def pooled_scores(self, outputs: Float[Tensor, "M B C"]) -> Float[Tensor, "B C"]:
        """Scores whose largest entry is the prediction.

        ``"probability"`` and ``"members"``: log mean probability, logsumexp_m log_softmax z_m − log M. ``"score"``:
        mean logits. With a single member they are its raw logits in every case, since log_softmax only shifts them.
        """
        members = outputs.shape[0]
        if isinstance(self.pool, int):
            if not 0 <= self.pool < members:
                checks.refuse("pool", f"be a member from 0 to {members - 1}", self.pool)
            return outputs[self.pool]
        if members == 1:
            return outputs[0]
        return pooling.mean_output(outputs) if self.pool == "score" else pooling.mean_probability(outputs)


def predicts(scores: Float[Tensor, "B C"], classes: Integer[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Whether the prediction is the class. Scores that contain NaN predict no class."""
    return (scores.argmax(-1) == classes) & is_valid(scores)


def is_valid(scores: Float[Tensor, "B C"]) -> Bool[Tensor, " B"]:
    """Whether scores are free of NaN."""
    return ~scores.isnan().any(-1)


def _raw_outputs(model: Model, x: Tensor) -> object:
    """Outputs on a copy of the inputs, because a model may write into its argument."""
    if not isinstance(model, Sequence | nn.ModuleList):
        return model(x.clone())
    outputs = [member(x.clone()) for member in model]
    shapes = {tuple(output.shape) for output in outputs}
    if len(shapes) != 1 or outputs[0].ndim != 2:
        checks.refuse("model", "be a list of classifiers x -> [B, C] that agree in shape", sorted(shapes))
    return torch.stack(outputs)


def modules_of(model: Model) -> list[nn.Module]:
    """Modules whose mode and device are known: the model, the entries of a list, or the owner of a bound method."""
    entries = list(model) if isinstance(model, Sequence | nn.ModuleList) else [model]
    owners = [entry if isinstance(entry, nn.Module) else getattr(entry, "__self__", None) for entry in entries]
    return [owner for owner in owners if isinstance(owner, nn.Module)]


def device_of(model: Model, default: torch.device) -> torch.device:
    """Device of the first parameter or buffer, or the default if there is none."""
    for module in modules_of(model):
        for tensor in (*module.parameters(), *module.buffers()):
            return tensor.device
    return default


@contextmanager
def evaluation_mode(model: Model) -> Iterator[None]:
    """Evaluation mode without gradients of parameters; on exit all modes and ``requires_grad`` flags are restored."""
    modules = modules_of(model)
    modes = [(module, module.training, {layer: layer.training for layer in module.modules()}) for module in modules]
    trainable = [p for module in modules for p in module.parameters() if p.requires_grad and p.is_leaf]
    try:
        for module in modules:
            module.eval()
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
        for module, training, layer_modes in modes:
            module.train(training)
            for layer, layer_training in layer_modes.items():
                layer.training = layer_training
