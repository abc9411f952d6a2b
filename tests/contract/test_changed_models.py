"""Models that change after their split, and passes with effects of their own: followed exactly, or an error."""

from dataclasses import replace

import pytest
import torch
from _toolkit import DOUBLE, classes, exact, generator, noise, seeded
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm

from splitfg import (
    Backprop,
    BlackBoxTrunk,
    CentralDifference,
    ForwardMode,
    FrozenTrunk,
    GradientLearner,
    LinearHead,
    ReverseModeHead,
    Split,
    SplitError,
    SplitFG,
    split,
)
from splitfg.heads import ProbedHead
from splitfg.learners import CapturedLearner
from splitfg.recipes import SGD

X, Y = noise(9, 4), classes(9, count=3)


def network():
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))).double()


def estimated(s, estimator=None):
    return (estimator or SplitFG(K=2))(s, X, Y, generator=generator())


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, h):
        return self.layer(F.dropout(h, 0.5, self.training))


@pytest.mark.parametrize("head", [ProbedHead, ReverseModeHead])
def test_a_head_that_draws_random_numbers_raises(head):
    s = Split(nn.Linear(4, 5).double(), head(Dropping().double()))
    s.model.train()
    state = torch.get_rng_state()
    with pytest.raises(SplitError, match=r"the head draws random numbers, as F\.dropout does"):
        estimated(s)
    assert torch.equal(state, torch.get_rng_state())
    s.model.eval()
    estimated(s)


@pytest.mark.parametrize("estimator", [Backprop(), SplitFG(K=3), SplitFG(K=3, engine=CentralDifference())])
def test_a_cache_of_parametrized_weights_changes_nothing(estimator):
    model = network()
    weight_norm(model[0])
    s = split(model)
    expected = estimated(s, estimator)
    for _ in range(2):
        with parametrize.cached():
            found = estimated(s, estimator)
        for name, g in expected.grads.items():
            torch.testing.assert_close(found.grads[name], g)
    if isinstance(estimator, Backprop):
        assert expected.grads["0.parametrizations.weight.original1"].norm() > 0


class Sums(nn.Module):
    """A linear layer that adds its inputs to a tensor which is no buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.total = nn.Linear(4, 5), torch.zeros(4, dtype=DOUBLE)

    def forward(self, x):
        self.total.add_(x.detach().sum(0))
        return self.layer(x)


def test_writes_to_a_tensor_that_is_no_buffer_raise_in_every_step():
    model = network()
    model[0] = seeded(Sums).double()
    s = split(model)
    for _ in range(2):
        with pytest.raises(SplitError, match=r"writes in place to 'total' of 0 \(Sums\)"):
            estimated(s)
        assert not model[0].total.any()


def pruned(model):
    prune.l1_unstructured(model[0], "weight", 0.5)


def another_output(model):
    model[2] = nn.Linear(5, 3).double()


def another_activation(model):
    model[1].register_parameter("slope", nn.Parameter(torch.ones(1, dtype=DOUBLE)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (pruned, "added, replaced, renamed or untied since the model was split: split it again"),
        (another_output, "split it again"),
        (another_activation, "split it again"),
    ],
)
def test_parameters_that_change_after_the_split_raise(change, words):
    model = network()
    s = split(model)
    estimated(s)
    change(model)
    with pytest.raises(SplitError, match=words):
        estimated(s)


def test_a_pruned_model_is_split_again():
    model = network()
    pruned(model)
    s = split(model)
    assert "0.weight_orig" in estimated(s).grads


def test_parameters_that_are_registered_anew_are_followed():
    model = network()
    s = split(model)
    estimated(s)
    model.load_state_dict(network().state_dict(), assign=True)
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    grads, expected = estimated(s, Backprop()).grads, exact(s, X, Y)
    for name, g in grads.items():
        torch.testing.assert_close(g, expected[name])


def test_a_norm_that_is_inserted_later_leaves_its_statistics_to_write_grads():
    model = network()
    s = Split(model[:2], LinearHead(model[2]))
    estimated(s)
    s.trunk[1] = nn.Sequential(nn.BatchNorm1d(5, affine=False).double(), nn.Tanh())
    s.model.train()
    for estimator in (FrozenTrunk(), SplitFG(K=2, engine=CentralDifference())):
        estimated(s, estimator)
        assert s.trunk[1][0].num_batches_tracked == 0


def test_dropout_that_is_raised_later_draws_one_mask_a_step():
    """Tangents in chunks meet the same mask, and torch's own generator stays as it is."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.0), nn.Linear(5, 3))).double()
    s = split(model)
    s.model.train()
    estimated(s)
    model[1].p = 0.5
    state = torch.get_rng_state()
    whole, chunked = (estimated(s, SplitFG(K=4, engine=ForwardMode(chunk))) for chunk in (None, 1))
    for name, g in whole.grads.items():
        torch.testing.assert_close(chunked.grads[name], g)
    assert torch.equal(state, torch.get_rng_state())


