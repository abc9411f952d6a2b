"""A batch in micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from torch.utils import _pytree as pytree

from splitfg.types import Inputs, Target

Batch: TypeAlias = Sequence[tuple[Inputs, Target]]
"""A batch in micro-batches: inputs and target of each part."""


def has_rows(value: Any) -> bool:
    """Whether a value is a tensor, or an array for a black box, with a first dimension."""
    return len(getattr(value, "shape", ())) > 0


def parts(x: Inputs, y: Target, rows: int | None) -> Iterator[tuple[Inputs, Target]]:
    """Yield a batch in parts of at most ``rows`` rows; whole if ``None``."""
    count = y.shape[0]
    if rows is None or rows >= count:
        yield x, y
        return
    for start in range(0, count, rows):
        part = slice(start, start + rows)
        yield pytree.tree_map(lambda t, part=part: t[part] if has_rows(t) else t, x), y[part]
