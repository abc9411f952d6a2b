"""Taking a module apart without copying a parameter."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from splitfg.errors import SplitError
from splitfg.splitting._call import call, places_of
from splitfg.types import Params


def graph_of(model: nn.Module) -> fx.Graph | None:
    """The calls of the model in its present mode, linear layers kept whole; ``None`` if it cannot be traced."""
    try:
        return _traced(model, "", model.training)
    except SplitError:
        return None


def last_linear(model: nn.Module, graph: fx.Graph | None) -> str | None:
    """The name of the :class:`torch.nn.Linear` that is called last; without a graph, of the one defined last."""
    if graph is None:
        names = list(linears(model))
    else:
        called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        names = [name for name in called if isinstance(model.get_submodule(name), nn.Linear)]
    return names[-1] if names else None


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer that can be called, by name, in the order of definition."""
    found = {}
    for name, module in model.named_modules():
        # attention reads the weight of its linear layer, and never calls it
        inside_attention = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention)
        if isinstance(module, nn.Linear) and not inside_attention:
            found[name] = module
    return found


def original(model: nn.Module) -> nn.Module:
    """The module as it was before any of its modules were replaced."""
    return model.original if isinstance(model, _Twin) else model


def submodule(model: nn.Module, name: str) -> nn.Module:
    """The named module, or an error that says what names there are."""
    known = [n for n, _ in model.named_modules() if n]
    if name in known:
        return model.get_submodule(name)
    near = difflib.get_close_matches(name, known, n=3) or known[-3:]
    raise SplitError([f"there is no module named {name!r}; did you mean {' or '.join(near)}?"])


def names_of(part: nn.Module, model: nn.Module) -> dict[str, str]:
    """From a part's parameter names to the model's, by identity."""
    outer = {id(p): name for name, p in model.named_parameters()}
    strangers = [name for name, p in part.named_parameters() if id(p) not in outer]
    if strangers:
        raise SplitError([f"{', '.join(strangers)} of the {type(part).__name__} are no parameters of the model"])
    return {name: outer[id(p)] for name, p in part.named_parameters()}


def replaced(model: nn.Module, new: Mapping[str, nn.Module]) -> nn.Module:
    """The model with some modules replaced, sharing every parameter and every other module.

    Only the containers on the way to the replaced modules are copied, and those shallowly.
    """
    for name in new:
        submodule(model, name)
    if isinstance(model, _Twin):  # what it has replaced already stays replaced
        return _Twin(model.original, {**model.new, **new})
    return _Twin(model, new)


def without(model: nn.Module, name: str) -> nn.Module:
    """The model with one module replaced by the identity: what it gives is what that module would read."""
    return replaced(model, {name: nn.Identity()})


