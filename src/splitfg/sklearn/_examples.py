"""Examples to learn from: rows, targets and weights, in an order that does not depend on how they came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from splitfg.sklearn.encoding import Floats, Rows

# Whole-number weights are carried out as repetitions up to this many times the rows.
_MOST_REPEATED = 10


@dataclass(frozen=True)
class Examples:
    """Rows of a table with their targets, and weights unless all count the same."""

    table: pd.DataFrame
    target: NDArray[Any]
    weight: Floats | None = None

    def __len__(self) -> int:
        return len(self.target)

    def take(self, rows: Rows) -> Examples:
        """These rows, in this order."""
        weight = None if self.weight is None else self.weight[rows]
        return Examples(self.table.iloc[rows], self.target[rows], weight)

    def canonical(self) -> Examples:
        """The same examples sorted by their content: equal sets of examples give equal results."""
        key = pd.util.hash_pandas_object(self.table, index=False).to_numpy()
        return self.take(np.lexsort((self.target, key)))

    def weighted(self) -> Examples:
        """Rows of weight zero left out, whole-number weights carried out as repetitions."""
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
    """Weights as an array, ``None`` as it is.

    Raises:
        ValueError: Lists everything that is wrong with them.
    """
    if weight is None:
        return None
    values = np.array(weight, dtype=np.float64)
    if values.shape != (rows,):
        raise ValueError(f"sample_weight has shape {values.shape}, but one weight for each of {rows} rows is wanted")
    found = []
    if not np.isfinite(values).all():
        found.append("sample_weight holds NaN or infinite values")
    if (values < 0).any():
        found.append("sample_weight holds negative values")
    if not found and not values.any():
        found.append("sample_weight is zero for every row, so there is nothing to learn from")
    if found:
        raise ValueError("; ".join(found))
    return values