def test_no_trained_parameter_raises():
    model = network()
    s = split(model)
    model.requires_grad_(False)
    with pytest.raises(SplitError, match="no parameter requires a gradient"):
        estimated(s)


def test_probed_heads_are_biased():
    s = Split(nn.Linear(4, 5).double(), ProbedHead(nn.Linear(5, 3).double()))
    for estimator in (SplitFG(K=2), FrozenTrunk()):
        assert estimated(s, estimator).stats.biased
    assert not estimated(split(network())).stats.biased


def test_a_black_box_may_write_to_its_inputs():
    def run(params, x):
        return x.mul_(2.0) @ params["w"]

    s = Split(BlackBoxTrunk(run, {"w": noise(4, 5)}), LinearHead(nn.Linear(5, 3).double()))
    before = X.clone()
    first = estimated(s, SplitFG(K=2, engine=CentralDifference()))
    assert torch.equal(X, before)
    torch.testing.assert_close(estimated(s, FrozenTrunk()).loss, first.loss)


class Centred(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, 5)

    def forward(self, h):
        return self.layer(h - h.mean(0))


@pytest.mark.parametrize("estimator", [SplitFG(K=2, micro_batch=3), Backprop(micro_batch=3)])
def test_rows_that_mix_are_not_divided(estimator):
    mixing, plain = Centred(4).double(), nn.Linear(4, 5).double()
    for trunk, head, words in (
        (mixing, LinearHead(nn.Linear(5, 3).double()), "the trunk mixes the rows"),
        (plain, ReverseModeHead(Centred(5).double()), "the head mixes the rows"),
    ):
        with pytest.raises(SplitError, match=f"{words} .* pass micro_batch=None"):
            estimated(Split(trunk, head), estimator)
        estimated(Split(trunk, head), replace(estimator, micro_batch=None))


def test_a_probed_head_that_mixes_rows_raises():
    s = Split(nn.Linear(4, 5).double(), ProbedHead(Centred(5).double()))
    with pytest.raises(SplitError, match=r"the head mixes the rows .* use ReverseModeHead"):
        estimated(s)


@pytest.mark.parametrize("late", [True, False])
def test_hooks_that_change_a_linear_heads_outputs_raise(late):
    s = Split(nn.Linear(4, 5).double(), LinearHead(nn.Linear(5, 3).double()))
    if late:
        estimated(s)
    layer, seen = s.head.layers[0], []
    layer.register_forward_hook(lambda _m, _a, z: seen.append(z.shape))
    estimated(s)
    assert seen
    layer.register_forward_hook(lambda _m, _a, z: 2 * z)
    with pytest.raises(SplitError, match="a hook changes the outputs of the head"):
        estimated(s)


def test_steps_of_another_mode_or_with_other_trained_parameters_are_other_graphs():
    model = network()
    s = split(model)
    learner = CapturedLearner(GradientLearner(s, SplitFG(K=2), SGD(0.1).build(s)), horizon=9, compile_=None)
    g, kinds = generator(), []
    for change in (lambda: None, lambda: None, model.eval, lambda: model[0].bias.requires_grad_(False), model.train):
        change()
        learner.step(X, Y, generator=g)
        kinds.append(learner._kind)
    assert len(learner._replays) == len(set(kinds)) == 4
