"""Train with one method after another and read the allocator's peak."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from splitfg import Backprop, CheckpointedBackprop, ForwardMode, GradientLearner, Split, SplitFG
from splitfg.estimators import Estimator
from splitfg.training import Epochs
from splitfg_lab.data import data_digest, load_table
from splitfg_lab.experiments.tabular.run import Fold, encode
from splitfg_lab.experiments.tabular_memory import TabularMemory
from splitfg_lab.runs import RunContext, RunError

_MIB = 2**20


@dataclass(frozen=True)
class Peaks:
    """Peaks of the allocator while one method trains, in MiB.

    Attributes:
        peak: The most memory allocated at once since training began, as the paper measures it.
        beyond: The peak beyond the memory that stays allocated between two steps.
        left: Memory that stays allocated after training: the work spaces of new threads.
    """

    peak: float
    beyond: float
    left: float


def run(config: TabularMemory, *, seed: int, run: RunContext) -> Mapping[str, float]:
    """Measure the methods on one data set.

    Raises:
        RunError: The device is not a GPU, whose allocator the measurement reads.
    """
    if run.device.type != "cuda":
        raise RunError("peak GPU memory can only be measured on a GPU: run this with --device cuda where there is one")
    data = _load(config, seed, run.device)
    run.use_data({config.dataset: data_digest(config.dataset)})
    # Split-FG comes first: autograd runs in its own thread, whose work space backprop alone needs and which stays
    # allocated after backprop has ended
    estimators: dict[str, Estimator] = {
        "split_fg": SplitFG(K=config.K, engine=ForwardMode(chunk=1)),
        "split_fg_at_once": SplitFG(K=config.K, engine=ForwardMode()),
        "backprop": Backprop(),
        "checkpointed": CheckpointedBackprop(),
    }
    _train(config, estimators[config.warm_up], data, seed, steps=1)
    metrics = {
        "epochs": config.steps * config.batch / len(data.x),
        "resident_mib": torch.cuda.memory_allocated(run.device) / _MIB,
    }
    for done, (name, estimator) in enumerate(estimators.items(), start=1):
        began = time.perf_counter()
        peaks = _train(config, estimator, data, seed, steps=config.steps)
        metrics |= {f"{name}_mib": peaks.peak, f"{name}_beyond_mib": peaks.beyond, f"{name}_left_mib": peaks.left}
        run.count(steps=config.steps, seconds=time.perf_counter() - began)
        run.progress(done, len(estimators))
    return {**metrics, "memsave_percent": 100 * (1 - metrics["split_fg_mib"] / metrics["backprop_mib"])}


def _load(config: TabularMemory, seed: int, device: torch.device) -> Fold:
    """Return all rows on the device: a random share to train on, the rest held out."""
    table = load_table(config.dataset)
    order = np.random.default_rng(seed).permutation(len(table.target))
    train, test = np.split(order, [round(config.train_fraction * len(order))])
    return encode(table, train, test, device)


def _train(config: TabularMemory, estimator: Estimator, data: Fold, seed: int, *, steps: int) -> Peaks:
    device = data.x.device
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    resident = _steps(config, estimator, data, seed, steps)
    peak, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    return Peaks(peak / _MIB, (peak - resident) / _MIB, (after - before) / _MIB)


def _steps(config: TabularMemory, estimator: Estimator, data: Fold, seed: int, steps: int) -> int:
    """Train, and return the bytes allocated after the first step, with gradients and the optimizer's state."""
    device, network = data.x.device, config.network
    generator = torch.Generator(device).manual_seed(seed)
    split = Split(network.trunk(data.shape.features, generator), network.build_head(data.shape, generator))
    optimizer = config.optimizer.build(split, rho=config.rho)
    learner = GradientLearner(split, estimator, optimizer, max_norm=config.clip)
    epochs = Epochs(len(data.x), batch=config.batch, seed=seed)
    resident = 0
    for step in range(steps):
        rows = epochs.rows(step).to(device)
        learner.step(data.x[rows], data.y[rows], generator=generator)
        del rows
        resident = resident or torch.cuda.memory_allocated(device)
    return resident
