"""Bad input in one of several processes is the same error in all of them, and processes that differ are found."""

from __future__ import annotations

import re

import pytest
import torch
from _ranks import MAKERS, estimates, network, ranks_of

import splitfg
from splitfg.distributed import DistributedEstimator, Ranks, check_replicas, connect
from splitfg.models import MLP


def nothing_counts(rank):
    split, x, y = network("split_fg", torch.float64)
    estimator = DistributedEstimator(splitfg.SplitFG(K=2), whole_batches=True)
    estimator(split, x, torch.full_like(y, -1), generator=torch.Generator())


def test_targets_that_all_processes_ignore_are_an_error(crew):
    assert all("no process has a target that counts" in message for _, message in crew.errors(nothing_counts))


def trouble(rank, kind):
    """Call an estimator with something wrong in process 1."""
    split, x, y = network("split_fg", torch.float64)
    wrong = rank == 1
    K = 5 if wrong and kind == "K" else 4
    if wrong and kind == "width":
        split = splitfg.Split(MLP(5, widths=(7, 6), generator=torch.Generator()).double(), split.head)
    if wrong and kind == "dtype":
        split, x = network("split_fg", torch.float32)[0], x.float()
    if wrong and kind == "values":
        with torch.no_grad():
            list(split.trunk.parameters())[2][0, 0] += 1e-9
    x, y = Ranks().own_rows(x, y)
    if wrong and kind == "rows":
        x, y = x[:0], y[:0]
    if wrong and kind == "nan":
        x = torch.full_like(x, torch.nan)
    estimator = splitfg.ActivityFG(K=K) if kind == "rows by noise" else splitfg.SplitFG(K=K)
    if wrong and kind == "rows by noise":
        x, y = x[:0], y[:0]
    generator = torch.Generator().manual_seed(1 if wrong and kind == "seed" else 0)
    DistributedEstimator(estimator)(split, x, y, generator=generator)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("K", "estimator differs: .*K=4.* on rank 0, .*K=5.* on rank 1"),
        ("width", r"parameters differ: .*\(6, 5\).* on rank 0, .*\(7, 5\).* on rank 1"),
        ("dtype", "parameters differ: .*float64.* on rank 0, .*float32.* on rank 1"),
        ("seed", "generator differs: state .* on rank 0, state .* on rank 1"),
        ("values", r"trunk\..*weight differs between rank 0 and rank 1: start all processes from the same"),
        ("rows", "rank 1: the batch is empty"),
        ("rows by noise", "rank 1: the batch is empty"),
        ("nan", "rank 1: h is not finite"),
    ],
)
def test_trouble_in_one_process_is_one_clear_error_in_all(crew, kind, words):
    found = crew.errors(trouble, kind)
    assert len(set(found)) == 1
    error, message = found[0]
    assert error == ("NonFiniteError" if kind == "nan" else "SplitError")
    assert re.search(words, message), message
    crew(estimates, "frozen", torch.float64, None)  # the group still works


def too_few(rank, K, shape):
    DistributedEstimator(MAKERS["frozen"]() if K == 0 else splitfg.SplitFG(K=K), ranks_of(shape))


def test_tangents_that_cannot_be_divided_are_an_error(crew):
    assert {message for _, message in crew.errors(too_few, 3, (1, 4))} == {
        "K is 3 and 4 processes divide the tangents: raise K, or use fewer processes along 'tangents'"
    }
    assert {m.split(":")[0] for _, m in crew.errors(too_few, 0, (2, 2))} == {"FrozenTrunk has no tangents to divide"}


def test_without_a_process_group_the_error_names_the_cure():
    with pytest.raises(splitfg.SplitError, match="torchrun"):
        Ranks()


def lookup(rank, values):
    """One bit of difference in one of many numbers, far behind the first chunk of the hash."""
    params = {"same": torch.arange(10.0), "large": torch.zeros(2**20 + 3)}
    if rank == 2:
        params["large"][-1] = values
    check_replicas(Ranks(), params)


def test_replicas_that_differ_in_one_bit_are_found(crew):
    crew(lookup, 0.0)
    assert {m.split(":")[0] for _, m in crew.errors(lookup, -0.0)} == {"large differs between rank 0 and rank 2"}


@pytest.mark.parametrize(("gpus", "words"), [(0, "no GPU"), (2, "start one for every GPU")])
def test_more_processes_than_gpus_is_an_error_before_the_rendezvous(monkeypatch, gpus, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    place = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(splitfg.SplitError, match=words):
        connect(device="cuda")
