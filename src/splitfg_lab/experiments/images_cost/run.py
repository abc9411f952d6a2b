"""Time training steps of image presets in one process, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count

import torch

from splitfg.errors import SplitError
from splitfg.learners import CapturedLearner
from splitfg.recipes import ForwardForwardMethod
from splitfg_lab.experiments.images import EXPERIMENT as IMAGES
from splitfg_lab.experiments.images._build import (
    TrainingBatches,
    make_forward_forward,
    make_learner,
    make_split,
    precision,
    random_data,
)
from splitfg_lab.experiments.images._config import ImageTraining
from splitfg_lab.experiments.images_cost import NETWORKS, ImageCost
from splitfg_lab.runs import RunContext, RunError

Step = Callable[[], object]

_STEPS_BETWEEN_CLOCKS = 10
_REVERSE = ("flat-backprop", "cifar10-backprop")


def run(config: ImageCost, *, seed: int, run: RunContext) -> Mapping[str, float]:
    """Return milliseconds per step of every variant, and ratios to backprop on the same network.

    Raises:
        RunError: A variant is not a preset of ``images``.
    """
    known = {preset.name for preset in IMAGES.presets}
    unknown = [name for name in config.variants if name not in known]
    if unknown:
        raise RunError(f"not presets of images: {', '.join(unknown)}; `splitfg ls images` lists them")
    found = _in_turns(config, seed, run)
    return found | ratios(found)


def ratios(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return every time divided by that of backprop on the same network, where both are there."""
    pairs = [(name, reference) for reference, group in NETWORKS.items() for name in group]
    found = [(name, metrics.get(f"ms/{name}"), metrics.get(f"ms/{reference}")) for name, reference in pairs]
    return {f"ratio/{name}": ours / theirs for name, ours, theirs in found if ours is not None and theirs is not None}


def _in_turns(config: ImageCost, seed: int, run: RunContext) -> dict[str, float]:
    """Time all variants in turns, so that slow periods of the machine affect all of them."""
    trainings = {name: _training(name, config) for name in config.variants}
    steps: dict[str, Step] = {}
    # all variants compile the same few functions, more often than torch's default limit allows
    with torch._dynamo.config.patch(recompile_limit=256):
        for i, (name, training) in enumerate(trainings.items()):
            run.progress(i, len(trainings))
            try:
                with precision(training.matmul):
                    steps[name] = _warm(training, config, seed, run.device)
            except (RuntimeError, SplitError) as error:
                # a variant that does not fit or compile must not stop the others
                run.note(f"{name} was not timed: {error}")
        blocks: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(config.blocks):
            for name, step in steps.items():
                with precision(trainings[name].matmul):
                    seconds, taken = _time_block(step, config, run.device)
                blocks[name].append(1e3 * seconds / taken)
                run.count(steps=taken, seconds=seconds, trunk_backward=taken if name in _REVERSE else 0)
    return {f"ms/{name}": statistics.median(times) for name, times in blocks.items()}


def _training(name: str, config: ImageCost) -> ImageTraining:
    training = IMAGES.preset(name).config
    assert isinstance(training, ImageTraining)
    most = config.warmup + config.blocks * (config.steps + _STEPS_BETWEEN_CLOCKS)
    return replace(training, steps=most, batch=config.batch)


def _warm(training: ImageTraining, config: ImageCost, seed: int, device: torch.device) -> Step:
    step = _make_step(training, config, seed, device)
    for _ in range(config.warmup):
        step()
    return step


def _make_step(training: ImageTraining, config: ImageCost, seed: int, device: torch.device) -> Step:
    data = random_data("cifar10", config.images, device)
    batches = TrainingBatches(training, data.train, seed)
    generator = torch.Generator(device).manual_seed(seed)
    if isinstance(training.method, ForwardForwardMethod):
        local, numbers = make_forward_forward(training, training.method, data, seed), count()
        return lambda: local.step(*batches(next(numbers)), generator=generator)
    learner = make_learner(training, make_split(training, data, seed), batches)
    given = learner.batch if isinstance(learner, CapturedLearner) else batches
    return lambda: learner.step(*given(learner.steps), generator=generator)


def _time_block(step: Step, config: ImageCost, device: torch.device) -> tuple[float, int]:
    """Return the seconds of one block and the number of its steps."""
    _synchronise(device)
    began, taken = time.perf_counter(), 0
    while taken < config.steps and time.perf_counter() - began < config.seconds:
        for _ in range(min(_STEPS_BETWEEN_CLOCKS, config.steps - taken)):
            step()
            taken += 1
        _synchronise(device)
    return time.perf_counter() - began, taken


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
