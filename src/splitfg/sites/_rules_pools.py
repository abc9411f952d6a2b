"""Pullbacks of pooling and of resizing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from splitfg.sites._rule_table import Pulled, argument, first_and_rest, rule
from splitfg.sites._tape import Operation


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", inputs=False, output=False)
def _adaptive_avg_pool(operation: Operation, delta: Tensor) -> Pulled:
    x = operation.input
    if operation.name.endswith("2d"):
        yield x, torch.ops.aten._adaptive_avg_pool2d_backward(delta.contiguous(), x)
    else:
        yield x, torch.ops.aten._adaptive_avg_pool2d_backward(delta.unsqueeze(-2), x.unsqueeze(-2)).squeeze(-2)


@rule("avg_pool2d")
def _avg_pool(operation: Operation, delta: Tensor) -> Pulled:
    pair: Callable[[Any], list[int]] = lambda v: [v, v] if isinstance(v, int) else list(v)  # noqa: E731
    size = pair(argument(operation, 1, "kernel_size", None))
    stride = argument(operation, 2, "stride", None)
    padding = pair(argument(operation, 3, "padding", 0))
    ceil, counted = argument(operation, 4, "ceil_mode", False), argument(operation, 5, "count_include_pad", True)
    steps = size if stride is None else pair(stride)
    x, backward = operation.input, torch.ops.aten.avg_pool2d_backward
    yield x, backward(delta, x, size, steps, padding, ceil, counted, argument(operation, 6, "divisor_override", None))


@rule("max_pool2d", "boolean_dispatch", "fn", output=False)
def _max_pool(operation: Operation, delta: Tensor) -> Pulled:
    x, rest, settings = first_and_rest(operation)
    settings.pop("return_indices", None)
    _, indices = F.max_pool2d(x, *rest[:5], **settings, return_indices=True)
    share = torch.zeros_like(x).flatten(-2)
    yield x, share.scatter_add_(-1, indices.flatten(-2), delta.flatten(-2)).view(x.shape)


@rule("interpolate", inputs=False, output=False)
def _interpolate(operation: Operation, delta: Tensor) -> Pulled:
    x, scale, mode = (
        operation.input,
        argument(operation, 2, "scale_factor", None),
        argument(operation, 3, "mode", "nearest"),
    )
    dims, kind = x.ndim - 2, _RESIZED.get(mode, {}).get(x.ndim - 2)
    if kind is None or argument(operation, 6, "antialias", False):
        raise NotImplementedError(f"mode {mode!r}, or antialias: use nearest, bilinear or bicubic without antialias")
    scales: list[float | None] = [None] * dims
    if scale is not None and not argument(operation, 5, "recompute_scale_factor", None):
        scales = [float(s) for s in (scale if isinstance(scale, tuple | list) else [scale] * dims)]
    corners = [] if mode.startswith("nearest") else [bool(argument(operation, 4, "align_corners", None))]
    backward = getattr(torch.ops.aten, f"{kind}_backward")
    yield x, backward(delta.contiguous(), delta.shape[2:], x.shape, *corners, *scales)


_RESIZED = {
    "nearest": {n: f"upsample_nearest{n}d" for n in (1, 2, 3)},
    "nearest-exact": {n: f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)},
    "linear": {1: "upsample_linear1d"},
    "bilinear": {2: "upsample_bilinear2d"},
    "bicubic": {2: "upsample_bicubic2d"},
    "trilinear": {3: "upsample_trilinear3d"},
}
"""Kernels that resize, by mode and number of dimensions."""
