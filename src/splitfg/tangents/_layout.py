"""Conversion between parameters by name and one flat vector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from splitfg.errors import SplitError
from splitfg.types import Params


@dataclass(frozen=True)
class Layout:
    """Position of each parameter in a flat vector of P numbers.

    Laws draw tangents flat, one row per tangent; engines receive them as views by name. Tangents are zero in the
    ``still`` ranges of the flat vector.

    Example:
        >>> import torch
        >>> from splitfg.tangents import Layout
        >>> layout = Layout.of({"w": torch.zeros(2, 3), "b": torch.zeros(2)})
        >>> layout.total
        8
        >>> {name: tuple(v.shape) for name, v in layout.unflatten(torch.zeros(5, 8)).items()}
        {'w': (5, 2, 3), 'b': (5, 2)}
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    device: torch.device
    still: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, params: Params, still_rows: Mapping[str, int] | None = None) -> Layout:
        """Return the layout of these parameters, in their order; they must share one dtype and device.

        Args:
            params: Parameters by name.
            still_rows: A row that no tangent moves, by the name of the parameter; other names are skipped.
        """
        first, dtypes = next(iter(params.values())), sorted({str(p.dtype) for p in params.values()})
        if len(dtypes) > 1:
            words = f"tangents need parameters of one dtype, got {', '.join(dtypes)}"
            raise SplitError([f"{words}: use SplitFG() if only trunk and head differ, or convert the parameters"])
        start, still = 0, []
        for name, p in params.items():
            row = (still_rows or {}).get(name)
            if row is not None:
                size = p.numel() // p.shape[0]
                still.append((start + row * size, start + (row + 1) * size))
            start += p.numel()
        return cls(tuple(params), tuple(p.shape for p in params.values()), first.dtype, first.device, tuple(still))

    @property
    def sizes(self) -> list[int]:
        """Count of numbers per parameter."""
        return [shape.numel() for shape in self.shapes]

    @property
    def total(self) -> int:
        """P, the count of all numbers."""
        return sum(self.sizes)

    def flatten(self, params: Params) -> Tensor:
        """Concatenate the parameters into one vector of shape ``(P,)``."""
        return torch.cat([params[name].reshape(-1) for name in self.names])

    def unflatten(self, flat: Tensor) -> Params:
        """Return views by name: ``(..., P)`` becomes entries of shape ``(..., *shape)``."""
        parts = flat.split(self.sizes, dim=-1)
        lead = flat.shape[:-1]
        return {n: p.view((*lead, *s)) for n, s, p in zip(self.names, self.shapes, parts, strict=True)}
