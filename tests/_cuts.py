"""Models to be cut, and their gradient by autograd and on a full basis of tangents."""

import torch
import torch.nn.functional as F
from _toolkit import cross_entropy, generator, seeded
from torch import nn

from splitfg import Orthogonal, SplitFG


class Deep(nn.Module):
    """Blocks in a list, functional dropout on the root's flag, and a readout two containers down."""

    def __init__(self, width=4, count=3):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.out = nn.ModuleDict({"norm": nn.LayerNorm(width), "fc": nn.Linear(width, count)})

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.gain
        x = F.dropout(x, 0.5, training=self.training)
        return self.out["fc"](self.out["norm"](x))


class Pooled(nn.Module):
    """A small convolutional classifier."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 3, 3)
        self.fc = nn.Linear(3, 4)

    def forward(self, x):
        return self.fc(torch.tanh(self.second(torch.tanh(self.first(x)))).mean(dim=(2, 3)))


class PostProcessed(nn.Module):
    """Something follows the last linear layer."""

    def __init__(self, after):
        super().__init__()
        self.body, self.fc, self.after = nn.Linear(4, 4), nn.Linear(4, 3), after

    def forward(self, x):
        return self.after(self.fc(torch.tanh(self.body(x))))


class Skipping(nn.Module):
    """What follows the middle also reads the input."""

    def __init__(self):
        super().__init__()
        self.body, self.middle, self.fc = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.middle(torch.tanh(self.body(x))) + x)


class BackwardsOrder(nn.Module):
    """The readout is registered before the body."""

    def __init__(self):
        super().__init__()
        self.readout, self.body = nn.Linear(4, 3), nn.Linear(4, 4)

    def forward(self, x):
        return self.readout(torch.tanh(self.body(x)))


class ByValue(nn.Module):
    """Control flow that depends on values."""

    def __init__(self):
        super().__init__()
        self.body, self.middle, self.fc = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.body(x)
        return self.fc(self.middle(h if h.sum() > 0 else -h))


def built(make):
    return seeded(make).double()


def gradient(model, x, y):
    """By plain autograd on the model itself."""
    params = dict(model.named_parameters())
    outputs = model(*x) if isinstance(x, tuple) else model(x)
    return dict(zip(params, torch.autograd.grad(cross_entropy(outputs, y), list(params.values())), strict=True))


def full_basis(s, x, y):
    """Split-FG on a whole orthogonal basis: exact."""
    P = sum(p.numel() for p in s.trunk_params().values())
    return SplitFG(P, law=Orthogonal())(s, x, y, generator=generator()).grads
