"""Layers that write to a stream once for all samples, as position tables do, against autograd in float64."""

import pytest
import torch
from _toolkit import DOUBLE, classes, exact, generator, seeded
from torch import nn

from splitfg import BlockPath, DirectPath, MeanJacobian, ParallelPull, PathBlock, ResidualPath, SplitError, split
from splitfg.feedback import RandomMaps

ROWS, T, D = 3, 5, 4
SHAPES = {  # the ways in which models add positions (T, D) to tokens (B, T, D)
    "as it is": lambda p, _: p,
    "index": lambda p, _: p[None],
    "unsqueeze": lambda p, _: p.unsqueeze(0),
    "expand": lambda p, x: p.unsqueeze(0).expand(*x.shape, -1),
    "repeat": lambda p, x: p.repeat(len(x), 1, 1),
}


class Positions(nn.Module):
    def __init__(self, shape, zeroed=False):
        super().__init__()
        self.shape = SHAPES[shape]
        self.token, self.position = nn.Embedding(7, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, D)) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 7)
        if zeroed:
            for block in self.blocks:
                nn.init.zeros_(block[3].weight)

    def forward(self, x):
        x = self.token(x) + self.shape(self.position(torch.arange(x.shape[1])), x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def network(shape, zeroed=False):
    s = split(seeded(lambda: Positions(shape, zeroed).to(DOUBLE)))
    return s, classes(ROWS, T, count=7), classes(ROWS, T, count=7, seed=1)


BLOCKS = tuple(PathBlock((f"blocks.{i}",), writer=f"blocks.{i}.3") for i in range(2))
PATH = BlockPath(BLOCKS, residual=True, top="norm", writers=("position", "token"))


def assert_exact(estimate, expected, names=None):
    for name in expected if names is None else names:
        torch.testing.assert_close(estimate.grads[name], expected[name], msg=name)


@pytest.mark.parametrize("shape", SHAPES)
def test_as_many_pulls_as_blocks_are_backprop(shape):
    s, x, y = network(shape)
    assert_exact(ParallelPull(PATH, RandomMaps(), pulls=2)(s, x, y), exact(s, x, y))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"lean": True}, {"micro_batch": 2}, {"feedback": MeanJacobian()}])
def test_the_direct_path_finds_them_and_is_exact_without_blocks(shape, options):
    s, x, y = network(shape, zeroed=True)
    path = ResidualPath.find(s, x)
    assert set(path.writers) == {"token", "position", "blocks.0.3", "blocks.1.3"}
    assert path.top == "norm"
    estimate = DirectPath(path, **options)(s, x, y, generator=generator())
    assert_exact(estimate, exact(s, x, y), ["token.weight", "position.weight", "blocks.1.3.weight", "blocks.0.3.bias"])


def test_maps_from_them_learn_from_all_rows():
    s, x, y = network("as it is", zeroed=True)
    pull = ParallelPull(PATH, MeanJacobian(), own_block=True)
    estimate = pull(s, x, y, generator=generator())
    assert estimate.state_update["position"].abs().max() < 1e-12  # the identity explains everything
    assert_exact(estimate, exact(s, x, y), ["position.weight", "token.weight"])


def test_shapes_that_cannot_be_added_raise():
    s, x, y = network("as it is")
    path = BlockPath(BLOCKS, residual=True, top="norm", writers=("token", "blocks.0.1"))
    with pytest.raises(SplitError, match=r"blocks\.0\.1 writes \(3, 5, 6\), and the stream is \(3, 5, 4\)"):
        ParallelPull(path)(s, x, y)
    for wrong in (ResidualPath(("token", "position", "blocks.0.3", "blocks.1.3"), top="norm", features=3), PATH):
        method = DirectPath(wrong) if isinstance(wrong, ResidualPath) else ParallelPull(_with_features(wrong))
        with pytest.raises(SplitError, match="features=3 is no dimension of the stream"):
            method(s, x, y)


def _with_features(path):
    return BlockPath(path.blocks, residual=True, top=path.top, writers=path.writers, features=3)
