"""Engines against the Jacobian: forward-mode AD exactly, perturb-and-measure to the order of its step."""

from itertools import pairwise

import pytest
import torch
from _awkward import AWKWARD, awkward
from _toolkit import noise, seeded
from torch import nn
from torch.func import functional_call, jacfwd, jacrev

from splitfg import CentralDifference, ForwardMode, OneSidedDifference, SplitError

K = 3
SMOOTH = ("twice", "tied_inside", "several_inputs", "attention", "scalars", "recurrent", "lookup")


def problem(module, args):
    """The function of the trained parameters, their values, and K tangents."""
    params = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
    tangents = {n: noise(K, *p.shape, seed=i, dtype=p.dtype) for i, (n, p) in enumerate(params.items())}
    return lambda p: functional_call(module, p, args), params, tangents


def times(jacobian, tangents, h):
    """J v_k for every k, from the Jacobian by parameter."""
    terms = [v.reshape(len(v), -1) @ jacobian[n].reshape(h.numel(), v[0].numel()).T for n, v in tangents.items()]
    return sum(terms).view(-1, *h.shape)


def tanh_network(dtype):
    body = seeded(lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)))
    return problem(body.to(dtype), (noise(8, 6, dtype=dtype),))


def relative_error(engine, f, params, tangents):
    truth = ForwardMode()(f, params, tangents)[1].double()
    return ((engine(f, params, tangents)[1].double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("chunk", [1, K])
@pytest.mark.parametrize("name", AWKWARD)
def test_forward_mode_is_the_jacobian(name, chunk):
    """Against forward-over-forward and, independently, reverse mode."""
    case = awkward(name)
    f, params, tangents = problem(case.module, case.args)
    expected = case.module(*case.args).detach()
    part = {n: v[:chunk] for n, v in tangents.items()}
    h, dh = ForwardMode(chunk=chunk)(f, params, part)
    torch.testing.assert_close(h, expected, rtol=1e-12, atol=1e-12)
    for jacobian in (jacfwd(f)(params), jacrev(f)(params)):
        torch.testing.assert_close(dh, times(jacobian, part, expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", [CentralDifference(), OneSidedDifference()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", SMOOTH)
def test_differences_approach_the_jacobian(name, engine):
    """In float64 the default step leaves about eps^(2/3) = 4e-11 (central) and eps^(1/2) = 1.5e-8 (one-sided)."""
    case = awkward(name)
    f, params, tangents = problem(case.module, case.args)
    h, dh = engine(f, params, tangents)
    expected = case.module(*case.args).detach()
    torch.testing.assert_close(h, expected, rtol=1e-12, atol=1e-12)
    error = (dh - times(jacrev(f)(params), tangents, expected)).norm() / dh.norm()
    assert error < (1e-8 if isinstance(engine, CentralDifference) else 1e-5)


@pytest.mark.parametrize(("engine", "order"), [(CentralDifference, 2), (OneSidedDifference, 1)])
def test_truncation_error_shrinks_with_the_order_of_the_step(engine, order):
    """Halving a step divides the error by 2 to the order, while truncation dominates rounding."""
    f, params, tangents = tanh_network(torch.float64)
    errors = [relative_error(engine(step=step), f, params, tangents) for step in (4e-3, 2e-3, 1e-3)]
    for coarse, fine in pairwise(errors):
        assert coarse / fine == pytest.approx(2**order, rel=0.1)


@pytest.mark.parametrize("engine", [CentralDifference, OneSidedDifference])
def test_rounding_error_grows_as_the_step_shrinks(engine):
    """Far below the default step, every tenfold smaller step costs about a digit."""
    f, params, tangents = tanh_network(torch.float32)
    coarse, fine = (relative_error(engine(step=step), f, params, tangents) for step in (1e-5, 1e-6))
    assert 3 < fine / coarse < 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("engine", [CentralDifference, OneSidedDifference])
def test_default_step_is_near_the_best(engine, dtype):
    """No step of a grid over seven decades around it is more than ten times as accurate as the default."""
    f, params, tangents = tanh_network(dtype)
    default = relative_error(engine(), f, params, tangents)
    steps = [10.0 ** (-k / 2) for k in range(2, 16 if dtype is torch.float64 else 12)]
    best = min(relative_error(engine(step=step), f, params, tangents) for step in steps)
    assert default < 10 * best


def test_every_tangent_has_its_own_step():
    """The default keeps the distance moved the same, so a tangent's length must not change the accuracy."""
    f, params, tangents = tanh_network(torch.float64)
    scales = torch.tensor([1e-4, 1.0, 1e4], dtype=torch.float64)
    scaled = {n: v * scales.view(-1, *[1] * (v.ndim - 1)) for n, v in tangents.items()}
    plain, stretched = CentralDifference()(f, params, tangents)[1], CentralDifference()(f, params, scaled)[1]
    torch.testing.assert_close(stretched / scales.view(-1, 1, 1), plain, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("engine", [CentralDifference(), OneSidedDifference()])
def test_answers_may_come_in_one_buffer(engine):
    """As from an inference runtime that writes every answer to the same place."""
    params, tangents, place = {"w": noise(3)}, {"w": noise(2, 3, seed=5)}, torch.empty(3, dtype=torch.float64)
    h, dh = engine(lambda p: place.copy_(p["w"].sin()), params, tangents)
    torch.testing.assert_close(h, params["w"].sin())
    torch.testing.assert_close(dh, params["w"].cos() * tangents["w"], rtol=1e-4, atol=1e-6)


def test_differences_never_differentiate():
    """A function outside torch is measured as well as one inside."""

    def f(params):
        return torch.from_numpy(x.numpy() @ params["w"].numpy())

    x, w, v = noise(4, 3), noise(3, 2, seed=2), noise(2, 3, 2, seed=3)
    for engine in (CentralDifference(), OneSidedDifference()):
        _, dh = engine(f, {"w": w}, {"w": v})
        torch.testing.assert_close(dh, torch.stack([x @ v[0], x @ v[1]]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("engine", "runs"), [(CentralDifference(), 2 * K + 1), (OneSidedDifference(), K + 1)])
def test_runs_of_the_trunk_are_not_wasted(engine, runs):
    """Hardware time is counted in runs: two (or one) a tangent and one for h."""
    f, params, tangents = tanh_network(torch.float64)
    calls = []
    engine(lambda p: calls.append(1) or f(p), params, tangents)
    assert len(calls) == runs


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ForwardMode(chunk=0), ["chunk must be at least 1"]),
        (lambda: CentralDifference(step=0.0, noise=-1.0, chunk=-2), ["step must be", "noise must be", "chunk must be"]),
        (lambda: OneSidedDifference(step=float("nan")), ["step must be a positive number"]),
        (lambda: OneSidedDifference(noise=float("inf")), ["noise must be a positive number"]),
    ],
)
def test_settings_that_cannot_work_are_refused_together(build, words):
    with pytest.raises(SplitError) as caught:
        build()
    assert len(caught.value.problems) == len(words)
    assert all(word in str(caught.value) for word in words)
