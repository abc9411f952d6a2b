"""The state of forward passes: running statistics, counters, attributes and modes."""

import copy
from dataclasses import replace

import pytest
import torch
from _awkward import CountsInPlace
from _refusals import ESTIMATORS, linear_split
from _toolkit import close, generator, seeded
from _training_mode import TRUNKS, X, Y, by_autograd, cut, step_seed
from torch import nn

from splitfg import (
    CapturedLearner,
    EvolutionStrategy,
    FrozenTrunk,
    GradientLearner,
    LearnedFeedback,
    LinearHead,
    LineSearch,
    OneSidedDifference,
    Split,
    SplitError,
    SplitFG,
    split,
    write_grads,
)
from splitfg.feedback import Difference
from splitfg.splitting.checks import check_batch


class TestState:
    """Running statistics, counters and attributes change once a step, as by one forward pass of ordinary training."""

    @pytest.mark.parametrize("method", [*ESTIMATORS, "one_sided", "learned_feedback"])
    def test_running_statistics(self, method):
        estimator = {**ESTIMATORS, "one_sided": SplitFG(2, engine=OneSidedDifference())}.get(method, LearnedFeedback())
        s = cut("batch_norm")
        for step in range(1, 4):
            before = copy.deepcopy(s.model.state_dict())
            estimate = estimator(s, X + step, Y, generator=generator())
            expected = by_autograd(s, X + step)[2]
            close(dict(s.model.state_dict()), before)
            write_grads(s.model, estimate)
            close(dict(s.trunk.state_dict()), expected)
            assert s.trunk[1].num_batches_tracked == step

    @pytest.mark.parametrize("method", ["split_fg", "backprop", "evolution"])
    def test_statistics_of_a_layer_that_some_passes_skip(self, method):
        class Skipping(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.norm, self.passes = nn.Linear(3, 4), nn.BatchNorm1d(4), 0

            def forward(self, x):
                self.passes += 1
                z = self.layer(x)
                return z if self.passes % 2 else self.norm(z)

        model = seeded(lambda: nn.Sequential(Skipping(), nn.Tanh(), nn.Linear(4, 3))).double()
        plain, s = copy.deepcopy(model), split(model)
        for step in range(1, 5):
            write_grads(model, ESTIMATORS[method](s, X + step, Y, generator=generator()))
            plain(X + step)
            close(dict(model.state_dict()), dict(plain.state_dict()))

    @pytest.mark.parametrize("in_place", [True, False])
    @pytest.mark.parametrize("method", ["backprop", "evolution", "frozen"])
    def test_a_mean_that_every_third_pass_updates(self, method, in_place):
        class Averaging(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.passes = nn.Linear(3, 4), 0
                self.register_buffer("mean", torch.zeros(4))

            def forward(self, x):
                self.passes += 1
                z = self.layer(x)
                if self.passes % 3 == 0:
                    new = self.mean.lerp(z.detach().mean(0), 0.1)
                    self.mean = self.mean.copy_(new) if in_place else new
                return z

        model = seeded(lambda: nn.Sequential(Averaging(), nn.Tanh(), nn.Linear(4, 3))).double()
        plain, s = copy.deepcopy(model), split(model)
        for step in range(1, 7):
            if in_place and step == 3:
                with pytest.raises(SplitError, match=r"to the buffer 0\.mean, .* assign a new tensor"):
                    ESTIMATORS[method](s, X + step, Y, generator=generator())
                break
            write_grads(model, ESTIMATORS[method](s, X + step, Y, generator=generator()))
            plain(X + step)
            close(dict(model.state_dict()), dict(plain.state_dict()))

    @pytest.mark.filterwarnings("ignore:the network draws random numbers")
    @pytest.mark.parametrize("captured", [True, False])
    def test_learners(self, captured):
        s, draws = cut("both"), generator()
        learner = GradientLearner(s, SplitFG(3), torch.optim.SGD(s.model.parameters(), lr=0.1))
        if captured:
            learner = CapturedLearner(learner, horizon=5, compile_=lambda function: function)
        for step in range(1, 4):
            learner.step(X, Y, generator=draws)
            assert s.trunk[1].num_batches_tracked == step

    @pytest.mark.filterwarnings("ignore:the network draws random numbers")
    def test_a_line_search_leaves_the_global_generator_alone(self):
        s, state = cut("both"), torch.get_rng_state()
        optimizer = torch.optim.SGD(s.model.parameters(), lr=0.1)
        learner = GradientLearner(s, SplitFG(3), optimizer, line_search=LineSearch())
        for step in range(1, 4):
            learner.step(X, Y, generator=generator(step))
            assert s.trunk[1].num_batches_tracked == step
        assert torch.equal(torch.get_rng_state(), state)

    def test_split_models(self):
        model = seeded(lambda: nn.Sequential(*TRUNKS["both"](), nn.Linear(4, 3))).double()
        other = copy.deepcopy(model)
        s = split(model)
        estimate = SplitFG(2)(s, X, Y, generator=generator())
        write_grads(model, estimate)
        torch.manual_seed(step_seed())
        other(X)
        assert all(torch.equal(b, other.state_dict()[n]) for n, b in model.state_dict().items())

    def test_counters_and_attributes(self):
        class Counts(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.calls, self.history = nn.Linear(3, 4), 0, []
                self.register_buffer("mean", torch.zeros(4))
                self.register_buffer("passes", torch.zeros(()))

            def forward(self, x):
                h = self.layer(x)
                self.calls += 1
                self.history.append(len(self.history))
                self.mean = 0.9 * self.mean + 0.1 * h.mean(0)
                self.passes += 1
                return h

        s = linear_split(seeded(Counts))
        s.model.double()
        mean = s.trunk.mean
        for step in (1, 2):
            write_grads(s.model, SplitFG(3)(s, X, Y, generator=generator()))
            assert (s.trunk.calls, s.trunk.history, s.trunk.passes) == (step, list(range(step)), step)
        assert s.trunk.mean is mean  # changed in place, for captured steps
        torch.testing.assert_close(s.trunk.mean, 0.19 * s.trunk.layer(X).detach().mean(0))

    def test_estimators_of_other_packages(self):
        """A learner updates the state for estimators that do not."""

        class Own:
            def __call__(self, split, x, y, *, generator):
                check_batch(split, x, y, generator)
                return replace(SplitFG(1)(split, x, y, generator=generator), forward_state=None)

        s = seeded(lambda: linear_split(nn.Sequential(CountsInPlace()), width=2))
        s.model.double()
        learner = GradientLearner(s, Own(), torch.optim.SGD(s.model.parameters(), lr=0.1))
        for step in (1, 2):
            learner.step(X, Y, generator=generator())
            assert s.trunk[0].calls == step

    def test_evaluation_mode_changes_nothing_and_draws_nothing(self):
        s, draws = cut("both"), generator()
        s.model.eval()
        estimate = FrozenTrunk()(s, X, Y, generator=draws)
        assert estimate.forward_state is None
        assert torch.equal(draws.get_state(), generator().get_state())

    @pytest.mark.parametrize("estimator", [EvolutionStrategy(2), LearnedFeedback(probe=Difference())])
    def test_statistics_that_the_same_batch_leaves_as_they_were(self, estimator):
        """The cumulative mean of a batch that the model has seen before, at parameters that move later."""
        trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4))
        s = Split(trunk.double(), LinearHead(nn.Linear(4, 3).double()))
        trunk(X)
        before = copy.deepcopy(trunk.state_dict())
        estimator(s, X, Y, generator=generator())
        torch.testing.assert_close(trunk.state_dict(), before, rtol=0.0, atol=0.0)

    def test_moving_the_model_keeps_track_of_its_buffers(self):
        s = cut("batch_norm")
        SplitFG(2)(s, X, Y, generator=generator())
        s.model.float()  # new tensors
        before = copy.deepcopy(s.trunk.state_dict())
        write_grads(s.model, SplitFG(2)(s, X.float(), Y, generator=generator()))
        assert s.trunk[1].num_batches_tracked == 1
        assert not torch.equal(s.trunk[1].running_mean, before["1.running_mean"])

    def test_a_step_keeps_the_modes_it_began_with(self):
        network = split(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 3)))
        step = network.at_present(X)
        network.model.eval()
        assert step.training_flags() == step.at_present(X).training_flags() != network.training_flags()
        assert network.at_present(X).training_flags() == network.training_flags()

    def test_a_copy_of_a_split_works(self):
        s = cut("both")
        SplitFG(2)(s, X, Y, generator=generator())
        twin = copy.deepcopy(s)
        write_grads(twin.model, SplitFG(2)(twin, X, Y, generator=generator()))
        assert (s.trunk[1].num_batches_tracked, twin.trunk[1].num_batches_tracked) == (0, 1)
