"""From u at h to gradients of a trunk: closed forms between layers, a route through them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError
from splitfg.feedback._route import Route
from splitfg.numerics import added
from splitfg.sites import (
    Operation,
    Tape,
    has_pull_back,
    layer_gradients,
    layer_operations,
    leaves,
    pull_back,
    rule_for,
    under,
)
from splitfg.types import Params

_SHAPES = ("detach", "zeros_like", "ones_like", "view_as", "expand_as", "type_as", "to")
"""Functions that read no more than the shape or dtype of some of their inputs."""

_PRODUCTS = (
    *("matmul", "mm", "bmm", "linear", "addmm", "einsum", "bilinear", "conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)

_CURES = {
    "conv": "use nn.Conv1d or nn.Conv2d, padded evenly by zeros",
    "conv_transpose": "use nn.Upsample and nn.Conv2d",
}
"""What to use in place of a product, by the function's name without its number of dimensions."""


@dataclass(frozen=True)
class Swept:
    """The result of a sweep.

    Attributes:
        grads: Gradients of trained parameters, by the trunk's names.
        deltas: Gradients at the outputs of layers, by the place of the call.
        kept: Gradients at the outputs of the operations that were asked for, by place.
    """

    grads: Params
    deltas: Mapping[int, Tensor]
    kept: Mapping[int, Tensor] = field(default_factory=dict)


def sweep(
    tape: Tape,
    u: Tensor,
    route: Route,
    trained: Mapping[int, str],
    keep: Collection[int] = (),
    *,
    consume: bool = False,
) -> Swept:
    """Go through a tape from h to its beginning: no reverse-mode differentiation, no weight of another layer.

    Args:
        tape: The recorded pass.
        u: dL/dh.
        route: Carries gradients from the outputs of layers to the tensors that layers read.
        trained: From ``id`` of a trained parameter to the trunk's name of it.
        keep: Places of operations, the gradients at whose outputs are returned.
        consume: Free the values of every operation as soon as its gradients are known, and return no ``deltas``. The
            tape is empty afterwards.

    Raises:
        SplitError: An operation has no closed-form pullback.
    """
    pass_on = _Pass(tape, route, trained, keep)
    pass_on.take(route.back(tape, None, u))
    pass_on.add(tape.h, u)
    for place in reversed(range(len(tape.operations))):
        pass_on.pull(place)
        if consume:
            pass_on.deltas.pop(place, None)
            tape.release(place)
    return Swept(pass_on.reached(), pass_on.deltas, pass_on.kept)


