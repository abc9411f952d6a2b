"""What the parallel pull keeps to: pure, one block's memory, honest counts, the same when compiled, clear errors."""

import functools
from dataclasses import replace

import pytest
import torch
from _toolkit import DOUBLE, classes, generator, noise, seeded
from test_estimator_contract import assert_untouched, photograph, same
from torch import nn

from splitfg import (
    BlackBoxTrunk,
    BlockPath,
    GradientLearner,
    LinearHead,
    MeanJacobian,
    ParallelPull,
    PathBlock,
    Split,
    SplitError,
    Tied,
)
from splitfg.estimators import compiled
from splitfg.feedback import AttentionMaps, GatedMaps, RandomMaps
from splitfg.models import GPT, MLP, GPTConfig, ResNet
from splitfg.recipes import Adam
from splitfg.sites import pull_block

ESTIMATORS = {
    "identity": ParallelPull,
    "maps": lambda: ParallelPull(feedback=MeanJacobian()),
    "two pulls": lambda: ParallelPull(feedback=MeanJacobian(), pulls=2),
    "groups": lambda: ParallelPull(feedback=MeanJacobian(), group=2),
    "own block": lambda: ParallelPull(feedback=RandomMaps(), own_block=True),
}
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)
# the whole of torch.compile but the code generation
aot_eager = functools.partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")


def gpt(layers=2, tied=Tied.INCLUDE):
    config = GPTConfig(layers=layers, width=8, heads=2, context=6, vocab=20)
    trunk = GPT(config, generator=generator()).to(DOUBLE)
    s = Split(trunk, LinearHead(trunk.tied_linear()), tied=tied)
    return s, classes(3, 6, count=20, seed=1), classes(3, 6, count=20, seed=2)


@every_estimator
def test_keeps_to_the_protocol(name):
    s, x, y = gpt()
    estimate = ESTIMATORS[name]()(s, x, y, generator=generator())
    assert {n: g.shape for n, g in estimate.grads.items()} == {n: p.shape for n, p in s.trained_params().items()}
    stats = estimate.stats
    assert (stats.trunk_backward, stats.jvps) == (0, int(name in ("maps", "two pulls", "groups")))
    # four blocks, the last of which needs no second pull
    assert stats.block_backward == (7 if name == "two pulls" else 4)
    assert not stats.forward_only
    assert stats.biased
    assert f"block_backward={stats.block_backward}" in repr(estimate)


@every_estimator
def test_is_pure(name):
    s, x, y = gpt()
    estimator = ESTIMATORS[name]()
    before = photograph(s, x, y)
    first = estimator(s, x, y, generator=generator())
    assert_untouched(before, photograph(s, x, y))
    same(first, estimator(s, x, y, generator=generator()), rtol=0, atol=0)


def test_the_lookup_is_left_to_the_head_if_tied_parameters_are_excluded():
    included, excluded = (ParallelPull()(*gpt(tied=tied)) for tied in (Tied.INCLUDE, Tied.EXCLUDE))
    assert not torch.allclose(included.grads["trunk.token.weight"], excluded.grads["trunk.token.weight"])
    torch.testing.assert_close(included.grads["trunk.position"], excluded.grads["trunk.position"])


def saved_at_once(estimator, s, x, y):
    """The most numbers that are saved for backward at one time."""
    alive, most = [0], [0]
    estimator.update_state(s, estimator(s, x, y, generator=generator()))

    class Saved:
        def __init__(self, t):
            self.t, self.size = t, t.numel()
            alive[0] += self.size
            most[0] = max(most[0], alive[0])

        def __del__(self):
            alive[0] -= self.size

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(Saved, lambda kept: kept.t):
        estimate = estimator(s, x, y, generator=generator())
    assert not any(g.requires_grad for g in estimate.grads.values())
    return most[0]


PULLS = {
    "two pulls": lambda: ParallelPull(pulls=2),
    "maps": lambda: ParallelPull(feedback=MeanJacobian(), pulls=2),
    "gated maps": lambda: ParallelPull(feedback=GatedMaps(clusters=2)),
    "maps along attention": lambda: ParallelPull(feedback=AttentionMaps()),
    "own block": lambda: ParallelPull(feedback=MeanJacobian(), own_block=True),
    "groups": lambda: ParallelPull(feedback=MeanJacobian(), pulls=2, group=2),
}


