"""The laws of tangents by their moments, and the paper's variance identities, at a number of draws fixed beforehand.

Every mean is compared with its expectation in standard errors; the bound allows for the number of comparisons.
Each identity is also shown to be sharp enough: a neighbouring wrong formula lies outside the same bound.
"""

import pytest
import torch
from _toolkit import DOUBLE, fair, generator, noise

from splitfg import Conditioned, Gaussian, Orthogonal, Rademacher, RunningMagnitude, theory
from splitfg.tangents import Layout

DRAWS = 60_000
P, K = 6, 3
LAYOUT = Layout.of({"a": torch.zeros(2, 2, dtype=DOUBLE), "b": torch.zeros(2, dtype=DOUBLE)})
# One loud coordinate, so that the term in g_i² shows.
G = torch.tensor([2.0, 1.0, -0.5, 0.3, 0.1, -1.0], dtype=DOUBLE)
INDEPENDENT = {
    "gaussian": (Gaussian(), theory.GAUSSIAN_FOURTH_MOMENT),
    "rademacher": (Rademacher(), theory.RADEMACHER_FOURTH_MOMENT),
}


def conditioned(power=1.0, floor=0.1):
    magnitude = RunningMagnitude(beta=0.5)
    magnitude.update(LAYOUT.unflatten(torch.tensor([2.0, 1.0, 0.5, 1e-9, 0.2, 3.0], dtype=DOUBLE)))
    return Conditioned(magnitude, power, floor)


def orthogonal_frames(count, K):
    g = generator()
    return torch.stack([Orthogonal().draw(LAYOUT, K, g) for _ in range(count)])


def estimates(V, g=G, precision=None):
    """ĝ = (1/K) Σ_k <g, v_k> v_k for a stack of frames ``(N, K, P)``."""
    mean = ((V @ g).unsqueeze(-1) * V).mean(dim=1)
    return mean if precision is None else mean * precision


def squared_errors(sample):
    return (sample - G).square()


class TestMoments:
    @pytest.mark.parametrize("name", INDEPENDENT)
    def test_first_second_and_fourth(self, name):
        law, fourth = INDEPENDENT[name]
        v = law.draw(LAYOUT, DRAWS, generator())
        assert fair(v, torch.zeros(P, dtype=DOUBLE))
        products = torch.einsum("ni,nj->nij", v, v)
        assert fair(products, torch.eye(P, dtype=DOUBLE).reshape(-1))
        assert fair(v**4, torch.full((P,), fourth, dtype=DOUBLE))
        pair = v[:, :-1].square() * v[:, 1:].square()
        assert fair(pair, torch.ones(P - 1, dtype=DOUBLE))

    def test_gaussian_is_gaussian(self):
        """Quantiles, not only moments."""
        v = Gaussian().draw(LAYOUT, DRAWS, generator()).flatten()
        for q in (0.01, 0.25, 0.5, 0.9):
            below = (v < torch.special.ndtri(torch.tensor(q, dtype=DOUBLE))).double()
            assert fair(below.unsqueeze(1), torch.tensor([q], dtype=DOUBLE))

    def test_rademacher_is_signs(self):
        assert Rademacher().draw(LAYOUT, 100, generator()).abs().unique().tolist() == [1.0]

    @pytest.mark.parametrize("count", [1, 3, P])
    def test_orthogonal_frames(self, count):
        """Exactly orthogonal and of length sqrt(P); each tangent alone is uniform on the sphere."""
        V = orthogonal_frames(4000, count)
        gram = V @ V.mT
        torch.testing.assert_close(gram, P * torch.eye(count, dtype=DOUBLE).expand_as(gram), rtol=1e-10, atol=1e-10)
        assert fair(V, torch.zeros(count * P, dtype=DOUBLE))
        products = torch.einsum("nki,nkj->nkij", V, V)
        assert fair(products, torch.eye(P, dtype=DOUBLE).expand(count, P, P).reshape(-1))
        assert fair(V**4, torch.full((count * P,), 3 * P / (P + 2), dtype=DOUBLE))

    def test_frames_turn_together(self):
        """A Haar frame has E[(v_1·a)² (v_2·b)²] alike for every orthogonal pair a, b."""
        V = orthogonal_frames(6000, 2)
        turn = torch.linalg.qr(noise(P, P)).Q
        samples = [V[:, 0, 0] ** 2 * V[:, 1, 1] ** 2, (V[:, 0] @ turn[0]) ** 2 * (V[:, 1] @ turn[1]) ** 2]
        expected = P**2 * (P + 1) / ((P - 1) * P * (P + 2))
        assert fair(torch.stack(samples, dim=1), torch.full((2,), expected, dtype=DOUBLE))

    @pytest.mark.parametrize("power", [1.0, -0.5, 0.0])
    def test_conditioned_scale(self, power):
        """s is the magnitude to the power, floored, of mean square one; precision is what undoes it."""
        law = conditioned(power)
        s = law.scale(LAYOUT)
        m = torch.tensor([2.0, 1.0, 0.5, 1e-9, 0.2, 3.0], dtype=DOUBLE)
        floored = (m / m.square().mean().sqrt()).clamp_min(0.1) ** power
        torch.testing.assert_close(s, floored / floored.square().mean().sqrt())
        torch.testing.assert_close(law.precision(LAYOUT), s**-2)
        v = law.draw(LAYOUT, DRAWS, generator())
        products = torch.einsum("ni,nj->nij", v, v)
        assert fair(products, torch.diag(s**2).reshape(-1))

    def test_conditioned_starts_plain(self):
        law = Conditioned(RunningMagnitude())
        assert law.precision(LAYOUT) is None
        assert torch.equal(law.draw(LAYOUT, 5, generator()), Gaussian().draw(LAYOUT, 5, generator()))


