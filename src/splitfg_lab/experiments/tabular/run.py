"""Train on four folds, measure on the fifth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from splitfg.learners.hopfield import HopfieldReadout
from splitfg.recipes.tables import TableRecipe, TableShape
from splitfg.sklearn.encoding import Rows, TableEncoding, TargetScale
from splitfg.training import Epochs
from splitfg.types import Learner
from splitfg_lab.data import Table, load_table
from splitfg_lab.data.folds import folds
from splitfg_lab.experiments._training import fit_store
from splitfg_lab.experiments.tabular import Tabular
from splitfg_lab.runs import RunContext, RunError, fit

_ROWS_AT_ONCE = 8192


@dataclass(frozen=True)
class Fold:
    """Encoded training and held-out rows on the device, and how many classes there are."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int | None

    @property
    def shape(self) -> TableShape:
        """Features and classes."""
        return TableShape(self.x.shape[1], self.classes)


def run(config: Tabular, *, seed: int, run: RunContext) -> Mapping[str, float]:
    """Train with one method and measure on held-out fold ``seed``."""
    if not 0 <= seed < config.folds:
        raise RunError(f"there is no fold {seed}: the seeds are the folds here, 0 to {config.folds - 1}")
    fold = load_fold(config.dataset, seed, config.folds, run.device)
    generator = torch.Generator(run.device).manual_seed(config.training_seed)
    recipe = TableRecipe(config.method, config.network, config.optimizer, config.rho, config.clip)
    learner = recipe.build(fold.shape, generator)
    rows = len(fold.x) + len(fold.test_x)
    epochs = Epochs(len(fold.x), batch=config.batch, seed=config.training_seed)

    def take(chosen: Tensor) -> tuple[Tensor, Tensor]:
        here = chosen.to(run.device)
        return fold.x[here], fold.y[here]

    if isinstance(learner, HopfieldReadout):
        stored = fit_store(learner, take, epochs, steps=config.steps, generator=generator, run=run)
        return {**measure(learner, fold), **stored, "rows": rows}
    fit(
        learner,
        lambda step: take(epochs.rows(step)),
        steps=config.steps,
        generator=generator,
        run=run,
        checkpoint_every=100,
        log_every=10,
    )
    seen = config.steps * epochs.batch / len(fold.x)
    return {**measure(learner, fold), "epochs": seen, "rows": rows}


def measure(learner: Learner, fold: Fold) -> dict[str, float]:
    """Accuracy in % or RMSE on the held-out rows."""
    outputs = torch.cat([learner.predict(part) for part in fold.test_x.split(_ROWS_AT_ONCE)])
    if fold.classes is None:
        return {"rmse": (outputs - fold.test_y).square().mean().sqrt().item()}
    return {"accuracy": 100 * (outputs.argmax(1) == fold.test_y).double().mean().item()}


def load_fold(dataset: str, fold: int, count: int, device: torch.device) -> Fold:
    """One fold of a data set."""
    table = load_table(dataset)
    return encode(table, *folds(table, count=count)[fold], device)


def encode(table: Table, train: Rows, test: Rows, device: torch.device) -> Fold:
    """Training and held-out rows of a table, encoded and scaled by the training rows."""
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
    """The features, categories ordered as they first appear in the table, which the paper's numbers speak for."""
    ordered = {}
    for column in table.categorical:
        labels = table.features[column]
        ordered[column] = pd.Categorical(labels, categories=labels.dropna().unique(), ordered=True)
    return table.features.assign(**ordered)
