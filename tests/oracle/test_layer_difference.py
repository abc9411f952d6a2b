"""Maps measured by running every layer alone, against weights and against backpropagation, in float64."""

import pytest
import torch
from _learning import taught
from _toolkit import DOUBLE, generator
from torch import nn

from splitfg import Backprop, LearnedFeedback, LinearHead, Split, SplitError, Tied
from splitfg.feedback import DeltaRule, Direct, LayerDifference, Relay
from splitfg.models import GPT, MLP, GPTConfig, TabM


def mlp():
    trunk = MLP(5, widths=(7, 6, 8), generator=generator()).double()
    split = Split(trunk, LinearHead(nn.Linear(8, 3).double()))
    return split, torch.randn(64, 5, dtype=DOUBLE, generator=generator(2)), torch.arange(64) % 3


def gpt():
    trunk = GPT(GPTConfig(layers=2, width=16, heads=2, context=8, vocab=11), generator=generator()).double()
    split = Split(trunk, LinearHead(trunk.tied_linear()), tied=Tied.INCLUDE)
    tokens = torch.randint(0, 11, (32, 9), generator=generator(2))
    return split, tokens[:, :-1], tokens[:, 1:]


def convolutions():
    trunk = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, dilation=2, groups=2),
        nn.ReLU(), nn.Conv2d(6, 5, (1, 3), padding=(0, 1)), nn.Flatten(),
    ).double()  # fmt: skip
    split = Split(trunk, LinearHead(nn.Linear(5 * 3 * 3, 3).double()))
    return split, torch.randn(32, 3, 10, 9, dtype=DOUBLE, generator=generator(2)), torch.arange(32) % 3


@pytest.mark.parametrize("network", [mlp, gpt, convolutions])
def test_the_estimate_converges_to_the_gradient(network):
    torch.manual_seed(0)
    split, x, y = network()
    estimate = taught(LearnedFeedback(probe=LayerDifference()), split, x, y, 40)
    exact = Backprop()(split, x, y).grads
    assert set(estimate.grads) == set(exact)
    for name, g in exact.items():
        assert torch.allclose(estimate.grads[name], g, rtol=1e-4, atol=1e-6 * float(g.abs().max())), name


def test_the_maps_are_the_weights_whatever_the_step():
    split, x, y = mlp()
    for step in (1e-3, 1.0, 30.0):
        estimator = LearnedFeedback(probe=LayerDifference(step))
        taught(estimator, split, x, y, 40)
        maps = estimator.route.state_dict()
        weights = {n: m.weight for n, m in split.trunk.named_modules() if n in maps}
        assert len(maps) == 2
        assert all(torch.allclose(maps[name][0], w, atol=1e-6) for name, w in weights.items())


def test_no_operation_between_layers_runs_again(monkeypatch):
    split, x, y = mlp()
    calls = []
    for kind in {type(m) for m in split.trunk.modules() if not list(m.children())}:
        run = kind.forward
        counted = lambda m, a, run=run: calls.append((type(m).__name__, len(a))) or run(m, a)  # noqa: E731
        monkeypatch.setattr(kind, "forward", counted)
    for _ in range(2):  # the first batch is validated
        calls.clear()
        LearnedFeedback(probe=LayerDifference())(split, x, y, generator=generator())
    assert calls[:6] == [("Linear", 64), ("ReLU", 64)] * 3
    # 4 rows for each of 7 and of 6 inputs, each time beside one row for the bias
    assert calls[6:] == [("Linear", 28), ("Linear", 1), ("Linear", 24), ("Linear", 1)]


def test_members_of_an_ensemble_share_a_map():
    trunk = TabM(5, width=6, layers=2, members=3, generator=generator()).double()
    split = Split(trunk, LinearHead(nn.Linear(6, 3).double()))
    x, y = torch.randn(64, 5, dtype=DOUBLE, generator=generator(2)), torch.arange(64) % 3
    estimate = taught(LearnedFeedback(probe=LayerDifference()), split, x, y, 40)
    exact = Backprop()(split, x, y).grads
    for name in exact:
        cosine = torch.nn.functional.cosine_similarity(estimate.grads[name].flatten(), exact[name].flatten(), dim=0)
        assert cosine > 0.9, name


def test_direct_routes_need_a_pass_to_h():
    split, x, y = mlp()
    with pytest.raises(SplitError, match="Difference"):
        LearnedFeedback(route=Direct(), probe=LayerDifference())(split, x, y, generator=generator())


def test_a_step_that_is_not_positive_raises():
    with pytest.raises(SplitError, match="step must be positive"):
        LayerDifference(0)
    assert "LayerDifference" in repr(LearnedFeedback(route=Relay(), probe=LayerDifference()))


@pytest.mark.parametrize(("rows", "inputs", "rate"), [(32, 32, 1.0), (64, 16, 1.0), (32, 32, 0.5)])
def test_the_delta_rule_contracts_by_its_formula_under_white_noise(rows, inputs, rate):
    """Fixed N: the mean over 200 draws of one step, starting from an error of norm 1."""
    rule, draws = DeltaRule(rate), generator(3)
    error = torch.randn(1, 4, inputs, dtype=DOUBLE, generator=draws)
    error = error / error.norm()
    left = []
    for _ in range(200):
        e = torch.randn(1, rows, inputs, dtype=DOUBLE, generator=draws)
        left.append(float((error + rule.change(error, e, torch.zeros(1, rows, 4, dtype=DOUBLE))).square().sum()))
    expected = 1 - (2 * rate - rate**2) * rows / (rows + inputs)
    assert sum(left) / 200 == pytest.approx(expected, rel=0.05)
