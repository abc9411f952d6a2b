"""Training examples: rows, targets and weights, in an order that depends on their content alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from splitfg.sklearn._sparse import Table, row_keys
from splitfg.sklearn.encoding import LARGEST, Floats, Rows

# Whole-number weights become repetitions up to this many times the rows.
_MOST_REPEATED = 10


@dataclass(frozen=True)
class Examples:
    """Rows of a table with their targets, and weights unless all count the same."""

    table: Table
    target: NDArray[Any]
    weight: Floats | None = None

    def __len__(self) -> int:
        return len(self.target)

    def take(self, rows: Rows) -> Examples:
        """Return these rows, in this order."""
        weight = None if self.weight is None else self.weight[rows]
        table = self.table.iloc[rows] if isinstance(self.table, pd.DataFrame) else self.table[rows]
        return Examples(table, self.target[rows], weight)

    def canonical(self) -> Examples:
        """Return the same examples sorted by their content, so that equal sets of examples give equal results."""
        if isinstance(self.table, pd.DataFrame):
            keys = pd.util.hash_pandas_object(self.table, index=False).to_numpy()
        else:
            keys = row_keys(self.table)
        return self.take(np.lexsort((self.target, keys)))

    def weighted(self) -> Examples:
        """Drop rows of weight zero, and repeat rows of whole-number weights."""
        if self.weight is None:
            return self
        kept = self.take(np.flatnonzero(self.weight > 0))
        assert kept.weight is not None
        whole = bool((kept.weight == np.round(kept.weight)).all())
        if not whole or kept.weight.sum() > _MOST_REPEATED * len(kept):
            return kept
        repeated = kept.take(np.repeat(np.arange(len(kept)), kept.weight.astype(np.int64)))
        return Examples(repeated.table, repeated.target)


def check_weight(weight: Any, rows: int) -> Floats | None:
    """Return the weights as an array, ``None`` unchanged.

    Raises:
        ValueError: Lists everything that is wrong with the weights.
    """
    if weight is None:
        return None
    values = np.array(weight, dtype=np.float64)
    if values.shape != (rows,):
        raise ValueError(f"sample_weight has shape {values.shape}, but needs one weight for each of {rows} rows")
    found = []
    if not np.isfinite(values).all():
        found.append("sample_weight holds NaN or infinite values")
    elif (values > LARGEST).any():
        found.append(f"sample_weight holds values above {LARGEST:g}: divide all weights by the largest")
    if (values < 0).any():
        found.append("sample_weight holds negative values")
    if not found and not values.any():
        found.append("sample_weight is zero for every row, so that no row is left to learn from")
    if found:
        raise ValueError("; ".join(found))
    return values


def class_weights(class_weight: Mapping[Any, Any] | str, y: NDArray[Any], weight: Floats) -> Floats:
    """Return the class weight of every row.

    Args:
        class_weight: Weights by class, or ``"balanced"`` for Σw / (classes · Σw of the row's class).
        y: Classes.
        weight: Weights w of the rows.

    Raises:
        ValueError: Lists everything that is wrong with ``class_weight``.
    """
    classes, codes = np.unique(y, return_inverse=True)
    if isinstance(class_weight, Mapping):
        return _chosen_weights(class_weight, classes)[codes]
    if class_weight != "balanced":
        raise ValueError(f"class_weight must be a dict, 'balanced' or None, got {class_weight!r}")
    shares = np.bincount(codes, weights=weight)
    balanced = weight.sum() / ((shares > 0).sum() * np.where(shares > 0, shares, 1.0))
    return np.asarray(balanced[codes])


def _chosen_weights(class_weight: Mapping[Any, Any], classes: NDArray[Any]) -> Floats:
    found = [
        f"class_weight of {label!r} must be a non-negative number, got {value!r}"
        for label, value in class_weight.items()
        if not (isinstance(value, Real) and 0 <= float(value) < np.inf)
    ]
    if found:
        raise ValueError("; ".join(found))
    return np.array([class_weight.get(label, 1.0) for label in classes.tolist()], dtype=np.float64)
