"""Slopes and curvatures of heads: closed forms against forward mode over forward mode."""

from itertools import pairwise

import pytest
import torch
from _toolkit import DOUBLE, classes, noise, seeded
from torch import nn

from splitfg import CrossEntropy, LinearHead, ReverseModeHead
from splitfg.heads import SquaredError, head_slopes
from splitfg.heads._slopes import _by_forward_mode


def _linear(*sizes):
    return seeded(lambda: [nn.Linear(n, m, dtype=DOUBLE) for n, m in pairwise(sizes)])


WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 1.5], dtype=DOUBLE)
LOSSES = {
    "cross-entropy": CrossEntropy(),
    "smoothed": CrossEntropy(label_smoothing=0.2),
    "weighted, some ignored": CrossEntropy(class_weights=WEIGHTS, ignore_index=1, label_smoothing=0.1),
    "squared error": SquaredError(),
}


def _problem(name, sizes, block, leading):
    loss = LOSSES[name]
    head = LinearHead(*_linear(*sizes), loss=loss, block=block)
    h, moves = noise(*leading, sizes[0]), noise(3, *leading, sizes[0], seed=1)
    squared = isinstance(loss, SquaredError)
    y = noise(*leading, sizes[-1], seed=2) if squared else classes(*leading, count=sizes[-1])
    return head, h, y, moves


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("sizes", "block"), [((5, 4), 2**24), ((5, 4), 9), ((5, 3, 4), 4), ((5, 4), 1)])
@pytest.mark.parametrize("leading", [(7,), (2, 6)])
def test_closed_forms_are_forward_mode(name, sizes, block, leading):
    given = _problem(name, sizes, block, leading)
    found, expected = head_slopes(*given), _by_forward_mode(*given)
    torch.testing.assert_close(found, expected)
    assert expected[1].abs().min() > 1e-6


def test_other_heads_take_forward_mode():
    """Of a nonlinear head the second derivative is the loss's own, not only Gauss-Newton's."""
    module = seeded(lambda: nn.Sequential(nn.Linear(5, 6, dtype=DOUBLE), nn.Tanh(), nn.Linear(6, 4, dtype=DOUBLE)))
    head, h, y, moves = ReverseModeHead(module), noise(7, 5), classes(7, count=4), noise(2, 7, 5, seed=1)
    first, second = head_slopes(head, h, y, moves)

    def loss(s):
        return nn.functional.cross_entropy(module(h + s[0] * moves[0] + s[1] * moves[1]), y)

    at = torch.zeros(2, dtype=DOUBLE)
    torch.testing.assert_close(second, torch.autograd.functional.hessian(loss, at))
    torch.testing.assert_close(first, torch.autograd.functional.jacobian(loss, at))


def test_large_logits_stay_finite():
    head, h, y, moves = _problem("cross-entropy", (5, 4), 2**24, (7,))
    assert all(found.isfinite().all() for found in head_slopes(head, 1e4 * h, y, moves))