class TestVariance:
    """E ĝ = g and Var ĝ by the theory, for ĝ = (1/K) Σ <g, v_k> v_k."""

    @pytest.mark.parametrize("K", [1, 3])
    @pytest.mark.parametrize("name", INDEPENDENT)
    def test_independent_coordinates(self, name, K):
        law, fourth = INDEPENDENT[name]
        sample = estimates(law.draw(LAYOUT, DRAWS, generator()).view(-1, K, P))
        assert fair(sample, G)
        assert not fair(sample, 1.1 * G)
        errors = squared_errors(sample)
        assert fair(errors, theory.coordinate_variance(G, K, fourth))
        assert not fair(errors, theory.coordinate_variance(G, K, 4 - fourth))  # the other law's
        assert not fair(errors, theory.coordinate_variance(G, K + 1, fourth))
        assert fair(errors.sum(1, keepdim=True), theory.total_variance(G, K, fourth).reshape(1))
        assert not fair(errors.sum(1, keepdim=True), (P / K * G.square().sum()).reshape(1))
        torch.testing.assert_close(theory.coordinate_variance(G, K, fourth).sum(), theory.total_variance(G, K, fourth))

    @pytest.mark.parametrize("K", [1, 3, P])
    def test_orthogonal(self, K):
        sample = estimates(orthogonal_frames(4000, K))
        assert fair(sample, G)
        total = squared_errors(sample).sum(1, keepdim=True)
        assert fair(total, theory.orthogonal_total_variance(G, K).reshape(1))
        assert theory.orthogonal_total_variance(G, K) < theory.total_variance(G, K)

    @pytest.mark.parametrize("power", [1.0, -0.5])
    def test_conditioned(self, power):
        law = conditioned(power)
        sample = estimates(law.draw(LAYOUT, DRAWS, generator()).view(-1, K, P), precision=law.precision(LAYOUT))
        assert fair(sample, G)
        errors, s = squared_errors(sample), law.scale(LAYOUT)
        assert fair(errors, theory.conditioned_coordinate_variance(G, s, K))
        assert not fair(errors, theory.coordinate_variance(G, K))

    def test_conditioned_is_least_noisy_at_the_inverse_root(self):
        """Total variance at s = |g|^-1/2 is below the plain one and below s = |g|."""
        g = G.abs()
        plain, paper, best = (
            theory.conditioned_coordinate_variance(G, g**power, K).sum().item() for power in (0.0, 1.0, -0.5)
        )
        assert best < plain < paper
        assert plain == pytest.approx(theory.total_variance(G, K).item())

    def test_projection_shrinks_by_k_over_p(self):
        """Its stated bias: E[Vᵀ(VVᵀ)⁻¹ V g] = (K/P) g for Gaussian tangents."""
        V = Gaussian().draw(LAYOUT, 12_000, generator()).view(-1, K, P)
        sample = torch.einsum("nkp,nk->np", torch.linalg.pinv(V).mT, V @ G)
        assert fair(sample, K / P * G)

    def test_full_and_weighted_second_moments(self):
        """E‖ĝ‖² and E‖A ĝ‖² with an exact head beside the estimated trunk."""
        head, a, a_head = noise(4), noise(P, seed=2).abs() + 0.1, noise(4, seed=3).abs() + 0.1
        sample = estimates(Gaussian().draw(LAYOUT, DRAWS, generator()).view(-1, K, P))
        full = head.square().sum() + sample.square().sum(1, keepdim=True)
        assert fair(full, theory.second_moment(G, head, K).reshape(1))
        weighted = (a_head * head).square().sum() + (a * sample).square().sum(1, keepdim=True)
        assert fair(weighted, theory.weighted_second_moment(G, head, a, a_head, K).reshape(1))
        assert not fair(weighted, theory.second_moment(G, head, K).reshape(1))
        signal = (a * G * G).sum() + (a_head * head * head).sum()
        assert fair(weighted / signal, theory.noise_ratio(G, head, a, a_head, K).reshape(1))

    def test_split_against_pure_forward_gradient(self):
        """The predicted reductions are the ratios of the predicted variances."""
        head = noise(40, seed=4)
        whole = torch.cat([G, head])
        per_coordinate, total = theory.variance_reduction(G, head)
        leading = (theory.coordinate_variance(whole, K)[0] - G[0] ** 2 / K) / (
            theory.coordinate_variance(G, K)[0] - G[0] ** 2 / K
        )
        torch.testing.assert_close(per_coordinate, leading)
        torch.testing.assert_close(total, theory.total_variance(whole, K) / theory.total_variance(G, K))
        torch.testing.assert_close(per_coordinate, 1 / theory.energy_ratio(G, head))
