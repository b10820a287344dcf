"""Random numbers that members draw from global generators, which no key determines."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn

from dissensus.calls import NetworkInputs, first_tensor
from dissensus.execution.skeleton import Skeleton, Tensors
from dissensus.randomness import GlobalGenerators, generators_kept

MESSAGE = (
    "%s draws random numbers from torch's global generator in training, so equal seeds give equal results only after "
    "torch.manual_seed and with one backend. Use layers such as nn.Dropout, whose draws are keyed by seed and member."
)


def unkeyed_layer(skeleton: Skeleton, params: Tensors, buffers: Tensors, x: NetworkInputs) -> str | None:
    """A layer of one member that draws from global generators in a forward pass, in words; None without one.

    Functions that drop units are keyed from now on where that is possible (``skeleton.functions_keyed``). The pass runs
    on copies of the buffers and leaves no trace.
    """

    def draws() -> bool:
        before = GlobalGenerators.now(first_tensor(x).device)
        copies = {name: tensor.clone() for name, tensor in buffers.items()}
        with skeleton.lending(params, copies, late={}):
            skeleton.passed(x)
        return before.drawn_from()

    with torch.no_grad(), generators_kept(first_tensor(x).device):
        if not draws():
            skeleton.functions_keyed = False
            return None
        if skeleton.key_functions() and not draws():
            return None
        return _innermost(skeleton.network, draws, first_tensor(x).device)


def _innermost(network: nn.Module, run_pass: Callable[[], bool], device: torch.device) -> str:
    """The first layer to finish during whose pass numbers are drawn."""
    found: list[str] = []
    with ExitStack() as stack:
        for path, layer in network.named_modules():
            states: list[GlobalGenerators] = []

            def enter(*_: object, states: list[GlobalGenerators] = states) -> None:
                states.append(GlobalGenerators.now(device))

            def leave(module: nn.Module, *_: object, states: list[GlobalGenerators] = states, path: str = path) -> None:
                if states.pop().drawn_from():
                    found.append(f"layer {path!r} ({type(module).__name__})" if path else "the network's own code")

            stack.callback(layer.register_forward_pre_hook(enter).remove)
            stack.callback(layer.register_forward_hook(leave).remove)
        run_pass()
    return found[0] if found else "the network"
