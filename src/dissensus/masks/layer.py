"""The masking layer: every example of a batch goes through one of N masks."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from dissensus import checks
from dissensus.masks.generation import for_width


class Masksembles(nn.Module):
    """Keeps the channels of one mask for every example. The rows of a batch are assigned to the masks in N blocks.

    Rows 0 to B/N − 1 go through the first mask, the next through the second, and so on; where N does not divide B,
    blocks differ by one row. Kept channels are not rescaled. `dissensus.masks.Masked` makes an ensemble of a network
    with this layer, and arranges the blocks. Masks are a buffer: they are part of the state dict, and move with the
    layer.

    Args:
        channels: Width of the masked axis.
        count: N, the number of masks.
        scale: S, at least 1. Masks have less in common for larger S.
        seed: Determines the masks.
        channel_axis: 1 for ``[B, C]``, ``[B, C, L]``, ``[B, C, H, W]`` and ``[B, C, D, H, W]``; −1 for tokens
            ``[B, T, C]``.

    >>> layer = Masksembles(8, 4, 2.0)
    >>> layer(torch.ones(4, 8)).sum(1)
    tensor([4., 4., 4., 4.])
    """

    masks: Bool[Tensor, "N C"]

    def __init__(self, channels: int, count: int, scale: float, seed: int = 0, *, channel_axis: int = 1) -> None:
        super().__init__()
        checks.count("channels", channels)
        self._register(for_width(channels, count, scale, seed), channel_axis)

    @classmethod
    def of(cls, masks: Tensor, *, channel_axis: int = 1) -> "Masksembles":
        """A layer with existing masks ``[N, C]`` of any dtype. Channels with an entry other than 0 are kept."""
        if masks.ndim != 2 or 0 in masks.shape:
            checks.refuse("masks", "have shape [N, channels]", list(masks.shape))
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._register(masks != 0, channel_axis)
        return layer

    def _register(self, masks: Tensor, channel_axis: int) -> None:
        self.channel_axis = channel_axis
        self.register_buffer("masks", masks)

    @property
    def count(self) -> int:
        """N."""
        return self.masks.shape[-2]

    @property
    def channels(self) -> int:
        """Width of the masked axis."""
        return self.masks.shape[-1]

    def forward(self, x: Float[Tensor, "B *S"]) -> Float[Tensor, "B *S"]:
        """Activations of every row under its mask."""
        axis = self.channel_axis % x.ndim
        if x.shape[axis] != self.channels:
            fix = "Tokens [B, T, C] take channel_axis=-1."
            checks.refuse("x", f"have {self.channels} channels on axis {self.channel_axis}", list(x.shape), fix)
        rows, shape = x.shape[0], [1] * x.ndim
        shape[axis] = self.channels
        masks = self.masks.to(x.dtype)
        if rows % self.count == 0:
            blocks = x.unflatten(0, (self.count, -1))
            return (blocks * masks.view(self.count, *shape)).flatten(0, 1)
        shape[0] = rows
        block = torch.arange(rows, device=x.device) * self.count // rows
        return x * masks[block].view(shape)

    def extra_repr(self) -> str:
        """Sizes of the layer."""
        return f"channels={self.channels}, count={self.count}, ones={int(self.masks[0].sum())}"


class Tile(nn.Module):
    """Repeats a batch N times, so that every mask sees all of it; not while each example trains one mask."""

    def __init__(self, count: int, assign: str) -> None:
        super().__init__()
        self.count, self.assign = count, assign

    def forward(self, x: Float[Tensor, "B *S"]) -> Float[Tensor, "T *S"]:
        """``[N · B, ...]``, or x itself."""
        if self.training and self.assign == "split":
            return x
        return x.repeat(self.count, *[1] * (x.ndim - 1))

    def extra_repr(self) -> str:
        """Sizes of the layer."""
        return f"count={self.count}, assign={self.assign!r}"
