"""Sums of gradients: by name, in new memory or in that of the first operand, and never in anybody else's."""

import pytest
import torch
from _toolkit import noise
from torch import nn

from splitfg import ReverseModeHead, SquaredError
from splitfg.numerics import add_into, added


def two_sets():
    total = {"both": noise(3, 4, seed=1), "first": noise(2, seed=2)}
    return total, {"both": noise(3, 4, seed=3), "second": noise(5, seed=4)}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, g in found.items():
        assert torch.equal(g, expected[name])
        assert g.dtype == expected[name].dtype


def test_sums_in_place_are_the_sums():
    total, more = two_sets()
    expected, before = added(total, more), more["both"].clone()
    found = add_into(total, more)
    assert_same(found, expected)
    assert found["both"] is total["both"]
    assert found["second"] is more["second"]
    assert torch.equal(more["both"], before)


def test_gradients_that_share_memory_are_left_alone():
    """Heads return the same tensor for two parameters, and trunks one that the head returns too."""
    one, other = noise(3, seed=1), noise(3, seed=2)
    total, more = {"a": one, "b": one, "c": other}, {"a": noise(3, seed=3), "c": noise(3, seed=4), "d": other}
    expected, kept = added(total, more), (one.clone(), other.clone())
    assert_same(add_into(total, more), expected)
    assert torch.equal(one, kept[0])
    assert torch.equal(other, kept[1])


CANNOT_HOLD = {
    "expanded": (noise(1, 4).expand(3, 4), noise(3, 4, seed=1)),
    "narrower": (noise(3, 4).bfloat16(), noise(3, 4, seed=1).float()),
    "smaller": (noise(4), noise(3, 4, seed=1)),
    "differentiable": (noise(3, 4).requires_grad_(), noise(3, 4, seed=1)),
}


@pytest.mark.parametrize("kind", CANNOT_HOLD)
def test_tensors_that_cannot_hold_the_sum_stay_unchanged(kind):
    own, more = CANNOT_HOLD[kind]
    before = own.detach().clone()
    assert_same(add_into({"w": own}, {"w": more}), {"w": own + more})
    assert torch.equal(own, before)


class Shifted(nn.Module):
    """Adds a parameter with the shape of h, so that its gradient is u."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(noise(3, 4))

    def forward(self, h):
        return h + self.shift


def test_gradients_of_a_head_share_no_memory_with_u():
    found = ReverseModeHead(Shifted(), SquaredError())(noise(3, 4, seed=1), noise(3, 4, seed=2))
    u = found.u.clone()
    found.grads["module.shift"].zero_()
    assert torch.equal(found.u, u)
