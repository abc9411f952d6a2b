"""Numbers of the last few steps, kept on the device until they are logged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import TypeAlias

import torch
from torch import Tensor

from splitfg.types import StepStats

Row: TypeAlias = dict[str, float]
"""The numbers that one step reported."""


class Window:
    """The numbers reported since the last log line.

    Reading a number from a GPU makes the CPU wait for it, so the window reads many steps at once.
    """

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self.rows: list[Row] = list(rows)
        self._fresh: list[dict[str, Tensor | float]] = []

    def add(self, stats: StepStats) -> None:
        """Store the numbers of a step."""
        values = {"loss": stats.loss, **stats.metrics}
        self._fresh.append({name: _keep(name, value) for name, value in values.items()})

    def fetch(self) -> list[Row]:
        """Read the numbers added since the last call and return the new rows."""
        places: dict[tuple[torch.dtype, torch.device], list[tuple[int, str]]] = defaultdict(list)
        for i, values in enumerate(self._fresh):
            for name, value in values.items():
                if isinstance(value, Tensor):
                    places[value.dtype, value.device].append((i, name))
        for where in places.values():
            stacked = torch.stack([torch.as_tensor(self._fresh[i][name]) for i, name in where])
            for (i, name), number in zip(where, stacked.tolist(), strict=True):
                self._fresh[i][name] = float(number)
        new = [{k: float(v) for k, v in values.items()} for values in self._fresh]
        self.rows += new
        self._fresh = []
        return new

    def take_means(self) -> Row:
        """Return the mean of every number over the rows that have it, and empty the window."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        means = {name: fmean(row[name] for row in self.rows if name in row) for name in names}
        self.rows = []
        return means


def _keep(name: str, value: Tensor | float) -> Tensor | float:
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        shape = tuple(value.shape)
        raise ValueError(f"a step reported {name} of shape {shape}; only single numbers can be logged")
    # copied, because a captured step returns the same memory every time
    return value.detach().clone().reshape(())
