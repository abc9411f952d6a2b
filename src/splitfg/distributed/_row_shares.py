"""The share of an estimate that a process computes, and the rows that all processes need."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from splitfg.distributed._ranks import Ranks
from splitfg.distributed._reduce import failed
from splitfg.estimators import Estimator, PartialEstimator, SamplingEstimator, Share
from splitfg.splitting import Split
from splitfg.splitting.checks import has_rows, skip_checks
from splitfg.tangents import RowGenerator
from splitfg.types import Inputs, Target


class RowShares:
    """Divides batches; keeps row counts and generators, which captured steps use again.

    Args:
        ranks: The processes.
        check: Validates the rows of this process.
    """

    def __init__(self, ranks: Ranks, check: Callable[[Split, Inputs, Target], None]) -> None:
        self._ranks, self._check = ranks, check
        self._counts: dict[int, tuple[list[int], int]] = {}
        self._measured: dict[Hashable, int | None] = {}
        self._generators: dict[tuple[torch.Generator, int, int, int], RowGenerator] = {}

    def __call__(
        self, estimator: Estimator, split: Split, x: Inputs, y: Target, generator: torch.Generator
    ) -> tuple[Share, torch.Generator]:
        """Return this process's share, and the generator to draw from; exchanges row counts if they are needed."""
        ranks = self._ranks
        share = Share(part=ranks.tangent_part, parts=ranks.tangent_parts)
        if not isinstance(estimator, PartialEstimator) or not (estimator.needs.row_noise or estimator.needs.all_inputs):
            return share, generator
        rows, needed = self._row_counts(estimator, split, x, y)
        share = replace(share, rows=rows[ranks.row_part], all_rows=sum(rows))
        if estimator.needs.all_inputs and ranks.row_parts > 1:
            first = [max(0, min(own, needed - sum(rows[:i]))) for i, own in enumerate(rows)]
            inputs: Inputs = pytree.tree_map(lambda t: ranks.gather_rows(t, first) if has_rows(t) else t, x)
            share = replace(share, inputs=inputs)
        if not estimator.needs.row_noise or generator is None:
            return share, generator
        return share, self._row_generator(generator, sum(rows[: ranks.row_part]), share.rows, share.all_rows)

    def _row_generator(self, source: torch.Generator, first: int, rows: int, all_rows: int) -> RowGenerator:
        """Return the generator of these rows; a captured step must not make a new one."""
        key = (source, first, rows, all_rows)
        if key not in self._generators:
            self._generators[key] = RowGenerator(source, first=first, rows=rows, all_rows=all_rows)
        self._generators[key].follow()
        return self._generators[key]

    def _row_counts(self, estimator: PartialEstimator, split: Split, x: Inputs, y: Target) -> tuple[list[int], int]:
        """Return the rows of every process with other rows, and how many of the first rows all of them need.

        Raises in all of them if one has a bad batch.
        """
        if skip_checks():  # a captured step has the rows of the steps before it
            return self._counts[y.shape[0]]
        error: Exception | None = None
        rows = needed = 0
        try:
            self._check(split, x, y)
            rows, needed = y.shape[0], self._needed(estimator, split, x)
        except Exception as problem:
            error = problem
        counts = self._ranks.gather(torch.tensor([rows, needed], device=self._ranks.device))
        found = [int(n) for n in counts[:, 0]]
        if 0 in found:
            raise failed(self._ranks, error)
        self._counts[y.shape[0]] = found, min(sum(found), int(counts[:, 1].max()))
        return self._counts[y.shape[0]]

    def _needed(self, estimator: PartialEstimator, split: Split, x: Inputs) -> int:
        """Return how many of the first rows of the whole batch this process needs."""
        most = torch.iinfo(torch.int64).max
        if not isinstance(estimator, SamplingEstimator) or not estimator.needs.all_inputs:
            return most
        key = tuple(t.shape for t in pytree.tree_leaves(x) if isinstance(t, Tensor))
        if key not in self._measured:
            self._measured[key] = estimator.measured_rows(split, x)
        return self._measured[key] or most
