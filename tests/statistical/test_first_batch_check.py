"""How often the comparison of J·v with a finite difference raises for right derivatives, and misses wrong ones.

The number of networks is fixed beforehand. The thresholds below were set after seeing these seeds.
"""

import pytest
import torch
from torch import nn

from splitfg import ForwardMode, LinearHead, Split
from splitfg.splitting import tangent_problems

NETWORKS = 60
ACTIVATIONS = (nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.LeakyReLU)


class Factor(torch.autograd.Function):
    """The identity, with a tangent that is too long by a factor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, factor):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return g, None

    @staticmethod
    def jvp(ctx, t, _):
        return t * ctx.factor


class Residual(nn.Module):
    """One branch beside the identity, whose tangent is wrong by a factor."""

    def __init__(self, width, factor):
        super().__init__()
        self.layer, self.factor = nn.Linear(width, width), factor

    def forward(self, x):
        z = self.layer(x)
        return x + (z if self.factor == 1.0 else Factor.apply(z, self.factor))


def network(seed, factor):
    torch.manual_seed(1000 + seed)
    width, depth, act = (8, 32, 64)[seed % 3], (1, 3, 8)[seed // 3 % 3], ACTIVATIONS[seed % 5]
    layers = [nn.Linear(6, width)]
    for i in range(depth):
        layers += [act(), *([nn.LayerNorm(width)] if seed % 2 else []), Residual(width, factor if i == 0 else 1.0)]
    return Split(nn.Sequential(*layers), LinearHead(nn.Linear(width, 3))), torch.randn((1, 4, 32)[seed % 3], 6)


@pytest.mark.parametrize(("factor", "fewest", "most"), [(1.0, 0, 0), (1.05, 59, 60), (0.0, 60, 60)])
def test_alarms(factor, fewest, most):
    """Alarms among 60 networks in float32: none for right derivatives, nearly all for one branch that is 5% wrong."""
    alarms = sum(bool(tangent_problems(*network(seed, factor), ForwardMode())) for seed in range(NETWORKS))
    assert fewest <= alarms <= most
