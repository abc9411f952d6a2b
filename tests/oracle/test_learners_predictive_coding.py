"""Predictive coding against autograd of its energy, and against backpropagation in the promised limits."""

import pytest
import torch
import torch.nn.functional as F

from splitfg import Backprop, CrossEntropy, LinearHead, Split, SplitError, SquaredError
from splitfg.estimators.predictive_coding import PredictiveCoding
from splitfg.models import MLP, TabM, linear

ROWS, FEATURES, OUTPUTS, LAYERS = 9, 5, 3, 3


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def problem(task):
    """A split and a batch with weights large enough for the latents to matter."""
    g = generator()
    trunk = MLP(FEATURES, widths=(8, 7, 6), generator=g)
    loss = CrossEntropy() if task == "classes" else SquaredError()
    split = Split(trunk, LinearHead(linear(6, OUTPUTS, generator=g), loss=loss))
    split.model.double()
    with torch.no_grad():
        for p in split.model.parameters():
            p.mul_(2.0)
    x = torch.randn(ROWS, FEATURES, generator=g, dtype=torch.float64)
    values = torch.randn(ROWS, OUTPUTS, generator=g, dtype=torch.float64)
    return split, x, torch.arange(ROWS) % OUTPUTS if task == "classes" else values


def energy(split, x, y, z, stiffness):
    """E = L(head(f(z_m)), y) + κ/(2N) Σ ‖z_l - μ_l‖², written out."""
    inputs = [x, *(torch.relu(one) for one in z)]
    errors = [one - layer(v) for one, layer, v in zip(z, split.trunk.layers, inputs, strict=False)]
    outputs = F.linear(inputs[-1], *split.head.layers[0].parameters())
    loss = F.cross_entropy(outputs, y) if y.dtype == torch.int64 else 0.5 * (outputs - y).pow(2).sum() / ROWS
    return loss + stiffness / (2 * ROWS) * sum(e.pow(2).sum() for e in errors)


def by_autograd(split, x, y, rule):
    """The same rule with every derivative taken by autograd: settle, then differentiate by the weights."""
    z, v = [], x
    for layer in split.trunk.layers:
        z.append(layer(v).detach())
        v = torch.relu(z[-1])
    for _ in range(rule.settle_steps):
        z = [one.requires_grad_() for one in z]
        slopes = torch.autograd.grad(energy(split, x, y, z, rule.stiffness), z)
        step = rule.settle_rate * ROWS / rule.stiffness
        z = [(one - step * slope).detach() for one, slope in zip(z, slopes, strict=True)]
    names, params = zip(*split.model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(energy(split, x, y, z, rule.stiffness), params), strict=True))


def cosine(a, b):
    return float((a * b).sum() / (a.norm() * b.norm()))  # torch's own clamps tiny norms


@pytest.mark.parametrize("task", ["classes", "values"])
@pytest.mark.parametrize("rule", [PredictiveCoding(), PredictiveCoding(12, 0.2, 1.0), PredictiveCoding(3, 0.5, 40.0)])
def test_settling_and_hebbian_updates_match_autograd_of_the_energy(task, rule):
    split, x, y = problem(task)
    estimate, expected = rule(split, x, y), by_autograd(split, x, y, rule)
    assert estimate.grads.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(estimate.grads[name], grad, msg=lambda m, name=name: f"{name}: {m}")
        assert grad.abs().max() > 0


@pytest.mark.parametrize("task", ["classes", "values"])
def test_the_loss_is_that_of_the_plain_forward_pass(task):
    split, x, y = problem(task)
    torch.testing.assert_close(PredictiveCoding()(split, x, y).loss, Backprop()(split, x, y).loss)


@pytest.mark.parametrize("task", ["classes", "values"])
def test_stiff_settled_latents_give_backpropagation(task):
    """At equilibrium the error is of order 1/κ: ten times stiffer, ten times closer."""
    split, x, y = problem(task)
    exact = Backprop()(split, x, y).grads
    gaps = []
    for stiffness in (1e2, 1e3, 1e4):
        grads = PredictiveCoding(400, 0.2, stiffness)(split, x, y).grads
        gaps.append(max(float((grads[n] - g).norm() / g.norm()) for n, g in exact.items()))
    assert gaps[2] < 5e-3
    assert gaps[0] / gaps[1] == pytest.approx(10, rel=0.3)
    assert gaps[1] / gaps[2] == pytest.approx(10, rel=0.3)


@pytest.mark.parametrize("task", ["classes", "values"])
def test_small_settling_steps_give_backpropagations_direction_layer_by_layer(task):
    split, x, y = problem(task)
    exact = Backprop()(split, x, y).grads
    worst = []
    for rate in (0.3, 0.03, 0.003):
        grads = PredictiveCoding(LAYERS, rate, 1.0)(split, x, y).grads
        worst.append(1 - min(cosine(grads[n], g) for n, g in exact.items()))
    assert worst[0] > 0.1, "far from the limit it must be something else than backpropagation"
    assert worst[2] < 1e-3
    assert worst[0] > worst[1] > worst[2]


def test_it_says_that_it_is_biased_and_touches_no_trunk_in_reverse():
    split, x, y = problem("classes")
    before = {n: p.detach().clone() for n, p in split.model.named_parameters()}
    stats = PredictiveCoding()(split, x, y).stats
    assert stats.biased
    assert stats.jvps == stats.trunk_backward == 0
    for n, p in split.model.named_parameters():
        assert p.grad is None
        assert torch.equal(p, before[n])


def test_frozen_parameters_get_no_entry():
    split, x, y = problem("classes")
    split.trunk.layers[0].weight.requires_grad_(False)
    assert "trunk.layers.0.weight" not in PredictiveCoding()(split, x, y).grads


def test_refusals():
    split, x, y = problem("classes")
    with pytest.raises(SplitError, match="at least 3"):
        PredictiveCoding(settle_steps=2)(split, x, y)
    other = Split(TabM(FEATURES, generator=generator()), LinearHead(linear(128, 3, generator=generator())))
    with pytest.raises(SplitError, match=r"MLP.*TabM"):
        PredictiveCoding()(other, x.float(), y)
    with pytest.raises(SplitError) as error:
        PredictiveCoding(0, 0.0, -1.0)
    assert len(error.value.problems) == 3
