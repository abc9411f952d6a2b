"""Normalisation layers in passes that carry tangents: those of reduced precision, and those of compiled code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from splitfg.numerics import widened

_REDUCED = (torch.bfloat16, torch.float16)


def has_reduced_precision(*parts: nn.Module) -> bool:
    """Whether modules hold parameters or buffers in bfloat16 or float16."""
    return any(t.dtype in _REDUCED for part in parts for t in (*part.parameters(), *part.buffers()))


class TangentNorms(TorchFunctionMode):
    """Computes norms of bfloat16 and float16 inputs in float32, then scales and shifts, and rounds the result once.

    On CUDA the kernels return mean and 1/σ in float32, and torch's forward-mode rules then give a bfloat16 output a
    float32 tangent, which the next layer cannot multiply. Leaves norms of other inputs as they are, and norms under
    autocast, which casts tangents itself.

    Running statistics are read and not updated: passes with tangents run on copies of them.

    Args:
        every: Whether to scale and shift apart in all norms: torch's compiler cannot trace the forward-mode rules of
            norms whose weights carry no tangent.
    """

    def __init__(self, *, every: bool = False) -> None:
        super().__init__()
        self.every = every

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _ARGUMENTS:
            return func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        if torch.is_autocast_enabled(x.device.type):
            return _written_out(func, args, kwargs) if self.every else func(*args, **kwargs)
        if not self.every and x.dtype not in _REDUCED:
            return func(*args, **kwargs)
        return _written_out(func, args, kwargs).to(x.dtype)


def _written_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Call a norm with its input in float32 or wider and without weights, then scale and shift."""
    given = {**dict(zip(_ARGUMENTS[func], args, strict=False)), **kwargs}
    weight, bias = given.get("weight"), given.get("bias")
    given = {name: widened(v) if isinstance(v, Tensor) else v for name, v in given.items() if name not in _WEIGHTS}
    if any(given.get(name, default) for name, default in _OWN_STATISTICS.items() if name in _ARGUMENTS[func]):
        given = {name: None if name in _STATISTICS else v for name, v in given.items()}
    z: Tensor = func(**given, **dict.fromkeys(_WEIGHTS & set(_ARGUMENTS[func])))
    if func not in _PER_FEATURE:
        shape = [1, -1] + [1] * (z.ndim - 2)
        weight, bias = (None if t is None else t.view(shape) for t in (weight, bias))
    z = z if weight is None else z * weight
    return z if bias is None else z + bias


_WEIGHTS = {"weight", "bias"}
_STATISTICS = ("running_mean", "running_var")
_OWN_STATISTICS = {"training": False, "use_input_stats": True}
_BATCH = ("input", *_STATISTICS, "weight", "bias")
_ATEN_BATCH = ("input", "weight", "bias", *_STATISTICS)
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    torch.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"),
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    torch.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    torch.group_norm: ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled"),
    F.batch_norm: (*_BATCH, "training", "momentum", "eps"),
    torch.batch_norm: (*_ATEN_BATCH, "training", "momentum", "eps", "cudnn_enabled"),
    F.instance_norm: (*_BATCH, "use_input_stats", "momentum", "eps"),
    torch.instance_norm: (*_ATEN_BATCH, "use_input_stats", "momentum", "eps", "cudnn_enabled"),
}
_PER_FEATURE = (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
