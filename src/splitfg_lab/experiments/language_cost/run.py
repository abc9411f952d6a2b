"""Measure the peak memory of every variant's step, or time all variants in turns."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from splitfg import (
    Backprop,
    CheckpointedBackprop,
    DirectPath,
    EvolutionStrategy,
    ForwardGradient,
    ForwardMode,
    FrozenTrunk,
    GradientLearner,
    LearnedFeedback,
    MeanJacobian,
    ParallelPull,
    SplitFG,
)
from splitfg.errors import SplitError
from splitfg.estimators import Estimator
from splitfg.feedback import DeltaRule, Difference, LayerDifference, Relay
from splitfg.learners import CapturedLearner
from splitfg.recipes import SGD, Adam, AdamW, FrozenMethod, Muon, OptimizerRecipe
from splitfg_lab.data.device import DeviceWindows
from splitfg_lab.experiments._peaks import peaks, savings
from splitfg_lab.experiments._training import compiler, matmul_precision
from splitfg_lab.experiments.language import Language
from splitfg_lab.experiments.language._build import load_corpus, make_split
from splitfg_lab.experiments.language_cost import Cost
from splitfg_lab.runs import RunContext, RunError

Step = Callable[[], object]

_MIB = 2**20
# Optimizer state appears in the first step, and a captured step is captured in the fourth.
_BEFORE, _MEASURED = 3, 2
_LR = 1e-6
_OPTIMIZERS: dict[str | None, OptimizerRecipe] = {
    None: Adam(lr=_LR),
    "adamw": AdamW(lr=_LR),
    "sgd": SGD(lr=_LR),
    "muon": Muon(lr=_LR),
}
_TANGENTS = re.compile(r"(split_fg|fg|es)-k(\d+)(?:-chunk(\d+))?(?:-block(\d+))?(-lean)?(?:-(adamw|sgd|muon))?")
_BACKPROPS: dict[str, Estimator] = {
    "backprop": Backprop(),
    "backprop-chunked": Backprop(closed_head=True),
    "backprop-checkpointed": CheckpointedBackprop(),
    "backprop-both": CheckpointedBackprop(closed_head=True),
}
_EXACT: dict[str, Estimator] = {**_BACKPROPS, "frozen": FrozenTrunk()}
_LADDER: dict[str, Callable[[], Estimator]] = {
    "direct": DirectPath,
    "maps": lambda: DirectPath(feedback=MeanJacobian()),
    "pull-identity": ParallelPull,
    "pull-maps": lambda: ParallelPull(feedback=MeanJacobian()),
    "pull2-maps": lambda: ParallelPull(feedback=MeanJacobian(), pulls=2),
    "pull-maps-blocks": lambda: ParallelPull(feedback=MeanJacobian(), group=2),
    "pull2-maps-blocks": lambda: ParallelPull(feedback=MeanJacobian(), pulls=2, group=2),
    "pull4-maps": lambda: ParallelPull(feedback=MeanJacobian(), pulls=4),
    "learned": lambda: LearnedFeedback(probe=Difference()),
    "learned-layers": lambda: LearnedFeedback(Relay(DeltaRule(1.0)), LayerDifference()),
    "learned-every4": lambda: LearnedFeedback(Relay(every=4), Difference()),
}


def run(config: Cost, *, seed: int, run: RunContext) -> Mapping[str, float]:
    """Return milliseconds or MiB of every variant, and ratios or savings against backprop."""
    if config.measure == "memory":
        found = peaks(peak, config.variants, config, seed, run)
        return found | savings(found)
    times = _times(config, seed, run)
    return times | slowdowns(times)


def _times(config: Cost, seed: int, run: RunContext) -> dict[str, float]:
    """Return the median milliseconds of every variant's step."""
    steps: dict[str, Step] = {}
    # all variants compile the same few functions, more often than torch's default limit allows
    with matmul_precision(config.matmul), torch._dynamo.config.patch(recompile_limit=256):
        for i, name in enumerate(config.variants):
            run.progress(i, len(config.variants))
            try:
                steps[name] = _warm(name, config, seed, run.device)
            except (RuntimeError, SplitError) as error:
                # a variant that does not fit or compile must not stop the others
                run.note(f"{name} was not timed: {error}")
        return {f"ms/{name}": ms for name, ms in _in_turns(steps, config, run).items()}


