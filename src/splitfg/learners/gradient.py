"""The bridge from estimators to learners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from splitfg.compiled import Compile
from splitfg.errors import SplitError, raise_if
from splitfg.estimators import Estimator, LearningEstimator, SplitFG, compiled
from splitfg.splitting import Split, require_split
from splitfg.training import Schedule, Update
from splitfg.types import Estimate, Inputs, Params, StepStats, Target


class GradientLearner:
    """Estimate, clip, write ``.grad``, step the optimizer: one training step.

    Args:
        split: The network.
        estimator: Where gradients come from.
        optimizer: Any ``torch.optim`` optimizer over ``split.model``'s parameters; a recipe of
            :mod:`splitfg.recipes` builds one with the trunk step scale rho.
        schedule: Factor on every group's learning rate, by step. Without one, rates are left to the optimizer, and to
            any of torch's own schedulers.
        max_norm: Clipping bound; ``None`` for no clipping.
        clip_apart: Clip trunk and head each by itself instead of jointly, so that the trunk's noise does not shrink
            the head's exact gradient.
        prediction: Called before every step for a guess of the trunk's gradient (a control variate).

    Attributes:
        update: Clipping, schedule and optimizer.
        learned: State that the estimator learns beside the parameters, by name; see
            :class:`~splitfg.estimators.LearningEstimator`.
    """

    def __init__(
        self,
        split: Split,
        estimator: Estimator,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule | None = None,
        max_norm: float | None = 1.0,
        clip_apart: bool = False,
        prediction: Callable[[], Params] | None = None,
    ) -> None:
        require_split(split)
        if prediction is not None and not isinstance(estimator, SplitFG):
            raise SplitError([f"{type(estimator).__name__} takes no prediction: only SplitFG does"])
        self.split, self.estimator, self.prediction = split, estimator, prediction
        self.learned = estimator.learned_state() if isinstance(estimator, LearningEstimator) else {}
        taken = sorted(set(self.learned) & {"model", "optimizer", "step"})
        raise_if(
            [f"what an estimator learns cannot be called {name!r}: a checkpoint has that already" for name in taken]
        )
        apart = tuple(split.trunk_params()) if clip_apart else ()
        self.update = Update(split.model, optimizer, schedule=schedule, max_norm=max_norm, apart=apart)

    @property
    def steps(self) -> int:
        """Steps taken."""
        return self.update.optimizer.steps

    def step(self, x: Inputs, y: Target, *, generator: torch.Generator) -> StepStats:
        """Learn from one batch."""
        stats = self.fill_grads(x, y, generator=generator)
        self.update.optimizer.step()
        return stats

    def with_compiled(self, compile_: Compile) -> GradientLearner:
        """Return a learner with compiled network and estimator that shares parameters, optimizer and learned state."""
        split, estimator = compiled(self.split, self.estimator, compile_)
        twin = GradientLearner(split, estimator, self.update.optimizer.optimizer, prediction=self.prediction)
        twin.update = self.update
        return twin

    def fill_grads(self, x: Inputs, y: Target, *, generator: torch.Generator) -> StepStats:
        """Everything of a step but the optimizer's: estimate, clip and write ``.grad``."""
        self.update.optimizer.optimizer.zero_grad()  # old gradients need not be in memory beside the new ones
        estimate = self.estimate(x, y, generator=generator)
        if isinstance(self.estimator, LearningEstimator):
            self.estimator.update_state(self.split, estimate)
        written = self.update.write(estimate)
        return StepStats(written.loss, _metrics(written))

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
        """Model, optimizer, step count, and what the estimator has learned."""
        return {**self.update.state_dict(), **{name: part.state_dict() for name, part in self.learned.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        missing = [name for name in self.learned if name not in state]
        raise_if([f"the checkpoint has no {name}: it was written with another estimator" for name in missing])
        self.update.load_state_dict(state)
        for name, part in self.learned.items():
            part.load_state_dict(state[name])


def _metrics(estimate: Estimate) -> dict[str, Tensor | float]:
    norms: dict[str, Tensor | float] = {f"norm/{name}": value for name, value in estimate.stats.norms.items()}
    return {**norms, "jvps": estimate.stats.jvps, "trunk_backward": estimate.stats.trunk_backward}
