"""The line search in trouble: batches that are not finite, changed settings, parameters that thaw, resumed runs."""

import copy

import pytest
import torch
from _awkward_functions import Reversal
from _toolkit import classes, generator, mlp_split, noise

from splitfg import (
    Backprop,
    BlackBoxTrunk,
    CentralDifference,
    CosineWithWarmup,
    GradientLearner,
    LinearHead,
    LineSearch,
    Split,
    SplitError,
    SplitFG,
)
from splitfg.learners import slope_along
from splitfg.recipes import SGD, Adam

X, Y = noise(32, 5), classes(32, count=3)
SEARCHES = [{}, {"groups": ("*weight",)}]


def learner(optimizer=None, **settings):
    s = mlp_split(5, 6, 4, 3)
    optimizer = (optimizer or Adam(1e-2)).build(s)
    return GradientLearner(s, Backprop(), optimizer, max_norm=None, line_search=LineSearch(**settings))


def stepped(made, count):
    return [made.step(X, Y, generator=generator()) for _ in range(count)]


def weights(made):
    return {n: p.detach().clone() for n, p in made.split.model.named_parameters()}


@pytest.mark.parametrize("settings", SEARCHES)
@pytest.mark.parametrize("steps", [0, 14])
def test_a_batch_that_is_not_finite_leaves_network_and_search_as_they_are(settings, steps):
    made = learner(**settings)
    stepped(made, steps)
    bad, start = X.clone(), weights(made)
    known = {n: v.clone() for n, v in made.line_search.state_dict().items()}
    bad[0, 0] = float("nan")
    for _ in range(2):
        with pytest.raises(SplitError, match="not finite"):
            made.step(bad, Y, generator=generator())
    assert all(torch.equal(p, start[n]) for n, p in weights(made).items())
    for name, value in known.items():
        assert torch.equal(made.line_search.state_dict()[name], value)
    before = float(stepped(made, 1)[0].loss)
    assert float(stepped(made, 5)[-1].loss) < before


def test_a_parameters_path_begins_when_it_thaws():
    made = learner()
    layer = made.split.trunk[0]
    layer.requires_grad_(False)
    stepped(made, 3)
    layer.requires_grad_(True)
    with torch.no_grad():
        layer.weight.add_(1.0)
    before = weights(made)
    stepped(made, 3)
    assert torch.equal(made.line_search.state_dict()["start/trunk.0.weight"], before["trunk.0.weight"])
    moved = [n for n, p in weights(made).items() if not torch.equal(p, before[n])]
    assert {"trunk.0.weight", "trunk.2.weight"} <= set(moved)


def test_a_checkpoint_of_other_groups_raises():
    first = learner(groups=("*weight",))
    stepped(first, 2)
    for other in ((), ("*bias",)):
        with pytest.raises(SplitError, match="line search has other groups: resume with its groups, or train anew"):
            learner(groups=other).load_state_dict(first.state_dict())


def test_a_group_that_thaws_raises():
    made = learner(groups=("*0*",))
    made.split.trunk[2].requires_grad_(False)
    stepped(made, 1)
    made.split.trunk[2].requires_grad_(True)
    with pytest.raises(SplitError, match="2 groups of parameters, its state 1, as after a group was frozen or unfro"):
        stepped(made, 1)


def test_a_search_follows_one_network():
    """The path of another one starts elsewhere: its parameters would jump."""
    first = learner()
    stepped(first, 2)
    s = mlp_split(5, 6, 4, 3)
    other = GradientLearner(s, Backprop(), Adam(1e-2).build(s), line_search=first.line_search)
    with pytest.raises(SplitError, match="path of another network: make a new LineSearch"):
        stepped(other, 1)
    copied = copy.deepcopy(first)
    stepped(copied, 1)
    first.line_search.load_state_dict(copied.line_search.state_dict())
    stepped(first, 1)


def test_a_checkpoint_of_an_earlier_version_raises():
    with pytest.raises(SplitError, match="is of an earlier version: train anew"):
        LineSearch().load_state_dict({"rho": torch.ones(1), "descent": torch.ones(1)})


def test_patterns_as_one_text_raise():
    with pytest.raises(SplitError, match=r"groups is '\*weight': give a tuple of patterns, \('\*weight',\)"):
        LineSearch(groups="*weight")


