"""Networks whose feedback maps learn, and their distance from backpropagation."""

import torch
from _toolkit import generator
from torch import nn

from splitfg import Backprop, LinearHead, Split


def network(trunk, width, classes=3, **settings):
    torch.manual_seed(1)
    return Split(trunk.double(), LinearHead(nn.Linear(width, classes).double()), **settings)


def taught(estimator, split, x, y, steps):
    """Let the maps learn on a fixed network; returns the last estimate."""
    draws = generator(7)
    for _ in range(steps):
        estimate = estimator(split, x, y, generator=draws)
        estimator.update_state(split, estimate)
    return estimator(split, x, y, generator=draws)


def errors(split, estimate, x, y):
    exact = Backprop()(split, x, y).grads
    return {n: float((estimate.grads[n] - g).norm() / g.norm().clamp_min(1e-12)) for n, g in exact.items()}
