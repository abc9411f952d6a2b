"""A trunk inside ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import onnx
import torch
from torch import nn

from splitfg.errors import SplitError, shorten
from splitfg.hardware import DeviceTrunk, Node
from splitfg.onnx import _functions, _layers, _moves  # noqa: F401  # register the translations
from splitfg.onnx._adapters import Adapter, Site, adapted, merge
from splitfg.onnx._engine import OnnxDevice
from splitfg.onnx._file import OnnxFile, is_float, read_names
from splitfg.onnx._modules import Rounding
from splitfg.onnx._translate import needed, trainable, translate


class OnnxTrunk(DeviceTrunk):
    """The part of an ONNX network below a tensor h, as a trunk that ONNX Runtime runs.

    The graph is changed in memory alone: trained initialisers become inputs, perturbed tensors get an added input, read
    tensors become outputs. Parameters have the names of the initialisers (a layer's ``fc.weight`` and ``fc.bias``).
    They are float32 here and keep the file's type inside the engine.

    Args:
        file: Path of the file, its bytes, or an :class:`OnnxFile`.
        cut: Name of the tensor h; by default the one that the last Gemm or MatMul with weights reads.
        train: Names or globs of the initialisers to train; by default every weight that learned feedback reaches, or,
            with adapters, these alone.
        adapters: Small trained nodes behind layers, for weights that cannot be trained in place, such as int8 ones.
        threads: Threads of the engine.

    Attributes:
        file: The graph.
        cut: Name of h.
        loose: Names of parameters that belong to functions, not to layers.

    Raises:
        SplitError: If the file cannot be read or run, or nothing matches.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import splitfg
        >>> from splitfg.onnx import OnnxTrunk, example_model
        >>> trunk = OnnxTrunk(example_model())
        >>> network = splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(8, 3)))
        >>> x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
        >>> estimate = splitfg.LearnedFeedback()(network, x, y, generator=torch.Generator().manual_seed(0))
        >>> sorted(estimate.grads)
        ['head.0.bias', 'head.0.weight', 'trunk.0.bias', 'trunk.0.weight', 'trunk.2.bias', 'trunk.2.weight']
    """

    fused: ClassVar[bool] = True

    def __init__(
        self,
        file: str | Path | bytes | OnnxFile,
        *,
        cut: str | None = None,
        train: str | Sequence[str] | None = None,
        adapters: Adapter | None = None,
        threads: int | None = None,
    ) -> None:
        opened = file if isinstance(file, OnnxFile) else OnnxFile(file)
        h = default_cut(opened) if cut is None else _existing(opened, cut)
        sites: list[Site] = []
        if adapters is not None:
            opened, sites = adapted(opened, h, adapters)
        patterns = [train] if isinstance(train, str) else list(train or ())
        patterns += [f"{site.label}.*" for site in sites]
        chosen = _matching(opened, h, patterns) if patterns else _reached(opened, h)
        wiring, context = translate(opened, h, chosen)
        super().__init__(OnnxDevice(opened, context.weights, threads), wiring, context.loose)
        self.file, self.cut = opened, h
        self._adapters, self._sites = adapters, tuple(sites)
        self.loose = tuple(context.loose)

    @property
    def rounds(self) -> bool:
        """Whether the graph quantises tensors, so that small perturbations get lost."""
        return any(isinstance(node.module, Rounding) for node in self.wiring.nodes)

    @property
    def engine(self) -> OnnxDevice:
        """The device."""
        assert isinstance(self.device, OnnxDevice)
        return self.device

    def tuned(self, *, merged: bool = True) -> onnx.ModelProto:
        """Return the user's graph with the current parameters, adapters merged where that is exact, or not at all."""
        params = {name: p.detach() for name, p in self.named_parameters()}
        self.engine.write(params)
        model = self.engine.current()
        if merged and self._adapters is not None:
            merge(model, self._adapters, self._sites)
        return model

    def file_head(self) -> nn.Linear | None:
        """Return the file's own linear layer behind h as a copy; ``None`` if there is none."""
        for node in self.file.model.graph.node:
            if node.op_type in ("Gemm", "MatMul") and node.input[0] == self.cut:
                wiring, _ = translate(self.file, node.output[0], [node.input[1], *node.input[2:]])
                module = wiring.nodes[-1].module
                if isinstance(module, nn.Linear) and not module.weight.is_meta:
                    return module.requires_grad_(True)
        return None

    def width(self, *inputs: Any) -> int:
        """Return the width of h; without inputs to run, the file must say it.

        Raises:
            SplitError: If h is not of shape ``(rows, features)``, or the file does not say.
        """
        shape = tuple(self(*inputs).shape) if inputs else self.file.shapes.get(self.cut, ())
        if len(shape) != 2 or shape[-1] is None:
            got = str(tuple("?" if d is None else d for d in shape)) if shape else "unknown"
            raise SplitError(
                [f"h ({self.cut}) has shape {got}: cut at a tensor of shape (rows, features); see `splitfg onnx show`"]
            )
        return shape[-1]


