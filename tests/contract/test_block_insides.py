"""Blocks whose inside breaks what a pull relies on raise an error; those that keep to it give backprop's gradient."""

from types import SimpleNamespace

import pytest
import torch
from _toolkit import classes, exact, generator, noise, seeded
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from splitfg import BlockPath, LinearHead, MeanJacobian, ParallelPull, PathBlock, Split, SplitError, split

WIDTH = 6


class Branch(nn.Module):
    """norm, inner, out; ``end`` makes the block's output of out and what it reads."""

    def __init__(self, end):
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad="gain" in end.__code__.co_names)
        self.end = end

    def forward(self, x):
        h = torch.tanh(self.inner(self.norm(x)))
        return self.end(self, h, x)


class Residual(nn.Module):
    """A residual stream of branches; ``step`` adds a branch's output."""

    def __init__(self, end, step=torch.add):
        super().__init__()
        self.stem, self.top, self.head = nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        self.branches = nn.ModuleList(Branch(end) for _ in range(3))
        self.step = step

    def forward(self, x):
        x = self.stem(x)
        for branch in self.branches:
            x = self.step(x, branch(x))
        return self.head(self.top(x))


X, Y = noise(7, 4), classes(7, count=5)
WRONG = {
    "called twice": lambda block, h, _: block.out(torch.tanh(block.out(h))),
    "changed in place by a function": lambda block, h, _: F.relu_(block.out(h)),
    "scaled in place": lambda block, h, _: block.out(h).mul_(2.0),
    "scaled in place by a parameter": lambda block, h, _: block.out(h).mul_(block.gain),
    "shares its weight inside the block": lambda block, h, _: block.out(h),
}
RIGHT = {
    "plain": lambda block, h, _: block.out(h),
    "added to in place": lambda block, h, x: block.out(h).add_(h).add_(x, alpha=0.3),
}


def path(*, writer=True):
    blocks = (PathBlock((f"branches.{i}",), writer=f"branches.{i}.out" if writer else None) for i in range(3))
    return BlockPath(tuple(blocks), residual=True, top="top", writers=("stem",))


def pulled(model, found, **settings):
    return ParallelPull(found, pulls=3, **settings)(split(model), X, Y, generator=generator())


def network(end, **settings):
    return seeded(lambda: Residual(end, **settings)).double()


@pytest.mark.parametrize("name", WRONG)
def test_a_writer_that_does_not_just_write_the_output_raises(name):
    model = network(WRONG[name])
    if "shares" in name:
        for branch in model.branches:
            branch.out.weight = branch.inner.weight
    expected = exact(split(model), X, Y)
    with pytest.raises(SplitError, match=r"gradients of branches\.0\.out are not those of a layer(.|\n)*Leave writer"):
        pulled(model, path())
    for parameter, g in pulled(model, path(writer=False)).grads.items():
        torch.testing.assert_close(g, expected[parameter])


@pytest.mark.parametrize("name", RIGHT)
def test_a_writer_that_does_is_backprop(name):
    model = network(RIGHT[name])
    expected = exact(split(model), X, Y)
    for parameter, g in pulled(model, path()).grads.items():
        torch.testing.assert_close(g, expected[parameter])


class Passing(nn.Module):
    """The first block stores a value that the later ones add: in an object, or in an attribute."""

    def __init__(self, *, attribute):
        super().__init__()
        self.stem, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList(Storing(i) for i in range(3))
        self.attribute = attribute

    def forward(self, x):
        x, box = self.stem(x), SimpleNamespace(value=None)
        for block in self.blocks:
            if self.attribute:
                block.value = self.blocks[0].value
            x = block(x, None if self.attribute else box)
        return self.head(x)


class Storing(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.inner, self.out, self.place, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), place, None

    def forward(self, x, box):
        kept, h = self if box is None else box, torch.tanh(self.inner(x))
        if self.place == 0:
            kept.value = h
        return x + self.out(h + kept.value)


