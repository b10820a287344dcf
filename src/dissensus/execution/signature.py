"""What two networks must share to be run by one network's code."""

import hashlib

import torch
from torch import Tensor, nn


def signature(network: nn.Module) -> list[tuple[str, str, str]]:
    """What two networks must share to be run by one's code: layers, and their settings, as (layer, setting, value)."""
    found: list[tuple[str, str, str]] = []
    for name, layer in network.named_modules():
        found.append((name, "the class", f"{type(layer).__module__}.{type(layer).__qualname__}"))
        own = {key: value for key, value in vars(layer).items() if not key.startswith("_") and key != "training"}
        found += [(name, key, _described(value)) for key, value in own.items()]
    return found


def _described(value: object) -> str:
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return "made from parameters"
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {hashlib.sha256(value.detach().cpu().numpy().tobytes()).hexdigest()}"
    if isinstance(value, dict):
        return repr({key: _described(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return repr([_described(item) for item in value])
    if isinstance(value, int | float | str | bool | type(None) | torch.dtype | torch.device):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)  # functions and objects by what they are
