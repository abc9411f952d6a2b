"""Responses of a pass to noise, computed on demand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from splitfg.errors import SplitError
from splitfg.sites import Operation, Tape, is_linear

Noise: TypeAlias = Mapping[int, Tensor]
"""Noise for the outputs of operations, by their place on the tape; broadcast to the output."""


class NoiseInTurn(Mapping[int, Tensor]):
    """White noise that is drawn where it is asked for, always in the order of places, and can be forgotten.

    Equal to noise that is drawn for all places at once, also in the state of the generator once all of it is drawn.

    Args:
        like: Tensors of the shapes, dtypes and devices of the noise, by place.
        generator: Source of the noise.
    """

    def __init__(self, like: Mapping[int, Tensor], generator: torch.Generator) -> None:
        self._like, self._generator = like, generator
        self._ahead = iter(like)
        self._drawn: dict[int, Tensor] = {}

    def __getitem__(self, place: int) -> Tensor:
        if place not in self._like:
            raise KeyError(place)
        while place not in self._drawn:
            self._draw(next(self._ahead))
        return self._drawn[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)

    def forget(self, place: int) -> None:
        """Free the noise of a place; it cannot be read again."""
        self._drawn.pop(place, None)

    def draw_rest(self) -> None:
        """Move the generator on as if all noise had been drawn."""
        for place in self._ahead:
            self._draw(place)
            self.forget(place)

    def _draw(self, place: int) -> None:
        self._drawn[place] = white_noise(self._like[place], self._generator)


def white_noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw standard normal noise of a tensor's shape, dtype and device."""
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)


class Response(ABC):
    """The change of a pass per unit of noise, computed on demand."""

    white: ClassVar[bool] = False
    """Whether the inputs of layers move by white noise, rather than by noise that has passed other layers."""

    fresh: ClassVar[bool] = False
    """Whether the changes of outputs that :meth:`layer` returns are new tensors, which may be written over."""

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

    def layers(self, samples: Mapping[int, int], noise: Noise) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Yield the places of layers and how their inputs and outputs moved, one after the other; see :meth:`layer`."""
        for place, count in samples.items():
            moved = self.layer(place, noise, count)
            if moved is not None:
                yield place, moved


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
    """Tangents of one pass, by their layers."""

    found: Mapping[str, Tensor]

    def input(self, place: int) -> Tensor | None:
        return self.found.get(f"in {place}")

    def output(self, place: int) -> Tensor | None:
        return self.found.get(f"out {place}")

    def h(self) -> Tensor:
        return self.found["h"]


@dataclass(frozen=True)
class LayersAlone(Response):
    """Differences of single layers, from their inputs and outputs in a recorded pass.

    A linear layer responds to noise in the same way at every input, so it runs on the noise itself and on one sample of
    zeros: (W e + b) - b. What it read and wrote in the pass is not needed.
    """

    white: ClassVar[bool] = True
    fresh: ClassVar[bool] = True

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
        e, operation = self._noise(place, samples, noise), self.tape.operations[place]
        if e is None:
            return None
        if operation.module is None:
            raise SplitError([f"{operation} is no module that runs alone: use Difference()"])
        if is_linear(operation.module):
            z = operation.run(e)
            return e, z if operation.module.bias is None else z.sub_(operation.run(torch.zeros_like(e[:1])))
        return e, self._difference(place, operation.run(self._moved(place, e)))

    def layers(self, samples: Mapping[int, int], noise: Noise) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        if self.tape.alone is None:
            yield from self._one_by_one(samples, noise)
            return
        drawn = {place: self._noise(place, count, noise) for place, count in samples.items()}
        e = {place: n for place, n in drawn.items() if n is not None}
        for place, z in self.tape.alone({place: self._moved(place, n) for place, n in e.items()}).items():
            yield place, (e[place], self._difference(place, z))

    def _one_by_one(self, samples: Mapping[int, int], noise: Noise) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Run every layer where its response is asked for, and free noise that no later layer reads."""
        last = {self._source(place, noise): place for place in samples}
        for place, count in samples.items():
            moved = self.layer(place, noise, count)
            if moved is None:
                continue
            source = self._source(place, noise)
            if isinstance(noise, NoiseInTurn) and source is not None and last[source] == place:
                noise.forget(source)
            yield place, moved
            del moved  # before the next layer runs
        if isinstance(noise, NoiseInTurn):
            noise.draw_rest()

    def _source(self, place: int, noise: Noise) -> int | None:
        """Return the place whose output a layer reads, if there is noise for it."""
        a = first_argument(self.tape.operations[place])
        return None if a is None else next((i for i in noise if self.tape.operations[i].output is a), None)

    def _moved(self, place: int, e: Tensor) -> Tensor:
        return torch.add(self.tape.operations[place].input[: len(e)], self.width * e)

    def _difference(self, place: int, z: Tensor) -> Tensor:
        dz: Tensor = (z - self.tape.operations[place].output[: len(z)]) / self.width
        return dz

    def _noise(self, place: int, samples: int, noise: Noise) -> Tensor | None:
        """Return the noise at a layer's input, for as many samples as were drawn; ``None`` if there is none."""
        source = self._source(place, noise)
        if source is None:
            return None
        drawn = noise[source]
        return drawn.expand(len(drawn), *self.tape.operations[place].input.shape[1:])[:samples]


def first_argument(operation: Operation) -> Tensor | None:
    """Return the first argument of an operation, given by position or by name; ``None`` if it is no tensor."""
    value = operation.args[0] if operation.args else next(iter(operation.kwargs.values()), None)
    return value if isinstance(value, Tensor) else None


def _difference(above: Any, below: Any, width: Tensor) -> Tensor | None:
    if not isinstance(above, Tensor) or not above.is_floating_point():
        return None
    moved: Tensor = (above - below) / width
    return moved
