"""Tangents that pass through torch.no_grad() raise: backprop treats what is computed there as constant."""

import pytest
import torch
from _refusals import linear_split, refused
from _toolkit import classes, close, exact, generator, noise, seeded
from torch import nn

from splitfg import Backprop, CentralDifference, ForwardGradient, ForwardMode, SplitFG


class Gate(nn.Module):
    """Scales its input by a function of it, computed in one of several ways."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(3, 4), how
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        h = self.layer(x)
        if self.how == "detach":
            return h * torch.sigmoid(h).detach()
        with torch.no_grad():
            gate = torch.sigmoid(h if self.how == "no_grad" else torch.ones_like(h))
            if self.how == "statistics":
                self.mean.lerp_(h.mean(0), 0.1)
        return h * gate


def gated(how):
    return linear_split(seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Gate(how))))


X, Y = noise(5, 3), classes(5, count=3)


@pytest.mark.parametrize("estimator", [SplitFG(2), SplitFG(2, engine=ForwardMode(chunk=1)), ForwardGradient(2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_grad_raises_with_the_module(estimator, dtype):
    s = gated("no_grad")
    s.model.to(dtype)
    (problem,) = refused(estimator, s, X.to(dtype), Y)
    assert "2 (Gate)" in problem
    assert ".detach()" in problem


@pytest.mark.parametrize("how", ["detach", "constant", "statistics"])
def test_blocks_that_stop_no_tangent_are_fine(how):
    s = gated(how)
    s.model.double()
    estimate = SplitFG(2)(s, X, Y, generator=generator())
    close(Backprop()(s, X, Y).grads, exact(s, X, Y))
    assert estimate.grads


def test_methods_without_forward_mode_ignore_it():
    s = gated("no_grad")
    s.model.double()
    assert SplitFG(2, engine=CentralDifference())(s, X, Y, generator=generator()).grads
