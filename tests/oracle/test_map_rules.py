"""Rules that learn maps, and the probes they learn from, against closed forms in float64."""

import pytest
import torch
from _learning import network
from _toolkit import classes, generator, mlp_split, noise
from hypothesis import given, settings, strategies as st
from torch import nn

from splitfg import LearnedFeedback
from splitfg.feedback import (
    AlignedMaps,
    DeltaRule,
    Difference,
    Direct,
    FixedMaps,
    ForwardDerivative,
    ForwardDFA,
    Proximal,
)
from splitfg.feedback._map_rules import _solve_by_products


def test_differences_tend_to_the_forward_derivative():
    trunk = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    split, x = network(trunk, 3), noise(16, 4)
    y = torch.randint(0, 3, (16,), generator=generator())

    def change(probe):
        return LearnedFeedback(route=Direct(), probe=probe)(split, x, y, generator=generator(5)).state_update["2"]

    exact = change(ForwardDerivative())
    far = [float((change(Difference(step, central=True)) - exact).norm() / exact.norm()) for step in (0.3, 0.03, 0.003)]
    assert far[0] > far[1] > far[2]
    assert far[2] < 1e-4
    assert far[0] / far[1] == pytest.approx(100, rel=0.3)  # O(step²)


@given(
    rows=st.integers(1, 12), inputs=st.integers(1, 8), rate=st.floats(0.05, 1.0), ridge=st.floats(1e-3, 10.0),
    scale=st.floats(1e-3, 1e3), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_proximal_steps_never_enlarge_the_error(rows, inputs, rate, ridge, scale, seed):
    """Whatever the rows, their scale and their correlation."""
    truth, maps = noise(1, 3, inputs, seed=seed), noise(1, 3, inputs, seed=seed + 1)
    e = scale * noise(1, rows, inputs, seed=seed + 2) @ noise(1, inputs, inputs, seed=seed + 3)
    moved = maps + Proximal(rate, ridge).change(maps, e, e @ truth.mT)
    assert float((moved - truth).norm()) <= float((maps - truth).norm()) * (1 + 1e-9)


@given(rows=st.integers(1, 12), inputs=st.integers(1, 8), ridge=st.floats(1e-4, 10.0), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_proximal_steps_by_products_are_never_longer_than_solved_ones(rows, inputs, ridge, seed):
    """On GPUs the series replaces the solve; well-conditioned systems get the same answer."""
    e = noise(1, rows, inputs, seed=seed) @ noise(1, inputs, inputs, seed=seed + 1)
    matrix = e.mT @ e
    matrix = matrix + ridge * matrix.diagonal(dim1=-2, dim2=-1).mean() * torch.eye(inputs)
    approximate, exact = _solve_by_products(matrix, torch.eye(inputs)[None]), torch.linalg.inv(matrix)
    shares = torch.linalg.eigvals(approximate @ matrix).real
    assert float(shares.min()) >= -1e-9
    assert float(shares.max()) <= 1 + 1e-9
    if float(torch.linalg.cond(matrix)) < 20:
        assert torch.allclose(approximate, exact, rtol=1e-6)


@pytest.mark.parametrize("rule", [Proximal(), DeltaRule(0.4), ForwardDFA(0.05), AlignedMaps(rate=0.2)], ids=repr)
def test_rules_turn_maps_towards_the_response(rule):
    truth = noise(1, 4, 6)
    maps = rule.initial("layer", 1, 4, 6, truth)
    for step in range(300):
        e = noise(1, 64, 6, seed=step)
        maps = maps + rule.change(maps, e, e @ truth.mT)
    cosine = float((maps * truth).sum() / (maps.norm() * truth.norm()))
    assert cosine > (0.95 if not isinstance(rule, Proximal | DeltaRule) else 1 - 1e-9)


def test_fixed_maps_are_drawn_by_name_and_stay():
    rule, like = FixedMaps(seed=3), noise(1)
    first, second = (rule.initial(name, 1, 40, 50, like) for name in ("a", "b"))
    assert not torch.equal(first, second)
    assert torch.equal(first, FixedMaps(seed=3).initial("a", 1, 40, 50, like))
    assert float(first.var()) == pytest.approx(1 / 40, rel=0.1)
    assert not rule.change(first, noise(1, 4, 50), noise(1, 4, 40)).any()


def test_maps_that_do_not_learn_are_measured_once():
    """Direct feedback alignment takes one pass to make its maps; after that, and after resuming, none."""
    s, x, y = mlp_split(5, 6, 4, 3), noise(32, 5), classes(32, count=3)
    estimator = LearnedFeedback(route=Direct(FixedMaps()))
    first = estimator(s, x, y, generator=generator())
    estimator.update_state(s, first)
    second = estimator(s, x, y, generator=generator())
    assert (first.stats.jvps, second.stats.jvps, second.state_update) == (1, 0, {})
    resumed = LearnedFeedback(route=Direct(FixedMaps(seed=1)))
    resumed.route.load_state_dict(estimator.route.state_dict())
    third = resumed(s, x, y, generator=generator())
    assert third.stats.jvps == 0
    for name, g in first.grads.items():
        torch.testing.assert_close(second.grads[name], g)
        torch.testing.assert_close(third.grads[name], g)
