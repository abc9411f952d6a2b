"""Theory's plain arithmetic, by hand: bounds, ratios, probes and activation memory."""

import pytest
import torch
from _toolkit import noise
from hypothesis import given, strategies as st

from splitfg import theory

TRUNK, HEAD = torch.tensor([3.0, 4.0]), torch.tensor([5.0, 5.0, 5.0])  # energies 25 and 75


def test_energy_ratio_and_reduction():
    assert theory.energy_ratio(TRUNK, HEAD).item() == pytest.approx(0.25)
    per_coordinate, total = theory.variance_reduction(TRUNK, HEAD)
    assert per_coordinate.item() == pytest.approx(4.0)
    assert total.item() == pytest.approx((6 * 100) / (3 * 25))


def test_variances_by_hand():
    assert theory.coordinate_variance(TRUNK, 2).tolist() == [(25 + 9) / 2, (25 + 16) / 2]
    assert theory.coordinate_variance(TRUNK, 2, theory.RADEMACHER_FOURTH_MOMENT).tolist() == [
        (25 - 9) / 2,
        (25 - 16) / 2,
    ]
    assert theory.total_variance(TRUNK, 2).item() == 3 * 25 / 2
    assert theory.orthogonal_total_variance(TRUNK, 2).item() == 0
    assert theory.conditioned_coordinate_variance(TRUNK, torch.tensor([1.0, 2.0]), 1).tolist() == [
        (9 + 64) / 1 + 9,
        (9 + 64) / 4 + 16,
    ]


def test_moments_by_hand():
    assert theory.second_moment(TRUNK, HEAD, 3).item() == pytest.approx(75 + 2 * 25)
    ones = torch.ones(2), torch.ones(3)
    assert theory.weighted_second_moment(TRUNK, HEAD, *ones, 3).item() == pytest.approx(75 + 2 * 25)
    assert theory.noise_ratio(TRUNK, HEAD, *ones, 3).item() == pytest.approx(125 / 100)
    weighted = theory.weighted_second_moment(TRUNK, HEAD, torch.tensor([2.0, 1.0]), torch.full((3,), 2.0), 1)
    assert weighted.item() == pytest.approx(4 * 75 + 4 * (2 * 9 + 25) + (2 * 16 + 25))


def test_noise_ratio_of_no_gradient_is_zero():
    zero = torch.zeros(2)
    assert theory.noise_ratio(zero, zero, torch.ones(2), torch.ones(2), 1).item() == 0


@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.integers(1, 8),
    st.floats(0.1, 1.0),
    st.floats(1.0, 10.0),
)
def test_r_max_is_never_exceeded(seed, P, K, a_min, a_max):
    """Whatever the gradient and the preconditioner within its bounds, head included."""
    spread = torch.rand(P + 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    a = a_min + (a_max - a_min) * spread
    g = noise(P + 3, seed=seed)
    ratio = theory.noise_ratio(g[:P], g[P:], a[:P], a[P:], K).item()
    assert ratio <= theory.r_max(P, K, a_min=a_min, a_max=a_max) * (1 + 1e-12)


def test_r_max_is_attained():
    """By equal preconditioners and a gradient in the trunk alone."""
    g, none = noise(4), torch.zeros(2, dtype=torch.float64)
    ratio = theory.noise_ratio(g, none, torch.full((4,), 3.0), torch.full((2,), 3.0), 5)
    assert ratio.item() == pytest.approx(theory.r_max(4, 5, a_min=3.0, a_max=3.0))


def test_step_and_convergence_bounds():
    assert theory.r_max(9, 5) == pytest.approx(3.0)
    assert theory.r_max(9, 5, a_min=0.5, a_max=2.0) == pytest.approx(24.0)
    assert theory.sgd_step_bound(2.0, 9, 5) == pytest.approx(1 / 6)
    assert theory.preconditioned_step_bound(2.0, 24.0) == pytest.approx(1 / 48)
    assert theory.sgd_convergence_bound(3.0, 0.1, 20) == pytest.approx(3.0)
    assert theory.sgd_convergence_bound(3.0, 0.1, 20, L=2.0, data_variance=5.0) == pytest.approx(4.0)
    assert theory.preconditioned_convergence_bound(3.0, 0.1, 20) == pytest.approx(3.0)
    assert theory.preconditioned_convergence_bound(3.0, 0.1, 20, a_min=0.5) == pytest.approx(6.0)


def test_probes_of_the_papers_epoch():
    """232,588 steps of four tangents over 3,192,320 parameters: about 0.3 each."""
    assert theory.probes_per_parameter(232_588, 4, 3_192_320) == pytest.approx(0.2914, rel=1e-3)


def test_the_papers_69_gigabytes():
    size = theory.TransformerSize(depth=32, width=4096, sequence=4096, batch=8)
    assert size.backprop_bytes == 16 * 4096 * 4096 * 8 * 32 == 68_719_476_736
    assert size.split_fg_bytes() == size.backprop_bytes // 16  # one layer and its tangent, of 32
    assert size.split_fg_bytes(chunk=3) == 4 * size.layer_bytes
