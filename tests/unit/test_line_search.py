"""The line search: slopes against autograd, the scale it finds, and that steps and checkpoints keep to it."""

import functools
import itertools

import pytest
import torch
from _toolkit import DOUBLE, classes, exact, generator, mlp_split, noise, seeded
from torch import nn
from torch.autograd.functional import hessian

from splitfg import Backprop, CosineWithWarmup, GradientLearner, LinearHead, LineSearch, Split, SplitError, SplitFG
from splitfg.heads import SquaredError
from splitfg.learners import CapturedLearner, slope_along, slopes_along
from splitfg.learners.slopes import best_scales
from splitfg.recipes import SGD, Adam


def problem():
    return mlp_split(5, 6, 4, 3), noise(32, 5), classes(32, count=3)


def direction(s):
    return {n: noise(*p.shape, seed=i) for i, (n, p) in enumerate(s.trunk_params().items())}


def test_descent_and_curvature_are_autograds():
    s, x, y = problem()
    d = direction(s)
    slope = slope_along(s, x, y, d)
    expected = exact(s, x, y)
    torch.testing.assert_close(slope.descent, -sum((expected[n] * v).sum() for n, v in d.items()))
    f = s.trunk_function(x)
    h, dh = torch.func.jvp(f, (s.trunk_params(),), (d,))
    (head,) = s.head.layers
    H = hessian(lambda h: nn.functional.cross_entropy(head(h), y), h).reshape(h.numel(), h.numel())
    torch.testing.assert_close(slope.curvature, dh.flatten() @ H @ dh.flatten())


def linear_problem():
    """A loss that is quadratic in the trunk's parameters, so that the best step is known."""
    s = seeded(
        lambda: Split(nn.Linear(3, 4, dtype=DOUBLE), LinearHead(nn.Linear(4, 2, dtype=DOUBLE), loss=SquaredError()))
    )
    for p in s.head.parameters():
        p.requires_grad_(False)
    return s, noise(64, 3), noise(64, 2, seed=5)


def test_finds_the_step_that_minimises_a_quadratic():
    s, x, y = linear_problem()
    search = LineSearch(beta=0.0, cap=1e9)
    learner = GradientLearner(s, Backprop(), SGD(lr=1e-3).build(s), max_norm=None, line_search=search)
    before = {n: p.clone() for n, p in s.model.named_parameters()}
    learner.step(x, y, generator=generator())
    assert all(torch.equal(p, before[n]) for n, p in s.model.named_parameters())  # the step waits
    g = exact(s, x, y, criterion=lambda outputs, y: _squared(s, x, y, outputs))
    fresh_x, fresh_y = noise(64, 3, seed=8), noise(64, 2, seed=9)
    slope = slope_along(s, fresh_x, fresh_y, {n: -1e-3 * g[n] for n in s.trunk_params()})
    search.advance(s, fresh_x, fresh_y)
    torch.testing.assert_close(search.rho, slope.descent / slope.curvature)
    for n, p in s.trunk_params().items():
        torch.testing.assert_close(p, before[n] - 1e-3 * search.rho * g[n])
    # at the minimum along the direction there is nothing left to descend
    left = slope_along(s, fresh_x, fresh_y, {n: g[n] for n in s.trunk_params()})
    assert abs(left.descent) < 1e-10


def _squared(s, x, y, outputs):
    return s.head.output_loss.summed(outputs, y) / s.head.normaliser(s.h(x), y)


def test_scales_the_trunk_alone_and_keeps_to_its_cap():
    s, x, y = problem()
    search = LineSearch(cap=0.25)
    learner = GradientLearner(s, Backprop(), SGD(lr=0.1).build(s), max_norm=None, line_search=search)
    before = {n: p.clone() for n, p in s.model.named_parameters()}
    g = exact(s, x, y)
    learner.step(x, y, generator=generator())
    search.advance(s, x, y)
    assert search.rho == 0.25
    for n, p in s.model.named_parameters():
        scale = 0.25 if n in s.trunk_params() else 1.0
        torch.testing.assert_close(p, before[n] - 0.1 * scale * g[n])


def test_a_direction_that_does_not_descend_is_not_taken():
    s, x, y = problem()
    search = LineSearch(beta=0.0)
    learner = GradientLearner(s, Backprop(), SGD(lr=0.1).build(s), max_norm=None, line_search=search)
    learner.step(x, y, generator=generator())
    for name, step in search.state_dict().items():
        if name.startswith("step/"):
            step.neg_()
    before = {n: p.clone() for n, p in s.trunk_params().items()}
    search.advance(s, x, y)
    assert search.rho == 0
    assert all(torch.equal(p, before[n]) for n, p in s.trunk_params().items())


