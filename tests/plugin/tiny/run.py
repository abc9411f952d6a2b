"""A learner with everything that a checkpoint must carry: optimizer state, its generator, the global one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from splitfg.types import Inputs, Learner, StepStats, Target
from splitfg_lab.runs import RunContext, fit
from tiny import TinyConfig
from tiny.optimizers import Optimizer


class TinyLearner:
    def __init__(self, config: TinyConfig) -> None:
        self.config = config
        self.weight = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
        self.optimizer = Optimizer(self.weight, config.optimizer)
        self.taken = 0

    def step(self, x: Inputs, y: Target, *, generator: torch.Generator) -> StepStats:
        time.sleep(self.config.pause_s)
        assert isinstance(x, Tensor)
        kept = torch.nn.functional.dropout(x, 0.1)  # draws from the global generator
        rest = kept @ self.weight.detach() - y
        noise = torch.randn(6, generator=generator, dtype=torch.float64)
        self.weight.grad = kept.T @ rest / len(rest) + self.config.noise * noise
        self.optimizer.step()
        self.taken += 1
        loss = rest.square().mean()
        if self.taken == self.config.diverge_at:
            loss = loss * torch.inf
        return StepStats(loss, {"norm": self.weight.grad.norm(), "jvps": 4, "trunk_backward": 0})

    def predict(self, x: Inputs) -> Tensor:
        assert isinstance(x, Tensor)
        return x @ self.weight.detach()

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "optimizer": self.optimizer.state_dict(), "taken": self.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weight.data.copy_(state["weight"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.taken = state["taken"]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
    return x, x.sum(1)


def evaluate(learner: Learner) -> dict[str, float]:
    x, y = batch(10**6)
    return {"error": (learner.predict(x) - y).square().mean().item()}


def run(config: TinyConfig, *, seed: int, run: RunContext) -> Mapping[str, float]:
    print("printed by the experiment: ρ → 0")
    if config.fail:
        raise RuntimeError("failed on purpose")
    return train(config, seed=seed, run=run)


def train(
    config: TinyConfig, *, seed: int, run: RunContext, batches: Callable[[int], tuple[Tensor, Tensor]] = batch
) -> dict[str, float]:
    return fit(
        TinyLearner(config),
        batches,
        steps=config.steps,
        generator=torch.Generator().manual_seed(seed),
        run=run,
        evaluate=evaluate,
        evaluate_every=config.evaluate_every,
        checkpoint_every=config.checkpoint_every,
        log_every=config.log_every,
    )
