"""One fold of a data set: training and held-out rows, encoded by the training rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from splitfg.recipes.tables import TableShape
from splitfg.sklearn.encoding import Rows, TableEncoding, TargetScale
from splitfg_lab.data import Table, load_table
from splitfg_lab.data.folds import folds


@dataclass(frozen=True)
class Fold:
    """Encoded training and held-out rows on the device, and the number of classes."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int | None

    @property
    def shape(self) -> TableShape:
        """Features and classes."""
        return TableShape(self.x.shape[1], self.classes)

    @property
    def rows(self) -> int:
        """Rows of the whole table."""
        return len(self.x) + len(self.test_x)

    def score(self, predicted: Tensor) -> dict[str, float]:
        """Return the accuracy in %, or the RMSE, on the held-out rows.

        Args:
            predicted: Classes of shape ``(n,)``, or values of shape ``(n, 1)``.
        """
        if self.classes is None:
            return {"rmse": (predicted - self.test_y).square().mean().sqrt().item()}
        return {"accuracy": 100 * (predicted == self.test_y).double().mean().item()}


@functools.lru_cache(maxsize=1)  # runs of one process often share a fold
def load_fold(dataset: str, fold: int, count: int, device: torch.device) -> Fold:
    """Load a data set and return one of ``count`` folds of it."""
    table = load_table(dataset)
    return encode(table, *folds(table, count=count)[fold], device)


def encode(table: Table, train: Rows, test: Rows, device: torch.device) -> Fold:
    """Encode and scale training and held-out rows of a table by the training rows."""
    features = _by_appearance(table)
    encoding = TableEncoding.fit(features.iloc[train], categorical=table.categorical)
    target = table.target
    if table.task == "regression":
        target = TargetScale.fit(target[train]).transform(target)[:, None]

    def tensors(rows: Rows) -> tuple[Tensor, Tensor]:
        x = encoding.transform(features.iloc[rows])
        return torch.as_tensor(x, device=device), torch.as_tensor(target[rows], device=device)

    return Fold(*tensors(train), *tensors(test), len(table.classes) or None)


def _by_appearance(table: Table) -> pd.DataFrame:
    """Return the features with categories in the order in which they first appear; see the protocol."""
    ordered = {}
    for column in table.categorical:
        labels = table.features[column]
        ordered[column] = pd.Categorical(labels, categories=labels.dropna().unique(), ordered=True)
    return table.features.assign(**ordered)
