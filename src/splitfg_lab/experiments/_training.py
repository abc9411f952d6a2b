"""What several experiments train with: budgets, compiled steps, a chosen precision, the trunk's path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from splitfg import CosineWithWarmup, GradientLearner, Split
from splitfg.compiled import Compile, whole
from splitfg.learners.hopfield import HopfieldReadout
from splitfg.numerics import norm
from splitfg.recipes import MethodRecipe, OptimizerRecipe
from splitfg.training import Epochs
from splitfg.types import Learner, Params
from splitfg_lab.runs import RunContext, fit
from splitfg_lab.runs.loop import Batches, Evaluate

_LINES = 500


class Training(Protocol):
    """What configs of training runs have in common."""

    @property
    def method(self) -> Any:
        """Where gradients come from: a :class:`~splitfg.recipes.MethodRecipe`, of those that can be trained here."""

    @property
    def optimizer(self) -> OptimizerRecipe:
        """How gradients become steps."""

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
        """Whether trunk and head are clipped each by itself."""

    @property
    def steps(self) -> int:
        """Optimizer steps."""

    @property
    def evaluations(self) -> int:
        """How often the run is measured."""

    @property
    def checkpoints(self) -> int:
        """How often it is saved."""


def gradient_learner(config: Training, split: Split, *, horizon: int) -> GradientLearner:
    """The eager learner of a config, its learning rate annealed over ``horizon`` steps."""
    assert isinstance(config.method, MethodRecipe)
    return GradientLearner(
        split,
        config.method.build(),
        config.optimizer.build(split, rho=config.rho),
        schedule=CosineWithWarmup(horizon, config.warmup),
        max_norm=config.max_norm,
        clip_apart=config.clip_apart,
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
    """Train for the config's budget, evaluated, saved and logged as often as it says."""
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
    """Store each sample at most once, within the budget, and choose the readout's settings on what is stored.

    ``take`` gives x and y of the samples whose numbers, on the CPU, ``epochs`` has put in order.
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
    """What compiles a step: nothing without a GPU, where compiling takes longer than it saves."""
    return whole if step == "compiled" and device.type == "cuda" else None


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """float32 matrix products at this precision, for a while."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Displacement:
    """‖θ - θ₀‖ / ‖θ₀‖ of the trunk, θ₀ being where it is now. θ₀ is kept off the device.

    Args:
        split: The network.
    """

    def __init__(self, split: Split) -> None:
        self._split = split
        self._start = self._trunk()
        self._size = norm(self._start)

    def __call__(self) -> float:
        """How far the trunk has moved."""
        now = self._trunk()
        return (norm({name: now[name] - p for name, p in self._start.items()}) / self._size).item()

    def _trunk(self) -> Params:
        return {name: _copy(p) for name, p in self._split.trunk_params().items()}


def _copy(p: Tensor) -> Tensor:
    return p.detach().to("cpu", copy=True)
