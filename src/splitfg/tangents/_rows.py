"""Noise for some rows of a batch, equal to the same rows of the whole batch's noise."""

from __future__ import annotations

import torch
from torch import Tensor


class RowGenerator(torch.Generator):
    """A generator for a process that holds some rows of a batch: the others draw the same numbers.

    :func:`row_noise` draws noise for all rows from it and returns that of the process's rows, so that the noise of a
    row does not depend on how the batch is divided.

    Args:
        source: The generator to draw from; call :meth:`give_back` to advance it.
        first: Number of the process's first row in the batch.
        rows: Rows of the process.
        all_rows: Rows of the batch.

    Example:
        >>> import torch
        >>> from splitfg.tangents import RowGenerator, row_noise
        >>> whole = row_noise(torch.empty(4, 2), torch.Generator().manual_seed(0))
        >>> last = RowGenerator(torch.Generator().manual_seed(0), first=3, rows=1, all_rows=4)
        >>> torch.equal(row_noise(torch.empty(1, 2), last), whole[3:])
        True
    """

    first: int
    rows: int
    all_rows: int

    def __new__(cls, source: torch.Generator, *, first: int, rows: int, all_rows: int) -> RowGenerator:  # noqa: ARG004
        return super().__new__(cls, source.device)  # type: ignore[call-arg]

    def __init__(self, source: torch.Generator, *, first: int, rows: int, all_rows: int) -> None:
        self.first, self.rows, self.all_rows = first, rows, all_rows
        self._source = source
        if source.device.type == "cuda":
            self.graphsafe_set_state(source.graphsafe_get_state())  # one state for both, as captured steps need
        self.follow()

    def follow(self) -> None:
        """Go on from the present state of the source."""
        if self._source.device.type != "cuda":
            self.set_state(self._source.get_state())

    def give_back(self) -> None:
        """Advance the source by everything that was drawn."""
        if self._source.device.type != "cuda":
            self._source.set_state(self.get_state())


def row_noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw unit noise with the shape, dtype and device of a tensor whose first dimension numbers rows.

    Args:
        like: The tensor.
        generator: The source of randomness. A :class:`RowGenerator` draws for all rows of the batch; a tensor with
            another number of rows than the process holds gets the same noise in every process.
    """
    shape = like.shape
    if not isinstance(generator, RowGenerator) or not shape or shape[0] != generator.rows:
        return torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)
    whole = torch.randn((generator.all_rows, *shape[1:]), dtype=like.dtype, device=like.device, generator=generator)
    return whole[generator.first : generator.first + generator.rows]
