"""The parallel pull against plain autograd and formulas written out by hand, in float64."""

import pytest
import torch
from _toolkit import DOUBLE, classes, exact, generator, mlp_split, noise, seeded
from torch import nn
from torch.nn import functional as F

import splitfg
from splitfg import BlockPath, LinearHead, MeanJacobian, ParallelPull, PathBlock, Split, SplitError, Tied
from splitfg.feedback import NoiseControl, RandomMaps, UnchangedFeedback
from splitfg.models import GPT, FlatTrunk, GPTConfig, ResNet, TabM

TINY = GPTConfig(layers=2, width=8, heads=2, context=6, vocab=20)


def gpt(tied=Tied.INCLUDE):
    trunk = GPT(TINY, generator=generator()).to(DOUBLE)
    with torch.no_grad():  # large enough for blocks to matter
        for p in trunk.parameters():
            p.add_(0.3 * noise(*p.shape, seed=p.numel()))
    s = Split(trunk, LinearHead(trunk.tied_linear()), tied=tied)
    return s, classes(3, 6, count=20, seed=1), classes(3, 6, count=20, seed=2)


def images(trunk, width):
    head = seeded(lambda: LinearHead(nn.Linear(width, 5)).to(DOUBLE))
    return Split(trunk.to(DOUBLE), head), noise(3, 3, 8, 8), classes(3, count=5)


def table():
    trunk = TabM(7, width=6, layers=3, members=2, generator=generator()).to(DOUBLE)
    head = seeded(lambda: LinearHead(nn.Linear(6, 3)).to(DOUBLE))
    return Split(trunk, head), noise(4, 7), classes(4, count=3)


NETWORKS = {  # with the number of blocks
    "gpt": (gpt, 4),
    "resnet": (lambda: images(ResNet(widths=(8, 16), blocks=(1, 2), generator=generator()), 16), 4),
    "flat": (lambda: images(FlatTrunk(width=8, generator=generator()), 8 * 64), 2),
    "tabm": (table, 3),
    "sequential": (lambda: (mlp_split(5, 6, 7, 3), noise(4, 5), classes(4, count=3)), 2),
}


def distance(estimate, expected):
    return max(((estimate.grads[n] - g).norm() / g.norm()).item() for n, g in expected.items())


class TestAsManyPullsAsBlocks:
    @pytest.mark.parametrize("name", NETWORKS)
    @pytest.mark.parametrize("feedback", [RandomMaps, MeanJacobian])
    def test_are_backprop(self, name, feedback):
        build, blocks = NETWORKS[name]
        s, x, y = build()
        expected = exact(s, x, y)
        estimates = [ParallelPull(feedback=feedback(), pulls=k)(s, x, y, generator=generator()) for k in (blocks, 9)]
        for estimate in estimates:
            assert set(estimate.grads) == set(expected)
            assert distance(estimate, expected) < 1e-12
            assert not estimate.stats.biased

    def test_fewer_are_not(self):
        for build, blocks in NETWORKS.values():
            s, x, y = build()
            estimate = ParallelPull(feedback=RandomMaps(), pulls=blocks - 1)(s, x, y, generator=generator())
            assert estimate.stats.biased
            assert distance(estimate, exact(s, x, y)) > 1e-3

    def test_every_pull_of_a_residual_stream_comes_closer(self):
        s, x, y = gpt()
        expected = exact(s, x, y)
        errors = [distance(ParallelPull(pulls=k)(s, x, y), expected) for k in (1, 2, 3, 4)]
        assert errors == sorted(errors, reverse=True)


class Residual(nn.Module):
    """x0 = embed(a), x1 = x0 + out0(tanh(in0(x0))), x2 = x1 + out1(tanh(in1(x1)))."""

    def __init__(self, width=4):
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, width)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, a):
        x = self.embed(a)
        for branch in self.branches:
            x = x + branch(x)
        return self.norm(x)


PATH = BlockPath(
    (PathBlock(("branches.0",), writer="branches.0.2"), PathBlock(("branches.1",), writer="branches.1.2")),
    residual=True,
    top="norm",
    writers=("embed",),
)


