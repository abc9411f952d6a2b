"""Writing a tuned network: the user's graph with new weights, and the head behind h."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from splitfg.errors import SplitError
from splitfg.heads import LinearHead
from splitfg.onnx._engine import prune
from splitfg.onnx._file import dtype_of, open_session, read_names
from splitfg.onnx._trunk import OnnxTrunk

_EXACT, _HALF, _QUANTISED = 1e-5, 5e-3, 5e-2


def with_head(
    trunk: OnnxTrunk, head: LinearHead, classes: Sequence[object] | None = None, *, merged: bool = True
) -> onnx.ModelProto:
    """Return the tuned graph up to h, followed by the head.

    Outputs are ``outputs`` (logits or values); for classes also ``probabilities`` and ``label``, an index into
    ``classes``, which the file's metadata lists as JSON under ``classes``.

    Args:
        trunk: The trunk.
        head: One or more linear layers.
        classes: Names of the classes; ``None`` for values.
        merged: Whether to merge adapters into weights where that is exact.
    """
    model = trunk.tuned(merged=merged)
    graph = model.graph
    _keep_until(graph, trunk.cut)
    reads = _head_nodes(graph, trunk, head)
    graph.node.append(helper.make_node("Identity", [reads], ["outputs"]))
    del graph.output[:], graph.value_info[:]
    shape = [None] * len(trunk.file.shapes.get(trunk.cut, (0, 0)))
    graph.output.append(helper.make_tensor_value_info("outputs", TensorProto.FLOAT, shape))
    if classes is not None:
        graph.node.append(helper.make_node("Softmax", [reads], ["probabilities"], axis=len(shape) - 1))
        graph.node.append(helper.make_node("ArgMax", [reads], ["label"], axis=-1, keepdims=0))
        graph.output.append(helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, shape))
        graph.output.append(helper.make_tensor_value_info("label", TensorProto.INT64, shape[:-1]))
        names = [c.item() if isinstance(c, np.generic) else c for c in classes]
        written = json.dumps(names, default=str)  # dates, and other names that JSON lacks
        helper.set_model_props(model, {"classes": written, "tuned by": "splitfg"})
    return model


def save(model: onnx.ModelProto, path: str | Path, inputs: Sequence[object], outputs: Tensor) -> float:
    """Write a file once plain ONNX Runtime gives the expected outputs for it, in one atomic replacement.

    Args:
        model: The graph.
        path: Where to.
        inputs: A few rows.
        outputs: What the network computes for them.

    Returns:
        The largest difference, relative to the largest output.

    Raises:
        SplitError: If the file would give other outputs; nothing is written then.
        OSError: If it cannot be written; a file that was there before is intact.
    """
    onnx.checker.check_model(model)
    session = open_session(model, str(path))
    kinds = {i.name: dtype_of(i.type.tensor_type.elem_type) for i in model.graph.input}
    named = zip(session.get_inputs(), inputs, strict=True)
    given = {i.name: np.asarray(value).astype(kinds[i.name], copy=False) for i, value in named}
    rows = _fixed_rows(session)
    if rows is not None:  # repeat or cut them
        given = {name: np.resize(value, (rows, *value.shape[1:])) for name, value in given.items()}
        outputs = torch.as_tensor(np.resize(outputs.numpy(), (rows, *outputs.shape[1:])))
    found = torch.as_tensor(session.run(["outputs"], given)[0])
    error = float((found - outputs).abs().max() / outputs.abs().max().clamp_min(1.0))
    if not error <= _tolerance(model):
        raise SplitError([f"the saved graph would differ by {error:.1e} from the tuned network: please report this"])
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as written:
            written.write(model.SerializeToString())
            written.flush()
            os.fsync(written.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return error


def _fixed_rows(session: Any) -> int | None:
    """Return the number of rows that the graph is fixed to; ``None`` if it is free."""
    first = [i.shape[0] for i in session.get_inputs() if i.shape]
    return next((rows for rows in first if isinstance(rows, int)), None)


def _tolerance(model: onnx.ModelProto) -> float:
    """Return the difference that rounding explains: the engine fuses operators of the saved file in other ways."""
    if any(node.op_type == "QuantizeLinear" for node in model.graph.node):
        return _QUANTISED
    half = any(t.data_type == TensorProto.FLOAT16 for t in model.graph.initializer)
    return _HALF if half else _EXACT


def _head_nodes(graph: onnx.GraphProto, trunk: OnnxTrunk, head: LinearHead) -> str:
    """Append the head's layers, and return the name of their output."""
    reads = trunk.cut
    if trunk.file.types.get(trunk.cut) not in (None, TensorProto.FLOAT):
        graph.node.append(helper.make_node("Cast", [reads], ["splitfg.h"], to=TensorProto.FLOAT))
        reads = "splitfg.h"
    for i, layer in enumerate(head.layers):
        name = f"splitfg.head.{i}"
        weight = np.ascontiguousarray(layer.weight.detach().float().numpy().T)
        bias = np.zeros(weight.shape[1], np.float32) if layer.bias is None else layer.bias.detach().float().numpy()
        graph.initializer.append(numpy_helper.from_array(weight, f"{name}.weight"))
        graph.initializer.append(numpy_helper.from_array(bias, f"{name}.bias"))
        graph.node.append(helper.make_node("MatMul", [reads, f"{name}.weight"], [f"{name}.product"]))
        graph.node.append(helper.make_node("Add", [f"{name}.product", f"{name}.bias"], [name]))
        reads = name
    return reads


def _keep_until(graph: onnx.GraphProto, h: str) -> None:
    """Drop the nodes and initialisers that h does not depend on."""
    prune(graph, [h])
    used = {name for node in graph.node for name in read_names(node)}
    kept = [t for t in graph.initializer if t.name in used]
    inputs = [i for i in graph.input if i.name in used]
    del graph.initializer[:], graph.input[:]
    graph.initializer.extend(kept)
    graph.input.extend(inputs)
