"""The line search: slopes against autograd, the scale it learns, and that steps and checkpoints keep to it."""

import functools
import math

import pytest
import torch
from _toolkit import DOUBLE, classes, exact, generator, mlp_split, noise, seeded
from torch import nn
from torch.autograd.functional import hessian

from splitfg import (
    Backprop,
    CosineWithWarmup,
    DirectPath,
    ForwardMode,
    GradientLearner,
    LinearHead,
    LineSearch,
    Split,
    SplitError,
    SplitFG,
    write_grads,
)
from splitfg.heads import ProbedHead, ReverseModeHead, SquaredError
from splitfg.learners import CapturedLearner, descents_along, slope_along, slopes_along
from splitfg.models import FlatTrunk
from splitfg.recipes import SGD, Adam


def problem():
    return mlp_split(5, 6, 4, 3), noise(32, 5), classes(32, count=3)


def fresh():
    return noise(32, 5, seed=8), classes(32, count=3, seed=9)


def direction(s):
    return {n: noise(*p.shape, seed=i) for i, (n, p) in enumerate(s.trunk_params().items())}


class TestSlopes:
    def test_descent_and_curvature_are_autograds(self):
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

    def test_several_directions_are_autograds(self):
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

    @pytest.mark.parametrize("kind", [LinearHead, ReverseModeHead, ProbedHead])
    def test_descents_alone_are_autograds(self, kind):
        s, x, y = problem()
        d, expected = direction(s), exact(s, x, y)
        (layer,) = s.head.layers
        s = Split(s.trunk, kind(layer))
        found = descents_along(s, x, y, [d, {n: v for n, v in d.items() if n.endswith("bias")}])
        each = {n: -(expected[n] * v).sum() for n, v in d.items()}
        wanted = torch.stack([sum(each.values()), sum(v for n, v in each.items() if n.endswith("bias"))])
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-7)


def searched(search, optimizer=None, schedule=None, steps=0):
    s, x, y = problem()
    optimizer = (optimizer or SGD(lr=0.1)).build(s)
    made = GradientLearner(s, Backprop(), optimizer, schedule=schedule, max_norm=None, line_search=search)
    for _ in range(steps):
        made.step(x, y, generator=generator())
    return made, x, y


def test_the_first_step_is_the_optimizers_times_start():
    search = LineSearch(start=0.25)
    learner, x, y = searched(search)
    s = learner.split
    before, g = {n: p.clone() for n, p in s.model.named_parameters()}, exact(s, x, y)
    learner.step(x, y, generator=generator())
    assert search.rho == 0.25
    for n, p in s.model.named_parameters():
        scale = 0.25 if n in s.trunk_params() else 1.0
        torch.testing.assert_close(p, before[n] - 0.1 * scale * g[n])