def residual():
    s = seeded(lambda: Split(Residual().to(DOUBLE), LinearHead(nn.Linear(4, 3)).to(DOUBLE)))
    return s, noise(5, 3), classes(5, count=3)


def by_hand(s, x, y, first):
    """One pull on the toy, from the gradient ``first(r)`` predicted at x1."""
    t, w = s.trunk, dict(s.trunk.named_parameters())
    (head,) = s.head.layers
    x0 = F.linear(x, w["embed.weight"], w["embed.bias"])
    hidden0 = torch.tanh(t.branches[0][0](x0))
    x1 = x0 + t.branches[0][2](hidden0)
    hidden1 = torch.tanh(t.branches[1][0](x1))
    x2 = (x1 + t.branches[1][2](hidden1)).detach().requires_grad_()
    loss = F.cross_entropy(head(t.norm(x2)), y)
    (r,) = torch.autograd.grad(loss, x2)
    d1 = first(r)
    into1 = (r @ w["branches.1.2.weight"]) * (1 - hidden1**2)  # at the input of tanh, pulled from the exact r
    into0 = (d1 @ w["branches.0.2.weight"]) * (1 - hidden0**2)  # pulled from the prediction
    c1, c0 = into1 @ w["branches.1.0.weight"], into0 @ w["branches.0.0.weight"]
    at1, at0 = r + c1, r + c1 + c0  # the sums of pulls
    return {
        "branches.1.0.weight": into1.T @ x1,
        "branches.1.2.weight": r.T @ hidden1,
        "branches.0.0.weight": into0.T @ x0,
        "branches.0.0.bias": into0.sum(0),
        "branches.0.2.weight": at1.T @ hidden0,
        "branches.0.2.bias": at1.sum(0),
        "embed.weight": at0.T @ x,
    }


@torch.no_grad
def test_one_pull_is_the_formula():
    s, x, y = residual()
    maps = RandomMaps()
    for feedback in (UnchangedFeedback(), maps):
        estimate = ParallelPull(PATH, feedback)(s, x, y)
        with torch.enable_grad():
            found = by_hand(s, x, y, lambda r, f=feedback: f.at("branches.0", r))
        for name, g in found.items():
            torch.testing.assert_close(estimate.grads[f"trunk.{name}"], g.detach())


def test_own_block_takes_the_prediction_for_the_writers_too():
    s, x, y = residual()
    maps = RandomMaps()
    estimate = ParallelPull(PATH, maps, own_block=True)(s, x, y)
    x0 = s.trunk.embed(x)
    hidden = torch.tanh(s.trunk.branches[0][0](x0))
    x2 = s.trunk.embed(x)
    for branch in s.trunk.branches:
        x2 = x2 + branch(x2)
    x2 = x2.detach().requires_grad_()
    (r,) = torch.autograd.grad(F.cross_entropy(s.head.layers[0](s.trunk.norm(x2)), y), x2)
    torch.testing.assert_close(estimate.grads["trunk.branches.0.2.weight"], maps.at("branches.0", r).T @ hidden)
    torch.testing.assert_close(estimate.grads["trunk.embed.weight"], maps.at("embed", r).T @ x)
    with pytest.raises(SplitError, match="pulls"):
        ParallelPull(PATH, own_block=True, pulls=2)


def toy():
    return *residual(), PATH


def transformer():
    s, x, y = gpt()
    return s, x, y, s.trunk.block_path()


@pytest.mark.parametrize("variant", [{}, {"pulls": 2}, {"own_block": True}])
@pytest.mark.parametrize("feedback", [UnchangedFeedback, MeanJacobian])
@pytest.mark.parametrize("make", [toy, transformer])
def test_zeroed_blocks_make_every_variant_exact(make, variant, feedback):
    s, x, y, path = make()
    with torch.no_grad():
        for block in path.blocks:
            s.trunk.get_submodule(block.writer).weight.zero_()
    estimate = ParallelPull(path, feedback(), **variant)(s, x, y, generator=generator())
    expected = exact(s, x, y)
    for name, g in expected.items():
        torch.testing.assert_close(estimate.grads[name], g)


