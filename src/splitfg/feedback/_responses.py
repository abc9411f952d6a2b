"""How a pass responds to noise, computed where it is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from splitfg.errors import SplitError
from splitfg.sites import Operation, Tape

Noise: TypeAlias = Mapping[int, Tensor]
"""Noise for the outputs of operations, by their place on the tape; broadcast to the output."""


class Response(ABC):
    """The change of a pass, per unit of noise, computed where it is asked for."""

    white: ClassVar[bool] = False
    """Whether the inputs of layers move by white noise, rather than by noise that has passed other layers."""

    @abstractmethod
    def input(self, place: int) -> Tensor | None:
        """Return the change of the first argument of an operation; ``None`` if that is not a float tensor."""

    @abstractmethod
    def output(self, place: int) -> Tensor | None:
        """Return the change of its output; ``None`` for an operation with several."""

    @abstractmethod
    def h(self) -> Tensor:
        """Return the change of h."""

    def layer(self, place: int, noise: Noise, samples: int) -> tuple[Tensor, Tensor] | None:
        """Return how a layer's input and output moved, on some samples; ``None`` if its input is no float tensor.

        Args:
            place: Of the layer's call.
            noise: The noise; that at the layer's own output is not its response.
            samples: How many samples suffice.
        """
        da, dz = self.input(place), self.output(place)
        if da is None or dz is None:
            return None
        dz = dz - noise[place] if place in noise else dz
        return (da[:samples], dz[:samples]) if da.shape[0] == dz.shape[0] else (da, dz)

    def layers(self, samples: Mapping[int, int], noise: Noise) -> Mapping[int, tuple[Tensor, Tensor]]:
        """Return how the inputs and outputs of layers moved, by their places; see :meth:`layer`."""
        found = {place: self.layer(place, noise, count) for place, count in samples.items()}
        return {place: moved for place, moved in found.items() if moved is not None}


@dataclass(frozen=True)
class Differences(Response):
    """Differences of two passes."""

    above: Tape
    below: Tape
    width: Tensor

    def input(self, place: int) -> Tensor | None:
        above, below = (first_argument(tape.operations[place]) for tape in (self.above, self.below))
        return _difference(above, below, self.width)

    def output(self, place: int) -> Tensor | None:
        above, below = self.above.operations[place].output, self.below.operations[place].output
        return _difference(above, below, self.width)

    def h(self) -> Tensor:
        return (self.above.h - self.below.h) / self.width


@dataclass(frozen=True)
class Tangents(Response):
    """Tangents of one pass, by what they belong to."""

    found: Mapping[str, Tensor]

    def input(self, place: int) -> Tensor | None:
        return self.found.get(f"in {place}")

    def output(self, place: int) -> Tensor | None:
        return self.found.get(f"out {place}")

    def h(self) -> Tensor:
        return self.found["h"]


@dataclass(frozen=True)
class LayersAlone(Response):
    """Differences of single layers, from what they read and wrote in a recorded pass."""

    white: ClassVar[bool] = True

    tape: Tape
    width: Tensor

    def input(self, place: int) -> Tensor | None:  # noqa: ARG002
        raise SplitError([self._words])

    output = input

    def h(self) -> Tensor:
        raise SplitError([self._words])

    @property
    def _words(self) -> str:
        return "LayerDifference runs layers alone, so that nothing reaches h: use Difference() with this route"

    def layer(self, place: int, noise: Noise, samples: int) -> tuple[Tensor, Tensor] | None:
        return self.layers({place: samples}, noise).get(place)

    def layers(self, samples: Mapping[int, int], noise: Noise) -> Mapping[int, tuple[Tensor, Tensor]]:
        drawn = {place: self._noise(place, count, noise) for place, count in samples.items()}
        e = {place: n for place, n in drawn.items() if n is not None}
        operations = {place: self.tape.operations[place] for place in e}
        given = {place: torch.add(operations[place].input[: len(n)], self.width * n) for place, n in e.items()}
        written = _run_alone(operations, given) if self.tape.alone is None else self.tape.alone(given)
        moved = {place: (z - operations[place].output[: len(z)]) / self.width for place, z in written.items()}
        return {place: (e[place], dz) for place, dz in moved.items()}

    def _noise(self, place: int, samples: int, noise: Noise) -> Tensor | None:
        """Return the noise at what a layer reads, for as many samples as were drawn; ``None`` if there is none."""
        a = first_argument(self.tape.operations[place])
        source = next((i for i in noise if self.tape.operations[i].output is a), None)
        if a is None or source is None:
            return None
        drawn = noise[source]
        return drawn.expand(len(drawn), *a.shape[1:])[:samples]


def _run_alone(operations: Mapping[int, Operation], given: Mapping[int, Tensor]) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    for place, a in given.items():
        if operations[place].module is None:
            raise SplitError([f"{operations[place]} is no module that runs alone: use Difference()"])
        found[place] = operations[place].run(a)
    return found


def first_argument(operation: Operation) -> Tensor | None:
    """Return the first argument of an operation, given by position or by name; ``None`` if it is no tensor."""
    value = operation.args[0] if operation.args else next(iter(operation.kwargs.values()), None)
    return value if isinstance(value, Tensor) else None


def _difference(above: Any, below: Any, width: Tensor) -> Tensor | None:
    if not isinstance(above, Tensor) or not above.is_floating_point():
        return None
    moved: Tensor = (above - below) / width
    return moved
