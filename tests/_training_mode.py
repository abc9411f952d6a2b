"""Trunks with batch norm and dropout, cut from their heads, and their gradients by autograd with the same mask."""

import copy

import torch
import torch.nn.functional as F
from _refusals import linear_split
from _toolkit import classes, cross_entropy, generator, noise, seeded
from torch import nn

X, Y = noise(6, 3), classes(6, count=3)


class Dropped(nn.Module):
    """Dropout by a function that reads the training flag."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x):
        return torch.tanh(F.dropout(self.layer(x), 0.4, training=self.training))


class Attending(nn.Module):
    """Dropout inside attention; every number of a row is a token."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 4)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=True)

    def forward(self, x):
        tokens = self.embed(x.unsqueeze(-1))
        return self.attention(tokens, tokens, tokens, need_weights=True)[0].mean(1)


class Layered(nn.Module):
    """A layer of nn.TransformerEncoder: attention gives dropout an input that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Linear(1, 4), nn.TransformerEncoderLayer(4, 2, 4, dropout=0.4, batch_first=True)

    def forward(self, x):
        return self.layer(self.embed(x.unsqueeze(-1))).mean(1)


class Transposed(nn.Module):
    """Dropout of transposed tensors, by functions and in place, and of images in channels-last."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Conv2d(2, 4, 1)

    def forward(self, x):
        a = F.dropout((self.first(x) * 1.5).T, 0.4, self.training, inplace=True)
        b = torch.dropout(a.unflatten(0, (2, 2)).transpose(1, 2), 0.3, self.training)
        images = self.second(b.permute(1, 2, 0).unsqueeze(-2).contiguous().permute(0, 3, 1, 2)).tanh()
        images = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return F.dropout(images, 0.4, self.training).mean((2, 3))


TRUNKS = {
    "batch_norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)),
    "images": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 1, 3)), nn.Conv2d(1, 4, (1, 2)), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4)
    ),
    "dropout": lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.3)),
    "functional": Dropped,
    "attention": Attending,
    "transformer": Layered,
    "transposed": Transposed,
    "both": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Tanh(), nn.Linear(4, 4)),
}
NO_BLOCKS = ("functional", "attention", "transformer", "transposed")
RANDOM = [name for name in TRUNKS if name not in ("batch_norm", "images")]


def cut(name):
    s = seeded(lambda: linear_split(TRUNKS[name](), width=4))
    s.model.double().train()
    return s


def step_seed(seed=0):
    """The first number that an estimate draws from its generator."""
    return int(torch.randint(2**62, (), generator=generator(seed)))


def by_autograd(s, x=X, y=Y, seed=None):
    """Gradient, loss and new state by plain autograd through copies of trunk and head, with torch's own dropout."""
    trunk, head = copy.deepcopy(s.trunk), copy.deepcopy(s.head)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(step_seed() if seed is None else seed)
        h = trunk(x)
    loss = cross_entropy(head.outputs(dict(head.named_parameters()), h), y)
    loss.backward()
    names = {f"trunk.{n}": p for n, p in trunk.named_parameters()} | {
        f"head.{n}": p for n, p in head.named_parameters()
    }
    return {n: p.grad for n, p in names.items()}, loss.detach(), trunk.state_dict()
