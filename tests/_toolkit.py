"""Small networks and statistics that several test files need."""

import math
from itertools import pairwise
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import nn

from splitfg import CrossEntropy, LinearHead, Split

DOUBLE = torch.float64
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def noise(*shape, seed=1, dtype=DOUBLE):
    return torch.randn(shape, generator=generator(seed), dtype=dtype)


def classes(*shape, count, seed=2):
    return torch.randint(0, count, shape, generator=generator(seed))


def seeded(build, seed=0):
    """A module built from a fixed seed, with the global random state left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def mlp_split(*widths, dtype=DOUBLE, loss=None, **settings):
    """A tanh trunk and a linear head: the last width is the number of outputs."""

    def build():
        layers = [m for a, b in pairwise(widths[:-1]) for m in (nn.Linear(a, b), nn.Tanh())]
        head = LinearHead(nn.Linear(widths[-2], widths[-1]), loss=loss or CrossEntropy(), **settings)
        return Split(nn.Sequential(*layers).to(dtype), head.to(dtype))

    return seeded(build)


class TiedLanguageModel(nn.Module):
    """Token lookup, one tanh layer, and a readout; the table may be shared with the head."""

    def __init__(self, vocab=5, width=3):
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.mix = nn.Linear(width, width)
        self.readout = nn.Linear(width, vocab)
        self.readout.weight = self.table.weight

    def forward(self, tokens):
        return self.readout(torch.tanh(self.mix(self.table(tokens))))


class BackwardAlone(torch.autograd.Function):
    """Rounds; a custom function in the old style, with a backward rule and no forward-mode rule."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


def flat(grads, names=None):
    return torch.cat([grads[n].reshape(-1) for n in names or grads])


def trunk_names(split):
    return list(split.trunk_params())


def cross_entropy(outputs, y, **settings):
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), y.reshape(-1), **settings)


def exact(split, x, y, *, criterion=cross_entropy, readout_only=False):
    """The gradient by plain autograd through trunk, head and torch's own loss, without the library's estimators.

    With ``readout_only`` the trunk reads a detached copy of every parameter that the head holds too.
    """
    named = dict(split.model.named_parameters())
    leaves = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in named.items()}
    by_id = {id(p): n for n, p in named.items()}
    held = {id(p) for p in split.head.parameters()}
    trunk = {
        n: leaves[by_id[id(p)]].detach() if readout_only and id(p) in held else leaves[by_id[id(p)]]
        for n, p in split.trunk.named_parameters()
    }
    head = {n: leaves[by_id[id(p)]] for n, p in split.head.named_parameters()}
    h = torch.func.functional_call(split.trunk, trunk, x if isinstance(x, tuple) else (x,))
    loss = criterion(split.head.outputs(head, h), y)
    wanted = {n: p for n, p in leaves.items() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(wanted, grads, strict=True))


def close(actual, expected, tolerance=1e-9):
    """Whether gradients agree, name by name."""
    assert set(actual) == set(expected)
    for name, g in expected.items():
        torch.testing.assert_close(actual[name], g, rtol=tolerance, atol=tolerance)


def z_bound(comparisons, error=1e-4):
    """|z| beyond which one of so many fair comparisons lands with probability ``error`` at most (Bonferroni)."""
    return NormalDist().inv_cdf(1 - error / (2 * comparisons))


def z_scores(samples, expected):
    """How many standard errors the mean of the rows of ``samples`` lies from ``expected``, by column.

    A column that does not vary at all must equal its expectation.
    """
    error = samples.std(dim=0) / math.sqrt(samples.shape[0])
    return (samples.mean(dim=0) - expected) / error.clamp_min(1e-9)


def fair(samples, expected):
    """Whether the means of all columns lie within the bound for so many comparisons."""
    samples = samples.reshape(samples.shape[0], -1)
    z = z_scores(samples, torch.as_tensor(expected, dtype=samples.dtype).reshape(-1))
    return bool((z.abs() < z_bound(samples.shape[1])).all())
