"""Small modules, each awkward in its own way, that every engine and estimator must survive."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from _toolkit import classes, noise, seeded
from torch import nn
from torch.nn.utils import parametrize

from splitfg import LinearHead, Split


class Twice(nn.Module):
    """One module called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class TiedInside(nn.Module):
    """Two modules that share one weight, transposed in use."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.sin(self.first(x))) + x @ self.first.weight


class Nested(nn.Module):
    """Parameters four containers deep, one of them a loose parameter of a container."""

    def __init__(self):
        super().__init__()
        inner = nn.ModuleDict({"a_b": nn.Sequential(nn.Linear(3, 2), nn.Tanh())})
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()), inner])
        self.loose = nn.ParameterList([nn.Parameter(noise(2)), nn.Parameter(noise(3, seed=5))])

    def forward(self, x):
        h = self.blocks[0](x) * self.loose[1]
        return self.blocks[1]["a_b"](h) + self.loose[0]


class Unused(nn.Module):
    """A parameter that h does not depend on, and one that it stops depending on."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.idle = nn.Parameter(noise(4))

    def forward(self, x):
        return self.layer(x) * (1 + 0 * self.idle.sum().detach())


class SeveralInputs(nn.Module):
    """Two tensors, a missing one and a number."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(2, 2, bias=False)

    def forward(self, x, z, mask, power):
        h = self.left(x) * torch.tanh(self.right(z))
        return h if mask is not None else torch.tanh(h) ** power


class ConvGroupNorm(nn.Module):
    """Strided, padded convolution, group normalisation and pooling."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False), nn.GroupNorm(2, 4)

    def forward(self, x):
        return torch.nn.functional.gelu(self.norm(self.conv(x))).amax(dim=(2, 3))


class BatchNormEval(nn.Module):
    """Batch normalisation on its running statistics."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.norm.running_mean.fill_(0.3)
        self.norm.running_var.fill_(2.0)

    def forward(self, x):
        return torch.sigmoid(self.norm(self.layer(x)))


class Attention(nn.Module):
    """Causal attention written with matmul and softmax, pre-norm and residual."""

    def __init__(self, width=4, heads=2):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.register_buffer("mask", torch.ones(8, 8, dtype=torch.bool).tril())

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~self.mask[: x.shape[1], : x.shape[1]], -torch.inf)
        return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class DropoutOff(nn.Module):
    """Dropout switched off in both ways: evaluation mode, and a rate of zero in training mode."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.0))
        self.body[1].eval()

    def forward(self, x):
        return self.body(x)


class Scalars(nn.Module):
    """Parameters of no dimension, of one element, and of none."""

    def __init__(self):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor([0.2]))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return torch.tanh(self.gain * x) + self.shift * self.gain + self.nothing.sum()


class Transposed(nn.Module):
    """A parameter that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(noise(2, 3).T)

    def forward(self, x):
        return torch.tanh(x @ self.weight)


class Symmetric(nn.Module):
    """A parametrization: the weight in use is a function of the one that is stored."""

    def forward(self, weight):
        return (weight + weight.T) / 2


def _parametrized():
    body = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    parametrize.register_parametrization(body[0], "weight", Symmetric())
    return body


class InPlace(nn.Module):
    """Operations that overwrite their own intermediate results."""

    def __init__(self):
        super().__init__()
        self.layer, self.act = nn.Linear(3, 3), nn.SiLU(inplace=True)

    def forward(self, x):
        h = self.act(self.layer(x))
        h += x
        h[:, 0].mul_(2)
        return h


class Recurrent(nn.Module):
    """The same cell over time, reading back its own output."""

    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(5, 2)

    def forward(self, x):
        state = x.new_zeros(x.shape[0], 2)
        states = []
        for t in range(x.shape[1]):
            state = torch.tanh(self.cell(torch.cat([x[:, t], state], dim=-1)))
            states.append(state)
        return torch.stack(states, dim=1)


class Lookup(nn.Module):
    """Integer inputs into a table, plus learned positions."""

    def __init__(self):
        super().__init__()
        self.table, self.positions = nn.Embedding(5, 2), nn.Parameter(noise(3, 2))

    def forward(self, tokens):
        return torch.tanh(self.table(tokens) + self.positions)


class KeepsLast(nn.Module):
    """Stores its activations in an attribute, a list and a dictionary."""

    def __init__(self):
        super().__init__()
        self.layer, self.passes, self.last = nn.Linear(3, 2), 0, None
        self.history, self.cache = [], {"nested": {}}

    def forward(self, x):
        h = torch.tanh(self.layer(x))
        self.last, self.passes = h, self.passes + 1
        self.newest = h.sum()
        self.history.append(h)
        self.cache["nested"]["h"] = h
        return h


class LayerWithMean(nn.Module):
    """Base of modules with one layer and a running mean of its output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(2))