@pytest.mark.parametrize("steps", [1, 6])
def test_one_measurement_is_the_formula(steps):
    """log rho changes by the descent along the path, over its root mean square and sqrt(1000 + t); the path follows."""
    search = LineSearch()
    learner, *_ = searched(search)
    s = learner.split
    start = {n: p.detach().clone() for n, p in s.trunk_params().items()}
    squares, total, rho = 0.0, 0.0, 1.0
    for step in range(steps + 1):
        x, y = noise(32, 5, seed=step), classes(32, count=3, seed=step)
        path = {n: p.detach() - start[n] for n, p in s.trunk_params().items()}
        descent = slope_along(s, x, y, path).descent.item()
        squares, total = 0.97 * squares + descent**2, 0.97 * total + 1
        change = max(-1, min(1, descent / math.sqrt(squares / total))) if descent else 0.0
        rho *= math.exp(change / math.sqrt(1001 + step))
        if step == steps:
            break
        learner.step(x, y, generator=generator())
        assert search.rho.item() == pytest.approx(rho, rel=1e-5)
    before = search.rho.item()
    search.advance(s, x, y)
    assert search.rho.item() == pytest.approx(rho, rel=1e-5)
    assert rho != before
    for n, p in s.trunk_params().items():
        torch.testing.assert_close(p, start[n] + rho / before * path[n], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("groups", [(), ("*weight",)])
def test_the_trunk_is_its_start_and_rho_times_all_updates(groups):
    """Whatever rho was at each step; and the head's steps are not scaled."""
    search = LineSearch(groups=groups)
    learner, x, y = searched(search, Adam(1e-2))
    s, twin = learner.split, {}
    start = {n: p.detach().clone() for n, p in s.trunk_params().items()}
    updates = {n: torch.zeros_like(p) for n, p in start.items()}
    for step in range(12):
        x, y = noise(32, 5, seed=step), classes(32, count=3, seed=step)
        learner.fill_grads(x, y, generator=generator(step))
        twin = {n: p.detach().clone() for n, p in s.model.named_parameters()}
        optimizer = learner.update.optimizer.optimizer
        with learner.around_step(1.0):
            optimizer.step()
            for n in updates:
                updates[n] += dict(s.model.named_parameters())[n].detach() - twin[n]
    rho = search.rho.reshape(-1)
    assert len({1.0, *rho.tolist()}) == 1 + len(rho)
    for n, p in s.trunk_params().items():
        own = rho[-1] if groups and n.endswith("bias") else rho[0]
        torch.testing.assert_close(p.detach(), start[n] + own * updates[n])


def linear_problem():
    """A loss that is quadratic in the trunk's parameters, with a frozen head."""
    s = seeded(
        lambda: Split(nn.Linear(3, 4, dtype=DOUBLE), LinearHead(nn.Linear(4, 2, dtype=DOUBLE), loss=SquaredError()))
    )
    for p in s.head.parameters():
        p.requires_grad_(False)
    return s, noise(64, 3), noise(64, 2, seed=5)


@pytest.mark.parametrize(("lr", "longer"), [(1e-4, True), (30.0, False)])
def test_short_paths_lengthen_and_long_ones_shorten(lr, longer):
    s, x, y = linear_problem()
    search = LineSearch(cap=1e3)
    learner = GradientLearner(s, Backprop(), SGD(lr=lr).build(s), max_norm=1.0, line_search=search)
    for step in range(30):
        learner.step(x, y, generator=generator(step))
    assert (search.rho > 1) == longer
    assert abs(math.log(search.rho)) > 0.5


@pytest.mark.parametrize("lr", [1e-3, 1e-2, 1e-1])
def test_a_noisy_trunk_ends_near_the_best_scale_of_a_grid(lr):
    """One tangent a step: a path that is too long is mostly noise, one that is too short no training."""

    def loss(rho=None):
        s, x = mlp_split(8, 32, 16, 3), noise(512, 8)
        y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()
        optimizer = Adam(lr).build(s, rho=1.0 if rho is None else rho)
        search = LineSearch() if rho is None else None
        learner = GradientLearner(s, SplitFG(K=1), optimizer, schedule=CosineWithWarmup(600, 20), line_search=search)
        g = generator()
        for _ in range(600):
            rows = torch.randint(0, 512, (64,), generator=g)
            learner.step(x[rows], y[rows], generator=g)
        return nn.functional.cross_entropy(learner.predict(x), y).item()

    grid = {rho: loss(rho) for rho in (0.01, 0.1, 1.0)}
    assert loss() < 1.05 * min(grid.values())


def test_an_optimizer_with_a_rho_of_its_own_is_an_error():
    """The path would be scaled by both, and the metrics show one of them."""
    s, *_ = problem()
    with pytest.raises(SplitError, match=r"build the optimizer with rho=1, got rho=0\.3"):
        GradientLearner(s, Backprop(), Adam(1e-2).build(s, rho=0.3), line_search=LineSearch())
    GradientLearner(s, Backprop(), torch.optim.SGD(s.model.parameters(), 1e-2), line_search=LineSearch())


def test_an_own_loop_takes_the_learners_steps():
    (inner, x, y), (s, *_) = problem(), problem()
    learner = GradientLearner(inner, SplitFG(K=2), Adam(1e-2).build(inner), max_norm=None, line_search=LineSearch())
    search, optimizer = LineSearch(), Adam(1e-2).build(s)
    for step in range(4):
        learner.step(x, y, generator=generator(step))
        search.advance(s, x, y)
        write_grads(s.model, SplitFG(K=2)(s, x, y, generator=generator(step)))
        with search.scaling(s, 1.0):
            optimizer.step()
    assert search.rho != 1
    expected = dict(inner.model.named_parameters())
    assert all(torch.equal(p, expected[n]) for n, p in s.model.named_parameters())


def test_rho_and_the_path_keep_to_the_cap():
    search = LineSearch(cap=0.25)
    learner, x, y = searched(search, steps=3)
    assert search.rho == 0.25
    before = {n: p.detach().clone() for n, p in learner.split.trunk_params().items()}
    search.advance(learner.split, x, y)
    assert search.rho == 0.25
    assert search.state_dict()["taken"] == 4
    assert all(torch.equal(p, before[n]) for n, p in learner.split.trunk_params().items())


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_schedules_factor_slows_rho_down(factor):
    search = LineSearch()
    learner, *_ = searched(search, SGD(1e-3), lambda _: factor, steps=2)
    before, (x, y) = search.rho.clone(), fresh()
    path = {n: p.detach() - search.state_dict()[f"start/{n}"] for n, p in learner.split.trunk_params().items()}
    descent = slope_along(learner.split, x, y, path).descent
    search._state["squares"].copy_(100 * descent**2)  # so that the clip does not hide the factor
    search.advance(learner.split, x, y)
    unit = descent / (search.state_dict()["squares"][0] / (1 - 0.97**3)).sqrt()
    torch.testing.assert_close(torch.log(search.rho / before), factor * unit / math.sqrt(1003))


@pytest.mark.parametrize("optimizer", [Adam(1e-2), SGD(0.1)])
def test_captured_and_resumed_steps_are_eager_steps(optimizer):
    def learner():
        s, x, y = problem()
        schedule = CosineWithWarmup(20, 2)
        made = GradientLearner(s, SplitFG(K=2), optimizer.build(s), schedule=schedule, line_search=LineSearch())
        return made, x, y

    (eager, x, y), (inner, *_), (again, *_) = learner(), learner(), learner()
    aot_eager = functools.partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")
    fast = CapturedLearner(inner, horizon=20, compile_=aot_eager)
    g, h = generator(), generator()
    for step in range(8):
        if step == 5:
            again.load_state_dict(eager.state_dict())
            eager = again
        a, b = eager.step(x, y, generator=g), fast.step(x, y, generator=h)
        torch.testing.assert_close(a.metrics["rho"], b.metrics["rho"])
    torch.compiler.reset()
    for n, p in eager.split.model.named_parameters():
        torch.testing.assert_close(p, dict(inner.split.model.named_parameters())[n])


def test_captured_steps_measure_in_compiled_code():
    """The compiled function runs forward mode, once for a step of Backprop: its own passes push no tangent."""
    s, x, y = problem()
    pushed = []

    def counting(function):
        if getattr(function, "__self__", None) != ForwardMode():
            return function

        def run(*args):
            pushed.append(1)
            return function(*args)

        return run

    eager = GradientLearner(s, Backprop(), Adam(1e-2).build(s), line_search=LineSearch())
    fast = CapturedLearner(eager, horizon=20, compile_=counting)
    g = generator()
    fast.check(x, y, generator=g)
    before = len(pushed)
    for _ in range(3):
        fast.step(x, y, generator=g)
    assert len(pushed) - before == 3


def test_compiled_measurements_have_tangents_for_all_parameters():
    """Also where the estimator trains some of them only, as the direct path does in a ResNet's block."""
    trunk = FlatTrunk(width=8, generator=generator()).to(DOUBLE)
    s = Split(trunk, LinearHead(nn.Linear(8 * 16, 3).to(DOUBLE)))
    x, y, names = noise(4, 3, 4, 4), classes(4, count=3), []

    def recording(function):
        if getattr(function, "__self__", None) != ForwardMode():
            return function

        def run(f, params, tangents):
            names.append(set(tangents))
            return function(f, params, tangents)

        return run

    estimator, g = DirectPath(), generator()
    assert set(estimator(s, x, y).grads) < set(dict(s.model.named_parameters()))
    eager = GradientLearner(s, estimator, Adam(1e-2).build(s), line_search=LineSearch())
    fast = CapturedLearner(eager, horizon=20, compile_=recording)
    for _ in range(2):
        fast.step(x, y, generator=g)
    assert len(names) == 3  # one comparison with eager code, two steps
    assert all(found == set(s.trunk_params()) for found in names)


@pytest.mark.parametrize("wrong", [0.0, 1.1, float("nan")])
def test_a_compiler_that_loses_the_slope_raises(wrong):
    s, x, y = problem()

    def losing(function):
        if getattr(function, "__self__", None) != ForwardMode():
            return function

        def run(*args):
            h, moved = function(*args)
            return h, wrong * moved

        return run

    eager = GradientLearner(s, Backprop(), Adam(1e-2).build(s), line_search=LineSearch())
    with pytest.raises(SplitError, match="the line search measures another descent in compiled code"):
        CapturedLearner(eager, horizon=20, compile_=losing).step(x, y, generator=generator())


def test_settings_that_cannot_work_raise():
    with pytest.raises(SplitError, match="start must be positive"):
        LineSearch(start=0)
    with pytest.raises(SplitError, match="cap must be positive"):
        LineSearch(cap=0)
    with pytest.raises(SplitError, match="calm must not be negative"):
        LineSearch(calm=-1)


@pytest.mark.parametrize("groups", [(), ("*weight",)])
def test_its_jvps_are_counted(groups):
    s, x, y = problem()
    search = LineSearch(groups=groups)
    learner = GradientLearner(s, SplitFG(K=3), SGD(0.1).build(s), line_search=search)
    for step in range(2):
        assert learner.step(x, y, generator=generator(step)).metrics["jvps"] == 3 + 1 + len(groups)


class TestGroups:
    def test_every_group_learns_a_scale_of_its_own(self):
        first = next(iter(problem()[0].trunk_params()))
        search = LineSearch(groups=(first,))
        learner, x, y = searched(search, steps=4)
        s, state = learner.split, {n: v.clone() for n, v in search.state_dict().items()}
        before = {n: p.detach().clone() for n, p in s.trunk_params().items()}
        paths = {n: p - state[f"start/{n}"] for n, p in before.items()}
        x, y = fresh()
        slopes = slopes_along(s, x, y, [{first: paths[first]}, {n: v for n, v in paths.items() if n != first}])
        search.advance(s, x, y)
        squares = 0.97 * state["squares"] + 0.03 * slopes.descent**2
        unit = (slopes.descent / (squares / (1 - 0.97**5)).sqrt()).clamp(-1, 1)
        torch.testing.assert_close(search.rho, state["rho"] * torch.exp(unit / math.sqrt(1005)))
        assert search.rho[0] != search.rho[1]
        for n, p in s.trunk_params().items():
            scale = (search.rho / state["rho"])[0 if n == first else 1]
            torch.testing.assert_close(p.detach(), before[n] + (scale - 1) * paths[n])
        assert set(search.metrics()) == {"rho/0", "rho/1"}

    def test_patterns_that_match_nothing_raise(self):
        learner, x, y = searched(LineSearch(groups=("*", "other*")))
        with pytest.raises(SplitError, match="'other\\*' matches no parameter"):
            learner.step(x, y, generator=generator())
