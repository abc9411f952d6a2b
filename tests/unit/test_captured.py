"""The captured learner takes the eager learner's steps: compiled, with rates and batches on the device, and resumed."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from _captured import METHODS, Setting, made_up_windows, optimizers
from torch import Tensor, nn

import splitfg
from splitfg import GradientLearner, LinearHead, Split, SplitError
from splitfg.estimators import compiled
from splitfg.learners import CapturedLearner
from splitfg.models import GPTConfig
from splitfg.recipes import (
    Adam,
    BackpropMethod,
    ConditionedLaw,
    DirectPathMethod,
    FrozenMethod,
    Muon,
    SplitFGMethod,
)
from splitfg.training import CosineWithWarmup, OptimizerPair, ScheduledOptimizer
from splitfg.training.capture import DeviceRates
from splitfg_lab.data import Windows
from splitfg_lab.data.device import DeviceWindows
from splitfg_lab.runs import RunContext, RunFolder, fit

STEPS = 10
CPU = torch.device("cpu")
CONFIG = GPTConfig(layers=1, width=16, heads=2, context=8, vocab=50)
WINDOWS = made_up_windows(CONFIG, 400)
SETTING = Setting(
    CONFIG,
    head=lambda layer: LinearHead(layer, block=512),
    windows=WINDOWS,
    batch=2,
    steps=STEPS,
    lr=1e-2,
    device=CPU,
)
eager_learner, captured_learner, take, generator = SETTING.eager, SETTING.captured, SETTING.take, SETTING.generator

# the whole of torch.compile but the code generation, which takes a minute here
aot_eager = functools.partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    yield
    torch.compiler.reset()


def parameters(learner: Any) -> dict[str, Tensor]:
    return {name: p.clone() for name, p in learner.state_dict()["model"].items()}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], **tolerance: float) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], msg=name, **tolerance)


class TestTheSameSteps:
    @pytest.mark.parametrize("optimizer", optimizers(1e-2), ids=repr)
    def test_with_every_optimizer(self, optimizer):
        method = SplitFGMethod(K=3)
        eager, fast = eager_learner(method, optimizer), captured_learner(method, optimizer)
        expected = take(eager, generator())
        assert take(fast, generator()) == pytest.approx(expected, rel=1e-5)
        # Muon orthogonalises in bfloat16
        loose = {"rtol": 1e-3, "atol": 3e-4} if isinstance(optimizer, Muon) else {"rtol": 1e-5, "atol": 1e-6}
        assert_same(parameters(fast), parameters(eager), **loose)

    @pytest.mark.parametrize("method", METHODS, ids=repr)
    def test_compiled_with_every_method(self, method):
        eager = eager_learner(method, dtype=torch.float64)
        # steps with and without a measurement are compiled as those of other methods are: here their order counts
        compile_ = (lambda function: function) if "EveryNth" in repr(method) else aot_eager
        fast = captured_learner(method, dtype=torch.float64, compile_=compile_)
        assert take(fast, generator()) == pytest.approx(take(eager, generator()), rel=1e-6)
        # the rate of a captured step is a float32 number
        assert_same(parameters(fast), parameters(eager), rtol=1e-5, atol=1e-7)

    def test_with_batches_that_are_given(self):
        method = SplitFGMethod(K=2)
        assert take(captured_learner(method, looked_up=False), generator()) == pytest.approx(
            take(eager_learner(method), generator()), rel=1e-5
        )

    def test_of_a_network_that_is_no_gpt(self):
        def learner() -> GradientLearner:
            torch.manual_seed(0)
            trunk = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 8))
            split = Split(trunk, LinearHead(nn.Linear(8, 3)))
            return GradientLearner(split, splitfg.SplitFG(4), torch.optim.Adam(split.model.parameters(), lr=0.01))

        x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
        eager = learner()
        fast = CapturedLearner(learner(), horizon=5, compile_=aot_eager)
        for step, g in ((eager.step, generator()), (fast.step, generator())):
            for _ in range(5):
                step(x, y, generator=g)
        assert_same(parameters(fast), parameters(eager), rtol=1e-5, atol=1e-6)

    def test_checkpointed_backprop_compiles_to_the_plain_gradient(self):
        learner = eager_learner(BackpropMethod(), dtype=torch.float64)
        split, estimator = compiled(learner.split, splitfg.CheckpointedBackprop(), aot_eager)
        x, y = WINDOWS.step(0, 2)
        expected = splitfg.Backprop()(learner.split, x, y)
        found = estimator(split, x, y, generator=generator())
        assert_same(found.grads, expected.grads)

    @pytest.mark.slow
    def test_activity_tangents_look_into_a_compiled_trunk(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        split, x, y = splitfg.split(model), torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3
        twin, estimator = compiled(split, splitfg.ActivityFG(K=2), aot_eager)
        expected = splitfg.ActivityFG(K=2)(split, x, y, generator=generator())
        assert_same(estimator(twin, x, y, generator=generator()).grads, expected.grads)

    @pytest.mark.parametrize("chunk", [None, 2, 1])
    def test_activity_tangents_of_a_gpt_are_pushed_in_compiled_code(self, chunk):
        """With the eager numbers, for parameters that change; the second estimate runs no code of the trunk."""
        method = splitfg.ActivityFG(K=3, engine=splitfg.ForwardMode(chunk))
        split = eager_learner(FrozenMethod(), dtype=torch.float64).split
        calls = []
        split.trunk.blocks[0].register_forward_hook(lambda *_: calls.append(1))
        twin, fast = compiled(split, method, lambda traced: traced)
        for shift in (0.0, 0.1):
            with torch.no_grad():
                for p in split.trunk_params().values():
                    p.add_(shift)
            x, y = SETTING.given(0)
            expected = method(split, x, y, generator=generator())
            before = len(calls)
            found = fast(twin, x, y, generator=generator())
            assert (len(calls) == before) == (shift > 0)
            assert_same(found.grads, expected.grads)
            torch.testing.assert_close(found.stats.scores, expected.stats.scores)

    def test_what_is_compiled_reads_the_parameters_of_the_moment(self):
        learner = eager_learner(DirectPathMethod(), dtype=torch.float64)
        twin, estimator = compiled(learner.split, learner.estimator, aot_eager)
        for shift in (0.0, 0.3):
            with torch.no_grad():
                for p in learner.split.model.parameters():
                    p.add_(shift)
            x, y = SETTING.given(0)
            assert_same(estimator(twin, x, y).grads, learner.estimator(learner.split, x, y).grads)

    def test_a_replaced_buffer_is_read(self):
        class Masked(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(5, 8)
                self.register_buffer("mask", torch.ones(8))

            def forward(self, x):
                return self.inner(x) * self.mask

        torch.manual_seed(0)
        trunk = Masked()
        split, x, y = Split(trunk, LinearHead(nn.Linear(8, 3))), torch.randn(6, 5), torch.arange(6) % 3
        twin, estimator = compiled(split, splitfg.ActivityFG(K=2), aot_eager)
        for mask in (torch.ones(8), torch.arange(8.0)):
            trunk.mask = mask
            expected = splitfg.ActivityFG(K=2)(split, x, y, generator=generator())
            assert_same(estimator(twin, x, y, generator=generator()).grads, expected.grads)

    def test_a_trunk_that_cannot_be_traced_is_run_as_it_is(self):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(5, 8), torch.compile(nn.Tanh(), backend="eager"))
        split, x, y = Split(trunk, LinearHead(nn.Linear(8, 3))), torch.randn(6, 5), torch.arange(6) % 3
        estimator = splitfg.ActivityFG(K=2, activities=splitfg.Activities(("0",)))
        twin, fast = compiled(split, estimator, aot_eager)
        expected = estimator(split, x, y, generator=generator())
        with pytest.warns(UserWarning, match="cannot be traced"):
            found = fast(twin, x, y, generator=generator())
        assert_same(found.grads, expected.grads)

    def test_through_the_real_compiler(self):
        method = SplitFGMethod(K=2)
        eager = eager_learner(method)
        fast = CapturedLearner(
            eager_learner(method), horizon=STEPS, batches=DeviceWindows(WINDOWS, batch=2, steps=STEPS, device=CPU)
        )
        take(eager, generator())
        take(fast, generator())
        found, expected = parameters(fast), parameters(eager)
        # Adam turns rounding in a vanishing gradient into a step of full size: compare as a whole
        apart = sum((found[n] - p).square().sum() for n, p in expected.items())
        assert apart.sqrt() < 1e-2 * sum(p.square().sum() for p in expected.values()).sqrt()


class TestCheckpoints:
    @pytest.mark.parametrize("method", [SplitFGMethod(K=2), SplitFGMethod(K=2, law=ConditionedLaw())], ids=repr)
    @pytest.mark.parametrize("optimizer", [Adam(1e-2), Muon(1e-2)], ids=repr)
    def test_a_resumed_learner_ends_where_an_uninterrupted_one_does(self, method, optimizer):
        whole, first = captured_learner(method, optimizer), captured_learner(method, optimizer)
        take(whole, generator())
        g = generator()
        take(first, g, stop=4)
        second = captured_learner(method, optimizer)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert second.steps == 4
        take(second, g, start=4)
        assert_same(parameters(second), parameters(whole), rtol=0, atol=0)

    @pytest.mark.parametrize("make", [eager_learner, captured_learner])
    def test_eager_and_captured_learners_go_on_from_each_other(self, make):
        method = SplitFGMethod(K=2)
        whole = eager_learner(method)
        take(whole, generator())
        other = captured_learner if make is eager_learner else eager_learner
        g = generator()
        first, second = make(method), other(method)
        take(first, g, stop=4)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        take(second, g, start=4)
        assert_same(parameters(second), parameters(whole), rtol=1e-5, atol=1e-6)

    def test_the_state_is_the_eager_learners(self):
        method = SplitFGMethod(K=2)
        eager, fast = eager_learner(method), captured_learner(method)
        take(eager, generator(), stop=3)
        take(fast, generator(), stop=3)
        first, second = eager.state_dict()["optimizer"], fast.state_dict()["optimizer"]
        settings = [{k: v for k, v in group.items() if k != "lr"} for group in first["param_groups"]]
        assert settings == [{k: v for k, v in group.items() if k != "lr"} for group in second["param_groups"]]
        assert all(isinstance(group["lr"], float) for group in second["param_groups"])

    def test_in_the_training_loop(self, tmp_path):
        learner = captured_learner(SplitFGMethod(K=2))
        folder = RunFolder.of(tmp_path, "some", "thing", 0)
        folder.prepare("some", "thing", 0, Adam())
        with RunContext(folder, None, device=CPU, emit=lambda event: None) as run:
            fit(learner, learner.batch, steps=STEPS, generator=generator(), run=run, log_every=2)
        eager = eager_learner(SplitFGMethod(K=2))
        take(eager, generator())
        assert_same(parameters(learner), parameters(eager), rtol=1e-5, atol=1e-6)


class TestRefusals:
    def test_compiled_code_that_loses_tangents(self):
        def forgetful(function):
            def run(*args):
                out = function(*args)
                pushed = isinstance(out, tuple) and getattr(out[1], "ndim", 0) == 4  # h and dh
                return (out[0], torch.zeros_like(out[1])) if pushed else out

            return run

        learner = captured_learner(SplitFGMethod(K=2), compile_=forgetful)
        before = parameters(learner)
        with pytest.raises(SplitError, match=r"different gradients for the trunk: .*relative difference 1,"):
            take(learner, generator())
        assert_same(parameters(learner), before, rtol=0, atol=0)

    def test_the_check_leaves_the_generator_alone(self):
        learner, g = captured_learner(SplitFGMethod(K=2), compile_=aot_eager), generator()
        before = g.get_state()
        learner.check(*learner.batch(0), generator=g)
        assert torch.equal(g.get_state(), before)

    def test_a_step_beyond_the_horizon(self):
        learner = captured_learner(FrozenMethod())
        g = generator()
        take(learner, g)
        with pytest.raises(SplitError, match="tabulated for 10 steps"):
            learner.step(*learner.batch(STEPS), generator=g)

    def test_a_batch_where_the_device_looks_it_up(self):
        learner = captured_learner(FrozenMethod())
        with pytest.raises(SplitError, match="reads the batch of step 0 from the device"):
            learner.step(*WINDOWS.step(0, 2), generator=generator())
        with pytest.raises(SplitError, match="reads the batch of step 0 from the device"):
            learner.step(*learner.batch(1), generator=generator())

    def test_a_batch_of_another_shape(self):
        learner, g = captured_learner(FrozenMethod(), looked_up=False), generator()
        learner.step(*WINDOWS.step(0, 2), generator=g)
        with pytest.raises(SplitError, match="one shape and dtype"):
            learner.step(*WINDOWS.step(0, 3), generator=g)

    def test_another_generator(self):
        learner = captured_learner(SplitFGMethod(K=1))
        learner.step(*learner.batch(0), generator=generator())
        with pytest.raises(SplitError, match="pass the same one"):
            learner.step(*learner.batch(1), generator=generator())


class TestDeviceWindows:
    @pytest.mark.parametrize("step", [0, 3, 24, 25, 60])
    def test_gives_the_batches_of_the_windows(self, step):
        device = DeviceWindows(WINDOWS, batch=2, steps=100, device=CPU)
        for found in (device(step), device(torch.tensor(step))):
            for part, expected in zip(found, WINDOWS.step(step, 2), strict=True):
                assert torch.equal(part, expected)
                assert part.dtype == torch.int64

    def test_reads_ids_beyond_half_of_uint16(self):
        tokens = np.array([0, 32767, 32768, 50256, 65535], dtype=np.uint16)
        x, y = DeviceWindows(Windows(tokens, 4), batch=1, steps=1, device=CPU)(0)
        assert x.tolist() == [[0, 32767, 32768, 50256]]
        assert y.tolist() == [[32767, 32768, 50256, 65535]]

    def test_moves_no_more_than_the_steps_need(self):
        assert DeviceWindows(WINDOWS, batch=2, steps=3, device=CPU)._tokens.numel() == 2 * 3 * 8 + 1


def test_gradients_are_written_with_their_parameters_strides():
    module = nn.Linear(3, 2, bias=False)
    g = torch.arange(6.0).view(3, 2).T
    splitfg.write_grads(module, splitfg.Estimate(torch.zeros(()), {"weight": g}, splitfg.Stats()))
    assert module.weight.grad is not None
    assert module.weight.grad.stride() == module.weight.stride()
    assert torch.equal(module.weight.grad, g)


def test_step_counts_of_every_part_of_an_optimizer_go_to_the_device():
    """Files give them back on the CPU, where a graph cannot count."""
    s = Split(nn.Sequential(nn.Linear(3, 4, device="meta")), LinearHead(nn.Linear(4, 2, device="meta")))
    for recipe in (Adam(), Muon()):
        optimizer = recipe.build(s)
        parts = optimizer.parts if isinstance(optimizer, OptimizerPair) else (optimizer,)
        for part in parts:
            for p in (p for group in part.param_groups if "capturable" in group for p in group["params"]):
                part.state[p] = {"step": torch.tensor(3.0)}
        scheduled = ScheduledOptimizer(optimizer, CosineWithWarmup(10))
        DeviceRates(scheduled, horizon=10, device=torch.device("meta"))
        counts = [state["step"] for part in parts for state in part.state.values()]
        assert counts
        assert {count.device.type for count in counts} == {"meta"}


def test_only_what_muon_moves_is_copied():
    """Adam, which moves the rest, reads its rates from the device."""
    s = Split(nn.Sequential(nn.Linear(3, 4)), LinearHead(nn.Linear(4, 2)))
    optimizer = Muon().build(s)
    rates = DeviceRates(ScheduledOptimizer(optimizer, CosineWithWarmup(10)), horizon=10, device=torch.device("cpu"))
    for p in s.model.parameters():
        p.grad = torch.ones_like(p)
    rates.step()
    copied = [t.numel() for part in rates._parts for group in getattr(part, "_before", []) for t in group]
    assert copied == [12]
