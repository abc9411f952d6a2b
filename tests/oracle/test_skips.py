"""Pulls that carry gradients along the skips of a ResNet, against plain autograd in float64."""

import pytest
import torch
from _toolkit import DOUBLE, classes, exact, generator, noise, seeded
from torch import nn

from splitfg import BlockPath, LinearHead, MeanJacobian, ParallelPull, Split, SplitError
from splitfg.estimators import compiled
from splitfg.feedback import RandomMaps, UnchangedFeedback
from splitfg.models import MLP, FlatTrunk, ResNet
from splitfg.models.resnet import BasicBlock
from splitfg.sites import SkipBlock

BLOCKS = 4


def network():
    trunk = ResNet(widths=(8, 16), blocks=(1, 2), generator=generator()).to(DOUBLE)
    head = seeded(lambda: LinearHead(nn.Linear(16, 5)).to(DOUBLE))
    return Split(trunk, head), noise(3, 3, 8, 8), classes(3, count=5)


class Scaled(torch.autograd.Function):
    """The identity, with its gradient times t."""

    @staticmethod
    def forward(ctx, x, t):
        ctx.t = t
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.t * g, None


def by_branches(s, x, y):
    """Gradients by the number of branches that their paths pass through after the parameter: coefficients of t^k.

    With the gradient at the input of every branch times t, a path through k branches is worth t^k.
    """
    trunk, (head,) = s.trunk, s.head.layers
    points = torch.linspace(-1, 1, BLOCKS, dtype=DOUBLE)
    names, params = zip(*trunk.named_parameters(), strict=True)
    found = []
    for t in points:
        z = trunk.stem(x)
        for block in trunk.blocks:
            z = torch.relu(block.shortcut(z) + block.second(block.first(Scaled.apply(z, t))))
        loss = nn.functional.cross_entropy(head(z.mean((2, 3))), y)
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)]))
    orders = torch.linalg.solve(torch.linalg.vander(points), torch.stack(found))
    split = [order.split([p.numel() for p in params]) for order in orders]
    return [{n: g.view_as(p) for n, g, p in zip(names, order, params, strict=True)} for order in split]


@pytest.mark.parametrize("pulls", [1, 2, 3])
def test_n_pulls_sum_all_paths_through_fewer_than_n_branches(pulls):
    s, x, y = network()
    estimate, orders = ParallelPull(pulls=pulls, skips=True)(s, x, y), by_branches(s, x, y)
    assert estimate.stats.biased
    assert estimate.stats.jvps == 0
    for name in orders[0]:
        expected = sum(order[name] for order in orders[:pulls])
        torch.testing.assert_close(estimate.grads[f"trunk.{name}"], expected, rtol=1e-9, atol=1e-12)
    if pulls < BLOCKS - 1:
        assert all(orders[pulls][name].norm() > 1e-6 for name in ("stem.conv.weight", "blocks.0.first.conv.weight"))


@pytest.mark.parametrize("feedback", [UnchangedFeedback, RandomMaps, MeanJacobian])
@pytest.mark.parametrize("pulls", [BLOCKS, 7])
def test_as_many_pulls_as_blocks_are_backprop(feedback, pulls):
    s, x, y = network()
    estimate = ParallelPull(feedback=feedback(), pulls=pulls, skips=True)(s, x, y, generator=generator())
    for name, g in exact(s, x, y).items():
        torch.testing.assert_close(estimate.grads[name], g, rtol=1e-9, atol=1e-12)


def test_predictions_feed_branches_alone():
    s, x, y = network()
    with torch.no_grad():  # nothing passes through a branch, so that skips carry all of the gradient
        for block in s.trunk.blocks:
            block.first.norm.weight.zero_()
    estimate = ParallelPull(feedback=RandomMaps(), pulls=2, skips=True)(s, x, y)
    for name, g in exact(s, x, y).items():
        torch.testing.assert_close(estimate.grads[name], g, rtol=1e-9, atol=1e-12)


def test_compiled_equals_eager():
    s, x, y = network()
    estimator = ParallelPull(pulls=2, skips=True)
    fast_split, fast = compiled(s, estimator, lambda function: function)
    found = fast(fast_split, x, y)
    for name, g in estimator(s, x, y).grads.items():
        torch.testing.assert_close(found.grads[name], g)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_block_passes_the_gradient_along_its_skip(stride):
    block = BasicBlock(8, 8 * stride, stride=stride, generator=generator()).to(DOUBLE)
    assert isinstance(block, SkipBlock)
    x, delta = noise(2, 8, 6, 6).requires_grad_(), noise(2, 8 * stride, 6 // stride, 6 // stride, seed=3)
    y = torch.relu(block.shortcut(x) + block.second(block.first(x)).detach())
    (expected,) = torch.autograd.grad(y, x, delta)
    torch.testing.assert_close(block.skip_back(x.detach(), y.detach(), delta), expected)


def test_the_flat_trunk_has_a_skip_up_to_h():
    trunk = FlatTrunk(width=8, generator=generator()).to(DOUBLE)
    s = Split(trunk, seeded(lambda: LinearHead(nn.Linear(8 * 64, 5)).to(DOUBLE)))
    x, y = noise(3, 3, 8, 8), classes(3, count=5)
    one, both = (ParallelPull(pulls=n, skips=True)(s, x, y) for n in (1, 2))
    expected = exact(s, x, y)
    torch.testing.assert_close(both.grads["trunk.stem.conv.weight"], expected["trunk.stem.conv.weight"])
    assert (one.grads["trunk.stem.conv.weight"] - expected["trunk.stem.conv.weight"]).norm() > 1e-3


def test_networks_without_skips_raise():
    x, y = noise(4, 6, dtype=torch.get_default_dtype()), classes(4, count=3)
    plain = Split(MLP(6, widths=(6, 6), generator=generator()), LinearHead(nn.Linear(6, 3)))
    with pytest.raises(SplitError, match="no block of the path has a skip"):
        ParallelPull(feedback=RandomMaps(), skips=True)(plain, x, y)
    with pytest.raises(SplitError, match=r"r is the only prediction: use feedback=MeanJacobian\(\)"):
        ParallelPull(skips=True)(plain, x, y)
    with pytest.raises(SplitError, match="carries gradients along its skips as it is"):
        ParallelPull(BlockPath(plain.trunk.block_path().blocks, residual=True), skips=True)(plain, x, y)
