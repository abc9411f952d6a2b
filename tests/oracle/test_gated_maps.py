"""Maps gated by the cluster of the stream's value, against Jacobians that depend on it and a formula by hand.

What training and resuming need is tested for maps along attention too.
"""

import pytest
import torch
from _learning import assert_captured_and_resumed
from _toolkit import classes, generator, noise
from torch import nn

from splitfg import Backprop, DirectPath, LinearHead, MeanJacobian, ParallelPull, ResidualPath, Split, SplitError, Tied
from splitfg.feedback import AttentionMaps, GatedMaps
from splitfg.models import GPT, GPTConfig
from splitfg.sites import TapPoints, record, stream_after_writers, tapped

DOUBLE = torch.float64


def two_clusters(rows, seed):
    """Values around two directions, the number of the direction, and noise."""
    kind = classes(rows, count=2, seed=seed)
    centres = 3 * noise(2, 6, seed=5)
    return centres[kind] + 0.3 * noise(rows, 6, seed=seed + 100), kind, noise(rows, 4, seed=seed + 200)


def test_jacobians_that_differ_by_cluster_are_found():
    """dx = e J_c with one J for each of two clusters: gated maps become both, one mean map can become neither."""
    jacobians, r = noise(2, 4, 4, seed=9), noise(64, 4, seed=8)
    gated, plain = GatedMaps(1.0, clusters=4), MeanJacobian(1.0)
    for step in range(300):
        x, kind, e = two_clusters(64, step)
        dx = torch.einsum("nf,nft->nt", e, jacobians[kind])
        for maps, seen in ((gated, gated.seeing({"block": x})), (plain, plain)):
            maps.apply(seen.change(seen.correlate({"block": [e]}, dx), rows=64, noises=4))
    x, kind, _ = two_clusters(64, 1000)
    expected = torch.einsum("nt,nft->nf", r, jacobians[kind])
    torch.testing.assert_close(gated.seeing({"block": x}).at("block", r), expected, rtol=1e-3, atol=1e-3)
    assert (plain.at("block", r) - expected).norm() > 0.3 * expected.norm()


def test_one_measurement_is_the_formula():
    x, _, e = two_clusters(8, 0)
    dx, rate, n, d = noise(8, 4, seed=3), 0.5, 8, 4
    maps = GatedMaps(rate, clusters=2)
    maps.load_state_dict(
        {
            "block": noise(4, 4, seed=1),
            "block/gates": noise(2, 4, 4, seed=2),
            "block/centres": noise(2, 6, seed=5),
        }
    )
    before = {name: value.clone() for name, value in maps.state_dict().items()}
    unit = x / x.square().mean(-1, keepdim=True).sqrt()
    nearest = torch.cdist(unit, before["block/centres"]).argmin(-1)
    assert set(nearest.tolist()) == {0, 1}
    rest = torch.stack([dx[i] - e[i] @ (before["block"] + before["block/gates"][nearest[i]]) for i in range(n)])
    seen = maps.seeing({"block": x})
    maps.apply(seen.change(seen.correlate({"block": [e]}, dx), rows=n, noises=d))
    after, scale = maps.state_dict(), rate / (n + 2 * d)
    torch.testing.assert_close(after["block"], before["block"] + scale * e.T @ rest)
    for c in range(2):
        own = nearest == c
        torch.testing.assert_close(after["block/gates"][c], before["block/gates"][c] + scale * e[own].T @ rest[own])
        # a step towards the mean of the cluster's rows
        moved, towards = after["block/centres"][c] - before["block/centres"][c], unit[own].mean(0)
        share = moved / (towards - before["block/centres"][c])
        torch.testing.assert_close(share, share[:1].expand_as(share))
        assert 0 < share[0] < 1


def gpt():
    config = GPTConfig(layers=2, width=8, heads=2, context=6, vocab=20)
    trunk = GPT(config, generator=generator()).double()
    tokens = classes(3, 7, count=20)
    return Split(trunk, LinearHead(trunk.tied_linear()), tied=Tied.INCLUDE), tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("feedback", [lambda: GatedMaps(clusters=3), AttentionMaps])
def test_enough_pulls_are_backprop(feedback):
    (split, x, y), pull = gpt(), ParallelPull(feedback=feedback(), pulls=4)
    for seed in range(3):
        pull.update_state(split, pull(split, x, y, generator=generator(seed)))
    found, expected = pull(split, x, y, generator=generator()), Backprop()(split, x, y)
    for name, g in expected.grads.items():
        torch.testing.assert_close(found.grads[name], g)


