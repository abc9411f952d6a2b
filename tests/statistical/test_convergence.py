"""The convergence bounds on a problem whose every constant is known: a quadratic in trunk and head.

h = W x, outputs = h + b with W estimated and b exact, half squared error. The inputs are orthonormal and centred, so
the Hessian is the identity, L = 1, the minimum is ordinary least squares, and the SGD bound is nearly attained.
"""

import math

import pytest
import torch
from _toolkit import DOUBLE, exact, flat, generator, noise, seeded
from torch import nn

from splitfg import GradientLearner, LinearHead, Split, SplitFG, SquaredError, theory
from splitfg.recipes import SGD, LaggedRMS

ROWS, D, C, K = 12, 3, 2, 2
P, L = C * D, 1.0
DESIGN = torch.linalg.qr(torch.cat([torch.ones(ROWS, 1, dtype=DOUBLE), noise(ROWS, D)], dim=1)).Q * math.sqrt(ROWS)
X = DESIGN[:, 1:]
Y = X @ noise(D, C, seed=5) + 0.5 + 0.3 * noise(ROWS, C, seed=6)
BEST = DESIGN.T @ Y / ROWS  # least squares: the intercept's sign goes with the design's
LEAST = 0.5 * (Y - DESIGN @ BEST).square().sum().item() / ROWS


def quadratic():
    def build():
        readout = nn.Linear(C, C, dtype=DOUBLE)
        readout.weight = nn.Parameter(torch.eye(C, dtype=DOUBLE), requires_grad=False)
        return Split(nn.Linear(D, C, bias=False, dtype=DOUBLE), LinearHead(readout, loss=SquaredError()))

    return seeded(build)


def excess(s):
    """F - F*."""
    return 0.5 * (s.predict(X) - Y).square().sum().item() / ROWS - LEAST


def gradient(s, rows=slice(None)):
    """By hand: the trunk's W and the head's b."""
    residual = s.predict(X[rows]) - Y[rows]
    return {"trunk.weight": residual.T @ X[rows] / len(residual), "head.0.bias": residual.mean(0)}


def runs(optimizer, steps, repeats, measure, *, rows=None, start=None):
    """The mean over steps of ``measure`` before each step, one number a run."""
    results = []
    for seed in range(repeats):
        s, g = quadratic(), generator(seed)
        if start is not None:
            start(s)
        built = optimizer.build(s)
        learner = GradientLearner(s, SplitFG(K), built, max_norm=None)
        seen = []
        for _ in range(steps):
            seen.append(measure(s, built))
            part = slice(None) if rows is None else torch.randperm(ROWS, generator=g)[:rows]
            learner.step(X[part], Y[part], generator=g)
        results.append(sum(seen) / steps)
    return torch.tensor(results, dtype=DOUBLE)


def squared_norm(s, optimizer=None):
    return flat(gradient(s)).square().sum().item()


def upper(sample):
    """The mean less four standard errors: above the bound only if the truth is."""
    return (sample.mean() - 4 * sample.std() / math.sqrt(len(sample))).item()


def test_the_problem_is_what_it_says():
    s = quadratic()
    expected = exact(s, X, Y, criterion=lambda outputs, y: 0.5 * (outputs - y).square().sum() / ROWS)
    for name, g in expected.items():
        torch.testing.assert_close(gradient(s)[name], g)
    assert excess(s) == pytest.approx(0.5 * squared_norm(s) / L)  # F - F* = ‖∇F‖² / 2L everywhere: the Hessian is L I


