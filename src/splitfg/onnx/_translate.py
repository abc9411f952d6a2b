"""From an ONNX graph to the wiring of a device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from splitfg.hardware import Node, Ref, Wiring
from splitfg.onnx._engine import Weight
from splitfg.onnx._file import OnnxFile, attributes, is_float, read_names

Maker = Callable[["Context", onnx.NodeProto], list[Node] | None]
"""Returns the nodes of a supported operator; ``None`` if only the engine can compute it."""

MAKERS: dict[str, Maker] = {}


def maker(*names: str) -> Callable[[Maker], Maker]:
    """Register the translation of ONNX operators."""

    def add(make: Maker) -> Maker:
        MAKERS.update(dict.fromkeys(names, make))
        return make

    return add


class Context:
    """The state of a translation.

    Args:
        file: The graph.
        trained: Initialisers that become parameters with a gradient.

    Attributes:
        weights: How the graph stores every parameter, by the trunk's names.
        loose: Parameters of functions, by the trunk's names.
        stored: Nodes that quantise, by the name of the integers they write.
    """

    def __init__(self, file: OnnxFile, trained: Collection[str]) -> None:
        self.file, self.trained = file, set(trained)
        self.weights: dict[str, Weight] = {}
        self.loose: dict[str, nn.Parameter] = {}
        self.stored: dict[str, onnx.NodeProto] = {}
        self._modules: dict[tuple[Any, ...], tuple[str, nn.Module]] = {}
        self._taken: set[str] = set()
        self._inner = 0

    def constant(self, name: str) -> Any:
        """Return the value of a constant tensor; ``None`` if the graph computes it from the inputs."""
        return self.file.constants.get(name) if name not in self.trained else None

    def is_known(self, name: str) -> bool:
        """Whether a tensor is a constant or a trained initialiser."""
        return name in self.file.constants

    def arg(self, name: str) -> Any:
        """Return an operand: a reference, a parameter, or a constant tensor."""
        if name in self.trained:
            return self.parameter(name)
        value = self.file.constants.get(name)
        return Ref(name) if value is None else tensor(value)

    def parameter(self, initializer: str) -> nn.Parameter:
        """Return the parameter of an initialiser that belongs to no layer."""
        for name, known in self.loose.items():
            if self.weights[name].initializer == initializer:
                return known
        name, weight = self.free_name(initializer), Weight(initializer)
        self.weights[name] = weight
        self.loose[name] = nn.Parameter(weight.parameter(self.file.constants[initializer]))
        return self.loose[name]

    def inner(self, writes: str) -> str:
        """Return a new name for a tensor that the graph does not have."""
        self._inner += 1
        return f"{writes}#{self._inner}"

    def layer(
        self,
        kind: Callable[..., nn.Module],
        weights: dict[str, Weight],
        shapes: dict[str, Any],
        settings: tuple[Any, ...],
        *,
        held: bool = False,
    ) -> tuple[str, nn.Module]:
        """Return the name and module of a layer, the same for nodes that share all weights and settings.

        A layer without trained weights holds no values, unless it must (``held``) because splitfg computes it.
        """
        key = (kind, tuple((n, w.initializer) for n, w in weights.items()), settings)
        if key not in self._modules:
            trains = held or any(w.initializer in self.trained for w in weights.values())
            first = next(iter(weights.values())).initializer
            name = self.free_name(_stem(first)) if trains else first
            module = kind(*settings, device="meta", **shapes)
            if trains:
                for own, weight in weights.items():
                    dtype = module.get_parameter(own).dtype
                    value = weight.parameter(self.file.constants[weight.initializer]).to(dtype)
                    # in place of `to_empty`, which imports sympy: 60 MiB
                    setattr(module, own, nn.Parameter(value, requires_grad=weight.initializer in self.trained))
                    self.weights[f"{name}.{own}"] = weight
            self._modules[key] = name, module
        return self._modules[key]

    def free_name(self, wanted: str) -> str:
        """Return a name for a module or parameter, near the wanted one, that torch accepts and none has."""
        parts = wanted.split(".")
        bare = nn.Module()
        clash = any(not p or hasattr(bare, p) for p in parts)
        name = wanted.replace(".", "_") + "_" if clash else wanted
        while any(_nested(name, other) for other in self._taken):
            name = name.replace(".", "_") + "_"
        self._taken.add(name)
        return name


def translate(file: OnnxFile, h: str, trained: Collection[str]) -> tuple[Wiring, Context]:
    """Return the wiring of everything that h depends on.

    Args:
        file: The graph.
        h: Name of the tensor to cut at.
        trained: Initialisers to train.
    """
    context, nodes = Context(file, trained), list[Node]()
    for node in needed(file, h):
        if all(name in file.constants for name in read_names(node)) and not set(read_names(node)) & context.trained:
            continue
        nodes += _nodes(context, node)
    written = {node.writes for node in nodes} | set(file.inputs)
    nodes = [node for node in nodes if all(name in written for name in node.reads())]
    return Wiring(_needed(nodes, h), tuple(file.inputs), h), context


def _needed(nodes: Sequence[Node], h: str) -> tuple[Node, ...]:
    """Leave out nodes that h does not depend on, such as computations of shapes."""
    wanted, kept = {h}, []
    for node in reversed(nodes):
        if node.writes in wanted:
            kept.append(node)
            wanted.update(node.reads())
    return tuple(reversed(kept))


def needed(file: OnnxFile, h: str) -> list[onnx.NodeProto]:
    """Return the nodes of the graph that a tensor depends on, in order."""
    wanted, kept = {h}, []
    for node in reversed(file.model.graph.node):
        if wanted & set(node.output):
            kept.append(node)
            wanted.update(read_names(node))
    return kept[::-1]


def _nodes(context: Context, node: onnx.NodeProto) -> list[Node]:
    make = MAKERS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    made = make(context, node) if make is not None else None
    if made is not None:
        return made
    refs = tuple(Ref(name) for name in dict.fromkeys(read_names(node)) if name not in context.file.constants)
    # parameters of an unknown operator stay parameters: perturbations can train them
    own = tuple(context.parameter(n) for n in node.input if n in context.trained)
    return [Node(node.op_type, None, (*refs, *own), out, measured=True) for out in node.output if out]


def tensor(value: Any) -> Tensor:
    """Return a constant as a tensor, in float32 if it is a floating-point number."""
    array = np.asarray(value)
    return torch.tensor(array.astype(np.float32) if array.dtype.kind == "f" else array)


def trainable(file: OnnxFile, h: str) -> list[str]:
    """Return the floating-point initialisers with more than one number that h depends on."""
    names = dict.fromkeys(name for node in needed(file, h) for name in read_names(node) if name in file.initializers)
    return [
        n for n in names if is_float(file.types[n]) and file.initializers[n].size > 1 and n not in _statistics(file)
    ]


def _statistics(file: OnnxFile) -> set[str]:
    """Initialisers that are no weights: running statistics, scales of quantisation, limits, shapes."""
    found = set()
    for node in file.model.graph.node:
        if node.op_type == "BatchNormalization":
            found.update(node.input[3:5])
        elif node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            found.update(node.input)
        elif node.op_type in ("Clip", "Pad", "Resize", "Reshape", "Expand", "Slice", "Pow"):
            found.update(node.input[1:])
    return found


def plain_attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node."""
    return dict(attributes(node))


def _stem(initializer: str) -> str:
    for suffix in (".weight", "_weight", "/weight"):
        if initializer.endswith(suffix) and len(initializer) > len(suffix):
            return initializer.removesuffix(suffix)
    return initializer


def _nested(name: str, other: str) -> bool:
    return name == other or name.startswith(other + ".") or other.startswith(name + ".")


def is_float_tensor(context: Context, name: str) -> bool:
    """Whether a tensor holds floating-point numbers, or its type is not known."""
    kind = context.file.types.get(name)
    return kind in (None, 0) or is_float(kind)
