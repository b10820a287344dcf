"""Networks that were compiled: members run their original code, since compiled code holds one set of weights."""

from torch import nn


def uncompiled(network: nn.Module) -> nn.Module:
    """The network behind ``torch.compile(network)``, with compiled layers inside replaced too; in place.

    >>> compiled = nn.Sequential(nn.Linear(1, 1))
    >>> compiled.compile()
    >>> uncompiled(compiled) is compiled, is_compiled(compiled)
    (True, False)
    """
    network = _original(network)
    for module in list(network.modules()):
        module._compiled_call_impl = None
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _original(child)
    return network


def is_compiled(network: nn.Module) -> bool:
    """Whether a network or a layer of it was compiled."""
    return any(
        module._compiled_call_impl is not None or _original(module) is not module for module in network.modules()
    )


def _original(module: nn.Module) -> nn.Module:
    original = vars(module).get("_orig_mod") or module._modules.get("_orig_mod")
    return _original(original) if isinstance(original, nn.Module) else module
