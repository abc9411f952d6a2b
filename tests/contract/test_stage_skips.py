"""Gradients along the skips of blocks on two and four processes: the estimate of one process, in float64."""

from __future__ import annotations

import pytest
import torch
from test_stages import DOUBLE, NETWORKS, exact, far, generator, joined, learning
from torch import nn

from splitfg import BlockPath, LinearHead, MeanJacobian, ParallelPull, PathBlock, Split
from splitfg.distributed import StagedPull
from splitfg.feedback import RandomMaps, UnchangedFeedback


class Skip(nn.Module):
    """y = relu(x + f(x))."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x):
        return torch.relu(x + self.second(self.first(x).tanh()))

    def skip_back(self, x, y, delta):
        return delta * (y > 0)


class Written(nn.Module):
    """Blocks with skips above a layer that writes to the bottom of the stream."""

    def __init__(self):
        super().__init__()
        self.bottom, self.blocks = nn.Linear(5, 6), nn.ModuleList(Skip() for _ in range(5))

    def forward(self, x):
        x = self.bottom(x)
        for block in self.blocks:
            x = block(x)
        return x

    def block_path(self):
        return BlockPath(tuple(PathBlock((f"blocks.{i}",)) for i in range(5)), writers=("bottom",))


def written():
    torch.manual_seed(0)
    split = Split(Written().to(DOUBLE), LinearHead(nn.Linear(6, 3).to(DOUBLE)))
    return split, torch.randn(7, 5, dtype=DOUBLE), torch.arange(7) % 3


BUILD = {"images": NETWORKS["images"], "written": written}
FEEDBACK = {"same": UnchangedFeedback, "random": RandomMaps, "maps": lambda: MeanJacobian(0.5)}


def settings(feedback, pulls, own_block=False):
    return ParallelPull(feedback=FEEDBACK[feedback](), pulls=pulls, own_block=own_block, skips=True)


def staged(rank, network, pull, recompute):
    split, x, y = BUILD[network]()
    estimator = StagedPull(settings(*pull), micro_batches=2, recompute=recompute)
    estimate = estimator(split, x, y, generator=generator())
    return float(estimate.loss), estimate.grads, estimate.stats.block_backward, estimate.stats.biased


PULLS = [("same", 1), ("same", 2), ("same", 9), ("random", 2), ("same", 1, True), ("random", 1, True)]


@pytest.mark.parametrize("processes", ["pair", "crew"])
@pytest.mark.parametrize("pull", PULLS, ids=lambda pull: "-".join(map(str, pull)))
@pytest.mark.parametrize("network", BUILD)
def test_skips_in_stages_give_the_estimate_of_one_process(request, processes, network, pull):
    split, x, y = BUILD[network]()
    expected = settings(*pull)(split, x, y, generator=generator())
    found = request.getfixturevalue(processes)(staged, network, pull, processes == "crew")
    assert far(joined(found), expected.grads) < 1e-12
    for loss, _, backward, biased in found:
        assert loss == pytest.approx(expected.loss.item(), rel=1e-12)
        assert (backward, biased) == (expected.stats.block_backward, expected.stats.biased)


@pytest.mark.parametrize(("network", "pulls"), [("images", 4), ("written", 5)])
def test_as_many_pulls_as_blocks_are_backprop(pair, network, pulls):
    split, x, y = BUILD[network]()
    assert far(joined(pair(staged, network, ("same", pulls), False)), exact(split, x, y)) < 1e-12


def learning_stages(rank, network, pulls):
    split, x, y = BUILD[network]()
    return learning(split, x, y, StagedPull(settings("maps", pulls), micro_batches=2))


@pytest.mark.parametrize("pulls", [1, 2])
@pytest.mark.parametrize("network", BUILD)
def test_learned_maps_beside_skips_are_those_of_one_process(pair, network, pulls):
    split, x, y = BUILD[network]()
    expected, jvps, state = learning(split, x, y, settings("maps", pulls))
    results = pair(learning_stages, network, pulls)
    for step, grads in enumerate(expected):
        together = {name: g for found, *_ in results for name, g in found[step].items()}
        assert far(together, grads) < 1e-11, step
    assert all(own_jvps == jvps and torch.equal(own_state, state) for _, own_jvps, own_state in results)


def no_skips(rank):
    split, x, y = NETWORKS["chain"]()
    StagedPull(settings("random", 1))(split, x, y, generator=generator())


def test_networks_without_skips_are_an_error(pair):
    for name, message in pair.errors(no_skips):
        assert name == "SplitError"
        assert "no block of the path has a skip: use skips=False" in message
