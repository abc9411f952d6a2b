"""Non-overlapping windows over a token stream, as torch batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitfg.errors import DataError


@dataclass(frozen=True)
class Windows:
    """Non-overlapping windows of T inputs, each with the T next tokens as targets.

    A stream of n tokens has floor((n - 1) / T) windows; window w reads tokens wT to wT + T - 1 and predicts tokens
    wT + 1 to wT + T.

    Attributes:
        tokens: Token ids (n,), usually a memory map.
        length: T.
    """

    tokens: NDArray[Any]
    length: int

    def __post_init__(self) -> None:
        problems = []
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu":
            problems.append(f"tokens must be integers of shape (n,), got {self.tokens.ndim}-d {self.tokens.dtype}")
        if self.length < 1:
            problems.append(f"length must be at least 1, got {self.length}")
        elif len(self) < 1:
            problems.append(
                f"the corpus has {self.tokens.size:,} tokens; one window of {self.length:,} needs {self.length + 1:,}"
            )
        if problems:
            raise DataError("cannot cut windows", problems)

    def __len__(self) -> int:
        return max(0, self.tokens.size - 1) // self.length

    def take(self, numbers: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets (B, T), int64, of the windows with these indices."""
        at = numbers[:, None] * self.length + np.arange(self.length + 1)
        ids = torch.from_numpy(self.tokens[at].astype(np.int64))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step(self, i: int, batch: int) -> tuple[Tensor, Tensor]:
        """Return the batch of training step i: windows Bi to Bi + B - 1, modulo the number of windows."""
        return self.take(np.arange(batch * i, batch * (i + 1)) % len(self))

    def sweep(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every window once, in order; the last batch may be smaller."""
        for start in range(0, len(self), batch):
            yield self.take(np.arange(start, min(start + batch, len(self))))
