"""Sparse tables: the encoding of numeric columns, applied to a batch at a time so that the table stays sparse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.sparse import csr_array

from splitfg.errors import DataError
from splitfg.sklearn.encoding import FURTHEST, LARGEST, Floats, TableEncoding, deviations, numbers, power_of_two

Table: TypeAlias = pd.DataFrame | csr_array
"""A table as the estimators hold it: a frame, or numbers in compressed rows."""


@dataclass(frozen=True)
class SparseRows:
    """Rows that are standardised when they become dense: (x - mean) / deviation, 0 for a missing value.

    Attributes:
        values: The numbers as they came, shape ``(n, width)``.
        mean: Mean of every column.
        deviation: Standard deviation of every column; infinite for constant columns.
    """

    values: csr_array
    mean: Floats
    deviation: Floats

    def __len__(self) -> int:
        return int(self.values.shape[0])

    def __getitem__(self, rows: NDArray[np.int64]) -> SparseRows:
        return SparseRows(self.values[rows], self.mean, self.deviation)

    def dense(self) -> NDArray[np.float32]:
        """Return the encoded rows, shape ``(n, width)``."""
        scaled = (self.values.toarray() - self.mean) / self.deviation
        encoded: NDArray[np.float32] = np.nan_to_num(scaled, nan=0.0).clip(-FURTHEST, FURTHEST).astype(np.float32)
        return encoded


@dataclass(frozen=True)
class SparseEncoding:
    """Standardisation of a sparse table, with the numbers that :class:`TableEncoding` gives for the dense one.

    Attributes:
        columns: Names of the columns.
        mean: Means over all rows, absent entries counted as 0, shape ``(len(columns),)``.
        deviation: Standard deviations; infinite for constant columns, which makes them 0.
    """

    columns: tuple[Any, ...]
    mean: Floats
    deviation: Floats

    @classmethod
    def fit(cls, table: csr_array, columns: Sequence[Any], *, weight: Floats | None = None) -> SparseEncoding:
        """Compute means and deviations from training rows.

        Raises:
            DataError: The table holds infinite or too large values.
        """
        weight = np.ones(table.shape[0]) if weight is None else weight
        mean, deviation = _statistics(_checked(table), weight)
        return cls(tuple(columns), mean, deviation)

    @property
    def numeric(self) -> tuple[Any, ...]:
        """Names of the numeric columns: all of them."""
        return self.columns

    @property
    def width(self) -> int:
        """Numbers per encoded row."""
        return len(self.columns)

    @property
    def constant(self) -> tuple[Any, ...]:
        """Names of the columns that do not vary in the training rows and are encoded as 0."""
        return tuple(c for c, flat in zip(self.columns, np.isinf(self.deviation), strict=True) if flat)

    def transform(self, table: csr_array) -> SparseRows:
        """Return the rows, to be standardised when they become dense.

        Raises:
            DataError: The table holds infinite or too large values.
        """
        return SparseRows(_checked(table), self.mean, self.deviation)


def fit_encoding(table: Table, columns: Sequence[Any], weight: Floats | None) -> TableEncoding | SparseEncoding:
    """Compute the encoding from training rows; codes of categories are standardised too."""
    if isinstance(table, pd.DataFrame):
        return TableEncoding.fit(table, weight=weight, standardise_codes=True)
    return SparseEncoding.fit(table, columns, weight=weight)


def encode(encoding: TableEncoding | SparseEncoding, table: Table) -> NDArray[np.float32] | SparseRows:
    """Encode rows of either kind with an encoding of either kind."""
    if isinstance(encoding, SparseEncoding):
        sparse = csr_array(numbers(table, encoding.columns)) if isinstance(table, pd.DataFrame) else table
        return encoding.transform(sparse)
    frame = table if isinstance(table, pd.DataFrame) else pd.DataFrame(table.toarray(), columns=encoding.columns)
    return encoding.transform(frame)


def compressed(matrix: Any) -> csr_array:
    """Return a copy in compressed rows of float64, every entry once and none of them 0."""
    table = csr_array(matrix, dtype=np.float64, copy=True)
    table.sum_duplicates()
    table.eliminate_zeros()
    return table


def row_keys(table: csr_array) -> NDArray[np.uint64]:
    """Return a hash of every row of a :func:`compressed` table, the same wherever the row is."""
    values, places = pd.util.hash_array(table.data), pd.util.hash_array(table.indices.astype(np.int64))
    keys = np.zeros(table.shape[0], dtype=np.uint64)
    odd = places | np.uint64(1)
    np.add.at(keys, _row_numbers(table), values * odd)
    return keys


def _checked(table: csr_array) -> csr_array:
    if (np.abs(table.data) > LARGEST).any():
        columns = sorted({int(c) for c in table.indices[np.abs(table.data) > LARGEST]})
        problems = [f"column {c} holds infinite or too large values" for c in columns]
        raise DataError("the table cannot be standardised", problems, hint="clip those values or drop those columns")
    return table


def _statistics(table: csr_array, weight: Floats) -> tuple[Floats, Floats]:
    """Return weighted means and deviations of the columns over the values that are not missing."""
    present = ~np.isnan(table.data)
    share = weight[_row_numbers(table)]
    stored = _column_sums(table, share * present)
    total = weight.sum() - _column_sums(table, share * ~present)
    total = np.where(total > 0, total, 1.0)
    filled = np.where(present, table.data, 0.0)
    mean = _column_sums(table, share * filled) / total
    low, high = (extreme(axis=0).toarray().ravel() for extreme in (table.nanmin, table.nanmax))
    unit = power_of_two(low, high)
    distances = np.square(np.where(present, table.data - mean[table.indices], 0.0) / unit[table.indices])
    # absent entries are 0, at a distance of the mean; where there are none, rounding must not invent any
    full = np.bincount(table.indices, minlength=table.shape[1]) == table.shape[0]
    absent = np.where(full, 0.0, total - stored)
    variance = (_column_sums(table, share * distances) + absent * np.square(mean / unit)) / total
    return mean, deviations(low, high, unit * np.sqrt(variance.clip(min=0.0)))


def _column_sums(table: csr_array, entries: Floats) -> Floats:
    sums: Floats = np.bincount(table.indices, weights=entries, minlength=table.shape[1]).astype(np.float64)
    return sums


def _row_numbers(table: csr_array) -> NDArray[np.int64]:
    """Return the row of every stored entry."""
    return np.repeat(np.arange(table.shape[0]), np.diff(table.indptr))
