"""Blocks pulled in groups, against autograd and against blocks declared as one, in float64."""

import pytest
import torch
from _toolkit import DOUBLE, classes, exact, generator, noise, seeded
from test_pulls import NETWORKS, distance, gpt
from torch import nn
from torch.nn import functional as F

from splitfg import BlockPath, LinearHead, MeanJacobian, ParallelPull, PathBlock, Split, SplitError
from splitfg.feedback import GatedMaps, RandomMaps


@pytest.mark.parametrize("name", NETWORKS)
def test_one_group_of_all_blocks_is_backprop(name):
    build, blocks = NETWORKS[name]
    s, x, y = build()
    for group in (blocks, blocks + 1):
        estimate = ParallelPull(feedback=RandomMaps(), group=group)(s, x, y, generator=generator())
        assert distance(estimate, exact(s, x, y)) < 1e-12
        assert not estimate.stats.biased
        assert estimate.stats.block_backward == blocks


@pytest.mark.parametrize("name", ["gpt", "resnet", "tabm"])
def test_as_many_pulls_as_groups_are_backprop(name):
    s, x, y = NETWORKS[name][0]()
    expected = exact(s, x, y)
    two, one = (ParallelPull(feedback=MeanJacobian(), pulls=k, group=2) for k in (2, 1))
    estimate = two(s, x, y, generator=generator())
    assert distance(estimate, expected) < 1e-12
    assert not estimate.stats.biased
    assert one(s, x, y, generator=generator()).stats.biased


def chain():
    layers = [layer for _ in range(5) for layer in (nn.Linear(6, 6), nn.Tanh())]
    s = seeded(lambda: Split(nn.Sequential(*layers).to(DOUBLE), LinearHead(nn.Linear(6, 3)).to(DOUBLE)))
    return s, noise(4, 6), classes(4, count=3)


@pytest.mark.parametrize("pulls", [1, 2])
def test_a_group_of_a_chain_is_one_block(pulls):
    """Five layers in groups of two and one, as they are and as three blocks of several modules each."""
    s, x, y = chain()
    whole = BlockPath(tuple(PathBlock(tuple(map(str, range(a, min(a + 4, 10))))) for a in (0, 4, 8)))
    groups = ParallelPull(feedback=RandomMaps(), pulls=pulls, group=2)(s, x, y)
    blocks = ParallelPull(whole, RandomMaps(), pulls=pulls)(s, x, y)
    assert distance(groups, blocks.grads) < 1e-12
    assert distance(ParallelPull(feedback=RandomMaps(), pulls=pulls)(s, x, y), blocks.grads) > 1e-3


def test_a_group_of_a_residual_stream_is_autograd_from_its_prediction():
    """A transformer block learns from the prediction at its output, its last writer and those below from the sum."""
    s, x, y = gpt()
    maps, (lower, upper) = RandomMaps(), s.trunk.blocks
    estimate = ParallelPull(feedback=maps, group=2)(s, x, y)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    x0 = (s.trunk.token(x) + s.trunk.position).detach().requires_grad_()
    x1 = lower(x0, future)
    top = upper(x1.detach().requires_grad_(), future)
    logits = s.head.layers[0](s.trunk.norm(top))
    (r,) = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), y.flatten()), top, retain_graph=True)
    predicted = maps.at("blocks.0.mlp", r)
    inner = [lower.attention.qkv.weight, lower.norm2.weight, x0]
    qkv, norm2, below = torch.autograd.grad(x1, inner, predicted)
    torch.testing.assert_close(estimate.grads["trunk.blocks.0.attention.qkv.weight"], qkv)
    torch.testing.assert_close(estimate.grads["trunk.blocks.0.norm2.weight"], norm2)

    x1 = x1.detach().requires_grad_()
    (refined,) = torch.autograd.grad(upper(x1, future), x1, r)  # r and the upper block's pull
    bias = refined.sum((0, 1))
    torch.testing.assert_close(estimate.grads["trunk.blocks.0.mlp.out.bias"], bias)
    torch.testing.assert_close(estimate.grads["trunk.position"], (refined + below - predicted).sum(0))


def test_maps_learn_between_groups_alone():
    s, x, y = gpt()
    for feedback in (MeanJacobian(), GatedMaps()):
        pull = ParallelPull(feedback=feedback, group=2)
        estimate = pull(s, x, y, generator=generator())
        pull.update_state(s, estimate)
        learned = {name.split("/")[0] for name in feedback.state_dict()}
        assert "blocks.0.mlp" in learned
        assert not learned & {"blocks.0.attention", "blocks.1.attention", "blocks.1.mlp"}


def test_own_group_is_biased_by_the_prediction_at_the_bottom():
    s, x, y = gpt()
    estimate = ParallelPull(feedback=RandomMaps(), own_block=True, group=4)(s, x, y)
    assert estimate.stats.biased
    assert distance(estimate, exact(s, x, y)) > 1e-3


def test_a_group_has_blocks():
    with pytest.raises(SplitError, match="at least 1 block, got 0"):
        ParallelPull(group=0)
    with pytest.raises(SplitError, match="at least 1 block, got '2'"):
        ParallelPull(skips=True, group="2")
    with pytest.raises(SplitError, match="use group=1"):
        ParallelPull(skips=True, group=2)
