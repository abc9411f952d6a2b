"""Dropout masks of passes that carry tangents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class TangentMasks(TorchFunctionMode):
    """Draws the dropout masks of passes with tangents as passes without them do.

    ``torch.func`` fills a mask in the order of its indices, and ordinary passes in the order of memory: the two differ
    for inputs that are not contiguous, such as the outputs of ``nn.MultiheadAttention`` and images in channels-last.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(func, func)
        return rule(*args, **(kwargs or {}))


def _functional(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not 0 < p < 1 or input.is_contiguous():
        return F.dropout(input, p, training, inplace)
    with torch._C._DisableFuncTorch():
        ones = torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device=input.device).fill_(1)
        mask = F.dropout(ones, p)
    return input.mul_(mask) if inplace else input * mask


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    return _functional(input, p, train)


_RULES: dict[Any, Any] = {F.dropout: _functional, torch.dropout: _dropout}
