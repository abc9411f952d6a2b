"""Cutting modules in two without copying parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor, fx, nn

from splitfg.calling import call, eager_parts, places_of, preserved
from splitfg.errors import SplitError
from splitfg.splitting._passes import same_parameters
from splitfg.splitting._replace import submodule
from splitfg.types import Params


def graph_of(model: nn.Module) -> fx.Graph | None:
    """Trace the model in its present mode with linear layers as leaves; ``None`` if it cannot be traced."""
    try:
        return _traced(model, "", model.training)[0]
    except SplitError:
        return None


def last_linear(model: nn.Module, graph: fx.Graph | None) -> str | None:
    """Return the name of the :class:`torch.nn.Linear` called last; without a graph, of the one defined last."""
    if graph is None:
        names = list(linears(model))
    else:
        called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        names = [name for name in called if isinstance(model.get_submodule(name), nn.Linear)]
    return names[-1] if names else None


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that the model may call, by name, in the order of definition."""
    found = {}
    for name, module in model.named_modules():
        # attention reads the weight of its output projection and never calls the layer
        inside_attention = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention)
        if isinstance(module, nn.Linear) and not inside_attention:
            found[name] = module
    return found


def cut_at(model: nn.Module, name: str) -> tuple[nn.Module, nn.Module]:
    """Cut the model into the part up to the input of the named module, and the rest.

    Args:
        model: The model; it must be traceable by :mod:`torch.fx`, without control flow that depends on data.
        name: Dotted name of the first module of the second part.

    Returns:
        Two graph modules that share the model's parameters under the model's names.

    Raises:
        SplitError: If the model cannot be traced, the module is called several times, or the second part reads other
            values than h.
    """
    submodule(model, name)
    present = _halves(model, name, model.training)
    try:
        other = _halves(model, name, not model.training)
    except SplitError as error:  # matters only if the model ever changes its mode
        return _OneMode(model, present[0], error), _OneMode(model, present[1], error)
    trunks, rests = ({model.training: present[i], not model.training: other[i]} for i in (0, 1))
    return _ByMode.of(model, trunks), _ByMode.of(model, rests)


def _halves(model: nn.Module, name: str, mode: bool) -> tuple[_Half, _Half]:
    """Trace both halves in training (or evaluation) mode."""
    graph, constants = _traced(model, name, mode)
    reader = [n for n in graph.nodes if n.op == "call_module" and n.target == name]
    if len(reader) != 1 or len(reader[0].all_input_nodes) != 1:
        raise SplitError([f"{name} is called {len(reader)} times or has several inputs: cut at another module"])
    h = reader[0].all_input_nodes[0]
    later = _downstream(graph, h)
    _require_h_alone(later, h, name)
    with preserved(model):
        vars(model).update(constants)  # graph modules read them from there
        return _up_to(model, graph, h), _from(model, graph, h, later)


class _ByMode(nn.Module):
    """One traced half per mode, selected by the model's ``training`` flag, which tracing turns into a constant."""

    def __init__(self, model: nn.Module, halves: Mapping[bool, _Half]) -> None:
        super().__init__()
        self.traced = halves[True]
        # in a tuple, so that nn.Module does not register them: they hold the same parameters again
        self._unregistered = (model, halves[False], places_of(halves[False]))

    @classmethod
    def of(cls, model: nn.Module, halves: Mapping[bool, _Half]) -> nn.Module:
        """Return a single half if both modes compute the same."""
        return halves[True] if halves[True].code == halves[False].code else cls(model, halves)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        model, evaluation_half, places = self._unregistered
        if model.training:
            return self.traced(*inputs, **named)
        present = dict(self.traced.named_parameters())
        own: Params = {name: present[name] for name, _ in evaluation_half.named_parameters() if name in present}
        return call(evaluation_half, own, inputs, named, places=places)


