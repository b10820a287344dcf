"""The precision of training, the memory layout of images, and whether every sum has a fixed order."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dissensus import checks
from dissensus.execution import Body
from dissensus.execution.tf32 import tf32

Precision = Literal["auto", "bf16", "tf32", "float32"]
HasModules = nn.Module | Body
WORTH_IT = 256
"""Linear layers of at least this width run faster in bf16; narrower ones are bound by launches and only lose digits."""


@dataclass(frozen=True)
class PrecisionSettings:
    """Requested numerics; see `dissensus.fit`."""

    precision: str = "auto"
    channels_last: bool | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        checks.flag("deterministic", self.deterministic)
        if self.channels_last is not None and not isinstance(self.channels_last, bool):
            checks.refuse("channels_last", "be True, False or None", repr(self.channels_last), error=TypeError)


@dataclass(frozen=True)
class Numerics:
    """Numerics after all decisions; see `numerics`."""

    precision: str
    channels_last: bool
    deterministic: bool
    device: torch.device

    def passes(self) -> AbstractContextManager[Any]:
        """The context in which networks run."""
        if self.precision != "bf16":
            return nullcontext()
        # Without its cache: that would keep casts of one step for the next, and out of a captured graph.
        return torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False)

    def laid(self, x: Tensor) -> Tensor:
        """Images ``[..., C, H, W]`` in the layout of the convolutions; other tensors as they are."""
        if not self.channels_last or x.ndim not in (4, 5):
            return x
        return x.movedim(-3, -1).contiguous().movedim(-1, -3)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Set the libraries' switches for a training, and restore them afterwards."""
        cudnn: Any = torch.backends.cudnn
        if self.device.type != "cuda" and not self.deterministic:
            yield
            return
        benchmark = cudnn.benchmark
        fixed, warns = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for, or torch refuses
            torch.use_deterministic_algorithms(True)
        cudnn.benchmark = not (self.deterministic or fixed)
        try:
            with tf32({"float32": False, "tf32": True}.get(self.precision)):
                yield
        finally:
            cudnn.benchmark = benchmark
            torch.use_deterministic_algorithms(fixed, warn_only=warns)

    def __str__(self) -> str:
        parts = [self.precision, *["channels last"] * self.channels_last, *["deterministic"] * self.deterministic]
        return ", ".join(parts)


def several_dtypes(parameters: Iterable[nn.Parameter]) -> list[torch.dtype]:
    """The dtypes of parameters of real numbers, where there are several; empty where there is one."""
    dtypes = list(dict.fromkeys(p.dtype for p in parameters if p.is_floating_point()))
    return dtypes if len(dtypes) > 1 else []


def numerics(
    settings: PrecisionSettings,
    network: HasModules,
    dtype: torch.dtype,
    device: torch.device,
    dtypes: Sequence[torch.dtype] = (),
) -> Numerics:
    """Decide what the settings leave open; ``dtypes`` are those of weights, where they have several.

    ``"auto"`` is bf16 where weights are float32, the GPU has bf16 matrix units (compute capability 8 or more) and the
    network has a convolution or a linear layer at least 256 wide; otherwise it is the precision of the weights. A
    network whose weights have several dtypes casts by itself, and nothing is cast for it. Images are stored
    channels last on a GPU where the precision is bf16 and the network has 2-D convolutions.
    """
    precision, channels_last = settings.precision, settings.channels_last
    if precision is torch.float16 or (isinstance(precision, str) and precision in ("fp16", "float16", "half")):
        checks.refuse("precision", "be 'bf16' or 'float32'", repr(precision), "fp16 needs loss scaling; bf16 does not.")
    if torch.float16 in (dtype, *dtypes):
        fix = "fp16 needs loss scaling; bf16 does not. Use .float(), with precision='bf16' where it should be fast."
        checks.refuse("ensemble", "have weights in float32, float64 or bfloat16 to be trained", "float16", fix)
    checks.one_of("precision", precision, ("auto", "bf16", "tf32", "float32"))
    weights = " and ".join(str(each).removeprefix("torch.") for each in dtypes or [dtype])
    if precision == "auto":
        precision = (
            "bf16"
            if not dtypes and dtype == torch.float32 and _has_matrix_units(device) and _gains(network)
            else weights
        )
    elif dtypes or dtype != torch.float32:
        fix = "Use ensemble.float(), or leave `precision` out."
        checks.refuse("precision", f"be 'auto' for networks in {weights}", repr(precision), fix)
    elif precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        checks.refuse("precision", "be 'float32' on this GPU, which has no bf16", "'bf16'")
    elif precision == "tf32" and device.type != "cuda":
        checks.refuse("precision", "be 'float32' or 'bf16' without a GPU", "'tf32'")
    if channels_last is None:
        images = any(isinstance(layer, nn.Conv2d) for layer in network.modules())
        channels_last = precision == "bf16" and device.type == "cuda" and images
    return Numerics(precision, channels_last, settings.deterministic, device)


def _has_matrix_units(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _gains(network: HasModules) -> bool:
    return any(
        isinstance(layer, nn.modules.conv._ConvNd)
        or (isinstance(layer, nn.Linear) and min(layer.in_features, layer.out_features) >= WORTH_IT)
        for layer in network.modules()
    )
