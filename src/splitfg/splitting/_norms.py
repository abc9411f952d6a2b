"""Normalisation layers of reduced precision, in passes that carry tangents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_REDUCED = (torch.bfloat16, torch.float16)
_NORMS = (
    *(F.layer_norm, F.group_norm, F.batch_norm, F.instance_norm, F.rms_norm),
    *(torch.layer_norm, torch.group_norm, torch.batch_norm, torch.instance_norm, torch.rms_norm),
)


def has_reduced_precision(*parts: nn.Module) -> bool:
    """Whether modules hold parameters or buffers in bfloat16 or float16."""
    return any(t.dtype in _REDUCED for part in parts for t in (*part.parameters(), *part.buffers()))


class TangentNorms(TorchFunctionMode):
    """Computes norms of bfloat16 and float16 inputs in float32, and rounds the result once.

    On CUDA the kernels return mean and 1/σ in float32, and torch's forward-mode rules then give a bfloat16 output a
    float32 tangent, which the next layer cannot multiply. Leaves norms of other inputs as they are, and all norms under
    autocast, which casts tangents itself.

    Running statistics of reduced precision are read and not updated: passes with tangents run on copies of them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _NORMS:
            return func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        if x.dtype not in _REDUCED or torch.is_autocast_enabled(x.device.type):
            return func(*args, **kwargs)
        return func(*map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()}).to(x.dtype)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _REDUCED else value
