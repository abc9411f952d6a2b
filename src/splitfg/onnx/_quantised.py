"""Graphs of integer operators, written with float operators between quantised tensors, which the engine joins again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import helper

_UNCHANGED = ("MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Relu")
"""Operators that keep the scale of the integers they read."""

_FLOAT = {
    "QLinearConv": "Conv",
    "QLinearMatMul": "MatMul",
    "QGemm": "Gemm",
    "QLinearAdd": "Add",
    "QLinearMul": "Mul",
    "QLinearGlobalAveragePool": "GlobalAveragePool",
    "QLinearAveragePool": "AveragePool",
    "QLinearLeakyRelu": "LeakyRelu",
    "QLinearSigmoid": "Sigmoid",
    "QLinearSoftmax": "Softmax",
}
_SINGLE = ("QLinearGlobalAveragePool", "QLinearAveragePool", "QLinearLeakyRelu", "QLinearSigmoid", "QLinearSoftmax")


def as_float_operators(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph with ``QLinearConv`` and its like as DequantizeLinear, Conv, QuantizeLinear.

    Adds and readings then have float tensors to act on. Other graphs are returned as they are.
    """
    if not any(node.op_type in _FLOAT for node in model.graph.node):
        return model
    writer = _Writer()
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            writer.scales[node.output[0]] = tuple(node.input[1:3])
        if node.op_type in _FLOAT:
            writer.write(node)
        elif node.op_type in _UNCHANGED and node.input[0] in writer.scales:
            writer.keep(node)
        else:
            writer.nodes.append(node)
    copied = [onnx.NodeProto.FromString(n.SerializeToString()) for n in writer.nodes]
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.node[:], changed.graph.value_info[:]
    changed.graph.node.extend(copied)
    return changed


class _Writer:
    """Collects nodes; ``scales`` holds scale and zero point of integer tensors."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.scales: dict[str, tuple[str, ...]] = {}
        self._count = 0

    def write(self, node: onnx.NodeProto) -> None:
        """Write an integer operator as a float one."""
        names = list(node.input)
        by_row = node.op_type == "QLinearConv" or any(a.name == "transB" and a.i for a in node.attribute)
        operands, out = self._operands(node.op_type, names, axis=0 if by_row else 1)
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute if a.name != "channels_last"}
        self._between(_FLOAT[node.op_type], operands, node.output[0], out, attributes)

    def keep(self, node: onnx.NodeProto) -> None:
        """Write an operator that moves integers around as one that moves floats."""
        scale = self.scales[node.input[0]]
        operands = [self._float(node.input[0], scale), *node.input[1:]]
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        self._between(node.op_type, operands, node.output[0], scale, attributes)

    def _operands(self, kind: str, names: list[str], *, axis: int) -> tuple[list[str], tuple[str, ...]]:
        if kind in _SINGLE:
            return [self._float(names[0], tuple(names[1:3]))], tuple(names[3:5])
        first = self._float(names[0], tuple(names[1:3]))
        second = self._float(names[3], tuple(names[4:6]), axis=axis)
        if kind == "QGemm":
            bias = [self._bias(names[6], names[1], names[4])] if names[6] else []
            return [first, second, *bias], tuple(names[7:9])
        if kind == "QLinearConv":
            bias = [self._bias(names[8], names[1], names[4])] if len(names) > 8 and names[8] else []
            return [first, second, *bias], tuple(names[6:8])
        return [first, second], tuple(names[6:8])

    def _between(
        self, kind: str, operands: Sequence[str], output: str, scale: tuple[str, ...], attributes: dict[str, Any]
    ) -> None:
        made = self._name(output)
        self.nodes.append(helper.make_node(kind, list(operands), [made], **attributes))
        self.nodes.append(helper.make_node("QuantizeLinear", [made, *scale], [output]))
        self.scales[output] = scale

    def _float(self, name: str, scale: tuple[str, ...], axis: int = 1) -> str:
        made = self._name(name)
        self.nodes.append(helper.make_node("DequantizeLinear", [name, *scale], [made], axis=axis))
        return made

    def _bias(self, name: str, scale: str, other: str) -> str:
        """A bias is stored as integers with the product of both scales."""
        both, made = self._name(name), self._name(name)
        self.nodes.append(helper.make_node("Mul", [scale, other], [both]))
        self.nodes.append(helper.make_node("DequantizeLinear", [name, both], [made], axis=0))
        return made

    def _name(self, name: str) -> str:
        self._count += 1
        return f"{name}/float{self._count}"
