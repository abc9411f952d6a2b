"""Validation of a cut: trunk and head together must compute the model's outputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from splitfg.calling import eager_parts, preserved
from splitfg.heads import Head, LinearHead
from splitfg.splitting._cut import linears
from splitfg.splitting._interface import Interface, arguments, without_labels
from splitfg.types import Inputs

Made: TypeAlias = Sequence[tuple[str, torch.Size, "weakref.ref[Tensor]"]]
"""Outputs of linear layers, by name and shape, in the order of their calls; weak, so that memory is free as usual."""


def disagreement(
    model: nn.Module, head: Head, predict: Callable[[Inputs], Tensor], x: Inputs, interface: Interface
) -> str | None:
    """Explain why trunk and head do not compute the model's outputs.

    Args:
        model: The model that was cut.
        head: The part after the cut.
        predict: Computes the head's outputs for given inputs.
        x: Inputs.
        interface: How the model takes a batch and returns its outputs.

    Returns:
        A problem with its cure, or ``None`` if trunk and head compute the model's outputs.
    """
    with preserved(model):  # both passes start from the same state
        returned, made = _returned_and_made(model, x, interface)
    if not isinstance(returned, Tensor):
        return (
            f"the model returns a {type(returned).__name__}, not its outputs alone: name them with"
            f" split(model, output=lambda returned: ...), such as {_example_of(returned)}"
        )
    readout = _readout_name(model, head)
    if not _same(returned, predict, x) or (isinstance(head, LinearHead) and not _made_by(readout, returned, made)):
        return _what_differs(readout, returned, made, traced=interface.unpack is without_labels)
    return None if returned.ndim > 1 else _squeezed(returned)


def _example_of(returned: Any) -> str:
    """Return code that reads one entry of a model's return value."""
    if isinstance(returned, Mapping) and returned:
        return " or ".join(f"returned[{key!r}]" for key in list(returned)[:3])
    return "returned[0]" if isinstance(returned, tuple | list) else "returned.logits"


def _returned_and_made(model: nn.Module, x: Inputs, interface: Interface) -> tuple[Any, Made]:
    """Run the model, and record the outputs of its linear layers."""
    made: list[tuple[str, torch.Size, weakref.ref[Tensor]]] = []

    def keep(name: str, output: Any) -> None:
        if isinstance(output, Tensor):  # a subclass may return more, as a router does
            made.append((name, output.shape, weakref.ref(output)))

    handles = [
        layer.register_forward_hook(lambda *call, name=name: keep(name, call[-1]))
        for name, layer in linears(model).items()
    ]
    try:
        with torch.no_grad(), eager_parts(model):
            inputs, named = arguments(x)
            return interface.outputs(model(*inputs, **interface.named(named))), made
    finally:
        for handle in handles:
            handle.remove()


def _readout_name(model: nn.Module, head: Head) -> str | None:
    """Return the model's name for a linear head's last layer."""
    layers = head.layers[-1:] if isinstance(head, LinearHead) else ()
    return next((name for name, module in model.named_modules() if module in layers), None)


def _same(returned: Tensor, predict: Callable[[Inputs], Tensor], x: Inputs) -> bool:
    try:
        ours = predict(x)
    except Exception:  # trunk and head do not fit each other
        return False
    return returned.shape == ours.shape and torch.allclose(returned, ours, rtol=1e-3, atol=1e-4, equal_nan=True)


def _made_by(name: str | None, returned: Tensor, made: Made) -> bool:
    """Whether the named layer was called once and returned the model's very output: equal values may be chance.

    A model may select some of the layer's rows, or cast them.
    """
    own = [(shape, output) for other, shape, output in made if other == name]
    return len(own) == 1 and (own[0][1]() is returned or own[0][0] != returned.shape)


def _what_differs(readout: str | None, returned: Tensor, made: Made, *, traced: bool) -> str:
    makers = [name for name, _, output in made if output() is returned and name != readout]
    if readout and makers:
        return (
            f"the model's outputs come from {makers[0]}, not from {readout}: cut there with at={makers[0]!r}, or build"
            " Split(trunk, head) yourself"
        )
    if any(name == readout and shape == (*returned.shape, 1) for name, shape, _ in made):
        return _squeezed(returned)
    # models of transformers are cut without a trace of the operations after the layer
    rest = "include the following operations in the head with head=ReverseModeHead, " if traced and readout else ""
    holder = (readout or "").rpartition(".")[0]
    place = f"at={holder!r}, the module that holds the layer" if holder else "at=..."
    return (
        f"trunk and head{f', cut at {readout},' if readout else ''} do not compute the model's outputs: another"
        " operation follows the last linear layer, or the model calls it several times. Return that layer's output"
        f" (CrossEntropy() takes logits, not probabilities), {rest}cut at another module with {place}, or build"
        " Split(trunk, head) yourself"
    )


def _squeezed(returned: Tensor) -> str:
    shape = tuple(returned.shape)
    return (
        f"the model returns outputs of shape {shape}, without an output dimension: return {(*shape, 1)}, without"
        " squeeze, and pass targets of that shape"
    )
