"""Compiled learned feedback against eager code, in float64."""

import pytest
import torch
from torch import nn

from splitfg import GradientLearner, LearnedFeedback, LinearHead, Split, SplitError, Tied
from splitfg.compiled import CompiledHalves
from splitfg.estimators import compiled
from splitfg.feedback import DeltaRule, Difference, Direct, ForwardDerivative, LayerDifference, Proximal, Relay
from splitfg.learners import CapturedLearner
from splitfg.models import GPT, GPTConfig, TabM

DOUBLE = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def gpt():
    trunk = GPT(GPTConfig(layers=1, width=16, heads=2, context=8, vocab=11), generator=generator()).double()
    split = Split(trunk, LinearHead(trunk.tied_linear()), tied=Tied.INCLUDE)
    tokens = torch.randint(0, 11, (64, 9), generator=generator(2))
    return split, tokens[:, :-1], tokens[:, 1:]


def convolutions():
    torch.manual_seed(0)
    trunk = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 4 * 4, 8),
    ).double()  # fmt: skip
    split = Split(trunk, LinearHead(nn.Linear(8, 3).double()))
    return split, torch.randn(32, 3, 10, 10, dtype=DOUBLE, generator=generator(2)), torch.arange(32) % 3


def tabm():
    trunk = TabM(5, width=8, layers=2, members=3, generator=generator()).double()
    torch.manual_seed(0)
    split = Split(trunk, LinearHead(nn.Linear(8, 3).double()))
    return split, torch.randn(64, 5, dtype=DOUBLE, generator=generator(2)), torch.arange(64) % 3


PASSES = {
    "default": lambda: (Relay(), None),
    "pass": lambda: (Relay(), Difference()),
    "central": lambda: (Relay(Proximal(0.5)), Difference(central=True)),
    "layers": lambda: (Relay(DeltaRule(1.0)), LayerDifference()),
    "derivative": lambda: (Relay(), ForwardDerivative()),
    "direct": lambda: (Direct(), Difference(0.1)),
}


def taught(split, x, y, estimator, steps=4):
    draws = generator(7)
    for _ in range(steps):
        estimate = estimator(split, x, y, generator=draws)
        estimator.update_state(split, estimate)
    return estimate


@pytest.mark.parametrize(
    ("network", "passes"),
    [*((convolutions, p) for p in PASSES), (tabm, "default"), (tabm, "direct"), (gpt, "default")],
)
def test_traced_steps_are_the_eager_ones(network, passes):
    split, x, y = network()
    expected = taught(split, x, y, LearnedFeedback(*PASSES[passes]()))
    calls = []

    def watched(function):
        return lambda *arguments: calls.append(function) or function(*arguments)

    twin, estimator = compiled(split, LearnedFeedback(*PASSES[passes]()), watched)
    found = taught(twin, x, y, estimator)
    assert len({id(f) for f in calls if isinstance(f, torch.fx.GraphModule)}) == 2  # both halves ran
    for kind in ("grads", "state_update"):
        wanted, got = getattr(expected, kind), getattr(found, kind)
        assert wanted.keys() == got.keys()
        for name, value in wanted.items():
            assert torch.allclose(got[name], value, rtol=1e-9, atol=1e-12 * float(value.abs().max())), (kind, name)


def test_a_compiler_changes_nothing():
    split, x, y = tabm()
    expected = taught(split, x, y, LearnedFeedback())
    compile_ = lambda f: torch.compile(f, backend="aot_eager")  # noqa: E731
    found = taught(*_args(split, x, y, compile_))
    assert all(torch.allclose(found.grads[n], g, rtol=1e-9) for n, g in expected.grads.items())


def _args(split, x, y, compile_):
    twin, estimator = compiled(split, LearnedFeedback(), compile_)
    return twin, x, y, estimator


def test_another_shape_is_traced_anew_and_maps_are_shared():
    split, x, y = gpt()
    twin, fast = compiled(split, LearnedFeedback(), lambda f: f)
    plain = LearnedFeedback()
    draws, others = generator(), generator()
    for rows in (64, 64, 48, 64):
        found = fast(twin, x[:rows], y[:rows], generator=draws)
        fast.update_state(twin, found)
        expected = plain(split, x[:rows], y[:rows], generator=others)
        plain.update_state(split, expected)
    assert all(torch.allclose(found.grads[n], g, rtol=1e-8, atol=1e-12) for n, g in expected.grads.items())


def test_only_values_that_the_second_half_needs_are_kept():
    a, w, u = torch.randn(4, 5), torch.randn(5, 3), torch.randn(4, 3)

    def paused(early, late):
        product = early[0] @ early[1]
        return torch.relu(product).exp(), {"w": early[0].T @ (late[0] * (product > 0) * torch.relu(product))}

    halves = CompiledHalves(paused, [a, w], [u], compile_=lambda f: f)
    h, kept = halves.first([a, w])
    expected_h, expected = paused([a, w], [u])
    assert torch.equal(h, expected_h)
    assert torch.equal(halves.second([a, w], kept, [u])["w"], expected["w"])
    assert [tuple(k.shape) for k in kept] == [(4, 3)]  # the product; neither its sign nor its activation


def test_values_filled_in_place_belong_to_one_half():
    def paused(early, late):
        place = torch.zeros(2, 3)
        place[0] = early[0]
        h = place.sum(0)
        place[1] = late[0]
        return h, place

    a, b = torch.randn(3), torch.randn(3)
    halves = CompiledHalves(paused, [a], [b], compile_=lambda f: f)
    h, kept = halves.first([b])
    assert torch.equal(h, b)
    assert torch.equal(halves.second([b], kept, [a]), torch.stack([b, a]))


def test_a_first_result_that_needs_late_arguments_is_an_error():
    a = torch.randn(3)
    with pytest.raises(ValueError, match="late arguments"):
        CompiledHalves(lambda early, late: (early[0] + late[0], None), [a], [a.clone()], compile_=lambda f: f)


def test_a_trunk_that_draws_random_numbers_runs_in_eager_code():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 6)).double()
    split = Split(trunk, LinearHead(nn.Linear(6, 3).double()))
    x, y = torch.randn(16, 4, dtype=DOUBLE), torch.arange(16) % 3
    expected = taught(split, x, y, LearnedFeedback())
    found = taught(*_args(split, x, y, lambda f: f))
    assert all(torch.equal(found.grads[n], g) for n, g in expected.grads.items())


def test_the_first_step_compares_what_maps_learn():
    split, x, y = tabm()

    def wrong(function):
        """A compiler that doubles the change of the maps alone."""

        if not isinstance(function, torch.fx.GraphModule):
            return function

        def run(*arguments):
            found = list(function(*arguments))
            return [2 * t if t.ndim == 3 and t.shape[0] == 1 else t for t in found]

        return run

    learner = GradientLearner(split, LearnedFeedback(), torch.optim.SGD(split.model.parameters(), 0.1))
    captured = CapturedLearner(learner, horizon=3, compile_=wrong)
    with pytest.raises(SplitError, match="learned state"):
        captured.step(x, y, generator=generator())


def test_maps_move_to_a_device_and_stay_in_their_memory_there():
    route = Relay()
    route.load_state_dict({"layer": torch.ones(1, 2, 2)})
    held = route.maps["layer"]
    route.to(torch.device("cpu"))
    assert route.maps["layer"] is held
    route.to(torch.device("meta"))
    assert route.maps["layer"].device.type == "meta"
