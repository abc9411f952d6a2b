"""Train with one method, or store the images, and measure accuracy on all test images.

A run records matrices for the report's figures: ``confusion`` (true class by assigned class, counts of test images, for
at most 20 classes), and with seed 0 ``filters_before`` and ``filters_after`` (the first 16 filters of the trunk's first
convolution, one row each: channels x height x width).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from splitfg import Split
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
from splitfg_lab.runs.loop import Batches

_IMAGES_AT_ONCE = 500
_MOST_CLASSES, _MOST_FILTERS = 20, 16


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
    for assigned, y in _assigned(learner, config, data, run):
        right += (assigned == y).sum()
    return {"accuracy": 100 * right.item() / len(data.test)}


def confusion(learner: Learner, config: ImageTraining, data: ImageData) -> list[list[float]]:
    """Return how many test images of each class (row) the learner assigns to each class (column)."""
    counts = torch.zeros(data.classes**2, dtype=torch.int64, device=data.test.device)
    for assigned, y in _assigned(learner, config, data):
        counts += torch.bincount(y * data.classes + assigned, minlength=data.classes**2)
    return [list(map(float, row)) for row in counts.view(data.classes, data.classes).tolist()]


def first_filters(split: Split) -> list[list[float]]:
    """Return the first filters of the trunk's first convolution, one row each; empty if the trunk has no stem."""
    stem = split.trunk_params().get("trunk.stem.conv.weight")
    if stem is None:
        return []
    rows = stem.detach()[:_MOST_FILTERS].flatten(1).tolist()
    return [[round(weight, 3) for weight in row] for row in rows]  # a picture shows no more


def _assigned(
    learner: Learner, config: ImageTraining, data: ImageData, run: RunContext | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the assigned and the true classes of all test images, batch by batch."""
    parts = torch.arange(len(data.test), device=data.test.device).split(_IMAGES_AT_ONCE)
    with evaluation_phase(run, "test images", len(parts)) as advance:
        for numbers in parts:
            x, y = data.test.take(numbers)
            yield learner.predict(as_read(config, x)).argmax(1), y
            advance()


def _record_confusion(learner: Learner, config: ImageTraining, data: ImageData, run: RunContext) -> None:
    if data.classes <= _MOST_CLASSES:
        run.record_matrix("confusion", confusion(learner, config, data))


def _record_filters(name: str, split: Split, seed: int, run: RunContext) -> None:
    filters = first_filters(split)
    if seed == 0 and filters:
        run.record_matrix(name, filters)


def _train(config: ImageTraining, data: ImageData, seed: int, run: RunContext) -> dict[str, float]:
    split, batches = make_split(config, data, seed), TrainingBatches(config, data.train, seed)
    _record_filters("filters_before", split, seed, run)
    learner, moved = make_learner(config, split, batches, run), Displacement(split)
    generator = torch.Generator(run.device).manual_seed(seed)

    def evaluate(learner: Learner) -> dict[str, float]:
        return {**accuracy(learner, config, data, run), "trunk_moved": moved()}

    given: Batches = batches
    if isinstance(learner, CapturedLearner):
        learner.check(*learner.batch(learner.steps), generator=generator)
        # comparing with eager code is no part of training
        run.memory = PeakMemory(run.device)
        given = learner.batch
    found = fit_budget(config, learner, given, generator=generator, run=run, evaluate=evaluate)
    _record_confusion(learner, config, data, run)
    _record_filters("filters_after", split, seed, run)
    return found


def _train_layers(
    config: ImageTraining, method: ForwardForwardMethod, data: ImageData, seed: int, run: RunContext
) -> dict[str, float]:
    learner = make_forward_forward(config, method, data, seed)
    generator = torch.Generator(run.device).manual_seed(seed)
    evaluate = partial(accuracy, config=config, data=data, run=run)
    batches = TrainingBatches(config, data.train, seed)
    found = fit_budget(config, learner, batches, generator=generator, run=run, evaluate=evaluate)
    _record_confusion(learner, config, data, run)
    return found


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
    _record_confusion(learner, config, data, run)
    return {**accuracy(learner, config, data), **stored}