class TestSGD:
    STEPS, REPEATS = 25, 30

    def test_bound_holds_at_its_step(self):
        """And is no idle bound here: the average comes within a few percent of it."""
        eta = theory.sgd_step_bound(L, P, K)
        sample = runs(SGD(lr=eta), self.STEPS, self.REPEATS, squared_norm)
        bound = theory.sgd_convergence_bound(excess(quadratic()), eta, self.STEPS)
        assert upper(sample) <= bound
        assert sample.mean() > 0.7 * bound

    def test_step_bound_is_sharp(self):
        """Three times the covered step and it diverges: the factor 1 + (P + 1)/K is really there."""
        eta = 3 * theory.sgd_step_bound(L, P, K)
        sample = runs(SGD(lr=eta), self.STEPS, 5, squared_norm)
        assert sample.min() > theory.sgd_convergence_bound(excess(quadratic()), eta, self.STEPS)
        assert eta < 1 / L  # at which plain gradient descent would still converge

    def test_minibatch_term(self):
        """From the minimum, where the first term is zero, what remains is the data's noise: positive, under L η σ²."""
        eta, worst = theory.sgd_step_bound(L, P, K) / 2, []

        def at_the_minimum(s):
            sign = DESIGN[0, 0].sign()
            s.trunk.weight.data.copy_(BEST[1:].T)
            s.head.layers[0].bias.data.copy_(sign * BEST[0])
            assert excess(s) == pytest.approx(0, abs=1e-12)

        def measure(s, optimizer):
            full = flat(gradient(s))
            singles = [flat(gradient(s, [i])) for i in range(ROWS)]
            # variance of the mean of 3 rows out of 12, drawn without replacement
            spread = sum((g - full).square().sum() for g in singles) / (ROWS - 1) * (1 / 3 - 1 / ROWS)
            worst.append((1 + (P + 1) / K) * spread.item())
            return full.square().sum().item()

        sample = runs(SGD(lr=eta), 20, 10, measure, rows=3, start=at_the_minimum)
        bound = theory.sgd_convergence_bound(0.0, eta, 20, L=L, data_variance=max(worst))
        assert upper(sample) <= bound
        assert sample.min() > theory.sgd_convergence_bound(0.0, eta, 20) == 0


class TestLaggedRMS:
    STEPS, A_MIN, A_MAX = 25, 0.5, 2.0

    def recipe(self, eta):
        return LaggedRMS(lr=eta, beta=0.9, a_min=self.A_MIN, a_max=self.A_MAX)

    def energy(self, ratios):
        """<∇F, A ∇F> before each step, and the noise ratio collected on the way."""

        def measure(s, optimizer):
            a = {}
            named = {id(p): n for n, p in s.model.named_parameters()}
            for group in optimizer.param_groups:
                for p in group["params"]:
                    a[named[id(p)]] = optimizer.preconditioner(p, group)
            g = gradient(s)
            pairs = (g["trunk.weight"], g["head.0.bias"], a["trunk.weight"], a["head.0.bias"])
            ratios.append(theory.noise_ratio(*(t.flatten() for t in pairs), K).item())
            return sum((a[n] * g[n].square()).sum().item() for n in g)

        return measure

    def test_bound_holds_at_its_step(self):
        """In the preconditioned energy and in the plain one, with a noise ratio never above R_max."""
        r = theory.r_max(P, K, a_min=self.A_MIN, a_max=self.A_MAX)
        eta, ratios, gap = theory.preconditioned_step_bound(L, r), [], excess(quadratic())
        sample = runs(self.recipe(eta), self.STEPS, 20, self.energy(ratios))
        assert upper(sample) <= theory.preconditioned_convergence_bound(gap, eta, self.STEPS)
        plain = runs(self.recipe(eta), self.STEPS, 10, squared_norm)
        assert upper(plain) <= theory.preconditioned_convergence_bound(gap, eta, self.STEPS, a_min=self.A_MIN)
        assert max(ratios) <= r
        assert max(ratios) > 0.2 * r

    def test_far_above_the_step_it_fails(self):
        r = theory.r_max(P, K, a_min=self.A_MIN, a_max=self.A_MAX)
        eta, gap = 40 * theory.preconditioned_step_bound(L, r), excess(quadratic())
        sample = runs(self.recipe(eta), self.STEPS, 5, self.energy([]))
        assert sample.mean() > theory.preconditioned_convergence_bound(gap, eta, self.STEPS)
