"""Encoding of features and scaling of targets.

All statistics come from the training rows and apply to any other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from splitfg.errors import DataError

Floats: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = NDArray[np.int64]

LARGEST = 1e150
"""Squares of larger numbers do not fit a float64."""

FURTHEST = 1e6
"""Bound on standardised values: squares of much larger ones would not fit a float32."""


@dataclass(frozen=True)
class TableEncoding:
    """Standardises numeric columns and appends categorical columns as integer codes.

    A numeric value becomes (x - mean) / deviation with the training rows' statistics, clipped to a million deviations.
    A missing value becomes 0, the mean. A column that is constant or wholly missing in the training rows becomes 0 in
    all rows.

    A category becomes its place among the training rows' categories, 0 to n - 1: the most frequent first, so that most
    codes are small, or the order of an ordered pandas categorical. Categories that the training rows lack share the
    code n; a missing value has the code -1. Codes can be standardised like numbers, so that a column of many categories
    does not dominate the others.

    Attributes:
        columns: Names of all columns, in the order in which a table must have them.
        numeric: Names of the numeric columns.
        mean: Their means, shape ``(len(numeric),)``.
        deviation: Their standard deviations; infinite for constant columns, which makes them 0.
        categories: The categories of each of the other columns.
        code_mean: Means of the codes, shape ``(len(categories),)``; 0 if codes are not standardised.
        code_deviation: Standard deviations of the codes; 1 if codes are not standardised.
    """

    columns: tuple[Any, ...]
    numeric: tuple[Any, ...]
    mean: Floats
    deviation: Floats
    categories: tuple[tuple[Any, tuple[Any, ...]], ...]
    code_mean: Floats
    code_deviation: Floats

    @classmethod
    def fit(
        cls,
        frame: pd.DataFrame,
        *,
        categorical: Sequence[Any] | None = None,
        weight: Floats | None = None,
        standardise_codes: bool = False,
    ) -> TableEncoding:
        """Compute the encoding from training rows.

        Args:
            frame: One row per example.
            categorical: Names of the categorical columns; by default those of a pandas categorical, text, boolean or
                object type.
            weight: Positive weights of the rows.
            standardise_codes: Whether to standardise the codes of categories too.

        Raises:
            DataError: There are no rows, or a numeric column holds text or infinite values.
        """
        if frame.empty:
            raise DataError(f"a table of shape {frame.shape} has no rows or columns to learn from")
        chosen = _categorical_columns(frame) if categorical is None else list(categorical)
        numeric = tuple(c for c in frame.columns if c not in chosen)
        weight = np.ones(len(frame)) if weight is None else weight
        mean, deviation = _statistics(numbers(frame, numeric), weight)
        categories = tuple((c, _categories(frame[c], weight)) for c in chosen)
        code_mean, code_deviation = np.zeros(len(chosen)), np.ones(len(chosen))
        if standardise_codes:
            code_mean, code_deviation = _statistics(_all_codes(frame, categories).astype(np.float64), weight)
        return cls(tuple(frame.columns), numeric, mean, deviation, categories, code_mean, code_deviation)

    @property
    def width(self) -> int:
        """Numbers per encoded row."""
        return len(self.numeric) + len(self.categories)

    @property
    def constant(self) -> tuple[Any, ...]:
        """Names of the columns that do not vary in the training rows and are encoded as 0."""
        names = [*self.numeric, *(c for c, _ in self.categories)]
        flat = np.isinf([*self.deviation, *self.code_deviation])
        return tuple(c for c, is_flat in zip(names, flat, strict=True) if is_flat)

    def transform(self, frame: pd.DataFrame) -> NDArray[np.float32]:
        """Return the encoded rows, shape ``(rows, width)``.

        Raises:
            DataError: The columns differ from those of the training rows, or hold text or infinite values.
        """
        if tuple(frame.columns) != self.columns:
            raise DataError("the table does not have the columns it was fitted with", _column_problems(frame, self))
        encoded = np.empty((len(frame), self.width), dtype=np.float32)
        scaled = (numbers(frame, self.numeric) - self.mean) / self.deviation
        encoded[:, : len(self.numeric)] = np.nan_to_num(scaled, nan=0.0).clip(-FURTHEST, FURTHEST)
        encoded[:, len(self.numeric) :] = (_all_codes(frame, self.categories) - self.code_mean) / self.code_deviation
        return encoded


@dataclass(frozen=True)
class TargetScale:
    """Standardises regression targets by the training rows' mean and standard deviation."""

    mean: float
    deviation: float

    @classmethod
    def fit(cls, values: Floats, *, weight: Floats | None = None) -> TargetScale:
        """Compute mean and deviation; the deviation of a constant target is 1."""
        mean = float(np.average(values, weights=weight))
        low, high = values.min(), values.max()
        unit = float(power_of_two(low, high))
        deviation = unit * float(np.sqrt(np.average(np.square((values - mean) / unit), weights=weight)))
        return cls(mean, deviation if high > low and deviation > 0 else 1.0)

    def transform(self, values: Floats) -> NDArray[np.float32]:
        """Return (y - mean) / deviation."""
        return ((values - self.mean) / self.deviation).astype(np.float32)

    def inverse(self, scaled: NDArray[Any]) -> Floats:
        """Return values in the target's own units."""
        return scaled.astype(np.float64) * self.deviation + self.mean


