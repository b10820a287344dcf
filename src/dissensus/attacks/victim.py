"""What is attacked: a model as it is asked, and which of its answers count."""

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
"""What is attacked: the mean probability, the mean score, every member (the sum of their losses), or one of them."""
POOLS = ("probability", "score", "members")


class Victim:
    """A model behind one interface: member outputs ``[M, B, C]``, the scores an attack climbs, and the verdict."""

    def __init__(self, model: Model, pool: PoolName) -> None:
        if isinstance(pool, bool) or not isinstance(pool, int):
            checks.one_of("pool", pool, POOLS)
        self.model, self.pool = model, pool

    def outputs(self, x: Float[Tensor, "B *S"]) -> Float[Tensor, "M B C"]:
        """Raw outputs; a plain classifier is a single member. Halves are taken as float32 from here on."""
        outputs = _asked(self.model, x)
        if not isinstance(outputs, Tensor) or outputs.ndim not in (2, 3) or outputs.shape[-2] != len(x):
            got = checks.shape_text(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            checks.refuse("model", f"return logits [B={len(x)}, C], or [M, B={len(x)}, C] of an ensemble", got)
        if not outputs.is_floating_point() or outputs.shape[-1] < 2:
            got = f"{outputs.dtype} of {outputs.shape[-1]} classes"
            checks.refuse("model", "return floating-point logits of two classes or more", got)
        if outputs.dtype in (torch.float16, torch.bfloat16):
            outputs = outputs.float()
        return outputs if outputs.ndim == 3 else outputs.unsqueeze(0)

    def scores(self, outputs: Float[Tensor, "M B C"]) -> Float[Tensor, "K B C"]:
        """What losses are taken of and summed over the first axis: of one row, unless all members are attacked."""
        return outputs if self.pool == "members" else self.verdict(outputs).unsqueeze(0)

    def verdict(self, outputs: Float[Tensor, "M B C"]) -> Float[Tensor, "B C"]:
        """Scores whose first choice is the prediction.

        ``"probability"`` and ``"members"``: log mean probability, logsumexp_m log_softmax z_m − log M; ``"score"``:
        mean logits. Of a single member it is the raw logits, in any case: log_softmax only shifts them.
        """
        members = outputs.shape[0]
        if isinstance(self.pool, int):
            if not 0 <= self.pool < members:
                checks.refuse("pool", f"be a member from 0 to {members - 1}", self.pool)
            return outputs[self.pool]
        if members == 1:
            return outputs[0]
        return pooling.mean_output(outputs) if self.pool == "score" else pooling.mean_probability(outputs)


def chosen(verdict: Float[Tensor, "B C"], classes: Integer[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Whether the prediction is that class. An answer with a NaN in it is no prediction of anything."""
    return (verdict.argmax(-1) == classes) & told(verdict)


def told(verdict: Float[Tensor, "B C"]) -> Bool[Tensor, " B"]:
    """Whether an answer is one: free of NaN."""
    return ~verdict.isnan().any(-1)


def _asked(model: Model, x: Tensor) -> object:
    """What a model says of a copy of the inputs: it may write into what it is handed."""
    if not isinstance(model, Sequence | nn.ModuleList):
        return model(x.clone())
    outputs = [one(x.clone()) for one in model]
    shapes = {tuple(output.shape) for output in outputs}
    if len(shapes) != 1 or outputs[0].ndim != 2:
        checks.refuse("model", "be a list of classifiers x -> [B, C] that agree in shape", sorted(shapes))
    return torch.stack(outputs)


def networks_of(model: Model) -> list[nn.Module]:
    """The modules whose mode and place are known: the model, those of a list, or the owner of a bound method."""
    each = list(model) if isinstance(model, Sequence | nn.ModuleList) else [model]
    owners = [one if isinstance(one, nn.Module) else getattr(one, "__self__", None) for one in each]
    return [owner for owner in owners if isinstance(owner, nn.Module)]


def device_of(model: Model, otherwise: torch.device) -> torch.device:
    """Where a model is: its first parameter or buffer."""
    for network in networks_of(model):
        for tensor in (*network.parameters(), *network.buffers()):
            return tensor.device
    return otherwise


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Evaluation mode for a while, with parameters that want no gradient; afterwards everything is as it was."""
    networks = networks_of(model)
    modes = [(network, network.training, {m: m.training for m in network.modules()}) for network in networks]
    wanted = [p for network in networks for p in network.parameters() if p.requires_grad and p.is_leaf]
    try:
        for network in networks:
            network.eval()
        for parameter in wanted:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
        for network, mode, each in modes:
            network.train(mode)
            for layer, own in each.items():
                layer.training = own