@pytest.mark.parametrize("name", PULLS)
def test_no_more_is_saved_for_backward_than_one_block_needs(name):
    assert 0 < saved_at_once(PULLS[name](), *gpt(6)) == saved_at_once(PULLS[name](), *gpt(2))


def test_skips_save_no_more_for_backward_than_one_block_needs():
    def resnet(blocks):
        trunk = ResNet(widths=(8,), blocks=(blocks,), generator=generator()).double()
        return Split(trunk, LinearHead(nn.Linear(8, 3, dtype=DOUBLE))), noise(4, 3, 8, 8), classes(4, count=3)

    assert (
        0 < saved_at_once(ParallelPull(skips=True), *resnet(6)) == saved_at_once(ParallelPull(skips=True), *resnet(2))
    )


def large_gpt():
    s, x, y = gpt(layers=3)
    with torch.no_grad():  # large enough for blocks to matter
        for p in s.trunk.parameters():
            p.add_(0.3 * noise(*p.shape, seed=p.numel()))
    return s, x, y


def test_a_block_waits_for_no_other():
    """Inner parameters learn the same if the pulls of all other blocks return nonsense."""
    s, x, y = large_gpt()
    expected = ParallelPull(feedback=RandomMaps())(s, x, y).grads

    def alone(chosen):
        def puller(trunk, given, deltas, *, to_input):
            pulled = pull_block(trunk, given, deltas, to_input=to_input)
            if given.block == chosen:
                return pulled
            return replace(pulled, shares=[1e3 * torch.ones_like(c) for c in pulled.shares])

        return ParallelPull(feedback=RandomMaps(), puller=puller)(s, x, y).grads

    for block in s.trunk.block_path().blocks:
        found = alone(block)
        inner = [n for n in expected if block.name in n and f".{block.writer.removeprefix(block.name)[1:]}." not in n]
        assert inner
        for name in inner:
            assert torch.equal(found[name], expected[name])
    assert not torch.equal(found["trunk.position"], expected["trunk.position"])  # the sum of the pulls


def test_the_order_of_the_blocks_does_not_matter():
    s, x, y = large_gpt()
    calls = []

    def puller(trunk, given, deltas, *, to_input):
        calls.append((given, list(deltas), to_input, pull_block(trunk, given, deltas, to_input=to_input)))
        return calls[-1][-1]

    ParallelPull(feedback=RandomMaps(), puller=puller)(s, x, y)
    assert [given.block for given, *_ in calls] == list(reversed(s.trunk.block_path().blocks))
    for i in (3, 0, 5, 1, 4, 2):
        given, deltas, to_input, expected = calls[i]
        again = pull_block(s.trunk, given, deltas, to_input=to_input)
        assert all(torch.equal(a, b) for a, b in zip(again.shares, expected.shares, strict=True))
        assert all(torch.equal(again.grads[n], g) for n, g in expected.grads.items())


def test_compiled_equals_eager():
    s, x, y = gpt()
    estimator = ESTIMATORS["two pulls"]()
    eager = estimator(s, x, y, generator=generator())
    fast_split, fast = compiled(s, estimator, aot_eager)
    for _ in range(2):
        found = fast(fast_split, x, y, generator=generator())
        same(eager, found)
        assert found.stats.block_backward == eager.stats.block_backward
        for writer, change in eager.state_update.items():
            torch.testing.assert_close(found.state_update[writer], change)
    torch.compiler.reset()


def test_equal_blocks_share_compiled_code_and_none_of_their_values():
    made = []

    def compile_(function):
        made.append(function)
        return function

    s, x, y = gpt(layers=3)
    fast_split, fast = compiled(s, ParallelPull(), compile_)
    fast(fast_split, x, y)
    head_and_pass = len(made)
    with torch.no_grad():
        for p in s.model.parameters():
            p.add_(0.1)
    same(ParallelPull()(s, x, y), fast(fast_split, x, y))
    assert len(made) == head_and_pass  # nothing was traced again
    assert sum("pull" in getattr(f, "__module__", "") or hasattr(f, "graph") for f in made) == 3  # pass, two pulls


