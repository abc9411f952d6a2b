"""Processes that differ, rows that one process cannot use, divided heads and line searches: one result or error."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import splitfg
from splitfg.distributed import DistributedEstimator, Ranks, ShardedHead, check_replicas

ROWS = 13


class Scaled(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 6)
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x):
        return (self.scale * self.layer(x)).tanh()


def network(loss=None, scale=1.0):
    split = splitfg.Split(Scaled(scale).double(), splitfg.LinearHead(nn.Linear(6, 5).double(), loss=loss))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 5, dtype=torch.float64, generator=generator)
    return split, x, torch.randint(0, 5, (ROWS,), generator=generator)


def estimated(estimator, split, x, y, steps=1):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        estimate = estimator(split, x, y, generator=generator)
    return {"loss": estimate.loss, **estimate.grads}


def assert_close(found, expected):
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-12 * (1 + value.norm()), name


def weighted(rank):
    """All rows of the first process have a class without weight."""
    weights = torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0], dtype=torch.float64)
    split, x, y = network(splitfg.CrossEntropy(class_weights=weights))
    y[:3] = 3
    if rank is None:
        return estimated(splitfg.SplitFG(K=4), split, x, y)
    return estimated(DistributedEstimator(splitfg.SplitFG(K=4), whole_batches=True), split, x, y)


def test_a_process_whose_classes_have_no_weight_counts_nothing(crew):
    for found in crew(weighted):
        assert_close(found, weighted(None))


def differing(rank, kind):
    wrong = rank == 1
    split, x, y = network(scale=2.0 if wrong and kind == "buffer" else 1.0)
    if wrong and kind == "frozen":
        split.trunk.layer.bias.requires_grad_(False)
    generator = 3 if wrong and kind == "type" else torch.Generator().manual_seed(0)
    whole = kind == "few" or (wrong and kind == "whole")
    if wrong and kind == "target":
        whole, y = True, None
    x, y = (x[:2], y[:2]) if kind == "few" else (x, y)
    estimator = DistributedEstimator(splitfg.ActivityFG(K=2), whole_batches=whole or kind == "target", check_every=2)
    for step in range(3):
        if wrong and kind == "drawn" and step == 1:
            torch.rand(2, generator=generator)
        estimator(split, x, y, generator=generator)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("buffer", "trunk.scale differs between rank 0 and rank 1"),
        ("frozen", "parameters differ: .* frozen.* on rank 1"),
        ("type", "generator differs: state .* on rank 0, of type int on rank 1"),
        ("whole", "whole_batches differ: False on rank 0, True on rank 1"),
        ("few", "rank 0, 2: the batch has fewer rows than the 4 processes that divide it"),
        ("target", "rank 1: the target is a NoneType"),
        ("drawn", "generator differs: .*; draw from it in all processes or in none"),
    ],
)
def test_a_difference_is_one_error_in_all(crew, kind, words):
    found = crew.errors(differing, kind)
    assert len(set(found)) == 1
    assert re.search(words, found[0][1]), found[0]


def swapped(rank):
    """The same numbers in another order."""
    values = torch.arange(8.0)
    if rank == 3:
        values[[1, 2]] = values[[2, 1]]
    check_replicas(Ranks(), {"values": values})


def test_replicas_with_swapped_numbers_are_found(crew):
    for _, message in crew.errors(swapped):
        assert message.startswith("values differs between rank 0 and rank 3")


class Learning:
    """Counts the rows of its process."""

    def __call__(self, split, x, y, *, generator):
        estimate = splitfg.Backprop()(split, x, y, generator=generator)
        return replace(estimate, state_update={"rows": torch.tensor(float(len(x)))})


def learns_alone(rank):
    estimated(DistributedEstimator(Learning(), whole_batches=True), *network())


def test_state_that_each_process_learns_by_itself_is_an_error(crew):
    for kind, message in crew.errors(learns_alone):
        assert kind == "SplitError"
        assert "Learning learns from the rows of one process" in message


def side_by_side(rank):
    """Two pairs of processes estimate apart, each with a K of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "rows"))["rows"]
    ranks, (split, x, y) = Ranks(mesh), network()
    estimator = DistributedEstimator(splitfg.SplitFG(K=2 + rank // 2), ranks, check_every=1, whole_batches=True)
    found = estimated(estimator, split, x, y, steps=2)
    if rank == 3:
        x = x * torch.nan
    try:
        estimator(split, x, y, generator=torch.Generator().manual_seed(1))
    except splitfg.NonFiniteError as error:
        return found, ranks.members, str(error)
    return found, ranks.members, ""


def test_groups_of_processes_estimate_side_by_side(crew):
    for rank, (found, members, message) in enumerate(crew(side_by_side)):
        assert members == ([0, 1] if rank < 2 else [2, 3])
        assert_close(found, estimated(splitfg.SplitFG(K=2 + rank // 2), *network(), steps=2))
        assert message.startswith("rank 3: h is not finite" if rank >= 2 else "")
        assert bool(message) == (rank >= 2)


def divided(rank, kind):
    split, x, y = network()
    ranks = Ranks()
    split = splitfg.Split(split.trunk, ShardedHead(ranks, split.head.layers[0]))
    x, y = ranks.own_rows(x, y)
    if kind == "frozen":
        split.head.requires_grad_(False)
    if kind == "all" or (rank == 1 and kind == "ignored"):
        y = torch.full_like(y, -100)
    if rank == 1 and kind == "targets":
        y = y + 77
    if rank == 1 and kind in ("nan", "late"):
        x = torch.cat([x[:-1], x[-1:] * torch.nan])
    estimator = splitfg.SplitFG(K=4, micro_batch={"parts": 3, "late": 2}.get(kind))
    if kind == "perturbed":
        estimator = splitfg.EvolutionStrategy(K=2)
    if kind == "differentiated":
        estimator = splitfg.Backprop()
    return estimated(DistributedEstimator(estimator), split, x, y)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("targets", "rank 1: targets span 7"),
        ("nan", "rank 1: h is not finite"),
        ("late", "rank 1: h is not finite"),
        ("all", "no process has a target that counts"),
        ("parts", r"make \[1, 1, 1, 2\] micro-batches"),
        ("perturbed", "EvolutionStrategy perturbs the head"),
        ("differentiated", "outputs of a ShardedHead cannot be differentiated"),
    ],
)
def test_trouble_with_a_divided_head_is_one_error_in_all(crew, kind, words):
    found = crew.errors(divided, kind)
    assert len(set(found)) == 1
    assert re.search(words, found[0][1]), found[0]


@pytest.mark.parametrize("kind", ["ignored", "frozen"])
def test_a_divided_head_counts_the_targets_of_all(crew, kind):
    split, x, y = network()
    if kind == "ignored":
        y[3:6] = -100  # the rows of the second process
    expected = estimated(splitfg.SplitFG(K=4), split, x, y)
    found = crew(divided, kind)
    for own in found:
        assert_close(own, {name: value for name, value in expected.items() if not name.startswith("head")})
        assert kind == "ignored" or not any(name.startswith("head") for name in own)


def searched(rank):
    split, x, y = network(splitfg.CrossEntropy(ignore_index=-1))
    y[:3] = -1  # all rows of the first of four processes
    estimator = splitfg.SplitFG(K=4)
    if rank is not None:
        estimator = DistributedEstimator(estimator, check_every=1, whole_batches=True)
    search = splitfg.LineSearch()
    optimizer, generator = torch.optim.SGD(split.model.parameters(), lr=0.1), torch.Generator().manual_seed(1)
    learner = splitfg.GradientLearner(split, estimator, optimizer, line_search=search)
    for step in range(6):  # other rows in every step: the clip of rho's changes hides descents that only grow
        stats = learner.step(x.roll(step, dims=1), y, generator=generator)
    return {"rho": stats.metrics["rho"], **{name: p.detach() for name, p in split.model.named_parameters()}}


def test_a_line_search_measures_the_rows_of_all_processes(crew):
    expected = searched(None)
    assert expected["rho"] != splitfg.LineSearch().start
    for found in crew(searched):
        assert_close(found, expected)
