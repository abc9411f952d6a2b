"""Heads that take local steps and are averaged every few steps, for slow networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from splitfg.distributed._estimator import DistributedEstimator
from splitfg.errors import raise_if
from splitfg.learners import GradientLearner
from splitfg.types import Inputs, Params, StepStats, Target


class LocalHeads:
    """A learner whose head takes local steps in every process, averaged every ``every`` steps as in DiLoCo.

    The trunk's scores are exchanged at every step, and trunks stay equal. Between two exchanges every head follows its
    own rows. An exchange moves all heads to one place by an outer step with Nesterov momentum on the mean change: with
    Δ = mean(θ_r) - θ_last,

        m ← μ m + Δ,    θ ← θ_last + η (Δ + μ m).

    Not the training of one process on the whole batch: the trunk's gradient is a mean over processes, each with its own
    head. ``every=1`` with ``rate=1`` and ``momentum=0`` averages heads after every step.

    Args:
        learner: Its estimator is a :class:`DistributedEstimator` with ``reduce_head=False``. It clips trunk and head
            apart, or not at all: the norm of a local head would scale the trunks differently.
        every: Steps between two exchanges.
        rate: η.
        momentum: μ.

    Raises:
        SplitError: If the learner's estimator averages the head's gradient, the learner clips trunk and head together,
            or a setting is out of range.

    Example:
        >>> import torch, torch.distributed as dist
        >>> import splitfg
        >>> from splitfg.distributed import DistributedEstimator, LocalHeads
        >>> from splitfg.testing import example_split
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> split, x, y = example_split()
        >>> estimator = DistributedEstimator(splitfg.SplitFG(K=4), reduce_head=False)
        >>> optimizer = torch.optim.Adam(split.model.parameters())
        >>> inner = splitfg.GradientLearner(split, estimator, optimizer, clip_apart=True)
        >>> stats = LocalHeads(inner, every=4).step(x, y, generator=torch.Generator().manual_seed(0))
        >>> dist.destroy_process_group()
    """

    def __init__(self, learner: GradientLearner, *, every: int, rate: float = 0.7, momentum: float = 0.9) -> None:
        estimator = learner.estimator
        found = [] if every >= 1 else [f"every must be at least 1 step, got {every}"]
        found += [] if rate > 0 else [f"rate must be positive, got {rate}"]
        found += [] if 0 <= momentum < 1 else [f"momentum must be in [0, 1), got {momentum}"]
        if not isinstance(estimator, DistributedEstimator) or estimator.reduce_head:
            found.append("the heads must step apart: use DistributedEstimator(..., reduce_head=False)")
        if learner.update.max_norm is not None and not set(learner.split.trunk_params()) <= set(learner.update.apart):
            found.append(
                "a local head's norm would scale the trunks differently: pass clip_apart=True, or max_norm=None"
            )
        raise_if(found)
        assert isinstance(estimator, DistributedEstimator)
        self.learner, self.every, self.rate, self.momentum = learner, every, rate, momentum
        self._ranks = estimator.ranks
        self._last: Params = {name: p.clone() for name, p in self._heads().items()}
        self._mean: Params = {name: torch.zeros_like(p) for name, p in self._last.items()}

    def step(self, x: Inputs, y: Target, *, generator: torch.Generator) -> StepStats:
        """Learn from one batch, and exchange heads if that is due."""
        stats = self.learner.step(x, y, generator=generator)
        if self.learner.steps % self.every == 0:
            self.exchange()
        return stats

    @torch.no_grad()
    def exchange(self) -> None:
        """Move all heads to the same place; call it before saving or evaluating between two exchanges."""
        for name, p in self._heads().items():
            change = self._ranks.mean_rows_(p - self._last[name])
            self._mean[name].mul_(self.momentum).add_(change)
            p.copy_(self._last[name] + self.rate * (change + self.momentum * self._mean[name]))
            self._last[name].copy_(p)

    def predict(self, x: Inputs) -> Tensor:
        """Return the outputs of this process's head."""
        return self.learner.predict(x)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the learner and of the outer steps.

        After an exchange it is equal in all processes, except for the optimizer's state of the heads, such as Adam's
        running means. A training that resumes from the state of one process uses that process's in all of them.
        """
        return {**self.learner.state_dict(), "outer": {"last": self._last, "mean": self._mean}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a :meth:`state_dict`."""
        self.learner.load_state_dict({name: value for name, value in state.items() if name != "outer"})
        for own, saved in ((self._last, state["outer"]["last"]), (self._mean, state["outer"]["mean"])):
            for name, value in own.items():
                value.copy_(saved[name])

    def _heads(self) -> Params:
        return self.learner.split.head_params()
