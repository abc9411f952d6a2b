"""Tiles of a batch's outputs, so that few of them exist at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Matrix products on a GPU are fast if sizes and strides are multiples of _ALIGNED elements. From _MANY outputs on, a
# second, narrow product for the remainder costs less than an unaligned one.
_ALIGNED, _MANY = 64, 1024


@dataclass(frozen=True)
class Tiles:
    """A grid over n rows and C outputs.

    Attributes:
        rows: Slices of rows.
        columns: Slices of outputs; a single slice if tiles hold whole rows.
    """

    rows: tuple[slice, ...]
    columns: tuple[slice, ...]


def tiles(n: int, width: int, limit: int) -> Tiles:
    """Cut n rows of ``width`` outputs into tiles of at most ``limit`` outputs.

    Tiles hold whole rows if enough of them fit, since outputs in several blocks of columns are computed twice.
    Otherwise tiles are as square as the number of rows allows, since every tile reads its rows of h and of W.
    """
    tall = max(1, min(n, math.isqrt(limit)))
    wide = limit // tall
    if wide >= width:
        return Tiles(slices(n, max(1, limit // width)), (slice(0, width),))
    even = math.ceil(width / math.ceil(width / wide))
    return Tiles(slices(n, tall), slices(width, padded(even) if padded(even) <= wide else even))


def aligned(block: slice) -> tuple[slice, ...]:
    """Split a block of many columns into one of an aligned width and a narrow remainder."""
    width = block.stop - block.start
    rest = width % _ALIGNED if width >= _MANY else 0
    return (slice(block.start, block.stop - rest), slice(block.stop - rest, block.stop))[: 2 if rest else 1]


def padded(width: int) -> int:
    """Round many columns up to the next multiple of the alignment."""
    return width if width < _MANY else math.ceil(width / _ALIGNED) * _ALIGNED


def slices(count: int, size: int) -> tuple[slice, ...]:
    """Cut ``count`` rows or columns into slices of at most ``size``."""
    return tuple(slice(start, min(start + size, count)) for start in range(0, max(count, 1), size))
