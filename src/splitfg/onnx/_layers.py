"""Translation of ONNX layers: operators that hold a matrix, whose outputs are read from the engine."""

from __future__ import annotations

from typing import Any

import onnx
import torch
from torch import nn

from splitfg.hardware import Node, Ref
from splitfg.onnx._engine import Weight
from splitfg.onnx._modules import ChannelNorm
from splitfg.onnx._translate import Context, maker, plain_attributes, tensor


@maker("Gemm")
def _gemm(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    settings = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0} | plain_attributes(node)
    plain = settings["alpha"] == settings["beta"] == 1.0 and not settings["transA"]
    if not plain or not context.is_known(node.input[1]) or context.is_known(node.input[0]):
        return None
    return _linear(context, node, transposed=not settings["transB"], bias=node.input[2] if len(node.input) > 2 else "")


@maker("MatMul")
def _matmul(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    left, right = node.input
    if not context.is_known(left) and not context.is_known(right):
        return [Node("matmul", torch.matmul, (Ref(left), Ref(right)), node.output[0])]
    if context.is_known(left) or context.file.constants[right].ndim != 2:
        return None
    return _linear(context, node, transposed=True, bias="")


def _linear(context: Context, node: onnx.NodeProto, *, transposed: bool, bias: str) -> list[Node] | None:
    shape = context.file.constants[node.input[1]].shape
    if len(shape) != 2:
        return None
    inputs, outputs = shape if transposed else shape[::-1]
    weights = {"weight": Weight(node.input[1], transposed=transposed)}
    if bias and context.is_known(bias) and context.file.constants[bias].shape == (outputs,):
        weights["bias"] = Weight(bias)
    if not _own(context, weights):
        return None
    name, module = context.layer(nn.Linear, weights, {"bias": "bias" in weights}, (inputs, outputs))
    return [Node(name, module, (Ref(node.input[0]),), node.output[0], measured=True)]


@maker("Conv")
def _conv(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    if not context.is_known(node.input[1]) or context.is_known(node.input[0]):
        return None
    weight, settings = context.file.constants[node.input[1]], plain_attributes(node)
    padding = _padding(settings, weight.ndim - 2)
    if weight.ndim != 4 or padding is None:
        return None
    groups = settings.get("group", 1)
    weights = {"weight": Weight(node.input[1])}
    if len(node.input) > 2 and node.input[2]:
        if not context.is_known(node.input[2]):
            return None
        weights["bias"] = Weight(node.input[2])
    if not _own(context, weights):
        return None
    shapes = {
        "stride": tuple(settings.get("strides", (1, 1))),
        "padding": padding,
        "dilation": tuple(settings.get("dilations", (1, 1))),
        "groups": groups,
        "bias": "bias" in weights,
    }
    sizes = (weight.shape[1] * groups, weight.shape[0], tuple(weight.shape[2:]))
    name, module = context.layer(nn.Conv2d, weights, shapes, sizes)
    return [Node(name, module, (Ref(node.input[0]),), node.output[0], measured=True)]


@maker("Gather")
def _gather(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    data, indices = node.input
    axis = plain_attributes(node).get("axis", 0)
    if context.is_known(data) and not context.is_known(indices):
        table = context.file.constants[data]
        if axis != 0 or table.ndim != 2 or data not in context.trained:
            return None
        name, module = context.layer(nn.Embedding, {"weight": Weight(data)}, {}, tuple(table.shape))
        return [Node(name, module, (Ref(indices),), node.output[0], measured=True)]
    index = context.constant(indices)
    if index is None or axis < 0:
        return None
    picked = int(index) if index.ndim == 0 else torch.tensor(index)
    place = (*[slice(None)] * axis, picked)
    return [Node("getitem", torch.Tensor.__getitem__, (Ref(data), place), node.output[0])]


@maker("BatchNormalization")
def _batch_norm(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    if any(not context.is_known(name) for name in node.input[1:5]) or plain_attributes(node).get("training_mode", 0):
        return None
    scale, bias, mean, variance = (tensor(context.file.constants[name]) for name in node.input[1:5])
    std = (variance + plain_attributes(node).get("epsilon", 1e-5)).sqrt()
    names = dict(zip(("weight", "bias"), node.input[1:3], strict=True))
    stored = all(name in context.file.initializers for name in names.values())
    trains = [name for name in names.values() if stored and name in context.trained]
    values = {"weight": nn.Parameter(scale, requires_grad=False), "bias": nn.Parameter(bias, requires_grad=False)}
    for own, initializer in names.items():
        values[own].requires_grad_(initializer in trains)
    module = ChannelNorm(values["weight"], values["bias"], mean, std)
    name = names["weight"]
    if trains:
        name = context.free_name(name.removesuffix(".weight"))
        context.weights |= {f"{name}.{own}": Weight(initializer) for own, initializer in names.items()}
    else:
        module = _frozen(module)
    return [Node(name, module, (Ref(node.input[0]),), node.output[0])]


@maker("LayerNormalization")
def _layer_norm(context: Context, node: onnx.NodeProto) -> list[Node] | None:
    settings = {"axis": -1, "epsilon": 1e-5} | plain_attributes(node)
    known = all(context.is_known(name) for name in node.input[1:])
    if settings["axis"] != -1 or len(node.output) > 1 or not known or len(node.input) < 3:
        return None
    weights = {"weight": Weight(node.input[1]), "bias": Weight(node.input[2])}
    shape = tuple(context.file.constants[node.input[1]].shape)
    if len(shape) != 1 or any(w.initializer not in context.file.initializers for w in weights.values()):
        return None
    name, module = context.layer(nn.LayerNorm, weights, {"eps": settings["epsilon"]}, (shape,), held=True)
    return [Node(name, module, (Ref(node.input[0]),), node.output[0])]


def _own(context: Context, weights: dict[str, Weight]) -> bool:
    """Whether all weights are initialisers if one is trained; a computed weight cannot be written."""
    if not any(w.initializer in context.trained for w in weights.values()):
        return True
    return all(w.initializer in context.file.initializers for w in weights.values())


def _padding(settings: dict[str, Any], dims: int) -> tuple[int, ...] | None:
    """Return symmetric padding; ``None`` if it is not."""
    if settings.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    pads = list(settings.get("pads", [0] * (2 * dims)))
    return tuple(pads[:dims]) if pads[:dims] == pads[dims:] else None


def _frozen(module: ChannelNorm) -> ChannelNorm:
    """Keep the values out of the trunk's parameters."""
    weight, bias = module.weight.detach(), module.bias.detach()
    del module._parameters["weight"], module._parameters["bias"]
    module.weight, module.bias = weight, bias  # type: ignore[assignment]
    return module