class _Twin(nn.Module):
    """The model with some modules replaced; whatever else changes in the model changes here too."""

    def __init__(self, model: nn.Module, new: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.new = dict(new)
        self._copies: dict[str, tuple[nn.Module, nn.Module]] = {}
        self._own: set[str] = set()
        root = self._copied("", model)
        for name, module in new.items():
            *path, leaf = name.split(".")
            holder = root
            for depth, step in enumerate(path, start=1):
                child = self._copied(".".join(path[:depth]), holder.get_submodule(step))
                holder._modules[step] = child
                holder = child
                self._own.add(".".join(path[:depth]))
            holder._modules[leaf] = module
            self._own.add(name)
        # Adopt the copy's registries, so that parameter names stay the model's own.
        self._modules, self._parameters, self._buffers = root._modules, root._parameters, root._buffers

    @property
    def original(self) -> nn.Module:
        """The model this is the twin of."""
        return self._copies[""][0]

    def _copied(self, name: str, module: nn.Module) -> nn.Module:
        if name not in self._copies:
            twin = copy.copy(module)
            twin.__dict__["_modules"] = dict(module._modules)
            self._copies[name] = (module, twin)
        return self._copies[name][1]

    def forward(self, *inputs: Any) -> Tensor:
        if torch.compiler.is_compiling():  # attributes are constants there
            for original, twin in self._copies.values():
                if twin.training != original.training:
                    twin.training = original.training
        else:
            self._follow()
        h: Tensor = self._copies[""][1](*inputs)
        return h

    def _follow(self) -> None:
        """Take over attributes and modules that were set in the model since."""
        for path, (original, twin) in self._copies.items():
            known = twin.__dict__
            known.update({k: v for k, v in vars(original).items() if k != "_modules" and known.get(k, self) is not v})
            for name, child in original._modules.items():
                if (f"{path}.{name}" if path else name) not in self._own:
                    twin._modules[name] = child


def cut_at(model: nn.Module, name: str) -> tuple[nn.Module, nn.Module]:
    """The model in two: up to what the named module reads, and from that module on.

    Args:
        model: Traced symbolically; control flow that depends on data cannot be cut this way.
        name: Dotted name of the first module of the second part.

    Returns:
        Two graph modules that share the model's parameters under the model's names.
    """
    submodule(model, name)
    halves = {mode: _halves(model, name, mode) for mode in (True, False)}
    trunks, rests = ({mode: halves[mode][i] for mode in halves} for i in (0, 1))
    return _ByMode.of(model, trunks), _ByMode.of(model, rests)


def _halves(model: nn.Module, name: str, mode: bool) -> tuple[_Half, _Half]:
    """Both halves as the model computes them in training (or evaluation) mode."""
    graph = _traced(model, name, mode)
    reader = [n for n in graph.nodes if n.op == "call_module" and n.target == name]
    if len(reader) != 1 or len(reader[0].all_input_nodes) != 1:
        raise SplitError([f"{name} is called {len(reader)} times or reads several values: cut at another module"])
    h = reader[0].all_input_nodes[0]
    later = _downstream(graph, h)
    _refuse_other_crossings(later, h, name)
    return _up_to(model, graph, h), _from(model, graph, h, later)


class _ByMode(nn.Module):
    """A traced half for each mode, since tracing fixes what ``self.training`` was; follows the model's flag."""

    def __init__(self, model: nn.Module, halves: Mapping[bool, _Half]) -> None:
        super().__init__()
        self.traced = halves[True]
        # Not registered: the model is the whole of which this is a part, and parameters must have one home here.
        self._unregistered = (model, halves[False], places_of(halves[False]))

    @classmethod
    def of(cls, model: nn.Module, halves: Mapping[bool, _Half]) -> nn.Module:
        """One half for both modes where they are the same."""
        return halves[True] if halves[True].code == halves[False].code else cls(model, halves)

    def forward(self, *inputs: Any) -> Any:
        model, evaluation_half, places = self._unregistered
        if model.training:
            return self.traced(*inputs)
        present = dict(self.traced.named_parameters())
        own: Params = {name: present[name] for name, _ in evaluation_half.named_parameters() if name in present}
        return call(evaluation_half, own, inputs, places=places)


def is_readout(model: nn.Module, name: str, graph: fx.Graph | None) -> bool:
    """Whether the named module is the linear layer whose output the model returns.

    The last linear layer is taken for it whatever follows; the first batch shows whether it is.
    """
    if not isinstance(submodule(model, name), nn.Linear):
        return False
    if graph is None or name == last_linear(model, graph):
        return name == last_linear(model, graph)
    calls = [n for n in graph.nodes if n.op == "call_module" and n.target == name]
    return len(calls) == 1 and all(user.op == "output" for user in calls[0].users)


def _traced(model: nn.Module, name: str, mode: bool) -> fx.Graph:
    flags = [(module, module.training) for module in model.modules()]
    model.train(mode)
    try:
        return _Tracer(name).trace(model)
    except Exception as error:  # symbolic tracing raises many kinds
        raise SplitError(
            [f"the model cannot be traced to be cut at {name} ({error}): build Split(trunk, head) from its parts"]
        ) from error
    finally:
        for module, training in flags:
            module.training = training


class _Tracer(fx.Tracer):
    """Keeps the named module whole, so that the cut falls in front of it, and linear layers of every kind."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = module_qualified_name == self._name or isinstance(m, nn.Linear)
        return whole or super().is_leaf_module(m, module_qualified_name)


def _downstream(graph: fx.Graph, h: fx.Node) -> list[fx.Node]:
    """The nodes after h that depend on it, in order."""
    reached = {h}
    order = []
    for node in graph.nodes:
        if node is not h and any(n in reached for n in node.all_input_nodes):
            reached.add(node)
            order.append(node)
    return order


def _refuse_other_crossings(later: list[fx.Node], h: fx.Node, name: str) -> None:
    inside = {h, *later}
    outside = {n for node in later for n in node.all_input_nodes if n not in inside and n.op != "get_attr"}
    if outside:
        listed = ", ".join(sorted(str(n.target) for n in outside))
        raise SplitError([f"what follows {name} also reads {listed}, not h alone: cut where all paths have joined"])


def _up_to(model: nn.Module, graph: fx.Graph, h: fx.Node) -> _Half:
    trunk = fx.Graph()
    kept: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            break
        kept[node] = trunk.node_copy(node, lambda n: kept[n])
        if node is h:
            break
    trunk.output(kept[h])
    return _half(model, trunk)


def _from(model: nn.Module, graph: fx.Graph, h: fx.Node, later: list[fx.Node]) -> _Half:
    rest = fx.Graph()
    kept = {h: rest.placeholder("h")}
    wanted = set(later) | {n for node in later for n in node.all_input_nodes if n.op == "get_attr"}
    for node in graph.nodes:
        if node in wanted and node is not h:
            kept[node] = rest.node_copy(node, lambda n: kept[n])
    return _half(model, rest)


def _half(model: nn.Module, graph: fx.Graph) -> _Half:
    made = fx.GraphModule(model, graph)
    made.graph.eliminate_dead_code()
    made.recompile()
    present = dict(model.named_buffers())
    read = tuple(str(n.target) for n in made.graph.nodes if n.op == "get_attr" and n.target in present)
    return _Following(model, made, read) if read else made


class _Following(nn.Module):
    """A graph that reads the model's present buffers: by itself it keeps references to those it reads by name."""

    def __init__(self, model: nn.Module, traced: fx.GraphModule, buffers: tuple[str, ...]) -> None:
        super().__init__()
        self.traced = traced
        self._unregistered = (model, buffers)  # the model is the whole of which this is a part

    @property
    def code(self) -> str:
        """The graph's."""
        return self.traced.code

    def forward(self, *inputs: Any) -> Any:
        model, buffers = self._unregistered
        for name in buffers:
            holder, _, leaf = name.rpartition(".")
            self.traced.get_submodule(holder)._buffers[leaf] = model.get_buffer(name)
        return self.traced(*inputs)


_Half: TypeAlias = fx.GraphModule | _Following