class RunningMean(LayerWithMean):
    """Assigns a new tensor to a buffer."""

    def forward(self, x):
        h = torch.tanh(self.layer(x))
        self.mean = self.mean * 0.9 + h.mean(0) * 0.1
        return h


class CountsInPlace(nn.Module):
    """Writes to a buffer in place."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


class AveragesInPlace(LayerWithMean):
    """Updates a running mean of its activations in place."""

    def forward(self, x):
        h = torch.tanh(self.layer(x))
        self.mean.lerp_(h.detach().mean(0), 0.1)
        return h


class HooksItself(nn.Module):
    """Registers a hook and a module while it runs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        self.layer.register_forward_hook(lambda module, args, output: output * 1.0)
        self.extra = nn.Identity()
        return self.extra(self.layer(x))


class NoGradStatistics(LayerWithMean):
    """Depends on a value under torch.no_grad(), after it has updated a buffer: forward mode raises."""

    def forward(self, x):
        h = self.layer(x)
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.5)
            self.gate = torch.sigmoid(h)
        return h * self.gate


class RaisesLate(nn.Module):
    """Changes its state and draws a number, then uses an operator without a forward-mode rule."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.2))
        self.weight, self.length = nn.Parameter(noise(2, 2)), nn.Parameter(torch.ones(2, 1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.kept = self.inner(x)
        return self.kept @ torch._weight_norm(self.weight, self.length, 0)


def _frozen():
    body = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2), nn.LayerNorm(2))
    body[0].requires_grad_(False)
    body[3].weight.requires_grad_(False)
    return body


@dataclass(frozen=True)
class Awkward:
    """A module in float64 with inputs, and how wide h is."""

    module: nn.Module
    inputs: Any
    width: int

    @property
    def args(self):
        return self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)


_ROWS = noise(4, 3)
_CASES = {
    "plain": (lambda: nn.Linear(3, 2), _ROWS, 2),
    "no_bias": (lambda: nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False)), _ROWS, 2),
    "twice": (Twice, _ROWS, 3),
    "tied_inside": (TiedInside, _ROWS, 3),
    "nested": (Nested, _ROWS, 2),
    "unused": (Unused, _ROWS, 2),
    "frozen": (_frozen, _ROWS, 2),
    "several_inputs": (SeveralInputs, (_ROWS, noise(4, 2, seed=3), None, 2), 2),
    "conv_group_norm": (ConvGroupNorm, noise(3, 2, 5, 5), 4),
    "batch_norm_eval": (lambda: BatchNormEval().eval(), _ROWS, 3),
    "layer_norm": (lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), _ROWS, 3),
    "rms_norm": (lambda: nn.Sequential(nn.Linear(3, 3), nn.RMSNorm(3)), noise(2, 3, 3), 3),
    "attention": (Attention, noise(2, 3, 4), 4),
    "dropout_off": (DropoutOff, _ROWS, 3),
    "scalars": (Scalars, _ROWS, 3),
    "transposed": (Transposed, _ROWS, 2),
    "parametrized": (_parametrized, _ROWS, 3),
    "in_place": (InPlace, _ROWS, 3),
    "recurrent": (Recurrent, noise(2, 3, 3), 2),
    "lookup": (Lookup, classes(2, 3, count=5), 2),
}
_STATEFUL_CASES = {
    "keeps_last": (KeepsLast, _ROWS, 2),
    "running_mean": (RunningMean, _ROWS, 2),
    "counts_in_place": (CountsInPlace, _ROWS, 2),
    "averages_in_place": (AveragesInPlace, _ROWS, 2),
    "hooks_itself": (HooksItself, _ROWS, 2),
}
_TRAINING_CASES = {
    "batch_norm_train": (lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()), _ROWS, 3),
    "dropout_train": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.4), nn.Tanh()), _ROWS, 3),
    "no_grad_statistics": (NoGradStatistics, _ROWS, 2),
    "raises_late": (RaisesLate, _ROWS, 2),
}
AWKWARD = tuple(_CASES)
STATEFUL = tuple(_STATEFUL_CASES)  # forward passes change the module
TRAINING = tuple(_TRAINING_CASES)  # random, stateful or failing in training mode


def awkward(name):
    """A fresh copy of the named case."""
    build, inputs, width = (_CASES | _STATEFUL_CASES | _TRAINING_CASES)[name]
    return Awkward(seeded(build).to(torch.float64), inputs, width)


def awkward_split(name):
    """The named case as trunk under a linear head, with its inputs and a target."""
    case = awkward(name)
    h = case.module(*case.args)
    head = LinearHead(seeded(lambda: nn.Linear(case.width, 4)).double())
    return Split(case.module, head), case.inputs, classes(*h.shape[:-1], count=4)
