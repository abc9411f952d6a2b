"""Train on four folds, measure on the fifth."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from splitfg.learners.hopfield import HopfieldReadout
from splitfg.recipes.tables import TableRecipe
from splitfg.training import Epochs
from splitfg.types import Learner
from splitfg_lab.data import data_digest
from splitfg_lab.experiments._training import fit_store
from splitfg_lab.experiments.tabular import Tabular
from splitfg_lab.experiments.tabular._fold import Fold, encode, load_fold
from splitfg_lab.experiments.tabular._references import Budget, ReferenceMethod
from splitfg_lab.runs import RunContext, RunError, fit

__all__ = ["Fold", "encode", "load_fold", "measure", "run"]

_ROWS_AT_ONCE = 8192
_CPU = torch.device("cpu")


def run(config: Tabular, *, seed: int, run: RunContext) -> Mapping[str, float]:
    """Train with one method and measure on held-out fold ``seed``.

    Raises:
        RunError: The seed is not the number of a fold.
    """
    if not 0 <= seed < config.folds:
        raise RunError(f"there is no fold {seed}: the seeds are the folds here, 0 to {config.folds - 1}")
    run.use_data({config.dataset: data_digest(config.dataset)})
    if isinstance(config.method, ReferenceMethod):
        return _fit_reference(config.method, config, load_fold(config.dataset, seed, config.folds, _CPU), run)
    return _train(config, load_fold(config.dataset, seed, config.folds, run.device), run)


def _train(config: Tabular, fold: Fold, run: RunContext) -> dict[str, float]:
    """Train a network step by step, or store the rows for a readout."""
    generator = torch.Generator(run.device).manual_seed(config.training_seed)
    steps = (config.optimizer, config.rho, config.clip, config.adaptive)
    recipe = TableRecipe(config.method, config.network, *steps)
    learner = recipe.build(fold.shape, generator)
    epochs = Epochs(len(fold.x), batch=config.batch, seed=config.training_seed)

    def take(chosen: Tensor) -> tuple[Tensor, Tensor]:
        here = chosen.to(run.device)
        return fold.x[here], fold.y[here]

    if isinstance(learner, HopfieldReadout):
        stored = fit_store(learner, take, epochs, steps=config.steps, generator=generator, run=run)
        return {**measure(learner, fold), **stored, "rows": fold.rows}
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
    return {**measure(learner, fold), "epochs": seen, "rows": fold.rows}


def measure(learner: Learner, fold: Fold) -> dict[str, float]:
    """Return the accuracy in %, or the RMSE, on the held-out rows."""
    outputs = torch.cat([learner.predict(part) for part in fold.test_x.split(_ROWS_AT_ONCE)])
    return fold.score(outputs if fold.classes is None else outputs.argmax(1))


def _fit_reference(method: ReferenceMethod, config: Tabular, fold: Fold, run: RunContext) -> dict[str, float]:
    """Fit a scikit-learn model on the CPU, on the same encoded rows."""
    from sklearn.exceptions import ConvergenceWarning

    run.note("scikit-learn fits in one call: an interrupted run starts again from the beginning")
    budget = Budget(len(fold.x), config.steps)
    model = method.model(fold.shape, budget, seed=config.training_seed)
    target = fold.y if fold.classes is not None else fold.y[:, 0]
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the report has the steps taken, the config the most
        model.fit(fold.x.numpy(), target.numpy())
    steps = method.steps_of(model, budget)
    backward = float(steps) if method.reverse_mode else 0.0
    run.count(steps=steps, seconds=time.perf_counter() - began, jvps=0.0, trunk_backward=backward)
    run.progress(steps, steps)
    predicted = torch.as_tensor(model.predict(fold.test_x.numpy()))
    return {**fold.score(predicted.reshape(fold.test_y.shape)), "rows": fold.rows}
