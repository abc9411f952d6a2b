"""What the tests of refusals share."""

import pytest
import torch
from _toolkit import generator, noise
from torch import nn

from splitfg import (
    Backprop,
    CheckpointedBackprop,
    CrossEntropy,
    EvolutionStrategy,
    ForwardGradient,
    FrozenTrunk,
    LinearHead,
    Split,
    SplitError,
    SplitFG,
)

ESTIMATORS = {
    "split_fg": SplitFG(2),
    "forward_gradient": ForwardGradient(2),
    "evolution": EvolutionStrategy(2),
    "frozen": FrozenTrunk(),
    "backprop": Backprop(),
    "closed": Backprop(closed_head=True),
    "checkpointed": CheckpointedBackprop(),
}


every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def linear_split(trunk=None, loss=None, width=4, count=3):
    trunk = trunk if trunk is not None else nn.Sequential(nn.Linear(3, width))
    return Split(trunk, LinearHead(nn.Linear(width, count), loss=loss or CrossEntropy()))


def rows(n=5, d=3):
    return noise(n, d, dtype=torch.float32)


def refused(estimator, s, x, y, **settings):
    """The problems of the one error that this call must raise."""
    with pytest.raises(SplitError) as caught:
        estimator(s, x, y, generator=generator(), **settings)
    return caught.value.problems
