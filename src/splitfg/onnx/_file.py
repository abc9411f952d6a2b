"""Reading ONNX files: validation, tensor types, constants."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import numpy_helper

from splitfg.errors import SplitError, raise_if
from splitfg.onnx._quantised import as_float_operators

Arrays = dict[str, NDArray[Any]]

_LIMIT = 2**31 - 1


class OnnxFile:
    """A validated ONNX graph, with its tensors' types and constants. The file itself is never written to.

    Args:
        source: Path of the file, or its bytes.

    Attributes:
        model: The graph, with weights inside.
        name: Path, for messages.
        types: ONNX element type of every tensor that is known.
        shapes: Dimensions of every tensor that is known; ``None`` for dynamic ones.
        constants: Initialisers, and everything that the graph computes from them alone.

    Raises:
        SplitError: If the file is not ONNX, is damaged, or the engine cannot run it.
    """

    def __init__(self, source: str | Path | bytes) -> None:
        self.name = "the model" if isinstance(source, bytes) else str(source)
        self.model = as_float_operators(_constants_stored(_upgraded(_parsed(source, self.name))))
        _check(self.model, self.name)
        graph = self.model.graph
        inferred = _inferred(self.model)
        _check_sizes(inferred, self.name)
        self.types: dict[str, int] = {}
        self.shapes: dict[str, tuple[int | None, ...]] = {}
        for info in (*graph.input, *inferred.graph.value_info, *inferred.graph.output):
            self._describe(info)
        for tensor in graph.initializer:
            self.types[tensor.name], self.shapes[tensor.name] = tensor.data_type, tuple(tensor.dims)
        self.initializers: Arrays = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
        self.constants: Arrays = {**self.initializers, **self._folded()}

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs that a caller must give."""
        return [i.name for i in self.model.graph.input if i.name not in self.initializers]

    @property
    def opset(self) -> int:
        """Version of the standard operators."""
        return next((o.version for o in self.model.opset_import if o.domain in ("", "ai.onnx")), 1)

    def _describe(self, info: onnx.ValueInfoProto) -> None:
        tensor = info.type.tensor_type
        self.types[info.name] = tensor.elem_type
        if tensor.HasField("shape"):
            known = [d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else None for d in tensor.shape.dim]
            self.shapes[info.name] = tuple(known)

    def _folded(self) -> Arrays:
        """Let the engine compute what depends on constants alone."""
        known, wanted = set(self.initializers), []
        for node in self.model.graph.node:
            if all(name in known for name in read_names(node)) and node.op_type not in _RANDOM:
                known.update(node.output)
                wanted += [name for name in node.output if name]
        if not wanted:
            return {}
        part = onnx.ModelProto()
        part.CopyFrom(self.model)
        del part.graph.node[:], part.graph.output[:], part.graph.input[:], part.graph.value_info[:]
        part.graph.node.extend(n for n in self.model.graph.node if set(n.output) & set(wanted))
        part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
        used = {name for node in part.graph.node for name in read_names(node)}
        kept = [t for t in part.graph.initializer if t.name in used]
        del part.graph.initializer[:]
        part.graph.initializer.extend(kept)
        session = open_session(part, self.name)
        try:
            return dict(zip(wanted, session.run(wanted, {}), strict=True))
        except Exception as error:  # the engine's own exceptions share no base class
            raise SplitError([f"ONNX Runtime cannot compute the constants of {self.name} ({cause(error)})"]) from error


_RANDOM = ("RandomNormal", "RandomUniform")


def open_session(model: onnx.ModelProto, name: str, threads: int | None = None) -> ort.InferenceSession:
    """Open a graph in the engine, on the CPU.

    Raises:
        SplitError: If the engine cannot run it.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = False  # the arena keeps the peak of every session
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the engine's own exceptions share no base class
        cure = "export it for an opset and operators that the engine has"
        raise SplitError([f"ONNX Runtime cannot run {name} ({cause(error)}): {cure}"]) from error


def cause(error: Exception) -> str:
    """Return the first line of an exception of the engine, without the place in its source."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    plain = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    return re.sub(r"^/\S+:\d+ .*?\) (?=[A-Z])", "", plain)


def read_names(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the tensors that a node reads, those inside its subgraphs included."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        graphs = [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else list(attribute.graphs)
        for graph in graphs:
            made = {t.name for t in graph.initializer} | {i.name for i in graph.input}
            for inner in graph.node:
                yield from (name for name in read_names(inner) if name not in made)
                made.update(inner.output)


def attributes(node: onnx.NodeProto) -> Mapping[str, Any]:
    """Return the attributes of a node as Python values."""
    return {a.name: _plain(onnx.helper.get_attribute_value(a)) for a in node.attribute}


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _parsed(source: str | Path | bytes, name: str) -> onnx.ModelProto:
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise SplitError([f"{name} does not exist or is not a file: give the path of an .onnx file"])
    try:
        model = onnx.load_from_string(source) if isinstance(source, bytes) else onnx.load(str(source))
    except Exception as error:
        raise SplitError([f"{name} is not a readable ONNX file ({type(error).__name__}: {error})"]) from error
    if not model.graph.node:
        raise SplitError([f"{name} is not an ONNX model, or its graph is empty: give the path of an .onnx file"])
    if model.ByteSize() > _LIMIT:
        raise SplitError([f"{name} is larger than 2 GiB, which one ONNX message cannot hold: use a smaller network"])
    return model


def _upgraded(model: onnx.ModelProto) -> onnx.ModelProto:
    """Drop initialisers from the inputs: before IR version 4 they were listed as both."""
    held = {t.name for t in model.graph.initializer}
    kept = [i for i in model.graph.input if i.name not in held]
    if len(kept) < len(model.graph.input):
        del model.graph.input[:]
        model.graph.input.extend(kept)
    model.ir_version = max(model.ir_version, 4)
    return model


def _constants_stored(model: onnx.ModelProto) -> onnx.ModelProto:
    """Store the tensors of Constant nodes as initialisers: some exporters write all weights that way."""
    nodes = []
    for node in model.graph.node:
        value = next((a.t for a in node.attribute if a.name == "value"), None) if node.op_type == "Constant" else None
        if value is None:
            nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
            continue
        tensor = model.graph.initializer.add()
        tensor.CopyFrom(value)
        tensor.name = node.output[0]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def _check(model: onnx.ModelProto, name: str) -> None:
    try:
        onnx.checker.check_model(model)
    except Exception as error:
        raise SplitError([f"{name} is not a valid ONNX model ({cause(error)}): export it again"]) from error
    open_session(model, name)


def _check_sizes(model: onnx.ModelProto, name: str) -> None:
    """Raise an error if a tensor is too large even for one row: a small file can ask for any amount of memory."""
    found = []
    for info in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        sizes = [d.dim_value for d in info.type.tensor_type.shape.dim if d.dim_value > 0]
        if math.prod(sizes) > _LIMIT:
            found.append(f"{info.name} of {name} holds {math.prod(sizes):,} numbers: cut them down, or export it again")
    raise_if(found)


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception:  # the engine runs it all the same; types come from its own reading
        return model


def is_float(kind: int) -> bool:
    """Whether an ONNX element type is a floating-point number that weights may have."""
    return kind in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)


def dtype_of(kind: int) -> np.dtype[Any]:
    """Return the numpy dtype of an ONNX element type."""
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind))
