"""Windows against brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from splitfg.errors import DataError
from splitfg_lab.data import Windows
from splitfg_lab.data.device import DeviceWindows


def brute_force(tokens, length):
    """All full windows, by walking along the stream."""
    windows, at = [], 0
    while at + length < len(tokens):
        windows.append((tokens[at : at + length].tolist(), tokens[at + 1 : at + length + 1].tolist()))
        at += length
    return windows


@given(st.integers(2, 200), st.integers(1, 40), st.integers(1, 5), st.integers(0, 100))
def test_steps_walk_through_the_windows_and_begin_again(size, length, batch, i):
    tokens = np.arange(size, dtype=np.uint16) * 7
    expected = brute_force(tokens, length)
    if not expected:
        with pytest.raises(DataError, match="needs"):
            Windows(tokens, length)
        return
    windows = Windows(tokens, length)
    assert len(windows) == len(expected)
    x, y = windows.step(i, batch)
    numbers = [(batch * i + j) % len(expected) for j in range(batch)]
    assert x.tolist() == [expected[n][0] for n in numbers]
    assert y.tolist() == [expected[n][1] for n in numbers]
    assert x.dtype == y.dtype == torch.int64


@given(st.integers(10, 200), st.integers(1, 9), st.integers(1, 7))
def test_a_sweep_sees_every_window_once(size, length, batch):
    tokens = np.arange(size, dtype=np.uint16)
    batches = list(Windows(tokens, length).sweep(batch))
    rows = [(x, y) for xs, ys in batches for x, y in zip(xs.tolist(), ys.tolist(), strict=True)]
    assert rows == brute_force(tokens, length)
    assert all(len(xs) == batch for xs, _ in batches[:-1])


def test_the_papers_numbers():
    windows = Windows(np.broadcast_to(np.uint16(0), 119_085_169), 128)
    assert len(windows) == 930_352
    assert len(windows) // 4 == 232_588
    assert len(Windows(np.zeros(249_750, np.uint16), 128)) * 128 == 249_728


@pytest.mark.parametrize(
    ("tokens", "length", "complaint"),
    [
        (np.zeros(128, np.uint16), 128, "needs 129"),
        (np.zeros(0, np.uint16), 1, "0 tokens"),
        (np.zeros(9, np.uint16), 0, "length must be at least 1"),
        (np.zeros(9, np.float32), 2, "integers"),
        (np.zeros((3, 3), np.uint16), 2, "2-d"),
    ],
)
def test_what_cannot_be_cut_is_an_error(tokens, length, complaint):
    with pytest.raises(DataError, match=complaint):
        Windows(tokens, length)


def test_ids_beyond_signed_16_bits_stay_positive():
    x, _ = Windows(np.array([50_256, 50_255, 40_000], np.uint16), 2).step(0, 1)
    assert x.tolist() == [[50_256, 50_255]]


def test_ids_that_do_not_fit_a_device_are_errors():
    wide = Windows(np.array([70_000, 1, 2, 3, 5], dtype=np.int32), 2)
    with pytest.raises(DataError, match="must fit 16 bits, got 1 to 70000"):
        DeviceWindows(wide, batch=1, steps=2, device=torch.device("cpu"))