def _categorical_columns(frame: pd.DataFrame) -> list[Any]:
    return [c for c in frame.columns if not is_number(frame[c].dtype)]


def is_number(dtype: Any) -> bool:
    """Return whether a column of this type holds numbers; booleans are categories."""
    return bool(pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_bool_dtype(dtype))


def numbers(frame: pd.DataFrame, columns: Sequence[Any]) -> Floats:
    """Return the columns as floats, missing values as NaN.

    Raises:
        DataError: A column holds text, objects, or infinite or too large values.
    """
    problems = [f"{c!r} holds text or objects, not numbers" for c in columns if not is_number(frame[c].dtype)]
    if not problems:
        values = frame[list(columns)].to_numpy(dtype=np.float64, na_value=np.nan)
        infinite = (np.abs(values) > LARGEST).any(axis=0)
        problems = [
            f"{c!r} holds infinite or too large values" for c, bad in zip(columns, infinite, strict=True) if bad
        ]
    if problems:
        hint = "encode text, clip or drop such values, or drop those columns"
        raise DataError("the table cannot be standardised", problems, hint=hint)
    return values


def _statistics(values: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Return weighted means and deviations of the columns over the values that are not missing."""
    present = ~np.isnan(values)
    share = present * weight[:, None]
    total = np.where(share.sum(axis=0) > 0, share.sum(axis=0), 1.0)
    filled = np.where(present, values, 0.0)
    mean = (share * filled).sum(axis=0) / total
    low = np.where(present, values, np.inf).min(axis=0, initial=np.inf)
    high = np.where(present, values, -np.inf).max(axis=0, initial=-np.inf)
    unit = power_of_two(low, high)
    variance = (share * np.square(np.where(present, values - mean, 0.0) / unit)).sum(axis=0) / total
    return mean, deviations(low, high, unit * np.sqrt(variance))


def power_of_two(low: Floats, high: Floats) -> Floats:
    """Return the power of two below the largest of the numbers from low to high; 1 without a number.

    Squares of their quotients by it neither overflow nor become zero, and the division is exact.
    """
    largest = np.maximum(np.abs(low), np.abs(high))
    usable = np.isfinite(largest) & (largest > 0)
    unit: Floats = np.ldexp(1.0, np.frexp(np.where(usable, largest, 1.0))[1] - 1)
    return unit


def deviations(low: Floats, high: Floats, found: Floats) -> Floats:
    """Return the deviations of columns, infinite for constant ones.

    The extremes are compared exactly: the rounded mean of equal numbers may differ from them, and rounding would
    become ±1.
    """
    spread: Floats = np.where((high > low) & (found > 0), found, np.inf)
    return spread


def _categories(column: pd.Series[Any], weight: Floats) -> tuple[Any, ...]:
    """Return the categories of a column, in the order of their codes."""
    if isinstance(column.dtype, pd.CategoricalDtype) and column.dtype.ordered:
        return tuple(column.cat.remove_unused_categories().cat.categories)
    there = column.notna().to_numpy()
    codes, labels = pd.factorize(column[there].astype("object"))
    share = np.bincount(codes, weights=weight[there], minlength=len(labels))
    # ties are broken by the label's text, so that the order of the rows does not matter
    ranked = sorted(zip(-share, labels, strict=True), key=lambda pair: (pair[0], str(pair[1]), type(pair[1]).__name__))
    return tuple(label for _, label in ranked)


def _all_codes(frame: pd.DataFrame, categories: Sequence[tuple[Any, tuple[Any, ...]]]) -> Rows:
    """Return the codes of all categorical columns, shape ``(rows, len(categories))``."""
    codes = np.empty((len(frame), len(categories)), dtype=np.int64)
    for place, (column, labels) in enumerate(categories):
        codes[:, place] = _codes(frame[column], labels)
    return codes


def _codes(column: pd.Series[Any], categories: tuple[Any, ...]) -> Rows:
    codes: Rows = pd.Index(categories, dtype="object").get_indexer(pd.Index(column.astype("object")))
    codes[codes == -1] = len(categories)
    codes[column.isna().to_numpy()] = -1
    return codes


def _column_problems(frame: pd.DataFrame, encoding: TableEncoding) -> list[str]:
    there = tuple(frame.columns)
    lacking = [f"{c!r} is missing" for c in encoding.columns if c not in there]
    extra = [f"{c!r} is new" for c in there if c not in encoding.columns]
    return [*lacking, *extra] or ["they are in another order"]
