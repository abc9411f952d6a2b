"""The wiring of a device: its layers, their inputs and outputs, and the functions between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError, raise_if
from splitfg.sites import Operation, has_layer_gradients, has_pull_back


@dataclass(frozen=True)
class Ref:
    """A tensor of a device, by name."""

    name: str


@dataclass(frozen=True, eq=False)
class Node:
    """One operation of a device.

    Attributes:
        name: Name of the layer, or the torch name of the function (``relu``, ``add``), which has the closed form.
        call: Computes the output from the arguments; ``None`` if only the device can.
        args: Arguments: :class:`Ref` for tensors of the device, parameters, constants; lists of them too.
        writes: Name of the output.
        settings: Keyword arguments.
        measured: Whether the output is read from the device; otherwise ``call`` computes it from the arguments.
        add_at: Tensor at which the device adds numbers meant for the output; ``None`` for the output itself. A node
            that rounds names its input: a device that stores integers cannot add behind it.
        hidden: Whether the device has no such tensor, as inside an operation that takes several functions to write.
    """

    name: str
    call: nn.Module | Callable[..., Any] | None
    args: tuple[Any, ...]
    writes: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    measured: bool = False
    add_at: str | None = None
    hidden: bool = False

    @property
    def module(self) -> nn.Module | None:
        """The layer; ``None`` for a function."""
        return self.call if isinstance(self.call, nn.Module) else None

    def reads(self) -> Iterator[str]:
        """Yield the names of the tensors that it reads."""
        for arg in self.args:
            yield from (r.name for r in (arg if isinstance(arg, list) else [arg]) if isinstance(r, Ref))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield its parameters."""
        if self.module is not None:
            yield from self.module.parameters()
        yield from (arg for arg in self.args if isinstance(arg, nn.Parameter))

    def operation(self, values: Mapping[str, Tensor], output: Tensor | None, add: Tensor | None) -> Operation:
        """Return the operation of one pass.

        Args:
            values: Tensors of the device by name.
            output: The reading; ``None`` to compute the output.
            add: Added to a computed output.
        """
        args = tuple(
            [_value(a, values) for a in arg] if isinstance(arg, list) else _value(arg, values) for arg in self.args
        )
        if output is None:
            assert self.call is not None
            output = self.call(*args, **self.settings)
            output = output if add is None else output + add
        return Operation(self.name, self.module, args, self.settings, output)


def layer(name: str, module: nn.Module, *, reads: str, writes: str) -> Node:
    """Return the node of a layer whose output the device measures.

    Args:
        name: Names the layer; its parameters are ``name.weight`` and ``name.bias``.
        module: ``nn.Linear`` or ``nn.Conv2d``: its shapes and initial weights; it computes nothing. On the ``meta``
            device for a layer that is not trained.
        reads: Name of its input.
        writes: Name of its output.

    Example:
        >>> from torch import nn
        >>> from splitfg.hardware import layer
        >>> layer("hidden", nn.Linear(4, 8), reads="x", writes="z").writes
        'z'
    """
    return Node(name, module, (Ref(reads),), writes, measured=True)


def function(call: Callable[..., Any], *args: Any, writes: str, name: str | None = None, **settings: Any) -> Node:
    """Return the node of a function with a closed-form pullback; strings among ``args`` are names of tensors.

    Args:
        call: A torch function or a module such as ``nn.LayerNorm``; splitfg computes it from readings.
        args: Its arguments.
        writes: Name of its output.
        name: Name of its rule, if the function's own name is another; for a module, the prefix of its parameters.
        settings: Keyword arguments.

    Example:
        >>> import torch
        >>> from splitfg.hardware import function
        >>> function(torch.relu, "z", writes="a").name
        'relu'
    """
    named = name if name is not None else getattr(call, "__name__", type(call).__name__)
    refs = tuple(
        [Ref(a) if isinstance(a, str) else a for a in arg]
        if isinstance(arg, list)
        else (Ref(arg) if isinstance(arg, str) else arg)
        for arg in args
    )
    return Node(named, call, refs, writes, settings)


@dataclass(frozen=True, eq=False)
class Wiring:
    """Operations of a device in the order in which it runs them.

    Attributes:
        nodes: The operations.
        inputs: Names of the inputs.
        h: Name of the output.

    Example:
        >>> from torch import nn
        >>> from splitfg.hardware import Wiring
        >>> wiring = Wiring.of(nn.Sequential(nn.Linear(4, 8), nn.Tanh()))
        >>> [node.writes for node in wiring.nodes]
        ['0', '1']
    """

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    h: str

    def __post_init__(self) -> None:
        known, found = set(self.inputs), []
        for node in self.nodes:
            missing = [name for name in node.reads() if name not in known]
            found += [f"{node.name} reads {name!r} before a node writes it: order the nodes" for name in missing]
            if node.writes in known:
                found.append(f"{node.name} writes {node.writes!r}, which exists: give every tensor its own name")
            known.add(node.writes)
        raise_if(found if self.h in known else [*found, f"no node writes h ({self.h!r}): name an existing tensor"])

    @classmethod
    def of(cls, plan: nn.Sequential) -> Wiring:
        """Return the wiring of a device that holds the layers of ``plan`` one after another.

        The input is ``"x"``; every other tensor has the name of the module that writes it.
        """
        if not isinstance(plan, nn.Sequential) or not len(plan):
            raise SplitError(["the plan must be an nn.Sequential with at least one module: else list nodes yourself"])
        nodes, reads = [], "x"
        for name, module in plan.named_children():
            measured = has_layer_gradients(module) and not has_pull_back(module)
            nodes.append(Node(name, module, (Ref(reads),), name, measured=measured))
            reads = name
        return cls(tuple(nodes), ("x",), reads)

    def active(self, trained: Collection[int]) -> list[Node]:
        """Return the nodes that depend on a trained parameter; ``trained`` holds their ``id``."""
        found: list[Node] = []
        names: set[str] = set()
        for node in self.nodes:
            if any(id(p) in trained for p in node.parameters()) or any(name in names for name in node.reads()):
                found.append(node)
                names.add(node.writes)
        return found

    def readings(self, nodes: Sequence[Node]) -> list[str]:
        """Return the names to read for a tape of these nodes: measured outputs, and values from other nodes."""
        written = {node.writes for node in nodes}
        outer = [name for node in nodes for name in node.reads() if name not in written]
        measured = [node.writes for node in nodes if node.measured]
        h = [] if self.h in written else [self.h]
        return list(dict.fromkeys([*(n for n in outer if n not in self.inputs), *measured, *h]))

    def compute(
        self, inputs: Sequence[Tensor], add: Mapping[str, Tensor], alter: Callable[[Node, Tensor], Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Compute every tensor in torch, for simulators and references.

        Args:
            inputs: One batch.
            add: Added to tensors, by name.
            alter: Replaces the output of a node, before the addition.

        Raises:
            SplitError: A node has no torch function.
        """
        values = dict(zip(self.inputs, inputs, strict=True))
        for node in self.nodes:
            if node.call is None:
                raise SplitError([f"{node.name} has no torch function: only the device can compute {node.writes}"])
            out: Tensor = node.operation(values, None, None).output
            out = out if alter is None else alter(node, out)
            values[node.writes] = out + add[node.writes] if node.writes in add else out
        return values


def _value(arg: Any, values: Mapping[str, Tensor]) -> Any:
    return values[arg.name] if isinstance(arg, Ref) else arg


def zero() -> Tensor:
    """Return the scalar that stands for an output when amounts to add are asked for."""
    return torch.zeros(())
