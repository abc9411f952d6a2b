"""The gradient of a table at the rows that were looked up is that of the whole table."""

import pytest
import torch
from _toolkit import classes, noise
from torch import nn

from splitfg.sites import layer_gradients, looks_up_few, lookup_gradient

OPTIONS = {"plain": {}, "padding": {"padding_idx": 2}, "by frequency": {"scale_grad_by_freq": True}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(3, 5), (7,), ()])
def test_is_the_gradient_of_the_table(options, dtype, shape):
    table, a = nn.Embedding(16, 4, **options).double(), classes(*shape, count=5, seed=1).to(dtype)
    delta, total = noise(*shape, 4, seed=2), noise(16, 4, seed=3)
    expected = total + layer_gradients(table, a, delta)["weight"]
    assert looks_up_few(table, a, delta)
    lookup_gradient(table, a, delta).add_to(total)
    assert torch.equal(total, expected)


class Subclass(nn.Embedding):
    pass


@pytest.mark.parametrize("table", [nn.Embedding(6, 4), Subclass(7, 4), nn.Embedding(7, 4).bfloat16(), nn.Linear(7, 4)])
def test_others_get_a_whole_gradient(table):
    a = torch.arange(6)
    assert not looks_up_few(table, a, torch.ones(6, 4))
    assert looks_up_few(nn.Embedding(7, 4), a, torch.ones(6, 4))
