"""Estimates of several gloo processes are those of one process on the whole batch."""

from __future__ import annotations

import math

import pytest
import torch
from _ranks import DIVIDE_TANGENTS, MAKERS, close, estimates, network, trained
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import splitfg
from splitfg.distributed import DistributedEstimator


def compare(crew, name, dtype, shape, tolerance, ignored=()):
    split, x, y = network(name, dtype)
    y[list(ignored)] = -1
    expected, params, state = trained(MAKERS[name](), split, x, y)
    for found, own, own_state in crew(estimates, name, dtype, shape, tuple(ignored)):
        for (loss, grads, norms, scores), (e_loss, e_grads, e_norms, e_scores) in zip(found, expected, strict=True):
            assert grads.keys() == e_grads.keys()
            assert norms.keys() == e_norms.keys()
            close([loss, *grads.values()], [e_loss, *e_grads.values()], tolerance)
            close([norms[n].double() for n in e_norms], [n.double() for n in e_norms.values()], 10 * tolerance)
            close([scores], [e_scores], tolerance) if len(e_scores) else None
        close(own.values(), params.values(), tolerance)
        assert torch.equal(own_state, state)


@pytest.mark.parametrize("name", MAKERS)
def test_rows_of_all_processes_give_the_estimate_of_one(crew, name):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        if name == "evolution" and dtype == torch.float32:
            tolerance = 1e-4  # differences of losses cancel
        compare(crew, name, dtype, None, tolerance)


@pytest.mark.parametrize("name", DIVIDE_TANGENTS)
@pytest.mark.parametrize("shape", [(1, 4), (2, 2)], ids=str)
def test_divided_tangents_give_the_estimate_of_one(crew, name, shape):
    compare(crew, name, torch.float64, shape, 1e-12 if name != "evolution" else 1e-10)


SCORED = (
    "split_fg",
    "activity_fg_predicted",
    "evolution",
    "mean_jacobian",
    "parallel_pull_maps",
    "learned_feedback",
    "anchored_feedback",
)


@pytest.mark.parametrize("name", SCORED)
def test_a_process_that_ignores_all_of_its_targets_counts_nothing(crew, name):
    tolerance = 1e-10 if name == "evolution" else 1e-12
    compare(crew, name, torch.float64, None, tolerance, range(3))  # all rows of the first process


class Sent(TorchDispatchMode):
    """Counts the bytes that a process hands to its group, by operation."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            kind = func.overloadpacket.__name__
            sent = args[1] if "allgather" in kind else args[0]
            size = sum(t.numel() * t.element_size() for t in tree_leaves(sent) if isinstance(t, torch.Tensor))
            self.bytes[kind] = self.bytes.get(kind, 0) + size
        return func(*args, **(kwargs or {}))


def sequences(length):
    """Thirteen sequences of five numbers a position."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()).double()
    split = splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(6, 5).double()))
    return split, torch.randn(13, length, 5, dtype=torch.float64), torch.randint(0, 5, (13, length))


def measured_on_sequences(rank, length):
    split, x, y = sequences(length)
    estimator = DistributedEstimator(splitfg.LearnedFeedback(), whole_batches=True, check_every=None)
    trained(estimator, split, x, y, steps=1)
    with Sent() as sent:
        found = trained(estimator, split, x, y)
    return found[0], found[1], sent.bytes


@pytest.mark.parametrize(("length", "samples"), [(8, 3), (6, 4)])
def test_learned_feedback_sends_the_inputs_that_it_measures_on(crew, length, samples):
    assert math.ceil(4 * 6 / length) == samples  # four rows for every input of the only map
    split, x, y = sequences(length)
    estimator = splitfg.LearnedFeedback()
    trained(estimator, split, x, y, steps=1)
    expected, params, _ = trained(estimator, split, x, y)
    for found, own, sent in crew(measured_on_sequences, length):
        for (loss, grads, *_), (e_loss, e_grads, *_) in zip(found, expected, strict=True):
            close([loss, *(grads[n] for n in e_grads)], [e_loss, *e_grads.values()], 1e-12)
        close([own[n] for n in params], list(params.values()), 1e-12)
        two_steps, sample, counts = 2, length * 5 * 8, 2 * 8
        if samples == 3:  # those of the first process
            assert sent["broadcast_"] == two_steps * samples * sample
            assert sent["allgather_"] == two_steps * counts
        else:  # of two processes, each padded to three
            assert "broadcast_" not in sent
            assert sent["allgather_"] == two_steps * (3 * sample + counts)
