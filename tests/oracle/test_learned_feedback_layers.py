"""Which layers learned feedback finds, and how a user chooses among them."""

import pytest
import torch
from torch import nn

from splitfg import FrozenTrunk, LearnedFeedback, SplitError, SplitFG, split


def network():
    torch.manual_seed(0)
    trunk = [nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh()]
    return split(nn.Sequential(*trunk, nn.Linear(5, 3))), torch.randn(16, 4), torch.arange(16) % 3


def estimate_of(estimator):
    s, x, y = network()
    return estimator(s, x, y, generator=torch.Generator().manual_seed(0)).grads


def test_layers_are_listed_in_order_with_their_maps():
    s, x, _ = network()
    first, second = LearnedFeedback().layers(s, x)
    assert (first.name, first.kind, first.reads, first.writes, first.mapped) == ("0", "Linear", (16, 4), (16, 6), False)
    assert (second.name, second.mapped) == ("2", True)
    assert str(second) == "2 (Linear): (16, 6) -> (16, 5), map"


@pytest.mark.filterwarnings("ignore:learned feedback does not reach")
def test_only_chosen_parameters_learn_and_as_before():
    whole, part = estimate_of(LearnedFeedback()), estimate_of(LearnedFeedback(only=("2.*", "3.bias")))
    head = {"5.weight", "5.bias"}
    assert set(part) == {"2.weight", "2.bias", "3.bias"} | head
    assert all(torch.equal(part[name], whole[name]) for name in part)


def test_the_others_are_listed_once_or_left_to_another_estimator():
    with pytest.warns(UserWarning, match=r"does not reach 0\.weight, 0\.bias, 3\.weight, 3\.bias,"):
        estimate_of(LearnedFeedback(only=("2.*",)))
    mixed = estimate_of(LearnedFeedback(only=["2.*", "3.*"], rest=SplitFG(K=4)))
    assert set(mixed) == set(estimate_of(LearnedFeedback()))
    frozen = estimate_of(LearnedFeedback(only=["2.*", "3.*"], rest=FrozenTrunk()))
    assert set(mixed) - set(frozen) == {"0.weight", "0.bias"}


def test_patterns_that_match_nothing_raise():
    with pytest.raises(SplitError, match=r"'layer\.\*' matches no trained parameter of the trunk, which has 0\.weight"):
        estimate_of(LearnedFeedback(only=("2.*", "layer.*")))
    with pytest.raises(SplitError, match=r"only=\('2\.weight',\)"):
        LearnedFeedback(only="2.weight")
