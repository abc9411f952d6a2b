"""Train with one method after another and read the allocator's peak."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

from splitfg import Backprop, CheckpointedBackprop, ForwardMode, GradientLearner, Split, SplitFG
from splitfg.data import load_table
from splitfg.estimators import Estimator
from splitfg.experiments.tabular.run import Fold, encode
from splitfg.experiments.tabular_memory import TabularMemory
from splitfg.runs import RunContext, RunError
from splitfg.sklearn._batches import Epochs
from splitfg.sklearn._learners import make_head, make_trunk

_MIB = 2**20


def run(config: TabularMemory, *, seed: int, run: RunContext) -> Mapping[str, float]:
    """Measure the three methods on one data set.

    Raises:
        RunError: There is no GPU, whose allocator is what the measurement reads.
    """
    if run.device.type != "cuda":
        raise RunError("peak GPU memory can only be measured on a GPU: run this with --device cuda where there is one")
    data = _load(config, seed, run.device)
    # cuBLAS allocates its workspace at the first product: it belongs to all methods, not to the first
    _train(config, Backprop(), data, seed, steps=1)
    estimators: dict[str, Estimator] = {
        "backprop": Backprop(),
        "checkpointed": CheckpointedBackprop(),
        "split_fg": SplitFG(K=config.K, engine=ForwardMode(chunk=1)),
    }
    metrics = {"epochs": config.steps * config.batch / len(data.x)}
    for done, (name, estimator) in enumerate(estimators.items()):
        began = time.perf_counter()
        torch.cuda.reset_peak_memory_stats(run.device)
        metrics["resident_mib"] = torch.cuda.memory_allocated(run.device) / _MIB
        _train(config, estimator, data, seed, steps=config.steps)
        metrics[f"{name}_mib"] = torch.cuda.max_memory_allocated(run.device) / _MIB
        run.count(steps=config.steps, seconds=time.perf_counter() - began)
        run.progress(done + 1, len(estimators))
    return {**metrics, "memsave_percent": 100 * (1 - metrics["split_fg_mib"] / metrics["backprop_mib"])}


def _load(config: TabularMemory, seed: int, device: torch.device) -> Fold:
    """All rows on the device: a random share to train on, the rest held out."""
    table = load_table(config.dataset)
    order = np.random.default_rng(seed).permutation(len(table.target))
    train, test = np.split(order, [round(config.train_fraction * len(order))])
    return encode(table, train, test, device)


def _train(config: TabularMemory, estimator: Estimator, data: Fold, seed: int, *, steps: int) -> None:
    generator = torch.Generator(data.x.device).manual_seed(seed)
    network = config.network
    split = Split(make_trunk(network, data.shape, generator), make_head(network, data.shape, generator))
    optimizer = config.optimizer.build(split, rho=config.rho)
    learner = GradientLearner(split, estimator, optimizer, max_norm=config.clip)
    epochs = Epochs(len(data.x), batch=config.batch, seed=seed)
    for step in range(steps):
        rows = epochs.rows(step).to(data.x.device)
        learner.step(data.x[rows], data.y[rows], generator=generator)
