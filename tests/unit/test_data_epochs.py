"""Batches by step: epochs that hold every row as often as its weight says."""

import numpy as np
import pytest
import torch

from splitfg.training import Epochs


def drawn(epochs, steps):
    return torch.cat([epochs.rows(step) for step in range(steps)])


def test_every_epoch_holds_every_row_once_and_batches_run_on():
    epochs = Epochs(10, batch=4, seed=0)
    rows = drawn(epochs, 5).view(2, 10)
    assert rows.sort(dim=1).values.tolist() == [list(range(10))] * 2
    assert rows[0].tolist() != rows[1].tolist()


def test_a_batch_depends_on_seed_and_step_alone():
    forward = Epochs(50, batch=16, seed=3)
    in_order = [forward.rows(step).tolist() for step in range(9)]
    assert [Epochs(50, batch=16, seed=3).rows(step).tolist() for step in range(9)] == in_order
    assert Epochs(50, batch=16, seed=4).rows(0).tolist() != in_order[0]


def test_a_batch_is_never_larger_than_the_data():
    epochs = Epochs(3, batch=256, seed=0)
    assert sorted(epochs.rows(7).tolist()) == [0, 1, 2]


def test_one_pass_takes_every_row_once_and_ends_short():
    epochs = Epochs(10, batch=4, seed=0)
    parts = [epochs.once(step) for step in range(epochs.steps)]
    assert [len(p) for p in parts] == [4, 4, 2]
    assert sorted(torch.cat(parts).tolist()) == list(range(10))


def test_weights_say_how_often_a_row_is_drawn():
    # in an epoch of 8 rows weights 0, 1, 2, 5, 0... over 8 mean 0, 1, 2 and 5 times, always
    weight = torch.tensor([0.0, 1.0, 2.0, 5.0, 0.0, 0.0, 0.0, 0.0])
    epochs = Epochs(8, batch=8, seed=1, weight=weight)
    for step in range(20):
        assert torch.bincount(epochs.rows(step), minlength=8).tolist() == weight.tolist()


def test_fractional_weights_are_right_on_average_and_within_one_in_every_epoch():
    weight = torch.tensor([0.3, 0.0, 1.1, 0.6, 0.0])
    expected = (5 * weight / weight.sum()).numpy()
    epochs = Epochs(5, batch=5, seed=0, weight=weight)
    counts = np.array([np.bincount(epochs.rows(step), minlength=5) for step in range(4000)])
    assert (np.abs(counts - expected) < 1).all()
    # a count within one of its mean p has a variance of at most 1/4
    assert np.abs(counts.mean(axis=0) - expected).max() < 4 * 0.5 / np.sqrt(4000)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_only_ratios_of_weights_matter(scale):
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    plain, scaled = Epochs(4, batch=4, seed=0, weight=weight), Epochs(4, batch=4, seed=0, weight=scale * weight)
    for step in range(50):
        assert plain.rows(step).tolist() == scaled.rows(step).tolist()
