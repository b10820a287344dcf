"""What two networks must share to be run by one network's code."""

import functools
import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from dissensus.fingerprint import code_digest

_OF_EVERY_MODULE = {*vars(nn.Module()), "_flat_weights", "_flat_weights_names", "_flat_weight_refs"}
_DEPTH = 4


def signature(network: nn.Module) -> list[tuple[str, str, str]]:
    """Layers and their settings, as (layer, setting, value)."""
    found: list[tuple[str, str, str]] = []
    for name, layer in network.named_modules():
        found.append((name, "the class", f"{type(layer).__module__}.{type(layer).__qualname__}"))
        if isinstance(layer, fx.GraphModule):
            found.append((name, "the code", layer.code))
            continue
        for key, value in vars(layer).items():
            # Old-style weight norm and spectral norm keep a weight that they make anew from parameters at every pass.
            made = {f"{key}_orig", f"{key}_g"} & set(layer._parameters)
            if key not in _OF_EVERY_MODULE and not made:
                found.append((name, key, described(value)))
    return found


def described(value: Any, depth: int = _DEPTH) -> str:
    """A value in words that are the same in every process: tensors by checksum, functions with what they close over."""
    if isinstance(value, Tensor):
        return "made by a forward pass" if value.grad_fn is not None else checksum(value)
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype} {value.shape} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
    if isinstance(value, int | float | complex | str | bytes | type(None) | torch.dtype | torch.device):
        return repr(value)
    if depth == 0:
        return type(value).__qualname__
    if isinstance(value, dict):
        return repr({str(key): described(item, depth - 1) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return type(value).__name__ + repr([described(item, depth - 1) for item in value])
    if isinstance(value, set | frozenset):
        return repr(sorted(described(item, depth - 1) for item in value))
    if isinstance(value, functools.partial):
        return f"partial {described([value.func, value.args, value.keywords], depth)}"
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if hasattr(value, "__code__"):  # a function: what it does, and what it closes over; all lambdas have one name
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        held = [cells, value.__defaults__, value.__kwdefaults__]
        return f"{value.__module__}.{value.__qualname__} {code_digest(value.__code__)} {described(held, depth - 1)}"
    if isinstance(value, nn.Module):
        return repr(signature(value)) + repr([checksum(tensor) for tensor in value.state_dict().values()])
    return f"{type(value).__qualname__} {described(vars(value), depth - 1)}"


def checksum(tensor: Tensor) -> str:
    """Dtype, shape and a checksum of the numbers."""
    plain = tensor.detach().cpu().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return f"{plain.dtype} {tuple(plain.shape)} {hashlib.sha256(raw).hexdigest()}"
