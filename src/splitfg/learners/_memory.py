"""A bounded store of (feature, target) pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class Memory:
    """At most ``capacity`` pairs: a uniform sample, without replacement, of all that were ever added.

    Every pair is given a uniform random priority, and the ``capacity`` largest priorities stay.

    Args:
        capacity: The most pairs to keep.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self._keys = self._values = self._priorities = torch.empty(0)

    @property
    def keys(self) -> Tensor:
        """Stored features, shape ``(count, d)``."""
        return self._keys[: self.count]

    @property
    def values(self) -> Tensor:
        """Stored targets, shape ``(count, ...)``."""
        return self._values[: self.count]

    def add(self, keys: Tensor, values: Tensor, generator: torch.Generator) -> None:
        """Store a batch of pairs, and forget others where there is no room."""
        drawn = torch.rand(keys.shape[0], generator=generator, device=generator.device)
        priorities = drawn.to(keys.device)
        if self.count == 0:
            self._reserve(keys, values)
        free = min(self.capacity - self.count, keys.shape[0])
        slots = torch.arange(self.count, self.count + free, device=keys.device)
        self._put(slots, keys[:free], values[:free], priorities[:free])
        self.count += free
        if free < keys.shape[0]:
            self._compete(keys[free:], values[free:], priorities[free:])

    def to(self, device: torch.device) -> None:
        """Move everything that is stored."""
        if self._keys.device != device:
            self._keys, self._values = self._keys.to(device), self._values.to(device)
            self._priorities = self._priorities.to(device)

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
        return {"keys": self.keys, "values": self.values, "priorities": self._priorities[: self.count]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what is stored by the state's, which must fit the capacity."""
        self.count = 0
        if state:
            self._reserve(state["keys"], state["values"])
            self.count = state["keys"].shape[0]
            slots = torch.arange(self.count, device=state["keys"].device)
            self._put(slots, state["keys"], state["values"], state["priorities"])

    def _reserve(self, keys: Tensor, values: Tensor) -> None:
        self._keys = keys.new_empty(self.capacity, *keys.shape[1:])
        self._values = values.new_empty(self.capacity, *values.shape[1:])
        self._priorities = torch.empty(self.capacity, device=keys.device)

    def _put(self, slots: Tensor, keys: Tensor, values: Tensor, priorities: Tensor) -> None:
        self._keys[slots], self._values[slots], self._priorities[slots] = keys, values, priorities

    def _compete(self, keys: Tensor, values: Tensor, priorities: Tensor) -> None:
        """Newcomers with larger priorities take the slots of the stored pairs with the smallest."""
        everyone = torch.cat([self._priorities, priorities])
        stays = torch.zeros_like(everyone, dtype=torch.bool)
        stays[everyone.topk(self.capacity).indices] = True
        slots = (~stays[: self.capacity]).nonzero().squeeze(1)
        new = stays[self.capacity :].nonzero().squeeze(1)
        self._put(slots, keys[new], values[new], priorities[new])

    def _subset(self, rows: Tensor) -> Memory:
        part = Memory(max(1, rows.shape[0]))
        if rows.shape[0]:
            part.load_state_dict(
                {"keys": self.keys[rows], "values": self.values[rows], "priorities": self._priorities[rows]}
            )
        return part
