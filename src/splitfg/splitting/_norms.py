"""Normalisation layers in passes that carry tangents: of reduced precision, and with weights that carry none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_REDUCED = (torch.bfloat16, torch.float16)


def has_reduced_precision(*parts: nn.Module) -> bool:
    """Whether modules hold parameters or buffers in bfloat16 or float16."""
    return any(t.dtype in _REDUCED for part in parts for t in (*part.parameters(), *part.buffers()))


class TangentNorms(TorchFunctionMode):
    """Computes norms of bfloat16 and float16 inputs in float32, and rounds the result once.

    On CUDA the kernels return mean and 1/σ in float32, and torch's forward-mode rules then give a bfloat16 output a
    float32 tangent, which the next layer cannot multiply. Leaves norms of other inputs as they are, and all norms under
    autocast, which casts tangents itself.

    In compiled code, scales and shifts every normalised input apart from the norm: torch's compiler cannot trace the
    forward-mode rule of a norm with weights that carry no tangent, as frozen ones.

    Running statistics of reduced precision are read and not updated: passes with tangents run on copies of them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _NORMS:
            return func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        run = _NORMS[func] if torch.compiler.is_compiling() else func
        if x.dtype not in _REDUCED or torch.is_autocast_enabled(x.device.type):
            return run(*args, **kwargs)
        return run(*map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()}).to(x.dtype)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _REDUCED else value


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return _affine(F.layer_norm(input, list(normalized_shape), eps=eps), weight, bias)


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return _affine(F.rms_norm(input, list(normalized_shape), eps=eps), weight, None)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    return _per_channel(F.group_norm(input, num_groups, eps=eps), weight, bias)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *settings: Any,
    **named: Any,
) -> Tensor:
    z = F.batch_norm(input, running_mean, running_var, None, None, *settings, **named)
    return _per_channel(z, weight, bias)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *settings: Any,
    **named: Any,
) -> Tensor:
    z = F.instance_norm(input, running_mean, running_var, None, None, *settings, **named)
    return _per_channel(z, weight, bias)


def _per_channel(z: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scale and shift the channels, dimension 1."""
    shape = [1, -1] + [1] * (z.ndim - 2)
    return _affine(z, None if weight is None else weight.view(shape), None if bias is None else bias.view(shape))


def _affine(z: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    z = z if weight is None else z * weight
    return z if bias is None else z + bias


_NORMS: dict[Any, Any] = {
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
}
"""From a norm to the same function with scale and shift as operators of their own."""
