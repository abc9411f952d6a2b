"""Groups of blocks on two and four processes give the estimate of one process, in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from test_stages import DOUBLE, NETWORKS, exact, far, generator, joined, learning
from torch import nn

from splitfg import BlockPath, LinearHead, MeanJacobian, ParallelPull, PathBlock, Split
from splitfg.distributed import StagedPull
from splitfg.feedback import RandomMaps, UnchangedFeedback


def sequential(layers=7):
    """A chain whose stream has its top's width after every second block alone."""
    torch.manual_seed(0)
    widths = [6 if i % 2 == 0 else 9 for i in range(layers)] + [6]
    blocks = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
    split = Split(nn.Sequential(*blocks).to(DOUBLE), LinearHead(nn.Linear(6, 3).to(DOUBLE)))
    return split, torch.randn(8, 6, dtype=DOUBLE), torch.arange(8) % 3


BUILD = {**NETWORKS, "sequential": sequential, "eight": lambda: sequential(8)}
FEEDBACK = {"same": UnchangedFeedback, "random": RandomMaps, "maps": lambda: MeanJacobian(0.5)}


def settings(feedback, pulls, group, own_block=False):
    return ParallelPull(feedback=FEEDBACK[feedback](), pulls=pulls, group=group, own_block=own_block)


def staged(rank, network, pull, options):
    split, x, y = BUILD[network]()
    estimator = StagedPull(settings(*pull), **options)
    estimate = estimator(split, x, y, generator=generator())
    stats = estimate.stats
    norms = {name: float(value) for name, value in stats.norms.items()}
    return float(estimate.loss), estimate.grads, estimator.owned(split), stats.block_backward, stats.biased, norms


def agree(found, expected):
    assert far(joined(found), expected.grads) < 1e-12
    for loss, _, _, backward, biased, norms in found:
        assert loss == pytest.approx(expected.loss.item(), rel=1e-12)
        assert (backward, biased) == (expected.stats.block_backward, expected.stats.biased)
        assert norms == pytest.approx({n: v.item() for n, v in expected.stats.norms.items()}, rel=1e-12)


CASES = [
    *[(network, "same", pulls, 2) for network in ("gpt", "positions", "sequential") for pulls in (1, 2)],
    *[(network, "random", pulls, 2) for network in ("gpt", "chain", "images", "sequential") for pulls in (1, 2, 9)],
    *[(network, "random", 2, 3) for network in ("gpt_excluded", "chain", "images", "positions", "sequential")],
    *[(network, "random", 1, 2, True) for network in ("gpt", "chain", "sequential")],
]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_groups_in_stages_give_the_estimate_of_one_process(pair, case, recompute):
    network, *pull = case
    split, x, y = BUILD[network]()
    expected = settings(*pull)(split, x, y, generator=generator())
    agree(pair(staged, network, pull, {"micro_batches": 2, "recompute": recompute}), expected)


@pytest.mark.parametrize("pulls", [1, 2])
def test_four_stages_of_one_group_each(crew, pulls):
    pull = ("same", pulls, 2)
    split, x, y = BUILD["eight"]()
    agree(crew(staged, "eight", pull, {"micro_batches": 3}), settings(*pull)(split, x, y, generator=generator()))


@pytest.mark.parametrize(("network", "group", "pulls"), [("gpt", 2, 3), ("gpt", 4, 2), ("sequential", 3, 3)])
def test_as_many_pulls_as_groups_are_backprop(pair, network, group, pulls):
    split, x, y = BUILD[network]()
    found = pair(staged, network, ("random", pulls, group), {})
    assert far(joined(found), exact(split, x, y)) < 1e-12
    assert not any(biased for *_, biased, _ in found)


def blocks_of_stages(rank, group, count):
    path = BlockPath(tuple(PathBlock((str(i),)) for i in range(count)))
    stages = StagedPull(ParallelPull(group=group))
    return [tuple(stages.blocks(path, stage)) for stage in range(2)]


@pytest.mark.parametrize(("group", "count", "first"), [(1, 7, 3), (2, 7, 4), (3, 7, 3), (2, 6, 2), (4, 6, 4)])
def test_stages_begin_with_groups(pair, group, count, first):
    expected = [tuple(range(first)), tuple(range(first, count))]
    assert pair(blocks_of_stages, group, count) == [expected, expected]


def test_cuts_at_groups_move_blocks(pair):
    pull = ("random", 2, 2)
    split, x, y = BUILD["gpt"]()
    found = pair(staged, "gpt", pull, {"cuts": (4,)})
    agree(found, settings(*pull)(split, x, y, generator=generator()))
    assert "trunk.blocks.1.mlp.out.weight" in found[0][2]


def learning_stages(rank, network, pull, recompute):
    split, x, y = BUILD[network]()
    estimator = StagedPull(settings(*pull), micro_batches=2, recompute=recompute)
    found = learning(split, x, y, estimator)
    estimator.collect(split)
    return *found, estimator.learned_state()["maps"].state_dict()


@pytest.mark.parametrize("pulls", [1, 2])
@pytest.mark.parametrize(("network", "group"), [("gpt", 2), ("gpt", 4), ("sequential", 2), ("chain", 3), ("images", 2)])
def test_maps_between_groups_are_those_of_one_process(pair, network, group, pulls):
    split, x, y = BUILD[network]()
    one = settings("maps", pulls, group)
    expected, jvps, state = learning(split, x, y, one)
    results = pair(learning_stages, network, ("maps", pulls, group), pulls == 2)
    for step, grads in enumerate(expected):
        together = {name: g for found, *_ in results for name, g in found[step].items()}
        assert far(together, grads) < 1e-11, step
    path = one.blocks_of(split)
    for _, own_jvps, own_state, maps in results:
        assert own_jvps == jvps
        assert torch.equal(own_state, state)
        assert maps.keys() == one.feedback.state_dict().keys()
        assert {name for name in maps if name in {b.name for b in path.blocks}} == set(path.boundaries(group))
        for name, m in one.feedback.state_dict().items():
            torch.testing.assert_close(maps[name], m, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("group", "cuts", "words"),
    [
        (
            2,
            (3,),
            "cuts at 3 divide groups of 2 blocks, and a group belongs to one stage: give multiples of 2, such as",
        ),
        (2, (3,), r"cuts=(4,), or leave cuts out"),
        (2, (5, 3), "give 1 rising numbers between 1 and 6"),
        (2, (5, 3), "cuts at 5, 3 divide groups"),
        (
            7,
            None,
            "1 group of 7 blocks cannot be divided between 2 processes: start at most 1, or use a smaller group",
        ),
    ],
)
def test_cuts_inside_groups_are_an_error(pair, group, cuts, words):
    errors = pair.errors(staged, "sequential", ("random", 1, group), {"cuts": cuts})
    assert all(name == "SplitError" and words in message for name, message in errors), errors
