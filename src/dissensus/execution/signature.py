"""What two networks must share to be run by one network's code."""

from torch import fx, nn

from dissensus.fingerprint import fingerprint, module_settings


def signature(network: nn.Module) -> list[tuple[str, str, str]]:
    """Layers and their settings, as (layer, setting, fingerprint of its value)."""
    entries: list[tuple[str, str, str]] = []
    for name, layer in network.named_modules():
        entries.append((name, "the class", f"{type(layer).__module__}.{type(layer).__qualname__}"))
        if isinstance(layer, fx.GraphModule):
            entries.append((name, "the code", layer.code))
            continue
        settings = module_settings(layer)
        entries += [(name, setting, fingerprint(value, allow_opaque=True)) for setting, value in settings.items()]
    return entries
