"""From gradients to new parameters: clip, write ``.grad``, set the rate, step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from splitfg.training import Constant, Schedule, clip, write_grads
from splitfg.types import Estimate


class Update:
    """The part of a training step that comes after the gradient.

    Args:
        module: Owns the parameters; its names key the gradients.
        optimizer: Any ``torch.optim`` optimizer over them.
        schedule: Factor on every group's learning rate, by step; constant by default.
        max_norm: Joint clipping bound; ``None`` for no clipping.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule | None,
        max_norm: float | None,
    ) -> None:
        self._module, self._optimizer, self._max_norm = module, optimizer, max_norm
        self._schedule: Schedule = schedule if schedule is not None else Constant()
        self._step = 0
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]

    def __call__(self, estimate: Estimate) -> None:
        """Take one step along these gradients."""
        write_grads(self._module, estimate if self._max_norm is None else clip(estimate, self._max_norm))
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self._schedule(self._step)
        self._optimizer.step()
        self._step += 1

    def state_dict(self) -> dict[str, Any]:
        """Parameters, optimizer and step count."""
        return {
            "model": self._module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self._step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self._module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._step = state["step"]
