"""States of the global generators that a forward pass may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RandomState:
    """States of all global generators.

    Attributes:
        cpu: State of torch's generator on the CPU.
        cuda: States of torch's generators on every GPU; ``None`` if CUDA is not in use.
        foreign: States of Python's generator and of NumPy's, if it is imported, by name.
    """

    cpu: Tensor
    cuda: list[Tensor] | None
    foreign: dict[str, Any]

    def restore(self) -> None:
        """Set the global generators to this state."""
        with torch._C._DisableFuncTorch():
            torch.set_rng_state(self.cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.foreign["Python's random"])
        if "numpy.random" in self.foreign:
            sys.modules["numpy"].random.set_state(self.foreign["numpy.random"])

    def same_in_torch(self, other: RandomState) -> bool:
        """Whether torch's generators have the same state in both."""
        pairs = zip([self.cpu, *(self.cuda or [])], [other.cpu, *(other.cuda or [])], strict=False)
        return all(torch.equal(a, b) for a, b in pairs)

    def changed_elsewhere(self, other: RandomState) -> tuple[str, ...]:
        """Return the names of generators outside of torch whose states differ."""
        states = other.foreign
        return tuple(n for n, state in self.foreign.items() if _comparable(state) != _comparable(states.get(n, state)))


def _comparable(state: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)


def random_state() -> RandomState:
    """Return the states of all global generators."""
    with torch._C._DisableFuncTorch():
        cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    foreign: dict[str, Any] = {"Python's random": random.getstate()}
    if "numpy" in sys.modules:
        foreign["numpy.random"] = sys.modules["numpy"].random.get_state()
    return RandomState(cpu, cuda, foreign)


@contextmanager
def drawing_from(state: RandomState) -> Iterator[None]:
    """Let the global generators go on from a state, and restore them afterwards."""
    with same_generators():
        state.restore()
        yield


@contextmanager
def same_generators() -> Iterator[None]:
    """Restore the global generators."""
    state = random_state()
    try:
        yield
    finally:
        state.restore()
