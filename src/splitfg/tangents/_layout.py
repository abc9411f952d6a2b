"""Parameters as one flat vector and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from splitfg.types import Params


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in a flat vector of P numbers.

    Tangents are drawn and combined flat, one row per tangent, and handed to engines as views by name.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, params: Params) -> Layout:
        """The layout of these parameters, in their order; they share one dtype and device."""
        first = next(iter(params.values()))
        return cls(tuple(params), tuple(p.shape for p in params.values()), first.dtype, first.device)

    @property
    def sizes(self) -> list[int]:
        """Numbers per parameter."""
        return [shape.numel() for shape in self.shapes]

    @property
    def total(self) -> int:
        """P, all numbers together."""
        return sum(self.sizes)

    def flatten(self, params: Params) -> Tensor:
        """The parameters as one vector of shape ``(P,)``."""
        return torch.cat([params[name].reshape(-1) for name in self.names])

    def unflatten(self, flat: Tensor) -> Params:
        """Views by name: ``(..., P)`` gives entries of shape ``(..., *shape)``."""
        parts = flat.split(self.sizes, dim=-1)
        lead = flat.shape[:-1]
        return {n: p.view((*lead, *s)) for n, s, p in zip(self.names, self.shapes, parts, strict=True)}
