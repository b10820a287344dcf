"""Networks that were compiled: members run their original code, since compiled code holds one set of weights."""

from torch import nn


def uncompiled(network: nn.Module) -> nn.Module:
    """The network behind ``torch.compile(network)``, with compiled layers inside replaced too; in place.

    >>> network = nn.Linear(1, 1)
    >>> uncompiled(network) is network, is_compiled(network)
    (True, False)
    """
    network = original(network)
    for module in list(network.modules()):
        vars(module).pop("_compiled_call_impl", None)
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = original(child)
    return network


def is_compiled(network: nn.Module) -> bool:
    """Whether a network or a layer of it was compiled."""
    return any(module._compiled_call_impl is not None or original(module) is not module for module in network.modules())


def original(module: nn.Module) -> nn.Module:
    """The module behind ``torch.compile(module)``; other modules as they are."""
    inside = vars(module).get("_orig_mod") or module._modules.get("_orig_mod")
    return original(inside) if isinstance(inside, nn.Module) else module
