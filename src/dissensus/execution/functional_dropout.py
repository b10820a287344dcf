"""Functions that drop units (``F.dropout``, dropout inside of attention), with keyed masks.

Layers of dropout are replaced by keyed ones. A function that a network's code calls cannot be replaced. While a member
runs, its calls are caught, and take their masks from the member's key and a counter of calls.
"""

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dissensus.dropout import FUNCTIONAL_KEY, FUNCTIONAL_STEP, dropped, mask_shape
from dissensus.randomness import keep_mask


class KeyedFunctions(TorchFunctionMode):
    """A block in which functions of `torch.nn.functional` that drop units do so with one member's masks."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.key, self.step = network._buffers[FUNCTIONAL_KEY], network._buffers[FUNCTIONAL_STEP]
        axes = {F.dropout: 0, F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}
        self.replaced: dict[Any, Callable[..., Any]] = {
            function: functools.partial(self._dropout, channel_axes=count) for function, count in axes.items()
        }
        self.replaced[torch.dropout] = lambda input, p, train: self._dropout(input, p, train)
        self.replaced[F.scaled_dot_product_attention] = self._attention
        self.replaced[F.multi_head_attention_forward] = self._multi_head_attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, or its keyed version."""
        function: Any = self.replaced.get(func, func)
        return function(*args, **(kwargs or {}))

    def _dropout(
        self,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        channel_axes: int = 0,
    ) -> Tensor:
        if not training or p == 0:
            return input
        assert self.key is not None
        assert self.step is not None
        shape = mask_shape(input.shape, channel_axes)
        self.step.add_(1)
        result = dropped(input, keep_mask(shape, p, self.key, self.step), p)
        return input.copy_(result) if inplace else result

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """``F.scaled_dot_product_attention`` written out where it drops weights, since fused kernels draw their own."""
        if dropout_p == 0:
            options = {"scale": scale, "enable_gqa": enable_gqa}
            return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **options)
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~causal, -math.inf)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        nowhere = scores.isneginf().all(-1, keepdim=True)  # such a query attends to nothing, as in torch
        weights = scores.masked_fill(nowhere, 0.0).softmax(-1).masked_fill(nowhere, 0.0)
        return self._dropout(weights, dropout_p) @ value

    def _multi_head_attention(self, *args: Any, **kwargs: Any) -> Any:
        """Torch's function, which calls others of its module, with these two replaced."""
        original = F.multi_head_attention_forward
        names = {**vars(F), "dropout": self._dropout, "scaled_dot_product_attention": self._attention}
        names["has_torch_function"] = lambda _: False  # another mode would call torch's function again
        code = types.FunctionType(original.__code__, names, original.__name__, original.__defaults__)
        code.__kwdefaults__ = original.__kwdefaults__
        return code(*args, **kwargs)
