"""Cross-validation folds of a table."""

from __future__ import annotations

import numpy as np

from splitfg.sklearn.encoding import Rows
from splitfg_lab.data._load import Table


def folds(table: Table, *, count: int = 5, seed: int = 0) -> list[tuple[Rows, Rows]]:
    """Return the training and held-out rows of every fold: shuffled, and stratified by class."""
    from sklearn.model_selection import KFold, StratifiedKFold

    kind = KFold if table.task == "regression" else StratifiedKFold
    splitter = kind(n_splits=count, shuffle=True, random_state=seed)
    return list(splitter.split(np.zeros(len(table.target)), table.target))
