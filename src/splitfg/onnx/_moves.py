"""Translation of ONNX functions that move entries around or round them."""

from __future__ import annotations

import math
import operator
from functools import partial
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitfg.hardware import Node, Ref
from splitfg.onnx._modules import Rounding
from splitfg.onnx._translate import Context, is_float_tensor, maker, plain_attributes, tensor


@maker("Reshape", "Squeeze", "Unsqueeze", "Flatten")
def _reshape(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    """One row per row: computed if the shape of a row is known, else read."""
    shape = context.file.shapes.get(node.output[0])
    if not is_float_tensor(context, node.input[0]) or context.is_known(node.input[0]):
        return None
    out = node.output[0]
    if shape is not None and len(shape) > 1 and None not in shape[1:] and _keeps_rows(context, node):
        inner = tuple(d for d in shape[1:] if d is not None)
        return [Node("reshape", partial(_rows_as, inner), (Ref(node.input[0]),), out)]
    if node.op_type == "Flatten" and plain_attributes(node).get("axis", 1) == 1:
        return [Node("flatten", torch.flatten, (Ref(node.input[0]), 1), out)]
    return [Node("reshape", None, (Ref(node.input[0]),), out, measured=True)]


def _rows_as(shape: tuple[int, ...], x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], *shape)


def _keeps_rows(context: Context, node: onnx.NodeProto) -> bool:
    """Whether input and output have as many entries in a row, so that the first dimension is the same."""
    before, after = (context.file.shapes.get(name) for name in (node.input[0], node.output[0]))
    if before is None or after is None or None in before[1:] or None in after[1:]:
        return False
    return math.prod(d or 0 for d in before[1:]) == math.prod(d or 0 for d in after[1:])


@maker("Expand")
def _expand(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    if context.is_known(node.input[0]):
        return None
    return [Node("expand", None, (Ref(node.input[0]),), node.output[0], measured=True)]


@maker("Transpose")
def _transpose(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    order = plain_attributes(node).get("perm")
    if order is None or not is_float_tensor(context, node.input[0]):
        return None
    return [Node("permute", torch.permute, (Ref(node.input[0]), tuple(order)), node.output[0])]


@maker("Concat")
def _concat(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    if any(context.is_known(name) for name in node.input) or not is_float_tensor(context, node.output[0]):
        return None
    axis = plain_attributes(node)["axis"]
    return [Node("cat", torch.cat, ([Ref(name) for name in node.input], axis), node.output[0])]


@maker("Slice")
def _slice(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    settings = plain_attributes(node)
    if not is_float_tensor(context, node.output[0]):
        return None
    given = [context.constant(name) if name else None for name in node.input[1:]]
    if any(name and value is None for name, value in zip(node.input[1:], given, strict=True)):
        return None
    starts, ends, axes, steps = [*given, *[None] * 4][:4]
    starts = settings.get("starts") if starts is None else starts
    ends = settings.get("ends") if ends is None else ends
    axes = settings.get("axes") if axes is None else axes
    if starts is None or ends is None or (steps is not None and np.any(np.asarray(steps) < 1)):
        return None
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    index = [slice(None)] * (max(int(a) for a in axes) + 1) if all(int(a) >= 0 for a in axes) else None
    if index is None:
        return None
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        index[int(axis)] = slice(int(start), int(end), int(step))
    return [Node("getitem", operator.getitem, (Ref(node.input[0]), tuple(index)), node.output[0])]


@maker("Pad")
def _pad(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    """Padding by a constant; other modes only the engine computes."""
    settings = plain_attributes(node)
    given = [context.constant(name) if name else None for name in node.input[1:]]
    if settings.get("mode", "constant") != "constant" or not is_float_tensor(context, node.input[0]):
        return None
    if any(name and value is None for name, value in zip(node.input[1:], given, strict=True)):
        return None
    sizes, value, axes = [*given, *[None] * 3][:3]
    sizes = settings.get("pads") if sizes is None else sizes
    if sizes is None or axes is not None or min(sizes) < 0:
        return None
    half = len(sizes) // 2
    pairs = tuple(int(n) for dim in reversed(range(half)) for n in (sizes[dim], sizes[dim + half]))
    number = float(settings.get("value", 0.0) if value is None else np.asarray(value).reshape(()))
    return [Node("pad", F.pad, (Ref(node.input[0]), pairs, "constant", number), node.output[0])]


@maker("QuantizeLinear")
def _quantise(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    """Remember the stored value: the node that reads it back computes both."""
    names = [name for name in node.input[1:] if name]
    if any(not context.is_known(name) for name in names):
        return None
    context.stored[node.output[0]] = node
    return []


@maker("DequantizeLinear")
def _dequantise(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    stored = context.stored.get(node.input[0])
    if stored is None:
        return None
    scale = tensor(context.file.constants[stored.input[1]])
    has_zero = len(stored.input) > 2 and stored.input[2]
    zero: Any = context.file.constants[stored.input[2]] if has_zero else np.zeros(1, np.uint8)
    limits = np.iinfo(zero.dtype)
    module: nn.Module = Rounding(
        scale, torch.tensor(zero.astype(np.float32)), limits.min, limits.max, plain_attributes(stored).get("axis", 1)
    )
    source = stored.input[0]
    return [Node("rounding", module, (Ref(source),), node.output[0], add_at=source)]