class _OneMode(nn.Module):
    """A half of a model that can be traced in one mode only; raises :class:`SplitError` in the other mode."""

    def __init__(self, model: nn.Module, half: _Half, error: SplitError) -> None:
        super().__init__()
        self.traced = half
        self._unregistered = (model, model.training, error)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        model, mode, error = self._unregistered
        if model.training != mode:
            names = {True: "training", False: "evaluation"}
            cure = f"call .{'train' if mode else 'eval'}() on the model"
            problems = [f"in {names[not mode]} mode, {p}; or {cure}" for p in error.problems]
            raise SplitError(problems)
        return self.traced(*inputs, **named)


def is_readout(model: nn.Module, name: str, graph: fx.Graph | None, *, check: bool = True) -> bool:
    """Whether the named module is the linear layer whose output the model returns.

    Assumes so for the last linear layer, and for any one of a model that cannot be traced if the first batch validates
    it (``check``).
    """
    if not isinstance(submodule(model, name), nn.Linear):
        return False
    if name == last_linear(model, graph):
        return True
    if graph is None:
        return check
    calls = [n for n in graph.nodes if n.op == "call_module" and n.target == name]
    return len(calls) == 1 and all(user.op == "output" for user in calls[0].users)


def _traced(model: nn.Module, name: str, mode: bool) -> tuple[fx.Graph, dict[str, Tensor]]:
    """Return the graph and the constants in it, by name; the trace leaves the model as it was."""
    with preserved(model), same_parameters([model]), _through_compiled(model):
        model.train(mode)
        known = set(vars(model))
        try:
            graph = _Tracer(name).trace(model)
        except Exception as error:  # symbolic tracing raises many kinds
            cure = "build Split(trunk, head) from its parts"
            raise SplitError([f"torch.fx cannot trace the model, to cut it at {name} ({error}): {cure}"]) from error
        new = {k: v for k, v in vars(model).items() if k not in known}
        return graph, {k: v for k, v in new.items() if isinstance(v, Tensor)}


@contextmanager
def _through_compiled(model: nn.Module) -> Iterator[None]:
    """Let a trace enter modules that the user has compiled."""
    with eager_parts(model) as compiled:
        if not compiled:
            yield
            return
        from torch._dynamo import config

        with config.patch(error_on_nested_fx_trace=False):
            yield


class _Tracer(fx.Tracer):
    """Treats the named module and all linear layers as leaves, so that the cut falls in front of a module."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = module_qualified_name == self._name or isinstance(m, nn.Linear)
        return whole or super().is_leaf_module(m, module_qualified_name)


def _downstream(graph: fx.Graph, h: fx.Node) -> list[fx.Node]:
    """Return the nodes that depend on h, in order."""
    reached = {h}
    order = []
    for node in graph.nodes:
        if node is not h and any(n in reached for n in node.all_input_nodes):
            reached.add(node)
            order.append(node)
    return order


def _require_h_alone(later: list[fx.Node], h: fx.Node, name: str) -> None:
    inside = {h, *later}
    outside = {n for node in later for n in node.all_input_nodes if n not in inside and n.op != "get_attr"}
    if outside:
        listed = ", ".join(sorted(str(getattr(n.target, "__name__", n.target)) for n in outside))
        raise SplitError([f"the part after {name} also reads {listed}, not h alone: cut where all paths have joined"])


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
    """A graph that reads the model's current buffers: a traced graph keeps references to the old ones."""

    def __init__(self, model: nn.Module, traced: fx.GraphModule, buffers: tuple[str, ...]) -> None:
        super().__init__()
        self.traced = traced
        self._unregistered = (model, buffers)  # in a tuple, so that nn.Module does not register the model

    @property
    def code(self) -> str:
        """Source code of the graph."""
        return self.traced.code

    def forward(self, *inputs: Any, **named: Any) -> Any:
        model, buffers = self._unregistered
        for name in buffers:
            holder, _, leaf = name.rpartition(".")
            self.traced.get_submodule(holder)._buffers[leaf] = model.get_buffer(name)
        return self.traced(*inputs, **named)


_Half: TypeAlias = fx.GraphModule | _Following