@pytest.mark.parametrize("horizon", [0.0, 0.99])
def test_a_schedules_factor_does_not_change_rho(horizon):
    """Updates half as long have half the descent and a quarter of the curvature; rho counts in full ones."""

    def found(schedule):
        s, x, y = problem()
        search = LineSearch(beta=0.0, cap=1e-9, horizon=horizon)  # so short that the trunk stays
        for p in s.head.parameters():
            p.requires_grad_(False)
        optimizer = SGD(lr=0.1).build(s)
        learner = GradientLearner(s, Backprop(), optimizer, schedule=schedule, max_norm=None, line_search=search)
        for _ in range(3):
            learner.step(x, y, generator=generator())
        return [search.state_dict()[name].item() for name in ("descent", "curvature")]

    assert found(CosineWithWarmup(40, 20)) == pytest.approx(found(None), rel=1e-5)


@pytest.mark.parametrize("optimizer", [Adam(1e-2), SGD(0.1)])
def test_captured_steps_are_eager_steps(optimizer):
    def learner():
        s, x, y = problem()
        made = GradientLearner(s, SplitFG(K=2), optimizer.build(s), line_search=LineSearch())
        return made, x, y

    eager, x, y = learner()
    inner, _, _ = learner()
    aot_eager = functools.partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")
    fast = CapturedLearner(inner, horizon=10, compile_=aot_eager)
    g, h = generator(), generator()
    for _ in range(4):
        a, b = eager.step(x, y, generator=g), fast.step(x, y, generator=h)
        torch.testing.assert_close(a.metrics["rho"], b.metrics["rho"])
    torch.compiler.reset()
    state = eager.state_dict()
    again, _, _ = learner()
    again.load_state_dict(state)
    torch.testing.assert_close(
        again.step(x, y, generator=generator(7)).loss, eager.step(x, y, generator=generator(7)).loss
    )
    torch.testing.assert_close(again.line_search.rho, eager.line_search.rho)


def test_settings_that_cannot_work_raise():
    with pytest.raises(SplitError, match="beta must be in"):
        LineSearch(beta=1.0)
    with pytest.raises(SplitError, match="cap must be positive"):
        LineSearch(cap=0)


class TestGroups:
    def test_descents_and_curvatures_are_autograds(self):
        s, x, y = problem()
        d = direction(s)
        parts = [{n: v} for n, v in d.items()]
        slopes, expected = slopes_along(s, x, y, parts), exact(s, x, y)
        f = s.trunk_function(x)
        own = s.trunk_params()
        moved = [torch.func.jvp(lambda p: f({**own, **p}), ({n: own[n]},), ({n: d[n]},)) for n in d]
        (head,), h = s.head.layers, moved[0][0]
        H = hessian(lambda h: nn.functional.cross_entropy(head(h), y), h).reshape(h.numel(), h.numel())
        J = torch.stack([dh.flatten() for _, dh in moved])
        torch.testing.assert_close(slopes.descent, torch.stack([-(expected[n] * d[n]).sum() for n in d]))
        torch.testing.assert_close(slopes.curvature, J @ H @ J.T)

    def test_scales_minimise_the_quadratic_in_their_box(self):
        """Against a fine grid of scales."""
        for seed, least in itertools.product(range(20), (0.0, -1.0)):
            root, d = noise(3, 3, seed=seed), noise(3, seed=100 + seed)
            C = root @ root.T + 0.1 * torch.eye(3, dtype=DOUBLE)
            found = best_scales(d, C, least=least, most=1.0)
            grid = torch.cartesian_prod(*[torch.linspace(least, 1, 41, dtype=DOUBLE)] * 3)
            values = 0.5 * (grid @ C * grid).sum(-1) - grid @ d
            own = 0.5 * found @ C @ found - found @ d
            assert own <= values.min() + 2e-3 * values.abs().max()
            assert bool(((found >= least) & (found <= 1)).all())

    def test_every_group_moves_by_its_own_scale(self):
        s, x, y = problem()
        first = next(iter(s.trunk_params()))
        search = LineSearch(beta=0.0, cap=1e6, groups=(first,))
        learner = GradientLearner(s, Backprop(), SGD(lr=1e-3).build(s), max_norm=None, line_search=search)
        g, before = exact(s, x, y), {n: p.clone() for n, p in s.trunk_params().items()}
        learner.step(x, y, generator=generator())
        slopes = slopes_along(
            s, x, y, [{first: -1e-3 * g[first]}, {n: -1e-3 * g[n] for n in s.trunk_params() if n != first}]
        )
        search.advance(s, x, y)
        expected = torch.linalg.solve(slopes.curvature, slopes.descent)
        assert bool((expected > 0).all())
        torch.testing.assert_close(search.rho, expected, rtol=1e-3, atol=0)
        for n, p in s.trunk_params().items():
            scale = search.rho[0 if n == first else 1]
            torch.testing.assert_close(p, before[n] - 1e-3 * scale * g[n])
        assert set(search.metrics()) == {"rho/0", "rho/1"}

    def test_steps_resume_and_old_checkpoints_load(self):
        s, x, y = problem()
        learner = GradientLearner(s, Backprop(), Adam(1e-2).build(s), line_search=LineSearch(groups=("*weight",)))
        for _ in range(3):
            learner.step(x, y, generator=generator())
        again = LineSearch(groups=("*weight",))
        again.load_state_dict(learner.line_search.state_dict())
        assert torch.equal(again.rho, learner.line_search.rho)
        old = LineSearch()
        old.load_state_dict({"rho": torch.tensor(0.5), "descent": torch.tensor(1.0), "curvature": torch.tensor(2.0)})
        assert old.rho == 0.5

    def test_patterns_that_match_nothing_raise(self):
        s, x, y = problem()
        learner = GradientLearner(s, Backprop(), Adam(1e-2).build(s), line_search=LineSearch(groups=("*", "other*")))
        with pytest.raises(SplitError, match="'other\\*' matches no parameter"):
            learner.step(x, y, generator=generator())


