"""Learned state that changes at every step or at every n-th."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from splitfg.errors import raise_if

_STEPS = "measured/steps"  # no module's name has a slash


class EveryNth:
    """Base of learned state that changes only at every n-th step, beginning with the first.

    In between, the state stays as it is, and a step costs no more than its own pass. The count of steps is a number on
    the host: a captured learner reads :attr:`due` and replays one graph for steps that are due and another for others.

    Attributes:
        taken: Steps taken; ``update_state`` of an estimator adds one.
    """

    taken: int = 0
    _every: int = 1

    @property
    def every(self) -> int:
        """The state changes at every n-th step."""
        return self._every

    @every.setter
    def every(self, n: int) -> None:
        raise_if([] if n >= 1 else [f"every must be a whole number of at least 1 step, got {n}"])
        self._every = n

    @property
    def due(self) -> bool:
        """Whether the present step changes the state."""
        return self.taken % self._every == 0

    def _step_state(self) -> dict[str, Tensor]:
        """Return the count of steps, for checkpoints; nothing if the state changes at every step."""
        return {} if self._every == 1 else {_STEPS: torch.tensor(self.taken)}

    def _take_steps(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Restore the count of steps, and return the rest of the state."""
        self.taken = int(state[_STEPS]) if _STEPS in state else 0
        return {name: value for name, value in state.items() if name != _STEPS}


class Pace(EveryNth):
    """A count of steps by itself, for estimators that do something at every n-th step.

    Args:
        every: n.

    Example:
        >>> from splitfg.feedback import Pace
        >>> pace = Pace(2)
        >>> pace.due
        True
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def __repr__(self) -> str:
        return f"Pace({self.every})"

    def state_dict(self) -> dict[str, Tensor]:
        """Return the count."""
        return self._step_state()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the count."""
        self._take_steps(state)
