"""ONNX Runtime as a device: graphs with added inputs and outputs, made by surgery on the user's graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from splitfg.errors import SplitError
from splitfg.onnx._file import Arrays, OnnxFile, cause, dtype_of, open_session, read_names
from splitfg.types import Params

_ADD = "splitfg.add."
_BEFORE = "splitfg.before."
_ALONE = "splitfg.alone."


class Weight:
    """How a parameter of the trunk is stored in the graph.

    Args:
        initializer: Name in the graph.
        transposed: Whether the graph stores the transposed matrix.
    """

    def __init__(self, initializer: str, *, transposed: bool = False) -> None:
        self.initializer, self.transposed = initializer, transposed

    def stored(self, value: Tensor, kind: int) -> NDArray[Any]:
        """Return the array for the graph from a parameter."""
        array = (value.T if self.transposed else value).detach().cpu().numpy()
        return np.ascontiguousarray(array.astype(dtype_of(kind), copy=False))

    def parameter(self, array: NDArray[Any]) -> Tensor:
        """Return the parameter's value from the graph's array."""
        value = torch.tensor(np.asarray(array, dtype=np.float32))
        return value.T.contiguous() if self.transposed else value


class OnnxDevice:
    """Runs a graph in ONNX Runtime, with numbers added to tensors and tensors read; implements ``Device``.

    A session is made for every set of added and read tensors: the graph is cut to what is needed, a perturbed tensor
    gets an ``Add`` behind it whose second operand is a new input, and trained initialisers become inputs.

    Args:
        file: The graph.
        weights: Parameters by the trunk's names.
        threads: Threads of the engine; ``None`` for its default.
    """

    def __init__(self, file: OnnxFile, weights: Mapping[str, Weight], threads: int | None = None) -> None:
        self.file, self.weights, self.threads = file, dict(weights), threads
        self._sessions: dict[tuple[tuple[str, ...], ...], _Session] = {}
        self._stored: Arrays = {w.initializer: file.initializers[w.initializer] for w in self.weights.values()}
        self._rows = _fixed_rows(file)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the sessions, which cannot be copied; each is made again when it is needed."""
        return {**vars(self), "_sessions": {}}

    def write(self, params: Params) -> None:
        """Store weights, in the types of the graph."""
        for name, value in params.items():
            weight = self.weights[name]
            self._stored[weight.initializer] = weight.stored(value, self.file.types[weight.initializer])

    def run(self, inputs: tuple[Any, ...], add: Mapping[str, Tensor], read: Sequence[str]) -> Arrays:
        """Run rows forward; in parts if the graph has a fixed number of rows.

        Raises:
            SplitError: If inputs do not fit the graph, or the engine fails.
        """
        feeds = self._feeds(inputs)
        added = {name: _array(value) for name, value in add.items()}
        session = self._session(tuple(sorted(added)), tuple(read))
        rows = len(next(iter(feeds.values())))
        if self._rows is None or rows == self._rows:
            return self._call(session, feeds, added, read)
        parts = [
            self._call(session, _part(feeds, start, self._rows), _part(added, start, self._rows), read)
            for start in range(0, rows, self._rows)
        ]
        return {name: np.concatenate([part[name] for part in parts])[:rows] for name in read}

    def run_layers(self, given: Mapping[str, Tensor]) -> Arrays:
        """Run the nodes that write these tensors by themselves, each with its own rows.

        Raises:
            SplitError: If the engine fails.
        """
        names = tuple(given)
        feeds = {_ALONE + name: self._cast(name, _array(value)) for name, value in given.items()}
        return self._call(self._session((), names, alone=names), feeds, {}, names)

    def current(self) -> onnx.ModelProto:
        """Return the user's graph with the current weights."""
        model = onnx.ModelProto()
        model.CopyFrom(self.file.model)
        for tensor in model.graph.initializer:
            if tensor.name in self._stored:
                tensor.CopyFrom(numpy_helper.from_array(self._stored[tensor.name], tensor.name))
        return model

    def _feeds(self, inputs: tuple[Any, ...]) -> Arrays:
        names = self.file.inputs
        if len(inputs) != len(names):
            raise SplitError([f"{self.file.name} has {len(names)} inputs ({', '.join(names)}), got {len(inputs)}"])
        feeds = {}
        for name, value in zip(names, inputs, strict=True):
            feeds[name] = np.ascontiguousarray(_array(value).astype(dtype_of(self.file.types[name]), copy=False))
        return feeds

    def _call(self, session: _Session, feeds: Arrays, add: Arrays, read: Sequence[str]) -> Arrays:
        given = {**feeds, **self._stored, **{_ADD + name: self._cast(name, value) for name, value in add.items()}}
        try:
            found = session.run(list(read), given)
        except Exception as error:  # the engine's own exceptions share no base class
            shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in feeds.items())
            raise SplitError([f"ONNX Runtime failed on inputs {shapes}: {cause(error)}"]) from error
        return dict(zip(read, found, strict=True))

    def _cast(self, name: str, value: NDArray[Any]) -> NDArray[Any]:
        return value.astype(dtype_of(self.file.types.get(name, TensorProto.FLOAT)), copy=False)

    def _session(self, add: tuple[str, ...], read: tuple[str, ...], alone: tuple[str, ...] = ()) -> _Session:
        key = (add, read, alone)
        if key not in self._sessions:
            model = altered(self.file, add=add, read=read, as_inputs=self._stored, alone=alone)
            self._sessions[key] = _Session(open_session(model, self.file.name, self.threads))
        return self._sessions[key]


