"""The contract of an estimator."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

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
