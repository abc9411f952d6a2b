"""Compiled passes equal eager ones where a trace cannot see a change: dropout, attributes, inputs of any kind."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from _toolkit import DOUBLE, classes, generator, noise, seeded
from torch import nn

from splitfg import (
    ActivityFG,
    DirectPath,
    GradientLearner,
    LearnedFeedback,
    LinearHead,
    MeanJacobian,
    ParallelPull,
    ResidualPath,
    Split,
    SplitFG,
    split,
)
from splitfg.compiled._traces import constants_of
from splitfg.estimators import compiled
from splitfg.learners import CapturedLearner
from splitfg.recipes import SGD

X, Y = noise(12, 4), classes(12, count=3)
ESTIMATORS = {
    "activities": lambda: ActivityFG(K=2),
    "direct path": lambda: DirectPath(ResidualPath(("5",), strict=False)),
    "pulls": lambda: ParallelPull(pulls=3),
    "maps and pulls": lambda: ParallelPull(feedback=MeanJacobian()),
    "tangents": lambda: SplitFG(K=2),
}
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def same(function):
    return function


def network():
    torch.manual_seed(0)
    layers = (nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    return Split(nn.Sequential(*layers).to(DOUBLE), LinearHead(nn.Linear(6, 3).to(DOUBLE)))


def close(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name])


def made(estimator, *, fast):
    s = network()
    learner = GradientLearner(s, estimator, SGD(0.1).build(s))
    return s, CapturedLearner(learner, horizon=9, compile_=same) if fast else learner


@every_estimator
def test_dropout_draws_the_masks_of_eager_code(name):
    s, estimator = network(), ESTIMATORS[name]()
    s.model.train()
    twin, fast = compiled(s, estimator, same)
    state = torch.get_rng_state()
    for seed in range(3):
        expected = estimator(s, X, Y, generator=generator(seed))
        close(fast(twin, X, Y, generator=generator(seed)).grads, expected.grads)
    assert torch.equal(state, torch.get_rng_state())


@every_estimator
def test_training_mode_may_change_between_captured_steps(name):
    models = []
    for fast in (False, True):
        s, learner = made(ESTIMATORS[name](), fast=fast)
        g = generator()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # steps run without a graph
            for step in range(5):
                s.model.train(step > 1)
                learner.step(X, Y, generator=g)
        models.append(s.model.state_dict())
    close(*models)


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.temperature, self.offset = 1.0, torch.zeros(6, dtype=DOUBLE)
        self.settings = {"gains": [1.0], "object": SimpleNamespace(shift=0.0)}

    def forward(self, x):
        inner = self.inner(x) * self.settings["gains"][0] + self.settings["object"].shift
        return self.head(self.out(torch.tanh(inner / self.temperature + self.offset)))


def tempered():
    model = seeded(Tempered).double()
    return model, split(model)


@pytest.mark.parametrize("estimator", [ActivityFG(K=2), LearnedFeedback()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("temperature", 3.0),
        ("offset", torch.ones(6, dtype=DOUBLE)),
        ("settings", {"gains": [2.0], "object": SimpleNamespace(shift=0.0)}),
        ("settings", {"gains": [1.0], "object": SimpleNamespace(shift=1.0)}),
    ],
)
def test_a_changed_attribute_is_traced_anew(estimator, attribute, value):
    model, s = tempered()
    twin, fast = compiled(s, estimator, same)
    for _ in range(2):
        expected = estimator(s, X, Y, generator=generator())
        close(fast(twin, X, Y, generator=generator()).grads, expected.grads)
        setattr(model, attribute, value)


def test_every_tensor_whose_id_tells_traces_apart_is_kept():
    model, _ = tempered()
    model.register_buffer("scale", torch.ones(3))
    key, held = constants_of(model.modules())
    assert {id(model.offset), id(model.scale)} == {id(tensor) for tensor in held} == {i for i in key if i > 1e6}


def test_a_layer_that_thaws_between_captured_steps_is_trained():
    models = []
    for fast in (False, True):
        s, learner = made(LearnedFeedback(), fast=fast)
        s.model.eval()
        g = generator()
        for step in range(4):
            s.trunk[0].requires_grad_(step > 1)
            learner.step(X, Y, generator=g)
        models.append(s.model.state_dict())
    close(*models)


def test_an_attribute_that_changes_in_every_pass_runs_in_eager_code():
    model, s = tempered()
    twin, fast = compiled(s, ActivityFG(K=1), same)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(8):
            model.temperature = 1.0 + step
            expected = ActivityFG(K=1)(s, X, Y, generator=generator())
            close(fast(twin, X, Y, generator=generator()).grads, expected.grads)
    words = [str(w.message) for w in warned]
    assert len(words) == 2  # for the recorded pass and for the tangents
    assert all("attributes or buffers of the trunk change from pass to pass" in text for text in words)


def test_inputs_may_hold_what_cannot_be_hashed():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x, only):
            return self.head(torch.tanh(self.inner(x)) if "tanh" in only else self.inner(x))

    s = split(seeded(Named).double())
    twin, fast = compiled(s, ActivityFG(K=1), same)
    for only in ({"tanh"}, set(), {"tanh"}):
        x = {"x": X, "only": only}
        expected = ActivityFG(K=1)(s, x, Y, generator=generator())
        close(fast(twin, x, Y, generator=generator()).grads, expected.grads)
