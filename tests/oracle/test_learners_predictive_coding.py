"""Predictive coding against autograd of its energy, and against backpropagation in the promised limits."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

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


def settled(split, x, y, rule):
    """The latents of a forward pass, after the rule's steps down the energy by autograd."""
    z, v = [], x
    for layer in split.trunk.layers:
        z.append(layer(v).detach())
        v = torch.relu(z[-1])
    for _ in range(rule.settle_steps if rule else 0):
        z = [one.requires_grad_() for one in z]
        slopes = torch.autograd.grad(energy(split, x, y, z, rule.stiffness), z)
        step = rule.settle_rate * ROWS / rule.stiffness
        z = [(one - step * slope).detach() for one, slope in zip(z, slopes, strict=True)]
    return z


def by_autograd(split, x, y, rule):
    """The same rule with every derivative taken by autograd: settle, then differentiate by the weights."""
    z = settled(split, x, y, rule)
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


def with_large_weights():
    """The problem's split with ‖W_2‖ = ‖W_3‖ = 12, so that settling with a rate of 0.1 diverges."""
    split, x, y = problem("classes")
    with torch.no_grad():
        for layer in split.trunk.layers[1:]:
            layer.weight.mul_(12 / torch.linalg.matrix_norm(layer.weight, 2))
    return split, x, y


@pytest.mark.parametrize(("iterations", "falls"), [(0, False), (20, True)])
def test_power_iterations_keep_the_energy_falling_where_the_fixed_rate_diverges(iterations, falls):
    split, x, y = with_large_weights()
    rule = PredictiveCoding(12, power_iterations=iterations)
    found = rule(split, x, y).grads
    # with the limit measured by a singular value decomposition instead
    rate = 1 / (1 + 12) ** 2 if falls else 0.1
    same = PredictiveCoding(12, settle_rate=rate)
    latents = settled(split, x, y, same)
    at_start, after = (energy(split, x, y, z, rule.stiffness) for z in (settled(split, x, y, None), latents))
    assert (after < at_start) == falls
    for name, grad in by_autograd(split, x, y, same).items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


def test_power_iterations_change_nothing_while_the_rate_is_stable():
    split, x, y = problem("classes")
    with torch.no_grad():
        for layer in split.trunk.layers:
            layer.weight.div_(torch.linalg.matrix_norm(layer.weight, 2))
    plain, limited = (PredictiveCoding(power_iterations=n)(split, x, y).grads for n in (0, 5))
    assert all(torch.equal(plain[name], limited[name]) for name in plain)


def test_power_iterations_survive_weights_of_zero_and_a_single_layer():
    split, x, y = problem("classes")
    with torch.no_grad():
        split.trunk.layers[1].weight.zero_()
    assert all(g.isfinite().all() for g in PredictiveCoding(power_iterations=3)(split, x, y).grads.values())
    g = generator()
    single = Split(MLP(FEATURES, widths=(6,), generator=g), LinearHead(linear(6, OUTPUTS, generator=g)))
    single.model.double()
    assert PredictiveCoding(power_iterations=3)(single, x, y).loss.isfinite()


def test_errors_much_smaller_than_the_latents_keep_their_digits():
    """Errors shrink with the stiffness and the rate; z - μ in float32 would lose them."""
    split, x, y = problem("classes")
    rule = PredictiveCoding(settle_rate=1e-2, stiffness=1e3)
    expected = rule(split, x, y).grads
    split.model.float()
    for name, grad in rule(split, x.float(), y).grads.items():
        error = (grad.double() - expected[name]).norm() / expected[name].norm()
        assert error < 0.05, name


class Reads(TorchDispatchMode):
    """Counts how often code reads a tensor's value, which a captured step must not."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_power_iterations_read_no_value():
    """A captured step skips the checks of values; what else reads one would break it."""
    split, x, y = with_large_weights()
    PredictiveCoding()(split, x, y)  # the first batch is validated
    counts = []
    for iterations in (0, 3):
        with Reads() as reads:
            PredictiveCoding(power_iterations=iterations)(split, x, y)
        counts.append(reads.count)
    assert counts[0] == counts[1]


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
        PredictiveCoding(0, 0.0, -1.0, -1)
    assert len(error.value.problems) == 4
