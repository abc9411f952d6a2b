"""Layers of zeros, as at the end of residual branches, hide no error of what comes before them from the first batch."""

import pytest
import torch
from _cuts import full_basis, gradient
from _toolkit import classes, close, generator, noise, seeded
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from splitfg import (
    ActivityFG,
    BlackBoxTrunk,
    ForwardGradient,
    FrozenTrunk,
    LearnedFeedback,
    LinearHead,
    Split,
    SplitError,
    SplitFG,
    split,
)

X, Y = noise(6, 5), classes(6, count=3)


class Branch(nn.Module):
    """A linear layer, and beside it a function of another one behind a layer that starts at zero."""

    def __init__(self, function, start):
        super().__init__()
        self.skip, self.inner, self.function = nn.Linear(5, 4), nn.Linear(5, 4), function
        self.last, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        for p in self.last.parameters():
            nn.init.constant_(p, start)

    def forward(self, x):
        return self.head((self.skip(x) + self.last(self.function(self.inner(x)))).tanh())


def branch(function, start=0.0):
    return seeded(lambda: Branch(function, start)).double()


def constant(z):
    with torch.no_grad():
        return 2 * z


def centred(z):
    return z - z.mean(0)


def raises(model, estimator, message):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    versions = [p._version for p in model.parameters()]
    with pytest.raises(SplitError, match=message):
        estimator(split(model), X, Y, generator=generator())
    assert versions == [p._version for p in model.parameters()]
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])


@pytest.mark.parametrize("start", [0.0, 1e-6])
@pytest.mark.parametrize("estimator", [SplitFG(2), ForwardGradient(2), ActivityFG(2)])
def test_a_block_without_gradients(estimator, start):
    raises(branch(constant, start), estimator, r"passes through torch.no_grad\(\)")


def test_rows_that_mix():
    raises(branch(centred), ActivityFG(2), "rows of a batch mix")
    raises(branch(centred), SplitFG(2, micro_batch=2), "mixes the rows of a batch")


def test_a_layer_whose_forward_was_replaced():
    model = branch(torch.tanh)
    model.inner.forward = lambda x: 2 * F.linear(x, model.inner.weight, model.inner.bias)
    raises(model, LearnedFeedback(), "are not the trunk's derivatives")


def test_estimates_are_at_the_zeros():
    model = branch(torch.tanh)
    close(full_basis(split(model), X, Y), gradient(model, X, Y))


def test_a_device_runs_with_its_own_weights():
    ran, last = [], nn.Linear(4, 3).double()

    def device(params, x):
        ran.append(params["bias"])
        return (x @ params["weight"] + params["bias"]).tanh()

    trunk = BlackBoxTrunk(device, {"weight": noise(5, 4), "bias": torch.zeros(4, dtype=torch.float64)})
    network = Split(trunk, LinearHead(last))
    last.register_forward_hook(lambda *_: None)  # the validation of hooks runs the trunk
    FrozenTrunk()(network, X, Y)
    assert len(ran) > 1
    assert not torch.stack(ran).any()


class Doubled(nn.Module):
    def forward(self, w):
        return 2 * w


def test_a_cache_of_parametrized_weights_holds_those_of_the_model():
    model = branch(torch.tanh)
    parametrize.register_parametrization(model.last, "weight", Doubled())
    expected = gradient(model, X, Y)
    with parametrize.cached():
        close(full_basis(split(model, example=X), X, Y), expected)
        assert not model.last.weight.any()
