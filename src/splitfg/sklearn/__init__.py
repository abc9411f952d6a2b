"""Estimators for tables with scikit-learn's contract: ``SplitFGClassifier`` and ``SplitFGRegressor``.

Importing this package imports neither torch nor scikit-learn; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitfg.sklearn._classifier import SplitFGClassifier
    from splitfg.sklearn._regressor import SplitFGRegressor

__all__ = ["SplitFGClassifier", "SplitFGRegressor"]

_HOMES = {"SplitFGClassifier": "_classifier", "SplitFGRegressor": "_regressor"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'splitfg.sklearn' has no attribute {name!r}")
    return getattr(importlib.import_module(f"splitfg.sklearn.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
