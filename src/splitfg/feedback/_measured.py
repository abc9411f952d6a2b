"""Maps that learn from measurements, at every step or at every n-th."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from splitfg.errors import raise_if

_STEPS = "measured/steps"  # no module's name has a slash


class MeasuredMaps:
    """Base of maps that learn from measurements at every n-th step, beginning with the first.

    Between measurements the maps stay as they are, and a step costs no more than its own pass. The count of steps is a
    number on the host: a captured learner reads :attr:`due` and replays one graph for steps with a measurement and
    another for those without.

    Attributes:
        taken: Steps taken; ``update_state`` of an estimator adds one.
    """

    taken: int = 0
    _every: int = 1

    @property
    def every(self) -> int:
        """A measurement is made at every n-th step."""
        return self._every

    @every.setter
    def every(self, n: int) -> None:
        raise_if([] if n >= 1 else [f"every must be a whole number of at least 1 step, got {n}"])
        self._every = n

    @property
    def due(self) -> bool:
        """Whether the present step makes a measurement."""
        return self.taken % self._every == 0

    def _step_state(self) -> dict[str, Tensor]:
        """Return the count of steps, for checkpoints; nothing if every step is measured."""
        return {} if self._every == 1 else {_STEPS: torch.tensor(self.taken)}

    def _take_steps(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Restore the count of steps, and return the rest of the state."""
        self.taken = int(state[_STEPS]) if _STEPS in state else 0
        return {name: value for name, value in state.items() if name != _STEPS}