class _Pass:
    """Gradients at tensors while a sweep goes on."""

    def __init__(self, tape: Tape, route: Route, trained: Mapping[int, str], keep: Collection[int]) -> None:
        self._tape, self._route, self._trained, self._keep = tape, route, trained, keep
        self._layers = {place for place, _ in layer_operations(tape)}
        self._weights = _of_parameters_alone(tape, trained)
        self._at: dict[int, Tensor] = {}
        self._fixed: dict[int, Tensor] = {}
        self._unreached: set[str] = set()
        self.grads: Params = {}
        self.deltas: dict[int, Tensor] = {}
        self.kept: dict[int, Tensor] = {}

    def take(self, shares: Any) -> None:
        self._fixed.update(shares.fixed)
        for key, share in shares.added.items():
            self._at[key] = self._at[key] + share if key in self._at else share

    def add(self, tensor: Any, share: Tensor) -> None:
        """Add a share to the gradient at a tensor, or to that of a trained parameter; constants take none."""
        key = id(tensor)
        if key in self._trained:
            self.grads = added(self.grads, {self._trained[key]: share.to(tensor.dtype)})
        elif self._tape.is_active(tensor):
            share = share.to(tensor.dtype)
            self._at[key] = self._at[key] + share if key in self._at else share

    def reached(self) -> Params:
        """Return the gradients, without those of parameters that get a share through a layer that reads them."""
        return {name: g for name, g in self.grads.items() if name not in self._unreached}

    def pull(self, place: int) -> None:
        operation = self._tape.operations[place]
        delta = self._delta(operation.output)
        if delta is None:
            return
        if place in self._keep:
            self.kept[place] = delta
        module = operation.module
        if place in self._layers:
            self._layer(place, operation, delta)
        elif module is not None and has_pull_back(module):
            self._require_covered(operation, [operation.input])
            # a ReLU is open where its output is positive, so that its input need not be kept
            read = operation.output if type(module) is nn.ReLU else operation.input
            share, own = pull_back(module, read, delta)
            self._own(operation, own)
            self.add(operation.input, share)
        else:
            self._rule(operation, delta)

    def _layer(self, place: int, operation: Operation, delta: Tensor) -> None:
        assert operation.module is not None
        self.deltas[place] = delta
        self._require_covered(operation, [operation.input])
        if id(operation.input) in self._trained:  # noise has no place there, so its map learns nothing
            self._unreached.add(self._trained[id(operation.input)])
        if any(id(p) in self._trained for p in operation.module.parameters()):
            a = operation.input  # under autocast a layer writes a narrower dtype than it reads
            own = layer_gradients(operation.module, a, delta.to(a.dtype) if a.is_floating_point() else delta)
            self._own(operation, own)
        self.take(self._route.back(self._tape, place, delta))

    def _own(self, operation: Operation, own: Params) -> None:
        assert operation.module is not None
        held = dict(operation.module.named_parameters())
        found = Params()
        for key, name in zip(own, under(operation.name, own), strict=True):
            p = held.get(key)
            # tied weights, and those that a function reads, have another name in the trunk
            found[self._trained.get(id(p), name)] = own[key] if p is None else own[key].to(p.dtype)
        self.grads = added(self.grads, found)

    def _rule(self, operation: Operation, delta: Any) -> None:
        rule = rule_for(operation)
        weighted = operation.name in _PRODUCTS and any(id(t) in self._weights for t in _inputs(operation))
        if rule is None or weighted:
            raise SplitError([_problem(operation, weighted)])
        try:
            shares = list(rule(operation, _widened(delta, operation)))
        except NotImplementedError as error:
            raise SplitError([f"{operation} has no closed form for {error}"]) from error
        except (TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            words = f"{operation} has no closed form for these arguments ({error})"
            raise SplitError([f"{words}: pass them in the order of torch's documentation"]) from error
        if operation.name not in _SHAPES:
            self._require_covered(operation, [tensor for tensor, _ in shares])
        for tensor, share in shares:
            self.add(tensor, share)

    def _require_covered(self, operation: Operation, covered: Sequence[Any]) -> None:
        """Raise an error if a gradient would get lost at an input."""
        known = {id(tensor) for tensor in covered}
        inputs = _inputs(operation)
        active = [t for t in inputs if self._tape.is_active(t) or id(t) in self._trained]
        if any(id(t) not in known for t in active):
            raise SplitError(
                [
                    f"{operation} reads {len(active)} tensors that depend on trained parameters, and its closed form"
                    " covers fewer: detach the others, or write it with operations that have a closed form"
                ]
            )

    def _delta(self, output: Any) -> Any:
        if output is None:  # such as attention weights that were not asked for
            return None
        if isinstance(output, Tensor):
            return self._fixed.get(id(output), self._at.pop(id(output), None))
        found = [self._delta(part) for part in output]
        return None if all(part is None for part in found) else found


def _of_parameters_alone(tape: Tape, trained: Mapping[int, str]) -> set[int]:
    """Return the ``id`` of trained parameters, and of values that functions compute from these, such as Wᵀ."""
    found = set(trained)
    for operation in tape.operations:
        inputs = _inputs(operation)
        # constants may be data, such as the ids of tokens
        if operation.module is None and all(id(t) in found for t in inputs if isinstance(t, Tensor)):
            found.update(id(t) for t in leaves(operation.output))
    return found


def _inputs(operation: Operation) -> list[Any]:
    """Return everything that an operation read."""
    return leaves((operation.args, dict(operation.kwargs)))


def _widened(delta: Any, operation: Operation) -> Any:
    """Return δ in the dtype that an operation read: under autocast it writes a narrower one."""
    if not isinstance(delta, Tensor) or not delta.is_floating_point():
        return delta
    read = {t.dtype for t in _inputs(operation) if isinstance(t, Tensor) and t.is_floating_point()}
    return delta if delta.dtype in read or not read else delta.to(max(read, key=lambda dtype: dtype.itemsize))


def _problem(operation: Operation, weighted: bool) -> str:
    if weighted or operation.name in _PRODUCTS:
        cure = _CURES.get(operation.name.rstrip("123d"), "use nn.Linear or nn.Conv2d")
        return (
            f"{operation} multiplies by a parameter outside a layer, whose feedback cannot be learned: {cure}, or a"
            " module with layer_gradients(a, delta)"
        )
    return (
        f"{operation} has no closed-form pullback: add one with splitfg.sites.register_rule({operation.name!r}, ...),"
        " or write it with operations that have one"
    )
