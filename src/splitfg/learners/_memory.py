"""A bounded store of (feature, target) pairs of distinct examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class Memory:
    """Stores at most ``capacity`` pairs: a uniform sample of all distinct examples added so far.

    A 64-bit hash (:func:`fingerprint`) identifies an example. The store keeps the ``capacity`` largest fingerprints, so
    that its content depends neither on the order of the examples nor on repetitions, and contains no duplicates.

    Args:
        capacity: Largest number of pairs.
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
        """Store the new pairs of a batch; if the store is full, keep the largest fingerprints.

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
        """Move the store to a device."""
        if self._keys.device != device:
            self._keys, self._values = self._keys.to(device), self._values.to(device)
            self._marks = self._marks.to(device)

    def blocks(self, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values, ``rows`` at a time."""
        yield from zip(self.keys.split(rows), self.values.split(rows), strict=True)

    def first(self, pairs: int) -> Memory:
        """Return a copy of the first ``pairs`` pairs."""
        return self._subset(torch.arange(min(pairs, self.count), device=self._keys.device))

    def divide(self, queries: int, generator: torch.Generator) -> tuple[Memory, Memory]:
        """Divide the store at random into one of ``queries`` pairs and one of the others, to choose settings."""
        order = torch.randperm(self.count, generator=generator, device=generator.device).to(self._keys.device)
        return self._subset(order[:queries]), self._subset(order[queries:])

    def state_dict(self) -> dict[str, Any]:
        """Return the stored pairs; empty for an empty store."""
        if self.count == 0:
            return {}
        return {"keys": self.keys, "values": self.values, "marks": self._marks[: self.count]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the stored pairs by those of a :meth:`state_dict`; the capacity stays the same."""
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
        """Replace the stored pairs with the smallest fingerprints by new ones with larger fingerprints."""
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
    """Compute a 64-bit hash of every row of tensors with the same number of rows; equal rows have equal hashes.

    The hash is a random linear combination modulo 2⁶⁴ of the row's 64-bit words. Words are mixed before, since floats
    converted to double end in zero bits, which a product would keep, and after, so that the order of hashes is
    independent of the features.

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
    """Scatter the bits of int64 numbers by the finaliser of SplitMix64, which is one-to-one."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        hashes = (hashes ^ _shifted(hashes, shift)) * factor
    return hashes ^ _shifted(hashes, 31)


def _shifted(hashes: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros, as for unsigned numbers."""
    return torch.bitwise_and(hashes >> bits, 2 ** (64 - bits) - 1)


def _words(part: Tensor) -> Tensor:
    """Convert rows to int64 words; 0.0 and -0.0 give the same word."""
    rows = part.reshape(part.shape[0], -1)
    return (rows.double() + 0.0).view(torch.int64) if rows.is_floating_point() else rows.long()


def _first_of_each(marks: Tensor, known: Tensor) -> Tensor:
    """Return the rows with unknown marks, in order; of rows with equal marks only the first."""
    distinct, belongs = marks.unique(return_inverse=True)
    rows = torch.arange(len(marks), device=marks.device)
    first = torch.full_like(distinct, len(marks)).scatter_reduce_(0, belongs, rows, "amin")
    return first[~torch.isin(distinct, known)].sort().values
