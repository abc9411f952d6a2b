"""The analog-hardware case: a trunk that is only a callable, read out through eight noisy bits."""

import pytest
import torch
from _toolkit import DOUBLE, classes, generator, noise, seeded
from torch import nn

from splitfg import (
    BlackBoxTrunk,
    CentralDifference,
    ForwardMode,
    FrozenTrunk,
    GradientLearner,
    LinearHead,
    OneSidedDifference,
    Split,
    SplitFG,
)
from splitfg.recipes import Adam

BITS = 1 / 256
WEIGHTS = {"first": noise(4, 12) / 2, "second": noise(12, 8, seed=2) / 3}


class Device:
    """Two tanh layers outside torch's autograd; every read-out is noisy and rounded to 256 levels in [-1, 1]."""

    def __init__(self, seed=0):
        self._generator = generator(seed)

    def __call__(self, params, x):
        h = ideal(params, x)
        h = h + BITS / 2 * torch.randn(h.shape, generator=self._generator, dtype=DOUBLE)
        return (h * 128).round().clamp(-128, 127) / 128


def ideal(params, x):
    return torch.tanh(torch.tanh(x @ params["first"]) @ params["second"])


class Ideal(nn.Module):
    """The device without noise and rounding, open to forward mode."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(WEIGHTS[name].clone()) for name in ("first", "second"))

    def forward(self, x):
        return ideal({"first": self.first, "second": self.second}, x)


def network(run):
    return Split(BlackBoxTrunk(run, WEIGHTS), seeded(lambda: LinearHead(nn.Linear(8, 3))).double())


def correlation(engine, K=200):
    """Of the measured scores with the ones of the ideal device, over the same tangents."""
    x, y = noise(64, 4), classes(64, count=3)
    known = Split(Ideal(), network(ideal).head)
    true = SplitFG(K, engine=ForwardMode())(known, x, y, generator=generator()).stats.scores
    measured = SplitFG(K, engine=engine)(network(Device()), x, y, generator=generator()).stats.scores
    return torch.corrcoef(torch.stack([true, measured]))[0, 1].item()


@pytest.mark.parametrize(("engine", "least"), [(CentralDifference, 0.99), (OneSidedDifference, 0.98)])
def test_scores_follow_the_truth_at_the_step_for_the_noise(engine, least):
    """A step chosen for eight bits sees the derivative; one chosen for float64 sees read-out noise alone."""
    assert correlation(engine(noise=BITS)) > least
    assert abs(correlation(engine())) < 0.3


def learn(estimator, steps=150):
    """Mean loss of the last ten steps on a task that the frozen trunk is bad at."""
    x = noise(96, 4, seed=8)
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()
    s, g = network(Device()), generator(3)
    learner = GradientLearner(s, estimator, Adam(lr=0.03).build(s, rho=0.3))
    losses = [learner.step(x, y, generator=g).loss.item() for _ in range(steps)]
    return sum(losses[-10:]) / 10


def test_it_learns_what_a_frozen_trunk_cannot():
    """Noise and all, the measured gradient trains the device's weights."""
    trained = learn(SplitFG(4, engine=CentralDifference(noise=BITS)))
    frozen = learn(FrozenTrunk())
    blind = learn(SplitFG(4, engine=CentralDifference()))
    assert trained < frozen - 0.05
    assert trained < blind - 0.05
