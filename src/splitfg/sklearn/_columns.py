"""Validation of a table's columns before the encoding: numbers, dates, identifiers."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd

from splitfg.errors import DataError
from splitfg.sklearn.encoding import is_number

# Kinds of object columns, by pandas' names, that hold points or spans of time.
TIMES = {"datetime", "datetime64", "date", "time", "timedelta", "timedelta64", "period"}
# Share of rows with different values above which a column looks like an identifier, given enough rows.
_NEARLY_EVERY = 0.9
_FEWEST_ROWS = 20


def readable(table: pd.DataFrame, numeric: Collection[Any] | None = None) -> pd.DataFrame:
    """Return the table with numbers in object columns and in ``longdouble`` as floats.

    Args:
        table: One row per example.
        numeric: Names of the columns that were numbers in ``fit``; ``None`` in ``fit`` itself.

    Raises:
        DataError: Columns hold dates, times, complex numbers or values that cannot be categories, such as lists.
    """
    found = [(c, _unreadable(table[c])) for c in table.columns]
    problems = [f"{c!r} holds {what}" for c, what in found if what]
    if problems:
        hint = "convert them to numbers (a date to its year, its weekday, days since another) or drop those columns"
        raise DataError("the table has columns that are neither numbers nor categories", problems, hint=hint)
    objects = [c for c in table.columns if table[c].dtype in (np.dtype(object), np.dtype(np.longdouble))]
    # in fit, a column without any value may still turn out to hold text
    candidates = [c for c in objects if (table[c].notna().any() if numeric is None else c in numeric)]
    return _with_floats(table, [c for c in candidates if _all_numbers(table[c])])


def warn_of_identifiers(table: pd.DataFrame) -> None:
    """Warn of categorical columns in which nearly every row has another value."""
    found = [(c, table[c].nunique(), int(table[c].count())) for c in table.columns if _is_unordered(table[c].dtype)]
    named = [
        f"{c!r} ({different:,} different values in {rows:,} rows)"
        for c, different, rows in found
        if rows >= _FEWEST_ROWS and different >= _NEARLY_EVERY * rows
    ]
    if named:
        warnings.warn(
            f"nearly every row has another value in {', '.join(named)}, so these columns are useless as categories."
            " Drop them, group their values, or convert them to numbers (pd.to_numeric reads text)",
            UserWarning,
            stacklevel=4,
        )


def _unreadable(column: pd.Series[Any]) -> str:
    """Return the kind of values that cannot be encoded; empty if there are none."""
    dtype = column.dtype
    if dtype.kind in "mM" or isinstance(dtype, pd.PeriodDtype):
        return "dates or times"
    if dtype.kind == "c":
        return "complex numbers"
    if not pd.api.types.is_object_dtype(dtype):
        return ""
    if pd.api.types.infer_dtype(column, skipna=True) in TIMES:
        return "dates or times"
    odd = next((value for value in column if not _is_hashable(value)), None)
    return "" if odd is None else f"values that cannot be categories (type {type(odd).__name__})"


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _all_numbers(column: pd.Series[Any]) -> bool:
    return all(isinstance(value, Real | Decimal) and not isinstance(value, bool) for value in column.dropna())


def _with_floats(table: pd.DataFrame, columns: list[Any]) -> pd.DataFrame:
    result = table.copy(deep=False)
    for c in columns:
        result[c] = table[c].where(table[c].notna(), np.nan).astype(np.float64)
    return result


def _is_unordered(dtype: Any) -> bool:
    return not is_number(dtype) and not (isinstance(dtype, pd.CategoricalDtype) and dtype.ordered)
