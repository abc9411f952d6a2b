"""Errors of forward mode that change J·v by little: the first batch finds them, whatever their share of h is."""

import random

import numpy as np
import pytest
import torch
from _refusals import linear_split, refused
from _state import state_of
from _toolkit import classes, generator, noise, seeded
from test_lost_tangents import Applied, square, wrong
from torch import nn

from splitfg import Backprop, ForwardGradient, ForwardMode, Gaussian, ReverseModeHead, Split, SplitFG, split
from splitfg.splitting import tangent_problems
from splitfg.tangents import Layout

X, Y = noise(5, 3, dtype=torch.float32), classes(5, count=3)


def around(function):
    return linear_split(seeded(lambda: nn.Sequential(nn.Linear(3, 4), Applied(function), nn.Linear(4, 4))))


def slightly_constant(z):
    with torch.no_grad():
        gate = 1e-3 * torch.sigmoid(z)
    return z + gate * z


def gated(z):
    return z + 1e-3 * torch.sigmoid(z).detach() * z


def test_a_small_share_under_no_grad():
    (problem,) = refused(SplitFG(2), around(slightly_constant), X, Y)
    assert problem.startswith("1 (Applied): a tangent passes through torch.no_grad()")
    assert SplitFG(2)(around(gated), X, Y, generator=generator()).grads


def test_a_small_share_of_an_operator_without_a_forward_rule():
    (problem,) = refused(SplitFG(2), around(lambda z: z + 1e-3 * square(z)), X, Y)
    assert problem.startswith("1 (Applied): the operator splitfg_tests.square")


def test_a_value_that_is_written_in_place_under_no_grad():
    """Backprop differentiates the tensor as if nothing had been written: so does a pass that stops tangents."""

    def doubled(z):
        z = z.clone()
        with torch.no_grad():
            z.mul_(2)
        return z

    (problem,) = refused(SplitFG(2), around(doubled), X, Y)
    assert "torch.no_grad()" in problem


class Average(nn.Module):
    """Subtracts a running mean, which it updates in place under ``torch.no_grad()``."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, z):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(z.mean(0), alpha=0.1)
        return (z - self.mean).tanh()


@pytest.mark.parametrize("seed", range(6))
def test_the_cause_is_named_for_modules_with_state(seed):
    s = linear_split(seeded(lambda: nn.Sequential(nn.Linear(3, 4), Average(), nn.Linear(4, 4)), seed))
    (problem,) = refused(SplitFG(2), s, X, Y)
    assert problem.startswith("1 (Average): a tangent passes through torch.no_grad()")


def test_a_wrong_jvp_behind_a_centred_value():
    """The squares are near zero, and so is their share of J·v; every one of 12 networks raises all the same."""
    for seed in range(12):
        layers = [nn.Linear(4, 64), Applied(lambda z: z - z.detach()), nn.Linear(64, 4)]
        parts = seeded(lambda layers=layers: [nn.Linear(3, 4), nn.Tanh(), *layers], seed)
        for factor in (0.5, 1.0):
            s = linear_split(nn.Sequential(*parts, Applied(wrong(factor).apply), nn.Linear(4, 4)))
            assert bool(tangent_problems(s, X, ForwardMode())) == (factor != 1.0)


def test_a_trunk_that_draws_noise_passes():
    """In float64, torch draws other numbers from the same seed: the comparison then stays in float32."""
    for seed in range(5):
        s = seeded(lambda: around(lambda z: (z + torch.randn_like(z)).tanh() * torch.rand(4)), seed)
        assert SplitFG(2)(s, X, Y, generator=generator()).grads


SOURCES = {
    "Python's random": lambda z: z if random.random() < 0.5 else z.tanh(),
    "numpy.random": lambda z: z * float(np.random.rand()),
}


@pytest.mark.parametrize("source", SOURCES)
def test_generators_outside_of_torch(source):
    for estimator in (SplitFG(2), Backprop()):
        (problem,) = refused(estimator, around(SOURCES[source]), X, Y)
        assert f"draws random numbers from {source}" in problem


@pytest.mark.parametrize("source", SOURCES)
def test_generators_outside_of_torch_stay_as_they_were(source):
    before = random.getstate(), np.random.get_state()[1].tobytes()
    s = split(nn.Sequential(nn.Linear(3, 4), Applied(SOURCES[source]), nn.Linear(4, 3)))
    s.traits(X)
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before


def test_a_trunk_that_seeds_numpy_is_deterministic():
    def permuted(z):
        np.random.seed(0)
        return z[:, torch.as_tensor(np.random.permutation(4))]

    assert SplitFG(2)(around(permuted), X, Y, generator=generator()).grads


def test_no_trained_parameter_has_an_effect():
    """As with adapters of peft that have been merged, under a frozen head."""
    s = linear_split(nn.Sequential(nn.Linear(3, 4), Applied(torch.Tensor.detach)))
    s.head.requires_grad_(False)
    before = state_of(s.model)
    for estimator in (SplitFG(2), Backprop()):
        with pytest.warns(UserWarning, match="h depends on none of the trunk's trained parameters"):
            grads = estimator(s, X, Y, generator=generator()).grads
        assert set(grads) == {"trunk.0.weight", "trunk.0.bias"}
        assert not any(g.any() for g in grads.values())
    assert state_of(s.model) == before


class Readout(nn.Module):
    """A nonlinear head."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 3), function

    def forward(self, h):
        return self.last(self.function(self.first(h)))


def under_no_grad(z):
    with torch.no_grad():
        return z * torch.sigmoid(z)


HEADS = {"wrong jvp": wrong(0.5).apply, "operator": square, "no_grad": lambda z: z + 0.1 * under_no_grad(z)}


@pytest.mark.parametrize("name", HEADS)
def test_forward_gradients_check_the_head(name):
    """Split-FG differentiates the head by reverse mode, and needs no forward rules in it."""
    s = Split(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), ReverseModeHead(Readout(HEADS[name])))
    (problem,) = refused(ForwardGradient(2), s, X, Y)
    assert "the head" in problem
    found = SplitFG(2)(s, X, Y, generator=generator()).stats.scores
    g = Backprop()(s, X, Y).grads
    layout = Layout.of(s.trunk_params())
    expected = Gaussian().draw(layout, 2, generator()) @ layout.flatten({n: g[n] for n in s.trunk_params()})
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_forward_gradients_of_right_heads():
    s = Split(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), ReverseModeHead(Readout(wrong(1.0).apply)))
    assert ForwardGradient(2)(s, X, Y, generator=generator()).grads