@pytest.mark.parametrize("attribute", [True, False])
def test_a_value_that_passes_beside_the_stream_raises(attribute):
    model = seeded(lambda: Passing(attribute=attribute)).double()
    model(X)
    words = (
        r"output of blocks\.1 depends on blocks\.0\.inner\.bias, blocks\.0\.inner\.weight(.|\n)*past the block's input"
    )
    with pytest.raises(SplitError, match=words):
        pulled(model, BlockPath.find(model, X))


def test_a_block_that_cannot_run_by_itself_raises():
    model = seeded(lambda: Passing(attribute=True)).double()
    with pytest.raises(SplitError, match=r"blocks\.1 fails when it runs by itself"):
        pulled(model, BlockPath.find(model, X))


class Fed(nn.Module):
    """The second layer at the bottom reads the first."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.block, self.head = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        z = self.a(x)
        return self.head(self.block(z + self.b(z)))


def test_writers_that_read_one_another_raise():
    model = seeded(Fed).double()
    declared = BlockPath((PathBlock(("block",)),), writers=("a", "b"))
    with pytest.raises(SplitError, match=r"b reads values that depend on trained parameters(.|\n)*make it a block"):
        pulled(model, declared)
    with pytest.raises(SplitError, match="b reads what another trained layer writes"):
        BlockPath.find(model, X)


def test_a_block_that_returns_several_values_raises():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x), x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair, self.head = Pair(), nn.Linear(4, 5)

        def forward(self, x):
            return self.head(self.pair(x)[0])

    with pytest.raises(SplitError, match="pair takes or returns several values: name modules that map a tensor to one"):
        pulled(seeded(Model).double(), BlockPath((PathBlock(("pair",)),)))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_inside_a_block_raise_with_the_cure():
    model = network(lambda block, h, _: checkpoint(block.out, h, use_reentrant=True))
    with pytest.raises(SplitError, match="pass use_reentrant=False"):
        pulled(model, path(writer=False))


def test_a_stream_that_is_written_over_raises_with_the_cure():
    model, head = network(RIGHT["plain"], step=torch.Tensor.add_), LinearHead(nn.Linear(WIDTH, 5).double())
    model.head = nn.Identity()
    with pytest.raises(SplitError, match=r"write x = x \+ \.\.\. in place of x \+= \.\.\."):
        ParallelPull(path(), pulls=3)(Split(model, head), X, Y)


def test_inputs_that_need_a_gradient_are_data():
    model, x = network(RIGHT["plain"]), X.clone().requires_grad_()
    chain = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 5))).double()
    for made, found in ((model, path()), (chain, BlockPath.find(chain, x))):
        s = split(made)
        expected = exact(s, X, Y)
        for name, g in ParallelPull(found, pulls=3)(s, x, Y).grads.items():
            torch.testing.assert_close(g, expected[name])
    assert x.grad is None


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(7, 4), nn.Embedding(5, 4)
        self.block, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.block(self.token(x) + self.position(torch.arange(x.shape[1]))))


@pytest.mark.parametrize("frozen", ["token", "position"])
def test_a_frozen_table_beside_a_trained_one_is_found(frozen):
    model, x, y = seeded(Tables).double(), classes(3, 5, count=7), classes(3, 5, count=5)
    model.get_submodule(frozen).requires_grad_(False)
    found, s = BlockPath.find(model, x), split(model)
    assert set(found.writers) == {"token", "position"}
    grads, expected = ParallelPull(found)(s, x, y).grads, exact(s, x, y)
    assert set(grads) == set(s.trained_params())
    for name, g in grads.items():
        torch.testing.assert_close(g, expected[name])


def test_one_group_pushes_no_tangent_and_says_so():
    estimate = pulled(network(RIGHT["plain"]), path(), feedback=MeanJacobian(), group=3)
    assert (estimate.stats.jvps, estimate.stats.biased) == (0, False)
    assert pulled(network(RIGHT["plain"]), path(), feedback=MeanJacobian()).stats.jvps == 1
