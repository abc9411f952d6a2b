"""Two optimizers as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class OptimizerPair(torch.optim.Optimizer):
    """Two optimizers over disjoint parameters, stepped, saved and scheduled as one."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self.parts = (first, second)
        super().__init__([*first.param_groups, *second.param_groups], {})
        # The very groups of the parts, so that a schedule that sets a group's rate reaches them.
        self.param_groups = [*first.param_groups, *second.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [g for part in self.parts for g in part.param_groups]
