"""Learners from gradient estimators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from splitfg.compiled import Compile
from splitfg.errors import SplitError, raise_if
from splitfg.estimators import Estimator, LearningEstimator, SharingEstimator, SplitFG, compiled
from splitfg.estimators.protocol import Stateful
from splitfg.hardware import DeviceTrunk
from splitfg.learners.line_search import LineSearch, rho_of_its_own
from splitfg.learners.slopes import descents_along
from splitfg.splitting import Split, require_split
from splitfg.splitting.checks import begin_step
from splitfg.training import Schedule, Update
from splitfg.types import Estimate, Inputs, Params, StepStats, Target


class GradientLearner:
    """Trains a split: each step estimates the gradient, clips it, writes ``.grad`` and steps the optimizer.

    Args:
        split: The network.
        estimator: Estimates the gradient.
        optimizer: Any ``torch.optim`` optimizer over ``split.model``'s parameters; a recipe of
            :mod:`splitfg.recipes` builds one with the trunk step scale rho.
        schedule: Factor on every group's learning rate, by step. Without one, the optimizer uses its own learning
            rates, which torch's schedulers may set.
        max_norm: Clipping bound; ``None`` for no clipping.
        clip_apart: Clip trunk and head separately instead of jointly, so that the trunk's noise does not shrink
            the head's exact gradient.
        prediction: Returns a prediction of the trunk's gradient before every step, as a control variate;
            :class:`~splitfg.SplitFG` only.
        line_search: Learns the scale rho of the trunk's steps; build the optimizer with rho = 1, the default.
        log: Called with the clipped estimate of every step, such as a :class:`~splitfg.distributed.ScoreLog`.

    Attributes:
        update: Clipping, schedule and optimizer.
        learned: The estimator's own learned state, by name; see :class:`~splitfg.estimators.LearningEstimator`.

    Raises:
        SplitError: If the optimizer has other parameters than ``split.model``, the estimator is a class or takes no
            prediction, a name of its learned state is reserved, or the optimizer of a line search has a rho of its own.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import splitfg
        >>> from splitfg.recipes import Adam
        >>> network = splitfg.split(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
        >>> learner = splitfg.GradientLearner(network, splitfg.SplitFG(K=2), Adam().build(network, rho=0.3))
        >>> x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
        >>> stats = learner.step(x, y, generator=torch.Generator())
        >>> learner.predict(x).shape
        torch.Size([16, 3])
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
        line_search: LineSearch | None = None,
        log: Callable[[Estimate], None] | None = None,
    ) -> None:
        require_split(split)
        if isinstance(estimator, type):
            name = estimator.__name__
            raise SplitError([f"the estimator is the class {name}: pass an instance, {name}()"])
        if prediction is not None and not isinstance(estimator, SplitFG):
            raise SplitError([f"{type(estimator).__name__} takes no prediction: use SplitFG, or leave prediction out"])
        self.split, self.estimator, self.prediction, self.log = split, estimator, prediction, log
        own = dict(estimator.learned_state()) if isinstance(estimator, LearningEstimator) else {}
        taken = sorted(set(own) & {"model", "optimizer", "step", "line_search"})
        self.line_search, self._searched = line_search, split
        self.learned: dict[str, Stateful] = own if line_search is None else {**own, "line_search": line_search}
        found = [
            f"learned_state() of the estimator uses the name {name!r}, which is reserved: rename it" for name in taken
        ]
        raise_if(found + ([] if line_search is None else rho_of_its_own(optimizer)))
        exact = {*split.head_params()} - {*split.trunk_params()}
        apart = tuple(n for n in split.all_trunk_params() if n not in exact) if clip_apart else ()  # some may thaw
        self.update = Update(split.model, optimizer, schedule=schedule, max_norm=max_norm, apart=apart)

    @property
    def steps(self) -> int:
        """Number of steps taken."""
        return self.update.optimizer.steps

    def step(self, x: Inputs, y: Target | None = None, *, generator: torch.Generator) -> StepStats:
        """Learn from one batch.

        Args:
            x: Inputs.
            y: Target; ``None`` if x is a dict with labels, which :meth:`Split.unpack` takes apart.
            generator: Source of randomness.
        """
        stats = self.fill_grads(x, y, generator=generator)
        with self.around_step(self.update.optimizer.factor):
            self.update.optimizer.step()
        return stats

    def around_step(self, factor: Tensor | float) -> AbstractContextManager[None]:
        """Return a context for the optimizer's step, whose trunk part a line search scales.

        Args:
            factor: The schedule's factor of this step.
        """
        if self.line_search is None:
            return nullcontext()
        return self.line_search.scaling(self.split, factor)

    def with_compiled(self, compile_: Compile) -> GradientLearner:
        """Return a learner with compiled network and estimator that shares parameters, optimizer and learned state."""
        split, estimator = compiled(self.split, self.estimator, compile_)
        twin = GradientLearner(split, estimator, self.update.optimizer.optimizer, prediction=self.prediction)
        twin.update, twin.log = self.update, self.log
        if self.line_search is not None:
            twin._searched, twin.line_search = self.line_search.compiled(self._searched, compile_)
        return twin

    def fill_grads(self, x: Inputs, y: Target | None = None, *, generator: torch.Generator) -> StepStats:
        """Estimate, clip and write ``.grad``: a step without the optimizer's update."""
        self.update.optimizer.optimizer.zero_grad()  # free the old gradients before computing new ones
        before = _inferences(self.split)
        if self.line_search is not None:
            inputs, target = self.split.unpack(x, y)
            if isinstance(self.estimator, SharingEstimator):  # validates the rows of all processes itself
                mean = partial(self.estimator.mean_over_rows, self._searched)
                self.line_search.advance(self._searched, inputs, target, mean=mean)
            else:
                searched = begin_step(self._searched, inputs, target, generator, tangents=False)
                self.line_search.advance(searched, inputs, target)
        estimate = self.estimate(x, y, generator=generator)
        if isinstance(self.estimator, LearningEstimator):
            self.estimator.update_state(self.split, estimate)
        written = self.update.write(estimate)
        if self.log is not None:
            self.log(written)
        metrics = _metrics(written)
        if isinstance(self.split.trunk, DeviceTrunk):
            metrics["inferences"] = _inferences(self.split) - before
        if self.line_search is not None:
            metrics |= {**self.line_search.metrics(), "jvps": metrics["jvps"] + self.line_search.jvps}
        return StepStats(written.loss, metrics)

    def searched_descent(self, x: Inputs, y: Target, direction: Params) -> Tensor:
        """Return the descent of a batch along a direction of the trunk's parameters, as the line search measures it."""
        assert self.line_search is not None
        return descents_along(self._searched, x, y, [direction], engine=self.line_search.engine)[0]

    def estimate(self, x: Inputs, y: Target | None = None, *, generator: torch.Generator) -> Estimate:
        """Estimate the gradient of one batch, before clipping; the only side effect is on the generator."""
        estimator: Callable[..., Estimate] = self.estimator
        x, y = self.split.unpack(x, y)
        if self.prediction is not None:
            estimator = partial(estimator, prediction=self.prediction())
        estimate = estimator(self.split, x, y, generator=generator)
        if estimate.forward_state is not None:
            return estimate
        return replace(estimate, forward_state=self.split.forward_state([x]))  # for estimators that leave it out

    def predict(self, x: Inputs) -> Tensor:
        """Return the head's outputs."""
        return self.split.predict(x)

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer, step count, and the estimator's learned state."""
        return {**self.update.state_dict(), **{name: part.state_dict() for name, part in self.learned.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a :meth:`state_dict`.

        Raises:
            SplitError: If the checkpoint lacks state that the estimator learns.
        """
        missing = [name for name in self.learned if name not in state]
        raise_if(
            [f"the checkpoint has no {name}: resume with the estimator that it was saved with" for name in missing]
        )
        self.update.load_state_dict(state)
        for name, part in self.learned.items():
            part.load_state_dict(state[name])


def _inferences(split: Split) -> int:
    """Return the rows that a device has run forward so far; zero for other trunks."""
    return split.trunk.counts.inferences if isinstance(split.trunk, DeviceTrunk) else 0


def _metrics(estimate: Estimate) -> dict[str, Tensor | float]:
    norms: dict[str, Tensor | float] = {f"norm/{name}": value for name, value in estimate.stats.norms.items()}
    stats = estimate.stats
    counts = {"jvps": stats.jvps, "trunk_backward": stats.trunk_backward}
    # only where there are any: training curves of other methods need no line of zeros
    inside = {"block_backward": stats.block_backward} if stats.block_backward else {}
    return {**norms, **counts, **inside}
