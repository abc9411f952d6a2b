"""Learned feedback against backpropagation and brute-force Jacobians, in float64."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from _learning import errors, network, taught
from _toolkit import DOUBLE, generator, noise
from torch import nn

import splitfg
from splitfg import Backprop, LearnedFeedback, LinearHead, Split, Tied
from splitfg.feedback import Difference, Direct, ForwardDerivative, Proximal, Relay
from splitfg.models import GPT, MLP, FlatTrunk, GPTConfig, TabM, resnet20
from splitfg.testing import example_split


class Skipping(nn.Module):
    """Skip connections, two readers of one tensor, one layer called twice, a scaled branch."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.twice, self.norm, self.gain = nn.Linear(8, 8), nn.LayerNorm(8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = F.silu(self.first(x))
        x = x + self.left(x).tanh() * self.right(x).sigmoid()
        x = x + self.gain * self.twice(self.norm(x))
        return self.twice(F.gelu(x)) / 2


TRUNKS = {
    "relu": (lambda: MLP(5, widths=(8, 8, 8), generator=generator()), 8, lambda: noise(32, 5)),
    "gelu": (lambda: nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 6), nn.GELU()), 6, lambda: noise(32, 5)),
    "mixed": (
        lambda: nn.Sequential(
            nn.Linear(5, 8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6), nn.Softplus()
        ),
        6,
        lambda: noise(32, 5),
    ),
    "skips": (Skipping, 8, lambda: noise(32, 5)),
    "one member": (lambda: TabM(5, width=8, layers=3, members=1, generator=generator()), 8, lambda: noise(32, 5)),
    "flat": (lambda: FlatTrunk(width=8, generator=generator()), 8 * 36, lambda: noise(4, 3, 6, 6)),
    "grouped": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=4), nn.Flatten()
        ),
        8 * 9,
        lambda: noise(6, 3, 8, 8),
    ),
}


@pytest.mark.parametrize("probe", [Difference(), ForwardDerivative()], ids=["difference", "forward mode"])
@pytest.mark.parametrize("name", TRUNKS)
def test_relayed_feedback_becomes_the_gradient(name, probe):
    make, width, inputs = TRUNKS[name]
    torch.manual_seed(0)
    split, x = network(make(), width), inputs()
    y = torch.randint(0, 3, (len(x),), generator=generator())
    found = errors(split, taught(LearnedFeedback(probe=probe), split, x, y, 60), x, y)
    assert max(found.values()) < 1e-4, found


def test_attention_and_tied_tables_are_relayed():
    trunk = GPT(GPTConfig(layers=2, width=16, heads=2, context=12, vocab=11), generator=generator())
    split = Split(trunk.double(), LinearHead(trunk.tied_linear()), tied=Tied.INCLUDE)
    tokens = torch.randint(0, 11, (6, 13), generator=generator())
    x, y = tokens[:, :-1], tokens[:, 1:]
    found = errors(split, taught(LearnedFeedback(), split, x, y, 80), x, y)
    assert max(found.values()) < 1e-2, found


def test_direct_feedback_is_the_gradient_of_a_linear_trunk():
    trunk = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 6))
    split, x = network(trunk, 6), noise(64, 5)
    y = torch.randint(0, 3, (64,), generator=generator())
    found = errors(split, taught(LearnedFeedback(route=Direct()), split, x, y, 150), x, y)
    assert max(found.values()) < 1e-4, found


def test_direct_maps_are_the_mean_jacobian():
    """Brute force: the mean over rows of dz_last / da, by autograd's own Jacobian."""
    trunk = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    split, x = network(trunk, 3), noise(256, 4)
    y = torch.randint(0, 3, (256,), generator=generator())
    estimator, draws = LearnedFeedback(route=Direct(Proximal(rate=0.5)), probe=ForwardDerivative()), generator(3)
    total = torch.zeros(3, 5, dtype=DOUBLE)
    for step in range(400):
        estimator.update_state(split, estimator(split, x, y, generator=draws))
        total += estimator.route.state_dict()["2"][0] if step >= 100 else 0
    after = torch.func.vmap(torch.func.jacrev(lambda a: trunk[4](trunk[3](trunk[2](a)))))(trunk[:2](x))
    expected = after.mean(0).detach()
    assert float((total / 300 - expected).norm() / expected.norm()) < 0.05


def test_the_last_layer_is_exact_before_anything_is_learned():
    split, x = network(MLP(5, widths=(8, 8), generator=generator()), 8), noise(16, 5)
    y = torch.randint(0, 3, (16,), generator=generator())
    found = errors(split, LearnedFeedback()(split, x, y, generator=generator()), x, y)
    assert found["trunk.layers.1.weight"] < 1e-12
    assert found["trunk.layers.0.weight"] == pytest.approx(1.0)  # the map is still zero