def test_maps_learn_the_mean_jacobian_of_a_linear_chain():
    s = mlp_split(5, 6, 7, 3)
    s = Split(nn.Sequential(s.trunk[0], s.trunk[2]), s.head)  # no tanh
    estimator, x, y, g = ParallelPull(feedback=MeanJacobian(1.0)), noise(64, 5), classes(64, count=3), generator()
    for _ in range(60):
        estimator.update_state(s, estimator(s, x, y, generator=g))
    # linear: the prediction at the first block's output is exact once the map is
    assert distance(estimator(s, x, y, generator=g), exact(s, x, y)) < 1e-4


def test_pooled_maps_learn_the_gradient_summed_over_pixels():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 1, stride=2)
            self.pool = ResNet(widths=(8,), blocks=(1,), generator=generator()).pool

        def forward(self, x):
            return self.pool(self.second(self.first(x)))

    path = BlockPath((PathBlock(("first",)), PathBlock(("second",))), top="pool", pooled=True)
    s = seeded(lambda: Split(Linear().to(DOUBLE), LinearHead(nn.Linear(6, 3)).to(DOUBLE)))
    estimator, x, y, g = ParallelPull(path, MeanJacobian(1.0)), noise(32, 3, 4, 4), classes(32, count=3), generator()
    for _ in range(60):
        estimator.update_state(s, estimator(s, x, y, generator=g))
    # the true gradient at the first block's output lies on every fourth pixel; a bias sums over all of them
    estimate, expected = estimator(s, x, y, generator=g), exact(s, x, y)
    torch.testing.assert_close(estimate.grads["trunk.first.bias"], expected["trunk.first.bias"], rtol=1e-4, atol=1e-6)


def test_noise_has_the_size_of_r_and_no_direction():
    r = noise(2000, 8)
    given = NoiseControl().drawn(generator()).at("block", r)
    torch.testing.assert_close(given.norm(dim=-1), r.norm(dim=-1))
    cosines = torch.cosine_similarity(given, r)
    assert abs(cosines.mean().item()) < 5 / (2000 * 8) ** 0.5


def test_a_falling_rate_follows_the_cosine():
    maps, change = MeanJacobian(0.5, steps=4, last=0.2), {"block": torch.eye(2, dtype=DOUBLE)}
    moved = []
    for _ in range(6):
        before = maps.at("block", torch.ones(2, dtype=DOUBLE))[0].item()
        maps.apply(change)
        moved.append(maps.at("block", torch.ones(2, dtype=DOUBLE))[0].item() - before)
    half = 0.5**0.5 / 2
    assert moved == pytest.approx([1.0, 0.6 + 0.8 * half, 0.6, 0.6 - 0.8 * half, 0.2, 0.2], rel=1e-6)
    again = MeanJacobian(0.5, steps=4, last=0.2)
    again.load_state_dict(maps.state_dict())
    again.apply(change)
    assert again.state_dict()["updates/count"] == 7


class TestTrainingMode:
    """A block that is computed again draws the same dropout masks, and batch statistics change once a step."""

    def model(self):
        blocks = []
        for _ in range(3):
            blocks += [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Tanh(), nn.Dropout(0.2))]
        return nn.Sequential(*blocks, nn.Linear(6, 3)).double()

    def test_as_many_pulls_as_blocks_are_autograd_with_the_same_masks(self):
        torch.manual_seed(0)
        model, plain = self.model(), self.model()
        plain.load_state_dict(model.state_dict())
        x, y = torch.randn(8, 6).double(), torch.randint(0, 3, (8,))
        s = splitfg.split(model)
        found = splitfg.ParallelPull(pulls=3)(s, x, y, generator=torch.Generator().manual_seed(4))
        seed = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(4)))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            nn.functional.cross_entropy(plain(x), y).backward()
        for name, p in plain.named_parameters():
            torch.testing.assert_close(found.grads[name], p.grad)
        assert float(model[0][1].num_batches_tracked) == 0  # an estimate changes nothing
        splitfg.write_grads(model, found)
        for (name, b), c in zip(model.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(b, c, msg=name)

    def test_a_network_that_is_random_needs_a_generator(self):
        s = splitfg.split(self.model())
        with pytest.raises(splitfg.SplitError, match="draws random numbers"):
            splitfg.ParallelPull()(s, torch.randn(8, 6).double(), torch.randint(0, 3, (8,)))
