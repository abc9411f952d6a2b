"""What ``diagnose`` says of a model, against the same quantities by brute force."""

import dataclasses
import math

import pytest
import torch
from _toolkit import DOUBLE, TiedLanguageModel, classes, exact, flat, generator, mlp_split, noise, seeded, trunk_names
from torch import nn

from splitfg import (
    Backprop,
    BlackBoxTrunk,
    DirectPath,
    LearnedFeedback,
    LinearHead,
    Split,
    SplitError,
    SplitFG,
    Tied,
    diagnose,
    split,
    theory,
)
from splitfg.diagnosis import MethodReport
from splitfg.diagnosis._methods import MAP_UPDATES
from splitfg.models import FlatTrunk

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
    norms = torch.stack([flat(SplitFG(K)(s, x, y, generator=source).grads).square().sum() for _ in range(1000)])
    assert found.joint_norm == pytest.approx(norms.mean().sqrt().item(), rel=0.06)  # four standard errors
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


class TestMethods:
    """Every method's cosine similarity and relative error, and the recommendation drawn from them."""

    def test_split_fg_is_measured_on_its_own_draws(self, diagnosis):
        s, x, y = problem()
        g, source = flat(exact(s, x, y), trunk_names(s)), generator()
        draws = [flat(SplitFG(K)(s, x, y, generator=source).grads, trunk_names(s)) for _ in range(DRAWS)]
        first = diagnosis.methods[0]
        assert first.method == "SplitFG(K=4)"
        cosines = torch.stack([torch.nn.functional.cosine_similarity(d, g, dim=0) for d in draws])
        assert first.cosine == pytest.approx(cosines.mean().item())
        assert first.noise == pytest.approx(diagnosis.measured_variance / g.square().sum().item())

    def test_reports_say_why_a_method_does_not_apply(self, diagnosis):
        (path,) = [m for m in diagnosis.methods if m.method == "DirectPath()"]
        assert path.obstacle is not None
        assert "residual_path" in path.obstacle
        assert "does not apply" in str(path)

    def test_the_most_similar_method_is_recommended(self, diagnosis):
        applicable = [m for m in diagnosis.methods if m.obstacle is None]
        assert diagnosis.recommended.cosine == max(m.cosine for m in applicable)
        assert f"Recommended: {diagnosis.recommended.method}." in str(diagnosis)

    def test_activity_tangents_beat_weight_tangents_where_layers_have_many_weights(self):
        s, x, y = mlp_split(30, 30, 3), noise(6, 30), classes(6, count=3)
        found = {m.method: m for m in diagnose(s, x, y, generator=generator(), draws=20).methods}
        assert found["ActivityFG(K=8)"].cosine > 2 * found["SplitFG(K=8)"].cosine
        assert not found["ActivityFG(K=8)"].biased

    def test_a_residual_path_is_used(self):
        trunk = FlatTrunk(width=8, generator=generator()).double()
        s = Split(trunk, seeded(lambda: LinearHead(nn.Linear(8 * 16, 3))).double())
        x, y = noise(4, 3, 4, 4), classes(4, count=3)
        (path,) = [m for m in diagnose(s, x, y, generator=generator(), draws=2).methods if m.method == "DirectPath()"]
        g, found = flat(exact(s, x, y), trunk_names(s)), DirectPath()(s, x, y).grads
        zeros = {n: torch.zeros_like(p) for n, p in s.trunk_params().items()}
        cosine = torch.nn.functional.cosine_similarity(flat({**zeros, **found}, trunk_names(s)), g, dim=0)
        assert path.cosine == pytest.approx(cosine.item())
        assert path.biased

    def test_warnings_are_left_to_training(self):
        """Learned feedback warns once about parameters that it does not reach; a diagnosis must not use that up."""
        trunk = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh())).double()
        trunk.register_parameter("unused", nn.Parameter(noise(2)))
        s, x, y = Split(trunk, seeded(lambda: LinearHead(nn.Linear(4, 3))).double()), noise(6, 3), classes(6, count=3)
        diagnose(s, x, y, generator=generator(), draws=2)
        with pytest.warns(UserWarning, match=r"does not reach trunk\.unused"):
            LearnedFeedback()(s, x, y, generator=generator())


