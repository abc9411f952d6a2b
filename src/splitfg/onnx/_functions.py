"""Translation of ONNX functions with a closed form, which splitfg computes again from readings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from torch.nn import functional as F

from splitfg.hardware import Node, Ref
from splitfg.onnx._translate import Context, is_float_tensor, maker, plain_attributes

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
    if not is_float_tensor(context, node.input[0]):
        return None
    return [Node(call.__name__, call, (Ref(node.input[0]),), node.output[0])]


@maker(*_BINARY)
def _binary(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    if not is_float_tensor(context, node.output[0]):
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
    if not is_float_tensor(context, node.input[0]) or not is_float_tensor(context, node.output[0]):
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
    # of torch: that of torch.nn.functional cannot be pickled
    return [Node("max_pool2d", torch.max_pool2d, args, node.output[0])]