class TestLookingBack:
    def test_one_measurement_is_the_formula(self):
        """rho ← rho exp(clip(d / c) / 10) along P on the fresh batch, and P ← h P + rho D."""
        s, x, y = problem()
        search = LineSearch(beta=0.0, horizon=0.9, cap=2.0)
        learner = GradientLearner(s, Backprop(), SGD(lr=0.1).build(s), max_norm=None, line_search=search)
        for _ in range(14):
            learner.step(x, y, generator=generator())
        before = {name: value.clone() for name, value in search.state_dict().items()}
        theta = {n: p.clone() for n, p in s.trunk_params().items()}
        fresh_x, fresh_y = noise(32, 5, seed=8), classes(32, count=3, seed=9)
        slope = slope_along(s, fresh_x, fresh_y, {n: before[f"past/{n}"] for n in theta})
        search.advance(s, fresh_x, fresh_y)
        rho = before["rho"][0] * torch.exp((slope.descent / slope.curvature).clamp(-1, 1) / 10)
        torch.testing.assert_close(search.rho, rho.clamp(max=2.0))
        assert search.rho != before["rho"][0]
        for n, p in s.trunk_params().items():
            torch.testing.assert_close(p, theta[n] + search.rho * before[f"step/{n}"])
            moved = 0.9 * before[f"past/{n}"] + search.rho * before[f"step/{n}"]
            torch.testing.assert_close(search.state_dict()[f"past/{n}"], moved)

    def test_groups_change_together(self):
        """rho_g ← rho_g exp(s_g / 10), with the s in [-1, 1] that minimises the quadratic along past moves."""
        s, x, y = problem()
        first, *rest = s.trunk_params()
        search = LineSearch(beta=0.0, groups=(first,), horizon=0.5, cap=1e3)
        learner = GradientLearner(s, Backprop(), SGD(lr=0.1).build(s), max_norm=None, line_search=search)
        for _ in range(14):
            learner.step(x, y, generator=generator())
        before = {name: value.clone() for name, value in search.state_dict().items()}
        fresh_x, fresh_y = noise(32, 5, seed=8), classes(32, count=3, seed=9)
        past = [{n: before[f"past/{n}"] for n in names} for names in ([first], rest)]
        slopes = slopes_along(s, fresh_x, fresh_y, past)
        search.advance(s, fresh_x, fresh_y)
        grid = torch.cartesian_prod(*[torch.linspace(-1, 1, 2001, dtype=slopes.descent.dtype)] * 2)
        values = 0.5 * (grid @ slopes.curvature * grid).sum(-1) - grid @ slopes.descent
        expected = (before["rho"] * torch.exp(grid[values.argmin()] / 10)).clamp(max=search.cap)
        torch.testing.assert_close(search.rho, expected, rtol=2e-4, atol=0)
        assert search.rho[0] / search.rho[1] != before["rho"][0] / before["rho"][1]

    def test_it_is_the_default(self):
        assert LineSearch() == LineSearch(horizon=0.99)

    def test_the_first_steps_are_those_of_the_ratio(self):
        found = []
        for horizon in (0.0, 0.99):
            s, x, y = problem()
            search = LineSearch(horizon=horizon, cap=1e9)
            learner = GradientLearner(s, Backprop(), Adam(1e-2).build(s), line_search=search)
            found.append([learner.step(x, y, generator=generator()).metrics["rho"] for _ in range(14)])
        torch.testing.assert_close(found[0][:11], found[1][:11])
        assert found[0][12] != found[1][12]

    def test_captured_and_resumed_steps_are_eager_steps(self):
        def learner():
            s, x, y = problem()
            return GradientLearner(s, SplitFG(K=2), Adam(1e-2).build(s), line_search=LineSearch(horizon=0.9)), x, y

        (eager, x, y), (inner, *_), (again, *_) = learner(), learner(), learner()
        fast, g, h = CapturedLearner(inner, horizon=20, compile_=lambda f: f), generator(), generator()
        for step in range(14):
            if step == 12:
                again.load_state_dict(eager.state_dict())
                eager = again
            a, b = eager.step(x, y, generator=g), fast.step(x, y, generator=h)
            torch.testing.assert_close(a.metrics["rho"], b.metrics["rho"], rtol=1e-4, atol=1e-6)

    def test_wrong_settings_raise(self):
        with pytest.raises(SplitError, match="horizon must be in"):
            LineSearch(horizon=1.0)
