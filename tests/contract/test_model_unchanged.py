"""Splits, estimates and diagnoses leave everything of a model bit for bit as it was, also if they raise."""

import pickle
import time
from contextlib import suppress

import pytest
import torch
from _awkward import AWKWARD, STATEFUL, TRAINING, awkward, awkward_split
from _refusals import ESTIMATORS
from _state import state_of
from _toolkit import classes, generator, noise, seeded
from torch import nn

from splitfg import (
    ActivityFG,
    LearnedFeedback,
    ParallelPull,
    ReverseModeHead,
    Split,
    SplitError,
    SplitFG,
    diagnose,
    split,
)

METHODS = {
    **ESTIMATORS,
    "activity_fg": ActivityFG(2),
    "learned_feedback": LearnedFeedback(),
    "parallel_pull": ParallelPull(),
}


def readout(name):
    """The named awkward module as the first part of a model."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            case = awkward(name)
            self.body, self.between = case.module, nn.Linear(case.width, case.width).double()
            self.readout = nn.Linear(case.width, 4).double()

        def forward(self, x):
            return self.readout(torch.tanh(self.between(self.body(x))))

    class Several(Model):
        def forward(self, x, z, mask, power):
            return self.readout(torch.tanh(self.between(self.body(x, z, mask, power))))

    return seeded(Several if name == "several_inputs" else Model), awkward(name).inputs


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("at", [None, "between"])
@pytest.mark.parametrize("name", AWKWARD + STATEFUL + TRAINING)
def test_split_leaves_the_model_as_it_was(name, at, training):
    model, x = readout(name)
    model.train(training)
    model.body.train(False)  # modes may differ inside one model
    before = state_of(model)
    with suppress(SplitError):
        split(model, at, example=x)
    assert state_of(model) == before


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", AWKWARD + STATEFUL + TRAINING)
def test_an_estimate_leaves_the_model_as_it_was(name, method):
    estimator = METHODS[method]
    s, x, y = awkward_split(name)
    before = state_of(s.model)
    for _ in range(2):  # the first batch is validated, the second is not
        with suppress(Exception):  # not every method supports every module
            estimator(s, x, y, generator=generator())
        assert state_of(s.model) == before


@pytest.mark.parametrize("name", STATEFUL)
class TestStatefulModels:
    def test_estimates_work(self, name):
        model, x = readout(name)
        s = split(model)
        before = state_of(model)
        for _ in range(2):
            assert SplitFG(2)(s, x, classes(4, count=4), generator=generator()).grads
        assert state_of(model) == before

    def test_a_head_that_assigns_attributes(self, name):
        trunk = nn.Linear(3, 3).double()
        s = Split(trunk, ReverseModeHead(awkward(name).module))
        before = state_of(s.model)
        for _ in range(2):
            assert SplitFG(2)(s, noise(4, 3), classes(4, count=2), generator=generator()).grads
            assert state_of(s.model) == before

    def test_the_model_still_runs_and_pickles(self, name):
        if name == "hooks_itself":
            pytest.skip("torch.fx cannot trace modules that a forward pass creates")
        model, x = readout(name)
        s = split(model, at="between")
        SplitFG(2)(s, x, classes(4, count=4), generator=generator())
        pickle.dumps(model.state_dict())
        assert model(x).isfinite().all()


@pytest.mark.parametrize("name", STATEFUL + TRAINING)
def test_diagnose_leaves_the_model_as_it_was(name):
    model, x = readout(name)
    s = split(model)
    before = state_of(model)
    with suppress(SplitError):
        diagnose(s, x, classes(4, count=4), generator=generator(), draws=2)
        assert not name.startswith(("raises", "no_grad"))
    assert state_of(model) == before


class FailsHalfWay(nn.Module):
    """Cannot be traced: it stores activations, then depends on their values."""

    def __init__(self):
        super().__init__()
        self.first, self.readout = nn.Linear(3, 3), nn.Linear(3, 4)
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x):
        h = self.first(x)
        self.kept, self.last = h.mean(0), h
        return self.readout(h if h.sum() > -1e9 else -h)


class Random(nn.Module):
    """Draws from the global generator."""

    def __init__(self):
        super().__init__()
        self.first, self.readout = nn.Linear(3, 3), nn.Linear(3, 4)

    def forward(self, x):
        return self.readout(self.first(x) + torch.rand(3))


@pytest.mark.parametrize("build", [FailsHalfWay, Random])
@pytest.mark.parametrize("at", [None, "readout", "first", "missing"])
def test_errors_leave_the_model_as_it_was(build, at):
    model, x, y = seeded(build), noise(4, 3).float(), classes(4, count=4)
    before = state_of(model)
    with suppress(SplitError):
        s = split(model, at)
        for estimator in (SplitFG(2), SplitFG(1)):
            with suppress(SplitError):
                estimator(s, x, y, generator=generator())
    assert state_of(model) == before


class OwnDice(Random):
    """Draws from a generator of its own, which a step does not fix."""

    def forward(self, x):
        return self.readout(self.first(x) + torch.rand(3, generator=generator(time.perf_counter_ns())))


def test_randomness_from_elsewhere_raises():
    s = split(seeded(OwnDice))
    with pytest.raises(SplitError, match="random"):
        SplitFG(2)(s, noise(4, 3).float(), classes(4, count=4), generator=generator())


class OnlyTracedInEvaluation(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.readout = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 4)

    def forward(self, x):
        h = self.first(x)
        if self.training and h.sum() > 0:
            h = 2 * h
        return self.readout(torch.tanh(self.second(h)))


def test_a_model_that_can_be_traced_in_one_mode_works_in_that_mode():
    model, x, y = OnlyTracedInEvaluation().eval(), noise(4, 3).float(), classes(4, count=4)
    s = split(model, at="second")
    assert SplitFG(2)(s, x, y, generator=generator()).grads
    model.train()
    with pytest.raises(SplitError, match=r"training mode.*\.eval\(\)"):
        SplitFG(2)(s, x, y, generator=generator())
