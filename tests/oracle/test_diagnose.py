"""What ``diagnose`` says of a model, against the same quantities by brute force."""

import dataclasses
import math

import pytest
import torch
from _toolkit import DOUBLE, TiedLanguageModel, classes, exact, flat, generator, mlp_split, noise, seeded, trunk_names
from torch import nn

from splitfg import BlackBoxTrunk, LinearHead, Split, SplitError, SplitFG, Tied, diagnose, split, theory

K, DRAWS = 4, 300


def problem():
    return mlp_split(3, 4, 3), noise(6, 3), classes(6, count=3)


@pytest.fixture(scope="module")
def diagnosis():
    return diagnose(*problem(), generator=generator(), K=K, draws=DRAWS, steps=8)


def test_energies_and_counts(diagnosis):
    s, x, y = problem()
    grads = exact(s, x, y)
    trunk, head = flat(grads, trunk_names(s)), flat(grads, list(s.head_params()))
    assert (diagnosis.trunk_parameters, diagnosis.head_parameters) == (trunk.numel(), head.numel())
    assert diagnosis.parameter_ratio == pytest.approx(16 / 31)
    energies = trunk.square().sum().item(), head.square().sum().item()
    assert diagnosis.energy_ratio == pytest.approx(energies[0] / sum(energies))
    assert diagnosis.predicted_variance == pytest.approx((trunk.numel() + 1) / K * energies[0])
    assert diagnosis.probes_per_parameter == pytest.approx(8 * K / 16)
    assert diagnosis.exact


def test_measured_variance_is_measured(diagnosis):
    """The mean squared distance of the very draws, and within sampling error of the prediction."""
    s, x, y = problem()
    g, source = flat(exact(s, x, y), trunk_names(s)), generator()
    draws = [flat(SplitFG(K)(s, x, y, generator=source).grads, trunk_names(s)) for _ in range(DRAWS)]
    errors = (torch.stack(draws) - g).square().sum(1)
    assert diagnosis.measured_variance == pytest.approx(errors.mean().item())
    error = errors.std().item() / math.sqrt(DRAWS)
    assert abs(diagnosis.measured_variance - diagnosis.predicted_variance) < 4 * error


def test_signal_to_noise_by_parameter(diagnosis):
    """‖g_p‖² over the summed coordinate variances of p."""
    s, x, y = problem()
    grads = {n: g for n, g in exact(s, x, y).items() if n in s.trunk_params()}
    variance = theory.coordinate_variance(flat(grads), K)
    parts = dict(zip(grads, variance.split([g.numel() for g in grads.values()]), strict=True))
    assert set(diagnosis.snr) == set(grads)
    for n, g in grads.items():
        assert diagnosis.snr[n] == pytest.approx((g.square().sum() / parts[n].sum()).item())


def rare_class():
    """The last class is so unlikely that its row of the head has hardly a gradient, and the trunk has a large one."""
    s = mlp_split(3, 4, 3)
    with torch.no_grad():
        s.head.layers[0].weight.mul_(30)[2] = 0
        s.head.layers[0].bias[2] = -22
    return s, noise(6, 3), classes(6, count=2)


def test_joint_norm_is_that_of_estimates_and_says_what_is_lost():
    s, x, y = rare_class()
    found, source = diagnose(s, x, y, generator=generator(), K=K, draws=2), generator()
    norms = torch.stack([flat(SplitFG(K)(s, x, y, generator=source).grads).square().sum() for _ in range(2000)])
    assert found.joint_norm == pytest.approx(norms.mean().sqrt().item(), rel=0.1)
    head = flat(exact(s, x, y), list(s.head_params())).abs()
    assert found.head_lost > 0
    assert found.head_lost == ((head > 1e-8) & (head < 1e-8 * found.joint_norm)).double().mean().item()


def test_saved_bytes_are_what_autograd_keeps():
    """Linear keeps its input, tanh its output: x and two activations, each once."""
    s, x, y = mlp_split(3, 5, 7, 2), noise(6, 3), classes(6, count=2)
    kept = diagnose(s, x, y, generator=generator(), draws=2).saved_bytes
    assert kept == 8 * 6 * (3 + 5 + 7)


def test_saved_bytes_grow_with_depth():
    kept = [
        diagnose(
            mlp_split(*[4] * depth, 2), noise(6, 4), classes(6, count=2), generator=generator(), draws=2
        ).saved_bytes
        for depth in (3, 5)
    ]
    assert kept[1] - kept[0] == 2 * 8 * 6 * 4


def test_it_touches_nothing():
    s, x, y = problem()
    before = [p.detach().clone() for p in s.model.parameters()]
    diagnose(s, x, y, generator=generator(), draws=2)
    assert all(torch.equal(a, b) for a, b in zip(before, s.model.parameters(), strict=True))
    assert all(p.grad is None for p in s.model.parameters())


