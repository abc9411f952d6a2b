"""Train with one method, or store the images, and measure accuracy on all test images."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from splitfg.learners import CapturedLearner
from splitfg.recipes import ForwardForwardMethod, HopfieldMethod
from splitfg.training import Epochs
from splitfg.types import Learner
from splitfg_lab.data import data_digest
from splitfg_lab.experiments._training import Displacement, evaluation_phase, fit_budget, fit_store
from splitfg_lab.experiments.images._build import (
    ImageData,
    TrainingBatches,
    as_read,
    load_data,
    make_forward_forward,
    make_learner,
    make_readout,
    make_split,
    precision,
)
from splitfg_lab.experiments.images._config import ImageTraining
from splitfg_lab.runs import RunContext
from splitfg_lab.runs.environment import PeakMemory

_IMAGES_AT_ONCE = 500


def run(config: ImageTraining, *, seed: int, run: RunContext) -> Mapping[str, float]:
    """Run one cell of the tables."""
    data = load_data(config, run.device)
    if config.dataset != "synthetic":
        run.use_data({config.dataset: data_digest(config.dataset)})
    with precision(config.matmul):
        match config.method:
            case HopfieldMethod():
                return _store(config, config.method, data, seed, run)
            case ForwardForwardMethod():
                return _train_layers(config, config.method, data, seed, run)
            case _:
                return _train(config, data, seed, run)


def accuracy(
    learner: Learner, config: ImageTraining, data: ImageData, run: RunContext | None = None
) -> dict[str, float]:
    """Compute the share of all test images whose class has the largest score, in %."""
    right = torch.zeros((), dtype=torch.int64, device=data.test.device)
    parts = torch.arange(len(data.test), device=data.test.device).split(_IMAGES_AT_ONCE)
    with evaluation_phase(run, "test images", len(parts)) as advance:
        for numbers in parts:
            x, y = data.test.take(numbers)
            right += (learner.predict(as_read(config, x)).argmax(1) == y).sum()
            advance()
    return {"accuracy": 100 * right.item() / len(data.test)}


def _train(config: ImageTraining, data: ImageData, seed: int, run: RunContext) -> dict[str, float]:
    split, batches = make_split(config, data, seed), TrainingBatches(config, data.train, seed)
    learner, moved = make_learner(config, split, batches), Displacement(split)
    generator = torch.Generator(run.device).manual_seed(seed)

    def evaluate(learner: Learner) -> dict[str, float]:
        return {**accuracy(learner, config, data, run), "trunk_moved": moved()}

    if not isinstance(learner, CapturedLearner):
        return fit_budget(config, learner, batches, generator=generator, run=run, evaluate=evaluate)
    learner.check(*learner.batch(learner.steps), generator=generator)
    # what comparing with eager code takes is no part of training
    run.memory = PeakMemory(run.device)
    return fit_budget(config, learner, learner.batch, generator=generator, run=run, evaluate=evaluate)


def _train_layers(
    config: ImageTraining, method: ForwardForwardMethod, data: ImageData, seed: int, run: RunContext
) -> dict[str, float]:
    learner = make_forward_forward(config, method, data, seed)
    generator = torch.Generator(run.device).manual_seed(seed)
    evaluate = partial(accuracy, config=config, data=data, run=run)
    batches = TrainingBatches(config, data.train, seed)
    return fit_budget(config, learner, batches, generator=generator, run=run, evaluate=evaluate)


def _store(
    config: ImageTraining, method: HopfieldMethod, data: ImageData, seed: int, run: RunContext
) -> dict[str, float]:
    """Store every training image as it is, once; choose the readout's settings on stored images."""
    learner = make_readout(config, method, data, seed)
    generator = torch.Generator(run.device).manual_seed(seed)
    epochs = Epochs(len(data.train), batch=config.batch, seed=seed)

    def take(numbers: Tensor) -> tuple[Tensor, Tensor]:
        x, y = data.train.take(numbers.to(run.device))
        return as_read(config, x), y

    stored = fit_store(learner, take, epochs, steps=config.steps, generator=generator, run=run)
    return {**accuracy(learner, config, data, run), **stored}