def test_whole_resnets_are_reached():
    split, x = network(resnet20(generator=generator()), 64), noise(2, 3, 8, 8)
    estimate = LearnedFeedback()(split, x, torch.tensor([0, 1]), generator=generator())
    assert set(estimate.grads) == set(split.trained_params())


class TestControlVariate:
    """As a prediction under activity tangents: unbiased, with less noise the better the maps are."""

    def problem(self):
        split, x = network(MLP(5, widths=(8, 8), generator=generator()), 8), noise(24, 5)
        return split, x, torch.randint(0, 3, (24,), generator=generator())

    def variance(self, estimator, split, x, y, draws):
        exact = Backprop()(split, x, y).grads["trunk.layers.0.weight"]
        found = [estimator(split, x, y, generator=draws).grads["trunk.layers.0.weight"] for _ in range(200)]
        return float((torch.stack(found) - exact).square().mean())

    def test_taught_maps_take_the_noise_away(self):
        split, x, y = self.problem()
        prediction = LearnedFeedback()
        taught(prediction, split, x, y, 40)
        plain = self.variance(splitfg.ActivityFG(K=2), split, x, y, generator())
        better = self.variance(splitfg.ActivityFG(K=2, prediction=prediction), split, x, y, generator())
        assert better < 1e-6 * plain

    def test_half_taught_maps_leave_it_unbiased(self):
        split, x, y = self.problem()
        prediction = LearnedFeedback(route=Relay(Proximal(rate=0.3)))
        taught(prediction, split, x, y, 1)
        estimator, draws = splitfg.ActivityFG(K=1, prediction=prediction), generator(9)
        exact = Backprop()(split, x, y).grads["trunk.layers.0.weight"]
        found = torch.stack(
            [estimator(split, x, y, generator=draws).grads["trunk.layers.0.weight"] for _ in range(600)]
        )
        z = (found.mean(0) - exact) / (found.std(0) / math.sqrt(600))
        assert float(z.abs().max()) < 4.5  # of 40 coordinates
        alone = prediction(split, x, y, generator=generator()).grads["trunk.layers.0.weight"]
        assert float((alone - exact).norm() / exact.norm()) > 0.2  # the prediction by itself is biased


def test_a_restored_learner_goes_on_as_before():
    def learner():
        split = network(MLP(5, widths=(8, 8), generator=generator()), 8)
        return splitfg.GradientLearner(split, LearnedFeedback(), torch.optim.Adam(split.model.parameters(), lr=1e-2))

    x, y, draws = noise(32, 5), torch.randint(0, 3, (32,), generator=generator()), generator(2)
    first = learner()
    for _ in range(5):
        first.step(x, y, generator=draws)
    second = learner()
    second.load_state_dict(first.state_dict())
    for one in (first, second):
        one.step(x, y, generator=generator(4))
    for a, b in zip(first.split.model.parameters(), second.split.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_captured_steps_are_the_eager_ones():
    def learner():
        split = network(MLP(5, widths=(8, 8), generator=generator()), 8)
        return splitfg.GradientLearner(split, LearnedFeedback(), torch.optim.Adam(split.model.parameters(), lr=1e-2))

    x, y = noise(32, 5), torch.randint(0, 3, (32,), generator=generator())
    eager, fast = learner(), learner()
    captured = splitfg.CapturedLearner(fast, horizon=4, compile_=lambda f: torch.compile(f, backend="aot_eager"))
    draws = generator(1), generator(1)
    for _ in range(4):
        eager.step(x, y, generator=draws[0])
        captured.step(x, y, generator=draws[1])
    for a, b in zip(eager.split.model.parameters(), fast.split.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


class Positions(nn.Module):
    """A layer reads a table of positions, whose leading dimension is as large as the batch, but is not the batch."""

    def __init__(self):
        super().__init__()
        self.table, self.place, self.layer = nn.Embedding(8, 3), nn.Linear(3, 6), nn.Linear(6, 6)

    def forward(self, x):
        positions = self.place(self.table(torch.arange(8)).tanh())
        return self.layer((x.unsqueeze(1) + positions).relu()).mean(1)


def test_measurements_on_part_of_a_batch_are_right():
    """Layers with many rows are measured on the first samples alone, but for trunks where that cannot be done."""
    torch.manual_seed(0)
    split, x = network(Positions(), 6), noise(8, 6)
    y = torch.randint(0, 3, (8,), generator=generator())
    found = errors(split, taught(LearnedFeedback(), split, x, y, 80), x, y)
    assert max(found.values()) < 1e-4, found


def test_a_loop_that_never_updates_the_maps_is_warned_once():
    split, x, y = example_split()
    forgetful, careful = LearnedFeedback(), LearnedFeedback()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(50):
            forgetful(split, x, y, generator=generator())
    assert ["update_state" in str(w.message) for w in caught] == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(50):
            careful.update_state(split, careful(split, x, y, generator=generator()))
