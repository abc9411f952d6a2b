"""From gradients to new parameters: clip, write ``.grad``, set the rate, step."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from splitfg.errors import refuse
from splitfg.training import Constant, Schedule, clip_, write_grads
from splitfg.types import Estimate


class Update:
    """The part of a training step that comes after the gradient.

    Args:
        module: Owns the parameters; its names key the gradients.
        optimizer: Any ``torch.optim`` optimizer over them.
        schedule: Factor on every group's learning rate, by step. Without one, rates are left to the optimizer and to
            whoever sets them from outside.
        max_norm: Joint clipping bound; ``None`` for no clipping.
        apart: Parameters that are clipped by themselves.

    Attributes:
        steps: Steps taken.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule | None,
        max_norm: float | None,
        apart: Collection[str] = (),
    ) -> None:
        refuse(_optimizer_problems(module, optimizer))
        self.module, self.optimizer, self.max_norm, self.apart = module, optimizer, max_norm, apart
        self.schedule: Schedule = schedule if schedule is not None else Constant()
        self.steps = 0
        if self.scheduled:
            for group in optimizer.param_groups:  # as torch's schedulers do; it travels with checkpoints
                group.setdefault("initial_lr", float(group["lr"]))

    @property
    def scheduled(self) -> bool:
        """Whether the schedule sets the rates."""
        return not isinstance(self.schedule, Constant)

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of every group of the optimizer, before the schedule's factor."""
        groups = self.optimizer.param_groups
        return tuple(float(g.get("initial_lr", g["lr"]) if self.scheduled else g["lr"]) for g in groups)

    def __call__(self, estimate: Estimate) -> Estimate:
        """Take one step along these gradients; see :meth:`write`."""
        clipped = self.write(estimate)
        self.step()
        return clipped

    def write(self, estimate: Estimate) -> Estimate:
        """Clip the gradients, in their own memory, and write them to ``.grad``; gives what was written."""
        if self.max_norm is not None:
            estimate = clip_(estimate, self.max_norm, apart=self.apart)
        write_grads(self.module, estimate)
        return estimate

    def step(self) -> None:
        """Move the parameters along ``.grad``, at the schedule's rate."""
        if self.scheduled:
            factor = self.schedule(self.steps)
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * factor
        self.optimizer.step()
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Parameters, optimizer and step count."""
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.module.load_state_dict(state["model"])
        # torch goes on in the very tensors it is given: the state is the caller's to load again
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.steps = state["step"]


def _optimizer_problems(module: nn.Module, optimizer: object) -> list[str]:
    if not hasattr(optimizer, "param_groups"):
        kind = type(optimizer).__name__
        return [f"the optimizer is {kind}, which holds no parameters: a recipe builds one, {kind}(...).build(split)"]
    own = {id(p) for p in module.parameters()}
    strange = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    return [f"the optimizer holds {strange} tensors that are no parameters of split.model"] if strange else []
