"""Trunks where forward mode and backprop disagree raise: torch.no_grad(), operators with a backward rule alone."""

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


@torch.library.custom_op("splitfg_tests::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


@torch.library.custom_op("splitfg_tests::sign", mutates_args=())
def sign(x: torch.Tensor) -> torch.Tensor:
    """Has no derivative for backprop either."""
    return x.sign()


square.register_autograd(
    lambda ctx, g: 2 * g * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class Squares(nn.Module):
    def __init__(self, residual):
        super().__init__()
        self.layer, self.residual = nn.Linear(3, 4), residual

    def forward(self, x):
        h = self.layer(x)
        return h + square(h) if self.residual else square(h)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("estimator", [SplitFG(2), ForwardGradient(2)])
def test_an_operator_with_a_backward_rule_alone_raises(estimator, residual):
    s = linear_split(nn.Sequential(nn.Linear(3, 3), Squares(residual)))
    (problem,) = refused(estimator, s, X.float(), Y)
    assert "1 (Squares)" in problem
    assert "splitfg_tests.square" in problem
    assert "CentralDifference" in problem


def test_the_advice_works():
    s = linear_split(nn.Sequential(nn.Linear(3, 3), Squares(True)))
    assert SplitFG(2, engine=CentralDifference())(s, X.float(), Y, generator=generator()).grads


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x):
        h = self.layer(x)
        return h + h.detach().tanh() + torch.zeros_like(h) + h.data + sign(h.detach())


def test_constants_are_fine():
    assert SplitFG(2)(linear_split(Detached()), X.float(), Y, generator=generator()).grads