ESTIMATORS = {
    "gated": lambda: ParallelPull(feedback=GatedMaps(clusters=3)),
    "gated, own block": lambda: ParallelPull(feedback=GatedMaps(clusters=3), own_block=True),
    "gated, direct": lambda: DirectPath(feedback=GatedMaps(clusters=3)),
    "attention, own block": lambda: ParallelPull(feedback=AttentionMaps(), own_block=True),
    "attention, direct": lambda: DirectPath(feedback=AttentionMaps()),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_captured_and_resumed_steps_are_the_eager_ones(name):
    def build():
        split, x, y = gpt()
        return split, ESTIMATORS[name](), x, y

    assert_captured_and_resumed(build, steps=4)


def test_wrong_settings():
    with pytest.raises(SplitError, match=r"rate must be .*\n?.*clusters must be"):
        GatedMaps(2.0, clusters=1)
    with pytest.raises(SplitError, match="a lean pass does not keep: use lean=False"):
        DirectPath(feedback=GatedMaps(), lean=True)


def test_values_after_writes_are_those_of_the_stream():
    """Against the inputs of the modules that read the stream next, in a GPT."""
    split, x, _ = gpt()
    path, trunk, read = split.trunk.residual_path(), split.trunk, {}
    seen = record(split, x, TapPoints((*path.writers, path.top)), None)
    values = stream_after_writers(trunk, path, seen)
    assert set(values) == set(path.writers)
    readers = [n for n, m in trunk.named_modules() if isinstance(m, torch.nn.LayerNorm)]
    with tapped(trunk, readers, lambda name, a, z: read.update({name: a})):
        split.h(x)
    after = [read[name] for name in read]  # in the order of calls: the first reads all lookups
    blocks = [name for name in path.writers if "blocks" in name]
    assert len(after) == len(blocks) + 1
    for name, expected in zip(blocks, after[1:], strict=True):
        torch.testing.assert_close(values[name], expected)
    torch.testing.assert_close(values[path.writers[path.writers.index(blocks[0]) - 1]], after[0])


class Bent(nn.Module):
    """A stream whose later block is linear in it, with another matrix for each sign of its first feature."""

    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(5, 4, dtype=DOUBLE), nn.Linear(4, 4, dtype=DOUBLE)
        self.register_buffer("mix", noise(2, 4, 4, seed=30))

    def forward(self, x):
        x = self.first(x)
        kind = (x[..., 0] > 0).long()
        return x + self.block(torch.einsum("nf,nfg->ng", x, self.mix[kind]))


def test_the_direct_path_becomes_exact_where_clusters_explain_the_jacobian():
    split = Split(Bent(), LinearHead(nn.Linear(4, 3, dtype=DOUBLE)))
    with torch.no_grad():
        split.trunk.first.weight *= 0.1
        split.trunk.first.weight[0] = 0
        split.trunk.first.weight[0, 0] = 3.0
        split.trunk.first.bias.zero_()
    x, y = noise(64, 5, seed=1), classes(64, count=3)
    x[:, 0] = x[:, 0].sign() * (1 + x[:, 0].abs())
    path, error = ResidualPath(writers=("first", "block")), {}
    for name, maps in (("gated", GatedMaps(0.8, clusters=4)), ("mean", MeanJacobian(0.8))):
        estimator = DirectPath(path, feedback=maps)
        for seed in range(400):
            estimator.update_state(split, estimator(split, x, y, generator=generator(seed)))
        found, expected = estimator(split, x, y, generator=generator()), Backprop()(split, x, y)
        assert found.stats.trunk_backward == 0
        g = expected.grads["trunk.first.weight"]
        error[name] = float((found.grads["trunk.first.weight"] - g).norm() / g.norm())
    assert error["gated"] < 0.02 < 0.1 < error["mean"]


def test_a_stream_that_is_no_sum_is_an_error():
    x, y = noise(8, 5), classes(8, count=3)
    split = Split(Bent(), LinearHead(nn.Linear(4, 3, dtype=DOUBLE)))
    scaled = DirectPath(ResidualPath(writers=("first", "block"), strict=False), feedback=GatedMaps())
    with pytest.raises(SplitError, match="scaled on its way is no sum of its writes: use feedback that does not read"):
        scaled(split, x, y, generator=generator())
