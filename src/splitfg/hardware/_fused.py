"""Functions between layers as one operation: a device reads the end of a chain, and the gradient computes the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from splitfg.feedback import Relay, sweep
from splitfg.hardware._wiring import Node, Ref
from splitfg.sites import Operation, Tape
from splitfg.types import Params


class Fused(nn.Module):
    """A chain of functions y = f(x) of one tensor, whose inner tensors are not kept.

    The pullback computes them again from x and carries u through their closed forms: a tape holds x and y alone.

    Args:
        nodes: The functions in order; all tensors that they read are x, or written by one of them.
        trained: From ``id`` of a trained parameter to its name.
    """

    def __init__(self, nodes: Sequence[Node], trained: Mapping[int, str]) -> None:
        super().__init__()
        self._nodes, self._trained = tuple(nodes), trained
        self._source = next(name for node in nodes for name in node.reads())
        self._held = nn.ParameterList([p for node in nodes for p in node.parameters()])

    def forward(self, x: Tensor) -> Tensor:
        """Compute y."""
        y: Tensor = self._operations(x)[-1].output
        return y

    def pull_back(self, x: Tensor, u: Tensor) -> tuple[Tensor, Params]:
        """Return dL/dx, and the gradients of the parameters of all functions, by the trunk's names."""
        tape = Tape()
        # the copy of a constant stands for whatever wrote x, so that x counts as active
        tape.add(Operation("clone", None, (torch.empty_like(x),), {}, x))
        for operation in self._operations(x):
            tape.add(operation)
        tape.h = tape.operations[-1].output
        swept = sweep(tape, u, _NO_MAPS, self._trained, keep=(0,))
        return swept.kept[0], swept.grads

    def _operations(self, x: Tensor) -> list[Operation]:
        values, found = {self._source: x}, []
        for node in self._nodes:
            found.append(node.operation(values, None, None))
            values[node.writes] = found[-1].output
        return found


_NO_MAPS = Relay()


def fuse(nodes: Sequence[Node], trained: Mapping[int, str]) -> list[Node]:
    """Return the nodes of a tape with chains of functions as single nodes, which the device reads.

    A chain begins at a tensor x. It holds functions that read x and each other alone, up to the last one such that no
    other node reads a tensor inside the chain.

    Args:
        nodes: In order.
        trained: From ``id`` of a trained parameter to its name.
    """
    readers: dict[str, set[int]] = {}
    for place, node in enumerate(nodes):
        for name in node.reads():
            readers.setdefault(name, set()).add(place)
    found: list[Node] = []
    taken: set[int] = set()
    for place, node in enumerate(nodes):
        if place in taken:
            continue
        chain = _chain(nodes, place, readers) if _is_function(node) else [place]
        taken.update(chain)
        found.append(node if len(chain) == 1 else _joined([nodes[i] for i in chain], trained))
    return found


def _chain(nodes: Sequence[Node], start: int, readers: Mapping[str, set[int]]) -> list[int]:
    """Return the places of the longest chain that begins with a node; that place alone if there is none."""
    reads = set(nodes[start].reads())
    known, reached = set(reads), list[int]()
    for place in range(start, len(nodes)):
        if _is_function(nodes[place]) and known.issuperset(nodes[place].reads()):
            known.add(nodes[place].writes)
            reached.append(place)
    for end in range(len(reached) if len(reads) == 1 else 0, 1, -1):
        inside = set(reached[:end])
        if not nodes[reached[end - 1]].hidden and all(
            readers.get(nodes[i].writes, {-1}) <= inside for i in reached[: end - 1]
        ):
            return reached[:end]
    return [start]


def _is_function(node: Node) -> bool:
    return not node.measured and node.call is not None


def _joined(nodes: Sequence[Node], trained: Mapping[int, str]) -> Node:
    last = nodes[-1]
    fused = Fused(nodes, trained)
    source = Ref(next(nodes[0].reads()))
    return replace(last, name="", call=fused, args=(source,), settings={}, measured=True)
