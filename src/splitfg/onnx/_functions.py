"""Translation of ONNX functions with a closed form, which splitfg computes again from readings."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn
from torch.nn import functional as F

from splitfg.hardware import Node, Ref
from splitfg.onnx._modules import Rounding
from splitfg.onnx._translate import Context, maker, plain_attributes, tensor

_PLAIN: dict[str, Callable[..., Any]] = {
    "Relu": torch.relu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Log": torch.log,
    "Sqrt": torch.sqrt,
    "Abs": torch.abs,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Sin": torch.sin,
    "Cos": torch.cos,
    "HardSwish": F.hardswish,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Mish": F.mish,
    "Selu": F.selu,
    "Identity": torch.clone,
    "Dropout": torch.clone,
}

_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "ReduceMean": torch.mean,
    "ReduceSum": torch.sum,
    "ReduceMax": torch.amax,
    "ReduceMin": torch.amin,
}

_BINARY: dict[str, Callable[..., Any]] = {"Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div}


@maker(*_PLAIN)
def _plain(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    call = _PLAIN[node.op_type]
    if not _is_float_tensor(context, node.input[0]):
        return None
    return [Node(call.__name__, call, (Ref(node.input[0]),), node.output[0])]


@maker(*_BINARY)
def _binary(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    if not _is_float_tensor(context, node.output[0]):
        return None
    call = _BINARY[node.op_type]
    return [Node(call.__name__, call, tuple(context.arg(name) for name in node.input), node.output[0])]


@maker("LeakyRelu", "Elu", "Celu")
def _sloped(context: Context, node: onnx.NodeProto) -> list[Node] | None:  # noqa: ARG001
    call, default = {"LeakyRelu": (F.leaky_relu, 0.01), "Elu": (F.elu, 1.0), "Celu": (F.celu, 1.0)}[node.op_type]
    alpha = plain_attributes(node).get("alpha", default)
    return [Node(call.__name__, call, (Ref(node.input[0]), alpha), node.output[0])]


@maker("Gelu")
def _gelu(context: Context, node: onnx.NodeProto) -> list[Node] | None:  # noqa: ARG001
    settings = {"approximate": plain_attributes(node).get("approximate", "none")}
    return [Node("gelu", F.gelu, (Ref(node.input[0]),), node.output[0], settings)]


@maker("HardSigmoid")
def _hard_sigmoid(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    settings = {"alpha": 0.2, "beta": 0.5} | plain_attributes(node)
    out = node.output[0]
    scaled, shifted = context.inner(out), context.inner(out)
    return [
        Node("mul", torch.mul, (Ref(node.input[0]), settings["alpha"]), scaled, hidden=True),
        Node("add", torch.add, (Ref(scaled), settings["beta"]), shifted, hidden=True),
        Node("clamp", torch.clamp, (Ref(shifted), 0.0, 1.0), out),
    ]


@maker("Clip")
def _clip(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    settings = plain_attributes(node)
    limits = [settings.get("min"), settings.get("max")]
    for place, name in enumerate(node.input[1:3]):
        value = context.constant(name) if name else None
        if name and value is None:
            return None
        limits[place] = None if value is None else float(value)
    if limits == [None, None]:
        return [Node("clone", torch.clone, (Ref(node.input[0]),), node.output[0])]
    return [Node("clamp", torch.clamp, (Ref(node.input[0]), *limits), node.output[0])]


@maker("Max", "Min")
def _limit(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    """The larger or smaller of a tensor and a constant number."""
    if len(node.input) != 2:
        return None
    name, other = sorted(node.input, key=context.is_known)
    value = context.constant(other)
    if context.is_known(name) or value is None or value.size != 1:
        return None
    limits = (float(value.reshape(())), None) if node.op_type == "Max" else (None, float(value.reshape(())))
    return [Node("clamp", torch.clamp, (Ref(name), *limits), node.output[0])]


@maker("Pow")
def _pow(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    exponent = context.constant(node.input[1])
    if exponent is None or exponent.size != 1:
        return None
    return [Node("pow", torch.pow, (Ref(node.input[0]), float(exponent.reshape(()))), node.output[0])]


@maker("Sum")
def _sum(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    made, so_far = list[Node](), context.arg(node.input[0])
    for place, name in enumerate(node.input[1:], 2):
        out = node.output[0] if place == len(node.input) else context.inner(node.output[0])
        made.append(Node("add", torch.add, (so_far, context.arg(name)), out, hidden=out != node.output[0]))
        so_far = Ref(out)
    return made or [Node("clone", torch.clone, (so_far,), node.output[0])]


@maker("Cast")
def _cast(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    """Between floating-point types: readings are float32 throughout."""
    if not _is_float_tensor(context, node.input[0]) or not _is_float_tensor(context, node.output[0]):
        return None
    return [Node("clone", torch.clone, (Ref(node.input[0]),), node.output[0])]


@maker("Softmax")
def _softmax(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    axis = plain_attributes(node).get("axis", -1 if context.file.opset >= 13 else 1)
    shape = context.file.shapes.get(node.input[0])
    if context.file.opset < 13 and (shape is None or axis % len(shape) != len(shape) - 1):
        return None
    return [Node("softmax", torch.softmax, (Ref(node.input[0]), axis), node.output[0])]


# Sums over dimensions ------------------------------------------------------------------------------------------------


@maker(*_REDUCTIONS)
def _reduce(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    settings = plain_attributes(node)
    axes = settings.get("axes")
    if len(node.input) > 1 and node.input[1]:
        axes = context.constant(node.input[1])
    if axes is None:
        return None
    call = _REDUCTIONS[node.op_type]
    dims = tuple(int(a) for a in np.atleast_1d(axes))
    return [Node(call.__name__, call, (Ref(node.input[0]), dims, bool(settings.get("keepdims", 1))), node.output[0])]


@maker("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    dims = context.file.shapes.get(node.input[0])
    if dims is None or len(dims) < 3:
        return None
    over = tuple(range(2, len(dims)))
    call = _REDUCTIONS["ReduceMean" if node.op_type == "GlobalAveragePool" else "ReduceMax"]
    return [Node(call.__name__, call, (Ref(node.input[0]), over, True), node.output[0])]


@maker("AveragePool", "MaxPool")
def _pool(context: Context, node: onnx.NodeProto) -> list[Node] | None:  # noqa: ARG001
    settings = plain_attributes(node)
    kernel = tuple(settings["kernel_shape"])
    pads = list(settings.get("pads", [0, 0, 0, 0]))
    strange = settings.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or settings.get("storage_order", 0)
    if len(kernel) != 2 or pads[:2] != pads[2:] or strange or len(node.output) > 1:
        return None
    stride, padding, ceil = tuple(settings.get("strides", (1, 1))), tuple(pads[:2]), bool(settings.get("ceil_mode", 0))
    if node.op_type == "AveragePool":
        counted = bool(settings.get("count_include_pad", 0))
        return [
            Node(
                "avg_pool2d", F.avg_pool2d, (Ref(node.input[0]), kernel, stride, padding, ceil, counted), node.output[0]
            )
        ]
    dilation = tuple(settings.get("dilations", (1, 1)))
    args = (Ref(node.input[0]), kernel, stride, padding, dilation, ceil)
    return [Node("max_pool2d", F.max_pool2d, args, node.output[0])]


# Moving entries around -----------------------------------------------------------------------------------------------


@maker("Reshape", "Squeeze", "Unsqueeze", "Flatten")
def _reshape(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    """One row per row: computed if the shape of a row is known, else read."""
    shape = context.file.shapes.get(node.output[0])
    if not _is_float_tensor(context, node.input[0]) or context.is_known(node.input[0]):
        return None
    out = node.output[0]
    if shape is not None and len(shape) > 1 and None not in shape[1:] and _keeps_rows(context, node):
        inner = tuple(shape[1:])
        return [Node("reshape", lambda x: x.reshape(x.shape[0], *inner), (Ref(node.input[0]),), out)]
    if node.op_type == "Flatten" and plain_attributes(node).get("axis", 1) == 1:
        return [Node("flatten", torch.flatten, (Ref(node.input[0]), 1), out)]
    return [Node("reshape", None, (Ref(node.input[0]),), out, measured=True)]


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
    if order is None or not _is_float_tensor(context, node.input[0]):
        return None
    return [Node("permute", torch.permute, (Ref(node.input[0]), tuple(order)), node.output[0])]


@maker("Concat")
def _concat(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    if any(context.is_known(name) for name in node.input) or not _is_float_tensor(context, node.output[0]):
        return None
    axis = plain_attributes(node)["axis"]
    return [Node("cat", torch.cat, ([Ref(name) for name in node.input], axis), node.output[0])]


@maker("Slice")
def _slice(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    settings = plain_attributes(node)
    if not _is_float_tensor(context, node.output[0]):
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


# Quantisation --------------------------------------------------------------------------------------------------------


@maker("QuantizeLinear")
def _quantise(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    """Remember what is stored: the node that reads it back computes both."""
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


def _is_float_tensor(context: Context, name: str) -> bool:
    kind = context.file.types.get(name)
    return kind is None or kind in (0, onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