def test_a_trunk_without_trained_parameters_raises():
    made = learner(SGD(0.1))
    made.split.trunk.requires_grad_(False)
    with pytest.raises(SplitError, match="no trained parameter of its own"):
        stepped(made, 1)


def test_rho_of_a_half_precision_trunk_is_a_float():
    """Changes of rho are smaller than the steps between numbers of bfloat16."""
    made = learner()
    made.split.model.bfloat16()
    made.line_search._prepared(made.split)
    assert made.line_search.rho.dtype == torch.float32


@pytest.mark.parametrize("settings", SEARCHES)
def test_resumed_training_is_the_same_bit_for_bit(settings):
    def made():
        s = mlp_split(5, 6, 4, 3)
        schedule = CosineWithWarmup(30, 3)
        return GradientLearner(
            s, Backprop(), Adam(1e-2).build(s), schedule=schedule, line_search=LineSearch(**settings)
        )

    whole, begun, resumed = made(), made(), made()
    stepped(whole, 24)
    stepped(begun, 13)
    resumed.load_state_dict(begun.state_dict())
    stepped(resumed, 11)
    assert torch.equal(whole.line_search.rho, resumed.line_search.rho)
    expected = weights(resumed)
    assert all(torch.equal(p, expected[n]) for n, p in weights(whole).items())


def test_a_trunk_that_always_climbs_stops_at_the_least_rho():
    made = learner(start=2e-4)
    for _ in range(60):
        made.fill_grads(X, Y, generator=generator())
        for p in made.split.trunk.parameters():
            p.grad.neg_()
        with made.around_step(1.0):
            made.update.optimizer.optimizer.step()
    assert made.line_search.rho.item() == pytest.approx(1e-4)


def test_a_descent_whose_square_is_not_finite_is_no_measurement():
    made = learner()
    made.split.model.float()
    search = made.line_search
    search._prepared(made.split)
    search._growth(torch.tensor([1.0]))
    before = {n: v.clone() for n, v in search.state_dict().items()}
    assert search._growth(torch.tensor([3e19])) == 0
    assert all(torch.equal(v, before[n]) for n, v in search.state_dict().items())


class TestTrunksThatForwardModeCannotSee:
    def test_a_black_box_raises_with_the_cure(self):
        made = black_box(LineSearch())
        with pytest.raises(SplitError, match="cannot see into a BlackBoxTrunk: use engine=CentralDifference"):
            made.step(X, Y, generator=generator())

    def test_a_black_box_learns_rho_by_differences(self):
        made = black_box(LineSearch(engine=CentralDifference()))
        for step in range(4):
            made.step(X, Y, generator=generator(step))
        known = made.line_search.state_dict()
        ((name, w),) = made.split.trunk_params().items()
        path = {name: w.detach() - known[f"start/{name}"]}
        descent = slope_along(made.split, X, Y, path, engine=CentralDifference()).descent
        open_w = w.detach().clone().requires_grad_(True)
        loss = made.split.head.loss(made.split.head.params(), torch.tanh(X @ open_w.T), Y, torch.tensor(len(X)))
        (g,) = torch.autograd.grad(loss, open_w)
        torch.testing.assert_close(descent, -(g * path[name]).sum(), rtol=1e-4, atol=1e-9)
        assert made.line_search.rho != 0.3

    def test_a_wrong_derivative_is_found(self):
        s = Split(WrongDerivative(), LinearHead(torch.nn.Linear(6, 3, dtype=X.dtype)))
        made = GradientLearner(s, Backprop(), SGD(0.1).build(s), line_search=LineSearch())
        with pytest.raises(SplitError, match="backward of Reversal is not the transpose of its jvp"):
            made.step(X, Y, generator=generator())


def black_box(search):
    def device(params, x):
        return torch.from_numpy(torch.tanh(x @ params["w"].T).detach().numpy().copy())

    s = Split(BlackBoxTrunk(device, {"w": noise(6, 5, seed=3)}), LinearHead(torch.nn.Linear(6, 3, dtype=X.dtype)))
    return GradientLearner(s, SplitFG(K=2, engine=CentralDifference()), SGD(0.1).build(s), line_search=search)


class WrongDerivative(torch.nn.Module):
    """Forward and reverse mode disagree on it."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 6, dtype=X.dtype)

    def forward(self, x):
        return torch.tanh(Reversal.apply(self.layer(x)))
