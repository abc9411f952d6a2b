"""The bridge from estimators to learners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from splitfg._split import Split
from splitfg.errors import SplitError
from splitfg.estimators import Estimator, SplitFG
from splitfg.tangents import RunningMagnitude
from splitfg.training import Constant, Schedule, clip_, write_grads
from splitfg.types import Estimate, Inputs, Params, StepStats, Target


class GradientLearner:
    """Estimate, clip, write ``.grad``, step the optimizer: one training step.

    Args:
        split: The network.
        estimator: Where gradients come from.
        optimizer: Any ``torch.optim`` optimizer over ``split.model``'s parameters; a recipe of
            :mod:`splitfg.training` builds one with the trunk step scale rho.
        schedule: Factor on every group's learning rate, by step.
        max_norm: Joint clipping bound; ``None`` for no clipping.
        prediction: Called before every step for a guess of the trunk's gradient (a control variate).
        magnitude: Updated with every estimate, where conditioned tangents read it.
    """

    def __init__(
        self,
        split: Split,
        estimator: Estimator,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule | None = None,
        max_norm: float | None = 1.0,
        prediction: Callable[[], Params] | None = None,
        magnitude: RunningMagnitude | None = None,
    ) -> None:
        if prediction is not None and not isinstance(estimator, SplitFG):
            raise SplitError([f"{type(estimator).__name__} takes no prediction: only SplitFG does"])
        self.split, self.estimator, self.optimizer = split, estimator, optimizer
        self.schedule: Schedule = schedule if schedule is not None else Constant()
        self.max_norm, self.prediction, self.magnitude = max_norm, prediction, magnitude
        self._step = 0
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]

    @property
    def steps(self) -> int:
        """Steps taken."""
        return self._step

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of every group of the optimizer, before the schedule's factor."""
        return tuple(self._rates)

    def step(self, x: Inputs, y: Target, *, generator: torch.Generator) -> StepStats:
        """Learn from one batch."""
        stats = self.fill_grads(x, y, generator=generator)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self.schedule(self._step)
        self.optimizer.step()
        self._step += 1
        return stats

    def fill_grads(self, x: Inputs, y: Target, *, generator: torch.Generator) -> StepStats:
        """Everything of a step but the optimizer's: estimate, clip and write ``.grad``."""
        self.optimizer.zero_grad()  # old gradients need not be in memory beside the new ones
        estimate = self.estimate(x, y, generator=generator)
        if self.magnitude is not None:
            self.magnitude.update({n: estimate.grads[n] for n in self.split.trunk_params()})
        if self.max_norm is not None:
            estimate = clip_(estimate, self.max_norm)
        write_grads(self.split.model, estimate)
        return StepStats(estimate.loss, _metrics(estimate))

    def estimate(self, x: Inputs, y: Target, *, generator: torch.Generator) -> Estimate:
        """The gradient of one batch, before clipping; nothing changes but the generator."""
        estimator: Callable[..., Estimate] = self.estimator
        if self.prediction is not None:
            estimator = partial(estimator, prediction=self.prediction())
        return estimator(self.split, x, y, generator=generator)

    def predict(self, x: Inputs) -> Tensor:
        """The head's outputs."""
        return self.split.predict(x)

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer, step count and running magnitude."""
        state = {
            "model": self.split.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self._step,
        }
        return state if self.magnitude is None else {**state, "magnitude": self.magnitude.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.split.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._step = state["step"]
        if self.magnitude is not None:
            self.magnitude.load_state_dict(state["magnitude"])


def _metrics(estimate: Estimate) -> dict[str, Tensor | float]:
    norms: dict[str, Tensor | float] = {f"norm/{name}": value for name, value in estimate.stats.norms.items()}
    return {**norms, "jvps": estimate.stats.jvps, "trunk_backward": estimate.stats.trunk_backward}
