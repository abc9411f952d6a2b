"""The captured step on a CUDA device: the eager step's numbers, its generator, its checkpoints, and no host work."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from _captured import METHODS, Setting, made_up_windows, optimizers
from torch import nn
from torch.utils._pytree import tree_map_only

from splitfg import Backprop, CapturedLearner, ForwardGradient, GradientLearner, LinearHead, LineSearch, SplitFG, split
from splitfg.compiled import whole
from splitfg.models import GPTConfig
from splitfg.recipes import (
    BackpropMethod,
    ConditionedLaw,
    DirectPathMethod,
    EveryNthFeedback,
    EveryNthRoute,
    FrozenMethod,
    LearnedFeedbackMethod,
    MeanJacobianFeedback,
    ParallelPullMethod,
    SplitFGMethod,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's compiler has advice to give on every GPU
]

STEPS = 12
CONFIG = GPTConfig(layers=2, width=64, heads=2, context=32, vocab=500)
SETTING = Setting(
    CONFIG,
    head=lambda layer: LinearHead(layer, block=2**12),
    windows=made_up_windows(CONFIG, 3000),
    batch=4,
    steps=STEPS,
    lr=1e-3,
    device=torch.device("cuda"),
)
eager_learner, captured_learner, take, generator = SETTING.eager, SETTING.captured, SETTING.take, SETTING.generator


def apart(first: Any, second: Any) -> float:
    """How far two learners' parameters are apart, relative to how far the second has moved."""
    start = eager_learner(FrozenMethod()).state_dict()["model"]
    a, b = first.state_dict()["model"], second.state_dict()["model"]
    gap = sum((a[n] - b[n]).double().square().sum().item() for n in a)
    return (gap / sum((b[n] - start[n]).double().square().sum().item() for n in b)) ** 0.5


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_captured_steps_are_the_eager_steps(method):
    eager, fast = eager_learner(method), captured_learner(method)
    g, h = generator(), generator()
    assert take(fast, h) == pytest.approx(take(eager, g), rel=1e-3)
    assert fast.captured
    assert apart(fast, eager) < 0.02
    assert torch.equal(g.get_state(), h.get_state())


@pytest.mark.parametrize("optimizer", optimizers(1e-3), ids=repr)
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


@pytest.mark.parametrize("compile_", [None, whole])
@pytest.mark.parametrize("method", [SplitFGMethod(K=3), BackpropMethod(), LearnedFeedbackMethod()], ids=repr)
def test_a_captured_line_search_finds_the_eager_rho(method, compile_):
    searches = LineSearch(calm=0), LineSearch(calm=0)
    eager = eager_learner(method, line_search=searches[0])
    fast = captured_learner(method, compile_=compile_, line_search=searches[1])
    assert take(fast, generator()) == pytest.approx(take(eager, generator()), rel=1e-3)
    assert fast.captured
    assert searches[0].rho != searches[0].start
    assert searches[1].rho.item() == pytest.approx(searches[0].rho.item(), rel=0.02)


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


@pytest.mark.parametrize(
    "method",
    [
        LearnedFeedbackMethod(),
        LearnedFeedbackMethod(EveryNthRoute(2)),
        DirectPathMethod(MeanJacobianFeedback()),
        ParallelPullMethod(EveryNthFeedback(2)),
        ParallelPullMethod(MeanJacobianFeedback(), group=2),
    ],
    ids=repr,
)
def test_maps_of_a_checkpoint_that_is_read_to_the_cpu(method):
    whole_run, first, second = captured_learner(method), captured_learner(method), captured_learner(method)
    take(whole_run, generator())
    g, h = generator(), generator()
    take(first, g, stop=4)  # leaves every kind of step its three warm-ups and the capture
    second.load_state_dict(tree_map_only(torch.Tensor, lambda t: t.to("cpu", copy=True), first.state_dict()))
    h.set_state(g.get_state())
    take(second, h, start=4)
    assert second.captured
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
        gc.collect()  # learners of earlier tests, whose memory would be freed during the steps
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        take(learner, g, stop=6)
        return torch.cuda.max_memory_allocated() - before

    peak(2)  # cuBLAS allocates its work space in the first step of a process
    assert peak(16) <= 1.05 * peak(2)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("estimator", [SplitFG(3), ForwardGradient(3), Backprop()], ids=repr)
def test_batch_norm_and_dropout_in_training_mode(estimator, dropout):
    """Batch norm is captured. Dropout is not, and draws the masks of eager code, compiled or not."""

    def trained(captured):
        torch.manual_seed(0)
        # batch norm removes a bias before it: its gradient is rounding noise, which Adam would scale up to full steps
        hidden = [nn.Linear(16, 64, bias=False), nn.BatchNorm1d(64), nn.Dropout(dropout), nn.Tanh(), nn.Linear(64, 64)]
        s = split(nn.Sequential(*hidden, nn.Linear(64, 3)).cuda())
        learner = GradientLearner(s, estimator, torch.optim.Adam(s.model.parameters(), lr=1e-3))
        if captured:
            learner = CapturedLearner(learner, horizon=STEPS)
        x, y, draws = torch.randn(32, 16), torch.randint(0, 3, (32,)), torch.Generator("cuda").manual_seed(3)
        for _ in range(STEPS):
            learner.step(x.cuda(), y.cuda(), generator=draws)
        assert not captured or learner.captured == (dropout == 0.0)
        return dict(s.model.state_dict())

    found, expected = trained(True), trained(False)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-3)
