"""A bounded store of (feature, target) pairs of distinct examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class Memory:
    """At most ``capacity`` pairs: a uniform sample of the distinct examples that were ever added.

    An example is known by its fingerprint, a 64-bit hash (:func:`fingerprint`). The ``capacity`` largest
    fingerprints stay, so that neither the order of examples nor how often they come again matters, and a pair
    that is held out of the store for a test has no twin in it.

    Args:
        capacity: The most pairs to keep.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self._keys = self._values = self._marks = torch.empty(0)

    @property
    def keys(self) -> Tensor:
        """Stored features, shape ``(count, d)``."""
        return self._keys[: self.count]

    @property
    def values(self) -> Tensor:
        """Stored targets, shape ``(count, ...)``."""
        return self._values[: self.count]

    def add(self, keys: Tensor, values: Tensor, marks: Tensor) -> None:
        """Store the pairs of a batch that are new, and forget others where there is no room.

        Args:
            keys: Features, shape ``(B, d)``.
            values: Targets, shape ``(B, ...)``.
            marks: Fingerprints, shape ``(B,)``, int64.
        """
        if self.count == 0:
            self._reserve(keys, values)
        new = _first_of_each(marks, self._marks[: self.count])
        free = new[: self.capacity - self.count]
        slots = torch.arange(self.count, self.count + len(free), device=keys.device)
        self._put(slots, keys[free], values[free], marks[free])
        self.count += len(free)
        rest = new[len(free) :]
        if len(rest):
            self._compete(keys[rest], values[rest], marks[rest])

    def to(self, device: torch.device) -> None:
        """Move everything that is stored."""
        if self._keys.device != device:
            self._keys, self._values = self._keys.to(device), self._values.to(device)
            self._marks = self._marks.to(device)

    def blocks(self, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values, ``rows`` at a time."""
        yield from zip(self.keys.split(rows), self.values.split(rows), strict=True)

    def first(self, pairs: int) -> Memory:
        """A copy of at most this many pairs."""
        return self._subset(torch.arange(min(pairs, self.count), device=self._keys.device))

    def divide(self, queries: int, generator: torch.Generator) -> tuple[Memory, Memory]:
        """``queries`` random pairs as one memory and all others as another, for choosing settings."""
        order = torch.randperm(self.count, generator=generator, device=generator.device).to(self._keys.device)
        return self._subset(order[:queries]), self._subset(order[queries:])

    def state_dict(self) -> dict[str, Any]:
        """What is stored; empty where nothing is."""
        if self.count == 0:
            return {}
        return {"keys": self.keys, "values": self.values, "marks": self._marks[: self.count]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what is stored by the state's; the capacity stays this memory's."""
        self.count = 0
        if state:
            self.add(state["keys"], state["values"], state["marks"])

    def _reserve(self, keys: Tensor, values: Tensor) -> None:
        self._keys = keys.new_empty(self.capacity, *keys.shape[1:])
        self._values = values.new_empty(self.capacity, *values.shape[1:])
        self._marks = torch.empty(self.capacity, dtype=torch.int64, device=keys.device)

    def _put(self, slots: Tensor, keys: Tensor, values: Tensor, marks: Tensor) -> None:
        self._keys[slots], self._values[slots], self._marks[slots] = keys, values, marks

    def _compete(self, keys: Tensor, values: Tensor, marks: Tensor) -> None:
        """Newcomers with larger fingerprints take the slots of the stored pairs with the smallest."""
        everyone = torch.cat([self._marks, marks])
        stays = torch.zeros_like(everyone, dtype=torch.bool)
        stays[everyone.topk(self.capacity).indices] = True
        slots = (~stays[: self.capacity]).nonzero().squeeze(1)
        new = stays[self.capacity :].nonzero().squeeze(1)
        self._put(slots, keys[new], values[new], marks[new])

    def _subset(self, rows: Tensor) -> Memory:
        part = Memory(max(1, len(rows)))
        if len(rows):
            part.add(self.keys[rows], self.values[rows], self._marks[rows])
        return part


def fingerprint(*parts: Tensor) -> Tensor:
    """A 64-bit hash of every row of tensors with the same number of rows: equal rows, equal hashes.

    A random linear combination modulo 2⁶⁴ of the rows' words, each mixed first: numbers widened to double end in zeros,
    which a product would keep. Mixed again, so that its order is that of no feature.

    Args:
        parts: Tensors of any type, shape ``(B, ...)``.

    Returns:
        Shape ``(B,)``, int64.
    """
    words = torch.cat([_words(part) for part in parts], dim=1)
    fixed = torch.Generator().manual_seed(0)
    low, high = -(2**63), 2**63 - 1
    factors = torch.randint(low, high, (words.shape[1],), generator=fixed) | 1
    return mixed((mixed(words) * factors.to(words.device)).sum(dim=1))


def mixed(hashes: Tensor) -> Tensor:
    """The bits of int64 numbers scattered by the finaliser of SplitMix64, which is one-to-one."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        hashes = (hashes ^ _shifted(hashes, shift)) * factor
    return hashes ^ _shifted(hashes, 31)


def _shifted(hashes: Tensor, bits: int) -> Tensor:
    """A right shift that brings in zeros, as for unsigned numbers."""
    return torch.bitwise_and(hashes >> bits, 2 ** (64 - bits) - 1)


def _words(part: Tensor) -> Tensor:
    """Rows as int64 words; zeros of either sign are the same."""
    rows = part.reshape(part.shape[0], -1)
    return (rows.double() + 0.0).view(torch.int64) if rows.is_floating_point() else rows.long()


def _first_of_each(marks: Tensor, known: Tensor) -> Tensor:
    """Rows with a mark that is not known, in their order, the first of equal ones only."""
    distinct, belongs = marks.unique(return_inverse=True)
    rows = torch.arange(len(marks), device=marks.device)
    first = torch.full_like(distinct, len(marks)).scatter_reduce_(0, belongs, rows, "amin")
    return first[~torch.isin(distinct, known)].sort().values
