"""Trunks that learned feedback cannot train: warnings and errors that give the cure."""

import pytest
import torch
from _learning import network
from _toolkit import DOUBLE, generator, noise
from torch import nn

import splitfg
from splitfg import Backprop, LearnedFeedback, SplitError, SplitFG
from splitfg.feedback import Direct, Proximal, Relay
from splitfg.sites import pull_back


class TestMissing:
    def trunk(self):
        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.shift, self.layer = nn.Parameter(torch.zeros(2, 5)), nn.Linear(5, 4)

            def forward(self, x):
                return self.layer(x).tanh()

        return Recurrent()

    def test_parameters_out_of_reach_are_listed_once(self):
        split, x = network(self.trunk(), 4), noise(8, 5)
        y = torch.zeros(8, dtype=torch.long)
        with pytest.warns(UserWarning, match=r"does not reach trunk\.shift"):
            estimate = LearnedFeedback()(split, x, y, generator=generator())
        assert "trunk.shift" not in estimate.grads
        LearnedFeedback()(split, x, y, generator=generator())  # warnings are errors here

    def test_another_estimator_takes_the_rest(self):
        split, x = network(self.trunk(), 4), noise(8, 5)
        estimate = LearnedFeedback(rest=SplitFG(K=2))(split, x, torch.zeros(8, dtype=torch.long), generator=generator())
        assert "trunk.shift" in estimate.grads
        assert estimate.stats.jvps == 3


class InPlace(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.layer, self.write = nn.Linear(5, 4), write

    def forward(self, x):
        return self.write(self.layer(x)) + 0.0


class TestBadTrunks:
    def refused(self, trunk, match, estimator=LearnedFeedback):
        split, x = network(trunk, 4), noise(6, 5)
        with pytest.raises(SplitError, match=match):
            estimator()(split, x, torch.zeros(6, dtype=torch.long), generator=generator())

    def exact(self, trunk):
        """The layers above the last map are exact, so that trunks with one layer are."""
        split, x, y = network(trunk, 4), noise(6, 5), torch.zeros(6, dtype=torch.long)
        found = LearnedFeedback()(split, x, y, generator=generator())
        for name, g in Backprop()(split, x, y).grads.items():
            torch.testing.assert_close(found.grads[name], g)

    def test_in_place_activations(self):
        self.exact(nn.Sequential(nn.Linear(5, 4), nn.SiLU(inplace=True), nn.Hardtanh(inplace=True)))

    @pytest.mark.parametrize(
        "write", [lambda y: y.__iadd__(y.tanh()), lambda y: y.mul_(2.0), lambda y: y.masked_fill_(y > 0, 0.0)]
    )
    def test_in_place_functions(self, write):
        self.exact(InPlace(lambda y: write(2 * y)))

    @pytest.mark.parametrize(
        "write",
        [
            lambda y: y.mul_(2.0) + y,  # the value from before is read as the one after
            lambda y: (y.view(-1).add_(1.0), y)[1],
            lambda y: (nn.ReLU(inplace=True)(y), y)[1],
            lambda y: (y.detach().zero_(), y)[1],
        ],
    )
    def test_writes_over_values_that_are_read_again(self, write):
        self.refused(InPlace(write), "in place")

    @pytest.mark.parametrize("training", [True, False])
    def test_batch_norm(self, training):
        trunk = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh()).double().train(training)
        nn.init.normal_(trunk[1].weight)
        trunk[1].running_mean.normal_()
        x, u = noise(6, 4), noise(6, 4, seed=2)
        norm = trunk[1]
        with torch.enable_grad():
            given = x.clone().requires_grad_()
            expected = torch.autograd.grad(norm(given), [given, norm.weight, norm.bias], u)
        r, own = pull_back(norm, x, u)
        torch.testing.assert_close((r, own["weight"], own["bias"]), tuple(expected))

    def test_operations_without_a_closed_form(self):
        class Sorted(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(5, 4)

            def forward(self, x):
                return torch.cumprod(self.layer(x), -1)

        self.refused(Sorted(), r"the trunk \(Sorted\): cumprod has no closed-form pullback.*register_rule")

    def test_parameters_multiplied_outside_a_layer(self):
        class Raw(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.w = nn.Linear(5, 4), nn.Parameter(torch.ones(4, 4))

            def forward(self, x):
                return self.layer(x) @ self.w

        self.refused(Raw(), r"the trunk \(Raw\): matmul multiplies by a parameter outside a layer.*nn.Linear")

    def test_black_boxes(self):
        trunk = splitfg.BlackBoxTrunk(lambda p, x: x @ p["w"], {"w": torch.ones(5, 4, dtype=DOUBLE)})
        self.refused(trunk, "no layers")

    def test_rows_that_differ_on_a_direct_route(self):
        class Pairs(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second, self.third = nn.Linear(5, 4), nn.Linear(2, 2), nn.Linear(4, 4)

            def forward(self, x):
                halves = self.first(x).reshape(-1, 2)
                return self.third(self.second(halves).reshape(-1, 4))

        self.refused(Pairs(), "rows differ", lambda: LearnedFeedback(route=Direct()))

    def test_settings(self):
        with pytest.raises(SplitError, match="rate must be in"):
            Proximal(rate=1.5)
        with pytest.raises(SplitError, match="route is the class Relay"):
            LearnedFeedback(route=Relay)
