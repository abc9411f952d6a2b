"""Maps that carry gradients back along attention weights, against autograd and formulas by hand, in float64."""

import pytest
import torch
from _toolkit import DOUBLE, classes, exact, generator, mlp_split, noise, seeded
from torch import nn

from splitfg import BlockPath, DirectPath, LinearHead, MeanJacobian, ParallelPull, PathBlock, ResidualPath, Split
from splitfg.errors import SplitError
from splitfg.feedback import AttentionMaps
from splitfg.models import GPT, GPTConfig
from splitfg.sites import AttentionLayer

T, WIDTH, HEADS = 5, 4, 2


class FixedAttention(nn.Module):
    """Linear attention: every token reads the others by weights that depend on nothing."""

    def __init__(self):
        super().__init__()
        self.value, self.proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weights = noise(HEADS, T, T, seed=7).softmax(-1)

    def forward(self, x):
        v = self.value(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return self.proj((self.weights @ v).transpose(1, 2).flatten(-2))

    def attention_weights(self, x):
        return self.weights.expand(len(x), -1, -1, -1)


class Linear(nn.Module):
    """Embedding, linear attention, a linear layer for every token; all on a residual stream."""

    def __init__(self):
        super().__init__()
        self.token, self.attention, self.layer = nn.Embedding(11, WIDTH), FixedAttention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        x = self.token(tokens)
        x = x + self.attention(x)
        return x + self.layer(x)


STREAM = ResidualPath(("token", "attention.proj", "layer"))
BLOCKS = BlockPath(
    (PathBlock(("attention",), writer="attention.proj"), PathBlock(("layer",))), residual=True, writers=("token",)
)


def network():
    s = seeded(lambda: Split(Linear().to(DOUBLE), LinearHead(nn.Linear(WIDTH, 3)).to(DOUBLE)))
    return s, classes(16, T, count=11), classes(16, T, count=3)


def trained(estimator, steps=150):
    s, x, y = network()
    g = generator()
    for _ in range(steps):
        estimator.update_state(s, estimator(s, x, y, generator=g))
    return estimator(s, x, y, generator=g), exact(s, x, y)


def test_linear_attention_is_exact_for_the_writers():
    found, expected = trained(DirectPath(STREAM, AttentionMaps(1.0)))
    assert found.stats.forward_only
    for name in ("trunk.token.weight", "trunk.attention.proj.weight", "trunk.layer.weight"):
        torch.testing.assert_close(found.grads[name], expected[name], rtol=1e-5, atol=1e-7)


def test_linear_attention_is_exact_inside_blocks_too():
    found, expected = trained(ParallelPull(BLOCKS, AttentionMaps(1.0), own_block=True))
    for name, g in expected.items():
        torch.testing.assert_close(found.grads[name], g, rtol=1e-5, atol=1e-7)


def test_maps_of_a_tokens_own_gradient_are_not():
    found, expected = trained(DirectPath(STREAM, MeanJacobian(0.3)))
    g = expected["trunk.token.weight"]
    assert (found.grads["trunk.token.weight"] - g).norm() > 0.05 * g.norm()


def given_maps():
    maps = AttentionMaps(0.5)
    maps.load_state_dict({"token": noise(WIDTH, WIDTH, seed=1), "token/heads": noise(HEADS, WIDTH, WIDTH, seed=2)})
    weights = noise(3, HEADS, T, T, seed=3).softmax(-1)
    return maps, maps.attending({"token": weights}), weights


def test_predictions_are_the_formula():
    maps, seen, weights = given_maps()
    state, r = maps.state_dict(), noise(3, T, WIDTH, seed=4)
    found = seen.at("token", r)
    for b in range(3):
        for s in range(T):
            expected = state["token"] @ r[b, s]
            for t in range(T):
                for c in range(HEADS):
                    expected = expected + weights[b, c, t, s] * (state["token/heads"][c] @ r[b, t])
            torch.testing.assert_close(found[b, s], expected)


def test_one_measurement_is_the_formula():
    maps, seen, weights = given_maps()
    before = {name: value.clone() for name, value in maps.state_dict().items()}
    e, dx, n = noise(3, T, WIDTH, seed=5), noise(3, T, WIDTH, seed=6), 3 * T
    carried = [weights[:, c] @ e for c in range(HEADS)]
    rest = dx - e @ before["token"] - sum(carried[c] @ before["token/heads"][c] for c in range(HEADS))
    scale = 0.5 / (n + sum(part.square().sum() for part in (e, *carried)) / n)
    maps.apply(seen.change(seen.correlate({"token": [e]}, dx), rows=n, noises=WIDTH))
    after = maps.state_dict()
    torch.testing.assert_close(after["token"], before["token"] + scale * torch.einsum("btf,btd->fd", e, rest))
    for c in range(HEADS):
        moved = scale * torch.einsum("btf,btd->fd", carried[c], rest)
        torch.testing.assert_close(after["token/heads"][c], before["token/heads"][c] + moved)


def test_every_point_sees_the_heads_above_it():
    config = GPTConfig(layers=2, width=8, heads=2, context=6, vocab=20)
    trunk = GPT(config, generator=generator()).double()
    s, tokens = Split(trunk, LinearHead(trunk.tied_linear()), tied="include"), classes(3, 7, count=20)
    for estimator in (DirectPath(feedback=AttentionMaps()), ParallelPull(feedback=AttentionMaps(), own_block=True)):
        estimator.update_state(s, estimator(s, tokens[:, :-1], tokens[:, 1:], generator=generator()))
        heads = {n: len(m) for n, m in estimator.feedback.state_dict().items() if n.endswith("/heads")}
        assert list(heads.values()) == [4, 2, 2, 0]


def test_the_weights_of_a_gpt_are_those_of_its_attention():
    config = GPTConfig(layers=1, width=8, heads=2, context=6, vocab=20)
    attention = GPT(config, generator=generator()).double().blocks[0].attention
    assert isinstance(attention, AttentionLayer)
    x, future = noise(3, 6, 8), torch.ones(6, 6, dtype=torch.bool).triu(1)
    v = attention.qkv(x)[..., 16:].unflatten(-1, (2, 4))
    mixed = torch.einsum("bhts,bshd->bthd", attention.attention_weights(x, future), v)
    torch.testing.assert_close(attention.proj(mixed.flatten(-2)), attention(x, future))


def test_trunks_without_attention_raise():
    s, x, y = mlp_split(5, 6, 6, 3), noise(4, 5), classes(4, count=3)
    with pytest.raises(SplitError, match="no module of the trunk returns attention weights"):
        ParallelPull(feedback=AttentionMaps())(s, x, y, generator=generator())
    maps, seen, _ = given_maps()
    with pytest.raises(SplitError, match="use DirectPath or ParallelPull"):
        maps.at("token", noise(3, T, WIDTH))
    with pytest.raises(SplitError, match=r"need \(B, T, d\)"):
        seen.at("token", noise(3, T + 1, WIDTH))
