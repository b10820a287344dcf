"""Whether a model is attacked on rows that it was trained on, where its accuracy says nothing about new data."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dissensus.attacks.target_model import Model, device_of, evaluation_mode
from dissensus.calls import call
from dissensus.ensemble import Ensemble
from dissensus.execution import original
from dissensus.masks import Masked


class TrainingOverlap(NamedTuple):
    """Examples that are training rows."""

    rows: int
    """Number of examples that were recognised."""
    known: bool
    """Whether all training rows are known, so that the others are new to the model."""


@torch.no_grad()
def training_overlap(model: Model, x: Float[Tensor, "N *S"], batch_size: int) -> TrainingOverlap:
    """The overlap of examples with the training rows of ensembles and masked networks that a model consists of.

    Rows are compared as they arrive there: a model may standardise its inputs first. Of other models nothing is known.

    >>> training_overlap(nn.Linear(3, 2), torch.zeros(4, 3), 2)
    TrainingOverlap(rows=0, known=False)
    """
    parts = list(model) if isinstance(model, list | tuple | nn.ModuleList) else [model]
    parts = [original(part) if isinstance(part, nn.Module) else part for part in parts]  # compiled ones run no hooks
    found = [_recorded(part) for part in parts]
    recognised = torch.zeros(len(x), dtype=torch.bool)
    for part, networks in zip(parts, found, strict=True):
        if any(len(network.training_rows.products) for network in networks):
            with evaluation_mode(part):
                recognised |= _recognised(part, networks, x, batch_size)
    known = all(networks and all(_is_known(network) for network in networks) for networks in found)
    return TrainingOverlap(int(recognised.sum()), bool(parts) and known)


def _recorded(model: object) -> list[Ensemble | Masked]:
    """The outermost parts of a model that have a record of training rows."""
    if isinstance(model, Ensemble | Masked):
        return [model]
    return [network for part in model.children() for network in _recorded(part)] if isinstance(model, nn.Module) else []


def _is_known(network: Ensemble | Masked) -> bool:
    return network.training_rows.complete and network.training_rows.share == 1


def _recognised(model: Any, networks: list[Ensemble | Masked], x: Tensor, batch_size: int) -> Tensor:
    """Which examples a network has a record of, seen from what it gets in a pass of the whole model."""
    parts: list[Tensor] = []
    device = device_of(model, x.device)
    for batch in x.split(batch_size):
        result = torch.zeros(len(batch), dtype=torch.bool)

        def note(network: Any, args: Any, kwargs: Any, result: Tensor = result) -> None:
            rows = network.training_rows.contains(call(*args, **kwargs))
            if rows.shape == result.shape:
                result |= rows

        hooks = [network.register_forward_pre_hook(note, with_kwargs=True) for network in networks]
        try:
            model(batch.to(device, copy=True))
        finally:
            for hook in hooks:
                hook.remove()
        parts.append(result)
    return torch.cat(parts)
