"""What several experiments train with: compiled steps, matrix products of a chosen precision, the trunk's path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from splitfg import Split
from splitfg.estimators._grads import norm
from splitfg.training._compiled import Compile, whole
from splitfg.types import Params


def compiler(step: str, device: torch.device) -> Compile | None:
    """What compiles a step: nothing without a GPU, where compiling takes longer than it saves."""
    return whole if step == "compiled" and device.type == "cuda" else None


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """float32 matrix products at this precision, for a while."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Displacement:
    """‖θ - θ₀‖ / ‖θ₀‖ of the trunk, θ₀ being where it is now. θ₀ is kept off the device.

    Args:
        split: The network.
    """

    def __init__(self, split: Split) -> None:
        self._split = split
        self._start = self._trunk()
        self._size = norm(self._start)

    def __call__(self) -> float:
        """How far the trunk has moved."""
        now = self._trunk()
        return (norm({name: now[name] - p for name, p in self._start.items()}) / self._size).item()

    def _trunk(self) -> Params:
        return {name: _copy(p) for name, p in self._split.trunk_params().items()}


def _copy(p: Tensor) -> Tensor:
    return p.detach().to("cpu", copy=True)