class _Session:
    """A session of the engine that takes the inputs it knows."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._inputs = [i.name for i in session.get_inputs()]

    def run(self, read: list[str], given: Arrays) -> list[NDArray[Any]]:
        found: list[NDArray[Any]] = self._session.run(read, {n: given[n] for n in self._inputs if n in given})
        return found


def altered(
    file: OnnxFile,
    *,
    add: Iterable[str] = (),
    read: Iterable[str],
    as_inputs: Iterable[str] = (),
    alone: Iterable[str] = (),
) -> onnx.ModelProto:
    """Return a graph that computes some tensors of a file.

    Args:
        file: The graph; unchanged.
        add: Tensors that get an added input.
        read: Tensors that become the outputs.
        as_inputs: Initialisers that become inputs.
        alone: Tensors whose nodes get an input of their own in place of the first tensor that they read.

    Raises:
        SplitError: If a tensor does not exist.
    """
    model = onnx.ModelProto()
    model.CopyFrom(file.model)
    graph, read, add = model.graph, list(read), list(add)
    made = {name for node in graph.node for name in node.output} | set(file.inputs)
    missing = [name for name in (*read, *add) if name not in made]
    if missing:
        raise SplitError([f"{file.name} has no tensor {', '.join(missing)}: `splitfg onnx show` lists them"])
    for name in add:
        _insert_add(graph, name, file.types.get(name) or TensorProto.FLOAT)
    for name in alone:
        _set_apart(graph, name, file.types.get(name) or TensorProto.FLOAT)
    prune(graph, read)
    moved = set(as_inputs)
    kept = [t for t in graph.initializer if t.name not in moved]
    used = {name for node in graph.node for name in read_names(node)}
    graph.input.extend(
        helper.make_tensor_value_info(t.name, t.data_type, list(t.dims))
        for t in graph.initializer
        if t.name in moved & used
    )
    del graph.initializer[:], graph.output[:], graph.value_info[:]
    graph.initializer.extend(t for t in kept if t.name in used)
    unread = [i for i in graph.input if i.name in used or i.name in read]
    del graph.input[:]
    graph.input.extend(unread)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in read)
    return model


def _insert_add(graph: onnx.GraphProto, name: str, kind: int) -> None:
    for place, node in enumerate(graph.node):
        if name in node.output:
            node.output[list(node.output).index(name)] = _BEFORE + name
            graph.node.insert(place + 1, helper.make_node("Add", [_BEFORE + name, _ADD + name], [name]))
            graph.input.append(helper.make_tensor_value_info(_ADD + name, kind, None))
            return
    raise SplitError([f"{name} is an input: add to the batch itself"])


def _set_apart(graph: onnx.GraphProto, name: str, kind: int) -> None:
    node = next(node for node in graph.node if name in node.output)
    node.input[0] = _ALONE + name
    graph.input.append(helper.make_tensor_value_info(_ALONE + name, kind, None))


def prune(graph: onnx.GraphProto, read: Sequence[str]) -> None:
    """Keep the nodes that the outputs depend on."""
    wanted, kept = set(read), []
    for node in reversed(graph.node):
        if wanted & set(node.output):
            kept.append(node)
            wanted.update(read_names(node))
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in reversed(kept)]
    del graph.node[:]
    graph.node.extend(nodes)


def _fixed_rows(file: OnnxFile) -> int | None:
    """Return the number of rows that the inputs are fixed to; ``None`` if it is free."""
    fixed = {shape[0] for name in file.inputs if (shape := file.shapes.get(name)) and shape[0] is not None}
    if len(fixed) > 1:
        raise SplitError([f"the inputs of {file.name} have different fixed numbers of rows: export with a free one"])
    return fixed.pop() if fixed else None


def _array(value: Any) -> NDArray[Any]:
    """Return a contiguous array that shares the memory of a tensor on the CPU where it can."""
    return np.ascontiguousarray(value.detach().cpu().numpy() if isinstance(value, Tensor) else value)


def _part(arrays: Arrays, start: int, rows: int) -> Arrays:
    """Return ``rows`` rows; the last one is repeated where they end."""
    found = {}
    for name, array in arrays.items():
        part = array[start : start + rows]
        found[name] = np.concatenate([part, np.repeat(part[-1:], rows - len(part), axis=0)])
    return found