class TestWords:
    def test_a_budget_that_determines_the_trunk(self, diagnosis):
        assert "2 probes per trunk parameter: rho = 1 may work" in str(diagnosis)

    def test_a_budget_that_does_not(self):
        words = str(diagnose(*problem(), generator=generator(), K=K, draws=2, steps=1))
        assert "0.25 probes per trunk parameter: the trunk is under-determined" in words
        assert "rho = 1, 0.3, 0.1 and 0.03" in words
        assert "FrozenTrunk()" in words

    def test_what_clipping_does_to_the_head(self, diagnosis):
        assert "clip_apart=True" not in str(diagnosis)
        assert "clip_apart=True" in str(dataclasses.replace(diagnosis, head_lost=0.9, joint_norm=8000.0))

    def test_no_budget(self):
        assert "Give the number of training steps" in str(diagnose(*problem(), generator=generator(), draws=2))

    def test_numbers_and_k(self, diagnosis):
        words = str(diagnosis)
        assert "trunk 16, head 15 (ratio 0.5161)" in words
        assert f"{diagnosis.energy_ratio:.4f} of it in the trunk (exact gradient)" in words
        assert "K=4 is about 4 times more noise than signal" in words
        assert all(name in words for name in diagnosis.snr)

    def test_whether_the_head_is_worth_it(self):
        """A large head at a small trunk, and the reverse."""
        x, y = noise(6, 3), classes(6, count=3)
        heavy = mlp_split(3, 4, 3)
        with torch.no_grad():
            heavy.head.layers[0].weight.mul_(1e-3)  # hardly anything reaches the trunk
        assert "worth having" in str(diagnose(heavy, x, y, generator=generator(), draws=2))
        light = mlp_split(3, 4, 3)
        with torch.no_grad():
            light.head.layers[0].weight.mul_(30)
        assert "little to gain here" in str(diagnose(light, x, y, generator=generator(), draws=2))

    def test_the_papers_transformer(self):
        size = theory.TransformerSize(depth=32, width=4096, sequence=4096, batch=8)
        words = str(diagnose(*problem(), generator=generator(), draws=2, size=size))
        assert "backprop keeps 68.7 GB" in words

    def test_too_few_draws(self):
        with pytest.raises(SplitError, match="draws must be at least 2"):
            diagnose(*problem(), generator=generator(), draws=1)

    @pytest.mark.parametrize("steps", [0, -5])
    def test_no_steps_at_all(self, steps):
        with pytest.raises(SplitError, match=f"steps must be at least 1 .*got {steps}"):
            diagnose(*problem(), generator=generator(), draws=2, steps=steps)


class TestTied:
    def split(self, policy):
        model = seeded(TiedLanguageModel).double()
        with torch.no_grad():
            model.table.weight.mul_(0.1)  # the readout's share of the table's gradient outweighs the lookup's
        return split(model, tied=policy), classes(4, 3, count=5), classes(4, 3, count=5, seed=9)

    def test_excluded(self):
        d = diagnose(*self.split(Tied.EXCLUDE), generator=generator(), K=K, draws=DRAWS)
        assert d.measured_variance == pytest.approx(d.predicted_variance, rel=0.3)
        assert (d.trunk_parameters, d.head_parameters) == (12, 20)

    def test_included(self):
        """Only the lookup's share comes from tangents, so only it is noisy."""
        d = diagnose(*self.split(Tied.INCLUDE), generator=generator(), K=K, draws=DRAWS)
        assert d.measured_variance == pytest.approx(d.predicted_variance, rel=0.3)


class TestBlackBox:
    x, y = noise(6, 3), classes(6, count=3)

    def split(self, run):
        return Split(BlackBoxTrunk(run, {"w": noise(3, 4)}), seeded(lambda: LinearHead(nn.Linear(4, 3))).to(DOUBLE))

    def true_energy_ratio(self):
        body = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh()).to(DOUBLE)
        body[0].weight.data = noise(3, 4).T.contiguous()
        grads = exact(Split(body, self.split(torch.matmul).head), self.x, self.y)
        return theory.energy_ratio(grads["trunk.0.weight"], flat(grads, ["head.0.weight", "head.0.bias"])).item()

    @pytest.mark.parametrize(
        "run",
        [
            lambda params, x: torch.tanh(x @ params["w"]),
            pytest.param(
                lambda params, x: torch.from_numpy(torch.tanh(x @ params["w"].detach()).numpy()),
            ),
        ],
        ids=["torch", "outside torch"],
    )
    def test_energies_from_scores_alone(self, run):
        """E[d²] = ‖g_trunk‖², to the sampling error of K · draws scores."""
        d = diagnose(self.split(run), self.x, self.y, generator=generator(), K=K, draws=DRAWS)
        relative_error = math.sqrt(2 / (K * DRAWS))  # d² / ‖g‖² is chi-squared with one degree of freedom
        assert d.energy_ratio == pytest.approx(self.true_energy_ratio(), rel=4 * relative_error)
        assert (d.exact, d.measured_variance, d.saved_bytes, d.snr) == (False, None, None, {})
        assert "from scores alone" in str(d)

    def test_what_was_not_measured_is_said_once(self):
        d = diagnose(self.split(lambda params, x: torch.tanh(x @ params["w"])), self.x, self.y, generator=generator())
        assert "predicted, not measured (K=" in str(d)
        assert "signal to noise" not in str(d)
