"""Helpers of several experiments: budgets, compiled steps, precision, evaluation phases, trunk displacement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from splitfg import CosineWithWarmup, GradientLearner, LineSearch, Split
from splitfg.compiled import Compile, whole
from splitfg.learners.hopfield import HopfieldReadout
from splitfg.numerics import norm
from splitfg.recipes import MethodRecipe, OptimizerRecipe
from splitfg.training import Epochs
from splitfg.types import Learner, Params
from splitfg_lab.experiments._search import Search
from splitfg_lab.runs import RunContext, fit
from splitfg_lab.runs.context import Advance
from splitfg_lab.runs.loop import Batches, Evaluate

_LINES = 500


class Training(Protocol):
    """The fields that configs of training runs share."""

    @property
    def method(self) -> Any:
        """The method: a :class:`~splitfg.recipes.MethodRecipe`, or another method that the experiment supports."""

    @property
    def optimizer(self) -> OptimizerRecipe:
        """The optimizer."""

    @property
    def rho(self) -> float:
        """Trunk step scale."""

    @property
    def warmup(self) -> int:
        """Steps of the linear warmup."""

    @property
    def max_norm(self) -> float:
        """Clipping bound."""

    @property
    def clip_apart(self) -> bool:
        """Whether to clip trunk and head separately."""

    @property
    def adaptive(self) -> bool:
        """Whether a line search finds the trunk step scale."""

    @property
    def adaptive_groups(self) -> tuple[str, ...]:
        """Patterns of parameters that the line search scales apart."""

    @property
    def search(self) -> Search:
        """How the line search begins."""

    @property
    def steps(self) -> int:
        """Optimizer steps."""

    @property
    def evaluations(self) -> int:
        """Number of evaluations."""

    @property
    def checkpoints(self) -> int:
        """Number of checkpoints."""


def gradient_learner(config: Training, split: Split, *, horizon: int, run: RunContext | None = None) -> GradientLearner:
    """Build the eager learner of a config, with a learning rate annealed over ``horizon`` steps.

    The processes of ``run``, if there are several, divide the rows of its batches.
    """
    assert isinstance(config.method, MethodRecipe)
    estimator, begin = config.method.build(), config.search
    search = LineSearch(groups=config.adaptive_groups, start=begin.start, calm=begin.calm)
    return GradientLearner(
        split,
        estimator if run is None else run.spread(estimator),
        config.optimizer.build(split, rho=config.rho),
        schedule=CosineWithWarmup(horizon, config.warmup),
        max_norm=config.max_norm,
        clip_apart=config.clip_apart,
        line_search=search if config.adaptive else None,
    )


def fit_budget(
    config: Training,
    learner: Learner,
    batches: Batches,
    *,
    generator: torch.Generator,
    run: RunContext,
    evaluate: Evaluate,
) -> dict[str, float]:
    """Train for the steps of the config, with its numbers of evaluations and checkpoints."""
    return fit(
        learner,
        batches,
        steps=config.steps,
        generator=generator,
        run=run,
        evaluate=evaluate,
        evaluate_every=max(1, config.steps // max(1, config.evaluations)),
        checkpoint_every=max(1, config.steps // max(1, config.checkpoints)),
        log_every=max(1, config.steps // _LINES),
    )


def fit_store(
    learner: HopfieldReadout,
    take: Callable[[Tensor], tuple[Tensor, Tensor]],
    epochs: Epochs,
    *,
    steps: int,
    generator: torch.Generator,
    run: RunContext,
) -> dict[str, float]:
    """Store each sample at most once, within the budget, and tune the readout on the stored samples.

    ``take`` returns x and y of the samples with the given indices, a CPU tensor.
    """
    steps = min(steps, epochs.steps)
    fit(
        learner,
        lambda step: take(epochs.once(step)),
        steps=steps,
        generator=generator,
        run=run,
        checkpoint_every=steps,
    )
    learner.tune(generator=generator)
    return {
        "stored": learner.stored,
        "beta": learner.beta,
        "standardise": learner.scaling.standardise,
        "unit": learner.scaling.unit,
    }


def compiler(step: str, device: torch.device) -> Compile | None:
    """Return the compiler for a step; ``None`` on a CPU, where compiling takes longer than it saves."""
    return whole if step == "compiled" and device.type == "cuda" else None


@contextmanager
def evaluation_phase(run: RunContext | None, name: str, total: int) -> Iterator[Advance]:
    """Show a bar for an evaluation of ``total`` parts and let Ctrl-C interrupt it; without a run, do neither."""
    if run is None:
        yield lambda: None
        return
    with run.phase(name, total) as advance:
        yield advance


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Set the precision of float32 matrix products within the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Displacement:
    """‖θ - θ₀‖ / ‖θ₀‖ of the trunk, with θ₀ its parameters at construction, copied to the CPU.

    Args:
        split: The network.
    """

    def __init__(self, split: Split) -> None:
        self._split = split
        self._start = self._trunk()
        self._size = norm(self._start)

    def __call__(self) -> float:
        """Compute the relative displacement."""
        now = self._trunk()
        return (norm({name: now[name] - p for name, p in self._start.items()}) / self._size).item()

    def _trunk(self) -> Params:
        return {name: _copy(p) for name, p in self._split.trunk_params().items()}


def _copy(p: Tensor) -> Tensor:
    return p.detach().to("cpu", copy=True)
