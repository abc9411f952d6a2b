"""The captured step on a CUDA device: the eager step's numbers, its generator, its checkpoints, and no host work."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from splitfg import CosineWithWarmup, GradientLearner, LinearHead, Split, Tied
from splitfg.data import Windows
from splitfg.data.device import DeviceWindows
from splitfg.learners import CapturedLearner
from splitfg.models import GPT, GPTConfig
from splitfg.recipes import (
    SGD,
    Adam,
    AdamW,
    BackpropMethod,
    ConditionedLaw,
    EvolutionMethod,
    FrozenMethod,
    MethodRecipe,
    Muon,
    OptimizerRecipe,
    PureFGMethod,
    SplitFGMethod,
)
from splitfg.training._compiled import whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's compiler has advice to give on every GPU
]

STEPS = 12
WINDOWS = Windows(np.random.default_rng(0).integers(0, 500, 3000).astype(np.uint16), 32)


def eager_learner(method: MethodRecipe, optimizer: OptimizerRecipe | None = None) -> GradientLearner:
    config = GPTConfig(layers=2, width=64, heads=2, context=32, vocab=500)
    trunk = GPT(config, generator=torch.Generator().manual_seed(0)).to("cuda")
    split = Split(trunk, LinearHead(trunk.tied_linear(), block=2**12), tied=Tied.EXCLUDE)
    estimator, magnitude = method.build()
    built = (optimizer or Adam(lr=1e-3)).build(split, rho=0.1)
    return GradientLearner(split, estimator, built, schedule=CosineWithWarmup(STEPS, 3), magnitude=magnitude)


def captured_learner(*args: Any, compile_: Any = None) -> CapturedLearner:
    batches = DeviceWindows(WINDOWS, batch=4, steps=STEPS, device=torch.device("cuda"))
    return CapturedLearner(eager_learner(*args), horizon=STEPS, batches=batches, compile_=compile_)


def generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(5)


def take(learner: Any, g: torch.Generator, start: int = 0, stop: int = STEPS) -> list[float]:
    def given(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = WINDOWS.step(i, 4)
        return x.cuda(), y.cuda()

    batches = learner.batch if isinstance(learner, CapturedLearner) else given
    return [learner.step(*batches(i), generator=g).loss.item() for i in range(start, stop)]


def apart(first: Any, second: Any) -> float:
    """How far two learners' parameters are apart, relative to how far the second has moved."""
    start = eager_learner(FrozenMethod()).state_dict()["model"]
    a, b = first.state_dict()["model"], second.state_dict()["model"]
    gap = sum((a[n] - b[n]).double().square().sum().item() for n in a)
    return (gap / sum((b[n] - start[n]).double().square().sum().item() for n in b)) ** 0.5


METHODS = [
    SplitFGMethod(K=3),
    SplitFGMethod(K=3, chunk=1),
    SplitFGMethod(K=2, law=ConditionedLaw()),
    PureFGMethod(K=2),
    EvolutionMethod(K=1),
    BackpropMethod(),
    BackpropMethod(closed_head=True),
    FrozenMethod(),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_captured_steps_are_the_eager_steps(method):
    eager, fast = eager_learner(method), captured_learner(method)
    g, h = generator(), generator()
    assert take(fast, h) == pytest.approx(take(eager, g), rel=1e-3)
    assert fast.captured
    assert apart(fast, eager) < 0.02
    assert torch.equal(g.get_state(), h.get_state())


@pytest.mark.parametrize("optimizer", [Adam(1e-3), AdamW(1e-3), SGD(0.1), SGD(0.1, 0.9), Muon(1e-3)], ids=repr)
def test_with_every_optimizer(optimizer):
    eager, fast = eager_learner(SplitFGMethod(K=2), optimizer), captured_learner(SplitFGMethod(K=2), optimizer)
    take(eager, generator())
    take(fast, generator())
    assert fast.captured
    assert apart(fast, eager) < 0.02


@pytest.mark.parametrize("method", [SplitFGMethod(K=3), BackpropMethod()], ids=repr)
def test_compiled_and_captured_steps_are_the_eager_steps(method):
    eager, fast = eager_learner(method), captured_learner(method, compile_=whole)
    assert take(fast, generator()) == pytest.approx(take(eager, generator()), rel=1e-3)
    assert fast.captured
    assert apart(fast, eager) < 0.05


@pytest.mark.parametrize("at", [2, 8])  # before and after the capture
def test_a_resumed_learner_ends_where_an_uninterrupted_one_does(at):
    method = SplitFGMethod(K=2, law=ConditionedLaw())
    whole_run, first, second = captured_learner(method), captured_learner(method), captured_learner(method)
    take(whole_run, generator())
    g, h = generator(), generator()
    take(first, g, stop=at)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    h.set_state(g.get_state())
    take(second, h, start=at)
    assert apart(second, whole_run) < 1e-3


def test_loading_into_a_captured_learner_starts_over():
    learner, g = captured_learner(SplitFGMethod(K=2)), generator()
    start, drawn = copy.deepcopy(learner.state_dict()), g.get_state()
    first = take(learner, g)
    learner.load_state_dict(start)
    g.set_state(drawn)
    assert take(learner, g) == pytest.approx(first, rel=1e-4)


def test_a_replay_waits_for_nothing():
    learner, g = captured_learner(SplitFGMethod(K=2)), generator()
    take(learner, g, stop=6)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(6, STEPS):
            learner.step(*learner.batch(i), generator=g)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_does_not_grow_with_the_number_of_tangents_taken_one_by_one():
    def peak(K: int) -> int:
        learner, g = captured_learner(SplitFGMethod(K=K, chunk=1)), generator()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        take(learner, g, stop=6)
        return torch.cuda.max_memory_allocated() - before

    assert peak(16) <= 1.05 * peak(2)
