"""Blocks found in one forward pass: as many pulls as blocks are autograd's gradient, in float64."""

import pytest
import torch
from _toolkit import DOUBLE, classes, exact, generator, noise, seeded
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from splitfg import BlockPath, LinearHead, MeanJacobian, ParallelPull, PathBlock, Split, SplitError, split
from splitfg.feedback import RandomMaps
from splitfg.models import GPT, GPTConfig


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(width), nn.Linear(width, 6), nn.Linear(6, width)

    def forward(self, x):
        return x + self.out(torch.tanh(self.inner(self.norm(x))))


class Language(nn.Module):
    """Tables that are added up, a list of blocks, a norm and a read-out."""

    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(7, 4), nn.Embedding(5, 4)
        self.layers = nn.ModuleList(Residual(4) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 7)

    def forward(self, x):
        x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, n, m, stride=1):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(n, m, 3, stride, 1), nn.GroupNorm(2, m)
        self.shortcut = nn.Identity() if n == m else nn.Conv2d(n, m, 1, stride)

    def forward(self, x):
        return torch.relu(self.shortcut(x) + self.norm(self.conv(x)))


class Images(nn.Module):
    """A stem, stages of blocks, the mean over pixels, and a read-out, as in torchvision."""

    def __init__(self, *, pool=True):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 4, 3, 1, 1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)
        self.first = nn.Sequential(Block(4, 4), Block(4, 4))
        self.second = nn.Sequential(Block(4, 8, 2), nn.Dropout(0.0), Block(8, 8))
        self.pool = nn.AdaptiveAvgPool2d(1) if pool else None
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.second(self.first(self.relu(self.norm(self.conv(x)))))
        return self.fc(x.mean((2, 3)) if self.pool is None else torch.flatten(self.pool(x), 1))


def language():
    return seeded(Language).double(), classes(3, 5, count=7), classes(3, 5, count=7, seed=1)


def images():
    return seeded(Images).double(), noise(3, 3, 8, 8), classes(3, count=5)


def sequential():
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()), nn.Linear(6, 3)]
    return seeded(lambda: nn.Sequential(*layers)).double(), noise(5, 4), classes(5, count=3)


class Ensemble(nn.Module):
    """The mean of several layers that run together."""

    def __init__(self):
        super().__init__()
        self.base, self.weight = nn.Linear(6, 6).requires_grad_(False), nn.Parameter(torch.randn(3, 6, 6))

    def forward(self, x):
        def member(weight):
            return functional_call(self.base, {"weight": weight}, (x,))

        return vmap(member)(self.weight).tanh().mean(0)


def computed_weights():
    layers = [weight_norm(nn.Linear(4, 6)), nn.Tanh(), Ensemble(), orthogonal(nn.Linear(6, 6)), nn.Linear(6, 3)]
    return seeded(lambda: nn.Sequential(*layers)).double(), noise(5, 4), classes(5, count=3)


FOUND = {
    language: BlockPath(
        tuple(PathBlock((f"layers.{i}",)) for i in range(3)), top="norm", writers=("token", "position")
    ),
    images: BlockPath(
        (
            PathBlock(("conv", "norm", "relu")),
            PathBlock(("first.0",)),
            PathBlock(("first.1",)),
            PathBlock(("second.0", "second.1")),
            PathBlock(("second.2",)),
        ),
        top="pool",
        pooled=True,
    ),
    computed_weights: BlockPath((PathBlock(("0", "1")), PathBlock(("2",)), PathBlock(("3",)))),
    sequential: BlockPath((PathBlock(("0", "1")), PathBlock(("2.0", "2.1", "2.2")))),
}


@pytest.mark.parametrize("make", FOUND)
@pytest.mark.parametrize("feedback", [RandomMaps, MeanJacobian])
def test_as_many_pulls_as_blocks_are_backprop(make, feedback):
    model, x, y = make()
    path, s = BlockPath.find(model, x), split(model)
    assert path == FOUND[make]
    estimate = ParallelPull(path, feedback(), pulls=len(path.blocks))(s, x, y, generator=generator())
    expected = exact(s, x, y)
    assert set(estimate.grads) == set(expected)
    for name, g in expected.items():
        torch.testing.assert_close(estimate.grads[name], g)


def test_a_gpt_and_its_added_positions():
    trunk = GPT(GPTConfig(layers=2, width=8, heads=2, context=6, vocab=11), generator=generator()).to(DOUBLE)
    s = Split(trunk, LinearHead(trunk.tied_linear()), tied="include")
    path = BlockPath.find(s, classes(2, 6, count=11))
    assert [block.modules for block in path.blocks] == [("blocks.0",), ("blocks.1",)]
    assert (path.writers, path.added, path.top) == (("token",), {"position": "token"}, "norm")


def test_frozen_layers_below_are_data():
    model, x, y = language()
    for module in (model.token, model.position, model.layers[0]):
        module.requires_grad_(False)
    path = BlockPath.find(model, x)
    assert [block.name for block in path.blocks] == ["layers.1", "layers.2"]
    assert not path.writers
    assert "layers.1.inner.weight" in ParallelPull(path)(split(model), x, y).grads


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_models_of_transformers(name):
    pytest.importorskip("transformers")
    from splitfg_lab.compatibility import CASES

    model, batch = next(case for case in CASES if case.name == name).made()
    path, s = BlockPath.find(model, batch), split(model)
    found = ParallelPull(path, pulls=len(path.blocks))(s, *s.unpack(batch)).grads
    model(**batch).loss.backward()
    for parameter, p in model.named_parameters():
        assert float((found[parameter] - p.grad).norm()) <= 1e-4 * float(p.grad.norm()) + 1e-9, parameter


class Function(nn.Module):
    """Its blocks are joined by functions."""

    def __init__(self):
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.block(F.relu(self.stem(x))))


def test_functions_between_blocks_raise():
    with pytest.raises(
        SplitError, match=r"h comes from a function that is no module, such as a mean: make it a module"
    ):
        BlockPath.find(seeded(lambda: Images(pool=False)), noise(2, 3, 8, 8, dtype=torch.get_default_dtype()))
    words = r"what block reads is neither data nor a sum of layers' outputs \(stem do not sum to it\)"
    with pytest.raises(SplitError, match=words):
        BlockPath.find(seeded(Function), noise(2, 4, dtype=torch.get_default_dtype()))


def test_a_path_is_asked_for_with_both_ways_to_give_one():
    model, x, y = language()
    with pytest.raises(SplitError, match=r"BlockPath\.find\(split, batch\)(.|\n)*PathBlock"):
        ParallelPull()(split(model), x, y)


def test_a_top_that_reads_another_shape_raises():
    model, x, y = images()
    blocks = FOUND[images].blocks
    path = BlockPath((*blocks[:-1], PathBlock(("second.2", "pool"))), top="fc", pooled=True)  # the cut is an identity
    with pytest.raises(SplitError, match="fc does not read the stream after the block before it"):
        ParallelPull(path, RandomMaps())(split(model), x, y)
