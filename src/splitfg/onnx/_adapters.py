"""Adapters: small trained nodes behind layers whose own weights cannot be trained in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import onnx
from onnx import helper, numpy_helper

from splitfg.errors import SplitError, raise_if
from splitfg.onnx._file import Arrays, OnnxFile, attributes, is_float
from splitfg.onnx._translate import needed

_PREFIX = "adapter"


@dataclass(frozen=True)
class Site:
    """A layer that has an adapter.

    Attributes:
        kind: ``Conv``, ``Gemm`` or ``MatMul``.
        reads: Its input.
        raw: Its own output.
        writes: The adapter's output, under the name that the layer's output had.
        weight: Its weight.
        bias: Its bias; empty if it has none.
        label: Prefix of the adapter's initialisers.
    """

    kind: str
    reads: str
    raw: str
    writes: str
    weight: str
    bias: str
    label: str


@dataclass(frozen=True)
class Adapter(ABC):
    """Adapters behind the layers that ``layers`` names: globs over weights, or over outputs of nodes.

    Attributes:
        layers: One or more globs.
    """

    layers: str | tuple[str, ...] = "*"

    def __post_init__(self) -> None:
        globs = (self.layers,) if isinstance(self.layers, str) else self.layers
        named = isinstance(globs, tuple | list) and all(isinstance(glob, str) for glob in globs)
        raise_if([] if named else [f"layers must be a glob or several, got {self.layers!r}: pass a rank as rank=..."])

    @abstractmethod
    def weights(self, site: Site, shape: Sequence[int]) -> Arrays:
        """Return the adapter's initialisers for a layer with a weight of this shape."""

    @abstractmethod
    def nodes(self, site: Site, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the nodes that compute ``site.writes`` from ``site.raw`` and ``site.reads``."""

    @abstractmethod
    def merged(self, site: Site, weight: np.ndarray, bias: np.ndarray | None, own: Arrays) -> Arrays | None:
        """Return the layer's weight and bias with the adapter inside; ``None`` if that is not exact."""

    @abstractmethod
    def fits(self, node: onnx.NodeProto) -> bool:
        """Whether it can follow a layer."""

    def matches(self, *names: str) -> bool:
        """Whether a glob matches one of a layer's names."""
        globs = (self.layers,) if isinstance(self.layers, str) else self.layers
        return any(fnmatchcase(name, glob) for name in names for glob in globs)


@dataclass(frozen=True)
class ScaleAndBias(Adapter):
    """z' = s ⊙ z + b with a scale and a bias for every channel; begins as s = 1, b = 0.

    Example:
        >>> from splitfg.onnx import OnnxTrunk, ScaleAndBias, example_model
        >>> [name for name, _ in OnnxTrunk(example_model(), adapters=ScaleAndBias()).named_parameters()]
        ['adapter.0.scale', 'adapter.0.bias', 'adapter.2.scale', 'adapter.2.bias']
    """

    def weights(self, site: Site, shape: Sequence[int]) -> Arrays:
        """Return ones and zeros."""
        channels = [shape[0], 1, 1] if site.kind == "Conv" else [shape[-1]]
        return {
            f"{site.label}.scale": np.ones(channels, np.float32),
            f"{site.label}.bias": np.zeros(channels, np.float32),
        }

    def nodes(self, site: Site, node: onnx.NodeProto) -> list[onnx.NodeProto]:  # noqa: ARG002
        """Return a product and a sum."""
        scaled = f"{site.label}.scaled"
        return [
            helper.make_node("Mul", [site.raw, f"{site.label}.scale"], [scaled]),
            helper.make_node("Add", [scaled, f"{site.label}.bias"], [site.writes]),
        ]

    def merged(self, site: Site, weight: np.ndarray, bias: np.ndarray | None, own: Arrays) -> Arrays | None:
        """Return s W and s b₀ + b; the weight's last dimension numbers outputs, but for convolutions the first."""
        scale, shift = (own[f"{site.label}.{name}"].reshape(-1) for name in ("scale", "bias"))
        if bias is None:
            return None
        spread = scale.reshape(-1, 1, 1, 1) if site.kind == "Conv" else scale
        return {"weight": weight * spread, "bias": bias * scale + shift}

    def fits(self, node: onnx.NodeProto) -> bool:  # noqa: ARG002
        """Return ``True``."""
        return True


@dataclass(frozen=True)
class LowRank(Adapter):
    """z' = z + U V a, with V to ``rank`` channels and U back; begins as U = 0. Skips grouped convolutions.

    Attributes:
        rank: Channels between V and U.
        seed: Of V.

    Example:
        >>> from splitfg.onnx import LowRank, OnnxTrunk, example_model
        >>> trunk = OnnxTrunk(example_model(), adapters=LowRank(rank=2))
        >>> trunk.get_parameter("adapter.0.down.weight").shape
        torch.Size([2, 4])
    """

    rank: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        raise_if([] if self.rank >= 1 else [f"rank must be at least 1, got {self.rank}"])

    def weights(self, site: Site, shape: Sequence[int]) -> Arrays:
        """Return random V and zero U."""
        rng = np.random.default_rng([self.seed, *site.label.encode()])
        if site.kind == "Conv":
            down, up, fan = [self.rank, *shape[1:]], [shape[0], self.rank, 1, 1], int(np.prod(shape[1:]))
        else:
            down, up, fan = [shape[0], self.rank], [self.rank, shape[1]], shape[0]
        return {
            f"{site.label}.down.weight": (rng.standard_normal(down) / fan**0.5).astype(np.float32),
            f"{site.label}.up.weight": np.zeros(up, np.float32),
        }

    def nodes(self, site: Site, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return two layers and a sum."""
        down, up = f"{site.label}.down", f"{site.label}.up"
        if site.kind == "Conv":
            settings = dict(attributes(node))
            first = helper.make_node("Conv", [site.reads, f"{down}.weight"], [down], **settings)
            second = helper.make_node("Conv", [down, f"{up}.weight"], [up])
        else:
            first = helper.make_node("MatMul", [site.reads, f"{down}.weight"], [down])
            second = helper.make_node("MatMul", [down, f"{up}.weight"], [up])
        return [first, second, helper.make_node("Add", [site.raw, up], [site.writes])]

    def merged(self, site: Site, weight: np.ndarray, bias: np.ndarray | None, own: Arrays) -> Arrays | None:
        """Return W + U V."""
        down, up = own[f"{site.label}.down.weight"], own[f"{site.label}.up.weight"]
        whole = np.einsum("or,rikl->oikl", up[:, :, 0, 0], down) if site.kind == "Conv" else down @ up
        return {"weight": weight + whole} | ({} if bias is None else {"bias": bias})

    def fits(self, node: onnx.NodeProto) -> bool:
        """Return whether the layer is not a grouped convolution."""
        return bool(attributes(node).get("group", 1) == 1)


def adapted(file: OnnxFile, h: str, adapter: Adapter) -> tuple[OnnxFile, list[Site]]:
    """Return the graph with adapters behind the chosen layers below h, and where they are.

    Raises:
        SplitError: If no layer matches.
    """
    model = onnx.ModelProto()
    model.CopyFrom(file.model)
    layers = [node for node in needed(file, h) if _is_layer(file, node)]
    known = [node.input[1] for node in layers]
    outputs = {n.output[0] for n in layers if adapter.matches(n.input[1], n.output[0], n.name) and adapter.fits(n)}
    sites, nodes = list[Site](), list[onnx.NodeProto]()
    for node in model.graph.node:
        nodes.append(node)
        if node.output and node.output[0] in outputs:
            site = _site(node)
            if site.writes == h:
                continue  # the head's own weights do the same
            node.output[0] = site.raw
            nodes += adapter.nodes(site, node)
            shape = _plain_shape(file, node)
            made = adapter.weights(site, shape)
            model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in made.items())
            sites.append(site)
    if not sites:
        raise SplitError([_no_layer(file, adapter, known)])
    copied = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copied)
    return OnnxFile(model.SerializeToString()), sites


def _no_layer(file: OnnxFile, adapter: Adapter, known: Sequence[str]) -> str:
    dynamic = [n.op_type for n in file.model.graph.node if n.op_type in ("MatMulInteger", "ConvInteger")]
    if dynamic and not known:
        cure = "quantise it statically (onnxruntime.quantization.quantize_static)"
        return f"{file.name} is quantised dynamically ({dynamic[0]}), where adapters have no place: {cure}"
    return f"no layer matches {adapter.layers!r}; weights of layers are {', '.join(known) or 'none'}"


def merge(model: onnx.ModelProto, adapter: Adapter, sites: Sequence[Site]) -> None:
    """Put adapters into the weights of their layers, in place, where that is exact; the others stay nodes."""
    values = {t.name: t for t in model.graph.initializer}
    uses = [name for node in model.graph.node for name in node.input]
    for site in sites:
        held = [name for name in (site.weight, site.bias) if name]
        if any(n not in values or not is_float(values[n].data_type) or uses.count(n) != 1 for n in held):
            continue
        own = {n: numpy_helper.to_array(t) for n, t in values.items() if n.startswith(f"{site.label}.")}
        layer = next(node for node in model.graph.node if site.raw in node.output)
        turned = site.kind == "Gemm" and attributes(layer).get("transB", 0)
        weight = numpy_helper.to_array(values[site.weight])
        bias = numpy_helper.to_array(values[site.bias]) if site.bias else None
        found = adapter.merged(site, weight.T if turned else weight, bias, own)
        if found is None:
            continue
        found["weight"] = found["weight"].T if turned else found["weight"]
        for name, key in ((site.weight, "weight"), (site.bias, "bias")):
            if name:
                array = np.ascontiguousarray(found[key], dtype=numpy_helper.to_array(values[name]).dtype)
                values[name].CopyFrom(numpy_helper.from_array(array, name))
        layer.output[0] = site.writes
        inner = [n for n in model.graph.node if any(o.startswith(f"{site.label}.") for o in n.output)]
        last = [n for n in model.graph.node if site.writes in n.output and n is not layer and n.op_type == "Add"]
        for node in (*inner, *(n for n in last if site.raw in n.input or f"{site.label}.scaled" in n.input)):
            model.graph.node.remove(node)
    _drop_unused(model.graph)


def _drop_unused(graph: onnx.GraphProto) -> None:
    used = {name for node in graph.node for name in node.input}
    for tensor in [t for t in graph.initializer if t.name.startswith(f"{_PREFIX}.") and t.name not in used]:
        graph.initializer.remove(tensor)


def _is_layer(file: OnnxFile, node: onnx.NodeProto) -> bool:
    if node.op_type not in ("Conv", "Gemm", "MatMul") or len(node.input) < 2:
        return False
    weight = file.constants.get(node.input[1])
    ranks = (4,) if node.op_type == "Conv" else (2,)
    return weight is not None and weight.ndim in ranks and node.input[0] not in file.constants


def _site(node: onnx.NodeProto) -> Site:
    weight, bias = node.input[1], node.input[2] if len(node.input) > 2 else ""
    stem = weight.removesuffix(".weight").removesuffix("_DequantizeLinear_Output").removesuffix("_quantized")
    label = f"{_PREFIX}.{stem.removesuffix('.weight')}"
    return Site(node.op_type, node.input[0], f"{label}.raw", node.output[0], weight, bias, label)


def _plain_shape(file: OnnxFile, node: onnx.NodeProto) -> Sequence[int]:
    """The weight's shape, ``(in, out)`` for matrices."""
    shape = tuple(int(d) for d in file.constants[node.input[1]].shape)
    return shape[::-1] if node.op_type == "Gemm" and attributes(node).get("transB", 0) else shape
