"""Compiled functions raise the errors of what they run, and do not get in each other's way."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from splitfg import LinearHead, Split, SplitFG
from splitfg.compiled import whole


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


def _without_code_generation(function):
    return torch.compile(function, fullgraph=True, dynamic=False, backend="eager")


def _estimate(estimator, network):
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(5, 4, generator=draws), torch.randint(0, 3, (5,), generator=draws)
    return estimator(network, x, y, generator=draws)
