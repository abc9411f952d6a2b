"""Compiled functions raise the errors of what they run, and do not get in each other's way."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from splitfg import Backprop, CentralDifference, ForwardGradient, LinearHead, Split, SplitError, SplitFG
from splitfg.compiled import whole
from splitfg.estimators import compiled


def test_a_traced_function_raises_its_own_error():
    ones = torch.ones(3, 3)
    product = whole(make_fx(lambda a, b: [a @ b])(ones, ones))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        product(ones)


def test_many_networks_compile_in_one_process():
    """torch keeps eight versions of a code object; every network has its own."""
    kept = []
    for width in range(3, 13):
        split = Split(nn.Linear(4, width), LinearHead(nn.Linear(width, 3)))
        network, estimator = SplitFG(2).compiled(split, _without_code_generation)
        kept.append((network, estimator, _estimate(estimator, network)))
        torch.testing.assert_close(kept[-1][2].grads, _estimate(SplitFG(2), split).grads)
    torch.compiler.reset()


class ConstantWeights(nn.Module):
    """A norm that torch's compiler cannot trace in forward mode."""

    def forward(self, x):
        return F.layer_norm(x, (4,), torch.ones(4))


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x


@pytest.mark.parametrize(
    ("estimator", "layer"), [(SplitFG(2), ConstantWeights), (ForwardGradient(2), Branch), (Backprop(), Branch)]
)
def test_an_error_of_the_compiler_gives_the_cure_and_spares_later_passes(estimator, layer):
    """Its frames hold guards of the dispatcher, so that torch fails in all later passes with tangents."""
    bad = Split(nn.Sequential(nn.Linear(4, 4), layer()), LinearHead(nn.Linear(4, 3)))
    good = Split(nn.Linear(4, 4), LinearHead(nn.Linear(4, 3)))
    expected, keys = _estimate(SplitFG(2), good).grads, str(torch._C._dispatch_tls_local_exclude_set())
    _estimate(estimator, bad)
    network, fast = compiled(bad, estimator, _without_code_generation)
    with pytest.raises(SplitError, match=r"torch's compiler fails on this network \(.*compile_=None") as raised:
        _estimate(fast, network)
    assert raised.value.__context__ is None

    gc.collect()
    assert str(torch._C._dispatch_tls_local_exclude_set()) == keys
    torch.testing.assert_close(_estimate(SplitFG(2), good).grads, expected, rtol=0, atol=0)
    network, fast = compiled(good, SplitFG(2), _without_code_generation)
    torch.testing.assert_close(_estimate(fast, network).grads, expected)
    torch.compiler.reset()


def test_other_errors_of_a_compiled_function_stay():
    def fails(*_):
        raise RuntimeError("out of memory")

    network, fast = compiled(
        Split(nn.Linear(4, 4), LinearHead(nn.Linear(4, 3))), SplitFG(2, engine=CentralDifference()), lambda _: fails
    )
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        _estimate(fast, network)


def _without_code_generation(function):
    return torch.compile(function, fullgraph=True, dynamic=False, backend="eager")


def _estimate(estimator, network):
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(5, 4, generator=draws), torch.randint(0, 3, (5,), generator=draws)
    return estimator(network, x, y, generator=draws)
