"""Learning rates of captured learners: whoever sets them, they are the eager learner's."""

import copy

import pytest
import torch
from _toolkit import classes, generator, noise, seeded
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from splitfg import CosineWithWarmup, GradientLearner, LinearHead, Split, SplitError, SplitFG
from splitfg.learners import CapturedLearner
from splitfg.training import OptimizerPair

OPTIMIZERS = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1),
}
X, Y = noise(8, 3), classes(8, count=3)


def learner(make, schedule=None, captured=False):
    s = seeded(lambda: Split(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), LinearHead(nn.Linear(4, 3)))).trunk.double()
    head = seeded(lambda: nn.Linear(4, 3), seed=1).double()
    s = Split(s, LinearHead(head))
    optimizer = make([{"params": list(s.trunk.parameters()), "lr": 0.05}, {"params": list(head.parameters())}])
    eager = GradientLearner(s, SplitFG(2), optimizer, schedule=schedule)
    return (CapturedLearner(eager, horizon=20, compile_=None) if captured else eager), optimizer


def train(taught, optimizer, steps, scheduler=None, draws=None):
    draws = draws or generator()
    for _ in range(steps):
        taught.step(X, Y, generator=draws)
        if scheduler is not None:
            scheduler.step()
    return taught.state_dict()


def assert_same(first, second):
    for name, p in first["model"].items():
        torch.testing.assert_close(second["model"][name], p, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_schedulers_of_torch_are_followed(name):
    states = []
    for captured in (False, True):
        taught, optimizer = learner(OPTIMIZERS[name], captured=captured)
        states.append(train(taught, optimizer, 5, ExponentialLR(optimizer, 0.5)))
    assert_same(*states)
    rates = [[group["lr"] for group in state["optimizer"]["param_groups"]] for state in states]
    assert rates[1] == pytest.approx(rates[0])
    assert rates[0] == pytest.approx([0.05 / 2**5, 0.1 / 2**5])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rates_set_by_hand_are_followed(name):
    states = []
    for captured in (False, True):
        taught, optimizer = learner(OPTIMIZERS[name], captured=captured)
        draws = generator()
        train(taught, optimizer, 2, draws=draws)
        optimizer.param_groups[0]["lr"] = 1e-3
        states.append(train(taught, optimizer, 2, draws=draws))
    assert_same(*states)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("schedule", [None, CosineWithWarmup(20, 3)])
def test_the_rate_of_a_checkpoint_is_the_rate_that_goes_on(name, schedule):
    first, optimizer = learner(lambda groups: OPTIMIZERS[name]([{**g, "lr": 1e-4} for g in groups]), schedule)
    saved = train(first, optimizer, 4)
    states = []
    for captured in (False, True):
        taught, other = learner(OPTIMIZERS[name], schedule, captured)
        taught.load_state_dict(copy.deepcopy(saved))
        states.append(train(taught, other, 3))
    assert_same(*states)
    moved = sum((states[0]["model"][n] - p).abs().sum() for n, p in saved["model"].items())
    assert moved < 0.2  # the other rate would have gone a hundred times as far


def test_a_second_learner_begins_at_the_full_rate():
    schedule = CosineWithWarmup(100, 50)
    first, optimizer = learner(OPTIMIZERS["adam"], schedule)
    train(first, optimizer, 1)
    again = GradientLearner(first.split, SplitFG(2), optimizer, schedule=schedule)
    assert again.update.optimizer.full_rates == first.update.optimizer.full_rates == (0.05, 0.1)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Rprop, torch.optim.ASGD])
def test_steps_that_are_not_linear_in_the_rate_are_refused(kind):
    with pytest.raises(SplitError, match=f"{kind.__name__} are not linear in the learning rate"):
        learner(kind, CosineWithWarmup(20, 3), captured=True)
    taught, optimizer = learner(kind, captured=True)
    with pytest.raises(SplitError, match=f"{kind.__name__} are not linear in the learning rate"):
        train(taught, optimizer, 2, ExponentialLR(optimizer, 0.5))
    assert taught.steps == 1


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.SGD])
def test_checkpoints_have_the_settings_of_eager_ones(kind):
    eager, captured = (train(*learner(kind, captured=captured), 1)["optimizer"] for captured in (False, True))
    for own, other in zip(eager["param_groups"], captured["param_groups"], strict=True):
        assert {**own, "lr": pytest.approx(own["lr"])} == other


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, batch):
        return torch.tanh(self.layer(batch["a"] - 2 * batch["b"])) * batch.get("scale", 1.0)


class TestBatches:
    def learner(self):
        s = seeded(lambda: Split(Mixed(), LinearHead(nn.Linear(4, 3)))).model.double()
        s = Split(s.trunk, s.head)
        eager = GradientLearner(s, SplitFG(2), torch.optim.SGD(s.model.parameters(), lr=0.0))
        return CapturedLearner(eager, horizon=9, compile_=None)

    def test_go_by_their_keys(self):
        taught, a, b = self.learner(), noise(8, 3, seed=3), noise(8, 3, seed=4)
        draws = generator()
        losses = [float(taught.step((x,), Y, generator=draws).loss) for x in ({"a": a, "b": b}, {"b": b, "a": a})]
        assert losses[0] == losses[1]

    @pytest.mark.parametrize(
        ("second", "words"),
        [
            ({"a": X, "c": X}, "another"),
            ({"a": X, "b": X, "scale": 2.0}, "another"),
            ({"a": X[:4], "b": X[:4]}, "one shape and dtype"),
        ],
    )
    def test_of_another_kind_are_refused(self, second, words):
        taught, draws = self.learner(), generator()
        taught.step(({"a": X, "b": X},), Y, generator=draws)
        with pytest.raises(SplitError, match=words):
            taught.step((second,), Y[: len(second["a"])], generator=draws)

    def test_numbers_that_change_are_refused(self):
        taught, draws = self.learner(), generator()
        taught.step(({"a": X, "b": X, "scale": 1.0},), Y, generator=draws)
        with pytest.raises(SplitError, match="pass changing inputs as tensors"):
            taught.step(({"a": X, "b": X, "scale": 2.0},), Y, generator=draws)


def test_a_pair_of_optimizers_can_be_copied_and_takes_no_further_group():
    w, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    pair = OptimizerPair(torch.optim.SGD([w], lr=0.1), torch.optim.Adam([b], lr=0.1))
    again = copy.deepcopy(pair)
    assert [len(g["params"]) for g in again.param_groups] == [1, 1]
    assert again.param_groups[0] is again.parts[0].param_groups[0]
    with pytest.raises(SplitError, match=r"pair\.parts"):
        pair.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
