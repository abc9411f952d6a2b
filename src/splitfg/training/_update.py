"""Parameter updates: clip, write ``.grad``, set the learning rate, step the optimizer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from splitfg.errors import raise_if
from splitfg.training._grads import clip_, write_grads
from splitfg.training._pair import OptimizerPair
from splitfg.training._schedule import Constant, Schedule
from splitfg.types import Estimate


class ScheduledOptimizer:
    """An optimizer with a schedule on its learning rates.

    Args:
        optimizer: Any ``torch.optim`` optimizer.
        schedule: Factor on every group's learning rate, by step. Without one, the optimizer uses its own learning
            rates, which callers and torch's schedulers may set.

    Attributes:
        steps: Number of steps taken.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule | None) -> None:
        self.optimizer = optimizer
        self.schedule: Schedule = schedule if schedule is not None else Constant()
        self.steps = 0
        if self.scheduled:
            for group in optimizer.param_groups:  # torch's schedulers use the same key; checkpoints contain it
                group.setdefault("initial_lr", float(group["lr"]))

    @property
    def scheduled(self) -> bool:
        """Whether the schedule sets the learning rates."""
        return not isinstance(self.schedule, Constant)

    @property
    def full_rates(self) -> tuple[float, ...]:
        """The learning rate of every group of the optimizer, before the schedule's factor."""
        groups = self.optimizer.param_groups
        return tuple(float(g.get("initial_lr", g["lr"]) if self.scheduled else g["lr"]) for g in groups)

    @property
    def factor(self) -> float:
        """The schedule's factor of the next step."""
        return self.schedule(self.steps)

    def step(self) -> None:
        """Step the optimizer at the schedule's learning rates."""
        if self.scheduled:
            factor = self.factor
            for group, rate in zip(self.optimizer.param_groups, self.full_rates, strict=True):
                group["lr"] = rate * factor
        self.optimizer.step()
        self.steps += 1


class Update:
    """The part of a training step that follows the estimate: clip, write ``.grad``, step the optimizer.

    Args:
        module: Owns the parameters; its names key the gradients.
        optimizer: Any ``torch.optim`` optimizer over them.
        schedule: Factor on every group's learning rate, by step.
        max_norm: Joint clipping bound; ``None`` for no clipping.
        apart: Names of parameters that are clipped separately from the others.

    Attributes:
        optimizer: The optimizer with its schedule.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule | None = None,
        max_norm: float | None = 1.0,
        apart: Collection[str] = (),
    ) -> None:
        raise_if(_optimizer_problems(module, optimizer))
        self.module, self.max_norm, self.apart = module, max_norm, apart
        self.optimizer = ScheduledOptimizer(optimizer, schedule)

    def __call__(self, estimate: Estimate) -> Estimate:
        """Take one step along these gradients and return them as clipped; see :meth:`write`."""
        clipped = self.write(estimate)
        self.optimizer.step()
        return clipped

    def write(self, estimate: Estimate) -> Estimate:
        """Clip the gradients in place, write them to ``.grad`` and return the clipped estimate."""
        if self.max_norm is not None:
            estimate = clip_(estimate, self.max_norm, apart=self.apart)
        write_grads(self.module, estimate)
        return estimate

    def state_dict(self) -> dict[str, Any]:
        """Return parameters, optimizer state and step count."""
        optimizer = self.optimizer
        return {
            "model": self.module.state_dict(),
            "optimizer": optimizer.optimizer.state_dict(),
            "step": optimizer.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        self.module.load_state_dict(state["model"])
        # the optimizer would keep references to the state's tensors: copy them, so that callers may load it again
        self.optimizer.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.optimizer.steps = state["step"]


def _optimizer_problems(module: nn.Module, optimizer: object) -> list[str]:
    if not hasattr(optimizer, "param_groups"):
        kind = type(optimizer).__name__
        return [f"the optimizer is a {kind} without parameter groups: build it from a recipe, {kind}(...).build(split)"]
    found = [f"{kind} cannot train from written gradients: {reason}" for kind, reason in _unusable(optimizer)]
    own = {id(p) for p in module.parameters()}
    foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        found.append(
            f"the optimizer has {foreign} tensors that are not parameters of split.model: build it from"
            " parameter_groups(split, lr=...)"
        )
    return found


def _unusable(optimizer: Any) -> Iterator[tuple[str, str]]:
    """Yield the kinds of optimizers that need more than dense gradients of one batch, with the reason."""
    for part in optimizer.parts if isinstance(optimizer, OptimizerPair) else (optimizer,):
        if _needs_closure(type(part)):
            yield type(part).__name__, "its step() needs a closure; choose an optimizer whose step() takes no argument"
        elif isinstance(part, torch.optim.SparseAdam):
            yield type(part).__name__, "estimates have dense gradients; choose torch.optim.Adam"


def _needs_closure(kind: type) -> bool:
    """Whether ``step`` of a class has required arguments; torch's schedulers replace the method of the object."""
    if not hasattr(kind, "step"):  # the object passes attributes of another one on
        return False
    _, *given = inspect.signature(kind.step).parameters.values()
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in given)