def default_cut(file: OnnxFile) -> str:
    """Return the input of the last Gemm or MatMul with constant weights; else the first output."""
    for node in reversed(file.model.graph.node):
        constant = len(node.input) > 1 and node.input[1] in file.constants
        if node.op_type in ("Gemm", "MatMul") and constant and node.input[0] not in (*file.inputs, *file.constants):
            return str(node.input[0])
    return str(file.model.graph.output[0].name)


def _existing(file: OnnxFile, name: str) -> str:
    made = [out for node in file.model.graph.node for out in node.output if out]
    if name not in made or name in file.constants:
        raise SplitError([f"{file.name} has no tensor {name!r} to cut at; it has {shorten(made, 12)}"])
    if file.types.get(name) and not is_float(file.types[name]):
        raise SplitError([f"{name!r} does not hold floating-point numbers: cut at a tensor that does"])
    return name


def _matching(file: OnnxFile, h: str, patterns: Sequence[str]) -> list[str]:
    names = trainable(file, h)
    unused = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    if unused or not names:
        known = f"below {h} it has {shorten(names, 12)}" if names else f"no floating-point weight lies below {h}"
        what = ", ".join(map(repr, unused))
        raise SplitError(
            [f"{file.name} has no weight to train that matches {what}; {known}. int8 weights need adapters"]
        )
    return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]


def _reached(file: OnnxFile, h: str) -> list[str]:
    """Return the weights from which closed forms and layers lead to h."""
    names = _unshared(file, h, trainable(file, h))
    wiring, context = translate(file, h, names)
    reached, shut = {h}, set[str]()
    for node in reversed(wiring.nodes):
        if node.writes in reached:
            reached.update(node.reads())
            # an operator without a closed form hides a part of the gradient from everything below it
            shut.update(node.reads() if node.writes in shut or not _has_closed_form(node) else ())
    held = {id(p) for n in wiring.nodes if n.writes in reached - shut and _has_closed_form(n) for p in n.parameters()}
    own = {id(p): f"{n.name}.{leaf}" for n in wiring.nodes if n.module for leaf, p in n.module.named_parameters()}
    own |= {id(p): name for name, p in context.loose.items()}
    kept = {context.weights[name].initializer for key, name in own.items() if key in held and name in context.weights}
    return [name for name in names if name in kept]


def _has_closed_form(node: Node) -> bool:
    return node.call is not None or node.name in ("reshape", "expand")


def _unshared(file: OnnxFile, h: str, names: Sequence[str]) -> list[str]:
    """Leave out initialisers that layers of different kinds read: one module cannot hold them."""
    users: dict[str, set[tuple[str, ...]]] = {}
    for node in needed(file, h):
        for name in read_names(node):
            users.setdefault(name, set()).add((node.op_type, *node.input[1:]))
    return [name for name in names if len(users.get(name, ())) == 1]


def example_model(widths: Sequence[int] = (4, 8, 8, 3), seed: int = 0) -> bytes:
    """Return a small ReLU network as the bytes of an ONNX file: ``widths`` from input to output.

    Example:
        >>> from splitfg.onnx import OnnxTrunk, example_model
        >>> OnnxTrunk(example_model((4, 16, 3))).width()
        16
    """
    from onnx import TensorProto, helper, numpy_helper

    generator = torch.Generator().manual_seed(seed)
    nodes, weights, reads = [], [], "x"
    for i, (fan_in, fan_out) in enumerate(pairwise(widths)):
        name, last = str(2 * i), i == len(widths) - 2
        w = torch.randn(fan_out, fan_in, generator=generator) * (2 / fan_in) ** 0.5
        weights.append(numpy_helper.from_array(w.numpy(), f"{name}.weight"))
        weights.append(numpy_helper.from_array(torch.zeros(fan_out).numpy(), f"{name}.bias"))
        out = "logits" if last else f"z{i}"
        nodes.append(helper.make_node("Gemm", [reads, f"{name}.weight", f"{name}.bias"], [out], transB=1))
        if not last:
            nodes.append(helper.make_node("Relu", [out], [f"a{i}"]))
            reads = f"a{i}"
    graph = helper.make_graph(
        nodes,
        "example",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", widths[0]])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", widths[-1]])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())
