"""Take a few steps of every variant, each in its own process, and read the allocator's peak."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from splitfg import (
    Backprop,
    CheckpointedBackprop,
    ForwardGradient,
    ForwardMode,
    FrozenTrunk,
    GradientLearner,
    LearnedFeedback,
    SplitFG,
)
from splitfg.estimators import Estimator
from splitfg.feedback import DeltaRule, Difference, LayerDifference, Relay
from splitfg.learners import CapturedLearner
from splitfg.recipes import Adam, FrozenMethod
from splitfg_lab.experiments._peaks import peaks, savings
from splitfg_lab.experiments._training import compiler
from splitfg_lab.experiments.images._build import TrainingBatches, make_split, precision, random_data
from splitfg_lab.experiments.images._presets import CIFAR10, CIFAR100
from splitfg_lab.experiments.images_memory import VARIANTS, ImageMemory
from splitfg_lab.runs import RunContext, RunError

Step = Callable[[], object]

_MIB = 2**20
# Optimizer state appears in the first step, and a captured step is captured in the fourth.
_BEFORE, _MEASURED = 3, 2
_K = 4
_BACKBONE: dict[str, Estimator] = {
    "backprop": Backprop(),
    "backprop-checkpointed": CheckpointedBackprop(),
    "learned": LearnedFeedback(probe=Difference()),
    "learned-layers": LearnedFeedback(Relay(DeltaRule(1.0)), LayerDifference()),
    "pure_fg-chunk1": ForwardGradient(_K, engine=ForwardMode(1)),
    "pure_fg-chunk4": ForwardGradient(_K, engine=ForwardMode()),
    "naive-chunk1": SplitFG(_K, engine=ForwardMode(1)),
    "naive-chunk4": SplitFG(_K, engine=ForwardMode()),
}
_LIGHT: dict[str, Estimator] = {
    "split_fg-chunk1": SplitFG(_K, engine=ForwardMode(1)),
    "split_fg-chunk4": SplitFG(_K, engine=ForwardMode()),
    "frozen": FrozenTrunk(),
    "flat-backprop": Backprop(),
    "flat-checkpointed": CheckpointedBackprop(blocks=("stem", "block")),
}


def run(config: ImageMemory, *, seed: int, run: RunContext) -> Mapping[str, float]:
    """Return the peak memory of every variant, and savings against backprop.

    Raises:
        RunError: There is no GPU (torch counts memory only there), or a variant is unknown.
    """
    unknown = [name for name in config.variants if name not in VARIANTS]
    if unknown:
        raise RunError(f"no variants are called {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    found = peaks(peak, config.variants, config, seed, run)
    return found | savings(found)


def peak(name: str, config: ImageMemory, seed: int, device: str) -> dict[str, float]:
    """Return the peak memory of a step, and the part of it above the memory between two steps, in MiB."""
    with precision(config.matmul):
        step = make_step(name, config, seed, torch.device(device))
        for _ in range(_BEFORE):
            step()
        resident = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(_MEASURED):
            step()
    highest = torch.cuda.max_memory_allocated(device)
    return {"mib": highest / _MIB, "beyond": (highest - resident) / _MIB}


def make_step(name: str, config: ImageMemory, seed: int, device: torch.device) -> Step:
    """Build a variant's training step: batch lookup, estimate, clipping, Adam."""
    setting = CIFAR10 if config.dataset == "cifar10" else CIFAR100
    network, taken = setting.light if name in _LIGHT else setting.backbone, _BEFORE + _MEASURED
    # network and batches are those of training; the method is not used
    training = replace(setting.training(FrozenMethod(), network, taken), batch=config.batch)
    data = random_data(config.dataset, config.images, device)
    split, batches = make_split(training, data, seed), TrainingBatches(training, data.train, seed)
    learner = GradientLearner(split, (_BACKBONE | _LIGHT)[name], Adam().build(split))
    generator = torch.Generator(device).manual_seed(seed)
    if config.step == "eager":
        return lambda: learner.step(*batches(learner.steps), generator=generator)
    fast = CapturedLearner(learner, horizon=taken, batches=batches, compile_=compiler(config.step, device))
    return lambda: fast.step(*fast.batch(fast.steps), generator=generator)
