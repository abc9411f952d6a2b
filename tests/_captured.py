"""A small GPT on made-up tokens, in eager and captured steps, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from splitfg import CosineWithWarmup, GradientLearner, LinearHead, LineSearch, Split, Tied
from splitfg.learners import CapturedLearner
from splitfg.models import GPT, GPTConfig
from splitfg.recipes import (
    SGD,
    ActivityMethod,
    Adam,
    AdamW,
    BackpropMethod,
    ConditionedLaw,
    DirectPathMethod,
    EveryNthFeedback,
    EveryNthRoute,
    EvolutionMethod,
    FrozenMethod,
    LaggedRMS,
    LearnedFeedbackMethod,
    MeanJacobianFeedback,
    MethodRecipe,
    Muon,
    OptimizerRecipe,
    ParallelPullMethod,
    PureFGMethod,
    SplitFGMethod,
)
from splitfg_lab.data import Windows
from splitfg_lab.data.device import DeviceWindows

METHODS = (
    SplitFGMethod(K=3),
    SplitFGMethod(K=3, chunk=1),
    SplitFGMethod(K=2, law=ConditionedLaw()),
    PureFGMethod(K=2),
    EvolutionMethod(K=1),
    BackpropMethod(),
    BackpropMethod(closed_head=True),
    ActivityMethod(K=2),
    DirectPathMethod(),
    DirectPathMethod(MeanJacobianFeedback()),
    DirectPathMethod(MeanJacobianFeedback(limit=0.5), lean=True),
    ParallelPullMethod(MeanJacobianFeedback(), pulls=2),
    LearnedFeedbackMethod(),
    LearnedFeedbackMethod(EveryNthRoute(2)),
    ParallelPullMethod(EveryNthFeedback(2)),
    FrozenMethod(),
)


def optimizers(lr: float) -> tuple[OptimizerRecipe, ...]:
    return Adam(lr), AdamW(lr), SGD(0.1), SGD(0.1, 0.9), Muon(lr), LaggedRMS(lr / 10)


def made_up_windows(config: GPTConfig, tokens: int) -> Windows:
    ids = np.random.default_rng(0).integers(0, config.vocab, tokens)
    return Windows(ids.astype(np.uint16), config.context)


@dataclass(frozen=True)
class Setting:
    """What learners are built from: the same parameters, batches and generator every time."""

    config: GPTConfig
    head: Callable[[nn.Linear], LinearHead]
    windows: Windows
    batch: int
    steps: int
    lr: float
    device: torch.device

    def eager(
        self,
        method: MethodRecipe,
        optimizer: OptimizerRecipe | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        line_search: LineSearch | None = None,
    ) -> GradientLearner:
        trunk = GPT(self.config, generator=torch.Generator().manual_seed(0)).to(self.device, dtype)
        split = Split(trunk, self.head(trunk.tied_linear()), tied=Tied.EXCLUDE)
        estimator = method.build()
        built = (optimizer or Adam(self.lr)).build(split, rho=0.1 if line_search is None else 1.0)
        schedule = CosineWithWarmup(self.steps, 3)
        return GradientLearner(split, estimator, built, schedule=schedule, line_search=line_search)

    def captured(self, *args: Any, compile_: Any = None, looked_up: bool = True, **kwargs: Any) -> CapturedLearner:
        batches = DeviceWindows(self.windows, batch=self.batch, steps=self.steps, device=self.device)
        return CapturedLearner(
            self.eager(*args, **kwargs),
            horizon=self.steps,
            batches=batches if looked_up else None,
            compile_=compile_,
        )

    def given(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.windows.step(step, self.batch)
        return x.to(self.device), y.to(self.device)

    def take(self, learner: Any, generator: torch.Generator, start: int = 0, stop: int | None = None) -> list[float]:
        """The losses of these steps; all that the setting has by default."""
        own = isinstance(learner, CapturedLearner) and learner._batches is not None
        batches = learner.batch if own else self.given
        stop = self.steps if stop is None else stop
        return [learner.step(*batches(i), generator=generator).loss.item() for i in range(start, stop)]

    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(5)