def test_maps_are_saved_and_restored():
    s, x, y = gpt()
    learner = GradientLearner(s, ParallelPull(feedback=MeanJacobian()), Adam().build(s))
    learner.step(x, y, generator=generator())
    state = learner.state_dict()
    assert set(state["maps"]) == {"blocks.0.attention", "blocks.0.mlp", "blocks.1.attention"}
    metrics = learner.step(x, y, generator=generator()).metrics
    assert metrics["block_backward"] == 4


class Chain(nn.Module):
    def __init__(self, dropout=0.0, skip=False):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.drop, self.skip = nn.Dropout(dropout), skip

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = (x if self.skip else 0) + self.drop(self.second(x))
        return self.last(x)


def chain(path, **settings):
    s = seeded(lambda: Split(Chain(**settings), LinearHead(nn.Linear(6, 3))))
    return lambda: ParallelPull(path)(s, noise(5, 4, dtype=torch.float32), classes(5, count=3))


BLOCKS = {name: PathBlock((name,)) for name in ("first", "second", "last", "drop")}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("first", "second"), "trunk.last.weight is trained and lies outside the path"),
        (("second", "last"), "second reads values that depend on trained parameters"),
        (("first", "second", "last"), "second does not read the stream after the block before it"),
        (("first", "nothing"), "'nothing', which is no module"),
        (("first", "first", "last"), "first is called 1 times on the way to h, and the path names it 2 times"),
    ],
)
def test_a_path_that_is_not_the_trunks_raises(names, message):
    blocks = tuple(BLOCKS.get(name, PathBlock((name,))) for name in names)
    with pytest.raises(SplitError, match=message):
        chain(BlockPath(blocks))()


def test_a_residual_path_of_a_chain_raises():
    trunk = MLP(6, widths=(6, 6), generator=generator())
    path = BlockPath(trunk.block_path().blocks, residual=True)
    s = Split(trunk, LinearHead(nn.Linear(6, 3)))
    with pytest.raises(SplitError, match="residual"):
        ParallelPull(path)(s, noise(5, 6, dtype=torch.float32), classes(5, count=3))


def test_further_arguments_that_depend_on_parameters_raise():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)
            self.times = Times()

        def forward(self, x):
            return self.times(self.first(x), self.gate(x))

    class Times(nn.Module):
        def forward(self, x, gate):
            return x * gate

    path = BlockPath((PathBlock(("first", "times")), PathBlock(("gate",))))
    s = Split(Gated(), LinearHead(nn.Linear(4, 3)))
    with pytest.raises(SplitError, match="further argument that depends on trained parameters"):
        ParallelPull(path)(s, noise(5, 4, dtype=torch.float32), classes(5, count=3))


def test_settings_that_cannot_work_raise():
    s, x, y = gpt()
    with pytest.raises(SplitError, match="pulls must be a whole number of at least 1"):
        ParallelPull(pulls=0)
    with pytest.raises(SplitError, match="learned maps draw noise"):
        ParallelPull(feedback=MeanJacobian())(s, x, y)
    with pytest.raises(SplitError, match="no block_path"):
        ParallelPull()(
            Split(Chain(), LinearHead(nn.Linear(6, 3))), noise(2, 4, dtype=torch.float32), torch.tensor([0, 1])
        )
    trunk = ResNet(widths=(8, 16), blocks=(1, 1), generator=generator())
    images = Split(trunk, LinearHead(nn.Linear(16, 3)))
    with pytest.raises(SplitError, match="writes 8 features and the top of the stream has 16"):
        ParallelPull()(images, noise(2, 3, 8, 8, dtype=torch.float32), torch.tensor([0, 1]))
    shared = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    path = BlockPath((PathBlock(("0", "1")), PathBlock(("2", "1"))))
    with pytest.raises(SplitError, match="2 blocks end in 1"):
        ParallelPull(path, RandomMaps())(
            Split(shared, LinearHead(nn.Linear(4, 3))), noise(2, 4, dtype=torch.float32), torch.tensor([0, 1])
        )
    box = BlackBoxTrunk(lambda params, x: x @ params["w"], {"w": torch.ones(4, 4)})
    with pytest.raises(SplitError, match="cannot see into a BlackBoxTrunk"):
        ParallelPull()(Split(box, LinearHead(nn.Linear(4, 3))), noise(2, 4, dtype=torch.float32), torch.tensor([0, 1]))