def peak(name: str, config: Cost, seed: int, device: str) -> dict[str, float]:
    """Return the peak memory of a step, in MiB."""
    with matmul_precision(config.matmul):
        step = _warm(name, config, seed, torch.device(device))
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(_MEASURED):
            step()
    return {"mib": torch.cuda.max_memory_allocated(device) / _MIB}


def _warm(name: str, config: Cost, seed: int, device: torch.device) -> Step:
    """Return the step of a variant, compiled and ready to be captured."""
    gc.collect()
    step = _make(name, config, seed, device)
    for _ in range(_BEFORE):
        step()
    return step


@dataclass(frozen=True)
class Variant:
    """The settings in a variant's name: estimator, optimizer, and the number of logits at once.

    Attributes:
        block: The number of logits at once is 2 to this power.
        tied: Whether the token table is trained as lookup, as backprop does.
    """

    estimator: Estimator
    block: int
    optimizer: OptimizerRecipe = field(default_factory=lambda: Adam(lr=_LR))
    tied: Literal["exclude", "include"] = "exclude"


def parse(name: str, block: int) -> Variant:
    """Return the variant of that name; ``block`` is the default of its ``block``.

    Raises:
        RunError: There is no such variant.
    """
    if name in _EXACT:
        return Variant(_EXACT[name], block)
    if name in _LADDER:
        return Variant(_LADDER[name](), block, tied="include")
    found = _TANGENTS.fullmatch(name)
    if found is None:
        others = "split_fg-kK-chunkC[-blockB][-lean], fg-kK-chunkC or es-kK, and -adamw, -sgd or -muon behind if wanted"
        known = ", ".join((*_EXACT, *_LADDER))
        raise RunError(f"no variant is called {name!r}; there are {known} and {others}")
    method, K, chunk, own_block, lean, optimizer = found.groups()
    engine = ForwardMode(None if chunk is None else int(chunk))
    estimators: dict[str, Estimator] = {
        "split_fg": SplitFG(int(K), engine=engine, lean=lean is not None),
        "fg": ForwardGradient(int(K), engine=engine),
        "es": EvolutionStrategy(int(K)),
    }
    return Variant(estimators[method], int(own_block or block), _OPTIMIZERS[optimizer])


def slowdowns(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return every time divided by backprop's; empty without backprop."""
    reference = metrics.get("ms/backprop")
    if reference is None:
        return {}
    return {f"ratio/{name.removeprefix('ms/')}": value / reference for name, value in metrics.items()}


def _make(name: str, config: Cost, seed: int, device: torch.device) -> Step:
    """Build a variant's training step."""
    variant = parse(name, config.block)
    language = Language(FrozenMethod(), model=config.model, corpus="synthetic", block=2**variant.block)
    language = replace(language, tied=variant.tied)
    split, taken = make_split(language, seed, device), _BEFORE + _MEASURED + config.blocks * config.steps
    windows = DeviceWindows(load_corpus(language).train, batch=config.batch, steps=taken, device=device)
    learner = GradientLearner(split, variant.estimator, variant.optimizer.build(split, rho=0.1))
    generator = torch.Generator(device).manual_seed(seed)
    if config.step == "eager":
        return lambda: learner.step(*windows(learner.steps), generator=generator)
    fast = CapturedLearner(learner, horizon=taken, batches=windows, compile_=compiler(config.step, device))
    return lambda: fast.step(*fast.batch(fast.steps), generator=generator)


def _in_turns(steps: Mapping[str, Step], config: Cost, run: RunContext) -> dict[str, float]:
    """Return the median milliseconds of a step; the variants take turns, so that slow periods affect all."""
    blocks: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(config.blocks):
        for name, step in steps.items():
            seconds = _timed(step, config.steps, run.device)
            estimator = parse(name, config.block).estimator
            jvps = estimator.K if isinstance(estimator, SplitFG | ForwardGradient) else int("maps" in name)
            backward = config.steps if name in _BACKPROPS else 0
            run.count(steps=config.steps, seconds=seconds, jvps=jvps * config.steps, trunk_backward=backward)
            blocks[name].append(1e3 * seconds / config.steps)
    return {name: statistics.median(times) for name, times in blocks.items()}


def _timed(step: Step, count: int, device: torch.device) -> float:
    """Return the seconds that ``count`` steps take."""
    _synchronise(device)
    began = time.perf_counter()
    for _ in range(count):
        step()
    _synchronise(device)
    return time.perf_counter() - began


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
