"""Where an ONNX file can be cut, and which weights can be trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from splitfg.onnx._file import OnnxFile
from splitfg.onnx._translate import needed, trainable
from splitfg.onnx._trunk import OnnxTrunk, default_cut


@dataclass(frozen=True)
class Weight:
    """One initialiser of a layer.

    Attributes:
        name: Its name.
        operator: The operator that reads it.
        shape: Its shape.
        dtype: Type of its numbers.
        use: ``trained`` by default, ``on request`` (below an operator without a closed form), or ``adapter``.
    """

    name: str
    operator: str
    shape: tuple[int, ...]
    dtype: str
    use: str

    @property
    def count(self) -> int:
        """Numbers that it holds."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True)
class Description:
    """The contents of a file.

    Attributes:
        inputs: Shapes by name; ``None`` for free dimensions.
        outputs: The same.
        cut: The default tensor h.
        cuts: Tensors that layers read, with shapes: places to cut at.
        weights: Everything that can be trained, in the graph's order.
    """

    inputs: dict[str, tuple[int | None, ...]]
    outputs: dict[str, tuple[int | None, ...]]
    cut: str
    cuts: dict[str, tuple[int | None, ...]]
    weights: tuple[Weight, ...]


def describe(source: str | Path | bytes, cut: str | None = None) -> Description:
    """Describe an ONNX file.

    Example:
        >>> from splitfg.onnx import describe, example_model
        >>> found = describe(example_model())
        >>> found.cut, [weight.name for weight in found.weights]
        ('a1', ['0.weight', '0.bias', '2.weight', '2.bias'])
    """
    file = OnnxFile(source)
    h = default_cut(file) if cut is None else cut
    trunk = OnnxTrunk(file, cut=h)
    own = {weight.initializer for weight in trunk.engine.weights.values()}
    floats = trainable(file, h)
    weights, cuts = dict[str, Weight](), dict[str, tuple[int | None, ...]]()
    for node in needed(file, h):
        layer = node.op_type in ("Conv", "Gemm", "MatMul") and len(node.input) > 1 and node.input[1] in file.constants
        if layer and node.input[0] not in (*file.constants, *file.inputs):
            cuts[node.input[0]] = file.shapes.get(node.input[0], ())
        for name in node.input:
            value = file.constants.get(name)
            if name in floats:
                use = "trained" if name in own else "on request"
            elif layer and value is not None and name not in file.initializers and value.size > 1:
                use = "adapter"
            else:
                continue
            assert value is not None
            weights.setdefault(name, Weight(name, node.op_type, tuple(value.shape), str(value.dtype), use))
    ends = {o.name: file.shapes.get(o.name, ()) for o in file.model.graph.output}
    cuts[h] = file.shapes.get(h, ())
    inputs = {name: file.shapes.get(name, ()) for name in file.inputs}
    return Description(inputs, ends, h, cuts, tuple(weights.values()))
