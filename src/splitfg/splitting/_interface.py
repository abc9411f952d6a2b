"""How a model takes a batch and returns its outputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from splitfg.errors import SplitError
from splitfg.types import Inputs, Target

LABELS = "labels"
"""Key of the target in a batch that is a dict."""


def arguments(x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs as positional and keyword arguments of a call."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return (x if isinstance(x, tuple) else (x,)), {}


def form_of(x: Inputs) -> Hashable:
    """Return which arguments a batch has: its structure, and the type of every value, or the value of a flag."""
    leaves, structure = pytree.tree_flatten(x)
    return str(structure), tuple(leaf if isinstance(leaf, bool) else type(leaf).__name__ for leaf in leaves)


def without_labels(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Target]:
    """Return the inputs and the labels of a batch, as they are."""
    return {name: value for name, value in batch.items() if name != LABELS}, batch[LABELS]


@dataclass(frozen=True)
class Interface:
    """How a model takes a batch and returns its outputs.

    Attributes:
        output: From the model's return value to its outputs; ``None`` if it returns them alone.
        constants: Keyword arguments of every call.
        unpack: From a batch with labels to inputs and target.
        own_loss: Whether the model itself computes the loss of a batch with labels, which is to be the split's.
    """

    output: Callable[[Any], Tensor] | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    unpack: Callable[[Mapping[str, Any]], tuple[dict[str, Any], Target]] = without_labels
    own_loss: bool = False

    def outputs(self, returned: Any) -> Any:
        """Return the outputs in the model's return value."""
        return returned if self.output is None else self.output(returned)

    def named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a call."""
        return {**self.constants, **given}

    def unpacked(self, x: Inputs, y: Target | None) -> tuple[Inputs, Target]:
        """Return inputs and target; without a target, those of a batch with labels.

        Raises:
            SplitError: If there is neither a target nor a batch with labels.
        """
        if y is not None:
            return x, y
        if not isinstance(x, Mapping) or LABELS not in x:
            raise SplitError([f"there is no target: pass it as y, or pass a dict with the key {LABELS!r}"])
        return self.unpack(x)

    def inputs(self, x: Inputs) -> Inputs:
        """Return inputs without labels."""
        return self.unpack(x)[0] if isinstance(x, Mapping) and LABELS in x else x
