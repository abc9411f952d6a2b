"""Two optimizers behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from splitfg.errors import SplitError
from splitfg.training._closure import evaluated


class OptimizerPair(torch.optim.Optimizer):
    """Two optimizers over disjoint parameters, stepped, saved and scheduled as one."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self.parts = (first, second)
        super().__init__([*first.param_groups, *second.param_groups], {})
        # the same dicts as the parts', so that a schedule that sets a learning rate here sets it there
        self.param_groups = [*first.param_groups, *second.param_groups]
        self._whole = True

    def __getstate__(self) -> dict[str, Any]:
        return {"parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["parts"])  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction.

        Raises:
            SplitError: If called later, when either optimizer could own the group.
        """
        if getattr(self, "_whole", False):
            raise SplitError(
                ["a pair of optimizers takes no further group: add it to one of pair.parts, or build a new pair"]
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step both optimizers."""
        loss = evaluated(closure)
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both optimizers."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a :meth:`state_dict`."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [g for part in self.parts for g in part.param_groups]