class TestWords:
    def test_a_budget_that_determines_the_trunk(self, diagnosis):
        assert "2 probes per trunk parameter: at least one measurement" in str(diagnosis)

    def test_a_budget_that_does_not(self):
        words = str(diagnose(*problem(), generator=generator(), K=K, draws=2, steps=1))
        assert "0.25 probes per trunk parameter" in words
        assert "under-determined" in words

    @pytest.mark.parametrize(("noise", "values"), [(0.1, "1 and 0.3"), (50, "1, 0.3 and 0.1"), (780, "0.3, 0.1 and")])
    def test_more_noise_smaller_steps(self, diagnosis, noise, values):
        """The advice on rho follows the recommended method's noise, whatever the budget."""
        best = dataclasses.replace(diagnosis.methods[0], noise=noise, cosine=1.0)
        words = str(dataclasses.replace(diagnosis, methods=(best,)))
        assert f"rho = {values}" in words
        assert "FrozenTrunk()" in words
        assert "may work" not in words

    def test_nothing_but_noise(self, diagnosis):
        best = dataclasses.replace(diagnosis.methods[0], noise=1e4, cosine=0.01)
        assert "nearly all noise" in str(dataclasses.replace(diagnosis, methods=(best,)))
        assert "nearly all noise" not in str(diagnosis)

    def test_a_biased_method_is_compared_with_an_unbiased_one(self, diagnosis):
        first, biased = diagnosis.methods[0], MethodReport("Biased()", biased=True, cosine=1.0, noise=0.1)
        words = str(dataclasses.replace(diagnosis, methods=(first, biased)))
        assert "Recommended: Biased()." in words
        assert "compare it with SplitFG(K=4), which is unbiased" in words
        assert "maps lag behind" not in words
        assert "maps lag behind" in str(
            dataclasses.replace(diagnosis, methods=(dataclasses.replace(biased, learned=True),))
        )

    def test_what_clipping_does_to_the_head(self, diagnosis):
        assert "clip_apart=True" not in str(diagnosis)
        assert "clip_apart=True" in str(dataclasses.replace(diagnosis, head_lost=0.9, joint_norm=8000.0))

    def test_no_budget(self):
        assert "Pass the number of training steps" in str(diagnose(*problem(), generator=generator(), draws=2))

    def test_numbers(self, diagnosis):
        words = str(diagnosis)
        assert "trunk 16, head 15 (ratio 0.5161)" in words
        assert f"{diagnosis.energy_ratio:.4f} of it in the trunk (exact gradient)" in words
        assert all(name in words for name in diagnosis.snr)

    def test_one_screen(self, diagnosis):
        """A deep model lists its best and worst parameters alone, and the repr lists none."""
        many = {f"blocks.{i}.weight": float(i) for i in range(100)}
        deep = dataclasses.replace(diagnosis, snr=many)
        assert len(str(deep).splitlines()) <= 40
        assert all(f"blocks.{i}.weight " in str(deep) for i in (0, 3, 96, 99))
        assert "blocks.50.weight" not in str(deep)
        assert len(repr(deep)) < 1000

    def test_whether_the_head_is_worth_it(self, diagnosis):
        shares = {0.01: "FrozenTrunk() may be nearly as good", 0.5: "worth having", 0.99: "a small gain"}
        for share, words in shares.items():
            assert words in str(dataclasses.replace(diagnosis, energy_ratio=share))

    def test_the_papers_transformer(self):
        size = theory.TransformerSize(depth=32, width=4096, sequence=4096, batch=8)
        words = str(diagnose(*problem(), generator=generator(), draws=2, size=size))
        assert "backprop stores 68.7 GB" in words

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
        assert "predicted, not measured (Split-FG, K=" in str(d)
        assert "Recommended: SplitFG(K=8, engine=CentralDifference())." in str(d)
        assert "signal to noise" not in str(d)


def test_learned_maps_report_what_they_explain_by_parameter():
    """Against the definition, with an estimator of the test's own; the layers above the last map are exact."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    s, x, y = split(model), torch.randn(64, 6, dtype=torch.float64), torch.randint(0, 3, (64,))
    found = diagnose(s, x, y, generator=generator(), draws=2)
    (report,) = [m for m in found.methods if m.method == "LearnedFeedback()"]
    assert set(report.explained) == set(s.trunk_params())
    assert report.explained["2.weight"] == pytest.approx(1, abs=1e-12)
    estimator, exact, draws = LearnedFeedback(), Backprop()(s, x, y).grads, generator(1)
    for _ in range(MAP_UPDATES + 1):
        estimate = estimator(s, x, y, generator=draws)
        estimator.update_state(s, estimate)
    g, own = exact["0.weight"], estimate.grads["0.weight"]
    expected = 1 - float((own - g).square().sum() / g.square().sum())
    assert report.explained["0.weight"] == pytest.approx(expected, abs=0.02)
    assert report.explained["0.weight"] < 1
    assert "share of the gradient that LearnedFeedback() explains" in str(found)
    assert all(not m.explained for m in found.methods if not m.learned)
