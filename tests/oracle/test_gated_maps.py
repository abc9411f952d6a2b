"""Maps gated by the cluster of the stream's value, against Jacobians that depend on it and a formula by hand.

What training and resuming need is tested for maps along attention too.
"""

import pytest
import torch
from _learning import assert_captured_and_resumed
from _toolkit import classes, generator, noise

from splitfg import Backprop, DirectPath, LinearHead, MeanJacobian, ParallelPull, Split, SplitError, Tied
from splitfg.feedback import AttentionMaps, GatedMaps
from splitfg.models import GPT, GPTConfig

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
    with pytest.raises(SplitError, match="ParallelPull"):
        DirectPath(feedback=GatedMaps())
