"""The contract of an estimator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from splitfg._split import Split
from splitfg.types import Estimate, Inputs, Target


@runtime_checkable
class Estimator(Protocol):
    """A pure function of a split and a batch: it changes no parameter, no input and no ``.grad``."""

    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator) -> Estimate:
        """Estimate the gradient of everything that is trained.

        Args:
            split: The network.
            x: Inputs, one tensor or a tuple.
            y: Target.
            generator: The only source of randomness; untouched by methods that draw nothing.
        """


class Learned(Protocol):
    """What an estimator has learned, to be saved beside the parameters."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors and numbers to go on from."""

    def load_state_dict(self, state: Any) -> None:
        """Go on from :meth:`state_dict`."""


@runtime_checkable
class LearningEstimator(Estimator, Protocol):
    """An estimator that gets better by its own estimates. Calls change nothing; whoever steps with one tells it so."""

    def learned(self) -> Mapping[str, Learned]:
        """What it learns, by name; nothing where its settings have nothing to learn."""

    def learn(self, split: Split, estimate: Estimate) -> None:
        """Take one more of its estimates into account, in place: a captured step goes on in the same memory."""
