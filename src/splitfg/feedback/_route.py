"""The base class of routes by which u reaches the layers of a trunk."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from splitfg.errors import SplitError
from splitfg.feedback._every_nth import EveryNth
from splitfg.feedback._map_rules import DeltaRule, MapRule, Proximal
from splitfg.feedback._responses import Noise, Response
from splitfg.numerics import widened
from splitfg.sites import Tape, layer_operations
from splitfg.types import Params

_PATIENCE = 20
"""Measurements in a row that may be left unused before a warning."""


@dataclass(frozen=True)
class Shares:
    """Gradients at tensors, by their ``id``.

    Attributes:
        added: Shares that are added to those of other operations.
        fixed: Whole gradients, which replace the shares of all other operations.
    """

    added: Mapping[int, Tensor] = field(default_factory=dict)
    fixed: Mapping[int, Tensor] = field(default_factory=dict)


class Route(EveryNth, ABC):
    """Maps that carry a gradient to the inputs of layers, and the rule by which they learn.

    Args:
        rule: How the maps learn; ``None`` for ``DeltaRule(1.0)`` where layers read white noise, which is the cheapest,
            and ``Proximal()`` elsewhere.
        every: Measure at every n-th step only; between measurements the maps stay as they are.
    """

    by_layer: ClassVar[bool] = False
    """Whether the maps learn from the responses of single layers, so that these may run alone."""

    lean: ClassVar[bool] = False
    """Whether ``back`` reads no value of a tape, and ``change`` no more than the inputs of layers."""

    def __init__(self, rule: MapRule | None = None, *, every: int = 1) -> None:
        self.rule = rule
        self.every = every
        self._maps: Params = {}
        self._unused = 0  # measurements, until the first one is applied

    def __repr__(self) -> str:
        settings = [repr(self.rule)] * (self.rule is not None) + [f"every={self.every}"] * (self.every > 1)
        return f"{type(self).__name__}({', '.join(settings)})"

    @property
    def due(self) -> bool:
        """Whether the present step takes a measurement; of maps that do not learn, only the first step does."""
        fixed = self.rule is not None and not self.rule.learns
        return super().due and not (fixed and self._maps)

    @abstractmethod
    def samples(self, tape: Tape) -> int | None:
        """Return how many samples of a batch a measurement needs; ``None`` for all of them."""

    @abstractmethod
    def noise(self, tape: Tape, generator: torch.Generator, *, alone: bool = False) -> Noise:
        """Draw the noise of one measurement.

        Args:
            tape: The recorded pass.
            generator: Source of the noise.
            alone: Whether layers run by themselves: noise is needed only for the samples that each of them takes.
        """

    @abstractmethod
    def change(self, tape: Tape, noise: Noise, response: Response) -> Params:
        """Return the change of the maps that a measurement asks for."""

    @abstractmethod
    def back(self, tape: Tape, place: int | None, delta: Tensor) -> Shares:
        """Carry δ on.

        Args:
            tape: The recorded pass.
            place: Of the layer at whose output δ is the gradient; ``None`` for h.
            delta: δ.
        """

    def count_measurement(self) -> None:
        """Count a measurement; warns if none of the first ``_PATIENCE`` has changed the maps."""
        self._unused += not self._maps
        if self._unused == _PATIENCE:
            warnings.warn(
                f"{_PATIENCE} estimates and the maps are still as they began, so that the layers below the last one do"
                " not learn: call estimator.update_state(network, estimate) after every estimate, or use"
                " GradientLearner, which does",
                stacklevel=5,
            )

    def apply(self, change: Mapping[str, Tensor]) -> None:
        """Add a change in place: captured steps replay on the same memory."""
        for name, step in change.items():
            if name in self._maps:
                self._maps[name].add_(step)
            else:
                self._maps[name] = self._initial(name, step) + step

    @property
    def maps(self) -> Mapping[str, Tensor]:
        """The maps that have been made so far, by name."""
        return self._maps

    def state_dict(self) -> dict[str, Tensor]:
        """Return the maps, and the number of steps if only some are measured."""
        return {**self._maps, **self._step_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the maps from :meth:`state_dict`."""
        self._maps = {name: m.clone() for name, m in self._take_steps(state).items()}

    def to(self, device: torch.device) -> None:
        """Move the maps to a device: a checkpoint is read to the CPU. Maps that are there stay in their memory."""
        self._maps.update({name: m.to(device) for name, m in self._maps.items() if m.device != device})

    def _initial(self, name: str, like: Tensor) -> Tensor:
        groups, outputs, inputs = like.shape
        return (self.rule or Proximal()).initial(name, groups, outputs, inputs, like)

    def _rule(self, response: Response) -> MapRule:
        return self.rule or (DeltaRule(1.0) if response.white else Proximal())

    def _map(self, name: str, shape: tuple[int, int, int], like: Tensor) -> Tensor:
        known = self._maps.get(name)
        if known is None:
            return self._initial(name, widened(like).new_empty(()).expand(shape))
        wanted = widened(like)
        if (known.device, known.dtype) != (wanted.device, wanted.dtype):  # a checkpoint is read to the CPU
            known = self._maps[name] = known.to(wanted)
        if tuple(known.shape) != shape:
            raise SplitError([f"the map of {name} is {tuple(known.shape)}, the layer needs {shape}: use a new route"])
        return known


def read_places(tape: Tape) -> list[int]:
    """Return the places of the operations whose outputs are read by layers; each once.

    A layer that reads no rows, such as an expert without a token, has nothing to learn from this batch.
    """
    read = {id(o.input) for _, o in layer_operations(tape) if tape.is_active(o.input) and o.input.numel()}
    return [i for i, o in enumerate(tape.operations) if id(o.output) in read]
